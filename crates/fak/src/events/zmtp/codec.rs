//! ZMTP 3.0 frames: bytes to messages and back, without I/O (RFC 23).
//!
//! Invariant: nothing is reserved for a size that the peer announces, and what is announced is
//! checked against the limits before a byte of it is awaited.

use bytes::{Buf, BufMut, Bytes, BytesMut};

use super::{Error, Limits};

const MORE: u8 = 0b001;
const LONG: u8 = 0b010;
const COMMAND: u8 = 0b100;

/// What the peer sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Incoming {
    /// A whole message: its frames.
    Message(Vec<Bytes>),
    /// A protocol command: its name and its data.
    Command { name: Bytes, data: Bytes },
}

/// Collects the frames of the message that is coming in.
#[derive(Debug)]
pub(super) struct Decoder {
    limits: Limits,
    frames: Vec<Bytes>,
    frames_bytes: usize,
}

struct Header {
    flags: u8,
    /// Bytes of the header itself: 2 or 9.
    header_len: usize,
    body_len: u64,
}

impl Decoder {
    pub(super) fn new(limits: Limits) -> Self {
        Self { limits, frames: Vec::new(), frames_bytes: 0 }
    }

    /// Takes the next message or command off the front of `buffer`; `None` until the rest of it has
    /// come.
    pub(super) fn decode(&mut self, buffer: &mut BytesMut) -> Result<Option<Incoming>, Error> {
        loop {
            let Some(header) = header(buffer)? else { return Ok(None) };
            let body_len = self.admit(&header)?;
            if buffer.len() < header.header_len + body_len {
                return Ok(None);
            }
            buffer.advance(header.header_len);
            // A copy, so that a small frame that is kept does not keep the whole read buffer.
            let body = Bytes::copy_from_slice(&buffer[..body_len]);
            buffer.advance(body_len);
            if header.flags & COMMAND != 0 {
                return command(body).map(Some);
            }
            self.frames_bytes += body_len;
            self.frames.push(body);
            if header.flags & MORE == 0 {
                self.frames_bytes = 0;
                return Ok(Some(Incoming::Message(std::mem::take(&mut self.frames))));
            }
        }
    }

    /// The length of the frame's body, if it keeps the message within its limits.
    fn admit(&self, header: &Header) -> Result<usize, Error> {
        let limit = self.limits.message_bytes_max;
        let body_len = usize::try_from(header.body_len).unwrap_or(usize::MAX);
        let bytes = self.frames_bytes.saturating_add(body_len);
        if bytes > limit {
            return Err(Error::TooLarge { bytes, limit });
        }
        if header.flags & COMMAND == 0 && self.frames.len() >= self.limits.frames_max {
            return Err(Error::TooManyFrames { limit: self.limits.frames_max });
        }
        Ok(body_len)
    }
}

fn header(buffer: &[u8]) -> Result<Option<Header>, Error> {
    let Some(&flags) = buffer.first() else { return Ok(None) };
    if flags & !(MORE | LONG | COMMAND) != 0 {
        return Err(Error::Protocol("reserved bits are set in a frame's flags"));
    }
    if flags & COMMAND != 0 && flags & MORE != 0 {
        return Err(Error::Protocol("a command announces more frames"));
    }
    let length = &buffer[1..];
    Ok(if flags & LONG != 0 {
        length.first_chunk::<8>().map(|length| Header {
            flags,
            header_len: 9,
            body_len: u64::from_be_bytes(*length),
        })
    } else {
        length.first().map(|length| Header { flags, header_len: 2, body_len: u64::from(*length) })
    })
}

fn command(mut body: Bytes) -> Result<Incoming, Error> {
    let name_len = body.first().copied().map(usize::from);
    match name_len.filter(|name_len| body.len() > *name_len) {
        None => Err(Error::Protocol("a command's name is cut short")),
        Some(name_len) => {
            body.advance(1);
            let name = body.split_to(name_len);
            Ok(Incoming::Command { name, data: body })
        }
    }
}

/// Appends one message of `frames` to `out`.
pub(super) fn encode_message(frames: &[&[u8]], out: &mut BytesMut) {
    let last = frames.len().saturating_sub(1);
    for (index, frame) in frames.iter().enumerate() {
        encode_frame(if index < last { MORE } else { 0 }, frame, out);
    }
}

/// Appends a command to `out`. `name` is shorter than 256 bytes: all of ours are.
pub(super) fn encode_command(name: &str, data: &[u8], out: &mut BytesMut) {
    let mut body = Vec::with_capacity(1 + name.len() + data.len());
    body.push(u8::try_from(name.len()).expect("our command names are short"));
    body.extend_from_slice(name.as_bytes());
    body.extend_from_slice(data);
    encode_frame(COMMAND, &body, out);
}

fn encode_frame(flags: u8, body: &[u8], out: &mut BytesMut) {
    match u8::try_from(body.len()) {
        Ok(length) => out.put_slice(&[flags, length]),
        Err(_) => {
            out.put_u8(flags | LONG);
            out.put_u64(body.len() as u64);
        }
    }
    out.put_slice(body);
}

/// The value of `wanted` among a READY command's properties: `u8 length, name, u32 length, value`,
/// repeated. Names are compared without regard to case, as the RFC asks.
pub(super) fn property(mut data: &[u8], wanted: &str) -> Result<Option<Bytes>, Error> {
    const CUT: Error = Error::Protocol("a READY property is cut short");
    while !data.is_empty() {
        let name_len = usize::from(data.get_u8());
        let (name, rest) = data.split_at_checked(name_len).ok_or(CUT)?;
        let (length, rest) = rest.split_first_chunk::<4>().ok_or(CUT)?;
        let value_len = usize::try_from(u32::from_be_bytes(*length)).map_err(|_| CUT)?;
        let (value, rest) = rest.split_at_checked(value_len).ok_or(CUT)?;
        if name.eq_ignore_ascii_case(wanted.as_bytes()) {
            return Ok(Some(Bytes::copy_from_slice(value)));
        }
        data = rest;
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits =
        Limits { message_bytes_max: 1000, frames_max: 4, read_ahead_bytes: 1000 };

    fn decode_all(bytes: &[u8], step: usize) -> Result<Vec<Incoming>, Error> {
        let mut decoder = Decoder::new(LIMITS);
        let mut buffer = BytesMut::new();
        let mut got = Vec::new();
        for chunk in bytes.chunks(step) {
            buffer.extend_from_slice(chunk);
            while let Some(incoming) = decoder.decode(&mut buffer)? {
                got.push(incoming);
            }
        }
        Ok(got)
    }

    #[test]
    fn messages_come_out_as_they_went_in_however_they_are_cut() {
        let long = [7u8; 300];
        let messages: [&[&[u8]]; 4] =
            [&[b"", b"topic", &long], &[b""], &[b"a"], &[&long, &long, b""]];
        let mut bytes = BytesMut::new();
        for message in messages {
            encode_message(message, &mut bytes);
        }
        encode_command("PING", b"\0\0ctx", &mut bytes);
        for step in [1, 2, 3, 7, 64, bytes.len()] {
            let got = decode_all(&bytes, step).unwrap();
            assert_eq!(got.len(), 5, "step {step}");
            for (got, sent) in got.iter().zip(messages) {
                let Incoming::Message(frames) = got else { panic!("{got:?}") };
                assert_eq!(frames.iter().map(|f| &f[..]).collect::<Vec<_>>(), sent);
            }
            let ping = Incoming::Command { name: "PING".into(), data: b"\0\0ctx"[..].into() };
            assert_eq!(got[4], ping);
        }
    }

    #[test]
    fn an_announced_size_beyond_the_limit_is_refused_before_it_comes() {
        for announced in [1001, 1 << 20, 1 << 45, u64::MAX] {
            let mut bytes = vec![LONG];
            bytes.extend_from_slice(&announced.to_be_bytes());
            let error = decode_all(&bytes, 1).unwrap_err();
            assert!(matches!(error, Error::TooLarge { limit: 1000, .. }), "{announced}: {error}");
        }
        // The limit holds for the message as a whole, not for each frame.
        let mut bytes = BytesMut::new();
        encode_message(&[&[0; 600], &[0; 600]], &mut bytes);
        assert!(matches!(
            decode_all(&bytes, 64),
            Err(Error::TooLarge { bytes: 1200, limit: 1000 })
        ));
    }

    #[test]
    fn endless_frames_are_refused() {
        let error = decode_all(&[MORE, 0].repeat(5), 64).unwrap_err();
        assert!(matches!(error, Error::TooManyFrames { limit: 4 }), "{error}");
        assert_eq!(decode_all(&[MORE, 0].repeat(4), 64).unwrap(), []);
    }

    #[test]
    fn nonsense_is_refused() {
        for bytes in
            [&b"HTTP"[..], &[0x80, 0], &[COMMAND | MORE, 0], &[COMMAND, 0], &[COMMAND, 2, 5, b'R']]
        {
            let error = decode_all(bytes, 64).unwrap_err();
            assert!(matches!(error, Error::Protocol(_)), "{bytes:?}: {error}");
        }
    }

    #[test]
    fn properties_are_found_by_name_and_never_read_past_their_end() {
        let data = b"\x08Identity\0\0\0\0\x0bSOCKET-TYPE\0\0\0\x03PUB";
        assert_eq!(property(data, "Socket-Type").unwrap().unwrap(), "PUB");
        assert_eq!(property(data, "Other").unwrap(), None);
        for cut in 1..data.len() {
            let whole = cut == 13; // the end of the first property
            assert_eq!(property(&data[..cut], "Socket-Type").is_ok(), whole, "cut at {cut}");
        }
        assert!(property(b"\x01a\xff\xff\xff\xff", "a").is_err());
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_decode_or_fail_within_the_limits(bytes: Vec<u8>, step in 1usize..9) {
            if let Ok(incoming) = decode_all(&bytes, step) {
                for message in incoming {
                    if let Incoming::Message(frames) = message {
                        assert!(frames.len() <= LIMITS.frames_max);
                        let bytes: usize = frames.iter().map(Bytes::len).sum();
                        assert!(bytes <= LIMITS.message_bytes_max);
                    }
                }
            }
        }
    }
}
