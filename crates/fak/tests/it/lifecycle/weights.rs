//! Wakes on other weights: in the order that vLLM documents, and serving only with what was loaded
//! into memory that was awake to take it, with the KV of the old ones gone.

use fak_kernel::witness::{Level, Mode, Move, Parts, Weights};
use fak_kernel::{Disposition, Phase, Tier};
use fak_sim::RouteFault;
use serde_json::json;

use super::rig::{Rig, prompt};

const EXTERNAL: &str = "/reset_prefix_cache?reset_external=true";

fn sleep(level: Level) -> Move {
    Move::Sleep { level: Some(level), mode: Mode::Abort, keep_tier: false }
}

fn wake(weights: Weights) -> Move {
    Move::Wake { tags: Parts::NONE, weights }
}

#[tokio::test]
async fn fak_loads_other_weights_where_it_may_before_the_kv_memory_wakes() {
    let mut rig = Rig::reloading().await;
    for level in [Level::One, Level::Two] {
        rig.warm(&prompt(1)).await;
        rig.act(sleep(level)).await;
        rig.sim.set_checkpoint(7);
        let row = rig.act(wake(Weights::Changed)).await;
        assert!(row.serving && row.reason == "confirmed", "{row:?}");
        let order = ["/wake_up?tags=weights", "reload", "/wake_up?tags=kv_cache", EXTERNAL];
        assert_eq!(row.asked, json!({ "calls": order }));
        assert_eq!(rig.state().weights_epoch, Some(row.seq));
        assert_eq!(row.kv, Disposition::Forgotten);
        assert_eq!(row.tiers.get(Tier::Cpu), Some(Disposition::Forgotten));
        assert_eq!(rig.claim(&prompt(1)), 0);
        assert_eq!(rig.sim.holds(&prompt(1), None).stale, 0);
    }
}

#[tokio::test]
async fn where_it_may_not_the_worker_waits_with_its_weights_memory_awake_for_their_owner() {
    let rig = Rig::start().await;
    rig.act(sleep(Level::Two)).await;
    for nobody_loaded in [Weights::Loaded, Weights::Same] {
        let row = rig.act(wake(nobody_loaded)).await;
        assert_eq!((row.evidence.as_str(), &*row.reason), ("not_sent", "weights_asleep"));
        assert_eq!(row.phase, Phase::Sleeping, "{nobody_loaded:?}");
    }
    for weights in [Weights::Changed, Weights::Unproven] {
        let row = rig.act(wake(weights)).await;
        assert_eq!((row.phase, &*row.reason), (Phase::Waking, "weights_not_proven"), "{row:?}");
        rig.look().await;
        assert_eq!(rig.last_row().await.seq, row.seq, "what is waited for is no drift");
        assert!(!rig.state().is_serving() && rig.worker().door.is_shut());
    }
    let row = rig.act(wake(Weights::Loaded)).await;
    let calls = ["/wake_up?tags=kv_cache", EXTERNAL];
    assert_eq!(row.asked, json!({ "calls": calls }));
    assert_eq!(rig.state().weights_epoch, Some(row.seq));
    assert!(row.serving && row.reason == "confirmed", "{row:?}");
    rig.warm(&prompt(1)).await;
}

#[tokio::test]
async fn after_a_wake_on_other_weights_whose_reset_failed_nothing_serves() {
    for fault in [RouteFault::Fail(500), RouteFault::FailAfter(500)] {
        let rig = Rig::start().await;
        rig.act(sleep(Level::One)).await;
        rig.sim.faults().route("/reset_prefix_cache", fault, 1);
        let row = rig.act(wake(Weights::Loaded)).await;
        assert_eq!((row.phase, &*row.reason), (Phase::Error, "failed"), "{row:?}");
        rig.look().await;
        let row = rig.last_row().await;
        assert_eq!((row.phase, &*row.reason), (Phase::Waking, "weights_not_proven"), "{row:?}");
        assert!(rig.worker().door.is_shut());
        let row = rig.act(wake(Weights::Loaded)).await;
        assert!(row.serving && row.kv == Disposition::Forgotten, "{row:?}");
    }
}
