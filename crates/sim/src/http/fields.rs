//! Request bodies and queries: Python's JSON errors and pydantic's complaints, as recorded.
//! Invariant: a wrong body is answered 400 with the place of the fault in `param`, and the value
//! that is echoed is bounded.

use http::StatusCode;
use serde_json::{Map, Value};

use super::{ApiError, Call};

/// Longest value echoed (`_MAX_ERROR_INPUT_CHARS`).
const ECHO_CHARS_MAX: usize = 200;

fn schema_error(message: String, param: Option<String>) -> ApiError {
    let mut error = ApiError::new(StatusCode::BAD_REQUEST, "Bad Request", message);
    error.param = param;
    error
}

/// One pydantic complaint. `extra` is text behind the input, such as a context.
pub(crate) fn invalid(kind: &str, loc: &str, msg: &str, input: &str, extra: &str) -> ApiError {
    let entry = complaint(kind, loc, msg, input, extra);
    schema_error(format!("1 validation error:\n  {entry}"), Some(loc.to_owned()))
}

/// Several complaints; the first one is the `param`.
pub(crate) fn invalid_all(entries: &[String], param: &str) -> ApiError {
    let message = format!("{} validation errors:\n  {}", entries.len(), entries.join("\n  "));
    schema_error(message, Some(param.to_owned()))
}

/// The text of one complaint.
pub(crate) fn complaint(kind: &str, loc: &str, msg: &str, input: &str, extra: &str) -> String {
    let (loc, msg) = (quoted(loc), quoted(msg));
    format!("{{'type': '{kind}', 'loc': {loc}, 'msg': {msg}, 'input': {input}{extra}}}")
}

/// A string as Python's `repr` writes it.
pub(crate) fn quoted(text: &str) -> String {
    let shown: String = text.chars().take(ECHO_CHARS_MAX).collect();
    let cut = if shown.len() < text.len() { "...[truncated]" } else { "" };
    let quote = if shown.contains('\'') && !shown.contains('"') { '"' } else { '\'' };
    let mut out = String::from(quote);
    for c in shown.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\'' if quote == '\'' => out.push_str("\\'"),
            c => out.push(c),
        }
    }
    out.push_str(cut);
    out.push(quote);
    out
}

/// A value as the complaint echoes it.
pub(crate) fn echoed(value: &Value) -> String {
    match value {
        Value::Null => "'None'".to_owned(),
        Value::Bool(flag) => if *flag { "'True'" } else { "'False'" }.to_owned(),
        Value::Number(number) => format!("'{number}'"),
        Value::String(text) => quoted(text),
        Value::Array(items) => format!("'<list of {} items>'", items.len()),
        Value::Object(map) => format!("'<dict of {} items>'", map.len()),
    }
}

pub(crate) fn missing(loc: &str, within: &str) -> ApiError {
    invalid("missing", loc, "Field required", within, "")
}

/// The JSON object in a request's body.
pub(crate) fn json_object(call: &Call) -> Result<Map<String, Value>, ApiError> {
    let kind = call.header("content-type").unwrap_or("application/json");
    if kind.split(';').next().is_none_or(|kind| kind.trim() != "application/json") {
        let message = "1 validation error:\n  \
                       Unsupported Media Type: Only 'application/json' is allowed";
        return Err(schema_error(message.to_owned(), None));
    }
    if call.body.is_empty() {
        return Err(missing("body", "'None'"));
    }
    match serde_json::from_slice(&call.body) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(other) => Err(invalid(
            "model_attributes_type",
            "body",
            "Input should be a valid dictionary or object to extract fields from",
            &echoed(&other),
            "",
        )),
        Err(_) => {
            let (offset, fault) = python_json_error(&call.body);
            let context = format!(", 'ctx': {{'error': {}}}", quoted(fault));
            let loc = format!("body.{offset}");
            Err(invalid("json_invalid", &loc, "JSON decode error", "'<dict of 0 items>'", &context))
        }
    }
}

/// Where and how Python's `json` gives up on a text that is no JSON.
pub(crate) fn python_json_error(text: &[u8]) -> (usize, &'static str) {
    let mut scan = Scan { text, at: 0, depth: 0 };
    match scan.value() {
        Err(fault) => (scan.at, fault),
        Ok(()) => {
            scan.space();
            (scan.at, "Extra data")
        }
    }
}

struct Scan<'a> {
    text: &'a [u8],
    at: usize,
    depth: usize,
}

/// Python's own parser recurses about this deep.
const DEPTH_MAX: usize = 500;

type Fault = &'static str;

impl Scan<'_> {
    fn peek(&self) -> Option<u8> {
        self.text.get(self.at).copied()
    }

    fn space(&mut self) {
        while self.peek().is_some_and(|c| c.is_ascii_whitespace()) {
            self.at += 1;
        }
    }

    fn value(&mut self) -> Result<(), Fault> {
        self.space();
        self.depth += 1;
        if self.depth > DEPTH_MAX {
            return Err("Expecting value");
        }
        let result = match self.peek() {
            Some(b'{') => self.object(),
            Some(b'[') => self.array(),
            Some(b'"') => self.string(),
            Some(b'-' | b'0'..=b'9') => {
                self.word(|c| matches!(c, b'-' | b'+' | b'.' | b'e' | b'E' | b'0'..=b'9'))
            }
            Some(b't' | b'f' | b'n' | b'N' | b'I') => self.word(|c| c.is_ascii_alphabetic()),
            _ => Err("Expecting value"),
        };
        self.depth -= 1;
        result
    }

    fn word(&mut self, part: impl Fn(u8) -> bool) -> Result<(), Fault> {
        let start = self.at;
        while self.peek().is_some_and(&part) {
            self.at += 1;
        }
        let known = serde_json::from_slice::<Value>(&self.text[start..self.at]).is_ok();
        if known {
            return Ok(());
        }
        self.at = start;
        Err("Expecting value")
    }

    fn string(&mut self) -> Result<(), Fault> {
        let start = self.at;
        self.at += 1;
        loop {
            match self.peek() {
                None => {
                    self.at = start;
                    return Err("Unterminated string starting at");
                }
                Some(b'"') => {
                    self.at += 1;
                    return Ok(());
                }
                Some(b'\\') => self.at += 2,
                Some(c) if c < 0x20 => return Err("Invalid control character at"),
                Some(_) => self.at += 1,
            }
        }
    }

    fn array(&mut self) -> Result<(), Fault> {
        self.at += 1;
        self.space();
        if self.peek() == Some(b']') {
            self.at += 1;
            return Ok(());
        }
        loop {
            self.value()?;
            self.space();
            match self.peek() {
                Some(b',') => self.at += 1,
                Some(b']') => {
                    self.at += 1;
                    return Ok(());
                }
                _ => return Err("Expecting ',' delimiter"),
            }
        }
    }

    fn object(&mut self) -> Result<(), Fault> {
        self.at += 1;
        self.space();
        if self.peek() == Some(b'}') {
            self.at += 1;
            return Ok(());
        }
        loop {
            self.space();
            if self.peek() != Some(b'"') {
                return Err("Expecting property name enclosed in double quotes");
            }
            self.string()?;
            self.space();
            if self.peek() != Some(b':') {
                return Err("Expecting ':' delimiter");
            }
            self.at += 1;
            self.value()?;
            self.space();
            match self.peek() {
                Some(b',') => self.at += 1,
                Some(b'}') => {
                    self.at += 1;
                    return Ok(());
                }
                _ => return Err("Expecting ',' delimiter"),
            }
        }
    }
}

/// Reads typed fields of an object as pydantic does: null is absent, numeric text is a number.
pub(crate) struct Fields<'a>(pub(crate) &'a Map<String, Value>);

impl Fields<'_> {
    fn get(&self, name: &str) -> Option<&Value> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    fn wrong(name: &str, kind: &str, msg: &str, value: &Value) -> ApiError {
        invalid(kind, &format!("body.{name}"), msg, &echoed(value), "")
    }

    pub(crate) fn int(&self, name: &str) -> Result<Option<i64>, ApiError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let parsed = match value {
            Value::Number(number) => number
                .as_i64()
                .or_else(|| number.as_f64().filter(|f| f.fract() == 0.0).map(|f| f as i64)),
            Value::String(text) => text.trim().parse().ok(),
            Value::Bool(flag) => Some(i64::from(*flag)),
            _ => None,
        };
        if parsed.is_some() {
            return Ok(parsed);
        }
        let base = "Input should be a valid integer";
        Err(match value {
            Value::String(_) => {
                let msg = format!("{base}, unable to parse string as an integer");
                Self::wrong(name, "int_parsing", &msg, value)
            }
            Value::Number(_) => {
                let msg = format!("{base}, got a number with a fractional part");
                Self::wrong(name, "int_from_float", &msg, value)
            }
            _ => Self::wrong(name, "int_type", base, value),
        })
    }

    pub(crate) fn float(&self, name: &str) -> Result<Option<f64>, ApiError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let parsed = match value {
            Value::Number(number) => number.as_f64(),
            Value::String(text) => text.trim().parse().ok(),
            Value::Bool(flag) => Some(f64::from(u8::from(*flag))),
            _ => None,
        };
        let base = "Input should be a valid number";
        parsed.map(Some).ok_or_else(|| {
            if value.is_string() {
                let msg = format!("{base}, unable to parse string as a number");
                Self::wrong(name, "float_parsing", &msg, value)
            } else {
                Self::wrong(name, "float_type", base, value)
            }
        })
    }

    pub(crate) fn flag(&self, name: &str) -> Result<bool, ApiError> {
        let Some(value) = self.get(name) else { return Ok(false) };
        let parsed = match value {
            Value::Bool(flag) => Some(*flag),
            Value::String(text) => python_bool(text),
            Value::Number(number) => match number.as_i64() {
                Some(0) => Some(false),
                Some(1) => Some(true),
                _ => None,
            },
            _ => None,
        };
        let base = "Input should be a valid boolean";
        parsed.ok_or_else(|| {
            if value.is_string() || value.is_number() {
                let msg = format!("{base}, unable to interpret input");
                Self::wrong(name, "bool_parsing", &msg, value)
            } else {
                Self::wrong(name, "bool_type", base, value)
            }
        })
    }

    pub(crate) fn text(&self, name: &str) -> Result<Option<String>, ApiError> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text.clone())),
            Some(value) => {
                Err(Self::wrong(name, "string_type", "Input should be a valid string", value))
            }
        }
    }

    /// A string or a list of strings.
    pub(crate) fn texts(&self, name: &str) -> Result<Vec<String>, ApiError> {
        match self.get(name) {
            Some(Value::Array(items)) => items
                .iter()
                .map(|item| match item {
                    Value::String(text) => Ok(text.clone()),
                    value => Err(Self::wrong(
                        name,
                        "string_type",
                        "Input should be a valid string",
                        value,
                    )),
                })
                .collect(),
            _ => Ok(self.text(name)?.into_iter().collect()),
        }
    }

    pub(crate) fn raw(&self, name: &str) -> Option<&Value> {
        self.get(name)
    }
}

/// The texts that pydantic reads as a boolean.
pub(crate) fn python_bool(text: &str) -> Option<bool> {
    match text.to_ascii_lowercase().as_str() {
        "true" | "1" | "t" | "yes" | "y" | "on" => Some(true),
        "false" | "0" | "f" | "no" | "n" | "off" => Some(false),
        _ => None,
    }
}

/// A boolean query parameter.
pub(crate) fn query_flag(call: &Call, name: &str, default: bool) -> Result<bool, ApiError> {
    let Some(text) = query(call, name) else { return Ok(default) };
    python_bool(text).ok_or_else(|| {
        let msg = "Input should be a valid boolean, unable to interpret input";
        invalid("bool_parsing", &format!("query.{name}"), msg, &quoted(text), "")
    })
}

/// The last value of a query parameter.
pub(crate) fn query<'a>(call: &'a Call, name: &str) -> Option<&'a str> {
    call.query.iter().rev().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
}

/// Splits and decodes a query string.
pub(crate) fn parse_query(query: &str) -> Vec<(String, String)> {
    query
        .split('&')
        .filter(|pair| !pair.is_empty())
        .map(|pair| {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            (decoded(key), decoded(value))
        })
        .collect()
}

fn decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        rest = tail;
        let hex = tail.get(..2).and_then(|hex| std::str::from_utf8(hex).ok());
        match (first, hex.and_then(|hex| u8::from_str_radix(hex, 16).ok())) {
            (b'%', Some(byte)) => {
                bytes.push(byte);
                rest = &tail[2..];
            }
            (b'+', _) => bytes.push(b' '),
            (byte, _) => bytes.push(*byte),
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}
