//! One line of the Prometheus text format or of OpenMetrics.
//! Invariant: borrows from the line, except for label values that hold escapes.

use std::borrow::Cow;

/// A line that is neither a sample, nor a comment, nor empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Malformed;

#[derive(Debug, Clone, PartialEq)]
pub(super) struct Sample<'a> {
    pub(super) name: &'a str,
    pub(super) labels: Labels<'a>,
    pub(super) value: f64,
}

/// The label part, between the braces, already checked.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Labels<'a>(&'a str);

impl<'a> Labels<'a> {
    pub(super) fn get(self, name: &str) -> Option<Cow<'a, str>> {
        let mut rest = self.0;
        while let Ok(Some((label, value, tail))) = label(rest) {
            if label == name {
                return Some(unescape(value));
            }
            rest = tail;
        }
        None
    }
}

/// The sample on a line; `None` for comments (`# EOF` among them) and empty lines. A timestamp or
/// an exemplar after the value is passed over.
pub(super) fn sample(line: &[u8]) -> Result<Option<Sample<'_>>, Malformed> {
    let line = std::str::from_utf8(line).map_err(|_| Malformed)?.trim();
    if line.is_empty() || line.starts_with('#') {
        return Ok(None);
    }
    let name_len = line.find(|c: char| !is_name(c)).ok_or(Malformed)?;
    let (name, rest) = line.split_at(name_len);
    if name.is_empty() || name.starts_with(|c: char| c.is_ascii_digit()) {
        return Err(Malformed);
    }
    let (labels, rest) = match rest.strip_prefix('{') {
        Some(inside) => labels(inside)?,
        None => (Labels(""), rest),
    };
    let value = rest.split_whitespace().next().ok_or(Malformed)?;
    Ok(Some(Sample { name, labels, value: number(value)? }))
}

fn is_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | ':')
}

/// Numbers as the formats spell them; Rust's `infinity` and `nan` spellings are a superset.
pub(super) fn number(text: &str) -> Result<f64, Malformed> {
    text.parse().map_err(|_| Malformed)
}

/// Checks the labels up to the closing brace, and what follows it.
fn labels(inside: &str) -> Result<(Labels<'_>, &str), Malformed> {
    let mut rest = inside;
    while let Some((_, _, tail)) = label(rest)? {
        rest = tail;
    }
    let labels = Labels(&inside[..inside.len() - rest.len()]);
    let rest = rest.trim_start().strip_prefix('}').ok_or(Malformed)?;
    Ok((labels, rest))
}

type Label<'a> = (&'a str, &'a str, &'a str);

/// Name and value, escapes left in, of the first label, and what follows it and its comma; `None`
/// where no label is left.
fn label(rest: &str) -> Result<Option<Label<'_>>, Malformed> {
    let rest = rest.trim_start();
    if rest.is_empty() || rest.starts_with('}') {
        return Ok(None);
    }
    let (name, rest) = rest.split_once('=').ok_or(Malformed)?;
    let name = name.trim_end();
    if name.is_empty() || !name.chars().all(is_name) {
        return Err(Malformed);
    }
    let value = rest.trim_start().strip_prefix('"').ok_or(Malformed)?;
    let end = closing_quote(value).ok_or(Malformed)?;
    let rest = value[end + 1..].trim_start();
    let tail = match rest.strip_prefix(',') {
        Some(tail) => tail,
        None if rest.is_empty() || rest.starts_with('}') => rest,
        None => return Err(Malformed),
    };
    Ok(Some((name, &value[..end], tail)))
}

fn closing_quote(value: &str) -> Option<usize> {
    let mut is_escaped = false;
    value.bytes().position(|byte| {
        let is_end = byte == b'"' && !is_escaped;
        is_escaped = byte == b'\\' && !is_escaped;
        is_end
    })
}

fn unescape(value: &str) -> Cow<'_, str> {
    if !value.contains('\\') {
        return Cow::Borrowed(value);
    }
    let mut text = String::with_capacity(value.len());
    let mut chars = value.chars();
    while let Some(c) = chars.next() {
        text.push(match (c, c == '\\') {
            (_, true) => match chars.next() {
                Some('n') => '\n',
                Some(other) => other,
                None => '\\',
            },
            (c, false) => c,
        });
    }
    Cow::Owned(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(line: &str) -> Result<Option<Sample<'_>>, Malformed> {
        sample(line.as_bytes())
    }

    #[test]
    fn labels_may_hold_what_looks_like_syntax() {
        let line = r#"vllm:x{a="}, b=\"1\"",b="\\\n",c="é",} 3.5 1700000000"#;
        let sample = read(line).unwrap().unwrap();
        assert_eq!((sample.name, sample.value), ("vllm:x", 3.5));
        let label = |name| sample.labels.get(name).map(Cow::into_owned);
        assert_eq!(label("a").as_deref(), Some(r#"}, b="1""#));
        assert_eq!(label("b").as_deref(), Some("\\\n"));
        assert_eq!(label("c").as_deref(), Some("é"));
        assert_eq!(label("d"), None);
    }

    #[test]
    fn timestamps_and_exemplars_after_the_value_are_passed_over() {
        for line in ["x 1", "x  1 1700000000000", "x{} 1 # {trace=\"a\"} 0.5 17", " x\t1\r"] {
            assert_eq!(read(line).unwrap().unwrap().value, 1.0, "{line}");
        }
        assert_eq!(read("x +Inf").unwrap().unwrap().value, f64::INFINITY);
        assert!(read("x NaN").unwrap().unwrap().value.is_nan());
    }

    #[test]
    fn lines_that_are_no_samples_are_told_from_comments() {
        for line in ["", "  ", "# HELP x y", "# EOF", "#"] {
            assert_eq!(read(line), Ok(None), "{line}");
        }
        for line in [
            "x",
            "x ",
            "x one",
            "{a=\"b\"} 1",
            "x{a=\"b} 1",
            "x{a=b} 1",
            "x{a=\"b\" 1",
            "x{a=\"b\"c=\"d\"} 1",
            "1x 1",
            "x{=\"b\"} 1",
            "x{a=\"b\\\"} 1",
        ] {
            assert_eq!(read(line), Err(Malformed), "{line}");
        }
        assert_eq!(sample(b"x{a=\"\xff\"} 1"), Err(Malformed));
    }
}
