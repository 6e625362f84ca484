//! The data plane on real sockets: over peers that do exactly as told, and over simulated engines.

mod rig;

mod claims;
mod failures;
mod limits;
mod relay;
mod routing;
mod simulated;
mod unserved;
