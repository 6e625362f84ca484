//! The index as a child would write it: every block carries its whole prefix in the clear, every
//! answer tries every length. No digest, no parked area, no slot, no limit. It shares nothing with
//! the index but the event types.

use std::collections::{BTreeMap, BTreeSet};

use fak_index::{
    Applied, EngineHash, Extra, ExtraKey, GroupKind, Held, HeldReason, Loss, Origin, Prompt,
    RankOptions, Remove, Store,
};
use fak_kernel::vocab::PerTier;
use fak_kernel::{Belief, LossCause, Tier, TierSet};

/// A block in the clear: its tokens, its adapter, and its other extra keys.
pub(crate) type Own = (Vec<u32>, Option<Box<str>>, Vec<ExtraKey>);

/// Something that took beliefs, for good.
enum Fact {
    Removed(Tier, u32, EngineHash, Origin),
    Demoted(TierSet, Loss),
    /// Anything else, so that every fact has a number.
    Other,
}

#[derive(Default)]
pub(crate) struct Naive {
    pub(crate) options: RankOptions,
    history: Vec<Fact>,
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
    /// Tiers on which stores were kept out.
    fenced: BTreeSet<Tier>,
    /// Sizes of chunks that were announced, by tier.
    chunks: BTreeMap<Tier, BTreeSet<u32>>,
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
    /// The fact that put it down.
    born: usize,
    /// What every announcement said of its size; nothing said by the gpu.
    units: BTreeSet<Option<Size>>,
}

/// What an announcement says of the size of a connector's chunk.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Size {
    Tokens(u32),
    /// As the connector is configured to.
    Configured,
    Unknown,
}

impl Naive {
    pub(crate) fn new(options: RankOptions) -> Self {
        Self { options, ..Self::default() }
    }

    /// Facts so far.
    pub(crate) fn now(&self) -> usize {
        self.history.len()
    }

    pub(crate) fn store(&mut self, store: &Store, gain: TierSet) -> Applied {
        self.history.push(Fact::Other);
        let mut applied = Applied::default();
        let blocks = store.hashes.len() as u64;
        let carried = store.hashes.len() * store.block_size as usize;
        let extra = match &store.extra {
            Extra::PerBlock(extra) if !extra.is_empty() => extra.len(),
            Extra::PerBlock(_) | Extra::NotReported => store.hashes.len(),
        };
        let is_covered = extra == store.hashes.len();
        // Fewer hashes than whole blocks of tokens: nobody says which, but they may be known.
        let size = store.block_size as usize;
        let is_fewer = store.tokens.len() > carried && store.tokens.len().is_multiple_of(size);
        let is_sparse = is_fewer && is_covered && store.tier == Tier::Gpu;
        let is_malformed = (store.tokens.len() != carried && !is_sparse) || !is_covered;
        if !store.tokens.is_empty() && is_malformed {
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
        let may_repeat = !is_sparse && store.tier == Tier::Gpu && store.parent.is_none();
        let shown_from = if may_repeat { self.shown_from(store) } else { 0 };
        for (i, hash) in store.hashes.iter().enumerate() {
            let teaches = !store.tokens.is_empty() && !is_sparse && self.teaches(store);
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
                if i < shown_from || !(gain.has(store.tier) || self.aside.has(store.tier)) {
                    applied.fenced += 1;
                    self.fenced.insert(store.tier);
                } else {
                    self.place(store, hash, may_repeat, &mut applied);
                }
            }
            parent = Some(hash.clone());
        }
        applied
    }

    /// The first block that a store from the root is sure to show: one that only repeats a hit also
    /// lists what a group needs no more.
    fn shown_from(&self, store: &Store) -> usize {
        let needed = match store.kind {
            GroupKind::Full | GroupKind::NotReported => return 0,
            GroupKind::Window { tokens: Some(tokens) } => {
                (tokens as usize - 1).div_ceil(store.block_size as usize)
            }
            GroupKind::Window { tokens: None } | GroupKind::Other => 0,
        };
        let last = store.hashes.last().expect("a store that is well formed has blocks");
        let is_there = self.places.contains_key(&(store.tier, store.group, last.clone()));
        let doubts = self.unknown_floor.contains(&store.tier) || self.fenced.contains(&store.tier);
        if is_there || doubts { store.hashes.len().saturating_sub(needed) } else { 0 }
    }

    fn announce(&mut self, store: &Store) {
        let assume_unsalted = self.options.assume_unsalted;
        self.is_unreported |= store.extra == Extra::NotReported && !assume_unsalted;
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
            (Extra::NotReported, Tier::Gpu) => self.options.assume_unsalted,
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

    fn place(&mut self, store: &Store, hash: &EngineHash, may_repeat: bool, applied: &mut Applied) {
        let blocks = u32::try_from(store.hashes.len()).expect("few blocks");
        let size = match (store.tier, store.block_size, store.tokens.len()) {
            (Tier::Gpu, ..) => None,
            (_, 0, _) if blocks == 1 => Some(Size::Configured),
            (_, 0, _) => Some(Size::Unknown),
            (_, tokens, 0) => Some(Size::Tokens(tokens)),
            (_, tokens, _) => Some(Size::Tokens(tokens * blocks)),
        };
        if let Some(Size::Tokens(tokens)) = size {
            self.chunks.entry(store.tier).or_default().insert(tokens);
        }
        let at = (store.tier, store.group, hash.clone());
        let born = self.history.len();
        let nowhere = Place { copies: 0, is_owed: false, born, units: BTreeSet::new() };
        let place = self.places.entry(at).or_insert(nowhere);
        let was_there = place.copies > 0;
        let is_repeat = was_there && (may_repeat || std::mem::take(&mut place.is_owed));
        place.copies += u64::from(!is_repeat);
        place.units.insert(size);
        match (was_there, is_repeat) {
            (false, _) => applied.gained += 1,
            (true, false) => applied.copies += 1,
            (true, true) => applied.repeats += 1,
        }
    }

    pub(crate) fn remove(&mut self, remove: &Remove, origin: Origin) -> Applied {
        let mut applied = Applied::default();
        // All of them in one fact.
        let born = self.history.len() + 1;
        for hash in &remove.hashes {
            let at = (remove.tier, remove.group, hash.clone());
            let mut is_copy = false;
            match self.places.get_mut(&at) {
                None => applied.unknown_removals += 1,
                Some(place) if place.copies > 1 => {
                    place.copies -= 1;
                    is_copy = true;
                    applied.copies_removed += 1;
                }
                Some(_) => {
                    self.places.remove(&at);
                    applied.removed += 1;
                }
            }
            if !is_copy {
                self.history.push(Fact::Removed(at.0, at.1, at.2, origin));
            }
            let is_waiting =
                self.meanings.get(hash).is_some_and(|m| m.chain.is_none() && !m.is_contradicted);
            if is_waiting && !self.places.keys().any(|at| at.2 == *hash) {
                self.meanings.remove(hash);
            }
        }
        if self.history.len() < born {
            self.history.push(Fact::Other);
        }
        applied
    }

    pub(crate) fn demote(&mut self, tiers: TierSet, to: Belief, loss: Loss) {
        self.history.push(Fact::Demoted(tiers, loss));
        self.empty(tiers);
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

    fn empty(&mut self, tiers: TierSet) {
        self.places.retain(|at, _| !tiers.has(at.0));
        self.aside = self.aside.without(tiers);
        self.fenced.retain(|tier| !tiers.has(*tier));
        self.chunks.retain(|tier, _| !tiers.has(*tier));
    }

    pub(crate) fn forget(&mut self) {
        let held: TierSet = self.places.keys().map(|at| at.0).collect();
        let new_life = Loss::without_event(LossCause::NewLife);
        self.history.push(Fact::Demoted(held, new_life));
        self.unknown_floor.extend(held.iter());
        self.unknown_floor.extend(self.aside.iter());
        *self = Self {
            options: self.options,
            history: std::mem::take(&mut self.history),
            is_suspended: self.is_suspended,
            unknown_floor: std::mem::take(&mut self.unknown_floor),
            ..Self::default()
        };
    }

    /// The engine used the first `tokens` of a prompt after the fact `since`.
    pub(crate) fn confirm(&mut self, prompt: &Prompt<'_>, tokens: u32, since: usize) -> u32 {
        let Some(size) = self.block_size() else { return 0 };
        let is_demoted = self.history[since..]
            .iter()
            .any(|fact| matches!(fact, Fact::Demoted(tiers, _) if tiers.has(Tier::Gpu)));
        let is_vague = |kind: &GroupKind| {
            !matches!(kind, GroupKind::Full | GroupKind::Window { tokens: Some(1..) })
        };
        let is_readable = !self.is_suspended && self.changed.is_none() && !self.do_groups_differ;
        let is_vague = self.announced.iter().any(|(_, _, kind)| is_vague(kind));
        let is_aside = self.aside.has(Tier::Gpu);
        if is_demoted || !is_readable || is_vague || is_aside || prompt.lora.is_some() {
            return 0;
        }
        let chain = chain_of(prompt, size);
        let usable = prompt.tokens.len().saturating_sub(1) / size as usize;
        let hit = usable.min((tokens / size) as usize);
        self.history.push(Fact::Other);
        let groups: BTreeSet<u32> = self.announced.iter().map(|(group, ..)| *group).collect();
        let mut confirmed = 0;
        for i in 0..hit {
            let mut is_new = false;
            for group in &groups {
                if i < hit - self.used(*group, hit, size)
                    || self.presence(Tier::Gpu, *group, &chain[..=i], usize::MAX).is_some()
                {
                    continue;
                }
                let names = |m: &Meaning| m.chain.as_deref() == Some(&chain[..=i]);
                let named = self.meanings.iter().filter(|(_, m)| names(m));
                let named: Vec<_> = named.map(|(hash, _)| hash.clone()).collect();
                let [hash] = &named[..] else { return confirmed };
                if self.removal(Tier::Gpu, *group, hash, since).is_some() {
                    return confirmed;
                }
                let (born, units) = (self.history.len(), BTreeSet::from([None]));
                let place = Place { copies: 1, is_owed: true, born, units };
                self.places.insert((Tier::Gpu, *group, hash.clone()), place);
                is_new = true;
            }
            confirmed += u32::from(is_new);
        }
        confirmed
    }

    /// Blocks at the end of a hit that the group surely held.
    fn used(&self, group: u32, hit: usize, size: u32) -> usize {
        let kinds = self.announced.iter().filter(|(id, ..)| *id == group).map(|(.., kind)| kind);
        let used = kinds.map(|kind| match kind {
            GroupKind::Window { tokens: Some(tokens) } => {
                ((*tokens - 1).div_ceil(size) as usize).min(hit)
            }
            _ => hit,
        });
        used.max().unwrap_or(hit)
    }

    /// How the last removal of a hash since a fact came.
    fn removal(&self, tier: Tier, group: u32, hash: &EngineHash, since: usize) -> Option<Origin> {
        self.history[since..].iter().rev().find_map(|fact| match fact {
            Fact::Removed(t, g, h, origin) if (*t, *g, h) == (tier, group, hash) => Some(*origin),
            _ => None,
        })
    }

    /// Why blocks went that were claimed at the fact `since`.
    pub(crate) fn loss(
        &self,
        prompt: &Prompt<'_>,
        claimed: &PerTier<u32>,
        since: usize,
    ) -> Option<Loss> {
        let size = self.block_size().unwrap_or(1);
        let is_known = self.block_size().is_some();
        let chain = if is_known { chain_of(prompt, size) } else { Vec::new() };
        let mut losses = Vec::new();
        let mut start = 0;
        for tier in Tier::ALL.iter().copied() {
            let end = start + claimed.get(tier).div_ceil(size) as usize;
            if end > start {
                losses.extend(self.losses_of(tier, &chain, (start, end), since));
            }
            start = end;
        }
        losses.into_iter().min_by_key(|loss| (!loss.is_engines(), loss.origin, loss.cause))
    }

    fn losses_of(
        &self,
        tier: Tier,
        chain: &[Own],
        (start, end): (usize, usize),
        since: usize,
    ) -> Vec<Loss> {
        let groups: BTreeSet<u32> = self.announced.iter().map(|(group, ..)| *group).collect();
        let size = self.block_size().unwrap_or(1);
        let chunk = if tier == Tier::Gpu { 1 } else { self.chunk(tier).unwrap_or(1) };
        let (mut losses, mut is_lost) = (Vec::new(), groups.is_empty() || end > chain.len());
        for group in groups {
            let from = start.max(end - self.needed(group, end, size));
            // Every block of every chunk that the claim touches; of a chunk the last one counts.
            let (from, to) = (from / chunk * chunk, end.div_ceil(chunk) * chunk);
            // A claim ends short of the last chunk's end, so it rests on that, too.
            let to = if chunk > 1 { end.div_ceil(chunk) * chunk } else { to };
            for i in from..to.min(chain.len()) {
                if (i + 1) % chunk != 0 {
                    continue;
                }
                if self.presence(tier, group, &chain[..=i], since).is_some() {
                    continue;
                }
                is_lost = true;
                let names = |m: &Meaning| m.chain.as_deref() == Some(&chain[..=i]);
                for (hash, _) in self.meanings.iter().filter(|(_, m)| names(m)) {
                    if let Some(origin) = self.removal(tier, group, hash, since) {
                        losses.push(Loss { cause: LossCause::Removed, origin });
                    }
                }
            }
        }
        for fact in &self.history[since..] {
            match fact {
                Fact::Demoted(tiers, loss) if is_lost && tiers.has(tier) => losses.push(*loss),
                _ => {}
            }
        }
        losses
    }

    /// Blocks in a chunk of a connector's tier.
    fn chunk(&self, tier: Tier) -> Option<usize> {
        let size = self.block_size()?;
        let mut told = self.chunks.get(&tier).cloned().unwrap_or_default();
        told.extend(self.options.offload.blocks_per_chunk.map(|blocks| blocks * size));
        let tokens = told.first().copied().filter(|_| told.len() == 1)?;
        (tokens > 0 && tokens % size == 0).then_some((tokens / size) as usize)
    }

    /// Whether a block is on a tier in a group since a fact: `Some(true)` if as it has to be.
    fn presence(&self, tier: Tier, group: u32, chain: &[Own], by: usize) -> Option<bool> {
        let size = self.block_size().unwrap_or(0);
        let chunk = self.chunk(tier).map(|blocks| u32::try_from(blocks).expect("few") * size);
        let is_whole = |place: &Place| {
            let unit = place.units.iter().next().copied().flatten();
            let is_whole = match unit {
                None => true,
                Some(Size::Configured) => {
                    chunk.is_some() && self.options.offload.blocks_per_chunk.is_some()
                }
                Some(Size::Tokens(tokens)) => chunk == Some(tokens),
                Some(Size::Unknown) => false,
            };
            place.units.len() == 1 && is_whole
        };
        let names = |hash: &EngineHash| {
            self.meanings.get(hash).is_some_and(|m| m.chain.as_deref() == Some(chain))
        };
        let here = |at: &(Tier, u32, EngineHash), place: &Place| {
            at.0 == tier && at.1 == group && place.born <= by && names(&at.2)
        };
        let here = self.places.iter().filter(|(at, place)| here(at, place));
        here.map(|(_, place)| is_whole(place)).max()
    }

    pub(crate) fn belief(&self, tier: Tier, chain: &[Own]) -> Belief {
        if self.is_suspended || self.changed.is_some() || self.do_groups_differ {
            return Belief::Unknown;
        }
        if self.aside.has(tier) || self.options.offload.estimated.has(tier) {
            return Belief::Unknown;
        }
        let groups: BTreeSet<u32> = self.places.keys().map(|at| at.1).collect();
        let presence = |group: &u32| self.presence(tier, *group, chain, usize::MAX);
        let presence = groups.iter().filter_map(presence).max();
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
            let chunk = self.chunk(tier);
            let (mut any, mut whole) = (reach(tier, gpu, false), reach(tier, gpu, true));
            if let Some(chunk) = chunk.filter(|chunk| *chunk > 1) {
                any = self.reach_of_chunks(tier, &chain[..longest], gpu, chunk, true).max(gpu);
                whole = (any + 1).saturating_sub(chunk).max(gpu);
            }
            if self.options.offload.estimated.has(tier) {
                whole = gpu;
            }
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

    /// Where the chunks end that are there in a row, from the one that holds block `start` on.
    fn reach_of_chunks(
        &self,
        tier: Tier,
        chain: &[Own],
        start: usize,
        chunk: usize,
        whole: bool,
    ) -> usize {
        let groups: BTreeSet<u32> = self.announced.iter().map(|(group, ..)| *group).collect();
        let is_plain = self.announced.iter().all(|(group, size, _)| {
            let all = usize::MAX / 2;
            self.needed(*group, all, *size) == all
        });
        let mut end = start / chunk * chunk;
        let Some(group) = groups.first().filter(|_| groups.len() == 1 && is_plain) else {
            return start;
        };
        while !self.aside.has(tier)
            && end + chunk <= chain.len()
            && self
                .presence(tier, *group, &chain[..end + chunk], usize::MAX)
                .is_some_and(|is_whole| is_whole || !whole)
        {
            end += chunk;
        }
        end
    }

    /// Whether what is there bears out a claim of the blocks from `start` to `end` of a tier.
    pub(crate) fn bears_out(
        &self,
        tier: Tier,
        chain: &[Own],
        (start, end): (usize, usize),
        size: u32,
    ) -> bool {
        match self.chunk(tier).filter(|chunk| tier != Tier::Gpu && *chunk > 1) {
            Some(chunk) => {
                end + chunk <= self.reach_of_chunks(tier, chain, start, chunk, false) + 1
            }
            None => self.is_usable(tier, chain, (start, end), false, size),
        }
    }

    /// Whether every group allows the first `n` blocks, of which those before `start` are usable
    /// already.
    fn is_usable(
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
            (from..n).all(|i| match self.presence(tier, *group, &chain[..=i], usize::MAX) {
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
            GroupKind::Window { .. }
            | GroupKind::Full
            | GroupKind::Other
            | GroupKind::NotReported => n,
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
    let blocks = prompt.tokens.chunks_exact(size as usize).enumerate();
    let own = |(i, tokens): (usize, &[u32])| {
        let salt = prompt.salt.filter(|_| i == 0).map(|salt| ExtraKey::Text(salt.into()));
        (tokens.to_vec(), prompt.lora.map(Box::from), salt.into_iter().collect())
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
    if let Some(lora) = &store.lora
        && extra.first() == Some(&ExtraKey::Text(lora.clone()))
    {
        extra.remove(0);
    }
    (store.tokens[i * size..(i + 1) * size].to_vec(), store.lora.clone(), extra)
}
