//! A request inside the engine core, from arrival to its last output.

use std::collections::VecDeque;

use super::connector::Load;
use super::hash::{BlockHash, Identity};
use super::model;
use super::pool::BlockId;
use crate::tokenizer;

/// Names a request within one engine; assigned by the shell, never reused within a life.
pub type RequestId = u64;

/// What the shell asks for: one sample of one prompt.
#[derive(Clone, Debug, Default)]
pub struct Ask {
    /// Names the request in outputs.
    pub id: RequestId,
    /// The id that `/abort_requests` takes.
    pub external_id: String,
    /// At least one token, fewer than the model's length.
    pub prompt: Vec<u32>,
    /// At least 1.
    pub max_tokens: usize,
    /// Salt and adapter.
    pub identity: Identity,
    /// Named in events.
    pub session_id: Option<String>,
    /// Strings that end the output and are not part of it.
    pub stop: Vec<String>,
    /// Tokens that end the output.
    pub stop_token_ids: Vec<u32>,
    /// Tells samples of one prompt apart; 0 for greedy ones.
    pub sample: u64,
    /// Takes nothing from any cache, as a request for its prompt's log probabilities does.
    pub skips_caches: bool,
    /// Has the device blocks that it hits announced as stores again
    /// (`kv_cache_report_mode: "full"`).
    pub reports_hits: bool,
}

/// Why a request ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finish {
    /// A stop string or token was met.
    Stop(Option<StopReason>),
    /// `max_tokens` or the model's length was reached.
    Length,
    /// The engine dropped it.
    Abort,
    /// The engine died.
    Error,
}

impl Finish {
    /// The name in `finish_reason` and in metrics.
    #[must_use]
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Stop(_) => "stop",
            Self::Length => "length",
            Self::Abort => "abort",
            Self::Error => "error",
        }
    }
}

/// What stopped a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// A string of `stop`.
    Text(String),
    /// A token of `stop_token_ids`.
    Token(u32),
}

/// Tokens of a prompt that were not computed, by where they came from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CachedTokens {
    /// From the device cache.
    pub local: usize,
    /// From a connector.
    pub external: usize,
    /// Prompt tokens computed and put into the device cache.
    pub created: usize,
}

/// Where the cached tokens of one request came from. No engine tells this: it is for whoever holds
/// claims against the truth.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reused {
    /// Tokens from the device cache.
    pub gpu: usize,
    /// Tokens from the host tier.
    pub cpu: usize,
    /// Tokens from the shared store.
    pub remote: usize,
    /// Tokens of these that other weights than the current ones computed, also after a preemption.
    pub stale: usize,
}

/// One step's news of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Output {
    /// The request.
    pub id: RequestId,
    /// New tokens: one, or none when the request was dropped.
    pub tokens: Vec<u32>,
    /// Set on the last output.
    pub finish: Option<Finish>,
    /// Set once the prompt was scheduled.
    pub cached: Option<CachedTokens>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Status {
    Waiting,
    /// Blocks are being loaded by the connector (`WAITING_FOR_REMOTE_KVS`).
    Loading,
    Running,
    Preempted,
}

#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) ask: Ask,
    /// Prompt and output.
    pub(crate) tokens: Vec<u32>,
    /// Hashes of all full blocks of `tokens`.
    pub(crate) hashes: Vec<BlockHash>,
    /// Tokens whose KV exists.
    pub(crate) computed: usize,
    /// Blocks by group; 0 stands for a block out of the window.
    pub(crate) tables: Vec<Vec<BlockId>>,
    /// Leading blocks already hittable, by group.
    pub(crate) cached_blocks: Vec<usize>,
    pub(crate) status: Status,
    pub(crate) preemptions: usize,
    pub(crate) cached: Option<CachedTokens>,
    /// Leading chunks already offered to the connector, or loaded from it.
    pub(crate) stored_chunks: usize,
    /// Store jobs in flight.
    pub(crate) store_jobs: usize,
    /// The load that it waits for.
    pub(crate) loading: Option<Load>,
    pub(crate) aborted: bool,
    /// Digest of prompt and sample, for the model.
    pub(crate) digest: u64,
}

impl Request {
    pub(crate) fn new(ask: Ask, groups: usize, block_size: usize) -> Self {
        let mut hashes = Vec::new();
        ask.identity.extend_chain(&mut hashes, &ask.prompt, block_size);
        Self {
            tokens: ask.prompt.clone(),
            hashes,
            computed: 0,
            tables: vec![Vec::new(); groups],
            cached_blocks: vec![0; groups],
            status: Status::Waiting,
            preemptions: 0,
            cached: None,
            stored_chunks: 0,
            store_jobs: 0,
            loading: None,
            aborted: false,
            digest: model::digest(&ask.prompt, ask.sample),
            ask,
        }
    }

    pub(crate) fn prompt_len(&self) -> usize {
        self.ask.prompt.len()
    }

    pub(crate) fn output(&self) -> &[u32] {
        &self.tokens[self.prompt_len()..]
    }

    /// Holds device blocks without being in the running batch.
    pub(crate) fn holds_blocks(&self) -> bool {
        self.computed > 0 || self.status == Status::Loading
    }

    /// Appends a sampled token and says whether it ends the request.
    pub(crate) fn append(
        &mut self,
        token: u32,
        block_size: usize,
        max_model_len: usize,
    ) -> Option<Finish> {
        self.tokens.push(token);
        self.ask.identity.extend_chain(&mut self.hashes, &self.tokens, block_size);
        if self.ask.stop_token_ids.contains(&token) {
            return Some(Finish::Stop(Some(StopReason::Token(token))));
        }
        if let Some(stop) = self.met_stop() {
            return Some(Finish::Stop(Some(StopReason::Text(stop))));
        }
        let full = self.output().len() >= self.ask.max_tokens || self.tokens.len() >= max_model_len;
        full.then_some(Finish::Length)
    }

    /// A stop string can only have been completed by the newest token.
    fn met_stop(&self) -> Option<String> {
        let longest = self.ask.stop.iter().map(String::len).max()?;
        let output = self.output();
        let tail = &output[output.len().saturating_sub(longest + 1)..];
        let text = tokenizer::decode(tail, false);
        self.ask.stop.iter().find(|stop| text.contains(stop.as_str())).cloned()
    }
}

/// Queue of request ids, first come first served.
pub(crate) type Queue = VecDeque<RequestId>;
