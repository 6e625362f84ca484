//! Pause, sleep, wake and reset of one engine.
//! Invariant: a pause is complete only when nothing runs; what a pause clears, it clears then.
//!
//! Follows vLLM 0.32.0 `v1/engine/core.py`, with its quirks: `keep` with a cleared cache preempts
//! and recomputes; resume does not look at the memory; wake does not look at who paused; a busy
//! reset answers false and has wiped the connector all the same.

use super::Engine;
use super::request::{Output, Status};

/// What happens to requests in flight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PauseMode {
    /// They are dropped.
    #[default]
    Abort,
    /// They run to their end.
    Wait,
    /// They stall and go on after a resume.
    Keep,
}

/// State of the scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pause {
    /// Schedules everything.
    Running,
    /// Schedules what runs, queues what comes (`PAUSED_NEW`).
    HoldNew,
    /// Schedules nothing (`PAUSED_ALL`).
    HoldAll,
}

/// A pause or a sleep as the route asks for it.
#[derive(Clone, Copy, Debug)]
pub struct PauseAsk {
    /// Requests in flight.
    pub mode: PauseMode,
    /// Clear the caches once nothing runs.
    pub clear_cache: bool,
    /// Of them not the connector's (the keep-tier opt-out).
    pub keep_connector: bool,
    /// Then let the memory sleep at this level, 1 or 2.
    pub sleep_level: Option<u8>,
}

/// A pause that waits for the engine to become idle.
#[derive(Clone, Copy, Debug)]
pub struct Idle {
    ask: PauseAsk,
    ticket: u64,
}

/// Why a control call failed; the text is the engine's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Failure(pub String);

/// Parts of the device memory that can sleep.
const TAGS: [&str; 2] = ["weights", "kv_cache"];

/// Which parts of the memory sleep.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    asleep: Vec<&'static str>,
}

impl Memory {
    /// True while any part sleeps.
    #[must_use]
    pub fn is_asleep(&self) -> bool {
        !self.asleep.is_empty()
    }

    fn sleep(&mut self) -> bool {
        let fell = self.asleep.is_empty();
        if fell {
            self.asleep.extend(TAGS);
        }
        fell
    }

    /// Wakes parts, all without tags. A tag that is not asleep makes the call a no-op.
    fn wake(&mut self, tags: Option<&[String]>) {
        let Some(tags) = tags else { return self.asleep.clear() };
        if tags.iter().all(|tag| self.asleep.contains(&tag.as_str())) {
            self.asleep.retain(|part| !tags.iter().any(|tag| tag == part));
        }
    }
}

/// Weights after a level 2 sleep and before a reload: garbage.
const DISCARDED: u64 = u64::MAX;

impl Engine {
    /// Begins a pause or a sleep. The answer is there at once, or comes with `ticket` from
    /// [`Engine::settle_idle`].
    pub fn pause(
        &mut self,
        ask: PauseAsk,
        ticket: u64,
    ) -> (Vec<Output>, Option<Result<(), Failure>>) {
        let aborted = match ask.mode {
            PauseMode::Abort => self.abort(None),
            PauseMode::Wait | PauseMode::Keep => Vec::new(),
        };
        self.pause = match ask.mode {
            PauseMode::Keep => Pause::HoldAll,
            PauseMode::Abort | PauseMode::Wait => Pause::HoldNew,
        };
        if self.has_work() {
            self.idle.push(Idle { ask, ticket });
            return (aborted, None);
        }
        let done = self.finish_pause(ask);
        (aborted, Some(done))
    }

    /// Completes the pauses that waited for idleness, the newest first as the engine does.
    pub fn settle_idle(&mut self) -> Vec<(u64, Result<(), Failure>)> {
        let mut settled = Vec::new();
        while !self.has_work() {
            let Some(idle) = self.idle.pop() else { break };
            settled.push((idle.ticket, self.finish_pause(idle.ask)));
        }
        settled
    }

    fn finish_pause(&mut self, ask: PauseAsk) -> Result<(), Failure> {
        if ask.clear_cache {
            let external = self.config.pause_reaches_connector && !ask.keep_connector;
            if !self.reset_prefix_cache(true, external)? {
                return Err(Failure("Failed to reset the KV connector cache.".into()));
            }
        }
        if let Some(level) = ask.sleep_level {
            self.sleep_memory(level);
        }
        Ok(())
    }

    /// The executor's sleep alone, as before vLLM 0.17.1; a second one is a no-op.
    pub fn sleep_memory(&mut self, level: u8) {
        if self.memory.sleep() && level == 2 {
            self.weights = DISCARDED;
        }
    }

    /// Lets the scheduler run, whatever the memory does (ENGINE.md, trap 9).
    pub fn resume(&mut self) {
        self.pause = Pause::Running;
    }

    /// Wakes parts of the memory, all without tags; answers whether it is fully awake. A fully
    /// awake engine is un-paused, whoever paused it (ENGINE.md, trap 10).
    pub fn wake(&mut self, tags: Option<&[String]>) -> bool {
        let parts: Option<Vec<String>> =
            tags.map(|tags| tags.iter().filter(|tag| *tag != "scheduling").cloned().collect());
        if parts.as_ref().is_none_or(|parts| !parts.is_empty()) {
            self.memory.wake(parts.as_deref());
        }
        let awake = !self.memory.is_asleep();
        if awake || !self.config.partial_wake_keeps_paused {
            self.resume();
        }
        awake
    }

    /// True in any pause, from its first moment.
    #[must_use]
    pub fn is_paused(&self) -> bool {
        self.pause != Pause::Running
    }

    /// True while memory sleeps; on newer engines also while paused (ENGINE.md, trap 7).
    #[must_use]
    pub fn is_sleeping(&self) -> bool {
        self.memory.is_asleep() || (self.config.paused_counts_as_sleeping && self.is_paused())
    }

    /// Clears the device cache, and the connector's tiers if asked. False: a block is in use, so
    /// the device cache stands, though the tiers are gone.
    ///
    /// # Errors
    ///
    /// Preempting everything did not free every block: a load is in flight.
    pub fn reset_prefix_cache(
        &mut self,
        reset_running: bool,
        reset_external: bool,
    ) -> Result<bool, Failure> {
        if reset_running {
            while let Some(id) = self.running.pop() {
                self.preempt(id);
            }
        }
        let reset = self.pool.reset();
        if reset_running && !reset {
            return Err(Failure(
                "Failed to reset KV cache even when all the running requests are preempted and \
                 moved to the waiting queue. This is likely due to the presence of running \
                 requests waiting for remote KV transfer, which is not supported yet."
                    .into(),
            ));
        }
        if reset_external {
            self.reset_tiers();
        }
        Ok(reset)
    }

    fn reset_tiers(&mut self) {
        self.tiers.reset();
        for request in self.requests.values_mut().chain(&mut self.finished) {
            request.stored_chunks = 0;
            request.store_jobs = 0;
            if request.status == Status::Loading {
                request.loading = None;
            }
        }
        // A finished request's last blocks are not stored after a reset (its state is dropped).
        for request in &mut self.finished {
            request.stored_chunks = usize::MAX;
        }
    }

    /// Frees the device cache of an idle, paused, resident engine.
    ///
    /// # Errors
    ///
    /// The engine is not paused, or not idle, or already asleep.
    pub fn release_kv_cache(&mut self) -> Result<(), Failure> {
        let name = "release_kv_cache_memory()";
        if !self.is_paused() || self.has_work() {
            return Err(Failure(format!("{name} requires a completed pause first")));
        }
        if self.memory.is_asleep() {
            return Err(Failure(format!("{name} requires all executor memory to be resident")));
        }
        self.reset_prefix_cache(true, true)?;
        self.memory.asleep.push(TAGS[1]);
        Ok(())
    }

    /// Loads the checkpoint's weights, as `collective_rpc` of `reload_weights` does. Clears no
    /// cache: blocks of the old weights stay hittable.
    pub fn reload_weights(&mut self) {
        self.weights = self.checkpoint;
    }

    /// Puts other weights at the checkpoint's place, for the next reload or restart.
    pub fn set_checkpoint(&mut self, weights: u64) {
        self.checkpoint = weights;
    }
}
