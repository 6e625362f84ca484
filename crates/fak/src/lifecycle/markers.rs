//! Sends the markers that ranks ask for: one task a rank, as long as its stream is followed.
//!
//! Invariant: a marker waits as long as its engine lets requests wait, and holds up nobody: neither
//! its worker's owner nor the other ranks. It is given up only where it is not asked for any more,
//! or where the engine does not serve any more.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::timeout;

use super::marker::{self, Target};
use super::owner::Owner;
use crate::engine::Engine;
use crate::events::stream::{Ended, Handle, Status};

/// Time for a store that was answered to come in, before its marker is sent again.
const AGAIN_AFTER: Duration = Duration::from_secs(10);

/// What markers are sent to.
#[derive(Clone, Debug)]
pub struct Offer {
    engine: Engine,
    model: Arc<str>,
    block_size: Option<u32>,
    first_rank: u32,
    ranks: usize,
    incarnation: Option<Arc<str>>,
}

impl Offer {
    /// An engine that serves `model`, of whose ranks no more is known.
    #[must_use]
    pub fn new(engine: Engine, model: Arc<str>, block_size: Option<u32>) -> Self {
        Self { engine, model, block_size, first_rank: 0, ranks: 0, incarnation: None }
    }

    fn target(&self) -> Target<'_> {
        Target {
            engine: &self.engine,
            model: &self.model,
            block_size: self.block_size,
            first_rank: self.first_rank,
            is_only_rank: self.ranks == 1,
        }
    }

    fn is_same(&self, other: &Self) -> bool {
        let of = |offer: &Self| {
            let Self { model, incarnation, block_size, first_rank, ranks, .. } = offer;
            (Arc::clone(model), incarnation.clone(), *block_size, *first_rank, *ranks)
        };
        of(self) == of(other)
    }
}

impl Owner {
    /// Markers may be sent from here on, to what is known of the engine now.
    pub(super) fn offer_markers(&self) {
        let offer = self.marker_target().map(|target| Offer {
            engine: target.engine.clone(),
            model: target.model.into(),
            block_size: target.block_size,
            first_rank: target.first_rank,
            ranks: self.ranks.len(),
            incarnation: self.state.incarnation.clone(),
        });
        self.offer(offer);
    }

    /// No marker is sent from here on, and those under way are given up.
    pub(super) fn hold_markers(&self) {
        self.offer(None);
    }

    fn offer(&self, offer: Option<Offer>) {
        self.markers.send_if_modified(|now| {
            let is_same = match (&*now, &offer) {
                (Some(now), Some(offer)) => now.is_same(offer),
                (None, None) => true,
                _ => false,
            };
            *now = offer;
            !is_same
        });
    }
}

/// Sends what `rank` asks for until its stream ends, or nobody offers anything any more.
pub async fn run(rank: Handle, mut offers: watch::Receiver<Option<Offer>>) {
    while let Ok(Status { marker: Some(id), .. }) = rank.wait_for(|s| s.marker.is_some()).await {
        let Ok(offer) = offers.wait_for(Option::is_some).await.map(|offer| (*offer).clone()) else {
            return;
        };
        let Some(offer) = offer else { continue };
        tokio::select! {
            () = marker::send(offer.target(), &rank, id) => {}
            answered = is_over(&rank, id) => match answered {
                Ok(()) => continue,
                Err(Ended) => return,
            },
            _ = offers.changed() => continue,
        }
        // Sent again at once it would be sent for ever to an engine whose events do not come.
        let _ = timeout(AGAIN_AFTER, is_over(&rank, id)).await;
    }
}

/// Waits until the marker is not asked for any more.
async fn is_over(rank: &Handle, id: u64) -> Result<(), Ended> {
    rank.wait_for(|status| status.marker != Some(id)).await.map(drop)
}
