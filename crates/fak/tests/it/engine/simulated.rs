//! The adapter against the simulated engine: what the two make of each other over real sockets.

use std::time::Duration;

use fak::engine::{
    Client, Control, Endpoints, Engine, Event, Isolation, Mode, Seen, SleepLevel, SleepState,
    Stamp, Success, Turn,
};
use fak_sim::{Binds, Profile, Sim, SimConfig};
use fak_wire::openai::{Api, Request};
use http::HeaderMap;
use serde_json::json;

use super::patient;

async fn simulated(config: SimConfig) -> (Sim, Engine) {
    let sim = Sim::start(config, Binds::default()).await.expect("free ports");
    let client = Client::new(None, patient()).expect("no key");
    let endpoints = Endpoints::new(&sim.base_url()).expect("an address");
    (sim, Engine::new(client, endpoints))
}

fn turn(max_tokens: u32) -> Turn {
    let body = json!({"prompt": "count on", "max_tokens": max_tokens, "ignore_eos": true});
    Turn {
        request: Request::parse(Api::Completions, body.to_string().as_bytes()).expect("a body"),
        headers: HeaderMap::new(),
        identity: None,
        priority: None,
    }
}

async fn running(engine: &Engine) -> f64 {
    engine.scrape().await.expect("metrics").total().running.expect("a gauge")
}

#[tokio::test(flavor = "multi_thread")]
async fn the_engine_runs_nothing_once_the_client_is_gone() {
    let decode_step = Duration::from_millis(5);
    let (_sim, engine) = simulated(SimConfig { decode_step, ..SimConfig::default() }).await;
    let stamp = Stamp::new(None, Isolation::Off, false);
    let admitted = engine.admit(turn(3000), &stamp).expect("a fine request");
    let mut stream = admitted.stream().await.expect("a stream");
    assert!(matches!(stream.step().await, Some(Event::FirstToken { .. })));
    assert_eq!(running(&engine).await.to_bits(), 1f64.to_bits());
    drop(stream);
    // Fifteen seconds of work are left to it if it does not notice.
    let idle = async { while running(&engine).await > 0.0 {} };
    tokio::time::timeout(Duration::from_secs(5), idle).await.expect("the engine notices");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sleep_is_observed_beside_its_answer_and_a_wake_undoes_it() {
    let (_sim, engine) = simulated(SimConfig::default()).await;
    let level = SleepLevel::DiscardAll;
    let sleep = Control::Sleep { level, mode: Mode::Abort, keep_connector_cache: false };
    let slept = engine.control(sleep).await;
    assert_eq!(slept.answered.status_word(), Some("sleeping"));
    assert_eq!(slept.answered.body()["level"], 2);
    assert_eq!(slept.observed.is_sleeping, Seen::Value(true));
    assert_eq!(slept.observed.sleep_state, Seen::Value(SleepState::Two));
    let woken = engine.control(Control::WakeUp { tags: Vec::new() }).await;
    assert_eq!(woken.answered.status_word(), Some("awake"));
    assert_eq!(woken.observed.is_paused, Seen::Value(false));
    assert_eq!(woken.observed.is_sleeping, Seen::Value(false));
    assert_eq!(woken.observed.sleep_state, Seen::Value(SleepState::Awake));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_resets_success_is_three_valued_over_versions_and_load() {
    let reset = || Control::ResetPrefixCache { external: false, running_requests: false };
    let (_old, engine) =
        simulated(SimConfig { profile: Profile::V0_19, ..SimConfig::default() }).await;
    let called = engine.control(reset()).await;
    assert_eq!((called.answered.status(), called.answered.success()), (Some(200), Success::Absent));

    let decode_step = Duration::from_millis(5);
    let (_new, engine) = simulated(SimConfig { decode_step, ..SimConfig::default() }).await;
    assert_eq!(engine.control(reset()).await.answered.success(), Success::True);
    let stamp = Stamp::new(None, Isolation::Off, false);
    let admitted = engine.admit(turn(3000), &stamp).expect("a fine request");
    let mut stream = admitted.stream().await.expect("a stream");
    assert!(matches!(stream.step().await, Some(Event::FirstToken { .. })));
    assert_eq!(engine.control(reset()).await.answered.success(), Success::False);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_dev_mode_a_reset_is_turned_away() {
    let (_sim, engine) = simulated(SimConfig { dev_mode: false, ..SimConfig::default() }).await;
    let reset = Control::ResetPrefixCache { external: true, running_requests: false };
    let called = engine.control(reset).await;
    assert_eq!(called.answered.status(), Some(404));
    assert_eq!(called.observed.is_paused, Seen::NotOffered);
    assert_eq!(called.observed.sleep_state, Seen::Value(SleepState::Awake));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_opt_out_is_learnt_from_its_declaration_alone() {
    for (profile, expected) in [(Profile::V0_32, false), (Profile::KeepTier, true)] {
        let (_sim, engine) = simulated(SimConfig { profile, ..SimConfig::default() }).await;
        let learnt = engine.capabilities().await;
        assert_eq!(learnt.clear_connector_cache.told(), Some(&expected), "{profile:?}");
        assert_eq!(learnt.block_size.told(), Some(&32));
    }
}
