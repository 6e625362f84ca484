//! Control calls: what was asked, what was answered, what was then observed.
//!
//! Invariant: a failed call is data like any other; a 200 is kept as the engine's claim, never
//! turned into a fact. The verdict belongs to the kernel.

use bytes::Bytes;
use fak_kernel::witness::SleepState;
use fak_wire::metrics::Snapshot;
use serde_json::Value;

use super::client::{Error, Outgoing, Response};
use super::endpoints::{Control, Data};
use super::{Engine, NotAllowed, ScrapeError};
use crate::telemetry::error_chain;

/// Longest answer that is kept as text where it is no JSON, in bytes.
const TEXT_BYTES_MAX: usize = 1024;

/// A control call and all that is known of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Called {
    /// What was asked.
    pub asked: Control,
    /// What came back.
    pub answered: Answer,
    /// The engine's state, read after the call, whatever its answer.
    pub observed: Observation,
}

/// What came back of a call.
#[derive(Clone, Debug, PartialEq)]
pub enum Answer {
    /// The engine has seen nothing of the call.
    NotSent(NotSent),
    /// The engine answered, with whatever status.
    Answered {
        /// The HTTP status.
        status: u16,
        /// The body: its JSON; a text where it is no JSON; null where it is empty, as it is up to
        /// vLLM 0.31.0 for sleep and wake, and up to 0.25.1 for a reset.
        body: Value,
    },
    /// No answer in time. The engine may or may not have acted.
    TimedOut {
        /// How long was waited, in milliseconds.
        after_ms: u64,
    },
    /// The connection broke after the call left, or the answer was no answer. The engine may or may
    /// not have acted.
    Cut {
        /// What broke.
        detail: String,
    },
}

/// Why nothing was sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NotSent {
    /// The configuration keeps the path shut.
    NotAllowed(NotAllowed),
    /// No connection could be made.
    Unreachable {
        /// What failed.
        detail: String,
    },
}

/// The `success` of an answer: three values, since older engines say nothing whatever happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Success {
    /// `true`.
    True,
    /// `false`.
    False,
    /// Not in the body, or no body.
    Absent,
}

impl Answer {
    /// What the body says of success.
    #[must_use]
    pub fn success(&self) -> Success {
        match self.body().get("success") {
            Some(Value::Bool(true)) => Success::True,
            Some(Value::Bool(false)) => Success::False,
            _ => Success::Absent,
        }
    }

    /// The status word of the body: `paused`, `resumed`, `sleeping`, `awake`.
    #[must_use]
    pub fn status_word(&self) -> Option<&str> {
        self.body().get("status").and_then(Value::as_str)
    }

    /// The HTTP status, if there was an answer.
    #[must_use]
    pub fn status(&self) -> Option<u16> {
        match self {
            Self::Answered { status, .. } => Some(*status),
            _ => None,
        }
    }

    /// The body, null where there was none.
    #[must_use]
    pub fn body(&self) -> &Value {
        match self {
            Self::Answered { body, .. } => body,
            _ => &Value::Null,
        }
    }
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Seen<T> {
    /// It was there.
    Value(T),
    /// The engine does not offer it: no such path (404, as without dev mode), or no such metric.
    NotOffered,
    /// No connection could be made.
    Unreachable {
        /// What failed.
        detail: String,
    },
    /// It could not be read.
    Failed {
        /// Why.
        detail: String,
    },
}

impl<T: Copy> Seen<T> {
    /// The value, if there was one.
    #[must_use]
    pub fn value(&self) -> Option<T> {
        match self {
            Self::Value(value) => Some(*value),
            Self::NotOffered | Self::Unreachable { .. } | Self::Failed { .. } => None,
        }
    }
}

/// The engine's state, as three separate looks at it. They are taken together but not at one
/// instant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Observation {
    /// `/is_paused`. True as soon as a pause starts (observed, 0.32.0).
    pub is_paused: Seen<bool>,
    /// `/is_sleeping`. True also when only paused, since 0.17.1.
    pub is_sleeping: Seen<bool>,
    /// `vllm:engine_sleep_state`, since 0.12.0; absent on the Rust frontend. It records the last
    /// level *requested*: level 2 after level 1 shows level 2 although the second call did nothing
    /// (observed, 0.32.0).
    pub sleep_state: Seen<SleepState>,
    /// The front end answers for an engine that is dead or stops: `/health` is 503, when the flags
    /// may still read as before. It is 200 while an engine is paused or asleep (observed, 0.32.0).
    pub is_dead: bool,
}

impl Engine {
    /// Makes a control call and looks at the engine afterwards.
    pub async fn control(&self, asked: Control) -> Called {
        let answered = self.ask(&asked).await;
        let observed = self.observe().await;
        Called { asked, answered, observed }
    }

    /// Looks at the engine's state.
    pub async fn observe(&self) -> Observation {
        self.observe_and_scrape().await.0
    }

    /// Looks at the engine's state, and hands out the scrape that a part of it was read from.
    pub async fn observe_and_scrape(&self) -> (Observation, Result<Snapshot, ScrapeError>) {
        let (is_paused, is_sleeping, scraped, is_dead) = tokio::join!(
            self.flag(Control::IsPaused, "is_paused"),
            self.flag(Control::IsSleeping, "is_sleeping"),
            self.scrape(),
            self.is_dead(),
        );
        let sleep_state = match &scraped {
            Ok(snapshot) => sleep_state(snapshot),
            Err(ScrapeError::Http(error)) => unseen(error),
            Err(error) => Seen::Failed { detail: error_chain(error) },
        };
        (Observation { is_paused, is_sleeping, sleep_state, is_dead }, scraped)
    }

    async fn is_dead(&self) -> bool {
        let health = Outgoing::to(self.endpoints.data(Data::Health));
        let answer = self.client.send(health, self.client.timeouts().probe).await;
        answer.is_ok_and(|answer| answer.status == http::StatusCode::SERVICE_UNAVAILABLE)
    }

    /// Makes a control call.
    pub async fn ask(&self, asked: &Control) -> Answer {
        let url = match self.endpoints.control(asked) {
            Ok(url) => url,
            Err(shut) => return Answer::NotSent(NotSent::NotAllowed(shut)),
        };
        let mut request = Outgoing::to(url);
        if let Some(body) = asked.body() {
            request = request.json(Bytes::from_static(body.as_bytes()));
        }
        answer(self.client.send(request, self.client.timeouts().control).await)
    }

    async fn flag(&self, look: Control, name: &'static str) -> Seen<bool> {
        match self.probe(&look).await {
            Ok(response) if response.status == http::StatusCode::NOT_FOUND => Seen::NotOffered,
            Ok(response) => match body(&response.body).get(name).and_then(Value::as_bool) {
                Some(value) if response.status.is_success() => Seen::Value(value),
                _ => Seen::Failed { detail: format!("status {}", response.status.as_u16()) },
            },
            Err(error) => unseen(&error),
        }
    }

    /// The JSON that a control path answers a short look with; nothing where it does not with a
    /// 2xx.
    pub async fn read(&self, look: Control) -> Option<Value> {
        let response = self.probe(&look).await.ok()?;
        response.status.is_success().then(|| body(&response.body))
    }

    /// A short look at a control path that only reads.
    pub(super) async fn probe(&self, look: &Control) -> Result<Response, Error> {
        let url =
            self.endpoints.control(look).expect("only worker RPC can be shut, and no look is one");
        self.client.send(Outgoing::to(url), self.client.timeouts().probe).await
    }
}

fn answer(result: Result<Response, Error>) -> Answer {
    match result {
        Ok(response) => {
            Answer::Answered { status: response.status.as_u16(), body: body(&response.body) }
        }
        Err(Error::TimedOut { after, .. }) => {
            Answer::TimedOut { after_ms: u64::try_from(after.as_millis()).unwrap_or(u64::MAX) }
        }
        Err(error @ Error::Unreachable(_)) => {
            Answer::NotSent(NotSent::Unreachable { detail: error_chain(&error) })
        }
        Err(error @ (Error::Cut(_) | Error::TooLarge { .. })) => {
            Answer::Cut { detail: error_chain(&error) }
        }
    }
}

fn unseen<T>(error: &Error) -> Seen<T> {
    let detail = error_chain(error);
    match error {
        Error::Unreachable(_) => Seen::Unreachable { detail },
        _ => Seen::Failed { detail },
    }
}

/// The state that all ranks show.
fn sleep_state(snapshot: &Snapshot) -> Seen<SleepState> {
    let mut shown = snapshot.ranks.values().filter_map(|signals| signals.sleep.as_ref());
    let Some(first) = shown.next() else { return Seen::NotOffered };
    if shown.any(|other| other != first) {
        return Seen::Failed { detail: "ranks show different sleep states".to_owned() };
    }
    match (first.awake, first.weights_offloaded, first.discard_all) {
        (true, false, false) => Seen::Value(SleepState::Awake),
        (false, true, false) => Seen::Value(SleepState::One),
        (false, false, true) => Seen::Value(SleepState::Two),
        (false, false, false) => Seen::Value(SleepState::Unnamed),
        _ => Seen::Failed { detail: "several sleep states at once".to_owned() },
    }
}

/// The body as JSON, as text where it is none, null where it is empty.
pub(super) fn body(bytes: &[u8]) -> Value {
    if bytes.is_empty() {
        return Value::Null;
    }
    serde_json::from_slice(bytes).unwrap_or_else(|_| {
        let kept = &bytes[..bytes.len().min(TEXT_BYTES_MAX)];
        Value::String(String::from_utf8_lossy(kept).into_owned())
    })
}
