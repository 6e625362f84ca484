//! What brings a belief back, what takes it, and what is known of why it went.

use fak_index::{
    EngineHash, Extra, ExtraKey, GroupKind, HeldReason, Index, Limits, Loss, Mark, Offload, Origin,
    Prompt, RankId, RankOptions, Remove, Store,
};
use fak_kernel::vocab::PerTier;
use fak_kernel::{Belief, LossCause, Tier, TierSet};

const SIZE: u32 = 4;

/// A rank whose connector announces every removal and stores each block by itself.
fn by_block() -> RankOptions {
    RankOptions { offload: Offload::BY_BLOCK, ..RankOptions::default() }
}

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
        let rank = index.add_rank(by_block());
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
    let unbroken = bench.index.held_since(bench.rank, &plain(&prompt(4)), mark);
    assert_eq!(unbroken.tokens().gpu, 2 * SIZE);
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
fn what_was_demoted_waits_for_the_sweep_up_to_the_bound() {
    let bench = Bench::with(Limits { backlog: 4, ..Limits::default() });
    for (count, backlog) in [(4, 4), (1, 1), (3, 4)] {
        bench.store(&blocks(0..count));
        bench.demote(TierSet::GPU, LossCause::OwnAction);
        assert_eq!(bench.index.stats(bench.rank).backlog, backlog, "the oldest was freed");
    }
    // So does what the hashes of an earlier life named.
    let bench = Bench::new();
    bench.store(&blocks(0..2));
    bench.index.forget_identities(bench.rank);
    assert_eq!(bench.index.stats(bench.rank).backlog, 2 + 2);
    // The sweep takes no more than it was told to, by whole tables.
    assert_eq!((bench.index.sweep(2), bench.index.stats(bench.rank).backlog), (2, 2));
    assert_eq!((bench.index.sweep(1), bench.index.stats(bench.rank).backlog), (2, 0));
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
fn what_came_after_a_mark_was_not_held_since() {
    let bench = Bench::new();
    bench.store(&blocks(0..2));
    let mark = bench.mark();
    bench.store(&blocks(2..3));
    let since = |mark| bench.index.held_since(bench.rank, &plain(&prompt(4)), mark).blocks.gpu;
    assert_eq!((bench.held(), since(mark)), ((3, 0), 2));
    bench.demote(TierSet::ALL, LossCause::Doubt);
    let mark = bench.mark();
    assert_eq!(bench.confirm(3 * SIZE, mark), 3);
    assert_eq!((bench.held(), since(mark)), ((3, 0), 0));
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
    // Also where it was told once.
    let bench = Bench::new();
    bench.store(&blocks(0..2));
    bench.store(&Store { kind: GroupKind::Other, ..blocks(1..2) });
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
    for cause in LossCause::ALL {
        let is_faks = matches!(cause, LossCause::OwnAction | LossCause::Doubt);
        assert_eq!(Loss::without_event(*cause).is_engines(), !is_faks, "{cause}");
    }
}

#[test]
fn a_block_is_believed_in_whichever_group_holds_it() {
    let bench = Bench::new();
    bench.store(&Store { group: 1, ..blocks(0..1) });
    let key = bench.index.chain(&plain(&prompt(1)), SIZE)[0];
    assert_eq!(bench.index.belief(bench.rank, Tier::Gpu, key), Belief::Proven);
}

#[test]
fn a_removal_is_of_the_group_that_it_names() {
    let bench = Bench::new();
    let kind = GroupKind::Window { tokens: Some(SIZE) };
    bench.store(&blocks(0..4));
    bench.store(&Store { group: 1, kind, ..blocks(0..4) });
    let mark = bench.mark();
    bench.index.demote_prompt(bench.rank, &plain(&prompt(4)), 0);
    // The window slides past the first block, and no claim of two blocks rests on that.
    let hashes = vec![EngineHash::Int(0)];
    bench.index.remove(bench.rank, &Remove { hashes, tier: Tier::Gpu, group: 1 }, Origin::Live);
    let doubted = Some(Loss::without_event(LossCause::Doubt));
    assert_eq!(bench.loss(mark, gpu(2 * SIZE)), doubted);
    assert_eq!(bench.loss(mark, gpu(SIZE)), Some(live(LossCause::Removed)));
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
    let bench = Bench::with(Limits { losses: 2, ..Limits::default() });
    bench.store(&blocks(0..4));
    let mark = bench.mark();
    bench.evict(9..20);
    assert_eq!(bench.loss(mark, gpu(4 * SIZE)), None, "all is there");
    bench.evict(3..4);
    bench.evict(20..21);
    assert_eq!(bench.loss(mark, gpu(4 * SIZE)), Some(live(LossCause::Removed)), "two are kept");
    bench.evict(21..22);
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

#[test]
fn a_repeated_hit_shows_of_a_window_what_it_has_to_hold() {
    let kind = GroupKind::Window { tokens: Some(2 * SIZE) };
    let window = |range| Store { group: 1, kind, ..blocks(range) };
    // What was computed is there, all of it.
    let bench = Bench::new();
    bench.store(&blocks(0..4));
    assert_eq!(bench.store(&window(0..4)).gained, 4);
    // The window slid on; a hit lists every block, also those that are gone.
    let hashes = (0..2).map(EngineHash::Int).collect();
    bench.index.remove(bench.rank, &Remove { hashes, tier: Tier::Gpu, group: 1 }, Origin::Live);
    assert_eq!(bench.held(), (4, 0));
    let applied = bench.store(&window(0..4));
    assert_eq!((applied.gained, applied.repeats, applied.fenced), (0, 2, 2));
    // Behind a fence, or where something may be missing, the end alone is sure: what the token
    // after the hit attends to.
    bench.demote(TierSet::ALL, LossCause::Doubt);
    let applied = bench.store(&window(0..4));
    assert_eq!((applied.gained, applied.fenced), (2, 2));
    let bench = Bench::new();
    bench.index.store(bench.rank, &window(0..1), TierSet::NONE);
    assert_eq!(bench.store(&window(0..4)).gained, 2);
    // Of a kind that is not known nothing is sure; one that is not named is of an engine that
    // repeats no hits.
    for (kind, gained) in [(GroupKind::Other, 0), (GroupKind::NotReported, 4)] {
        let bench = Bench::new();
        bench.demote(TierSet::ALL, LossCause::Doubt);
        assert_eq!(bench.store(&Store { kind, ..blocks(0..4) }).gained, gained, "{kind:?}");
    }
}

/// A bench of 17 blocks that were named and evicted, whose connector is as told.
fn offloading(offload: Offload) -> Bench {
    let bench = Bench::new();
    bench.index.set_offload(bench.rank, offload);
    bench.store(&blocks(0..16));
    bench.evict(0..16);
    bench
}

fn in_chunks(blocks_per_chunk: Option<u32>) -> Offload {
    Offload { blocks_per_chunk, ..Offload::BY_BLOCK }
}

/// Blocks proven and estimated of a prompt of so many blocks, on the gpu and behind it.
fn held_of(bench: &Bench, blocks: u64) -> (u32, u32, u32) {
    let held = bench.index.held(bench.rank, &plain(&prompt(blocks)));
    (held.blocks.gpu, held.blocks.cpu, held.estimated)
}

// The engine's rule: nothing is loaded where less than a chunk would be left to load.
#[test]
fn a_chunk_counts_whole_or_not_at_all() {
    let bench = offloading(in_chunks(Some(4)));
    let last_of_chunks = [3, 7, 11];
    for last in last_of_chunks {
        bench.store_all(&on_cpu(last..last + 1));
    }
    // A prompt that ends inside a chunk has none of it.
    for blocks in 1..4 {
        assert_eq!(held_of(&bench, blocks), (0, 0, 0), "{blocks}");
    }
    // Whatever the gpu turns out to hold: at least all but the last chunk, and one block.
    assert_eq!(held_of(&bench, 4), (0, 1, 3));
    assert_eq!(held_of(&bench, 7), (0, 1, 3));
    assert_eq!(held_of(&bench, 16), (0, 9, 3));
    // With three blocks on the gpu the fourth alone is not loaded.
    bench.store(&blocks(0..3));
    assert_eq!(held_of(&bench, 4), (3, 0, 1));
    assert_eq!(held_of(&bench, 16), (3, 6, 3));
    // The chunk in which the gpu's run ends is looked up as well.
    bench.remove(3..4, Tier::Cpu, Origin::Live);
    assert_eq!(held_of(&bench, 16), (3, 0, 0));
    bench.store(&blocks(3..4));
    assert_eq!(held_of(&bench, 16), (4, 5, 3));
}

#[test]
fn the_blocks_of_a_chunk_that_describes_itself_are_no_chunks() {
    // All its blocks in one event, each of which other chunks may share.
    let chunk = |range| Store { tier: Tier::Cpu, ..blocks(range) };
    for configured in [None, Some(4)] {
        let bench = offloading(in_chunks(configured));
        bench.store_all(&[chunk(0..4), chunk(4..8)]);
        assert_eq!(held_of(&bench, 2), (0, 0, 0), "{configured:?}");
        assert_eq!(held_of(&bench, 16), (0, 5, 3), "{configured:?}");
        bench.remove(0..4, Tier::Cpu, Origin::Live);
        assert_eq!(held_of(&bench, 16), (0, 0, 0), "{configured:?}");
    }
}

#[test]
fn a_chunk_of_a_size_that_is_not_known_is_an_estimate() {
    // Nothing told, and then two sizes, or one that is not the configured one, or not in blocks.
    let bench = offloading(in_chunks(None));
    bench.store_all(&on_cpu(0..4));
    assert_eq!(held_of(&bench, 16), (0, 0, 4));
    bench.index.set_offload(bench.rank, Offload::BY_BLOCK);
    assert_eq!(held_of(&bench, 16), (0, 4, 0));
    let sized = |block_size| Store { block_size, ..on_cpu(3..4).remove(0) };
    for (configured, sizes) in [
        (Some(2), &[4 * SIZE][..]),
        (None, &[4 * SIZE, 2 * SIZE][..]),
        (None, &[4 * SIZE + 1][..]),
        (None, &[0][..]),
    ] {
        let bench = offloading(in_chunks(configured));
        sizes.iter().for_each(|size| bench.store_all(&[sized(*size)]));
        bench.store(&blocks(0..3));
        assert_eq!(held_of(&bench, 16), (3, 0, 1), "{configured:?} {sizes:?}");
    }
    // Nor is it a chunk where the gpu holds nothing, or one of no blocks.
    let bench = offloading(in_chunks(None));
    bench.store_all(&[sized(4 * SIZE + 1)]);
    assert_eq!(held_of(&bench, 16), (0, 0, 0));
    let bench = offloading(in_chunks(Some(0)));
    bench.store_all(&on_cpu(0..4));
    assert_eq!(held_of(&bench, 16), (0, 0, 4));
    // With one size, which events up to vLLM 0.19.1 tell, it counts.
    let bench = offloading(in_chunks(None));
    bench.store_all(&[sized(4 * SIZE)]);
    assert_eq!(held_of(&bench, 16), (0, 1, 3));
}

#[test]
fn chunks_of_several_groups_are_no_claim() {
    let bench = offloading(in_chunks(Some(2)));
    bench.store_all(&on_cpu(1..2));
    assert_eq!(held_of(&bench, 16), (0, 1, 1));
    let of_1 = |store: &Store| Store { group: 1, ..store.clone() };
    bench.store(&of_1(&blocks(0..4)));
    bench.store_all(&on_cpu(1..2).iter().map(of_1).collect::<Vec<_>>());
    assert_eq!(held_of(&bench, 16), (0, 0, 0));
}

#[test]
fn a_tier_whose_removals_nobody_announces_is_an_estimate() {
    let estimated = Offload { estimated: TierSet::of(Tier::Cpu), ..Offload::BY_BLOCK };
    let bench = offloading(estimated);
    bench.store_all(&on_cpu(0..4));
    let held = bench.index.held(bench.rank, &plain(&prompt(4)));
    assert_eq!((held.blocks_total(), held.tokens()), (0, PerTier::default()));
    assert_eq!((held.estimated_tokens(), held.reason), (4 * SIZE, HeldReason::Miss));
    // Neither proven nor known to be gone.
    let keys = bench.index.chain(&plain(&prompt(8)), SIZE);
    for key in [keys[0], keys[7]] {
        assert_eq!(bench.index.belief(bench.rank, Tier::Cpu, key), Belief::Unknown);
    }
    bench.index.set_offload(bench.rank, Offload::BY_BLOCK);
    assert_eq!(held_of(&bench, 4), (0, 4, 0));
    assert_eq!(bench.index.belief(bench.rank, Tier::Cpu, keys[7]), Belief::Gone);
    // Of several connectors the first that has anything is asked, and nobody tells which is first.
    let disk = Offload { estimated: TierSet::of(Tier::Disk), ..Offload::BY_BLOCK };
    bench.index.set_offload(bench.rank, disk);
    assert_eq!(held_of(&bench, 4), (0, 4, 0));
    bench.store(&Store { tier: Tier::Disk, ..on_cpu(0..1).remove(0) });
    assert_eq!(held_of(&bench, 4), (0, 0, 1));
}

#[test]
fn nothing_is_proven_of_a_connector_of_which_nothing_is_known() {
    let bench = Bench::new();
    let rank = bench.index.add_rank(RankOptions::default());
    bench.index.store(rank, &blocks(0..4), TierSet::ALL);
    on_cpu(0..4).iter().for_each(|store| {
        bench.index.store(rank, store, TierSet::ALL);
    });
    let hashes = (1..4).map(EngineHash::Int).collect();
    bench.index.remove(rank, &Remove { hashes, tier: Tier::Gpu, group: 0 }, Origin::Live);
    let held = bench.index.held(rank, &plain(&prompt(4)));
    assert_eq!((held.blocks.gpu, held.blocks_total(), held.estimated), (1, 1, 3));
}

#[test]
fn the_loss_of_a_chunk_explains_a_claim_of_any_of_its_blocks() {
    let bench = offloading(in_chunks(Some(4)));
    for last in [3, 7] {
        bench.store_all(&on_cpu(last..last + 1));
    }
    let tokens = prompt(16);
    let (held, mark) = bench.index.held_and_mark(bench.rank, &plain(&tokens));
    assert_eq!(held.blocks.cpu, 5);
    let loss = || bench.index.loss_since(bench.rank, &plain(&tokens), mark, &held.tokens());
    assert_eq!(loss(), None);
    bench.remove(0..3, Tier::Cpu, Origin::Live);
    assert_eq!(loss(), None, "a chunk is named by its last block");
    bench.remove(7..8, Tier::Cpu, Origin::Live);
    assert_eq!(loss(), Some(live(LossCause::Removed)));
    // The chunk in which the gpu's run ends is one of them.
    let bench = offloading(in_chunks(Some(4)));
    bench.store(&blocks(0..3));
    for last in [3, 7] {
        bench.store_all(&on_cpu(last..last + 1));
    }
    let (held, mark) = bench.index.held_and_mark(bench.rank, &plain(&tokens));
    assert_eq!((held.blocks.gpu, held.blocks.cpu), (3, 2));
    let loss = || bench.index.loss_since(bench.rank, &plain(&tokens), mark, &held.tokens());
    assert_eq!(loss(), None);
    bench.remove(3..4, Tier::Cpu, Origin::Live);
    assert_eq!(loss(), Some(live(LossCause::Removed)));
}

#[test]
fn a_prompt_that_is_doubted_loses_its_own_blocks_behind_those_that_were_used() {
    let bench = Bench::new();
    bench.store(&blocks(0..4));
    bench.store_all(&on_cpu(0..4));
    let other: Vec<u32> = tokens_of(10..14).into_iter().chain([7]).collect();
    bench.store(&Store { parent: None, ..blocks(10..14) });
    let mark = bench.mark();
    bench.index.demote_prompt(bench.rank, &plain(&prompt(4)), 2 * SIZE + 1);
    assert_eq!(bench.held(), (2, 0), "on no tier");
    assert_eq!(bench.index.held(bench.rank, &plain(&other)).blocks.gpu, 4, "others stay");
    let doubted = Loss::without_event(LossCause::Doubt);
    assert_eq!(bench.loss(mark, gpu(4 * SIZE)), Some(doubted));
    assert_eq!(bench.loss(mark, gpu(2 * SIZE)), None);
    let key = bench.index.chain(&plain(&prompt(4)), SIZE)[3];
    assert_eq!(bench.index.belief(bench.rank, Tier::Gpu, key), Belief::Unknown, "not gone");
    assert_eq!(bench.confirm(4 * SIZE, mark), 0, "a hit from before does not bring them back");
    assert_eq!(bench.confirm(4 * SIZE, bench.mark()), 2);
}

/// Of a prompt whose first block was known to be gone.
#[test]
fn only_an_event_of_the_engine_explains_a_block_that_was_gone_and_is_there() {
    let has_come = |happens: &dyn Fn(&Bench)| {
        let bench = Bench::new();
        bench.store(&blocks(0..2));
        bench.evict(0..2);
        let mark = bench.index.held_and_mark(bench.rank, &plain(&prompt(4))).1;
        happens(&bench);
        bench.index.may_have_come_since(bench.rank, Some(&plain(&prompt(4))), mark)
    };
    assert!(!has_come(&|_| ()));
    assert!(has_come(&|bench| {
        bench.store(&blocks(0..1));
    }));
    assert!(has_come(&|bench| {
        bench.store(&blocks(0..1));
        bench.evict(0..1);
    }));
    assert!(has_come(&|bench| {
        bench.index.store(bench.rank, &blocks(0..1), TierSet::NONE);
    }));
    assert!(has_come(&|bench| bench.store_all(&on_cpu(0..1))), "on another tier");
    assert!(has_come(&|bench| bench.demote(TierSet::GPU, LossCause::Cleared)), "hidden behind it");
    assert!(has_come(&|bench| bench.index.remove_rank(bench.rank)), "another life");
    assert!(!has_come(&|bench| {
        bench.store(&blocks(1..2));
    }));
    assert!(!has_come(&|bench| bench.demote(TierSet::GPU, LossCause::OwnAction)));
    assert!(!has_come(&|bench| {
        let mark = bench.index.held_and_mark(bench.rank, &plain(&prompt(4))).1;
        assert_eq!(bench.index.confirm(bench.rank, &plain(&prompt(4)), SIZE, mark), 1);
    }));
}
