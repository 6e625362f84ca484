//! A hit that the engine reported is evidence like a store.
//!
//! Invariant: a block is put back only where the engine is known to have held it after `since` in
//! that cache group, under the one hash that is known for it, and nothing taken in after `since`
//! took it away. Removals are ordered behind the use, so one that is still on its way takes it.

use fak_kernel::Tier;

use crate::Applied;
use crate::key::Key;
use crate::layout::Need;
use crate::rank::Rank;
use crate::slot::{Placed, Placement, Proof, Unit};

impl Rank {
    /// Puts the blocks with `keys` on the gpu, all of which the engine took from its cache at a
    /// moment after `since`. Gives how many were not there.
    pub(crate) fn confirm(&mut self, keys: &[Key], block_size: u32, since: u64) -> u32 {
        let is_unchanged = self.losses.demotions(Tier::Gpu, since).next().is_none();
        let is_shown = self.layout.announced().all(|(_, group)| group.is_told);
        if !is_unchanged || !is_shown || self.slot(Tier::Gpu).is_aside {
            return 0;
        }
        self.changes += 1;
        let groups: Vec<_> = self.layout.announced().collect();
        let mut confirmed = 0;
        for (i, key) in keys.iter().enumerate() {
            let needing = groups.iter().filter(|(_, group)| {
                i >= keys.len().saturating_sub(hit_width(group.need, block_size, keys.len()))
            });
            let mut is_new = false;
            for (group, _) in needing {
                match self.confirm_block(*group, *key, since) {
                    Some(placed) => is_new |= placed,
                    None => return self.count_confirmed(confirmed),
                }
            }
            confirmed += u32::from(is_new);
        }
        self.count_confirmed(confirmed)
    }

    /// Puts one block into one group; `None` where that would not be proven, or has no room.
    /// Whether it was not there.
    fn confirm_block(&mut self, group: u32, key: Key, since: u64) -> Option<bool> {
        if self.presence(Tier::Gpu, group, key, u64::MAX).is_some() {
            return Some(false);
        }
        // Of several hashes nobody says which one the engine used, and whose removal to wait for.
        let hash = self.identities.only_hash(key)?;
        if !self.losses.remembers(since)
            || self.losses.removal(Tier::Gpu, group, hash, since).is_some()
        {
            return None;
        }
        let (blocks_max, pending_max) = (self.limits.blocks, self.limits.pending);
        let (is_pending, unit, born, proof) = (false, Unit::Block, self.changes, Proof::Use);
        let at = Placement { group, hash, is_pending, unit, born, proof };
        match self.slot_mut(Tier::Gpu).put(&at, blocks_max, pending_max) {
            Placed::New => Some(true),
            Placed::Copy | Placed::Repeat => Some(false),
            Placed::Refused => None,
        }
    }

    fn count_confirmed(&mut self, confirmed: u32) -> u32 {
        self.totals.add(&Applied { confirmed: confirmed.into(), ..Applied::default() });
        confirmed
    }
}

/// Blocks at the end of a hit that a group surely held: a window needs those that the token after
/// the hit attends to (vLLM 0.32.0, `SlidingWindowManager`, read).
fn hit_width(need: Need, block_size: u32, hit: usize) -> usize {
    match need {
        Need::Whole => hit,
        Need::Window(tokens) => tokens.saturating_sub(1).div_ceil(block_size.max(1)) as usize,
    }
}
