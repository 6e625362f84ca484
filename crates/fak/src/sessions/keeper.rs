//! What happens to sessions beside requests: changes are stored, rows are taken in, and those that
//! are over are forgotten.
//!
//! Invariant: what waits to be stored is bounded by the sessions themselves, and is tried again
//! until it is stored.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval};

use super::{Session, Sessions};
use crate::runtime::Shutdown;
use crate::store;

/// Pause between two looks for sessions that are over: each holds up new ones for a moment.
const SWEEP_EVERY: Duration = Duration::from_secs(60);
/// Rows and sessions in one exchange with the store.
const BATCH: usize = 500;

/// What is to be stored.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    changed: Vec<Arc<Session>>,
    forgotten: Vec<Arc<str>>,
}

impl Waiting {
    /// Each session at most once: whoever calls has set its flag.
    pub(super) fn put(&self, session: Arc<Session>) {
        self.lock().changed.push(session);
    }

    /// More than `limit` are left to the next start, which takes in no more than it has room for.
    pub(super) fn delete(&self, id: Arc<str>, limit: usize) {
        let mut inner = self.lock();
        if inner.forgotten.len() < limit {
            inner.forgotten.push(id);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Two lists of counted references: a panic elsewhere leaves nothing half done in here.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Keeps the sessions while it runs.
#[derive(Debug)]
pub struct Keeper {
    sessions: Sessions,
    ledger: watch::Receiver<u64>,
    /// The last change of the ledger that was taken in.
    after: u64,
    reading: Trouble,
    writing: Trouble,
}

/// What fails, so that it is said once and not at each try.
#[derive(Debug, Default)]
struct Trouble(Option<String>);

impl Trouble {
    /// Whether it is news how it went.
    fn is_new<T>(&mut self, result: &Result<T, store::Error>) -> bool {
        let now = result.as_ref().err().map(ToString::to_string);
        std::mem::replace(&mut self.0, now.clone()) != now
    }
}

impl Keeper {
    pub(super) fn new(sessions: Sessions, ledger: watch::Receiver<u64>) -> Self {
        let after = *ledger.borrow();
        Self { sessions, ledger, after, reading: Trouble::default(), writing: Trouble::default() }
    }

    /// Runs until told to stop, and then stores what is left.
    pub async fn run(mut self, stop: Shutdown) {
        let mut tick = interval(self.sessions.shared.config.write_every);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut sweep = interval(SWEEP_EVERY);
        sweep.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = stop.requested() => break,
                _ = sweep.tick() => self.sessions.sweep(),
                // The store outlives the keeper, so the sender does, too.
                _ = self.ledger.changed() => self.follow().await,
                _ = tick.tick() => {
                    self.follow().await;
                    self.write().await;
                }
            }
        }
        self.write().await;
    }

    /// Takes in what is new in the ledger; other processes may write there, too.
    async fn follow(&mut self) {
        let limit = u32::try_from(BATCH).expect("a small number");
        loop {
            let result = self.sessions.shared.store.changes(self.after, limit).await;
            let is_new = self.reading.is_new(&result);
            let changes = match result {
                Ok(changes) => changes,
                Err(error) if is_new => {
                    return tracing::warn!(%error, "sessions miss rows for now");
                }
                Err(_) => return,
            };
            for change in &changes {
                self.sessions.apply(&change.row);
                self.after = change.number;
            }
            if changes.len() < BATCH {
                return;
            }
        }
    }

    async fn write(&mut self) {
        let Inner { mut changed, mut forgotten } = std::mem::take(&mut *self.waiting());
        let result = self.write_all(&mut changed, &mut forgotten).await;
        match (&result, self.writing.is_new(&result)) {
            (Err(error), true) => tracing::warn!(%error, "sessions are not stored for now"),
            (Ok(()), true) => tracing::info!("sessions are stored again"),
            (_, false) => {}
        }
        if result.is_err() {
            let mut waiting = self.waiting();
            waiting.changed.append(&mut changed);
            waiting.forgotten.append(&mut forgotten);
            waiting.forgotten.truncate(self.sessions.shared.config.capacity);
        }
    }

    /// Takes out of the lists what is stored. Deletions go first: a name may have come back.
    async fn write_all(
        &self,
        changed: &mut Vec<Arc<Session>>,
        forgotten: &mut Vec<Arc<str>>,
    ) -> Result<(), store::Error> {
        let store = &self.sessions.shared.store;
        // Before anything can fail, or those that are forgotten would pile up here.
        changed.retain(|session| !session.is_gone.load(Ordering::Acquire));
        while let Some(id) = forgotten.last() {
            store.session_delete(id).await?;
            forgotten.pop();
        }
        while !changed.is_empty() {
            let batch = changed.len().saturating_sub(BATCH)..;
            // A change from here on is written again.
            let records: Vec<_> = changed[batch.clone()]
                .iter()
                .map(|session| {
                    session.is_dirty.store(false, Ordering::Release);
                    session.record()
                })
                .collect();
            if let Err(error) = store.sessions_put(&records).await {
                // One whose flag was set meanwhile has another entry.
                let failed = changed.split_off(batch.start).into_iter();
                changed.extend(failed.filter(|s| !s.is_dirty.swap(true, Ordering::AcqRel)));
                return Err(error);
            }
            changed.truncate(batch.start);
        }
        Ok(())
    }

    fn waiting(&self) -> MutexGuard<'_, Inner> {
        self.sessions.shared.waiting.lock()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::sessions::Config;
    use crate::store::Store;

    #[test]
    fn a_store_that_goes_on_failing_is_told_once() {
        let mut trouble = Trouble::default();
        let seen = [Ok(()), Err(store::Error::Slow), Err(store::Error::Slow), Ok(()), Ok(())];
        assert_eq!(seen.map(|result| trouble.is_new(&result)), [false, true, false, true, false]);
    }

    #[tokio::test]
    async fn what_waits_for_a_ledger_that_fails_is_bounded_by_the_sessions_that_are_known() {
        let store = Store::open("sqlite::memory:").await.expect("memory");
        let config = Config { capacity: 8, ..Config::default() };
        let (sessions, mut keeper) = Sessions::open(store.clone(), config).await.expect("empty");
        store.close().await;
        for number in 0..100 {
            let turn = sessions.resolve(&format!("s{number}")).expect("a good name");
            turn.bind(&"w".into(), &fak_kernel::vocab::PerTier::all(0));
            keeper.write().await;
        }
        let waiting = keeper.waiting();
        let names = |ids: Vec<Arc<str>>| BTreeSet::from_iter(ids);
        let changed =
            names(waiting.changed.iter().map(|session| Arc::clone(&session.id)).collect());
        let known = names(sessions.list(100).into_iter().map(|view| view.id).collect());
        assert_eq!((waiting.changed.len(), known.len()), (8, 8));
        assert_eq!(changed, known, "each of them is tried again");
        assert!(waiting.forgotten.len() <= 8, "{} forgotten", waiting.forgotten.len());
    }
}
