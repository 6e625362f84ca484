//! Sessions as they outlive the process.
//!
//! Invariant: what is stored of a session is what was put last, whole.

use serde::{Deserialize, Serialize};
use sqlx::any::AnyRow;

use super::database::Database;
use super::ledger::Columns;
use super::row::word::Word;
use super::{Error, bounds};

/// Sessions in one answer.
pub const SESSIONS_MAX: u32 = 100_000;

/// Whether a session's next request may go out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Run {
    /// It may.
    Active,
    /// It waits for its worker.
    Dormant,
}

impl Run {
    /// The word.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Active => "active",
            Self::Dormant => "dormant",
        }
    }

    /// The value that a word names.
    #[must_use]
    pub fn parse(word: &str) -> Option<Self> {
        [Self::Active, Self::Dormant].into_iter().find(|run| run.as_str() == word)
    }
}

impl Word for Run {
    fn word(self) -> &'static str {
        self.as_str()
    }

    fn parse(word: &str) -> Option<Self> {
        Self::parse(word)
    }
}

/// A session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Session {
    /// Its name, matched exactly.
    pub id: String,
    /// The worker that it is bound to.
    pub worker: Option<String>,
    /// Whether its next request may go out.
    pub run: Run,
    /// Why it may not.
    pub reason: Option<String>,
    /// The `cache_salt` that takes the place of its identity's.
    pub salt: Option<String>,
    /// When it was first seen, in ms since 1970 UTC.
    pub created_at: i64,
    /// When it was last seen, in ms since 1970 UTC.
    pub last_seen_at: i64,
    /// Prompt tokens claimed warm, of all its requests.
    pub claimed_tokens: u64,
    /// Prompt tokens that engines reported as cached.
    pub cached_tokens: u64,
    /// The last witness row that was written through it.
    pub last_witness: Option<u64>,
}

const PUT: &str = "INSERT INTO sessions (id, worker, run, reason, salt, created_at, last_seen_at, \
    claimed_tokens, cached_tokens, last_witness) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10) \
    ON CONFLICT (id) DO UPDATE SET worker = excluded.worker, run = excluded.run, \
    reason = excluded.reason, salt = excluded.salt, created_at = excluded.created_at, \
    last_seen_at = excluded.last_seen_at, claimed_tokens = excluded.claimed_tokens, \
    cached_tokens = excluded.cached_tokens, last_witness = excluded.last_witness";

const GET: &str = "SELECT * FROM sessions WHERE id = $1";
const LIST: &str = "SELECT * FROM sessions ORDER BY last_seen_at DESC, id DESC LIMIT $1";
const DELETE: &str = "DELETE FROM sessions WHERE id = $1";

/// Writes all, or none. The ledger's lock keeps two processes from waiting for each other's rows.
pub(super) async fn put(database: &Database, sessions: &[Session]) -> Result<(), Error> {
    let mut write = database.write().await?;
    for session in sessions {
        let last_witness = session.last_witness.map(|seq| bounds::number("last_witness", seq));
        let reason = session.reason.as_deref().map(|reason| bounds::reason("reason", reason));
        let query = sqlx::query(PUT)
            .bind(bounds::name("id", &session.id)?)
            .bind(bounds::name_of("worker", &session.worker)?)
            .bind(session.run.as_str())
            .bind(reason.transpose()?)
            .bind(bounds::name_of("salt", &session.salt)?)
            .bind(session.created_at)
            .bind(session.last_seen_at)
            .bind(bounds::number("claimed_tokens", session.claimed_tokens)?)
            .bind(bounds::number("cached_tokens", session.cached_tokens)?)
            .bind(last_witness.transpose()?);
        query.execute(&mut *write).await?;
    }
    Ok(write.commit().await?)
}

/// The session of this id.
pub(super) async fn get(database: &Database, id: &str) -> Result<Option<Session>, Error> {
    if id.contains('\0') {
        return Ok(None); // none is stored, and PostgreSQL takes none
    }
    let row = sqlx::query(GET).bind(id).fetch_optional(database.reader()).await?;
    row.as_ref().map(session).transpose()
}

/// The last seen.
pub(super) async fn list(database: &Database, limit: u32) -> Result<Vec<Session>, Error> {
    let query = sqlx::query(LIST).bind(i64::from(limit.min(SESSIONS_MAX)));
    query.fetch_all(database.reader()).await?.iter().map(session).collect()
}

/// Forgets one; whether there was one.
pub(super) async fn delete(database: &Database, id: &str) -> Result<bool, Error> {
    if id.contains('\0') {
        return Ok(false);
    }
    let mut write = database.write().await?;
    let deleted = sqlx::query(DELETE).bind(id).execute(&mut *write).await?.rows_affected();
    write.commit().await?;
    Ok(deleted > 0)
}

fn session(row: &AnyRow) -> Result<Session, Error> {
    let id: String = Columns::of(row, "a session").get("id")?;
    let record = format!("session {id:?}");
    let columns = Columns::of(row, &record);
    Ok(Session {
        worker: columns.get("worker")?,
        run: columns.word("run")?,
        reason: columns.get("reason")?,
        salt: columns.get("salt")?,
        created_at: columns.get("created_at")?,
        last_seen_at: columns.get("last_seen_at")?,
        claimed_tokens: columns.natural("claimed_tokens")?,
        cached_tokens: columns.natural("cached_tokens")?,
        last_witness: columns.natural_of("last_witness")?,
        id,
    })
}
