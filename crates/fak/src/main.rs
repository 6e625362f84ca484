//! Parse, build, run, exit code.

fn main() {}
