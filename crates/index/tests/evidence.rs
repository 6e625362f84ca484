//! What brings a belief back, what takes it, and what is known of why it went.

use fak_index::{
    EngineHash, Extra, ExtraKey, GroupKind, HeldReason, Index, Limits, Loss, Mark, Origin, Prompt,
    RankId, RankOptions, Remove, Store,
};
use fak_kernel::vocab::PerTier;
use fak_kernel::{Belief, LossCause, Tier, TierSet};

const SIZE: u32 = 4;

struct Bench {
    index: Index,
    rank: RankId,
}

fn tokens_of(blocks: std::ops::Range<u64>) -> Vec<u32> {
    blocks.flat_map(|block| [u32::try_from(block).expect("few blocks"); SIZE as usize]).collect()
}

/// A prompt of so many blocks and one token more.
fn prompt(blocks: u64) -> Vec<u32> {
    let mut tokens = tokens_of(0..blocks);
    tokens.push(u32::MAX);
    tokens
}

fn plain(tokens: &[u32]) -> Prompt<'_> {
    Prompt { tokens, lora: None, salt: None }
}

/// Blocks of one chain, each under its own number as hash.
fn blocks(range: std::ops::Range<u64>) -> Store {
    Store {
        hashes: range.clone().map(EngineHash::Int).collect(),
        parent: range.start.checked_sub(1).map(EngineHash::Int),
        tokens: tokens_of(range),
        block_size: SIZE,
        extra: Extra::PerBlock(Vec::new()),
        lora: None,
        tier: Tier::Gpu,
        group: 0,
        kind: GroupKind::Full,
    }
}

/// The same blocks on the cpu, as a connector announces them.
fn on_cpu(range: std::ops::Range<u64>) -> Vec<Store> {
    let one = |block| Store {
        parent: None,
        tokens: Vec::new(),
        block_size: 0,
        tier: Tier::Cpu,
        kind: GroupKind::Other,
        ..blocks(block..block + 1)
    };
    range.map(one).collect()
}

fn gpu(tokens: u32) -> PerTier<u32> {
    PerTier { gpu: tokens, ..PerTier::default() }
}

fn live(cause: LossCause) -> Loss {
    Loss { cause, origin: Origin::Live }
}

impl Bench {
    fn new() -> Self {
        Self::with(Limits::default())
    }

    fn with(limits: Limits) -> Self {
        let index = Index::new(0x5eed, limits);
        let rank = index.add_rank(RankOptions::default());
        Self { index, rank }
    }

    fn store(&self, store: &Store) -> fak_index::Applied {
        self.index.store(self.rank, store, TierSet::ALL)
    }

    fn store_all(&self, stores: &[Store]) {
        for store in stores {
            self.store(store);
        }
    }

    fn remove(&self, hashes: std::ops::Range<u64>, tier: Tier, origin: Origin) {
        let hashes = hashes.map(EngineHash::Int).collect();
        self.index.remove(self.rank, &Remove { hashes, tier, group: 0 }, origin);
    }

    fn evict(&self, hashes: std::ops::Range<u64>) {
        self.remove(hashes, Tier::Gpu, Origin::Live);
    }

    fn demote(&self, tiers: TierSet, cause: LossCause) {
        self.index.demote(self.rank, tiers, Belief::Unknown, Loss::without_event(cause));
    }

    /// Blocks held of a prompt of four blocks, on gpu and cpu.
    fn held(&self) -> (u32, u32) {
        let held = self.index.held(self.rank, &plain(&prompt(4))).blocks;
        (held.gpu, held.cpu)
    }

    fn mark(&self) -> Mark {
        self.index.held_and_mark(self.rank, &plain(&prompt(4))).1
    }

    fn confirm(&self, tokens: u32, since: Mark) -> u32 {
        self.index.confirm(self.rank, &plain(&prompt(4)), tokens, since)
    }

    fn loss(&self, mark: Mark, claimed: PerTier<u32>) -> Option<Loss> {
        self.index.loss_since(self.rank, &plain(&prompt(4)), mark, &claimed)
    }
}

#[test]
fn a_hit_that_is_announced_again_is_no_further_copy() {
    let bench = Bench::new();
    assert_eq!(bench.store(&blocks(0..3)).gained, 3);
    assert_eq!(bench.store(&blocks(0..3)).repeats, 3);
    bench.evict(1..3);
    assert_eq!(bench.held(), (1, 0));
    // One that is not from the root is a copy, and then each removal takes one.
    bench.store(&blocks(1..3));
    assert_eq!(bench.store(&blocks(1..3)).copies, 2);
    bench.store(&blocks(0..3));
    bench.evict(1..3);
    assert_eq!(bench.held(), (3, 0));
    bench.evict(1..3);
    assert_eq!(bench.held(), (1, 0));
}

#[test]
fn an_announcement_of_a_hit_puts_back_what_was_demoted() {
    let bench = Bench::new();
    bench.store(&blocks(0..4));
    bench.demote(TierSet::ALL, LossCause::Doubt);
    assert_eq!(bench.store(&blocks(0..3)).gained, 3);
    assert_eq!(bench.held(), (3, 0));
    bench.evict(2..3);
    assert_eq!(bench.held(), (2, 0));
}

#[test]
fn a_tier_that_is_set_aside_counts_for_nothing_until_it_is_reinstated() {
    let bench = Bench::new();
    bench.store(&blocks(0..4));
    bench.store_all(&on_cpu(0..4));
    bench.index.set_aside(bench.rank, TierSet::GPU);
    assert_eq!(bench.held(), (0, 4));
    bench.index.set_aside(bench.rank, TierSet::ALL);
    let held = bench.index.held(bench.rank, &plain(&prompt(4)));
    assert_eq!((held.blocks_total(), held.reason), (0, HeldReason::SetAside));
    let key = bench.index.chain(&plain(&tokens_of(0..1)), SIZE)[0];
    assert_eq!(bench.index.belief(bench.rank, Tier::Gpu, key), Belief::Unknown);
    assert!(bench.index.has_blocks(bench.rank));
    assert_eq!(bench.index.stats(bench.rank).aside, TierSet::ALL);
    bench.index.reinstate(bench.rank, TierSet::GPU);
    assert_eq!(bench.held(), (4, 0));
    bench.index.reinstate(bench.rank, TierSet::ALL);
    assert_eq!(bench.held(), (4, 0));
    bench.evict(1..2);
    assert_eq!(bench.held(), (1, 3));
}

#[test]
fn events_go_on_into_a_tier_that_is_set_aside() {
    let bench = Bench::new();
    bench.store(&blocks(0..3));
    let mark = bench.mark();
    bench.index.set_aside(bench.rank, TierSet::GPU);
    bench.evict(2..3);
    // The fence is closed, so that it may not warm; the tier that comes back has it all the same.
    let stored = bench.index.store(bench.rank, &blocks(2..4), TierSet::CONNECTOR);
    assert_eq!((stored.gained, stored.fenced), (2, 0));
    bench.index.reinstate(bench.rank, TierSet::GPU);
    assert_eq!(bench.held(), (4, 0));
    // Nothing broke what was not touched meanwhile.
    assert_eq!(bench.index.held_since(bench.rank, &plain(&prompt(4)), mark), 2 * SIZE);
}

#[test]
fn a_demoted_tier_has_nothing_to_reinstate() {
    let bench = Bench::new();
    bench.store(&blocks(0..4));
    bench.index.set_aside(bench.rank, TierSet::GPU);
    bench.demote(TierSet::GPU, LossCause::Cleared);
    assert_eq!(bench.index.stats(bench.rank).aside, TierSet::NONE);
    // What the fence keeps out stays out.
    assert_eq!(bench.index.store(bench.rank, &blocks(0..2), TierSet::NONE).fenced, 2);
    bench.index.reinstate(bench.rank, TierSet::GPU);
    assert_eq!(bench.held(), (0, 0));
    // Nor has one of another life.
    bench.store(&blocks(0..4));
    bench.index.set_aside(bench.rank, TierSet::ALL);
    bench.index.forget_identities(bench.rank);
    bench.index.reinstate(bench.rank, TierSet::ALL);
    bench.store(&blocks(0..1));
    assert_eq!(bench.held(), (1, 0));
    let key = bench.index.chain(&plain(&tokens_of(0..1)), SIZE)[0];
    assert_eq!(bench.index.belief(bench.rank, Tier::Cpu, key), Belief::Unknown);
}

#[test]
fn setting_aside_touches_no_block() {
    let bench = Bench::new();
    bench.store(&blocks(0..4));
    bench.index.set_aside(bench.rank, TierSet::ALL);
    let stats = bench.index.stats(bench.rank);
    assert_eq!((stats.blocks.gpu, stats.backlog), (4, 0));
    bench.demote(TierSet::ALL, LossCause::OwnAction);
    let stats = bench.index.stats(bench.rank);
    assert_eq!((stats.blocks.gpu, stats.backlog), (0, 4));
}

#[test]
fn a_confirmed_hit_brings_its_blocks_back() {
    let bench = Bench::new();
    bench.store(&blocks(0..4));
    bench.demote(TierSet::ALL, LossCause::Doubt);
    let mark = bench.mark();
    // Whole blocks of what the engine used, and nothing beyond.
    assert_eq!(bench.confirm(3 * SIZE + 1, mark), 3);
    assert_eq!(bench.held(), (3, 0));
    assert_eq!(bench.confirm(3 * SIZE, mark), 0);
    assert_eq!(bench.index.stats(bench.rank).totals.confirmed, 3);
    // The first removal takes a block.
    bench.evict(1..2);
    assert_eq!(bench.held(), (1, 0));
}

#[test]
fn a_hit_from_before_a_loss_confirms_nothing() {
    for cause in LossCause::ALL {
        let bench = Bench::new();
        bench.store(&blocks(0..4));
        let mark = bench.mark();
        bench.demote(TierSet::GPU, *cause);
        assert_eq!(bench.confirm(4 * SIZE, mark), 0, "{cause}");
        assert_eq!(bench.confirm(4 * SIZE, bench.mark()), 4, "{cause}");
    }
    // A removal takes its block and those after it, whether the block was believed or not.
    for is_believed in [true, false] {
        let bench = Bench::new();
        bench.store(&blocks(0..4));
        if !is_believed {
            bench.demote(TierSet::ALL, LossCause::Doubt);
        }
        let mark = bench.mark();
        bench.evict(2..3);
        bench.confirm(4 * SIZE, mark);
        assert_eq!(bench.held(), (2, 0), "{is_believed}");
    }
}

#[test]
fn a_removal_that_was_forgotten_confirms_nothing() {
    let bench = Bench::with(Limits { losses: 2, ..Limits::default() });
    bench.store(&blocks(0..4));
    let mark = bench.mark();
    bench.evict(3..4);
    assert_eq!(bench.confirm(4 * SIZE, mark), 0);
    bench.evict(7..9);
    assert_eq!(bench.confirm(4 * SIZE, mark), 0);
    assert_eq!(bench.confirm(4 * SIZE, bench.mark()), 1);
}

#[test]
fn the_late_store_of_a_confirmed_block_is_no_further_copy() {
    let bench = Bench::new();
    bench.store(&blocks(0..4));
    bench.demote(TierSet::ALL, LossCause::Doubt);
    assert_eq!(bench.confirm(4 * SIZE, bench.mark()), 4);
    // What the engine published before it was used arrives after the answer.
    assert_eq!(bench.store(&blocks(2..4)).repeats, 2);
    // The next one is a copy.
    assert_eq!(bench.store(&blocks(3..4)).copies, 1);
    bench.evict(2..4);
    assert_eq!(bench.held(), (2, 0));
    bench.store(&blocks(2..3));
    assert_eq!(bench.held(), (4, 0));
}

#[test]
fn what_a_hit_does_not_show_is_not_confirmed() {
    // A content under two hashes: nobody says which of them the engine used.
    let bench = Bench::new();
    bench.store(&blocks(0..2));
    let twin = Store { hashes: vec![EngineHash::Int(100)], ..blocks(1..2) };
    bench.store(&twin);
    bench.demote(TierSet::ALL, LossCause::Doubt);
    assert_eq!((bench.confirm(2 * SIZE, bench.mark()), bench.held()), (1, (1, 0)));
    // A tier that is set aside, or a rank whose beliefs are suspended.
    bench.index.set_aside(bench.rank, TierSet::GPU);
    assert_eq!(bench.confirm(2 * SIZE, bench.mark()), 0);
    bench.index.reinstate(bench.rank, TierSet::GPU);
    bench.index.suspend(bench.rank);
    assert_eq!(bench.confirm(2 * SIZE, bench.mark()), 0);
    // A group of a kind that nobody tells: a hit needs perhaps its last block alone.
    let bench = Bench::new();
    bench.store(&blocks(0..2));
    bench.store(&Store { group: 1, kind: GroupKind::Other, ..blocks(0..2) });
    bench.demote(TierSet::ALL, LossCause::Doubt);
    assert_eq!(bench.confirm(2 * SIZE, bench.mark()), 0);
    // An adapter: its name may stand for another one by now.
    let bench = Bench::new();
    bench.store(&Store { lora: Some("sql".into()), ..blocks(0..2) });
    bench.demote(TierSet::ALL, LossCause::Doubt);
    let (tokens, since) = (prompt(2), bench.mark());
    let prompt = Prompt { tokens: &tokens, lora: Some("sql"), salt: None };
    assert_eq!(bench.index.confirm(bench.rank, &prompt, 2 * SIZE, since), 0);
}

#[test]
fn a_hit_confirms_of_a_window_what_its_next_token_needs() {
    let bench = Bench::new();
    let kind = GroupKind::Window { tokens: Some(SIZE + 1) };
    bench.store(&blocks(0..4));
    bench.store(&Store { group: 1, kind, ..blocks(0..4) });
    bench.demote(TierSet::ALL, LossCause::Doubt);
    bench.confirm(3 * SIZE, bench.mark());
    let stats = bench.index.stats(bench.rank);
    assert_eq!(stats.blocks.gpu, 3 + 1);
}

#[test]
fn a_loss_is_told_with_its_cause_and_how_it_came() {
    for origin in [Origin::Live, Origin::Replay] {
        let bench = Bench::new();
        bench.store(&blocks(0..4));
        let mark = bench.mark();
        assert_eq!(bench.loss(mark, gpu(3 * SIZE)), None);
        bench.remove(2..3, Tier::Gpu, origin);
        let loss = Some(Loss { cause: LossCause::Removed, origin });
        assert_eq!(bench.loss(mark, gpu(3 * SIZE)), loss);
        assert_eq!(bench.loss(mark, gpu(2 * SIZE)), None, "the claim did not rest on it");
        // It came back, and the claim was wrong in between all the same.
        bench.store(&blocks(2..3));
        assert_eq!(bench.loss(mark, gpu(3 * SIZE)), loss);
        assert_eq!(bench.loss(bench.mark(), gpu(3 * SIZE)), None);
    }
}

#[test]
fn a_demotion_is_told_by_its_cause() {
    for cause in LossCause::ALL {
        let bench = Bench::new();
        bench.store(&blocks(0..4));
        let mark = bench.mark();
        bench.demote(TierSet::CONNECTOR, *cause);
        assert_eq!(bench.loss(mark, gpu(4 * SIZE)), None, "another tier");
        bench.demote(TierSet::GPU, *cause);
        let loss = Some(Loss::without_event(*cause));
        assert_eq!(bench.loss(mark, gpu(4 * SIZE)), loss);
        bench.index.forget_identities(bench.rank);
        assert_eq!(bench.loss(mark, gpu(4 * SIZE)), loss, "whatever else is forgotten");
        assert_eq!(bench.loss(bench.mark(), gpu(4 * SIZE)), None);
    }
}

#[test]
fn what_the_engine_did_explains_before_what_fak_did() {
    let bench = Bench::new();
    bench.store(&blocks(0..4));
    let mark = bench.mark();
    bench.demote(TierSet::ALL, LossCause::Doubt);
    assert_eq!(bench.loss(mark, gpu(4 * SIZE)).map(Loss::is_engines), Some(false));
    // The event that shows the engine's own loss came after fak had lost its belief.
    bench.remove(1..2, Tier::Gpu, Origin::Replay);
    bench.evict(3..4);
    assert_eq!(bench.loss(mark, gpu(3 * SIZE)).map(|loss| loss.origin), Some(Origin::Replay));
    assert_eq!(bench.loss(mark, gpu(4 * SIZE)), Some(live(LossCause::Removed)));
    bench.index.remove_rank(bench.rank);
    assert_eq!(bench.loss(mark, gpu(SIZE)), Some(Loss::without_event(LossCause::NewLife)));
}

#[test]
fn a_copy_or_another_name_that_went_is_no_loss() {
    let bench = Bench::new();
    bench.store(&blocks(0..4));
    bench.store(&blocks(1..4));
    bench.store(&Store { hashes: vec![EngineHash::Int(100)], ..blocks(2..3) });
    let mark = bench.mark();
    bench.evict(1..4);
    bench.evict(2..3);
    assert_eq!((bench.held(), bench.loss(mark, gpu(4 * SIZE))), ((4, 0), None));
    bench.evict(100..101);
    assert_eq!(bench.loss(mark, gpu(4 * SIZE)), Some(live(LossCause::Removed)));
}

#[test]
fn a_loss_is_of_the_tier_that_the_claim_was_of() {
    let bench = Bench::new();
    bench.store(&blocks(0..2));
    bench.store_all(&on_cpu(0..4));
    bench.store(&blocks(2..4));
    bench.evict(2..4);
    assert_eq!(bench.held(), (2, 2));
    let mark = bench.mark();
    let claimed = PerTier { cpu: 2 * SIZE, ..gpu(2 * SIZE) };
    bench.remove(0..2, Tier::Cpu, Origin::Live);
    assert_eq!(bench.loss(mark, claimed), None, "the gpu had those");
    bench.remove(3..4, Tier::Cpu, Origin::Live);
    assert_eq!(bench.loss(mark, claimed), Some(live(LossCause::Removed)));
}

#[test]
fn a_removal_of_which_the_memory_is_gone_is_a_removal_still() {
    let bench = Bench::with(Limits { losses: 1, ..Limits::default() });
    bench.store(&blocks(0..4));
    let mark = bench.mark();
    bench.evict(3..4);
    bench.evict(9..20);
    assert_eq!(bench.loss(mark, gpu(3 * SIZE)), None);
    let forgotten = Some(Loss::without_event(LossCause::Removed));
    assert_eq!(bench.loss(mark, gpu(4 * SIZE)), forgotten);
}

#[test]
fn a_contradiction_explains_no_claim() {
    let bench = Bench::new();
    bench.store(&blocks(0..4));
    let mark = bench.mark();
    let extra = Extra::PerBlock(vec![vec![ExtraKey::Int(1)]]);
    assert_eq!(bench.store(&Store { extra, ..blocks(3..4) }).conflicts, 1);
    assert_eq!((bench.held(), bench.loss(mark, gpu(4 * SIZE))), ((3, 0), None));
}
