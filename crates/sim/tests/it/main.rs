//! The simulator over real sockets, held against recordings of a real vLLM 0.32.0.

#![allow(clippy::unwrap_used, reason = "a test may fail by panicking")]

mod client;
mod control;
mod events;
mod faults;
mod profiles;
mod recorded;
mod streams;
