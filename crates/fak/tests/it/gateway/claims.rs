//! What is claimed, from which tokens, and what the engine then says.

use fak::fleet::Caution;
use fak_index::{Loss, Origin};
use fak_kernel::{Belief, LossCause, TierSet};
use serde_json::{Value, json};

use super::bridged::Bridged;
use super::rig::{MODEL, PATIENT, Rig, chat, setup};
use super::routing::{hold, prompt};
use crate::engine::peer::{self, Peer, Reply, Request};

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

fn removed() -> Loss {
    Loss { cause: LossCause::Removed, origin: Origin::Live }
}

/// An answer of an engine that reports these numbers.
fn answer(prompt_tokens: usize, cached: Option<u64>) -> Vec<u8> {
    let details = cached.map(|cached| json!({"cached_tokens": cached}));
    let usage = json!({"prompt_tokens": prompt_tokens, "prompt_tokens_details": details});
    let choice = json!({"index": 0, "text": "a", "finish_reason": "stop"});
    peer::json("200 OK", &json!({"choices": [choice], "usage": usage}).to_string())
}

async fn claiming(cached: Option<u64>) -> (Peer, Rig, Vec<u32>) {
    let tokens: Vec<u32> = (0..100).collect();
    let length = tokens.len();
    let peer = Peer::start(move |_| Reply::Send(answer(length, cached))).await;
    let rig = Rig::over(&[peer.url()]).await;
    hold(&rig, 0, &tokens);
    (peer, rig, tokens)
}

async fn audited(rig: &Rig, outcome: &str, count: u64) {
    rig.counted(&format!("fak_claims_total{{outcome=\"{outcome}\"}}"), count).await;
}

/// Case 71.
#[tokio::test]
async fn a_claim_is_held_against_what_the_engine_reports() {
    for (cached, outcome) in
        [(Some(96), "confirmed"), (Some(99), "under"), (None, "unaudited"), (Some(64), "over")]
    {
        let (_peer, rig, tokens) = claiming(cached).await;
        let answer = rig.post(COMPLETIONS, &prompt(&tokens)).await;
        assert_eq!(answer.header("x-fak-warm-tokens"), Some("gpu=96"));
        audited(&rig, outcome, 1).await;
        let told = cached.map_or(0, |cached| cached);
        assert_eq!(rig.count("fak_cached_tokens_total"), told);
        let claimed = if cached.is_some() { 96 } else { 0 };
        assert_eq!(rig.count("fak_claimed_tokens_total"), claimed);
        assert_eq!(rig.count("fak_claimed_tier_tokens_total{tier=\"gpu\"}"), claimed);
        assert_eq!(rig.count("fak_claimed_tier_tokens_total{tier=\"cpu\"}"), 0);
        let contradictions = rig.contradictions.lock().unwrap();
        assert_eq!(contradictions.len(), usize::from(outcome == "over"));
        if let Some(contradiction) = contradictions.first() {
            assert_eq!((contradiction.claimed, contradiction.cached), (96, 64));
            assert_eq!(&*contradiction.worker, "w0");
        }
    }
}

/// A pause or a sleep aborts what is queued before the cache was looked at: vLLM answers 200 with
/// `cached_tokens` 0 (0.32.0, observed), and need not publish anything.
#[tokio::test]
async fn an_aborted_answer_says_nothing_of_the_cache() {
    let tokens: Vec<u32> = (0..100).collect();
    let usage = json!({"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": 0}});
    let choice = json!({"index": 0, "text": "", "finish_reason": "abort"});
    let reply = peer::json("200 OK", &json!({"choices": [choice], "usage": usage}).to_string());
    let peer = Peer::start(move |_| Reply::Send(reply.clone())).await;
    let rig = Rig::over(&[peer.url()]).await;
    hold(&rig, 0, &tokens);
    let answer = rig.post(COMPLETIONS, &prompt(&tokens)).await;
    assert_eq!(answer.header("x-fak-kv-reason"), Some("failed"));
    rig.counted("fak_requests_failed_total{cause=\"aborted\"}", 1).await;
    assert_eq!(rig.count("fak_cached_tokens_total"), 0);
    assert_eq!(rig.count("fak_claimed_tokens_total"), 0, "it is no audit");
}

/// It may have been aborted, as far as it tells.
#[tokio::test]
async fn an_answer_that_does_not_tell_how_it_ended_says_nothing_of_the_cache() {
    let tokens: Vec<u32> = (0..100).collect();
    let usage = json!({"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": 0}});
    let choice = json!({"index": 0, "text": ""});
    let reply = peer::json("200 OK", &json!({"choices": [choice], "usage": usage}).to_string());
    let peer = Peer::start(move |_| Reply::Send(reply.clone())).await;
    let rig = Rig::over(&[peer.url()]).await;
    hold(&rig, 0, &tokens);
    let answer = rig.post(COMPLETIONS, &prompt(&tokens)).await;
    assert_eq!(answer.header("x-fak-warm-tokens"), Some("gpu=96"));
    rig.empty().await;
    assert_eq!(rig.count("fak_claims_total{outcome=\"unaudited\"}"), 1);
    assert_eq!(rig.count("fak_claimed_tokens_total"), 0, "it is no audit");
}

/// Case 71: an event that comes after the answer explains it, even if the blocks come back.
#[tokio::test]
async fn a_claim_that_an_event_overtook_is_no_contradiction() {
    let (_peer, rig, tokens) = claiming(Some(0)).await;
    let rank = rig.fleet.snapshot().workers[0].state.ranks[0].id;
    let answer = rig.post(COMPLETIONS, &prompt(&tokens)).await;
    assert_eq!(answer.header("x-fak-warm-tokens"), Some("gpu=96"));
    rig.index.demote(rank, TierSet::GPU, Belief::Gone, removed());
    audited(&rig, "lost_in_flight", 1).await;
    assert!(rig.contradictions.lock().unwrap().is_empty());
}

/// A batch that the publisher dropped shows with the next one only: the engine is asked.
#[tokio::test]
async fn a_claim_is_not_called_wrong_before_the_engine_was_asked_what_it_published() {
    let (_peer, mut rig, tokens) = claiming(Some(0)).await;
    let rank = rig.fleet.snapshot().workers[0].state.ranks[0].id;
    let answer = rig.post(COMPLETIONS, &prompt(&tokens)).await;
    assert_eq!(answer.header("x-fak-warm-tokens"), Some("gpu=96"));
    assert_eq!(rig.missed.recv().await.as_deref(), Some("w0"));
    rig.index.demote(rank, TierSet::GPU, Belief::Gone, removed());
    audited(&rig, "lost_in_flight", 1).await;
    assert!(rig.contradictions.lock().unwrap().is_empty());
}

#[tokio::test]
async fn an_engine_tells_what_its_publisher_dropped_when_it_is_asked() {
    let bridged = Bridged::start().await;
    let text = "a".repeat(100);
    bridged.ask(&text).await;
    bridged.sim.faults().drop_batches(2);
    bridged.behind("/reset_prefix_cache", "").await;
    let (kv, _, cached) = bridged.claimed_and_cached(&text).await;
    assert_eq!((kv.as_str(), cached), ("warm", 0));
    bridged.lifecycle.missed("w0").await.unwrap();
    audited(&bridged.rig, "lost_in_flight", 1).await;
    assert_eq!(bridged.audited("over"), 0);
}

/// A refused action is a row as well.
#[tokio::test]
async fn a_row_that_took_nothing_explains_nothing() {
    let (_peer, rig, tokens) = claiming(Some(0)).await;
    let answer = rig.post(COMPLETIONS, &prompt(&tokens)).await;
    assert_eq!(answer.header("x-fak-warm-tokens"), Some("gpu=96"));
    rig.fleet.update("w0", |state| state.last_witness = Some(9));
    audited(&rig, "over", 1).await;
    assert_eq!(rig.contradictions.lock().unwrap().len(), 1);
}

#[tokio::test]
async fn a_cold_cache_is_called_cold_and_an_unheard_one_unknown() {
    let (_peer, rig, tokens) = claiming(Some(96)).await;
    let other: Vec<u32> = (5000..5100).collect();
    let kv = async |tokens: &[u32]| {
        let answer = rig.post(COMPLETIONS, &prompt(tokens)).await;
        (
            answer.header("x-fak-kv").unwrap().to_owned(),
            answer.header("x-fak-warm-tokens").unwrap().to_owned(),
        )
    };
    let word = |kv: &str, tokens: &str| (kv.to_owned(), tokens.to_owned());
    assert_eq!(kv(&other).await, word("cold", "0"));
    let rank = rig.fleet.snapshot().workers[0].state.ranks[0];
    rig.index.suspend(rank.id);
    assert_eq!(kv(&tokens).await, word("unknown", "0"));
    rig.index.restore(rank.id);
    assert_eq!(kv(&tokens).await, word("warm", "gpu=96"));
    rig.index.demote(rank.id, TierSet::ALL, Belief::Unknown, removed());
    assert_eq!(kv(&tokens).await, word("unknown", "0"));
    rig.index.demote(rank.id, TierSet::ALL, Belief::Gone, removed());
    assert_eq!(kv(&tokens).await, word("cold", "0"));
    rig.state(0, |state| state.ranks = std::sync::Arc::default());
    assert_eq!(kv(&tokens).await, word("unknown", "0"));
}

/// A peer with a tokenizer: one token a word of the prompt or of the messages.
fn tokenizing(request: &Request) -> Reply {
    if request.line() != "POST /tokenize" {
        return Reply::Send(answer(100, Some(96)));
    }
    let body = request.json();
    let text = match &body["messages"] {
        Value::Null => body["prompt"].as_str().unwrap().to_owned(),
        messages => messages[0]["content"].as_str().unwrap().to_owned(),
    };
    let tokens: Vec<u32> = text.split(' ').map(|word| word.parse().unwrap()).collect();
    let body = json!({"count": tokens.len(), "max_model_len": 4096, "tokens": tokens});
    Reply::Send(peer::json("200 OK", &body.to_string()))
}

/// Case 67.
#[tokio::test]
async fn a_text_is_matched_by_the_engines_own_tokens_asked_for_once() {
    let mut peer = Peer::start(tokenizing).await;
    let rig = Rig::over(&[peer.url()]).await;
    let tokens: Vec<u32> = (0..100).collect();
    let text = tokens.iter().map(u32::to_string).collect::<Vec<_>>().join(" ");
    let message = json!([{"role": "user", "content": text}]);
    let bodies = [
        (COMPLETIONS, json!({"model": MODEL, "prompt": text})),
        (CHAT, json!({"model": MODEL, "messages": message, "tools": [{"type": "function"}]})),
    ];
    // While no worker holds a block there is nothing to match, and nobody is asked.
    for (path, body) in &bodies {
        rig.post(path, &body.to_string()).await;
    }
    assert!(peer.requests_so_far().iter().all(|request| request.line() != "POST /tokenize"));
    hold(&rig, 0, &tokens);
    for _ in 0..3 {
        for (path, body) in &bodies {
            let answer = rig.post(path, &body.to_string()).await;
            assert_eq!(answer.header("x-fak-warm-tokens"), Some("gpu=96"), "{path}");
        }
    }
    let asked: Vec<_> = peer.requests_so_far();
    let tokenized: Vec<_> = asked.iter().filter(|r| r.line() == "POST /tokenize").collect();
    assert_eq!(tokenized.len(), 2, "once for each");
    assert!(tokenized[1].json()["tools"].is_array(), "the template sees tools");
    assert_eq!(rig.count("fak_requests_matching_total{outcome=\"asked\"}"), 2);
    assert_eq!(rig.count("fak_requests_matching_total{outcome=\"known\"}"), 4);
    assert_eq!(rig.count("fak_requests_matching_total{outcome=\"skipped\"}"), 2);
    assert_eq!(rig.count("fak_requests_token_mismatches_total"), 0);
}

/// What changes the prompt and not what `/tokenize` says of it: another prompt's tokens, known from
/// before or asked for, are no proof.
#[tokio::test]
async fn nothing_is_claimed_of_a_prompt_that_the_tokenizer_is_not_told_whole() {
    let peer = Peer::start(tokenizing).await;
    let rig = Rig::over(&[peer.url()]).await;
    let tokens: Vec<u32> = (0..100).collect();
    hold(&rig, 0, &tokens);
    let text = tokens.iter().map(u32::to_string).collect::<Vec<_>>().join(" ");
    let messages = json!([{"role": "user", "content": text}]);
    let chat = json!({"model": MODEL, "messages": messages, "tools": [{"type": "function"}]});
    let completion = json!({"model": MODEL, "prompt": text});
    for (path, body, fields) in [
        (
            CHAT,
            &chat,
            vec![
                json!({"documents": [{"text": "d"}]}),
                json!({"reasoning_effort": "high"}),
                json!({"response_format": {"type": "json_object"}}),
                json!({"tool_choice": "none"}),
                json!({"tool_choice": "required"}),
                json!({"kv_transfer_params": {"prompt_token_ids": [1, 2]}}),
                json!({"truncate_prompt_tokens": 4}),
            ],
        ),
        (
            COMPLETIONS,
            &completion,
            vec![
                json!({"kv_transfer_params": {"prompt_token_ids": [1, 2]}}),
                json!({"truncate_prompt_tokens": 4}),
                json!({"prompt_embeds": "x"}),
            ],
        ),
    ] {
        let warm = async |more: &Value| {
            let mut body = body.clone();
            body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            let answer = rig.post(path, &body.to_string()).await;
            (
                answer.header("x-fak-kv").unwrap().to_owned(),
                answer.header("x-fak-warm-tokens").unwrap().to_owned(),
            )
        };
        let word = |kv: &str, tokens: &str| (kv.to_owned(), tokens.to_owned());
        let plain = json!({"tool_choice": "auto", "documents": null});
        for _ in 0..2 {
            assert_eq!(warm(&plain).await, word("warm", "gpu=96"), "{path}");
            assert_eq!(warm(&json!({})).await, word("warm", "gpu=96"), "{path}");
            for more in &fields {
                assert_eq!(warm(more).await, word("unknown", "0"), "{path} {more}");
            }
        }
    }
}

/// Case 67.
#[tokio::test]
async fn a_prompt_that_cannot_be_tokenized_is_not_matchable_and_no_miss() {
    let mut peer = Peer::start(|request| {
        if request.line() == "POST /tokenize" {
            return Reply::Send(peer::json("404 Not Found", "{}"));
        }
        Reply::Send(answer(100, Some(0)))
    })
    .await;
    let rig = Rig::over(&[peer.url()]).await;
    hold(&rig, 0, &(0..100).collect::<Vec<_>>());
    for _ in 0..5 {
        let answer = rig.post(CHAT, &chat(false)).await;
        assert_eq!(answer.header("x-fak-kv"), Some("unknown"));
    }
    assert_eq!(rig.count("fak_requests_matching_total{outcome=\"not_matchable\"}"), 5);
    let asked = peer.requests_so_far();
    // An engine without the route is not asked for it each time.
    assert_eq!(asked.iter().filter(|request| request.line() == "POST /tokenize").count(), 1);
}

/// Case 67: the engine's count of the prompt checks ours.
#[tokio::test]
async fn a_prompt_that_the_engine_counts_otherwise_is_noticed() {
    let peer = Peer::start(|_| Reply::Send(answer(120, Some(0)))).await;
    let rig = Rig::over(&[peer.url()]).await;
    hold(&rig, 0, &(0..100).collect::<Vec<_>>());
    let other: Vec<u32> = (5000..5097).collect();
    rig.post(COMPLETIONS, &prompt(&other)).await;
    rig.counted("fak_requests_token_mismatches_total", 1).await;
}

/// Several prompts or choices have one sum of numbers, which says nothing of one of them.
#[tokio::test]
async fn several_choices_are_not_audited() {
    let tokens: Vec<u32> = (0..100).collect();
    let peer = Peer::start(move |_| Reply::Send(answer(200, Some(1)))).await;
    let rig = Rig::over(&[peer.url()]).await;
    hold(&rig, 0, &tokens);
    let body = json!({"model": MODEL, "prompt": tokens, "n": 2}).to_string();
    rig.post(COMPLETIONS, &body).await;
    audited(&rig, "unaudited", 1).await;
    assert_eq!(rig.count("fak_claims_unaudited_total{cause=\"several_choices\"}"), 1);
    assert_eq!(rig.count("fak_requests_token_mismatches_total"), 0, "it is a sum");
}

/// Claims survive a stream: usage is asked for, read and cut out again.
#[tokio::test]
async fn a_stream_is_audited_too() {
    let choice = json!({"index": 0, "text": "a", "finish_reason": "stop"});
    let text = format!("data: {}\n\n", json!({"choices": [choice]}));
    let usage = json!({"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": 96}});
    let usage = format!("data: {}\n\n", json!({"choices": [], "usage": usage}));
    let reply = peer::whole_stream(&[&text, &usage, "data: [DONE]\n\n"]);
    let peer = Peer::start(move |_| Reply::Send(reply.clone())).await;
    let rig = Rig::with(&[peer.url()], setup()).await;
    let tokens: Vec<u32> = (0..100).collect();
    hold(&rig, 0, &tokens);
    let body = json!({"model": MODEL, "prompt": tokens, "stream": true}).to_string();
    let answer = rig.post(COMPLETIONS, &body).await;
    assert_eq!(answer.text(), [text, "data: [DONE]\n\n".to_owned()].concat());
    audited(&rig, "confirmed", 1).await;
}

/// An engine that shows these ranks in its metrics.
fn counting(rig: &Rig, version: &str, ranks: u32) {
    let running = |rank| format!("vllm:num_requests_running{{engine=\"{rank}\"}} 0\n");
    let scrape: String = (0..ranks).map(running).collect();
    let limits = fak_wire::metrics::Limits::default();
    let metrics = fak_wire::metrics::parse(scrape.as_bytes(), &limits).unwrap();
    rig.state(0, |state| {
        state.caution = Caution::default();
        state.caution.see(&metrics);
        state.version = Some(version.into());
    });
}

/// vLLM computes the last block of a hit anew where a draft model needs its states (0.32.0,
/// source).
#[tokio::test]
async fn the_last_block_is_not_claimed_of_an_engine_that_decodes_speculatively() {
    let (_peer, rig, tokens) = claiming(Some(96)).await;
    let running = "vllm:num_requests_running{engine=\"0\"} 0\n";
    let awake = "vllm:engine_sleep_state{engine=\"0\",sleep_state=\"awake\"} 1\n";
    let drafts = |n| format!("vllm:spec_decode_num_drafts_total{{engine=\"0\"}} {n}\n");
    for (scrape, length, kv, warm) in [
        (running.to_owned(), 100, "warm", "gpu=96"),
        (awake.to_owned() + &drafts(0), 100, "warm", "gpu=64"),
        (awake.to_owned() + &drafts(7), 100, "warm", "gpu=64"),
        (drafts(7), 40, "unknown", "0"),
        // As the Rust frontend gives it, whatever its engine does.
        (drafts(0), 100, "warm", "gpu=64"),
        // A scrape that shows nothing.
        (String::new(), 100, "warm", "gpu=64"),
    ] {
        let limits = fak_wire::metrics::Limits::default();
        let metrics = fak_wire::metrics::parse(scrape.as_bytes(), &limits).unwrap();
        let known = Caution { speculates: None, ranks: Some(1) };
        rig.state(0, |state| {
            state.caution = known;
            state.caution.see(&metrics);
        });
        let answer = rig.post(COMPLETIONS, &prompt(&tokens[..length])).await;
        let told = (answer.header("x-fak-kv"), answer.header("x-fak-warm-tokens"));
        assert_eq!(told, (Some(kv), Some(warm)), "{scrape}");
    }
}

/// The engine chooses among all its ranks, heard or not.
#[tokio::test]
async fn nothing_is_claimed_where_the_engine_has_a_rank_that_is_not_heard() {
    let (_peer, rig, tokens) = claiming(Some(96)).await;
    let ask = async |headers: &[(&str, &str)], tokens: &[u32]| {
        let answer = rig.post_with(COMPLETIONS, headers, &prompt(tokens)).await;
        answer.header("x-fak-kv").unwrap().to_owned()
    };
    counting(&rig, "0.32.0", 1);
    assert_eq!(ask(&[], &tokens).await, "warm");
    counting(&rig, "0.32.0", 2);
    assert_eq!(ask(&[], &tokens).await, "unknown");
    assert_eq!(ask(&[], &[1, 2, 3]).await, "unknown", "nor that it is cold");
    assert_eq!(ask(&[("x-data-parallel-rank", "1")], &tokens).await, "unknown");
    assert_eq!(ask(&[("x-data-parallel-rank", "0")], &tokens).await, "warm");
    // Nothing has told how many there are.
    rig.state(0, |state| state.caution.ranks = None);
    assert_eq!(ask(&[], &tokens).await, "unknown");
    rig.state(0, |state| state.caution.ranks = Some(1));
    assert_eq!(ask(&[], &tokens).await, "warm");
    rig.state(0, |state| state.has_silent_ranks = true);
    assert_eq!(ask(&[], &tokens).await, "unknown");
}

/// vLLM reads `-0` as 0 and `0_1` as 1, and of two headers the first (0.32.0, source).
#[tokio::test]
async fn a_rank_that_is_not_plainly_named_is_refused() {
    let (mut peer, rig, tokens) = claiming(Some(96)).await;
    let name = "x-data-parallel-rank";
    for rank in ["-0", "+0", "0_1", "1e0", "1.0", "x", "", "0,1", "99999999999"] {
        let answer = rig.post_with(COMPLETIONS, &[(name, rank)], &prompt(&tokens)).await;
        let error = answer.json()["error"].take();
        assert_eq!((answer.status.as_u16(), error["param"].as_str()), (400, Some(name)), "{rank}");
    }
    let twice = rig.post_with(COMPLETIONS, &[(name, "0"), (name, "0")], &prompt(&tokens)).await;
    assert_eq!(twice.status.as_u16(), 400);
    assert!(peer.requests_so_far().is_empty());
    let plain = rig.post_with(COMPLETIONS, &[(name, "00")], &prompt(&tokens)).await;
    assert_eq!((plain.status.as_u16(), plain.header("x-fak-kv")), (200, Some("warm")));
    assert_eq!(peer.requests_so_far()[0].header(name), Some("0"), "as fak read it");
}

/// What a request stored may be on its way when the next one asks.
#[tokio::test]
async fn cold_is_not_said_while_events_of_who_left_may_be_under_way() {
    let peer = Peer::start(|_| Reply::Send(answer(100, Some(0)))).await;
    let mut setup = setup();
    setup.config.quiet_for = PATIENT;
    let rig = Rig::with(&[peer.url()], setup).await;
    hold(&rig, 0, &(0..100).collect::<Vec<_>>());
    let other: Vec<u32> = (5000..5100).collect();
    let kv = async || {
        let answer = rig.post(COMPLETIONS, &prompt(&other)).await;
        let header = |name| answer.header(name).map(str::to_owned);
        (header("x-fak-kv"), header("x-fak-kv-reason"))
    };
    let said = |kv: &str, why: Option<&str>| (Some(kv.to_owned()), why.map(str::to_owned));
    assert_eq!(kv().await, said("cold", None));
    rig.empty().await;
    assert_eq!(kv().await, said("unknown", Some("not_alone")));
}

/// A rank that a request names is the one that gets it, if the engine is told and obeys.
#[tokio::test]
async fn a_named_rank_counts_only_where_the_engine_gets_to_know_and_obeys() {
    let (_peer, rig, tokens) = claiming(Some(96)).await;
    let cold = rig.index.add_rank(fak_index::RankOptions::default());
    rig.state(0, |state| {
        let first = state.ranks[0];
        state.ranks = [first, fak::fleet::Rank { number: 1, id: cold, ..first }].into();
    });
    let ask = async |headers: &[(&str, &str)]| {
        let answer = rig.post_with(COMPLETIONS, headers, &prompt(&tokens)).await;
        answer.header("x-fak-kv").unwrap().to_owned()
    };
    let (first, second) = (("x-data-parallel-rank", "0"), ("x-data-parallel-rank", "1"));
    let named = ("connection", "x-data-parallel-rank");
    for (version, headers, told) in [
        // fak names the one that holds the prompt.
        ("0.32.0", &[][..], "warm"),
        ("0.32.0", &[first], "warm"),
        ("0.32.0", &[second], "cold"),
        ("0.12.0", &[first], "warm"),
        // Named in `Connection`, the header goes no further than here.
        ("0.32.0", &[second, named], "warm"),
        // Passed over by vLLM before 0.12.0: of the two ranks one holds it and one holds nothing.
        ("0.11.0", &[first], "unknown"),
        ("dev", &[second], "unknown"),
    ] {
        counting(&rig, version, 2);
        assert_eq!(ask(headers).await, told, "{version} {headers:?}");
    }
}
