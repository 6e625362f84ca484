//! The hunt for a false warm: an adversary delays, drops, repeats, reorders, tears and truncates
//! the event stream of a reference engine, restarts it, acts on it beside fak, and no block is ever
//! claimed that the engine does not hold. And liveness: once the stream is whole again, what is
//! stored afresh is claimed, and what the engine kept all the time is claimed after one answer.
//!
//! A failure prints its seed; `FAK_SEED=… cargo test -p fak-index --test adversary` runs that one
//! history and prints it whole.

#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a hunt tells its seed and its figures"
)]

#[path = "adversary/engine.rs"]
mod engine;
#[path = "adversary/world.rs"]
mod world;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use world::World;

const HISTORIES: u64 = 12_000;
const STEPS: usize = 150;

/// Runs `history` over the seeds, or over the one that `FAK_SEED` names.
fn hunt(histories: u64, history: impl Fn(u64) -> World) -> (u64, u64) {
    let only =
        std::env::var("FAK_SEED").ok().map(|s| s.parse::<u64>().expect("FAK_SEED is a number"));
    let (mut claimed, mut confirmed, mut warm, mut checks) = (0, 0, 0, 0);
    for seed in only.map_or(0..histories, |s| s..s + 1) {
        match catch_unwind(AssertUnwindSafe(|| history(seed))) {
            Ok(world) => {
                (claimed, checks) = (claimed + world.claimed, checks + world.checks);
                (confirmed, warm) = (confirmed + world.confirmed, warm + world.warm);
            }
            Err(panic) => {
                eprintln!("FAK_SEED={seed}");
                resume_unwind(panic);
            }
        }
    }
    println!("{histories} histories, {checks} claims checked, {claimed} blocks claimed");
    println!("{confirmed} blocks came back by an answer, {warm} kept prompts were asked for");
    assert!(claimed > checks / 20, "an index that claims nothing proves nothing");
    (confirmed, warm)
}

#[test]
fn no_block_is_claimed_that_the_engine_does_not_hold_and_fresh_stores_are_claimed() {
    let (confirmed, warm) = hunt(HISTORIES, |seed| {
        let mut world = World::new(seed);
        for _ in 0..STEPS {
            world.act();
            world.check();
        }
        world.expect_to_recover();
        world.expect_warmth_back();
        world
    });
    assert!(confirmed > 1_000 && warm > HISTORIES, "nothing that was kept had to come back");
}

#[test]
fn without_faults_what_is_claimed_is_exactly_what_is_held() {
    hunt(500, |seed| {
        let mut world = World::roomy(seed);
        world.drain();
        for _ in 0..60 {
            world.act_faultless();
            world.check();
        }
        world.drain();
        world.expect_exact();
        world
    });
}
