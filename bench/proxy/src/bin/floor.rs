//! Yardsticks, not products: the least a Rust proxy does between a client and two workers.
//! No JSON is read, nothing is retried, counted or logged; requests go round robin.
//!
//!   floor --mode hyper|raw --port P --workers 127.0.0.1:9101,127.0.0.1:9102
//!
//! `hyper`: a hyper server and hyper-util's pooled client on a two-thread tokio runtime, bodies
//! passed on frame by frame. `raw`: one single-threaded runtime per core (SO_REUSEPORT), heads
//! read with httparse and every byte forwarded as it was read, one write for each read.

use std::{
    cell::{Cell, RefCell},
    io,
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use hyper::{Request, Uri, body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::{TokioExecutor, TokioIo},
};
use proxybench::flag_or;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpSocket, TcpStream},
};

fn main() {
    let port: u16 = flag_or("--port", 9400);
    let workers: String = flag_or("--workers", "127.0.0.1:9101".to_string());
    let workers: Arc<[String]> = workers.split(',').map(str::to_string).collect();
    match flag_or("--mode", "raw".to_string()).as_str() {
        "hyper" => tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap()
            .block_on(run_hyper(listen(port), workers)),
        _ => {
            let threads: Vec<_> = (0..2)
                .map(|_| {
                    let workers = workers.clone();
                    std::thread::spawn(move || {
                        let listener = listen(port);
                        let runtime = tokio::runtime::Builder::new_current_thread()
                            .enable_all()
                            .build()
                            .unwrap();
                        tokio::task::LocalSet::new().block_on(&runtime, run_raw(listener, workers));
                    })
                })
                .collect();
            threads.into_iter().for_each(|t| t.join().unwrap());
        }
    }
}

/// Within a runtime of its own, so that each thread of `raw` has its listener.
fn listen(port: u16) -> std::net::TcpListener {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let _guard = runtime.enter();
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_reuseport(true).unwrap();
    socket.set_reuseaddr(true).unwrap();
    socket.bind(([127, 0, 0, 1], port).into()).expect("bind");
    socket.listen(4096).unwrap().into_std().unwrap()
}

async fn run_hyper(listener: std::net::TcpListener, workers: Arc<[String]>) {
    let listener = TcpListener::from_std(listener).unwrap();
    let mut connector = HttpConnector::new();
    connector.set_nodelay(true);
    let client: Client<_, Incoming> = Client::builder(TokioExecutor::new()).build(connector);
    let next = Arc::new(AtomicUsize::new(0));
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            continue;
        };
        let _ = stream.set_nodelay(true);
        let (client, next, workers) = (client.clone(), next.clone(), workers.clone());
        tokio::spawn(async move {
            let service = service_fn(move |mut request: Request<Incoming>| {
                let worker = &workers[next.fetch_add(1, Ordering::Relaxed) % workers.len()];
                let path = request.uri().path_and_query().map_or("/", |p| p.as_str());
                *request.uri_mut() = format!("http://{worker}{path}").parse::<Uri>().unwrap();
                client.request(request)
            });
            let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
        });
    }
}

struct Pool {
    workers: Arc<[String]>,
    next: Cell<usize>,
    idle: Vec<RefCell<Vec<TcpStream>>>,
}

async fn run_raw(listener: std::net::TcpListener, workers: Arc<[String]>) {
    let listener = TcpListener::from_std(listener).unwrap();
    let pool = Rc::new(Pool {
        idle: workers.iter().map(|_| RefCell::default()).collect(),
        workers,
        next: Cell::new(0),
    });
    loop {
        let Ok((mut stream, _)) = listener.accept().await else {
            continue;
        };
        let _ = stream.set_nodelay(true);
        let pool = pool.clone();
        tokio::task::spawn_local(async move {
            while let Ok(true) = exchange(&mut stream, &pool).await {}
        });
    }
}

/// A head at the start of `bytes`: its length, and how the body that follows is framed.
fn head(bytes: &[u8], response: bool) -> io::Result<Option<(usize, Framing)>> {
    let mut headers = [httparse::EMPTY_HEADER; 64];
    let (status, headers) = if response {
        let mut parsed = httparse::Response::new(&mut headers);
        (parsed.parse(bytes).map_err(io::Error::other)?, parsed.headers)
    } else {
        let mut parsed = httparse::Request::new(&mut headers);
        (parsed.parse(bytes).map_err(io::Error::other)?, parsed.headers)
    };
    let httparse::Status::Complete(length) = status else {
        return Ok(None);
    };
    let mut framing = Framing::Length(0);
    for header in headers.iter() {
        if header.name.eq_ignore_ascii_case("content-length") {
            let text = std::str::from_utf8(header.value).unwrap_or("");
            framing = Framing::Length(text.parse().map_err(io::Error::other)?);
        } else if header.name.eq_ignore_ascii_case("transfer-encoding") {
            framing = Framing::Chunked(Chunks::default());
        }
    }
    Ok(Some((length, framing)))
}

enum Framing {
    Length(usize),
    Chunked(Chunks),
}

/// Where in a chunked body the reader is: the size line being read, or bytes left to skip.
#[derive(Default)]
struct Chunks {
    size: usize,
    skip: usize,
    last: bool,
    extension: bool,
}

impl Framing {
    /// Account for body bytes; true once the body is complete.
    fn advance(&mut self, bytes: &[u8]) -> bool {
        match self {
            Framing::Length(left) => {
                *left = left.saturating_sub(bytes.len());
                *left == 0
            }
            Framing::Chunked(c) => {
                let mut at = 0;
                while at < bytes.len() {
                    if c.skip > 0 {
                        let step = c.skip.min(bytes.len() - at);
                        c.skip -= step;
                        at += step;
                        if c.last && c.skip == 0 {
                            return true;
                        }
                        continue;
                    }
                    match bytes[at] {
                        b'\n' => {
                            c.last = c.size == 0;
                            c.skip = c.size + 2;
                            c.size = 0;
                            c.extension = false;
                        }
                        b';' => c.extension = true,
                        digit if !c.extension => {
                            if let Some(value) = (digit as char).to_digit(16) {
                                c.size = c.size * 16 + value as usize;
                            }
                        }
                        _ => {}
                    }
                    at += 1;
                }
                false
            }
        }
    }
}

/// Copy one message from `from` to `to`; false when `from` closed before it began.
async fn forward(
    from: &mut TcpStream,
    to: &mut TcpStream,
    response: bool,
    buffer: &mut [u8],
) -> io::Result<bool> {
    let mut filled = 0;
    let (length, mut framing) = loop {
        let n = from.read(&mut buffer[filled..]).await?;
        if n == 0 {
            return if filled == 0 { Ok(false) } else { Err(io::ErrorKind::UnexpectedEof.into()) };
        }
        filled += n;
        if let Some(found) = head(&buffer[..filled], response)? {
            break found;
        }
    };
    let mut done = framing.advance(&buffer[length..filled]);
    to.write_all(&buffer[..filled]).await?;
    while !done {
        let n = from.read(buffer).await?;
        if n == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        done = framing.advance(&buffer[..n]);
        to.write_all(&buffer[..n]).await?;
    }
    Ok(true)
}

async fn exchange(client: &mut TcpStream, pool: &Pool) -> io::Result<bool> {
    client.readable().await?;
    let number = pool.next.get() % pool.workers.len();
    pool.next.set(number + 1);
    let idle = pool.idle[number].borrow_mut().pop();
    let mut worker = match idle {
        Some(worker) => worker,
        None => {
            let worker = TcpStream::connect(&pool.workers[number]).await?;
            worker.set_nodelay(true)?;
            worker
        }
    };
    let mut buffer = vec![0; 16 << 10];
    let alive = forward(client, &mut worker, false, &mut buffer).await?
        && forward(&mut worker, client, true, &mut buffer).await?;
    pool.idle[number].borrow_mut().push(worker);
    Ok(alive)
}
