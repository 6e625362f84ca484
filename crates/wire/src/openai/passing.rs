//! A whole answer read as its bytes go by, however long it is: what it cost, and how its choices
//! ended.
//! Invariant: only keys of the answer itself and of its choices count, never a text that looks like
//! one; and no more than one value is kept, of bounded length.

use memchr::memchr2;

use super::Usage;

/// Longest value that is kept, in bytes. Usage takes some 200.
const VALUE_BYTES_MAX: usize = 16 << 10;
/// Longest key that is told from others, in bytes.
const KEY_BYTES_MAX: usize = 16;
/// Where a choice's keys are: in an object, in the array of choices, in the answer.
const CHOICE_DEPTH: usize = 3;

/// How the choices of a whole answer ended, by the worst of them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Finish {
    /// No choice says.
    #[default]
    Untold,
    /// As they should.
    Whole,
    /// The engine aborted one.
    Aborted,
    /// The engine failed at one.
    Failed,
}

/// Reads one whole answer in pieces.
#[derive(Debug, Default)]
pub struct PassingAnswer {
    /// Objects and arrays that are open.
    depth: usize,
    /// A string is open, and maybe an escape in it.
    in_text: bool,
    is_escaped: bool,
    /// The last string, as far as a key is compared.
    last: Vec<u8>,
    /// The value of the answer's key `choices` is being read.
    is_choices: bool,
    /// What is kept, and its bytes.
    kept: Option<(Kept, Vec<u8>)>,
    usage: Option<Usage>,
    finish: Finish,
}

/// A value that is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kept {
    /// `usage` of the answer.
    Usage,
    /// `finish_reason` of a choice.
    Finish,
}

impl Kept {
    /// How deep its key stands.
    fn depth(self) -> usize {
        match self {
            Kept::Usage => 1,
            Kept::Finish => CHOICE_DEPTH,
        }
    }
}

impl PassingAnswer {
    /// Reads the next bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        let mut at = 0;
        while let Some(byte) = bytes.get(at) {
            if self.in_text {
                at = self.text(bytes, at);
            } else {
                self.outside(*byte);
                at += 1;
            }
        }
    }

    /// What the request cost, if the answer said so until now.
    #[must_use]
    pub fn usage(&self) -> Option<Usage> {
        self.usage
    }

    /// How its choices ended, as far as it was read.
    #[must_use]
    pub fn finish(&self) -> Finish {
        self.finish
    }

    /// Reads on in a string; gives where to go on.
    fn text(&mut self, bytes: &[u8], at: usize) -> usize {
        if self.is_escaped {
            self.is_escaped = false;
            self.keep_text(&bytes[at..=at]);
            return at + 1;
        }
        let Some(found) = memchr2(b'"', b'\\', &bytes[at..]) else {
            self.keep_text(&bytes[at..]);
            return bytes.len();
        };
        let end = at + found + 1;
        self.keep_text(&bytes[at..end]);
        if bytes[end - 1] == b'\\' {
            self.is_escaped = true;
        } else {
            self.in_text = false;
        }
        end
    }

    fn outside(&mut self, byte: u8) {
        let ends = matches!(byte, b',' | b'}' | b']');
        if let Some((kept, _)) = &self.kept
            && ends
            && self.depth == kept.depth()
        {
            self.end_value();
        }
        match byte {
            b'"' => {
                self.in_text = true;
                self.last.clear();
            }
            b':' => self.key(),
            b'{' | b'[' => self.depth += 1,
            b'}' | b']' => self.depth = self.depth.saturating_sub(1),
            _ => {}
        }
        if byte != b':' || self.kept.as_ref().is_some_and(|(_, value)| !value.is_empty()) {
            self.keep(&[byte]);
        }
    }

    /// The last string was a key.
    fn key(&mut self) {
        if self.kept.is_some() {
            return;
        }
        // With the quote that ends it.
        let key = self.last.strip_suffix(b"\"").unwrap_or_default();
        if self.depth == 1 {
            self.is_choices = key == b"choices";
        }
        let kept = match (self.depth, key) {
            (1, b"usage") => Kept::Usage,
            (CHOICE_DEPTH, b"finish_reason") if self.is_choices => Kept::Finish,
            _ => return,
        };
        self.kept = Some((kept, Vec::new()));
    }

    /// A piece of a string, the quote that ends it included.
    fn keep_text(&mut self, bytes: &[u8]) {
        let room = KEY_BYTES_MAX - self.last.len();
        self.last.extend_from_slice(&bytes[..bytes.len().min(room)]);
        self.keep(bytes);
    }

    fn keep(&mut self, bytes: &[u8]) {
        if let Some((_, value)) = &mut self.kept {
            let room = (VALUE_BYTES_MAX + 1).saturating_sub(value.len());
            value.extend_from_slice(&bytes[..bytes.len().min(room)]);
        }
    }

    fn end_value(&mut self) {
        let Some((kept, value)) = self.kept.take() else { return };
        if value.len() > VALUE_BYTES_MAX {
            return;
        }
        match kept {
            // The last one counts, as in other parsers.
            Kept::Usage => self.usage = serde_json::from_slice(&value).ok().flatten(),
            Kept::Finish => self.finish = self.finish.max(finish(&value)),
        }
    }
}

fn finish(value: &[u8]) -> Finish {
    match value.trim_ascii() {
        b"null" => Finish::Untold,
        b"\"abort\"" => Finish::Aborted,
        b"\"error\"" => Finish::Failed,
        _ => Finish::Whole,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The same, however it is cut.
    fn read(answer: &str) -> (Option<u64>, Finish) {
        let of = |size: usize| {
            let mut passing = PassingAnswer::default();
            answer.as_bytes().chunks(size).for_each(|piece| passing.push(piece));
            (passing.usage().map(|usage| usage.prompt_tokens), passing.finish())
        };
        let whole = of(answer.len().max(1));
        for size in 1..answer.len().min(40) {
            assert_eq!(of(size), whole, "pieces of {size}: {answer}");
        }
        whole
    }

    #[test]
    fn usage_is_found_whatever_stands_behind_it() {
        let ids = vec!["12345"; 20_000].join(",");
        let choices = r#"[{"message":{"content":"a"},"finish_reason":"stop"}]"#;
        for answer in [
            format!(r#"{{"choices":{choices},"usage":{{"prompt_tokens":7}},"ids":[{ids}]}}"#),
            format!(r#"{{"ids":[{ids}],"usage" : {{"prompt_tokens":7}} , "choices":{choices}}}"#),
            format!(r#"{{"usage":{{"prompt_tokens":7}},"choices":{choices}}}"#),
        ] {
            assert_eq!(read(&answer), (Some(7), Finish::Whole));
        }
    }

    #[test]
    fn only_keys_of_the_answer_and_of_its_choices_count() {
        let text = r#"\"usage\":{\"prompt_tokens\":1},\"finish_reason\":\"abort\" \\"#;
        for (answer, usage, finish) in [
            (format!(r#"{{"choices":[{{"text":"{text}"}}]}}"#), None, Finish::Untold),
            (r#"{"a":{"usage":{"prompt_tokens":1}},"b":"usage"}"#.to_owned(), None, Finish::Untold),
            (
                r#"{"usage":{"prompt_tokens":2},"a":{"usage":{"prompt_tokens":1}}}"#.to_owned(),
                Some(2),
                Finish::Untold,
            ),
            (r#"{"choices":[{"m":{"finish_reason":"abort"}}]}"#.to_owned(), None, Finish::Untold),
            (r#"{"other":[{"finish_reason":"abort"}]}"#.to_owned(), None, Finish::Untold),
            (r#"{"usage":null,"choices":[]}"#.to_owned(), None, Finish::Untold),
            (r#"["usage",{"prompt_tokens":1}]"#.to_owned(), None, Finish::Untold),
            (String::new(), None, Finish::Untold),
            (
                r#"{"usage":{"prompt_tokens":1},"usage":{"prompt_tokens":2,"x":{"a":[1]}}}"#
                    .to_owned(),
                Some(2),
                Finish::Untold,
            ),
        ] {
            assert_eq!(read(&answer), (usage, finish), "{answer}");
        }
    }

    #[test]
    fn the_worst_choice_tells_how_an_answer_ended() {
        let of = |reasons: &[&str]| {
            let choices: Vec<_> = reasons
                .iter()
                .map(|reason| format!(r#"{{"finish_reason" : {reason} }}"#))
                .collect();
            read(&format!(r#"{{"choices":[{}],"usage":{{"prompt_tokens":3}}}}"#, choices.join(",")))
        };
        for (reasons, finish) in [
            (&["\"stop\""][..], Finish::Whole),
            (&["\"length\"", "\"abort\""], Finish::Aborted),
            (&["\"error\"", "\"stop\""], Finish::Failed),
            (&["null"], Finish::Untold),
            (&[], Finish::Untold),
        ] {
            assert_eq!(of(reasons), (Some(3), finish), "{reasons:?}");
        }
    }

    #[test]
    fn a_value_beyond_the_bound_is_not_read() {
        let long = "x".repeat(VALUE_BYTES_MAX);
        let answer = format!(r#"{{"usage":{{"prompt_tokens":7,"x":"{long}"}},"choices":[]}}"#);
        assert_eq!(read(&answer), (None, Finish::Untold));
    }
}
