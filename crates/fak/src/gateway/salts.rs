//! Which salt a request has on which worker, so that no KV of other weights matches it.
//!
//! vLLM's block hashes do not cover the weights, and cover the salt. Invariant: a request goes to a
//! worker that may hold KV of other weights only with a salt that no request had there under those
//! weights; one whose salt cannot be written, or for whose worker none is known, does not go there.
//! A request that a worker had already when its weights changed goes on with the salt that it was
//! sent with, and may reuse KV of before: its answer is [of mixed weights](super::weights).

use std::sync::Arc;

use bytes::Bytes;

use super::Shared;
use super::dispatch::Job;
use super::intake::REPORT_MODE;
use crate::engine::Data;
use crate::fleet::{State, Weights};

/// When salts carry the weights of the worker that a request is sent to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WeightsSalt {
    /// While the worker may hold KV of other weights.
    #[default]
    Off,
    /// Always, where the version is known: then KV of one version is found again when the version
    /// comes back, and nothing has to be wiped between versions.
    Version,
}

/// Whether every vLLM takes a salt in the bodies of this route.
pub(super) fn takes_salt(route: Data) -> bool {
    matches!(route, Data::ChatCompletions | Data::Completions | Data::Responses)
}

/// Whether vLLM may take a salt in the bodies of this route: of those that pool, 0.32.0 does
/// (source), and an older one that does not ignores it. They have prefixes in the cache, too.
pub(super) fn may_take_salt(route: Data) -> bool {
    takes_salt(route)
        || matches!(
            route,
            Data::Embeddings
                | Data::Score
                | Data::ScoreAtRoot
                | Data::Rerank
                | Data::RerankAtRoot
                | Data::RerankV2
                | Data::Pooling
                | Data::Classify
        )
}

/// Whether a worker may hold KV of other weights than it computes with.
fn is_stale(state: &State) -> bool {
    !state.standing.stale.is_empty()
}

/// Whether a request can be kept from KV of other weights on this worker.
pub(super) fn keeps_apart(job: &Job, state: &State) -> bool {
    !is_stale(state) || (job.fields.is_some() && state.weights() != Weights::default())
}

impl Shared {
    /// The salt of a request on a worker of this state, if it is to be sent with any.
    pub(super) fn salt(&self, job: &Job, state: &State) -> Option<Arc<str>> {
        let weights = state.weights();
        let is_due = is_stale(state) || self.config.weights_salt == WeightsSalt::Version;
        if job.fields.is_none() || !is_due || weights == Weights::default() {
            return job.salt.clone();
        }
        let version = weights.version.as_deref();
        let stamp = &self.config.stamp;
        Some(stamp.weights_salt(version, weights.epoch, job.salt.as_deref()).into())
    }

    /// The body of a request with this salt; in the mode in which the engine announces what it hit,
    /// where that is asked for.
    pub(super) fn body(&self, job: &Job, salt: Option<&Arc<str>>, reports: bool) -> Bytes {
        let is_salted = salt != job.salt.as_ref();
        let Some(fields) = job.fields.as_ref().filter(|_| is_salted || reports) else {
            return job.body.clone();
        };
        let mut fields = fields.clone();
        if is_salted {
            fields.set_cache_salt(salt.map(|salt| &**salt));
            self.metrics.weight_salted.inc();
        }
        if reports {
            fields.set_within("vllm_xargs", REPORT_MODE, &"full".into());
            self.metrics.reports.inc();
        }
        fields.to_bytes().into()
    }
}
