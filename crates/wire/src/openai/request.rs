//! The body of a chat or completions request, read only where fak has to.
//! Invariant: fields that were not set keep their bytes, their order and their numbers as written.

use std::fmt;

use serde::de::{self, DeserializeOwned, Deserializer, MapAccess, Visitor};
use serde::ser::{SerializeMap, Serializer};
use serde::{Deserialize, Serialize};
use serde_json::value::{RawValue, to_raw_value};
use serde_json::{Map, Value};

/// Which route a body belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Api {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Completions,
}

/// Most fields a body may have; vLLM 0.32.0 knows about 80.
pub const FIELDS_MAX: usize = 512;

/// A body that cannot be forwarded, and why.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// Not JSON, not an object, a field given twice, or too many of them.
    #[error("body: {reason}")]
    Body {
        /// What is wrong, and where.
        reason: String,
    },
    /// A field of the wrong type or range.
    #[error("{field}: found {found}, expected {expected}")]
    Field {
        /// Its name.
        field: &'static str,
        /// Its value, shortened.
        found: String,
        /// What would be right.
        expected: &'static str,
    },
}

impl RequestError {
    /// The field at fault, for the `param` of an error body.
    #[must_use]
    pub fn param(&self) -> Option<&'static str> {
        match self {
            RequestError::Body { .. } => None,
            RequestError::Field { field, .. } => Some(field),
        }
    }
}

type Result<T> = std::result::Result<T, RequestError>;

/// The `prompt` of a completions request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Prompt {
    /// One text.
    Text(String),
    /// One prompt as token ids.
    Tokens(Vec<u32>),
    /// Several texts, each answered by choices of its own.
    Texts(Vec<String>),
    /// Several prompts as token ids.
    TokenLists(Vec<Vec<u32>>),
}

impl Prompt {
    /// How many prompts these are.
    #[must_use]
    pub fn count(&self) -> usize {
        match self {
            Prompt::Text(_) | Prompt::Tokens(_) => 1,
            Prompt::Texts(texts) => texts.len(),
            Prompt::TokenLists(lists) => lists.len(),
        }
    }
}

/// A request body. `null` reads as absent everywhere, as in vLLM.
#[derive(Debug, Clone)]
pub struct Request {
    api: Api,
    fields: Fields,
}

impl Request {
    /// Takes a body apart into its fields, whose values stay unread.
    ///
    /// # Errors
    /// If it is no JSON object, repeats a field (parsers differ in which one counts, so that a salt
    /// or a model could be smuggled past one of them), or has more than [`FIELDS_MAX`].
    pub fn parse(api: Api, body: &[u8]) -> Result<Self> {
        let fields = serde_json::from_slice(body)
            .map_err(|error| RequestError::Body { reason: error.to_string() })?;
        Ok(Request { api, fields })
    }

    /// The route.
    #[must_use]
    pub fn api(&self) -> Api {
        self.api
    }

    /// The body as JSON.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(&self.fields).expect("names and raw JSON always serialize")
    }

    /// The JSON text of a field, as it came; `None` if it is absent.
    #[must_use]
    pub fn raw(&self, field: &str) -> Option<&str> {
        let value = self.fields.0.iter().find(|(name, _)| name == field)?;
        Some(value.1.get())
    }

    /// Sets a field where it stands, or at the end.
    pub fn set(&mut self, field: &str, value: &Value) {
        self.set_raw(field, to_raw_value(value).expect("a JSON value always serializes"));
    }

    fn set_raw(&mut self, field: &str, value: Box<RawValue>) {
        match self.fields.0.iter_mut().find(|(name, _)| name == field) {
            Some((_, slot)) => *slot = value,
            None => self.fields.0.push((field.to_owned(), value)),
        }
    }

    /// The names of its fields, as they came.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.fields.0.iter().map(|(name, _)| name.as_str())
    }

    /// Takes what stands at the end of `path` out of the objects on it, however often it stands
    /// there and however its names are escaped; whether it was there. What is no object stays.
    pub fn remove_at(&mut self, path: &[&str]) -> bool {
        let [field, path @ ..] = path else { return false };
        let found = self.fields.0.iter_mut().find(|(name, _)| name == field);
        let Some((_, value)) = found else { return false };
        if path.is_empty() {
            self.remove(field);
            return true;
        }
        let Some(without) = without(value, path) else { return false };
        *value = without;
        true
    }

    /// Sets a key of an object in `field`, and keeps the others; `field` is made one where it is
    /// absent. Nothing is set where it is something else.
    pub fn set_within(&mut self, field: &str, key: &str, value: &Value) {
        let absent = "{}";
        let raw = self.raw(field).filter(|raw| *raw != "null").unwrap_or(absent);
        let Ok(Entries(mut entries)) = serde_json::from_str(raw) else { return };
        entries.retain(|(name, _)| name != key);
        let value = to_raw_value(value).expect("a JSON value always serializes");
        entries.push((key.to_owned(), value));
        self.set_raw(field, to_raw_value(&Fields(entries)).expect("raw JSON always serializes"));
    }

    /// Takes a field out.
    pub fn remove(&mut self, field: &str) {
        self.fields.0.retain(|(name, _)| name != field);
    }

    /// The model's name; `None` lets the engine take its first.
    ///
    /// # Errors
    /// If it is no string. An empty one names no model, as vLLM takes it (0.32.0, observed).
    pub fn model(&self) -> Result<Option<String>> {
        let model: Option<String> = self.read("model", "a string")?;
        Ok(model.filter(|model| !model.is_empty()))
    }

    /// Sets the model's name.
    pub fn set_model(&mut self, model: &str) {
        self.set("model", &model.into());
    }

    /// Whether the answer is to be streamed.
    ///
    /// # Errors
    /// If it is nothing that vLLM takes for a boolean.
    pub fn stream(&self) -> Result<bool> {
        const EXPECTED: &str = "true or false";
        match self.read("stream", EXPECTED)? {
            None => Ok(false),
            Some(value) => lax_bool(&value).ok_or_else(|| self.wrong("stream", EXPECTED)),
        }
    }

    /// Sets whether the answer is to be streamed.
    pub fn set_stream(&mut self, stream: bool) {
        self.set("stream", &stream.into());
    }

    /// Whether a stream is to end with a chunk of usage.
    ///
    /// # Errors
    /// If `stream_options` is no object, or its `include_usage` no boolean.
    pub fn include_usage(&self) -> Result<bool> {
        let expected = "an object whose include_usage is true or false";
        let options: Option<Map<String, Value>> = self.read("stream_options", expected)?;
        match options.as_ref().and_then(|options| options.get("include_usage")) {
            None | Some(Value::Null) => Ok(false),
            Some(Value::Bool(include_usage)) => Ok(*include_usage),
            Some(_) => Err(self.wrong("stream_options", expected)),
        }
    }

    /// Sets whether a stream is to end with a chunk of usage, and keeps the other stream options.
    /// vLLM refuses stream options in a request that does not stream.
    ///
    /// # Errors
    /// If `stream_options` is there and no object.
    pub fn set_include_usage(&mut self, include_usage: bool) -> Result<()> {
        let options: Option<Map<String, Value>> = self.read("stream_options", "an object")?;
        let mut options = options.unwrap_or_default();
        options.insert("include_usage".to_owned(), include_usage.into());
        self.set("stream_options", &options.into());
        Ok(())
    }

    /// The client's cache salt.
    ///
    /// # Errors
    /// If it is no string of 1 to 1024 characters, as vLLM demands.
    pub fn cache_salt(&self) -> Result<Option<String>> {
        let expected = "a string of 1 to 1024 characters";
        let salt: Option<String> = self.read("cache_salt", expected)?;
        match &salt {
            Some(text) if text.is_empty() || text.chars().count() > 1024 => {
                Err(self.wrong("cache_salt", expected))
            }
            _ => Ok(salt),
        }
    }

    /// Sets the cache salt, or takes it out.
    pub fn set_cache_salt(&mut self, salt: Option<&str>) {
        self.set_or_remove("cache_salt", salt.map(Value::from));
    }

    /// The scheduling priority; lower runs first.
    ///
    /// # Errors
    /// If it is no whole number.
    pub fn priority(&self) -> Result<Option<i64>> {
        self.read("priority", "a whole number")
    }

    /// Sets the scheduling priority, or takes it out.
    pub fn set_priority(&mut self, priority: Option<i64>) {
        self.set_or_remove("priority", priority.map(Value::from));
    }

    /// OpenAI's name for requests that share a prefix.
    ///
    /// # Errors
    /// If it is no string.
    pub fn prompt_cache_key(&self) -> Result<Option<String>> {
        self.read("prompt_cache_key", "a string")
    }

    /// The prompt of a completions request; `None` if there is none, as with `prompt_embeds`.
    ///
    /// # Errors
    /// If it is none of the forms of [`Prompt`].
    pub fn prompt(&self) -> Result<Option<Prompt>> {
        let Some(raw) = self.raw("prompt").filter(|raw| *raw != "null") else { return Ok(None) };
        let read = if raw.starts_with('"') {
            serde_json::from_str(raw).map(Prompt::Text)
        } else {
            serde_json::from_str(raw)
                .map(Prompt::Tokens)
                .or_else(|_| serde_json::from_str(raw).map(Prompt::TokenLists))
                .or_else(|_| serde_json::from_str(raw).map(Prompt::Texts))
        };
        let expected = "a string, an array of strings, of token ids or of arrays of token ids";
        read.map(Some).map_err(|_| self.wrong("prompt", expected))
    }

    /// The messages of a chat request.
    ///
    /// # Errors
    /// If they are missing or no array of objects.
    pub fn messages(&self) -> Result<Vec<Map<String, Value>>> {
        let expected = "an array of message objects";
        let messages = self.read("messages", expected)?;
        messages.ok_or_else(|| self.wrong("messages", expected))
    }

    /// Most tokens to answer with: `max_completion_tokens` of a chat request, else `max_tokens`.
    ///
    /// # Errors
    /// If it is no whole number of 0 or more.
    pub fn max_tokens(&self) -> Result<Option<u64>> {
        let expected = "a whole number of 0 or more";
        if self.api == Api::Chat
            && let Some(max) = self.read("max_completion_tokens", expected)?
        {
            return Ok(Some(max));
        }
        self.read("max_tokens", expected)
    }

    /// How many choices a full answer has: `n` for each prompt.
    ///
    /// # Errors
    /// If `n` is no whole number of 1 or more, or the prompt has no known form.
    pub fn choices(&self) -> Result<usize> {
        let expected = "a whole number of 1 or more";
        let n = self.read::<u32>("n", expected)?.unwrap_or(1);
        if n == 0 {
            return Err(self.wrong("n", expected));
        }
        let prompts = match self.api {
            Api::Chat => 1,
            Api::Completions => self.prompt()?.map_or(1, |prompt| prompt.count()),
        };
        Ok(prompts.saturating_mul(n as usize))
    }

    fn set_or_remove(&mut self, field: &str, value: Option<Value>) {
        match value {
            Some(value) => self.set(field, &value),
            None => self.remove(field),
        }
    }

    fn read<T: DeserializeOwned>(
        &self,
        field: &'static str,
        expected: &'static str,
    ) -> Result<Option<T>> {
        match self.raw(field) {
            None => Ok(None),
            Some(raw) => serde_json::from_str(raw).map_err(|_| self.wrong(field, expected)),
        }
    }

    fn wrong(&self, field: &'static str, expected: &'static str) -> RequestError {
        let raw = self.raw(field).unwrap_or("nothing");
        RequestError::Field { field, found: shortened(raw), expected }
    }
}

/// A boolean as pydantic reads one where it is not told to be strict (2.12, documented), and so as
/// vLLM does.
fn lax_bool(value: &Value) -> Option<bool> {
    match value {
        Value::Bool(value) => Some(*value),
        Value::Number(number) => match number.as_f64()? {
            0.0 => Some(false),
            1.0 => Some(true),
            _ => None,
        },
        Value::String(text) => match text.to_ascii_lowercase().as_str() {
            "true" | "t" | "yes" | "y" | "on" | "1" => Some(true),
            "false" | "f" | "no" | "n" | "off" | "0" => Some(false),
            _ => None,
        },
        _ => None,
    }
}

/// The first characters of a value, enough to know it again.
fn shortened(raw: &str) -> String {
    const CHARS_MAX: usize = 60;
    let mut chars = raw.chars();
    let mut text: String = chars.by_ref().take(CHARS_MAX).collect();
    if chars.next().is_some() {
        text.push('…');
    }
    text
}

/// Fields in the order they came, their values as JSON text.
#[derive(Debug, Clone)]
pub(super) struct Fields(pub(super) Vec<(String, Box<RawValue>)>);

impl Serialize for Fields {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (name, value) in &self.0 {
            map.serialize_entry(name, value)?;
        }
        map.end()
    }
}

impl<'de> Deserialize<'de> for Fields {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        deserializer.deserialize_map(FieldsVisitor)
    }
}

/// The entries of an object inside a body, which may have a name twice: engines take the last one.
struct Entries(Vec<(String, Box<RawValue>)>);

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        deserializer.deserialize_map(EntriesVisitor)
    }
}

struct EntriesVisitor;

impl<'de> Visitor<'de> for EntriesVisitor {
    type Value = Entries;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Entries, A::Error> {
        let mut entries = Vec::new();
        while let Some(entry) = map.next_entry()? {
            entries.push(entry);
        }
        Ok(Entries(entries))
    }
}

/// An object without what stands at the end of `path`; nothing where nothing does.
fn without(value: &RawValue, path: &[&str]) -> Option<Box<RawValue>> {
    let [key, path @ ..] = path else { return None };
    let Entries(mut entries) = serde_json::from_str(value.get()).ok()?;
    let mut is_changed = false;
    if path.is_empty() {
        let before = entries.len();
        entries.retain(|(name, _)| name != key);
        is_changed = entries.len() != before;
    } else {
        for (_, value) in entries.iter_mut().filter(|(name, _)| name == key) {
            if let Some(without) = without(value, path) {
                *value = without;
                is_changed = true;
            }
        }
    }
    is_changed.then(|| to_raw_value(&Fields(entries)).expect("raw JSON always serializes"))
}

struct FieldsVisitor;

impl<'de> Visitor<'de> for FieldsVisitor {
    type Value = Fields;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Fields, A::Error> {
        let mut fields: Vec<(String, Box<RawValue>)> = Vec::new();
        while let Some((name, value)) = map.next_entry::<String, Box<RawValue>>()? {
            if fields.iter().any(|(seen, _)| *seen == name) {
                let name = shortened(&name);
                return Err(de::Error::custom(format!("found {name} twice, expected it once")));
            }
            if fields.len() == FIELDS_MAX {
                let text = format!("found more than {FIELDS_MAX} fields, expected at most that");
                return Err(de::Error::custom(text));
            }
            fields.push((name, value));
        }
        Ok(Fields(fields))
    }
}
