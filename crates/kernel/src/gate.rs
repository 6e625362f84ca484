//! Whether a session's answer may be called warm.
//!
//! Invariant: after a verdict other than `preserved`, and at the start, a tier is shut until a
//! store of the session's own was accepted after it. No lapse of time, no answer and no hit opens
//! it.

use crate::vocab::{Disposition, PerTier, Tier, TierSet};

/// One session's gate, tier by tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct WarmHitGate {
    open: TierSet,
}

impl WarmHitGate {
    /// A gate that nothing has opened.
    #[must_use]
    pub const fn new() -> Self {
        Self { open: TierSet::NONE }
    }

    /// A witness verdict on the worker behind the session: what is not preserved is shut.
    pub fn verdict(&mut self, kv: &PerTier<Disposition>) {
        self.open = self.open.without(kv.demoted());
    }

    /// The session goes on on another worker, where nothing of it is proven.
    pub fn moved(&mut self) {
        self.open = TierSet::NONE;
    }

    /// A store of the session's blocks was accepted behind the fence.
    pub fn store_accepted(&mut self, tier: Tier) {
        self.open = self.open.with(TierSet::of(tier));
    }

    /// Whether hits on `tier` may be called warm.
    #[must_use]
    pub const fn is_open(&self, tier: Tier) -> bool {
        self.open.has(tier)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_fresh_store_opens_and_only_preserved_keeps_open() {
        for tier in Tier::ALL {
            for kv in Disposition::ALL {
                let mut gate = WarmHitGate::new();
                assert!(!gate.is_open(*tier), "unproven at the start");
                gate.verdict(&PerTier::all(Disposition::Preserved));
                assert!(!gate.is_open(*tier), "preserved proves nothing that was not proven");
                gate.store_accepted(*tier);
                assert!(gate.is_open(*tier));
                gate.verdict(&PerTier::all(*kv));
                assert_eq!(gate.is_open(*tier), *kv == Disposition::Preserved);
                gate.store_accepted(*tier);
                assert!(gate.is_open(*tier), "a fresh store opens it again");
                gate.moved();
                assert!(!gate.is_open(*tier));
            }
        }
    }

    #[test]
    fn a_verdict_shuts_its_own_tiers_alone() {
        let mut gate = WarmHitGate::new();
        for tier in Tier::ALL {
            gate.store_accepted(*tier);
        }
        gate.verdict(&PerTier {
            gpu: Disposition::Forgotten,
            ..PerTier::all(Disposition::Preserved)
        });
        assert!(!gate.is_open(Tier::Gpu));
        assert!(gate.is_open(Tier::Cpu) && gate.is_open(Tier::Disk) && gate.is_open(Tier::Remote));
    }
}
