//! Answers of chat and completions, whole or in chunks, as far as fak reads them.
//! Invariant: numbers that the engine does not report stay apart from numbers that are 0.

use serde::{Deserialize, Deserializer};
use serde_json::Value;

use super::ErrorBody;
use super::bounded;
use super::request::Fields;

/// Most choices that are read from one answer; vLLM allows 16384 of one prompt.
const CHOICES_MAX: usize = 1 << 16;

/// Most token ids that are read from one choice.
const TOKENS_MAX: usize = 1 << 22;

/// An answer that cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("answer: {reason}")]
pub struct AnswerError {
    /// What is wrong, and where.
    pub reason: String,
}

/// A chunk of a stream, or a whole answer.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub struct Answer {
    /// The request's name in the engine.
    pub id: Option<String>,
    /// The model that answered.
    pub model: Option<String>,
    /// The choices; none in a chunk that brings usage only.
    #[serde(deserialize_with = "bounded::list::<CHOICES_MAX, _, _>")]
    pub choices: Vec<Choice>,
    /// What the request cost, where the chunk says so. With continuous usage every chunk does, and
    /// the last one counts.
    pub usage: Option<Usage>,
}

/// One choice, or what a chunk adds to it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Choice {
    /// Which of the choices.
    pub index: u32,
    /// The text, or the piece of it.
    pub text: String,
    /// The reasoning text that a parser took out of it, or the piece of it.
    pub reasoning: String,
    /// Whether it calls tools.
    pub calls_tools: bool,
    /// Why the choice ended: `stop`, `length`, `tool_calls`, `abort`, `error`; `None` while it has
    /// not, and where the engine dropped a queued request (see [`StreamEnd`](super::StreamEnd)).
    pub finish_reason: Option<String>,
    /// Token ids, if the request asked for them with `return_token_ids`.
    pub token_ids: Vec<u32>,
}

/// What a request cost, in tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub struct Usage {
    /// Of the prompt, cached ones included.
    pub prompt_tokens: u64,
    /// Of the answer.
    #[serde(default)]
    pub completion_tokens: u64,
    /// Of the prompt, those that the engine had in a cache.
    #[serde(default, rename = "prompt_tokens_details")]
    pub cached_tokens: CachedTokens,
}

/// How many prompt tokens came from a cache, the engine's own and a connector's together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum CachedTokens {
    /// The engine does not say; it does with `--enable-prompt-tokens-details`. Up to vLLM 0.23.0 a
    /// 0 is left out too, so that this then means either.
    #[default]
    NotReported,
    /// As many as this, 0 included.
    Known(u64),
}

impl<'de> Deserialize<'de> for CachedTokens {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        struct Details {
            cached_tokens: Option<u64>,
        }
        let details = Option::<Details>::deserialize(deserializer)?;
        let known = details.and_then(|details| details.cached_tokens);
        Ok(known.map_or(CachedTokens::NotReported, CachedTokens::Known))
    }
}

impl<'de> Deserialize<'de> for Choice {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let wire = WireChoice::deserialize(deserializer)?;
        let message = wire.delta.or(wire.message).unwrap_or_default();
        let text = wire.text.or(message.content).unwrap_or_default();
        let reasoning = message.reasoning.or(message.reasoning_content).unwrap_or_default();
        Ok(Choice {
            index: wire.index,
            text,
            reasoning,
            calls_tools: !message.tool_calls.is_empty(),
            finish_reason: wire.finish_reason,
            token_ids: wire.token_ids,
        })
    }
}

#[derive(Deserialize)]
struct WireChoice {
    #[serde(default)]
    index: u32,
    /// Of completions.
    text: Option<String>,
    /// Of a chat chunk.
    delta: Option<Message>,
    /// Of a whole chat answer.
    message: Option<Message>,
    finish_reason: Option<String>,
    #[serde(default, deserialize_with = "bounded::list::<TOKENS_MAX, _, _>")]
    token_ids: Vec<u32>,
}

#[derive(Default, Deserialize)]
struct Message {
    content: Option<String>,
    reasoning: Option<String>,
    /// Name of the same until vLLM 0.12.
    reasoning_content: Option<String>,
    #[serde(default, deserialize_with = "bounded::list::<CHOICES_MAX, _, _>")]
    tool_calls: Vec<serde::de::IgnoredAny>,
}

impl Answer {
    /// Reads a whole answer of status 200.
    ///
    /// # Errors
    /// If it is no answer of chat or completions.
    pub fn parse(body: &[u8]) -> Result<Self, AnswerError> {
        serde_json::from_slice(body).map_err(|error| AnswerError { reason: error.to_string() })
    }
}

/// The data of one event of a streamed answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StreamItem {
    /// More of the answer.
    Chunk(Answer),
    /// An error object in the stream, whose status 200 was sent long before.
    Error(ErrorBody),
    /// The end marker, `[DONE]`.
    Done,
}

impl StreamItem {
    /// Reads the data of one event.
    ///
    /// # Errors
    /// If it is none of the three. The bytes may still be relayed.
    pub fn parse(data: &[u8]) -> Result<Self, AnswerError> {
        if data.trim_ascii() == b"[DONE]" {
            return Ok(StreamItem::Done);
        }
        let wire: WireItem = serde_json::from_slice(data)
            .map_err(|error| AnswerError { reason: error.to_string() })?;
        let is_error = wire.is_error();
        match wire {
            WireItem { error: Some(error), .. } if is_error => Ok(StreamItem::Error(error.into())),
            // vLLM 0.9.2 sends the error itself, later versions wrap it.
            WireItem { object: Some(object), .. } if object == "error" => {
                Ok(StreamItem::Error(ErrorBody::from_answer(200, data)))
            }
            WireItem { id, model, choices: Some(Choices(choices)), usage, .. } => {
                Ok(StreamItem::Chunk(Answer { id, model, choices, usage }))
            }
            _ => Err(AnswerError { reason: "found neither choices nor an error".to_owned() }),
        }
    }
}

/// Chunks and errors in one, so that the many chunks are read in one pass.
#[derive(Deserialize)]
struct WireItem {
    error: Option<Value>,
    object: Option<String>,
    id: Option<String>,
    model: Option<String>,
    choices: Option<Choices>,
    usage: Option<Usage>,
}

impl WireItem {
    /// Whether its `error` is one: beside choices or usage it is a word on them, and the stream
    /// goes on.
    fn is_error(&self) -> bool {
        let Some(error) = &self.error else { return false };
        match &self.choices {
            None => *error != Value::Bool(false),
            Some(Choices(choices)) => {
                let says_something = match error {
                    Value::Object(object) => !object.is_empty(),
                    Value::String(text) => !text.is_empty(),
                    _ => false,
                };
                choices.is_empty() && self.usage.is_none() && says_something
            }
        }
    }
}

/// Fields of the chunk that `include_usage` adds to a stream. `metrics`: vLLM sends them on that
/// chunk alone (0.32.0, source), so that a stream without it has none.
const USAGE_CHUNK: [&str; 9] = [
    "id",
    "object",
    "created",
    "model",
    "choices",
    "usage",
    "system_fingerprint",
    "service_tier",
    "metrics",
];

/// The chunk of a stream's usage without the usage, where it brings anything besides, and none
/// where it is there for the usage alone.
#[must_use]
pub fn beside_usage(chunk: &[u8]) -> Option<Vec<u8>> {
    let mut fields: Fields = serde_json::from_slice(chunk).ok()?;
    let is_extra = |name: &str, value: &str| !USAGE_CHUNK.contains(&name) && value != "null";
    if !fields.0.iter().any(|(name, value)| is_extra(name, value.get())) {
        return None;
    }
    fields.0.retain(|(name, _)| name != "usage");
    serde_json::to_vec(&fields).ok()
}

#[derive(Deserialize)]
#[serde(transparent)]
struct Choices(#[serde(deserialize_with = "bounded::list::<CHOICES_MAX, _, _>")] Vec<Choice>);
