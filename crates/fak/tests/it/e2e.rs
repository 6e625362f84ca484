//! The built binary as a process of its own, on real sockets, in front of engines that know the
//! truth: how it starts, how it ends, and what is left when it is killed.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a test fails by panicking, and says what it was about"
)]

mod crash;
mod ledger;
mod open_files;
mod paths;
mod peer;
mod phases;
pub(crate) mod process;
mod restart;
mod start;
mod stop;
mod stopped;
mod streams;
mod tenants;
