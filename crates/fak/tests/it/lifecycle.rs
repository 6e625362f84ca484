//! Owners of workers against simulated engines that know the truth: each action ends in the row of
//! the decision table, and no claim outlives what it was made on.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod drain;
mod effects;
mod faults;
mod found;
mod front;
mod identity;
mod inherit;
mod learn;
mod mixed;
mod rig;
mod rollout;
mod scripted;
mod weights;

use std::time::Duration;

use fak_kernel::witness::{Level, Mode, Move, Part, Parts, Weights};
use fak_kernel::{Disposition, Phase, Tier};
use fak_sim::SimConfig;
use serde_json::json;

use rig::{Rig, prompt};

fn sleep(level: Level) -> Move {
    Move::Sleep { level: Some(level), mode: Mode::Abort, keep_tier: false }
}

fn wake() -> Move {
    Move::Wake { tags: Parts::NONE, weights: Weights::Same }
}

const RESET: Move = Move::Reset { external: false, running: false };
const PAUSE: Move = Move::Pause { mode: Mode::Keep, clear: false, keep_tier: false };

#[tokio::test]
async fn a_worker_that_is_met_awake_serves_and_has_a_row() {
    let rig = Rig::start().await;
    let state = rig.state();
    assert!(state.is_serving() && !rig.worker().door.is_shut());
    assert_eq!(state.models.names().map(|m| &**m).collect::<Vec<_>>(), ["tiny"]);
    let row = rig.last_row().await;
    assert_eq!((row.action.as_str(), row.kv), ("join", Disposition::Unknown));
    assert_eq!(row.phase, Phase::Serving);
    assert_eq!(row.weight_version.as_deref(), Some("default"));
}

/// Its requests' clocks go by that: they stand still from the call on, and start anew.
#[tokio::test]
async fn a_worker_is_kept_at_rest_by_fak_alone_and_until_it_goes_on() {
    let resume = Move::Resume;
    for (rests, goes_on) in [(PAUSE, resume), (sleep(Level::One), wake())] {
        let rig = Rig::start().await;
        assert!(!rig.state().pace.is_kept_at_rest);
        rig.act(rests).await;
        assert!(rig.state().pace.is_kept_at_rest);
        rig.look().await;
        assert!(rig.state().pace.is_kept_at_rest, "a look moves nothing");
        let before = tokio::time::Instant::now();
        rig.act(goes_on).await;
        let pace = rig.state().pace;
        assert!(!pace.is_kept_at_rest && pace.moved_at >= Some(before), "{pace:?}");
    }
    let rig = Rig::start().await;
    rig.post("/pause?mode=keep&clear_cache=false").await;
    rig.look().await;
    assert_eq!(rig.state().phase(), Phase::Paused);
    assert!(!rig.state().pace.is_kept_at_rest, "by somebody else");
}

/// What others sent there is load; what this fak sent is told apart by how much it had there then.
#[tokio::test]
async fn a_look_counts_the_requests_on_a_worker_and_faks_own() {
    let rig = Rig::start().await;
    let at_first = rig.state().counted.unwrap();
    assert_eq!((at_first.requests, at_first.own), (0, 0));
    let own = [rig.worker().door.enter().unwrap(), rig.worker().door.enter().unwrap()];
    rig.look().await;
    let counted = rig.state().counted.unwrap();
    assert_eq!((counted.requests, counted.own), (0, 2));
    assert!(counted.at > at_first.at);
    drop(own);
}

#[tokio::test]
async fn a_sleep_and_a_wake_forget_and_fresh_stores_are_claimed_again() {
    for level in [Level::One, Level::Two] {
        let rig = Rig::start().await;
        rig.warm(&prompt(1)).await;
        let row = rig.act(sleep(level)).await;
        assert_eq!((row.phase, row.kv), (Phase::Sleeping, Disposition::Forgotten));
        assert_eq!(row.tiers.get(Tier::Cpu), Some(Disposition::Forgotten));
        assert!(row.warm_demoted && !row.serving);
        assert_eq!(row.evidence.as_str(), "observed");
        assert!(rig.worker().door.is_shut() && !rig.state().is_serving());
        assert_eq!(rig.claim(&prompt(1)), 0);
        let mut kv = Disposition::Unknown;
        if level == Level::Two {
            let weights = Parts::of(Part::Weights);
            rig.act(Move::Wake { tags: weights, weights: Weights::Unproven }).await;
            rig.reload_behind().await;
            kv = Disposition::Forgotten;
        }
        let row = rig.act(wake()).await;
        assert_eq!((row.phase, row.kv), (Phase::Serving, kv));
        assert_eq!(rig.claim(&prompt(1)), 0, "nothing was stored since");
        assert!(!rig.worker().door.is_shut());
        rig.warm(&prompt(1)).await;
        assert_eq!(rig.claim(&prompt(1)), rig.sim.holds(&prompt(1), None).gpu);
    }
}

#[tokio::test]
async fn a_preserving_pause_keeps_what_was_claimed() {
    let rig = Rig::start().await;
    rig.warm(&prompt(1)).await;
    let claimed = rig.claim(&prompt(1));
    let row = rig.act(PAUSE).await;
    assert_eq!((row.phase, row.kv), (Phase::Paused, Disposition::Preserved));
    assert!(!row.warm_demoted);
    let row = rig.act(Move::Resume).await;
    assert_eq!((row.phase, row.kv), (Phase::Serving, Disposition::Preserved));
    assert_eq!(rig.claim(&prompt(1)), claimed);
    assert_eq!(rig.sim.holds(&prompt(1), None).gpu, claimed);
}

#[tokio::test]
async fn a_reset_forgets_the_gpu_and_keeps_the_cpu_tier() {
    let rig = Rig::start().await;
    rig.warm(&prompt(1)).await;
    rig.ask(&prompt(2)).await;
    let row = rig.act(RESET).await;
    assert_eq!((row.phase, row.kv), (Phase::Serving, Disposition::Forgotten));
    assert_eq!(row.tiers.get(Tier::Cpu), Some(Disposition::Preserved));
    assert_eq!(rig.claim_on(&prompt(1), Tier::Gpu), 0);
}

#[tokio::test]
async fn without_a_replay_socket_a_marker_settles_the_action_before_the_door_opens() {
    let rig = Rig::without_replay().await;
    rig.warm(&prompt(1)).await;
    rig.act(RESET).await;
    let ranks = rig.lifecycle.ranks("w").await.unwrap();
    assert!(ranks[0].status().is_settled && !rig.worker().door.is_shut());
    assert_eq!(rig.claim_on(&prompt(1), Tier::Gpu), 0);
    rig.warm(&prompt(2)).await;
}

/// No call relies on a default of the engine's, and its row says what it did to requests.
#[tokio::test]
async fn case_34_a_row_tells_what_its_action_did_to_running_requests() {
    for (mode, word, after) in [(Mode::Abort, "abort", 0.0), (Mode::Keep, "keep", 2.0)] {
        // So slow that nothing ends by itself before the pause.
        let decode_step = Duration::from_millis(100);
        let rig = Rig::with(SimConfig { decode_step, ..SimConfig::default() }).await;
        let asks = [rig.asks(&prompt(1), 500), rig.asks(&prompt(2), 500)];
        rig.has_running(2).await;
        let row = rig.act(Move::Pause { mode, clear: false, keep_tier: false }).await;
        assert_eq!(row.asked["call"], format!("/pause?mode={word}&clear_cache=false"));
        let requests = &row.observed["requests"];
        assert_eq!(requests["before"], json!({"running": 2.0, "waiting": 0.0}));
        assert_eq!(requests["after"]["running"], after, "{word}: {requests}");
        asks.iter().for_each(tokio::task::JoinHandle::abort);
    }
}

#[tokio::test]
async fn repeated_and_illegal_moves_are_answered_and_never_sent() {
    let rig = Rig::start().await;
    rig.act(sleep(Level::One)).await;
    let paused = rig.act(PAUSE).await;
    let again = rig.act(sleep(Level::One)).await;
    let resume = rig.act(Move::Resume).await;
    for row in [paused, again, resume] {
        assert_eq!((row.evidence.as_str(), row.phase), ("not_sent", Phase::Sleeping));
        assert_eq!(row.reason, "already_asleep");
    }
    rig.act(wake()).await;
    let row = rig.act(wake()).await;
    assert_eq!((row.evidence.as_str(), &*row.reason), ("not_sent", "already_awake"));
    let unnamed = Move::Sleep { level: None, mode: Mode::Abort, keep_tier: false };
    assert_eq!(rig.act(unnamed).await.evidence.as_str(), "not_sent");
}

#[tokio::test]
async fn a_sleep_behind_faks_back_is_drift_within_one_look() {
    let rig = Rig::start().await;
    rig.warm(&prompt(1)).await;
    rig.post("/sleep?level=1").await;
    rig.look().await;
    let row = rig.last_row().await;
    assert_eq!((row.action.as_str(), row.phase), ("drift", Phase::Sleeping));
    assert_eq!(row.kv, Disposition::Forgotten);
    assert!(!rig.state().is_serving() && rig.worker().door.is_shut());
    assert_eq!(rig.claim(&prompt(1)), 0);
    rig.post("/wake_up").await;
    rig.look().await;
    assert!(rig.state().is_serving());
    assert_eq!(rig.claim(&prompt(1)), 0);
    rig.warm(&prompt(2)).await;
}

#[tokio::test]
async fn a_restart_is_a_row_and_forgets() {
    let mut rig = Rig::start().await;
    rig.warm(&prompt(1)).await;
    let before = rig.state().incarnation.clone();
    rig.sim.restart().await.unwrap();
    rig.look().await;
    let rows = rig.rows().await;
    assert!(rows.iter().any(|r| r.action.as_str() == "restart" && r.kv == Disposition::Forgotten));
    assert_ne!(rig.state().incarnation, before);
    assert_eq!(rig.claim(&prompt(1)), 0);
    rig.warm(&prompt(3)).await;
}

#[tokio::test]
async fn a_keep_tier_sleep_is_refused_before_anything_is_paused() {
    let rig = Rig::start().await;
    rig.warm(&prompt(1)).await;
    let claimed = rig.claim(&prompt(1));
    let keep = Move::Sleep { level: Some(Level::One), mode: Mode::Abort, keep_tier: true };
    let row = rig.act(keep).await;
    assert_eq!((row.evidence.as_str(), &*row.reason), ("not_sent", "keep_tier_not_proven"));
    assert!(rig.state().is_serving() && !rig.worker().door.is_shut());
    assert_eq!(rig.claim(&prompt(1)), claimed);
}
