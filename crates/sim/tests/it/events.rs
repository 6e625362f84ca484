//! Published and replayed events against the recorded ones.

use fak_sim::{Profile, Sim};
use rmpv::Value as Msg;
use serde_json::json;
use zeromq::{DealerSocket, Socket, SocketRecv};

use crate::client::*;

/// Keys of a map in their order.
fn keys(event: &Msg) -> Vec<String> {
    event.as_map().unwrap().iter().map(|(key, _)| key.as_str().unwrap().to_owned()).collect()
}

/// Keys of the events in a recorded file, by event.
fn recorded_keys(name: &str) -> Vec<Vec<String>> {
    recorded_messages(name, 3)
        .iter()
        .flat_map(|frames| {
            let value = rmpv::decode::read_value(&mut frames[2].as_slice()).unwrap();
            value[1].as_array().unwrap().iter().map(keys).collect::<Vec<_>>()
        })
        .collect()
}

/// A prompt that no subscription probe uses.
async fn run(sim: &Sim, extra: serde_json::Value) {
    let mut body = ask(100, 40, 1);
    for (key, value) in extra.as_object().unwrap() {
        body[key] = value.clone();
    }
    assert_eq!(post(sim, "/v1/completions", &body).await.status, 200);
    soon(sim.at_rest()).await;
}

#[tokio::test]
async fn a_store_has_the_recorded_keys_and_the_prompts_tokens() {
    let sim = sim(|config| config.loras = vec!["sql".into()]).await;
    let mut events = Events::of(&sim).await;
    for (extra, recorded) in [
        (json!({}), "gpu-store.bin"),
        (json!({"cache_salt": "tenantA"}), "gpu-store-salted.bin"),
        (json!({"model": "sql"}), "gpu-store-lora.bin"),
    ] {
        run(&sim, extra).await;
        let batch = events.next().await;
        assert_eq!(batch.topic, b"kv@tiny");
        let value = batch.value();
        assert!(value[0].is_f64() && value.as_array().unwrap().len() == 3);
        assert_eq!(value[2], Msg::from(0));
        assert_eq!(keys(&batch.events()[0]), recorded_keys(recorded)[0], "{recorded}");
        let event = &batch.events()[0];
        let tokens: Vec<Msg> = (100..132).map(Msg::from).collect();
        assert_eq!(event["token_ids"], Msg::Array(tokens));
        assert_eq!(event["block_hashes"].as_array().unwrap().len(), 2);
    }
    run(&sim, json!({"cache_salt": "b", "session_id": "sess-1"})).await;
    let batch = events.next().await;
    let recorded = recorded_keys("gpu-store-session-id.bin");
    assert_eq!(keys(&batch.events()[0]), recorded[recorded.len() - 1]);
    assert_eq!(batch.events()[0]["session_id"].as_str(), Some("sess-1"));
}

/// vLLM queues them before the outputs of the step that filled the blocks (0.32.0, source).
#[tokio::test]
async fn the_event_of_a_requests_blocks_comes_before_its_answer() {
    let sim = sim(|_| {}).await;
    let mut events = Events::of(&sim).await;
    for first in (0..50).map(|n| 100 + n) {
        let mut body = ask(first, 40, 1);
        body["stream"] = (first % 2 == 0).into();
        let mut answer = begin(&sim, "/v1/completions", &body).await;
        tokio::select! {
            biased;
            _ = answer.until("finish_reason") => panic!("{first}: the answer came first"),
            batch = events.next() => assert_eq!(batch.shape(), ["BlockStored-G"]),
        }
        answer.reply().await;
    }
}

#[tokio::test]
async fn adapters_and_salts_are_in_the_extra_keys() {
    let sim = sim(|config| config.loras = vec!["sql".into()]).await;
    let mut events = Events::of(&sim).await;
    run(&sim, json!({"model": "sql", "cache_salt": "tenantB"})).await;
    let event = &events.next().await.events()[0];
    let texts = |list: &[&str]| Msg::Array(list.iter().map(|text| Msg::from(*text)).collect());
    let keys = Msg::Array(vec![texts(&["sql", "tenantB"]), texts(&["sql"])]);
    assert_eq!((&event["extra_keys"], &event["lora_id"]), (&keys, &Msg::from(1)));
    assert_eq!(event["lora_name"].as_str(), Some("sql"));
}

#[tokio::test]
async fn the_host_tier_follows_in_its_own_batch_with_the_recorded_keys() {
    let sim = offloading().await;
    let mut events = Events::of(&sim).await;
    // The probes' host stores may still come.
    run(&sim, json!({})).await;
    let mut batch = events.next().await;
    while batch.shape() != ["BlockStored-G"] {
        batch = events.next().await;
    }
    let gpu = batch.events()[0].clone();
    let host = events.next().await;
    assert_eq!(host.shape(), ["BlockStored-C", "BlockStored-C"]);
    let recorded = recorded_keys("offload-gpu-then-cpu-store.bin");
    assert_eq!(keys(&host.events()[0]), recorded[1]);
    for event in host.events() {
        let hash = &event["block_hashes"][0];
        assert!(gpu["block_hashes"].as_array().unwrap().contains(hash));
        assert_eq!(event["block_size"], Msg::from(0));
    }
}

#[tokio::test]
async fn a_clear_comes_with_the_next_request_as_recorded() {
    let sim = sim(|_| {}).await;
    let mut events = Events::of(&sim).await;
    control(&sim, "/reset_prefix_cache").await;
    run(&sim, json!({})).await;
    let batch = events.next().await;
    let all: Vec<_> = batch.events().iter().map(keys).collect();
    assert_eq!(all, recorded_keys("all-cleared-after-reset.bin"));
}

#[tokio::test]
async fn a_kept_tier_restores_as_recorded() {
    let sim = of_profile(Profile::KeepTier).await;
    let mut events = Events::of(&sim).await;
    run(&sim, json!({})).await;
    while events.next().await.shape() != ["BlockStored-C", "BlockStored-C"] {}
    let slept = control(&sim, "/sleep?level=1&clear_connector_cache=false").await;
    assert_eq!(slept.status, 200);
    control(&sim, "/wake_up").await;
    run(&sim, json!({})).await;
    let shapes = [events.next().await, events.next().await];
    let recorded: Vec<_> = shapes.iter().flat_map(|b| b.events()).map(|e| keys(&e)).collect();
    assert_eq!(shapes[0].shape(), ["AllBlocksCleared-"]);
    assert_eq!(recorded, recorded_keys("offload-sleep1-kept-tier-then-restore.bin"));
}

#[tokio::test]
async fn hashes_can_be_bytes() {
    let sim = sim(|config| config.byte_hashes = true).await;
    let mut events = Events::of(&sim).await;
    run(&sim, json!({})).await;
    let event = &events.next().await.events()[0];
    assert!(matches!(&event["block_hashes"][0], Msg::Binary(bytes) if bytes.len() == 32));
}

#[tokio::test]
async fn replay_answers_from_the_asked_number_and_ends_with_a_marker() {
    let sim = sim(|_| {}).await;
    for first in 0..4 {
        complete(&sim, 100 + 100 * first, 20, 1).await;
    }
    let endpoint = sim.replay_endpoint();
    for (start, first) in [(vec![], 0), (vec![2], 2), (vec![0, 0, 0, 0, 0, 0, 0, 3], 3)] {
        let messages = replayed(&endpoint, &start).await;
        let seqs: Vec<_> = messages.iter().map(|frames| seq_of(frames)).collect();
        let expected: Vec<_> = (first..4).map(Some).chain([None]).collect();
        assert_eq!(seqs, expected, "from {start:?}");
        assert!(messages.iter().all(|frames| frames.len() == 4 && frames[0].is_empty()));
    }
    let beyond = replayed(&endpoint, &[0xff; 8]).await;
    assert_eq!(beyond, recorded_messages("replay-beyond-end-dealer.bin", 4));
}

#[tokio::test]
async fn a_dealer_without_delimiter_is_ignored() {
    let sim = sim(|_| {}).await;
    complete(&sim, 100, 20, 1).await;
    let mut dealer = DealerSocket::new();
    dealer.connect(&sim.replay_endpoint()).await.unwrap();
    zeromq::SocketSend::send(&mut dealer, vec![0u8].into()).await.unwrap();
    ask_replay(&mut dealer, &[0xff; 8]).await;
    let frames = soon(dealer.recv()).await.unwrap().into_vec();
    assert_eq!(frames[2].as_ref(), [0xff; 8], "the first answer is to the second request");
}

#[tokio::test]
async fn a_restart_begins_a_new_life_on_the_same_addresses() {
    let mut sim = offloading().await;
    let (base, replay) = (sim.base_url(), sim.replay_endpoint());
    complete(&sim, 100, 40, 1).await;
    complete(&sim, 200, 40, 1).await;
    let started = metric_line(&sim, "process_start_time_seconds").await;
    sim.restart().await.unwrap();
    assert_eq!((sim.base_url(), sim.replay_endpoint()), (base, replay.clone()));
    assert_eq!(replayed(&replay, &[]).await.len(), 1, "no history");
    assert_ne!(metric_line(&sim, "process_start_time_seconds").await, started);
    let tokens: Vec<u32> = (100..140).collect();
    assert_eq!((sim.holds(&tokens, None).gpu, sim.holds(&tokens, None).cpu), (0, 0));
    complete(&sim, 100, 40, 1).await;
    assert_eq!(seq_of(&replayed(&replay, &[]).await[0]), Some(0));
}

async fn metric_line(sim: &Sim, name: &str) -> String {
    let text = get(sim, "/metrics").await.body;
    text.lines().find(|line| line.starts_with(name)).unwrap().to_owned()
}

#[tokio::test]
async fn ranks_publish_apart_and_an_idle_ranks_clear_stays_pending() {
    let sim = sim(|config| config.dp_ranks = 2).await;
    let mut second = Events::at(&sim, &sim.kv_events_endpoint_of(1).unwrap()).await;
    let header = "content-type: application/json\r\nx-data-parallel-rank: 1\r\n";
    let body = ask(100, 40, 1).to_string();
    Exchange::send(&sim, "POST", "/v1/completions", header, body.as_bytes()).await.reply().await;
    let batch = second.next().await;
    assert_eq!(batch.value()[2], Msg::from(1));
    let tokens: Vec<u32> = (100..140).collect();
    let identity = sim.identity("tiny", None);
    assert_eq!(sim.holds_of(0, &tokens, &identity).gpu, 0);
    assert_eq!(sim.holds_of(1, &tokens, &identity).gpu, 2);
    assert_eq!(control(&sim, "/reset_prefix_cache").await.json(), json!({"success": true}));
    let mut first = Events::of(&sim).await;
    Exchange::send(&sim, "POST", "/v1/completions", header, body.as_bytes()).await.reply().await;
    assert_eq!(second.next().await.shape(), ["AllBlocksCleared-", "BlockStored-G"]);
    complete_rank_0(&sim).await;
    assert_eq!(first.next().await.shape(), ["BlockStored-G"], "its clear went before");
}

async fn complete_rank_0(sim: &Sim) {
    let header = "content-type: application/json\r\nx-data-parallel-rank: 0\r\n";
    let body = ask(300, 20, 1).to_string();
    Exchange::send(sim, "POST", "/v1/completions", header, body.as_bytes()).await.reply().await;
}
