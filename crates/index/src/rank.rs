//! One rank's beliefs: which hashes it holds where, and what they name.
//!
//! Invariant: a block counts only while a store that was allowed to gain presence is not taken
//! back, on a tier that was not demoted since, under a hash whose content is known and was never
//! contradicted.

use std::sync::Arc;

use fak_kernel::{Belief, LossCause, Tier, TierSet};

use crate::event::{Extra, GroupKind, Store};
use crate::identities::{Block, Fallout, Identities, Taught, Terms};
use crate::key::{Digested, HashKey, Key, Keys};
use crate::layout::{Group, Layout};
use crate::losses::{Loss, Losses, Origin};
use crate::retired::Piece;
use crate::slot::{Chunks, Placed, Placement, Presence, Proof, Slot, Taken, Unit};
use crate::{Applied, Lease, Limits, RankOptions, Stats};

/// One life of one rank, as announced.
pub(crate) struct Rank {
    pub(crate) options: RankOptions,
    pub(crate) limits: Limits,
    pub(crate) is_suspended: bool,
    /// Beliefs count for nothing where it does not hold.
    pub(crate) lease: Option<Arc<dyn Lease>>,
    /// The engine's own cache announced blocks without their extra keys.
    pub(crate) is_unreported: bool,
    pub(crate) layout: Layout,
    pub(crate) identities: Identities,
    slots: [Slot; 4],
    pub(crate) losses: Losses,
    pub(crate) totals: Applied,
    /// Facts taken in, so that a block tells since when it is there, and a loss when it was.
    pub(crate) changes: u64,
}

impl Rank {
    pub(crate) fn new(options: RankOptions, limits: Limits) -> Self {
        Self {
            options,
            limits,
            is_suspended: false,
            lease: None,
            is_unreported: false,
            layout: Layout::default(),
            identities: Identities::default(),
            slots: <[Slot; 4]>::default(),
            losses: Losses::new(limits.losses),
            totals: Applied::default(),
            changes: 0,
        }
    }

    /// Whether what is believed counts now.
    pub(crate) fn counts(&self) -> bool {
        !self.is_suspended && self.lease.as_deref().is_none_or(Lease::holds)
    }

    /// Facts taken in so far.
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
            let group = Group::new(store.block_size, store.kind);
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
        let proof = if digested.is_sparse { Proof::Copy } else { proof(store) };
        let shown_from = if proof == Proof::Repeat { self.shown_from(store, digested) } else { 0 };
        // A tier that was set aside may come back, and then what was stored meanwhile is there.
        let is_kept = gain.has(store.tier) || self.slot(store.tier).is_aside;
        let mut parent = digested.parent;
        for (i, hash) in digested.hashes.iter().copied().enumerate() {
            let content = digested.contents.get(i).filter(|_| teaches);
            let taught = content.map(|content| {
                self.learn(keys, Block { hash, parent, content: *content }, applied)
            });
            self.identities.announce(hash, self.changes);
            parent = Some(hash);
            match taught {
                Some(Taught::Conflict) => applied.conflicts += 1,
                Some(Taught::Refused) => applied.dropped += 1,
                None if self.identities.is_poisoned(hash) => applied.conflicts += 1,
                None | Some(Taught::Known | Taught::Parked) if is_kept && i >= shown_from => {
                    let is_pending = !self.identities.is_known(hash);
                    let born = self.changes;
                    let at = Placement { group: store.group, hash, is_pending, unit, born, proof };
                    self.put(store.tier, &at, applied);
                }
                None | Some(Taught::Known | Taught::Parked) => {
                    applied.fenced += 1;
                    self.slot_mut(store.tier).is_fenced = true;
                }
            }
        }
    }

    /// The first block that a store from the root shows. One that repeats a hit lists every block
    /// of the prefix in every group, also those that a window slid past (vLLM 0.32.0,
    /// `BlockPool.emit_cached_block_events`, read); one of blocks that were not there lists what
    /// was computed.
    fn shown_from(&self, store: &Store, digested: &Digested) -> usize {
        let width = match store.kind {
            GroupKind::Full | GroupKind::NotReported => return 0,
            GroupKind::Window { tokens } => {
                tokens.unwrap_or(0).saturating_sub(1).div_ceil(store.block_size.max(1))
            }
            GroupKind::Other => 0,
        };
        let (slot, blocks) = (self.slot(store.tier), digested.hashes.len());
        let is_there = digested.hashes.last().is_some_and(|last| slot.has(store.group, *last));
        let is_known = slot.floor == Belief::Gone && !slot.is_fenced;
        if is_known && !is_there { 0 } else { blocks.saturating_sub(width as usize) }
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

    /// Drops what is believed of the blocks with `keys`, and remembers that it was doubted.
    pub(crate) fn doubt(&mut self, keys: &[Key]) {
        self.changes += 1;
        let loss = Loss::without_event(LossCause::Doubt);
        let groups: Vec<_> = self.layout.ids().collect();
        let hashes: Vec<_> = keys.iter().flat_map(|key| self.identities.hashes(*key)).collect();
        for hash in hashes {
            self.drop_presence(hash);
            for (tier, group) in
                Tier::ALL.iter().flat_map(|tier| groups.iter().map(|group| (*tier, *group)))
            {
                self.losses.remove((tier, group), hash, loss, self.changes);
            }
        }
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
            Placed::Repeat => applied.repeats += 1,
            Placed::Refused => applied.dropped += 1,
        }
    }

    pub(crate) fn remove(
        &mut self,
        (tier, group): (Tier, u32),
        hashes: &[HashKey],
        origin: Origin,
    ) -> Applied {
        self.changes += 1;
        let loss = Loss { cause: LossCause::Removed, origin };
        let mut applied = Applied::default();
        for hash in hashes.iter().copied() {
            let taken = self.slot_mut(tier).take(group, hash);
            match taken {
                Taken::Last => applied.removed += 1,
                Taken::Copy => applied.copies_removed += 1,
                Taken::Unknown => applied.unknown_removals += 1,
            }
            if !matches!(taken, Taken::Copy) {
                self.losses.remove((tier, group), hash, loss, self.changes);
            }
            if self.identities.is_parked(hash) && !is_live(&self.slots, &self.layout, hash) {
                self.identities.unpark(hash);
            }
        }
        self.totals.add(&applied);
        applied
    }

    /// Makes what is on `tiers` count for nothing, until reinstated or demoted. Events go on into
    /// the tables.
    pub(crate) fn set_aside(&mut self, tiers: TierSet, is_aside: bool) {
        tiers.iter().for_each(|tier| self.slot_mut(tier).is_aside = is_aside);
    }

    pub(crate) fn demote(&mut self, tiers: TierSet, to: Belief, loss: Loss) -> Vec<Piece> {
        // Nothing can be demoted to proven.
        let floor = if to == Belief::Gone { Belief::Gone } else { Belief::Unknown };
        self.changes += 1;
        tiers.iter().for_each(|tier| self.losses.demote(tier, loss, self.changes));
        self.layout.demoted(tiers);
        tiers.iter().map(|tier| Piece::slot(self.slot_mut(tier).retire(floor))).collect()
    }

    /// Forgets what hashes name, and with it whatever is on any tier under them.
    pub(crate) fn forget_identities(&mut self) -> Vec<Piece> {
        self.changes += 1;
        let new_life = Loss::without_event(LossCause::NewLife);
        let mut pieces = Vec::new();
        for tier in Tier::ALL.iter().copied() {
            let slot = self.slot_mut(tier);
            let is_held = slot.blocks() > 0;
            let floor = if is_held || slot.is_aside { Belief::Unknown } else { slot.floor };
            pieces.push(Piece::slot(slot.retire(floor)));
            if is_held {
                self.losses.demote(tier, new_life, self.changes);
            }
        }
        pieces.push(Piece::identities(std::mem::take(&mut self.identities)));
        self.layout = Layout::default();
        self.is_unreported = false;
        pieces
    }

    pub(crate) fn belief(&self, tier: Tier, key: Key) -> Belief {
        if !self.counts() || self.layout.fault().is_some() {
            return Belief::Unknown;
        }
        let slot = self.slot(tier);
        if slot.is_aside || self.options.offload.estimated.has(tier) {
            return Belief::Unknown;
        }
        let presence =
            self.layout.ids().filter_map(|group| self.presence(tier, group, key, u64::MAX)).max();
        let is_known = self.identities.hashes(key).next().is_some();
        match presence {
            Some(Presence::Whole) => Belief::Proven,
            Some(Presence::Loose) => Belief::Unknown,
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
        let slot = self.slot(tier);
        let (chunk, is_configured) =
            (self.chunk_tokens(tier), self.options.offload.blocks_per_chunk.is_some());
        let presence = |hash| slot.presence((group, hash), chunk, is_configured, born_by);
        self.identities.hashes(key).filter_map(presence).max()
    }

    /// Tokens in a chunk of a connector's tier, as configured and as announced; `None` where that
    /// is not known, contradicts itself, or is not in whole blocks.
    fn chunk_tokens(&self, tier: Tier) -> Option<u32> {
        let size = self.layout.block_size()?;
        let blocks = self.options.offload.blocks_per_chunk;
        let configured = blocks.and_then(|blocks| blocks.checked_mul(size));
        let tokens = match (configured, self.slot(tier).chunks) {
            (_, Chunks::Mixed) => None,
            (Some(tokens), Chunks::Of(told)) => (tokens == told).then_some(tokens),
            (tokens, Chunks::None) => tokens,
            (None, Chunks::Of(told)) => Some(told),
        };
        tokens.filter(|tokens| *tokens > 0 && tokens.is_multiple_of(size))
    }

    /// Blocks in a chunk of a tier; `None` where that is not known. The gpu has none but blocks.
    pub(crate) fn chunk_blocks(&self, tier: Tier) -> Option<usize> {
        match tier {
            Tier::Gpu => Some(1),
            Tier::Cpu | Tier::Disk | Tier::Remote => {
                let size = self.layout.block_size()?;
                Some((self.chunk_tokens(tier)? / size) as usize)
            }
        }
    }

    pub(crate) fn stats(&self) -> Stats {
        let mut stats = Stats {
            parked: self.identities.parked(),
            identities: self.identities.len(),
            block_sizes: self.layout.announced().map(|(id, g)| (id, g.block_size)).collect(),
            is_suspended: !self.counts(),
            aside: Tier::ALL.iter().copied().filter(|tier| self.slot(*tier).is_aside).collect(),
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

    pub(crate) fn slot(&self, tier: Tier) -> &Slot {
        let [gpu, cpu, disk, remote] = &self.slots;
        match tier {
            Tier::Gpu => gpu,
            Tier::Cpu => cpu,
            Tier::Disk => disk,
            Tier::Remote => remote,
        }
    }

    pub(crate) fn slot_mut(&mut self, tier: Tier) -> &mut Slot {
        let [gpu, cpu, disk, remote] = &mut self.slots;
        match tier {
            Tier::Gpu => gpu,
            Tier::Cpu => cpu,
            Tier::Disk => disk,
            Tier::Remote => remote,
        }
    }
}

/// vLLM's connectors up to 0.19.1 announce the size of their chunks, each under one hash.
/// Self-describing ones announce all blocks of one chunk in one event, with their tokens. All
/// others announce one chunk an event and no size (0.32.0, `offloading/events.py`, read).
fn unit(store: &Store) -> Unit {
    let blocks = u32::try_from(store.hashes.len()).unwrap_or(u32::MAX);
    match store.block_size {
        _ if store.tier == Tier::Gpu => Unit::Block,
        0 if blocks == 1 => Unit::Configured,
        0 => Unit::Unknown,
        tokens if store.tokens.is_empty() => Unit::Tokens(tokens),
        tokens => Unit::Tokens(tokens.saturating_mul(blocks)),
    }
}

/// What a store shows. With `kv_cache_report_mode` a request makes the engine announce the blocks
/// that it hit, from the root on, without a new copy (vLLM 0.32.0,
/// `BlockPool.emit_cached_block_events`, read); no field tells such a store from others.
fn proof(store: &Store) -> Proof {
    let may_repeat = store.tier == Tier::Gpu && store.parent.is_none();
    if may_repeat { Proof::Repeat } else { Proof::Copy }
}

/// Whether a hash is on any tier in any group.
fn is_live(slots: &[Slot], layout: &Layout, hash: HashKey) -> bool {
    let is_in = |slot: &Slot| layout.ids().any(|group| slot.has(group, hash));
    slots.iter().any(is_in)
}
