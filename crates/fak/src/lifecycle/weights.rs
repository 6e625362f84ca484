//! Do a worker's weights still have the name that they had?
//!
//! Invariant: after every move that changed the weights, or may have, a worker's
//! [`Weights`](fleet::Weights) are none that it had before: either its version moved, or they have
//! the row of that move as their epoch. A restart of fak does not make it forget.

use fak_kernel::TierSet;
use fak_kernel::witness::{Move, Standing, Weights};
use serde_json::Value;

use super::inherited::{Inherited, NEW_WEIGHTS};
use super::owner::Owner;
use super::probe::Look;
use super::version::Versions;
#[cfg(doc)]
use crate::fleet;
use crate::store;

/// What a worker's owner has of the fak before.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Inheritance {
    /// The ledger was asked.
    is_read: bool,
    /// The weights' epoch is the next row.
    owes_epoch: bool,
    /// The last row was of another process than the first look.
    is_other_life: bool,
}

impl Owner {
    /// Takes over what the ledger says of the worker, before anything else is noticed of it.
    pub(super) async fn inherit(&mut self, look: &Look) -> Result<(), store::Error> {
        if self.inheritance.is_read {
            return Ok(());
        }
        let is_in_process = self.state.capabilities.connector.in_process;
        let (store, life) = (&self.config.store, look.incarnation());
        let read = Inherited::read(store, &self.worker.id, life.as_deref(), is_in_process);
        let Inherited { stale, weights_proven, version, epoch, owes_epoch, is_other_life, .. } =
            read.await?;
        self.state.standing.stale = stale;
        self.state.standing.weights_proven = weights_proven;
        if let Some(version) = version {
            self.state_version(&version);
        }
        self.state.weights_epoch = epoch;
        self.inheritance = Inheritance { is_read: true, owes_epoch, is_other_life };
        Ok(())
    }

    /// Takes in the version that the engine tells.
    pub(super) async fn see_version(
        &mut self,
        look: &Look,
        is_other_life: bool,
    ) -> Result<(), store::Error> {
        let is_other_life = std::mem::take(&mut self.inheritance.is_other_life) || is_other_life;
        let Some(told) = &look.weight_version else { return Ok(()) };
        if is_other_life {
            self.versions = Versions::default();
        }
        let has_moved = self.versions.tell(told);
        let before = self.state.weight_version.take();
        self.state.weight_version = self.versions.current().cloned();
        // A new process says the version that it was started with, and what it found empty holds
        // nothing of another: that is the restart's row. Other tiers may.
        let is_renamed = before.is_some() && before != self.state.weight_version;
        let outlives = is_other_life && is_renamed && self.has_tier_that_outlives_a_process();
        if has_moved || outlives {
            self.notice(Move::Weights, look).await?;
        }
        Ok(())
    }

    fn has_tier_that_outlives_a_process(&self) -> bool {
        let caps = &self.state.capabilities;
        !caps.connector.in_process && !caps.present().without(TierSet::GPU).is_empty()
    }

    /// The epoch after a move that was noticed, whose row is `seq`.
    pub(super) fn follow_weights(&mut self, mv: Move, seq: u64) {
        let owed = std::mem::take(&mut self.inheritance.owes_epoch).then_some(seq);
        self.state.weights_epoch = noticed(mv, owed.or(self.state.weights_epoch), seq);
    }
}

/// Whether nothing was noticed of a worker yet, whatever the ledger left of it.
pub(super) fn is_first(standing: &Standing) -> bool {
    let Standing { stale, weights_proven, .. } = Standing::UNOBSERVED;
    Standing { stale, weights_proven, ..*standing } == Standing::UNOBSERVED
}

/// What was asked, for the ledger, with a mark that a later fak reads.
pub(super) fn marked(mut asked: Value, has_new_weights: bool) -> Value {
    if has_new_weights {
        asked[NEW_WEIGHTS] = true.into();
    }
    asked
}

/// Whether `mv` puts other weights in place of those that a worker of this standing has, or may.
pub(super) fn may_change(mv: Move, before: &Standing) -> bool {
    match mv {
        Move::Weights => true,
        Move::Wake { weights: Weights::Same, .. } => false,
        Move::Wake { weights: Weights::Unproven, .. } => !before.weights_proven,
        Move::Wake { .. } => true,
        _ => false,
    }
}

/// The epoch after a move that was noticed, whose row is `seq`.
fn noticed(mv: Move, epoch: Option<u64>, seq: u64) -> Option<u64> {
    match mv {
        // The version moved, and names the weights again.
        Move::Weights => None,
        // A new process has the weights that it found, which may be those of any epoch before.
        Move::Restart => epoch.map(|_| seq),
        _ => epoch,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fak_kernel::witness::Parts;

    #[test]
    fn a_wake_changes_weights_unless_they_are_the_same_or_were_never_dropped() {
        let wake = |weights| Move::Wake { tags: Parts::NONE, weights };
        let dropped = Standing { weights_proven: false, ..Standing::SERVING };
        for (weights, is_kept, is_dropped) in [
            (Weights::Same, false, false),
            (Weights::Changed, true, true),
            (Weights::Loaded, true, true),
            (Weights::Unproven, false, true),
        ] {
            assert_eq!(may_change(wake(weights), &Standing::SERVING), is_kept, "{weights:?}");
            assert_eq!(may_change(wake(weights), &dropped), is_dropped, "{weights:?}");
        }
        assert!(may_change(Move::Weights, &Standing::SERVING));
        assert!(!may_change(Move::Resume, &dropped));
    }

    #[test]
    fn a_version_that_moved_names_the_weights_and_a_restart_takes_no_old_name() {
        assert_eq!(noticed(Move::Weights, Some(3), 9), None);
        assert_eq!(noticed(Move::Restart, Some(3), 9), Some(9));
        assert_eq!(noticed(Move::Restart, None, 9), None);
        assert_eq!(noticed(Move::Drift, Some(3), 9), Some(3));
    }
}
