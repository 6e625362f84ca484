//! Rollouts that time-share a device: the fleet sleeps for a trainer, and comes back with weights
//! that the trainer answers for.
//!
//! Invariant: 200 means that every worker that was meant is done; anything less names each worker's
//! outcome, and 409 means that the others are as they were. An end acts on no worker that its
//! holder does not hold.

use std::sync::Arc;

use axum::Json;
use axum::body::Bytes;
use axum::extract::{RawQuery, State};
use axum::response::{IntoResponse as _, Response};
use fak_kernel::Phase;
use fak_kernel::witness::{Level, Mode, Reason, Refusal, Weights};
use futures_util::future::join_all;
use http::StatusCode;
use serde_json::{Value, json};

use super::AdminState;
use super::error::Error;
use super::options::{Fields, no_query_of};
use super::refusal;
use crate::lifecycle::{self, Begin, Begun, Canary, DRAIN, End, Ended, Ending};
use crate::store::Row;

/// Who holds a worker, where nobody says.
const HOLDER: &str = "rollout";
/// Bytes of a holder's name, and of a weight version.
const NAME_BYTES_MAX: usize = 256;

/// Another proof of weights than a load that fak was not there to see.
const CANARY_PROVES: &str = "; or, as the rollout began with a canary, end it with weights same \
    (--weights same) once they are loaded: its answers are compared";
/// Workers that a message names.
const NAMED_MAX: usize = 16;

const BEGIN: &[&str] =
    &["workers", "level", "mode", "keep_tier", "allow_evict", "drain_ms", "holder", "canary"];
const END: &[&str] = &["workers", "holder", "weights", "weight_version", "stage", "canary"];

/// Who holds what.
pub(super) async fn list(State(state): State<AdminState>) -> Result<Json<Value>, Error> {
    let holds = state.store.hold_list().await?;
    let told = holds
        .iter()
        .map(|hold| json!({ "worker": hold.worker, "holder": hold.holder, "since": hold.since }));
    Ok(Json(json!({ "holds": told.collect::<Vec<_>>() })))
}

pub(super) async fn begin(
    State(state): State<AdminState>,
    RawQuery(query): RawQuery,
    body: Bytes,
) -> Result<Response, Error> {
    no_query_of("rollout begin", query.as_deref(), BEGIN)?;
    let fields = Fields::read("rollout begin", &body, BEGIN)?;
    let begin = Begin {
        holder: holder(&fields)?,
        level: fields.level_or(Level::One)?,
        mode: fields.mode(Mode::Wait)?,
        keep_tier: fields.flag("keep_tier")?,
        allow_evict: fields.flag("allow_evict")?,
        drain: fields.drain()?.unwrap_or(DRAIN),
        canary: fields.flag("canary")?,
    };
    let workers = meant(&state, &fields)?;
    let ends = join_all(workers.iter().map(|worker| state.lifecycle.begin(worker, begin.clone())));
    let ends = ends.await.into_iter().zip(&workers).map(|(begun, worker)| {
        if let Ok(begun) = &begun {
            state.sessions.apply(&begun.row);
        }
        begun_json(worker, &begun)
    });
    Ok(answer(ends.collect()))
}

pub(super) async fn end(
    State(state): State<AdminState>,
    RawQuery(query): RawQuery,
    body: Bytes,
) -> Result<Response, Error> {
    no_query_of("rollout end", query.as_deref(), END)?;
    let fields = Fields::read("rollout end", &body, END)?;
    let is_weights_only = match fields.text("stage", NAME_BYTES_MAX)? {
        None => false,
        Some("weights") => true,
        Some(_) => return Err(fields.wrong("stage", "weights, or absent")),
    };
    let end = End {
        holder: holder(&fields)?,
        weights: fields.word_of::<Weights>("weights")?,
        version: fields.text("weight_version", NAME_BYTES_MAX)?.map(str::to_owned),
        is_weights_only,
        canary: fields.flag_of("canary")?,
    };
    let workers = held(&state, &fields, &end).await?;
    let ends = join_all(workers.iter().map(|worker| state.lifecycle.end(worker, end.clone())));
    let ends = ends.await.into_iter().zip(&workers).map(|(ended, worker)| {
        if let Ok(ended) = &ended {
            ended.rows.iter().for_each(|row| state.sessions.apply(row));
        }
        ended_json(worker, &ended)
    });
    Ok(answer(ends.collect()))
}

fn holder(fields: &Fields) -> Result<String, Error> {
    Ok(fields.text("holder", NAME_BYTES_MAX)?.unwrap_or(HOLDER).to_owned())
}

/// The workers that are meant: each of those named, or all.
fn meant(state: &AdminState, fields: &Fields) -> Result<Vec<Arc<str>>, Error> {
    let fleet = state.fleet.snapshot();
    let Some(named) = fields.texts("workers")? else {
        return Ok(fleet.workers.iter().map(|view| Arc::clone(&view.worker.id)).collect());
    };
    let mut meant: Vec<Arc<str>> = Vec::with_capacity(named.len());
    for name in named {
        let view = fleet.get(name).ok_or_else(|| super::workers::unknown(name))?;
        if !meant.contains(&view.worker.id) {
            meant.push(Arc::clone(&view.worker.id));
        }
    }
    if meant.is_empty() {
        return Err(fields.wrong("workers", "a list of workers, or absent for all"));
    }
    Ok(meant)
}

/// The workers whose hold `end` ends: each of those named, or all that its holder holds. A worker
/// that this very end let go before may be named again, so that an end can be repeated.
async fn held(state: &AdminState, fields: &Fields, end: &End) -> Result<Vec<Arc<str>>, Error> {
    let holds = state.store.hold_list().await?;
    let holder_of = |worker: &str| {
        let hold = holds.iter().find(|hold| hold.worker == worker);
        hold.map(|hold| hold.holder.as_str())
    };
    let (own, others): (Vec<_>, Vec<_>) = meant(state, fields)?
        .into_iter()
        .partition(|worker| holder_of(worker) == Some(end.holder.as_str()));
    if fields.texts("workers")?.is_none() {
        let listed = || list_of(others.iter().map(|worker| (&**worker, holder_of(worker))));
        return if own.is_empty() { Err(holds_none(&end.holder, &listed())) } else { Ok(own) };
    }
    let (mut workers, mut strangers) = (own, Vec::new());
    for worker in others {
        let is_free = holder_of(&worker).is_none();
        match is_free && end.was_done(&state.store, &worker).await? {
            true => workers.push(worker),
            false => strangers.push(worker),
        }
    }
    if strangers.is_empty() {
        return Ok(workers);
    }
    let strangers: Vec<_> = strangers.iter().map(|name| (&**name, holder_of(name))).collect();
    Err(not_held(state, &end.holder, &strangers))
}

/// `w0 (held by a), w1 (not held)`.
fn list_of<'a>(workers: impl Iterator<Item = (&'a str, Option<&'a str>)>) -> String {
    let mut named: Vec<_> = workers
        .take(NAMED_MAX + 1)
        .map(|(worker, holder)| match holder {
            Some(holder) => format!("{worker} (held by {holder})"),
            None => format!("{worker} (not held)"),
        })
        .collect();
    if named.len() > NAMED_MAX {
        named[NAMED_MAX] = "...".to_owned();
    }
    named.join(", ")
}

fn holds_none(holder: &str, workers: &str) -> Error {
    let message = format!(
        "holder `{holder}` holds no worker, so there is no rollout of it to end; the workers are \
         {workers}: give the name of the holder that holds them (holder, --holder), or act on a \
         worker that is not held by its own action (fak worker wake ID, fak worker resume ID)"
    );
    Error::new(StatusCode::CONFLICT, "refused", message)
}

/// `strangers` were named, and `holder` does not hold them.
fn not_held(state: &AdminState, holder: &str, strangers: &[(&str, Option<&str>)]) -> Error {
    let message = format!(
        "not held by `{holder}`: {}; no worker was changed: name only workers that it holds (fak \
         rollout ls), or none to end all of its holds",
        list_of(strangers.iter().copied())
    );
    let fleet = state.fleet.snapshot();
    let told: Vec<_> = strangers
        .iter()
        .map(|(worker, held_by)| {
            let (reason, why) = match held_by {
                Some(other) => (Refusal::Held, format!("not held by {holder}, but by {other}")),
                None => (Refusal::NotHeld, format!("not held by {holder}, nor by another holder")),
            };
            let phase = fleet.get(worker).map(|view| view.state.phase().as_str());
            let is_serving = fleet.get(worker).is_some_and(|view| view.state.is_serving());
            json!({
                "worker": worker,
                "outcome": Ending::Refused.as_str(),
                "phase": phase,
                "serving": is_serving,
                "canary": Canary::NotRun.as_str(),
                "held_by": held_by,
                "reason": reason.as_str(),
                "rows": [],
                "error": why,
            })
        })
        .collect();
    Error::new(StatusCode::CONFLICT, "refused", message).with("done", false).with("workers", told)
}

fn begun_json(worker: &str, begun: &Result<Begun, lifecycle::Error>) -> (Ending, Value) {
    let begun = match begun {
        Ok(begun) => begun,
        Err(error) => return (Ending::Failed, lost(worker, error)),
    };
    let told = json!({
        "worker": worker,
        "outcome": begun.ending.as_str(),
        "phase": begun.phase.as_str(),
        "gpu_free": begun.ending == Ending::Done && begun.phase == Phase::Sleeping,
        "running": begun.running,
        "held_by": begun.held_by.as_deref(),
        "reason": begun.reason,
        "row": begun.row,
        "error": text(begun.ending, &begun.reason, Some(&begun.row), begun.held_by.as_deref()),
    });
    (begun.ending, told)
}

fn ended_json(worker: &str, ended: &Result<Ended, lifecycle::Error>) -> (Ending, Value) {
    let ended = match ended {
        Ok(ended) => ended,
        Err(error) => return (Ending::Failed, lost(worker, error)),
    };
    let error = text(ended.ending, &ended.reason, ended.rows.last(), ended.held_by.as_deref());
    let waits = ended.reason == Reason::WeightsNotProven.as_str();
    let by_canary = if ended.has_canary && waits { CANARY_PROVES } else { "" };
    let error = error.map(|error| format!("{error}{by_canary}"));
    let told = json!({
        "worker": worker,
        "outcome": ended.ending.as_str(),
        "phase": ended.phase.as_str(),
        "serving": ended.is_serving,
        "canary": ended.canary.as_str(),
        "weight_version": ended.weight_version.as_deref(),
        "held_by": ended.held_by.as_deref(),
        "reason": ended.reason,
        "rows": ended.rows,
        "error": error,
    });
    (ended.ending, told)
}

/// A worker of which nothing is known: the ledger failed, or fak is stopping.
fn lost(worker: &str, error: &lifecycle::Error) -> Value {
    json!({
        "worker": worker,
        "outcome": Ending::Failed.as_str(),
        "reason": Reason::Unrecorded.as_str(),
        "error": error.to_string(),
    })
}

/// For people: why a worker is not done, and what that leaves it in.
fn text(ending: Ending, reason: &str, row: Option<&Row>, held_by: Option<&str>) -> Option<String> {
    match (ending, row, held_by) {
        (Ending::Done, ..) => None,
        (Ending::Refused, Some(row), _) => Some(refusal::with_way_out(reason.to_owned(), row)),
        (Ending::Refused, None, None) => Some("no hold is in force on it".to_owned()),
        (_, _, Some(holder)) => Some(format!(
            "{}; it takes no requests, and is held by {holder} until a rollout ends",
            undone(reason, row)
        )),
        _ => Some(undone(reason, row)),
    }
}

fn undone(reason: &str, row: Option<&Row>) -> String {
    refusal::with_way_on(format!("not proven to be done: {reason}"), reason, row)
}

fn answer(ends: Vec<(Ending, Value)>) -> Response {
    let reason = |told: &'_ Value| told["reason"].as_str().unwrap_or_default().to_owned();
    let reasons: Vec<_> = ends.iter().map(|(ending, told)| (*ending, reason(told))).collect();
    let why: Vec<_> = reasons.iter().map(|(ending, reason)| (*ending, &**reason)).collect();
    let workers: Vec<_> = ends.into_iter().map(|(_, told)| told).collect();
    match Error::partial(&why) {
        None => Json(json!({ "done": true, "workers": workers })).into_response(),
        Some(error) => error.with("done", false).with("workers", workers).into_response(),
    }
}
