//! Bytes to plain structs and back: KV events, SSE frames, OpenAI bodies, metrics text.
//! Invariant: pure functions over byte slices. No I/O, no clock, no logs, no panic on any input,
//! and never more memory than the limits that the caller passed.
#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a test fails by panicking"))]

pub mod kv;
pub mod metrics;
pub mod openai;

pub mod sse;
