//! The answer of `/tokenize`.

use serde::Deserialize;

use super::{AnswerError, bounded};

/// Most tokens that are read from one answer.
const TOKENS_MAX: usize = 1 << 22;

/// A prompt in tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tokenized {
    /// Longest sequence that the model takes, in tokens.
    pub max_model_len: u64,
    /// The token ids.
    pub tokens: Vec<u32>,
}

#[derive(Deserialize)]
struct Wire {
    count: usize,
    max_model_len: u64,
    #[serde(deserialize_with = "bounded::list::<TOKENS_MAX, _, _>")]
    tokens: Vec<u32>,
}

impl Tokenized {
    /// Reads the answer.
    ///
    /// # Errors
    /// If a field is missing or of the wrong type, or the count contradicts the tokens.
    pub fn parse(body: &[u8]) -> Result<Self, AnswerError> {
        let Wire { count, max_model_len, tokens } = serde_json::from_slice(body)
            .map_err(|error| AnswerError { reason: error.to_string() })?;
        let found = tokens.len();
        if count != found {
            let reason = format!("tokens: found {found}, expected {count} as in count");
            return Err(AnswerError { reason });
        }
        Ok(Tokenized { max_model_len, tokens })
    }
}
