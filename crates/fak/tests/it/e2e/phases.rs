//! What fak shows of a worker in each phase, and what a dead one does to the others: nothing.

use std::collections::BTreeMap;

use fak_sim::{Binds, Sim, SimConfig};
use serde_json::{Value, json};
use tokio::net::TcpListener;

use super::peer::{Hold, Peer};
use super::process::{Fak, Setup, behind, prompt, until};

async fn sim() -> Sim {
    Sim::start(SimConfig::default(), Binds::default()).await.unwrap()
}

/// The phase series of `w0`.
fn series(metrics: &str) -> BTreeMap<&str, &str> {
    let lines = metrics
        .lines()
        .filter_map(|line| line.strip_prefix("fak_worker_phase{worker=\"w0\",phase=\""));
    lines.map(|line| line.split_once("\"} ").unwrap()).collect()
}

/// Everything that shows `w0`, the only worker, shows it in `phase`.
async fn shows(fak: &Fak, phase: &str, model: &str) {
    fak.worker_is("w0", "phase", phase).await;
    let serves = phase == "serving";
    assert_eq!(fak.worker("w0").await["serving"], serves);
    let metrics = fak.get("/metrics").await.text;
    let series = series(&metrics);
    assert_eq!(series.len(), 5, "{series:?}");
    for (name, value) in &series {
        assert_eq!(*value, if *name == phase { "1" } else { "0" }, "{series:?}");
    }
    let ready = fak.get("/ready").await;
    assert_eq!(ready.status, if serves { 200 } else { 503 }, "{ready:?}");
    assert_eq!(ready.json()["models"]["tiny"], u64::from(serves));
    let models = fak.get("/v1/models").await.json();
    assert_eq!(models["data"][0]["status"], model, "{models}");
    let asked = fak.try_ask(&prompt(1)).await;
    assert_eq!(asked.status, if serves { 200 } else { 503 }, "{asked:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn each_phase_is_shown_as_it_is_everywhere() {
    let sim = sim().await;
    let setup = Setup::new("phases").sims([&sim]);
    let fak = setup.start().await;
    shows(&fak, "serving", "ready").await;
    fak.act("pause", &json!({})).await;
    shows(&fak, "paused", "sleeping").await;
    fak.act("resume", &json!({})).await;
    shows(&fak, "serving", "ready").await;
    fak.act("sleep", &json!({"level": 1})).await;
    shows(&fak, "sleeping", "sleeping").await;
    fak.act("wake", &json!({"tags": ["weights"]})).await;
    shows(&fak, "waking", "waking").await;
    fak.act("wake", &json!({"weights": "same"})).await;
    shows(&fak, "serving", "ready").await;
    assert_eq!(sim.counters_of(0).tokens_while_asleep, 0);
    sim.stop().await;
    shows(&fak, "error", "failed").await;
    fak.terminated().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_done_behind_faks_back_is_shown_as_it_is() {
    let mut sim = sim().await;
    let setup = Setup::new("behind").sims([&sim]);
    let fak = setup.start().await;
    shows(&fak, "serving", "ready").await;
    for (call, phase, model) in [
        ("/pause", "paused", "sleeping"),
        ("/resume", "serving", "ready"),
        ("/sleep?level=1", "sleeping", "sleeping"),
        ("/wake_up", "serving", "ready"),
        ("/sleep?level=2", "sleeping", "sleeping"),
    ] {
        behind(&sim, call).await;
        shows(&fak, phase, model).await;
    }
    assert_eq!(sim.counters_of(0).tokens_while_asleep, 0);
    sim.restart().await.unwrap();
    shows(&fak, "serving", "ready").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_died_under_its_front_end_is_an_error() {
    let sim = sim().await;
    let setup = Setup::new("died").sims([&sim]);
    let fak = setup.start().await;
    shows(&fak, "serving", "ready").await;
    sim.kill_engine();
    shows(&fak, "error", "failed").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_was_never_heard_of_holds_up_nobody() {
    let sim = sim().await;
    let deaf = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", deaf.local_addr().unwrap());
    let setup = Setup::new("deaf").worker("w0", &url).worker("w1", &sim.base_url());
    let fak = setup.start().await;
    fak.heard("w1").await;
    for label in 0..20 {
        assert_eq!(fak.ask(&prompt(label)).await.worker, "w1");
    }
    let worker = fak.worker("w0").await;
    assert_eq!((&worker["phase"], &worker["serving"]), (&json!("error"), &Value::Bool(false)));
    fak.terminated().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_falls_silent_holds_up_nobody_and_is_out_after_its_probes() {
    let (good, bad) = (sim().await, sim().await);
    let peer = Peer::before(bad.base_url()).await;
    let setup = Setup::new("silent").worker("w0", &peer.url).worker("w1", &good.base_url());
    let setup = setup.set("first_byte_ms", 100);
    let fak = setup.start().await;
    fak.heard("w0").await;
    fak.heard("w1").await;
    peer.hold("/", Hold::Before);
    let prompts: Vec<_> = (0..40).map(prompt).collect();
    let all = futures_util::future::join_all(prompts.iter().map(|prompt| fak.ask(prompt)));
    for asked in all.await {
        assert_eq!(asked.worker, "w1");
    }
    let worker = fak.worker("w0").await;
    assert_eq!((&worker["serving"], &worker["reachable"]), (&json!(false), &json!(false)));
    fak.worker_is("w0", "phase", "error").await;
    assert_eq!(worker["in_flight"], 0);
    let rows = fak.rows().await;
    assert!(rows.iter().any(|row| row.worker == "w0" && row.action.as_str() == "lost"));
    peer.release();
    fak.worker_is("w0", "serving", true).await;
    until("it is sent requests again", async || {
        let asked = fak.ask(&prompt(fastrand::u32(50..1000))).await;
        (asked.worker == "w0").then_some(())
    })
    .await;
    fak.terminated().await;
}

/// Fault 68: a plain vLLM, without `VLLM_SERVER_DEV_MODE`.
#[tokio::test(flavor = "multi_thread")]
async fn an_engine_without_control_routes_serves_and_says_why_it_cannot_be_put_to_sleep() {
    let config = SimConfig { dev_mode: false, ..SimConfig::default() };
    let sim = Sim::start(config, Binds::default()).await.unwrap();
    let setup = Setup::new("plain").sims([&sim]);
    let fak = setup.start().await;
    fak.worker_is("w0", "serving", true).await;
    assert_eq!(fak.try_ask(&prompt(1)).await.status, 200);
    for action in ["sleep", "reset", "pause"] {
        let body = if action == "sleep" { json!({"level": 1}) } else { json!({}) };
        let refused = fak.post(&format!("/fak/v1/workers/w0/{action}"), &body).await;
        assert_eq!(refused.status, 409, "{action}: {}", refused.text);
        assert!(refused.text.contains("VLLM_SERVER_DEV_MODE"), "{action}: {}", refused.text);
        assert_eq!(fak.worker("w0").await["serving"], true, "{action}");
    }
}
