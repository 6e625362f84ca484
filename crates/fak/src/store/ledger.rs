//! The ledger: how intents and outcomes are written, and how rows are read.
//!
//! Invariant: rows are read through the view `witness` alone, which says what an intent without an
//! outcome reads as; so that filters, lists and people with an SQL shell see the same.

use fak_kernel::{Action, Disposition, Evidence, Phase};
use serde_json::Value;
use sqlx::any::AnyRow;
use sqlx::{Any, AnyConnection, AssertSqlSafe, Decode, Row as _, Type};

use super::database::Database;
use super::row::word::Word;
use super::{Error, Filter, NewIntent, Outcome, Row, Standing, Tiers, bounds};

/// Rows in one answer.
pub const ROWS_MAX: u32 = 1000;

/// A row as it came to be by a change of the ledger.
#[derive(Clone, Debug, PartialEq)]
pub struct Change {
    /// The change's number: greater than those of all that were seen before it.
    pub number: u64,
    /// The row after it.
    pub row: Row,
}

/// A statement that reads rows: all of them, up to what `$tail` says.
macro_rules! select {
    ($tail:literal) => {
        concat!(
            "SELECT seq, at, worker, rank, incarnation, session, action, level, phase, kv, tiers, ",
            "weight_version, CAST(warm_demoted AS INTEGER) AS warm_demoted, ",
            "CAST(serving AS INTEGER) AS serving, evidence, asked, answered, observed, reason, ",
            "standing, change FROM witness ",
            $tail
        )
    };
}

/// The number of the newest change; 0 where the ledger is empty.
pub(super) async fn newest(database: &Database) -> Result<u64, Error> {
    let next = sqlx::query("SELECT change FROM witness_next").fetch_one(database.reader()).await?;
    Ok(Columns::of(&next, "the ledger").natural::<u64>("change")?.saturating_sub(1))
}

/// Writes an intent; its number, and that of the change.
pub(super) async fn intent(
    database: &Database,
    row: &NewIntent,
    at: &str,
) -> Result<(u64, u64), Error> {
    let mut write = database.write().await?;
    let (seq, change) = insert_intent(&mut write, row, at).await?;
    write.commit().await?;
    Ok((natural(seq), natural(change)))
}

/// Writes the outcome of intent `seq`.
pub(super) async fn outcome(
    database: &Database,
    seq: u64,
    outcome: &Outcome,
    at: &str,
) -> Result<Change, Error> {
    // No row has a number that is beyond the column's.
    let key = i64::try_from(seq).map_err(|_| Error::NoIntent(seq))?;
    let mut write = database.write().await?;
    let found = sqlx::query(OUTCOME_PLACE).bind(key).fetch_one(&mut *write).await?;
    if found.try_get::<i64, _>("intents")? == 0 {
        return Err(Error::NoIntent(seq));
    }
    if found.try_get::<i64, _>("outcomes")? > 0 {
        return Err(Error::Conflict(seq));
    }
    let change = found.try_get("change")?;
    insert_outcome(&mut write, (key, change), outcome, at).await?;
    let written = read_back(&mut write, key).await?;
    write.commit().await?;
    Ok(written)
}

/// Writes both at once, as one change.
pub(super) async fn note(
    database: &Database,
    row: &NewIntent,
    mut outcome: Outcome,
    at: &str,
) -> Result<Change, Error> {
    let mut write = database.write().await?;
    let place = insert_intent(&mut write, row, at).await?;
    outcome.standing = of_row(outcome.standing, row, place.0);
    insert_outcome(&mut write, place, &outcome, at).await?;
    let written = read_back(&mut write, place.0).await?;
    write.commit().await?;
    Ok(written)
}

/// Writes an intent and its outcome, and takes both back.
pub(super) async fn check(database: &Database, at: &str) -> Result<(), Error> {
    let mut write = database.write().await?;
    let row = NewIntent::probe();
    let place = insert_intent(&mut write, &row, at).await?;
    insert_outcome(&mut write, place, &Outcome::probe(), at).await?;
    read_back(&mut write, place.0).await?;
    Ok(write.rollback().await?)
}

/// Rows that `filter` names.
pub(super) async fn rows(database: &Database, filter: &Filter) -> Result<Vec<Row>, Error> {
    let words = [
        ("worker", filter.worker.as_deref()),
        ("session", filter.session.as_deref()),
        ("action", filter.action.map(Action::as_str)),
        ("kv", filter.kv.map(Disposition::as_str)),
    ];
    let mut sql = String::from(select!("WHERE seq > $1"));
    let mut values = Vec::new();
    for (column, value) in words {
        let Some(value) = value else { continue };
        if value.contains('\0') {
            return Ok(Vec::new()); // no row holds one, and PostgreSQL takes none
        }
        values.push(value);
        sql.push_str(&format!(" AND {column} = ${}", values.len() + 1));
    }
    let order = if filter.newest_first { "DESC" } else { "ASC" };
    sql.push_str(&format!(" ORDER BY seq {order} LIMIT ${}", values.len() + 2));
    let mut query = sqlx::query(AssertSqlSafe(sql)).bind(after_key(filter.after.unwrap_or(0)));
    for value in values {
        query = query.bind(value);
    }
    let limit = filter.limit.unwrap_or(ROWS_MAX).min(ROWS_MAX);
    let rows = query.bind(i64::from(limit)).fetch_all(database.reader()).await?;
    rows.iter().map(|row| Ok(change(row)?.row)).collect()
}

/// The newest row on `worker`.
pub(super) async fn last_row(database: &Database, worker: &str) -> Result<Option<Row>, Error> {
    let worker = Some(worker.to_owned());
    let filter = Filter { worker, limit: Some(1), newest_first: true, ..Filter::default() };
    Ok(rows(database, &filter).await?.pop())
}

/// The newest row on `worker` that says what holds from it on.
pub(super) async fn last_standing(database: &Database, worker: &str) -> Result<Option<Row>, Error> {
    let sql = select!("WHERE worker = $1 AND standing IS NOT NULL ORDER BY seq DESC LIMIT 1");
    let row = sqlx::query(sql).bind(worker).fetch_optional(database.reader()).await?;
    row.map(|row| Ok(change(&row)?.row)).transpose()
}

/// Intents without an outcome, the newest first.
pub(super) async fn open_intents(database: &Database) -> Result<Vec<Row>, Error> {
    let sql = select!("WHERE recorded_at IS NULL ORDER BY seq DESC LIMIT $1");
    let rows = sqlx::query(sql).bind(i64::from(ROWS_MAX)).fetch_all(database.reader()).await?;
    rows.iter().map(|row| Ok(change(row)?.row)).collect()
}

/// Rows whose last change came after `after`, in the order of their changes.
pub(super) async fn changes(
    database: &Database,
    after: u64,
    limit: u32,
) -> Result<Vec<Change>, Error> {
    let query = sqlx::query(CHANGES).bind(after_key(after)).bind(i64::from(limit.min(ROWS_MAX)));
    query.fetch_all(database.reader()).await?.iter().map(change).collect()
}

/// The first of the outcomes, and of the intents that have none: each found by its own index.
const CHANGES: &str = select!(
    "WHERE seq IN (
        SELECT seq FROM (SELECT seq FROM witness_outcomes
            WHERE change > $1 ORDER BY change LIMIT $2) AS outcomes
        UNION SELECT seq FROM (SELECT seq FROM witness_intents i
            WHERE change > $1
                AND NOT EXISTS (SELECT 1 FROM witness_outcomes o WHERE o.seq = i.seq)
            ORDER BY change LIMIT $2) AS intents
    ) ORDER BY change LIMIT $2"
);

const INTENT_PLACE: &str = "SELECT seq, change FROM witness_next";

const INTENT: &str = "INSERT INTO witness_intents (seq, change, at, worker, rank, incarnation, \
    session, action, level, weight_version, warm_demoted, asked, standing) \
    VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13)";

const OUTCOME_PLACE: &str = "SELECT change, \
    (SELECT COUNT(*) FROM witness_intents WHERE seq = $1) AS intents, \
    (SELECT COUNT(*) FROM witness_outcomes WHERE seq = $1) AS outcomes FROM witness_next";

const OUTCOME: &str = "INSERT INTO witness_outcomes (seq, change, recorded_at, phase, kv, tiers, \
    weight_version, warm_demoted, serving, evidence, answered, observed, reason, standing) \
    VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14)";

/// Number and change of the new row.
async fn insert_intent(
    write: &mut AnyConnection,
    row: &NewIntent,
    at: &str,
) -> Result<(i64, i64), Error> {
    let place = sqlx::query(INTENT_PLACE).fetch_one(&mut *write).await?;
    let place: (i64, i64) = (place.try_get("seq")?, place.try_get("change")?);
    let query = sqlx::query(INTENT)
        .bind(place.0)
        .bind(place.1)
        .bind(at)
        .bind(bounds::name("worker", &row.worker)?)
        .bind(row.rank.map(i64::from))
        .bind(bounds::name_of("incarnation", &row.incarnation)?)
        .bind(bounds::name_of("session", &row.session)?)
        .bind(row.action.as_str())
        .bind(row.level.map(i64::from))
        .bind(bounds::name_of("weight_version", &row.weight_version)?)
        .bind(row.warm_demoted)
        .bind(bounds::json(&row.asked))
        .bind(of_row(row.standing.clone(), row, place.0).as_ref().map(standing_json));
    query.execute(write).await?;
    Ok(place)
}

/// A standing in the row of `intent`, whose number is `seq`.
fn of_row(standing: Option<Standing>, intent: &NewIntent, seq: i64) -> Option<Standing> {
    let own = intent.is_epoch.then(|| natural(seq));
    standing.map(|s| Standing { weights_epoch: own.or(s.weights_epoch), ..s })
}

fn standing_json(standing: &Standing) -> String {
    serde_json::to_string(standing).expect("words and numbers are JSON")
}

async fn insert_outcome(
    write: &mut AnyConnection,
    (seq, change): (i64, i64),
    outcome: &Outcome,
    at: &str,
) -> Result<(), Error> {
    let tiers = serde_json::to_string(&outcome.tiers).expect("words are JSON");
    let query = sqlx::query(OUTCOME)
        .bind(seq)
        .bind(change)
        .bind(at)
        .bind(outcome.phase.as_str())
        .bind(outcome.kv.as_str())
        .bind(tiers)
        .bind(bounds::name_of("weight_version", &outcome.weight_version)?)
        .bind(outcome.warm_demoted)
        .bind(outcome.serving)
        .bind(outcome.evidence.as_str())
        .bind(bounds::json(&outcome.answered))
        .bind(bounds::json(&outcome.observed))
        .bind(bounds::reason("reason", &outcome.reason)?)
        .bind(outcome.standing.as_ref().map(standing_json));
    query.execute(write).await?;
    Ok(())
}

async fn read_back(write: &mut AnyConnection, seq: i64) -> Result<Change, Error> {
    change(&sqlx::query(select!("WHERE seq = $1")).bind(seq).fetch_one(write).await?)
}

/// A number to read after; no row is beyond the column's greatest.
fn after_key(after: u64) -> i64 {
    i64::try_from(after).unwrap_or(i64::MAX)
}

/// A number that the schema holds above 0.
fn natural(number: i64) -> u64 {
    u64::try_from(number).expect("the schema checks it")
}

fn change(row: &AnyRow) -> Result<Change, Error> {
    let seq = Columns::of(row, "a witness row").natural::<u64>("seq")?;
    let record = format!("witness row {seq}");
    let columns = Columns::of(row, &record);
    let row = Row {
        seq,
        at: columns.get("at")?,
        worker: columns.get("worker")?,
        rank: columns.natural_of("rank")?,
        incarnation: columns.get("incarnation")?,
        session: columns.get("session")?,
        action: columns.word::<Action>("action")?,
        level: columns.natural_of("level")?,
        phase: columns.word::<Phase>("phase")?,
        kv: columns.word::<Disposition>("kv")?,
        tiers: columns.json::<Tiers>("tiers")?,
        weight_version: columns.get("weight_version")?,
        warm_demoted: columns.get::<i64>("warm_demoted")? != 0,
        serving: columns.get::<i64>("serving")? != 0,
        evidence: columns.word::<Evidence>("evidence")?,
        asked: columns.json::<Value>("asked")?,
        answered: columns.json::<Value>("answered")?,
        observed: columns.json::<Value>("observed")?,
        reason: columns.get("reason")?,
        standing: columns.json_of::<Standing>("standing")?,
    };
    Ok(Change { number: columns.natural("change")?, row })
}

/// Reads columns; what is not as fak writes it is corrupt.
pub(super) struct Columns<'a> {
    row: &'a AnyRow,
    record: &'a str,
}

impl<'a> Columns<'a> {
    /// Of `row`, called `record` in an error.
    pub(super) const fn of(row: &'a AnyRow, record: &'a str) -> Self {
        Self { row, record }
    }

    /// A column as the database library decodes it.
    pub(super) fn get<T>(&self, field: &'static str) -> Result<T, Error>
    where
        T: for<'r> Decode<'r, Any> + Type<Any>,
    {
        let value = self.row.try_get(field);
        value.map_err(|error| self.corrupt(field, "is of another type", Some(error.into())))
    }

    /// A number from 0.
    pub(super) fn natural<T: TryFrom<i64>>(&self, field: &'static str) -> Result<T, Error> {
        let number = self.get::<i64>(field)?;
        T::try_from(number).map_err(|_| self.corrupt(field, "is out of range", None))
    }

    /// As [`Columns::natural`], where there is one.
    pub(super) fn natural_of<T: TryFrom<i64>>(
        &self,
        field: &'static str,
    ) -> Result<Option<T>, Error> {
        let number = self.get::<Option<i64>>(field)?.map(T::try_from).transpose();
        number.map_err(|_| self.corrupt(field, "is out of range", None))
    }

    /// A word of the kernel's.
    pub(super) fn word<T: Word>(&self, field: &'static str) -> Result<T, Error> {
        let word = self.get::<String>(field)?;
        T::parse(&word).ok_or_else(|| self.corrupt(field, "is no word of its list", None))
    }

    /// JSON of this shape.
    pub(super) fn json<T: serde::de::DeserializeOwned>(
        &self,
        field: &'static str,
    ) -> Result<T, Error> {
        self.parse(field, &self.get::<String>(field)?)
    }

    /// As [`Columns::json`], where there is some.
    pub(super) fn json_of<T: serde::de::DeserializeOwned>(
        &self,
        field: &'static str,
    ) -> Result<Option<T>, Error> {
        self.get::<Option<String>>(field)?.map(|text| self.parse(field, &text)).transpose()
    }

    fn parse<T: serde::de::DeserializeOwned>(
        &self,
        field: &'static str,
        text: &str,
    ) -> Result<T, Error> {
        serde_json::from_str(text).map_err(|error| {
            self.corrupt(field, "is not the JSON it should be", Some(error.into()))
        })
    }

    /// That `field` is not as it should be.
    pub(super) fn corrupt(
        &self,
        field: &'static str,
        problem: &'static str,
        source: Option<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Error {
        Error::Corrupt { record: self.record.to_owned(), field, problem, source }
    }
}
