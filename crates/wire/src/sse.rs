//! Reads server-sent events out of a byte stream that may be cut anywhere: inside a line ending,
//! the byte order mark or a character.
//! Invariant: the same bytes give the same events however they are cut, and no more than
//! `event_bytes_max` of an unfinished event is held.
//!
//! Own code, since `eventsource-stream` and `sse-stream` read async streams only and bound nothing.

use std::collections::VecDeque;
use std::collections::vec_deque::Drain;
use std::mem::take;
use std::ops::Range;
use std::str::Utf8Error;

/// One event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// The `event` field; empty where the sender gave none. vLLM never gives one.
    pub name: Vec<u8>,
    /// The `data` lines, joined by line feeds.
    pub data: Vec<u8>,
    /// The bytes of the stream that this event took, comments before it and the ending empty line
    /// included. Spans of successive events leave no gap. Where lines end in CR LF the last LF
    /// belongs to the next span, so that an event is given out as soon as it is whole.
    pub span: Range<u64>,
}

impl Event {
    /// The data as text.
    ///
    /// # Errors
    /// If it is not UTF-8.
    pub fn text(&self) -> Result<&str, Utf8Error> {
        std::str::from_utf8(&self.data)
    }
}

/// An event longer than the reader may hold. What follows cannot be framed any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("event: found more than {limit} bytes, expected its end")]
pub struct TooLong {
    /// The limit, in bytes.
    pub limit: usize,
}

/// How a stream stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tail {
    /// At the end of an event, or between events.
    Clean,
    /// Inside an event, which is lost; a byte written after it would be read as part of it.
    Partial {
        /// Where in the stream that event began.
        start: u64,
    },
}

/// Splits a byte stream into events.
#[derive(Debug)]
pub struct Reader {
    event_bytes_max: usize,
    /// Start of a line whose end has not come.
    line: Vec<u8>,
    name: Vec<u8>,
    data: Vec<u8>,
    /// Whether the event has a `data` line; one without is not given out.
    has_data: bool,
    /// Whether the last byte was a CR, so that a LF now would belong to it.
    after_cr: bool,
    is_first_line: bool,
    /// Bytes of the stream read so far, and where the current event began.
    offset: u64,
    start: u64,
    failed: bool,
    ready: VecDeque<Result<Event, TooLong>>,
}

const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();

impl Reader {
    /// A reader that holds at most `event_bytes_max` bytes of an event's name, data and open line.
    #[must_use]
    pub fn new(event_bytes_max: usize) -> Self {
        Reader {
            event_bytes_max,
            line: Vec::new(),
            name: Vec::new(),
            data: Vec::new(),
            has_data: false,
            after_cr: false,
            is_first_line: true,
            offset: 0,
            start: 0,
            failed: false,
            ready: VecDeque::new(),
        }
    }

    /// Reads the next bytes of the stream and gives out the events that they finish. All of
    /// `chunk` is read by the time this returns; events not taken from the iterator are dropped.
    ///
    /// # Errors
    /// The last item is [`TooLong`] once an event outgrows the limit; later bytes are passed over.
    pub fn push(&mut self, chunk: &[u8]) -> Drain<'_, Result<Event, TooLong>> {
        let mut rest = chunk;
        while !self.failed && !rest.is_empty() {
            if take(&mut self.after_cr) && rest[0] == b'\n' {
                self.offset += 1;
                rest = &rest[1..];
                continue;
            }
            let Some(end) = rest.iter().position(|byte| matches!(byte, b'\n' | b'\r')) else {
                self.offset += rest.len() as u64;
                self.hold(rest);
                break;
            };
            self.offset += end as u64 + 1;
            self.after_cr = rest[end] == b'\r';
            self.end_line(&rest[..end]);
            rest = &rest[end + 1..];
        }
        self.ready.drain(..)
    }

    /// Tells, at the end of the stream, whether an event was left unfinished.
    #[must_use]
    pub fn finish(&self) -> Tail {
        let is_open = !self.line.is_empty() || self.has_data || !self.name.is_empty();
        if is_open { Tail::Partial { start: self.start } } else { Tail::Clean }
    }

    /// Keeps the start of a line for the next chunk.
    fn hold(&mut self, part: &[u8]) {
        if self.fits(self.line.len() + part.len()) {
            self.line.extend_from_slice(part);
        }
    }

    fn fits(&mut self, line_bytes: usize) -> bool {
        let is_within = self.name.len() + self.data.len() + line_bytes <= self.event_bytes_max;
        if !is_within {
            self.failed = true;
            self.ready.push_back(Err(TooLong { limit: self.event_bytes_max }));
        }
        is_within
    }

    fn end_line(&mut self, last_part: &[u8]) {
        if !self.fits(self.line.len() + last_part.len()) {
            return;
        }
        if self.line.is_empty() {
            self.read_line(last_part);
        } else {
            let mut line = take(&mut self.line);
            line.extend_from_slice(last_part);
            self.read_line(&line);
        }
    }

    fn read_line(&mut self, line: &[u8]) {
        let is_first = take(&mut self.is_first_line);
        let marked = if is_first { line.strip_prefix(BYTE_ORDER_MARK) } else { None };
        let line = marked.unwrap_or(line);
        if line.is_empty() {
            return self.end_event();
        }
        let colon = line.iter().position(|byte| *byte == b':');
        let (field, value) = match colon {
            Some(at) => (&line[..at], &line[at + 1..]),
            None => (line, &[][..]),
        };
        let value = value.strip_prefix(b" ").unwrap_or(value);
        // A comment has an empty field name; it, `id` and `retry` say nothing that fak needs.
        match field {
            b"data" => {
                if take(&mut self.has_data) {
                    self.data.push(b'\n');
                }
                self.has_data = true;
                self.data.extend_from_slice(value);
            }
            b"event" => self.name = value.to_vec(),
            _ => {}
        }
    }

    fn end_event(&mut self) {
        let (name, data) = (take(&mut self.name), take(&mut self.data));
        if take(&mut self.has_data) {
            let span = self.start..self.offset;
            self.start = self.offset;
            self.ready.push_back(Ok(Event { name, data, span }));
        }
    }
}
