//! What becomes of a claim: told, audited, explained, contradicted, proven again.

use std::sync::Arc;

use fak_index::{
    EngineHash, Extra, GroupKind, Loss, Offload, Origin, RankId, RankOptions, Remove, Store,
};
use fak_kernel::rank::Trust;
use fak_kernel::{Belief, LossCause, Tier, TierSet};
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::bridged::Bridged;
use super::rig::{MODEL, Rig, whole};
use crate::engine::peer::{self, Peer, Reply, Request};

const COMPLETIONS: &str = "/v1/completions";

pub(super) fn tokens(from: u32) -> Vec<u32> {
    (from..from + 100).collect()
}

/// An answer to a prompt of 100 tokens, with what the engine says of its caches.
pub(super) fn usage(cached: Option<u64>) -> Value {
    let details = cached.map(|cached| json!({"cached_tokens": cached}));
    json!({"prompt_tokens": 100, "prompt_tokens_details": details})
}

pub(super) fn answer(cached: Option<u64>) -> Vec<u8> {
    let choice = json!({"index": 0, "text": "a", "finish_reason": "stop"});
    peer::json("200 OK", &json!({"choices": [choice], "usage": usage(cached)}).to_string())
}

/// One engine that always answers so.
pub(super) async fn answering(cached: Option<u64>) -> (Peer, Rig, RankId) {
    scripted(move |_| Reply::Send(answer(cached))).await
}

pub(super) async fn scripted(
    script: impl Fn(&Request) -> Reply + Send + Sync + 'static,
) -> (Peer, Rig, RankId) {
    let peer = Peer::start(script).await;
    let (rig, rank) = heard(Rig::over(&[peer.url()]).await);
    (peer, rig, rank)
}

/// With a rank whose events come.
pub(super) fn heard(rig: Rig) -> (Rig, RankId) {
    let rank = rig.index.add_rank(RankOptions::default());
    rig.state(0, |state| {
        let trust = Trust::Exact;
        state.ranks = Arc::new([fak::fleet::Rank { number: 0, id: rank, trust }]);
    });
    (rig, rank)
}

/// The engine announces the first three blocks of these tokens.
pub(super) fn store(rig: &Rig, rank: RankId, tokens: &[u32]) {
    let store = Store {
        hashes: (1..4).map(|n| EngineHash::Int(u64::from(tokens[0]) * 8 + n)).collect(),
        parent: None,
        tokens: tokens[..96].to_vec(),
        block_size: 32,
        extra: Extra::PerBlock(Vec::new()),
        lora: None,
        tier: Tier::Gpu,
        group: 0,
        kind: GroupKind::Full,
    };
    rig.index.store(rank, &store, TierSet::ALL);
}

pub(super) fn lose(rig: &Rig, rank: RankId, cause: LossCause, origin: Origin) {
    rig.index.demote(rank, TierSet::ALL, Belief::Unknown, Loss { cause, origin });
}

pub(super) fn prompt(tokens: &[u32], more: Value) -> String {
    let mut body = json!({"model": MODEL, "prompt": tokens, "max_tokens": 1});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body.to_string()
}

pub(super) async fn claimed(rig: &Rig, tokens: &[u32]) -> (String, String) {
    claimed_with(rig, tokens, json!({})).await
}

pub(super) async fn claimed_with(rig: &Rig, tokens: &[u32], more: Value) -> (String, String) {
    let answer = rig.post(COMPLETIONS, &prompt(tokens, more)).await;
    let header = |name| answer.header(name).unwrap().to_owned();
    (header("x-fak-kv"), header("x-fak-warm-tokens"))
}

pub(super) fn said(kv: &str, tokens: &str) -> (String, String) {
    (kv.to_owned(), tokens.to_owned())
}

pub(super) fn warm() -> (String, String) {
    said("warm", "gpu=96")
}

pub(super) fn outcome(word: &str) -> String {
    format!("fak_claims_total{{outcome=\"{word}\"}}")
}

/// Fault 18: the engine's doing explains that it holds less; fak's own does not.
#[tokio::test]
async fn only_what_the_engine_did_explains_a_claim_that_was_too_high() {
    for (cause, origin, verdict) in [
        (LossCause::Cleared, Origin::Live, "lost_in_flight"),
        (LossCause::Gap, Origin::None, "lost_in_flight"),
        (LossCause::NewLife, Origin::None, "lost_in_flight"),
        (LossCause::OwnAction, Origin::None, "lost_to_own_action"),
        (LossCause::Doubt, Origin::None, "over"),
    ] {
        let (_peer, rig, rank) = answering(Some(0)).await;
        store(&rig, rank, &tokens(0));
        assert_eq!(claimed(&rig, &tokens(0)).await, warm());
        lose(&rig, rank, cause, origin);
        rig.counted(&outcome(verdict), 1).await;
        let contradictions = rig.contradictions.lock().unwrap().len();
        assert_eq!(contradictions, usize::from(verdict == "over"), "{cause}");
        if verdict == "lost_in_flight" {
            let told = if origin == Origin::Live { "live" } else { "none" };
            let name = format!("fak_claims_lost_total{{cause=\"{cause}\",told=\"{told}\"}}");
            assert_eq!(rig.count(&name), 1);
        }
    }
}

/// Fault 18: the first contradiction does not excuse the others.
#[tokio::test]
async fn false_claims_side_by_side_are_each_counted() {
    let (_peer, rig, rank, mut arrived) = waiting().await;
    for n in 0..4 {
        store(&rig, rank, &tokens(n * 1000));
    }
    let mut open = Vec::new();
    for n in 0..4 {
        let body = prompt(&tokens(n * 1000), json!({"stream": true}));
        let (head, steps) = tokio::join!(rig.open("POST", COMPLETIONS, &[], &body), async {
            let steps = arrived.recv().await.unwrap();
            let chunk = json!({"choices": [{"index": 0, "text": "a", "finish_reason": "stop"}]});
            steps.send(peer::stream(&[&format!("data: {chunk}\n\n")])).await.unwrap();
            steps
        });
        assert_eq!(head.headers()["x-fak-kv"], "warm", "{n}");
        open.push((head, steps));
    }
    let usage = json!({"choices": [], "usage": usage(Some(0))});
    let end = format!("data: {usage}\n\ndata: [DONE]\n\n");
    let end = format!("{:x}\r\n{end}\r\n0\r\n\r\n", end.len());
    for (_, steps) in &open {
        steps.send(end.clone().into_bytes()).await.unwrap();
    }
    for (head, steps) in open {
        drop(steps);
        whole(head).await;
    }
    rig.counted(&outcome("over"), 4).await;
    assert_eq!(rig.count(&outcome("lost_in_flight")), 0);
}

/// Faults 1 and 4: what made one claim wrong, a dead stream or another engine, makes the next one
/// wrong, too.
#[tokio::test]
async fn nothing_is_claimed_while_a_claim_that_was_too_high_is_not_explained() {
    for explained in [false, true] {
        let (_peer, rig, rank) = answering(Some(0)).await;
        let (one, other) = (tokens(0), tokens(1000));
        store(&rig, rank, &one);
        assert_eq!(claimed_with(&rig, &one, json!({"skips": 1})).await, warm());
        rig.empty().await;
        store(&rig, rank, &other);
        assert_eq!(claimed(&rig, &other).await, said("unknown", "0"));
        if explained {
            lose(&rig, rank, LossCause::Cleared, Origin::Live);
            store(&rig, rank, &other);
        }
        rig.counted(&outcome(if explained { "lost_in_flight" } else { "over" }), 1).await;
        assert_eq!(claimed(&rig, &other).await, warm(), "the engine's doing, or one kind's");
    }
}

/// Fault 18: a number that cannot be true is no evidence, neither for a claim nor of a hit.
#[tokio::test]
async fn more_cached_than_the_prompt_has_is_not_believed() {
    let (_peer, rig, rank) = answering(Some(101)).await;
    store(&rig, rank, &tokens(0));
    assert_eq!(claimed(&rig, &tokens(0)).await, warm());
    rig.counted(&outcome("unaudited"), 1).await;
    lose(&rig, rank, LossCause::Doubt, Origin::None);
    for _ in 0..2 {
        assert_eq!(claimed(&rig, &tokens(0)).await, said("unknown", "0"));
        rig.empty().await;
    }
    assert_eq!(rig.count("fak_claims_confirmed_blocks_total"), 0);
}

/// Fault 46: what one prompt proves wrong is that prompt's, until another kind says the same.
#[tokio::test]
async fn a_contradiction_costs_its_prompt_and_its_kind_of_request_alone() {
    let (_peer, rig, rank) = answering(Some(0)).await;
    let (odd, one, other) = (tokens(0), tokens(1000), tokens(2000));
    for tokens in [&odd, &one, &other] {
        store(&rig, rank, tokens);
    }
    assert_eq!(claimed_with(&rig, &odd, json!({"skips": 1})).await, warm());
    rig.counted(&outcome("over"), 1).await;
    assert!(!rig.contradictions.lock().unwrap()[0].is_rank);
    assert_eq!(claimed(&rig, &odd).await.0, "unknown", "its blocks are given up");
    assert_eq!(claimed_with(&rig, &one, json!({"skips": 1})).await.0, "unknown", "its kind");
    assert_eq!(claimed(&rig, &one).await, warm(), "for others the worker stays warm");
    rig.counted(&outcome("over"), 2).await;
    assert!(rig.contradictions.lock().unwrap()[1].is_rank, "another kind contradicts it, too");
}

/// Faults 46 and 48: the engine kept the blocks, and does not announce a hit again.
#[tokio::test]
async fn a_hit_that_the_engine_reports_is_claimed_again() {
    let (_peer, rig, rank) = answering(Some(96)).await;
    store(&rig, rank, &tokens(0));
    lose(&rig, rank, LossCause::Doubt, Origin::None);
    assert_eq!(claimed(&rig, &tokens(0)).await, said("unknown", "0"));
    rig.counted("fak_claims_confirmed_blocks_total", 3).await;
    assert_eq!(claimed(&rig, &tokens(0)).await, warm());
    // Of a rank that was not exact all the time a hit proves nothing.
    lose(&rig, rank, LossCause::Doubt, Origin::None);
    let trust = |trust| {
        rig.state(0, |state| {
            state.ranks = Arc::new([fak::fleet::Rank { number: 0, id: rank, trust }]);
        });
    };
    trust(Trust::Degraded);
    assert_eq!(claimed(&rig, &tokens(0)).await, said("unknown", "0"));
    trust(Trust::Exact);
    assert_eq!(rig.count("fak_claims_confirmed_blocks_total"), 3);
}

/// Fault 46: events may be missing of the time before the request, or of the time since.
#[tokio::test]
async fn a_hit_on_a_rank_that_was_not_exact_at_dispatch_proves_nothing() {
    let (_peer, rig, rank, mut arrived) = waiting().await;
    store(&rig, rank, &tokens(0));
    lose(&rig, rank, LossCause::Doubt, Origin::None);
    let trust = |trust| {
        rig.state(0, |state| {
            state.ranks = Arc::new([fak::fleet::Rank { number: 0, id: rank, trust }]);
        });
    };
    let prompted = tokens(0);
    for (then, now, confirmed) in [
        (Trust::Degraded, Trust::Exact, 0),
        (Trust::Exact, Trust::Degraded, 0),
        (Trust::Exact, Trust::Exact, 3),
    ] {
        trust(then);
        let (told, ()) = tokio::join!(claimed(&rig, &prompted), async {
            let steps = arrived.recv().await.unwrap();
            trust(now);
            steps.send(answer(Some(96))).await.unwrap();
        });
        assert_eq!(told, said("unknown", "0"));
        rig.empty().await;
        assert_eq!(rig.count("fak_claims_confirmed_blocks_total"), confirmed);
    }
}

/// Fault 19.
#[tokio::test]
async fn details_that_are_left_out_mean_zero_once_a_life_has_shown_them() {
    let shows = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let does_show = Arc::clone(&shows);
    let (_peer, rig, rank) = scripted(move |_| {
        let shows = does_show.load(std::sync::atomic::Ordering::SeqCst);
        Reply::Send(answer(shows.then_some(96)))
    })
    .await;
    let life = |name: &str| rig.state(0, |state| state.incarnation = Some(name.into()));
    life("one");
    store(&rig, rank, &tokens(0));
    store(&rig, rank, &tokens(1000));
    assert_eq!(claimed(&rig, &tokens(0)).await, warm());
    rig.counted(&outcome("unaudited"), 1).await;
    shows.store(true, std::sync::atomic::Ordering::SeqCst);
    assert_eq!(claimed(&rig, &tokens(0)).await, warm());
    rig.counted(&outcome("confirmed"), 1).await;
    shows.store(false, std::sync::atomic::Ordering::SeqCst);
    assert_eq!(claimed(&rig, &tokens(0)).await, warm());
    rig.counted(&outcome("over"), 1).await;
    assert_eq!(rig.contradictions.lock().unwrap()[0].cached, 0);
    life("two");
    assert_eq!(claimed_with(&rig, &tokens(1000), json!({"of": "another kind"})).await, warm());
    rig.counted(&outcome("unaudited"), 2).await;
}

/// Fault 20.
#[tokio::test]
async fn an_answer_is_audited_whatever_stands_behind_its_usage() {
    let choice = json!({"index": 0, "text": "a", "finish_reason": "stop"});
    let ids: Vec<u32> = (0..20_000).collect();
    let whole = format!(
        r#"{{"choices":[{choice}],"usage":{},"prompt_token_ids":{}}}"#,
        usage(Some(96)),
        json!(ids)
    );
    let (_peer, rig, rank) = scripted(move |_| Reply::Send(peer::json("200 OK", &whole))).await;
    store(&rig, rank, &tokens(0));
    assert_eq!(claimed(&rig, &tokens(0)).await, warm());
    rig.counted(&outcome("confirmed"), 1).await;
}

/// Fault 25.
#[tokio::test]
async fn an_answer_that_ended_in_an_error_is_no_evidence() {
    let choice = json!({"index": 0, "text": "", "finish_reason": "error"});
    let body = json!({"choices": [choice], "usage": usage(Some(0))}).to_string();
    let (_peer, rig, rank) = scripted(move |_| Reply::Send(peer::json("200 OK", &body))).await;
    store(&rig, rank, &tokens(0));
    assert_eq!(claimed(&rig, &tokens(0)).await, said("unknown", "0"));
    rig.counted("fak_requests_failed_total{cause=\"error\"}", 1).await;
    assert_eq!(rig.count("fak_claimed_tokens_total"), 0);
    let held =
        rig.index.held(rank, &fak_index::Prompt { tokens: &tokens(0), lora: None, salt: None });
    assert_eq!(held.blocks.gpu, 3, "what is believed stays");
}

/// An engine whose answers the test lets go.
pub(super) async fn waiting() -> (Peer, Rig, RankId, mpsc::Receiver<mpsc::Sender<Vec<u8>>>) {
    let (sender, arrived) = mpsc::channel(16);
    let (peer, rig, rank) = scripted(move |_| {
        let (steps, walked) = mpsc::channel(1);
        sender.try_send(steps).unwrap();
        Reply::Steps(walked)
    })
    .await;
    (peer, rig, rank, arrived)
}

/// Faults 17 and 24: what is lost before the answer's head is written is not told as warm.
#[tokio::test]
async fn a_claim_that_fell_before_the_head_is_not_told() {
    for comes_back in [false, true] {
        for cause in [LossCause::OwnAction, LossCause::Cleared] {
            let (_peer, rig, rank, mut arrived) = waiting().await;
            let prompted = tokens(0);
            store(&rig, rank, &prompted);
            let (told, ()) = tokio::join!(claimed(&rig, &prompted), async {
                let steps = arrived.recv().await.unwrap();
                lose(&rig, rank, cause, Origin::Live);
                if comes_back {
                    // By somebody else's request: this one may have been computed before.
                    store(&rig, rank, &prompted);
                }
                steps.send(answer(Some(0))).await.unwrap();
            });
            assert_eq!(told, said("unknown", "0"), "{cause}");
            rig.empty().await;
            assert_eq!(rig.count("fak_claimed_tokens_total"), 0, "it is no claim");
        }
    }
}

/// A head that has to go before the engine has begun: the request may wait for its turn, while
/// others evict what it could use. And an answer that computed nothing.
#[tokio::test]
async fn an_answer_that_has_not_begun_or_is_an_error_claims_nothing() {
    let head = Reply::Send(peer::STREAM_HEAD.as_bytes().to_vec());
    let refused = Reply::Send(peer::json("400 Bad Request", "{\"error\":{\"message\":\"no\"}}"));
    for (reply, status) in [(head, 200), (refused, 400)] {
        let reply = std::sync::Mutex::new(Some(reply));
        let peer = Peer::start(move |_| reply.lock().unwrap().take().unwrap()).await;
        let mut setup = super::rig::setup();
        setup.config.head_within = super::rig::SHORT;
        let (rig, rank) = heard(Rig::with(&[peer.url()], setup).await);
        store(&rig, rank, &tokens(0));
        let body = prompt(&tokens(0), json!({"stream": status == 200}));
        let answer = rig.open("POST", COMPLETIONS, &[], &body).await;
        assert_eq!(answer.status(), status);
        assert_eq!(answer.headers()["x-fak-kv"], "unknown");
        assert_eq!(answer.headers()["x-fak-warm-tokens"], "0");
    }
}

/// A sleep that aborts has vLLM 0.32.0 end a queued stream with its usage and the end marker alone
/// (observed). The connection's end may come later than those.
#[tokio::test]
async fn a_stream_that_its_engine_dropped_is_no_answer_and_claims_nothing() {
    let usage = "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":97,\"completion_tokens\":0,\
                 \"prompt_tokens_details\":{\"cached_tokens\":0}}}\n\n";
    let dropped = [usage, "data: [DONE]\n\n"];
    for reply in [peer::stream(&dropped), peer::whole_stream(&dropped)] {
        let peer = Peer::start(move |_| Reply::SendAndHold(reply.clone())).await;
        let (rig, rank) = heard(Rig::over(&[peer.url()]).await);
        store(&rig, rank, &tokens(0));
        let asked = json!({"stream": true, "stream_options": {"include_usage": true}});
        let answer = rig.post(COMPLETIONS, &prompt(&tokens(0), asked)).await;
        assert_eq!(
            (answer.status.as_u16(), answer.code().as_str()),
            (503, "worker_dropped_request")
        );
        assert_ne!(answer.header("x-fak-kv"), Some("warm"));
    }
}

/// An error that the engine gives at once is passed on as it is, and claims nothing.
#[tokio::test]
async fn what_a_failed_attempt_brought_claims_nothing() {
    let error = "data: {\"choices\":[{\"index\":0,\"text\":\"\",\"finish_reason\":\"error\"}]}\n\n";
    let reply = peer::stream(&[error]);
    let peer = Peer::start(move |_| Reply::SendAndHold(reply.clone())).await;
    let (rig, rank) = heard(Rig::over(&[peer.url()]).await);
    store(&rig, rank, &tokens(0));
    let answer =
        rig.open("POST", COMPLETIONS, &[], &prompt(&tokens(0), json!({"stream": true}))).await;
    assert_eq!(answer.status(), 200);
    assert_eq!(answer.headers()["x-fak-kv"], "unknown");
    assert_eq!(answer.headers()["x-fak-kv-reason"], "failed");
}

/// Its tokens are the old life's: the new one may have another template, and others' blocks.
#[tokio::test]
async fn nothing_is_told_of_a_prompt_whose_worker_began_another_life_before_the_head() {
    for begins in [false, true] {
        let (_peer, rig, _, mut arrived) = waiting().await;
        let prompted = tokens(0);
        let (told, ()) = tokio::join!(claimed(&rig, &prompted), async {
            let steps = arrived.recv().await.unwrap();
            rig.state(0, |state| state.lives += u64::from(begins));
            steps.send(answer(Some(0))).await.unwrap();
        });
        assert_eq!(told, said(if begins { "unknown" } else { "cold" }, "0"));
    }
}

/// An engine announces what a request stores before it answers it, and nothing tells that from what
/// a client stores that does not come through fak. Of a rank that holds something the prompt is
/// matched, of an empty one it need not be.
#[tokio::test]
async fn what_is_stored_before_the_head_takes_cold_back_and_is_no_loss() {
    for (is_stored, is_matched) in [(true, true), (true, false), (false, true), (false, false)] {
        let (_peer, rig, rank, mut arrived) = waiting().await;
        if is_matched {
            store(&rig, rank, &tokens(1000));
        }
        let prompted = tokens(0);
        let (told, ()) = tokio::join!(claimed(&rig, &prompted), async {
            let steps = arrived.recv().await.unwrap();
            if is_stored {
                store(&rig, rank, &prompted);
            }
            steps.send(answer(Some(0))).await.unwrap();
        });
        let kv = if is_stored { "unknown" } else { "cold" };
        assert_eq!(told, said(kv, "0"), "{is_stored} {is_matched}");
        let none =
            |reason: &str| rig.count(&format!("fak_claims_none_total{{reason=\"{reason}\"}}"));
        assert_eq!((none("lost"), none("not_alone")), (0, u64::from(is_stored)));
    }
}

/// An engine that has not noticed that its client left, or that others ask, too.
#[tokio::test]
async fn cold_is_not_said_of_an_engine_that_shows_more_requests_than_fak_has_there() {
    for requests in [0, 1] {
        let (_peer, rig, _, mut arrived) = waiting().await;
        let counted = fak::fleet::Counted { requests, own: 0, at: tokio::time::Instant::now() };
        rig.state(0, |state| state.counted = Some(counted));
        let prompted = tokens(0);
        let (told, ()) = tokio::join!(claimed(&rig, &prompted), async {
            arrived.recv().await.unwrap().send(answer(Some(0))).await.unwrap();
        });
        assert_eq!(told, said(if requests > 0 { "unknown" } else { "cold" }, "0"));
    }
}

/// What was lost meanwhile may have been the prompt's.
#[tokio::test]
async fn a_prompt_is_not_cold_where_events_were_lost_since() {
    let (_peer, rig, rank, mut arrived) = waiting().await;
    let prompted = tokens(0);
    let (told, ()) = tokio::join!(claimed(&rig, &prompted), async {
        let steps = arrived.recv().await.unwrap();
        let lost = Loss { cause: LossCause::Gap, origin: Origin::None };
        rig.index.demote(rank, TierSet::ALL, Belief::Unknown, lost);
        steps.send(answer(Some(0))).await.unwrap();
    });
    assert_eq!(told, said("unknown", "0"));
}

/// vLLM ends an aborted response with `completed` (0.32.0, observed).
#[tokio::test]
async fn an_answer_that_fak_had_aborted_is_counted_as_failed_where_nothing_shows_it() {
    for is_aborted in [false, true] {
        let (_peer, rig, _, mut arrived) = waiting().await;
        let body = json!({"model": MODEL, "input": "a"}).to_string();
        let (answered, ()) = tokio::join!(rig.post("/v1/responses", &body), async {
            let steps = arrived.recv().await.unwrap();
            if is_aborted {
                rig.fleet.snapshot().workers[0].worker.door.abort();
            }
            steps.send(peer::json("200 OK", "{\"status\":\"completed\"}")).await.unwrap();
        });
        assert_eq!(answered.status.as_u16(), 200);
        let outcome = if is_aborted { "failed" } else { "ok" };
        let series = "fak_requests_total{outcome=\"OUTCOME\",route=\"/v1/responses\"}";
        rig.counted(&series.replace("OUTCOME", outcome), 1).await;
    }
}

/// Of a prompt that an engine begins to evict from its end, the beginning is as warm as it was.
#[tokio::test]
async fn what_still_holds_of_a_claim_is_told() {
    for comes_back in [false, true] {
        let (_peer, rig, rank, mut arrived) = waiting().await;
        let prompted = tokens(0);
        store(&rig, rank, &prompted);
        let (told, ()) = tokio::join!(claimed(&rig, &prompted), async {
            let steps = arrived.recv().await.unwrap();
            let hashes = vec![EngineHash::Int(2), EngineHash::Int(3)];
            let remove = Remove { hashes, tier: Tier::Gpu, group: 0 };
            rig.index.remove(rank, &remove, Origin::Live);
            if comes_back {
                store(&rig, rank, &prompted);
            }
            steps.send(answer(Some(32))).await.unwrap();
        });
        assert_eq!(told, said("warm", "gpu=32"));
        rig.empty().await;
        assert_eq!(rig.count("fak_claims_total{outcome=\"confirmed\"}"), 1);
    }
}

/// As OffloadingConnector announces the first three blocks of these tokens: one by one, by their
/// hashes alone, here the last one first.
fn store_in_tier(rig: &Rig, rank: RankId, tokens: &[u32]) {
    rig.index.set_offload(rank, Offload::BY_BLOCK);
    for n in (1..4).rev() {
        let store = Store {
            hashes: vec![EngineHash::Int(u64::from(tokens[0]) * 8 + n)],
            parent: None,
            tokens: Vec::new(),
            block_size: 0,
            extra: Extra::NotReported,
            lora: None,
            tier: Tier::Cpu,
            group: 0,
            kind: GroupKind::NotReported,
        };
        rig.index.store(rank, &store, TierSet::ALL);
    }
}

fn remove(rig: &Rig, rank: RankId, tier: Tier, hashes: &[u64]) {
    let hashes = hashes.iter().copied().map(EngineHash::Int).collect();
    rig.index.remove(rank, &Remove { hashes, tier, group: 0 }, Origin::Live);
}

/// vLLM 0.32.0 brings the blocks of a tier to the gpu before it answers, and announces them there
/// (observed).
#[tokio::test]
async fn what_the_request_itself_brings_to_the_gpu_takes_nothing_from_a_tiers_claim() {
    type Change = fn(&Rig, RankId);
    let none: Change = |_, _| {};
    let tail: Change = |rig, rank| remove(rig, rank, Tier::Cpu, &[2, 3]);
    let clear: Change = |rig, rank| lose(rig, rank, LossCause::Cleared, Origin::Live);
    for (gone, in_flight, cached, kv, warm) in [
        (&[1, 2, 3][..], none, 96, "warm", "cpu=96"),
        (&[2, 3], none, 96, "warm", "gpu=32,cpu=64"),
        (&[], none, 96, "warm", "gpu=96"),
        // What came to the gpu behind it may be what the engine computed.
        (&[1, 2, 3], tail, 32, "warm", "cpu=32"),
        (&[1, 2, 3], clear, 0, "unknown", "0"),
    ] {
        let (_peer, rig, rank, mut arrived) = waiting().await;
        let prompted = tokens(0);
        store(&rig, rank, &prompted);
        store_in_tier(&rig, rank, &prompted);
        remove(&rig, rank, Tier::Gpu, gone);
        let (told, ()) = tokio::join!(claimed(&rig, &prompted), async {
            let steps = arrived.recv().await.unwrap();
            in_flight(&rig, rank);
            store(&rig, rank, &prompted);
            steps.send(answer(Some(cached))).await.unwrap();
        });
        assert_eq!(told, said(kv, warm));
        rig.empty().await;
        assert_eq!(rig.count(&outcome("confirmed")), u64::from(kv == "warm"));
    }
}

/// The engine picks the rank, and may have picked the one that held more when it was sent.
#[tokio::test]
async fn a_rank_that_came_to_hold_less_makes_a_claim_on_another_smaller() {
    let (_peer, rig, rank, mut arrived) = waiting().await;
    let other = rig.index.add_rank(RankOptions::default());
    let prompted = tokens(0);
    store(&rig, rank, &prompted);
    store_in_tier(&rig, rank, &prompted);
    remove(&rig, rank, Tier::Gpu, &[1, 2, 3]);
    store(&rig, other, &prompted);
    rig.state(0, |state| {
        let first = state.ranks[0];
        state.ranks = [first, fak::fleet::Rank { number: 1, id: other, ..first }].into();
        state.caution.ranks = Some(2);
        // It does not obey a rank header.
        state.version = Some("0.11.0".into());
    });
    for (goes, told) in [(false, said("warm", "cpu=96")), (true, said("unknown", "0"))] {
        let (heard, ()) = tokio::join!(claimed(&rig, &prompted), async {
            let steps = arrived.recv().await.unwrap();
            if goes {
                remove(&rig, other, Tier::Gpu, &[2, 3]);
            }
            steps.send(answer(Some(96))).await.unwrap();
        });
        assert_eq!(heard, told);
    }
}

/// Fault 23.
#[tokio::test]
async fn cold_is_said_only_where_nobody_else_was_inside() {
    let (_peer, rig, rank, mut arrived) = waiting().await;
    store(&rig, rank, &tokens(5000));
    lose(&rig, rank, LossCause::Cleared, Origin::Live);
    rig.index.demote(
        rank,
        TierSet::ALL,
        Belief::Gone,
        Loss { cause: LossCause::Cleared, origin: Origin::Live },
    );
    let prompted = tokens(0);
    let (one, other, ()) =
        tokio::join!(claimed(&rig, &prompted), claimed(&rig, &prompted), async {
            let (one, other) = (arrived.recv().await.unwrap(), arrived.recv().await.unwrap());
            one.send(answer(Some(0))).await.unwrap();
            other.send(answer(Some(64))).await.unwrap();
        });
    assert_eq!((one.0.as_str(), other.0.as_str()), ("unknown", "unknown"));
    rig.empty().await;
    let later = tokens(7000);
    let (alone, ()) = tokio::join!(claimed(&rig, &later), async {
        arrived.recv().await.unwrap().send(answer(Some(0))).await.unwrap();
    });
    assert_eq!(alone, said("cold", "0"));
}

/// Fault 18: an audit that cannot speak is no acquittal.
#[tokio::test]
async fn a_worker_whose_claims_are_never_audited_is_not_claimed_of() {
    let (_peer, rig, rank) = answering(None).await;
    store(&rig, rank, &tokens(0));
    for n in 1..=32 {
        assert_eq!(claimed(&rig, &tokens(0)).await, warm(), "{n}");
        rig.counted(&outcome("unaudited"), n).await;
    }
    assert_eq!(claimed(&rig, &tokens(0)).await, said("unknown", "0"));
    assert!(rig.fleet.credit("w0").unwrap().withheld(std::time::Instant::now()).is_some());
}

/// Fault 48: a prompt of which nothing is known is announced by the engine, once.
#[tokio::test]
async fn an_engine_is_asked_once_to_announce_what_it_holds_of_a_prompt() {
    let (mut peer, rig, rank) = answering(Some(0)).await;
    // As of an engine that was there before fak.
    lose(&rig, rank, LossCause::Gap, Origin::None);
    let mode = async |rig: &Rig, peer: &mut Peer, from: u32, more: Value| {
        claimed_with(rig, &tokens(from), more).await;
        peer.request().await.json()["vllm_xargs"].clone()
    };
    let state = |version: &str, life: &str| {
        rig.state(0, |state| {
            state.version = Some(version.into());
            state.incarnation = Some(life.into());
        });
    };
    state("0.31.0", "one");
    assert_eq!(mode(&rig, &mut peer, 0, json!({})).await, Value::Null, "it does not know it");
    state("0.32.0", "one");
    let full = json!({"kv_cache_report_mode": "full"});
    assert_eq!(mode(&rig, &mut peer, 0, json!({})).await, full);
    assert_eq!(mode(&rig, &mut peer, 0, json!({})).await, Value::Null, "once");
    let own = json!({"vllm_xargs": {"a": 1, "kv_cache_report_mode": "x"}});
    let both = json!({"a": 1, "kv_cache_report_mode": "full"});
    assert_eq!(mode(&rig, &mut peer, 1000, own).await, both);
    state("0.32.0", "two");
    assert_eq!(mode(&rig, &mut peer, 0, json!({})).await, full, "another life");
    assert_eq!(rig.count("fak_requests_reporting_total"), 3);
}

/// Fault 50: a batch that was dropped shows with the next one only, unless it is asked for.
#[tokio::test]
async fn an_engine_is_asked_for_a_store_that_does_not_come() {
    let (_peer, mut rig, rank) = answering(Some(0)).await;
    store(&rig, rank, &tokens(5000));
    claimed(&rig, &tokens(0)).await;
    let late = tokio::time::timeout(super::rig::PATIENT, rig.late.recv()).await;
    assert_eq!(late.unwrap().as_deref(), Some("w0"));
}

/// Fault 48: the engine keeps its blocks and does not announce them again by itself.
#[tokio::test]
async fn what_an_engine_kept_is_claimed_again_after_one_request_of_a_fak_that_forgot_it() {
    let bridged = Bridged::start().await;
    let text = "a".repeat(100);
    bridged.ask(&text).await;
    assert_eq!(bridged.ask(&text).await, warm());
    let rank = bridged.lifecycle.ranks("w0").await.unwrap().remove(0).id();
    // As after a restart of fak whose replay does not reach back so far.
    bridged.rig.index.forget_identities(rank);
    let doubted = Loss { cause: LossCause::Gap, origin: Origin::None };
    bridged.rig.index.demote(rank, TierSet::ALL, Belief::Unknown, doubted);
    // In tokens: this request was not sent before.
    let tokens = bridged.sim.tokenize(&text);
    let body = json!({"model": "tiny", "prompt": tokens, "max_tokens": 1}).to_string();
    let reporting = bridged.rig.count("fak_requests_reporting_total");
    let first = bridged.rig.post(COMPLETIONS, &body).await;
    assert_eq!(first.header("x-fak-kv"), Some("unknown"));
    assert_eq!(bridged.rig.count("fak_requests_reporting_total"), reporting + 1);
    let key = fak_index::Prompt { tokens: &tokens, lora: None, salt: None };
    let believed = async {
        while bridged.rig.index.held(rank, &key).blocks.gpu < 3 {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(super::rig::PATIENT, believed).await.unwrap();
    let second = bridged.rig.post(COMPLETIONS, &body).await;
    assert_eq!(second.header("x-fak-warm-tokens"), Some("gpu=96"));
}
