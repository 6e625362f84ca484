//! The engine's HTTP surface: connections, routing, and the shapes that all answers share.
//! Invariant: a path that the profile does not know is 404, a known path with another method is
//! 405, both with the recorded bodies; nothing is answered after the life has ended.

mod chat;
mod completions;
mod control;
mod fields;
mod generate;
mod info;
mod stream;

use std::convert::Infallible;
use std::sync::Arc;

use bytes::Bytes;
use http::header::{ALLOW, AUTHORIZATION, CONTENT_TYPE, SERVER};
use http::{HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinSet;

use crate::faults::RouteFault;
use crate::life::Life;

pub(crate) type Body = UnsyncBoxBody<Bytes, Infallible>;
pub(crate) type Answer = Response<Body>;

/// Bodies beyond this are refused; far above any prompt of the simulated model.
const BODY_BYTES_MAX: usize = 32 << 20;

/// Paths that need the API key (`middleware/authenticate.py`).
const GUARDED: [&str; 4] = ["/v1", "/v2", "/inference", "/cohere"];

/// Accepts connections until the life ends; then every connection is cut.
pub(crate) async fn serve(life: Arc<Life>, listener: TcpListener) {
    let (stop, closing) = (life.stop.clone(), life.closing.clone());
    let mut connections = JoinSet::new();
    loop {
        let stream = tokio::select! {
            biased;
            () = closing.cancelled() => break,
            accepted = listener.accept() => accepted,
            Some(_) = connections.join_next() => continue,
        };
        let Ok((stream, _)) = stream else { continue };
        // Each event of a stream is a packet, as uvicorn sends it.
        let _ = stream.set_nodelay(true);
        let life = Arc::clone(&life);
        connections.spawn(async move {
            let service = service_fn(move |request| {
                let life = Arc::clone(&life);
                async move { Ok::<_, Infallible>(answer(life, request).await) }
            });
            let connection = hyper::server::conn::http1::Builder::new()
                .serve_connection(TokioIo::new(stream), service);
            // A client that goes away in the middle is no event of the engine's.
            let _ = connection.await;
        });
    }
    drop(listener);
    stop.cancelled().await;
    connections.shutdown().await;
}

/// A request whose body has been read.
pub(crate) struct Call {
    pub(crate) method: Method,
    pub(crate) path: String,
    pub(crate) query: Vec<(String, String)>,
    pub(crate) headers: http::HeaderMap,
    pub(crate) body: Bytes,
}

impl Call {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).and_then(|value| value.to_str().ok())
    }
}

async fn answer(life: Arc<Life>, request: Request<Incoming>) -> Answer {
    let (parts, body) = request.into_parts();
    let Ok(body) = Limited::new(body, BODY_BYTES_MAX).collect().await else {
        return empty(StatusCode::PAYLOAD_TOO_LARGE);
    };
    let query = parts.uri.query().unwrap_or_default();
    let call = Call {
        method: parts.method,
        path: parts.uri.path().to_owned(),
        query: fields::parse_query(query),
        headers: parts.headers,
        body: body.to_bytes(),
    };
    let mut answer = faulty(&life, call).await;
    answer.headers_mut().insert(SERVER, HeaderValue::from_static("uvicorn"));
    answer
}

async fn faulty(life: &Arc<Life>, call: Call) -> Answer {
    let fault = life.faults.take_route(&call.path);
    match fault {
        Some(RouteFault::Hang) => std::future::pending().await,
        Some(RouteFault::Fail(status)) => failure(status),
        Some(RouteFault::FailAfter(status)) => {
            drop(route(life, call).await);
            failure(status)
        }
        Some(RouteFault::EmptyBody) => {
            drop(route(life, call).await);
            empty(StatusCode::OK)
        }
        Some(RouteFault::As(query)) => {
            let owned = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
            route(life, Call { query: query.iter().map(owned).collect(), ..call }).await
        }
        Some(RouteFault::Pretend) => json_answer(StatusCode::OK, &json!({"success": true})),
        Some(RouteFault::Decline) => json_answer(StatusCode::OK, &json!({"success": false})),
        None => route(life, call).await,
    }
}

fn failure(status: u16) -> Answer {
    let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    ApiError::new(status, "InternalServerError", "scripted fault").into()
}

async fn route(life: &Arc<Life>, call: Call) -> Answer {
    if let Some(key) = &life.config.api_key
        && GUARDED.iter().any(|prefix| call.path.starts_with(prefix))
        && !is_bearer(call.headers.get(AUTHORIZATION), key)
    {
        return json_answer(StatusCode::UNAUTHORIZED, &json!({"error": "Unauthorized"}));
    }
    let Some(method) = method_of(life, &call.path) else {
        return json_answer(StatusCode::NOT_FOUND, &json!({"detail": "Not Found"}));
    };
    // SageMaker's ping takes both.
    let is_ping = call.path == "/ping" && call.method == Method::POST;
    if call.method != method && !is_ping {
        let detail = json!({"detail": "Method Not Allowed"});
        let mut answer = json_answer(StatusCode::METHOD_NOT_ALLOWED, &detail);
        let allowed = if method == Method::GET { "GET" } else { "POST" };
        answer.headers_mut().insert(ALLOW, HeaderValue::from_static(allowed));
        return answer;
    }
    let result = match call.path.as_str() {
        "/v1/completions" => completions::create(life, &call).await,
        "/v1/chat/completions" => chat::create(life, &call).await,
        path if control::is_route(path) => control::call(life, &call).await,
        _ => info::call(life, &call),
    };
    result.unwrap_or_else(Answer::from)
}

fn is_bearer(header: Option<&HeaderValue>, key: &str) -> bool {
    header
        .and_then(|value| value.to_str().ok())
        .and_then(|value| value.split_once(' '))
        .is_some_and(|(scheme, token)| scheme.eq_ignore_ascii_case("bearer") && token == key)
}

/// The one method of a known path.
fn method_of(life: &Life, path: &str) -> Option<Method> {
    let post = match path {
        "/v1/completions" | "/v1/chat/completions" | "/tokenize" | "/detokenize" => true,
        "/v1/models" | "/health" | "/ping" | "/version" | "/load" | "/metrics"
        | "/openapi.json" => false,
        "/kv_event_sources" if life.traits.has_kv_event_sources => false,
        "/is_scaling_elastic_ep" => true,
        "/v1/completions/render" | "/v1/chat/completions/render" | "/inference/v1/generate"
            if life.traits.has_kv_event_sources =>
        {
            true
        }
        _ => return control::method_of(life, path),
    };
    Some(if post { Method::POST } else { Method::GET })
}

/// An error in the engine's envelope.
#[derive(Clone, Debug)]
pub(crate) struct ApiError {
    pub(crate) status: StatusCode,
    pub(crate) kind: &'static str,
    pub(crate) message: String,
    pub(crate) param: Option<String>,
}

impl ApiError {
    pub(crate) fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        Self { status, kind, message: message.into(), param: None }
    }

    pub(crate) fn bad_request(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "BadRequestError", message)
    }

    /// A refused parameter; the message ends as vLLM's do.
    pub(crate) fn parameter(message: &str, name: &str, value: Option<String>) -> Self {
        let value = value.map_or(String::new(), |value| format!(", value={value}"));
        let mut error = Self::bad_request(format!("{message} (parameter={name}{value})"));
        error.param = Some(name.to_owned());
        error
    }

    pub(crate) fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "InternalServerError", message)
    }

    /// What requests in flight get when the engine dies.
    pub(crate) fn engine_dead() -> Self {
        Self::internal(
            "EngineCore encountered an issue. See stack trace (above) for the root cause.",
        )
    }

    pub(crate) fn envelope(&self) -> Value {
        json!({"error": {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.status.as_u16(),
        }})
    }
}

impl From<ApiError> for Answer {
    fn from(error: ApiError) -> Self {
        json_answer(error.status, &error.envelope())
    }
}

pub(crate) fn ok(body: &Value) -> Answer {
    json_answer(StatusCode::OK, body)
}

pub(crate) fn json_answer(status: StatusCode, body: &Value) -> Answer {
    with_body(status, "application/json", body.to_string())
}

pub(crate) fn empty(status: StatusCode) -> Answer {
    let mut answer = Response::new(full(Bytes::new()));
    *answer.status_mut() = status;
    answer
}

pub(crate) fn with_body(status: StatusCode, kind: &'static str, body: String) -> Answer {
    let mut answer = Response::new(full(body.into()));
    *answer.status_mut() = status;
    answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    answer
}

fn full(bytes: Bytes) -> Body {
    Full::new(bytes).boxed_unsync()
}
