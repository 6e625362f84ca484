//! What state is a worker in, by what was read of it and by what fak held true before?
//!
//! Invariant: two flags and a metric that do not prove a state never yield one that serves.

use super::{Capabilities, Level, Observed, Part, Parts, Pauses, SleepState, State};
use crate::vocab::{Disposition, PerTier, Phase, TierSet};

/// What an observation proves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Seen {
    /// Too little was read.
    Nothing,
    /// No process is there.
    Gone,
    /// Awake, scheduler running.
    Serving,
    /// Memory resident, scheduler stopped.
    Paused,
    /// Memory released, wholly or in part; the level where the metric names it.
    Sleeping(Option<Level>),
    /// One of the two: both flags are true of both, and no metric tells them apart.
    PausedOrSleeping,
    /// In a state that nobody can name, or signals that contradict each other.
    Unnamed,
}

impl Seen {
    /// Reads an observation (ENGINE section 3.3, vLLM 0.32.0 observed, older ones by source).
    #[must_use]
    pub fn read(observed: &Observed, caps: &Capabilities) -> Self {
        match observed {
            Observed::Nothing => Self::Nothing,
            Observed::Gone => Self::Gone,
            Observed::State(state) => match state.sleep_state {
                Some(SleepState::Unnamed) => Self::Unnamed,
                Some(SleepState::One) => Self::asleep(state, Level::One),
                Some(SleepState::Two) => Self::asleep(state, Level::Two),
                Some(SleepState::Awake) => match Self::by_flags(state, caps) {
                    // Only a pause is both awake by the metric and "sleeping" by the flag, and only
                    // where that flag counts pauses.
                    Self::PausedOrSleeping => Self::Paused,
                    Self::Sleeping(_) => Self::Unnamed,
                    seen => seen,
                },
                None => Self::by_flags(state, caps),
            },
        }
    }

    fn asleep(state: &State, level: Level) -> Self {
        match state.is_sleeping {
            Some(false) => Self::Unnamed,
            Some(true) | None => Self::Sleeping(Some(level)),
        }
    }

    fn by_flags(state: &State, caps: &Capabilities) -> Self {
        let can_pause = caps.pauses != Pauses::Absent;
        match (state.is_paused, state.is_sleeping) {
            (Some(false), Some(false)) => Self::Serving,
            (Some(true), Some(false)) => Self::Paused,
            // Memory asleep under a running scheduler: `/resume` on a sleeper, or a wake in part
            // (0.17.1 to 0.23.0). Requests would run on unmapped memory.
            (Some(false), Some(true)) => Self::Sleeping(None),
            (None, Some(false)) if !can_pause || caps.is_sleeping_counts_pause => Self::Serving,
            (_, Some(true)) if caps.is_sleeping_counts_pause => Self::PausedOrSleeping,
            (_, Some(true)) => Self::Sleeping(None),
            (Some(true), None) => Self::PausedOrSleeping,
            (None, Some(false)) | (Some(false) | None, None) => Self::Nothing,
        }
    }

    /// The phase that this proves by itself; `error` where it proves none.
    #[must_use]
    pub const fn phase(self) -> Phase {
        match self {
            Self::Serving => Phase::Serving,
            Self::Paused => Phase::Paused,
            Self::Sleeping(_) => Phase::Sleeping,
            Self::Nothing | Self::Gone | Self::PausedOrSleeping | Self::Unnamed => Phase::Error,
        }
    }

    /// Whether the weights may have been discarded, by this observation alone.
    pub(super) const fn may_lack_weights(self) -> bool {
        match self {
            Self::Sleeping(Some(Level::One)) | Self::Serving | Self::Paused => false,
            Self::Nothing | Self::Gone => false,
            Self::Sleeping(_) | Self::PausedOrSleeping | Self::Unnamed => true,
        }
    }
}

/// What fak holds true of a worker between two rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Standing {
    /// What the worker is doing.
    pub phase: Phase,
    /// What happened to KV since the worker served last: what a resume and a wake carry on.
    pub since_serving: PerTier<Disposition>,
    /// The tiers that may hold KV of other weights than those loaded. Such a tier must not be
    /// reachable: send only requests whose `cache_salt` carries the weight version.
    pub stale: TierSet,
    /// The parts that are awake. In a phase that does not tell, those that are known to be.
    pub awake: Parts,
    /// A caller woke the weights' memory by name, and so is about to load weights into it. fak's
    /// own wakes never count as this.
    pub takes_weights: bool,
    /// Whether weights are known to be loaded once the engine is awake.
    pub weights_proven: bool,
    /// Its canary was answered otherwise than before, and nobody has woken it or started it anew
    /// since: however awake it looks, it does not serve.
    pub suspect: bool,
}

impl Standing {
    /// A worker that was proven to serve, and of which nothing else happened.
    pub const SERVING: Self = Self {
        phase: Phase::Serving,
        since_serving: PerTier::all(Disposition::Preserved),
        stale: TierSet::NONE,
        awake: Parts::ALL,
        takes_weights: false,
        weights_proven: true,
        suspect: false,
    };

    /// A worker of which nothing was observed yet. Its first observation is a drift.
    pub const UNOBSERVED: Self = Self {
        phase: Phase::Error,
        since_serving: PerTier::all(Disposition::Unknown),
        stale: TierSet::NONE,
        awake: Parts::NONE,
        takes_weights: false,
        weights_proven: true,
        suspect: false,
    };

    /// Whether `seen` is what this standing leads one to expect.
    #[must_use]
    pub fn agrees(&self, seen: Seen) -> bool {
        match seen {
            Seen::Nothing => true,
            Seen::Gone | Seen::Unnamed => self.phase == Phase::Error,
            // An engine that is awake and may not serve yet: its weights or cache are not proven,
            // or its canary speaks against it.
            Seen::Serving => {
                self.phase == Phase::Serving
                    || self.phase == Phase::Waking && self.awake == Parts::ALL
                    || self.phase == Phase::Error && self.suspect
            }
            Seen::Paused => self.phase == Phase::Paused,
            Seen::Sleeping(_) => self.is_asleep(),
            Seen::PausedOrSleeping => self.phase == Phase::Paused || self.is_asleep(),
        }
    }

    /// Whether `seen` calls for a `drift` row: it proves another phase than this one. Silence and
    /// a vanished process do not; the latter is `lost`, once the shell is sure of it.
    #[must_use]
    pub fn has_drifted(&self, seen: Seen) -> bool {
        match seen {
            Seen::Nothing | Seen::Gone => false,
            Seen::PausedOrSleeping => self.phase != Phase::Error && !self.agrees(seen),
            Seen::Serving | Seen::Paused | Seen::Sleeping(_) | Seen::Unnamed => !self.agrees(seen),
        }
    }

    fn is_asleep(&self) -> bool {
        match self.phase {
            Phase::Sleeping => true,
            Phase::Waking => self.awake != Parts::ALL,
            Phase::Serving | Phase::Paused | Phase::Error => false,
        }
    }

    /// The parts that are awake of an engine that is not wholly awake; none, where none is known.
    #[must_use]
    pub fn partly_awake(&self) -> Parts {
        if self.awake.covers(Parts::MEMORY) { Parts::NONE } else { self.awake }
    }

    pub(super) const fn has_weights(&self) -> bool {
        self.awake.covers(Parts::of(Part::Weights))
    }
}
