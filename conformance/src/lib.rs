//! The same scenarios against the simulator and a real vLLM, and the transcripts compared.
//! Invariant: where the two differ, the simulator is wrong.

#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a test may fail by panicking"))]

pub mod bridge;
pub mod client;
pub mod events;
pub mod fak;
pub mod hunt;
pub mod metrics;
pub mod names;
pub mod normal;
pub mod prompt;
pub mod recording;
pub mod relay;
pub mod run;
pub mod scenario;
pub mod session;
pub mod sweep;
pub mod target;
pub mod transcript;
