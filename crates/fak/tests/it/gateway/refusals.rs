//! Refusals of fak's own: in the protocol of the path that was asked, and with what would be right.

use fak::engine::{Isolation, Model, Secret, Stamp};
use fak::gateway::Key;
use fak::sessions::{self, Sessions};
use fak::store::Store;
use fak_kernel::Phase;
use http::StatusCode;
use serde_json::{Value, json};

use super::rig::{Answer, MODEL, Rig, chat, setup};
use crate::engine::peer::{self, Peer, Reply};

const CHAT: &str = "/v1/chat/completions";
const MESSAGES: &str = "/v1/messages";
const KEY: (&str, &str) = ("authorization", "Bearer right");

/// A gateway with keys, sessions and tenants kept apart before an engine that answers at once.
async fn rig() -> (Peer, Rig) {
    let peer = Peer::start(|_| Reply::Send(peer::json("200 OK", "{}"))).await;
    let store = Store::open("sqlite::memory:").await.unwrap();
    let (sessions, _) = Sessions::open(store, sessions::Config::default()).await.unwrap();
    let mut setup = setup();
    (setup.config.body_bytes_max, setup.sessions) = (10_000, Some(sessions));
    setup.config.stamp = Stamp::new(None, Isolation::On, false);
    let (secret, authority) = (Secret::new("right".to_owned()), "fak".to_owned());
    setup.config.keys = vec![Key { secret, tenant: None, authority }];
    let rig = Rig::with(&[peer.url()], setup).await;
    (peer, rig)
}

/// The error of an answer in Anthropic's shape.
fn anthropics(answer: &Answer) -> Value {
    let body = answer.json();
    assert_eq!(body["type"], "error", "{body}");
    assert!(body["error"]["message"].as_str().is_some_and(|m| !m.is_empty()), "{body}");
    body["error"].clone()
}

#[tokio::test]
async fn what_fak_refuses_on_paths_of_anthropics_is_in_anthropics_shape() {
    let (mut peer, rig) = rig().await;
    let of = |model: &str| json!({"model": model, "max_tokens": 1, "messages": []}).to_string();
    let large = of(MODEL).replace("[]", &format!("[\"{}\"]", "x".repeat(10_000)));
    let (gzip, session) = (("content-encoding", "gzip"), ("x-fak-session", "a b"));
    let count = "/v1/messages/count_tokens";
    for (method, path, headers, body, status, kind) in [
        ("POST", MESSAGES, &[][..], of(MODEL), 401, "authentication_error"),
        ("POST", MESSAGES, &[KEY], of(MODEL), 403, "permission_error"),
        ("POST", MESSAGES, &[KEY], of("nobody"), 404, "not_found_error"),
        ("POST", MESSAGES, &[KEY], "{".to_owned(), 400, "invalid_request_error"),
        ("POST", MESSAGES, &[KEY], large, 413, "request_too_large"),
        ("POST", MESSAGES, &[KEY, gzip], of(MODEL), 415, "invalid_request_error"),
        ("POST", MESSAGES, &[KEY, session], of(MODEL), 400, "invalid_request_error"),
        ("GET", MESSAGES, &[KEY], String::new(), 405, "invalid_request_error"),
        ("POST", count, &[KEY], of("nobody"), 404, "not_found_error"),
        ("POST", "/v1/messages/batches", &[KEY], of(MODEL), 404, "not_found_error"),
        ("GET", "/v1/messages/", &[], String::new(), 404, "not_found_error"),
    ] {
        let answer = super::rig::whole(rig.open(method, path, headers, &body).await).await;
        let error = anthropics(&answer);
        let found = (answer.status.as_u16(), error["type"].as_str().unwrap());
        assert_eq!(found, (status, kind), "{method} {path}: {error}");
    }
    rig.phase(0, Phase::Sleeping);
    let answer = rig.post_with(count, &[KEY], &of(MODEL)).await;
    assert_eq!(anthropics(&answer)["type"], "overloaded_error");
    assert_eq!(answer.header("retry-after"), Some("5"));
    assert!(peer.requests_so_far().is_empty());
    for path in [CHAT, "/v1/messagesx", "/v1/nothing"] {
        let body = rig.post(path, &chat(false)).await.json();
        assert!(body.get("type").is_none() && body["error"]["code"].is_string(), "{path}: {body}");
    }
}

#[tokio::test]
async fn a_refusal_says_what_would_be_right() {
    let (mut peer, rig) = rig().await;
    let ask = async |header: (&str, &str), body: &str| {
        let answer = rig.post_with(CHAT, &[KEY, header], body).await;
        let error = answer.json()["error"].take();
        (answer, error["message"].as_str().unwrap().to_owned(), error["param"].clone())
    };
    let (answer, message, param) = ask(("x-fak-session", "a b"), &chat(false)).await;
    assert_eq!((answer.status.as_u16(), param), (400, json!("x-fak-session")));
    assert!(message.starts_with("x-fak-session=\"a b\" has the byte 0x20"), "{message}");
    assert!(message.contains("1 to 256 visible ASCII characters"), "{message}");

    let large = chat(false).replace("hello", &"x".repeat(10_000));
    let (answer, message, _) = ask(("x-a", "b"), &large).await;
    assert_eq!(answer.status, StatusCode::PAYLOAD_TOO_LARGE);
    assert!(message.contains("10000 bytes") && message.contains("body_bytes_max"), "{message}");

    for encoding in ["gzip", "zstd", "br", "gzip, identity"] {
        let (answer, message, _) = ask(("content-encoding", encoding), &chat(false)).await;
        assert_eq!(answer.status, StatusCode::UNSUPPORTED_MEDIA_TYPE);
        assert_eq!(answer.header("accept-encoding"), Some("identity"));
        assert!(message.contains(encoding) && message.contains("identity"), "{message}");
    }
    let method = super::rig::whole(rig.open("GET", CHAT, &[KEY], "").await).await;
    assert_eq!((method.status.as_u16(), method.header("allow")), (405, Some("POST")));
    assert!(peer.requests_so_far().is_empty());
    let plain = rig.post_with(CHAT, &[KEY, ("content-encoding", "Identity")], &chat(false)).await;
    assert_eq!(plain.status, StatusCode::OK);
}

/// A request may go to any worker of its model, and what fits one has to fit them all.
#[tokio::test]
async fn a_model_has_the_smallest_length_of_its_workers_and_is_told_by_its_name() {
    let peer = Peer::start(|_| Reply::Send(peer::json("200 OK", "{}"))).await;
    let rig = Rig::over(&[peer.url(), peer.url(), peer.url()]).await;
    let lengths = [Some(8192), Some(4096), None];
    for (number, tokens_max) in lengths.into_iter().enumerate() {
        let base = Model { tokens_max, ..Model::base("org/m") };
        let alone = Model { tokens_max, ..Model::base(&format!("of w{number}")) };
        let adapter = Model::adapter("ad", "org/m");
        rig.state(number, |state| state.models = [base, alone, adapter].into_iter().collect());
    }
    let list = rig.get("/v1/models").await.json();
    let card = |id: &str| {
        let cards = list["data"].as_array().unwrap();
        cards.iter().find(|card| card["id"] == id).unwrap().clone()
    };
    let listed: Vec<_> = list["data"].as_array().unwrap().iter().map(|card| &card["id"]).collect();
    assert_eq!(listed, ["org/m", "of w0", "ad", "of w1", "of w2"], "in the engines' order");
    assert_eq!(card("org/m")["max_model_len"], 4096);
    assert_eq!(card("of w0")["max_model_len"], 8192);
    assert_eq!(card("of w2")["max_model_len"], Value::Null);
    assert_eq!(card("ad")["parent"], "org/m");
    for path in ["/v1/models/org%2Fm", "/v1/models/org/m"] {
        let answer = rig.get(path).await;
        assert_eq!((answer.status, answer.json()), (StatusCode::OK, card("org/m")), "{path}");
    }
    let unknown = rig.get("/v1/models/org").await;
    assert_eq!(
        (unknown.status, unknown.code().as_str()),
        (StatusCode::NOT_FOUND, "model_not_found")
    );
    let message = unknown.json()["error"]["message"].as_str().unwrap().to_owned();
    assert_eq!(message, "the model `org` does not exist; there is: org/m, of w0, ad, of w1, of w2");
    assert_eq!(rig.post("/v1/models/org", "").await.status, StatusCode::METHOD_NOT_ALLOWED);
}

/// One engine has one base, whatever adapters it serves; of several nobody can tell which is meant.
#[tokio::test]
async fn a_request_that_names_no_model_goes_to_the_only_one_and_to_none_of_several() {
    let mut peer = Peer::start(|_| Reply::Send(peer::json("200 OK", "{}"))).await;
    let rig = Rig::over(&[peer.url(), peer.url()]).await;
    let unnamed = r#"{"messages":[]}"#;
    let rooted = |id: &str| Model { root: Some("/models/m".into()), ..Model::base(id) };
    let with_adapter = || [rooted("m"), Model::adapter("ad", "m")].into_iter().collect();
    rig.state(0, |state| state.models = with_adapter());
    rig.state(1, |state| state.models = [rooted("second-name")].into_iter().collect());
    assert_eq!(rig.post(CHAT, unnamed).await.status, StatusCode::OK);
    rig.state(1, |state| state.models = [Model::base("embed")].into_iter().collect());
    for path in [CHAT, "/v1/embeddings", "/tokenize"] {
        let answer = rig.post(path, unnamed).await;
        let error = answer.json()["error"].take();
        assert_eq!((answer.status.as_u16(), &error["code"]), (400, &json!("model_not_named")));
        assert_eq!(error["message"], "name a model: this fleet serves m, ad, embed");
        assert_eq!(error["param"], "model");
    }
    assert_eq!(rig.get("/version").await.status, StatusCode::OK, "it computes nothing");
    assert_eq!(peer.requests_so_far().len(), 2);
}
