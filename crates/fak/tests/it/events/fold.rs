//! What becomes of batches, from bytes to beliefs.

use std::sync::Arc;

use fak::events::Item;
use fak::events::fold::Fold;
use fak::events::ndjson::{Limits, Lines};
use fak::events::recorder::{Rank as Name, Recorder};
use fak_index::{Index, Offload, Prompt, RankId, RankOptions};
use fak_kernel::rank::{Config, Rank};

struct Bench {
    fold: Fold,
    index: Arc<Index>,
    id: RankId,
    recorder: Arc<Recorder>,
}

impl Bench {
    fn new() -> Self {
        let index = Arc::new(Index::new(7, fak_index::Limits::default()));
        let id =
            index.add_rank(RankOptions { offload: Offload::BY_BLOCK, ..RankOptions::default() });
        let recorder = Arc::new(Recorder::new(16));
        let rank = Rank::new(Config { replay: false, tie: false, ..Config::default() });
        let name = Name { worker: "w".into(), rank: 0 };
        let fold = Fold::new(rank, (Arc::clone(&index), id), Arc::clone(&recorder), name);
        Self { fold, index, id, recorder }
    }

    /// Feeds the lines as one connection.
    async fn feed(&mut self, lines: &str) {
        let mut source = Lines::new(lines.as_bytes(), Limits::default());
        while let Some(item) = source.next().await {
            if matches!(item, Item::Disconnected { .. }) {
                return;
            }
            self.fold.item(item);
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
