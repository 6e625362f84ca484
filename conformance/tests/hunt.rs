//! A short false-warm hunt on simulated engines; `fak-hunt` makes long ones, and on a real engine.
//! What the engines and fak do first still depends on the machine: a seed fixes the choices alone.

use fak_conformance::fak;
use fak_conformance::hunt::{Hunt, simulated};

/// Of the hunt's choices.
const SEED: u64 = 20_261_201;

#[test]
fn no_claim_is_over_whatever_happens_to_the_engines() {
    let binary = fak::build().expect("fak builds");
    let seed = SEED;
    let hunted = Hunt::simulated(seed, 1_000).run(&binary, 4, simulated);
    let tally = hunted.unwrap_or_else(|error| panic!("seed {seed}: {error:#}"));
    assert!(tally.failures.is_empty() && tally.died == 0, "seed {seed}: {tally}");
    assert!(tally.confirmed > 100 && tally.accidents > 20, "seed {seed} hunts little: {tally}");
}
