//! From calls to what they did: an answer is what the engine says, and what it did is looked at.
//!
//! Invariant: a call whose effect is not there is tried again only where that cannot do more than
//! was asked, and for a bounded time; what is left then is told as it is.

use std::time::Duration;

use fak_kernel::Phase;
use fak_kernel::witness::{Answer, Call, Mode, Move, Observed, Parts, Seen};
use fak_wire::metrics::Snapshot;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use super::owner::Owner;
use super::{Request, translate};

/// Pause between two looks at what a call did.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// How long requests that a call was to end may show as running: gauges follow the engine's steps.
const ENDED_WITHIN: Duration = Duration::from_secs(3);
/// How long what was queued in the engine may run, before a wake's reset is tried again.
const IDLE_WITHIN: Duration = Duration::from_secs(10);
/// Resets that a wake sends at most.
const RESETS_MAX: u32 = 4;

/// What came of calls.
pub(super) struct Made {
    pub(super) answer: Answer,
    pub(super) answered: Value,
    pub(super) observed: Observed,
    /// The observation for the ledger.
    pub(super) shown: Value,
}

impl Made {
    fn is_accepted(&self) -> bool {
        matches!(self.answer, Answer::Ok | Answer::NoBody | Answer::Success(_) | Answer::Mismatch)
    }
}

impl Owner {
    /// Makes the calls, and looks at what they did.
    pub(super) async fn make_and_look(&self, request: &Request, calls: &[Call]) -> Made {
        let first = self.made(request, calls).await;
        if !self.is_still_asleep(request.mv, &first) {
            return first;
        }
        // The part that is asleep is named, so that the same call can wake nothing else.
        let again = self.made(request, calls).await;
        Made { answered: json!({ "first": first.answered, "again": again.answered }), ..again }
    }

    async fn made(&self, request: &Request, calls: &[Call]) -> Made {
        let (answer, answered) = self.make(request, calls).await;
        let (observation, metrics) = self.worker.engine.observe_and_scrape().await;
        let mut metrics = metrics.ok();
        let (mut observed, mut shown) = translate::seen(&observation);
        if let (Observed::State(state), true) = (&mut observed, ends_requests(request.mv)) {
            let runs = |metrics: &Option<Snapshot>| running(metrics.as_ref()).map(|n| n > 0.0);
            if answer == Answer::Ok && runs(&metrics) == Some(true) {
                metrics = self.until_idle(ENDED_WITHIN, running).await.or(metrics);
            }
            state.still_running = runs(&metrics);
        }
        let before = self.state.metrics.as_deref();
        shown["requests"] = translate::requests_json(before, metrics.as_ref());
        Made { answer, answered, observed, shown }
    }

    /// Makes the calls up to the first that does not succeed.
    async fn make(&self, request: &Request, calls: &[Call]) -> (Answer, Value) {
        let is_wake = matches!(request.mv, Move::Wake { .. });
        let mut last = (Answer::Ok, Value::Null);
        for call in calls {
            let is_its_reset = is_wake && matches!(call, Call::ResetPrefixCache { .. });
            // An answer says awake where a part still sleeps; a reset is for engines that are.
            if is_its_reset && self.shows_sleep().await {
                let told = json!({ "still_asleep": last.1 });
                return (Answer::Mismatch, told);
            }
            last = self.ask(*call).await;
            if is_its_reset && last.0 == Answer::Success(false) {
                last = self.ask_once_idle(*call, request.drain).await;
            }
            if !matches!(last.0, Answer::Ok | Answer::Success(true)) {
                break;
            }
        }
        last
    }

    async fn ask(&self, call: Call) -> (Answer, Value) {
        let called = self.worker.engine.ask(&translate::control(call)).await;
        (translate::answer(call, &called), translate::answered_json(&called))
    }

    /// Asks for a reset again, that was declined because what was queued in the engine runs since
    /// it woke.
    async fn ask_once_idle(&self, call: Call, drain: Duration) -> (Answer, Value) {
        let until = Instant::now() + drain.min(IDLE_WITHIN);
        let mut resets = 1;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            self.until_idle(left, busy).await;
            let last = self.ask(call).await;
            resets += 1;
            let is_over = resets == RESETS_MAX || Instant::now() >= until;
            if last.0 != Answer::Success(false) || is_over {
                return last;
            }
        }
    }

    /// Looks until `count` is 0, for `within` at most. What was seen last, where anything was.
    async fn until_idle(
        &self,
        within: Duration,
        count: fn(Option<&Snapshot>) -> Option<f64>,
    ) -> Option<Snapshot> {
        let until = Instant::now() + within;
        let mut seen = None;
        while Instant::now() < until {
            sleep(LOOK_EVERY).await;
            seen = self.worker.engine.scrape().await.ok().or(seen);
            if count(seen.as_ref()) == Some(0.0) {
                break;
            }
        }
        seen
    }

    async fn shows_sleep(&self) -> bool {
        self.worker.engine.observe().await.is_sleeping.value() == Some(true)
    }

    /// Whether a wake of all that still sleeps was answered as done, and a part sleeps all the
    /// same.
    fn is_still_asleep(&self, mv: Move, made: &Made) -> bool {
        let Move::Wake { tags, .. } = mv else { return false };
        let standing = &self.state.standing;
        let awake = standing.partly_awake();
        let is_whole = tags.is_empty() || tags.with(awake).covers(Parts::MEMORY);
        let seen = Seen::read(&made.observed, &self.state.capabilities);
        let is_asleep = matches!(seen, Seen::Sleeping(_) | Seen::PausedOrSleeping);
        let is_partly_awake = standing.phase == Phase::Waking && !awake.is_empty();
        is_whole && is_asleep && is_partly_awake && made.is_accepted()
    }
}

/// Whether requests are to end before the call is answered.
fn ends_requests(mv: Move) -> bool {
    match mv {
        Move::Pause { mode, .. } | Move::Sleep { mode, .. } => mode != Mode::Keep,
        _ => false,
    }
}

fn running(metrics: Option<&Snapshot>) -> Option<f64> {
    metrics?.total().running
}

/// Requests that run or wait.
fn busy(metrics: Option<&Snapshot>) -> Option<f64> {
    let total = metrics?.total();
    Some(total.running? + total.waiting?)
}
