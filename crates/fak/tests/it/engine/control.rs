//! What was asked, answered and observed are kept apart, whatever the engine does.

use std::time::Duration;

use fak::engine::{
    Answer, Control, Mode, NotSent, Seen, SleepLevel, SleepState, Success, Timeouts, WakeTag,
};
use serde_json::{Value, json};

use super::peer::{self, Peer, Reply, Request};
use super::{engine, patient};

const SHORT: Duration = Duration::from_millis(200);

fn metrics(state: &str) -> Vec<u8> {
    let states = ["awake", "weights_offloaded", "discard_all"];
    let lines: String = states
        .iter()
        .map(|name| {
            let value = u8::from(*name == state);
            format!("vllm:engine_sleep_state{{engine=\"0\",sleep_state=\"{name}\"}} {value}.0\n")
        })
        .collect();
    let head = "# TYPE vllm:engine_sleep_state gauge\n";
    peer::answer("200 OK", "text/plain; version=1.0.0", &format!("{head}{lines}"))
}

/// An engine that is paused and asleep at level 1, and answers the call itself with `reply`.
fn asleep(reply: impl Fn(&Request) -> Reply + Send + Sync) -> impl Fn(&Request) -> Reply {
    move |request| match request.line() {
        "GET /is_paused" => Reply::Send(peer::json("200 OK", r#"{"is_paused":true}"#)),
        "GET /is_sleeping" => Reply::Send(peer::json("200 OK", r#"{"is_sleeping":true}"#)),
        "GET /metrics" => Reply::Send(metrics("weights_offloaded")),
        _ => reply(request),
    }
}

const RESET: Control = Control::ResetPrefixCache { external: false, running_requests: false };

fn sleep(level: SleepLevel) -> Control {
    Control::Sleep { level, mode: Mode::Abort, keep_connector_cache: false }
}

#[tokio::test]
async fn level_and_mode_go_into_the_query_and_the_observation_stands_beside_the_answer() {
    let said = || peer::json("200 OK", r#"{"status":"sleeping","level":2}"#);
    let mut peer = Peer::start(asleep(move |_| Reply::Send(said()))).await;
    let called = engine(&peer, patient()).control(sleep(SleepLevel::DiscardAll)).await;
    assert_eq!(peer.request().await.line(), "POST /sleep?level=2&mode=abort");
    assert_eq!(called.asked, sleep(SleepLevel::DiscardAll));
    assert_eq!(called.answered.status(), Some(200));
    assert_eq!(called.answered.body(), &json!({"status": "sleeping", "level": 2}));
    assert_eq!(called.observed.is_paused, Seen::Value(true));
    assert_eq!(called.observed.is_sleeping, Seen::Value(true));
    assert_eq!(called.observed.sleep_state, Seen::Value(SleepState::One), "not what was answered");
}

#[tokio::test]
async fn a_reset_has_three_outcomes_and_a_missing_route_is_a_fourth() {
    for (status, body, success) in [
        ("200 OK", r#"{"success":true}"#, Success::True),
        ("200 OK", r#"{"success":false}"#, Success::False),
        ("200 OK", "", Success::Absent),
        ("200 OK", r#"{"success":"yes"}"#, Success::Absent),
        ("200 OK", "fine", Success::Absent),
        ("404 Not Found", r#"{"detail":"Not Found"}"#, Success::Absent),
        ("500 Internal Server Error", "", Success::Absent),
    ] {
        let reply = peer::json(status, body);
        let peer = Peer::start(asleep(move |_| Reply::Send(reply.clone()))).await;
        let called = engine(&peer, patient()).control(RESET).await;
        assert_eq!(called.answered.success(), success, "{status} {body}");
        assert_eq!(called.answered.status().map(|s| s.to_string()).as_deref(), status.get(..3));
    }
}

#[tokio::test]
async fn timeouts_and_cuts_are_answers_and_the_state_is_still_observed() {
    let silent = Peer::start(asleep(|_| Reply::SendAndHold(Vec::new()))).await;
    let called =
        engine(&silent, Timeouts { control: SHORT, ..patient() }).control(Control::Resume).await;
    assert_eq!(called.answered, Answer::TimedOut { after_ms: 200 });
    assert_eq!(called.observed.is_sleeping, Seen::Value(true));

    let cut = Peer::start(asleep(|_| Reply::SendAndClose(b"HTTP/1.1 200".to_vec()))).await;
    let called = engine(&cut, patient()).control(Control::Resume).await;
    assert!(matches!(called.answered, Answer::Cut { .. }), "{:?}", called.answered);
    assert_eq!(called.observed.is_paused, Seen::Value(true));
}

#[tokio::test]
async fn an_engine_that_is_not_there_was_sent_nothing() {
    let peer = Peer::start(|_| Reply::Send(Vec::new())).await;
    let engine = engine(&peer, patient());
    drop(peer);
    let called = engine.control(RESET).await;
    let unreachable =
        |answer: &Answer| matches!(answer, Answer::NotSent(NotSent::Unreachable { .. }));
    assert!(unreachable(&called.answered), "{:?}", called.answered);
    assert!(matches!(called.observed.is_paused, Seen::Unreachable { .. }));
    assert!(matches!(called.observed.sleep_state, Seen::Unreachable { .. }));
}

#[tokio::test]
async fn without_dev_mode_the_flags_are_not_offered() {
    let mut peer = Peer::start(|request| match request.line() {
        "GET /metrics" => Reply::Send(peer::answer("200 OK", "text/plain", "")),
        _ => Reply::Send(peer::json("404 Not Found", r#"{"detail":"Not Found"}"#)),
    })
    .await;
    let called = engine(&peer, patient()).control(Control::WakeUp { tags: Vec::new() }).await;
    assert_eq!(called.answered.status(), Some(404));
    assert_eq!(called.observed.is_paused, Seen::NotOffered);
    assert_eq!(called.observed.is_sleeping, Seen::NotOffered);
    assert_eq!(called.observed.sleep_state, Seen::NotOffered);
    assert_eq!(peer.request().await.line(), "POST /wake_up");
}

#[tokio::test]
async fn a_flag_that_is_no_boolean_is_a_failed_look() {
    let peer = Peer::start(|_| Reply::Send(peer::json("200 OK", r#"{"is_paused":1}"#))).await;
    let observed = engine(&peer, patient()).observe().await;
    assert!(matches!(observed.is_paused, Seen::Failed { .. }), "{observed:?}");
}

#[tokio::test]
async fn worker_rpc_is_not_sent_until_opened_and_then_says_one_thing() {
    let mut peer = Peer::start(asleep(|_| Reply::Send(peer::json("200 OK", "{}")))).await;
    let shut = engine(&peer, patient());
    let called = shut.control(Control::ReloadWeights).await;
    assert!(matches!(called.answered, Answer::NotSent(NotSent::NotAllowed(_))));
    let lines: Vec<_> =
        peer.requests_so_far().iter().map(|request| request.line().to_owned()).collect();
    assert!(!lines.iter().any(|line| line.contains("collective_rpc")), "{lines:?}");

    let open = shut.endpoints().clone().allowing_reload_weights();
    let open = fak::engine::Engine::new(shut.client().clone(), open);
    open.control(Control::ReloadWeights).await;
    let request = peer.request().await;
    assert_eq!(request.line(), "POST /collective_rpc");
    assert_eq!(request.json(), json!({"method": "reload_weights"}));
}

#[tokio::test]
async fn a_wake_sends_its_tags_one_by_one() {
    let mut peer = Peer::start(asleep(|_| Reply::Send(Vec::new()))).await;
    let tags = vec![WakeTag::Weights, WakeTag::KvCache];
    let engine = engine(&peer, Timeouts { control: SHORT, ..patient() });
    engine.control(Control::WakeUp { tags }).await;
    assert_eq!(peer.request().await.line(), "POST /wake_up?tags=weights&tags=kv_cache");
}

#[tokio::test]
async fn every_recorded_control_answer_is_read_as_it_was_given() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/vllm-0.32/http");
    let pause =
        Control::Pause { mode: Mode::Keep, clear_cache: false, keep_connector_cache: false };
    for (name, asked, status, word) in [
        ("pause-keep", pause, 200, "paused"),
        ("resume", Control::Resume, 200, "resumed"),
        ("sleep-level2", sleep(SleepLevel::DiscardAll), 200, "sleeping"),
        ("wake_up", Control::WakeUp { tags: Vec::new() }, 200, "awake"),
        ("wake_up-partial", Control::WakeUp { tags: vec![WakeTag::Weights] }, 200, "sleeping"),
        ("reset_prefix_cache", RESET, 200, ""),
        ("reset_prefix_cache-busy", RESET, 200, ""),
        ("sleep-dev-mode-off-404", sleep(SleepLevel::DiscardAll), 404, ""),
    ] {
        let text = std::fs::read_to_string(format!("{folder}/{name}.json")).expect("a fixture");
        let fixture: Value = serde_json::from_str(&text).expect("JSON");
        let body = fixture["response"]["body_text"].as_str().expect("a text").to_owned();
        let reply = peer::json(&format!("{status} Recorded"), &body);
        let peer = Peer::start(asleep(move |_| Reply::Send(reply.clone()))).await;
        let called = engine(&peer, patient()).control(asked).await;
        assert_eq!(called.answered.status(), Some(status), "{name}");
        assert_eq!(called.answered.status_word().unwrap_or_default(), word, "{name}");
        let success = match name {
            "reset_prefix_cache" => Success::True,
            "reset_prefix_cache-busy" => Success::False,
            _ => Success::Absent,
        };
        assert_eq!(called.answered.success(), success, "{name}");
    }
}
