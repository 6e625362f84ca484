//! Does one engine answer at a worker's address, or do several take turns?
//!
//! A life of a process that ended does not come back. Where one does (A, then B, then A), two
//! engines are behind one address, as behind a cluster's service: what was learnt and done through
//! it is of one of them, and nobody can say which. Invariant: that is no restart, however often it
//! is seen, and nothing is believed of such a worker.

use std::collections::VecDeque;
use std::sync::Arc;

/// Lives that are remembered: more replicas than stand behind one address by mistake.
const LIVES_MAX: usize = 16;
/// Looks in a row at one and the same life before it counts as the only one that is left.
const QUIET_LOOKS: u32 = 600;

/// The lives seen at one address, and whether they take turns.
#[derive(Debug, Default)]
pub(super) struct Lives {
    /// The last seen is the last of them.
    seen: VecDeque<Arc<str>>,
    /// Looks that are left until the turns are over.
    turns: Option<u32>,
}

impl Lives {
    /// Takes in a look. True where it is the first that shows several engines.
    pub(super) fn see(&mut self, incarnation: Option<Arc<str>>) -> bool {
        let Some(now) = incarnation else { return false };
        if self.seen.back() == Some(&now) {
            self.turns = self.turns.and_then(|left| left.checked_sub(1));
            return false;
        }
        let was_there = self.seen.iter().any(|before| *before == now);
        self.seen.retain(|before| *before != now);
        if self.seen.len() == LIVES_MAX {
            self.seen.pop_front();
        }
        self.seen.push_back(now);
        let is_news = was_there && self.turns.is_none();
        if was_there || self.turns.is_some() {
            self.turns = Some(QUIET_LOOKS);
        }
        is_news
    }

    /// Whether several engines take turns.
    pub(super) fn take_turns(&self) -> bool {
        self.turns.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn see(lives: &mut Lives, life: &str) -> (bool, bool) {
        (lives.see(Some(life.into())), lives.take_turns())
    }

    #[test]
    fn a_life_that_comes_back_shows_a_second_engine_and_restarts_do_not() {
        let mut lives = Lives::default();
        for life in ["a", "a", "b", "c"] {
            assert_eq!(see(&mut lives, life), (false, false), "{life}");
        }
        assert!(!lives.see(None));
        assert_eq!(see(&mut lives, "a"), (true, true));
        assert_eq!(see(&mut lives, "c"), (false, true), "it was told");
        assert_eq!(see(&mut lives, "d"), (false, true), "a third one");
    }

    #[test]
    fn an_address_has_one_engine_again_once_only_one_was_seen_for_long() {
        let mut lives = Lives::default();
        for life in ["a", "b", "a"] {
            see(&mut lives, life);
        }
        for look in 0..QUIET_LOOKS {
            assert!(see(&mut lives, "a").1, "{look}");
        }
        assert_eq!(see(&mut lives, "a"), (false, false));
    }
}
