//! Until when does what is believed of a rank count, by the clock?
//!
//! A rank's task suspends beliefs when what they rest on is over, but it may not get to it: a
//! process that was stopped, a suspended machine, an executor that is blocked. Invariant: whoever
//! reads beliefs asks the clock himself, so that none outlive their time for want of a task's turn.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use tokio::time::Instant;

/// Between the task of one rank and those who read what it wrote.
#[derive(Debug)]
pub(super) struct Lease {
    until: Mutex<Instant>,
    /// Somebody read since the task looked last.
    is_asked: AtomicBool,
}

impl Lease {
    /// One that is over.
    pub(super) fn over() -> Self {
        Self { until: Mutex::new(Instant::now()), is_asked: AtomicBool::new(false) }
    }

    /// It holds until then, and no longer.
    pub(super) fn renew(&self, until: Instant) {
        // Whole after each change, whatever panicked elsewhere.
        *self.until.lock().unwrap_or_else(PoisonError::into_inner) = until;
    }

    /// Whether somebody read since this was called last.
    pub(super) fn was_asked(&self) -> bool {
        self.is_asked.swap(false, Ordering::Relaxed)
    }
}

impl fak_index::Lease for Lease {
    fn holds(&self) -> bool {
        Instant::now() < *self.until.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn asked(&self) {
        self.is_asked.store(true, Ordering::Relaxed);
    }
}
