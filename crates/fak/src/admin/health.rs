//! Is fak alive, and can it serve?
//!
//! Invariant: alive says nothing of the workers; ready says that every model that is known has a
//! worker that serves it. A ledger that takes no rows is shown and does not end readiness: requests
//! are served without it, actions are not. So are event streams that do not come: requests are
//! served, and nothing is claimed.

use std::collections::BTreeMap;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use fak_kernel::Phase;
use http::StatusCode;
use serde_json::json;

use super::AdminState;
use crate::fleet::{Snapshot, View};

pub(super) async fn alive() -> Json<serde_json::Value> {
    Json(json!({ "status": "alive" }))
}

pub(super) async fn ready(State(state): State<AdminState>) -> Response {
    let fleet = state.fleet.snapshot();
    let serving = serving(&fleet);
    let mut reasons = reasons(&fleet, &serving);
    if state.stop.is_requested() {
        reasons.push("fak is stopping: send new requests elsewhere".to_owned());
    }
    let is_ready = reasons.is_empty();
    let status = if is_ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let trouble = state.store.trouble();
    let ledger = json!({ "writable": trouble.is_none(), "reason": trouble });
    let warnings = warnings(&fleet);
    let body = json!({
        "ready": is_ready, "models": serving, "reasons": reasons, "ledger": ledger,
        "warnings": warnings,
        "resting": resting(&fleet),
        "event_streams": faults(&fleet),
    });
    (status, Json(body)).into_response()
}

/// What an operator has to mend of workers whether they serve or not.
fn warnings(fleet: &Snapshot) -> Vec<String> {
    let of = |view: &View| Some(format!("{}: {}", view.worker.id, view.state.warning()?));
    fleet.workers.iter().filter_map(of).collect()
}

/// The workers that take no requests, whether another serves their models or not: each with why,
/// and what would help.
fn resting(fleet: &Snapshot) -> Vec<String> {
    fleet.workers.iter().filter(|view| !view.state.is_serving()).map(say).collect()
}

/// Each model, and how many workers serve it now.
fn serving(fleet: &Snapshot) -> BTreeMap<&str, usize> {
    let mut serving = BTreeMap::new();
    for view in &fleet.workers {
        for model in view.state.models.names() {
            *serving.entry(&**model).or_default() += usize::from(view.state.is_serving());
        }
    }
    serving
}

/// The ranks of whose caches nothing is claimed, since their events do not come.
fn faults(fleet: &Snapshot) -> Vec<serde_json::Value> {
    let ranks = |view: &View| {
        let worker = view.worker.id.to_string();
        let faults = view.state.streams.iter().filter_map(|stream| {
            let (rank, reason) = (stream.rank, stream.fault()?);
            Some(json!({ "worker": worker, "rank": rank, "reason": reason }))
        });
        faults.collect::<Vec<_>>()
    };
    fleet.workers.iter().flat_map(ranks).collect()
}

fn reasons(fleet: &Snapshot, serving: &BTreeMap<&str, usize>) -> Vec<String> {
    if serving.is_empty() {
        let nobody = ["no worker is configured".to_owned()];
        let workers = fleet.workers.iter().map(|view| format!("no model is known: {}", say(view)));
        return if fleet.workers.is_empty() { nobody.into() } else { workers.collect() };
    }
    let unserved = serving.iter().filter(|(_, count)| **count == 0);
    unserved
        .map(|(model, _)| {
            let has_it = fleet.workers.iter().filter(|view| view.state.has_model(model));
            let workers: Vec<_> = has_it.map(say).collect();
            format!("no worker serves {model}: {}", workers.join(", "))
        })
        .collect()
}

fn say(view: &View) -> String {
    let id = &view.worker.id;
    let is = match view.state.is_reachable {
        true => match view.state.phase() {
            Phase::Serving => format!("{id} takes no requests"),
            phase => format!("{id} is {phase}"),
        },
        false => format!("{id} at {}", super::workers::url(view)),
    };
    match view.why() {
        Some(why) => format!("{is}: {why}"),
        None => is,
    }
}
