//! Bodies: what comes in, bounded, and what goes out, relayed.
//!
//! Invariant: a request's body is never larger than the limit, whatever length it announces, nor
//! waited for without end, and all bodies in flight together are bounded by the bytes that came;
//! what is relayed waits for its reader.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt as _;
use hyper::body::{Body as HttpBody, Frame, SizeHint};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout_at};

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

impl Default for Body {
    fn default() -> Self {
        Self::full(Bytes::new())
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
/// Bytes a second that a body brings at least, but for that time: else a byte now and then keeps a
/// connection, and the room of what came before, for hours.
pub(super) const BYTES_PER_SECOND_MIN: u64 = 1024;

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
        let announced = body.size_hint().exact().unwrap_or(0);
        let announced = usize::try_from(announced).unwrap_or(usize::MAX);
        if announced > self.body_bytes_max {
            return Err(Problem::BodyTooLarge(self.body_bytes_max));
        }
        let mut room = self.take(1)?;
        let bytes = self.collect(&mut body, announced, &mut room).await?;
        Ok(Whole { bytes, _room: room })
    }

    fn take(&self, permits: usize) -> Result<OwnedSemaphorePermit, Problem> {
        let permits = u32::try_from(permits).unwrap_or(u32::MAX);
        let room = Arc::clone(&self.free).try_acquire_many_owned(permits);
        room.map_err(|_| Problem::NoRoom)
    }

    /// Makes the room of a body one for `bytes`: it grows with what came, never with what was
    /// announced.
    fn grow(&self, room: &mut OwnedSemaphorePermit, bytes: usize) -> Result<(), Problem> {
        let missing = (bytes / PERMIT_BYTES + 1).saturating_sub(room.num_permits());
        if missing > 0 {
            room.merge(self.take(missing)?);
        }
        Ok(())
    }

    /// Most bodies come in one frame, which is then not copied.
    async fn collect<B>(
        &self,
        body: &mut B,
        announced: usize,
        room: &mut OwnedSemaphorePermit,
    ) -> Result<Bytes, Problem>
    where
        B: HttpBody<Data = Bytes> + Unpin,
    {
        let mut first = Bytes::new();
        let mut rest = BytesMut::new();
        let mut by = Instant::now() + SILENCE;
        loop {
            let length = first.len().max(rest.len());
            let frame = timeout_at(by, body.frame()).await.map_err(|_| Problem::BodySlow)?;
            let Some(frame) = frame else { break };
            let Ok(data) = frame.map_err(|_| Problem::BodyCut)?.into_data() else { continue };
            if length + data.len() > self.body_bytes_max {
                return Err(Problem::BodyTooLarge(self.body_bytes_max));
            }
            self.grow(room, length + data.len())?;
            // What comes fast buys no time in which nothing comes.
            by = (by + paid(data.len())).min(Instant::now() + SILENCE);
            if first.is_empty() {
                first = data;
            } else {
                if rest.is_empty() {
                    // No more than twice what came: the room is for that.
                    let length = first.len() + data.len();
                    rest.reserve(announced.clamp(length, 2 * length));
                    rest.extend_from_slice(&first);
                }
                rest.extend_from_slice(&data);
            }
        }
        Ok(if rest.is_empty() { first } else { rest.freeze() })
    }
}

/// The time that so many bytes may take at most.
fn paid(bytes: usize) -> Duration {
    Duration::from_millis(bytes as u64 * 1000 / BYTES_PER_SECOND_MIN)
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use tokio::time::{Interval, advance, interval_at};

    use super::*;

    const SOON: Duration = Duration::from_millis(1);

    /// A body of which a frame comes each time so much time has passed, and then nothing.
    struct Slow {
        frames: VecDeque<Bytes>,
        timer: Interval,
    }

    impl Slow {
        fn new(frames: usize, bytes: usize, every: Duration) -> Self {
            let frames = (0..frames).map(|_| Bytes::from(vec![b'x'; bytes])).collect();
            Self { frames, timer: interval_at(Instant::now() + every, every) }
        }
    }

    impl HttpBody for Slow {
        type Data = Bytes;
        type Error = BoxError;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            cx: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
            if self.frames.is_empty() || self.timer.poll_tick(cx).is_pending() {
                return Poll::Pending;
            }
            Poll::Ready(self.frames.pop_front().map(|data| Ok(Frame::data(data))))
        }

        fn size_hint(&self) -> SizeHint {
            SizeHint::with_exact(100_000)
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_that_does_not_come_gives_its_room_back() {
        let room = Room::new(100_000, 100_000);
        let whole = room.free.available_permits();
        let silent = Slow::new(90, 1000, SOON);
        let (silent, ()) = tokio::join!(room.read(silent), async {
            while room.free.available_permits() > whole - 88 {
                advance(SOON).await;
            }
            let large = Body::full(Bytes::from(vec![b'x'; 20_000]));
            assert!(matches!(room.read(large).await, Err(Problem::NoRoom)));
        });
        assert_eq!(silent.expect_err("it never ends"), Problem::BodySlow);
        assert_eq!(room.free.available_permits(), whole);
    }

    /// 1 GiB of room and 31 announcements of 32 MiB left no room for 2,000 bytes.
    #[tokio::test(start_paused = true)]
    async fn room_is_taken_by_the_bytes_that_came_and_not_by_those_announced() {
        let room = Room::new(100_000, 100_000);
        let announcing = (0..31).map(|_| room.read(Slow::new(1, 1, SOON)));
        let announcing = futures_util::future::join_all(announcing);
        let small = async {
            advance(Duration::from_secs(1)).await;
            let body = Body::full(Bytes::from(vec![b'x'; 50_000]));
            room.read(body).await.expect("there is room for it").bytes.len()
        };
        let (slow, length) = tokio::join!(announcing, small);
        assert_eq!(length, 50_000);
        assert!(slow.iter().all(|read| matches!(read, Err(Problem::BodySlow))));
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_has_to_bring_a_least_rate_and_a_slow_one_that_does_is_taken() {
        let room = Room::new(1 << 20, 1 << 20);
        let begun = Instant::now();
        let trickle = room.read(Slow::new(100, 1, Duration::from_secs(15))).await;
        assert_eq!(trickle.expect_err("a byte each 15 s"), Problem::BodySlow);
        assert_eq!(begun.elapsed(), SILENCE);
        let begun = Instant::now();
        let slow = room.read(Slow::new(4, 40_000, Duration::from_secs(25))).await;
        assert_eq!(slow.expect_err("it never ends"), Problem::BodySlow);
        assert!(begun.elapsed() > 4 * Duration::from_secs(25), "all of it was waited for");
    }

    /// Of 1 GiB of room 32 such bodies kept all for nine hours.
    #[tokio::test(start_paused = true)]
    async fn bytes_that_came_at_once_keep_no_room_for_hours() {
        let room = Room::new(32 << 20, 32 << 20);
        let mut body = Slow::new(1000, 1, Duration::from_secs(15));
        body.frames.push_front(Bytes::from(vec![b'x'; 31 << 20]));
        let begun = Instant::now();
        let read = room.read(body).await;
        assert_eq!(read.expect_err("a byte each 15 s"), Problem::BodySlow);
        assert_eq!(begun.elapsed(), Duration::from_secs(15) + SILENCE);
    }
}
