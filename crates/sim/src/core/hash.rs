//! Names KV blocks: a chain hash of the parent's hash, the block's tokens and its extra keys.
//! Invariant: equal hashes mean equal prefixes, so a hash found in a cache is a hit.
//!
//! Each extra key is hashed with its kind and published without it: an adapter and a salt of one
//! name differ in their hashes and not in their events (vLLM 0.32.0 `kv_cache_utils.py`).
//!
//! vLLM hashes a pickled tuple; the digest differs here, the chaining and the published form
//! (low 64 bits of a 256-bit digest, unsigned) are the same (vLLM 0.32.0 `kv_cache_utils.py`).

use sha2::{Digest, Sha256};

/// A 256-bit chain hash of one full block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockHash(pub [u8; 32]);

impl BlockHash {
    /// The published integer form: the low 64 bits, unsigned.
    #[must_use]
    pub fn low64(&self) -> u64 {
        let mut low = [0; 8];
        low.copy_from_slice(&self.0[24..]);
        u64::from_be_bytes(low)
    }

    /// Hashes one full block onto its chain.
    fn chain(parent: Option<&Self>, tokens: &[u32], keys: &[(Kind, &str)]) -> Self {
        let mut hasher = Sha256::new();
        hasher.update(parent.map_or([0; 32], |p| p.0));
        hasher.update((tokens.len() as u64).to_be_bytes());
        for token in tokens {
            hasher.update(token.to_be_bytes());
        }
        for (kind, key) in keys {
            hasher.update([*kind as u8]);
            hasher.update((key.len() as u64).to_be_bytes());
            hasher.update(key.as_bytes());
        }
        Self(hasher.finalize().into())
    }
}

/// What an extra key is, as vLLM's hashes tell them apart.
#[derive(Clone, Copy)]
enum Kind {
    Lora,
    CacheSalt,
}

/// What makes a block of equal tokens a different block: adapter and salt.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Identity {
    /// `cache_salt`; in the extra keys of the first block only (vLLM 0.32.0, observed).
    pub salt: Option<String>,
    /// LoRA adapter; its name is in the extra keys of every block (vLLM 0.32.0, observed).
    pub lora: Option<Lora>,
}

/// A LoRA adapter as events name it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lora {
    /// 1-based, in the order of configuration.
    pub id: u32,
    /// Adapter name, also a served model name.
    pub name: String,
}

impl Identity {
    /// The extra keys of block `index` of a chain as events tell them, adapter before salt.
    #[must_use]
    pub fn extra_keys(&self, index: usize) -> Vec<String> {
        self.keys(index).into_iter().map(|(_, key)| key.to_owned()).collect()
    }

    fn keys(&self, index: usize) -> Vec<(Kind, &str)> {
        let lora = self.lora.iter().map(|lora| (Kind::Lora, lora.name.as_str()));
        let salt = self.salt.iter().filter(|_| index == 0);
        lora.chain(salt.map(|salt| (Kind::CacheSalt, salt.as_str()))).collect()
    }

    /// Extends `hashes` to every full block of `tokens`.
    pub fn extend_chain(&self, hashes: &mut Vec<BlockHash>, tokens: &[u32], block_size: usize) {
        for index in hashes.len()..tokens.len() / block_size {
            let block = &tokens[index * block_size..(index + 1) * block_size];
            let parent = index.checked_sub(1).map(|i| &hashes[i]);
            hashes.push(BlockHash::chain(parent, block, &self.keys(index)));
        }
    }
}
