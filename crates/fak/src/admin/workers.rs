//! Workers: what they are doing, and actions on them.
//!
//! Invariant: 200 means that what was asked was done and seen; what was refused and what failed are
//! told apart, and both carry their row.

use std::collections::HashMap;
use std::sync::Arc;

use axum::Json;
use axum::body::Bytes;
use axum::extract::{Path, RawQuery, State};
use fak_kernel::Tier;
use fak_kernel::rank::Trust;
use http::StatusCode;
use serde_json::{Map, Value, json};

use super::error::Error;
use super::options::{self, Fields, Verb, no_query_of};
use super::{AdminState, json, refusal};
use crate::engine::Data;
use crate::fleet::{self, View};
use crate::lifecycle::Ending;
use crate::sessions::Load;
use crate::store::Row;

/// Ends what waits for requests to end. It is no action, and the row is of the one that it ends.
const CANCEL: &str = "cancel";

pub(super) async fn list(State(state): State<AdminState>) -> Json<Vec<json::Worker>> {
    let loads = state.sessions.by_worker();
    let fleet = state.fleet.snapshot();
    Json(fleet.workers.iter().map(|view| describe(&state, view, &loads)).collect())
}

pub(super) async fn status(
    State(state): State<AdminState>,
    Path(id): Path<String>,
) -> Result<Json<json::Worker>, Error> {
    let fleet = state.fleet.snapshot();
    let view = fleet.get(&id).ok_or_else(|| unknown(&id))?;
    Ok(Json(describe(&state, view, &state.sessions.by_worker())))
}

pub(super) async fn act(
    State(state): State<AdminState>,
    Path((id, action)): Path<(String, String)>,
    RawQuery(query): RawQuery,
    body: Bytes,
) -> Result<Json<Row>, Error> {
    if action == CANCEL {
        no_query_of(CANCEL, query.as_deref(), &[])?;
        Fields::read(CANCEL, &body, &[])?;
        return Ok(Json(state.lifecycle.cancel(&id).await?));
    }
    let verb = Verb::parse(&action)?;
    if verb == Verb::Quarantine {
        return Err(Error::new(
            StatusCode::NOT_FOUND,
            "unknown_action",
            "a session is quarantined, not a worker; reset drops the worker's cache",
        ));
    }
    options::no_query(verb, query.as_deref())?;
    let asked = options::read(verb, &body, None)?;
    let row = state.lifecycle.act(&id, asked.request).await?;
    state.sessions.apply(&row);
    answer(row)
}

pub(super) fn unknown(id: &str) -> Error {
    Error::unknown("unknown_worker", "worker", id)
}

/// The answer to an action: its row, or an error that carries it.
pub(super) fn answer(row: Row) -> Result<Json<Row>, Error> {
    let said = |what: &str| format!("{} on {}: {what}: {}", row.action, row.worker, row.reason);
    match Ending::of(&row) {
        Ending::Done => Ok(Json(row)),
        Ending::Refused => {
            let message = refusal::with_way_out(said("nothing changed"), &row);
            Err(Error::undone(Ending::Refused, &row.reason, message).with("row", &row))
        }
        Ending::Failed => {
            let message =
                refusal::with_way_on(said("not proven to be done"), &row.reason, Some(&row));
            Err(Error::undone(Ending::Failed, &row.reason, message).with("row", &row))
        }
    }
}

fn describe(state: &AdminState, view: &View, loads: &HashMap<Arc<str>, Load>) -> json::Worker {
    let View { worker, state: now } = view;
    let load = loads.get(&worker.id).copied().unwrap_or_default();
    let owned = |text: &Option<Arc<str>>| text.as_deref().map(str::to_owned);
    json::Worker {
        id: worker.id.to_string(),
        url: url(view),
        models: now.models.names().map(ToString::to_string).collect(),
        phase: now.phase().to_string(),
        serving: now.is_serving(),
        streams: now.streams.iter().map(stream).collect(),
        recovering: now.is_recovering,
        state: now.beliefs().to_owned(),
        warning: now.warning(),
        tiers: tiers(state, now),
        sessions: load.sessions as u64,
        in_flight: worker.door.in_flight() as u64,
        weight_version: owned(&now.weight_version),
        held_by: owned(&now.held_by),
        busy: now.busy.as_ref().map(|busy| busy.json(worker.door.in_flight())),
        why: view.why(),
        last_witness: now.last_witness,
        claims_withheld: claims_withheld(state, &worker.id),
        claims_lapse: now.rests_on_markers(),
        reachable: now.is_reachable,
        progressing: now.is_progressing,
        incarnation: owned(&now.incarnation),
        version: owned(&now.version),
        kv_identity: now.kv_identity.as_deref().cloned(),
        sessions_active: load.active as u64,
        claimed_tokens: load.claimed_tokens,
        cached_tokens: load.cached_tokens,
    }
}

fn claims_withheld(state: &AdminState, worker: &str) -> Option<String> {
    let now = std::time::Instant::now();
    let withheld = state.fleet.credit(worker)?.withheld(now)?;
    let fleet::Withheld { unaudited, lost, of, .. } = withheld;
    let seconds = withheld.left(now).as_secs();
    Some(format!(
        "of the last {of} claims {unaudited} were not audited and {lost} were lost in flight: \
         nothing is claimed for {seconds} s more"
    ))
}

fn stream(of: &fleet::Stream) -> json::Stream {
    json::Stream {
        rank: of.rank,
        state: of.trust.to_string(),
        last_seq: of.last_seq,
        blind: of.is_blind,
        dead: of.is_dead,
        last_event_age_ms: of
            .last_event_age()
            .map(|age| u64::try_from(age.as_millis()).unwrap_or(u64::MAX)),
    }
}

/// Where the engine is, without `/v1`.
pub(super) fn url(view: &View) -> String {
    let url = view.worker.engine.endpoints().data(Data::Models).uri().to_string();
    url.strip_suffix(Data::Models.path()).unwrap_or(&url).to_owned()
}

/// The worker's tiers, with the blocks that are proven there over all its ranks.
fn tiers(state: &AdminState, now: &fleet::State) -> Map<String, Value> {
    let heard: Vec<_> = now.ranks.iter().filter(|rank| rank.trust != Trust::LoadOnly).collect();
    let stats: Vec<_> = heard.iter().map(|rank| state.index.stats(rank.id)).collect();
    let blocks = |tier: Tier| {
        let counted = stats.iter().filter(|stats| !stats.is_suspended);
        counted.map(|s| s.blocks.get(tier).saturating_sub(s.pending.get(tier))).sum::<usize>()
    };
    let shown = |tier: Tier| if stats.is_empty() { Value::Null } else { json!(blocks(tier)) };
    let tiers = now.tiers().iter();
    tiers.map(|tier| (tier.to_string(), json!({ "blocks": shown(tier) }))).collect()
}
