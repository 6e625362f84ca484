//! vLLM's own control routes, for frameworks that drive engines by them: the same parameters,
//! defaults and answers (0.32.0, observed), each a witnessed action on one worker or on all.
//!
//! Invariant: success means success on every worker that was meant; anything less names each
//! worker's outcome. A parameter that vLLM would ignore is refused.

mod query;

use std::sync::Arc;

use axum::Json;
use axum::body::Bytes;
use axum::extract::{Query, State};
use axum::response::{IntoResponse as _, Response};
use fak_kernel::witness::{Level, Move, Part, Parts, Reason, Refusal, Weights};
use fak_kernel::{Disposition, Phase};
use futures_util::future::join_all;
use http::StatusCode;
use serde_json::{Value, json};

use super::AdminState;
use super::error::Error;
use super::refusal;
use crate::fleet::View;
use crate::lifecycle::{self, Ending, Request};
use crate::store::Row;
use query::{Invalid, Parameters};

type Pairs = Query<Vec<(String, String)>>;

pub(super) async fn pause(state: State<AdminState>, query: Pairs, body: Bytes) -> Response {
    let accepted = ["mode", "clear_cache", "clear_connector_cache"];
    run(state, query, body, &accepted, |parameters| {
        let mv = Move::Pause {
            mode: parameters.mode()?,
            clear: parameters.flag("clear_cache", true)?,
            keep_tier: !parameters.flag("clear_connector_cache", true)?,
        };
        Ok((mv, json!({ "status": "paused" })))
    })
    .await
}

pub(super) async fn resume(state: State<AdminState>, query: Pairs, body: Bytes) -> Response {
    run(state, query, body, &[], |_| Ok((Move::Resume, json!({ "status": "resumed" })))).await
}

pub(super) async fn sleep(state: State<AdminState>, query: Pairs, body: Bytes) -> Response {
    run(state, query, body, &["level", "mode", "clear_connector_cache"], |parameters| {
        let level = parameters.level()?;
        let mv = Move::Sleep {
            level: Some(level),
            mode: parameters.mode()?,
            keep_tier: !parameters.flag("clear_connector_cache", true)?,
        };
        let level = if level == Level::One { 1 } else { 2 };
        Ok((mv, json!({ "status": "sleeping", "level": level })))
    })
    .await
}

pub(super) async fn wake_up(state: State<AdminState>, query: Pairs, body: Bytes) -> Response {
    run(state, query, body, &["tags"], |parameters| {
        let tags = parameters.tags()?;
        let words: Vec<_> = tags.iter().map(Part::as_str).collect();
        let told = if tags.is_empty() { Value::Null } else { json!(words) };
        // What is still asleep after a wake by tag shows in the rows.
        let answer = json!({ "status": "awake", "tags": told });
        Ok((Move::Wake { tags, weights: Weights::Unproven }, answer))
    })
    .await
}

pub(super) async fn reset_prefix_cache(
    state: State<AdminState>,
    query: Pairs,
    body: Bytes,
) -> Response {
    run(state, query, body, &["reset_running_requests", "reset_external"], |parameters| {
        let mv = Move::Reset {
            external: parameters.flag("reset_external", false)?,
            running: parameters.flag("reset_running_requests", false)?,
        };
        Ok((mv, json!({ "success": true })))
    })
    .await
}

pub(super) async fn is_paused(state: State<AdminState>, query: Pairs) -> Response {
    flag(state, query, "is_paused").await
}

/// As vLLM since 0.17.1, true of a paused engine as well.
pub(super) async fn is_sleeping(state: State<AdminState>, query: Pairs) -> Response {
    flag(state, query, "is_sleeping").await
}

/// Reads the parameters, acts on every worker meant, and answers as vLLM where all did as asked.
async fn run(
    State(state): State<AdminState>,
    Query(pairs): Pairs,
    body: Bytes,
    accepted: &[&str],
    read: impl FnOnce(&Parameters) -> Result<(Move, Value), Invalid>,
) -> Response {
    let asked = || {
        let parameters = Parameters::new(pairs, accepted)?;
        query::no_body(&body, &parameters, accepted)?;
        let (mv, answer) = read(&parameters)?;
        Ok::<_, Invalid>((mv, answer, meant(&state, parameters.worker())?))
    };
    let (mv, mut answer, workers) = match asked() {
        Ok(asked) => asked,
        Err(invalid) => return invalid.into_response(),
    };
    let acts = workers.iter().map(|worker| act(&state, worker, mv));
    let ends = join_all(acts).await;
    let why: Vec<_> = ends.iter().map(|end| (end.ending, end.reason())).collect();
    if let Some(error) = Error::partial(&why) {
        return partial(&ends, &error);
    }
    let is_partly_asleep = ends.iter().any(|end| end.phase() == Some(Phase::Waking));
    if matches!(mv, Move::Wake { .. }) && is_partly_asleep {
        answer["status"] = json!("sleeping");
    }
    Json(answer).into_response()
}

/// How an action on one worker ended.
struct End {
    worker: Arc<str>,
    ending: Ending,
    row: Result<Row, lifecycle::Error>,
}

impl End {
    fn reason(&self) -> &str {
        self.row.as_ref().map_or(Reason::Unrecorded.as_str(), |row| &row.reason)
    }

    fn phase(&self) -> Option<Phase> {
        self.row.as_ref().ok().map(|row| row.phase)
    }
}

async fn act(state: &AdminState, worker: &Arc<str>, mv: Move) -> End {
    let mv = weighed(state, worker, mv);
    let row = state.lifecycle.act(worker, Request::new(mv)).await;
    let ending = match &row {
        Err(_) => Ending::Failed,
        Ok(row) => {
            state.sessions.apply(row);
            match Ending::of(row) {
                Ending::Refused if is_as_asked(state, row, mv) => Ending::Done,
                ending => ending,
            }
        }
    };
    End { worker: Arc::clone(worker), ending, row }
}

/// `mv`, with what a wake by these routes says of the weights. Who woke their memory by name did so
/// to write into it (so verl, SkyRL and TRL do): what it goes on with are other weights, loaded by
/// their owner, and nothing that older ones computed may be found again. Memory that fak itself
/// woke, so that weights can be loaded, says nothing: the same call twice proves no more than once.
fn weighed(state: &AdminState, worker: &str, mv: Move) -> Move {
    let Move::Wake { tags, .. } = mv else { return mv };
    let fleet = state.fleet.snapshot();
    let is_loaded = fleet.get(worker).is_some_and(|view| view.state.standing.takes_weights);
    // Who names that memory once more has yet to load them.
    let is_named = tags == Parts::of(Part::Weights);
    let weights = if is_loaded && !is_named { Weights::Loaded } else { Weights::Unproven };
    Move::Wake { tags, weights }
}

/// Whether what was refused as a repeat is as if it had been done: vLLM answers repeats with
/// success, and frameworks count on it. A cache that was to be cleared counts as cleared only where
/// it was.
fn is_as_asked(state: &AdminState, row: &Row, mv: Move) -> bool {
    let fleet = state.fleet.snapshot();
    let Some(View { state: now, .. }) = fleet.get(&row.worker) else { return false };
    let refused = Refusal::parse(&row.reason);
    match mv {
        Move::Pause { clear, .. } if refused == Some(Refusal::AlreadyPaused) => {
            !clear || now.standing.since_serving.gpu == Disposition::Forgotten
        }
        Move::Sleep { level, .. } if refused == Some(Refusal::AlreadyAsleep) => {
            let seen = now.metrics.as_ref().and_then(|metrics| metrics.total().sleep);
            seen.is_some_and(|seen| match level {
                Some(Level::One) => seen.weights_offloaded && !seen.discard_all,
                Some(Level::Two) => seen.discard_all,
                None => false,
            })
        }
        Move::Resume | Move::Wake { .. } => refused == Some(Refusal::AlreadyAwake),
        _ => false,
    }
}

/// The workers that a call is meant for.
fn meant(state: &AdminState, worker: Option<&str>) -> Result<Vec<Arc<str>>, Invalid> {
    let fleet = state.fleet.snapshot();
    let all = fleet.workers.iter().map(|view| Arc::clone(&view.worker.id));
    let meant: Vec<_> = all.filter(|id| worker.is_none_or(|worker| **id == *worker)).collect();
    if meant.is_empty() {
        let message = match worker {
            Some(worker) => format!("no worker is called `{worker}`"),
            None => "no worker is configured".to_owned(),
        };
        return Err(Invalid::unknown_worker(message));
    }
    Ok(meant)
}

/// Not every worker did as asked.
fn partial(ends: &[End], error: &Error) -> Response {
    let told: Vec<Value> = ends.iter().map(tell).collect();
    let why = told.iter().filter_map(|end| end["error"].as_str());
    let message = why.fold(error.message().to_owned(), |all, why| format!("{all}; {why}"));
    let mut body = envelope(error.status(), &message, None);
    body["workers"] = told.into();
    (error.status(), Json(body)).into_response()
}

fn tell(end: &End) -> Value {
    let (row, error) = match &end.row {
        Ok(row) if end.ending == Ending::Refused => {
            (json!(row), json!(refusal::with_way_out(row.reason.clone(), row)))
        }
        Ok(row) if end.ending == Ending::Failed => {
            let message = format!("not proven to be done: {}", row.reason);
            (json!(row), json!(refusal::with_way_on(message, &row.reason, Some(row))))
        }
        Ok(row) => (json!(row), Value::Null),
        Err(error) => (Value::Null, json!(error.to_string())),
    };
    json!({
        "worker": &*end.worker,
        "outcome": end.ending.as_str(),
        "row": row,
        "error": error,
    })
}

/// What all workers meant say, after a fresh look at each.
async fn flag(State(state): State<AdminState>, Query(pairs): Pairs, name: &str) -> Response {
    let asked = Parameters::new(pairs, &[]);
    let workers = match asked.and_then(|parameters| meant(&state, parameters.worker())) {
        Ok(workers) => workers,
        Err(invalid) => return invalid.into_response(),
    };
    let looks = join_all(workers.iter().map(|worker| state.lifecycle.look(worker))).await;
    let fleet = state.fleet.snapshot();
    let phases: Vec<_> = workers
        .iter()
        .zip(looks)
        .map(|(worker, look)| {
            let now = fleet.get(worker).filter(|view| look.is_ok() && view.state.is_reachable);
            now.map_or(Phase::Error, |view| view.state.phase())
        })
        .collect();
    let is_set = |phase: &Phase| !matches!(phase, Phase::Serving);
    let is_known = !phases.contains(&Phase::Error);
    let set = phases.iter().filter(|phase| is_set(phase)).count();
    if is_known && (set == 0 || set == phases.len()) {
        return Json(json!({ name: set > 0 })).into_response();
    }
    let (status, message) = if is_known {
        (StatusCode::CONFLICT, "the workers differ: ask for one with ?worker=")
    } else {
        (StatusCode::BAD_GATEWAY, "a worker's state is not known")
    };
    let mut body = envelope(status, message, None);
    let told = workers.iter().zip(&phases);
    body["workers"] =
        told.map(|(id, phase)| json!({ "worker": &**id, "phase": phase.as_str() })).collect();
    (status, Json(body)).into_response()
}

/// vLLM's error envelope.
pub(super) fn envelope(status: StatusCode, message: &str, param: Option<&str>) -> Value {
    let (code, kind) = (status.as_u16(), status.canonical_reason().unwrap_or_default());
    json!({ "error": { "message": message, "type": kind, "param": param, "code": code } })
}
