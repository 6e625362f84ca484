//! What stands at the other end in these tests: a publisher and a replay socket as vLLM has them,
//! made from the `zeromq` crate's sockets (an independent implementation), and a peer that plays
//! bytes by hand.

use std::net::SocketAddr;
use std::path::Path;

use bytes::Bytes;
use fak::events::Endpoint;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use zeromq::{RouterSocket, Socket, SocketRecv, SocketSend, XPubSocket, ZmqMessage};

pub(crate) fn endpoint(port: u16) -> Endpoint {
    Endpoint { host: "127.0.0.1".to_owned(), port }
}

fn message<const N: usize>(frames: [Bytes; N]) -> ZmqMessage {
    ZmqMessage::try_from(frames.to_vec()).expect("has frames")
}

fn port_of(endpoint: &zeromq::Endpoint) -> u16 {
    match endpoint {
        zeromq::Endpoint::Tcp(_, port) => *port,
        other => panic!("{other}"),
    }
}

/// A publisher. An XPUB, so that a test can wait for the subscription to have arrived.
pub(crate) struct Publisher {
    socket: XPubSocket,
    pub(crate) port: u16,
}

impl Publisher {
    pub(crate) async fn bind(port: u16) -> Self {
        let mut socket = XPubSocket::new();
        let bound = socket.bind(&format!("tcp://127.0.0.1:{port}")).await.unwrap();
        Self { socket, port: port_of(&bound) }
    }

    /// Dies: the port is free and every connection is over when this returns or soon after.
    pub(crate) async fn kill(self) {
        assert!(self.socket.close().await.is_empty());
    }

    /// Waits for the next subscription and returns its topic.
    pub(crate) async fn subscribed(&mut self) -> Bytes {
        loop {
            let frames = self.socket.recv().await.unwrap().into_vec();
            if frames[0][0] == 1 {
                return frames[0].slice(1..);
            }
        }
    }

    pub(crate) async fn publish(&mut self, seq: u64, payload: &str) {
        let seq = Bytes::copy_from_slice(&seq.to_be_bytes());
        self.send([
            Bytes::from_static(b"kv@tiny"),
            seq,
            Bytes::copy_from_slice(payload.as_bytes()),
        ])
        .await;
    }

    pub(crate) async fn send<const N: usize>(&mut self, frames: [Bytes; N]) {
        self.socket.send(message(frames)).await.unwrap();
    }
}

/// A replay socket: takes requests and answers what the test says.
pub(crate) struct Router {
    socket: RouterSocket,
    pub(crate) port: u16,
}

/// One request: who asked, and from where on.
pub(crate) struct Asked {
    client: Bytes,
    pub(crate) from: u64,
}

impl Router {
    pub(crate) async fn bind(port: u16) -> Self {
        let mut socket = RouterSocket::new();
        let bound = socket.bind(&format!("tcp://127.0.0.1:{port}")).await.unwrap();
        Self { socket, port: port_of(&bound) }
    }

    /// Dies, as [`Publisher::kill`] does.
    pub(crate) async fn kill(self) {
        assert!(self.socket.close().await.is_empty());
    }

    /// The next request. Strict as vLLM is: other than three frames with an empty one in the middle
    /// is ignored there.
    pub(crate) async fn asked(&mut self) -> Asked {
        let frames = self.socket.recv().await.unwrap().into_vec();
        let [client, delimiter, from]: [Bytes; 3] = frames.try_into().unwrap();
        assert_eq!(delimiter, "");
        let from = u64::from_be_bytes(from[..].try_into().unwrap());
        Asked { client, from }
    }

    /// Sends one answer of `frames`, the empty delimiter included.
    pub(crate) async fn answer(&mut self, asked: &Asked, frames: &[Bytes]) {
        let mut all = vec![asked.client.clone()];
        all.extend_from_slice(frames);
        self.socket.send(ZmqMessage::try_from(all).unwrap()).await.unwrap();
    }

    /// Sends one batch as vLLM does since 0.26.0.
    pub(crate) async fn batch(&mut self, asked: &Asked, seq: u64, payload: &[u8]) {
        let seq = Bytes::copy_from_slice(&seq.to_be_bytes());
        let payload = Bytes::copy_from_slice(payload);
        let frames = [Bytes::new(), Bytes::from_static(b"kv@tiny"), seq, payload];
        self.answer(asked, &frames).await;
    }

    /// Sends the end marker as vLLM does since 0.26.0.
    pub(crate) async fn end(&mut self, asked: &Asked) {
        let end = Bytes::from_static(&[0xff; 8]);
        self.answer(asked, &[Bytes::new(), Bytes::new(), end, Bytes::new()]).await;
    }
}

/// A listener whose other side is played by hand.
pub(crate) struct Script {
    listener: TcpListener,
    pub(crate) port: u16,
}

impl Script {
    pub(crate) async fn bind() -> Self {
        let listener = TcpListener::bind(SocketAddr::from(([127, 0, 0, 1], 0))).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        Self { listener, port }
    }

    pub(crate) async fn accept(&self) -> TcpStream {
        self.listener.accept().await.unwrap().0
    }

    /// Accepts, and shakes hands as a socket of type `kind`.
    pub(crate) async fn accept_as(&self, kind: &str) -> TcpStream {
        let mut stream = self.accept().await;
        stream.write_all(&greeting(3, "NULL")).await.unwrap();
        stream.write_all(&ready(kind)).await.unwrap();
        // Its greeting and its READY command: 0x04, length, body.
        let mut theirs = [0; 66];
        stream.read_exact(&mut theirs).await.unwrap();
        let mut body = vec![0; usize::from(theirs[65])];
        stream.read_exact(&mut body).await.unwrap();
        stream
    }
}

pub(crate) fn greeting(major: u8, mechanism: &str) -> Vec<u8> {
    let mut bytes = vec![0; 64];
    bytes[0] = 0xff;
    bytes[9] = 0x7f;
    bytes[10] = major;
    bytes[12..12 + mechanism.len()].copy_from_slice(mechanism.as_bytes());
    bytes
}

pub(crate) fn ready(kind: &str) -> Vec<u8> {
    let mut body = b"\x05READY\x0bSocket-Type\0\0\0".to_vec();
    body.push(u8::try_from(kind.len()).unwrap());
    body.extend_from_slice(kind.as_bytes());
    let mut bytes = vec![0x04, u8::try_from(body.len()).unwrap()];
    bytes.append(&mut body);
    bytes
}

/// The frames of one short message, as bytes on the wire.
pub(crate) fn wire(frames: &[&[u8]]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (index, frame) in frames.iter().enumerate() {
        bytes.push(u8::from(index + 1 < frames.len()));
        bytes.push(u8::try_from(frame.len()).unwrap());
        bytes.extend_from_slice(frame);
    }
    bytes
}

/// The recorded messages of `fixtures/<path>`, each of `frames` frames (`u32 big-endian length` and
/// bytes).
pub(crate) fn recorded(path: &str, frames: usize) -> Vec<Vec<Bytes>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures");
    let mut bytes = Bytes::from(std::fs::read(root.join(path)).unwrap());
    let mut all = Vec::new();
    while !bytes.is_empty() {
        let length = u32::from_be_bytes(bytes.split_to(4)[..].try_into().unwrap());
        all.push(bytes.split_to(usize::try_from(length).unwrap()));
    }
    assert_eq!(all.len() % frames, 0, "{path}");
    all.chunks(frames).map(<[Bytes]>::to_vec).collect()
}

/// A TCP relay whose connections can stop to forward what comes from behind it, and close nothing.
pub(crate) struct Relay {
    listener: std::net::TcpListener,
    to: u16,
}

/// A relay that runs.
pub(crate) struct Relaying {
    /// Connections before this one bring nothing any more.
    stalled: tokio::sync::watch::Sender<usize>,
    connections: std::sync::Arc<std::sync::atomic::AtomicUsize>,
    _tasks: fak::runtime::TaskGroup,
}

impl Relay {
    /// One to the port `to` of this host, and its own port.
    pub(crate) fn bind(to: u16) -> (Self, u16) {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let port = listener.local_addr().unwrap().port();
        (Self { listener, to }, port)
    }

    pub(crate) fn run(self) -> Relaying {
        let listener = TcpListener::from_std(self.listener).unwrap();
        let stalled = tokio::sync::watch::Sender::new(0);
        let connections = std::sync::Arc::default();
        let (stalls, counted) = (stalled.clone(), std::sync::Arc::clone(&connections));
        let mut tasks = fak::runtime::TaskGroup::new();
        tasks.spawn("relay", fak::runtime::OnExit::Report, async move {
            let mut open = tokio::task::JoinSet::new();
            while let Ok((near, _)) = listener.accept().await {
                let far = TcpStream::connect(("127.0.0.1", self.to)).await.unwrap();
                let number = std::sync::atomic::AtomicUsize::fetch_add(
                    &counted,
                    1,
                    std::sync::atomic::Ordering::SeqCst,
                );
                open.spawn(relay(near, far, number, stalls.subscribe()));
            }
        });
        Relaying { stalled, connections, _tasks: tasks }
    }
}

impl Relaying {
    /// From here on the connections of now bring nothing.
    pub(crate) fn stall(&self) {
        self.stalled.send_replace(self.connections());
    }

    pub(crate) fn connections(&self) -> usize {
        self.connections.load(std::sync::atomic::Ordering::SeqCst)
    }
}

/// Drops what it reads once it is stalled.
async fn relay(
    near: TcpStream,
    far: TcpStream,
    number: usize,
    stalled: tokio::sync::watch::Receiver<usize>,
) {
    let (mut near_read, mut near_write) = near.into_split();
    let (mut far_read, mut far_write) = far.into_split();
    let there = tokio::io::copy(&mut near_read, &mut far_write);
    let back = async {
        let mut buffer = vec![0; 1 << 16];
        loop {
            let Ok(read @ 1..) = far_read.read(&mut buffer).await else { return };
            let is_stalled = number < *stalled.borrow();
            if !is_stalled && near_write.write_all(&buffer[..read]).await.is_err() {
                return;
            }
        }
    };
    tokio::select! { _ = there => {}, () = back => {} }
}
