//! `GET /v1/models` and `GET /v1/models/ID`: every configured model, whether or not anybody serves
//! it now.
//!
//! Invariant: a model that is asleep or cannot be reached is listed, with its state; workers come
//! in the order of the settings and each one's models in its own, so that an engine's base stands
//! before its adapters; what no worker and no configuration names is unknown; and a length that is
//! listed fits every worker of the model.

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use fak_kernel::Phase;
use http::Response;
use http::header::{CONTENT_TYPE, HeaderValue};
use percent_encoding::percent_decode_str;
use serde_json::{Value, json};

use super::body::Body;
use super::error::Problem;
use crate::engine::{Data, Model};
use crate::fleet::{Snapshot, State, View};

/// Characters of a model's name that are shown where it is unknown.
const ID_CHARS_MAX: usize = 256;
/// Names that are told where the one that was asked for is unknown, or none was.
const NAMES_MAX: usize = 20;

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
    /// What its workers tell alike; its length is the smallest of theirs, since a request may go to
    /// any of them.
    model: Model,
    status: Status,
}

impl Card {
    fn and(&mut self, status: Status, other: &Model) {
        self.status = self.status.max(status);
        let model = &mut self.model;
        model.tokens_max = model.tokens_max.into_iter().chain(other.tokens_max).min();
        model.parent = model.parent.take().filter(|parent| Some(parent) == other.parent.as_ref());
        model.root = model.root.take().filter(|root| Some(root) == other.root.as_ref());
    }

    /// As vLLM writes a card, `created` too: it is the time of the answer (0.32.0, source).
    fn to_json(&self, now: u64) -> Value {
        let model = &self.model;
        json!({
            "id": &*model.id,
            "object": "model",
            "created": now,
            "owned_by": "vllm",
            "root": model.root.as_deref(),
            "parent": model.parent.as_deref(),
            "max_model_len": model.tokens_max,
            "permission": [],
            "status": self.status.as_str(),
        })
    }
}

/// Every model once.
fn cards(snapshot: &Snapshot, configured: &[String]) -> Vec<Card> {
    let mut cards = Vec::<Card>::new();
    let mut places = HashMap::new();
    for view in &snapshot.workers {
        let status = Status::of(&view.state);
        for model in view.state.models.iter() {
            match places.get(&model.id) {
                Some(place) => Card::and(&mut cards[*place], status, model),
                None => {
                    places.insert(model.id.clone(), cards.len());
                    cards.push(Card { model: model.clone(), status });
                }
            }
        }
    }
    let unserved = configured.iter().filter(|name| !places.contains_key(name.as_str()));
    let nobody = |name: &String| Card { model: Model::base(name), status: Status::Failed };
    cards.extend(unserved.map(nobody));
    cards
}

/// Some of the names, for who named none or a wrong one.
pub(super) fn names(snapshot: &Snapshot, configured: &[String]) -> String {
    let cards = cards(snapshot, configured);
    let shown: Vec<_> = cards.iter().take(NAMES_MAX).map(|card| &*card.model.id).collect();
    let more = cards.len().saturating_sub(NAMES_MAX);
    match (shown.is_empty(), more) {
        (true, _) => "none yet".to_owned(),
        (false, 0) => shown.join(", "),
        (false, more) => format!("{} and {more} more", shown.join(", ")),
    }
}

/// Whether workers serve more than one base model, so that a request has to name one.
pub(super) fn has_several(snapshot: &Snapshot) -> bool {
    let base = |view: &View| {
        let name = view.state.models.base()?.clone();
        let root = view.state.models.iter().find(|model| model.id == name)?.root.clone();
        Some(root.unwrap_or(name))
    };
    snapshot.workers.iter().filter_map(base).collect::<BTreeSet<_>>().len() > 1
}

/// The answer to `path`, which is of this route.
pub(super) fn answer(
    snapshot: &Snapshot,
    configured: &[String],
    path: &str,
) -> Result<Response<Body>, Problem> {
    let cards = cards(snapshot, configured);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let body = match named(path) {
        None => {
            let data: Vec<_> = cards.iter().map(|card| card.to_json(now)).collect();
            json!({ "object": "list", "data": data })
        }
        Some(id) => match cards.iter().find(|card| *card.model.id == *id) {
            Some(card) => card.to_json(now),
            None => return Err(unknown(snapshot, configured, &id)),
        },
    };
    let mut response = Response::new(Body::full(Bytes::from(body.to_string())));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    Ok(response)
}

/// That nobody serves a model of this name.
pub(super) fn unknown(snapshot: &Snapshot, configured: &[String], model: &str) -> Problem {
    let model = model.chars().take(ID_CHARS_MAX).collect();
    Problem::Model { model, known: names(snapshot, configured) }
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
