//! One life of a simulated engine's process: what its routes read and change.
//! Invariant: nothing of a life outlives it but a shared store's content.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value, json};
use tokio_util::sync::CancellationToken;

use crate::core::{Engine, model};
use crate::faults::Faults;
use crate::http::ApiError;
use crate::metrics::Operations;
use crate::profile::Traits;
use crate::publisher::{BUFFER_STEPS, QUEUE_MAX};
use crate::rank::Rank;
use crate::sim::SimConfig;

/// A life; see the module.
pub(crate) struct Life {
    pub(crate) config: SimConfig,
    pub(crate) traits: &'static Traits,
    pub(crate) ranks: Vec<Arc<Rank>>,
    pub(crate) faults: Arc<Faults>,
    pub(crate) started: SystemTime,
    pub(crate) stop: CancellationToken,
    /// No new connection is taken; the open ones stay.
    pub(crate) closing: CancellationToken,
    /// Event and replay endpoint of each rank, with `*` for the host.
    pub(crate) sources: Vec<(String, String)>,
    pub(crate) ids: AtomicU64,
    pub(crate) turn: AtomicUsize,
    pub(crate) weight_version: Mutex<String>,
    /// Level last recorded by a sleep; none since a full wake.
    pub(crate) sleep_level: Mutex<Option<u8>>,
    pub(crate) operations: Mutex<BTreeMap<&'static str, Operations>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Life {
    /// Unix time in whole seconds.
    pub(crate) fn now(&self) -> u64 {
        SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
    }

    pub(crate) fn started_seconds(&self) -> u64 {
        self.started.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
    }

    /// 16 hexadecimal digits, never the same twice.
    pub(crate) fn fresh_id(&self) -> String {
        let count = self.ids.fetch_add(1, Ordering::Relaxed);
        let life = self.started.duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos() as u64;
        format!("{:016x}", model::mix(self.config.seed ^ model::mix(life) ^ count))
    }

    /// The client's own request id, else a fresh one.
    pub(crate) fn request_id(&self, header: Option<&str>) -> String {
        header.map_or_else(|| self.fresh_id(), str::to_owned)
    }

    pub(crate) fn fingerprint(&self) -> String {
        format!("vllm-{}-{:08x}", self.traits.version, self.config.seed as u32)
    }

    /// The rank with the fewest requests, turn by turn among equals.
    pub(crate) fn balanced_rank(&self) -> Arc<Rank> {
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        let count = self.ranks.len();
        let order = (0..count).map(|offset| &self.ranks[(turn + offset) % count]);
        Arc::clone(order.min_by_key(|rank| rank.load()).expect("there is at least one rank"))
    }

    /// Runs a change on every rank.
    pub(crate) fn change_all<T>(&self, mut edit: impl FnMut(&mut Engine) -> T) -> Vec<T> {
        self.ranks.iter().map(|rank| rank.change(&mut edit)).collect()
    }

    /// One answer for all ranks; they must agree (vLLM 0.32.0).
    pub(crate) fn is_every(&self, ask: impl Fn(&Engine) -> bool) -> Result<bool, ApiError> {
        let answers: Vec<bool> = self.ranks.iter().map(|rank| ask(&rank.lock().engine)).collect();
        let first = answers.first().copied().unwrap_or_default();
        if answers.iter().any(|answer| *answer != first) {
            return Err(ApiError::internal("data parallel ranks do not agree"));
        }
        Ok(first)
    }

    pub(crate) fn is_dead(&self) -> bool {
        self.ranks.iter().any(|rank| rank.lock().is_dead)
    }

    pub(crate) fn weight_version(&self) -> String {
        lock(&self.weight_version).clone()
    }

    pub(crate) fn set_weight_version(&self, version: &str) {
        version.clone_into(&mut lock(&self.weight_version));
    }

    pub(crate) fn record_sleep(&self, level: Option<u8>) {
        *lock(&self.sleep_level) = level;
    }

    pub(crate) fn sleep_level(&self) -> Option<u8> {
        *lock(&self.sleep_level)
    }

    pub(crate) fn operations(&self) -> BTreeMap<&'static str, Operations> {
        lock(&self.operations).clone()
    }

    /// Times a sleep-mode operation until the answer is dropped.
    pub(crate) fn operation(&self, name: &'static str) -> Operation<'_> {
        lock(&self.operations).entry(name).or_default().in_flight += 1;
        Operation { life: self, name, begun: Instant::now() }
    }

    pub(crate) fn event_sources(&self) -> Value {
        let source = |(endpoint, replay): &(String, String)| {
            json!({
                "enable_kv_cache_events": true,
                "publisher": "zmq",
                "endpoint": endpoint,
                "replay_endpoint": replay,
                "buffer_steps": BUFFER_STEPS,
                "hwm": 100_000,
                "max_queue_size": QUEUE_MAX,
                "topic": self.config.topic,
            })
        };
        let ranks = self.sources.iter().enumerate().map(|(i, s)| (i.to_string(), source(s)));
        Value::Object(ranks.collect::<Map<_, _>>())
    }
}

/// See [`Life::operation`].
pub(crate) struct Operation<'a> {
    life: &'a Life,
    name: &'static str,
    begun: Instant,
}

impl Drop for Operation<'_> {
    fn drop(&mut self) {
        let mut operations = lock(&self.life.operations);
        let operation = operations.entry(self.name).or_default();
        operation.in_flight = operation.in_flight.saturating_sub(1);
        operation.seconds.observe(self.begun.elapsed().as_secs_f64());
    }
}
