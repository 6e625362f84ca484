//! The control API on a real socket, over simulated engines with their owners and a ledger.

use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use fak::admin::{self, Access, AdminState, Parts};
use fak::engine::{Client, Endpoints, Engine, Secret, Timeouts};
use fak::events::recorder::Recorder;
use fak::fleet::{Door, Fleet, Worker};
use fak::lifecycle::Lifecycle;
use fak::runtime::{OnExit, TaskGroup};
use fak::sessions::{self, Sessions};
use fak::store::Store;
use fak_index::{Index, Limits};
use fak_kernel::vocab::PerTier;
use fak_sim::{Binds, Connector, Sim, SimConfig};
use http::{HeaderMap, Request, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::Value;

use crate::owners;

pub(crate) struct Rig {
    pub(crate) sims: Vec<Sim>,
    pub(crate) sessions: Sessions,
    pub(crate) store: Store,
    pub(crate) recorder: Arc<Recorder>,
    pub(crate) fleet: Fleet,
    lifecycle: Lifecycle,
    address: SocketAddr,
    http: hyper_util::client::legacy::Client<HttpConnector, Full<Bytes>>,
    _tasks: TaskGroup,
}

/// A whole answer.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    pub(crate) text: String,
}

impl Answer {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{error}: {}", self.text))
    }
}

impl Rig {
    /// `workers` engines `w0`, `w1`, .. and no admin key, on loopback.
    pub(crate) async fn start(workers: usize) -> Self {
        Self::with(workers, Access { key: None, is_loopback_only: true }).await
    }

    pub(crate) async fn with_key(key: &str) -> Self {
        let key = Some(Secret::new(key.to_owned()));
        Self::with(1, Access { key, is_loopback_only: true }).await
    }

    pub(crate) async fn with(workers: usize, access: Access) -> Self {
        let mut sims = Vec::new();
        for _ in 0..workers {
            let config = SimConfig { connector: Connector::Offloading, ..SimConfig::default() };
            sims.push(Sim::start(config, Binds::default()).await.unwrap());
        }
        let fleet = Fleet::new(sims.iter().enumerate().map(worker));
        let store = Store::open("sqlite::memory:").await.unwrap();
        let index = Arc::new(Index::new(7, Limits::default()));
        let recorder = Arc::new(Recorder::new(0));
        let config = owners::config(&fleet, &store, &index, &recorder);
        let (lifecycle, mut tasks) = owners::run(&config);
        let opened = Sessions::open(store.clone(), sessions::Config::default()).await;
        let (sessions, keeper) = opened.unwrap();
        tasks.spawn("sessions", OnExit::StopProcess, keeper.run(tasks.shutdown()));
        let parts = Parts {
            fleet: fleet.clone(),
            lifecycle: lifecycle.clone(),
            sessions: sessions.clone(),
            store: store.clone(),
            index,
            recorder: Arc::clone(&recorder),
            registry: prometheus::Registry::new(),
            access,
            stop: tasks.shutdown(),
        };
        let router = admin::router(AdminState::new(parts));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tasks.spawn("admin", OnExit::StopProcess, async move {
            axum::serve(listener, router).await.unwrap();
        });
        let http = hyper_util::client::legacy::Client::builder(TokioExecutor::new()).build_http();
        let rig = Self {
            sims,
            sessions,
            store,
            recorder,
            fleet,
            lifecycle,
            address,
            http,
            _tasks: tasks,
        };
        for worker in 0..workers {
            rig.look(worker).await;
        }
        rig
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub(crate) async fn look(&self, worker: usize) {
        self.lifecycle.look(&format!("w{worker}")).await.unwrap();
    }

    /// A request of `session` was served by `worker`.
    pub(crate) fn served(&self, session: &str, worker: &str) {
        let turn = self.sessions.resolve(session).unwrap();
        turn.bind(&worker.into(), &PerTier::all(0));
    }

    pub(crate) async fn get(&self, path: &str) -> Answer {
        self.ask("GET", path, &[], "").await
    }

    pub(crate) async fn post(&self, path: &str, body: &str) -> Answer {
        self.ask("POST", path, &[], body).await
    }

    pub(crate) async fn ask(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &str,
    ) -> Answer {
        let response = self.open(method, path, headers, body).await;
        let (parts, body) = response.into_parts();
        let text = body.collect().await.unwrap().to_bytes().to_vec();
        let text = String::from_utf8(text).unwrap();
        Answer { status: parts.status.as_u16(), headers: parts.headers, text }
    }

    pub(crate) async fn open(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &str,
    ) -> http::Response<Incoming> {
        let mut request = Request::builder().method(method).uri(format!("{}{path}", self.url()));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Full::new(Bytes::copy_from_slice(body.as_bytes()))).unwrap();
        self.http.request(request).await.unwrap()
    }

    /// Asks the engine itself, behind fak's back.
    pub(crate) async fn behind(&self, worker: usize, path: &str) {
        let uri = format!("{}{path}", self.sims[worker].base_url());
        let request = Request::post(uri).body(Full::new(Bytes::new())).unwrap();
        let response = self.http.request(request).await.unwrap();
        assert_eq!(response.status(), StatusCode::OK);
    }
}

fn worker((number, sim): (usize, &Sim)) -> Worker {
    let endpoints = Endpoints::new(&sim.base_url()).unwrap();
    let engine = Engine::new(Client::new(None, Timeouts::default()).unwrap(), endpoints);
    Worker { id: format!("w{number}").into(), engine, door: Door::new() }
}
