//! What fails is told once, tried elsewhere while nobody has seen anything of it, and never twice.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use fak_kernel::Phase;
use fak_wire::openai::{ErrorBody, StreamItem};
use fak_wire::sse;
use http::StatusCode;

use super::rig::{Rig, chat, next, setup, whole};
use crate::engine::peer::{self, Peer, Reply};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"a\"}}]}\n\n";
const FINISH: &str =
    "data: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n";
const DONE: &str = "data: [DONE]\n\n";
const ROLE: &str = "data: {\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\"}}]}\n\n";
const FAILED: &str =
    "data: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"error\"}]}\n\n";

const PAUSED: &str =
    "data: {\"error\":{\"message\":\"m\",\"type\":\"t\",\"code\":\"engine_paused\"}}\n\n";

/// How a peer sends a stream of these chunks.
type Send = fn(&[&str]) -> Reply;

fn good() -> Reply {
    Reply::Send(peer::whole_stream(&[TEXT, FINISH, DONE]))
}

/// The errors of a stream, each of whose events must be one that a client can read.
fn errors(stream: &[u8]) -> Vec<ErrorBody> {
    let mut reader = sse::Reader::new(1 << 20);
    let events: Vec<_> = reader.push(stream).map(|event| event.unwrap()).collect();
    assert_eq!(reader.finish(), sse::Tail::Clean, "ends between events");
    let items = events.iter().map(|event| StreamItem::parse(&event.data).unwrap());
    items
        .filter_map(|item| match item {
            StreamItem::Error(error) => Some(error),
            StreamItem::Done => panic!("an end marker after a failure"),
            StreamItem::Chunk(_) => None,
        })
        .collect()
}

/// Case 76.
#[tokio::test]
async fn a_failure_in_the_stream_is_one_error_event_and_no_end() {
    let error = "data: {\"error\": {\"message\": \"boom\", \"code\": 500}}\n\n";
    let rows: [(&str, Send, Vec<&str>, &str); 4] = [
        ("cut", |c| Reply::SendAndClose(peer::stream(c)), vec![TEXT, "data: {\"choi"], ""),
        ("error", |c| Reply::Send(peer::whole_stream(c)), vec![TEXT, error, DONE], "boom"),
        ("cut", |c| Reply::Send(peer::whole_stream(c)), vec![TEXT], ""),
        ("cut", |c| Reply::SendAndClose(peer::stream(c)), vec![TEXT, FINISH], ""),
    ];
    for (cause, reply, chunks, message) in rows {
        let sent: Vec<String> = chunks.iter().map(|chunk| (*chunk).to_owned()).collect();
        let peer =
            Peer::start(move |_| reply(&sent.iter().map(String::as_str).collect::<Vec<_>>())).await;
        let rig = Rig::over(&[peer.url()]).await;
        let answer = rig.post(CHAT, &chat(true)).await;
        assert_eq!(answer.status, StatusCode::OK);
        let errors = errors(&answer.body);
        assert_eq!(errors.len(), 1, "{}", answer.text());
        assert!(errors[0].message.contains(message), "{errors:?}");
        rig.counted(&format!("fak_requests_failed_total{{cause=\"{cause}\"}}"), 1).await;
    }
}

/// Case 76: the half line that was relayed already, in the reading of a client.
#[tokio::test]
async fn an_error_stands_on_a_line_of_its_own() {
    let (steps, walked) = tokio::sync::mpsc::channel(1);
    let walked = std::sync::Mutex::new(Some(walked));
    let peer = Peer::start(move |_| Reply::Steps(walked.lock().unwrap().take().unwrap())).await;
    let rig = Rig::over(&[peer.url()]).await;
    steps.send(peer::stream(&[TEXT])).await.unwrap();
    let mut answer = rig.open("POST", CHAT, &[], &chat(true)).await;
    assert_eq!(next(&mut answer).await.unwrap(), TEXT);
    steps.send(b"d\r\ndata: {\"choi\r\n".to_vec()).await.unwrap();
    steps.send(b"0\r\n\r\n".to_vec()).await.unwrap();
    let rest = whole(answer).await;
    let errors = errors(&rest.body);
    assert_eq!(errors.len(), 1, "{}", rest.text());
    assert!(rest.text().starts_with("data: {\"error\""), "{}", rest.text());
}

/// Case 77.
#[tokio::test]
async fn a_request_is_tried_elsewhere_only_while_nothing_was_sent() {
    let tries = [
        // Reset before the head: another worker, and one clean answer.
        (Reply::SendAndClose as fn(Vec<u8>) -> Reply, Vec::new(), 2, StatusCode::OK),
        (Reply::Send, peer::json("503 Service Unavailable", "{}"), 2, StatusCode::OK),
        // A stream's head, and its end, without a byte.
        (Reply::Send, peer::whole_stream(&[]), 2, StatusCode::OK),
        // Dropped from the queue of an engine that was put to sleep.
        (Reply::Send, peer::whole_stream(&[DONE]), 2, StatusCode::OK),
        // Refused by an engine that is paused (vLLM 0.33.0, source).
        (Reply::Send, peer::whole_stream(&[PAUSED, DONE]), 2, StatusCode::OK),
        // The engine's word on a request that is wrong.
        (Reply::Send, peer::json("400 Bad Request", "{\"error\":{}}"), 1, StatusCode::BAD_REQUEST),
        (
            Reply::Send,
            peer::json("500 Internal Server Error", "{}"),
            1,
            StatusCode::INTERNAL_SERVER_ERROR,
        ),
    ];
    for (how, bytes, attempts, status) in tries {
        let (bad_bytes, is_first) = (bytes, Arc::new(AtomicUsize::new(0)));
        let start = || {
            let (bytes, count) = (bad_bytes.clone(), Arc::clone(&is_first));
            Peer::start(move |_| match count.fetch_add(1, Ordering::SeqCst) {
                0 => how(bytes.clone()),
                _ => good(),
            })
        };
        // Whichever of the two is asked first fails.
        let (one, other) = (start().await, start().await);
        let rig = Rig::over(&[one.url(), other.url()]).await;
        let answer = rig.post(CHAT, &chat(true)).await;
        assert_eq!(answer.status, status);
        assert_eq!(answer.header("x-fak-attempts"), Some(attempts.to_string().as_str()));
        if status == StatusCode::OK {
            assert_eq!(answer.text(), [TEXT, FINISH, DONE].concat());
        }
        assert_eq!(is_first.load(Ordering::SeqCst), attempts);
        assert_eq!(rig.count("fak_requests_moved_total"), attempts as u64 - 1);
    }
}

#[tokio::test]
async fn a_request_is_sent_to_no_more_workers_than_is_set() {
    let mut peers = Vec::new();
    for _ in 0..4 {
        let busy = || Reply::Send(peer::json("503 Service Unavailable", "{}"));
        peers.push(Peer::start(move |_| busy()).await);
    }
    let urls: Vec<_> = peers.iter().map(Peer::url).collect();
    for attempts_max in [1, 3] {
        let mut setup = setup();
        setup.config.attempts_max = attempts_max;
        let rig = Rig::with(&urls, setup).await;
        let answer = rig.post(CHAT, &chat(true)).await;
        assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(answer.header("x-fak-attempts"), Some(attempts_max.to_string().as_str()));
    }
}

/// Else each of a thousand requests on a worker that fails would have it looked at.
#[tokio::test]
async fn a_worker_that_fails_is_looked_at_once_in_a_while() {
    let peer = Peer::start(|_| Reply::Send(peer::json("503 Service Unavailable", "{}"))).await;
    let mut setup = setup();
    setup.config.watch_every = super::rig::PATIENT;
    let mut rig = Rig::with(&[peer.url()], setup).await;
    for _ in 0..3 {
        rig.post(CHAT, &chat(true)).await;
    }
    assert_eq!(rig.suspects.try_recv().as_deref(), Ok("w0"));
    assert!(rig.suspects.try_recv().is_err());
}

/// It may come back, and the request is there.
#[tokio::test]
async fn a_request_stays_on_a_worker_that_stopped_serving_where_there_is_no_other() {
    let (steps, walked) = tokio::sync::mpsc::channel(1);
    let walked = std::sync::Mutex::new(Some(walked));
    let peer = Peer::start(move |_| Reply::Steps(walked.lock().unwrap().take().unwrap())).await;
    let mut setup = setup();
    setup.config.watch_every = super::rig::SHORT;
    let mut rig = Rig::with(&[peer.url()], setup).await;
    let mut suspects = std::mem::replace(&mut rig.suspects, tokio::sync::mpsc::channel(1).1);
    let body = chat(true);
    let (answer, ()) = tokio::join!(rig.post(CHAT, &body), async {
        // It waits, and is watched.
        suspects.recv().await.unwrap();
        rig.phase(0, Phase::Sleeping);
        for _ in 0..2 {
            suspects.recv().await.unwrap();
        }
        steps.send(peer::whole_stream(&[TEXT, FINISH, DONE])).await.unwrap();
    });
    assert_eq!(answer.text(), [TEXT, FINISH, DONE].concat());
}

/// Case 77: after the first chunk there is no second try.
#[tokio::test]
async fn an_answer_that_has_begun_is_never_begun_again() {
    let (steps, walked) = tokio::sync::mpsc::channel(1);
    let walked = Arc::new(std::sync::Mutex::new(Some(walked)));
    let asked = Arc::new(AtomicUsize::new(0));
    let start = || {
        let (walked, asked) = (Arc::clone(&walked), Arc::clone(&asked));
        Peer::start(move |_| {
            asked.fetch_add(1, Ordering::SeqCst);
            Reply::Steps(walked.lock().unwrap().take().unwrap())
        })
    };
    let (one, other) = (start().await, start().await);
    let rig = Rig::over(&[one.url(), other.url()]).await;
    steps.send(peer::stream(&[TEXT])).await.unwrap();
    let mut answer = rig.open("POST", CHAT, &[], &chat(true)).await;
    assert_eq!(next(&mut answer).await.unwrap(), TEXT);
    // No chunk is that long: the engine's side is broken.
    steps.send(b"zz\r\n".to_vec()).await.unwrap();
    assert_eq!(errors(&whole(answer).await.body).len(), 1);
    assert_eq!(asked.load(Ordering::SeqCst), 1);
}

/// The engine's answer is the client's, where nobody does better.
#[tokio::test]
async fn an_engines_error_passes_with_its_body() {
    let body =
        "{\"error\":{\"message\":\"queue full\",\"type\":\"Service Unavailable\",\"code\":503}}";
    let peer = Peer::start(move |_| Reply::Send(peer::json("503 Service Unavailable", body))).await;
    let rig = Rig::over(&[peer.url()]).await;
    let answer = rig.post(CHAT, &chat(false)).await;
    assert_eq!((answer.status, answer.text()), (StatusCode::SERVICE_UNAVAILABLE, body));
    rig.counted("fak_requests_failed_total{cause=\"error\"}", 1).await;
}

/// Case 78.
#[tokio::test]
async fn wrong_requests_take_nobody_out() {
    let asked = Arc::new(AtomicUsize::new(0));
    let start = || {
        let asked = Arc::clone(&asked);
        Peer::start(move |_| match asked.fetch_add(1, Ordering::SeqCst) {
            0..15 => Reply::Send(peer::json("400 Bad Request", "{\"error\":{\"code\":400}}")),
            _ => good(),
        })
    };
    let peers = [start().await, start().await, start().await];
    let mut rig = Rig::over(&peers.each_ref().map(|peer| peer.url())).await;
    for _ in 0..15 {
        assert_eq!(rig.post(CHAT, &chat(true)).await.status, StatusCode::BAD_REQUEST);
    }
    assert_eq!(rig.post(CHAT, &chat(true)).await.status, StatusCode::OK);
    assert!(rig.suspects.try_recv().is_err(), "nobody is suspected");
    assert_eq!(asked.load(Ordering::SeqCst), 16);
}

/// Case 83.
#[tokio::test]
async fn a_dead_worker_costs_its_own_requests_a_wait_and_nobody_elses() {
    let dead = Peer::start(|_| Reply::SendAndHold(Vec::new())).await;
    let fine = Peer::start(|_| good()).await;
    let mut setup = setup();
    setup.hurried = Some(0);
    let mut rig = Rig::with(&[dead.url(), fine.url()], setup).await;
    let body = chat(true);
    let mut all = Vec::new();
    for _ in 0..200 {
        all.push(rig.post(CHAT, &body));
    }
    let mut moved = 0;
    for answer in futures_util::future::join_all(all).await {
        assert_eq!(answer.status, StatusCode::OK);
        assert_eq!(answer.header("x-fak-worker"), Some("w1"));
        moved += u64::from(answer.header("x-fak-attempts") == Some("2"));
    }
    assert!(moved > 0, "somebody was sent to the dead one");
    assert_eq!(rig.count("fak_requests_moved_total"), moved);
    assert_eq!(&*rig.suspects.recv().await.unwrap(), "w0");
    rig.empty().await;
}

/// A worker that is put to sleep under a request that has no byte yet: vLLM 0.32.0 answers 200, a
/// stream's head, and then nothing.
#[tokio::test]
async fn a_request_without_a_first_byte_moves_when_its_worker_stops_serving() {
    let heads: [&[u8]; 2] = [b"", peer::STREAM_HEAD.as_bytes()];
    for head in heads {
        for is_stream in [true, false] {
            if !is_stream && !head.is_empty() {
                continue;
            }
            let mut silent = Peer::start(|_| Reply::SendAndHold(head.to_vec())).await;
            let other = Peer::start(move |_| good()).await;
            let mut setup = setup();
            setup.config.watch_every = Duration::from_millis(1);
            let mut rig = Rig::with(&[silent.url(), other.url()], setup).await;
            rig.phase(1, Phase::Paused);
            let body = chat(is_stream);
            let (answer, ()) = tokio::join!(rig.post(CHAT, &body), async {
                silent.request().await;
                // It is looked at, and found asleep; the other one wakes.
                rig.phase(1, Phase::Serving);
                rig.phase(0, Phase::Sleeping);
                silent.client_gone().await;
            });
            assert_eq!(answer.text(), [TEXT, FINISH, DONE].concat());
            assert_eq!(answer.header("x-fak-worker"), Some("w1"));
            assert_eq!(answer.header("x-fak-attempts"), Some("2"));
            assert_eq!(&*rig.suspects.recv().await.unwrap(), "w0");
        }
    }
}

/// A URL at which nothing listens.
async fn refusing() -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    format!("http://{}", listener.local_addr().unwrap())
}

#[tokio::test]
async fn a_request_that_loses_two_workers_is_not_sent_to_a_third() {
    for is_stream in [true, false] {
        let asked = Arc::new(AtomicUsize::new(0));
        let start = || {
            let asked = Arc::clone(&asked);
            Peer::start(move |_| {
                asked.fetch_add(1, Ordering::SeqCst);
                Reply::SendAndClose(Vec::new())
            })
        };
        let peers = [start().await, start().await, start().await];
        let rig = Rig::over(&peers.each_ref().map(|peer| peer.url())).await;
        let answer = rig.post(CHAT, &chat(is_stream)).await;
        assert_eq!(
            (answer.status, answer.code().as_str()),
            (StatusCode::BAD_GATEWAY, "two_workers_lost")
        );
        assert_eq!(answer.header("x-should-retry"), Some("false"));
        assert_eq!(asked.load(Ordering::SeqCst), 2);
    }
    // Workers that never saw it tell nothing of it.
    let fine = Peer::start(|_| good()).await;
    let rig = Rig::over(&[refusing().await, refusing().await, fine.url()]).await;
    for _ in 0..8 {
        assert_eq!(rig.post(CHAT, &chat(true)).await.header("x-fak-worker"), Some("w2"));
    }
}

/// The process of a worker is gone, and its connections stay: only the next look tells.
#[tokio::test]
async fn a_worker_that_is_found_lost_under_a_request_counts_as_lost_by_it() {
    let mut peers = Vec::new();
    for _ in 0..3 {
        peers.push(Peer::start(|_| Reply::SendAndHold(Vec::new())).await);
    }
    let mut setup = setup();
    setup.config.watch_every = Duration::from_millis(1);
    let urls: Vec<_> = peers.iter().map(Peer::url).collect();
    let mut rig = Rig::with(&urls, setup).await;
    let fleet = rig.fleet.clone();
    let body = chat(false);
    let mut lost = Vec::new();
    let mut suspects = std::mem::replace(&mut rig.suspects, tokio::sync::mpsc::channel(1).1);
    let asking = rig.post(CHAT, &body);
    let mut asking = std::pin::pin!(asking);
    let answer = loop {
        tokio::select! {
            answer = &mut asking => break answer,
            Some(worker) = suspects.recv() => {
                if !lost.contains(&worker) {
                    fleet.update(&worker, |state| state.is_reachable = false);
                    lost.push(worker);
                }
            }
        }
    };
    assert_eq!((answer.code().as_str(), lost.len()), ("two_workers_lost", 2));
}

#[tokio::test]
async fn an_answer_that_takes_longer_than_fak_waits_is_not_computed_again_elsewhere() {
    let asked = Arc::new(AtomicUsize::new(0));
    let start = || {
        let asked = Arc::clone(&asked);
        Peer::start(move |_| {
            asked.fetch_add(1, Ordering::SeqCst);
            Reply::SendAndHold(Vec::new())
        })
    };
    let (one, other) = (start().await, start().await);
    let mut setup = setup();
    setup.timeouts.unary = super::rig::SHORT;
    let rig = Rig::with(&[one.url(), other.url()], setup).await;
    let answer = rig.post(CHAT, &chat(false)).await;
    assert_eq!(
        (answer.status, answer.code().as_str()),
        (StatusCode::GATEWAY_TIMEOUT, "worker_silent")
    );
    assert_eq!(answer.header("x-should-retry"), Some("false"));
    assert_eq!(asked.load(Ordering::SeqCst), 1);
    assert_eq!(rig.count("fak_requests_ejections_total"), 0);
}

/// The worker stays the same, and so does what is expected to be cached there.
#[tokio::test]
async fn a_pooled_connection_that_ended_is_no_lost_worker() {
    let count = AtomicUsize::new(0);
    let closing = Peer::start(move |_| match count.fetch_add(1, Ordering::SeqCst) {
        1 => Reply::SendAndClose(Vec::new()),
        _ => good(),
    })
    .await;
    let other = Peer::start(|_| good()).await;
    let mut rig = Rig::over(&[closing.url(), other.url()]).await;
    rig.phase(1, Phase::Paused);
    for _ in 0..2 {
        let answer = rig.post(CHAT, &chat(true)).await;
        assert_eq!((answer.status, answer.header("x-fak-attempts")), (StatusCode::OK, Some("1")));
    }
    assert_eq!(rig.count("fak_requests_moved_total"), 0);
    assert!(rig.suspects.try_recv().is_err(), "nobody is suspected");
}

/// vLLM answers 200 to a request whose KV could not be loaded, and to some that its engine failed.
#[tokio::test]
async fn an_answer_that_is_an_error_and_nothing_else_is_tried_once_elsewhere_and_has_failed() {
    let usage = "\"usage\":{\"prompt_tokens\":9,\"prompt_tokens_details\":{\"cached_tokens\":0}}";
    let whole = format!(
        "{{\"choices\":[{{\"index\":0,\"message\":{{\"role\":\"assistant\",\"content\":null}},\
         \"finish_reason\":\"error\"}}],{usage}}}"
    );
    let replies = [
        (true, peer::whole_stream(&[FAILED, DONE])),
        (true, peer::whole_stream(&[ROLE, FAILED, DONE])),
        (false, peer::json("200 OK", &whole)),
    ];
    for (is_stream, reply) in replies {
        for (failing, attempts) in [(1, "2"), (3, "2")] {
            let asked = Arc::new(AtomicUsize::new(0));
            let start = || {
                let (asked, reply) = (Arc::clone(&asked), reply.clone());
                Peer::start(move |_| match asked.fetch_add(1, Ordering::SeqCst) {
                    number if number < failing => Reply::Send(reply.clone()),
                    _ if is_stream => good(),
                    _ => Reply::Send(peer::json("200 OK", "{\"choices\":[]}")),
                })
            };
            let peers = [start().await, start().await, start().await];
            let rig = Rig::over(&peers.each_ref().map(|peer| peer.url())).await;
            let answer = rig.post(CHAT, &chat(is_stream)).await;
            assert_eq!(answer.status, StatusCode::OK);
            assert_eq!(answer.header("x-fak-attempts"), Some(attempts));
            let is_error = failing > 1;
            assert_eq!(answer.text().contains("\"error\""), is_error, "{}", answer.text());
            let failures = u64::from(is_error);
            rig.counted("fak_requests_failed_total{cause=\"error\"}", failures).await;
            assert_eq!(asked.load(Ordering::SeqCst), 2);
        }
    }
}

/// Of tokens that the client has, none is computed again.
#[tokio::test]
async fn an_error_behind_the_first_token_stays_where_it_is() {
    let message = "{\"role\":\"assistant\",\"content\":\"a\"}";
    let whole = format!(
        "{{\"choices\":[{{\"index\":0,\"message\":{message},\"finish_reason\":\"error\"}}]}}"
    );
    let replies =
        [(true, peer::whole_stream(&[TEXT, FAILED, DONE])), (false, peer::json("200 OK", &whole))];
    for (is_stream, reply) in replies {
        let asked = Arc::new(AtomicUsize::new(0));
        let start = || {
            let (asked, reply) = (Arc::clone(&asked), reply.clone());
            Peer::start(move |_| {
                asked.fetch_add(1, Ordering::SeqCst);
                Reply::Send(reply.clone())
            })
        };
        let (one, other) = (start().await, start().await);
        let rig = Rig::over(&[one.url(), other.url()]).await;
        let answer = rig.post(CHAT, &chat(is_stream)).await;
        assert_eq!((answer.status, answer.header("x-fak-attempts")), (StatusCode::OK, Some("1")));
        rig.counted("fak_requests_failed_total{cause=\"error\"}", 1).await;
        assert_eq!(asked.load(Ordering::SeqCst), 1);
    }
}
