//! Do the invariants hold for every move, on every engine, after every answer and observation?
//!
//! Two sweeps, since the whole product is too large: every observation on a few engines, and every
//! engine and standing under one observation of each kind. What each verdict is held to is written
//! down here a second time, from the invariants and not from the code.

use super::*;
use crate::vocab::Disposition::{Forgotten, Preserved, Unknown};

fn moves() -> Vec<Move> {
    let mut moves = Vec::from([
        Move::Resume,
        Move::Join,
        Move::Restart,
        Move::Lost,
        Move::Gap,
        Move::Weights,
        Move::Drift,
        Move::ClearUnexplained,
    ]);
    moves.extend(Quarantine::ALL.iter().map(|how| Move::Quarantine(*how)));
    for flag in [false, true] {
        moves.push(Move::Reset { external: flag, running: false });
        for keep_tier in [false, true] {
            moves.push(Move::Pause { mode: Mode::Keep, clear: flag, keep_tier });
        }
        moves.push(Move::Pause { mode: Mode::Abort, clear: flag, keep_tier: false });
        for level in [None, Some(Level::One), Some(Level::Two)] {
            moves.push(Move::Sleep { level, mode: Mode::Wait, keep_tier: flag });
        }
    }
    for weights in Weights::ALL {
        let weight_part = Parts::of(Part::Weights);
        for tags in [Parts::NONE, weight_part, Parts::of(Part::KvCache), Parts::MEMORY] {
            moves.push(Move::Wake { tags, weights: *weights });
        }
    }
    moves
}

const ANSWERS: [Answer; 12] = [
    Answer::Ok,
    Answer::Success(true),
    Answer::Success(false),
    Answer::NoBody,
    Answer::AwaitsWeights,
    Answer::Mismatch,
    Answer::Refused,
    Answer::Failed,
    Answer::Timeout,
    Answer::Cut,
    Answer::NotSent(Refusal::Busy),
    Answer::Unrecorded,
];

const MAYBE: [Option<bool>; 3] = [None, Some(false), Some(true)];

fn observations() -> Vec<Observed> {
    let mut all = Vec::from([Observed::Nothing, Observed::Gone]);
    let metric = SleepState::ALL.iter().copied().map(Some).chain([None]);
    for sleep_state in metric {
        for is_paused in MAYBE {
            for is_sleeping in MAYBE {
                for local_hits in MAYBE {
                    for (external_hits, canary) in
                        MAYBE.iter().flat_map(|hits| MAYBE.iter().map(move |c| (*hits, *c)))
                    {
                        all.push(Observed::State(State {
                            is_paused,
                            is_sleeping,
                            sleep_state,
                            local_hits,
                            external_hits,
                            canary,
                            ..State::UNREAD
                        }));
                    }
                }
            }
        }
    }
    // What the streams and the requests showed matters beside a state that was asked for.
    for state in [AWAKE, STOPPED, SLEEPS_1, SLEEPS_2] {
        for clear in Clear::ALL.iter().copied().map(Some).chain([None]) {
            for still_running in MAYBE {
                all.push(Observed::State(State { clear, still_running, ..state }));
            }
        }
    }
    all
}

fn engines() -> Vec<Capabilities> {
    let tiers = [TierSet::GPU, TierSet::GPU.with(TierSet::of(Tier::Cpu)), TierSet::ALL];
    let mut all = Vec::new();
    for bits in 0..32_u8 {
        let bit = |at: u8| bits >> at & 1 == 1;
        for tiers in tiers {
            all.push(Capabilities {
                reaches_connector: bit(0),
                reset_external: bit(1).then_some(true),
                table_survives_sleep: bit(2),
                connector: Connector { clears: bit(3), keeps: true, in_process: bit(4) },
                tiers,
                ..READY
            });
        }
    }
    all
}

fn standings() -> Vec<Standing> {
    let mut all = Vec::new();
    for phase in Phase::ALL {
        for since in Disposition::ALL {
            for (weights_proven, suspect) in
                [(false, false), (false, true), (true, false), (true, true)]
            {
                for (stale, awake) in [
                    (TierSet::NONE, Parts::NONE),
                    (TierSet::of(Tier::Cpu), Parts::of(Part::Weights)),
                    (TierSet::NONE, Parts::ALL),
                ] {
                    all.push(Standing {
                        phase: *phase,
                        since_serving: PerTier::all(*since),
                        stale,
                        awake,
                        takes_weights: !awake.is_empty() && !suspect,
                        weights_proven,
                        suspect,
                    });
                }
            }
        }
    }
    all
}

/// One judgement, and what it is held to.
struct Judged {
    mv: Move,
    caps: Capabilities,
    before: Standing,
    answer: Answer,
    observed: Observed,
    seen: Seen,
    verdict: Verdict,
}

impl Judged {
    fn check(&self) {
        let ok = self.shape_holds()
            && self.demotion_holds()
            && self.standing_holds()
            && if self.is_noticed() { self.noticed_holds() } else { self.asked_holds() };
        assert!(
            ok,
            "{:?} on {:?} at {:?}: {:?} then {:?} gave {:?}",
            self.mv, self.caps, self.before, self.answer, self.observed, self.verdict
        );
    }

    fn is_noticed(&self) -> bool {
        matches!(
            self.mv,
            Move::Join
                | Move::Restart
                | Move::Lost
                | Move::Gap
                | Move::Weights
                | Move::Drift
                | Move::ClearUnexplained
        )
    }

    /// Nothing reached the engine.
    fn is_untouched(&self) -> bool {
        self.verdict.evidence == Evidence::NotSent
    }

    fn shape_holds(&self) -> bool {
        let v = &self.verdict;
        let tiers_told = Tier::ALL.iter().all(|tier| {
            v.tier(*tier).is_some() == (*tier == Tier::Gpu || self.caps.tiers.has(*tier))
        });
        tiers_told
            && v.demoted.without(v.present).is_empty()
            && v.serving() == (v.phase() == Phase::Serving)
    }

    /// What is not preserved is demoted, by this row or, where the action does not touch the tier,
    /// by the one before. What is demoted is not preserved, but for beliefs that went cold before a
    /// call that then did nothing to the tier.
    fn demotion_holds(&self) -> bool {
        let v = &self.verdict;
        v.present.iter().all(|tier| {
            let kv = v.kv.get(tier);
            let carried = matches!(self.mv, Move::Wake { .. })
                && tier != Tier::Gpu
                && kv == self.before.since_serving.get(tier);
            let idle = matches!(v.reason, Reason::Refused | Reason::NotAchieved);
            match (kv, v.demoted.has(tier)) {
                (Preserved, true) => idle,
                // A row of what was not sent repeats what was so before.
                (Forgotten | Unknown, false) => carried || self.is_untouched(),
                _ => true,
            }
        })
    }

    fn standing_holds(&self) -> bool {
        let next = &self.verdict.next;
        let carried = Tier::ALL.iter().all(|tier| {
            next.since_serving.get(*tier) != Preserved
                || next.phase == Phase::Serving
                || self.before.since_serving.get(*tier) == Preserved
        });
        let weightless = next.phase == Phase::Serving && (!next.weights_proven || next.suspect);
        // Only a tier proven empty stops being stale.
        let stale = self.before.stale.iter().all(|tier| {
            next.stale.has(tier)
                || self.verdict.kv.get(tier) == Forgotten
                || !self.caps.present().has(tier)
        });
        // A part that is awake falls asleep by a sleep or in another life alone.
        let may_lose = matches!(self.mv, Move::Sleep { .. } | Move::Restart)
            || self.before.awake.covers(Parts::MEMORY);
        let parts = may_lose || next.awake.covers(self.before.awake);
        // Weights are awaited of somebody only where they named the memory that takes them.
        let asked = matches!(self.mv, Move::Wake { tags, weights: Weights::Unproven }
            if tags == Parts::of(Part::Weights));
        let named = !next.takes_weights || self.before.takes_weights || asked;
        let shape = carried && stale && parts && named;
        shape && (self.is_untouched() && next.phase == self.before.phase || !weightless)
    }

    fn asked_holds(&self) -> bool {
        let v = &self.verdict;
        let nothing_sent = matches!(self.answer, Answer::NotSent(_))
            || self.mv == Move::Quarantine(Quarantine::Isolate);
        let believed = if self.before.phase == Phase::Error {
            PerTier::all(Unknown)
        } else {
            self.before.since_serving
        };
        let as_before = |next: &Standing| {
            let takes_weights = self.before.takes_weights;
            Standing { takes_weights, ..*next } == self.before
        };
        if nothing_sent {
            return self.is_untouched()
                && v.kv == believed
                && v.demoted.is_empty()
                && as_before(&v.next);
        }
        if self.is_untouched() {
            return self.answer == Answer::Refused && v.kv == believed && as_before(&v.next);
        }
        let proven = self.is_success() && self.agrees();
        let anything_preserved = v.present.iter().any(|tier| v.kv.get(tier) == Preserved);
        let gpu_preserved = v.kv.gpu == Preserved;
        let may_preserve_gpu = match self.mv {
            Move::Pause { clear, .. } => !clear,
            Move::Resume => {
                self.before.phase == Phase::Paused
                    && self.before.since_serving == PerTier::all(Preserved)
            }
            // What no rank cleared, and no answer says to be cleared.
            Move::Reset { .. } | Move::Quarantine(_) => {
                let is_missing = self.clear() == Some(Clear::Missing);
                is_missing && !matches!(self.answer, Answer::Success(true))
            }
            _ => false,
        };
        let is_forgotten = v.kv.gpu == Forgotten && self.ends_in_reset() && proven;
        let shown = !is_forgotten
            || self.answer == Answer::Success(true) && self.clear().is_none()
            || self.clear() == Some(Clear::Seen);
        let unproven_is_unknown = proven
            || v.kv == PerTier::all(Unknown)
            || self.seen == Seen::Gone
                && v.kv == PerTier { gpu: Forgotten, ..PerTier::all(Unknown) };
        let unobserved = self.seen != Seen::Nothing
            || v.phase() == Phase::Error && v.evidence != Evidence::Observed;
        let evidence = self.seen == Seen::Nothing || v.evidence == Evidence::Observed;
        unproven_is_unknown
            && unobserved
            && evidence
            && (proven || v.demoted == v.present)
            && (!anything_preserved || proven)
            && (!gpu_preserved || may_preserve_gpu)
            && (!v.serving() || proven && self.seen == Seen::Serving && !self.answers_otherwise())
            && (!v.owes_clear || proven && v.kv.gpu != Preserved)
            && shown
            && (!self.runs_on() || v.kv.gpu == Unknown && v.reason != Reason::Confirmed)
    }

    fn state(&self) -> State {
        match self.observed {
            Observed::State(state) => state,
            Observed::Nothing | Observed::Gone => State::UNREAD,
        }
    }

    fn clear(&self) -> Option<Clear> {
        self.state().clear
    }

    fn ends_in_reset(&self) -> bool {
        matches!(self.mv, Move::Reset { .. } | Move::Quarantine(Quarantine::Flush))
    }

    /// Requests run that a stop was to end, or to wait for.
    fn runs_on(&self) -> bool {
        let ends = match self.mv {
            Move::Pause { mode, .. } | Move::Sleep { mode, .. } => mode != Mode::Keep,
            _ => false,
        };
        ends && self.state().still_running == Some(true)
    }

    fn answers_otherwise(&self) -> bool {
        self.state().canary == Some(false)
    }

    fn is_success(&self) -> bool {
        match self.answer {
            Answer::Ok | Answer::NoBody | Answer::Success(_) | Answer::AwaitsWeights => true,
            Answer::Mismatch | Answer::Refused | Answer::Failed => false,
            Answer::Timeout | Answer::Cut | Answer::NotSent(_) | Answer::Unrecorded => false,
        }
    }

    /// Whether the observation is one that the move can have led to.
    fn agrees(&self) -> bool {
        let asleep = matches!(self.seen, Seen::Sleeping(_) | Seen::PausedOrSleeping);
        match self.mv {
            Move::Pause { .. } => matches!(self.seen, Seen::Paused | Seen::PausedOrSleeping),
            Move::Resume => self.seen == Seen::Serving,
            Move::Sleep { level: Some(_), .. } if self.seen == Seen::PausedOrSleeping => true,
            Move::Sleep { level: Some(level), .. } => {
                self.seen == Seen::Sleeping(Some(level)) || self.seen == Seen::Sleeping(None)
            }
            Move::Sleep { level: None, .. } => false,
            Move::Wake { tags, .. } => {
                let whole = tags.is_empty() || tags.with(self.before.awake).covers(Parts::MEMORY);
                if whole { self.seen == Seen::Serving } else { asleep }
            }
            _ => self.seen == Seen::Serving || matches!(self.seen, Seen::Paused) || asleep,
        }
    }

    fn noticed_holds(&self) -> bool {
        let v = &self.verdict;
        let expected_phase = match (self.mv, self.seen) {
            (Move::Lost, _) => Phase::Error,
            (Move::Gap | Move::Weights | Move::ClearUnexplained, _) => self.before.phase,
            (_, Seen::Serving) => Phase::Serving,
            (_, Seen::Paused) => Phase::Paused,
            (_, Seen::Sleeping(_)) => Phase::Sleeping,
            _ => Phase::Error,
        };
        let held_back = expected_phase == Phase::Serving;
        let weightless = held_back && v.phase() == Phase::Waking && !v.next.weights_proven;
        let suspect = held_back && v.phase() == Phase::Error && v.next.suspect;
        // A part of it is known to be awake.
        let partly = expected_phase == Phase::Sleeping
            && v.phase() == Phase::Waking
            && !self.before.partly_awake().is_empty();
        let settled = self.mv != Move::Drift || !v.next.has_drifted(self.seen);
        Tier::ALL.iter().all(|tier| v.kv.get(*tier) != Preserved)
            && v.demoted == v.present
            && (v.phase() == expected_phase || weightless || suspect || partly)
            && settled
            && !v.owes_clear
    }
}

fn sweep(
    engines: &[Capabilities],
    standings: &[Standing],
    observations: &[Observed],
    mut reach: impl FnMut(&Verdict),
) {
    for mv in moves() {
        for (caps, before) in engines.iter().flat_map(|c| standings.iter().map(move |b| (c, b))) {
            for (answer, observed) in
                ANSWERS.iter().flat_map(|a| observations.iter().map(move |o| (*a, *o)))
            {
                let verdict = judge(mv, caps, before, answer, &observed);
                let (caps, before, seen) = (*caps, *before, Seen::read(&observed, caps));
                Judged { mv, caps, before, answer, observed, seen, verdict }.check();
                reach(&verdict);
            }
        }
    }
}

#[test]
fn the_invariants_hold_under_every_observation() {
    let old = Capabilities {
        pauses: Pauses::Absent,
        is_sleeping_counts_pause: false,
        table_survives_sleep: true,
        ..READY
    };
    let middle = Capabilities { is_sleeping_counts_pause: false, ..READY };
    let standings: Vec<Standing> = standings().into_iter().step_by(31).collect();
    let mut reasons = Vec::new();
    sweep(&[READY, middle, old], &standings, &observations(), |verdict| {
        if !reasons.contains(&verdict.reason) {
            reasons.push(verdict.reason);
        }
    });
    // The sweep is worth something only if it gets everywhere.
    let words: Vec<&str> = reasons.iter().map(|reason| reason.as_str()).collect();
    assert_eq!(words.len(), 25, "{words:?}");
}

#[test]
fn the_invariants_hold_on_every_engine_and_standing() {
    let both_flags = state(true, true, None);
    let states = [AWAKE, STOPPED, SLEEPS_1, SLEEPS_2, both_flags];
    let mut observed: Vec<Observed> = states.map(Observed::State).into();
    observed.extend([Observed::Nothing, Observed::Gone]);
    let engines = engines();
    for (at, before) in standings().iter().enumerate() {
        // A part of the engines for each standing; eight standings in a row see all of them.
        let engines: Vec<Capabilities> = engines.iter().skip(at % 8).step_by(8).copied().collect();
        sweep(&engines, &[*before], &observed, |_| {});
    }
}

#[test]
fn a_state_that_may_be_either_of_two_is_no_drift_from_one_of_them() {
    let worker = |mv, seen| {
        let mut worker = Worker::serving(READY);
        worker.take(mv, Answer::Ok, seen);
        worker.now
    };
    let paused = worker(PAUSE, STOPPED);
    let asleep = worker(sleep(Level::One, false), SLEEPS_1);
    for (standing, has_drifted) in
        [(paused, false), (asleep, false), (Standing::SERVING, true), (Standing::UNOBSERVED, false)]
    {
        assert_eq!(standing.has_drifted(Seen::PausedOrSleeping), has_drifted, "{standing:?}");
    }
    assert!(paused.has_drifted(Seen::Serving));
}

/// The truth table of ENGINE section 3.3 (vLLM 0.32.0, observed), as it is read.
#[test]
fn the_states_that_an_engine_shows_are_told_apart() {
    use SleepState as S;
    let rows = [
        ("fresh", (false, false, S::Awake), Seen::Serving),
        ("paused", (true, true, S::Awake), Seen::Paused),
        ("sleep 0", (true, true, S::Unnamed), Seen::Unnamed),
        ("sleep 1", (true, true, S::One), Seen::Sleeping(Some(Level::One))),
        ("sleep 2", (true, true, S::Two), Seen::Sleeping(Some(Level::Two))),
        ("sleep, draining", (true, true, S::Awake), Seen::Paused),
        ("sleep 1, resume", (false, true, S::One), Seen::Sleeping(Some(Level::One))),
        ("flags awake, metric not", (false, false, S::One), Seen::Unnamed),
        ("flags awake, metric zero", (false, false, S::Unnamed), Seen::Unnamed),
        ("memory asleep, metric awake", (false, true, S::Awake), Seen::Unnamed),
    ];
    for (what, (paused, sleeping, metric), seen) in rows {
        let observed = Observed::State(state(paused, sleeping, Some(metric)));
        assert_eq!(Seen::read(&observed, &READY), seen, "{what}");
    }
    // The Rust frontend has no metric, engines up to 0.16.0 another meaning of `is_sleeping`, and
    // those up to 0.11.0 no pause.
    let memory = Capabilities { is_sleeping_counts_pause: false, ..READY };
    let no_pause = Capabilities { pauses: Pauses::Absent, ..memory };
    let (no, yes) = (Some(false), Some(true));
    let rows = [
        (READY, (no, no), Seen::Serving),
        (READY, (yes, yes), Seen::PausedOrSleeping),
        (READY, (None, yes), Seen::PausedOrSleeping),
        (READY, (None, no), Seen::Serving),
        (READY, (no, yes), Seen::Sleeping(None)),
        (READY, (yes, None), Seen::PausedOrSleeping),
        (READY, (no, None), Seen::Nothing),
        (READY, (None, None), Seen::Nothing),
        (memory, (no, no), Seen::Serving),
        (memory, (yes, no), Seen::Paused),
        (memory, (no, yes), Seen::Sleeping(None)),
        (memory, (yes, yes), Seen::Sleeping(None)),
        (memory, (None, no), Seen::Nothing),
        (no_pause, (None, no), Seen::Serving),
        (no_pause, (None, yes), Seen::Sleeping(None)),
    ];
    for (caps, (is_paused, is_sleeping), seen) in rows {
        let observed = Observed::State(State { is_paused, is_sleeping, ..State::default() });
        assert_eq!(Seen::read(&observed, &caps), seen, "{is_paused:?} {is_sleeping:?}");
    }
}

#[test]
fn no_plan_sends_what_the_engine_must_not_get() {
    for mv in moves() {
        for caps in engines() {
            for keep_argument in [false, true] {
                let caps = Capabilities { keep_argument, ..caps };
                for now in standings() {
                    check_plan(mv, &caps, &now);
                }
            }
        }
    }
}

fn check_plan(mv: Move, caps: &Capabilities, now: &Standing) {
    let Plan::Send { calls, demote, clear } = plan(mv, caps, now) else { return };
    let told = || format!("{mv:?} on {caps:?} at {now:?}: {calls:?}");
    let awake = matches!(now.phase, Phase::Serving | Phase::Paused);
    for call in &calls {
        let sent = call.to_string();
        let allowed = match call {
            Call::Pause { .. } => now.phase == Phase::Serving,
            Call::Resume => now.phase == Phase::Paused,
            Call::Sleep { .. } => awake,
            Call::WakeUp { .. } => !awake,
            Call::ResetPrefixCache { .. } => awake || matches!(mv, Move::Wake { .. }),
            Call::Reload => matches!(mv, Move::Wake { .. }),
        };
        assert!(allowed, "{}", told());
        let spares = sent.contains("clear_connector_cache");
        assert!(!spares || caps.keeps_tier(), "{}", told());
        assert!(!sent.contains("level=0"), "{}", told());
    }
    // What the plan demotes is what the verdict of a success demotes, so that nothing turns cold
    // only after the call.
    let seen = match mv {
        Move::Pause { .. } => STOPPED,
        Move::Sleep { level: Some(Level::Two), .. } => SLEEPS_2,
        Move::Sleep { .. } => SLEEPS_1,
        Move::Wake { tags, .. }
            if !tags.is_empty() && !tags.with(now.awake).covers(Parts::MEMORY) =>
        {
            SLEEPS_1
        }
        _ if now.phase == Phase::Paused && mv != Move::Resume => STOPPED,
        _ => AWAKE,
    };
    let verdict = judge(mv, caps, now, Answer::Success(true), &Observed::State(seen));
    assert_eq!(verdict.demoted, demote, "{}", told());
    let drift = matches!(mv, Move::Drift);
    assert!(drift || clear.is_none() || clear == Some(verdict.kv), "{}", told());
    assert!(!verdict.owes_clear || clear.is_some(), "{}", told());
    assert!(
        calls.is_empty()
            || verdict.reason == Reason::Confirmed
            || !now.weights_proven
            || now.suspect,
        "{} {verdict:?}",
        told()
    );
}
