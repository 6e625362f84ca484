//! One session, and one turn of it.
//!
//! Invariant: what was proven before a verdict opens no gate after it; only an action through a
//! session makes it dormant, and a dormant one goes on only by a row that says that its worker
//! serves.

use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fak_kernel::gate::WarmHitGate;
use fak_kernel::vocab::PerTier;
use fak_kernel::{Action, Disposition, Evidence, Phase, Tier};

use super::Sessions;
use crate::store::{self, Row, Run};

/// Why a session's requests are not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dormancy {
    /// The pause or the sleep that was asked for through it.
    pub action: Action,
    /// The row of that action.
    pub witness: Option<u64>,
}

/// A session as it is now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct View {
    /// Its name.
    pub id: Arc<str>,
    /// The worker that served it last.
    pub worker: Option<Arc<str>>,
    /// Set while its requests are not taken.
    pub dormancy: Option<Dormancy>,
    /// When it was first seen, in Unix milliseconds.
    pub created_at: i64,
    /// When it was last seen, in Unix milliseconds.
    pub last_seen_at: i64,
    /// Prompt tokens that fak claimed to be cached, over all its audited requests.
    pub claimed_tokens: u64,
    /// Prompt tokens that engines took from their caches, as they told.
    pub cached_tokens: u64,
    /// The last row on it: through it, or on its worker.
    pub last_witness: Option<u64>,
    /// Whether it has a salt of its own.
    pub is_isolated: bool,
    /// Whether hits on its worker's gpu tier may be called warm.
    pub is_warm: bool,
}

/// A session. Its totals and binding outlive the process; its gate does not.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) id: Arc<str>,
    created_at: i64,
    seen_at: AtomicI64,
    /// Set while it waits to be written.
    pub(super) is_dirty: AtomicBool,
    /// Set once it is forgotten: it is not written any more.
    pub(super) is_gone: AtomicBool,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    worker: Option<Arc<str>>,
    dormancy: Option<Dormancy>,
    gate: WarmHitGate,
    /// Counts verdicts that shut the gate, so that a claim made before one is told.
    epoch: u64,
    salt: Option<Arc<str>>,
    claimed: u64,
    cached: u64,
    /// The newest row whose outcome was taken in.
    judged: u64,
    last_witness: Option<u64>,
}

impl Session {
    pub(super) fn new(id: Arc<str>, now: i64) -> Self {
        Self {
            id,
            created_at: now,
            seen_at: AtomicI64::new(now),
            is_dirty: AtomicBool::new(false),
            is_gone: AtomicBool::new(false),
            state: Mutex::default(),
        }
    }

    /// A session as it was stored. Nothing of it is proven.
    pub(super) fn restored(record: store::Session) -> Self {
        let asleep = || Dormancy {
            action: record.reason.as_deref().and_then(Action::parse).unwrap_or(Action::Pause),
            witness: record.last_witness,
        };
        let state = State {
            worker: record.worker.as_deref().map(Arc::from),
            dormancy: (record.run == Run::Dormant).then(asleep),
            salt: record.salt.as_deref().map(Arc::from),
            claimed: record.claimed_tokens,
            cached: record.cached_tokens,
            last_witness: record.last_witness,
            ..State::default()
        };
        let created_at = record.created_at;
        let session = Self::new(record.id.into(), created_at);
        session.seen_at.store(record.last_seen_at, Ordering::Relaxed);
        *session.lock() = state;
        session
    }

    pub(super) fn record(&self) -> store::Session {
        let state = self.lock();
        store::Session {
            id: self.id.to_string(),
            worker: state.worker.as_deref().map(str::to_owned),
            run: if state.dormancy.is_some() { Run::Dormant } else { Run::Active },
            reason: state.dormancy.map(|dormancy| dormancy.action.as_str().to_owned()),
            created_at: self.created_at,
            last_seen_at: self.seen_at(),
            salt: state.salt.as_deref().map(str::to_owned),
            claimed_tokens: state.claimed,
            cached_tokens: state.cached,
            last_witness: state.last_witness,
        }
    }

    pub(super) fn view(&self) -> View {
        let state = self.lock();
        View {
            id: Arc::clone(&self.id),
            worker: state.worker.clone(),
            dormancy: state.dormancy,
            created_at: self.created_at,
            last_seen_at: self.seen_at(),
            claimed_tokens: state.claimed,
            cached_tokens: state.cached,
            last_witness: state.last_witness,
            is_isolated: state.salt.is_some(),
            is_warm: state.gate.is_open(Tier::Gpu),
        }
    }

    pub(super) fn seen_at(&self) -> i64 {
        self.seen_at.load(Ordering::Relaxed)
    }

    pub(super) fn see(&self, now: i64) {
        self.seen_at.fetch_max(now, Ordering::Relaxed);
    }

    pub(super) fn is_dormant(&self) -> bool {
        self.lock().dormancy.is_some()
    }

    /// Whether it has what must not be lost: its rest, or the salt that keeps it from its old
    /// blocks.
    pub(super) fn is_kept(&self) -> bool {
        let state = self.lock();
        state.dormancy.is_some() || state.salt.is_some()
    }

    pub(super) fn is_on(&self, worker: &str) -> bool {
        self.lock().worker.as_deref() == Some(worker)
    }

    /// Its blocks so far match nobody again.
    pub(super) fn isolate(&self, salt: Arc<str>) {
        let mut state = self.lock();
        state.salt = Some(salt);
        state.shut(&PerTier::all(Disposition::Unknown));
    }

    /// Takes in a row that was asked through this session or is on its worker; whether it changed
    /// anything.
    pub(super) fn apply(&self, row: &Row) -> bool {
        let mut state = self.lock();
        let is_on_worker = state.worker.as_deref() == Some(row.worker.as_str());
        let is_through = row.session.as_deref() == Some(&*self.id);
        if !is_on_worker && !is_through {
            return false;
        }
        if is_through || row.evidence != Evidence::NotSent {
            state.last_witness = state.last_witness.max(Some(row.seq));
        }
        let is_new = match (is_on_worker, row.evidence) {
            (false, _) => false,
            (true, Evidence::NotSent) => state.wake(row),
            (true, _) => state.judge(row, is_through),
        };
        is_through || is_new
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No part of it depends on another: a panic elsewhere leaves nothing half done in here.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn shut(&mut self, kv: &PerTier<Disposition>) {
        self.gate.verdict(kv);
        self.epoch += 1;
    }

    /// Nothing was done: at most a worker turns out to serve that was thought not to.
    fn wake(&mut self, row: &Row) -> bool {
        row.serving && self.dormancy.take().is_some()
    }

    /// Something was done on the session's worker: once for a row, in the order of the rows, for
    /// a worker's owner does one thing at a time. It was asked for through the session, or not:
    /// then its next request goes to another worker, where one serves.
    fn judge(&mut self, row: &Row, is_through: bool) -> bool {
        if row.seq <= self.judged {
            return false;
        }
        if super::is_intent(row) {
            // Beliefs went cold, or did not; what became of the worker comes with the outcome.
            if row.warm_demoted {
                self.shut(&PerTier::all(Disposition::Unknown));
            }
            return true;
        }
        self.judged = row.seq;
        let mut kv = PerTier::all(Disposition::Unknown);
        for (tier, disposition) in &row.tiers.0 {
            *kv.get_mut(*tier) = *disposition;
        }
        self.shut(&kv);
        let is_rest = matches!(row.action, Action::Pause | Action::Sleep);
        if row.serving {
            self.dormancy = None;
        } else if is_through && is_rest && matches!(row.phase, Phase::Paused | Phase::Sleeping) {
            self.dormancy = Some(Dormancy { action: row.action, witness: Some(row.seq) });
        }
        true
    }
}

/// One request of a session.
#[derive(Clone, Debug)]
pub struct Turn {
    pub(super) session: Arc<Session>,
    pub(super) sessions: Sessions,
    epoch: u64,
}

impl Turn {
    pub(super) fn new(sessions: Sessions, session: Arc<Session>) -> Self {
        let epoch = session.lock().epoch;
        Self { session, sessions, epoch }
    }

    /// The session's name.
    #[must_use]
    pub fn id(&self) -> &Arc<str> {
        &self.session.id
    }

    /// Why the request is not taken, where it is not: answer 409, and name the row.
    #[must_use]
    pub fn dormancy(&self) -> Option<Dormancy> {
        self.session.lock().dormancy
    }

    /// The worker that served the session last.
    #[must_use]
    pub fn worker(&self) -> Option<Arc<str>> {
        self.session.lock().worker.clone()
    }

    /// The salt that goes before any other, where the session is isolated.
    #[must_use]
    pub fn salt(&self) -> Option<Arc<str>> {
        self.session.lock().salt.clone()
    }

    /// The request is about to be sent to `worker`, with a claim of these tokens by tier. The claim
    /// counts fresh accepted stores alone, so it opens the gate, unless a verdict came in between.
    /// A dormant session stays where it is.
    pub fn bind(&self, worker: &Arc<str>, claimed: &PerTier<u64>) {
        let mut state = self.session.lock();
        if state.dormancy.is_some() {
            return;
        }
        if state.worker.as_ref() != Some(worker) {
            if state.worker.is_some() {
                state.gate.moved();
            }
            state.worker = Some(Arc::clone(worker));
            // Rows of another worker say nothing of this one.
            state.judged = 0;
        }
        if state.epoch == self.epoch {
            for tier in Tier::ALL.iter().filter(|tier| claimed.get(**tier) > 0) {
                state.gate.store_accepted(*tier);
            }
        }
        drop(state);
        self.sessions.is_changed(&self.session);
    }

    /// Whether hits on `tier` may be called warm.
    #[must_use]
    pub fn is_warm(&self, tier: Tier) -> bool {
        self.session.lock().gate.is_open(tier)
    }

    /// The request was audited: tokens claimed at dispatch, and those that the engine then took
    /// from its caches.
    pub fn record(&self, claimed: u64, cached: u64) {
        let mut state = self.session.lock();
        state.claimed = state.claimed.saturating_add(claimed);
        state.cached = state.cached.saturating_add(cached);
        drop(state);
        self.sessions.is_changed(&self.session);
    }
}
