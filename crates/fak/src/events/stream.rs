//! One rank's stream, from its sockets to its beliefs: the task that owns a rank.
//!
//! Invariant: facts are folded one at a time, in the order in which they came; what waits for an
//! answer (a replay, a connection) never holds up the live source. Requests are not held up by it
//! either: they read the index.

use std::future::{Future, pending};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use fak_index::{Index, Loss, RankId, RankOptions};
use fak_kernel::rank::{self, Event, Note, Trust};
use fak_kernel::{Belief, LossCause, TierSet};
use tokio::sync::{Notify, mpsc, oneshot, watch};
use tokio::time::{Instant, Interval, MissedTickBehavior, interval, sleep};

use super::Item;
use super::discover::Source;
use super::endpoint::Endpoint;
use super::fold::{Ask, Fold, Marker, Tally};
use super::lease::{Lease, Moment};
use super::notes;
use super::recorder::{self, Recorder};
use super::replay::{self, Replay};
use super::zmq::{Options, Subscription};
use crate::runtime::Shutdown;

/// Time for one replay, the connecting included. An idle vLLM answers within 0.1 s (0.32.0,
/// observed).
const REPLAY_WITHIN: Duration = Duration::from_secs(10);
/// Pause before a replay that was tried before; doubles with each try.
const REPLAY_RETRY_AFTER: Duration = Duration::from_millis(100);
/// Time for a first try's connecting, its first answer, and between two; doubles with each try.
const REPLAY_QUIET: Duration = Duration::from_secs(1);
/// The kernel's tick: what it counts in.
const TICK: Duration = Duration::from_millis(250);
/// Ticks that may pass between two turns. Past that the kernel's count of them is no clock any
/// more, and every belief's time was over meanwhile.
const TICKS_MAX: u32 = 5;
/// For how long after a reading claims are taken to be asked for: a turn of a conversation.
const WANTED_FOR: Duration = Duration::from_secs(60);
/// Facts from other parts that may wait.
const COMMANDS_MAX: usize = 64;

/// How a rank's stream stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status {
    /// How far its beliefs can be relied on.
    pub trust: Trust,
    /// Whether the last action is settled.
    pub is_settled: bool,
    /// Whether what the connector's tiers hold is in doubt until a batch more was folded.
    pub is_contested: bool,
    /// The last batch that was folded.
    pub last_seq: Option<u64>,
    /// The marker that the kernel wants sent, if one is.
    pub marker: Option<u64>,
    /// Whether the live connection was seen to bring less than the engine publishes, and has not
    /// shown better since. Nothing is claimed of the rank then.
    pub is_dead: bool,
    /// When the live connection last brought a batch.
    pub last_event_at: Option<Instant>,
    /// Connections made so far: each may be to another process.
    pub connections: u64,
    /// What it has shown of clears.
    pub tally: Tally,
}

impl Status {
    /// How long the live connection has been silent; `None` where it never brought a batch.
    #[must_use]
    pub fn last_event_age(&self) -> Option<Duration> {
        self.last_event_at.map(|at| at.elapsed())
    }
}

enum Command {
    Fact { event: Event, done: oneshot::Sender<()> },
    Expect(Marker),
    Watch { tokens: Vec<u32>, done: oneshot::Sender<()> },
}

/// The other parts' hold on a rank's stream; cheap to clone.
#[derive(Clone, Debug)]
pub struct Handle {
    id: RankId,
    rank: u32,
    commands: mpsc::Sender<Command>,
    late: Arc<Notify>,
    status: watch::Receiver<Status>,
}

/// The stream's task has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the rank's event stream has ended")]
pub struct Ended;

impl Handle {
    /// The rank in the index.
    #[must_use]
    pub fn id(&self) -> RankId {
        self.id
    }

    /// Data-parallel rank.
    #[must_use]
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// How the stream stands now.
    #[must_use]
    pub fn status(&self) -> Status {
        *self.status.borrow()
    }

    /// Feeds a fact; once it returns, the beliefs follow it.
    ///
    /// # Errors
    /// [`Ended`]: nothing is believed of the rank any more.
    pub async fn tell(&self, event: Event) -> Result<(), Ended> {
        let (done, is_done) = oneshot::channel();
        self.commands.send(Command::Fact { event, done }).await.map_err(|_| Ended)?;
        is_done.await.map_err(|_| Ended)
    }

    /// A batch that the engine owes is late, as where an answer that computed a block was followed
    /// by none: what it published is asked for. Never waits; calls that come before it was asked
    /// are one.
    pub fn catch_up(&self) {
        self.late.notify_one();
    }

    /// Says which store will be the marker's. To be called before its request is sent.
    ///
    /// # Errors
    /// [`Ended`].
    pub async fn expect(&self, marker: Marker) -> Result<(), Ended> {
        self.commands.send(Command::Expect(marker)).await.map_err(|_| Ended)
    }

    /// Watches for the store of a prompt that begins with `tokens`; once it returns, [`Tally`]
    /// tells of that store alone. To be called before its request is sent.
    ///
    /// # Errors
    /// [`Ended`].
    pub async fn watch(&self, tokens: Vec<u32>) -> Result<(), Ended> {
        let (done, is_done) = oneshot::channel();
        self.commands.send(Command::Watch { tokens, done }).await.map_err(|_| Ended)?;
        is_done.await.map_err(|_| Ended)
    }

    /// Waits until the status satisfies `wanted`.
    ///
    /// # Errors
    /// [`Ended`].
    pub async fn wait_for(&self, wanted: impl FnMut(&Status) -> bool) -> Result<Status, Ended> {
        self.status.clone().wait_for(wanted).await.map(|status| *status).map_err(|_| Ended)
    }
}

/// What a rank's stream writes to.
#[derive(Clone)]
pub struct Sink {
    /// Beliefs.
    pub index: Arc<Index>,
    /// What an operator declares of the worker's ranks.
    pub options: RankOptions,
    /// What happened.
    pub recorder: Arc<Recorder>,
    /// Who is told what the stream notices.
    pub notes: Option<notes::Sender>,
}

/// A rank's stream; it lives by [`run`](Self::run).
pub struct Stream {
    name: recorder::Rank,
    fold: Fold,
    sink: Sink,
    id: RankId,
    live: Subscription,
    replay_at: Option<Endpoint>,
    replay: Replaying,
    commands: mpsc::Receiver<Command>,
    late: Arc<Notify>,
    status: watch::Sender<Status>,
    last_event_at: Option<Instant>,
    tick: Interval,
    /// The time up to which the kernel was told of ticks.
    ticked_at: Moment,
    /// When what is believed was last read, up to then.
    read_at: Option<Instant>,
    lease: Arc<Lease>,
    connections: u64,
}

impl Stream {
    /// A stream from `source` of `worker`; connects when run. Needs a tokio runtime.
    #[must_use]
    pub fn new(worker: &Arc<str>, source: Source, sink: Sink) -> (Self, Handle) {
        let name = recorder::Rank { worker: Arc::clone(worker), rank: source.rank };
        let id = sink.index.add_rank(sink.options);
        // An engine that was there before may hold anything.
        let loss = Loss::without_event(LossCause::Gap);
        sink.index.demote(id, TierSet::ALL, Belief::Unknown, loss);
        let lease = Arc::new(Lease::over());
        sink.index.count_while(id, Arc::clone(&lease) as Arc<dyn fak_index::Lease>);
        let replay = source.replay.is_some();
        let config = rank::Config { replay, ..rank::Config::default() };
        let fold = Fold::new(
            rank::Rank::new(config),
            (Arc::clone(&sink.index), id),
            Arc::clone(&sink.recorder),
            name.clone(),
        );
        let (sender, commands) = mpsc::channel(COMMANDS_MAX);
        let (status, status_read) = watch::channel(status_of(&fold, None, 0));
        let late = Arc::new(Notify::new());
        let mut tick = interval(TICK);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let stream = Self {
            name,
            fold,
            sink,
            id,
            live: Subscription::new(Options::new(source.live, source.topic)),
            replay_at: source.replay,
            replay: Replaying::None,
            commands,
            late: Arc::clone(&late),
            status,
            last_event_at: None,
            tick,
            ticked_at: Moment::now(),
            read_at: None,
            lease,
            connections: 0,
        };
        (stream, Handle { id, rank: source.rank, commands: sender, late, status: status_read })
    }

    /// Folds until told to stop. Then nothing is believed of the rank any more.
    pub async fn run(mut self, stop: Shutdown) {
        loop {
            let asks = tokio::select! {
                () = stop.requested() => break,
                item = self.live.next() => self.heard(item),
                step = self.replay.next() => self.replayed(step),
                command = self.commands.recv() => match command {
                    Some(command) => self.obey(command),
                    None => break,
                },
                () = self.late.notified() => self.fold.fact(Event::Late),
                _ = self.tick.tick() => self.tick(Moment::now()),
            };
            self.carry_out(asks);
        }
    }

    /// Tells the kernel how much time passed, which is not what a timer that had no turn tells.
    fn tick(&mut self, now: Moment) -> Vec<Ask> {
        let passed = now.since(self.ticked_at);
        let ticks = u32::try_from(passed.as_millis() / TICK.as_millis()).unwrap_or(u32::MAX);
        let mut asks = Vec::new();
        if ticks > TICKS_MAX {
            tracing::warn!(rank = %self.name, ?passed, "stood still: nothing from before counts");
            self.ticked_at = now;
            asks.extend(self.fold.fact(Event::Stalled));
        } else {
            self.ticked_at = now.before(passed.saturating_sub(TICK * ticks));
            (0..ticks).for_each(|_| asks.extend(self.fold.fact(Event::Tick)));
        }
        if self.lease.was_asked() {
            self.read_at = Some(now.steady);
        }
        if self.read_at.is_some_and(|at| now.steady.duration_since(at) < WANTED_FOR) {
            asks.extend(self.fold.fact(Event::Wanted));
        }
        asks
    }

    fn heard(&mut self, item: Item) -> Vec<Ask> {
        match item {
            Item::Connected { .. } => self.connections += 1,
            Item::Batch { .. } => self.last_event_at = Some(Instant::now()),
            Item::Bad { .. } | Item::Disconnected { .. } => {}
        }
        self.fold.item(item)
    }

    fn obey(&mut self, command: Command) -> Vec<Ask> {
        match command {
            Command::Fact { event, done } => {
                let asks = self.fold.fact(event);
                // Whoever asked may have gone; the fact stands.
                let _ = done.send(());
                asks
            }
            Command::Expect(marker) => {
                self.fold.expect(marker);
                Vec::new()
            }
            Command::Watch { tokens, done } => {
                self.fold.watch(tokens);
                let now = status_of(&self.fold, self.last_event_at, self.connections);
                self.status.send_replace(now);
                // Whoever asked may have gone; nothing depends on it.
                let _ = done.send(());
                Vec::new()
            }
        }
    }

    fn replayed(&mut self, step: Step) -> Vec<Ask> {
        match step {
            Step::Batch { session, seq, payload } => self.fold.replayed(session, seq, &payload),
            Step::End { session } => self.fold.fact(Event::ReplayEnd { session }),
            Step::Failed { session, error } => {
                tracing::warn!(rank = %self.name, %error, "a replay failed");
                self.fold.fact(Event::ReplayFailed { session })
            }
        }
    }

    fn carry_out(&mut self, asks: Vec<Ask>) {
        for ask in asks {
            match ask {
                Ask::Replay { session, from, attempt } => {
                    if let Some(endpoint) = &self.replay_at {
                        self.replay = Replaying::start(endpoint, session, from, attempt);
                    }
                }
                Ask::Reconnect => self.live.reconnect(),
                Ask::Tell(note) => self.tell(note),
            }
        }
        self.lease.renew(self.ticked_at, TICK * self.fold.lasts_for());
        let now = status_of(&self.fold, self.last_event_at, self.connections);
        let before = *self.status.borrow();
        self.status.send_if_modified(|status| std::mem::replace(status, now) != now);
        if let Some(notes) = self.sink.notes.as_ref().filter(|_| before.trust != now.trust) {
            notes.trust_changed(self.name.rank);
        }
    }

    fn tell(&self, note: Note) {
        if let Some(notes) = &self.sink.notes {
            notes.send(self.name.rank, note);
        }
        let rank = &self.name;
        match note {
            Note::Gap { lost } => tracing::warn!(%rank, lost, "events are missing"),
            Note::GapClosed => tracing::info!(%rank, "a replay brought the missing events"),
            Note::GapNotClosed => tracing::warn!(%rank, "events are lost, beliefs unknown"),
            Note::NewLife => tracing::warn!(%rank, "another life of the engine"),
            Note::ClearUnexplained { clears } => {
                tracing::warn!(%rank, clears, "somebody else cleared the cache");
            }
            Note::ClearAmbiguous { clears } => {
                tracing::info!(%rank, clears, "a clear that may be of an action of fak's own");
            }
            Note::ClearPast { clears } => {
                tracing::info!(%rank, clears, "clears of the time before fak listened");
            }
            Note::LiveDead => {
                tracing::warn!(%rank, "the live connection brings less than the engine publishes");
            }
            Note::Tied => tracing::debug!(%rank, "a marker came back on the live connection"),
            Note::Kept => tracing::info!(%rank, "the engine kept its cache: it counts again"),
            Note::Settled => tracing::debug!(%rank, "settled"),
        }
    }
}

impl Drop for Stream {
    /// Also where it is broken off: what nobody listens for any more is not believed.
    fn drop(&mut self) {
        self.sink.index.remove_rank(self.id);
    }
}

fn status_of(fold: &Fold, last_event_at: Option<Instant>, connections: u64) -> Status {
    Status {
        trust: fold.trust(),
        is_settled: fold.is_settled(),
        is_contested: fold.is_contested(),
        last_seq: fold.last_seq(),
        marker: fold.wanted_marker(),
        is_dead: fold.is_dead(),
        last_event_at,
        connections,
        tally: fold.tally(),
    }
}

type Asking = Pin<Box<dyn Future<Output = Result<Replay, replay::Error>> + Send>>;

/// The replay that runs, if one does.
enum Replaying {
    None,
    Asking { session: u64, asking: Asking },
    Reading { session: u64, replay: Box<Replay> },
}

/// What a replay brings.
enum Step {
    Batch { session: u64, seq: u64, payload: Bytes },
    End { session: u64 },
    Failed { session: u64, error: replay::Error },
}

impl Replaying {
    fn start(endpoint: &Endpoint, session: u64, from: u64, attempt: u8) -> Self {
        let endpoint = endpoint.clone();
        let pause = match attempt {
            0 => Duration::ZERO,
            n => REPLAY_RETRY_AFTER * 2u32.pow(u32::from(n.min(6)) - 1),
        };
        let quiet_max = REPLAY_QUIET * 2u32.pow(u32::from(attempt.min(3)));
        let asking = Box::pin(async move {
            sleep(pause).await;
            let limits = replay::Limits { quiet_max, ..replay::Limits::default() };
            Replay::ask(&endpoint, from, limits, REPLAY_WITHIN).await
        });
        Self::Asking { session, asking }
    }

    /// The next step; never, where none runs. Nothing is lost when the future is dropped.
    async fn next(&mut self) -> Step {
        loop {
            match self {
                Self::None => pending().await,
                Self::Asking { session, asking } => {
                    let session = *session;
                    match asking.await {
                        Ok(replay) => *self = Self::Reading { session, replay: Box::new(replay) },
                        Err(error) => return self.end(Step::Failed { session, error }),
                    }
                }
                Self::Reading { session, replay } => {
                    let session = *session;
                    return match replay.next().await {
                        Ok(Some(batch)) => {
                            Step::Batch { session, seq: batch.seq, payload: batch.payload }
                        }
                        Ok(None) => self.end(Step::End { session }),
                        Err(error) => self.end(Step::Failed { session, error }),
                    };
                }
            }
        }
    }

    fn end(&mut self, step: Step) -> Step {
        *self = Self::None;
        step
    }
}

#[cfg(test)]
mod tests {
    use fak_index::{HeldReason, Limits, Offload, Prompt};
    use tokio::time::advance;

    use super::super::ndjson::{self, Lines};
    use super::*;

    /// A stream that no task runs, on a clock that stands.
    struct Rig {
        stream: Stream,
        handle: Handle,
        index: Arc<Index>,
    }

    impl Rig {
        /// Tied, with a block of `[1, 2]`.
        async fn tied() -> Self {
            let index = Arc::new(Index::new(7, Limits::default()));
            let sink = Sink {
                index: Arc::clone(&index),
                options: RankOptions { offload: Offload::BY_BLOCK, ..RankOptions::default() },
                recorder: Arc::new(Recorder::new(0)),
                notes: None,
            };
            let live = Endpoint::parse("tcp://127.0.0.1:1", "").unwrap();
            let source = Source { rank: 0, live, replay: None, topic: String::new() };
            let (stream, handle) = Stream::new(&"w".into(), source, sink);
            let mut rig = Self { stream, handle, index };
            rig.hear(Item::Connected { epoch: 1 });
            rig.marked(0, [1, 2]).await;
            assert_eq!(rig.reason(), HeldReason::Warm);
            rig
        }

        fn hear(&mut self, item: Item) {
            let asks = self.stream.heard(item);
            self.stream.carry_out(asks);
        }

        /// A batch that stores `tokens`.
        async fn stored(&mut self, seq: u64, tokens: [u32; 2]) {
            let event = serde_json::json!({
                "type": "stored", "block_hashes": [seq], "parent_block_hash": null,
                "token_ids": tokens, "block_size": 2, "medium": "GPU", "extra_keys": [null],
            });
            let line = serde_json::json!({ "seq": seq, "events": [event] }).to_string() + "\n";
            let mut lines = Lines::new(line.as_bytes(), ndjson::Limits::default());
            while let Some(item) = lines.next().await {
                if matches!(item, Item::Batch { .. }) {
                    self.hear(item);
                }
            }
        }

        /// The same of the marker that is wanted.
        async fn marked(&mut self, seq: u64, tokens: [u32; 2]) {
            let id = self.marker().expect("a marker is wanted");
            let marker = Marker { id, tokens: tokens.to_vec() };
            let asks = self.stream.obey(Command::Expect(marker));
            self.stream.carry_out(asks);
            self.stored(seq, tokens).await;
        }

        /// The turn that the tick's timer gives.
        fn turn(&mut self) {
            self.turn_at(Moment::now());
        }

        fn turn_at(&mut self, now: Moment) {
            let asks = self.stream.tick(now);
            self.stream.carry_out(asks);
        }

        async fn turns(&mut self, turns: u32, after: Duration) {
            for _ in 0..turns {
                advance(after).await;
                self.turn();
            }
        }

        fn marker(&self) -> Option<u64> {
            self.handle.status().marker
        }

        fn reason(&self) -> HeldReason {
            let prompt = Prompt { tokens: &[1, 2, 3], lora: None, salt: None };
            self.index.held(self.handle.id(), &prompt).reason
        }
    }

    /// As in a process that was stopped: what its sockets hold may be as old as its beliefs.
    #[tokio::test(start_paused = true)]
    async fn no_belief_outlives_its_time_where_its_stream_has_no_turn() {
        let mut rig = Rig::tied().await;
        rig.turns(4, TICK).await;
        advance(TICK * 5 - Duration::from_millis(1)).await;
        assert_eq!(rig.reason(), HeldReason::Warm);
        advance(Duration::from_millis(1)).await;
        assert_eq!(rig.reason(), HeldReason::Suspended, "nobody but the clock says so");
        rig.turn();
        assert_eq!(rig.reason(), HeldReason::Warm, "late, and not too late");
        advance(TICK * 6).await;
        rig.stored(1, [5, 6]).await;
        assert_eq!(rig.reason(), HeldReason::Suspended, "it may have waited as long");
        rig.turn();
        assert_eq!((rig.reason(), rig.handle.status().trust), {
            (HeldReason::Suspended, Trust::Degraded)
        });
        rig.stored(2, [7, 8]).await;
        assert_eq!(rig.reason(), HeldReason::Suspended, "that, too");
        rig.marked(3, [9, 9]).await;
        assert_eq!(rig.reason(), HeldReason::Warm);
    }

    /// The steady clock may have stood still with the machine.
    #[tokio::test(start_paused = true)]
    async fn after_the_machine_was_suspended_nothing_from_before_counts() {
        let mut rig = Rig::tied().await;
        let now = Moment::now();
        rig.turn_at(Moment { calendar: now.calendar + Duration::from_secs(60), ..now });
        assert_eq!(rig.handle.status().trust, Trust::Degraded);
        rig.marked(1, [9, 9]).await;
        assert_eq!(rig.handle.status().trust, Trust::Exact);
    }

    #[tokio::test(start_paused = true)]
    async fn the_kernel_is_told_of_all_the_time_that_passed() {
        for (turns, after) in [(21, TICK), (7, TICK * 3), (42, TICK / 2)] {
            let mut rig = Rig::tied().await;
            rig.turns(turns - 1, after).await;
            assert_eq!(rig.handle.status().trust, Trust::Exact, "{after:?}");
            rig.turns(1, after).await;
            assert_eq!(rig.handle.status().trust, Trust::Degraded, "five seconds: {after:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn claims_are_wanted_for_a_minute_after_somebody_read() {
        let mut rig = Rig::tied().await;
        // What was read in the making.
        rig.turns(12, TICK).await;
        rig.marked(1, [3, 4]).await;
        rig.turns(240 - 12, TICK).await;
        rig.marked(2, [4, 4]).await;
        rig.turns(12, TICK).await;
        assert_eq!(rig.marker(), None, "nobody read for a minute");
        rig.reason();
        rig.turns(1, TICK).await;
        assert!(rig.marker().is_some());
    }
}
