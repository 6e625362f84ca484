//! A value that must not be seen.
//!
//! Invariant: no formatting of a [`Secret`] shows it, and it has no `Display`.

use std::fmt;

/// A credential or a key. `Debug` is blank; [`expose`](Self::expose) is the only way to the text.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Wraps `text`.
    #[must_use]
    pub fn new(text: String) -> Self {
        Self(text)
    }

    /// The text itself, for the one place that has to send or mix it in.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_is_blank() {
        assert_eq!(format!("{:?}", Some(Secret::new("sk-1".to_owned()))), "Some(Secret(..))");
    }
}
