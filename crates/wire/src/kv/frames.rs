//! The messages around a batch: what a SUB socket receives, what a replay is asked with, and what a
//! DEALER socket receives for it, in both framings.
//! Invariant: frames are borrowed, never copied; a message of any other shape is an error.

/// A message of the event stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Live<'a> {
    /// The publisher's topic; empty by default.
    pub topic: &'a [u8],
    /// Number of the batch, from 0 on in each life of the engine and in each rank.
    pub seq: u64,
    /// The batch, for [`decode`](super::decode).
    pub payload: &'a [u8],
}

/// One message of the answer to a replay request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reply<'a> {
    /// A batch that the engine still had.
    Batch {
        /// Number of the batch.
        seq: u64,
        /// The batch, for [`decode`](super::decode).
        payload: &'a [u8],
    },
    /// The engine has nothing more to send. It says so even if it lost what was asked for.
    End,
}

/// A message that is none of the known shapes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// Wrong number of frames.
    #[error("found {found} frames, expected {expected}")]
    Count {
        /// How many came.
        found: usize,
        /// How many should have.
        expected: &'static str,
    },
    /// A sequence number that is not 8 bytes long.
    #[error("sequence: found {found} bytes, expected 8")]
    Sequence {
        /// Its length in bytes.
        found: usize,
    },
    /// Four frames of which the first is not empty.
    #[error("delimiter: found {found} bytes, expected none")]
    Delimiter {
        /// Its length in bytes.
        found: usize,
    },
    /// A payload with the number of the end marker, or none with another number.
    #[error("payload of batch {seq}: found {found} bytes, expected {expected}")]
    Payload {
        /// Number of the batch.
        seq: u64,
        /// Its length in bytes.
        found: usize,
        /// What would be right.
        expected: &'static str,
    },
}

/// Number that ends a replay: -1 as a signed integer. No batch has it.
const END: u64 = u64::MAX;

/// Reads a message of the event stream: topic, number, batch.
///
/// # Errors
/// If there are not three frames, or the second is no sequence number.
pub fn live<F: AsRef<[u8]>>(frames: &[F]) -> Result<Live<'_>, FrameError> {
    let [topic, number, payload] = frames else {
        return Err(FrameError::Count { found: frames.len(), expected: "3" });
    };
    let (seq, payload) = (sequence(number.as_ref())?, payload.as_ref());
    if seq == END || payload.is_empty() {
        let expected = "a batch, numbered below 2^64-1";
        return Err(FrameError::Payload { seq, found: payload.len(), expected });
    }
    Ok(Live { topic: topic.as_ref(), seq, payload })
}

/// Frames that ask for every batch from `from_seq` on, as a DEALER must send them: the router
/// passes over a request without the empty delimiter (vLLM 0.32.0, observed).
#[must_use]
pub fn replay_request(from_seq: u64) -> [Vec<u8>; 2] {
    [Vec::new(), from_seq.to_be_bytes().to_vec()]
}

/// Reads one message of a replay as a DEALER sees it: an empty delimiter (which a REQ socket has
/// already taken off), the topic (since vLLM 0.26.0), number, batch.
///
/// # Errors
/// If the frames fit neither framing.
pub fn replay_reply<F: AsRef<[u8]>>(frames: &[F]) -> Result<Reply<'_>, FrameError> {
    // Three frames are either delimiter and old framing, or new framing without delimiter; number
    // and batch are the last two in both.
    let (number, payload) = match frames {
        [number, payload] | [_, number, payload] => (number, payload),
        [delimiter, _, number, payload] => {
            let found = delimiter.as_ref().len();
            if found != 0 {
                return Err(FrameError::Delimiter { found });
            }
            (number, payload)
        }
        _ => return Err(FrameError::Count { found: frames.len(), expected: "2 to 4" }),
    };
    let (seq, payload) = (sequence(number.as_ref())?, payload.as_ref());
    match (seq, payload.len()) {
        (END, 0) => Ok(Reply::End),
        (END, found) => Err(FrameError::Payload { seq, found, expected: "none in an end marker" }),
        (_, 0) => Err(FrameError::Payload { seq, found: 0, expected: "a batch" }),
        _ => Ok(Reply::Batch { seq, payload }),
    }
}

fn sequence(frame: &[u8]) -> Result<u64, FrameError> {
    match frame.try_into() {
        Ok(bytes) => Ok(u64::from_be_bytes(bytes)),
        Err(_) => Err(FrameError::Sequence { found: frame.len() }),
    }
}
