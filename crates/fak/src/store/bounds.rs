//! What may be written: how long, and of what kind.
//!
//! Invariant: whatever passes here is stored by both databases, and is read back as it was; only
//! JSON may be cut, and what is left of it says so.

use serde_json::{Value, json};

use super::Error;

/// Bytes of a worker's, session's or incarnation's name, of a weight version and of a salt.
/// PostgreSQL's index entries end at 2704.
pub const NAME_BYTES_MAX: usize = 1024;
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
