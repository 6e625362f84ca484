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
