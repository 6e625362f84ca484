//! Who gets a request where workers, or ranks of one worker, differ in what they have to do and in
//! whether they fail.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use fak::fleet::{Counted, Rank, State};
use fak::sessions::{self, Sessions};
use fak::store::Store;
use fak_index::{EngineHash, Extra, GroupKind, RankOptions, Store as Stored};
use fak_kernel::rank::Trust;
use fak_kernel::{Tier, TierSet};
use http::StatusCode;
use serde_json::json;
use tokio::sync::mpsc;

use super::rig::{MODEL, PATIENT, Rig, Setup, chat, setup};
use super::routing::prompt;
use crate::engine::peer::{self, Peer, Reply};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
const EMBEDDINGS: &str = "/v1/embeddings";
const RANK: &str = "x-data-parallel-rank";

fn good() -> Reply {
    Reply::Send(peer::json("200 OK", "{\"choices\":[]}"))
}

fn ask() -> String {
    chat(false)
}

/// A peer that answers chats with this status, and everything else well.
async fn failing_at_chat(status: &'static str) -> Peer {
    Peer::start(move |request| match request.line() {
        "POST /v1/chat/completions" => Reply::Send(peer::json(status, "{}")),
        _ => good(),
    })
    .await
}

#[tokio::test]
async fn a_worker_that_fails_at_once_does_not_draw_the_requests() {
    for status in ["500 Internal Server Error", "529 Overloaded"] {
        let (failing, fine) = (failing_at_chat(status).await, Peer::start(|_| good()).await);
        let rig = Rig::over(&[failing.url(), fine.url()]).await;
        let mut failed = 0;
        for _ in 0..60 {
            failed += u32::from(rig.post(CHAT, &ask()).await.status != StatusCode::OK);
        }
        // Three take it out; the rest are tries, 2, 6, 14, .. seconds later.
        assert!((3..=6).contains(&failed), "{status}: {failed} of 60");
        assert!(rig.count("fak_requests_ejections_total") >= 1);
        // It fails on one route, and serves the other.
        let mut workers = BTreeMap::new();
        for _ in 0..60 {
            let body = json!({"model": MODEL, "input": "x"}).to_string();
            let answer = rig.post(EMBEDDINGS, &body).await;
            assert_eq!(answer.status, StatusCode::OK);
            *workers.entry(answer.header("x-fak-worker").unwrap().to_owned()).or_insert(0) += 1;
        }
        assert_eq!(workers.len(), 2, "{workers:?}");
    }
}

#[tokio::test]
async fn workers_that_all_fail_are_all_asked_and_wrong_requests_count_for_nothing() {
    for status in ["500 Internal Server Error", "404 Not Found", "429 Too Many Requests"] {
        let (one, other) = (failing_at_chat(status).await, failing_at_chat(status).await);
        let rig = Rig::over(&[one.url(), other.url()]).await;
        for _ in 0..40 {
            let answer = rig.post(CHAT, &ask()).await;
            assert!(status.starts_with(answer.status.as_str()), "{status}: {}", answer.text());
        }
        let is_failure = status.starts_with('5');
        assert_eq!(rig.count("fak_requests_ejections_total") > 0, is_failure, "{status}");
    }
}

/// It is out for two seconds; nothing tells when they are over but that it is asked again.
#[tokio::test]
async fn a_worker_that_recovers_is_tried_by_one_request_and_comes_back() {
    let is_well = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let well = Arc::clone(&is_well);
    let recovering = Peer::start(move |_| match well.load(Ordering::SeqCst) {
        true => good(),
        false => Reply::Send(peer::json("500 Internal Server Error", "{}")),
    })
    .await;
    let fine = Peer::start(|_| good()).await;
    let rig = Rig::over(&[recovering.url(), fine.url()]).await;
    while rig.count("fak_requests_ejections_total") == 0 {
        rig.post(CHAT, &ask()).await;
    }
    is_well.store(true, Ordering::SeqCst);
    let back = async { while rig.post(CHAT, &ask()).await.header("x-fak-worker") != Some("w0") {} };
    tokio::time::timeout(PATIENT, back).await.unwrap();
    // Sound again: it takes part as before.
    let mut taken = 0;
    for _ in 0..60 {
        let answer = rig.post(CHAT, &ask()).await;
        taken += u32::from(answer.header("x-fak-worker") == Some("w0"));
    }
    assert!(taken > 5, "{taken} of 60");
}

#[tokio::test]
async fn an_engines_404_for_a_model_that_it_lists_is_tried_elsewhere_and_the_engine_looked_at() {
    let body = "{\"error\":{\"message\":\"The model `m` does not exist.\",\"code\":404}}";
    for lacking in [1, 2] {
        let asked = Arc::new(AtomicUsize::new(0));
        let start = || {
            let asked = Arc::clone(&asked);
            Peer::start(move |_| match asked.fetch_add(1, Ordering::SeqCst) {
                number if number < lacking => Reply::Send(peer::json("404 Not Found", body)),
                _ => good(),
            })
        };
        let (one, other) = (start().await, start().await);
        let mut rig = Rig::over(&[one.url(), other.url()]).await;
        let answer = rig.post(CHAT, &ask()).await;
        assert_eq!(answer.header("x-fak-attempts"), Some("2"));
        let first = rig.suspects.recv().await.unwrap();
        if lacking == 1 {
            assert_eq!(answer.status, StatusCode::OK);
            assert_ne!(answer.header("x-fak-worker"), Some(&*first));
        } else {
            assert_eq!((answer.status, answer.text()), (StatusCode::NOT_FOUND, body));
        }
    }
}

#[tokio::test]
async fn requests_that_others_sent_to_a_worker_are_load() {
    let (one, other) = (Peer::start(|_| good()).await, Peer::start(|_| good()).await);
    let rig = Rig::over(&[one.url(), other.url()]).await;
    let now = tokio::time::Instant::now();
    rig.state(0, |state| state.counted = Some(Counted { requests: 50, own: 0, at: now }));
    for _ in 0..40 {
        let answer = rig.post(CHAT, &ask()).await;
        assert_eq!(answer.header("x-fak-worker"), Some("w1"));
    }
    // Those that this fak had there are not counted twice.
    rig.state(0, |state| state.counted = Some(Counted { requests: 50, own: 50, at: now }));
    let mut taken = 0;
    for _ in 0..60 {
        let answer = rig.post(CHAT, &ask()).await;
        taken += u32::from(answer.header("x-fak-worker") == Some("w0"));
    }
    assert!(taken > 5, "{taken} of 60");
}

#[tokio::test]
async fn a_session_leaves_a_worker_that_has_much_more_to_do_and_is_bound_anew() {
    let (one, other) = (Peer::start(|_| good()).await, Peer::start(|_| good()).await);
    let store = Store::open("sqlite::memory:").await.unwrap();
    let (sessions, _) = Sessions::open(store, sessions::Config::default()).await.unwrap();
    let setup = Setup { sessions: Some(sessions.clone()), ..setup() };
    let rig = Rig::with(&[one.url(), other.url()], setup).await;
    let ask = async || {
        let answer = rig.post_with(CHAT, &[("x-fak-session", "s")], &ask()).await;
        answer.header("x-fak-worker").unwrap().to_owned()
    };
    let before = ask().await;
    let door = rig.fleet.snapshot().workers[usize::from(before == "w1")].worker.door.clone();
    let busy: Vec<_> = (0..2).map(|_| door.enter().unwrap()).collect();
    assert_eq!(ask().await, before, "two requests are no reason");
    let more: Vec<_> = (0..4).map(|_| door.enter().unwrap()).collect();
    let after = ask().await;
    assert_ne!(after, before);
    assert_eq!(sessions.get("s").unwrap().worker.as_deref(), Some(after.as_str()));
    drop((busy, more));
    assert_eq!(ask().await, after, "it stays where it went");
}

/// A rank of number `number` that is known to hold the first 32-token blocks of `tokens`.
fn rank(rig: &Rig, number: u32, tokens: &[u32]) -> Rank {
    let id = rig.index.add_rank(RankOptions::default());
    let whole = tokens.len() / 32 * 32;
    let store = Stored {
        hashes: (0..whole as u64 / 32).map(|n| EngineHash::Int(n + 1)).collect(),
        parent: None,
        tokens: tokens[..whole].to_vec(),
        block_size: 32,
        extra: Extra::PerBlock(Vec::new()),
        lora: None,
        tier: Tier::Gpu,
        group: 0,
        kind: GroupKind::Full,
    };
    if whole > 0 {
        rig.index.store(id, &store, TierSet::ALL);
    }
    Rank { number, id, trust: Trust::Exact }
}

/// A worker with ranks of these numbers, of which the second holds `tokens`.
fn with_ranks(rig: &Rig, numbers: [u32; 3], tokens: &[u32]) {
    let [a, b, c] = numbers;
    let ranks = [rank(rig, a, &[]), rank(rig, b, tokens), rank(rig, c, &[])];
    rig.state(0, |state| {
        state.version = Some("0.32.0".into());
        state.ranks = Arc::new(ranks);
    });
}

#[tokio::test]
async fn a_request_goes_to_the_rank_that_holds_its_prompt_and_a_clients_own_choice_stays() {
    let mut peer = Peer::start(|_| good()).await;
    let rig = Rig::over(&[peer.url()]).await;
    let tokens: Vec<u32> = (0..1024).collect();
    with_ranks(&rig, [0, 1, 2], &tokens);
    for _ in 0..8 {
        let answer = rig.post(COMPLETIONS, &prompt(&tokens)).await;
        assert_eq!(peer.request().await.header(RANK), Some("1"));
        assert_eq!(answer.header("x-fak-warm-tokens"), Some("gpu=992"));
    }
    let answer = rig.post_with(COMPLETIONS, &[(RANK, "2")], &prompt(&tokens)).await;
    assert_eq!(peer.request().await.header(RANK), Some("2"));
    assert_eq!(answer.header("x-fak-warm-tokens"), Some("0"));
    // Routes that do not read the header get none.
    rig.post(EMBEDDINGS, &json!({"model": MODEL, "input": "x"}).to_string()).await;
    assert_eq!(peer.request().await.header(RANK), None);
}

#[tokio::test]
async fn no_rank_is_named_where_the_header_may_mean_another_or_nothing() {
    type Case = (&'static str, [u32; 3], fn(&mut State));
    let tokens: Vec<u32> = (0..1024).collect();
    let cases: [Case; 4] = [
        ("an engine that does not obey", [0, 1, 2], |state| state.version = Some("0.11.2".into())),
        ("a part of the ranks of a larger engine", [3, 4, 5], |_| {}),
        ("numbers with a hole", [0, 1, 3], |_| {}),
        ("a rank that is not heard", [0, 1, 2], |state| state.has_silent_ranks = true),
    ];
    for (case, numbers, change) in cases {
        let mut peer = Peer::start(|_| good()).await;
        let rig = Rig::over(&[peer.url()]).await;
        with_ranks(&rig, numbers, &tokens);
        rig.state(0, change);
        let answer = rig.post(COMPLETIONS, &prompt(&tokens)).await;
        assert_eq!(peer.request().await.header(RANK), None, "{case}");
        // It may be any rank: only what all of them hold could be claimed.
        assert_eq!(answer.header("x-fak-warm-tokens"), Some("0"), "{case}");
    }
}

#[tokio::test]
async fn unseen_prompts_are_spread_over_the_ranks() {
    let (sender, mut arrived) = mpsc::channel(64);
    let peer = Peer::start(move |request| {
        let (steps, walked) = mpsc::channel(1);
        let rank = request.header(RANK).unwrap_or("none").to_owned();
        sender.try_send((rank, steps)).unwrap();
        Reply::Steps(walked)
    })
    .await;
    let rig = Rig::over(&[peer.url()]).await;
    with_ranks(&rig, [0, 1, 2], &[]);
    let bodies: Vec<_> = (0..12).map(|n| prompt(&[n, n + 1, n + 2])).collect();
    let answers = bodies.iter().map(|body| rig.post(COMPLETIONS, body));
    let (_, by_rank) = tokio::join!(futures_util::future::join_all(answers), async {
        let (mut all, mut by_rank) = (Vec::new(), BTreeMap::new());
        while all.len() < 12 {
            let (rank, steps) = arrived.recv().await.unwrap();
            *by_rank.entry(rank).or_insert(0) += 1;
            all.push(steps);
        }
        for steps in all {
            steps.send(peer::json("200 OK", "{\"choices\":[]}")).await.unwrap();
        }
        by_rank
    });
    let even = ["0", "1", "2"].map(|rank| (rank.to_owned(), 4));
    assert_eq!(by_rank, BTreeMap::from(even));
    assert_eq!(rig.inside(0), 0);
}
