//! When does what an engine stores count again after an action?
//!
//! Invariant: the door opens on events that have settled, or on a warning that they have not.

use futures_util::future::join_all;
use tokio::time::timeout;

use super::marker;
use super::owner::Owner;

impl Owner {
    /// Keeps the door shut until what is stored from here on is believed: what is stored before
    /// would stay cold.
    pub(super) async fn settle(&self) {
        let Some(target) = self.marker_target() else { return };
        self.offer_markers();
        let ranks = self.ranks.iter().map(|rank| async move {
            while let Ok(status) = rank.wait_for(|s| s.is_settled).await {
                if !status.is_contested {
                    return;
                }
                // The clear was taken in while the action ran, as where a canary had the engine
                // take a step: the next step's batch tells whose it was.
                let request = marker::Request::new(target.block_size);
                marker::post(target, rank, &request).await;
                if rank.wait_for(|s| !s.is_contested).await.is_err() {
                    return;
                }
            }
        });
        if timeout(self.config.settle_within, join_all(ranks)).await.is_err() {
            tracing::warn!(worker = %self.worker.id, "serves before its events have settled");
        }
    }

    pub(super) fn marker_target(&self) -> Option<marker::Target<'_>> {
        let (engine, block_size) = (&self.worker.engine, self.block_size);
        let model = self.state.models.base()?;
        let first_rank = self.state.first_rank;
        let is_only_rank = self.ranks.len() == 1;
        Some(marker::Target { engine, model, block_size, first_rank, is_only_rank })
    }
}
