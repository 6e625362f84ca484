//! The owner of one worker: everything that is done to it and noticed of it, one thing at a time.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use fak_kernel::rank::{Event, Note};
use fak_kernel::vocab::PerTier;
use fak_kernel::witness::{
    Answer, Call, Mode, Move, Observed, Plan, Refusal, Seen, Verdict, judge, plan,
};
use fak_kernel::{Disposition, Evidence, Phase};
use futures_util::future::join_all;
use serde_json::{Value, json};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{MissedTickBehavior, interval, timeout};

use super::probe::{Look, Progress};
use super::recovery::Recovery;
use super::rows::{error_chain, new_intent, outcome, told};
use super::weights::{self, Inheritance};
use super::{Command, Error, Request, learn, marker, translate};
use crate::events::blind::{self, Blindness};
use crate::events::discover::{self, Source};
use crate::events::stream::{Handle, Sink, Status, Stream};
use crate::fleet::{self, Fleet, Rank, State, Worker};
use crate::runtime::{OnExit, Shutdown, TaskGroup};
use crate::store::{self, NewIntent, Outcome, Row, Store};

/// What owners share.
#[derive(Clone)]
pub struct Config {
    /// Where they publish what is true of their workers.
    pub fleet: Fleet,
    /// The ledger.
    pub store: Store,
    /// Where their ranks' beliefs go.
    pub sink: Sink,
    /// Event sockets that were named, by worker; the engine is asked for those of the others.
    pub events: BTreeMap<Arc<str>, Events>,
    /// Pause between two looks at a worker; drift is found within one.
    pub probe_every: Duration,
    /// Looks in a row without any answer before a worker is lost.
    pub failures_max: u32,
    /// How long requests may run without a token before their worker is suspect.
    pub patience: Duration,
    /// How long the door stays shut after an action for its events to settle.
    pub settle_within: Duration,
}

/// A worker's named event sockets, one source a rank.
pub type Events = Vec<Source>;

/// Writes rows for actions that never reach the owner.
#[derive(Clone, Debug)]
pub(super) struct Refuser {
    fleet: Fleet,
    store: Store,
    worker: Arc<str>,
}

impl Refuser {
    pub(super) async fn refuse(&self, request: &Request, why: Refusal) -> Result<Row, Error> {
        let fleet = self.fleet.snapshot();
        let Some(view) = fleet.get(&self.worker) else {
            return Err(Error::UnknownWorker(self.worker.to_string()));
        };
        let State { standing, capabilities, .. } = &*view.state;
        let answer = Answer::NotSent(why);
        let verdict = judge(request.mv, capabilities, standing, answer, &Observed::Nothing);
        let intent = NewIntent {
            worker: self.worker.to_string(),
            incarnation: view.state.incarnation.as_deref().map(str::to_owned),
            asked: translate::refusal_json(why),
            ..new_intent(request.mv, request.session.clone())
        };
        let weight_version = view.state.weight_version.as_deref();
        let outcome = outcome(&verdict, weight_version, Value::Null, Value::Null);
        Ok(self.store.note(intent, outcome).await?)
    }
}

/// One worker's owner; it lives by [`run`](Self::run).
pub struct Owner {
    pub(super) config: Config,
    pub(super) worker: Arc<Worker>,
    commands: mpsc::Receiver<Command>,
    is_busy: Arc<AtomicBool>,
    pub(super) state: State,
    ranks: Vec<Handle>,
    streams: TaskGroup,
    /// What ranks notice, with their numbers: for their streams, and what came.
    notes: (mpsc::Sender<RankNote>, mpsc::Receiver<RankNote>),
    failures: u32,
    has_learnt: bool,
    /// How often it was asked what it is, in this life.
    tries: u32,
    /// Tokens in a block of the device cache, where the engine told.
    block_size: Option<u32>,
    progress: Progress,
    /// By rank: its watch, and what it found.
    blindness: Vec<(Blindness, bool)>,
    /// Until it has ended, nobody is shown the ranks.
    recovery: Recovery,
    pub(super) inheritance: Inheritance,
}

/// Times that an engine which does not tell its connector is asked for it.
const LEARN_TRIES: u32 = 5;

type RankNote = (u32, Note);

/// Notes of ranks that may wait for their owner; more are logged by the rank alone.
const NOTES_MAX: usize = 256;

impl Owner {
    pub(super) fn new(
        config: &Config,
        worker: Arc<Worker>,
        commands: mpsc::Receiver<Command>,
        is_busy: Arc<AtomicBool>,
    ) -> Self {
        worker.door.shut();
        Self {
            config: config.clone(),
            worker,
            commands,
            is_busy,
            state: State::unobserved(),
            ranks: Vec::new(),
            streams: TaskGroup::new(),
            notes: mpsc::channel(NOTES_MAX),
            failures: 0,
            has_learnt: false,
            tries: 0,
            block_size: None,
            progress: Progress::default(),
            blindness: Vec::new(),
            recovery: Recovery::default(),
            inheritance: Inheritance::default(),
        }
    }

    pub(super) fn refuser(&self) -> Refuser {
        let Config { fleet, store, .. } = &self.config;
        let (fleet, store) = (fleet.clone(), store.clone());
        Refuser { fleet, store, worker: Arc::clone(&self.worker.id) }
    }

    /// Owns the worker until told to stop. An action that runs then is brought to its end first.
    pub async fn run(mut self, stop: Shutdown) {
        let mut tick = interval(self.config.probe_every);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = stop.requested() => break,
                _ = tick.tick() => self.look().await,
                note = self.notes.1.recv() => {
                    if let Some((rank, note)) = note {
                        self.note(rank, note).await;
                    }
                }
                command = self.commands.recv() => match command {
                    Some(Command::Act { request, done }) => self.obey(request, done).await,
                    // Whoever asked may have left.
                    Some(Command::Ranks { done }) => drop(done.send(self.ranks.clone())),
                    Some(Command::Contradicted { claimed, cached }) => {
                        self.contradicted(claimed, cached).await;
                    }
                    Some(Command::Look { done }) => {
                        self.look().await;
                        // Whoever asked may have left.
                        let _ = done.send(());
                    }
                    None => break,
                },
            }
        }
        self.worker.door.shut();
    }

    async fn obey(&mut self, request: Request, done: oneshot::Sender<Result<Row, Error>>) {
        let row = self.act(request).await;
        self.is_busy.store(false, Ordering::Release);
        // Whoever asked may have left; the row is in the ledger.
        let _ = done.send(row);
    }

    /// One look at the worker, and what follows from it.
    async fn look(&mut self) {
        let look = Look::at(&self.worker.engine).await;
        if let Err(error) = self.take_in(&look).await {
            tracing::error!(worker = %self.worker.id, error = error_chain(&error), "a row is lost");
        }
        if self.state.is_serving() && self.worker.door.is_shut() {
            self.settle().await;
        } else {
            self.send_markers().await;
        }
        self.publish();
        if self.recovery.is_due() && self.state.is_serving() {
            let mut recovery = std::mem::take(&mut self.recovery);
            if let Some(to) = self.marker_target() {
                let (index, within) = (&self.config.sink.index, self.config.settle_within);
                recovery.advance(to, &self.ranks, index, within).await;
            }
            self.recovery = recovery;
            self.publish();
        }
    }

    async fn take_in(&mut self, look: &Look) -> Result<(), store::Error> {
        self.state.is_reachable = look.is_reachable();
        if !self.state.is_reachable {
            self.failures = self.failures.saturating_add(1);
            if self.failures >= self.config.failures_max && self.state.phase() != Phase::Error {
                self.notice(Move::Lost, look).await?;
            }
            return Ok(());
        }
        self.failures = 0;
        let is_other_life = self.is_other_life(look);
        let was_heard = !self.ranks.is_empty();
        if is_other_life {
            self.tries = 0;
            self.state.incarnation = look.incarnation();
            self.recovery = Recovery::default();
            // What is lost was the old life's, whatever the new one turns out to be.
            self.notice(Move::Restart, look).await?;
        }
        if !self.has_learnt || is_other_life {
            self.learn().await;
        }
        self.inherit(look).await?;
        if !was_heard && !self.ranks.is_empty() {
            let (store, worker) = (&self.config.store, &self.worker.id);
            self.recovery = Recovery::begin(store, worker, look.incarnation().as_deref()).await;
            if self.recovery.is_cold() {
                self.tell(Event::Distrust { kv: PerTier::all(Disposition::Unknown) }).await;
            }
        }
        self.state.metrics.clone_from(&look.metrics);
        if self.state.incarnation.is_none() {
            self.state.incarnation = look.incarnation();
        }
        self.see_version(look, is_other_life).await?;
        let observed = translate::observed(&look.observation);
        if self.state.standing.has_drifted(Seen::read(&observed, &self.state.capabilities)) {
            self.notice(Move::Drift, look).await?;
        }
        self.watch_for_blindness(look);
        if let (Some(metrics), Phase::Serving) = (&look.metrics, self.state.phase()) {
            let (now, patience) = (Instant::now(), self.config.patience);
            self.state.is_progressing = self.progress.see(metrics, now, patience);
        }
        Ok(())
    }

    fn watch_for_blindness(&mut self, look: &Look) {
        let Some(metrics) = &look.metrics else { return };
        let now = Instant::now();
        for (rank, (watch, is_blind)) in self.ranks.iter().zip(&mut self.blindness) {
            let queries = metrics.ranks.get(&rank.rank()).and_then(|r| r.prefix_queries);
            let last_seq = rank.status().last_seq;
            let found = watch.see(queries, last_seq, now, self.config.patience);
            if found && !*is_blind {
                let (worker, rank, causes) = (&self.worker.id, rank.rank(), blind::CAUSES);
                tracing::warn!(%worker, rank, causes, "blind: lookups without any event");
            }
            *is_blind = found;
        }
    }

    fn is_other_life(&self, look: &Look) -> bool {
        let (known, seen) = (&self.state.incarnation, look.incarnation());
        known.is_some() && seen.is_some() && *known != seen
    }

    /// Asks the engine what it is and where its ranks publish.
    async fn learn(&mut self) {
        let told = self.worker.engine.capabilities().await;
        self.state.capabilities = learn::capabilities(&told);
        self.state.version = told.version.told().map(|v| v.as_str().into());
        if let Some(models) = told.models.told() {
            self.state.models = models.iter().map(|m| m.id.as_str().into()).collect();
        }
        self.block_size = told.block_size.told().copied();
        self.tries += 1;
        // The first `/server_info` of a busy engine can take longer than a look (0.32.0, observed).
        let is_whole = told.connectors.told().is_some() || self.tries >= LEARN_TRIES;
        let is_told = told.version.told().is_some() && told.models.told().is_some();
        self.has_learnt = is_told && is_whole;
        if self.ranks.is_empty() {
            let sources = self.sources(&told);
            self.follow(sources);
        }
    }

    fn sources(&self, told: &crate::engine::Capabilities) -> Events {
        if let Some(named) = self.config.events.get(&self.worker.id) {
            return named.clone();
        }
        let host = self.worker.engine.endpoints().origin().host();
        let found = told.kv_event_sources.told().map(|body| discover::from_answer(body, host));
        match found {
            Some(Ok(found)) => {
                for (rank, silent) in &found.silent {
                    tracing::warn!(worker = %self.worker.id, rank, %silent, "routed by load alone");
                }
                found.sources
            }
            Some(Err(error)) => {
                tracing::warn!(worker = %self.worker.id, %error, "routed by load alone");
                Vec::new()
            }
            None => Vec::new(),
        }
    }

    fn follow(&mut self, sources: Events) {
        for source in sources {
            let notes = Some(self.notes.0.clone());
            let sink = Sink { notes, ..self.config.sink.clone() };
            let (stream, handle) = Stream::new(&self.worker.id, source, sink);
            let stop = self.streams.shutdown();
            self.streams.spawn("rank events", OnExit::Report, stream.run(stop));
            self.ranks.push(handle);
            self.blindness.push((Blindness::default(), false));
        }
    }

    /// What a rank's stream noticed. Its beliefs have followed already.
    async fn note(&mut self, rank: u32, note: Note) {
        let mv = match note {
            Note::ClearUnexplained { .. } => Move::ClearUnexplained,
            Note::GapNotClosed => Move::Gap,
            // The process's own start time tells of another life, or the next look does.
            Note::NewLife => return self.look().await,
            Note::Gap { .. } | Note::GapClosed | Note::Settled => return,
        };
        let verdict = self.judge_noticed(mv, &Observed::Nothing);
        let intent = NewIntent { rank: Some(rank), ..self.new_intent(mv, None, Value::Null) };
        let outcome = self.outcome(&verdict, Value::Null, Value::Null);
        let written = self.config.store.note(intent, outcome).await;
        self.written(written);
        self.publish();
    }

    /// The engine took less from its caches than was claimed, and no event says why: events must be
    /// missing that nobody missed.
    async fn contradicted(&mut self, claimed: u32, cached: u64) {
        let verdict = self.judge_noticed(Move::Gap, &Observed::Nothing);
        self.tell(Event::Distrust { kv: verdict.kv }).await;
        let seen = json!({ "claimed_tokens": claimed, "cached_tokens": cached });
        let reason = "contradicted".to_owned();
        let outcome = Outcome { reason, ..self.outcome(&verdict, Value::Null, seen) };
        let intent = self.new_intent(Move::Gap, None, Value::Null);
        let written = self.config.store.note(intent, outcome).await;
        self.written(written);
        self.publish();
    }

    /// Something happened that nobody asked fak for: beliefs first, then the row.
    pub(super) async fn notice(&mut self, mv: Move, look: &Look) -> Result<(), store::Error> {
        let is_first = weights::is_first(&self.state.standing);
        let verdict = self.judge_noticed(mv, &translate::observed(&look.observation));
        match mv {
            Move::Restart => self.tell(Event::NewIncarnation).await,
            Move::Lost => self.tell(Event::Lost).await,
            // Of an engine that is first met awake nothing is believed yet that could be false.
            _ if is_first && verdict.serving() => {}
            _ => self.tell(Event::Distrust { kv: verdict.kv }).await,
        }
        self.state.standing = verdict.next;
        let observed = translate::observed_json(&look.observation);
        let intent = self.new_intent(mv, None, Value::Null);
        let outcome = self.outcome(&verdict, Value::Null, observed);
        let row = self.config.store.note(intent, outcome).await?;
        told(&row, "noticed");
        self.state.last_witness = Some(row.seq);
        self.follow_weights(mv, row.seq);
        Ok(())
    }

    fn judge_noticed(&self, mv: Move, observed: &Observed) -> Verdict {
        let State { standing, capabilities, .. } = &self.state;
        judge(mv, capabilities, standing, Answer::Unrecorded, observed)
    }

    /// Does an action, or says why not.
    async fn act(&mut self, request: Request) -> Result<Row, Error> {
        // Somebody else may have moved the engine since the last look.
        let look = Look::at(&self.worker.engine).await;
        self.take_in(&look).await?;
        let mut request = request;
        let mut planned = plan(request.mv, &self.state.capabilities, &self.state.standing);
        if planned == Plan::Refuse(Refusal::KeepNotProven) && request.allow_evict {
            request.mv = without_keeping(request.mv);
            planned = plan(request.mv, &self.state.capabilities, &self.state.standing);
        }
        let row = match planned {
            Plan::Refuse(why) => self.refuse(&request, why, &look).await,
            Plan::Send { calls, demote, clear } => {
                self.worker.door.shut();
                if self.drained(&request).await {
                    self.call(&request, &calls, Event::Intent { tiers: demote, clear }).await
                } else {
                    self.refuse(&request, Refusal::DrainTimeout, &look).await
                }
            }
        };
        if self.state.is_serving() {
            self.settle().await;
        }
        self.publish();
        row
    }

    /// Waits for requests in flight where the action's mode lets them end; false if they did not in
    /// time.
    async fn drained(&self, request: &Request) -> bool {
        match request.mv {
            Move::Pause { mode: Mode::Wait, .. } | Move::Sleep { mode: Mode::Wait, .. } => {
                timeout(request.drain, self.worker.door.empty()).await.is_ok()
            }
            _ => true,
        }
    }

    async fn refuse(&mut self, request: &Request, why: Refusal, look: &Look) -> Result<Row, Error> {
        let State { standing, capabilities, .. } = &self.state;
        let observed = translate::observed(&look.observation);
        let verdict = judge(request.mv, capabilities, standing, Answer::NotSent(why), &observed);
        let asked = translate::refusal_json(why);
        let intent = self.new_intent(request.mv, request.session.clone(), asked);
        let observed = translate::observed_json(&look.observation);
        let outcome = self.outcome(&verdict, Value::Null, observed);
        let row = self.config.store.note(intent, outcome).await?;
        self.state.last_witness = Some(row.seq);
        Ok(row)
    }

    /// Intent durable, beliefs cold, the calls, the observation, the outcome.
    async fn call(
        &mut self,
        request: &Request,
        calls: &[Call],
        intent: Event,
    ) -> Result<Row, Error> {
        let has_new_weights = weights::may_change(request.mv, &self.state.standing);
        let asked = weights::marked(translate::asked_json(calls), has_new_weights);
        let new = self.new_intent(request.mv, request.session.clone(), asked);
        let demotes = matches!(intent, Event::Intent { tiers, .. } if !tiers.is_empty());
        let new = NewIntent { warm_demoted: demotes, ..new };
        let seq = self.config.store.intent(new).await?;
        self.tell(intent).await;
        let epoch = self.state.weights_epoch;
        if has_new_weights {
            // Requests that were kept go on before the last call is answered.
            self.state.weights_epoch = Some(seq);
            self.publish_standing();
        }
        let (answer, answered, observation) = self.make(calls).await;
        let observed = translate::observed(&observation);
        let State { standing, capabilities, .. } = &self.state;
        let verdict = judge(request.mv, capabilities, standing, answer, &observed);
        self.tell(Event::Outcome { kv: verdict.kv, clears: verdict.owes_clear }).await;
        self.state.standing = verdict.next;
        if verdict.evidence == Evidence::NotSent {
            self.state.weights_epoch = epoch;
        }
        self.publish_standing();
        let observed = translate::observed_json(&observation);
        let outcome = self.outcome(&verdict, answered, observed);
        let row = self.config.store.outcome(seq, outcome).await?;
        self.state.last_witness = Some(row.seq);
        told(&row, "done");
        Ok(row)
    }

    /// Makes the calls up to the first that does not succeed, then looks.
    async fn make(&self, calls: &[Call]) -> (Answer, Value, crate::engine::Observation) {
        let mut last = (Answer::Ok, Value::Null);
        for call in calls {
            let called = self.worker.engine.ask(&translate::control(*call)).await;
            last = (translate::answer(*call, &called), translate::answered_json(&called));
            if !matches!(last.0, Answer::Ok | Answer::Success(true)) {
                break;
            }
        }
        (last.0, last.1, self.worker.engine.observe().await)
    }

    /// Keeps the door shut until what is stored from here on is believed: what is stored before
    /// would stay cold.
    async fn settle(&self) {
        let Some(target) = self.marker_target() else { return };
        let ranks = self.ranks.iter().map(|rank| async move {
            while let Ok(status) = rank.wait_for(|s| s.is_settled || s.marker.is_some()).await {
                match status.marker {
                    Some(id) if !status.is_settled => {
                        marker::send(target, rank, id).await;
                        let is_over = rank.wait_for(|s| s.is_settled || s.marker != Some(id));
                        if is_over.await.is_err() {
                            return;
                        }
                    }
                    _ => return,
                }
            }
        });
        if timeout(self.config.settle_within, join_all(ranks)).await.is_err() {
            tracing::warn!(worker = %self.worker.id, "serves before its events have settled");
        }
    }

    /// Sends the markers that ranks still wait for.
    async fn send_markers(&self) {
        let Some(target) = self.marker_target().filter(|_| self.state.is_serving()) else {
            return;
        };
        for rank in &self.ranks {
            if let Some(id) = rank.status().marker {
                marker::send(target, rank, id).await;
            }
        }
    }

    fn marker_target(&self) -> Option<marker::Target<'_>> {
        let (engine, block_size) = (&self.worker.engine, self.block_size);
        let model = self.state.models.first()?;
        Some(marker::Target { engine, model, block_size })
    }

    async fn tell(&self, event: Event) {
        for rank in &self.ranks {
            // A stream that has ended believes nothing any more.
            let _ = rank.tell(event).await;
        }
    }

    /// Shows the fleet what is true now, and opens the door only if the worker serves.
    fn publish(&mut self) {
        self.publish_standing();
        if self.state.is_serving() {
            self.worker.door.open();
        } else {
            self.worker.door.shut();
        }
    }

    fn publish_standing(&mut self) {
        let watched = self.ranks.iter().zip(&self.blindness).map(|(handle, (_, is_blind))| {
            let Status { trust, last_seq, .. } = handle.status();
            let stream =
                fleet::Stream { rank: handle.rank(), trust, last_seq, is_blind: *is_blind };
            (Rank { number: handle.rank(), id: handle.id(), trust }, stream)
        });
        let (ranks, streams): (Vec<_>, Vec<_>) = watched.unzip();
        self.state.is_recovering = self.recovery.is_pending();
        self.state.ranks = if self.state.is_recovering { Arc::default() } else { ranks.into() };
        self.state.streams = streams.into();
        let state = self.state.clone();
        self.config.fleet.update(&self.worker.id, |shown| *shown = state);
    }

    fn written(&mut self, row: Result<Row, store::Error>) {
        match row {
            Ok(row) => self.state.last_witness = Some(row.seq),
            Err(error) => {
                let error = error_chain(&error);
                tracing::error!(worker = %self.worker.id, error, "a row is lost");
            }
        }
    }

    fn outcome(&self, verdict: &Verdict, answered: Value, observed: Value) -> Outcome {
        outcome(verdict, self.state.weight_version.as_deref(), answered, observed)
    }

    fn new_intent(&self, mv: Move, session: Option<String>, asked: Value) -> NewIntent {
        NewIntent {
            worker: self.worker.id.to_string(),
            incarnation: self.state.incarnation.as_deref().map(str::to_owned),
            weight_version: self.state.weight_version.as_deref().map(str::to_owned),
            asked,
            ..new_intent(mv, session)
        }
    }
}

/// The same action, with the connector's tiers given up.
fn without_keeping(mv: Move) -> Move {
    match mv {
        Move::Sleep { level, mode, .. } => Move::Sleep { level, mode, keep_tier: false },
        Move::Pause { mode, clear, .. } => Move::Pause { mode, clear, keep_tier: false },
        other => other,
    }
}
