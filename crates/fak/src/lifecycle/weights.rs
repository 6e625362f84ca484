//! Do a worker's weights still have the name that they had?
//!
//! Invariant: after every move that changed the weights, or may have, a worker's
//! [`Weights`](fleet::Weights) are none that it had before: either its version moved, or they have
//! the row of that move as their epoch. A restart of fak does not make it forget.

use fak_kernel::TierSet;
use fak_kernel::witness::{Move, Parts, Standing, Weights};

use super::owner::Owner;
use super::probe::Look;
use super::version::Versions;
#[cfg(doc)]
use crate::fleet;
use crate::store;

impl Owner {
    /// Takes over, once, what the ledger says of the worker and its engine does not show: one that
    /// dropped its weights in a level 2 sleep reads as awake once it was woken, and one whose tiers
    /// hold KV of other weights as any other. Where the process is another by now, that is noticed
    /// as any restart.
    pub(super) async fn inherit(&mut self) -> Result<(), store::Error> {
        if self.has_inherited {
            return Ok(());
        }
        if let Some(row) = self.last_row().await? {
            let left = row.standing.unwrap_or(store::Standing {
                stale: TierSet::ALL,
                weights_proven: row.serving,
                suspect: false,
                awake: Parts::NONE,
                takes_weights: false,
                weights_epoch: Some(row.seq),
            });
            let store::Standing { stale, weights_proven, suspect, takes_weights, .. } = left;
            let now = self.state.standing;
            // Whether all of it is awake shows; which part of it is does not.
            let is_whole = left.awake.covers(Parts::MEMORY);
            let awake = if is_whole { Parts::NONE } else { left.awake };
            self.state.standing =
                Standing { stale, weights_proven, suspect, takes_weights, awake, ..now };
            self.state.weights_epoch = left.weights_epoch;
            self.state.last_witness = Some(row.seq);
            self.left = Some(row.phase);
            self.state.incarnation = row.incarnation.map(Into::into);
            if let Some(version) = row.weight_version {
                self.state_version(&version);
            }
        }
        self.recall_kv_identity().await?;
        self.has_inherited = true;
        Ok(())
    }

    /// The newest row that says what holds from it on; where none does, the newest, of which the
    /// worst is to be thought.
    async fn last_row(&self) -> Result<Option<store::Row>, store::Error> {
        let (store, worker) = (&self.config.store, &self.worker.id);
        match store.last_standing(worker).await? {
            None => store.last_row(worker).await,
            found => Ok(found),
        }
    }

    /// What a later fak would find of this standing.
    pub(super) fn standing_for_ledger(&self, standing: &Standing) -> store::Standing {
        let Standing { stale, weights_proven, suspect, awake, takes_weights, .. } = *standing;
        let weights_epoch = self.state.weights_epoch;
        store::Standing { stale, weights_proven, suspect, awake, takes_weights, weights_epoch }
    }

    /// Takes in the version that the engine tells.
    pub(super) async fn see_version(&mut self, look: &Look, is_other_life: bool) {
        let Some(told) = &look.weight_version else { return };
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
            self.notice_anyhow(Move::Weights, look).await;
        }
    }

    fn has_tier_that_outlives_a_process(&self) -> bool {
        let caps = &self.state.capabilities;
        !caps.connector.in_process && !caps.present().without(TierSet::GPU).is_empty()
    }

    /// Whether the row of a move that is noticed is the weights' epoch from here on.
    pub(super) fn takes_epoch(&mut self, mv: Move) -> bool {
        match mv {
            // The version moved, and names the weights again.
            Move::Weights => {
                self.state.weights_epoch = None;
                false
            }
            // A new process has the weights that it found, which may be those of any epoch before.
            Move::Restart => self.state.weights_epoch.is_some(),
            _ => false,
        }
    }
}

/// The epoch of weights whose row the database did not take: none that a row or an earlier process
/// named, and one that JSON keeps (below 2^53).
pub(super) fn unnumbered_epoch() -> u64 {
    1 << 52 | fastrand::u64(..1 << 52)
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

#[cfg(test)]
mod tests {
    use super::*;

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
}
