//! What the data plane counts.
//!
//! Invariant: labels come from closed lists alone, and every child is made at the start, so that a
//! request touches atomics and no map.

use std::time::Duration;

use fak_kernel::route::Reason;
use fak_kernel::vocab::PerTier;
use fak_kernel::{LossCause, Tier};
use prometheus::core::Collector;
use prometheus::{Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, Opts};

use super::claim::{Claim, Kv, NoClaim};
use super::verdict::{News, Unaudited, Verdict};
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

    /// The word.
    pub(super) fn as_str(self) -> &'static str {
        Self::WORDS[self.index()]
    }

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
    /// From nowhere: `/tokenize` does not tell them, or they are not those of one whole prompt.
    NotMatchable,
    /// Not needed: no worker holds a block.
    Skipped,
    /// Not used: the engine computes the whole prompt anyway.
    SkipsCache,
    /// Not used: the engine's own requests answer it.
    BeamSearch,
    /// Not enough: the prompt has content that is not text.
    Content,
    /// Not enough: which adapter computes it is not known.
    Adapter,
    /// Not enough: the cards do not tell whether the model is the base.
    Model,
    /// Not used: the engine counted this prompt, or prompts of its kind, otherwise.
    Miscounted,
    /// Not used: a claim for a prompt of its kind was contradicted lately.
    Contradicted,
}

impl Matching {
    const WORDS: [&'static str; 11] = [
        "known",
        "asked",
        "not_matchable",
        "skipped",
        "skips_cache",
        "beam_search",
        "content",
        "adapter",
        "model",
        "miscounted",
        "contradicted",
    ];
}

/// The data plane's metrics.
#[derive(Clone, Debug)]
pub(super) struct Metrics {
    requests: Vec<[IntCounter; 5]>,
    failures: [IntCounter; 7],
    routed: Vec<IntCounter>,
    matching: [IntCounter; 11],
    claims: Claims,
    /// Requests sent in the mode in which the engine announces what it hit.
    pub(super) reports: IntCounter,
    /// Blocks that a hit proved again.
    pub(super) confirmed_blocks: IntCounter,
    /// Requests that a client has not got its whole answer to.
    pub(super) in_flight: IntGauge,
    /// Requests that wait for a worker that serves.
    pub(super) held: IntGauge,
    /// Requests whose abort waits for their engine to run again.
    pub(super) deferred: IntGauge,
    /// Requests moved to another worker.
    pub(super) moved: IntCounter,
    /// Times that a worker was kept from a route since it failed in a row.
    pub(super) ejected: IntCounter,
    /// Requests for which a prediction was written.
    pub(super) predicted: IntCounter,
    /// Answers during which their worker's weights changed.
    pub(super) mixed_weights: IntCounter,
    /// Prompts whose length the engine counted otherwise.
    pub(super) mismatches: IntCounter,
    /// Bodies over the limit.
    pub(super) too_large: IntCounter,
    /// Salts written into requests.
    pub(super) salted: IntCounter,
    /// Bodies written with a salt that carries their worker's weights.
    pub(super) weight_salted: IntCounter,
    overhead: Histogram,
}

/// What was claimed, and what became of it: as many claims end, each with one outcome, as were
/// made.
#[derive(Clone, Debug)]
struct Claims {
    warm: IntCounter,
    cold: IntCounter,
    /// Tokens claimed by warm answers.
    made_by_tier: Vec<IntCounter>,
    none: Vec<IntCounter>,
    outcomes: Vec<IntCounter>,
    /// By cause, then by how the news came.
    lost: Vec<[IntCounter; 4]>,
    unaudited: Vec<IntCounter>,
    /// Tokens claimed by audited requests.
    claimed_tokens: IntCounter,
    claimed_by_tier: Vec<IntCounter>,
    /// Tokens that engines took from caches for audited requests.
    cached_tokens: IntCounter,
}

impl Claims {
    fn new(families: &Families<'_>) -> prometheus::Result<Self> {
        let made = families.by(
            "fak_claims_made_total",
            "Answers with x-fak-kv warm or cold. Each ends in fak_claims_total.",
            "kv",
        )?;
        let made_tokens = families.by(
            "fak_claims_made_tokens_total",
            "Prompt tokens in x-fak-warm-tokens, by tier.",
            "tier",
        )?;
        let none = families.by(
            "fak_claims_none_total",
            "Answers with x-fak-kv unknown, by x-fak-kv-reason.",
            "reason",
        )?;
        let outcomes = families.by(
            "fak_claims_total",
            "Claims that ended, as the engine found them; over: it contradicts the claim, and no \
             event explains that.",
            "outcome",
        )?;
        let lost = families.counters(
            "fak_claims_lost_total",
            "Claims lost in flight, by cause and by how the news of it came.",
            &["cause", "told"],
        )?;
        let lost_by = |cause: &LossCause| {
            News::WORDS.map(|told| lost.with_label_values(&[cause.as_str(), told]))
        };
        let unaudited =
            families.by("fak_claims_unaudited_total", "Claims unaudited, by cause.", "cause")?;
        let by_tier = families.by(
            "fak_claimed_tier_tokens_total",
            "Claimed by audited requests, by tier: to be held against the engines' own split.",
            "tier",
        )?;
        let of = |family: &IntCounterVec, word: &str| family.with_label_values(&[word]);
        let by_tiers = |family| Tier::ALL.iter().map(|tier| of(family, tier.as_str())).collect();
        Ok(Self {
            warm: of(&made, "warm"),
            cold: of(&made, "cold"),
            made_by_tier: by_tiers(&made_tokens),
            none: NoClaim::ALL.iter().map(|why| of(&none, why.as_str())).collect(),
            outcomes: Verdict::ALL.iter().map(|verdict| of(&outcomes, verdict.as_str())).collect(),
            lost: LossCause::ALL.iter().map(lost_by).collect(),
            unaudited: Unaudited::ALL.iter().map(|why| of(&unaudited, why.as_str())).collect(),
            claimed_tokens: families
                .counter("fak_claimed_tokens_total", "Claimed by audited requests.")?,
            claimed_by_tier: by_tiers(&by_tier),
            cached_tokens: families
                .counter("fak_cached_tokens_total", "Found in caches by audited requests.")?,
        })
    }
}

impl Metrics {
    /// Registers them.
    ///
    /// # Errors
    /// A name is taken.
    pub(super) fn new(registry: &Registry) -> prometheus::Result<Self> {
        let families = Families(registry);
        let requests = families.counters(
            "fak_requests_total",
            "Requests by how they ended.",
            &["route", "outcome"],
        )?;
        let routes = Data::ALL.iter().map(|route| route.path()).chain(["other"]);
        let of_route =
            |route| Outcome::WORDS.map(|outcome| requests.with_label_values(&[route, outcome]));
        let failures = families.by("fak_requests_failed_total", "Failures by cause.", "cause")?;
        let routed = families.by("fak_requests_routed_total", "Choices by reason.", "reason")?;
        let matching =
            families.by("fak_requests_matching_total", "Prompts by their tokens.", "outcome")?;
        let of = |family: &IntCounterVec, word: &str| family.with_label_values(&[word]);
        Ok(Self {
            requests: routes.map(of_route).collect(),
            failures: Failure::WORDS.map(|cause| of(&failures, cause)),
            routed: Reason::ALL.iter().map(|reason| of(&routed, reason.as_str())).collect(),
            matching: Matching::WORDS.map(|outcome| of(&matching, outcome)),
            claims: Claims::new(&families)?,
            reports: families.counter(
                "fak_requests_reporting_total",
                "Sent so that the engine announces what it held already.",
            )?,
            confirmed_blocks: families.counter(
                "fak_claims_confirmed_blocks_total",
                "Blocks that are believed again since the engine reported a hit.",
            )?,
            in_flight: families.gauge("fak_requests_in_flight", "Not answered to their end.")?,
            held: families.gauge("fak_requests_held", "Waiting for a worker that serves.")?,
            deferred: families.gauge(
                "fak_requests_deferred_aborts",
                "Left by clients, kept at an engine at rest.",
            )?,
            moved: families.counter("fak_requests_moved_total", "Moved to another worker.")?,
            ejected: families.counter(
                "fak_requests_ejections_total",
                "Workers kept from a route for a while, since they failed in a row there.",
            )?,
            predicted: families
                .counter("fak_requests_predicted_total", "Written down as soon to be cached.")?,
            mixed_weights: families.counter(
                "fak_requests_mixed_weights_total",
                "Answered while their worker's weights changed.",
            )?,
            mismatches: families.counter(
                "fak_requests_token_mismatches_total",
                "Prompts whose length the engine counted otherwise.",
            )?,
            too_large: families
                .counter("fak_requests_too_large_total", "Bodies over the limit.")?,
            salted: families.counter("fak_requests_salted_total", "Given a salt of fak's.")?,
            weight_salted: families.counter(
                "fak_requests_weight_salted_total",
                "Sent with a salt that carries their worker's weights.",
            )?,
            overhead: families.histogram(
                "fak_request_overhead_seconds",
                "From a request's whole body to its sending, if it did not wait for a worker.",
            )?,
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

    /// An answer's head tells this.
    pub(super) fn answered(&self, claim: &Claim) {
        let claims = &self.claims;
        match claim.kv {
            Kv::Warm => claims.warm.inc(),
            Kv::Cold => claims.cold.inc(),
            Kv::Unknown(why) => claims.none[why as usize].inc(),
        }
        for (tier, counter) in Tier::ALL.iter().zip(&claims.made_by_tier) {
            counter.inc_by(u64::from(claim.tokens.get(*tier)));
        }
    }

    /// A claim ended and cannot be audited.
    pub(super) fn unaudited(&self, why: Unaudited) {
        self.claims.unaudited[why as usize].inc();
        self.audited(Verdict::Unaudited);
    }

    /// A claim is held against what the engine reports.
    pub(super) fn claimed(&self, tokens: &PerTier<u32>, cached: u64) {
        for (tier, counter) in Tier::ALL.iter().zip(&self.claims.claimed_by_tier) {
            counter.inc_by(u64::from(tokens.get(*tier)));
            self.claims.claimed_tokens.inc_by(u64::from(tokens.get(*tier)));
        }
        self.claims.cached_tokens.inc_by(cached);
    }

    /// A claim was lost in flight.
    pub(super) fn lost(&self, cause: LossCause, news: News) {
        self.claims.lost[cause as usize][news as usize].inc();
    }

    /// A claim ended.
    pub(super) fn audited(&self, verdict: Verdict) {
        self.claims.outcomes[verdict as usize].inc();
    }

    /// A request was sent, so long after its body was there.
    pub(super) fn sent(&self, after: Duration) {
        self.overhead.observe(after.as_secs_f64());
    }
}

/// Makes families and registers them.
struct Families<'a>(&'a Registry);

impl Families<'_> {
    fn registered<T: Collector + Clone + 'static>(&self, family: T) -> prometheus::Result<T> {
        self.0.register(Box::new(family.clone()))?;
        Ok(family)
    }

    fn counters(
        &self,
        name: &str,
        help: &str,
        labels: &[&str],
    ) -> prometheus::Result<IntCounterVec> {
        self.registered(IntCounterVec::new(Opts::new(name, help), labels)?)
    }

    fn by(&self, name: &str, help: &str, label: &str) -> prometheus::Result<IntCounterVec> {
        self.counters(name, help, &[label])
    }

    fn counter(&self, name: &str, help: &str) -> prometheus::Result<IntCounter> {
        self.registered(IntCounter::new(name, help)?)
    }

    fn gauge(&self, name: &str, help: &str) -> prometheus::Result<IntGauge> {
        self.registered(IntGauge::new(name, help)?)
    }

    /// From 25 µs, below which nothing is worth telling apart, to a second.
    fn histogram(&self, name: &str, help: &str) -> prometheus::Result<Histogram> {
        let bounds =
            [25e-6, 50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 100e-3, 1.0];
        let opts = HistogramOpts::new(name, help).buckets(bounds.to_vec());
        self.registered(Histogram::with_opts(opts)?)
    }
}
