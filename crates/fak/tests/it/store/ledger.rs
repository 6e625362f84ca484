//! Rows: how they come to be, stay, and are found again.

use fak::store::{Error, Filter, NewIntent, Outcome, ROWS_MAX, Row, Store};
use fak_kernel::{Action, Disposition, Evidence, Phase, TierSet};
use jiff::Timestamp;
use serde_json::{Value, json};

use super::{Place, intent, on_both, outcome, standing, unrecorded};

on_both!(
    an_intent_without_an_outcome_reads_as_unknown,
    an_intent_that_demotes_nothing_and_names_nothing_reads_as_unknown_too,
    an_outcome_completes_its_row_once,
    an_outcome_needs_its_intent,
    a_note_is_one_whole_row,
    what_was_written_is_there_after_reopening,
    rows_are_found_by_each_filter,
    an_answer_has_a_bounded_number_of_rows,
    changes_come_in_the_order_of_writing,
    a_row_that_waits_is_told_before_rows_that_were_completed_later,
    rows_tell_when_they_were_written,
    the_newest_standing_is_found_past_rows_that_have_none,
    a_row_can_be_the_epoch_that_its_standing_names,
);

fn all() -> Filter {
    Filter::default()
}

fn seqs(rows: &[Row]) -> Vec<u64> {
    rows.iter().map(|row| row.seq).collect()
}

/// The row's JSON without what the store gave it.
fn said(row: &Row) -> Value {
    let mut said = serde_json::to_value(row).expect("JSON");
    let fields = said.as_object_mut().expect("an object");
    fields.remove("seq");
    fields.remove("at");
    said
}

async fn an_intent_without_an_outcome_reads_as_unknown(place: &Place) {
    let store = place.open().await;
    let seq = store.intent(intent("a")).await.expect("written");
    drop(store);
    let store = place.open().await;
    let open = store.open_intents().await.expect("read");
    assert_eq!(seqs(&open), [seq]);
    assert_eq!(said(&open[0]), unrecorded(&intent("a")));
    assert_eq!(store.last_row("a").await.expect("read"), Some(open[0].clone()));
    assert_eq!(store.rows(&all()).await.expect("read"), open);
    let unknown = Filter { kv: Some(Disposition::Unknown), ..all() };
    assert_eq!(store.rows(&unknown).await.expect("read"), open);
}

async fn an_intent_that_demotes_nothing_and_names_nothing_reads_as_unknown_too(place: &Place) {
    let store = place.open().await;
    let bare = NewIntent {
        worker: "a".to_owned(),
        rank: Some(u32::MAX),
        incarnation: None,
        session: None,
        action: Action::Pause,
        level: None,
        weight_version: None,
        warm_demoted: false,
        asked: Value::Null,
        standing: None,
        is_epoch: false,
    };
    store.intent(bare.clone()).await.expect("written");
    assert_eq!(said(&store.open_intents().await.expect("read")[0]), unrecorded(&bare));
}

async fn an_outcome_completes_its_row_once(place: &Place) {
    let store = place.open().await;
    let seq = store.intent(intent("a")).await.expect("written");
    let row = store.outcome(seq, outcome()).await.expect("written");
    let text = serde_json::to_string(&row).expect("JSON");
    let expected = format!(
        r#"{{"seq":1,"at":"{}","worker":"a","rank":null,"incarnation":"1764.5","session":"s1",{}"#,
        row.at,
        r#""action":"sleep","level":1,"phase":"sleeping","kv":"forgotten","#.to_owned()
            + r#""tiers":{"gpu":"forgotten","cpu":"preserved"},"weight_version":"v7","#
            + r#""warm_demoted":true,"serving":false,"evidence":"observed","#
            + r#""asked":{"path":"/sleep","level":1},"answered":{"status":200},"#
            + r#""observed":{"is_sleeping":true},"reason":"as asked","#
            + r#""standing":{"stale":["cpu"],"weights_proven":true,"suspect":false,"#
            + r#""awake":["weights"],"takes_weights":true,"weights_epoch":4}}"#
    );
    assert_eq!(text, expected);
    assert_eq!(serde_json::from_str::<Row>(&text).expect("a row"), row);

    let other = Outcome { kv: Disposition::Preserved, ..outcome() };
    let second = store.outcome(seq, other).await;
    assert!(matches!(second, Err(Error::Conflict(number)) if number == seq), "{second:?}");
    assert_eq!(store.rows(&all()).await.expect("read"), [row]);
    assert_eq!(store.open_intents().await.expect("read"), []);
}

async fn an_outcome_needs_its_intent(place: &Place) {
    let store = place.open().await;
    for seq in [0, 1, 1 << 63, u64::MAX] {
        let none = store.outcome(seq, outcome()).await;
        assert!(matches!(none, Err(Error::NoIntent(number)) if number == seq), "{none:?}");
    }
    assert_eq!(store.rows(&all()).await.expect("read"), []);
    assert_eq!(*store.newest().borrow(), 0);
}

async fn a_note_is_one_whole_row(place: &Place) {
    let store = place.open().await;
    let lost = NewIntent { action: Action::Lost, session: None, level: None, ..intent("a") };
    let gone = Outcome {
        phase: Phase::Error,
        kv: Disposition::Unknown,
        weight_version: None,
        evidence: Evidence::NotSent,
        answered: Value::Null,
        serving: true,
        ..outcome()
    };
    let row = store.note(lost, gone).await.expect("written");
    assert_eq!(
        (row.action, row.phase, row.evidence),
        (Action::Lost, Phase::Error, Evidence::NotSent)
    );
    // The outcome's own word, though the intent had another.
    assert_eq!((row.weight_version.as_deref(), row.serving), (None, true));
    assert_eq!(*store.newest().borrow(), 1, "one change, not two");
    assert_eq!(store.open_intents().await.expect("read"), []);
    let again = store.outcome(row.seq, outcome()).await;
    assert!(matches!(again, Err(Error::Conflict(1))), "{again:?}");
}

async fn what_was_written_is_there_after_reopening(place: &Place) {
    let store = place.open().await;
    let seq = store.intent(intent("a")).await.expect("written");
    let row = store.outcome(seq, outcome()).await.expect("written");
    let noted = store.note(intent("b"), outcome()).await.expect("written");
    store.close().await;
    assert!(matches!(store.rows(&all()).await, Err(Error::Unavailable(_))), "it is closed");

    let store = place.open().await;
    assert_eq!(store.rows(&all()).await.expect("read"), [row, noted]);
    assert_eq!(*store.newest().borrow(), 3);
    assert_eq!(store.intent(intent("a")).await.expect("written"), 3);
}

async fn rows_are_found_by_each_filter(place: &Place) {
    let store = place.open().await;
    let other = NewIntent { session: None, action: Action::Wake, ..intent("b") };
    let kept = Outcome { kv: Disposition::Preserved, ..outcome() };
    store.note(intent("a"), outcome()).await.expect("1");
    store.note(other.clone(), outcome()).await.expect("2");
    store.note(intent("a"), kept.clone()).await.expect("3");
    store.intent(NewIntent { session: Some("s2".to_owned()), ..other }).await.expect("4");
    let text = |text: &str| Some(text.to_owned());
    let cases: [(Filter, &[u64]); 13] = [
        (all(), &[1, 2, 3, 4]),
        (Filter { newest_first: true, ..all() }, &[4, 3, 2, 1]),
        (Filter { worker: text("a"), ..all() }, &[1, 3]),
        (Filter { worker: text("A"), ..all() }, &[]),
        (Filter { session: text("s1"), ..all() }, &[1, 3]),
        (Filter { session: text("s2"), ..all() }, &[4]),
        (Filter { action: Some(Action::Wake), ..all() }, &[2, 4]),
        (Filter { kv: Some(Disposition::Forgotten), ..all() }, &[1, 2]),
        (Filter { kv: Some(Disposition::Unknown), ..all() }, &[4]),
        (Filter { after: Some(2), ..all() }, &[3, 4]),
        (Filter { after: Some(u64::MAX), ..all() }, &[]),
        (Filter { limit: Some(0), ..all() }, &[]),
        (
            Filter {
                worker: text("a"),
                session: text("s1"),
                action: Some(Action::Sleep),
                kv: Some(Disposition::Preserved),
                after: Some(1),
                limit: Some(9),
                newest_first: true,
            },
            &[3],
        ),
    ];
    for (filter, expected) in cases {
        assert_eq!(seqs(&store.rows(&filter).await.expect("read")), expected, "{filter:?}");
    }
    let page = Filter { after: Some(1), limit: Some(2), ..all() };
    assert_eq!(seqs(&store.rows(&page).await.expect("read")), [2, 3]);
    assert_eq!(store.last_row("a").await.expect("read").map(|row| row.seq), Some(3));
    assert_eq!(store.last_row("c").await.expect("read"), None);
}

async fn an_answer_has_a_bounded_number_of_rows(place: &Place) {
    let store = place.open().await;
    let many = "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 1500)
        INSERT INTO witness_intents (seq, change, at, worker, action, warm_demoted, asked)
        SELECT i, i, '2026-11-29T00:00:00.000Z', 'a', 'sleep', ";
    let yes = if place.is_sqlite { "1" } else { "TRUE" };
    place.raw_run(&format!("{many} {yes}, 'null' FROM n")).await.expect("written");
    let bound = usize::try_from(ROWS_MAX).expect("small");
    for limit in [None, Some(ROWS_MAX + 1), Some(u32::MAX)] {
        let rows = store.rows(&Filter { limit, ..all() }).await.expect("read");
        assert_eq!(rows.len(), bound);
        assert_eq!(rows[0].seq, 1);
    }
    let open = store.open_intents().await.expect("read");
    assert_eq!((open.len(), open[0].seq), (bound, 1500), "the newest are told");
    let changes = store.changes(0, u32::MAX).await.expect("read");
    assert_eq!((changes.len(), changes[bound - 1].number), (bound, 1000));
}

async fn changes_come_in_the_order_of_writing(place: &Place) {
    let store = place.open().await;
    let first = store.intent(intent("a")).await.expect("change 1");
    let second = store.intent(intent("b")).await.expect("change 2");
    store.note(intent("c"), outcome()).await.expect("change 3");
    store.outcome(second, outcome()).await.expect("change 4");
    let listed = |changes: Vec<fak::store::Change>| {
        let told = |change: &fak::store::Change| {
            (change.number, change.row.seq, change.row.reason != "unrecorded")
        };
        changes.iter().map(told).collect::<Vec<_>>()
    };
    let changes = async |after, limit| listed(store.changes(after, limit).await.expect("read"));
    assert_eq!(changes(0, 9).await, [(1, 1, false), (3, 3, true), (4, 2, true)]);
    assert_eq!(changes(0, 1).await, [(1, 1, false)]);
    assert_eq!(changes(1, 1).await, [(3, 3, true)]);
    assert_eq!(changes(3, 9).await, [(4, 2, true)]);
    assert_eq!(changes(4, 9).await, []);
    // Its intent was told long ago; its outcome is told all the same.
    store.outcome(first, outcome()).await.expect("change 5");
    assert_eq!(changes(4, 9).await, [(5, 1, true)]);
    assert_eq!(changes(u64::MAX, 9).await, []);
    assert_eq!(*store.newest().borrow(), 5);
}

async fn a_row_that_waits_is_told_before_rows_that_were_completed_later(place: &Place) {
    let store = place.open().await;
    let seqs = [
        store.intent(intent("a")).await.expect("change 1"),
        store.intent(intent("b")).await.expect("change 2"),
        store.intent(intent("c")).await.expect("change 3"),
    ];
    store.outcome(seqs[0], outcome()).await.expect("change 4");
    store.outcome(seqs[2], outcome()).await.expect("change 5");
    let (mut after, mut told) = (0, Vec::new());
    while let Some(change) = store.changes(after, 1).await.expect("read").pop() {
        after = change.number;
        told.push((change.number, change.row.worker));
    }
    assert_eq!(told, [(2, "b".to_owned()), (4, "a".to_owned()), (5, "c".to_owned())]);
}

async fn rows_tell_when_they_were_written(place: &Place) {
    fn early() -> Timestamp {
        Timestamp::from_millisecond(1_764_374_400_007).expect("in range")
    }
    fn late() -> Timestamp {
        "2026-12-31T23:59:59.9996Z".parse().expect("a time")
    }
    let store = Store::open_with(&place.url, early).await.expect("open");
    let seq = store.intent(intent("a")).await.expect("written");
    let store = Store::open_with(&place.url, late).await.expect("open");
    let row = store.outcome(seq, outcome()).await.expect("written");
    assert_eq!(row.at, "2025-11-29T00:00:00.007Z", "the intent's");
    let noted = store.note(intent("a"), outcome()).await.expect("written");
    assert_eq!(noted.at, "2026-12-31T23:59:59.999Z");
    let store = place.open().await;
    let before = Timestamp::now();
    let row = store.note(intent("a"), outcome()).await.expect("written");
    let at: Timestamp = row.at.parse().expect("RFC 3339");
    let gone_ms = at.as_millisecond() - before.as_millisecond();
    assert!((0..60_000).contains(&gone_ms), "{} after {before}", row.at);
    assert_eq!(row.asked, json!({ "path": "/sleep", "level": 1 }));
}

async fn the_newest_standing_is_found_past_rows_that_have_none(place: &Place) {
    let store = place.open().await;
    let none =
        (NewIntent { standing: None, ..intent("a") }, Outcome { standing: None, ..outcome() });
    store.note(none.0.clone(), none.1.clone()).await.expect("written");
    assert_eq!(store.last_standing("a").await.expect("read"), None);
    let noted = store.note(intent("a"), outcome()).await.expect("written");
    store.note(none.0.clone(), none.1.clone()).await.expect("written");
    store.note(intent("b"), outcome()).await.expect("written");
    assert_eq!(store.last_standing("a").await.expect("read"), Some(noted));
    let seq = store.intent(intent("a")).await.expect("written");
    let open = store.last_standing("a").await.expect("read").expect("a row");
    assert_eq!((open.seq, open.standing), (seq, Some(standing(TierSet::ALL))));
    // One past the owner, while an action runs.
    store.note(none.0, none.1).await.expect("written");
    let row = store.outcome(seq, outcome()).await.expect("written");
    assert_eq!(store.last_standing("a").await.expect("read"), Some(row));
}

async fn a_row_can_be_the_epoch_that_its_standing_names(place: &Place) {
    let store = place.open().await;
    let epoch = |row: Option<Row>| row.and_then(|row| row.standing).and_then(|s| s.weights_epoch);
    let own = NewIntent { is_epoch: true, ..intent("a") };
    for seq in [1, 2] {
        let row = store.note(own.clone(), outcome()).await.expect("written");
        assert_eq!((row.seq, epoch(Some(row))), (seq, Some(seq)));
    }
    let seq = store.intent(own).await.expect("written");
    assert_eq!(epoch(store.last_standing("a").await.expect("read")), Some(seq));
    // Whoever writes the outcome knows the number.
    let row = store.outcome(seq, outcome()).await.expect("written");
    assert_eq!(epoch(Some(row)), Some(4));
}
