//! Publishes batches over ZeroMQ and replays them, as vLLM's publisher thread does.
//! Invariant: numbers are given in the order of publication, from 0 in every life of a process;
//! replay is served between publications.
//!
//! Follows vLLM 0.32.0 `distributed/kv_events.py`.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;
use zeromq::{PubSocket, RouterRecvHalf, RouterSendHalf, SocketRecv, SocketSend, ZmqMessage};

use crate::faults::{BatchFate, Faults};

/// Batches kept for replay (`buffer_steps`).
pub(crate) const BUFFER_STEPS: usize = 10_000;

/// Batches that wait for publication before the engine has to (`max_queue_size`).
pub(crate) const QUEUE_MAX: usize = 100_000;

/// Turns that zeromq's own tasks need until a message is written: one finds the subscribers, and
/// one for each writes.
const TURNS_TO_WRITE: usize = 4;

const END_SEQ: [u8; 8] = [0xff; 8];

/// A batch on its way out.
pub(crate) struct Batch {
    pub(crate) payload: Vec<u8>,
    /// Dropped once the batch is on the wire, or will never be.
    pub(crate) sent: oneshot::Sender<()>,
}

/// The publisher of one rank.
pub(crate) struct Publisher {
    pub(crate) publish: PubSocket,
    pub(crate) replay: (RouterSendHalf, RouterRecvHalf),
    pub(crate) topic: Bytes,
    pub(crate) replay_topic: bool,
    pub(crate) faults: Arc<Faults>,
}

enum Event {
    Batch(Option<Batch>),
    /// The batch at hand may go out.
    Released,
    Replay(Option<ZmqMessage>),
    Stop,
}

impl Publisher {
    /// Publishes what arrives, until stopped.
    pub(crate) async fn run(mut self, mut batches: mpsc::Receiver<Batch>, stop: CancellationToken) {
        let mut next_seq = 0u64;
        let mut buffer: VecDeque<(u64, Bytes)> = VecDeque::new();
        let mut held: Option<Batch> = None;
        loop {
            let faults = Arc::clone(&self.faults);
            let event = tokio::select! {
                biased;
                () = stop.cancelled() => Event::Stop,
                request = self.replay.1.recv() => Event::Replay(request.ok()),
                batch = batches.recv(), if held.is_none() => Event::Batch(batch),
                () = faults.publisher_released(), if held.is_some() => Event::Released,
            };
            match event {
                Event::Stop | Event::Batch(None) => return,
                Event::Batch(batch) => held = batch,
                Event::Released => {
                    if let Some(Batch { payload, sent }) = held.take() {
                        self.publish(payload.into(), &mut next_seq, &mut buffer).await;
                        drop(sent);
                    }
                }
                Event::Replay(Some(request)) => self.serve_replay(request, &buffer).await,
                Event::Replay(None) => {}
            }
        }
    }

    async fn publish(
        &mut self,
        payload: Bytes,
        next_seq: &mut u64,
        buffer: &mut VecDeque<(u64, Bytes)>,
    ) {
        let fate = self.faults.batch_fate();
        if fate == BatchFate::Ignore {
            return;
        }
        let seq = *next_seq;
        *next_seq += 1;
        let copies = match fate {
            BatchFate::Send => 1,
            BatchFate::SendTwice => 2,
            BatchFate::Drop | BatchFate::Lose | BatchFate::Ignore => 0,
        };
        for _ in 0..copies {
            let frames = [self.topic.clone(), seq_frame(seq), payload.clone()];
            // A publisher without readers, or with stalled ones, drops: as ZeroMQ does.
            let _ = self.publish.send(message(frames)).await;
        }
        for _ in 0..TURNS_TO_WRITE {
            tokio::task::yield_now().await;
        }
        if fate != BatchFate::Lose {
            if buffer.len() == BUFFER_STEPS {
                buffer.pop_front();
            }
            buffer.push_back((seq, payload));
        }
    }

    /// Answers a request of three frames: identity, empty, first number wanted. Anything else is
    /// ignored in silence.
    async fn serve_replay(&mut self, request: ZmqMessage, buffer: &VecDeque<(u64, Bytes)>) {
        let frames = request.into_vec();
        let [client, _, start] = frames.as_slice() else { return };
        let start = big_endian(start);
        for (seq, payload) in buffer.iter().filter(|(seq, _)| u128::from(*seq) >= start) {
            self.reply(client, self.topic.clone(), seq_frame(*seq), payload.clone()).await;
        }
        if !self.faults.is_replay_endless() {
            let end = Bytes::from_static(&END_SEQ);
            self.reply(client, Bytes::new(), end, Bytes::new()).await;
        }
    }

    async fn reply(&mut self, client: &Bytes, topic: Bytes, seq: Bytes, payload: Bytes) {
        let topic = self.replay_topic.then_some(topic);
        let frames = [client.clone(), Bytes::new()].into_iter().chain(topic).chain([seq, payload]);
        // A client that went away misses its replay; nobody else does.
        let _ = self.replay.0.send(message(frames)).await;
    }
}

fn seq_frame(seq: u64) -> Bytes {
    Bytes::copy_from_slice(&seq.to_be_bytes())
}

/// A big-endian number of any length; beyond 128 bits it is beyond every number.
fn big_endian(bytes: &[u8]) -> u128 {
    bytes
        .iter()
        .fold(0u128, |n, byte| n.checked_mul(256).map_or(u128::MAX, |n| n | u128::from(*byte)))
}

fn message(frames: impl IntoIterator<Item = Bytes>) -> ZmqMessage {
    let frames: Vec<Bytes> = frames.into_iter().collect();
    ZmqMessage::try_from(frames).expect("every message has frames")
}
