//! When nobody serves: an honest answer at once, or a wait that is bounded.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use fak::engine::{Model, Models};
use fak::fleet::Fleet;
use fak::gateway::Hold;
use fak_kernel::Phase;
use http::StatusCode;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::rig::{MODEL, PATIENT, Rig, SHORT, Setup, chat, setup};
use super::routing::hold;
use crate::engine::peer::{self, Peer, Reply};

const CHAT: &str = "/v1/chat/completions";

fn answer() -> Vec<u8> {
    peer::json("200 OK", "{\"choices\":[]}")
}

fn holding(requests_max: usize, within: Duration, release: usize) -> Setup {
    let mut setup = setup();
    setup.config.hold = Hold { requests_max, within, release };
    setup
}

/// Cases 5 and 23.
#[tokio::test]
async fn nothing_is_sent_to_a_worker_that_does_not_serve() {
    let mut peer = Peer::start(|_| Reply::Send(answer())).await;
    let rig = Rig::over(&[peer.url()]).await;
    for phase in [Phase::Paused, Phase::Sleeping, Phase::Waking, Phase::Error] {
        rig.phase(0, phase);
        for stream in [true, false] {
            let answer = rig.post(CHAT, &chat(stream)).await;
            assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE);
            assert_eq!(answer.code(), "no_serving_worker");
            assert_eq!(answer.header("retry-after"), Some("5"));
            assert!(answer.text().contains(phase.as_str()), "{}", answer.text());
        }
    }
    rig.phase(0, Phase::Serving);
    rig.state(0, |state| state.is_reachable = false);
    assert_eq!(rig.post(CHAT, &chat(false)).await.status, StatusCode::SERVICE_UNAVAILABLE);
    rig.state(0, |state| {
        state.is_reachable = true;
        state.is_progressing = false;
    });
    assert_eq!(rig.post(CHAT, &chat(false)).await.status, StatusCode::SERVICE_UNAVAILABLE);
    rig.state(0, |state| state.is_progressing = true);
    // A door that is shut counts more than what the last probe saw.
    let door = rig.fleet.snapshot().workers[0].worker.door.clone();
    door.shut();
    assert_eq!(rig.post(CHAT, &chat(false)).await.status, StatusCode::SERVICE_UNAVAILABLE);
    assert!(peer.requests_so_far().is_empty());
    door.open();
    assert_eq!(rig.post(CHAT, &chat(false)).await.status, StatusCode::OK);
    assert_eq!(rig.inside(0), 0);
}

/// Case 23.
#[tokio::test]
async fn a_model_that_sleeps_exists_and_one_that_nobody_names_does_not() {
    let peer = Peer::start(|_| Reply::Send(answer())).await;
    let mut setup = setup();
    setup.config.models = vec!["planned".to_owned()];
    let rig = Rig::with(&[peer.url(), peer.url()], setup).await;
    rig.state(1, |state| {
        state.models = [Model::base(MODEL), Model::base("second")].into_iter().collect()
    });
    let statuses = async || -> Value {
        let list = rig.get("/v1/models").await.json();
        assert_eq!(list["object"], "list");
        let of =
            |model: &Value| (model["id"].as_str().unwrap().to_owned(), model["status"].clone());
        list["data"].as_array().unwrap().iter().map(of).collect::<serde_json::Map<_, _>>().into()
    };
    let listed = |m: &str, second: &str| json!({"m": m, "planned": "failed", "second": second});
    assert_eq!(statuses().await, listed("ready", "ready"));
    rig.phase(1, Phase::Sleeping);
    assert_eq!(statuses().await, listed("ready", "sleeping"));
    rig.phase(0, Phase::Waking);
    assert_eq!(statuses().await, listed("waking", "sleeping"));
    rig.phase(0, Phase::Error);
    rig.phase(1, Phase::Error);
    assert_eq!(statuses().await, listed("failed", "failed"));
    let ask = async |model: &str| {
        let body = json!({"model": model, "messages": []}).to_string();
        let answer = rig.post(CHAT, &body).await;
        (answer.status.as_u16(), answer.code())
    };
    assert_eq!(ask(MODEL).await, (503, "no_serving_worker".to_owned()));
    assert_eq!(ask("planned").await, (503, "no_serving_worker".to_owned()));
    assert_eq!(ask("other").await, (404, "model_not_found".to_owned()));
    // Before a worker has told its models, any may be one of them.
    rig.state(0, |state| state.models = Models::default());
    assert_eq!(ask("other").await, (503, "no_serving_worker".to_owned()));
}

/// Cases 19 and 74.
#[tokio::test]
async fn requests_wait_within_bounds_and_are_let_go_a_few_at_a_time() {
    let (sender, mut arrived) = mpsc::channel(1000);
    // Each answer waits until the test lets it go.
    let peer = Peer::start(move |_| {
        let (steps, walked) = mpsc::channel(1);
        sender.try_send(steps).unwrap();
        Reply::Steps(walked)
    })
    .await;
    let rig = Rig::with(&[peer.url()], holding(100, PATIENT, 16)).await;
    rig.phase(0, Phase::Sleeping);
    let body = chat(false);
    let mut waiting: Vec<_> = (0..130).map(|_| Box::pin(rig.post(CHAT, &body))).collect();
    // Polls all of them until as many were refused as do not fit.
    let mut refused = Vec::new();
    while refused.len() < 30 {
        let (answer, _, rest) = futures_util::future::select_all(waiting).await;
        refused.push(answer);
        waiting = rest;
    }
    for answer in &refused {
        assert_eq!(
            (answer.status, answer.code().as_str()),
            (StatusCode::SERVICE_UNAVAILABLE, "too_many_waiting")
        );
        assert!(answer.header("retry-after").is_some());
    }
    assert_eq!(rig.count("fak_requests_held"), 100);
    // Thirty leave while they wait: they are never sent.
    waiting.truncate(70);
    let all = async {
        rig.counted("fak_requests_held", 70).await;
        rig.phase(0, Phase::Serving);
        let mut sent = 0;
        let mut most = 0;
        while sent < 70 {
            let steps = arrived.recv().await.unwrap();
            sent += 1;
            most = most.max(rig.inside(0));
            steps.send(answer()).await.unwrap();
        }
        assert!(most <= 16, "{most} at once");
        assert!(arrived.try_recv().is_err());
    };
    let (answers, ()) = tokio::join!(futures_util::future::join_all(waiting), all);
    assert!(answers.iter().all(|answer| answer.status == StatusCode::OK));
    assert_eq!(rig.count("fak_requests_held"), 0);
}

/// Cases 5 and 19.
#[tokio::test]
async fn a_wait_ends() {
    let mut peer = Peer::start(|_| Reply::Send(answer())).await;
    let rig = Rig::with(&[peer.url()], holding(10, SHORT, 16)).await;
    rig.phase(0, Phase::Paused);
    let answer = rig.post(CHAT, &chat(true)).await;
    assert_eq!(
        (answer.status, answer.code().as_str()),
        (StatusCode::SERVICE_UNAVAILABLE, "no_serving_worker")
    );
    assert!(peer.requests_so_far().is_empty());
}

/// A request that was let go, and whose worker failed, may have to wait again: not for its own
/// place among those that are let go.
#[tokio::test]
async fn a_request_that_waits_again_does_not_wait_for_itself() {
    let fleet = Arc::new(OnceLock::<Fleet>::new());
    let (at_first, at_second) = (Arc::clone(&fleet), Arc::clone(&fleet));
    let first = Peer::start(move |_| {
        let serves = |state: &mut fak::fleet::State| {
            state.standing = fak_kernel::witness::Standing::SERVING;
        };
        at_first.get().unwrap().update("w1", serves);
        Reply::SendAndClose(Vec::new())
    })
    .await;
    let second = Peer::start(move |request| {
        if request.line() != "POST /tokenize" {
            return Reply::Send(answer());
        }
        // It is chosen, and shut before the request can enter.
        at_second.get().unwrap().snapshot().workers[1].worker.door.shut();
        let tokens = json!({"count": 2, "max_model_len": 4096, "tokens": [1, 2]});
        Reply::Send(peer::json("200 OK", &tokens.to_string()))
    })
    .await;
    let rig = Rig::with(&[first.url(), second.url()], holding(10, PATIENT, 1)).await;
    assert!(fleet.set(rig.fleet.clone()).is_ok());
    hold(&rig, 1, &(0..100).collect::<Vec<_>>());
    rig.phase(0, Phase::Sleeping);
    rig.phase(1, Phase::Sleeping);
    let body = chat(false);
    let (answer, ()) = tokio::join!(rig.post(CHAT, &body), async {
        rig.counted("fak_requests_held", 1).await;
        rig.phase(0, Phase::Serving);
        rig.counted("fak_requests_moved_total", 1).await;
        rig.counted("fak_requests_held", 1).await;
        rig.fleet.snapshot().workers[1].worker.door.open();
    });
    assert_eq!((answer.status, answer.header("x-fak-worker")), (StatusCode::OK, Some("w1")));
}
