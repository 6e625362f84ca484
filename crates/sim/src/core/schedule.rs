//! The step: admit, allocate, compute, cache, store, publish.
//! Invariant: a block is hittable from the step that computes its last token on, never before,
//! and the block with a prompt's last token is never a device hit.

use std::ops::Range;

use super::connector::Found;
use super::events::{Event, GroupKind, Medium, Stored};
use super::hash::BlockHash;
use super::pool::BlockId;
use super::request::{CachedTokens, Output, Request, RequestId, Reused, Status};
use super::{Engine, Step, TAKEN_MAX, Taken, control::Pause, model};

/// A device hit: leading blocks that every group holds, and the groups' tables.
#[derive(Debug, Default)]
pub(super) struct LocalHit {
    pub(super) blocks: usize,
    pub(super) tables: Vec<Vec<BlockId>>,
}

enum Admission {
    Running(usize),
    Loading,
    /// Asks again at the next step; others may go first.
    Skipped,
    /// No room; nobody behind it goes first.
    Full,
}

impl Engine {
    /// Advances every request that can be.
    pub fn step(&mut self) -> Step {
        let due = self.tiers.take_due();
        let scheduled = self.schedule();
        self.offer_stores(&scheduled);
        let mut step =
            Step { computed_tokens: scheduled.iter().map(|(_, n)| n).sum(), ..Step::default() };
        self.counters.steps += u64::from(step.computed_tokens > 0);
        for (id, computed) in scheduled {
            step.outputs.extend(self.advance(id, computed));
        }
        for id in self.tiers.complete(due) {
            if let Some(request) = self.requests.get_mut(&id) {
                request.store_jobs = request.store_jobs.saturating_sub(1);
            }
        }
        step.events = self.pool.take_events();
        step.events.extend(self.tiers.take_events());
        self.gauges.running = self.running.len();
        self.gauges.deferred = self.loading.len();
        self.gauges.waiting = self.waiting.len();
        self.gauges.kv_usage = self.pool.usage();
        step
    }

    fn schedule(&mut self) -> Vec<(RequestId, usize)> {
        let mut scheduled = Vec::new();
        if self.pause == Pause::HoldAll {
            return scheduled;
        }
        let mut budget = self.config.max_step_tokens;
        let preempted = self.schedule_running(&mut budget, &mut scheduled);
        if !preempted {
            self.promote_loaded();
            self.schedule_waiting(&mut budget, &mut scheduled);
        }
        scheduled
    }

    /// Answers whether a request had to be preempted for room.
    fn schedule_running(
        &mut self,
        budget: &mut usize,
        scheduled: &mut Vec<(RequestId, usize)>,
    ) -> bool {
        let mut preempted = false;
        let mut index = 0;
        while index < self.running.len() && *budget > 0 {
            let id = self.running[index];
            let Some(mut request) = self.requests.remove(&id) else { break };
            let count = (request.tokens.len() - request.computed).min(*budget);
            let end = request.computed + count;
            let mut fits = self.allocate(&mut request, end);
            while !fits && self.running.last().is_some_and(|victim| *victim != id) {
                let victim = self.running.pop().expect("the last one was just seen");
                self.preempt(victim);
                preempted = true;
                fits = self.allocate(&mut request, end);
            }
            if fits {
                self.cache_blocks(&mut request, end);
                scheduled.push((id, count));
                *budget -= count;
            }
            self.requests.insert(id, request);
            if !fits {
                self.running.pop();
                self.preempt(id);
                return true;
            }
            index += 1;
        }
        preempted
    }

    /// Puts a request back to the head of the queue, without its blocks.
    pub(super) fn preempt(&mut self, id: RequestId) {
        let Some(mut request) = self.requests.remove(&id) else { return };
        self.free_tables(&mut request, true);
        request.cached_blocks.fill(0);
        request.computed = 0;
        request.preemptions += 1;
        request.status = Status::Preempted;
        self.counters.preemptions += 1;
        self.requests.insert(id, request);
        self.waiting.push_front(id);
    }

    /// Loads of the last step have arrived: their blocks become hittable, and the requests go
    /// before the queue.
    fn promote_loaded(&mut self) {
        for id in self.loading.drain(..).rev().collect::<Vec<_>>() {
            let Some(mut request) = self.requests.remove(&id) else { continue };
            if let Some(load) = request.loading.take() {
                self.tiers.end_load(&load);
            }
            let computed = request.computed;
            self.cache_blocks(&mut request, computed);
            // A fully loaded prompt computes its last token again, to sample the next.
            request.computed = computed.min(request.tokens.len() - 1);
            request.status =
                if request.preemptions > 0 { Status::Preempted } else { Status::Waiting };
            self.requests.insert(id, request);
            self.waiting.push_front(id);
        }
    }

    fn schedule_waiting(&mut self, budget: &mut usize, scheduled: &mut Vec<(RequestId, usize)>) {
        let mut skipped = Vec::new();
        while *budget > 0 && self.running.len() < self.config.max_running {
            let held = self.pause == Pause::HoldNew;
            let Some(&id) = self.waiting.front() else { break };
            let Some(mut request) = self.requests.remove(&id) else { break };
            if held && !request.holds_blocks() {
                self.requests.insert(id, request);
                break;
            }
            let admission = self.admit(&mut request, *budget);
            self.requests.insert(id, request);
            match admission {
                Admission::Full => break,
                Admission::Skipped => {
                    self.waiting.pop_front();
                    skipped.push(id);
                }
                Admission::Loading => {
                    self.waiting.pop_front();
                    self.loading.push_back(id);
                }
                Admission::Running(count) => {
                    self.waiting.pop_front();
                    self.running.push(id);
                    scheduled.push((id, count));
                    *budget -= count;
                }
            }
        }
        for id in skipped.into_iter().rev() {
            self.waiting.push_front(id);
        }
    }

    fn admit(&mut self, request: &mut Request, budget: usize) -> Admission {
        let fresh = request.computed == 0;
        let block_size = self.config.block_size;
        let Some((hit, found)) = self.find(request, fresh) else { return Admission::Skipped };
        let local = hit.blocks * block_size;
        let loaded = found.blocks * block_size;
        let known = if fresh { local + loaded } else { request.computed };
        let count = (request.tokens.len() - known).min(budget);
        if !self.fits(request, &hit, request.tokens.len()) {
            return Admission::Full;
        }
        if fresh {
            self.adopt(request, &hit);
            self.count_lookup(request, local, (found.part, loaded));
            let stale = self.stale(&hit.tables[0], &found) * block_size;
            self.remember(request, (local, found.part, loaded), stale);
        }
        let fitted = self.allocate(request, if loaded > 0 { known } else { known + count });
        assert!(fitted, "room for the whole request was checked");
        request.computed = known;
        if loaded > 0 {
            // What was hit is not offered again, so it is not protected from its own eviction.
            request.stored_chunks = found.end;
            request.loading = Some(self.tiers.begin_load(found));
            request.status = Status::Loading;
            return Admission::Loading;
        }
        self.cache_blocks(request, known + count);
        request.status = Status::Running;
        Admission::Running(count)
    }

    /// What the caches have of a request that starts. None: it asks again at the next step.
    fn find(&mut self, request: &Request, fresh: bool) -> Option<(LocalHit, Found)> {
        let nothing = LocalHit { blocks: 0, tables: vec![Vec::new(); self.groups.len()] };
        if !fresh {
            return Some((nothing, Found::default()));
        }
        let skips = request.ask.skips_caches;
        let hit =
            if skips { nothing } else { self.local_hit(&request.hashes, request.tokens.len()) };
        // With each lookup, also when the request is put off afterwards (`get_computed_blocks`).
        if request.ask.reports_hits {
            self.report(request, &hit);
        }
        if self.tiers.is_none() {
            return Some((hit, Found::default()));
        }
        if request.store_jobs > 0 {
            return None;
        }
        let found = if skips {
            Found::default()
        } else {
            self.tiers.lookup(&request.hashes, hit.blocks)?
        };
        Some((hit, found))
    }

    /// Announces the blocks of a hit as stores, from the chain's start: no block changes.
    fn report(&mut self, request: &Request, hit: &LocalHit) {
        for (group, table) in (0u32..).zip(&hit.tables) {
            if !table.is_empty() {
                let blocks: Vec<usize> = (0..table.len()).collect();
                self.announce_stored(request, group, &blocks, 0..table.len());
            }
        }
    }

    /// Leading blocks that can be used, at most those before the last token.
    pub(super) fn local_hit(&self, hashes: &[BlockHash], tokens: usize) -> LocalHit {
        let limit = (tokens.saturating_sub(1) / self.config.block_size).min(hashes.len());
        let cached = |index: usize, group: u32| self.pool.cached(&(hashes[index], group));
        let mut full: Vec<BlockId> = (0..limit).map_while(|i| cached(i, 0)).collect();
        if self.config.drops_last_hit {
            // The draft head needs the hidden states before the first token that it proposes.
            full.pop();
        }
        let Some(GroupKind::SlidingWindow(window)) = self.groups.get(1).copied() else {
            return LocalHit { blocks: full.len(), tables: vec![full] };
        };
        // The last run of a window's blocks, or an unbroken run from the start.
        let needed = window.saturating_sub(1).div_ceil(self.config.block_size);
        let (mut end, mut run) = (full.len(), 0);
        for index in (0..full.len()).rev() {
            if cached(index, 1).is_some() {
                run += 1;
                if run == needed {
                    break;
                }
            } else {
                (end, run) = (index, 0);
            }
        }
        let start = end - run;
        let windowed =
            (0..end).map(|i| if i < start { None } else { cached(i, 1) }.unwrap_or(0)).collect();
        LocalHit { blocks: end, tables: vec![full[..end].to_vec(), windowed] }
    }

    /// Whether `tokens` tokens of a request find room, its hits counted as taken.
    fn fits(&self, request: &Request, hit: &LocalHit, tokens: usize) -> bool {
        let blocks = tokens.div_ceil(self.config.block_size);
        let needed: usize = (0..self.groups.len())
            .map(|group| {
                let hits = hit.tables.get(group);
                let idle =
                    hits.map_or(0, |t| t.iter().filter(|id| self.pool.is_free(**id)).count());
                let held = request.tables[group].len() + hits.map_or(0, Vec::len);
                blocks.saturating_sub(held) + idle
            })
            .sum();
        needed <= self.pool.free_count()
    }

    fn adopt(&mut self, request: &mut Request, hit: &LocalHit) {
        for (group, table) in hit.tables.iter().enumerate() {
            self.pool.touch(table);
            request.tables[group].clone_from(table);
            request.cached_blocks[group] = table.len();
        }
    }

    fn count_lookup(&mut self, request: &mut Request, local: usize, external: (usize, usize)) {
        let tokens = request.tokens.len();
        let (part, loaded) = external;
        if request.preemptions > 0 {
            return;
        }
        if !request.ask.skips_caches {
            self.counters.prefix_queries += tokens as u64;
            self.counters.prefix_hits += local as u64;
        }
        if !self.tiers.is_none() {
            self.counters.external_queries += (tokens - local) as u64;
            self.counters.external_hits += loaded as u64;
            if self.tiers.is_host(part) {
                self.counters.host_hits += loaded as u64;
            }
        }
        request.cached = Some(CachedTokens { local, external: loaded, created: 0 });
    }

    /// For [`Engine::reused`]; of a preempted request's later lookups only what was stale counts.
    fn remember(&mut self, request: &Request, found: (usize, usize, usize), stale: usize) {
        let (gpu, part, loaded) = found;
        let external_id = request.ask.external_id.clone();
        if request.preemptions > 0 {
            let known = self.taken.iter_mut().rev().find(|taken| taken.external_id == external_id);
            known.into_iter().for_each(|taken| taken.reused.stale += stale);
            return;
        }
        let is_host = self.tiers.is_host(part);
        let (cpu, remote) = if is_host { (loaded, 0) } else { (0, loaded) };
        if self.taken.len() == TAKEN_MAX {
            self.taken.pop_front();
        }
        let (salt, reused) =
            (request.ask.identity.salt.clone(), Reused { gpu, cpu, remote, stale });
        self.taken.push_back(Taken { external_id, salt, reused });
    }

    /// Gives a request blocks for `end` tokens, after those out of the window are let go.
    fn allocate(&mut self, request: &mut Request, end: usize) -> bool {
        let block_size = self.config.block_size;
        if let Some(GroupKind::SlidingWindow(window)) = self.groups.get(1).copied() {
            let skipped = (request.computed + 1).saturating_sub(window) / block_size;
            let table = &mut request.tables[1];
            let out: Vec<BlockId> =
                table.iter_mut().take(skipped).map(std::mem::take).filter(|id| *id != 0).collect();
            self.pool.release(out.into_iter().rev());
        }
        let needed = |table: &Vec<BlockId>| end.div_ceil(block_size).saturating_sub(table.len());
        if request.tables.iter().map(needed).sum::<usize>() > self.pool.free_count() {
            return false;
        }
        for table in &mut request.tables {
            let count = needed(table);
            table.extend(self.pool.allocate(count));
        }
        true
    }

    /// Makes the full blocks of the first `tokens` tokens hittable and announces the new ones.
    fn cache_blocks(&mut self, request: &mut Request, tokens: usize) {
        let full = tokens.min(request.tokens.len()) / self.config.block_size;
        for group in 0..self.groups.len() as u32 {
            let start = request.cached_blocks[group as usize];
            if full <= start {
                continue;
            }
            request.cached_blocks[group as usize] = full;
            let table = &request.tables[group as usize];
            let present: Vec<usize> = (start..full).filter(|i| table[*i] != 0).collect();
            for &index in &present {
                self.pool.insert(table[index], (request.hashes[index], group), self.weights);
            }
            self.announce_stored(request, group, &present, start..full);
        }
    }

    /// Announces `present` blocks of a request, which lie in the range `of`, as stored.
    fn announce_stored(
        &mut self,
        request: &Request,
        group: u32,
        present: &[usize],
        of: Range<usize>,
    ) {
        let block_size = self.config.block_size;
        self.pool.announce(Event::Stored(Box::new(Stored {
            hashes: present.iter().map(|i| request.hashes[*i]).collect(),
            parent: of.start.checked_sub(1).map(|i| request.hashes[i]),
            tokens: request.tokens[of.start * block_size..of.end * block_size].to_vec(),
            block_size,
            lora: request.ask.identity.lora.clone(),
            medium: Medium::Gpu,
            extra_keys: Some(present.iter().map(|i| request.ask.identity.extra_keys(*i)).collect()),
            group,
            spec: Some(self.groups[group as usize]),
            session_id: request.ask.session_id.clone(),
        })));
    }

    /// Offers this step's new blocks, and the last blocks of what finished, to the connector.
    fn offer_stores(&mut self, scheduled: &[(RequestId, usize)]) {
        let finished = std::mem::take(&mut self.finished);
        if self.tiers.is_none() {
            return;
        }
        for (id, count) in scheduled {
            if let Some(request) = self.requests.get_mut(id) {
                let computed = request.computed + count;
                self.tiers.offer(request, computed, self.weights);
            }
        }
        for mut request in finished {
            let computed = if request.aborted {
                request.computed
            } else {
                request.prompt_len().max(request.tokens.len() - 1)
            };
            self.tiers.offer(&mut request, computed, self.weights);
            self.tiers.finish(&request);
        }
    }

    /// Counts computed tokens and samples once a request is fully computed.
    fn advance(&mut self, id: RequestId, computed: usize) -> Option<Output> {
        let block_size = self.config.block_size;
        let request = self.requests.get_mut(&id)?;
        request.computed += computed;
        if request.computed < request.tokens.len() {
            return None;
        }
        let first = request.output().is_empty();
        let token = model::next_token(self.weights, request.digest, request.output().len());
        let finish = request.append(token, block_size, self.config.max_model_len);
        if first {
            self.count_prompt(id);
        }
        self.counters.generation_tokens += 1;
        self.counters.tokens_while_asleep += u64::from(self.memory.is_asleep());
        let cached = self.requests.get(&id)?.cached;
        if finish.is_some() {
            let request = self.requests.remove(&id)?;
            self.running.retain(|r| *r != id);
            self.retire(request);
        }
        Some(Output { id, tokens: vec![token], finish, cached })
    }

    fn count_prompt(&mut self, id: RequestId) {
        let block_size = self.config.block_size;
        let Some(request) = self.requests.get_mut(&id) else { return };
        let prompt = request.prompt_len();
        let cached = request.cached.get_or_insert_default();
        let known = cached.local + cached.external;
        cached.created = (prompt / block_size * block_size).saturating_sub(known);
        self.counters.prompt_tokens += prompt as u64;
        self.counters.prompt_tokens_local += cached.local as u64;
        self.counters.prompt_tokens_external += cached.external as u64;
        self.counters.prompt_tokens_computed += prompt.saturating_sub(known) as u64;
    }
}
