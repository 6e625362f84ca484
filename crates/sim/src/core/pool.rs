//! The paged block pool of one engine: prefix cache and LRU free list over the same blocks.
//! Invariant: a block is in the free list exactly when no request refers to it; a block keeps its
//! hash while free, and loses it when it is handed out again (that is the eviction).
//!
//! Follows vLLM 0.32.0 `v1/core/block_pool.py`: block 0 is the null block and never used; blocks
//! are not deduplicated, so two requests that fill the same prefix at once store two copies, and
//! each copy is announced and removed by its own event.

use std::collections::HashMap;

use super::events::{Event, Medium};
use super::hash::BlockHash;

/// Index of a block; 0 is the null block.
pub type BlockId = u32;

/// A hash within a KV cache group.
pub type Key = (BlockHash, u32);

#[derive(Debug, Default)]
struct Block {
    refs: u32,
    key: Option<Key>,
    /// Weights that computed the content.
    weights: u64,
    prev: BlockId,
    next: BlockId,
}

/// Block pool; see the module.
#[derive(Debug)]
pub struct Pool {
    /// The null block doubles as the sentinel of the free list's ring.
    blocks: Vec<Block>,
    free: usize,
    cached: HashMap<Key, Vec<BlockId>>,
    events: Vec<Event>,
}

const NULL: BlockId = 0;

impl Pool {
    /// A pool of `count` blocks, one of which is the null block.
    #[must_use]
    pub fn new(count: u32) -> Self {
        let blocks = (0..count.max(2)).map(|_| Block::default()).collect();
        let mut pool = Self { blocks, free: 0, cached: HashMap::new(), events: Vec::new() };
        for id in 1..count.max(2) {
            pool.link_before(NULL, id);
        }
        pool
    }

    fn link_before(&mut self, next: BlockId, id: BlockId) {
        let prev = self.blocks[next as usize].prev;
        self.blocks[id as usize].prev = prev;
        self.blocks[id as usize].next = next;
        self.blocks[prev as usize].next = id;
        self.blocks[next as usize].prev = id;
        self.free += 1;
    }

    fn unlink(&mut self, id: BlockId) {
        let (prev, next) = (self.blocks[id as usize].prev, self.blocks[id as usize].next);
        self.blocks[prev as usize].next = next;
        self.blocks[next as usize].prev = prev;
        self.free -= 1;
    }

    /// Blocks that can be handed out.
    #[must_use]
    pub fn free_count(&self) -> usize {
        self.free
    }

    /// Blocks that requests hold.
    #[must_use]
    pub fn used_count(&self) -> usize {
        self.blocks.len() - 1 - self.free
    }

    /// Share of the pool in use, 0 to 1.
    #[must_use]
    pub fn usage(&self) -> f64 {
        self.used_count() as f64 / (self.blocks.len() - 1) as f64
    }

    /// The oldest copy of a cached block.
    #[must_use]
    pub fn cached(&self, key: &Key) -> Option<BlockId> {
        self.cached.get(key).and_then(|copies| copies.first().copied())
    }

    /// True when no request holds the block, so that using it takes it from the free list.
    #[must_use]
    pub fn is_free(&self, id: BlockId) -> bool {
        id != NULL && self.blocks[id as usize].refs == 0
    }

    /// Weights that computed a block.
    #[must_use]
    pub fn weights(&self, id: BlockId) -> u64 {
        self.blocks[id as usize].weights
    }

    /// Takes a reference on cached blocks.
    pub fn touch(&mut self, ids: &[BlockId]) {
        for &id in ids.iter().filter(|&&id| id != NULL) {
            if self.blocks[id as usize].refs == 0 {
                self.unlink(id);
            }
            self.blocks[id as usize].refs += 1;
        }
    }

    /// Hands out blocks from the head of the free list, evicting what they cached.
    /// The caller has checked `free_count`.
    pub fn allocate(&mut self, count: usize) -> Vec<BlockId> {
        assert!(count <= self.free, "allocation beyond the free list");
        (0..count)
            .map(|_| {
                let id = self.blocks[NULL as usize].next;
                self.unlink(id);
                self.evict(id);
                self.blocks[id as usize].refs = 1;
                id
            })
            .collect()
    }

    fn evict(&mut self, id: BlockId) {
        let Some(key) = self.blocks[id as usize].key.take() else { return };
        if let Some(copies) = self.cached.get_mut(&key) {
            copies.retain(|&copy| copy != id);
            if copies.is_empty() {
                self.cached.remove(&key);
            }
        }
        let (hash, group) = key;
        self.events.push(Event::Removed { hashes: vec![hash], medium: Medium::Gpu, group });
    }

    /// Drops references, first to be evicted first. Blocks without a hash go to the head of the
    /// free list, cached ones to its tail.
    pub fn release(&mut self, ordered: impl IntoIterator<Item = BlockId>) {
        let mut head = Vec::new();
        for id in ordered.into_iter().filter(|&id| id != NULL) {
            self.blocks[id as usize].refs -= 1;
            if self.blocks[id as usize].refs > 0 {
                continue;
            }
            if self.blocks[id as usize].key.is_some() {
                self.link_before(NULL, id);
            } else {
                head.push(id);
            }
        }
        for &id in head.iter().rev() {
            let first = self.blocks[NULL as usize].next;
            self.link_before(first, id);
        }
    }

    /// Makes a full block hittable. A block that has its hash already (a hit) is left alone.
    pub fn insert(&mut self, id: BlockId, key: Key, weights: u64) {
        let block = &mut self.blocks[id as usize];
        if block.key.is_some() {
            return;
        }
        block.key = Some(key);
        block.weights = weights;
        self.cached.entry(key).or_default().push(id);
    }

    /// Announces a change; the caller knows the request.
    pub fn announce(&mut self, event: Event) {
        self.events.push(event);
    }

    /// Forgets every hash and announces it; refused, without effect, while a block is in use.
    pub fn reset(&mut self) -> bool {
        if self.used_count() > 0 {
            return false;
        }
        self.cached.clear();
        for block in &mut self.blocks {
            block.key = None;
        }
        self.events.push(Event::Cleared);
        true
    }

    /// Events since the last call.
    pub fn take_events(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.events)
    }
}
