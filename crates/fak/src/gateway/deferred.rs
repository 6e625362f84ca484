//! Aborts that wait until an engine runs again.
//!
//! A request whose client leaves is aborted by closing its connection. An engine that stands still
//! cannot tell the engines that it transfers KV with before its next step, and pairs of prefill and
//! decode engines die of that when they go on (case 36: reported of vLLM, not observed here). Of
//! workers that are configured so, what a client leaves is kept open while its worker is paused,
//! asleep or waking. Invariant: what is kept is bounded, and let go as soon as its worker serves or
//! is given up.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use fak_kernel::Phase;
use prometheus::IntGauge;

use crate::fleet::{Fleet, Snapshot};
use crate::runtime::Shutdown;

/// Requests that are kept open; the aborts of more go through at once.
const KEPT_MAX: usize = 4096;

/// The engine's side of a request. Dropping it closes the connection.
type Side = Box<dyn Send>;

/// What clients have left behind.
pub(super) struct Deferred {
    fleet: Fleet,
    /// By number in the fleet: whether the worker's aborts wait.
    waits: Vec<bool>,
    kept: Mutex<Vec<(usize, Side)>>,
    count: IntGauge,
}

impl Deferred {
    /// For the workers of these names, counted in `count`.
    pub(super) fn new(fleet: &Fleet, names: &[String], count: IntGauge) -> Arc<Self> {
        let snapshot = fleet.snapshot();
        let waits =
            snapshot.workers.iter().map(|view| names.iter().any(|n| **n == *view.worker.id));
        let (waits, kept) = (waits.collect(), Mutex::default());
        Arc::new(Self { fleet: fleet.clone(), waits, kept, count })
    }

    /// What a request on this worker leaves with; none where its aborts do not wait.
    pub(super) fn of(self: &Arc<Self>, number: usize) -> Option<Patience> {
        let waits = self.waits.get(number).copied().unwrap_or(false);
        waits.then(|| Patience { deferred: Arc::clone(self), number })
    }

    /// Lets go of what needs to wait no more, until told to stop.
    pub(super) async fn run(&self, stop: Shutdown) {
        if !self.waits.contains(&true) {
            return stop.requested().await;
        }
        let mut fleet = self.fleet.watch();
        loop {
            let now = Arc::clone(&fleet.borrow_and_update());
            let done: Vec<_> = {
                let mut kept = self.kept();
                let (done, left) =
                    kept.drain(..).partition(|(number, _)| !stands_still(&now, *number));
                *kept = left;
                self.counted(&kept);
                done
            };
            // Closing connections is no work for under a lock.
            drop(done);
            tokio::select! {
                () = stop.requested() => return,
                changed = fleet.changed() => if changed.is_err() { return },
            }
        }
    }

    fn keep(&self, number: usize, side: Side) {
        let mut kept = self.kept();
        if kept.len() >= KEPT_MAX {
            tracing::warn!(KEPT_MAX, "too many aborts wait: one goes through to an engine at rest");
            return;
        }
        kept.push((number, side));
        self.counted(&kept);
    }

    fn counted(&self, kept: &[(usize, Side)]) {
        self.count.set(i64::try_from(kept.len()).unwrap_or(i64::MAX));
    }

    fn kept(&self) -> MutexGuard<'_, Vec<(usize, Side)>> {
        // A list that is whole after each change, whatever panicked elsewhere.
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether a worker's engine is there and takes no steps.
fn stands_still(fleet: &Snapshot, number: usize) -> bool {
    fleet.workers.get(number).is_some_and(|view| match view.state.phase() {
        Phase::Paused | Phase::Sleeping | Phase::Waking => true,
        Phase::Serving | Phase::Error => false,
    })
}

/// How a request leaves its worker.
#[derive(Clone)]
pub(super) struct Patience {
    deferred: Arc<Deferred>,
    number: usize,
}

impl std::fmt::Debug for Patience {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Patience").field("number", &self.number).finish_non_exhaustive()
    }
}

impl Patience {
    /// Nobody wants `side` any more: it closes now, or once its engine runs again.
    pub(super) fn leave(&self, side: impl Send + 'static) {
        if stands_still(&self.deferred.fleet.snapshot(), self.number) {
            self.deferred.keep(self.number, Box::new(side));
        }
    }

    /// `call`, which is left behind where it is dropped before its end.
    pub(super) fn over<F>(self, call: F) -> Patient<F>
    where
        F: Future + Send + 'static,
    {
        Patient { call: Some(Box::pin(call)), patience: self }
    }
}

/// A call to an engine that is not simply dropped.
pub(super) struct Patient<F: Future + Send + 'static> {
    /// None once it has ended.
    call: Option<Pin<Box<F>>>,
    patience: Patience,
}

impl<F: Future + Send + 'static> Future for Patient<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let Some(call) = &mut self.call else { return Poll::Pending };
        let polled = call.as_mut().poll(cx);
        if polled.is_ready() {
            self.call = None;
        }
        polled
    }
}

impl<F: Future + Send + 'static> Drop for Patient<F> {
    fn drop(&mut self) {
        if let Some(call) = self.call.take() {
            self.patience.leave(call);
        }
    }
}
