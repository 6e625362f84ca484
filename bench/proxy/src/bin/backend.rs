//! A fake OpenAI upstream, as cheap as hyper allows: one single-threaded runtime per port.
//!
//!   backend --ports 9101,9102 [--model m] [--log-unknown]
//!
//! A request steers its own answer, so that one backend serves every scenario unchanged:
//! `"stream":true` asks for SSE, `"max_tokens":N` (or `"max_completion_tokens"`, to which
//! sglang-router renames it) for N chunks and `"seed":MS` for MS milliseconds between chunks
//! (0: as fast as possible, each chunk its own write).

use std::{
    convert::Infallible,
    future::Future,
    pin::Pin,
    sync::OnceLock,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http_body_util::{BodyExt, Either, Full};
use hyper::{
    Method, Request, Response,
    body::{Body, Frame, Incoming},
    header::{CONTENT_TYPE, HeaderValue},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::TokioIo;
use memchr::memmem;
use proxybench::{STAMP, STAMP_DIGITS, flag_or, now_ns, switch};

/// About 40 tokens of text: what each streamed delta carries after its stamp.
const DELTA: &str = " the quick brown fox jumps over the lazy dog while the cache keeps every \
             block \
it has seen and the router sends the next turn back to where its prefix lives";

struct Canned {
    completion: Bytes,
    chat: Bytes,
    chunk: Vec<u8>,
    stamp_at: usize,
    usage: Bytes,
    models: Bytes,
    info: Bytes,
}

static CANNED: OnceLock<Canned> = OnceLock::new();

fn canned() -> &'static Canned {
    CANNED.get_or_init(|| {
        let model: String = flag_or("--model", "m".to_string());
        let chunk = format!(
            "data: {{\"id\":\"chatcmpl-0123456789abcdef0123456789abcdef\",\
             \"object\":\"chat.completion.chunk\",\
             \"created\":1764380000,\"model\":\"{model}\",\"choices\":[{{\"index\":0,\
             \"delta\":{{\"content\":\"T{}{DELTA}\"}},\
             \"logprobs\":null,\"finish_reason\":null}}]}}\n\n",
            "0".repeat(STAMP_DIGITS)
        )
        .into_bytes();
        let stamp_at = memmem::find(&chunk, STAMP).unwrap() + STAMP.len();
        let usage_chunk = format!(
            "data: {{\"id\":\"chatcmpl-0123456789abcdef0123456789abcdef\",\
             \"object\":\"chat.completion.chunk\",\
             \"created\":1764380000,\"model\":\"{model}\",\"choices\":[],\
             \"usage\":{{\"prompt_tokens\":200,\
             \"total_tokens\":240,\"completion_tokens\":40}}}}\n\n"
        );
        let usage = "\"usage\":{\"prompt_tokens\":200,\"completion_tokens\":40,\
             \"total_tokens\":240}";
        Canned {
            completion: format!(
                "{{\"id\":\"cmpl-0123456789abcdef\",\"object\":\"text_completion\",\
             \"created\":1764380000,\"model\":\"{model}\",\
                 \"choices\":[{{\"index\":0,\"text\":\"{DELTA}\",\"logprobs\":null,\
             \"finish_reason\":\"stop\"}}],{usage}}}"
            )
            .into(),
            chat: format!(
                "{{\"id\":\"chatcmpl-0123456789abcdef\",\"object\":\"chat.completion\",\
             \"created\":1764380000,\"model\":\"{model}\",\
                 \"choices\":[{{\"index\":0,\"message\":{{\"role\":\"assistant\",\
             \"content\":\"{DELTA}\"}},\"logprobs\":null,\
                 \"finish_reason\":\"stop\"}}],{usage}}}"
            )
            .into(),
            chunk,
            stamp_at,
            usage: usage_chunk.into(),
            models: format!(
                "{{\"object\":\"list\",\"data\":[{{\"id\":\"{model}\",\"object\":\"model\",\
             \"created\":1764380000,\"owned_by\":\"vllm\",\
                 \"root\":\"{model}\",\"parent\":null,\"max_model_len\":131072}}]}}"
            )
            .into(),
            info: format!(
                "{{\"model_path\":\"{model}\",\"served_model_name\":\"{model}\",\
             \"model_id\":\"{model}\",\"tokenizer_path\":\"{model}\",\
                 \"is_generation\":true,\"dp_size\":1,\"tp_size\":1,\
             \"max_total_num_tokens\":1000000,\"version\":\"0.11.0\",\
                 \"internal_states\":[]}}"
            )
            .into(),
        }
    })
}

/// The number that follows `"key":` in the body.
fn number(body: &[u8], key: &[u8]) -> Option<u64> {
    let mut rest = &body[memmem::rfind(body, key)? + key.len()..];
    while let [b' ' | b':', tail @ ..] = rest {
        rest = tail;
    }
    let digits = rest.iter().take_while(|b| b.is_ascii_digit()).count();
    std::str::from_utf8(&rest[..digits]).ok()?.parse().ok()
}

fn wants_stream(body: &[u8]) -> bool {
    memmem::rfind(body, b"\"stream\"").is_some_and(|at| {
        let rest = &body[at + 8..];
        let skip = rest.iter().take_while(|b| matches!(b, b' ' | b':')).count();
        rest[skip..].starts_with(b"true")
    })
}

struct Sse {
    left: u64,
    /// A chunk of usage before the end, as vLLM sends it where `include_usage` asks for it.
    usage: bool,
    done: bool,
    yielded: bool,
    delay: Duration,
    timer: Option<Pin<Box<tokio::time::Sleep>>>,
}

impl Body for Sse {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if self.left == 0 {
            if self.done {
                return Poll::Ready(None);
            }
            if std::mem::take(&mut self.usage) {
                return Poll::Ready(Some(Ok(Frame::data(canned().usage.clone()))));
            }
            self.done = true;
            return Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(b"data: [DONE]\n\n")))));
        }
        if let Some(timer) = self.timer.as_mut() {
            if timer.as_mut().poll(cx).is_pending() {
                return Poll::Pending;
            }
        } else if !self.yielded {
            // Nothing to wait for: still let hyper flush, so that every chunk is a write.
            self.yielded = true;
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        self.yielded = false;
        self.left -= 1;
        let delay = self.delay;
        if delay > Duration::ZERO {
            match self.timer.as_mut() {
                Some(timer) => {
                    let next = timer.deadline() + delay;
                    timer.as_mut().reset(next);
                }
                None => self.timer = Some(Box::pin(tokio::time::sleep(delay))),
            }
        }
        let canned = canned();
        let mut chunk = canned.chunk.clone();
        let mut stamp = now_ns();
        for slot in chunk[canned.stamp_at..canned.stamp_at + STAMP_DIGITS].iter_mut().rev() {
            *slot = b'0' + (stamp % 10) as u8;
            stamp /= 10;
        }
        if self.left == 0 {
            // As vLLM ends an answer: with its last text.
            let null = memmem::rfind(&chunk, b"null").unwrap();
            chunk.splice(null..null + 4, *b"\"stop\"");
        }
        Poll::Ready(Some(Ok(Frame::data(chunk.into()))))
    }
}

type Answer = Response<Either<Full<Bytes>, Sse>>;

fn json(body: Bytes) -> Answer {
    let mut response = Response::new(Either::Left(Full::new(body)));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

async fn serve(request: Request<Incoming>, log_unknown: bool) -> Result<Answer, Infallible> {
    let canned = canned();
    let (parts, mut incoming) = request.into_parts();
    // Small bodies come as one frame: no copy.
    let mut body = Bytes::new();
    while let Some(Ok(frame)) = incoming.frame().await {
        if let Ok(data) = frame.into_data() {
            body = if body.is_empty() { data } else { [&body[..], &data[..]].concat().into() };
        }
    }
    let path = parts.uri.path();
    let canned_answer = match path {
        "/v1/chat/completions" => &canned.chat,
        "/v1/completions" => &canned.completion,
        "/v1/models" => return Ok(json(canned.models.clone())),
        "/health" | "/health_generate" | "/ping" => return Ok(json(Bytes::from_static(b"{}"))),
        "/version" => return Ok(json(Bytes::from_static(b"{\"version\":\"0.11.0\"}"))),
        "/server_info" | "/get_server_info" | "/model_info" | "/get_model_info" => {
            return Ok(json(canned.info.clone()));
        }
        "/is_paused" => return Ok(json(Bytes::from_static(b"{\"is_paused\":false}"))),
        "/is_sleeping" => return Ok(json(Bytes::from_static(b"{\"is_sleeping\":false}"))),
        "/get_load" | "/v1/loads" | "/loads" => {
            return Ok(json(Bytes::from_static(
                b"[{\"dp_rank\":0,\"num_reqs\":0,\"num_waiting_reqs\":0,\"num_tokens\":0}]",
            )));
        }
        "/metrics" => {
            let text = "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 0\n\
                        # TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting 0\n";
            let mut response =
                Response::new(Either::Left(Full::new(Bytes::from_static(text.as_bytes()))));
            response
                .headers_mut()
                .insert(CONTENT_TYPE, HeaderValue::from_static("text/plain; version=0.0.4"));
            return Ok(response);
        }
        _ => {
            if log_unknown {
                eprintln!("backend: unknown {} {path}", parts.method);
            }
            let mut response = json(Bytes::from_static(b"{\"detail\":\"Not Found\"}"));
            *response.status_mut() = hyper::StatusCode::NOT_FOUND;
            return Ok(response);
        }
    };
    if parts.method != Method::POST || !wants_stream(&body) {
        return Ok(json(canned_answer.clone()));
    }
    let mut response = Response::new(Either::Right(Sse {
        left: number(&body, b"\"max_tokens\"")
            .or_else(|| number(&body, b"\"max_completion_tokens\""))
            .unwrap_or(64),
        usage: memmem::rfind(&body, b"\"include_usage\":true").is_some(),
        done: false,
        yielded: true,
        delay: Duration::from_millis(number(&body, b"\"seed\"").unwrap_or(0)),
        timer: None,
    }));
    response
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    Ok(response)
}

fn main() {
    let ports: String = flag_or("--ports", "9101,9102".to_string());
    let log_unknown = switch("--log-unknown");
    let threads: Vec<_> = ports
        .split(',')
        .map(|port| {
            let port: u16 = port.parse().expect("port");
            std::thread::spawn(move || {
                let runtime =
                    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
                let local = tokio::task::LocalSet::new();
                local.block_on(&runtime, async move {
                    let listener = listen(port);
                    loop {
                        let Ok((stream, _)) = listener.accept().await else {
                            continue;
                        };
                        let _ = stream.set_nodelay(true);
                        tokio::task::spawn_local(async move {
                            let service = service_fn(move |request| serve(request, log_unknown));
                            let _ = http1::Builder::new()
                                .half_close(false)
                                .serve_connection(TokioIo::new(stream), service)
                                .await;
                        });
                    }
                });
            })
        })
        .collect();
    for thread in threads {
        let _ = thread.join();
    }
}

fn listen(port: u16) -> tokio::net::TcpListener {
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.set_reuseaddr(true).unwrap();
    socket.bind(([127, 0, 0, 1], port).into()).expect("bind");
    socket.listen(4096).unwrap()
}
