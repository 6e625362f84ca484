//! A rollout's pause: a worker goes to sleep for its holder, and comes back with weights that its
//! holder answers for.
//!
//! Invariant: nothing counts as done that was not seen. The device is told free only of a worker
//! that was asked to sleep, answered so, shows so, and runs nothing by two looks in a row; and a
//! worker is let go only once it is proven to serve.

use std::sync::Arc;
use std::time::Duration;

use fak_kernel::witness::{
    Level, Mode, Move, Observed, Part, Parts, Reason, Refusal, SleepState, Weights,
};
use fak_kernel::{Action, Phase};
use serde_json::{Value, json};
use tokio::time::{Instant, MissedTickBehavior, interval};

use super::act::{Check, Planned, Ready, With};
use super::canary::{Asks, Outcome as Canary, Record};
use super::hold::Before;
use super::owner::Owner;
use super::probe::Look;
use super::rows::Ending;
use super::{Error, Request, translate};
use crate::fleet;
use crate::store::{self, Filter, Row, Store};

/// Pause between two looks at a worker that went to sleep.
const QUIET_EVERY: Duration = Duration::from_millis(100);
/// How long it is waited for where requests are kept.
const KEPT_WITHIN: Duration = Duration::from_secs(2);
/// Looks in a row that have to show nothing running: one may be of before the last step.
const QUIET_LOOKS: u32 = 2;
/// Rows that are read to find a worker's last one but for those of fak's own starts.
const ROWS_SEEN_MAX: u32 = 16;

/// A worker is to sleep for a holder.
#[derive(Clone, Debug)]
pub struct Begin {
    /// Whose it is from then on.
    pub holder: String,
    /// How deep.
    pub level: Level,
    /// What happens to requests in flight.
    pub mode: Mode,
    /// Whether the connector's tiers are kept.
    pub keep_tier: bool,
    /// Where they cannot be: go on without.
    pub allow_evict: bool,
    /// How long requests in flight may take to end, and the engine then to show that nothing runs.
    pub drain: Duration,
    /// Whether its answers to fixed prompts are recorded first.
    pub canary: bool,
}

/// What came of it.
#[derive(Clone, Debug)]
pub struct Begun {
    /// The row of the sleep.
    pub row: Row,
    /// Whether it is done: only then may the device be used.
    pub ending: Ending,
    /// Why it reads so.
    pub reason: String,
    /// Requests that the engine shows running; `None` where it does not tell.
    pub running: Option<u64>,
    /// What the worker is doing now.
    pub phase: Phase,
    /// Who holds it now.
    pub held_by: Option<Arc<str>>,
}

/// A worker is to come back.
#[derive(Clone, Debug)]
pub struct End {
    /// Who held it.
    pub holder: String,
    /// What its holder knows of the weights.
    pub weights: Weights,
    /// Their version, as its holder states it.
    pub version: Option<String>,
    /// Whether only the weights' memory wakes, to take weights; then it stays held.
    pub is_weights_only: bool,
    /// Whether it is asked the fixed prompts; where not said, if they were recorded.
    pub canary: Option<bool>,
}

/// What came of it.
#[derive(Clone, Debug)]
pub struct Ended {
    /// The rows, in order: none where there was nothing to do.
    pub rows: Vec<Row>,
    /// Whether it is done.
    pub ending: Ending,
    /// Why it reads so.
    pub reason: String,
    /// What the fixed prompts showed.
    pub canary: Canary,
    /// Whether its answers from before the sleep are recorded still.
    pub has_canary: bool,
    /// What the worker is doing now.
    pub phase: Phase,
    /// Whether it takes requests now.
    pub is_serving: bool,
    /// The version of its weights.
    pub weight_version: Option<Arc<str>>,
    /// Who holds it now.
    pub held_by: Option<Arc<str>>,
}

impl Begin {
    /// The action.
    #[must_use]
    pub fn mv(&self) -> Move {
        Move::Sleep { level: Some(self.level), mode: self.mode, keep_tier: self.keep_tier }
    }

    pub(super) fn request(&self) -> Request {
        Request {
            allow_evict: self.allow_evict,
            drain: self.drain,
            holder: Some(self.holder.clone()),
            ..Request::new(self.mv())
        }
    }
}

impl End {
    /// The action.
    #[must_use]
    pub fn mv(&self) -> Move {
        if self.is_weights_only {
            Move::Wake { tags: Parts::of(Part::Weights), weights: Weights::Unproven }
        } else {
            Move::Wake { tags: Parts::NONE, weights: self.weights }
        }
    }

    pub(super) fn request(&self, mv: Move) -> Request {
        let (holder, ends) = (Some(self.holder.clone()), Some(Box::new(self.stated())));
        Request { holder, ends, ..Request::new(mv) }
    }

    fn stated(&self) -> Value {
        json!({
            "holder": self.holder,
            "weights": self.weights.as_str(),
            "weight_version": self.version,
        })
    }

    /// Whether the worker was let go by an end that stated the same, and nothing but a start of fak
    /// followed: the same end again, after an answer that was lost or an end that failed on another
    /// worker, has nothing to do there.
    ///
    /// # Errors
    /// [`store::Error`].
    pub async fn was_done(&self, store: &Store, worker: &str) -> Result<bool, store::Error> {
        let filter = Filter {
            worker: Some(worker.to_owned()),
            newest_first: true,
            limit: Some(ROWS_SEEN_MAX),
            ..Filter::default()
        };
        let rows = store.rows(&filter).await?;
        let newest = rows.into_iter().find(|row| row.action != Action::Join);
        let states = |row: &Row| row.serving && row.asked.get("end") == Some(&self.stated());
        Ok(!self.is_weights_only && newest.as_ref().is_some_and(states))
    }
}

impl Owner {
    /// Puts the worker to sleep for a holder.
    pub(super) async fn begin(&mut self, begin: Begin) -> Result<Begun, Error> {
        self.show_busy(&begin.request());
        let was_held = self.is_held_by(&begin.holder);
        let begun = self.begun(&begin).await;
        let is_refused = match &begun {
            Ok(begun) => begun.ending == Ending::Refused,
            Err(_) => false,
        };
        if is_refused && !was_held && self.is_held_by(&begin.holder) {
            // Nothing was done under it.
            self.let_go().await?;
        }
        self.show().await;
        let held_by = self.state.held_by.clone();
        begun.map(|begun| Begun { held_by, phase: self.state.phase(), ..begun })
    }

    async fn begun(&mut self, begin: &Begin) -> Result<Begun, Error> {
        let request = begin.request();
        let look = self.look_first().await?;
        if self.is_held_from(&request) {
            let row = self.refuse(&request, Refusal::Held, &look).await?;
            return Ok(self.not_begun(row));
        }
        let row = match self.planned(request, &look).await? {
            // It was asked before, by somebody who did not hear the answer.
            Planned::Refused(row) if self.sleeps_as_asked(begin, &look) => {
                let before = self.before();
                self.take_hold(&begin.holder, &before).await?;
                *row
            }
            Planned::Refused(row) => return Ok(self.not_begun(*row)),
            Planned::Ready(ready) => {
                self.take_hold(&begin.holder, &Before::default()).await?;
                let (request, calls, intent) = match self.drained(ready).await? {
                    Planned::Refused(row) => return Ok(self.not_begun(*row)),
                    Planned::Ready(Ready { request, calls, intent }) => (request, calls, intent),
                };
                let before = self.before_sleep(begin.canary, request.mv).await;
                if begin.canary && before.answers.is_none() {
                    let row = self.refuse(&request, Refusal::CanaryNotRecorded, &look).await?;
                    return Ok(self.not_begun(row));
                }
                self.take_hold(&begin.holder, &before).await?;
                let row = self.call(&request, &calls, intent, With::default()).await?;
                if Ending::of(&row) != Ending::Done {
                    return Ok(self.not_begun(row));
                }
                row
            }
        };
        // A request that was kept reads as running until the wake, however long one waits.
        let is_frozen = begin.mode == Mode::Keep;
        let within = if is_frozen { begin.drain.min(KEPT_WITHIN) } else { begin.drain };
        let running = self.quiet(within).await?;
        let is_free = self.state.phase() == Phase::Sleeping && running == Some(0);
        let (ending, reason) = match running {
            _ if is_free => (Ending::Done, Reason::Confirmed),
            _ if self.state.phase() != Phase::Sleeping => (Ending::Failed, Reason::Contradicted),
            Some(_) => (Ending::Failed, Reason::RequestsRunning),
            None => (Ending::Failed, Reason::RunningNotTold),
        };
        let reason = reason.as_str().to_owned();
        Ok(Begun { ending, reason, running, ..self.not_begun(row) })
    }

    fn not_begun(&self, row: Row) -> Begun {
        Begun {
            ending: Ending::of(&row),
            reason: row.reason.clone(),
            row,
            running: None,
            phase: self.state.phase(),
            held_by: None,
        }
    }

    /// Whether the worker sleeps as asked already: fak put it there, and it shows so.
    fn sleeps_as_asked(&self, begin: &Begin, look: &Look) -> bool {
        let shown = match begin.level {
            Level::One => SleepState::One,
            Level::Two => SleepState::Two,
        };
        let is_kept = !begin.keep_tier
            || begin.allow_evict
            || self.state.standing.since_serving.cpu == fak_kernel::Disposition::Preserved;
        self.state.phase() == Phase::Sleeping
            && self.slept == Some(begin.level)
            && look.observation.sleep_state.value() == Some(shown)
            && is_kept
    }

    /// Looks until the engine shows that nothing runs, for `within` at most. What it showed last.
    async fn quiet(&mut self, within: Duration) -> Result<Option<u64>, Error> {
        let until = Instant::now() + within;
        let mut every = interval(QUIET_EVERY);
        every.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut quiet = 0;
        loop {
            every.tick().await;
            let look = self.look_first().await?;
            let running = look.metrics.as_ref().and_then(|metrics| metrics.total().running);
            quiet = if running == Some(0.0) { quiet + 1 } else { 0 };
            let is_over = self.state.phase() != Phase::Sleeping || Instant::now() >= until;
            if quiet == QUIET_LOOKS || is_over {
                // Seen once only is not seen.
                let is_unsure = running == Some(0.0) && quiet < QUIET_LOOKS;
                return Ok(running.filter(|_| !is_unsure).map(|count| count.max(0.0) as u64));
            }
        }
    }

    /// Brings the worker back, and lets it go where it is proven to serve.
    pub(super) async fn end(&mut self, end: End) -> Result<Ended, Error> {
        self.show_busy(&end.request(end.mv()));
        let mut rows = Vec::new();
        self.is_ending = !end.is_weights_only;
        let ended = self.ended(&end, &mut rows).await;
        self.is_ending = false;
        let is_done = ended.as_ref().is_ok_and(|(ending, _)| *ending == Ending::Done);
        if is_done && !end.is_weights_only {
            self.let_go().await?;
        }
        self.show().await;
        let (ending, reason) = ended?;
        let canary = rows.last().map_or(Canary::NotRun, |row| Canary::of(&row.observed));
        Ok(Ended {
            rows,
            ending,
            reason,
            canary,
            has_canary: self.before().answers.is_some(),
            phase: self.state.phase(),
            is_serving: self.state.is_serving(),
            weight_version: self.state.weight_version.clone(),
            held_by: self.state.held_by.clone(),
        })
    }

    async fn ended(&mut self, end: &End, rows: &mut Vec<Row>) -> Result<(Ending, String), Error> {
        let look = self.look_first().await?;
        let request = end.request(end.mv());
        if self.is_held_from(&request) {
            let row = self.refuse(&request, Refusal::Held, &look).await?;
            return Ok(push(rows, row));
        }
        if self.hold.is_none() {
            let was_done = end.was_done(&self.config.store, &self.worker.id).await?;
            let was_done = was_done && self.state.is_serving();
            return Ok(if was_done {
                (Ending::Done, Refusal::AlreadyAwake.as_str().to_owned())
            } else {
                (Ending::Refused, Refusal::NotHeld.as_str().to_owned())
            });
        }
        if end.is_weights_only {
            return self.weights_woken(request, &look, rows).await;
        }
        let check = self.check_for(end);
        let moves = self.moves(end);
        if moves.is_empty() {
            return self.already_awake(end, check.as_ref(), &look, rows).await;
        }
        if end.weights == Weights::Loaded && self.is_awake() {
            rows.push(self.notice_unnamed(&look).await?);
        }
        let last = moves.len() - 1;
        let mut ended = (Ending::Done, String::new());
        for (at, mv) in moves.into_iter().enumerate() {
            let check = check.as_ref().filter(|_| at == last);
            let with = With { check, version: end.version.as_deref() };
            let row = self.sent(end.request(mv), &look, with).await?;
            ended = push(rows, row);
            if ended.1 == Reason::TierNotKept.as_str() {
                // The worker serves, without what it was to keep: told, and no reason to hold it.
                ended.0 = Ending::Done;
            }
            if ended.0 != Ending::Done {
                return Ok(ended);
            }
        }
        // A front end answers for an engine that is dead: whoever lets the worker go looks again.
        self.look_first().await?;
        let fleet::State { is_reachable, is_progressing, .. } = self.state;
        if self.state.phase() == Phase::Serving && is_reachable && is_progressing {
            return Ok(ended);
        }
        Ok((Ending::Failed, Reason::NotServing.as_str().to_owned()))
    }

    /// The row of what was sent for `request`, or of why nothing was.
    async fn sent(&mut self, request: Request, look: &Look, with: With<'_>) -> Result<Row, Error> {
        let planned = match self.planned(request, look).await? {
            Planned::Ready(ready) => self.drained(ready).await?,
            refused => refused,
        };
        match planned {
            Planned::Refused(row) => Ok(*row),
            Planned::Ready(Ready { request, calls, intent }) => {
                self.call(&request, &calls, intent, with).await
            }
        }
    }

    fn is_awake(&self) -> bool {
        matches!(self.state.phase(), Phase::Serving | Phase::Paused)
    }

    /// What brings the worker back from where it is: beside a wake, what a sleep that failed
    /// half-way takes, or an engine that somebody else woke.
    fn moves(&self, end: &End) -> Vec<Move> {
        let reset = Move::Reset { external: true, running: false };
        match (self.state.phase(), end.weights) {
            (Phase::Serving, Weights::Same | Weights::Unproven) => Vec::new(),
            (Phase::Serving, Weights::Loaded) => vec![reset],
            (Phase::Paused, Weights::Same | Weights::Unproven) => vec![Move::Resume],
            (Phase::Paused, Weights::Loaded) => vec![reset, Move::Resume],
            _ => vec![end.mv()],
        }
    }

    /// Nothing has to be done for the worker to serve: it may still answer otherwise than before.
    async fn already_awake(
        &mut self,
        end: &End,
        check: Option<&Check>,
        look: &Look,
        rows: &mut Vec<Row>,
    ) -> Result<(Ending, String), Error> {
        if let Some(version) = &end.version
            && self.state_version(version)
        {
            rows.push(self.notice_unnamed(look).await?);
        }
        let (mut observed, mut shown) = translate::seen(&look.observation);
        if let Some(check) = check {
            self.check(check, &mut observed, &mut shown).await;
        }
        if let Observed::State(state) = observed
            && state.canary == Some(false)
        {
            let row = self.notice_as(Move::Drift, &observed, shown).await?;
            rows.push(row);
            return Ok((Ending::Failed, Reason::CanaryMismatch.as_str().to_owned()));
        }
        let request = end.request(end.mv());
        rows.push(self.refuse_as(&request, Refusal::AlreadyAwake, &observed, shown).await?);
        Ok((Ending::Done, Refusal::AlreadyAwake.as_str().to_owned()))
    }

    /// Wakes the weights' memory alone.
    async fn weights_woken(
        &mut self,
        request: Request,
        look: &Look,
        rows: &mut Vec<Row>,
    ) -> Result<(Ending, String), Error> {
        let row = self.sent(request, look, With::default()).await?;
        let is_awake = row.reason == Refusal::AlreadyAwake.as_str();
        let ended = push(rows, row);
        let is_waking = self.state.phase() == Phase::Waking;
        Ok(if is_waking && is_awake { (Ending::Done, ended.1) } else { ended })
    }

    /// What is asked of the engine before it sleeps: its answers where they are wanted, and where a
    /// tier is to be kept, something to find there again.
    async fn before_sleep(&self, is_wanted: bool, mv: Move) -> Before {
        let is_awake = self.state.phase() == Phase::Serving;
        let planted = match mv {
            Move::Sleep { keep_tier: true, .. } if is_awake => self.plant().await,
            _ => None,
        };
        let answers = match is_wanted && is_awake {
            true => Some(Record::take(&self.canary_target()).await),
            false => None,
        };
        Before { answers: answers.filter(|record| !record.is_empty()), planted }
    }

    /// What the engine is to be asked once it is awake.
    fn check_for(&self, end: &End) -> Option<Check> {
        let Before { answers: before, planted } = self.before();
        let is_wanted = end.canary.unwrap_or(before.is_some());
        let is_same_weights = match end.weights {
            Weights::Same => true,
            Weights::Unproven => self.state.standing.weights_proven,
            Weights::Loaded | Weights::Changed => false,
        };
        let asks = is_wanted.then_some(Asks { before, is_same_weights });
        let planted = planted.map(|planted| (self.is_believed_kept(&planted), planted));
        (asks.is_some() || planted.is_some()).then_some(Check { asks, planted })
    }

    /// Other weights are there by what a caller says, and no version moved: they have their row for
    /// a name.
    pub(super) async fn notice_unnamed(&mut self, look: &Look) -> Result<Row, store::Error> {
        let (observed, shown) = translate::seen(&look.observation);
        self.noticed(Move::Weights, true, &observed, shown).await
    }

    /// Other weights are there, and nobody names them: what was stated was of those before.
    pub(super) fn forget_version(&mut self) {
        self.versions.forget_stated();
        self.state.weight_version = self.versions.current().cloned();
    }

    /// Takes in the version that a caller states; whether the engine names another, which counts.
    pub(super) fn state_version(&mut self, version: &str) -> bool {
        let is_contradicted = self.versions.state(version);
        self.state.weight_version = self.versions.current().cloned();
        is_contradicted
    }
}

fn push(rows: &mut Vec<Row>, row: Row) -> (Ending, String) {
    let ended = (Ending::of(&row), row.reason.clone());
    rows.push(row);
    ended
}
