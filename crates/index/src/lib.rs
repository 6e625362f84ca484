//! Which rank holds which prefix blocks. Exact: no block is skipped, and nothing is claimed that no
//! event proves.
//!
//! In memory, rebuilt from events. The caller (the single writer of a rank) says when presence may
//! be gained and when it is demoted; what a batch or an action means is not decided here. Readers
//! see a rank between two events.
//!
//! Invariant: a claim counts only blocks with a store accepted after the last demotion and no later
//! removal, as an unbroken run from the prompt's first block, in every announced cache group, on
//! one rank and tier.

mod confirm;
mod event;
mod held;
mod identities;
mod key;
mod layout;
mod losses;
mod parked;
mod rank;
mod retired;
mod slot;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use fak_kernel::vocab::PerTier;
use fak_kernel::{Belief, LossCause, Tier, TierSet};

pub use event::{EngineHash, Extra, ExtraKey, GroupKind, Remove, Store};
pub use held::{Held, HeldReason};
pub use key::{Key, Prompt};
pub use losses::{Loss, Origin};

use held::usable_blocks;
use key::Keys;
use rank::Rank;
use retired::{Piece, Retired};

/// One life of one rank in the index. Never used again for another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RankId(u64);

/// A moment in the history of a rank's beliefs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Mark(u64);

/// What is known of the tiers behind a rank's connector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offload {
    /// Tiers of which nobody announces all removals: that a block was stored there does not prove
    /// that it is there, and that none was stored does not prove that it is not.
    pub estimated: TierSet,
    /// Blocks that the connector stores and loads together; `None` where that is not known.
    pub blocks_per_chunk: Option<u32>,
}

impl Offload {
    /// Nothing is known, so nothing is proven.
    pub const UNKNOWN: Self = Self { estimated: TierSet::CONNECTOR, blocks_per_chunk: None };
    /// Every removal is announced, and each block is stored by itself.
    pub const BY_BLOCK: Self = Self { estimated: TierSet::NONE, blocks_per_chunk: Some(1) };
}

impl Default for Offload {
    fn default() -> Self {
        Self::UNKNOWN
    }
}

/// What is known of a rank beside its events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RankOptions {
    /// Nobody sends this engine a cache salt, or anything but text. Only then do blocks count whose
    /// events cannot show extra keys (layouts before 0.17.1).
    pub assume_unsalted: bool,
    /// What is known of the connector, until [`Index::set_offload`] says more.
    pub offload: Offload,
}

/// Bounds on memory, for each rank where nothing else is said. What does not fit is not claimed,
/// and counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Blocks on one tier, by group.
    pub blocks: usize,
    /// Of those, blocks whose hash names nothing known.
    pub pending: usize,
    /// Hashes whose content is known. Past it the oldest that is on no tier is forgotten.
    pub identities: usize,
    /// Blocks that wait for their parent. Past it the oldest is forgotten.
    pub parked: usize,
    /// Cache groups.
    pub groups: usize,
    /// Removals that are remembered, so that a claim which they overtook can be explained.
    pub losses: usize,
    /// Entries of all ranks that wait for the sweep. Past it demoting frees the oldest itself.
    pub backlog: usize,
}

impl Default for Limits {
    /// Room for a rank with 2 million blocks on each tier: 40 bytes each, and about 100 for each
    /// identity.
    fn default() -> Self {
        Self {
            blocks: 1 << 21,
            pending: 1 << 19,
            identities: 1 << 22,
            parked: 1 << 17,
            groups: 64,
            losses: 1 << 16,
            backlog: 1 << 24,
        }
    }
}

/// Whether what is believed of a rank may still be relied on: whoever writes it may have stopped,
/// and then nothing tells it to stop counting.
pub trait Lease: Send + Sync {
    /// Whether beliefs count now. Asked at each reading, under the rank's lock.
    fn holds(&self) -> bool;
    /// What the rank holds of a prompt is asked for.
    fn asked(&self);
}

/// What an event did, in blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Applied {
    /// On the tier now, and not before.
    pub gained: u64,
    /// Further copies of blocks that were there.
    pub copies: u64,
    /// Announced again, from the root on, while they were there: maybe no further copies.
    pub repeats: u64,
    /// On the gpu again, since the engine used them.
    pub confirmed: u64,
    /// Learnt only: presence might not be gained on that tier.
    pub fenced: u64,
    /// Waiting for their parent.
    pub parked: u64,
    /// Gone from the tier.
    pub removed: u64,
    /// Copies taken away from blocks that are still there.
    pub copies_removed: u64,
    /// Removals of blocks that were not there.
    pub unknown_removals: u64,
    /// Not indexed, or forgotten, for want of room or because the rank's layout has a fault.
    pub dropped: u64,
    /// Announced with another content than before, or after that.
    pub conflicts: u64,
    /// In stores whose lengths contradict each other.
    pub malformed: u64,
}

impl Applied {
    fn add(&mut self, other: &Self) {
        self.gained += other.gained;
        self.copies += other.copies;
        self.repeats += other.repeats;
        self.confirmed += other.confirmed;
        self.fenced += other.fenced;
        self.parked += other.parked;
        self.removed += other.removed;
        self.copies_removed += other.copies_removed;
        self.unknown_removals += other.unknown_removals;
        self.dropped += other.dropped;
        self.conflicts += other.conflicts;
        self.malformed += other.malformed;
    }
}

/// A rank in numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Blocks on each tier, by group.
    pub blocks: PerTier<usize>,
    /// Of those, blocks whose hash names nothing known yet. They count for nothing.
    pub pending: PerTier<usize>,
    /// Blocks that wait for their parent.
    pub parked: usize,
    /// Hashes whose content is known, or known to be contradictory.
    pub identities: usize,
    /// Each announced group and its block size in tokens.
    pub block_sizes: Vec<(u32, u32)>,
    /// Whether its beliefs count for nothing for now.
    pub is_suspended: bool,
    /// The tiers whose blocks count for nothing for now.
    pub aside: TierSet,
    /// What all events did.
    pub totals: Applied,
    /// Entries that wait for the sweep, of all ranks.
    pub backlog: usize,
}

/// The index of a fleet.
pub struct Index {
    keys: Keys,
    limits: Limits,
    ranks: RwLock<BTreeMap<RankId, Arc<RwLock<Rank>>>>,
    ranks_total: AtomicU64,
    retired: Retired,
}

impl Index {
    /// An empty index. `seed` must be random and secret: whoever knows it can make two prompts look
    /// alike.
    #[must_use]
    pub fn new(seed: u64, limits: Limits) -> Self {
        Self {
            keys: Keys { seed },
            limits,
            ranks: RwLock::default(),
            ranks_total: AtomicU64::new(0),
            retired: Retired::default(),
        }
    }

    /// Adds a rank that holds nothing. One that joins a running engine is to be demoted to unknown
    /// at once.
    pub fn add_rank(&self, options: RankOptions) -> RankId {
        let id = RankId(self.ranks_total.fetch_add(1, Ordering::Relaxed));
        let rank = Arc::new(RwLock::new(Rank::new(options, self.limits)));
        self.ranks.write().unwrap_or_else(PoisonError::into_inner).insert(id, rank);
        id
    }

    /// From now on the rank's beliefs count only while `lease` holds.
    pub fn count_while(&self, id: RankId, lease: Arc<dyn Lease>) {
        if let Some(rank) = self.rank(id) {
            write(&rank).lease = Some(lease);
        }
    }

    /// What is known of the rank's connector from now on.
    pub fn set_offload(&self, id: RankId, offload: Offload) {
        if let Some(rank) = self.rank(id) {
            write(&rank).options.offload = offload;
        }
    }

    /// Takes a rank out. O(1): its memory waits for the sweep.
    pub fn remove_rank(&self, id: RankId) {
        let removed = self.ranks.write().unwrap_or_else(PoisonError::into_inner).remove(&id);
        if let Some(rank) = removed {
            let empty = Rank::new(RankOptions::default(), self.limits);
            let retired = std::mem::replace(&mut *write(&rank), empty);
            self.retire([Piece::rank(retired)]);
        }
    }

    /// Takes in a store. Presence is gained on the tiers in `gain` only; what hashes name is learnt
    /// regardless, since a hash names its content whatever the fences say.
    pub fn store(&self, id: RankId, store: &Store, gain: TierSet) -> Applied {
        let Some(rank) = self.rank(id) else { return Applied::default() };
        let digested = self.keys.digest(store);
        write(&rank).store(self.keys, store, &digested, gain)
    }

    /// Takes in a removal: one copy less for each hash. `origin` is how it came.
    pub fn remove(&self, id: RankId, remove: &Remove, origin: Origin) -> Applied {
        let Some(rank) = self.rank(id) else { return Applied::default() };
        let hashes: Vec<_> = remove.hashes.iter().map(|hash| self.keys.hash(hash)).collect();
        write(&rank).remove((remove.tier, remove.group), &hashes, origin)
    }

    /// Turns every belief on `tiers` to gone, or else to unknown, what was set aside too. O(1),
    /// however many there are. `loss` is remembered as the reason.
    pub fn demote(&self, id: RankId, tiers: TierSet, to: Belief, loss: Loss) {
        let Some(rank) = self.rank(id) else { return };
        let pieces = write(&rank).demote(tiers, to, loss);
        self.retire(pieces);
    }

    /// Makes what is on `tiers` count for nothing, O(1): it may be gone. Events are still taken in,
    /// and a store is kept whatever its `gain` says.
    pub fn set_aside(&self, id: RankId, tiers: TierSet) {
        if let Some(rank) = self.rank(id) {
            write(&rank).set_aside(tiers, true);
        }
    }

    /// Makes what was set aside on `tiers` count again, O(1): it is proven that nothing was dropped
    /// but what events told. A tier that was demoted meanwhile stays as it is.
    pub fn reinstate(&self, id: RankId, tiers: TierSet) {
        if let Some(rank) = self.rank(id) {
            write(&rank).set_aside(tiers, false);
        }
    }

    /// Takes in that the engine used the first `tokens` of a prompt from its cache at a moment
    /// after `since`: those blocks are put back on the gpu, unless a removal, a clear or a demotion
    /// was taken in since, or what they are called is not known. Gives how many came back. The
    /// caller answers for it that every event up to `since` was folded and the fence was open.
    pub fn confirm(&self, id: RankId, prompt: &Prompt<'_>, tokens: u32, since: Mark) -> u32 {
        let Some(rank) = self.rank(id) else { return 0 };
        // An adapter's name may come to mean another adapter, with hashes that were not announced.
        if prompt.lora.is_some() {
            return 0;
        }
        let block_size = read(&rank).readable();
        let Ok(block_size) = block_size else { return 0 };
        let mut keys = self.usable_chain(prompt, block_size);
        keys.truncate(tokens.checked_div(block_size).unwrap_or(0) as usize);
        let mut rank = write(&rank);
        if rank.readable() != Ok(block_size) {
            return 0;
        }
        rank.confirm(&keys, block_size, since.0)
    }

    /// Turns what is believed of a prompt's blocks behind its first `used` tokens to unknown, on
    /// every tier: the engine was to hold them, and did not use them. Also of a rank whose beliefs
    /// do not count for now. O(blocks of the prompt).
    pub fn demote_prompt(&self, id: RankId, prompt: &Prompt<'_>, used: u32) {
        let Some(rank) = self.rank(id) else { return };
        let Some(block_size) = read(&rank).layout.block_size() else { return };
        let keys = self.usable_chain(prompt, block_size);
        let first = used.checked_div(block_size).unwrap_or(0) as usize;
        write(&rank).doubt(keys.get(first..).unwrap_or_default());
    }

    /// Makes every belief of the rank count for nothing, until restored. Events are still taken in.
    pub fn suspend(&self, id: RankId) {
        if let Some(rank) = self.rank(id) {
            write(&rank).is_suspended = true;
        }
    }

    /// Makes the rank's beliefs count again.
    pub fn restore(&self, id: RankId) {
        if let Some(rank) = self.rank(id) {
            write(&rank).is_suspended = false;
        }
    }

    /// Forgets what the rank's hashes name, its groups, and whatever it holds under those hashes.
    /// For a new incarnation: before 0.30.0 an engine's hashes have a random seed, so they may come
    /// to mean other content.
    pub fn forget_identities(&self, id: RankId) {
        let Some(rank) = self.rank(id) else { return };
        let pieces = write(&rank).forget_identities();
        self.retire(pieces);
    }

    /// The keys of a prompt's whole blocks.
    #[must_use]
    pub fn chain(&self, prompt: &Prompt<'_>, block_size: u32) -> Vec<Key> {
        self.keys.chain(prompt, block_size)
    }

    /// What the rank holds of a prompt.
    #[must_use]
    pub fn held(&self, id: RankId, prompt: &Prompt<'_>) -> Held {
        match self.rank(id) {
            None => Held::nothing(HeldReason::NoRank, 0),
            Some(rank) => self.held_by(&read(&rank), prompt, &mut Vec::new(), u64::MAX),
        }
    }

    /// What the rank holds of a prompt, and the moment of that.
    #[must_use]
    pub fn held_and_mark(&self, id: RankId, prompt: &Prompt<'_>) -> (Held, Mark) {
        match self.rank(id) {
            None => (Held::nothing(HeldReason::NoRank, 0), Mark(0)),
            Some(rank) => {
                let rank = read(&rank);
                let held = self.held_by(&rank, prompt, &mut Vec::new(), u64::MAX);
                (held, Mark(rank.changes()))
            }
        }
    }

    /// What the rank holds of a prompt without a break since `mark`. A block that was taken away
    /// and stored anew since counts for nothing: if this is less than what was held at `mark`, an
    /// event took some of it.
    #[must_use]
    pub fn held_since(&self, id: RankId, prompt: &Prompt<'_>, mark: Mark) -> Held {
        match self.rank(id) {
            None => Held::nothing(HeldReason::NoRank, 0),
            Some(rank) => self.held_by(&read(&rank), prompt, &mut Vec::new(), mark.0),
        }
    }

    /// Why the rank no longer holds what was claimed of a prompt at `mark`: the loss that explains
    /// it best. `None` where it holds all of it without a break, or nothing that is known tells
    /// why. `claimed` is in tokens.
    #[must_use]
    pub fn loss_since(
        &self,
        id: RankId,
        prompt: &Prompt<'_>,
        mark: Mark,
        claimed: &PerTier<u32>,
    ) -> Option<Loss> {
        // A rank is one life: where it is gone, so is the life.
        let Some(rank) = self.rank(id) else {
            return Some(Loss::without_event(LossCause::NewLife));
        };
        let rank = read(&rank);
        let block_size = rank.layout.block_size().unwrap_or(0);
        let keys = self.usable_chain(prompt, block_size);
        rank.loss_since(&keys, claimed, block_size, mark.0)
    }

    /// Whether an event taken in after `mark` explains that the engine holds a prompt's first block
    /// which was known to be gone then: a store of it, on any tier; or a clear, a gap or another
    /// life, behind which a store of it can be hidden. Without a prompt, which says that the rank
    /// held nothing at all: any change.
    #[must_use]
    pub fn may_have_come_since(&self, id: RankId, prompt: Option<&Prompt<'_>>, mark: Mark) -> bool {
        // A rank is one life: where it is gone, so is the life.
        let Some(rank) = self.rank(id) else { return true };
        let rank = read(&rank);
        let Some(prompt) = prompt else { return rank.changes() > mark.0 };
        let size = rank.layout.block_size().unwrap_or(0);
        let first = prompt.tokens.get(..size as usize).filter(|first| !first.is_empty());
        let chain = first.map(|tokens| self.keys.chain(&Prompt { tokens, ..*prompt }, size));
        rank.may_have_come_since(chain.and_then(|keys| keys.first().copied()), mark.0)
    }

    /// Whether the rank holds any block.
    #[must_use]
    pub fn has_blocks(&self, id: RankId) -> bool {
        self.rank(id).is_some_and(|rank| read(&rank).has_blocks())
    }

    /// What every rank holds of a prompt, by rank.
    #[must_use]
    pub fn held_all(&self, prompt: &Prompt<'_>) -> Vec<(RankId, Held)> {
        let ranks = self.ranks.read().unwrap_or_else(PoisonError::into_inner);
        let ranks: Vec<_> = ranks.iter().map(|(id, rank)| (*id, Arc::clone(rank))).collect();
        let mut chains = Vec::new();
        let held = |(id, rank): (RankId, Arc<RwLock<Rank>>)| {
            (id, self.held_by(&read(&rank), prompt, &mut chains, u64::MAX))
        };
        ranks.into_iter().map(held).collect()
    }

    /// `chains` keeps the prompt's keys by block size, so that ranks of one size share the work.
    fn held_by(
        &self,
        rank: &Rank,
        prompt: &Prompt<'_>,
        chains: &mut Vec<(u32, Vec<Key>)>,
        born_by: u64,
    ) -> Held {
        rank.lease.as_deref().inspect(|lease| lease.asked());
        let block_size = match rank.readable() {
            Ok(block_size) => block_size,
            Err(held) => return held,
        };
        let known = chains.iter().position(|(size, _)| *size == block_size);
        let at = known.unwrap_or_else(|| {
            chains.push((block_size, self.usable_chain(prompt, block_size)));
            chains.len() - 1
        });
        rank.held(&chains[at].1, block_size, born_by)
    }

    fn usable_chain(&self, prompt: &Prompt<'_>, block_size: u32) -> Vec<Key> {
        let blocks = usable_blocks(prompt.tokens.len(), block_size);
        let tokens = &prompt.tokens[..blocks * block_size as usize];
        self.keys.chain(&Prompt { tokens, ..*prompt }, block_size)
    }

    /// What is believed of a block on a tier: proven if any cache group holds it.
    #[must_use]
    pub fn belief(&self, id: RankId, tier: Tier, key: Key) -> Belief {
        self.rank(id).map_or(Belief::Unknown, |rank| read(&rank).belief(tier, key))
    }

    /// The rank in numbers; all zero for a rank that is not there.
    #[must_use]
    pub fn stats(&self, id: RankId) -> Stats {
        let stats = self.rank(id).map(|rank| read(&rank).stats()).unwrap_or_default();
        Stats { backlog: self.retired.entries(), ..stats }
    }

    /// Frees what demoted tiers and removed ranks left, whole tables until at least `budget`
    /// entries are free; gives the number of entries freed. For the background.
    pub fn sweep(&self, budget: usize) -> usize {
        self.retired.sweep(budget)
    }

    fn retire(&self, pieces: impl IntoIterator<Item = Piece>) {
        self.retired.add(pieces, self.limits.backlog);
    }

    fn rank(&self, id: RankId) -> Option<Arc<RwLock<Rank>>> {
        self.ranks.read().unwrap_or_else(PoisonError::into_inner).get(&id).cloned()
    }
}

// Nothing that runs under a rank's lock panics on input, so a poisoned lock is not told apart.

fn read(rank: &RwLock<Rank>) -> RwLockReadGuard<'_, Rank> {
    rank.read().unwrap_or_else(PoisonError::into_inner)
}

fn write(rank: &RwLock<Rank>) -> RwLockWriteGuard<'_, Rank> {
    rank.write().unwrap_or_else(PoisonError::into_inner)
}
