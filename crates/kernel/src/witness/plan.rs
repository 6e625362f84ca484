//! What is sent for an action, what goes cold before it leaves, and what the action may at best do.
//!
//! Invariant: every call is closed data, so that no path and no parameter outside the engine's
//! control routes can be built; and nothing is sent whose effect on this engine is not known.

use alloc::vec::Vec;
use core::fmt;

use super::{
    Capabilities, Level, Mode, Move, Part, Parts, Pauses, Quarantine, Refusal, SleepState,
    Standing, State, Weights,
};
use crate::vocab::{
    Disposition::{self, Forgotten, Preserved, Unknown},
    PerTier, Phase, TierSet,
};

/// One call on an engine's control routes. Parameters are always spelled out where vLLM's default
/// differs from the word (a pause aborts and clears).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Call {
    /// `POST /pause`.
    Pause {
        /// What happens to requests in flight.
        mode: Mode,
        /// Whether the cache is cleared.
        clear_cache: bool,
        /// Whether `clear_connector_cache=false` is sent: only to an engine that declares it.
        spare_connector: bool,
    },
    /// `POST /resume`.
    Resume,
    /// `POST /sleep`.
    Sleep {
        /// How deep.
        level: Level,
        /// What happens to requests in flight.
        mode: Mode,
        /// Whether `clear_connector_cache=false` is sent: only to an engine that declares it.
        spare_connector: bool,
    },
    /// `POST /wake_up`.
    WakeUp {
        /// What to take back; all, where empty.
        tags: Parts,
    },
    /// `POST /collective_rpc` with the method `reload_weights`. Off by default: then the weights'
    /// owner loads them, and the step is done when that was seen.
    Reload,
    /// `POST /reset_prefix_cache`.
    ResetPrefixCache {
        /// `reset_external=true`.
        external: bool,
        /// `reset_running_requests=true`.
        running: bool,
    },
}

impl Call {
    /// The path.
    #[must_use]
    pub const fn path(self) -> &'static str {
        match self {
            Self::Pause { .. } => "/pause",
            Self::Resume => "/resume",
            Self::Sleep { .. } => "/sleep",
            Self::WakeUp { .. } => "/wake_up",
            Self::Reload => "/collective_rpc",
            Self::ResetPrefixCache { .. } => "/reset_prefix_cache",
        }
    }

    /// The query, in order. No value needs escaping.
    #[must_use]
    pub fn query(self) -> Vec<(&'static str, &'static str)> {
        let mut query = Vec::new();
        match self {
            Self::Pause { mode, clear_cache, spare_connector } => {
                query.push(("mode", mode.as_str()));
                query.push(("clear_cache", if clear_cache { "true" } else { "false" }));
                if spare_connector {
                    query.push(("clear_connector_cache", "false"));
                }
            }
            Self::Sleep { level, mode, spare_connector } => {
                query.push(("level", level.as_str()));
                query.push(("mode", mode.as_str()));
                if spare_connector {
                    query.push(("clear_connector_cache", "false"));
                }
            }
            Self::WakeUp { tags } => query.extend(tags.iter().map(|part| ("tags", part.as_str()))),
            Self::ResetPrefixCache { external, running } => {
                if running {
                    query.push(("reset_running_requests", "true"));
                }
                if external {
                    query.push(("reset_external", "true"));
                }
            }
            Self::Resume | Self::Reload => {}
        }
        query
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self == Self::Reload {
            return f.write_str("reload");
        }
        f.write_str(self.path())?;
        for (at, (name, value)) in self.query().into_iter().enumerate() {
            write!(f, "{}{name}={value}", if at == 0 { '?' } else { '&' })?;
        }
        Ok(())
    }
}

/// What to do about an action.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Plan {
    /// Demote, then make the calls in order, up to the first that does not succeed. No calls where
    /// there is nothing to send: a new salt, or what was noticed.
    Send {
        /// The calls.
        calls: Vec<Call>,
        /// The tiers whose beliefs go cold before the first call leaves.
        demote: TierSet,
        /// What the `AllBlocksCleared` stands for that the engine will publish for the calls: the
        /// event itself names no tier. `None` where the engine publishes none.
        clear: Option<PerTier<Disposition>>,
    },
    /// Send nothing and touch no belief.
    Refuse(Refusal),
}

/// What may be sent for `mv` to a worker that stands as `now`.
#[must_use]
pub fn plan(mv: Move, caps: &Capabilities, now: &Standing) -> Plan {
    match refusal(mv, caps, now) {
        Some(refusal) => Plan::Refuse(refusal),
        None => {
            let fates = promise(mv, caps, now, &State::default());
            Plan::Send {
                calls: calls(mv, caps, now),
                demote: fates.demoted(caps.present()),
                clear: clears(mv, caps, now).then(|| fates.resolve(&now.since_serving)),
            }
        }
    }
}

/// Whether the engine publishes a clear for `mv`, once its next step runs.
pub(super) fn clears(mv: Move, caps: &Capabilities, now: &Standing) -> bool {
    match mv {
        Move::Pause { clear, .. } => clear,
        // 0.9.x sleeps without touching the scheduler's table.
        Move::Sleep { level, .. } => level.is_some() && !caps.table_survives_sleep,
        Move::Reset { .. } | Move::Quarantine(Quarantine::Flush) => true,
        Move::Wake { .. } => Wake::of(mv, caps, now).resets,
        _ => false,
    }
}

fn refusal(mv: Move, caps: &Capabilities, now: &Standing) -> Option<Refusal> {
    match mv {
        Move::Pause { .. } if caps.pauses == Pauses::Absent => Some(Refusal::NoPause),
        Move::Pause { mode, .. } if caps.pauses == Pauses::AbortOnly && mode != Mode::Abort => {
            Some(Refusal::ModeNotOffered)
        }
        Move::Pause { clear: true, keep_tier: true, .. } if !caps.keeps_tier() => {
            Some(Refusal::KeepNotProven)
        }
        Move::Pause { .. } if now.phase == Phase::Paused => Some(Refusal::AlreadyPaused),
        Move::Sleep { level: None, .. } => Some(Refusal::LevelMissing),
        Move::Sleep { keep_tier: true, .. } if !caps.keeps_tier() => Some(Refusal::KeepNotProven),
        Move::Pause { .. } | Move::Sleep { .. } => not_awake(now),
        Move::Resume => match now.phase {
            Phase::Serving => Some(Refusal::AlreadyAwake),
            _ => not_awake(now),
        },
        Move::Wake { tags, weights } => match now.phase {
            Phase::Serving => Some(Refusal::AlreadyAwake),
            Phase::Paused => Some(Refusal::OnlyPaused),
            // Of what an engine whose state is not known holds awake, nothing is sure.
            _ if now.phase == Phase::Waking && is_awake(tags, weights, now.awake) => {
                Some(Refusal::AlreadyAwake)
            }
            // Nobody loads into memory that is asleep, neither others nor the same ones again.
            _ if weights.are_there() && !now.weights_proven && !now.has_weights() => {
                Some(Refusal::WeightsAsleep)
            }
            _ => None,
        },
        Move::Reset { .. } | Move::Quarantine(Quarantine::Flush) => {
            let refused = resets_external(mv, caps) && caps.reset_external == Some(false);
            not_awake(now).or(refused.then_some(Refusal::ExternalNotOffered))
        }
        Move::Quarantine(Quarantine::Isolate) => None,
        Move::Join | Move::Restart | Move::Lost | Move::Gap => None,
        Move::Weights | Move::Drift | Move::ClearUnexplained => None,
    }
}

/// Whether a wake of `tags` has nothing to wake. Of an engine that is wholly awake and waits for
/// its weights, only the wake that announces a load of weights has not.
fn is_awake(tags: Parts, weights: Weights, awake: Parts) -> bool {
    let announces = tags == Parts::of(Part::Weights) && weights == Weights::Unproven;
    !tags.is_empty() && awake.covers(tags) && (awake != Parts::ALL || announces)
}

/// Why an engine that does not hold all its memory under a known scheduler cannot be called.
const fn not_awake(now: &Standing) -> Option<Refusal> {
    match now.phase {
        Phase::Serving | Phase::Paused => None,
        Phase::Sleeping => Some(Refusal::AlreadyAsleep),
        Phase::Waking => Some(Refusal::PartlyAwake),
        Phase::Error => Some(Refusal::StateUnknown),
    }
}

fn calls(mv: Move, caps: &Capabilities, now: &Standing) -> Vec<Call> {
    match mv {
        Move::Pause { mode, clear, keep_tier } => {
            let spare_connector = clear && keep_tier;
            [Call::Pause { mode, clear_cache: clear, spare_connector }].into()
        }
        Move::Resume => [Call::Resume].into(),
        Move::Sleep { level: Some(level), mode, keep_tier } => {
            [Call::Sleep { level, mode, spare_connector: keep_tier }].into()
        }
        Move::Wake { tags, .. } => {
            let wake = Wake::of(mv, caps, now);
            let mut calls = Vec::new();
            if wake.staged {
                if !now.has_weights() {
                    calls.push(Call::WakeUp { tags: Parts::of(Part::Weights) });
                }
                calls.push(Call::Reload);
                calls.push(Call::WakeUp { tags: Parts::of(Part::KvCache) });
            } else {
                calls.push(Call::WakeUp { tags: tags_to_send(tags, now) });
                if wake.reloads {
                    calls.push(Call::Reload);
                }
            }
            if wake.resets {
                calls.push(Call::ResetPrefixCache { external: wake.new_weights, running: false });
            }
            calls
        }
        Move::Reset { running, .. } => {
            [Call::ResetPrefixCache { external: resets_external(mv, caps), running }].into()
        }
        Move::Quarantine(Quarantine::Flush) => {
            [Call::ResetPrefixCache { external: resets_external(mv, caps), running: false }].into()
        }
        Move::Sleep { level: None, .. } | Move::Quarantine(Quarantine::Isolate) => Vec::new(),
        Move::Join | Move::Restart | Move::Lost | Move::Gap => Vec::new(),
        Move::Weights | Move::Drift | Move::ClearUnexplained => Vec::new(),
    }
}

/// A tag that is not asleep makes vLLM ignore the whole call (0.32.0, observed), so only those that
/// are asleep are named. A wake of all names none, unless a part is awake: vLLM would take back
/// what it has already (0.32.0, source).
fn tags_to_send(tags: Parts, now: &Standing) -> Parts {
    let is_whole = tags.is_empty() || tags == Parts::ALL;
    if is_whole && now.awake.is_empty() {
        Parts::NONE
    } else if is_whole {
        Parts::MEMORY.without(now.awake)
    } else {
        tags.without(now.awake)
    }
}

/// Whether a reset reaches for the connector's tiers. A flush has to, where there are any: the span
/// may lie there as well.
pub(super) fn resets_external(mv: Move, caps: &Capabilities) -> bool {
    match mv {
        Move::Reset { external, .. } => external,
        Move::Quarantine(Quarantine::Flush) => caps.tiers.without(TierSet::GPU) != TierSet::NONE,
        _ => false,
    }
}

/// What a wake takes beside `/wake_up`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(super) struct Wake {
    /// Both memory parts are back after it.
    pub(super) complete: bool,
    /// The weights are, or may be, others than those that the tiers' KV was made with.
    pub(super) new_weights: bool,
    /// Weights have to be loaded.
    pub(super) reloads: bool,
    /// They are loaded while the KV memory still sleeps: the order that vLLM documents, in which
    /// nothing runs on other weights than those that it will serve with.
    pub(super) staged: bool,
    /// The last call is a reset, whose answer is the answer of the whole.
    pub(super) resets: bool,
}

impl Wake {
    /// Level 1 keeps the weights, so that no proof is asked for; level 2 and a sleep that nobody
    /// can name leave `weights_proven` false. Weights that changed earlier and left a stale tier
    /// force the reset whatever the caller says.
    pub(super) fn of(mv: Move, caps: &Capabilities, now: &Standing) -> Self {
        let Move::Wake { tags, weights } = mv else {
            return Self::default();
        };
        let complete = tags.is_empty() || tags.with(now.awake).covers(Parts::MEMORY);
        let reloads = match weights {
            Weights::Same | Weights::Loaded => false,
            Weights::Changed => true,
            Weights::Unproven => !now.weights_proven,
        };
        let new_weights = reloads || weights == Weights::Loaded || !now.stale.is_empty();
        let resets = complete && (new_weights || caps.table_survives_sleep);
        let reloads = complete && reloads;
        let kv_sleeps = !now.awake.covers(Parts::of(Part::KvCache));
        let staged = reloads && caps.staged_wake && kv_sleeps;
        Self { complete, new_weights, reloads, staged, resets }
    }
}

/// What becomes of one tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// The action decides it.
    Is(Disposition),
    /// The action does not touch it: what was true since the worker served last goes on, and its
    /// beliefs were demoted then if they had to be.
    AsBefore,
}

/// What becomes of each tier. Disk and remote never differ: nothing tells which of a connector's
/// far tiers an action reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fates {
    pub(super) gpu: Fate,
    pub(super) cpu: Fate,
    pub(super) far: Fate,
}

impl Fates {
    pub(super) const fn of(gpu: Disposition, cpu: Disposition, far: Disposition) -> Self {
        Self { gpu: Fate::Is(gpu), cpu: Fate::Is(cpu), far: Fate::Is(far) }
    }

    /// The gpu alone, what the connector holds going on as before.
    pub(super) const fn gpu_alone(gpu: Disposition) -> Self {
        Self { gpu: Fate::Is(gpu), cpu: Fate::AsBefore, far: Fate::AsBefore }
    }

    /// The dispositions, `before` standing in for what goes on.
    pub(super) fn resolve(self, before: &PerTier<Disposition>) -> PerTier<Disposition> {
        let one = |fate, before| match fate {
            Fate::Is(disposition) => disposition,
            Fate::AsBefore => before,
        };
        PerTier {
            gpu: one(self.gpu, before.gpu),
            cpu: one(self.cpu, before.cpu),
            disk: one(self.far, before.disk),
            remote: one(self.far, before.remote),
        }
    }

    /// The tiers that the action demotes: all that it does not leave preserved or alone.
    pub(super) fn demoted(self, present: TierSet) -> TierSet {
        present.without(TierSet::ALL.without(self.resolve(&PerTier::all(Preserved)).demoted()))
    }
}

/// What `mv` does where all goes as asked. `state` matters for what was noticed only.
pub(super) fn promise(mv: Move, caps: &Capabilities, now: &Standing, state: &State) -> Fates {
    let by_connector = |reached| if caps.connector.clears && reached { Forgotten } else { Unknown };
    // DESIGN counts only engines whose pause and sleep reach the connector; one that does not know
    // `reset_external` ignores it and answers success.
    let by_reset = by_connector(caps.reaches_connector && caps.reset_external == Some(true));
    match mv {
        Move::Pause { clear: false, .. } | Move::Quarantine(Quarantine::Isolate) => {
            Fates::of(Preserved, Preserved, Preserved)
        }
        Move::Pause { keep_tier: true, .. }
        | Move::Sleep { level: Some(_), keep_tier: true, .. } => {
            Fates::of(Forgotten, Preserved, Preserved)
        }
        Move::Pause { .. } | Move::Sleep { level: Some(_), .. } => {
            Fates::of(Forgotten, by_connector(caps.reaches_connector), Unknown)
        }
        Move::Resume if now.phase == Phase::Paused && kept(&now.since_serving) => {
            Fates::of(Preserved, Preserved, Preserved)
        }
        Move::Resume | Move::Sleep { level: None, .. } => Fates::of(Unknown, Unknown, Unknown),
        Move::Wake { .. } => {
            let wake = Wake::of(mv, caps, now);
            if wake.complete && wake.new_weights {
                Fates::of(Forgotten, by_reset, Unknown)
            } else {
                Fates::gpu_alone(Unknown)
            }
        }
        Move::Reset { external: false, .. } => Fates::of(Forgotten, Preserved, Preserved),
        Move::Reset { .. } => Fates::of(Forgotten, by_reset, Unknown),
        Move::Quarantine(Quarantine::Flush) => Fates::of(Forgotten, by_reset, Unknown),
        Move::Restart if caps.connector.in_process => Fates::of(Forgotten, Forgotten, Unknown),
        Move::Restart | Move::ClearUnexplained => Fates::of(Forgotten, Unknown, Unknown),
        Move::Join | Move::Drift => match state.sleep_state {
            Some(SleepState::One | SleepState::Two) => Fates::of(Forgotten, Unknown, Unknown),
            Some(SleepState::Awake | SleepState::Unnamed) | None => {
                Fates::of(Unknown, Unknown, Unknown)
            }
        },
        Move::Lost | Move::Gap | Move::Weights => Fates::of(Unknown, Unknown, Unknown),
    }
}

/// Whether nothing but preserving happened since the worker served last.
fn kept(since_serving: &PerTier<Disposition>) -> bool {
    since_serving.demoted().is_empty()
}

/// What a reset leaves where success is denied or not told: with several ranks, the idle ones are
/// wiped all the same (0.32.0, observed).
pub(super) fn unproven_reset(mv: Move, caps: &Capabilities, wake: Wake) -> Fates {
    if wake.new_weights || resets_external(mv, caps) {
        Fates::of(Unknown, Unknown, Unknown)
    } else if wake.resets {
        Fates::gpu_alone(Unknown)
    } else {
        Fates::of(Unknown, Preserved, Preserved)
    }
}

/// What a reset leaves of which it was seen that no rank cleared its cache. A connector's tiers may
/// be wiped all the same (0.32.0, source).
pub(super) fn reset_without_clear(mv: Move, caps: &Capabilities) -> Fates {
    let external = if resets_external(mv, caps) { Unknown } else { Preserved };
    Fates::of(Preserved, external, external)
}
