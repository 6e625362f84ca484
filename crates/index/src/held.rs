//! What of a prompt a rank holds.
//!
//! Invariant: an unbroken run from the prompt's first block in every group, and never the block
//! with the last token.

use std::fmt;

use fak_kernel::Tier;
use fak_kernel::vocab::PerTier;

use crate::key::Key;
use crate::layout::Need;
use crate::rank::Rank;
use crate::slot::Presence;

/// What of a prompt a rank provably holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    /// Blocks in prompt order: the gpu run from block 0, then the run of at most one connector tier
    /// that goes on where the gpu's ends.
    pub blocks: PerTier<u32>,
    /// Blocks behind those that a connector's tier may hold: its removals are not announced, or the
    /// size of its chunks is not known, or how much of the gpu's is there decides about its last
    /// chunk. No claim, but worth a request.
    pub estimated: u32,
    /// Tokens in a block; 0 where nobody knows.
    pub block_size: u32,
    /// Why it is so.
    pub reason: HeldReason,
}

/// Why a rank holds what it holds of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum HeldReason {
    /// It holds the first block at least.
    Warm,
    /// It does not hold the first block.
    Miss,
    /// The prompt has no whole block before its last token.
    BelowBlockSize,
    /// Its beliefs are suspended.
    Suspended,
    /// A miss, but what a tier holds is set aside for now.
    SetAside,
    /// No store has told the block size.
    NoBlockSize,
    /// A group's block size changed, and not every tier was demoted since.
    BlockSizeChanged,
    /// Its groups have different block sizes.
    GroupsDiffer,
    /// It announced more groups than the index keeps.
    TooManyGroups,
    /// A miss, but its events do not show extra keys, so that its blocks could not be told apart.
    ExtraNotReported,
    /// There is no such rank, or no longer.
    NoRank,
}

impl HeldReason {
    /// The word, for logs, metrics and answers.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Warm => "warm",
            Self::Miss => "miss",
            Self::BelowBlockSize => "below_block_size",
            Self::Suspended => "suspended",
            Self::SetAside => "set_aside",
            Self::NoBlockSize => "no_block_size",
            Self::BlockSizeChanged => "block_size_changed",
            Self::GroupsDiffer => "groups_differ",
            Self::TooManyGroups => "too_many_groups",
            Self::ExtraNotReported => "extra_not_reported",
            Self::NoRank => "no_rank",
        }
    }
}

impl fmt::Display for HeldReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl Held {
    /// Nothing held, for a reason.
    pub(crate) fn nothing(reason: HeldReason, block_size: u32) -> Self {
        Self { blocks: PerTier::default(), estimated: 0, block_size, reason }
    }

    /// The claim in tokens, by tier.
    #[must_use]
    pub fn tokens(&self) -> PerTier<u32> {
        let mut tokens = PerTier::default();
        for tier in Tier::ALL {
            *tokens.get_mut(*tier) = self.blocks.get(*tier).saturating_mul(self.block_size);
        }
        tokens
    }

    /// What may be there beyond the claim, in tokens: for routing alone.
    #[must_use]
    pub fn estimated_tokens(&self) -> u32 {
        self.estimated.saturating_mul(self.block_size)
    }

    /// The claim in tokens on an engine that may decode speculatively. With a draft model that
    /// reads the model's own states (EAGLE, MTP) vLLM computes the last block of a hit anew
    /// (0.32.0, source), and a connector need not go on from there. Nobody tells which kind it is.
    #[must_use]
    pub fn tokens_speculating(&self) -> PerTier<u32> {
        let gpu = self.tokens().gpu.saturating_sub(self.block_size);
        PerTier { gpu, ..PerTier::default() }
    }

    /// The claim in blocks, over all tiers.
    #[must_use]
    pub fn blocks_total(&self) -> u32 {
        Tier::ALL.iter().map(|tier| self.blocks.get(*tier)).sum()
    }
}

/// Which blocks count.
#[derive(Clone, Copy)]
struct Counted {
    /// Those that are there at least so.
    least: Presence,
    /// Those that are there since a change no later than this.
    born_by: u64,
}

/// Blocks of a prompt that vLLM can take from a cache: whole ones before its last token, which it
/// always computes.
pub(crate) fn usable_blocks(tokens: usize, block_size: u32) -> usize {
    tokens.saturating_sub(1).checked_div(block_size as usize).unwrap_or(0)
}

impl Rank {
    /// Why the rank holds nothing of any prompt, or its block size.
    pub(crate) fn readable(&self) -> Result<u32, Held> {
        let (block_size, counts) = (self.layout.block_size(), self.counts());
        let reason = if !counts {
            HeldReason::Suspended
        } else if let Some(fault) = self.layout.fault() {
            fault
        } else {
            HeldReason::NoBlockSize
        };
        match block_size {
            Some(size) if counts && self.layout.fault().is_none() => Ok(size),
            size => Err(Held::nothing(reason, size.unwrap_or(0))),
        }
    }

    /// What the rank holds of a prompt whose usable blocks have `keys`, since a change no later
    /// than `born_by`.
    pub(crate) fn held(&self, keys: &[Key], block_size: u32, born_by: u64) -> Held {
        if keys.is_empty() {
            return Held::nothing(HeldReason::BelowBlockSize, block_size);
        }
        let whole = Counted { least: Presence::Whole, born_by };
        let gpu = self.run(Tier::Gpu, keys, 0, block_size, whole);
        let mut held = Held::nothing(HeldReason::Miss, block_size);
        held.blocks.gpu = saturate(gpu);
        if let Some((proven, estimated, tier)) = self.connector_run(keys, gpu, block_size, born_by)
        {
            *held.blocks.get_mut(tier) = saturate(proven);
            held.estimated = saturate(estimated);
        }
        if held.blocks_total() > 0 {
            held.reason = HeldReason::Warm;
        } else if Tier::ALL.iter().any(|tier| self.slot(*tier).is_aside) {
            held.reason = HeldReason::SetAside;
        } else if self.is_unreported {
            held.reason = HeldReason::ExtraNotReported;
        }
        held
    }

    /// The connector's run behind the gpu's, in blocks: proven, estimated, and where. vLLM asks one
    /// connector, and of several the first that has anything (multi connector, source); nobody
    /// tells which is first, so the shortest run is what is proven.
    fn connector_run(
        &self,
        keys: &[Key],
        gpu: usize,
        block_size: u32,
        born_by: u64,
    ) -> Option<(usize, usize, Tier)> {
        let run = |tier| {
            let counted = |least| Counted { least, born_by };
            let is_estimated = self.options.offload.estimated.has(tier);
            let (proven, any) = match self.chunk_blocks(tier) {
                Some(chunk) if chunk > 1 => {
                    let end = self.run_of_chunks(tier, keys, gpu, chunk, born_by);
                    ((end + 1).saturating_sub(chunk).max(gpu), end)
                }
                _ => (
                    self.run(tier, keys, gpu, block_size, counted(Presence::Whole)),
                    self.run(tier, keys, gpu, block_size, counted(Presence::Loose)),
                ),
            };
            let proven = if is_estimated { gpu } else { proven };
            (any > gpu).then_some((proven - gpu, any - proven, tier))
        };
        [Tier::Cpu, Tier::Disk, Tier::Remote].into_iter().filter_map(run).min()
    }

    /// Where the run of whole chunks ends that goes on in the chunk which holds block `start`; at
    /// least `start`. vLLM looks a chunk up by its last block, from the chunk in which the gpu's
    /// run ends, and loads nothing where less than a chunk would be left to load (0.32.0,
    /// `_lookup_complete_chunks`, read). So of a run that ends at block e the engine uses at least
    /// the first e + 1 - chunk blocks, whatever the gpu holds beyond what is known: what a request
    /// in flight has just stored there can cost the last chunk.
    fn run_of_chunks(
        &self,
        tier: Tier,
        keys: &[Key],
        start: usize,
        chunk: usize,
        born_by: u64,
    ) -> usize {
        // Of several groups each rounds the others' run to its own chunks: too much to foretell.
        let mut groups = self.layout.announced();
        let (Some((id, group)), None) = (groups.next(), groups.next()) else { return start };
        if group.need != Need::Whole || self.slot(tier).is_aside {
            return start;
        }
        let is_there =
            |last: &usize| self.presence(tier, id, keys[*last], born_by) == Some(Presence::Whole);
        let first = start - start % chunk + chunk - 1;
        let chunks = (first..keys.len()).step_by(chunk).take_while(is_there).count();
        (start - start % chunk + chunks * chunk).max(start)
    }

    /// The longest usable prefix in blocks, at least `start`, whose blocks from `start` on are on
    /// `tier`; those before are usable already.
    fn run(
        &self,
        tier: Tier,
        keys: &[Key],
        start: usize,
        block_size: u32,
        counted: Counted,
    ) -> usize {
        if self.slot(tier).is_aside {
            return start;
        }
        let holds = |group: u32, key: &Key| {
            self.presence(tier, group, *key, counted.born_by) >= Some(counted.least)
        };
        let mut groups: Vec<_> = self
            .layout
            .announced()
            .map(|(id, group)| (id, width(group.need, block_size), start))
            .collect();
        let mut longest = start;
        for (i, key) in keys.iter().enumerate().skip(start) {
            let mut is_usable = true;
            let mut is_over = false;
            for (id, width, streak) in &mut groups {
                *streak = if holds(*id, key) { *streak + 1 } else { 0 };
                match width {
                    None => is_over |= *streak == 0,
                    Some(width) => is_usable &= *streak >= (*width).min(i + 1),
                }
            }
            if is_over {
                break;
            }
            if is_usable {
                longest = i + 1;
            }
        }
        longest
    }
}

/// Blocks that a group must hold at the end of a prefix; `None` for all of them.
fn width(need: Need, block_size: u32) -> Option<usize> {
    match need {
        Need::Whole => None,
        Need::Window(tokens) => Some(tokens.div_ceil(block_size.max(1)) as usize),
    }
}

fn saturate(blocks: usize) -> u32 {
    u32::try_from(blocks).unwrap_or(u32::MAX)
}
