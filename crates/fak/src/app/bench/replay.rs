//! Both arms: empty the tier, fill it, sleep, wake, send the same again.
//!
//! Invariant: every step is judged as a worker's owner would judge it, nothing is counted before
//! the tier stands still, and however the experiment ends, an engine that it put to sleep is woken.

use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};
use fak_kernel::witness::{
    Answer, Capabilities, Move, Parts, Plan, Reason, Standing, Weights, judge, plan,
};
use fak_wire::metrics::{Signals, counter_growth};
use serde_json::Value;
use tokio::time::{Instant, MissedTickBehavior, interval};

use super::workload::{Output, Prompts};
use super::{RESET, say, sleep};
use crate::cli::bench::Arm;
use crate::engine::{Control, Engine};
use crate::lifecycle::translate;

/// How often to look whether the tier stands still.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Looks in a row that have to find it so. A store is counted when it is done, so that the quiet
/// has to outlast one: a prompt of 4,096 tokens is about half a gigabyte on a large model.
const STILL_LOOKS: u32 = 5;

/// Time for the tier to stand still.
const STILL_WITHIN: Duration = Duration::from_secs(120);

/// Time for the counters to show an answer that is there already.
const COUNTED_WITHIN: Duration = Duration::from_secs(5);

/// What both arms came to.
pub(super) struct Arms {
    pub(super) cleared: Arm,
    pub(super) kept: Arm,
}

/// The experiment on one engine.
pub(super) struct Replay {
    engine: Engine,
    capabilities: Capabilities,
    prompts: Prompts,
    standing: Standing,
    /// A sleep was sent, and no wake was confirmed since.
    may_sleep: bool,
    /// The answers of the first time.
    outputs: Option<Vec<Output>>,
}

impl Replay {
    pub(super) fn new(engine: Engine, capabilities: Capabilities, prompts: Prompts) -> Self {
        Self {
            engine,
            capabilities,
            prompts,
            standing: Standing::SERVING,
            may_sleep: false,
            outputs: None,
        }
    }

    /// Runs both arms, or up to Ctrl-C, and leaves the engine awake.
    pub(super) async fn run(mut self) -> anyhow::Result<Arms> {
        self.check_serves().await?;
        let arms = tokio::select! {
            arms = self.arms() => arms,
            _ = tokio::signal::ctrl_c() => Err(anyhow!("interrupted")),
        };
        if arms.is_err() && self.may_sleep {
            let awake = self.engine.control(Control::WakeUp { tags: Vec::new() }).await;
            match awake.observed.is_sleeping.value() {
                Some(false) => say(format_args!("fak bench: the engine was woken")),
                _ => say(format_args!("fak bench: the engine may be asleep still; wake it")),
            }
        }
        arms
    }

    /// The engine serves, and serves nobody: others' requests would be aborted, and counted.
    async fn check_serves(&self) -> anyhow::Result<()> {
        let (seen, scraped) = self.engine.observe_and_scrape().await;
        let flags = [seen.is_paused.value(), seen.is_sleeping.value()];
        if flags != [Some(false); 2] {
            bail!("the engine is paused or asleep, or does not tell; nothing was sent");
        }
        let signals = scraped?.total();
        if !is_idle(&signals) {
            bail!("the engine is not idle ({}); nothing was sent", load(&signals));
        }
        Ok(())
    }

    async fn arms(&mut self) -> anyhow::Result<Arms> {
        let cleared = self.arm(false).await.context("with the tier cleared")?;
        let kept = self.arm(true).await.context("with the tier kept")?;
        Ok(Arms { cleared, kept })
    }

    async fn arm(&mut self, keep_tier: bool) -> anyhow::Result<Arm> {
        let name = if keep_tier { "kept" } else { "cleared" };
        // A finished request holds its blocks until they are stored, and a reset is declined then.
        let empty = self.still().await?;
        self.act(RESET).await?;
        say(format_args!("fak bench: {name}: sending the prompts"));
        let (outputs, _) = self.prompts.play(&self.engine).await?;
        let warm = self.still().await?;
        self.outputs.get_or_insert(outputs);
        self.may_sleep = true;
        self.act(sleep(keep_tier)).await?;
        self.act(Move::Wake { tags: Parts::NONE, weights: Weights::Same }).await?;
        self.may_sleep = false;
        let before = signals(&self.engine).await?;
        say(format_args!("fak bench: {name}: sending them again"));
        let (outputs, replay_p50) = self.prompts.play(&self.engine).await?;
        let first = self.outputs.iter().flatten();
        let differing = outputs.iter().zip(first).filter(|(now, then)| now != then).count();
        let counted = self.counted(&before).await?;
        let after = self.still().await?;
        Ok(Arm {
            external_queries: growth(before.external_queries, counted.external_queries),
            external_hits: growth(before.external_hits, counted.external_hits),
            stored_bytes: growth(before.offload_store_bytes, after.offload_store_bytes),
            loaded_bytes: growth(before.offload_load_bytes, after.offload_load_bytes),
            replay_p50_s: replay_p50.as_secs_f64(),
            warm_stored_bytes: growth(empty.offload_store_bytes, warm.offload_store_bytes),
            outputs_differing: u32::try_from(differing).unwrap_or(u32::MAX),
        })
    }

    /// Makes an action's calls, and takes nothing but a confirmed one for done.
    async fn act(&mut self, mv: Move) -> anyhow::Result<()> {
        let action = mv.action();
        let calls = match plan(mv, &self.capabilities, &self.standing) {
            Plan::Send { calls, .. } => calls,
            Plan::Refuse(why) => bail!("{action} was refused: {why}"),
        };
        let (mut answer, mut told) = (Answer::Ok, Value::Null);
        for call in calls {
            let answered = self.engine.ask(&translate::control(call)).await;
            answer = translate::answer(call, &answered);
            told = translate::answered_json(&answered);
            if !matches!(answer, Answer::Ok | Answer::Success(true)) {
                break;
            }
        }
        let observed = translate::observed(&self.engine.observe().await);
        let verdict = judge(mv, &self.capabilities, &self.standing, answer, &observed);
        self.standing = verdict.next;
        match verdict.reason {
            Reason::Confirmed => Ok(()),
            reason => bail!("{action} is not confirmed: {reason}; the engine answered {told}"),
        }
    }

    /// Waits until the engine runs nothing and no store is on its way. Stores complete with later
    /// steps (0.32.0, observed), so each look makes the engine step.
    async fn still(&self) -> anyhow::Result<Signals> {
        let deadline = Instant::now() + STILL_WITHIN;
        let mut pace = interval(LOOK_EVERY);
        pace.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut last: Option<Signals> = None;
        let mut looks = 0;
        loop {
            pace.tick().await;
            self.prompts.nudge(&self.engine).await?;
            let now = signals(&self.engine).await?;
            let is_still = last.is_some_and(|l| l.offload_store_bytes == now.offload_store_bytes);
            looks = if is_still && is_idle(&now) { looks + 1 } else { 0 };
            if looks == STILL_LOOKS {
                return Ok(now);
            }
            if Instant::now() > deadline {
                bail!("the engine did not come to rest in {STILL_WITHIN:?} ({})", load(&now));
            }
            last = Some(now);
        }
    }

    /// The signals once all lookups of a replay are counted, which may be a moment after its last
    /// answer; those of the last look where they do not come to be. No other request is sent
    /// meanwhile: it would count as well.
    async fn counted(&self, before: &Signals) -> anyhow::Result<Signals> {
        let asked = u64::from(self.prompts.count) * u64::from(self.prompts.tokens);
        let deadline = Instant::now() + COUNTED_WITHIN;
        let mut pace = interval(LOOK_EVERY);
        loop {
            pace.tick().await;
            let now = signals(&self.engine).await?;
            let queries = growth(before.external_queries, now.external_queries);
            if queries.is_none_or(|queries| queries >= asked) || Instant::now() > deadline {
                return Ok(now);
            }
        }
    }
}

async fn signals(engine: &Engine) -> anyhow::Result<Signals> {
    Ok(engine.scrape().await?.total())
}

fn is_idle(signals: &Signals) -> bool {
    signals.running == Some(0.0) && signals.waiting == Some(0.0)
}

fn load(signals: &Signals) -> String {
    let shown = |gauge: Option<f64>| gauge.map_or_else(|| "not told".to_owned(), |n| n.to_string());
    format!("requests running {}, waiting {}", shown(signals.running), shown(signals.waiting))
}

/// Growth of a counter of tokens or bytes; one that the engine gave only later has grown from 0.
fn growth(before: Option<f64>, after: Option<f64>) -> Option<u64> {
    // Counts are whole, and exact far beyond what an experiment moves.
    after.map(|after| counter_growth(before.unwrap_or(0.0), after) as u64)
}
