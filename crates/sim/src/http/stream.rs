//! Server-sent events: one at a time, as the engine's outputs come.
//! Invariant: dropping the body drops the outputs, so a client that goes away frees its slot.

use std::collections::VecDeque;
use std::convert::Infallible;

use bytes::Bytes;
use futures_util::stream;
use http::header::CONTENT_TYPE;
use http::{HeaderValue, Response};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;
use serde_json::Value;

use super::{Answer, ApiError};
use crate::core::request::{Finish, Output};
use crate::faults::StreamCut;
use crate::life::Life;

use super::generate::Merged;

/// What turns outputs into events.
pub(super) trait Chunks: Send + 'static {
    /// Events of one output.
    fn output(&mut self, index: usize, output: &Output) -> Vec<Value>;
    /// Events after the last output.
    fn end(&mut self) -> Vec<Value>;
}

struct Source<C> {
    merged: Merged,
    chunks: C,
    ready: VecDeque<Bytes>,
    is_over: bool,
    cut: Option<StreamCut>,
    sent: usize,
}

const DONE: &str = "data: [DONE]\n\n";

/// A streamed answer.
pub(super) fn answer(life: &Life, merged: Merged, chunks: impl Chunks) -> Answer {
    let cut = life.faults.take_stream_cut();
    let source = Source { merged, chunks, ready: VecDeque::new(), is_over: false, cut, sent: 0 };
    let frames = stream::unfold(source, |mut source| async move {
        let bytes = source.next().await?;
        Some((Ok::<_, Infallible>(Frame::data(bytes)), source))
    });
    let mut answer = Response::new(StreamBody::new(frames).boxed_unsync());
    let kind = HeaderValue::from_static("text/event-stream; charset=utf-8");
    answer.headers_mut().insert(CONTENT_TYPE, kind);
    answer
}

impl<C: Chunks> Source<C> {
    async fn next(&mut self) -> Option<Bytes> {
        while self.ready.is_empty() && !self.is_over {
            self.fill().await;
        }
        let event = self.ready.pop_front()?;
        self.sent += 1;
        match self.cut {
            Some(cut) if self.sent > cut.after_events => {
                self.ready.clear();
                self.is_over = true;
                cut.mid_line.then(|| event.slice(..event.len() / 2))
            }
            _ => Some(event),
        }
    }

    async fn fill(&mut self) {
        match self.merged.next().await {
            Some((_, output)) if output.finish == Some(Finish::Error) => {
                self.is_over = true;
                self.ready.push_back(spaced_error(&ApiError::engine_dead()));
                self.ready.push_back(Bytes::from_static(DONE.as_bytes()));
            }
            Some((index, output)) => {
                self.ready.extend(self.chunks.output(index, &output).iter().map(event));
            }
            None => {
                self.is_over = true;
                self.ready.extend(self.chunks.end().iter().map(event));
                self.ready.push_back(Bytes::from_static(DONE.as_bytes()));
            }
        }
    }
}

fn event(value: &Value) -> Bytes {
    format!("data: {value}\n\n").into()
}

/// An error inside a stream comes from another JSON writer: with spaces.
fn spaced_error(error: &ApiError) -> Bytes {
    let message = Value::from(error.message.as_str());
    format!(
        "data: {{\"error\": {{\"message\": {message}, \"type\": \"{}\", \"param\": null, \
         \"code\": {}}}}}\n\n",
        error.kind,
        error.status.as_u16()
    )
    .into()
}
