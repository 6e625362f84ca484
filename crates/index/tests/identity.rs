//! What a block is: the same key only for the same tokens, extra keys and blocks before. And what
//! a hash names: one content, or nothing.

use fak_index::{
    Applied, EngineHash, Extra, ExtraKey, GroupKind, HeldReason, Index, Limits, Prompt, RankId,
    RankOptions, Store,
};
use fak_kernel::{Belief, Tier, TierSet};

const SIZE: u32 = 2;

fn rank(limits: Limits, assume_unsalted: bool) -> (Index, RankId) {
    let index = Index::new(0x5eed, limits);
    let rank = index.add_rank(RankOptions { assume_unsalted, ..RankOptions::default() });
    (index, rank)
}

/// Blocks of one token each repeated, under hashes from `first` on, without extra keys.
fn store(first: u64, parent: Option<u64>, tokens: &[u32]) -> Store {
    Store {
        hashes: (first..).take(tokens.len()).map(EngineHash::Int).collect(),
        parent: parent.map(EngineHash::Int),
        tokens: tokens.iter().flat_map(|token| [*token; SIZE as usize]).collect(),
        block_size: SIZE,
        extra: Extra::PerBlock(Vec::new()),
        lora: None,
        tier: Tier::Gpu,
        group: 0,
        kind: GroupKind::Full,
    }
}

fn text(text: &str) -> ExtraKey {
    ExtraKey::Text(text.into())
}

fn with_extra(extra: Vec<Vec<ExtraKey>>, store: Store) -> Store {
    Store { extra: Extra::PerBlock(extra), ..store }
}

/// Blocks on the gpu of a prompt of `tokens` as blocks, and one token more.
fn gpu(index: &Index, rank: RankId, tokens: &[u32], lora: Option<&str>, salt: Option<&str>) -> u32 {
    let mut tokens: Vec<_> = tokens.iter().flat_map(|token| [*token; SIZE as usize]).collect();
    tokens.push(u32::MAX);
    index.held(rank, &Prompt { tokens: &tokens, lora, salt }).blocks.gpu
}

#[test]
fn an_index_is_shared_between_threads() {
    fn is_shared<T: Send + Sync>() {}
    is_shared::<Index>();
}

#[test]
fn the_block_with_the_last_token_is_never_claimed() {
    let (index, rank) = rank(Limits::default(), false);
    let tokens: Vec<u32> = (0..64).collect();
    let hashes = vec![EngineHash::Int(1), EngineHash::Int(2)];
    let store = Store { hashes, tokens: tokens.clone(), block_size: 32, ..store(1, None, &[]) };
    index.store(rank, &store, TierSet::ALL);
    let held = |tokens: &[u32]| index.held(rank, &Prompt { tokens, lora: None, salt: None });
    assert_eq!(held(&tokens).blocks.gpu, 1);
    assert_eq!(held(&[&tokens[..], &[7]].concat()).blocks.gpu, 2);
    assert_eq!(held(&tokens[..63]).blocks.gpu, 1);
    assert_eq!(held(&tokens[..32]).reason, HeldReason::BelowBlockSize);
    assert_eq!(held(&[]).reason, HeldReason::BelowBlockSize);
}

// gpu-store-lora-salted.bin, 0.32.0: ["sql","tenantB"], then ["sql"].
#[test]
fn a_salt_is_on_the_first_block_and_a_lora_on_every_one() {
    let (index, rank) = rank(Limits::default(), false);
    let salted = vec![vec![text("sql"), text("tenantB")], vec![text("sql")]];
    let salted = with_extra(salted, store(1, None, &[1, 2]));
    index.store(rank, &Store { lora: Some("sql".into()), ..salted }, TierSet::ALL);
    let held = |lora, salt| gpu(&index, rank, &[1, 2], lora, salt);
    assert_eq!(held(Some("sql"), Some("tenantB")), 2);
    assert_eq!(held(Some("sql"), Some("tenantA")), 0);
    assert_eq!(held(Some("sql"), None), 0);
    assert_eq!(held(None, Some("tenantB")), 0);
    assert_eq!(held(None, None), 0);
}

// vLLM hashes the two with tags and publishes them without (0.32.0, `to_event_extra_keys`, read).
#[test]
fn a_salt_is_no_adapter_of_the_same_name() {
    let of = |lora: Option<&str>, extra: &[&str]| {
        let (index, rank) = rank(Limits::default(), false);
        let extra = vec![extra.iter().map(|part| text(part)).collect()];
        let store = Store { lora: lora.map(Box::from), ..store(1, None, &[1]) };
        index.store(rank, &with_extra(extra, store), TierSet::ALL);
        let held = |lora, salt| gpu(&index, rank, &[1], lora, salt);
        let sql = Some("sql");
        [held(sql, None), held(None, sql), held(sql, sql), held(None, None)]
    };
    assert_eq!(of(Some("sql"), &["sql"]), [1, 0, 0, 0]);
    assert_eq!(of(None, &["sql"]), [0, 1, 0, 0]);
    assert_eq!(of(Some("sql"), &["sql", "sql"]), [0, 0, 1, 0]);
    assert_eq!(of(Some("other"), &["other", "sql"]), [0, 0, 0, 0]);
}

#[test]
fn a_lora_counts_whether_the_extra_keys_repeat_it_or_not() {
    for extra in [vec![], vec![vec![text("sql")], vec![text("sql")]]] {
        let (index, rank) = rank(Limits::default(), false);
        let store = with_extra(extra, store(1, None, &[1, 2]));
        index.store(rank, &Store { lora: Some("sql".into()), ..store }, TierSet::ALL);
        assert_eq!(gpu(&index, rank, &[1, 2], Some("sql"), None), 2);
        assert_eq!(gpu(&index, rank, &[1, 2], None, None), 0);
    }
}

#[test]
fn extra_keys_are_framed_by_length_and_told_apart_by_kind() {
    let framed = [
        vec![],
        vec![text("")],
        vec![text("ab"), text("c")],
        vec![text("a"), text("bc")],
        vec![text("abc")],
        vec![ExtraKey::Bytes(b"abc"[..].into())],
        vec![ExtraKey::Item("abc".into(), 0)],
        vec![ExtraKey::Item("abc".into(), 1)],
        vec![text("abc"), ExtraKey::Int(1)],
        vec![ExtraKey::Int(1)],
    ];
    // Two stores of one hash are in conflict exactly if they differ.
    for (i, one) in framed.iter().enumerate() {
        for (j, other) in framed.iter().enumerate() {
            let (index, rank) = rank(Limits::default(), false);
            let announce = |extra: &Vec<ExtraKey>| {
                let store = with_extra(vec![extra.clone()], store(1, None, &[1]));
                index.store(rank, &store, TierSet::ALL)
            };
            assert_eq!(announce(one).conflicts, 0);
            assert_eq!(announce(other).conflicts, u64::from(i != j), "{one:?} and {other:?}");
        }
    }
}

#[test]
fn tokens_do_not_run_over_into_the_next_block() {
    let (index, _) = rank(Limits::default(), false);
    let chain =
        |tokens: &[u32], size| index.chain(&Prompt { tokens, lora: None, salt: None }, size);
    let tokens: Vec<u32> = (0..8).collect();
    assert_eq!(chain(&tokens, 4)[..1], chain(&tokens[..4], 4));
    assert_ne!(chain(&tokens, 4)[1], chain(&tokens[4..], 4)[0]);
    // The same tokens cut otherwise.
    assert_ne!(chain(&tokens, 8)[0], chain(&tokens, 4)[1]);
    assert_eq!(
        (chain(&tokens, 3).len(), chain(&tokens, 9).len(), chain(&tokens, 0).len()),
        (2, 0, 0)
    );
    let other = Index::new(0xabcd, Limits::default());
    let key = other.chain(&Prompt { tokens: &tokens, lora: None, salt: None }, 4)[0];
    assert_ne!(chain(&tokens, 4)[0], key);
}

#[test]
fn blocks_whose_extra_keys_are_not_shown_count_only_if_declared_unsalted() {
    for is_declared in [false, true] {
        let (index, rank) = rank(Limits::default(), is_declared);
        let store = Store { extra: Extra::NotReported, ..store(1, None, &[1, 2]) };
        index.store(rank, &store, TierSet::ALL);
        let tokens = [1, 1, 2, 2, 3];
        let held = index.held(rank, &Prompt { tokens: &tokens, lora: None, salt: None });
        let expected = match is_declared {
            true => (2, HeldReason::Warm),
            false => (0, HeldReason::ExtraNotReported),
        };
        assert_eq!((held.blocks.gpu, held.reason), expected);
    }
}

#[test]
fn a_hash_with_two_contents_holds_nothing_until_a_new_incarnation() {
    let (index, rank) = rank(Limits::default(), false);
    index.store(rank, &store(1, None, &[1, 2]), TierSet::ALL);
    let located = Store { tokens: Vec::new(), tier: Tier::Cpu, ..store(1, None, &[1]) };
    index.store(rank, &located, TierSet::ALL);
    let applied = index.store(rank, &store(1, None, &[9]), TierSet::ALL);
    assert_eq!(applied, Applied { conflicts: 1, ..Applied::default() });
    assert_eq!(gpu(&index, rank, &[1, 2], None, None), 0);
    assert_eq!(gpu(&index, rank, &[9], None, None), 0);
    let stats = index.stats(rank);
    assert_eq!((stats.blocks.gpu, stats.blocks.cpu, stats.totals.conflicts), (1, 0, 1));
    let key = index.chain(&Prompt { tokens: &[1, 1], lora: None, salt: None }, SIZE)[0];
    assert_eq!(index.belief(rank, Tier::Gpu, key), Belief::Unknown);

    // Neither content again, nor a bare location, nor a child.
    assert_eq!(index.store(rank, &store(1, None, &[1]), TierSet::ALL).conflicts, 1);
    assert_eq!(index.store(rank, &located, TierSet::ALL).conflicts, 1);
    assert_eq!(index.store(rank, &store(7, Some(1), &[7]), TierSet::ALL).dropped, 1);

    index.forget_identities(rank);
    index.store(rank, &store(1, None, &[9]), TierSet::ALL);
    assert_eq!(gpu(&index, rank, &[9], None, None), 1);
}

#[test]
fn a_hash_under_two_parents_has_two_contents() {
    let (index, rank) = rank(Limits::default(), false);
    index.store(rank, &store(1, None, &[1, 2]), TierSet::ALL);
    index.store(rank, &store(8, None, &[8]), TierSet::ALL);
    assert_eq!(index.store(rank, &store(2, Some(8), &[2]), TierSet::ALL).conflicts, 1);
    assert_eq!(gpu(&index, rank, &[8, 2], None, None), 1);
    assert_eq!(gpu(&index, rank, &[1, 2], None, None), 1);
    // Also while it waits, with neither parent known.
    index.store(rank, &store(5, Some(20), &[5]), TierSet::ALL);
    assert_eq!(index.store(rank, &store(5, Some(30), &[5]), TierSet::ALL).conflicts, 1);
    index.store(rank, &store(20, None, &[20]), TierSet::ALL);
    assert_eq!(gpu(&index, rank, &[20, 5], None, None), 1);
}

#[test]
fn a_new_incarnation_may_give_its_hashes_other_contents() {
    let (index, rank) = rank(Limits::default(), false);
    index.store(rank, &store(1, None, &[1, 2]), TierSet::ALL);
    index.forget_identities(rank);
    assert_eq!(gpu(&index, rank, &[1, 2], None, None), 0);
    // What the old life held under hash 1 is not what the new one calls so.
    index.store(rank, &store(1, None, &[5]), TierSet::NONE);
    assert_eq!(gpu(&index, rank, &[5], None, None), 0);
    assert_eq!(index.store(rank, &store(1, None, &[5]), TierSet::ALL).conflicts, 0);
    assert_eq!(gpu(&index, rank, &[5], None, None), 1);
}

#[test]
fn the_oldest_identity_on_no_tier_is_forgotten_and_one_in_use_never() {
    let (index, rank) = rank(Limits { identities: 3, ..Limits::default() }, false);
    index.store(rank, &store(1, None, &[1]), TierSet::ALL);
    index.store(rank, &store(2, None, &[2]), TierSet::NONE);
    index.store(rank, &store(3, None, &[3]), TierSet::NONE);
    assert_eq!(index.store(rank, &store(4, None, &[4]), TierSet::ALL).dropped, 0);
    assert_eq!(index.stats(rank).identities, 3);
    assert_eq!(gpu(&index, rank, &[1], None, None), 1);
    // 2 was forgotten: its child has to wait. 3 was not.
    assert_eq!(index.store(rank, &store(20, Some(2), &[20]), TierSet::NONE).parked, 1);
    assert_eq!(index.store(rank, &store(3, None, &[3]), TierSet::ALL).gained, 1);
    // All three are in use now, so there is no room.
    assert_eq!(index.store(rank, &store(5, None, &[5]), TierSet::ALL).dropped, 1);
    assert_eq!(gpu(&index, rank, &[5], None, None), 0);
    for block in [1, 3, 4] {
        assert_eq!(gpu(&index, rank, &[block], None, None), 1);
    }
}

#[test]
fn a_content_under_more_hashes_than_an_engine_needs_is_refused() {
    let (index, rank) = rank(Limits::default(), false);
    let dropped = |hash| index.store(rank, &store(hash, None, &[1]), TierSet::ALL).dropped;
    assert_eq!((0..8).map(dropped).sum::<u64>(), 0);
    assert_eq!(dropped(8), 1);
    assert_eq!(gpu(&index, rank, &[1], None, None), 1);
    // Also where they waited for their parent.
    (20..29).for_each(|hash| {
        index.store(rank, &store(hash, Some(10), &[2]), TierSet::ALL);
    });
    assert_eq!(index.store(rank, &store(10, None, &[10]), TierSet::ALL).dropped, 1);
}

#[test]
fn a_rank_with_more_groups_than_fit_claims_nothing() {
    let (index, rank) = rank(Limits { groups: 2, ..Limits::default() }, false);
    for group in 0..2 {
        index.store(rank, &Store { group, ..store(1, None, &[1]) }, TierSet::ALL);
    }
    // A connector's event does not make a group that a claim waits for, so it may be left out.
    let located = Store { group: 9, tokens: Vec::new(), tier: Tier::Cpu, ..store(1, None, &[1]) };
    assert_eq!(index.store(rank, &located, TierSet::ALL).dropped, 1);
    assert_eq!(gpu(&index, rank, &[1], None, None), 1);
    index.store(rank, &Store { group: 2, ..store(1, None, &[1]) }, TierSet::ALL);
    assert_eq!(gpu(&index, rank, &[1], None, None), 0);
    let held = index.held(rank, &Prompt { tokens: &[1, 1, 0], lora: None, salt: None });
    assert_eq!(held.reason, HeldReason::TooManyGroups);
}

#[test]
fn lengths_that_contradict_each_other_are_counted_and_teach_nothing() {
    let good = store(1, None, &[1, 2]);
    let extra = |blocks| Extra::PerBlock(vec![Vec::new(); blocks]);
    let bad = [
        Store { tokens: vec![1, 1, 2], ..good.clone() },
        Store { block_size: 0, ..good.clone() },
        Store { block_size: u32::MAX, ..good.clone() },
        Store { hashes: Vec::new(), ..good.clone() },
        Store { extra: extra(1), ..good.clone() },
        Store { extra: extra(3), ..good.clone() },
    ];
    let (index, rank) = rank(Limits::default(), false);
    for store in &bad {
        let malformed = store.hashes.len() as u64;
        let expected = Applied { malformed, ..Applied::default() };
        assert_eq!(index.store(rank, store, TierSet::ALL), expected);
    }
    let stats = index.stats(rank);
    assert_eq!((stats.identities, stats.blocks.gpu, stats.block_sizes.len()), (0, 0, 0));
    assert_eq!(index.store(rank, &Store { extra: extra(2), ..good }, TierSet::ALL).gained, 2);
}
