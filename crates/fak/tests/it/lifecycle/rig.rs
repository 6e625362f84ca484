//! One simulated engine with its owner, ledger and beliefs.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use fak::engine::{Client, Control, Data, Endpoints, Engine, Outgoing, Seen, Timeouts};
use fak::events::discover;
use fak::events::recorder::Recorder;
use fak::fleet::{Door, Fleet, State, Worker};
use fak::lifecycle::{Config, Lifecycle, Request};
use fak::runtime::TaskGroup;
use fak::store::{Filter, Row, Store};
use fak_index::{Index, Limits, Prompt};
use fak_kernel::Tier;
use fak_kernel::rank::Trust;
use fak_kernel::witness::Move;
use fak_sim::{Binds, Connector, Sim, SimConfig};
use futures_util::future::join_all;

use super::front::Front;
use crate::owners;

pub(crate) struct Rig {
    pub(crate) sim: Sim,
    pub(crate) lifecycle: Lifecycle,
    fleet: Fleet,
    store: Store,
    index: Arc<Index>,
    engine: Engine,
    front: Option<Front>,
    tasks: TaskGroup,
}

struct Options {
    /// Patience for a control call.
    control: Duration,
    /// Whether the events can be asked for again.
    replays: bool,
    /// Whether `/collective_rpc` is open.
    reloads: bool,
    /// Whether the engine is behind an address that may be pointed to others.
    is_fronted: bool,
    /// Whether it is looked at all the time, and not only when a test says so.
    is_watched: bool,
}

impl Default for Options {
    fn default() -> Self {
        let control = Timeouts::default().control;
        Self { control, replays: true, reloads: false, is_fronted: false, is_watched: false }
    }
}

impl Rig {
    pub(crate) async fn start() -> Self {
        Self::with(SimConfig { connector: Connector::Offloading, ..SimConfig::default() }).await
    }

    /// As [`start`](Self::start), with little patience for control calls.
    pub(crate) async fn hurried() -> Self {
        let config = SimConfig { connector: Connector::Offloading, ..SimConfig::default() };
        let control = Duration::from_millis(200);
        Self::within(config, Options { control, ..Options::default() }).await
    }

    /// As [`start`](Self::start), with named event sockets, none of which replays.
    pub(crate) async fn without_replay() -> Self {
        let config = SimConfig { connector: Connector::Offloading, ..SimConfig::default() };
        Self::within(config, Options { replays: false, ..Options::default() }).await
    }

    /// As [`start`](Self::start), with leave to have the engine load its weights.
    pub(crate) async fn reloading() -> Self {
        let config = SimConfig { connector: Connector::Offloading, ..SimConfig::default() };
        Self::within(config, Options { reloads: true, ..Options::default() }).await
    }

    /// As [`start`](Self::start), and looked at all the time.
    pub(crate) async fn watched() -> Self {
        let config = SimConfig { connector: Connector::Offloading, ..SimConfig::default() };
        Self::within(config, Options { is_watched: true, ..Options::default() }).await
    }

    pub(crate) async fn with(config: SimConfig) -> Self {
        Self::within(config, Options::default()).await
    }

    /// With rank 0's event socket named, as on an engine that cannot tell where it publishes.
    pub(crate) async fn named(config: SimConfig) -> Self {
        Self::within(config, Options { replays: false, ..Options::default() }).await
    }

    /// Behind an address that may be pointed to another engine.
    pub(crate) async fn fronted(config: SimConfig) -> Self {
        Self::within(config, Options { is_fronted: true, ..Options::default() }).await
    }

    async fn within(config: SimConfig, options: Options) -> Self {
        let sim = Sim::start(config, Binds::default()).await.unwrap();
        let rig = Self::around(sim, options).await;
        rig.heard().await;
        rig
    }

    /// Over an engine that was looked at once, and may not be heard yet.
    pub(crate) async fn unheard(sim: Sim) -> Self {
        Self::around(sim, Options::default()).await
    }

    async fn around(sim: Sim, options: Options) -> Self {
        let Options { control, replays, reloads, is_fronted, is_watched } = options;
        let front = if is_fronted { Some(Front::before(&sim).await) } else { None };
        let url = front.as_ref().map_or_else(|| sim.base_url(), Front::url);
        let timeouts = Timeouts { control, ..Timeouts::default() };
        let endpoints = Endpoints::new(&url).unwrap();
        let endpoints = if reloads { endpoints.allowing_reload_weights() } else { endpoints };
        let engine = Engine::new(Client::new(None, timeouts).unwrap(), endpoints);
        let worker = Worker { id: "w".into(), engine: engine.clone(), door: Door::new() };
        let fleet = Fleet::new([worker]);
        let store = Store::open("sqlite::memory:").await.unwrap();
        let index = Arc::new(Index::new(7, Limits::default()));
        let mut events = BTreeMap::new();
        if !replays {
            let live = sim.kv_events_endpoint();
            let named = discover::named(&live, None, "", 1, "127.0.0.1").unwrap();
            events.insert("w".into(), named);
        }
        let recorder = Arc::new(Recorder::new(64));
        let mut config = Config { events, ..owners::config(&fleet, &store, &index, &recorder) };
        if is_watched {
            config.probe_every = Duration::from_millis(20);
        }
        let (lifecycle, tasks) = owners::run(&config);
        let rig = Self { sim, lifecycle, fleet, store, index, engine, front, tasks };
        rig.look().await;
        rig
    }

    /// Waits until no connection is left that was cut.
    pub(crate) async fn reconnects(&self) {
        let asked = || join_all((0..32).map(|_| self.engine.scrape()));
        while !asked().await.iter().all(Result::is_ok) {}
    }

    pub(crate) fn front(&self) -> &Front {
        self.front.as_ref().unwrap()
    }

    /// Waits until every rank's beliefs are exact.
    pub(crate) async fn heard(&self) {
        let exact = |s: &State| !s.ranks.is_empty() && s.trust() == Trust::Exact;
        let rank = self.lifecycle.ranks("w").await.unwrap().remove(0);
        let heard = rank.wait_for(|s| s.trust == Trust::Exact);
        tokio::time::timeout(Duration::from_secs(30), heard).await.unwrap().unwrap();
        self.look().await;
        assert!(exact(&self.state()));
    }

    pub(crate) fn worker(&self) -> Arc<Worker> {
        Arc::clone(&self.fleet.snapshot().get("w").unwrap().worker)
    }

    pub(crate) fn state(&self) -> Arc<State> {
        Arc::clone(&self.fleet.snapshot().get("w").unwrap().state)
    }

    pub(crate) async fn look(&self) {
        self.lifecycle.look("w").await.unwrap();
    }

    pub(crate) async fn act(&self, mv: Move) -> Row {
        self.lifecycle.act("w", Request::new(mv)).await.unwrap()
    }

    pub(crate) async fn rows(&self) -> Vec<Row> {
        self.store.rows(&Filter::default()).await.unwrap()
    }

    pub(crate) async fn last_row(&self) -> Row {
        self.store.last_row("w").await.unwrap().unwrap()
    }

    pub(crate) async fn ask(&self, prompt: &[u32]) {
        let body = serde_json::json!({"model": "tiny", "prompt": prompt, "max_tokens": 1});
        let to = self.engine.endpoints().data(Data::Completions);
        let request = Outgoing::to(to).json(body.to_string().into());
        let answer = self.engine.client().send(request, Timeouts::default().unary).await.unwrap();
        assert_eq!(answer.status, 200);
    }

    /// Sends a prompt, and waits until what the engine's gpu holds of it is claimed.
    pub(crate) async fn warm(&self, prompt: &[u32]) {
        self.ask(prompt).await;
        let held = self.sim.holds(prompt, None).gpu;
        assert!(held > 0);
        let rank = self.lifecycle.ranks("w").await.unwrap().remove(0);
        let claimed = rank.wait_for(|_| self.claim_on(prompt, Tier::Gpu) == held);
        tokio::time::timeout(Duration::from_secs(10), claimed).await.unwrap().unwrap();
    }

    pub(crate) fn claim(&self, prompt: &[u32]) -> usize {
        Tier::ALL.iter().map(|t| self.claim_on(prompt, *t)).sum()
    }

    pub(crate) fn claim_on(&self, prompt: &[u32], tier: Tier) -> usize {
        let rank = self.state().ranks[0].id;
        let prompt = Prompt { tokens: prompt, lora: None, salt: None };
        self.index.held(rank, &prompt).blocks.get(tier) as usize
    }

    /// fak ends, and nobody looks at the engine.
    pub(crate) async fn fak_ends(&mut self) {
        let tasks = std::mem::replace(&mut self.tasks, TaskGroup::new());
        assert_eq!(tasks.stop(Duration::from_secs(10)).await, 0, "they end by themselves");
    }

    /// fak is killed in the middle of a wake, once the engine is awake.
    pub(crate) async fn fak_dies_in(&mut self, wake: Move) {
        let lifecycle = self.lifecycle.clone();
        let acting = tokio::spawn(async move { lifecycle.act("w", Request::new(wake)).await });
        let is_awake = async {
            while self.engine.observe().await.is_sleeping != Seen::Value(false) {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(10), is_awake).await.unwrap();
        std::mem::replace(&mut self.tasks, TaskGroup::new()).stop(Duration::ZERO).await;
        assert!(acting.await.unwrap().is_err(), "nobody is left to answer");
    }

    /// Another fak on the same ledger and engine, as after a restart.
    pub(crate) async fn second_fak(&self) -> Second {
        self.fak_on(&self.store).await
    }

    /// Another fak on the same engine.
    pub(crate) async fn fak_on(&self, store: &Store) -> Second {
        let worker = Worker { id: "w".into(), engine: self.engine.clone(), door: Door::new() };
        let fleet = Fleet::new([worker]);
        let index = Arc::new(Index::new(8, Limits::default()));
        let recorder = Arc::new(Recorder::new(64));
        let (lifecycle, tasks) = owners::run(&owners::config(&fleet, store, &index, &recorder));
        lifecycle.look("w").await.unwrap();
        Second { fleet, lifecycle, _tasks: tasks }
    }

    /// Asks in the background; the status of the answer.
    pub(crate) fn asks(&self, prompt: &[u32], tokens: u32) -> tokio::task::JoinHandle<u16> {
        let body = serde_json::json!({"model": "tiny", "prompt": prompt, "max_tokens": tokens});
        let to = self.engine.endpoints().data(Data::Completions);
        let request = Outgoing::to(to).json(body.to_string().into());
        let client = self.engine.client().clone();
        tokio::spawn(async move {
            client.send(request, Timeouts::default().unary).await.unwrap().status.as_u16()
        })
    }

    /// Waits until the engine shows that so many run.
    pub(crate) async fn has_running(&self, count: u32) {
        let shows = async {
            loop {
                let scraped = self.engine.scrape().await.unwrap();
                if scraped.total().running == Some(f64::from(count)) {
                    return;
                }
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(10), shows).await.unwrap();
    }

    /// The engine's owner loads the checkpoint's weights, behind fak's back.
    pub(crate) async fn reload_behind(&self) {
        let endpoints = Endpoints::new(&self.sim.base_url()).unwrap().allowing_reload_weights();
        let engine = Engine::new(self.engine.client().clone(), endpoints);
        assert_eq!(engine.ask(&Control::ReloadWeights).await.status(), Some(200));
    }

    /// The engine's owner names the version of its weights.
    pub(crate) async fn name_version(&self, version: &str) {
        let body = serde_json::json!({ "new_version": version }).to_string();
        self.send("/update_weight_version", &body).await;
    }

    /// Somebody else's call, behind fak's back.
    pub(crate) async fn post(&self, path: &str) {
        self.send(path, "").await;
    }

    pub(crate) async fn send(&self, path: &str, body: &str) {
        let url = format!("{}{path}", self.sim.base_url());
        let (host, path) = url.strip_prefix("http://").unwrap().split_once('/').unwrap();
        use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
        let mut stream = tokio::net::TcpStream::connect(host).await.unwrap();
        let (kind, length) = ("content-type: application/json", body.len());
        let head = format!(
            "POST /{path} HTTP/1.1\r\nhost: x\r\n{kind}\r\ncontent-length: {length}\r\n\
             connection: close\r\n\r\n{body}"
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    }
}

/// Another fak.
pub(crate) struct Second {
    fleet: Fleet,
    pub(crate) lifecycle: Lifecycle,
    _tasks: TaskGroup,
}

impl Second {
    pub(crate) async fn act(&self, mv: Move) -> Row {
        self.lifecycle.act("w", Request::new(mv)).await.unwrap()
    }

    pub(crate) fn state(&self) -> Arc<State> {
        Arc::clone(&self.fleet.snapshot().get("w").unwrap().state)
    }
}

/// Owners of `fleet`'s workers.
pub(crate) fn prompt(label: u32) -> Vec<u32> {
    (0..100).map(|n| 300 + label * 100 + n).collect()
}
