//! What the schema itself refuses, and how it comes to be.

use fak::store::{Error, Filter, Store};
use fak_kernel::Disposition;

use super::{Place, file, intent, on_both, outcome};

on_both!(
    the_ledger_refuses_to_be_changed,
    opening_again_changes_nothing,
    what_is_written_is_synced_to_disk,
    rows_of_a_fak_that_told_no_standing_are_kept,
    a_schema_from_a_newer_fak_is_refused,
);

async fn the_ledger_refuses_to_be_changed(place: &Place) {
    let store = place.open().await;
    let seq = store.intent(intent("a")).await.expect("written");
    store.outcome(seq, outcome()).await.expect("written");
    store.intent(intent("b")).await.expect("written");
    let before = store.rows(&Filter::default()).await.expect("read");
    let mut refused = vec![
        "UPDATE witness_intents SET worker = 'x' WHERE seq = 1",
        "UPDATE witness_outcomes SET kv = 'preserved'",
        "DELETE FROM witness_intents WHERE seq = 2",
        "DELETE FROM witness_outcomes",
        "INSERT INTO witness_outcomes SELECT * FROM witness_outcomes WHERE TRUE
            ON CONFLICT (seq) DO UPDATE SET kv = 'preserved'",
        "INSERT INTO witness_intents SELECT * FROM witness_intents WHERE TRUE
            ON CONFLICT (seq) DO UPDATE SET worker = 'x'",
    ];
    if place.is_sqlite {
        refused.extend([
            "REPLACE INTO witness_intents SELECT seq, change, at, 'x', rank, incarnation, session,
                action, level, weight_version, warm_demoted, asked, standing FROM witness_intents",
            "REPLACE INTO witness_intents SELECT seq + 2, change, at, 'x', rank, incarnation,
                session, action, level, weight_version, warm_demoted, asked, standing
                FROM witness_intents",
            "REPLACE INTO witness_outcomes SELECT * FROM witness_outcomes",
            "REPLACE INTO witness_outcomes SELECT seq + 1, change, recorded_at, phase, kv, tiers,
                weight_version, warm_demoted, serving, evidence, answered, observed, reason,
                standing FROM witness_outcomes",
        ]);
    } else {
        refused.extend(["TRUNCATE witness_intents CASCADE", "TRUNCATE witness_outcomes"]);
    }
    for sql in refused {
        let answer = place.raw_run(sql).await.expect_err(sql).to_string();
        assert!(answer.contains("the ledger is append-only"), "{sql}: {answer}");
    }
    assert_eq!(store.rows(&Filter::default()).await.expect("read"), before);
}

async fn opening_again_changes_nothing(place: &Place) {
    let store = place.open().await;
    let row = store.note(intent("a"), outcome()).await.expect("written");
    let again = place.open().await;
    assert_eq!(again.rows(&Filter::default()).await.expect("read"), [row]);
    let more = place.raw_run("DELETE FROM fak_migrations WHERE version > 0").await;
    assert_eq!(more.expect("deleted"), 4, "four migrations, each done once");
}

async fn rows_of_a_fak_that_told_no_standing_are_kept(place: &Place) {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src/store/migrations");
    let kind = if place.is_sqlite { "sqlite" } else { "postgres" };
    if place.is_sqlite {
        std::fs::File::create(place.url.trim_start_matches("sqlite:")).expect("a file");
    }
    for number in ["0001", "0002"] {
        let file = format!("{folder}/{number}_{kind}.sql");
        let sql = std::fs::read_to_string(&file).expect(&file);
        place.raw_run(&sql).await.expect(&file);
    }
    let truth = if place.is_sqlite { "1" } else { "TRUE" };
    let before = format!(
        "CREATE TABLE fak_migrations (version BIGINT PRIMARY KEY, at TEXT NOT NULL);
         INSERT INTO fak_migrations VALUES (1, ''), (2, '');
         INSERT INTO witness_intents VALUES (1, 1, '', 'a', NULL, 'one', NULL, 'sleep', 2, 'v1',
             {truth}, 'null');
         INSERT INTO witness_outcomes VALUES (1, 2, '', 'sleeping', 'forgotten',
             '{{\"gpu\":\"forgotten\"}}', 'v1', {truth}, {truth}, 'observed', 'null', 'null', '');"
    );
    place.raw_run(&before).await.expect("written");
    let store = place.open().await;
    let row = store.last_row("a").await.expect("read").expect("it is there");
    assert_eq!((row.seq, row.kv, &row.standing), (1, Disposition::Forgotten, &None));
    assert_eq!(store.last_standing("a").await.expect("read"), None);
    let next = store.note(intent("a"), outcome()).await.expect("written");
    assert_eq!((next.seq, next.standing.is_some()), (2, true));
}

async fn a_schema_from_a_newer_fak_is_refused(place: &Place) {
    place.open().await.close().await;
    let later = "INSERT INTO fak_migrations (version, at) VALUES (1000, 'later')";
    place.raw_run(later).await.expect("written");
    let refused = Store::open(&place.url).await;
    assert!(matches!(refused, Err(Error::Newer { found: 1000, .. })), "{refused:?}");
}

async fn what_is_written_is_synced_to_disk(place: &Place) {
    let store = place.open().await;
    store.close().await;
    // What holds for the writer's connection is seen by what runs on it.
    let spy = if place.is_sqlite {
        "CREATE TABLE seen (level TEXT);
        CREATE TRIGGER spy AFTER INSERT ON witness_intents
        BEGIN INSERT INTO seen SELECT synchronous FROM pragma_synchronous; END"
    } else {
        "CREATE TABLE seen (level TEXT);
        CREATE FUNCTION spy() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            INSERT INTO seen VALUES (current_setting('synchronous_commit')); RETURN NULL; END $$;
        CREATE TRIGGER spy AFTER INSERT ON witness_intents FOR EACH ROW EXECUTE FUNCTION spy()"
    };
    place.raw_run(spy).await.expect("made");
    let lazy = if place.is_sqlite { "" } else { "%20-csynchronous_commit%3Doff" };
    let store = Store::open(&format!("{}{lazy}", place.url)).await.expect("open");
    store.intent(intent("a")).await.expect("written");
    let full = if place.is_sqlite { "2" } else { "on" };
    let mut raw = place.raw().await;
    let seen = sqlx::query_scalar::<_, String>("SELECT level FROM seen").fetch_all(&mut raw).await;
    assert_eq!(seen.expect("read"), [full]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_survives_its_process_on_sqlite() {
    let path = file("a_row_survives_its_process_on_sqlite");
    let store = Store::open(&format!("sqlite:{}", path.display())).await.expect("open");
    let seq = store.intent(intent("a")).await.expect("written");
    // What the files hold now is what a killed process leaves: nothing was closed or checkpointed.
    let folder = path.parent().expect("its folder");
    let left = file("a_row_survives_its_process_on_sqlite_left");
    for entry in std::fs::read_dir(folder).expect("files") {
        let entry = entry.expect("a file");
        if !entry.file_name().to_string_lossy().ends_with("-shm") {
            std::fs::copy(entry.path(), left.with_file_name(entry.file_name())).expect("a copy");
        }
    }
    let found = Store::open(&format!("sqlite:{}", left.display())).await.expect("open");
    let open = found.open_intents().await.expect("read");
    assert_eq!(open.iter().map(|row| row.seq).collect::<Vec<_>>(), [seq]);
    for folder in [folder, left.parent().expect("its folder")] {
        std::fs::remove_dir_all(folder).expect("it goes");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_ledger_in_memory_is_one_for_all_tasks() {
    let store = Store::open("sqlite::memory:").await.expect("open");
    let other = Store::open("sqlite::memory:").await.expect("open");
    let tasks = (0..8).map(|_| {
        let store = store.clone();
        tokio::spawn(async move { store.note(intent("a"), outcome()).await.expect("written").seq })
    });
    let mut seqs = Vec::new();
    for task in tasks {
        seqs.push(task.await.expect("no panic"));
    }
    seqs.sort_unstable();
    assert_eq!(seqs, [1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(store.rows(&Filter::default()).await.expect("read").len(), 8);
    assert_eq!(other.rows(&Filter::default()).await.expect("read"), []);
}
