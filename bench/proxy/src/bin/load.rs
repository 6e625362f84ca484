//! Closed-loop or fixed-rate client for an OpenAI-shaped endpoint.
//!
//!   load --addr 127.0.0.1:9000[,127.0.0.1:9001] --conns C [--requests R] [--seconds S]
//!        [--rate RPS] [--body BYTES] [--stream CHUNKS] [--delay MS] [--ramp MS]
//!        [--warmup N] [--path /v1/chat/completions] [--pid P] [--label TEXT]
//!
//! One line of tab-separated results (`--header` prints the column names). Every connection is
//! kept alive and used for one request at a time. With `--rate`, each connection follows its own
//! schedule and latency counts from the scheduled time (when that is over 2 ms ago), so a stalled
//! proxy cannot hide its queue.
//! The prompt is ASCII words; its first 90% is shared by all requests, the rest is unique.
//! With `--pid`, CPU seconds and peak RSS of that process and its descendants are read from /proc.

use std::{
    cell::{Cell, RefCell},
    io,
    rc::Rc,
    time::Duration,
};

use memchr::memmem;
use proxybench::{STAMP, STAMP_DIGITS, flag, flag_or, now_ns, switch};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::{Instant, sleep_until},
};

/// Log-linear histogram of nanoseconds, 64 steps per octave (about 1.1% wide).
struct Histogram {
    counts: Vec<u64>,
    total: u64,
}

const STEP_BITS: u32 = 6;

impl Histogram {
    fn new() -> Self {
        Self { counts: vec![0; 64 << STEP_BITS], total: 0 }
    }

    fn record(&mut self, ns: u64) {
        let ns = ns.max(1 << STEP_BITS);
        let octave = 63 - ns.leading_zeros();
        let step = (ns >> (octave - STEP_BITS)) as usize & ((1 << STEP_BITS) - 1);
        self.counts[((octave as usize) << STEP_BITS) + step] += 1;
        self.total += 1;
    }

    fn quantile_ms(&self, q: f64) -> f64 {
        let target = (self.total as f64 * q).ceil() as u64;
        let mut seen = 0;
        for (slot, count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= target && *count > 0 {
                let octave = (slot >> STEP_BITS) as u32;
                let step = (slot & ((1 << STEP_BITS) - 1)) as u64;
                return (((1 << STEP_BITS) + step) << (octave - STEP_BITS)) as f64 / 1e6;
            }
        }
        f64::NAN
    }
}

/// CPU seconds and memory of a process and its descendants, from /proc.
struct Usage {
    pids: Vec<u32>,
}

impl Usage {
    fn of(root: u32) -> Self {
        let mut parents = Vec::new();
        for entry in std::fs::read_dir("/proc").unwrap().flatten() {
            if let Some(pid) = entry.file_name().to_str().and_then(|n| n.parse::<u32>().ok())
                && let Some(fields) = stat(pid)
            {
                parents.push((pid, fields[1].parse::<u32>().unwrap_or(0)));
            }
        }
        let mut pids = vec![root];
        let mut next = 0;
        while next < pids.len() {
            let parent = pids[next];
            pids.extend(parents.iter().filter(|(_, p)| *p == parent).map(|(pid, _)| *pid));
            next += 1;
        }
        // Reset the peak so that this run's own is read at the end.
        for pid in &pids {
            let _ = std::fs::write(format!("/proc/{pid}/clear_refs"), "5");
        }
        Self { pids }
    }

    /// (user, system) CPU seconds so far.
    fn cpu(&self) -> (f64, f64) {
        let hz = unsafe { libc::sysconf(libc::_SC_CLK_TCK) } as f64;
        let sum = |at: usize| {
            self.pids
                .iter()
                .filter_map(|pid| stat(*pid))
                .map(|f| f[at].parse::<f64>().unwrap_or(0.0) / hz)
                .sum::<f64>()
        };
        (sum(11), sum(12))
    }

    fn peak_rss_mb(&self) -> f64 {
        self.pids
            .iter()
            .filter_map(|pid| std::fs::read_to_string(format!("/proc/{pid}/status")).ok())
            .filter_map(|text| {
                let line = text.lines().find(|l| l.starts_with("VmHWM:"))?.to_string();
                line.split_whitespace().nth(1)?.parse::<f64>().ok()
            })
            .sum::<f64>()
            / 1024.0
    }
}

/// Fields of /proc/PID/stat from the state on (index 0), so ppid is 1, utime 11, stime 12.
fn stat(pid: u32) -> Option<Vec<String>> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let rest = &text[text.rfind(')')? + 2..];
    Some(rest.split_whitespace().map(str::to_string).collect())
}

struct Config {
    addrs: Vec<String>,
    head: String,
    body: Vec<u8>,
    nonce_at: usize,
    chunks: u64,
    stop: Cell<Option<Instant>>,
    budget: Cell<u64>,
    nonce: Cell<u64>,
}

struct Totals {
    latency: Histogram,
    first: Histogram,
    chunk: Histogram,
    ok: u64,
    errors: u64,
    chunks: u64,
    bytes: u64,
    first_error: Option<String>,
}

impl Totals {
    fn new() -> Self {
        Self {
            latency: Histogram::new(),
            first: Histogram::new(),
            chunk: Histogram::new(),
            ok: 0,
            errors: 0,
            chunks: 0,
            bytes: 0,
            first_error: None,
        }
    }
}

const WORDS: [&str; 8] =
    ["alpha ", "bravo ", "charlie ", "delta ", "echo ", "foxtrot ", "golf ", "hotel "];

/// A chat request of about `size` bytes and the place of its 16-digit nonce.
fn chat_body(size: usize, stream: bool, chunks: u64, delay_ms: u64) -> (Vec<u8>, usize) {
    let tail = format!(
        "\"}}],\"max_tokens\":{chunks},\"seed\":{delay_ms},\
         \"temperature\":0.0,\"stream\":{stream}}}"
    );
    let mut body = String::from(
        "{\"model\":\"m\",\"messages\":[{\"role\":\"system\",\
         \"content\":\"You are a helpful assistant.\"},\
         {\"role\":\"user\",\"content\":\"",
    );
    let room = size.saturating_sub(body.len() + tail.len() + 17);
    let (start, mut word) = (body.len(), 7usize);
    let mut nonce_at = 0;
    while body.len() - start < room {
        if nonce_at == 0 && body.len() - start >= room * 9 / 10 {
            nonce_at = body.len();
            body.push_str("0000000000000000 ");
        }
        word = word.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        body.push_str(WORDS[word >> 61]);
    }
    body.push_str(&tail);
    (body.into_bytes(), nonce_at)
}

struct Connection {
    addr: String,
    stream: Option<TcpStream>,
    buffer: Vec<u8>,
    filled: usize,
    payload: Vec<u8>,
    request: Vec<u8>,
}

struct Reply {
    first_ns: u64,
    bytes: u64,
    chunks: u64,
}

impl Connection {
    fn new(config: &Config, number: usize) -> Self {
        Self {
            addr: config.addrs[number % config.addrs.len()].clone(),
            stream: None,
            buffer: vec![0; 64 << 10],
            filled: 0,
            payload: Vec::new(),
            request: Vec::new(),
        }
    }

    async fn read(&mut self) -> io::Result<usize> {
        if self.filled == self.buffer.len() {
            self.buffer.resize(self.buffer.len() * 2, 0);
        }
        let stream = self.stream.as_mut().expect("connected");
        let n = stream.read(&mut self.buffer[self.filled..]).await?;
        self.filled += n;
        Ok(n)
    }

    async fn request(&mut self, config: &Config, totals: &RefCell<Totals>) -> io::Result<Reply> {
        if self.stream.is_none() {
            let stream = TcpStream::connect(&self.addr).await?;
            stream.set_nodelay(true)?;
            self.stream = Some(stream);
        }
        let nonce = config.nonce.get();
        config.nonce.set(nonce + 1);
        self.request.clear();
        self.request.extend_from_slice(config.head.as_bytes());
        let body_at = self.request.len();
        self.request.extend_from_slice(&config.body);
        if config.nonce_at > 0 {
            let digits = format!("{:016x}", nonce.wrapping_mul(0x9E37_79B9_7F4A_7C15));
            let at = body_at + config.nonce_at;
            self.request[at..at + 16].copy_from_slice(digits.as_bytes());
        }
        let request = std::mem::take(&mut self.request);
        let written = self.stream.as_mut().expect("connected").write_all(&request).await;
        self.request = request;
        written?;

        self.filled = 0;
        let (status, head_len, length, chunked) = loop {
            if self.read().await? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let mut headers = [httparse::EMPTY_HEADER; 64];
            let mut response = httparse::Response::new(&mut headers);
            let parsed = response.parse(&self.buffer[..self.filled]).map_err(io::Error::other)?;
            if let httparse::Status::Complete(head_len) = parsed {
                let value = |name: &str| {
                    response
                        .headers
                        .iter()
                        .find(|h| h.name.eq_ignore_ascii_case(name))
                        .map(|h| String::from_utf8_lossy(h.value).to_string())
                };
                let length = value("content-length").and_then(|v| v.parse::<usize>().ok());
                let chunked = value("transfer-encoding").is_some_and(|v| v.contains("chunked"));
                break (response.code.unwrap_or(0), head_len, length, chunked);
            }
        };
        self.buffer.copy_within(head_len..self.filled, 0);
        self.filled -= head_len;

        let mut reply = Reply { first_ns: now_ns(), bytes: 0, chunks: 0 };
        let mut seen_payload = false;
        let mut finished = false;
        self.payload.clear();
        // Bytes of the chunk in hand still to come; its CRLF counts as two more.
        let mut chunk_left = 0usize;
        let mut ended = false;
        loop {
            // Move what is in the buffer to the payload, less the framing.
            if chunked {
                let mut at = 0;
                while at < self.filled && !ended {
                    if chunk_left > 0 {
                        let take = chunk_left.min(self.filled - at);
                        let text = take.min(chunk_left.saturating_sub(2));
                        self.payload.extend_from_slice(&self.buffer[at..at + text]);
                        reply.bytes += text as u64;
                        chunk_left -= take;
                        at += take;
                        continue;
                    }
                    let Some(line) = memchr::memchr(b'\n', &self.buffer[at..self.filled]) else {
                        break;
                    };
                    let digits = std::str::from_utf8(&self.buffer[at..at + line]).unwrap_or("");
                    let digits = digits.trim().split(';').next().unwrap_or("");
                    let size = usize::from_str_radix(digits, 16)
                        .map_err(|_| io::Error::other(format!("chunk size {digits:?}")))?;
                    at += line + 1;
                    if size == 0 {
                        // No trailers here: the CRLF that ends the body is all that is left.
                        if self.filled - at < 2 {
                            at -= line + 1;
                            break;
                        }
                        at += 2;
                        ended = true;
                    } else {
                        chunk_left = size + 2;
                    }
                }
                self.buffer.copy_within(at..self.filled, 0);
                self.filled -= at;
            } else {
                self.payload.extend_from_slice(&self.buffer[..self.filled]);
                reply.bytes += self.filled as u64;
                self.filled = 0;
                ended = length.is_some_and(|n| reply.bytes >= n as u64);
            }
            if !seen_payload && !self.payload.is_empty() {
                seen_payload = true;
                reply.first_ns = now_ns();
            }
            if config.chunks > 0 && status == 200 {
                let now = now_ns();
                let mut at = 0;
                while let Some(end) = memmem::find(&self.payload[at..], b"\n\n") {
                    let event = &self.payload[at..at + end];
                    if let Some(stamp) = memmem::find(event, STAMP) {
                        let digits = &event[stamp + STAMP.len()..];
                        let sent = digits[..STAMP_DIGITS.min(digits.len())]
                            .iter()
                            .fold(0u64, |n, d| n * 10 + (d - b'0') as u64);
                        totals.borrow_mut().chunk.record(now.saturating_sub(sent));
                        reply.chunks += 1;
                    } else if event.ends_with(b"[DONE]") {
                        finished = true;
                    }
                    at += end + 2;
                }
                self.payload.drain(..at);
            }
            if ended {
                break;
            }
            if self.read().await? == 0 {
                self.stream = None;
                if chunked || length.is_some() {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                break;
            }
        }
        if status != 200 {
            let text = String::from_utf8_lossy(&self.payload).chars().take(200).collect::<String>();
            return Err(io::Error::other(format!("status {status}: {text}")));
        }
        if config.chunks > 0 && (!finished || reply.chunks != config.chunks) {
            return Err(io::Error::other(format!("{} chunks, done {finished}", reply.chunks)));
        }
        Ok(reply)
    }
}

/// Take one request from the budget, unless time or the budget is up.
fn take(config: &Config) -> bool {
    if config.stop.get().is_some_and(|stop| Instant::now() >= stop) {
        return false;
    }
    let left = config.budget.get();
    config.budget.set(left.saturating_sub(1));
    left > 0
}

async fn drive(
    mut connection: Connection,
    config: Rc<Config>,
    totals: Rc<RefCell<Totals>>,
    start: Instant,
    every: Option<Duration>,
) -> Connection {
    let mut due = start;
    sleep_until(due).await;
    while take(&config) {
        if every.is_some() {
            sleep_until(due).await;
        }
        // Up to 2 ms behind schedule is the timer's own coarseness, more is a queue.
        let late = Instant::now().saturating_duration_since(due).as_nanos() as u64;
        let sent = now_ns() - if every.is_some() && late > 2_000_000 { late } else { 0 };
        match connection.request(&config, &totals).await {
            Ok(reply) => {
                let mut totals = totals.borrow_mut();
                totals.latency.record(now_ns() - sent);
                totals.first.record(reply.first_ns - sent);
                totals.ok += 1;
                totals.bytes += reply.bytes;
                totals.chunks += reply.chunks;
            }
            Err(error) => {
                connection.stream = None;
                let mut totals = totals.borrow_mut();
                totals.errors += 1;
                totals.first_error.get_or_insert(error.to_string());
                drop(totals);
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
        if let Some(every) = every {
            due += every;
        }
    }
    connection
}

/// One phase over all connections; gives them back with their sockets open.
async fn phase(
    connections: Vec<Connection>,
    config: &Rc<Config>,
    totals: &Rc<RefCell<Totals>>,
    rate: f64,
    ramp: Duration,
) -> Vec<Connection> {
    let count = connections.len();
    let every = (rate > 0.0).then(|| Duration::from_secs_f64(count as f64 / rate));
    let begin = Instant::now();
    let spread = every.unwrap_or(ramp);
    let tasks: Vec<_> = connections
        .into_iter()
        .enumerate()
        .map(|(number, connection)| {
            let start = begin + spread.mul_f64(number as f64 / count as f64);
            tokio::task::spawn_local(drive(
                connection,
                config.clone(),
                totals.clone(),
                start,
                every,
            ))
        })
        .collect();
    let mut back = Vec::with_capacity(count);
    for task in tasks {
        back.push(task.await.expect("connection task"));
    }
    back
}

const COLUMNS: [&str; 17] = [
    "label",
    "ok",
    "err",
    "secs",
    "rps",
    "p50_ms",
    "p90_ms",
    "p99_ms",
    "ttfb50_ms",
    "ttfb99_ms",
    "chunk50_ms",
    "chunk99_ms",
    "MB",
    "cpu_us/req",
    "sys%",
    "cpu_us/chunk",
    "rss_MB",
];

fn main() {
    if switch("--header") {
        println!("{}", COLUMNS.join("\t"));
        return;
    }
    let conns: usize = flag_or("--conns", 1);
    let chunks: u64 = flag_or("--stream", 0);
    let seconds: f64 = flag_or("--seconds", 0.0);
    let requests: u64 = flag_or("--requests", if seconds > 0.0 { u64::MAX } else { 1000 });
    let warmup: u64 = flag_or("--warmup", 200);
    let rate: f64 = flag_or("--rate", 0.0);
    let ramp = Duration::from_millis(flag_or("--ramp", 0));
    let label: String = flag_or("--label", "-".to_string());
    let path: String = flag_or("--path", "/v1/chat/completions".to_string());
    let addrs: String = flag_or("--addr", "127.0.0.1:9101".to_string());
    let size: usize = flag_or("--body", 1024);
    let (body, nonce_at) = chat_body(size, chunks > 0, chunks.max(1), flag_or("--delay", 0));
    let config = Rc::new(Config {
        addrs: addrs.split(',').map(str::to_string).collect(),
        head: format!(
            "POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n\
             Accept: */*\r\nContent-Length: {}\r\n\r\n",
            body.len()
        ),
        body,
        nonce_at,
        chunks,
        stop: Cell::new(None),
        budget: Cell::new(warmup),
        nonce: Cell::new(now_ns()),
    });

    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let local = tokio::task::LocalSet::new();
    local.block_on(&runtime, async move {
        let mut connections: Vec<_> = (0..conns).map(|n| Connection::new(&config, n)).collect();
        if warmup > 0 {
            let scratch = Rc::new(RefCell::new(Totals::new()));
            connections = phase(connections, &config, &scratch, 0.0, Duration::ZERO).await;
        }
        let usage = flag("--pid").map(|pid| Usage::of(pid.parse().expect("pid")));
        let before = usage.as_ref().map(Usage::cpu);
        config.budget.set(requests);
        if seconds > 0.0 {
            config.stop.set(Some(Instant::now() + Duration::from_secs_f64(seconds)));
        }
        let totals = Rc::new(RefCell::new(Totals::new()));
        let begin = now_ns();
        let connections = phase(connections, &config, &totals, rate, ramp).await;
        let secs = (now_ns() - begin) as f64 / 1e9;
        let after = usage.as_ref().map(Usage::cpu);
        drop(connections);

        let t = totals.borrow();
        let (user, system) = match (before, after) {
            (Some(b), Some(a)) => (a.0 - b.0, a.1 - b.1),
            _ => (f64::NAN, f64::NAN),
        };
        let cpu = user + system;
        let per = |n: u64| {
            if n > 0 { cpu * 1e6 / n as f64 } else { f64::NAN }
        };
        let row = [
            label,
            t.ok.to_string(),
            t.errors.to_string(),
            format!("{secs:.2}"),
            format!("{:.0}", t.ok as f64 / secs),
            format!("{:.3}", t.latency.quantile_ms(0.5)),
            format!("{:.3}", t.latency.quantile_ms(0.9)),
            format!("{:.3}", t.latency.quantile_ms(0.99)),
            format!("{:.3}", t.first.quantile_ms(0.5)),
            format!("{:.3}", t.first.quantile_ms(0.99)),
            format!("{:.3}", t.chunk.quantile_ms(0.5)),
            format!("{:.3}", t.chunk.quantile_ms(0.99)),
            format!("{:.1}", t.bytes as f64 / 1e6),
            format!("{:.1}", per(t.ok)),
            format!("{:.0}", 100.0 * system / cpu),
            format!("{:.2}", per(t.chunks)),
            usage.map_or("NaN".to_string(), |u| format!("{:.0}", u.peak_rss_mb())),
        ];
        println!("{}", row.join("\t").replace("NaN", "-"));
        if let Some(error) = &t.first_error {
            eprintln!("load: first error: {error}");
        }
    });
}
