//! Streams whose events say of which type they are: Anthropic's messages and OpenAI's responses, as
//! vLLM sends them (0.32.0, source: `entrypoints/anthropic`, `entrypoints/openai/responses`).
//! Invariant: what is written is one whole event of the stream's own protocol, and its last.

use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

use super::ErrorBody;

/// Largest response object that is kept for the stream's end, in bytes. It repeats instructions and
/// tools.
const RESPONSE_BYTES_MAX: usize = 1 << 20;

/// One event.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct TypedEvent {
    /// `message_start`, `response.created`, ..
    #[serde(default, rename = "type")]
    pub kind: String,
    /// Its number in the stream; of responses.
    pub sequence_number: Option<u64>,
    /// The response as far as it is made; of responses.
    response: Option<Box<RawValue>>,
    error: Option<Value>,
}

impl TypedEvent {
    /// Reads the data of one event; none where it is no object.
    #[must_use]
    pub fn parse(data: &[u8]) -> Option<Self> {
        serde_json::from_slice(data).ok()
    }

    /// The error that it brings.
    #[must_use]
    pub fn error(&self) -> Option<ErrorBody> {
        self.error.clone().filter(|error| !error.is_null()).map(ErrorBody::from)
    }

    /// Takes the response object out, unless it is too large to be kept.
    #[must_use]
    pub fn into_response(self) -> Option<Box<RawValue>> {
        self.response.filter(|response| response.get().len() <= RESPONSE_BYTES_MAX)
    }
}

impl ErrorBody {
    /// The body of an error answer to a client of Anthropic's. Its `kind` is one of Anthropic's
    /// types of error.
    #[must_use]
    pub fn to_messages_bytes(&self) -> Vec<u8> {
        self.messages().to_string().into_bytes()
    }

    /// The same as the last event of a stream of messages.
    #[must_use]
    pub fn to_messages_event(&self) -> Vec<u8> {
        event("error", &self.messages())
    }

    fn messages(&self) -> Value {
        let ErrorBody { message, kind, param, code } = self;
        let error = json!({"type": kind, "message": message, "param": param, "code": code});
        json!({"type": "error", "error": error})
    }

    /// The error as the last event of a stream of a response: the last object seen of that, and the
    /// event's number.
    #[must_use]
    pub fn to_response_event(&self, seen: Option<&RawValue>, number: u64) -> Vec<u8> {
        let seen =
            seen.and_then(|seen| serde_json::from_str::<Map<String, Value>>(seen.get()).ok());
        let minimal = || {
            let Value::Object(object) = json!({"object": "response", "output": []}) else {
                unreachable!("an object is written")
            };
            object
        };
        let mut response = seen.unwrap_or_else(minimal);
        response.insert("status".to_owned(), "failed".into());
        // `server_error` is the one code of OpenAI's closed list that fits.
        let error = json!({"code": "server_error", "message": self.message});
        response.insert("error".to_owned(), error);
        let kind = "response.failed";
        event(kind, &json!({"type": kind, "sequence_number": number, "response": response}))
    }
}

fn event(name: &str, data: &Value) -> Vec<u8> {
    format!("event: {name}\ndata: {data}\n\n").into_bytes()
}
