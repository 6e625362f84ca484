//! One replay: asks a rank's ROUTER for its batches from a sequence number on, and hands them over
//! as they come.
//!
//! Invariant: the request is sent on a connection that stands, and every batch that is yielded, and
//! the end, came back on that same connection. A request that waits in a queue while the engine is
//! down would be answered by the next engine, with an end marker alone (vLLM 0.32.0, observed),
//! which reads like "nothing missed".
//!
//! What this does not judge: holes. Up to vLLM 0.32.0 the ROUTER drops what it cannot send at once
//! beyond 1,000 batches. Asked for 10,000 batches of 12 KB over loopback, it left holes at every
//! try, at full reading speed too, and sometimes sent the end marker after a hole or in place of
//! the whole tail (observed). A start that has left the buffer is answered from a later one on, and
//! a batch that vLLM failed to send has used up a number that no replay brings. Whoever reads
//! compares each `seq` with the last, takes an end marker to say no more than "nothing newer than
//! the last batch that came will come", and asks again from the last batch before a hole: each try
//! brings its first 1,000 at least.

use std::time::Duration;

use bytes::Bytes;
use fak_wire::kv::frames::{self, FrameError, Reply};
use tokio::time::Instant;

use super::endpoint::Endpoint;
use super::zmtp::{self, Connection, Role};

/// Limits on one replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Batches in all. vLLM keeps `buffer_steps` of them, 10,000 by default.
    pub batches_max: u64,
    /// Bytes of payload in all.
    pub bytes_max: u64,
    /// Time for the connecting, for the first answer, and between two. Beyond 1,000 batches a
    /// ROUTER drops the end marker with the rest (observed), and then nothing comes any more.
    pub quiet_max: Duration,
    /// What may lie in memory at once. A large read-ahead matters here: a ROUTER up to 0.32.0 drops
    /// what a reader has not taken when 1,000 batches are waiting.
    pub wire: zmtp::Limits,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            batches_max: 1_000_000,
            bytes_max: 4 << 30,
            quiet_max: Duration::from_secs(10),
            wire: zmtp::Limits { read_ahead_bytes: 64 << 20, ..zmtp::Limits::default() },
        }
    }
}

/// A batch that was published before.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Its sequence number.
    pub seq: u64,
    /// Its msgpack bytes, as they were published.
    pub payload: Bytes,
}

/// Why a replay did not come to its end. `last_seq` is the last batch that was handed over: a next
/// try may begin there.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No connection, so nothing was asked.
    #[error("cannot ask for a replay")]
    Connect(#[source] zmtp::Error),
    /// No end marker by the deadline, or nothing for too long.
    #[error("the replay has no end by its deadline, or went quiet (last batch {last_seq:?})")]
    Timeout {
        /// The last batch that came.
        last_seq: Option<u64>,
    },
    /// The connection ended before the end marker.
    #[error("the replay was cut off (last batch {last_seq:?})")]
    Cut {
        /// The last batch that came.
        last_seq: Option<u64>,
        /// How it ended.
        #[source]
        source: zmtp::Error,
    },
    /// An answer that is neither a batch nor an end.
    #[error("a replay answer is malformed (last batch {last_seq:?})")]
    BadFrame {
        /// The last batch that came.
        last_seq: Option<u64>,
        /// What is wrong with it.
        #[source]
        source: FrameError,
    },
    /// More than was allowed for.
    #[error("the replay has more than {limit} {unit} (last batch {last_seq:?})")]
    TooLarge {
        /// The last batch that came.
        last_seq: Option<u64>,
        /// The limit.
        limit: u64,
        /// Of what.
        unit: &'static str,
    },
}

/// A replay that is running.
#[derive(Debug)]
pub struct Replay {
    connection: Connection,
    limits: Limits,
    deadline: Instant,
    /// When it was asked for, or brought something last.
    heard_at: Instant,
    last_seq: Option<u64>,
    batches: u64,
    bytes: u64,
    has_ended: bool,
}

impl Replay {
    /// Connects to the ROUTER at `endpoint` and asks for every batch from `from` on, then takes
    /// answers until `within` is over, the connecting included.
    ///
    /// An idle vLLM looks for requests every 0.1 s, and one that publishes looks between two
    /// batches.
    ///
    /// # Errors
    /// [`Error::Connect`].
    pub async fn ask(
        endpoint: &Endpoint,
        from: u64,
        limits: Limits,
        within: Duration,
    ) -> Result<Self, Error> {
        let deadline = Instant::now() + within;
        let connect_within = within.min(limits.quiet_max);
        let mut connection = Connection::open(endpoint, Role::Dealer, limits.wire, connect_within)
            .await
            .map_err(Error::Connect)?;
        let request = frames::replay_request(from);
        connection.send(&request.each_ref().map(Vec::as_slice)).await.map_err(Error::Connect)?;
        Ok(Self {
            connection,
            limits,
            deadline,
            heard_at: Instant::now(),
            last_seq: None,
            batches: 0,
            bytes: 0,
            has_ended: false,
        })
    }

    /// The next batch; `None` once the end marker has come. Nothing is lost when the future is
    /// dropped.
    ///
    /// Take them quickly: what waits here is bounded, and what waits in an engine up to 0.32.0 is
    /// dropped.
    ///
    /// # Errors
    /// The replay is over and proves nothing beyond the batches that it has yielded.
    pub async fn next(&mut self) -> Result<Option<Batch>, Error> {
        if self.has_ended {
            return Ok(None);
        }
        let last_seq = self.last_seq;
        // Asked first, since a timeout alone lets a peer go on that always has something ready.
        if Instant::now() >= self.deadline {
            return Err(Error::Timeout { last_seq });
        }
        let until = self.deadline.min(self.heard_at + self.limits.quiet_max);
        let mut frames = match tokio::time::timeout_at(until, self.connection.recv()).await {
            Ok(Ok(frames)) => frames,
            Ok(Err(source)) => return Err(Error::Cut { last_seq, source }),
            Err(_) => return Err(Error::Timeout { last_seq }),
        };
        self.heard_at = Instant::now();
        match frames::replay_reply(&frames) {
            Ok(Reply::End) => {
                self.has_ended = true;
                Ok(None)
            }
            Ok(Reply::Batch { seq, .. }) => {
                let payload = frames.pop().expect("a reply has frames");
                self.admit(Batch { seq, payload }).map(Some)
            }
            Err(source) => Err(Error::BadFrame { last_seq, source }),
        }
    }

    /// The last batch that was yielded.
    #[must_use]
    pub fn last_seq(&self) -> Option<u64> {
        self.last_seq
    }

    fn admit(&mut self, batch: Batch) -> Result<Batch, Error> {
        self.batches += 1;
        self.bytes += batch.payload.len() as u64;
        let Limits { batches_max, bytes_max, .. } = self.limits;
        for (counted, limit, unit) in
            [(self.batches, batches_max, "batches"), (self.bytes, bytes_max, "bytes")]
        {
            if counted > limit {
                return Err(Error::TooLarge { last_seq: self.last_seq, limit, unit });
            }
        }
        self.last_seq = Some(batch.seq);
        Ok(batch)
    }
}
