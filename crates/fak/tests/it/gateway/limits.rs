//! What is not let in: too much, wrong paths, wrong keys.

use std::time::Duration;

use fak::engine::{Isolation, Secret, Stamp};
use fak::gateway::Key;
use http::StatusCode;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::rig::{MODEL, PATIENT, Rig, chat, setup};
use crate::engine::peer::{self, Peer, Reply};

const CHAT: &str = "/v1/chat/completions";

async fn served() -> (Peer, Rig) {
    let peer = Peer::start(|_| Reply::Send(peer::json("200 OK", "{\"choices\":[]}"))).await;
    let rig = Rig::over(&[peer.url()]).await;
    (peer, rig)
}

/// The answer to bytes that no client library sends.
async fn raw(rig: &Rig, bytes: &[u8]) -> String {
    let mut stream = rig.connect().await;
    // The gateway may answer before it has read all of it.
    let _ = stream.write_all(bytes).await;
    let mut answer = Vec::new();
    while !is_whole(&answer) {
        let read = stream.read_buf(&mut answer);
        match tokio::time::timeout(PATIENT, read).await.unwrap() {
            Ok(0) | Err(_) => break,
            Ok(_) => {}
        }
    }
    String::from_utf8(answer).unwrap()
}

/// Whether an answer has come as far as its length says.
fn is_whole(answer: &[u8]) -> bool {
    let text = String::from_utf8_lossy(answer);
    let Some((head, body)) = text.split_once("\r\n\r\n") else { return false };
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
    length.is_some_and(|length| body.len() >= length.parse().unwrap())
}

fn of_size(bytes: usize) -> String {
    let body = json!({"model": MODEL, "messages": [{"role": "user", "content": ""}]}).to_string();
    body.replace("\"content\":\"\"", &format!("\"content\":\"{}\"", "x".repeat(bytes - body.len())))
}

/// Case 81.
#[tokio::test]
async fn large_bodies_pass_up_to_the_limit_and_no_further() {
    let (mut peer, rig) = served().await;
    for bytes in [2_200_000, 31 << 20] {
        let body = of_size(bytes);
        assert_eq!(rig.post(CHAT, &body).await.status, StatusCode::OK);
        assert!(peer.request().await.body == body.as_bytes(), "{bytes} bytes pass unharmed");
    }
    let answer = rig.post(CHAT, &of_size(33 << 20)).await;
    assert_eq!(
        (answer.status, answer.code().as_str()),
        (StatusCode::PAYLOAD_TOO_LARGE, "body_too_large")
    );
    assert_eq!(rig.count("fak_requests_too_large_total"), 1);
    assert!(peer.requests_so_far().is_empty());
}

/// Case 81: without a length.
#[tokio::test]
async fn a_body_without_a_length_is_bounded_too() {
    let mut setup = setup();
    setup.config.body_bytes_max = 10_000;
    let mut peer = Peer::start(|_| Reply::Send(peer::json("200 OK", "{}"))).await;
    let rig = Rig::with(&[peer.url()], setup).await;
    let head = format!("POST {CHAT} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n");
    let chunk = format!("7d0\r\n{}\r\n", "x".repeat(2000));
    let answer = raw(&rig, [head.clone(), chunk.repeat(6)].concat().as_bytes()).await;
    assert!(answer.starts_with("HTTP/1.1 413 "), "{answer}");
    assert!(answer.contains("body_too_large"), "{answer}");
    assert!(peer.requests_so_far().is_empty());
    let body = chat(false);
    let chunk = format!("{:x}\r\n{body}\r\n0\r\n\r\n", body.len());
    let answer = raw(&rig, [head, chunk].concat().as_bytes()).await;
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    assert_eq!(peer.request().await.body, body.as_bytes());
}

/// Case 81: all bodies together.
#[tokio::test]
async fn bodies_in_flight_are_bounded_together() {
    let mut setup = setup();
    (setup.config.body_bytes_max, setup.config.bodies_bytes_max) = (100_000, 100_000);
    let peer = Peer::start(|_| Reply::SendAndHold(Vec::new())).await;
    let mut peer = peer;
    let rig = Rig::with(&[peer.url()], setup).await;
    let (first, second) = (of_size(90_000), of_size(90_000));
    tokio::select! {
        _ = rig.post(CHAT, &first) => unreachable!("never answered"),
        answer = async { peer.request().await; rig.post(CHAT, &second).await } => {
            assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE);
            assert_eq!(answer.code(), "too_many_bytes_in_flight");
            assert_eq!(answer.header("retry-after"), Some("1"));
        }
    }
}

#[tokio::test]
async fn small_bodies_without_a_length_fill_no_room() {
    let mut setup = setup();
    (setup.config.body_bytes_max, setup.config.bodies_bytes_max) = (100_000, 100_000);
    let mut peer = Peer::start(|_| Reply::SendAndHold(Vec::new())).await;
    let rig = Rig::with(&[peer.url()], setup).await;
    let body = chat(false);
    let head = format!("POST {CHAT} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n");
    let request = format!("{head}{:x}\r\n{body}\r\n0\r\n\r\n", body.len());
    let mut open = Vec::new();
    for _ in 0..60 {
        let mut stream = rig.connect().await;
        stream.write_all(request.as_bytes()).await.unwrap();
        open.push(stream);
        assert_eq!(peer.request().await.body, body.as_bytes());
    }
    assert_eq!(rig.inside(0), 60);
}

/// Case 93.
#[tokio::test]
async fn no_path_but_an_inference_route_leads_to_an_engine() {
    let (mut peer, rig) = served().await;
    let paths = [
        "/sleep",
        "/wake_up",
        "/pause",
        "/reset_prefix_cache",
        "/collective_rpc",
        "/invocations",
        "//sleep",
        "/v1/../sleep",
        "/%73leep",
        "/SLEEP",
        "/v1/chat/completions/../../../sleep",
        "/v1//chat/completions",
        "/v1/chat/completions/",
        "/V1/chat/completions",
        "/metrics",
        "/server_info",
        "/v1/load_lora_adapter",
        "/internal/x",
        "/debug",
        "http://other/sleep",
        "*",
    ];
    for path in paths {
        for method in ["POST", "GET", "OPTIONS"] {
            let answer = raw(
                &rig,
                format!("{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
                    .as_bytes(),
            )
            .await;
            assert!(
                answer.starts_with("HTTP/1.1 404 ") || answer.starts_with("HTTP/1.1 400 "),
                "{method} {path}: {answer}"
            );
        }
    }
    let answer = rig.get(CHAT).await;
    assert_eq!(
        (answer.status, answer.code().as_str()),
        (StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed")
    );
    assert!(peer.requests_so_far().is_empty(), "nothing was forwarded");
    // A query is no part of a route, and none is passed on.
    let answer = rig.post("/v1/chat/completions?level=2&x=/sleep", &chat(false)).await;
    assert_eq!(answer.status, StatusCode::OK);
    assert_eq!(peer.request().await.line(), "POST /v1/chat/completions");
}

#[tokio::test]
async fn what_cannot_be_read_is_refused_with_its_field() {
    let (mut peer, rig) = served().await;
    for (body, param) in [
        ("not json", Value::Null),
        ("{\"model\":\"m\",\"model\":\"other\"}", Value::Null),
        ("{\"model\":7}", json!("model")),
        ("{\"model\":\"m\",\"stream\":2}", json!("stream")),
        ("{\"model\":\"m\",\"stream\":\"maybe\"}", json!("stream")),
        ("{\"model\":\"m\",\"cache_salt\":\"\"}", json!("cache_salt")),
        ("{\"model\":\"m\",\"n\":0}", json!("n")),
    ] {
        let answer = rig.post(CHAT, body).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{body}");
        assert_eq!(answer.json()["error"]["param"], param, "{body}");
        assert_eq!(answer.code(), "invalid_request");
    }
    assert!(peer.requests_so_far().is_empty());
}

#[tokio::test]
async fn a_head_is_bounded() {
    let (mut peer, rig) = served().await;
    let header = format!("x-big: {}\r\n", "x".repeat(70_000));
    let answer = raw(&rig, format!("POST {CHAT} HTTP/1.1\r\n{header}\r\n").as_bytes()).await;
    assert!(answer.starts_with("HTTP/1.1 431 "), "{answer}");
    assert!(peer.requests_so_far().is_empty());
}

#[tokio::test]
async fn where_keys_are_configured_one_is_needed() {
    let mut setup = setup();
    let (secret, authority) = (Secret::new("right".to_owned()), "fak".to_owned());
    setup.config.keys = vec![Key { secret, tenant: None, authority }];
    let mut peer = Peer::start(|_| Reply::Send(peer::json("200 OK", "{}"))).await;
    let rig = Rig::with(&[peer.url()], setup).await;
    for headers in [&[][..], &[("authorization", "Bearer wrong")], &[("authorization", "right")]] {
        let answer = rig.post_with(CHAT, headers, &chat(false)).await;
        assert_eq!(
            (answer.status, answer.code().as_str()),
            (StatusCode::UNAUTHORIZED, "invalid_api_key")
        );
    }
    assert_eq!(rig.get("/v1/models").await.status, StatusCode::UNAUTHORIZED);
    assert!(peer.requests_so_far().is_empty());
    let answer = rig.post_with(CHAT, &[("authorization", "Bearer right")], &chat(false)).await;
    assert_eq!(answer.status, StatusCode::OK);
    assert!(!peer.request().await.head.contains("right"));
}

/// Case 96.
#[tokio::test]
async fn tenants_have_salts_of_their_own_and_clients_none() {
    let key = |key: &str, tenant: &str, authority: &str| Key {
        secret: Secret::new(key.to_owned()),
        tenant: Some(tenant.to_owned()),
        authority: authority.to_owned(),
    };
    let mut setup = setup();
    setup.config.keys =
        vec![key("ka", "a", "x"), key("kb", "b", "x"), key("ka2", "a", "x"), key("ka3", "a", "y")];
    setup.config.stamp = Stamp::new(None, Isolation::On, false);
    let mut peer = Peer::start(|_| Reply::Send(peer::json("200 OK", "{}"))).await;
    let rig = Rig::with(&[peer.url()], setup).await;
    let mut salts = Vec::new();
    for (key, salt) in [("ka", None), ("kb", Some("mine")), ("ka2", Some("mine")), ("ka3", None)] {
        let mut body: Value = serde_json::from_str(&chat(false)).unwrap();
        body["priority"] = (-9).into();
        if let Some(salt) = salt {
            body["cache_salt"] = salt.into();
        }
        let bearer = format!("Bearer {key}");
        let headers = [("authorization", bearer.as_str()), ("x-vllm-priority", "-9")];
        assert_eq!(rig.post_with(CHAT, &headers, &body.to_string()).await.status, StatusCode::OK);
        let request = peer.request().await;
        assert!(!request.head.to_lowercase().contains("x-vllm-priority"), "{}", request.head);
        let sent = request.json();
        assert_eq!(sent["priority"], Value::Null, "a client's own does not count");
        salts.push(sent["cache_salt"].as_str().unwrap().to_owned());
    }
    assert_eq!(salts[0], salts[2]);
    assert_ne!(salts[0], salts[3], "somebody else vouches for that one");
    assert_ne!(salts[0], salts[1]);
    assert!(!salts.contains(&"mine".to_owned()));
    assert_eq!(rig.count("fak_requests_salted_total"), 4);
    let headers = [("authorization", "Bearer ka")];
    for path in ["/v1/responses", "/v1/embeddings", "/v1/score", "/v1/rerank"] {
        let body = json!({"model": MODEL, "cache_salt": "mine", "priority": 9}).to_string();
        assert_eq!(rig.post_with(path, &headers, &body).await.status, StatusCode::OK);
        let sent = peer.request().await.json();
        assert_eq!(sent, json!({"model": MODEL, "cache_salt": salts[0]}), "{path}");
    }
    // What vLLM takes no salt in would share one cache.
    let body = json!({"model": MODEL, "messages": []}).to_string();
    let answer = rig.post_with("/v1/messages", &headers, &body).await;
    assert_eq!(
        (answer.status, answer.code().as_str()),
        (StatusCode::FORBIDDEN, "isolation_not_offered")
    );
    assert!(peer.requests_so_far().is_empty());
}

/// A stop lets a stream end, and ends one that does not.
#[tokio::test]
async fn a_stop_drains_and_then_cuts() {
    use fak::gateway::{self, Ends, ServeConfig};
    use fak::runtime::{OnExit, TaskGroup};

    let text = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"a\"}}]}\n\n";
    let reply = peer::stream(&[text]);
    let mut peer = Peer::start(move |_| Reply::SendAndHold(reply.clone())).await;
    let rig = Rig::over(&[peer.url()]).await;
    // A second listener on the same gateway's kind, with little time to drain.
    let parts = fak::gateway::Parts {
        fleet: rig.fleet.clone(),
        index: std::sync::Arc::clone(&rig.index),
        sessions: None,
        doubt: std::sync::Arc::new(Nobody),
    };
    let registry = fak::telemetry::Registry::new();
    let (gateway, _auditor) = gateway::Gateway::new(setup().config, parts, &registry).unwrap();
    let listener = gateway::listen(([127, 0, 0, 1], 0).into()).unwrap();
    let address = listener.local_addr().unwrap();
    let mut stopping = TaskGroup::new();
    let stop = stopping.shutdown();
    let ends = Ends { announced: stop.clone(), stop, cutoff: gateway.cutoff() };
    let config = ServeConfig { drain: Duration::from_millis(50), ..ServeConfig::default() };
    let (done, ended) = tokio::sync::oneshot::channel();
    stopping.spawn("gateway", OnExit::Report, async move {
        let service = move |request| {
            let gateway = gateway.clone();
            async move { gateway.handle(request).await }
        };
        let _ = done.send(gateway::serve(listener, service, config, ends).await);
    });
    let body = chat(true);
    let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
    let head = format!("POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", body.len());
    stream.write_all([head.as_bytes(), body.as_bytes()].concat().as_slice()).await.unwrap();
    peer.request().await;
    let mut seen = Vec::new();
    while !seen.windows(7).any(|window| window == b"content") {
        let mut bytes = [0; 4096];
        let length = stream.read(&mut bytes).await.unwrap();
        assert_ne!(length, 0, "the stream is open");
        seen.extend_from_slice(&bytes[..length]);
    }
    let stopped = stopping.stop(PATIENT);
    let (aborted, rest, ()) = tokio::join!(
        async { ended.await.unwrap() },
        async {
            let mut rest = String::new();
            stream.read_to_string(&mut rest).await.unwrap();
            rest
        },
        async { assert_eq!(stopped.await, 0) },
    );
    assert_eq!(aborted, 0);
    assert!(rest.contains("\"code\":\"stopping\""), "{rest}");
    assert!(rest.ends_with("\r\n0\r\n\r\n"), "the stream ends well: {rest}");
    peer.client_gone().await;
}

struct Nobody;

impl fak::gateway::Doubt for Nobody {
    fn suspect(&self, _: &std::sync::Arc<str>) {}
    fn missed(&self, _: &std::sync::Arc<str>) {}
    fn late(&self, _: &std::sync::Arc<str>) {}

    fn contradicted(&self, _: &fak::gateway::Contradiction) {}
}
