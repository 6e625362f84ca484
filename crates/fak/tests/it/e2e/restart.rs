//! fak ends and starts again while its engines go on: it serves at once, and claims again what is
//! still there.

use std::future::pending;

use fak::runtime::{OnExit, TaskGroup};
use fak_sim::{Binds, Connector, Sim, SimConfig};
use serde_json::json;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use super::process::{BLOCK, Fak, Setup, behind, behind_with, prompt};

const WARM: u32 = 5;

async fn sim() -> Sim {
    let config = SimConfig { connector: Connector::Offloading, ..SimConfig::default() };
    Sim::start(config, Binds::default()).await.unwrap()
}

/// A gate before a TCP peer: connections wait in it until it is open.
struct Gate {
    address: String,
    open: watch::Sender<bool>,
    _tasks: TaskGroup,
}

impl Gate {
    async fn before(peer: String) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let (open, is_open) = watch::channel(false);
        let mut tasks = TaskGroup::new();
        tasks.spawn("gate", OnExit::Report, async move {
            let mut connections = TaskGroup::new();
            while let Ok((mut from, _)) = listener.accept().await {
                let (mut is_open, peer) = (is_open.clone(), peer.clone());
                connections.spawn("connection", OnExit::Expected, async move {
                    if is_open.wait_for(|open| *open).await.is_err() {
                        pending::<()>().await;
                    }
                    let mut to = TcpStream::connect(peer).await.unwrap();
                    // Either end may close it.
                    let _ = tokio::io::copy_bidirectional(&mut from, &mut to).await;
                });
            }
        });
        Self { address, open, _tasks: tasks }
    }
}

async fn warmed(setup: &Setup) -> Fak {
    let fak = setup.start().await;
    fak.heard("w0").await;
    for label in 0..WARM {
        fak.warm(&prompt(label)).await;
    }
    fak
}

#[tokio::test(flavor = "multi_thread")]
async fn after_a_restart_fak_serves_before_it_has_recovered_and_then_claims_what_is_there() {
    let sim = sim().await;
    let replay = sim.replay_endpoint();
    let gate = Gate::before(replay.strip_prefix("tcp://").unwrap().to_owned()).await;
    let events = sim.kv_events_endpoint();
    let named = format!("{},kv={events},replay=tcp://{}", sim.base_url(), gate.address);
    let setup = Setup::new("recovers").worker("w0", &named);
    gate.open.send_replace(true);
    warmed(&setup).await.terminated().await;

    gate.open.send_replace(false);
    let fak = setup.start().await;
    fak.worker_is("w0", "serving", true).await;
    let asked = fak.ask(&prompt(0)).await;
    assert_eq!((asked.kv.as_str(), asked.claimed), ("unknown", 0), "{asked:?}");
    assert_eq!(fak.get("/ready").await.status, 200);
    assert_eq!(fak.worker("w0").await["state"], "degraded");

    gate.open.send_replace(true);
    fak.heard("w0").await;
    for label in 0..WARM {
        let held = sim.holds(&prompt(label), None);
        let asked = fak.ask(&prompt(label)).await;
        assert_eq!(asked.claimed, held.gpu as u64 * BLOCK, "{asked:?} {held:?}");
        assert_eq!((asked.claimed, asked.kv.as_str()), (asked.cached, "warm"), "{asked:?}");
        assert_eq!(asked.claimed, 96);
    }
    let blocks = fak.worker("w0").await["tiers"]["gpu"]["blocks"].as_u64().unwrap();
    // Where replay gave no answer for long, the connection is made anew and tied once more.
    let least = u64::from(WARM) * 3 + 2;
    assert!(blocks >= least, "{blocks}, not each prompt's whole blocks and two faks' markers");
    fak.terminated().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn of_an_engine_that_was_replaced_while_fak_was_away_nothing_is_claimed() {
    let mut sim = sim().await;
    let setup = Setup::new("replaced").sims([&sim]);
    warmed(&setup).await.kill().await;
    sim.restart().await.unwrap();
    let fak = setup.start().await;
    fak.heard("w0").await;
    for label in 0..WARM {
        let asked = fak.ask(&prompt(label)).await;
        assert_eq!((asked.claimed, asked.cached), (0, 0), "{asked:?}");
    }
    fak.warm(&prompt(0)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_sleeps_over_the_restart_is_not_sent_anything_and_comes_back_cold() {
    let sim = sim().await;
    let setup = Setup::new("asleep").sims([&sim]);
    let fak = warmed(&setup).await;
    fak.act("sleep", &json!({"level": 1})).await;
    fak.terminated().await;
    let fak = setup.start().await;
    fak.worker_is("w0", "phase", "sleeping").await;
    assert_eq!(fak.get("/ready").await.status, 503);
    assert_eq!(fak.try_ask(&prompt(0)).await.status, 503);
    assert_eq!(sim.counters_of(0).tokens_while_asleep, 0);
    fak.act("wake", &json!({"weights": "same"})).await;
    fak.heard("w0").await;
    for label in 0..WARM {
        let asked = fak.ask(&prompt(label)).await;
        assert_eq!((asked.claimed, asked.cached), (0, 0), "{asked:?}");
    }
    fak.warm(&prompt(0)).await;
}

/// An engine announces a reset with its next step alone: until then its history, replayed, shows
/// blocks that are gone.
#[tokio::test(flavor = "multi_thread")]
async fn what_fak_itself_had_dropped_stays_cold_though_the_engine_has_not_announced_it_yet() {
    for (action, options) in [("reset", json!({})), ("sleep", json!({"level": 1}))] {
        let sim = Sim::start(SimConfig::default(), Binds::default()).await.unwrap();
        let setup = Setup::new(&format!("unannounced-{action}")).sims([&sim]);
        let fak = warmed(&setup).await;
        fak.act(action, &options).await;
        if action == "sleep" {
            fak.act("wake", &json!({"weights": "same"})).await;
        }
        fak.terminated().await;
        let fak = setup.start().await;
        fak.heard("w0").await;
        for label in 0..WARM {
            let asked = fak.ask(&prompt(label)).await;
            assert_eq!((asked.claimed, asked.cached), (0, 0), "{action}: {asked:?}");
        }
        fak.warm(&prompt(0)).await;
    }
}

async fn name(sim: &Sim, version: &str) {
    let version = json!({ "new_version": version }).to_string();
    behind_with(sim, "/update_weight_version", version).await;
}

/// The engine does not clear its cache for other weights, and announces nothing: fak has seen the
/// change, or it finds another version than the ledger has.
#[tokio::test(flavor = "multi_thread")]
async fn what_other_weights_computed_stays_out_of_reach_over_a_restart() {
    for is_seen in [true, false] {
        let sim = sim().await;
        let setup = Setup::new(&format!("weights-seen-{is_seen}")).sims([&sim]);
        let fak = warmed(&setup).await;
        if is_seen {
            name(&sim, "v2").await;
            fak.worker_is("w0", "weight_version", "v2").await;
            fak.terminated().await;
        } else {
            fak.terminated().await;
            name(&sim, "v2").await;
        }
        let fak = setup.start().await;
        fak.heard("w0").await;
        for label in 0..WARM {
            assert_eq!(sim.holds(&prompt(label), None).hit_tokens, 96, "it is there");
            let asked = fak.ask(&prompt(label)).await;
            assert_eq!((asked.claimed, asked.cached), (0, 0), "{asked:?}");
        }
        fak.warm(&prompt(WARM)).await;
        // Empty by fak's own reset, and so it is after another restart.
        fak.act("reset", &json!({"external": true})).await;
        fak.warm(&prompt(0)).await;
        fak.terminated().await;
        let fak = setup.start().await;
        fak.heard("w0").await;
        let asked = fak.warm(&prompt(0)).await;
        assert_eq!(sim.holds(&prompt(0), None).hit_tokens as u64, asked.cached, "without a salt");
    }
}

/// Weights that a level 2 sleep dropped are not there because somebody woke the engine.
#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_was_woken_while_fak_was_away_does_not_serve_without_its_weights() {
    let sim = sim().await;
    let setup = Setup::new("unproven").sims([&sim]);
    let fak = warmed(&setup).await;
    fak.act("sleep", &json!({"level": 2})).await;
    fak.terminated().await;
    behind(&sim, "/wake_up").await;
    let fak = setup.start().await;
    fak.worker_is("w0", "phase", "waking").await;
    assert_eq!(fak.try_ask(&prompt(0)).await.status, 503);
    let row = fak.act("wake", &json!({"weights": "loaded"})).await;
    assert!(row.serving, "{row:?}");
    fak.warm(&prompt(0)).await;
}
