//! The simulator against what a real vLLM 0.32.0 was recorded to do.
//! Invariant: every scenario has a recording, and every recording a scenario.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use fak_conformance::recording;
use fak_conformance::run::run;
use fak_conformance::scenario::{self, Profile, Scenario};
use fak_conformance::session::Session;
use fak_conformance::target::Simulated;
use fak_conformance::transcript::difference;

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

fn scenarios() -> Vec<Scenario> {
    scenario::load(&folder("scenarios")).expect("the scenarios can be read")
}

async fn check(profile: Profile) {
    let scenarios: Vec<_> = scenarios().into_iter().filter(|one| one.engine == profile).collect();
    assert!(!scenarios.is_empty(), "no scenario for {profile:?}");
    let mut session =
        Session::start(Simulated::default(), profile).await.expect("the simulator starts");
    let mut differences = String::new();
    for scenario in &scenarios {
        let recorded = recording::read(&folder("recorded/0.32.0"), &scenario.name)
            .expect("there is a recording");
        let outcome = run(&mut session, scenario).await;
        if let Some((count, text)) = difference(&recorded, &outcome.transcript) {
            differences += &format!("{}: {count} lines\n{text}", scenario.name);
        }
    }
    assert!(differences.is_empty(), "vLLM - and simulator + differ:\n{differences}");
}

#[tokio::test]
async fn without_a_connector_the_simulator_does_what_vllm_did() {
    check(Profile::Plain).await;
}

#[tokio::test]
async fn with_an_offload_tier_the_simulator_does_what_vllm_did() {
    check(Profile::Offload).await;
}

#[tokio::test]
async fn with_a_tier_that_can_be_kept_the_simulator_does_what_vllm_did() {
    check(Profile::KeepTier).await;
}

#[tokio::test]
async fn with_a_connector_that_refuses_the_simulator_does_what_vllm_did() {
    check(Profile::KeepTierBundle).await;
}

#[tokio::test]
async fn with_chunks_of_several_blocks_the_simulator_does_what_vllm_did() {
    check(Profile::Chunked).await;
    check(Profile::ChunkedDescribed).await;
}

#[tokio::test]
async fn with_several_names_and_adapters_the_simulator_does_what_vllm_did() {
    check(Profile::Named).await;
}

#[tokio::test]
async fn with_an_eagle_head_the_simulator_does_what_vllm_did() {
    check(Profile::Speculating).await;
}

#[test]
fn no_recording_is_left_over() {
    let names: BTreeSet<_> = scenarios().into_iter().map(|scenario| scenario.name).collect();
    let entries = std::fs::read_dir(folder("recorded/0.32.0")).expect("the folder is there");
    let recorded: BTreeSet<_> = entries
        .map(|entry| entry.expect("it can be listed").path())
        .map(|path| path.file_stem().unwrap_or_default().to_string_lossy().into_owned())
        .collect();
    assert_eq!(names, recorded);
}
