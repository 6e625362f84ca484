//! What each engine hash of a rank names: a key, nothing yet, or nothing for good.
//!
//! Invariant: a hash that was announced with two contents names neither until a new incarnation.

use std::collections::VecDeque;

use crate::key::{Content, DigestMap, HashKey, Key, Keys};
use crate::parked::{Orphan, Parked};

/// Hashes that name the same key: copies computed apart. Further ones are refused, so that a peer
/// cannot make one look-up walk far.
const TWINS_MAX: usize = 8;

/// Identities looked at for one to forget. All of them on a tier: the new one is refused.
const EVICT_TRIES_MAX: usize = 64;

/// The identities of one rank.
#[derive(Default)]
pub(crate) struct Identities {
    known: DigestMap<HashKey, State>,
    /// The first hash of those that name a key; the others follow by `Identity::twin`.
    by_key: DigestMap<Key, HashKey>,
    /// Each hash of `known` once; the one to be forgotten next in front.
    order: VecDeque<HashKey>,
    parked: Parked,
}

#[derive(Clone, Copy)]
enum State {
    Known(Identity),
    /// Announced with two contents.
    Poisoned,
}

#[derive(Clone, Copy)]
struct Identity {
    key: Key,
    content: Content,
    twin: Option<HashKey>,
    /// The rank's change with the last store that announced it; 0 for one that was parked.
    announced: u64,
}

/// A block of a store that carries tokens.
#[derive(Clone, Copy)]
pub(crate) struct Block {
    pub(crate) hash: HashKey,
    pub(crate) parent: Option<HashKey>,
    pub(crate) content: Content,
}

/// What a block's announcement taught.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Taught {
    /// What the hash names.
    Known,
    /// Its parent is not known yet: it waits.
    Parked,
    /// Another content than before.
    Conflict,
    /// Nothing: there is no room, or its parent names nothing for good.
    Refused,
}

/// What happened on the way to other blocks than the one announced.
#[derive(Default)]
pub(crate) struct Fallout {
    /// Hashes that name a key from now on.
    pub(crate) settled: Vec<HashKey>,
    /// Parked blocks that were forgotten for want of room.
    pub(crate) dropped: u32,
}

/// What learning depends on.
#[derive(Clone, Copy)]
pub(crate) struct Terms<'a> {
    pub(crate) keys: Keys,
    pub(crate) identities_max: usize,
    pub(crate) parked_max: usize,
    /// Whether a hash is on any tier: such an identity is not forgotten to make room.
    pub(crate) is_live: &'a dyn Fn(HashKey) -> bool,
}

/// What is known of a block's parent.
enum Parent {
    /// It has none, or its key is known.
    Key(Option<Key>),
    Missing(HashKey),
    Poisoned,
}

/// Whether a block says again what its hash is known to name, as far as its parent is known.
fn is_same(keys: Keys, known: &Identity, parent: &Parent, block: Block) -> bool {
    let is_same_chain = match parent {
        Parent::Key(parent) => keys.link(*parent, block.content) == known.key,
        Parent::Missing(_) | Parent::Poisoned => true,
    };
    is_same_chain && known.content == block.content
}

impl Identities {
    /// Takes in what `block` says its hash names.
    pub(crate) fn learn(
        &mut self,
        terms: Terms<'_>,
        block: Block,
        fallout: &mut Fallout,
    ) -> Taught {
        let parent = self.parent(block.parent);
        if let Some(state) = self.known.get(&block.hash) {
            return match state {
                State::Known(known) if is_same(terms.keys, known, &parent, block) => Taught::Known,
                State::Known(_) => self.poison(terms, block.hash),
                State::Poisoned => Taught::Conflict,
            };
        }
        if let Some(orphan) = self.parked.get(block.hash) {
            let is_same = orphan.content == block.content && Some(orphan.parent) == block.parent;
            return if is_same { Taught::Parked } else { self.poison(terms, block.hash) };
        }
        match parent {
            Parent::Key(parent) => {
                let key = terms.keys.link(parent, block.content);
                self.settle(terms, (block.hash, key, block.content), fallout)
            }
            Parent::Missing(parent) => self.park(terms, parent, block, fallout),
            Parent::Poisoned => Taught::Refused,
        }
    }

    fn parent(&self, hash: Option<HashKey>) -> Parent {
        let Some(hash) = hash else { return Parent::Key(None) };
        match self.known.get(&hash) {
            Some(State::Known(parent)) => Parent::Key(Some(parent.key)),
            Some(State::Poisoned) => Parent::Poisoned,
            None => Parent::Missing(hash),
        }
    }

    fn park(
        &mut self,
        terms: Terms<'_>,
        parent: HashKey,
        block: Block,
        fallout: &mut Fallout,
    ) -> Taught {
        let orphan = Orphan { parent, content: block.content };
        let Some(dropped) = self.parked.insert(block.hash, orphan, terms.parked_max) else {
            return Taught::Refused;
        };
        fallout.dropped += dropped;
        Taught::Parked
    }

    /// Makes a hash known, and then every parked block that waited for it, in any depth.
    fn settle(
        &mut self,
        terms: Terms<'_>,
        (hash, key, content): (HashKey, Key, Content),
        fallout: &mut Fallout,
    ) -> Taught {
        if !self.insert(terms, hash, key, content) {
            return Taught::Refused;
        }
        fallout.settled.push(hash);
        let mut parents = vec![(hash, key)];
        while let Some((parent, parent_key)) = parents.pop() {
            for (child, content) in self.parked.take_children(parent) {
                let key = terms.keys.link(Some(parent_key), content);
                if self.insert(terms, child, key, content) {
                    fallout.settled.push(child);
                    parents.push((child, key));
                } else {
                    fallout.dropped += 1;
                }
            }
        }
        Taught::Known
    }

    /// False where there is no room.
    fn insert(&mut self, terms: Terms<'_>, hash: HashKey, key: Key, content: Content) -> bool {
        if self.hashes(key).count() >= TWINS_MAX || !self.make_room(terms) {
            return false;
        }
        let twin = self.by_key.insert(key, hash);
        self.known.insert(hash, State::Known(Identity { key, content, twin, announced: 0 }));
        self.order.push_back(hash);
        true
    }

    /// Forgets the oldest identity that is on no tier, if there are too many.
    fn make_room(&mut self, terms: Terms<'_>) -> bool {
        if self.known.len() < terms.identities_max {
            return true;
        }
        for _ in 0..EVICT_TRIES_MAX.min(self.order.len()) {
            let Some(oldest) = self.order.pop_front() else { return false };
            if !(terms.is_live)(oldest) {
                self.unlink(oldest);
                self.known.remove(&oldest);
                return true;
            }
            self.order.push_back(oldest);
        }
        false
    }

    fn poison(&mut self, terms: Terms<'_>, hash: HashKey) -> Taught {
        self.unlink(hash);
        self.parked.remove(hash);
        if self.known.contains_key(&hash) {
            self.known.insert(hash, State::Poisoned);
        } else if self.make_room(terms) {
            self.known.insert(hash, State::Poisoned);
            self.order.push_back(hash);
        }
        // Where there is no room to remember the conflict, it still costs the hash all that it
        // held.
        Taught::Conflict
    }

    /// Takes a hash out of the chain of those that name its key.
    fn unlink(&mut self, hash: HashKey) {
        let Some(State::Known(gone)) = self.known.get(&hash).copied() else { return };
        let before = self.hashes(gone.key).find(|other| self.twin(*other) == Some(hash));
        match (before, gone.twin) {
            (Some(before), twin) => {
                if let Some(State::Known(identity)) = self.known.get_mut(&before) {
                    identity.twin = twin;
                }
            }
            (None, Some(twin)) => {
                self.by_key.insert(gone.key, twin);
            }
            (None, None) => {
                self.by_key.remove(&gone.key);
            }
        }
    }

    fn twin(&self, hash: HashKey) -> Option<HashKey> {
        match self.known.get(&hash) {
            Some(State::Known(identity)) => identity.twin,
            Some(State::Poisoned) | None => None,
        }
    }

    /// The hashes that name `key`.
    pub(crate) fn hashes(&self, key: Key) -> impl Iterator<Item = HashKey> {
        std::iter::successors(self.by_key.get(&key).copied(), |hash| self.twin(*hash))
    }

    /// The one hash that names `key`, if there are no others.
    pub(crate) fn only_hash(&self, key: Key) -> Option<HashKey> {
        let mut hashes = self.hashes(key);
        let first = hashes.next()?;
        hashes.next().is_none().then_some(first)
    }

    /// A store of the hash was taken in as the change `at`.
    pub(crate) fn announce(&mut self, hash: HashKey, at: u64) {
        if let Some(State::Known(identity)) = self.known.get_mut(&hash) {
            identity.announced = at;
        }
    }

    /// Whether a store under one of the key's hashes was taken in after the change `mark`.
    pub(crate) fn was_announced_since(&self, key: Key, mark: u64) -> bool {
        let announced = |hash| match self.known.get(&hash) {
            Some(State::Known(identity)) => identity.announced,
            Some(State::Poisoned) | None => 0,
        };
        self.hashes(key).any(|hash| announced(hash) > mark)
    }

    /// Whether it is known what the hash names.
    pub(crate) fn is_known(&self, hash: HashKey) -> bool {
        matches!(self.known.get(&hash), Some(State::Known(_)))
    }

    /// Whether the hash names nothing for good.
    pub(crate) fn is_poisoned(&self, hash: HashKey) -> bool {
        matches!(self.known.get(&hash), Some(State::Poisoned))
    }

    /// Forgets a block that waits for its parent.
    pub(crate) fn unpark(&mut self, hash: HashKey) {
        self.parked.remove(hash);
    }

    pub(crate) fn is_parked(&self, hash: HashKey) -> bool {
        self.parked.get(hash).is_some()
    }

    pub(crate) fn len(&self) -> usize {
        self.known.len()
    }

    pub(crate) fn parked(&self) -> usize {
        self.parked.len()
    }
}
