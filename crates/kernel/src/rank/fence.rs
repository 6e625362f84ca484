//! The fence: the point in a rank's stream before which no batch may warm a tier that an action
//! demoted.
//!
//! Where is that point? Not at a sequence number: vLLM hands batches to a publisher thread that
//! numbers them later, so one made before the action can be numbered after its answer. Nor at a
//! clear event: an earlier one, somebody else's, may still be in flight. But the engine's scheduler
//! and its publisher are queues, so order is kept (vLLM 0.32.0, `distributed/kv_events.py` and
//! `v1/core/sched/scheduler.py`, read), and two things show that all older batches are out:
//!
//! - *Two replays in a row, both asked after the outcome, end at the same batch.* The publisher
//!   answers one replay between two looks at its queue; nothing was published between the answers,
//!   so that look found the queue empty. Every batch after that end was made after the outcome.
//!   Needs a quiet moment, which an engine that was just put to sleep offers.
//! - *A marker came back*: the store of a request that fak itself sent after the outcome. Every
//!   batch after it is later. Needs a serving engine, and no replay socket.
//!
//! Invariant: a tier that an intent closed stays closed until one of the two was seen after that
//! action's outcome. What the engine stores between the outcome and that moment stays cold, so
//! admission should open after [`Rank::is_settled`].

use alloc::vec::Vec;

use super::{Effect, Head, Note, Rank, belief_after};
use crate::vocab::{Belief, Disposition, LossCause, PerTier, TierSet};

/// Replays that one search for a quiet moment may take before a marker is asked for.
const ROUNDS_MAX: u8 = 4;
/// Clears that may still come of actions whose outcome does not tell.
const MAYBE_MAX: u32 = 4;

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Fence {
    stage: Stage,
    /// Tiers that no batch may warm.
    closed: TierSet,
    /// The fence opened by replay; the first batch after it still drains what was pending in the
    /// engine.
    drains_next: bool,
    owed: Owed,
    /// Clears that may come of actions whose outcome does not tell whether one will, or of those
    /// whose clears a gap may have swallowed. They are told apart from somebody else's by nothing.
    maybe: u32,
    /// Tiers that are set aside for an action; see `rank/aside.rs`.
    pub(super) aside: TierSet,
    /// Those of them that wait for a marker.
    pub(super) unproven: TierSet,
}

/// What clear events of one batch do, and whose they are.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clears {
    /// What they do to each tier.
    pub(super) fate: PerTier<Option<Belief>>,
    /// How many no action of fak's can explain.
    pub(super) foreign: u32,
    /// How many may be those of an action of fak's, and may not.
    pub(super) ambiguous: u32,
}

impl Clears {
    /// Whether actions of fak's own account for each of them.
    pub(super) fn is_own(self) -> bool {
        self.foreign + self.ambiguous == 0
    }
}

/// The clear events that the engine owes the stream for fak's own actions. Which of those that come
/// are they? Only when the fence has opened and the engine has drained is it sure that they are all
/// in, so until then one that spares the connector's tiers is contested: it may be somebody else's,
/// that spared nothing.
#[derive(Clone, Copy, Debug, Default)]
struct Owed {
    clears: u32,
    seen: u32,
    /// What they do to the connector's tiers, the worst of them where there are several.
    fate: PerTier<Option<Belief>>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Stage {
    #[default]
    Open,
    /// Between an intent and its outcome.
    Acting {
        /// The intent announced a clear.
        announced: bool,
    },
    /// The outcome is known; what was in flight is draining.
    Settling(Settling),
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Settling {
    /// Where the last replay ended: `Some(None)` if it held no batch.
    ended: Option<Option<u64>>,
    rounds: u8,
    marker: Option<u64>,
}

impl Fence {
    pub(super) fn is_open(&self) -> bool {
        self.stage == Stage::Open
    }

    fn is_acting(&self) -> bool {
        matches!(self.stage, Stage::Acting { .. })
    }

    pub(super) fn is_settling(&self) -> bool {
        matches!(self.stage, Stage::Settling(_))
    }

    /// Tiers that the next batch may not warm.
    pub(super) fn closed(&self) -> TierSet {
        self.closed
    }

    /// Whether the end of a barrier replay now running can open the fence.
    pub(super) fn decides_at_end(&self) -> bool {
        matches!(self.stage, Stage::Settling(Settling { ended: Some(_), .. }))
    }

    /// Whether a clear was seen of which it is not sure yet that it was fak's own and spared the
    /// connector's tiers.
    pub(super) fn is_contested(&self) -> bool {
        let spares = TierSet::CONNECTOR.iter().any(|t| self.owed.fate.get(t).is_none());
        (1..=self.owed.clears).contains(&self.owed.seen) && spares
    }

    /// What `clears` clear events do to each tier, and how far fak's own actions account for them.
    pub(super) fn explain(&mut self, clears: u32) -> Clears {
        if clears == 0 {
            return Clears { fate: PerTier::all(None), foreign: 0, ambiguous: 0 };
        }
        let owed = self.owed.clears.saturating_sub(self.owed.seen);
        // Those that come while nothing is owed are not of an action that begins later.
        let counts = self.owed.clears > 0;
        self.owed.seen = if counts { self.owed.seen.saturating_add(clears) } else { 0 };
        let (gone, extra) = (Some(Belief::Gone), clears.saturating_sub(owed));
        if extra == 0 {
            let fate = PerTier { gpu: gone, ..self.owed.fate };
            return Clears { fate, foreign: 0, ambiguous: 0 };
        }
        // One reset may be announced twice (vLLM 0.32.0, v1/hisparse/block_pool.py, read).
        let ambiguous = if self.owed.clears > 0 { extra } else { self.maybe.min(extra) };
        self.maybe = self.maybe.saturating_sub(extra);
        let fate = PerTier { gpu: gone, ..PerTier::all(Some(Belief::Unknown)) };
        Clears { fate, foreign: extra - ambiguous, ambiguous }
    }

    /// The same from before fak began to listen: what an earlier fak left owed may be among them,
    /// and may come later.
    pub(super) fn explain_past(&mut self, clears: u32) -> Clears {
        let maybe = self.maybe;
        let explained = self.explain(clears);
        self.maybe = maybe;
        explained
    }

    /// No clear that comes from here on is fak's own, for all that is known.
    fn forget_owed(&mut self) {
        self.owed = Owed::default();
    }

    /// A clear that was owed may have been lost, and may not.
    pub(super) fn miss_owed(&mut self) {
        let outstanding = self.owed.clears.saturating_sub(self.owed.seen);
        self.maybe = self.maybe.saturating_add(outstanding).min(MAYBE_MAX);
        self.forget_owed();
    }

    /// A clear may come of an action of fak's, or may not.
    pub(super) fn may_owe(&mut self) {
        self.maybe = self.maybe.saturating_add(1).min(MAYBE_MAX);
    }

    /// No action of fak's was on the life of the engine that answers now.
    pub(super) fn forget_maybe(&mut self) {
        self.maybe = 0;
    }

    /// The action under way owes no clear, but for `maybe`.
    pub(super) fn disannounce(&mut self, maybe: u32) {
        if self.stage == (Stage::Acting { announced: true }) {
            // A new life in between has forgotten what was owed.
            self.owed.clears = self.owed.clears.saturating_sub(1);
            self.maybe = self.maybe.saturating_add(maybe).min(MAYBE_MAX);
        }
    }

    /// `tiers` are not aside any more.
    pub(super) fn forget_aside(&mut self, tiers: TierSet) {
        self.aside = self.aside.without(tiers);
        self.unproven = self.unproven.without(tiers);
    }

    /// Nothing that was in flight can warm what is gone of `tiers`: nothing is gone.
    pub(super) fn reopen(&mut self, tiers: TierSet) {
        self.closed = self.closed.without(tiers);
    }

    /// The marker that opens the fence.
    pub(super) fn marker(&self) -> Option<u64> {
        match self.stage {
            Stage::Settling(settling) => settling.marker,
            Stage::Open | Stage::Acting { .. } => None,
        }
    }

    /// Whether the fence waits for this very marker.
    pub(super) fn is_for(&self, marker: u64) -> bool {
        self.marker() == Some(marker)
    }

    /// A later marker is asked for: it proves what an earlier one would have.
    pub(super) fn renew_marker(&mut self, id: u64) {
        if let Stage::Settling(settling) = &mut self.stage {
            settling.marker = settling.marker.map(|_| id);
        }
    }

    /// Another life answers from here on: what was seen of the old one proves nothing.
    pub(super) fn restart(&mut self) {
        self.miss_owed();
        match &mut self.stage {
            Stage::Open => *self = Self { maybe: self.maybe, ..Self::default() },
            Stage::Acting { .. } => {}
            Stage::Settling(settling) => *settling = Settling::default(),
        }
    }

    fn open(&mut self, still_closed: TierSet) {
        self.stage = Stage::Open;
        self.drains_next = true;
        self.closed = still_closed;
    }
}

impl Rank {
    pub(super) fn intent(
        &mut self,
        tiers: TierSet,
        clear: Option<PerTier<Disposition>>,
        out: &mut Vec<Effect>,
    ) {
        if tiers.is_empty() {
            return;
        }
        self.set_aside_for_action(tiers, out);
        self.fence.stage = Stage::Acting { announced: clear.is_some() };
        self.fence.closed = self.fence.closed.with(tiers);
        self.fence.drains_next = false;
        if let Some(kv) = clear {
            self.fence.owed.clears += 1;
            for tier in TierSet::CONNECTOR.iter() {
                let fate = self.fence.owed.fate.get_mut(tier);
                *fate = belief_after(kv.get(tier)).or(*fate);
            }
        }
    }

    pub(super) fn outcome(
        &mut self,
        kv: PerTier<Disposition>,
        clears: bool,
        out: &mut Vec<Effect>,
    ) {
        self.demote_by(kv, LossCause::OwnAction, out);
        self.reinstate_preserved(kv, out);
        if !clears {
            self.fence.disannounce(1);
            self.disown(out);
        }
        let fence = &self.fence;
        if fence.closed.is_empty() && fence.owed.clears == 0 {
            if !fence.is_open() {
                self.fence.open(TierSet::NONE);
                self.fence.drains_next = false;
                out.push(Effect::Note(Note::Settled));
            }
        } else {
            self.settle(out);
        }
    }

    /// A clear that was taken for one of fak's own has turned out not to be.
    pub(super) fn disown(&mut self, out: &mut Vec<Effect>) {
        let Owed { clears, seen, .. } = self.fence.owed;
        if seen > clears {
            out.push(Effect::Note(Note::ClearAmbiguous { clears: seen - clears }));
            self.demote(TierSet::CONNECTOR, Belief::Unknown, LossCause::Cleared, out);
        }
    }

    /// Beliefs are lost to something that is no action of fak's, or not one that is under way.
    pub(super) fn distrust(&mut self, kv: PerTier<Disposition>, out: &mut Vec<Effect>) {
        self.demote_by(kv, LossCause::Doubt, out);
        // The action under way has its outcome, and so its barrier, still to come.
        if !self.fence.is_acting() && !kv.demoted().is_empty() {
            self.settle(out);
        }
    }

    /// Demotes what a verdict does not preserve, and closes the fence on it.
    fn demote_by(&mut self, kv: PerTier<Disposition>, cause: LossCause, out: &mut Vec<Effect>) {
        for to in [Belief::Gone, Belief::Unknown] {
            let fate = |t: &_| belief_after(kv.get(*t)) == Some(to);
            self.demote(TierSet::ALL.iter().filter(fate).collect(), to, cause, out);
        }
        self.fence.closed = self.fence.closed.with(kv.demoted());
    }

    pub(super) fn settle(&mut self, out: &mut Vec<Effect>) {
        self.fence.drains_next = false;
        self.fence.stage = Stage::Settling(Settling::default());
        if self.connected && self.session.is_none() {
            self.seek_barrier(out);
        }
    }

    /// Looks for a quiet moment of the publisher; where there is none to be had, asks for a marker.
    pub(super) fn seek_barrier(&mut self, out: &mut Vec<Effect>) {
        let by_replay = self.can_replay() && self.fence.aside.is_empty();
        let Stage::Settling(settling) = &mut self.fence.stage else { return };
        if by_replay && settling.rounds < ROUNDS_MAX {
            self.ask_replay(0, out);
            return;
        }
        settling.rounds = 0;
        let id = *settling.marker.get_or_insert_with(|| {
            self.next_id += 1;
            self.next_id
        });
        out.push(Effect::Mark { id });
    }

    /// A barrier replay ended at `last`.
    pub(super) fn barrier_ended(&mut self, last: Option<u64>, out: &mut Vec<Effect>) {
        let Stage::Settling(settling) = &mut self.fence.stage else { return };
        // What is aside waits for the engine to take a step, which no replay shows.
        if settling.ended == Some(last) && self.fence.aside.is_empty() {
            // What is pending inside the engine comes with the next batch, the connector's events
            // after the gpu's: those may be of blocks that the action took.
            let connector = self.fence.closed.without(TierSet::GPU);
            self.fence.open(connector);
            out.push(Effect::Note(Note::Settled));
        } else {
            settling.ended = Some(last);
            settling.rounds += 1;
        }
    }

    /// A barrier replay failed: no quiet moment was seen.
    pub(super) fn barrier_failed(&mut self, out: &mut Vec<Effect>) {
        if let Stage::Settling(settling) = &mut self.fence.stage {
            settling.rounds = ROUNDS_MAX;
            self.seek_barrier(out);
        }
    }

    /// A batch was taken: it may be the marker's, or the one that drains the engine.
    pub(super) fn fence_passed_batch(&mut self, head: Head, out: &mut Vec<Effect>) {
        let marked = match self.fence.stage {
            Stage::Settling(settling) => {
                settling.marker.is_some() && settling.marker == head.marker
            }
            Stage::Open | Stage::Acting { .. } => false,
        };
        if marked {
            self.fence.open(TierSet::NONE);
            out.push(Effect::Note(Note::Settled));
        }
        if marked || self.fence.drains_next {
            self.fence.drains_next = false;
            self.fence.closed = TierSet::NONE;
            self.reinstate_kept(out);
            // A clear of fak's own action was in the stream before this point, or it never comes.
            self.fence.forget_owed();
        }
    }
}
