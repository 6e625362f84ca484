//! One rank's beliefs: which hashes it holds where, and what they name.
//!
//! Invariant: a block counts only while a store that was allowed to gain presence is not taken
//! back, on a tier that was not demoted since, under a hash whose content is known and was never
//! contradicted.

use fak_kernel::{Belief, Tier, TierSet};

use crate::event::{Extra, Store};
use crate::identities::{Block, Fallout, Identities, Taught, Terms};
use crate::key::{Digested, HashKey, Key, Keys};
use crate::layout::{Group, Layout};
use crate::retired::Piece;
use crate::slot::{Placed, Placement, Presence, Slot, Taken, Unit};
use crate::{Applied, Limits, RankOptions, Stats};

/// One life of one rank, as announced.
pub(crate) struct Rank {
    options: RankOptions,
    limits: Limits,
    pub(crate) is_suspended: bool,
    /// The engine's own cache announced blocks without their extra keys.
    pub(crate) is_unreported: bool,
    pub(crate) layout: Layout,
    pub(crate) identities: Identities,
    slots: [Slot; 4],
    totals: Applied,
    /// Stores taken in, so that a block tells since when it is there.
    changes: u64,
}

impl Rank {
    pub(crate) fn new(options: RankOptions, limits: Limits) -> Self {
        Self {
            options,
            limits,
            is_suspended: false,
            is_unreported: false,
            layout: Layout::default(),
            identities: Identities::default(),
            slots: <[Slot; 4]>::default(),
            totals: Applied::default(),
            changes: 0,
        }
    }

    /// Stores taken in so far.
    pub(crate) fn changes(&self) -> u64 {
        self.changes
    }

    pub(crate) fn store(
        &mut self,
        keys: Keys,
        store: &Store,
        digested: &Digested,
        gain: TierSet,
    ) -> Applied {
        self.changes += 1;
        let mut applied = Applied::default();
        let blocks = u64::try_from(digested.hashes.len()).unwrap_or(u64::MAX);
        if digested.is_malformed {
            if is_sparse(store) {
                self.admit(store);
            }
            applied.malformed = blocks;
        } else if !self.admit(store) {
            applied.dropped = blocks;
        } else {
            self.store_blocks(keys, store, digested, gain, &mut applied);
        }
        if applied.malformed + applied.dropped > 0 {
            // The engine holds blocks that are not in the table.
            self.slot_mut(store.tier).floor = Belief::Unknown;
        }
        self.totals.add(&applied);
        applied
    }

    /// Takes in what the store says of the layout. False where nothing of it may be indexed.
    fn admit(&mut self, store: &Store) -> bool {
        // Connectors announce chunks of their own size, or none: only the engine's own cache tells
        // the layout.
        if store.tier == Tier::Gpu && !store.tokens.is_empty() {
            let group = Group { block_size: store.block_size, need: store.kind.into() };
            self.layout.announce(store.group, group, self.limits.groups);
            self.is_unreported |= !self.teaches(store);
        } else if !self.layout.mention(store.group, self.limits.groups) {
            return false;
        }
        self.layout.fault().is_none()
    }

    /// Whether the store's tokens tell what its hashes name.
    fn teaches(&self, store: &Store) -> bool {
        let is_gpu = store.tier == Tier::Gpu;
        let is_block = is_gpu || self.layout.block_size() == Some(store.block_size);
        match store.extra {
            Extra::PerBlock(_) => is_block,
            Extra::NotReported => is_gpu && self.options.assume_unsalted,
        }
    }

    fn store_blocks(
        &mut self,
        keys: Keys,
        store: &Store,
        digested: &Digested,
        gain: TierSet,
        applied: &mut Applied,
    ) {
        let teaches = self.teaches(store);
        let unit = unit(store);
        let mut parent = digested.parent;
        for (i, hash) in digested.hashes.iter().copied().enumerate() {
            let content = digested.contents.get(i).filter(|_| teaches);
            let taught = content.map(|content| {
                self.learn(keys, Block { hash, parent, content: *content }, applied)
            });
            parent = Some(hash);
            match taught {
                Some(Taught::Conflict) => applied.conflicts += 1,
                Some(Taught::Refused) => applied.dropped += 1,
                None if self.identities.is_poisoned(hash) => applied.conflicts += 1,
                None | Some(Taught::Known | Taught::Parked) if gain.has(store.tier) => {
                    let is_pending = !self.identities.is_known(hash);
                    let born = self.changes;
                    let at = Placement { group: store.group, hash, is_pending, unit, born };
                    self.put(store.tier, &at, applied);
                }
                None | Some(Taught::Known | Taught::Parked) => applied.fenced += 1,
            }
        }
    }

    fn learn(&mut self, keys: Keys, block: Block, applied: &mut Applied) -> Taught {
        let mut fallout = Fallout::default();
        let (slots, layout) = (&self.slots, &self.layout);
        let terms = Terms {
            keys,
            identities_max: self.limits.identities,
            parked_max: self.limits.parked,
            is_live: &|hash| is_live(slots, layout, hash),
        };
        let taught = self.identities.learn(terms, block, &mut fallout);
        applied.parked += u64::from(taught == Taught::Parked);
        applied.dropped += u64::from(fallout.dropped);
        for hash in fallout.settled {
            for slot in &mut self.slots {
                self.layout.ids().for_each(|group| slot.settle(group, hash));
            }
        }
        if taught == Taught::Conflict {
            self.drop_presence(block.hash);
        }
        taught
    }

    fn drop_presence(&mut self, hash: HashKey) {
        for slot in &mut self.slots {
            let erased = self.layout.ids().filter(|group| slot.erase(*group, hash)).count();
            if erased > 0 {
                slot.floor = Belief::Unknown;
            }
        }
    }

    fn put(&mut self, tier: Tier, at: &Placement, applied: &mut Applied) {
        let (blocks_max, pending_max) = (self.limits.blocks, self.limits.pending);
        match self.slot_mut(tier).put(at, blocks_max, pending_max) {
            Placed::New => applied.gained += 1,
            Placed::Copy => applied.copies += 1,
            Placed::Refused => applied.dropped += 1,
        }
    }

    pub(crate) fn remove(&mut self, tier: Tier, group: u32, hashes: &[HashKey]) -> Applied {
        let mut applied = Applied::default();
        for hash in hashes.iter().copied() {
            match self.slot_mut(tier).take(group, hash) {
                Taken::Last => applied.removed += 1,
                Taken::Copy => applied.copies_removed += 1,
                Taken::Unknown => applied.unknown_removals += 1,
            }
            if self.identities.is_parked(hash) && !is_live(&self.slots, &self.layout, hash) {
                self.identities.unpark(hash);
            }
        }
        self.totals.add(&applied);
        applied
    }

    pub(crate) fn demote(&mut self, tiers: TierSet, to: Belief) -> Vec<Piece> {
        // Nothing can be demoted to proven.
        let floor = if to == Belief::Gone { Belief::Gone } else { Belief::Unknown };
        self.layout.demoted(tiers);
        tiers.iter().map(|tier| Piece::slot(self.slot_mut(tier).retire(floor))).collect()
    }

    /// Forgets what hashes name, and with it whatever is on any tier under them.
    pub(crate) fn forget_identities(&mut self) -> Vec<Piece> {
        let retire = |slot: &mut Slot| {
            let floor = if slot.blocks() > 0 { Belief::Unknown } else { slot.floor };
            Piece::slot(slot.retire(floor))
        };
        let mut pieces: Vec<_> = self.slots.iter_mut().map(retire).collect();
        pieces.push(Piece::identities(std::mem::take(&mut self.identities)));
        self.layout = Layout::default();
        self.is_unreported = false;
        pieces
    }

    pub(crate) fn belief(&self, tier: Tier, key: Key) -> Belief {
        if self.is_suspended || self.layout.fault().is_some() {
            return Belief::Unknown;
        }
        let slot = self.slot(tier);
        let presence =
            self.layout.ids().filter_map(|group| self.presence(tier, group, key, u64::MAX)).max();
        let is_known = self.identities.hashes(key).next().is_some();
        match presence {
            Some(Presence::Whole) => Belief::Proven,
            Some(Presence::Chunked) => Belief::Unknown,
            // A hash that names nothing known may name this key.
            None if !is_known && slot.pending() > 0 => Belief::Unknown,
            None => slot.floor,
        }
    }

    /// How a block is there since a change no later than `born_by`, in one group; the best of its
    /// hashes.
    pub(crate) fn presence(
        &self,
        tier: Tier,
        group: u32,
        key: Key,
        born_by: u64,
    ) -> Option<Presence> {
        let (slot, size) = (self.slot(tier), self.layout.block_size());
        let presence = |hash| slot.presence(group, hash, size, born_by);
        self.identities.hashes(key).filter_map(presence).max()
    }

    pub(crate) fn stats(&self) -> Stats {
        let mut stats = Stats {
            parked: self.identities.parked(),
            identities: self.identities.len(),
            block_sizes: self.layout.announced().map(|(id, g)| (id, g.block_size)).collect(),
            is_suspended: self.is_suspended,
            totals: self.totals,
            ..Stats::default()
        };
        for tier in Tier::ALL {
            *stats.blocks.get_mut(*tier) = self.slot(*tier).blocks();
            *stats.pending.get_mut(*tier) = self.slot(*tier).pending();
        }
        stats
    }

    /// Whether any tier holds a block.
    pub(crate) fn has_blocks(&self) -> bool {
        self.slots.iter().any(|slot| slot.blocks() > 0)
    }

    /// Entries in all tables.
    pub(crate) fn weight(&self) -> usize {
        let blocks: usize = self.slots.iter().map(Slot::blocks).sum();
        blocks + self.identities.len() + self.identities.parked()
    }

    fn slot(&self, tier: Tier) -> &Slot {
        let [gpu, cpu, disk, remote] = &self.slots;
        match tier {
            Tier::Gpu => gpu,
            Tier::Cpu => cpu,
            Tier::Disk => disk,
            Tier::Remote => remote,
        }
    }

    fn slot_mut(&mut self, tier: Tier) -> &mut Slot {
        let [gpu, cpu, disk, remote] = &mut self.slots;
        match tier {
            Tier::Gpu => gpu,
            Tier::Cpu => cpu,
            Tier::Disk => disk,
            Tier::Remote => remote,
        }
    }
}

/// vLLM's connectors up to 0.19.1 announce the size of their chunks, as later self-describing ones
/// do; all others announce 0 and one block an event (0.32.0, observed).
fn unit(store: &Store) -> Unit {
    match store.block_size {
        _ if store.tier == Tier::Gpu => Unit::Block,
        0 if store.hashes.len() == 1 => Unit::Block,
        0 => Unit::Chunk,
        tokens => Unit::Tokens(tokens),
    }
}

/// Whether a hash is on any tier in any group.
fn is_live(slots: &[Slot], layout: &Layout, hash: HashKey) -> bool {
    let is_in = |slot: &Slot| layout.ids().any(|group| slot.has(group, hash));
    slots.iter().any(is_in)
}

/// Whether a store leaves blocks out without saying which, as a window group does (vLLM 0.32.0,
/// `BlockPool.cache_full_blocks`, read). It teaches nothing, but its group is there and a claim has
/// to wait for it.
fn is_sparse(store: &Store) -> bool {
    let size = store.block_size as usize;
    let whole = size > 0 && store.tokens.len().is_multiple_of(size);
    whole && !store.hashes.is_empty() && store.hashes.len() < store.tokens.len() / size
}
