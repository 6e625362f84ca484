//! Prompts as block labels, and block contents back as labels.
//! Invariant: a label stands for the same token ids everywhere, and two labels for different ones,
//! so that two engines with different vocabularies and hashes can be compared by label.

use std::fmt;

use serde::Deserialize;

/// Tokens in a block; the CPU build of vLLM takes multiples of 32 only.
pub const BLOCK_SIZE: usize = 32;

/// Ids that every vocabulary in use holds (the tiny model has 4,096), above its special tokens.
const TOKEN_FIRST: u64 = 300;
const TOKEN_RANGE: u64 = 2_700;

/// The label that tails are cut from; blocks are numbered from 1.
const TAIL_LABEL: u32 = 0;

/// A prompt written as `"1-3 7 +5"`: blocks 1, 2, 3 and 7, then the first 5 tokens of the tail.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Prompt {
    blocks: Vec<u32>,
    tail: usize,
    text: String,
}

/// Why a prompt could not be read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A part is neither a label, a range of labels, nor a tail.
    #[error("`{part}` in prompt `{prompt}` is no block label, range or tail of 1 to 31 tokens")]
    Part {
        /// The part that was not understood.
        part: String,
        /// The whole prompt.
        prompt: String,
    },
}

impl TryFrom<String> for Prompt {
    type Error = Error;

    fn try_from(text: String) -> Result<Self, Error> {
        let mut prompt = Prompt { text: text.clone(), ..Prompt::default() };
        for part in text.split_whitespace() {
            let known = match (part.strip_prefix('+'), part.split_once('-')) {
                (Some(tail), _) => prompt.set_tail(tail),
                (None, Some((first, last))) => prompt.push_range(first, last),
                (None, None) => prompt.push_range(part, part),
            };
            if known.is_none() {
                return Err(Error::Part { part: part.to_owned(), prompt: text });
            }
        }
        Ok(prompt)
    }
}

impl Prompt {
    fn set_tail(&mut self, tail: &str) -> Option<()> {
        self.tail = tail.parse().ok().filter(|n| (1..BLOCK_SIZE).contains(n))?;
        Some(())
    }

    fn push_range(&mut self, first: &str, last: &str) -> Option<()> {
        let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
        if first == TAIL_LABEL || last < first || last > 9_999 || self.tail > 0 {
            return None;
        }
        self.blocks.extend(first..=last);
        Some(())
    }

    /// The prompt's token ids.
    pub fn tokens(&self) -> Vec<u32> {
        let blocks = self.blocks.iter().flat_map(|label| block(*label));
        blocks.chain(block(TAIL_LABEL).into_iter().take(self.tail)).collect()
    }

    /// How many tokens follow the last full block.
    pub fn tail(&self) -> usize {
        self.tail
    }

    /// The labels of the full blocks.
    pub fn blocks(&self) -> &[u32] {
        &self.blocks
    }
}

impl fmt::Display for Prompt {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.text)
    }
}

/// The token ids of a label. A multiplicative hash spreads them, so that no two labels of a
/// scenario share a run of tokens.
fn block(label: u32) -> Vec<u32> {
    (0..BLOCK_SIZE as u64)
        .map(|offset| {
            let mixed = (u64::from(label) * 64 + offset + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
            (TOKEN_FIRST + (mixed >> 32) % TOKEN_RANGE) as u32
        })
        .collect()
}

/// What a scenario has sent so far; names the contents of blocks.
#[derive(Debug, Default)]
pub struct Contents {
    labels: Vec<u32>,
    tails: Vec<usize>,
}

impl Contents {
    /// Makes a prompt's blocks and tail known.
    pub fn learn(&mut self, prompt: &Prompt) {
        self.labels.extend(prompt.blocks());
        self.tails.push(prompt.tail());
        self.labels.sort_unstable();
        self.labels.dedup();
    }

    /// `7` for block 7, `+5g27` for a tail of 5 and 27 generated tokens, `g32` for generated ones.
    /// Generated tokens differ between engines, so only their number has a name.
    pub fn name(&self, tokens: &[u64]) -> String {
        let same = |label: u32, length: usize| {
            length <= tokens.len()
                && block(label).iter().zip(&tokens[..length]).all(|(a, b)| u64::from(*a) == *b)
        };
        if let Some(label) = self.labels.iter().find(|label| same(**label, BLOCK_SIZE)) {
            return label.to_string();
        }
        let tail = self.tails.iter().copied().filter(|n| same(TAIL_LABEL, *n)).max().unwrap_or(0);
        match tail {
            0 => format!("g{}", tokens.len()),
            tail => format!("+{tail}g{}", tokens.len() - tail),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prompt(text: &str) -> Prompt {
        Prompt::try_from(text.to_owned()).unwrap()
    }

    #[test]
    fn a_prompt_is_its_blocks_and_a_tail() {
        let tokens = prompt("1-2 9 +5").tokens();
        assert_eq!(tokens.len(), 3 * BLOCK_SIZE + 5);
        assert_eq!(tokens[..32], prompt("1").tokens()[..]);
        assert_eq!(tokens[64..96], prompt("9").tokens()[..]);
        assert!(tokens.iter().all(|token| (300..3_000).contains(token)));
    }

    #[test]
    fn labels_differ() {
        let mut blocks: Vec<_> = (0..500).map(block).collect();
        blocks.sort();
        blocks.dedup();
        assert_eq!(blocks.len(), 500);
    }

    #[test]
    fn nonsense_is_refused() {
        for text in ["x", "0", "3-1", "+0", "+32", "+5 1", "1-"] {
            assert!(Prompt::try_from(text.to_owned()).is_err(), "{text}");
        }
    }

    #[test]
    fn contents_are_named_by_what_was_sent() {
        let mut contents = Contents::default();
        contents.learn(&prompt("4 +5"));
        let tokens =
            |text: &str| -> Vec<u64> { prompt(text).tokens().into_iter().map(u64::from).collect() };
        assert_eq!(contents.name(&tokens("4")), "4");
        assert_eq!(contents.name(&tokens("6")), "g32");
        let mut mixed = tokens("+5");
        mixed.resize(BLOCK_SIZE, 7);
        assert_eq!(contents.name(&mixed), "+5g27");
    }
}
