//! One action on a worker, from what was asked to its row.
//!
//! Invariant: the order of the whole part: door, drain, intent, beliefs, call, look, outcome; and
//! what is refused is written as not sent, with what would help.

use std::fmt;
use std::sync::Arc;

use fak_index::Index;
use fak_kernel::rank::Event;
use fak_kernel::witness::{
    Answer, Call, Clear, Mode, Move, Observed, Plan, Quarantine, Reason, Refusal, Seen, State,
    Verdict, judge, plan,
};
use fak_kernel::{Disposition, Evidence, Phase, TierSet};
use serde_json::{Value, json};

use super::canary::{self, Asks};
use super::effect::Made;
use super::owner::Owner;
use super::planted::Planted;
use super::probe::Look;
use super::proof::{self, Proof};
use super::rows::{believed, new_intent, outcome, told};
use super::unwritten::Unwritten;
use super::{Error, Request, translate, weights};
use crate::events::stream::Handle;
use crate::fleet::{self, Fleet};
use crate::store::{NewIntent, Row, Store};

/// Writes rows for actions that never reach the owner.
#[derive(Clone)]
pub(super) struct Refuser {
    pub(super) fleet: Fleet,
    pub(super) store: Store,
    pub(super) index: Arc<Index>,
    pub(super) worker: Arc<str>,
}

impl fmt::Debug for Refuser {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Refuser").field("worker", &self.worker).finish_non_exhaustive()
    }
}

impl Refuser {
    /// Who holds the worker.
    pub(super) fn held_by(&self) -> Option<Arc<str>> {
        self.fleet.snapshot().get(&self.worker)?.state.held_by.clone()
    }

    /// What is done to the worker now.
    pub(super) fn busy(&self) -> Option<fleet::Busy> {
        self.fleet.snapshot().get(&self.worker)?.state.busy.clone()
    }

    /// Why nothing may be asked of the worker at all.
    pub(super) fn refusal(&self) -> Option<Refusal> {
        let fleet = self.fleet.snapshot();
        let is_clear = fleet.get(&self.worker)?.state.identity.may_be_asked();
        (!is_clear).then_some(Refusal::NotOneEngine)
    }

    pub(super) async fn refuse(&self, request: &Request, why: Refusal) -> Result<Row, Error> {
        let fleet = self.fleet.snapshot();
        let Some(view) = fleet.get(&self.worker) else {
            return Err(Error::UnknownWorker(self.worker.to_string()));
        };
        let fleet::State { standing, capabilities, .. } = &*view.state;
        let answer = Answer::NotSent(why);
        let verdict = judge(request.mv, capabilities, standing, answer, &Observed::Nothing);
        let ranks = view.state.ranks.iter().map(|rank| rank.id);
        let verdict = verdict.believing(believed(&self.index, ranks));
        let mut asked = translate::refusal_json(why);
        if let Some(busy) = view.state.busy.as_ref().filter(|_| why == Refusal::Busy) {
            asked["busy_with"] = busy.json(view.worker.door.in_flight());
        }
        let intent = NewIntent {
            worker: self.worker.to_string(),
            incarnation: view.state.incarnation.as_deref().map(str::to_owned),
            asked,
            ..new_intent(request.mv, request.session.clone())
        };
        // What holds after it is for the owner to say, who is at work.
        let outcome = outcome(&verdict, &view.state, Value::Null, Value::Null);
        Ok(self.store.note(intent, outcome).await?)
    }
}

/// What an engine that is awake is asked before anybody else asks it.
pub(super) struct Check {
    /// Fixed prompts, for its answers.
    pub(super) asks: Option<Asks>,
    /// A prompt from before its sleep, for where its blocks come from; and whether they are
    /// believed to be in a connector's tier.
    pub(super) planted: Option<(bool, Planted)>,
}

/// What a call comes with beside its plan.
#[derive(Clone, Copy, Default)]
pub(super) struct With<'a> {
    /// What to ask the engine once it is awake.
    pub(super) check: Option<&'a Check>,
    /// The version of its weights once it serves, as the caller states it.
    pub(super) version: Option<&'a str>,
}

impl Owner {
    /// Does an action, or says why not.
    pub(super) async fn act(&mut self, request: Request) -> Result<Row, Error> {
        self.show_busy(&request);
        self.is_ending = request.force;
        let row = self.acted(request).await;
        self.is_ending = false;
        self.show().await;
        row
    }

    async fn acted(&mut self, request: Request) -> Result<Row, Error> {
        let is_forced = request.force;
        let look = self.look_first().await?;
        if self.is_held_from(&request) {
            return self.refuse(&request, Refusal::Held, &look).await;
        }
        let planned = match self.planned(request, &look).await? {
            Planned::Ready(ready) => self.drained(ready).await?,
            refused => refused,
        };
        let row = match planned {
            Planned::Refused(row) => *row,
            Planned::Ready(Ready { request, calls, intent }) => {
                self.heard_before(intent).await;
                self.call(&request, &calls, intent, With::default()).await?
            }
        };
        if is_forced && self.state.phase() == Phase::Serving {
            self.let_go().await?;
        }
        Ok(row)
    }

    /// A look before anything is done: somebody else may have moved the engine since the last.
    pub(super) async fn look_first(&mut self) -> Result<Look, Error> {
        let look = Look::at(&self.worker.engine).await;
        self.take_in(&look).await?;
        Ok(look)
    }

    /// Lets the fleet see what came of an action; the door opens where the worker serves.
    pub(super) async fn show(&mut self) {
        self.state.busy = None;
        if self.state.is_serving() {
            self.settle().await;
        }
        self.publish();
    }

    /// What is to be sent for `request`, or the row that says why nothing is.
    pub(super) async fn planned(
        &mut self,
        mut request: Request,
        look: &Look,
    ) -> Result<Planned, Error> {
        let mut planned = plan(request.mv, &self.state.capabilities, &self.state.standing);
        if planned == Plan::Refuse(Refusal::KeepNotProven) && request.allow_evict {
            request.mv = without_keeping(request.mv);
            planned = plan(request.mv, &self.state.capabilities, &self.state.standing);
        }
        match planned {
            Plan::Refuse(why) => {
                Ok(Planned::Refused(Box::new(self.refuse(&request, why, look).await?)))
            }
            Plan::Send { calls, demote, clear } => {
                let intent = Event::Intent { tiers: demote, clear };
                Ok(Planned::Ready(Ready { request, calls, intent }))
            }
        }
    }

    /// Whether somebody else holds the worker, and `request` does not say to act all the same. A
    /// new salt is nothing to the worker.
    pub(super) fn is_held_from(&self, request: &Request) -> bool {
        let own = |holder: &str| request.holder.as_deref() == Some(holder);
        let is_others = self.hold.as_ref().is_some_and(|hold| !own(&hold.holder));
        is_others && !request.force && request.mv != Move::Quarantine(Quarantine::Isolate)
    }

    pub(super) async fn refuse(
        &mut self,
        request: &Request,
        why: Refusal,
        look: &Look,
    ) -> Result<Row, Error> {
        let (observed, shown) = translate::seen(&look.observation);
        self.refuse_as(request, why, &observed, shown).await
    }

    /// The same, where more was observed than a look shows.
    pub(super) async fn refuse_as(
        &mut self,
        request: &Request,
        why: Refusal,
        observed: &Observed,
        shown: Value,
    ) -> Result<Row, Error> {
        let fleet::State { standing, capabilities, .. } = &self.state;
        let verdict = judge(request.mv, capabilities, standing, Answer::NotSent(why), observed);
        let verdict = verdict.believing(self.believed());
        self.state.standing = verdict.next;
        let asked = with_end(self.refusal_json(why), request);
        let intent = self.new_intent(request.mv, request.session.clone(), asked);
        let outcome = self.outcome(&verdict, Value::Null, shown);
        Ok(self.record(intent, outcome).await?)
    }

    /// Why nothing was sent, with what the caller needs to go on.
    fn refusal_json(&self, why: Refusal) -> Value {
        let mut told = translate::refusal_json(why);
        match (why, &self.hold) {
            (Refusal::Held, Some(hold)) => told["held_by"] = json!(hold.holder),
            (Refusal::KeepNotProven, _) => {
                told["connectors"] = json!(self.connectors);
                told["argument_declared"] = json!(self.state.capabilities.keep_argument);
            }
            (Refusal::DrainTimeout | Refusal::Cancelled, _) => {
                told["in_flight"] = json!(self.worker.door.in_flight());
            }
            _ => {}
        }
        told
    }

    /// Intent durable, beliefs cold, the calls, the observation, the outcome.
    pub(super) async fn call(
        &mut self,
        request: &Request,
        calls: &[Call],
        intent: Event,
        with: With<'_>,
    ) -> Result<Row, Error> {
        let may_change = weights::may_change(request.mv, &self.state.standing);
        let unrecorded = self.judge_noticed(request.mv, &Observed::Nothing).next;
        let demotes = matches!(intent, Event::Intent { tiers, .. } if !tiers.is_empty());
        let asked = with_end(translate::asked_json(calls), request);
        let new = NewIntent {
            warm_demoted: demotes,
            standing: Some(self.standing_for_ledger(&unrecorded)),
            is_epoch: may_change,
            ..self.new_intent(request.mv, request.session.clone(), asked)
        };
        // What happened before it stands before it.
        self.backlog.flush(&self.config.store, &self.worker.id).await?;
        let before = self.clear_to_see(request.mv, intent);
        let seq = self.config.store.intent(new).await?;
        self.tell(intent).await;
        let epoch = self.state.weights_epoch;
        if may_change {
            // Requests that were kept go on before the last call is answered.
            self.state.weights_epoch = Some(seq);
            self.publish_standing();
        }
        self.begin_rest(request.mv);
        let mut made = self.make_and_look(request, calls).await;
        let proof = self.prove(before.as_ref(), &mut made).await;
        if let Some(check) = with.check {
            self.check(check, &mut made.observed, &mut made.shown).await;
        }
        let fleet::State { standing, capabilities, .. } = &self.state;
        let verdict = judge(request.mv, capabilities, standing, made.answer, &made.observed);
        self.tell_outcome(&verdict, made.answer, &proof).await;
        self.unseen_clear = before.filter(|_| waits_for_clear(request.mv, &verdict));
        if verdict.evidence == Evidence::NotSent {
            self.state.weights_epoch = epoch;
        }
        let is_contradicted = self.take_verdict(request.mv, &verdict, may_change, with.version);
        let verdict = match verdict.evidence {
            Evidence::NotSent => verdict.believing(self.believed()),
            _ => verdict,
        };
        let outcome = self.outcome(&verdict, made.answered, made.shown);
        let outcome = Unwritten::Outcome(seq, Box::new(outcome));
        let row = self.backlog.write(&self.config.store, &self.worker.id, outcome).await?;
        self.state.last_witness = Some(row.seq);
        told(&row, "done");
        if is_contradicted {
            let look = Look::at(&self.worker.engine).await;
            self.notice_unnamed(&look).await?;
        }
        Ok(row)
    }

    /// What the engine keeps stands still from the call on, not from its answer.
    fn begin_rest(&mut self, mv: Move) {
        if let Move::Pause { mode: Mode::Abort, .. } | Move::Sleep { mode: Mode::Abort, .. } = mv {
            self.worker.door.abort();
        }
        if matches!(mv, Move::Pause { .. } | Move::Sleep { .. }) {
            self.keep_at_rest(true);
            self.publish_standing();
        }
    }

    /// It goes on where the worker serves, and where fak cannot tell.
    fn end_rest(&mut self) {
        let is_over = matches!(self.state.phase(), Phase::Serving | Phase::Error);
        self.keep_at_rest(self.state.pace.is_kept_at_rest && !is_over);
    }

    /// What holds from a verdict on; whether the engine names another version than the caller.
    fn take_verdict(
        &mut self,
        mv: Move,
        verdict: &Verdict,
        may_change: bool,
        version: Option<&str>,
    ) -> bool {
        self.state.standing = verdict.next;
        self.vanished = None;
        self.end_rest();
        if let (Move::Sleep { level, .. }, Reason::Confirmed) = (mv, verdict.reason) {
            self.slept = level;
        }
        let is_contradicted = match version {
            Some(version) if verdict.serving() => self.state_version(version),
            None if verdict.serving() && may_change => {
                self.forget_version();
                false
            }
            _ => false,
        };
        self.publish_standing();
        is_contradicted
    }

    /// Waits until the streams of a worker that serves can show the clear that `intent` announces:
    /// something before it may not have settled yet.
    async fn heard_before(&self, intent: Event) {
        let clears = matches!(intent, Event::Intent { clear: Some(_), .. });
        if clears && self.state.phase() == Phase::Serving {
            self.settle().await;
            self.exact().await;
        }
    }

    /// What the streams show before a call whose clear they can show after it: its own, or that of
    /// a pause before it.
    fn clear_to_see(&mut self, mv: Move, intent: Event) -> Option<proof::Before> {
        match (mv, intent) {
            (Move::Resume, _) => self.unseen_clear.take(),
            (_, Event::Intent { clear: Some(_), .. }) => self.before_clear(),
            _ => None,
        }
    }

    /// Takes what the streams show of a clear into what was observed of an engine that serves.
    async fn prove(&self, before: Option<&proof::Before>, made: &mut Made) -> Proof {
        let seen = Seen::read(&made.observed, &self.state.capabilities);
        let is_answered = matches!(made.answer, Answer::Ok | Answer::NoBody | Answer::Success(_));
        let (Some(before), Observed::State(state), true) =
            (before, &mut made.observed, is_answered)
        else {
            return Proof::default();
        };
        if seen != Seen::Serving {
            return Proof::default();
        }
        let proof = self.clear_since(before).await;
        state.clear = proof.clear;
        made.shown["clear"] = json!(proof.clear.map(Clear::as_str));
        proof
    }

    /// Tells each rank what became of its cache. Of a reset that the engine does not say to have
    /// done, ranks may differ: the idle ones are wiped (0.32.0, observed).
    async fn tell_outcome(&self, verdict: &Verdict, answer: Answer, proof: &Proof) {
        for (place, rank) in self.ranks.iter().enumerate() {
            let shown = proof.of_rank(place);
            let own = shown.filter(|_| {
                verdict.serving() && matches!(answer, Answer::Success(false) | Answer::NoBody)
            });
            let mut kv = verdict.kv;
            match own {
                Some(true) => kv.gpu = Disposition::Forgotten,
                Some(false) if verdict.reason == Reason::Declined => {
                    kv.gpu = Disposition::Preserved;
                }
                Some(false) | None => {}
            }
            let clears = own.unwrap_or(verdict.owes_clear);
            // A stream that has ended believes nothing any more.
            let _ = rank.tell(Event::Outcome { kv, clears }).await;
        }
    }

    /// The tiers of which anything is believed.
    pub(super) fn believed(&self) -> TierSet {
        if self.recovery.is_pending() {
            return TierSet::NONE;
        }
        believed(&self.config.sink.index, self.ranks.iter().map(Handle::id))
    }

    /// Asks an engine that is awake what it answers, for the verdict and for the row.
    pub(super) async fn check(&self, check: &Check, observed: &mut Observed, shown: &mut Value) {
        let seen = Seen::read(observed, &self.state.capabilities);
        let Observed::State(state) = observed else { return };
        if seen != Seen::Serving {
            return;
        }
        if let Some((is_expected, planted)) = &check.planted {
            (*state, shown["planted"]) = self.dig(planted, *is_expected, *state).await;
        }
        if let Some(asks) = &check.asks {
            let found = asks.run(&self.canary_target()).await;
            *state = State { canary: found.is_as_before(), ..*state };
            shown["canary"] = found.json();
        }
    }

    /// Where a canary goes.
    pub(super) fn canary_target(&self) -> canary::Target<'_> {
        let local = |rank: &Handle| rank.rank().checked_sub(self.state.first_rank);
        let ranks = self.ranks.iter().filter_map(local).collect();
        canary::Target { engine: &self.worker.engine, models: &self.state.models, ranks }
    }
}

/// Whether the clear that a confirmed action owes can be seen later alone: a paused engine takes no
/// step.
fn waits_for_clear(mv: Move, verdict: &Verdict) -> bool {
    let is_stopped = verdict.phase() == Phase::Paused;
    is_stopped && verdict.owes_clear && matches!(mv, Move::Pause { .. } | Move::Reset { .. })
}

/// What becomes of a request.
pub(super) enum Planned {
    /// Nothing is sent.
    Refused(Box<Row>),
    /// This is.
    Ready(Ready),
}

/// What is to be sent.
pub(super) struct Ready {
    /// The request, which may have given up a tier.
    pub(super) request: Request,
    /// The calls.
    pub(super) calls: Vec<Call>,
    /// What goes cold before.
    pub(super) intent: Event,
}

/// `asked`, with what the end of a rollout stated that `request` is a part of.
fn with_end(mut asked: Value, request: &Request) -> Value {
    if let Some(end) = &request.ends {
        asked["end"] = Value::clone(end);
    }
    asked
}

/// The same action, with the connector's tiers given up.
fn without_keeping(mv: Move) -> Move {
    match mv {
        Move::Sleep { level, mode, .. } => Move::Sleep { level, mode, keep_tier: false },
        Move::Pause { mode, clear, .. } => Move::Pause { mode, clear, keep_tier: false },
        other => other,
    }
}
