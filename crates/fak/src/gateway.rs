//! The data plane: from an OpenAI client to the worker that serves it best, and back byte for byte.
//!
//! Invariant: a request is a future, not a task: a client that leaves drops it, and with it the
//! engine's side. No request goes to a worker that does not serve, and what is claimed of a cache
//! is audited.

mod audit;
mod beginning;
mod body;
mod choosing;
mod claim;
mod contradicted;
mod deferred;
mod dispatch;
mod error;
mod following;
mod frames;
mod headers;
mod intake;
mod keys;
mod matching;
mod metrics;
mod miscounted;
mod models;
mod offer;
mod owed;
mod predicted;
mod prompt;
mod reading;
mod relay;
mod salts;
mod serve;
mod silence;
mod ticket;
mod verdict;
mod weights;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use fak_index::{Index, RankId};
use fak_kernel::route::Policy;
use http::header::HeaderValue;
use http::{Request, Response};
use hyper::body::Body as HttpBody;
use tokio::sync::Semaphore;
use tokio::time::Instant;

pub use audit::Auditor;
pub use body::Body;
pub use error::{Problem, Side};
pub use headers::EXPOSED;
pub use keys::Key;
pub use models::Nearest;
pub use relay::Cutoff;
pub use salts::WeightsSalt;
pub use serve::{Ends, ServeConfig, listen, serve};

use crate::engine::{Data, Passing, Stamp};
use crate::fleet::Fleet;
use crate::runtime::Shutdown;
use crate::sessions::Sessions;
use crate::telemetry::Registry;
use audit::Audits;
use body::Room;
use choosing::{Breakers, OnRanks};
use deferred::Deferred;
use error::Dialect;
use keys::Keys;
use metrics::{Failure, Metrics, Outcome};
use owed::Owed;
use predicted::Predicted;
use prompt::Prompts;
use ticket::Ticket;

/// How the data plane behaves.
#[derive(Clone, Debug)]
pub struct Config {
    /// Keys that clients may show; none is asked for where there are none.
    pub keys: Vec<Key>,
    /// What of headers passes.
    pub passing: Passing,
    /// Writes salts and priorities.
    pub stamp: Stamp,
    /// When salts carry weights.
    pub weights_salt: WeightsSalt,
    /// Workers whose engines are not told of clients that leave before they run again.
    pub defer_aborts: Vec<String>,
    /// Models that exist though no worker has told of them yet.
    pub models: Vec<String>,
    /// Bytes of a request's body.
    pub body_bytes_max: usize,
    /// Bytes of all bodies in flight.
    pub bodies_bytes_max: usize,
    /// Workers that one request is sent to.
    pub attempts_max: usize,
    /// How long a worker may say nothing before it is looked at, and how often again.
    pub watch_every: Duration,
    /// How long a stream's head waits for its first bytes, since until then the request can move.
    pub head_within: Duration,
    /// How often the client of a stream is given a comment while its worker says nothing; none:
    /// never. The head goes before the first one, and with it the chance to move.
    pub keep_alive: Option<Duration>,
    /// What becomes of requests that nobody can serve now.
    pub hold: Hold,
    /// When a client is told to ask again.
    pub retry_after: Duration,
    /// How workers are weighed.
    pub policy: Policy,
    /// Tokens of prompts that are kept for matching.
    pub tokens_max: u64,
    /// How long a request's prompt counts as soon to be cached.
    pub predicted_for: Duration,
    /// The same of routes whose prompts are not matched with what events tell.
    pub affine_for: Duration,
    /// How long a claim that was too high waits for the event that explains it.
    pub audit_after: Duration,
    /// How long nobody may have left a worker before it is said to hold nothing of a prompt: as
    /// long as a belief counts without new proof, so that the stream was proven to bring what the
    /// last one to leave had stored.
    pub quiet_for: Duration,
    /// Tells the date that chat templates write.
    pub clock: fn() -> jiff::Timestamp,
}

/// Requests that wait for a worker. Bounded in number and time.
#[derive(Clone, Copy, Debug)]
pub struct Hold {
    /// How many; 0: none waits, and each is answered at once.
    pub requests_max: usize,
    /// How long.
    pub within: Duration,
    /// How many of those that waited run at once.
    pub release: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            keys: Vec::new(),
            passing: Passing::default(),
            stamp: Stamp::new(None, crate::engine::Isolation::Off, false),
            weights_salt: WeightsSalt::Off,
            defer_aborts: Vec::new(),
            models: Vec::new(),
            body_bytes_max: 32 << 20,
            bodies_bytes_max: 1 << 30,
            attempts_max: 3,
            watch_every: Duration::from_secs(1),
            head_within: Duration::from_secs(15),
            keep_alive: None,
            hold: Hold { requests_max: 0, within: Duration::from_secs(60), release: 16 },
            retry_after: Duration::from_secs(5),
            policy: Policy::default(),
            tokens_max: 16 << 20,
            predicted_for: Duration::from_secs(2),
            affine_for: Duration::from_secs(600),
            audit_after: Duration::from_secs(1),
            quiet_for: Duration::from_secs(6),
            clock: jiff::Timestamp::now,
        }
    }
}

/// A claim that the engine contradicted and no event explains.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Contradiction {
    /// The worker.
    pub worker: Arc<str>,
    /// The rank whose beliefs the claim rests on.
    pub rank: RankId,
    /// Tokens claimed.
    pub claimed: u32,
    /// Tokens that the engine took from its caches.
    pub cached: u64,
    /// All beliefs of the rank are in doubt, not only those of the prompt, which are given up.
    pub is_rank: bool,
}

/// Who is told when a worker lets fak down. No call may block.
pub trait Doubt: Send + Sync + 'static {
    /// A request fails or waits too long on `worker`: it is to be looked at.
    fn suspect(&self, worker: &Arc<str>);

    /// A claim on `worker` was too high: an event may be missing that nobody missed, and its
    /// engine is to be asked.
    fn missed(&self, worker: &Arc<str>);

    /// A store that `worker`'s engine owes is late: it is to be asked for it. Beliefs count on.
    fn late(&self, worker: &Arc<str>);

    /// What was believed of a prompt is wrong, and given up already; where all of the
    /// [rank](Contradiction::is_rank) is in doubt, its beliefs are to be given up, too.
    fn contradicted(&self, contradiction: &Contradiction);
}

/// What the data plane works with.
pub struct Parts {
    /// The workers.
    pub fleet: Fleet,
    /// What they hold.
    pub index: Arc<Index>,
    /// Sessions, where there are any.
    pub sessions: Option<Sessions>,
    /// Who is told of workers that fail.
    pub doubt: Arc<dyn Doubt>,
}

/// The data plane; cheap to clone.
#[derive(Clone)]
pub struct Gateway {
    shared: Arc<Shared>,
}

struct Shared {
    config: Config,
    keys: Keys,
    room: Room,
    fleet: Fleet,
    index: Arc<Index>,
    sessions: Option<Sessions>,
    doubt: Arc<dyn Doubt>,
    metrics: Arc<Metrics>,
    prompts: Arc<Prompts>,
    owed: Arc<Owed>,
    predicted: Arc<Predicted>,
    /// The same of routes whose prompts are not matched.
    affine: Arc<Predicted>,
    audits: Audits,
    deferred: Arc<Deferred>,
    cutoff: Cutoff,
    /// Places for those who wait, and for those of them who run.
    waiting: Arc<Semaphore>,
    release: Arc<Semaphore>,
    /// When each worker was last suspected.
    suspected: Vec<Mutex<Option<Instant>>>,
    breakers: Breakers,
    on_ranks: OnRanks,
    /// Of digests; no peer knows it.
    seed: u64,
}

/// Why a request gets no answer of an engine's, and the request, which is to be ended.
type Unanswered = Box<(Problem, Ticket)>;

impl Gateway {
    /// A data plane that counts in `registry`, and the judge of its audits, which is to be run.
    ///
    /// # Errors
    /// A metric of this part is registered already.
    pub fn new(
        config: Config,
        parts: Parts,
        registry: &Registry,
    ) -> prometheus::Result<(Self, Auditor)> {
        let Parts { fleet, index, sessions, doubt } = parts;
        let metrics = Arc::new(Metrics::new(registry)?);
        let workers = fleet.snapshot().workers.len();
        let seed = secret();
        let prompts = Arc::new(Prompts::new(config.tokens_max, workers, seed, config.clock));
        let owed = Arc::default();
        let with = audit::Parts {
            metrics: Arc::clone(&metrics),
            prompts: Arc::clone(&prompts),
            index: Arc::clone(&index),
            fleet: fleet.clone(),
            owed: Arc::clone(&owed),
            doubt: Arc::clone(&doubt),
        };
        let (audits, auditor) = audit::audits(with, config.audit_after);
        let permits = |count: usize| Arc::new(Semaphore::new(count.min(Semaphore::MAX_PERMITS)));
        let deferred = Deferred::new(&fleet, &config.defer_aborts, metrics.deferred.clone());
        let shared = Shared {
            keys: Keys::new(config.keys.clone()),
            room: Room::new(config.body_bytes_max, config.bodies_bytes_max),
            fleet,
            index,
            sessions,
            doubt,
            metrics,
            prompts,
            owed,
            predicted: Arc::new(Predicted::new(config.predicted_for)),
            affine: Arc::new(Predicted::new(config.affine_for)),
            audits,
            deferred,
            cutoff: Cutoff::default(),
            waiting: permits(config.hold.requests_max),
            release: permits(config.hold.release.max(1)),
            suspected: (0..workers).map(|_| Mutex::default()).collect(),
            breakers: Breakers::new(workers),
            on_ranks: OnRanks::default(),
            seed,
            config,
        };
        Ok((Self { shared: Arc::new(shared) }, auditor))
    }

    /// Ends this gateway's streams when fak stops; for [`serve`].
    #[must_use]
    pub fn cutoff(&self) -> Cutoff {
        self.shared.cutoff.clone()
    }

    /// Delivers aborts that wait, until told to stop.
    pub async fn deliver_aborts(self, stop: Shutdown) {
        self.shared.deferred.run(stop).await;
    }

    /// Whether `path` is one of the data plane's.
    #[must_use]
    pub fn serves(path: &str) -> bool {
        intake::serves(path).is_some()
    }

    /// Answers a request; one that is no inference request is answered with 404.
    pub async fn handle<B>(&self, request: Request<B>) -> Response<Body>
    where
        B: HttpBody<Data = Bytes> + Unpin,
    {
        let shared = &self.shared;
        let request_id = headers::request_id(request.headers());
        let dialect = Dialect::of_path(request.uri().path());
        let route = intake::route(request.method(), request.uri().path());
        let ticket = Ticket::new(&shared.metrics, route.as_ref().ok().copied(), request_id.clone());
        let answered = match route {
            Err(problem) => Err(Box::new((problem, ticket))),
            Ok(Data::Models) => shared.models(&request, ticket),
            Ok(route) => shared.infer(route, &request_id, request, ticket).await,
        };
        let mut answer = answered.unwrap_or_else(|unanswered| {
            let (problem, mut ticket) = *unanswered;
            let id = request_id.to_str().unwrap_or_default();
            tracing::debug!(request_id = id, code = problem.code(), %problem, "no answer");
            ticket.end(outcome(&problem), None);
            problem.answer(dialect)
        });
        answer.headers_mut().insert(headers::REQUEST_ID, request_id);
        answer
    }
}

impl Shared {
    fn models<B>(
        &self,
        request: &Request<B>,
        mut ticket: Ticket,
    ) -> Result<Response<Body>, Unanswered> {
        if let Err(problem) = self.keys.caller(request.headers()) {
            return Err(Box::new((problem, ticket)));
        }
        let (fleet, path) = (self.fleet.snapshot(), request.uri().path());
        match models::answer(&fleet, &self.config.models, path) {
            Ok(answer) => {
                ticket.end(Outcome::Ok, None);
                Ok(answer)
            }
            Err(problem) => Err(Box::new((problem, ticket))),
        }
    }

    async fn infer<B>(
        &self,
        route: Data,
        request_id: &HeaderValue,
        request: Request<B>,
        ticket: Ticket,
    ) -> Result<Response<Body>, Unanswered>
    where
        B: HttpBody<Data = Bytes> + Unpin,
    {
        let job = match self.intake(route, request_id, request).await {
            Ok(job) => job,
            Err(problem) => return Err(Box::new((problem, ticket))),
        };
        let mut answer = self.dispatch(&job, ticket).await?;
        if let Some(session) = &job.session
            && let Ok(name) = HeaderValue::try_from(session)
        {
            answer.headers_mut().insert(headers::SESSION, name);
        }
        Ok(answer)
    }
}

fn outcome(problem: &Problem) -> Outcome {
    match problem {
        Problem::Unreachable => Outcome::Failed(Failure::Unreachable),
        Problem::Silent => Outcome::Failed(Failure::Silent),
        Problem::Cut | Problem::WorkersLost => Outcome::Failed(Failure::Cut),
        Problem::Empty | Problem::Unlisted | Problem::Refused { .. } => {
            Outcome::Failed(Failure::Error)
        }
        Problem::Dropped => Outcome::Failed(Failure::Dropped),
        _ if problem.side() == Side::Client => Outcome::Refused,
        _ => Outcome::Unavailable,
    }
}

/// A number that no peer can guess: the standard library keys its hashers from the system's
/// randomness.
fn secret() -> u64 {
    use std::hash::{BuildHasher as _, RandomState};
    RandomState::new().hash_one("fak gateway")
}
