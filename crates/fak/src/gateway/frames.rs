//! Cuts a byte stream at the ends of its server-sent events, so that nothing is ever relayed up to
//! the middle of one.
//!
//! Invariant: the spans that come out tile the bytes that went in; only an unfinished event is held
//! back, and no more than [`HELD_BYTES_MAX`] of one.

use bytes::Bytes;
use memchr::memchr2_iter;

/// Largest event that is held, in bytes. One with the log probabilities of many tokens has a few
/// hundred kilobytes. What is larger passes as it comes.
const HELD_BYTES_MAX: usize = 8 << 20;

/// What becomes of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// It is relayed.
    Keep,
    /// It is left out.
    Cut,
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
    /// Bytes pass unread from here on: an event outgrew the limit.
    is_opaque: bool,
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
        let mut spans = Spans { start: 0, line: self.line, kept_from: 0, kept: Vec::new() };
        let (mut end_at, mut is_last) = (None, false);
        for at in memchr2_iter(b'\n', b'\r', &bytes[scanned..]).map(|at| at + scanned) {
            let Some(span) = spans.line_end(&bytes, at) else { continue };
            match fate(&bytes[span.clone()]) {
                Fate::Keep => {}
                Fate::Cut => spans.leave_out(&bytes, span),
                Fate::End => end_at = Some(spans.out_at(span.start)),
                Fate::Last => {
                    is_last = true;
                    break;
                }
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
    /// Takes note of the line end at `at`; the event's span if an empty line ends it. The LF of a
    /// CR LF that ends an event belongs to the next span, so that an event is given out as soon as
    /// it is whole.
    fn line_end(&mut self, bytes: &[u8], at: usize) -> Option<std::ops::Range<usize>> {
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

    fn leave_out(&mut self, bytes: &[u8], span: std::ops::Range<usize>) {
        self.kept.extend_from_slice(&bytes[self.kept_from..span.start]);
        self.kept_from = span.end;
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
            assert_eq!(seen.concat(), stream);
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
            // The LF of the CR LF before it stays.
            assert_eq!(out, "data: 1\n\ndata: 2\n\n\ndata: [DONE]\n\n", "pieces of {size}");
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
