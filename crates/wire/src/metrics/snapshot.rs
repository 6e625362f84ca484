//! What one scrape says, by rank and all ranks together.
//! Invariant: ranks are put together by what a signal means, and a signal that no rank gives stays
//! absent.

use std::collections::{BTreeMap, BTreeSet};

use super::Histogram;

/// One scrape.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Snapshot {
    /// By data-parallel rank (label `engine`; 0 where the label is missing).
    pub ranks: BTreeMap<u32, Signals>,
    /// When the server process started, in Unix seconds; the latest of several processes.
    pub process_start: Option<f64>,
    /// Families under `vllm:` that this version of fak does not know, as many as the limit allows.
    pub unknown: BTreeSet<String>,
    /// Lines that are no samples, and samples whose value their signal cannot have.
    pub malformed_lines: u32,
}

/// What the engine gives; `None` and missing keys are what it does not give.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Signals {
    /// Time to the first token, in seconds.
    pub ttft: Option<Histogram>,
    /// Time between tokens, in seconds.
    pub itl: Option<Histogram>,
    /// Time a token of a whole request, in seconds (since vLLM 0.11.0).
    pub tpot: Option<Histogram>,
    /// Time in the queue, in seconds.
    pub queue: Option<Histogram>,
    /// Tokens of each step of the engine that gave anything out.
    pub steps: Option<Histogram>,
    /// Fraction of the device's KV cache in use.
    pub kv_cache_usage: Option<Usage>,
    /// Requests that run. Stands still while the engine is paused.
    pub running: Option<f64>,
    /// Requests that wait. Stands still while the engine is paused.
    pub waiting: Option<f64>,
    /// Prompt tokens found in the device's cache.
    pub prefix_hits: Option<f64>,
    /// Prompt tokens looked up in it.
    pub prefix_queries: Option<f64>,
    /// Prompt tokens found in a connector's tier (since vLLM 0.12.0).
    pub external_hits: Option<f64>,
    /// Prompt tokens looked up there: those that the device's cache missed.
    pub external_queries: Option<f64>,
    /// Prompt tokens by where they came from: `local_compute`, `local_cache_hit`,
    /// `external_kv_transfer` (since vLLM 0.16.0).
    pub prompt_by_source: BTreeMap<String, f64>,
    /// Cached prompt tokens by tier: `device`, `host`, `disk`, `p2p`, `external_unspecified` (since
    /// vLLM 0.32.0).
    pub cached_by_source: BTreeMap<String, f64>,
    /// What the engine last did about sleeping.
    pub sleep: Option<SleepState>,
    /// Bytes loaded from the offload tier.
    pub offload_load_bytes: Option<f64>,
    /// Bytes stored to the offload tier.
    pub offload_store_bytes: Option<f64>,
    /// Finished requests by reason: `stop`, `length`, `abort`, `error`, `repetition`.
    pub request_success: BTreeMap<String, f64>,
    /// Preempted requests.
    pub preemptions: Option<f64>,
    /// Drafts of speculative decoding. An engine that is set up without it does not give them, but
    /// for the Rust frontend, which gives 0.
    pub drafts: Option<f64>,
    /// Tokens a block, as configured; groups may differ.
    pub block_size: Option<u32>,
    /// Blocks of the device's cache.
    pub num_gpu_blocks: Option<u64>,
}

/// A fraction of a cache, over one rank or several.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Usage {
    /// The fullest rank's.
    pub max: f64,
    /// The mean over ranks.
    pub mean: f64,
    /// How many ranks these are of.
    pub ranks: u32,
}

/// The metric `engine_sleep_state`: the last level asked for, not what is true. All three are false
/// after a level 0 and for a rank that gives the metric without them (vLLM 0.32.0, observed).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SleepState {
    /// Not put to sleep; over several ranks, none of them.
    pub awake: bool,
    /// Put to sleep at level 1; over several ranks, any of them.
    pub weights_offloaded: bool,
    /// Put to sleep at level 2; over several ranks, any of them.
    pub discard_all: bool,
}

impl Snapshot {
    /// All ranks together: counts and histograms add, usage gives the largest and the mean, and
    /// settings that differ are left out.
    #[must_use]
    pub fn total(&self) -> Signals {
        let mut ranks = self.ranks.values();
        let Some(mut total) = ranks.next().cloned() else { return Signals::default() };
        ranks.for_each(|rank| total.add(rank));
        total
    }

    /// Ranks that run requests, as far as they are told.
    #[must_use]
    pub fn running_ranks(&self) -> usize {
        self.ranks.values().filter(|rank| rank.running.is_some()).count()
    }

    /// Whether the engine decodes speculatively; `None` where the scrape does not tell. The counter
    /// is there from the start where the engine is set up so, and only then (vLLM 0.32.0,
    /// `v1/spec_decode/metrics.py`, read); but the Rust frontend, which gives no sleep state, gives
    /// it always.
    #[must_use]
    pub fn speculates(&self) -> Option<bool> {
        let of = |rank: &Signals| match (rank.drafts, rank.running) {
            (Some(drafts), _) if drafts > 0.0 || rank.sleep.is_some() => Some(true),
            (Some(_), _) | (None, None) => None,
            (None, Some(_)) => Some(false),
        };
        let ranks: Vec<_> = self.ranks.values().map(of).collect();
        if ranks.contains(&Some(true)) {
            return Some(true);
        }
        let is_told = !ranks.is_empty() && !ranks.contains(&None);
        is_told.then_some(false)
    }
}

impl Signals {
    fn add(&mut self, other: &Signals) {
        let histograms = [
            (&mut self.ttft, &other.ttft),
            (&mut self.itl, &other.itl),
            (&mut self.tpot, &other.tpot),
            (&mut self.queue, &other.queue),
            (&mut self.steps, &other.steps),
        ];
        for (own, other) in histograms {
            merge(own, other.as_ref(), |own, other| own.add(other));
        }
        let counts = [
            (&mut self.running, other.running),
            (&mut self.waiting, other.waiting),
            (&mut self.prefix_hits, other.prefix_hits),
            (&mut self.prefix_queries, other.prefix_queries),
            (&mut self.external_hits, other.external_hits),
            (&mut self.external_queries, other.external_queries),
            (&mut self.offload_load_bytes, other.offload_load_bytes),
            (&mut self.offload_store_bytes, other.offload_store_bytes),
            (&mut self.preemptions, other.preemptions),
            (&mut self.drafts, other.drafts),
        ];
        for (own, other) in counts {
            merge(own, other.as_ref(), |own, other| *own += other);
        }
        let splits = [
            (&mut self.prompt_by_source, &other.prompt_by_source),
            (&mut self.cached_by_source, &other.cached_by_source),
            (&mut self.request_success, &other.request_success),
        ];
        for (own, other) in splits {
            for (part, value) in other {
                *own.entry(part.clone()).or_default() += value;
            }
        }
        merge(&mut self.kv_cache_usage, other.kv_cache_usage.as_ref(), Usage::add);
        merge(&mut self.sleep, other.sleep.as_ref(), SleepState::add);
        self.block_size = self.block_size.filter(|own| other.block_size == Some(*own));
        self.num_gpu_blocks = self.num_gpu_blocks.filter(|own| other.num_gpu_blocks == Some(*own));
    }
}

impl Usage {
    fn add(&mut self, other: &Usage) {
        let (own_ranks, other_ranks) = (f64::from(self.ranks), f64::from(other.ranks));
        self.max = self.max.max(other.max);
        self.mean = (self.mean * own_ranks + other.mean * other_ranks) / (own_ranks + other_ranks);
        self.ranks += other.ranks;
    }
}

impl SleepState {
    fn add(&mut self, other: &SleepState) {
        self.awake &= other.awake;
        self.weights_offloaded |= other.weights_offloaded;
        self.discard_all |= other.discard_all;
    }
}

fn merge<T: Clone>(own: &mut Option<T>, other: Option<&T>, add: impl FnOnce(&mut T, &T)) {
    match (own, other) {
        (Some(own), Some(other)) => add(own, other),
        (own @ None, Some(other)) => *own = Some(other.clone()),
        (_, None) => {}
    }
}
