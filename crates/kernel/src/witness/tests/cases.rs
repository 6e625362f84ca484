//! Do the verdicts come out that CASES parts A and B ask for? One test a case, by its number there.

use super::*;
use crate::vocab::Disposition::{Forgotten, Preserved, Unknown};

const CPU: Capabilities =
    Capabilities { tiers: TierSet::GPU.with(TierSet::of(Tier::Cpu)), ..READY };

fn cpu(verdict: &Verdict) -> Option<Disposition> {
    verdict.tier(Tier::Cpu)
}

#[test]
fn case_1_a_level_2_sleeper_serves_only_after_its_weights_were_loaded() {
    let reset = "/reset_prefix_cache?reset_external=true";
    let staged = ["/wake_up?tags=weights", "reload", "/wake_up?tags=kv_cache", reset];
    let at_once = ["/wake_up", "reload", reset];
    let old = Capabilities { staged_wake: false, ..READY };
    let bad = [Answer::AwaitsWeights, Answer::Failed, Answer::Timeout];
    for (bad, caps) in bad.into_iter().flat_map(|bad| [(bad, READY), (bad, old)]) {
        let mut worker = Worker::serving(caps);
        let slept = worker.take(sleep(Level::Two, false), Answer::Ok, SLEEPS_2);
        assert!(!slept.next.weights_proven);
        let recipe = if caps.staged_wake { &staged[..] } else { &at_once };
        assert_eq!(worker.calls(WAKE), recipe);
        assert!(!worker.take(WAKE, bad, AWAKE).serving(), "{bad:?}");
        // Whatever the engine shows from now on, it has no weights.
        let drift = worker.take(Move::Drift, Answer::Unrecorded, AWAKE);
        assert_eq!((drift.phase(), drift.reason), (Phase::Waking, Reason::WeightsNotProven));
        assert!(!worker.now.has_drifted(Seen::Serving), "one row, not one a probe");
        // The owner loads them; the wake then goes on without a second reload.
        let loaded = worker.take(Move::Weights, Answer::Unrecorded, AWAKE);
        assert!(loaded.next.weights_proven && !loaded.serving());
        assert_eq!(worker.calls(WAKE), ["/wake_up", reset]);
        let woken = worker.take(WAKE, Answer::Success(true), AWAKE);
        assert!(woken.serving());
        assert_eq!((woken.kv.gpu, cpu(&woken)), (Forgotten, Some(Forgotten)));
    }
}

#[test]
fn a_wake_waits_for_its_weights_with_the_kv_memory_still_asleep() {
    let wake = |weights| Move::Wake { tags: Parts::NONE, weights };
    let reset = "/reset_prefix_cache?reset_external=true";
    for level in [Level::One, Level::Two] {
        let mut worker = Worker::serving(READY);
        let seen = if level == Level::One { SLEEPS_1 } else { SLEEPS_2 };
        worker.take(sleep(level, false), Answer::Ok, seen);
        let waits = worker.take(wake(Weights::Changed), Answer::AwaitsWeights, seen);
        assert_eq!((waits.phase(), waits.reason), (Phase::Waking, Reason::WeightsNotProven));
        assert_eq!(waits.next.awake, Parts::of(Part::Weights));
        assert!(!worker.now.has_drifted(Seen::Sleeping(Some(level))), "one row, not one a look");
        // Once fak may load them, what is left of the order follows.
        let rest = ["reload", "/wake_up?tags=kv_cache", reset];
        assert_eq!(worker.calls(wake(Weights::Changed)), rest);
        // Or their owner has: the KV of the old ones goes all the same.
        assert_eq!(worker.calls(wake(Weights::Loaded)), ["/wake_up?tags=kv_cache", reset]);
        let busy = Worker { caps: READY, now: worker.now }.take(
            wake(Weights::Loaded),
            Answer::Success(false),
            AWAKE,
        );
        assert_eq!((busy.phase(), busy.reason), (Phase::Waking, Reason::Declined));
        let woken = worker.take(wake(Weights::Loaded), Answer::Success(true), AWAKE);
        assert!(woken.serving() && woken.next.weights_proven);
        assert_eq!((woken.kv.gpu, cpu(&woken)), (Forgotten, Some(Forgotten)));
        assert!(!woken.next.stale.has(Tier::Cpu));
    }
}

#[test]
fn a_wake_on_other_weights_whose_reset_is_not_proven_serves_nobody_whatever_is_seen_later() {
    let loaded = Move::Wake { tags: Parts::NONE, weights: Weights::Loaded };
    for answer in [Answer::Success(false), Answer::Failed, Answer::Timeout, Answer::Cut] {
        let mut worker = Worker::serving(READY);
        worker.take(sleep(Level::One, false), Answer::Ok, SLEEPS_1);
        assert!(!worker.take(loaded, answer, AWAKE).serving(), "{answer:?}");
        if worker.now.has_drifted(Seen::Serving) {
            let drift = worker.take(Move::Drift, Answer::Unrecorded, AWAKE);
            assert_eq!((drift.phase(), drift.reason), (Phase::Waking, Reason::WeightsNotProven));
        }
        assert!(!worker.now.has_drifted(Seen::Serving), "{answer:?}: one row, not one a look");
        for weights in [Weights::Loaded, Weights::Same] {
            let again = Worker { caps: READY, now: worker.now };
            let wake = Move::Wake { tags: Parts::NONE, weights };
            assert!(again.calls(wake).contains(&"/reset_prefix_cache?reset_external=true".into()));
        }
        assert!(worker.take(loaded, Answer::Success(true), AWAKE).serving());
    }
}

#[test]
fn weights_that_their_owner_loaded_are_believed_only_where_memory_was_awake_to_take_them() {
    let loaded = Move::Wake { tags: Parts::NONE, weights: Weights::Loaded };
    let mut worker = Worker::serving(READY);
    worker.take(sleep(Level::Two, false), Answer::Ok, SLEEPS_2);
    assert_eq!(worker.refusal(loaded), Some(Refusal::WeightsAsleep));
    let part = Move::Wake { tags: Parts::of(Part::Weights), weights: Weights::Unproven };
    worker.take(part, Answer::Ok, SLEEPS_2);
    assert_eq!(worker.refusal(loaded), None);
    // A sleep of level 1 keeps them, so that its owner may have changed them before.
    let mut worker = Worker::serving(READY);
    worker.take(sleep(Level::One, false), Answer::Ok, SLEEPS_1);
    assert_eq!(
        worker.calls(loaded),
        ["/wake_up", "/reset_prefix_cache?reset_external=true"],
        "nothing to load"
    );
    assert!(worker.take(loaded, Answer::Success(true), AWAKE).serving());
}

#[test]
fn dropped_weights_are_the_same_again_only_where_memory_was_awake_to_take_them() {
    let same = |tags| Move::Wake { tags, weights: Weights::Same };
    let part = Parts::of(Part::Weights);
    let mut worker = Worker::serving(READY);
    worker.take(sleep(Level::Two, false), Answer::Ok, SLEEPS_2);
    for tags in [Parts::NONE, Parts::MEMORY, part] {
        assert_eq!(worker.refusal(same(tags)), Some(Refusal::WeightsAsleep), "{tags:?}");
    }
    // Nor does the silence of the engine, or a sleep that fak did not see, bring them back.
    let mut lost = Worker { ..worker };
    lost.see(Move::Lost, Answer::Unrecorded, Observed::Nothing);
    assert_eq!(lost.refusal(same(Parts::NONE)), Some(Refusal::WeightsAsleep));
    let mut others = Worker::serving(READY);
    others.take(Move::Drift, Answer::Unrecorded, SLEEPS_2);
    assert_eq!(others.refusal(same(Parts::NONE)), Some(Refusal::WeightsAsleep));
    // Their owner can have loaded them; what the tiers hold may be of others all the same.
    worker.take(Move::Wake { tags: part, weights: Weights::Unproven }, Answer::Ok, SLEEPS_2);
    let reset = "/reset_prefix_cache?reset_external=true";
    assert_eq!(worker.calls(same(Parts::NONE)), ["/wake_up?tags=kv_cache", reset]);
    let mut worker = Worker::serving(READY);
    worker.take(sleep(Level::One, false), Answer::Ok, SLEEPS_1);
    assert_eq!(worker.calls(same(Parts::NONE)), ["/wake_up"], "they never left");
}

#[test]
fn weights_are_proven_only_in_memory_that_can_hold_them() {
    // A version that moves while the engine sleeps loads nothing into it.
    let mut worker = Worker::serving(READY);
    worker.take(sleep(Level::Two, false), Answer::Ok, SLEEPS_2);
    assert!(!worker.take(Move::Weights, Answer::Unrecorded, SLEEPS_2).next.weights_proven);
    // Whoever moved the engine behind fak's back may have discarded them, unless what is seen
    // rules it out.
    let flags_alone = state(true, true, None);
    for (seen, proven) in [
        (STOPPED, true),
        (SLEEPS_1, true),
        (SLEEPS_2, false),
        (flags_alone, false),
        (state(false, true, None), false),
    ] {
        let mut worker = Worker::serving(READY);
        let drift = worker.take(Move::Drift, Answer::Unrecorded, seen);
        assert_eq!(drift.next.weights_proven, proven, "{seen:?}");
        let back = worker.take(Move::Drift, Answer::Unrecorded, AWAKE);
        assert_eq!(back.serving(), proven, "{seen:?}");
    }
}

#[test]
fn case_2_an_engine_that_answers_otherwise_than_before_serves_nobody_until_somebody_says_so() {
    let otherwise = State { canary: Some(false), ..AWAKE };
    let as_before = State { canary: Some(true), ..AWAKE };
    let asleep = || {
        let mut worker = Worker::serving(READY);
        worker.take(sleep(Level::One, false), Answer::Ok, SLEEPS_1);
        worker
    };
    assert!(asleep().take(WAKE, Answer::Ok, as_before).serving());
    let mut worker = asleep();
    let woken = worker.take(WAKE, Answer::Ok, otherwise);
    assert_eq!((woken.phase(), woken.reason), (Phase::Error, Reason::CanaryMismatch));
    assert_eq!(woken.kv, PerTier::all(Unknown));
    assert!(!worker.now.has_drifted(Seen::Serving), "a look does not open it");
    // Nor does a way round by others, or the silence of the process.
    worker.take(Move::Drift, Answer::Unrecorded, SLEEPS_1);
    let back = worker.take(Move::Drift, Answer::Unrecorded, AWAKE);
    assert_eq!((back.phase(), back.reason), (Phase::Error, Reason::CanaryMismatch));
    worker.see(Move::Lost, Answer::Unrecorded, Observed::Nothing);
    assert!(!worker.take(Move::Drift, Answer::Unrecorded, AWAKE).serving());
    // An operator's wake does, and a new life.
    let failed = Worker { caps: READY, now: worker.now }.take(WAKE, Answer::Timeout, AWAKE);
    assert!(failed.next.suspect, "only one that succeeds");
    let again = Worker { caps: READY, now: worker.now }.take(WAKE, Answer::Ok, AWAKE);
    assert!(again.serving() && !again.next.suspect);
    assert!(worker.take(Move::Restart, Answer::Unrecorded, AWAKE).serving());
}

#[test]
fn case_3_hits_with_no_store_after_a_wake_are_a_contradiction() {
    let mut worker = Worker::serving(READY);
    assert_eq!(worker.take(sleep(Level::One, false), Answer::Ok, SLEEPS_1).kv.gpu, Forgotten);
    let hit = State { local_hits: Some(true), ..AWAKE };
    let woken = worker.take(WAKE, Answer::Ok, hit);
    assert_eq!(woken.reason, Reason::HitsAfterClear);
    assert!(!woken.serving() && woken.kv.gpu == Unknown);
    // Nor does a reset leave anything to hit; a pause that keeps does.
    let reset = Worker::serving(READY).take(RESET, Answer::Success(true), hit);
    assert_eq!((reset.reason, reset.kv.gpu), (Reason::HitsAfterClear, Unknown));
    let mut worker = Worker::serving(READY);
    worker.take(PAUSE, Answer::Ok, STOPPED);
    let resumed = worker.take(Move::Resume, Answer::Ok, hit);
    assert_eq!((resumed.reason, resumed.kv.gpu), (Reason::Confirmed, Preserved));
}

#[test]
fn case_4_and_15_a_process_that_is_gone_took_its_device_memory_with_it() {
    let mut worker = Worker::serving(READY);
    let slept = worker.see(sleep(Level::One, false), Answer::Ok, Observed::Gone);
    assert_eq!((slept.phase(), slept.reason), (Phase::Error, Reason::Gone));
    assert_eq!(slept.kv, PerTier { gpu: Forgotten, ..PerTier::all(Unknown) });
    let mut worker = Worker::serving(READY);
    worker.take(sleep(Level::One, false), Answer::Ok, SLEEPS_1);
    let woken = worker.see(WAKE, Answer::Ok, Observed::Gone);
    assert_eq!(woken.phase(), Phase::Error);
    assert_eq!(woken.kv, PerTier { gpu: Forgotten, ..PerTier::all(Unknown) });
}

#[test]
fn case_6_a_partly_woken_engine_is_waking() {
    let part = |part| Move::Wake { tags: Parts::of(part), weights: Weights::Unproven };
    let mut worker = Worker::serving(READY);
    worker.take(sleep(Level::One, false), Answer::Ok, SLEEPS_1);
    let weights = worker.take(part(Part::Weights), Answer::Ok, SLEEPS_1);
    assert_eq!((weights.phase(), weights.serving()), (Phase::Waking, false));
    assert_eq!(weights.next.awake, Parts::of(Part::Weights));
    assert_eq!(worker.refusal(part(Part::Weights)), Some(Refusal::AlreadyAwake));
    let both = Move::Wake { tags: Parts::MEMORY, weights: Weights::Unproven };
    assert_eq!(worker.calls(both), ["/wake_up?tags=kv_cache"], "an awake tag voids the call");
    assert_eq!(worker.calls(WAKE), ["/wake_up?tags=kv_cache"], "what is awake is not taken twice");
    let kv = worker.take(part(Part::KvCache), Answer::Ok, AWAKE);
    assert_eq!((kv.phase(), kv.serving()), (Phase::Serving, true));
    // In the other order.
    worker.take(sleep(Level::One, false), Answer::Ok, SLEEPS_1);
    let kv = worker.take(part(Part::KvCache), Answer::Ok, SLEEPS_1);
    assert_eq!((kv.phase(), kv.next.awake), (Phase::Waking, Parts::of(Part::KvCache)));
    assert!(worker.now.has_drifted(Seen::Serving), "somebody woke the rest");
    assert!(worker.take(part(Part::Weights), Answer::Ok, AWAKE).serving());

    // Between 0.17.1 and 0.23.0 the scheduler resumes after any wake.
    worker.take(sleep(Level::One, false), Answer::Ok, SLEEPS_1);
    let running = state(false, true, Some(SleepState::One));
    let weights = worker.take(part(Part::Weights), Answer::Ok, running);
    assert_eq!(weights.phase(), Phase::Waking);
    assert!(!worker.now.has_drifted(Seen::read(&Observed::State(running), &READY)));
}

#[test]
fn case_8_repeated_and_illegal_moves_send_nothing() {
    let mut worker = Worker::serving(READY);
    assert_eq!(worker.refusal(WAKE), Some(Refusal::AlreadyAwake));
    assert_eq!(worker.refusal(Move::Resume), Some(Refusal::AlreadyAwake));
    worker.take(sleep(Level::One, false), Answer::Ok, SLEEPS_1);
    for mv in [PAUSE, sleep(Level::One, false), sleep(Level::Two, false), Move::Resume, RESET] {
        assert_eq!(worker.refusal(mv), Some(Refusal::AlreadyAsleep), "{mv:?}");
    }
    let before = worker.now;
    let again = Answer::NotSent(Refusal::AlreadyAsleep);
    let row = worker.take(sleep(Level::One, false), again, SLEEPS_1);
    assert_eq!((row.evidence, row.phase()), (Evidence::NotSent, Phase::Sleeping));
    assert_eq!(row.reason.as_str(), "already_asleep");
    assert!(row.demoted.is_empty() && worker.now == before);
}

#[test]
fn case_9_a_wake_that_failed_may_be_tried_again_and_serves_nobody() {
    let mut worker = Worker::serving(READY);
    worker.take(sleep(Level::One, false), Answer::Ok, SLEEPS_1);
    for observed in [Observed::State(SLEEPS_1), Observed::Nothing] {
        let failed = worker.see(WAKE, Answer::Failed, observed);
        assert!(!failed.serving() && failed.kv == PerTier::all(Unknown));
        assert_eq!(worker.refusal(WAKE), None);
    }
}

#[test]
fn case_11_another_level_than_the_one_asked_for_proves_nothing() {
    for (asked, seen) in [(Level::Two, SLEEPS_1), (Level::One, SLEEPS_2)] {
        let mut worker = Worker::serving(READY);
        let slept = worker.take(sleep(asked, false), Answer::Ok, seen);
        assert_eq!((slept.phase(), slept.reason), (Phase::Sleeping, Reason::LevelMismatch));
        assert_eq!(slept.kv, PerTier::all(Unknown));
        assert!(!slept.next.weights_proven);
        assert!(worker.calls(WAKE).contains(&"reload".to_string()));
    }
    let mismatch =
        Worker::serving(READY).take(sleep(Level::Two, false), Answer::Mismatch, SLEEPS_2);
    assert_eq!(mismatch.kv, PerTier::all(Unknown));
}

#[test]
fn case_12_a_kept_pause_keeps_until_the_weights_change() {
    for (connector, expected) in [(Connector::OFFLOADING, Forgotten), (Connector::UNKNOWN, Unknown)]
    {
        let mut worker = Worker::serving(Capabilities { connector, ..READY });
        let cleared = worker.take(CLEAR, Answer::Ok, STOPPED);
        assert_eq!((cleared.kv.gpu, cpu(&cleared)), (Forgotten, Some(expected)));
    }
    let mut worker = Worker::serving(READY);
    assert_eq!(worker.take(PAUSE, Answer::Ok, STOPPED).kv, PerTier::all(Preserved));
    assert_eq!(worker.take(Move::Weights, Answer::Unrecorded, STOPPED).kv, PerTier::all(Unknown));
    let resumed = worker.take(Move::Resume, Answer::Ok, AWAKE);
    assert!(resumed.serving() && resumed.kv == PerTier::all(Unknown));
    assert_eq!(resumed.next.stale, TierSet::ALL, "the old KV is still within reach");
    // A reset proves the gpu empty, and the tier that it does not touch stays stale.
    worker.take(RESET, Answer::Success(true), AWAKE);
    assert_eq!(worker.now.stale, TierSet::CONNECTOR);
    worker.take(RESET_EXTERNAL, Answer::Success(true), AWAKE);
    assert_eq!(worker.now.stale, TierSet::CONNECTOR.without(TierSet::of(Tier::Cpu)));
}

#[test]
fn case_16_a_sleep_that_failed_half_way_is_a_pause_that_resume_undoes() {
    // As a new and as an old engine show it.
    for seen in [STOPPED, state(true, false, None)] {
        for (level, answer) in [
            (Level::One, Answer::Failed),
            (Level::Two, Answer::Failed),
            // Whatever it says of itself.
            (Level::One, Answer::Ok),
        ] {
            let mut worker = Worker::serving(READY);
            worker.take(PAUSE, Answer::Ok, STOPPED);
            let failed = worker.take(sleep(level, false), answer, seen);
            assert_eq!((failed.phase(), failed.reason), (Phase::Paused, Reason::SleepFailedPaused));
            assert_eq!(failed.kv, PerTier::all(Unknown));
            assert_eq!(worker.refusal(Move::Resume), None);
            let resumed = worker.take(Move::Resume, Answer::Ok, AWAKE);
            assert!(resumed.serving() && resumed.kv == PerTier::all(Unknown));
        }
    }
}

#[test]
fn case_25_external_hits_after_an_external_reset_mean_that_it_was_not_achieved() {
    let hit = State { external_hits: Some(true), ..AWAKE };
    let all = Worker::serving(CPU).take(RESET_EXTERNAL, Answer::Success(true), hit);
    assert_eq!(all.reason, Reason::NotAchieved);
    assert_eq!((all.kv.gpu, cpu(&all)), (Forgotten, Some(Preserved)));
    assert_eq!(all.demoted, CPU.tiers, "they went cold before the call");
    let unseen = State { clear: Some(Clear::Missing), ..hit };
    let neither = Worker::serving(CPU).take(RESET_EXTERNAL, Answer::Success(true), unseen);
    assert_eq!((neither.reason, neither.demoted), (Reason::NotAchieved, CPU.tiers));
    let gpu = Worker::serving(CPU).take(RESET, Answer::Success(true), hit);
    assert_eq!(gpu.reason, Reason::Confirmed);
    assert_eq!((gpu.kv.gpu, cpu(&gpu)), (Forgotten, Some(Preserved)));
    let many = Worker::serving(READY).take(RESET_EXTERNAL, Answer::Success(true), hit);
    assert_eq!(cpu(&many), Some(Unknown), "which of the tiers served is not told");

    // In a wake on other weights it leaves their KV within reach: not serving.
    let mut worker = Worker::serving(CPU);
    worker.take(sleep(Level::Two, false), Answer::Ok, SLEEPS_2);
    let woken = worker.take(WAKE, Answer::Success(true), hit);
    assert_eq!((woken.phase(), woken.reason), (Phase::Waking, Reason::NotAchieved));
    assert!(woken.next.stale.has(Tier::Cpu));
}

#[test]
fn case_26_only_a_connector_that_is_known_to_clear_itself_was_cleared() {
    let no_hit = State { external_hits: Some(false), ..AWAKE };
    let multi = |parts: &[Connector]| Connector::multi(parts.iter().copied());
    let kinds = [
        (Connector::OFFLOADING, Forgotten),
        (Connector::SIMPLE_OFFLOAD, Forgotten),
        (Connector::MOONCAKE_STORE, Forgotten),
        (multi(&[Connector::OFFLOADING, Connector::MOONCAKE_STORE]), Forgotten),
        (multi(&[Connector::OFFLOADING, Connector::UNKNOWN]), Unknown),
        (multi(&[]), Unknown),
        (Connector::UNKNOWN, Unknown),
    ];
    let (offloading, simple) = (Connector::OFFLOADING, Connector::SIMPLE_OFFLOAD);
    assert_eq!(multi(&[offloading, offloading]), offloading);
    assert_eq!(multi(&[offloading, simple]), simple);
    assert_eq!(multi(&[offloading, Connector::MOONCAKE_STORE]), Connector::MOONCAKE_STORE);
    for (connector, expected) in kinds {
        let caps = Capabilities { connector, ..READY };
        for state in [AWAKE, no_hit] {
            let reset = Worker::serving(caps).take(RESET_EXTERNAL, Answer::Success(true), state);
            assert_eq!((reset.kv.gpu, cpu(&reset)), (Forgotten, Some(expected)), "{connector:?}");
            assert_eq!((reset.kv.disk, reset.kv.remote), (Unknown, Unknown));
        }
        let slept = Worker::serving(caps).take(sleep(Level::One, false), Answer::Ok, SLEEPS_1);
        assert_eq!(cpu(&slept), Some(expected), "{connector:?}");
        // An engine that does not reach the connector, or is not known to, clears none.
        for caps in [
            Capabilities { reaches_connector: false, ..caps },
            Capabilities { reset_external: None, ..caps },
        ] {
            let reset = Worker::serving(caps).take(RESET_EXTERNAL, Answer::Success(true), AWAKE);
            assert_eq!(cpu(&reset), Some(Unknown));
        }
        let none = Capabilities { reset_external: Some(false), ..caps };
        let refusal = Worker::serving(none).refusal(RESET_EXTERNAL);
        assert_eq!(refusal, Some(Refusal::ExternalNotOffered));
    }
}

#[test]
fn case_27_the_replies_to_one_reset_are_told_apart() {
    let reset = |answer, observed| Worker::serving(READY).see(RESET, answer, observed);
    let awake = Observed::State(AWAKE);
    let done = reset(Answer::Success(true), awake);
    assert_eq!((done.kv.gpu, done.reason), (Forgotten, Reason::Confirmed));
    let busy = reset(Answer::Success(false), awake);
    assert_eq!((busy.kv.gpu, busy.reason), (Unknown, Reason::Declined));
    let mute = reset(Answer::NoBody, awake);
    assert_eq!((mute.kv.gpu, mute.reason), (Unknown, Reason::NoBody));
    let closed = reset(Answer::from_status(404), Observed::Nothing);
    assert_eq!((closed.evidence, closed.reason), (Evidence::NotSent, Reason::Refused));
    assert_eq!((closed.kv, closed.phase()), (PerTier::all(Preserved), Phase::Serving));
    assert_eq!(closed.demoted, TierSet::GPU, "it went cold before the call");
    let moved = reset(Answer::Refused, Observed::State(SLEEPS_1));
    assert_eq!((moved.reason, moved.phase()), (Reason::Contradicted, Phase::Sleeping));
    // Of a wake's calls it may be the reset that was refused, after the engine woke.
    let mut worker = Worker::serving(READY);
    worker.take(sleep(Level::Two, false), Answer::Ok, SLEEPS_2);
    for (observed, moved) in [
        (Observed::Nothing, true),
        (Observed::State(AWAKE), true),
        (Observed::State(SLEEPS_2), false),
    ] {
        let Worker { caps, now } = worker;
        let verdict = judge(WAKE, &caps, &now, Answer::Refused, &observed);
        assert_eq!(verdict.kv.gpu == Unknown, moved, "{observed:?}");
        assert!(!verdict.serving());
    }
    for (status, answer) in [(200, Answer::Ok), (204, Answer::Ok), (405, Answer::Refused)] {
        assert_eq!(Answer::from_status(status), answer);
    }
    for status in [0, 199, 302, 408, 429, 500, 503] {
        assert_eq!(Answer::from_status(status), Answer::Failed);
    }
}

#[test]
fn case_32_a_kept_tier_is_carried_to_the_wake_unless_the_weights_change() {
    let keeping = Capabilities { keep_argument: true, ..CPU };
    let keep = sleep(Level::One, true);
    let mut worker = Worker::serving(keeping);
    let slept = worker.take(keep, Answer::Ok, SLEEPS_1);
    assert_eq!(
        (slept.kv.gpu, cpu(&slept), slept.demoted),
        (Forgotten, Some(Preserved), TierSet::GPU)
    );
    let woken = worker.take(WAKE, Answer::Ok, State { external_hits: Some(true), ..AWAKE });
    assert_eq!((cpu(&woken), woken.demoted), (Some(Preserved), TierSet::GPU));

    worker.take(keep, Answer::Ok, SLEEPS_1);
    assert_eq!(cpu(&worker.take(Move::Weights, Answer::Unrecorded, SLEEPS_1)), Some(Unknown));
    assert_eq!(worker.calls(WAKE), ["/wake_up", "/reset_prefix_cache?reset_external=true"]);
    let woken = worker.take(WAKE, Answer::Success(true), AWAKE);
    assert!(woken.serving() && cpu(&woken) == Some(Forgotten));

    // Of one that was not to be kept nothing is missing.
    worker.take(sleep(Level::One, false), Answer::Ok, SLEEPS_1);
    let woken = worker.take(WAKE, Answer::Ok, State { external_hits: Some(false), ..AWAKE });
    assert_eq!((cpu(&woken), woken.reason), (Some(Forgotten), Reason::Confirmed));

    // The engine declared the argument and evicted all the same.
    worker.take(keep, Answer::Ok, SLEEPS_1);
    let woken = worker.take(WAKE, Answer::Ok, State { external_hits: Some(false), ..AWAKE });
    assert_eq!((cpu(&woken), woken.reason), (Some(Forgotten), Reason::TierNotKept));
    assert!(woken.demoted.has(Tier::Cpu));

    // Where it is not proven to keep, nothing is paused first.
    for caps in [CPU, Capabilities { connector: Connector::SIMPLE_OFFLOAD, ..keeping }] {
        assert_eq!(Worker::serving(caps).refusal(keep), Some(Refusal::KeepNotProven));
        let pause = Move::Pause { mode: Mode::Keep, clear: true, keep_tier: true };
        assert_eq!(Worker::serving(caps).refusal(pause), Some(Refusal::KeepNotProven));
    }
}

#[test]
fn case_37_a_sleep_seen_by_the_metric_alone_forgets_the_gpu() {
    let mut worker = Worker::serving(READY);
    let only = State { sleep_state: Some(SleepState::One), ..State::default() };
    assert!(worker.now.has_drifted(Seen::read(&Observed::State(only), &READY)));
    let drift = worker.take(Move::Drift, Answer::Unrecorded, only);
    assert_eq!((drift.phase(), drift.kv.gpu), (Phase::Sleeping, Forgotten));
}

#[test]
fn a_crash_between_intent_and_outcome_reads_as_unknown() {
    for mv in [PAUSE, Move::Resume, sleep(Level::One, true), WAKE, RESET, RESET_EXTERNAL] {
        let verdict = Worker::serving(READY).see(mv, Answer::Unrecorded, Observed::Nothing);
        assert_eq!((verdict.kv, verdict.phase()), (PerTier::all(Unknown), Phase::Error));
        assert_eq!((verdict.evidence, verdict.demoted), (Evidence::None, TierSet::ALL));
    }
}

#[test]
fn an_engine_of_0_9_is_reset_before_it_serves_over_freed_memory() {
    let old = Capabilities {
        pauses: Pauses::Absent,
        is_sleeping_counts_pause: false,
        reaches_connector: false,
        reset_external: Some(false),
        table_survives_sleep: true,
        ..READY
    };
    let sleeping = State { is_sleeping: Some(true), ..State::default() };
    let awake = State { is_sleeping: Some(false), ..State::default() };
    let mut worker = Worker::serving(old);
    let slept = worker.take(sleep(Level::One, false), Answer::NoBody, sleeping);
    assert_eq!((slept.phase(), slept.kv.gpu), (Phase::Sleeping, Forgotten));
    assert!(!slept.owes_clear);
    assert_eq!(worker.calls(WAKE), ["/wake_up", "/reset_prefix_cache"]);
    let busy = Worker { now: worker.now, ..worker }.take(WAKE, Answer::Success(false), awake);
    assert!(!busy.serving());
    let woken = || Worker { now: slept.next, caps: old };
    assert!(woken().take(WAKE, Answer::NoBody, awake).serving());
    // That reset leaves the connector alone.
    let hit = State { external_hits: Some(true), ..awake };
    assert_eq!(woken().take(WAKE, Answer::Success(true), hit).reason, Reason::Confirmed);
}

#[test]
fn the_words_of_a_sleep_and_of_a_wake_are_the_engines() {
    let levels = [0, 1, 2, 3].map(Level::from_number);
    assert_eq!(levels, [None, Some(Level::One), Some(Level::Two), None]);
    let parts = [Part::Weights, Part::KvCache];
    assert_eq!(parts.into_iter().collect::<Parts>(), Parts::MEMORY);
}

#[test]
fn an_action_that_drops_the_cache_owes_the_stream_a_clear() {
    let owes = |mv, seen| Worker::serving(READY).take(mv, Answer::Ok, seen).owes_clear;
    assert!(owes(CLEAR, STOPPED) && !owes(PAUSE, STOPPED));
    assert!(owes(sleep(Level::One, false), SLEEPS_1));
}

#[test]
fn a_process_that_was_started_anew_has_its_weights() {
    let mut worker = Worker::serving(READY);
    worker.take(sleep(Level::Two, false), Answer::Ok, SLEEPS_2);
    let restarted = worker.take(Move::Restart, Answer::Unrecorded, AWAKE);
    assert!(restarted.serving() && restarted.next.weights_proven);
}

#[test]
fn what_nobody_could_look_at_stands_on_no_evidence() {
    for mv in [Move::Join, Move::Lost, Move::Restart, Move::Drift] {
        for (observed, evidence) in
            [(Observed::Nothing, Evidence::None), (Observed::Gone, Evidence::Observed)]
        {
            let verdict = Worker::serving(READY).see(mv, Answer::Unrecorded, observed);
            assert_eq!(verdict.evidence, evidence, "{mv:?}");
        }
    }
}

#[test]
fn a_flush_reaches_for_the_connector_only_where_there_is_one() {
    let flush = Move::Quarantine(Quarantine::Flush);
    let worker = Worker::serving(READY);
    assert_eq!(worker.calls(flush), ["/reset_prefix_cache?reset_external=true"]);
    let plain = Capabilities { tiers: TierSet::NONE, reset_external: Some(false), ..READY };
    assert_eq!(Worker::serving(plain).calls(flush), ["/reset_prefix_cache"]);
    let deaf = Capabilities { reset_external: Some(false), ..READY };
    assert_eq!(Worker::serving(deaf).refusal(flush), Some(Refusal::ExternalNotOffered));
}

#[test]
fn a_mode_that_the_engine_ignores_or_does_not_show_is_not_sent() {
    let old = Worker::serving(Capabilities { pauses: Pauses::AbortOnly, ..READY });
    let pause = |mode| Move::Pause { mode, clear: false, keep_tier: false };
    assert_eq!(old.refusal(pause(Mode::Keep)), Some(Refusal::ModeNotOffered));
    assert_eq!(old.refusal(pause(Mode::Wait)), Some(Refusal::ModeNotOffered));
    assert_eq!(old.calls(pause(Mode::Abort)), ["/pause?mode=abort&clear_cache=false"]);
}
