//! How a streamed answer ended: vLLM marks most failures inside a stream whose status was 200, and
//! some by leaving something out.
//! Invariant: only a stream with every finish reason and the end marker is complete.

use std::collections::BTreeSet;

use super::{Answer, ErrorBody, StreamItem};

/// Follows a stream and says in the end what became of it.
#[derive(Debug)]
pub struct StreamWatch {
    /// Choices that a whole answer has.
    expected: usize,
    /// Those that gave a finish reason; at most `expected`.
    finished: BTreeSet<u32>,
    is_aborted: bool,
    has_failed: bool,
    error: Option<ErrorBody>,
    is_done: bool,
}

/// What became of a stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StreamEnd {
    /// Every choice has its finish reason, and the end marker came.
    Complete,
    /// The engine aborted the request: a pause, a sleep or an abort call while it ran.
    Aborted,
    /// The end marker came and choices have no finish reason: the engine dropped the request while
    /// it was queued (vLLM 0.32.0, observed: `[DONE]` alone, or after usage or the role chunk).
    Dropped,
    /// The engine failed; the error is there if it sent one.
    Failed(Option<ErrorBody>),
    /// The connection ended before the end marker: the process or its frontend died.
    Cut,
}

impl StreamWatch {
    /// Watches a stream of that many choices (see [`Request::choices`](super::Request::choices)).
    #[must_use]
    pub fn new(expected: usize) -> Self {
        StreamWatch {
            expected,
            finished: BTreeSet::new(),
            is_aborted: false,
            has_failed: false,
            error: None,
            is_done: false,
        }
    }

    /// Takes note of the next item. Items after the end marker say nothing.
    pub fn see(&mut self, item: &StreamItem) {
        if self.is_done {
            return;
        }
        match item {
            StreamItem::Done => self.is_done = true,
            StreamItem::Error(error) => self.error = Some(error.clone()),
            StreamItem::Chunk(chunk) => self.see_chunk(chunk),
        }
    }

    fn see_chunk(&mut self, chunk: &Answer) {
        for choice in &chunk.choices {
            let Some(reason) = choice.finish_reason.as_deref() else { continue };
            self.is_aborted |= reason == "abort";
            self.has_failed |= reason == "error";
            if self.finished.len() < self.expected {
                self.finished.insert(choice.index);
            }
        }
    }

    /// Whether the end marker has come.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.is_done
    }

    /// What became of the stream, now that it has ended.
    #[must_use]
    pub fn end(self) -> StreamEnd {
        if self.error.is_some() || self.has_failed {
            StreamEnd::Failed(self.error)
        } else if self.is_aborted {
            StreamEnd::Aborted
        } else if !self.is_done {
            StreamEnd::Cut
        } else if self.finished.len() < self.expected {
            StreamEnd::Dropped
        } else {
            StreamEnd::Complete
        }
    }
}
