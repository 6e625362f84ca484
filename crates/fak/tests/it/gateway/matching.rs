//! Which requests are matched with a worker's cache, and as what.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use fak::engine::{Model, Models};
use fak_index::{EngineHash, Extra, ExtraKey, GroupKind, RankOptions, Store};
use fak_kernel::rank::Trust;
use fak_kernel::{Tier, TierSet};
use http::StatusCode;
use serde_json::{Value, json};

use super::rig::{MODEL, Rig};
use super::routing::hold;
use crate::engine::peer::{self, Peer, Reply, Request};

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

/// An engine that makes a token of each number in a prompt, and counts `miscounted` tokens more
/// when it answers.
fn counting(miscounted: usize) -> impl Fn(&Request) -> Reply {
    move |request| {
        let body = request.json();
        let text = match (&body["messages"], &body["prompt"]) {
            (Value::Null, Value::String(prompt)) => prompt.clone(),
            (Value::Null, tokens) => {
                let tokens = tokens.as_array().map_or(0, Vec::len);
                return Reply::Send(answer(tokens + miscounted));
            }
            (messages, _) => messages[0]["content"].as_str().map_or_else(
                || messages[0]["content"][0]["text"].as_str().unwrap().to_owned(),
                str::to_owned,
            ),
        };
        let tokens: Vec<u32> = text.split(' ').map(|word| word.parse().unwrap()).collect();
        if request.line() != "POST /tokenize" {
            return Reply::Send(answer(tokens.len() + miscounted));
        }
        let body = json!({"count": tokens.len(), "max_model_len": 4096, "tokens": tokens});
        Reply::Send(peer::json("200 OK", &body.to_string()))
    }
}

/// All of the prompt's whole blocks but the last token's come from the cache.
fn answer(prompt_tokens: usize) -> Vec<u8> {
    let cached = (prompt_tokens - 1) / 32 * 32;
    let usage = json!({
        "prompt_tokens": prompt_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    });
    let choice = json!({"index": 0, "text": "a", "finish_reason": "stop"});
    peer::json("200 OK", &json!({"choices": [choice], "usage": usage}).to_string())
}

fn words(tokens: &[u32]) -> String {
    tokens.iter().map(u32::to_string).collect::<Vec<_>>().join(" ")
}

fn tokens(from: u32) -> Vec<u32> {
    (from..from + 100).collect()
}

async fn warm(rig: &Rig, path: &str, body: &Value) -> (String, String) {
    let answer = rig.post(path, &body.to_string()).await;
    assert_eq!(answer.status, StatusCode::OK, "{body}: {}", answer.text());
    let header = |name| answer.header(name).unwrap().to_owned();
    (header("x-fak-kv"), header("x-fak-warm-tokens"))
}

fn said(kv: &str, tokens: &str) -> (String, String) {
    (kv.to_owned(), tokens.to_owned())
}

fn cards(cards: &[(&str, &str, Option<&str>)]) -> Models {
    let card = |(id, root, parent): &(&str, &str, Option<&str>)| Model {
        root: Some((*root).into()),
        parent: parent.map(Arc::from),
        ..Model::base(id)
    };
    cards.iter().map(card).collect()
}

fn matching(rig: &Rig, outcome: &str) -> u64 {
    rig.count(&format!("fak_requests_matching_total{{outcome=\"{outcome}\"}}"))
}

/// Fault 10.
#[tokio::test]
async fn the_base_is_claimed_under_each_of_its_names_wherever_it_is_listed() {
    let peer = Peer::start(counting(0)).await;
    let rig = Rig::over(&[peer.url()]).await;
    hold(&rig, 0, &tokens(0));
    let ask = async |model: &str| {
        let body = json!({"model": model, "prompt": tokens(0)});
        warm(&rig, COMPLETIONS, &body).await
    };
    rig.state(0, |state| {
        state.models =
            cards(&[("adapter", "/a", Some(MODEL)), (MODEL, "/m", None), ("gpt-4o", "/m", None)]);
    });
    assert_eq!(ask(MODEL).await, said("warm", "gpu=96"));
    assert_eq!(ask("gpt-4o").await, said("warm", "gpu=96"), "the base under another name");
    assert_eq!(ask("adapter").await, said("unknown", "0"), "the first, and not the base");
    assert_eq!(matching(&rig, "adapter"), 1);
    let body = json!({"prompt": tokens(0)});
    assert_eq!(warm(&rig, COMPLETIONS, &body).await, said("warm", "gpu=96"), "no name is the base");
    // No card says which one is the adapter.
    rig.state(0, |state| state.models = cards(&[(MODEL, "/m", None), ("adapter", "/a", None)]));
    assert_eq!(ask(MODEL).await, said("unknown", "0"));
    assert_eq!(ask("adapter").await, said("unknown", "0"));
    assert_eq!(matching(&rig, "model"), 2);
}

/// Cases 29 and 30: the blocks of an adapter loaded anew under its name, and those of none, are
/// never an adapter's claim.
#[tokio::test]
async fn case_29_and_30_an_adapter_is_claimed_by_its_name_and_only_where_it_cannot_change() {
    let peer = Peer::start(counting(0)).await;
    let rig = Rig::over(&[peer.url()]).await;
    let held = tokens(0);
    let rank = rig.index.add_rank(RankOptions::default());
    let store = Store {
        hashes: (1..4).map(EngineHash::Int).collect(),
        parent: None,
        tokens: held[..96].to_vec(),
        block_size: 32,
        extra: Extra::PerBlock(vec![vec![ExtraKey::Text("sql".into())]; 3]),
        lora: Some("sql".into()),
        tier: Tier::Gpu,
        group: 0,
        kind: GroupKind::Full,
    };
    rig.index.store(rank, &store, TierSet::ALL);
    rig.state(0, |state| {
        let trust = Trust::Exact;
        state.ranks = Arc::new([fak::fleet::Rank { number: 0, id: rank, trust }]);
        state.models =
            cards(&[(MODEL, "/m", None), ("sql", "/s", Some(MODEL)), ("c", "/c", Some(MODEL))]);
    });
    let ask = async |model: &str| {
        let answer = warm(&rig, COMPLETIONS, &json!({"model": model, "prompt": held})).await;
        answer.1
    };
    assert_eq!(ask("sql").await, "0", "it may have been loaded anew");
    rig.state(0, |state| state.are_adapters_fixed = true);
    assert_eq!(ask("sql").await, "gpu=96");
    assert_eq!(ask("c").await, "0", "another adapter");
    assert_eq!(ask(MODEL).await, "0", "none");
}

/// Fault 8: each of these makes vLLM 0.32.0 compute the whole prompt (observed).
#[tokio::test]
async fn a_request_that_skips_the_cache_is_promised_nothing() {
    let peer = Peer::start(counting(0)).await;
    let rig = Rig::over(&[peer.url()]).await;
    hold(&rig, 0, &tokens(0));
    let text = words(&tokens(0));
    let chat = json!({"model": MODEL, "messages": [{"role": "user", "content": text}]});
    let completion = json!({"model": MODEL, "prompt": tokens(0)});
    let with = |body: &Value, more: &Value| {
        let mut body = body.clone();
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    for more in [
        json!({"echo": true}),
        json!({"echo": 1, "top_logprobs": null}),
        json!({"echo": true, "logprobs": false}),
        json!({"prompt_logprobs": false}),
        json!({"prompt_logprobs": 1}),
    ] {
        assert_eq!(warm(&rig, CHAT, &with(&chat, &more)).await, said("unknown", "0"), "{more}");
    }
    for more in [json!({"prompt_logprobs": false}), json!({"echo": true, "logprobs": false})] {
        let body = with(&completion, &more);
        assert_eq!(warm(&rig, COMPLETIONS, &body).await, said("unknown", "0"), "{more}");
    }
    assert_eq!(matching(&rig, "skips_cache"), 7);
    for more in [json!({"echo": false}), json!({"prompt_logprobs": null}), json!({"logprobs": 1})] {
        assert_eq!(warm(&rig, CHAT, &with(&chat, &more)).await, said("warm", "gpu=96"), "{more}");
    }
    let echo = with(&completion, &json!({"echo": true}));
    assert_eq!(warm(&rig, COMPLETIONS, &echo).await, said("warm", "gpu=96"), "it reuses");
    let beam = with(&completion, &json!({"use_beam_search": true}));
    assert_eq!(warm(&rig, COMPLETIONS, &beam).await, said("unknown", "0"));
}

/// Fault 12.
#[tokio::test]
async fn content_that_may_bring_an_adapter_or_an_image_is_not_matched() {
    let peer = Peer::start(counting(0)).await;
    let rig = Rig::over(&[peer.url()]).await;
    hold(&rig, 0, &tokens(0));
    let text = words(&tokens(0));
    let ask = async |parts: Value| {
        let body = json!({"model": MODEL, "messages": [{"role": "user", "content": parts}]});
        warm(&rig, CHAT, &body).await
    };
    let part = json!({"type": "text", "text": text});
    assert_eq!(ask(json!([part])).await, said("warm", "gpu=96"));
    let image = json!({"type": "image_url", "image_url": {"url": "data:,"}});
    assert_eq!(ask(json!([part, image])).await, said("unknown", "0"));
    assert_eq!(matching(&rig, "content"), 1);
    rig.state(0, |state| {
        state.models = cards(&[(MODEL, "/m", None), ("text", "/t", Some(MODEL))]);
    });
    assert_eq!(ask(json!([part])).await, said("unknown", "0"), "the adapter `text` computes it");
    assert_eq!(ask(json!(text)).await, said("warm", "gpu=96"));
}

/// Fault 9: what the engine announces for such a request is no new copy.
#[tokio::test]
async fn a_client_cannot_make_an_engine_announce_its_hits() {
    let mut peer = Peer::start(|_| Reply::Send(peer::json("200 OK", "{\"choices\":[]}"))).await;
    let rig = Rig::over(&[peer.url()]).await;
    let routes =
        [CHAT, COMPLETIONS, "/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/rerank"];
    for xargs in [
        r#"{"kv_cache_report_mode":"full"}"#,
        r#"{"a":1,"kv_cache_report_mode":"incremental","b":[2]}"#,
        r#"{"kv_cache\u005freport_mode":"full"}"#,
        r#"{"kv_cache_report_mode":"x","a":1,"kv_cache_report_mode":"full"}"#,
    ] {
        for route in routes {
            let body = format!(
                r#"{{"model":"{MODEL}","prompt":"p","messages":[],"seed":1e2,"vllm_xargs":{xargs},
                    "sampling_params":{{"extra_args":{xargs}}}}}"#
            );
            rig.post(route, &body).await;
            let sent = peer.request().await;
            let text = String::from_utf8(sent.body.clone()).unwrap();
            assert!(!text.contains("report"), "{route}: {text}");
            assert!(text.contains("\"seed\":1e2"), "the rest stays as it is written: {text}");
            let json = sent.json();
            assert_eq!(json["vllm_xargs"].get("a").is_some(), xargs.contains("\"a\""), "{text}");
        }
    }
    let untouched = format!(r#"{{"model":"{MODEL}",  "prompt":"p", "vllm_xargs": {{"a": 1}}}}"#);
    rig.post(COMPLETIONS, &untouched).await;
    assert_eq!(peer.request().await.body, untouched.as_bytes());
    // A form is not rewritten.
    let form = "--x\r\nContent-Disposition: form-data; name=\"vllm_xargs\"\r\n\r\n\
                {\"kv_cache_report_mode\": \"full\"}\r\n--x--\r\n";
    let refused = rig.post("/v1/audio/transcriptions", form).await;
    assert_eq!(
        (refused.status, refused.json()["error"]["param"].clone()),
        (StatusCode::BAD_REQUEST, json!("vllm_xargs"))
    );
}

/// Fault 16.
#[tokio::test]
async fn a_prompt_that_is_counted_otherwise_is_not_claimed_again_nor_its_kind_after_two() {
    let peer = Peer::start(counting(7)).await;
    let rig = Rig::over(&[peer.url()]).await;
    let (first, second, third) = (tokens(0), tokens(1000), tokens(2000));
    let chat = |tokens: &[u32], more: Value| {
        let messages = json!([{"role": "user", "content": words(tokens)}]);
        let mut body = json!({"model": MODEL, "messages": messages});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let plain = json!({});
    hold(&rig, 0, &first);
    assert_eq!(warm(&rig, CHAT, &chat(&first, plain.clone())).await, said("warm", "gpu=96"));
    rig.counted("fak_requests_token_mismatches_total", 1).await;
    assert_eq!(warm(&rig, CHAT, &chat(&first, plain.clone())).await, said("unknown", "0"));
    let sampled = json!({"temperature": 0.5});
    assert_eq!(warm(&rig, CHAT, &chat(&first, sampled.clone())).await, said("unknown", "0"));
    hold(&rig, 0, &second);
    assert_eq!(warm(&rig, CHAT, &chat(&second, sampled.clone())).await, said("warm", "gpu=96"));
    rig.counted("fak_requests_token_mismatches_total", 2).await;
    hold(&rig, 0, &third);
    assert_eq!(warm(&rig, CHAT, &chat(&third, plain)).await, said("unknown", "0"), "the kind");
    assert_eq!(warm(&rig, CHAT, &chat(&third, sampled)).await, said("unknown", "0"), "the same");
    assert_eq!(matching(&rig, "miscounted"), 4);
    // Of another kind nothing is known.
    let tools = json!({"tools": [{"type": "function"}]});
    assert_eq!(warm(&rig, CHAT, &chat(&third, tools)).await, said("warm", "gpu=96"));
}

/// An engine whose template puts a token before the prompt; it makes `first` of it now.
fn templated(first: &Arc<AtomicU32>) -> impl Fn(&Request) -> Reply + use<> {
    let first = Arc::clone(first);
    move |request| {
        let body = request.json();
        let text = body["messages"][0]["content"].as_str().unwrap();
        let words = text.split(' ').map(|word| word.parse().unwrap());
        let tokens: Vec<u32> = [first.load(Ordering::Acquire)].into_iter().chain(words).collect();
        if request.line() != "POST /tokenize" {
            return Reply::Send(answer(tokens.len()));
        }
        let body = json!({"count": tokens.len(), "max_model_len": 4096, "tokens": tokens});
        Reply::Send(peer::json("200 OK", &body.to_string()))
    }
}

#[tokio::test]
async fn a_prompt_is_tokenized_anew_once_a_worker_began_another_life() {
    let first = Arc::new(AtomicU32::new(7));
    let peer = Peer::start(templated(&first)).await;
    let rig = Rig::over(&[peer.url()]).await;
    let text = words(&tokens(1000));
    let messages = json!([{"role": "user", "content": text}]);
    let ask = async || warm(&rig, CHAT, &json!({"model": MODEL, "messages": messages})).await;
    let rendered = |first| [vec![first], tokens(1000)].concat();
    hold(&rig, 0, &rendered(7));
    assert_eq!(ask().await, said("warm", "gpu=96"));
    assert_eq!(ask().await, said("warm", "gpu=96"));
    assert_eq!((matching(&rig, "asked"), matching(&rig, "known")), (1, 1));
    // Of the same version, with a template that renders equally many tokens.
    first.store(8, Ordering::Release);
    hold(&rig, 0, &rendered(8));
    rig.state(0, |state| state.lives += 1);
    assert_eq!(ask().await, said("warm", "gpu=96"), "as cold it would be a lie");
    assert_eq!(matching(&rig, "asked"), 2);
}

/// Engines of two versions may make two prompts of one request.
#[tokio::test]
async fn a_prompt_is_tokenized_for_each_version_of_the_engine() {
    let peer = Peer::start(counting(0)).await;
    let rig = Rig::over(&[peer.url()]).await;
    hold(&rig, 0, &tokens(1000));
    let body = json!({"model": MODEL, "prompt": words(&tokens(1000))});
    for (version, asked) in [("0.31.0", 1), ("0.32.0", 2), ("0.31.0", 2)] {
        rig.state(0, |state| state.version = Some(version.into()));
        assert_eq!(warm(&rig, COMPLETIONS, &body).await, said("warm", "gpu=96"));
        assert_eq!(matching(&rig, "asked"), asked, "{version}");
    }
}

#[tokio::test]
async fn what_was_counted_otherwise_is_forgotten_with_the_life() {
    let peer = Peer::start(counting(7)).await;
    let rig = Rig::over(&[peer.url()]).await;
    let ask = async |tokens: &[u32]| {
        hold(&rig, 0, tokens);
        warm(&rig, COMPLETIONS, &json!({"model": MODEL, "prompt": tokens})).await
    };
    for n in 0..2 {
        assert_eq!(ask(&tokens(n * 1000)).await, said("warm", "gpu=96"));
        rig.counted("fak_requests_token_mismatches_total", u64::from(n) + 1).await;
    }
    assert_eq!(ask(&tokens(2000)).await, said("unknown", "0"), "the kind");
    rig.state(0, |state| state.lives += 1);
    assert_eq!(ask(&tokens(2000)).await, said("warm", "gpu=96"));
    assert_eq!(ask(&tokens(0)).await, said("warm", "gpu=96"), "a prompt that was counted so");
}

/// The first answer of `/tokenize` is the old life's, on its way when the next one begins.
#[tokio::test]
async fn tokens_of_the_life_before_are_not_used_where_another_began_meanwhile() {
    let (steps, replies) = tokio::sync::mpsc::channel(1);
    let replies = std::sync::Mutex::new(Some(replies));
    let next = templated(&Arc::new(AtomicU32::new(8)));
    let mut peer = Peer::start(move |request| {
        let is_first = request.line() == "POST /tokenize";
        let first = is_first.then(|| replies.lock().unwrap().take()).flatten();
        first.map_or_else(|| next(request), Reply::Steps)
    })
    .await;
    let rig = Rig::over(&[peer.url()]).await;
    let rendered = |first| [vec![first], tokens(1000)].concat();
    hold(&rig, 0, &rendered(8));
    let messages = json!([{"role": "user", "content": words(&tokens(1000))}]);
    let body = json!({"model": MODEL, "messages": messages});
    let (told, ()) = tokio::join!(warm(&rig, CHAT, &body), async {
        assert_eq!(peer.request().await.line(), "POST /tokenize");
        rig.state(0, |state| state.lives += 1);
        let old = json!({"tokens": rendered(7), "count": 101, "max_model_len": 4096}).to_string();
        steps.send(peer::json("200 OK", &old)).await.unwrap();
        drop(steps);
    });
    assert_eq!(told, said("warm", "gpu=96"));
    assert_eq!(matching(&rig, "asked"), 2);
}
