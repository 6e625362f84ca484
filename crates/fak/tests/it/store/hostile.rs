//! What clients and engines may make of a text or an answer.

use fak::store::{Error, Filter, JSON_BYTES_MAX, NAME_BYTES_MAX, NewIntent, Outcome, Session};
use fak::store::{REASON_BYTES_MAX, Run};
use serde_json::{Value, json};

use super::{Place, intent, on_both, outcome};

on_both!(
    text_comes_back_as_it_was,
    text_at_its_bound_is_stored_and_found,
    text_that_cannot_be_stored_is_refused_by_name,
    answers_are_cut_and_stay_json,
    numbers_beyond_the_columns_are_refused_by_name,
);

const HOSTILE: &[&str] = &[
    "",
    " ",
    "'",
    "''; DROP TABLE witness_intents; --",
    "\"quoted\"",
    "back\\slash",
    "$1 ? :name @x",
    "100% _ like",
    "line\nfeed\ttab\r\u{7f}\u{1}",
    "é e\u{301} 🦀 \u{202e}rtl\u{feff}",
    "null",
];

/// Whether the error names this field.
fn refuses<T: std::fmt::Debug>(result: Result<T, Error>, field: &str) {
    let is_named = matches!(&result, Err(Error::BadValue { field: named, .. }) if *named == field);
    assert!(is_named, "{field}: {result:?}");
}

async fn text_comes_back_as_it_was(place: &Place) {
    let store = place.open().await;
    for text in HOSTILE {
        let owned = || (*text).to_owned();
        let new = NewIntent {
            worker: owned(),
            incarnation: Some(owned()),
            session: Some(owned()),
            weight_version: Some(owned()),
            asked: json!({ *text: text }),
            ..intent("a")
        };
        let outcome = Outcome { reason: owned(), weight_version: Some(owned()), ..outcome() };
        let row = store.note(new.clone(), outcome).await.expect("written");
        assert_eq!((&row.worker, &row.reason), (&owned(), &owned()));
        assert_eq!((&row.incarnation, &row.session), (&new.incarnation, &new.session));
        assert_eq!((&row.weight_version, &row.asked), (&new.weight_version, &new.asked));
        let by_name = Filter { worker: Some(owned()), session: Some(owned()), ..Filter::default() };
        assert_eq!(store.rows(&by_name).await.expect("read"), [row]);

        let session = session(text);
        store.session_put(&session).await.expect("written");
        assert_eq!(store.session_get(text).await.expect("read"), Some(session));
    }
    assert_eq!(store.session_list(u32::MAX).await.expect("read").len(), HOSTILE.len());
}

async fn text_at_its_bound_is_stored_and_found(place: &Place) {
    let store = place.open().await;
    // No repetition, which an index would compress away.
    let mut random = fastrand::Rng::with_seed(7);
    let mut text = |bytes| std::iter::repeat_with(|| random.alphanumeric()).take(bytes).collect();
    let (worker, name, reason): (String, String, String) =
        (text(NAME_BYTES_MAX), text(NAME_BYTES_MAX), text(REASON_BYTES_MAX));
    let new = NewIntent { session: Some(name.clone()), ..intent(&worker) };
    let row = store.note(new, Outcome { reason, ..outcome() }).await.expect("written");
    assert_eq!(row.reason.len(), REASON_BYTES_MAX);
    assert_eq!(store.last_row(&worker).await.expect("read"), Some(row));
    store.session_put(&session(&name)).await.expect("written");
    assert!(store.session_get(&name).await.expect("read").is_some());
}

async fn text_that_cannot_be_stored_is_refused_by_name(place: &Place) {
    let store = place.open().await;
    for text in ["nul\0", &"x".repeat(NAME_BYTES_MAX + 1), &"é".repeat(1 << 19)] {
        let owned = || Some(text.to_owned());
        refuses(store.intent(intent(text)).await, "worker");
        let new = NewIntent { session: owned(), ..intent("a") };
        refuses(store.intent(new).await, "session");
        let new = NewIntent { incarnation: owned(), ..intent("a") };
        refuses(store.intent(new).await, "incarnation");
        let new = NewIntent { weight_version: owned(), ..intent("a") };
        refuses(store.note(new, outcome()).await, "weight_version");
        refuses(store.session_put(&session(text)).await, "id");
        refuses(store.session_put(&Session { worker: owned(), ..session("s") }).await, "worker");
        refuses(store.session_put(&Session { salt: owned(), ..session("s") }).await, "salt");
    }
    for reason in ["nul\0", &"x".repeat(REASON_BYTES_MAX + 1)] {
        let bad = Outcome { reason: reason.to_owned(), ..outcome() };
        refuses(store.note(intent("a"), bad).await, "reason");
        let bad = Session { reason: Some(reason.to_owned()), ..session("s") };
        refuses(store.session_put(&bad).await, "reason");
    }
    // Nothing of what was refused is there, not even the intents of refused notes.
    assert_eq!(store.rows(&Filter::default()).await.expect("read"), []);
    assert_eq!(store.session_list(9).await.expect("read"), []);
    // Whoever asks for a text that no row can have gets none.
    let nul = Some("nul\0".to_owned());
    let filter = Filter { session: nul, ..Filter::default() };
    assert_eq!(store.rows(&filter).await.expect("read"), []);
    assert_eq!(store.last_row("nul\0").await.expect("read"), None);
    assert_eq!(store.session_get("nul\0").await.expect("read"), None);
    assert!(!store.session_delete("nul\0").await.expect("deleted"));
    // An outcome that is refused leaves its intent open, and a good one is taken.
    let seq = store.intent(intent("a")).await.expect("written");
    let bad = Outcome { weight_version: Some("\0".to_owned()), ..outcome() };
    refuses(store.outcome(seq, bad).await, "weight_version");
    store.outcome(seq, outcome()).await.expect("written");
}

async fn answers_are_cut_and_stay_json(place: &Place) {
    let store = place.open().await;
    let nul = json!({ "body": "a\0b", "\0": 1 });
    let huge = json!({ "body": "\u{1}".repeat(1 << 20) });
    let outcome = Outcome { answered: huge.clone(), observed: nul.clone(), ..outcome() };
    let row = store.note(intent("a"), outcome).await.expect("written");
    assert_eq!(row.observed, nul);
    assert_eq!(row.answered["truncated_bytes"], huge.to_string().len());
    let head = row.answered["head"].as_str().expect("text");
    assert!(huge.to_string().starts_with(head) && !head.is_empty());
    assert!(row.answered.to_string().len() <= JSON_BYTES_MAX);
    let read = store.rows(&Filter::default()).await.expect("read");
    assert_eq!(read, [row]);
    assert_ne!(read[0].answered, Value::Null);
}

async fn numbers_beyond_the_columns_are_refused_by_name(place: &Place) {
    let store = place.open().await;
    let (most, over) = (i64::MAX.unsigned_abs(), i64::MAX.unsigned_abs() + 1);
    let bad = Session { claimed_tokens: over, ..session("s") };
    refuses(store.session_put(&bad).await, "claimed_tokens");
    let bad = Session { cached_tokens: u64::MAX, ..session("s") };
    refuses(store.session_put(&bad).await, "cached_tokens");
    let bad = Session { last_witness: Some(over), ..session("s") };
    refuses(store.session_put(&bad).await, "last_witness");
    let good = Session { claimed_tokens: most, last_witness: Some(most), ..session("s") };
    store.session_put(&good).await.expect("written");
    assert_eq!(store.session_get("s").await.expect("read"), Some(good));
}

fn session(id: &str) -> Session {
    Session {
        id: id.to_owned(),
        worker: Some("a".to_owned()),
        run: Run::Active,
        reason: None,
        salt: None,
        created_at: 1,
        last_seen_at: 2,
        claimed_tokens: 3,
        cached_tokens: 4,
        last_witness: Some(5),
    }
}
