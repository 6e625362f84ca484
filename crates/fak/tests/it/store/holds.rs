//! Holds: one a worker, the last that was put, until it is let go.

use serde_json::{Value, json};

use super::{Place, on_both};

on_both!(a_hold_outlives_its_process_until_it_is_let_go,);

async fn a_hold_outlives_its_process_until_it_is_let_go(place: &Place) {
    let store = place.open().await;
    assert_eq!(store.hold_get("w").await.expect("read"), None);
    store.hold_put("w", "first", Value::Null).await.expect("written");
    let canary = json!({ "completions m": "1 2 3" });
    let hold = store.hold_put("w", "second", canary).await.expect("written");
    store.hold_put("v", "first", Value::Null).await.expect("written");
    store.close().await;
    let store = place.open().await;
    assert_eq!(store.hold_get("w").await.expect("read"), Some(hold.clone()));
    let all = store.hold_list().await.expect("read");
    assert_eq!(all.iter().map(|h| h.worker.as_str()).collect::<Vec<_>>(), ["v", "w"]);
    assert!(store.hold_delete("w").await.expect("deleted"));
    assert!(!store.hold_delete("w").await.expect("deleted"), "there is none");
    assert_eq!(store.hold_get("w").await.expect("read"), None);
    let name = "x".repeat(1025);
    assert!(store.hold_put("w", &name, Value::Null).await.is_err());
}
