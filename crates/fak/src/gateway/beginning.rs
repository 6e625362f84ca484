//! Whether an answer of chat or completions has begun, or ended in an error before its first token:
//! then its client has seen nothing that another worker could not do better.
//!
//! Invariant: what cannot be read has begun, since it may be a token.

use fak_wire::openai::{Answer, Choice, StreamItem};
use fak_wire::sse;

/// Follows a stream up to its first token.
#[derive(Debug)]
pub(super) struct Beginning {
    choices: usize,
    /// Choices that ended in an error.
    errors: usize,
    has_begun: bool,
}

impl Beginning {
    /// Of a stream of so many choices.
    pub(super) fn new(choices: usize) -> Self {
        Self { choices, errors: 0, has_begun: false }
    }

    /// Whether there is more than what goes before a token, such as the role.
    pub(super) fn has_begun(&self) -> bool {
        self.has_begun
    }

    /// Whether all of it is an error.
    pub(super) fn is_empty_error(&self) -> bool {
        self.errors >= self.choices
    }

    /// Reads one event.
    pub(super) fn see(&mut self, bytes: &[u8]) {
        if self.has_begun {
            return;
        }
        let mut reader = sse::Reader::new(bytes.len());
        let event = reader.push(bytes).next();
        // A comment alone says nothing.
        let Some(event) = event else { return };
        let item = event.ok().and_then(|event| StreamItem::parse(&event.data).ok());
        let Some(StreamItem::Chunk(chunk)) = item else {
            self.has_begun = true;
            return;
        };
        let is_other_end =
            |choice: &Choice| choice.finish_reason.is_some() && !ends_in_error(choice);
        let errors = chunk.choices.iter().filter(|choice| ends_in_error(choice)).count();
        self.has_begun = chunk.choices.iter().any(|c| has_token(c) || is_other_end(c));
        if !self.has_begun {
            self.errors += errors;
            self.has_begun = self.is_empty_error();
        }
    }
}

/// Whether a whole answer has no token and ends in an error.
pub(super) fn is_empty_error(answer: &[u8]) -> bool {
    let is_empty = |answer: Answer| {
        !answer.choices.is_empty()
            && answer.choices.iter().all(|choice| ends_in_error(choice) && !has_token(choice))
    };
    serde_json::from_slice(answer).is_ok_and(is_empty)
}

fn ends_in_error(choice: &Choice) -> bool {
    choice.finish_reason.as_deref() == Some("error")
}

fn has_token(choice: &Choice) -> bool {
    let Choice { text, reasoning, calls_tools, token_ids, .. } = choice;
    *calls_tools || !(text.is_empty() && reasoning.is_empty() && token_ids.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What comes of a stream of these events: whether it has begun, and whether it is an error.
    fn after(choices: usize, events: &[&str]) -> (bool, bool) {
        let mut beginning = Beginning::new(choices);
        for event in events {
            beginning.see(format!("{event}\n\n").as_bytes());
        }
        (beginning.has_begun(), beginning.is_empty_error())
    }

    #[test]
    fn a_role_and_a_comment_are_no_beginning_and_a_token_of_any_kind_is() {
        let role = r#"data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}"#;
        assert_eq!(after(1, &[": wait", role]), (false, false));
        for token in [
            r#"data: {"choices":[{"index":0,"delta":{"content":"a"}}]}"#,
            r#"data: {"choices":[{"index":0,"delta":{"reasoning":"a"}}]}"#,
            r#"data: {"choices":[{"index":0,"delta":{"tool_calls":[{"index":0}]}}]}"#,
            r#"data: {"choices":[{"index":0,"text":"a"}]}"#,
            r#"data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}"#,
            r#"data: {"error":{"message":"boom"}}"#,
            "data: [DONE]",
            "data: not JSON",
        ] {
            assert_eq!(after(1, &[role, token]), (true, false), "{token}");
        }
    }

    #[test]
    fn an_error_before_the_first_token_is_one_where_each_choice_has_it() {
        let error = |choice| {
            format!(
                r#"data: {{"choices":[{{"index":{choice},"delta":{{}},"finish_reason":"error"}}]}}"#
            )
        };
        let token = r#"data: {"choices":[{"index":0,"delta":{"content":"a"}}]}"#;
        assert_eq!(after(1, &[&error(0)]), (true, true));
        assert_eq!(after(2, &[&error(0)]), (false, false));
        assert_eq!(after(2, &[&error(0), &error(1)]), (true, true));
        assert_eq!(after(2, &[&error(1), token]), (true, false));
        assert_eq!(after(1, &[token, &error(0)]), (true, false));
    }

    #[test]
    fn a_whole_answer_without_a_token_that_ends_in_an_error_is_told_from_others() {
        let answer = |message: &str, reason: &str| {
            format!(
                r#"{{"choices":[{{"index":0,"message":{message},"finish_reason":"{reason}"}}]}}"#
            )
        };
        let nothing = r#"{"role":"assistant","content":null}"#;
        let text = r#"{"role":"assistant","content":"a"}"#;
        for (answer, is_empty) in [
            (answer(nothing, "error"), true),
            (answer(nothing, "stop"), false),
            (answer(text, "error"), false),
            (r#"{"choices":[{"index":0,"text":"","finish_reason":"error"}]}"#.to_owned(), true),
            (r#"{"choices":[]}"#.to_owned(), false),
            (r#"{"data":[]}"#.to_owned(), false),
        ] {
            assert_eq!(is_empty_error(answer.as_bytes()), is_empty, "{answer}");
        }
    }
}
