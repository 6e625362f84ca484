//! Recorded exchanges are sent again, and the answers compared.

use fak_sim::{Connector, Sim, SimConfig};
use serde_json::{Map, Value, json};

use crate::client::*;

/// Sends a recorded request as it was.
async fn replay(sim: &Sim, request: &Value) -> Reply {
    let mut headers = String::new();
    let mut has_kind = false;
    for (key, value) in request["headers"].as_object().unwrap_or(&Map::new()) {
        has_kind |= key.eq_ignore_ascii_case("content-type");
        headers.push_str(&format!("{key}: {}\r\n", value.as_str().unwrap()));
    }
    let body = match &request["body"] {
        Value::Null => Vec::new(),
        Value::String(text) => text.clone().into_bytes(),
        value => value.to_string().into_bytes(),
    };
    if !has_kind && !body.is_empty() {
        headers.push_str("content-type: application/json\r\n");
    }
    let method = request["method"].as_str().unwrap();
    let path = request["path"].as_str().unwrap();
    Exchange::send(sim, method, path, &headers, &body).await.reply().await
}

/// What may differ: ids, times, the model's texts, and counts that depend on the tokenizer.
fn normal(value: &mut Value) {
    const FREE: [&str; 12] = [
        "id",
        "created",
        "text",
        "content",
        "system_fingerprint",
        "prompt_tokens",
        "total_tokens",
        "completion_tokens",
        "count",
        "tokens",
        "prompt_token_ids",
        "token_ids",
    ];
    match value {
        Value::Object(map) => {
            for (key, value) in map.iter_mut() {
                if FREE.contains(&key.as_str()) && !value.is_null() {
                    *value = json!("any");
                } else {
                    normal(value);
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(normal),
        _ => {}
    }
}

async fn rig() -> Sim {
    sim(|config| {
        *config = SimConfig { enable_prompt_tokens_details: false, ..SimConfig::default() };
    })
    .await
}

async fn compare(sim: &Sim, name: &str) {
    let (request, response) = exchange(name);
    let reply = replay(sim, &request).await;
    assert_eq!(Value::from(reply.status), response["status"], "{name}: {}", reply.body);
    let recorded = response["body_text"].as_str().unwrap();
    let kind = |headers: &Value| {
        let list = headers.as_array().unwrap().clone();
        list.into_iter().find(|pair| pair[0] == "content-type").map(|pair| pair[1].clone())
    };
    assert_eq!(
        reply.header("content-type").map(Value::from),
        kind(&response["headers"]),
        "{name}: content type"
    );
    if recorded.is_empty() {
        assert_eq!(reply.body, "", "{name}");
        return;
    }
    let (mut ours, mut theirs) = (reply.json(), serde_json::from_str(recorded).unwrap());
    normal(&mut ours);
    normal(&mut theirs);
    // Compared as text, so that the order of keys counts.
    assert_eq!(ours.to_string(), Value::to_string(&theirs), "{name}");
}

#[tokio::test]
async fn errors_are_the_recorded_ones() {
    let sim = rig().await;
    for name in [
        "err-bad-json",
        "err-bad-n",
        "err-bad-temperature",
        "err-bad-temperature-type",
        "err-bad-top_p",
        "err-cache_salt-empty",
        "err-cache_salt-type",
        "err-chat-bad-role",
        "err-chat-empty-messages",
        "err-chat-no-messages",
        "err-dp-rank-out-of-range",
        "err-empty-body",
        "err-empty-prompt",
        "err-get-405",
        "err-max-tokens-too-large",
        "err-missing-prompt",
        "err-prompt-too-long",
        "err-stream_options-without-stream",
        "err-token-out-of-vocab",
        "err-unknown-model",
        "err-wrong-content-type",
        "completion-max_tokens-0",
        "tokenize-bad",
        "tokenize-unknown-model",
        "detokenize-bad",
        "pause-bad-mode",
        "sleep-bad-level",
        "sleep-get-405",
        "reset_prefix_cache-bad-bool",
        "collective_rpc-bad-json",
        "collective_rpc-missing-method",
        "collective_rpc-unknown-method",
        "abort_requests-no-body",
        "update_weight_version-missing",
        "update_weights-missing",
        "start_weight_update",
        "finish_weight_update",
        "not-found-404",
        "release_kv_cache_memory-not-paused-500",
        "absent_start_profile",
        "absent_v1_completions_render",
        "absent_inference_v1_generate",
    ] {
        compare(&sim, name).await;
    }
}

#[tokio::test]
async fn answers_are_the_recorded_ones() {
    let sim = rig().await;
    for name in [
        "completion",
        "completion-cache_salt",
        "completion-n2",
        "completion-request-id",
        "completion-token-prompt-return_token_ids",
        "completion-two-prompts",
        "completion-two-token-prompts",
        "chat",
        "chat-return_token_ids",
        "err-dp-rank-nonint",
        "err-kv_transfer_params-no-connector",
        "err-priority-fcfs",
        "ok-dp-rank-0",
        "ok-unknown-body-field",
        "models",
        "health",
        "ping",
        "version",
        "load",
        "is_scaling_elastic_ep",
        "tokenize-completion",
        "tokenize-chat",
        "get_world_size",
        "get_world_size-nodp",
        "weight_info",
        "update_weight_version",
        "weight_info-after",
        "is_paused-false",
        "is_sleeping-false",
        "abort_requests-empty",
        "abort_requests-unknown-id",
        "reset_mm_cache",
        "reset_encoder_cache",
        "collective_rpc",
        "reset_prefix_cache",
        "reset_prefix_cache-external",
    ] {
        compare(&sim, name).await;
    }
}

#[tokio::test]
async fn request_ids_are_taken_over() {
    let sim = rig().await;
    let (request, response) = exchange("completion-request-id");
    let recorded: Value = serde_json::from_str(response["body_text"].as_str().unwrap()).unwrap();
    assert_eq!(replay(&sim, &request).await.json()["id"], recorded["id"]);
}

#[tokio::test]
async fn pausing_and_sleeping_answer_as_recorded_in_order() {
    let sim = rig().await;
    for name in [
        "pause-default",
        "is_paused-true",
        "is_sleeping-while-paused",
        "resume",
        "pause-keep",
        "resume",
        "pause-unknown-query-param",
        "wake_up-not-asleep",
        "sleep-level1",
        "is_sleeping-true",
        "is_paused-while-sleeping",
        "wake_up-partial",
        "is_sleeping-true",
        "wake_up",
        "is_sleeping-false",
        "sleep-level1-unknown-query-param",
        "wake_up-two-tags",
        "sleep-level2",
        "wake_up",
        "sleep-level0",
        "wake_up-scheduling",
    ] {
        compare(&sim, name).await;
    }
}

#[tokio::test]
async fn control_routes_need_the_development_mode() {
    let sim = sim(|config| config.dev_mode = false).await;
    let (_, response) = exchange("sleep-dev-mode-off-404");
    for path in ["/sleep", "/pause", "/reset_prefix_cache", "/collective_rpc"] {
        let reply = control(&sim, path).await;
        assert_eq!(Value::from(reply.status), response["status"]);
        assert_eq!(Value::from(reply.body), response["body_text"]);
    }
    assert_eq!(get(&sim, "/kv_event_sources").await.status, 200);
}

#[tokio::test]
async fn a_wrong_method_names_the_right_one() {
    let sim = rig().await;
    let reply = get(&sim, "/sleep").await;
    assert_eq!((reply.status, reply.header("allow")), (405, Some("POST")));
}

#[tokio::test]
async fn the_api_key_guards_inference_only() {
    let sim = sim(|config| config.api_key = Some("secret".into())).await;
    let reply = get(&sim, "/v1/models").await;
    assert_eq!((reply.status, reply.body.as_str()), (401, r#"{"error":"Unauthorized"}"#));
    let header = "authorization: Bearer secret\r\n";
    let reply = Exchange::send(&sim, "GET", "/v1/models", header, b"").await.reply().await;
    assert_eq!(reply.status, 200);
    assert_eq!(get(&sim, "/health").await.status, 200);
}

#[tokio::test]
async fn the_schema_tells_the_opt_out_only_where_it_exists() {
    let names = |document: Value| -> Vec<String> {
        let parameters = document["paths"]["/sleep"]["post"]["parameters"].clone();
        let list = parameters.as_array().cloned().unwrap_or_default();
        list.iter().map(|p| p["name"].as_str().unwrap().to_owned()).collect()
    };
    let stock = get(&rig().await, "/openapi.json").await.json();
    assert_eq!(names(stock), ["level", "mode"]);
    let kept = of_profile(fak_sim::Profile::KeepTier).await;
    let document = get(&kept, "/openapi.json").await.json();
    assert_eq!(names(document), ["level", "mode", "clear_connector_cache"]);
}

#[tokio::test]
async fn event_sources_are_told_per_rank() {
    let sim = sim(|config| config.dp_ranks = 2).await;
    let (_, response) = exchange("kv_event_sources-dp2");
    let recorded: Value = serde_json::from_str(response["body_text"].as_str().unwrap()).unwrap();
    let told = get(&sim, "/kv_event_sources").await.json();
    let keys = |value: &Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    assert_eq!(keys(&told), keys(&recorded));
    assert_eq!(keys(&told["1"]), keys(&recorded["1"]));
    let port = sim.kv_events_endpoint_of(1).unwrap();
    let port = port.rsplit(':').next().unwrap().to_owned();
    assert_eq!(told["1"]["endpoint"], format!("tcp://*:{port}"));
}

#[tokio::test]
async fn metric_families_are_the_recorded_ones() {
    let sim = sim(|config| config.connector = Connector::Offloading).await;
    complete(&sim, 10, 40, 3).await;
    control(&sim, "/sleep?level=1").await;
    control(&sim, "/wake_up").await;
    let text = get(&sim, "/metrics").await.body;
    let recorded = String::from_utf8(recording("metrics/with-offload.prom")).unwrap();
    let types = |text: &str| -> Vec<String> {
        text.lines().filter(|line| line.starts_with("# TYPE vllm:")).map(str::to_owned).collect()
    };
    let theirs = types(&recorded);
    let ours = types(&text);
    assert!(ours.len() > 60, "{} families", ours.len());
    assert!(ours.iter().all(|line| theirs.contains(line)), "no family is made up");
    let series = |text: &str, name: &str| -> Vec<String> {
        let labels = |line: &str| line.split("} ").next().map(|l| l.replace("\"wake\"", "\"\""));
        text.lines().filter(|l| l.starts_with(name)).filter_map(labels).collect()
    };
    for name in [
        "vllm:request_success_total",
        "vllm:engine_sleep_state",
        "vllm:time_to_first_token_seconds",
        "vllm:inter_token_latency_seconds",
        "vllm:prompt_tokens_by_source_total",
        "vllm:prompt_tokens_cached_by_source_total",
        "vllm:kv_offload_total_bytes_total",
        "vllm:num_requests_waiting_by_reason",
        "vllm:e2e_request_latency_seconds",
    ] {
        assert_eq!(series(&text, name), series(&recorded, name), "{name}");
    }
    assert_eq!(metric(&sim, "vllm:generation_tokens_total", "").await, 3.0);
    assert_eq!(metric(&sim, "vllm:prefix_cache_queries_total", "").await, 40.0);
    assert_eq!(metric(&sim, "vllm:request_success_total", "length").await, 1.0);
    assert!(text.contains("\nprocess_start_time_seconds 1."), "the start of the process");
}
