//! fak itself is stopped and goes on: what it believed is as old as the stop.

use std::time::{Duration, Instant};

use fak_sim::{Binds, Sim, SimConfig};

use super::process::{Setup, behind, prompt, until};

/// Longer than beliefs last by the clock.
const STOPPED: Duration = Duration::from_millis(1500);

#[tokio::test(flavor = "multi_thread")]
async fn a_fak_that_stood_still_claims_nothing_by_what_it_believed_before() {
    let sim = Sim::start(SimConfig::default(), Binds::default()).await.unwrap();
    let setup = Setup::new("stood-still").sims([&sim]);
    let fak = setup.start().await;
    fak.heard("w0").await;
    fak.warm(&prompt(1)).await;
    fak.signal("STOP");
    let stopped = Instant::now();
    // What the engine publishes does not come before the first request does.
    sim.faults().hold_publisher(true);
    behind(&sim, "/reset_prefix_cache").await;
    until("beliefs are old", async || (stopped.elapsed() > STOPPED).then_some(())).await;
    fak.signal("CONT");
    let asked = fak.ask_truly(&prompt(1)).await;
    assert_eq!((asked.kv.as_str(), asked.cached), ("unknown", 0));
    sim.faults().hold_publisher(false);
    fak.heard("w0").await;
    fak.warm(&prompt(1)).await;
    fak.terminated().await;
}
