//! The product: one library and one binary.
//!
//! Invariant: parts reach each other only in the direction of DESIGN section 5; `app` alone knows
//! them all.

pub mod admin;
pub mod app;
pub mod cli;
pub mod config;
pub mod engine;
pub mod events;
pub mod fleet;
pub mod gateway;
pub mod lifecycle;
pub mod runtime;
pub mod sessions;
pub mod store;
pub mod telemetry;
