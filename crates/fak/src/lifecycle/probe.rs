//! One look at a worker: what state it is in, whose life it is, and whether it gets anything done.
//!
//! Invariant: reachable, serving and progressing are three facts, read apart. A sleeping worker is
//! not a failing one.

use std::sync::Arc;
use std::time::{Duration, Instant};

use fak_wire::metrics::{Signals, Snapshot};
use serde_json::Value;

use crate::engine::{Control, Engine, Observation, Seen};
use crate::store;

/// What one look brought.
#[derive(Debug)]
pub(super) struct Look {
    pub(super) observation: Observation,
    pub(super) metrics: Option<Arc<Snapshot>>,
    pub(super) weight_version: Option<Arc<str>>,
}

impl Look {
    pub(super) async fn at(engine: &Engine) -> Self {
        let ((observation, metrics), weights) =
            tokio::join!(engine.observe_and_scrape(), engine.read(Control::WeightInfo));
        let version = |body: &Value| {
            let told = body.get("weight_version")?.as_str()?;
            Some(Arc::from(&*store::fitting_name(told)))
        };
        Self {
            observation,
            metrics: metrics.ok().map(Arc::new),
            weight_version: weights.as_ref().and_then(version),
        }
    }

    /// Whether anything answered that has an engine behind it.
    pub(super) fn is_reachable(&self) -> bool {
        let is_answered = self.metrics.is_some()
            || [self.observation.is_paused.clone(), self.observation.is_sleeping.clone()]
                .iter()
                .any(|seen| matches!(seen, Seen::Value(_) | Seen::NotOffered));
        is_answered && !self.observation.is_dead
    }

    /// Why it is not reachable.
    pub(super) fn silence(&self) -> &str {
        if self.observation.is_dead {
            return "/health answers 503: the engine behind its front end is dead, or stops";
        }
        match &self.observation.is_paused {
            Seen::Unreachable { detail } | Seen::Failed { detail } => detail,
            Seen::Value(_) | Seen::NotOffered => "it tells nothing of its state",
        }
    }

    /// This life of the process, by its start in Unix seconds. Engines whose metrics come from
    /// several processes do not tell.
    pub(super) fn incarnation(&self) -> Option<Arc<str>> {
        let start = self.metrics.as_ref()?.process_start?;
        Some(format!("{start:.3}").into())
    }
}

/// Tells a worker that computes from one that hangs: requests run, and nothing moves.
#[derive(Debug, Default)]
pub(super) struct Progress {
    moved: Option<(Work, Instant)>,
    moved_at: Option<Instant>,
}

impl Progress {
    /// Whether the worker gets on, by this look.
    pub(super) fn see(&mut self, metrics: &Snapshot, now: Instant, patience: Duration) -> bool {
        let total = metrics.total();
        let done = work_done(&total);
        let is_idle = total.running.is_none_or(|running| running == 0.0);
        match self.moved {
            Some((before, since)) if before == done && !is_idle => {
                now.duration_since(since) < patience
            }
            before => {
                if before.is_some_and(|(before, _)| before != done) {
                    self.moved_at = Some(now);
                }
                self.moved = Some((done, now));
                true
            }
        }
    }

    /// When the counters were last seen to have moved.
    pub(super) fn moved_at(&self) -> Option<Instant> {
        self.moved_at
    }
}

/// What moves while an engine works.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Work {
    /// Moves with every token, and with every step that gives anything out.
    done: f64,
    /// Moves with each part of a long prefill, whose steps give nothing out and are not counted
    /// (vLLM 0.32.0, source: the output handler makes `IterationStats` of outputs alone).
    cache: Option<f64>,
}

fn work_done(total: &Signals) -> Work {
    let count = |histogram: &Option<fak_wire::metrics::Histogram>| {
        histogram.as_ref().map_or(0.0, |h| h.count)
    };
    let finished: f64 = total.request_success.values().sum();
    let prefilled = total.prefix_queries.unwrap_or(0.0);
    let tokens = count(&total.ttft) + count(&total.itl) + count(&total.steps);
    let cache = total.kv_cache_usage.map(|usage| usage.mean);
    Work { done: tokens + finished + prefilled, cache }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fak_wire::metrics::Limits;

    fn scrape(running: u32, tokens: u32) -> Snapshot {
        let text = format!(
            "vllm:num_requests_running{{engine=\"0\"}} {running}\n\
             vllm:inter_token_latency_seconds_count{{engine=\"0\"}} {tokens}\n"
        );
        fak_wire::metrics::parse(text.as_bytes(), &Limits::default()).expect("it is small")
    }

    #[test]
    fn requests_that_run_without_a_token_make_a_worker_suspect_after_a_while() {
        let patience = Duration::from_secs(60);
        let start = Instant::now();
        let mut progress = Progress::default();
        let mut at = |s: u64, running, tokens| {
            progress.see(&scrape(running, tokens), start + Duration::from_secs(s), patience)
        };
        assert!(at(0, 3, 10));
        assert!(at(59, 3, 10));
        assert!(!at(60, 3, 10));
        assert!(at(61, 3, 11), "a token came");
        assert!(at(200, 0, 11), "idle is not stuck");
        assert!(at(210, 1, 11));
    }

    /// A long prefill: no token, no request that ends, nothing looked up.
    #[test]
    fn steps_and_blocks_are_progress_where_no_token_comes() {
        let scrape = |steps: u32, usage: f64| {
            let text = format!(
                "vllm:num_requests_running{{engine=\"0\"}} 1\n\
                 vllm:iteration_tokens_total_count{{engine=\"0\"}} {steps}\n\
                 vllm:kv_cache_usage_perc{{engine=\"0\"}} {usage}\n"
            );
            fak_wire::metrics::parse(text.as_bytes(), &Limits::default()).expect("it is small")
        };
        let (patience, start) = (Duration::from_secs(60), Instant::now());
        let mut progress = Progress::default();
        let mut at = |seconds: u64, steps, usage| {
            let now = start + Duration::from_secs(seconds);
            let is_progress = progress.see(&scrape(steps, usage), now, patience);
            (is_progress, progress.moved_at().map(|at| at.duration_since(start).as_secs()))
        };
        assert_eq!(at(0, 1, 0.1), (true, None), "what was before is not known");
        assert_eq!(at(50, 2, 0.1), (true, Some(50)));
        assert_eq!(at(100, 2, 0.2), (true, Some(100)));
        assert_eq!(at(159, 2, 0.2), (true, Some(100)));
        assert_eq!(at(160, 2, 0.2), (false, Some(100)));
    }
}
