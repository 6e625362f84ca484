//! `/v1/chat/completions`, and the rendering of messages that `/tokenize` shares.

use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::fields::{complaint, echoed, invalid_all, json_object, missing};
use super::generate::{Choice, Merged, Params, Prompt, Route, Usage, lora_of_content};
use super::stream::{self, Chunks};
use super::{Answer, ApiError, Call, ok};
use crate::core::request::{CachedTokens, Finish, Output};
use crate::life::Life;
use crate::tokenizer;

pub(super) async fn create(life: &Arc<Life>, call: &Call) -> Result<Answer, ApiError> {
    let mut body = json_object(call)?;
    if let Some(limit) = body.get("max_completion_tokens").filter(|v| !v.is_null()).cloned() {
        body.insert("max_tokens".to_owned(), limit);
    }
    let messages = messages(&body)?;
    let mut params = Params::parse(life, call, &body, Route::Chat)?;
    if let Some(lora) = lora_of_content(life, &body) {
        params.adapt(lora);
    }
    if messages.is_empty() {
        return Err(ApiError::bad_request(
            "Cannot apply chat template to an empty conversation. Provide at least one message.",
        ));
    }
    let add = body.get("add_generation_prompt").and_then(Value::as_bool).unwrap_or(true);
    let text = render(&messages, add);
    let mut tokens = tokenizer::encode(&text);
    tokens.truncate(life.config.max_model_len + 1);
    let max_tokens = params.output_limit(life, tokens.len(), None)?;
    let prompt = Prompt { text, tokens, max_tokens };
    let rank = params.rank(life)?;
    let id = format!("chatcmpl-{}", life.request_id(call.header("x-request-id")));
    let merged = Merged::new(params.submit(&rank, &prompt, &id));
    let choices = params.choices(params.n);
    let state = State { life: Arc::clone(life), id, created: life.now(), choices, prompt, params };
    if state.params.stream {
        return Ok(stream::answer(life, merged, Streamed { state, cached: None, is_first: true }));
    }
    unary(state, merged).await
}

/// Role and content of each message; parts of text are joined.
pub(super) fn messages(body: &Map<String, Value>) -> Result<Vec<(String, String)>, ApiError> {
    let Some(value) = body.get("messages").filter(|value| !value.is_null()) else {
        let within = format!("'<dict of {} items>'", body.len());
        return Err(missing("body.messages", &within));
    };
    let Value::Array(items) = value else {
        let msg = "Input should be a valid list";
        return Err(super::fields::invalid("list_type", "body.messages", msg, &echoed(value), ""));
    };
    let message = |(index, item): (usize, &Value)| {
        let role = item.get("role").and_then(Value::as_str);
        let Some(role) = role else { return Err(no_role(index, item)) };
        let content = match item.get("content") {
            Some(Value::String(text)) => text.clone(),
            Some(Value::Array(parts)) => {
                parts.iter().filter_map(|part| part.get("text")?.as_str()).collect()
            }
            _ => String::new(),
        };
        Ok((role.to_owned(), content))
    };
    items.iter().enumerate().map(message).collect()
}

/// Every kind of message is tried and complains; ten complaints are shown.
fn no_role(index: usize, item: &Value) -> ApiError {
    const PLACES: [&str; 10] = [
        "ChatCompletionDeveloperMessageParam.role",
        "ChatCompletionSystemMessageParam.role",
        "ChatCompletionUserMessageParam.role",
        "ChatCompletionAssistantMessageParam.role",
        "ChatCompletionToolMessageParam.role",
        "ChatCompletionToolMessageParam.tool_call_id",
        "ChatCompletionFunctionMessageParam.name",
        "ChatCompletionFunctionMessageParam.role",
        "CustomChatCompletionMessageParam.role",
        "Message.author",
    ];
    let loc = |place| format!("body.messages.{index}.{place}");
    let entry = |place| complaint("missing", &loc(place), "Field required", &echoed(item), "");
    let entries: Vec<String> =
        PLACES.map(entry).into_iter().chain(["...and 1 more errors".to_owned()]).collect();
    invalid_all(&entries, &loc(PLACES[0]))
}

pub(super) fn render(messages: &[(String, String)], add_generation_prompt: bool) -> String {
    let messages = messages.iter().map(|(role, content)| (role.as_str(), content.as_str()));
    tokenizer::chat_prompt(messages, add_generation_prompt)
}

struct State {
    life: Arc<Life>,
    id: String,
    created: u64,
    choices: Vec<Choice>,
    prompt: Prompt,
    params: Params,
}

impl State {
    fn usage(&self, cached: Option<CachedTokens>) -> Usage {
        Usage {
            prompt: self.prompt.tokens.len(),
            completion: self.choices.iter().map(|choice| choice.tokens.len()).sum(),
            cached,
        }
    }
}

async fn unary(mut state: State, mut merged: Merged) -> Result<Answer, ApiError> {
    let mut cached: Option<CachedTokens> = None;
    while let Some((index, output)) = merged.next().await {
        if output.finish == Some(Finish::Error) {
            return Err(ApiError::engine_dead());
        }
        cached = output.cached.or(cached);
        state.choices[index].take(&output);
    }
    let choices: Vec<Value> = (0..state.choices.len()).map(|i| unary_choice(&state, i)).collect();
    let usage = state.usage(cached);
    let created = cached.map(|cached| cached.created);
    let details = usage.cached(&state.life).map(|tokens| {
        json!({"cached_tokens": tokens, "created_cache_tokens": created, "multimodal_tokens": null})
    });
    let ids = state.params.return_token_ids;
    Ok(ok(&json!({
        "id": state.id,
        "object": "chat.completion",
        "created": state.created,
        "model": state.params.model,
        "choices": choices,
        "service_tier": null,
        "system_fingerprint": state.life.fingerprint(),
        "usage": usage.whole(details),
        "prompt_logprobs": null,
        "prompt_token_ids": ids.then_some(&state.prompt.tokens),
        "prompt_text": null,
        "kv_transfer_params": null,
        "ec_transfer_params": null,
        "metrics": null,
    })))
}

fn unary_choice(state: &State, index: usize) -> Value {
    let choice = &state.choices[index];
    json!({
        "index": index,
        "message": {
            "role": "assistant",
            "content": choice.text,
            "refusal": null,
            "annotations": null,
            "audio": null,
            "function_call": null,
            "reasoning": null,
        },
        "logprobs": null,
        "finish_reason": choice.finish_reason(),
        "stop_reason": choice.stop_reason(),
        "token_ids": state.params.return_token_ids.then_some(&choice.tokens),
        "routed_experts": null,
    })
}

struct Streamed {
    state: State,
    cached: Option<CachedTokens>,
    is_first: bool,
}

impl Streamed {
    fn chunk(&self, choices: Value) -> Value {
        json!({
            "id": self.state.id,
            "object": "chat.completion.chunk",
            "created": self.state.created,
            "model": self.state.params.model,
            "choices": choices,
        })
    }

    /// One chunk a choice that names the role, with the first result of the request.
    fn role(&self, index: usize) -> Value {
        let mut chunk = self.chunk(json!([{
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": null,
            "finish_reason": null,
        }]));
        let ids = self.state.params.return_token_ids;
        chunk["prompt_token_ids"] = json!(ids.then_some(&self.state.prompt.tokens));
        chunk["prompt_text"] = Value::Null;
        if self.state.params.continuous_usage {
            let prompt = self.state.prompt.tokens.len();
            chunk["usage"] = Usage { prompt, completion: 0, cached: None }.counts();
        }
        chunk
    }

    fn content(&self, index: usize, text: &str, output: &Output) -> Value {
        let (params, choice) = (&self.state.params, &self.state.choices[index]);
        let mut shown = json!({
            "index": index,
            "delta": {"content": text},
            "logprobs": null,
            "finish_reason": choice.finish_reason(),
        });
        if choice.finish.is_some() {
            shown["stop_reason"] = choice.stop_reason();
        }
        shown["token_ids"] = json!(params.return_token_ids.then_some(&output.tokens));
        let mut chunk = self.chunk(json!([shown]));
        if !params.include_usage && choice.finish.is_some() {
            chunk["system_fingerprint"] = json!(self.state.life.fingerprint());
        }
        if params.continuous_usage {
            let (prompt, completion) = (self.state.prompt.tokens.len(), choice.tokens.len());
            chunk["usage"] = Usage { prompt, completion, cached: None }.counts();
        }
        chunk
    }
}

impl Chunks for Streamed {
    fn output(&mut self, index: usize, output: &Output) -> Vec<Value> {
        let mut chunks = Vec::new();
        if std::mem::take(&mut self.is_first) {
            self.cached = output.cached;
            chunks.extend((0..self.state.choices.len()).map(|i| self.role(i)));
        }
        let text = self.state.choices[index].take(output);
        // A request dropped before its first token shows its role only (ENGINE.md, trap 15).
        if !text.is_empty() || !self.state.choices[index].tokens.is_empty() {
            chunks.push(self.content(index, &text, output));
        }
        chunks
    }

    fn end(&mut self) -> Vec<Value> {
        if !self.state.params.include_usage {
            return Vec::new();
        }
        let usage = self.state.usage(self.cached);
        let mut counts = usage.counts();
        if let Some(tokens) = usage.cached(&self.state.life) {
            let created = self.cached.map_or(0, |cached| cached.created);
            counts["prompt_tokens_details"] =
                json!({"cached_tokens": tokens, "created_cache_tokens": created});
        }
        let mut chunk = self.chunk(json!([]));
        chunk["usage"] = counts;
        chunk["system_fingerprint"] = json!(self.state.life.fingerprint());
        vec![chunk]
    }
}
