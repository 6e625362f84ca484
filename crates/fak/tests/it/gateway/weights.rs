//! Under which weights an answer was made, and that KV of other weights is out of its reach.

use fak::engine::{Isolation, Stamp};
use fak::gateway::{self, WeightsSalt};
use fak::lifecycle::Request;
use fak_kernel::witness::Move;
use fak_kernel::{Tier, TierSet};
use fak_sim::{Binds, Connector, RouteFault, Sim, SimConfig};
use http::StatusCode;
use serde_json::{Value, json};

use super::bridged::{Bridged, COMPLETIONS};
use super::rig::{MODEL, PATIENT, Rig, chat, next, setup, whole};
use super::routing::{hold, prompt};
use crate::e2e::process::behind_with;
use crate::engine::peer::{self, Peer, Reply};

const VERSION: &str = "x-fak-weight-version";
const MIXED: &str = "x-fak-weight-version-mixed";
const MIXED_TOTAL: &str = "fak_requests_mixed_weights_total";

fn body(stream: bool, tokens: u32) -> String {
    json!({"model": "tiny", "prompt": "one two three", "stream": stream, "max_tokens": tokens,
           "ignore_eos": true})
    .to_string()
}

/// Puts another version on the engine's weights, as a trainer does that keeps its requests.
async fn update(bridged: &Bridged, version: &str) {
    bridged.behind("/pause?mode=keep&clear_cache=false", "").await;
    let named = json!({ "new_version": version }).to_string();
    bridged.behind("/update_weight_version", &named).await;
    bridged.behind("/resume", "").await;
    bridged.lifecycle.look("w0").await.unwrap();
}

/// Case 38.
#[tokio::test]
async fn a_stream_that_spans_two_versions_names_the_first_and_is_marked_at_its_end() {
    let bridged = Bridged::start().await;
    bridged.sim.faults().limit_steps(Some(5));
    let mut answer = bridged.rig.open("POST", COMPLETIONS, &[], &body(true, 20)).await;
    assert_eq!(answer.headers()[VERSION], "default");
    assert!(!answer.headers().contains_key(MIXED));
    next(&mut answer).await.unwrap();
    update(&bridged, "v8").await;
    bridged.sim.faults().limit_steps(None);
    let text = whole(answer).await;
    let end = ": fak weight-version-mixed default v8\n\ndata: [DONE]\n\n";
    assert!(text.text().ends_with(end), "{}", text.text());
    assert_eq!(text.text().matches("\n: ").count(), 1, "{}", text.text());
    bridged.rig.counted(MIXED_TOTAL, 1).await;
    // The next is of the new version alone.
    let next = bridged.rig.post(COMPLETIONS, &body(true, 3)).await;
    assert_eq!((next.header(VERSION), next.header(MIXED)), (Some("v8"), None));
    assert!(next.text().ends_with("data: [DONE]\n\n") && !next.text().contains("\n: "));
    assert_eq!(bridged.rig.count(MIXED_TOTAL), 1);
}

/// Case 38: headers that have not left yet say it themselves.
#[tokio::test]
async fn a_whole_answer_that_spans_two_versions_has_both_in_its_headers() {
    let bridged = Bridged::start().await;
    bridged.sim.faults().limit_steps(Some(0));
    let text = body(false, 3);
    let asked = bridged.rig.post(COMPLETIONS, &text);
    let updated = async {
        let is_there = async {
            while bridged.sim.requests_in_flight() == 0 {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(PATIENT, is_there).await.unwrap();
        update(&bridged, "v8").await;
        bridged.sim.faults().limit_steps(None);
    };
    let (answer, ()) = tokio::join!(asked, updated);
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
    assert_eq!((answer.header(VERSION), answer.header(MIXED)), (Some("default"), Some("v8")));
    bridged.rig.counted(MIXED_TOTAL, 1).await;
    let next = bridged.rig.post(COMPLETIONS, &text).await;
    assert_eq!((next.header(VERSION), next.header(MIXED)), (Some("v8"), None));
}

#[tokio::test]
async fn an_unknown_version_is_not_told_and_no_engine_speaks_for_fak() {
    let peer = Peer::start(|_| {
        let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n";
        Reply::Send(format!("{head}{VERSION}: v9\r\n{MIXED}: v9\r\n\r\n{{}}").into_bytes())
    })
    .await;
    let rig = Rig::over(&[peer.url()]).await;
    let answer = rig.post("/v1/chat/completions", &chat(false)).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
    assert_eq!((answer.header(VERSION), answer.header(MIXED)), (None, None));
}

#[tokio::test]
async fn a_version_that_is_told_late_is_no_change_of_weights_and_one_without_a_name_is() {
    for (epoch, mixed) in [(None, None), (Some(7), Some("unnamed"))] {
        let (steps, replies) = tokio::sync::mpsc::channel(1);
        let replies = std::sync::Mutex::new(Some(replies));
        let mut peer =
            Peer::start(move |_| Reply::Steps(replies.lock().unwrap().take().unwrap())).await;
        let rig = Rig::over(&[peer.url()]).await;
        if epoch.is_some() {
            rig.state(0, |state| state.weight_version = Some("v1".into()));
        }
        let body = chat(false);
        let asked = rig.post("/v1/chat/completions", &body);
        let told = async {
            peer.request().await;
            rig.state(0, |state| {
                (state.weight_version, state.weights_epoch) = (Some("v1".into()), epoch);
            });
            steps.send(peer::json("200 OK", "{}")).await.unwrap();
        };
        let (answer, ()) = tokio::join!(asked, told);
        assert_eq!(answer.header(MIXED), mixed);
        rig.counted(MIXED_TOTAL, u64::from(mixed.is_some())).await;
    }
}

/// The salt of a request on weights of this name.
fn salt(version: Option<&str>, epoch: Option<u64>, own: Option<&str>) -> String {
    Stamp::new(None, Isolation::Off, false).weights_salt(version, epoch, own)
}

/// Loads other weights without clearing any cache, and names them.
async fn replace(bridged: &mut Bridged, version: &str) {
    bridged.sim.set_checkpoint(8);
    bridged.behind("/collective_rpc", r#"{"method":"reload_weights"}"#).await;
    update(bridged, version).await;
}

fn text() -> String {
    "the quick brown fox jumps over the lazy dog ".repeat(20)
}

/// Cases 28 and 52: behind a tier that nothing is known to empty.
#[tokio::test]
async fn kv_of_other_weights_is_out_of_reach_in_every_tier() {
    for connector in [Connector::Mooncake, Connector::Multi, Connector::Offloading] {
        let config = SimConfig { connector, ..SimConfig::default() };
        let mut bridged = Bridged::with(config, gateway::Config::default()).await;
        let (text, tokens) = (text(), bridged.sim.tokenize(&text()));
        bridged.ask(&text).await;
        let (_, _, cached) = bridged.ask_salted(&text, None).await;
        assert!(cached > 0, "{connector:?}");
        replace(&mut bridged, "v8").await;
        // What a request without a salt would take, and what only the connector would give it.
        assert!(bridged.sim.holds(&tokens, None).stale > 0, "{connector:?}");
        bridged.behind("/reset_prefix_cache", "").await;
        assert!(bridged.sim.holds(&tokens, None).stale > 0, "{connector:?}");
        let salt = salt(Some("v8"), None, None);
        assert_eq!(bridged.sim.holds(&tokens, Some(&salt)).hit_tokens, 0);
        let (kv, claimed, cached) = bridged.claimed_and_cached(&text).await;
        assert!(kv != "warm" && claimed == "0" && cached == 0, "{connector:?}: {kv} {cached}");
        let (_, _, cached) = bridged.claimed_and_cached(&text).await;
        assert!(cached > 0, "{connector:?}: nothing of the new weights is found again");
        assert_eq!(bridged.sim.holds(&tokens, Some(&salt)).stale, 0);
        assert_eq!(bridged.audited("over"), 0);
        assert_eq!(bridged.rig.count("fak_requests_weight_salted_total"), 2);
    }
}

/// A reset that is not proven leaves the salt, and one that is takes it away.
#[tokio::test]
async fn salts_carry_the_weights_until_every_tier_was_seen_empty() {
    let config = SimConfig { connector: Connector::Offloading, ..SimConfig::default() };
    let mut bridged = Bridged::with(config, gateway::Config::default()).await;
    let text = text();
    bridged.ask(&text).await;
    replace(&mut bridged, "v8").await;
    let reset = || Request::new(Move::Reset { external: true, running: false });
    bridged.sim.faults().route("/reset_prefix_cache", RouteFault::Pretend, 1);
    let row = bridged.lifecycle.act("w0", reset()).await.unwrap();
    assert_eq!(row.reason, "no_effect");
    let salt = salt(Some("v8"), None, None);
    let (_, claimed, cached) = bridged.ask_salted(&text, Some(&salt)).await;
    assert_eq!((claimed.as_str(), cached), ("0", 0));
    let row = bridged.lifecycle.act("w0", reset()).await.unwrap();
    assert_eq!(row.reason, "confirmed");
    bridged.heard().await;
    let tokens = bridged.sim.tokenize(&text);
    assert_eq!(bridged.sim.holds(&tokens, None).hit_tokens, 0, "it is empty");
    let (_, claimed, cached) = bridged.ask_salted(&text, None).await;
    assert_eq!((claimed.as_str(), cached), ("0", 0));
    let (kv, _, cached) = bridged.ask_salted(&text, None).await;
    assert!(kv == "warm" && cached > 0, "{kv} {cached}");
    assert_eq!(bridged.rig.count("fak_requests_weight_salted_total"), 1);
}

/// Case 28, the way that wipes nothing.
#[tokio::test]
async fn a_version_that_comes_back_finds_its_own_kv_again() {
    let config = gateway::Config { weights_salt: WeightsSalt::Version, ..Default::default() };
    let bridged = Bridged::with(SimConfig::default(), config).await;
    let text = text();
    let [first, second] = ["default", "v8"].map(|version| salt(Some(version), None, None));
    assert_eq!(bridged.ask_salted(&text, Some(&first)).await.2, 0);
    let (kv, _, cached) = bridged.ask_salted(&text, Some(&first)).await;
    assert!(kv == "warm" && cached > 0, "{kv} {cached}");
    update(&bridged, "v8").await;
    bridged.settled().await;
    assert_eq!(bridged.ask_salted(&text, Some(&second)).await.2, 0);
    update(&bridged, "default").await;
    // The engine stores nothing then, so that there is nothing to believe.
    assert_eq!(bridged.claimed_and_cached(&text).await.2, cached);
    let tokens = bridged.sim.tokenize(&text);
    assert_eq!(bridged.sim.holds(&tokens, None).hit_tokens, 0);
    assert_eq!(bridged.audited("over"), 0);
}

/// What the one worker was sent, by its field of that name.
async fn sent(peer: &mut Peer, field: &str) -> Value {
    peer.request().await.json()[field].take()
}

#[tokio::test]
async fn a_salt_carries_version_epoch_and_the_salt_that_was_there() {
    let mut peer = Peer::start(|_| Reply::Send(peer::json("200 OK", "{}"))).await;
    let mut setup = setup();
    setup.config.weights_salt = WeightsSalt::Version;
    let rig = Rig::with(&[peer.url()], setup).await;
    let body = |salt: Option<&str>| {
        let messages = json!([{"role": "user", "content": "hello"}]);
        let mut body = json!({"model": MODEL, "messages": messages});
        if let Some(salt) = salt {
            body["cache_salt"] = salt.into();
        }
        body.to_string()
    };
    // Of weights without any name there is nothing to carry.
    rig.post("/v1/chat/completions", &body(Some("mine"))).await;
    assert_eq!(sent(&mut peer, "cache_salt").await, "mine");
    let mut seen = std::collections::HashSet::new();
    for version in ["v7", "v8"] {
        for epoch in [None, Some(3), Some(4)] {
            rig.state(0, |state| {
                (state.weight_version, state.weights_epoch) = (Some(version.into()), epoch);
            });
            for own in [None, Some("mine"), Some("yours")] {
                for path in ["/v1/chat/completions", "/v1/responses"] {
                    rig.post(path, &body(own)).await;
                    let written = sent(&mut peer, "cache_salt").await;
                    assert_eq!(written, salt(Some(version), epoch, own));
                    seen.insert(written.to_string());
                }
            }
        }
    }
    assert_eq!(seen.len(), 18);
    // No salt is taken there, and nothing else changes.
    rig.post("/v1/embeddings", &body(None)).await;
    assert_eq!(sent(&mut peer, "cache_salt").await, Value::Null);
}

#[tokio::test]
async fn what_cannot_be_kept_from_kv_of_other_weights_is_not_sent_to_it() {
    let replies = || Peer::start(|_| Reply::Send(peer::json("200 OK", "{}")));
    let (stale, clean) = (replies().await, replies().await);
    let rig = Rig::with(&[stale.url(), clean.url()], setup()).await;
    let old = |state: &mut fak::fleet::State| {
        state.standing.stale = TierSet::CONNECTOR;
        state.weight_version = Some("v8".into());
    };
    rig.state(0, old);
    let body = json!({"model": MODEL, "input": "hello", "messages": []}).to_string();
    for path in ["/v1/embeddings", "/v1/messages", "/v1/rerank"] {
        for _ in 0..8 {
            let answer = rig.post(path, &body).await;
            assert_eq!(
                (answer.status, answer.header("x-fak-worker")),
                (StatusCode::OK, Some("w1"))
            );
        }
    }
    rig.state(1, old);
    let refused = rig.post("/v1/embeddings", &body).await;
    assert_eq!(refused.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(refused.code(), "kv_of_other_weights");
    assert!(refused.header("retry-after").is_some());
    assert_eq!(rig.post("/v1/chat/completions", &chat(false)).await.status, StatusCode::OK);
    // Weights that nothing names cannot be told from those before them.
    for number in [0, 1] {
        rig.state(number, |state| state.weight_version = None);
    }
    let refused = rig.post("/v1/chat/completions", &chat(false)).await;
    assert_eq!(refused.code(), "kv_of_other_weights");
}

/// The weights change while the prompt is being counted.
#[tokio::test]
async fn weights_that_change_before_the_request_enters_are_the_ones_in_its_salt() {
    let (steps, replies) = tokio::sync::mpsc::channel(1);
    let replies = std::sync::Mutex::new(Some(replies));
    let mut peer = Peer::start(move |request| match request.line() {
        "POST /tokenize" => Reply::Steps(replies.lock().unwrap().take().unwrap()),
        _ => Reply::Send(peer::json("200 OK", "{}")),
    })
    .await;
    let rig = Rig::with(&[peer.url()], setup()).await;
    hold(&rig, 0, &(0..100).collect::<Vec<u32>>());
    let body = chat(false);
    let asked = rig.post("/v1/chat/completions", &body);
    let changed = async {
        assert_eq!(peer.request().await.line(), "POST /tokenize");
        rig.state(0, |state| {
            state.standing.stale = TierSet::ALL;
            state.weight_version = Some("v8".into());
        });
        let tokens: Vec<u32> = (0..100).collect();
        let counted = json!({"tokens": tokens, "count": 100, "max_model_len": 4096}).to_string();
        steps.send(peer::json("200 OK", &counted)).await.unwrap();
        drop(steps);
        sent(&mut peer, "cache_salt").await
    };
    let (answer, written) = tokio::join!(asked, changed);
    assert_eq!(answer.header("x-fak-warm-tokens"), Some("0"));
    assert_eq!(answer.header(VERSION), Some("v8"));
    assert_eq!(written, salt(Some("v8"), None, None));
    // The same prompt without a salt is claimed as before.
    rig.state(0, |state| state.standing.stale = TierSet::NONE);
    let answer = rig.post(COMPLETIONS, &prompt(&(0..100).collect::<Vec<u32>>())).await;
    assert_eq!(answer.header("x-fak-warm-tokens"), Some("gpu=96"));
}

/// A store that outlives its engine has what that one put there, with the weights that it had.
#[tokio::test]
async fn a_process_with_another_version_does_not_reach_what_outlived_the_one_before() {
    for (connector, is_stale) in [(Connector::Mooncake, true), (Connector::Offloading, false)] {
        let config = SimConfig { connector, ..SimConfig::default() };
        let sim = Sim::start(config, Binds::default()).await.unwrap();
        let named = json!({"new_version": "v2"}).to_string();
        behind_with(&sim, "/update_weight_version", named).await;
        let mut bridged = Bridged::over(sim, gateway::Config::default()).await;
        let (text, tokens) = (text(), bridged.sim.tokenize(&text()));
        bridged.ask_salted(&text, None).await;
        bridged.sim.set_checkpoint(8);
        bridged.sim.restart().await.unwrap();
        bridged.lifecycle.look("w0").await.unwrap();
        let state = bridged.rig.fleet.snapshot().workers[0].state.clone();
        assert_eq!(state.weight_version.as_deref(), Some("default"));
        assert_eq!(state.standing.stale.has(Tier::Cpu), is_stale, "{connector:?}");
        assert_eq!(bridged.sim.holds(&tokens, None).stale > 0, is_stale, "{connector:?}");
        let (_, claimed, cached) = bridged.claimed_and_cached(&text).await;
        assert_eq!((claimed.as_str(), cached), ("0", 0), "{connector:?}");
        let salted = bridged.rig.count("fak_requests_weight_salted_total");
        assert_eq!(salted, u64::from(is_stale), "{connector:?}");
    }
}
