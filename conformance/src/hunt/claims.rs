//! Requests, and what is made of their answers.
//! Invariant: a claim that was too high, or `cold` of what was cached, is explained by an event of
//! the engine's alone, put on the wire no earlier than just before its request was sent; never by
//! what fak says of itself.

use std::time::SystemTime;

use anyhow::Context;
use tokio::time::{Duration, Instant, timeout};

use super::lane::{Lane, Prey};
use super::oracle;
use super::oracle::{Claimed, ON_THE_WIRE};
use super::tally::Heard;
use crate::client::Call;
use crate::fak::{Ask, DEADLINE, Told};
use crate::target::Target;

/// How long a request may take before somebody looks after the workers.
const PATIENCE: Duration = Duration::from_secs(1);

/// Turns after an accident until a request counts as undisturbed: by then nothing is on its way.
const QUIET_AFTER: usize = 8;

/// A claim that was wrong, until something explains it.
#[derive(Debug)]
pub(super) struct Suspicion {
    ask: Ask,
    told: Told,
    /// When its request was sent.
    sent: SystemTime,
    since: Instant,
    /// What had happened last.
    last: String,
}

/// Requests under way, and when they were sent.
#[derive(Debug)]
pub(super) struct UnderWay {
    /// Each with what events had told of its prompt, by engine.
    calls: Vec<(Ask, Call, Vec<oracle::Told>)>,
    /// How often each engine's blocks had been put in doubt.
    doubts: Vec<u64>,
    sent: SystemTime,
    /// The last change of each engine's weights that fak knew of.
    weights: Vec<u64>,
    heard: Heard,
    /// What happened last, and how long ago.
    last: String,
}

impl<T: Target> Lane<T> {
    /// Requests that are sent at once.
    pub(super) fn begin(&mut self, count: usize) -> anyhow::Result<UnderWay> {
        for prey in &mut self.prey {
            prey.listen()?;
        }
        let weights = self.prey.iter().map(|prey| prey.weights_told).collect();
        let mut calls = Vec::with_capacity(count);
        let sent = SystemTime::now();
        for _ in 0..count {
            self.asked += 1;
            let id = format!("hunt-{}-{}", self.hunt.seed, self.asked);
            let ask = Ask { id: Some(id), ..self.draw.ask() };
            let is_salted = self.is_salted(&ask);
            let told = |prey: &Prey<T>| match prey.is_deaf {
                true => oracle::Told::default(),
                false => prey.oracle.told(&ask, is_salted),
            };
            let told = self.prey.iter().map(told).collect();
            let call = self.fak.begin(&ask)?;
            calls.push((ask, call, told));
        }
        let heard = match count {
            _ if self.turns_since_accident < QUIET_AFTER => Heard::Disturbed,
            1 => Heard::Alone,
            _ => Heard::Together,
        };
        let is_long_ago = self.turns_since_accident >= QUIET_AFTER;
        let when = if is_long_ago { "long after" } else { "after" };
        let last = format!("{when} {}", self.accident);
        let doubts = self.prey.iter().map(|prey| prey.oracle.doubts()).collect();
        Ok(UnderWay { calls, doubts, sent, weights, heard, last })
    }

    pub(super) async fn finish(&mut self, asked: UnderWay) -> anyhow::Result<()> {
        let UnderWay { calls, doubts, sent, weights, heard, last } = asked;
        for (ask, mut call, published) in calls {
            // With no other worker to go to, a request waits on one that stopped under it.
            let began = Instant::now();
            while timeout(PATIENCE, call.ended()).await.is_err() && began.elapsed() < DEADLINE {
                self.mend().await?;
            }
            let answer = call.finish(DEADLINE).await;
            let told = Told::read(&answer.context("a request hangs")?)?;
            self.judge(&ask, &told, heard, &weights);
            if let Some(number) = self.prey.iter().position(|prey| prey.id == told.worker) {
                // What was taken away meanwhile is heard first.
                self.prey[number].listen()?;
                let is_salted = self.is_salted(&ask);
                let published = self.prey[number].reusable(&ask, &published[number]);
                let missed = self.tally.told(&told, published, &last);
                if missed > 0 && self.hunt.tells {
                    let worker = self.fak.worker(&told.worker).await?;
                    let (cached, claims) = (told.cached, &told.claims);
                    self.tell(&format!(
                        "told and not claimed: {missed} of {cached:?}, {last}, {claims:?}: {worker}"
                    ))?;
                }
                if let (Some(cached), true, false) = (told.cached, told.is_finished, is_salted) {
                    self.prey[number].oracle.used(&ask, cached, doubts[number]);
                }
            }
            let over = told.cached.is_some_and(|cached| told.claimed() > cached);
            let is_wrong = over || told.is_false_cold() || self.is_over_on_gpu(&ask, &told);
            if told.is_finished && is_wrong {
                let (since, last) = (Instant::now(), last.clone());
                self.suspicions.push(Suspicion { ask, told, sent, since, last });
            }
        }
        Ok(())
    }

    /// Whether it may be sent with a salt of the gateway's own: of a session that was isolated, or
    /// of other weights than the engine began with.
    fn is_salted(&self, ask: &Ask) -> bool {
        ask.session.as_ref().is_some_and(|session| self.isolated.contains(session))
            || self.prey.iter().any(|prey| prey.weights > 0)
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

    /// Finds what explains each claim that was wrong, once `after` has passed.
    pub(super) async fn explain(&mut self, after: Duration) -> anyhow::Result<()> {
        while self.suspicions.first().is_some_and(|first| first.since.elapsed() >= after) {
            let suspicion = self.suspicions.remove(0);
            if self.is_explained(&suspicion).await? {
                self.tally.explained += 1;
            } else {
                let Suspicion { ask, told, sent, last, .. } = suspicion;
                let is_salted = self.is_salted(&ask);
                let number = self.prey.iter().position(|prey| prey.id == told.worker);
                let prey = &mut self.prey[number.context("no engine has that name")?];
                let (reused, replay) = (prey.reused(&ask), &prey.endpoints.replay);
                let claim = Claimed { ask: &ask, tokens: told.claimed(), is_salted };
                let history = prey.oracle.history(replay, claim, sent).await?;
                self.tally.failures.push(format!(
                    "no event explains {told:?}, {reused:?}, sent with {} {last}:{history}",
                    ask.more
                ));
            }
        }
        Ok(())
    }

    /// Whether the engine lost blocks, or got them where none was claimed, in time for it to
    /// explain a claim of a request that was sent then: by an event, with its life, or by one that
    /// nobody will ever hear of.
    async fn is_explained(&mut self, suspicion: &Suspicion) -> anyhow::Result<bool> {
        let Suspicion { ask, told, sent, .. } = suspicion;
        let number = self.prey.iter().position(|prey| prey.id == told.worker);
        let is_salted = self.is_salted(ask);
        let prey = &mut self.prey[number.context("no engine has that name")?];
        let on_the_wire = sent.checked_sub(ON_THE_WIRE).unwrap_or(*sent);
        let lost = prey.engine.faults().map(|faults| faults.lost()).unwrap_or_default();
        if prey.began >= on_the_wire {
            return Ok(true);
        }
        prey.listen()?;
        let claim = Claimed { ask, tokens: told.claimed(), is_salted };
        prey.oracle.explains(&prey.endpoints.replay, claim, *sent, &lost).await
    }
}
