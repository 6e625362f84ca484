//! The one HTTP stack towards engines: pooled, with rustls, without redirects, every wait bounded.
//!
//! Invariant: no wait on an engine is endless and no body is unbounded; dropping a request or a
//! body closes its connection, which is how an engine learns that nobody waits any more; and only
//! an inference request is sent a second time, over a new connection, where a pooled one ended
//! before any byte of the answer.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::header::{AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderValue};
use http::{Extensions, Request, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use tokio::time::{Instant, timeout, timeout_at};

use super::connection::{Connector, Heard};
use super::endpoints::EngineUrl;
use super::secret::Secret;

/// Largest body that is collected, in bytes. `/openapi.json` of vLLM 0.32.0 is about 0.3 MB and
/// `/metrics` less; a completion with logprobs can have tens of megabytes.
pub const BODY_BYTES_MAX: usize = 64 << 20;

/// As good as no limit, in a clock that can still add it: 30 years.
pub const NEVER: Duration = Duration::from_secs(86_400 * 365 * 30);

/// How long each wait on an engine may take; [`NEVER`]: as long as it does.
#[derive(Clone, Debug)]
pub struct Timeouts {
    /// TCP and TLS.
    pub connect: Duration,
    /// From the request to the first byte of the body. A paused engine answers a stream's header at
    /// once and then says nothing (observed, 0.32.0), so the header alone counts for nothing.
    pub first_byte: Duration,
    /// Between two chunks of a body. A terminated engine leaves its streams open and silent
    /// (observed, 0.32.0).
    pub idle: Duration,
    /// From the request to the last byte of an answer that is not streamed.
    pub unary: Duration,
    /// As `unary`, for a control call: `mode=wait` returns only when the engine has drained.
    pub control: Duration,
    /// As `unary`, for a look at the engine's state or description.
    pub probe: Duration,
    /// As `unary`, for a prompt's tokens: a long prompt on a busy engine takes longer than a look.
    pub tokenize: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(5),
            first_byte: Duration::from_secs(120),
            idle: Duration::from_secs(60),
            unary: Duration::from_secs(600),
            control: Duration::from_secs(120),
            probe: Duration::from_secs(5),
            tokenize: Duration::from_secs(15),
        }
    }
}

/// What went wrong between fak and an engine, by what is known of the request's fate.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No connection: the engine has seen nothing of the request.
    #[error("no connection to the engine")]
    Unreachable(#[source] BoxError),
    /// A wait ran out. The engine may or may not have acted.
    #[error("no {wait} from the engine within {after:?}")]
    TimedOut {
        /// What was waited for.
        wait: Wait,
        /// How long.
        after: Duration,
    },
    /// The connection broke after the request left. The engine may or may not have acted.
    #[error("the connection to the engine broke")]
    Cut(#[source] BoxError),
    /// The answer is larger than anything that is collected.
    #[error("the engine's answer exceeds {limit} bytes")]
    TooLarge {
        /// The limit.
        limit: usize,
    },
}

/// What a request waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// The first byte of an answer's body.
    FirstByte,
    /// The next chunk.
    NextChunk,
    /// The whole answer.
    WholeAnswer,
}

impl std::fmt::Display for Wait {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::FirstByte => "first byte",
            Self::NextChunk => "next chunk",
            Self::WholeAnswer => "whole answer",
        })
    }
}

/// A cause from the HTTP stack.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// The key cannot be sent as a header. Its text is not told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the API key holds a byte that no HTTP header can carry")]
pub struct BadKey;

type Http =
    hyper_util::client::legacy::Client<Connector<HttpsConnector<HttpConnector>>, Full<Bytes>>;

/// A client for one engine. Cheap to clone; clones share the pool.
#[derive(Clone, Debug)]
pub struct Client {
    http: Http,
    /// Keeps no connection: each request has a new one.
    fresh: Http,
    authorization: Option<HeaderValue>,
    timeouts: Timeouts,
}

/// A whole answer.
#[derive(Clone, Debug)]
pub struct Response {
    /// The status.
    pub status: StatusCode,
    /// The headers.
    pub headers: HeaderMap,
    /// The body, at most [`BODY_BYTES_MAX`].
    pub body: Bytes,
}

/// An answer whose body is still coming.
#[derive(Debug)]
pub struct Streaming {
    /// The status.
    pub status: StatusCode,
    /// The headers.
    pub headers: HeaderMap,
    /// The body.
    pub body: Body,
}

/// A body that is still coming. Dropping it closes the connection.
#[derive(Debug)]
pub struct Body {
    incoming: Incoming,
    first_byte_by: Option<Instant>,
    timeouts: Timeouts,
}

impl Client {
    /// A client that shows `key` to the engine.
    ///
    /// # Errors
    ///
    /// [`BadKey`] where `key` is no header value.
    pub fn new(key: Option<&Secret>, timeouts: Timeouts) -> Result<Self, BadKey> {
        let mut tcp = HttpConnector::new();
        tcp.set_connect_timeout(Some(timeouts.connect));
        tcp.set_nodelay(true);
        tcp.enforce_http(false);
        let tls = HttpsConnectorBuilder::new();
        // The system's roots, or those that SSL_CERT_FILE names; where there are none, Mozilla's.
        let tls = tls
            .with_native_roots()
            .unwrap_or_else(|_| HttpsConnectorBuilder::new().with_webpki_roots())
            .https_or_http()
            .enable_http1()
            .wrap_connector(tcp);
        let connector = Connector(tls);
        let fresh = hyper_util::client::legacy::Client::builder(TokioExecutor::new())
            .pool_max_idle_per_host(0)
            .build(connector.clone());
        let http = hyper_util::client::legacy::Client::builder(TokioExecutor::new())
            // Under the 5 s after which vLLM's server closes idle connections, so that none is used
            // while it dies.
            .pool_idle_timeout(Duration::from_secs(4))
            .pool_timer(TokioTimer::new())
            .build(connector);
        let authorization = key.map(authorization).transpose()?;
        Ok(Self { http, fresh, authorization, timeouts })
    }

    /// How long each wait may take.
    #[must_use]
    pub fn timeouts(&self) -> &Timeouts {
        &self.timeouts
    }

    /// Sends a request and collects its answer, whatever its status, within `within`.
    ///
    /// # Errors
    ///
    /// [`Error`]; an HTTP error status is an answer, not an error.
    pub async fn send(&self, request: Outgoing, within: Duration) -> Result<Response, Error> {
        let whole = async {
            let response = self.head(request).await.map_err(|failed| failed.error)?;
            let (parts, incoming) = response.into_parts();
            let body = collect(incoming).await?;
            Ok(Response { status: parts.status, headers: parts.headers, body })
        };
        timeout(within, whole)
            .await
            .unwrap_or(Err(Error::TimedOut { wait: Wait::WholeAnswer, after: within }))
    }

    /// Sends an inference request and returns as soon as the answer's header is there.
    ///
    /// Where it went over a pooled connection that ended before any byte of the answer, it is sent
    /// once more, over a new connection: engines close idle connections (vLLM after 5 s), and the
    /// request and the end may cross.
    ///
    /// # Errors
    ///
    /// [`Error`]; an HTTP error status is an answer, not an error.
    pub async fn open(&self, request: Outgoing) -> Result<Streaming, Error> {
        self.open_within(request, self.timeouts.first_byte).await
    }

    /// As [`open`](Self::open), with `after` for the header and the body's first byte: an answer
    /// that is not streamed begins only when all of it is there.
    ///
    /// # Errors
    ///
    /// [`Error`]
    pub async fn open_within(
        &self,
        request: Outgoing,
        after: Duration,
    ) -> Result<Streaming, Error> {
        let first_byte_by = Instant::now() + after;
        let response = timeout_at(first_byte_by, self.head_or_again(request))
            .await
            .map_err(|_| Error::TimedOut { wait: Wait::FirstByte, after })??;
        let (parts, incoming) = response.into_parts();
        let timeouts = Timeouts { first_byte: after, ..self.timeouts.clone() };
        let body = Body { incoming, first_byte_by: Some(first_byte_by), timeouts };
        Ok(Streaming { status: parts.status, headers: parts.headers, body })
    }

    async fn head_or_again(&self, request: Outgoing) -> Result<http::Response<Incoming>, Error> {
        let again = request.clone().into_http(self.authorization.as_ref());
        let failed = match self.head(request).await {
            Ok(response) => return Ok(response),
            Err(failed) => failed,
        };
        if !failed.is_stale {
            return Err(failed.error);
        }
        tracing::debug!(error = %failed.error, "a pooled connection had ended: a new one is used");
        // The first sending may have arrived, so a refusal does not mean that nothing was seen.
        self.fresh.request(again).await.map_err(|error| Error::Cut(error.into()))
    }

    async fn head(&self, request: Outgoing) -> Result<http::Response<Incoming>, Failed> {
        self.http.request(request.into_http(self.authorization.as_ref())).await.map_err(|error| {
            let mut extras = Extensions::new();
            if let Some(connected) = error.connect_info() {
                connected.get_extras(&mut extras);
            }
            let is_stale = extras.get::<Heard>().is_some_and(Heard::is_stale);
            if error.is_connect() {
                Failed { error: Error::Unreachable(error.into()), is_stale: false }
            } else {
                Failed { error: Error::Cut(error.into()), is_stale }
            }
        })
    }
}

/// No answer's header came.
struct Failed {
    error: Error,
    /// The connection had served a request before, and brought nothing for this one.
    is_stale: bool,
}

impl Body {
    /// The next bytes, never empty; `None` at the end.
    ///
    /// # Errors
    ///
    /// [`Error::TimedOut`] where the engine stays silent, [`Error::Cut`] where the connection
    /// breaks.
    pub async fn chunk(&mut self) -> Result<Option<Bytes>, Error> {
        let (deadline, wait, after) = match self.first_byte_by {
            Some(deadline) => (deadline, Wait::FirstByte, self.timeouts.first_byte),
            None => (Instant::now() + self.timeouts.idle, Wait::NextChunk, self.timeouts.idle),
        };
        let next = timeout_at(deadline, next_data(&mut self.incoming));
        let chunk = next.await.map_err(|_| Error::TimedOut { wait, after })??;
        self.first_byte_by = None;
        Ok(chunk)
    }

    /// What is left, for a part that relays it and bounds its waits itself.
    pub fn into_incoming(self) -> Incoming {
        self.incoming
    }

    /// Collects what is left, for an answer that turned out to be no stream.
    ///
    /// # Errors
    ///
    /// [`Error`], with the whole of it bound by the time for an answer that is not streamed.
    pub async fn collect(self) -> Result<Bytes, Error> {
        let after = self.timeouts.unary;
        timeout(after, collect(self.incoming))
            .await
            .unwrap_or(Err(Error::TimedOut { wait: Wait::WholeAnswer, after }))
    }
}

/// A request to an engine.
#[derive(Clone, Debug)]
pub struct Outgoing {
    url: EngineUrl,
    headers: HeaderMap,
    body: Option<Bytes>,
}

impl Outgoing {
    /// A request to `url`, with the method that belongs to it.
    #[must_use]
    pub fn to(url: EngineUrl) -> Self {
        Self { url, headers: HeaderMap::new(), body: None }
    }

    /// Sends `body` as JSON.
    #[must_use]
    pub fn json(mut self, body: Bytes) -> Self {
        self.headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        self.body = Some(body);
        self
    }

    /// Sends `body`, whose type is among the headers.
    #[must_use]
    pub fn body(mut self, body: Bytes) -> Self {
        self.body = Some(body);
        self
    }

    /// Sends these headers too. An `authorization` among them is dropped: the engine gets its own
    /// key and no other.
    #[must_use]
    pub fn headers(mut self, headers: HeaderMap) -> Self {
        self.headers.extend(headers);
        self
    }

    fn into_http(self, authorization: Option<&HeaderValue>) -> Request<Full<Bytes>> {
        let mut request = Request::new(Full::new(self.body.unwrap_or_default()));
        *request.method_mut() = self.url.method().clone();
        *request.uri_mut() = self.url.uri().clone();
        *request.headers_mut() = self.headers;
        request.headers_mut().remove(AUTHORIZATION);
        if let (true, Some(value)) = (self.url.takes_key(), authorization) {
            request.headers_mut().insert(AUTHORIZATION, value.clone());
        }
        request
    }
}

fn authorization(key: &Secret) -> Result<HeaderValue, BadKey> {
    let mut value =
        HeaderValue::try_from(format!("Bearer {}", key.expose())).map_err(|_| BadKey)?;
    value.set_sensitive(true);
    Ok(value)
}

async fn next_data(incoming: &mut Incoming) -> Result<Option<Bytes>, Error> {
    while let Some(frame) = incoming.frame().await {
        match frame.map_err(|error| Error::Cut(error.into()))?.into_data() {
            Ok(data) if !data.is_empty() => return Ok(Some(data)),
            Ok(_) | Err(_) => {}
        }
    }
    Ok(None)
}

async fn collect(mut incoming: Incoming) -> Result<Bytes, Error> {
    let mut body = BytesMut::new();
    while let Some(data) = next_data(&mut incoming).await? {
        if body.len() + data.len() > BODY_BYTES_MAX {
            return Err(Error::TooLarge { limit: BODY_BYTES_MAX });
        }
        body.extend_from_slice(&data);
    }
    Ok(body.freeze())
}
