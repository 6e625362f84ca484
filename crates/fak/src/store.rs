//! The ledger of witness rows, the sessions and the holds: what outlives the process, on SQLite or
//! PostgreSQL.
//!
//! Invariant: a row of the ledger is only ever added to, once; what [`Store::intent`] returned is
//! durable; and every change of the ledger has a number that is greater than those of all changes
//! seen before it.

mod bounds;
mod database;
mod files;
mod hold;
mod ledger;
mod ownership;
mod row;
mod session;

use std::future::Future;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use tokio::sync::watch;

pub use bounds::{JSON_BYTES_MAX, NAME_BYTES_MAX, REASON_BYTES_MAX, fitting_name};
pub use hold::Hold;
pub use ledger::{Change, ROWS_MAX};
pub use row::{Filter, NewIntent, Outcome, Row, Standing, Tiers, word};
pub use session::{Run, SESSIONS_MAX, Session};

pub(crate) use crate::telemetry::error_chain;
use database::{Database, Kind};

/// What a PostgreSQL server may take for one operation, waiting for others' writes included. SQLite
/// has its own busy timeout, and no peer that could keep silent.
const SERVER_TIME_MAX: Duration = Duration::from_secs(10);

/// Why something was not stored or read, by what can be done about it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Give another URL.
    #[error("{0}: expected sqlite:PATH, sqlite::memory: or postgres://USER@HOST:PORT/NAME")]
    BadUrl(&'static str),
    /// Run a newer fak, or give another database.
    #[error("the database has schema {found}, and this fak knows none after {known}")]
    Newer {
        /// The schema's version in the database.
        found: i64,
        /// The newest that this fak knows.
        known: i64,
    },
    /// Give another value: this one cannot be stored.
    #[error("{field} {problem}")]
    BadValue {
        /// Which field.
        field: &'static str,
        /// What it breaks.
        problem: &'static str,
    },
    /// Nothing: another outcome was recorded before.
    #[error("row {0} has its outcome already")]
    Conflict(u64),
    /// Nothing: no intent has this number.
    #[error("no intent has number {0}")]
    NoIntent(u64),
    /// Look at the database: somebody wrote there what fak does not write.
    #[error("{record} is corrupt: {field} {problem}")]
    Corrupt {
        /// Which row or session.
        record: String,
        /// Which column.
        field: &'static str,
        /// What is wrong with it.
        problem: &'static str,
        /// What the database library said, where it said something.
        #[source]
        source: Option<Box<dyn std::error::Error + Send + Sync>>,
    },
    /// Stop the other fak, or give this one another database.
    #[error("another fak writes this database: {by}; stop it, or give each a database of its own")]
    Owned {
        /// Who says to be its owner: the process and its address.
        by: String,
    },
    /// Restart fak: it reads what the other fak wrote.
    #[error(
        "the connection to the database broke, or the file with the ledger's lock was removed, and \
         another fak wrote the ledger meanwhile; this one writes no more rows: leave the ledger to \
         the other, or stop that one and start this one again, to read what the other wrote"
    )]
    Lost,
    /// Restart fak, with the file put back where there is a copy.
    #[error(
        "{} was removed or replaced while fak had it open; no row is written: restart fak",
        path.display()
    )]
    Gone {
        /// The database's file, its write-ahead log, or the file with its owner's lock.
        path: PathBuf,
    },
    /// Try again later. What was being written may have been written.
    #[error("the database failed")]
    Unavailable(#[from] sqlx::Error),
    /// Try again later. What was being written may have been written.
    #[error("the database took longer than {} s", SERVER_TIME_MAX.as_secs())]
    Slow,
}

impl Error {
    /// Whether the database is at fault, not what was to be written.
    pub(crate) fn is_of_database(&self) -> bool {
        match self {
            Self::BadUrl(_) | Self::BadValue { .. } | Self::Conflict(_) | Self::NoIntent(_) => {
                false
            }
            Self::Newer { .. }
            | Self::Corrupt { .. }
            | Self::Owned { .. }
            | Self::Lost
            | Self::Gone { .. }
            | Self::Unavailable(_)
            | Self::Slow => true,
        }
    }
}

impl Error {
    /// The error and its causes in one line, and what to do about it where that is known.
    pub(crate) fn explained(&self) -> String {
        let told = error_chain(self);
        match self.remedy() {
            Some(remedy) => format!("{told}; {remedy}"),
            None => told,
        }
    }

    fn remedy(&self) -> Option<&'static str> {
        let Self::Unavailable(sqlx::Error::Database(error)) = self else { return None };
        match &*error.code()? {
            SQLITE_FULL | POSTGRES_DISK_FULL => {
                Some("free space on the database's disk: fak needs no restart")
            }
            SQLITE_NOT_A_DATABASE => Some("name another file: that one is no SQLite database"),
            SQLITE_READ_ONLY => Some("fak's user has to be able to write the file and its folder"),
            SQLITE_CANNOT_OPEN => {
                Some("the file's folder has to be there, and fak's user has to be able to write it")
            }
            _ => None,
        }
    }
}

const SQLITE_FULL: &str = "13";
const POSTGRES_DISK_FULL: &str = "53100";
const SQLITE_CANNOT_OPEN: &str = "14";
const SQLITE_READ_ONLY: &str = "8";
const SQLITE_NOT_A_DATABASE: &str = "26";

/// Tells the time, in UTC.
pub type Clock = fn() -> Timestamp;

/// Ledger and sessions in one database; cheap to clone.
#[derive(Clone)]
pub struct Store {
    database: Database,
    clock: Clock,
    newest: Arc<watch::Sender<u64>>,
    trouble: Arc<watch::Sender<Option<String>>>,
}

impl Store {
    /// Whether [`Store::open`] can read this URL; nothing is opened.
    ///
    /// # Errors
    /// [`Error::BadUrl`].
    pub fn check_url(url: &str) -> Result<(), Error> {
        Database::check_url(url)
    }

    /// Opens `sqlite:PATH`, `sqlite::memory:` or `postgres://…`, and creates or migrates what is
    /// there. Several processes may do so at once. Not for a runtime whose clock is paused: the
    /// pools' timers go off while the database works.
    ///
    /// # Errors
    /// [`Error::BadUrl`], [`Error::Newer`], [`Error::Unavailable`], [`Error::Slow`]. None shows the
    /// URL, which may hold a password.
    pub async fn open(url: &str) -> Result<Self, Error> {
        Self::open_with(url, Timestamp::now).await
    }

    /// As [`Store::open`], with another clock.
    ///
    /// # Errors
    /// Those of [`Store::open`].
    pub async fn open_with(url: &str, clock: Clock) -> Result<Self, Error> {
        let database = Database::new(url)?;
        let newest = within(database.kind(), async {
            database.reach().await?;
            database.migrate(&at(clock)).await?;
            ledger::newest(&database).await
        })
        .await?;
        let newest = Arc::new(watch::Sender::new(newest));
        Ok(Self { database, clock, newest, trouble: Arc::default() })
    }

    /// The time, as rows have it: RFC 3339 in UTC.
    #[must_use]
    pub fn now(&self) -> String {
        at(self.clock)
    }

    /// Claims the database for this process: until it closes the store or ends, no other can claim
    /// it. `who` is shown to those who try: a process and an address.
    ///
    /// # Errors
    /// [`Error::Owned`], [`Error::Unavailable`], [`Error::Slow`].
    pub async fn own(&self, who: &str) -> Result<(), Error> {
        self.run(self.database.own(who)).await
    }

    /// Whether a row could be written now: writes one and takes it back. What comes of it shows in
    /// [`Store::trouble`].
    ///
    /// # Errors
    /// [`Error::Gone`], [`Error::Owned`], [`Error::Lost`], [`Error::Unavailable`],
    /// [`Error::Slow`].
    pub async fn check(&self) -> Result<(), Error> {
        self.write(ledger::check(&self.database, &self.now())).await
    }

    /// Why the last write failed; nothing where it did not.
    #[must_use]
    pub fn trouble(&self) -> Option<String> {
        self.trouble.borrow().clone()
    }

    /// Writes what is about to be done. It is durable when its number returns; until
    /// [`Store::outcome`] it reads as unknown.
    ///
    /// # Errors
    /// [`Error::BadValue`], [`Error::Unavailable`], [`Error::Slow`].
    pub async fn intent(&self, row: NewIntent) -> Result<u64, Error> {
        let (seq, change) = self.write(ledger::intent(&self.database, &row, &self.now())).await?;
        self.tell(change);
        Ok(seq)
    }

    /// Writes what came of an intent, and returns the whole row.
    ///
    /// # Errors
    /// [`Error::Conflict`] where it has an outcome, [`Error::NoIntent`], and those of
    /// [`Store::intent`].
    pub async fn outcome(&self, seq: u64, outcome: Outcome) -> Result<Row, Error> {
        self.outcome_at(seq, &outcome, &self.now()).await
    }

    /// As [`Store::outcome`], of what came at another time: `at`, as [`Store::now`] tells it.
    ///
    /// # Errors
    /// Those of [`Store::outcome`].
    pub async fn outcome_at(&self, seq: u64, outcome: &Outcome, at: &str) -> Result<Row, Error> {
        self.written(ledger::outcome(&self.database, seq, outcome, at)).await
    }

    /// Writes an intent and its outcome together: what was noticed, or not sent. Nobody ever sees
    /// one without the other.
    ///
    /// # Errors
    /// Those of [`Store::intent`].
    pub async fn note(&self, row: NewIntent, outcome: Outcome) -> Result<Row, Error> {
        self.note_at(row, outcome, &self.now()).await
    }

    /// As [`Store::note`], of what was noticed at another time: `at`, as [`Store::now`] tells it.
    ///
    /// # Errors
    /// Those of [`Store::intent`].
    pub async fn note_at(&self, row: NewIntent, outcome: Outcome, at: &str) -> Result<Row, Error> {
        self.written(ledger::note(&self.database, &row, outcome, at)).await
    }

    /// The rows that `filter` names, at most [`ROWS_MAX`].
    ///
    /// # Errors
    /// [`Error::Corrupt`], [`Error::Unavailable`], [`Error::Slow`].
    pub async fn rows(&self, filter: &Filter) -> Result<Vec<Row>, Error> {
        self.run(ledger::rows(&self.database, filter)).await
    }

    /// The newest row on `worker`.
    ///
    /// # Errors
    /// Those of [`Store::rows`].
    pub async fn last_row(&self, worker: &str) -> Result<Option<Row>, Error> {
        self.run(ledger::last_row(&self.database, worker)).await
    }

    /// The newest row on `worker` that has a [`Standing`].
    ///
    /// # Errors
    /// Those of [`Store::rows`].
    pub async fn last_standing(&self, worker: &str) -> Result<Option<Row>, Error> {
        self.run(ledger::last_standing(&self.database, worker)).await
    }

    /// Intents without an outcome, the newest first, at most [`ROWS_MAX`].
    ///
    /// # Errors
    /// Those of [`Store::rows`].
    pub async fn open_intents(&self) -> Result<Vec<Row>, Error> {
        self.run(ledger::open_intents(&self.database)).await
    }

    /// Rows that came or got their outcome after change `after`, in the order in which that
    /// happened, at most `limit` and [`ROWS_MAX`]. A row is listed once, at its last change.
    /// Whoever asks again after the last number given misses no row and no outcome.
    ///
    /// # Errors
    /// Those of [`Store::rows`].
    pub async fn changes(&self, after: u64, limit: u32) -> Result<Vec<Change>, Error> {
        self.run(ledger::changes(&self.database, after, limit)).await
    }

    /// The number of the ledger's newest change, to wake whoever reads [`Store::changes`]. It moves
    /// with this store's writes and its clones' alone; those of other processes show in
    /// [`Store::changes`], so look there from time to time, too.
    #[must_use]
    pub fn newest(&self) -> watch::Receiver<u64> {
        self.newest.subscribe()
    }

    /// Writes these sessions in place of what is stored under their ids: all, or none. No intent is
    /// written meanwhile, so give it some hundreds at once, not all there are.
    ///
    /// # Errors
    /// [`Error::BadValue`], [`Error::Unavailable`], [`Error::Slow`].
    pub async fn sessions_put(&self, sessions: &[Session]) -> Result<(), Error> {
        self.write(session::put(&self.database, sessions)).await
    }

    /// Writes `session` in place of what is stored under its id.
    ///
    /// # Errors
    /// Those of [`Store::sessions_put`].
    pub async fn session_put(&self, session: &Session) -> Result<(), Error> {
        self.sessions_put(std::slice::from_ref(session)).await
    }

    /// The session of exactly this id.
    ///
    /// # Errors
    /// [`Error::Corrupt`], [`Error::Unavailable`], [`Error::Slow`].
    pub async fn session_get(&self, id: &str) -> Result<Option<Session>, Error> {
        self.run(session::get(&self.database, id)).await
    }

    /// The sessions, the last seen first, at most `limit` and [`SESSIONS_MAX`].
    ///
    /// # Errors
    /// Those of [`Store::session_get`].
    pub async fn session_list(&self, limit: u32) -> Result<Vec<Session>, Error> {
        self.run(session::list(&self.database, limit)).await
    }

    /// Forgets a session; whether there was one.
    ///
    /// # Errors
    /// [`Error::Unavailable`], [`Error::Slow`].
    pub async fn session_delete(&self, id: &str) -> Result<bool, Error> {
        self.write(session::delete(&self.database, id)).await
    }

    /// Puts `worker` into `holder`'s hands from now on, in place of the hold that it is in.
    ///
    /// # Errors
    /// [`Error::BadValue`], [`Error::Unavailable`], [`Error::Slow`].
    pub async fn hold_put(
        &self,
        worker: &str,
        holder: &str,
        canary: serde_json::Value,
    ) -> Result<Hold, Error> {
        let (worker, holder) = (worker.to_owned(), holder.to_owned());
        let hold = Hold { worker, holder, since: self.now(), canary };
        self.write(hold::put(&self.database, &hold)).await?;
        Ok(hold)
    }

    /// The hold on `worker`.
    ///
    /// # Errors
    /// [`Error::Corrupt`], [`Error::Unavailable`], [`Error::Slow`].
    pub async fn hold_get(&self, worker: &str) -> Result<Option<Hold>, Error> {
        self.run(hold::get(&self.database, worker)).await
    }

    /// All holds, by worker.
    ///
    /// # Errors
    /// Those of [`Store::hold_get`].
    pub async fn hold_list(&self) -> Result<Vec<Hold>, Error> {
        self.run(hold::list(&self.database)).await
    }

    /// Lets `worker` go; whether it was held.
    ///
    /// # Errors
    /// [`Error::Unavailable`], [`Error::Slow`].
    pub async fn hold_delete(&self, worker: &str) -> Result<bool, Error> {
        self.write(hold::delete(&self.database, worker)).await
    }

    /// Waits for what runs, and closes the connections. Every later use fails.
    pub async fn close(&self) {
        self.database.close().await;
    }

    async fn written(
        &self,
        work: impl Future<Output = Result<Change, Error>>,
    ) -> Result<Row, Error> {
        let change = self.write(work).await?;
        self.tell(change.number);
        Ok(change.row)
    }

    /// Does work that writes, and remembers whether it could.
    async fn write<T>(&self, work: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
        let mut written = self.run(work).await;
        // Once more after the commit: before it the files may have been there.
        if written.is_ok()
            && let Err(error) = self.database.check_written().await
        {
            written = Err(error);
        }
        match &written {
            Ok(_) => self.trouble_is(None),
            Err(error) if error.is_of_database() => self.trouble_is(Some(error)),
            Err(_) => {}
        }
        written
    }

    fn trouble_is(&self, error: Option<&Error>) {
        let now = error.map(Error::explained);
        self.trouble.send_if_modified(|trouble| {
            let is_other = *trouble != now;
            *trouble = now;
            is_other
        });
    }

    async fn run<T>(&self, work: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
        within(self.database.kind(), work).await
    }

    /// Writers return in any order, and the number never goes back.
    fn tell(&self, change: u64) {
        self.newest.send_if_modified(|newest| {
            let is_newer = change > *newest;
            *newest = change.max(*newest);
            is_newer
        });
    }
}

impl std::fmt::Debug for Store {
    /// Leaves the URL out, for its password.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Store").field("kind", &self.database.kind()).finish_non_exhaustive()
    }
}

/// RFC 3339 with milliseconds.
fn at(clock: Clock) -> String {
    format!("{:.3}", clock())
}

async fn within<T>(kind: Kind, work: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
    match kind {
        Kind::Sqlite => work.await,
        Kind::Postgres => {
            tokio::time::timeout(SERVER_TIME_MAX, work).await.map_err(|_| Error::Slow)?
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_newest_change_never_goes_back() {
        let store = Store::open("sqlite::memory:").await.expect("memory");
        let mut newest = store.newest();
        store.tell(5);
        assert!(newest.has_changed().expect("the store lives"));
        assert_eq!(*newest.borrow_and_update(), 5);
        store.tell(3);
        assert!(!newest.has_changed().expect("the store lives"));
        assert_eq!(*newest.borrow(), 5);
    }
}
