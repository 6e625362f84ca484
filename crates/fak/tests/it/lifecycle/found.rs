//! A worker that vanished and is back is believed as far as it is shown to be the same, as it was.

use std::net::SocketAddr;

use fak_kernel::Phase;
use fak_kernel::rank::Trust;
use fak_sim::SimConfig;

use super::rig::{Rig, prompt};

/// Nothing answers at the worker's address; its event stream goes on.
async fn vanishes(rig: &Rig) {
    rig.front().cut(|_| SocketAddr::from(([127, 0, 0, 1], 9)));
    rig.look().await;
    assert_eq!((rig.state().phase(), rig.claim(&prompt(1))), (Phase::Error, 0));
}

async fn comes_back(rig: &Rig) {
    rig.front().point_to(&rig.sim);
    rig.reconnects().await;
    rig.look().await;
}

async fn actions(rig: &Rig) -> Vec<&'static str> {
    rig.rows().await.iter().map(|row| row.action.as_str()).collect()
}

#[tokio::test]
async fn a_silence_of_http_costs_no_belief_where_the_engine_kept_its_cache() {
    let rig = Rig::fronted(SimConfig::default()).await;
    rig.warm(&prompt(1)).await;
    let rows = rig.rows().await.len();
    for _ in 0..2 {
        vanishes(&rig).await;
        comes_back(&rig).await;
        assert!(rig.state().is_serving());
        rig.heard().await;
        let held = rig.sim.holds(&prompt(1), None).gpu;
        assert!(held > 0 && rig.claim(&prompt(1)) == held, "{held} blocks are there");
    }
    assert_eq!(actions(&rig).await[rows..], ["lost", "lost"], "it did not move");
    rig.warm(&prompt(2)).await;
}

#[tokio::test]
async fn what_an_engine_lost_in_a_silence_of_http_is_not_claimed() {
    let rig = Rig::fronted(SimConfig::default()).await;
    rig.warm(&prompt(1)).await;
    vanishes(&rig).await;
    rig.post("/reset_prefix_cache").await;
    comes_back(&rig).await;
    rig.heard().await;
    assert_eq!(rig.claim(&prompt(1)), 0, "its stream tells of the clear");
    rig.warm(&prompt(1)).await;
    vanishes(&rig).await;
    rig.post("/sleep?level=1").await;
    comes_back(&rig).await;
    assert_eq!((rig.state().phase(), rig.claim(&prompt(1))), (Phase::Sleeping, 0));
    assert_eq!(actions(&rig).await.last(), Some(&"drift"), "it is not as it was");
}

#[tokio::test]
async fn another_process_at_the_address_of_one_that_vanished_is_no_find() {
    let mut rig = Rig::fronted(SimConfig::default()).await;
    rig.warm(&prompt(1)).await;
    vanishes(&rig).await;
    rig.sim.restart().await.unwrap();
    comes_back(&rig).await;
    rig.heard().await;
    assert_eq!((rig.claim(&prompt(1)), rig.state().trust()), (0, Trust::Exact));
    assert!(actions(&rig).await.contains(&"restart"));
}
