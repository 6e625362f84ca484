//! What differs between engine versions: one table, each row with its source.
//! Invariant: every difference that the simulator shows is a field here, nothing else asks for
//! the version.

use std::str::FromStr;

/// Engine versions that can be simulated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Profile {
    /// vLLM 0.11.0: positional events, no pause, sleep that does not stop the scheduler.
    V0_11,
    /// vLLM 0.19.1: positional events with extra keys, pause in the scheduler, connector left
    /// alone.
    V0_19,
    /// vLLM 0.32.0.
    #[default]
    V0_32,
    /// vLLM 0.32.0 with `clear_connector_cache`, as the rig's `keep_tier.py` adds it.
    KeepTier,
}

impl FromStr for Profile {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "0.11" => Ok(Self::V0_11),
            "0.19" => Ok(Self::V0_19),
            "0.32" => Ok(Self::V0_32),
            "keep-tier" => Ok(Self::KeepTier),
            _ => Err(format!("unknown profile {text:?}: 0.11, 0.19, 0.32 or keep-tier")),
        }
    }
}

/// Layout of an event on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// `[tag, fields…]`, nil for defaults, with this many fields of a store and of a removal.
    Positional {
        /// Fields of `BlockStored`.
        stored: usize,
        /// Fields of `BlockRemoved`.
        removed: usize,
    },
    /// `{"type": tag, …}`, defaults left out.
    Map,
}

/// A version's behaviour. Sources: ENGINE.md, by its tables' version columns.
#[derive(Clone, Copy, Debug)]
pub struct Traits {
    /// What `/version` says.
    pub version: &'static str,
    /// Event layout: map since 0.24.0; `lora_name` 0.14.1, `extra_keys` 0.17.1.
    pub layout: Layout,
    /// Replayed messages carry the topic (since 0.26.0).
    pub replay_topic: bool,
    /// Host-tier stores carry a block size (until 0.19.1).
    pub cpu_event_block_size: bool,
    /// `/pause`, `/resume` and `/is_paused` exist (since 0.12.0).
    pub has_pause: bool,
    /// Sleep takes level 0 and a mode, and pauses the scheduler; `is_sleeping` is also true
    /// when only paused (since 0.17.1).
    pub sleep_pauses: bool,
    /// Pause and sleep clear the connector's tiers (since 0.23.0).
    pub pause_reaches_connector: bool,
    /// A partial wake keeps scheduling off (since 0.24.0).
    pub partial_wake_keeps_paused: bool,
    /// Sleep and wake answer with a body, and validate (since 0.32.0).
    pub control_bodies: bool,
    /// A reset answers `{"success":…}` (since 0.26.0), else nothing.
    pub reset_body: bool,
    /// A reset takes `reset_external` and `reset_running_requests` (since 0.13.0, 0.12.0).
    pub reset_options: bool,
    /// `/kv_event_sources` (since 0.31.0).
    pub has_kv_event_sources: bool,
    /// `/abort_requests` (since 0.26.0).
    pub has_abort_requests: bool,
    /// `/weight_info`, `/update_weight_version` (since 0.27.1).
    pub has_weight_info: bool,
    /// Zero cached tokens are told as 0 (since 0.24.0), else left out.
    pub reports_zero_cached: bool,
    /// `/sleep` and `/pause` take `clear_connector_cache` (no release; proposed).
    pub keep_tier: bool,
    /// Metric families that came with 0.12.0: external cache, sleep state.
    pub metrics_0_12: bool,
    /// With 0.16.0: prompt tokens by source, offload totals.
    pub metrics_0_16: bool,
    /// With 0.24.0 to 0.32.0: offload loads and stores, cached by source, sleep timing.
    pub metrics_0_32: bool,
}

const V0_32: Traits = Traits {
    version: "0.32.0",
    layout: Layout::Map,
    replay_topic: true,
    cpu_event_block_size: false,
    has_pause: true,
    sleep_pauses: true,
    pause_reaches_connector: true,
    partial_wake_keeps_paused: true,
    control_bodies: true,
    reset_body: true,
    reset_options: true,
    has_kv_event_sources: true,
    has_abort_requests: true,
    has_weight_info: true,
    reports_zero_cached: true,
    keep_tier: false,
    metrics_0_12: true,
    metrics_0_16: true,
    metrics_0_32: true,
};

const V0_19: Traits = Traits {
    version: "0.19.1",
    layout: Layout::Positional { stored: 8, removed: 2 },
    replay_topic: false,
    cpu_event_block_size: true,
    pause_reaches_connector: false,
    partial_wake_keeps_paused: false,
    control_bodies: false,
    reset_body: false,
    has_kv_event_sources: false,
    has_abort_requests: false,
    has_weight_info: false,
    reports_zero_cached: false,
    metrics_0_32: false,
    ..V0_32
};

const V0_11: Traits = Traits {
    version: "0.11.0",
    layout: Layout::Positional { stored: 6, removed: 2 },
    has_pause: false,
    sleep_pauses: false,
    reset_options: false,
    metrics_0_12: false,
    metrics_0_16: false,
    ..V0_19
};

impl Profile {
    /// The version's behaviour.
    #[must_use]
    pub fn traits(self) -> &'static Traits {
        match self {
            Self::V0_11 => &V0_11,
            Self::V0_19 => &V0_19,
            Self::V0_32 => &V0_32,
            Self::KeepTier => &const { Traits { keep_tier: true, ..V0_32 } },
        }
    }
}
