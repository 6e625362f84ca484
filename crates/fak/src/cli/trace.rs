//! The trace file: calls in order, and what each becomes on its way to the engine.
//!
//! Invariant: a key that means nothing here is refused, since a mistyped `fak_cache_tenant` or
//! `policy` would silently drop an isolation or a floor; keys that start with `_` are notes. A
//! call's `meta` may hold foreign keys.

use serde_json::{Map, Value, json};

/// Largest trace file that is read, in bytes.
pub const TRACE_BYTES_MAX: u64 = 64 << 20;

/// Output tokens asked for where a call says nothing: a call that is lowered to a message carries
/// no sampling of its own, and without a bound a chat runs to the end of the model's context.
const LOWERED_TOKENS_MAX: u32 = 256;

/// A trace that cannot be run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Not JSON.
    #[error("the trace is not JSON")]
    Json(#[from] serde_json::Error),
    /// JSON, but not a trace.
    #[error("{place} {problem}")]
    Shape {
        /// Where: `calls[3].meta`.
        place: String,
        /// What is wrong and what would be right.
        problem: String,
    },
}

/// A trace file.
#[derive(Clone, Debug, PartialEq)]
pub struct Trace {
    /// The calls, in order.
    pub calls: Vec<Call>,
    /// The capability floor that the trace brings along; `--policy` goes before it.
    pub policy: Option<Value>,
}

/// The OpenAI endpoint that a call goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Completions,
}

impl Endpoint {
    fn parse(word: &str) -> Option<Self> {
        match word {
            "chat" => Some(Self::Chat),
            "completions" => Some(Self::Completions),
            _ => None,
        }
    }
}

/// One call of a trace.
#[derive(Clone, Debug, PartialEq)]
pub struct Call {
    /// The tool, as the floor knows it.
    pub tool: String,
    /// Where it goes.
    pub endpoint: Endpoint,
    /// The request body before fak adds to it.
    pub body: Map<String, Value>,
    /// The session, if the call names one.
    pub session: Option<String>,
    /// The tenant whose cache it uses.
    pub tenant: Option<String>,
    /// The turn's priority; lower is sooner, as vLLM has it.
    pub priority: Option<i64>,
}

impl Trace {
    /// Reads a trace.
    ///
    /// # Errors
    ///
    /// [`Error`] names the place and what would be right.
    pub fn parse(bytes: &[u8]) -> Result<Self, Error> {
        let Value::Object(mut file) = serde_json::from_slice(bytes)? else {
            return Err(shape("the trace", "is not an object with \"calls\""));
        };
        let calls = match file.shift_remove("calls") {
            Some(Value::Array(calls)) => calls,
            _ => return Err(shape("the trace", "has no array \"calls\"")),
        };
        let policy = file.shift_remove("policy");
        refuse_unknown("the trace", &file, "\"calls\" and \"policy\"")?;
        let calls = calls.into_iter().enumerate().map(|(index, call)| {
            let place = format!("calls[{index}]");
            match call {
                Value::Object(call) => Call::parse(&place, call),
                _ => Err(shape(&place, "is not an object")),
            }
        });
        Ok(Self { calls: calls.collect::<Result<_, _>>()?, policy })
    }
}

impl Call {
    fn parse(place: &str, mut call: Map<String, Value>) -> Result<Self, Error> {
        let tool = match call.shift_remove("tool") {
            Some(Value::String(tool)) if !tool.is_empty() => tool,
            _ => return Err(shape(place, "has no \"tool\" that is a text")),
        };
        let args = match call.shift_remove("args") {
            None => Map::new(),
            Some(Value::Object(args)) => args,
            Some(_) => return Err(shape(place, "has \"args\" that are not an object")),
        };
        let meta = match call.shift_remove("meta") {
            None => Map::new(),
            Some(Value::Object(meta)) => meta,
            Some(_) => return Err(shape(place, "has a \"meta\" that is not an object")),
        };
        refuse_unknown(place, &call, "\"tool\", \"args\" and \"meta\"")?;
        let meta = Meta::parse(&format!("{place}.meta"), &meta)?;
        let (endpoint, body) = lower(place, &tool, args, meta.endpoint)?;
        let Meta { session, tenant, priority, .. } = meta;
        Ok(Self { tool, endpoint, body, session, tenant, priority })
    }
}

#[derive(Default)]
struct Meta {
    session: Option<String>,
    tenant: Option<String>,
    priority: Option<i64>,
    endpoint: Option<Endpoint>,
}

impl Meta {
    fn parse(place: &str, meta: &Map<String, Value>) -> Result<Self, Error> {
        let mut parsed = Self::default();
        for (key, value) in meta.iter().filter(|(key, _)| !key.starts_with('_')) {
            let wrong =
                |right: &str| shape(place, &format!("has {key}={value}, which is not {right}"));
            let word = value.as_str().filter(|word| !word.is_empty());
            match key.as_str() {
                "session" => parsed.session = Some(word.ok_or_else(|| wrong("a text"))?.to_owned()),
                "fak_cache_tenant" => {
                    parsed.tenant = Some(word.ok_or_else(|| wrong("a text"))?.to_owned());
                }
                "fak_turn_priority" => {
                    let number = word.and_then(|word| word.parse().ok()).or_else(|| value.as_i64());
                    parsed.priority = Some(number.ok_or_else(|| wrong("an integer, as in \"1\""))?);
                }
                "openai_endpoint" => {
                    let endpoint = word.and_then(Endpoint::parse);
                    parsed.endpoint =
                        Some(endpoint.ok_or_else(|| wrong("\"chat\" or \"completions\""))?);
                }
                _ if key.starts_with("fak_") => {
                    return Err(shape(
                        place,
                        &format!("has {key}; known are fak_cache_tenant and fak_turn_priority"),
                    ));
                }
                _ => {}
            }
        }
        Ok(parsed)
    }
}

/// What a call is sent as. Args with `messages` or `prompt` are a request body already; any other
/// args are a tool's, and become a user message of the tool's name and its arguments.
fn lower(
    place: &str,
    tool: &str,
    args: Map<String, Value>,
    asked: Option<Endpoint>,
) -> Result<(Endpoint, Map<String, Value>), Error> {
    let own = match (args.contains_key("messages"), args.contains_key("prompt")) {
        (true, true) => return Err(shape(place, "has args with both \"messages\" and \"prompt\"")),
        (true, false) => Some(Endpoint::Chat),
        (false, true) => Some(Endpoint::Completions),
        (false, false) => None,
    };
    if let Some(own) = own {
        return match asked {
            Some(asked) if asked != own => {
                Err(shape(place, "has an openai_endpoint that its args do not fit"))
            }
            _ => Ok((own, args)),
        };
    }
    let args: Map<_, _> = args.into_iter().filter(|(key, _)| !key.starts_with('_')).collect();
    let message = format!("{tool} {}", Value::Object(args));
    let mut body = Map::new();
    let endpoint = asked.unwrap_or(Endpoint::Chat);
    match endpoint {
        Endpoint::Chat => {
            body.insert("messages".to_owned(), json!([{"role": "user", "content": message}]));
        }
        Endpoint::Completions => {
            body.insert("prompt".to_owned(), message.into());
        }
    }
    body.insert("max_tokens".to_owned(), LOWERED_TOKENS_MAX.into());
    Ok((endpoint, body))
}

fn refuse_unknown(place: &str, rest: &Map<String, Value>, known: &str) -> Result<(), Error> {
    match rest.keys().find(|key| !key.starts_with('_')) {
        None => Ok(()),
        Some(key) => Err(shape(place, &format!("has {key:?}; known are {known}"))),
    }
}

fn shape(place: &str, problem: &str) -> Error {
    Error::Shape { place: place.to_owned(), problem: problem.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(value: &Value) -> Result<Trace, Error> {
        Trace::parse(value.to_string().as_bytes())
    }

    fn call(value: &Value) -> Call {
        let mut trace = parse(&json!({"calls": [value]})).expect("a trace");
        trace.calls.remove(0)
    }

    #[test]
    fn args_that_are_a_body_go_as_they_are() {
        let chat = call(&json!({"tool": "t", "args": {"messages": [], "top_p": 0.5, "_x": 1}}));
        assert_eq!(chat.endpoint, Endpoint::Chat);
        assert_eq!(Value::Object(chat.body), json!({"messages": [], "top_p": 0.5, "_x": 1}));
        let text = call(&json!({"tool": "t", "args": {"prompt": [1, 2]}}));
        assert_eq!(text.endpoint, Endpoint::Completions);
        assert_eq!(Value::Object(text.body), json!({"prompt": [1, 2]}));
    }

    #[test]
    fn other_args_are_lowered_to_a_message() {
        let args = json!({"city": "Graz", "days": 2, "_note": "left out"});
        let chat = call(&json!({"tool": "weather", "args": args}));
        let message = r#"weather {"city":"Graz","days":2}"#;
        assert_eq!(chat.body["messages"], json!([{"role": "user", "content": message}]));
        let meta = json!({"openai_endpoint": "completions"});
        let text = call(&json!({"tool": "weather", "args": args, "meta": meta}));
        assert_eq!(
            (text.endpoint, text.body["prompt"].as_str()),
            (Endpoint::Completions, Some(message))
        );
    }

    #[test]
    fn meta_is_read_and_foreign_keys_are_left_alone() {
        let meta = json!({"session": "s", "fak_cache_tenant": "a", "fak_turn_priority": "-1",
            "_note": 1, "ticket": 7});
        let call = call(&json!({"tool": "t", "meta": meta, "_note": "x"}));
        assert_eq!(call.session.as_deref(), Some("s"));
        assert_eq!(call.tenant.as_deref(), Some("a"));
        assert_eq!(call.priority, Some(-1));
    }

    #[test]
    fn what_means_nothing_is_refused_with_its_place() {
        let message = |value: &Value| parse(value).expect_err("refused").to_string();
        for (value, expected) in [
            (json!([]), "the trace is not an object with \"calls\""),
            (json!({}), "the trace has no array \"calls\""),
            (json!({"calls": [], "polcy": {}}), "the trace has \"polcy\"; known are"),
            (json!({"calls": [1]}), "calls[0] is not an object"),
            (json!({"calls": [{}]}), "calls[0] has no \"tool\""),
            (json!({"calls": [{"tool": "t", "arg": {}}]}), "calls[0] has \"arg\"; known are"),
            (
                json!({"calls": [{"tool": "t", "meta": {"fak_cache_tenat": "a"}}]}),
                "calls[0].meta has fak_cache_tenat; known are",
            ),
            (
                json!({"calls": [{"tool": "t", "meta": {"openai_endpoint": "x"}}]}),
                "calls[0].meta has openai_endpoint=\"x\", which is not",
            ),
            (
                json!({"calls": [{"tool": "t", "args": {"messages": [], "prompt": ""}}]}),
                "calls[0] has args with both",
            ),
            (
                json!({"calls": [{"tool": "t", "args": {"prompt": ""},
                    "meta": {"openai_endpoint": "chat"}}]}),
                "calls[0] has an openai_endpoint that its args do not fit",
            ),
        ] {
            assert!(message(&value).starts_with(expected), "{}", message(&value));
        }
        assert_eq!(Trace::parse(b"{").expect_err("refused").to_string(), "the trace is not JSON");
    }
}
