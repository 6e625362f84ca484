//! The data plane over simulated engines: many streams, and clients that leave.

use std::time::Duration;

use fak::lifecycle::Request;
use fak_kernel::witness::{Level, Mode, Move, Parts, Weights};
use fak_sim::{Binds, Sim, SimConfig};
use http::StatusCode;
use serde_json::json;

use super::bridged::Bridged;
use super::rig::{Rig, next, setup, whole};

const COMPLETIONS: &str = "/v1/completions";

async fn simulated(workers: usize) -> (Vec<Sim>, Rig) {
    let mut sims = Vec::new();
    for _ in 0..workers {
        let config = SimConfig { model: super::rig::MODEL.to_owned(), ..SimConfig::default() };
        sims.push(Sim::start(config, Binds::default()).await.unwrap());
    }
    let urls: Vec<_> = sims.iter().map(Sim::base_url).collect();
    let mut setup = setup();
    // A queued stream has its head at once.
    setup.config.head_within = Duration::ZERO;
    let rig = Rig::with(&urls, setup).await;
    (sims, rig)
}

fn stream(number: u32, tokens: u32) -> String {
    let prompt: Vec<u32> = (0..8).map(|n| 100 + number + n).collect();
    let body = json!({"model": super::rig::MODEL, "prompt": prompt, "stream": true,
                      "max_tokens": tokens, "ignore_eos": true});
    body.to_string()
}

#[tokio::test]
async fn a_stream_is_what_the_engine_sends() {
    let (_sims, rig) = simulated(1).await;
    let answer = rig.post(COMPLETIONS, &stream(0, 5)).await;
    assert_eq!(answer.status, StatusCode::OK);
    assert!(answer.text().ends_with("data: [DONE]\n\n"), "{}", answer.text());
    assert!(!answer.text().contains("prompt_tokens"), "{}", answer.text());
    rig.counted("fak_requests_total{outcome=\"ok\",route=\"/v1/completions\"}", 1).await;
}

/// Case 74, on many streams at once.
#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_streams_whose_clients_leave_at_random_leave_nothing_behind() {
    let seed = fastrand::u64(..);
    let mut random = fastrand::Rng::with_seed(seed);
    let (sims, rig) = simulated(2).await;
    // The engines stop after some steps, so that all streams are open together: some have tokens,
    // some are queued and have none.
    sims.iter().for_each(|sim| sim.faults().limit_steps(Some(20)));
    let bodies: Vec<_> = (0..1000).map(|number| stream(number % 100, 40)).collect();
    let opened = bodies.iter().map(|body| rig.open("POST", COMPLETIONS, &[], body));
    let mut streams = futures_util::future::join_all(opened).await;
    assert_eq!(sims.iter().map(Sim::requests_in_flight).sum::<usize>(), 1000, "seed {seed}");
    assert_eq!(rig.inside(0) + rig.inside(1), 1000);
    assert_eq!(rig.count("fak_requests_in_flight"), 1000);
    // Some leave before they read anything, some after.
    let mut stay = Vec::new();
    for mut answer in streams.drain(..) {
        match random.u32(..3) {
            0 => drop(answer),
            1 => {
                let first = tokio::time::timeout(Duration::from_millis(1), next(&mut answer));
                drop(first.await);
            }
            _ => stay.push(answer),
        }
    }
    let stayed = stay.len() as u64;
    sims.iter().for_each(|sim| sim.faults().limit_steps(None));
    let read = futures_util::future::join_all(stay.into_iter().map(whole)).await;
    for answer in &read {
        assert!(answer.text().ends_with("data: [DONE]\n\n"), "seed {seed}: {}", answer.text());
    }
    rig.empty().await;
    let route = "route=\"/v1/completions\"";
    rig.counted(&format!("fak_requests_total{{outcome=\"ok\",{route}}}"), stayed).await;
    rig.counted(&format!("fak_requests_total{{outcome=\"cancelled\",{route}}}"), 1000 - stayed)
        .await;
    for sim in &sims {
        sim.at_rest().await;
        assert_eq!(sim.requests_in_flight(), 0, "seed {seed}");
    }
}

/// What is claimed is what the engine then takes from its cache, before a sleep and after it.
#[tokio::test]
async fn a_claim_is_what_the_engine_reuses() {
    let bridged = Bridged::start().await;
    let text = "the quick brown fox jumps over the lazy dog ".repeat(20);
    let tokens = bridged.sim.tokenize(&text).len();
    let warm = ("warm".to_owned(), format!("gpu={}", (tokens - 1) / 32 * 32));
    // What an engine that is met awake held before, nobody knows.
    assert_eq!(bridged.ask(&text).await, ("unknown".to_owned(), "0".to_owned()));
    for _ in 0..3 {
        assert_eq!(bridged.ask(&text).await, warm);
    }
    let sleep = Move::Sleep { level: Some(Level::One), mode: Mode::Abort, keep_tier: false };
    bridged.lifecycle.act("w0", Request::new(sleep)).await.unwrap();
    let body = json!({"model": "tiny", "prompt": text}).to_string();
    let asleep = bridged.rig.post(COMPLETIONS, &body).await;
    assert_eq!(
        (asleep.status, asleep.code().as_str()),
        (StatusCode::SERVICE_UNAVAILABLE, "no_serving_worker")
    );
    let wake = Move::Wake { tags: Parts::NONE, weights: Weights::Same };
    bridged.lifecycle.act("w0", Request::new(wake)).await.unwrap();
    bridged.heard().await;
    let (kv, claimed) = bridged.ask(&text).await;
    assert!(kv != "warm" && claimed == "0", "{kv} {claimed}");
    assert_eq!(bridged.ask(&text).await, warm);
    for outcome in ["over", "under", "lost_in_flight", "unaudited"] {
        assert_eq!(bridged.audited(outcome), 0, "{outcome}");
    }
    assert_eq!(bridged.audited("confirmed"), 4);
    let claimed = bridged.rig.count("fak_claimed_tokens_total");
    assert_eq!(claimed, bridged.rig.count("fak_cached_tokens_total"));
}
