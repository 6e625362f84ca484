//! What stands between fak and an engine and holds a call back, before the engine sees it or when
//! its answer is there.

use std::convert::Infallible;
use std::future::Future;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use fak::runtime::{OnExit, TaskGroup};
use http::{Request, Response};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::TcpListener;
use tokio::sync::watch;

use super::process::within;

/// Where calls are held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hold {
    /// The engine has seen nothing of them.
    Before,
    /// The engine has done them and has answered.
    After,
}

/// A peer in front of one engine.
pub(crate) struct Peer {
    pub(crate) url: String,
    shared: Arc<Shared>,
    _tasks: TaskGroup,
}

struct Shared {
    engine: String,
    http: Client<HttpConnector, Full<Bytes>>,
    /// Which paths, by how they begin, and where.
    hold: watch::Sender<Option<(&'static str, Hold)>>,
    held: watch::Sender<usize>,
    go: watch::Sender<usize>,
    looks: watch::Sender<usize>,
    /// Control calls, by path and query.
    calls: Mutex<Vec<String>>,
}

impl Peer {
    pub(crate) async fn before(engine: String) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let shared = Arc::new(Shared {
            engine,
            http: Client::builder(TokioExecutor::new()).build_http(),
            hold: watch::Sender::new(None),
            held: watch::Sender::new(0),
            go: watch::Sender::new(0),
            looks: watch::Sender::new(0),
            calls: Mutex::default(),
        });
        let mut tasks = TaskGroup::new();
        tasks.spawn("peer", OnExit::Report, listen(listener, Arc::clone(&shared)));
        Self { url, shared, _tasks: tasks }
    }

    /// Holds what comes from here on for paths that begin so.
    pub(crate) fn hold(&self, path: &'static str, hold: Hold) {
        self.shared.hold.send_replace(Some((path, hold)));
    }

    /// Waits until something was held.
    pub(crate) async fn held(&self) {
        let mut held = self.shared.held.subscribe();
        within("a held call", held.wait_for(|count| *count > 0)).await.unwrap();
    }

    /// Holds nothing any more, and lets go on what was held.
    pub(crate) fn release(&self) {
        self.shared.hold.send_replace(None);
        self.shared.go.send_modify(|releases| *releases += 1);
    }

    /// Holds nothing any more. What was held stays so, whoever waits for it.
    pub(crate) fn lose(&self) {
        self.shared.hold.send_replace(None);
    }

    /// The control calls that came so far.
    pub(crate) fn calls(&self) -> Vec<String> {
        self.shared.calls.lock().unwrap().clone()
    }

    /// Waits until a look at the engine is answered that begins after `begin` does.
    pub(crate) async fn looked_at_after(&self, begin: impl Future<Output = ()>) {
        let mut looks = self.shared.looks.subscribe();
        looks.mark_unchanged();
        let before = *looks.borrow();
        tokio::select! {
            biased;
            () = begin => panic!("it ended before"),
            looked = within("a look", looks.wait_for(|count| *count >= before + LOOK)) => {
                looked.unwrap();
            }
        }
    }
}

/// Requests of one look: two flags, the metrics, the weights and the health.
const LOOK: usize = 5;

async fn listen(listener: TcpListener, shared: Arc<Shared>) {
    let mut connections = TaskGroup::new();
    while let Ok((stream, _)) = listener.accept().await {
        stream.set_nodelay(true).unwrap();
        let shared = Arc::clone(&shared);
        connections.spawn("connection", OnExit::Expected, async move {
            let service = service_fn(|request| {
                let shared = Arc::clone(&shared);
                async move { Ok::<_, Infallible>(shared.pass(request).await) }
            });
            // fak's end of it may go at any time.
            let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
        });
    }
}

impl Shared {
    async fn pass(&self, request: Request<Incoming>) -> Response<Full<Bytes>> {
        let (mut parts, body) = request.into_parts();
        let path = parts.uri.path().to_owned();
        let body = body.collect().await.unwrap().to_bytes();
        let is_look = parts.method == http::Method::GET;
        if !is_look && !path.starts_with("/v1/") {
            self.calls.lock().unwrap().push(parts.uri.to_string());
        }
        let hold = *self.hold.borrow();
        let hold = hold.filter(|(held, _)| path.starts_with(held)).map(|(_, hold)| hold);
        if hold == Some(Hold::Before) {
            self.released().await;
        }
        parts.uri = format!("{}{}", self.engine, parts.uri).parse().unwrap();
        let answer = self.http.request(Request::from_parts(parts, Full::new(body))).await.unwrap();
        let (parts, body) = answer.into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        if hold == Some(Hold::After) {
            self.released().await;
        }
        self.looks.send_modify(|looks| *looks += usize::from(is_look));
        Response::from_parts(parts, Full::new(body))
    }

    async fn released(&self) {
        let mut go = self.go.subscribe();
        self.held.send_modify(|count| *count += 1);
        // The peer outlives its connections.
        let _ = go.changed().await;
    }
}
