//! What an action waits for is shown, the worker is looked at meanwhile, and the wait can be ended.

use std::time::Duration;

use fak::fleet::Busy;
use fak::lifecycle::{Begin, Ending, Error, Request};
use fak::store::Row;
use fak_kernel::witness::{Level, Mode, Move};
use fak_kernel::{Action, Phase};
use fak_sim::RouteFault;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::rig::{Rig, prompt};
use super::rollout::begin;

const HOUR: Duration = Duration::from_secs(3600);
const RESET: Move = Move::Reset { external: false, running: false };
const SLEEP: Move = Move::Sleep { level: Some(Level::One), mode: Mode::Wait, keep_tier: false };

/// An action that waits for an hour, if need be, once it is seen to wait.
async fn draining(rig: &Rig, mv: Move) -> JoinHandle<Row> {
    let lifecycle = rig.lifecycle.clone();
    let request = Request { drain: HOUR, holder: Some("h".into()), ..Request::new(mv) };
    let acting = tokio::spawn(async move { lifecycle.act("w", request).await.unwrap() });
    drains(rig).await;
    acting
}

async fn drains(rig: &Rig) {
    let shown = async {
        while !rig.state().busy.as_ref().is_some_and(Busy::is_draining) {
            tokio::task::yield_now().await;
        }
    };
    timeout(Duration::from_secs(10), shown).await.unwrap();
}

#[tokio::test]
async fn a_drain_is_shown_and_the_worker_is_looked_at_while_it_lasts() {
    let rig = Rig::start().await;
    assert_eq!(rig.state().busy, None);
    let inside = rig.worker().door.enter().unwrap();
    let acting = draining(&rig, RESET).await;
    let state = rig.state();
    assert!(!state.is_serving() && state.keeps_requests(), "those inside may stay");
    let busy = state.busy.clone().unwrap();
    assert_eq!((busy.action, busy.holder.as_deref()), (Action::Reset, Some("h")));
    let told = busy.json(rig.worker().door.in_flight());
    assert_eq!((&told["stage"], &told["waits_for"]), (&"drains".into(), &1.into()));
    let left = told["waits_ms_max"].as_u64().unwrap();
    assert!(left > 3_500_000 && left <= 3_600_000, "{left}");
    // Who asks meanwhile is told with what it is busy.
    let row = rig.act(SLEEP).await;
    assert_eq!((row.action, &*row.reason), (Action::Sleep, "busy"));
    assert_eq!(row.asked["busy_with"]["action"], "reset");
    assert_eq!(row.asked["busy_with"]["waits_for"], 1);
    rig.name_version("v9").await;
    rig.look().await;
    assert_eq!(rig.state().weight_version.as_deref(), Some("v9"), "a look takes it in");
    assert!(rig.worker().door.is_shut() && !acting.is_finished(), "and opens no door");
    drop(inside);
    let row = acting.await.unwrap();
    assert_eq!(&*row.reason, "confirmed", "{row:?}");
    assert!(rig.state().is_serving() && rig.state().busy.is_none());
}

#[tokio::test]
async fn looks_go_on_by_themselves_while_a_drain_lasts() {
    let rig = Rig::watched().await;
    let inside = rig.worker().door.enter().unwrap();
    let acting = draining(&rig, RESET).await;
    rig.name_version("v9").await;
    let seen = async {
        while rig.state().weight_version.as_deref() != Some("v9") {
            tokio::task::yield_now().await;
        }
    };
    timeout(Duration::from_secs(10), seen).await.unwrap();
    assert!(rig.worker().door.is_shut() && !acting.is_finished());
    drop(inside);
    assert_eq!(&*acting.await.unwrap().reason, "confirmed");
}

#[tokio::test]
async fn what_is_sent_after_a_drain_is_planned_by_how_the_engine_stands_then() {
    let rig = Rig::start().await;
    let inside = rig.worker().door.enter().unwrap();
    let acting = draining(&rig, SLEEP).await;
    rig.post("/sleep?level=2").await;
    drop(inside);
    let row = acting.await.unwrap();
    assert_eq!((row.evidence.as_str(), &*row.reason), ("not_sent", "already_asleep"));
    assert_eq!(rig.state().phase(), Phase::Sleeping);
    assert!(!rig.state().standing.weights_proven, "somebody dropped them");
}

#[tokio::test]
async fn a_drain_can_be_cancelled_and_the_worker_serves_on() {
    let rig = Rig::start().await;
    rig.warm(&prompt(1)).await;
    let _inside = rig.worker().door.enter().unwrap();
    for mv in [RESET, SLEEP] {
        let acting = draining(&rig, mv).await;
        let row = rig.lifecycle.cancel("w").await.unwrap();
        assert_eq!((row.action, row.evidence.as_str()), (mv.action(), "not_sent"));
        assert_eq!((&*row.reason, Ending::of(&row)), ("cancelled", Ending::Refused));
        assert!(!rig.worker().door.is_shut() && rig.state().is_serving(), "the door is open");
        assert!(rig.state().busy.is_none());
        assert_eq!(acting.await.unwrap(), row, "who asked is told by the same row");
        assert_eq!(rig.last_row().await, row);
    }
    assert!(rig.sim.holds(&prompt(1), None).gpu > 0, "nothing was sent");
    // Of a rollout's begin the hold goes too.
    let lifecycle = rig.lifecycle.clone();
    let begin = Begin { drain: HOUR, ..begin() };
    let beginning = tokio::spawn(async move { lifecycle.begin("w", begin).await.unwrap() });
    drains(&rig).await;
    assert_eq!(rig.state().held_by.as_deref(), Some("trainer"));
    rig.lifecycle.cancel("w").await.unwrap();
    let begun = beginning.await.unwrap();
    assert_eq!((begun.ending, &*begun.reason), (Ending::Refused, "cancelled"));
    assert!(rig.state().held_by.is_none() && rig.state().is_serving());
}

#[tokio::test]
async fn what_does_not_wait_cannot_be_cancelled() {
    let rig = Rig::start().await;
    let cancelled = rig.lifecycle.cancel("w").await;
    assert!(matches!(cancelled, Err(Error::NothingToCancel { busy: None, .. })), "{cancelled:?}");
    rig.sim.faults().route("/sleep", RouteFault::Hang, 1);
    let lifecycle = rig.lifecycle.clone();
    let acting = tokio::spawn(async move { lifecycle.act("w", Request::new(SLEEP)).await });
    let runs = async {
        while !rig.state().busy.as_ref().is_some_and(Busy::shuts_door) {
            tokio::task::yield_now().await;
        }
    };
    timeout(Duration::from_secs(10), runs).await.unwrap();
    let cancelled = rig.lifecycle.cancel("w").await;
    let told = cancelled.unwrap_err().to_string();
    assert!(told.contains("its engine is called for sleep 1"), "{told}");
    acting.abort();
    assert!(matches!(rig.lifecycle.cancel("nobody").await, Err(Error::UnknownWorker(_))));
}
