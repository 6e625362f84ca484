//! A whole simulated server: its configuration, its sockets, its lives.
//! Invariant: a restart keeps the addresses and nothing else of the process: numbers start at 0,
//! caches are empty, counters are zero; only a shared store keeps its content.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, AtomicUsize};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use tokio::net::{TcpListener, TcpSocket};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use zeromq::{PubSocket, RouterSocket, Socket};

use crate::core::connector::Connector;
use crate::core::hash::{Identity, Lora};
use crate::core::request::Reused;
use crate::core::stats::Counters;
use crate::core::tier::Tier;
use crate::core::{Config, Engine, Holds, model};
use crate::encode::Encoding;
use crate::faults::Faults;
use crate::life::Life;
use crate::profile::Profile;
use crate::publisher::{Publisher, QUEUE_MAX};
use crate::rank::{Rank, Steps};
use crate::{http, tokenizer};

/// A simulated server's configuration.
#[derive(Clone, Debug)]
pub struct SimConfig {
    /// Served model name.
    pub model: String,
    /// Further names of the model (`--served-model-name`); answers give the first name.
    pub also_named: Vec<String>,
    /// Adapters, served under their own names; ids are 1-based. One that is named as the type of a
    /// chat's content parts, such as `text` or `image`, is applied to these chats (vLLM 0.32.0,
    /// `--default-mm-loras`).
    pub loras: Vec<String>,
    /// Tokens a block.
    pub block_size: usize,
    /// Device blocks a rank, the unusable null block included.
    pub gpu_blocks: u32,
    /// Host tier blocks a rank.
    pub cpu_blocks: usize,
    /// Blocks that the host tier keeps as one (`blocks_per_chunk`); more than 1 with the offloading
    /// connector alone.
    pub blocks_per_chunk: usize,
    /// Host-tier events tell of tokens and parents (`self_describing_kv_events`).
    pub self_describing_events: bool,
    /// Drafts with EAGLE or MTP: the last block of every hit is computed again. Only without a
    /// connector and a sliding window.
    pub is_speculative: bool,
    /// Sliding window of a second KV cache group, in tokens; only without a connector.
    pub sliding_window: Option<usize>,
    /// Engine version.
    pub profile: Profile,
    /// KV connector.
    pub connector: Connector,
    /// Tokens a request may reach.
    pub max_model_len: usize,
    /// Data-parallel ranks; each has its own events, on consecutive ports unless these are 0.
    pub dp_ranks: u32,
    /// Time of a step; zero: as fast as possible.
    pub decode_step: Duration,
    /// Usage tells cached tokens (`--enable-prompt-tokens-details`).
    pub enable_prompt_tokens_details: bool,
    /// Control routes exist (`VLLM_SERVER_DEV_MODE=1`).
    pub dev_mode: bool,
    /// Key for the guarded paths.
    pub api_key: Option<String>,
    /// Topic of published batches.
    pub topic: String,
    /// Hashes as 32 bytes instead of integers.
    pub byte_hashes: bool,
    /// Seeds ids and the first weights. Equal seeds give equal outputs.
    pub seed: u64,
    /// What a process calls its weights when it starts (`--weight-version`).
    pub weight_version: String,
}

impl SimConfig {
    /// The model's names, the one that answers give first.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        std::iter::once(&self.model).chain(&self.also_named).map(String::as_str)
    }
}

impl Default for SimConfig {
    /// As the rig serves: model `tiny`, blocks of 32, 4,096 tokens.
    fn default() -> Self {
        Self {
            model: "tiny".to_owned(),
            also_named: Vec::new(),
            loras: Vec::new(),
            block_size: 32,
            gpu_blocks: 4096,
            cpu_blocks: 8192,
            blocks_per_chunk: 1,
            self_describing_events: false,
            is_speculative: false,
            sliding_window: None,
            profile: Profile::default(),
            connector: Connector::default(),
            max_model_len: 4096,
            dp_ranks: 1,
            decode_step: Duration::ZERO,
            enable_prompt_tokens_details: true,
            dev_mode: true,
            api_key: None,
            topic: "kv@tiny".to_owned(),
            byte_hashes: false,
            seed: 0,
            weight_version: "default".to_owned(),
        }
    }
}

/// Where a server listens; port 0 takes a free one.
#[derive(Clone, Copy, Debug)]
pub struct Binds {
    /// HTTP.
    pub http: SocketAddr,
    /// KV events of rank 0.
    pub kv_events: SocketAddr,
    /// Replay of rank 0.
    pub replay: SocketAddr,
}

impl Default for Binds {
    /// Free ports of the loopback interface.
    fn default() -> Self {
        let free = SocketAddr::from(([127, 0, 0, 1], 0));
        Self { http: free, kv_events: free, replay: free }
    }
}

/// Why a server did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The configuration makes no sense.
    #[error("bad configuration: {0}")]
    Config(&'static str),
    /// The HTTP address could not be bound.
    #[error("cannot listen on {address}")]
    Http {
        /// Address asked for.
        address: SocketAddr,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// An event socket could not be bound.
    #[error("cannot bind the event socket {endpoint}")]
    Events {
        /// Endpoint asked for.
        endpoint: String,
        /// Why.
        #[source]
        source: zeromq::ZmqError,
    },
}

/// A running simulated server. Dropping it ends it, though without waiting.
pub struct Sim {
    config: SimConfig,
    addresses: Addresses,
    faults: Arc<Faults>,
    checkpoint: u64,
    life: Arc<Life>,
    tasks: JoinSet<()>,
    /// Events and replay of each rank, held over restarts: a port that is free for a moment may be
    /// anybody's by the next, and a socket of the ended life closes only some time later.
    listeners: Vec<(Listener, Listener)>,
}

/// Resolved addresses, kept over restarts.
#[derive(Clone, Debug)]
struct Addresses {
    http: SocketAddr,
    /// Events and replay of each rank.
    ranks: Vec<(SocketAddr, SocketAddr)>,
}

impl std::fmt::Debug for Sim {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sim").field("addresses", &self.addresses).finish_non_exhaustive()
    }
}

impl Sim {
    /// Starts a server. It serves when this returns.
    ///
    /// # Errors
    ///
    /// The configuration makes no sense, or an address cannot be bound.
    pub async fn start(config: SimConfig, binds: Binds) -> Result<Self, StartError> {
        check(&config)?;
        let ranks = (0..config.dp_ranks.max(1))
            .map(|rank| (offset_port(binds.kv_events, rank), offset_port(binds.replay, rank)));
        let listeners: Vec<_> = ranks
            .map(|(events, replay)| Ok((listen_for_events(events)?, listen_for_events(replay)?)))
            .collect::<Result<_, StartError>>()?;
        let resolved = listeners.iter().map(|(events, replay)| (events.address, replay.address));
        let addresses = Addresses { http: binds.http, ranks: resolved.collect() };
        let checkpoint = model::mix(config.seed);
        let faults = Arc::new(Faults::default());
        let nothing = Inherited { listeners: &listeners, checkpoint, stores: Vec::new() };
        let (http, life, tasks) = begin(&config, &addresses, &faults, nothing).await?;
        let addresses = Addresses { http, ..addresses };
        Ok(Self { config, addresses, faults, checkpoint, life, tasks, listeners })
    }

    /// `http://host:port`, without `/v1`.
    #[must_use]
    pub fn base_url(&self) -> String {
        format!("http://{}", self.addresses.http)
    }

    /// `tcp://host:port` of a rank's events.
    #[must_use]
    pub fn kv_events_endpoint_of(&self, rank: usize) -> Option<String> {
        self.addresses.ranks.get(rank).map(|(events, _)| format!("tcp://{events}"))
    }

    /// `tcp://host:port` of a rank's replay.
    #[must_use]
    pub fn replay_endpoint_of(&self, rank: usize) -> Option<String> {
        self.addresses.ranks.get(rank).map(|(_, replay)| format!("tcp://{replay}"))
    }

    /// `tcp://host:port` of rank 0's events.
    #[must_use]
    pub fn kv_events_endpoint(&self) -> String {
        format!("tcp://{}", self.addresses.ranks[0].0)
    }

    /// `tcp://host:port` of rank 0's replay.
    #[must_use]
    pub fn replay_endpoint(&self) -> String {
        format!("tcp://{}", self.addresses.ranks[0].1)
    }

    /// The script of faults.
    #[must_use]
    pub fn faults(&self) -> Arc<Faults> {
        Arc::clone(&self.faults)
    }

    /// Ends this life of the process and begins the next one on the same addresses.
    ///
    /// # Errors
    ///
    /// An address could not be bound again.
    pub async fn restart(&mut self) -> Result<(), StartError> {
        let stores = self.end().await;
        let (listeners, checkpoint) = (&self.listeners, self.checkpoint);
        let inherited = Inherited { listeners, checkpoint, stores };
        (_, self.life, self.tasks) =
            begin(&self.config, &self.addresses, &self.faults, inherited).await?;
        Ok(())
    }

    /// Ends the server and waits until its sockets are closed.
    pub async fn stop(mut self) {
        self.end().await;
    }

    async fn end(&mut self) -> Vec<Option<Tier>> {
        self.life.stop.cancel();
        self.tasks.shutdown().await;
        self.life.ranks.iter().map(|rank| rank.take_remote()).collect()
    }

    /// Kills the engine under its front end: requests fail, `/health` says 503.
    pub fn kill_engine(&self) {
        self.life.ranks.iter().for_each(|rank| rank.die());
    }

    /// Ends the engine as SIGTERM does by default: it stops at once and `/health` says 503 on
    /// connections that are open, no new one is taken, and streams stay open and silent.
    pub fn terminate(&self) {
        self.life.closing.cancel();
        self.life.ranks.iter().for_each(|rank| rank.fall_silent());
    }

    /// What an identical request of a rank would find cached right now.
    #[must_use]
    pub fn holds_of(&self, rank: usize, prompt: &[u32], identity: &Identity) -> Holds {
        let rank = self.life.ranks.get(rank);
        rank.map_or_else(Holds::default, |rank| rank.lock().engine.holds(prompt, identity))
    }

    /// What an identical request of rank 0 would find cached right now.
    #[must_use]
    pub fn holds(&self, prompt: &[u32], salt: Option<&str>) -> Holds {
        let identity = Identity { salt: salt.map(str::to_owned), lora: None };
        self.holds_of(0, prompt, &identity)
    }

    /// What a request of this life took from caches, by the id that `/abort_requests` would take.
    #[must_use]
    pub fn reused(&self, external_id: &str) -> Option<Reused> {
        self.life.ranks.iter().find_map(|rank| rank.lock().engine.reused(external_id))
    }

    /// The salt of such a request.
    #[must_use]
    pub fn salt(&self, external_id: &str) -> Option<Option<String>> {
        self.life.ranks.iter().find_map(|rank| rank.lock().engine.salt(external_id))
    }

    /// Salt and adapter of a request, by the names that the request would use.
    #[must_use]
    pub fn identity(&self, model: &str, salt: Option<&str>) -> Identity {
        let index = self.config.loras.iter().position(|name| name == model);
        let lora = index.and_then(|index| {
            Some(Lora { id: u32::try_from(index + 1).ok()?, name: model.to_owned() })
        });
        Identity { salt: salt.map(str::to_owned), lora }
    }

    /// Tokens of a text, as the server makes them.
    #[must_use]
    pub fn tokenize(&self, text: &str) -> Vec<u32> {
        tokenizer::encode(text)
    }

    /// Counters of a rank, beyond what `/metrics` tells.
    #[must_use]
    pub fn counters_of(&self, rank: usize) -> Counters {
        let rank = self.life.ranks.get(rank);
        rank.map_or_else(Counters::default, |rank| rank.lock().engine.counters().clone())
    }

    /// Waits until no engine has anything to do: requests ended, stalled or queued behind a
    /// pause, and every store to a tier complete.
    pub async fn at_rest(&self) {
        for rank in &self.life.ranks {
            rank.at_rest().await;
        }
    }

    /// Requests that have not ended, over all ranks.
    #[must_use]
    pub fn requests_in_flight(&self) -> usize {
        self.life.ranks.iter().map(|rank| rank.load()).sum()
    }

    /// Puts other weights at the checkpoint's place: the next `reload_weights` or restart loads
    /// them. Blocks that the old ones computed stay, and are stale.
    pub fn set_checkpoint(&mut self, version: u64) {
        self.checkpoint = model::mix(self.config.seed ^ model::mix(version));
        let checkpoint = self.checkpoint;
        self.life.change_all(|engine| engine.set_checkpoint(checkpoint));
    }

    /// What the next life calls its weights when it starts.
    pub fn set_weight_version(&mut self, version: &str) {
        version.clone_into(&mut self.config.weight_version);
    }

    /// Makes the host tier report late: its events stay pending until this is taken back, also
    /// over a reset.
    pub fn hold_connector_events(&self, held: bool) {
        self.life.change_all(|engine| engine.hold_connector_events(held));
    }
}

fn check(config: &SimConfig) -> Result<(), StartError> {
    if config.block_size == 0 || config.max_model_len < 2 {
        return Err(StartError::Config("block size and model length must be positive"));
    }
    let blocks = config.max_model_len.div_ceil(config.block_size);
    let groups = 1 + usize::from(config.sliding_window.is_some());
    if (config.gpu_blocks as usize) <= blocks * groups {
        return Err(StartError::Config("the device cache must hold one request of full length"));
    }
    if config.sliding_window.is_some() && config.connector != Connector::None {
        return Err(StartError::Config("a sliding window group needs connector none"));
    }
    if config.blocks_per_chunk == 0
        || config.blocks_per_chunk > 1 && config.connector != Connector::Offloading
    {
        return Err(StartError::Config("chunks of several blocks need connector offloading"));
    }
    let is_plain = config.connector == Connector::None && config.sliding_window.is_none();
    if config.is_speculative && !is_plain {
        return Err(StartError::Config("speculation needs connector none and no sliding window"));
    }
    Ok(())
}

fn offset_port(address: SocketAddr, rank: u32) -> SocketAddr {
    let mut address = address;
    if address.port() != 0 {
        address.set_port(address.port().saturating_add(u16::try_from(rank).unwrap_or(u16::MAX)));
    }
    address
}

/// Where it serves, and what runs.
type Born = (SocketAddr, Arc<Life>, JoinSet<()>);

/// What a life has from outside the process, or from the one before.
struct Inherited<'a> {
    listeners: &'a [(Listener, Listener)],
    checkpoint: u64,
    stores: Vec<Option<Tier>>,
}

/// Binds, and starts the tasks of one life.
async fn begin(
    config: &SimConfig,
    asked: &Addresses,
    faults: &Arc<Faults>,
    inherited: Inherited<'_>,
) -> Result<Born, StartError> {
    let Inherited { listeners, checkpoint, mut stores } = inherited;
    let listener =
        listen(asked.http).map_err(|source| StartError::Http { address: asked.http, source })?;
    let http =
        listener.local_addr().map_err(|source| StartError::Http { address: asked.http, source })?;
    let stop = CancellationToken::new();
    let mut tasks = JoinSet::new();
    let mut ranks = Vec::new();
    for (index, (events, replay)) in (0u32..).zip(listeners) {
        let publish = events.adopted_by(PubSocket::new()).await?;
        let router = replay.adopted_by(RouterSocket::new()).await?;
        let store = stores.get_mut(index as usize).and_then(Option::take);
        let engine = Engine::new(core_config(config), checkpoint, store);
        let rank = Arc::new(Rank::new(index, engine));
        let (sender, receiver) = mpsc::channel(QUEUE_MAX);
        let publisher = Publisher {
            publish,
            replay: router.split(),
            topic: Bytes::copy_from_slice(config.topic.as_bytes()),
            replay_topic: config.profile.traits().replay_topic,
            faults: Arc::clone(faults),
        };
        tasks.spawn(publisher.run(receiver, stop.clone()));
        let steps = Steps {
            pace: config.decode_step,
            batches: sender,
            encoding: Encoding {
                layout: config.profile.traits().layout,
                byte_hashes: config.byte_hashes,
            },
            faults: Arc::clone(faults),
        };
        tasks.spawn(Arc::clone(&rank).run(steps, stop.clone()));
        ranks.push(rank);
    }
    let wildcard = |address: &SocketAddr| format!("tcp://*:{}", address.port());
    let life = Arc::new(Life {
        config: config.clone(),
        traits: config.profile.traits(),
        ranks,
        faults: Arc::clone(faults),
        started: SystemTime::now(),
        closing: stop.child_token(),
        stop: stop.clone(),
        sources: asked.ranks.iter().map(|(e, r)| (wildcard(e), wildcard(r))).collect(),
        ids: AtomicU64::new(0),
        turn: AtomicUsize::new(0),
        weight_version: Mutex::new(config.weight_version.clone()),
        sleep_level: Mutex::new(None),
        operations: Mutex::new(BTreeMap::new()),
    });
    tasks.spawn(http::serve(Arc::clone(&life), listener));
    Ok((http, life, tasks))
}

/// Listens so that a restart can take the same port while old connections linger.
fn listen(address: SocketAddr) -> std::io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(1024)
}

/// A socket for events that listens.
#[derive(Debug)]
struct Listener {
    socket: std::net::TcpListener,
    address: SocketAddr,
}

fn listen_for_events(address: SocketAddr) -> Result<Listener, StartError> {
    let listening = || {
        let socket = listen(address)?.into_std()?;
        let address = socket.local_addr()?;
        Ok(Listener { socket, address })
    };
    listening().map_err(|source: std::io::Error| unbound(address, source.into()))
}

impl Listener {
    /// One more hold of it, for a life.
    async fn adopted_by<S: Socket>(&self, mut socket: S) -> Result<S, StartError> {
        let held = self.socket.try_clone().map_err(|e| unbound(self.address, e.into()))?;
        socket.bind_listener(held).await.map_err(|source| unbound(self.address, source))?;
        Ok(socket)
    }
}

fn unbound(address: SocketAddr, source: zeromq::ZmqError) -> StartError {
    StartError::Events { endpoint: format!("tcp://{address}"), source }
}

/// Requests in the running batch, and tokens a step: vLLM's defaults for a server on CPU.
const MAX_RUNNING: usize = 128;
const MAX_STEP_TOKENS: usize = 2048;

fn core_config(config: &SimConfig) -> Config {
    let traits = config.profile.traits();
    Config {
        block_size: config.block_size,
        gpu_blocks: config.gpu_blocks,
        cpu_blocks: config.cpu_blocks,
        blocks_per_chunk: config.blocks_per_chunk,
        self_describing: config.self_describing_events,
        drops_last_hit: config.is_speculative,
        connector: config.connector,
        max_model_len: config.max_model_len,
        max_running: MAX_RUNNING,
        max_step_tokens: MAX_STEP_TOKENS,
        sliding_window: config.sliding_window,
        pause_reaches_connector: traits.pause_reaches_connector,
        partial_wake_keeps_paused: traits.partial_wake_keeps_paused,
        paused_counts_as_sleeping: traits.sleep_pauses,
        cpu_event_block_size: if traits.cpu_event_block_size { config.block_size } else { 0 },
    }
}
