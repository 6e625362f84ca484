//! A plain HTTP client, an event reader and the recordings, for tests.

use std::time::Duration;

use fak_sim::{Binds, Connector, Profile, Sim, SimConfig};
use rmpv::Value as Msg;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use zeromq::{DealerSocket, Socket, SocketRecv, SocketSend, SubSocket, ZmqMessage};

/// No test waits longer for anything; passing it fails the test.
const PATIENCE: Duration = Duration::from_secs(20);

pub(crate) async fn soon<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, what).await.expect("it takes too long")
}

pub(crate) async fn sim(edit: impl FnOnce(&mut SimConfig)) -> Sim {
    let mut config = SimConfig { block_size: 16, gpu_blocks: 300, ..SimConfig::default() };
    edit(&mut config);
    Sim::start(config, Binds::default()).await.unwrap()
}

pub(crate) async fn offloading() -> Sim {
    sim(|config| config.connector = Connector::Offloading).await
}

pub(crate) async fn of_profile(profile: Profile) -> Sim {
    sim(|config| {
        config.profile = profile;
        config.connector = Connector::Offloading;
    })
    .await
}

#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: String,
}

impl Reply {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|_| panic!("no JSON: {}", self.body))
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }
}

/// An open exchange: the request is sent, the answer not yet read.
pub(crate) struct Exchange {
    stream: BufReader<TcpStream>,
}

impl Exchange {
    pub(crate) async fn send(
        sim: &Sim,
        method: &str,
        path: &str,
        headers: &str,
        body: &[u8],
    ) -> Self {
        let base = sim.base_url();
        let address = base.strip_prefix("http://").unwrap();
        let mut stream = TcpStream::connect(address).await.unwrap();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{headers}\
             content-length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        stream.write_all(body).await.unwrap();
        Self { stream: BufReader::new(stream) }
    }

    /// Reads until this text has come, the head included.
    pub(crate) async fn until(&mut self, text: &str) -> String {
        let mut seen = Vec::new();
        soon(async {
            while !String::from_utf8_lossy(&seen).contains(text) {
                let byte = self.stream.read_u8().await.expect("the text never came");
                seen.push(byte);
            }
        })
        .await;
        String::from_utf8(seen).unwrap()
    }

    /// Reads to the end. A cut connection ends the body too.
    pub(crate) async fn reply(mut self) -> Reply {
        let mut bytes = Vec::new();
        let _ = soon(self.stream.read_to_end(&mut bytes)).await;
        let text = String::from_utf8(bytes).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
        let mut lines = head.lines();
        let status = lines.next().and_then(|line| line.split(' ').nth(1)).unwrap_or("0");
        let headers: Vec<(String, String)> = lines
            .filter_map(|line| line.split_once(": "))
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .collect();
        let chunked = headers.iter().any(|(_, value)| value == "chunked");
        let body = if chunked { unchunked(body) } else { body.to_owned() };
        Reply { status: status.parse().unwrap(), headers, body }
    }
}

fn unchunked(mut rest: &str) -> String {
    let mut body = String::new();
    while let Some((size, tail)) = rest.split_once("\r\n") {
        let size = usize::from_str_radix(size, 16).unwrap();
        if size == 0 || size > tail.len() {
            break;
        }
        body.push_str(&tail[..size]);
        rest = tail[size..].trim_start_matches("\r\n");
    }
    body
}

pub(crate) async fn get(sim: &Sim, path: &str) -> Reply {
    Exchange::send(sim, "GET", path, "", b"").await.reply().await
}

pub(crate) async fn post(sim: &Sim, path: &str, body: &Value) -> Reply {
    begin(sim, path, body).await.reply().await
}

pub(crate) async fn control(sim: &Sim, path: &str) -> Reply {
    Exchange::send(sim, "POST", path, "", b"").await.reply().await
}

pub(crate) async fn begin(sim: &Sim, path: &str, body: &Value) -> Exchange {
    let kind = "content-type: application/json\r\n";
    Exchange::send(sim, "POST", path, kind, body.to_string().as_bytes()).await
}

pub(crate) fn prompt(first: u32, count: u32) -> Value {
    (first..first + count).collect()
}

/// A completion over token ids.
pub(crate) fn ask(first: u32, count: u32, max_tokens: u32) -> Value {
    json!({"prompt": prompt(first, count), "max_tokens": max_tokens, "temperature": 0})
}

pub(crate) async fn complete(sim: &Sim, first: u32, count: u32, max_tokens: u32) -> Value {
    let reply = post(sim, "/v1/completions", &ask(first, count, max_tokens)).await;
    assert_eq!(reply.status, 200, "{}", reply.body);
    soon(sim.at_rest()).await;
    reply.json()
}

pub(crate) fn cached(answer: &Value) -> &Value {
    &answer["usage"]["prompt_tokens_details"]["cached_tokens"]
}

/// One value of `/metrics`, summed over its series that contain `label`.
pub(crate) async fn metric(sim: &Sim, name: &str, label: &str) -> f64 {
    let text = get(sim, "/metrics").await.body;
    text.lines()
        .filter(|line| line.starts_with(&format!("{name}{{")) && line.contains(label))
        .map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap())
        .sum()
}

/// Polls until a metric has a value; the engine's gauges change with its steps.
pub(crate) async fn metric_becomes(sim: &Sim, name: &str, value: f64) {
    soon(async { while metric(sim, name, "").await != value {} }).await;
}

/// Waits until this many requests have not ended.
pub(crate) async fn in_flight(sim: &Sim, count: usize) {
    soon(async {
        while sim.requests_in_flight() != count {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

/// A message as the subscriber got it.
#[derive(Clone, Debug)]
pub(crate) struct Batch {
    pub(crate) topic: Vec<u8>,
    pub(crate) seq: u64,
    pub(crate) payload: Vec<u8>,
}

impl Batch {
    pub(crate) fn value(&self) -> Msg {
        rmpv::decode::read_value(&mut self.payload.as_slice()).unwrap()
    }

    pub(crate) fn events(&self) -> Vec<Msg> {
        self.value()[1].as_array().unwrap().clone()
    }

    /// Tags with the medium's first letter, such as `BlockStored-G`.
    pub(crate) fn shape(&self) -> Vec<String> {
        self.events()
            .iter()
            .map(|event| {
                let tag = event["type"].as_str().unwrap();
                let medium = event["medium"].as_str().unwrap_or_default();
                format!("{tag}-{}", medium.get(..1).unwrap_or_default())
            })
            .collect()
    }
}

pub(crate) struct Events(SubSocket);

impl Events {
    /// Subscribes, and waits until the subscription has taken effect by provoking batches.
    pub(crate) async fn of(sim: &Sim) -> Self {
        Self::at(sim, &sim.kv_events_endpoint()).await
    }

    pub(crate) async fn at(sim: &Sim, endpoint: &str) -> Self {
        let mut socket = SubSocket::new();
        socket.connect(endpoint).await.unwrap();
        socket.subscribe("kv@").await.unwrap();
        let mut events = Self(socket);
        // Prompts of one block, never used otherwise, until one of their batches arrives.
        for first in (0..).map(|n| n * 16) {
            complete_on(sim, endpoint, first).await;
            let wait = Duration::from_millis(50);
            if let Ok(mut batch) = tokio::time::timeout(wait, events.next()).await {
                let done = last_seq(sim, endpoint).await;
                while batch.seq < done {
                    batch = events.next().await;
                }
                return events;
            }
        }
        unreachable!("the loop has no end")
    }

    pub(crate) async fn next(&mut self) -> Batch {
        let frames = soon(self.0.recv()).await.unwrap().into_vec();
        let [topic, seq, payload] = frames.as_slice() else { panic!("not three frames") };
        let seq = u64::from_be_bytes(seq.as_ref().try_into().unwrap());
        Batch { topic: topic.to_vec(), seq, payload: payload.to_vec() }
    }
}

async fn complete_on(sim: &Sim, endpoint: &str, first: u32) {
    let rank = usize::from(endpoint != sim.kv_events_endpoint());
    let header = format!("content-type: application/json\r\nx-data-parallel-rank: {rank}\r\n");
    let mut tokens: Vec<u32> = vec![4000; 16];
    tokens[0] = 2000 + first / 16;
    let body = json!({"prompt": tokens, "max_tokens": 1, "temperature": 0}).to_string();
    Exchange::send(sim, "POST", "/v1/completions", &header, body.as_bytes()).await.reply().await;
}

async fn last_seq(sim: &Sim, endpoint: &str) -> u64 {
    let replay = if endpoint == sim.kv_events_endpoint() {
        sim.replay_endpoint()
    } else {
        sim.replay_endpoint_of(1).unwrap()
    };
    replayed(&replay, &[0]).await.iter().filter_map(|frames| seq_of(frames)).max().unwrap()
}

/// The number in a replayed message; none for the end marker.
pub(crate) fn seq_of(frames: &[Vec<u8>]) -> Option<u64> {
    let seq = u64::from_be_bytes(frames[frames.len() - 2].as_slice().try_into().unwrap());
    (seq != u64::MAX).then_some(seq)
}

/// All messages of a replay, the end marker included.
pub(crate) async fn replayed(endpoint: &str, start: &[u8]) -> Vec<Vec<Vec<u8>>> {
    let mut dealer = DealerSocket::new();
    dealer.connect(endpoint).await.unwrap();
    ask_replay(&mut dealer, start).await;
    let mut messages = Vec::new();
    loop {
        let frames = soon(dealer.recv()).await.unwrap().into_vec();
        let frames: Vec<Vec<u8>> = frames.iter().map(|frame| frame.to_vec()).collect();
        let is_end = seq_of(&frames).is_none();
        messages.push(frames);
        if is_end {
            return messages;
        }
    }
}

pub(crate) async fn ask_replay(dealer: &mut DealerSocket, start: &[u8]) {
    let frames = vec![bytes::Bytes::new(), bytes::Bytes::copy_from_slice(start)];
    dealer.send(ZmqMessage::try_from(frames).unwrap()).await.unwrap();
}

fn fixtures() -> std::path::PathBuf {
    std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/vllm-0.32")
}

pub(crate) fn recording(path: &str) -> Vec<u8> {
    std::fs::read(fixtures().join(path)).unwrap()
}

/// Frames of a recorded event file, in messages of `count` frames.
pub(crate) fn recorded_messages(name: &str, count: usize) -> Vec<Vec<Vec<u8>>> {
    let bytes = recording(&format!("kv-events/{name}"));
    let mut rest = bytes.as_slice();
    let mut frames = Vec::new();
    while !rest.is_empty() {
        let (size, tail) = rest.split_at(4);
        let size = u32::from_be_bytes(size.try_into().unwrap()) as usize;
        frames.push(tail[..size].to_vec());
        rest = &tail[size..];
    }
    frames.chunks(count).map(<[_]>::to_vec).collect()
}

/// A recorded exchange.
pub(crate) fn exchange(name: &str) -> (Value, Value) {
    let mut value: Value =
        serde_json::from_slice(&recording(&format!("http/{name}.json"))).unwrap();
    (value["request"].take(), value["response"].take())
}
