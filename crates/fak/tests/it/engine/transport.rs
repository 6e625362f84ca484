//! Waits are bounded, cuts are told from refusals, leaving closes, and nothing goes astray.

use std::time::Duration;

use bytes::Bytes;
use fak::engine::{
    BODY_BYTES_MAX, Client, Control, Data, Endpoints, Error, Outgoing, Timeouts, Wait,
};

use super::peer::{self, Peer, Reply};
use super::{PATIENT, engine, engine_with_key, patient};

/// Short enough for a test, long enough for a loopback.
const SHORT: Duration = Duration::from_millis(200);

fn post(endpoints: &Endpoints) -> Outgoing {
    Outgoing::to(endpoints.data(Data::Completions)).json(Bytes::from_static(b"{}"))
}

#[tokio::test]
async fn dropping_a_request_before_its_header_closes_the_connection() {
    let mut peer = Peer::start(|_| Reply::SendAndHold(Vec::new())).await;
    let engine = engine(&peer, patient());
    for streamed in [true, false] {
        let request = post(engine.endpoints());
        let client = engine.client().clone();
        let sent = async {
            if streamed {
                drop(client.open(request).await);
            } else {
                drop(client.send(request, PATIENT).await);
            }
        };
        tokio::select! {
            () = sent => panic!("the peer never answers"),
            request = peer.request() => assert_eq!(request.line(), "POST /v1/completions"),
        }
        peer.client_gone().await;
    }
}

#[tokio::test]
async fn dropping_a_body_closes_the_connection() {
    let mut peer = Peer::start(|_| Reply::SendAndHold(peer::stream(&["data: 1\n\n"]))).await;
    let engine = engine(&peer, patient());
    let mut answer = engine.client().open(post(engine.endpoints())).await.expect("a header");
    peer.request().await;
    let chunk = answer.body.chunk().await.expect("alive");
    assert_eq!(chunk.as_deref(), Some(&b"data: 1\n\n"[..]));
    drop(answer);
    peer.client_gone().await;
}

#[tokio::test]
async fn a_header_without_a_byte_is_no_first_byte() {
    let peer = Peer::start(|_| Reply::SendAndHold(peer::stream(&[]))).await;
    let engine = engine(&peer, Timeouts { first_byte: SHORT, ..patient() });
    let mut answer = engine.client().open(post(engine.endpoints())).await.expect("a header");
    let error = answer.body.chunk().await.expect_err("silence");
    assert!(matches!(error, Error::TimedOut { wait: Wait::FirstByte, after: SHORT }), "{error:?}");
}

#[tokio::test]
async fn no_header_is_no_first_byte_either() {
    let peer = Peer::start(|_| Reply::SendAndHold(Vec::new())).await;
    let engine = engine(&peer, Timeouts { first_byte: SHORT, ..patient() });
    let error = engine.client().open(post(engine.endpoints())).await.expect_err("silence");
    assert!(matches!(error, Error::TimedOut { wait: Wait::FirstByte, .. }), "{error:?}");
}

/// Of a long prompt on a busy engine: the tokens are there after a look was given up.
#[tokio::test]
async fn tokens_may_take_longer_than_a_look() {
    let (steps, walked) = tokio::sync::mpsc::channel(1);
    let walked = std::sync::Mutex::new(Some(walked));
    let peer = Peer::start(move |request| match request.line() {
        "POST /tokenize" => {
            let mut walked = walked.lock().expect("no panic holds it");
            Reply::Steps(walked.take().expect("asked once"))
        }
        _ => Reply::SendAndHold(Vec::new()),
    })
    .await;
    let engine = engine(&peer, Timeouts { probe: SHORT, ..patient() });
    let body = br#"{"model":"m","prompt":"hello"}"#;
    let request = fak_wire::openai::Request::parse(fak_wire::openai::Api::Completions, body);
    let request = request.expect("a body");
    let (tokens, ()) = tokio::join!(engine.tokens(&request), async {
        let health = fak::engine::Outgoing::to(engine.endpoints().data(fak::engine::Data::Health));
        let within = engine.client().timeouts().probe;
        let look = engine.client().send(health, within).await;
        assert!(matches!(look, Err(Error::TimedOut { .. })), "{look:?}");
        let told = r#"{"count":1,"max_model_len":9,"tokens":[7]}"#;
        steps.send(peer::json("200 OK", told)).await.expect("it waits");
    });
    assert_eq!(tokens.expect("in time"), [7]);
}

#[tokio::test]
async fn silence_between_chunks_is_bounded() {
    let peer = Peer::start(|_| Reply::SendAndHold(peer::stream(&["a"]))).await;
    let engine = engine(&peer, Timeouts { idle: SHORT, ..patient() });
    let mut answer = engine.client().open(post(engine.endpoints())).await.expect("a header");
    assert_eq!(answer.body.chunk().await.expect("alive").as_deref(), Some(&b"a"[..]));
    let error = answer.body.chunk().await.expect_err("silence");
    assert!(matches!(error, Error::TimedOut { wait: Wait::NextChunk, .. }), "{error:?}");
}

#[tokio::test]
async fn a_whole_answer_is_bounded_and_leaves_nothing_behind() {
    let mut peer = Peer::start(|_| Reply::SendAndHold(b"HTTP/1.1 200 OK\r\n".to_vec())).await;
    let engine = engine(&peer, patient());
    let sent = engine.client().send(post(engine.endpoints()), SHORT);
    let error = sent.await.expect_err("half a head");
    assert!(matches!(error, Error::TimedOut { wait: Wait::WholeAnswer, .. }), "{error:?}");
    peer.request().await;
    peer.client_gone().await;
}

#[tokio::test]
async fn an_answer_without_end_is_refused() {
    let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", BODY_BYTES_MAX + 1);
    let reply = [head.into_bytes(), vec![b' '; BODY_BYTES_MAX + 1]].concat();
    let peer = Peer::start(move |_| Reply::SendAndClose(reply.clone())).await;
    let engine = engine(&peer, patient());
    let error = engine.client().send(post(engine.endpoints()), PATIENT).await.expect_err("long");
    assert!(matches!(error, Error::TooLarge { limit: BODY_BYTES_MAX }), "{error:?}");
}

#[tokio::test]
async fn what_was_never_sent_is_told_from_what_was_cut() {
    let peer = Peer::start(|_| Reply::SendAndClose(Vec::new())).await;
    let engine = engine(&peer, patient());
    let error = engine.client().send(post(engine.endpoints()), PATIENT).await.expect_err("closed");
    assert!(matches!(error, Error::Cut(_)), "{error:?}");
    let endpoints = engine.endpoints().clone();
    drop(peer);
    let error = engine.client().send(post(&endpoints), PATIENT).await.expect_err("nobody");
    assert!(matches!(error, Error::Unreachable(_)), "{error:?}");
}

#[tokio::test]
async fn a_body_that_breaks_off_is_cut() {
    let whole = b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf".to_vec();
    let peer = Peer::start(move |_| Reply::SendAndClose(whole.clone())).await;
    let engine = engine(&peer, patient());
    let error = engine.client().send(post(engine.endpoints()), PATIENT).await.expect_err("half");
    assert!(matches!(error, Error::Cut(_)), "{error:?}");
}

#[tokio::test]
async fn a_redirect_is_an_answer_and_is_not_followed() {
    let redirect = b"HTTP/1.1 307 Temporary Redirect\r\nlocation: /sleep?level=2\r\n\
        content-length: 0\r\n\r\n";
    let mut peer = Peer::start(|_| Reply::Send(redirect.to_vec())).await;
    let engine = engine(&peer, patient());
    let answer = engine.client().send(post(engine.endpoints()), PATIENT).await.expect("an answer");
    assert_eq!(answer.status, 307);
    let requests = peer.requests_so_far();
    assert_eq!(requests.len(), 1);
    assert_eq!(requests[0].line(), "POST /v1/completions");
}

#[tokio::test]
async fn the_engine_gets_the_engines_key_and_no_other() {
    let mut peer = Peer::start(|_| Reply::Send(peer::json("200 OK", "{}"))).await;
    let engine = engine_with_key(&peer, patient(), Some("sk-engine"));
    let mut foreign = http::HeaderMap::new();
    foreign.insert(http::header::AUTHORIZATION, http::HeaderValue::from_static("Bearer gateway"));
    let request = post(engine.endpoints()).headers(foreign);
    engine.client().send(request, PATIENT).await.expect("an answer");
    assert_eq!(peer.request().await.header("authorization"), Some("Bearer sk-engine"));
    let url = engine.endpoints().control(&Control::IsPaused).expect("always open");
    engine.client().send(Outgoing::to(url), PATIENT).await.expect("an answer");
    assert_eq!(peer.request().await.header("authorization"), Some("Bearer sk-engine"));
}

#[tokio::test]
async fn metrics_elsewhere_do_not_get_the_key() {
    let mut exporter = Peer::start(|_| Reply::Send(peer::answer("200 OK", "text/plain", ""))).await;
    let endpoints = Endpoints::new("http://127.0.0.1:1").expect("an address");
    let endpoints =
        endpoints.with_metrics_url(&format!("{}/metrics", exporter.url())).expect("an address");
    let key = fak::engine::Secret::new("sk-engine".to_owned());
    let client = Client::new(Some(&key), patient()).expect("a plain key");
    let request = Outgoing::to(endpoints.data(Data::Metrics));
    client.send(request, PATIENT).await.expect("an answer");
    assert_eq!(exporter.request().await.header("authorization"), None);
}

/// A peer that answers the first request, ends that connection at the second in the given way, and
/// answers those that come over another connection.
async fn ending(end: fn() -> Reply) -> Peer {
    let count = std::sync::atomic::AtomicUsize::new(0);
    Peer::start(move |_| match count.fetch_add(1, std::sync::atomic::Ordering::SeqCst) {
        1 => end(),
        _ => Reply::Send(peer::json("200 OK", "{}")),
    })
    .await
}

#[tokio::test]
async fn an_inference_request_on_a_pooled_connection_that_ended_is_sent_once_more() {
    let ends: [fn() -> Reply; 2] = [|| Reply::SendAndClose(Vec::new()), || Reply::Reset];
    for end in ends {
        let mut peer = ending(end).await;
        let engine = engine(&peer, patient());
        for _ in 0..3 {
            let answer = engine.client().open(post(engine.endpoints())).await.expect("an answer");
            assert_eq!(answer.body.collect().await.expect("whole"), "{}");
        }
        assert_eq!(peer.requests_so_far().len(), 4, "the second was sent twice");
    }
}

#[tokio::test]
async fn a_request_on_a_new_connection_or_with_a_part_of_an_answer_is_never_sent_again() {
    let new = Peer::start(|_| Reply::SendAndClose(Vec::new())).await;
    let begun = ending(|| Reply::SendAndClose(b"HTTP/1.1 2".to_vec())).await;
    for (mut peer, sent) in [(new, 1), (begun, 2)] {
        let engine = engine(&peer, patient());
        for number in 1..=sent {
            let answer = engine.client().open(post(engine.endpoints())).await;
            if number < sent {
                answer.expect("an answer").body.collect().await.expect("whole");
            } else {
                assert!(matches!(answer, Err(Error::Cut(_))), "{answer:?}");
            }
        }
        assert_eq!(peer.requests_so_far().len(), sent);
    }
}

/// The second sending reaches nobody: the first may have.
#[tokio::test]
async fn a_second_sending_that_is_refused_is_a_cut_and_not_unreachable() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("bound");
    let client = Client::new(None, patient()).expect("no key");
    let endpoints = Endpoints::new(&format!("http://{address}")).expect("a URL");
    let (answers, ()) = tokio::join!(
        async {
            let first = client.open(post(&endpoints)).await.expect("an answer");
            first.body.collect().await.expect("whole");
            client.open(post(&endpoints)).await
        },
        async {
            use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
            let (mut stream, _) = listener.accept().await.expect("a client");
            drop(listener);
            let mut bytes = [0; 4096];
            assert_ne!(stream.read(&mut bytes).await.expect("a request"), 0);
            stream.write_all(&peer::json("200 OK", "{}")).await.expect("taken");
            assert_ne!(stream.read(&mut bytes).await.expect("another"), 0);
        }
    );
    assert!(matches!(answers, Err(Error::Cut(_))), "{answers:?}");
}

#[tokio::test]
async fn a_control_call_is_never_sent_twice() {
    let mut peer = ending(|| Reply::SendAndClose(Vec::new())).await;
    let engine = engine(&peer, patient());
    let call = || Outgoing::to(engine.endpoints().control(&Control::Resume).expect("on the list"));
    assert_eq!(engine.client().send(call(), PATIENT).await.expect("an answer").body, "{}");
    let ended = engine.client().send(call(), PATIENT).await;
    assert!(matches!(ended, Err(Error::Cut(_))), "{ended:?}");
    assert_eq!(peer.requests_so_far().len(), 2);
}
