//! How turns go and how they end, told apart.

use std::time::Duration;

use fak::engine::{
    Error, Event, Identity, Isolation, Stamp, StartError, Timeouts, Turn, TurnEnd, TurnStream, Wait,
};
use fak_wire::openai::{Api, CachedTokens, ErrorCode, Request, StreamEnd};
use http::{HeaderMap, HeaderValue};
use serde_json::{Value, json};

use super::peer::{self, Peer, Reply};
use super::{engine, patient};

const SHORT: Duration = Duration::from_millis(200);

fn turn(api: Api, body: &Value) -> Turn {
    Turn {
        request: Request::parse(api, body.to_string().as_bytes()).expect("a body"),
        headers: HeaderMap::new(),
        identity: None,
        priority: None,
    }
}

fn stamp() -> Stamp {
    Stamp::new(None, Isolation::Off, false)
}

async fn started(peer: &Peer, timeouts: Timeouts, api: Api) -> Result<TurnStream, StartError> {
    let body = match api {
        Api::Chat => json!({"messages": []}),
        Api::Completions => json!({"prompt": "p"}),
    };
    let admitted = engine(peer, timeouts).admit(turn(api, &body), &stamp());
    admitted.expect("a fine request").stream().await
}

/// Everything that a turn says: its text, the other news by name, and how it ended.
async fn followed(mut stream: TurnStream) -> (String, Vec<String>, TurnEnd) {
    let (mut text, mut news) = (String::new(), Vec::new());
    loop {
        match stream.step().await.expect("an end comes before nothing does") {
            Event::FirstToken { .. } => news.push("first".to_owned()),
            Event::Text { text: piece, .. } => text.push_str(&piece),
            Event::Reasoning { text, .. } => news.push(format!("reasoning {text}")),
            Event::Finish { choice, reason } => news.push(format!("finish {choice} {reason}")),
            Event::Usage(usage) => news.push(format!(
                "usage {} {} {:?}",
                usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens
            )),
            Event::End(end) => {
                assert!(stream.step().await.is_none(), "an end is the end");
                return (text, news, end);
            }
        }
    }
}

/// A stream of these bytes, cut into pieces of `size`, then closed or ended.
async fn ended(bytes: &[u8], size: usize, api: Api) -> (String, Vec<String>, TurnEnd) {
    let text = String::from_utf8(bytes.to_vec()).expect("recorded text");
    let pieces: Vec<_> = text.as_bytes().chunks(size).collect();
    let mut reply = peer::STREAM_HEAD.as_bytes().to_vec();
    for piece in pieces {
        reply.extend_from_slice(format!("{:x}\r\n", piece.len()).as_bytes());
        reply.extend_from_slice(piece);
        reply.extend_from_slice(b"\r\n");
    }
    reply.extend_from_slice(b"0\r\n\r\n");
    let peer = Peer::start(move |_| Reply::Send(reply.clone())).await;
    followed(started(&peer, patient(), api).await.expect("a stream")).await
}

fn recorded(name: &str) -> Vec<u8> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures");
    std::fs::read(format!("{folder}/{name}.txt")).expect("a fixture")
}

#[tokio::test]
async fn a_recorded_chat_is_followed_however_it_is_cut() {
    let bytes = recorded("vllm-0.32/sse/chat-stream-usage");
    for size in [1, 7, 100_000] {
        let (text, news, end) = ended(&bytes, size, Api::Chat).await;
        assert_eq!(text, "thingtracebackanne");
        assert_eq!(news, ["first", "finish 0 length", "usage 12 3 Known(0)"]);
        assert!(end.is_complete(), "{end:?}");
    }
}

#[tokio::test]
async fn every_way_in_which_an_engine_ends_a_turn_is_told_apart() {
    let complete = |end: &TurnEnd| end.is_complete();
    let aborted = |end: &TurnEnd| matches!(end, TurnEnd::Stream(StreamEnd::Aborted));
    let dropped = |end: &TurnEnd| matches!(end, TurnEnd::Stream(StreamEnd::Dropped));
    let failed = |end: &TurnEnd| matches!(end, TurnEnd::Stream(StreamEnd::Failed(Some(_))));
    type Check<'a> = &'a dyn Fn(&TurnEnd) -> bool;
    let python = "vllm-0.32/sse";
    let rust = "vllm-rs-0.33-frontend/sse";
    let rows: [(&str, &str, Check<'_>); 12] = [
        (python, "chat-stream", &complete),
        (python, "completions-stream", &complete),
        (python, "completions-stream-stop", &complete),
        (python, "chat-stream-aborted-by-pause-abort", &aborted),
        (python, "completions-stream-aborted-by-sleep1", &aborted),
        (python, "chat-stream-aborted-while-queued", &dropped),
        (python, "completions-stream-aborted-while-queued", &dropped),
        (python, "completions-stream-aborted-while-queued-no-usage", &dropped),
        (python, "chat-stream-error-mid-stream", &failed),
        (python, "completions-stream-error-mid-stream", &failed),
        (rust, "chat-stream-usage", &complete),
        (rust, "completions-stream-aborted-by-sleep1", &aborted),
    ];
    for (folder, name, check) in rows {
        let api = if name.starts_with("chat") { Api::Chat } else { Api::Completions };
        let (_, _, end) = ended(&recorded(&format!("{folder}/{name}")), 64, api).await;
        assert!(check(&end), "{name}: {end:?}");
    }
}

#[tokio::test]
async fn a_stream_that_ends_without_its_marker_is_cut() {
    let chunk = "data: {\"choices\":[{\"index\":0,\"text\":\"a\"}]}\n\n";
    let (text, _, end) = ended(chunk.as_bytes(), 64, Api::Completions).await;
    assert_eq!(text, "a");
    assert!(matches!(end, TurnEnd::Stream(StreamEnd::Cut)), "{end:?}");
}

#[tokio::test]
async fn a_stream_that_breaks_off_in_the_middle_of_a_line_is_cut() {
    let reply = || peer::stream(&["data: {\"choi"]);
    let peer = Peer::start(move |_| Reply::SendAndClose(reply())).await;
    let stream = started(&peer, patient(), Api::Completions).await.expect("a stream");
    let (_, _, end) = followed(stream).await;
    assert!(matches!(end, TurnEnd::Transport(Error::Cut(_))), "{end:?}");
}

#[tokio::test]
async fn silence_ends_a_turn() {
    for (sent, wait) in [
        (&[][..], Wait::FirstByte),
        (&["data: {\"choices\":[{\"text\":\"a\"}]}\n\n"], Wait::NextChunk),
    ] {
        let reply = peer::stream(sent);
        let mut peer = Peer::start(move |_| Reply::SendAndHold(reply.clone())).await;
        let timeouts = Timeouts { first_byte: SHORT, idle: SHORT, ..patient() };
        let stream = started(&peer, timeouts, Api::Completions).await.expect("a stream");
        let (_, _, end) = followed(stream).await;
        let TurnEnd::Transport(Error::TimedOut { wait: found, .. }) = end else {
            panic!("{end:?}");
        };
        assert_eq!(found, wait);
        peer.request().await;
        peer.client_gone().await;
    }
}

#[tokio::test]
async fn what_is_no_part_of_an_answer_ends_a_turn() {
    let (_, _, end) = ended(b"data: {nonsense\n\n", 64, Api::Completions).await;
    assert!(matches!(end, TurnEnd::Unreadable { .. }), "{end:?}");
    let endless = [b"data: ".as_slice(), &vec![b'x'; 9 << 20]].concat();
    let (_, _, end) = ended(&endless, 1 << 20, Api::Completions).await;
    assert!(matches!(end, TurnEnd::Unreadable { .. }), "{end:?}");
}

#[tokio::test]
async fn dropping_a_turn_closes_its_connection() {
    let chunk = "data: {\"choices\":[{\"index\":0,\"text\":\"a\"}]}\n\n";
    let mut peer = Peer::start(move |_| Reply::SendAndHold(peer::stream(&[chunk]))).await;
    let mut stream = started(&peer, patient(), Api::Completions).await.expect("a stream");
    peer.request().await;
    assert!(matches!(stream.step().await, Some(Event::FirstToken { .. })));
    assert!(matches!(stream.step().await, Some(Event::Text { .. })));
    drop(stream);
    peer.client_gone().await;
}

#[tokio::test]
async fn dropping_a_unary_turn_closes_its_connection() {
    let mut peer = Peer::start(|_| Reply::SendAndHold(Vec::new())).await;
    let turn = turn(Api::Chat, &json!({"messages": []}));
    let admitted = engine(&peer, patient()).admit(turn, &stamp()).expect("a fine request");
    tokio::select! {
        _ = admitted.unary() => panic!("the peer never answers"),
        request = peer.request() => assert_eq!(request.line(), "POST /v1/chat/completions"),
    }
    peer.client_gone().await;
}

#[tokio::test]
async fn a_request_passes_unharmed_but_for_what_fak_sets() {
    let mut peer = Peer::start(|_| Reply::Send(peer::whole_stream(&["data: [DONE]\n\n"]))).await;
    let body = json!({
        "messages": [{"role": "user", "content": "é"}], "temperature": 0.7, "unknown": {"a": [1]},
        "stream_options": {"continuous_usage_stats": true}, "cache_salt": "client", "priority": 3,
    });
    let mut turn = turn(Api::Chat, &body);
    turn.headers.insert("x-request-id", HeaderValue::from_static("id-1"));
    turn.headers.insert("authorization", HeaderValue::from_static("Bearer client"));
    let identity =
        Identity { tenant: "a".to_owned(), authority: "test".to_owned(), family: "m".to_owned() };
    turn.identity = Some(identity.clone());
    turn.priority = Some(-1);
    let stamp = Stamp::new(None, Isolation::On, true);
    let admitted = engine(&peer, patient()).admit(turn, &stamp).expect("a fine request");
    let salt = stamp.cache_salt(&identity);
    assert_eq!(admitted.cache_salt(), Some(salt.as_str()));
    followed(admitted.stream().await.expect("a stream")).await;
    let request = peer.request().await;
    assert_eq!(request.header("x-request-id"), Some("id-1"));
    assert_eq!(request.header("authorization"), None);
    assert_eq!(request.header("content-type"), Some("application/json"));
    let expected = json!({
        "messages": [{"role": "user", "content": "é"}], "temperature": 0.7, "unknown": {"a": [1]},
        "stream_options": {"continuous_usage_stats": true, "include_usage": true},
        "cache_salt": salt, "priority": -1, "stream": true,
    });
    assert_eq!(request.json(), expected);
}

#[tokio::test]
async fn what_fak_has_to_understand_is_refused_where_it_is_wrong() {
    let peer = Peer::start(|_| Reply::Send(Vec::new())).await;
    let engine = engine(&peer, patient());
    for (field, value) in
        [("stream_options", json!([])), ("cache_salt", json!("")), ("n", json!(0))]
    {
        let mut body = json!({"prompt": "p"});
        body[field] = value;
        let error = engine.admit(turn(Api::Completions, &body), &stamp()).expect_err("wrong");
        assert_eq!(error.param(), Some(field), "{error}");
    }
}

#[tokio::test]
async fn an_error_before_the_stream_keeps_its_status_and_words() {
    let error = json!({"message": "no such model", "type": "NotFoundError", "code": 404});
    let body = json!({"error": error}).to_string();
    let peer = Peer::start(move |_| Reply::Send(peer::json("404 Not Found", &body))).await;
    let error = started(&peer, patient(), Api::Chat).await.expect_err("refused");
    let StartError::Refused { status, body } = error else { panic!("{error:?}") };
    assert_eq!((status, body.message.as_str()), (404, "no such model"));
    assert_eq!(body.code, Some(ErrorCode::Number(404)));
}

#[tokio::test]
async fn a_200_that_is_no_stream_is_no_turn() {
    let peer = Peer::start(|_| Reply::Send(peer::json("200 OK", "{}"))).await;
    let error = started(&peer, patient(), Api::Chat).await.expect_err("no stream");
    assert!(matches!(error, StartError::Unreadable { .. }), "{error:?}");
}

#[tokio::test]
async fn a_unary_answer_is_classified_like_a_stream() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/vllm-0.32/http");
    for (name, expected) in [
        ("completion", StreamEnd::Complete),
        ("completion-aborted-by-pause", StreamEnd::Aborted),
        ("completion-aborted-while-queued", StreamEnd::Aborted),
    ] {
        let text = std::fs::read_to_string(format!("{folder}/{name}.json")).expect("a fixture");
        let fixture: Value = serde_json::from_str(&text).expect("JSON");
        let body = fixture["response"]["body_text"].as_str().expect("a text").to_owned();
        let mut peer = Peer::start(move |_| Reply::Send(peer::json("200 OK", &body))).await;
        let body = json!({"prompt": "p", "stream_options": {"include_usage": true}});
        let turn = turn(Api::Completions, &body);
        let admitted = engine(&peer, patient()).admit(turn, &stamp()).expect("a fine request");
        let unary = admitted.unary().await.expect("an answer");
        assert_eq!(unary.end, expected, "{name}");
        assert!(unary.answer.usage.is_some(), "{name}");
        assert_eq!(peer.request().await.json(), json!({"prompt": "p", "stream": false}));
    }
}

#[tokio::test]
async fn cached_tokens_that_are_not_reported_are_not_zero() {
    for (details, expected) in [
        ("null", CachedTokens::NotReported),
        ("{}", CachedTokens::NotReported),
        (r#"{"cached_tokens":0}"#, CachedTokens::Known(0)),
        (r#"{"cached_tokens":48}"#, CachedTokens::Known(48)),
    ] {
        let usage = format!(
            "data: {{\"choices\":[],\"usage\":{{\"prompt_tokens\":64,\"completion_tokens\":1,\
             \"prompt_tokens_details\":{details}}}}}\n\n"
        );
        let (_, news, _) = ended(usage.as_bytes(), 64, Api::Completions).await;
        assert_eq!(news, [format!("usage 64 1 {expected:?}")]);
    }
}

#[tokio::test]
async fn tokens_are_the_requests_own_or_the_engines() {
    let answer = r#"{"count":3,"max_model_len":4096,"tokens":[1,2,3],"token_strs":null}"#;
    let mut peer = Peer::start(|_| Reply::Send(peer::json("200 OK", answer))).await;
    let engine = engine(&peer, patient());
    let request = |api, body: Value| turn(api, &body).request;
    for prompt in [json!([7, 8]), json!([[7, 8]])] {
        let own = request(Api::Completions, json!({"prompt": prompt}));
        assert_eq!(engine.tokens(&own).await.expect("its own"), [7, 8]);
    }
    assert!(peer.requests_so_far().is_empty());

    let body = json!({"model": "m", "prompt": "p", "max_tokens": 3, "add_special_tokens": false});
    let text = request(Api::Completions, body);
    assert_eq!(engine.tokens(&text).await.expect("the engine's"), [1, 2, 3]);
    let asked = peer.request().await;
    assert_eq!(asked.line(), "POST /tokenize");
    assert_eq!(asked.json(), json!({"model": "m", "prompt": "p", "add_special_tokens": false}));

    let chat = json!({"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": [],
        "temperature": 1});
    engine.tokens(&request(Api::Chat, chat.clone())).await.expect("the engine's");
    let mut expected = chat;
    expected.as_object_mut().expect("an object").remove("temperature");
    assert_eq!(peer.request().await.json(), expected);

    for body in [
        json!({"prompt": ["a", "b"]}),
        json!({"prompt": [[1], [2]]}),
        json!({"prompt": "p", "truncate_prompt_tokens": 4}),
        json!({"prompt_embeds": "x"}),
    ] {
        assert!(engine.tokens(&request(Api::Completions, body)).await.is_err());
    }
    assert!(peer.requests_so_far().is_empty());
}
