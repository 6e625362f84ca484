//! Is what an engine answers told apart from what it was seen to do?

use super::*;
use crate::vocab::Disposition::{Forgotten, Preserved, Unknown};

const LOADED: Move = Move::Wake { tags: Parts::NONE, weights: Weights::Loaded };
const WAKE_WEIGHTS: Move =
    Move::Wake { tags: Parts::of(Part::Weights), weights: Weights::Unproven };

fn with(clear: Clear) -> State {
    State { clear: Some(clear), ..AWAKE }
}

fn asleep(level: Level) -> Worker {
    let mut worker = Worker::serving(READY);
    let seen = if level == Level::One { SLEEPS_1 } else { SLEEPS_2 };
    worker.take(sleep(level, false), Answer::Ok, seen);
    worker
}

#[test]
fn a_stop_that_leaves_requests_running_had_no_effect() {
    for mode in [Mode::Abort, Mode::Wait] {
        let pause = Move::Pause { mode, clear: false, keep_tier: false };
        let sleep = Move::Sleep { level: Some(Level::One), mode, keep_tier: false };
        for (mv, seen, phase) in
            [(pause, STOPPED, Phase::Paused), (sleep, SLEEPS_1, Phase::Sleeping)]
        {
            let runs = State { still_running: Some(true), ..seen };
            let stopped = Worker::serving(READY).take(mv, Answer::Ok, runs);
            assert_eq!((stopped.reason, stopped.phase()), (Reason::NoEffect, phase), "{mv:?}");
            assert_eq!(stopped.kv, PerTier::all(Unknown));
            for still_running in [Some(false), None] {
                let ended = State { still_running, ..seen };
                let stopped = Worker::serving(READY).take(mv, Answer::Ok, ended);
                assert_eq!(stopped.reason, Reason::Confirmed, "{mv:?}");
            }
        }
    }
    let runs = State { still_running: Some(true), ..STOPPED };
    assert_eq!(Worker::serving(READY).take(PAUSE, Answer::Ok, runs).reason, Reason::Confirmed);
}

#[test]
fn a_clear_that_the_stream_does_not_show_is_not_forgotten() {
    let flush = Move::Quarantine(Quarantine::Flush);
    for mv in [RESET, RESET_EXTERNAL, flush] {
        for (clear, reason, gpu) in [
            (Clear::Seen, Reason::Confirmed, Forgotten),
            (Clear::Missing, Reason::NoEffect, Unknown),
            (Clear::Partly, Reason::NoEffect, Unknown),
            (Clear::Untold, Reason::ClearNotSeen, Unknown),
        ] {
            let reset = Worker::serving(READY).take(mv, Answer::Success(true), with(clear));
            assert_eq!((reset.reason, reset.kv.gpu), (reason, gpu), "{mv:?} {clear}");
            assert!(reset.serving() && reset.demoted.has(Tier::Gpu));
            // What may still come is fak's own, unless it was seen not to.
            let is_owed = matches!(clear, Clear::Seen | Clear::Untold);
            assert_eq!(reset.owes_clear, is_owed, "{mv:?} {clear}");
        }
    }
    // In a wake on other weights their KV would be within reach.
    let mut worker = asleep(Level::Two);
    worker.take(WAKE_WEIGHTS, Answer::Ok, SLEEPS_2);
    let woken = worker.take(LOADED, Answer::Success(true), with(Clear::Missing));
    assert_eq!((woken.reason, woken.phase()), (Reason::NoEffect, Phase::Waking));
    assert!(!woken.next.weights_proven && woken.next.stale.has(Tier::Gpu));
    // A wake that resets nothing owes none that could be missed.
    assert_eq!(
        asleep(Level::One).take(WAKE, Answer::Ok, with(Clear::Untold)).reason,
        Reason::Confirmed
    );
}

#[test]
fn a_pause_whose_clear_never_came_is_told_when_it_ends() {
    let mut worker = Worker::serving(READY);
    assert_eq!(worker.take(CLEAR, Answer::Ok, STOPPED).kv.gpu, Forgotten);
    let resumed = worker.take(Move::Resume, Answer::Ok, with(Clear::Missing));
    assert_eq!((resumed.reason, resumed.kv.gpu), (Reason::NoEffect, Unknown));
    assert!(resumed.serving());
}

#[test]
fn a_declined_reset_that_no_rank_followed_leaves_all_as_it_was() {
    let declined = |mv, clear| Worker::serving(READY).take(mv, Answer::Success(false), with(clear));
    let reset = declined(RESET, Clear::Missing);
    assert_eq!((reset.kv, reset.reason), (PerTier::all(Preserved), Reason::Declined));
    assert_eq!((reset.evidence, reset.demoted), (Evidence::Observed, TierSet::NONE));
    // vLLM wipes a connector's tiers all the same.
    let external = declined(RESET_EXTERNAL, Clear::Missing);
    assert_eq!(external.kv, PerTier { gpu: Preserved, ..PerTier::all(Unknown) });
    assert_eq!(external.demoted, TierSet::CONNECTOR);
    for clear in [Clear::Seen, Clear::Partly, Clear::Untold] {
        assert_eq!(declined(RESET, clear).kv.gpu, Unknown, "{clear}");
    }
    let mut worker = asleep(Level::One);
    let woken = worker.take(LOADED, Answer::Success(false), with(Clear::Missing));
    assert_eq!((woken.phase(), woken.kv.gpu), (Phase::Waking, Unknown));
}

#[test]
fn a_reset_without_a_body_did_what_the_stream_shows() {
    for (clear, reason, gpu) in [
        (Clear::Seen, Reason::Confirmed, Forgotten),
        (Clear::Missing, Reason::NoEffect, Preserved),
        (Clear::Partly, Reason::NoBody, Unknown),
        (Clear::Untold, Reason::NoBody, Unknown),
    ] {
        let reset = Worker::serving(READY).take(RESET, Answer::NoBody, with(clear));
        assert_eq!((reset.reason, reset.kv.gpu), (reason, gpu), "{clear}");
        assert_eq!(reset.owes_clear, clear == Clear::Seen);
    }
    // After a wake it may be the clear of the sleep.
    let woken = asleep(Level::One).take(LOADED, Answer::NoBody, with(Clear::Seen));
    assert_eq!((woken.reason, woken.kv.gpu), (Reason::NoBody, Unknown));
}

#[test]
fn a_row_of_what_was_not_sent_repeats_what_was_so_before() {
    let refused = Answer::NotSent(Refusal::Busy);
    let mut worker = asleep(Level::One);
    let row = worker.take(RESET, refused, SLEEPS_1);
    assert_eq!((row.kv.gpu, row.evidence), (Forgotten, Evidence::NotSent));
    let row = Worker::serving(READY).take(RESET, refused, AWAKE);
    assert_eq!(row.kv, PerTier::all(Preserved));
    let cpu = TierSet::of(Tier::Cpu);
    let known = row.believing(cpu);
    assert_eq!((known.kv.gpu, known.kv.cpu), (Unknown, Preserved));
    let mut worker = Worker { caps: READY, now: Standing::UNOBSERVED };
    assert_eq!(worker.take(PAUSE, refused, State::UNREAD).kv, PerTier::all(Unknown));
    let lost = Standing { phase: Phase::Error, ..Standing::SERVING };
    let row = Worker { caps: READY, now: lost }.take(PAUSE, refused, State::UNREAD);
    assert_eq!(row.kv, PerTier::all(Unknown), "its state is not known");
}

#[test]
fn a_part_that_is_awake_outlives_a_wake_without_effect() {
    let rest = Move::Wake { tags: Parts::of(Part::KvCache), weights: Weights::Unproven };
    for failed in [Answer::Ok, Answer::Mismatch, Answer::Failed, Answer::Timeout, Answer::Cut] {
        let mut worker = asleep(Level::One);
        worker.take(WAKE_WEIGHTS, Answer::Ok, SLEEPS_1);
        let woken = worker.take(WAKE, failed, SLEEPS_1);
        assert_eq!(woken.phase(), Phase::Waking, "{failed:?}");
        assert_eq!(woken.next.awake, Parts::of(Part::Weights));
        if failed != Answer::Ok {
            let woken = Worker { ..worker }.take(rest, failed, SLEEPS_1);
            assert_eq!(woken.next.awake, Parts::of(Part::Weights), "{failed:?}");
        }
        assert!(woken.next.weights_proven && !worker.now.has_drifted(Seen::Sleeping(None)));
        assert_eq!(worker.calls(WAKE), ["/wake_up?tags=kv_cache"]);
        // Nor is it forgotten while the worker is lost, in the same life.
        worker.see(Move::Lost, Answer::Unrecorded, Observed::Nothing);
        let back = worker.take(Move::Drift, Answer::Unrecorded, SLEEPS_1);
        assert_eq!((back.phase(), back.next.awake), (Phase::Waking, Parts::of(Part::Weights)));
        assert!(worker.take(rest, Answer::Ok, AWAKE).serving());
    }
    let mut worker = asleep(Level::One);
    worker.take(WAKE_WEIGHTS, Answer::Ok, SLEEPS_1);
    let restarted = worker.take(Move::Restart, Answer::Unrecorded, SLEEPS_1);
    assert_eq!((restarted.phase(), restarted.next.awake), (Phase::Sleeping, Parts::NONE));
    // Of a wake that had no effect on a worker that is wholly asleep, no part is known to be awake.
    assert_eq!(asleep(Level::One).take(WAKE, Answer::Ok, SLEEPS_1).next.awake, Parts::NONE);
    // A wake that ends in a reset, and had no effect, says nothing against the weights.
    let mut worker = asleep(Level::One);
    worker.take(WAKE_WEIGHTS, Answer::Ok, SLEEPS_1);
    let woken = worker.take(LOADED, Answer::Mismatch, SLEEPS_1);
    assert!(woken.next.weights_proven && !woken.next.stale.is_empty());
}

#[test]
fn only_who_wakes_the_weights_memory_by_name_is_taken_to_load_weights() {
    for caps in [READY, Capabilities { staged_wake: false, ..READY }] {
        let mut worker = Worker::serving(caps);
        worker.take(sleep(Level::Two, false), Answer::Ok, SLEEPS_2);
        let seen = if caps.staged_wake { SLEEPS_2 } else { AWAKE };
        for _ in 0..2 {
            let waits = worker.take(WAKE, Answer::AwaitsWeights, seen);
            assert_eq!(waits.reason, Reason::WeightsNotProven);
            assert!(!waits.next.takes_weights, "fak woke it");
        }
        // Awake already, and named: whoever does so has weights to load.
        assert_eq!(worker.refusal(WAKE_WEIGHTS), Some(Refusal::AlreadyAwake));
        // Of an engine that is wholly awake that is the only wake which has nothing to do.
        let loaded = Move::Wake { tags: Parts::of(Part::Weights), weights: Weights::Loaded };
        let cache = Move::Wake { tags: Parts::of(Part::KvCache), weights: Weights::Unproven };
        let refusal = caps.staged_wake.then_some(Refusal::AlreadyAwake);
        assert_eq!((worker.refusal(loaded), worker.refusal(cache)), (refusal, None));
        let named = worker.take(WAKE_WEIGHTS, Answer::NotSent(Refusal::AlreadyAwake), seen);
        assert!(named.next.takes_weights && !named.serving());
        let woken = worker.take(LOADED, Answer::Success(true), AWAKE);
        assert!(woken.serving() && !woken.next.takes_weights);
    }
    let mut worker = asleep(Level::Two);
    assert!(worker.take(WAKE_WEIGHTS, Answer::Ok, SLEEPS_2).next.takes_weights);
    assert!(worker.take(WAKE, Answer::Failed, SLEEPS_2).next.takes_weights);
    let mut worker = asleep(Level::Two);
    let failed = worker.take(WAKE_WEIGHTS, Answer::Failed, SLEEPS_2);
    assert!(!failed.next.takes_weights, "nothing woke");
    let mut worker = Worker::serving(READY);
    let named = worker.take(WAKE_WEIGHTS, Answer::NotSent(Refusal::AlreadyAwake), AWAKE);
    assert!(!named.next.takes_weights, "it serves");
}

#[test]
fn a_first_look_is_a_join_and_believes_nothing() {
    for (seen, phase, gpu) in
        [(AWAKE, Phase::Serving, Unknown), (SLEEPS_2, Phase::Sleeping, Forgotten)]
    {
        let mut worker = Worker { caps: READY, now: Standing::UNOBSERVED };
        let joined = worker.take(Move::Join, Answer::Unrecorded, seen);
        assert_eq!((joined.phase(), joined.kv.gpu), (phase, gpu));
        assert_eq!(Move::Join.action().as_str(), "join");
    }
}
