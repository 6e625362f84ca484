//! Runs scenario files against the simulator and a real engine and compares the transcripts.

fn main() {}
