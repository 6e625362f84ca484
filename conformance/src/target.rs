//! Engines under test: a vLLM that the rig starts, one that runs already, or the simulator.
//! Invariant: dropping a target ends what it started.

mod simulated;
mod vllm;

use std::sync::Arc;

use fak_sim::{Faults, Reused};
use serde::Deserialize;

pub use self::simulated::Simulated;
pub use self::vllm::{Running, Vllm};
use crate::scenario::Profile;

/// Blocks of the device cache. Small, so that a few prompts evict; one of them is vLLM's null
/// block and never used.
pub const GPU_BLOCKS: u32 = 40;

/// Tokens a request may span. vLLM refuses to start if the cache cannot hold one such request.
pub const MODEL_LEN_MAX: u32 = 1_024;

/// Blocks that a chunk of the host tier holds, where it holds several.
pub const BLOCKS_PER_CHUNK: u32 = 4;

/// What the model is called besides `tiny`, where it has several names.
pub const SECOND_NAME: &str = "small";

/// Adapters, where there are any. The second is named as the type of a chat's content parts.
pub const ADAPTERS: [&str; 2] = ["sql", "text"];

/// Blocks of the host tier, where there is one.
pub const TIER_BLOCKS: u32 = 64;

/// Two layers of keys and values, 4 heads of 32 float16 elements, 32 tokens.
pub const BLOCK_BYTES: u32 = 2 * 2 * 4 * 32 * 2 * 32;

/// Where an engine listens.
#[derive(Clone, Debug, Deserialize)]
pub struct Endpoints {
    /// HTTP, without a trailing slash.
    pub base_url: String,
    /// The publisher of KV events.
    pub kv_events: String,
    /// The replay socket.
    pub replay: String,
}

/// Which engine is behind fak.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Kind {
    /// A real one.
    Vllm,
    /// The simulator.
    Sim,
}

/// An engine that can be started again.
pub trait Target {
    /// `vllm` or `sim`.
    fn name(&self) -> &'static str;

    /// Ends the engine if it runs and starts it, on the same addresses, with an empty cache.
    fn start(&mut self, profile: Profile) -> impl Future<Output = anyhow::Result<Endpoints>>;

    /// The script of its faults, where it can be told to have any.
    fn faults(&self) -> Option<Arc<Faults>> {
        None
    }

    /// Where the cached tokens of a completion came from, by its `X-Request-Id`; an engine tells
    /// their sum alone, the simulator this too.
    fn reused(&self, _request: &str) -> Option<Reused> {
        None
    }

    /// The salt that a completion came with, by the same; the gateway may have given it one.
    fn salt(&self, _request: &str) -> Option<Option<String>> {
        None
    }

    /// Puts other weights where the next reload or start finds them, and a start names them by
    /// [`weight_version`]; no effect on an engine whose
    /// model is the only one there is.
    fn put_weights(&mut self, _version: u64) {}
}

/// What trainers call the weights of that number.
pub fn weight_version(number: u64) -> String {
    format!("w{number}")
}
