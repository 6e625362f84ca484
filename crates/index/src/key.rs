//! Keys: what a block is, whatever an engine calls it.
//!
//! Invariant: two blocks have the same key only if they have the same tokens and extra keys, and so
//! have all blocks before them (up to collisions of 64 bits under a secret seed). Every part is
//! framed by its length.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use fak_kernel::Tier;
use xxhash_rust::xxh3::{xxh3_64_with_seed, xxh3_128_with_seed};

use crate::event::{EngineHash, Extra, ExtraKey, Store};

/// The chain key of a block. It is of use with the index that made it only: each has a seed of its
/// own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key(u64);

/// What a prompt is to an engine's prefix cache.
#[derive(Clone, Copy, Debug)]
pub struct Prompt<'a> {
    /// Its token ids.
    pub tokens: &'a [u32],
    /// The LoRA adapter it asks for.
    pub lora: Option<&'a str>,
    /// Its cache salt.
    pub salt: Option<&'a str>,
}

/// A block's own part of its key: tokens and extra keys, without what comes before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Content(u64);

/// An engine hash of any kind and width, digested to 128 bits so that tables of it are flat.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct HashKey([u64; 2]);

impl HashKey {
    pub(crate) const MIN: Self = Self([0; 2]);
    pub(crate) const MAX: Self = Self([u64::MAX; 2]);
}

impl std::hash::Hash for HashKey {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.0[0]);
    }
}

/// Makes keys under one secret seed, so that no peer can aim at a collision.
#[derive(Clone, Copy)]
pub(crate) struct Keys {
    pub(crate) seed: u64,
}

/// A store, digested. Made outside any lock.
pub(crate) struct Digested {
    pub(crate) hashes: Vec<HashKey>,
    pub(crate) parent: Option<HashKey>,
    /// One a block; empty where the store carries no tokens, or does not say of which block they
    /// are.
    pub(crate) contents: Vec<Content>,
    /// Blocks are left out, as a window group does (vLLM 0.32.0, `BlockPool.cache_full_blocks`,
    /// read). What the others are called is known from a group that leaves out none: a hash is the
    /// same in every group.
    pub(crate) is_sparse: bool,
    /// Lengths contradict each other.
    pub(crate) is_malformed: bool,
}

impl Keys {
    pub(crate) fn chain(self, prompt: &Prompt<'_>, block_size: u32) -> Vec<Key> {
        let size = block_size as usize;
        if size == 0 {
            return Vec::new();
        }
        let mut buffer = Vec::new();
        let mut parent = None;
        let block = |(i, tokens): (usize, &[u32])| {
            // vLLM's order: LoRA name, multi-modal items, salt (0.32.0, observed:
            // ["sql","tenantB"]). It hashes each with a tag and publishes them without (0.32.0,
            // `to_event_extra_keys`, read), so the adapter has a tag of its own here as well.
            let salt = prompt.salt.filter(|_| i == 0).map(Part::Text);
            let parts = prompt.lora.map(Part::Lora).into_iter().chain(salt);
            let key = self.link(parent, self.content(&mut buffer, tokens, parts));
            parent = Some(key);
            key
        };
        prompt.tokens.chunks_exact(size).enumerate().map(block).collect()
    }

    pub(crate) fn digest(self, store: &Store) -> Digested {
        let hashes: Vec<_> = store.hashes.iter().map(|hash| self.hash(hash)).collect();
        let parent = store.parent.as_ref().map(|hash| self.hash(hash));
        let is_sparse = is_sparse(store);
        let is_malformed = !store.tokens.is_empty() && !is_sparse && !is_well_formed(store);
        let contents = match store.block_size as usize {
            0 => Vec::new(),
            _ if is_malformed || is_sparse => Vec::new(),
            size => self.contents(store, size),
        };
        Digested { hashes, parent, contents, is_sparse, is_malformed }
    }

    fn contents(self, store: &Store, size: usize) -> Vec<Content> {
        let mut buffer = Vec::new();
        let block = |(i, tokens): (usize, &[u32])| {
            let extra = match &store.extra {
                Extra::PerBlock(blocks) => blocks.get(i).map_or(&[][..], Vec::as_slice),
                Extra::NotReported => &[],
            };
            let lora = store.lora.as_deref();
            let is_listed =
                lora.is_some_and(|l| matches!(extra.first(), Some(ExtraKey::Text(t)) if **t == *l));
            let rest = extra.iter().skip(usize::from(is_listed)).map(Part::from);
            let parts = lora.map(Part::Lora).into_iter().chain(rest);
            self.content(&mut buffer, tokens, parts)
        };
        store.tokens.chunks_exact(size).enumerate().map(block).collect()
    }

    pub(crate) fn hash(self, hash: &EngineHash) -> HashKey {
        // The length tells the two kinds apart where the tag alone could not: 9 bytes against 1 +
        // n, and the tag settles n = 8.
        let digest = match hash {
            EngineHash::Int(int) => {
                let mut framed = [0; 9];
                framed[1..].copy_from_slice(&int.to_le_bytes());
                xxh3_128_with_seed(&framed, self.seed)
            }
            EngineHash::Bytes(bytes) => {
                let framed: Vec<u8> = std::iter::once(1).chain(bytes.iter().copied()).collect();
                xxh3_128_with_seed(&framed, self.seed)
            }
        };
        HashKey([(digest >> 64) as u64, digest as u64])
    }

    pub(crate) fn link(self, parent: Option<Key>, content: Content) -> Key {
        // A root is framed shorter than a child, so no parent's key can pass for "no parent".
        let key = match parent {
            None => xxh3_64_with_seed(&content.0.to_le_bytes(), self.seed),
            Some(Key(parent)) => {
                let mut framed = [0; 16];
                framed[..8].copy_from_slice(&parent.to_le_bytes());
                framed[8..].copy_from_slice(&content.0.to_le_bytes());
                xxh3_64_with_seed(&framed, self.seed)
            }
        };
        Key(key)
    }

    pub(crate) fn content<'a>(
        self,
        buffer: &mut Vec<u8>,
        tokens: &[u32],
        extra: impl Iterator<Item = Part<'a>>,
    ) -> Content {
        buffer.clear();
        buffer.extend_from_slice(&(tokens.len() as u64).to_le_bytes());
        tokens.iter().for_each(|token| buffer.extend_from_slice(&token.to_le_bytes()));
        extra.for_each(|part| part.frame(buffer));
        Content(xxh3_64_with_seed(buffer, self.seed))
    }
}

fn is_well_formed(store: &Store) -> bool {
    let tokens = store.hashes.len().checked_mul(store.block_size as usize);
    is_covered(store) && tokens == Some(store.tokens.len())
}

fn is_sparse(store: &Store) -> bool {
    let size = store.block_size as usize;
    let whole = size > 0 && store.tokens.len().is_multiple_of(size);
    let is_fewer =
        whole && !store.hashes.is_empty() && store.hashes.len() < store.tokens.len() / size;
    is_fewer && store.tier == Tier::Gpu && is_covered(store)
}

fn is_covered(store: &Store) -> bool {
    match &store.extra {
        Extra::NotReported => true,
        Extra::PerBlock(extra) => extra.is_empty() || extra.len() == store.hashes.len(),
    }
}

/// An extra key, borrowed from an event or a prompt.
pub(crate) enum Part<'a> {
    Text(&'a str),
    Bytes(&'a [u8]),
    Int(i64),
    Item(&'a str, i64),
    /// The adapter, whatever other part has the same text.
    Lora(&'a str),
}

impl<'a> From<&'a ExtraKey> for Part<'a> {
    fn from(key: &'a ExtraKey) -> Self {
        match key {
            ExtraKey::Text(text) => Self::Text(text),
            ExtraKey::Bytes(bytes) => Self::Bytes(bytes),
            ExtraKey::Int(int) => Self::Int(*int),
            ExtraKey::Item(text, int) => Self::Item(text, *int),
        }
    }
}

impl Part<'_> {
    fn frame(&self, buffer: &mut Vec<u8>) {
        let (tag, bytes, int) = match self {
            Self::Text(text) => (0, text.as_bytes(), None),
            Self::Bytes(bytes) => (1, *bytes, None),
            Self::Int(int) => (2, &[][..], Some(*int)),
            Self::Item(text, int) => (3, text.as_bytes(), Some(*int)),
            Self::Lora(name) => (4, name.as_bytes(), None),
        };
        buffer.push(tag);
        buffer.extend_from_slice(&(bytes.len() as u64).to_le_bytes());
        buffer.extend_from_slice(bytes);
        if let Some(int) = int {
            buffer.extend_from_slice(&int.to_le_bytes());
        }
    }
}

/// A map from what is a digest already, so that nothing is hashed twice.
pub(crate) type DigestMap<K, V> = HashMap<K, V, BuildHasherDefault<FoldHasher>>;

/// Folds the words of a digest into one. Sound only because the digests are made under a secret
/// seed.
#[derive(Default)]
pub(crate) struct FoldHasher(u64);

impl Hasher for FoldHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(u64::from(*byte)));
    }

    fn write_u32(&mut self, word: u32) {
        self.write_u64(u64::from(word));
    }

    fn write_u64(&mut self, word: u64) {
        self.0 = self.0.rotate_left(29) ^ word;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::hash::BuildHasher;

    use super::*;

    /// Where they are not, tables answer right all the same, and take for ever.
    #[test]
    fn hashes_are_spread_over_a_table() {
        let hashes: Vec<_> = (0..64).map(|n| Keys { seed: 1 }.hash(&EngineHash::Int(n))).collect();
        let words: BTreeSet<u64> = hashes.iter().flat_map(|hash| hash.0).collect();
        assert_eq!(words.len(), 2 * hashes.len());
        let build = BuildHasherDefault::<FoldHasher>::default();
        let in_groups = hashes.iter().flat_map(|hash| [0_u32, 1].map(|group| (group, *hash)));
        let spread: BTreeSet<u64> = in_groups.map(|place| build.hash_one(place)).collect();
        assert_eq!(spread.len(), 2 * hashes.len());
        assert_ne!(build.hash_one("a"), build.hash_one("b"));
    }
}
