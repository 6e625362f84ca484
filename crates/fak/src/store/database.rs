//! One way to two databases: how they are reached, written and migrated.
//!
//! Invariant: writes to a database run one after the other, whichever processes they come from; and
//! no error or log line shows a URL.

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use sqlx::any::{AnyConnectOptions, AnyPoolOptions};
use sqlx::postgres::PgConnectOptions;
use sqlx::{Any, AnyConnection, AnyPool, Connection, Row, Transaction};

use tokio::sync::Mutex;

use super::Error;
use super::files::Files;
use super::ownership::{CLAIM, CLAIMS, Ownership};

/// Readers beside the one writer. A file or a server answers a few at a time, and rows are short.
const READERS_MAX: u32 = 4;
/// How long a server is tried for a connection; less than one operation may take.
const SERVER_CONNECT_MAX: Duration = Duration::from_secs(5);
/// The first key of fak's advisory locks on PostgreSQL, whose space all applications of a database
/// share.
pub(super) const LOCK_SPACE: i32 = i32::from_be_bytes(*b"fak\0");
/// What the URL of a PostgreSQL database may set. Others would be logged with their values.
const POSTGRES_KEYS: &[&str] = &[
    "application_name",
    "dbname",
    "host",
    "options",
    "password",
    "port",
    "sslcert",
    "sslkey",
    "sslmode",
    "sslrootcert",
    "user",
];

struct Migration {
    sqlite: &'static str,
    postgres: &'static str,
}

/// In order; the first is version 1. One that was released is never edited.
const MIGRATIONS: &[Migration] = &[
    Migration {
        sqlite: include_str!("migrations/0001_sqlite.sql"),
        postgres: include_str!("migrations/0001_postgres.sql"),
    },
    Migration {
        sqlite: include_str!("migrations/0002_sqlite.sql"),
        postgres: include_str!("migrations/0002_postgres.sql"),
    },
    Migration {
        sqlite: include_str!("migrations/0003_sqlite.sql"),
        postgres: include_str!("migrations/0003_postgres.sql"),
    },
    Migration {
        sqlite: include_str!("migrations/0004_sqlite.sql"),
        postgres: include_str!("migrations/0004_postgres.sql"),
    },
];

/// Which database.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Sqlite,
    Postgres,
}

/// A database that can be written and read.
#[derive(Clone)]
pub(super) struct Database {
    kind: Kind,
    options: AnyConnectOptions,
    writer: AnyPool,
    reader: AnyPool,
    /// Where it is a file.
    path: Option<PathBuf>,
    /// What the path named when the file was opened.
    files: Arc<OnceLock<Files>>,
    /// The right to write it, where this process has claimed it.
    ownership: Arc<Mutex<Option<Ownership>>>,
}

impl Database {
    /// Whether `url` names a database.
    pub(super) fn check_url(url: &str) -> Result<(), Error> {
        Target::parse(url).map(drop)
    }

    /// The database at `url`; it is reached with the first use.
    pub(super) fn new(url: &str) -> Result<Self, Error> {
        sqlx::any::install_default_drivers();
        let target = Target::parse(url)?;
        let options: AnyConnectOptions =
            target.url().parse().map_err(|_| Error::BadUrl("no URL"))?;
        // A pool of one never opens a second database where each connection is one of its own.
        let writer = target.pool(1, SQLITE_WRITER).connect_lazy_with(options.clone());
        let reader = match target {
            Target::Memory => writer.clone(),
            _ => target.pool(READERS_MAX, SQLITE_READER).connect_lazy_with(options.clone()),
        };
        let (kind, path) = (target.kind(), target.path());
        let (files, ownership) = Default::default();
        Ok(Self { kind, options, writer, reader, path, files, ownership })
    }

    /// Makes this process the only fak that writes this database, until it closes or dies.
    pub(super) async fn own(&self, who: &str) -> Result<(), Error> {
        let ownership = match (&self.path, self.kind) {
            (Some(path), _) => Ownership::of_file(self, path, who).await?,
            (None, Kind::Postgres) => Ownership::of_server(&self.options, who).await?,
            (None, Kind::Sqlite) => return Ok(()), // in memory: nobody else can reach it
        };
        *self.ownership.lock().await = Some(ownership);
        Ok(())
    }

    /// Remembers which files the path names now: those that are open.
    fn remember_files(&self) -> Result<(), Error> {
        if let Some(path) = &self.path {
            self.files.get_or_init(|| Files::at(path));
            self.check_files()?;
        }
        Ok(())
    }

    /// Whether what was written is where its path says. SQLite goes on writing a file that was
    /// removed, and what it writes there is lost.
    pub(super) fn check_files(&self) -> Result<(), Error> {
        self.files.get().map_or(Ok(()), Files::check)
    }

    /// Whether what was written is where its path says, and no other fak can have claimed it
    /// meanwhile: the lock of a file that was removed keeps nobody out.
    pub(super) async fn check_written(&self) -> Result<(), Error> {
        self.check_files()?;
        self.ownership.lock().await.as_ref().map_or(Ok(()), Ownership::check)
    }

    /// Counts one more claim of the ledger, and returns its number.
    pub(super) async fn claim(&self) -> Result<i64, Error> {
        let mut write = self.begin(POSTGRES_WRITE).await?;
        let claim = sqlx::query(CLAIM).fetch_one(&mut *write).await?.try_get(0)?;
        write.commit().await?;
        Ok(claim)
    }

    /// The number of the ledger's last claim.
    pub(super) async fn claims(&self) -> Result<i64, Error> {
        Ok(sqlx::query(CLAIMS).fetch_one(&self.reader).await?.try_get(0)?)
    }

    /// How a server is reached.
    pub(super) const fn options(&self) -> &AnyConnectOptions {
        &self.options
    }

    /// Where it is a file.
    pub(super) fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// Which it is.
    pub(super) const fn kind(&self) -> Kind {
        self.kind
    }

    /// Where reads go. They see what was committed.
    pub(super) const fn reader(&self) -> &AnyPool {
        &self.reader
    }

    /// Begins a write. Nobody else writes the ledger until it ends, so what it reads there stays
    /// so, and numbers that it takes are seen in their order.
    ///
    /// # Errors
    /// [`Error::Gone`], [`Error::Owned`], [`Error::Lost`], [`Error::Unavailable`]: nothing is
    /// written.
    pub(super) async fn write(&self) -> Result<Transaction<'static, Any>, Error> {
        if let Some(ownership) = &mut *self.ownership.lock().await {
            ownership.keep(self).await?;
        }
        self.check_files()?;
        Ok(self.begin(POSTGRES_WRITE).await?)
    }

    async fn begin(
        &self,
        postgres_lock: &'static str,
    ) -> Result<Transaction<'static, Any>, sqlx::Error> {
        match self.kind {
            Kind::Sqlite => self.writer.begin_with("BEGIN IMMEDIATE").await,
            Kind::Postgres => {
                let mut write = self.writer.begin().await?;
                sqlx::query(postgres_lock).bind(LOCK_SPACE).execute(&mut *write).await?;
                Ok(write)
            }
        }
    }

    /// Connects once, to say at once why that cannot be: a pool goes on trying.
    pub(super) async fn reach(&self) -> Result<(), sqlx::Error> {
        if self.kind == Kind::Sqlite && self.path.is_none() {
            return Ok(()); // in memory: each connection is a database of its own
        }
        let mut connection = AnyConnection::connect_with(&self.options).await?;
        if self.kind == Kind::Sqlite {
            sqlx::raw_sql(SQLITE_WRITER).execute(&mut connection).await?;
        }
        connection.close().await
    }

    /// Brings the schema to the newest version, in one transaction.
    pub(super) async fn migrate(&self, at: &str) -> Result<(), Error> {
        let mut write = self.begin(POSTGRES_MIGRATE).await?;
        sqlx::raw_sql(MIGRATIONS_TABLE).execute(&mut *write).await?;
        let found: i64 = sqlx::query(MIGRATIONS_FOUND).fetch_one(&mut *write).await?.try_get(0)?;
        for (version, migration) in (1_i64..).zip(MIGRATIONS) {
            if version > found {
                let sql = match self.kind {
                    Kind::Sqlite => migration.sqlite,
                    Kind::Postgres => migration.postgres,
                };
                sqlx::raw_sql(sql).execute(&mut *write).await?;
                let done = sqlx::query("INSERT INTO fak_migrations (version, at) VALUES ($1, $2)");
                done.bind(version).bind(at).execute(&mut *write).await?;
            }
        }
        let known = i64::try_from(MIGRATIONS.len()).expect("few migrations");
        if found > known {
            return Err(Error::Newer { found, known });
        }
        write.commit().await?;
        self.remember_files()
    }

    /// Closes every connection.
    pub(super) async fn close(&self) {
        self.reader.close().await;
        self.writer.close().await;
        *self.ownership.lock().await = None;
    }
}

const MIGRATIONS_TABLE: &str =
    "CREATE TABLE IF NOT EXISTS fak_migrations (version BIGINT PRIMARY KEY, at TEXT NOT NULL)";
const MIGRATIONS_FOUND: &str = "SELECT COALESCE(MAX(version), 0) FROM fak_migrations";

/// One lock per ledger. It goes with the transaction, after everybody can see what was written. A
/// commit that is not flushed is no intent: a server or a role that is set so is overruled.
const POSTGRES_WRITE: &str = "SELECT
    pg_advisory_xact_lock($1, 'witness_intents'::regclass::oid::int4),
    set_config('synchronous_commit', CASE current_setting('synchronous_commit')
        WHEN 'off' THEN 'on' ELSE current_setting('synchronous_commit') END, true)";
/// One lock per schema, before there is a ledger. That a table exists is no news at each start.
const POSTGRES_MIGRATE: &str = "SELECT
    pg_advisory_xact_lock($1, current_schema()::regnamespace::oid::int4),
    set_config('client_min_messages', 'warning', true)";

/// Waits 3 s for the writes of other processes: while a row waits, its worker's actor does, too.
/// FULL syncs at each commit, which WAL would leave to the checkpoint; macOS syncs down to the
/// disk only where it is asked to.
const SQLITE_WRITER: &str = "PRAGMA busy_timeout = 3000;
    PRAGMA journal_mode = WAL;
    PRAGMA synchronous = FULL;
    PRAGMA fullfsync = ON;
    PRAGMA foreign_keys = ON";
const SQLITE_READER: &str = "PRAGMA busy_timeout = 3000; PRAGMA query_only = ON";

/// What a URL names.
enum Target {
    Memory,
    File { url: String, path: PathBuf },
    Postgres(String),
}

impl Target {
    fn parse(url: &str) -> Result<Self, Error> {
        if let Some(path) = url.strip_prefix("sqlite:") {
            return Self::sqlite(path.strip_prefix("//").unwrap_or(path));
        }
        if !["postgres://", "postgresql://"].iter().any(|scheme| url.starts_with(scheme)) {
            return Err(Error::BadUrl("no database URL"));
        }
        let pairs = url.split_once('?').map_or("", |(_, pairs)| pairs);
        let mut keys = pairs.split('&').map(|pair| pair.split_once('=').map_or(pair, |kv| kv.0));
        if !keys.all(|key| key.is_empty() || POSTGRES_KEYS.contains(&key)) {
            return Err(Error::BadUrl("the PostgreSQL URL has a parameter that is not known"));
        }
        if url.parse::<PgConnectOptions>().is_err() {
            return Err(Error::BadUrl("the PostgreSQL URL cannot be read"));
        }
        Ok(Self::Postgres(url.to_owned()))
    }

    fn sqlite(path: &str) -> Result<Self, Error> {
        if path == ":memory:" {
            return Ok(Self::Memory);
        }
        if path.is_empty() {
            return Err(Error::BadUrl("the SQLite URL names no file"));
        }
        // A question mark is more often an attempt to set something than part of a name.
        if path.contains(|c: char| c == '?' || c.is_control()) {
            return Err(Error::BadUrl("the SQLite URL takes no parameters"));
        }
        // A path is meant as it is written; the library reads it as part of a URL.
        let written = path.replace('%', "%25").replace('#', "%23");
        Ok(Self::File { url: format!("sqlite:{written}?mode=rwc"), path: path.into() })
    }

    const fn kind(&self) -> Kind {
        match self {
            Self::Memory | Self::File { .. } => Kind::Sqlite,
            Self::Postgres(_) => Kind::Postgres,
        }
    }

    fn path(&self) -> Option<PathBuf> {
        match self {
            Self::File { path, .. } => Some(path.clone()),
            Self::Memory | Self::Postgres(_) => None,
        }
    }

    fn url(&self) -> &str {
        match self {
            Self::Memory => "sqlite::memory:",
            Self::File { url, .. } | Self::Postgres(url) => url,
        }
    }

    /// A pool whose connections start with `pragmas`, on SQLite. There they live as long as the
    /// pool, since a database in memory goes with its connection, and none has to be tested by a
    /// statement. One that SQLite has rolled back by itself (a full disk, a failed read) is closed:
    /// sqlx still counts a transaction there, and could never begin another.
    fn pool(&self, connections_max: u32, pragmas: &'static str) -> AnyPoolOptions {
        let pool = AnyPoolOptions::new().max_connections(connections_max);
        match self.kind() {
            Kind::Postgres => pool.acquire_timeout(SERVER_CONNECT_MAX),
            Kind::Sqlite => pool
                .idle_timeout(None)
                .max_lifetime(None)
                .test_before_acquire(false)
                .before_acquire(|connection, _| {
                    Box::pin(std::future::ready(Ok(!connection.is_in_transaction())))
                })
                .after_connect(move |connection, _| {
                    Box::pin(async move {
                        sqlx::raw_sql(pragmas).execute(connection).await?;
                        Ok(())
                    })
                }),
        }
    }
}
