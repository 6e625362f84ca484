//! `/fak/v1/events`: the ledger as it is written.

use fak_wire::sse::Reader;
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use serde_json::Value;

use super::rig::Rig;

/// Reads whole events, with the bytes that they came in.
struct Events {
    body: Incoming,
    reader: Reader,
    bytes: Vec<u8>,
    waiting: std::collections::VecDeque<(String, Value, String)>,
}

impl Events {
    async fn open(rig: &Rig, headers: &[(&str, &str)]) -> Self {
        let response = rig.open("GET", "/fak/v1/events", headers, "").await;
        assert_eq!(response.status(), 200);
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        let body = response.into_body();
        let (reader, bytes) = (Reader::new(1 << 20), Vec::new());
        Self { body, reader, bytes, waiting: std::collections::VecDeque::new() }
    }

    /// Name, row and id of the next event.
    async fn next(&mut self) -> (String, Value, String) {
        loop {
            if let Some(event) = self.waiting.pop_front() {
                return event;
            }
            let frame = self.body.frame().await.expect("the stream goes on").unwrap();
            let Ok(chunk) = frame.into_data() else { continue };
            self.bytes.extend_from_slice(&chunk);
            for event in self.reader.push(&chunk) {
                let event = event.unwrap();
                let span = event.span.start as usize..event.span.end as usize;
                let text = String::from_utf8(self.bytes[span].to_vec()).unwrap();
                let id = text.lines().find_map(|line| line.strip_prefix("id: ")).unwrap();
                let name = String::from_utf8(event.name.clone()).unwrap();
                let row = serde_json::from_slice(&event.data).unwrap();
                self.waiting.push_back((name, row, id.to_owned()));
            }
        }
    }
}

#[tokio::test]
async fn a_row_is_told_as_an_intent_and_then_with_its_outcome() {
    let rig = Rig::start(1).await;
    let mut events = Events::open(&rig, &[]).await;
    rig.post("/fak/v1/workers/w0/sleep", r#"{"level":1}"#).await;
    let (mut name, mut row, _) = events.next().await;
    if name == "intent" {
        assert_eq!((&row["kv"], &row["evidence"]), (&"unknown".into(), &"none".into()));
        (name, row, _) = events.next().await;
    }
    assert_eq!(name, "witness");
    assert_eq!((&row["action"], &row["kv"]), (&"sleep".into(), &"forgotten".into()));
}

#[tokio::test]
async fn whoever_comes_back_misses_nothing() {
    let rig = Rig::start(1).await;
    let mut all = Events::open(&rig, &[("last-event-id", "0")]).await;
    let (_, first, id) = all.next().await;
    assert_eq!(first["action"], "join", "the first observation");
    drop(all);
    rig.post("/fak/v1/workers/w0/pause", "").await;
    rig.post("/fak/v1/workers/w0/resume", "").await;
    let mut again = Events::open(&rig, &[("last-event-id", &id)]).await;
    let (name, row, _) = again.next().await;
    assert_eq!((&*name, &row["action"]), ("witness", &"pause".into()));
    let (name, row, _) = again.next().await;
    assert_eq!((&*name, &row["action"]), ("witness", &"resume".into()));
    let bad = rig.ask("GET", "/fak/v1/events", &[("last-event-id", "x")], "").await;
    assert_eq!(bad.status, 400);
    assert_eq!(rig.get("/fak/v1/events?worker=w0").await.status, 400);
}
