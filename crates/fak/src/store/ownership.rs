//! One fak a ledger.
//!
//! Two would each believe what the other has just made false: neither reads the other's rows before
//! it claims. Invariant: while a process has claimed a ledger, no other fak writes to it; and one
//! that lost its claim to another fak writes no more.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};

use sqlx::any::AnyConnectOptions;
use sqlx::{AnyConnection, Connection as _, Row as _};

use super::Error;
use super::database::{Database, LOCK_SPACE};
use super::files::{Files, followed};

/// The right to write a ledger; it goes with the process.
pub(super) enum Ownership {
    /// Of a database that is a file.
    File {
        /// Holds the lock as long as it is open.
        lock: FileLock,
        /// As the file shows it to others.
        who: String,
        /// The number of this claim in the ledger.
        claim: i64,
    },
    /// An advisory lock of a connection that does nothing else.
    Server {
        /// Holds the lock as long as it lives.
        connection: Box<AnyConnection>,
        /// As the server shows it to others.
        who: String,
        /// The number of this claim in the ledger.
        claim: i64,
    },
}

/// A lock on a file beside the database, which the system takes back when the process ends. The
/// database's own file is not locked: SQLite does that by itself, with other meanings.
pub(super) struct FileLock {
    _file: File,
    /// It keeps others out as long as the file is the one that its path names.
    files: Files,
}

/// A name that is longer is cut by PostgreSQL.
const APPLICATION_NAME_MAX: usize = 63;

/// Beside the lock of one write, which has the table's number, too.
const OWNER_LOCK_SPACE: i32 = LOCK_SPACE + 1;

const NAME: &str = "SELECT set_config('application_name', $1, false)";
const TAKE: &str = "SELECT pg_try_advisory_lock($1, 'witness_intents'::regclass::oid::int4)";
pub(super) const CLAIM: &str = "UPDATE ledger_claims SET claims = claims + 1 RETURNING claims";
pub(super) const CLAIMS: &str = "SELECT claims FROM ledger_claims";
const HOLDER: &str = "SELECT a.application_name, a.pid::int4 AS pid, \
    COALESCE(host(a.client_addr), 'a local socket') AS address \
    FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid \
    WHERE l.locktype = 'advisory' AND l.granted AND l.database = \
    (SELECT oid FROM pg_database WHERE datname = current_database()) \
    AND l.classid::int8 = $1 AND l.objid = 'witness_intents'::regclass::oid";

impl Ownership {
    /// Of the database at `path`, which is `database`, for `who`.
    pub(super) async fn of_file(
        database: &Database,
        path: &Path,
        who: &str,
    ) -> Result<Self, Error> {
        let lock = FileLock::take(path, who)?;
        let claim = database.claim().await?;
        Ok(Self::File { lock, who: who.to_owned(), claim })
    }

    /// Of the database on a server.
    pub(super) async fn of_server(options: &AnyConnectOptions, who: &str) -> Result<Self, Error> {
        let mut connection = Box::new(AnyConnection::connect_with(options).await?);
        lock(&mut connection, who).await?;
        let claim = sqlx::query(CLAIM).fetch_one(&mut *connection).await?.try_get(0)?;
        Ok(Self::Server { connection, who: who.to_owned(), claim })
    }

    /// Whether others are kept out. Of a server only [`keep`](Self::keep) can tell.
    pub(super) fn check(&self) -> Result<(), Error> {
        match self {
            Self::File { lock, .. } => lock.files.check(),
            Self::Server { .. } => Ok(()),
        }
    }

    /// Sees to it that it still holds. A connection that broke has lost its lock, and so has a file
    /// that was removed: it is taken again where no other fak had it meanwhile.
    pub(super) async fn keep(&mut self, database: &Database) -> Result<(), Error> {
        match self {
            Self::File { lock, who, claim } => {
                if lock.files.check().is_ok() {
                    return Ok(());
                }
                let path = database.path().unwrap_or(Path::new(""));
                let again = FileLock::take(path, who);
                let files = database.check_files();
                let had_other = match &files {
                    Ok(()) => database.claims().await? != *claim,
                    // Whoever came wrote into a file that is not open here; where there is none,
                    // nobody did.
                    Err(_) => path.exists() || matches!(again, Err(Error::Owned { .. })),
                };
                if had_other {
                    return Err(Error::Lost);
                }
                *lock = again.map_err(|error| files.err().unwrap_or(error))?;
                tracing::warn!("the file with the lock of the ledger was removed; it is made anew");
            }
            Self::Server { connection, who, claim } => {
                if connection.ping().await.is_ok() {
                    return Ok(());
                }
                let mut again = AnyConnection::connect_with(database.options()).await?;
                let locked = lock(&mut again, who).await;
                let newest: i64 = sqlx::query(CLAIMS).fetch_one(&mut again).await?.try_get(0)?;
                if newest != *claim {
                    return Err(Error::Lost);
                }
                locked?;
                **connection = again;
            }
        }
        Ok(())
    }
}

impl FileLock {
    /// Takes the lock of the database at `path` for `who`, or says who has it.
    fn take(path: &Path, who: &str) -> Result<Self, Error> {
        let mut name = followed(path).into_os_string();
        name.push("-owner");
        let name = PathBuf::from(name);
        let io = |error: std::io::Error| Error::Unavailable(sqlx::Error::Io(error));
        let mut options = OpenOptions::new();
        let options = options.read(true).write(true).create(true).truncate(false);
        let mut file = options.open(&name).map_err(io)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::Error(error)) => return Err(io(error)),
            Err(TryLockError::WouldBlock) => {
                let mut by = String::new();
                file.read_to_string(&mut by).map_err(io)?;
                let by = if by.is_empty() { "an unnamed process".to_owned() } else { by };
                return Err(Error::Owned { by });
            }
        }
        file.set_len(0).map_err(io)?;
        file.seek(SeekFrom::Start(0)).map_err(io)?;
        file.write_all(who.as_bytes()).map_err(io)?;
        let files = Files::opened(name, &file);
        files.check()?;
        Ok(Self { _file: file, files })
    }
}

/// Takes the lock for `who`, or says who has it.
async fn lock(connection: &mut AnyConnection, who: &str) -> Result<(), Error> {
    let end = who.char_indices().map(|(at, c)| at + c.len_utf8());
    let end = end.take_while(|end| *end <= APPLICATION_NAME_MAX).last().unwrap_or(0);
    sqlx::query(NAME).bind(&who[..end]).execute(&mut *connection).await?;
    let taken = sqlx::query(TAKE).bind(OWNER_LOCK_SPACE).fetch_one(&mut *connection).await?;
    if taken.try_get::<bool, _>(0)? {
        return Ok(());
    }
    let holder = sqlx::query(HOLDER).bind(i64::from(OWNER_LOCK_SPACE));
    let by = match holder.fetch_optional(connection).await? {
        Some(row) => {
            let (name, address) = (
                row.try_get::<String, _>("application_name")?,
                row.try_get::<String, _>("address")?,
            );
            format!("{name} (server process {} from {address})", row.try_get::<i32, _>("pid")?)
        }
        None => "an unnamed process".to_owned(),
    };
    Err(Error::Owned { by })
}
