//! What an action did, and not what was answered: its order, its effect on the cache and on
//! requests, and what is tried again.

use std::time::Duration;

use fak::lifecycle::{Ending, Request};
use fak_kernel::witness::{Level, Mode, Move, Part, Parts, Quarantine, Reason, Weights};
use fak_kernel::{Disposition, Phase, Tier};
use fak_sim::{Profile, RouteFault, SimConfig};
use tokio::time::timeout;

use super::rig::{Rig, prompt};

const RESET: Move = Move::Reset { external: false, running: false };
const FLUSH: Move = Move::Quarantine(Quarantine::Flush);
const PATIENCE: Duration = Duration::from_secs(10);

fn sleep(level: Level, mode: Mode) -> Move {
    Move::Sleep { level: Some(level), mode, keep_tier: false }
}

fn pause(mode: Mode, clear: bool) -> Move {
    Move::Pause { mode, clear, keep_tier: false }
}

fn wake(tags: Parts, weights: Weights) -> Move {
    Move::Wake { tags, weights }
}

async fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let seen = async {
        while !is_so() {
            tokio::task::yield_now().await;
        }
    };
    timeout(PATIENCE, seen).await.unwrap_or_else(|_| panic!("never: {what}"));
}

#[tokio::test]
async fn a_reset_and_a_flush_wait_for_the_requests_that_are_inside() {
    let rig = Rig::start().await;
    for mv in [RESET, FLUSH] {
        rig.warm(&prompt(1)).await;
        let inside = rig.worker().door.enter().unwrap();
        let hurried = Request { drain: Duration::from_millis(50), ..Request::new(mv) };
        let row = rig.lifecycle.act("w", hurried).await.unwrap();
        assert_eq!((row.evidence.as_str(), &*row.reason), ("not_sent", "drain_timeout"));
        assert!(rig.sim.holds(&prompt(1), None).gpu > 0, "nothing was sent: {mv:?}");
        assert!(rig.claim_on(&prompt(1), Tier::Gpu) > 0, "nothing is given up: {mv:?}");
        let lifecycle = rig.lifecycle.clone();
        let acting = tokio::spawn(async move { lifecycle.act("w", Request::new(mv)).await });
        until("the door is shut", || rig.worker().door.is_shut()).await;
        assert!(rig.worker().door.enter().is_none());
        drop(inside);
        let row = acting.await.unwrap().unwrap();
        assert_eq!((row.kv, &*row.reason), (Disposition::Forgotten, "confirmed"), "{row:?}");
        assert_eq!(rig.sim.holds(&prompt(1), None).gpu, 0);
        assert!(!rig.worker().door.is_shut());
    }
}

#[tokio::test]
async fn a_reset_that_preempts_requests_does_not_wait_for_them() {
    let rig = Rig::start().await;
    let _inside = rig.worker().door.enter().unwrap();
    let row = rig.act(Move::Reset { external: false, running: true }).await;
    assert_eq!((row.kv, &*row.reason), (Disposition::Forgotten, "confirmed"), "{row:?}");
}

#[tokio::test]
async fn the_door_is_shut_and_beliefs_are_cold_while_a_call_is_out() {
    for (mv, path) in [
        (RESET, "/reset_prefix_cache"),
        (pause(Mode::Abort, true), "/pause"),
        (sleep(Level::One, Mode::Abort), "/sleep"),
    ] {
        let rig = Rig::start().await;
        rig.warm(&prompt(1)).await;
        // The engine never answers: what is so now was so before the call left.
        rig.sim.faults().route(path, RouteFault::Hang, 1);
        let lifecycle = rig.lifecycle.clone();
        let acting = tokio::spawn(async move { lifecycle.act("w", Request::new(mv)).await });
        until("the door is shut", || rig.worker().door.is_shut()).await;
        until("beliefs are cold", || rig.claim_on(&prompt(1), Tier::Gpu) == 0).await;
        assert!(rig.worker().door.enter().is_none(), "{path}");
        assert!(!acting.is_finished(), "{path} has no answer");
        assert!(rig.sim.holds(&prompt(1), None).gpu > 0, "the engine did nothing");
        acting.abort();
    }
}

#[tokio::test]
async fn a_stop_after_which_requests_run_on_had_no_effect() {
    for (mv, path) in
        [(pause(Mode::Abort, false), "/pause"), (sleep(Level::One, Mode::Abort), "/sleep")]
    {
        let decode_step = Duration::from_millis(50);
        let rig = Rig::with(SimConfig { decode_step, ..SimConfig::default() }).await;
        let asked = rig.asks(&prompt(1), 2000);
        rig.has_running(1).await;
        // Requests are kept, whatever was asked.
        let kept = &[("mode", "keep"), ("clear_cache", "false"), ("level", "0")];
        rig.sim.faults().route(path, RouteFault::As(kept), 1);
        let row = rig.act(mv).await;
        assert_ne!(Ending::of(&row), Ending::Done, "{row:?}");
        assert_eq!(row.kv, Disposition::Unknown);
        assert_eq!(row.observed["requests"]["after"]["running"], 1.0);
        if path == "/pause" {
            assert_eq!((row.phase, &*row.reason), (Phase::Paused, "no_effect"));
        }
        asked.abort();
    }
}

#[tokio::test]
async fn a_clear_that_drops_nothing_had_no_effect() {
    for mv in [RESET, Move::Reset { external: true, running: false }, FLUSH] {
        let rig = Rig::start().await;
        rig.warm(&prompt(1)).await;
        rig.sim.faults().route("/reset_prefix_cache", RouteFault::Pretend, 1);
        let row = rig.act(mv).await;
        assert_eq!((row.kv, &*row.reason), (Disposition::Unknown, "no_effect"), "{mv:?}");
        assert_eq!((Ending::of(&row), row.serving), (Ending::Failed, true));
        assert_eq!(row.observed["clear"], "missing");
        assert!(rig.sim.holds(&prompt(1), None).gpu > 0);
        let row = rig.act(mv).await;
        assert_eq!((row.kv, &*row.reason), (Disposition::Forgotten, "confirmed"), "{mv:?}");
        assert_eq!(row.observed["clear"], "seen");
    }
}

#[tokio::test]
async fn a_pause_whose_clear_drops_nothing_is_told_once_the_engine_goes_on() {
    let rig = Rig::start().await;
    for (query, reason) in [
        (&[("mode", "abort"), ("clear_cache", "false")], "no_effect"),
        (&[("mode", "abort"), ("clear_cache", "true")], "confirmed"),
    ] {
        rig.warm(&prompt(1)).await;
        rig.sim.faults().route("/pause", RouteFault::As(query), 1);
        rig.act(pause(Mode::Abort, true)).await;
        let row = rig.act(Move::Resume).await;
        assert_eq!((&*row.reason, row.kv), (reason, Disposition::Unknown), "{row:?}");
        assert!(row.serving && Ending::of(&row) == Ending::Done, "the engine goes on");
        rig.act(RESET).await;
    }
}

#[tokio::test]
async fn a_stream_that_stays_silent_proves_no_clear() {
    let rig = Rig::start().await;
    rig.sim.faults().hold_publisher(true);
    let row = rig.act(RESET).await;
    assert_eq!((row.kv, &*row.reason), (Disposition::Unknown, "clear_not_seen"), "{row:?}");
    assert_eq!(Ending::of(&row), Ending::Failed);
    rig.sim.faults().hold_publisher(false);
    let rank = rig.lifecycle.ranks("w").await.unwrap().remove(0);
    let settled = rank.wait_for(|status| status.is_settled && status.tally.clears > 0);
    timeout(PATIENCE, settled).await.unwrap().unwrap();
    // The clear that comes late is fak's own.
    assert!(rig.rows().await.iter().all(|row| row.action.as_str() != "drift"));
}

#[tokio::test]
async fn a_reset_that_the_engine_declines_is_seen_to_leave_the_cache() {
    let rig = Rig::start().await;
    rig.warm(&prompt(1)).await;
    rig.sim.faults().route("/reset_prefix_cache", RouteFault::Decline, 1);
    let row = rig.act(RESET).await;
    assert_eq!((row.kv, &*row.reason), (Disposition::Preserved, "success_false"), "{row:?}");
    assert_eq!(row.tiers.get(Tier::Cpu), Some(Disposition::Preserved));
    assert_eq!((row.evidence.as_str(), row.warm_demoted), ("observed", false));
    assert_eq!(Ending::of(&row), Ending::Failed);
    rig.sim.faults().route("/reset_prefix_cache", RouteFault::Decline, 1);
    let row = rig.act(Move::Reset { external: true, running: false }).await;
    assert_eq!(row.kv, Disposition::Preserved);
    assert_eq!(row.tiers.get(Tier::Cpu), Some(Disposition::Unknown), "it may be wiped");
}

/// vLLM up to 0.25.1 answers a reset without a body.
#[tokio::test]
async fn a_reset_without_a_body_is_proven_by_the_stream_and_is_no_drift() {
    let config = SimConfig { profile: Profile::V0_19, ..SimConfig::default() };
    let rig = Rig::named(config).await;
    for _ in 0..2 {
        rig.warm(&prompt(1)).await;
        let row = rig.act(RESET).await;
        assert_eq!((row.kv, &*row.reason), (Disposition::Forgotten, "confirmed"), "{row:?}");
        assert_eq!(Ending::of(&row), Ending::Done);
    }
    rig.warm(&prompt(2)).await;
    let rows = rig.rows().await;
    assert!(rows.iter().all(|row| row.action.as_str() != "drift"), "{rows:?}");
}

#[tokio::test]
async fn what_an_engine_contradicted_is_believed_no_more() {
    let rig = Rig::start().await;
    rig.warm(&prompt(1)).await;
    let rank = rig.state().ranks[0].id;
    rig.lifecycle.contradicted("w", rank, (64, 0)).await.unwrap();
    rig.look().await;
    assert_eq!(rig.claim(&prompt(1)), 0);
    let row = rig.last_row().await;
    assert_eq!((row.action.as_str(), &*row.reason), ("gap", "contradicted"));
    assert_eq!((row.kv, row.rank), (Disposition::Unknown, Some(0)));
    rig.heard().await;
    rig.warm(&prompt(2)).await;
}

#[tokio::test]
async fn a_row_of_what_was_not_sent_says_preserved_of_what_is_believed_alone() {
    let rig = Rig::start().await;
    let already = wake(Parts::NONE, Weights::Same);
    let row = rig.act(already).await;
    let told: Vec<_> = row.tiers.0.iter().map(|(_, kv)| *kv).collect();
    assert_eq!(told, [Disposition::Preserved; 2], "the marker's block is believed: {row:?}");
    rig.warm(&prompt(1)).await;
    let row = rig.act(already).await;
    assert_eq!((row.evidence.as_str(), row.kv), ("not_sent", Disposition::Preserved));
    rig.act(sleep(Level::One, Mode::Abort)).await;
    let row = rig.act(RESET).await;
    assert_eq!((&*row.reason, row.kv), ("already_asleep", Disposition::Forgotten));
    rig.sim.kill_engine();
    rig.look().await;
    let row = rig.act(sleep(Level::One, Mode::Abort)).await;
    assert_eq!((row.phase, &*row.reason), (Phase::Error, "state_unknown"));
    assert!(row.tiers.0.iter().all(|(_, kv)| *kv == Disposition::Unknown), "{row:?}");
    let rows = rig.rows().await;
    let odd = rows.iter().find(|row| Reason::parse(&row.reason).is_none());
    assert!(odd.is_none(), "a reason outside the list: {odd:?}");
}

#[tokio::test]
async fn a_wake_without_effect_is_tried_once_more_for_the_part_that_sleeps() {
    let rig = Rig::start().await;
    let weights = wake(Parts::of(Part::Weights), Weights::Unproven);
    rig.act(sleep(Level::One, Mode::Abort)).await;
    assert_eq!(rig.act(weights).await.phase, Phase::Waking);
    rig.sim.faults().route("/wake_up", RouteFault::Pretend, 1);
    let row = rig.act(wake(Parts::NONE, Weights::Same)).await;
    assert!(row.serving, "{row:?}");
    assert_eq!(row.asked["call"], "/wake_up?tags=kv_cache");
}

#[tokio::test]
async fn the_part_that_is_awake_outlives_a_wake_without_effect_and_a_restart_of_fak() {
    for is_restarted in [false, true] {
        let mut rig = Rig::start().await;
        let weights = wake(Parts::of(Part::Weights), Weights::Unproven);
        rig.act(sleep(Level::One, Mode::Abort)).await;
        rig.act(weights).await;
        rig.sim.faults().route("/wake_up", RouteFault::Pretend, 2);
        // By who woke the weights' memory, and so loaded others.
        let rest = wake(Parts::NONE, Weights::Loaded);
        let row = rig.act(rest).await;
        assert_eq!((row.phase, row.serving), (Phase::Waking, false), "{row:?}");
        assert!(row.answered.to_string().contains("still_asleep"), "no reset is sent: {row:?}");
        assert!(rig.state().standing.weights_proven, "level 1 keeps them");
        let row = if is_restarted {
            rig.fak_ends().await;
            let second = rig.second_fak().await;
            assert_eq!(second.state().phase(), Phase::Waking);
            second.act(wake(Parts::NONE, Weights::Same)).await
        } else {
            rig.act(wake(Parts::NONE, Weights::Same)).await
        };
        assert_eq!(row.asked["calls"][0], "/wake_up?tags=kv_cache", "{row:?}");
        assert!(row.serving, "{row:?}");
    }
}

#[tokio::test]
async fn a_request_that_was_queued_in_a_sleeping_engine_does_not_keep_it_out() {
    for level in [Level::One, Level::Two] {
        let decode_step = Duration::from_millis(5);
        let rig = Rig::with(SimConfig { decode_step, ..SimConfig::default() }).await;
        rig.act(sleep(level, Mode::Abort)).await;
        if level == Level::Two {
            rig.act(wake(Parts::of(Part::Weights), Weights::Unproven)).await;
            rig.reload_behind().await;
        }
        let queued = rig.asks(&prompt(1), 60);
        until("it is queued", || rig.sim.requests_in_flight() > 0).await;
        // It may run by the time of the reset that follows the wake, and then this is the answer.
        rig.sim.faults().route("/reset_prefix_cache", RouteFault::Decline, 1);
        let row = rig.act(wake(Parts::NONE, Weights::Loaded)).await;
        assert!(row.serving && row.reason == "confirmed", "{row:?}");
        assert_eq!(row.kv, Disposition::Forgotten);
        assert_eq!(queued.await.unwrap(), 200);
    }
}

#[tokio::test]
async fn a_weight_version_that_no_ledger_can_hold_stops_nothing() {
    let rig = Rig::start().await;
    let long = "v".repeat(1100);
    let mut seen = Vec::new();
    for version in ["a\0b", "a\nb", &long] {
        rig.name_version(version).await;
        rig.look().await;
        let row = rig.last_row().await;
        assert_eq!(row.action.as_str(), "weights", "{version:?}");
        let told = row.weight_version.unwrap();
        assert!(!told.contains(char::is_control) && told.len() < 400, "{told:?}");
        assert!(!seen.contains(&told), "{told:?} names two");
        seen.push(told);
        let row = rig.act(pause(Mode::Keep, false)).await;
        assert_eq!(Ending::of(&row), Ending::Done, "{version:?}: {row:?}");
        rig.act(Move::Resume).await;
    }
}

#[tokio::test]
async fn a_worker_joins_once_and_a_start_of_fak_that_finds_it_as_it_was_has_no_row() {
    let rig = Rig::start().await;
    rig.post("/sleep?level=1").await;
    rig.look().await;
    let actions: Vec<_> = rig.rows().await.iter().map(|row| row.action.as_str()).collect();
    assert_eq!(actions, ["join", "drift"]);
    let slept = rig.last_row().await.seq;
    for _ in 0..2 {
        let second = rig.second_fak().await;
        assert_eq!(second.state().phase(), Phase::Sleeping);
        assert_eq!(second.state().last_witness, Some(slept));
        assert_eq!(rig.last_row().await.seq, slept, "nothing joined, and nothing moved");
    }
    rig.post("/wake_up").await;
    let second = rig.second_fak().await;
    assert!(second.state().is_serving());
    let row = rig.last_row().await;
    assert_eq!((row.seq, row.action.as_str(), row.phase), (slept + 1, "drift", Phase::Serving));
}
