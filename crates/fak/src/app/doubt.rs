//! Carries what requests find out about workers to their owners.
//!
//! Invariant: a request never waits for it, and nothing is lost: of each worker the last finding of
//! a kind is kept, so that it takes no more room than there are workers.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::Notify;

use crate::gateway::{Contradiction, Doubt};
use crate::lifecycle::Lifecycle;
use crate::runtime::Shutdown;

/// What was found and not yet carried, by worker.
#[derive(Default)]
struct Found {
    suspects: BTreeSet<Arc<str>>,
    missed: BTreeSet<Arc<str>>,
    contradicted: BTreeMap<Arc<str>, Contradiction>,
}

/// Both ends; clones are the same.
#[derive(Clone, Default)]
pub(super) struct Findings {
    found: Arc<Mutex<Found>>,
    more: Arc<Notify>,
}

impl Doubt for Findings {
    fn suspect(&self, worker: &Arc<str>) {
        self.put(|found| {
            found.suspects.insert(Arc::clone(worker));
        });
    }

    fn missed(&self, worker: &Arc<str>) {
        self.put(|found| {
            found.missed.insert(Arc::clone(worker));
        });
    }

    fn contradicted(&self, contradiction: &Contradiction) {
        let worker = Arc::clone(&contradiction.worker);
        self.put(|found| {
            found.contradicted.insert(worker, contradiction.clone());
        });
    }
}

impl Findings {
    fn put(&self, put: impl FnOnce(&mut Found)) {
        // Collections that are whole after each insertion, whatever panicked elsewhere.
        put(&mut self.found.lock().unwrap_or_else(PoisonError::into_inner));
        self.more.notify_one();
    }

    fn take(&self) -> Found {
        std::mem::take(&mut self.found.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Carries until told to stop.
    pub(super) async fn carry(self, lifecycle: Lifecycle, stop: Shutdown) {
        loop {
            tokio::select! {
                () = stop.requested() => return,
                () = self.more.notified() => {}
            }
            let Found { suspects, missed, contradicted } = self.take();
            // False warmth first: a look can take a while.
            for Contradiction { worker, claimed, cached, .. } in contradicted.into_values() {
                if let Err(error) = lifecycle.contradicted(&worker, claimed, cached).await {
                    tracing::debug!(%error, "a contradiction reached nobody");
                }
            }
            for worker in missed {
                if let Err(error) = lifecycle.missed(&worker).await {
                    tracing::debug!(%error, "a doubt reached nobody");
                }
            }
            for worker in suspects {
                if let Err(error) = lifecycle.look(&worker).await {
                    tracing::debug!(%error, "a suspicion reached nobody");
                }
            }
        }
    }
}
