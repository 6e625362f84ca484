//! `fak serve` in front of the simulator: the same scenes as in front of a real engine.

use fak_conformance::bridge::Bridge;
use fak_conformance::fak;
use fak_conformance::target::Simulated;

#[tokio::test]
async fn what_happened_to_the_cache_is_told_and_no_resume_is_warm_without_proof() {
    let binary = fak::build().expect("fak builds");
    let out = Box::new(std::io::sink());
    let bridge = Bridge::start(Simulated::default(), &binary, out).await.expect("both start");
    let checks = bridge.run().await.expect("every scene comes to its end");
    assert!(checks.failures().is_empty(), "{}", checks.failures().join("\n"));
    assert!(checks.passed() > 60, "{checks:?}: scenes are missing");
}
