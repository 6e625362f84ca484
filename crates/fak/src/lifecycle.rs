//! Actions on workers, and what is noticed of them: each ends in a witness row.
//!
//! Invariant: one owner per worker does everything to it, one thing at a time, in this order: the
//! door is shut, requests in flight are drained or given their fate, the intent is durable, beliefs
//! are cold, the call leaves, the engine is observed, the outcome is written; and the door opens
//! only on a worker that was seen to serve.

mod inherited;
mod learn;
mod marker;
mod owner;
mod probe;
mod recovery;
mod rows;
pub(crate) mod translate;
mod weights;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fak_kernel::witness::{Move, Refusal};
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, oneshot};

pub(crate) use learn::capabilities;
pub use owner::{Config, Events, Owner};
pub use translate::parts;

use crate::events::stream::Handle;
use crate::store::{self, Row};

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
}

impl Request {
    /// `mv`, asked by nobody's session, with 30 s to drain.
    #[must_use]
    pub fn new(mv: Move) -> Self {
        Self { mv, session: None, allow_evict: false, drain: Duration::from_secs(30) }
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
}

enum Command {
    Act {
        request: Request,
        done: oneshot::Sender<Result<Row, Error>>,
    },
    Ranks {
        done: oneshot::Sender<Vec<Handle>>,
    },
    /// Somebody was let down by the worker: look at it now.
    Look {
        done: oneshot::Sender<()>,
    },
    /// A claim was higher than what the engine took from its caches, and no event says why.
    Contradicted {
        claimed: u32,
        cached: u64,
    },
}

/// The hold of one owner.
#[derive(Clone, Debug)]
struct Hold {
    commands: mpsc::Sender<Command>,
    /// Set while an action runs.
    is_busy: Arc<AtomicBool>,
    /// For rows that are written although an action runs.
    ledger: owner::Refuser,
}

/// Every worker's owner, to be asked; cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Lifecycle {
    holds: Arc<BTreeMap<Arc<str>, Hold>>,
}

impl Lifecycle {
    /// Makes an owner for each worker of `config.fleet`. They live by [`Owner::run`].
    #[must_use]
    pub fn new(config: &Config) -> (Self, Vec<Owner>) {
        let mut holds = BTreeMap::new();
        let mut owners = Vec::new();
        for view in &config.fleet.snapshot().workers {
            let (sender, commands) = mpsc::channel(COMMANDS_MAX);
            let is_busy = Arc::new(AtomicBool::new(false));
            let owner =
                Owner::new(config, Arc::clone(&view.worker), commands, Arc::clone(&is_busy));
            let ledger = owner.refuser();
            holds.insert(Arc::clone(&view.worker.id), Hold { commands: sender, is_busy, ledger });
            owners.push(owner);
        }
        (Self { holds: Arc::new(holds) }, owners)
    }

    /// Does an action on `worker` and answers with its row; one that was refused is a row with
    /// evidence `not_sent`. It runs to its end though the caller leaves.
    ///
    /// # Errors
    /// [`Error`].
    pub async fn act(&self, worker: &str, request: Request) -> Result<Row, Error> {
        let hold = self.hold(worker)?;
        if hold.is_busy.swap(true, Ordering::AcqRel) {
            return hold.ledger.refuse(&request, Refusal::Busy).await;
        }
        let (done, row) = oneshot::channel();
        // No wait here: a caller that left during one would leave the worker busy for ever.
        match hold.commands.try_send(Command::Act { request, done }) {
            Ok(()) => {}
            Err(TrySendError::Closed(_)) => return Err(Error::Stopped),
            Err(TrySendError::Full(command)) => {
                hold.is_busy.store(false, Ordering::Release);
                let Command::Act { request, .. } = command else { return Err(Error::Stopped) };
                return hold.ledger.refuse(&request, Refusal::Busy).await;
            }
        }
        row.await.unwrap_or(Err(Error::Stopped))
    }

    /// Has the owner look at its worker now, and waits until it has.
    ///
    /// # Errors
    /// [`Error::UnknownWorker`], [`Error::Stopped`].
    pub async fn look(&self, worker: &str) -> Result<(), Error> {
        let (done, looked) = oneshot::channel();
        let hold = self.hold(worker)?;
        hold.commands.send(Command::Look { done }).await.map_err(|_| Error::Stopped)?;
        looked.await.map_err(|_| Error::Stopped)
    }

    /// Gives up what is believed of a worker: it was contradicted by the engine itself.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownWorker`], [`Error::Stopped`].
    pub async fn contradicted(&self, worker: &str, claimed: u32, cached: u64) -> Result<(), Error> {
        let command = Command::Contradicted { claimed, cached };
        self.hold(worker)?.commands.send(command).await.map_err(|_| Error::Stopped)
    }

    /// The worker's ranks, by their streams.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownWorker`], [`Error::Stopped`].
    pub async fn ranks(&self, worker: &str) -> Result<Vec<Handle>, Error> {
        let (done, ranks) = oneshot::channel();
        let hold = self.hold(worker)?;
        hold.commands.send(Command::Ranks { done }).await.map_err(|_| Error::Stopped)?;
        ranks.await.map_err(|_| Error::Stopped)
    }

    fn hold(&self, worker: &str) -> Result<&Hold, Error> {
        self.holds.get(worker).ok_or_else(|| Error::UnknownWorker(worker.to_owned()))
    }
}
