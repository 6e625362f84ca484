//! Whether what is claimed of a worker is borne out by what its engine then reports.
//!
//! Invariant: an audit that cannot speak is no acquittal. Where too many of the last claims were
//! not borne out, nothing is claimed for a while, twice as long each time, until a whole window of
//! claims is. And while one that was too high is not explained, nothing is.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Claims that are looked at together.
const WINDOW: usize = 64;
/// Claims from which on they are judged.
const JUDGED_FROM: usize = 32;
/// More than one in so many that are not borne out cost the credit. An engine that evicts all the
/// time loses one in 25 in flight (hunts on the simulator, observed).
const ONE_IN: usize = 8;
/// For how long nothing is claimed at first, and at most.
const WITHHELD_FOR: Duration = Duration::from_secs(60);
const WITHHELD_MAX: Duration = Duration::from_secs(60 * 60);

/// What became of a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The engine reported what bears it out, or contradicts it.
    Audited,
    /// The engine did not say, though it should have.
    Unaudited,
    /// It was wrong, and an event that came after it explains that.
    Lost,
}

/// One worker's credit; clones are the same.
#[derive(Clone, Debug, Default)]
pub struct Credit(Arc<Mutex<Account>>);

#[derive(Debug, Default)]
struct Account {
    window: VecDeque<Outcome>,
    /// Times in a row that it was lost.
    losses: u32,
    withheld: Option<Withheld>,
    /// Claims that were too high, and of which nothing tells why yet.
    unexplained: usize,
}

/// Nothing is claimed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Withheld {
    until: Instant,
    /// Of the claims that cost the credit, those of which the engine did not say.
    pub unaudited: usize,
    /// Those that were lost.
    pub lost: usize,
    /// All claims that were looked at.
    pub of: usize,
}

impl Withheld {
    /// For how long, from `now` on.
    #[must_use]
    pub fn left(&self, now: Instant) -> Duration {
        self.until.saturating_duration_since(now)
    }
}

impl Credit {
    /// Takes in what became of a claim; what it cost, if it cost the credit.
    pub fn take(&self, outcome: Outcome, now: Instant) -> Option<Withheld> {
        let mut account = self.lock();
        if account.withheld.is_some_and(|withheld| withheld.until > now) {
            // It was made before.
            return None;
        }
        account.withheld = None;
        if account.window.len() == WINDOW {
            account.window.pop_front();
        }
        account.window.push_back(outcome);
        let of = account.window.len();
        let count = |which| account.window.iter().filter(|outcome| **outcome == which).count();
        let (unaudited, lost) = (count(Outcome::Unaudited), count(Outcome::Lost));
        if of < JUDGED_FROM || (unaudited + lost) * ONE_IN <= of {
            if of == WINDOW {
                account.losses = 0;
            }
            return None;
        }
        let withheld_for = WITHHELD_FOR * 2_u32.pow(account.losses.min(6));
        let until = now + withheld_for.min(WITHHELD_MAX);
        let withheld = Withheld { until, unaudited, lost, of };
        account.losses = account.losses.saturating_add(1);
        account.withheld = Some(withheld);
        account.window.clear();
        Some(withheld)
    }

    /// Why nothing is to be claimed now, where nothing is.
    #[must_use]
    pub fn withheld(&self, now: Instant) -> Option<Withheld> {
        self.lock().withheld.filter(|withheld| withheld.until > now)
    }

    /// A claim was too high, and nothing tells why: whatever hides it may hide more.
    pub fn suspect(&self) {
        self.lock().unexplained += 1;
    }

    /// One that was [suspected](Self::suspect) is judged.
    pub fn judged(&self) {
        let mut account = self.lock();
        account.unexplained = account.unexplained.saturating_sub(1);
    }

    /// Whether nothing is to be claimed now.
    #[must_use]
    pub fn is_withheld(&self, now: Instant) -> bool {
        self.withheld(now).is_some() || self.lock().unexplained > 0
    }

    /// Whether it was lost, and not yet won back.
    #[must_use]
    pub fn is_on_trial(&self) -> bool {
        self.lock().losses > 0
    }

    fn lock(&self) -> MutexGuard<'_, Account> {
        // Whole after each step, whatever panicked elsewhere.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn claims_that_are_not_borne_out_beyond_a_small_share_cost_the_credit() {
        let now = Instant::now();
        for bad in [Outcome::Unaudited, Outcome::Lost] {
            let credit = Credit::default();
            // One in eight is a small share.
            for n in 0..200 {
                let outcome = if n % 8 == 7 { bad } else { Outcome::Audited };
                assert_eq!(credit.take(outcome, now), None, "{n}");
            }
            let lost = (0..WINDOW).find_map(|_| credit.take(bad, now)).expect("more than that");
            assert_eq!(credit.withheld(now), Some(lost));
            assert_eq!(lost.left(now), WITHHELD_FOR);
            assert_eq!(credit.withheld(now + WITHHELD_FOR), None);
        }
    }

    #[test]
    fn an_engine_that_never_says_is_trusted_less_and_less() {
        let credit = Credit::default();
        let mut now = Instant::now();
        for times in [1, 2, 4, 8, 16, 32, 60, 60] {
            let claims: Vec<_> =
                (0..JUDGED_FROM).map(|_| credit.take(Outcome::Unaudited, now)).collect();
            let lost = claims.into_iter().next_back().flatten().expect("the last one costs it");
            assert_eq!(lost.left(now), WITHHELD_FOR * times);
            assert_eq!(credit.take(Outcome::Unaudited, now), None, "told once");
            now += lost.left(now);
            assert_eq!(credit.withheld(now), None);
        }
        // A whole window is borne out.
        assert!(credit.is_on_trial());
        (0..WINDOW).for_each(|_| assert_eq!(credit.take(Outcome::Audited, now), None));
        assert!(!credit.is_on_trial());
    }
}
