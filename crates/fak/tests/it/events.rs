//! KV events over real sockets: fak's own client against the `zeromq` crate's sockets and scripted
//! peers.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod fold;
mod peers;
mod replay;
mod stream;
mod subscription;
