//! Claims held against what the engine then reports.
//!
//! Invariant: every claim that a client was told ends with one verdict, however its answer ended. A
//! claim that was too high is a contradiction unless the engine explains it: since the claim was
//! made it took a claimed block, dropped its cache, or began another life, or events of it are
//! missing. So is `cold` of a prompt that the engine then finds cached, unless it announced the
//! first block since. What fak itself did explains nothing but itself, and what it doubted explains
//! nothing. Events come later than answers, so nothing is judged before they had their time; and
//! one that nobody missed shows only with the next, so the engine is asked for it before a claim is
//! called wrong. An engine that does not tell what it found is no acquittal: it costs the worker
//! its credit. That a client or a connection ended an answer early costs it nothing.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use fak_index::{Index, Loss, Mark, RankId};
use fak_kernel::rank::Trust;
use fak_kernel::{LossCause, Tier};
use fak_wire::openai::{CachedTokens, Usage};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};

use super::claim::{CachePrompt, Claim, Kv, NoClaim};
use super::metrics::{Metrics, Outcome as Ended};
use super::miscounted::KIND_FOR;
use super::owed::{Debt, LATE_AFTER, Owed, Reminders};
use super::prompt::Prompts;
use super::verdict::{News, Unaudited, Verdict, is_evidence};
use super::{Contradiction, Doubt};
use crate::fleet::{Credit, Fleet, Outcome, Withheld};
use crate::runtime::Shutdown;
use crate::sessions::Turn;

/// Pauses after which beliefs that are suspended are taken for lost.
const PAUSES_MAX: u32 = 10;

/// Pauses after which a claim that nothing explains is wrong. After the first the engine is asked
/// what it published, which it answers within 0.1 s (vLLM 0.32.0, observed).
const PAUSES_UNEXPLAINED: u32 = 3;

/// Suspicions that may wait, and debts; one that does not fit is not judged.
const WAITING_MAX: usize = 256;

/// One request's claim, on its way to the audit.
#[derive(Debug)]
pub(super) struct Audit {
    pub(super) worker: Arc<str>,
    /// The life of its process when the request was sent.
    pub(super) life: Option<Arc<str>>,
    /// How many lives it had begun then.
    pub(super) lives: u64,
    /// What the client was told; nothing before the answer's head was written.
    pub(super) claim: Option<Claim>,
    /// The prompt, or why it is not matched.
    pub(super) prompt: Result<CachePrompt, NoClaim>,
    pub(super) turn: Option<Turn>,
    /// One prompt and one choice: then the engine's numbers are of this prompt alone.
    pub(super) is_single: bool,
}

/// A claim that the engine's numbers contradict.
#[derive(Debug)]
struct Suspicion {
    worker: Arc<str>,
    /// The prompt; none only where the claim is that the worker holds nothing at all.
    prompt: Option<CachePrompt>,
    claim: Claim,
    cached: u64,
    since: Instant,
    /// Pauses that have passed.
    pauses: u32,
    /// Nothing is claimed of the worker until it is judged.
    is_unexplained: bool,
}

/// Where audits go; cheap to clone.
#[derive(Clone)]
pub(super) struct Audits {
    desk: Arc<Desk>,
    suspicions: mpsc::Sender<Suspicion>,
    debts: mpsc::Sender<Debt>,
}

/// Judges claims that were too high, once events had their time; it lives by [`run`](Self::run).
pub struct Auditor {
    desk: Arc<Desk>,
    suspicions: mpsc::Receiver<Suspicion>,
    debts: mpsc::Receiver<Debt>,
    after: Duration,
}

/// What audits work with.
pub(super) struct Parts {
    pub(super) metrics: Arc<Metrics>,
    pub(super) prompts: Arc<Prompts>,
    pub(super) index: Arc<Index>,
    pub(super) fleet: Fleet,
    pub(super) owed: Arc<Owed>,
    pub(super) doubt: Arc<dyn Doubt>,
}

struct Desk {
    parts: Parts,
    /// The life of each worker's process that has shown how many tokens were cached.
    shown: Mutex<HashMap<Arc<str>, Arc<str>>>,
}

/// Audits that wait `after` for events.
pub(super) fn audits(parts: Parts, after: Duration) -> (Audits, Auditor) {
    let (suspicions, suspected) = mpsc::channel(WAITING_MAX);
    let (debts, owing) = mpsc::channel(WAITING_MAX);
    let desk = Arc::new(Desk { parts, shown: Mutex::default() });
    let audits = Audits { desk: Arc::clone(&desk), suspicions, debts };
    (audits, Auditor { desk, suspicions: suspected, debts: owing, after })
}

impl Audits {
    /// The request ended so, and cost this as far as the engine told.
    pub(super) fn take(&self, audit: Audit, outcome: Ended, usage: Option<Usage>) {
        let Some(claim) = audit.claim.clone() else { return };
        let early = Unaudited::of(outcome);
        let usage = usage.filter(|usage| is_evidence(outcome, usage));
        let desk = &self.desk;
        let cached = desk.cached(&audit, usage).filter(|_| audit.is_single);
        let is_same = desk.is_counted_alike(&audit, usage);
        if let (Some(cached), true) = (cached, is_same) {
            desk.confirm(&audit, &claim, cached);
        }
        if is_same {
            self.owe(&audit, &claim);
        }
        if claim.kv.no_claim().is_some() {
            return;
        }
        match cached {
            Some(cached) => self.judge(audit, claim, cached, is_same),
            None => {
                let is_sum = (!audit.is_single).then_some(Unaudited::SeveralChoices);
                let why = early.or(is_sum).unwrap_or(Unaudited::NoDetails);
                desk.unaudited(&audit.worker, why);
            }
        }
    }

    /// Holds a claim against what the engine found. `is_same`: for the prompt that it was made of.
    fn judge(&self, audit: Audit, claim: Claim, cached: u64, is_same: bool) {
        let Audit { worker, prompt, turn, .. } = audit;
        let claimed = u64::from(claim.total());
        self.desk.parts.metrics.claimed(&claim.tokens, cached);
        if let Some(turn) = turn {
            turn.record(claimed, cached);
        }
        let prompt = prompt.ok();
        let verdict = match cached.cmp(&claimed) {
            std::cmp::Ordering::Equal => Verdict::Confirmed,
            std::cmp::Ordering::Greater if claim.kv == Kv::Warm => Verdict::Under,
            // What is believed is of another prompt: nothing contradicts it.
            _ if prompt.is_some() && !is_same => Verdict::Over,
            _ => {
                let (since, pauses, is_unexplained) = (Instant::now(), 0, false);
                return self.suspect(Suspicion {
                    worker,
                    prompt,
                    claim,
                    cached,
                    since,
                    pauses,
                    is_unexplained,
                });
            }
        };
        self.desk.parts.metrics.audited(verdict);
        self.desk.credit(&worker, Outcome::Audited);
    }

    fn suspect(&self, mut suspicion: Suspicion) {
        // What made a warm claim wrong, a dead stream or another engine, makes the next one wrong,
        // too.
        let explains = |loss: Loss| loss.is_engines() || loss.cause == LossCause::OwnAction;
        suspicion.is_unexplained =
            suspicion.claim.kv == Kv::Warm && !self.desk.loss(&suspicion).is_some_and(explains);
        if suspicion.is_unexplained {
            self.desk.in_doubt(&suspicion.worker, Credit::suspect);
        }
        if let Err(error) = self.suspicions.try_send(suspicion) {
            // Judged now it would be called wrong before its event could have come.
            self.desk.give_up(&error.into_inner());
        }
    }

    /// The engine has computed the prompt: it owes the stores of those blocks that are not known.
    fn owe(&self, audit: &Audit, claim: &Claim) {
        let (Ok(prompt), Some(basis)) = (&audit.prompt, claim.basis) else { return };
        if !basis.is_certain {
            return;
        }
        let (worker, rank, since) = (Arc::clone(&audit.worker), basis.rank, Instant::now());
        let debt = Debt { worker, rank, prompt: prompt.clone(), since };
        if !debt.is_settled(&self.desk.parts.index) {
            self.desk.parts.owed.add(debt.clone());
            // One that does not fit is found with the next batch.
            let _ = self.debts.try_send(debt);
        }
    }
}

impl Auditor {
    /// Judges until told to stop; what waits then is judged by what is known.
    pub async fn run(mut self, stop: Shutdown) {
        let mut waiting: VecDeque<(Instant, Suspicion)> = VecDeque::new();
        let mut owing: VecDeque<Debt> = VecDeque::new();
        let mut reminders = Reminders::default();
        loop {
            let due = waiting.front().map(|(due, _)| *due);
            let late = owing.front().map(|first| first.since + LATE_AFTER);
            tokio::select! {
                () = stop.requested() => break,
                // Each waits equally long, so they are due in the order in which they come.
                Some(suspicion) = self.suspicions.recv(), if waiting.len() < WAITING_MAX => {
                    waiting.push_back((Instant::now() + LATE_AFTER, suspicion));
                }
                Some(debt) = self.debts.recv(), if owing.len() < WAITING_MAX => {
                    owing.push_back(debt);
                }
                () = at(due) => {
                    let again = waiting.pop_front().and_then(|(_, first)| self.look(first));
                    waiting.extend(again.map(|again| (Instant::now() + LATE_AFTER, again)));
                }
                () = at(late) => {
                    if let Some(debt) = owing.pop_front() {
                        self.desk.remind(&debt, &mut reminders);
                    }
                }
            }
        }
        for (_, suspicion) in &waiting {
            if self.desk.loss(suspicion).is_some_and(Loss::is_engines) {
                self.desk.close(suspicion, Verdict::LostInFlight);
            } else {
                self.desk.give_up(suspicion);
            }
        }
    }

    /// Judges a suspicion, or gives it back for another look: nothing is claimed of its worker
    /// until it is judged, so what explains it is looked for often.
    fn look(&self, mut suspicion: Suspicion) -> Option<Suspicion> {
        let before = suspicion.pauses;
        while suspicion.since.elapsed() >= self.after * (suspicion.pauses + 1) {
            suspicion.pauses += 1;
        }
        if self.desk.judge(&suspicion) {
            return None;
        }
        if before == 0 && suspicion.pauses > 0 {
            self.desk.parts.doubt.missed(&suspicion.worker);
        }
        Some(suspicion)
    }
}

/// Waits until then; where there is no then, for ever.
async fn at(due: Option<Instant>) {
    match due {
        Some(due) => sleep_until(due).await,
        None => std::future::pending().await,
    }
}

impl Desk {
    /// What the engine took from its caches. One that has shown it in this life leaves it out where
    /// it is 0 (vLLM up to 0.23.0, source); one that has not may never show it.
    fn cached(&self, audit: &Audit, usage: Option<Usage>) -> Option<u64> {
        let usage = usage?;
        let told = match usage.cached_tokens {
            // More than there is says nothing.
            CachedTokens::Known(cached) if cached > usage.prompt_tokens => return None,
            told => told,
        };
        // Whole after each insertion, whatever panicked elsewhere.
        let mut shown = self.shown.lock().unwrap_or_else(PoisonError::into_inner);
        let has_shown = |life: &Arc<str>| shown.get(&audit.worker) == Some(life);
        match (told, &audit.life) {
            (CachedTokens::Known(cached), Some(life)) if !has_shown(life) => {
                shown.insert(Arc::clone(&audit.worker), Arc::clone(life));
                Some(cached)
            }
            (CachedTokens::Known(cached), _) => Some(cached),
            (CachedTokens::NotReported, Some(life)) => has_shown(life).then_some(0),
            (CachedTokens::NotReported, None) => None,
        }
    }

    /// Whether the engine counts the prompt as it was matched; if not, it is another prompt, and
    /// it is not matched again, and after two such its kind is not for a while.
    fn is_counted_alike(&self, audit: &Audit, usage: Option<Usage>) -> bool {
        let (Ok(prompt), Some(usage)) = (&audit.prompt, usage) else { return false };
        if !audit.is_single {
            return false;
        }
        let (worker, tokens) = (&audit.worker, prompt.tokens.len());
        let engine_tokens = usage.prompt_tokens;
        if engine_tokens == tokens as u64 {
            return true;
        }
        self.parts.metrics.mismatches.inc();
        tracing::warn!(
            %worker,
            tokens,
            engine_tokens,
            "the engine counts a prompt otherwise than its /tokenize: it is not matched again",
        );
        if self.parts.prompts.miscounted(prompt.source, Instant::now()) {
            let seconds = KIND_FOR.as_secs();
            tracing::error!(
                %worker,
                seconds,
                "the engine counted prompts of one kind otherwise than its /tokenize: none of this \
                 kind (route, model, fields) is claimed for a while, or until a worker restarts; \
                 compare what /tokenize and the engine's chat template make of such a request",
            );
        }
        false
    }

    /// Takes the engine's hit for evidence, as far as it says more than was claimed: what was heard
    /// of the rank has to be exact when the request was sent and now.
    fn confirm(&self, audit: &Audit, claim: &Claim, cached: u64) {
        let (Ok(prompt), Some(basis)) = (&audit.prompt, claim.basis) else { return };
        if !basis.is_certain || cached <= u64::from(claim.total()) {
            return;
        }
        let fleet = self.parts.fleet.snapshot();
        let is_exact = fleet.get(&audit.worker).is_some_and(|view| {
            view.state.ranks.iter().any(|r| r.id == basis.rank && r.trust == Trust::Exact)
        });
        if is_exact {
            let tokens = u32::try_from(cached).unwrap_or(u32::MAX);
            let blocks = self.parts.index.confirm(basis.rank, &prompt.key(), tokens, basis.mark);
            self.parts.metrics.confirmed_blocks.inc_by(u64::from(blocks));
        }
    }

    /// Asks an engine for a store that is late.
    fn remind(&self, debt: &Debt, reminders: &mut Reminders) {
        if debt.is_settled(&self.parts.index) {
            reminders.paid(&debt.worker);
        } else if reminders.is_due(&debt.worker, Instant::now()) {
            tracing::debug!(worker = %debt.worker, "a store is late: the engine is asked for it");
            self.parts.doubt.late(&debt.worker);
        }
    }

    /// Why the index no longer holds what was claimed.
    fn loss(&self, suspicion: &Suspicion) -> Option<Loss> {
        let Suspicion { prompt, claim, .. } = suspicion;
        let (prompt, basis) = (prompt.as_ref()?, claim.basis?);
        self.parts.index.loss_since(basis.rank, &prompt.key(), basis.mark, &claim.tokens)
    }

    /// Whether the engine announced since what it found of a prompt that was claimed to be cold.
    fn has_come(&self, suspicion: &Suspicion) -> bool {
        let prompt = suspicion.prompt.as_ref().map(CachePrompt::key);
        let may_have_come = |(rank, mark): &(RankId, Mark)| {
            self.parts.index.may_have_come_since(*rank, prompt.as_ref(), *mark)
        };
        suspicion.claim.cold_since.iter().any(may_have_come)
    }

    /// Whether beliefs that the claim rests on count for nothing now, and may count again.
    fn is_pending(&self, suspicion: &Suspicion) -> bool {
        let claim = &suspicion.claim;
        let cold = claim.cold_since.iter().map(|(rank, _)| *rank);
        claim.basis.map(|basis| basis.rank).into_iter().chain(cold).any(|rank| {
            let stats = self.parts.index.stats(rank);
            let is_aside = |tier: &Tier| claim.tokens.get(*tier) > 0 && stats.aside.has(*tier);
            stats.is_suspended || Tier::ALL.iter().any(is_aside)
        })
    }

    /// Judges a suspicion; false where that is too early.
    fn judge(&self, suspicion: &Suspicion) -> bool {
        let pauses = suspicion.pauses;
        let verdict = match self.loss(suspicion) {
            _ if suspicion.claim.kv == Kv::Cold && self.has_come(suspicion) => Verdict::Under,
            Some(loss) if loss.is_engines() => {
                self.parts.metrics.lost(loss.cause, News::of(loss.origin, pauses > 1));
                Verdict::LostInFlight
            }
            Some(Loss { cause: LossCause::OwnAction, .. }) => Verdict::LostToOwnAction,
            _ if self.is_pending(suspicion) && pauses < PAUSES_MAX => return false,
            _ if pauses < PAUSES_UNEXPLAINED => return false,
            _ => Verdict::Over,
        };
        self.close(suspicion, verdict);
        true
    }

    fn close(&self, suspicion: &Suspicion, verdict: Verdict) {
        let Suspicion { worker, cached, claim, .. } = suspicion;
        let claimed = claim.total();
        match verdict {
            Verdict::Over => self.contradict(suspicion),
            _ => tracing::debug!(
                %worker, claimed, cached, verdict = verdict.as_str(), "a claim did not hold",
            ),
        }
        self.release(suspicion);
        self.parts.metrics.audited(verdict);
        let is_lost = verdict == Verdict::LostInFlight;
        self.credit(worker, if is_lost { Outcome::Lost } else { Outcome::Audited });
    }

    /// A claim that cannot be audited.
    fn unaudited(&self, worker: &Arc<str>, why: Unaudited) {
        self.parts.metrics.unaudited(why);
        if why.costs_credit() {
            self.credit(worker, Outcome::Unaudited);
        }
    }

    /// Changes how far a worker is in doubt.
    fn in_doubt(&self, worker: &str, change: impl FnOnce(&Credit)) {
        if let Some(credit) = self.parts.fleet.credit(worker) {
            change(credit);
        }
    }

    /// What is claimed of its worker does not wait for a suspicion any more.
    fn release(&self, suspicion: &Suspicion) {
        if suspicion.is_unexplained {
            self.in_doubt(&suspicion.worker, Credit::judged);
        }
    }

    /// A suspicion that cannot be judged.
    fn give_up(&self, suspicion: &Suspicion) {
        self.release(suspicion);
        self.unaudited(&suspicion.worker, Unaudited::NotJudged);
    }

    /// What the claim rests on is wrong: the prompt's blocks that the engine did not use go at
    /// once, and the owner is told where more is in doubt.
    fn contradict(&self, suspicion: &Suspicion) {
        let Suspicion { worker, prompt, claim, cached, .. } = suspicion;
        let cold = claim.cold_since.first().map(|(rank, _)| *rank);
        let Some(rank) = claim.basis.map(|basis| basis.rank).or(cold) else { return };
        let (cached, claimed) = (*cached, claim.total());
        // Of a rank that was believed to hold nothing at all everything is in doubt.
        let is_rank = prompt.as_ref().is_none_or(|prompt| {
            let used = u32::try_from(cached).unwrap_or(u32::MAX);
            self.parts.index.demote_prompt(rank, &prompt.key(), used);
            self.parts.prompts.contradicted(rank, prompt.source, Instant::now())
        });
        let kv = if claim.kv == Kv::Cold { "cold" } else { "warm" };
        tracing::error!(
            %worker, kv, claimed, cached, is_rank,
            "the engine contradicts a claim, and no event explains it",
        );
        let worker = Arc::clone(worker);
        self.parts.doubt.contradicted(&Contradiction { worker, rank, claimed, cached, is_rank });
    }

    /// Takes in what became of a claim, and tells where it costs the worker its credit.
    fn credit(&self, worker: &Arc<str>, outcome: Outcome) {
        let credit = self.parts.fleet.credit(worker).cloned();
        let lost = credit.and_then(|credit| credit.take(outcome, std::time::Instant::now()));
        let Some(withheld) = lost else { return };
        let Withheld { unaudited, lost, of, .. } = withheld;
        let seconds = withheld.left(std::time::Instant::now()).as_secs();
        let remedy = if unaudited >= lost {
            "the engine does not tell how many tokens were cached: start it with \
             --enable-prompt-tokens-details"
        } else {
            "the engine keeps dropping what it announced, or its events come late: compare its \
             event sockets with `fak worker status`, and give it more KV cache"
        };
        tracing::error!(
            %worker, unaudited, lost, of, seconds, remedy,
            "too many claims were not borne out: nothing is claimed of this worker for a while",
        );
    }
}

#[cfg(test)]
mod tests {
    use fak_index::{Limits, RankOptions};
    use fak_kernel::vocab::PerTier;
    use fak_kernel::{Belief, TierSet};

    use super::super::claim::Basis;
    use super::super::prompt::Source;
    use super::*;
    use crate::runtime::{OnExit, TaskGroup};
    use crate::telemetry::{Registry, text};

    struct Silent;

    impl Doubt for Silent {
        fn suspect(&self, _: &Arc<str>) {}
        fn missed(&self, _: &Arc<str>) {}
        fn late(&self, _: &Arc<str>) {}
        fn contradicted(&self, _: &Contradiction) {}
    }

    const USAGE: Usage =
        Usage { prompt_tokens: 100, completion_tokens: 1, cached_tokens: CachedTokens::Known(0) };

    /// Audits of claims on one rank, and what is counted of them.
    struct Bench {
        registry: Registry,
        index: Arc<Index>,
        rank: RankId,
        audits: Audits,
    }

    impl Bench {
        fn new(after: Duration) -> (Self, Auditor) {
            let registry = Registry::new();
            let index = Arc::new(Index::new(7, Limits::default()));
            let rank = index.add_rank(RankOptions::default());
            let parts = Parts {
                metrics: Arc::new(Metrics::new(&registry).expect("new names")),
                prompts: Arc::new(Prompts::new(1 << 10, 1, 7, jiff::Timestamp::now)),
                index: Arc::clone(&index),
                fleet: Fleet::new([]),
                owed: Arc::default(),
                doubt: Arc::new(Silent),
            };
            let (audits, auditor) = audits(parts, after);
            (Self { registry, index, rank, audits }, auditor)
        }

        /// An answer whose claim of 96 tokens was wrong by all of them.
        fn contradicted(&self) {
            let prompt = CachePrompt {
                tokens: (0..100).collect(),
                source: Source::new(1, 1),
                lora: None,
                salt: None,
            };
            let mark = self.index.held_and_mark(self.rank, &prompt.key()).1;
            let basis = Basis { rank: self.rank, mark, is_certain: false, may_be_held: false };
            let tokens = PerTier { gpu: 96, ..PerTier::default() };
            let cold_since = Vec::new();
            let claim = Claim { kv: Kv::Warm, tokens, basis: Some(basis), cold_since };
            let audit = Audit {
                worker: "w".into(),
                life: None,
                lives: 0,
                claim: Some(claim),
                prompt: Ok(prompt),
                turn: None,
                is_single: true,
            };
            self.audits.take(audit, Ended::Ok, Some(USAGE));
        }

        fn count(&self, outcome: &str) -> u32 {
            let line = format!("fak_claims_total{{outcome=\"{outcome}\"}} ");
            let text = text(&self.registry).expect("text");
            let value = text.lines().find_map(|l| l.strip_prefix(&line)?.parse().ok());
            value.expect("a line")
        }
    }

    /// Lets so much time pass, a look of the auditor's at a time.
    async fn pass(time: Duration) {
        let begun = Instant::now();
        while begun.elapsed() < time {
            tokio::time::advance(LATE_AFTER).await;
        }
        tokio::task::yield_now().await;
    }

    /// Fault 18.
    #[test]
    fn a_full_queue_judges_nothing_before_its_time() {
        let (bench, auditor) = Bench::new(Duration::from_secs(1));
        (0..WAITING_MAX + 3).for_each(|_| bench.contradicted());
        assert_eq!((bench.count("over"), bench.count("unaudited")), (0, 3));
        drop(auditor);
    }

    /// The engine is asked after the first pause, and needs time to answer; a replay that runs may
    /// bring what explains the claim.
    #[tokio::test(start_paused = true)]
    async fn a_claim_is_over_after_three_pauses_or_ten_while_beliefs_are_suspended() {
        let pause = Duration::from_secs(1);
        type Suspends = fn(&Bench);
        let suspends: [(Suspends, u32); 3] = [
            (|_| (), PAUSES_UNEXPLAINED),
            (|bench| bench.index.suspend(bench.rank), PAUSES_MAX),
            (|bench| bench.index.set_aside(bench.rank, TierSet::GPU), PAUSES_MAX),
        ];
        for (suspend, pauses) in suspends {
            let (bench, auditor) = Bench::new(pause);
            suspend(&bench);
            bench.contradicted();
            let mut tasks = TaskGroup::new();
            tasks.spawn("auditor", OnExit::StopProcess, auditor.run(tasks.shutdown()));
            pass(pause * pauses - LATE_AFTER).await;
            assert_eq!(bench.count("over"), 0, "{pauses}");
            pass(LATE_AFTER * 4).await;
            assert_eq!(bench.count("over"), 1, "{pauses}");
        }
    }

    /// What waits when fak stops is not called wrong, nor explained by nothing.
    #[tokio::test(start_paused = true)]
    async fn a_claim_that_waits_when_fak_stops_is_lost_only_where_the_engine_explains_it() {
        let cleared = Loss { cause: LossCause::Cleared, origin: fak_index::Origin::Live };
        for (is_explained, lost, unaudited) in [(false, 0, 1), (true, 1, 0)] {
            let (bench, auditor) = Bench::new(Duration::from_secs(1));
            bench.contradicted();
            let mut tasks = TaskGroup::new();
            tasks.spawn("auditor", OnExit::StopProcess, auditor.run(tasks.shutdown()));
            // It is taken in.
            pass(Duration::ZERO).await;
            if is_explained {
                bench.index.demote(bench.rank, TierSet::GPU, Belief::Gone, cleared);
            }
            tasks.stop(Duration::from_secs(1)).await;
            let counted = (bench.count("lost_in_flight"), bench.count("unaudited"));
            assert_eq!(counted, (lost, unaudited));
            assert_eq!(bench.count("over"), 0);
        }
    }
}
