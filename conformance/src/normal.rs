//! Answers as lines that two engines can share.
//! Invariant: a value is replaced only where two runs of one engine may differ in it, and the
//! field stays in its place.

use serde_json::{Map, Value};

use crate::client::Answer;

/// Parts of an answer that depend on more than what was asked, as the call's step knows.
#[derive(Clone, Copy, Debug, Default)]
pub struct Unknowns {
    /// The prompt was text, and each engine has a tokenizer of its own.
    pub prompt_tokens: bool,
    /// The answer was cut at a moment that timing decides.
    pub generated_tokens: bool,
}

/// The answer, line by line.
pub fn answer(answer: &Answer, unknowns: Unknowns) -> Vec<String> {
    let content_type = match answer.content_type.as_str() {
        "" => "-",
        text => text,
    };
    let mut lines = vec![format!("{} {content_type}", answer.status)];
    let body = String::from_utf8_lossy(&answer.body);
    if answer.content_type.starts_with("text/event-stream") {
        lines.extend(stream(&body, unknowns));
    } else {
        lines.extend(unary(&body, unknowns));
    }
    if let Some(failure) = &answer.failure {
        lines.push(format!("cut: {failure}"));
    } else if !answer.is_complete {
        lines.push("closed by the client".to_owned());
    }
    lines
}

fn unary(body: &str, unknowns: Unknowns) -> Vec<String> {
    if body.is_empty() {
        return vec!["no body".to_owned()];
    }
    let Ok(value) = serde_json::from_str::<Value>(body) else {
        return body.lines().map(|line| format!("text {line}")).collect();
    };
    let masks = Masks { is_stream: false, ..Masks::new(unknowns, was_aborted(&value)) };
    vec![masks.apply("", value).to_string()]
}

/// Where one chunk ends and the next begins depends on timing: equal neighbours become one line.
fn stream(body: &str, unknowns: Unknowns) -> Vec<String> {
    let chunks: Vec<_> = body.split("\n\n").filter(|chunk| !chunk.is_empty()).collect();
    let values: Vec<Option<Value>> = chunks
        .iter()
        .map(|chunk| serde_json::from_str(chunk.strip_prefix("data: ")?).ok())
        .collect();
    let aborted = values.iter().flatten().any(was_aborted);
    let masks = Masks { is_stream: true, ..Masks::new(unknowns, aborted) };
    let lines = chunks.iter().zip(values).map(|(chunk, value)| match value {
        // How many tokens it brings is where it ends.
        Some(value) if is_under_way(&value) => {
            Masks { generated_tokens: true, ..masks }.apply("", value).to_string()
        }
        Some(value) => masks.apply("", value).to_string(),
        None => (*chunk).to_owned(),
    });
    let mut lines: Vec<_> = lines.collect();
    lines.dedup();
    lines
}

fn was_aborted(value: &Value) -> bool {
    let choices = value.get("choices").and_then(Value::as_array);
    choices.is_some_and(|all| all.iter().any(|one| one["finish_reason"] == "abort"))
}

/// Whether it brings text, and more comes after it.
fn is_under_way(chunk: &Value) -> bool {
    let choices = chunk.get("choices").and_then(Value::as_array).filter(|all| !all.is_empty());
    choices.is_some_and(|all| all.iter().all(|one| one["finish_reason"].is_null()))
}

#[derive(Clone, Copy)]
struct Masks {
    prompt_tokens: bool,
    generated_tokens: bool,
    is_stream: bool,
}

impl Masks {
    fn new(unknowns: Unknowns, aborted: bool) -> Self {
        Masks {
            prompt_tokens: unknowns.prompt_tokens,
            generated_tokens: unknowns.generated_tokens || aborted,
            is_stream: false,
        }
    }

    fn apply(&self, key: &str, value: Value) -> Value {
        match value {
            Value::Object(fields) => Value::Object(self.object(fields)),
            Value::Array(ids) if key.ends_with("token_ids") || key.starts_with("token") => {
                if self.is_stream && key == "token_ids" || self.prompt_tokens {
                    return "<ids>".into();
                }
                format!("<{} ids>", ids.len()).into()
            }
            Value::Array(items) => items.into_iter().map(|item| self.apply(key, item)).collect(),
            Value::String(text) => self.text(key, text),
            Value::Number(number) => match key {
                "created" => "<time>".into(),
                "prompt_tokens" | "count" if self.prompt_tokens => "<n>".into(),
                "completion_tokens" if self.generated_tokens => "<n>".into(),
                "total_tokens" if self.prompt_tokens || self.generated_tokens => "<n>".into(),
                _ => Value::Number(number),
            },
            other => other,
        }
    }

    fn object(&self, fields: Map<String, Value>) -> Map<String, Value> {
        // The first chunk of a chat announces the role with an empty content of its own.
        let announces = fields.contains_key("role") && self.is_stream;
        let masked = fields.into_iter().map(|(key, value)| match key.as_str() {
            "content" if announces => (key, value),
            _ => {
                let value = self.apply(&key, value);
                (key, value)
            }
        });
        masked.collect()
    }

    fn text(&self, key: &str, text: String) -> Value {
        match key {
            "text" | "content" | "prompt" => "<text>".into(),
            "system_fingerprint" => "<fingerprint>".into(),
            "root" => "<path>".into(),
            "id" => id(&text).into(),
            "endpoint" | "replay_endpoint" => match text.rsplit_once(':') {
                Some((host, _port)) => format!("{host}:<port>").into(),
                None => text.into(),
            },
            _ => text.into(),
        }
    }
}

/// `cmpl-b29a206ce9e7c504` is `cmpl-<hex>`; an id that the client chose stays.
fn id(text: &str) -> String {
    match text.rsplit_once('-') {
        Some((kind, rest)) if rest.len() >= 8 && rest.bytes().all(|b| b.is_ascii_hexdigit()) => {
            format!("{kind}-<hex>")
        }
        _ => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sse(body: &str) -> Answer {
        Answer {
            status: 200,
            content_type: "text/event-stream".to_owned(),
            body: body.as_bytes().to_vec(),
            is_complete: true,
            ..Answer::default()
        }
    }

    #[test]
    fn neighbouring_text_chunks_are_one() {
        let chunk = |text: &str, finish: &str| {
            format!(
                "data: {{\"choices\":[{{\"text\":\"{text}\",\"finish_reason\":{finish}}}]}}\n\n"
            )
        };
        let many = chunk("a", "null") + &chunk("b", "null") + &chunk("c", "\"length\"");
        let few = chunk("ab", "null") + &chunk("", "\"length\"");
        let lines = answer(&sse(&many), Unknowns::default());
        assert_eq!(lines, answer(&sse(&few), Unknowns::default()));
        assert_eq!(lines.len(), 3, "{lines:?}");
    }

    #[test]
    fn chunks_that_tell_how_far_they_are_are_one_too() {
        let chunk = |tokens: u32, finish: &str| {
            let usage = format!(r#"{{"prompt_tokens":7,"completion_tokens":{tokens}}}"#);
            format!(
                "data: {{\"choices\":[{{\"text\":\"a\",\"finish_reason\":{finish}}}],\
                 \"usage\":{usage}}}\n\n"
            )
        };
        let many = chunk(1, "null") + &chunk(2, "null") + &chunk(3, "\"length\"");
        let few = chunk(2, "null") + &chunk(3, "\"length\"");
        let lines = answer(&sse(&many), Unknowns::default());
        assert_eq!(lines, answer(&sse(&few), Unknowns::default()));
        assert!(lines[2].contains("\"completion_tokens\":3"), "{lines:?}");
    }

    #[test]
    fn an_abort_hides_how_far_it_came() {
        let body = |n: u32| {
            let chunk = r#"data: {"choices":[{"text":"","finish_reason":"abort"}]}"#;
            let usage = format!(r#"{{"prompt_tokens":7,"completion_tokens":{n}}}"#);
            format!("{chunk}\n\ndata: {{\"choices\":[],\"usage\":{usage}}}\n\n")
        };
        let lines = answer(&sse(&body(3)), Unknowns::default());
        assert_eq!(lines, answer(&sse(&body(90)), Unknowns::default()));
        assert!(lines[2].contains("\"prompt_tokens\":7"), "{lines:?}");
    }

    #[test]
    fn what_is_not_sse_is_kept() {
        let lines = answer(&sse(": ping\n\ndata: [DONE]\n\n"), Unknowns::default());
        assert_eq!(lines[1..], [": ping", "data: [DONE]"]);
    }
}
