//! `/v1/completions`.

use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::fields::{echoed, invalid, json_object};
use super::generate::{Choice, Merged, Params, Prompt, Route, Usage, checked_tokens};
use super::stream::{self, Chunks};
use super::{Answer, ApiError, Call, ok};
use crate::core::request::{Finish, Output};
use crate::life::Life;
use crate::tokenizer;

/// Output tokens when the request names no limit.
const MAX_TOKENS_DEFAULT: usize = 16;

/// Prompts of one request (`VLLM_MAX_COMPLETION_PROMPTS` is 1024).
const PROMPTS_MAX: usize = 1024;

pub(super) async fn create(life: &Arc<Life>, call: &Call) -> Result<Answer, ApiError> {
    let body = json_object(call)?;
    require_prompt(&body)?;
    let params = Params::parse(life, call, &body, Route::Completions)?;
    let prompts = prompts(life, &params, &body)?;
    let rank = params.rank(life)?;
    let base = life.request_id(call.header("x-request-id"));
    let id = format!("cmpl-{base}");
    let mut outputs = Vec::new();
    for (index, prompt) in prompts.iter().enumerate() {
        outputs.extend(params.submit(&rank, prompt, &format!("{id}-{index}")));
    }
    let merged = Merged::new(outputs);
    let choices = params.choices(prompts.len() * params.n);
    let state = State { life: Arc::clone(life), id, created: life.now(), choices, prompts, params };
    if state.params.stream {
        return Ok(stream::answer(life, merged, Streamed { state, cached: None, is_first: true }));
    }
    unary(state, merged).await
}

struct State {
    life: Arc<Life>,
    id: String,
    created: u64,
    choices: Vec<Choice>,
    prompts: Vec<Prompt>,
    params: Params,
}

impl State {
    fn prompt(&self, choice: usize) -> &Prompt {
        &self.prompts[choice / self.params.n]
    }

    fn prompt_tokens(&self) -> usize {
        self.prompts.iter().map(|prompt| prompt.tokens.len()).sum()
    }

    fn completion_tokens(&self) -> usize {
        self.choices.iter().map(|choice| choice.tokens.len()).sum()
    }
}

async fn unary(mut state: State, mut merged: Merged) -> Result<Answer, ApiError> {
    let mut cached = None;
    while let Some((index, output)) = merged.next().await {
        if output.finish == Some(Finish::Error) {
            return Err(ApiError::engine_dead());
        }
        cached = output.cached.or(cached);
        state.choices[index].take(&output);
    }
    let choices: Vec<Value> = (0..state.choices.len()).map(|i| unary_choice(&state, i)).collect();
    let usage =
        Usage { prompt: state.prompt_tokens(), completion: state.completion_tokens(), cached };
    let details = usage.cached(&state.life).map(|tokens| {
        json!({"cached_tokens": tokens, "created_cache_tokens": null, "multimodal_tokens": null})
    });
    Ok(ok(&json!({
        "id": state.id,
        "object": "text_completion",
        "created": state.created,
        "model": state.params.model,
        "choices": choices,
        "service_tier": null,
        "system_fingerprint": state.life.fingerprint(),
        "usage": usage.whole(details),
        "kv_transfer_params": null,
        "ec_transfer_params": null,
        "metrics": null,
    })))
}

fn unary_choice(state: &State, index: usize) -> Value {
    let (choice, prompt) = (&state.choices[index], state.prompt(index));
    let ids = state.params.return_token_ids;
    let echoed = if state.params.echo { prompt.text.as_str() } else { "" };
    json!({
        "index": index,
        "text": format!("{echoed}{}", choice.text),
        "logprobs": null,
        "finish_reason": choice.finish_reason(),
        "stop_reason": choice.stop_reason(),
        "token_ids": ids.then_some(&choice.tokens),
        "prompt_logprobs": null,
        "prompt_token_ids": ids.then_some(&prompt.tokens),
        "routed_experts": null,
    })
}

struct Streamed {
    state: State,
    cached: Option<crate::core::request::CachedTokens>,
    is_first: bool,
}

impl Streamed {
    fn chunk(&self, choices: Value) -> Value {
        json!({
            "id": self.state.id,
            "object": "text_completion",
            "created": self.state.created,
            "model": self.state.params.model,
            "choices": choices,
        })
    }
}

impl Chunks for Streamed {
    fn output(&mut self, index: usize, output: &Output) -> Vec<Value> {
        // The real server keeps the cached count of the first result only.
        if std::mem::take(&mut self.is_first) {
            self.cached = output.cached;
        }
        let mut text = self.state.choices[index].take(output);
        let (params, choice) = (&self.state.params, &self.state.choices[index]);
        let (is_first, ids) = (!choice.has_shown_prompt, params.return_token_ids);
        let prompt = self.state.prompt(index);
        if is_first && params.echo {
            text.insert_str(0, &prompt.text);
        } else if text.is_empty() && choice.tokens.is_empty() && !(is_first && ids) {
            // A request dropped before its first token shows nothing (ENGINE.md, trap 15).
            return Vec::new();
        }
        let mut chunk = self.chunk(json!([{
            "index": index,
            "text": text,
            "logprobs": null,
            "finish_reason": choice.finish_reason(),
            "stop_reason": choice.stop_reason(),
            "prompt_token_ids": (is_first && ids).then_some(&prompt.tokens),
            "token_ids": ids.then_some(&output.tokens),
        }]));
        if !params.include_usage && choice.finish.is_some() {
            chunk["system_fingerprint"] = json!(self.state.life.fingerprint());
        }
        if params.continuous_usage {
            let (prompt, completion) = (prompt.tokens.len(), choice.tokens.len());
            chunk["usage"] = Usage { prompt, completion, cached: None }.counts();
        }
        self.state.choices[index].has_shown_prompt = true;
        vec![chunk]
    }

    fn end(&mut self) -> Vec<Value> {
        if !self.state.params.include_usage {
            return Vec::new();
        }
        let usage = Usage {
            prompt: self.state.prompt_tokens(),
            completion: self.state.completion_tokens(),
            cached: self.cached,
        };
        let mut counts = usage.counts();
        if let Some(tokens) = usage.cached(&self.state.life) {
            counts["prompt_tokens_details"] = json!({"cached_tokens": tokens});
        }
        let mut chunk = self.chunk(json!([]));
        chunk["usage"] = counts;
        chunk["system_fingerprint"] = json!(self.state.life.fingerprint());
        vec![chunk]
    }
}

fn require_prompt(body: &Map<String, Value>) -> Result<(), ApiError> {
    let is_empty = match body.get("prompt") {
        None | Some(Value::Null) => true,
        Some(Value::String(text)) => text.is_empty(),
        Some(Value::Array(items)) if items.is_empty() => {
            return Err(ApiError::bad_request("You must pass at least one prompt"));
        }
        Some(_) => false,
    };
    if !is_empty {
        return Ok(());
    }
    let message = "Either prompt or prompt_embeds must be provided and non-empty.";
    Err(ApiError::parameter(message, "prompt", None))
}

/// A text, token ids, or a list of either.
fn prompts(
    life: &Life,
    params: &Params,
    body: &Map<String, Value>,
) -> Result<Vec<Prompt>, ApiError> {
    let value = body.get("prompt").unwrap_or(&Value::Null);
    match value {
        Value::Array(items) if items.len() > PROMPTS_MAX && !items[0].is_i64() => {
            let message = format!(
                "prompt list length {} exceeds the maximum allowed count of {PROMPTS_MAX}. To \
                 increase this limit, set the VLLM_MAX_COMPLETION_PROMPTS environment variable.",
                items.len()
            );
            Err(ApiError::parameter(&message, "prompt", None))
        }
        Value::Array(items) if !items[0].is_i64() => {
            items.iter().map(|item| prompt(life, params, item)).collect()
        }
        one => Ok(vec![prompt(life, params, one)?]),
    }
}

fn prompt(life: &Life, params: &Params, value: &Value) -> Result<Prompt, ApiError> {
    let ids = value.as_array().and_then(|ids| ids.iter().map(Value::as_i64).collect());
    let (text, tokens) = match (value, ids) {
        (Value::String(text), _) => {
            let mut tokens = tokenizer::encode(text);
            // The real tokenizer stops one token beyond the limit.
            tokens.truncate(life.config.max_model_len + 1);
            (text.clone(), tokens)
        }
        (_, Some::<Vec<i64>>(ids)) => {
            let tokens = checked_tokens(&ids)?;
            (tokenizer::decode(&tokens, true), tokens)
        }
        _ => {
            let msg = "Input should be a valid string";
            return Err(invalid("string_type", "body.prompt", msg, &echoed(value), ""));
        }
    };
    if tokens.is_empty() {
        let message = "Either prompt or prompt_embeds must be provided and non-empty.";
        return Err(ApiError::parameter(message, "prompt", None));
    }
    let max_tokens = params.output_limit(life, tokens.len(), Some(MAX_TOKENS_DEFAULT))?;
    Ok(Prompt { text, tokens, max_tokens })
}
