//! The words for what becomes of a claim, and what an answer's end says of it.
//!
//! Invariant: an answer that the engine ended itself, or that was cut before it told what it found,
//! is evidence of nothing, and costs nobody's credit.

use fak_index::Origin;
use fak_wire::openai::{CachedTokens, Usage};

use super::metrics::{Failure, Outcome};

/// What an audit says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// As claimed.
    Confirmed,
    /// The engine found more: its events are late, or say less.
    Under,
    /// The engine found less, or more where the claim was that there is nothing; and nothing
    /// explains it.
    Over,
    /// The engine found less, and what it did after the claim explains it.
    LostInFlight,
    /// The engine found less, since an action of fak's overtook the request.
    LostToOwnAction,
    /// The engine does not say.
    Unaudited,
}

impl Verdict {
    pub(super) const ALL: [Self; 6] = [
        Self::Confirmed,
        Self::Under,
        Self::Over,
        Self::LostInFlight,
        Self::LostToOwnAction,
        Self::Unaudited,
    ];

    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Confirmed => "confirmed",
            Self::Under => "under",
            Self::Over => "over",
            Self::LostInFlight => "lost_in_flight",
            Self::LostToOwnAction => "lost_to_own_action",
            Self::Unaudited => "unaudited",
        }
    }
}

/// Why a claim cannot be audited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unaudited {
    /// The engine does not tell how many tokens were cached.
    NoDetails,
    /// It tells one sum of several prompts or choices.
    SeveralChoices,
    /// The client left before the engine told.
    ClientLeft,
    /// The worker failed the answer, or its connection broke.
    Failed,
    /// The engine aborted or refused the request, or fak stopped: it need not have looked.
    Aborted,
    /// Too many others wait to be judged, or fak stopped.
    NotJudged,
}

impl Unaudited {
    pub(super) const ALL: [Self; 6] = [
        Self::NoDetails,
        Self::SeveralChoices,
        Self::ClientLeft,
        Self::Failed,
        Self::Aborted,
        Self::NotJudged,
    ];

    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::NoDetails => "no_details",
            Self::SeveralChoices => "several_choices",
            Self::ClientLeft => "client_left",
            Self::Failed => "failed",
            Self::Aborted => "aborted",
            Self::NotJudged => "not_judged",
        }
    }

    /// Of an answer that ended so. `None`: it ended well, and the engine was to tell.
    pub(super) fn of(outcome: Outcome) -> Option<Self> {
        match outcome {
            Outcome::Ok => None,
            Outcome::Cancelled => Some(Self::ClientLeft),
            Outcome::Failed(Failure::Aborted | Failure::Dropped | Failure::Stopped)
            | Outcome::Refused
            | Outcome::Unavailable => Some(Self::Aborted),
            Outcome::Failed(_) => Some(Self::Failed),
        }
    }

    /// Whether it costs the worker's credit: where the engine was to speak and does not. Clients
    /// leave as they like, and a connection that breaks says nothing of a cache.
    pub(super) fn costs_credit(self) -> bool {
        matches!(self, Self::NoDetails | Self::NotJudged)
    }
}

/// How the news came that explains a lost claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum News {
    /// Over the live connection, in time.
    Live,
    /// Over the live connection, later than a batch takes.
    Late,
    /// By a replay alone: the live connection is dead.
    Replay,
    /// By no event: those are missing.
    None,
}

impl News {
    pub(super) const WORDS: [&'static str; 4] = ["live", "late", "replay", "none"];

    pub(super) fn of(origin: Origin, is_late: bool) -> Self {
        match origin {
            Origin::Live if !is_late => Self::Live,
            Origin::Live => Self::Late,
            Origin::Replay => Self::Replay,
            Origin::None => Self::None,
        }
    }
}

/// Whether numbers say what the engine found in its caches. An engine that ended the request itself
/// need not have looked. Of an answer that was cut short `cached_tokens` may be still to come where
/// they are not there: vLLM 0.32.0 tells them with the last chunk alone (observed).
pub(super) fn is_evidence(outcome: Outcome, usage: &Usage) -> bool {
    match outcome {
        Outcome::Ok => true,
        Outcome::Cancelled | Outcome::Failed(Failure::Cut | Failure::Silent | Failure::Stopped) => {
            matches!(usage.cached_tokens, CachedTokens::Known(_))
        }
        Outcome::Failed(_) | Outcome::Refused | Outcome::Unavailable => false,
    }
}
