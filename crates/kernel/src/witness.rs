//! What an action on a worker did to its KV: the decision table of DESIGN section 4, as one pure
//! function.
//!
//! [`plan`] says what may be sent and what goes cold before it leaves; [`judge`] says what was
//! proven once an answer and an observation are in; [`table`] prints both by running them.
//!
//! Invariant: `preserved` and `serving` need an answer *and* an observation that agrees with it. A
//! timeout, a failure, a cut connection or a contradiction proves nothing, whatever was asked.

mod judge;
mod plan;
mod reason;
mod standing;
mod table;
#[cfg(test)]
mod tests;

use crate::vocab::{Action, Disposition, Evidence, PerTier, Phase, Tier, TierSet, vocabulary};

pub use judge::judge;
pub use plan::{Call, Plan, plan};
pub use reason::{Reason, Refusal};
pub use standing::{Seen, Standing};
pub use table::{Cell, PhaseCell, Row, table};

vocabulary! {
    /// What happens to requests in flight when the scheduler stops.
    Mode {
        /// They are aborted. vLLM's own default.
        Abort = "abort",
        /// They run to their end first.
        Wait = "wait",
        /// They are kept, and go on after the resume.
        Keep = "keep",
    }
}

vocabulary! {
    /// How deep a sleep is. Level 0 is a pause under another name and has no value here.
    Level {
        /// Weights go to host memory, KV is discarded.
        One = "1",
        /// Weights and KV are discarded.
        Two = "2",
    }
}

impl Level {
    /// The level that `number` names; `None` for 0 and for what vLLM does not know.
    #[must_use]
    pub const fn from_number(number: u8) -> Option<Self> {
        match number {
            1 => Some(Self::One),
            2 => Some(Self::Two),
            _ => None,
        }
    }
}

vocabulary! {
    /// A resource that `/wake_up` takes back by tag.
    Part {
        /// Model weights.
        Weights = "weights",
        /// KV cache memory.
        KvCache = "kv_cache",
        /// The scheduler. Comes back by itself with the last memory part (since vLLM 0.24.0).
        Scheduling = "scheduling",
    }
}

/// A set of [`Part`]s.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Parts(u8);

impl Parts {
    /// No part. As tags of a wake it means all, as it does to vLLM.
    pub const NONE: Self = Self(0);
    /// Weights and KV memory: an engine that has both is awake.
    pub const MEMORY: Self = Self(0b011);
    /// Every part.
    pub const ALL: Self = Self(0b111);

    /// The set of one part.
    #[must_use]
    pub const fn of(part: Part) -> Self {
        Self(1 << part as u8)
    }

    /// The parts in either set.
    #[must_use]
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// The parts in this set that are not in `other`.
    #[must_use]
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Whether every part of `other` is in this set.
    #[must_use]
    pub const fn covers(self, other: Self) -> bool {
        other.0 & !self.0 == 0
    }

    /// Whether the set holds no part.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The parts in the set.
    pub fn iter(self) -> impl Iterator<Item = Part> {
        Part::ALL.iter().copied().filter(move |part| self.covers(Self::of(*part)))
    }
}

impl FromIterator<Part> for Parts {
    fn from_iter<I: IntoIterator<Item = Part>>(parts: I) -> Self {
        parts.into_iter().fold(Self::NONE, |set, part| set.with(Self::of(part)))
    }
}

vocabulary! {
    /// What the caller can prove about the weights after a wake, against those before the sleep.
    Weights {
        /// Those from before the sleep; where it dropped them, their owner has loaded them again.
        Same = "same",
        /// Others than before the sleep, and their owner has loaded them already.
        Loaded = "loaded",
        /// Others than before the sleep, still to be loaded.
        Changed = "changed",
        /// Nothing. After level 1 that means the same ones: they stayed in host memory.
        Unproven = "unproven",
    }
}

impl Weights {
    /// Whether the caller says that the engine has them: once its memory is awake, nothing is left
    /// to load.
    const fn are_there(self) -> bool {
        matches!(self, Self::Same | Self::Loaded)
    }
}

vocabulary! {
    /// How to put a session's span out of reach.
    Quarantine {
        /// Reset the whole prefix cache, connector included: the span is gone, and every other too.
        Flush = "flush",
        /// Give the session a new `cache_salt`. Nothing is sent to the engine.
        Isolate = "isolate",
    }
}

/// An action and its parameters: asked by fak, or noticed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Move {
    /// Stop the scheduler.
    Pause {
        /// What happens to requests in flight.
        mode: Mode,
        /// Whether the cache is cleared.
        clear: bool,
        /// With `clear`: whether the connector's tiers are spared.
        keep_tier: bool,
    },
    /// Start the scheduler again.
    Resume,
    /// Release memory.
    Sleep {
        /// How deep; `None` where nobody can name the level.
        level: Option<Level>,
        /// What happens to requests in flight.
        mode: Mode,
        /// Whether the connector's tiers are spared.
        keep_tier: bool,
    },
    /// Take memory back.
    Wake {
        /// What to take back; all, where empty.
        tags: Parts,
        /// What is proven of the weights.
        weights: Weights,
    },
    /// Drop the prefix cache.
    Reset {
        /// Whether the connector's tiers are dropped too.
        external: bool,
        /// Whether running requests are preempted, so that they cannot hold blocks.
        running: bool,
    },
    /// Put a session's span out of reach.
    Quarantine(Quarantine),
    /// fak looked at the worker for the first time.
    Join,
    /// A new incarnation appeared. It says nothing of its weights: where their version moved, a
    /// `Weights` follows.
    Restart,
    /// The worker vanished.
    Lost,
    /// One rank's events are missing and replay could not bring them: the verdict on KV is on that
    /// rank.
    Gap,
    /// The weights changed.
    Weights,
    /// The engine is in another state than fak left it in.
    Drift,
    /// `AllBlocksCleared` came that no action of fak's explains.
    ClearUnexplained,
}

impl Move {
    /// The word for the witness row.
    #[must_use]
    pub const fn action(self) -> Action {
        match self {
            Self::Pause { .. } => Action::Pause,
            Self::Resume => Action::Resume,
            Self::Sleep { .. } => Action::Sleep,
            Self::Wake { .. } => Action::Wake,
            Self::Reset { .. } => Action::Reset,
            Self::Quarantine(_) => Action::Quarantine,
            Self::Join => Action::Join,
            Self::Restart => Action::Restart,
            Self::Lost => Action::Lost,
            Self::Gap => Action::Gap,
            Self::Weights => Action::Weights,
            Self::Drift | Self::ClearUnexplained => Action::Drift,
        }
    }
}

/// What is known of a KV connector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Connector {
    /// It drops its tiers when the engine tells it to. Where this is not proven the engine still
    /// reports success: a connector without a reset is counted as reset.
    pub clears: bool,
    /// It keeps its tiers through a sleep with `clear_connector_cache=false`.
    pub keeps: bool,
    /// Its cpu tier lives in the engine's process and dies with it.
    pub in_process: bool,
}

impl Connector {
    /// No connector, or one of which nothing is known.
    pub const UNKNOWN: Self = Self { clears: false, keeps: false, in_process: false };
    /// vLLM's `OffloadingConnector`, the one for which the opt-out was proven (0.32.0, observed).
    pub const OFFLOADING: Self = Self { clears: true, keeps: true, in_process: true };
    /// vLLM's simple CPU offload connector.
    pub const SIMPLE_OFFLOAD: Self = Self { clears: true, keeps: false, in_process: true };
    /// vLLM's `MooncakeStoreConnector`: the store outlives the engine.
    pub const MOONCAKE_STORE: Self = Self { clears: true, keeps: false, in_process: false };

    /// A multi connector: a property holds if it holds for all parts, and for none without parts.
    pub fn multi(parts: impl IntoIterator<Item = Self>) -> Self {
        parts
            .into_iter()
            .reduce(|all, part| Self {
                clears: all.clears && part.clears,
                keeps: all.keeps && part.keeps,
                in_process: all.in_process && part.in_process,
            })
            .unwrap_or(Self::UNKNOWN)
    }
}

vocabulary! {
    /// Which pauses an engine offers.
    Pauses {
        /// No `/pause`: before vLLM 0.12.0, or the control routes are closed.
        Absent = "absent",
        /// Only `abort` can be trusted: `mode` is ignored up to 0.15.1, and in 0.16.0 `is_paused`
        /// does not show a kept pause.
        AbortOnly = "abort_only",
        /// All modes: since 0.17.1.
        Modes = "modes",
    }
}

/// What an engine and its connector were proven to do. The default proves nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Capabilities {
    /// Which pauses it offers.
    pub pauses: Pauses,
    /// `is_sleeping` is true of a paused engine too (since vLLM 0.17.1).
    pub is_sleeping_counts_pause: bool,
    /// `/sleep` and `/pause` declare `clear_connector_cache`. An engine that does not know the
    /// argument answers 200 and evicts anyway.
    pub keep_argument: bool,
    /// Clearing pauses and sleeps reach the connector (since vLLM 0.23.0).
    pub reaches_connector: bool,
    /// `/reset_prefix_cache` knows `reset_external` (since vLLM 0.13.0); `None` where not known.
    pub reset_external: Option<bool>,
    /// The gpu's hash table stands after a sleep, over freed memory (vLLM 0.9.x): a reset belongs
    /// to the wake.
    pub table_survives_sleep: bool,
    /// A wake in part leaves the scheduler stopped, so that weights can be loaded before requests
    /// run on them: not from vLLM 0.17.1 to 0.23.0, where any wake starts it.
    pub staged_wake: bool,
    /// The connector.
    pub connector: Connector,
    /// The tiers that the worker has; gpu is among them whether named or not.
    pub tiers: TierSet,
}

impl Default for Capabilities {
    fn default() -> Self {
        Self {
            pauses: Pauses::Absent,
            is_sleeping_counts_pause: false,
            keep_argument: false,
            reaches_connector: false,
            reset_external: None,
            table_survives_sleep: false,
            staged_wake: false,
            connector: Connector::UNKNOWN,
            tiers: TierSet::GPU,
        }
    }
}

impl Capabilities {
    /// The tiers that the worker has.
    #[must_use]
    pub const fn present(&self) -> TierSet {
        self.tiers.with(TierSet::GPU)
    }

    /// Whether a sleep that spares the connector's tiers is proven to spare them.
    #[must_use]
    pub const fn keeps_tier(&self) -> bool {
        self.keep_argument && self.connector.keeps
    }
}

/// How the call ended. Of a plan with several calls: the first that did not succeed, else the last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Answer {
    /// 2xx, and nothing in the body speaks against it.
    Ok,
    /// 200 with `{"success":…}`, which a reset answers since vLLM 0.26.0.
    Success(bool),
    /// 2xx without a body.
    NoBody,
    /// 2xx so far; the next step is for the weights' owner to load them, which was not seen yet,
    /// and nothing after it was sent.
    AwaitsWeights,
    /// 2xx, and the body names another state or level than the one asked for.
    Mismatch,
    /// The engine turned the call away before it did anything: see [`Answer::from_status`].
    Refused,
    /// 5xx, or a status from which nothing follows.
    Failed,
    /// No answer in time.
    Timeout,
    /// The connection broke before the answer was complete.
    Cut,
    /// fak sent nothing.
    NotSent(Refusal),
    /// No answer was recorded: fak ended between intent and outcome. Also for what was noticed and
    /// never asked.
    Unrecorded,
}

impl Answer {
    /// What follows from a status alone. Only a status that the engine gives before it acts counts
    /// as refused (400 bad parameter, 401 and 403 key, 404 and 405 routes closed, 422 bad body); a
    /// 408 or 429 may come from a proxy in between, and proves nothing.
    #[must_use]
    pub const fn from_status(status: u16) -> Self {
        match status {
            200..=299 => Self::Ok,
            400 | 401 | 403 | 404 | 405 | 422 => Self::Refused,
            _ => Self::Failed,
        }
    }
}

vocabulary! {
    /// What the metric `vllm:engine_sleep_state` says. It records the last level that was asked.
    SleepState {
        /// `awake`: also while paused.
        Awake = "awake",
        /// `weights_offloaded`: level 1.
        One = "weights_offloaded",
        /// `discard_all`: level 2.
        Two = "discard_all",
        /// All zero: level 0 was asked, on an engine awake or asleep.
        Unnamed = "unnamed",
    }
}

/// What was read of the engine after the call. `None` where it could not be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct State {
    /// `/is_paused`.
    pub is_paused: Option<bool>,
    /// `/is_sleeping`.
    pub is_sleeping: Option<bool>,
    /// The sleep state metric.
    pub sleep_state: Option<SleepState>,
    /// Whether a request that matches what was cached before hit the gpu tier since the call, with
    /// no store announced in between.
    pub local_hits: Option<bool>,
    /// Whether such a request hit a connector's tier.
    pub external_hits: Option<bool>,
    /// Whether a fixed prompt was answered as before the sleep; `None` where none was sent, or
    /// where other weights may answer otherwise.
    pub canary: Option<bool>,
    /// Whether requests still ran some time after the call.
    pub still_running: Option<bool>,
    /// What the event streams showed of the clear that the engine owes; `None` where they could
    /// not show it: no live stream, or an engine that takes no requests.
    pub clear: Option<Clear>,
}

impl State {
    /// Nothing could be read.
    pub const UNREAD: Self = Self {
        is_paused: None,
        is_sleeping: None,
        sleep_state: None,
        local_hits: None,
        external_hits: None,
        canary: None,
        still_running: None,
        clear: None,
    };
}

vocabulary! {
    /// What the event streams showed of a clear, up to the store of a request that fak sent after
    /// the call: the engine publishes what it owes before that store.
    Clear {
        /// Every rank published one.
        Seen = "seen",
        /// Some ranks did.
        Partly = "partly",
        /// No rank did.
        Missing = "missing",
        /// The streams are live, and that store did not come in time.
        Untold = "untold",
    }
}

/// What was observed after the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Observed {
    /// Nothing could be read.
    Nothing,
    /// The connection was refused or reset: no process is there any more.
    Gone,
    /// The engine's state.
    State(State),
}

/// What a witness row says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// What the action did to KV, also for tiers that the worker is not known to have.
    pub kv: PerTier<Disposition>,
    /// The tiers that the worker has.
    pub present: TierSet,
    /// The tiers, among those present, whose beliefs go cold: before the call or with this verdict.
    pub demoted: TierSet,
    /// Whether the engine owes the event stream an `AllBlocksCleared` for this action. Told only
    /// where it is certain: a clear of somebody else's must not pass for it.
    pub owes_clear: bool,
    /// What the verdict stands on.
    pub evidence: Evidence,
    /// Why it reads as it does.
    pub reason: Reason,
    /// What fak holds true of the worker from here on.
    pub next: Standing,
}

impl Verdict {
    /// The phase after the action.
    #[must_use]
    pub const fn phase(&self) -> Phase {
        self.next.phase
    }

    /// Whether the worker takes requests after the action.
    #[must_use]
    pub fn serving(&self) -> bool {
        self.next.phase == Phase::Serving
    }

    /// The same, where fak holds beliefs of the tiers `believed` alone: of any other it does not
    /// know that something is preserved.
    #[must_use]
    pub fn believing(mut self, believed: TierSet) -> Self {
        for tier in Tier::ALL.iter().filter(|tier| !believed.has(**tier)) {
            let kv = self.kv.get_mut(*tier);
            if *kv == Disposition::Preserved {
                *kv = Disposition::Unknown;
            }
        }
        self
    }

    /// What the action did to `tier`; `None` for a tier that the worker does not have.
    #[must_use]
    pub fn tier(&self, tier: Tier) -> Option<Disposition> {
        self.present.has(tier).then(|| self.kv.get(tier))
    }
}
