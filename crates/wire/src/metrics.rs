//! A scrape of a vLLM server as one [`Snapshot`], whatever the version calls its metrics.
//! Invariant: a signal that the engine does not give is `None`, never 0; one that it gives under an
//! old and a new name counts once; a line that cannot be read counts for nothing but itself.
//!
//! Own reader: of the crates, `prometheus-parse` 0.2 and `openmetrics-parser` 0.4 refuse the
//! recorded scrapes or lose their series (names with a colon), and neither bounds its input.

mod histogram;
mod names;
mod reading;
mod snapshot;
mod text;

pub use histogram::Histogram;
pub use snapshot::{Signals, SleepState, Snapshot, Usage};

/// Bounds on a scrape; all inclusive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of text.
    pub bytes: usize,
    /// Lines, comments included.
    pub lines: u32,
    /// Values of the `engine` label.
    pub ranks: usize,
    /// Bounds a histogram, and values of a label that a counter is split by.
    pub parts: usize,
    /// Unknown names that are remembered.
    pub unknown_names: usize,
}

impl Default for Limits {
    /// A recorded scrape has 100 kB in 1,200 lines a rank.
    fn default() -> Self {
        Limits { bytes: 32 << 20, lines: 400_000, ranks: 1024, parts: 256, unknown_names: 256 }
    }
}

/// A scrape over its [`Limits`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("metrics: found {found} {unit}, expected at most {limit}")]
pub struct TooLarge {
    /// How many came.
    pub found: usize,
    /// Of what.
    pub unit: &'static str,
    /// The limit.
    pub limit: usize,
}

/// Reads a whole answer of `/metrics`, in the classic format or OpenMetrics.
///
/// # Errors
/// Only if the answer is over `limits`; lines that are no samples are counted in
/// [`Snapshot::malformed_lines`].
pub fn parse(scrape: &[u8], limits: &Limits) -> Result<Snapshot, TooLarge> {
    if scrape.len() > limits.bytes {
        return Err(TooLarge { found: scrape.len(), unit: "bytes", limit: limits.bytes });
    }
    let mut reading = reading::Reading::default();
    for (index, line) in scrape.split(|byte| *byte == b'\n').enumerate() {
        let limit = limits.lines as usize;
        if index > limit {
            return Err(TooLarge { found: index + 1, unit: "lines", limit });
        }
        match text::sample(line) {
            Ok(Some(sample)) => reading.add(&sample, limits)?,
            Ok(None) => {}
            Err(text::Malformed) => reading.snapshot.malformed_lines += 1,
        }
    }
    Ok(reading.snapshot)
}

/// Growth of a counter between two scrapes. A counter that fell belongs to a new life of the
/// process and has grown from 0.
#[must_use]
pub fn counter_growth(before: f64, now: f64) -> f64 {
    if now < before { now } else { now - before }
}
