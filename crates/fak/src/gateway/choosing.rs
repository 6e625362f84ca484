//! Who gets a request: each worker that can take it, and each rank of those that let one be chosen,
//! weighed by what it holds, what it has to do, and whether it fails.
//!
//! Invariant: a claim of one rank is made only where the request is sent to that rank by name.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fak_kernel::route::{self, Breaker, Candidate, Fitness};
use tokio::time::Instant;

use super::Shared;
use super::claim::NoClaim;
use super::dispatch::{Attempt, BYTES_PER_TOKEN, Choice, Job, Seat};
use super::error::Problem;
use super::offer::Offer;
use super::predicted::{Chunks, Predicted};
use super::prompt::Matched;
use crate::engine::Data;
use crate::fleet::{State, View};
use crate::sessions::Turn;

/// A worker that the request may be sent to, and with it the rank that would be named.
struct Target<'a> {
    number: usize,
    view: &'a View,
    rank: Option<u32>,
    /// Among how many ranks of this worker.
    ranks: u32,
    offer: Offer,
}

impl Shared {
    /// Enters the best of the candidates whose door is open.
    pub(super) fn enter(
        &self,
        job: &Job,
        candidates: &[(usize, &View)],
        matched: Result<&Matched, NoClaim>,
        chunks: Chunks,
    ) -> Choice {
        let mut targets = Vec::with_capacity(candidates.len());
        for (number, view) in candidates {
            let ranks = ranks_to_choose(job, &view.state);
            for rank in 0..ranks {
                let rank = (ranks > 1).then_some(rank);
                let offer = self.offer(job, view, matched, rank.or(job.rank));
                targets.push(Target { number: *number, view, rank, ranks, offer });
            }
        }
        let length = matched.map_or_else(
            |_| u32::try_from(chunks.bytes() / BYTES_PER_TOKEN).unwrap_or(u32::MAX),
            |matched| u32::try_from(matched.tokens.len()).unwrap_or(u32::MAX),
        );
        let mut weighed = self.weigh(job, &targets, &chunks, length);
        let request = route::Request { prompt_tokens: length };
        loop {
            // Entered last, since the door may shut at any time.
            let seed = fastrand::u64(..);
            let Some(decision) = route::route(&request, &weighed, &self.config.policy, seed) else {
                return Choice::Nobody;
            };
            let Target { number, view, rank, .. } = targets[decision.chosen];
            if let Some(inside) = view.worker.door.enter() {
                if self.has_changed(number, view) {
                    return Choice::Outdated;
                }
                self.metrics.routed(decision.reason);
                let offer = targets.swap_remove(decision.chosen).offer;
                let on_rank = rank.map(|rank| self.on_ranks.enter(number, rank));
                let view = view.clone();
                return Choice::Seat(Box::new(Seat {
                    number,
                    view,
                    inside,
                    on_rank,
                    offer,
                    chunks,
                }));
            }
            weighed[decision.chosen].is_serving = false;
        }
    }

    /// Whether a worker's life, its weights, or what it may hold of others, are not as in `view`:
    /// then the tokens, the salt and the claim made by it are not either.
    fn has_changed(&self, number: usize, view: &View) -> bool {
        let snapshot = self.fleet.snapshot();
        snapshot.workers.get(number).is_none_or(|now| {
            now.state.lives != view.state.lives
                || now.state.standing.stale != view.state.standing.stale
                || now.state.weights() != view.state.weights()
        })
    }

    /// Where a request of this kind is expected: until events tell, or, where none ever will, for
    /// as long as a conversation may take to come back.
    pub(super) fn predictions(&self, job: &Job) -> &Arc<Predicted> {
        if job.is_read { &self.predicted } else { &self.affine }
    }

    /// Takes note of whether a worker fails. What a client did wrong counts for nothing, nor does a
    /// limit of fak's own.
    pub(super) fn judge(
        &self,
        attempt: &Attempt,
        trial: Option<Trial>,
        worker: &Arc<str>,
        route: Data,
    ) {
        let Some(trial) = trial else { return };
        let has_failed = match attempt {
            Attempt::Answer(answer) if answer.status().is_client_error() => return,
            Attempt::Answer(answer) => {
                answer.status().is_server_error() || answer.body().has_failed()
            }
            Attempt::Failed(Problem::Unreachable | Problem::Cut | Problem::Empty, _) => true,
            Attempt::Failed(..) => return,
        };
        if !has_failed {
            trial.succeeded();
        } else if trial.failed() {
            self.metrics.ejected.inc();
            let path = route.path();
            tracing::warn!(%worker, path, "fails one request after the other: others go first");
        }
    }

    fn weigh(
        &self,
        job: &Job,
        targets: &[Target<'_>],
        chunks: &Chunks,
        length: u32,
    ) -> Vec<Candidate> {
        let (now, bound) = (Instant::now(), job.turn.as_ref().and_then(Turn::worker));
        let weigh = |target: &Target<'_>| {
            let Target { number, view, rank, ranks, offer } = target;
            let place = place(*number, rank.or(job.rank));
            Candidate {
                is_serving: true,
                is_failing: self.breakers.fitness(*number, job.route) == Fitness::Out,
                is_bound: bound.as_ref() == Some(&view.worker.id),
                load: self.load(*number, view, *rank, *ranks, now),
                proven: offer.claim.tokens,
                predicted: self.predictions(job).tokens(chunks, place, length, now),
            }
        };
        targets.iter().map(weigh).collect()
    }

    /// Requests on a worker, fak's own and others; or on one of its ranks: those that were sent
    /// there by name, and its share of the rest.
    fn load(&self, number: usize, view: &View, rank: Option<u32>, ranks: u32, now: Instant) -> u32 {
        let own = u32::try_from(view.worker.door.in_flight()).unwrap_or(u32::MAX);
        let foreign = view.state.counted.map_or(0, |counted| {
            let age = now.saturating_duration_since(counted.at).as_millis();
            let age = u64::try_from(age).unwrap_or(u64::MAX);
            route::foreign(counted.requests, counted.own, age)
        });
        let Some(rank) = rank else { return own.saturating_add(foreign) };
        let (here, named) = self.on_ranks.count(number, rank);
        let rest = own.saturating_sub(named).saturating_add(foreign);
        here.saturating_add(rest / ranks)
    }
}

/// Among how many ranks of its engine fak chooses the one that a request is sent to; 1: among none.
///
/// Only where each rank is heard under the number that the header means: of an engine that serves a
/// part of the ranks (hybrid and external load balancing) the header counts that part from 0, while
/// events have the numbers of the whole (vLLM 0.32.0, `v1/engine/input_processor.py`, read). And
/// only on routes that read the header (`entrypoints/openai/*/serving.py`, read).
fn ranks_to_choose(job: &Job, state: &State) -> u32 {
    let ranks = u32::try_from(state.ranks.len()).unwrap_or(1);
    let is_whole = (0..ranks).all(|number| state.ranks.iter().any(|r| r.number == number));
    let can = job.is_read && job.rank.is_none() && state.obeys_rank() && state.hears_all_ranks();
    if can && is_whole && ranks > 1 { ranks } else { 1 }
}

/// Where a prompt is expected to be cached: on a worker, or on one of its ranks.
pub(super) fn place(number: usize, rank: Option<u32>) -> usize {
    number << 16 | rank.map_or(0, |rank| 1 + (rank as usize & 0x7FFF))
}

/// Requests that were sent to ranks by name.
#[derive(Debug, Default)]
pub(super) struct OnRanks {
    by_rank: Arc<Mutex<HashMap<(usize, u32), u32>>>,
}

impl OnRanks {
    fn enter(&self, worker: usize, rank: u32) -> OnRank {
        let by_rank = Arc::clone(&self.by_rank);
        *lock(&by_rank).entry((worker, rank)).or_default() += 1;
        OnRank { by_rank, worker, rank }
    }

    /// On this rank, and on all of its worker's.
    fn count(&self, worker: usize, rank: u32) -> (u32, u32) {
        let by_rank = lock(&self.by_rank);
        let named = by_rank.iter().filter(|((of, _), _)| *of == worker).map(|(_, count)| count);
        (by_rank.get(&(worker, rank)).copied().unwrap_or(0), named.sum())
    }
}

/// A request on a rank. Dropping it leaves the rank.
#[derive(Debug)]
pub(super) struct OnRank {
    by_rank: Arc<Mutex<HashMap<(usize, u32), u32>>>,
    worker: usize,
    pub(super) rank: u32,
}

impl Drop for OnRank {
    fn drop(&mut self) {
        let mut by_rank = lock(&self.by_rank);
        let key = (self.worker, self.rank);
        if let Some(count) = by_rank.get_mut(&key) {
            *count -= 1;
            if *count == 0 {
                by_rank.remove(&key);
            }
        }
    }
}

/// Which workers fail, by route: a worker may fail on one route alone.
#[derive(Debug)]
pub(super) struct Breakers {
    since: Instant,
    by_worker: Vec<Vec<Arc<Mutex<Breaker>>>>,
}

impl Breakers {
    /// Of so many workers.
    pub(super) fn new(workers: usize) -> Self {
        let routes = || Data::ALL.iter().map(|_| Arc::default()).collect();
        Self { since: Instant::now(), by_worker: (0..workers).map(|_| routes()).collect() }
    }

    fn fitness(&self, worker: usize, route: Data) -> Fitness {
        let breaker = self.by_worker.get(worker).map(|routes| &routes[route as usize]);
        breaker.map_or(Fitness::Sound, |breaker| lock(breaker).fitness(self.now()))
    }

    /// A request of this route goes to `worker`.
    pub(super) fn enter(&self, worker: usize, route: Data) -> Option<Trial> {
        let breaker = Arc::clone(self.by_worker.get(worker)?.get(route as usize)?);
        let is_trial = lock(&breaker).enter(self.now());
        Some(Trial { breaker, since: self.since, is_trial })
    }

    fn now(&self) -> u64 {
        millis(self.since)
    }
}

/// A request whose worker may be failing. Dropped without a word it says nothing of the worker.
#[derive(Debug)]
pub(super) struct Trial {
    breaker: Arc<Mutex<Breaker>>,
    since: Instant,
    is_trial: bool,
}

impl Trial {
    /// The worker failed it; whether it is kept from this route for a while now.
    pub(super) fn failed(mut self) -> bool {
        let is_trial = std::mem::take(&mut self.is_trial);
        lock(&self.breaker).failed(millis(self.since), is_trial)
    }

    /// The worker answered it.
    pub(super) fn succeeded(mut self) {
        self.is_trial = false;
        lock(&self.breaker).succeeded();
    }
}

impl Drop for Trial {
    fn drop(&mut self) {
        if self.is_trial {
            lock(&self.breaker).abandoned(millis(self.since));
        }
    }
}

fn millis(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX)
}

fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    // Counts that are whole after each change: a panic elsewhere leaves nothing half done in here.
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}
