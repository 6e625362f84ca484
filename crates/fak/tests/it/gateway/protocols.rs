//! Streams and conversations of routes other than chat and completions.

use std::collections::BTreeSet;
use std::time::Duration;

use fak_kernel::Phase;
use serde_json::{Value, json};

use super::rig::{MODEL, Rig, setup};
use crate::engine::peer::{self, Peer, Reply};

const MESSAGES: &str = "/v1/messages";
const RESPONSES: &str = "/v1/responses";

fn event(kind: &str, more: Value) -> String {
    let mut data = json!({"type": kind});
    data.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    format!("event: {kind}\ndata: {data}\n\n")
}

/// A stream of a route, as vLLM 0.32.0 sends it: what comes at once, and what the engine then does.
fn stream(path: &str) -> (Vec<String>, Vec<String>) {
    if path == MESSAGES {
        let rest = ["message_start", "content_block_delta", "message_delta", "message_stop"];
        return (Vec::new(), rest.map(|kind| event(kind, json!({}))).to_vec());
    }
    let response = json!({"id": "resp_1", "object": "response", "status": "in_progress"});
    let numbered = |(number, kind): (usize, &&str)| {
        event(kind, json!({"sequence_number": number, "response": response}))
    };
    let kinds = [
        "response.created",
        "response.in_progress",
        "response.output_text.delta",
        "response.completed",
    ];
    let mut all: Vec<_> = kinds.iter().enumerate().map(numbered).collect();
    let rest = all.split_off(2);
    (all, rest)
}

fn body(path: &str) -> String {
    let field = if path == MESSAGES { "messages" } else { "input" };
    json!({"model": MODEL, field: [{"role": "user", "content": "hi"}], "stream": true}).to_string()
}

fn whole_stream(events: &[String]) -> Vec<u8> {
    peer::whole_stream(&events.iter().map(String::as_str).collect::<Vec<_>>())
}

/// Their head, and what announces a response, is held back as those of chat are.
#[tokio::test]
async fn streams_of_messages_and_responses_move_while_their_client_saw_nothing() {
    for path in [MESSAGES, RESPONSES] {
        let (announced, rest) = stream(path);
        let all = [announced.clone(), rest].concat();
        let head = peer::stream(&announced.iter().map(String::as_str).collect::<Vec<_>>());
        let mut silent = Peer::start(move |_| Reply::SendAndHold(head.clone())).await;
        let sent = whole_stream(&all);
        let other = Peer::start(move |_| Reply::Send(sent.clone())).await;
        let mut setup = setup();
        setup.config.watch_every = Duration::from_millis(1);
        let rig = Rig::with(&[silent.url(), other.url()], setup).await;
        rig.phase(1, Phase::Paused);
        let body = body(path);
        let (answer, ()) = tokio::join!(rig.post(path, &body), async {
            silent.request().await;
            rig.phase(1, Phase::Serving);
            rig.phase(0, Phase::Paused);
            silent.client_gone().await;
        });
        assert_eq!(answer.text(), all.concat());
        assert_eq!(answer.header("x-fak-worker"), Some("w1"));
    }
}

#[tokio::test]
async fn streams_of_messages_and_responses_end_in_their_own_protocol() {
    for path in [MESSAGES, RESPONSES] {
        let (mut sent, rest) = stream(path);
        sent.push(rest[0].clone());
        let whole = sent.concat();
        sent.push("event: x\ndata: {\"ty".to_owned());
        let reply = peer::stream(&sent.iter().map(String::as_str).collect::<Vec<_>>());
        let peer = Peer::start(move |_| Reply::SendAndClose(reply.clone())).await;
        let rig = Rig::over(&[peer.url()]).await;
        let answer = rig.post(path, &body(path)).await;
        let last = answer.text().strip_prefix(&whole).unwrap_or_else(|| panic!("{answer:?}"));
        let (name, data) = last.split_once('\n').unwrap();
        let data = data.strip_prefix("data: ").and_then(|d| d.strip_suffix("\n\n")).unwrap();
        let data: Value = serde_json::from_str(data).unwrap();
        if path == MESSAGES {
            assert_eq!((name, &data["type"]), ("event: error", &json!("error")));
            assert_eq!(data["error"]["code"], "worker_connection_broke");
        } else {
            assert_eq!(
                (name, &data["type"]),
                ("event: response.failed", &json!("response.failed"))
            );
            assert_eq!(data["sequence_number"], 3);
            let response = &data["response"];
            assert_eq!(
                (&response["id"], &response["status"]),
                (&json!("resp_1"), &json!("failed"))
            );
        }
        rig.counted("fak_requests_failed_total{cause=\"cut\"}", 1).await;
    }
}

/// As the turns of chat do, whose prompts events tell of.
#[tokio::test]
async fn turns_of_a_conversation_stay_together_on_every_route() {
    for (path, field) in [(MESSAGES, "messages"), (RESPONSES, "input"), ("/v1/embeddings", "input")]
    {
        let mut peers = Vec::new();
        for _ in 0..3 {
            peers.push(Peer::start(|_| Reply::Send(peer::json("200 OK", "{}"))).await);
        }
        let urls: Vec<_> = peers.iter().map(Peer::url).collect();
        let rig = Rig::over(&urls).await;
        let mut workers = vec![BTreeSet::new(); 8];
        for turns in 1..=6 {
            for (conversation, workers) in workers.iter_mut().enumerate() {
                let turn = |turn| {
                    let text = format!("conversation {conversation}, turn {turn}. ").repeat(45);
                    json!({"role": "user", "content": text})
                };
                let turns: Vec<_> = (0..turns).map(turn).collect();
                let body = json!({"model": MODEL, "id": fastrand::u64(..), field: turns});
                let answer = rig.post(path, &body.to_string()).await;
                assert_eq!(answer.header("x-fak-kv"), Some("unknown"), "nothing is claimed");
                workers.insert(answer.header("x-fak-worker").unwrap().to_owned());
            }
        }
        assert!(workers.iter().all(|workers| workers.len() == 1), "{path}: {workers:?}");
    }
}
