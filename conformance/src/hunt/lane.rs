//! One gateway, its engines, and what is done to them.

use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use serde_json::json;
use tokio::time::{Instant, timeout};

use super::draw::{Action, Draw, Turn};
use super::{Hunt, Tally};
use crate::client::{Call, Client};
use crate::events::{Subscriber, replay};
use crate::fak::{Acted, Ask, DEADLINE, Fak, Settings, Told};
use crate::scenario::Profile;
use crate::session::until;
use crate::target::{Endpoints, Target};

/// A call straight to an engine; one that waits for requests that somebody paused never ends.
const BEHIND_DEADLINE: Duration = Duration::from_secs(5);

/// fak judges a claim that was too high a second after the answer.
const JUDGED_AFTER: Duration = Duration::from_secs(2);

/// How long a request may take before somebody looks after the workers.
const PATIENCE: Duration = Duration::from_secs(1);

/// An engine that nobody reaches for so long will not come back by itself.
const DEAD_AFTER: Duration = Duration::from_secs(5);

/// Between two tries to bring a worker back.
const MEND_EVERY: Duration = Duration::from_millis(20);

/// An engine, and what is seen of it besides fak.
#[derive(Debug)]
struct Prey<T> {
    id: String,
    engine: T,
    endpoints: Endpoints,
    client: Client,
    subscriber: Subscriber,
    /// Counts its lives: events of one say nothing of another's claims.
    life: usize,
}

/// A claim that was too high, until something explains it.
#[derive(Debug)]
struct Suspicion {
    told: Told,
    /// When its request was sent, by the ledger.
    row: u64,
    /// And by each engine's events: its life, and the next batch.
    events: Vec<(usize, u64)>,
    since: Instant,
}

/// One gateway and its engines.
#[derive(Debug)]
pub struct Lane<T> {
    hunt: Hunt,
    draw: Draw,
    prey: Vec<Prey<T>>,
    fak: Fak,
    tally: Tally,
    suspicions: Vec<Suspicion>,
    /// The last row that was seen.
    row: u64,
}

/// Requests under way, and when they were sent.
#[derive(Debug)]
struct UnderWay {
    calls: Vec<Call>,
    row: u64,
    events: Vec<(usize, u64)>,
}

impl<T: Target> Lane<T> {
    /// Starts the engines, and fak in front of them.
    ///
    /// # Errors
    ///
    /// One does not start.
    pub async fn start(hunt: Hunt, engines: Vec<T>, binary: &Path) -> anyhow::Result<Self> {
        let mut prey = Vec::new();
        for (number, mut engine) in engines.into_iter().enumerate() {
            let endpoints = engine.start(Profile::Offload).await?;
            let client = Client::new(&endpoints.base_url);
            let subscriber = Subscriber::connect(&endpoints.kv_events).await?;
            let id = format!("w{number}");
            prey.push(Prey { id, engine, endpoints, client, subscriber, life: 0 });
        }
        let worker = |prey: &Prey<T>| (prey.id.clone(), prey.endpoints.base_url.clone());
        let settings = Settings {
            workers: prey.iter().map(worker).collect(),
            // The ledger's durability is another test's.
            db: Some("sqlite::memory:".to_owned()),
            probe_every_ms: hunt.probe_every_ms,
            first_byte_ms: hunt.first_byte_ms,
        };
        let fak = Fak::start(binary, &settings).await?;
        let has_faults = prey.iter().all(|prey| prey.engine.faults().is_some());
        let draw = Draw::new(hunt.seed, hunt.restarts, has_faults);
        let (tally, suspicions) = (Tally::default(), Vec::new());
        let mut lane = Self { hunt, draw, prey, fak, tally, suspicions, row: 0 };
        lane.mend().await?;
        Ok(lane)
    }

    /// Hunts to the end.
    ///
    /// # Errors
    ///
    /// Something hangs, or a worker cannot be brought back to serve.
    pub async fn run(mut self) -> anyhow::Result<Tally> {
        let hunted = self.turns().await;
        let (seed, step, log) = (self.hunt.seed, self.tally.steps, self.fak.log());
        hunted.with_context(|| format!("seed {seed}, step {step}; fak said:\n{log}"))?;
        Ok(self.tally)
    }

    async fn turns(&mut self) -> anyhow::Result<()> {
        while self.tally.steps < self.hunt.steps {
            let turn = self.draw.turn();
            self.turn(&turn).await.with_context(|| format!("{turn:?}"))?;
            self.explain(JUDGED_AFTER).await?;
        }
        let counted = async || {
            let counted = self.fak.metrics().await?;
            anyhow::Ok(counted.claims("over") + counted.claims("lost_in_flight"))
        };
        let lost = self.tally.lost as u64;
        let judged = until("fak to judge the last claims", async || Ok(counted().await? >= lost));
        if let Err(error) = judged.await {
            self.tally.failures.push(format!("{error:#}"));
        }
        self.explain(Duration::ZERO).await?;
        self.tally.audit(&self.fak.metrics().await?, &self.fak.errors());
        Ok(())
    }

    async fn turn(&mut self, turn: &Turn) -> anyhow::Result<()> {
        match turn {
            Turn::Ask => {
                let asked = self.begin(1)?;
                self.finish(asked).await
            }
            Turn::Burst(count) => {
                let asked = self.begin(*count)?;
                self.finish(asked).await
            }
            Turn::Act(under_way) => {
                let asked = self.begin(*under_way)?;
                let action = self.action();
                let acting = self.fak.begin_act(&action.on, action.name, &action.options)?;
                self.acted(&action, acting).await?;
                self.aftermath(asked).await
            }
            Turn::Behind(under_way) => {
                let asked = self.begin(*under_way)?;
                self.behind().await;
                self.aftermath(asked).await
            }
            Turn::Collide => {
                let asked = self.begin(1)?;
                let action = self.action();
                let acting = self.fak.begin_act(&action.on, action.name, &action.options)?;
                self.behind().await;
                self.acted(&action, acting).await?;
                self.aftermath(asked).await
            }
            Turn::Batches | Turn::Hold | Turn::Route => self.fault(turn).await,
            Turn::Restart => self.restart().await,
        }
    }

    /// Requests that are sent at once.
    fn begin(&mut self, count: usize) -> anyhow::Result<UnderWay> {
        let next = |prey: &Prey<T>| {
            let seen = prey.subscriber.since(0);
            (prey.life, seen.last().map_or(0, |batch| batch.seq + 1))
        };
        let events = self.prey.iter().map(next).collect();
        let asks: Vec<Ask> = (0..count).map(|_| self.draw.ask()).collect();
        let calls = asks.iter().map(|ask| self.fak.begin(ask)).collect::<Result<_, _>>()?;
        Ok(UnderWay { calls, row: self.row, events })
    }

    async fn finish(&mut self, asked: UnderWay) -> anyhow::Result<()> {
        for mut call in asked.calls {
            // With no other worker to go to, a request waits on one that stopped under it.
            let sent = Instant::now();
            while timeout(PATIENCE, call.ended()).await.is_err() && sent.elapsed() < DEADLINE {
                self.mend().await?;
            }
            let told = Told::read(&call.finish(DEADLINE).await.context("a request hangs")?)?;
            self.tally.answer(&told);
            if told.is_finished && told.cached.is_some_and(|cached| told.claimed() > cached) {
                let (row, events, since) = (asked.row, asked.events.clone(), Instant::now());
                self.suspicions.push(Suspicion { told, row, events, since });
            }
        }
        Ok(())
    }

    /// After something happened: perhaps requests to who cannot serve, then all are brought back.
    async fn aftermath(&mut self, asked: UnderWay) -> anyhow::Result<()> {
        if self.draw.rng.bool() {
            let more = self.begin(1)?;
            // It may wait for a worker that somebody paused.
            self.mend().await?;
            self.finish(more).await?;
        }
        self.mend().await?;
        self.finish(asked).await
    }

    fn action(&mut self) -> Action {
        let worker = self.draw.rng.usize(0..self.prey.len());
        self.draw.action(&self.prey[worker].id)
    }

    async fn acted(&mut self, action: &Action, acting: Call) -> anyhow::Result<()> {
        let told = acting.finish(DEADLINE).await;
        let told = told.with_context(|| format!("{action:?} hangs"))?;
        let acted = Acted::read(&told)?;
        self.tally.steps += 1;
        let reason = acted.row["reason"].as_str().unwrap_or("without a row");
        let kind = format!("{} {}", action.name, reason);
        *self.tally.acted.entry(kind).or_default() += 1;
        Ok(())
    }

    async fn behind(&mut self) {
        let calls = self.draw.behind();
        let prey = self.draw.rng.usize(0..self.prey.len());
        for call in calls {
            self.tally.steps += 1;
            self.tally.accidents += 1;
            // An engine may refuse, or wait for requests that are held; what counts is what fak
            // makes of it.
            let _ = self.prey[prey].client.plain(&call, BEHIND_DEADLINE).await;
        }
    }

    async fn fault(&mut self, turn: &Turn) -> anyhow::Result<()> {
        let prey = self.draw.rng.usize(0..self.prey.len());
        let Some(faults) = self.prey[prey].engine.faults() else { return Ok(()) };
        self.tally.steps += 1;
        self.tally.accidents += 1;
        match turn {
            Turn::Batches => {
                let count = self.draw.rng.usize(1..4);
                match self.draw.rng.u32(0..3) {
                    0 => faults.drop_batches(count),
                    1 => faults.lose_batches(count),
                    _ => faults.repeat_batches(count),
                }
            }
            Turn::Hold => {
                faults.hold_publisher(true);
                let asked = self.begin(2)?;
                if self.draw.rng.bool() {
                    let reset = "POST /reset_prefix_cache";
                    let _ = self.prey[prey].client.plain(reset, BEHIND_DEADLINE).await;
                }
                let more = self.begin(1)?;
                self.finish(asked).await?;
                self.finish(more).await?;
                faults.hold_publisher(false);
            }
            _ => {
                let (route, fault) = self.draw.route_fault();
                faults.route(route, fault, 1);
                let action = self.action();
                let acting = self.fak.begin_act(&action.on, action.name, &action.options)?;
                self.acted(&action, acting).await?;
                let asked = self.begin(1)?;
                self.aftermath(asked).await?;
            }
        }
        Ok(())
    }

    async fn restart(&mut self) -> anyhow::Result<()> {
        let number = self.draw.rng.usize(0..self.prey.len());
        let asked = self.begin(2)?;
        self.begin_life(number).await?;
        self.tally.steps += 1;
        self.tally.accidents += 1;
        self.aftermath(asked).await
    }

    async fn begin_life(&mut self, number: usize) -> anyhow::Result<()> {
        let prey = &mut self.prey[number];
        prey.endpoints = prey.engine.start(Profile::Offload).await?;
        prey.subscriber = Subscriber::connect(&prey.endpoints.kv_events).await?;
        prey.life += 1;
        Ok(())
    }

    /// Does what an operator would, until every worker serves.
    async fn mend(&mut self) -> anyhow::Result<()> {
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
                let action = match worker["phase"].as_str() {
                    Some("serving") if worker["serving"] == true => break,
                    Some("paused") => Some(("resume", json!({}))),
                    Some("sleeping" | "waking") => Some(("wake", json!({"weights": "same"}))),
                    // It may come back by itself: the next look tells.
                    _ if tries % 10 == 9 => Some(("wake", json!({"weights": "same"}))),
                    _ => None,
                };
                if let Some((name, options)) = action {
                    self.fak.act(&format!("workers/{id}"), name, &options).await?;
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

    /// Finds what explains each claim that was too high, once `after` has passed.
    async fn explain(&mut self, after: Duration) -> anyhow::Result<()> {
        while self.suspicions.first().is_some_and(|first| first.since.elapsed() >= after) {
            let suspicion = self.suspicions.remove(0);
            let rows = self.fak.rows_after(suspicion.row).await?;
            if rows.iter().any(|row| row["worker"] == suspicion.told.worker.as_str()) {
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
