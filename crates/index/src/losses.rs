//! Why blocks went, so that a claim that was too high can be explained, and a confirmed hit be
//! checked.
//!
//! Invariant: bounded. A demotion costs O(1), and a removal that was forgotten is never taken for
//! one that did not happen.

use std::collections::VecDeque;

use fak_kernel::vocab::PerTier;
use fak_kernel::{LossCause, Tier};

use crate::key::{DigestMap, HashKey, Key};
use crate::layout::Need;
use crate::rank::Rank;

/// How the news of a loss came.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Origin {
    /// Over the live connection.
    Live,
    /// By a replay.
    Replay,
    /// By no event.
    None,
}

impl Origin {
    const ALL: [Self; 3] = [Self::Live, Self::Replay, Self::None];
}

/// Why a block is no longer believed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loss {
    /// The reason.
    pub cause: LossCause,
    /// How the news of it came.
    pub origin: Origin,
}

impl Loss {
    /// A loss of which no event told.
    #[must_use]
    pub const fn without_event(cause: LossCause) -> Self {
        Self { cause, origin: Origin::None }
    }

    /// Whether something that the engine did, or that happened to it, explains that it holds less
    /// than was believed.
    #[must_use]
    pub const fn is_engines(self) -> bool {
        match self.cause {
            LossCause::Removed | LossCause::Cleared | LossCause::Gap | LossCause::NewLife => true,
            LossCause::OwnAction | LossCause::Doubt => false,
        }
    }

    /// Of several losses the least explains best: the engine's before fak's own, and what the live
    /// connection brought before what a replay brought.
    fn weight(self) -> (bool, Origin, LossCause) {
        (!self.is_engines(), self.origin, self.cause)
    }
}

/// A place and a hash: cache group and tier in one number, so that it is digested at once.
type At = (u64, HashKey);

/// The losses of one rank.
pub(crate) struct Losses {
    /// The change of the last demotion of a tier, by cause and origin; 0 where there was none.
    demoted: PerTier<[[u64; 3]; 6]>,
    /// The last removal of a hash: its change, and why.
    removed: DigestMap<At, (u64, Loss)>,
    /// Every removal, oldest first.
    order: VecDeque<(u64, At)>,
    /// The last change whose removal was forgotten.
    forgotten: u64,
    removals_max: usize,
}

impl Losses {
    pub(crate) fn new(removals_max: usize) -> Self {
        Self {
            demoted: PerTier::all([[0; 3]; 6]),
            removed: DigestMap::default(),
            order: VecDeque::new(),
            forgotten: 0,
            removals_max,
        }
    }

    /// A tier was demoted by the change `at`.
    pub(crate) fn demote(&mut self, tier: Tier, loss: Loss, at: u64) {
        self.demoted.get_mut(tier)[loss.cause as usize][loss.origin as usize] = at;
    }

    /// A hash was removed by the change `at`.
    pub(crate) fn remove(
        &mut self,
        (tier, group): (Tier, u32),
        hash: HashKey,
        loss: Loss,
        at: u64,
    ) {
        let place = (place(tier, group), hash);
        self.removed.insert(place, (at, loss));
        self.order.push_back((at, place));
        while self.order.len() > self.removals_max {
            let Some((change, oldest)) = self.order.pop_front() else { return };
            if self.removed.get(&oldest).is_some_and(|(last, _)| *last == change) {
                self.removed.remove(&oldest);
                self.forgotten = change;
            }
        }
    }

    /// Why a hash was removed since `mark`, if it was.
    pub(crate) fn removal(&self, tier: Tier, group: u32, hash: HashKey, mark: u64) -> Option<Loss> {
        let (change, loss) = self.removed.get(&(place(tier, group), hash))?;
        (*change > mark).then_some(*loss)
    }

    /// Whether every removal since `mark` is remembered.
    pub(crate) fn remembers(&self, mark: u64) -> bool {
        self.forgotten <= mark
    }

    /// Why a tier was demoted since `mark`.
    pub(crate) fn demotions(&self, tier: Tier, mark: u64) -> impl Iterator<Item = Loss> + '_ {
        let last = self.demoted.get(tier);
        let losses = LossCause::ALL
            .iter()
            .flat_map(|cause| Origin::ALL.map(|origin| Loss { cause: *cause, origin }));
        losses.filter(move |loss| last[loss.cause as usize][loss.origin as usize] > mark)
    }
}

fn place(tier: Tier, group: u32) -> u64 {
    u64::from(group) << 2 | tier as u64
}

impl Rank {
    /// Whether the block with `key` may have come after `mark`: a store announced it, or the engine
    /// dropped or lost what it had announced.
    pub(crate) fn may_have_come_since(&self, key: Option<Key>, mark: u64) -> bool {
        let is_announced = key.is_some_and(|key| self.identities.was_announced_since(key, mark));
        let mut demotions = Tier::ALL.iter().flat_map(|tier| self.losses.demotions(*tier, mark));
        is_announced || demotions.any(Loss::is_engines)
    }

    /// Why blocks went that were claimed at `mark`: of those with `keys`, so many of each tier, the
    /// gpu's first. `None` where all of them are there without a break, or nothing tells why.
    pub(crate) fn loss_since(
        &self,
        keys: &[Key],
        claimed: &PerTier<u32>,
        block_size: u32,
        mark: u64,
    ) -> Option<Loss> {
        let mut best: Option<Loss> = None;
        let mut start = 0;
        for tier in Tier::ALL.iter().copied() {
            let blocks = claimed.get(tier).div_ceil(block_size.max(1)) as usize;
            let end = start + blocks;
            if blocks > 0 {
                let losses = self.losses_of(tier, keys, (start, end), block_size, mark);
                best = losses.into_iter().chain(best).min_by_key(|loss| loss.weight());
            }
            start = end;
        }
        best
    }

    /// The keys under which a claim of the blocks from `start` to `end` of a tier was looked up.
    fn claimed_keys<'a>(
        &self,
        tier: Tier,
        keys: &'a [Key],
        (start, end): (usize, usize),
    ) -> impl Iterator<Item = &'a Key> + use<'a> {
        let chunk = self.chunk_blocks(tier).unwrap_or(1).max(1);
        let (first, last) = (start - start % chunk + chunk - 1, end + chunk - 1);
        keys.iter().take(last).skip(first).step_by(chunk)
    }

    /// Why blocks from `start` to `end` are not on a tier without a break since `mark`.
    fn losses_of(
        &self,
        tier: Tier,
        keys: &[Key],
        (start, end): (usize, usize),
        block_size: u32,
        mark: u64,
    ) -> Vec<Loss> {
        let (mut losses, mut is_lost, mut is_told) = (Vec::new(), end > keys.len(), false);
        for (group, layout) in self.layout.announced() {
            let first = match layout.need {
                Need::Whole => start,
                Need::Window(tokens) => {
                    start.max(end.saturating_sub(tokens.div_ceil(block_size.max(1)) as usize))
                }
            };
            for key in self.claimed_keys(tier, keys, (first, end)) {
                if self.presence(tier, group, *key, mark).is_some() {
                    continue;
                }
                is_lost = true;
                let hashes = self.identities.hashes(*key);
                let removed =
                    hashes.filter_map(|hash| self.losses.removal(tier, group, hash, mark));
                losses.extend(removed);
            }
            is_told = true;
        }
        if !is_lost && is_told {
            return losses;
        }
        losses.extend(self.losses.demotions(tier, mark));
        if losses.is_empty() && !self.losses.remembers(mark) {
            // Neither demoted nor contradicted, so it was removed.
            losses.push(Loss::without_event(LossCause::Removed));
        }
        losses
    }
}
