//! Faults that people met with prefix indexes, each as the input that shows it (CASES.md, the
//! number in the comment).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use fak_index::{
    EngineHash, Extra, ExtraKey, GroupKind, Held, HeldReason, Index, Key, Lease, Limits, Loss,
    Offload, Origin, Prompt, RankId, RankOptions, Remove, Store,
};
use fak_kernel::{Belief, LossCause, Tier, TierSet};

const SIZE: u32 = 4;

/// A rank whose connector announces every removal and stores each block by itself.
fn by_block() -> RankOptions {
    RankOptions { offload: Offload::BY_BLOCK, ..RankOptions::default() }
}

/// An action of fak's own.
fn own() -> Loss {
    Loss::without_event(LossCause::OwnAction)
}

/// An index with one rank.
struct Bench {
    index: Index,
    rank: RankId,
}

impl Bench {
    fn new() -> Self {
        Self::with(Limits::default(), by_block())
    }

    fn with(limits: Limits, options: RankOptions) -> Self {
        let index = Index::new(0x5eed, limits);
        let rank = index.add_rank(options);
        Self { index, rank }
    }

    fn store(&self, store: &Store) -> fak_index::Applied {
        self.index.store(self.rank, store, TierSet::ALL)
    }

    fn remove(&self, hashes: &[u64], tier: Tier, group: u32) -> fak_index::Applied {
        let hashes = hashes.iter().copied().map(EngineHash::Int).collect();
        self.index.remove(self.rank, &Remove { hashes, tier, group }, Origin::Live)
    }

    /// Blocks held of a prompt of `blocks` blocks and one token more, on gpu and cpu.
    fn held(&self, blocks: u32) -> (u32, u32) {
        let held = self.held_of(&prompt_tokens(blocks));
        (held.blocks.gpu, held.blocks.cpu)
    }

    fn held_of(&self, tokens: &[u32]) -> Held {
        self.index.held(self.rank, &plain(tokens))
    }

    fn key(&self, block: u32) -> Key {
        let keys = self.index.chain(&plain(&tokens_of(0..=block)), SIZE);
        *keys.last().expect("one block at least")
    }

    fn belief(&self, tier: Tier, block: u32) -> Belief {
        self.index.belief(self.rank, tier, self.key(block))
    }
}

fn plain(tokens: &[u32]) -> Prompt<'_> {
    Prompt { tokens, lora: None, salt: None }
}

fn tokens_of(blocks: impl Iterator<Item = u32>) -> Vec<u32> {
    blocks.flat_map(|block| (0..SIZE).map(move |i| block * 100 + i)).collect()
}

fn prompt_tokens(blocks: u32) -> Vec<u32> {
    let mut tokens = tokens_of(0..blocks);
    tokens.push(u32::MAX);
    tokens
}

/// The block numbered `block` of one chain, under the hash `block + 1`, alone.
fn block(block: u32) -> Store {
    blocks(block..block + 1)
}

fn blocks(range: std::ops::Range<u32>) -> Store {
    Store {
        hashes: range.clone().map(hash).collect(),
        parent: range.start.checked_sub(1).map(hash),
        tokens: tokens_of(range),
        block_size: SIZE,
        extra: Extra::PerBlock(Vec::new()),
        lora: None,
        tier: Tier::Gpu,
        group: 0,
        kind: GroupKind::Full,
    }
}

fn hash(block: u32) -> EngineHash {
    EngineHash::Int(u64::from(block) + 1)
}

/// A store that tells only where blocks are.
fn located(range: std::ops::Range<u32>, tier: Tier) -> Store {
    Store {
        parent: None,
        tokens: Vec::new(),
        block_size: 0,
        tier,
        kind: GroupKind::Other,
        ..blocks(range)
    }
}

// 44
#[test]
fn children_of_unknown_parents_wait_and_link_in_any_depth() {
    let bench = Bench::new();
    for (n, waiting) in [(2, 1), (3, 2), (1, 3)] {
        bench.store(&block(n));
        assert_eq!(bench.held(4), (0, 0));
        assert_eq!(bench.index.stats(bench.rank).parked, waiting);
    }
    bench.store(&block(0));
    assert_eq!(bench.held(4), (4, 0));
    assert_eq!(bench.index.stats(bench.rank).parked, 0);
}

// 44
#[test]
fn the_oldest_waiting_child_goes_first_and_is_counted_in_blocks() {
    let bench = Bench::with(Limits { parked: 2, ..Limits::default() }, by_block());
    assert_eq!(bench.store(&blocks(3..5)).dropped, 0);
    assert_eq!(bench.store(&block(2)).dropped, 1);
    assert_eq!(bench.index.stats(bench.rank).totals.dropped, 1);
    bench.store(&blocks(0..2));
    assert_eq!(bench.held(5), (3, 0));
    // Block 3 was forgotten, so 4 waits on; announced again, it links.
    bench.store(&block(3));
    assert_eq!(bench.held(5), (5, 0));
}

// 44
#[test]
fn a_removed_child_no_longer_waits() {
    let bench = Bench::new();
    bench.store(&block(1));
    bench.remove(&[2], Tier::Gpu, 0);
    assert_eq!(bench.index.stats(bench.rank).parked, 0);
    bench.store(&block(0));
    assert_eq!(bench.held(2), (1, 0));
}

// 44
#[test]
fn a_child_that_waited_through_a_demotion_does_not_count() {
    let bench = Bench::new();
    bench.store(&block(1));
    bench.index.demote(bench.rank, TierSet::GPU, Belief::Unknown, own());
    bench.store(&block(0));
    assert_eq!(bench.held(2), (1, 0));
    assert_eq!(bench.belief(Tier::Gpu, 1), Belief::Unknown);
}

// 44
#[test]
fn a_child_that_may_not_gain_presence_is_learnt_all_the_same() {
    let bench = Bench::new();
    bench.index.store(bench.rank, &block(1), TierSet::CONNECTOR);
    bench.store(&block(0));
    assert_eq!(bench.held(2), (1, 0));
    bench.store(&located(1..2, Tier::Cpu));
    assert_eq!(bench.held(2), (1, 1));
}

// 46
#[test]
fn integers_of_either_sign_are_one_hash_and_bytes_are_another() {
    let bench = Bench::new();
    let with_hash = |hash, n: u32| Store { hashes: vec![hash], parent: None, ..block(n) };
    bench.store(&with_hash(EngineHash::from(-1_i64), 0));
    assert_eq!(bench.held(1), (1, 0));
    bench.remove(&[u64::MAX], Tier::Gpu, 0);
    assert_eq!(bench.held(1), (0, 0));

    let digest = EngineHash::from(&[7_u8; 32][..]);
    bench.store(&with_hash(digest.clone(), 0));
    assert_eq!(bench.held(1), (1, 0));
    let remove = Remove { hashes: vec![digest], tier: Tier::Gpu, group: 0 };
    assert_eq!(bench.index.remove(bench.rank, &remove, Origin::Live).removed, 1);
    assert_eq!(bench.held(1), (0, 0));

    // The integer 5 and the bytes "5", also where both are 8 bytes wide.
    let five = 5_u64.to_le_bytes();
    for bytes in [&b"5"[..], &five[..]] {
        assert_eq!(bench.store(&with_hash(EngineHash::Int(5), 0)).conflicts, 0);
        assert_eq!(bench.store(&with_hash(EngineHash::from(bytes), 7)).conflicts, 0);
    }
}

// 47
#[test]
fn a_block_is_there_until_its_last_copy_is_removed() {
    let bench = Bench::new();
    bench.store(&blocks(0..2));
    assert_eq!(bench.store(&block(1)).copies, 1);
    assert_eq!(bench.remove(&[2], Tier::Gpu, 0).copies_removed, 1);
    assert_eq!((bench.held(2), bench.belief(Tier::Gpu, 1)), ((2, 0), Belief::Proven));
    assert_eq!(bench.remove(&[2], Tier::Gpu, 0).removed, 1);
    assert_eq!((bench.held(2), bench.belief(Tier::Gpu, 1)), ((1, 0), Belief::Gone));
    assert_eq!(bench.remove(&[2], Tier::Gpu, 0).unknown_removals, 1);
    assert_eq!(bench.index.stats(bench.rank).totals.unknown_removals, 1);
    bench.store(&block(1));
    assert_eq!(bench.held(2), (2, 0));
}

// 47
#[test]
fn a_removal_after_a_gap_leaves_the_block_unknown() {
    let bench = Bench::new();
    bench.store(&block(0));
    bench.index.suspend(bench.rank);
    assert_eq!(bench.held_of(&prompt_tokens(1)).reason, HeldReason::Suspended);
    assert_eq!(bench.belief(Tier::Gpu, 0), Belief::Unknown);
    bench.index.demote(bench.rank, TierSet::ALL, Belief::Unknown, own());
    bench.index.restore(bench.rank);
    assert_eq!(bench.remove(&[1], Tier::Gpu, 0).unknown_removals, 1);
    assert_eq!((bench.held(1), bench.belief(Tier::Gpu, 0)), ((0, 0), Belief::Unknown));
}

// 47
#[test]
fn a_gap_that_closes_leaves_everything_as_it_was() {
    let bench = Bench::new();
    bench.store(&blocks(0..3));
    bench.index.suspend(bench.rank);
    bench.remove(&[3], Tier::Gpu, 0);
    assert_eq!(bench.held(3), (0, 0));
    bench.index.restore(bench.rank);
    assert_eq!(bench.held(3), (2, 0));
}

// 48
#[test]
fn a_prefix_is_usable_as_far_as_every_group_allows() {
    let bench = Bench::new();
    let window = GroupKind::Window { tokens: Some(2 * SIZE) };
    let in_window = |n| Store { group: 1, kind: window, ..block(n) };
    bench.store(&blocks(0..4));
    bench.store(&in_window(1));
    // The window needs the last two blocks of a prefix.
    assert_eq!(bench.held(4), (0, 0));
    bench.store(&in_window(2));
    assert_eq!(bench.held(4), (3, 0));
    bench.store(&in_window(3));
    assert_eq!(bench.held(4), (4, 0));
    bench.remove(&[4], Tier::Gpu, 1);
    assert_eq!(bench.held(4), (3, 0));
    bench.remove(&[1], Tier::Gpu, 0);
    assert_eq!(bench.held(4), (0, 0));
}

// 48
#[test]
fn a_group_of_unknown_kind_or_width_needs_every_block() {
    for kind in [GroupKind::Other, GroupKind::Window { tokens: None }] {
        let bench = Bench::new();
        bench.store(&blocks(0..3));
        bench.store(&Store { group: 1, kind, ..blocks(1..3) });
        assert_eq!(bench.held(3), (0, 0));
        bench.store(&Store { group: 1, kind, ..block(0) });
        assert_eq!(bench.held(3), (3, 0));
    }
}

// 48
#[test]
fn groups_with_block_sizes_of_their_own_claim_nothing() {
    let bench = Bench::new();
    bench.store(&blocks(0..2));
    let tokens = tokens_of(0..2);
    let hashes = vec![EngineHash::Int(99)];
    let wide = Store { group: 1, block_size: 2 * SIZE, hashes, tokens, ..blocks(0..2) };
    bench.store(&wide);
    assert_eq!(bench.held_of(&prompt_tokens(2)).reason, HeldReason::GroupsDiffer);
    assert_eq!(bench.held(2), (0, 0));
}

// 49
#[test]
fn the_block_size_is_learnt_and_a_short_prompt_has_its_own_reason() {
    let bench = Bench::new();
    let tokens: Vec<u32> = (0..784).collect();
    assert_eq!(bench.held_of(&tokens).reason, HeldReason::NoBlockSize);
    bench.store(&Store { tokens: tokens.clone(), block_size: 784, ..block(0) });
    assert_eq!(bench.index.stats(bench.rank).block_sizes, [(0, 784)]);
    assert_eq!(bench.held_of(&tokens[..240]).reason, HeldReason::BelowBlockSize);
    // vLLM computes a prompt's last token, so one of exactly one block finds nothing either.
    assert_eq!(bench.held_of(&tokens).reason, HeldReason::BelowBlockSize);
    let other: Vec<u32> = (1..=785).collect();
    assert_eq!(bench.held_of(&other).reason, HeldReason::Miss);
    let longer: Vec<u32> = (0..785).collect();
    let held = bench.held_of(&longer);
    assert_eq!((held.reason, held.block_size, held.tokens().gpu), (HeldReason::Warm, 784, 784));
}

// 49
#[test]
fn a_block_size_that_changes_claims_nothing_until_every_tier_was_demoted() {
    let bench = Bench::new();
    bench.store(&blocks(0..2));
    let halves =
        Store { hashes: (90..94).map(hash).collect(), block_size: SIZE / 2, ..blocks(0..2) };
    bench.store(&halves);
    let reason = || bench.held_of(&prompt_tokens(2)).reason;
    assert_eq!(reason(), HeldReason::BlockSizeChanged);
    bench.index.demote(bench.rank, TierSet::GPU, Belief::Gone, own());
    bench.store(&halves);
    assert_eq!(reason(), HeldReason::BlockSizeChanged);
    bench.index.demote(bench.rank, TierSet::CONNECTOR, Belief::Unknown, own());
    assert_eq!(reason(), HeldReason::NoBlockSize);
    bench.store(&halves);
    assert_eq!(bench.held(2), (4, 0));
}

// 51
#[test]
fn a_location_attaches_to_a_known_hash_and_waits_under_an_unknown_one() {
    let bench = Bench::new();
    bench.store(&block(0));
    bench.store(&located(0..1, Tier::Cpu));
    bench.remove(&[1], Tier::Gpu, 0);
    assert_eq!(bench.held(1), (0, 1));

    bench.store(&located(1..2, Tier::Cpu));
    assert_eq!((bench.held(2), bench.index.stats(bench.rank).pending.cpu), ((0, 1), 1));
    // The store that tells what the hash names gives it its place, fenced on its own tier or not.
    bench.index.store(bench.rank, &block(1), TierSet::NONE);
    assert_eq!((bench.held(2), bench.index.stats(bench.rank).pending.cpu), ((0, 2), 0));
}

// 51
#[test]
fn a_waiting_location_obeys_removals_and_demotions() {
    for demote in [true, false] {
        let bench = Bench::new();
        bench.store(&located(0..1, Tier::Cpu));
        if demote {
            bench.index.demote(bench.rank, TierSet::CONNECTOR, Belief::Gone, own());
        } else {
            bench.remove(&[1], Tier::Cpu, 0);
        }
        bench.index.store(bench.rank, &block(0), TierSet::NONE);
        assert_eq!(bench.held(1), (0, 0));
        assert_eq!(bench.belief(Tier::Cpu, 0), Belief::Gone);
    }
}

// 51
#[test]
fn waiting_locations_are_bounded_and_what_did_not_fit_is_unknown() {
    let bench = Bench::with(Limits { pending: 2, ..Limits::default() }, by_block());
    assert_eq!(bench.store(&located(0..1, Tier::Cpu)).gained, 1);
    assert_eq!(bench.store(&located(1..2, Tier::Cpu)).gained, 1);
    assert_eq!(bench.store(&located(2..3, Tier::Cpu)).dropped, 1);
    bench.store(&blocks(0..3));
    bench.remove(&[1, 2, 3], Tier::Gpu, 0);
    assert_eq!(bench.held(3), (0, 2));
    assert_eq!(bench.belief(Tier::Cpu, 2), Belief::Unknown);
}

// 51
#[test]
fn a_self_describing_location_without_extra_keys_teaches_nothing() {
    let bench = Bench::new();
    let cpu = |n| Store { tier: Tier::Cpu, extra: Extra::NotReported, ..block(n) };
    bench.store(&cpu(1));
    bench.store(&cpu(0));
    assert_eq!(bench.held_of(&prompt_tokens(2)).reason, HeldReason::NoBlockSize);
    let salted = vec![vec![ExtraKey::Text("tenant".into())], vec![]];
    bench.store(&Store { extra: Extra::PerBlock(salted), ..blocks(0..2) });
    bench.remove(&[1, 2], Tier::Gpu, 0);
    assert_eq!(bench.held(2), (0, 0));
    let tokens = prompt_tokens(2);
    let salted = Prompt { tokens: &tokens, lora: None, salt: Some("tenant") };
    assert_eq!(bench.index.held(bench.rank, &salted).blocks.cpu, 2);
}

// 52
#[test]
fn facts_are_kept_by_tier() {
    let bench = Bench::new();
    bench.store(&blocks(0..3));
    for n in 0..3 {
        bench.store(&Store { tier: Tier::Cpu, ..block(n) });
    }
    bench.remove(&[2, 3], Tier::Gpu, 0);
    assert_eq!(bench.held(3), (1, 2));
    bench.remove(&[3], Tier::Cpu, 0);
    assert_eq!(bench.held(3), (1, 1));
    bench.store(&located(1..3, Tier::Remote));
    bench.index.demote(bench.rank, TierSet::of(Tier::Cpu), Belief::Gone, own());
    let held = bench.held_of(&prompt_tokens(3));
    assert_eq!((held.blocks.gpu, held.blocks.cpu, held.blocks.remote), (1, 0, 0));
    assert_eq!(
        (bench.belief(Tier::Cpu, 1), bench.belief(Tier::Gpu, 0)),
        (Belief::Gone, Belief::Proven)
    );
}

// 54
#[test]
fn blocks_that_a_connector_announced_together_are_an_estimate_and_no_claim() {
    let bench = Bench::new();
    bench.store(&blocks(0..4));
    bench.store(&located(0..4, Tier::Cpu));
    bench.remove(&[1, 2, 3, 4], Tier::Gpu, 0);
    let held = bench.held_of(&prompt_tokens(3));
    assert_eq!((held.blocks_total(), held.estimated, held.reason), (0, 3, HeldReason::Miss));
    let held = bench.held_of(&prompt_tokens(4));
    assert_eq!((held.blocks_total(), held.estimated), (0, 4));
}

// 54
#[test]
fn blocks_that_a_connector_announced_together_with_their_size_count_one_by_one() {
    let bench = Bench::new();
    bench.store(&blocks(0..4));
    bench.store(&Store { block_size: SIZE, ..located(0..4, Tier::Cpu) });
    bench.remove(&[1, 2, 3, 4], Tier::Gpu, 0);
    assert_eq!(bench.held(3), (0, 3));
    // A chunk of another size than the engine's blocks is of no use by the block.
    bench.index.demote(bench.rank, TierSet::CONNECTOR, Belief::Gone, own());
    bench.store(&Store { block_size: 4 * SIZE, ..located(3..4, Tier::Cpu) });
    bench.store(&blocks(0..3));
    let held = bench.held_of(&prompt_tokens(4));
    assert_eq!((held.blocks.gpu, held.blocks.cpu, held.estimated), (3, 0, 1));
}

// 56
#[test]
fn a_removed_rank_holds_nothing_and_its_number_is_never_used_again() {
    let bench = Bench::new();
    let many: u32 = 100_000;
    let tokens: Vec<u32> = (0..many).collect();
    let hashes = (0..many).map(hash).collect();
    bench.store(&Store { hashes, tokens: tokens.clone(), block_size: 1, ..block(0) });
    assert_eq!(bench.held_of(&tokens).blocks.gpu, many - 1);

    bench.index.remove_rank(bench.rank);
    let again = bench.index.add_rank(by_block());
    assert_ne!(again, bench.rank);
    assert_eq!(bench.index.held_all(&plain(&tokens)).len(), 1);
    assert_eq!(bench.index.held(again, &plain(&tokens)).blocks.gpu, 0);
    assert_eq!(bench.held_of(&tokens).reason, HeldReason::NoRank);
    assert_eq!(bench.store(&block(0)), fak_index::Applied::default());

    // Blocks and identities, all left to the sweep.
    assert_eq!(bench.index.stats(again).backlog, 2 * many as usize);
    assert_eq!(bench.index.sweep(usize::MAX), 2 * many as usize);
    assert_eq!(bench.index.stats(again).backlog, 0);
}

// 39, 56: invariant 9
#[test]
fn demoting_a_rank_touches_no_block() {
    let bench = Bench::new();
    let many: u32 = 100_000;
    let tokens: Vec<u32> = (0..many).collect();
    let hashes: Vec<_> = (0..many).map(hash).collect();
    let store = Store { hashes, tokens: tokens.clone(), block_size: 1, ..block(0) };
    bench.store(&store);
    bench.index.demote(bench.rank, TierSet::GPU, Belief::Unknown, own());
    let stats = bench.index.stats(bench.rank);
    // Every block is still in memory, untouched, and none is in the rank.
    assert_eq!((stats.blocks.gpu, stats.backlog), (0, many as usize));
    assert_eq!(bench.held_of(&tokens).reason, HeldReason::Miss);
    // The tier is of use at once, before any sweep.
    assert_eq!(bench.store(&store).gained, u64::from(many));
    assert_eq!(bench.held_of(&tokens).blocks.gpu, many - 1);
    assert_eq!(bench.index.sweep(1), many as usize);
    assert_eq!(bench.held_of(&tokens).blocks.gpu, many - 1);
}

// 48
#[test]
fn a_group_that_leaves_blocks_out_is_joined_by_its_hashes() {
    let bench = Bench::new();
    bench.store(&blocks(0..3));
    assert_eq!(bench.held(3), (3, 0));
    // A window group announces the last block alone, with the tokens of all three.
    let sparse = Store {
        hashes: vec![hash(2)],
        group: 1,
        kind: GroupKind::Window { tokens: Some(SIZE) },
        ..blocks(0..3)
    };
    let applied = bench.store(&sparse);
    assert_eq!((applied.gained, applied.malformed), (1, 0));
    assert_eq!(bench.held(3), (3, 0));
    // Only at the end of what it holds.
    assert_eq!(bench.held(2), (0, 0));
    assert_eq!(bench.remove(&[3], Tier::Gpu, 1).removed, 1);
    assert_eq!(bench.held(3), (0, 0));
    // It teaches nothing: what the hash names has to be known.
    let unnamed = Store { hashes: vec![EngineHash::Int(99)], ..sparse.clone() };
    assert_eq!(bench.store(&unnamed).gained, 1);
    assert_eq!(bench.index.stats(bench.rank).pending.gpu, 1);
    // Every such store shows a copy, also one from the root.
    bench.store(&sparse);
    assert_eq!(bench.store(&sparse).copies, 1);
    // Of a connector it is contradictory.
    assert_eq!(bench.store(&Store { tier: Tier::Cpu, ..sparse }).malformed, 1);
}

#[test]
fn what_events_did_is_added_up() {
    let bench = Bench::with(Limits { pending: 1, ..Limits::default() }, by_block());
    let mut done = Vec::new();
    for store in [
        blocks(0..3),
        blocks(0..3),
        block(1),
        block(7),
        located(90..91, Tier::Cpu),
        located(91..92, Tier::Cpu),
        Store { tokens: vec![1], ..block(0) },
        Store { extra: Extra::PerBlock(vec![vec![ExtraKey::Int(1)]]), ..block(2) },
    ] {
        done.push(bench.store(&store));
    }
    done.push(bench.index.store(bench.rank, &block(0), TierSet::NONE));
    done.extend([2, 2, 2].map(|hash| bench.remove(&[hash], Tier::Gpu, 0)));
    let totals = bench.index.stats(bench.rank).totals;
    let sum = |of: fn(&fak_index::Applied) -> u64| (of(&totals), done.iter().map(of).sum());
    for (name, (total, sum)) in [
        ("gained", sum(|done| done.gained)),
        ("copies", sum(|done| done.copies)),
        ("repeats", sum(|done| done.repeats)),
        ("fenced", sum(|done| done.fenced)),
        ("parked", sum(|done| done.parked)),
        ("removed", sum(|done| done.removed)),
        ("copies_removed", sum(|done| done.copies_removed)),
        ("unknown_removals", sum(|done| done.unknown_removals)),
        ("dropped", sum(|done| done.dropped)),
        ("conflicts", sum(|done| done.conflicts)),
        ("malformed", sum(|done| done.malformed)),
    ] {
        assert!(total == sum && sum > 0, "{name}: {total}, not {sum}");
    }
}

#[test]
fn ranks_of_several_block_sizes_are_asked_by_their_own() {
    let bench = Bench::new();
    bench.store(&blocks(0..2));
    let other = bench.index.add_rank(by_block());
    let hashes = (90..94).map(hash).collect();
    let halves = Store { hashes, block_size: SIZE / 2, ..blocks(0..2) };
    bench.index.store(other, &halves, TierSet::ALL);
    let held = bench.index.held_all(&plain(&prompt_tokens(2)));
    let held: Vec<_> = held.iter().map(|(id, held)| (*id, held.tokens().gpu)).collect();
    assert_eq!(held, [(bench.rank, 2 * SIZE), (other, 2 * SIZE)]);
}

#[test]
fn of_what_may_be_decoded_speculatively_the_last_block_of_a_hit_is_no_claim() {
    let bench = Bench::new();
    bench.store(&blocks(0..3));
    bench.store(&located(3..4, Tier::Cpu));
    bench.store(&block(3));
    bench.remove(&[4], Tier::Gpu, 0);
    let held = bench.held_of(&prompt_tokens(4));
    assert_eq!((held.blocks.gpu, held.blocks.cpu), (3, 1));
    let claim = held.tokens_speculating();
    assert_eq!((claim.gpu, claim.cpu), (2 * SIZE, 0));
    assert_eq!(bench.held_of(&prompt_tokens(0)).tokens_speculating().gpu, 0);
}

#[test]
fn a_rank_tells_whether_it_holds_anything_and_is_suspended() {
    let bench = Bench::new();
    let stats = || bench.index.stats(bench.rank).is_suspended;
    assert!(!bench.index.has_blocks(bench.rank) && !stats());
    bench.store(&located(0..1, Tier::Disk));
    bench.index.suspend(bench.rank);
    assert!(bench.index.has_blocks(bench.rank) && stats());
    bench.remove(&[1], Tier::Disk, 0);
    assert!(!bench.index.has_blocks(bench.rank));
}

/// A reader does not know whether whoever writes still has a turn.
#[test]
fn beliefs_count_only_while_their_lease_holds() {
    #[derive(Default)]
    struct Term {
        is_over: AtomicBool,
        asked: AtomicU32,
    }
    impl Lease for Term {
        fn holds(&self) -> bool {
            !self.is_over.load(Ordering::Relaxed)
        }
        fn asked(&self) {
            self.asked.fetch_add(1, Ordering::Relaxed);
        }
    }
    let (bench, lease) = (Bench::new(), Arc::new(Term::default()));
    bench.store(&blocks(0..3));
    bench.index.count_while(bench.rank, Arc::clone(&lease) as Arc<dyn Lease>);
    let tokens = prompt_tokens(3);
    let key = bench.index.chain(&plain(&tokens), SIZE)[0];
    let (_, mark) = bench.index.held_and_mark(bench.rank, &plain(&tokens));
    let seen = || {
        let Bench { index, rank, .. } = &bench;
        let held = index.held(*rank, &plain(&tokens));
        let since = index.held_since(*rank, &plain(&tokens), mark);
        let belief = index.belief(*rank, Tier::Gpu, key);
        (held.reason, since.blocks.gpu, belief, index.stats(*rank).is_suspended)
    };
    assert_eq!(seen(), (HeldReason::Warm, 3, Belief::Proven, false));
    lease.is_over.store(true, Ordering::Relaxed);
    assert_eq!(seen(), (HeldReason::Suspended, 0, Belief::Unknown, true));
    assert_eq!(lease.asked.load(Ordering::Relaxed), 5, "each reading of a prompt, and no other");
    // What an engine contradicts is not believed again with the next lease.
    bench.index.demote_prompt(bench.rank, &plain(&tokens), SIZE);
    lease.is_over.store(false, Ordering::Relaxed);
    assert_eq!(seen(), (HeldReason::Warm, 1, Belief::Proven, false));
}

/// Each as its variant is called.
#[test]
fn every_reason_has_its_word() {
    for (reason, word) in [
        (HeldReason::Warm, "warm"),
        (HeldReason::Miss, "miss"),
        (HeldReason::BelowBlockSize, "below_block_size"),
        (HeldReason::Suspended, "suspended"),
        (HeldReason::SetAside, "set_aside"),
        (HeldReason::NoBlockSize, "no_block_size"),
        (HeldReason::BlockSizeChanged, "block_size_changed"),
        (HeldReason::GroupsDiffer, "groups_differ"),
        (HeldReason::TooManyGroups, "too_many_groups"),
        (HeldReason::ExtraNotReported, "extra_not_reported"),
        (HeldReason::NoRank, "no_rank"),
    ] {
        assert_eq!((reason.as_str(), reason.to_string().as_str()), (word, word));
    }
}

// 71
#[test]
fn a_block_that_was_taken_and_stored_anew_is_not_held_without_a_break() {
    let bench = Bench::new();
    bench.store(&blocks(0..3));
    let tokens = prompt_tokens(3);
    let (held, mark) = bench.index.held_and_mark(bench.rank, &plain(&tokens));
    let held_since = || bench.index.held_since(bench.rank, &plain(&tokens), mark);
    let since = || held_since().tokens().gpu;
    assert_eq!((held.blocks.gpu, since()), (3, 3 * SIZE));
    // A further copy that comes and goes breaks nothing, nor does another block.
    bench.store(&block(1));
    bench.store(&block(7));
    bench.remove(&[2], Tier::Gpu, 0);
    assert_eq!(since(), 3 * SIZE);
    bench.remove(&[2], Tier::Gpu, 0);
    bench.store(&blocks(1..2));
    assert_eq!((bench.held(3), since()), ((3, 0), SIZE));
    bench.index.demote(bench.rank, TierSet::GPU, Belief::Gone, own());
    bench.store(&blocks(0..3));
    assert_eq!((bench.held(3), since()), ((3, 0), 0));
}
