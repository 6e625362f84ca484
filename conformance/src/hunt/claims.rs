//! Requests, and what is made of their answers.
//! Invariant: what explains a claim happened after its request was sent.

use anyhow::Context;
use tokio::time::{Duration, Instant, timeout};

use super::lane::Lane;
use super::tally::Heard;
use crate::client::Call;
use crate::events::replay;
use crate::fak::{Ask, DEADLINE, Told};
use crate::target::Target;

/// How long a request may take before somebody looks after the workers.
const PATIENCE: Duration = Duration::from_secs(1);

/// Turns after an accident until a request counts as undisturbed: by then nothing is on its way.
const QUIET_AFTER: usize = 8;

/// A claim that was too high, until something explains it.
#[derive(Debug)]
pub(super) struct Suspicion {
    told: Told,
    /// When its request was sent, by the ledger.
    row: u64,
    /// And by each engine's events: its life, and the next batch.
    events: Vec<(usize, u64)>,
    since: Instant,
}

/// Requests under way, and when they were sent.
#[derive(Debug)]
pub(super) struct UnderWay {
    calls: Vec<(Ask, Call)>,
    row: u64,
    events: Vec<(usize, u64)>,
    /// The last change of each engine's weights that fak knew of.
    weights: Vec<u64>,
    heard: Heard,
}

impl<T: Target> Lane<T> {
    /// Requests that are sent at once.
    pub(super) fn begin(&mut self, count: usize) -> anyhow::Result<UnderWay> {
        let next = |prey: &super::lane::Prey<T>| {
            let seen = prey.subscriber.since(0);
            (prey.life, seen.last().map_or(0, |batch| batch.seq + 1))
        };
        let events = self.prey.iter().map(next).collect();
        let weights = self.prey.iter().map(|prey| prey.weights_told).collect();
        let mut calls = Vec::with_capacity(count);
        for _ in 0..count {
            self.asked += 1;
            let id = format!("hunt-{}-{}", self.hunt.seed, self.asked);
            let ask = Ask { id: Some(id), ..self.draw.ask() };
            let call = self.fak.begin(&ask)?;
            calls.push((ask, call));
        }
        let heard = match count {
            _ if self.turns_since_accident < QUIET_AFTER => Heard::Disturbed,
            1 => Heard::Alone,
            _ => Heard::Together,
        };
        Ok(UnderWay { calls, row: self.row, events, weights, heard })
    }

    pub(super) async fn finish(&mut self, asked: UnderWay) -> anyhow::Result<()> {
        let UnderWay { calls, row, events, weights, heard } = asked;
        for (ask, mut call) in calls {
            // With no other worker to go to, a request waits on one that stopped under it.
            let sent = Instant::now();
            while timeout(PATIENCE, call.ended()).await.is_err() && sent.elapsed() < DEADLINE {
                self.mend().await?;
            }
            let told = Told::read(&call.finish(DEADLINE).await.context("a request hangs")?)?;
            self.judge(&ask, &told, heard, &weights);
            let over = told.cached.is_some_and(|cached| told.claimed() > cached);
            if told.is_finished && (over || self.is_over_on_gpu(&ask, &told)) {
                let (events, since) = (events.clone(), Instant::now());
                self.suspicions.push(Suspicion { told, row, events, since });
            }
        }
        Ok(())
    }

    fn judge(&mut self, ask: &Ask, told: &Told, heard: Heard, weights: &[u64]) {
        let number = self.prey.iter().position(|prey| prey.id == told.worker);
        let reused = number.and_then(|number| self.prey[number].reused(ask));
        self.tally.answer(ask, told, reused, heard);
        let (Some(number), Some(reused)) = (number, reused) else { return };
        let knew = weights[number] == self.prey[number].weights;
        if knew && reused.stale > 0 {
            let failure = format!("KV of other weights was reused, {reused:?}: {told:?}");
            self.tally.failures.push(failure);
        }
    }

    /// Whether more was claimed on the gpu tier than the engine found there.
    fn is_over_on_gpu(&self, ask: &Ask, told: &Told) -> bool {
        let prey = self.prey.iter().find(|prey| prey.id == told.worker);
        let reused = prey.and_then(|prey| prey.reused(ask));
        reused.is_some_and(|reused| told.claimed_on("gpu") > reused.gpu as u64)
    }

    /// Finds what explains each claim that was too high, once `after` has passed.
    pub(super) async fn explain(&mut self, after: Duration) -> anyhow::Result<()> {
        while self.suspicions.first().is_some_and(|first| first.since.elapsed() >= after) {
            let suspicion = self.suspicions.remove(0);
            let rows = self.fak.rows_after(suspicion.row).await?;
            // A row that demoted nothing explains nothing.
            let explains = |row: &serde_json::Value| {
                row["worker"] == suspicion.told.worker.as_str() && row["warm_demoted"] == true
            };
            if rows.iter().any(explains) {
                self.tally.explained.0 += 1;
            } else if self.has_removed(&suspicion).await? {
                self.tally.explained.1 += 1;
            } else {
                let told = &suspicion.told;
                self.tally.failures.push(format!("nothing explains {told:?}"));
            }
        }
        Ok(())
    }

    /// Whether the engine published that blocks went, after the request was sent.
    async fn has_removed(&self, suspicion: &Suspicion) -> anyhow::Result<bool> {
        let worker = self.prey.iter().position(|prey| prey.id == suspicion.told.worker);
        let number = worker.context("no engine has that name")?;
        let (life, next) = suspicion.events[number];
        if life != self.prey[number].life {
            return Ok(false);
        }
        let replayed = replay(&self.prey[number].endpoints.replay, &next.to_be_bytes()).await?;
        for batch in &replayed.batches {
            for event in batch.events()? {
                let kind = event.as_map().and_then(|fields| {
                    let kind = fields.iter().find(|(name, _)| name.as_str() == Some("type"));
                    kind?.1.as_str()
                });
                if matches!(kind, Some("BlockRemoved" | "AllBlocksCleared")) {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }
}
