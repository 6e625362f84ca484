//! Error bodies, read from engines of every version and written in OpenAI's shape.

use serde::Serialize;
use serde_json::{Value, json};

/// An error as OpenAI clients know it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ErrorBody {
    /// What went wrong, for people.
    pub message: String,
    /// The kind of error, such as `BadRequestError`.
    pub kind: String,
    /// The request field at fault.
    pub param: Option<String>,
    /// The HTTP status, or a name.
    pub code: Option<ErrorCode>,
}

/// The `code` of an error.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum ErrorCode {
    /// vLLM gives the HTTP status.
    Number(i64),
    /// OpenAI gives a name; so does vLLM 0.33.0 for `engine_paused`.
    Name(String),
}

/// Longest message made of what is no error object, in characters.
const MESSAGE_CHARS_MAX: usize = 400;

impl From<Value> for ErrorBody {
    /// Takes what an error object has; anything else becomes the message.
    fn from(error: Value) -> Self {
        let text = |name: &str| error.get(name).and_then(Value::as_str).map(str::to_owned);
        let code = error.get("code").and_then(|code| match code {
            Value::Number(number) => number.as_i64().map(ErrorCode::Number),
            Value::String(name) => Some(ErrorCode::Name(name.clone())),
            _ => None,
        });
        let message = text("message").unwrap_or_else(|| match &error {
            Value::String(message) => shortened(message),
            other => shortened(&other.to_string()),
        });
        ErrorBody { message, kind: text("type").unwrap_or_default(), param: text("param"), code }
    }
}

fn shortened(message: &str) -> String {
    message.trim().chars().take(MESSAGE_CHARS_MAX).collect()
}

impl ErrorBody {
    /// Reads the body of an answer whose status is an error. A body that is no error object (plain
    /// text, nothing at all, FastAPI's `{"detail":…}`) becomes the message.
    #[must_use]
    pub fn from_answer(status: u16, body: &[u8]) -> Self {
        let message = match serde_json::from_slice::<Value>(body) {
            Ok(Value::Object(mut object)) => {
                // vLLM 0.9.2 sends the error itself, later versions wrap it.
                let is_error = object.get("object").is_some_and(|kind| kind == "error");
                match (object.remove("error"), object.remove("detail")) {
                    (Some(error), _) => return error.into(),
                    (None, Some(Value::String(detail))) => detail,
                    _ if is_error => return Value::Object(object).into(),
                    _ => String::from_utf8_lossy(body).into_owned(),
                }
            }
            _ => String::from_utf8_lossy(body).into_owned(),
        };
        let message = match message.trim() {
            "" => format!("the engine answered {status} without a body"),
            message => shortened(message),
        };
        let code = Some(ErrorCode::Number(i64::from(status)));
        ErrorBody { message, kind: String::new(), param: None, code }
    }

    /// The body of an error answer.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let ErrorBody { message, kind, param, code } = self;
        let error = json!({"message": message, "type": kind, "param": param, "code": code});
        json!({ "error": error }).to_string().into_bytes()
    }

    /// The error as one event of a stream. To be written between events only (see
    /// [`Tail`](crate::sse::Tail)).
    #[must_use]
    pub fn to_event(&self) -> Vec<u8> {
        [b"data: ".as_slice(), &self.to_bytes(), b"\n\n"].concat()
    }
}
