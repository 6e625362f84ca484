//! Has a worker's state moved, or do its signals only disagree?
//!
//! Flags and metric are read one after the other, from front ends that may not agree, and an engine
//! that is just being woken or paused shows parts of two states. Invariant: one look takes no
//! worker out. A verdict needs a second look that says the same, and where neither names a state,
//! several more; until then the worker is sent nothing, and what it holds is in doubt.

use fak_kernel::witness::{Observed, Seen, SleepState};
use serde_json::Value;

use super::owner::Owner;
use super::translate;
use crate::engine::Observation;

/// Looks that may show no state before that is the verdict.
const UNCLEAR_MAX: u32 = 10;

/// What a look showed, for the kernel and for the ledger.
pub(super) type Shown = (Observed, Value);

impl Owner {
    /// What a look shows. Of an engine that cannot sleep a pause is a pause, whatever else its
    /// flags are true of.
    pub(super) fn shown(&self, observation: &Observation) -> Shown {
        let (mut observed, shown) = translate::seen(observation);
        let sleeps = self.told.settings.told().and_then(|settings| settings.sleep_mode);
        if let Observed::State(state) = &mut observed
            && sleeps == Some(false)
        {
            state.sleep_state = state.sleep_state.or(Some(SleepState::Awake));
        }
        (observed, shown)
    }

    /// What is to be noticed as a drift, where this look and those that it takes to be sure show
    /// one.
    pub(super) async fn drifted(&mut self, observation: &Observation) -> Option<Shown> {
        let first = self.shown(observation);
        if !self.has_drifted(&first) {
            let was_unclear = std::mem::take(&mut self.unclear_looks) > 0;
            self.state.is_unclear = false;
            // It is as it was, and nobody knows what it was meanwhile.
            return was_unclear.then_some(first);
        }
        if self.state.standing.phase == fak_kernel::Phase::Error {
            return Some(first);
        }
        let (again, _) = self.worker.engine.observe_and_scrape().await;
        let second = self.shown(&again);
        if !self.has_drifted(&second) {
            self.say_mixed();
            return None;
        }
        let (one, other) = (self.seen(&first), self.seen(&second));
        if names_state(other) && one == other {
            self.unclear_looks = 0;
            self.state.is_unclear = false;
            return Some(second);
        }
        self.say_mixed();
        self.unclear_looks += 1;
        self.state.is_unclear = true;
        if self.unclear_looks < UNCLEAR_MAX {
            return None;
        }
        self.unclear_looks = 0;
        self.state.is_unclear = false;
        Some(second)
    }

    pub(super) fn names_state(&self, shown: &Shown) -> bool {
        names_state(self.seen(shown))
    }

    pub(super) fn seen(&self, shown: &Shown) -> Seen {
        Seen::read(&shown.0, &self.state.capabilities)
    }

    pub(super) fn has_drifted(&self, shown: &Shown) -> bool {
        self.state.standing.has_drifted(self.seen(shown))
    }

    /// Once a life: an engine whose front ends disagree does so at every other look.
    fn say_mixed(&mut self) {
        if !std::mem::replace(&mut self.has_said_mixed, true) {
            let worker = &self.worker.id;
            tracing::warn!(%worker, "its signals are mixed: two looks at its state disagree");
        }
    }
}

/// Whether a look names a state beyond doubt.
fn names_state(seen: Seen) -> bool {
    match seen {
        Seen::Serving | Seen::Paused | Seen::Sleeping(Some(_)) => true,
        Seen::Sleeping(None) | Seen::PausedOrSleeping | Seen::Unnamed => false,
        Seen::Nothing | Seen::Gone => false,
    }
}
