//! Bodies: what comes in, bounded, and what goes out, relayed.
//!
//! Invariant: a request's body is never larger than the limit, whether or not its length was told,
//! nor waited for without end, and all bodies in flight together are bounded; what is relayed waits
//! for its reader.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt as _;
use hyper::body::{Body as HttpBody, Frame, SizeHint};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use super::error::Problem;
use super::relay::Relay;
use crate::engine::BoxError;

/// An answer's body.
#[derive(Debug)]
pub struct Body(Kind);

#[derive(Debug)]
enum Kind {
    Full(Option<Bytes>),
    Relay(Box<Relay>),
}

impl Body {
    /// A body that is all there.
    #[must_use]
    pub fn full(bytes: Bytes) -> Self {
        Self(Kind::Full(Some(bytes).filter(|bytes| !bytes.is_empty())))
    }

    pub(super) fn relay(relay: Relay) -> Self {
        Self(Kind::Relay(Box::new(relay)))
    }
}

impl HttpBody for Body {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        match &mut self.0 {
            Kind::Full(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Kind::Relay(relay) => relay.poll(cx).map(|bytes| bytes.map(|b| b.map(Frame::data))),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.0 {
            Kind::Full(bytes) => bytes.is_none(),
            Kind::Relay(relay) => relay.is_over(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.0 {
            Kind::Full(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, Bytes::len) as u64),
            Kind::Relay(_) => SizeHint::default(),
        }
    }
}

/// How long nothing of a request's body may come: one that stays away holds room that others need.
pub(super) const SILENCE: Duration = Duration::from_secs(30);

/// Bytes that one permit stands for.
const PERMIT_BYTES: usize = 1024;

/// Room for bodies that came in and were not handed on yet.
#[derive(Clone, Debug)]
pub(super) struct Room {
    free: Arc<Semaphore>,
    body_bytes_max: usize,
}

/// A body that came in whole, and its room.
#[derive(Debug)]
pub(super) struct Whole {
    pub(super) bytes: Bytes,
    _room: OwnedSemaphorePermit,
}

impl Room {
    /// Room for `bytes_max` in all, at least for one body.
    pub(super) fn new(body_bytes_max: usize, bytes_max: usize) -> Self {
        let permits =
            (bytes_max.max(body_bytes_max) / PERMIT_BYTES + 1).min(Semaphore::MAX_PERMITS);
        Self { free: Arc::new(Semaphore::new(permits)), body_bytes_max }
    }

    /// Reads a body to its end.
    pub(super) async fn read<B>(&self, mut body: B) -> Result<Whole, Problem>
    where
        B: HttpBody<Data = Bytes> + Unpin,
    {
        let told = body.size_hint().exact();
        let most = usize::try_from(told.unwrap_or(0)).unwrap_or(usize::MAX);
        if most > self.body_bytes_max {
            return Err(Problem::BodyTooLarge(self.body_bytes_max));
        }
        // Without a length it may become as large as any.
        let reserved = if told.is_some() { most } else { self.body_bytes_max };
        let permits = u32::try_from(reserved / PERMIT_BYTES + 1).unwrap_or(u32::MAX);
        let room = Arc::clone(&self.free).try_acquire_many_owned(permits);
        let room = room.map_err(|_| Problem::NoRoom)?;
        let bytes = self.collect(&mut body, most).await?;
        Ok(Whole { bytes, _room: room })
    }

    /// Most bodies come in one frame, which is then not copied.
    async fn collect<B>(&self, body: &mut B, told: usize) -> Result<Bytes, Problem>
    where
        B: HttpBody<Data = Bytes> + Unpin,
    {
        let mut first = Bytes::new();
        let mut rest = BytesMut::new();
        let slow = |_| Problem::BodySlow;
        while let Some(frame) = timeout(SILENCE, body.frame()).await.map_err(slow)? {
            let Ok(data) = frame.map_err(|_| Problem::BodyCut)?.into_data() else { continue };
            if first.is_empty() {
                first = data;
            } else {
                if rest.is_empty() {
                    rest.reserve(told.max(first.len() + data.len()));
                    rest.extend_from_slice(&first);
                }
                rest.extend_from_slice(&data);
            }
            if first.len().max(rest.len()) > self.body_bytes_max {
                return Err(Problem::BodyTooLarge(self.body_bytes_max));
            }
        }
        Ok(if rest.is_empty() { first } else { rest.freeze() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A body of which nothing comes.
    struct Silent;

    impl HttpBody for Silent {
        type Data = Bytes;
        type Error = BoxError;

        fn poll_frame(
            self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
            Poll::Pending
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_that_does_not_come_gives_its_room_back() {
        let room = Room::new(1000, 1000);
        let (silent, whole) = (room.read(Silent), async {
            // Once the silent one has taken all there is.
            while room.free.available_permits() > 0 {
                tokio::task::yield_now().await;
            }
            assert!(matches!(room.read(Body::full(Bytes::new())).await, Err(Problem::NoRoom)));
        });
        let minutes = std::time::Duration::from_secs(600);
        let (silent, ()) = tokio::join!(tokio::time::timeout(minutes, silent), whole);
        let silent = silent.expect("it is not waited for without end");
        assert_eq!(silent.expect_err("nothing came"), Problem::BodySlow);
        room.read(Body::full(Bytes::new())).await.expect("there is room again");
    }
}
