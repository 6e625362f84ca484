//! What is true about the engines' KV caches, and what to do about it.
//!
//! Pure: no I/O, no clock, no log, no randomness, no dependency. The shell feeds facts in and
//! carries out the effects that come back. Invariant of the whole crate: `unknown` never becomes
//! `preserved` without evidence.
#![no_std]

extern crate alloc;
#[cfg(test)]
extern crate std;

pub mod floor;
pub mod gate;
pub mod lease;
pub mod rank;
pub mod route;
pub mod vocab;
pub mod witness;

pub use vocab::{Action, Belief, Disposition, Evidence, LossCause, Phase, Tier, TierSet};
