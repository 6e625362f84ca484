//! What a vLLM rank tells about its KV cache: batches of stored, removed and cleared blocks,
//! decoded from every layout of vLLM 0.9.2 to 0.33.0 into one form.
//! Invariant: the same facts decode to the same value whatever the layout was, and a fact that the
//! layout cannot carry is told apart from one that is absent ([`ExtraKeys::NotReported`]).

mod decode;
mod error;
pub mod frames;
mod reader;

pub use decode::decode;
pub use error::{DecodeError, Place};

/// One message of a rank's event stream.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Batch {
    /// When the engine published the batch, in Unix seconds; always finite. It is not when the
    /// events happened: a clear waits for the next scheduler step (vLLM 0.32.0, observed).
    pub ts: f64,
    /// Data-parallel rank; `None` where the engine left it out.
    pub rank: Option<u32>,
    /// Events in the order the engine gave them.
    pub events: Vec<Event>,
    /// How many events of a type this decoder does not know were passed over.
    pub unknown_events: u32,
    /// Their distinct tags, the first [`UNKNOWN_TAGS_MAX`] of them.
    pub unknown_tags: Vec<String>,
}

/// How many distinct unknown tags a batch remembers.
pub const UNKNOWN_TAGS_MAX: usize = 8;

/// One event of a batch.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// Blocks became present in a tier.
    Stored(Stored),
    /// Blocks left a tier.
    Removed(Removed),
    /// Everything was cleared. The event names no tier, in any version.
    Cleared,
}

/// The engine's own name of a block; opaque, and different for equal tokens where the hash seed is.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum BlockHash {
    /// A 64-bit hash. Signed ones (vLLM 0.9.2) are kept in two's complement, so that -1 and
    /// `u64::MAX` are one hash.
    Int(u64),
    /// A digest (`VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0`), 32 bytes in all versions so far.
    Bytes(Box<[u8]>),
}

/// Blocks that became present in a tier.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Stored {
    /// The blocks, in prefix order.
    pub hashes: Vec<BlockHash>,
    /// The block before the first one. `None` is the start of a prompt only if
    /// [`Stored::shape`] is [`Shape::Blocks`] or [`Shape::Sparse`].
    pub parent: Option<BlockHash>,
    /// The blocks' tokens, one after the other; empty if only the location was told.
    pub tokens: Vec<u32>,
    /// Tokens a block; may be 0 if only the location was told.
    pub block_size: u32,
    /// Adapter number from 1 on; deprecated by the engine in favour of the name.
    pub lora_id: Option<i64>,
    /// Adapter name (since vLLM 0.14.1).
    pub lora_name: Option<String>,
    /// The tier in the engine's spelling (`GPU`, `CPU`, `STORAGE`, `cpu` of the mooncake store).
    /// vLLM 0.9.2 has no such field and no tier but the device's.
    pub medium: Option<String>,
    /// What else went into the blocks' hashes.
    pub extra_keys: ExtraKeys,
    /// KV cache group; 0 where the layout has none (before vLLM 0.20.2).
    pub group: u32,
    /// Kind of the group's attention, such as `full_attention` or `sliding_window`.
    pub spec_kind: Option<String>,
    /// Window of a sliding-window group, in tokens.
    pub sliding_window: Option<u32>,
    /// `LOCAL` or `REMOTE`, seen from the publisher (since vLLM 0.26.0).
    pub locality: Option<String>,
    /// Name of the secondary offload tier (since vLLM 0.30.0).
    pub ownership: Option<String>,
    /// Session of the request that caused the store; the block itself may be shared.
    pub session_id: Option<String>,
    /// Tokens after each block that its hash may depend on (since vLLM 0.33.0); one list a block.
    pub lookahead: Option<Vec<Vec<u32>>>,
}

/// What a [`Stored`] event lets its reader conclude.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// Each hash has its own run of `block_size` tokens.
    Blocks,
    /// No tokens: the hashes are now in this tier too, and a `None` parent means nothing.
    LocationOnly,
    /// More blocks' worth of tokens than hashes: a sliding-window or state-space group left blocks
    /// out and does not say which (vLLM 0.32.0, `BlockPool.cache_full_blocks`), so no hash can be
    /// tied to tokens.
    Sparse,
}

impl Stored {
    /// Tells which conclusions the event allows. The decoder has checked that the numbers of
    /// hashes and tokens fit one of the three.
    #[must_use]
    pub fn shape(&self) -> Shape {
        let whole = self.hashes.len() as u64 * u64::from(self.block_size);
        if self.tokens.is_empty() {
            Shape::LocationOnly
        } else if self.tokens.len() as u64 == whole {
            Shape::Blocks
        } else {
            Shape::Sparse
        }
    }
}

/// What went into the blocks' hashes besides tokens: adapter, salt, images, embeddings.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum ExtraKeys {
    /// The event does not say: the layout has no such field (before vLLM 0.17.1) or leaves it
    /// nil or out, as the offloading and mooncake connectors do even for salted blocks (vLLM
    /// 0.32.0). Salts and images cannot be seen, and must not be taken for absent.
    #[default]
    NotReported,
    /// Reported, and none on any block. The device cache always reports.
    None,
    /// One list a block, in the order of the hashes; at least one is not empty.
    PerBlock(Vec<Vec<ExtraKey>>),
}

/// One value that went into a block's hash. Adapter names and salts look alike on the wire.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum ExtraKey {
    /// An adapter name, a salt, or a multimodal identifier of an old layout.
    Text(String),
    /// A digest of prompt embeddings.
    Bytes(Box<[u8]>),
    /// A number.
    Int(i64),
    /// A multimodal identifier and its offset from the block's start, in tokens.
    Pair(String, i64),
    /// A value of any other shape, as its msgpack bytes: opaque, yet it tells blocks apart.
    Opaque(Box<[u8]>),
}

/// Blocks that left a tier.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Removed {
    /// The blocks, in no particular order.
    pub hashes: Vec<BlockHash>,
    /// The tier, as in [`Stored::medium`].
    pub medium: Option<String>,
    /// KV cache group, as in [`Stored::group`].
    pub group: u32,
    /// As in [`Stored::locality`].
    pub locality: Option<String>,
    /// As in [`Stored::ownership`].
    pub ownership: Option<String>,
}

/// Bounds on what a publisher may make the decoder do; all inclusive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Bytes a payload.
    pub payload_bytes: usize,
    /// Heap bytes a decoded batch may take, counted as they are asked for.
    pub memory_bytes: usize,
    /// Events a batch, known or not.
    pub events: u32,
    /// Fields an event, known or not.
    pub fields: u32,
    /// Hashes an event.
    pub hashes: u32,
    /// Tokens an event.
    pub tokens: u32,
    /// Extra keys a block, and lookahead tokens a block.
    pub keys_per_block: u32,
    /// Bytes a string, or a value kept as bytes.
    pub text_bytes: u32,
    /// Bytes a block hash.
    pub hash_bytes: u32,
    /// Nesting of values that are passed over.
    pub depth: u32,
}

impl Default for Limits {
    /// Room for prompts of four million tokens in blocks of 16 in one event, and for half as many
    /// in one event a block, as the offload tier tells them.
    fn default() -> Self {
        Limits {
            payload_bytes: 32 << 20,
            memory_bytes: 128 << 20,
            events: 1 << 17,
            fields: 64,
            hashes: 1 << 18,
            tokens: 1 << 22,
            keys_per_block: 64,
            text_bytes: 4096,
            hash_bytes: 64,
            depth: 16,
        }
    }
}
