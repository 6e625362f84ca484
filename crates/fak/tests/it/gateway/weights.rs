//! Under which weights an answer was made, and that KV of other weights is out of its reach.

use http::StatusCode;
use serde_json::json;

use super::bridged::{Bridged, COMPLETIONS};
use super::rig::{PATIENT, Rig, chat, next, whole};
use crate::engine::peer::{Peer, Reply};

const VERSION: &str = "x-fak-weight-version";
const MIXED: &str = "x-fak-weight-version-mixed";
const MIXED_TOTAL: &str = "fak_requests_mixed_weights_total";

fn body(stream: bool, tokens: u32) -> String {
    json!({"model": "tiny", "prompt": "one two three", "stream": stream, "max_tokens": tokens,
           "ignore_eos": true})
    .to_string()
}

/// Puts another version on the engine's weights, as a trainer does that keeps its requests.
async fn update(bridged: &Bridged, version: &str) {
    bridged.behind("/pause?mode=keep&clear_cache=false", "").await;
    let named = json!({ "new_version": version }).to_string();
    bridged.behind("/update_weight_version", &named).await;
    bridged.behind("/resume", "").await;
    bridged.lifecycle.look("w0").await.unwrap();
}

/// Case 38.
#[tokio::test]
async fn a_stream_that_spans_two_versions_names_the_first_and_is_marked_at_its_end() {
    let bridged = Bridged::start().await;
    bridged.sim.faults().limit_steps(Some(5));
    let mut answer = bridged.rig.open("POST", COMPLETIONS, &[], &body(true, 20)).await;
    assert_eq!(answer.headers()[VERSION], "default");
    assert!(!answer.headers().contains_key(MIXED));
    next(&mut answer).await.unwrap();
    update(&bridged, "v8").await;
    bridged.sim.faults().limit_steps(None);
    let text = whole(answer).await;
    let end = ": fak weight-version-mixed default v8\n\ndata: [DONE]\n\n";
    assert!(text.text().ends_with(end), "{}", text.text());
    assert_eq!(text.text().matches("\n: ").count(), 1, "{}", text.text());
    bridged.rig.counted(MIXED_TOTAL, 1).await;
    // The next is of the new version alone.
    let next = bridged.rig.post(COMPLETIONS, &body(true, 3)).await;
    assert_eq!((next.header(VERSION), next.header(MIXED)), (Some("v8"), None));
    assert!(next.text().ends_with("data: [DONE]\n\n") && !next.text().contains("\n: "));
    assert_eq!(bridged.rig.count(MIXED_TOTAL), 1);
}

/// Case 38: headers that have not left yet say it themselves.
#[tokio::test]
async fn a_whole_answer_that_spans_two_versions_has_both_in_its_headers() {
    let bridged = Bridged::start().await;
    bridged.sim.faults().limit_steps(Some(0));
    let text = body(false, 3);
    let asked = bridged.rig.post(COMPLETIONS, &text);
    let updated = async {
        let is_there = async {
            while bridged.sim.requests_in_flight() == 0 {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(PATIENT, is_there).await.unwrap();
        update(&bridged, "v8").await;
        bridged.sim.faults().limit_steps(None);
    };
    let (answer, ()) = tokio::join!(asked, updated);
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
    assert_eq!((answer.header(VERSION), answer.header(MIXED)), (Some("default"), Some("v8")));
    bridged.rig.counted(MIXED_TOTAL, 1).await;
    let next = bridged.rig.post(COMPLETIONS, &text).await;
    assert_eq!((next.header(VERSION), next.header(MIXED)), (Some("v8"), None));
}

#[tokio::test]
async fn an_unknown_version_is_not_told_and_no_engine_speaks_for_fak() {
    let peer = Peer::start(|_| {
        let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n";
        Reply::Send(format!("{head}{VERSION}: v9\r\n{MIXED}: v9\r\n\r\n{{}}").into_bytes())
    })
    .await;
    let rig = Rig::over(&[peer.url()]).await;
    let answer = rig.post("/v1/chat/completions", &chat(false)).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
    assert_eq!((answer.header(VERSION), answer.header(MIXED)), (None, None));
}
