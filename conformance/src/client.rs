//! HTTP calls to an engine, one connection each.
//! Invariant: what a `Call` has received so far is visible while it runs, and dropping it closes
//! its connection.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, bail};
use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use hyper_util::client::legacy::Client as Legacy;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// No answer in a scenario comes near this.
const BODY_BYTES_MAX: usize = 8 << 20;

/// A request before it is sent.
#[derive(Clone, Debug, Default)]
pub struct Request {
    /// The method.
    pub method: String,
    /// Path and query.
    pub path: String,
    /// Header lines.
    pub headers: BTreeMap<String, String>,
    /// The body, if there is one.
    pub body: Option<String>,
}

/// What has arrived of an answer.
#[derive(Clone, Debug, Default)]
pub struct Answer {
    /// 0 until the status line is there.
    pub status: u16,
    /// Empty if the engine sent none.
    pub content_type: String,
    /// Every header, that one included.
    pub headers: http::HeaderMap,
    /// The bytes so far.
    pub body: Vec<u8>,
    /// The body ended as HTTP says it must.
    pub is_complete: bool,
    /// Why it ended otherwise.
    pub failure: Option<String>,
}

impl Answer {
    /// Number of `data:` lines so far.
    pub fn chunks(&self) -> usize {
        self.body.split(|byte| *byte == b'\n').filter(|line| line.starts_with(b"data:")).count()
    }

    fn has_ended(&self) -> bool {
        self.is_complete || self.failure.is_some()
    }
}

/// Sends requests to one engine.
#[derive(Clone, Debug)]
pub struct Client {
    base_url: String,
    http: Legacy<HttpConnector, Full<Bytes>>,
}

/// A request in flight.
#[derive(Debug)]
pub struct Call {
    answer: watch::Receiver<Answer>,
    task: JoinHandle<()>,
}

impl Drop for Call {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Client {
    /// `base_url` without a trailing slash.
    pub fn new(base_url: &str) -> Self {
        let http = Legacy::builder(TokioExecutor::new()).pool_max_idle_per_host(0).build_http();
        Client { base_url: base_url.to_owned(), http }
    }

    /// Sends in the background.
    pub fn start(&self, request: &Request) -> anyhow::Result<Call> {
        let mut message = http::Request::builder()
            .method(request.method.as_str())
            .uri(format!("{}{}", self.base_url, request.path));
        for (name, value) in &request.headers {
            message = message.header(name, value);
        }
        let body = Bytes::from(request.body.clone().unwrap_or_default());
        let message = message.body(Full::new(body)).context("the request cannot be made")?;
        let (progress, answer) = watch::channel(Answer::default());
        let http = self.http.clone();
        let task = tokio::spawn(async move {
            let end = receive(&http, message, &progress).await;
            progress.send_modify(|answer| match end {
                Ok(()) => answer.is_complete = true,
                Err(error) => answer.failure = Some(format!("{error:#}")),
            });
        });
        Ok(Call { answer, task })
    }

    /// Sends and waits for the whole answer.
    pub async fn call(&self, request: &Request, deadline: Duration) -> anyhow::Result<Answer> {
        self.start(request)?.finish(deadline).await
    }

    /// A GET or POST without body or headers that must answer 200, as text.
    pub async fn plain(&self, call: &str, deadline: Duration) -> anyhow::Result<String> {
        let (method, path) = call.split_once(' ').context("a call is a method and a path")?;
        let request = Request { method: method.into(), path: path.into(), ..Request::default() };
        let answer = self.call(&request, deadline).await?;
        if answer.status != 200 {
            bail!("{call} answered {}: {:?}", answer.status, answer.failure);
        }
        Ok(String::from_utf8_lossy(&answer.body).into_owned())
    }
}

async fn receive(
    http: &Legacy<HttpConnector, Full<Bytes>>,
    message: http::Request<Full<Bytes>>,
    progress: &watch::Sender<Answer>,
) -> anyhow::Result<()> {
    let answer = http.request(message).await?;
    let content_type = answer.headers().get(http::header::CONTENT_TYPE);
    let content_type = content_type.map(|value| String::from_utf8_lossy(value.as_bytes()));
    progress.send_modify(|seen| {
        seen.status = answer.status().as_u16();
        seen.content_type = content_type.unwrap_or_default().into_owned();
        seen.headers = answer.headers().clone();
    });
    let mut body = answer.into_body();
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame?.into_data() else { continue };
        progress.send_modify(|seen| seen.body.extend_from_slice(&data));
        if progress.borrow().body.len() > BODY_BYTES_MAX {
            bail!("the body is longer than {BODY_BYTES_MAX} bytes");
        }
    }
    Ok(())
}

impl Call {
    /// What has arrived.
    pub fn so_far(&self) -> Answer {
        self.answer.borrow().clone()
    }

    /// Waits until what has arrived satisfies `holds`; an answer that ends before is an error.
    pub async fn until(
        &mut self,
        holds: impl Fn(&Answer) -> bool,
        deadline: Duration,
    ) -> anyhow::Result<()> {
        let reached = self.answer.wait_for(|answer| holds(answer) || answer.has_ended());
        let answer = tokio::time::timeout(deadline, reached)
            .await
            .context("nothing came before the deadline")??;
        if !holds(&answer) {
            bail!("it ended before: {:?} {:?}", answer.status, answer.failure);
        }
        Ok(())
    }

    /// Waits until the answer has ended, one way or the other; it may be asked again.
    pub async fn ended(&mut self) {
        // Whoever receives tells of an end before it lets go.
        let _ = self.answer.wait_for(Answer::has_ended).await;
    }

    /// Waits for the end of the answer.
    pub async fn finish(mut self, deadline: Duration) -> anyhow::Result<Answer> {
        let ended = self.answer.wait_for(Answer::has_ended);
        let answer =
            tokio::time::timeout(deadline, ended).await.context("no end before the deadline")??;
        Ok(answer.clone())
    }
}
