//! The owner of one worker: everything that is done to it and noticed of it, one thing at a time.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use fak_index::RankId;
use fak_kernel::rank::{Event, Note};
use fak_kernel::vocab::PerTier;
use fak_kernel::witness::{Answer, Level, Move, Observed, Reason, Verdict, judge};
use fak_kernel::{Disposition, Phase};
use serde_json::{Value, json};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{MissedTickBehavior, interval};

use super::act::Refuser;
use super::found::Vanished;
use super::lives::Lives;
use super::markers::Offer;
use super::probe::{Look, Progress};
use super::recovery::Recovery;
use super::rows::{error_chain, new_intent, outcome, told};
use super::sources::Followed;
use super::twins::Twins;
use super::unwritten::{Backlog, Unwritten};
use super::version::Versions;
use super::{Cancelled, Command};
use super::{proof, weights};
use crate::engine::{self, KvIdentity};
use crate::events::blind;
use crate::events::discover::Source;
use crate::events::notes;
use crate::events::stream::{Handle, Sink, Status};
use crate::fleet::{self, Counted, Fleet, Identity, Rank, State, Worker};
use crate::runtime::Shutdown;
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

/// One worker's owner; it lives by [`run`](Self::run).
pub struct Owner {
    pub(super) config: Config,
    pub(super) worker: Arc<Worker>,
    pub(super) commands: mpsc::Receiver<Command>,
    pub(super) is_busy: Arc<AtomicBool>,
    pub(super) state: State,
    pub(super) ranks: Vec<Handle>,
    /// Of each rank, in the same order: what is followed for it.
    pub(super) followed: Vec<Followed>,
    /// What ranks notice, with their numbers: for their streams, and what came.
    pub(super) notes: (notes::Sender, notes::Receiver),
    pub(super) failures: u32,
    /// What the engine told in this life.
    pub(super) told: engine::Capabilities,
    /// Whether that is all that is asked for.
    pub(super) has_learnt: bool,
    /// How often it was asked what it is, in this life.
    pub(super) tries: u32,
    /// Looks at it, in all.
    pub(super) looks: u32,
    /// Somebody was let down by it: what it serves is asked with the next look.
    pub(super) is_hinted: bool,
    /// The lives seen at its address.
    pub(super) lives: Lives,
    /// What held of it when it vanished, until it is back or known to be gone.
    pub(super) vanished: Option<Vanished>,
    /// What KV was computed with in the life before, until the present one has told.
    pub(super) former: Option<Arc<KvIdentity>>,
    /// Where all workers are, and which of them this is.
    pub(super) twins: (Twins, usize),
    /// To whom markers may be sent now.
    pub(super) markers: watch::Sender<Option<Offer>>,
    /// Looks in a row that showed no state which can be named.
    pub(super) unclear_looks: u32,
    pub(super) has_said_mixed: bool,
    /// Tokens in a block of the device cache, where the engine told.
    pub(super) block_size: Option<u32>,
    pub(super) progress: Progress,
    /// The connector's class names, where the engine told them.
    pub(super) connectors: Option<Vec<String>>,
    /// By the engine and by who loads them.
    pub(super) versions: Versions,
    /// Who has the worker.
    pub(super) hold: Option<store::Hold>,
    pub(super) is_recalled: bool,
    /// The hold ends with what is done now, where that leaves the worker serving.
    pub(super) is_ending: bool,
    /// The level of the sleep that fak put it into, while it lasts.
    pub(super) slept: Option<Level>,
    /// What the streams showed before a pause whose clear was not seen yet.
    pub(super) unseen_clear: Option<proof::Before>,
    /// Who cancelled what waited, and what to answer once the door is open.
    pub(super) cancelled: Option<(oneshot::Sender<Cancelled>, Cancelled)>,
    /// Something was noticed of it in fak's life.
    pub(super) has_joined: bool,
    /// In which phase an earlier fak left it.
    pub(super) left: Option<Phase>,
    /// Until it has ended, nobody is shown the ranks.
    pub(super) recovery: Recovery,
    /// The ledger was asked what the fak before left.
    pub(super) has_inherited: bool,
    /// Rows that the database has not taken yet.
    pub(super) backlog: Backlog,
}

impl Owner {
    pub(super) fn new(
        config: &Config,
        worker: Arc<Worker>,
        commands: mpsc::Receiver<Command>,
        is_busy: Arc<AtomicBool>,
        twins: (Twins, usize),
    ) -> Self {
        worker.door.shut();
        Self {
            config: config.clone(),
            worker,
            commands,
            is_busy,
            state: State::unobserved(),
            ranks: Vec::new(),
            followed: Vec::new(),
            notes: notes::channel(),
            failures: 0,
            told: engine::Capabilities::default(),
            has_learnt: false,
            tries: 0,
            looks: 0,
            is_hinted: false,
            lives: Lives::default(),
            vanished: None,
            former: None,
            twins,
            markers: watch::Sender::new(None),
            unclear_looks: 0,
            has_said_mixed: false,
            block_size: None,
            progress: Progress::default(),
            connectors: None,
            versions: Versions::default(),
            hold: None,
            is_recalled: false,
            is_ending: false,
            slept: None,
            unseen_clear: None,
            cancelled: None,
            has_joined: false,
            left: None,
            recovery: Recovery::default(),
            has_inherited: false,
            backlog: Backlog::default(),
        }
    }

    pub(super) fn refuser(&self) -> Refuser {
        let Config { fleet, store, .. } = &self.config;
        let (fleet, store) = (fleet.clone(), store.clone());
        let index = Arc::clone(&self.config.sink.index);
        Refuser { fleet, store, index, worker: Arc::clone(&self.worker.id) }
    }

    /// Owns the worker until told to stop. An action that runs then is brought to its end first.
    pub async fn run(mut self, stop: Shutdown) {
        let mut tick = interval(self.config.probe_every);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = stop.requested() => break,
                _ = tick.tick() => self.look().await,
                (rank, news) = self.notes.1.recv() => self.hear(rank, news).await,
                command = self.commands.recv() => match command {
                    Some(command) => self.obey(command).await,
                    None => break,
                },
            }
        }
        self.worker.door.shut();
        if self.backlog.flush(&self.config.store, &self.worker.id).await.is_err() {
            let (worker, rows) = (&self.worker.id, self.backlog.len());
            tracing::error!(%worker, rows, "rows are lost: the database does not take them");
        }
    }

    /// One look at the worker, and what follows from it.
    pub(super) async fn look(&mut self) {
        let look = Look::at(&self.worker.engine).await;
        // Where the database is still away, it is tried again with the next look.
        let _ = self.backlog.flush(&self.config.store, &self.worker.id).await;
        let taken_in = self.take_in(&look).await;
        self.report(taken_in);
        if self.state.is_serving() && self.worker.door.is_shut() {
            self.settle().await;
        }
        self.publish();
    }

    pub(super) async fn take_in(&mut self, look: &Look) -> Result<(), store::Error> {
        self.recall_hold().await?;
        self.inherit().await?;
        self.state.is_reachable = look.is_reachable();
        if !self.state.is_reachable {
            self.state.silence = Some(look.silence().into());
            self.tell_life(look).await;
            self.failures = self.failures.saturating_add(1);
            if self.failures == self.config.failures_max {
                tracing::warn!(worker = %self.worker.id, "does not answer");
            }
            if self.failures >= self.config.failures_max && self.state.phase() != Phase::Error {
                self.notice_anyhow(Move::Lost, look).await;
            }
            return Ok(());
        }
        self.failures = 0;
        self.show_silence();
        if self.sees_turns(look).await {
            return Ok(());
        }
        let is_other_life = self.is_other_life(look);
        let is_first = self.looks == 0;
        self.looks = self.looks.saturating_add(1);
        let mut has_new_ranks = is_first && self.learn().await;
        if is_other_life {
            self.state.incarnation = look.incarnation();
            self.recovery = Recovery::default();
            if !is_first {
                self.end_kv_identity();
            }
            // What is lost was the old life's, whatever the new one turns out to be. Of a life that
            // ended before this fak began, the new one is all there is to go by.
            self.notice_anyhow(Move::Restart, look).await;
        }
        if !is_first {
            if is_other_life || self.may_be_other_life(look) {
                self.forget_life();
            }
            has_new_ranks = self.learn_on().await;
        }
        self.tell_life(look).await;
        if has_new_ranks {
            self.recover(look).await;
        }
        if let Some(metrics) = &look.metrics {
            self.state.caution.see(metrics);
            self.state.counted = Some(Counted::of(metrics, self.worker.door.in_flight()));
        }
        self.state.metrics.clone_from(&look.metrics);
        let is_named_now = self.state.incarnation.is_none() && look.incarnation().is_some();
        if is_named_now {
            self.state.incarnation = look.incarnation();
        }
        if is_first || is_other_life || has_new_ranks || is_named_now {
            self.say_place().await;
        }
        self.show_identity();
        self.see_version(look, is_other_life).await;
        self.find(look).await;
        if let Some((observed, shown)) = self.drifted(&look.observation).await {
            self.meet(&observed, shown).await;
        }
        self.watch_for_blindness(look).await;
        self.see_progress(look);
        Ok(())
    }

    /// The engine shows another state than is held true of it. At the first look that is none:
    /// what was met before, and is as an earlier fak left it, is no news.
    async fn meet(&mut self, observed: &Observed, shown: Value) {
        let mv = match self.left {
            None if !self.has_joined => Move::Join,
            Some(left) if !self.has_joined => {
                let verdict = self.judge_noticed(Move::Join, observed);
                if verdict.phase() == left {
                    return self.take_noticed(Move::Join, &verdict).await;
                }
                Move::Drift
            }
            _ => Move::Drift,
        };
        // Where the row is not written it waits.
        let _ = self.notice_as(mv, observed, shown).await;
    }

    /// Begins with ranks of which the ledger may know more than their history shows.
    async fn recover(&mut self, look: &Look) {
        let (store, worker) = (&self.config.store, &self.worker.id);
        self.recovery = Recovery::begin(store, worker, look.incarnation().as_deref()).await;
        for _ in 0..self.recovery.owed() {
            self.tell(Event::MayOwe).await;
        }
        if self.recovery.is_cold() {
            self.tell(Event::Distrust { kv: PerTier::all(Disposition::Unknown) }).await;
        }
    }

    fn see_progress(&mut self, look: &Look) {
        if let (Some(metrics), Phase::Serving) = (&look.metrics, self.state.phase()) {
            let (now, patience) = (Instant::now(), self.config.patience);
            self.state.is_progressing = self.progress.see(metrics, now, patience);
            let moved_at = self.progress.moved_at().map(tokio::time::Instant::from_std);
            self.state.pace.moved_at = self.state.pace.moved_at.max(moved_at);
        }
    }

    async fn watch_for_blindness(&mut self, look: &Look) {
        let Some(metrics) = &look.metrics else { return };
        let now = Instant::now();
        for (rank, followed) in self.ranks.iter().zip(&mut self.followed) {
            let queries = metrics.ranks.get(&rank.rank()).and_then(|r| r.prefix_queries);
            let last_seq = rank.status().last_seq;
            let found = followed.watch.see(queries, last_seq, now, self.config.patience);
            if found && !followed.is_blind {
                let (worker, rank, causes) = (&self.worker.id, rank.rank(), blind::CAUSES);
                tracing::warn!(%worker, rank, causes, "blind: lookups without any event");
            }
            followed.is_blind = found;
            if found {
                // A stream that has ended believes nothing any more.
                let _ = rank.tell(Event::Blind).await;
            }
        }
    }

    /// What a rank's stream noticed. Its beliefs have followed already.
    pub(super) async fn note(&mut self, rank: u32, note: Note) {
        let mv = match note {
            Note::ClearUnexplained { .. } => Move::ClearUnexplained,
            Note::GapNotClosed => Move::Gap,
            // The process's own start time tells of another life, or the next look does.
            Note::NewLife => {
                // It may be set up otherwise, and the next look may not show that.
                self.forget_life();
                return self.look().await;
            }
            _ => return,
        };
        let verdict = self.judge_noticed(mv, &Observed::Nothing);
        let intent = NewIntent { rank: Some(rank), ..self.new_intent(mv, None, Value::Null) };
        let outcome = self.outcome(&verdict, Value::Null, Value::Null);
        // Where it is not written it waits; what it tells holds all the same.
        let _ = self.record(intent, outcome).await;
        self.publish();
    }

    /// The engine took less from its caches than was claimed, and no event says why: events must be
    /// missing that nobody missed.
    pub(super) async fn contradicted(&mut self, rank: RankId, claimed: u32, cached: u64) {
        // A rank that is followed no more is believed no more.
        let Some(handle) = self.ranks.iter().find(|handle| handle.id() == rank).cloned() else {
            return;
        };
        let verdict = self.judge_noticed(Move::Gap, &Observed::Nothing);
        // A stream that has ended believes nothing any more.
        let _ = handle.tell(Event::Distrust { kv: verdict.kv }).await;
        let seen = json!({ "claimed_tokens": claimed, "cached_tokens": cached });
        let reason = Reason::Contradicted.as_str().to_owned();
        let outcome = Outcome { reason, ..self.outcome(&verdict, Value::Null, seen) };
        let rank = Some(handle.rank());
        let intent = NewIntent { rank, ..self.new_intent(Move::Gap, None, Value::Null) };
        // Where it is not written it waits; what it tells holds all the same.
        let _ = self.record(intent, outcome).await;
        self.publish();
    }

    /// As [`Owner::notice`], where the row may wait for the database.
    pub(super) async fn notice_anyhow(&mut self, mv: Move, look: &Look) {
        let _ = self.notice(mv, look).await;
    }

    /// Something happened that nobody asked fak for: beliefs first, then the row.
    pub(super) async fn notice(&mut self, mv: Move, look: &Look) -> Result<Row, store::Error> {
        let (observed, shown) = self.shown(&look.observation);
        self.notice_as(mv, &observed, shown).await
    }

    /// The same, where more was observed than a look shows.
    pub(super) async fn notice_as(
        &mut self,
        mv: Move,
        observed: &Observed,
        shown: Value,
    ) -> Result<Row, store::Error> {
        let is_epoch = self.takes_epoch(mv);
        self.noticed(mv, is_epoch, observed, shown).await
    }

    /// The same, where it is known whether its row is the weights' epoch.
    pub(super) async fn noticed(
        &mut self,
        mv: Move,
        is_epoch: bool,
        observed: &Observed,
        mut shown: Value,
    ) -> Result<Row, store::Error> {
        self.keep_vanished(mv);
        let verdict = self.judge_noticed(mv, observed);
        self.take_noticed(mv, &verdict).await;
        self.show_kv_identity(mv, &mut shown).await;
        let intent = NewIntent { is_epoch, ..self.new_intent(mv, None, Value::Null) };
        let outcome = self.outcome(&verdict, Value::Null, shown);
        let row = self.record(intent, outcome).await?;
        told(&row, "noticed");
        Ok(row)
    }

    /// What holds from a verdict on what was noticed.
    async fn take_noticed(&mut self, mv: Move, verdict: &Verdict) {
        let is_first = !std::mem::replace(&mut self.has_joined, true);
        match mv {
            Move::Restart => self.tell(Event::NewIncarnation).await,
            Move::Lost => self.tell(Event::Lost).await,
            // Of an engine that is first met awake nothing is believed yet that could be false.
            Move::Join | Move::Drift if is_first && verdict.serving() => {}
            _ => self.tell(Event::Distrust { kv: verdict.kv }).await,
        }
        if verdict.next.phase != self.state.standing.phase {
            // Somebody else moved it, or it is gone.
            self.keep_at_rest(false);
        }
        self.state.standing = verdict.next;
    }

    /// fak puts the worker to rest, or it rests no more: then clocks of its requests start anew.
    pub(super) fn keep_at_rest(&mut self, is_kept: bool) {
        let pace = &mut self.state.pace;
        if pace.is_kept_at_rest && !is_kept {
            pace.moved_at = Some(tokio::time::Instant::now());
        }
        pace.is_kept_at_rest = is_kept;
    }

    pub(super) fn judge_noticed(&self, mv: Move, observed: &Observed) -> Verdict {
        let State { standing, capabilities, .. } = &self.state;
        judge(mv, capabilities, standing, Answer::Unrecorded, observed)
    }

    pub(super) async fn tell(&self, event: Event) {
        for rank in &self.ranks {
            // A stream that has ended believes nothing any more.
            let _ = rank.tell(event).await;
        }
    }

    /// Shows the fleet what is true now, and opens the door only if the worker serves.
    pub(super) fn publish(&mut self) {
        self.publish_standing();
        if self.state.is_serving() {
            self.offer_markers();
            self.worker.door.open();
        } else {
            self.hold_markers();
            self.worker.door.shut();
        }
    }

    pub(super) fn publish_standing(&mut self) {
        self.slept = self.slept.filter(|_| self.state.phase() == Phase::Sleeping);
        let watched = self.ranks.iter().zip(&self.followed).map(|(handle, followed)| {
            let Status { trust, last_seq, is_dead, last_event_at, .. } = handle.status();
            let (is_blind, has_replay) = (followed.is_blind, followed.has_replay());
            let rank = handle.rank();
            let stream = fleet::Stream {
                rank,
                trust,
                last_seq,
                is_blind,
                is_dead,
                has_replay,
                last_event_at,
            };
            (Rank { number: handle.rank(), id: handle.id(), trust }, stream)
        });
        let (ranks, streams): (Vec<_>, Vec<_>) = watched.unzip();
        self.recovery.see(&self.ranks);
        self.state.is_recovering = self.recovery.is_pending();
        let is_shown = !self.state.is_recovering && self.state.identity == Identity::Clear;
        self.state.ranks = if is_shown { ranks.into() } else { Arc::default() };
        self.state.streams = streams.into();
        let state = self.state.clone();
        self.config.fleet.update(&self.worker.id, |shown| *shown = state);
    }

    /// Writes a row of what was noticed, or was not sent. Where the database does not take it, it
    /// waits, and what it tells holds all the same.
    pub(super) async fn record(
        &mut self,
        intent: NewIntent,
        outcome: Outcome,
    ) -> Result<Row, store::Error> {
        let is_epoch = intent.is_epoch;
        let note = Unwritten::Note(Box::new((intent, outcome)));
        let written = self.backlog.write(&self.config.store, &self.worker.id, note).await;
        match &written {
            Ok(row) => {
                self.state.last_witness = Some(row.seq);
                self.state.weights_epoch = row.standing.as_ref().and_then(|s| s.weights_epoch);
            }
            // The row has no number yet that could name the weights.
            Err(_) if is_epoch => self.state.weights_epoch = Some(weights::unnumbered_epoch()),
            Err(_) => {}
        }
        written
    }

    /// Says why the worker cannot be judged: its hold and its history are in the ledger.
    fn report<T>(&self, recorded: Result<T, store::Error>) {
        if let Err(error) = recorded {
            let (worker, error) = (&self.worker.id, error_chain(&error));
            tracing::error!(%worker, error, "the ledger cannot be read: the worker waits for it");
        }
    }

    /// What a verdict says, for the ledger.
    pub(super) fn outcome(&self, verdict: &Verdict, answered: Value, observed: Value) -> Outcome {
        let takes_requests = self.hold.is_none() || self.is_ending;
        Outcome {
            serving: verdict.serving() && takes_requests,
            standing: Some(self.standing_for_ledger(&self.state.standing)),
            ..outcome(verdict, &self.state, answered, observed)
        }
    }

    pub(super) fn new_intent(&self, mv: Move, session: Option<String>, asked: Value) -> NewIntent {
        NewIntent {
            worker: self.worker.id.to_string(),
            incarnation: self.state.incarnation.as_deref().map(str::to_owned),
            weight_version: self.state.weight_version.as_deref().map(str::to_owned),
            asked,
            ..new_intent(mv, session)
        }
    }
}
