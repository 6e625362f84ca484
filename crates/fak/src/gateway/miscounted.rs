//! Prompts that an engine counted otherwise than fak: their tokens are not the engine's.
//!
//! Invariant: such a prompt is not matched again, and after two prompts of one kind none of that
//! kind is for a while, nor again at the first that follows; a worker's next life ends all of it.
//! The number of both is bounded; past it the oldest is forgotten, and is found out anew by its
//! next answer.

use std::collections::{HashMap, HashSet, VecDeque};
use std::hash::Hash;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::prompt::Source;

/// Prompts, and kinds, that are remembered.
const REMEMBERED_MAX: usize = 1 << 14;
/// Prompts of a kind after which none of it is matched.
const OF_A_KIND: usize = 2;
/// For how long none of a kind is matched: the engine's template may be right by then.
pub(super) const KIND_FOR: Duration = Duration::from_secs(10 * 60);

/// What was counted otherwise.
#[derive(Debug, Default)]
pub(super) struct Miscounted(Mutex<Entries>);

#[derive(Debug, Default)]
struct Entries {
    prompts: Remembered<u128, ()>,
    /// By their lives and shape.
    kinds: Remembered<(u64, u64), Kind>,
}

#[derive(Debug, Default)]
struct Kind {
    /// [Those](OF_A_KIND) counted otherwise first.
    prompts: HashSet<u128>,
    /// Until when it is not matched.
    until: Option<Instant>,
}

impl Kind {
    fn is_out(&self, now: Instant) -> bool {
        self.until.is_some_and(|until| until > now)
    }
}

impl Miscounted {
    /// Whether the prompt, or its kind, is not to be matched.
    pub(super) fn has(&self, source: Source, now: Instant) -> bool {
        // Whole after each insertion, whatever panicked elsewhere.
        let entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let kind = entries.kinds.by_key.get(&(source.lives, source.shape));
        entries.prompts.by_key.contains_key(&source.digest)
            || kind.is_some_and(|kind| kind.is_out(now))
    }

    /// Remembers a prompt; whether its kind is not matched from now on, and was before.
    pub(super) fn add(&self, source: Source, now: Instant) -> bool {
        let mut entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        entries.prompts.entry(source.digest);
        let kind = entries.kinds.entry((source.lives, source.shape));
        if kind.is_out(now) {
            return false;
        }
        if kind.prompts.len() < OF_A_KIND {
            kind.prompts.insert(source.digest);
        }
        let is_out = kind.prompts.len() == OF_A_KIND;
        if is_out {
            kind.until = Some(now + KIND_FOR);
        }
        is_out
    }
}

/// A map that forgets the oldest.
#[derive(Debug)]
pub(super) struct Remembered<K, V> {
    by_key: HashMap<K, V>,
    order: VecDeque<K>,
}

impl<K, V> Default for Remembered<K, V> {
    fn default() -> Self {
        Self { by_key: HashMap::new(), order: VecDeque::new() }
    }
}

impl<K: Copy + Eq + Hash, V: Default> Remembered<K, V> {
    pub(super) fn get(&self, key: &K) -> Option<&V> {
        self.by_key.get(key)
    }

    pub(super) fn entry(&mut self, key: K) -> &mut V {
        if !self.by_key.contains_key(&key) {
            if self.order.len() >= REMEMBERED_MAX
                && let Some(oldest) = self.order.pop_front()
            {
                self.by_key.remove(&oldest);
            }
            self.order.push_back(key);
        }
        self.by_key.entry(key).or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_is_poisoned_at_once_and_its_kind_after_two() {
        let miscounted = Miscounted::default();
        let (of, now) = (Source::new, Instant::now());
        assert!(!miscounted.add(of(1, 7), now));
        assert!(!miscounted.add(of(1, 7), now), "one prompt again");
        assert!(miscounted.has(of(1, 7), now));
        assert!(!miscounted.has(of(2, 7), now));
        assert!(miscounted.add(of(2, 7), now));
        assert!(miscounted.has(of(3, 7), now), "of the same kind");
        assert!(!miscounted.has(of(3, 8), now));
        assert!(!miscounted.add(of(3, 7), now), "it was told before");
    }

    #[test]
    fn a_kind_is_given_another_chance_after_ten_minutes_and_loses_it_at_the_first() {
        let miscounted = Miscounted::default();
        let (of, start) = (Source::new, Instant::now());
        miscounted.add(of(1, 7), start);
        assert!(miscounted.add(of(2, 7), start));
        let last = start + KIND_FOR - Duration::from_millis(1);
        assert!(!miscounted.add(of(3, 7), last), "in flight at the first");
        assert!(miscounted.has(of(4, 7), last));
        let later = start + KIND_FOR;
        assert!(!miscounted.has(of(4, 7), later));
        assert!(miscounted.has(of(1, 7), later), "a prompt that was counted so");
        assert!(miscounted.add(of(5, 7), later));
        assert!(miscounted.has(of(4, 7), later + KIND_FOR - Duration::from_millis(1)));
        assert!(!miscounted.has(of(4, 7), later + KIND_FOR));
    }

    #[test]
    fn another_life_begins_without_what_was_counted_in_the_one_before() {
        let miscounted = Miscounted::default();
        let (of, now) =
            (|digest, lives| Source { lives, ..Source::new(digest, 7) }, Instant::now());
        miscounted.add(of(1, 0), now);
        miscounted.add(of(2, 0), now);
        assert!(miscounted.has(of(3, 0), now) && !miscounted.has(of(4, 1), now));
        assert!(!miscounted.add(of(4, 1), now), "the first of its life");
    }

    #[test]
    fn the_oldest_is_forgotten_and_the_number_is_bounded() {
        let miscounted = Miscounted::default();
        let now = Instant::now();
        for n in 0..=REMEMBERED_MAX as u64 {
            miscounted.add(Source::new(u128::from(n), n), now);
        }
        assert!(!miscounted.has(Source::new(0, 0), now));
        assert!(miscounted.has(Source::new(1, 1), now));
        let entries = miscounted.0.lock().expect("whole");
        assert_eq!(entries.prompts.by_key.len(), REMEMBERED_MAX);
        assert_eq!(entries.kinds.order.len(), REMEMBERED_MAX);
    }
}
