//! What may be claimed of a worker's cache for a prompt.
//!
//! Invariant: a claim is what every rank that may get the request provably holds; where a rank is
//! not heard, nothing is claimed, and `cold` is said only where every block is known to be gone.

use std::fmt::Write as _;
use std::sync::Arc;

use fak_index::{Held, HeldReason, Index, Mark, Prompt, RankId};
use fak_kernel::rank::Trust;
use fak_kernel::vocab::PerTier;
use fak_kernel::{Belief, Tier, TierSet};
use http::HeaderValue;

use super::prompt::Source;
use crate::fleet::State;

/// A prompt as an engine's prefix cache sees it.
#[derive(Clone, Debug)]
pub(super) struct CachePrompt {
    pub(super) tokens: Arc<[u32]>,
    /// What they were made of.
    pub(super) source: Source,
    pub(super) lora: Option<Arc<str>>,
    pub(super) salt: Option<Arc<str>>,
}

impl CachePrompt {
    /// As the index asks for it.
    pub(super) fn key(&self) -> Prompt<'_> {
        Prompt { tokens: &self.tokens, lora: self.lora.as_deref(), salt: self.salt.as_deref() }
    }
}

/// Whether a worker's cache is warm for a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kv {
    /// It provably holds a part of it.
    Warm,
    /// It provably holds nothing of it.
    Cold,
    /// Nobody can say.
    Unknown,
}

impl Kv {
    /// The word, as a header has it.
    pub(super) fn header(self) -> HeaderValue {
        HeaderValue::from_static(match self {
            Self::Warm => "warm",
            Self::Cold => "cold",
            Self::Unknown => "unknown",
        })
    }
}

/// A claim, and what it rests on.
#[derive(Clone, Debug)]
pub(super) struct Claim {
    pub(super) kv: Kv,
    /// Tokens by tier; none unless warm.
    pub(super) tokens: PerTier<u32>,
    /// The rank that holds least, and the moment of the claim in its history.
    pub(super) basis: Option<Basis>,
}

/// What a claim rests on, or would.
#[derive(Clone, Copy, Debug)]
pub(super) struct Basis {
    pub(super) rank: RankId,
    pub(super) mark: Mark,
    /// The request goes to no other rank, and what is heard of this one is exact.
    pub(super) is_certain: bool,
    /// Nothing is known of the prompt's first block: the engine may hold it.
    pub(super) may_be_held: bool,
}

impl Claim {
    /// Nothing is said.
    pub(super) const UNKNOWN: Self = Self {
        kv: Kv::Unknown,
        tokens: PerTier { gpu: 0, cpu: 0, disk: 0, remote: 0 },
        basis: None,
    };

    /// Nothing is said, of a claim that did not hold.
    pub(super) fn withdrawn(&self) -> Self {
        Self { basis: self.basis, ..Self::UNKNOWN }
    }

    /// Tokens on all tiers.
    pub(super) fn total(&self) -> u32 {
        Tier::ALL.iter().map(|tier| self.tokens.get(*tier)).sum()
    }

    /// `gpu=512,cpu=1024`: the tiers that hold any; `0` where none does.
    pub(super) fn header(&self) -> HeaderValue {
        if self.total() == 0 {
            return HeaderValue::from_static("0");
        }
        let mut text = String::new();
        for tier in Tier::ALL.iter().filter(|tier| self.tokens.get(**tier) > 0) {
            let comma = if text.is_empty() { "" } else { "," };
            write!(text, "{comma}{tier}={}", self.tokens.get(*tier))
                .expect("writing to a string cannot fail");
        }
        HeaderValue::try_from(text).expect("words and digits are a header value")
    }
}

/// Who asks for a claim.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asker {
    /// The data-parallel rank that the request names.
    pub(super) pinned: Option<u32>,
    /// Nobody else is inside the worker, or was since the request entered: whoever is may have
    /// stored what no event tells yet.
    pub(super) is_alone: bool,
}

/// What may be claimed of a worker for `prompt`; of the rank that the request names alone, where
/// the engine obeys.
pub(super) fn claim(
    index: &Index,
    state: &State,
    prompt: Option<&CachePrompt>,
    asker: Asker,
) -> Claim {
    let claim = claim_of_ranks(index, state, prompt, asker.pinned);
    if claim.kv == Kv::Cold && !asker.is_alone { claim.withdrawn() } else { claim }
}

fn claim_of_ranks(
    index: &Index,
    state: &State,
    prompt: Option<&CachePrompt>,
    pinned: Option<u32>,
) -> Claim {
    let pinned = pinned.filter(|_| state.obeys_rank());
    if pinned.is_none() && !state.hears_all_ranks() {
        return Claim::UNKNOWN;
    }
    let ranks = || state.ranks.iter().filter(|rank| pinned.is_none_or(|n| n == rank.number));
    let count = ranks().count();
    let Some(prompt) = prompt else {
        let is_cold = count > 0 && ranks().all(|rank| is_empty(index, state, rank));
        return Claim { kv: if is_cold { Kv::Cold } else { Kv::Unknown }, ..Claim::UNKNOWN };
    };
    let claims = ranks().map(|rank| {
        let (held, mark) = index.held_and_mark(rank.id, &prompt.key());
        let kv = kv(index, state, rank, &held, prompt);
        let is_exact = rank.trust == Trust::Exact;
        let is_open = matches!(held.reason, HeldReason::Miss | HeldReason::NoBlockSize);
        let basis = Basis {
            rank: rank.id,
            mark,
            is_certain: is_exact && count == 1,
            may_be_held: is_exact && kv == Kv::Unknown && is_open,
        };
        let tokens = tokens(state, &held);
        let claim = Claim { kv, tokens, basis: Some(basis) };
        if kv == Kv::Warm && claim.total() == 0 { claim.withdrawn() } else { claim }
    });
    // Unknown weighs most: the engine may pick that rank.
    claims.min_by_key(|claim| (claim.kv != Kv::Unknown, claim.total())).unwrap_or(Claim::UNKNOWN)
}

/// A claim as it may be told at a later moment: what of it still holds. A block that went and came
/// back since does not count.
pub(super) fn still(
    index: &Index,
    state: &State,
    prompt: Option<&CachePrompt>,
    asker: Asker,
    then: &Claim,
) -> Claim {
    let now = claim(index, state, prompt, asker);
    match (then.kv, prompt, then.basis) {
        (Kv::Cold, ..) if now.kv == Kv::Cold => then.clone(),
        (Kv::Warm, Some(prompt), Some(Basis { rank, mark, .. })) if now.kv == Kv::Warm => {
            let unbroken = tokens(state, &index.held_since(rank, &prompt.key(), mark));
            let tokens = common(then.tokens, unbroken);
            // Of the rank itself what is unbroken is all there is to know: that the engine has
            // meanwhile brought blocks of a tier to the gpu, as the request itself makes it do,
            // takes nothing away. Another rank that holds less now has to hold it too.
            let is_least = now.basis.is_some_and(|basis| basis.rank == rank);
            let tokens = if is_least { tokens } else { common(tokens, now.tokens) };
            let told = Claim { tokens, ..then.clone() };
            if told.total() == 0 { then.withdrawn() } else { told }
        }
        _ => then.withdrawn(),
    }
}

/// What of a rank's blocks its engine uses, in tokens by tier.
fn tokens(state: &State, held: &Held) -> PerTier<u32> {
    if state.speculates() { held.tokens_speculating() } else { held.tokens() }
}

/// What two claims on one prompt have in common. A connector's run begins where the gpu's ends.
fn common(one: PerTier<u32>, other: PerTier<u32>) -> PerTier<u32> {
    let mut tokens = PerTier { gpu: one.gpu.min(other.gpu), ..PerTier::default() };
    if one.gpu == other.gpu {
        for tier in TierSet::CONNECTOR.iter() {
            *tokens.get_mut(tier) = one.get(tier).min(other.get(tier));
        }
    }
    tokens
}

fn kv(
    index: &Index,
    state: &State,
    rank: &crate::fleet::Rank,
    held: &Held,
    prompt: &CachePrompt,
) -> Kv {
    match held.reason {
        HeldReason::Warm => Kv::Warm,
        HeldReason::BelowBlockSize if rank.trust == Trust::Exact => Kv::Cold,
        HeldReason::Miss if rank.trust == Trust::Exact => {
            let size = held.block_size;
            let first = &prompt.tokens[..(size as usize).min(prompt.tokens.len())];
            let key = index.chain(&Prompt { tokens: first, ..prompt.key() }, size).first().copied();
            let is_gone =
                |tier| key.is_some_and(|key| index.belief(rank.id, tier, key) == Belief::Gone);
            if state.tiers().iter().all(is_gone) { Kv::Cold } else { Kv::Unknown }
        }
        HeldReason::NoBlockSize if is_empty(index, state, rank) => Kv::Cold,
        _ => Kv::Unknown,
    }
}

/// Whether a rank is known to hold nothing at all.
fn is_empty(index: &Index, state: &State, rank: &crate::fleet::Rank) -> bool {
    let is_gone = |tier| {
        // Of a rank without blocks one key is as good as another.
        let key = index.chain(&Prompt { tokens: &[0], lora: None, salt: None }, 1)[0];
        index.belief(rank.id, tier, key) == Belief::Gone
    };
    rank.trust == Trust::Exact && !index.has_blocks(rank.id) && state.tiers().iter().all(is_gone)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_claims_have_the_run_in_common() {
        let of = |gpu, cpu| PerTier { gpu, cpu, ..PerTier::default() };
        assert_eq!(common(of(96, 64), of(96, 32)), of(96, 32));
        assert_eq!(common(of(96, 64), of(64, 96)), of(64, 0), "the cpu's run begins elsewhere");
        assert_eq!(common(of(96, 64), of(0, 160)), of(0, 0));
    }

    #[test]
    fn the_header_names_the_tiers_that_hold_any() {
        let claim = |gpu, cpu| Claim {
            tokens: PerTier { gpu, cpu, ..PerTier::default() },
            ..Claim::UNKNOWN
        };
        assert_eq!(claim(0, 0).header(), "0");
        assert_eq!(claim(512, 0).header(), "gpu=512");
        assert_eq!(claim(512, 1024).header(), "gpu=512,cpu=1024");
    }
}
