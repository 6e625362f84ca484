//! How claims end: each with one outcome, whatever ends its answer; and what is said where there is
//! no claim.

use fak_kernel::rank::Trust;
use fak_kernel::{Belief, LossCause, TierSet};
use http_body_util::BodyExt as _;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::audits::{
    answering, claimed, claimed_with, lose, outcome, prompt, said, scripted, store, tokens, usage,
    waiting, warm,
};
use super::rig::{MODEL, PATIENT, Rig, next};
use crate::engine::peer::{self, Peer, Reply};
use fak_index::{Origin, RankId};

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

/// What an answer's head says in place of a claim.
fn reason(word: &str) -> String {
    format!("fak_claims_none_total{{reason=\"{word}\"}}")
}

fn unaudited(word: &str) -> String {
    format!("fak_claims_unaudited_total{{cause=\"{word}\"}}")
}

/// An event of a stream, as one chunk.
fn chunk(data: &str) -> Vec<u8> {
    let event = format!("data: {data}\n\n");
    format!("{:x}\r\n{event}\r\n", event.len()).into_bytes()
}

/// A piece of a text, with the engine's numbers where they are `told`.
fn text(finish: Option<&str>, told: Option<Value>) -> String {
    let choice = json!({"index": 0, "text": "a", "finish_reason": finish});
    json!({"choices": [choice], "usage": told}).to_string()
}

/// A stream whose head told a claim of 96 tokens, and the engine's hand on it.
async fn begun(
    rig: &Rig,
    arrived: &mut mpsc::Receiver<mpsc::Sender<Vec<u8>>>,
    first: Option<Value>,
) -> (http::Response<hyper::body::Incoming>, mpsc::Sender<Vec<u8>>) {
    let body = prompt(&tokens(0), json!({"stream": true}));
    let (head, steps) = tokio::join!(rig.open("POST", COMPLETIONS, &[], &body), async {
        let steps = arrived.recv().await.unwrap();
        let first = format!("data: {}\n\n", text(None, first));
        steps.send(peer::stream(&[&first])).await.unwrap();
        steps
    });
    assert_eq!(head.headers()["x-fak-warm-tokens"], "gpu=96");
    (head, steps)
}

/// Claims that were told, and those that ended.
fn made_and_ended(rig: &Rig) -> (u64, u64) {
    let made = ["warm", "cold"].map(|kv| format!("fak_claims_made_total{{kv=\"{kv}\"}}"));
    let ended = ["confirmed", "under", "over", "lost_in_flight", "lost_to_own_action", "unaudited"];
    (
        made.iter().map(|name| rig.count(name)).sum(),
        ended.iter().map(|word| rig.count(&outcome(word))).sum(),
    )
}

/// What ends an answer after its head.
#[derive(Clone, Copy, Debug)]
enum End {
    /// The client leaves.
    Leaves,
    /// The worker's connection breaks.
    Breaks,
    /// The engine sends this last, and the end marker.
    Says(&'static str),
}

#[tokio::test]
async fn every_claim_ends_with_one_outcome_whatever_ends_its_answer() {
    let error = r#"{"error":{"message":"boom","code":500}}"#;
    let refusal = r#"{"error":{"message":"no","code":400}}"#;
    let aborted = r#"{"choices":[{"index":0,"text":"","finish_reason":"abort"}],
        "usage":{"prompt_tokens":100,"prompt_tokens_details":{"cached_tokens":0}}}"#;
    let aborted: &'static str = Box::leak(aborted.replace('\n', "").into_boxed_str());
    for (first, end, verdict, cause) in [
        // By what the engine told before.
        (Some(usage(Some(96))), End::Leaves, "confirmed", None),
        (Some(usage(Some(64))), End::Leaves, "over", None),
        (Some(usage(Some(96))), End::Breaks, "confirmed", None),
        // Numbers may still come that are not there yet.
        (Some(usage(None)), End::Leaves, "unaudited", Some("client_left")),
        (None, End::Leaves, "unaudited", Some("client_left")),
        (None, End::Breaks, "unaudited", Some("failed")),
        (Some(usage(Some(96))), End::Says(error), "unaudited", Some("failed")),
        (None, End::Says(refusal), "unaudited", Some("aborted")),
        (None, End::Says(aborted), "unaudited", Some("aborted")),
    ] {
        let (_peer, rig, rank, mut arrived) = waiting().await;
        rig.state(0, |state| state.incarnation = Some("one".into()));
        store(&rig, rank, &tokens(0));
        // This life has shown its numbers: one that it leaves out at an answer's end is 0.
        let (head, steps) = begun(&rig, &mut arrived, Some(usage(Some(96)))).await;
        steps.send([chunk(&text(Some("stop"), None)), chunk("[DONE]")].concat()).await.unwrap();
        steps.send(b"0\r\n\r\n".to_vec()).await.unwrap();
        head.into_body().collect().await.unwrap();
        rig.counted(&outcome("confirmed"), 1).await;
        let before = rig.count(&outcome(verdict));
        let (mut head, steps) = begun(&rig, &mut arrived, first.clone()).await;
        next(&mut head).await;
        match end {
            End::Leaves => drop(head),
            End::Breaks => {
                steps.send(b"no length of a chunk\r\n".to_vec()).await.unwrap();
                while let Some(Ok(_)) = head.frame().await {}
            }
            End::Says(last) => {
                steps.send([chunk(last), chunk("[DONE]")].concat()).await.unwrap();
                steps.send(b"0\r\n\r\n".to_vec()).await.unwrap();
                while let Some(Ok(_)) = head.frame().await {}
            }
        }
        let case = format!("{first:?} {end:?}: {}", rig.metrics());
        rig.counted(&outcome(verdict), before + 1).await;
        assert_eq!(made_and_ended(&rig), (2, 2), "{case}");
        let causes = ["no_details", "several_choices", "client_left", "failed", "aborted"];
        for word in causes {
            let is_it = u64::from(cause == Some(word));
            assert_eq!(rig.count(&unaudited(word)), is_it, "{word} {case}");
        }
        let tokens = rig.count("fak_claims_made_tokens_total{tier=\"gpu\"}");
        assert_eq!(tokens, 2 * 96, "{case}");
        let audited = if cause.is_some() { 96 } else { 2 * 96 };
        assert_eq!(rig.count("fak_claimed_tokens_total"), audited, "{case}");
    }
}

/// Else one client could take a worker's claims away from all others.
#[tokio::test]
async fn clients_that_leave_cost_a_worker_no_trust_and_are_counted() {
    let (_peer, rig, rank, mut arrived) = waiting().await;
    store(&rig, rank, &tokens(0));
    for left in 1..=40 {
        let (head, _steps) = begun(&rig, &mut arrived, None).await;
        drop(head);
        rig.counted(&unaudited("client_left"), left).await;
    }
    assert_eq!(rig.fleet.credit("w0").unwrap().withheld(std::time::Instant::now()), None);
    assert_eq!(made_and_ended(&rig), (40, 40));
}

#[tokio::test]
async fn an_answer_that_got_no_head_made_no_claim() {
    let (_peer, rig, rank) = scripted(|_| Reply::Reset).await;
    store(&rig, rank, &tokens(0));
    let answer = rig.post(COMPLETIONS, &prompt(&tokens(0), json!({}))).await;
    assert_eq!(answer.header("x-fak-kv"), None, "{answer:?}");
    rig.empty().await;
    assert_eq!(made_and_ended(&rig), (0, 0));
}

/// `cold` is a claim, too: that the worker provably holds nothing of the prompt.
#[tokio::test]
async fn a_false_cold_is_over_unless_the_engine_announced_the_first_block_since() {
    for (announced, more) in [(false, json!({})), (true, json!({})), (false, json!({"n": 1}))] {
        let (_peer, mut rig, rank) = answering(Some(96)).await;
        store(&rig, rank, &tokens(5000));
        assert_eq!(claimed_with(&rig, &tokens(0), more).await, said("cold", "0"));
        if announced {
            store(&rig, rank, &tokens(0));
        } else {
            let asked = tokio::time::timeout(PATIENT, rig.missed.recv()).await.unwrap();
            assert_eq!(asked.as_deref(), Some("w0"), "the engine is asked what it published");
        }
        rig.counted(&outcome(if announced { "under" } else { "over" }), 1).await;
        assert_eq!(made_and_ended(&rig), (1, 1));
        let contradictions = rig.contradictions.lock().unwrap();
        assert_eq!(contradictions.len(), usize::from(!announced));
        for contradiction in contradictions.iter() {
            assert_eq!((contradiction.claimed, contradiction.cached), (0, 96));
            assert!(!contradiction.is_rank, "of one prompt");
        }
    }
}

/// Of a prompt that is not matched `cold` says that the rank holds nothing at all.
#[tokio::test]
async fn a_false_cold_of_an_empty_rank_puts_the_whole_rank_in_doubt() {
    let (_peer, rig, _rank) = answering(Some(96)).await;
    let more = json!({"prompt_logprobs": 1});
    assert_eq!(claimed_with(&rig, &tokens(0), more).await, said("cold", "0"));
    rig.counted(&outcome("over"), 1).await;
    let contradictions = rig.contradictions.lock().unwrap();
    assert!(contradictions.len() == 1 && contradictions[0].is_rank, "{contradictions:?}");
}

/// While it waits to be judged nothing that is warm is in doubt: stores that are missing take
/// nothing away.
#[tokio::test]
async fn a_cold_that_waits_for_its_event_withholds_no_warm_claim() {
    let (_peer, rig, rank) = answering(Some(96)).await;
    store(&rig, rank, &tokens(5000));
    assert_eq!(claimed(&rig, &tokens(0)).await, said("cold", "0"));
    rig.empty().await;
    assert_eq!(claimed_with(&rig, &tokens(5000), json!({"of": "another kind"})).await, warm());
    assert_eq!(rig.count(&outcome("over")), 0);
}

/// What fak's own action took from under a request makes no other claim wrong.
#[tokio::test]
async fn a_claim_that_an_own_action_took_withholds_no_other() {
    let (_peer, rig, rank, mut arrived) = waiting().await;
    store(&rig, rank, &tokens(0));
    let (mut head, steps) = begun(&rig, &mut arrived, Some(usage(Some(0)))).await;
    next(&mut head).await;
    lose(&rig, rank, LossCause::OwnAction, Origin::None);
    let end = [chunk(&text(Some("stop"), None)), chunk("[DONE]"), b"0\r\n\r\n".to_vec()];
    steps.send(end.concat()).await.unwrap();
    head.into_body().collect().await.unwrap();
    assert!(!rig.fleet.credit("w0").unwrap().is_withheld(std::time::Instant::now()));
    rig.counted(&outcome("lost_to_own_action"), 1).await;
}

/// An engine that drops what it announced again and again, or whose events come late.
#[tokio::test]
async fn claims_that_are_lost_again_and_again_cost_a_worker_its_credit() {
    let (_peer, rig, rank) = answering(Some(0)).await;
    let mut lost = 0;
    while rig.fleet.credit("w0").unwrap().withheld(std::time::Instant::now()).is_none() {
        store(&rig, rank, &tokens(0));
        assert_eq!(claimed(&rig, &tokens(0)).await, warm(), "after {lost}");
        lose(&rig, rank, LossCause::Cleared, Origin::Live);
        lost += 1;
        rig.counted(&outcome("lost_in_flight"), lost).await;
    }
    store(&rig, rank, &tokens(0));
    assert_eq!(claimed(&rig, &tokens(0)).await, said("unknown", "0"), "after {lost}");
}

/// The engine used the first block, and the answer says so.
#[tokio::test]
async fn a_contradiction_leaves_what_the_engine_used() {
    let (_peer, rig, rank) = answering(Some(32)).await;
    store(&rig, rank, &tokens(0));
    assert_eq!(claimed(&rig, &tokens(0)).await, warm());
    rig.counted(&outcome("over"), 1).await;
    let prompted = tokens(0);
    let held =
        rig.index.held(rank, &fak_index::Prompt { tokens: &prompted, lora: None, salt: None });
    assert_eq!(held.blocks.gpu, 1);
}

/// The claim was false; what it rested on is right, of another prompt.
#[tokio::test]
async fn a_claim_on_a_prompt_that_the_engine_counts_otherwise_is_over_and_contradicts_nothing() {
    let counted = json!({"prompt_tokens": 120, "prompt_tokens_details": {"cached_tokens": 64}});
    let body = text(Some("stop"), Some(counted));
    let (_peer, rig, rank) = scripted(move |_| Reply::Send(peer::json("200 OK", &body))).await;
    store(&rig, rank, &tokens(0));
    assert_eq!(claimed(&rig, &tokens(0)).await, warm());
    rig.counted(&outcome("over"), 1).await;
    assert!(rig.contradictions.lock().unwrap().is_empty());
}

/// A header and its metric, by one word.
async fn says(rig: &Rig, path: &str, body: &Value, word: &str) {
    let before = rig.count(&reason(word));
    let answer = rig.post(path, &body.to_string()).await;
    let head = (answer.header("x-fak-kv"), answer.header("x-fak-kv-reason"));
    assert_eq!(head, (Some("unknown"), Some(word)), "{body}");
    assert_eq!(rig.count(&reason(word)), before + 1, "{body}");
}

/// An engine that makes one token of any text.
async fn tokenizing() -> (Peer, Rig, RankId) {
    scripted(|request| {
        let body = match request.line() {
            "POST /tokenize" => json!({"count": 1, "max_model_len": 4096, "tokens": [1]}),
            _ => json!({"choices": [{"index": 0, "text": "a", "finish_reason": "stop"}]}),
        };
        Reply::Send(peer::json("200 OK", &body.to_string()))
    })
    .await
}

#[tokio::test]
async fn unknown_names_its_reason_by_the_word_that_the_metrics_have() {
    let (_peer, rig, rank) = tokenizing().await;
    store(&rig, rank, &tokens(0));
    let chat = |more: Value| {
        let mut body = json!({"model": MODEL, "messages": [{"role": "user", "content": "a"}]});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let image = json!([{"type": "image_url", "image_url": {"url": "http://a/b"}}]);
    for (more, word) in [
        (json!({"response_format": {"type": "json_object"}}), "not_matchable"),
        (json!({"reasoning_effort": "high"}), "not_matchable"),
        (json!({"tool_choice": "required", "tools": [{"type": "function"}]}), "not_matchable"),
        (json!({"truncate_prompt_tokens": 4}), "not_matchable"),
        (json!({"prompt_logprobs": 1}), "skips_cache"),
        (json!({"use_beam_search": true}), "beam_search"),
        (json!({"messages": [{"role": "user", "content": image}]}), "content"),
    ] {
        says(&rig, CHAT, &chat(more), word).await;
        let matching = format!("fak_requests_matching_total{{outcome=\"{word}\"}}");
        assert!(rig.count(&matching) > 0, "the same word is told of matching");
    }
    says(&rig, "/v1/responses", &json!({"model": MODEL, "input": "a"}), "route").await;
    let asked = json!({"model": MODEL, "prompt": tokens(0), "max_tokens": 1});
    rig.index.suspend(rank);
    says(&rig, COMPLETIONS, &asked, "suspended").await;
    rig.index.restore(rank);
    lose(&rig, rank, LossCause::Gap, Origin::None);
    store(&rig, rank, &tokens(5000));
    says(&rig, COMPLETIONS, &asked, "miss").await;
    let ranks = rig.fleet.snapshot().workers[0].state.ranks.clone();
    rig.state(0, |state| state.ranks = std::sync::Arc::default());
    says(&rig, COMPLETIONS, &asked, "unheard").await;
    rig.state(0, |state| state.ranks = ranks);
    rig.fleet.credit("w0").unwrap().suspect();
    says(&rig, COMPLETIONS, &asked, "miss").await;
    let warm = json!({"model": MODEL, "prompt": tokens(5000), "max_tokens": 1});
    says(&rig, COMPLETIONS, &warm, "withheld").await;
}

#[tokio::test]
async fn a_claim_that_does_not_reach_its_client_names_why() {
    let (_peer, rig, rank, mut arrived) = waiting().await;
    let prompted = json!({"model": MODEL, "prompt": tokens(0), "max_tokens": 1});
    let refused = peer::json("400 Bad Request", "{\"error\":{\"message\":\"no\"}}");
    let fine = peer::json("200 OK", &text(Some("stop"), None));
    for (is_lost, reply, word) in [(true, fine, "lost"), (false, refused, "failed")] {
        store(&rig, rank, &tokens(0));
        let ((), ()) = tokio::join!(says(&rig, COMPLETIONS, &prompted, word), async {
            let steps = arrived.recv().await.unwrap();
            if is_lost {
                lose(&rig, rank, LossCause::Cleared, Origin::Live);
            }
            steps.send(reply).await.unwrap();
        });
    }
    assert_eq!(made_and_ended(&rig), (0, 0));
    let refused = "fak_requests_total{outcome=\"refused\",route=\"/v1/completions\"}";
    rig.counted(refused, 1).await;
}

/// Events may be missing of a rank that is not exact, and with them stores.
#[tokio::test]
async fn cold_is_said_of_exact_ranks_alone() {
    let (_peer, rig, rank) = answering(Some(0)).await;
    let trust = |trust| {
        rig.state(0, |state| {
            state.ranks = std::sync::Arc::new([fak::fleet::Rank { number: 0, id: rank, trust }]);
        });
    };
    let says = async |tokens: &[u32], more: Value| claimed_with(&rig, tokens, more).await.0;
    let skips = json!({"prompt_logprobs": 1});
    for (told, kv) in [(Trust::Exact, "cold"), (Trust::Degraded, "unknown")] {
        trust(told);
        assert_eq!(says(&tokens(0), skips.clone()).await, kv, "of a rank that holds nothing");
    }
    store(&rig, rank, &tokens(5000));
    // Short ones of their own: the engine here counts 100 tokens, and such a prompt is not matched
    // again.
    for (told, kv, short) in [(Trust::Exact, "cold", [1, 2]), (Trust::Degraded, "unknown", [3, 4])]
    {
        trust(told);
        assert_eq!(says(&tokens(0), json!({})).await, kv, "of another prompt");
        assert_eq!(says(&short, json!({})).await, kv, "of less than a block");
    }
}

/// Only as much of it is read as an answer may have that is an error and nothing else.
#[tokio::test]
async fn a_long_answer_goes_to_its_client_before_it_has_ended() {
    let (_peer, rig, _rank, mut arrived) = waiting().await;
    let body = prompt(&tokens(0), json!({}));
    let (mut head, steps) = tokio::join!(rig.open("POST", COMPLETIONS, &[], &body), async {
        let steps = arrived.recv().await.unwrap();
        let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 20000";
        let part = format!("{head}\r\n\r\n{}", " ".repeat(10_000));
        steps.send(part.into_bytes()).await.unwrap();
        steps
    });
    assert!(!next(&mut head).await.unwrap().is_empty());
    drop(steps);
}

/// Claims of a worker in doubt are withheld, whether the doubt came before the request was sent or
/// since.
#[tokio::test]
async fn a_doubt_at_dispatch_or_at_the_head_withholds_a_claim() {
    let (_peer, rig, rank, mut arrived) = waiting().await;
    store(&rig, rank, &tokens(0));
    let body = json!({"model": MODEL, "prompt": tokens(0), "max_tokens": 1});
    let credit = rig.fleet.credit("w0").unwrap();
    for is_doubted_at_dispatch in [true, false] {
        if is_doubted_at_dispatch {
            credit.suspect();
        }
        tokio::join!(says(&rig, COMPLETIONS, &body, "withheld"), async {
            let steps = arrived.recv().await.unwrap();
            if is_doubted_at_dispatch {
                credit.judged()
            } else {
                credit.suspect()
            }
            let whole = peer::json("200 OK", &text(Some("stop"), None));
            steps.send(whole).await.unwrap();
        });
    }
}

/// A cold that others may have made false is none; nor is one of some ranks.
#[tokio::test]
async fn cold_that_is_not_proven_names_why() {
    let (_peer, rig, rank, mut arrived) = waiting().await;
    store(&rig, rank, &tokens(0));
    let inside = rig.fleet.snapshot().workers[0].worker.door.enter().unwrap();
    let other = json!({"model": MODEL, "prompt": tokens(5000), "max_tokens": 1});
    let answer = async |arrived: &mut mpsc::Receiver<mpsc::Sender<Vec<u8>>>| {
        let steps = arrived.recv().await.unwrap();
        let whole = peer::json("200 OK", &text(Some("stop"), None));
        steps.send(whole).await.unwrap();
    };
    tokio::join!(says(&rig, COMPLETIONS, &other, "not_alone"), answer(&mut arrived));
    drop(inside);
    // An engine that does not obey the header may choose either rank: one holds nothing, and the
    // other holds the prompt.
    let empty = rig.index.add_rank(fak_index::RankOptions::default());
    rig.state(0, |state| {
        let first = state.ranks[0];
        state.ranks = [first, fak::fleet::Rank { number: 1, id: empty, ..first }].into();
        state.caution.ranks = Some(2);
        state.version = Some("0.11.0".into());
    });
    let held = json!({"model": MODEL, "prompt": tokens(0), "max_tokens": 1});
    tokio::join!(says(&rig, COMPLETIONS, &held, "ranks_differ"), answer(&mut arrived));
    // What one of the ranks announced explains a cold of both.
    rig.index.demote(
        rank,
        TierSet::ALL,
        Belief::Gone,
        fak_index::Loss { cause: LossCause::Cleared, origin: Origin::Live },
    );
    let prompted = tokens(0);
    let (told, ()) = tokio::join!(claimed(&rig, &prompted), async {
        let steps = arrived.recv().await.unwrap();
        let whole = peer::json("200 OK", &text(Some("stop"), Some(usage(Some(96)))));
        steps.send(whole).await.unwrap();
    });
    assert_eq!(told, said("cold", "0"));
    store(&rig, empty, &tokens(0));
    rig.counted(&outcome("under"), 1).await;
}
