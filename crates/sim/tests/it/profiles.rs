//! What older and patched engines do otherwise.

use fak_sim::{Connector, Profile};
use rmpv::Value as Msg;
use serde_json::json;

use crate::client::*;

fn decoded(frames: &[Vec<u8>]) -> Msg {
    rmpv::decode::read_value(&mut frames[frames.len() - 1].as_slice()).unwrap()
}

#[tokio::test]
async fn old_events_are_arrays_of_their_versions_length() {
    for (profile, fields, frames) in [(Profile::V0_11, 7, 3), (Profile::V0_19, 9, 3)] {
        let sim = of_profile(profile).await;
        complete(&sim, 100, 40, 1).await;
        complete(&sim, 100, 40, 1).await;
        control(&sim, "/reset_prefix_cache").await;
        complete(&sim, 200, 20, 1).await;
        let messages = replayed(&sim.replay_endpoint(), &[]).await;
        assert!(messages.iter().all(|m| m.len() == frames), "no topic in replays");
        let events: Vec<Msg> = messages[..messages.len() - 1]
            .iter()
            .flat_map(|m| decoded(m)[1].as_array().unwrap().clone())
            .collect();
        let stored = &events[0];
        assert_eq!(stored[0].as_str(), Some("BlockStored"));
        assert_eq!(stored.as_array().unwrap().len(), fields, "{profile:?}");
        assert_eq!((&stored[4], stored[6].as_str()), (&Msg::from(16), Some("GPU")));
        let host = events.iter().find(|event| event[6].as_str() == Some("CPU")).unwrap();
        assert_eq!(host[4], Msg::from(16), "a block size, unlike today");
        let cleared = Msg::Array(vec![Msg::from("AllBlocksCleared")]);
        assert!(events.contains(&cleared));
    }
}

#[tokio::test]
async fn the_oldest_has_no_pause_and_sleeps_under_a_running_scheduler() {
    let sim = of_profile(Profile::V0_11).await;
    for path in ["/pause", "/resume", "/abort_requests", "/update_weight_version"] {
        assert_eq!(control(&sim, path).await.status, 404, "{path}");
    }
    assert_eq!(get(&sim, "/kv_event_sources").await.status, 404);
    complete(&sim, 100, 40, 1).await;
    let slept = control(&sim, "/sleep?level=1").await;
    assert_eq!((slept.status, slept.body.as_str()), (200, ""));
    assert_eq!(get(&sim, "/is_sleeping").await.json(), json!({"is_sleeping": true}));
    let tokens: Vec<u32> = (100..140).collect();
    let holds = sim.holds(&tokens, None);
    assert_eq!((holds.gpu, holds.cpu), (0, 2), "a local reset, the connector left alone");
    complete(&sim, 200, 20, 1).await;
    assert_eq!(sim.counters_of(0).tokens_while_asleep, 1, "served all the same");
    let reset = control(&sim, "/reset_prefix_cache?reset_external=true").await;
    assert_eq!((reset.status, reset.body.as_str()), (200, ""));
    assert_eq!(sim.holds(&tokens, None).cpu, 2, "the argument is unknown");
    assert_eq!(metric(&sim, "vllm:engine_sleep_state", "").await, 0.0, "no such family yet");
}

#[tokio::test]
async fn pauses_of_0_19_leave_the_connector_and_wake_in_parts() {
    let sim = of_profile(Profile::V0_19).await;
    complete(&sim, 100, 40, 1).await;
    assert_eq!(control(&sim, "/pause").await.json(), json!({"status": "paused"}));
    let tokens: Vec<u32> = (100..140).collect();
    let holds = sim.holds(&tokens, None);
    assert_eq!((holds.gpu, holds.cpu), (0, 2));
    control(&sim, "/sleep?level=1").await;
    let woken = control(&sim, "/wake_up?tags=weights").await;
    assert_eq!((woken.status, woken.body.as_str()), (200, ""));
    assert_eq!(get(&sim, "/is_paused").await.json(), json!({"is_paused": false}));
    let zero = complete(&sim, 300, 20, 1).await;
    assert_eq!(zero["usage"]["prompt_tokens_details"], json!(null), "zero is left out");
    let reset = control(&sim, "/reset_prefix_cache").await;
    assert_eq!((reset.status, reset.body.as_str()), (200, ""), "it does not say what came of it");
}

#[tokio::test]
async fn the_opt_out_keeps_the_tier_or_is_refused_before_pausing() {
    let sim = of_profile(Profile::KeepTier).await;
    complete(&sim, 100, 40, 1).await;
    for path in ["/sleep?level=1&clear_connector_cache=false", "/pause?clear_connector_cache=false"]
    {
        assert_eq!(control(&sim, path).await.status, 200);
        control(&sim, "/wake_up").await;
        assert_eq!(cached(&complete(&sim, 100, 40, 1).await), &json!(32), "{path}");
    }
    for connector in [Connector::Mooncake, Connector::Multi] {
        let sim = crate::client::sim(|config| {
            config.profile = Profile::KeepTier;
            config.connector = connector;
        })
        .await;
        let refused = control(&sim, "/sleep?level=1&clear_connector_cache=false").await;
        assert_eq!(refused.status, 400);
        assert!(refused.json()["error"].as_str().unwrap().contains(connector.class_name()));
        assert_eq!(get(&sim, "/is_paused").await.json(), json!({"is_paused": false}));
    }
}

#[tokio::test]
async fn an_engine_without_the_opt_out_ignores_it_and_wipes_the_tier() {
    let sim = offloading().await;
    complete(&sim, 100, 40, 1).await;
    let slept = control(&sim, "/sleep?level=1&clear_connector_cache=false").await;
    assert_eq!(slept.json(), json!({"status": "sleeping", "level": 1}));
    control(&sim, "/wake_up").await;
    assert_eq!(cached(&complete(&sim, 100, 40, 1).await), &json!(0));
}

#[tokio::test]
async fn a_shared_store_outlives_a_restart_and_a_multi_connector_clears_both() {
    let mut sim = crate::client::sim(|config| config.connector = Connector::Multi).await;
    complete(&sim, 100, 40, 1).await;
    let tokens: Vec<u32> = (100..140).collect();
    let holds = sim.holds(&tokens, None);
    assert_eq!((holds.cpu, holds.remote), (2, 2));
    sim.restart().await.unwrap();
    let holds = sim.holds(&tokens, None);
    assert_eq!((holds.gpu, holds.cpu, holds.remote), (0, 0, 2));
    control(&sim, "/sleep?level=1").await;
    assert_eq!(sim.holds(&tokens, None).remote, 0);
}
