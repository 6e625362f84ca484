//! The ledger as it is written: server-sent events.
//!
//! Invariant: whoever comes back with the last id that it saw misses no row and no outcome. An
//! event is `intent` while its outcome is not recorded, and `witness` once it is.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

use axum::extract::{Query, State};
use axum::response::sse::{Event, KeepAlive, Sse};
use futures_util::stream::{self, Stream};
use http::{HeaderMap, StatusCode};
use tokio::sync::{OwnedSemaphorePermit, watch};
use tokio::time::timeout;

use super::AdminState;
use super::error::Error;
use crate::sessions::is_intent;
use crate::store::Change;

/// Pause between two looks for what other processes wrote.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Pause between two comments that keep the connection open.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// Rows in one look.
const BATCH: u32 = 100;

struct Follower {
    state: AdminState,
    ledger: watch::Receiver<u64>,
    after: u64,
    waiting: VecDeque<Change>,
    _place: OwnedSemaphorePermit,
}

pub(super) async fn follow(
    State(state): State<AdminState>,
    Query(query): Query<Vec<(String, String)>>,
    headers: HeaderMap,
) -> Result<Sse<impl Stream<Item = Result<Event, Infallible>>>, Error> {
    if let Some((name, _)) = query.into_iter().next() {
        let message = "there are no filters; Last-Event-ID says where to go on";
        return Err(Error::bad("unknown_option", name, message));
    }
    let Ok(place) = state.followers.clone().try_acquire_owned() else {
        let message = "as many follow the ledger as may";
        return Err(Error::new(StatusCode::SERVICE_UNAVAILABLE, "too_many_followers", message));
    };
    let ledger = state.store.newest();
    let after = match headers.get("last-event-id") {
        None => *ledger.borrow(),
        Some(id) => {
            let id = id.to_str().ok().and_then(|id| id.trim().parse().ok());
            id.ok_or_else(|| {
                let message = "Last-Event-ID has to be the id of an event of this stream";
                Error::bad("invalid_option", "Last-Event-ID", message)
            })?
        }
    };
    let follower = Follower { state, ledger, after, waiting: VecDeque::new(), _place: place };
    let events = stream::unfold(follower, |mut follower| async move {
        let event = follower.next().await?;
        Some((Ok(event), follower))
    });
    Ok(Sse::new(events).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)))
}

impl Follower {
    /// The next event; none once fak stops, or the ledger fails: then the client comes back.
    async fn next(&mut self) -> Option<Event> {
        loop {
            if let Some(change) = self.waiting.pop_front() {
                return Some(event(&change));
            }
            match self.state.store.changes(self.after, BATCH).await {
                Ok(changes) if !changes.is_empty() => {
                    self.after = changes.last().map_or(self.after, |change| change.number);
                    self.waiting = changes.into();
                }
                Ok(_) => self.wait().await?,
                Err(error) => {
                    tracing::warn!(%error, "a follower of the ledger is sent away");
                    return None;
                }
            }
        }
    }

    async fn wait(&mut self) -> Option<()> {
        tokio::select! {
            () = self.state.stop.requested() => None,
            // Out of time, or woken: either way it is time to look.
            _ = timeout(LOOK_EVERY, self.ledger.changed()) => Some(()),
        }
    }
}

fn event(change: &Change) -> Event {
    let kind = if is_intent(&change.row) { "intent" } else { "witness" };
    let event = Event::default().id(change.number.to_string()).event(kind);
    // A row holds words, numbers and JSON values: it always serialises.
    event.json_data(&change.row).unwrap_or_default()
}
