//! The requests of a sweep: which fields an engine's schema has, and which of them are suspicious.

use anyhow::Context;
use serde_json::{Map, Value, json};

use super::values;
use crate::client::Client;
use crate::session::DEADLINE;

/// Fields that one request has beside a plain one's.
pub(super) type Probe = Map<String, Value>;

/// The two generating routes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Route {
    Completions,
    Chat,
}

impl Route {
    pub(super) fn path(self) -> &'static str {
        match self {
            Self::Completions => "/v1/completions",
            Self::Chat => "/v1/chat/completions",
        }
    }

    fn schema(self) -> &'static str {
        match self {
            Self::Completions => "CompletionRequest",
            Self::Chat => "ChatCompletionRequest",
        }
    }
}

/// What makes the request another one altogether: the suspicious values say how these may differ.
const SET_BY_HAND: [&str; 3] = ["model", "prompt", "messages"];

/// Fields that bound the work: without them, an answer runs to the model's length.
const BOUNDS: [&str; 2] = ["max_tokens", "max_completion_tokens"];

/// The properties of either request, as the engine's `/openapi.json` gives them.
pub(super) async fn schemas(client: &Client) -> anyhow::Result<Vec<(Route, Map<String, Value>)>> {
    let text = client.plain("GET /openapi.json", DEADLINE).await?;
    let document: Value = serde_json::from_str(&text)?;
    [Route::Completions, Route::Chat]
        .into_iter()
        .map(|route| {
            let pointer = format!("/components/schemas/{}/properties", route.schema());
            let found = document.pointer(&pointer).and_then(Value::as_object);
            let properties = found.with_context(|| format!("no {pointer} in /openapi.json"))?;
            let resolved = properties
                .iter()
                .map(|(name, property)| (name.clone(), values::resolve(property, &document)));
            Ok((route, resolved.collect()))
        })
        .collect()
}

/// Every field with each of its values, and every suspicious value, by itself.
pub(super) fn singles(route: Route, schema: &Map<String, Value>) -> Vec<Probe> {
    let swept = schema.iter().filter(|(name, _)| !SET_BY_HAND.contains(&name.as_str()));
    let swept = swept.flat_map(|(name, property)| {
        let bounds = BOUNDS.contains(&name.as_str());
        let values = values::of(property).into_iter().filter(move |v| !(bounds && v.is_null()));
        values.map(move |value| Probe::from_iter([(name.clone(), value)]))
    });
    let mut probes: Vec<Probe> = swept.collect();
    for (name, value) in suspicious(route) {
        let probe = Probe::from_iter([(name.to_owned(), value)]);
        if !probes.contains(&probe) {
            probes.push(probe);
        }
    }
    probes
}

/// Every two suspicious values of different fields.
pub(super) fn pairs(route: Route) -> Vec<Probe> {
    let suspects = suspicious(route);
    let mut pairs = Vec::new();
    for (index, (name, value)) in suspects.iter().enumerate() {
        for (other, with) in suspects[index + 1..].iter().filter(|(other, _)| other != name) {
            let both = [((*name).to_owned(), value.clone()), ((*other).to_owned(), with.clone())];
            pairs.push(Probe::from_iter(both));
        }
    }
    pairs
}

/// A chat's content: more than three blocks of tokens in every vocabulary in use.
pub(super) fn content(number: u32) -> String {
    (0..30).map(|word| format!("{number} and {word}, ")).collect()
}

/// What could make a prompt another one, or have the engine pass by its cache.
fn suspicious(route: Route) -> Vec<(&'static str, Value)> {
    let mut all = vec![
        ("model", json!("small")),
        ("model", json!("sql")),
        ("echo", json!(true)),
        ("logprobs", json!(true)),
        ("prompt_logprobs", json!(0)),
        ("prompt_logprobs", json!(false)),
        ("prompt_logprobs", Value::Null),
        ("cache_salt", json!("sql")),
        ("vllm_xargs", json!({"kv_cache_report_mode": "full"})),
        ("vllm_xargs", json!({"skip_reading_prefix_cache": 1})),
        ("kv_transfer_params", json!({"do_remote_decode": true})),
        ("response_format", json!({"type": "json_object"})),
        ("structured_outputs", json!({"choice": ["a", "b"]})),
        ("add_special_tokens", json!(false)),
        ("add_special_tokens", json!(true)),
        ("truncate_prompt_tokens", json!(40)),
        ("truncation_side", json!("left")),
        ("priority", json!(1)),
        ("n", json!(2)),
        ("stream", json!(true)),
        ("session_id", json!("s")),
        ("use_beam_search", json!(true)),
        ("logprob_token_ids", json!([7])),
        ("prompt_logprob_token_ids", json!([7])),
        ("skip_reading_prefix_cache", json!(true)),
    ];
    all.extend(match route {
        Route::Completions => vec![
            ("logprobs", json!(0)),
            ("logprobs", json!(false)),
            ("suffix", json!("x")),
            ("max_tokens", json!(0)),
        ],
        Route::Chat => of_chats(),
    });
    all
}

fn of_chats() -> Vec<(&'static str, Value)> {
    let parts = json!([{"role": "user", "content": [{"type": "text", "text": content(0)}]}]);
    let answered = json!([
        {"role": "user", "content": content(0)}, {"role": "assistant", "content": "so"}
    ]);
    let tool = json!([{"type": "function", "function": {"name": "f", "parameters": {}}}]);
    vec![
        ("messages", parts),
        ("messages", answered),
        ("top_logprobs", json!(0)),
        ("top_logprobs", Value::Null),
        ("tools", tool),
        ("tool_choice", json!("none")),
        ("tool_choice", json!("auto")),
        ("chat_template", json!("{{ messages[0]['content'] }}")),
        ("chat_template_kwargs", json!({"add_generation_prompt": false})),
        ("add_generation_prompt", json!(false)),
        ("continue_final_message", json!(true)),
        ("mm_processor_kwargs", json!({"a": 1})),
        ("documents", json!([{"title": "t", "text": "d"}])),
        ("reasoning_effort", json!("low")),
        ("include_reasoning", json!(false)),
        ("parallel_tool_calls", json!(false)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_come_one_by_one_and_suspicious_ones_in_pairs() {
        let schema = json!({"echo": {"type": "boolean"}, "max_tokens": {"type": "integer"}});
        let singles = singles(Route::Chat, schema.as_object().unwrap());
        assert!(singles.iter().all(|probe| probe.len() == 1));
        assert!(singles.contains(&Probe::from_iter([("echo".to_owned(), json!(1))])));
        assert!(!singles.contains(&Probe::from_iter([("max_tokens".to_owned(), Value::Null)])));
        let pairs = pairs(Route::Chat);
        assert!(pairs.iter().all(|probe| probe.len() == 2));
        assert!(pairs.iter().any(|p| p.contains_key("echo") && p.contains_key("top_logprobs")));
    }
}
