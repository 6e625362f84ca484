//! The field sweep in front of the simulator, which serves the real engine's recorded schemas:
//! each field by itself. `fak-sweep` also sweeps pairs, and a real engine.

use fak_conformance::fak;
use fak_conformance::sweep::{self, Extent};
use fak_conformance::target::Simulated;

#[tokio::test]
async fn no_field_of_a_request_is_claimed_above_what_the_engine_reuses() {
    let binary = fak::build().expect("fak builds");
    let out = Box::new(std::io::sink());
    let swept = sweep::run(Simulated::default(), &binary, Extent::Singles, out).await;
    let tally = swept.expect("every field can be asked for");
    assert!(tally.holds(), "{tally}\n{}\n{}", tally.overs.join("\n"), tally.unanswered.join("\n"));
    assert!(tally.requests > 600, "few fields are swept: {tally}");
}
