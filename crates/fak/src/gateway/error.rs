//! What a client is told when it gets no answer: the one place where failures become error bodies.
//!
//! Invariant: every problem has a status, a closed code, a side and a word on retries, in the
//! protocol of the path that was asked; a client never reads the text of an internal error.

use std::time::Duration;

use bytes::Bytes;
use fak_wire::openai::{ErrorBody, ErrorCode, RequestError};
use http::header::{ACCEPT_ENCODING, ALLOW, CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use http::{Response, StatusCode};

use super::body::Body;
use super::headers;
use super::models::Nearest;
use crate::engine::{self, Data};
use crate::sessions::BadId;

/// Whose fault it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The request is wrong.
    Client,
    /// A worker failed, or none serves.
    Worker,
    /// fak has no room, or is stopping.
    Gateway,
}

/// Whose clients ask at a path, and so whose errors they read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Dialect {
    /// OpenAI's: `{"error":{..}}`.
    OpenAi,
    /// Anthropic's: `{"type":"error","error":{..}}`.
    Anthropic,
}

impl Dialect {
    /// That of `path`, whether or not it is served.
    pub(super) fn of_path(path: &str) -> Self {
        let below = path.strip_prefix(Data::Messages.path());
        match below {
            Some(rest) if rest.is_empty() || rest.starts_with('/') => Self::Anthropic,
            _ => Self::OpenAi,
        }
    }
}

/// Why a request gets no answer of an engine's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// A path that is not served.
    #[error("there is no such route")]
    NoRoute,
    /// Another method than the route takes.
    #[error("this route takes {0} alone")]
    Method(&'static str),
    /// A key is asked for, and none of those was given.
    #[error("a valid API key is needed, as a bearer token or as x-api-key")]
    Key,
    /// The body is larger than the limit, in bytes.
    #[error(
        "the body is larger than {0} bytes, the limit body_bytes_max of this gateway: send a \
         smaller one, or have the limit raised"
    )]
    BodyTooLarge(usize),
    /// The body is compressed.
    #[error(
        "the body has content-encoding {0:?}, and only bodies without one (identity) are taken: \
         turn compression of requests off"
    )]
    BodyEncoded(String),
    /// The body did not come whole.
    #[error("the body could not be read to its end")]
    BodyCut,
    /// The body came too slowly, or no more of it came.
    #[error(
        "the body stayed away for {} s, or came at less than {} bytes a second",
        super::body::SILENCE.as_secs(),
        super::body::BYTES_PER_SECOND_MIN
    )]
    BodySlow,
    /// Too many bytes of bodies wait already.
    #[error("the bodies of all requests in flight reach the limit bodies_bytes_max: ask again")]
    NoRoom,
    /// The body is not what the route takes.
    #[error("{0}")]
    Request(#[from] RequestError),
    /// The session's name is not one.
    #[error("{0}")]
    Session(#[from] BadId),
    /// The session is at rest.
    #[error(
        "session {id} is dormant: it was put to rest by {action}{}; {} brings it back",
        row(*.witness),
        undoing(.action)
    )]
    Dormant {
        /// Its name.
        id: String,
        /// What put it to rest.
        action: &'static str,
        /// The row of that action.
        witness: Option<u64>,
    },
    /// No worker serves that model.
    #[error("the model `{model}` does not exist; there is: {known}")]
    Model {
        /// The name that was asked for.
        model: String,
        /// Those that there are.
        known: String,
    },
    /// The request names no model, and workers serve several.
    #[error("name a model: this fleet serves {known}")]
    NoModel {
        /// Those that there are.
        known: String,
    },
    /// Workers serve the model, and none of them now.
    #[error("no worker can serve this now: the one nearest to serving is {nearest}")]
    NobodyServes {
        /// The worker that is nearest to serving.
        nearest: Nearest,
        /// When to ask again.
        retry_after: Duration,
    },
    /// The workers that serve the model may hold KV of other weights, and the request cannot be
    /// kept from it.
    #[error(
        "the workers may hold KV of other weights than they serve with, and this route takes no \
         cache salt that would keep a request from it: reset their tiers, or restart them"
    )]
    OtherWeights {
        /// When to ask again.
        retry_after: Duration,
    },
    /// As many requests wait for a worker as may.
    #[error("no worker can serve this now, and too many requests wait for one")]
    HoldFull {
        /// When to ask again.
        retry_after: Duration,
    },
    /// The route cannot be kept apart by tenant.
    #[error("this route is not offered where tenants are kept apart")]
    Isolation,
    /// No connection to the worker.
    #[error("the worker cannot be reached")]
    Unreachable,
    /// The worker said nothing for too long.
    #[error("the worker did not answer in time")]
    Silent,
    /// The connection to the worker broke.
    #[error("the connection to the worker broke")]
    Cut,
    /// Two workers were lost while they had the request.
    #[error(
        "two workers were lost while they had this request, before they answered: it is not sent \
         to another"
    )]
    WorkersLost,
    /// The worker stopped to serve before it answered, and another may.
    #[error("the worker stopped serving before it answered")]
    Left,
    /// The worker answered that it does not serve a model that it lists.
    #[error("the worker lists the model, and answers that it does not serve it")]
    Unlisted,
    /// The worker refused fak's key, or sent fak elsewhere.
    #[error(
        "the worker answered fak with {status}, which is no answer for a client: {}",
        refusals_remedy(*.status)
    )]
    Refused {
        /// The worker's.
        status: u16,
    },
    /// The worker ended the answer with an error before its first token.
    #[error("the worker ended its answer with an error before the first token")]
    Empty,
    /// The worker dropped the request before its first token.
    #[error("the worker dropped the request")]
    Dropped,
    /// The worker compressed a stream although it was asked not to, so that the usage that fak
    /// asked for could not be cut out of it.
    #[error(
        "the worker's stream has content-encoding {0:?}, where fak asked for identity: turn \
         compression of text/event-stream off between fak and the worker, or ask for \
         stream_options.include_usage"
    )]
    Encoded(String),
    /// fak is stopping.
    #[error("the gateway is stopping")]
    Stopping,
}

fn refusals_remedy(status: u16) -> &'static str {
    match status {
        401 => "check the key that fak has for its workers (FAK_VLLM_API_KEY)",
        403 => {
            "it may not offer this route (vLLM's render and generate routes need \
             --enable-scale-out), or refuse fak's key (FAK_VLLM_API_KEY)"
        }
        407 => "a proxy between fak and the worker asks for a login",
        _ => "check the worker's URL in fak's settings, since fak follows no redirect",
    }
}

fn undoing(action: &str) -> &'static str {
    if action == "pause" { "resume" } else { "wake" }
}

fn row(witness: Option<u64>) -> String {
    witness.map(|seq| format!(" (witness row {seq})")).unwrap_or_default()
}

impl Problem {
    /// The status of the answer.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        match self {
            Self::NoRoute | Self::Model { .. } => StatusCode::NOT_FOUND,
            Self::Method(_) => StatusCode::METHOD_NOT_ALLOWED,
            Self::Key => StatusCode::UNAUTHORIZED,
            Self::BodyTooLarge(_) => StatusCode::PAYLOAD_TOO_LARGE,
            Self::BodyEncoded(_) => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            Self::BodySlow => StatusCode::REQUEST_TIMEOUT,
            Self::BodyCut | Self::NoModel { .. } | Self::Request(_) | Self::Session(_) => {
                StatusCode::BAD_REQUEST
            }
            Self::Dormant { .. } => StatusCode::CONFLICT,
            Self::Isolation => StatusCode::FORBIDDEN,
            Self::NobodyServes { .. }
            | Self::OtherWeights { .. }
            | Self::HoldFull { .. }
            | Self::NoRoom
            | Self::Dropped
            | Self::Left
            | Self::Stopping => StatusCode::SERVICE_UNAVAILABLE,
            Self::Unreachable
            | Self::Cut
            | Self::WorkersLost
            | Self::Unlisted
            | Self::Refused { .. }
            | Self::Empty
            | Self::Encoded(_) => StatusCode::BAD_GATEWAY,
            Self::Silent => StatusCode::GATEWAY_TIMEOUT,
        }
    }

    /// The `code` of the error body: one of a closed list.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::NoRoute => "route_not_found",
            Self::Method(_) => "method_not_allowed",
            Self::Key => "invalid_api_key",
            Self::BodyTooLarge(_) => "body_too_large",
            Self::BodyEncoded(_) => "body_encoded",
            Self::BodyCut => "body_cut",
            Self::BodySlow => "body_slow",
            Self::NoRoom => "too_many_bytes_in_flight",
            Self::Request(_) => "invalid_request",
            Self::Session(_) => "invalid_session",
            Self::Dormant { .. } => "session_dormant",
            Self::Model { .. } => "model_not_found",
            Self::NoModel { .. } => "model_not_named",
            Self::NobodyServes { .. } => "no_serving_worker",
            Self::OtherWeights { .. } => "kv_of_other_weights",
            Self::HoldFull { .. } => "too_many_waiting",
            Self::Isolation => "isolation_not_offered",
            Self::Unreachable => "worker_unreachable",
            Self::Silent => "worker_silent",
            Self::Cut => "worker_connection_broke",
            Self::WorkersLost => "two_workers_lost",
            Self::Left => "worker_stopped_serving",
            Self::Unlisted => "worker_lacks_model",
            Self::Refused { .. } => "worker_refused",
            Self::Empty => "worker_answered_nothing",
            Self::Dropped => "worker_dropped_request",
            Self::Encoded(_) => "worker_answer_encoded",
            Self::Stopping => "stopping",
        }
    }

    /// Whose fault it is.
    #[must_use]
    pub fn side(&self) -> Side {
        match self {
            Self::NobodyServes { .. }
            | Self::OtherWeights { .. }
            | Self::Unreachable
            | Self::Silent
            | Self::Cut
            | Self::WorkersLost
            | Self::Left
            | Self::Unlisted
            | Self::Refused { .. }
            | Self::Empty
            | Self::Dropped
            | Self::Encoded(_) => Side::Worker,
            Self::HoldFull { .. } | Self::NoRoom | Self::Stopping => Side::Gateway,
            _ => Side::Client,
        }
    }

    /// Whether another worker may do better, where nothing was sent to the client.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(
            self,
            Self::Unreachable
                | Self::Silent
                | Self::Cut
                | Self::Dropped
                | Self::Left
                | Self::Unlisted
                | Self::Refused { .. }
                | Self::Empty
        )
    }

    /// False where the same request again can only do harm: OpenAI's clients repeat a 409, a 502
    /// and a 504 by themselves, unless the answer says not to (openai-python, `_should_retry`).
    fn should_retry(&self) -> bool {
        !matches!(
            self,
            Self::Dormant { .. } | Self::Silent | Self::WorkersLost | Self::Refused { .. }
        )
    }

    fn kind(&self) -> &'static str {
        match self.side() {
            Side::Client => match self {
                Self::NoRoute | Self::Model { .. } => "NotFoundError",
                Self::Key => "AuthenticationError",
                _ => "BadRequestError",
            },
            Side::Worker | Side::Gateway => "ServiceUnavailableError",
        }
    }

    fn param(&self) -> Option<&'static str> {
        match self {
            Self::Request(error) => error.param(),
            Self::Model { .. } | Self::NoModel { .. } => Some("model"),
            Self::Session(_) => Some("x-fak-session"),
            _ => None,
        }
    }

    fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::NobodyServes { retry_after, .. }
            | Self::OtherWeights { retry_after }
            | Self::HoldFull { retry_after } => Some(*retry_after),
            Self::NoRoom | Self::Stopping | Self::Dropped | Self::Left => {
                Some(Duration::from_secs(1))
            }
            _ => None,
        }
    }

    /// Anthropic's type of error for the status: of a 4xx that is not on their list
    /// `invalid_request_error`, as their API has it (docs.claude.com/en/api/errors).
    fn anthropic_kind(&self) -> &'static str {
        match self.status().as_u16() {
            401 => "authentication_error",
            403 => "permission_error",
            404 => "not_found_error",
            409 => "conflict_error",
            413 => "request_too_large",
            400..=499 => "invalid_request_error",
            503 => "overloaded_error",
            504 => "timeout_error",
            _ => "api_error",
        }
    }

    /// The error as clients of this dialect know it.
    pub(super) fn body(&self, dialect: Dialect) -> ErrorBody {
        let kind = match dialect {
            Dialect::OpenAi => self.kind(),
            Dialect::Anthropic => self.anthropic_kind(),
        };
        ErrorBody {
            message: self.to_string(),
            kind: kind.to_owned(),
            param: self.param().map(str::to_owned),
            code: Some(ErrorCode::Name(self.code().to_owned())),
        }
    }

    /// The whole answer, for a client of this dialect.
    pub(super) fn answer(&self, dialect: Dialect) -> Response<Body> {
        let body = self.body(dialect);
        let body = match dialect {
            Dialect::OpenAi => body.to_bytes(),
            Dialect::Anthropic => body.to_messages_bytes(),
        };
        let mut response = Response::new(Body::full(Bytes::from(body)));
        *response.status_mut() = self.status();
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        match self {
            Self::Method(taken) => {
                headers.insert(ALLOW, HeaderValue::from_static(taken));
            }
            Self::BodyEncoded(_) => {
                headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
            }
            _ => {}
        }
        if !self.should_retry() {
            headers.insert(headers::SHOULD_RETRY, HeaderValue::from_static("false"));
        }
        if let Some(after) = self.retry_after() {
            headers.insert(RETRY_AFTER, HeaderValue::from(after.as_secs().max(1)));
        }
        response
    }
}

impl From<&engine::Error> for Problem {
    fn from(error: &engine::Error) -> Self {
        match error {
            engine::Error::Unreachable(_) => Self::Unreachable,
            engine::Error::TimedOut { .. } => Self::Silent,
            engine::Error::Cut(_) | engine::Error::TooLarge { .. } => Self::Cut,
        }
    }
}
