//! Workers that say nothing: when that ends a request, and what a client hears meanwhile.

use std::sync::Mutex;

use tokio::sync::mpsc;

use super::rig::{Rig, SHORT, chat, next, setup, whole};
use crate::engine::peer::{self, Peer, Reply};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"a\"}}]}\n\n";
const FINISH: &str =
    "data: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n";
const DONE: &str = "data: [DONE]\n\n";

/// A peer that sends what the test hands over.
async fn walked() -> (mpsc::Sender<Vec<u8>>, Peer) {
    let (steps, walked) = mpsc::channel(8);
    let walked = Mutex::new(Some(walked));
    let peer = Peer::start(move |_| Reply::Steps(walked.lock().unwrap().take().unwrap())).await;
    (steps, peer)
}

fn chunks(events: &[&str]) -> Vec<u8> {
    let chunk = |event: &&str| format!("{:x}\r\n{event}\r\n", event.len());
    events.iter().map(chunk).collect::<String>().into_bytes()
}

fn ends(events: &[&str]) -> Vec<u8> {
    [&chunks(events)[..], b"0\r\n\r\n"].concat()
}

/// Of two requests under one limit the one whose worker fak keeps at rest outlives the other.
#[tokio::test]
async fn what_fak_keeps_at_rest_outlives_the_limits() {
    for is_begun in [true, false] {
        let (steps, kept) = walked().await;
        let limits = || {
            let mut setup = setup();
            (setup.impatient, setup.hurried) = (Some(0), Some(0));
            setup
        };
        let rig = Rig::with(&[kept.url()], limits()).await;
        rig.state(0, |state| state.pace.is_kept_at_rest = true);
        let cut = Peer::start(|_| Reply::SendAndHold(peer::stream(&[TEXT]))).await;
        let other = Rig::with(&[cut.url()], limits()).await;
        let body = chat(true);
        let limits_pass = async {
            for _ in 0..2 {
                let answer = other.post(CHAT, &body).await;
                assert!(answer.text().contains("worker_silent"), "{}", answer.text());
            }
        };
        let first = [peer::STREAM_HEAD.as_bytes(), &chunks(&[TEXT])].concat();
        let asked = rig.open("POST", CHAT, &[], &body);
        let rest = if is_begun {
            steps.send(first).await.unwrap();
            let mut answer = asked.await;
            assert_eq!(next(&mut answer).await.unwrap(), TEXT);
            limits_pass.await;
            steps.send(ends(&[FINISH, DONE])).await.unwrap();
            whole(answer).await
        } else {
            let (answer, ()) = tokio::join!(asked, async {
                while rig.inside(0) == 0 {
                    tokio::task::yield_now().await;
                }
                limits_pass.await;
                steps.send([&first[..], &ends(&[FINISH, DONE])].concat()).await.unwrap();
            });
            whole(answer).await
        };
        let all = [FINISH, DONE].concat();
        assert!(rest.text().ends_with(&all) && !rest.text().contains("error"), "{}", rest.text());
    }
}

/// The head goes first, and what fails later is an error event.
#[tokio::test]
async fn comments_are_given_while_a_worker_is_silent_where_that_is_asked_for() {
    for fails in [false, true] {
        let (steps, peer) = walked().await;
        let mut setup = setup();
        setup.config.keep_alive = Some(SHORT);
        let rig = Rig::with(&[peer.url()], setup).await;
        steps.send(peer::STREAM_HEAD.as_bytes().to_vec()).await.unwrap();
        let mut answer = rig.open("POST", CHAT, &[], &chat(true)).await;
        assert_eq!(answer.status(), 200);
        for _ in 0..2 {
            assert_eq!(next(&mut answer).await.unwrap(), ": keep-alive\n\n");
        }
        // Half an event is not broken into.
        let half = TEXT.len() / 2;
        steps.send(chunks(&[&TEXT[..half]])).await.unwrap();
        assert_eq!(next(&mut answer).await.unwrap(), ": keep-alive\n\n");
        steps.send(chunks(&[&TEXT[half..]])).await.unwrap();
        let mut text = next(&mut answer).await.unwrap();
        while text == ": keep-alive\n\n" {
            text = next(&mut answer).await.unwrap();
        }
        assert_eq!(text, TEXT);
        let last = if fails { b"zz\r\n".to_vec() } else { ends(&[FINISH, DONE]) };
        steps.send(last).await.unwrap();
        let rest = whole(answer).await.text().replace(": keep-alive\n\n", "");
        if fails {
            assert!(rest.contains("worker_connection_broke") && !rest.contains("[DONE]"), "{rest}");
        } else {
            assert_eq!(rest, [FINISH, DONE].concat());
        }
    }
}
