//! What an engine announces about its blocks, as the index takes it in: decoded, and free of any
//! wire layout.
//!
//! Invariant: nothing here is trusted. Lengths that contradict each other are counted and ignored.

use fak_kernel::Tier;

/// A block's hash as the engine announced it. Opaque: never recomputed, of any width.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum EngineHash {
    /// A 64-bit integer. vLLM 0.9.2 sends signed ones; `From<i64>` maps them to the same 64 bits.
    Int(u64),
    /// A byte string. Never equal to an integer, whatever the bytes.
    Bytes(Box<[u8]>),
}

impl From<u64> for EngineHash {
    fn from(hash: u64) -> Self {
        Self::Int(hash)
    }
}

impl From<i64> for EngineHash {
    fn from(hash: i64) -> Self {
        Self::Int(hash.cast_unsigned())
    }
}

impl From<&[u8]> for EngineHash {
    fn from(hash: &[u8]) -> Self {
        Self::Bytes(hash.into())
    }
}

/// One of the extra keys that make a block's identity beside its tokens.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ExtraKey {
    /// A LoRA name, a cache salt, a multi-modal digest.
    Text(Box<str>),
    /// A digest of prompt embeddings, or any value of a shape that nobody knows (its raw bytes:
    /// equal only to itself, so it can never match a prompt).
    Bytes(Box<[u8]>),
    /// A number.
    Int(i64),
    /// A multi-modal item: its digest and its offset in the block.
    Item(Box<str>, i64),
}

/// The extra keys of a store's blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Extra {
    /// The event cannot show them: layouts before 0.17.1, and self-describing connector events,
    /// which leave them out (0.32.0, observed). Such a store may be salted, so it does not teach
    /// what its hash names.
    NotReported,
    /// One list a block, in the engine's order; an empty outer list means none on any block.
    PerBlock(Vec<Vec<ExtraKey>>),
}

/// What a cache group needs of a prefix, as announced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupKind {
    /// Full attention: every block from 0 on.
    Full,
    /// Sliding window: the last blocks that cover `tokens`; every block where the width is not
    /// told.
    Window {
        /// Width of the window in tokens.
        tokens: Option<u32>,
    },
    /// Any other kind: every block.
    Other,
    /// None named, as up to 0.19.1: every block.
    NotReported,
}

/// Blocks that came to be on a tier.
#[derive(Clone, Debug)]
pub struct Store {
    /// The blocks, in prefix order where `tokens` is given.
    pub hashes: Vec<EngineHash>,
    /// The block before the first one. `None` means a root only where `tokens` is given.
    pub parent: Option<EngineHash>,
    /// The tokens of all blocks; empty in an event that only tells a location.
    pub tokens: Vec<u32>,
    /// Tokens in a block; connectors announce 0, or the size of their own chunks.
    pub block_size: u32,
    /// The extra keys.
    pub extra: Extra,
    /// The LoRA adapter's name. vLLM lists it as the first of a block's extra keys, too, as plain
    /// text that a cache salt could equal: there it is taken for the adapter. An event
    /// that has only a number for it (up to 0.13.0) must get a name here that no adapter has.
    pub lora: Option<Box<str>>,
    /// Where the blocks are.
    pub tier: Tier,
    /// The cache group; 0 where the event names none.
    pub group: u32,
    /// The group's kind.
    pub kind: GroupKind,
}

/// Blocks that left a tier. One mention takes away one copy.
#[derive(Clone, Debug)]
pub struct Remove {
    /// The blocks.
    pub hashes: Vec<EngineHash>,
    /// Where they were.
    pub tier: Tier,
    /// The cache group; 0 where the event names none.
    pub group: u32,
}
