//! Cuts a byte stream at the ends of its server-sent events, so that nothing is ever relayed up to
//! the middle of one.
//!
//! Invariant: the bytes that come out are those that went in, but for the data of events that are
//! left out; only an unfinished event is held back, and no more than [`HELD_BYTES_MAX`] of one.

use std::ops::Range;

use bytes::Bytes;
use memchr::{memchr2, memchr2_iter};

/// Largest event that is held, in bytes. One with the log probabilities of many tokens has a few
/// hundred kilobytes. What is larger passes as it comes.
const HELD_BYTES_MAX: usize = 8 << 20;

/// What becomes of an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// It is relayed.
    Keep,
    /// Its data is left out, and the event with it, unless it has comments or other fields.
    Cut,
    /// It is relayed with this data instead of its own.
    Replace(Vec<u8>),
    /// It is relayed, and is the stream's end marker.
    End,
    /// It is relayed, and nothing after it.
    Last,
}

/// The open end of a stream.
#[derive(Debug, Default)]
pub(super) struct Frames {
    /// Start of an event whose end has not come.
    held: Vec<u8>,
    /// Where in `held` its last line begins.
    line: usize,
    /// The last event ended with a CR, so that a LF now would belong to it.
    after_cr: Option<Half>,
    /// Bytes pass unread from here on: an event outgrew the limit.
    is_opaque: bool,
}

/// What becomes of the LF of a CR LF whose CR ended an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Half {
    /// It follows its CR.
    Relayed,
    /// It is left out with its event.
    LeftOut,
}

/// What comes out for bytes that went in.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Cut {
    /// Whole events.
    pub(super) bytes: Bytes,
    /// Where in them the [end marker](Fate::End) begins, if it is there.
    pub(super) end_at: Option<usize>,
    /// Whether an event was the [last](Fate::Last).
    pub(super) is_last: bool,
}

impl Frames {
    /// Takes in the next bytes, asks for the fate of each event that they finish, and gives out
    /// those that are kept.
    pub(super) fn push(&mut self, chunk: Bytes, mut fate: impl FnMut(&[u8]) -> Fate) -> Cut {
        if self.is_opaque {
            return Cut { bytes: chunk, end_at: None, is_last: false };
        }
        let scanned = self.held.len();
        let bytes = if self.held.is_empty() {
            chunk
        } else {
            let mut held = std::mem::take(&mut self.held);
            held.extend_from_slice(&chunk);
            Bytes::from(held)
        };
        let mut spans = Spans::new(self.line);
        // Nothing is held then: the LF is the first of what came.
        if let Some(half) = self.after_cr
            && !bytes.is_empty()
        {
            self.after_cr = None;
            if bytes[0] == b'\n' {
                spans.second_half(half);
            }
        }
        let (mut end_at, mut is_last) = (None, false);
        for at in memchr2_iter(b'\n', b'\r', &bytes[scanned..]).map(|at| at + scanned) {
            if at < spans.start {
                continue;
            }
            let Some(span) = spans.line_end(&bytes, at) else { continue };
            let mut half = Half::Relayed;
            match fate(&bytes[span.clone()]) {
                Fate::Keep => {}
                Fate::Cut => half = spans.replace(&bytes, span.clone(), None),
                Fate::Replace(data) => half = spans.replace(&bytes, span.clone(), Some(&data)),
                Fate::End => end_at = Some(spans.out_at(span.start)),
                Fate::Last => is_last = true,
            }
            if bytes[at] == b'\r' {
                match bytes.get(at + 1) {
                    Some(b'\n') => spans.second_half(half),
                    Some(_) => {}
                    None => self.after_cr = Some(half),
                }
            }
            if is_last {
                break;
            }
        }
        let out = spans.out(&bytes);
        if !is_last {
            self.held = bytes[spans.start..].to_vec();
            self.line = spans.line - spans.start;
            if self.held.len() > HELD_BYTES_MAX {
                self.is_opaque = true;
                let held = std::mem::take(&mut self.held);
                let bytes = Bytes::from([&out[..], &held].concat());
                return Cut { bytes, end_at, is_last };
            }
        }
        Cut { bytes: out, end_at, is_last }
    }

    /// The unfinished event, now that no more comes.
    pub(super) fn into_held(self) -> Vec<u8> {
        self.held
    }

    /// Whether bytes pass unread: the stream's end marker may have been among them.
    pub(super) fn is_opaque(&self) -> bool {
        self.is_opaque
    }
}

struct Spans {
    /// Where the open event begins.
    start: usize,
    /// Where the open line begins.
    line: usize,
    /// Bytes from here to `start` are kept and not in `kept`.
    kept_from: usize,
    /// Kept bytes before an event that was left out.
    kept: Vec<u8>,
}

impl Spans {
    fn new(line: usize) -> Self {
        Self { start: 0, line, kept_from: 0, kept: Vec::new() }
    }

    /// Takes note of the line end at `at`; the event's span if an empty line ends it. A CR ends it
    /// at once, so that an event is given out as soon as it is whole.
    fn line_end(&mut self, bytes: &[u8], at: usize) -> Option<Range<usize>> {
        let is_second_half = bytes[at] == b'\n' && at > 0 && bytes[at - 1] == b'\r';
        let is_empty = at == self.line && !is_second_half;
        self.line = at + 1;
        if !is_empty {
            return None;
        }
        let span = self.start..at + 1;
        self.start = at + 1;
        Some(span)
    }

    /// The LF behind the last event is the second half of its end.
    fn second_half(&mut self, half: Half) {
        let is_adjacent = self.kept_from == self.start;
        self.start += 1;
        self.line = self.start;
        if half == Half::LeftOut && is_adjacent {
            self.kept_from = self.start;
        }
    }

    /// Leaves the event's data out, or puts other data in its place. What else an event has, such
    /// as comments before it, stays.
    fn replace(&mut self, bytes: &[u8], span: Range<usize>, data: Option<&[u8]>) -> Half {
        self.kept.extend_from_slice(&bytes[self.kept_from..span.start]);
        self.kept_from = span.end;
        let rest = with_data(&bytes[span], data);
        let is_empty = rest.iter().all(|byte| matches!(byte, b'\n' | b'\r'));
        if is_empty {
            return Half::LeftOut;
        }
        self.kept.extend_from_slice(&rest);
        Half::Relayed
    }

    /// Where a kept byte comes out.
    fn out_at(&self, at: usize) -> usize {
        self.kept.len() + at - self.kept_from
    }

    fn out(&self, bytes: &Bytes) -> Bytes {
        if self.kept.is_empty() {
            return bytes.slice(self.kept_from..self.start);
        }
        Bytes::from([&self.kept, &bytes[self.kept_from..self.start]].concat())
    }
}

/// An event with this data, or with none, where its own first stood; its other lines as they are.
fn with_data(event: &[u8], data: Option<&[u8]>) -> Vec<u8> {
    let mut out = Vec::new();
    let (mut rest, mut data) = (event, data);
    while !rest.is_empty() {
        let (line, ending);
        (line, ending, rest) = first_line(rest);
        let name = line.strip_prefix("\u{feff}".as_bytes()).unwrap_or(line);
        if name != b"data" && !name.starts_with(b"data:") {
            out.extend_from_slice(line);
            out.extend_from_slice(ending);
        } else if let Some(data) = data.take() {
            out.extend_from_slice(b"data: ");
            out.extend_from_slice(data);
            out.extend_from_slice(ending);
        }
    }
    out
}

/// The first line, its ending, and what is behind.
fn first_line(bytes: &[u8]) -> (&[u8], &[u8], &[u8]) {
    let Some(end) = memchr2(b'\n', b'\r', bytes) else { return (bytes, b"", b"") };
    let ending = if bytes[end..].starts_with(b"\r\n") { 2 } else { 1 };
    (&bytes[..end], &bytes[end..end + ending], &bytes[end + ending..])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Everything that comes out, the events that were seen, and what is held.
    fn cut(pieces: &[&[u8]], cut: &str) -> (String, Vec<String>, usize) {
        let mut frames = Frames::default();
        let (mut out, mut seen) = (Vec::new(), Vec::new());
        for piece in pieces {
            let kept = frames.push(Bytes::copy_from_slice(piece), |event| {
                let text = String::from_utf8(event.to_vec()).expect("whole events only");
                let is_cut = !cut.is_empty() && text.contains(cut);
                seen.push(text);
                if is_cut { Fate::Cut } else { Fate::Keep }
            });
            assert!(!kept.is_last);
            out.extend_from_slice(&kept.bytes);
        }
        (String::from_utf8(out).expect("whole events only"), seen, frames.held.len())
    }

    #[test]
    fn spans_tile_the_stream_however_it_is_cut() {
        let stream = [
            "data: {\"a\":\"é漢🙂\"}\n\n: ping\n\n",
            "data: 1\ndata: 2\r\n\r\nevent: x\rdata: 3\r\rdata: [DONE]\n\n",
        ]
        .concat();
        for size in 1..stream.len() {
            let pieces: Vec<_> = stream.as_bytes().chunks(size).collect();
            let (out, seen, held) = cut(&pieces, "");
            assert_eq!(out, stream, "pieces of {size}");
            // Where an event ends with CR LF, the LF belongs to it and is not asked about.
            assert_eq!(seen.concat(), stream.replace("\r\n\r\n", "\r\n\r"));
            assert_eq!(held, 0);
            assert!(seen.len() >= 5, "{seen:?}");
        }
    }

    #[test]
    fn an_event_is_left_out_whole() {
        let stream = b"data: 1\n\ndata: usage\n\ndata: 2\n\ndata: usage\r\n\r\ndata: [DONE]\n\n";
        for size in 1..stream.len() {
            let pieces: Vec<_> = stream.chunks(size).collect();
            let (out, _, _) = cut(&pieces, "usage");
            assert_eq!(out, "data: 1\n\ndata: 2\n\ndata: [DONE]\n\n", "pieces of {size}");
        }
    }

    /// Every event is given out with the byte that ends it for a client, whatever its line ends
    /// are: nothing of it waits for the next one.
    #[test]
    fn an_event_is_given_out_with_its_last_byte_whatever_ends_its_lines() {
        for end in ["\n", "\r", "\r\n"] {
            let event = format!("data: 1{end}data: 2{end}{end}");
            let stream = event.repeat(3);
            for size in 1..=stream.len() {
                let mut frames = Frames::default();
                let (mut out, mut sent) = (Vec::new(), 0);
                for piece in stream.as_bytes().chunks(size) {
                    let piece = Bytes::copy_from_slice(piece);
                    sent += piece.len();
                    out.extend_from_slice(&frames.push(piece, |_| Fate::Keep).bytes);
                    let whole = sent / event.len() * event.len();
                    assert!(out.len() >= whole, "{end:?} in {size}: {} of {whole}", out.len());
                }
                assert_eq!(out, stream.as_bytes(), "{end:?} in pieces of {size}");
                assert!(frames.into_held().is_empty());
            }
        }
    }

    #[test]
    fn comments_and_fields_stay_where_data_is_left_out_or_replaced() {
        for end in ["\n", "\r", "\r\n"] {
            let stream = format!(
                "data: 1{end}{end}: ping{end}id: 7{end}data: usage{end}data{end}{end}\
                 data: usage{end}{end}data: 2{end}{end}"
            );
            for size in 1..=stream.len() {
                let pieces: Vec<_> = stream.as_bytes().chunks(size).collect();
                let (out, _, _) = cut(&pieces, "usage");
                let kept = format!("data: 1{end}{end}: ping{end}id: 7{end}{end}data: 2{end}{end}");
                assert_eq!(out, kept, "{end:?} in pieces of {size}");
                let mut frames = Frames::default();
                let mut out = Vec::new();
                for piece in pieces {
                    let cut = frames.push(Bytes::copy_from_slice(piece), |event| {
                        let is_usage = event.windows(5).any(|w| w == b"usage");
                        if is_usage { Fate::Replace(b"x".to_vec()) } else { Fate::Keep }
                    });
                    out.extend_from_slice(&cut.bytes);
                }
                let kept = format!(
                    "data: 1{end}{end}: ping{end}id: 7{end}data: x{end}{end}\
                     data: x{end}{end}data: 2{end}{end}"
                );
                assert_eq!(String::from_utf8(out).expect("text"), kept, "{end:?} in {size}");
            }
        }
    }

    #[test]
    fn half_an_event_is_held_and_a_comment_is_not() {
        assert_eq!(cut(&[b": keep-alive\n\n"], "").0, ": keep-alive\n\n");
        let (out, seen, held) = cut(&[b"data: 1\n\ndata: {\"choi"], "");
        assert_eq!((out.as_str(), seen.len(), held), ("data: 1\n\n", 1, 12));
    }

    #[test]
    fn nothing_comes_after_the_last() {
        let mut frames = Frames::default();
        let stream = Bytes::from_static(b"data: 1\n\ndata: error\n\ndata: [DONE]\n\n");
        let kept = frames.push(stream, |event| {
            if event.windows(5).any(|w| w == b"error") { Fate::Last } else { Fate::Keep }
        });
        assert_eq!(&kept.bytes[..], b"data: 1\n\ndata: error\n\n");
        assert!(kept.is_last);
    }

    #[test]
    fn the_end_marker_is_found_in_what_comes_out() {
        let stream = b"data: 1\n\ndata: usage\n\ndata: 2\n\ndata: usage\n\ndata: [DONE]\n\n";
        for size in 1..=stream.len() {
            let mut frames = Frames::default();
            let mut out = Vec::new();
            for piece in stream.chunks(size) {
                let cut = frames.push(Bytes::copy_from_slice(piece), |event| match event {
                    b"data: usage\n\n" => Fate::Cut,
                    b"data: [DONE]\n\n" => Fate::End,
                    _ => Fate::Keep,
                });
                let (before, after) = cut.bytes.split_at(cut.end_at.unwrap_or(cut.bytes.len()));
                out.extend_from_slice(before);
                if cut.end_at.is_some() {
                    out.extend_from_slice(b"|");
                }
                out.extend_from_slice(after);
            }
            assert_eq!(out, b"data: 1\n\ndata: 2\n\n|data: [DONE]\n\n", "pieces of {size}");
        }
    }

    #[test]
    fn an_event_beyond_the_limit_passes_unread() {
        let mut frames = Frames::default();
        let large = Bytes::from(vec![b'x'; HELD_BYTES_MAX + 1]);
        let kept = frames.push(large.clone(), |_| unreachable!("no event ends"));
        assert_eq!(kept.bytes, large);
        assert!(frames.is_opaque());
        let kept = frames.push(Bytes::from_static(b"\n\n"), |_| unreachable!("unread"));
        assert_eq!(&kept.bytes[..], b"\n\n");
    }
}
