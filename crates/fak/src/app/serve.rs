//! `fak serve`: the gateway, from its settings to its end.
//!
//! Invariant: it listens only once the ledger is open; it answers while beliefs are still being
//! rebuilt; and at its end requests come first, then the workers' owners, then the ledger.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::io::Write as _;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use axum::Router;
use fak_index::{Index, Limits, RankOptions};
use fak_sim::{Binds, Connector, Sim, SimConfig};
use http::Request;
use http_body_util::Either;
use hyper::body::Incoming;
use tower::util::option_layer;
use tower::{Layer as _, ServiceExt as _, service_fn};
use tower_http::cors::CorsLayer;

use super::Error;
use super::doubt::Findings;
use super::signals::Signals;
use super::{cors, open_files, slashed};
use crate::admin::{self, Access, AdminState};
use crate::cli::{Exit, ServeArgs};
use crate::config;
use crate::config::serve::{Flags, Raw, Serve, embedded_id, is_loopback};
use crate::engine::{Client, Endpoints, Engine, Isolation, Stamp};
use crate::events::discover;
use crate::events::recorder::Recorder;
use crate::events::stream::Sink;
use crate::fleet::{Door, Fleet, Worker};
use crate::gateway::{self, Ends, Gateway, Hold, Key, ServeConfig, WeightsSalt};
use crate::lifecycle::{self, Lifecycle};
use crate::runtime::{OnExit, Shutdown, TaskGroup};
use crate::sessions::{self, Sessions};
use crate::store::{self, Store};
use crate::telemetry::Registry;

/// Cache events that are remembered for who asks.
const RECORDED_MAX: usize = 10_000;
/// Time for owners, keepers and judges to end.
const OWNERS_WITHIN: Duration = Duration::from_secs(10);
/// Pause between two looks at whether the ledger takes rows.
const LEDGER_EVERY: Duration = Duration::from_secs(5);
/// Pause between two sweeps of what demoted beliefs left, and entries of one.
const SWEEP_EVERY: Duration = Duration::from_secs(1);
const SWEEP_BUDGET: usize = 1 << 20;

/// The settings that these arguments lead to.
pub(super) fn settings(args: &ServeArgs) -> Result<Serve, Error> {
    let raw = match &args.config {
        Some(path) => Raw::read(path).map_err(Error::usage)?,
        None => Raw::default(),
    };
    let (listen, db) = (args.listen.clone(), args.db.clone());
    let flags = Flags { listen, db, worker: args.worker.clone() };
    let settings = raw.resolve(flags, &config::process_environment, args.sim);
    let settings = settings.map_err(Error::usage)?;
    let url = Store::check_url(&settings.db);
    url.with_context(|| format!("--db: {}", shown(&settings.db))).map_err(Error::usage)?;
    Ok(settings)
}

/// A server's URL may hold a password, and where it is no URL, anywhere.
fn shown(db: &str) -> &str {
    if db.starts_with("sqlite:") { db } else { "the server" }
}

/// Serves until SIGTERM or Ctrl-C.
pub(super) async fn serve(args: ServeArgs) -> Result<Exit, Error> {
    let settings = settings(&args)?;
    if settings.keys.is_empty() && !is_loopback(settings.listen) {
        tracing::warn!(listen = %settings.listen, "anybody who reaches it may send requests: \
            no [[key]] is configured");
    }
    let workers_count = settings.workers.len() + args.sim;
    let most = ServeConfig::default().connections_max;
    let connections_max = open_files::connections(open_files::raise(), workers_count, most);
    let config = ServeConfig { connections_max, drain: settings.drain, ..ServeConfig::default() };
    let signals = Signals::catch().map_err(Error::failed)?;
    let sims = start_sims(args.sim).await?;
    let fleet = Fleet::new(workers(&settings, &sims)?);
    let listener = gateway::listen(settings.listen).map_err(|source| {
        let told = format!("{} cannot be listened at", settings.listen);
        Error::failed(anyhow::Error::new(source).context(told))
    })?;
    let at = listener.local_addr().map_err(Error::failed)?;
    let app = App::build(&settings, fleet, at).await?;
    writeln!(std::io::stderr(), "fak serve: http://{at}").map_err(Error::failed)?;
    let cors = cors::layer(&settings.cors_origins);
    let exit = app.run(listener, config, cors, settings.limits.drain_announce, signals).await;
    for sim in sims {
        sim.stop().await;
    }
    Ok(exit)
}

/// The ledger, as this process's own. `at` is shown to others that want it.
async fn open_store(settings: &Serve, at: SocketAddr) -> Result<Store, Error> {
    let told = format!("db={:?}", config::print::without_password(&settings.db));
    let failed = |error: anyhow::Error| Error::failed(error.context(told.clone()));
    if let Some(folder) = &settings.state_folder {
        // The ledger names sessions and tenants' workers: it is its user's own.
        let mut private = std::fs::DirBuilder::new();
        private.recursive(true);
        #[cfg(unix)]
        std::os::unix::fs::DirBuilderExt::mode(&mut private, 0o700);
        private.create(folder).map_err(|error| failed(error.into()))?;
    }
    let store = Store::open(&settings.db).await;
    let store = store.map_err(|error| failed(anyhow::Error::msg(error.explained())))?;
    let who = format!("fak serve at {at}, process {}", std::process::id());
    store.own(&who).await.map_err(|error| failed(error.into()))?;
    Ok(store)
}

/// Shows in the log, and by it in `/ready`, whether the ledger takes rows. Ends once another fak
/// had the ledger: this one does not know what the other did to the workers.
async fn watch_ledger(store: Store, stop: Shutdown) {
    let mut known = None;
    while tokio::time::timeout(LEDGER_EVERY, stop.requested()).await.is_err() {
        // What else came of it is in the store's trouble.
        if let Err(error @ store::Error::Lost) = store.check().await {
            tracing::error!(%error, "stopping");
            return;
        }
        let trouble = store.trouble();
        match (&known, &trouble) {
            (None, Some(why)) => tracing::error!(why, "the ledger takes no rows"),
            (Some(_), None) => tracing::info!("the ledger takes rows again"),
            _ => {}
        }
        known = trouble;
    }
}

/// Everything that runs, wired.
struct App {
    gateway: Gateway,
    control: Router,
    store: Store,
    /// Ends the listener, and what would never end by itself.
    serving: TaskGroup,
    tasks: TaskGroup,
}

impl App {
    async fn build(settings: &Serve, fleet: Fleet, at: SocketAddr) -> Result<Self, Error> {
        let store = open_store(settings, at).await?;
        let registry = Registry::new();
        let seed = RandomState::new().build_hasher().finish();
        let index = Arc::new(Index::new(seed, Limits::default()));
        let recorder = Arc::new(Recorder::new(RECORDED_MAX));
        let sink = Sink {
            index: Arc::clone(&index),
            options: RankOptions::default(),
            recorder: Arc::clone(&recorder),
            notes: None,
        };
        let (lifecycle, owners) =
            Lifecycle::new(&lifecycle_config(settings, &fleet, &store, sink)?);
        let opened = Sessions::open(store.clone(), sessions::Config::default()).await;
        let (sessions, keeper) = opened.map_err(Error::failed)?;
        let findings = Findings::default();
        let parts = gateway::Parts {
            fleet: fleet.clone(),
            index: Arc::clone(&index),
            sessions: Some(sessions.clone()),
            doubt: Arc::new(findings.clone()),
        };
        let made = Gateway::new(gateway_config(settings), parts, &registry);
        let (gateway, auditor) = made.map_err(Error::failed)?;
        let (serving, mut tasks) = (TaskGroup::new(), TaskGroup::new());
        let is_loopback_only = is_loopback(settings.listen);
        let control = admin::router(AdminState::new(admin::Parts {
            fleet,
            lifecycle: lifecycle.clone(),
            sessions,
            store: store.clone(),
            index: Arc::clone(&index),
            recorder,
            registry,
            access: Access { key: settings.admin_key.clone(), is_loopback_only },
            stop: serving.shutdown(),
        }));
        for owner in owners {
            tasks.spawn("worker owner", OnExit::StopProcess, owner.run(tasks.shutdown()));
        }
        tasks.spawn("sessions", OnExit::StopProcess, keeper.run(tasks.shutdown()));
        tasks.spawn("audits", OnExit::StopProcess, auditor.run(tasks.shutdown()));
        let aborts = gateway.clone().deliver_aborts(tasks.shutdown());
        tasks.spawn("deferred aborts", OnExit::StopProcess, aborts);
        tasks.spawn("doubts", OnExit::StopProcess, findings.carry(lifecycle, tasks.shutdown()));
        let watch = watch_ledger(store.clone(), tasks.shutdown());
        tasks.spawn("ledger", OnExit::StopProcess, watch);
        let stop = tasks.shutdown();
        tasks.spawn("sweep", OnExit::StopProcess, async move {
            while tokio::time::timeout(SWEEP_EVERY, stop.requested()).await.is_err() {
                index.sweep(SWEEP_BUDGET);
            }
        });
        Ok(Self { gateway, control, store, serving, tasks })
    }

    /// Serves until a signal or the end of a critical task, then lets go in order; at a second
    /// signal, without waiting for requests. Only the first signal is an end that was asked for.
    async fn run(
        self,
        listener: tokio::net::TcpListener,
        config: ServeConfig,
        cors: Option<CorsLayer>,
        announce: Duration,
        mut signals: Signals,
    ) -> Exit {
        let Self { gateway, control, store, serving, tasks } = self;
        let cutoff = gateway.cutoff();
        let data = option_layer(cors).layer(service_fn(move |request: Request<Incoming>| {
            let gateway = gateway.clone();
            async move { Ok::<_, Infallible>(gateway.handle(request).await) }
        }));
        let service = move |request: Request<Incoming>| {
            let (data, control) = (data.clone(), control.clone());
            async move {
                if let Some(answer) = slashed::redirect(request.uri()) {
                    answer.map(Either::Left)
                } else if admin::owns(request.uri().path()) {
                    let answer = control.oneshot(request.map(axum::body::Body::new)).await;
                    let answer = answer.unwrap_or_else(|never| match never {});
                    answer.map(Either::Right)
                } else {
                    let answer = data.oneshot(request).await;
                    answer.unwrap_or_else(|never| match never {}).map(Either::Left)
                }
            }
        };
        let drain = config.drain;
        let listening = TaskGroup::new();
        let (announced, stop) = (serving.shutdown(), listening.shutdown());
        let ends = Ends { announced, stop, cutoff };
        let mut served = pin!(gateway::serve(listener, service, config, ends));
        let critical = tasks.shutdown();
        let asked = tokio::select! {
            () = signals.next() => true,
            () = critical.requested() => false,
            _ = served.as_mut() => unreachable!("a listener ends once it is told to"),
        };
        let exit = if asked { Exit::Done } else { Exit::Failed };
        // Without its parts it does not serve on.
        let announce = if asked { announce } else { Duration::ZERO };
        if asked {
            talk_of_stopping(announce, drain);
        } else {
            tracing::error!("stopping: a part has ended");
        }
        // Whoever asks whether it is ready is told no from here on.
        serving.stop(Duration::ZERO).await;
        let ended = async {
            tokio::select! {
                () = tokio::time::sleep(announce) => {}
                () = critical.requested() => {}
                _ = served.as_mut() => unreachable!("a listener ends once it is told to"),
            }
            listening.stop(Duration::ZERO).await;
            let aborted = served.await;
            if aborted > 0 {
                tracing::warn!(aborted, "connections did not end in time");
            }
        };
        let exit = tokio::select! {
            () = ended => exit,
            () = signals.next() => Exit::Failed,
        };
        tasks.stop(OWNERS_WITHIN).await;
        store.close().await;
        exit
    }
}

/// Whoever pressed Ctrl-C is told why nothing seems to happen.
fn talk_of_stopping(announce: Duration, drain: Duration) {
    let _ = writeln!(
        std::io::stderr(),
        "fak serve: stopping; /ready answers 503, and new requests are taken for {announce:?} more \
         (drain_announce_ms); then requests under way have {drain:?} to end (drain_ms), or until a \
         second signal"
    );
}

async fn start_sims(count: usize) -> Result<Vec<Sim>, Error> {
    let mut sims = Vec::with_capacity(count);
    for number in 0..count {
        let seed = number as u64;
        let config = SimConfig {
            model: "sim".to_owned(),
            connector: Connector::Offloading,
            // The weights are the same everywhere; only ids differ.
            decode_step: Duration::from_millis(5),
            seed,
            ..SimConfig::default()
        };
        sims.push(Sim::start(config, Binds::default()).await.map_err(Error::failed)?);
    }
    Ok(sims)
}

fn workers(settings: &Serve, sims: &[Sim]) -> Result<Vec<Worker>, Error> {
    let client = Client::new(settings.engine_key.as_ref(), settings.limits.timeouts());
    let client = client.map_err(Error::usage)?;
    let worker = |id: &str, endpoints: Endpoints| {
        let allows = settings.allow_reload_weights;
        let endpoints = if allows { endpoints.allowing_reload_weights() } else { endpoints };
        let engine = Engine::new(client.clone(), endpoints);
        Worker { id: id.into(), engine, door: Door::new() }
    };
    let mut workers: Vec<_> =
        settings.workers.iter().map(|spec| worker(&spec.id, spec.endpoints.clone())).collect();
    for (number, sim) in sims.iter().enumerate() {
        let endpoints = Endpoints::new(&sim.base_url()).map_err(Error::failed)?;
        workers.push(worker(&embedded_id(number), endpoints));
    }
    Ok(workers)
}

fn lifecycle_config(
    settings: &Serve,
    fleet: &Fleet,
    store: &Store,
    sink: Sink,
) -> Result<lifecycle::Config, Error> {
    let mut events = BTreeMap::new();
    for spec in &settings.workers {
        if let Some(kv) = &spec.kv {
            let host = spec.endpoints.origin().host();
            let replay = spec.replay.as_ref().map(ToString::to_string);
            let named = discover::named(&kv.to_string(), replay.as_deref(), "", 1, host);
            events.insert(Arc::from(spec.id.as_str()), named.map_err(Error::usage)?);
        }
    }
    Ok(lifecycle::Config {
        fleet: fleet.clone(),
        store: store.clone(),
        sink,
        events,
        probe_every: settings.probe_every,
        failures_max: settings.probe_failures_max,
        patience: settings.progress_patience,
        settle_within: settings.settle_within,
    })
}

fn gateway_config(settings: &Serve) -> gateway::Config {
    let defaults = gateway::Config::default();
    let hold = Hold {
        requests_max: if settings.hold.is_zero() { 0 } else { settings.hold_max },
        within: settings.hold,
        ..defaults.hold
    };
    let (body_bytes_max, bodies_bytes_max) = (settings.body_bytes_max, settings.bodies_bytes_max);
    let weights_salt =
        if settings.salts_carry_version { WeightsSalt::Version } else { WeightsSalt::Off };
    let watch_every = settings.first_byte;
    let keys = settings.keys.iter().map(|key| Key {
        secret: key.secret.clone(),
        tenant: Some(key.tenant.clone()),
        authority: key.authority.clone(),
    });
    let deferring = settings.workers.iter().filter(|worker| worker.defer_aborts);
    let isolation = if settings.isolation { Isolation::On } else { Isolation::Off };
    gateway::Config {
        keys: keys.collect(),
        passing: settings.passing.clone(),
        stamp: Stamp::new(settings.salt_key.clone(), isolation, false),
        weights_salt,
        defer_aborts: deferring.map(|worker| worker.id.clone()).collect(),
        body_bytes_max,
        bodies_bytes_max,
        watch_every,
        keep_alive: settings.limits.keep_alive,
        hold,
        ..defaults
    }
}
