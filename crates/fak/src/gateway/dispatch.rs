//! A request's way to a worker: who can take it, who is best, and who is next when that one fails.
//!
//! Invariant: a request enters a worker that serves, through its door, or none; and it moves to
//! another only while its client has seen nothing of an answer.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use fak_kernel::Phase;
use fak_wire::openai::Request;
use http::header::{CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, HeaderMap, HeaderValue};
use http::{Response, StatusCode};
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::audit::Audit;
use super::body::{Body, Whole};
use super::choosing::{OnRank, place};
use super::claim::{Claim, NoClaim};
use super::error::Problem;
use super::following::Following;
use super::frames::Frames;
use super::offer::Offer;
use super::predicted::Chunks;
use super::reading::{Opening, Reading};
use super::relay::{Reader, Relay};
use super::salts::keeps_apart;
use super::silence::{Silence, Vigil};
use super::ticket::{Aboard, Ticket};
use super::weights::Dispatched;
use super::{Shared, Unanswered, headers, models};
use crate::engine::{self, Data, NEVER, Outgoing, Streaming};
use crate::fleet::{Inside, Snapshot, View};
use crate::sessions::Turn;

/// Workers that are lost while they have one request; a third does not get it.
const WORKERS_LOST_MAX: usize = 2;

/// How often those who wait for a worker look, besides being woken: a door opens without a word.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// A request that is ready to be sent.
pub(super) struct Job {
    pub(super) route: Data,
    /// What is sent where its salt stays as it is, and by which headers.
    pub(super) body: Bytes,
    pub(super) headers: HeaderMap,
    pub(super) model: Option<String>,
    /// The body's fields, where a salt can be written into it.
    pub(super) fields: Option<Request>,
    /// The route is one whose answers fak reads.
    pub(super) is_read: bool,
    /// The salt of its tenant, its session and itself.
    pub(super) salt: Option<Arc<str>>,
    pub(super) is_stream: bool,
    /// fak asked for usage, the client did not.
    pub(super) cuts_usage: bool,
    pub(super) choices: usize,
    /// The prompt by its raw bytes.
    pub(super) chunks: Chunks,
    /// The data-parallel rank that the client names.
    pub(super) rank: Option<u32>,
    pub(super) turn: Option<Turn>,
    /// The session, as the client names it.
    pub(super) session: Option<String>,
    /// When its body was there.
    pub(super) since: Instant,
    /// Room for its body.
    pub(super) _whole: Whole,
}

impl Job {
    /// The body's fields, where the route is one whose answers fak reads.
    pub(super) fn request(&self) -> Option<&Request> {
        self.fields.as_ref().filter(|_| self.is_read)
    }
}

/// A worker that was entered.
pub(super) struct Seat {
    pub(super) number: usize,
    pub(super) view: View,
    pub(super) inside: Inside,
    /// The rank that the request is sent to by name, where fak chose one.
    pub(super) on_rank: Option<OnRank>,
    pub(super) offer: Offer,
    pub(super) chunks: Chunks,
}

/// What came of choosing.
pub(super) enum Choice {
    Seat(Box<Seat>),
    Nobody,
    /// The worker has other weights than when it was chosen.
    Outdated,
}

/// What came of one worker.
pub(super) enum Attempt {
    /// An answer, begun.
    Answer(Response<Relay>),
    /// Nothing that the client has to see, unless nobody does better.
    Failed(Problem, Option<Response<Relay>>),
}

impl Shared {
    /// Sends a request to a worker, and to others while it must, and answers with what came.
    pub(super) async fn dispatch(
        &self,
        job: &Job,
        mut ticket: Ticket,
    ) -> Result<Response<Body>, Unanswered> {
        let mut tried = Vec::new();
        let mut lost = 0;
        loop {
            let seat = match self.seat(job, &tried, &mut ticket).await {
                Ok(seat) => seat,
                Err(problem) => return Err(Box::new((problem, ticket))),
            };
            tried.push(seat.number);
            let (number, worker) = (seat.number, Arc::clone(&seat.view.worker.id));
            let rank = seat.on_rank.as_ref().map(|on| on.rank);
            let trial = self.breakers.enter(number, job.route);
            let body = self.body(
                job,
                seat.offer.salt.as_ref(),
                self.asks_for_report(&seat.offer, &seat.view),
            );
            let (claim, mut aboard) = self.board(job, seat);
            if tried.len() == 1 && ticket.released.is_none() {
                self.metrics.sent(job.since.elapsed());
            }
            let attempt = self.attempt(job, body, (number, rank), &tried).await;
            self.judge(&attempt, trial, &worker, job.route);
            let (problem, fallback) = match attempt {
                Attempt::Answer(answer) => {
                    ticket.aboard = Some(aboard);
                    return Ok(self.answer(answer, &claim, tried.len(), ticket));
                }
                Attempt::Failed(problem, fallback) => (problem, fallback),
            };
            aboard.failed();
            self.suspect(number, &worker);
            lost += usize::from(problem == Problem::Cut);
            if lost >= WORKERS_LOST_MAX {
                // It may be the request that they are lost by.
                ticket.aboard = Some(aboard);
                return Err(Box::new((Problem::WorkersLost, ticket)));
            }
            let is_last = tried.len() >= self.config.attempts_max || !self.has_another(job, &tried);
            if is_last || !may_move(job, &problem, tried.len()) {
                ticket.aboard = Some(aboard);
                let claim = claim.withdrawn(NoClaim::Failed);
                return match fallback {
                    Some(answer) => Ok(self.answer(answer, &claim, tried.len(), ticket)),
                    None => Err(Box::new((problem, ticket))),
                };
            }
            self.metrics.moved.inc();
            tracing::info!(%worker, cause = problem.code(), "a request moves to another worker");
        }
    }

    /// Enters a worker: at once, or when one serves, as far as requests may wait.
    async fn seat(&self, job: &Job, tried: &[usize], ticket: &mut Ticket) -> Result<Seat, Problem> {
        if let Some(seat) = self.choose(job, tried).await {
            return Ok(seat);
        }
        let retry_after = self.config.retry_after;
        let nobody = || {
            let snapshot = self.fleet.snapshot();
            if serving(job, &snapshot, tried).next().is_some() {
                return Problem::OtherWeights { retry_after };
            }
            let nearest = models::nearest(&snapshot, job.model.as_deref());
            Problem::NobodyServes { nearest, retry_after }
        };
        if self.config.hold.requests_max == 0 {
            return Err(nobody());
        }
        let waits = Arc::clone(&self.waiting).try_acquire_owned();
        let _waits = waits.map_err(|_| Problem::HoldFull { retry_after })?;
        self.metrics.held.inc();
        let _held = Held(self);
        // One that was let go before, and has to wait again, goes back in line.
        ticket.released = None;
        let held = timeout(self.config.hold.within, self.hold(job, tried, ticket)).await;
        held.map_err(|_| nobody())
    }

    /// Waits until a worker serves, and until few enough of those who waited are on their way.
    async fn hold(&self, job: &Job, tried: &[usize], ticket: &mut Ticket) -> Seat {
        let mut fleet = self.fleet.watch();
        loop {
            let snapshot = Arc::clone(&fleet.borrow_and_update());
            if is_any(job, &snapshot, tried) {
                let release = Arc::clone(&self.release).acquire_owned().await;
                if let Some(seat) = self.choose(job, tried).await {
                    ticket.released = release.ok();
                    return seat;
                }
            }
            // Nobody changes the fleet any more when fak stops; the hold's own limit ends this.
            let _ = timeout(LOOK_EVERY, fleet.changed()).await;
        }
    }

    /// Chooses among the workers that serve the request's model, and enters.
    async fn choose(&self, job: &Job, tried: &[usize]) -> Option<Seat> {
        loop {
            let snapshot = self.fleet.snapshot();
            let candidates = candidates(job, &snapshot, tried);
            if candidates.is_empty() {
                return None;
            }
            let matched = self.matched(job, &candidates).await;
            if let Ok(matched) = &matched {
                self.owed.wait(&self.index, &matched.tokens).await;
            }
            // Not only where there is a choice now: a request that had to move is expected too.
            let has_ranks = |(_, view): &(usize, &View)| view.state.ranks.len() > 1;
            let is_one = snapshot.workers.len() < 2 && !candidates.iter().any(has_ranks);
            let chunks = if is_one { Chunks::default() } else { job.chunks.clone() };
            match self.enter(job, &candidates, matched.as_ref().map_err(|why| *why), chunks) {
                Choice::Seat(seat) => return Some(*seat),
                Choice::Nobody => return None,
                Choice::Outdated => {}
            }
        }
    }

    /// What a request holds and leaves behind on its worker.
    fn board(&self, job: &Job, seat: Seat) -> (Claim, Aboard) {
        let Seat { number, view, inside, on_rank, offer, chunks } = seat;
        let place = place(number, on_rank.as_ref().map(|on| on.rank).or(job.rank));
        let Offer { mut claim, prompt, .. } = offer;
        let worker = Arc::clone(&view.worker.id);
        if let Some(turn) = &job.turn {
            let claimed = fak_kernel::vocab::PerTier {
                gpu: u64::from(claim.tokens.gpu),
                cpu: u64::from(claim.tokens.cpu),
                disk: u64::from(claim.tokens.disk),
                remote: u64::from(claim.tokens.remote),
            };
            turn.bind(&worker, &claimed);
            // A verdict may have come between the claim and now.
            let is_stale = fak_kernel::Tier::ALL
                .iter()
                .any(|tier| claim.tokens.get(*tier) > 0 && !turn.is_warm(*tier));
            if is_stale {
                claim = Claim::none(NoClaim::Lost);
            }
        }
        let prediction = (!chunks.is_empty()).then(|| {
            let predictions = self.predictions(job);
            predictions.add(&chunks, place, Instant::now());
            self.metrics.predicted.inc();
            (Arc::clone(predictions), chunks, place)
        });
        let audit = job.is_read.then(|| {
            let audit = Audit {
                worker: Arc::clone(&worker),
                life: view.state.incarnation.clone(),
                lives: view.state.lives,
                claim: None,
                prompt,
                turn: job.turn.clone(),
                is_single: job.choices == 1,
            };
            (self.audits.clone(), audit)
        });
        let weights = Dispatched::new(self.fleet.clone(), number, view.state.weights());
        let pinned = on_rank.as_ref().map(|on| on.rank).or(job.rank);
        let _on_rank = on_rank;
        (claim, Aboard { worker, inside, _on_rank, pinned, audit, prediction, weights })
    }

    /// Sends the request to a worker, and to a rank of it by name, and waits for the first of its
    /// answer.
    async fn attempt(
        &self,
        job: &Job,
        body: Bytes,
        (number, rank): (usize, Option<u32>),
        tried: &[usize],
    ) -> Attempt {
        let snapshot = self.fleet.snapshot();
        let Some(view) = snapshot.workers.get(number) else {
            return Attempt::Failed(Problem::Unreachable, None);
        };
        let engine = &view.worker.engine;
        let timeouts = engine.client().timeouts();
        let within = if job.is_stream { timeouts.first_byte } else { timeouts.unary };
        let vigil = Vigil::new(self.fleet.clone(), Arc::clone(&view.worker.id));
        let mut silence = Silence::new(vigil, within, timeouts.idle);
        let mut headers = job.headers.clone();
        if let Some(rank) = rank {
            headers.insert(headers::RANK, rank.into());
        }
        let outgoing = Outgoing::to(engine.endpoints().data(job.route)).headers(headers).body(body);
        let patience = self.deferred.of(number);
        let opened = match patience.clone() {
            None => {
                let open = engine.client().open_within(outgoing, NEVER);
                self.watched(job, number, tried, in_time(&mut silence, within, open)).await
            }
            Some(patience) => {
                let client = engine.client().clone();
                let open = patience.over(async move { client.open_within(outgoing, NEVER).await });
                self.watched(job, number, tried, in_time(&mut silence, within, open)).await
            }
        };
        let streaming = match opened {
            None => return Attempt::Failed(self.why_left(number), None),
            Some(Err(error)) => {
                tracing::debug!(worker = %view.worker.id, %error, "no answer");
                return Attempt::Failed(Problem::from(&error), None);
            }
            Some(Ok(streaming)) => streaming,
        };
        if let Some(problem) = not_for_clients(job, &streaming) {
            tracing::error!(worker = %view.worker.id, %problem, "an answer is refused");
            return Attempt::Failed(problem, None);
        }
        let answer = self.relayed(job, streaming, silence).map(|relay| relay.leave_with(patience));
        match answer.status() {
            StatusCode::OK if answer.body().is_events() => {
                self.first_bytes(job, number, tried, answer).await
            }
            StatusCode::OK if answer.body().is_whole() => {
                let mut answer = answer;
                let open = answer.body_mut().open_whole();
                let opened = self.watched(job, number, tried, open).await;
                self.opened(number, opened, answer)
            }
            status @ (StatusCode::BAD_GATEWAY
            | StatusCode::SERVICE_UNAVAILABLE
            | StatusCode::GATEWAY_TIMEOUT) => {
                tracing::debug!(worker = %view.worker.id, %status, "the engine is not available");
                Attempt::Failed(Problem::Unreachable, Some(answer))
            }
            // It lists the model, or it would not have been chosen.
            StatusCode::NOT_FOUND if job.model.is_some() => {
                tracing::info!(worker = %view.worker.id, model = ?job.model, "answers 404 to it");
                Attempt::Failed(Problem::Unlisted, Some(answer))
            }
            _ => Attempt::Answer(answer),
        }
    }

    /// Why a request does not wait for its worker any longer: it is lost, or it only stopped
    /// serving.
    fn why_left(&self, number: usize) -> Problem {
        let snapshot = self.fleet.snapshot();
        let is_lost = |view: &View| {
            let state = &view.state;
            !state.is_reachable || !state.is_progressing || state.phase() == Phase::Error
        };
        let is_lost = snapshot.workers.get(number).is_none_or(is_lost);
        if is_lost { Problem::Cut } else { Problem::Left }
    }

    /// Holds a stream's head back until its first bytes, or for as long as the client can do
    /// without: until then the request can still move. vLLM answers a stream's head at once, and
    /// then says nothing while it is paused or asleep (0.32.0, observed).
    async fn first_bytes(
        &self,
        job: &Job,
        number: usize,
        tried: &[usize],
        mut answer: Response<Relay>,
    ) -> Attempt {
        let head_within = self.config.head_within;
        // With comments for the time without a byte the head goes before the first of them.
        let by = job.since + self.config.keep_alive.map_or(head_within, |k| k.min(head_within));
        let opened = {
            let open = timeout_at(by, answer.body_mut().open());
            self.watched(job, number, tried, open).await
        };
        match opened {
            // Not yet: the client gets the head, and the rest when it comes.
            Some(Err(_)) => Attempt::Answer(answer),
            opened => self.opened(number, opened.and_then(Result::ok), answer),
        }
    }

    /// What the beginning of an answer comes to.
    fn opened(
        &self,
        number: usize,
        opened: Option<Result<Opening, Problem>>,
        answer: Response<Relay>,
    ) -> Attempt {
        match opened {
            None => Attempt::Failed(self.why_left(number), None),
            Some(Ok(Opening::Fine)) => Attempt::Answer(answer),
            // An empty stream that says nothing of its end would pass for an answer.
            Some(Ok(Opening::Dropped)) => Attempt::Failed(Problem::Dropped, None),
            Some(Ok(Opening::Empty)) => Attempt::Failed(Problem::Empty, Some(answer)),
            Some(Ok(Opening::Unavailable)) => Attempt::Failed(Problem::Unreachable, Some(answer)),
            Some(Err(problem)) => Attempt::Failed(problem, None),
        }
    }

    /// Waits for `what`, and meanwhile watches the worker: `None` once it no longer serves and
    /// another could.
    async fn watched<T>(
        &self,
        job: &Job,
        number: usize,
        tried: &[usize],
        what: impl Future<Output = T>,
    ) -> Option<T> {
        let mut what = std::pin::pin!(what);
        loop {
            tokio::select! {
                biased;
                done = &mut what => return Some(done),
                () = sleep(self.config.watch_every) => {}
            }
            let snapshot = self.fleet.snapshot();
            let Some(view) = snapshot.workers.get(number) else { continue };
            if !view.state.keeps_requests() && self.has_another(job, tried) {
                return None;
            }
            self.suspect(number, &view.worker.id);
        }
    }

    fn has_another(&self, job: &Job, tried: &[usize]) -> bool {
        is_any(job, &self.fleet.snapshot(), tried)
    }

    /// Has a worker looked at, though not more often than requests look themselves.
    fn suspect(&self, number: usize, worker: &Arc<str>) {
        let Some(last) = self.suspected.get(number) else { return };
        let now = Instant::now();
        {
            let mut last = last.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            if last.is_some_and(|last| now.duration_since(last) < self.config.watch_every) {
                return;
            }
            *last = Some(now);
        }
        self.doubt.suspect(worker);
    }

    /// An engine's answer, as it is relayed.
    fn relayed(&self, job: &Job, streaming: Streaming, silence: Silence) -> Response<Relay> {
        let Streaming { status, headers, body } = streaming;
        let mut headers = self.config.passing.to_client(&headers);
        let is_plain = headers.get(CONTENT_ENCODING).is_none_or(|value| value == "identity");
        let content_type = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok());
        let is_events = content_type.is_some_and(|value| value.starts_with("text/event-stream"));
        let reader = if status != StatusCode::OK || !is_plain {
            Reader::Unread
        } else if is_events {
            let following = match job.is_read {
                true => Following::Chunks(Reading::new(job.choices, job.cuts_usage)),
                false => Following::unread(job.route),
            };
            Reader::Events(Frames::default(), Box::new(following))
        } else if job.is_read {
            Reader::Whole(Box::default())
        } else {
            Reader::Unread
        };
        if is_events {
            headers.remove(CONTENT_LENGTH);
            headers.insert(headers::BUFFERING, HeaderValue::from_static("no"));
        }
        let relay = Relay::new(body.into_incoming(), reader, silence, self.cutoff.clone());
        let mut answer = Response::new(relay);
        *answer.status_mut() = status;
        *answer.headers_mut() = headers;
        answer
    }

    /// The answer for the client.
    fn answer(
        &self,
        answer: Response<Relay>,
        claim: &Claim,
        attempts: usize,
        mut ticket: Ticket,
    ) -> Response<Body> {
        let (mut parts, mut relay) = answer.into_parts();
        let claim = if !parts.status.is_success() || relay.has_ended_badly() {
            claim.withdrawn(NoClaim::Failed)
        } else if !relay.has_begun() {
            // The request may wait in the engine's queue while others evict its blocks.
            claim.withdrawn(NoClaim::NotBegun)
        } else {
            claim.clone()
        };
        let claim = self.told(&claim, ticket.aboard.as_mut());
        let own = &mut parts.headers;
        let worker = ticket.aboard.as_ref().map(|aboard| HeaderValue::try_from(&*aboard.worker));
        if let Some(Ok(worker)) = worker {
            own.insert(headers::WORKER, worker);
        }
        let weights = ticket.aboard.as_ref().map(|aboard| &aboard.weights);
        if let Some(version) = weights.and_then(Dispatched::header) {
            own.insert(headers::WEIGHT_VERSION, version);
        }
        if let Some(mixed) = weights.and_then(Dispatched::mixed_header) {
            own.insert(headers::WEIGHT_VERSION_MIXED, mixed);
        }
        own.insert(headers::KV, claim.kv.header());
        if let Some(why) = claim.kv.no_claim() {
            own.insert(headers::KV_REASON, HeaderValue::from_static(why.as_str()));
        }
        own.insert(headers::WARM_TOKENS, claim.header());
        own.insert(headers::ATTEMPTS, HeaderValue::from(attempts));
        relay.answers(parts.status);
        relay.keep_alive(self.config.keep_alive);
        relay.board(ticket);
        Response::from_parts(parts, Body::relay(relay))
    }
}

/// `open`, unless the worker is silent for too long before it is done.
async fn in_time<T>(
    silence: &mut Silence,
    within: Duration,
    open: impl Future<Output = Result<T, engine::Error>>,
) -> Result<T, engine::Error> {
    tokio::select! {
        biased;
        opened = open => opened,
        () = silence.too_long() => {
            Err(engine::Error::TimedOut { wait: engine::Wait::FirstByte, after: within })
        }
    }
}

/// An answer that is between the worker and fak: a client would take the refusal of fak's key for
/// one of its own, and follow a redirect past fak. Also a stream of whose bytes fak would have to
/// cut its own usage, and cannot.
fn not_for_clients(job: &Job, answer: &Streaming) -> Option<Problem> {
    let status = answer.status;
    let is_refusal = [401, 403, 407].contains(&status.as_u16());
    if is_refusal || status.is_redirection() || status.is_informational() {
        return Some(Problem::Refused { status: status.as_u16() });
    }
    let header = |name| answer.headers.get(name).and_then(|value| value.to_str().ok());
    let encoding = header(CONTENT_ENCODING).filter(|value| *value != "identity")?;
    (job.cuts_usage && status == StatusCode::OK).then(|| Problem::Encoded(encoding.into()))
}

/// Whether the request may go to another worker after `problem`, as the last of so many tries.
fn may_move(job: &Job, problem: &Problem, tries: usize) -> bool {
    match problem {
        // An answer that is not streamed is silent while it is computed: it would be computed
        // again.
        Problem::Silent => job.is_stream,
        // The second says that it is the request.
        Problem::Empty => tries < 2,
        problem => problem.is_retryable(),
    }
}

/// Bytes of English that make a token, where nobody counted.
pub(super) const BYTES_PER_TOKEN: usize = 4;

/// Counts a request that waits.
struct Held<'a>(&'a Shared);

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.metrics.held.dec();
    }
}

/// Those that the request may be sent to, with their number in the fleet.
fn candidates<'a>(job: &Job, snapshot: &'a Snapshot, tried: &[usize]) -> Vec<(usize, &'a View)> {
    serving(job, snapshot, tried).filter(|(_, view)| keeps_apart(job, &view.state)).collect()
}

/// Those that serve the request's model and were not tried.
fn serving<'a>(
    job: &Job,
    snapshot: &'a Snapshot,
    tried: &[usize],
) -> impl Iterator<Item = (usize, &'a View)> {
    let can = |(number, view): &(usize, &View)| {
        view.state.is_serving()
            && !view.worker.door.is_shut()
            && models::serves(&view.state, job.model.as_deref())
            && !tried.contains(number)
    };
    snapshot.workers.iter().enumerate().filter(can)
}

fn is_any(job: &Job, snapshot: &Snapshot, tried: &[usize]) -> bool {
    !candidates(job, snapshot, tried).is_empty()
}
