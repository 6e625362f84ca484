//! What of an engine's history may a fak that starts again believe?
//!
//! The replay brings what the engine announced in this life, but fak's fences are gone with the
//! process before, and two things do not show in that history. A clear is announced with the
//! engine's next step alone (vLLM 0.32.0, observed), so blocks that fak itself had dropped may
//! still read as stored. And what was given up for another reason than a clear was never announced
//! at all. The ledger knows of both. Invariant: what the ledger says was given up in the engine's
//! present life is not believed again by replay alone.

use fak_kernel::rank::Trust;
use fak_kernel::witness::{Clear, Reason};
use fak_kernel::{Action, Disposition, Evidence, Phase};

use crate::events::stream::Handle;
use crate::store::{self, Filter, Row, Store};

/// How far one worker's ranks are with it. The default has nothing to wait for.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Recovery {
    doubt: Doubt,
    owed: u32,
}

impl Recovery {
    /// Asks the ledger, when the ranks of a worker are first listened to.
    pub(super) async fn begin(store: &Store, worker: &str, incarnation: Option<&str>) -> Self {
        let read = read(store, worker, incarnation).await.unwrap_or_else(|error| {
            tracing::error!(worker, %error, "the ledger cannot be read: its worker starts cold");
            (Doubt::Cold, 0)
        });
        let (doubt, owed) = read;
        Self { doubt, owed }
    }

    /// Clears that the engine may still owe its stream for what was done to it.
    pub(super) fn owed(self) -> u32 {
        self.owed
    }

    /// Whether nothing of the history may be believed.
    pub(super) fn is_cold(self) -> bool {
        self.doubt == Doubt::Cold
    }

    /// Whether it is still open what may be believed.
    pub(super) fn is_pending(self) -> bool {
        self.doubt == Doubt::Owed
    }

    /// Takes in how the ranks' streams stand. One that is exact was tied by a marker, the store of
    /// a request that this fak sent: what the engine owed before came with that step, or earlier.
    pub(super) fn see(&mut self, ranks: &[Handle]) {
        if self.is_pending() && ranks.iter().all(|rank| rank.status().trust == Trust::Exact) {
            self.doubt = Doubt::None;
        }
    }
}

/// What the ledger leaves of an engine's history.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Doubt {
    /// All of it counts.
    #[default]
    None,
    /// It counts once a clear that the engine may still owe is in.
    Owed,
    /// None of it counts: what is stored from here on does.
    Cold,
}

impl Doubt {
    /// From rows, the newest first.
    fn of(rows: &[Row], is_all: bool, incarnation: Option<&str>) -> Self {
        let mut doubt = Self::None;
        for row in rows {
            let known = (row.incarnation.as_deref(), incarnation);
            if matches!(known, (Some(then), Some(now)) if then != now) {
                // An earlier life left nothing to this one.
                return doubt;
            }
            if row.evidence == Evidence::NotSent || !row.warm_demoted {
                continue;
            }
            if row.action == Action::Weights || row.reason == Reason::Contradicted.as_str() {
                return Self::Cold;
            }
            if may_owe(row) {
                doubt = Self::Owed;
            }
            if row.evidence == Evidence::Observed && is_all_gone(row) {
                return doubt;
            }
        }
        if is_all { doubt } else { Self::Cold }
    }
}

/// Reads the ledger's rows on `worker`. Where more of them might matter than are read, all of the
/// history is in doubt.
async fn read(
    store: &Store,
    worker: &str,
    incarnation: Option<&str>,
) -> Result<(Doubt, u32), store::Error> {
    let worker = Some(worker.to_owned());
    let rows = store.rows(&Filter { worker, newest_first: true, ..Filter::default() }).await?;
    let is_all = rows.len() < store::ROWS_MAX as usize;
    Ok((Doubt::of(&rows, is_all, incarnation), owed(&rows, incarnation)))
}

/// How many clears an engine of this life may still owe after rows, the newest first: an engine
/// that served has published those of what was done to it before, and one that was seen came.
fn owed(rows: &[Row], incarnation: Option<&str>) -> u32 {
    let is_other = |row: &Row| {
        let known = row.incarnation.as_deref().zip(incarnation);
        known.is_some_and(|(then, now)| then != now)
    };
    let mut owed = 0;
    for row in rows.iter().take_while(|row| !is_other(row)) {
        let is_seen = row.observed["clear"] == Clear::Seen.as_str();
        owed += u32::from(row.evidence != Evidence::NotSent && may_owe(row) && !is_seen);
        if row.phase == Phase::Serving {
            break;
        }
    }
    owed
}

/// Whether a clear may come of what the row tells: of an action, or of a sleep that was noticed.
fn may_owe(row: &Row) -> bool {
    match row.action {
        Action::Restart | Action::Lost | Action::Gap | Action::Weights => false,
        Action::Join | Action::Drift => row.phase != Phase::Serving,
        Action::Pause | Action::Resume | Action::Sleep => true,
        Action::Wake | Action::Reset | Action::Quarantine => true,
    }
}

fn is_all_gone(row: &Row) -> bool {
    !row.tiers.0.is_empty() && row.tiers.0.iter().all(|(_, kv)| *kv == Disposition::Forgotten)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Tiers;
    use fak_kernel::Tier;
    use serde_json::Value;

    fn row(action: Action) -> Row {
        Row {
            seq: 1,
            at: String::new(),
            worker: "w".to_owned(),
            rank: None,
            incarnation: Some("now".to_owned()),
            session: None,
            action,
            level: None,
            phase: Phase::Serving,
            kv: Disposition::Unknown,
            tiers: Tiers(vec![(Tier::Gpu, Disposition::Unknown)]),
            weight_version: None,
            warm_demoted: true,
            serving: true,
            evidence: Evidence::Observed,
            asked: Value::Null,
            answered: Value::Null,
            observed: Value::Null,
            reason: String::new(),
            standing: None,
        }
    }

    fn of(rows: &[Row]) -> Doubt {
        Doubt::of(rows, true, Some("now"))
    }

    #[test]
    fn what_was_dropped_in_this_life_is_in_doubt() {
        assert_eq!(of(&[]), Doubt::None);
        assert_eq!(of(&[row(Action::Join)]), Doubt::None, "it was met awake");
        assert_eq!(of(&[row(Action::Join), row(Action::Reset)]), Doubt::Owed);
        let refused = Row { evidence: Evidence::NotSent, ..row(Action::Reset) };
        assert_eq!(of(&[refused]), Doubt::None);
        let preserving = Row { warm_demoted: false, ..row(Action::Pause) };
        assert_eq!(of(&[preserving]), Doubt::None);
        let unrecorded = Row { evidence: Evidence::None, ..row(Action::Sleep) };
        assert_eq!(of(&[unrecorded]), Doubt::Owed);
        let asleep = Row { phase: Phase::Sleeping, ..row(Action::Drift) };
        assert_eq!(of(&[asleep]), Doubt::Owed);
    }

    #[test]
    fn clears_are_owed_for_what_was_done_since_the_engine_served() {
        let at = |action, phase| Row { phase, ..row(action) };
        let (paused, asleep) = (Phase::Paused, Phase::Sleeping);
        for (rows, clears) in [
            (vec![], 0),
            (vec![row(Action::Join)], 0),
            (vec![row(Action::Reset), row(Action::Reset)], 1),
            (vec![at(Action::Reset, paused), at(Action::Pause, paused), row(Action::Join)], 2),
            (vec![at(Action::Drift, asleep), row(Action::Reset)], 2),
            (vec![at(Action::Lost, Phase::Error), at(Action::Pause, paused)], 1),
        ] {
            assert_eq!(owed(&rows, Some("now")), clears, "{rows:?}");
            assert_eq!(owed(&rows, Some("next")), 0, "another life owes nothing");
        }
        let refused = Row { evidence: Evidence::NotSent, ..at(Action::Reset, paused) };
        let seen = Row { observed: serde_json::json!({ "clear": "seen" }), ..row(Action::Reset) };
        assert_eq!(owed(&[refused, seen], Some("now")), 0);
    }

    #[test]
    fn other_weights_leave_nothing_of_the_history_until_all_of_it_was_seen_to_go() {
        assert_eq!(of(&[row(Action::Reset), row(Action::Weights)]), Doubt::Cold);
        let gone = Tiers(vec![(Tier::Gpu, Disposition::Forgotten)]);
        let reset = Row { tiers: gone, ..row(Action::Reset) };
        assert_eq!(of(&[reset.clone(), row(Action::Weights)]), Doubt::Owed);
        assert_eq!(of(&[row(Action::Weights), reset]), Doubt::Cold);
        let contradicted = Row { reason: "contradicted".to_owned(), ..row(Action::Gap) };
        assert_eq!(of(&[contradicted]), Doubt::Cold);
    }

    #[test]
    fn another_lifes_rows_do_not_count_and_unread_ones_do() {
        let before = Row { incarnation: Some("before".to_owned()), ..row(Action::Weights) };
        assert_eq!(of(std::slice::from_ref(&before)), Doubt::None);
        let unnamed = Row { incarnation: None, ..row(Action::Reset) };
        assert_eq!(of(&[unnamed]), Doubt::Owed);
        assert_eq!(Doubt::of(&[row(Action::Drift)], false, Some("now")), Doubt::Cold);
        assert_eq!(Doubt::of(&[row(Action::Reset), before], false, Some("now")), Doubt::Owed);
    }
}
