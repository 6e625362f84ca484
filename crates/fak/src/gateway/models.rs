//! `GET /v1/models`: every configured model, whether or not anybody serves it now.
//!
//! Invariant: a model that is asleep or cannot be reached is listed, with its state; what no worker
//! and no configuration names is unknown.

use std::collections::BTreeMap;

use bytes::Bytes;
use fak_kernel::Phase;
use http::Response;
use http::header::{CONTENT_TYPE, HeaderValue};
use serde_json::json;

use super::body::Body;
use crate::fleet::{Snapshot, State};

/// What a client can expect of a model. The best of its workers counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Status {
    Failed,
    Sleeping,
    Waking,
    Ready,
}

impl Status {
    fn of(state: &State) -> Self {
        match state.phase() {
            Phase::Serving if state.is_serving() => Self::Ready,
            Phase::Waking => Self::Waking,
            Phase::Paused | Phase::Sleeping => Self::Sleeping,
            Phase::Serving | Phase::Error => Self::Failed,
        }
    }

    const fn as_str(self) -> &'static str {
        match self {
            Self::Failed => "failed",
            Self::Sleeping => "sleeping",
            Self::Waking => "waking",
            Self::Ready => "ready",
        }
    }
}

/// The answer.
pub(super) fn list(snapshot: &Snapshot, configured: &[String]) -> Response<Body> {
    let mut models: BTreeMap<&str, Status> =
        configured.iter().map(|model| (model.as_str(), Status::Failed)).collect();
    for view in &snapshot.workers {
        let status = Status::of(&view.state);
        for model in view.state.models.names() {
            let best = models.entry(model).or_insert(status);
            *best = status.max(*best);
        }
    }
    let data: Vec<_> = models
        .iter()
        .map(|(id, status)| {
            let status = status.as_str();
            json!({"id": id, "object": "model", "created": 0, "owned_by": "fak", "status": status})
        })
        .collect();
    let body = json!({"object": "list", "data": data}).to_string();
    let mut response = Response::new(Body::full(Bytes::from(body)));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// Whether `model` may exist: somebody names it, or a worker has not told its models yet.
pub(super) fn may_exist(snapshot: &Snapshot, configured: &[String], model: &str) -> bool {
    configured.iter().any(|name| name == model)
        || snapshot.workers.iter().any(|v| v.state.models.is_empty() || v.state.has_model(model))
}

/// The phase of the worker of `model` that is nearest to serving.
pub(super) fn nearest(snapshot: &Snapshot, model: Option<&str>) -> Phase {
    let of_model = snapshot.workers.iter().filter(|view| serves(&view.state, model));
    let best = of_model.max_by_key(|view| Status::of(&view.state));
    best.map_or(Phase::Error, |view| match view.state.phase() {
        Phase::Serving if !view.state.is_serving() => Phase::Error,
        phase => phase,
    })
}

/// Whether a worker is one for `model`; for a request that names none, any is.
pub(super) fn serves(state: &State, model: Option<&str>) -> bool {
    model.is_none_or(|model| state.has_model(model))
}
