//! `GET /v1/models`: every configured model, whether or not anybody serves it now.
//!
//! Invariant: a model that is asleep or cannot be reached is listed, with its state; what no worker
//! and no configuration names is unknown.

use std::collections::BTreeMap;
use std::fmt;

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
            Phase::Serving if state.is_kept() => Self::Sleeping,
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

/// The worker that is nearest to serving a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nearest {
    /// What it is doing.
    pub phase: Phase,
    /// What else keeps requests out, and what would help.
    pub why: Option<String>,
}

impl fmt::Display for Nearest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "in phase {}", self.phase)?;
        self.why.as_ref().map_or(Ok(()), |why| write!(f, ": {why}"))
    }
}

/// The worker of `model` that is nearest to serving.
pub(super) fn nearest(snapshot: &Snapshot, model: Option<&str>) -> Nearest {
    let of_model = snapshot.workers.iter().filter(|view| serves(&view.state, model));
    let best = of_model.max_by_key(|view| Status::of(&view.state));
    best.map_or(Nearest { phase: Phase::Error, why: None }, |view| {
        let state = &view.state;
        // One that would serve and does not is not well, unless somebody keeps it.
        let is_well = state.is_serving() || state.is_kept();
        let phase = match state.phase() {
            Phase::Serving if !is_well => Phase::Error,
            phase => phase,
        };
        Nearest { phase, why: view.why() }
    })
}

/// Whether a worker is one for `model`; for a request that names none, any is.
pub(super) fn serves(state: &State, model: Option<&str>) -> bool {
    model.is_none_or(|model| state.has_model(model))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::engine::{Client, Endpoints, Engine, Timeouts};
    use crate::fleet::{Busy, Door, Fleet, Stage, Worker};
    use crate::gateway::Problem;
    use fak_kernel::Action;
    use fak_kernel::witness::Standing;

    fn told(change: impl FnOnce(&mut State)) -> String {
        let client = Client::new(None, Timeouts::default()).expect("no key");
        let endpoints = Endpoints::new("http://gpu-0:8000").expect("a base");
        let engine = Engine::new(client, endpoints);
        let fleet = Fleet::new([Worker { id: "w0".into(), engine, door: Door::new() }]);
        fleet.update("w0", |state| {
            (state.standing, state.is_reachable) = (Standing::SERVING, true);
            change(state);
        });
        let nearest = nearest(&fleet.snapshot(), None);
        Problem::NobodyServes { nearest, retry_after: Duration::ZERO }.to_string()
    }

    #[test]
    fn a_request_is_told_who_keeps_the_worker_that_is_nearest_to_serving() {
        let held = told(|state| state.held_by = Some("t7".into()));
        assert!(held.contains("in phase serving: held by t7 until fak rollout end"), "{held}");
        let busy = told(|state| {
            state.busy = Some(Busy {
                action: Action::Reset,
                level: None,
                since: "then".into(),
                holder: None,
                session: Some("a-tenants".into()),
                stage: Stage::Runs,
            });
        });
        assert!(busy.contains("in phase serving: busy with reset since then"), "{busy}");
        assert!(!busy.contains("a-tenants"), "{busy}");
        let lost = told(|state| state.is_reachable = false);
        assert!(lost.ends_with("in phase error"), "{lost}");
    }
}
