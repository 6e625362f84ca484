//! KV cache events: from the engines' sockets to batches in order, replays, and what was made of
//! them.
//!
//! Invariant: a source yields [`Item`]s in the order in which they came over one connection, and
//! says where one connection ends and the next begins; what is lost in between shows in the
//! sequence numbers, and is never papered over.

#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a test fails by panicking"))]

pub mod blind;
pub mod discover;
pub mod endpoint;
pub mod fold;
mod lease;
pub mod medium;
pub mod ndjson;
pub mod notes;
pub mod recorder;
pub mod replay;
pub mod stream;
pub mod zmq;
pub mod zmtp;

use bytes::Bytes;

pub use endpoint::Endpoint;

/// What a source of one rank's events yields.
#[derive(Debug)]
pub enum Item {
    /// A new connection stands. Every batch up to the next [`Disconnected`](Self::Disconnected)
    /// came over it.
    Connected {
        /// Counts the source's connections, from 1.
        epoch: u64,
    },
    /// A batch, undecoded.
    Batch {
        /// Starts at 0 with each life of a vLLM and counts up by one.
        seq: u64,
        /// The bytes that its digest is taken over.
        payload: Bytes,
    },
    /// Something that is no batch. The rank's picture has a hole.
    Bad {
        /// What it was.
        why: Bad,
    },
    /// The connection is over. What was on the way is lost.
    Disconnected {
        /// How it ended.
        why: Lost,
    },
}

/// Something in a batch's place.
#[derive(Debug, thiserror::Error)]
pub enum Bad {
    /// A message with other frames than a batch's.
    #[error("not a batch's frames")]
    Frames(#[from] fak_wire::kv::frames::FrameError),
    /// A line that is no batch.
    #[error("line {number}")]
    Line {
        /// Counts the input's lines, from 1.
        number: u64,
        /// What is wrong with it.
        #[source]
        why: ndjson::LineError,
    },
}

/// How a connection ended.
#[derive(Debug, thiserror::Error)]
pub enum Lost {
    /// By the peer, the network, or a violation of the protocol.
    #[error("connection lost")]
    Connection(#[from] zmtp::Error),
    /// By [`zmq::Subscription::reconnect`].
    #[error("a new connection was asked for")]
    Asked,
    /// The input has no more lines.
    #[error("the input ended")]
    Ended,
    /// The input failed.
    #[error("the input cannot be read")]
    Read(#[source] std::io::Error),
}
