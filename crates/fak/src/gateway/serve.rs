//! The listener: connections taken, served and, when fak stops, let go.
//!
//! Invariant: while a stop is announced everything is served, and each answer closes its
//! connection; the stop takes no new connection and no new request, lets what runs end within its
//! time, and then ends it; the number of connections and the size of a request's head are bounded.

use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONNECTION, HeaderValue};
use http::{Request, Response};
use hyper::body::{Body, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::relay::Cutoff;
use crate::engine::BoxError;
use crate::runtime::{OnExit, Shutdown, TaskGroup};

/// Connections that may wait to be taken; fewer cost a second each in a burst (a lost SYN).
const BACKLOG: u32 = 4096;
/// Connections that end between two countings.
const REAP_EVERY: usize = 64;
/// Pause after the system refused a connection, for want of descriptors or memory.
const REFUSED_PAUSE: Duration = Duration::from_millis(50);
/// Time for what was cut off to be written and read.
const FAREWELL: Duration = Duration::from_secs(1);

/// Bounds on connections.
#[derive(Clone, Debug)]
pub struct ServeConfig {
    /// Connections at once; further ones wait in the backlog.
    pub connections_max: usize,
    /// Bytes of a request's head.
    pub head_bytes_max: usize,
    /// Time for a head to come whole. An idle connection is closed after it too.
    pub head_within: Duration,
    /// Time for requests in flight to end, once the stop was asked for.
    pub drain: Duration,
}

impl Default for ServeConfig {
    fn default() -> Self {
        Self {
            connections_max: 32_768,
            head_bytes_max: 64 << 10,
            head_within: Duration::from_secs(60),
            drain: Duration::from_secs(30),
        }
    }
}

/// How a listener ends, step by step.
#[derive(Clone, Debug)]
pub struct Ends {
    /// It will stop soon: who keeps a connection is to open the next one elsewhere.
    pub announced: Shutdown,
    /// It stops.
    pub stop: Shutdown,
    /// Gives streams their last event.
    pub cutoff: Cutoff,
}

/// Listens at `address`.
///
/// # Errors
/// The address cannot be bound.
pub fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    // A restart takes the port while connections of the old process linger.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Serves until told to stop, then drains: no new connection or request, `config.drain` for those
/// in flight, then the cutoff. Returns how many connections had
/// to be aborted.
pub async fn serve<S, F, B>(
    listener: TcpListener,
    service: S,
    config: ServeConfig,
    ends: Ends,
) -> usize
where
    S: Fn(Request<Incoming>) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = Response<B>> + Send + 'static,
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    let slots = Arc::new(Semaphore::new(config.connections_max.min(Semaphore::MAX_PERMITS)));
    let (soft, hard) = (CancellationToken::new(), CancellationToken::new());
    let mut connections = TaskGroup::new();
    let mut since_reaped = 0;
    let protocol = protocol(&config);
    let closes = Arc::new(AtomicBool::new(false));
    loop {
        let accepted = tokio::select! {
            () = ends.stop.requested() => break,
            () = ends.announced.requested(), if !closes.load(Ordering::Relaxed) => {
                closes.store(true, Ordering::Release);
                continue;
            }
            accepted = accept(&listener, &slots) => accepted,
        };
        let (stream, slot) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "no connection could be taken");
                sleep(REFUSED_PAUSE).await;
                continue;
            }
        };
        let (service, protocol, closes) = (service.clone(), protocol.clone(), Arc::clone(&closes));
        // A token of its own each: waiting for a shared one would take its lock at every poll.
        let ends = (soft.child_token(), hard.child_token());
        connections.spawn("connection", OnExit::Expected, async move {
            let _slot = slot;
            converse(stream, service, protocol, closes, ends).await;
        });
        since_reaped += 1;
        if since_reaped >= REAP_EVERY {
            connections.reap();
            since_reaped = 0;
        }
    }
    drop(listener);
    soft.cancel();
    let all = u32::try_from(config.connections_max).unwrap_or(u32::MAX);
    if timeout(config.drain, slots.acquire_many(all)).await.is_err() {
        ends.cutoff.cut();
        hard.cancel();
        // Whatever is left then is aborted below.
        let _ = timeout(FAREWELL, slots.acquire_many(all)).await;
    }
    connections.stop(Duration::ZERO).await
}

async fn accept(
    listener: &TcpListener,
    slots: &Arc<Semaphore>,
) -> io::Result<(TcpStream, tokio::sync::OwnedSemaphorePermit)> {
    let slot = Arc::clone(slots).acquire_owned().await.map_err(io::Error::other)?;
    let (stream, _) = listener.accept().await?;
    // Or a delayed acknowledgement holds each chunk of a stream for 40 ms.
    stream.set_nodelay(true)?;
    Ok((stream, slot))
}

fn protocol(config: &ServeConfig) -> http1::Builder {
    let mut protocol = http1::Builder::new();
    protocol
        .timer(TokioTimer::new())
        .header_read_timeout(config.head_within)
        .max_header_size(config.head_bytes_max);
    protocol
}

/// Serves one connection to its end: to that of its next answer, once it closes.
async fn converse<S, F, B>(
    stream: TcpStream,
    service: S,
    protocol: http1::Builder,
    closes: Arc<AtomicBool>,
    (soft, hard): (CancellationToken, CancellationToken),
) where
    S: Fn(Request<Incoming>) -> F,
    F: Future<Output = Response<B>>,
    B: Body<Data = Bytes> + 'static,
    B::Error: Into<BoxError>,
{
    let service = service_fn(|request| {
        let (answer, closes) = (service(request), &closes);
        async move {
            let mut answer = answer.await;
            if closes.load(Ordering::Acquire) {
                answer.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
            }
            Ok::<_, Infallible>(answer)
        }
    });
    let mut connection = pin!(protocol.serve_connection(TokioIo::new(stream), service));
    let ended = tokio::select! {
        biased;
        ended = connection.as_mut() => Some(ended),
        () = soft.cancelled() => None,
    };
    let ended = match ended {
        Some(ended) => ended,
        None => {
            connection.as_mut().graceful_shutdown();
            tokio::select! {
                biased;
                ended = connection.as_mut() => ended,
                // Woken, it is polled once more, and its stream sees the cutoff.
                () = hard.cancelled() => connection.await,
            }
        }
    };
    if let Err(error) = ended {
        // A client that leaves ends its connection so; that is not worth more than this.
        tracing::trace!(%error, "a connection ended");
    }
}
