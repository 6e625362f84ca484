//! Whose life is it that a look shows: does one engine answer at a worker's address, or do several
//! take turns?
//!
//! A life of a process that ended does not come back. Where one does (A, then B, then A), two
//! engines are behind one address, as behind a cluster's service: what was learnt and done through
//! it is of one of them, and nobody can say which. Invariant: that is no restart, however often it
//! is seen, and nothing is believed of such a worker.

use std::collections::VecDeque;
use std::sync::Arc;

use fak_kernel::rank::Event;

use super::owner::Owner;
use super::probe::Look;

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

impl Owner {
    /// Whether a look is of another life than the one before.
    pub(super) fn is_other_life(&self, look: &Look) -> bool {
        let (known, seen) = (&self.state.incarnation, look.incarnation());
        known.is_some() && seen.is_some() && *known != seen
    }

    /// Whether it may be, though nothing names it: a rank has another connection, which may be to
    /// another process.
    pub(super) fn may_be_other_life(&mut self, look: &Look) -> bool {
        let mut has_new = false;
        for (rank, followed) in self.ranks.iter().zip(&mut self.followed) {
            has_new |= followed.sees_new_connection(rank);
        }
        has_new && look.incarnation().is_none()
    }

    /// Tells the ranks whether the look names the engine's life: where it does not, another engine
    /// may answer from here on.
    pub(super) async fn tell_life(&mut self, look: &Look) {
        let is_told = look.is_reachable() && look.incarnation().is_some();
        for (rank, followed) in self.ranks.iter().zip(&mut self.followed) {
            if followed.is_life_told != is_told {
                followed.is_life_told = is_told;
                // A stream that has ended believes nothing any more.
                let _ = rank.tell(Event::Life { is_told }).await;
            }
        }
        if look.is_reachable() && self.state.is_life_told != Some(is_told) {
            self.state.is_life_told = Some(is_told);
            if let Some(why) = self.state.life_untold() {
                tracing::warn!(worker = %self.worker.id, "{why}");
            }
        }
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
