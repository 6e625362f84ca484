//! The database is away for a while: what happens meanwhile is in the ledger afterwards, and no
//! belief waits for it; and a fak that another took the ledger from ends.

use fak_kernel::{Action, Disposition};
use fak_sim::{Binds, Sim, SimConfig};
use serde_json::json;
use sqlx::{Connection as _, SqliteConnection};

use super::peer::{Hold, Peer};
use super::process::{Setup, prompt, until};
use crate::store::{Place, break_claim, on_postgres};

/// Keeps everybody else from writing the ledger, until it is dropped or closed.
async fn lock(setup: &Setup) -> SqliteConnection {
    let mut writer = SqliteConnection::connect(&setup.db()).await.unwrap();
    sqlx::query("BEGIN IMMEDIATE").execute(&mut writer).await.unwrap();
    writer
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_while_the_database_is_away_is_learnt_at_once_and_written_later() {
    let mut sim = Sim::start(SimConfig::default(), Binds::default()).await.unwrap();
    let setup = Setup::new("restart_without_database").sims([&sim]);
    let fak = setup.start().await;
    fak.heard("w0").await;
    fak.warm(&prompt(0)).await;
    let before = fak.worker("w0").await["incarnation"].clone();
    let writer = lock(&setup).await;
    sim.restart().await.unwrap();
    until("the new life is known", async || {
        let worker = fak.worker("w0").await;
        let is_new = worker["incarnation"] != before && worker["serving"] == true;
        (is_new && worker["models"].as_array().is_some_and(|m| !m.is_empty())).then_some(())
    })
    .await;
    let asked = fak.ask(&prompt(0)).await;
    assert_eq!((asked.claimed, asked.cached), (0, 0), "{asked:?}");
    until("the row waits", async || fak.talk().contains("a row waits").then_some(())).await;
    let away = fak.rows().await;
    assert!(!away.iter().any(|row| row.action == Action::Restart), "{away:?}");
    let until_then = jiff::Timestamp::now();
    writer.close().await.unwrap();
    let row = until("the row is written", async || {
        fak.rows().await.into_iter().find(|row| row.action == Action::Restart)
    })
    .await;
    assert!(row.at.parse::<jiff::Timestamp>().unwrap() < until_then, "{row:?}");
    assert_eq!(row.kv, Disposition::Forgotten);
    assert_ne!(json!(row.incarnation), before);
    fak.terminated().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_outcome_that_the_database_did_not_take_is_written_later() {
    let sim = Sim::start(SimConfig::default(), Binds::default()).await.unwrap();
    let peer = Peer::before(sim.base_url()).await;
    let setup = Setup::new("outcome_without_database").worker("w0", &peer.url);
    let fak = setup.start().await;
    fak.heard("w0").await;
    peer.hold("/sleep", Hold::After);
    let path = "/fak/v1/workers/w0/sleep";
    let body = json!({ "level": 1 });
    let (refused, writer) = tokio::join!(fak.post(path, &body), async {
        peer.held().await;
        let writer = lock(&setup).await;
        peer.release();
        writer
    });
    assert_eq!(refused.status, 503, "{}", refused.text);
    fak.worker_is("w0", "phase", "sleeping").await;
    let row = |rows: Vec<fak::store::Row>| rows.into_iter().rfind(|r| r.action == Action::Sleep);
    assert_eq!(row(fak.rows().await).unwrap().reason, "unrecorded");
    writer.close().await.unwrap();
    until("its outcome is written", async || {
        let row = row(fak.rows().await).unwrap();
        (row.reason == "confirmed").then_some(())
    })
    .await;
    fak.terminated().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fak_whose_ledger_another_fak_had_meanwhile_ends() {
    on_postgres("a_fak_whose_ledger_another", async |place: &Place| {
        let sim = Sim::start(SimConfig::default(), Binds::default()).await.unwrap();
        let setup = Setup::new("ledger_lost").sims([&sim]).env("FAK_DB", &place.url);
        let mut fak = setup.start().await;
        fak.heard("w0").await;
        let other = place.open().await;
        // The fak may take it back first: nothing was lost then, and its claim is broken again.
        until("the other has the ledger", async || {
            break_claim(place, "fak serve").await;
            other.own("another fak").await.ok()
        })
        .await;
        other.hold_put("w0", "trainer", json!(null)).await.unwrap();
        other.close().await;
        assert_eq!(fak.exit().await.code(), Some(1), "{}", fak.talk());
        let talk = fak.talk();
        assert!(talk.contains("another fak wrote the ledger meanwhile"), "{talk}");
        let again = setup.start().await;
        again.worker_is("w0", "held_by", "trainer").await;
        again.terminated().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fak_whose_lock_file_was_removed_ends_once_another_fak_had_the_ledger() {
    let sim = Sim::start(SimConfig::default(), Binds::default()).await.unwrap();
    let setup = Setup::new("lock_lost").sims([&sim]);
    let mut fak = setup.start().await;
    fak.heard("w0").await;
    let other = setup.store().await;
    std::fs::remove_file(setup.folder().join("fak.db-owner")).unwrap();
    // The fak may take it back first: nothing was lost then.
    until("the other has the ledger", async || {
        let _ = std::fs::remove_file(setup.folder().join("fak.db-owner"));
        other.own("another fak").await.ok()
    })
    .await;
    other.hold_put("w0", "trainer", json!(null)).await.unwrap();
    other.close().await;
    assert_eq!(fak.exit().await.code(), Some(1), "{}", fak.talk());
    assert!(fak.talk().contains("another fak wrote the ledger meanwhile"), "{}", fak.talk());
    let again = setup.start().await;
    again.worker_is("w0", "held_by", "trainer").await;
    again.terminated().await;
}
