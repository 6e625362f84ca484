//! The control API: what operators, dashboards and RL frameworks see of fak and ask of it.
//!
//! Invariant: every action ends in the witness row that it answers with, and no status says more
//! than that row; an option that is unknown or in the wrong place is refused before anything is
//! done.

mod access;
mod body;
mod dropin;
mod error;
mod events;
mod health;
pub mod json;
mod metrics;
mod options;
mod refusal;
mod rollout;
mod sessions;
mod witness;
mod workers;

use std::sync::Arc;

use axum::Router;
use axum::middleware;
use axum::routing::{MethodRouter, get, post};
use fak_index::Index;
use tokio::sync::Semaphore;

pub use access::Access;

use crate::events::recorder::Recorder;
use crate::fleet::Fleet;
use crate::lifecycle::Lifecycle;
use crate::runtime::Shutdown;
use crate::sessions::Sessions;
use crate::store::Store;
use metrics::Tally;

/// Followers of the ledger at once.
const FOLLOWERS_MAX: usize = 64;

/// What the control API stands on.
#[derive(Clone)]
pub struct Parts {
    /// The workers.
    pub fleet: Fleet,
    /// Their owners.
    pub lifecycle: Lifecycle,
    /// The sessions.
    pub sessions: Sessions,
    /// The ledger.
    pub store: Store,
    /// What is held where, for numbers of blocks.
    pub index: Arc<Index>,
    /// What became of the ranks' events.
    pub recorder: Arc<Recorder>,
    /// The metrics of the other parts.
    pub registry: prometheus::Registry,
    /// Who may ask for control.
    pub access: Access,
    /// Ends what would never end by itself.
    pub stop: Shutdown,
}

/// What every handler gets; cheap to clone.
#[derive(Clone)]
pub struct AdminState {
    parts: Arc<Parts>,
    tally: Arc<Tally>,
    followers: Arc<Semaphore>,
}

impl std::ops::Deref for AdminState {
    type Target = Parts;

    fn deref(&self) -> &Parts {
        &self.parts
    }
}

impl AdminState {
    /// Counts rows of the ledger from here on.
    #[must_use]
    pub fn new(parts: Parts) -> Self {
        let tally = Arc::new(Tally::new(&parts.store));
        let followers = Arc::new(Semaphore::new(FOLLOWERS_MAX));
        Self { parts: Arc::new(parts), tally, followers }
    }
}

type Handlers = MethodRouter<AdminState>;
type Route = (&'static str, fn() -> Handlers);

/// Routes that take the admin key.
const CONTROL: &[Route] = &[
    ("/fak/v1/workers", || get(workers::list)),
    ("/fak/v1/workers/{id}", || get(workers::status)),
    ("/fak/v1/workers/{id}/{action}", || post(workers::act)),
    ("/fak/v1/sessions", || get(sessions::list)),
    ("/fak/v1/sessions/{id}", || get(sessions::status).delete(sessions::end)),
    ("/fak/v1/sessions/{id}/{action}", || post(sessions::act)),
    ("/fak/v1/rollout", || get(rollout::list)),
    ("/fak/v1/rollout/begin", || post(rollout::begin)),
    ("/fak/v1/rollout/end", || post(rollout::end)),
    ("/fak/v1/witness", || get(witness::list)),
    ("/fak/v1/events", || get(events::follow)),
    ("/pause", || post(dropin::pause)),
    ("/resume", || post(dropin::resume)),
    ("/is_paused", || get(dropin::is_paused)),
    ("/sleep", || post(dropin::sleep)),
    ("/wake_up", || post(dropin::wake_up)),
    ("/is_sleeping", || get(dropin::is_sleeping)),
    ("/reset_prefix_cache", || post(dropin::reset_prefix_cache)),
];

/// Routes that anybody may read, as probes and scrapers do.
const OPEN: &[Route] = &[
    ("/health", || get(health::alive)),
    ("/ready", || get(health::ready)),
    ("/metrics", || get(metrics::scrape)),
    ("/openapi.json", || get(openapi)),
];

/// Whether `path` is the control API's: one of its routes, or anything below `/fak/`. All others
/// are the data plane's.
#[must_use]
pub fn owns(path: &str) -> bool {
    path.starts_with("/fak/") || CONTROL.iter().chain(OPEN).any(|(route, _)| *route == path)
}

/// The routes; the app adds those of the data plane to the same listener.
pub fn router(state: AdminState) -> Router {
    let add = |router: Router<AdminState>, route: &Route| router.route(route.0, route.1());
    let allowed = middleware::from_fn_with_state(state.clone(), access::require);
    let bounded = middleware::from_fn(body::bounded);
    // Nothing is read of who may not ask.
    let control = CONTROL.iter().fold(Router::new(), add).route_layer(bounded).route_layer(allowed);
    OPEN.iter()
        .fold(Router::new(), add)
        .merge(control)
        .method_not_allowed_fallback(error::method_not_allowed)
        .fallback(error::not_found)
        .layer(middleware::map_response(error::shaped))
        .with_state(state)
}

/// What the control API is, for machines.
const OPENAPI: &str = include_str!("admin/openapi.json");

async fn openapi() -> ([(http::HeaderName, &'static str); 1], &'static str) {
    ([(http::header::CONTENT_TYPE, "application/json")], OPENAPI)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::Value;

    use super::*;

    #[test]
    fn the_description_names_every_route_and_no_other() {
        let described: Value = serde_json::from_str(OPENAPI).expect("JSON");
        let paths = described["paths"].as_object().expect("an object");
        let described: BTreeSet<_> = paths.keys().map(String::as_str).collect();
        let routed: BTreeSet<_> = CONTROL.iter().chain(OPEN).map(|(path, _)| *path).collect();
        assert_eq!(described, routed);
    }

    #[test]
    fn paths_that_only_resemble_a_route_are_not_the_control_apis() {
        for path in ["/sleep", "/metrics", "/fak/v1/workers/w0/pause", "/fak/v9"] {
            assert!(owns(path), "{path}");
        }
        for path in ["/", "/v1/models", "//sleep", "/SLEEP", "/%73leep", "/sleep/", "/fakir"] {
            assert!(!owns(path), "{path}");
        }
    }
}
