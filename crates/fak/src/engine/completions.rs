//! A turn: admitted, sent, followed step by step to its end.
//!
//! Invariant: a turn is a future, not a task. Dropping it at any point closes the connection, and
//! the engine frees the request's slot (0.1 to 0.25 s later, observed, 0.32.0). A turn that ended
//! is told apart from one that was aborted, dropped, failed, cut or silent; a 200 is none of these.

use std::collections::VecDeque;
use std::fmt;
use std::time::Duration;

use fak_wire::openai::{
    Answer, Api, Choice, ErrorBody, Request, RequestError, StreamEnd, StreamItem, StreamWatch,
    Usage,
};
use fak_wire::sse;
use http::HeaderMap;
use http::header::CONTENT_TYPE;
use tokio::time::Instant;

use super::client::{Body, Outgoing};
use super::endpoints::Data;
use super::identity::{Identity, Stamp};
use super::{Engine, Error};
use crate::telemetry::error_chain;

/// Largest event of a stream, in bytes. One with the log probabilities of many tokens has a few
/// hundred kilobytes.
const EVENT_BYTES_MAX: usize = 8 << 20;

/// A request and whose it is.
#[derive(Clone, Debug)]
pub struct Turn {
    /// The body. Fields that fak does not know pass unharmed.
    pub request: Request,
    /// Headers to send along, such as `x-request-id`. Never the engine's or anybody's key.
    pub headers: HeaderMap,
    /// Whose turn it is, if anybody's.
    pub identity: Option<Identity>,
    /// The turn's priority; lower runs first.
    pub priority: Option<i64>,
}

/// A turn that may be sent.
#[derive(Clone, Debug)]
pub struct Admitted {
    engine: Engine,
    request: Request,
    headers: HeaderMap,
    cache_salt: Option<String>,
    choices: usize,
}

/// Why a turn did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// No usable answer came.
    #[error("the turn was not answered")]
    Engine(#[from] Error),
    /// The engine answered with an error.
    #[error("the engine answered {status}: {}", body.message)]
    Refused {
        /// The HTTP status.
        status: u16,
        /// The error.
        body: ErrorBody,
    },
    /// A 200 that is not what was asked for.
    #[error("the engine answered 200 with {found}, not {wanted}")]
    Unreadable {
        /// What came.
        found: String,
        /// What was asked for.
        wanted: &'static str,
    },
}

/// News of a running turn.
#[derive(Debug)]
pub enum Event {
    /// The first output of any kind.
    FirstToken {
        /// Since the request was sent.
        after: Duration,
    },
    /// More text.
    Text {
        /// Of which choice.
        choice: u32,
        /// The piece.
        text: String,
    },
    /// More of the text that the engine's reasoning parser took out.
    Reasoning {
        /// Of which choice.
        choice: u32,
        /// The piece.
        text: String,
    },
    /// A choice ended.
    Finish {
        /// Which one.
        choice: u32,
        /// The engine's word: `stop`, `length`, `tool_calls`, `abort`, `error`.
        reason: String,
    },
    /// What the turn cost. Where several come, the last counts.
    Usage(Usage),
    /// The turn is over. Comes once, as the last event.
    End(TurnEnd),
}

/// How a turn ended.
#[derive(Debug)]
pub enum TurnEnd {
    /// By what the engine sent: complete, aborted, dropped, failed, or cut.
    Stream(StreamEnd),
    /// By the connection, before the end marker.
    Transport(Error),
    /// By something in the stream that is no part of an answer.
    Unreadable {
        /// What it was.
        reason: String,
    },
}

impl TurnEnd {
    /// Whether the engine did all that was asked.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        matches!(self, Self::Stream(StreamEnd::Complete))
    }
}

impl fmt::Display for TurnEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stream(StreamEnd::Complete) => f.write_str("complete"),
            Self::Stream(StreamEnd::Aborted) => f.write_str("the engine aborted the request"),
            Self::Stream(StreamEnd::Dropped) => {
                f.write_str("the engine dropped the request from its queue")
            }
            Self::Stream(StreamEnd::Failed(Some(error))) => {
                write!(f, "the engine failed: {}", error.message)
            }
            Self::Stream(StreamEnd::Failed(None)) => f.write_str("the engine failed"),
            Self::Stream(StreamEnd::Cut) => f.write_str("the stream ended without its end marker"),
            Self::Transport(error) => f.write_str(&error_chain(error)),
            Self::Unreadable { reason } => write!(f, "the stream cannot be read: {reason}"),
        }
    }
}

/// A whole answer that was not streamed.
#[derive(Debug)]
pub struct Unary {
    /// The answer.
    pub answer: Answer,
    /// How it ended; never [`StreamEnd::Cut`].
    pub end: StreamEnd,
}

/// A running turn. Dropping it stops it.
#[derive(Debug)]
pub struct TurnStream {
    body: Body,
    reader: sse::Reader,
    watch: Option<StreamWatch>,
    ready: VecDeque<Event>,
    sent_at: Instant,
    has_output: bool,
}

impl Engine {
    /// Checks a turn and marks it with its identity.
    ///
    /// # Errors
    ///
    /// [`RequestError`] where a field that fak has to understand is wrong.
    pub fn admit(&self, turn: Turn, stamp: &Stamp) -> Result<Admitted, RequestError> {
        let Turn { mut request, headers, identity, priority } = turn;
        stamp.apply(&mut request, identity.as_ref(), priority);
        request.include_usage()?;
        let cache_salt = request.cache_salt()?;
        let choices = request.choices()?;
        Ok(Admitted { engine: self.clone(), request, headers, cache_salt, choices })
    }
}

impl Admitted {
    /// The body as it will be sent, but for `stream` and `stream_options`.
    #[must_use]
    pub fn request(&self) -> &Request {
        &self.request
    }

    /// The salt it will be sent with.
    #[must_use]
    pub fn cache_salt(&self) -> Option<&str> {
        self.cache_salt.as_deref()
    }

    /// Sends the turn as a stream with usage, and returns once the engine has accepted it.
    ///
    /// # Errors
    ///
    /// [`StartError`]
    pub async fn stream(mut self) -> Result<TurnStream, StartError> {
        self.request.set_stream(true);
        self.request.set_include_usage(true).expect("admitted with readable stream options");
        let sent_at = Instant::now();
        let answer = self.engine.client.open(self.outgoing()).await?;
        let status = answer.status.as_u16();
        if status != 200 {
            let body = ErrorBody::from_answer(status, &answer.body.collect().await?);
            return Err(StartError::Refused { status, body });
        }
        let content_type = answer.headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok());
        if !content_type.is_some_and(|value| value.starts_with("text/event-stream")) {
            let found = content_type.unwrap_or("no content type").to_owned();
            return Err(StartError::Unreadable { found, wanted: "an event stream" });
        }
        Ok(TurnStream {
            body: answer.body,
            reader: sse::Reader::new(EVENT_BYTES_MAX),
            watch: Some(StreamWatch::new(self.choices)),
            ready: VecDeque::new(),
            sent_at,
            has_output: false,
        })
    }

    /// Sends the turn and waits for its whole answer.
    ///
    /// # Errors
    ///
    /// [`StartError`]
    pub async fn unary(mut self) -> Result<Unary, StartError> {
        self.request.set_stream(false);
        self.request.remove("stream_options");
        let within = self.engine.client.timeouts().unary;
        let response = self.engine.client.send(self.outgoing(), within).await?;
        let status = response.status.as_u16();
        if status != 200 {
            let body = ErrorBody::from_answer(status, &response.body);
            return Err(StartError::Refused { status, body });
        }
        let answer = Answer::parse(&response.body).map_err(|error| StartError::Unreadable {
            found: error.to_string(),
            wanted: "an answer",
        })?;
        let mut watch = StreamWatch::new(self.choices);
        let chunk = StreamItem::Chunk(answer);
        watch.see(&chunk);
        watch.see(&StreamItem::Done);
        let StreamItem::Chunk(answer) = chunk else { unreachable!("made just above") };
        Ok(Unary { answer, end: watch.end() })
    }

    fn outgoing(&self) -> Outgoing {
        let route = match self.request.api() {
            Api::Chat => Data::ChatCompletions,
            Api::Completions => Data::Completions,
        };
        let request = Outgoing::to(self.engine.endpoints.data(route));
        request.headers(self.headers.clone()).json(self.request.to_bytes().into())
    }
}

impl TurnStream {
    /// The next piece of news; `None` after [`Event::End`]. Safe to drop and call again.
    pub async fn step(&mut self) -> Option<Event> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Some(event);
            }
            self.watch.as_ref()?;
            match self.body.chunk().await {
                Ok(Some(bytes)) => self.take(&bytes),
                Ok(None) => self.end(None),
                Err(error) => self.end(Some(error)),
            }
        }
    }

    fn take(&mut self, bytes: &[u8]) {
        let events: Vec<_> = self.reader.push(bytes).collect();
        for event in events {
            let item = match event {
                Ok(event) => StreamItem::parse(&event.data).map_err(|error| error.to_string()),
                Err(error) => Err(error.to_string()),
            };
            // After the end nothing counts.
            let Some(watch) = &mut self.watch else { return };
            let item = match item {
                Ok(item) => item,
                Err(reason) => {
                    self.watch = None;
                    self.ready.push_back(Event::End(TurnEnd::Unreadable { reason }));
                    return;
                }
            };
            watch.see(&item);
            match item {
                StreamItem::Chunk(answer) => self.news(answer),
                StreamItem::Done => self.end(None),
                StreamItem::Error(_) => {}
            }
        }
    }

    fn news(&mut self, answer: Answer) {
        for choice in answer.choices {
            self.news_of(choice);
        }
        self.ready.extend(answer.usage.map(Event::Usage));
    }

    fn news_of(&mut self, choice: Choice) {
        let Choice { index, text, reasoning, calls_tools, finish_reason, token_ids } = choice;
        let is_output =
            calls_tools || !(text.is_empty() && reasoning.is_empty() && token_ids.is_empty());
        if is_output && !self.has_output {
            self.has_output = true;
            self.ready.push_back(Event::FirstToken { after: self.sent_at.elapsed() });
        }
        if !reasoning.is_empty() {
            self.ready.push_back(Event::Reasoning { choice: index, text: reasoning });
        }
        if !text.is_empty() {
            self.ready.push_back(Event::Text { choice: index, text });
        }
        if let Some(reason) = finish_reason {
            self.ready.push_back(Event::Finish { choice: index, reason });
        }
    }

    /// Ends the turn once: by what was seen of the stream, or by the transport where that says
    /// more.
    fn end(&mut self, error: Option<Error>) {
        let Some(watch) = self.watch.take() else { return };
        let end = match (watch.end(), error) {
            (StreamEnd::Cut, Some(error)) => TurnEnd::Transport(error),
            (end, _) => TurnEnd::Stream(end),
        };
        self.ready.push_back(Event::End(end));
    }
}
