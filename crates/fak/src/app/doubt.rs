//! Carries what requests find out about workers to their owners.
//!
//! Invariant: a request never waits for it: what does not fit into the queue is dropped, since the
//! owner looks at its worker anyway.

use std::sync::Arc;

use tokio::sync::mpsc;

use crate::gateway::{Contradiction, Doubt};
use crate::lifecycle::Lifecycle;
use crate::runtime::Shutdown;

/// Findings that may wait.
const FINDINGS_MAX: usize = 256;

enum Finding {
    Suspect(Arc<str>),
    Contradicted(Contradiction),
}

/// The requests' end.
pub(super) struct Findings(mpsc::Sender<Finding>);

impl Doubt for Findings {
    fn suspect(&self, worker: &Arc<str>) {
        let _ = self.0.try_send(Finding::Suspect(Arc::clone(worker)));
    }

    fn contradicted(&self, contradiction: &Contradiction) {
        let _ = self.0.try_send(Finding::Contradicted(contradiction.clone()));
    }
}

/// The owners' end.
pub(super) struct Carrier(mpsc::Receiver<Finding>);

/// Both ends.
pub(super) fn findings() -> (Findings, Carrier) {
    let (sender, receiver) = mpsc::channel(FINDINGS_MAX);
    (Findings(sender), Carrier(receiver))
}

impl Carrier {
    /// Carries until told to stop.
    pub(super) async fn run(mut self, lifecycle: Lifecycle, stop: Shutdown) {
        loop {
            let finding = tokio::select! {
                () = stop.requested() => return,
                finding = self.0.recv() => finding,
            };
            let carried = match finding {
                Some(Finding::Suspect(worker)) => lifecycle.look(&worker).await,
                Some(Finding::Contradicted(found)) => {
                    lifecycle.contradicted(&found.worker, found.claimed, found.cached).await
                }
                None => return,
            };
            if let Err(error) = carried {
                tracing::debug!(%error, "a finding reached nobody");
            }
        }
    }
}
