//! The reference: one rank of an engine as vLLM 0.32.0 is built, in so far as its KV events depend
//! on it.
//!
//! What it holds is the truth. Between that truth and fak lie three queues that the engine drains
//! one after the other: the block pool's events, the connector's, and the publisher's; then the
//! replay buffer and the connection.

use std::collections::{BTreeMap, VecDeque};

use fak_kernel::Tier;

/// A block by its content: the path of labels from the root.
pub(crate) type Block = Vec<u16>;

/// How a copy of a block came to be lost.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Lost {
    /// By an action of fak's own: it knows without any event.
    ByFak,
    /// By something that an event tells of: the event's number in [`Engine::told`].
    Event(u64),
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Ev {
    Store {
        parent: Option<Block>,
        block: Block,
    },
    /// The blocks of a hit announced again, from the root to this one; no copy of any is new.
    Report {
        block: Block,
    },
    StoreCpu {
        block: Block,
    },
    Remove {
        block: Block,
    },
    RemoveCpu {
        block: Block,
    },
    Clear,
}

#[derive(Clone, Debug)]
pub(crate) struct Batch {
    pub(crate) seq: u64,
    pub(crate) digest: u128,
    pub(crate) events: Vec<Ev>,
    /// The number of the last event in it, counted over the engine's whole history.
    pub(crate) through: u64,
    pub(crate) marker: Option<u64>,
}

/// One life after another of one rank.
pub(crate) struct Engine {
    pub(crate) life: u64,
    pub(crate) gpu: BTreeMap<Block, u32>,
    pub(crate) cpu: BTreeMap<Block, ()>,
    pub(crate) lost: BTreeMap<(Tier, Block), Lost>,
    pool: Vec<Ev>,
    connector: Vec<Ev>,
    publisher: VecDeque<Batch>,
    pub(crate) buffer: VecDeque<Batch>,
    pub(crate) buffer_max: usize,
    next_seq: u64,
    /// Events queued so far, over all lives.
    told: u64,
    marker: Option<u64>,
    has_connector: bool,
}

impl Engine {
    pub(crate) fn new(has_connector: bool, buffer_max: usize) -> Self {
        Self {
            life: 1,
            gpu: BTreeMap::new(),
            cpu: BTreeMap::new(),
            lost: BTreeMap::new(),
            pool: Vec::new(),
            connector: Vec::new(),
            publisher: VecDeque::new(),
            buffer: VecDeque::new(),
            buffer_max,
            next_seq: 0,
            told: 0,
            marker: None,
            has_connector,
        }
    }

    /// Prefills a prompt: what is cached on the gpu is hit, what the connector has is restored, the
    /// rest computed and stored. Gives the blocks that it took from a cache.
    pub(crate) fn prefill(&mut self, prompt: &[u16]) -> usize {
        let gpu = self.run(prompt, 0, Tier::Gpu);
        let cached = gpu + self.run(prompt, gpu, Tier::Cpu);
        for end in 1..=prompt.len() {
            let block = prompt[..end].to_vec();
            if self.gpu.contains_key(&block) {
                continue;
            }
            self.store(block.clone());
            if self.has_connector && !self.cpu.contains_key(&block) {
                self.cpu.insert(block.clone(), ());
                self.lost.remove(&(Tier::Cpu, block.clone()));
                self.connector.push(Ev::StoreCpu { block });
                self.told += 1;
            }
        }
        cached
    }

    /// Blocks of a prompt from `start` on that a tier holds.
    pub(crate) fn run(&self, prompt: &[u16], start: usize, tier: Tier) -> usize {
        let is_held = |end: &usize| self.holds(tier, &prompt[..*end].to_vec());
        (start + 1..=prompt.len()).take_while(is_held).count()
    }

    /// A request in the mode that announces hits: those of `prompt` are told again.
    pub(crate) fn report(&mut self, prompt: &[u16]) {
        let hit = self.run(prompt, 0, Tier::Gpu);
        if hit > 0 {
            self.pool.push(Ev::Report { block: prompt[..hit].to_vec() });
            self.told += 1;
        }
    }

    /// A second request computed the same block at the same time: one more copy, announced again.
    pub(crate) fn duplicate(&mut self, block: &Block) {
        if self.gpu.contains_key(block) {
            self.store(block.clone());
        }
    }

    fn store(&mut self, block: Block) {
        *self.gpu.entry(block.clone()).or_insert(0) += 1;
        self.lost.remove(&(Tier::Gpu, block.clone()));
        let parent = (block.len() > 1).then(|| block[..block.len() - 1].to_vec());
        self.pool.push(Ev::Store { parent, block });
        self.told += 1;
    }

    /// Evicts one copy of a block of the gpu.
    pub(crate) fn evict(&mut self, block: &Block) {
        let Some(copies) = self.gpu.get_mut(block) else { return };
        *copies -= 1;
        self.pool.push(Ev::Remove { block: block.clone() });
        self.told += 1;
        if *copies == 0 {
            self.gpu.remove(block);
            self.lost.insert((Tier::Gpu, block.clone()), Lost::Event(self.told));
        }
    }

    pub(crate) fn evict_cpu(&mut self, block: &Block) {
        if self.cpu.remove(block).is_some() {
            self.connector.push(Ev::RemoveCpu { block: block.clone() });
            self.told += 1;
            self.lost.insert((Tier::Cpu, block.clone()), Lost::Event(self.told));
        }
    }

    /// Drops the gpu's cache, and the connector's too if `external`. One clear event, whatever was
    /// dropped.
    pub(crate) fn clear(&mut self, external: bool, by_fak: bool) {
        self.pool.push(Ev::Clear);
        self.told += 1;
        let how = if by_fak { Lost::ByFak } else { Lost::Event(self.told) };
        for block in std::mem::take(&mut self.gpu).into_keys() {
            self.lost.insert((Tier::Gpu, block), how);
        }
        if external {
            self.wipe_connector(how);
        }
    }

    /// The tier alone, with no event: a refused external reset. What is pending of it is published
    /// all the same.
    pub(crate) fn wipe_connector(&mut self, how: Lost) {
        for block in std::mem::take(&mut self.cpu).into_keys() {
            self.lost.insert((Tier::Cpu, block), how);
        }
    }

    /// A scheduler step with output: hands what is pending to the publisher, the connector's events
    /// last.
    pub(crate) fn step(&mut self) {
        let mut events = std::mem::take(&mut self.pool);
        events.append(&mut self.connector);
        if events.is_empty() {
            return;
        }
        self.publisher.push_back(Batch {
            seq: 0,
            digest: 0,
            events,
            through: self.told,
            marker: self.marker.take(),
        });
    }

    /// fak's marker request: its store goes out with a step of its own.
    pub(crate) fn mark(&mut self, id: u64) {
        self.step();
        self.marker = Some(id);
        self.store(vec![u16::MAX, id as u16, self.told as u16]);
        self.step();
    }

    /// One turn of the publisher's loop after it looked at its replay socket: publishes one batch,
    /// if there is one.
    pub(crate) fn publish(&mut self) -> Option<Batch> {
        let mut batch = self.publisher.pop_front()?;
        batch.seq = self.next_seq;
        // The payload carries a timestamp: no two batches of any two lives have the same bytes.
        batch.digest = u128::from(self.life) << 64 | u128::from(self.next_seq);
        self.next_seq += 1;
        self.buffer.push_back(batch.clone());
        if self.buffer.len() > self.buffer_max {
            self.buffer.pop_front();
        }
        Some(batch)
    }

    /// A new process: nothing of the old one is left, neither caches nor queues nor numbers.
    pub(crate) fn restart(&mut self) {
        self.told += 1;
        let how = Lost::Event(self.told);
        for block in std::mem::take(&mut self.gpu).into_keys() {
            self.lost.insert((Tier::Gpu, block), how);
        }
        self.wipe_connector(how);
        self.life += 1;
        self.pool.clear();
        self.connector.clear();
        self.publisher.clear();
        self.buffer.clear();
        self.marker = None;
        self.next_seq = 0;
    }

    pub(crate) fn told(&self) -> u64 {
        self.told
    }

    pub(crate) fn is_published(&self) -> bool {
        self.pool.is_empty() && self.connector.is_empty() && self.publisher.is_empty()
    }

    pub(crate) fn holds(&self, tier: Tier, block: &Block) -> bool {
        match tier {
            Tier::Gpu => self.gpu.contains_key(block),
            Tier::Cpu => self.cpu.contains_key(block),
            Tier::Disk | Tier::Remote => false,
        }
    }
}
