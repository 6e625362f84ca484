//! What does the ledger leave to a fak that starts again of a worker's weights, and of tiers that
//! may hold KV of others?
//!
//! A [`Standing`](fak_kernel::witness::Standing) does not outlive the process, and what an engine
//! shows does not tell: one that dropped its weights in a level 2 sleep reads as awake once it was
//! woken, and one whose tiers hold KV of other weights as any other. Invariant: what rows say of
//! both is not forgotten by a restart of fak, and where they do not say enough it is the worse.

use std::sync::Arc;

use fak_kernel::witness::SleepState;
use fak_kernel::{Action, Disposition, Evidence, Phase, Tier, TierSet};

use crate::store::{self, Filter, Row, Store};

/// Rows of one worker that are read at most; past them the worst is taken for true.
const PAGES_MAX: u32 = 1000;

/// The field of `asked` that says of a wake that it is on other weights, or may be.
pub(super) const NEW_WEIGHTS: &str = "new_weights";

/// What rows leave of a worker's standing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Inherited {
    /// The tiers that may hold KV of other weights than those loaded.
    pub(super) stale: TierSet,
    /// Whether weights are known to be loaded once the engine is awake.
    pub(super) weights_proven: bool,
    /// The weight version, where it was known.
    pub(super) version: Option<Arc<str>>,
    /// As in [`fleet::Weights`](crate::fleet::Weights).
    pub(super) epoch: Option<u64>,
    /// The epoch is the next row's.
    pub(super) owes_epoch: bool,
    /// The engine's process is another than that of the last row.
    pub(super) is_other_life: bool,
    incarnation: Option<String>,
}

impl Inherited {
    /// Reads the rows of `worker`, whose life now is `incarnation`. `is_in_process`: the tiers of
    /// its connector end with its process.
    ///
    /// # Errors
    /// Those of [`Store::rows`]; then nothing is known, and the worker is not to serve.
    pub(super) async fn read(
        store: &Store,
        worker: &str,
        incarnation: Option<&str>,
        is_in_process: bool,
    ) -> Result<Self, store::Error> {
        let mut inherited = Self::nothing();
        let mut after = None;
        for _ in 0..PAGES_MAX {
            let filter = Filter { worker: Some(worker.to_owned()), after, ..Filter::default() };
            let rows = store.rows(&filter).await?;
            rows.iter().for_each(|row| inherited.take(row, is_in_process));
            after = rows.last().map(|row| row.seq);
            if rows.len() < store::ROWS_MAX as usize {
                inherited.live(incarnation, is_in_process);
                return Ok(inherited);
            }
        }
        tracing::warn!(worker, "the ledger is too long to be read: its tiers are taken for stale");
        let stale = TierSet::ALL;
        Ok(Self { stale, weights_proven: false, owes_epoch: true, ..inherited })
    }

    /// Of a worker without rows.
    fn nothing() -> Self {
        Self {
            stale: TierSet::NONE,
            weights_proven: true,
            version: None,
            epoch: None,
            owes_epoch: false,
            is_other_life: false,
            incarnation: None,
        }
    }

    /// The next row.
    fn take(&mut self, row: &Row, is_in_process: bool) {
        if row.evidence == Evidence::NotSent {
            return;
        }
        if row.action == Action::Restart {
            self.epoch = self.epoch.map(|_| row.seq);
            self.incarnation.clone_from(&row.incarnation);
        } else {
            self.live(row.incarnation.as_deref(), is_in_process);
        }
        if has_new_weights(row) {
            let named: TierSet = row.tiers.0.iter().map(|(tier, _)| *tier).collect();
            self.stale = if named.is_empty() { TierSet::ALL } else { named };
            let is_named = row.action == Action::Weights && !is_marked(row);
            self.epoch = (!is_named).then_some(row.seq);
            self.owes_epoch = false;
        }
        let is_gone = |tier: &Tier| row.tiers.get(*tier) == Some(Disposition::Forgotten);
        self.stale = self.stale.iter().filter(|tier| !is_gone(tier)).collect();
        self.weights_proven = weights_proven(row, self.weights_proven);
        if row.weight_version.is_some() {
            self.version = row.weight_version.as_deref().map(Arc::from);
        }
        self.is_other_life = false;
    }

    /// The process is this one; where it is another than before, its device memory is empty and its
    /// weights are those that it found.
    fn live(&mut self, incarnation: Option<&str>, is_in_process: bool) {
        let Some(now) = incarnation else { return };
        if self.incarnation.as_deref().is_some_and(|before| before != now) {
            let own = if is_in_process { TierSet::of(Tier::Cpu) } else { TierSet::NONE };
            self.stale = self.stale.without(TierSet::GPU.with(own));
            self.weights_proven = true;
            self.owes_epoch |= self.epoch.take().is_some();
            self.is_other_life = true;
        }
        self.incarnation = Some(now.to_owned());
    }
}

fn has_new_weights(row: &Row) -> bool {
    row.action == Action::Weights || is_marked(row)
}

/// Whether its weights have no other name than the row.
fn is_marked(row: &Row) -> bool {
    row.asked.get(NEW_WEIGHTS).is_some_and(|new| *new == true)
}

/// Whether weights are known to be loaded after a row, which was sent or noticed.
fn weights_proven(row: &Row, before: bool) -> bool {
    if row.serving {
        return true;
    }
    let state = row.observed.get("sleep_state").and_then(|state| state.as_str());
    let may_lack = match row.phase {
        Phase::Sleeping => state != Some(SleepState::One.as_str()),
        Phase::Error => state.is_some_and(|state| state != SleepState::Awake.as_str()),
        Phase::Serving | Phase::Paused | Phase::Waking => false,
    };
    match row.action {
        Action::Sleep => {
            let is_kept = match row.level {
                Some(1) => state != Some(SleepState::Two.as_str()),
                _ => row.phase == Phase::Paused,
            };
            is_kept && before
        }
        // Its weights were not loaded, or its reset was not proven: a wake that was serves.
        Action::Wake => before && !has_new_weights(row),
        Action::Restart => !may_lack,
        Action::Drift => before && !may_lack,
        _ => before,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Tiers;
    use serde_json::{Value, json};

    use Disposition::{Forgotten, Preserved, Unknown};

    /// A row on a gpu and a cpu tier of the life `a`.
    fn row(seq: u64, action: Action, kv: [Disposition; 2]) -> Row {
        let phase = match action {
            Action::Sleep => Phase::Sleeping,
            Action::Lost => Phase::Error,
            _ => Phase::Serving,
        };
        Row {
            seq,
            at: String::new(),
            worker: "w".to_owned(),
            rank: None,
            incarnation: Some("a".to_owned()),
            session: None,
            action,
            level: (action == Action::Sleep).then_some(1),
            phase,
            kv: kv[0],
            tiers: Tiers(vec![(Tier::Gpu, kv[0]), (Tier::Cpu, kv[1])]),
            weight_version: Some("v1".to_owned()),
            warm_demoted: true,
            serving: phase == Phase::Serving,
            evidence: Evidence::Observed,
            asked: Value::Null,
            answered: Value::Null,
            observed: Value::Null,
            reason: String::new(),
        }
    }

    fn on_new_weights(seq: u64, kv: [Disposition; 2]) -> Row {
        Row { asked: json!({ NEW_WEIGHTS: true }), ..row(seq, Action::Wake, kv) }
    }

    fn of(rows: &[Row], now: &str, is_in_process: bool) -> Inherited {
        let mut inherited = Inherited::nothing();
        rows.iter().for_each(|row| inherited.take(row, is_in_process));
        inherited.live(Some(now), is_in_process);
        inherited
    }

    const CPU: TierSet = TierSet::of(Tier::Cpu);

    #[test]
    fn a_tier_stays_stale_until_a_row_says_that_it_is_empty() {
        let both = TierSet::GPU.with(CPU);
        let changed = row(2, Action::Weights, [Unknown, Unknown]);
        assert_eq!(of(&[], "a", true).stale, TierSet::NONE);
        assert_eq!(of(&[row(1, Action::Drift, [Unknown; 2])], "a", true).stale, TierSet::NONE);
        assert_eq!(of(std::slice::from_ref(&changed), "a", true).stale, both);
        let reset = row(3, Action::Reset, [Forgotten, Preserved]);
        assert_eq!(of(&[changed.clone(), reset], "a", true).stale, CPU);
        let declined = row(3, Action::Reset, [Unknown, Unknown]);
        assert_eq!(of(&[changed.clone(), declined], "a", true).stale, both);
        let emptied = row(3, Action::Reset, [Forgotten, Forgotten]);
        assert_eq!(of(&[changed.clone(), emptied], "a", true).stale, TierSet::NONE);
        let refused =
            Row { evidence: Evidence::NotSent, ..row(3, Action::Reset, [Forgotten, Forgotten]) };
        assert_eq!(of(&[changed, refused], "a", true).stale, both);
        assert_eq!(of(&[on_new_weights(1, [Forgotten, Unknown])], "a", true).stale, CPU);
        // An intent without an outcome.
        let cut = Row {
            evidence: Evidence::None,
            tiers: Tiers(Vec::new()),
            ..on_new_weights(1, [Unknown; 2])
        };
        assert_eq!(of(&[cut], "a", true).stale, TierSet::ALL);
    }

    #[test]
    fn a_new_process_has_an_empty_device_and_what_outlives_a_process_stays_stale() {
        let changed = row(1, Action::Weights, [Unknown, Unknown]);
        assert_eq!(of(std::slice::from_ref(&changed), "b", true).stale, TierSet::NONE);
        assert_eq!(of(std::slice::from_ref(&changed), "b", false).stale, CPU);
        let restart = Row {
            incarnation: Some("b".to_owned()),
            ..row(2, Action::Restart, [Forgotten, Unknown])
        };
        let after = of(&[changed, restart], "b", false);
        assert_eq!((after.stale, after.is_other_life), (CPU, false));
        // A life that nobody could name is this one.
        let unnamed = Row { incarnation: None, ..row(1, Action::Weights, [Unknown, Unknown]) };
        assert_eq!(of(&[unnamed], "b", true).stale, TierSet::GPU.with(CPU));
    }

    #[test]
    fn weights_that_were_dropped_are_proven_by_a_row_that_serves() {
        let level_2 = Row { level: Some(2), ..row(1, Action::Sleep, [Forgotten; 2]) };
        let proven = |rows: &[Row]| of(rows, "a", true).weights_proven;
        assert!(proven(&[row(1, Action::Sleep, [Forgotten; 2])]));
        assert!(!proven(std::slice::from_ref(&level_2)));
        let waking = Row {
            phase: Phase::Waking,
            serving: false,
            ..row(2, Action::Wake, [Unknown, Unknown])
        };
        assert!(!proven(&[level_2.clone(), waking.clone()]));
        assert!(proven(&[level_2.clone(), row(2, Action::Wake, [Forgotten; 2])]));
        assert!(of(std::slice::from_ref(&level_2), "b", true).weights_proven, "a process loads");
        let owed = Row { asked: json!({ NEW_WEIGHTS: true }), ..waking };
        assert!(!proven(&[row(1, Action::Sleep, [Forgotten; 2]), owed]));
        let asleep = |state: &str| Row {
            phase: Phase::Sleeping,
            serving: false,
            observed: json!({ "sleep_state": state }),
            ..row(2, Action::Drift, [Forgotten, Unknown])
        };
        assert!(proven(&[asleep("weights_offloaded")]));
        assert!(!proven(&[asleep("discard_all")]) && !proven(&[asleep("unnamed")]));
    }

    #[test]
    fn weights_that_lost_their_name_have_a_row_for_one() {
        let epoch = |rows: &[Row], now| {
            let inherited = of(rows, now, true);
            (inherited.epoch, inherited.owes_epoch)
        };
        let woken = on_new_weights(4, [Forgotten, Forgotten]);
        assert_eq!(epoch(std::slice::from_ref(&woken), "a"), (Some(4), false));
        assert_eq!(epoch(std::slice::from_ref(&woken), "b"), (None, true));
        let named = row(5, Action::Weights, [Unknown, Unknown]);
        assert_eq!(epoch(&[woken.clone(), named], "a"), (None, false));
        let told = Row {
            asked: json!({ NEW_WEIGHTS: true }),
            ..row(5, Action::Weights, [Unknown, Unknown])
        };
        assert_eq!(epoch(&[woken.clone(), told], "a"), (Some(5), false), "no version moved");
        let restart =
            Row { incarnation: Some("b".to_owned()), ..row(6, Action::Restart, [Forgotten; 2]) };
        assert_eq!(epoch(&[woken, restart], "b"), (Some(6), false));
    }
}
