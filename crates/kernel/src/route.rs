//! Which worker a request goes to: the longest proven prefix against load.
//!
//! Pure: overlap and load come as numbers, the seed from the caller. Invariant: a candidate that
//! does not serve is never chosen, nor one that fails where another does not; equal inputs give
//! equal answers, and more load never attracts.

mod breaker;

pub use breaker::{Breaker, Fitness};

use crate::vocab::{PerTier, Tier, vocabulary};

/// One in fixed point: shares, relative loads and weights are in 1/1024.
const ONE: i64 = 1024;

/// What a matched token is worth by where it lies: a connector's tier has to be read back first.
const TIER_WEIGHT: PerTier<u64> = PerTier { gpu: 1024, cpu: 768, disk: 384, remote: 384 };

/// What a predicted token is worth: the request that brings it may yet fail.
const PREDICTED_WEIGHT: u64 = 896;

/// Requests on each worker that are no load yet: so many run side by side without slowing each
/// other.
const SLACK: u64 = 4;

/// Matched tokens that count in full. Fewer count less, however large a part of their prompt they
/// are: to compute 400 tokens takes a fraction of the time that three requests ahead do.
const WHOLE_MATCH: u64 = 2048;

/// What the match of a whole prompt is worth at least: one request more is no reason to leave it.
const WHOLE_WORTH_MIN: u64 = ONE as u64 / 4;

/// What a session's own worker is worth at least, where its prompt is short or its length is not
/// known: half a prompt's match.
const SESSION_WORTH_MIN: i64 = ONE / 2;

/// For how long a worker's own count of its requests is as good as new, in milliseconds: each time
/// it has passed again, half of what is left counts.
const COUNT_HALVES_MS: u64 = 8_000;

/// A request, as far as routing depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Its prompt's length in tokens; 0 where nobody knows, and then nothing matches.
    pub prompt_tokens: u32,
}

/// A worker that might take the request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Candidate {
    /// Whether it serves, and serves the model.
    pub is_serving: bool,
    /// Whether it fails: it is chosen only where every other one that serves does, too.
    pub is_failing: bool,
    /// Whether the request's session was there before.
    pub is_bound: bool,
    /// Requests there now, whoever sent them: see [`foreign`].
    pub load: u32,
    /// Tokens of the prompt that it provably holds, by tier.
    pub proven: PerTier<u32>,
    /// Tokens of the prompt that requests which are there now will leave. Never a claim.
    pub predicted: u32,
}

/// How routing weighs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// How much load counts against a match, in 1/1024. At 1024 a worker with the fleet's mean load
    /// on top of its own fair share gives up a whole prompt's match; 0 ignores load, more spreads
    /// more.
    pub load_weight: u32,
    /// A shorter match, in tokens, is none: computing so few costs less than a queue.
    pub match_tokens_min: u32,
}

impl Default for Policy {
    fn default() -> Self {
        Self { load_weight: 1024, match_tokens_min: 64 }
    }
}

vocabulary! {
    /// Why a worker was chosen.
    Reason {
        /// No other could take it.
        Only = "only",
        /// Its session was there before, load considered.
        Session = "session",
        /// It provably holds most of the prompt, load considered.
        Prefix = "prefix",
        /// Requests that are there now will leave most of the prompt, load considered.
        Predicted = "predicted",
        /// Another holds more, but has too much to do.
        Overload = "overload",
        /// No match worth the name: it has least to do.
        Load = "load",
    }
}

/// A choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decision {
    /// Index of the candidate.
    pub chosen: usize,
    /// Why it.
    pub reason: Reason,
}

/// Chooses one of `candidates`; `None` where none serves. `seed` settles ties, so that several
/// gateways, or several requests of one instant, do not all settle them alike.
#[must_use]
pub fn route(
    request: &Request,
    candidates: &[Candidate],
    policy: &Policy,
    seed: u64,
) -> Option<Decision> {
    let serves = |c: &&Candidate| c.is_serving;
    // Never none for failing alone: a request that fails everywhere would take all of them out.
    let is_any_sound = candidates.iter().filter(serves).any(|c| !c.is_failing);
    let can = |c: &Candidate| c.is_serving && !(is_any_sound && c.is_failing);
    let able = || candidates.iter().enumerate().filter(|(_, c)| can(c));
    let fleet = Fleet::of(able().map(|(_, c)| c));
    if fleet.workers == 1 {
        return able().next().map(|(chosen, _)| Decision { chosen, reason: Reason::Only });
    }
    let fit = || able().filter(|(_, c)| !fleet.is_overloaded(c.load));
    let worth = |c: &Candidate| {
        let (matched, is_proven) = share(request, c, policy);
        (if c.is_bound { matched.max(session_worth(request)) } else { matched }, is_proven)
    };
    let score =
        |c: &Candidate| worth(c).0 - i64::from(policy.load_weight) * fleet.relative(c.load) / ONE;
    // One of them has no more than the mean of the others, so none is fit only where none can.
    let (chosen, best) = fit().max_by_key(|(index, c)| (score(c), tie(seed, *index)))?;
    let (matched, is_proven) = worth(best);
    let longest = able().map(|(_, c)| worth(c).0).max().unwrap_or(0);
    let reason = match (matched, is_proven) {
        _ if best.is_bound => Reason::Session,
        _ if matched < longest => Reason::Overload,
        (0, _) => Reason::Load,
        (_, true) => Reason::Prefix,
        (_, false) => Reason::Predicted,
    };
    Some(Decision { chosen, reason })
}

/// Requests of others on a worker: those that its own metrics count, `told`, without the `own` that
/// this gateway had there when they were read, `age_ms` ago. What is old counts for less and less,
/// since nothing says that it is still so.
#[must_use]
pub fn foreign(told: u32, own: u32, age_ms: u64) -> u32 {
    let halvings = u32::try_from(age_ms / COUNT_HALVES_MS).unwrap_or(u32::MAX);
    told.saturating_sub(own).checked_shr(halvings).unwrap_or(0)
}

/// The load of all that can take the request.
struct Fleet {
    workers: u64,
    load: u64,
}

impl Fleet {
    fn of<'a>(able: impl Iterator<Item = &'a Candidate>) -> Self {
        let (workers, load) =
            able.fold((0, 0), |(workers, load), c| (workers + 1, load + u64::from(c.load)));
        Self { workers, load }
    }

    /// A load relative to the fleet's mean, with the slack on top: 0 idle, below 1 usual, the
    /// number of workers for one that has everything. Own load raises it, though it is in the mean
    /// too, and others' load lowers it.
    fn relative(&self, load: u32) -> i64 {
        let scaled = u64::from(load) * self.workers * ONE as u64;
        (scaled / (self.load + SLACK * self.workers)) as i64
    }

    /// Whether a worker has so much more to do than the others in the mean, half as much again and
    /// the slack, that no match is worth the wait. Its own load is not in that mean, or none of two
    /// could ever have too much.
    fn is_overloaded(&self, load: u32) -> bool {
        let (load, others) = (u64::from(load), self.workers - 1);
        2 * load * others > 3 * (self.load - load) + 2 * SLACK * others
    }
}

/// The matched share of this prompt, weighted by where it lies and by how much it is, and whether
/// all of it is proven.
fn share(request: &Request, candidate: &Candidate, policy: &Policy) -> (i64, bool) {
    let proven = Tier::ALL.iter().map(|t| u64::from(candidate.proven.get(*t))).sum::<u64>();
    let ahead = u64::from(candidate.predicted).saturating_sub(proven);
    let matched = proven + ahead;
    if request.prompt_tokens == 0 || matched < u64::from(policy.match_tokens_min) {
        return (0, true);
    }
    let weigh = |tier: &Tier| u64::from(candidate.proven.get(*tier)) * TIER_WEIGHT.get(*tier);
    let weighted = Tier::ALL.iter().map(weigh).sum::<u64>() + ahead * PREDICTED_WEIGHT;
    let worth = (weighted / WHOLE_MATCH).max(WHOLE_WORTH_MIN).min(ONE as u64);
    let share = weighted / u64::from(request.prompt_tokens);
    (share.min(worth) as i64, ahead == 0)
}

/// What a session's own worker is worth: as if it held the whole prompt, which its earlier turns
/// have left there.
fn session_worth(request: &Request) -> i64 {
    let share = u64::from(request.prompt_tokens) * ONE as u64 / WHOLE_MATCH;
    (share.min(ONE as u64) as i64).max(SESSION_WORTH_MIN)
}

/// Settles a tie: another order of the candidates for each seed (SplitMix64's finish).
fn tie(seed: u64, index: usize) -> u64 {
    let mut x = seed ^ (index as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests;
