//! The index as a child would write it: every block carries its whole prefix in the clear, every
//! answer tries every length. No digest, no parked area, no slot, no limit. It shares nothing with
//! the index but the event types.

use std::collections::{BTreeMap, BTreeSet};

use fak_index::{
    Applied, EngineHash, Extra, ExtraKey, GroupKind, Held, HeldReason, Prompt, Remove, Store,
};
use fak_kernel::vocab::PerTier;
use fak_kernel::{Belief, Tier, TierSet};

/// A block in the clear: its tokens and extra keys.
pub(crate) type Own = (Vec<u32>, Vec<ExtraKey>);

#[derive(Default)]
pub(crate) struct Naive {
    assume_unsalted: bool,
    pub(crate) is_suspended: bool,
    is_unreported: bool,
    /// Group, block size and kind of every gpu store with tokens.
    announced: Vec<(u32, u32, GroupKind)>,
    /// Tiers not yet demoted since a block size changed.
    changed: Option<TierSet>,
    do_groups_differ: bool,
    meanings: BTreeMap<EngineHash, Meaning>,
    places: BTreeMap<(Tier, u32, EngineHash), Place>,
    unknown_floor: BTreeSet<Tier>,
    pub(crate) aside: TierSet,
}

/// What a hash was said to name.
struct Meaning {
    parent: Option<EngineHash>,
    own: Own,
    /// The whole prefix, the block itself last; once its parents are known.
    chain: Option<Vec<Own>>,
    is_contradicted: bool,
}

struct Place {
    /// Announced by stores that show a copy, or once by whatever showed the block.
    copies: u64,
    /// Shown by the engine's use alone, and no store came since.
    is_owed: bool,
    /// Block size and number of hashes of every announcement; none of it said by the gpu.
    units: BTreeSet<Option<(u32, bool)>>,
}

impl Naive {
    pub(crate) fn new(assume_unsalted: bool) -> Self {
        Self { assume_unsalted, ..Self::default() }
    }

    pub(crate) fn store(&mut self, store: &Store, gain: TierSet) -> Applied {
        let mut applied = Applied::default();
        let blocks = store.hashes.len() as u64;
        let carried = store.hashes.len() * store.block_size as usize;
        let extra = match &store.extra {
            Extra::PerBlock(extra) if !extra.is_empty() => extra.len(),
            Extra::PerBlock(_) | Extra::NotReported => store.hashes.len(),
        };
        let is_malformed = store.tokens.len() != carried || extra != store.hashes.len();
        if !store.tokens.is_empty() && is_malformed {
            // Fewer hashes than whole blocks of tokens: nobody says which, but the group is there.
            let size = store.block_size as usize;
            let is_sparse = store.tokens.len().is_multiple_of(size) && store.tokens.len() > carried;
            if store.tier == Tier::Gpu && is_sparse {
                self.announce(store);
            }
            self.unknown_floor.insert(store.tier);
            return Applied { malformed: blocks, ..applied };
        }
        if store.tier == Tier::Gpu && !store.tokens.is_empty() {
            self.announce(store);
        }
        if self.changed.is_some() || self.do_groups_differ {
            self.unknown_floor.insert(store.tier);
            return Applied { dropped: blocks, ..applied };
        }
        let mut parent = store.parent.clone();
        for (i, hash) in store.hashes.iter().enumerate() {
            let teaches = !store.tokens.is_empty() && self.teaches(store);
            let is_contradicted = self.meanings.get(hash).is_some_and(|m| m.is_contradicted);
            if is_contradicted {
                applied.conflicts += 1;
            } else if teaches && self.contradicts(hash, &parent, &own(store, i)) {
                applied.conflicts += 1;
                self.contradict(hash);
            } else if teaches && self.is_hopeless(hash, &parent) {
                applied.dropped += 1;
                self.unknown_floor.insert(store.tier);
            } else {
                if teaches {
                    self.learn(hash, &parent, own(store, i));
                    applied.parked += u64::from(self.meanings[hash].chain.is_none());
                }
                self.place(store, hash, gain, &mut applied);
            }
            parent = Some(hash.clone());
        }
        applied
    }

    fn announce(&mut self, store: &Store) {
        self.is_unreported |= store.extra == Extra::NotReported && !self.assume_unsalted;
        self.announced.push((store.group, store.block_size, store.kind));
        let sizes = self.first_sizes();
        if sizes[&store.group] != store.block_size && self.changed.is_none() {
            self.changed = Some(TierSet::ALL);
        }
        self.do_groups_differ |= sizes.values().collect::<BTreeSet<_>>().len() > 1;
    }

    fn first_sizes(&self) -> BTreeMap<u32, u32> {
        self.announced.iter().rev().map(|(group, size, _)| (*group, *size)).collect()
    }

    fn block_size(&self) -> Option<u32> {
        self.first_sizes().values().next().copied()
    }

    fn teaches(&self, store: &Store) -> bool {
        match (&store.extra, store.tier) {
            (Extra::PerBlock(_), Tier::Gpu) => true,
            (Extra::PerBlock(_), _) => self.block_size() == Some(store.block_size),
            (Extra::NotReported, Tier::Gpu) => self.assume_unsalted,
            (Extra::NotReported, _) => false,
        }
    }

    fn contradicts(&self, hash: &EngineHash, parent: &Option<EngineHash>, own: &Own) -> bool {
        let Some(known) = self.meanings.get(hash) else { return false };
        let before = match parent {
            None => Some(&[][..]),
            Some(parent) => self.meanings.get(parent).and_then(|p| p.chain.as_deref()),
        };
        let differs = match (&known.chain, before) {
            (Some(chain), Some(before)) => &chain[..chain.len() - 1] != before,
            (Some(_), None) => false,
            (None, _) => known.parent != *parent,
        };
        differs || known.own != *own
    }

    /// Everything the hash held is gone, and it will hold nothing again.
    fn contradict(&mut self, hash: &EngineHash) {
        let meaning = self.meanings.get_mut(hash).expect("only a known hash can be contradicted");
        meaning.is_contradicted = true;
        meaning.chain = None;
        let places: Vec<_> = self.places.keys().filter(|at| at.2 == *hash).cloned().collect();
        for place in places {
            self.unknown_floor.insert(place.0);
            self.places.remove(&place);
        }
    }

    fn is_hopeless(&self, hash: &EngineHash, parent: &Option<EngineHash>) -> bool {
        let parent = parent.as_ref().and_then(|parent| self.meanings.get(parent));
        !self.meanings.contains_key(hash) && parent.is_some_and(|parent| parent.is_contradicted)
    }

    fn learn(&mut self, hash: &EngineHash, parent: &Option<EngineHash>, own: Own) {
        self.meanings.entry(hash.clone()).or_insert(Meaning {
            parent: parent.clone(),
            own,
            chain: None,
            is_contradicted: false,
        });
        // Again and again over all blocks, until nothing new follows.
        while let Some((hash, chain)) = self.meanings.iter().find_map(|(hash, meaning)| {
            if meaning.chain.is_some() || meaning.is_contradicted {
                return None;
            }
            let mut chain = match &meaning.parent {
                None => Vec::new(),
                Some(parent) => self.meanings.get(parent)?.chain.clone()?,
            };
            chain.push(meaning.own.clone());
            Some((hash.clone(), chain))
        }) {
            self.meanings.get_mut(&hash).expect("just found").chain = Some(chain);
        }
    }

    fn place(&mut self, store: &Store, hash: &EngineHash, gain: TierSet, applied: &mut Applied) {
        if !gain.has(store.tier) && !self.aside.has(store.tier) {
            applied.fenced += 1;
            return;
        }
        let at = (store.tier, store.group, hash.clone());
        let nowhere = Place { copies: 0, is_owed: false, units: BTreeSet::new() };
        let place = self.places.entry(at).or_insert(nowhere);
        let was_there = place.copies > 0;
        let may_repeat = store.tier == Tier::Gpu && store.parent.is_none();
        let is_repeat = was_there && (may_repeat || std::mem::take(&mut place.is_owed));
        place.copies += u64::from(!is_repeat);
        let is_gpu = store.tier == Tier::Gpu;
        let is_together = store.block_size == 0 && store.hashes.len() > 1;
        place.units.insert((!is_gpu).then_some((store.block_size, is_together)));
        match (was_there, is_repeat) {
            (false, _) => applied.gained += 1,
            (true, false) => applied.copies += 1,
            (true, true) => applied.repeats += 1,
        }
    }

    pub(crate) fn remove(&mut self, remove: &Remove) -> Applied {
        let mut applied = Applied::default();
        for hash in &remove.hashes {
            let at = (remove.tier, remove.group, hash.clone());
            match self.places.get_mut(&at) {
                None => applied.unknown_removals += 1,
                Some(place) if place.copies > 1 => {
                    place.copies -= 1;
                    applied.copies_removed += 1;
                }
                Some(_) => {
                    self.places.remove(&at);
                    applied.removed += 1;
                }
            }
            let is_waiting =
                self.meanings.get(hash).is_some_and(|m| m.chain.is_none() && !m.is_contradicted);
            if is_waiting && !self.places.keys().any(|at| at.2 == *hash) {
                self.meanings.remove(hash);
            }
        }
        applied
    }

    pub(crate) fn demote(&mut self, tiers: TierSet, to: Belief) {
        self.places.retain(|at, _| !tiers.has(at.0));
        self.aside = self.aside.without(tiers);
        for tier in tiers.iter() {
            match to {
                Belief::Gone => self.unknown_floor.remove(&tier),
                Belief::Unknown | Belief::Proven => self.unknown_floor.insert(tier),
            };
        }
        self.changed = self.changed.map(|left| left.without(tiers));
        if self.changed.is_some_and(TierSet::is_empty) {
            self.changed = None;
            self.announced.clear();
        }
    }

    pub(crate) fn forget(&mut self) {
        self.unknown_floor.extend(self.places.keys().map(|at| at.0));
        self.unknown_floor.extend(self.aside.iter());
        *self = Self {
            assume_unsalted: self.assume_unsalted,
            is_suspended: self.is_suspended,
            unknown_floor: std::mem::take(&mut self.unknown_floor),
            ..Self::default()
        };
    }

    /// Whether a block is on a tier in a group: `Some(true)` if by itself.
    fn presence(&self, tier: Tier, group: u32, chain: &[Own]) -> Option<bool> {
        let is_whole = |place: &Place| {
            let unit = place.units.iter().next().copied().flatten();
            let is_whole = match unit {
                None | Some((0, false)) => true,
                Some((0, true)) => false,
                Some((size, _)) => self.block_size() == Some(size),
            };
            place.units.len() == 1 && is_whole
        };
        let names = |hash: &EngineHash| {
            self.meanings.get(hash).is_some_and(|m| m.chain.as_deref() == Some(chain))
        };
        let places = self.places.iter();
        let here = places.filter(|(at, _)| at.0 == tier && at.1 == group && names(&at.2));
        here.map(|(_, place)| is_whole(place)).max()
    }

    pub(crate) fn belief(&self, tier: Tier, chain: &[Own]) -> Belief {
        if self.is_suspended || self.changed.is_some() || self.do_groups_differ {
            return Belief::Unknown;
        }
        if self.aside.has(tier) {
            return Belief::Unknown;
        }
        let groups: BTreeSet<u32> = self.places.keys().map(|at| at.1).collect();
        let presence = groups.iter().filter_map(|group| self.presence(tier, *group, chain)).max();
        let is_named = self.meanings.values().any(|m| m.chain.as_deref() == Some(chain));
        match presence {
            Some(true) => Belief::Proven,
            Some(false) => Belief::Unknown,
            None if !is_named && self.pending(tier) > 0 => Belief::Unknown,
            None if self.unknown_floor.contains(&tier) => Belief::Unknown,
            None => Belief::Gone,
        }
    }

    pub(crate) fn held(&self, prompt: &Prompt<'_>) -> Held {
        let size = self.block_size();
        let mut held = Held {
            blocks: PerTier::default(),
            estimated: 0,
            block_size: size.unwrap_or(0),
            reason: HeldReason::Miss,
        };
        held.reason = match size {
            _ if self.is_suspended => HeldReason::Suspended,
            _ if self.do_groups_differ => HeldReason::GroupsDiffer,
            _ if self.changed.is_some() => HeldReason::BlockSizeChanged,
            None => HeldReason::NoBlockSize,
            Some(size) if prompt.tokens.len() <= size as usize => HeldReason::BelowBlockSize,
            Some(size) => return self.held_of(prompt, size, held),
        };
        held
    }

    fn held_of(&self, prompt: &Prompt<'_>, size: u32, mut held: Held) -> Held {
        let chain = chain_of(prompt, size);
        let longest = (prompt.tokens.len() - 1) / size as usize;
        let reach = |tier, start: usize, whole: bool| {
            let fits = |n: &usize| {
                !self.aside.has(tier) && self.is_usable(tier, &chain, (start, *n), whole, size)
            };
            (start + 1..=longest).rev().find(fits).unwrap_or(start)
        };
        let gpu = reach(Tier::Gpu, 0, true);
        held.blocks.gpu = u32::try_from(gpu).expect("few blocks");
        let runs = [Tier::Cpu, Tier::Disk, Tier::Remote].into_iter().map(|tier| {
            let (any, whole) = (reach(tier, gpu, false), reach(tier, gpu, true));
            (whole - gpu, any - whole, tier)
        });
        if let Some((whole, rest, tier)) = runs.filter(|run| run.0 + run.1 > 0).min() {
            *held.blocks.get_mut(tier) = u32::try_from(whole).expect("few blocks");
            held.estimated = u32::try_from(rest).expect("few blocks");
        }
        held.reason = match held.blocks_total() {
            0 if !self.aside.is_empty() => HeldReason::SetAside,
            0 if self.is_unreported => HeldReason::ExtraNotReported,
            0 => HeldReason::Miss,
            _ => HeldReason::Warm,
        };
        held
    }

    /// Whether every group allows the first `n` blocks, of which those before `start` are usable
    /// already.
    pub(crate) fn is_usable(
        &self,
        tier: Tier,
        chain: &[Own],
        (start, n): (usize, usize),
        whole: bool,
        size: u32,
    ) -> bool {
        let groups: BTreeSet<u32> = self.announced.iter().map(|(group, ..)| *group).collect();
        groups.iter().all(|group| {
            let from = (n - self.needed(*group, n, size)).max(start);
            (from..n).all(|i| match self.presence(tier, *group, &chain[..=i]) {
                Some(is_whole) => is_whole || !whole,
                None => false,
            })
        })
    }

    /// How many blocks at the end of the first `n` the group needs, by its strictest announcement.
    fn needed(&self, group: u32, n: usize, size: u32) -> usize {
        let kinds = self.announced.iter().filter(|(id, ..)| *id == group).map(|(.., kind)| kind);
        let needs = kinds.map(|kind| match kind {
            GroupKind::Window { tokens: Some(tokens @ 1..) } => {
                (*tokens as usize).div_ceil(size as usize).min(n)
            }
            GroupKind::Window { .. } | GroupKind::Full | GroupKind::Other => n,
        });
        needs.max().unwrap_or(n)
    }

    pub(crate) fn blocks(&self, tier: Tier) -> usize {
        self.places.keys().filter(|at| at.0 == tier).count()
    }

    pub(crate) fn pending(&self, tier: Tier) -> usize {
        let is_named = |hash| self.meanings.get(hash).is_some_and(|m: &Meaning| m.chain.is_some());
        self.places.keys().filter(|at| at.0 == tier && !is_named(&at.2)).count()
    }

    pub(crate) fn parked(&self) -> usize {
        self.meanings.values().filter(|m| m.chain.is_none() && !m.is_contradicted).count()
    }

    pub(crate) fn identities(&self) -> usize {
        self.meanings.len() - self.parked()
    }
}

/// The prompt's whole blocks in the clear.
pub(crate) fn chain_of(prompt: &Prompt<'_>, size: u32) -> Vec<Own> {
    let text = |text: &str| ExtraKey::Text(text.into());
    let blocks = prompt.tokens.chunks_exact(size as usize).enumerate();
    let own = |(i, tokens): (usize, &[u32])| {
        let salt = prompt.salt.filter(|_| i == 0);
        (tokens.to_vec(), prompt.lora.into_iter().chain(salt).map(text).collect())
    };
    blocks.map(own).collect()
}

/// A block of a store in the clear.
fn own(store: &Store, i: usize) -> Own {
    let size = store.block_size as usize;
    let mut extra = match &store.extra {
        Extra::PerBlock(blocks) => blocks.get(i).cloned().unwrap_or_default(),
        Extra::NotReported => Vec::new(),
    };
    if let Some(lora) = &store.lora {
        let lora = ExtraKey::Text(lora.clone());
        if extra.first() != Some(&lora) {
            extra.insert(0, lora);
        }
    }
    (store.tokens[i * size..(i + 1) * size].to_vec(), extra)
}
