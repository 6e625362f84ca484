//! `cargo xtask ci` is the whole gate.

fn main() {}
