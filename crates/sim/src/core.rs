//! One engine core: scheduler, device cache and connector tiers, driven by `step`.
//! Invariant: synchronous and without clock, so the same calls give the same outputs, events
//! and counters.
//!
//! Follows vLLM 0.32.0 `v1/core/sched/scheduler.py` and `v1/engine/core.py`. What matters to a
//! client: events are published only by a step that has work, so a reset on an idle engine is
//! announced with whatever comes next; a finished or dropped request causes one more step, which
//! publishes too; a connector load takes the step that issues it, so a restored prefix is
//! announced one batch after the clear.

pub mod connector;
pub mod control;
pub mod events;
pub mod hash;
pub mod model;
pub mod pool;
pub mod request;
mod schedule;
pub mod stats;
pub mod tier;

use std::collections::{BTreeMap, VecDeque};

use connector::{Chunks, Connector, Found, Tiers};
use control::{Idle, Memory, Pause};
use events::{Event, GroupKind};
use hash::{BlockHash, Identity};
use pool::{BlockId, Pool};
use request::{Ask, Finish, Output, Queue, Request, RequestId, Reused};
use stats::{Counters, Gauges};
use tier::Tier;

/// Shape and rules of one engine.
#[derive(Clone, Debug)]
pub struct Config {
    /// Tokens a block.
    pub block_size: usize,
    /// Device blocks, the unusable null block included.
    pub gpu_blocks: u32,
    /// Host tier, in device blocks.
    pub cpu_blocks: usize,
    /// Device blocks that the host tier keeps as one chunk.
    pub blocks_per_chunk: usize,
    /// Host-tier events carry every block of a chunk with its tokens and parent
    /// (`self_describing_kv_events`).
    pub self_describing: bool,
    /// Drafts with EAGLE or MTP: the last block of every device hit is computed again.
    pub drops_last_hit: bool,
    /// Connector.
    pub connector: Connector,
    /// Tokens a request may reach, prompt and output.
    pub max_model_len: usize,
    /// Requests in the running batch (vLLM's default for a server on CPU).
    pub max_running: usize,
    /// Tokens computed in a step; longer prompts take several (vLLM's default for a server).
    pub max_step_tokens: usize,
    /// Sliding window of a second KV cache group, in tokens.
    pub sliding_window: Option<usize>,
    /// Pause and sleep clear the connector's tiers (vLLM 0.23.0 and later).
    pub pause_reaches_connector: bool,
    /// A partial wake keeps the scheduler paused (vLLM 0.24.0 and later).
    pub partial_wake_keeps_paused: bool,
    /// `is_sleeping` is true when only paused (vLLM 0.17.1 and later).
    pub paused_counts_as_sleeping: bool,
    /// Tokens a block in host-tier events: 0 since vLLM 0.20.2.
    pub cpu_event_block_size: usize,
}

/// One engine core; see the module.
#[derive(Debug)]
pub struct Engine {
    config: Config,
    groups: Vec<GroupKind>,
    pool: Pool,
    tiers: Tiers,
    requests: BTreeMap<RequestId, Request>,
    running: Vec<RequestId>,
    waiting: Queue,
    /// Requests whose blocks are being loaded; drained even while new ones are held.
    loading: Queue,
    /// Finished since the last step: they cause a step and their last blocks are stored by it.
    finished: Vec<Request>,
    pause: Pause,
    memory: Memory,
    idle: Vec<Idle>,
    weights: u64,
    checkpoint: u64,
    counters: Counters,
    gauges: Gauges,
    /// The latest requests by their external ids, oldest first.
    taken: VecDeque<Taken>,
}

/// What a step did.
#[derive(Debug, Default)]
pub struct Step {
    /// News of requests.
    pub outputs: Vec<Output>,
    /// Events to publish as one batch; empty: no batch.
    pub events: Vec<Event>,
    /// Tokens computed; 0 for a step that only bookkeeps.
    pub computed_tokens: usize,
}

/// What an identical request would find cached right now; the truth that claims are held against.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Holds {
    /// Leading blocks on the device, never the block with the prompt's last token.
    pub gpu: usize,
    /// Leading blocks in the host tier.
    pub cpu: usize,
    /// Leading blocks in the shared store.
    pub remote: usize,
    /// Prompt tokens that the request would report as cached, device and connector together.
    pub hit_tokens: usize,
    /// Blocks of these hits that other weights than the current ones computed.
    pub stale: usize,
}

impl Engine {
    /// An engine of a new process. `remote` is what a shared store still holds.
    #[must_use]
    pub fn new(config: Config, checkpoint: u64, remote: Option<Tier>) -> Self {
        let host = config.connector.offloads().then(|| {
            let chunks = config.cpu_blocks / config.blocks_per_chunk;
            Tier::host(chunks, config.cpu_event_block_size)
        });
        let remote = config
            .connector
            .has_remote()
            .then(|| remote.unwrap_or_else(|| Tier::remote(REMOTE_CHUNKS)));
        let window = config.sliding_window.map(GroupKind::SlidingWindow);
        Self {
            groups: std::iter::once(GroupKind::Full).chain(window).collect(),
            pool: Pool::new(config.gpu_blocks),
            tiers: Tiers::new(host, remote, Chunks::of(&config)),
            requests: BTreeMap::new(),
            running: Vec::new(),
            waiting: Queue::new(),
            loading: Queue::new(),
            finished: Vec::new(),
            pause: Pause::Running,
            memory: Memory::default(),
            idle: Vec::new(),
            weights: checkpoint,
            checkpoint,
            counters: Counters::default(),
            gauges: Gauges::default(),
            taken: VecDeque::new(),
            config,
        }
    }

    /// Queues a request.
    pub fn add(&mut self, ask: Ask) {
        let id = ask.id;
        let request = Request::new(ask, self.groups.len(), self.config.block_size);
        self.requests.insert(id, request);
        self.waiting.push_back(id);
    }

    /// Drops requests without an output: their client is gone.
    pub fn cancel(&mut self, ids: &[RequestId]) {
        for id in ids {
            self.drop_request(*id);
        }
    }

    /// Drops requests and tells their clients: those of the external ids, or all.
    pub fn abort(&mut self, external_ids: Option<&[String]>) -> Vec<Output> {
        self.end_all(external_ids, &Finish::Abort)
    }

    /// Ends every request with an error, as a dying engine does.
    pub fn fail(&mut self) -> Vec<Output> {
        self.end_all(None, &Finish::Error)
    }

    fn end_all(&mut self, external_ids: Option<&[String]>, finish: &Finish) -> Vec<Output> {
        let named = |r: &Request| external_ids.is_none_or(|ids| ids.contains(&r.ask.external_id));
        let ids: Vec<RequestId> =
            self.requests.values().filter(|r| named(r)).map(|r| r.ask.id).collect();
        ids.into_iter()
            .map(|id| {
                let cached = self.requests.get(&id).and_then(|r| r.cached).unwrap_or_default();
                self.drop_request(id);
                Output {
                    id,
                    tokens: Vec::new(),
                    finish: Some(finish.clone()),
                    cached: Some(cached),
                }
            })
            .collect()
    }

    fn drop_request(&mut self, id: RequestId) {
        if let Some(mut request) = self.requests.remove(&id) {
            request.aborted = true;
            self.unqueue(id);
            self.retire(request);
        }
    }

    fn unqueue(&mut self, id: RequestId) {
        self.running.retain(|r| *r != id);
        self.waiting.retain(|r| *r != id);
        self.loading.retain(|r| *r != id);
    }

    /// Frees a request's blocks, tail first, and remembers it for the next step.
    fn retire(&mut self, mut request: Request) {
        if let Some(load) = request.loading.take() {
            self.tiers.end_load(&load);
        }
        self.free_tables(&mut request, false);
        self.finished.push(request);
    }

    /// Releases blocks in reverse order; `forget` also empties the tables.
    fn free_tables(&mut self, request: &mut Request, forget: bool) {
        for table in &mut request.tables {
            self.pool.release(table.iter().rev().copied());
            if forget {
                table.clear();
            }
        }
    }

    /// Requests that a step could advance; queued ones do not count while new work is held.
    #[must_use]
    pub fn has_unfinished(&self) -> bool {
        match self.pause {
            Pause::Running => !self.requests.is_empty(),
            Pause::HoldNew => {
                let head = self.waiting.front().and_then(|id| self.requests.get(id));
                !self.running.is_empty()
                    || !self.loading.is_empty()
                    || head.is_some_and(Request::holds_blocks)
            }
            Pause::HoldAll => false,
        }
    }

    /// True when the step loop has something to do.
    #[must_use]
    pub fn has_work(&self) -> bool {
        self.has_unfinished() || !self.finished.is_empty() || self.tiers.is_busy()
    }

    /// Totals since the process started.
    #[must_use]
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Gauges as of the last step, which is all the real engine shows.
    #[must_use]
    pub fn gauges(&self) -> &Gauges {
        &self.gauges
    }

    /// Tiers of the connector.
    #[must_use]
    pub fn tiers(&self) -> &Tiers {
        &self.tiers
    }

    /// Takes the shared store out, which outlives the process: the end of this engine.
    pub fn take_remote(&mut self) -> Option<Tier> {
        self.tiers.take_remote()
    }

    /// Makes a connector report late; see [`Tier::hold_events_back`].
    pub fn hold_connector_events(&mut self, held_back: bool) {
        if let Some(host) = self.tiers.host_mut() {
            host.hold_events_back(held_back);
        }
    }

    /// What an identical request would find; see [`Holds`].
    #[must_use]
    pub fn holds(&self, prompt: &[u32], identity: &Identity) -> Holds {
        let mut hashes: Vec<BlockHash> = Vec::new();
        identity.extend_chain(&mut hashes, prompt, self.config.block_size);
        let local = self.local_hit(&hashes, prompt.len());
        let run = |tier: Option<&Tier>| tier.map_or(0, |tier| self.tiers.run(tier, &hashes));
        let found = self.tiers.lookup(&hashes, local.blocks).unwrap_or_default();
        Holds {
            gpu: local.blocks,
            cpu: run(self.tiers.host()),
            remote: run(self.tiers.remote()),
            hit_tokens: (local.blocks + found.blocks) * self.config.block_size,
            stale: self.stale(&local.tables[0], &found),
        }
    }

    /// Blocks of a hit that other weights than the current ones computed.
    fn stale(&self, local: &[BlockId], found: &Found) -> usize {
        let local = local.iter().filter(|id| self.pool.weights(**id) != self.weights);
        local.count() + self.tiers.stale(found, self.weights)
    }

    /// What a request, named by its external id, took from caches; nothing of one that was never
    /// scheduled, or too many requests ago.
    #[must_use]
    pub fn reused(&self, external_id: &str) -> Option<Reused> {
        self.taken(external_id).map(|taken| taken.reused)
    }

    /// The salt that such a request was sent with.
    #[must_use]
    pub fn salt(&self, external_id: &str) -> Option<Option<String>> {
        self.taken(external_id).map(|taken| taken.salt.clone())
    }

    fn taken(&self, external_id: &str) -> Option<&Taken> {
        self.taken.iter().rev().find(|taken| taken.external_id == external_id)
    }
}

/// Requests whose [`Taken`] is remembered.
const TAKEN_MAX: usize = 1024;

/// What a request was sent with, and took from caches.
#[derive(Debug)]
struct Taken {
    external_id: String,
    salt: Option<String>,
    reused: Reused,
}

/// Room of the shared store; far more than any test fills.
const REMOTE_CHUNKS: usize = 1 << 20;

#[cfg(test)]
mod tests;
