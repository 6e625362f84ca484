//! A rollout's pause: the device is told free only when it is, the worker is its holder's until it
//! serves again, and what its holder says of the weights decides what is left of the KV.

use fak::lifecycle::{Begin, Begun, Canary, DRAIN, End, Ended, Ending, Request};
use fak_kernel::witness::{Level, Mode, Move, Parts, Weights};
use fak_kernel::{Disposition, Phase, Tier};
use fak_sim::{Connector, Profile, RouteFault, SimConfig};
use std::time::Duration;

use super::rig::{Rig, prompt};

pub(super) fn begin() -> Begin {
    Begin {
        holder: "trainer".to_owned(),
        level: Level::One,
        mode: Mode::Wait,
        keep_tier: false,
        allow_evict: false,
        drain: DRAIN,
        canary: false,
    }
}

pub(super) fn end(weights: Weights) -> End {
    End {
        holder: "trainer".to_owned(),
        weights,
        version: None,
        is_weights_only: false,
        canary: None,
    }
}

async fn begun(rig: &Rig, begin: Begin) -> Begun {
    rig.lifecycle.begin("w", begin).await.unwrap()
}

async fn ended(rig: &Rig, end: End) -> Ended {
    rig.lifecycle.end("w", end).await.unwrap()
}

fn wake() -> Move {
    Move::Wake { tags: Parts::NONE, weights: Weights::Same }
}

#[tokio::test]
async fn a_worker_is_its_holders_from_the_sleep_until_it_serves_again() {
    let rig = Rig::start().await;
    rig.warm(&prompt(1)).await;
    let began = begun(&rig, begin()).await;
    assert_eq!((began.ending, began.running), (Ending::Done, Some(0)), "{began:?}");
    assert_eq!((began.phase, began.held_by.as_deref()), (Phase::Sleeping, Some("trainer")));
    assert_eq!(began.row.kv, Disposition::Forgotten);
    // Asked again, by somebody who did not hear the answer.
    let again = begun(&rig, begin()).await;
    assert_eq!((again.ending, &*again.row.reason), (Ending::Done, "already_asleep"));
    assert!(rig.worker().door.enter().is_none());
    let ended = ended(&rig, end(Weights::Same)).await;
    assert_eq!(
        (ended.ending, ended.phase, ended.canary),
        (Ending::Done, Phase::Serving, Canary::NotRun)
    );
    assert!(ended.is_serving && ended.held_by.is_none() && ended.rows.len() == 1);
    assert!(ended.rows[0].serving);
    assert!(!rig.worker().door.is_shut());
    rig.warm(&prompt(2)).await;
}

#[tokio::test]
async fn others_are_refused_while_a_worker_is_held_and_a_forced_action_that_serves_lets_it_go() {
    let rig = Rig::start().await;
    begun(&rig, begin()).await;
    let other = Request { holder: Some("other".to_owned()), ..Request::new(wake()) };
    for request in [Request::new(wake()), other] {
        let row = rig.lifecycle.act("w", request).await.unwrap();
        assert_eq!((row.evidence.as_str(), &*row.reason), ("not_sent", "held"));
        assert_eq!(row.asked["held_by"], "trainer");
    }
    let taken = begun(&rig, Begin { holder: "other".to_owned(), ..begin() }).await;
    assert_eq!((taken.ending, &*taken.reason), (Ending::Refused, "held"));
    let given = ended(&rig, End { holder: "other".to_owned(), ..end(Weights::Same) }).await;
    assert_eq!((given.ending, &*given.reason), (Ending::Refused, "held"));
    assert_eq!(given.held_by.as_deref(), Some("trainer"));
    // Its holder may act, and still holds it.
    let own = Request { holder: Some("trainer".to_owned()), ..Request::new(wake()) };
    let row = rig.lifecycle.act("w", own).await.unwrap();
    assert_eq!((row.phase, row.serving), (Phase::Serving, false), "it takes no requests");
    assert!(!rig.state().is_serving() && rig.worker().door.is_shut());
    let forced = Request { force: true, ..Request::new(wake()) };
    rig.lifecycle.act("w", forced).await.unwrap();
    assert!(rig.state().is_serving() && rig.state().held_by.is_none());
}

#[tokio::test]
async fn a_worker_that_somebody_else_wakes_stays_its_holders() {
    let rig = Rig::start().await;
    begun(&rig, begin()).await;
    rig.post("/wake_up").await;
    rig.look().await;
    assert_eq!(rig.state().phase(), Phase::Serving);
    assert!(!rig.state().is_serving() && rig.worker().door.is_shut());
    let row = rig.last_row().await;
    assert_eq!((row.action.as_str(), row.phase, row.serving), ("drift", Phase::Serving, false));
    let back = ended(&rig, end(Weights::Loaded)).await;
    assert_eq!((back.ending, back.is_serving), (Ending::Done, true), "{back:?}");
    let actions: Vec<_> = back.rows.iter().map(|row| row.action.as_str()).collect();
    assert_eq!(actions, ["weights", "reset"]);
    assert_eq!(back.rows[1].kv, Disposition::Forgotten);
    let named_by = rig.state().weights_epoch;
    assert_eq!(named_by, Some(back.rows[0].seq), "no version names the weights that are there");
    assert_eq!(rig.second_fak().await.state().weights_epoch, named_by);
}

#[tokio::test]
async fn a_hold_outlives_fak() {
    let rig = Rig::start().await;
    begun(&rig, Begin { canary: true, ..begin() }).await;
    let second = rig.second_fak().await;
    let state = second.state();
    assert_eq!(state.held_by.as_deref(), Some("trainer"));
    let row = second.lifecycle.act("w", Request::new(wake())).await.unwrap();
    assert_eq!(&*row.reason, "held");
    let back = second.lifecycle.end("w", end(Weights::Same)).await.unwrap();
    assert_eq!((back.ending, back.canary), (Ending::Done, Canary::Same), "{back:?}");
}

#[tokio::test]
async fn case_13_the_device_is_told_free_only_once_the_engine_shows_nothing_running() {
    let rig = Rig::start().await;
    rig.sim.faults().limit_steps(Some(2));
    let asked = rig.asks(&prompt(1), 20);
    rig.has_running(1).await;
    let short = Begin { mode: Mode::Keep, drain: Duration::from_millis(250), ..begin() };
    let began = begun(&rig, short).await;
    assert_eq!((began.ending, &*began.reason), (Ending::Failed, "requests_running"));
    assert_eq!((began.running, began.phase), (Some(1), Phase::Sleeping));
    for _ in 0..10 {
        assert!(rig.worker().door.enter().is_none(), "nobody reaches it");
    }
    rig.sim.faults().limit_steps(None);
    let back = ended(&rig, end(Weights::Same)).await;
    assert_eq!(back.ending, Ending::Done, "{back:?}");
    assert_eq!(asked.await.unwrap(), 200, "the kept request went on");
}

#[tokio::test]
async fn requests_that_do_not_end_in_time_leave_the_worker_as_it_was() {
    let rig = Rig::start().await;
    let inside = rig.worker().door.enter().unwrap();
    let began = begun(&rig, Begin { drain: Duration::from_millis(50), ..begin() }).await;
    assert_eq!((began.ending, &*began.reason), (Ending::Refused, "drain_timeout"));
    assert!(began.held_by.is_none() && rig.state().is_serving());
    drop(inside);
    assert!(rig.worker().door.enter().is_some());
}

#[tokio::test]
async fn of_two_begins_at_once_one_is_done_and_the_other_is_told_so() {
    let rig = Rig::start().await;
    let other = Begin { holder: "other".to_owned(), ..begin() };
    let (first, second) = tokio::join!(begun(&rig, begin()), begun(&rig, other));
    assert_eq!(first.ending, Ending::Done);
    assert_eq!((second.ending, &*second.reason), (Ending::Refused, "busy"));
    assert_eq!(rig.state().held_by.as_deref(), Some("trainer"));
}

#[tokio::test]
async fn case_16_a_begin_that_paused_half_way_is_held_and_its_end_resumes() {
    let rig = Rig::start().await;
    rig.post("/pause?mode=keep&clear_cache=false").await;
    rig.sim.faults().route("/sleep", RouteFault::Fail(500), 1);
    let began = begun(&rig, begin()).await;
    assert_eq!((began.ending, &*began.reason), (Ending::Failed, "paused_sleep_failed"));
    assert_eq!((began.phase, began.running), (Phase::Paused, None));
    assert_eq!(began.held_by.as_deref(), Some("trainer"));
    let back = ended(&rig, end(Weights::Same)).await;
    assert_eq!((back.ending, back.is_serving), (Ending::Done, true), "{back:?}");
    let actions: Vec<_> = back.rows.iter().map(|row| row.action.as_str()).collect();
    assert_eq!(actions, ["resume"]);
}

#[tokio::test]
async fn an_engine_that_dies_in_a_begin_frees_nothing_that_fak_could_tell() {
    let rig = Rig::start().await;
    rig.sim.kill_engine();
    let began = begun(&rig, begin()).await;
    assert_ne!(began.ending, Ending::Done, "{began:?}");
    assert!(began.running.is_none() && rig.worker().door.is_shut());
    let back = ended(&rig, end(Weights::Same)).await;
    assert_ne!(back.ending, Ending::Done, "{back:?}");
    assert!(!back.is_serving);
}

#[tokio::test]
async fn new_weights_are_served_only_once_the_old_ones_kv_is_proven_gone() {
    let rig = Rig::start().await;
    for fault in [RouteFault::Decline, RouteFault::Fail(500), RouteFault::EmptyBody] {
        rig.warm(&prompt(1)).await;
        begun(&rig, begin()).await;
        // A reset that is declined is tried again while the door is shut.
        let times = if fault == RouteFault::Decline { 4 } else { 1 };
        rig.sim.faults().route("/reset_prefix_cache", fault, times);
        let back = ended(&rig, end(Weights::Loaded)).await;
        assert_eq!((back.ending, back.is_serving), (Ending::Failed, false), "{back:?}");
        assert_eq!(back.held_by.as_deref(), Some("trainer"));
        rig.look().await;
        assert!(!rig.state().is_serving() && rig.worker().door.is_shut());
        let back = ended(&rig, end(Weights::Loaded)).await;
        assert_eq!((back.ending, back.is_serving), (Ending::Done, true), "{back:?}");
        assert_eq!(rig.sim.holds(&prompt(1), None).gpu, 0);
    }
}

#[tokio::test]
async fn weights_are_pushed_into_a_worker_whose_weights_memory_alone_is_awake() {
    let rig = Rig::start().await;
    begun(&rig, Begin { level: Level::Two, ..begin() }).await;
    let early = ended(&rig, end(Weights::Loaded)).await;
    assert_eq!((early.ending, &*early.reason), (Ending::Refused, "weights_asleep"));
    for _ in 0..2 {
        let stage = End { is_weights_only: true, ..end(Weights::Loaded) };
        let woken = ended(&rig, stage).await;
        assert_eq!((woken.ending, woken.phase), (Ending::Done, Phase::Waking), "{woken:?}");
        assert!(!woken.is_serving && woken.held_by.is_some());
    }
    rig.reload_behind().await;
    let back = ended(&rig, End { version: Some("v8".to_owned()), ..end(Weights::Loaded) }).await;
    assert_eq!((back.ending, back.weight_version.as_deref()), (Ending::Done, Some("v8")));
    assert_eq!(back.rows[0].weight_version.as_deref(), Some("v8"));
    // The engine, which never named its version, does not speak against it.
    rig.look().await;
    assert_eq!(rig.state().weight_version.as_deref(), Some("v8"));
    let second = rig.second_fak().await;
    let state = second.state();
    assert_eq!(state.weight_version.as_deref(), Some("v8"), "nor does a fak that starts anew");
    // Weights that nobody names do not keep the name of others.
    begun(&rig, begin()).await;
    let back = ended(&rig, end(Weights::Loaded)).await;
    assert_eq!(back.weight_version.as_deref(), Some("default"));
}

#[tokio::test]
async fn an_engine_that_names_another_version_than_its_holder_is_believed_and_told() {
    let rig = Rig::start().await;
    rig.name_version("v7").await;
    rig.look().await;
    begun(&rig, begin()).await;
    let back = ended(&rig, End { version: Some("v8".to_owned()), ..end(Weights::Same) }).await;
    assert_eq!(back.weight_version.as_deref(), Some("v7"));
    let last = rig.last_row().await;
    assert_eq!((last.action.as_str(), last.weight_version.as_deref()), ("weights", Some("v7")));
}

#[tokio::test]
async fn a_canary_takes_no_claim_from_a_tier_that_was_kept() {
    let rig = Rig::with(keeping()).await;
    rig.warm(&prompt(1)).await;
    rig.sim.at_rest().await;
    let held = rig.sim.holds(&prompt(1), None).cpu;
    assert!(held > 0);
    begun(&rig, Begin { keep_tier: true, canary: true, ..begin() }).await;
    let back = ended(&rig, end(Weights::Same)).await;
    assert_eq!((back.ending, back.canary), (Ending::Done, Canary::Same), "{back:?}");
    assert_eq!(rig.claim_on(&prompt(1), Tier::Cpu), held);
}

fn keeping() -> SimConfig {
    let (connector, profile) = (Connector::Offloading, Profile::KeepTier);
    SimConfig { connector, profile, ..SimConfig::default() }
}

#[tokio::test]
async fn case_32_a_tier_kept_for_a_rollout_comes_back_with_the_same_weights_and_goes_with_others() {
    let rig = Rig::with(keeping()).await;
    for (weights, kv, held) in [
        (Weights::Same, Disposition::Preserved, true),
        (Weights::Loaded, Disposition::Forgotten, false),
    ] {
        rig.warm(&prompt(1)).await;
        rig.sim.at_rest().await;
        let began = begun(&rig, Begin { keep_tier: true, ..begin() }).await;
        assert_eq!(began.ending, Ending::Done, "{began:?}");
        assert_eq!(began.row.tiers.get(Tier::Cpu), Some(Disposition::Preserved));
        let back = ended(&rig, end(weights)).await;
        assert_eq!(back.ending, Ending::Done, "{back:?}");
        assert_eq!(back.rows[0].tiers.get(Tier::Cpu), Some(kv), "{weights:?}");
        assert_eq!(rig.sim.holds(&prompt(1), None).cpu > 0, held, "{weights:?}");
        assert_eq!(rig.claim_on(&prompt(1), Tier::Cpu) > 0, held, "{weights:?}");
        let planted = &back.rows[0].observed["planted"];
        assert_eq!(planted["connector"].as_f64().unwrap() > 0.0, held, "{planted}");
        assert_eq!((&planted["gpu"], &planted["expected"]), (&0.0.into(), &true.into()));
    }
    let stock = Rig::start().await;
    let began = begun(&stock, Begin { keep_tier: true, ..begin() }).await;
    assert_eq!((began.ending, &*began.reason), (Ending::Refused, "keep_tier_not_proven"));
    assert_eq!(began.row.asked["connectors"][0], "OffloadingConnector");
    assert!(began.held_by.is_none() && stock.state().is_serving());
    let evicting = Begin { keep_tier: true, allow_evict: true, ..begin() };
    assert_eq!(begun(&stock, evicting).await.ending, Ending::Done);
}

#[tokio::test]
async fn a_tier_that_was_evicted_all_the_same_is_found_empty_before_anything_is_claimed() {
    let rig = Rig::with(keeping()).await;
    rig.warm(&prompt(1)).await;
    rig.sim.at_rest().await;
    begun(&rig, Begin { keep_tier: true, ..begin() }).await;
    assert!(rig.claim_on(&prompt(1), Tier::Cpu) > 0, "it was kept");
    rig.post("/reset_prefix_cache?reset_external=true").await;
    let back = ended(&rig, end(Weights::Same)).await;
    assert_eq!((back.ending, &*back.reason), (Ending::Done, "tier_not_kept"), "{back:?}");
    assert_eq!(back.rows[0].tiers.get(Tier::Cpu), Some(Disposition::Forgotten));
    assert!(back.is_serving);
    assert_eq!(rig.claim(&prompt(1)), 0);
}

#[tokio::test]
async fn a_reset_that_did_not_reach_the_tier_keeps_new_weights_from_serving() {
    let rig = Rig::with(keeping()).await;
    begun(&rig, Begin { keep_tier: true, ..begin() }).await;
    rig.sim.faults().route("/reset_prefix_cache", RouteFault::Pretend, 1);
    let back = ended(&rig, end(Weights::Loaded)).await;
    assert_eq!((back.ending, &*back.reason), (Ending::Failed, "not_achieved"), "{back:?}");
    assert!(!back.is_serving && back.held_by.is_some());
    rig.look().await;
    assert!(!rig.state().is_serving() && rig.worker().door.is_shut());
    let back = ended(&rig, end(Weights::Loaded)).await;
    assert_eq!((back.ending, back.is_serving), (Ending::Done, true), "{back:?}");
}

#[tokio::test]
async fn case_2_a_worker_that_answers_otherwise_after_a_wake_is_not_opened_by_a_look() {
    let mut rig = Rig::start().await;
    let began = begun(&rig, Begin { canary: true, ..begin() }).await;
    assert_eq!(began.ending, Ending::Done, "{began:?}");
    let back = ended(&rig, end(Weights::Same)).await;
    assert_eq!((back.ending, back.canary), (Ending::Done, Canary::Same), "{back:?}");

    begun(&rig, Begin { canary: true, ..begin() }).await;
    rig.sim.set_checkpoint(9);
    rig.reload_behind().await;
    let back = ended(&rig, end(Weights::Same)).await;
    assert_eq!((back.ending, back.canary), (Ending::Failed, Canary::Mismatch), "{back:?}");
    assert_eq!((back.phase, &*back.reason), (Phase::Error, "canary_mismatch"));
    let row = back.rows.last().unwrap();
    assert!(!row.serving && row.kv == Disposition::Unknown);
    let differs = row.observed["canary"]["differs"].as_array().unwrap();
    assert!(differs.contains(&"completions tiny".into()), "{differs:?}");
    rig.look().await;
    assert_eq!(rig.last_row().await.seq, row.seq, "a look says nothing new");
    assert!(!rig.state().is_serving() && rig.worker().door.is_shut());
    // With weights that are meant to be others it is recorded anew.
    let back = ended(&rig, end(Weights::Loaded)).await;
    assert_eq!((back.ending, back.canary), (Ending::Done, Canary::Recorded), "{back:?}");
    assert!(back.is_serving && rig.state().is_serving());
}

#[tokio::test]
async fn a_canary_that_nobody_answers_refuses_the_begin() {
    let rig = Rig::start().await;
    rig.sim.faults().route("/v1/completions", RouteFault::Fail(500), 1);
    rig.sim.faults().route("/v1/chat/completions", RouteFault::Fail(500), 1);
    let began = begun(&rig, Begin { canary: true, ..begin() }).await;
    assert_eq!((began.ending, &*began.reason), (Ending::Refused, "canary_not_recorded"));
    assert!(began.held_by.is_none() && rig.state().is_serving());
}

#[tokio::test]
async fn an_operators_forced_wake_takes_a_worker_whose_canary_failed() {
    let mut rig = Rig::start().await;
    begun(&rig, Begin { canary: true, ..begin() }).await;
    rig.sim.set_checkpoint(9);
    rig.reload_behind().await;
    ended(&rig, end(Weights::Same)).await;
    assert_eq!(rig.state().phase(), Phase::Error);
    let forced = Request { force: true, ..Request::new(wake()) };
    let row = rig.lifecycle.act("w", forced).await.unwrap();
    assert!(row.serving && rig.state().is_serving(), "{row:?}");
}

#[tokio::test]
async fn a_worker_that_is_not_held_has_no_rollout_to_end_and_gets_no_row() {
    let rig = Rig::start().await;
    rig.act(Move::Sleep { level: Some(Level::Two), mode: Mode::Wait, keep_tier: false }).await;
    let slept = rig.last_row().await;
    for end in [end(Weights::Same), End { is_weights_only: true, ..end(Weights::Unproven) }] {
        let back = ended(&rig, end).await;
        assert_eq!((back.ending, &*back.reason), (Ending::Refused, "not_held"), "{back:?}");
        assert_eq!((back.rows.len(), back.phase), (0, Phase::Sleeping));
        assert_eq!(rig.last_row().await.seq, slept.seq);
    }
}

#[tokio::test]
async fn an_end_is_known_as_done_by_the_next_fak_too_and_not_once_something_followed() {
    let rig = Rig::start().await;
    begun(&rig, begin()).await;
    let loaded = || End { version: Some("v8".to_owned()), ..end(Weights::Loaded) };
    assert_eq!(ended(&rig, loaded()).await.ending, Ending::Done);
    let second = rig.second_fak().await;
    let back = second.lifecycle.end("w", loaded()).await.unwrap();
    assert_eq!((back.ending, &*back.reason), (Ending::Done, "already_awake"), "{back:?}");
    assert!(back.rows.is_empty() && back.is_serving);
    let others = End { version: Some("v9".to_owned()), ..loaded() };
    let back = second.lifecycle.end("w", others).await.unwrap();
    assert_eq!((back.ending, &*back.reason), (Ending::Refused, "not_held"), "{back:?}");
    let reset = Request::new(Move::Reset { external: false, running: false });
    second.lifecycle.act("w", reset).await.unwrap();
    let back = second.lifecycle.end("w", loaded()).await.unwrap();
    assert_eq!((back.ending, &*back.reason), (Ending::Refused, "not_held"), "{back:?}");
}
