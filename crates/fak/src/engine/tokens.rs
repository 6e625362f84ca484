//! A request's prompt in tokens, as the engine will see it.
//!
//! Invariant: tokens are given only where they are surely the prompt's; a claim is made on them.

use fak_wire::openai::{Api, Prompt, Request, RequestError, Tokenized};
use serde_json::value::RawValue;
use xxhash_rust::xxh3::Xxh3;

use super::client::Outgoing;
use super::endpoints::Data;
use super::{Engine, Error};

/// What of a chat request its template sees (vLLM 0.32.0, source), and what else its tokens depend
/// on, [untold](UNTOLD) fields included: tokens of a request without them are known by the digest.
const CHAT_FIELDS: &[&str] = &[
    "model",
    "messages",
    "tools",
    "tool_choice",
    "documents",
    "chat_template",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "reasoning_effort",
    "response_format",
    "mm_processor_kwargs",
    "media_io_kwargs",
    "truncate_prompt_tokens",
    "kv_transfer_params",
];

/// What a chat template sees and `/tokenize` passes over (vLLM 0.32.0, source).
const UNTOLD: &[&str] = &["documents", "reasoning_effort", "response_format"];

/// What of a completions request its tokens depend on.
const COMPLETIONS_FIELDS: &[&str] = &[
    "model",
    "prompt",
    "add_special_tokens",
    "truncate_prompt_tokens",
    "prompt_embeds",
    "kv_transfer_params",
];

/// Why a prompt's tokens are not known.
#[derive(Debug, thiserror::Error)]
pub enum TokensError {
    /// The request is wrong.
    #[error("the request has no readable prompt")]
    Request(#[from] RequestError),
    /// Several prompts, none, or one that the engine cuts.
    #[error("the request has no single whole prompt")]
    NotOnePrompt,
    /// A field that makes another prompt than `/tokenize` tells.
    #[error("{field} changes the prompt, and /tokenize does not take it")]
    Untold {
        /// Its name.
        field: &'static str,
    },
    /// `/tokenize` was not answered.
    #[error("/tokenize was not answered")]
    Engine(#[from] Error),
    /// `/tokenize` answered with something else.
    #[error("/tokenize answered {status} without tokens")]
    NoTokens {
        /// The HTTP status.
        status: u16,
    },
}

impl Engine {
    /// The tokens of the request's prompt: its own, where it comes in tokens, else what `/tokenize`
    /// makes of it.
    ///
    /// # Errors
    ///
    /// [`TokensError`]
    pub async fn tokens(&self, request: &Request) -> Result<Vec<u32>, TokensError> {
        // The engine cuts the prompt, or has a second one: that of the embeddings.
        if has(request, "truncate_prompt_tokens") || has(request, "prompt_embeds") {
            return Err(TokensError::NotOnePrompt);
        }
        if let Some(field) = untold(request) {
            return Err(TokensError::Untold { field });
        }
        let fields = match request.api() {
            Api::Chat => CHAT_FIELDS,
            Api::Completions => match request.prompt()? {
                Some(Prompt::Tokens(tokens)) => return Ok(tokens),
                Some(Prompt::Text(_)) => COMPLETIONS_FIELDS,
                Some(Prompt::TokenLists(mut lists)) if lists.len() == 1 => {
                    return Ok(lists.swap_remove(0));
                }
                Some(_) | None => return Err(TokensError::NotOnePrompt),
            },
        };
        self.tokenize(selected(request, fields)).await
    }

    async fn tokenize(&self, body: Vec<u8>) -> Result<Vec<u32>, TokensError> {
        let request = Outgoing::to(self.endpoints.data(Data::Tokenize)).json(body.into());
        let response = self.client.send(request, self.client.timeouts().tokenize).await?;
        let status = response.status.as_u16();
        match Tokenized::parse(&response.body) {
            Ok(tokenized) if status == 200 => Ok(tokenized.tokens),
            Ok(_) | Err(_) => Err(TokensError::NoTokens { status }),
        }
    }
}

/// The field that makes another prompt than `/tokenize` tells, where the request has one.
fn untold(request: &Request) -> Option<&'static str> {
    // It may hold the prompt's tokens, which then go before its messages (vLLM 0.32.0, source).
    if has(request, "kv_transfer_params") {
        return Some("kv_transfer_params");
    }
    if request.api() != Api::Chat {
        return None;
    }
    // An engine may leave out tools that are not to be called, or tell the model how they are to
    // be.
    let chooses = has(request, "tool_choice") && request.raw("tool_choice") != Some(r#""auto""#);
    if chooses && has(request, "tools") {
        return Some("tool_choice");
    }
    UNTOLD.iter().copied().find(|field| has(request, field))
}

/// Whether a field is there and not null.
fn has(request: &Request, field: &str) -> bool {
    request.raw(field).is_some_and(|raw| raw != "null")
}

/// A digest of all that a prompt's tokens depend on. Equal only for requests with equal tokens, up
/// to collisions of 128 bits under a secret `seed`.
#[must_use]
pub fn prompt_digest(request: &Request, seed: u64) -> u128 {
    let fields = match request.api() {
        Api::Chat => CHAT_FIELDS,
        Api::Completions => COMPLETIONS_FIELDS,
    };
    let mut digest = Xxh3::with_seed(seed);
    // The routes differ in their fields' number; an absent field differs from an empty one.
    digest.update(&[fields.len() as u8]);
    for field in fields {
        let raw = request.raw(field).unwrap_or_default();
        digest.update(&(raw.len() as u64).to_le_bytes());
        digest.update(raw.as_bytes());
    }
    digest.digest128()
}

/// A body of these fields alone, as the request has them.
fn selected(request: &Request, fields: &[&str]) -> Vec<u8> {
    let present: std::collections::BTreeMap<&str, Box<RawValue>> = fields
        .iter()
        .filter_map(|field| {
            let raw = request.raw(field)?.to_owned();
            Some((*field, RawValue::from_string(raw).ok()?))
        })
        .collect();
    serde_json::to_vec(&present).expect("names and raw JSON always serialize")
}

/// Fields that no prompt depends on, whatever renders it: of how it is gone on with, and how the
/// answer is told (vLLM 0.32.0, source).
const BESIDE_PROMPT: &[&str] = &[
    "allowed_token_ids",
    "bad_words",
    "cache_salt",
    "frequency_penalty",
    "ignore_eos",
    "include_stop_str_in_output",
    "length_penalty",
    "logit_bias",
    "logprobs",
    "max_completion_tokens",
    "max_tokens",
    "min_p",
    "min_tokens",
    "n",
    "parallel_tool_calls",
    "presence_penalty",
    "priority",
    "prompt_cache_key",
    "repetition_penalty",
    "request_id",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "seed",
    "session_id",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "stop",
    "stop_token_ids",
    "stream",
    "stream_interval",
    "stream_options",
    "temperature",
    "top_k",
    "top_logprobs",
    "top_p",
    "use_beam_search",
    "user",
];

/// A digest of what kind of request it is: its route, its model, and which fields it has that its
/// prompt may depend on, those that fak does not know included.
#[must_use]
pub fn prompt_shape(request: &Request, seed: u64) -> u64 {
    let mut names: Vec<_> = request
        .names()
        .filter(|name| !BESIDE_PROMPT.contains(name) && has(request, name))
        .collect();
    names.sort_unstable();
    let mut digest = Xxh3::with_seed(seed);
    digest.update(&[u8::from(request.api() == Api::Chat)]);
    for text in names.into_iter().chain(request.raw("model")) {
        digest.update(&(text.len() as u64).to_le_bytes());
        digest.update(text.as_bytes());
    }
    digest.digest()
}
