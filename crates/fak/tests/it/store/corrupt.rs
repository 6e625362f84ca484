//! What somebody else wrote into the database is told, not guessed at.

use fak::store::{Error, Filter};

use super::{Place, on_both};

on_both!(
    rows_with_foreign_words_are_corrupt,
    a_standing_of_another_shape_is_corrupt,
    sessions_with_foreign_words_are_corrupt,
);

const INTENT: &str = "INSERT INTO witness_intents (seq, change, at, worker, rank, action, level,
    warm_demoted, asked) VALUES ";
const OUTCOME: &str = "INSERT INTO witness_outcomes (seq, change, recorded_at, phase, kv, tiers,
    warm_demoted, serving, evidence, answered, observed, reason) VALUES ";

/// An intent's columns from `rank`, an outcome's from `phase`, and the column that is wrong.
const ROWS: &[(&str, &str, &str)] = &[
    ("NULL, 'nap', 1, B, 'null'", "", "action"),
    ("NULL, 'Sleep', 1, B, 'null'", "", "action"),
    ("NULL, 'sleep', 256, B, 'null'", "", "level"),
    ("-1, 'sleep', 1, B, 'null'", "", "rank"),
    ("4294967296, 'sleep', 1, B, 'null'", "", "rank"),
    ("NULL, 'sleep', 1, B, '{'", "", "asked"),
    (GOOD, "'asleep', 'unknown', '{}', B, B, 'none', 'null', 'null', ''", "phase"),
    (GOOD, "'error', 'warm', '{}', B, B, 'none', 'null', 'null', ''", "kv"),
    (
        GOOD,
        "'error', 'unknown', '{\"ssd\":\"unknown\"}', B, B, 'none', 'null', 'null', ''",
        "tiers",
    ),
    (GOOD, "'error', 'unknown', '{\"gpu\":\"warm\"}', B, B, 'none', 'null', 'null', ''", "tiers"),
    (GOOD, "'error', 'unknown', '{\"gpu\":null}', B, B, 'none', 'null', 'null', ''", "tiers"),
    (GOOD, "'error', 'unknown', '[]', B, B, 'none', 'null', 'null', ''", "tiers"),
    (GOOD, "'error', 'unknown', '{}', B, B, 'hearsay', 'null', 'null', ''", "evidence"),
    (GOOD, "'error', 'unknown', '{}', B, B, 'none', '', 'null', ''", "answered"),
    (GOOD, "'error', 'unknown', '{}', B, B, 'none', 'null', '{} {}', ''", "observed"),
];
const GOOD: &str = "NULL, 'sleep', 1, B, 'null'";

async fn rows_with_foreign_words_are_corrupt(place: &Place) {
    let store = place.open().await;
    let truth = if place.is_sqlite { "1" } else { "TRUE" };
    for (seq, (intent, outcome, column)) in (1..).zip(ROWS) {
        let intent = intent.replace('B', truth);
        let written = place.raw_run(&format!("{INTENT} ({seq}, {seq}, '', 'a', {intent})")).await;
        written.expect(intent.as_str());
        if !outcome.is_empty() {
            let outcome = outcome.replace('B', truth);
            let written = place.raw_run(&format!("{OUTCOME} ({seq}, {seq}, '', {outcome})")).await;
            written.expect(outcome.as_str());
        }
        let filter = Filter { after: Some(seq - 1), limit: Some(1), ..Filter::default() };
        let read = store.rows(&filter).await;
        let expected = format!("witness row {seq}");
        let is_told = matches!(&read, Err(Error::Corrupt { record, field, .. })
            if *record == expected && field == column);
        assert!(is_told, "{column}: {read:?}");
    }
}

async fn a_standing_of_another_shape_is_corrupt(place: &Place) {
    let store = place.open().await;
    let truth = if place.is_sqlite { "1" } else { "TRUE" };
    let good = GOOD.replace('B', truth);
    let whole = "{\"stale\":[\"ssd\"],\"weights_proven\":true,\"suspect\":false,
        \"weights_epoch\":null}";
    for (seq, standing) in (1..).zip(["", "{}", "null", whole]) {
        let intent = INTENT.replace("asked)", "asked, standing)");
        let written = format!("{intent} ({seq}, {seq}, '', 'a', {good}, '{standing}')");
        place.raw_run(&written).await.expect(standing);
        let read = store.last_standing("a").await;
        let is_told = matches!(&read, Err(Error::Corrupt { field: "standing", .. }));
        assert!(is_told, "{standing}: {read:?}");
    }
}

async fn sessions_with_foreign_words_are_corrupt(place: &Place) {
    let store = place.open().await;
    let sql = "INSERT INTO sessions (id, run, created_at, last_seen_at, claimed_tokens,
        cached_tokens) VALUES ('s', 'asleep', 0, 0, 0, 0)";
    place.raw_run(sql).await.expect("written");
    for read in [store.session_get("s").await.map(|_| ()), store.session_list(1).await.map(|_| ())]
    {
        let told = read.expect_err("it is corrupt").to_string();
        assert_eq!(told, "session \"s\" is corrupt: run is no word of its list");
    }
}
