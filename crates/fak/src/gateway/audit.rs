//! Claims held against what the engine then reports.
//!
//! Invariant: a claim that was too high is a contradiction unless the index says why: since the
//! claim was made a claimed block was taken, or demoted, though it may have been stored anew since.
//! That some row was written in between explains nothing. Events come later than answers, so
//! nothing is judged before they had their time; and one that nobody missed shows only with the
//! next, so the engine is asked for it before a claim is called wrong.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use fak_index::{HeldReason, Index, Mark, RankId};
use fak_wire::openai::{CachedTokens, Usage};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};

use super::claim::{CachePrompt, Claim, Kv};
use super::metrics::Metrics;
use super::prompt::Prompts;
use super::{Contradiction, Doubt};
use crate::runtime::Shutdown;
use crate::sessions::Turn;

/// What an audit says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// As claimed.
    Confirmed,
    /// The engine found more: its events are late, or say less.
    Under,
    /// The engine found less, and nothing explains it.
    Over,
    /// The engine found less, and an event after the claim explains it.
    LostInFlight,
    /// The engine does not say.
    Unaudited,
}

impl Verdict {
    pub(super) const ALL: [Self; 5] =
        [Self::Confirmed, Self::Under, Self::Over, Self::LostInFlight, Self::Unaudited];

    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Confirmed => "confirmed",
            Self::Under => "under",
            Self::Over => "over",
            Self::LostInFlight => "lost_in_flight",
            Self::Unaudited => "unaudited",
        }
    }
}

/// Looks at a suspicion, a pause before each, until beliefs that are suspended are taken for lost.
const LOOKS_MAX: u8 = 10;

/// Looks until a claim that nothing explains is wrong. After the first the engine is asked what it
/// published, which it answers within 0.1 s (vLLM 0.32.0, observed).
const LOOKS_UNEXPLAINED: u8 = 3;

/// Suspicions that may wait; one that does not fit is judged at once.
const WAITING_MAX: usize = 1024;

/// One request's claim, on its way to the audit.
#[derive(Debug)]
pub(super) struct Audit {
    pub(super) worker: Arc<str>,
    pub(super) claim: Claim,
    /// The prompt, where its tokens are known.
    pub(super) prompt: Option<CachePrompt>,
    pub(super) turn: Option<Turn>,
    /// One prompt and one choice: then the engine's numbers are of this prompt alone.
    pub(super) is_single: bool,
}

/// A claim that was too high.
#[derive(Debug)]
struct Suspicion {
    worker: Arc<str>,
    prompt: CachePrompt,
    basis: (RankId, Mark),
    claimed: u32,
    cached: u64,
    due: Instant,
    looks: u8,
}

/// Where audits go; cheap to clone.
#[derive(Clone)]
pub(super) struct Audits {
    metrics: Arc<Metrics>,
    prompts: Arc<Prompts>,
    judge: Judge,
    waiting: mpsc::Sender<Suspicion>,
    after: Duration,
}

/// Judges claims that were too high, once events had their time; it lives by [`run`](Self::run).
pub struct Auditor {
    judge: Judge,
    metrics: Arc<Metrics>,
    waiting: mpsc::Receiver<Suspicion>,
    after: Duration,
}

#[derive(Clone)]
struct Judge {
    index: Arc<Index>,
    doubt: Arc<dyn Doubt>,
}

/// What audits work with.
pub(super) struct Parts {
    pub(super) metrics: Arc<Metrics>,
    pub(super) prompts: Arc<Prompts>,
    pub(super) index: Arc<Index>,
    pub(super) doubt: Arc<dyn Doubt>,
}

/// Audits that wait `after` for events.
pub(super) fn audits(parts: Parts, after: Duration) -> (Audits, Auditor) {
    let Parts { metrics, prompts, index, doubt } = parts;
    let (sender, waiting) = mpsc::channel(WAITING_MAX);
    let judge = Judge { index, doubt };
    let audits = Audits {
        metrics: Arc::clone(&metrics),
        prompts,
        judge: judge.clone(),
        waiting: sender,
        after,
    };
    (audits, Auditor { judge, metrics, waiting, after })
}

impl Audits {
    /// The request ended, and cost this.
    pub(super) fn take(&self, audit: Audit, usage: Option<Usage>) {
        let Audit { worker, claim, prompt, turn, is_single } = audit;
        if let (Some(prompt), Some(usage)) = (&prompt, usage)
            && is_single
            && usage.prompt_tokens != prompt.tokens.len() as u64
        {
            self.miscounted(&worker, prompt, usage.prompt_tokens);
        }
        if claim.kv == Kv::Unknown {
            return;
        }
        let claimed = claim.total();
        let cached = match usage.map(|usage| usage.cached_tokens) {
            Some(CachedTokens::Known(cached)) if is_single => cached,
            _ => return self.metrics.audited(Verdict::Unaudited),
        };
        self.metrics.claimed(&claim.tokens, cached);
        if let Some(turn) = turn {
            turn.record(u64::from(claimed), cached);
        }
        match cached.cmp(&u64::from(claimed)) {
            std::cmp::Ordering::Equal => self.metrics.audited(Verdict::Confirmed),
            std::cmp::Ordering::Greater => self.metrics.audited(Verdict::Under),
            std::cmp::Ordering::Less => {
                // A claim above 0 has a prompt and a basis.
                let (Some(prompt), Some(basis)) = (prompt, claim.basis) else { return };
                let due = Instant::now() + self.after;
                let looks = 0;
                self.suspect(Suspicion { worker, prompt, basis, claimed, cached, due, looks });
            }
        }
    }

    /// The engine's prompt is another than the one that was matched: its kind is not matched again.
    fn miscounted(&self, worker: &str, prompt: &CachePrompt, engine_tokens: u64) {
        self.metrics.mismatches.inc();
        let tokens = prompt.tokens.len();
        tracing::warn!(
            worker,
            tokens,
            engine_tokens,
            "the engine counts a prompt otherwise than its /tokenize: it is not matched again",
        );
        if self.prompts.miscounted(prompt.source) {
            tracing::error!(
                worker,
                "the engine counted two prompts of one kind otherwise than its /tokenize: none of \
                 this kind (route, model, fields) is claimed any more; compare what /tokenize and \
                 the engine's chat template make of such a request, and restart fak once they \
                 agree",
            );
        }
    }

    fn suspect(&self, suspicion: Suspicion) {
        if let Err(error) = self.waiting.try_send(suspicion) {
            let (mpsc::error::TrySendError::Full(suspicion)
            | mpsc::error::TrySendError::Closed(suspicion)) = error;
            self.metrics.audited(self.judge.judge(&suspicion));
        }
    }
}

impl Auditor {
    /// Judges until told to stop; what waits then is judged at once.
    pub async fn run(mut self, stop: Shutdown) {
        let mut waiting: VecDeque<Suspicion> = VecDeque::new();
        loop {
            let due = waiting.front().map(|first| first.due);
            let until_due = async {
                match due {
                    Some(due) => sleep_until(due).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = stop.requested() => break,
                // Each waits equally long, so they are due in the order in which they come.
                Some(suspicion) = self.waiting.recv(), if waiting.len() < WAITING_MAX => {
                    waiting.push_back(suspicion);
                }
                () = until_due => {
                    let again = waiting.pop_front().and_then(|first| self.look(first));
                    waiting.extend(again);
                }
            }
        }
        for suspicion in &waiting {
            self.metrics.audited(self.judge.judge(suspicion));
        }
    }

    /// Judges a suspicion, or gives it back for another look.
    fn look(&self, mut suspicion: Suspicion) -> Option<Suspicion> {
        suspicion.looks += 1;
        if !self.judge.can_tell(&suspicion) {
            suspicion.due = Instant::now() + self.after;
            return Some(suspicion);
        }
        self.metrics.audited(self.judge.judge(&suspicion));
        None
    }
}

impl Judge {
    /// Whether an event that explains the claim would have come by now.
    fn can_tell(&self, suspicion: &Suspicion) -> bool {
        let Suspicion { worker, prompt, basis: (rank, mark), claimed, looks, .. } = suspicion;
        if self.index.held(*rank, &prompt.key()).reason == HeldReason::Suspended {
            return *looks >= LOOKS_MAX;
        }
        if self.index.held_since(*rank, &prompt.key(), *mark) < *claimed {
            return true;
        }
        if *looks == 1 {
            self.doubt.missed(worker);
        }
        *looks >= LOOKS_UNEXPLAINED
    }

    fn judge(&self, suspicion: &Suspicion) -> Verdict {
        let Suspicion { worker, prompt, basis: (rank, mark), claimed, cached, .. } = suspicion;
        let unbroken = self.index.held_since(*rank, &prompt.key(), *mark);
        if unbroken < *claimed {
            tracing::debug!(%worker, claimed, cached, unbroken, "a claim was lost in flight");
            return Verdict::LostInFlight;
        }
        tracing::error!(%worker, claimed, cached, "the engine reused less than was claimed");
        self.doubt.contradicted(&Contradiction {
            worker: Arc::clone(worker),
            rank: *rank,
            claimed: *claimed,
            cached: *cached,
        });
        Verdict::Over
    }
}
