//! What becomes of batches, from bytes to beliefs.

use std::sync::Arc;

use fak::events::Item;
use fak::events::fold::{Fold, Marker};
use fak::events::ndjson::{Limits, Lines};
use fak::events::recorder::{Rank as Name, Recorder};
use fak_index::{Index, Offload, Prompt, RankId, RankOptions};
use fak_kernel::rank::{Config, Event, Rank, Trust};
use fak_kernel::vocab::PerTier;
use fak_kernel::{Disposition, LossCause, TierSet};

struct Bench {
    fold: Fold,
    index: Arc<Index>,
    id: RankId,
    recorder: Arc<Recorder>,
}

impl Bench {
    fn new() -> Self {
        Self::with(false)
    }

    /// One whose connections have to be tied by a marker, or not.
    fn with(tie: bool) -> Self {
        let index = Arc::new(Index::new(7, fak_index::Limits::default()));
        let id =
            index.add_rank(RankOptions { offload: Offload::BY_BLOCK, ..RankOptions::default() });
        let recorder = Arc::new(Recorder::new(16));
        let rank = Rank::new(Config { replay: false, tie, ..Config::default() });
        let name = Name { worker: "w".into(), rank: 0 };
        let fold = Fold::new(rank, (Arc::clone(&index), id), Arc::clone(&recorder), name);
        Self { fold, index, id, recorder }
    }

    /// Feeds the lines as one connection.
    async fn feed(&mut self, lines: &str) {
        self.fold.item(Item::Connected { epoch: 1 });
        self.go_on(lines).await;
    }

    /// Feeds the lines as more of the same connection.
    async fn go_on(&mut self, lines: &str) {
        let mut source = Lines::new(lines.as_bytes(), Limits::default());
        while let Some(item) = source.next().await {
            if matches!(item, Item::Batch { .. } | Item::Bad { .. }) {
                self.fold.item(item);
            }
        }
    }

    fn held(&self, tokens: &[u32]) -> (u32, u32) {
        let held = self.index.held(self.id, &Prompt { tokens, lora: None, salt: None }).blocks;
        (held.gpu, held.cpu)
    }
}

fn stored(seq: u64, rank: u32, hash: u64, tokens: [u32; 2]) -> String {
    let event = serde_json::json!({
        "type": "stored",
        "block_hashes": [hash],
        "parent_block_hash": null,
        "token_ids": tokens,
        "block_size": 2,
        "medium": "GPU",
        "extra_keys": [null],
    });
    line(seq, rank, &event)
}

fn line(seq: u64, rank: u32, event: &serde_json::Value) -> String {
    let batch = serde_json::json!({ "seq": seq, "rank": rank, "events": [event] });
    format!("{batch}\n")
}

// 55
#[tokio::test]
async fn batches_of_two_ranks_on_one_port_are_never_one_cache() {
    let mut bench = Bench::new();
    bench.feed(&stored(0, 0, 1, [1, 2])).await;
    assert_eq!(bench.held(&[1, 2, 9]), (1, 0));
    bench.feed(&(stored(0, 0, 1, [1, 2]) + &stored(1, 1, 2, [3, 4]))).await;
    assert_eq!(bench.held(&[3, 4, 9]), (0, 0), "another rank's block");
    assert_eq!(bench.held(&[1, 2, 9]), (0, 0), "and nothing is sure any more");
    assert_eq!(bench.recorder.total().bad, 1);
}

/// Another prompt's first block says nothing of the connection, nor does a later block that looks
/// like the marker's.
#[tokio::test]
async fn only_the_first_block_of_the_marker_itself_ties_a_connection() {
    let mut bench = Bench::with(true);
    bench.feed("").await;
    let id = bench.fold.wanted_marker().expect("a new connection is to be tied");
    bench.fold.expect(Marker { id, tokens: vec![7, 8] });
    bench.go_on(&stored(0, 0, 1, [1, 2])).await;
    let later =
        stored(1, 0, 2, [7, 8]).replace("\"parent_block_hash\":null", "\"parent_block_hash\":1");
    bench.go_on(&later).await;
    assert_eq!((bench.fold.trust(), bench.held(&[1, 2, 9])), (Trust::Degraded, (0, 0)));
    bench.go_on(&stored(2, 0, 3, [7, 8])).await;
    assert_eq!((bench.fold.trust(), bench.held(&[1, 2, 9])), (Trust::Exact, (1, 0)));
}

/// Else the audit takes what fak itself did for the engine's doing.
#[tokio::test]
async fn a_clear_is_told_as_the_engines_only_where_no_action_of_faks_explains_it() {
    let forgotten = PerTier::all(Disposition::Forgotten);
    for (acts, cause) in [(true, LossCause::OwnAction), (false, LossCause::Cleared)] {
        let mut bench = Bench::new();
        bench.feed(&stored(0, 0, 1, [1, 2])).await;
        let prompt = Prompt { tokens: &[1, 2, 9], lora: None, salt: None };
        let (held, mark) = bench.index.held_and_mark(bench.id, &prompt);
        if acts {
            let clear = Some(forgotten);
            bench.fold.fact(Event::Intent { tiers: TierSet::ALL, clear });
            bench.fold.fact(Event::Outcome { kv: forgotten, clears: true });
        }
        bench.go_on(&line(1, 0, &serde_json::json!({ "type": "cleared" }))).await;
        let loss = bench.index.loss_since(bench.id, &prompt, mark, &held.tokens());
        assert_eq!(loss.map(|loss| loss.cause), Some(cause));
    }
}

// 52
#[tokio::test]
async fn a_copy_on_the_host_outlives_the_one_on_the_device() {
    let mut bench = Bench::new();
    let host = serde_json::json!({
        "type": "stored",
        "block_hashes": [1],
        "parent_block_hash": null,
        "token_ids": [],
        "block_size": 0,
        "medium": "CPU_PINNED",
    });
    let gone = serde_json::json!({ "type": "removed", "block_hashes": [1], "medium": "GPU" });
    let lines = [stored(0, 0, 1, [1, 2]), line(1, 0, &host), line(2, 0, &gone)];
    bench.feed(&lines.concat()).await;
    assert_eq!(bench.held(&[1, 2, 9]), (0, 1));
}

/// In another life, whose hashes may be seeded otherwise, the same hash may name other content.
#[tokio::test]
async fn what_a_hash_named_on_an_earlier_connection_counts_for_nothing() {
    let host = serde_json::json!({
        "type": "stored", "block_hashes": [1], "parent_block_hash": null, "token_ids": [],
        "block_size": 0, "medium": "CPU_PINNED",
    });
    let mut bench = Bench::new();
    bench.feed(&(stored(0, 0, 1, [1, 2]) + &line(1, 0, &host))).await;
    assert_eq!(bench.held(&[1, 2, 9]), (1, 0));
    bench.feed(&(stored(0, 0, 2, [3, 4]) + &line(1, 0, &host))).await;
    assert_eq!((bench.held(&[1, 2, 9]), bench.held(&[3, 4, 9])), ((0, 0), (1, 0)));
}

/// It may have been a removal.
#[tokio::test]
async fn what_cannot_be_read_costs_all_before_it_and_is_counted() {
    let mut bench = Bench::new();
    bench.feed(&stored(0, 0, 1, [1, 2])).await;
    let breaks = bench.fold.tally().breaks;
    bench.go_on("no batch\n").await;
    assert_eq!((bench.held(&[1, 2, 9]), bench.recorder.total().bad), ((0, 0), 1));
    assert!(bench.fold.tally().breaks > breaks, "what follows may not follow what came before");
    let breaks = bench.fold.tally().breaks;
    bench.go_on(&(stored(1, 0, 2, [3, 4]) + &stored(4, 0, 3, [5, 6]))).await;
    let total = bench.recorder.total();
    assert_eq!((total.gaps, total.lost_batches), (1, 2));
    assert_eq!(bench.fold.tally().breaks, breaks + 1, "a gap");
}

#[tokio::test]
async fn the_clears_before_a_watched_store_are_told_of_that_store_alone() {
    let mut bench = Bench::new();
    bench.feed("").await;
    let clear = |seq| line(seq, 0, &serde_json::json!({ "type": "cleared" }));
    bench.fold.watch(vec![5, 6]);
    bench.go_on(&(clear(0) + &stored(1, 0, 1, [1, 2]))).await;
    assert_eq!((bench.fold.tally().clears, bench.fold.tally().clears_before), (1, None));
    bench.go_on(&(stored(2, 0, 2, [5, 6]) + &clear(3))).await;
    assert_eq!((bench.fold.tally().clears, bench.fold.tally().clears_before), (2, Some(1)));
    bench.fold.watch(vec![7, 8]);
    assert_eq!(bench.fold.tally().clears_before, None);
}
