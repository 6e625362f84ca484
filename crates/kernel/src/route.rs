//! Which worker a request goes to: the longest proven prefix against load.
//!
//! Pure: overlap and load come as numbers, the seed from the caller. Invariant: a candidate that
//! does not serve is never chosen, equal inputs give equal answers, and more load never attracts.

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
    /// Whether the request's session was there before.
    pub is_bound: bool,
    /// Requests there now.
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
        /// Its session was there before.
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
    let fleet = Fleet::of(candidates)?;
    let serving = || candidates.iter().enumerate().filter(|(_, c)| c.is_serving);
    if fleet.workers == 1 {
        return serving().next().map(|(chosen, _)| Decision { chosen, reason: Reason::Only });
    }
    let fit = || serving().filter(|(_, c)| !fleet.is_overloaded(c.load));
    if let Some((chosen, _)) = fit().find(|(_, c)| c.is_bound) {
        return Some(Decision { chosen, reason: Reason::Session });
    }
    let share = |c: &Candidate| share(request, c, policy);
    let score =
        |c: &Candidate| share(c).0 - i64::from(policy.load_weight) * fleet.relative(c.load) / ONE;
    // Somebody has no more than the mean, so the fit are never none.
    let (chosen, best) = fit().max_by_key(|(index, c)| (score(c), tie(seed, *index)))?;
    let (matched, is_proven) = share(best);
    let longest = serving().map(|(_, c)| share(c).0).max().unwrap_or(0);
    let reason = match (matched, is_proven) {
        _ if matched < longest => Reason::Overload,
        (0, _) => Reason::Load,
        (_, true) => Reason::Prefix,
        (_, false) => Reason::Predicted,
    };
    Some(Decision { chosen, reason })
}

/// The load of all that serve.
struct Fleet {
    workers: u64,
    load: u64,
}

impl Fleet {
    /// `None` where none serves.
    fn of(candidates: &[Candidate]) -> Option<Self> {
        let serving = || candidates.iter().filter(|c| c.is_serving);
        let workers = serving().count() as u64;
        let load = serving().map(|c| u64::from(c.load)).sum();
        (workers > 0).then_some(Self { workers, load })
    }

    /// A load relative to the fleet's mean, with the slack on top: 0 idle, below 1 usual, the
    /// number of workers for one that has everything. Own load raises it, though it is in the mean
    /// too, and others' load lowers it.
    fn relative(&self, load: u32) -> i64 {
        let scaled = u64::from(load) * self.workers * ONE as u64;
        (scaled / (self.load + SLACK * self.workers)) as i64
    }

    /// Whether a worker has so much more to do than the mean that no match is worth the wait.
    fn is_overloaded(&self, load: u32) -> bool {
        u64::from(load) * self.workers > 2 * self.load + SLACK * self.workers
    }
}

/// The matched share of this prompt, weighted by where it lies, and whether all of it is proven.
fn share(request: &Request, candidate: &Candidate, policy: &Policy) -> (i64, bool) {
    let proven = Tier::ALL.iter().map(|t| u64::from(candidate.proven.get(*t))).sum::<u64>();
    let ahead = u64::from(candidate.predicted).saturating_sub(proven);
    let matched = proven + ahead;
    if request.prompt_tokens == 0 || matched < u64::from(policy.match_tokens_min) {
        return (0, true);
    }
    let weigh = |tier: &Tier| u64::from(candidate.proven.get(*tier)) * TIER_WEIGHT.get(*tier);
    let weighted = Tier::ALL.iter().map(weigh).sum::<u64>() + ahead * PREDICTED_WEIGHT;
    let share = weighted / u64::from(request.prompt_tokens);
    (share.min(ONE as u64) as i64, ahead == 0)
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
