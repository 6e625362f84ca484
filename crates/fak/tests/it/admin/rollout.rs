//! Rollouts over HTTP, and from the command line: of several workers none counts for all.

use fak_sim::RouteFault;
use serde_json::{Value, json};

use super::cli::fak;
use super::rig::Rig;

const BEGIN: &str = "/fak/v1/rollout/begin";
const END: &str = "/fak/v1/rollout/end";

fn field(answer: &Value, name: &str) -> Vec<Value> {
    let workers = answer["workers"].as_array().unwrap();
    workers.iter().map(|worker| worker[name].clone()).collect()
}

#[tokio::test]
async fn a_fleet_goes_to_sleep_for_its_holder_and_comes_back() {
    let rig = Rig::start(2).await;
    let began = rig.post(BEGIN, r#"{"holder":"trainer-7"}"#).await;
    assert_eq!(began.status, 200, "{}", began.text);
    let began = began.json();
    assert_eq!((&began["done"], field(&began, "gpu_free")), (&json!(true), vec![json!(true); 2]));
    assert_eq!(field(&began, "outcome"), ["done", "done"]);
    assert_eq!(field(&began, "running"), [0, 0]);
    assert_eq!(began["workers"][0]["row"]["action"], "sleep");
    let holds = rig.get("/fak/v1/rollout").await.json();
    assert_eq!(holds["holds"][1]["worker"], "w1");
    assert_eq!(holds["holds"][1]["holder"], "trainer-7");
    assert!(holds["holds"][1]["since"].is_string());
    let workers = rig.get("/fak/v1/workers").await.json();
    assert_eq!(
        (&workers[0]["held_by"], &workers[0]["serving"]),
        (&json!("trainer-7"), &json!(false))
    );

    let body = r#"{"holder":"trainer-7","weights":"loaded","weight_version":"v8"}"#;
    let ended = rig.post(END, body).await;
    assert_eq!(ended.status, 200, "{}", ended.text);
    let ended = ended.json();
    assert_eq!(field(&ended, "serving"), [true, true]);
    assert_eq!(field(&ended, "canary"), ["not_run", "not_run"]);
    assert_eq!(field(&ended, "weight_version"), ["v8", "v8"]);
    assert_eq!(field(&ended, "held_by"), [Value::Null, Value::Null]);
    assert_eq!(ended["workers"][0]["rows"][0]["tiers"]["cpu"], "forgotten");
    assert_eq!(rig.get("/fak/v1/rollout").await.json(), json!({ "holds": [] }));
}

#[tokio::test]
async fn case_33_a_part_of_the_fleet_is_no_success() {
    let rig = Rig::start(3).await;
    rig.sims[2].faults().route("/sleep", RouteFault::Fail(500), 1);
    let began = rig.post(BEGIN, "{}").await;
    assert_eq!(began.status, 502, "{}", began.text);
    let began = began.json();
    assert_eq!((&began["done"], &began["error"]["code"]), (&json!(false), &json!("failed")));
    assert_eq!(began["error"]["message"], "done on 2 of 3 workers");
    assert_eq!(field(&began, "outcome"), ["done", "done", "failed"]);
    assert_eq!(field(&began, "gpu_free"), [true, true, false]);
    let why = began["workers"][2]["error"].as_str().unwrap();
    for told in
        ["not proven to be done: failed: ", "its log", "; it takes no requests, and is held"]
    {
        assert!(why.contains(told), "{told}: {why}");
    }

    rig.sims[1].faults().route("/reset_prefix_cache", RouteFault::Decline, 4);
    let body = r#"{"weights":"loaded","weight_version":"v8"}"#;
    let ended = rig.post(END, body).await;
    assert_eq!(ended.status, 502, "{}", ended.text);
    let ended = ended.json();
    assert_eq!(field(&ended, "outcome"), ["done", "failed", "done"]);
    // The one that is not on the weights meant takes no requests, and is still held.
    assert_eq!(field(&ended, "serving"), [true, false, true]);
    assert_eq!(field(&ended, "held_by"), [Value::Null, json!("rollout"), Value::Null]);
    let again = rig.post(END, r#"{"workers":["w1"],"weights":"loaded"}"#).await;
    assert_eq!(again.status, 200, "{}", again.text);

    let held = rig.post(BEGIN, r#"{"workers":["w0"],"holder":"a"}"#).await;
    assert_eq!(held.status, 200);
    let partly = rig.post(BEGIN, r#"{"holder":"b"}"#).await;
    assert_eq!(partly.status, 409, "{}", partly.text);
    assert_eq!(field(&partly.json(), "outcome"), ["refused", "done", "done"]);
    let why = partly.json()["workers"][0]["error"].as_str().unwrap().to_owned();
    assert!(why.contains("held") && why.contains("by a;"), "{why}");
}

#[tokio::test]
async fn while_held_the_other_doors_are_shut_too() {
    let rig = Rig::start(1).await;
    rig.served("s", "w0");
    rig.post(BEGIN, r#"{"holder":"a"}"#).await;
    for (path, body) in [
        ("/fak/v1/workers/w0/wake", "{}"),
        ("/fak/v1/workers/w0/wake", r#"{"holder":"b"}"#),
        ("/fak/v1/sessions/s/wake", "{}"),
        ("/wake_up", ""),
    ] {
        let answer = rig.post(path, body).await;
        assert_eq!(answer.status, 409, "{path} {body}: {}", answer.text);
        assert!(answer.text.contains("by a;"), "{path}: {}", answer.text);
    }
    let own = rig.post("/fak/v1/workers/w0/wake", r#"{"holder":"a"}"#).await;
    assert_eq!(own.status, 200, "{}", own.text);
    let ready = rig.get("/ready").await;
    assert_eq!(ready.status, 503, "awake and held: {}", ready.text);
    let forced = rig.post("/fak/v1/workers/w0/reset", r#"{"force":true}"#).await;
    assert_eq!(forced.status, 200, "{}", forced.text);
    assert_eq!(rig.get("/fak/v1/workers/w0").await.json()["held_by"], Value::Null);
    assert_eq!(rig.get("/ready").await.status, 200);
}

#[tokio::test]
async fn what_is_unknown_or_ill_formed_is_refused_by_name_before_anything_is_done() {
    let rig = Rig::start(1).await;
    let before = rig.get("/fak/v1/witness").await.json();
    for (path, body, status, says) in [
        (BEGIN, r#"{"levle":1}"#, 400, "levle"),
        (BEGIN, r#"{"level":0}"#, 400, "level"),
        (BEGIN, r#"{"mode":"drop"}"#, 400, "mode"),
        (BEGIN, r#"{"holder":""}"#, 400, "holder"),
        (BEGIN, r#"{"workers":"w0"}"#, 400, "workers"),
        (BEGIN, r#"{"workers":[]}"#, 400, "workers"),
        (BEGIN, r#"{"workers":["w0","w9"]}"#, 404, "w9"),
        (BEGIN, r#"{"weights":"same"}"#, 400, "weights"),
        (END, "{}", 400, "weights"),
        (END, r#"{"weights":"new"}"#, 400, "same, loaded, changed or unproven"),
        (END, r#"{"weights":"same","stage":"kv_cache"}"#, 400, "stage"),
        (END, r#"{"weights":"same","canary":"yes"}"#, 400, "canary"),
        ("/fak/v1/rollout/end?weights=same", "", 400, "JSON body"),
    ] {
        let answer = rig.post(path, body).await;
        assert_eq!(answer.status, status, "{path} {body}: {}", answer.text);
        assert!(answer.text.contains(says), "{path} {body}: {}", answer.text);
    }
    assert_eq!(rig.get("/fak/v1/witness").await.json(), before, "nothing became an action");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_command_line_tells_done_failed_refused_and_bad_usage_apart() {
    let rig = Rig::start(2).await;
    let said = fak(&rig, "rollout begin --holder t --canary --json").await;
    assert_eq!(said.code, 0, "{}", said.err);
    assert_eq!(field(&said.json(), "gpu_free"), [true, true]);
    let said = fak(&rig, "rollout ls").await;
    assert!(said.out.contains("w1") && said.out.contains(" t "), "{}", said.out);
    let said = fak(&rig, "rollout end --weights same").await;
    assert_eq!(said.code, 2, "{}", said.out);
    let refused = ["holder `rollout` holds no worker", "w0 (held by t), w1 (held by t)"];
    assert!(refused.iter().all(|part| said.err.contains(part)), "{}", said.err);
    let said = fak(&rig, "worker wake w0").await;
    assert_eq!(said.code, 2, "{}", said.err);
    assert!(said.err.contains("by t;"), "{}", said.err);
    let said = fak(&rig, "rollout end --worker w0 --holder t --weights same").await;
    assert_eq!(said.code, 0, "{}", said.err);
    assert!(said.out.contains("same"), "{}", said.out);
    let said = fak(&rig, "worker wake w1 --holder t").await;
    assert_eq!(said.code, 0, "{}", said.err);
    // Of two workers one does as asked: something changed.
    fak(&rig, "rollout end --holder t --weights same").await;
    fak(&rig, "rollout begin --worker w0 --holder a").await;
    let said = fak(&rig, "rollout begin --holder b").await;
    assert_eq!(said.code, 1, "{}", said.out);
    let said = fak(&rig, "worker sleep w1 --level 1 --keep-tier --force").await;
    assert_eq!(said.code, 2, "{}", said.err);
    let said = fak(&rig, "rollout begin --worker w1 --holder b --keep-tier").await;
    assert_eq!(said.code, 2, "{}", said.err);
    assert!(said.out.contains("OffloadingConnector"), "{}", said.out);
}

/// What the ledger and the worker's view show: all that an end may change.
async fn shown(rig: &Rig, worker: &str) -> (Value, Value) {
    let rows = rig.get(&format!("/fak/v1/witness?worker={worker}")).await.json();
    let view = rig.get(&format!("/fak/v1/workers/{worker}")).await.json();
    let of_it = ["phase", "serving", "held_by", "weight_version"].map(|name| view[name].clone());
    (rows, of_it.into())
}

#[tokio::test]
async fn an_end_without_a_list_leaves_workers_alone_that_its_holder_does_not_hold() {
    let rig = Rig::start(2).await;
    let loaded = r#"{"holder":"t","weights":"loaded","weight_version":"v8"}"#;
    let same = r#"{"holder":"t","weights":"same"}"#;
    for (before, body) in [
        // Level 2 dropped its weights, and nothing loaded any since.
        (vec![("sleep", r#"{"level":2}"#)], same),
        (vec![("wake", "{}")], same),
        (vec![("wake", r#"{"weights":"loaded"}"#), ("pause", "{}")], same),
        // It serves all the time, with its proven cache.
        (vec![("resume", "{}")], loaded),
    ] {
        for (action, options) in before {
            rig.post(&format!("/fak/v1/workers/w1/{action}"), options).await;
        }
        rig.post(BEGIN, r#"{"workers":["w0"],"holder":"t"}"#).await;
        let other = shown(&rig, "w1").await;
        for nobody in [r#"{"holder":"nobody","weights":"same"}"#, r#"{"weights":"same"}"#] {
            let refused = rig.post(END, nobody).await;
            assert_eq!(refused.status, 409, "{}", refused.text);
        }
        let ended = rig.post(END, body).await;
        assert_eq!(ended.status, 200, "{}", ended.text);
        assert_eq!(field(&ended.json(), "worker"), ["w0"]);
        assert_eq!(shown(&rig, "w1").await, other, "{body}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_end_of_a_holder_that_holds_nothing_is_refused_and_names_the_way_on() {
    let rig = Rig::start(2).await;
    rig.post(BEGIN, r#"{"workers":["w0"],"holder":"t"}"#).await;
    let before = [shown(&rig, "w0").await, shown(&rig, "w1").await];
    for (line, parts) in [
        ("rollout end --holder nobody --weights same", ["`nobody`", "w0 (held by t)", "--holder"]),
        (
            "rollout end --holder nobody --weights loaded --stage weights",
            ["`nobody`", "w1 (not held)", "worker wake"],
        ),
        (
            "rollout end --holder t --weights same --worker w0 --worker w1",
            ["not held by `t`", "w1 (not held)", "rollout ls"],
        ),
        (
            "rollout end --holder u --weights same --worker w0",
            ["not held by `u`", "w0 (held by t)", "rollout ls"],
        ),
    ] {
        let said = fak(&rig, line).await;
        assert_eq!(said.code, 2, "{line}: {}{}", said.out, said.err);
        assert!(parts.iter().all(|part| said.err.contains(part)), "{line}: {}", said.err);
    }
    assert_eq!([shown(&rig, "w0").await, shown(&rig, "w1").await], before);
}

#[tokio::test]
async fn an_end_that_failed_on_one_worker_may_be_repeated_as_it_was() {
    let rig = Rig::start(2).await;
    let listed = r#"{"workers":["w0","w1"],"weights":"loaded","weight_version":"v8"}"#;
    for body in [listed, r#"{"weights":"loaded","weight_version":"v8"}"#] {
        rig.post(BEGIN, "{}").await;
        rig.sims[1].faults().route("/reset_prefix_cache", RouteFault::Decline, 4);
        let failed = rig.post(END, body).await;
        assert_eq!(failed.status, 502, "{}", failed.text);
        let done = shown(&rig, "w0").await;
        // Another end is not what was done there.
        let other = rig.post(END, r#"{"workers":["w0","w1"],"weights":"same"}"#).await;
        assert_eq!(other.status, 409, "{}", other.text);
        let again = rig.post(END, body).await;
        assert_eq!(again.status, 200, "{}", again.text);
        assert!(field(&again.json(), "serving").iter().all(|serving| *serving == true));
        assert_eq!(shown(&rig, "w0").await, done, "nothing was done to it twice");
    }
    let answered = rig.post(END, listed).await;
    assert_eq!(answered.status, 200, "its answer was lost: {}", answered.text);
    assert_eq!(field(&answered.json(), "reason"), ["already_awake", "already_awake"]);
}
