//! A gateway on a real socket, in front of engines at given addresses, and a client.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use fak::engine::{Client, Endpoints, Engine, Model, Secret, Timeouts};
use fak::fleet::{Caution, Door, Fleet, State, Worker};
use fak::gateway::{self, Config, Contradiction, Doubt, Ends, Gateway, Parts, ServeConfig};
use fak::runtime::{OnExit, TaskGroup};
use fak::sessions::Sessions;
use fak::telemetry::{self, Registry};
use fak_index::{Index, Limits};
use fak_kernel::Phase;
use fak_kernel::witness::Standing;
use http::{HeaderMap, Request, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use tokio::sync::mpsc;

/// Longer than any test needs. Nothing waits for it to pass.
pub(crate) const PATIENT: Duration = Duration::from_secs(30);
/// Soon over, for waits that a test wants to run out.
pub(crate) const SHORT: Duration = Duration::from_millis(100);

/// The key that fak shows to engines.
pub(crate) const WORKER_KEY: &str = "worker-key";
/// The model that the engines serve.
pub(crate) const MODEL: &str = "m";

pub(crate) struct Rig {
    pub(crate) fleet: Fleet,
    pub(crate) index: Arc<Index>,
    pub(crate) address: SocketAddr,
    pub(crate) contradictions: Arc<Mutex<Vec<Contradiction>>>,
    pub(crate) suspects: mpsc::Receiver<Arc<str>>,
    pub(crate) missed: mpsc::Receiver<Arc<str>>,
    pub(crate) late: mpsc::Receiver<Arc<str>>,
    registry: Registry,
    http: hyper_util::client::legacy::Client<HttpConnector, Full<Bytes>>,
    _tasks: TaskGroup,
}

struct Told {
    suspects: mpsc::Sender<Arc<str>>,
    missed: mpsc::Sender<Arc<str>>,
    late: mpsc::Sender<Arc<str>>,
    contradictions: Arc<Mutex<Vec<Contradiction>>>,
}

impl Doubt for Told {
    fn suspect(&self, worker: &Arc<str>) {
        // A test that does not listen lets the channel fill up.
        let _ = self.suspects.try_send(Arc::clone(worker));
    }

    fn missed(&self, worker: &Arc<str>) {
        // Likewise.
        let _ = self.missed.try_send(Arc::clone(worker));
    }

    fn late(&self, worker: &Arc<str>) {
        // Likewise.
        let _ = self.late.try_send(Arc::clone(worker));
    }

    fn contradicted(&self, contradiction: &Contradiction) {
        self.contradictions.lock().unwrap().push(contradiction.clone());
    }
}

/// What a test may want otherwise.
pub(crate) struct Setup {
    pub(crate) config: Config,
    pub(crate) timeouts: Timeouts,
    /// The worker between whose chunks no more than [that](SHORT) may pass.
    pub(crate) impatient: Option<usize>,
    /// The worker from which a first byte has to come [soon](SHORT).
    pub(crate) hurried: Option<usize>,
    pub(crate) sessions: Option<Sessions>,
}

pub(crate) fn setup() -> Setup {
    let timeouts = Timeouts {
        connect: PATIENT,
        first_byte: PATIENT,
        idle: PATIENT,
        unary: PATIENT,
        control: PATIENT,
        probe: PATIENT,
        tokenize: PATIENT,
    };
    let clock = || jiff::Timestamp::UNIX_EPOCH;
    let config = Config {
        head_within: PATIENT,
        audit_after: SHORT,
        // Peers store nothing by themselves.
        quiet_for: Duration::ZERO,
        clock,
        ..Config::default()
    };
    Setup { config, timeouts, impatient: None, hurried: None, sessions: None }
}

/// A whole answer.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

impl Answer {
    pub(crate) fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }

    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.text()))
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().unwrap())
    }

    /// The `code` of an error body.
    pub(crate) fn code(&self) -> String {
        self.json()["error"]["code"].as_str().unwrap_or_default().to_owned()
    }
}

impl Rig {
    /// A gateway in front of engines at these URLs, `w0`, `w1`, .., which serve [`MODEL`].
    pub(crate) async fn over(urls: &[String]) -> Self {
        Self::with(urls, setup()).await
    }

    pub(crate) async fn with(urls: &[String], setup: Setup) -> Self {
        let Setup { config, timeouts, impatient, hurried, sessions } = setup;
        let worker = |(number, url): (usize, &String)| {
            let key = Secret::new(WORKER_KEY.to_owned());
            let mut timeouts = timeouts.clone();
            if impatient.is_some_and(|last| number <= last) {
                timeouts.idle = SHORT;
            }
            if hurried == Some(number) {
                timeouts.first_byte = SHORT;
            }
            let client = Client::new(Some(&key), timeouts).unwrap();
            let engine = Engine::new(client, Endpoints::new(url).unwrap());
            Worker { id: format!("w{number}").into(), engine, door: Door::new() }
        };
        let fleet = Fleet::new(urls.iter().enumerate().map(worker));
        let index = Arc::new(Index::new(7, Limits::default()));
        let rig = Self::around(fleet, index, config, sessions).await;
        for number in 0..urls.len() {
            rig.state(number, |state| {
                state.standing = Standing::SERVING;
                state.is_reachable = true;
                state.models = [Model::base(MODEL)].into_iter().collect();
                state.caution = Caution { speculates: Some(false), ranks: Some(0) };
            });
        }
        rig
    }

    /// A gateway over a fleet that somebody else keeps.
    pub(crate) async fn around(
        fleet: Fleet,
        index: Arc<Index>,
        config: Config,
        sessions: Option<Sessions>,
    ) -> Self {
        let (sender, suspects) = mpsc::channel(1024);
        let contradictions = Arc::default();
        let (missing, missed) = mpsc::channel(16);
        let (owing, late) = mpsc::channel(16);
        let contradicted = Arc::clone(&contradictions);
        let doubt =
            Told { suspects: sender, missed: missing, late: owing, contradictions: contradicted };
        let registry = Registry::new();
        let parts = Parts {
            fleet: fleet.clone(),
            index: Arc::clone(&index),
            sessions,
            doubt: Arc::new(doubt),
        };
        let (gateway, auditor) = Gateway::new(config, parts, &registry).unwrap();
        let listener = gateway::listen(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        let address = listener.local_addr().unwrap();
        let mut tasks = TaskGroup::new();
        tasks.spawn("auditor", OnExit::StopProcess, auditor.run(tasks.shutdown()));
        let aborts = gateway.clone().deliver_aborts(tasks.shutdown());
        tasks.spawn("deferred aborts", OnExit::StopProcess, aborts);
        let stop = tasks.shutdown();
        let ends = Ends { announced: stop.clone(), stop, cutoff: gateway.cutoff() };
        tasks.spawn("gateway", OnExit::StopProcess, async move {
            let service = move |request| {
                let gateway = gateway.clone();
                async move { gateway.handle(request).await }
            };
            gateway::serve(listener, service, ServeConfig::default(), ends).await;
        });
        let http = hyper_util::client::legacy::Client::builder(TokioExecutor::new()).build_http();
        Self {
            fleet,
            index,
            address,
            contradictions,
            suspects,
            missed,
            late,
            registry,
            http,
            _tasks: tasks,
        }
    }

    /// Changes what is true of a worker.
    pub(crate) fn state(&self, number: usize, change: impl FnOnce(&mut State)) {
        self.fleet.update(&format!("w{number}"), change);
    }

    /// Puts a worker into a phase.
    pub(crate) fn phase(&self, number: usize, phase: Phase) {
        let standing = match phase {
            Phase::Serving => Standing::SERVING,
            phase => Standing { phase, ..Standing::UNOBSERVED },
        };
        self.state(number, |state| state.standing = standing);
    }

    /// Requests inside a worker.
    pub(crate) fn inside(&self, number: usize) -> usize {
        self.fleet.snapshot().workers[number].worker.door.in_flight()
    }

    /// Waits until nobody is inside any worker.
    pub(crate) async fn empty(&self) {
        for view in &self.fleet.snapshot().workers {
            tokio::time::timeout(PATIENT, view.worker.door.empty()).await.unwrap();
        }
    }

    /// A metric's value, by its name with labels as written; 0 where it is not there.
    pub(crate) fn count(&self, name: &str) -> u64 {
        let text = telemetry::text(&self.registry).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.map_or(0, |value| value.parse().unwrap())
    }

    /// All metrics, for a test that fails.
    pub(crate) fn metrics(&self) -> String {
        telemetry::text(&self.registry).unwrap()
    }

    /// Waits until a metric has a value.
    pub(crate) async fn counted(&self, name: &str, value: u64) {
        let reached = async {
            while self.count(name) != value {
                tokio::task::yield_now().await;
            }
        };
        let in_time = tokio::time::timeout(PATIENT, reached).await;
        assert!(in_time.is_ok(), "{name} is {}, not {value}", self.count(name));
    }

    pub(crate) async fn get(&self, path: &str) -> Answer {
        whole(self.open("GET", path, &[], "").await).await
    }

    pub(crate) async fn post(&self, path: &str, body: &str) -> Answer {
        whole(self.open("POST", path, &[], body).await).await
    }

    pub(crate) async fn post_with(
        &self,
        path: &str,
        headers: &[(&str, &str)],
        body: &str,
    ) -> Answer {
        whole(self.open("POST", path, headers, body).await).await
    }

    /// Sends a request, and returns when the answer's head is there.
    pub(crate) async fn open(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &str,
    ) -> http::Response<Incoming> {
        self.send(method, &format!("http://{}{path}", self.address), headers, body).await
    }

    /// As [`open`](Self::open), at any address.
    pub(crate) async fn send(
        &self,
        method: &str,
        url: &str,
        headers: &[(&str, &str)],
        body: &str,
    ) -> http::Response<Incoming> {
        let mut request = Request::builder().method(method).uri(url);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Full::new(Bytes::copy_from_slice(body.as_bytes()))).unwrap();
        tokio::time::timeout(PATIENT, self.http.request(request)).await.unwrap().unwrap()
    }

    /// A new connection to the gateway, for what no client library sends.
    pub(crate) async fn connect(&self) -> tokio::net::TcpStream {
        tokio::net::TcpStream::connect(self.address).await.unwrap()
    }
}

/// Reads an answer to its end.
pub(crate) async fn whole(response: http::Response<Incoming>) -> Answer {
    let (parts, body) = response.into_parts();
    let body = tokio::time::timeout(PATIENT, body.collect()).await.unwrap().unwrap().to_bytes();
    Answer { status: parts.status, headers: parts.headers, body }
}

/// The next bytes of an answer's body; none at its end.
pub(crate) async fn next(response: &mut http::Response<Incoming>) -> Option<Bytes> {
    let frame = tokio::time::timeout(PATIENT, response.body_mut().frame()).await.unwrap();
    frame.map(|frame| frame.unwrap().into_data().unwrap())
}

/// A chat request.
pub(crate) fn chat(stream: bool) -> String {
    let messages = serde_json::json!([{"role": "user", "content": "hello"}]);
    serde_json::json!({"model": MODEL, "messages": messages, "stream": stream}).to_string()
}
