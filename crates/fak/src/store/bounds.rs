//! What may be written: how long, and of what kind.
//!
//! Invariant: whatever passes here is stored by both databases, and is read back as it was; only
//! JSON may be cut, and what is left of it says so.

use std::borrow::Cow;

use serde_json::{Value, json};
use xxhash_rust::xxh3::xxh3_128;

use super::Error;

/// Bytes of a worker's, session's or incarnation's name, of a weight version and of a salt.
/// PostgreSQL's index entries end at 2704.
pub const NAME_BYTES_MAX: usize = 1024;
/// Bytes of a name that are shown of a longer one.
const SHOWN_BYTES_MAX: usize = 256;
/// Bytes of a reason.
pub const REASON_BYTES_MAX: usize = 4096;
/// Bytes of one JSON column: 1000 rows of three stay below 48 MiB.
pub const JSON_BYTES_MAX: usize = 16 * 1024;
/// Bytes shown of JSON that is cut. Escaping makes six of one at most, and so it fits.
const JSON_HEAD_BYTES: usize = 2 * 1024;

/// A name, refused where it is no text for both databases.
pub(super) fn name<'a>(field: &'static str, text: &'a str) -> Result<&'a str, Error> {
    bounded(field, text, NAME_BYTES_MAX, "is longer than 1024 bytes")
}

/// As [`name`], where there is one.
pub(super) fn name_of<'a>(
    field: &'static str,
    text: &'a Option<String>,
) -> Result<Option<&'a str>, Error> {
    text.as_deref().map(|text| name(field, text)).transpose()
}

/// `text`, which an engine chose, as a name that can be stored and shown: control characters are
/// escaped, and what is too long is cut and ends in a digest of the whole text, so that two texts
/// never become one name.
#[must_use]
pub fn fitting_name(text: &str) -> Cow<'_, str> {
    let is_plain = !text.contains(char::is_control);
    if is_plain && text.len() <= SHOWN_BYTES_MAX {
        return Cow::Borrowed(text);
    }
    let mut name = String::new();
    for c in text.chars().take(SHOWN_BYTES_MAX) {
        match c {
            c if c.is_control() => name.extend(c.escape_unicode()),
            c => name.push(c),
        }
    }
    name.truncate(name.floor_char_boundary(SHOWN_BYTES_MAX));
    Cow::Owned(format!("{name}#{:032x}", xxh3_128(text.as_bytes())))
}

/// A reason.
pub(super) fn reason<'a>(field: &'static str, text: &'a str) -> Result<&'a str, Error> {
    bounded(field, text, REASON_BYTES_MAX, "is longer than 4096 bytes")
}

fn bounded<'a>(
    field: &'static str,
    text: &'a str,
    bytes_max: usize,
    problem: &'static str,
) -> Result<&'a str, Error> {
    if text.len() > bytes_max {
        return Err(Error::BadValue { field, problem });
    }
    // PostgreSQL has no such text; SQLite's own functions end at it.
    if text.contains('\0') {
        return Err(Error::BadValue { field, problem: "holds a NUL character" });
    }
    Ok(text)
}

/// A number as both databases hold it.
pub(super) fn number(field: &'static str, number: u64) -> Result<i64, Error> {
    i64::try_from(number).map_err(|_| Error::BadValue { field, problem: "is 2^63 or more" })
}

/// `value` as JSON text. Where that is longer than [`JSON_BYTES_MAX`]: an object that tells how
/// long it was, and how it began.
pub(super) fn json(value: &Value) -> String {
    let text = value.to_string();
    if text.len() <= JSON_BYTES_MAX {
        return text;
    }
    let head = &text[..text.floor_char_boundary(JSON_HEAD_BYTES)];
    json!({ "truncated_bytes": text.len(), "head": head }).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_of_others_is_stored_whatever_it_holds_and_stays_another_than_any_other() {
        assert_eq!(fitting_name("v8"), "v8");
        let long = "v".repeat(1100);
        let odd = ["a\0b", "a\u{0}c", "a\nb", &long, &"v".repeat(1101), &"ü".repeat(400)];
        let names: Vec<_> = odd.iter().map(|text| fitting_name(text)).collect();
        for (at, fitting) in names.iter().enumerate() {
            assert_eq!(name("weight_version", fitting).expect("it fits"), fitting);
            assert!(!fitting.contains(char::is_control), "{fitting:?}");
            assert!(names.iter().skip(at + 1).all(|other| other != fitting), "{fitting:?}");
        }
    }

    #[test]
    fn json_is_cut_at_its_bound_and_not_before() {
        let fits = Value::String("x".repeat(JSON_BYTES_MAX - 2));
        assert_eq!(json(&fits), fits.to_string());
        let over = Value::String("x".repeat(JSON_BYTES_MAX - 1));
        let cut: Value = serde_json::from_str(&json(&over)).expect("JSON");
        assert_eq!(cut["truncated_bytes"], JSON_BYTES_MAX + 1);
        assert_eq!(cut["head"].as_str().map(str::len), Some(JSON_HEAD_BYTES));
    }

    #[test]
    fn cut_json_stays_below_the_bound_whatever_it_holds() {
        for character in ["\u{1}", "\"", "\\", "é", "🦀"] {
            let text = json(&Value::String(character.repeat(JSON_BYTES_MAX)));
            assert!(text.len() <= JSON_BYTES_MAX, "{character:?} gives {}", text.len());
            serde_json::from_str::<Value>(&text).expect("JSON");
        }
    }
}
