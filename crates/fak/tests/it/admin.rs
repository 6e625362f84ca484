//! The control API over HTTP: real sockets, simulated engines, a ledger in memory.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod cli;
mod dropin;
mod kept;
mod metrics;
pub(crate) mod rig;
mod rollout;
mod stream;

use fak_sim::RouteFault;
use serde_json::{Value, json};

use rig::Rig;

fn rows(answer: &Value) -> Vec<(String, String)> {
    let word = |row: &Value, key: &str| row[key].as_str().unwrap().to_owned();
    let rows = answer.as_array().unwrap().iter();
    rows.map(|row| (word(row, "action"), word(row, "evidence"))).collect()
}

#[tokio::test]
async fn a_worker_is_listed_as_the_contract_says() {
    let rig = Rig::start(2).await;
    rig.served("s", "w0");
    let workers = rig.get("/fak/v1/workers").await.json();
    let worker = &workers[0];
    assert_eq!(worker["id"], "w0");
    assert_eq!(worker["url"], rig.sims[0].base_url());
    assert_eq!(worker["models"], json!(["tiny"]));
    assert_eq!((&worker["phase"], &worker["serving"]), (&json!("serving"), &json!(true)));
    assert!(["exact", "degraded", "load-only"].contains(&worker["state"].as_str().unwrap()));
    let tiers: Vec<_> = worker["tiers"].as_object().unwrap().keys().collect();
    assert_eq!(tiers[0], "gpu");
    assert!(worker["tiers"]["gpu"].as_object().unwrap().contains_key("blocks"));
    assert_eq!((&worker["sessions"], &worker["in_flight"]), (&json!(1), &json!(0)));
    assert!(worker["last_witness"].is_u64());
    assert!(worker.as_object().unwrap().contains_key("weight_version"));
    assert_eq!(workers[1]["sessions"], 0);
    assert_eq!(rig.get("/fak/v1/workers/w1").await.json()["id"], "w1");
    let unknown = rig.get("/fak/v1/workers/w9").await;
    assert_eq!(unknown.status, 404);
    let error = &unknown.json()["error"];
    assert_eq!((&error["code"], &error["param"]), (&json!("unknown_worker"), &Value::Null));
}

#[tokio::test]
async fn an_action_answers_with_its_row_and_a_repeat_is_refused_with_one() {
    let rig = Rig::start(1).await;
    let slept = rig.post("/fak/v1/workers/w0/sleep", r#"{"level":1,"mode":"wait"}"#).await;
    assert_eq!(slept.status, 200, "{}", slept.text);
    let row = slept.json();
    assert_eq!((&row["action"], &row["level"]), (&json!("sleep"), &json!(1)));
    assert_eq!((&row["phase"], &row["kv"]), (&json!("sleeping"), &json!("forgotten")));
    assert_eq!((&row["evidence"], &row["serving"]), (&json!("observed"), &json!(false)));

    for (action, body) in [("sleep", r#"{"level":2}"#), ("pause", ""), ("resume", "{}")] {
        let again = rig.post(&format!("/fak/v1/workers/w0/{action}"), body).await;
        assert_eq!(again.status, 409, "{action}: {}", again.text);
        let body = again.json();
        assert_eq!(body["error"]["code"], "refused");
        assert_eq!(body["row"]["evidence"], "not_sent");
        assert_eq!(body["row"]["phase"], "sleeping");
    }
    let woken = rig.post("/fak/v1/workers/w0/wake", "").await;
    assert_eq!((woken.status, &woken.json()["kv"]), (200, &json!("unknown")));
    let listed = rig.get("/fak/v1/witness?worker=w0&action=sleep").await.json();
    let expected = [("sleep", "observed"), ("sleep", "not_sent")];
    assert_eq!(rows(&listed), expected.map(|(a, e)| (a.to_owned(), e.to_owned())));
    assert_eq!(rig.post("/fak/v1/workers/w9/pause", "").await.status, 404);
}

#[tokio::test]
async fn what_the_engine_failed_is_no_success() {
    let rig = Rig::start(1).await;
    rig.sims[0].faults().route("/sleep", RouteFault::FailAfter(500), 1);
    let failed = rig.post("/fak/v1/workers/w0/sleep", r#"{"level":1}"#).await;
    assert_eq!(failed.status, 502, "{}", failed.text);
    let body = failed.json();
    assert_eq!(body["error"]["code"], "failed");
    assert_eq!((&body["row"]["kv"], &body["row"]["serving"]), (&json!("unknown"), &json!(false)));
}

#[tokio::test]
async fn options_that_are_unknown_misplaced_or_missing_are_refused_before_an_action() {
    let rig = Rig::start(1).await;
    let before = rig.get("/fak/v1/witness").await.json();
    for (path, body, param, says) in [
        ("sleep", r#"{"levle":1}"#, "levle", "level, mode, keep_tier"),
        ("sleep", "{}", "level", "use pause"),
        ("sleep", r#"{"level":0}"#, "level", "use pause"),
        ("sleep?level=2", "", "level", "JSON body"),
        ("pause", r#"{"level":1}"#, "level", "no option of pause"),
        ("resume", r#"{"level":1}"#, "level", "holder, force"),
    ] {
        let answer = rig.post(&format!("/fak/v1/workers/w0/{path}"), body).await;
        assert_eq!(answer.status, 400, "{path} {body}: {}", answer.text);
        let error = &answer.json()["error"];
        assert_eq!(error["param"], param, "{path} {body}");
        assert!(error["message"].as_str().unwrap().contains(says), "{path} {body}: {error}");
    }
    let unknown = rig.post("/fak/v1/workers/w0/explode", "").await;
    assert_eq!(unknown.status, 404);
    let filtered = rig.get("/fak/v1/witness?action=slep").await;
    let told = filtered.json()["error"]["message"].to_string();
    assert!(told.contains("slep") && told.contains("pause, resume, sleep"), "{told}");
    let wrong = rig.ask("PUT", "/fak/v1/workers/w0/pause", &[], "").await;
    assert_eq!((wrong.status, &wrong.json()["error"]["code"]), (405, &json!("method_not_allowed")));
    let long = format!(r#"{{"mode":"{}"}}"#, "x".repeat(1 << 20));
    for (path, body, told) in [
        ("/fak/v1/workers/w0/pause", long.as_str(), (413, "body_too_large")),
        ("/fak/v1/workers/%ff/pause", "", (400, "bad_request")),
    ] {
        let answer = rig.post(path, body).await;
        assert_eq!((answer.status, answer.json()["error"]["code"].as_str().unwrap()), told);
    }
    let quarantine = rig.post("/fak/v1/workers/w0/quarantine", r#"{"flush":true}"#).await;
    assert_eq!(quarantine.status, 404);
    assert_eq!(rig.get("/fak/v1/witness?bogus=1").await.status, 400);
    assert_eq!(rig.get("/fak/v1/witness?kv=warm").await.status, 400);
    assert_eq!(rig.get("/fak/v1/witness").await.json(), before, "nothing became an action");
}

#[tokio::test]
async fn acting_on_a_session_acts_on_its_worker_unless_others_are_active_there() {
    let rig = Rig::start(1).await;
    rig.served("mine", "w0");
    rig.served("other", "w0");
    let refused = rig.post("/fak/v1/sessions/mine/sleep", r#"{"level":1}"#).await;
    assert_eq!(refused.status, 409, "{}", refused.text);
    let body = refused.json();
    assert_eq!(body["error"]["code"], "sessions_active");
    assert_eq!((&body["sessions"], &body["sessions_total"]), (&json!(["other"]), &json!(1)));
    assert_eq!(rig.get("/fak/v1/workers/w0").await.json()["serving"], true);

    let forced = rig.post("/fak/v1/sessions/mine/sleep", r#"{"level":1,"force":true}"#).await;
    assert_eq!(forced.status, 200, "{}", forced.text);
    let row = forced.json();
    assert_eq!((&row["session"], &row["worker"]), (&json!("mine"), &json!("w0")));
    // The other one's next request goes to another worker, once there is one.
    for (id, run, reason, since) in [
        ("mine", "dormant", json!("sleep"), row["seq"].clone()),
        ("other", "active", json!(null), json!(null)),
    ] {
        let session = rig.get(&format!("/fak/v1/sessions/{id}")).await.json();
        assert_eq!((&session["run"], &session["reason"]), (&json!(run), &reason), "{id}");
        assert_eq!((&session["phase"], &session["serving"]), (&json!("sleeping"), &json!(false)));
        assert_eq!(session["dormant_since"], since);
        assert_eq!(session["last_witness"], row["seq"]);
    }
    let woken = rig.post("/fak/v1/sessions/mine/wake", "").await;
    assert_eq!((woken.status, &woken.json()["kv"]), (200, &json!("unknown")));
    let sessions = rig.get("/fak/v1/sessions").await.json();
    for session in sessions.as_array().unwrap() {
        assert_eq!((&session["run"], &session["warm"]), (&json!("active"), &json!(false)));
    }
    assert_eq!(rig.post("/fak/v1/sessions/nobody/pause", "").await.status, 404);
    rig.sessions.resolve("unserved").unwrap();
    let unserved = rig.post("/fak/v1/sessions/unserved/pause", "").await;
    assert_eq!((unserved.status, &unserved.json()["error"]["code"]), (409, &json!("no_worker")));
}

#[tokio::test]
async fn sessions_of_a_worker_that_rests_stay_active_whoever_put_it_to_rest() {
    let rig = Rig::start(2).await;
    rig.served("asked", "w0");
    rig.served("behind", "w1");
    let session = async |id: &str| rig.get(&format!("/fak/v1/sessions/{id}")).await.json();
    let slept = rig.post("/sleep?worker=w0", "").await;
    assert_eq!(slept.status, 200, "{}", slept.text);
    rig.behind(1, "/sleep?level=1").await;
    rig.look(1).await;
    while session("asked").await["last_witness"].is_null() {
        tokio::task::yield_now().await;
    }
    for id in ["asked", "behind"] {
        assert_eq!(session(id).await["run"], "active", "{id}");
    }
    let worker = rig.get("/fak/v1/workers/w0").await.json();
    assert_eq!((&worker["sessions"], &worker["sessions_active"]), (&json!(1), &json!(1)));
}

#[tokio::test]
async fn a_quarantine_flushes_the_worker_or_isolates_the_session() {
    let rig = Rig::start(1).await;
    rig.served("mine", "w0");
    rig.served("other", "w0");
    let neither = rig.post("/fak/v1/sessions/mine/quarantine", "{}").await;
    assert_eq!(neither.status, 400);
    let flush = rig.post("/fak/v1/sessions/mine/quarantine", r#"{"flush":true}"#).await;
    assert_eq!(flush.status, 409, "everybody else's prefixes go, too");

    let isolated = rig.post("/fak/v1/sessions/mine/quarantine", r#"{"isolate":true}"#).await;
    assert_eq!(isolated.status, 200, "{}", isolated.text);
    let row = isolated.json();
    assert_eq!((&row["action"], &row["reason"]), (&json!("quarantine"), &json!("isolated")));
    // Nothing is sent for it, and what is believed of this worker, a marker's block, still stands.
    assert_eq!((&row["kv"], &row["serving"]), (&json!("preserved"), &json!(true)));
    let salt = |id: &str| rig.sessions.resolve(id).unwrap().salt();
    let first = salt("mine").expect("a salt of its own");
    assert_eq!(salt("other"), None);
    assert_eq!(rig.get("/fak/v1/sessions/mine").await.json()["isolated"], true);
    rig.post("/fak/v1/sessions/mine/quarantine", r#"{"isolate":true}"#).await;
    assert_ne!(salt("mine").as_ref(), Some(&first), "each time a new one");
    assert!(!rig.get("/fak/v1/sessions/mine").await.text.contains(&*first), "a salt is not shown");

    let body = r#"{"flush":true,"force":true}"#;
    let flushed = rig.post("/fak/v1/sessions/mine/quarantine", body).await;
    assert_eq!((flushed.status, &flushed.json()["kv"]), (200, &json!("forgotten")));
}

#[tokio::test]
async fn a_session_is_named_exactly_and_can_be_ended() {
    let rig = Rig::start(1).await;
    for id in ["a/b", "a", "session-1", "session-12"] {
        rig.served(id, "w0");
    }
    assert_eq!(rig.get("/fak/v1/sessions/a%2Fb").await.json()["id"], "a/b");
    assert_eq!(rig.get("/fak/v1/sessions/session-").await.status, 404);
    let one = rig.get("/fak/v1/sessions?limit=1").await.json();
    assert_eq!(one.as_array().unwrap().len(), 1);
    assert_eq!(rig.get("/fak/v1/sessions?worker=w9").await.json(), json!([]));
    assert_eq!(rig.ask("DELETE", "/fak/v1/sessions/a%2Fb", &[], "").await.status, 200);
    assert_eq!(rig.ask("DELETE", "/fak/v1/sessions/a%2Fb", &[], "").await.status, 404);
    assert_eq!(rig.get("/fak/v1/sessions/a").await.status, 200);
}

#[tokio::test]
async fn control_takes_the_admin_key_and_probes_do_not() {
    let rig = Rig::with_key("s3cret").await;
    let control = [
        ("GET", "/fak/v1/workers"),
        ("POST", "/fak/v1/workers/w0/pause"),
        ("GET", "/fak/v1/sessions"),
        ("GET", "/fak/v1/witness"),
        ("GET", "/fak/v1/events"),
        ("POST", "/pause"),
        ("POST", "/sleep"),
        ("POST", "/wake_up"),
        ("POST", "/resume"),
        ("POST", "/reset_prefix_cache"),
        ("GET", "/is_sleeping"),
        ("GET", "/is_paused"),
    ];
    for (method, path) in control {
        let denied = rig.ask(method, path, &[], "").await;
        assert_eq!(denied.status, 401, "{method} {path}");
        assert_eq!(denied.json()["error"]["code"], "unauthorized");
        assert_eq!(denied.headers["www-authenticate"], "Bearer");
        let wrong = [("authorization", "Bearer other")];
        assert_eq!(rig.ask(method, path, &wrong, "").await.status, 401, "{method} {path}");
    }
    for headers in [[("authorization", "Bearer s3cret")], [("x-fak-key", "s3cret")]] {
        assert_eq!(rig.ask("GET", "/fak/v1/workers", &headers, "").await.status, 200);
    }
    for path in ["/health", "/ready", "/metrics", "/openapi.json"] {
        assert_eq!(rig.get(path).await.status, 200, "{path}");
    }
    let rows = rig.store.rows(&fak::store::Filter::default()).await.unwrap();
    assert!(rows.iter().all(|row| row.action.as_str() == "join"), "nothing was done: {rows:?}");
}

#[tokio::test]
async fn beyond_loopback_nobody_is_served_without_a_key() {
    let access = fak::admin::Access { key: None, is_loopback_only: false };
    let rig = Rig::with(1, access).await;
    for (method, path) in [("GET", "/fak/v1/workers"), ("POST", "/sleep")] {
        assert_eq!(rig.ask(method, path, &[], "").await.status, 401, "{path}");
    }
    assert_eq!(rig.get("/health").await.status, 200);
}

#[tokio::test]
async fn without_a_key_no_web_page_asks_for_control() {
    let rig = Rig::start(1).await;
    let page = [("origin", "http://evil.example")];
    assert_eq!(rig.ask("POST", "/sleep", &page, "").await.status, 403);
    let rebound = [("host", "evil.example")];
    assert_eq!(rig.ask("POST", "/sleep", &rebound, "").await.status, 403);
    assert_eq!(rig.get("/fak/v1/workers/w0").await.json()["phase"], "serving");
}

#[tokio::test]
async fn paths_that_only_resemble_a_control_route_lead_nowhere() {
    let rig = Rig::start(1).await;
    for path in [
        "//sleep",
        "/v1/../sleep",
        "/%73leep",
        "/SLEEP",
        "/sleep/",
        "/collective_rpc",
        "/invocations",
        "/fak/v1/workers/w0/pause/x",
    ] {
        let answer = rig.post(path, "").await;
        assert_eq!(
            (answer.status, &answer.json()["error"]["code"]),
            (404, &json!("route_not_found"))
        );
    }
    assert_eq!(rig.get("/fak/v1/workers/w0").await.json()["phase"], "serving");
}

#[tokio::test]
async fn ready_says_which_model_nobody_serves_and_why() {
    let rig = Rig::start(2).await;
    assert_eq!(rig.get("/health").await.json(), json!({"status": "alive"}));
    let ready = rig.get("/ready").await;
    assert_eq!((ready.status, &ready.json()["models"]), (200, &json!({"tiny": 2})));
    rig.post("/fak/v1/workers/w0/sleep", r#"{"level":1}"#).await;
    assert_eq!(rig.get("/ready").await.status, 200, "one still serves");
    rig.post("/fak/v1/workers/w1/pause", "").await;
    let ready = rig.get("/ready").await;
    assert_eq!(ready.status, 503);
    let reason = "no worker serves tiny: w0 is sleeping: fak worker wake w0 wakes it, w1 is \
                  paused: fak worker resume w1 lets it go on";
    assert_eq!(ready.json()["reasons"], json!([reason]));
    assert_eq!(rig.get("/health").await.status, 200);
}

#[tokio::test]
async fn the_description_names_the_methods_that_the_routes_take() {
    let rig = Rig::start(1).await;
    let described = rig.get("/openapi.json").await.json();
    for (path, methods) in described["paths"].as_object().unwrap() {
        // Of names that nobody has, so that nothing is done.
        let path = path.replace("{id}", "nobody").replace("{action}", "resume");
        let path = format!("{path}?no-such-option=1");
        for method in ["GET", "POST", "PUT", "DELETE"] {
            let is_described = methods.get(method.to_ascii_lowercase()).is_some();
            let response = rig.open(method, &path, &[], "").await;
            assert_eq!(response.status() != 405, is_described, "{method} {path}");
        }
    }
}

#[tokio::test]
async fn a_wake_that_waits_for_weights_says_how_it_is_finished() {
    let rig = Rig::start(1).await;
    assert_eq!(rig.post("/fak/v1/workers/w0/sleep", r#"{"level":2}"#).await.status, 200);
    let waits = rig.post("/fak/v1/workers/w0/wake", "").await;
    let error = &waits.json()["error"];
    assert_eq!(
        (waits.status, &error["code"]),
        (409, &json!("weights_not_proven")),
        "{}",
        waits.text
    );
    let message = error["message"].as_str().unwrap();
    for told in ["weights_not_proven", "--weights loaded"] {
        assert!(message.contains(told), "{told}: {message}");
    }
    assert_eq!(rig.post("/fak/v1/workers/w0/wake", r#"{"weights":"loaded"}"#).await.status, 200);
    assert_eq!(rig.post("/fak/v1/rollout/begin", r#"{"level":2}"#).await.status, 200);
    let ended = rig.post("/fak/v1/rollout/end", r#"{"weights":"unproven"}"#).await;
    assert!(ended.text.contains("--weights loaded"), "{}", ended.text);
    let ended = rig.post("/fak/v1/rollout/end", r#"{"weights":"loaded"}"#).await;
    assert_eq!(ended.status, 200, "{}", ended.text);
}

#[tokio::test]
async fn a_worker_that_waits_for_weights_is_offered_only_what_can_prove_them() {
    let rig = Rig::start(1).await;
    let (begin, end, wake) =
        ("/fak/v1/rollout/begin", "/fak/v1/rollout/end", "/fak/v1/workers/w0/wake");
    for (path, sleep, undo, offers_same) in [
        // Level 2 drops the weights: the same ones are nowhere but where they are loaded from.
        (wake, r#"{"level":2}"#, "{}", false),
        (end, r#"{"level":2}"#, r#"{"weights":"unproven"}"#, false),
        // What the engine answered before is held against what it answers then.
        (end, r#"{"level":2,"canary":true}"#, r#"{"weights":"unproven"}"#, true),
        // Level 1 keeps them.
        (wake, r#"{"level":1}"#, r#"{"weights":"changed"}"#, true),
    ] {
        let begin = if path == end { begin } else { "/fak/v1/workers/w0/sleep" };
        assert_eq!(rig.post(begin, sleep).await.status, 200);
        let waits = rig.post(path, undo).await;
        assert_eq!(waits.status, 409, "{}", waits.text);
        assert!(waits.text.contains("weights loaded (--weights loaded)"), "{}", waits.text);
        assert_eq!(waits.text.contains("--weights same"), offers_same, "{sleep}: {}", waits.text);
        let by_canary = sleep.contains("canary");
        assert_eq!(waits.text.contains("began with a canary"), by_canary, "{}", waits.text);
        let done = rig.post(path, r#"{"weights":"loaded"}"#).await;
        assert_eq!(done.status, 200, "{}", done.text);
    }
}

#[tokio::test]
async fn a_move_that_does_not_fit_says_which_one_does() {
    let rig = Rig::start(1).await;
    for (done, refused, told) in [
        ("pause", "wake", "resume it instead"),
        ("sleep", "reset", "wake it first"),
        ("wake", "pause", "wake the rest of it first"),
    ] {
        let body = match done {
            "sleep" => r#"{"level":1}"#,
            "wake" => r#"{"tags":["weights"]}"#,
            _ => "",
        };
        let answer = rig.post(&format!("/fak/v1/workers/w0/{done}"), body).await;
        assert_eq!(answer.status, 200, "{done}: {}", answer.text);
        let answer = rig.post(&format!("/fak/v1/workers/w0/{refused}"), "").await;
        assert_eq!(answer.status, 409, "{refused}: {}", answer.text);
        let message = answer.json()["error"]["message"].to_string();
        assert!(message.contains(told), "{refused}: {message}");
    }
}

/// Of a body that is announced too long nothing is waited for.
#[tokio::test]
async fn a_control_request_whose_body_is_announced_too_long_is_refused_at_once() {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    let rig = Rig::start(1).await;
    let before = rig.get("/fak/v1/witness").await.json();
    for path in ["/sleep", "/pause", "/fak/v1/workers/w0/sleep", "/fak/v1/rollout/begin"] {
        let address = rig.url().strip_prefix("http://").unwrap().to_owned();
        let mut stream = tokio::net::TcpStream::connect(&address).await.unwrap();
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: {address}\r\ncontent-length: 9999999999\r\n\r\n"
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 413 "), "{path}: {answer}");
        let error = serde_json::from_str::<Value>(body).unwrap()["error"].take();
        assert!(error["message"].as_str().unwrap().contains("65536 bytes"), "{error}");
        let code = if path.starts_with("/fak/") { json!("body_too_large") } else { json!(413) };
        assert_eq!(error["code"], code, "{path}");
    }
    assert_eq!(rig.get("/fak/v1/witness").await.json(), before);
}

#[tokio::test]
async fn what_is_answered_has_the_fields_that_are_described() {
    use std::collections::BTreeSet;

    let rig = Rig::start(1).await;
    rig.served("s", "w0");
    rig.post("/fak/v1/workers/w0/pause", "{}").await;
    let described = rig.get("/openapi.json").await.json();
    let worker = rig.get("/fak/v1/workers/w0").await.json();
    let keys = |object: &Value| -> BTreeSet<String> {
        object.as_object().unwrap().keys().cloned().collect()
    };
    for (schema, answered) in [
        ("Worker", &worker),
        ("Stream", &worker["streams"][0]),
        ("Session", &rig.get("/fak/v1/sessions/s").await.json()),
        ("Row", &rig.get("/fak/v1/witness").await.json()[0]),
    ] {
        let properties = &described["components"]["schemas"][schema]["properties"];
        assert_eq!(keys(answered), keys(properties), "{schema}");
    }
}
