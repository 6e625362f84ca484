//! Witness rows of moves and verdicts.
//!
//! Invariant: what the ledger shows of a verdict is the verdict's own; nothing is judged here.

use fak_index::{Index, RankId, Stats};
use fak_kernel::witness::{Level, Move, Reason, Verdict};
use fak_kernel::{Action, Evidence, Tier, TierSet};
use serde_json::Value;

use crate::fleet::State;
pub(super) use crate::store::error_chain;
use crate::store::{NewIntent, Outcome, Row, Tiers};

/// A row that says nothing yet but the action.
pub(super) fn new_intent(mv: Move, session: Option<String>) -> NewIntent {
    let level = match mv {
        Move::Sleep { level, .. } => level.map(|l| if l == Level::One { 1 } else { 2 }),
        _ => None,
    };
    NewIntent {
        worker: String::new(),
        rank: None,
        incarnation: None,
        session,
        action: mv.action(),
        level,
        weight_version: None,
        warm_demoted: false,
        asked: Value::Null,
        standing: None,
        is_epoch: false,
    }
}

/// What a verdict says, for the ledger, of a worker of this state.
pub(super) fn outcome(
    verdict: &Verdict,
    state: &State,
    answered: Value,
    observed: Value,
) -> Outcome {
    let tiers = Tier::ALL.iter().filter_map(|t| Some((*t, verdict.tier(*t)?))).collect();
    Outcome {
        phase: verdict.phase(),
        kv: verdict.kv.gpu,
        tiers: Tiers(tiers),
        weight_version: state.weight_version.as_deref().map(str::to_owned),
        warm_demoted: !verdict.demoted.is_empty(),
        serving: verdict.serving() && state.held_by.is_none(),
        evidence: verdict.evidence,
        answered,
        observed,
        reason: verdict.reason.as_str().to_owned(),
        standing: None,
    }
}

/// The tiers on which blocks of these ranks are proven.
pub(super) fn believed(index: &Index, ranks: impl Iterator<Item = RankId>) -> TierSet {
    let has = |stats: &Stats, tier: Tier| stats.blocks.get(tier) > stats.pending.get(tier);
    let of = |id| {
        let stats = index.stats(id);
        let tiers = Tier::ALL.iter().copied();
        tiers.filter(|tier| !stats.is_suspended && has(&stats, *tier)).collect()
    };
    ranks.map(of).fold(TierSet::NONE, TierSet::with)
}

/// How an action ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// As asked, and seen to be so.
    Done,
    /// Nothing changed.
    Refused,
    /// Something else, or nobody knows.
    Failed,
}

impl Ending {
    /// How the action of `row` ended. The reasons are the kernel's (`witness::Reason`): `isolated`
    /// is done without anything to send, and a refusal of the engine's own counts only where the
    /// engine was seen to stand as before.
    #[must_use]
    pub fn of(row: &Row) -> Self {
        match Reason::parse(&row.reason) {
            Some(Reason::Confirmed | Reason::Isolated) => Self::Done,
            // The engine goes on; what had no effect was the clear of the pause before.
            Some(Reason::NoEffect) if row.action == Action::Resume && row.serving => Self::Done,
            _ if row.evidence == Evidence::NotSent => Self::Refused,
            _ => Self::Failed,
        }
    }

    /// The word.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Refused => "refused",
            Self::Failed => "failed",
        }
    }
}

/// Says a row in the log.
pub(super) fn told(row: &Row, what: &'static str) {
    let Row { worker, action, phase, kv, reason, .. } = row;
    tracing::info!(%worker, %action, %phase, %kv, reason, "{what}");
}
