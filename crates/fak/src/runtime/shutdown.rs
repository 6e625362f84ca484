//! The stop signal that every long-lived loop holds.
//!
//! Invariant: once requested, a shutdown stays requested.

use tokio_util::sync::CancellationToken;

/// The receiving end of a stop signal; cheap to clone.
#[derive(Clone, Debug)]
pub struct Shutdown(CancellationToken);

impl Shutdown {
    pub(super) fn new(token: CancellationToken) -> Self {
        Self(token)
    }

    /// Resolves when the stop was asked for; at once if it already was.
    pub async fn requested(&self) {
        self.0.cancelled().await;
    }

    /// Whether the stop was asked for.
    #[must_use]
    pub fn is_requested(&self) -> bool {
        self.0.is_cancelled()
    }
}
