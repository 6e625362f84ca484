//! KV connectors: which tiers a connector has, and its store and load jobs.
//! Invariant: a store becomes hittable one step after the step that computed its blocks; a reset
//! drops every job in flight, so nothing from before it completes after it.
//!
//! Follows vLLM 0.32.0 `kv_connector/v1/offloading/scheduler.py` and `multi_connector.py`.

use super::Config;
use super::events::{Event, GroupKind, Medium, Stored};
use super::hash::BlockHash;
use super::pool::Key;
use super::request::{Request, RequestId};
use super::tier::{Lookup, Tier};

/// Connectors that can be simulated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Connector {
    /// No tier beside the device.
    #[default]
    None,
    /// `OffloadingConnector`: a host tier that announces its blocks.
    Offloading,
    /// `MooncakeStoreConnector`: a shared store, outside the engine's process, without events.
    Mooncake,
    /// `MultiConnector` of the two.
    Multi,
}

impl Connector {
    /// The class name in refusals.
    #[must_use]
    pub fn class_name(self) -> &'static str {
        match self {
            Self::None => "NoneType",
            Self::Offloading => "OffloadingConnector",
            Self::Mooncake => "MooncakeStoreConnector",
            Self::Multi => "MultiConnector",
        }
    }

    /// Has a host tier.
    #[must_use]
    pub fn offloads(self) -> bool {
        matches!(self, Self::Offloading | Self::Multi)
    }

    /// Has a shared store.
    #[must_use]
    pub fn has_remote(self) -> bool {
        matches!(self, Self::Mooncake | Self::Multi)
    }

    /// Can keep its tier across a pause, by the rig's opt-out: only the offloading one, and none.
    #[must_use]
    pub fn can_keep_tier(self) -> bool {
        matches!(self, Self::None | Self::Offloading)
    }
}

impl std::str::FromStr for Connector {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "none" => Ok(Self::None),
            "offloading" => Ok(Self::Offloading),
            "mooncake" => Ok(Self::Mooncake),
            "multi" => Ok(Self::Multi),
            _ => Err(format!("unknown connector {text:?}: none, offloading, mooncake or multi")),
        }
    }
}

/// Bytes of one block in the rig's model: 32 tokens, 2 layers, 4 heads of 32 at 2 bytes, keys
/// and values (3,538,944 bytes for 3,456 tokens, observed).
const BYTES_PER_TOKEN: usize = 1024;

/// What moved through the host tier since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Transfers {
    /// Bytes from the host to the device.
    pub load_bytes: u64,
    /// Load jobs.
    pub loads: u64,
    /// Bytes from the device to the host.
    pub store_bytes: u64,
    /// Store jobs.
    pub stores: u64,
}

/// How a host tier cuts a request's blocks, and what its events say of them.
#[derive(Clone, Copy, Debug)]
pub struct Chunks {
    block_size: usize,
    blocks: usize,
    self_describing: bool,
}

impl Chunks {
    pub(super) fn of(config: &Config) -> Self {
        Self {
            block_size: config.block_size,
            blocks: config.blocks_per_chunk,
            self_describing: config.self_describing,
        }
    }

    /// The keys of the whole chunks of a chain: a chunk is named by its last block.
    fn keys(self, hashes: &[BlockHash]) -> Vec<Key> {
        hashes.chunks_exact(self.blocks).map(|chunk| (chunk[self.blocks - 1], 0)).collect()
    }

    /// The store of chunk `index` as a self-describing event tells it
    /// (vLLM 0.32.0 `offloading/events.py`): neither extra keys nor the session.
    fn description(self, request: &Request, index: usize) -> Stored {
        let (start, end) = (index * self.blocks, (index + 1) * self.blocks);
        Stored {
            hashes: request.hashes[start..end].to_vec(),
            parent: start.checked_sub(1).map(|i| request.hashes[i]),
            tokens: request.tokens[start * self.block_size..end * self.block_size].to_vec(),
            block_size: self.block_size,
            lora: request.ask.identity.lora.clone(),
            medium: Medium::Cpu,
            extra_keys: None,
            group: 0,
            spec: Some(GroupKind::Full),
            session_id: None,
        }
    }
}

/// What a lookup found beyond the device's blocks.
#[derive(Clone, Debug, Default)]
pub(super) struct Found {
    /// The part of the connector that has it.
    pub(super) part: usize,
    /// Device blocks that a load fills.
    pub(super) blocks: usize,
    /// Chunks of the request up to where the load ends.
    pub(super) end: usize,
    keys: Vec<Key>,
}

/// A load under way.
#[derive(Debug)]
pub(crate) struct Load {
    part: usize,
    blocks: usize,
    keys: Vec<Key>,
}

#[derive(Debug)]
struct StoreJob {
    request: RequestId,
    part: usize,
    keys: Vec<Key>,
}

/// Tiers and jobs of one engine; see the module.
#[derive(Debug)]
pub struct Tiers {
    /// In the order a multi connector asks them; the first with a hit serves the load.
    parts: Vec<Tier>,
    /// Index of the host tier in `parts`.
    host: Option<usize>,
    /// Stores registered by the last step; the worker submits them in the next one.
    registered: Vec<StoreJob>,
    transfers: Transfers,
    chunks: Chunks,
}

impl Tiers {
    /// Tiers of a connector. `remote` is a store that outlives engine processes.
    #[must_use]
    pub fn new(host: Option<Tier>, remote: Option<Tier>, chunks: Chunks) -> Self {
        Self {
            host: host.is_some().then_some(0),
            parts: host.into_iter().chain(remote).collect(),
            registered: Vec::new(),
            transfers: Transfers::default(),
            chunks,
        }
    }

    /// True without a connector.
    #[must_use]
    pub fn is_none(&self) -> bool {
        self.parts.is_empty()
    }

    /// The host tier.
    #[must_use]
    pub fn host(&self) -> Option<&Tier> {
        self.host.map(|i| &self.parts[i])
    }

    pub(crate) fn host_mut(&mut self) -> Option<&mut Tier> {
        self.host.map(|i| &mut self.parts[i])
    }

    /// The shared store.
    #[must_use]
    pub fn remote(&self) -> Option<&Tier> {
        self.parts.get(usize::from(self.host.is_some()))
    }

    /// Takes the shared store out, to hand it to the next life.
    pub(crate) fn take_remote(&mut self) -> Option<Tier> {
        let index = usize::from(self.host.is_some());
        (index < self.parts.len()).then(|| self.parts.swap_remove(index))
    }

    pub(crate) fn is_host(&self, part: usize) -> bool {
        self.host == Some(part)
    }

    /// Blocks of what was found that other weights than these computed.
    pub(super) fn stale(&self, found: &Found, weights: u64) -> usize {
        let Some(part) = self.parts.get(found.part) else { return 0 };
        let stale = found.keys.iter().filter(|key| part.weights(key) != Some(weights));
        (stale.count() * self.chunks.blocks).min(found.blocks)
    }

    /// Leading blocks of a chain that `tier` could give, as whole chunks.
    pub(super) fn run(&self, tier: &Tier, hashes: &[BlockHash]) -> usize {
        let keys = self.chunks.keys(hashes);
        let run = keys.iter().take_while(|key| tier.lookup(key) == Lookup::Hit);
        run.count() * self.chunks.blocks
    }

    /// Work that keeps the engine stepping.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        !self.registered.is_empty()
    }

    /// Totals since the start.
    #[must_use]
    pub fn transfers(&self) -> Transfers {
        self.transfers
    }

    /// What can be loaded of a chain beyond its first `local` blocks. None: a chunk is being
    /// stored, ask again at the next step. The first chunk may begin on the device; less than a
    /// whole chunk is not loaded (vLLM 0.32.0 `_lookup_complete_chunks`).
    pub(super) fn lookup(&self, hashes: &[BlockHash], local: usize) -> Option<Found> {
        let (size, keys) = (self.chunks.blocks, self.chunks.keys(hashes));
        let gain = |end: usize| Some((end * size).checked_sub(local)?).filter(|n| *n >= size);
        if gain(keys.len()).is_none() {
            return Some(Found::default());
        }
        let start = local / size;
        for (part, tier) in self.parts.iter().enumerate() {
            let answers = keys[start..].iter().map(|key| tier.lookup(key));
            let run: Vec<_> = answers.take_while(|answer| *answer != Lookup::Miss).collect();
            if run.contains(&Lookup::Pending) {
                return None;
            }
            let end = start + run.len();
            if let Some(blocks) = gain(end) {
                return Some(Found { part, blocks, end, keys: keys[start..end].to_vec() });
            }
        }
        Some(Found::default())
    }

    pub(super) fn begin_load(&mut self, found: Found) -> Load {
        self.parts[found.part].pin(&found.keys);
        Load { part: found.part, blocks: found.blocks, keys: found.keys }
    }

    pub(super) fn end_load(&mut self, load: &Load) {
        self.parts[load.part].unpin(&load.keys);
        if self.host == Some(load.part) {
            self.transfers.load_bytes += self.bytes(load.blocks);
            self.transfers.loads += 1;
        }
    }

    fn bytes(&self, blocks: usize) -> u64 {
        (blocks * self.chunks.block_size * BYTES_PER_TOKEN) as u64
    }

    /// Registers stores for the chunks of `request` that are computed and not offered yet: of
    /// its prompt only (`offload_prompt_only`, the default of vLLM 0.32.0).
    pub(crate) fn offer(&mut self, request: &mut Request, computed: usize, weights: u64) {
        let chunks = (computed.min(request.prompt_len()) / self.chunks.block_size)
            .min(request.hashes.len())
            .min(request.tables.first().map_or(0, Vec::len))
            / self.chunks.blocks;
        if chunks <= request.stored_chunks {
            return;
        }
        let first = request.stored_chunks;
        let mut keys: Vec<(Key, u64)> =
            self.chunks.keys(&request.hashes).into_iter().map(|key| (key, weights)).collect();
        keys.truncate(chunks);
        keys.drain(..first);
        let mut room = true;
        for (index, part) in self.parts.iter_mut().enumerate() {
            match part.prepare_store(&keys) {
                None => room = false,
                Some(fresh) if fresh.is_empty() => {}
                Some(fresh) => {
                    request.store_jobs += 1;
                    if self.chunks.self_describing {
                        for (index, (key, _)) in (first..).zip(&keys) {
                            part.describe(key, || self.chunks.description(request, index));
                        }
                    }
                    let request = request.ask.id;
                    self.registered.push(StoreJob { request, part: index, keys: fresh });
                }
            }
        }
        if room {
            request.stored_chunks = chunks;
        }
    }

    /// Jobs of the last step, which complete in this one.
    pub(crate) fn take_due(&mut self) -> DueStores {
        DueStores(std::mem::take(&mut self.registered))
    }

    /// Completes jobs; answers whose they were.
    pub(crate) fn complete(&mut self, due: DueStores) -> Vec<RequestId> {
        let mut requests = Vec::new();
        for job in due.0 {
            self.parts[job.part].complete_store(&job.keys);
            if self.host == Some(job.part) {
                self.transfers.store_bytes += self.bytes(job.keys.len() * self.chunks.blocks);
                self.transfers.stores += 1;
            }
            requests.push(job.request);
        }
        requests
    }

    /// Makes a finished request's chunks recent.
    pub(crate) fn finish(&mut self, request: &Request) {
        let mut keys = self.chunks.keys(&request.hashes);
        keys.truncate(request.stored_chunks);
        for part in &mut self.parts {
            part.finish(&keys);
        }
    }

    /// Clears every tier and drops every job.
    pub(crate) fn reset(&mut self) {
        self.registered.clear();
        for part in &mut self.parts {
            part.reset();
        }
    }

    pub(crate) fn take_events(&mut self) -> Vec<Event> {
        self.parts.iter_mut().flat_map(Tier::take_events).collect()
    }
}

/// Stores that the worker submits in the running step.
#[derive(Debug)]
pub(crate) struct DueStores(Vec<StoreJob>);
