//! What a request holds while it runs, and how its end is told.
//!
//! Invariant: every request ends exactly once: by what became of its answer, or, where that is
//! dropped before, as cancelled by its client; whatever it held is given back by then, and a claim
//! that its client was told goes to the audit, however the answer ended.

use std::sync::Arc;

use fak_wire::openai::{CachedTokens, Usage};
use http::HeaderValue;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;

use super::audit::{Audit, Audits};
use super::choosing::OnRank;
use super::metrics::{Failure, Metrics, Outcome};
use super::predicted::{Chunks, Predicted};
use super::weights::Dispatched;
use crate::engine::Data;
use crate::fleet::Inside;

/// A request that has not ended.
#[derive(Debug)]
pub(super) struct Ticket {
    metrics: Arc<Metrics>,
    route: Option<Data>,
    request_id: HeaderValue,
    began: Instant,
    has_ended: bool,
    /// Held while released requests run side by side.
    pub(super) released: Option<OwnedSemaphorePermit>,
    /// On which worker it is.
    pub(super) aboard: Option<Aboard>,
}

/// A request on a worker. Dropping it leaves the worker.
pub(super) struct Aboard {
    pub(super) worker: Arc<str>,
    pub(super) inside: Inside,
    pub(super) _on_rank: Option<OnRank>,
    /// The data-parallel rank that the request is sent to by name.
    pub(super) pinned: Option<u32>,
    pub(super) audit: Option<(Audits, Audit)>,
    pub(super) prediction: Option<(Arc<Predicted>, Chunks, usize)>,
    pub(super) weights: Dispatched,
}

impl std::fmt::Debug for Aboard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Aboard").field("worker", &self.worker).finish_non_exhaustive()
    }
}

impl Aboard {
    /// The request failed here: what it was to leave in the cache does not come.
    pub(super) fn failed(&mut self) {
        if let Some((predicted, chunks, worker)) = self.prediction.take() {
            predicted.remove(&chunks, worker);
        }
    }
}

impl Ticket {
    pub(super) fn new(
        metrics: &Arc<Metrics>,
        route: Option<Data>,
        request_id: HeaderValue,
    ) -> Self {
        metrics.in_flight.inc();
        Self {
            metrics: Arc::clone(metrics),
            route,
            request_id,
            began: Instant::now(),
            has_ended: false,
            released: None,
            aboard: None,
        }
    }

    /// What fak had aborted vLLM ends on some routes as if it were complete: a response with
    /// `completed`, a message without a reason (0.32.0, observed).
    fn as_ordered(&self, outcome: Outcome) -> Outcome {
        let is_untold = matches!(self.route, Some(Data::Responses | Data::Messages));
        let is_aborted = self.aboard.as_ref().is_some_and(|aboard| aboard.inside.was_aborted());
        match outcome {
            Outcome::Ok if is_untold && is_aborted => Outcome::Failed(Failure::Aborted),
            outcome => outcome,
        }
    }

    /// The line of the access log.
    fn log(&self, outcome: Outcome, usage: Option<Usage>) {
        let worker = self.aboard.as_ref().map(|aboard| &*aboard.worker);
        tracing::info!(
            target: "fak::access",
            request_id = self.request_id.to_str().unwrap_or_default(),
            route = self.route.map_or("other", Data::path),
            outcome = outcome.as_str(),
            worker,
            ms = self.began.elapsed().as_millis() as u64,
            prompt_tokens = usage.map(|usage| usage.prompt_tokens),
            cached_tokens = usage.and_then(cached),
            "request"
        );
    }

    /// What goes before a stream's end marker, where it is of several weights.
    pub(super) fn comment(&mut self) -> Option<String> {
        self.aboard.as_mut()?.weights.comment()
    }

    /// The request has ended; what comes after is not told.
    pub(super) fn end(&mut self, outcome: Outcome, usage: Option<Usage>) {
        if std::mem::replace(&mut self.has_ended, true) {
            return;
        }
        let outcome = self.as_ordered(outcome);
        self.metrics.in_flight.dec();
        self.metrics.ended(self.route, outcome);
        self.released = None;
        self.log(outcome, usage);
        let Some(mut aboard) = self.aboard.take() else { return };
        if let Some(now) = aboard.weights.settled() {
            self.metrics.mixed_weights.inc();
            let (id, worker) = (self.request_id.to_str().unwrap_or_default(), &aboard.worker);
            let then = aboard.weights.at_dispatch();
            tracing::info!(request_id = id, %worker, ?then, ?now, "an answer is of mixed weights");
        }
        if let Outcome::Failed(failure) = outcome {
            aboard.failed();
            let (id, worker) = (self.request_id.to_str().unwrap_or_default(), &aboard.worker);
            tracing::warn!(request_id = id, %worker, cause = failure.as_str(), "a request failed");
        }
        if let Some((audits, audit)) = aboard.audit.take() {
            audits.take(audit, outcome, usage);
        }
    }
}

fn cached(usage: Usage) -> Option<u64> {
    match usage.cached_tokens {
        CachedTokens::Known(count) => Some(count),
        CachedTokens::NotReported => None,
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.end(Outcome::Cancelled, None);
    }
}
