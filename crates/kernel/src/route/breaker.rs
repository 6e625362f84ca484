//! Whether a worker fails one request after the other, and when it is tried again.
//!
//! Pure: the time comes from the caller, in milliseconds of any clock that does not go back.
//! Invariant: one failure alone takes no worker out, a success brings it back at once, and while it
//! is out at most one request at a time tries it.

/// Failures in a row that take a worker out.
const FAILURES_MAX: u32 = 3;
/// How long it is out at first, in milliseconds; twice as long after each try that fails.
const REST_MS: u64 = 2_000;
/// And at most.
const REST_MS_MAX: u64 = 60_000;
/// How long a try keeps others away, in milliseconds: an answer may take minutes.
const TRIAL_MS: u64 = 10_000;

/// Whether requests may go to a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fitness {
    /// It does not fail.
    Sound,
    /// It failed, and one request may try it.
    Trial,
    /// It failed just now, or is being tried.
    Out,
}

/// Follows a worker's failures, of one kind of request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Breaker {
    /// In a row.
    failures: u32,
    /// Set while it is out.
    out: Option<Out>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Out {
    /// When a request may try it.
    until: u64,
    /// How long it was out the last time.
    rest: u64,
    is_tried: bool,
}

impl Breaker {
    /// Whether requests may go there at `now`.
    #[must_use]
    pub fn fitness(&self, now: u64) -> Fitness {
        match self.out {
            None => Fitness::Sound,
            Some(out) if out.until <= now => Fitness::Trial,
            Some(_) => Fitness::Out,
        }
    }

    /// A request goes there; whether it is the one that tries it. Its end is to be told, as success
    /// or failure or by [`abandoned`](Self::abandoned).
    pub fn enter(&mut self, now: u64) -> bool {
        let Some(out) = self.out.as_mut().filter(|out| out.until <= now) else { return false };
        (out.is_tried, out.until) = (true, now + TRIAL_MS);
        true
    }

    /// A request failed for the worker's sake; whether that takes it out. What was sent before it
    /// went out tells nothing new.
    pub fn failed(&mut self, now: u64, is_trial: bool) -> bool {
        self.failures = self.failures.saturating_add(1);
        let rest = match self.out {
            None if self.failures < FAILURES_MAX => return false,
            None => REST_MS,
            Some(out) if is_trial => (out.rest * 2).min(REST_MS_MAX),
            Some(_) => return false,
        };
        self.out = Some(Out { until: now + rest, rest, is_tried: false });
        true
    }

    /// A request was answered.
    pub fn succeeded(&mut self) {
        *self = Self::default();
    }

    /// The request that tried it ended and says nothing of the worker: another may try at once.
    pub fn abandoned(&mut self, now: u64) {
        if let Some(out) = self.out.as_mut().filter(|out| out.is_tried) {
            (out.is_tried, out.until) = (false, now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn out() -> Breaker {
        let mut breaker = Breaker::default();
        assert!(!breaker.failed(0, false));
        assert!(!breaker.failed(0, false));
        assert_eq!(breaker.fitness(0), Fitness::Sound, "two failures take nothing out");
        assert!(breaker.failed(0, false));
        breaker
    }

    #[test]
    fn failures_in_a_row_take_a_worker_out_and_a_success_among_them_does_not_let_them() {
        assert_eq!(out().fitness(0), Fitness::Out);
        let mut breaker = Breaker::default();
        for _ in 0..10 {
            assert!(!breaker.failed(0, false));
            assert!(!breaker.failed(0, false));
            breaker.succeeded();
        }
        assert_eq!(breaker.fitness(0), Fitness::Sound);
    }

    #[test]
    fn one_request_tries_a_worker_that_was_out_for_a_while() {
        let mut breaker = out();
        assert_eq!(breaker.fitness(REST_MS - 1), Fitness::Out);
        assert!(!breaker.enter(REST_MS - 1), "where all are out one is chosen all the same");
        assert_eq!(breaker.fitness(REST_MS), Fitness::Trial);
        assert!(breaker.enter(REST_MS));
        assert_eq!(breaker.fitness(REST_MS), Fitness::Out);
        assert!(!breaker.enter(REST_MS));
        breaker.succeeded();
        assert_eq!(breaker.fitness(REST_MS), Fitness::Sound);
        assert!(!breaker.failed(REST_MS, false), "it counts from nothing again");
    }

    #[test]
    fn each_failed_try_keeps_it_out_for_twice_as_long_and_never_for_good() {
        let (mut breaker, mut now, mut rest) = (out(), 0, REST_MS);
        for _ in 0..20 {
            assert_eq!(breaker.fitness(now + rest - 1), Fitness::Out);
            now += rest;
            assert!(breaker.enter(now));
            assert!(!breaker.failed(now, false), "sent before it went out");
            assert!(breaker.failed(now, true));
            rest = (rest * 2).min(REST_MS_MAX);
        }
        assert_eq!(breaker.fitness(now + REST_MS_MAX), Fitness::Trial);
    }

    #[test]
    fn a_try_that_says_nothing_or_does_not_end_lets_another_try() {
        let mut breaker = out();
        assert!(breaker.enter(REST_MS));
        breaker.abandoned(REST_MS + 1);
        assert!(breaker.enter(REST_MS + 1));
        assert_eq!(breaker.fitness(REST_MS + TRIAL_MS), Fitness::Out);
        assert_eq!(breaker.fitness(REST_MS + 1 + TRIAL_MS), Fitness::Trial);
        let mut fresh = out();
        fresh.abandoned(0);
        assert_eq!(fresh.fitness(0), Fitness::Out, "nothing tried it");
    }
}
