//! Sessions: put whole, found by exactly their id, listed by when they were seen.

use fak::store::{Error, Run, Session};

use super::{Place, on_both};

on_both!(
    a_session_is_what_was_put_last,
    sessions_are_found_by_exactly_their_id,
    sessions_are_listed_with_the_last_seen_first,
    sessions_are_put_all_or_none,
);

fn session(id: &str, last_seen_at: i64) -> Session {
    Session {
        id: id.to_owned(),
        worker: None,
        run: Run::Active,
        reason: None,
        salt: None,
        created_at: 1_764_374_400_000,
        last_seen_at,
        claimed_tokens: 0,
        cached_tokens: 0,
        last_witness: None,
    }
}

async fn a_session_is_what_was_put_last(place: &Place) {
    let store = place.open().await;
    store.session_put(&session("s", -1)).await.expect("written");
    assert_eq!(store.session_get("s").await.expect("read"), Some(session("s", -1)));
    let full = Session {
        worker: Some("a".to_owned()),
        run: Run::Dormant,
        reason: Some("its worker sleeps".to_owned()),
        salt: Some("f00d".to_owned()),
        created_at: i64::MIN,
        last_seen_at: i64::MAX,
        claimed_tokens: 7,
        cached_tokens: 6,
        last_witness: Some(12),
        ..session("s", 0)
    };
    store.session_put(&full).await.expect("written");
    store.close().await;
    let store = place.open().await;
    assert_eq!(store.session_get("s").await.expect("read"), Some(full));
    store.session_put(&session("s", 3)).await.expect("written");
    assert_eq!(
        store.session_list(9).await.expect("read"),
        [session("s", 3)],
        "nothing is left over"
    );
    assert!(store.session_delete("s").await.expect("deleted"));
    assert!(!store.session_delete("s").await.expect("deleted"), "there is none");
    assert_eq!(store.session_get("s").await.expect("read"), None);
    let json = serde_json::to_value(session("s", 3)).expect("JSON");
    assert_eq!(json["run"], "active");
}

async fn sessions_are_found_by_exactly_their_id(place: &Place) {
    let store = place.open().await;
    store.session_put(&session("Ab", 1)).await.expect("written");
    for id in ["ab", "AB", "A", "Abc", "Ab ", " Ab", "A%", "A_", ""] {
        assert_eq!(store.session_get(id).await.expect("read"), None, "{id:?}");
        assert!(!store.session_delete(id).await.expect("deleted"), "{id:?}");
    }
    assert!(store.session_get("Ab").await.expect("read").is_some());
}

async fn sessions_are_listed_with_the_last_seen_first(place: &Place) {
    let store = place.open().await;
    let all = [session("b", 1), session("a", 3), session("c", 2), session("d", 2)];
    store.sessions_put(&all).await.expect("written");
    let ids = async |limit| {
        let listed = store.session_list(limit).await.expect("read");
        listed.into_iter().map(|session| session.id).collect::<Vec<_>>()
    };
    assert_eq!(ids(u32::MAX).await, ["a", "d", "c", "b"]);
    assert_eq!(ids(2).await, ["a", "d"]);
    assert_eq!(ids(0).await, [""; 0]);
}

async fn sessions_are_put_all_or_none(place: &Place) {
    let store = place.open().await;
    let refused = store.sessions_put(&[session("a", 1), session("\0", 1)]).await;
    assert!(matches!(refused, Err(Error::BadValue { field: "id", .. })), "{refused:?}");
    assert_eq!(store.session_list(9).await.expect("read"), []);
    store.sessions_put(&[]).await.expect("nothing to do");
    let twice = [session("a", 1), session("a", 2)];
    store.sessions_put(&twice).await.expect("written");
    assert_eq!(store.session_list(9).await.expect("read"), [session("a", 2)]);
}
