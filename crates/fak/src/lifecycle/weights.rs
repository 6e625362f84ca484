//! Do a worker's weights still have the name that they had?
//!
//! Invariant: after every move that changed the weights, or may have, a worker's
//! [`Weights`](fleet::Weights) are none that it had before in this life: either its version moved,
//! or they have the row of that move as their epoch.

use fak_kernel::witness::{Move, Standing, Weights};

#[cfg(doc)]
use crate::fleet;

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
pub(super) fn noticed(mv: Move, epoch: Option<u64>, seq: u64) -> Option<u64> {
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
