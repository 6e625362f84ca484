//! Under which weights a request was sent, and whether its answer is of those alone.
//!
//! Invariant: the version is that of the moment at which the request entered its worker; an answer
//! during which the weights changed, as far as fak knows by its end, is never taken for one that
//! has a single version.

use http::HeaderValue;

use crate::fleet::{Fleet, Weights};

/// Longest version that is shown, in bytes; a longer one, or one that no header can hold, is as
/// good as unknown to a client.
const VERSION_BYTES_MAX: usize = 256;
/// Stands for weights that have no version of their own.
const UNNAMED: &str = "unnamed";

/// The weights at dispatch, and where to see what became of them.
#[derive(Clone, Debug)]
pub(super) struct Dispatched {
    fleet: Fleet,
    /// The worker's number in the fleet.
    number: usize,
    weights: Weights,
    /// Set once it is settled what the client is told.
    told: Option<Option<Weights>>,
}

impl Dispatched {
    pub(super) fn new(fleet: Fleet, number: usize, weights: Weights) -> Self {
        Self { fleet, number, weights, told: None }
    }

    /// The version at dispatch, where it is known.
    pub(super) fn header(&self) -> Option<HeaderValue> {
        shown(&self.weights)
    }

    /// The weights that the worker has now, where they are others.
    pub(super) fn moved(&self) -> Option<Weights> {
        let snapshot = self.fleet.snapshot();
        let now = snapshot.workers.get(self.number)?.state.weights();
        let then = &self.weights;
        // A version that was told late is no other one.
        let is_other = then.version.is_some() && now.version != then.version;
        (is_other || now.epoch != then.epoch).then_some(now)
    }

    /// What a header says of an answer that is mixed so far.
    pub(super) fn mixed_header(&self) -> Option<HeaderValue> {
        self.moved().map(|now| self.named(&now))
    }

    /// The line that goes before a stream's end marker, where the stream is mixed. Said once, it is
    /// what [`settled`](Self::settled) says too.
    pub(super) fn comment(&mut self) -> Option<String> {
        let now = self.settled()?;
        let word = |value: HeaderValue| value.to_str().map_or(UNNAMED.to_owned(), str::to_owned);
        let then = self.header().map_or(UNNAMED.to_owned(), word);
        Some(format!(": fak weight-version-mixed {then} {}\n\n", word(self.named(&now))))
    }

    /// The last weights of an answer that has ended, where they are others than its first.
    pub(super) fn settled(&mut self) -> Option<Weights> {
        if self.told.is_none() {
            self.told = Some(self.moved());
        }
        self.told.clone().flatten()
    }

    /// At dispatch, for the log.
    pub(super) fn at_dispatch(&self) -> &Weights {
        &self.weights
    }

    /// By version, unless that did not move.
    fn named(&self, now: &Weights) -> HeaderValue {
        let version = shown(now).filter(|_| now.version != self.weights.version);
        version.unwrap_or(HeaderValue::from_static(UNNAMED))
    }
}

fn shown(weights: &Weights) -> Option<HeaderValue> {
    let version = weights.version.as_deref()?;
    let is_shown = (1..=VERSION_BYTES_MAX).contains(&version.len())
        && version.bytes().all(|byte| byte.is_ascii_graphic());
    is_shown.then(|| HeaderValue::try_from(version).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_that_no_header_or_line_can_hold_is_not_shown() {
        let weights = |version: &str| Weights { version: Some(version.into()), epoch: None };
        assert_eq!(shown(&weights("v7+lora.3")).expect("plain"), "v7+lora.3");
        for version in ["", "a b", "a\nx-evil: 1", "ä", &"v".repeat(257)] {
            assert_eq!(shown(&weights(version)), None, "{version:?}");
        }
        assert_eq!(shown(&Weights::default()), None);
    }
}
