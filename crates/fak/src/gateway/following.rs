//! How a relayed stream begins and ends, by the protocol of its route.
//!
//! Invariant: a stream that fails ends with one error event of its own protocol; a route whose
//! protocol fak does not know ends as its connection does.

use fak_wire::openai::{ErrorBody, StreamEnd, TypedEvent, Usage};
use serde_json::value::RawValue;

use super::error::{Dialect, Problem};
use super::frames::Fate;
use super::reading::{self, Opening, Reading};
use crate::engine::Data;

/// What follows a stream.
#[derive(Debug)]
pub(super) enum Following {
    /// A stream of chat or completions.
    Chunks(Reading),
    /// Any other.
    Events(Events),
}

/// Which protocol a stream has that is none of chat or completions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Protocol {
    /// Anthropic's: ends with `message_stop` or `error`.
    Messages,
    /// OpenAI's responses: ends with `response.completed` and the like.
    Responses,
    /// Nothing is known of it.
    Unknown,
}

/// Follows one such stream.
#[derive(Debug)]
pub(super) struct Events {
    protocol: Protocol,
    /// Something came that is more than an announcement.
    has_begun: bool,
    has_started: bool,
    is_done: bool,
    error: Option<ErrorBody>,
    has_failed: bool,
    /// The last response object, and the number of the next event.
    response: Option<Box<RawValue>>,
    next_number: u64,
}

impl Events {
    fn new(route: Data) -> Self {
        let protocol = match route {
            Data::Messages => Protocol::Messages,
            Data::Responses => Protocol::Responses,
            _ => Protocol::Unknown,
        };
        Self {
            protocol,
            has_begun: false,
            has_started: false,
            is_done: false,
            error: None,
            has_failed: false,
            response: None,
            next_number: 0,
        }
    }

    fn event(&mut self, bytes: &[u8]) {
        let data = reading::data(bytes);
        if self.protocol == Protocol::Unknown {
            self.has_begun |= data.is_some();
            return;
        }
        let Some(event) = data.and_then(|data| TypedEvent::parse(&data)) else { return };
        match event.kind.as_str() {
            "ping" | "response.created" | "response.in_progress" | "response.queued" => {}
            "message_start" => (self.has_begun, self.has_started) = (true, true),
            "message_stop" | "response.completed" | "response.incomplete" => {
                (self.has_begun, self.is_done) = (true, true);
            }
            "error" | "response.failed" => {
                (self.has_begun, self.has_failed) = (true, true);
                self.error = event.error();
            }
            _ => self.has_begun = true,
        }
        if let Some(number) = event.sequence_number {
            self.next_number = number.saturating_add(1);
        }
        if self.protocol == Protocol::Responses && !self.is_done {
            self.response = event.into_response().or(self.response.take());
        }
    }

    fn opening(&self) -> Opening {
        let is_message = self.protocol == Protocol::Messages;
        if self.error.as_ref().is_some_and(reading::is_unavailable) {
            Opening::Unavailable
        } else if is_message && self.is_done && !self.has_started {
            // vLLM makes it of a chat stream: `[DONE]` alone of a request that was dropped while it
            // was queued becomes `message_stop` alone.
            Opening::Dropped
        } else {
            Opening::Fine
        }
    }

    fn end(self) -> StreamEnd {
        if self.has_failed {
            StreamEnd::Failed(self.error)
        } else if self.opening() == Opening::Dropped {
            StreamEnd::Dropped
        } else if self.is_done || self.protocol == Protocol::Unknown {
            StreamEnd::Complete
        } else {
            StreamEnd::Cut
        }
    }

    fn failure(&self, problem: &Problem) -> Vec<u8> {
        match self.protocol {
            Protocol::Messages => problem.body(Dialect::Anthropic).to_messages_event(),
            Protocol::Responses => {
                let error = problem.body(Dialect::OpenAi);
                error.to_response_event(self.response.as_deref(), self.next_number)
            }
            Protocol::Unknown => problem.body(Dialect::OpenAi).to_event(),
        }
    }
}

impl Following {
    /// Follows a stream of this route, whose answers fak does not read.
    pub(super) fn unread(route: Data) -> Self {
        Self::Events(Events::new(route))
    }

    /// Reads one event, and says what becomes of it.
    pub(super) fn event(&mut self, bytes: &[u8]) -> Fate {
        match self {
            Self::Chunks(reading) => reading.event(bytes),
            Self::Events(events) => {
                events.event(bytes);
                Fate::Keep
            }
        }
    }

    /// Whether anything came that a client waits for.
    pub(super) fn has_begun(&self) -> bool {
        match self {
            Self::Chunks(reading) => reading.has_begun(),
            Self::Events(events) => events.has_begun,
        }
    }

    /// How the stream begins, by what was read so far.
    pub(super) fn opening(&self) -> Opening {
        match self {
            Self::Chunks(reading) => reading.opening(),
            Self::Events(events) => events.opening(),
        }
    }

    /// Whether what ends the stream has come.
    pub(super) fn is_done(&self) -> bool {
        match self {
            Self::Chunks(reading) => reading.is_done(),
            Self::Events(events) => {
                events.is_done || events.has_failed || events.protocol == Protocol::Unknown
            }
        }
    }

    /// What the request cost, as far as it was told.
    pub(super) fn usage(&self) -> Option<Usage> {
        match self {
            Self::Chunks(reading) => reading.usage(),
            Self::Events(_) => None,
        }
    }

    /// The event that ends the stream where it fails.
    pub(super) fn failure(&self, problem: &Problem) -> Vec<u8> {
        match self {
            Self::Chunks(_) => problem.body(Dialect::OpenAi).to_event(),
            Self::Events(events) => events.failure(problem),
        }
    }

    /// How the stream ended.
    pub(super) fn end(self) -> StreamEnd {
        match self {
            Self::Chunks(reading) => reading.end(),
            Self::Events(events) => events.end(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    /// Its message has two lines.
    fn boom() -> Problem {
        Problem::Model { model: "line\nbreak".to_owned(), known: String::new() }
    }

    fn see(following: &mut Following, kind: &str, more: Value) {
        let mut data = json!({"type": kind});
        data.as_object_mut().expect("one").extend(more.as_object().expect("one").clone());
        let event = format!("event: {kind}\ndata: {data}\n\n");
        assert_eq!(following.event(event.as_bytes()), Fate::Keep);
    }

    /// The name and the data of an event, which has to be one.
    fn read(event: &[u8]) -> (String, Value) {
        let text = std::str::from_utf8(event).expect("text");
        let mut lines = text.lines();
        let name = lines.next().and_then(|l| l.strip_prefix("event: ")).expect("a name");
        let data = lines.next().and_then(|l| l.strip_prefix("data: ")).expect("data");
        assert_eq!((lines.next(), lines.next()), (Some(""), None), "{text:?}");
        (name.to_owned(), serde_json::from_str(data).expect("JSON"))
    }

    #[test]
    fn a_response_that_fails_says_so_of_itself_with_the_next_number() {
        let mut following = Following::unread(Data::Responses);
        let response = json!({"id": "resp_1", "status": "in_progress", "model": "m"});
        see(
            &mut following,
            "response.created",
            json!({"sequence_number": 0, "response": response}),
        );
        assert!(!following.has_begun(), "vLLM announces before the engine does anything");
        see(&mut following, "response.output_text.delta", json!({"sequence_number": 4}));
        assert!(following.has_begun() && !following.is_done());
        let (name, data) = read(&following.failure(&boom()));
        assert_eq!((name.as_str(), &data["type"]), ("response.failed", &json!("response.failed")));
        assert_eq!(data["sequence_number"], 5);
        let response = &data["response"];
        assert_eq!((&response["id"], &response["status"]), (&json!("resp_1"), &json!("failed")));
        assert_eq!(response["error"]["message"], boom().to_string());
        assert_eq!(following.end(), StreamEnd::Cut);
        let (_, data) = read(&Following::unread(Data::Responses).failure(&boom()));
        assert_eq!(data["response"]["status"], "failed", "nothing was seen of it");
    }

    #[test]
    fn messages_end_with_their_own_error_and_with_nothing_else() {
        let mut following = Following::unread(Data::Messages);
        see(&mut following, "ping", json!({}));
        assert!(!following.has_begun());
        see(&mut following, "message_start", json!({}));
        assert!(following.has_begun());
        let (name, data) = read(&following.failure(&boom()));
        assert_eq!((name.as_str(), &data["type"]), ("error", &json!("error")));
        assert_eq!(data["error"]["type"], "not_found_error");
        assert_eq!(data["error"]["message"], boom().to_string());
        let (_, data) = read(&following.failure(&Problem::Silent));
        assert_eq!(data["error"]["type"], "timeout_error");
        see(&mut following, "message_stop", json!({}));
        assert_eq!(following.end(), StreamEnd::Complete);
    }

    #[test]
    fn how_a_stream_ends_is_told_by_its_last_event() {
        for (route, last, end) in [
            (Data::Messages, "error", StreamEnd::Failed(None)),
            (Data::Messages, "message_stop", StreamEnd::Dropped),
            (Data::Messages, "content_block_stop", StreamEnd::Cut),
            (Data::Responses, "response.failed", StreamEnd::Failed(None)),
            (Data::Responses, "response.incomplete", StreamEnd::Complete),
            (Data::Responses, "response.in_progress", StreamEnd::Cut),
            (Data::AudioTranscriptions, "anything", StreamEnd::Complete),
        ] {
            let mut following = Following::unread(route);
            see(&mut following, last, json!({}));
            assert_eq!(following.end(), end, "{last}");
        }
        let mut following = Following::unread(Data::Messages);
        see(&mut following, "error", json!({"error": {"type": "x", "code": 503}}));
        assert_eq!(following.opening(), Opening::Unavailable);
    }
}
