//! A simulated vLLM that behaves as the real one was observed to: HTTP, SSE, KV events over
//! ZeroMQ with replay, an offload tier, and scripted faults.
//!
//! It shares no code with the rest of the project, so that a decoder's mistake cannot cancel
//! out: its bytes come from recordings of a real engine and from reading its source.
//!
//! [`Sim::start`] gives a server on real sockets; many can run in one process. [`core::Engine`]
//! is the engine alone, without sockets or clock. [`serve`] is a server for a command line.
//!
//! What it does not imitate: the tokenizer's merges, logprobs, tool calls, multi-modal input,
//! other endpoints than those of ENGINE.md's allow-list, and time, but for the pace of a step.

#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a test may fail by panicking"))]

pub mod core;
pub mod encode;
pub mod faults;
mod http;
mod life;
mod metrics;
pub mod profile;
mod publisher;
mod rank;
pub mod serve;
pub mod sim;
pub mod tokenizer;

pub use crate::core::connector::Connector;
pub use crate::core::request::Reused;
pub use crate::faults::{Faults, RouteFault, StreamCut};
pub use crate::profile::Profile;
pub use crate::sim::{Binds, Sim, SimConfig, StartError};
