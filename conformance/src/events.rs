//! KV events as they come: a subscriber, the replay socket, and generic decoding.
//! Invariant: what is decoded owes nothing to the product's decoder; a mistake there cannot
//! cancel out here.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use anyhow::{Context, bail, ensure};
use hyper::body::Bytes;
use rmpv::Value;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use zeromq::{DealerSocket, Socket, SocketRecv, SocketSend, SubSocket, ZmqMessage};

/// An answer from the publisher takes 0.1 s at most when it is idle (vLLM 0.32.0, observed).
const REPLAY_DEADLINE: Duration = Duration::from_secs(10);

/// Sequence number of the end marker.
const END: u64 = u64::MAX;

/// One published batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// The topic frame.
    pub topic: Bytes,
    /// The sequence number.
    pub seq: u64,
    /// Msgpack.
    pub payload: Bytes,
}

/// A batch that came by the live socket.
#[derive(Clone, Debug)]
pub struct Live {
    /// The batch.
    pub batch: Batch,
    /// When it came.
    pub at: SystemTime,
}

impl Batch {
    /// When the engine published it, by its own clock.
    pub fn published(&self) -> anyhow::Result<SystemTime> {
        let whole = rmpv::decode::read_value(&mut &self.payload[..]).context("not msgpack")?;
        let seconds = whole.as_array().and_then(|parts| parts.first()?.as_f64());
        let seconds = seconds.context("the payload tells no time")?;
        Ok(SystemTime::UNIX_EPOCH + Duration::try_from_secs_f64(seconds)?)
    }

    /// The events of the payload `[ts, [event...], rank]`, undecoded beyond msgpack.
    pub fn events(&self) -> anyhow::Result<Vec<Value>> {
        let whole = rmpv::decode::read_value(&mut &self.payload[..]).context("not msgpack")?;
        let Value::Array(parts) = whole else { bail!("the payload is no array") };
        ensure!(parts.len() == 3, "the payload has {} parts", parts.len());
        ensure!(parts[0].is_f64(), "the time is {}", parts[0]);
        ensure!(parts[2].as_u64() == Some(0), "the rank is {}", parts[2]);
        let Value::Array(events) = &parts[1] else { bail!("the events are {}", parts[1]) };
        Ok(events.clone())
    }
}

/// An answer of the replay socket.
#[derive(Debug)]
pub struct Replayed {
    /// The batches before the end marker.
    pub batches: Vec<Batch>,
    /// The frames of the end marker.
    pub end: Vec<Bytes>,
}

/// Follows an engine's event socket.
#[derive(Debug)]
pub struct Subscriber {
    seen: Arc<Mutex<Vec<Live>>>,
    task: JoinHandle<()>,
}

impl Drop for Subscriber {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Subscriber {
    /// Connects to `endpoint`; the publisher learns of it a little later.
    pub async fn connect(endpoint: &str) -> anyhow::Result<Self> {
        let mut socket = SubSocket::new();
        socket.connect(endpoint).await.with_context(|| endpoint.to_owned())?;
        socket.subscribe("").await?;
        let seen = Arc::new(Mutex::new(Vec::new()));
        let sink = Arc::clone(&seen);
        let task = tokio::spawn(async move {
            while let Ok(message) = socket.recv().await {
                let Some(batch) = batch(&message.into_vec()) else { continue };
                let live = Live { batch, at: SystemTime::now() };
                sink.lock().unwrap_or_else(PoisonError::into_inner).push(live);
            }
        });
        Ok(Subscriber { seen, task })
    }

    /// The batches received from `seq` on.
    pub fn since(&self, seq: u64) -> Vec<Batch> {
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let batches = seen.iter().map(|live| &live.batch);
        batches.filter(|batch| batch.seq >= seq).cloned().collect()
    }

    /// What came after the first `known` batches, each with its time.
    pub fn after(&self, known: usize) -> Vec<Live> {
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.iter().skip(known).cloned().collect()
    }
}

/// `[topic, seq, payload]`; none for anything else.
fn batch(frames: &[Bytes]) -> Option<Batch> {
    let [topic, seq, payload] = frames else { return None };
    let seq = u64::from_be_bytes(seq.as_ref().try_into().ok()?);
    Some(Batch { topic: topic.clone(), seq, payload: payload.clone() })
}

/// Asks for the batches from `start` (a big-endian integer of any length) on.
pub async fn replay(endpoint: &str, start: &[u8]) -> anyhow::Result<Replayed> {
    let mut socket = DealerSocket::new();
    socket.connect(endpoint).await.with_context(|| endpoint.to_owned())?;
    let request = vec![Bytes::new(), Bytes::copy_from_slice(start)];
    let request = ZmqMessage::try_from(request).map_err(|_| anyhow::anyhow!("no frames"))?;
    socket.send(request).await?;
    let mut batches = Vec::new();
    loop {
        let message = timeout(REPLAY_DEADLINE, socket.recv()).await.context("no replay")??;
        let frames = message.into_vec();
        ensure!(frames.first().is_some_and(Bytes::is_empty), "no delimiter in {frames:?}");
        let batch = batch(&frames[1..]).with_context(|| format!("no batch: {frames:?}"))?;
        if batch.seq == END {
            return Ok(Replayed { batches, end: frames });
        }
        batches.push(batch);
    }
}

/// Every batch from `next` on that the engine had put into its queue before this call.
///
/// The publisher serves one replay, then publishes one queued batch, and so on (vLLM 0.32.0,
/// source). An answer that brings nothing beyond the one before it therefore means that its
/// queue was empty in between.
pub async fn settle(endpoint: &str, next: u64) -> anyhow::Result<Vec<Batch>> {
    let mut batches: Vec<Batch> = Vec::new();
    let mut is_first = true;
    loop {
        let from = next + batches.len() as u64;
        let more = replay(endpoint, &from.to_be_bytes()).await?.batches;
        for (expected, batch) in (from..).zip(&more) {
            ensure!(batch.seq == expected, "batch {} came for {expected}", batch.seq);
        }
        if more.is_empty() && !is_first {
            return Ok(batches);
        }
        is_first = false;
        batches.extend(more);
    }
}
