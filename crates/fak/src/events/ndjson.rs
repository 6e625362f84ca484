//! Events as lines of JSON, for tests and for bridges from engines that publish in another way.
//!
//! Invariant: a good line becomes the batch that a vLLM of today would have published, in its
//! msgpack form, so that whatever reads batches cannot tell the two apart; a bad line is told and
//! the next one is read.
//!
//! One object a line:
//!
//! ```json
//! {"seq":0,"ts":1700000000.25,"rank":0,"events":[
//!   {"type":"stored","block_hashes":[1,"0x2f"],"parent_block_hash":null,"token_ids":[1,2],
//!    "block_size":1,"medium":"GPU"},
//!   {"type":"removed","block_hashes":[1],"medium":"GPU"},
//!   {"type":"cleared"}]}
//! ```
//!
//! (on one line). `seq` and `events` are required; `ts` is 0 and `rank` absent otherwise. An event
//! has the fields of vLLM's map layout under their names there. A block hash is an integer, signed
//! or unsigned, or a string `0x…`: up to 16 hex digits are the same integer, more are the bytes of
//! a digest.

use bytes::Bytes;
use fak_wire::kv;
use rmpv::Value as Packed;
use serde_json::{Map, Value};
use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader};

use super::{Bad, Item, Lost};

/// Limits on the input.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of a line; a longer one is passed over.
    pub line_bytes_max: usize,
    /// Limits on the batch that it holds.
    pub batch: kv::Limits,
}

impl Default for Limits {
    fn default() -> Self {
        Self { line_bytes_max: 4 << 20, batch: kv::Limits::default() }
    }
}

/// What is wrong with a line.
#[derive(Debug, thiserror::Error)]
pub enum LineError {
    /// Longer than the limit.
    #[error("longer than {limit} bytes")]
    TooLong {
        /// The limit.
        limit: usize,
    },
    /// Not JSON.
    #[error("not a JSON object")]
    Json(#[from] serde_json::Error),
    /// A field that is missing or of another type.
    #[error("{field} is not {wanted}")]
    Field {
        /// The field.
        field: &'static str,
        /// What it should hold.
        wanted: &'static str,
    },
    /// Events that contradict themselves, or lack what they need.
    #[error("not a batch")]
    Batch(#[from] kv::DecodeError),
}

#[derive(Debug, PartialEq, Eq)]
enum Stage {
    Start,
    Reading,
    Ended,
}

/// A source of one rank's events from lines of JSON.
#[derive(Debug)]
pub struct Lines<R> {
    input: BufReader<R>,
    limits: Limits,
    stage: Stage,
    /// The line so far; never longer than the limit and one byte.
    line: Vec<u8>,
    /// Lines read, blank ones included.
    number: u64,
}

impl<R: AsyncRead + Unpin> Lines<R> {
    /// Reads from `input` until its end.
    pub fn new(input: R, limits: Limits) -> Self {
        Self {
            input: BufReader::new(input),
            limits,
            stage: Stage::Start,
            line: Vec::new(),
            number: 0,
        }
    }

    /// The next item: one [`Item::Connected`], a batch or [`Item::Bad`] a line, and one
    /// [`Item::Disconnected`]; then `None`. Nothing is lost when the future is dropped.
    pub async fn next(&mut self) -> Option<Item> {
        match self.stage {
            Stage::Start => {
                self.stage = Stage::Reading;
                return Some(Item::Connected { epoch: 1 });
            }
            Stage::Reading => {}
            Stage::Ended => return None,
        }
        loop {
            // What lies in the buffer is ready at once, for any number of lines.
            tokio::task::coop::consume_budget().await;
            let chunk = match self.input.fill_buf().await {
                Ok(chunk) => chunk,
                Err(error) => return Some(self.end(Lost::Read(error))),
            };
            if chunk.is_empty() {
                // A last line without its line feed counts as one.
                return Some(self.finish_line().unwrap_or_else(|| self.end(Lost::Ended)));
            }
            let feed = chunk.iter().position(|byte| *byte == b'\n');
            let taken = feed.map_or(chunk.len(), |at| at + 1);
            let room = (self.limits.line_bytes_max + 1).saturating_sub(self.line.len());
            self.line.extend_from_slice(&chunk[..feed.unwrap_or(taken).min(room)]);
            self.input.consume(taken);
            if feed.is_some()
                && let Some(item) = self.finish_line()
            {
                return Some(item);
            }
        }
    }

    fn end(&mut self, why: Lost) -> Item {
        self.stage = Stage::Ended;
        Item::Disconnected { why }
    }

    /// What the line holds; `None` if it is blank.
    fn finish_line(&mut self) -> Option<Item> {
        let line = std::mem::take(&mut self.line);
        self.number += 1;
        let limit = self.limits.line_bytes_max;
        let batch = match line.trim_ascii() {
            _ if line.len() > limit => Err(LineError::TooLong { limit }),
            [] => return None,
            line => batch(line, &self.limits.batch),
        };
        Some(match batch {
            Ok((seq, payload)) => Item::Batch { seq, payload },
            Err(why) => Item::Bad { why: Bad::Line { number: self.number, why } },
        })
    }
}

/// The sequence number and the msgpack payload of one line.
fn batch(line: &[u8], limits: &kv::Limits) -> Result<(u64, Bytes), LineError> {
    let mut line: Map<String, Value> = serde_json::from_slice(line)?;
    let field = |field, wanted| LineError::Field { field, wanted };
    let seq = line
        .get("seq")
        .and_then(Value::as_u64)
        .filter(|seq| *seq != u64::MAX)
        .ok_or(field("seq", "a number from 0 to 2^64-2"))?;
    let ts = match line.get("ts") {
        None => 0.0,
        Some(ts) => ts.as_f64().ok_or(field("ts", "a number of seconds"))?,
    };
    let rank = line.remove("rank").map_or(Packed::Nil, packed);
    let Some(Value::Array(events)) = line.remove("events") else {
        return Err(field("events", "an array"));
    };
    let events = events.into_iter().map(event).collect::<Result<_, _>>()?;
    let batch = Packed::Array(vec![ts.into(), Packed::Array(events), rank]);
    let mut payload = Vec::new();
    rmpv::encode::write_value(&mut payload, &batch).expect("a Vec takes every write");
    kv::decode(&payload, limits)?;
    Ok((seq, payload.into()))
}

fn event(event: Value) -> Result<Packed, LineError> {
    let Value::Object(fields) = event else {
        return Err(LineError::Field { field: "event", wanted: "an object" });
    };
    let fields = fields.into_iter().map(|(name, value)| {
        let value = match (name.as_str(), value) {
            ("type", Value::String(kind)) => tag(&kind).into(),
            ("block_hashes", Value::Array(hashes)) => {
                Packed::Array(hashes.into_iter().map(hash).collect::<Result<_, _>>()?)
            }
            ("parent_block_hash", parent) => hash(parent)?,
            (_, value) => packed(value),
        };
        Ok((name.into(), value))
    });
    Ok(Packed::Map(fields.collect::<Result<_, LineError>>()?))
}

/// vLLM's tag for an event; another type goes through as it is, to be counted as unknown.
fn tag(kind: &str) -> &str {
    match kind {
        "stored" => "BlockStored",
        "removed" => "BlockRemoved",
        "cleared" => "AllBlocksCleared",
        other => other,
    }
}

fn hash(value: Value) -> Result<Packed, LineError> {
    let Value::String(text) = &value else { return Ok(packed(value)) };
    let wanted = "an integer or a string 0x… of hex digits, an even number beyond 16";
    let error = || LineError::Field { field: "block hash", wanted };
    let digits = text.strip_prefix("0x").ok_or_else(error)?;
    if !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return Err(error());
    }
    let number = |digits| u64::from_str_radix(digits, 16).map_err(|_| error());
    if digits.len() <= 16 {
        return number(digits).map(Packed::from);
    }
    let (pairs, []) = digits.as_bytes().as_chunks::<2>() else { return Err(error()) };
    let byte = |pair: &[u8; 2]| pair.iter().fold(0, |byte, digit| byte << 4 | hex_value(*digit));
    Ok(Packed::Binary(pairs.iter().map(byte).collect()))
}

/// The value of an ASCII hex digit.
fn hex_value(digit: u8) -> u8 {
    match digit {
        b'0'..=b'9' => digit - b'0',
        _ => (digit | 0x20) - b'a' + 10,
    }
}

/// The same value in msgpack.
fn packed(value: Value) -> Packed {
    match value {
        Value::Null => Packed::Nil,
        Value::Bool(value) => value.into(),
        Value::Number(number) => match (number.as_u64(), number.as_i64(), number.as_f64()) {
            (Some(number), _, _) => number.into(),
            (_, Some(number), _) => number.into(),
            (_, _, number) => number.map_or(Packed::Nil, Packed::from),
        },
        Value::String(text) => text.into(),
        Value::Array(values) => Packed::Array(values.into_iter().map(packed).collect()),
        Value::Object(fields) => {
            let field = |(name, value): (String, Value)| (name.into(), packed(value));
            Packed::Map(fields.into_iter().map(field).collect())
        }
    }
}

#[cfg(test)]
mod tests;
