//! What completions and chat share: parameters, checks, and the choices' texts.
//! Invariant: a request that is refused has put nothing into an engine.

use std::collections::BTreeSet;
use std::sync::Arc;

use futures_util::future::poll_fn;
use serde_json::{Map, Value, json};

use super::fields::Fields;
use super::{ApiError, Call};
use crate::core::hash::{Identity, Lora};
use crate::core::request::{Ask, CachedTokens, Finish, Output, StopReason};
use crate::life::Life;
use crate::rank::{Outputs, Rank};
use crate::tokenizer;

/// Longest `cache_salt`, and what it must not contain (vLLM 0.32.0, source).
const SALT_CHARS_MAX: usize = 128;
const SALT_FORBIDDEN: [char; 4] = ['@', '/', '\\', '\0'];

/// `--max-logprobs`, by default.
const LOGPROBS_MAX: i64 = 20;

/// Choices of one request; the engine allows more, no client here needs them.
const CHOICES_MAX: usize = 128;

/// Checked parameters of a generation request.
pub(super) struct Params {
    /// What answers call the model: the adapter's name, or the model's first one.
    pub(super) model: String,
    lora: Option<Lora>,
    pub(super) max_tokens: Option<i64>,
    pub(super) n: usize,
    pub(super) stream: bool,
    pub(super) include_usage: bool,
    pub(super) continuous_usage: bool,
    pub(super) echo: bool,
    pub(super) return_token_ids: bool,
    pub(super) stop: Vec<String>,
    include_stop: bool,
    stop_token_ids: Vec<u32>,
    salt: Option<String>,
    session_id: Option<String>,
    samples: bool,
    seed: u64,
    rank: Option<i64>,
    skips_caches: bool,
    reports_hits: bool,
}

/// Which of the two generating routes is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Route {
    Completions,
    Chat,
}

impl Params {
    pub(super) fn parse(
        life: &Life,
        call: &Call,
        body: &Map<String, Value>,
        route: Route,
    ) -> Result<Self, ApiError> {
        let fields = Fields(body);
        let temperature = fields.float("temperature")?;
        let top_p = fields.float("top_p")?;
        let n = fields.int("n")?.unwrap_or(1);
        let stream = fields.flag("stream")?;
        let salt = salt(body)?;
        let options = stream_options(&fields, stream)?;
        let stop_token_ids = token_list(&fields, "stop_token_ids")?;
        fields.int("priority")?;
        fields.flag("ignore_eos")?;
        let skips_caches = prompt_logprobs(&fields, route, stream)?.is_some();
        let reports = fields.raw("vllm_xargs").and_then(|args| args.get("kv_cache_report_mode"));
        let model = fields.text("model")?.unwrap_or_else(|| life.config.model.clone());
        let lora = lora_of(life, &model);
        let params = Self {
            model: lora.as_ref().map_or(&life.config.model, |lora| &lora.name).clone(),
            lora,
            max_tokens: fields.int("max_tokens")?,
            n: usize::try_from(n).unwrap_or(0),
            stream,
            include_usage: options.0,
            continuous_usage: options.1,
            echo: fields.flag("echo")?,
            return_token_ids: fields.flag("return_token_ids")?,
            stop: fields.texts("stop")?.into_iter().filter(|stop| !stop.is_empty()).collect(),
            include_stop: fields.flag("include_stop_str_in_output")?,
            stop_token_ids,
            salt,
            session_id: fields
                .text("session_id")?
                .or_else(|| call.header("x-session-id").map(str::to_owned)),
            samples: temperature.is_none_or(|t| t > 0.0),
            seed: fields.int("seed")?.unwrap_or(0).unsigned_abs(),
            rank: call.header("x-data-parallel-rank").and_then(|text| text.trim().parse().ok()),
            skips_caches,
            reports_hits: reports.and_then(Value::as_str) == Some("full"),
        };
        check_model(life, &model)?;
        params.check_sampling(n, temperature, top_p)?;
        Ok(params)
    }

    fn check_sampling(
        &self,
        n: i64,
        temperature: Option<f64>,
        top_p: Option<f64>,
    ) -> Result<(), ApiError> {
        if self.n == 0 {
            return Err(ApiError::bad_request(format!("n must be at least 1, got {n}.")));
        }
        if self.n > CHOICES_MAX {
            let message = format!("n must be at most {CHOICES_MAX}, got {n}.");
            return Err(ApiError::bad_request(message));
        }
        if let Some(t) = temperature.filter(|t| *t < 0.0) {
            let message = format!("temperature must be non-negative, got {t:?}.");
            return Err(ApiError::parameter(&message, "temperature", Some(format!("{t:?}"))));
        }
        if let Some(t) = temperature.filter(|t| *t > 2.0) {
            let message = format!("temperature must be in [0, 2], got {t:?}.");
            return Err(ApiError::parameter(&message, "temperature", Some(format!("{t:?}"))));
        }
        if let Some(p) = top_p.filter(|p| *p <= 0.0 || *p > 1.0) {
            let message = format!("top_p must be in (0, 1], got {p:?}.");
            return Err(ApiError::parameter(&message, "top_p", Some(format!("{p:?}"))));
        }
        Ok(())
    }

    /// Output tokens for a prompt of this length, after the engine's checks in its order.
    pub(super) fn output_limit(
        &self,
        life: &Life,
        prompt_len: usize,
        default: Option<usize>,
    ) -> Result<usize, ApiError> {
        let limit = life.config.max_model_len;
        let asked = self.max_tokens.or(default.and_then(|tokens| i64::try_from(tokens).ok()));
        if let Some(asked) = asked.filter(|asked| usize::try_from(*asked).is_ok_and(|n| n > limit))
        {
            let message = format!(
                "max_tokens={asked} cannot be greater than max_model_len={limit}. \
                 Please request fewer output tokens."
            );
            return Err(ApiError::parameter(&message, "max_tokens", Some(asked.to_string())));
        }
        if prompt_len > limit {
            let least = if prompt_len == limit + 1 { "at least " } else { "" };
            let message = format!(
                "This model's maximum context length is {limit} tokens. However, your prompt \
                 contains {least}{prompt_len} input tokens, which exceeds this limit even without \
                 any output tokens. Please reduce the length of the input prompt."
            );
            return Err(ApiError::parameter(
                &message,
                "input_tokens",
                Some(prompt_len.to_string()),
            ));
        }
        let room = limit - prompt_len;
        let tokens = asked.map_or(room as i64, |asked| asked.min(room as i64));
        if tokens < 1 {
            let message = format!("max_tokens must be at least 1, got {tokens}.");
            return Err(ApiError::parameter(&message, "max_tokens", Some(tokens.to_string())));
        }
        Ok(usize::try_from(tokens).unwrap_or(room))
    }

    /// The rank that serves a request: the one asked for, else the least loaded.
    pub(super) fn rank(&self, life: &Life) -> Result<Arc<Rank>, ApiError> {
        let ranks = life.ranks.len();
        match self.rank {
            None => Ok(life.balanced_rank()),
            Some(asked) => usize::try_from(asked)
                .ok()
                .and_then(|index| life.ranks.get(index).cloned())
                .ok_or_else(|| {
                    let message =
                        format!("data_parallel_rank {asked} is out of range [0, {ranks}).");
                    ApiError::bad_request(message)
                }),
        }
    }

    /// Puts one prompt's choices into a rank.
    pub(super) fn submit(
        &self,
        rank: &Arc<Rank>,
        prompt: &Prompt,
        external_id: &str,
    ) -> Vec<Outputs> {
        let identity = Identity { salt: self.salt.clone(), lora: self.lora.clone() };
        let submit = |choice: usize| {
            let sample = if self.samples { self.seed << 8 | choice as u64 } else { 0 };
            rank.submit(Ask {
                id: 0,
                external_id: external_id.to_owned(),
                prompt: prompt.tokens.clone(),
                max_tokens: prompt.max_tokens,
                identity: identity.clone(),
                session_id: self.session_id.clone(),
                stop: self.stop.clone(),
                stop_token_ids: self.stop_token_ids.clone(),
                sample,
                skips_caches: self.skips_caches,
                reports_hits: self.reports_hits,
            })
        };
        (0..self.n).map(submit).collect()
    }

    /// Runs a request of the base model with an adapter.
    pub(super) fn adapt(&mut self, lora: Lora) {
        if self.lora.is_none() {
            self.model.clone_from(&lora.name);
            self.lora = Some(lora);
        }
    }

    /// Choices with empty texts.
    pub(super) fn choices(&self, count: usize) -> Vec<Choice> {
        let held = self.stop.iter().map(|stop| stop.chars().count()).max().unwrap_or(1) - 1;
        let choice = || Choice { held, include_stop: self.include_stop, ..Choice::default() };
        (0..count).map(|_| choice()).collect()
    }
}

/// A tokenized prompt and its allowance.
#[derive(Clone, Debug)]
pub(super) struct Prompt {
    pub(super) text: String,
    pub(super) tokens: Vec<u32>,
    pub(super) max_tokens: usize,
}

/// 404 for a model that is not served.
pub(super) fn check_model(life: &Life, model: &str) -> Result<(), ApiError> {
    let names: Vec<&str> = life.config.names().collect();
    if names.contains(&model) || lora_of(life, model).is_some() {
        return Ok(());
    }
    let names = names.join(", ");
    let message = format!("The model `{model}` does not exist. Valid aliases: {names}.");
    let mut error = ApiError::new(http::StatusCode::NOT_FOUND, "NotFoundError", message);
    error.param = Some("model".to_owned());
    Err(error)
}

/// A value that is not null has the prompt computed whole, so no cache is read: `false` is 0 to
/// pydantic, and 0 is a value (vLLM 0.32.0 `sampling_params.py`). An `echo` asks for as many as
/// the output's, which a completion leaves unset and a chat sets to 0 (`protocol.py` of either),
/// null or not (observed).
fn prompt_logprobs(
    fields: &Fields<'_>,
    route: Route,
    stream: bool,
) -> Result<Option<i64>, ApiError> {
    let of_output = if route == Route::Chat { "top_logprobs" } else { "logprobs" };
    for name in ["prompt_logprobs", of_output] {
        if let Some(value) =
            fields.raw(name).filter(|value| !value.is_number() && !value.is_boolean())
        {
            let shown = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            let message = format!("`{name}` must be an integer.");
            return Err(ApiError::parameter(&message, name, Some(shown)));
        }
    }
    match fields.int("prompt_logprobs")? {
        Some(count) if stream && (count > 0 || count == -1) => {
            let message = "`prompt_logprobs` are not available when `stream=True`.";
            Err(ApiError::parameter(message, "prompt_logprobs", None))
        }
        Some(count) if count < -1 => {
            let message = "`prompt_logprobs` must be a positive value or -1.";
            Err(ApiError::parameter(message, "prompt_logprobs", Some(count.to_string())))
        }
        Some(count) if count == -1 || count > LOGPROBS_MAX => {
            let count = if count == -1 { i64::from(tokenizer::VOCABULARY) } else { count };
            let message = format!(
                "Requested prompt logprobs of {count}, which is greater than max allowed: \
                 {LOGPROBS_MAX}"
            );
            Err(ApiError::parameter(&message, "prompt_logprobs", Some(count.to_string())))
        }
        Some(count) => Ok(Some(count)),
        None if !fields.flag("echo")? => Ok(None),
        None if route == Route::Completions => fields.int("logprobs"),
        None => Ok(Some(fields.int("top_logprobs")?.unwrap_or(0))),
    }
}

/// The adapter that a chat's content asks for by its parts' types: `image_url` by `image`. None
/// where not exactly one is meant (vLLM 0.32.0 `_get_active_default_mm_loras`).
pub(super) fn lora_of_content(life: &Life, body: &Map<String, Value>) -> Option<Lora> {
    let messages = body.get("messages").and_then(Value::as_array)?;
    let parts = messages.iter().filter_map(|message| message.get("content")?.as_array()).flatten();
    let types = parts.filter_map(|part| part.get("type")?.as_str()?.split('_').next());
    let types: BTreeSet<&str> = types.collect();
    let mut loras = types.into_iter().filter_map(|name| lora_of(life, name));
    let lora = loras.next()?;
    loras.next().is_none().then_some(lora)
}

fn lora_of(life: &Life, model: &str) -> Option<Lora> {
    let index = life.config.loras.iter().position(|name| name == model)?;
    Some(Lora { id: u32::try_from(index + 1).ok()?, name: model.to_owned() })
}

fn salt(body: &Map<String, Value>) -> Result<Option<String>, ApiError> {
    match body.get("cache_salt") {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(salt)) if !salt.is_empty() => {
            if salt.chars().count() > SALT_CHARS_MAX || salt.contains(SALT_FORBIDDEN) {
                let message = "Parameter 'cache_salt' must be at most 128 characters and must \
                               not contain '@', '/', '\\\\', or NUL.";
                return Err(ApiError::parameter(message, "cache_salt", None));
            }
            Ok(Some(salt.clone()))
        }
        Some(_) => {
            let message = "Parameter 'cache_salt' must be a non-empty string if provided.";
            Err(ApiError::parameter(message, "cache_salt", None))
        }
    }
}

fn stream_options(fields: &Fields<'_>, stream: bool) -> Result<(bool, bool), ApiError> {
    let Some(options) = fields.raw("stream_options") else { return Ok((false, false)) };
    if !stream {
        let message = "Stream options can only be defined when `stream=True`.";
        return Err(ApiError::parameter(message, "stream_options", None));
    }
    let flag = |name| options.get(name).and_then(Value::as_bool).unwrap_or(false);
    let include = flag("include_usage");
    Ok((include, include && flag("continuous_usage_stats")))
}

fn token_list(fields: &Fields<'_>, name: &str) -> Result<Vec<u32>, ApiError> {
    let Some(value) = fields.raw(name) else { return Ok(Vec::new()) };
    let tokens = value.as_array().and_then(|items| {
        items.iter().map(|item| item.as_u64().and_then(|t| u32::try_from(t).ok())).collect()
    });
    tokens.ok_or_else(|| {
        let loc = format!("body.{name}");
        super::fields::invalid(
            "list_type",
            &loc,
            "Input should be a valid list",
            &super::fields::echoed(value),
            "",
        )
    })
}

/// The tokens of a prompt that came as token ids.
pub(super) fn checked_tokens(ids: &[i64]) -> Result<Vec<u32>, ApiError> {
    ids.iter()
        .map(|id| match u32::try_from(*id) {
            Ok(token) if token < tokenizer::VOCABULARY => Ok(token),
            _ => Err(ApiError::bad_request(format!("Token id {id} is out of vocabulary"))),
        })
        .collect()
}

/// One choice's text as it grows.
#[derive(Debug, Default)]
pub(super) struct Choice {
    pub(super) text: String,
    pub(super) tokens: Vec<u32>,
    pub(super) finish: Option<Finish>,
    pub(super) has_shown_prompt: bool,
    sent: usize,
    held: usize,
    include_stop: bool,
}

impl Choice {
    /// Takes an output in; answers the text that can be shown. A stop string's possible
    /// beginning is held back.
    pub(super) fn take(&mut self, output: &Output) -> String {
        self.tokens.extend(&output.tokens);
        self.text = tokenizer::decode(&self.tokens, false);
        self.finish.clone_from(&output.finish);
        if let Some(Finish::Stop(Some(StopReason::Text(stop)))) = &self.finish
            && let Some(at) = self.text.find(stop.as_str())
        {
            self.text.truncate(if self.include_stop { at + stop.len() } else { at });
        }
        let end = match self.held {
            held if held > 0 && self.finish.is_none() => {
                let cut = self.text.char_indices().rev().nth(held - 1);
                cut.map_or(0, |(index, _)| index).max(self.sent)
            }
            _ => self.text.len(),
        };
        let shown = self.text.get(self.sent..end).unwrap_or_default().to_owned();
        self.sent = end.max(self.sent);
        shown
    }

    pub(super) fn finish_reason(&self) -> Value {
        self.finish.as_ref().map_or(Value::Null, |finish| json!(finish.as_str()))
    }

    pub(super) fn stop_reason(&self) -> Value {
        match &self.finish {
            Some(Finish::Stop(Some(StopReason::Text(stop)))) => json!(stop),
            Some(Finish::Stop(Some(StopReason::Token(token)))) => json!(token),
            _ => Value::Null,
        }
    }
}

/// The outputs of all choices, taken turn by turn.
pub(super) struct Merged {
    outputs: Vec<Option<Outputs>>,
    turn: usize,
}

impl Merged {
    pub(super) fn new(outputs: Vec<Outputs>) -> Self {
        Self { outputs: outputs.into_iter().map(Some).collect(), turn: 0 }
    }

    /// The next output and whose it is; none when all have ended.
    pub(super) async fn next(&mut self) -> Option<(usize, Output)> {
        poll_fn(|context| {
            let count = self.outputs.len();
            let mut alive = false;
            for index in (self.turn..self.turn + count).map(|i| i % count.max(1)) {
                let Some(outputs) = &mut self.outputs[index] else { continue };
                match outputs.poll_next(context) {
                    std::task::Poll::Ready(Some(output)) => {
                        self.turn = index + 1;
                        return std::task::Poll::Ready(Some((index, output)));
                    }
                    std::task::Poll::Ready(None) => self.outputs[index] = None,
                    std::task::Poll::Pending => alive = true,
                }
            }
            if alive { std::task::Poll::Pending } else { std::task::Poll::Ready(None) }
        })
        .await
    }
}

/// Token counts of an answer.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Usage {
    pub(super) prompt: usize,
    pub(super) completion: usize,
    pub(super) cached: Option<CachedTokens>,
}

impl Usage {
    /// The counts alone, as every chunk shows them on request.
    pub(super) fn counts(&self) -> Value {
        json!({
            "prompt_tokens": self.prompt,
            "total_tokens": self.prompt + self.completion,
            "completion_tokens": self.completion,
        })
    }

    /// Cached tokens, where the server tells them.
    pub(super) fn cached(&self, life: &Life) -> Option<usize> {
        let cached = self.cached.filter(|_| life.config.enable_prompt_tokens_details)?;
        let tokens = cached.local + cached.external;
        (tokens > 0 || life.traits.reports_zero_cached).then_some(tokens)
    }

    /// The usage of a whole answer; `details` is none when the server does not tell.
    pub(super) fn whole(&self, details: Option<Value>) -> Value {
        let mut usage = self.counts();
        usage["prompt_tokens_details"] = details.unwrap_or(Value::Null);
        usage["completion_tokens_details"] = Value::Null;
        usage
    }
}
