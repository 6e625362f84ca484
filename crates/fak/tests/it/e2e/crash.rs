//! `kill -9` at every step of every action: what the ledger says afterwards, and what the next fak
//! makes of it.

use fak::store::Row;
use fak_kernel::{Disposition, Evidence, Phase};
use fak_sim::{Binds, Connector, Sim, SimConfig};
use serde_json::{Value, json};
use sqlx::Connection as _;

use super::peer::{Hold, Peer};
use super::process::{Fak, Setup, behind, prompt};

/// An action, and the phases before and after it.
struct Case {
    action: &'static str,
    options: fn() -> Value,
    path: &'static str,
    /// What has to be done first.
    first: Option<&'static str>,
    before: Phase,
    after: Phase,
}

const CASES: [Case; 5] = [
    Case {
        action: "sleep",
        options: || json!({"level": 1, "mode": "abort"}),
        path: "/sleep",
        first: None,
        before: Phase::Serving,
        after: Phase::Sleeping,
    },
    Case {
        action: "wake",
        options: || json!({"weights": "same"}),
        path: "/wake_up",
        first: Some("sleep"),
        before: Phase::Sleeping,
        after: Phase::Serving,
    },
    Case {
        action: "reset",
        options: || json!({}),
        path: "/reset_prefix_cache",
        first: None,
        before: Phase::Serving,
        after: Phase::Serving,
    },
    Case {
        action: "pause",
        options: || json!({}),
        path: "/pause",
        first: None,
        before: Phase::Serving,
        after: Phase::Paused,
    },
    Case {
        action: "resume",
        options: || json!({}),
        path: "/resume",
        first: Some("pause"),
        before: Phase::Paused,
        after: Phase::Serving,
    },
];

/// Prompts that are warm before the action.
const WARM: u32 = 3;

fn options(action: &str) -> Value {
    let case = CASES.iter().find(|case| case.action == action).unwrap();
    (case.options)()
}

/// An engine, what stands before it, and a fak that has warmed it and done what comes first.
struct Scene {
    case: &'static Case,
    setup: Setup,
    peer: Peer,
    sim: Sim,
}

impl Scene {
    async fn start(case: &'static Case, step: &str) -> (Self, Fak) {
        let config = SimConfig { connector: Connector::Offloading, ..SimConfig::default() };
        let sim = Sim::start(config, Binds::default()).await.unwrap();
        let peer = Peer::before(sim.base_url()).await;
        let name = format!("crash-{step}-{}", case.action);
        let setup = Setup::new(&name).worker("w0", &peer.url);
        let fak = setup.start().await;
        fak.heard("w0").await;
        for label in 0..WARM {
            fak.warm(&prompt(label)).await;
        }
        if let Some(first) = case.first {
            fak.act(first, &options(first)).await;
        }
        (Self { case, setup, peer, sim }, fak)
    }

    /// Asks for the action, and is dropped together with fak.
    async fn ask(&self, fak: &Fak) {
        let path = format!("/fak/v1/workers/w0/{}", self.case.action);
        let _ = fak.open("POST", &path, (self.case.options)().to_string()).await;
    }

    /// The next fak tells the engine's own state, in a row where the last one does not tell it,
    /// serves or can be brought to serve, and claims nothing that is not there.
    async fn goes_on(&self, phase: Phase, last: u64, is_told: bool) {
        let fak = self.setup.start().await;
        fak.worker_is("w0", "phase", phase.as_str()).await;
        let rows = fak.rows().await;
        let news: Vec<_> = rows.iter().filter(|row| row.seq > last).collect();
        assert_eq!(news.len(), usize::from(!is_told), "{news:?}");
        for seen in news {
            assert_eq!((seen.action.as_str(), seen.phase), ("drift", phase), "{seen:?}");
            assert_eq!(seen.evidence, Evidence::Observed);
            assert_eq!(seen.serving, phase == Phase::Serving);
        }
        match phase {
            Phase::Sleeping => drop(fak.act("wake", &options("wake")).await),
            Phase::Paused => drop(fak.act("resume", &options("resume")).await),
            _ => {}
        }
        fak.heard("w0").await;
        for label in 0..WARM {
            fak.ask_truly(&prompt(label)).await;
        }
        fak.warm(&prompt(WARM)).await;
        fak.terminated().await;
    }
}

/// The last row of an action that a kill has cut off.
fn cut_off(rows: &[Row], action: &str) -> u64 {
    let row = rows.last().unwrap();
    assert_eq!((row.action.as_str(), row.kv), (action, Disposition::Unknown), "{row:?}");
    assert_eq!((row.evidence, row.reason.as_str()), (Evidence::None, "unrecorded"));
    assert!(!row.serving && row.answered.is_null() && row.observed.is_null(), "{row:?}");
    assert!(!row.asked.is_null());
    row.seq
}

async fn before_the_intent(case: &'static Case) {
    let (mut scene, fak) = Scene::start(case, "before").await;
    fak.terminated().await;
    // The only looks from here on are those that an action begins with.
    scene.setup = scene.setup.set("probe_every_ms", 60_000);
    let fak = scene.setup.start().await;
    fak.worker_is("w0", "phase", case.before.as_str()).await;
    let (calls, rows) = (scene.peer.calls(), scene.setup.rows().await);
    // The ledger is somebody else's for now.
    let mut writer = sqlx::SqliteConnection::connect(&scene.setup.db()).await.unwrap();
    sqlx::query("BEGIN IMMEDIATE").execute(&mut writer).await.unwrap();
    scene.peer.looked_at_after(scene.ask(&fak)).await;
    fak.kill().await;
    writer.close().await.unwrap();
    assert_eq!(scene.setup.rows().await, rows);
    assert_eq!(scene.peer.calls(), calls, "nothing is called without an intent");
    scene.setup = scene.setup.set("probe_every_ms", 50);
    scene.goes_on(case.before, rows.last().unwrap().seq, true).await;
}

async fn in_the_call(case: &'static Case, hold: Hold) {
    let step = if hold == Hold::Before { "calling" } else { "called" };
    let (scene, fak) = Scene::start(case, step).await;
    scene.peer.hold(case.path, hold);
    tokio::select! {
        () = scene.ask(&fak) => panic!("it was answered"),
        () = scene.peer.held() => {}
    }
    // What is asked is durable, and reads as unknown already.
    let seq = cut_off(&fak.rows().await, case.action);
    fak.kill().await;
    scene.peer.lose();
    assert_eq!(cut_off(&scene.setup.rows().await, case.action), seq);
    let phase = if hold == Hold::Before { case.before } else { case.after };
    scene.goes_on(phase, seq, false).await;
    let rows = scene.setup.rows().await;
    let index = rows.iter().position(|row| row.seq == seq).unwrap();
    cut_off(&rows[..=index], case.action);
}

async fn after_the_outcome(case: &'static Case) {
    let (scene, fak) = Scene::start(case, "after").await;
    let row = fak.act(case.action, &(case.options)()).await;
    assert_eq!((row.phase, row.reason.as_str()), (case.after, "confirmed"));
    fak.kill().await;
    let rows = scene.setup.rows().await;
    assert!(rows.contains(&row), "{row:?}");
    let last = rows.last().unwrap().seq;
    scene.goes_on(case.after, last, true).await;
    assert!(scene.setup.rows().await.contains(&row));
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_before_the_intent_is_durable_nothing_was_called_and_no_row_says_so() {
    for case in &CASES {
        before_the_intent(case).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_before_the_engine_acts_the_row_reads_unknown_and_its_state_is_told_anew() {
    for case in &CASES {
        in_the_call(case, Hold::Before).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_after_the_engine_acted_the_row_reads_unknown_and_nothing_warm_is_left_of_it() {
    for case in &CASES {
        in_the_call(case, Hold::After).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_after_the_outcome_the_row_stands_and_the_next_start_claims_no_more_than_it() {
    for case in &CASES {
        after_the_outcome(case).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_lands_after_the_restart_is_drift() {
    let case = &CASES[0];
    let (scene, fak) = Scene::start(case, "late").await;
    scene.peer.hold(case.path, Hold::Before);
    tokio::select! {
        () = scene.ask(&fak) => panic!("it was answered"),
        () = scene.peer.held() => {}
    }
    fak.kill().await;
    scene.peer.lose();
    let fak = scene.setup.start().await;
    fak.heard("w0").await;
    behind(&scene.sim, "/sleep?level=1").await;
    fak.worker_is("w0", "phase", "sleeping").await;
    let row = fak.rows().await.pop().unwrap();
    assert_eq!((row.action.as_str(), row.kv), ("drift", Disposition::Forgotten), "{row:?}");
    fak.act("wake", &options("wake")).await;
    fak.heard("w0").await;
    for label in 0..WARM {
        let asked = fak.ask_truly(&prompt(label)).await;
        assert_eq!(asked.claimed, 0, "{asked:?}");
    }
}
