//! Is a rank blind: does its engine look prompts up in its cache while no event of it is heard?
//!
//! Routing on events is configured on the engine and on fak apart, and where they do not meet
//! nothing fails: everything is just always cold. Invariant: silence alone is not blindness, since
//! an idle engine is silent too; the engine's own counter has to move.

use std::time::{Duration, Instant};

/// Tokens looked up without an event before a rank is called blind. Prompts shorter than a block
/// store nothing, so a few of them prove nothing.
const TOKENS_MIN: f64 = 500.0;

/// Why it may be, for the log: what to look at, the likeliest first.
pub const CAUSES: &str = "events off or at another port (--kv-events-config), a topic that is not \
     subscribed to, the prefix cache off, or prompts that are all shorter than a block";

/// One rank's watch.
#[derive(Clone, Copy, Debug, Default)]
pub struct Blindness {
    heard: Option<Heard>,
}

#[derive(Clone, Copy, Debug)]
struct Heard {
    /// The last batch then.
    last_seq: Option<u64>,
    /// The counter then.
    queries: f64,
    at: Instant,
}

impl Blindness {
    /// Takes in a look at a rank: `queries` is `vllm:prefix_cache_queries_total` in tokens,
    /// `last_seq` the last batch that was folded. True once the counter has moved for `patience`
    /// with nothing heard. An engine that does not tell the counter is never called blind.
    pub fn see(
        &mut self,
        queries: Option<f64>,
        last_seq: Option<u64>,
        now: Instant,
        patience: Duration,
    ) -> bool {
        let Some(queries) = queries else { return false };
        match self.heard {
            // A counter that went back is another life's.
            Some(heard) if heard.last_seq == last_seq && queries >= heard.queries => {
                let moved = queries - heard.queries >= TOKENS_MIN;
                moved && now.duration_since(heard.at) >= patience
            }
            _ => {
                self.heard = Some(Heard { last_seq, queries, at: now });
                false
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    #[test]
    fn lookups_without_an_event_for_a_while_make_a_rank_blind() {
        let (mut rank, start) = (Blindness::default(), Instant::now());
        let mut at = |s, queries, seq| {
            rank.see(Some(queries), seq, start + Duration::from_secs(s), PATIENCE)
        };
        assert!(!at(0, 0.0, None));
        assert!(!at(59, 500.0, None), "not yet");
        assert!(at(60, 500.0, None));
        assert!(!at(61, 600.0, Some(0)), "an event was heard");
        assert!(!at(130, 700.0, Some(0)), "too few tokens to tell");
    }

    #[test]
    fn of_two_ranks_the_one_that_is_not_heard_is_blind() {
        let (mut ranks, start) = ([Blindness::default(); 2], Instant::now());
        let mut see = |rank: usize, s, queries, seq| {
            ranks[rank].see(Some(queries), seq, start + Duration::from_secs(s), PATIENCE)
        };
        for (rank, seq) in [(0, Some(3)), (1, None)] {
            assert!(!see(rank, 0, 0.0, seq));
        }
        assert!(!see(0, 60, 5_000.0, Some(9)));
        assert!(see(1, 60, 5_000.0, None));
    }

    #[test]
    fn an_idle_rank_and_one_that_tells_no_counter_are_not_blind() {
        let (mut rank, start) = (Blindness::default(), Instant::now());
        for s in [0, 100, 1000] {
            let now = start + Duration::from_secs(s);
            assert!(!rank.see(Some(4_000.0), None, now, PATIENCE));
            assert!(!Blindness::default().see(None, None, now, PATIENCE));
        }
    }
}
