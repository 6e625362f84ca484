//! A subscription to one rank's live KV events: connects out, reads, and connects again, for as
//! long as it is polled.
//!
//! Invariant: each epoch is one connection of its own. A batch that is yielded after
//! [`Item::Connected`] came over a connection established after everything that was yielded before
//! that item, and batches of two connections are never mixed: the old one's bytes die with it.
//!
//! What an epoch does not say: that the publisher is the same process as before, or another one
//! (compare a replayed batch for that), or where in its sequence it stands. A subscription takes
//! effect at the publisher a moment after the connection stands, and batches published up to then
//! are never sent to us; so an epoch's first batch may have any sequence number.
//!
//! A slow reader: nothing is dropped here. What is not read waits in the kernel's buffers and then
//! in the publisher, which drops beyond its own high-water mark (100,000 batches by default); that
//! loss shows as a gap in `seq`.

use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use bytes::Bytes;
use fak_wire::kv::frames;
use tokio::time::Sleep;

use super::endpoint::Endpoint;
use super::zmtp::{self, Connection, Role};
use super::{Bad, Item, Lost};
use crate::telemetry::error_chain;

/// What to subscribe to, and with what patience.
#[derive(Clone, Debug)]
pub struct Options {
    /// The publisher's PUB socket.
    pub endpoint: Endpoint,
    /// Topic prefix; empty for every topic.
    pub topic: String,
    /// Limits on what the publisher may make fak hold.
    pub limits: zmtp::Limits,
    /// Time for one attempt to connect and shake hands.
    pub connect_within: Duration,
    /// Pause before the first attempt after a loss; doubles with each attempt that fails.
    pub retry_after_min: Duration,
    /// The longest pause. Short, since a restarted engine's batches up to the next attempt are
    /// missed: at 1,000 batches a second and 2 s, the first 1,284 of a new life were (observed).
    pub retry_after_max: Duration,
}

impl Options {
    /// The defaults: 5 s an attempt, pauses from 50 to 500 ms.
    #[must_use]
    pub fn new(endpoint: Endpoint, topic: String) -> Self {
        Self {
            endpoint,
            topic,
            limits: zmtp::Limits::default(),
            connect_within: Duration::from_secs(5),
            retry_after_min: Duration::from_millis(50),
            retry_after_max: Duration::from_millis(500),
        }
    }
}

type Opening = Pin<Box<dyn Future<Output = Result<Connection, zmtp::Error>> + Send>>;

enum State {
    /// Until the next attempt.
    Pausing(Pin<Box<Sleep>>),
    /// Kept here, so that a caller that polls in a `select!` does not start the attempt over each
    /// time.
    Opening(Opening),
    Up(Box<Connection>),
}

/// A live subscription. Holds no task: it lives by [`next`](Self::next).
pub struct Subscription {
    options: Options,
    state: State,
    /// Connections so far.
    epoch: u64,
    retry_after: Duration,
    /// Attempts that failed since the last connection.
    failed: u32,
    /// A loss to be told before anything else.
    lost: Option<Lost>,
}

impl Subscription {
    /// A subscription that connects when first polled.
    #[must_use]
    pub fn new(options: Options) -> Self {
        let state = State::Opening(open(&options));
        let retry_after = options.retry_after_min;
        Self { options, state, epoch: 0, retry_after, failed: 0, lost: None }
    }

    /// The next item. Waits as long as it takes: there is no end. Nothing is lost when the future
    /// is dropped.
    ///
    /// Attempts that fail yield nothing; the first of a row is logged.
    pub async fn next(&mut self) -> Item {
        if let Some(why) = self.lost.take() {
            return Item::Disconnected { why };
        }
        loop {
            match &mut self.state {
                State::Pausing(pause) => {
                    pause.as_mut().await;
                    self.state = State::Opening(open(&self.options));
                }
                State::Opening(opening) => match opening.as_mut().await {
                    Ok(connection) => return self.on_open(connection),
                    Err(error) => self.on_failure(&error),
                },
                State::Up(connection) => match connection.recv().await {
                    Ok(frames) => {
                        // Only now, so that a peer that ends each connection at once is not asked
                        // in a hurry.
                        self.retry_after = self.options.retry_after_min;
                        return item(frames);
                    }
                    Err(error) => return self.on_loss(Lost::Connection(error)),
                },
            }
        }
    }

    /// Gives the present connection up, and what it still held, for a new one at once: for when
    /// somebody has seen that another process listens there now. [`Item::Disconnected`] comes next
    /// where there was a connection.
    pub fn reconnect(&mut self) {
        if self.is_connected() {
            self.lost = Some(Lost::Asked);
        }
        self.retry_after = self.options.retry_after_min;
        self.state = State::Opening(open(&self.options));
    }

    /// Connections so far; the present one's number while there is one.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Whether there is a connection.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        matches!(self.state, State::Up(_))
    }

    fn on_open(&mut self, connection: Connection) -> Item {
        self.state = State::Up(Box::new(connection));
        self.epoch += 1;
        self.failed = 0;
        tracing::info!(endpoint = %self.options.endpoint, epoch = self.epoch, "events connected");
        Item::Connected { epoch: self.epoch }
    }

    fn on_failure(&mut self, error: &zmtp::Error) {
        self.failed = self.failed.saturating_add(1);
        let (endpoint, error) = (&self.options.endpoint, error_chain(error));
        if self.failed == 1 {
            tracing::warn!(%endpoint, error, "events cannot connect, still trying");
        } else {
            let failed = self.failed;
            tracing::debug!(%endpoint, error, failed, "events cannot connect");
        }
        self.pause();
    }

    fn on_loss(&mut self, why: Lost) -> Item {
        let endpoint = &self.options.endpoint;
        tracing::warn!(%endpoint, epoch = self.epoch, error = error_chain(&why), "events lost");
        self.pause();
        Item::Disconnected { why }
    }

    fn pause(&mut self) {
        self.state = State::Pausing(Box::pin(tokio::time::sleep(self.retry_after)));
        self.retry_after = (self.retry_after * 2).min(self.options.retry_after_max);
    }
}

impl std::fmt::Debug for Subscription {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Subscription")
            .field("endpoint", &self.options.endpoint)
            .field("epoch", &self.epoch)
            .field("is_connected", &self.is_connected())
            .finish_non_exhaustive()
    }
}

fn open(options: &Options) -> Opening {
    let Options { endpoint, topic, limits, connect_within, .. } = options.clone();
    Box::pin(async move {
        let mut connection = Connection::open(&endpoint, Role::Sub, limits, connect_within).await?;
        let mut subscribe = vec![1];
        subscribe.extend_from_slice(topic.as_bytes());
        connection.send(&[&subscribe]).await?;
        Ok(connection)
    })
}

fn item(mut frames: Vec<Bytes>) -> Item {
    match frames::live(&frames).map(|live| live.seq) {
        Ok(seq) => Item::Batch { seq, payload: frames.pop().expect("a live message has frames") },
        Err(error) => Item::Bad { why: Bad::Frames(error) },
    }
}
