//! Stores that finished requests owe: an engine announces the blocks that a request filled with the
//! step that filled them, and the answer may overtake the batch.
//!
//! Invariant: nobody waits for one longer than [`OWED_FOR`] after the answer, and where one does
//! not come the engine is asked, less and less often where that does not help; nothing is claimed
//! of what is owed.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use fak_index::{Index, Prompt, RankId};
use tokio::time::{Instant, sleep};

use super::claim::CachePrompt;

/// For how long after its answer a request's stores are waited for. Batches that were late at all
/// came within 10 ms in most cases (hunts on the simulator, observed); it has to be little beside
/// computing a block again.
const OWED_FOR: Duration = Duration::from_millis(10);
/// How often a request that waits looks.
const LOOK_EVERY: Duration = Duration::from_millis(1);
/// When a store is late: no batch that was not lost took so long.
pub(super) const LATE_AFTER: Duration = Duration::from_millis(50);
/// Answers whose stores are waited for at once.
const OWED_MAX: usize = 32;
/// Between two times that an engine is asked, at first and at most.
const ASK_EVERY: Duration = Duration::from_millis(500);
const ASK_EVERY_MAX: Duration = Duration::from_secs(60);

/// A prompt whose blocks a rank has computed and not announced.
#[derive(Clone, Debug)]
pub(super) struct Debt {
    pub(super) worker: Arc<str>,
    pub(super) rank: RankId,
    pub(super) prompt: CachePrompt,
    pub(super) since: Instant,
}

impl Debt {
    /// Whether the index holds as much of its first `tokens` as it can.
    fn is_paid(&self, index: &Index, tokens: usize) -> bool {
        let key = self.prompt.key();
        // One more than is looked for, since the block with the last token never counts.
        let tokens = &key.tokens[..(tokens + 1).min(key.tokens.len())];
        let held = index.held(self.rank, &Prompt { tokens, ..key });
        let Some(blocks) = tokens.len().saturating_sub(1).checked_div(held.block_size as usize)
        else {
            return false;
        };
        held.blocks_total() as usize >= blocks
    }

    /// Whether all of it was announced.
    pub(super) fn is_settled(&self, index: &Index) -> bool {
        self.is_paid(index, self.prompt.tokens.len())
    }
}

/// What is owed now.
#[derive(Debug, Default)]
pub(super) struct Owed(Mutex<VecDeque<Debt>>);

impl Owed {
    /// A request was answered.
    pub(super) fn add(&self, debt: Debt) {
        let mut debts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if debts.len() == OWED_MAX {
            debts.pop_front();
        }
        debts.push_back(debt);
    }

    /// Waits for what a request with these tokens can use of what is owed.
    pub(super) async fn wait(&self, index: &Index, tokens: &[u32]) {
        let Some((debt, shared)) = self.shared(index, tokens, Instant::now()) else { return };
        while debt.since.elapsed() < OWED_FOR && !debt.is_paid(index, shared) {
            sleep(LOOK_EVERY).await;
        }
    }

    /// The debt that shares most with these tokens, and how many.
    fn shared(&self, index: &Index, tokens: &[u32], now: Instant) -> Option<(Debt, usize)> {
        let mut debts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        debts.retain(|debt| now.duration_since(debt.since) < OWED_FOR);
        let shared = |debt: &Debt| {
            debt.prompt.tokens.iter().zip(tokens).take_while(|(one, other)| one == other).count()
        };
        let most = debts.iter().map(|debt| (shared(debt), debt)).max_by_key(|(shared, _)| *shared);
        let (shared, debt) = most.map(|(shared, debt)| (shared, debt.clone()))?;
        drop(debts);
        (shared > 0 && !debt.is_paid(index, shared)).then_some((debt, shared))
    }
}

/// When engines were asked for what they owe.
#[derive(Debug, Default)]
pub(super) struct Reminders(HashMap<Arc<str>, (Instant, Duration)>);

impl Reminders {
    /// A store is late; whether its engine is to be asked now.
    pub(super) fn is_due(&mut self, worker: &Arc<str>, now: Instant) -> bool {
        let (next, every) = self.0.entry(Arc::clone(worker)).or_insert_with(|| (now, ASK_EVERY));
        let is_due = *next <= now;
        if is_due {
            *next = now + *every;
            *every = (*every * 2).min(ASK_EVERY_MAX);
        }
        is_due
    }

    /// A store came in time.
    pub(super) fn paid(&mut self, worker: &Arc<str>) {
        self.0.remove(worker);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use fak_index::{EngineHash, Extra, GroupKind, Limits, RankOptions, Store};
    use fak_kernel::{Tier, TierSet};

    use super::super::prompt::Source;
    use super::*;

    fn store(tokens: &[u32]) -> Store {
        Store {
            hashes: (1..=tokens.len() as u64 / 4)
                .map(|n| EngineHash::Int(u64::from(tokens[0]) * 16 + n))
                .collect(),
            parent: None,
            tokens: tokens.to_vec(),
            block_size: 4,
            extra: Extra::PerBlock(Vec::new()),
            lora: None,
            tier: Tier::Gpu,
            group: 0,
            kind: GroupKind::Full,
        }
    }

    /// Fault 50.
    #[tokio::test(start_paused = true)]
    async fn a_request_waits_for_the_stores_that_a_finished_one_owes() {
        let index = Arc::new(Index::new(7, Limits::default()));
        let rank = index.add_rank(RankOptions::default());
        index.store(rank, &store(&[100, 101, 102, 103]), TierSet::ALL);
        let tokens: Vec<u32> = (0..17).collect();
        let owed = Owed::default();
        let debt = |tokens: &[u32]| Debt {
            worker: "w".into(),
            rank,
            prompt: CachePrompt {
                tokens: tokens.into(),
                source: Source::new(1, 1),
                lora: None,
                salt: None,
            },
            since: Instant::now(),
        };
        let waits = async |tokens: &[u32]| {
            let start = Instant::now();
            owed.wait(&index, tokens).await;
            start.elapsed()
        };
        assert_eq!(waits(&tokens).await, Duration::ZERO, "nothing is owed");
        owed.add(debt(&tokens));
        assert_eq!(waits(&[7; 17]).await, Duration::ZERO, "of another prompt");
        assert_eq!(waits(&tokens[..3]).await, Duration::ZERO, "of no whole block");
        let announcing = async {
            sleep(Duration::from_millis(4)).await;
            index.store(rank, &store(&tokens[..16]), TierSet::ALL);
        };
        let (waited, ()) = tokio::join!(waits(&tokens), announcing);
        assert!(waited >= Duration::from_millis(4) && waited < OWED_FOR, "{waited:?}");
        assert_eq!(waits(&tokens).await, Duration::ZERO, "it was paid");
        let more: Vec<u32> = (50..91).collect();
        owed.add(debt(&more));
        let waited = waits(&more).await;
        assert!(waited >= OWED_FOR && waited < OWED_FOR * 2, "no longer: {waited:?}");
        assert_eq!(waits(&more).await, Duration::ZERO, "nor again");
    }

    #[test]
    fn an_engine_that_announces_nothing_is_asked_less_and_less_often() {
        let (mut reminders, worker) = (Reminders::default(), Arc::from("w"));
        let start = Instant::now();
        let mut asked = 0;
        for second in 0..600 {
            asked += u32::from(reminders.is_due(&worker, start + Duration::from_secs(second)));
        }
        assert!((10..20).contains(&asked), "{asked}");
        reminders.paid(&worker);
        assert!(reminders.is_due(&worker, start + Duration::from_secs(600)));
    }
}
