//! What does an event of a NIXL lease say about the KV blocks that it holds?
//!
//! A lease keeps blocks of one engine alive while another reads them. Its words fold into the same
//! dispositions as a witness row's, and the same rule demotes.
//!
//! Invariant: only a live lease that names its blocks preserves anything.

use crate::vocab::{Disposition, vocabulary};

vocabulary! {
    /// What happened to a lease.
    LeaseEvent {
        /// It was given.
        Granted = "granted",
        /// Its holder renewed it.
        Heartbeat = "heartbeat",
        /// The blocks were read by the other side, and the lease ended with that.
        Transferred = "transferred",
        /// The transfer was given up.
        Aborted = "aborted",
        /// Its holder gave it back.
        Released = "released",
        /// No heartbeat came in time: the blocks may be there or not.
        Expired = "expired",
    }
}

impl LeaseEvent {
    /// What becomes of the leased blocks; `blocks` is how many the lease names. One that names none
    /// says nothing of any block, whatever happened to it.
    #[must_use]
    pub const fn kv(self, blocks: u32) -> Disposition {
        match (self, blocks) {
            (_, 0) | (Self::Expired, _) => Disposition::Unknown,
            (Self::Granted | Self::Heartbeat, _) => Disposition::Preserved,
            (Self::Transferred | Self::Aborted | Self::Released, _) => Disposition::Forgotten,
        }
    }

    /// Whether beliefs about the leased blocks go cold: as in a witness row, unless preserved.
    #[must_use]
    pub fn demotes(self, blocks: u32) -> bool {
        self.kv(blocks) != Disposition::Preserved
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_event_has_its_disposition() {
        let expected = [
            ("granted", "preserved", false),
            ("heartbeat", "preserved", false),
            ("transferred", "forgotten", true),
            ("aborted", "forgotten", true),
            ("released", "forgotten", true),
            ("expired", "unknown", true),
        ];
        assert_eq!(LeaseEvent::ALL.len(), expected.len());
        for (word, kv, demotes) in expected {
            let event = LeaseEvent::parse(word).expect("a word of the vocabulary");
            for blocks in [1, 2, u32::MAX] {
                assert_eq!(event.kv(blocks).as_str(), kv, "{word}");
                assert_eq!(event.demotes(blocks), demotes, "{word}");
            }
            assert_eq!(event.kv(0), Disposition::Unknown, "{word} without a span");
            assert!(event.demotes(0), "{word} without a span");
        }
    }
}
