//! Actions on workers, and what is noticed of them: each ends in a witness row.
//!
//! Invariant: one owner per worker does everything to it, one thing at a time, in this order: the
//! door is shut, requests in flight are drained or given their fate, the intent is durable, beliefs
//! are cold, the call leaves, the engine is observed, the outcome is written; and the door opens
//! only on a worker that was seen to serve.

mod act;
mod canary;
mod commands;
mod drain;
mod effect;
mod found;
mod hold;
mod learn;
mod lives;
mod made_with;
mod marker;
mod markers;
mod mixed;
mod own;
mod owner;
mod planted;
mod probe;
mod proof;
mod recovery;
mod rollout;
mod rows;
mod settle;
mod sources;
pub(crate) mod translate;
mod twins;
mod unwritten;
mod version;
mod weights;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fak_index::RankId;
use fak_kernel::witness::{Move, Quarantine, Refusal};
use serde_json::Value;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, oneshot};

pub use canary::Outcome as Canary;
pub(crate) use learn::{capabilities, offload};
pub use markers::{Offer, run as serve_markers};
pub use owner::{Config, Events, Owner};
pub use rollout::{Begin, Begun, End, Ended};
pub use rows::Ending;
pub use translate::parts;
use twins::Twins;

use crate::events::stream::Handle;
use crate::fleet;
use crate::store::{self, Row};

/// How long requests in flight may take to end, where nobody says.
pub const DRAIN: Duration = Duration::from_secs(30);
/// Commands that may wait for one owner.
const COMMANDS_MAX: usize = 16;

/// An action that somebody asks for.
#[derive(Clone, Debug)]
pub struct Request {
    /// What.
    pub mv: Move,
    /// The session through which it is asked.
    pub session: Option<String>,
    /// Where a tier cannot be kept as asked: go on without keeping it, instead of refusing.
    pub allow_evict: bool,
    /// How long requests in flight may take to end where the mode lets them: then the action is
    /// refused.
    pub drain: Duration,
    /// Who asks, where that is somebody who may hold workers.
    pub holder: Option<String>,
    /// Do it although somebody else holds the worker. Where it serves then, the hold is over.
    pub force: bool,
    /// What the end of a rollout stated, where this is a part of one: its rows carry it.
    pub ends: Option<Box<Value>>,
}

impl Request {
    /// `mv`, asked by nobody's session, with 30 s to drain.
    #[must_use]
    pub fn new(mv: Move) -> Self {
        let (session, holder, ends) = (None, None, None);
        Self { mv, session, allow_evict: false, drain: DRAIN, holder, force: false, ends }
    }
}

/// Why an action has no row.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No worker has that name.
    #[error("no worker is called `{0}`")]
    UnknownWorker(String),
    /// The ledger could not be written. Nothing was sent that is not written as an intent.
    #[error("the ledger cannot be written")]
    Store(#[from] store::Error),
    /// fak is stopping.
    #[error("the worker's owner has stopped")]
    Stopped,
    /// Nothing that is done to the worker waits for requests: a call that has left is not taken
    /// back.
    #[error(
        "nothing is done to worker `{worker}` that could be cancelled{}",
        beside(.busy.as_ref())
    )]
    NothingToCancel {
        /// Which worker.
        worker: String,
        /// What is done to it, in words.
        busy: Option<String>,
    },
    /// It is cancelled, and its row waits for the database.
    #[error("it is cancelled, and the ledger cannot be written: its row waits")]
    Unwritten,
}

fn beside(busy: Option<&String>) -> String {
    busy.map(|busy| format!(": its engine is called for {busy}")).unwrap_or_default()
}

enum Command {
    Act {
        request: Request,
        done: oneshot::Sender<Result<Row, Error>>,
    },
    Begin {
        begin: Begin,
        done: oneshot::Sender<Result<Begun, Error>>,
    },
    End {
        end: End,
        done: oneshot::Sender<Result<Ended, Error>>,
    },
    Ranks {
        done: oneshot::Sender<Vec<Handle>>,
    },
    /// What waits for requests to end is not to be done.
    Cancel {
        done: oneshot::Sender<Cancelled>,
    },
    /// Somebody was let down by the worker: look at it now.
    Look {
        done: oneshot::Sender<()>,
    },
    /// A store that the engine owes is late.
    Late,
    /// A claim was higher than what the engine took from its caches: an event may be missing.
    Missed,
    /// The same, and no event says why.
    Contradicted {
        rank: RankId,
        claimed: u32,
        cached: u64,
    },
}

/// What came of a cancel.
enum Cancelled {
    /// The row of what is not done.
    Row(Box<Row>),
    /// The same, and the database does not take it.
    Unwritten,
    /// Nothing waited.
    Nothing,
}

/// The line to one owner.
#[derive(Clone, Debug)]
struct Line {
    commands: mpsc::Sender<Command>,
    /// Set while an action runs.
    is_busy: Arc<AtomicBool>,
    /// For rows that are written although an action runs.
    ledger: act::Refuser,
}

/// Every worker's owner, to be asked; cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Lifecycle {
    lines: Arc<BTreeMap<Arc<str>, Line>>,
}

impl Lifecycle {
    /// Makes an owner for each worker of `config.fleet`. They live by [`Owner::run`].
    #[must_use]
    pub fn new(config: &Config) -> (Self, Vec<Owner>) {
        let mut lines = BTreeMap::new();
        let mut owners = Vec::new();
        let twins = Twins::default();
        for view in &config.fleet.snapshot().workers {
            let (sender, commands) = mpsc::channel(COMMANDS_MAX);
            let is_busy = Arc::new(AtomicBool::new(false));
            let number = twins.add(Arc::clone(&view.worker.id));
            let place = (twins.clone(), number);
            let busy = Arc::clone(&is_busy);
            let owner = Owner::new(config, Arc::clone(&view.worker), commands, busy, place);
            let ledger = owner.refuser();
            lines.insert(Arc::clone(&view.worker.id), Line { commands: sender, is_busy, ledger });
            owners.push(owner);
        }
        (Self { lines: Arc::new(lines) }, owners)
    }

    /// Does an action on `worker` and answers with its row; one that was refused is a row with
    /// evidence `not_sent`. It runs to its end though the caller leaves.
    ///
    /// # Errors
    /// [`Error`].
    pub async fn act(&self, worker: &str, request: Request) -> Result<Row, Error> {
        let line = self.line(worker)?;
        let busy = request.clone();
        let why = match line.refusal(&request) {
            Some(why) => why,
            None => match line.take(|done| Command::Act { request, done }).await? {
                Some(row) => return row,
                None => Refusal::Busy,
            },
        };
        line.ledger.refuse(&busy, why).await
    }

    /// Puts `worker` to sleep for a holder; to its end though the caller leaves.
    ///
    /// # Errors
    /// [`Error`].
    pub async fn begin(&self, worker: &str, begin: Begin) -> Result<Begun, Error> {
        let line = self.line(worker)?;
        let busy = begin.request();
        let why = match line.refusal(&busy) {
            Some(why) => why,
            None => match line.take(|done| Command::Begin { begin, done }).await? {
                Some(begun) => return begun,
                None => Refusal::Busy,
            },
        };
        let row = line.ledger.refuse(&busy, why).await?;
        let (phase, reason) = (row.phase, row.reason.clone());
        let held_by = line.ledger.held_by();
        Ok(Begun { row, ending: Ending::Refused, reason, running: None, phase, held_by })
    }

    /// Brings `worker` back from its holder; to its end though the caller leaves.
    ///
    /// # Errors
    /// [`Error`].
    pub async fn end(&self, worker: &str, end: End) -> Result<Ended, Error> {
        let line = self.line(worker)?;
        let busy = end.request(end.mv());
        let why = match line.refusal(&busy) {
            Some(why) => why,
            None => match line.take(|done| Command::End { end, done }).await? {
                Some(ended) => return ended,
                None => Refusal::Busy,
            },
        };
        let row = line.ledger.refuse(&busy, why).await?;
        Ok(Ended {
            ending: Ending::Refused,
            reason: row.reason.clone(),
            canary: Canary::NotRun,
            has_canary: false,
            phase: row.phase,
            is_serving: false,
            weight_version: row.weight_version.as_deref().map(Arc::from),
            held_by: line.ledger.held_by(),
            rows: vec![row],
        })
    }

    /// Cancels the action that waits for requests of `worker` to end, and answers with its row once
    /// the door is open again. What was sent to the engine is not taken back.
    ///
    /// # Errors
    /// [`Error`].
    pub async fn cancel(&self, worker: &str) -> Result<Row, Error> {
        let line = self.line(worker)?;
        let busy = line.ledger.busy();
        let nothing = |busy: Option<fleet::Busy>| {
            let busy = busy.map(|busy| fleet::busy_with(&busy.json(0), worker));
            Error::NothingToCancel { worker: worker.to_owned(), busy }
        };
        if !busy.as_ref().is_some_and(fleet::Busy::is_draining) {
            return Err(nothing(busy));
        }
        let (done, cancelled) = oneshot::channel();
        line.commands.send(Command::Cancel { done }).await.map_err(|_| Error::Stopped)?;
        match cancelled.await.map_err(|_| Error::Stopped)? {
            Cancelled::Row(row) => Ok(*row),
            Cancelled::Unwritten => Err(Error::Unwritten),
            Cancelled::Nothing => Err(nothing(line.ledger.busy())),
        }
    }

    /// Has the owner look at its worker now, and waits until it has.
    ///
    /// # Errors
    /// [`Error::UnknownWorker`], [`Error::Stopped`].
    pub async fn look(&self, worker: &str) -> Result<(), Error> {
        let (done, looked) = oneshot::channel();
        let line = self.line(worker)?;
        line.commands.send(Command::Look { done }).await.map_err(|_| Error::Stopped)?;
        looked.await.map_err(|_| Error::Stopped)
    }

    /// Asks a worker's engine for what it published and nobody missed; nothing is believed of it
    /// meanwhile.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownWorker`], [`Error::Stopped`].
    pub async fn missed(&self, worker: &str) -> Result<(), Error> {
        self.line(worker)?.commands.send(Command::Missed).await.map_err(|_| Error::Stopped)
    }

    /// Asks a worker's engine for a store that it owes; beliefs count on meanwhile.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownWorker`], [`Error::Stopped`].
    pub async fn late(&self, worker: &str) -> Result<(), Error> {
        self.line(worker)?.commands.send(Command::Late).await.map_err(|_| Error::Stopped)
    }

    /// Gives up what is believed of a worker's rank: the engine itself contradicted it, by what it
    /// reused of what was claimed.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownWorker`], [`Error::Stopped`].
    pub async fn contradicted(
        &self,
        worker: &str,
        rank: RankId,
        (claimed, cached): (u32, u64),
    ) -> Result<(), Error> {
        let command = Command::Contradicted { rank, claimed, cached };
        self.line(worker)?.commands.send(command).await.map_err(|_| Error::Stopped)
    }

    /// The worker's ranks, by their streams.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownWorker`], [`Error::Stopped`].
    pub async fn ranks(&self, worker: &str) -> Result<Vec<Handle>, Error> {
        let (done, ranks) = oneshot::channel();
        let line = self.line(worker)?;
        line.commands.send(Command::Ranks { done }).await.map_err(|_| Error::Stopped)?;
        ranks.await.map_err(|_| Error::Stopped)
    }

    fn line(&self, worker: &str) -> Result<&Line, Error> {
        self.lines.get(worker).ok_or_else(|| Error::UnknownWorker(worker.to_owned()))
    }
}

impl Line {
    /// Why `request` may not even be asked; a new salt is nothing to the engine.
    fn refusal(&self, request: &Request) -> Option<Refusal> {
        let is_salt = request.mv == Move::Quarantine(Quarantine::Isolate);
        self.ledger.refusal().filter(|_| !is_salt)
    }

    /// Has the owner do what `command` says, and waits until it has; `None` where it does something
    /// else at the time.
    async fn take<T>(
        &self,
        command: impl FnOnce(oneshot::Sender<T>) -> Command,
    ) -> Result<Option<T>, Error> {
        if self.is_busy.swap(true, Ordering::AcqRel) {
            return Ok(None);
        }
        let (done, answer) = oneshot::channel();
        // No wait here: a caller that left during one would leave the worker busy for ever.
        match self.commands.try_send(command(done)) {
            Ok(()) => answer.await.map(Some).map_err(|_| Error::Stopped),
            Err(TrySendError::Closed(_)) => Err(Error::Stopped),
            Err(TrySendError::Full(_)) => {
                self.is_busy.store(false, Ordering::Release);
                Ok(None)
            }
        }
    }
}
