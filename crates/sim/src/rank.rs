//! One engine rank: the core behind a lock, its step task, and the clients of its requests.
//! Invariant: whoever changes the core wakes the step task; a step's events are on the wire before
//! its outputs reach a client, unless the publisher is held.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use tokio::sync::{Notify, mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use crate::core::Engine;
use crate::core::control::{Failure, PauseAsk};
use crate::core::request::{Ask, Finish, Output, RequestId};
use crate::core::tier::Tier;
use crate::encode::Encoding;
use crate::faults::Faults;
use crate::metrics::Latencies;
use crate::publisher::Batch;

/// A rank; see the module.
pub(crate) struct Rank {
    pub(crate) index: u32,
    state: Mutex<State>,
    work: Notify,
    rest: Notify,
}

pub(crate) struct State {
    pub(crate) engine: Engine,
    clients: HashMap<RequestId, Client>,
    /// What the last step put out, until its events are on the wire.
    undelivered: Vec<Output>,
    waiting: HashMap<u64, oneshot::Sender<Result<(), Failure>>>,
    next_id: u64,
    pub(crate) latencies: Latencies,
    pub(crate) is_dead: bool,
}

struct Client {
    outputs: mpsc::Sender<Output>,
    prompt_tokens: usize,
    max_tokens: usize,
    arrived: Instant,
    first: Option<Instant>,
    last: Option<Instant>,
    tokens: usize,
}

/// How the step task runs.
pub(crate) struct Steps {
    pub(crate) pace: Duration,
    pub(crate) batches: mpsc::Sender<Batch>,
    pub(crate) encoding: Encoding,
    pub(crate) faults: Arc<Faults>,
}

/// The outputs of one request. Dropping it early tells the engine that the client is gone.
pub(crate) struct Outputs {
    rank: Arc<Rank>,
    id: RequestId,
    receiver: mpsc::Receiver<Output>,
    ended: bool,
}

impl Outputs {
    /// The next output; none after the last one.
    pub(crate) fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Output>> {
        if self.ended {
            return Poll::Ready(None);
        }
        let output = self.receiver.poll_recv(context);
        if let Poll::Ready(output) = &output {
            self.ended = output.as_ref().is_none_or(|output| output.finish.is_some());
        }
        output
    }
}

impl Drop for Outputs {
    fn drop(&mut self) {
        if !self.ended {
            let mut state = self.rank.lock();
            state.clients.remove(&self.id);
            state.engine.cancel(&[self.id]);
            drop(state);
            self.rank.work.notify_one();
        }
    }
}

impl Rank {
    pub(crate) fn new(index: u32, engine: Engine) -> Self {
        let state = State {
            engine,
            clients: HashMap::new(),
            undelivered: Vec::new(),
            waiting: HashMap::new(),
            next_id: 0,
            latencies: Latencies::default(),
            is_dead: false,
        };
        Self { index, state: Mutex::new(state), work: Notify::new(), rest: Notify::new() }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Requests that have not ended.
    pub(crate) fn load(&self) -> usize {
        self.lock().clients.len()
    }

    /// Queues a request; `ask.id` is assigned here.
    pub(crate) fn submit(self: &Arc<Self>, mut ask: Ask) -> Outputs {
        // One output a token, and the abort's.
        let (sender, receiver) = mpsc::channel(ask.max_tokens + 1);
        let mut state = self.lock();
        state.next_id += 1;
        let id = state.next_id;
        ask.id = id;
        if state.is_dead {
            let _ = sender.try_send(Output {
                id,
                tokens: Vec::new(),
                finish: Some(Finish::Error),
                cached: None,
            });
        } else {
            let client = Client {
                outputs: sender,
                prompt_tokens: ask.prompt.len(),
                max_tokens: ask.max_tokens,
                arrived: Instant::now(),
                first: None,
                last: None,
                tokens: 0,
            };
            state.clients.insert(id, client);
            state.engine.add(ask);
        }
        drop(state);
        self.work.notify_one();
        Outputs { rank: Arc::clone(self), id, receiver, ended: false }
    }

    /// Runs a change of the core and wakes the step task.
    pub(crate) fn change<T>(&self, edit: impl FnOnce(&mut Engine) -> T) -> T {
        let result = edit(&mut self.lock().engine);
        self.work.notify_one();
        result
    }

    /// Drops requests and tells their clients.
    pub(crate) fn abort(&self, external_ids: Option<&[String]>) {
        let mut state = self.lock();
        let outputs = state.engine.abort(external_ids);
        state.deliver(outputs, Count::Nothing);
        drop(state);
        self.work.notify_one();
    }

    /// Ends every request with an error; the engine takes no more.
    pub(crate) fn die(&self) {
        let mut state = self.lock();
        state.is_dead = true;
        let outputs = state.engine.fail();
        state.deliver(outputs, Count::Nothing);
    }

    /// Stops for good, without a word to the clients.
    pub(crate) fn fall_silent(&self) {
        let mut state = self.lock();
        state.is_dead = true;
        state.undelivered.clear();
    }

    /// Pauses or sleeps; waits for idleness where the engine does.
    pub(crate) async fn pause(&self, ask: PauseAsk) -> Result<(), Failure> {
        let receiver = {
            let mut state = self.lock();
            state.next_id += 1;
            let ticket = state.next_id;
            let (aborted, done) = state.engine.pause(ask, ticket);
            state.deliver(aborted, Count::Finished);
            if let Some(done) = done {
                self.work.notify_one();
                return done;
            }
            let (sender, receiver) = oneshot::channel();
            state.waiting.insert(ticket, sender);
            receiver
        };
        self.work.notify_one();
        receiver.await.unwrap_or_else(|_| Err(Failure("the engine stopped".into())))
    }

    /// Takes the shared store's content out at the end of a life.
    pub(crate) fn take_remote(&self) -> Option<Tier> {
        self.lock().engine.take_remote()
    }

    /// Waits until the step task has nothing to do.
    pub(crate) async fn at_rest(&self) {
        loop {
            let rest = self.rest.notified();
            tokio::pin!(rest);
            rest.as_mut().enable();
            if self.lock().is_at_rest() {
                return;
            }
            rest.await;
        }
    }

    /// Steps whenever there is work, until stopped.
    pub(crate) async fn run(self: Arc<Self>, steps: Steps, stop: CancellationToken) {
        stop.run_until_cancelled(async {
            loop {
                if !self.lock().has_work() {
                    self.rest.notify_waiters();
                    self.work.notified().await;
                    continue;
                }
                steps.faults.step_granted().await;
                // Only a step that computes takes the model's time.
                if steps.pace.is_zero() || !self.lock().engine.has_unfinished() {
                    tokio::task::yield_now().await;
                } else {
                    tokio::time::sleep(steps.pace).await;
                }
                self.step(&steps).await;
            }
        })
        .await;
    }

    /// One step, and the bookkeeping steps that follow when nothing is left to compute: the
    /// engine takes them before a client can answer the last output.
    async fn step(&self, steps: &Steps) {
        let mut follows = true;
        while follows {
            let events = {
                let mut state = self.lock();
                // A control call during the pace may have taken the work away.
                if !state.has_work() {
                    break;
                }
                let step = state.engine.step();
                follows = !state.engine.has_unfinished() && state.engine.has_work();
                state.latencies.step(step.computed_tokens);
                state.undelivered.extend(step.outputs);
                step.events
            };
            if !events.is_empty() {
                let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
                let payload = steps.encoding.batch(now.as_secs_f64(), &events, self.index);
                steps.publish(payload).await;
            }
        }
        let mut state = self.lock();
        state.deliver(Vec::new(), Count::Finished);
        state.settle();
    }
}

impl Steps {
    /// Hands a batch to the publisher and waits until it is on the wire. vLLM queues a step's
    /// events before its outputs, which have to pass through the front end's process: they come
    /// 1.4 ms before the answer in the median, and after it where the machine is short of cores
    /// (0.32.0, observed). A publisher that is held up holds no output up.
    async fn publish(&self, payload: Vec<u8>) {
        let (sent, is_sent) = oneshot::channel();
        // The publisher lives as long as this task.
        let _ = self.batches.send(Batch { payload, sent }).await;
        tokio::select! {
            biased;
            _ = is_sent => {}
            () = self.faults.publisher_held() => {}
        }
    }
}

/// Whether ends are counted in the success metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Count {
    Finished,
    /// Ends that the front end asked for are not (vLLM 0.32.0, observed).
    Nothing,
}

impl State {
    fn has_work(&mut self) -> bool {
        self.settle();
        !self.is_dead && self.engine.has_work()
    }

    fn is_at_rest(&mut self) -> bool {
        !self.has_work() && self.undelivered.is_empty()
    }

    fn settle(&mut self) {
        for (ticket, result) in self.engine.settle_idle() {
            if let Some(sender) = self.waiting.remove(&ticket) {
                // The caller may have gone; the pause stands.
                let _ = sender.send(result);
            }
        }
    }

    /// Gives clients what steps put out before, and then `outputs`.
    fn deliver(&mut self, outputs: Vec<Output>, count: Count) {
        let before = std::mem::take(&mut self.undelivered);
        self.give(before, Count::Finished);
        self.give(outputs, count);
    }

    fn give(&mut self, outputs: Vec<Output>, count: Count) {
        for output in outputs {
            let Some(client) = self.clients.get_mut(&output.id) else { continue };
            let now = Instant::now();
            if !output.tokens.is_empty() {
                match client.last {
                    None => self.latencies.first_token(now - client.arrived),
                    Some(last) => self.latencies.next_token(now - last),
                }
                client.first.get_or_insert(now);
                client.last = Some(now);
                client.tokens += output.tokens.len();
            }
            let (id, finish) = (output.id, output.finish.clone());
            // Room for every output was made at submission.
            let _ = client.outputs.try_send(output);
            if finish.is_some() && count == Count::Nothing {
                self.clients.remove(&id);
            } else if let Some(finish) = finish {
                let decode = client.last.zip(client.first).map_or(Duration::ZERO, |(l, f)| l - f);
                self.latencies.finished(crate::metrics::Finished {
                    reason: finish.as_str(),
                    prompt_tokens: client.prompt_tokens,
                    max_tokens: client.max_tokens,
                    tokens: client.tokens,
                    total: now - client.arrived,
                    decode,
                });
                self.clients.remove(&id);
            }
        }
    }
}
