//! A worker that somebody keeps from serving: who, for what, since when, and what ends that.

use std::time::Duration;

use fak::fleet::Inside;
use fak_sim::RouteFault;
use serde_json::{Value, json};
use tokio::time::timeout;

use super::cli::fak;
use super::rig::{Answer, Rig};

const SLEEP: &str = "/fak/v1/workers/w0/sleep";

fn inside(rig: &Rig) -> Inside {
    rig.fleet.snapshot().get("w0").unwrap().worker.door.enter().unwrap()
}

async fn worker(rig: &Rig) -> Value {
    rig.get("/fak/v1/workers/w0").await.json()
}

/// Asks for a sleep, and does something once it waits for requests.
async fn while_it_drains<T>(rig: &Rig, then: impl Future<Output = T>) -> (Answer, T) {
    let body = r#"{"level":1,"drain_ms":3600000,"holder":"night"}"#;
    let drains = async {
        while worker(rig).await["busy"]["stage"] != "drains" {}
        then.await
    };
    let both = async { tokio::join!(rig.post(SLEEP, body), drains) };
    timeout(Duration::from_secs(20), both).await.unwrap()
}

#[tokio::test]
async fn a_drain_is_told_by_ready_and_by_its_worker_and_in_a_refusal_and_is_cancelled() {
    let rig = Rig::start(1).await;
    let _inside = inside(&rig);
    let nothing = rig.post("/fak/v1/workers/w0/cancel", "").await;
    assert_eq!((nothing.status, &nothing.json()["error"]["code"]), (409, &json!("refused")));
    let (slept, _) = while_it_drains(&rig, async {
        let now = worker(&rig).await;
        let busy = &now["busy"];
        assert_eq!((&busy["action"], &busy["level"]), (&json!("sleep"), &json!(1)));
        assert_eq!((&busy["holder"], &busy["waits_for"]), (&json!("night"), &json!(1)));
        assert_eq!((&now["serving"], &now["in_flight"]), (&json!(false), &json!(1)));
        let ready = rig.get("/ready").await;
        assert_eq!(ready.status, 503, "{}", ready.text);
        let refused = rig.post("/fak/v1/workers/w0/reset", "").await;
        assert_eq!(refused.status, 409, "{}", refused.text);
        for text in [now["why"].as_str().unwrap(), &ready.text, &refused.text] {
            for told in ["sleep 1 since", "for night", "1 request", "fak worker cancel w0"] {
                assert!(text.contains(told), "{told}: {text}");
            }
        }
        let cancelled = rig.post("/fak/v1/workers/w0/cancel", "").await;
        assert_eq!(cancelled.status, 200, "{}", cancelled.text);
        assert_eq!(cancelled.json()["reason"], "cancelled");
    })
    .await;
    assert_eq!((slept.status, &slept.json()["row"]["reason"]), (409, &json!("cancelled")));
    let ready = rig.get("/ready").await;
    assert_eq!((ready.status, &ready.json()["resting"]), (200, &json!([])), "{}", ready.text);
    let now = worker(&rig).await;
    assert_eq!(
        (&now["serving"], &now["busy"], &now["why"]),
        (&json!(true), &json!(null), &json!(null))
    );
    let wrong = rig.post("/fak/v1/workers/w0/cancel", r#"{"force":true}"#).await;
    assert_eq!((wrong.status, &wrong.json()["error"]["param"]), (400, &json!("force")));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_is_cancelled_by_command() {
    let rig = Rig::start(1).await;
    let _inside = inside(&rig);
    assert_eq!(fak(&rig, "worker cancel w0").await.code, 2, "nothing waits");
    let (_, said) = while_it_drains(&rig, fak(&rig, "worker cancel w0")).await;
    assert_eq!(said.code, 0, "{}", said.err);
    assert!(said.out.contains("sleep 1 on w0: serving, not sent, cancelled"), "{}", said.out);
}

#[tokio::test]
async fn a_worker_that_rests_beside_one_that_serves_is_told_by_ready_with_what_ends_that() {
    let rig = Rig::start(2).await;
    let begun = rig.post("/fak/v1/rollout/begin", r#"{"workers":["w0"],"holder":"t7","level":2}"#);
    assert_eq!(begun.await.status, 200);
    let ready = rig.get("/ready").await;
    assert_eq!(ready.status, 200, "{}", ready.text);
    let resting = ready.json()["resting"][0].as_str().unwrap().to_owned();
    assert!(
        resting.starts_with(
            "w0 is sleeping: held by t7 until fak rollout end --holder t7 --weights same"
        ),
        "{resting}"
    );
    assert_eq!(worker(&rig).await["why"], resting.strip_prefix("w0 is sleeping: ").unwrap());
    // Awake, and without its weights.
    let waits = rig.post("/fak/v1/rollout/end", r#"{"weights":"unproven","holder":"t7"}"#).await;
    assert_eq!(waits.status, 409, "{}", waits.text);
    let why = worker(&rig).await["why"].as_str().unwrap().to_owned();
    for told in
        ["held by t7", "waits for its weights", "fak rollout end --holder t7 --weights loaded"]
    {
        assert!(why.contains(told), "{told}: {why}");
    }
    assert!(rig.get("/ready").await.text.contains("waits for its weights"));
}

#[tokio::test]
async fn a_refusal_names_what_ends_it() {
    let rig = Rig::start(1).await;
    assert_eq!(rig.post(SLEEP, r#"{"level":2}"#).await.status, 200);
    for (path, body, told) in [
        (SLEEP, r#"{"level":1}"#, "it sleeps at level 2: wake it first"),
        ("/fak/v1/workers/w0/wake", r#"{"weights":"same"}"#, "--tag weights"),
        ("/fak/v1/workers/w0/wake", r#"{"weights":"changed"}"#, "allow_reload_weights"),
    ] {
        let refused = rig.post(path, body).await;
        assert_eq!(refused.status, 409, "{}", refused.text);
        assert!(refused.text.contains(told), "{told}: {}", refused.text);
    }
    rig.sims[0].faults().route("/wake_up", RouteFault::Fail(500), 1);
    let failed = rig.post("/fak/v1/workers/w0/wake", r#"{"weights":"loaded"}"#).await;
    assert_eq!(failed.status, 502, "{}", failed.text);
    assert!(failed.text.contains("its log says why"), "{}", failed.text);
}

/// The flags of a front end whose engine is dead read as before.
#[tokio::test]
async fn a_wake_of_an_engine_that_is_dead_under_its_front_end_is_not_told_as_serving() {
    let rig = Rig::start(1).await;
    assert_eq!(rig.post(SLEEP, r#"{"level":1}"#).await.status, 200);
    rig.sims[0].faults().unhealthy(true);
    let woken = rig.post("/fak/v1/workers/w0/wake", "").await;
    assert_eq!(woken.status, 502, "{}", woken.text);
    let row = &woken.json()["row"];
    assert_eq!((&row["serving"], &row["observed"]["is_dead"]), (&json!(false), &json!(true)));
    rig.look(0).await;
    let now = worker(&rig).await;
    assert_eq!((&now["serving"], &now["reachable"]), (&json!(false), &json!(false)));
    assert!(now["why"].as_str().unwrap().contains("/health answers 503"), "{now}");
}

#[tokio::test]
async fn a_worker_whose_key_is_another_or_that_answers_nothing_says_so() {
    let mut rig = Rig::start(1).await;
    rig.sims[0].restart().await.unwrap();
    rig.sims[0].faults().route("/v1/models", RouteFault::Fail(401), 1000);
    rig.look(0).await;
    let refused = "it names no model: /v1/models answered 401 (is FAK_VLLM_API_KEY its key?)";
    assert_eq!(worker(&rig).await["why"], refused);
    let ready = rig.get("/ready").await;
    assert!((ready.status, ready.text.contains(refused)) == (503, true), "{}", ready.text);
    rig.sims[0].faults().clear();
    rig.look(0).await;
    assert_eq!(worker(&rig).await["why"], json!(null), "it tells its models now");
    for path in ["/is_paused", "/is_sleeping", "/metrics"] {
        rig.sims[0].faults().route(path, RouteFault::Fail(403), 1000);
    }
    rig.look(0).await;
    let unheard = "it gives no answer: status 403 (is FAK_VLLM_API_KEY its key?)";
    assert_eq!(worker(&rig).await["why"], unheard);
    rig.sims[0].faults().clear();
    rig.look(0).await;
    assert_eq!(worker(&rig).await["why"], json!(null));
}
