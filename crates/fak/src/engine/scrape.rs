//! The engine's own signals, read beside the request path.
//!
//! Invariant: a scrape has its own bound in time and size, and nothing that serves a request waits
//! for one.

use fak_wire::metrics::{self, Limits, Snapshot};

use super::Engine;
use super::client::{Error, Outgoing};
use super::endpoints::Data;

/// Why a scrape gave nothing.
#[derive(Debug, thiserror::Error)]
pub enum ScrapeError {
    /// No answer.
    #[error("no metrics")]
    Http(#[from] Error),
    /// An answer that is not 200.
    #[error("metrics answered {status}")]
    Status {
        /// The HTTP status.
        status: u16,
    },
    /// More than any engine gives.
    #[error("too many metrics")]
    TooLarge(#[from] metrics::TooLarge),
}

impl Engine {
    /// Reads the engine's metrics once.
    ///
    /// # Errors
    ///
    /// [`ScrapeError`], within the time for a probe.
    pub async fn scrape(&self) -> Result<Snapshot, ScrapeError> {
        let request = Outgoing::to(self.endpoints.data(Data::Metrics));
        let response = self.client.send(request, self.client.timeouts().probe).await?;
        if response.status != http::StatusCode::OK {
            return Err(ScrapeError::Status { status: response.status.as_u16() });
        }
        Ok(metrics::parse(&response.body, &Limits::default())?)
    }
}
