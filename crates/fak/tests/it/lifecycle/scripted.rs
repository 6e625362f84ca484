//! An owner over an engine that plays a script.

use std::sync::Arc;

use fak::engine::{Client, Endpoints, Engine, Timeouts};
use fak::events::recorder::Recorder;
use fak::events::stream::Handle;
use fak::fleet::{Door, Fleet, State, Worker};
use fak::lifecycle::Lifecycle;
use fak::runtime::TaskGroup;
use fak::store::Store;
use fak_index::{Index, Limits};

use crate::engine::peer::{self, Peer, Reply, Request};
use crate::owners;

pub(crate) struct Scripted {
    pub(crate) lifecycle: Lifecycle,
    fleet: Fleet,
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
        let scripted = Self { lifecycle, fleet, _peer: peer, _tasks: tasks };
        scripted.look().await;
        scripted
    }

    pub(crate) async fn look(&self) {
        self.lifecycle.look("w").await.unwrap();
    }

    pub(crate) fn state(&self) -> Arc<State> {
        Arc::clone(&self.fleet.snapshot().get("w").unwrap().state)
    }

    pub(crate) async fn rank(&self) -> Handle {
        self.lifecycle.ranks("w").await.unwrap().remove(0)
    }
}

/// An engine that is awake and has nothing to do, of which no more is told than has to be.
pub(crate) fn idle(request: &Request) -> Reply {
    let json = |body: &str| Reply::Send(peer::json("200 OK", body));
    match request.line() {
        "GET /metrics" => {
            let text = "process_start_time_seconds 1000.5\n\
                        vllm:num_requests_running{engine=\"0\"} 0\n";
            Reply::Send(peer::answer("200 OK", "text/plain", text))
        }
        "GET /version" => json(r#"{"version":"0.32.0"}"#),
        "GET /v1/models" => json(r#"{"object":"list","data":[{"id":"tiny"}]}"#),
        "GET /is_paused" => json(r#"{"is_paused":false}"#),
        "GET /is_sleeping" => json(r#"{"is_sleeping":false}"#),
        "GET /health" => json(""),
        _ => Reply::Send(peer::json("404 Not Found", r#"{"detail":"Not Found"}"#)),
    }
}
