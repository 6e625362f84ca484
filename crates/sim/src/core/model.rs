//! The model: the next token as a function of weights, prompt and position, and of nothing else.
//! Invariant: caching, batching and preemption never change an output.

use crate::tokenizer::byte_token;

/// Mixes a 64-bit value (splitmix64).
#[must_use]
pub fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Digest of a prompt; `sample` tells random samples of one prompt apart.
#[must_use]
pub fn digest(prompt: &[u32], sample: u64) -> u64 {
    prompt.iter().fold(mix(sample), |h, token| mix(h ^ u64::from(*token)))
}

/// The token after `position` output tokens: a lower-case letter or a space, so that the text
/// tokenizes back to the same tokens and a next turn hits the cache. Never an end token: the
/// rig's random weights do not emit one either within short outputs.
#[must_use]
pub fn next_token(weights: u64, prompt_digest: u64, position: usize) -> u32 {
    let draw = mix(prompt_digest ^ mix(weights) ^ mix(position as u64).rotate_left(17));
    let letter = u8::try_from((draw >> 8) % 26).unwrap_or(0);
    byte_token(if draw.is_multiple_of(6) { b' ' } else { b'a' + letter })
}
