//! What a relayed stream says of itself: usage, errors and how it ended, read off the events on
//! their way.
//!
//! Invariant: an event is parsed only if it can say something of these, and relayed as it came
//! whether or not it can be read.

use std::sync::LazyLock;

use fak_wire::openai::{
    ErrorBody, ErrorCode, StreamEnd, StreamItem, StreamWatch, Usage, beside_usage,
};
use fak_wire::sse;
use memchr::memmem::Finder;

use super::beginning::Beginning;
use super::frames::Fate;

static USAGE: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"usage\""));
static ERROR: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"error\""));
static FINISH: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"finish_reason\""));
static DONE: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("[DONE]"));

/// An event longer than this is no end marker, in bytes: its line, and comments before it.
const DONE_BYTES_MAX: usize = 256;

/// How a stream begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Opening {
    /// As an answer does.
    Fine,
    /// With its end: the engine dropped the request while it was queued.
    Dropped,
    /// With nothing but the word that it ended in an error.
    Empty,
    /// With an error that another worker may not have, such as vLLM 0.33.0's `engine_paused`.
    Unavailable,
}

/// Follows one stream of chat or completions.
#[derive(Debug)]
pub(super) struct Reading {
    watch: StreamWatch,
    beginning: Beginning,
    has_finished: bool,
    is_unavailable: bool,
    usage: Option<Usage>,
    /// The client did not ask for usage: the chunk that brings nothing else is fak's alone.
    cuts_usage: bool,
}

impl Reading {
    /// Reads a stream of so many choices.
    pub(super) fn new(choices: usize, cuts_usage: bool) -> Self {
        Self {
            watch: StreamWatch::new(choices),
            beginning: Beginning::new(choices),
            has_finished: false,
            is_unavailable: false,
            usage: None,
            cuts_usage,
        }
    }

    /// How the stream begins, by what was read so far.
    pub(super) fn opening(&self) -> Opening {
        if self.is_unavailable {
            Opening::Unavailable
        } else if self.beginning.is_empty_error() {
            Opening::Empty
        } else if self.is_done() && !self.has_finished {
            Opening::Dropped
        } else {
            Opening::Fine
        }
    }

    /// Whether there is more than what goes before a token.
    pub(super) fn has_begun(&self) -> bool {
        self.beginning.has_begun()
    }

    /// Reads one event, and says what becomes of it.
    pub(super) fn event(&mut self, bytes: &[u8]) -> Fate {
        self.beginning.see(bytes);
        if !tells(bytes) {
            return Fate::Keep;
        }
        let Some(data) = data(bytes) else { return Fate::Keep };
        let Ok(item) = StreamItem::parse(&data) else { return Fate::Keep };
        self.watch.see(&item);
        match item {
            StreamItem::Error(error) => {
                self.has_finished = true;
                self.is_unavailable = is_unavailable(&error);
                Fate::Last
            }
            StreamItem::Done => Fate::End,
            StreamItem::Chunk(chunk) => {
                self.has_finished |= chunk.choices.iter().any(|c| c.finish_reason.is_some());
                let is_usage_alone = chunk.choices.is_empty() && chunk.usage.is_some();
                self.usage = chunk.usage.or(self.usage);
                if !(is_usage_alone && self.cuts_usage) {
                    return Fate::Keep;
                }
                beside_usage(&data).map_or(Fate::Cut, Fate::Replace)
            }
        }
    }

    /// What the request cost, as far as it was told.
    pub(super) fn usage(&self) -> Option<Usage> {
        self.usage
    }

    /// Whether the end marker came.
    pub(super) fn is_done(&self) -> bool {
        self.watch.is_done()
    }

    /// How the stream ended.
    pub(super) fn end(self) -> StreamEnd {
        self.watch.end()
    }
}

/// Whether an event may hold usage, an error, a finish reason or the end marker. A text that holds
/// these words has its quotes escaped, so that at worst an event is parsed for nothing.
fn tells(bytes: &[u8]) -> bool {
    has_value(&FINISH, bytes)
        || has_value(&USAGE, bytes)
        || has_value(&ERROR, bytes)
        || (bytes.len() <= DONE_BYTES_MAX && DONE.find(bytes).is_some())
}

/// Whether the name is there with anything but null behind it.
fn has_value(name: &Finder<'_>, bytes: &[u8]) -> bool {
    name.find_iter(bytes).any(|at| {
        let behind = bytes[at + name.needle().len()..].trim_ascii_start();
        let value = behind.strip_prefix(b":").unwrap_or(behind).trim_ascii_start();
        !value.starts_with(b"null")
    })
}

/// Whether another worker may not have this error.
pub(super) fn is_unavailable(error: &ErrorBody) -> bool {
    match &error.code {
        Some(ErrorCode::Number(code)) => matches!(code, 502..=504),
        Some(ErrorCode::Name(name)) => name == "engine_paused",
        None => false,
    }
}

/// Whether the request is wrong, by the engine's word.
pub(super) fn is_refusal(error: &ErrorBody) -> bool {
    matches!(error.code, Some(ErrorCode::Number(400..=499)))
}

/// The data of one event.
pub(super) fn data(bytes: &[u8]) -> Option<Vec<u8>> {
    let mut reader = sse::Reader::new(bytes.len());
    let event = reader.push(bytes).next()?.ok()?;
    Some(event.data)
}

#[cfg(test)]
mod tests {
    use super::*;
    use fak_wire::openai::CachedTokens;

    const TEXT: &str = r#"{"index":0,"text":"a","finish_reason":null}"#;

    fn read(reading: &mut Reading, data: &str) -> Fate {
        reading.event(format!("data: {data}\n\n").as_bytes())
    }

    #[test]
    fn usage_alone_is_cut_only_where_the_client_did_not_ask() {
        let usage = r#"{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":4}}"#;
        for cuts in [true, false] {
            let mut reading = Reading::new(1, cuts);
            assert_eq!(
                read(&mut reading, &format!(r#"{{"choices":[{TEXT}],"usage":null}}"#)),
                Fate::Keep
            );
            assert_eq!(reading.usage(), None);
            let with_choice = format!(r#"{{"choices":[{TEXT}],"usage":{usage}}}"#);
            assert_eq!(read(&mut reading, &with_choice), Fate::Keep);
            let alone = format!(r#"{{"choices":[],"usage":{usage}}}"#);
            assert_eq!(read(&mut reading, &alone), if cuts { Fate::Cut } else { Fate::Keep });
            let usage = reading.usage().expect("told");
            assert_eq!((usage.prompt_tokens, usage.cached_tokens), (9, CachedTokens::Known(4)));
        }
    }

    #[test]
    fn a_text_that_speaks_of_usage_and_errors_is_only_a_text() {
        let mut reading = Reading::new(1, true);
        for text in [r#"{"choices":[{"text":"usage"}]}"#, r#"{"choices":[{"text":"error"}]}"#] {
            assert_eq!(read(&mut reading, text), Fate::Keep);
        }
        assert_eq!(read(&mut reading, r#"{"choices":[{"text":"[DONE]"}]}"#), Fate::Keep);
        assert!(!reading.is_done());
        assert_eq!(read(&mut reading, "[DONE]"), Fate::End);
        assert!(reading.is_done());
    }

    #[test]
    fn an_error_is_the_last_event() {
        let mut reading = Reading::new(1, false);
        assert_eq!(read(&mut reading, r#"{"error": {"message": "boom"}}"#), Fate::Last);
        assert!(matches!(reading.end(), StreamEnd::Failed(Some(_))));
    }
}
