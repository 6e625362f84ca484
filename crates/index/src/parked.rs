//! Blocks whose parent is not known yet.
//!
//! Invariant: bounded; the oldest goes first. A parked block names nothing, so it is in no prefix.

use std::collections::{BTreeMap, BTreeSet};

use crate::key::{Content, DigestMap, HashKey};

/// The parked blocks of one rank.
#[derive(Default)]
pub(crate) struct Parked {
    blocks: DigestMap<HashKey, (Orphan, u64)>,
    /// Parent and child.
    edges: BTreeSet<(HashKey, HashKey)>,
    by_age: BTreeMap<u64, HashKey>,
    parked_total: u64,
}

/// A block without the blocks before it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Orphan {
    pub(crate) parent: HashKey,
    pub(crate) content: Content,
}

impl Parked {
    pub(crate) fn get(&self, hash: HashKey) -> Option<Orphan> {
        self.blocks.get(&hash).map(|(orphan, _)| *orphan)
    }

    /// Parks a block that is not parked. Gives the number of older ones dropped for it; `None`
    /// where there is no room at all.
    pub(crate) fn insert(
        &mut self,
        hash: HashKey,
        orphan: Orphan,
        parked_max: usize,
    ) -> Option<u32> {
        let mut dropped = 0;
        while self.blocks.len() >= parked_max {
            let (_, oldest) = self.by_age.first_key_value()?;
            self.remove(*oldest);
            dropped += 1;
        }
        self.blocks.insert(hash, (orphan, self.parked_total));
        self.by_age.insert(self.parked_total, hash);
        self.edges.insert((orphan.parent, hash));
        self.parked_total += 1;
        Some(dropped)
    }

    pub(crate) fn remove(&mut self, hash: HashKey) {
        if let Some((orphan, age)) = self.blocks.remove(&hash) {
            self.by_age.remove(&age);
            self.edges.remove(&(orphan.parent, hash));
        }
    }

    /// Takes out the blocks that wait for `parent`.
    pub(crate) fn take_children(&mut self, parent: HashKey) -> Vec<(HashKey, Content)> {
        let edges = self.edges.range((parent, HashKey::MIN)..=(parent, HashKey::MAX));
        let children: Vec<_> = edges.map(|(_, child)| *child).collect();
        let take = |child| {
            let content = self.get(child)?.content;
            self.remove(child);
            Some((child, content))
        };
        children.into_iter().filter_map(take).collect()
    }

    pub(crate) fn len(&self) -> usize {
        self.blocks.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::EngineHash;
    use crate::key::Keys;

    fn hash(number: u64) -> HashKey {
        Keys { seed: 1 }.hash(&EngineHash::Int(number))
    }

    #[test]
    fn nothing_is_kept_of_a_block_that_left() {
        let content = Keys { seed: 1 }.content(&mut Vec::new(), &[1], std::iter::empty());
        let orphan = |parent| Orphan { parent: hash(parent), content };
        let mut parked = Parked::default();
        assert_eq!(parked.insert(hash(1), orphan(100), 0), None);
        // Dropped as the oldest, removed, and taken by its parent.
        assert_eq!(parked.insert(hash(1), orphan(100), 2), Some(0));
        assert_eq!(parked.insert(hash(2), orphan(100), 2), Some(0));
        assert_eq!(parked.insert(hash(3), orphan(200), 2), Some(1));
        assert!(parked.get(hash(1)).is_none());
        parked.remove(hash(2));
        assert_eq!(parked.take_children(hash(100)), []);
        assert_eq!(parked.take_children(hash(200)), [(hash(3), content)]);
        assert_eq!((parked.len(), parked.edges.len(), parked.by_age.len()), (0, 0, 0));
    }
}
