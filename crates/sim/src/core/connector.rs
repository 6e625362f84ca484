//! KV connectors: which tiers a connector has, and its store and load jobs.
//! Invariant: a store becomes hittable one step after the step that computed its blocks; a reset
//! drops every job in flight, so nothing from before it completes after it.
//!
//! Follows vLLM 0.32.0 `kv_connector/v1/offloading/scheduler.py` and `multi_connector.py`.

use super::events::Event;
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
    block_size: usize,
}

impl Tiers {
    /// Tiers of a connector. `remote` is a store that outlives engine processes.
    #[must_use]
    pub fn new(host: Option<Tier>, remote: Option<Tier>, block_size: usize) -> Self {
        Self {
            host: host.is_some().then_some(0),
            parts: host.into_iter().chain(remote).collect(),
            registered: Vec::new(),
            transfers: Transfers::default(),
            block_size,
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

    pub(crate) fn weights(&self, part: usize, key: &Key) -> Option<u64> {
        self.parts.get(part).and_then(|part| part.weights(key))
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

    /// Leading chunks of `keys` that can be loaded, and from which part. None: a chunk is being
    /// stored, ask again at the next step.
    pub(crate) fn lookup(&self, keys: &[Key]) -> Option<(usize, usize)> {
        for (index, part) in self.parts.iter().enumerate() {
            let answers = keys.iter().map(|key| part.lookup(key));
            let run: Vec<_> = answers.take_while(|answer| *answer != Lookup::Miss).collect();
            if run.contains(&Lookup::Pending) {
                return None;
            }
            if !run.is_empty() {
                return Some((index, run.len()));
            }
        }
        Some((0, 0))
    }

    pub(crate) fn begin_load(&mut self, part: usize, keys: &[Key]) {
        self.parts[part].pin(keys);
    }

    pub(crate) fn end_load(&mut self, part: usize, keys: &[Key]) {
        self.parts[part].unpin(keys);
        if self.host == Some(part) {
            self.transfers.load_bytes += self.bytes(keys.len());
            self.transfers.loads += 1;
        }
    }

    fn bytes(&self, blocks: usize) -> u64 {
        (blocks * self.block_size * BYTES_PER_TOKEN) as u64
    }

    /// Registers stores for the chunks of `request` that are computed and not offered yet: of
    /// its prompt only (`offload_prompt_only`, the default of vLLM 0.32.0).
    pub(crate) fn offer(&mut self, request: &mut Request, computed: usize, weights: u64) {
        let chunks = (computed.min(request.prompt_len()) / self.block_size)
            .min(request.hashes.len())
            .min(request.tables.first().map_or(0, Vec::len));
        if chunks <= request.stored_chunks {
            return;
        }
        let keys: Vec<(Key, u64)> = request.hashes[request.stored_chunks..chunks]
            .iter()
            .map(|hash| ((*hash, 0), weights))
            .collect();
        let mut room = true;
        for (index, part) in self.parts.iter_mut().enumerate() {
            match part.prepare_store(&keys) {
                None => room = false,
                Some(fresh) if fresh.is_empty() => {}
                Some(fresh) => {
                    request.store_jobs += 1;
                    self.registered.push(StoreJob {
                        request: request.ask.id,
                        part: index,
                        keys: fresh,
                    });
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
                self.transfers.store_bytes += self.bytes(job.keys.len());
                self.transfers.stores += 1;
            }
            requests.push(job.request);
        }
        requests
    }

    /// Makes a finished request's chunks recent.
    pub(crate) fn finish(&mut self, request: &Request) {
        let keys: Vec<Key> =
            request.hashes.iter().take(request.stored_chunks).map(|hash| (*hash, 0)).collect();
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
