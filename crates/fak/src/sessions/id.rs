//! What may name a session.
//!
//! Invariant: an id is compared byte by byte and never changed, so two names are two sessions; and
//! it can be a header's value.

/// Bytes of an id.
pub const ID_BYTES_MAX: usize = 256;

/// A name that is refused. The messages name the field by which a session is given.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadId {
    /// Nothing.
    #[error("x-fak-session is empty")]
    Empty,
    /// More than [`ID_BYTES_MAX`].
    #[error("x-fak-session is {0} bytes long, and at most {ID_BYTES_MAX} are taken")]
    TooLong(usize),
    /// Something that cannot be seen, or is not ASCII.
    #[error("x-fak-session: byte {0} is no visible ASCII character")]
    Unseen(usize),
}

/// Whether `id` may name a session.
///
/// # Errors
/// [`BadId`].
pub fn check(id: &str) -> Result<(), BadId> {
    if id.is_empty() {
        return Err(BadId::Empty);
    }
    if id.len() > ID_BYTES_MAX {
        return Err(BadId::TooLong(id.len()));
    }
    match id.bytes().position(|byte| !byte.is_ascii_graphic()) {
        Some(at) => Err(BadId::Unseen(at)),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_short_and_can_be_seen() {
        assert_eq!(check("session-1/a:b"), Ok(()));
        assert_eq!(check(&"x".repeat(ID_BYTES_MAX)), Ok(()));
        assert_eq!(check(""), Err(BadId::Empty));
        assert_eq!(check(&"x".repeat(ID_BYTES_MAX + 1)), Err(BadId::TooLong(ID_BYTES_MAX + 1)));
        for (at, id) in [(1, "a b"), (0, "\n"), (1, "a\u{200b}"), (2, "ab\0"), (0, "é")] {
            assert_eq!(check(id), Err(BadId::Unseen(at)), "{id:?}");
        }
        let message = check("a b").expect_err("a space").to_string();
        assert!(message.starts_with("x-fak-session"), "{message}");
    }
}
