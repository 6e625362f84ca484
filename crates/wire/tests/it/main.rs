//! Tests of fak-wire over the recordings in `fixtures/` and over hostile bytes.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod fixtures;
mod kv_frames;
mod kv_hostile;
mod kv_layouts;
mod kv_recordings;
mod metrics;
mod openai;
mod sse;
