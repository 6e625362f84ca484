//! Why a row reads as it does: one closed list.
//!
//! Invariant: every reason that a row or an answer gives is a word of this list.

use crate::vocab::vocabulary;

vocabulary! {
    /// Why nothing was sent.
    Refusal {
        /// The engine has no `/pause`.
        NoPause = "engine_without_pause",
        /// The engine's pause does not offer that mode, or does not show it.
        ModeNotOffered = "mode_not_offered",
        /// Engine or connector are not proven to keep the tier.
        KeepNotProven = "keep_tier_not_proven",
        /// The engine is known not to reset the connector's tiers.
        ExternalNotOffered = "reset_external_not_offered",
        /// A sleep without level 1 or 2 is ill-formed; a pause is `pause`.
        LevelMissing = "level_missing",
        /// Paused already.
        AlreadyPaused = "already_paused",
        /// Asleep already, or asleep where only an awake engine may be called.
        AlreadyAsleep = "already_asleep",
        /// Awake already.
        AlreadyAwake = "already_awake",
        /// Paused, not asleep: `resume` undoes it, `wake` is for sleepers.
        OnlyPaused = "only_paused",
        /// Partly woken: only a further `wake` may be called.
        PartlyAwake = "partly_awake",
        /// Weights cannot have been loaded into memory that is asleep: wake that part first.
        WeightsAsleep = "weights_asleep",
        /// What state the engine is in is not known: only a `wake` is right for all of them.
        StateUnknown = "state_unknown",
        /// Requests were still in flight when the time to drain them ended.
        DrainTimeout = "drain_timeout",
        /// Somebody said so, while it waited for requests to end.
        Cancelled = "cancelled",
        /// Another command is on its way to the worker.
        Busy = "busy",
        /// Several engines answer at the worker's address, or another worker's engine does: what is
        /// done through it would be done to one that nobody named.
        NotOneEngine = "not_one_engine",
        /// Somebody else holds the worker.
        Held = "held",
        /// The caller ends a hold, and no hold is in force.
        NotHeld = "not_held",
        /// No route answered the prompt that was to be compared after the wake.
        CanaryNotRecorded = "canary_not_recorded",
    }
}

/// Why a verdict reads as it does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// Answered, and observed as asked.
    Confirmed,
    /// Noticed, not asked.
    Noticed,
    /// A matter of the gateway's alone: a new salt.
    Isolated,
    /// Nothing was sent.
    NotSent(Refusal),
    /// The engine turned the call away.
    Refused,
    /// `success:false`: blocks were in use. Drain and try again.
    Declined,
    /// 200 without a body: whether it succeeded is not said.
    NoBody,
    /// 5xx or the like.
    Failed,
    /// No answer in time.
    Timeout,
    /// The connection broke.
    Cut,
    /// fak ended between intent and outcome.
    Unrecorded,
    /// The body names another state than the one asked for.
    AnswerMismatch,
    /// Answered, and nothing could be observed.
    NotObserved,
    /// The engine's process is gone.
    Gone,
    /// Observed otherwise than answered.
    Contradicted,
    /// Hits on a tier that was just dropped, with no store in between.
    HitsAfterClear,
    /// Answered as done, and it was seen that it had no effect: requests that were to end still
    /// run, or the cache that was to be cleared was not.
    NoEffect,
    /// Answered as done, and the live event stream did not show the clear in time.
    ClearNotSeen,
    /// Asleep at another level than the one asked for.
    LevelMismatch,
    /// A sleep without a level that anybody can name.
    LevelMissing,
    /// The sleep failed half-way: paused, memory resident. `resume` recovers.
    SleepFailedPaused,
    /// Reported as reset, and the connector still serves the old blocks.
    NotAchieved,
    /// The tier was to be kept, and a matching request found nothing in it.
    TierNotKept,
    /// Awake after a level 2 sleep, with nothing that says weights were loaded since.
    WeightsNotProven,
    /// Awake with the weights from before, and a fixed prompt is not answered as before.
    CanaryMismatch,
    /// All was done as asked, and the worker does not serve all the same.
    NotServing,
    /// Asleep as asked, and its engine shows requests that run.
    RequestsRunning,
    /// Asleep as asked, and its engine does not tell what runs.
    RunningNotTold,
}

impl Reason {
    /// Every reason but the refusals, of which [`Reason::NotSent`] takes each.
    const OTHERS: [Self; 27] = [
        Self::Confirmed,
        Self::Noticed,
        Self::Isolated,
        Self::Refused,
        Self::Declined,
        Self::NoBody,
        Self::Failed,
        Self::Timeout,
        Self::Cut,
        Self::Unrecorded,
        Self::AnswerMismatch,
        Self::NotObserved,
        Self::Gone,
        Self::Contradicted,
        Self::HitsAfterClear,
        Self::NoEffect,
        Self::ClearNotSeen,
        Self::LevelMismatch,
        Self::LevelMissing,
        Self::SleepFailedPaused,
        Self::NotAchieved,
        Self::TierNotKept,
        Self::WeightsNotProven,
        Self::CanaryMismatch,
        Self::NotServing,
        Self::RequestsRunning,
        Self::RunningNotTold,
    ];

    /// The reason that `word` names; `None` for a word outside the list.
    #[must_use]
    pub fn parse(word: &str) -> Option<Self> {
        let refusal = || Refusal::parse(word).map(Self::NotSent);
        Self::OTHERS.into_iter().find(|reason| reason.as_str() == word).or_else(refusal)
    }

    /// The word.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Confirmed => "confirmed",
            Self::Noticed => "noticed",
            Self::Isolated => "isolated",
            Self::NotSent(refusal) => refusal.as_str(),
            Self::Refused => "refused_by_engine",
            Self::Declined => "success_false",
            Self::NoBody => "no_body",
            Self::Failed => "failed",
            Self::Timeout => "timeout",
            Self::Cut => "cut",
            Self::Unrecorded => "unrecorded",
            Self::AnswerMismatch => "answer_mismatch",
            Self::NotObserved => "not_observed",
            Self::Gone => "gone",
            Self::Contradicted => "contradicted",
            Self::HitsAfterClear => "hits_after_clear",
            Self::NoEffect => "no_effect",
            Self::ClearNotSeen => "clear_not_seen",
            Self::LevelMismatch => "level_mismatch",
            Self::LevelMissing => "level_not_named",
            Self::SleepFailedPaused => "paused_sleep_failed",
            Self::NotAchieved => "not_achieved",
            Self::TierNotKept => "tier_not_kept",
            Self::WeightsNotProven => "weights_not_proven",
            Self::CanaryMismatch => "canary_mismatch",
            Self::NotServing => "not_serving",
            Self::RequestsRunning => "requests_running",
            Self::RunningNotTold => "running_not_told",
        }
    }
}

impl core::fmt::Display for Reason {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use alloc::string::ToString;

    use super::*;

    #[test]
    fn every_reason_is_read_back_from_its_word_and_no_other_word_is_one() {
        let refusals = Refusal::ALL.iter().map(|refusal| Reason::NotSent(*refusal));
        for reason in Reason::OTHERS.into_iter().chain(refusals) {
            assert_eq!(Reason::parse(reason.as_str()), Some(reason));
            assert_eq!(reason.to_string(), reason.as_str());
        }
        assert_eq!(Reason::parse("it did not work"), None);
    }
}
