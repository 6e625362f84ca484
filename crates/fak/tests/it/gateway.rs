//! The data plane on real sockets: over peers that do exactly as told, and over simulated engines.

#![allow(clippy::unwrap_used, reason = "a test may fail by panicking")]

mod bridged;
mod rig;

mod audits;
mod balance;
mod claims;
mod ends;
mod failures;
mod limits;
mod matching;
mod protocols;
mod refusals;
mod relay;
mod routing;
mod sessions;
mod silence;
mod simulated;
mod unserved;
mod weights;
