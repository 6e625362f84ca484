//! What may be claimed of a worker's cache for a prompt.
//!
//! Invariant: a claim is what every rank that may get the request provably holds; where a rank is
//! not heard, nothing is claimed, and `cold` is said only where every block is known to be gone, on
//! every rank that may get the request.

use std::fmt::Write as _;
use std::sync::Arc;

use fak_index::{Held, HeldReason, Index, Mark, Prompt, RankId};
use fak_kernel::rank::Trust;
use fak_kernel::vocab::PerTier;
use fak_kernel::{Belief, Tier, TierSet};
use http::HeaderValue;

use super::prompt::Source;
use crate::fleet::{Rank, State};

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
    /// Neither is proven.
    Unknown(NoClaim),
}

/// Why nothing is claimed of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoClaim {
    /// The prompts of its route are not matched.
    Route,
    /// The prompt's tokens are not known: `/tokenize` does not give them, or is not given all that
    /// the engine makes them of.
    NotMatchable,
    /// The engine computes the whole prompt, whatever its caches hold.
    SkipsCache,
    /// The engine answers it by requests of its own.
    BeamSearch,
    /// The prompt has content that is not text.
    Content,
    /// It is not known which adapter computes the prompt.
    Adapter,
    /// The model cards do not show whether the model is the base.
    Model,
    /// The engine counted this prompt, or prompts of its kind, otherwise.
    Miscounted,
    /// The engine contradicted a claim for a prompt of its kind lately.
    Contradicted,
    /// A rank that may get the request is not followed by its events.
    Unheard,
    /// What the rank holds is being found out: its beliefs are set aside.
    Suspended,
    /// The rank's events do not show what its blocks are.
    Layout,
    /// Nothing is known of the prompt's first block.
    Miss,
    /// The ranks that may get the request hold different parts of the prompt.
    RanksDiffer,
    /// Nothing would be held, but others are inside the worker, or were lately, and may have stored
    /// it; or something was stored before the answer began, by the request itself or by others.
    NotAlone,
    /// The worker's claims were not borne out lately.
    Withheld,
    /// What was held when the request was sent had gone when the answer began.
    Lost,
    /// The answer's head went to the client before the engine began.
    NotBegun,
    /// The answer is an error, or ended before its head went to the client.
    Failed,
}

impl NoClaim {
    pub(super) const ALL: [Self; 19] = [
        Self::Route,
        Self::NotMatchable,
        Self::SkipsCache,
        Self::BeamSearch,
        Self::Content,
        Self::Adapter,
        Self::Model,
        Self::Miscounted,
        Self::Contradicted,
        Self::Unheard,
        Self::Suspended,
        Self::Layout,
        Self::Miss,
        Self::RanksDiffer,
        Self::NotAlone,
        Self::Withheld,
        Self::Lost,
        Self::NotBegun,
        Self::Failed,
    ];

    /// The word, as the header and the metric have it.
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Route => "route",
            Self::NotMatchable => "not_matchable",
            Self::SkipsCache => "skips_cache",
            Self::BeamSearch => "beam_search",
            Self::Content => "content",
            Self::Adapter => "adapter",
            Self::Model => "model",
            Self::Miscounted => "miscounted",
            Self::Contradicted => "contradicted",
            Self::Unheard => "unheard",
            Self::Suspended => "suspended",
            Self::Layout => "layout",
            Self::Miss => "miss",
            Self::RanksDiffer => "ranks_differ",
            Self::NotAlone => "not_alone",
            Self::Withheld => "withheld",
            Self::Lost => "lost",
            Self::NotBegun => "not_begun",
            Self::Failed => "failed",
        }
    }
}

impl Kv {
    /// The word, as a header has it.
    pub(super) fn header(self) -> HeaderValue {
        HeaderValue::from_static(match self {
            Self::Warm => "warm",
            Self::Cold => "cold",
            Self::Unknown(_) => "unknown",
        })
    }

    /// Why nothing is claimed, where nothing is.
    pub(super) fn no_claim(self) -> Option<NoClaim> {
        match self {
            Self::Warm | Self::Cold => None,
            Self::Unknown(why) => Some(why),
        }
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
    /// Every rank that may get the request, and the moment in its history, where none holds any of
    /// the prompt.
    pub(super) cold_since: Vec<(RankId, Mark)>,
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
    /// Nothing is claimed.
    pub(super) fn none(why: NoClaim) -> Self {
        Self {
            kv: Kv::Unknown(why),
            tokens: PerTier::default(),
            basis: None,
            cold_since: Vec::new(),
        }
    }

    /// Nothing is claimed, though it was to be.
    pub(super) fn withdrawn(&self, why: NoClaim) -> Self {
        Self { basis: self.basis, ..Self::none(self.kv.no_claim().unwrap_or(why)) }
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
    /// Nobody else is inside the worker, or left it within the time that events may take: whoever
    /// is or did may have stored what no event tells yet.
    pub(super) is_alone: bool,
}

/// What may be claimed of a worker for a prompt, or why it has none that could be matched; of the
/// rank that the request names alone, where the engine obeys.
pub(super) fn claim(
    index: &Index,
    state: &State,
    prompt: Result<&CachePrompt, NoClaim>,
    asker: Asker,
) -> Claim {
    let claim = claim_of_ranks(index, state, prompt, asker.pinned);
    if claim.kv == Kv::Cold && !asker.is_alone { claim.withdrawn(NoClaim::NotAlone) } else { claim }
}

fn claim_of_ranks(
    index: &Index,
    state: &State,
    prompt: Result<&CachePrompt, NoClaim>,
    pinned: Option<u32>,
) -> Claim {
    let pinned = pinned.filter(|_| state.obeys_rank());
    if pinned.is_none() && !state.hears_all_ranks() {
        return Claim::none(NoClaim::Unheard);
    }
    let ranks = state.ranks.iter().filter(|rank| pinned.is_none_or(|n| n == rank.number));
    let ranks: Vec<_> = ranks.collect();
    let of_rank = |rank: &&Rank| claim_of_rank(index, state, rank, prompt, ranks.len() == 1);
    let claims: Vec<_> = ranks.iter().map(of_rank).collect();
    let cold_since = claims.iter().flat_map(|claim| claim.cold_since.iter().copied()).collect();
    let are_cold = claims.iter().all(|claim| claim.kv == Kv::Cold);
    // Unknown weighs most: the engine may pick that rank.
    let least =
        claims.into_iter().min_by_key(|claim| (claim.kv.no_claim().is_none(), claim.total()));
    match least {
        None => Claim::none(NoClaim::Unheard),
        Some(claim) if are_cold => Claim { cold_since, ..claim },
        Some(claim) if claim.kv == Kv::Cold => claim.withdrawn(NoClaim::RanksDiffer),
        Some(claim) => claim,
    }
}

fn claim_of_rank(
    index: &Index,
    state: &State,
    rank: &Rank,
    prompt: Result<&CachePrompt, NoClaim>,
    is_only: bool,
) -> Claim {
    let prompt = match prompt {
        Ok(prompt) => prompt,
        Err(why) => return claim_of_any(index, state, rank, why),
    };
    let (held, mark) = index.held_and_mark(rank.id, &prompt.key());
    let kv = kv(index, state, rank, &held, prompt);
    let is_exact = rank.trust == Trust::Exact;
    let is_open = matches!(held.reason, HeldReason::Miss | HeldReason::NoBlockSize);
    let basis = Basis {
        rank: rank.id,
        mark,
        is_certain: is_exact && is_only,
        may_be_held: is_exact && kv.no_claim().is_some() && is_open,
    };
    let cold_since = if kv == Kv::Cold { vec![(rank.id, mark)] } else { Vec::new() };
    let claim = Claim { kv, tokens: tokens(state, &held), basis: Some(basis), cold_since };
    if kv == Kv::Warm && claim.total() == 0 { claim.withdrawn(NoClaim::Miss) } else { claim }
}

/// What may be claimed of a rank for a prompt that is not matched.
fn claim_of_any(index: &Index, state: &State, rank: &Rank, why: NoClaim) -> Claim {
    let mark = index.held_and_mark(rank.id, &ANY).1;
    if !is_empty(index, state, rank) {
        return Claim::none(why);
    }
    Claim { kv: Kv::Cold, cold_since: vec![(rank.id, mark)], ..Claim::none(why) }
}

/// Of a rank without blocks one prompt is as good as another.
const ANY: Prompt<'static> = Prompt { tokens: &[0], lora: None, salt: None };

/// A claim as it may be told at a later moment: what of it still holds. A block that went and came
/// back since does not count.
pub(super) fn still(
    index: &Index,
    state: &State,
    prompt: Result<&CachePrompt, NoClaim>,
    asker: Asker,
    then: &Claim,
) -> Claim {
    let now = claim(index, state, prompt, asker);
    match (then.kv, prompt, then.basis) {
        (Kv::Cold, ..) if now.kv == Kv::Cold => then.clone(),
        // What came since is the request's own, or of a client that does not come through here.
        (Kv::Cold, ..) if has_only_grown(index, state, then) => then.withdrawn(NoClaim::NotAlone),
        (Kv::Cold, ..) => then.withdrawn(now.kv.no_claim().unwrap_or(NoClaim::Lost)),
        (Kv::Warm, Ok(prompt), Some(Basis { rank, mark, .. })) if now.kv == Kv::Warm => {
            let unbroken = tokens(state, &index.held_since(rank, &prompt.key(), mark));
            let tokens = common(then.tokens, unbroken);
            // Of the rank itself what is unbroken is all there is to know: that the engine has
            // meanwhile brought blocks of a tier to the gpu, as the request itself makes it do,
            // takes nothing away. Another rank that holds less now has to hold it too.
            let is_least = now.basis.is_some_and(|basis| basis.rank == rank);
            let tokens = if is_least { tokens } else { common(tokens, now.tokens) };
            let told = Claim { tokens, ..then.clone() };
            if told.total() == 0 { then.withdrawn(NoClaim::Lost) } else { told }
        }
        _ => then.withdrawn(NoClaim::Lost),
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

fn kv(index: &Index, state: &State, rank: &Rank, held: &Held, prompt: &CachePrompt) -> Kv {
    let is_exact = rank.trust == Trust::Exact;
    match held.reason {
        HeldReason::Warm => Kv::Warm,
        HeldReason::BelowBlockSize if is_exact => Kv::Cold,
        HeldReason::Miss if is_exact => {
            let size = held.block_size;
            let first = &prompt.tokens[..(size as usize).min(prompt.tokens.len())];
            let key = index.chain(&Prompt { tokens: first, ..prompt.key() }, size).first().copied();
            let is_gone =
                |tier| key.is_some_and(|key| index.belief(rank.id, tier, key) == Belief::Gone);
            if state.tiers().iter().all(is_gone) { Kv::Cold } else { Kv::Unknown(NoClaim::Miss) }
        }
        HeldReason::NoBlockSize if is_empty(index, state, rank) => Kv::Cold,
        HeldReason::Miss | HeldReason::BelowBlockSize | HeldReason::NoBlockSize => {
            Kv::Unknown(NoClaim::Miss)
        }
        HeldReason::Suspended | HeldReason::SetAside => Kv::Unknown(NoClaim::Suspended),
        HeldReason::NoRank => Kv::Unknown(NoClaim::Unheard),
        HeldReason::BlockSizeChanged
        | HeldReason::GroupsDiffer
        | HeldReason::TooManyGroups
        | HeldReason::ExtraNotReported => Kv::Unknown(NoClaim::Layout),
    }
}

/// Whether a rank is known to hold nothing at all.
fn is_empty(index: &Index, state: &State, rank: &Rank) -> bool {
    !index.has_blocks(rank.id) && holds_nothing_else(index, state, rank)
}

/// Whether a rank is known to hold nothing but what was announced.
fn holds_nothing_else(index: &Index, state: &State, rank: &Rank) -> bool {
    let is_gone = |tier| index.belief(rank.id, tier, index.chain(&ANY, 1)[0]) == Belief::Gone;
    rank.trust == Trust::Exact && state.tiers().iter().all(is_gone)
}

/// Whether no more has become of ranks that held nothing of a prompt than that they stored.
fn has_only_grown(index: &Index, state: &State, then: &Claim) -> bool {
    then.cold_since.iter().all(|(id, _)| {
        let rank = state.ranks.iter().find(|rank| rank.id == *id);
        rank.is_some_and(|rank| holds_nothing_else(index, state, rank))
    })
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
            ..Claim::none(NoClaim::Miss)
        };
        assert_eq!(claim(0, 0).header(), "0");
        assert_eq!(claim(512, 0).header(), "gpu=512");
        assert_eq!(claim(512, 1024).header(), "gpu=512,cpu=1024");
    }
}
