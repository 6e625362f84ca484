//! `fak serve` in front of the simulator: the same scenes as in front of a real engine.

use fak_conformance::bridge::Bridge;
use fak_conformance::fak;
use fak_conformance::scenario::Profile;
use fak_conformance::target::Simulated;

async fn play(profile: Profile, checks_min: usize) {
    let binary = fak::build().expect("fak builds");
    let out = Box::new(std::io::sink());
    let bridge = Bridge::start(Simulated::default(), profile, &binary, out).await;
    let checks = bridge.expect("both start").run().await.expect("every scene comes to its end");
    assert!(checks.failures().is_empty(), "{}", checks.failures().join("\n"));
    assert!(checks.passed() >= checks_min, "{checks:?}: scenes are missing");
}

#[tokio::test]
async fn what_happened_to_the_cache_is_told_and_no_resume_is_warm_without_proof() {
    play(Profile::Offload, 80).await;
}

#[tokio::test]
async fn a_kept_tier_is_reused_under_the_same_weights_and_under_no_others() {
    play(Profile::KeepTier, 28).await;
}
