//! A cursor over a msgpack payload that can only be moved within limits.
//! Invariant: no allocation without a charge to the memory budget, none for elements that the
//! payload has no bytes for, and no recursion deeper than `Limits::depth`.

use rmp::Marker;

use super::{BlockHash, DecodeError, Limits, Place};

type Result<T> = std::result::Result<T, DecodeError>;

pub(super) struct Reader<'a> {
    rest: &'a [u8],
    limits: &'a Limits,
    memory_left: usize,
    /// Where errors say that they happened; kept up to date by the decoder.
    pub(super) at: Place,
}

impl<'a> Reader<'a> {
    pub(super) fn new(payload: &'a [u8], limits: &'a Limits) -> Self {
        let at = Place { event: None, field: "payload" };
        Reader { rest: payload, limits, memory_left: limits.memory_bytes, at }
    }

    pub(super) fn limits(&self) -> &'a Limits {
        self.limits
    }

    pub(super) fn rest(&self) -> &'a [u8] {
        self.rest
    }

    /// Moves the cursor back to where `rest` was taken.
    pub(super) fn rewind(&mut self, rest: &'a [u8]) {
        self.rest = rest;
    }

    /// Charges the memory budget before an allocation of `bytes`.
    pub(super) fn charge(&mut self, bytes: usize) -> Result<()> {
        match self.memory_left.checked_sub(bytes) {
            Some(left) => {
                self.memory_left = left;
                Ok(())
            }
            None => {
                let limit = self.limits.memory_bytes as u64;
                Err(self.over((bytes as u64).saturating_add(limit), "bytes in memory", limit))
            }
        }
    }

    pub(super) fn over(&self, found: u64, unit: &'static str, limit: u64) -> DecodeError {
        DecodeError::Limit { at: self.at, found, unit, limit }
    }

    pub(super) fn unexpected(
        &self,
        found: impl Into<String>,
        expected: impl Into<String>,
    ) -> DecodeError {
        DecodeError::Unexpected { at: self.at, found: found.into(), expected: expected.into() }
    }

    fn truncated(&self, expected: &'static str) -> DecodeError {
        DecodeError::Truncated { at: self.at, expected }
    }

    fn wrong_type(&self, marker: Marker, expected: &'static str) -> DecodeError {
        self.unexpected(kind(marker), expected)
    }

    fn take<const N: usize>(&mut self, expected: &'static str) -> Result<[u8; N]> {
        let (head, tail) =
            self.rest.split_first_chunk::<N>().ok_or_else(|| self.truncated(expected))?;
        self.rest = tail;
        Ok(*head)
    }

    fn take_slice(&mut self, len: u32, expected: &'static str) -> Result<&'a [u8]> {
        let (head, tail) =
            self.rest.split_at_checked(len as usize).ok_or_else(|| self.truncated(expected))?;
        self.rest = tail;
        Ok(head)
    }

    fn marker(&mut self, expected: &'static str) -> Result<Marker> {
        let [byte] = self.take::<1>(expected)?;
        Ok(Marker::from_u8(byte))
    }

    /// Takes a nil if one is next.
    pub(super) fn nil(&mut self) -> bool {
        match self.rest.split_first() {
            Some((0xc0, tail)) => {
                self.rest = tail;
                true
            }
            _ => false,
        }
    }

    /// Reads nil as `None`, anything else with `read`.
    pub(super) fn optional<T>(
        &mut self,
        read: impl FnOnce(&mut Self) -> Result<T>,
    ) -> Result<Option<T>> {
        if self.nil() { Ok(None) } else { read(self).map(Some) }
    }

    /// Length of the array or map that is next, and whether it is a map.
    pub(super) fn container(&mut self, expected: &'static str) -> Result<(u32, bool)> {
        let marker = self.marker(expected)?;
        self.container_of(marker, expected)?.ok_or_else(|| self.wrong_type(marker, expected))
    }

    fn container_of(
        &mut self,
        marker: Marker,
        expected: &'static str,
    ) -> Result<Option<(u32, bool)>> {
        Ok(Some(match marker {
            Marker::FixArray(len) => (u32::from(len), false),
            Marker::Array16 => (u32::from(u16::from_be_bytes(self.take(expected)?)), false),
            Marker::Array32 => (u32::from_be_bytes(self.take(expected)?), false),
            Marker::FixMap(len) => (u32::from(len), true),
            Marker::Map16 => (u32::from(u16::from_be_bytes(self.take(expected)?)), true),
            Marker::Map32 => (u32::from_be_bytes(self.take(expected)?), true),
            _ => return Ok(None),
        }))
    }

    /// Length of the array that is next, at most `limit` and at most one a byte left.
    pub(super) fn array(
        &mut self,
        unit: &'static str,
        limit: u32,
        expected: &'static str,
    ) -> Result<u32> {
        let (len, is_map) = self.container(expected)?;
        if is_map {
            return Err(self.unexpected("a map", expected));
        }
        self.check_len(len, unit, limit, expected)?;
        Ok(len)
    }

    pub(super) fn check_len(
        &self,
        len: u32,
        unit: &'static str,
        limit: u32,
        expected: &'static str,
    ) -> Result<()> {
        if len > limit {
            return Err(self.over(u64::from(len), unit, u64::from(limit)));
        }
        if len as usize > self.rest.len() {
            return Err(self.truncated(expected));
        }
        Ok(())
    }

    fn int_of(&mut self, marker: Marker, expected: &'static str) -> Result<Option<i128>> {
        Ok(Some(match marker {
            Marker::FixPos(value) => i128::from(value),
            Marker::FixNeg(value) => i128::from(value),
            Marker::U8 => i128::from(u8::from_be_bytes(self.take(expected)?)),
            Marker::U16 => i128::from(u16::from_be_bytes(self.take(expected)?)),
            Marker::U32 => i128::from(u32::from_be_bytes(self.take(expected)?)),
            Marker::U64 => i128::from(u64::from_be_bytes(self.take(expected)?)),
            Marker::I8 => i128::from(i8::from_be_bytes(self.take(expected)?)),
            Marker::I16 => i128::from(i16::from_be_bytes(self.take(expected)?)),
            Marker::I32 => i128::from(i32::from_be_bytes(self.take(expected)?)),
            Marker::I64 => i128::from(i64::from_be_bytes(self.take(expected)?)),
            _ => return Ok(None),
        }))
    }

    /// An unsigned integer, if one is next and whole. Tokens and hashes are nearly all of a batch:
    /// this reads them without a detour over markers and results.
    fn uint_if_next(&mut self) -> Option<u64> {
        let (value, len) = match *self.rest {
            [value @ 0..0x80, ..] => (u64::from(value), 1),
            [0xcc, value, ..] => (u64::from(value), 2),
            [0xcd, a, b, ..] => (u64::from(u16::from_be_bytes([a, b])), 3),
            [0xce, a, b, c, d, ..] => (u64::from(u32::from_be_bytes([a, b, c, d])), 5),
            [0xcf, a, b, c, d, e, f, g, h, ..] => (u64::from_be_bytes([a, b, c, d, e, f, g, h]), 9),
            _ => return None,
        };
        self.rest = &self.rest[len..];
        Some(value)
    }

    /// An integer that fits `T`.
    pub(super) fn int<T: TryFrom<i128>>(&mut self, expected: &'static str) -> Result<T> {
        let marker = self.marker(expected)?;
        let value = self.int_of(marker, expected)?;
        let value = value.ok_or_else(|| self.wrong_type(marker, expected))?;
        T::try_from(value).map_err(|_| self.unexpected(value.to_string(), expected))
    }

    /// A finite number.
    pub(super) fn seconds(&mut self) -> Result<f64> {
        const EXPECTED: &str = "finite unix seconds";
        let marker = self.marker(EXPECTED)?;
        let value = match marker {
            Marker::F64 => f64::from_be_bytes(self.take(EXPECTED)?),
            Marker::F32 => f64::from(f32::from_be_bytes(self.take(EXPECTED)?)),
            _ => match self.int_of(marker, EXPECTED)? {
                // Whole seconds of this era are exact in f64.
                Some(whole) => whole as f64,
                None => return Err(self.wrong_type(marker, EXPECTED)),
            },
        };
        if value.is_finite() {
            Ok(value)
        } else {
            Err(self.unexpected(value.to_string(), EXPECTED))
        }
    }

    fn text_len(&mut self, marker: Marker, expected: &'static str) -> Result<Option<u32>> {
        Ok(Some(match marker {
            Marker::FixStr(len) => u32::from(len),
            Marker::Str8 => u32::from(u8::from_be_bytes(self.take(expected)?)),
            Marker::Str16 => u32::from(u16::from_be_bytes(self.take(expected)?)),
            Marker::Str32 => u32::from_be_bytes(self.take(expected)?),
            _ => return Ok(None),
        }))
    }

    fn bin_len(&mut self, marker: Marker, expected: &'static str) -> Result<Option<u32>> {
        Ok(Some(match marker {
            Marker::Bin8 => u32::from(u8::from_be_bytes(self.take(expected)?)),
            Marker::Bin16 => u32::from(u16::from_be_bytes(self.take(expected)?)),
            Marker::Bin32 => u32::from_be_bytes(self.take(expected)?),
            _ => return Ok(None),
        }))
    }

    fn bounded(&mut self, len: u32, limit: u32, expected: &'static str) -> Result<&'a [u8]> {
        if len > limit {
            return Err(self.over(u64::from(len), "bytes", u64::from(limit)));
        }
        self.take_slice(len, expected)
    }

    /// A string, borrowed from the payload.
    pub(super) fn text(&mut self, expected: &'static str) -> Result<&'a str> {
        let marker = self.marker(expected)?;
        let len = self.text_len(marker, expected)?;
        let len = len.ok_or_else(|| self.wrong_type(marker, expected))?;
        let bytes = self.bounded(len, self.limits.text_bytes, expected)?;
        std::str::from_utf8(bytes).map_err(|_| self.unexpected("bytes that are no utf-8", expected))
    }

    /// A string of its own.
    pub(super) fn string(&mut self, expected: &'static str) -> Result<String> {
        let text = self.text(expected)?;
        self.charge(text.len())?;
        Ok(text.to_owned())
    }

    /// A byte string of at most `limit` bytes, if one is next.
    pub(super) fn bytes_if_next(&mut self, limit: u32) -> Result<Option<Box<[u8]>>> {
        const EXPECTED: &str = "bytes";
        if !matches!(self.rest.first(), Some(0xc4..=0xc6)) {
            return Ok(None);
        }
        let marker = self.marker(EXPECTED)?;
        let len = self.bin_len(marker, EXPECTED)?;
        let len = len.ok_or_else(|| self.wrong_type(marker, EXPECTED))?;
        let bytes = self.bounded(len, limit, EXPECTED)?;
        self.charge(bytes.len())?;
        Ok(Some(bytes.into()))
    }

    pub(super) fn hash(&mut self) -> Result<BlockHash> {
        const EXPECTED: &str = "a 64-bit integer or bytes";
        if let Some(value) = self.uint_if_next() {
            return Ok(BlockHash::Int(value));
        }
        if let Some(bytes) = self.bytes_if_next(self.limits.hash_bytes)? {
            return Ok(BlockHash::Bytes(bytes));
        }
        let value: i128 = self.int(EXPECTED)?;
        // Truncation is the point: i64 and u64 of one 64-bit pattern become one hash.
        Ok(BlockHash::Int(value as u64))
    }

    pub(super) fn hashes(&mut self) -> Result<Vec<BlockHash>> {
        let len = self.array("hashes", self.limits.hashes, "an array of block hashes")?;
        self.list(len, Self::hash)
    }

    pub(super) fn tokens(&mut self, limit: u32) -> Result<Vec<u32>> {
        let len = self.array("tokens", limit, "an array of token ids")?;
        self.list(len, |r| {
            let start = r.rest;
            match r.uint_if_next().map(u32::try_from) {
                Some(Ok(token)) => Ok(token),
                _ => {
                    r.rewind(start);
                    r.int("a token id of 0 to 4294967295")
                }
            }
        })
    }

    /// Reads `len` elements, whose room is charged and taken at once.
    pub(super) fn list<T>(
        &mut self,
        len: u32,
        mut read: impl FnMut(&mut Self) -> Result<T>,
    ) -> Result<Vec<T>> {
        self.charge(len as usize * size_of::<T>())?;
        let mut list = Vec::with_capacity(len as usize);
        for _ in 0..len {
            list.push(read(self)?);
        }
        Ok(list)
    }

    /// The next value as its msgpack bytes, passed over.
    pub(super) fn raw(&mut self, limit: u32) -> Result<&'a [u8]> {
        let before = self.rest;
        self.skip()?;
        let bytes = &before[..before.len() - self.rest.len()];
        if bytes.len() > limit as usize {
            return Err(self.over(bytes.len() as u64, "bytes", u64::from(limit)));
        }
        Ok(bytes)
    }

    /// Passes over one value of plain msgpack.
    pub(super) fn skip(&mut self) -> Result<()> {
        self.skip_at(0)
    }

    fn skip_at(&mut self, depth: u32) -> Result<()> {
        const EXPECTED: &str = "a value";
        if depth > self.limits.depth {
            let limit = u64::from(self.limits.depth);
            return Err(self.over(u64::from(depth), "levels of nesting", limit));
        }
        let marker = self.marker(EXPECTED)?;
        match marker {
            Marker::Null | Marker::True | Marker::False => return Ok(()),
            Marker::F32 => return self.take::<4>(EXPECTED).map(drop),
            Marker::F64 => return self.take::<8>(EXPECTED).map(drop),
            _ => {}
        }
        if self.int_of(marker, EXPECTED)?.is_some() {
            return Ok(());
        }
        if let Some(len) = self.text_len(marker, EXPECTED)? {
            return self.take_slice(len, EXPECTED).map(drop);
        }
        if let Some(len) = self.bin_len(marker, EXPECTED)? {
            return self.take_slice(len, EXPECTED).map(drop);
        }
        let (len, is_map) = self
            .container_of(marker, EXPECTED)?
            .ok_or_else(|| self.wrong_type(marker, "a plain msgpack value"))?;
        let values = u64::from(len) * if is_map { 2 } else { 1 };
        if values > self.rest.len() as u64 {
            return Err(self.truncated(EXPECTED));
        }
        (0..values).try_for_each(|_| self.skip_at(depth + 1))
    }
}

fn kind(marker: Marker) -> &'static str {
    match marker {
        Marker::Null => "nil",
        Marker::True | Marker::False => "a boolean",
        Marker::F32 | Marker::F64 => "a float",
        Marker::FixPos(_) | Marker::U8 | Marker::U16 | Marker::U32 | Marker::U64 => "an integer",
        Marker::FixNeg(_) | Marker::I8 | Marker::I16 | Marker::I32 | Marker::I64 => "an integer",
        Marker::FixStr(_) | Marker::Str8 | Marker::Str16 | Marker::Str32 => "a string",
        Marker::Bin8 | Marker::Bin16 | Marker::Bin32 => "bytes",
        Marker::FixArray(_) | Marker::Array16 | Marker::Array32 => "an array",
        Marker::FixMap(_) | Marker::Map16 | Marker::Map32 => "a map",
        Marker::Reserved => "a byte that msgpack never uses",
        _ => "an extension type",
    }
}
