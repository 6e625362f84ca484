//! `GET /v1/models` and `GET /v1/models/ID`: every configured model, whether or not anybody serves
//! it now.
//!
//! Invariant: a model that is asleep or cannot be reached is listed, with its state; what no worker
//! and no configuration names is unknown; and a length that is listed fits every worker of the
//! model.

use std::collections::BTreeMap;
use std::fmt;

use bytes::Bytes;
use fak_kernel::Phase;
use http::Response;
use http::header::{CONTENT_TYPE, HeaderValue};
use percent_encoding::percent_decode_str;
use serde_json::{Value, json};

use super::body::Body;
use super::error::Problem;
use crate::engine::{Data, Model};
use crate::fleet::{Snapshot, State};

/// Characters of a model's name that are shown where it is unknown.
const ID_CHARS_MAX: usize = 256;

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

/// A model, as its workers tell of it together.
struct Card {
    status: Status,
    /// The smallest of those that its workers tell: a request may go to any of them.
    tokens_max: Option<u32>,
    /// The model that an adapter sits on; none where its workers differ.
    parent: Option<String>,
}

impl Card {
    fn of(status: Status, model: &Model) -> Self {
        let parent = model.parent.as_deref().map(str::to_owned);
        Self { status, tokens_max: model.tokens_max, parent }
    }

    fn and(&mut self, other: Self) {
        self.status = self.status.max(other.status);
        self.tokens_max = self.tokens_max.into_iter().chain(other.tokens_max).min();
        self.parent = self.parent.take().filter(|parent| Some(parent) == other.parent.as_ref());
    }

    fn to_json(&self, id: &str) -> Value {
        json!({
            "id": id,
            "object": "model",
            "created": 0,
            "owned_by": "fak",
            "parent": self.parent,
            "max_model_len": self.tokens_max,
            "status": self.status.as_str(),
        })
    }
}

/// Every model by its name.
fn cards(snapshot: &Snapshot, configured: &[String]) -> BTreeMap<String, Card> {
    let mut cards = BTreeMap::<String, Card>::new();
    for view in &snapshot.workers {
        let status = Status::of(&view.state);
        for model in view.state.models.iter() {
            let card = Card::of(status, model);
            match cards.get_mut(&*model.id) {
                Some(known) => known.and(card),
                None => drop(cards.insert(model.id.to_string(), card)),
            }
        }
    }
    for model in configured {
        let nobody = || Card { status: Status::Failed, tokens_max: None, parent: None };
        cards.entry(model.clone()).or_insert_with(nobody);
    }
    cards
}

/// The answer to `path`, which is of this route.
pub(super) fn answer(
    snapshot: &Snapshot,
    configured: &[String],
    path: &str,
) -> Result<Response<Body>, Problem> {
    let cards = cards(snapshot, configured);
    let body = match named(path) {
        None => {
            let data: Vec<_> = cards.iter().map(|(id, card)| card.to_json(id)).collect();
            json!({ "object": "list", "data": data })
        }
        Some(id) => match cards.get(&id) {
            Some(card) => card.to_json(&id),
            None => return Err(Problem::Model(id.chars().take(ID_CHARS_MAX).collect())),
        },
    };
    let mut response = Response::new(Body::full(Bytes::from(body.to_string())));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    Ok(response)
}

/// Whether `path` asks for one model. Its name may hold slashes, escaped or not: clients differ.
pub(super) fn is_of_one(path: &str) -> bool {
    named(path).is_some()
}

/// The model that `path` asks for.
fn named(path: &str) -> Option<String> {
    let id = path.strip_prefix(Data::Models.path())?.strip_prefix('/')?;
    let id = percent_decode_str(id).decode_utf8_lossy().into_owned();
    Some(id).filter(|id| !id.is_empty())
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
