//! The decision table as `fak witness table` prints it.
//!
//! Invariant: no cell is written down here. Each row runs [`plan`] and [`judge`] on every sample of
//! its circumstance and says what they have in common, so that what is printed is what is done.

use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::fmt;

use super::{
    Answer, Capabilities, Clear, Connector, Level, Mode, Move, Observed, Part, Parts, Pauses, Plan,
    Quarantine, Seen, SleepState, Standing, State, Verdict, Weights, judge, plan,
};
use crate::vocab::{
    Action,
    Disposition::{self, Forgotten, Preserved, Unknown},
    PerTier, Phase, Tier, TierSet,
};

/// What a row says of one tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cell {
    /// This, whatever the connector.
    Is(Disposition),
    /// What it was: the action does not touch the tier.
    AsBefore,
    /// Forgotten for a connector that is known to clear itself, on an engine that reaches it;
    /// unknown for every other.
    ByConnector,
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Is(disposition) => disposition.as_str(),
            Self::AsBefore => "as before",
            Self::ByConnector => "by connector",
        })
    }
}

/// What a row says of the phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PhaseCell {
    /// This.
    Is(Phase),
    /// What it was.
    Unchanged,
    /// What the engine shows.
    AsObserved,
}

impl fmt::Display for PhaseCell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Is(phase) => phase.as_str(),
            Self::Unchanged => "unchanged",
            Self::AsObserved => "as observed",
        })
    }
}

/// One row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// The action.
    pub action: Action,
    /// What tells this row from the action's others.
    pub circumstance: &'static str,
    /// Whether the row is one of the five that the table started from. They come first, and the
    /// one on levels 1 and 2 is printed once for each, so that a level names a row.
    pub base: bool,
    /// The calls, in order; `nothing` where fak refuses; `-` where nobody asked for a call.
    pub sent: String,
    /// The phase after it.
    pub phase: PhaseCell,
    /// What becomes of each tier.
    pub tiers: PerTier<Cell>,
    /// The tiers whose beliefs go cold.
    pub demoted: TierSet,
    /// Whether the worker serves after it; `None` where that goes with the phase.
    pub serving: Option<bool>,
}

impl Row {
    /// The gpu tier.
    #[must_use]
    pub const fn kv(&self) -> Cell {
        self.tiers.gpu
    }

    /// Whether any belief goes cold.
    #[must_use]
    pub const fn warm_demoted(&self) -> bool {
        !self.demoted.is_empty()
    }
}

/// The whole table, base rows first.
pub fn table() -> impl Iterator<Item = Row> {
    let specs = [base(), stops(), wakes(), resets(), refused(), unproven(), noticed()];
    specs.into_iter().flatten().map(|spec| spec.row())
}

const READY: Capabilities = Capabilities {
    pauses: Pauses::Modes,
    is_sleeping_counts_pause: true,
    keep_argument: false,
    reaches_connector: true,
    reset_external: Some(true),
    table_survives_sleep: false,
    staged_wake: true,
    connector: Connector::OFFLOADING,
    tiers: TierSet::ALL,
};
const KEEPING: Capabilities = Capabilities { keep_argument: true, ..READY };
const NO_PAUSE: Capabilities = Capabilities { pauses: Pauses::Absent, ..READY };
const BEFORE_0_24: Capabilities = Capabilities { staged_wake: false, ..READY };
const BEFORE_0_23: Capabilities = Capabilities { reaches_connector: false, ..READY };
const V0_9: Capabilities = Capabilities {
    pauses: Pauses::Absent,
    is_sleeping_counts_pause: false,
    reset_external: Some(false),
    table_survives_sleep: true,
    ..BEFORE_0_23
};
const OUTSIDE: Capabilities = Capabilities { connector: Connector::MOONCAKE_STORE, ..READY };

const SERVING: Standing = Standing::SERVING;
const PAUSED: Standing = Standing { phase: Phase::Paused, ..SERVING };
const ASLEEP: Standing = Standing { phase: Phase::Sleeping, awake: Parts::NONE, ..SERVING };
const NO_WEIGHTS: Standing = Standing { weights_proven: false, ..ASLEEP };
/// Their memory is awake, to take weights.
const TAKES_WEIGHTS: Standing =
    Standing { phase: Phase::Waking, awake: Parts::of(Part::Weights), ..NO_WEIGHTS };

const fn state(is_paused: bool, is_sleeping: bool, sleep_state: SleepState) -> State {
    State {
        is_paused: Some(is_paused),
        is_sleeping: Some(is_sleeping),
        sleep_state: Some(sleep_state),
        ..State::UNREAD
    }
}

const AWAKE: State = state(false, false, SleepState::Awake);
const SCHEDULER_STOPPED: State = state(true, true, SleepState::Awake);
const MEMORY_RELEASED: State = state(true, true, SleepState::One);
const SERVES: Observed = Observed::State(AWAKE);
const STOPPED: Observed = Observed::State(SCHEDULER_STOPPED);
const SLEEPS_1: Observed = Observed::State(MEMORY_RELEASED);
const SLEEPS_2: Observed = Observed::State(state(true, true, SleepState::Two));
/// Awake, and not answering as before.
const OTHERWISE: Observed = Observed::State(State { canary: Some(false), ..AWAKE });
/// Awake, and by the event streams this became of the clear that is owed.
const fn serves_with(clear: Clear) -> Observed {
    Observed::State(State { clear: Some(clear), ..AWAKE })
}
/// Stopped, and requests run all the same.
const RUNS_ON: Observed = Observed::State(State { still_running: Some(true), ..SCHEDULER_STOPPED });
/// Asleep, and requests run all the same.
const ASLEEP_RUNS_ON: Observed =
    Observed::State(State { still_running: Some(true), ..MEMORY_RELEASED });
/// Signals that no answer agrees with: all zero while both flags are true.
const UNNAMED: Observed = Observed::State(state(true, true, SleepState::Unnamed));
/// The metric shows a sleep and the flags none.
const TORN: Observed = Observed::State(state(false, false, SleepState::One));

const PAUSE: Move = Move::Pause { mode: Mode::Keep, clear: false, keep_tier: false };
const ABORT: Move = Move::Pause { mode: Mode::Abort, clear: false, keep_tier: false };
const CLEAR: Move = Move::Pause { mode: Mode::Keep, clear: true, keep_tier: false };
const CLEAR_GPU: Move = Move::Pause { mode: Mode::Keep, clear: true, keep_tier: true };
const WAKE: Move = Move::Wake { tags: Parts::NONE, weights: Weights::Unproven };
const WAKE_PART: Move = Move::Wake { tags: Parts::of(Part::Weights), weights: Weights::Unproven };
const WAKE_SAME: Move = Move::Wake { tags: Parts::NONE, weights: Weights::Same };
const WAKE_LOADED: Move = Move::Wake { tags: Parts::NONE, weights: Weights::Loaded };
const WAKE_CHANGED: Move = Move::Wake { tags: Parts::NONE, weights: Weights::Changed };
const RESET: Move = Move::Reset { external: false, running: false };
const RESET_EXTERNAL: Move = Move::Reset { external: true, running: false };
const FLUSH: Move = Move::Quarantine(Quarantine::Flush);

const fn sleep(level: Option<Level>, keep_tier: bool) -> Move {
    Move::Sleep { level, mode: Mode::Wait, keep_tier }
}

fn base() -> Vec<Spec> {
    [
        Spec::new("default", PAUSE).seen(&[STOPPED]),
        Spec::new("level 1", sleep(Some(Level::One), false)).seen(&[SLEEPS_1]),
        Spec::new("level 2", sleep(Some(Level::Two), false)).seen(&[SLEEPS_2]),
        // fak sends none; this is the answer where one got through, or where its doing is seen.
        Spec::new("no level", sleep(None, false)).seen(&[UNNAMED, SLEEPS_1]).regardless(),
        Spec::new("success:true", RESET).answers(&[Answer::Success(true)]),
        Spec::new("full, same weights", WAKE).from(&[ASLEEP]),
    ]
    .map(|spec| Spec { base: true, ..spec })
    .into()
}

fn stops() -> Vec<Spec> {
    [
        Spec::new("clear asked", CLEAR).seen(&[STOPPED]),
        Spec::new("clear asked, engine before 0.23", CLEAR).on(BEFORE_0_23).seen(&[STOPPED]),
        Spec::new("clear asked, keep tier, argument and connector proven", CLEAR_GPU)
            .on(KEEPING)
            .seen(&[STOPPED]),
        Spec::new("after a witnessed preserving pause, same incarnation, no drift", Move::Resume)
            .from(&[PAUSED])
            .since(&[Preserved]),
        Spec::new("otherwise", Move::Resume).from(&[PAUSED]).since(&[Unknown, Forgotten]),
        Spec::new("level 1 or 2, engine before 0.23", sleep(Some(Level::One), false))
            .on(BEFORE_0_23)
            .seen(&[SLEEPS_1]),
        Spec::new("keep tier, argument and connector proven", sleep(Some(Level::One), true))
            .on(KEEPING)
            .seen(&[SLEEPS_1]),
        Spec::new("abort or wait, requests still run", ABORT).seen(&[RUNS_ON]),
        Spec::new("abort or wait, requests still run", sleep(Some(Level::One), false))
            .seen(&[ASLEEP_RUNS_ON]),
    ]
    .into()
}

fn wakes() -> Vec<Spec> {
    [
        Spec::new("partial tags", WAKE_PART).from(&[ASLEEP]).seen(&[SLEEPS_1]),
        Spec::new("full, weights changed", WAKE_CHANGED)
            .from(&[ASLEEP])
            .answers(&[Answer::Success(true)]),
        Spec::new("full, level 2 without proof of the same weights", WAKE)
            .from(&[NO_WEIGHTS])
            .answers(&[Answer::Success(true)]),
        Spec::new("full, weights changed, engine from 0.17 to 0.23", WAKE_CHANGED)
            .on(BEFORE_0_24)
            .from(&[ASLEEP])
            .answers(&[Answer::Success(true)]),
        Spec::new("full, weights not loaded yet", WAKE)
            .from(&[NO_WEIGHTS])
            .answers(&[Answer::AwaitsWeights])
            .seen(&[SLEEPS_2]),
        Spec::new("full, weights loaded by their owner since", WAKE_LOADED)
            .from(&[TAKES_WEIGHTS])
            .answers(&[Answer::Success(true)]),
        Spec::new("full, weights loaded, reset success:false", WAKE_LOADED)
            .from(&[TAKES_WEIGHTS])
            .answers(&[Answer::Success(false)]),
        Spec::new("full, same weights, canary answered otherwise", WAKE)
            .from(&[ASLEEP])
            .seen(&[OTHERWISE]),
        Spec::new("full, same weights, engine 0.9.x", WAKE)
            .on(V0_9)
            .from(&[ASLEEP])
            .answers(&[Answer::NoBody]),
    ]
    .into()
}

fn resets() -> Vec<Spec> {
    let no_body = [Answer::Ok, Answer::NoBody];
    [
        Spec::new("external, success:true", RESET_EXTERNAL).answers(&[Answer::Success(true)]),
        Spec::new("success:false", RESET).answers(&[Answer::Success(false)]),
        Spec::new("external, success:false", RESET_EXTERNAL).answers(&[Answer::Success(false)]),
        Spec::new("200 without a body", RESET).answers(&no_body),
        Spec::new("external, 200 without a body", RESET_EXTERNAL).answers(&no_body),
        Spec::new("success:false, no clear before the barrier", RESET)
            .answers(&[Answer::Success(false)])
            .seen(&[serves_with(Clear::Missing)]),
        Spec::new("external, success:false, no clear before the barrier", RESET_EXTERNAL)
            .answers(&[Answer::Success(false)])
            .seen(&[serves_with(Clear::Missing)]),
        Spec::new("200 without a body, clear before the barrier", RESET)
            .answers(&no_body)
            .seen(&[serves_with(Clear::Seen)]),
        Spec::new("200 without a body, no clear before the barrier", RESET)
            .answers(&no_body)
            .seen(&[serves_with(Clear::Missing)]),
        Spec::new("success:true, no clear before the barrier, or not on every rank", RESET)
            .answers(&[Answer::Success(true)])
            .seen(&[serves_with(Clear::Missing), serves_with(Clear::Partly)]),
        Spec::new("success:true, barrier not seen in time", RESET)
            .answers(&[Answer::Success(true)])
            .seen(&[serves_with(Clear::Untold)]),
        Spec::new("flush, success:true", FLUSH).answers(&[Answer::Success(true)]),
        Spec::new("isolate", Move::Quarantine(Quarantine::Isolate))
            .from(&[SERVING, PAUSED, ASLEEP]),
    ]
    .into()
}

fn refused() -> Vec<Spec> {
    let any = [SERVING, PAUSED, ASLEEP];
    [
        Spec::new("engine without /pause", PAUSE).on(NO_PAUSE).from(&any),
        Spec::new("keep tier, not proven", sleep(Some(Level::One), true)).from(&any),
        Spec::new("asleep already", sleep(Some(Level::One), false)).from(&[ASLEEP]),
        Spec::new("asleep already", PAUSE).from(&[ASLEEP]),
        Spec::new("asleep", Move::Resume).from(&[ASLEEP]),
        Spec::new("awake already", WAKE).from(&[SERVING]),
        Spec::new("only paused", WAKE).from(&[PAUSED]),
        Spec::new("weights loaded, and their memory asleep", WAKE_LOADED).from(&[NO_WEIGHTS]),
        Spec::new("same weights, dropped, and their memory asleep", WAKE_SAME).from(&[NO_WEIGHTS]),
        Spec::new("state not known", PAUSE).from(&[Standing::UNOBSERVED]),
    ]
    .into()
}

fn unproven() -> Vec<Spec> {
    let label = "timeout, 5xx, cut connection, or observation against answer";
    [
        Spec::new(label, PAUSE),
        Spec::new(label, Move::Resume).from(&[PAUSED]),
        Spec::new(label, sleep(Some(Level::One), false)),
        Spec::new(label, WAKE).from(&[ASLEEP]),
        Spec::new(label, RESET),
        Spec::new(label, FLUSH),
    ]
    .map(|spec| spec.answers(&[Answer::Timeout, Answer::Failed, Answer::Cut, Answer::Ok]))
    .map(|spec| spec.seen(&[UNNAMED, TORN]))
    .into()
}

fn noticed() -> Vec<Spec> {
    let any = [SERVING, PAUSED, ASLEEP];
    let new = [Standing::UNOBSERVED];
    [
        Spec::new("first look, the state metric shows sleep", Move::Join)
            .from(&new)
            .seen(&[SLEEPS_1, SLEEPS_2, TORN]),
        Spec::new("first look, otherwise", Move::Join).from(&new).seen(&[SERVES, STOPPED, UNNAMED]),
        Spec::new("cpu tier in process", Move::Restart).seen(&[SERVES, STOPPED, SLEEPS_1]),
        Spec::new("cpu tier outside", Move::Restart).on(OUTSIDE).seen(&[SERVES, STOPPED, SLEEPS_1]),
        Spec::new("no answer any more", Move::Lost).seen(&[Observed::Nothing, Observed::Gone]),
        Spec::new("not closed, that rank", Move::Gap).from(&any),
        Spec::new("changed", Move::Weights).from(&any),
        Spec::new("the state metric shows sleep", Move::Drift).seen(&[SLEEPS_1, SLEEPS_2, TORN]),
        Spec::new("otherwise", Move::Drift).seen(&[SERVES, STOPPED, UNNAMED]),
        Spec::new("AllBlocksCleared not explained by fak's own action", Move::ClearUnexplained)
            .from(&any),
    ]
    .into()
}

/// A circumstance, by the samples that stand for it.
struct Spec {
    label: &'static str,
    base: bool,
    /// Judged as if the call had been made, though fak refuses to make it.
    regardless: bool,
    mv: Move,
    caps: Capabilities,
    from: Vec<Standing>,
    since: Vec<Disposition>,
    answers: Vec<Answer>,
    seen: Vec<Observed>,
}

impl Spec {
    fn new(label: &'static str, mv: Move) -> Self {
        Self {
            label,
            base: false,
            regardless: false,
            mv,
            caps: READY,
            from: [SERVING].into(),
            since: [Preserved, Forgotten, Unknown].into(),
            answers: [Answer::Ok].into(),
            seen: [SERVES].into(),
        }
    }

    fn on(self, caps: Capabilities) -> Self {
        Self { caps, ..self }
    }

    fn from(self, from: &[Standing]) -> Self {
        Self { from: from.to_vec(), ..self }
    }

    fn since(self, since: &[Disposition]) -> Self {
        Self { since: since.to_vec(), ..self }
    }

    fn answers(self, answers: &[Answer]) -> Self {
        Self { answers: answers.to_vec(), ..self }
    }

    fn seen(self, seen: &[Observed]) -> Self {
        Self { seen: seen.to_vec(), ..self }
    }

    fn regardless(self) -> Self {
        Self { regardless: true, ..self }
    }

    fn row(&self) -> Row {
        let runs = self.runs();
        let phase = phase(&runs);
        let sent = runs.first().map(|run| sent(&run.plan)).unwrap_or_default();
        Row {
            action: self.mv.action(),
            circumstance: self.label,
            base: self.base,
            sent,
            phase,
            tiers: PerTier {
                gpu: cell(&runs, Tier::Gpu),
                cpu: cell(&runs, Tier::Cpu),
                disk: cell(&runs, Tier::Disk),
                remote: cell(&runs, Tier::Remote),
            },
            demoted: runs.iter().fold(TierSet::NONE, |all, run| all.with(run.verdict.demoted)),
            serving: match phase {
                PhaseCell::Is(phase) => Some(phase == Phase::Serving),
                PhaseCell::Unchanged | PhaseCell::AsObserved => None,
            },
        }
    }

    /// Every combination of the samples, on a connector that clears itself and on one that does
    /// not.
    fn runs(&self) -> Vec<Run> {
        let mut runs = Vec::new();
        for clears in [true, false] {
            let connector = Connector { clears, ..self.caps.connector };
            let caps = Capabilities { connector, ..self.caps };
            for (from, since) in pairs(&self.from, &self.since) {
                let before = Standing { since_serving: PerTier::all(since), ..from };
                let plan = plan(self.mv, &caps, &before);
                for (answer, observed) in pairs(&self.answers, &self.seen) {
                    let answer = match plan {
                        Plan::Refuse(refusal) if !self.regardless => Answer::NotSent(refusal),
                        _ => answer,
                    };
                    let verdict = judge(self.mv, &caps, &before, answer, &observed);
                    let seen = Seen::read(&observed, &caps);
                    runs.push(Run { clears, before, seen, plan: plan.clone(), verdict });
                }
            }
        }
        runs
    }
}

fn pairs<A: Copy, B: Copy>(left: &[A], right: &[B]) -> impl Iterator<Item = (A, B)> {
    left.iter().flat_map(move |a| right.iter().map(move |b| (*a, *b)))
}

struct Run {
    clears: bool,
    before: Standing,
    seen: Seen,
    plan: Plan,
    verdict: Verdict,
}

fn sent(plan: &Plan) -> String {
    match plan {
        Plan::Refuse(_) => "nothing".to_string(),
        Plan::Send { calls, .. } if calls.is_empty() => "-".to_string(),
        Plan::Send { calls, .. } => {
            let calls: Vec<String> = calls.iter().map(ToString::to_string).collect();
            calls.join(", ")
        }
    }
}

fn cell(runs: &[Run], tier: Tier) -> Cell {
    let all = |expected: &dyn Fn(&Run) -> Disposition| {
        runs.iter().all(|run| run.verdict.kv.get(tier) == expected(run))
    };
    if let Some(disposition) = Disposition::ALL.iter().find(|d| all(&|_| **d)) {
        return Cell::Is(*disposition);
    }
    if all(&|run| run.before.since_serving.get(tier)) {
        return Cell::AsBefore;
    }
    debug_assert!(all(&|run| if run.clears { Forgotten } else { Unknown }), "a cell with no word");
    Cell::ByConnector
}

fn phase(runs: &[Run]) -> PhaseCell {
    let all = |expected: &dyn Fn(&Run) -> Phase| {
        runs.iter().all(|run| run.verdict.phase() == expected(run))
    };
    if let Some(phase) = Phase::ALL.iter().find(|p| all(&|_| **p)) {
        return PhaseCell::Is(*phase);
    }
    if all(&|run| run.before.phase) {
        return PhaseCell::Unchanged;
    }
    debug_assert!(all(&|run| run.seen.phase()), "a phase with no word");
    PhaseCell::AsObserved
}
