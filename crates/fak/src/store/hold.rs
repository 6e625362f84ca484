//! Holds: whose a worker is while its device's memory is somebody else's.
//!
//! Invariant: at most one a worker; and one that was put is durable when that returns.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use sqlx::any::AnyRow;

use super::database::Database;
use super::ledger::Columns;
use super::{Error, bounds};

/// Holds in one answer: more than there are workers.
const HOLDS_MAX: i64 = 10_000;

/// A hold.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Hold {
    /// The worker.
    pub worker: String,
    /// Whose it is.
    pub holder: String,
    /// Since when, RFC 3339 in UTC.
    pub since: String,
    /// What the engine answered to fixed prompts before it slept; null where it was not asked.
    pub canary: Value,
}

const PUT: &str = "INSERT INTO holds (worker, holder, since, canary) VALUES ($1, $2, $3, $4) \
    ON CONFLICT (worker) DO UPDATE SET holder = excluded.holder, since = excluded.since, \
    canary = excluded.canary";
const GET: &str = "SELECT * FROM holds WHERE worker = $1";
const LIST: &str = "SELECT * FROM holds ORDER BY worker LIMIT $1";
const DELETE: &str = "DELETE FROM holds WHERE worker = $1";

/// Writes `hold` in place of the worker's hold, if there is one.
pub(super) async fn put(database: &Database, hold: &Hold) -> Result<(), Error> {
    let mut write = database.write().await?;
    let query = sqlx::query(PUT)
        .bind(bounds::name("worker", &hold.worker)?)
        .bind(bounds::name("holder", &hold.holder)?)
        .bind(&hold.since)
        .bind(bounds::json(&hold.canary));
    query.execute(&mut *write).await?;
    Ok(write.commit().await?)
}

/// The hold on this worker.
pub(super) async fn get(database: &Database, worker: &str) -> Result<Option<Hold>, Error> {
    let row = sqlx::query(GET).bind(worker).fetch_optional(database.reader()).await?;
    row.as_ref().map(hold).transpose()
}

/// All holds, by worker.
pub(super) async fn list(database: &Database) -> Result<Vec<Hold>, Error> {
    let query = sqlx::query(LIST).bind(HOLDS_MAX);
    query.fetch_all(database.reader()).await?.iter().map(hold).collect()
}

/// Lets a worker go; whether it was held.
pub(super) async fn delete(database: &Database, worker: &str) -> Result<bool, Error> {
    let mut write = database.write().await?;
    let deleted = sqlx::query(DELETE).bind(worker).execute(&mut *write).await?.rows_affected();
    write.commit().await?;
    Ok(deleted > 0)
}

fn hold(row: &AnyRow) -> Result<Hold, Error> {
    let worker: String = Columns::of(row, "a hold").get("worker")?;
    let record = format!("hold of {worker:?}");
    let columns = Columns::of(row, &record);
    Ok(Hold {
        holder: columns.get("holder")?,
        since: columns.get("since")?,
        canary: columns.json("canary")?,
        worker,
    })
}
