//! The store's contract, held on SQLite and PostgreSQL by one suite.
//!
//! Invariant: each test has a database of its own, which goes with it. Without a server at
//! [`SERVER`] the tests on PostgreSQL say by name that they were skipped; in CI they fail.

mod concurrency;
mod corrupt;
mod holds;
mod hostile;
mod ledger;
mod ownership;
mod schema;
mod sessions;
mod urls;

use std::panic::AssertUnwindSafe;
use std::path::PathBuf;

use fak::store::{NewIntent, Outcome, Standing, Store, Tiers};
use fak_kernel::witness::{Part, Parts};
use fak_kernel::{Action, Disposition, Evidence, Phase, Tier, TierSet};
use futures_util::FutureExt as _;
use serde_json::{Value, json};
use sqlx::{AnyConnection, AssertSqlSafe, Connection as _};

/// Where PostgreSQL is, unless `FAK_TEST_POSTGRES` says otherwise.
const SERVER: &str = "postgres://postgres@127.0.0.1:5432/test";

/// Declares each test twice: on SQLite, and on PostgreSQL.
macro_rules! on_both {
    ($($name:ident),+ $(,)?) => {
        mod sqlite {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $name() {
                crate::store::on_sqlite(stringify!($name), super::$name).await;
            })+
        }
        mod postgres {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $name() {
                crate::store::on_postgres(stringify!($name), super::$name).await;
            })+
        }
    };
}
pub(crate) use on_both;

/// A database of one test's own.
pub(crate) struct Place {
    pub(crate) url: String,
    is_sqlite: bool,
}

impl Place {
    pub(crate) async fn open(&self) -> Store {
        Store::open(&self.url).await.expect("the store opens")
    }

    /// A connection beside the store, as somebody else would have it.
    async fn raw(&self) -> AnyConnection {
        sqlx::any::install_default_drivers();
        AnyConnection::connect(&self.url).await.expect("the database is there")
    }

    /// What the database says to `sql`.
    pub(crate) async fn raw_run(&self, sql: &str) -> Result<u64, sqlx::Error> {
        let mut connection = self.raw().await;
        let done = sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(&mut connection).await;
        connection.close().await.expect("it closes");
        Ok(done?.rows_affected())
    }
}

/// A file that is not there yet.
fn file(name: &str) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let folder = folder.join(format!("store-{}", std::process::id())).join(name);
    std::fs::create_dir_all(&folder).expect("a folder");
    folder.join("fak.db")
}

async fn on_sqlite(name: &str, test: impl AsyncFnOnce(&Place)) {
    let path = file(name);
    let place = Place { url: format!("sqlite:{}", path.display()), is_sqlite: true };
    test(&place).await;
    std::fs::remove_dir_all(path.parent().expect("its folder")).expect("it goes");
}

pub(crate) async fn on_postgres(name: &str, test: impl AsyncFnOnce(&Place)) {
    sqlx::any::install_default_drivers();
    let server = std::env::var("FAK_TEST_POSTGRES").unwrap_or_else(|_| SERVER.to_owned());
    let mut admin = match AnyConnection::connect(&server).await {
        Ok(admin) => admin,
        Err(error) => return skip(name, &error),
    };
    let schema = format!("fak_{}_{name}", std::process::id());
    // PostgreSQL cuts names there, and two tests would meet in one.
    let schema = &schema[..schema.len().min(63)];
    run(&mut admin, format!("CREATE SCHEMA {schema}")).await;
    let place =
        Place { url: format!("{server}?options=-csearch_path%3D{schema}"), is_sqlite: false };
    let end = AssertUnwindSafe(test(&place)).catch_unwind().await;
    run(&mut admin, format!("DROP SCHEMA {schema} CASCADE")).await;
    if let Err(panic) = end {
        std::panic::resume_unwind(panic);
    }
}

async fn run(admin: &mut AnyConnection, sql: String) {
    sqlx::raw_sql(AssertSqlSafe(sql)).execute(admin).await.expect("it runs");
}

#[expect(clippy::print_stdout, reason = "a test that did not run says so")]
fn skip(name: &str, error: &sqlx::Error) {
    assert_ne!(std::env::var("CI").as_deref(), Ok("true"), "no PostgreSQL for {name}: {error}");
    println!("skipped: {name} on PostgreSQL: {error}");
}

/// Breaks the connection of the fak whose name in the server begins with `who`, and with it its
/// claim to the ledger.
pub(crate) async fn break_claim(place: &Place, who: &str) {
    let broken = format!(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
        WHERE application_name LIKE '{who}%' AND pid IN (SELECT pid FROM pg_locks
        WHERE objid = 'witness_intents'::regclass::oid)"
    );
    place.raw_run(&broken).await.expect("it goes");
}

fn intent(worker: &str) -> NewIntent {
    NewIntent {
        worker: worker.to_owned(),
        rank: None,
        incarnation: Some("1764.5".to_owned()),
        session: Some("s1".to_owned()),
        action: Action::Sleep,
        level: Some(1),
        weight_version: Some("v6".to_owned()),
        warm_demoted: true,
        asked: json!({ "path": "/sleep", "level": 1 }),
        standing: Some(standing(TierSet::ALL)),
        is_epoch: false,
    }
}

fn outcome() -> Outcome {
    Outcome {
        phase: Phase::Sleeping,
        kv: Disposition::Forgotten,
        tiers: Tiers(vec![
            (Tier::Gpu, Disposition::Forgotten),
            (Tier::Cpu, Disposition::Preserved),
        ]),
        weight_version: Some("v7".to_owned()),
        warm_demoted: true,
        serving: false,
        evidence: Evidence::Observed,
        answered: json!({ "status": 200 }),
        observed: json!({ "is_sleeping": true }),
        reason: "as asked".to_owned(),
        standing: Some(standing(TierSet::of(Tier::Cpu))),
    }
}

/// With these stale tiers, on weights that got their epoch with row 4.
fn standing(stale: TierSet) -> Standing {
    Standing {
        stale,
        weights_proven: true,
        suspect: false,
        awake: Parts::of(Part::Weights),
        takes_weights: true,
        weights_epoch: Some(4),
    }
}

/// What a row with this intent and no outcome says, but for `seq` and `at`.
fn unrecorded(intent: &NewIntent) -> Value {
    json!({
        "worker": intent.worker, "rank": intent.rank, "incarnation": intent.incarnation,
        "session": intent.session, "action": intent.action.as_str(), "level": intent.level,
        "phase": "error", "kv": "unknown", "tiers": { "gpu": "unknown" },
        "weight_version": intent.weight_version, "warm_demoted": intent.warm_demoted,
        "serving": false, "evidence": "none", "asked": intent.asked, "answered": null,
        "observed": null, "reason": "unrecorded", "standing": intent.standing,
    })
}
