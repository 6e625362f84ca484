//! Which worker will soon hold a prompt, because a request with it is there now: short-lived, and
//! never a claim.
//!
//! Keys are chain digests of the prompt's raw bytes, so that writing one down needs no tokens.
//! Invariant: an entry is gone after its time, when its request fails, or once events prove as
//! much; and their number is bounded.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use fak_wire::openai::{Api, Request};
use tokio::time::Instant;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Bytes of a chunk: about 128 tokens of English.
const CHUNK_BYTES: usize = 512;
/// Chunks of a prompt that are looked at.
const CHUNKS_MAX: usize = 64;
/// Entries; past it the oldest is dropped.
const ENTRIES_MAX: usize = 1 << 16;

/// Fields that hold the prompt, by how telling they are: of messages, responses and embeddings, of
/// reranking and of scores.
const PROMPTS: [&str; 6] = ["messages", "input", "prompt", "query", "text_1", "data_1"];

/// A prompt by its raw bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Chunks {
    keys: Vec<u64>,
    /// Of the prompt in all.
    bytes: usize,
}

impl Chunks {
    /// The chunks of a request's prompt, as far as a template puts it in front. Nothing for what
    /// has no whole chunk.
    pub(super) fn of(request: &Request, seed: u64) -> Self {
        let prompt = match request.api() {
            Api::Chat => "messages",
            Api::Completions => "prompt",
        };
        Self::under(request, &["model", "tools", "cache_salt"], prompt, seed)
    }

    /// The same of a body of any other route: by what stands in front of a prompt there, and what
    /// grows from turn to turn.
    pub(super) fn of_any(request: &Request, seed: u64) -> Self {
        let is_there = |field: &&&str| request.raw(field).is_some();
        let prompt = PROMPTS.iter().find(is_there).copied().unwrap_or_default();
        let before = ["model", "tools", "system", "instructions", "cache_salt"];
        Self::under(request, &before, prompt, seed)
    }

    fn under(request: &Request, before: &[&str], prompt: &str, seed: u64) -> Self {
        let raw = |field: &str| request.raw(field).unwrap_or_default().as_bytes();
        let begin = before.iter().fold(seed, |seed, field| xxh3_64_with_seed(raw(field), seed));
        let prompt = raw(prompt);
        let mut parent = begin;
        let chunk = |chunk| {
            parent = xxh3_64_with_seed(chunk, parent);
            parent
        };
        let keys = prompt.chunks_exact(CHUNK_BYTES).take(CHUNKS_MAX).map(chunk).collect();
        Self { keys, bytes: prompt.len() }
    }
}

impl Chunks {
    /// Whether there is no whole chunk.
    pub(super) fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// The prompt's length in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }
}

/// The predictions.
#[derive(Debug)]
pub(super) struct Predicted {
    lives_for: Duration,
    entries: Mutex<Entries>,
}

#[derive(Debug, Default)]
struct Entries {
    /// When each ends, by chunk and worker.
    until: HashMap<(u64, usize), Instant>,
    /// The same in the order of their ends; those that were renewed or dropped are passed over.
    order: VecDeque<(Instant, (u64, usize))>,
}

impl Predicted {
    pub(super) fn new(lives_for: Duration) -> Self {
        Self { lives_for, entries: Mutex::default() }
    }

    /// Writes down that a request with this prompt goes to `worker`.
    pub(super) fn add(&self, chunks: &Chunks, worker: usize, now: Instant) {
        let until = now + self.lives_for;
        let mut entries = self.lock();
        for key in &chunks.keys {
            entries.until.insert((*key, worker), until);
            entries.order.push_back((until, (*key, worker)));
        }
        entries.drop_old(now);
    }

    /// Drops what was written down of it.
    pub(super) fn remove(&self, chunks: &Chunks, worker: usize) {
        let mut entries = self.lock();
        for key in &chunks.keys {
            entries.until.remove(&(*key, worker));
        }
    }

    /// The share of the prompt that `worker` is expected to hold soon, in tokens of a prompt that
    /// has `tokens`.
    pub(super) fn tokens(&self, chunks: &Chunks, worker: usize, tokens: u32, now: Instant) -> u32 {
        if chunks.keys.is_empty() {
            return 0;
        }
        let entries = self.lock();
        let is_expected =
            |key: &&u64| entries.until.get(&(**key, worker)).is_some_and(|until| *until > now);
        let run = chunks.keys.iter().take_while(is_expected).count();
        let share = (run * CHUNK_BYTES) as u64 * u64::from(tokens) / chunks.bytes.max(1) as u64;
        u32::try_from(share).unwrap_or(u32::MAX)
    }

    fn lock(&self) -> MutexGuard<'_, Entries> {
        // An entry more or less is only a hint.
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entries {
    fn drop_old(&mut self, now: Instant) {
        while let Some((until, key)) = self.order.front().copied() {
            if until > now && self.order.len() <= ENTRIES_MAX {
                return;
            }
            self.order.pop_front();
            // Not where it was renewed since.
            if self.until.get(&key).is_some_and(|renewed| *renewed <= until) {
                self.until.remove(&key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn chunks(prompt: &str) -> Chunks {
        let body = json!({"model": "m", "prompt": prompt}).to_string();
        Chunks::of(&Request::parse(Api::Completions, body.as_bytes()).expect("a body"), 7)
    }

    #[test]
    fn a_prediction_is_of_the_shared_prefix_and_ends() {
        let predicted = Predicted::new(Duration::from_secs(2));
        let now = Instant::now();
        let shared = "s".repeat(2046);
        let (one, other) =
            (chunks(&shared), chunks(&format!("{}{}", &shared[..1100], "x".repeat(946))));
        predicted.add(&one, 3, now);
        assert_eq!(predicted.tokens(&one, 3, 1024, now), 1024);
        assert_eq!(predicted.tokens(&other, 3, 1024, now), 512);
        assert_eq!(predicted.tokens(&one, 2, 1024, now), 0);
        assert_eq!(predicted.tokens(&one, 3, 1024, now + Duration::from_secs(2)), 0);
        predicted.remove(&one, 3);
        assert_eq!(predicted.tokens(&one, 3, 1024, now), 0);
    }

    #[test]
    fn the_number_of_entries_is_bounded_and_old_ones_go() {
        let predicted = Predicted::new(Duration::from_secs(2));
        let mut now = Instant::now();
        for prompt in 0..4000 {
            let keys = (0..CHUNKS_MAX as u64).map(|chunk| prompt << 8 | chunk).collect();
            predicted.add(&Chunks { keys, bytes: CHUNKS_MAX * CHUNK_BYTES }, 0, now);
        }
        assert!(predicted.lock().until.len() <= ENTRIES_MAX);
        now += Duration::from_secs(2);
        predicted.add(&chunks(&"y".repeat(600)), 0, now);
        assert_eq!(predicted.lock().until.len(), 1);
        assert_eq!(predicted.lock().order.len(), 1);
    }
}
