//! An owner over an engine that plays a script.

use std::sync::Arc;

use fak::engine::{Client, Endpoints, Engine, Timeouts};
use fak::events::recorder::Recorder;
use fak::events::stream::Handle;
use fak::fleet::{Door, Fleet, State, Worker};
use fak::lifecycle::Lifecycle;
use fak::runtime::TaskGroup;
use fak::store::{Filter, Row, Store};
use fak_index::{Index, Limits};

use crate::engine::peer::{self, Peer, Reply, Request};
use crate::owners;

pub(crate) struct Scripted {
    pub(crate) lifecycle: Lifecycle,
    fleet: Fleet,
    store: Store,
    _peer: Peer,
    _tasks: TaskGroup,
}

impl Scripted {
    /// An owner that has looked once.
    pub(crate) async fn start(script: impl Fn(&Request) -> Reply + Send + Sync + 'static) -> Self {
        let peer = Peer::start(script).await;
        let client = Client::new(None, Timeouts::default()).unwrap();
        let engine = Engine::new(client, Endpoints::new(&peer.url()).unwrap());
        let fleet = Fleet::new([Worker { id: "w".into(), engine, door: Door::new() }]);
        let store = Store::open("sqlite::memory:").await.unwrap();
        let index = Arc::new(Index::new(7, Limits::default()));
        let recorder = Arc::new(Recorder::new(64));
        let (lifecycle, tasks) = owners::run(&owners::config(&fleet, &store, &index, &recorder));
        let scripted = Self { lifecycle, fleet, store, _peer: peer, _tasks: tasks };
        scripted.look().await;
        scripted
    }

    /// Another fak that starts anew on the same ledger, once it has looked.
    pub(crate) async fn second_fak(&mut self) {
        let worker = Arc::clone(&self.fleet.snapshot().workers[0].worker);
        let Worker { id, engine, .. } = &*worker;
        self.fleet =
            Fleet::new([Worker { id: id.clone(), engine: engine.clone(), door: Door::new() }]);
        let index = Arc::new(Index::new(7, Limits::default()));
        let recorder = Arc::new(Recorder::new(64));
        let config = owners::config(&self.fleet, &self.store, &index, &recorder);
        (self.lifecycle, self._tasks) = owners::run(&config);
        self.look().await;
    }

    pub(crate) async fn look(&self) {
        self.lifecycle.look("w").await.unwrap();
    }

    pub(crate) fn state(&self) -> Arc<State> {
        Arc::clone(&self.fleet.snapshot().get("w").unwrap().state)
    }

    pub(crate) async fn rows(&self) -> Vec<Row> {
        self.store.rows(&Filter::default()).await.unwrap()
    }

    pub(crate) async fn rank(&self) -> Handle {
        self.lifecycle.ranks("w").await.unwrap().remove(0)
    }
}

/// An engine that is awake and has nothing to do, of which no more is told than has to be.
pub(crate) fn idle(request: &Request) -> Reply {
    let json = |body: &str| Reply::Send(peer::json("200 OK", body));
    match request.line() {
        "GET /metrics" => started("1000.5"),
        "GET /version" => json(r#"{"version":"0.32.0"}"#),
        "GET /v1/models" => json(r#"{"object":"list","data":[{"id":"tiny"}]}"#),
        "GET /is_paused" => flags("is_paused", false),
        "GET /is_sleeping" => flags("is_sleeping", false),
        "GET /health" => json(""),
        _ => Reply::Send(peer::json("404 Not Found", r#"{"detail":"Not Found"}"#)),
    }
}

/// A scrape of an idle engine that was started then.
pub(crate) fn started(start: &str) -> Reply {
    let text = format!(
        "process_start_time_seconds {start}\nvllm:num_requests_running{{engine=\"0\"}} 0\n"
    );
    Reply::Send(peer::answer("200 OK", "text/plain", &text))
}

/// The same, with the metric of its sleep in this state.
pub(crate) fn sleep_metric(state: &str) -> Reply {
    let of = |word: &str| {
        let value = u8::from(word == state);
        format!("vllm:engine_sleep_state{{engine=\"0\",sleep_state=\"{word}\"}} {value}\n")
    };
    let states: String = ["awake", "weights_offloaded", "discard_all"].map(of).concat();
    let text = format!(
        "process_start_time_seconds 1000.5\nvllm:num_requests_running{{engine=\"0\"}} 0\n{states}"
    );
    Reply::Send(peer::answer("200 OK", "text/plain", &text))
}

/// A flag's answer.
pub(crate) fn flags(name: &str, is_set: bool) -> Reply {
    Reply::Send(peer::json("200 OK", &format!(r#"{{"{name}":{is_set}}}"#)))
}
