//! Sessions: who they are, which worker serves them, and whether they may go on.
//!
//! Invariant: an id is matched exactly; requests never wait for the database; and what is kept is
//! bounded, the longest unseen being forgotten first. A session that is forgotten loses its binding
//! and totals; one that has more, its rest or a salt, stays unless there are too many of those.

mod id;
mod keeper;
mod session;

use std::collections::HashMap;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher as _;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use fak_kernel::Evidence;

pub use id::{BadId, ID_BYTES_MAX, named, of_tenant};
pub use keeper::Keeper;
pub use session::{Dormancy, Turn, View};

use crate::store::{self, Clock, Row, Store};
use keeper::Waiting;
use session::Session;

/// Sessions that are forgotten at once, as a part of all, when there are too many.
const FORGOTTEN_PART: usize = 16;

/// How sessions are kept.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// How many are known at once.
    pub capacity: usize,
    /// A session that was not seen for so long is over: it holds no worker, and is forgotten unless
    /// it is dormant or isolated.
    pub idle: Duration,
    /// Pause between two writes of what has changed.
    pub write_every: Duration,
    /// Tells the time.
    pub clock: Clock,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            capacity: 100_000,
            idle: Duration::from_secs(3600),
            write_every: Duration::from_secs(1),
            clock: jiff::Timestamp::now,
        }
    }
}

/// Every session; cheap to clone.
#[derive(Clone, Debug)]
pub struct Sessions {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    config: Config,
    store: Store,
    by_id: Mutex<HashMap<Arc<str>, Arc<Session>>>,
    waiting: Waiting,
}

impl Sessions {
    /// The sessions as they were stored. What they do from here on is stored, and rows are taken
    /// in, while the [`Keeper`] runs.
    ///
    /// # Errors
    /// Those of [`Store::session_list`].
    pub async fn open(store: Store, config: Config) -> Result<(Self, Keeper), store::Error> {
        let ledger = store.newest();
        let limit = u32::try_from(config.capacity).unwrap_or(u32::MAX);
        let stored = store.session_list(limit).await?;
        let restored = stored.into_iter().map(|record| {
            let session = Session::restored(record);
            (Arc::clone(&session.id), Arc::new(session))
        });
        let by_id = Mutex::new(restored.collect());
        let shared = Shared { config, store, by_id, waiting: Waiting::default() };
        let sessions = Self { shared: Arc::new(shared) };
        let keeper = Keeper::new(sessions.clone(), ledger);
        Ok((sessions, keeper))
    }

    /// A turn of the session `id`, which is made if it is new.
    ///
    /// # Errors
    /// [`BadId`].
    pub fn resolve(&self, id: &str) -> Result<Turn, BadId> {
        named(id.as_bytes())?;
        let now = self.now();
        let mut by_id = self.lock();
        let session = match by_id.get(id) {
            Some(session) => Arc::clone(session),
            None => {
                if by_id.len() >= self.shared.config.capacity {
                    let one_part = self.shared.config.capacity / FORGOTTEN_PART;
                    self.forget_oldest(&mut by_id, one_part.max(1));
                }
                let session = Arc::new(Session::new(id.into(), now));
                by_id.insert(Arc::clone(&session.id), Arc::clone(&session));
                session
            }
        };
        drop(by_id);
        session.see(now);
        Ok(Turn::new(self.clone(), session))
    }

    /// The session `id`, if there is one.
    #[must_use]
    pub fn get(&self, id: &str) -> Option<View> {
        self.lock().get(id).map(|session| session.view())
    }

    /// The sessions, the last seen first, at most `limit`.
    #[must_use]
    pub fn list(&self, limit: usize) -> Vec<View> {
        let mut sessions = self.all();
        sessions.sort_by(|a, b| b.seen_at().cmp(&a.seen_at()).then_with(|| a.id.cmp(&b.id)));
        sessions.into_iter().take(limit).map(|session| session.view()).collect()
    }

    /// What each worker has of sessions: those that it served last and that are not over, and their
    /// tokens.
    #[must_use]
    pub fn by_worker(&self) -> HashMap<Arc<str>, Load> {
        let mut loads = HashMap::<_, Load>::new();
        for session in self.all() {
            let view = session.view();
            let Some(worker) = &view.worker else { continue };
            let load = loads.entry(Arc::clone(worker)).or_default();
            if view.dormancy.is_none() {
                if self.is_over(&session) {
                    continue;
                }
                load.active += 1;
            }
            load.sessions += 1;
            load.claimed_tokens = load.claimed_tokens.saturating_add(view.claimed_tokens);
            load.cached_tokens = load.cached_tokens.saturating_add(view.cached_tokens);
        }
        loads
    }

    /// How many are active, and how many dormant.
    #[must_use]
    pub fn counts(&self) -> (usize, usize) {
        let all = self.all();
        let dormant = all.iter().filter(|session| session.is_dormant()).count();
        (all.len() - dormant, dormant)
    }

    /// Sessions other than `except` that `worker` serves now, by name.
    #[must_use]
    pub fn active_on(&self, worker: &str, except: &str) -> Vec<Arc<str>> {
        let is_active = |session: &Arc<Session>| {
            *session.id != *except
                && session.is_on(worker)
                && !session.is_dormant()
                && !self.is_over(session)
        };
        let active = self.all().into_iter().filter(is_active);
        let mut ids: Vec<_> = active.map(|session| Arc::clone(&session.id)).collect();
        ids.sort_unstable();
        ids
    }

    /// Takes in a row: the session that it was asked through goes dormant, those on its worker go
    /// on where it serves, and their gates shut. Once for
    /// each change of a row; a row that was taken in before changes nothing.
    pub fn apply(&self, row: &Row) {
        for session in self.all() {
            if session.apply(row) {
                self.is_changed(&session);
            }
        }
    }

    /// Gives the session `id` a new salt, so that its blocks so far match nobody again. It is
    /// stored when this returns. False if there is no such session.
    ///
    /// # Errors
    /// Those of [`Store::session_put`]; then the salt is in use, and may not outlive the process.
    pub async fn isolate(&self, id: &str) -> Result<bool, store::Error> {
        let Some(session) = self.lock().get(id).map(Arc::clone) else { return Ok(false) };
        session.isolate(random_salt().into());
        self.is_changed(&session);
        self.shared.store.session_put(&session.record()).await?;
        Ok(true)
    }

    /// Forgets the session `id`; whether there was one.
    #[must_use]
    pub fn end(&self, id: &str) -> bool {
        let removed = self.lock().remove(id);
        let was_there = removed.is_some();
        if let Some(session) = removed {
            self.is_gone(&session);
        }
        was_there
    }

    /// Forgets sessions that are over.
    fn sweep(&self) {
        let mut by_id = self.lock();
        by_id.retain(|_, session| {
            let stays = session.is_kept() || !self.is_over(session);
            if !stays {
                self.is_gone(session);
            }
            stays
        });
    }

    /// Forgets `count` sessions: the longest unseen of those that have nothing to lose, then of the
    /// others.
    fn forget_oldest(&self, by_id: &mut HashMap<Arc<str>, Arc<Session>>, count: usize) {
        let mut all: Vec<_> =
            by_id.values().map(|s| (s.is_kept(), s.seen_at(), Arc::clone(s))).collect();
        let count = count.min(all.len());
        if count > 0 && count < all.len() {
            all.select_nth_unstable_by_key(count - 1, |(kept, seen, _)| (*kept, *seen));
        }
        for (_, _, session) in &all[..count] {
            by_id.remove(&session.id);
            self.is_gone(session);
        }
    }

    fn is_over(&self, session: &Session) -> bool {
        let idle = i64::try_from(self.shared.config.idle.as_millis()).unwrap_or(i64::MAX);
        self.now().saturating_sub(session.seen_at()) > idle
    }

    fn is_changed(&self, session: &Arc<Session>) {
        if !session.is_dirty.swap(true, Ordering::AcqRel) {
            self.shared.waiting.put(Arc::clone(session));
        }
    }

    fn is_gone(&self, session: &Arc<Session>) {
        session.is_gone.store(true, Ordering::Release);
        self.shared.waiting.delete(Arc::clone(&session.id), self.shared.config.capacity);
    }

    fn now(&self) -> i64 {
        (self.shared.config.clock)().as_millisecond()
    }

    fn all(&self) -> Vec<Arc<Session>> {
        self.lock().values().map(Arc::clone).collect()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Arc<str>, Arc<Session>>> {
        // A map of counted references: a panic elsewhere leaves nothing half done in here.
        self.shared.by_id.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a worker has of sessions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Bound to it and not over.
    pub sessions: usize,
    /// Of those, the ones that are not dormant.
    pub active: usize,
    /// Prompt tokens that fak claimed for them.
    pub claimed_tokens: u64,
    /// Prompt tokens that engines took from their caches for them.
    pub cached_tokens: u64,
}

/// Whether `row` is an intent whose outcome is not recorded, or not yet.
#[must_use]
pub fn is_intent(row: &Row) -> bool {
    row.evidence == Evidence::None && row.reason == "unrecorded"
}

/// 128 bits that nobody can guess: the standard library keys its hashers from the system's
/// randomness, and SipHash under a secret key is a pseudorandom function.
fn random_salt() -> String {
    let half = || RandomState::new().hash_one("fak session salt");
    format!("fak-{:016x}{:016x}", half(), half())
}

#[cfg(test)]
mod tests;
