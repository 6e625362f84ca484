//! A server that plays a script: for each request, bytes, and then what happens to the connection.

use std::net::SocketAddr;
use std::sync::Arc;

use fak::runtime::{OnExit, TaskGroup};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;

/// What a test may leave untaken: more, and the peer waits for it.
const SEEN_MAX: usize = 1 << 16;

/// What the peer does with a request.
pub(crate) enum Reply {
    /// Sends the bytes and takes the next request.
    Send(Vec<u8>),
    /// Sends the bytes and closes.
    SendAndClose(Vec<u8>),
    /// Sends the bytes, then says nothing until the client is gone.
    SendAndHold(Vec<u8>),
    /// Ends the connection by a reset, without a byte.
    Reset,
    /// Sends what the test hands over, each piece by itself, and takes the next request.
    Steps(mpsc::Receiver<Vec<u8>>),
}

/// A request as it came.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    /// Method, target, headers.
    pub(crate) head: String,
    /// The body.
    pub(crate) body: Vec<u8>,
}

impl Request {
    /// `POST /sleep?level=2`.
    pub(crate) fn line(&self) -> &str {
        let line = self.head.lines().next().expect("a request line");
        line.strip_suffix(" HTTP/1.1").expect("HTTP/1.1")
    }

    /// A header's value.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().skip(1).find_map(|line| {
            let (key, value) = line.split_once(':')?;
            key.eq_ignore_ascii_case(name).then(|| value.trim())
        })
    }

    /// The body as JSON.
    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).expect("JSON")
    }
}

/// What the peer saw.
#[derive(Debug)]
pub(crate) enum Seen {
    /// A request came.
    Request(Request),
    /// The client left while the peer held its connection.
    ClientGone,
}

/// The server. Dropping it closes everything.
pub(crate) struct Peer {
    address: SocketAddr,
    /// Most tests read nothing of it, and a full one would hold up the answers.
    seen: mpsc::Receiver<Seen>,
    _tasks: TaskGroup,
}

impl Peer {
    /// Starts a peer that answers with `script`.
    pub(crate) async fn start(script: impl Fn(&Request) -> Reply + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("bound");
        let (tell, seen) = mpsc::channel(SEEN_MAX);
        let script = Arc::new(script);
        let mut tasks = TaskGroup::new();
        tasks.spawn("peer", OnExit::StopProcess, async move {
            let mut connections = TaskGroup::new();
            while let Ok((stream, _)) = listener.accept().await {
                let connection = serve(stream, Arc::clone(&script), tell.clone());
                connections.spawn("connection", OnExit::Report, connection);
            }
        });
        Self { address, seen, _tasks: tasks }
    }

    /// Its base URL.
    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// The next thing it sees.
    pub(crate) async fn next(&mut self) -> Seen {
        self.seen.recv().await.expect("the peer lives as long as the test")
    }

    /// The next request; panics if something else is seen.
    pub(crate) async fn request(&mut self) -> Request {
        match self.next().await {
            Seen::Request(request) => request,
            Seen::ClientGone => panic!("the client left instead of asking"),
        }
    }

    /// Waits until the client left.
    pub(crate) async fn client_gone(&mut self) {
        match self.next().await {
            Seen::ClientGone => {}
            Seen::Request(request) => panic!("asked instead of leaving: {}", request.line()),
        }
    }

    /// Requests seen so far and not taken yet.
    pub(crate) fn requests_so_far(&mut self) -> Vec<Request> {
        let mut requests = Vec::new();
        while let Ok(seen) = self.seen.try_recv() {
            if let Seen::Request(request) = seen {
                requests.push(request);
            }
        }
        requests
    }
}

async fn serve<S>(mut stream: TcpStream, script: Arc<S>, tell: mpsc::Sender<Seen>)
where
    S: Fn(&Request) -> Reply,
{
    while let Some(request) = read_request(&mut stream).await {
        let reply = script(&request);
        if tell.send(Seen::Request(request)).await.is_err() {
            return;
        }
        let (bytes, then) = match reply {
            Reply::Steps(steps) => match walk(&mut stream, steps).await {
                Some(()) => continue,
                None => {
                    // The test may be over by now.
                    let _ = tell.send(Seen::ClientGone).await;
                    return;
                }
            },
            Reply::Reset => {
                // A system that has no such option closes, which is as good an end.
                let _ = stream.set_zero_linger();
                return;
            }
            Reply::Send(bytes) => (bytes, None),
            Reply::SendAndClose(bytes) => (bytes, Some(false)),
            Reply::SendAndHold(bytes) => (bytes, Some(true)),
        };
        if stream.write_all(&bytes).await.is_err() {
            return;
        }
        match then {
            None => {}
            Some(false) => return,
            Some(true) => {
                let end = stream.read(&mut [0; 64]).await;
                assert!(matches!(end, Ok(0) | Err(_)), "a held client says nothing more");
                // The test may be over by now.
                let _ = tell.send(Seen::ClientGone).await;
                return;
            }
        }
    }
}

/// Sends each piece as it comes; `None` where the client left meanwhile.
async fn walk(stream: &mut TcpStream, mut steps: mpsc::Receiver<Vec<u8>>) -> Option<()> {
    loop {
        let mut nothing = [0; 1];
        tokio::select! {
            step = steps.recv() => match step {
                Some(bytes) => stream.write_all(&bytes).await.ok()?,
                None => return Some(()),
            },
            end = stream.read(&mut nothing) => {
                assert!(matches!(end, Ok(0) | Err(_)), "a waiting client says nothing more");
                return None;
            }
        }
    }
}

async fn read_request(stream: &mut TcpStream) -> Option<Request> {
    let mut bytes = Vec::new();
    loop {
        if let Some(end) = bytes.windows(4).position(|window| window == b"\r\n\r\n") {
            let head = String::from_utf8(bytes[..end].to_vec()).expect("an ASCII head");
            let mut request = Request { head, body: bytes.split_off(end + 4) };
            let length =
                request.header("content-length").map_or(0, |n| n.parse().expect("a number"));
            let mut rest = vec![0; length - request.body.len()];
            stream.read_exact(&mut rest).await.ok()?;
            request.body.append(&mut rest);
            return Some(request);
        }
        let mut chunk = [0; 4096];
        match stream.read(&mut chunk).await {
            Ok(0) | Err(_) => return None,
            Ok(length) => bytes.extend_from_slice(&chunk[..length]),
        }
    }
}

/// A whole answer.
pub(crate) fn answer(status: &str, content_type: &str, body: &str) -> Vec<u8> {
    let length = body.len();
    let head = format!("content-type: {content_type}\r\ncontent-length: {length}");
    format!("HTTP/1.1 {status}\r\n{head}\r\n\r\n{body}").into_bytes()
}

/// A whole JSON answer.
pub(crate) fn json(status: &str, body: &str) -> Vec<u8> {
    answer(status, "application/json", body)
}

/// The head of a stream, as vLLM sends it.
pub(crate) const STREAM_HEAD: &str = "HTTP/1.1 200 OK\r\n\
    content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n";

/// A stream's head and these bytes as one chunk each; not ended.
pub(crate) fn stream(chunks: &[&str]) -> Vec<u8> {
    let mut bytes = STREAM_HEAD.as_bytes().to_vec();
    for chunk in chunks {
        bytes.extend_from_slice(format!("{:x}\r\n{chunk}\r\n", chunk.len()).as_bytes());
    }
    bytes
}

/// A whole stream.
pub(crate) fn whole_stream(chunks: &[&str]) -> Vec<u8> {
    let mut bytes = stream(chunks);
    bytes.extend_from_slice(b"0\r\n\r\n");
    bytes
}
