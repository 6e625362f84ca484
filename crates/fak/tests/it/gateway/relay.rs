//! What passes through passes unharmed, at once, and no longer than its client stays.

use std::sync::Mutex;

use fak::gateway::Config;
use fak_kernel::Phase;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::rig::{MODEL, Rig, Setup, WORKER_KEY, chat, next, setup, whole};
use crate::engine::peer::{self, Peer, Reply};

const CHAT: &str = "/v1/chat/completions";
const DONE: &str = "data: [DONE]\n\n";

fn text(content: &str) -> String {
    let choice = json!({"index": 0, "delta": {"content": content}, "finish_reason": null});
    format!("data: {}\n\n", json!({"id": "x", "choices": [choice], "unknown": {"kept": [1.0]}}))
}

fn finish() -> String {
    let choice = json!({"index": 0, "delta": {}, "finish_reason": "stop"});
    format!("data: {}\n\n", json!({"id": "x", "choices": [choice]}))
}

/// One HTTP chunk.
fn chunk(bytes: &[u8]) -> Vec<u8> {
    [format!("{:x}\r\n", bytes.len()).as_bytes(), bytes, b"\r\n"].concat()
}

/// A peer that sends these bytes as a stream, in pieces of `size`, each its own chunk.
fn pieces(bytes: &str, size: usize) -> Vec<u8> {
    let mut reply = peer::STREAM_HEAD.as_bytes().to_vec();
    bytes.as_bytes().chunks(size).for_each(|piece| reply.extend(chunk(piece)));
    reply.extend_from_slice(b"0\r\n\r\n");
    reply
}

/// Case 72.
#[tokio::test]
async fn bytes_pass_unharmed_however_they_are_cut() {
    let stream = [
        ": keep-alive\n\n",
        &text("漢字 é 🙂"),
        "event: x\r\ndata: {\"choices\" : [ ]}\r\n\r\n",
        &finish(),
        DONE,
    ]
    .concat();
    for size in [1, 2, 3, 5, 100_000] {
        let reply = pieces(&stream, size);
        let peer = Peer::start(move |_| Reply::Send(reply.clone())).await;
        let rig = Rig::over(&[peer.url()]).await;
        let answer = rig.post(CHAT, &chat(true)).await;
        assert_eq!(answer.text(), stream, "pieces of {size}");
        rig.counted("fak_requests_total{outcome=\"ok\",route=\"/v1/chat/completions\"}", 1).await;
    }
}

/// Case 72: what the client sent, and what the engine answered at once.
#[tokio::test]
async fn a_whole_answer_and_its_request_pass_byte_for_byte() {
    let choice = "{\"text\":\"\\ud83d\\ude42 é\",\"finish_reason\":\"stop\"}";
    let answered = format!("{{\"choices\" : [{choice}],\n \"x\":1.50}}");
    let reply = peer::json("200 OK", &answered);
    let mut peer = Peer::start(move |_| Reply::Send(reply.clone())).await;
    let rig = Rig::over(&[peer.url()]).await;
    let asked =
        "{ \"model\":\"m\",\"prompt\":\"h\\u00e9\", \"temperature\": 0.70, \"x\": {\"y\":[1e3]}}";
    let answer = rig.post("/v1/completions", asked).await;
    assert_eq!(answer.text(), answered);
    assert_eq!(answer.header("content-length"), Some(answered.len().to_string().as_str()));
    assert_eq!(peer.request().await.body, asked.as_bytes());
}

/// Case 79: each chunk is at the client before the engine has sent the next one.
#[tokio::test]
async fn nothing_waits_for_what_comes_next() {
    let (steps, walked) = mpsc::channel(1);
    let walked = Mutex::new(Some(walked));
    let peer = Peer::start(move |_| Reply::Steps(walked.lock().unwrap().take().unwrap())).await;
    let rig = Rig::over(&[peer.url()]).await;
    steps
        .send([peer::STREAM_HEAD.as_bytes(), &chunk(text("0").as_bytes())].concat())
        .await
        .unwrap();
    let mut answer = rig.open("POST", CHAT, &[], &chat(true)).await;
    assert_eq!(answer.headers()["x-accel-buffering"], "no");
    assert!(!answer.headers().contains_key("content-length"));
    assert_eq!(next(&mut answer).await.unwrap(), text("0"));
    for number in 1..20 {
        let event = text(&number.to_string());
        steps.send(chunk(event.as_bytes())).await.unwrap();
        assert_eq!(next(&mut answer).await.unwrap(), event);
    }
    // An event is given out with its last byte, not with the next event.
    let (head, tail) = DONE.split_at(7);
    steps.send(chunk(finish().as_bytes())).await.unwrap();
    assert_eq!(next(&mut answer).await.unwrap(), finish());
    steps.send(chunk(head.as_bytes())).await.unwrap();
    steps.send(chunk(tail.as_bytes())).await.unwrap();
    assert_eq!(next(&mut answer).await.unwrap(), DONE);
    steps.send(b"0\r\n\r\n".to_vec()).await.unwrap();
    assert_eq!(next(&mut answer).await, None);
}

/// Case 79: a stream whose first token takes long has its head early enough.
#[tokio::test]
async fn a_head_does_not_wait_for_ever() {
    let (steps, walked) = mpsc::channel(1);
    let walked = Mutex::new(Some(walked));
    let peer = Peer::start(move |_| Reply::Steps(walked.lock().unwrap().take().unwrap())).await;
    let mut setup = setup();
    setup.config.head_within = super::rig::SHORT;
    let rig = Rig::with(&[peer.url()], setup).await;
    steps.send(peer::STREAM_HEAD.as_bytes().to_vec()).await.unwrap();
    let mut answer = rig.open("POST", CHAT, &[], &chat(true)).await;
    let all = [text("late"), finish(), DONE.to_owned()].concat();
    steps.send([chunk(all.as_bytes()), b"0\r\n\r\n".to_vec()].concat()).await.unwrap();
    assert_eq!(next(&mut answer).await.unwrap(), all);
}

/// Case 75.
#[tokio::test]
async fn usage_is_read_and_reaches_only_those_who_asked() {
    let usage = json!({"prompt_tokens": 9, "completion_tokens": 1,
                       "prompt_tokens_details": {"cached_tokens": 0}});
    let choice = json!({"index": 0, "delta": {}, "finish_reason": null});
    let alone = format!("data: {}\n\n", json!({"choices": [], "usage": usage}));
    let with_choice = format!("data: {}\n\n", json!({"choices": [choice], "usage": usage}));
    // Endings, and whether the chunk of usage is fak's alone.
    let endings = [(alone.clone(), true), (with_choice.clone(), false), (String::new(), false)];
    for (ending, is_extra) in endings {
        for asks in [false, true] {
            let sent = [text("a"), finish(), ending.clone(), DONE.to_owned()].concat();
            let reply = pieces(&sent, 40);
            let mut peer = Peer::start(move |_| Reply::Send(reply.clone())).await;
            let rig = Rig::over(&[peer.url()]).await;
            let mut body: Value = serde_json::from_str(&chat(true)).unwrap();
            let options = json!({"include_usage": asks, "continuous_usage_stats": true, "x": 1});
            body["stream_options"] = options;
            let answer = rig.post(CHAT, &body.to_string()).await;
            let is_cut = is_extra && !asks;
            let expected = if is_cut { sent.replace(&alone, "") } else { sent };
            assert_eq!(answer.text(), expected);
            let asked = peer.request().await.json()["stream_options"].clone();
            assert_eq!((&asked["include_usage"], &asked["x"]), (&json!(true), &json!(1)));
            // Or every chunk would bring usage that the client did not ask for.
            assert_eq!(asked.get("continuous_usage_stats").is_some(), asks);
        }
    }
}

/// Case 74.
#[tokio::test]
async fn a_client_that_leaves_takes_the_engines_request_with_it() {
    let stream = || peer::stream(&[&text("a")]);
    let before_head = || Reply::SendAndHold(Vec::new());
    let after_chunk = move || Reply::SendAndHold(stream());
    for (name, is_stream, reply) in [
        ("before the head", true, &before_head as &(dyn Fn() -> Reply + Sync)),
        ("after a chunk", true, &after_chunk),
        ("a whole answer", false, &before_head),
    ] {
        let made = Mutex::new(Some(reply()));
        let mut peer = Peer::start(move |_| made.lock().unwrap().take().unwrap()).await;
        let rig = Rig::over(&[peer.url()]).await;
        let body = chat(is_stream);
        if name == "after a chunk" {
            let mut answer = rig.open("POST", CHAT, &[], &body).await;
            assert_eq!(next(&mut answer).await.unwrap(), text("a"));
            peer.request().await;
            assert_eq!(rig.inside(0), 1);
            drop(answer);
        } else {
            tokio::select! {
                _ = rig.open("POST", CHAT, &[], &body) => unreachable!("{name}: no head comes"),
                _ = peer.request() => {}
            }
        }
        peer.client_gone().await;
        rig.empty().await;
        let gone = "fak_requests_total{outcome=\"cancelled\",route=\"/v1/chat/completions\"}";
        rig.counted(gone, 1).await;
        rig.counted("fak_requests_in_flight", 0).await;
    }
}

/// An engine that stands still cannot tell its pair of an abort; it is told once it goes on, or is
/// given up.
#[tokio::test]
async fn case_36_an_abort_waits_for_an_engine_at_rest_where_that_is_asked_for() {
    for (phase, then) in [(Phase::Paused, Phase::Serving), (Phase::Sleeping, Phase::Error)] {
        for is_stream in [true, false] {
            let held = if is_stream { peer::stream(&[&text("a")]) } else { Vec::new() };
            let made = Mutex::new(Some(Reply::SendAndHold(held)));
            let mut peer = Peer::start(move |_| made.lock().unwrap().take().unwrap()).await;
            let config = Config { defer_aborts: vec!["w0".to_owned()], ..setup().config };
            let rig = Rig::with(&[peer.url()], Setup { config, ..setup() }).await;
            if is_stream {
                let mut answer = rig.open("POST", CHAT, &[], &chat(true)).await;
                assert_eq!(next(&mut answer).await.unwrap(), text("a"));
                peer.request().await;
                rig.phase(0, phase);
                drop(answer);
            } else {
                let body = chat(false);
                tokio::select! {
                    _ = rig.open("POST", CHAT, &[], &body) => unreachable!("no head comes"),
                    _ = peer.request() => rig.phase(0, phase),
                }
            }
            let gone = "fak_requests_total{outcome=\"cancelled\",route=\"/v1/chat/completions\"}";
            rig.counted(gone, 1).await;
            // The connection is in there, and so it is open.
            rig.counted("fak_requests_deferred_aborts", 1).await;
            rig.phase(0, then);
            peer.client_gone().await;
            rig.counted("fak_requests_deferred_aborts", 0).await;
        }
    }
}

/// Case 82.
#[tokio::test]
async fn headers_pass_end_to_end_and_keys_do_not() {
    let body = "{\"choices\":[]}";
    let head = "content-type: application/json\r\nx-vllm-a: 1\r\nconnection: x-vllm-b\r\n\
                x-vllm-b: 1\r\nkeep-alive: 5\r\nx-fak-worker: forged\r\nset-cookie: a=b\r\n";
    let reply = format!("HTTP/1.1 200 OK\r\n{head}content-length: {}\r\n\r\n{body}", body.len());
    let mut peer = Peer::start(move |_| Reply::Send(reply.clone().into_bytes())).await;
    let rig = Rig::over(&[peer.url()]).await;
    let headers = [
        ("x-request-id", "id-1"),
        ("traceparent", "00-1-2-01"),
        ("connection", "x-foo"),
        ("x-foo", "1"),
        ("authorization", "Bearer gateway-key"),
        ("x-api-key", "gateway-key"),
        ("x-fak-session", "s"),
    ];
    let answer = rig.post_with(CHAT, &headers, &chat(false)).await;
    assert_eq!(answer.text(), body);
    let seen = peer.request().await;
    assert_eq!(seen.header("x-request-id"), Some("id-1"));
    assert_eq!(seen.header("traceparent"), Some("00-1-2-01"));
    assert_eq!(seen.header("authorization"), Some(format!("Bearer {WORKER_KEY}").as_str()));
    assert_eq!(seen.header("host"), Some(peer.url().trim_start_matches("http://")));
    for dropped in ["x-foo", "connection", "x-api-key", "x-fak-session"] {
        assert_eq!(seen.header(dropped), None, "{dropped}");
    }
    assert!(!seen.head.contains("gateway-key"));
    assert_eq!(answer.header("x-request-id"), Some("id-1"));
    assert_eq!(answer.header("x-fak-worker"), Some("w0"));
    assert_eq!(answer.header("x-vllm-a"), Some("1"));
    assert_eq!(answer.header("x-fak-kv"), Some("unknown"));
    assert_eq!(answer.header("x-fak-warm-tokens"), Some("0"));
    assert_eq!(answer.header("x-fak-attempts"), Some("1"));
    for dropped in ["x-vllm-b", "keep-alive", "set-cookie"] {
        assert_eq!(answer.header(dropped), None, "{dropped}");
    }
}

/// F59.
#[tokio::test]
async fn no_secret_of_a_clients_reaches_an_engine() {
    let reply = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}";
    let mut peer = Peer::start(|_| Reply::Send(reply.into())).await;
    let rig = Rig::over(&[peer.url()]).await;
    let headers = [
        "authorization",
        "x-api-key",
        "proxy-authorization",
        "x-fak-key",
        "api-key",
        "x-goog-api-key",
        "ocp-apim-subscription-key",
        "cookie",
        "x-forwarded-access-token",
        "x-vault-token",
        "x-nobody-thought-of-it",
    ];
    let headers = headers.map(|name| (name, "hunter2"));
    assert_eq!(rig.post_with(CHAT, &headers, &chat(false)).await.status, 200);
    assert!(!peer.request().await.head.contains("hunter2"));
}

/// F63: fak's key was refused, or fak was sent elsewhere, and not the client.
#[tokio::test]
async fn a_workers_refusal_or_redirect_is_none_of_the_clients() {
    for (status, remedy) in [
        ("401 Unauthorized\r\nwww-authenticate: Bearer", "FAK_VLLM_API_KEY"),
        ("403 Forbidden", "--enable-scale-out"),
        ("407 Proxy Authentication Required", "proxy"),
        ("307 Temporary Redirect\r\nlocation: http://10.0.0.1/", "follows no redirect"),
        ("302 Found\r\nlocation: http://10.0.0.1/", "follows no redirect"),
    ] {
        let reply = format!("HTTP/1.1 {status}\r\nset-cookie: a=b\r\ncontent-length: 0\r\n\r\n");
        let peer = Peer::start(move |_| Reply::Send(reply.clone().into_bytes())).await;
        let rig = Rig::over(&[peer.url()]).await;
        let answer = rig.post(CHAT, &chat(false)).await;
        assert_eq!((answer.status.as_u16(), answer.code().as_str()), (502, "worker_refused"));
        assert!(answer.text().contains(remedy), "{status}: {}", answer.text());
        assert_eq!(answer.header("x-should-retry"), Some("false"), "the next one is the same");
        for dropped in ["www-authenticate", "location", "set-cookie"] {
            assert_eq!(answer.header(dropped), None, "{status}: {dropped}");
        }
    }
}

/// Case 82.
#[tokio::test]
async fn a_compressed_answer_keeps_its_length() {
    let gzip = b"\x1f\x8b\x08 not really";
    let head = format!(
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-encoding: gzip\r\n\
         content-length: {}\r\n\r\n",
        gzip.len()
    );
    let reply = [head.as_bytes(), gzip].concat();
    let mut peer = Peer::start(move |_| Reply::Send(reply.clone())).await;
    let rig = Rig::over(&[peer.url()]).await;
    let answer = rig.post_with(CHAT, &[("accept-encoding", "gzip")], &chat(false)).await;
    assert_eq!(&answer.body[..], gzip);
    assert_eq!(answer.header("content-length"), Some(gzip.len().to_string().as_str()));
    assert_eq!(peer.request().await.header("accept-encoding"), Some("identity"));
}

/// The usage that fak asked for is in there, and fak cannot cut it.
#[tokio::test]
async fn a_compressed_stream_does_not_bring_the_usage_that_fak_asked_for() {
    let gzip = b"\x1f\x8b\x08 not really";
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\
                content-encoding: gzip\r\nconnection: close\r\n\r\n";
    let reply = [head.as_bytes(), gzip].concat();
    let mut peer = Peer::start(move |_| Reply::SendAndClose(reply.clone())).await;
    let rig = Rig::over(&[peer.url()]).await;
    let answer = rig.post_with(CHAT, &[("accept-encoding", "gzip")], &chat(true)).await;
    assert_eq!((answer.status.as_u16(), answer.code().as_str()), (502, "worker_answer_encoded"));
    assert!(answer.text().contains("gzip"), "{}", answer.text());
    assert_eq!(peer.request().await.header("accept-encoding"), Some("identity"));
    // Who asked for usage gets what the engine sent.
    let mut asks: Value = serde_json::from_str(&chat(true)).unwrap();
    asks["stream_options"] = json!({"include_usage": true});
    let answer = rig.post(CHAT, &asks.to_string()).await;
    assert_eq!(&answer.body[..], gzip);
}

/// The stream as a client reads it, one event a chunk: each is whole when it is there.
#[tokio::test]
async fn streams_of_any_line_ends_pass_byte_for_byte_and_no_byte_late() {
    for end in ["\n", "\r", "\r\n"] {
        let (steps, walked) = mpsc::channel(8);
        let walked = Mutex::new(Some(walked));
        let peer = Peer::start(move |_| Reply::Steps(walked.lock().unwrap().take().unwrap())).await;
        let rig = Rig::over(&[peer.url()]).await;
        let events = [text("0"), text("1"), finish(), DONE.to_owned()];
        let events = events.map(|event| event.replace('\n', end));
        steps.send(peer::STREAM_HEAD.as_bytes().to_vec()).await.unwrap();
        steps.send(chunk(events[0].as_bytes())).await.unwrap();
        let mut answer = rig.open("POST", CHAT, &[], &chat(true)).await;
        assert_eq!(next(&mut answer).await.unwrap(), events[0]);
        for event in &events[1..] {
            steps.send(chunk(event.as_bytes())).await.unwrap();
            assert_eq!(next(&mut answer).await.unwrap(), *event, "{end:?}");
        }
        steps.send(b"0\r\n\r\n".to_vec()).await.unwrap();
        assert_eq!(next(&mut answer).await, None);
        // And however it is cut, with a comment behind its end that no empty line follows.
        let stream = format!("\u{feff}: hi{end}{}: bye{end}", events.concat());
        for size in 1..12 {
            let reply = pieces(&stream, size);
            let peer = Peer::start(move |_| Reply::Send(reply.clone())).await;
            let rig = Rig::over(&[peer.url()]).await;
            assert_eq!(rig.post(CHAT, &chat(true)).await.text(), stream, "{end:?} in {size}");
        }
    }
}

#[tokio::test]
async fn an_error_beside_choices_ends_no_stream() {
    for error in ["{}", "false", "{\"message\":\"soft\"}", "\"text\"", "7"] {
        let soft = text("a").replace("\"unknown\"", &format!("\"error\":{error},\"unknown\""));
        assert!(soft.contains("\"error\""));
        let stream = [soft, finish(), DONE.to_owned()].concat();
        let reply = pieces(&stream, 50);
        let peer = Peer::start(move |_| Reply::Send(reply.clone())).await;
        let rig = Rig::over(&[peer.url()]).await;
        assert_eq!(rig.post(CHAT, &chat(true)).await.text(), stream);
        rig.counted("fak_requests_total{outcome=\"ok\",route=\"/v1/chat/completions\"}", 1).await;
    }
}

#[tokio::test]
async fn of_a_usage_chunk_only_what_fak_asked_for_is_cut() {
    let usage = "{\"prompt_tokens\":9}";
    let stream = |rest: &str| {
        let ping = ": ping\n";
        let alone = format!("{ping}data: {{\"choices\":[],\"usage\":{usage}{rest}}}\n\n");
        [text("a"), finish(), alone, DONE.to_owned()].concat()
    };
    let asked =
        [("", ": ping\n\n"), (",\"x\":1.50", ": ping\ndata: {\"choices\":[],\"x\":1.50}\n\n")];
    for (rest, kept) in asked {
        let reply = pieces(&stream(rest), 40);
        let peer = Peer::start(move |_| Reply::Send(reply.clone())).await;
        let rig = Rig::over(&[peer.url()]).await;
        let expected = [&text("a"), &finish(), kept, DONE].concat();
        assert_eq!(rig.post(CHAT, &chat(true)).await.text(), expected);
    }
}

/// Other routes pass as they are, and their streams are not taken for OpenAI's.
#[tokio::test]
async fn a_route_that_is_not_read_passes_as_it_is() {
    let events = "event: message_start\ndata: {\"type\":\"message_start\"}\n\n\
                  event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n";
    let reply = peer::whole_stream(&[events]);
    let mut peer = Peer::start(move |_| Reply::Send(reply.clone())).await;
    let rig = Rig::over(&[peer.url()]).await;
    let body = json!({"model": MODEL, "messages": [], "stream": true}).to_string();
    let answer = rig.post("/v1/messages", &body).await;
    assert_eq!(answer.text(), events);
    let seen = peer.request().await;
    assert_eq!((seen.line(), &seen.body[..]), ("POST /v1/messages", body.as_bytes()));
}

/// An answer that began is relayed to its end though its worker stops serving meanwhile.
#[tokio::test]
async fn what_has_begun_is_not_moved() {
    let (steps, walked) = mpsc::channel(1);
    let walked = Mutex::new(Some(walked));
    let peer = Peer::start(move |_| Reply::Steps(walked.lock().unwrap().take().unwrap())).await;
    let other = Peer::start(|_| unreachable!("nothing moves here")).await;
    let mut setup = setup();
    setup.config.watch_every = std::time::Duration::from_millis(1);
    let rig = Rig::with(&[peer.url(), other.url()], setup).await;
    rig.phase(1, fak_kernel::Phase::Paused);
    let first = chunk(text("a").as_bytes());
    steps.send([peer::STREAM_HEAD.as_bytes(), &first].concat()).await.unwrap();
    let mut answer = rig.open("POST", CHAT, &[], &chat(true)).await;
    assert_eq!(next(&mut answer).await.unwrap(), text("a"));
    rig.phase(1, fak_kernel::Phase::Serving);
    rig.phase(0, fak_kernel::Phase::Paused);
    let rest = [finish(), DONE.to_owned()].concat();
    steps.send([chunk(rest.as_bytes()), b"0\r\n\r\n".to_vec()].concat()).await.unwrap();
    assert_eq!(whole(answer).await.text(), rest);
}
