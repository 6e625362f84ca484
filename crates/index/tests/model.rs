//! Random histories against a naive model: the index must give exactly its answers, after every
//! step.
//!
//! A failure prints its seed and the shortest history that shows it; `FAK_SEED=… cargo test -p
//! fak-index --test model` runs the same histories again.

#[path = "model/naive.rs"]
mod naive;

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};

use fak_index::{
    Applied, EngineHash, Extra, ExtraKey, GroupKind, Held, Index, Limits, Loss, Mark, Offload,
    Origin, Prompt, RankId, RankOptions, Remove, Store,
};
use fak_kernel::vocab::PerTier;
use fak_kernel::{Belief, LossCause, Tier, TierSet};
use naive::{Naive, chain_of};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{RngAlgorithm, TestRng, TestRunner};

const HISTORIES: u32 = 10_000;
const STEPS_MAX: usize = 24;

const SIZE: u32 = 2;

/// The parent of each block of the tree of tokens: 0-1-2-3, 1-4-5, and 6 alone.
const PARENTS: [Option<u32>; 7] = [None, Some(0), Some(1), Some(2), Some(1), Some(4), None];

/// The blocks of the tree that end a prompt.
const LEAVES: [u32; 3] = [3, 5, 6];

/// Three trees of the same tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Family {
    Plain,
    Salted,
    Lora,
}

const FAMILIES: [Family; 3] = [Family::Plain, Family::Salted, Family::Lora];

/// A run of blocks of one family, from `last` upwards, as one of two engines would hash it.
#[derive(Clone, Debug)]
struct Run {
    family: Family,
    last: u32,
    len: usize,
    twin: bool,
}

/// Something that happens to a rank.
#[derive(Clone, Debug)]
enum Act {
    Store(Store, TierSet),
    Remove(Remove, Origin),
    Demote(TierSet, Belief, Loss),
    SetAside(TierSet),
    Reinstate(TierSet),
    /// A claim is made: the moment is kept.
    Claim(Family, u32),
    /// The engine answers the last claim, and used so many tokens.
    Confirm(u32),
    Offload(Offload),
    Suspend,
    Restore,
    Forget,
    Replace(RankOptions),
}

/// What happens next, and the prompt that is asked about then.
#[derive(Clone, Debug)]
struct Step {
    rank: usize,
    act: Act,
    leaf: u32,
}

impl Family {
    fn prompt(self, tokens: &[u32]) -> Prompt<'_> {
        let lora = (self == Self::Lora).then_some("sql");
        let salt = (self == Self::Salted).then_some("tenant");
        Prompt { tokens, lora, salt }
    }
}

/// The tokens of the whole blocks that end in `leaf`.
fn prompt_tokens(leaf: u32) -> Vec<u32> {
    let run = Run { family: Family::Plain, last: leaf, len: PARENTS.len(), twin: false };
    run.blocks().iter().flat_map(|block| [*block; SIZE as usize]).collect()
}

/// Those, and one token more.
fn with_last(leaf: u32) -> Vec<u32> {
    let mut tokens = prompt_tokens(leaf);
    tokens.push(99);
    tokens
}

impl Run {
    fn hash(&self, block: u32) -> EngineHash {
        let number = block * 2 + u32::from(self.twin);
        match self.family {
            Family::Plain => EngineHash::Int(number.into()),
            Family::Salted => EngineHash::Int((number + 100).into()),
            Family::Lora => EngineHash::Bytes(number.to_le_bytes().into()),
        }
    }

    /// First block first.
    fn blocks(&self) -> Vec<u32> {
        let up = std::iter::successors(Some(self.last), |block| PARENTS[*block as usize]);
        let mut blocks: Vec<_> = up.take(self.len).collect();
        blocks.reverse();
        blocks
    }

    fn extra(&self, block: u32) -> Vec<ExtraKey> {
        match self.family {
            Family::Plain => Vec::new(),
            Family::Salted if PARENTS[block as usize].is_some() => Vec::new(),
            Family::Salted => vec![ExtraKey::Text("tenant".into())],
            Family::Lora => vec![ExtraKey::Text("sql".into())],
        }
    }

    /// The store with tokens, as the gpu announces it.
    fn store(&self) -> Store {
        let blocks = self.blocks();
        Store {
            hashes: blocks.iter().map(|block| self.hash(*block)).collect(),
            parent: PARENTS[blocks[0] as usize].map(|block| self.hash(block)),
            tokens: blocks.iter().flat_map(|block| [*block; SIZE as usize]).collect(),
            block_size: SIZE,
            extra: Extra::PerBlock(blocks.iter().map(|block| self.extra(*block)).collect()),
            lora: (self.family == Family::Lora).then(|| "sql".into()),
            tier: Tier::Gpu,
            group: 0,
            kind: GroupKind::Full,
        }
    }
}

/// A number that choices are drawn from, so that a history is drawn, and made shorter, as plain
/// numbers.
struct Dice {
    number: u64,
    bend: Bend,
}

/// Does something to a store that an engine would not do, or not today.
type Bend = fn(&mut Store, u32);

impl Dice {
    /// One of the numbers below `n`.
    fn below(&mut self, n: u32) -> u32 {
        let drawn = self.number % u64::from(n);
        self.number /= u64::from(n);
        u32::try_from(drawn).expect("it is below n")
    }

    /// True once in `n` times.
    fn one_in(&mut self, n: u32) -> bool {
        self.below(n) == n - 1
    }

    fn one_of<T: Copy>(&mut self, values: &[T]) -> T {
        values[self.below(u32::try_from(values.len()).expect("few values")) as usize]
    }

    fn run(&mut self) -> Run {
        let family = if self.one_in(6) { self.one_of(&FAMILIES) } else { Family::Plain };
        let len = 1 + self.below(3) as usize;
        Run { family, last: self.below(7), len, twin: self.one_in(10) }
    }

    fn tier(&mut self) -> Tier {
        self.one_of(&[
            Tier::Gpu,
            Tier::Gpu,
            Tier::Gpu,
            Tier::Gpu,
            Tier::Cpu,
            Tier::Cpu,
            Tier::Cpu,
            Tier::Disk,
            Tier::Remote,
        ])
    }

    fn tiers(&mut self) -> TierSet {
        let cpu = TierSet::of(Tier::Cpu);
        self.one_of(&[TierSet::GPU, TierSet::CONNECTOR, TierSet::ALL, cpu, TierSet::NONE])
    }

    fn group(&mut self) -> u32 {
        u32::from(self.one_in(8))
    }

    fn store(&mut self) -> Store {
        let (tier, group) = (self.tier(), self.group());
        let window = GroupKind::Window { tokens: Some(3) };
        let of_1 = [window, window, GroupKind::Other, GroupKind::NotReported];
        let kind = if group == 1 { self.one_of(&of_1) } else { GroupKind::Full };
        let mut store = Store { tier, group, kind, ..self.run().store() };
        (self.bend)(&mut store, self.below(40));
        store
    }

    /// A store that tells only where blocks are.
    fn location(&mut self) -> Store {
        let (tier, block_size) = (self.tier(), self.one_of(&[0, 0, 0, 0, SIZE, 2 * SIZE]));
        let (parent, tokens, kind) = (None, Vec::new(), GroupKind::Other);
        let mut store = Store { tier, block_size, parent, tokens, kind, ..self.run().store() };
        if !self.one_in(4) {
            // Connectors announce one chunk an event.
            store.hashes.drain(..store.hashes.len() - 1);
        }
        store
    }

    fn offload(&mut self) -> Offload {
        let estimated = [TierSet::NONE, TierSet::NONE, TierSet::of(Tier::Disk), TierSet::CONNECTOR];
        let blocks_per_chunk = self.one_of(&[Some(1), Some(1), Some(2), Some(2), None, Some(3)]);
        Offload { estimated: self.one_of(&estimated), blocks_per_chunk }
    }

    fn act(&mut self) -> Act {
        let gain = |dice: &mut Self| if dice.one_in(10) { dice.tiers() } else { TierSet::ALL };
        let origins = [Origin::Live, Origin::Replay, Origin::None];
        match self.below(58) {
            0..14 => Act::Store(self.store(), gain(self)),
            14..21 => Act::Store(self.location(), gain(self)),
            21..28 => {
                let (tier, group) = (self.tier(), self.group());
                let remove = Remove { hashes: self.run().store().hashes, tier, group };
                Act::Remove(remove, self.one_of(&origins))
            }
            28 | 29 => {
                let to = self.one_of(&[Belief::Gone, Belief::Unknown, Belief::Proven]);
                let loss =
                    Loss { cause: self.one_of(LossCause::ALL), origin: self.one_of(&origins) };
                Act::Demote(self.tiers(), to, loss)
            }
            30 => Act::Suspend,
            31 | 32 => Act::Restore,
            33 => Act::Forget,
            34 => Act::SetAside(self.tiers()),
            35 | 36 => Act::Reinstate(self.tiers()),
            37..43 => {
                let family = if self.one_in(4) { self.one_of(&FAMILIES) } else { Family::Plain };
                Act::Claim(family, self.one_of(&LEAVES))
            }
            43..55 => Act::Confirm(self.below(10)),
            55 | 56 => Act::Offload(self.offload()),
            _ => {
                let assume_unsalted = self.one_in(3);
                Act::Replace(RankOptions { assume_unsalted, offload: self.offload() })
            }
        }
    }

    fn step(mut self) -> Step {
        // Mostly one rank, so that its history gets long.
        let (rank, leaf) = (usize::from(self.one_in(10)), self.one_of(&LEAVES));
        Step { rank, act: self.act(), leaf }
    }
}

/// How a store is bent: one number out of 40, most of which leave it straight.
fn bend(store: &mut Store, how: u32) {
    match how {
        0 => store.extra = Extra::NotReported,
        1 => store.extra = Extra::PerBlock(Vec::new()),
        // A lie about the content of the first or the last block.
        2 => store.tokens[0] += 50,
        3 => store.tokens.iter_mut().rev().take(1).for_each(|token| *token += 50),
        4 => drop(store.tokens.pop()),
        5 if store.hashes.len() == 2 => {
            store.hashes.pop();
            store.block_size = 2 * SIZE;
            store.extra = Extra::PerBlock(Vec::new());
        }
        6 => store.extra = Extra::PerBlock(vec![Vec::new(); store.hashes.len() + 1]),
        // The last block alone, with the tokens of all.
        11 | 12 => {
            store.hashes.drain(..store.hashes.len() - 1);
            store.extra = Extra::PerBlock(Vec::new());
        }
        // A lie about what comes before.
        9 => store.parent = Some(EngineHash::Int(12)),
        10 => store.parent = None,
        7 | 8 => store.kind = GroupKind::Window { tokens: Some(3) },
        _ => {}
    }
}

fn histories(bend: Bend) -> impl Strategy<Value = Vec<Step>> {
    let step = move |number| Dice { number, bend }.step();
    let steps = move |dice: Vec<u64>| dice.into_iter().map(step).collect();
    vec(any::<u64>(), 1..STEPS_MAX).prop_map(steps)
}

/// The index and the model side by side, with two ranks each.
struct Pair {
    index: Index,
    ranks: [(RankId, Naive); 2],
    claims: [Option<Claim>; 2],
}

/// The last claim that was made of a rank.
#[derive(Clone, Copy)]
struct Claim {
    family: Family,
    leaf: u32,
    mark: Mark,
    /// The moment as the model counts it.
    fact: usize,
    tokens: PerTier<u32>,
}

impl Pair {
    fn new(seed: u64, limits: Limits) -> Self {
        let index = Index::new(seed, limits);
        let options = RankOptions { offload: Offload::BY_BLOCK, ..RankOptions::default() };
        let rank = || (index.add_rank(options), Naive::new(options));
        let ranks = [rank(), rank()];
        Self { index, ranks, claims: [None; 2] }
    }

    /// Lets `act` happen to both, and compares what they report of it.
    fn apply(&mut self, rank: usize, act: &Act) -> Result<(), TestCaseError> {
        let (reported, expected) = self.apply_unequal(rank, act);
        prop_assert_eq!(reported, expected);
        Ok(())
    }

    /// Lets `act` happen to both, and gives what they report of it.
    fn apply_unequal(&mut self, rank: usize, act: &Act) -> (Applied, Applied) {
        let index = &self.index;
        let (id, naive) = &mut self.ranks[rank];
        match act {
            Act::Store(store, gain) => {
                return (index.store(*id, store, *gain), naive.store(store, *gain));
            }
            Act::Remove(remove, origin) => {
                return (index.remove(*id, remove, *origin), naive.remove(remove, *origin));
            }
            Act::Demote(tiers, to, loss) => {
                index.demote(*id, *tiers, *to, *loss);
                naive.demote(*tiers, *to, *loss);
            }
            Act::SetAside(tiers) => {
                index.set_aside(*id, *tiers);
                naive.aside = naive.aside.with(*tiers);
            }
            Act::Reinstate(tiers) => {
                index.reinstate(*id, *tiers);
                naive.aside = naive.aside.without(*tiers);
            }
            Act::Claim(family, leaf) => {
                let tokens = with_last(*leaf);
                let (held, mark) = index.held_and_mark(*id, &family.prompt(&tokens));
                let (family, leaf, fact) = (*family, *leaf, naive.now());
                let tokens = held.tokens();
                self.claims[rank] = Some(Claim { family, leaf, mark, fact, tokens });
            }
            Act::Confirm(used) => {
                let Some(claim) = self.claims[rank] else { return Default::default() };
                let tokens = with_last(claim.leaf);
                let prompt = claim.family.prompt(&tokens);
                let confirmed =
                    |blocks: u32| Applied { confirmed: blocks.into(), ..Applied::default() };
                let came = index.confirm(*id, &prompt, *used, claim.mark);
                return (confirmed(came), confirmed(naive.confirm(&prompt, *used, claim.fact)));
            }
            Act::Offload(offload) => {
                index.set_offload(*id, *offload);
                naive.options.offload = *offload;
            }
            Act::Suspend => {
                index.suspend(*id);
                naive.is_suspended = true;
            }
            Act::Restore => {
                index.restore(*id);
                naive.is_suspended = false;
            }
            Act::Forget => {
                index.forget_identities(*id);
                naive.forget();
            }
            Act::Replace(options) => {
                index.remove_rank(*id);
                self.ranks[rank] = (index.add_rank(*options), Naive::new(*options));
                self.claims[rank] = None;
            }
        }
        (Applied::default(), Applied::default())
    }

    /// Checks that the model bears out what is claimed of a prompt that ends in `leaf`, and counts
    /// the blocks.
    fn check_proven(&self, rank: usize, leaf: u32) -> Result<u64, TestCaseError> {
        let (id, naive) = &self.ranks[rank];
        let tokens = with_last(leaf);
        let prompt = Family::Plain.prompt(&tokens);
        let chain = chain_of(&prompt, SIZE);
        let held = self.index.held(*id, &prompt);
        let mut start = 0;
        for tier in Tier::ALL {
            let end = start + held.blocks.get(*tier) as usize;
            if end > start {
                // A chunk that did not fit leaves no trace on a block that is announced alone
                // later, so the model is asked for blocks of either kind.
                prop_assert!(naive.bears_out(*tier, &chain, (start, end), SIZE));
            }
            start = end;
        }
        Ok(held.blocks_total().into())
    }

    /// Compares what is told of what became of the last claim. True where something was lost.
    fn compare_loss(&self, rank: usize) -> Result<bool, TestCaseError> {
        let Some(Claim { family, leaf, mark, fact, tokens: claimed }) = self.claims[rank] else {
            return Ok(false);
        };
        let (id, naive) = &self.ranks[rank];
        let tokens = with_last(leaf);
        let prompt = family.prompt(&tokens);
        let loss = self.index.loss_since(*id, &prompt, mark, &claimed);
        prop_assert_eq!(loss, naive.loss(&prompt, &claimed, fact));
        Ok(loss.is_some())
    }

    /// Compares what is held of a prompt that ends in `leaf`.
    fn compare_held(&self, rank: usize, family: Family, leaf: u32) -> Result<Held, TestCaseError> {
        let (id, naive) = &self.ranks[rank];
        let tokens = with_last(leaf);
        let prompt = family.prompt(&tokens);
        let held = self.index.held(*id, &prompt);
        prop_assert_eq!(held, naive.held(&prompt));
        Ok(held)
    }

    /// Compares all that can be asked.
    fn compare_all(&self, family: Family, leaf: u32) -> Result<(), TestCaseError> {
        let tokens = prompt_tokens(leaf);
        let prompt = family.prompt(&tokens);
        let held = self.ranks.iter().map(|(id, naive)| (*id, naive.held(&prompt)));
        let held: BTreeMap<_, _> = held.collect();
        prop_assert_eq!(self.index.held_all(&prompt), Vec::from_iter(held));
        let keys = self.index.chain(&prompt, SIZE);
        let chain = chain_of(&prompt, SIZE);
        for (rank, (id, naive)) in self.ranks.iter().enumerate() {
            self.compare_held(rank, family, leaf)?;
            for (i, key) in keys.iter().enumerate() {
                for tier in [Tier::Gpu, Tier::Cpu] {
                    let believed = self.index.belief(*id, tier, *key);
                    prop_assert_eq!(believed, naive.belief(tier, &chain[..=i]), "block {}", i);
                }
            }
        }
        Ok(())
    }

    fn compare_stats(&self) -> Result<(), TestCaseError> {
        for (id, naive) in &self.ranks {
            let stats = self.index.stats(*id);
            for tier in Tier::ALL {
                prop_assert_eq!(stats.blocks.get(*tier), naive.blocks(*tier));
                prop_assert_eq!(stats.pending.get(*tier), naive.pending(*tier));
            }
            prop_assert_eq!((stats.parked, stats.identities), (naive.parked(), naive.identities()));
        }
        Ok(())
    }
}

/// Runs `check` over random histories; a failure names the seed and is as short as it can be made.
fn run<S: Strategy>(
    strategy: &S,
    mut check: impl FnMut(u64, S::Value) -> Result<(), TestCaseError>,
) {
    let seed = match std::env::var("FAK_SEED") {
        Ok(seed) => seed.parse().expect("FAK_SEED is a number"),
        Err(_) => RandomState::new().hash_one(0),
    };
    let mut bytes = [1; 16];
    bytes[..8].copy_from_slice(&u64::to_le_bytes(seed));
    let config =
        ProptestConfig { cases: HISTORIES, failure_persistence: None, ..Default::default() };
    let rng = TestRng::from_seed(RngAlgorithm::XorShift, &bytes);
    let mut runner = TestRunner::new_with_rng(config, rng);
    let counted = std::cell::RefCell::new(&mut check);
    let result = runner.run(strategy, |value| (counted.borrow_mut())(seed, value));
    if let Err(error) = result {
        panic!("FAK_SEED={seed}: {error}");
    }
}

#[test]
fn the_index_answers_exactly_as_the_naive_model() {
    let (mut steps, mut claimed, mut lost, mut came) = (0_u64, 0_u64, 0_u64, 0_u64);
    run(&histories(bend), |seed, history| {
        let mut pair = Pair::new(seed, Limits::default());
        for Step { rank, act, leaf } in &history {
            pair.apply(*rank, act)?;
            lost += u64::from(pair.compare_loss(*rank)?);
            claimed += u64::from(pair.compare_held(*rank, Family::Plain, *leaf)?.blocks_total());
            steps += 1;
        }
        pair.compare_stats()?;
        came +=
            pair.ranks.iter().map(|(id, _)| pair.index.stats(*id).totals.confirmed).sum::<u64>();
        let leaf = history.first().map_or(LEAVES[0], |step| step.leaf);
        FAMILIES.into_iter().try_for_each(|family| pair.compare_all(family, leaf))
    });
    assert!(claimed > steps / 10, "{claimed} blocks in {steps} steps: a model of nothing");
    assert!(lost > 150 && came > 80, "{lost} losses told, {came} blocks confirmed");
}

/// Bounds so tight that everything overflows.
const TIGHT: Limits =
    Limits { blocks: 4, pending: 2, identities: 5, parked: 2, groups: 2, losses: 2, backlog: 3 };

#[test]
fn what_does_not_fit_is_not_claimed() {
    let (mut claimed, mut dropped) = (0_u64, 0_u64);
    let leave_straight: Bend = |_, _| {};
    run(&histories(leave_straight), |seed, history| {
        let mut pair = Pair::new(seed, TIGHT);
        for Step { rank, act, leaf } in &history {
            // A second hash of a content that did not fit is not known, and the model, which knows
            // it, would confirm nothing.
            if matches!(act, Act::Confirm(_)) {
                continue;
            }
            pair.apply_unequal(*rank, act);
            claimed += pair.check_proven(*rank, *leaf)?;
            let stats = pair.index.stats(pair.ranks[*rank].0);
            for tier in Tier::ALL {
                prop_assert!(stats.blocks.get(*tier) <= TIGHT.blocks);
                prop_assert!(stats.pending.get(*tier) <= TIGHT.pending);
            }
            prop_assert!(stats.parked <= TIGHT.parked && stats.identities <= TIGHT.identities);
            prop_assert!(stats.backlog <= TIGHT.backlog);
            dropped += stats.totals.dropped;
        }
        Ok(())
    });
    assert!(claimed > 10_000 && dropped > 10_000, "{claimed} claimed, {dropped} dropped");
}
