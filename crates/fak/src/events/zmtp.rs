//! A ZMTP 3.0 client over TCP: what a SUB and a DEALER need to talk to a vLLM, and nothing more.
//!
//! Invariant: a [`Connection`] is one TCP connection from its greeting to its end. It never
//! reconnects, so a message that it yields was sent by the process at the other end of that one
//! connection; and no size that the peer announces is reserved before it is checked.
//!
//! Why not the sockets of the `zeromq` crate (0.7.0, read and measured): a frame header of nine
//! bytes that announces 2^45 bytes makes its decoder reserve them, which aborts the process
//! (`handle_alloc_error`, not a panic), and no option limits a message; its SUB reconnects behind
//! the caller's back, without a time limit on the handshake; and it answers no PING.

mod codec;

use std::io;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use socket2::{SockRef, TcpKeepalive};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

use self::codec::{Decoder, Incoming};
use super::endpoint::Endpoint;

/// Bytes asked of the kernel in one read.
const READ_BYTES: usize = 64 * 1024;
/// A read buffer beyond this is given back once it is empty.
const BUFFER_KEPT_BYTES: usize = 1024 * 1024;
const GREETING_BYTES: usize = 64;
/// A connection that is silent for this long is probed: a publisher whose host vanished sends
/// nothing, not even an end. With Linux's 9 probes an unanswered connection ends 60 s after its
/// last byte.
const KEEPALIVE_AFTER: Duration = Duration::from_secs(15);
const KEEPALIVE_EVERY: Duration = Duration::from_secs(5);

/// What fak is to its peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Listens to a publisher.
    Sub,
    /// Asks a ROUTER and takes any number of answers.
    Dealer,
}

impl Role {
    fn name(self) -> &'static str {
        match self {
            Self::Sub => "SUB",
            Self::Dealer => "DEALER",
        }
    }

    /// The socket types that may answer. A vLLM has a PUB and a ROUTER; a proxy in between has an
    /// XPUB.
    fn peers(self) -> &'static [&'static str] {
        match self {
            Self::Sub => &["PUB", "XPUB"],
            Self::Dealer => &["ROUTER"],
        }
    }
}

/// Limits on what a peer may make fak hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of one message, all frames together. A longer one ends the connection.
    pub message_bytes_max: usize,
    /// Frames of one message. More end the connection.
    pub frames_max: usize,
    /// Bytes that are taken off the wire ahead of the reader, so that a reader that works a little
    /// between two messages does not stall the peer; the buffer holds at most this and one message.
    pub read_ahead_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        // A BlockStored carries its tokens: a prompt of a million tokens is a batch of about 5 MB.
        Self { message_bytes_max: 64 << 20, frames_max: 8, read_ahead_bytes: 1 << 20 }
    }
}

/// Why there is no connection, or no longer one.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The network refused, failed or reset.
    #[error("the connection failed")]
    Io(#[from] io::Error),
    /// The peer ended the connection.
    #[error("the peer closed the connection")]
    Closed,
    /// Connecting and shaking hands took too long.
    #[error("no ZMTP handshake within {} ms", within.as_millis())]
    Handshake {
        /// The time that was given.
        within: Duration,
    },
    /// Something else than a ZMQ socket listens there.
    #[error("the peer does not speak ZMTP (its first byte is {first:#04x})")]
    NotZmtp {
        /// The first byte it sent.
        first: u8,
    },
    /// A ZMQ older than 4.0.
    #[error("the peer speaks ZMTP {major}, older than 3")]
    Version {
        /// Its major version.
        major: u8,
    },
    /// The peer asks for PLAIN or CURVE; vLLM cannot be set up so.
    #[error("the peer asks for the security mechanism `{name}`")]
    Mechanism {
        /// What it asks for.
        name: String,
    },
    /// The peer answered the handshake with an error.
    #[error("the peer refused the handshake: {reason}")]
    Refused {
        /// Its words.
        reason: String,
    },
    /// Another kind of socket: live and replay endpoints may have been swapped.
    #[error("the peer is a {found} socket, and a {role} talks to {wanted}")]
    WrongSocket {
        /// The peer's type.
        found: String,
        /// Ours.
        role: &'static str,
        /// The types that we can talk to.
        wanted: String,
    },
    /// Bytes that no ZMTP peer sends.
    #[error("ZMTP violated: {0}")]
    Protocol(&'static str),
    /// A message beyond the limit was announced.
    #[error("a message of {bytes} bytes or more, limit {limit}")]
    TooLarge {
        /// Bytes announced up to here.
        bytes: usize,
        /// The limit.
        limit: usize,
    },
    /// A message of too many frames.
    #[error("a message of more than {limit} frames")]
    TooManyFrames {
        /// The limit.
        limit: usize,
    },
}

/// One connection, shaken hands.
#[derive(Debug)]
pub struct Connection {
    stream: TcpStream,
    buffer: BytesMut,
    decoder: Decoder,
    read_ahead_bytes: usize,
    /// How the stream ended; told once the buffer holds no whole message any more.
    ended: Option<Error>,
}

impl Connection {
    /// Connects and shakes hands, within `within`.
    ///
    /// # Errors
    /// Every [`Error`] but the two about messages.
    pub async fn open(
        endpoint: &Endpoint,
        role: Role,
        limits: Limits,
        within: Duration,
    ) -> Result<Self, Error> {
        let opening = async {
            let stream = TcpStream::connect((endpoint.host.as_str(), endpoint.port)).await?;
            stream.set_nodelay(true)?;
            let keepalive =
                TcpKeepalive::new().with_time(KEEPALIVE_AFTER).with_interval(KEEPALIVE_EVERY);
            SockRef::from(&stream).set_tcp_keepalive(&keepalive)?;
            let mut connection = Self {
                stream,
                buffer: BytesMut::new(),
                decoder: Decoder::new(limits),
                read_ahead_bytes: limits.read_ahead_bytes,
                ended: None,
            };
            connection.shake_hands(role).await?;
            Ok(connection)
        };
        tokio::time::timeout(within, opening).await.unwrap_or(Err(Error::Handshake { within }))
    }

    async fn shake_hands(&mut self, role: Role) -> Result<(), Error> {
        self.stream.write_all(&greeting()).await?;
        while self.buffer.len() < GREETING_BYTES {
            self.read_more().await?;
            if let Some(&first) = self.buffer.first().filter(|first| **first != 0xff) {
                return Err(Error::NotZmtp { first });
            }
        }
        check_greeting(&self.buffer.split_to(GREETING_BYTES))?;

        let mut ready = Vec::new();
        put_property(&mut ready, "Socket-Type", role.name().as_bytes());
        if role == Role::Dealer {
            put_property(&mut ready, "Identity", b"");
        }
        let mut out = BytesMut::new();
        codec::encode_command("READY", &ready, &mut out);
        self.stream.write_all(&out).await?;

        loop {
            match self.decoder.decode(&mut self.buffer)? {
                Some(Incoming::Command { name, data }) => return check_ready(role, &name, &data),
                Some(Incoming::Message(_)) => {
                    return Err(Error::Protocol("a message came before the handshake's end"));
                }
                None => self.read_more().await?,
            }
        }
    }

    /// Sends one message. Not to be cancelled: half a message on the wire ends the connection's
    /// use.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub async fn send(&mut self, frames: &[&[u8]]) -> Result<(), Error> {
        let mut out = BytesMut::new();
        codec::encode_message(frames, &mut out);
        self.stream.write_all(&out).await?;
        Ok(())
    }

    /// The next message's frames, at least one. Nothing is lost when the future is dropped.
    ///
    /// What had come in whole before the peer's end is yielded before the end is told.
    ///
    /// # Errors
    /// The connection is over; every later call fails too.
    pub async fn recv(&mut self) -> Result<Vec<Bytes>, Error> {
        loop {
            // A peer that always has one more message must not keep its reader from yielding.
            tokio::task::coop::consume_budget().await;
            self.read_ahead();
            let outcome = match self.decoder.decode(&mut self.buffer) {
                Ok(Some(Incoming::Message(frames))) => return Ok(frames),
                Ok(Some(Incoming::Command { name, data })) => self.on_command(&name, &data),
                Ok(None) => match self.ended.take() {
                    Some(ended) => Err(ended),
                    None => self.stream.readable().await.map_err(Error::Io),
                },
                Err(error) => Err(error),
            };
            if let Err(error) = outcome {
                self.buffer.clear();
                self.ended = Some(Error::Closed);
                return Err(error);
            }
        }
    }

    /// Takes what has come in already, up to the limit, without waiting.
    fn read_ahead(&mut self) {
        if self.buffer.is_empty() && self.buffer.capacity() > BUFFER_KEPT_BYTES {
            self.buffer = BytesMut::new();
        }
        let mut room = self.read_ahead_bytes.max(self.buffer.len() + 1) - self.buffer.len();
        while self.ended.is_none() && room > 0 {
            self.buffer.reserve(READ_BYTES);
            match self.stream.try_read_buf(&mut self.buffer) {
                Ok(0) => self.ended = Some(Error::Closed),
                Ok(read) => room = room.saturating_sub(read),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) => self.ended = Some(Error::Io(error)),
            }
        }
    }

    /// Waits for bytes, while shaking hands.
    async fn read_more(&mut self) -> Result<(), Error> {
        use tokio::io::AsyncReadExt;
        match self.stream.read_buf(&mut self.buffer).await? {
            0 => Err(Error::Closed),
            _ => Ok(()),
        }
    }

    fn on_command(&mut self, name: &[u8], data: &[u8]) -> Result<(), Error> {
        if name != b"PING" {
            return Ok(());
        }
        // RFC 37: two bytes of time-to-live, then up to 16 of context, which the PONG carries back.
        let context = data.get(2..).unwrap_or_default();
        let mut out = BytesMut::new();
        codec::encode_command("PONG", &context[..context.len().min(16)], &mut out);
        // A SUB and a DEALER that has asked have nothing else to send, so 23 bytes fit into the
        // kernel's buffer, unless the peer reads nothing; and a write without an await leaves no
        // half a frame behind when cancelled.
        match self.stream.try_write(&out) {
            Ok(written) if written == out.len() => Ok(()),
            Ok(_) => Err(Error::Protocol("the peer asks for signs of life and reads none")),
            Err(error) => Err(Error::Io(error)),
        }
    }
}

/// Signature, version 3.0, mechanism NULL, not a server.
fn greeting() -> [u8; GREETING_BYTES] {
    let mut greeting = [0; GREETING_BYTES];
    greeting[0] = 0xff;
    greeting[9] = 0x7f;
    greeting[10] = 3;
    greeting[12..16].copy_from_slice(b"NULL");
    greeting
}

fn check_greeting(greeting: &[u8]) -> Result<(), Error> {
    let (major, mechanism) = (greeting[10], &greeting[12..32]);
    if greeting[9] & 1 == 0 || major < 3 {
        return Err(Error::Version { major });
    }
    let end = mechanism.iter().position(|byte| *byte == 0).unwrap_or(mechanism.len());
    match &mechanism[..end] {
        b"NULL" => Ok(()),
        name => Err(Error::Mechanism { name: String::from_utf8_lossy(name).into_owned() }),
    }
}

fn check_ready(role: Role, name: &[u8], data: &[u8]) -> Result<(), Error> {
    match name {
        b"READY" => {
            let found = codec::property(data, "Socket-Type")?.unwrap_or_default();
            if role.peers().iter().any(|peer| peer.as_bytes() == found) {
                return Ok(());
            }
            Err(Error::WrongSocket {
                found: told(&found),
                role: role.name(),
                wanted: role.peers().join(" or "),
            })
        }
        b"ERROR" => Err(Error::Refused { reason: told(data.get(1..).unwrap_or_default()) }),
        _ => Err(Error::Protocol("the handshake was answered by neither READY nor ERROR")),
    }
}

/// A peer's words, short enough for a log line and without control characters.
fn told(words: &[u8]) -> String {
    let words = &words[..words.len().min(200)];
    String::from_utf8_lossy(words).chars().filter(|c| !c.is_control()).collect()
}

fn put_property(out: &mut Vec<u8>, name: &str, value: &[u8]) {
    let short = "our property names and values are short";
    out.push(u8::try_from(name.len()).expect(short));
    out.extend_from_slice(name.as_bytes());
    out.extend_from_slice(&u32::try_from(value.len()).expect(short).to_be_bytes());
    out.extend_from_slice(value);
}
