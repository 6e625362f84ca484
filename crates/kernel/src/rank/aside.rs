//! Beliefs that are set aside: they count for nothing, and come back only on proof that nothing of
//! them was dropped. vLLM does not announce a hit again, so a belief that was destroyed without
//! need is gone for as long as the engine keeps the block.
//!
//! What brings them back: an action whose verdict is `preserved`; an action that the engine
//! declined, once a marker came back with no clear before it (a clear is published with the step
//! that the marker causes; vLLM 0.32.0, read); a worker that vanished and is the same process, on
//! the same history.
//!
//! Invariant: a tier on which an earlier fence is still closed is not set aside but demoted. A
//! tier that is aside takes in every store, so one that an earlier action overtook would come back
//! with it.

use alloc::vec::Vec;

use super::{Effect, Note, Rank};
use crate::vocab::{Belief, Disposition, LossCause, PerTier, TierSet};

impl Rank {
    /// Sets aside what an action may touch.
    pub(super) fn set_aside_for_action(&mut self, tiers: TierSet, out: &mut Vec<Effect>) {
        let aside = tiers.without(self.fence.closed()).without(self.lost);
        let dropped = tiers.without(aside).without(self.fence.aside);
        self.demote(dropped, Belief::Unknown, LossCause::OwnAction, out);
        self.set_aside(aside, out);
        self.fence.aside = self.fence.aside.with(aside);
    }

    fn set_aside(&self, tiers: TierSet, out: &mut Vec<Effect>) {
        if !tiers.is_empty() {
            out.push(Effect::SetAside { tiers });
        }
    }

    /// What an action left aside, and nothing has to be waited for, counts again.
    pub(super) fn reinstate_preserved(&mut self, kv: PerTier<Disposition>, out: &mut Vec<Effect>) {
        let ready = self.fence.aside.without(kv.demoted()).without(self.fence.unproven);
        self.reinstate(ready, out);
        self.fence.reopen(ready);
    }

    /// A marker came back, and what is still aside is there.
    pub(super) fn reinstate_kept(&mut self, out: &mut Vec<Effect>) {
        if !self.fence.aside.is_empty() {
            self.reinstate(self.fence.aside, out);
            out.push(Effect::Note(Note::Kept));
        }
    }

    fn reinstate(&mut self, tiers: TierSet, out: &mut Vec<Effect>) {
        if !tiers.is_empty() {
            self.fence.forget_aside(tiers);
            out.push(Effect::Reinstate { tiers });
        }
    }

    /// The engine says that it did nothing.
    pub(super) fn declined(&mut self, kept: TierSet, out: &mut Vec<Effect>) {
        let waits = TierSet::ALL.iter().filter(|t| kept.has(*t) && self.fence.aside.has(*t));
        let waits: TierSet = waits.collect();
        let dropped = self.fence.aside.without(waits);
        self.demote(dropped, Belief::Unknown, LossCause::OwnAction, out);
        self.fence.unproven = self.fence.unproven.with(waits);
        self.fence.disannounce(0);
        self.disown(out);
        self.settle(out);
    }

    /// The worker vanished.
    pub(super) fn lost(&mut self, out: &mut Vec<Effect>) {
        if self.fence.is_open() {
            self.set_aside(TierSet::ALL.without(self.lost), out);
            self.lost = TierSet::ALL;
        } else {
            self.demote(TierSet::ALL, Belief::Unknown, LossCause::Doubt, out);
        }
    }

    /// The worker that vanished is back. That it is the same process is the shell's word; that its
    /// stream is still this one, a marker has to show.
    pub(super) fn found(&mut self, out: &mut Vec<Effect>) {
        let tiers = core::mem::replace(&mut self.lost, TierSet::NONE);
        if !tiers.is_empty() {
            out.push(Effect::Reinstate { tiers });
            self.retie(out);
        }
    }

    /// A clear took `tiers`: what was aside of them is gone, what comes after it is not.
    pub(super) fn aside_cleared(&mut self, tiers: TierSet, out: &mut Vec<Effect>) {
        self.fence.forget_aside(tiers);
        let lost = TierSet::ALL.iter().filter(|t| self.lost.has(*t) && tiers.has(*t)).collect();
        self.set_aside(lost, out);
    }

    /// Turns beliefs cold, those that are aside too.
    pub(super) fn demote(
        &mut self,
        tiers: TierSet,
        to: Belief,
        cause: LossCause,
        out: &mut Vec<Effect>,
    ) {
        if !tiers.is_empty() {
            self.fence.forget_aside(tiers);
            self.lost = self.lost.without(tiers);
            out.push(Effect::Demote { tiers, to, cause });
        }
    }
}
