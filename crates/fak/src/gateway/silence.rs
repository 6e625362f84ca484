//! How long a worker has said nothing to a request, and what does not count as silence.
//!
//! Invariant: a worker whose own counters move is not silent; and while fak itself keeps a worker
//! at rest the clocks of its requests stand still, and start anew when it goes on.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::time::{Instant, Sleep, sleep_until};

use crate::fleet::Fleet;

/// Where a request's worker stands.
#[derive(Clone, Debug)]
pub(super) struct Vigil {
    fleet: Fleet,
    worker: Arc<str>,
}

impl Vigil {
    pub(super) fn new(fleet: Fleet, worker: Arc<str>) -> Self {
        Self { fleet, worker }
    }

    /// Since when a worker that was last heard then says nothing; none while fak keeps it at rest.
    fn silent_since(&self, heard: Instant) -> Option<Instant> {
        let snapshot = self.fleet.snapshot();
        let Some(view) = snapshot.get(&self.worker) else { return Some(heard) };
        let pace = view.state.pace;
        (!pace.is_kept_at_rest).then(|| pace.moved_at.map_or(heard, |moved| moved.max(heard)))
    }
}

/// The clock of one request. It has one timer, set again only when it fires and at the first byte:
/// a chunk costs a clock reading.
#[derive(Debug)]
pub(super) struct Silence {
    timer: Pin<Box<Sleep>>,
    vigil: Vigil,
    heard: Instant,
    /// How long nothing may come now, and after the first byte.
    most: Duration,
    idle: Duration,
}

impl Silence {
    /// Begins now, with `first` for the first byte and `idle` after it.
    pub(super) fn new(vigil: Vigil, first: Duration, idle: Duration) -> Self {
        let heard = Instant::now();
        let timer = Box::pin(sleep_until(heard + first));
        Self { timer, vigil, heard, most: first, idle }
    }

    /// The worker sent something.
    pub(super) fn heard(&mut self) {
        self.heard = Instant::now();
        if self.most != self.idle {
            self.most = self.idle;
            self.timer.as_mut().reset(self.heard + self.idle);
        }
    }

    /// Ready once it has lasted too long. Wakes the task when it has.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        use std::future::Future as _;
        loop {
            ready!(self.timer.as_mut().poll(cx));
            let now = Instant::now();
            // Of a worker at rest the time until it goes on is not known: it is looked at again.
            let since = self.vigil.silent_since(self.heard).unwrap_or(now);
            let until = since + self.most;
            if until <= now {
                return Poll::Ready(());
            }
            self.timer.as_mut().reset(until);
        }
    }

    /// Waits until it has lasted too long.
    pub(super) async fn too_long(&mut self) {
        std::future::poll_fn(|cx| self.poll(cx)).await;
    }
}

/// Comments for the client of a stream while its worker says nothing.
#[derive(Debug)]
pub(super) struct KeepAlive {
    timer: Pin<Box<Sleep>>,
    given: Instant,
    every: Duration,
}

impl KeepAlive {
    /// The comment: an event of its own without data, which clients pass over.
    pub(super) const COMMENT: &'static [u8] = b": keep-alive\n\n";

    /// Begins now.
    pub(super) fn new(every: Duration) -> Self {
        let given = Instant::now();
        Self { timer: Box::pin(sleep_until(given + every)), given, every }
    }

    /// The client got something.
    pub(super) fn given(&mut self) {
        self.given = Instant::now();
    }

    /// Ready when a comment is due.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        use std::future::Future as _;
        loop {
            ready!(self.timer.as_mut().poll(cx));
            let now = Instant::now();
            let (due, next) = (self.given + self.every, now + self.every);
            if due <= now {
                self.given = now;
                self.timer.as_mut().reset(next);
                return Poll::Ready(());
            }
            self.timer.as_mut().reset(due);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{Client, Endpoints, Engine, Timeouts};
    use crate::fleet::{Door, Pace, Worker};

    const FIRST: Duration = Duration::from_secs(120);
    const IDLE: Duration = Duration::from_secs(60);

    fn fleet() -> Fleet {
        let client = Client::new(None, Timeouts::default()).expect("no key");
        let endpoints = Endpoints::new("http://engine").expect("a URL");
        let engine = Engine::new(client, endpoints);
        Fleet::new([Worker { id: "w".into(), engine, door: Door::new() }])
    }

    fn silence(fleet: &Fleet) -> Silence {
        Silence::new(Vigil::new(fleet.clone(), "w".into()), FIRST, IDLE)
    }

    fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    /// At which second after now it is too long.
    async fn too_long_after(silence: &mut Silence) -> u64 {
        let begin = Instant::now();
        silence.too_long().await;
        begin.elapsed().as_secs()
    }

    async fn passes(silence: &mut Silence, time: Duration) {
        let ended = tokio::time::timeout(time, silence.too_long()).await;
        assert!(ended.is_err(), "too long within {time:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_limit_holds_to_the_second_before_and_after_the_first_byte() {
        let fleet = fleet();
        assert_eq!(too_long_after(&mut silence(&fleet)).await, 120);
        let mut silence = silence(&fleet);
        passes(&mut silence, s(5)).await;
        silence.heard();
        assert_eq!(too_long_after(&mut silence).await, 60, "the first byte ends the first limit");
    }

    #[tokio::test(start_paused = true)]
    async fn a_worker_that_makes_progress_is_not_silent() {
        let fleet = fleet();
        let mut silence = silence(&fleet);
        let moved = || {
            let moved_at = Some(Instant::now());
            fleet.update("w", |state| state.pace.moved_at = moved_at);
        };
        // A prefill of ten minutes.
        for _ in 0..10 {
            passes(&mut silence, s(60)).await;
            moved();
        }
        assert_eq!(too_long_after(&mut silence).await, 120, "since its last step");
        silence.heard();
        passes(&mut silence, s(59)).await;
        moved();
        assert_eq!(too_long_after(&mut silence).await, 60);
    }

    #[tokio::test(start_paused = true)]
    async fn clocks_stand_still_while_fak_keeps_a_worker_at_rest_and_start_anew() {
        let fleet = fleet();
        let rest = |is_kept_at_rest, moved_at| {
            fleet.update("w", |state| state.pace = Pace { is_kept_at_rest, moved_at });
        };
        for is_begun in [false, true] {
            let mut silence = silence(&fleet);
            if is_begun {
                silence.heard();
            }
            passes(&mut silence, s(50)).await;
            rest(true, None);
            passes(&mut silence, s(3_600) + s(7)).await;
            rest(false, Some(Instant::now()));
            assert_eq!(too_long_after(&mut silence).await, if is_begun { 60 } else { 120 });
        }
    }

    #[tokio::test(start_paused = true)]
    async fn without_a_limit_nothing_is_too_long() {
        let fleet = fleet();
        let never = crate::engine::NEVER;
        let mut silence = Silence::new(Vigil::new(fleet.clone(), "w".into()), never, never);
        passes(&mut silence, s(86_400 * 365)).await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_comment_is_due_after_each_interval_without_a_byte() {
        let mut keep_alive = KeepAlive::new(s(5));
        let begin = Instant::now();
        let mut at = Vec::new();
        for number in 0..4 {
            std::future::poll_fn(|cx| keep_alive.poll(cx)).await;
            at.push(begin.elapsed().as_secs());
            if number == 1 {
                tokio::time::advance(s(3)).await;
                keep_alive.given();
            }
        }
        assert_eq!(at, [5, 10, 18, 23]);
    }
}
