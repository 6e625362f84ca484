//! An answer on its way to the client: the engine's bytes, as they come, and what is learnt from
//! them in passing.
//!
//! Invariant: nothing waits in here but the unfinished end of an event; the engine is read only as
//! fast as the client reads; a client that leaves drops the engine's connection, at once or once
//! the engine runs again; and a stream that fails ends with exactly one error event, on a line of
//! its own, and without the end marker.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use bytes::Bytes;
use fak_wire::openai::{Finish, PassingAnswer, StreamEnd, Usage};
use http::StatusCode;
use hyper::body::{Body as _, Incoming};

use super::beginning::is_empty_error;
use super::deferred::Patience;
use super::error::Problem;
use super::following::Following;
use super::frames::{Fate, Frames};
use super::metrics::{Failure, Outcome};
use super::reading::{Opening, is_refusal};
use super::silence::{KeepAlive, Silence};
use super::ticket::Ticket;
use crate::engine::BoxError;

/// A whole answer that is longer than this has tokens, or what goes before them.
const EMPTY_BYTES_MAX: usize = 8 << 10;

/// Set when streams are to end now, because fak stops; cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Cutoff(Arc<AtomicBool>);

impl Cutoff {
    /// Ends every stream when it is next polled.
    pub fn cut(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// Whether streams are to end.
    #[must_use]
    pub fn is_cut(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// How an answer is read on its way.
#[derive(Debug)]
pub(super) enum Reader {
    /// A stream.
    Events(Frames, Box<Following>),
    /// A whole answer of chat or completions.
    Whole(Box<PassingAnswer>),
    /// Not at all.
    Unread,
}

/// The answer.
#[derive(Debug)]
pub(super) struct Relay {
    /// The engine's side; none once it has ended.
    incoming: Option<Incoming>,
    reader: Reader,
    /// Bytes that were read and wait for the client.
    ready: Option<Bytes>,
    silence: Silence,
    /// Comments for the client; none where there are to be none.
    keep_alive: Option<KeepAlive>,
    cutoff: Cutoff,
    /// How it ended, until the ticket is there to be told.
    ended: Option<(Outcome, Option<Usage>)>,
    /// It ended with an error that another worker may not have.
    is_unavailable: bool,
    /// How it ends if nothing fails.
    whole: Outcome,
    ticket: Option<Ticket>,
    /// How the engine's side is left; none: it is closed at once.
    patience: Option<Patience>,
}

impl Relay {
    /// Relays `incoming`, of which nothing was read yet.
    pub(super) fn new(
        incoming: Incoming,
        reader: Reader,
        silence: Silence,
        cutoff: Cutoff,
    ) -> Self {
        Self {
            incoming: Some(incoming),
            reader,
            ready: None,
            silence,
            keep_alive: None,
            cutoff,
            ended: None,
            is_unavailable: false,
            whole: Outcome::Ok,
            ticket: None,
            patience: None,
        }
    }

    /// Has the client of a stream given a comment as often as this, while the engine says nothing.
    pub(super) fn keep_alive(&mut self, every: Option<std::time::Duration>) {
        self.keep_alive = every.filter(|_| self.is_events()).map(KeepAlive::new);
    }

    /// Leaves the engine's side so, where it has not ended.
    pub(super) fn leave_with(mut self, patience: Option<Patience>) -> Self {
        self.patience = patience;
        self
    }

    /// Reads on until there is something that the client waits for. What fails before that can be
    /// answered otherwise. Safe to drop and call again.
    pub(super) async fn open(&mut self) -> Result<Opening, Problem> {
        loop {
            match std::future::poll_fn(|cx| self.read(cx)).await {
                Read::Bytes if self.is_announced_only() => {}
                Read::Bytes | Read::End => break,
                Read::Broken => return Err(Problem::Cut),
                Read::Silent => return Err(Problem::Silent),
                Read::Stopped => return Err(Problem::Stopping),
            }
        }
        match (&self.ended, &self.reader) {
            (Some((Outcome::Failed(Failure::Cut), _)), _) => Err(Problem::Cut),
            (Some((Outcome::Failed(Failure::Dropped), _)), _) => Ok(Opening::Dropped),
            (Some((Outcome::Failed(Failure::Error), _)), _) if self.is_unavailable => {
                Ok(Opening::Unavailable)
            }
            (_, Reader::Events(_, following)) => Ok(following.opening()),
            _ => Ok(Opening::Fine),
        }
    }

    /// Reads a short whole answer to its end. Of one that is an error and nothing else the client
    /// has to see nothing.
    pub(super) async fn open_whole(&mut self) -> Result<Opening, Problem> {
        loop {
            match std::future::poll_fn(|cx| self.read(cx)).await {
                Read::Bytes | Read::End if self.incoming.is_none() => break,
                Read::Bytes | Read::End if self.read_bytes() > EMPTY_BYTES_MAX => break,
                Read::Bytes | Read::End => {}
                Read::Broken => return Err(Problem::Cut),
                Read::Silent => return Err(Problem::Silent),
                Read::Stopped => return Err(Problem::Stopping),
            }
        }
        let is_empty = self.has_failed() && self.ready.as_deref().is_some_and(is_empty_error);
        Ok(if is_empty { Opening::Empty } else { Opening::Fine })
    }

    /// Bytes that were read and not given out.
    fn read_bytes(&self) -> usize {
        self.ready.as_ref().map_or(0, Bytes::len)
    }

    /// Whether what was read so far says nothing yet.
    fn is_announced_only(&self) -> bool {
        matches!(&self.reader, Reader::Events(_, reading) if !reading.has_begun())
    }

    /// Whether the engine has begun to compute the answer, as far as what was read shows.
    pub(super) fn has_begun(&self) -> bool {
        self.ended.is_some() || !self.is_announced_only()
    }

    /// The answer goes to the client from here on: `ticket` is told how it ends, or ended.
    pub(super) fn board(&mut self, mut ticket: Ticket) {
        match self.ended.take() {
            Some((outcome, usage)) => ticket.end(outcome, usage),
            None => self.ticket = Some(ticket),
        }
    }

    /// Whether it began with an error of the engine's.
    pub(super) fn has_failed(&self) -> bool {
        matches!(&self.ended, Some((Outcome::Failed(Failure::Error), _)))
    }

    /// Whether it has ended otherwise than an answer does.
    pub(super) fn has_ended_badly(&self) -> bool {
        self.ended.as_ref().is_some_and(|(outcome, _)| *outcome != Outcome::Ok)
    }

    /// Whether it is a whole answer that is read.
    pub(super) fn is_whole(&self) -> bool {
        matches!(self.reader, Reader::Whole(_))
    }

    /// Whether it is a stream that is read.
    pub(super) fn is_events(&self) -> bool {
        matches!(self.reader, Reader::Events(..))
    }

    /// The answer has this status: an error is one though it comes whole.
    pub(super) fn answers(&mut self, status: StatusCode) {
        if status.is_client_error() {
            self.whole = Outcome::Refused;
        } else if status.is_server_error() {
            self.whole = Outcome::Failed(Failure::Error);
        }
    }

    /// Whether all of it was given out.
    pub(super) fn is_over(&self) -> bool {
        self.incoming.is_none() && self.ready.is_none()
    }

    /// The next bytes.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, BoxError>>> {
        loop {
            if let Some(bytes) = self.ready.take() {
                if let Some(keep_alive) = &mut self.keep_alive {
                    keep_alive.given();
                }
                return Poll::Ready(Some(Ok(bytes)));
            }
            if self.incoming.is_none() {
                return Poll::Ready(None);
            }
            let failure = match self.read(cx) {
                Poll::Pending => return self.comment(cx),
                Poll::Ready(Read::Bytes | Read::End) => continue,
                Poll::Ready(Read::Broken) => Failure::Cut,
                Poll::Ready(Read::Silent) => Failure::Silent,
                Poll::Ready(Read::Stopped) => Failure::Stopped,
            };
            if let Err(error) = self.fail(failure) {
                return Poll::Ready(Some(Err(error)));
            }
        }
    }

    /// The next comment, while the engine says nothing. What the client has ends between events
    /// then.
    fn comment(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, BoxError>>> {
        let is_between = matches!(&self.reader, Reader::Events(frames, _) if !frames.is_opaque());
        let Some(keep_alive) = self.keep_alive.as_mut().filter(|_| is_between) else {
            return Poll::Pending;
        };
        let comment = || Some(Ok(Bytes::from_static(KeepAlive::COMMENT)));
        keep_alive.poll(cx).map(|()| comment())
    }

    /// Reads once from the engine, into `ready`.
    fn read(&mut self, cx: &mut Context<'_>) -> Poll<Read> {
        loop {
            let Some(incoming) = &mut self.incoming else { return Poll::Ready(Read::End) };
            match Pin::new(incoming).poll_frame(cx) {
                Poll::Ready(Some(Ok(frame))) => {
                    self.silence.heard();
                    let Ok(bytes) = frame.into_data() else { continue };
                    self.take(bytes);
                    if self.ready.is_some() {
                        return Poll::Ready(Read::Bytes);
                    }
                }
                Poll::Ready(Some(Err(_))) => return Poll::Ready(Read::Broken),
                Poll::Ready(None) => {
                    self.end();
                    return Poll::Ready(Read::End);
                }
                Poll::Pending if self.cutoff.is_cut() => return Poll::Ready(Read::Stopped),
                Poll::Pending if self.silence.poll(cx).is_ready() => {
                    return Poll::Ready(Read::Silent);
                }
                Poll::Pending => return Poll::Pending,
            }
        }
    }

    fn take(&mut self, bytes: Bytes) {
        let mut is_last = false;
        let kept = match &mut self.reader {
            Reader::Events(frames, following) => {
                let cut = frames.push(bytes, |event| following.event(event));
                is_last = cut.is_last;
                match cut.end_at {
                    Some(at) => marked(cut.bytes, at, self.ticket.as_mut()),
                    None => cut.bytes,
                }
            }
            Reader::Whole(passing) => {
                passing.push(&bytes);
                bytes
            }
            Reader::Unread => bytes,
        };
        self.ready = match self.ready.take() {
            // An announcement waits for what follows it.
            Some(ready) if !kept.is_empty() => Some([&ready[..], &kept].concat().into()),
            Some(ready) => Some(ready),
            None => Some(kept).filter(|bytes| !bytes.is_empty()),
        };
        let is_all = self.incoming.as_ref().is_none_or(hyper::body::Body::is_end_stream);
        if is_last || (is_all && !matches!(self.reader, Reader::Events(..))) {
            // Not left to the next poll: of a body whose length is known there may be none.
            self.end();
        }
    }

    /// The engine's side has ended, by itself or by an error that was the last event.
    fn end(&mut self) {
        self.incoming = None;
        let (outcome, usage) = match std::mem::replace(&mut self.reader, Reader::Unread) {
            Reader::Events(frames, following) => self.end_events(frames, *following),
            Reader::Whole(passing) => self.end_whole(&passing),
            Reader::Unread => (self.whole, None),
        };
        self.tell(outcome, usage);
    }

    /// vLLM answers 200 to a unary request that a pause or a sleep aborts, with usage (0.32.0,
    /// observed): of one that was still queued it has looked nothing up, so that `cached_tokens`
    /// is 0; and so it does to one at which it failed.
    fn end_whole(&self, passing: &PassingAnswer) -> (Outcome, Option<Usage>) {
        let usage = passing.usage();
        match passing.finish() {
            Finish::Whole => (self.whole, usage),
            Finish::Aborted => (Outcome::Failed(Failure::Aborted), usage),
            Finish::Failed => (Outcome::Failed(Failure::Error), usage),
            // It may have been: then its numbers say nothing of the cache.
            Finish::Untold => (self.whole, None),
        }
    }

    fn tell(&mut self, outcome: Outcome, usage: Option<Usage>) {
        match &mut self.ticket {
            Some(ticket) => ticket.end(outcome, usage),
            None => self.ended = Some((outcome, usage)),
        }
    }

    fn end_events(&mut self, frames: Frames, mut following: Following) -> (Outcome, Option<Usage>) {
        if frames.is_opaque() {
            return (Outcome::Ok, following.usage());
        }
        let held = frames.into_held();
        if following.is_done() {
            // Behind the end marker nothing is looked for.
            self.give(held);
        } else if !held.is_empty() && following.event(&[&held[..], b"\n\n"].concat()) == Fate::End {
            // An end marker needs no empty line where the stream ends with it.
            let end = marked(held.into(), 0, self.ticket.as_mut());
            self.give(end.to_vec());
        }
        self.is_unavailable = following.opening() == Opening::Unavailable;
        let usage = following.usage();
        let last = following.failure(&Problem::Cut);
        let failure = match following.end() {
            StreamEnd::Complete => return (Outcome::Ok, usage),
            StreamEnd::Aborted => Failure::Aborted,
            StreamEnd::Dropped => Failure::Dropped,
            StreamEnd::Failed(Some(error)) if is_refusal(&error) => {
                return (Outcome::Refused, usage);
            }
            StreamEnd::Failed(_) => Failure::Error,
            StreamEnd::Cut => {
                self.give(last);
                Failure::Cut
            }
        };
        (Outcome::Failed(failure), usage)
    }

    /// Ends the answer where the engine's side failed. An event stream gets its error event;
    /// anything else is cut, as the engine's side was.
    fn fail(&mut self, failure: Failure) -> Result<(), BoxError> {
        self.let_go();
        let reader = std::mem::replace(&mut self.reader, Reader::Unread);
        let problem = match failure {
            Failure::Silent => Problem::Silent,
            Failure::Stopped => Problem::Stopping,
            _ => Problem::Cut,
        };
        let (usage, last) = match &reader {
            // What is held of an unfinished event is lost, so that the error is on a line of its
            // own.
            Reader::Events(frames, following) => {
                let last = (!frames.is_opaque()).then(|| following.failure(&problem));
                (following.usage(), last)
            }
            Reader::Whole(_) | Reader::Unread => (None, None),
        };
        self.tell(Outcome::Failed(failure), usage);
        let Some(last) = last else { return Err(problem.into()) };
        self.give(last);
        Ok(())
    }

    /// Leaves what has not ended.
    fn let_go(&mut self) {
        if let (Some(incoming), Some(patience)) = (self.incoming.take(), &self.patience) {
            patience.leave(incoming);
        }
    }

    fn give(&mut self, bytes: Vec<u8>) {
        if bytes.is_empty() {
            return;
        }
        self.ready = Some(match self.ready.take() {
            None => bytes.into(),
            Some(ready) => [&ready[..], &bytes].concat().into(),
        });
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.let_go();
        // The client left, and what the engine told by then is all that there is.
        if let (Some(ticket), Reader::Events(_, following)) = (&mut self.ticket, &self.reader) {
            ticket.end(Outcome::Cancelled, following.usage());
        }
    }
}

/// An answer's end with what its client is told of its weights, before the end marker at `at`.
fn marked(bytes: Bytes, at: usize, ticket: Option<&mut Ticket>) -> Bytes {
    match ticket.and_then(Ticket::comment) {
        Some(comment) => [&bytes[..at], comment.as_bytes(), &bytes[at..]].concat().into(),
        None => bytes,
    }
}

enum Read {
    Bytes,
    End,
    Broken,
    Silent,
    Stopped,
}
