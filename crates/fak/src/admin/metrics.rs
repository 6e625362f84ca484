//! `/metrics`: the engines' own signals under one name for every version, and fak's.
//!
//! Invariant: what an engine does not give is absent, never 0; and of each worker exactly one phase
//! reads 1.

mod engines;
mod families;

use std::collections::BTreeMap;

use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use fak_kernel::{Action, Disposition, Phase};
use http::StatusCode;
use http::header::CONTENT_TYPE;
use prometheus::proto::MetricFamily;
use prometheus::{Encoder as _, TextEncoder};
use tokio::sync::Mutex;

use super::AdminState;
use crate::events::recorder::Counts;
use crate::sessions::is_intent;
use crate::store::Store;
use families::Families;

/// Rows in one look at the ledger.
const BATCH: u32 = 500;

pub(super) async fn scrape(State(state): State<AdminState>) -> Response {
    let mut families = Families::default();
    let fleet = state.fleet.snapshot();
    for view in &fleet.workers {
        let worker = &*view.worker.id;
        for phase in Phase::ALL {
            let is_it = view.state.phase() == *phase;
            let labels = [("worker", worker), ("phase", phase.as_str())];
            families.gauge(&WORKER_PHASE, &labels, f64::from(u8::from(is_it)));
        }
        for stream in view.state.streams.iter() {
            let number = stream.rank.to_string();
            let labels = [("worker", worker), ("rank", number.as_str())];
            if let Some(age) = stream.last_event_age() {
                families.gauge(&EVENTS_AGE, &labels, age.as_secs_f64());
            }
        }
        // One that does not answer gives no signals.
        if let Some(metrics) = view.state.metrics.as_deref().filter(|_| view.state.is_reachable) {
            engines::add(&mut families, worker, &metrics.total());
        }
    }
    events(&mut families, &state);
    sessions(&mut families, &state);
    state.tally.add(&mut families, &state.store).await;
    let mut all = families.into_all();
    all.extend(state.registry.gather());
    render(&all)
}

fn render(families: &[MetricFamily]) -> Response {
    let mut text = Vec::new();
    match TextEncoder::new().encode(families, &mut text) {
        Ok(()) => ([(CONTENT_TYPE, prometheus::TEXT_FORMAT)], text).into_response(),
        Err(error) => {
            tracing::error!(%error, "the metrics cannot be written");
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}

/// A family's name and help.
struct Family(&'static str, &'static str);

const WORKER_PHASE: Family =
    Family("fak_worker_phase", "1 for the phase that the worker is in, 0 for the others.");
const EVENTS_AGE: Family = Family(
    "fak_events_last_age_seconds",
    "How long a rank's live event connection has been silent.",
);
const WITNESS_ROWS: Family = Family(
    "fak_witness_rows_total",
    "Witness rows since fak started, by action and by what happened to the KV of the gpu tier.",
);
const SESSIONS: Family =
    Family("fak_sessions", "Sessions that are known, by whether their requests are taken.");

type OfCounts = fn(&Counts) -> u64;

const EVENTS: &[(Family, OfCounts)] = &[
    (Family("fak_events_batches_total", "Batches of KV events taken in."), |c| c.batches),
    (Family("fak_events_stored_total", "Store events."), |c| c.stored),
    (Family("fak_events_removed_total", "Removal events."), |c| c.removed),
    (Family("fak_events_cleared_total", "Clear events."), |c| c.cleared),
    (Family("fak_events_stored_blocks_total", "Blocks of the store events."), |c| c.stored_blocks),
    (Family("fak_events_removed_blocks_total", "Blocks of the removal events."), |c| {
        c.removed_blocks
    }),
    (Family("fak_events_gaps_total", "Gaps in the sequence, closed later or not."), |c| c.gaps),
    (Family("fak_events_lost_batches_total", "Batches missing in those gaps."), |c| c.lost_batches),
    (Family("fak_events_bad_total", "Messages and batches that could not be read."), |c| c.bad),
];

fn events(families: &mut Families, state: &AdminState) {
    for (rank, counts) in state.recorder.counts() {
        let number = rank.rank.to_string();
        let labels = [("worker", &*rank.worker), ("rank", number.as_str())];
        for (family, count) in EVENTS {
            families.counter(family, &labels, float(count(&counts)));
        }
    }
}

fn sessions(families: &mut Families, state: &AdminState) {
    let (active, dormant) = state.sessions.counts();
    families.gauge(&SESSIONS, &[("run", "active")], float(active as u64));
    families.gauge(&SESSIONS, &[("run", "dormant")], float(dormant as u64));
}

/// Metrics are floats; a count is exact up to 2^53.
fn float(count: u64) -> f64 {
    count as f64
}

/// Rows by action and verdict, counted as scrapes come by.
#[derive(Debug)]
pub(super) struct Tally {
    counted: Mutex<Counted>,
}

#[derive(Debug)]
struct Counted {
    /// The last change of the ledger that was counted.
    after: u64,
    rows: BTreeMap<(Action, Disposition), u64>,
}

impl Tally {
    /// Counts what `store` is written from here on.
    pub(super) fn new(store: &Store) -> Self {
        let after = *store.newest().borrow();
        Self { counted: Mutex::new(Counted { after, rows: BTreeMap::new() }) }
    }

    async fn add(&self, families: &mut Families, store: &Store) {
        let mut counted = self.counted.lock().await;
        if let Err(error) = counted.follow(store).await {
            tracing::warn!(%error, "rows are not counted for now");
        }
        for ((action, kv), count) in &counted.rows {
            let labels = [("action", action.as_str()), ("kv", kv.as_str())];
            families.counter(&WITNESS_ROWS, &labels, float(*count));
        }
    }
}

impl Counted {
    async fn follow(&mut self, store: &Store) -> Result<(), crate::store::Error> {
        loop {
            let changes = store.changes(self.after, BATCH).await?;
            let Some(last) = changes.last() else { return Ok(()) };
            self.after = last.number;
            for change in changes.iter().filter(|change| !is_intent(&change.row)) {
                *self.rows.entry((change.row.action, change.row.kv)).or_default() += 1;
            }
        }
    }
}
