//! What a fak that starts anew takes over of a worker from the ledger, because the engine does not
//! show it.

use std::time::Duration;

use fak::events::stream::Status;
use fak::lifecycle::{Begin, Ending};
use fak::store::{NewIntent, Outcome, Row, Store, Tiers};
use fak_kernel::rank::Trust;
use fak_kernel::witness::{Level, Mode, Move, Parts, Weights};
use fak_kernel::{Action, Disposition, Evidence, Phase, Tier, TierSet};
use fak_sim::{Connector, RouteFault, SimConfig};
use serde_json::Value;
use tokio::time::timeout;

use super::rig::{Rig, Second, prompt};
use super::rollout::{begin, end};

const CPU: TierSet = TierSet::of(Tier::Cpu);

fn sleep(level: Level) -> Move {
    Move::Sleep { level: Some(level), mode: Mode::Abort, keep_tier: false }
}

fn wake(weights: Weights) -> Move {
    Move::Wake { tags: Parts::NONE, weights }
}

fn stale(second: &Second) -> TierSet {
    second.state().standing.stale
}

#[tokio::test]
async fn weights_that_a_sleep_dropped_are_not_proven_by_an_engine_that_is_awake() {
    let mut rig = Rig::start().await;
    rig.act(sleep(Level::Two)).await;
    rig.fak_ends().await;
    rig.post("/wake_up").await;
    let second = rig.second_fak().await;
    assert_eq!(second.state().phase(), Phase::Waking);
    assert!(!second.state().is_serving());
    let row = second.act(wake(Weights::Loaded)).await;
    assert!(row.serving && row.reason == "confirmed", "{row:?}");
    assert!(rig.second_fak().await.state().is_serving(), "and what was proven stays so");
}

#[tokio::test]
async fn tiers_with_kv_of_other_weights_stay_so_until_a_row_says_that_they_are_empty() {
    let rig = Rig::start().await;
    rig.name_version("v8").await;
    rig.look().await;
    let both = TierSet::GPU.with(CPU);
    assert_eq!(stale(&rig.second_fak().await), both);
    rig.sim.faults().route("/reset_prefix_cache", RouteFault::Decline, 1);
    rig.act(Move::Reset { external: true, running: false }).await;
    assert_eq!(stale(&rig.second_fak().await), both, "declined");
    rig.act(Move::Reset { external: false, running: false }).await;
    assert_eq!(stale(&rig.second_fak().await), CPU);
    rig.act(Move::Reset { external: true, running: false }).await;
    assert_eq!(stale(&rig.second_fak().await), TierSet::NONE);
}

#[tokio::test]
async fn a_call_whose_outcome_was_never_written_leaves_the_worst_that_it_may_have_done() {
    let mut rig = Rig::start().await;
    rig.act(sleep(Level::One)).await;
    rig.sim.faults().route("/reset_prefix_cache", RouteFault::Hang, 1);
    rig.fak_dies_in(wake(Weights::Loaded)).await;
    let row = rig.last_row().await;
    assert_eq!((row.action, &*row.reason), (Action::Wake, "unrecorded"));
    let second = rig.second_fak().await;
    let state = second.state();
    let standing = state.standing;
    assert_eq!((standing.stale, standing.weights_proven), (TierSet::GPU.with(CPU), false));
    assert_eq!((state.phase(), state.weights_epoch), (Phase::Waking, Some(row.seq)));
    let row = second.act(wake(Weights::Loaded)).await;
    assert!(row.serving && row.kv == Disposition::Forgotten, "{row:?}");
}

#[tokio::test]
async fn a_worker_that_answers_otherwise_than_before_its_sleep_stays_out() {
    let mut rig = Rig::start().await;
    rig.lifecycle.begin("w", Begin { canary: true, ..begin() }).await.unwrap();
    rig.sim.set_checkpoint(9);
    rig.reload_behind().await;
    let ended = rig.lifecycle.end("w", end(Weights::Same)).await.unwrap();
    assert_eq!((ended.ending, &*ended.reason), (Ending::Failed, "canary_mismatch"));
    let second = rig.second_fak().await;
    assert!(second.state().standing.suspect);
    assert_eq!(second.state().phase(), Phase::Error);
}

#[tokio::test]
async fn an_engine_that_restarted_while_no_fak_looked_is_noticed() {
    // Beside a store that outlives it, the new process's own version is a change of weights.
    let outliving = TierSet::GPU.with(TierSet::of(Tier::Cpu));
    for (connector, left) in
        [(Connector::Offloading, TierSet::NONE), (Connector::Mooncake, outliving)]
    {
        let mut rig = Rig::with(SimConfig { connector, ..SimConfig::default() }).await;
        rig.act(sleep(Level::One)).await;
        rig.act(wake(Weights::Loaded)).await;
        let epoch = rig.state().weights_epoch;
        rig.name_version("v8").await;
        rig.look().await;
        rig.act(sleep(Level::Two)).await;
        rig.fak_ends().await;
        let slept = rig.last_row().await;
        rig.sim.restart().await.unwrap();
        let second = rig.second_fak().await;
        let rows = rig.rows().await;
        let row = rows.iter().find(|row| row.seq == slept.seq + 1).unwrap();
        assert_eq!((row.action, row.kv), (Action::Restart, Disposition::Forgotten), "{row:?}");
        assert_ne!(row.incarnation, slept.incarnation);
        assert_eq!(stale(&second), left);
        assert!(second.state().is_serving(), "it has loaded its weights");
        assert!(epoch.is_some() && second.state().weights_epoch != epoch);
    }
}

#[tokio::test]
async fn of_a_ledger_that_tells_nothing_of_it_the_worst_is_thought() {
    let rig = Rig::start().await;
    for (serving, phase) in [(true, Phase::Serving), (false, Phase::Waking)] {
        let store = Store::open("sqlite::memory:").await.unwrap();
        let Row { incarnation, .. } = rig.last_row().await;
        let intent = NewIntent {
            worker: "w".to_owned(),
            rank: None,
            incarnation,
            session: None,
            action: Action::Drift,
            level: None,
            weight_version: None,
            warm_demoted: true,
            asked: Value::Null,
            standing: None,
            is_epoch: false,
        };
        let outcome = Outcome {
            phase,
            kv: Disposition::Unknown,
            tiers: Tiers(vec![(Tier::Gpu, Disposition::Unknown)]),
            weight_version: None,
            warm_demoted: true,
            serving,
            evidence: Evidence::Observed,
            answered: Value::Null,
            observed: Value::Null,
            reason: "noticed".to_owned(),
            standing: None,
        };
        let row = store.note(intent, outcome).await.unwrap();
        let state = rig.fak_on(&store).await.state();
        assert_eq!((state.phase(), state.standing.stale), (phase, TierSet::ALL));
        assert_eq!(state.weights_epoch, Some(row.seq));
    }
}

#[tokio::test]
async fn a_clear_that_an_earlier_fak_left_owed_is_nobody_elses() {
    let mut rig = Rig::start().await;
    rig.warm(&prompt(1)).await;
    rig.act(Move::Reset { external: false, running: false }).await;
    rig.warm(&prompt(1)).await;
    // A paused engine takes no step, and publishes its clear with the next.
    rig.act(Move::Pause { mode: Mode::Abort, clear: true, keep_tier: false }).await;
    rig.fak_ends().await;
    let second = rig.second_fak().await;
    assert!(second.state().is_recovering, "nothing counts before the clear is in");
    let row = second.act(Move::Resume).await;
    assert!(row.serving, "{row:?}");
    let rank = second.lifecycle.ranks("w").await.unwrap().remove(0);
    let is_in = |status: &Status| status.trust == Trust::Exact && status.tally.clears > 1;
    timeout(Duration::from_secs(10), rank.wait_for(is_in)).await.unwrap().unwrap();
    second.lifecycle.look("w").await.unwrap();
    assert!(!second.state().is_recovering);
    let rows = rig.rows().await;
    assert_eq!(rows.last().unwrap().action, Action::Resume, "{rows:?}");
    assert!(rows.iter().all(|row| row.action != Action::Drift), "{rows:?}");
    // One that comes after it is.
    rig.post("/reset_prefix_cache").await;
    rig.ask(&prompt(2)).await;
    let cleared = rank.wait_for(|status| status.tally.clears > 2);
    timeout(Duration::from_secs(10), cleared).await.unwrap().unwrap();
    second.lifecycle.look("w").await.unwrap();
    assert_eq!(rig.last_row().await.action, Action::Drift);
}

/// The first batch that the second fak hears is older than the clear.
#[tokio::test]
async fn a_clear_that_was_left_owed_is_nobody_elses_behind_a_batch_of_before() {
    let mut rig = Rig::start().await;
    rig.warm(&prompt(1)).await;
    rig.sim.faults().hold_publisher(true);
    rig.ask(&prompt(2)).await;
    rig.act(Move::Pause { mode: Mode::Abort, clear: true, keep_tier: false }).await;
    rig.fak_ends().await;
    let second = rig.second_fak().await;
    let rank = second.lifecycle.ranks("w").await.unwrap().remove(0);
    timeout(Duration::from_secs(10), rank.wait_for(|status| status.connections > 0))
        .await
        .unwrap()
        .unwrap();
    rig.sim.faults().hold_publisher(false);
    let row = second.act(Move::Resume).await;
    assert!(row.serving, "{row:?}");
    let is_in = |status: &Status| status.trust == Trust::Exact && status.tally.clears > 0;
    timeout(Duration::from_secs(10), rank.wait_for(is_in)).await.unwrap().unwrap();
    second.lifecycle.look("w").await.unwrap();
    let rows = rig.rows().await;
    assert!(rows.iter().all(|row| row.action != Action::Drift), "{rows:?}");
}
