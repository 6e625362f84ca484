//! What goes wrong in an action: each ends in a row that claims nothing, and in a state that an
//! operator can leave again.

use fak_kernel::witness::{Level, Mode, Move, Parts, Weights};
use fak_kernel::{Disposition, Phase};
use fak_sim::RouteFault;

use super::rig::{Rig, prompt};

fn sleep() -> Move {
    Move::Sleep { level: Some(Level::One), mode: Mode::Abort, keep_tier: false }
}

const RESET: Move = Move::Reset { external: false, running: false };

fn wake() -> Move {
    Move::Wake { tags: Parts::NONE, weights: Weights::Same }
}

#[tokio::test]
async fn a_sleep_that_was_done_and_answered_500_proves_nothing_and_can_be_woken() {
    let rig = Rig::start().await;
    rig.warm(&prompt(1)).await;
    rig.sim.faults().route("/sleep", RouteFault::FailAfter(500), 1);
    let row = rig.act(sleep()).await;
    assert_eq!((row.kv, &*row.reason), (Disposition::Unknown, "failed"));
    assert!(!row.serving && rig.worker().door.is_shut());
    assert_eq!(rig.claim(&prompt(1)), 0);
    let row = rig.act(wake()).await;
    assert!(row.serving, "{row:?}");
    assert_eq!(rig.claim(&prompt(1)), 0);
}

#[tokio::test]
async fn a_sleep_that_was_not_done_and_answered_500_is_an_error_until_observed() {
    let rig = Rig::start().await;
    rig.warm(&prompt(1)).await;
    rig.sim.faults().route("/sleep", RouteFault::Fail(500), 1);
    let row = rig.act(sleep()).await;
    assert_eq!((row.phase, row.kv), (Phase::Error, Disposition::Unknown));
    assert!(rig.worker().door.is_shut());
    rig.look().await;
    assert!(rig.state().is_serving());
    assert_eq!(rig.claim(&prompt(1)), 0, "unknown is not preserved");
}

#[tokio::test]
async fn a_call_without_an_answer_in_time_is_unknown() {
    let rig = Rig::hurried().await;
    rig.warm(&prompt(1)).await;
    rig.sim.faults().route("/reset_prefix_cache", RouteFault::Hang, 1);
    let row = rig.act(RESET).await;
    assert_eq!((row.kv, &*row.reason), (Disposition::Unknown, "timeout"));
    assert!(!row.serving);
    assert_eq!(rig.claim(&prompt(1)), 0);
    rig.look().await;
    assert!(rig.state().is_serving());
}

#[tokio::test]
async fn the_second_of_two_commands_at_once_is_answered_and_not_sent() {
    let rig = Rig::hurried().await;
    rig.sim.faults().route("/sleep", RouteFault::Hang, 1);
    let (first, second) = tokio::join!(rig.act(sleep()), rig.act(sleep()));
    assert_eq!(&*first.reason, "timeout");
    assert_eq!((second.evidence.as_str(), &*second.reason), ("not_sent", "busy"));
}

#[tokio::test]
async fn a_drain_that_does_not_end_refuses_the_sleep_and_opens_the_door_again() {
    let rig = Rig::start().await;
    let inside = rig.worker().door.enter().unwrap();
    let mv = Move::Sleep { level: Some(Level::One), mode: Mode::Wait, keep_tier: false };
    let drain = std::time::Duration::from_millis(50);
    let request = fak::lifecycle::Request { drain, ..fak::lifecycle::Request::new(mv) };
    let row = rig.lifecycle.act("w", request).await.unwrap();
    assert_eq!((row.evidence.as_str(), &*row.reason), ("not_sent", "drain_timeout"));
    assert!(rig.state().is_serving() && !rig.worker().door.is_shut());
    drop(inside);
    assert_eq!(rig.act(mv).await.phase, Phase::Sleeping);
}

#[tokio::test]
async fn a_wake_that_leaves_a_part_asleep_does_not_serve() {
    let rig = Rig::start().await;
    rig.act(sleep()).await;
    rig.sim.faults().partial_wakes(1);
    let row = rig.act(wake()).await;
    assert!(!row.serving);
    assert_ne!(row.phase, Phase::Serving);
    assert!(rig.worker().door.is_shut());
    let row = rig.act(wake()).await;
    assert!(row.serving, "{row:?}");
}
