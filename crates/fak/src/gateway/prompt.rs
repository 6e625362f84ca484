//! A prompt's tokens for matching: the request's own, or the engine's `/tokenize`, asked once for
//! each prompt.
//!
//! Invariant: tokens are those of the request, or there are none; and the cache is bounded by the
//! tokens that it holds. One model name is taken to mean one template on all workers of one engine
//! version.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use fak_wire::openai::Request;
use quick_cache::Weighter;
use quick_cache::sync::Cache;
use tokio::time::Instant;
use xxhash_rust::xxh3::xxh3_128_with_seed;

use super::metrics::Matching;
use crate::engine::{TokensError, prompt_digest, skips_prefix_cache};
use crate::fleet::View;

/// For how long a worker without `/tokenize` is not asked again.
const ABSENT_FOR: Duration = Duration::from_secs(60);
/// For how long a worker that did not answer is not asked again.
const SILENT_FOR: Duration = Duration::from_secs(2);

#[derive(Clone, Debug)]
struct ByTokens;

impl Weighter<u128, Arc<[u32]>> for ByTokens {
    fn weight(&self, _: &u128, tokens: &Arc<[u32]>) -> u64 {
        // About what an entry costs besides, in tokens.
        tokens.len() as u64 + 32
    }
}

/// Tokens of prompts seen lately.
#[derive(Debug)]
pub(super) struct Prompts {
    seed: u64,
    known: Cache<u128, Arc<[u32]>, ByTokens>,
    /// Until when each worker is not asked.
    shunned: Vec<Mutex<Option<Instant>>>,
}

impl Prompts {
    /// Keeps at most `tokens_max` tokens, for so many workers. `seed`: secret, so that nobody can
    /// aim at a collision.
    pub(super) fn new(tokens_max: u64, workers: usize, seed: u64) -> Self {
        let entries = usize::try_from(tokens_max / 512).unwrap_or(usize::MAX).max(16);
        Self {
            seed,
            known: Cache::with_weighter(entries, tokens_max, ByTokens),
            shunned: (0..workers).map(|_| Mutex::default()).collect(),
        }
    }

    /// The tokens of a request's prompt, by way of one of `candidates` (by their number in the
    /// fleet).
    pub(super) async fn tokens(
        &self,
        request: &Request,
        candidates: &[(usize, &View)],
    ) -> (Option<Arc<[u32]>>, Matching) {
        if skips_prefix_cache(request) {
            return (None, Matching::NotMatchable);
        }
        let digest = self.digest(request, candidates);
        if let Some(tokens) = self.known.get(&digest) {
            return (Some(tokens), Matching::Known);
        }
        let now = Instant::now();
        let Some((number, view)) = candidates.iter().find(|(number, _)| !self.shuns(*number, now))
        else {
            return (None, Matching::NotMatchable);
        };
        // Requests with one prompt wait for the first of them.
        let asked = async { view.worker.engine.tokens(request).await.map(Arc::from) };
        match self.known.get_or_insert_async(&digest, asked).await {
            Ok(tokens) => (Some(tokens), Matching::Asked),
            Err(error) => {
                self.failed(*number, &error, now);
                tracing::debug!(worker = %view.worker.id, %error, "the prompt is not matchable");
                (None, Matching::NotMatchable)
            }
        }
    }

    fn digest(&self, request: &Request, candidates: &[(usize, &View)]) -> u128 {
        let version = candidates.first().and_then(|(_, view)| view.state.version.as_deref());
        let digest = prompt_digest(request, self.seed);
        xxh3_128_with_seed(version.unwrap_or_default().as_bytes(), self.seed) ^ digest
    }

    fn shuns(&self, worker: usize, now: Instant) -> bool {
        let until =
            self.shunned.get(worker).map(|m| *m.lock().unwrap_or_else(PoisonError::into_inner));
        until.flatten().is_some_and(|until| until > now)
    }

    fn failed(&self, worker: usize, error: &TokensError, now: Instant) {
        let rest = match error {
            TokensError::NoTokens { status: 404 | 405 | 501 } => ABSENT_FOR,
            TokensError::NoTokens { status: 500.. } | TokensError::Engine(_) => SILENT_FOR,
            // The request's own fault.
            TokensError::NoTokens { .. } | TokensError::NotOnePrompt | TokensError::Request(_) => {
                return;
            }
        };
        if let Some(until) = self.shunned.get(worker) {
            *until.lock().unwrap_or_else(PoisonError::into_inner) = Some(now + rest);
        }
    }
}
