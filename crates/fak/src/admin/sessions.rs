//! Sessions: whose they are, and actions on the worker behind one.
//!
//! Invariant: nobody's worker or cache is taken away through another's session, unless that is
//! forced.

use axum::Json;
use axum::body::Bytes;
use axum::extract::{Path, Query, RawQuery, State};
use fak_kernel::witness::{Move, Quarantine};
use http::StatusCode;
use serde_json::{Value, json};

use super::error::Error;
use super::options::{self, Verb};
use super::workers::answer;
use super::{AdminState, json};
use crate::fleet::Snapshot;
use crate::sessions::View;
use crate::store::Row;

/// Sessions in one answer.
const LIST_MAX: usize = 10_000;
/// Sessions in the way that are named; the rest are counted.
const NAMED_MAX: usize = 100;

pub(super) async fn list(
    State(state): State<AdminState>,
    Query(query): Query<Vec<(String, String)>>,
) -> Result<Json<Vec<json::Session>>, Error> {
    let mut limit = LIST_MAX;
    let mut worker = None;
    for (name, value) in query {
        match name.as_str() {
            "worker" => worker = Some(value),
            "limit" => {
                let asked =
                    value.parse().map_err(|_| Error::filter("limit", &value, "a number"))?;
                limit = LIST_MAX.min(asked);
            }
            _ => {
                let message = format!("`{name}` is no filter; there are worker and limit");
                return Err(Error::bad("unknown_option", name, message));
            }
        }
    }
    let fleet = state.fleet.snapshot();
    let is_wanted = |view: &View| worker.is_none() || view.worker.as_deref() == worker.as_deref();
    let sessions = state.sessions.list(usize::MAX).into_iter().filter(is_wanted).take(limit);
    Ok(Json(sessions.map(|view| describe(&fleet, &view)).collect()))
}

pub(super) async fn status(
    State(state): State<AdminState>,
    Path(id): Path<String>,
) -> Result<Json<json::Session>, Error> {
    let view = state.sessions.get(&id).ok_or_else(|| unknown(&id))?;
    Ok(Json(describe(&state.fleet.snapshot(), &view)))
}

pub(super) async fn end(
    State(state): State<AdminState>,
    Path(id): Path<String>,
) -> Result<Json<Value>, Error> {
    if state.sessions.end(&id) { Ok(Json(json!({ "ended": id }))) } else { Err(unknown(&id)) }
}

pub(super) async fn act(
    State(state): State<AdminState>,
    Path((id, action)): Path<(String, String)>,
    RawQuery(query): RawQuery,
    body: Bytes,
) -> Result<Json<Row>, Error> {
    let verb = Verb::parse(&action)?;
    options::no_query(verb, query.as_deref())?;
    let asked = options::read(verb, &body, Some(&id))?;
    let view = state.sessions.get(&id).ok_or_else(|| unknown(&id))?;
    let Some(worker) = view.worker else {
        let message = format!("no worker has served session `{id}` yet");
        return Err(Error::new(StatusCode::CONFLICT, "no_worker", message));
    };
    let isolates = asked.request.mv == Move::Quarantine(Quarantine::Isolate);
    if verb.takes_away() && !isolates && !asked.force {
        not_in_the_way(&state, &worker, &id)?;
    }
    if isolates && !state.sessions.isolate(&id).await? {
        return Err(unknown(&id));
    }
    let row = state.lifecycle.act(&worker, asked.request).await?;
    state.sessions.apply(&row);
    answer(row)
}

fn not_in_the_way(state: &AdminState, worker: &str, id: &str) -> Result<(), Error> {
    let others = state.sessions.active_on(worker, id);
    if others.is_empty() {
        return Ok(());
    }
    let message = format!(
        "{} other sessions are active on {worker}, as each is for a while after its last request: \
         force (--force) acts on all of them; or act on the worker itself (fak worker)",
        others.len()
    );
    let named: Vec<_> = others.iter().take(NAMED_MAX).map(|id| &**id).collect();
    Err(Error::new(StatusCode::CONFLICT, "sessions_active", message)
        .with("sessions", named)
        .with("sessions_total", others.len()))
}

fn unknown(id: &str) -> Error {
    Error::unknown("unknown_session", "session", id)
}

fn describe(fleet: &Snapshot, view: &View) -> json::Session {
    let worker = view.worker.as_deref().and_then(|id| fleet.get(id));
    json::Session {
        id: view.id.to_string(),
        worker: view.worker.as_deref().map(str::to_owned),
        run: if view.dormancy.is_some() { "dormant" } else { "active" }.to_owned(),
        phase: worker.map(|worker| worker.state.phase().to_string()),
        serving: worker.is_some_and(|worker| worker.state.is_serving()),
        claimed_tokens: view.claimed_tokens,
        cached_tokens: view.cached_tokens,
        last_witness: view.last_witness,
        reason: view.dormancy.map(|dormancy| dormancy.action.to_string()),
        dormant_since: view.dormancy.and_then(|dormancy| dormancy.witness),
        warm: view.is_warm,
        isolated: view.is_isolated,
        created_at: view.created_at,
        last_seen_at: view.last_seen_at,
    }
}
