//! What is wrong with a settings' file that cannot be read as one, with the line and the key.
//!
//! Invariant: of the file's text only the names of known keys are shown, since somebody may have
//! written a secret there.

use super::serve::Raw;

/// Reads it.
///
/// # Errors
///
/// The line, from 1, and what is wrong there.
pub(super) fn read(text: &str) -> Result<Raw, (usize, String)> {
    toml::from_str(text).map_err(|error| {
        let start = error.span().map_or(0, |span| span.start.min(text.len()));
        let before = text.as_bytes().get(..start).unwrap_or_default();
        let line = before.iter().filter(|byte| **byte == b'\n').count();
        let problem = error.message().replace("expected u64", "expected a whole number from 0");
        // Only a key that is known gets as far as a value of a wrong kind.
        let key = text.lines().nth(line).filter(|_| problem.starts_with("invalid ")).and_then(key);
        let problem = key.map_or_else(|| problem.clone(), |key| format!("{key}: {problem}"));
        (line + 1, problem)
    })
}

/// The key that the line sets, where it is a plain one.
fn key(line: &str) -> Option<&str> {
    let key = line.split_once('=')?.0.trim();
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte == b'_';
    (!key.is_empty() && key.bytes().all(plain)).then_some(key)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_of_a_wrong_kind_is_told_with_its_line_and_its_key() {
        let wrong = |text: &str| read(text).expect_err("wrong");
        let whole = "expected a whole number from 0";
        for (text, line, problem) in [
            ("hold_ms = \"x\"", 1, format!("hold_ms: invalid type: string \"x\", {whole}")),
            ("\nhold_ms = -1", 2, format!("hold_ms: invalid value: integer `-1`, {whole}")),
            ("isolation = 1", 1, "isolation: invalid type: integer `1`, expected a boolean".into()),
            ("[[worker]]\nid = 7", 2, "id: invalid type: integer `7`, expected a string".into()),
        ] {
            assert_eq!(wrong(text), (line, problem), "{text}");
        }
    }

    #[test]
    fn what_is_no_known_key_is_shown_in_no_other_way_than_by_its_reader() {
        let (line, problem) = read("\nbogus = 1").expect_err("no key");
        assert!(line == 2 && problem.starts_with("unknown field `bogus`, expected"), "{problem}");
        assert_eq!(read("c2VrcmV0=").expect_err("no TOML").1.find("c2VrcmV0"), None);
    }
}
