//! A rank's beliefs against a simulated engine that knows the truth: what is claimed is what an
//! identical request would hit.

use std::sync::Arc;

use fak::engine::{Client, Control, Data, Endpoints, Engine, Mode, Outgoing, SleepLevel, Timeouts};
use fak::events::discover::{self, Source};
use fak::events::fold::Marker;
use fak::events::recorder::Recorder;
use fak::events::stream::{Handle, Sink, Status, Stream};
use fak::lifecycle::{Offer, serve_markers};
use fak::runtime::{OnExit, TaskGroup};
use fak_index::{HeldReason, Index, Limits, Offload, Prompt, RankOptions};
use fak_kernel::rank::{Event, Trust};
use fak_kernel::vocab::PerTier;
use fak_kernel::{Belief, Disposition, Tier, TierSet};
use fak_sim::{Binds, Connector, Sim, SimConfig};
use tokio::sync::watch;

use super::peers::{Relay, endpoint};

struct Rig {
    sim: Sim,
    engine: Engine,
    index: Arc<Index>,
    rank: Handle,
    /// How the rank's markers are sent.
    offer: watch::Sender<Option<Offer>>,
    _tasks: TaskGroup,
}

impl Rig {
    async fn start(connector: Connector, replay: bool) -> Self {
        let rig = Self::behind(connector, |source| source.replay.take_if(|_| !replay)).await;
        rig.rank.wait_for(|s| s.trust == Trust::Exact).await.unwrap();
        rig
    }

    /// One whose stream is followed where `change` says.
    async fn behind<T>(connector: Connector, change: impl FnOnce(&mut Source) -> T) -> Self {
        let config = SimConfig { connector, ..SimConfig::default() };
        let sim = Sim::start(config, Binds::default()).await.unwrap();
        let endpoints = Endpoints::new(&sim.base_url()).unwrap();
        let engine = Engine::new(Client::new(None, Timeouts::default()).unwrap(), endpoints);
        let index = Arc::new(Index::new(7, Limits::default()));
        let sink = Sink {
            index: Arc::clone(&index),
            options: RankOptions { offload: Offload::BY_BLOCK, ..RankOptions::default() },
            recorder: Arc::new(Recorder::new(64)),
            notes: None,
        };
        let sources = engine.control(Control::KvEventSources).await.answered.body().to_string();
        let found = discover::from_answer(sources.as_bytes(), "127.0.0.1").unwrap();
        let mut source = found.sources.into_iter().next().unwrap();
        change(&mut source);
        let (stream, rank) = Stream::new(&Arc::from("w"), source, sink);
        let mut tasks = TaskGroup::new();
        let stop = tasks.shutdown();
        tasks.spawn("stream", OnExit::Report, stream.run(stop));
        let offer = Offer::new(engine.clone(), "tiny".into(), Some(32));
        let offer = watch::Sender::new(Some(offer));
        let markers = serve_markers(rank.clone(), offer.subscribe());
        tasks.spawn("markers", OnExit::Report, markers);
        Self { sim, engine, index, rank, offer, _tasks: tasks }
    }

    async fn ask(&self, prompt: &[u32]) {
        let body = serde_json::json!({"model": "tiny", "prompt": prompt, "max_tokens": 1});
        let to = self.engine.endpoints().data(Data::Completions);
        let request = Outgoing::to(to).json(body.to_string().into());
        let answer = self.engine.client().send(request, Timeouts::default().unary).await.unwrap();
        assert_eq!(answer.status, 200);
    }

    /// Sends a prompt through the engine, and waits until what the engine holds of it is claimed.
    async fn warm(&self, prompt: &[u32]) {
        self.ask(prompt).await;
        let truth = self.truth(prompt);
        assert!(truth.0 > 0);
        self.rank.wait_for(|_| self.claim(prompt) == truth).await.unwrap();
    }

    /// Blocks claimed on the gpu, and on the cpu beyond them.
    fn claim(&self, prompt: &[u32]) -> (usize, usize) {
        let prompt = Prompt { tokens: prompt, lora: None, salt: None };
        let held = self.index.held(self.rank.id(), &prompt).blocks;
        (held.gpu as usize, held.cpu as usize)
    }

    fn truth(&self, prompt: &[u32]) -> (usize, usize) {
        let holds = self.sim.holds(prompt, None);
        (holds.gpu, holds.cpu.saturating_sub(holds.gpu))
    }

    /// What a lifecycle does around a call: cold before it, the verdict after it.
    async fn act(&self, call: Control, kv: PerTier<Disposition>) {
        let intent = Event::Intent { tiers: kv.demoted(), clear: Some(kv) };
        self.rank.tell(intent).await.unwrap();
        assert_eq!(self.engine.control(call).await.answered.status(), Some(200));
        self.rank.tell(Event::Outcome { kv, clears: true }).await.unwrap();
    }
}

fn prompt(label: u32) -> Vec<u32> {
    (0..100).map(|n| 300 + label * 100 + n).collect()
}

fn forgotten() -> PerTier<Disposition> {
    PerTier::all(Disposition::Forgotten)
}

fn local() -> PerTier<Disposition> {
    PerTier { gpu: Disposition::Forgotten, ..PerTier::all(Disposition::Preserved) }
}

fn sleep() -> Control {
    Control::Sleep {
        level: SleepLevel::WeightsOffloaded,
        mode: Mode::Abort,
        keep_connector_cache: false,
    }
}

fn reset() -> Control {
    Control::ResetPrefixCache { external: false, running_requests: false }
}

#[tokio::test]
async fn what_the_engine_stores_is_claimed_block_for_block() {
    let rig = Rig::start(Connector::None, true).await;
    assert_eq!(rig.claim(&prompt(1)), (0, 0));
    rig.warm(&prompt(1)).await;
    assert_eq!(rig.claim(&prompt(1)), (3, 0));
    assert_eq!(rig.claim(&prompt(2)), (0, 0));
}

/// It may hold what it stored before its buffer begins, and a replay of all that it has proves
/// nothing of that.
#[tokio::test]
async fn of_an_engine_that_was_there_before_nothing_is_known_to_be_gone() {
    for replay in [true, false] {
        let rig = Rig::start(Connector::None, replay).await;
        let tokens = prompt(1);
        let keys = rig.index.chain(&Prompt { tokens: &tokens, lora: None, salt: None }, 32);
        assert_eq!(rig.index.belief(rig.rank.id(), Tier::Gpu, keys[0]), Belief::Unknown);
    }
}

#[tokio::test]
async fn a_sleep_is_cold_at_once_and_only_fresh_stores_warm_again() {
    let rig = Rig::start(Connector::Offloading, true).await;
    rig.warm(&prompt(1)).await;
    rig.act(sleep(), forgotten()).await;
    assert_eq!(rig.claim(&prompt(1)), (0, 0));
    rig.rank.wait_for(|s| s.is_settled).await.unwrap();
    rig.engine.control(Control::WakeUp { tags: Vec::new() }).await;
    assert_eq!(rig.claim(&prompt(1)), (0, 0));
    // The clear of the sleep comes with this request's stores, in one batch.
    rig.warm(&prompt(1)).await;
}

#[tokio::test]
async fn a_reset_of_the_gpu_leaves_the_cpu_tier_claimed() {
    let rig = Rig::start(Connector::Offloading, true).await;
    rig.warm(&prompt(1)).await;
    // One more step, so that the connector's stores are out too.
    rig.ask(&prompt(2)).await;
    rig.act(reset(), local()).await;
    rig.rank.wait_for(|_| rig.claim(&prompt(1)) == (0, 3)).await.unwrap();
    assert_eq!(rig.truth(&prompt(1)), (0, 3));
}

#[tokio::test]
async fn a_reset_behind_faks_back_is_known_with_its_clear() {
    let rig = Rig::start(Connector::None, true).await;
    rig.warm(&prompt(1)).await;
    rig.engine.control(reset()).await;
    rig.ask(&prompt(2)).await;
    rig.rank.wait_for(|_| rig.claim(&prompt(1)) == (0, 0)).await.unwrap();
}

#[tokio::test]
async fn a_restart_forgets_everything_with_and_without_replay() {
    for replay in [true, false] {
        let mut rig = Rig::start(Connector::None, replay).await;
        rig.warm(&prompt(1)).await;
        rig.sim.restart().await.unwrap();
        rig.rank.wait_for(|_| rig.claim(&prompt(1)) == (0, 0)).await.unwrap();
        rig.rank.wait_for(|s| s.trust == Trust::Exact).await.unwrap();
        assert_eq!(rig.claim(&prompt(1)), (0, 0));
        rig.warm(&prompt(3)).await;
    }
}

#[tokio::test]
async fn lost_batches_are_brought_back_by_replay() {
    let rig = Rig::start(Connector::None, true).await;
    rig.warm(&prompt(1)).await;
    rig.sim.faults().drop_batches(1);
    rig.ask(&prompt(2)).await;
    rig.warm(&prompt(3)).await;
    assert_eq!(rig.claim(&prompt(2)), rig.truth(&prompt(2)));
    assert_eq!(rig.claim(&prompt(1)), rig.truth(&prompt(1)));
}

#[tokio::test]
async fn lost_batches_without_replay_leave_nothing_claimed_that_came_before() {
    let rig = Rig::start(Connector::None, false).await;
    rig.warm(&prompt(1)).await;
    rig.sim.faults().drop_batches(1);
    rig.ask(&prompt(2)).await;
    rig.warm(&prompt(3)).await;
    assert_eq!((rig.claim(&prompt(1)), rig.claim(&prompt(2))), ((0, 0), (0, 0)));
}

#[tokio::test]
async fn without_replay_a_marker_shows_that_the_action_is_behind() {
    let rig = Rig::start(Connector::None, false).await;
    rig.warm(&prompt(1)).await;
    rig.offer.send_replace(None);
    rig.act(reset(), local()).await;
    let status = rig.rank.wait_for(|s| s.marker.is_some()).await.unwrap();
    rig.ask(&prompt(1)).await;
    assert_eq!(
        rig.claim(&prompt(1)),
        (0, 0),
        "its store may be older than the reset, for all that is known"
    );
    let tokens: Vec<u32> = (0..33).map(|n| 200 + n).collect();
    let id = status.marker.unwrap();
    rig.rank.expect(Marker { id, tokens: tokens[..32].to_vec() }).await.unwrap();
    rig.ask(&tokens).await;
    rig.rank.wait_for(|s| s.is_settled).await.unwrap();
    rig.warm(&prompt(2)).await;
}

#[tokio::test]
async fn a_batch_that_the_publisher_held_since_before_the_action_warms_nothing() {
    let rig = Rig::start(Connector::None, true).await;
    rig.warm(&prompt(1)).await;
    rig.sim.faults().hold_publisher(true);
    rig.ask(&prompt(2)).await;
    rig.rank.tell(Event::Intent { tiers: TierSet::ALL, clear: Some(local()) }).await.unwrap();
    rig.engine.control(reset()).await;
    rig.rank.tell(Event::Outcome { kv: local(), clears: true }).await.unwrap();
    rig.sim.faults().hold_publisher(false);
    rig.rank.wait_for(|s| s.is_settled).await.unwrap();
    assert_eq!((rig.claim(&prompt(1)), rig.claim(&prompt(2))), ((0, 0), (0, 0)));
    rig.warm(&prompt(3)).await;
}

/// Whoever hears no more events believes nothing: a stream that breaks off, as by a panic, leaves
/// no warm blocks behind.
#[tokio::test]
async fn nothing_is_believed_of_a_rank_whose_stream_was_broken_off() {
    let Rig { sim, engine, index, rank, offer, _tasks: tasks } =
        Rig::start(Connector::None, true).await;
    let rig = Rig { sim, engine, index, rank, offer, _tasks: TaskGroup::new() };
    let prompt: Vec<u32> = (0..100).collect();
    rig.ask(&prompt).await;
    rig.warm(&prompt).await;
    drop(tasks);
    rig.rank.wait_for(|_| false).await.unwrap_err();
    let prompt = Prompt { tokens: &prompt, lora: None, salt: None };
    assert_eq!(rig.index.held(rig.rank.id(), &prompt).reason, HeldReason::NoRank);
}

/// F1: a relay that takes bytes, forwards none and closes nothing.
#[tokio::test]
async fn a_live_socket_that_brings_nothing_any_more_is_believed_for_no_second() {
    let mut relay = None;
    let rig = Rig::behind(Connector::None, |source| {
        let (to, here) = Relay::bind(source.live.port);
        source.live = endpoint(here);
        relay = Some(to);
    })
    .await;
    let relay = relay.unwrap().run();
    rig.rank.wait_for(|s| s.trust == Trust::Exact).await.unwrap();
    rig.warm(&prompt(1)).await;
    let connections = relay.connections();
    relay.stall();
    // Somebody else resets the cache, and the engine's next step tells of it.
    rig.engine.control(reset()).await;
    rig.ask(&prompt(2)).await;
    let stalled = std::time::Instant::now();
    rig.rank.wait_for(|_| rig.claim(&prompt(1)) == (0, 0)).await.unwrap();
    assert!(stalled.elapsed() < std::time::Duration::from_millis(1500), "{:?}", stalled.elapsed());
    // The connection owes what the replay brought. Another one is made, and shown to be sound.
    let is_back = |status: &Status| {
        let claim = rig.claim(&prompt(2));
        assert!(!status.is_dead || claim == (0, 0), "{claim:?} is claimed of a dead stream");
        status.trust == Trust::Exact && relay.connections() > connections
    };
    rig.rank.wait_for(is_back).await.unwrap();
    assert_eq!(rig.claim(&prompt(2)), rig.truth(&prompt(2)));
    assert_eq!(rig.claim(&prompt(1)), rig.truth(&prompt(1)));
}

/// The same before an engine that replays nothing: no later batch shows what is missing.
#[tokio::test]
async fn without_replay_a_live_socket_that_brings_nothing_any_more_is_not_believed_for_long() {
    let mut relay = None;
    let rig = Rig::behind(Connector::None, |source| {
        let (to, here) = Relay::bind(source.live.port);
        (source.live, source.replay) = (endpoint(here), None);
        relay = Some(to);
    })
    .await;
    let relay = relay.unwrap().run();
    rig.rank.wait_for(|s| s.trust == Trust::Exact).await.unwrap();
    rig.warm(&prompt(1)).await;
    let connections = relay.connections();
    relay.stall();
    rig.engine.control(reset()).await;
    rig.ask(&prompt(2)).await;
    for _ in 0..21 {
        rig.rank.tell(Event::Tick).await.unwrap();
    }
    // Who reads has a marker sent, and since that does not come back, another connection is made.
    assert_eq!((rig.claim(&prompt(1)), rig.truth(&prompt(1))), ((0, 0), (0, 0)));
    let is_back = |s: &Status| s.trust == Trust::Exact && relay.connections() > connections;
    rig.rank.wait_for(is_back).await.unwrap();
    assert_eq!(rig.claim(&prompt(1)), (0, 0));
    rig.warm(&prompt(3)).await;
}

/// F1: by replay alone nothing is exact.
#[tokio::test]
async fn a_topic_that_nobody_publishes_is_never_exact() {
    let rig = Rig::behind(Connector::None, |source| source.topic = "elsewhere".to_owned()).await;
    rig.ask(&prompt(1)).await;
    let mut seen = Vec::new();
    rig.rank
        .wait_for(|status| {
            seen.push((status.trust, rig.claim(&prompt(1))));
            status.is_dead
        })
        .await
        .unwrap();
    assert!(
        seen.iter().all(|(trust, claim)| *trust != Trust::Exact && *claim == (0, 0)),
        "{seen:?}"
    );
}

/// A batch that live lost and no later one shows is asked for on a hint.
#[tokio::test]
async fn a_lost_last_batch_is_brought_by_a_hint() {
    let rig = Rig::start(Connector::None, true).await;
    rig.sim.faults().drop_batches(1);
    rig.ask(&prompt(1)).await;
    let asked = std::time::Instant::now();
    rig.rank.catch_up();
    rig.rank.wait_for(|_| rig.claim(&prompt(1)) == rig.truth(&prompt(1))).await.unwrap();
    assert!(asked.elapsed() < std::time::Duration::from_millis(700), "{:?}", asked.elapsed());
}

/// F47: what a declined reset left is claimed again.
#[tokio::test]
async fn a_declined_reset_leaves_what_the_engine_kept_claimed() {
    for replay in [true, false] {
        let rig = Rig::start(Connector::None, replay).await;
        rig.warm(&prompt(1)).await;
        let intent = Event::Intent { tiers: TierSet::GPU, clear: Some(local()) };
        rig.rank.tell(intent).await.unwrap();
        assert_eq!(rig.claim(&prompt(1)), (0, 0), "not before it is known");
        rig.rank.tell(Event::Declined { kept: TierSet::GPU }).await.unwrap();
        rig.rank.wait_for(|s| s.trust == Trust::Exact).await.unwrap();
        assert_eq!(rig.claim(&prompt(1)), (3, 0));
        // The same word of an engine that cleared all the same.
        rig.rank.tell(Event::Intent { tiers: TierSet::GPU, clear: Some(local()) }).await.unwrap();
        rig.engine.control(reset()).await;
        rig.rank.tell(Event::Declined { kept: TierSet::GPU }).await.unwrap();
        rig.rank.wait_for(|s| s.trust == Trust::Exact).await.unwrap();
        assert_eq!(rig.claim(&prompt(1)), (0, 0));
    }
}

/// F45: without a single request of a client's.
#[tokio::test]
async fn a_stream_is_exact_by_faks_own_marker_alone() {
    for replay in [true, false] {
        let rig = Rig::start(Connector::None, replay).await;
        assert!(rig.rank.status().last_event_age().is_some());
        assert_eq!(rig.claim(&prompt(1)), (0, 0));
        rig.warm(&prompt(1)).await;
    }
}
