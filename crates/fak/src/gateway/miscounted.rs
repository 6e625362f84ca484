//! Prompts that an engine counted otherwise than fak: their tokens are not the engine's.
//!
//! Invariant: such a prompt is not matched again, and after two prompts of one kind none of that
//! kind is, until a worker begins another life. The number of both is bounded; past it the oldest
//! is forgotten, and is found out anew by its next answer.

use std::collections::{HashMap, HashSet, VecDeque};
use std::hash::Hash;
use std::sync::{Mutex, PoisonError};

use super::prompt::Source;

/// Prompts, and kinds, that are remembered.
const REMEMBERED_MAX: usize = 1 << 14;
/// Prompts of a kind after which none of it is matched.
const OF_A_KIND: usize = 2;

/// What was counted otherwise.
#[derive(Debug, Default)]
pub(super) struct Miscounted(Mutex<Entries>);

#[derive(Debug, Default)]
struct Entries {
    prompts: Remembered<u128, ()>,
    /// By their lives and shape.
    kinds: Remembered<(u64, u64), HashSet<u128>>,
}

impl Miscounted {
    /// Whether the prompt, or its kind, is not to be matched.
    pub(super) fn has(&self, source: Source) -> bool {
        // Whole after each insertion, whatever panicked elsewhere.
        let entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let kind = entries.kinds.by_key.get(&(source.lives, source.shape));
        entries.prompts.by_key.contains_key(&source.digest)
            || kind.is_some_and(|prompts| prompts.len() >= OF_A_KIND)
    }

    /// Remembers a prompt; whether its kind is not matched from now on, and was before.
    pub(super) fn add(&self, source: Source) -> bool {
        let mut entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        entries.prompts.entry(source.digest);
        let prompts = entries.kinds.entry((source.lives, source.shape));
        let before = prompts.len();
        if before < OF_A_KIND {
            prompts.insert(source.digest);
        }
        before < OF_A_KIND && prompts.len() == OF_A_KIND
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
        let of = |digest, shape| Source::new(digest, shape);
        assert!(!miscounted.add(of(1, 7)));
        assert!(!miscounted.add(of(1, 7)), "one prompt again");
        assert!(miscounted.has(of(1, 7)));
        assert!(!miscounted.has(of(2, 7)));
        assert!(miscounted.add(of(2, 7)));
        assert!(miscounted.has(of(3, 7)), "of the same kind");
        assert!(!miscounted.has(of(3, 8)));
        assert!(!miscounted.add(of(3, 7)), "it was told before");
    }

    #[test]
    fn the_oldest_is_forgotten_and_the_number_is_bounded() {
        let miscounted = Miscounted::default();
        for n in 0..=REMEMBERED_MAX as u64 {
            miscounted.add(Source::new(u128::from(n), n));
        }
        assert!(!miscounted.has(Source::new(0, 0)));
        assert!(miscounted.has(Source::new(1, 1)));
        let entries = miscounted.0.lock().expect("whole");
        assert_eq!(entries.prompts.by_key.len(), REMEMBERED_MAX);
        assert_eq!(entries.kinds.order.len(), REMEMBERED_MAX);
    }
}
