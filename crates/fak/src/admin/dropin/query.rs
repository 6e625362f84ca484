//! The parameters of vLLM's control routes, and what vLLM says of wrong ones (0.32.0, observed).
//!
//! Invariant: what the engine would answer 400, fak answers 400 in the same words, before anything
//! is done; and what the engine would ignore is refused as well.

use axum::Json;
use axum::body::Bytes;
use axum::response::{IntoResponse, Response};
use fak_kernel::witness::{Level, Mode, Part, Parts};
use http::StatusCode;
use serde_json::Value;

use super::envelope;

/// Characters of a wrong value that are shown.
const SHOWN_MAX: usize = 128;
/// Flags that are down where nobody raises them.
const DOWN_BY_DEFAULT: [&str; 2] = ["reset_running_requests", "reset_external"];

/// A parameter that is wrong.
#[derive(Debug)]
pub(super) struct Invalid {
    status: StatusCode,
    message: String,
    param: String,
}

impl IntoResponse for Invalid {
    fn into_response(self) -> Response {
        let body = envelope(self.status, &self.message, Some(&self.param));
        (self.status, Json(body)).into_response()
    }
}

impl Invalid {
    fn new(message: String, param: String) -> Self {
        Self { status: StatusCode::BAD_REQUEST, message, param }
    }

    /// A worker that nobody knows.
    pub(super) fn unknown_worker(message: String) -> Self {
        let param = "query.worker".to_owned();
        Self { status: StatusCode::NOT_FOUND, message, param }
    }
}

/// What stands in the query.
#[derive(Debug)]
pub(super) struct Parameters(Vec<(String, String)>);

impl Parameters {
    /// Takes `worker` and those of `accepted`, each once: of two values one would be dropped in
    /// silence. Only `tags` is a list.
    pub(super) fn new(pairs: Vec<(String, String)>, accepted: &[&str]) -> Result<Self, Invalid> {
        let is_taken = |name: &str| name == "worker" || accepted.contains(&name);
        if let Some((name, _)) = pairs.iter().find(|(name, _)| !is_taken(name)) {
            return Err(not_taken(name, accepted));
        }
        for (name, _) in pairs.iter().filter(|(name, _)| name != "tags") {
            let times = pairs.iter().filter(|(other, _)| other == name).count();
            if times > 1 {
                let message = format!("`{name}` is given {times} times: give it once");
                return Err(Invalid::new(message, format!("query.{name}")));
            }
        }
        Ok(Self(pairs))
    }

    fn get(&self, name: &str) -> Option<&str> {
        let found = self.0.iter().find(|(key, _)| key == name);
        found.map(|(_, value)| value.as_str())
    }

    pub(super) fn worker(&self) -> Option<&str> {
        self.get("worker")
    }

    pub(super) fn mode(&self) -> Result<Mode, Invalid> {
        let Some(word) = self.get("mode") else { return Ok(Mode::Abort) };
        Mode::parse(word).ok_or_else(|| {
            let message = "Input should be 'abort', 'wait' or 'keep'";
            let context =
                format!(", 'ctx': {{'expected': {}}}", quoted("'abort', 'wait' or 'keep'"));
            invalid("literal_error", "mode", message, word, &context)
        })
    }

    /// The level of a sleep; vLLM's default is 1. Its 0 is a pause under another name.
    pub(super) fn level(&self) -> Result<Level, Invalid> {
        let Some(text) = self.get("level") else { return Ok(Level::One) };
        let Ok(level) = text.trim().parse::<i64>() else {
            let message = "Input should be a valid integer, unable to parse string as an integer";
            return Err(invalid("int_parsing", "level", message, text, ""));
        };
        match level {
            0 => {
                let message = "sleep level 0 is a pause under another name: ask for \
                               /pause?clear_cache=false";
                Err(Invalid::new(message.to_owned(), "query.level".to_owned()))
            }
            1 => Ok(Level::One),
            2 => Ok(Level::Two),
            3.. => {
                let message = "Input should be less than or equal to 2";
                Err(invalid("less_than_equal", "level", message, text, ", 'ctx': {'le': 2}"))
            }
            _ => {
                let message = "Input should be greater than or equal to 0";
                Err(invalid("greater_than_equal", "level", message, text, ", 'ctx': {'ge': 0}"))
            }
        }
    }

    /// A boolean, in the words that vLLM's web framework takes.
    pub(super) fn flag(&self, name: &str, default: bool) -> Result<bool, Invalid> {
        let Some(text) = self.get(name) else { return Ok(default) };
        match text.to_ascii_lowercase().as_str() {
            "true" | "1" | "yes" | "on" | "t" | "y" => Ok(true),
            "false" | "0" | "no" | "off" | "f" | "n" => Ok(false),
            _ => {
                let message = "Input should be a valid boolean, unable to interpret input";
                Err(invalid("bool_parsing", name, message, text, ""))
            }
        }
    }

    /// What to wake. vLLM answers 200 to a tag that it does not know, and does nothing (observed).
    pub(super) fn tags(&self) -> Result<Parts, Invalid> {
        let tags = self.0.iter().filter(|(name, _)| name == "tags");
        tags.map(|(_, tag)| {
            Part::parse(tag).ok_or_else(|| {
                let message = "Input should be 'weights', 'kv_cache' or 'scheduling'";
                let words = quoted("'weights', 'kv_cache' or 'scheduling'");
                let context = format!(", 'ctx': {{'expected': {words}}}");
                invalid("literal_error", "tags", message, tag, &context)
            })
        })
        .collect()
    }
}

/// vLLM reads no body on these routes, so that what stands in one would do nothing. What says no
/// more than what happens anyway may stand there: SkyRL's client sends
/// `{"reset_running_requests":false}`.
pub(super) fn no_body(body: &Bytes, query: &Parameters, accepted: &[&str]) -> Result<(), Invalid> {
    let is_so_anyway = |(name, value): &(&String, &Value)| {
        let is_flag = DOWN_BY_DEFAULT.contains(&name.as_str()) && accepted.contains(&name.as_str());
        is_flag && **value == false && query.get(name).is_none()
    };
    let named = match serde_json::from_slice(body) {
        Ok(Value::Object(fields)) => {
            fields.iter().find(|field| !is_so_anyway(field)).map(|(name, _)| name.clone())
        }
        Ok(Value::Null) => None,
        _ if body.is_empty() => None,
        _ => Some("body".to_owned()),
    };
    match named {
        None => Ok(()),
        Some(name) => {
            let name = shown(&name);
            let message = format!(
                "`{name}` stands in the body, where it would do nothing: {}",
                takes(accepted)
            );
            Err(Invalid::new(message, format!("body.{name}")))
        }
    }
}

fn not_taken(name: &str, accepted: &[&str]) -> Invalid {
    let name = shown(name);
    let message = format!("`{name}` is no parameter here: {}", takes(accepted));
    Invalid::new(message, format!("query.{name}"))
}

fn takes(accepted: &[&str]) -> String {
    let mut names = accepted.to_vec();
    names.push("worker");
    format!("the query takes {}", names.join(", "))
}

/// One error as vLLM's validator words it.
fn invalid(kind: &str, name: &str, message: &str, input: &str, context: &str) -> Invalid {
    let (message, input) = (quoted(message), quoted(&shown(input)));
    let message = format!(
        "1 validation error:\n  {{'type': '{kind}', 'loc': 'query.{name}', 'msg': {message}, \
         'input': {input}{context}}}"
    );
    Invalid::new(message, format!("query.{name}"))
}

/// A text as Python's `repr` writes it: in double quotes where it holds a single one.
fn quoted(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 2);
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for character in text.chars() {
        match character {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => out.extend(['\\', c]),
            c => out.push(c),
        }
    }
    out.push(quote);
    out
}

fn shown(text: &str) -> String {
    text.chars().take(SHOWN_MAX).collect()
}
