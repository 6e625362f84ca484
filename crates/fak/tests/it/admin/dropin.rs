//! vLLM's own control routes.

use fak_sim::RouteFault;
use serde_json::{Value, json};

use super::rig::Rig;

/// What a real vLLM 0.32.0 answered.
fn recorded(name: &str) -> (u16, Value) {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/vllm-0.32/http");
    let text = std::fs::read_to_string(format!("{folder}/{name}.json")).unwrap();
    let exchange: Value = serde_json::from_str(&text).unwrap();
    let response = &exchange["response"];
    let body = response["body_text"].as_str().unwrap();
    (response["status"].as_u64().unwrap() as u16, serde_json::from_str(body).unwrap())
}

#[tokio::test]
async fn answers_are_those_of_vllm() {
    let rig = Rig::start(2).await;
    for (method, path, name) in [
        ("GET", "/is_paused", "is_paused-false"),
        ("GET", "/is_sleeping", "is_sleeping-false"),
        ("POST", "/reset_prefix_cache", "reset_prefix_cache"),
        ("POST", "/reset_prefix_cache?reset_external=true", "reset_prefix_cache-external"),
        ("POST", "/pause", "pause-default"),
        ("GET", "/is_paused", "is_paused-true"),
        ("GET", "/is_sleeping", "is_sleeping-while-paused"),
        ("POST", "/resume", "resume"),
        ("POST", "/resume", "resume"),
        ("POST", "/pause?mode=keep&clear_cache=false", "pause-keep"),
        ("POST", "/resume", "resume"),
        ("POST", "/sleep?level=1", "sleep-level1"),
        ("POST", "/sleep?level=1", "sleep-level1"),
        ("GET", "/is_sleeping", "is_sleeping-true"),
        ("GET", "/is_paused", "is_paused-while-sleeping"),
        ("POST", "/wake_up?tags=weights", "wake_up-partial"),
        ("POST", "/wake_up", "wake_up"),
        ("POST", "/wake_up", "wake_up-not-asleep"),
        ("POST", "/sleep?level=3", "sleep-bad-level"),
        ("POST", "/pause?mode=bogus", "pause-bad-mode"),
        ("POST", "/reset_prefix_cache?reset_external=zz", "reset_prefix_cache-bad-bool"),
    ] {
        let answer = rig.ask(method, path, &[], "").await;
        let (status, body) = recorded(name);
        assert_eq!((answer.status, answer.json()), (status, body), "{method} {path}");
    }
}

#[tokio::test]
async fn a_pause_aborts_and_clears_by_default_and_is_a_witnessed_action() {
    let rig = Rig::start(1).await;
    assert_eq!(rig.post("/pause", "").await.status, 200);
    let rows = rig.get("/fak/v1/witness?action=pause").await.json();
    assert_eq!(rows[0]["asked"]["call"], "/pause?mode=abort&clear_cache=true");
    assert_eq!(rows[0]["kv"], "forgotten");
    rig.post("/resume", "").await;
    rig.post("/pause?mode=keep&clear_cache=false", "").await;
    let rows = rig.get("/fak/v1/witness?action=pause").await.json();
    assert_eq!(rows[1]["kv"], "preserved");
    let cleared = rig.post("/pause", "").await;
    assert_eq!(cleared.status, 409, "paused, and nothing was cleared: {}", cleared.text);
}

#[tokio::test]
async fn level_zero_and_what_vllm_would_ignore_are_refused() {
    let rig = Rig::start(1).await;
    let zero = rig.post("/sleep?level=0", "").await;
    assert_eq!(zero.status, 400);
    let message = zero.json()["error"]["message"].as_str().unwrap().to_owned();
    assert!(message.contains("/pause?clear_cache=false"), "{message}");
    for (path, body, param) in [
        ("/sleep?lvel=2", "", "query.lvel"),
        ("/sleep", r#"{"level":2}"#, "body.level"),
        ("/pause", r#"{"clear_cache":false}"#, "body.clear_cache"),
        ("/sleep", r#"{"reset_external":false}"#, "body.reset_external"),
        ("/reset_prefix_cache", r#"{"reset_external":true}"#, "body.reset_external"),
        (
            "/reset_prefix_cache?reset_external=true",
            r#"{"reset_external":false}"#,
            "body.reset_external",
        ),
        ("/wake_up?tags=weight", "", "query.tags"),
        ("/sleep?level=one", "", "query.level"),
        ("/sleep?level=-1", "", "query.level"),
    ] {
        let answer = rig.post(path, body).await;
        assert_eq!(answer.status, 400, "{path} {body}: {}", answer.text);
        let error = &answer.json()["error"];
        assert_eq!((&error["param"], &error["code"]), (&json!(param), &json!(400)));
        assert_eq!(error["type"], "Bad Request");
    }
    assert_eq!(rig.get("/fak/v1/workers/w0").await.json()["phase"], "serving");
}

#[tokio::test]
async fn a_parameter_that_is_given_twice_is_refused_by_name_and_nothing_is_done() {
    let rig = Rig::start(1).await;
    let before = rig.get("/fak/v1/witness").await.json();
    for (path, name) in [
        ("/sleep?level=1&level=2", "level"),
        ("/sleep?level=1&level=1", "level"),
        ("/pause?mode=keep&clear_cache=false&mode=abort", "mode"),
        ("/reset_prefix_cache?reset_external=true&reset_external=false", "reset_external"),
        ("/resume?worker=w0&worker=w1", "worker"),
    ] {
        let answer = rig.post(path, "").await;
        assert_eq!(answer.status, 400, "{path}: {}", answer.text);
        let error = &answer.json()["error"];
        assert_eq!(error["param"], format!("query.{name}"));
        let message = error["message"].as_str().unwrap();
        assert!(message.contains(&format!("`{name}` is given 2 times")), "{message}");
    }
    assert_eq!(rig.get("/is_paused?worker=w0&worker=w0").await.status, 400);
    assert_eq!(rig.get("/fak/v1/witness").await.json(), before, "nothing became an action");
    // A list is given so.
    rig.post("/sleep?level=1", "").await;
    let woken = rig.post("/wake_up?tags=weights&tags=kv_cache", "").await;
    assert_eq!((woken.status, &woken.json()["status"]), (200, &json!("awake")), "{}", woken.text);
}

#[tokio::test]
async fn a_body_that_says_what_happens_anyway_is_no_mistake() {
    let rig = Rig::start(1).await;
    // As SkyRL's client asks.
    for body in ["{}", "null", r#"{"reset_running_requests":false}"#] {
        let answer = rig.post("/reset_prefix_cache", body).await;
        assert_eq!(answer.json(), json!({"success": true}), "{body}");
    }
}

#[tokio::test]
async fn weights_that_were_woken_first_are_loaded_by_who_woke_them() {
    let rig = Rig::start(1).await;
    for level in [1, 2] {
        assert_eq!(rig.post(&format!("/sleep?level={level}"), "").await.status, 200);
        assert_eq!(rig.post("/wake_up?tags=weights", "").await.json()["status"], "sleeping");
        let woken = rig.post("/wake_up?tags=kv_cache", "").await;
        assert_eq!(woken.json()["status"], "awake", "{}", woken.text);
        let worker = rig.get("/fak/v1/workers/w0").await.json();
        assert_eq!(worker["phase"], "serving", "level {level}");
        let rows = rig.get("/fak/v1/witness?action=wake&newest_first=true").await.json();
        let reset = json!(["/wake_up?tags=kv_cache", "/reset_prefix_cache?reset_external=true"]);
        assert_eq!(rows[0]["asked"]["calls"], reset, "KV of the old weights is not kept");
        assert_eq!(rows[0]["kv"], "forgotten");
    }
}

#[tokio::test]
async fn the_same_wake_twice_proves_no_weights_and_has_the_same_answer() {
    let rig = Rig::start(1).await;
    for by in ["/wake_up", "/fak/v1/workers/w0/wake"] {
        assert_eq!(rig.post("/sleep?level=2", "").await.status, 200);
        // Whoever woke it first, and however often it is repeated.
        rig.post(by, "").await;
        for _ in 0..3 {
            let woken = rig.post("/wake_up", "").await;
            assert_eq!(woken.status, 409, "no status that clients repeat: {}", woken.text);
            let body = woken.json();
            assert_eq!(body["workers"][0]["row"]["reason"], "weights_not_proven");
            for told in [&body["error"]["message"], &body["workers"][0]["error"]] {
                let told = told.as_str().expect("a message");
                assert!(told.contains("weights_not_proven"), "{told}");
                assert!(told.contains("/wake_up?tags=weights"), "{told}");
            }
            let worker = rig.get("/fak/v1/workers/w0").await.json();
            assert_eq!((&worker["phase"], &worker["serving"]), (&json!("waking"), &json!(false)));
        }
        // Who names their memory has weights to load, and wakes the rest once they are in it.
        assert_eq!(rig.post("/wake_up?tags=weights", "").await.status, 200);
        assert_eq!(rig.post("/wake_up?tags=weights", "").await.status, 200);
        assert_eq!(rig.get("/fak/v1/workers/w0").await.json()["serving"], false);
        assert_eq!(rig.post("/wake_up", "").await.json()["status"], "awake");
        assert_eq!(rig.get("/fak/v1/workers/w0").await.json()["serving"], true);
    }
}

#[tokio::test]
async fn one_worker_is_meant_by_name_and_a_partial_success_looks_like_none() {
    let rig = Rig::start(3).await;
    assert_eq!(rig.post("/pause?worker=w1", "").await.status, 200);
    assert_eq!(rig.post("/pause?worker=w9", "").await.status, 404);
    let differ = rig.get("/is_paused").await;
    assert_eq!(differ.status, 409, "{}", differ.text);
    assert_eq!(rig.get("/is_paused?worker=w1").await.json(), json!({"is_paused": true}));

    rig.sims[2].faults().route("/sleep", RouteFault::Fail(500), 1);
    let partial = rig.post("/sleep?level=2", "").await;
    assert_eq!(partial.status, 502, "{}", partial.text);
    let body = partial.json();
    let outcomes: Vec<_> = body["workers"]
        .as_array()
        .unwrap()
        .iter()
        .map(|end| (end["worker"].as_str().unwrap(), end["outcome"].as_str().unwrap()))
        .collect();
    assert_eq!(outcomes, [("w0", "done"), ("w1", "done"), ("w2", "failed")]);
    assert_eq!(body["workers"][0]["row"]["kv"], "forgotten");
    assert_eq!(body["error"]["code"], 502);
}

#[tokio::test]
async fn a_repeat_at_another_level_is_no_success() {
    let rig = Rig::start(1).await;
    assert_eq!(rig.post("/sleep?level=1", "").await.status, 200);
    rig.look(0).await;
    let deeper = rig.post("/sleep?level=2", "").await;
    assert_eq!(deeper.status, 409, "{}", deeper.text);
    assert_eq!(deeper.json()["workers"][0]["outcome"], "refused");
}

#[tokio::test]
async fn the_flags_follow_what_others_do_behind_faks_back() {
    let rig = Rig::start(1).await;
    rig.behind(0, "/sleep?level=1").await;
    assert_eq!(rig.get("/is_sleeping").await.json(), json!({"is_sleeping": true}));
    let rows = rig.get("/fak/v1/witness?action=drift").await.json();
    assert_eq!(rows.as_array().unwrap().last().unwrap()["phase"], "sleeping");
}
