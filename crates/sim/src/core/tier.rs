//! A connector's tier outside the engine: keyed chunks of one block or several, with LRU eviction.
//! Invariant: a chunk can be hit only when its store has completed, and is never evicted while a
//! store or a load uses it.
//!
//! Follows vLLM 0.32.0 `v1/kv_offload/cpu/manager.py` and `policies/lru.py`: finishing a request
//! makes its chunks recent, the prompt's head most of all. `reset` clears chunks and not the
//! pending events, so an event of before can be published after the clear: the engine's quirk.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::events::{Event, Medium, Stored};
use super::pool::Key;

#[derive(Debug)]
struct Chunk {
    ready: bool,
    pins: u32,
    rank: u64,
    weights: u64,
    /// What a self-describing event says of it.
    described: Option<Box<Stored>>,
}

/// Answer of a lookup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lookup {
    /// Not there.
    Miss,
    /// Being stored: the asking request is put off.
    Pending,
    /// Can be loaded.
    Hit,
}

/// A tier; see the module.
#[derive(Debug)]
pub struct Tier {
    capacity: usize,
    chunks: HashMap<Key, Chunk>,
    /// Evictable chunks by recency.
    idle: BTreeMap<u64, Key>,
    next_rank: u64,
    /// None: this tier announces nothing.
    events: Option<Vec<Event>>,
    /// Tokens a block that host-tier events carry: 0 since vLLM 0.20.2.
    event_block_size: usize,
    held_back: bool,
}

impl Tier {
    /// A host tier of `capacity` chunks that announces its changes.
    #[must_use]
    pub fn host(capacity: usize, event_block_size: usize) -> Self {
        Self { events: Some(Vec::new()), event_block_size, ..Self::remote(capacity) }
    }

    /// A shared store that announces nothing.
    #[must_use]
    pub fn remote(capacity: usize) -> Self {
        Self {
            capacity,
            chunks: HashMap::new(),
            idle: BTreeMap::new(),
            next_rank: 0,
            events: None,
            event_block_size: 0,
            held_back: false,
        }
    }

    /// Whether a chunk can be loaded.
    #[must_use]
    pub fn lookup(&self, key: &Key) -> Lookup {
        match self.chunks.get(key) {
            None => Lookup::Miss,
            Some(chunk) if chunk.ready => Lookup::Hit,
            Some(_) => Lookup::Pending,
        }
    }

    /// Weights that computed a chunk.
    #[must_use]
    pub fn weights(&self, key: &Key) -> Option<u64> {
        self.chunks.get(key).map(|chunk| chunk.weights)
    }

    /// Share of the tier that transfers use, 0 to 1: idle chunks count as free, which is why the
    /// real gauge reads 0 with stored blocks (vLLM 0.32.0, observed).
    #[must_use]
    pub fn usage(&self) -> f64 {
        (self.chunks.len() - self.idle.len()) as f64 / self.capacity.max(1) as f64
    }

    /// Reserves chunks for what is not there yet, evicting idle ones. Nothing at all is stored
    /// when room cannot be made. Answers the keys to store.
    pub fn prepare_store(&mut self, keys: &[(Key, u64)]) -> Option<Vec<Key>> {
        let fresh: Vec<(Key, u64)> =
            keys.iter().filter(|(key, _)| !self.chunks.contains_key(key)).copied().collect();
        let excess = (self.chunks.len() + fresh.len()).saturating_sub(self.capacity);
        if excess > 0 {
            self.evict(excess, keys)?;
        }
        for &(key, weights) in &fresh {
            let rank = self.new_rank();
            let chunk = Chunk { ready: false, pins: 0, rank, weights, described: None };
            self.chunks.insert(key, chunk);
        }
        Some(fresh.into_iter().map(|(key, _)| key).collect())
    }

    /// Has the events of a chunk that is being stored tell of its blocks.
    pub fn describe(&mut self, key: &Key, tell: impl FnOnce() -> Stored) {
        let chunk = self.chunks.get_mut(key).filter(|chunk| chunk.described.is_none());
        if let Some(chunk) = chunk {
            chunk.described = Some(Box::new(tell()));
        }
    }

    fn evict(&mut self, count: usize, protected: &[(Key, u64)]) -> Option<()> {
        let protected: HashSet<&Key> = protected.iter().map(|(key, _)| key).collect();
        let victims: Vec<(u64, Key)> = self
            .idle
            .iter()
            .filter(|(_, key)| !protected.contains(key))
            .take(count)
            .map(|(rank, key)| (*rank, *key))
            .collect();
        if victims.len() < count {
            return None;
        }
        let mut groups: BTreeMap<u32, Vec<_>> = BTreeMap::new();
        for (rank, key) in victims {
            self.idle.remove(&rank);
            let described = self.chunks.remove(&key).and_then(|chunk| chunk.described);
            let hashes = described.map_or_else(|| vec![key.0], |stored| stored.hashes);
            groups.entry(key.1).or_default().extend(hashes);
        }
        if let Some(events) = &mut self.events {
            events.extend(groups.into_iter().map(|(group, hashes)| Event::Removed {
                hashes,
                medium: Medium::Cpu,
                group,
            }));
        }
        Some(())
    }

    fn new_rank(&mut self) -> u64 {
        self.next_rank += 1;
        self.next_rank
    }

    /// Makes stored chunks hittable. The announcing order is by hash: the real one is a set's
    /// iteration order, so a child may come before its parent.
    pub fn complete_store(&mut self, keys: &[Key]) {
        let mut keys = keys.to_vec();
        keys.sort_unstable();
        for key in keys {
            let Some(chunk) = self.chunks.get_mut(&key).filter(|chunk| !chunk.ready) else {
                continue;
            };
            chunk.ready = true;
            self.idle.insert(chunk.rank, key);
            if let Some(events) = &mut self.events {
                let placeholder = || Stored {
                    hashes: vec![key.0],
                    parent: None,
                    tokens: Vec::new(),
                    block_size: self.event_block_size,
                    lora: None,
                    medium: Medium::Cpu,
                    extra_keys: None,
                    group: key.1,
                    spec: None,
                    session_id: None,
                };
                let described = chunk.described.clone();
                events.push(Event::Stored(described.unwrap_or_else(|| Box::new(placeholder()))));
            }
        }
    }

    /// Keeps chunks from eviction while they are read.
    pub fn pin(&mut self, keys: &[Key]) {
        for key in keys {
            if let Some(chunk) = self.chunks.get_mut(key) {
                chunk.pins += 1;
                self.idle.remove(&chunk.rank);
            }
        }
    }

    /// Ends `pin`; chunks that a reset took meanwhile are ignored.
    pub fn unpin(&mut self, keys: &[Key]) {
        for key in keys {
            if let Some(chunk) = self.chunks.get_mut(key).filter(|chunk| chunk.pins > 0) {
                chunk.pins -= 1;
                if chunk.pins == 0 {
                    self.idle.insert(chunk.rank, *key);
                }
            }
        }
    }

    /// Makes a finished request's chunks recent, tail first, so that tails are evicted first.
    pub fn finish(&mut self, keys_in_order: &[Key]) {
        for key in keys_in_order.iter().rev() {
            let rank = self.next_rank + 1;
            let Some(chunk) = self.chunks.get_mut(key) else { continue };
            self.next_rank = rank;
            let was_idle = self.idle.remove(&chunk.rank).is_some();
            chunk.rank = rank;
            if was_idle {
                self.idle.insert(rank, *key);
            }
        }
    }

    /// Forgets every chunk, in silence, and keeps pending events (vLLM 0.32.0, `reset_cache`).
    pub fn reset(&mut self) {
        self.chunks.clear();
        self.idle.clear();
    }

    /// Keeps events pending until released: a connector that reports late.
    pub fn hold_events_back(&mut self, held_back: bool) {
        self.held_back = held_back;
    }

    /// Events since the last call.
    pub fn take_events(&mut self) -> Vec<Event> {
        match &mut self.events {
            Some(events) if !self.held_back => std::mem::take(events),
            _ => Vec::new(),
        }
    }
}
