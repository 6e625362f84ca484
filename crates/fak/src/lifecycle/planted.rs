//! Did a connector's tier really outlive a sleep, or really go with a reset?
//!
//! A prompt of fak's own is computed before a sleep that keeps the tier, and sent once more after
//! the wake, while nobody else is let in: the engine's own counters tell where its blocks came
//! from. What it costs: two requests of a block. Invariant: where anything else runs, or the engine
//! does not count, nothing is concluded; and that nothing was found counts only of a prompt that
//! the tier was believed to hold.

use fak_kernel::witness::State;
use fak_kernel::{Tier, TierSet};
use fak_wire::metrics::Signals;
use serde_json::{Value, json};

use super::marker;
use super::owner::Owner;
use crate::engine::Engine;
use crate::events::stream::Handle;

/// Largest block that is filled for it, in tokens: what is kept of a hold stays small.
const BLOCK_SIZE_MAX: u32 = 1024;

/// A prompt that the engine computed before it slept.
pub(super) type Planted = marker::Request;

impl Owner {
    /// Has the first rank compute a prompt; nothing where that could not show anything later.
    pub(super) async fn plant(&self) -> Option<Planted> {
        let target = self.marker_target()?;
        let size = target.block_size.filter(|size| *size <= BLOCK_SIZE_MAX)?;
        let has_tier = self.state.capabilities.tiers.without(TierSet::GPU) != TierSet::NONE;
        let rank = self.ranks.first().filter(|_| has_tier)?;
        let planted = Planted::new(Some(size));
        marker::post(target, rank, &planted).await;
        Some(planted)
    }

    /// Whether a connector's tier is believed to hold it, and the gpu not.
    pub(super) fn is_believed_kept(&self, planted: &Planted) -> bool {
        let held = |rank: &Handle| self.config.sink.index.held(rank.id(), &planted.key()).blocks;
        let is_elsewhere = |tier: &&Tier| **tier != Tier::Gpu;
        self.ranks.first().map(held).is_some_and(|blocks| {
            blocks.gpu == 0 && Tier::ALL.iter().filter(is_elsewhere).any(|t| blocks.get(*t) > 0)
        })
    }

    /// Sends it again to an engine that is awake; what its counters then say, for the verdict and
    /// for the row.
    pub(super) async fn dig(
        &self,
        planted: &Planted,
        is_expected: bool,
        state: State,
    ) -> (State, Value) {
        let found = match (self.marker_target(), self.ranks.first()) {
            (Some(target), Some(rank)) => {
                counted(target.engine, marker::post(target, rank, planted)).await
            }
            _ => None,
        };
        let Some((local, external)) = found else { return (state, json!("not told")) };
        let shown = json!({ "gpu": local, "connector": external, "expected": is_expected });
        let external_hits = if external > 0.0 { Some(true) } else { is_expected.then_some(false) };
        (State { local_hits: Some(local > 0.0), external_hits, ..state }, shown)
    }
}

/// Tokens that the gpu's cache and the connector's tiers gave while `request` ran; nothing where
/// something else ran, or the engine does not count.
async fn counted(engine: &Engine, request: impl Future<Output = ()>) -> Option<(f64, f64)> {
    let scraped = || async { Some(engine.scrape().await.ok()?.total()) };
    let is_alone = |signals: &Signals| signals.running == Some(0.0) && signals.waiting == Some(0.0);
    let before = scraped().await.filter(is_alone)?;
    request.await;
    let after = scraped().await.filter(is_alone)?;
    Some((after.prefix_hits? - before.prefix_hits?, after.external_hits? - before.external_hits?))
}
