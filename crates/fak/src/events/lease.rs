//! Until when does what is believed of a rank count, by the clock?
//!
//! A rank's task suspends beliefs when what they rest on is over, but it may not get to it: a
//! process that was stopped, a suspended machine, an executor that is blocked. Invariant: whoever
//! reads beliefs asks the clock himself, so that none outlive their time for want of a task's turn.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use tokio::time::Instant;

/// A moment by two clocks: the steady one may stand still while a machine is suspended, and the
/// calendar's may be set.
#[derive(Clone, Copy, Debug)]
pub(super) struct Moment {
    pub(super) steady: Instant,
    pub(super) calendar: SystemTime,
}

impl Moment {
    pub(super) fn now() -> Self {
        Self { steady: Instant::now(), calendar: SystemTime::now() }
    }

    /// What passed since `earlier`, by the clock that shows more.
    pub(super) fn since(self, earlier: Self) -> Duration {
        // One that was set back shows nothing.
        let by_calendar = self.calendar.duration_since(earlier.calendar).unwrap_or_default();
        self.steady.saturating_duration_since(earlier.steady).max(by_calendar)
    }

    /// The moment so long before.
    pub(super) fn before(self, passed: Duration) -> Self {
        let calendar = self.calendar.checked_sub(passed).unwrap_or(self.calendar);
        Self { steady: self.steady.checked_sub(passed).unwrap_or(self.steady), calendar }
    }
}

/// Between the task of one rank and those who read what it wrote.
#[derive(Debug)]
pub(super) struct Lease {
    /// Since when it holds, and for how long.
    term: Mutex<(Moment, Duration)>,
    /// Somebody read since the task looked last.
    is_asked: AtomicBool,
}

impl Lease {
    /// One that is over.
    pub(super) fn over() -> Self {
        let term = Mutex::new((Moment::now(), Duration::ZERO));
        Self { term, is_asked: AtomicBool::new(false) }
    }

    /// It holds for so long from then on, and no longer.
    pub(super) fn renew(&self, from: Moment, lasts: Duration) {
        // Whole after each change, whatever panicked elsewhere.
        *self.term.lock().unwrap_or_else(PoisonError::into_inner) = (from, lasts);
    }

    /// Whether somebody read since this was called last.
    pub(super) fn was_asked(&self) -> bool {
        self.is_asked.swap(false, Ordering::Relaxed)
    }

    fn holds_at(&self, now: Moment) -> bool {
        let (from, lasts) = *self.term.lock().unwrap_or_else(PoisonError::into_inner);
        now.since(from) < lasts
    }
}

impl fak_index::Lease for Lease {
    fn holds(&self) -> bool {
        self.holds_at(Moment::now())
    }

    fn asked(&self) {
        self.is_asked.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_lease_ends_by_whichever_clock_shows_that_its_time_is_over() {
        let (lease, from) = (Lease::over(), Moment::now());
        assert!(!lease.holds_at(from));
        lease.renew(from, SECOND);
        let later = |steady, calendar| Moment {
            steady: from.steady + steady,
            calendar: from.calendar + calendar,
        };
        let nearly = SECOND - Duration::from_millis(1);
        assert!(lease.holds_at(later(nearly, nearly)));
        assert!(!lease.holds_at(later(SECOND, nearly)), "the calendar's clock was set back");
        assert!(!lease.holds_at(later(nearly, SECOND)), "the machine was suspended");
        let set_back = Moment { calendar: from.calendar - SECOND, ..from };
        assert!(lease.holds_at(set_back));
        let before = later(SECOND, SECOND).before(SECOND);
        assert_eq!((before.since(from), from.since(before)), (Duration::ZERO, Duration::ZERO));
    }
}
