//! Claims that an engine contradicted, and how far the doubt goes.
//!
//! Invariant: one contradiction costs its prompt's blocks and, for a while, the claims of its kind
//! of request; a rank's beliefs are in doubt as a whole only where a second prompt contradicts them
//! soon, and that its kind of request does not explain: it is of another kind, or of one that was
//! given another chance.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use fak_index::RankId;
use tokio::time::Instant;

use super::miscounted::Remembered;
use super::prompt::Source;

/// For how long nothing of a kind is claimed.
const KIND_FOR: Duration = Duration::from_secs(60);
/// How soon a second contradiction puts the whole rank in doubt.
const SECOND_WITHIN: Duration = Duration::from_secs(5 * 60);

/// What was contradicted lately.
#[derive(Debug, Default)]
pub(super) struct Contradicted(Mutex<Entries>);

#[derive(Debug, Default)]
struct Entries {
    /// Until when nothing of a kind is claimed.
    kinds: Remembered<u64, Option<Instant>>,
    /// The last contradiction of each rank.
    ranks: HashMap<RankId, (Instant, Source)>,
}

impl Contradicted {
    /// Whether nothing of a kind is claimed now.
    pub(super) fn has(&self, shape: u64, now: Instant) -> bool {
        // Whole after each insertion, whatever panicked elsewhere.
        let entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        entries.kinds.get(&shape).copied().flatten().is_some_and(|until| until > now)
    }

    /// A claim on `rank` was contradicted; whether all that is believed of it is in doubt.
    pub(super) fn add(&self, rank: RankId, source: Source, now: Instant) -> bool {
        let mut entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        entries.ranks.retain(|_, (at, _)| now.duration_since(*at) < SECOND_WITHIN);
        let until = entries.kinds.entry(source.shape);
        let is_excused = until.is_some_and(|until| until > now);
        *until = Some(now + KIND_FOR);
        let last = entries.ranks.insert(rank, (now, source));
        last.is_some_and(|(_, last)| {
            let is_other = last.digest != source.digest;
            is_other && (last.shape != source.shape || !is_excused)
        })
    }
}

#[cfg(test)]
mod tests {
    use fak_index::{Index, Limits, RankOptions};

    use super::*;

    #[test]
    fn a_rank_is_in_doubt_only_at_a_second_prompt_that_its_kind_does_not_explain() {
        let index = Index::new(7, Limits::default());
        let (rank, other) =
            (index.add_rank(RankOptions::default()), index.add_rank(RankOptions::default()));
        let of = Source::new;
        let start = Instant::now();
        let contradicted = Contradicted::default();
        assert!(!contradicted.add(rank, of(1, 7), start));
        assert!(contradicted.has(7, start) && !contradicted.has(8, start));
        assert!(!contradicted.add(rank, of(2, 7), start), "in flight at the first");
        assert!(!contradicted.add(rank, of(2, 8), start), "one prompt, whatever its kind");
        assert!(contradicted.add(rank, of(3, 7), start), "two kinds");
        assert!(!contradicted.add(other, of(4, 8), start), "of another rank");
        let later = start + KIND_FOR;
        assert!(!contradicted.has(7, later));
        assert!(contradicted.add(rank, of(5, 7), later), "a kind that had another chance");
        assert!(!contradicted.add(rank, of(6, 8), later + SECOND_WITHIN), "long after");
    }
}
