//! KV cache events as the engine core produces them, before any wire layout.
//! Invariant: order within a batch is the order in which the caches changed, device first.

use super::hash::{BlockHash, Lora};

/// Where a block lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Medium {
    /// The engine's own cache; called so on every platform (vLLM 0.32.0, observed on CPU).
    Gpu,
    /// The offloading connector's host tier.
    Cpu,
}

impl Medium {
    /// The name on the wire.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Gpu => "GPU",
            Self::Cpu => "CPU",
        }
    }
}

/// One change of a cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// Blocks can now be hit.
    Stored(Box<Stored>),
    /// One copy of each block is gone.
    Removed {
        /// One hash for the device tier, possibly many for the host tier.
        hashes: Vec<BlockHash>,
        /// Tier that lost them.
        medium: Medium,
        /// KV cache group.
        group: u32,
    },
    /// The device cache was reset; says nothing of which tier (ENGINE.md, trap 4).
    Cleared,
}

/// Fields of `BlockStored`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stored {
    /// Full blocks, in chain order.
    pub hashes: Vec<BlockHash>,
    /// Block before the first one; none for a chain's start and for the host tier.
    pub parent: Option<BlockHash>,
    /// Tokens of all blocks; empty for the host tier.
    pub tokens: Vec<u32>,
    /// Tokens a block; 0 for the host tier since vLLM 0.20.2.
    pub block_size: usize,
    /// Adapter, if any.
    pub lora: Option<Lora>,
    /// Tier.
    pub medium: Medium,
    /// One entry a block; absent for the host tier.
    pub extra_keys: Option<Vec<Vec<String>>>,
    /// KV cache group.
    pub group: u32,
    /// Kind of the group; absent for the host tier.
    pub spec: Option<GroupKind>,
    /// Session the request named.
    pub session_id: Option<String>,
}

/// Kind of a KV cache group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupKind {
    /// Every token attends to all before it.
    Full,
    /// Every token attends to this many before it.
    SlidingWindow(usize),
}
