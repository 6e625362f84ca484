//! Did an engine that was told to clear its cache clear it?
//!
//! vLLM publishes `AllBlocksCleared` with its next step (0.32.0, observed), so after the call each
//! rank gets a prompt of fak's own: by the store of that prompt the clear has come, or never will.
//! What it costs: a prompt of a block and one token of output a rank, and a wait for both.
//! Invariant: nothing is concluded of a rank whose stream was not exact before the call, broke off
//! since, or whose engine did not answer; and nothing from silence but that it is silent.

use std::time::Duration;

use fak_kernel::rank::Trust;
use fak_kernel::witness::Clear;
use futures_util::future::join_all;
use tokio::time::timeout;

use super::marker;
use super::owner::Owner;
use crate::events::fold::Tally;
use crate::events::stream::{Handle, Status};

/// Tokens by which the store is recognised, where a block has so many: 180 random bits.
const SHOWN_TOKENS: u32 = 16;
/// Time for the answer to the prompt, and then for its store.
const WITHIN: Duration = Duration::from_secs(5);

/// What the streams showed before a call, by rank.
pub(super) type Before = Vec<Tally>;

/// What one rank's stream showed of the clear.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shown {
    Clear(bool),
    /// The prompt was answered, and its store did not come in time.
    Silence,
    /// It could not show anything.
    Nothing,
}

/// What all of them showed.
#[derive(Clone, Debug, Default)]
pub(super) struct Proof {
    /// For the verdict.
    pub(super) clear: Option<Clear>,
    /// By rank, whether it cleared, where that was seen.
    by_rank: Vec<Option<bool>>,
}

impl Proof {
    fn of(shown: &[Shown]) -> Self {
        let by_rank: Vec<_> = shown
            .iter()
            .map(|shown| match shown {
                Shown::Clear(has_cleared) => Some(*has_cleared),
                Shown::Silence | Shown::Nothing => None,
            })
            .collect();
        let count = |wanted: bool| by_rank.iter().filter(|found| **found == Some(wanted)).count();
        let clear = if shown.is_empty() || shown.contains(&Shown::Nothing) {
            None
        } else if shown.contains(&Shown::Silence) {
            Some(Clear::Untold)
        } else if count(true) == shown.len() {
            Some(Clear::Seen)
        } else if count(false) == shown.len() {
            Some(Clear::Missing)
        } else {
            Some(Clear::Partly)
        };
        Self { clear, by_rank }
    }

    /// Whether the rank at that place cleared its cache, where that was seen.
    pub(super) fn of_rank(&self, place: usize) -> Option<bool> {
        self.by_rank.get(place).copied().flatten()
    }
}

impl Owner {
    /// Waits, for a while, until every stream that is connected is exact.
    pub(super) async fn exact(&self) {
        let is_over = |status: &Status| status.trust != Trust::Degraded;
        let exact = join_all(self.ranks.iter().map(|rank| rank.wait_for(is_over)));
        if timeout(self.config.settle_within, exact).await.is_err() {
            tracing::warn!(worker = %self.worker.id, "a clear cannot be seen on its event streams");
        }
    }

    /// What the streams show now; none where one of them could not show a clear later.
    pub(super) fn before_clear(&self) -> Option<Before> {
        let is_aimed = self.ranks.len() == 1 || self.state.obeys_rank();
        let is_heard = self.state.hears_all_ranks() && !self.recovery.is_pending();
        let statuses: Vec<_> = self.ranks.iter().map(Handle::status).collect();
        let is_exact = !statuses.is_empty() && statuses.iter().all(|s| s.trust == Trust::Exact);
        let is_able = is_aimed && is_heard && is_exact && self.marker_target().is_some();
        is_able.then(|| statuses.iter().map(|status| status.tally).collect())
    }

    /// What the streams of an engine that serves have shown of a clear since `before`.
    pub(super) async fn clear_since(&self, before: &[Tally]) -> Proof {
        let Some(target) = self.marker_target() else { return Proof::default() };
        let ranks = self.ranks.iter().zip(before);
        let shown = join_all(ranks.map(|(rank, before)| shown(target, rank, *before))).await;
        Proof::of(&shown)
    }
}

async fn shown(target: marker::Target<'_>, rank: &Handle, before: Tally) -> Shown {
    let request = marker::Request::new(target.block_size);
    let tokens = target.block_size.map_or(SHOWN_TOKENS, |size| size.min(SHOWN_TOKENS));
    let tokens = request.prompt.iter().copied().take(tokens as usize).collect();
    if rank.watch(tokens).await.is_err() {
        return Shown::Nothing;
    }
    if !marker::post_within(target, rank, &request, WITHIN).await {
        return Shown::Nothing;
    }
    let is_over = |tally: Tally| tally.clears_before.is_some() || tally.breaks != before.breaks;
    match timeout(WITHIN, rank.wait_for(|status| is_over(status.tally))).await {
        Err(_) => Shown::Silence,
        Ok(Ok(status)) if status.tally.breaks == before.breaks => {
            let clears = status.tally.clears_before;
            clears.map_or(Shown::Nothing, |clears| Shown::Clear(clears > before.clears))
        }
        Ok(_) => Shown::Nothing,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_together_show_a_clear_only_where_each_of_them_does() {
        let (yes, no) = (Shown::Clear(true), Shown::Clear(false));
        for (shown, clear) in [
            (&[][..], None),
            (&[yes], Some(Clear::Seen)),
            (&[yes, yes], Some(Clear::Seen)),
            (&[no, no], Some(Clear::Missing)),
            (&[yes, no], Some(Clear::Partly)),
            (&[yes, Shown::Silence], Some(Clear::Untold)),
            (&[no, Shown::Silence], Some(Clear::Untold)),
            (&[yes, Shown::Nothing], None),
            (&[Shown::Silence, Shown::Nothing], None),
        ] {
            assert_eq!(Proof::of(shown).clear, clear, "{shown:?}");
        }
    }
}
