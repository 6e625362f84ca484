//! Who gets a request.

use std::sync::Arc;

use fak_index::{EngineHash, Extra, GroupKind, RankOptions, Store};
use fak_kernel::rank::Trust;
use fak_kernel::{Phase, Tier, TierSet};
use http::StatusCode;
use serde_json::json;
use tokio::sync::mpsc;

use super::rig::{MODEL, Rig, setup};
use crate::engine::peer::{self, Peer, Reply};

const COMPLETIONS: &str = "/v1/completions";
const BLOCK: u32 = 32;

/// A rank of a worker that is known to hold the first blocks of `tokens`.
pub(crate) fn hold(rig: &Rig, worker: usize, tokens: &[u32]) {
    let rank = rig.index.add_rank(RankOptions::default());
    let whole = tokens.len() / BLOCK as usize * BLOCK as usize;
    let store = Store {
        hashes: (0..whole as u64 / u64::from(BLOCK)).map(|n| EngineHash::Int(n + 1)).collect(),
        parent: None,
        tokens: tokens[..whole].to_vec(),
        block_size: BLOCK,
        extra: Extra::PerBlock(Vec::new()),
        lora: None,
        tier: Tier::Gpu,
        group: 0,
        kind: GroupKind::Full,
    };
    rig.index.store(rank, &store, TierSet::ALL);
    let rank = fak::fleet::Rank { number: 0, id: rank, trust: Trust::Exact };
    rig.state(worker, |state| state.ranks = Arc::new([rank]));
}

pub(crate) fn prompt(tokens: &[u32]) -> String {
    json!({"model": MODEL, "prompt": tokens, "max_tokens": 1}).to_string()
}

async fn answering(workers: usize) -> (Vec<Peer>, Vec<String>) {
    let mut peers = Vec::new();
    for _ in 0..workers {
        let reply = || Reply::Send(peer::json("200 OK", "{\"choices\":[]}"));
        peers.push(Peer::start(move |_| reply()).await);
    }
    let urls = peers.iter().map(Peer::url).collect();
    (peers, urls)
}

#[tokio::test]
async fn a_prompt_goes_where_it_is_held() {
    let (_peers, urls) = answering(4).await;
    let rig = Rig::over(&urls).await;
    let tokens: Vec<u32> = (0..1024).collect();
    hold(&rig, 2, &tokens);
    for _ in 0..8 {
        let answer = rig.post(COMPLETIONS, &prompt(&tokens)).await;
        assert_eq!(answer.header("x-fak-worker"), Some("w2"));
        assert_eq!(answer.header("x-fak-kv"), Some("warm"));
        // Not the block with the last token, which the engine always computes.
        assert_eq!(answer.header("x-fak-warm-tokens"), Some("gpu=992"));
    }
    assert_eq!(rig.count("fak_requests_routed_total{reason=\"prefix\"}"), 8);
}

#[tokio::test]
async fn a_worker_that_holds_a_prompt_and_does_not_serve_gets_nothing() {
    let (_peers, urls) = answering(2).await;
    let rig = Rig::over(&urls).await;
    let tokens: Vec<u32> = (0..1024).collect();
    hold(&rig, 0, &tokens);
    rig.phase(0, fak_kernel::Phase::Sleeping);
    let answer = rig.post(COMPLETIONS, &prompt(&tokens)).await;
    assert_eq!(answer.header("x-fak-worker"), Some("w1"));
    assert_eq!(rig.count("fak_requests_routed_total{reason=\"only\"}"), 1);
}

/// Case 66.
#[tokio::test]
async fn siblings_stay_together_before_the_first_event() {
    let (sender, mut arrived) = mpsc::channel(64);
    let start = || {
        let sender = sender.clone();
        Peer::start(move |_| {
            let (steps, walked) = mpsc::channel(1);
            sender.try_send(steps).unwrap();
            Reply::Steps(walked)
        })
    };
    let peers = [start().await, start().await, start().await, start().await];
    let rig = Rig::over(&peers.each_ref().map(Peer::url)).await;
    let tokens: Vec<u32> = (10_000..12_048).collect();
    let body = prompt(&tokens);
    let answers = futures_util::future::join_all((0..8).map(|_| rig.post(COMPLETIONS, &body)));
    let (answers, ()) = tokio::join!(answers, async {
        let mut all = Vec::new();
        while all.len() < 8 {
            all.push(arrived.recv().await.unwrap());
        }
        for steps in all {
            steps.send(peer::json("200 OK", "{\"choices\":[]}")).await.unwrap();
        }
    });
    let mut workers: Vec<_> = answers.iter().map(|a| a.header("x-fak-worker").unwrap()).collect();
    workers.sort_unstable();
    workers.dedup();
    assert!(workers.len() <= 2, "{workers:?}");
    assert_eq!(rig.count("fak_requests_predicted_total"), 8);
    // What is expected is never claimed.
    assert!(answers.iter().all(|answer| answer.header("x-fak-warm-tokens") == Some("0")));
    assert_eq!(rig.count("fak_claimed_tokens_total"), 0);
}

/// Case 66: a prediction does not outlive its request's failure.
#[tokio::test]
async fn a_failed_request_leaves_no_prediction() {
    let failing = Peer::start(|_| Reply::SendAndClose(Vec::new())).await;
    let fine = Peer::start(|_| Reply::Send(peer::json("200 OK", "{\"choices\":[]}"))).await;
    let mut setup = setup();
    setup.config.predicted_for = super::rig::PATIENT;
    let rig = Rig::with(&[failing.url(), fine.url()], setup).await;
    let tokens: Vec<u32> = (10_000..12_048).collect();
    for _ in 0..8 {
        let answer = rig.post(COMPLETIONS, &prompt(&tokens)).await;
        assert_eq!((answer.status, answer.header("x-fak-worker")), (StatusCode::OK, Some("w1")));
    }
    // Once the failing one was tried, the other is expected to hold the prompt, and gets all of it.
    assert!(rig.count("fak_requests_moved_total") <= 1, "{}", rig.metrics());
}

/// Else the worker that cut it would draw all that are like it.
#[tokio::test]
async fn a_stream_that_failed_leaves_no_prediction() {
    let text = json!({"choices": [{"index": 0, "text": "a", "finish_reason": null}]});
    let event = format!("data: {text}\n\n");
    let cut = peer::stream(&[&event]);
    let whole = peer::whole_stream(&[&event, "data: [DONE]\n\n"]);
    let failing = Peer::start(move |_| Reply::SendAndClose(cut.clone())).await;
    let fine = Peer::start(move |_| Reply::Send(whole.clone())).await;
    let mut setup = setup();
    setup.config.predicted_for = super::rig::PATIENT;
    let rig = Rig::with(&[failing.url(), fine.url()], setup).await;
    let tokens: Vec<u32> = (10_000..12_048).collect();
    let body = json!({"model": MODEL, "prompt": tokens, "stream": true}).to_string();
    let ask =
        async || rig.post(COMPLETIONS, &body).await.header("x-fak-worker").unwrap().to_owned();
    rig.phase(1, Phase::Error);
    assert_eq!(ask().await, "w0");
    rig.phase(1, Phase::Serving);
    let mut asked = Vec::new();
    for _ in 0..64 {
        asked.push(ask().await);
    }
    assert!(asked.iter().any(|worker| worker == "w1"), "{asked:?}");
}
