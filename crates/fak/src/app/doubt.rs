//! Carries what requests find out about workers to their owners.
//!
//! Invariant: a request never waits for it, nor one worker's findings for another's owner; and
//! nothing is lost: of each worker the last finding of a kind is kept, so that it takes no more
//! room than there are workers.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};

use futures_util::stream::{FuturesUnordered, StreamExt as _};
use tokio::sync::Notify;

use crate::gateway::{Contradiction, Doubt};
use crate::lifecycle::Lifecycle;
use crate::runtime::Shutdown;

/// What was found of a worker and not yet carried.
#[derive(Default)]
struct Found {
    contradiction: Option<Contradiction>,
    is_missed: bool,
    is_late: bool,
    is_suspect: bool,
}

/// Both ends; clones are the same.
#[derive(Clone, Default)]
pub(super) struct Findings {
    found: Arc<Mutex<BTreeMap<Arc<str>, Found>>>,
    more: Arc<Notify>,
}

impl Doubt for Findings {
    fn suspect(&self, worker: &Arc<str>) {
        self.put(worker, |found| found.is_suspect = true);
    }

    fn missed(&self, worker: &Arc<str>) {
        self.put(worker, |found| found.is_missed = true);
    }

    fn late(&self, worker: &Arc<str>) {
        self.put(worker, |found| found.is_late = true);
    }

    fn contradicted(&self, contradiction: &Contradiction) {
        // The prompt's own beliefs are given up already.
        if contradiction.is_rank {
            let found = Some(contradiction.clone());
            self.put(&contradiction.worker, |of| of.contradiction = found);
        }
    }
}

impl Findings {
    fn put(&self, worker: &Arc<str>, put: impl FnOnce(&mut Found)) {
        // A map that is whole after each insertion, whatever panicked elsewhere.
        let mut found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        put(found.entry(Arc::clone(worker)).or_default());
        drop(found);
        self.more.notify_one();
    }

    /// What was found of workers that are not `busy`.
    fn take(&self, busy: &BTreeSet<Arc<str>>) -> BTreeMap<Arc<str>, Found> {
        let mut found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        let (left, taken) =
            std::mem::take(&mut *found).into_iter().partition(|(worker, _)| busy.contains(worker));
        *found = left;
        taken
    }

    /// Carries until told to stop.
    pub(super) async fn carry(self, lifecycle: Lifecycle, stop: Shutdown) {
        self.carry_to(|worker, found| tell(lifecycle.clone(), worker, found), stop).await;
    }

    /// Carries by `tell`, each worker's findings by themselves: an owner may be busy for minutes.
    async fn carry_to<F>(self, tell: impl Fn(Arc<str>, Found) -> F, stop: Shutdown)
    where
        F: Future<Output = ()>,
    {
        let (mut busy, mut carried) = (BTreeSet::new(), FuturesUnordered::new());
        loop {
            tokio::select! {
                () = stop.requested() => return,
                () = self.more.notified() => {}
                Some(worker) = carried.next() => drop(busy.take(&worker)),
            }
            for (worker, found) in self.take(&busy) {
                busy.insert(Arc::clone(&worker));
                let told = tell(Arc::clone(&worker), found);
                carried.push(async move {
                    told.await;
                    worker
                });
            }
        }
    }
}

/// Tells a worker's owner. False warmth first: a look can take a while.
async fn tell(lifecycle: Lifecycle, worker: Arc<str>, found: Found) {
    if let Some(contradiction) = found.contradiction
        && let Contradiction { rank, claimed, cached, .. } = contradiction
        && let Err(error) = lifecycle.contradicted(&worker, rank, (claimed, cached)).await
    {
        tracing::debug!(%error, "a contradiction reached nobody");
    }
    if found.is_late
        && !found.is_missed
        && let Err(error) = lifecycle.late(&worker).await
    {
        tracing::debug!(%error, "a late store reached nobody");
    }
    if found.is_missed
        && let Err(error) = lifecycle.missed(&worker).await
    {
        tracing::debug!(%error, "a doubt reached nobody");
    }
    if found.is_suspect
        && let Err(error) = lifecycle.look(&worker).await
    {
        tracing::debug!(%error, "a suspicion reached nobody");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::{OnExit, TaskGroup};
    use tokio::sync::mpsc;

    #[tokio::test]
    async fn an_owner_that_is_busy_holds_up_no_other_workers_findings() {
        let findings = Findings::default();
        let (sender, mut told) = mpsc::channel(8);
        let (free, wait) = tokio::sync::watch::channel(false);
        let tell = move |worker: Arc<str>, found: Found| {
            let (sender, mut wait) = (sender.clone(), wait.clone());
            async move {
                if &*worker == "busy" {
                    wait.wait_for(|is_free| *is_free).await.expect("the test waits");
                }
                let kinds = (found.contradiction.is_some(), found.is_missed, found.is_suspect);
                sender.send((worker, kinds)).await.expect("the test listens");
            }
        };
        let mut tasks = TaskGroup::new();
        let carrying = findings.clone().carry_to(tell, tasks.shutdown());
        tasks.spawn("doubts", OnExit::Report, carrying);
        let (busy, other): (Arc<str>, Arc<str>) = ("busy".into(), "other".into());
        findings.suspect(&busy);
        // On its way: what comes after waits for its own.
        while !findings.found.lock().expect("whole").is_empty() {
            tokio::task::yield_now().await;
        }
        findings.missed(&busy);
        let index = fak_index::Index::new(7, fak_index::Limits::default());
        findings.contradicted(&Contradiction {
            worker: Arc::clone(&other),
            rank: index.add_rank(fak_index::RankOptions::default()),
            claimed: 2,
            cached: 1,
            is_rank: true,
        });
        assert_eq!(told.recv().await, Some((other, (true, false, false))));
        free.send(true).expect("it waits");
        assert_eq!(told.recv().await, Some((Arc::clone(&busy), (false, false, true))));
        assert_eq!(told.recv().await, Some((busy, (false, true, false))));
    }
}
