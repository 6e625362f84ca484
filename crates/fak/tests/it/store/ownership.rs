//! Whose a ledger is, and whether what was written is where the next fak looks.

use std::fs;
use std::path::PathBuf;

use fak::store::{Error, Store};
use serde_json::Value;

use super::{Place, break_claim, intent, on_both, on_postgres, on_sqlite, outcome};

on_both!(
    a_ledger_has_one_owner_and_the_next_is_told_who,
    a_ledger_that_takes_no_rows_says_so_and_says_when_it_does_again,
);

async fn a_ledger_has_one_owner_and_the_next_is_told_who(place: &Place) {
    let first = place.open().await;
    first.own("fak serve at 127.0.0.1:1").await.expect("it is free");
    let second = place.open().await;
    let error = second.own("fak serve at 127.0.0.1:2").await.expect_err("it is taken").to_string();
    assert!(error.contains("fak serve at 127.0.0.1:1"), "{error}");
    first.intent(intent("w")).await.expect("its owner writes");
    first.close().await;
    second.own("fak serve at 127.0.0.1:2").await.expect("it is free again");
}

async fn a_ledger_that_takes_no_rows_says_so_and_says_when_it_does_again(place: &Place) {
    let store = place.open().await;
    let renamed = "ALTER TABLE witness_intents RENAME COLUMN session TO gone";
    place.raw_run(renamed).await.expect("renamed");
    store.check().await.expect_err("a column is missing");
    let why = store.trouble().expect("it is told");
    assert!(why.contains("the database failed") && why.contains("session"), "{why}");
    let back = "ALTER TABLE witness_intents RENAME COLUMN gone TO session";
    place.raw_run(back).await.expect("renamed");
    store.check().await.expect("as it was");
    assert_eq!(store.trouble(), None);
    assert_eq!(store.rows(&Default::default()).await.expect("read"), [], "nothing stays of checks");
}

/// As a full disk does, whose write SQLite takes back without being asked.
#[tokio::test(flavor = "multi_thread")]
async fn a_ledger_takes_rows_again_after_sqlite_rolled_a_write_back_by_itself() {
    on_sqlite("rolled_back", async |place: &Place| {
        let store = place.open().await;
        let full = "CREATE TRIGGER disk_full BEFORE INSERT ON witness_intents
            BEGIN SELECT RAISE(ROLLBACK, 'the disk is full'); END";
        place.raw_run(full).await.expect("created");
        for _ in 0..2 {
            store.intent(intent("w")).await.expect_err("it is full");
            let why = store.trouble().expect("it is told");
            assert!(why.contains("the disk is full"), "{why}");
        }
        place.raw_run("DROP TRIGGER disk_full").await.expect("dropped");
        store.intent(intent("w")).await.expect("there is room again");
        assert_eq!(store.trouble(), None);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_owner_whose_connection_broke_writes_nothing_once_another_took_over() {
    let name = "an_owner_whose_connection_broke";
    on_postgres(name, async |place: &Place| {
        let (first, second) = (place.open().await, place.open().await);
        first.own("first").await.expect("it is free");
        break_claim(place, "first").await;
        // The server frees the lock some time after it has answered.
        while second.own("second").await.is_err() {
            tokio::task::yield_now().await;
        }
        let error = first.intent(intent("w")).await.expect_err("it is the second's");
        assert!(matches!(error, Error::Lost), "{error}");
        assert!(first.trouble().is_some());
        second.hold_put("w", "trainer", Value::Null).await.expect("its owner writes");
        second.close().await;
        for _ in 0..2 {
            let error = first.intent(intent("w")).await.expect_err("it does not know the hold");
            assert!(matches!(error, Error::Lost), "{error}");
        }
        let third = place.open().await;
        third.own("third").await.expect("the first keeps nobody out");
        third.intent(intent("w")).await.expect("its owner writes");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_owner_whose_connection_broke_goes_on_where_no_other_fak_had_the_ledger() {
    on_postgres("an_owner_goes_on", async |place: &Place| {
        let store = place.open().await;
        store.own("first").await.expect("it is free");
        break_claim(place, "first").await;
        // The server frees the lock some time after it has answered.
        while let Err(error) = store.intent(intent("w")).await {
            assert!(!matches!(error, Error::Lost), "{error}");
        }
        let error = place.open().await.own("second").await.expect_err("the first has it again");
        assert!(matches!(&error, Error::Owned { by } if by.contains("first")), "{error}");
    })
    .await;
}

/// What somebody does to the files of an open database.
async fn after(name: &str, harm: impl Fn(&PathBuf)) -> (Error, Store) {
    let mut found = None;
    on_sqlite(name, async |place: &Place| {
        let store = place.open().await;
        let seq = store.intent(intent("w")).await.expect("the files are there");
        harm(&place.url.strip_prefix("sqlite:").expect("a file").into());
        let outcome = store.outcome(seq, outcome()).await;
        found = Some((outcome.expect_err("nothing is durable there"), store));
    })
    .await;
    found.expect("it ran")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_is_not_called_durable_in_a_file_that_is_gone() {
    let (error, store) = after("file_gone", |path| fs::remove_file(path).expect("gone")).await;
    assert!(matches!(&error, Error::Gone { path } if path.ends_with("fak.db")), "{error}");
    assert!(store.trouble().expect("told").contains("was removed or replaced"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_is_not_called_durable_where_its_log_is_gone() {
    let log = |path: &PathBuf| format!("{}-wal", path.display());
    let (error, _) = after("log_gone", |path| fs::remove_file(log(path)).expect("gone")).await;
    assert!(matches!(&error, Error::Gone { path } if path.ends_with("fak.db-wal")), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_is_not_called_durable_in_a_file_that_was_replaced() {
    let (error, _) = after("file_replaced", |path| {
        let copy = path.with_extension("copy");
        fs::copy(path, &copy).expect("copied");
        fs::rename(copy, path).expect("replaced");
    })
    .await;
    assert!(matches!(error, Error::Gone { .. }), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_owner_whose_lock_was_removed_writes_nothing_once_another_took_over() {
    for is_over in [false, true] {
        on_sqlite(&format!("lock_gone_{is_over}"), async |place: &Place| {
            let (first, second) = (place.open().await, place.open().await);
            first.own("first").await.expect("it is free");
            let seq = first.intent(intent("w")).await.expect("its owner writes");
            fs::remove_file(lock_of(place)).expect("gone");
            second.own("second").await.expect("nobody locks the file that is there now");
            second.intent(intent("w")).await.expect("its owner writes");
            if is_over {
                second.close().await;
            }
            for error in [
                first.intent(intent("w")).await.expect_err("the second had it"),
                first.outcome(seq, outcome()).await.expect_err("the second had it"),
                first.check().await.expect_err("the second had it"),
            ] {
                assert!(matches!(error, Error::Lost), "{error}");
            }
            assert!(first.trouble().expect("told").contains("another fak wrote the ledger"));
            assert_eq!(first.rows(&Default::default()).await.expect("read").len(), 2);
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_owner_whose_lock_was_removed_goes_on_where_no_other_fak_had_the_ledger() {
    on_sqlite("lock_again", async |place: &Place| {
        let store = place.open().await;
        store.own("first").await.expect("it is free");
        for _ in 0..2 {
            fs::remove_file(lock_of(place)).expect("gone");
            store.intent(intent("w")).await.expect("nobody had it");
            let error = place.open().await.own("second").await.expect_err("the first has it again");
            assert!(matches!(&error, Error::Owned { by } if by == "first"), "{error}");
        }
        assert_eq!(store.trouble(), None);
    })
    .await;
}

/// Whoever came then wrote into a file that is not open here.
#[tokio::test(flavor = "multi_thread")]
async fn an_owner_whose_lock_and_ledger_were_removed_has_lost_it_once_another_ledger_is_there() {
    on_sqlite("all_gone", async |place: &Place| {
        let store = place.open().await;
        store.own("first").await.expect("it is free");
        let path: PathBuf = place.url.strip_prefix("sqlite:").expect("a file").into();
        fs::remove_file(lock_of(place)).expect("gone");
        fs::remove_file(&path).expect("gone");
        let error = store.check().await.expect_err("nothing is there");
        assert!(matches!(error, Error::Gone { .. }), "{error}");
        fs::remove_file(lock_of(place)).expect("made anew, and gone");
        fs::write(&path, "").expect("another");
        let error = store.check().await.expect_err("another had it");
        assert!(matches!(error, Error::Lost), "{error}");
    })
    .await;
}

fn lock_of(place: &Place) -> String {
    format!("{}-owner", place.url.strip_prefix("sqlite:").expect("a file"))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_ledger_whose_path_is_a_link_is_written_and_has_one_owner() {
    on_sqlite("linked", async |place: &Place| {
        place.open().await.close().await;
        let path: PathBuf = place.url.strip_prefix("sqlite:").expect("a file").into();
        let link = path.with_extension("link");
        std::os::unix::fs::symlink("fak.db", &link).expect("linked");
        let url = format!("sqlite:{}", link.display());
        let by_link = Store::open(&url).await.expect("the link leads to it");
        by_link.own("by its link").await.expect("it is free");
        by_link.intent(intent("w")).await.expect("its files are there");
        let error = place.open().await.own("by its name").await.expect_err("it is taken");
        assert!(matches!(&error, Error::Owned { by } if by == "by its link"), "{error}");
        fs::copy(&path, path.with_extension("other")).expect("copied");
        fs::remove_file(&link).expect("gone");
        std::os::unix::fs::symlink("fak.other", &link).expect("linked");
        let error = by_link.intent(intent("w")).await.expect_err("the link leads elsewhere");
        assert!(matches!(error, Error::Gone { .. }), "{error}");
    })
    .await;
}
