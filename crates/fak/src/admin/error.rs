//! Errors of the control API: one JSON shape.
//!
//! Invariant: `{"error":{"message","code","param"}}`, with a closed code, and beside it what helps
//! to go on: the witness row, or the sessions in the way.

use axum::Json;
use axum::response::{IntoResponse, Response};
use fak_kernel::witness::Reason;
use http::StatusCode;
use http::header::CONTENT_TYPE;
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::lifecycle::{self, Ending};
use crate::store;

/// What went wrong.
#[derive(Debug)]
pub(super) struct Error {
    status: StatusCode,
    code: &'static str,
    message: String,
    param: Option<String>,
    beside: Vec<(&'static str, Value)>,
}

impl Error {
    pub(super) fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        let (message, param, beside) = (message.into(), None, Vec::new());
        Self { status, code, message, param, beside }
    }

    /// A filter's value that is none.
    pub(super) fn filter(name: &str, value: &str, expected: &str) -> Self {
        let message = format!("{name} has to be {expected}, not {:?}", shown(value));
        Self::bad("invalid_option", name, message)
    }

    /// An action that ended so for this reason, and not as asked. A worker that waits for its
    /// weights is no 5xx: clients repeat those, and no repeat loads weights.
    pub(super) fn undone(ending: Ending, reason: &str, message: impl Into<String>) -> Self {
        let waits = Reason::WeightsNotProven.as_str();
        match ending {
            Ending::Refused => Self::new(StatusCode::CONFLICT, "refused", message),
            Ending::Failed if reason == waits => Self::new(StatusCode::CONFLICT, waits, message),
            Ending::Done | Ending::Failed => Self::new(StatusCode::BAD_GATEWAY, "failed", message),
        }
    }

    /// An action on several workers, by how and why it ended on each; none where all are done. It
    /// is refused only where nothing failed: then those that are not done are as they were.
    pub(super) fn partial(ends: &[(Ending, &str)]) -> Option<Self> {
        let (done, of) = (ends.iter().filter(|end| end.0 == Ending::Done).count(), ends.len());
        // What failed otherwise than by waiting for weights outweighs that, and that a refusal.
        let weight = |(ending, reason): &&(Ending, &str)| match ending {
            Ending::Done => 0,
            Ending::Refused => 1,
            Ending::Failed if *reason == Reason::WeightsNotProven.as_str() => 2,
            Ending::Failed => 3,
        };
        let (ending, reason) = ends.iter().max_by_key(weight).filter(|_| done < of)?;
        Some(Self::undone(*ending, reason, format!("done on {done} of {of} workers")))
    }

    /// A request that cannot be read, and the part of it that is at fault.
    pub(super) fn bad(
        code: &'static str,
        param: impl Into<String>,
        message: impl Into<String>,
    ) -> Self {
        Self { param: Some(param.into()), ..Self::new(StatusCode::BAD_REQUEST, code, message) }
    }

    pub(super) fn unknown(code: &'static str, what: &str, id: &str) -> Self {
        Self::new(StatusCode::NOT_FOUND, code, format!("no {what} is called `{id}`"))
    }

    /// The same, with `value` beside it in the body.
    pub(super) fn with(mut self, name: &'static str, value: impl Serialize) -> Self {
        // What is shown is of this crate's own types, none of which fails to serialise.
        let value = serde_json::to_value(value).unwrap_or(Value::Null);
        self.beside.push((name, value));
        self
    }

    pub(super) fn status(&self) -> StatusCode {
        self.status
    }

    pub(super) fn message(&self) -> &str {
        &self.message
    }
}

impl IntoResponse for Error {
    fn into_response(self) -> Response {
        let Self { status, code, message, param, beside } = self;
        let mut body = Map::new();
        let error = json!({ "message": message, "code": code, "param": param });
        body.insert("error".to_owned(), error);
        body.extend(beside.into_iter().map(|(name, value)| (name.to_owned(), value)));
        (status, Json(body)).into_response()
    }
}

impl From<store::Error> for Error {
    fn from(error: store::Error) -> Self {
        let error = error.explained();
        tracing::error!(error, "the store failed a request");
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "store_failed", error)
    }
}

impl From<lifecycle::Error> for Error {
    fn from(error: lifecycle::Error) -> Self {
        match error {
            lifecycle::Error::UnknownWorker(id) => Self::unknown("unknown_worker", "worker", &id),
            lifecycle::Error::Store(error) => error.into(),
            lifecycle::Error::Stopped => {
                Self::new(StatusCode::SERVICE_UNAVAILABLE, "stopping", "fak is stopping")
            }
            error @ lifecycle::Error::NothingToCancel { .. } => {
                Self::new(StatusCode::CONFLICT, "refused", error.to_string())
            }
            error @ lifecycle::Error::Unwritten => {
                Self::new(StatusCode::SERVICE_UNAVAILABLE, "store_failed", error.to_string())
            }
        }
    }
}

/// Gives what the web framework refuses by itself (a body that is too long, a path that is no text)
/// the shape of all other errors.
pub(super) async fn shaped(response: Response) -> Response {
    let status = response.status();
    let kind = response.headers().get(CONTENT_TYPE);
    let is_text = kind.is_some_and(|kind| kind.as_bytes().starts_with(b"text/plain"));
    if !status.is_client_error() || !is_text {
        return response;
    }
    let reason = status.canonical_reason().unwrap_or("bad request").to_lowercase();
    Error::new(status, "bad_request", reason).into_response()
}

pub(super) async fn method_not_allowed() -> Error {
    let message = "the path takes another method";
    Error::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message)
}

/// As much as is shown of what comes from a client.
pub(super) fn shown(text: &str) -> String {
    text.chars().take(64).collect()
}

pub(super) async fn not_found() -> Error {
    let message = "there is no such route; /openapi.json lists those of the control API";
    Error::new(StatusCode::NOT_FOUND, "route_not_found", message)
}
