//! A simulated vLLM that behaves as the real one was observed to.
//!
//! It shares no code with the rest of the project, so a decoder's mistake cannot cancel out.

#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a test may fail by panicking"))]

pub mod core;
pub mod tokenizer;
