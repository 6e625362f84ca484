//! A prompt's tokens for matching: the request's own, or the engine's `/tokenize`, asked once for
//! each prompt.
//!
//! Invariant: tokens are those of the request, or there are none; those of a chat are of the day on
//! which it is asked for, since templates write the date; nothing that an engine told outlives any
//! worker's life, since the next one may have another template; and the cache is bounded by the
//! tokens that it holds. One model name is taken to mean one template on all workers of one engine
//! version; where an engine then counts a prompt otherwise, that prompt is not matched again, and
//! after two such nothing of its kind is for a while.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use fak_index::RankId;
use fak_wire::openai::{Api, Request};
use jiff::Timestamp;
use quick_cache::Weighter;
use quick_cache::sync::Cache;
use tokio::time::Instant;
use xxhash_rust::xxh3::{xxh3_64_with_seed, xxh3_128_with_seed};

use super::contradicted::Contradicted;
use super::metrics::Matching;
use super::miscounted::{Miscounted, Remembered};
use crate::engine::{TokensError, prompt_digest, prompt_shape};
use crate::fleet::View;

/// For how long a worker without `/tokenize` is not asked again.
const ABSENT_FOR: Duration = Duration::from_secs(60);
/// For how long a worker that did not answer is not asked again.
const SILENT_FOR: Duration = Duration::from_secs(2);

/// When an engine is asked again to announce what it holds of a prompt. It announces every block of
/// the hit each time.
const REPORT_AGAIN_AFTER: Duration = Duration::from_secs(60);

/// For how long a template writes the same date, wherever its engine is: days of all time zones
/// begin at a whole quarter of an hour.
const SAME_DATE_SECONDS: i64 = 15 * 60;

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
    clock: fn() -> Timestamp,
    miscounted: Miscounted,
    contradicted: Contradicted,
    /// When engines were asked to announce what they hold, by prompt and life.
    reported: Mutex<Remembered<u128, Option<Instant>>>,
}

/// A prompt in tokens, and what it was made of.
#[derive(Clone, Debug)]
pub(super) struct Matched {
    pub(super) tokens: Arc<[u32]>,
    pub(super) source: Source,
}

/// What a prompt's tokens were made of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Source {
    /// Of everything that they depend on.
    pub(super) digest: u128,
    /// Of the kind of request: route, model, fields, the engine's version.
    pub(super) shape: u64,
    /// How many lives the fleet's workers had begun: in each an engine may make other tokens.
    pub(super) lives: u64,
}

#[cfg(test)]
impl Source {
    pub(super) fn new(digest: u128, shape: u64) -> Self {
        Self { digest, shape, lives: 0 }
    }
}

impl Prompts {
    /// Keeps at most `tokens_max` tokens, for so many workers. `seed`: secret, so that nobody can
    /// aim at a collision.
    pub(super) fn new(
        tokens_max: u64,
        workers: usize,
        seed: u64,
        clock: fn() -> Timestamp,
    ) -> Self {
        let entries = usize::try_from(tokens_max / 512).unwrap_or(usize::MAX).max(16);
        Self {
            seed,
            known: Cache::with_weighter(entries, tokens_max, ByTokens),
            shunned: (0..workers).map(|_| Mutex::default()).collect(),
            clock,
            miscounted: Miscounted::default(),
            contradicted: Contradicted::default(),
            reported: Mutex::default(),
        }
    }

    /// The tokens of a request's prompt, by way of one of `candidates` (by their number in the
    /// fleet), and where they come from; or why there are none. `lives`: those that the fleet's
    /// workers have begun.
    pub(super) async fn tokens(
        &self,
        request: &Request,
        candidates: &[(usize, &View)],
        lives: u64,
    ) -> Result<(Matched, Matching), Matching> {
        let digest = self.digest(request, candidates, (self.clock)(), lives);
        let shape = prompt_shape(request, self.seed) ^ version_digest(candidates, self.seed);
        let source = Source { digest, shape, lives };
        if self.miscounted.has(source, Instant::now()) {
            return Err(Matching::Miscounted);
        }
        if self.contradicted.has(shape, Instant::now()) {
            return Err(Matching::Contradicted);
        }
        let matched = |tokens| Matched { tokens, source };
        if let Some(tokens) = self.known.get(&digest) {
            return Ok((matched(tokens), Matching::Known));
        }
        let now = Instant::now();
        let Some((number, view)) = candidates.iter().find(|(number, _)| !self.shuns(*number, now))
        else {
            return Err(Matching::NotMatchable);
        };
        // Requests with one prompt wait for the first of them.
        let asked = async { view.worker.engine.tokens(request).await.map(Arc::from) };
        match self.known.get_or_insert_async(&digest, asked).await {
            Ok(tokens) => Ok((matched(tokens), Matching::Asked)),
            Err(error) => {
                self.failed(*number, &error, now);
                tracing::debug!(worker = %view.worker.id, %error, "the prompt is not matchable");
                Err(Matching::NotMatchable)
            }
        }
    }

    /// An engine counted this prompt otherwise; whether from now on nothing of its kind is matched
    /// for a while.
    pub(super) fn miscounted(&self, source: Source, now: Instant) -> bool {
        self.miscounted.add(source, now)
    }

    /// A claim on `rank` for a prompt was contradicted; whether the whole rank is in doubt.
    pub(super) fn contradicted(&self, rank: RankId, source: Source, now: Instant) -> bool {
        self.contradicted.add(rank, source, now)
    }

    /// Whether a worker is to announce what it holds of a prompt: once in a while in each life of
    /// its process.
    pub(super) fn takes_report(&self, source: Source, worker: &str, life: &str) -> bool {
        let on = [worker.as_bytes(), &[0], life.as_bytes()].concat();
        let key = source.digest ^ xxh3_128_with_seed(&on, self.seed);
        let now = Instant::now();
        // Whole after each insertion, whatever panicked elsewhere.
        let mut reported = self.reported.lock().unwrap_or_else(PoisonError::into_inner);
        let last = reported.entry(key);
        let is_due = last.is_none_or(|last| now.duration_since(last) >= REPORT_AGAIN_AFTER);
        if is_due {
            *last = Some(now);
        }
        is_due
    }

    fn digest(
        &self,
        request: &Request,
        candidates: &[(usize, &View)],
        at: Timestamp,
        lives: u64,
    ) -> u128 {
        let version = candidates.first().and_then(|(_, view)| view.state.version.as_deref());
        let date = match request.api() {
            Api::Chat => at.as_second().div_euclid(SAME_DATE_SECONDS),
            Api::Completions => 0,
        };
        let version = version.unwrap_or_default().as_bytes();
        let around = [&date.to_le_bytes()[..], &lives.to_le_bytes(), version].concat();
        xxh3_128_with_seed(&around, self.seed) ^ prompt_digest(request, self.seed)
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
            TokensError::NoTokens { .. }
            | TokensError::NotOnePrompt
            | TokensError::Untold { .. }
            | TokensError::Request(_) => return,
        };
        if let Some(until) = self.shunned.get(worker) {
            *until.lock().unwrap_or_else(PoisonError::into_inner) = Some(now + rest);
        }
    }
}

fn version_digest(candidates: &[(usize, &View)], seed: u64) -> u64 {
    let version = candidates.first().and_then(|(_, view)| view.state.version.as_deref());
    xxh3_64_with_seed(version.unwrap_or_default().as_bytes(), seed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_that_gives_no_tokens_is_asked_again_after_as_long_as_it_may_last() {
        let now = Instant::now();
        for (status, rest) in [(404, ABSENT_FOR), (501, ABSENT_FOR), (500, SILENT_FOR)] {
            let prompts = Prompts::new(1 << 10, 2, 7, Timestamp::now);
            prompts.failed(0, &TokensError::NoTokens { status }, now);
            let last = now + rest - Duration::from_millis(1);
            assert!(prompts.shuns(0, last) && !prompts.shuns(1, last), "{status}");
            assert!(!prompts.shuns(0, now + rest), "{status}");
        }
        let prompts = Prompts::new(1 << 10, 1, 7, Timestamp::now);
        prompts.failed(0, &TokensError::NoTokens { status: 400 }, now);
        prompts.failed(0, &TokensError::NotOnePrompt, now);
        assert!(!prompts.shuns(0, now), "the request's own fault");
    }

    /// As the templates of Llama 3 do: `strftime_now("%d %b %Y")`.
    #[test]
    fn a_chat_is_tokenized_anew_on_each_day_of_any_time_zone() {
        let prompts = Prompts::new(1 << 10, 1, 7, Timestamp::now);
        let digest = |api, at: &str| {
            let request = Request::parse(api, br#"{"model":"m","messages":[],"prompt":"p"}"#);
            prompts.digest(&request.expect("a body"), &[], at.parse().expect("a time"), 0)
        };
        for (before, midnight, after) in [
            ("2026-11-29T23:59:59Z", "2026-11-30T00:00:00Z", "2026-11-30T00:14:59Z"),
            // In Kathmandu.
            ("2026-11-29T18:14:59Z", "2026-11-29T18:15:00Z", "2026-11-29T18:29:59Z"),
            ("1969-12-31T23:59:59Z", "1970-01-01T00:00:00Z", "1970-01-01T00:14:59Z"),
        ] {
            let of = |at| digest(Api::Chat, at);
            assert_ne!(of(before), of(midnight), "{midnight}");
            assert_eq!(of(midnight), of(after), "{midnight}");
            let of = |at| digest(Api::Completions, at);
            assert_eq!(of(before), of(midnight), "no template writes in it");
        }
    }
}
