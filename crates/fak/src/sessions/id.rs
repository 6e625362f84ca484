//! What may name a session.
//!
//! Invariant: an id is compared byte by byte and never changed, so two names are two sessions, and
//! one name of two tenants is two; and it can be a header's value.

use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};

/// Bytes of an id.
pub const ID_BYTES_MAX: usize = 256;

/// What would be right.
const RIGHT: &str = "it has to be 1 to 256 visible ASCII characters, without spaces";

/// A name that is refused. The messages name the header by which a session is given.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadId {
    /// Nothing.
    #[error("x-fak-session is empty; {RIGHT}")]
    Empty,
    /// More than [`ID_BYTES_MAX`].
    #[error("x-fak-session is {0} bytes long; {RIGHT}")]
    TooLong(usize),
    /// Something that cannot be seen, or is not ASCII.
    #[error("x-fak-session={id:?} has the byte {byte:#04x} at position {at}; {RIGHT}")]
    Unseen {
        /// The name, as text.
        id: String,
        /// Where, from 0.
        at: usize,
        /// What stands there.
        byte: u8,
    },
}

/// `id` as a session's name.
///
/// # Errors
/// [`BadId`].
pub fn named(id: &[u8]) -> Result<&str, BadId> {
    if id.is_empty() {
        return Err(BadId::Empty);
    }
    if id.len() > ID_BYTES_MAX {
        return Err(BadId::TooLong(id.len()));
    }
    let unseen = |at: usize| {
        let id_shown = String::from_utf8_lossy(id).into_owned();
        BadId::Unseen { id: id_shown, at, byte: id[at] }
    };
    match id.iter().position(|byte| !byte.is_ascii_graphic()) {
        Some(at) => Err(unseen(at)),
        None => std::str::from_utf8(id).map_err(|error| unseen(error.valid_up_to())),
    }
}

/// What of a tenant's name is escaped in an id: what is not visible, and what ends it there.
const ESCAPED: &AsciiSet = &CONTROLS.add(b' ').add(b'/').add(b'%');

/// The id of the session that this tenant calls so: `TENANT/NAME`.
#[must_use]
pub fn of_tenant(tenant: &str, name: &str) -> String {
    format!("{}/{name}", utf8_percent_encode(tenant, ESCAPED))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_tenants_have_a_session_in_common() {
        let ids = [("a", "b/c"), ("a/b", "c"), ("a%2Fb", "c"), ("a b", "c"), ("ä", "c")];
        let ids = ids.map(|(tenant, name)| of_tenant(tenant, name));
        assert_eq!(ids[0], "a/b/c");
        for (number, id) in ids.iter().enumerate() {
            assert_eq!(named(id.as_bytes()), Ok(id.as_str()));
            assert!(!ids[..number].contains(id), "{id}");
        }
    }

    #[test]
    fn an_id_is_short_and_can_be_seen() {
        assert_eq!(named(b"session-1/a:b"), Ok("session-1/a:b"));
        assert!(named(&[b'x'; ID_BYTES_MAX]).is_ok());
        assert_eq!(named(b""), Err(BadId::Empty));
        let long = [b'x'; ID_BYTES_MAX + 1];
        assert_eq!(named(&long), Err(BadId::TooLong(ID_BYTES_MAX + 1)));
        for (position, id) in [(1, "a b"), (0, "\n"), (1, "a\u{200b}"), (2, "ab\0"), (0, "é")] {
            let bad = named(id.as_bytes()).expect_err(id);
            assert!(matches!(bad, BadId::Unseen { at, .. } if at == position), "{id:?}: {bad}");
        }
    }

    #[test]
    fn a_refused_id_is_told_with_its_header_its_fault_and_what_would_be_right() {
        let message = |id: &[u8]| named(id).expect_err("refused").to_string();
        let right = "it has to be 1 to 256 visible ASCII characters, without spaces";
        assert_eq!(
            message(b"a b"),
            format!("x-fak-session=\"a b\" has the byte 0x20 at position 1; {right}")
        );
        assert_eq!(message(b""), format!("x-fak-session is empty; {right}"));
        assert!(message(&[b'x'; 300]).starts_with("x-fak-session is 300 bytes long; it has to be"));
        assert!(message(b"s\xff").contains("byte 0xff at position 1"));
    }
}
