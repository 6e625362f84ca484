//! What an operator would do to bring workers back.
//! Invariant: an operator is honest: what is said of the weights is so.

use std::time::SystemTime;

use serde_json::json;
use tokio::time::{Duration, Instant};

use super::lane::{BEHIND_DEADLINE, Lane};
use super::oracle::Oracle;
use crate::events::Subscriber;
use crate::fak::DEADLINE;
use crate::session::post;
use crate::target::Target;

/// An engine that nobody reaches for so long will not come back by itself.
const DEAD_AFTER: Duration = Duration::from_secs(5);

/// Between two tries to bring a worker back.
const MEND_EVERY: Duration = Duration::from_millis(20);

impl<T: Target> Lane<T> {
    /// Does what an operator would, until every worker serves.
    pub(super) async fn mend(&mut self) -> anyhow::Result<()> {
        let mut started = Instant::now();
        for number in 0..self.prey.len() {
            let id = self.prey[number].id.clone();
            let mut tries = 0;
            let mut reached = Instant::now();
            loop {
                let worker = self.fak.worker(&id).await?;
                if worker["reachable"] == true {
                    reached = Instant::now();
                } else if reached.elapsed() > DEAD_AFTER {
                    // vLLM 0.32.0 does, of a reset that preempts a request while it loads blocks
                    // from the host tier (an assertion in its offloading scheduler, observed).
                    self.tally.died += 1;
                    self.begin_life(number).await?;
                    (started, reached) = (Instant::now(), Instant::now());
                }
                self.row = self.row.max(worker["last_witness"].as_u64().unwrap_or(0));
                match worker["phase"].as_str() {
                    Some("serving") if worker["serving"] == true => break,
                    Some("paused") => {
                        let on = format!("workers/{id}");
                        let resumed = self.fak.act(&on, "resume", &json!({})).await?;
                        self.prey[number].was_acted_on(&resumed);
                    }
                    Some("sleeping" | "waking") => self.wake(number).await?,
                    // It may come back by itself: the next look tells.
                    _ if tries % 10 == 9 => self.wake(number).await?,
                    _ => {}
                }
                anyhow::ensure!(
                    started.elapsed() < DEADLINE,
                    "{id} cannot be brought back: {worker}"
                );
                tries += 1;
                tokio::time::sleep(MEND_EVERY).await;
            }
        }
        Ok(())
    }

    /// Wakes a worker, and says of its weights what is so.
    async fn wake(&mut self, number: usize) -> anyhow::Result<()> {
        self.reload(number).await?;
        let prey = &self.prey[number];
        let weights = if prey.weights == prey.weights_told { "same" } else { "loaded" };
        let on = format!("workers/{}", prey.id);
        let acted = self.fak.act(&on, "wake", &json!({"weights": weights})).await?;
        self.prey[number].was_acted_on(&acted);
        anyhow::ensure!(acted.status != 400, "a good wake was refused: {}", acted.body);
        if acted.is_sent() {
            let prey = &mut self.prey[number];
            prey.weights_told = prey.weights;
        } else if acted.row["reason"] == "weights_asleep" {
            // The weights' memory has to be there before anybody loads them.
            self.fak.act(&on, "wake", &json!({"tags": ["weights"]})).await?;
        }
        Ok(())
    }

    /// Loads the weights that are there to be loaded, as their owner does before a wake: after a
    /// sleep of level 2 the simulator has none, while a CPU build of vLLM ignores the sleep.
    pub(super) async fn reload(&self, number: usize) -> anyhow::Result<()> {
        let prey = &self.prey[number];
        if prey.engine.faults().is_some() {
            let call = post("/collective_rpc", &json!({"method": "reload_weights"}));
            prey.client.call(&call, BEHIND_DEADLINE).await?;
        }
        Ok(())
    }

    pub(super) async fn begin_life(&mut self, number: usize) -> anyhow::Result<()> {
        let prey = &mut self.prey[number];
        prey.endpoints = prey.engine.start(prey.profile).await?;
        prey.subscriber = Subscriber::connect(&prey.endpoints.kv_events).await?;
        prey.oracle = Oracle::default();
        prey.began = SystemTime::now();
        Ok(())
    }
}
