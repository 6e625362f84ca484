//! What the data plane counts.
//!
//! Invariant: labels come from closed lists alone, and every child is made at the start, so that a
//! request touches atomics and no map.

use std::time::Duration;

use fak_kernel::route::Reason;
use prometheus::{Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, Opts};

use super::audit::Verdict;
use crate::engine::Data;
use crate::telemetry::Registry;

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// Answered as the engine meant to.
    Ok,
    /// The request was wrong, by fak's or the engine's word.
    Refused,
    /// No worker, or no room.
    Unavailable,
    /// The worker failed it.
    Failed(Failure),
    /// The client left.
    Cancelled,
}

/// Why a worker failed a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// No connection.
    Unreachable,
    /// Nothing came for too long.
    Silent,
    /// The connection broke, or the stream ended without its marker.
    Cut,
    /// The engine said so, by status or in the stream.
    Error,
    /// The engine aborted it: a pause or a sleep while it ran.
    Aborted,
    /// The engine dropped it while it was queued.
    Dropped,
    /// fak stopped.
    Stopped,
}

impl Outcome {
    const WORDS: [&'static str; 5] = ["ok", "refused", "unavailable", "failed", "cancelled"];

    fn index(self) -> usize {
        match self {
            Self::Ok => 0,
            Self::Refused => 1,
            Self::Unavailable => 2,
            Self::Failed(_) => 3,
            Self::Cancelled => 4,
        }
    }
}

impl Failure {
    const WORDS: [&'static str; 7] =
        ["unreachable", "silent", "cut", "error", "aborted", "dropped", "stopped"];

    /// Its word, for logs and labels.
    pub(super) fn as_str(self) -> &'static str {
        Self::WORDS[self as usize]
    }
}

/// Where a prompt's tokens come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Matching {
    /// From the request, or from the cache of tokenized prompts.
    Known,
    /// From the engine's `/tokenize`.
    Asked,
    /// From nowhere: the prompt cannot be matched.
    NotMatchable,
    /// Not needed: no worker holds a block.
    Skipped,
}

impl Matching {
    const WORDS: [&'static str; 4] = ["known", "asked", "not_matchable", "skipped"];
}

/// The data plane's metrics.
#[derive(Clone, Debug)]
pub(super) struct Metrics {
    requests: Vec<[IntCounter; 5]>,
    failures: [IntCounter; 7],
    routed: Vec<IntCounter>,
    matching: [IntCounter; 4],
    claims: Vec<IntCounter>,
    /// Requests that a client has not got its whole answer to.
    pub(super) in_flight: IntGauge,
    /// Requests that wait for a worker that serves.
    pub(super) held: IntGauge,
    /// Requests moved to another worker.
    pub(super) moved: IntCounter,
    /// Requests for which a prediction was written.
    pub(super) predicted: IntCounter,
    /// Prompts whose length the engine counted otherwise.
    pub(super) mismatches: IntCounter,
    /// Bodies over the limit.
    pub(super) too_large: IntCounter,
    /// Salts written into requests.
    pub(super) salted: IntCounter,
    /// Tokens claimed by audited requests.
    pub(super) claimed_tokens: IntCounter,
    /// Tokens that engines took from caches for audited requests.
    pub(super) cached_tokens: IntCounter,
    overhead: Histogram,
}

impl Metrics {
    /// Registers them.
    ///
    /// # Errors
    /// A name is taken.
    pub(super) fn new(registry: &Registry) -> prometheus::Result<Self> {
        let counters = |name: &str, help: &str, labels: &[&str]| -> prometheus::Result<_> {
            let family = IntCounterVec::new(Opts::new(name, help), labels)?;
            registry.register(Box::new(family.clone()))?;
            Ok(family)
        };
        let counter = |name: &str, help: &str| -> prometheus::Result<_> {
            let counter = IntCounter::new(name, help)?;
            registry.register(Box::new(counter.clone()))?;
            Ok(counter)
        };
        let gauge = |name: &str, help: &str| -> prometheus::Result<_> {
            let gauge = IntGauge::new(name, help)?;
            registry.register(Box::new(gauge.clone()))?;
            Ok(gauge)
        };
        let requests =
            counters("fak_requests_total", "Requests by how they ended.", &["route", "outcome"])?;
        let requests = Data::ALL.iter().map(|route| route.path()).chain(["other"]).map(|route| {
            Outcome::WORDS.map(|outcome| requests.with_label_values(&[route, outcome]))
        });
        let failures =
            counters("fak_requests_failed_total", "Failed requests by cause.", &["cause"])?;
        let routed = counters(
            "fak_requests_routed_total",
            "Requests by why their worker was chosen.",
            &["reason"],
        )?;
        let matching = counters(
            "fak_requests_matching_total",
            "Requests by where their tokens came from.",
            &["outcome"],
        )?;
        let claims = counters(
            "fak_claims_total",
            "Claims held against what the engine reports.",
            &["outcome"],
        )?;
        let overhead = Histogram::with_opts(
            HistogramOpts::new(
                "fak_request_overhead_seconds",
                "Time from a request's whole body to its sending, waiting for a worker left out.",
            )
            .buckets(vec![
                25e-6, 50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 100e-3, 1.0,
            ]),
        )?;
        registry.register(Box::new(overhead.clone()))?;
        let of = |family: &IntCounterVec, word: &str| family.with_label_values(&[word]);
        Ok(Self {
            requests: requests.collect(),
            failures: Failure::WORDS.map(|cause| of(&failures, cause)),
            routed: Reason::ALL.iter().map(|reason| of(&routed, reason.as_str())).collect(),
            matching: Matching::WORDS.map(|outcome| of(&matching, outcome)),
            claims: Verdict::ALL.iter().map(|verdict| of(&claims, verdict.as_str())).collect(),
            in_flight: gauge(
                "fak_requests_in_flight",
                "Requests that are not answered to their end.",
            )?,
            held: gauge("fak_requests_held", "Requests that wait for a worker that serves.")?,
            moved: counter("fak_requests_moved_total", "Requests moved to another worker.")?,
            predicted: counter(
                "fak_requests_predicted_total",
                "Requests written down as to be cached soon.",
            )?,
            mismatches: counter(
                "fak_requests_token_mismatches_total",
                "Prompts whose length the engine counted otherwise.",
            )?,
            too_large: counter("fak_requests_too_large_total", "Bodies over the limit.")?,
            salted: counter(
                "fak_requests_salted_total",
                "Requests that were given their tenant's salt.",
            )?,
            claimed_tokens: counter(
                "fak_claimed_tokens_total",
                "Prompt tokens claimed to be cached, of audited requests.",
            )?,
            cached_tokens: counter(
                "fak_cached_tokens_total",
                "Prompt tokens that engines took from caches, of audited requests.",
            )?,
            overhead,
        })
    }

    /// A request ended.
    pub(super) fn ended(&self, route: Option<Data>, outcome: Outcome) {
        let route = route.map_or(Data::ALL.len(), |route| route as usize);
        self.requests[route][outcome.index()].inc();
        if let Outcome::Failed(failure) = outcome {
            self.failures[failure as usize].inc();
        }
    }

    /// A worker was chosen.
    pub(super) fn routed(&self, reason: Reason) {
        self.routed[reason as usize].inc();
    }

    /// A prompt was matched, or not.
    pub(super) fn matched(&self, matching: Matching) {
        self.matching[matching as usize].inc();
    }

    /// A claim was audited.
    pub(super) fn audited(&self, verdict: Verdict) {
        self.claims[verdict as usize].inc();
    }

    /// A request was sent, so long after its body was there.
    pub(super) fn sent(&self, after: Duration) {
        self.overhead.observe(after.as_secs_f64());
    }
}
