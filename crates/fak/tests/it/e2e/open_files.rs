//! What clients hold open is bounded by what the system lets fak have open.

use fak_sim::{Binds, Sim, SimConfig};
use tokio::net::TcpStream;

use super::process::{Setup, until};

#[tokio::test(flavor = "multi_thread")]
async fn the_soft_limit_of_open_files_is_raised_to_the_hard_one() {
    let sim = Sim::start(SimConfig::default(), Binds::default()).await.unwrap();
    let setup = Setup::new("soft_limit").sims([&sim]).after("ulimit -Sn 64");
    let fak = setup.start().await;
    let (soft, hard) = fak.open_files_max();
    assert!(soft > 64 && soft == hard, "{soft} {hard}");
    assert!(fak.talk().contains(&format!("open_files_max={soft}")), "{}", fak.talk());
    fak.terminated().await;
}

/// Their connections took every file, and engines could not be reached: all workers were lost.
#[tokio::test(flavor = "multi_thread")]
async fn idle_clients_leave_fak_the_files_that_it_needs_for_itself() {
    let mut sim = Sim::start(SimConfig::default(), Binds::default()).await.unwrap();
    let setup = Setup::new("low_limit").sims([&sim]).after("ulimit -n 128");
    let fak = setup.start().await;
    assert!(fak.talk().contains("36 connections of clients are taken at once"), "{}", fak.talk());
    fak.heard("w0").await;
    let before = fak.worker("w0").await["incarnation"].clone();
    let mut idle = Vec::new();
    for _ in 0..200 {
        idle.push(TcpStream::connect(fak.address).await.unwrap());
    }
    sim.restart().await.unwrap();
    until("the new life is followed", async || {
        let worker = fak.worker("w0").await;
        (worker["incarnation"] != before && worker["serving"] == true).then_some(())
    })
    .await;
    fak.heard("w0").await;
    drop(idle);
    fak.terminated().await;
}
