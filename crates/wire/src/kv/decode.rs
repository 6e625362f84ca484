//! One pass from a payload to a [`Batch`]: an outer array of time, events and rank, whose events
//! are arrays of positions (up to vLLM 0.23.0) or maps of names (since 0.24.0), mixed as they come.
//! Invariant: a field means the same in both forms, and what contradicts itself is refused.

use std::mem::replace;

use super::reader::Reader;
use super::{
    Batch, DecodeError, Event, ExtraKey, ExtraKeys, Limits, Place, Removed, Stored,
    UNKNOWN_TAGS_MAX,
};

type Result<T> = std::result::Result<T, DecodeError>;

/// Decodes the payload frame of a live message or of a replay reply.
///
/// # Errors
/// Names the event and field at fault if the payload is truncated, of another shape, over `limits`,
/// or contradicts itself. Event types that are not known are counted, not refused.
pub fn decode(payload: &[u8], limits: &Limits) -> Result<Batch> {
    let mut r = Reader::new(payload, limits);
    if payload.len() > limits.payload_bytes {
        let limit = limits.payload_bytes as u64;
        return Err(r.over(payload.len() as u64, "bytes", limit));
    }
    let elements = r.array("elements", limits.fields, "an array of time, events and rank")?;
    if elements < 2 {
        return Err(r.unexpected(format!("{elements} elements"), "time, events and rank"));
    }
    r.at.field = "ts";
    let mut batch = Batch { ts: r.seconds()?, ..Batch::default() };
    events(&mut r, &mut batch)?;
    r.at = Place { event: None, field: "data_parallel_rank" };
    if elements > 2 {
        batch.rank = r.optional(|r| r.int("a rank of 0 or more, or nil"))?;
    }
    r.at.field = "payload";
    for _ in 3..elements {
        r.skip()?;
    }
    match r.rest().len() {
        0 => Ok(batch),
        more => Err(r.unexpected(format!("{more} bytes after the batch"), "its end")),
    }
}

fn events(r: &mut Reader<'_>, batch: &mut Batch) -> Result<()> {
    r.at.field = "events";
    let len = r.array("events", r.limits().events, "an array of events")?;
    for index in 0..len {
        r.at = Place { event: Some(index), field: "type" };
        event(r, batch)?;
    }
    Ok(())
}

fn event(r: &mut Reader<'_>, batch: &mut Batch) -> Result<()> {
    let (len, is_map) = r.container("an array or a map")?;
    r.check_len(len, "fields", r.limits().fields, "the event's fields")?;
    let tag = if is_map { tag_of_map(r, len)? } else { tag_of_array(r, len)? };
    let event = match tag {
        "BlockStored" => {
            let mut draft = StoredDraft::default();
            fields(r, (len, is_map), &STORED, |r, field| draft.set(r, field))?;
            Event::Stored(draft.finish(r)?)
        }
        "BlockRemoved" => {
            let mut draft = RemovedDraft::default();
            fields(r, (len, is_map), &REMOVED, |r, field| draft.set(r, field))?;
            Event::Removed(draft.finish(r)?)
        }
        "AllBlocksCleared" => {
            fields(r, (len, is_map), &[], |r, _| r.skip())?;
            Event::Cleared
        }
        unknown => {
            fields(r, (len, is_map), &[], |r, _| r.skip())?;
            return note_unknown(r, batch, unknown);
        }
    };
    // Twice, since a growing list may hold room for as many again.
    r.charge(2 * size_of::<Event>())?;
    batch.events.push(event);
    Ok(())
}

fn note_unknown(r: &mut Reader<'_>, batch: &mut Batch, tag: &str) -> Result<()> {
    batch.unknown_events += 1;
    let known = batch.unknown_tags.iter().any(|seen| seen == tag);
    if !known && batch.unknown_tags.len() < UNKNOWN_TAGS_MAX {
        r.charge(tag.len())?;
        batch.unknown_tags.push(tag.to_owned());
    }
    Ok(())
}

const TAG: &str = "the event's type";

fn tag_of_array<'a>(r: &mut Reader<'a>, len: u32) -> Result<&'a str> {
    if len == 0 {
        return Err(DecodeError::Missing { at: r.at, expected: TAG });
    }
    r.text(TAG)
}

/// Looks ahead for the tag, since it says how the other fields are read. The engines write it
/// first, so that this costs nothing; elsewhere in the map it costs one more pass over the event.
fn tag_of_map<'a>(r: &mut Reader<'a>, len: u32) -> Result<&'a str> {
    let start = r.rest();
    for _ in 0..len {
        if r.text("a field name")? == "type" {
            let tag = r.text(TAG)?;
            r.rewind(start);
            return Ok(tag);
        }
        r.skip()?;
    }
    Err(DecodeError::Missing { at: r.at, expected: TAG })
}

/// Walks the fields of an event, positional ones from after the tag, and hands those listed in
/// `names` to `set`, by their position in it. Others are passed over; none may come twice.
fn fields<'a>(
    r: &mut Reader<'a>,
    (len, is_map): (u32, bool),
    names: &[&'static str],
    mut set: impl FnMut(&mut Reader<'a>, usize) -> Result<()>,
) -> Result<()> {
    if !is_map {
        for position in 0..len as usize - 1 {
            match names.get(position) {
                Some(name) => {
                    r.at.field = name;
                    set(r, position)?;
                }
                None => r.skip()?,
            }
        }
        return Ok(());
    }
    let mut known_seen = [false; STORED.len()];
    let mut others_seen: Vec<&str> = Vec::new();
    let mut next = 0;
    for _ in 0..len {
        r.at.field = "(name)";
        let name = r.text("a field name")?;
        // The engines write fields in the order of the table.
        let is_next = names.get(next).is_some_and(|known| *known == name);
        let found =
            if is_next { Some(next) } else { names.iter().position(|known| *known == name) };
        let Some(position) = found else {
            r.at.field = "(unknown)";
            if others_seen.contains(&name) {
                return Err(DecodeError::Duplicate { at: r.at });
            }
            others_seen.push(name);
            r.skip()?;
            continue;
        };
        r.at.field = names[position];
        if replace(&mut known_seen[position], true) {
            return Err(DecodeError::Duplicate { at: r.at });
        }
        set(r, position)?;
        next = position + 1;
    }
    Ok(())
}

/// Names of a store's fields, in positional order.
const STORED: [&str; 15] = [
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
    "locality",
    "ownership",
    "session_id",
    "lookahead_token_ids",
];

/// How many of [`STORED`] every version sends; the rest came later or are left out.
const STORED_REQUIRED: usize = 4;

#[derive(Default)]
struct StoredDraft {
    event: Stored,
    seen: [bool; STORED.len()],
    /// Blocks that the extra keys were given for.
    extra_keys_len: Option<usize>,
}

impl StoredDraft {
    fn set(&mut self, r: &mut Reader<'_>, field: usize) -> Result<()> {
        const TEXT: &str = "a string or nil";
        self.seen[field] = true;
        let event = &mut self.event;
        match field {
            0 => event.hashes = r.hashes()?,
            1 => event.parent = r.optional(Reader::hash)?,
            2 => event.tokens = r.tokens(r.limits().tokens)?,
            3 => event.block_size = r.int("a block size of 0 or more tokens")?,
            4 => event.lora_id = r.optional(|r| r.int("a 64-bit integer or nil"))?,
            5 => event.medium = r.optional(|r| r.string(TEXT))?,
            6 => event.lora_name = r.optional(|r| r.string(TEXT))?,
            7 => {
                if let Some((len, keys)) = r.optional(extra_keys)? {
                    self.extra_keys_len = Some(len);
                    event.extra_keys = keys;
                }
            }
            8 => event.group = r.optional(|r| r.int(GROUP))?.unwrap_or(0),
            9 => event.spec_kind = r.optional(|r| r.string(TEXT))?,
            10 => event.sliding_window = r.optional(|r| r.int("a window in tokens, or nil"))?,
            11 => event.locality = r.optional(|r| r.string(TEXT))?,
            12 => event.ownership = r.optional(|r| r.string(TEXT))?,
            13 => event.session_id = r.optional(|r| r.string(TEXT))?,
            _ => event.lookahead = r.optional(lookahead)?,
        }
        Ok(())
    }

    fn finish(self, r: &mut Reader<'_>) -> Result<Stored> {
        for (name, seen) in STORED.iter().zip(self.seen).take(STORED_REQUIRED) {
            r.at.field = name;
            if !seen {
                return Err(DecodeError::Missing { at: r.at, expected: "it in every store" });
            }
        }
        self.check_tokens(r)?;
        let blocks = self.event.hashes.len();
        if let Some(found) = self.extra_keys_len.filter(|found| *found != blocks) {
            r.at.field = "extra_keys";
            let expected = format!("{blocks}, one for each of block_hashes");
            return Err(r.unexpected(format!("{found} entries"), expected));
        }
        Ok(self.event)
    }

    /// Full attention gives each hash its `block_size` tokens. Other groups may leave blocks out
    /// (see `Shape::Sparse`), and before 0.20.2 no event says which kind its group is.
    fn check_tokens(&self, r: &mut Reader<'_>) -> Result<()> {
        let Stored { hashes, tokens, block_size, spec_kind, .. } = &self.event;
        if tokens.is_empty() {
            return Ok(());
        }
        if *block_size == 0 {
            r.at.field = "block_size";
            return Err(r.unexpected("0", "more than 0 where token_ids are given"));
        }
        let found = tokens.len() as u64;
        let size = u64::from(*block_size);
        let whole = hashes.len() as u64 * size;
        let may_leave_out = spec_kind.as_deref() != Some("full_attention");
        if found == whole || may_leave_out && found > whole && found.is_multiple_of(size) {
            return Ok(());
        }
        r.at.field = "token_ids";
        let expected = format!("{whole}: {} block_hashes of block_size {size}", hashes.len());
        Err(r.unexpected(format!("{found} tokens"), expected))
    }
}

const GROUP: &str = "a group of 0 or more, or nil";

/// The extra keys and the number of blocks they are given for.
fn extra_keys(r: &mut Reader<'_>) -> Result<(usize, ExtraKeys)> {
    let len = r.array("entries", r.limits().hashes, "an array of one entry a block")?;
    let mut blocks: Vec<Vec<ExtraKey>> = Vec::new();
    for block in 0..len as usize {
        // Most blocks have none: the list is made when the first one turns up.
        if r.nil() {
            continue;
        }
        let keys = block_keys(r)?;
        if blocks.is_empty() && !keys.is_empty() {
            r.charge(len as usize * size_of::<Vec<ExtraKey>>())?;
            blocks.resize(len as usize, Vec::new());
        }
        if let Some(slot) = blocks.get_mut(block) {
            *slot = keys;
        }
    }
    let keys = if blocks.is_empty() { ExtraKeys::None } else { ExtraKeys::PerBlock(blocks) };
    Ok((len as usize, keys))
}

fn block_keys(r: &mut Reader<'_>) -> Result<Vec<ExtraKey>> {
    let len = r.array("keys", r.limits().keys_per_block, "an array of keys, or nil")?;
    r.list(len, extra_key)
}

fn extra_key(r: &mut Reader<'_>) -> Result<ExtraKey> {
    let limit = r.limits().text_bytes;
    if let Some(bytes) = r.bytes_if_next(limit)? {
        return Ok(ExtraKey::Bytes(bytes));
    }
    let start = r.rest();
    match start.first() {
        // Strings, arrays of two, and integers, by their first byte; whatever does not read as
        // one of these is kept as it is.
        Some(0xa0..=0xbf | 0xd9..=0xdb) => return Ok(ExtraKey::Text(r.string("a string")?)),
        Some(0x92) => {
            if let Some(pair) = pair(r) {
                r.charge(pair.0.len())?;
                return Ok(ExtraKey::Pair(pair.0.to_owned(), pair.1));
            }
        }
        Some(_) => {
            if let Ok(value) = r.int("an integer") {
                return Ok(ExtraKey::Int(value));
            }
        }
        None => {}
    }
    r.rewind(start);
    let bytes = r.raw(limit)?;
    r.charge(bytes.len())?;
    Ok(ExtraKey::Opaque(bytes.into()))
}

fn pair<'a>(r: &mut Reader<'a>) -> Option<(&'a str, i64)> {
    r.container("a pair").ok()?;
    let id = r.text("an identifier").ok()?;
    let offset = r.int("an offset").ok()?;
    Some((id, offset))
}

fn lookahead(r: &mut Reader<'_>) -> Result<Vec<Vec<u32>>> {
    let len = r.array("entries", r.limits().hashes, "an array of one list a block")?;
    let limit = r.limits().keys_per_block;
    r.list(len, |r| Ok(r.optional(|r| r.tokens(limit))?.unwrap_or_default()))
}

/// Names of a removal's fields, in positional order; only the first is in every version.
const REMOVED: [&str; 5] = ["block_hashes", "medium", "group_idx", "locality", "ownership"];

#[derive(Default)]
struct RemovedDraft {
    event: Removed,
    has_hashes: bool,
}

impl RemovedDraft {
    fn set(&mut self, r: &mut Reader<'_>, field: usize) -> Result<()> {
        const TEXT: &str = "a string or nil";
        let event = &mut self.event;
        match field {
            0 => {
                self.has_hashes = true;
                event.hashes = r.hashes()?;
            }
            1 => event.medium = r.optional(|r| r.string(TEXT))?,
            2 => event.group = r.optional(|r| r.int(GROUP))?.unwrap_or(0),
            3 => event.locality = r.optional(|r| r.string(TEXT))?,
            _ => event.ownership = r.optional(|r| r.string(TEXT))?,
        }
        Ok(())
    }

    fn finish(self, r: &mut Reader<'_>) -> Result<Removed> {
        if self.has_hashes {
            return Ok(self.event);
        }
        r.at.field = REMOVED[0];
        Err(DecodeError::Missing { at: r.at, expected: "it in every removal" })
    }
}
