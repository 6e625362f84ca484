//! Controls and what they do to caches, requests and metrics.

use serde_json::json;

use crate::client::*;

#[tokio::test]
async fn cached_tokens_tell_device_and_connector_hits() {
    let sim = offloading().await;
    assert_eq!(cached(&complete(&sim, 100, 40, 1).await), &json!(0));
    assert_eq!(cached(&complete(&sim, 100, 40, 1).await), &json!(32));
    control(&sim, "/reset_prefix_cache").await;
    assert_eq!(cached(&complete(&sim, 100, 40, 1).await), &json!(32), "from the tier");
    assert_eq!(metric(&sim, "vllm:external_prefix_cache_hits_total", "").await, 32.0);
    assert_eq!(metric(&sim, "vllm:kv_offload_load_bytes_total", "").await, 32.0 * 1024.0);
    control(&sim, "/reset_prefix_cache?reset_external=true").await;
    assert_eq!(cached(&complete(&sim, 100, 40, 1).await), &json!(0));
}

#[tokio::test]
async fn the_oracle_foretells_what_a_request_hits() {
    let sim = offloading().await;
    let tokens: Vec<u32> = (100..148).collect();
    for path in ["/wake_up", "/reset_prefix_cache", "/sleep?level=1", "/reset_prefix_cache"] {
        complete(&sim, 100, 48, 1).await;
        control(&sim, path).await;
        control(&sim, "/wake_up").await;
        let foretold = sim.holds(&tokens, None).hit_tokens;
        assert_eq!(cached(&complete(&sim, 100, 48, 1).await), &json!(foretold), "{path}");
    }
}

#[tokio::test]
async fn truth_table_of_the_flags() {
    let cases: &[(&[&str], bool, bool, [f64; 3])] = &[
        (&[], false, false, [1.0, 0.0, 0.0]),
        (&["/pause"], true, true, [1.0, 0.0, 0.0]),
        (&["/sleep?level=0"], true, true, [0.0, 0.0, 0.0]),
        (&["/sleep"], true, true, [0.0, 1.0, 0.0]),
        (&["/sleep?level=1", "/sleep?level=2"], true, true, [0.0, 0.0, 1.0]),
        (&["/sleep?level=1", "/sleep?level=0"], true, true, [0.0, 0.0, 0.0]),
        (&["/sleep?level=1", "/wake_up?tags=weights"], true, true, [0.0, 1.0, 0.0]),
        (
            &["/sleep", "/wake_up?tags=weights", "/wake_up?tags=kv_cache"],
            false,
            false,
            [1.0, 0.0, 0.0],
        ),
        (&["/sleep", "/wake_up?tags=scheduling"], true, true, [0.0, 1.0, 0.0]),
        (&["/sleep?level=0", "/wake_up"], false, false, [1.0, 0.0, 0.0]),
        (&["/sleep", "/sleep", "/wake_up"], false, false, [1.0, 0.0, 0.0]),
        (&["/pause", "/wake_up"], false, false, [1.0, 0.0, 0.0]),
        (&["/pause", "/sleep", "/wake_up"], false, false, [1.0, 0.0, 0.0]),
        (&["/sleep", "/resume"], false, true, [0.0, 1.0, 0.0]),
    ];
    for (calls, paused, sleeping, state) in cases {
        let sim = sim(|_| {}).await;
        for call in *calls {
            assert_eq!(control(&sim, call).await.status, 200);
        }
        assert_eq!(get(&sim, "/is_paused").await.json()["is_paused"], json!(paused), "{calls:?}");
        assert_eq!(
            get(&sim, "/is_sleeping").await.json()["is_sleeping"],
            json!(sleeping),
            "{calls:?}"
        );
        for (name, value) in ["awake", "weights_offloaded", "discard_all"].iter().zip(state) {
            let label = format!("\"{name}\"");
            assert_eq!(metric(&sim, "vllm:engine_sleep_state", &label).await, *value, "{calls:?}");
        }
        assert_eq!(get(&sim, "/health").await.status, 200);
    }
}

#[tokio::test]
async fn a_queue_is_invisible_while_paused() {
    let sim = sim(|_| {}).await;
    control(&sim, "/pause").await;
    let exchange = begin(&sim, "/v1/completions", &ask(100, 40, 1)).await;
    in_flight(&sim, 1).await;
    assert_eq!(metric(&sim, "vllm:num_requests_waiting", "").await, 0.0);
    control(&sim, "/resume").await;
    assert_eq!(exchange.reply().await.status, 200);
}

#[tokio::test]
async fn wait_returns_when_what_runs_has_ended() {
    let sim = sim(|_| {}).await;
    sim.faults().limit_steps(Some(2));
    let exchange = begin(&sim, "/v1/completions", &ask(100, 40, 20)).await;
    metric_becomes(&sim, "vllm:num_requests_running", 1.0).await;
    let pause = Exchange::send(&sim, "POST", "/pause?mode=wait", "", b"").await;
    soon(async { while get(&sim, "/is_paused").await.json()["is_paused"] == json!(false) {} })
        .await;
    sim.faults().limit_steps(None);
    let answer = exchange.reply().await.json();
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    assert_eq!(pause.reply().await.body, r#"{"status":"paused"}"#);
}

#[tokio::test]
async fn keep_stalls_and_goes_on_to_the_same_text() {
    let plain = complete(&sim(|_| {}).await, 100, 40, 20).await;
    let sim = sim(|_| {}).await;
    sim.faults().limit_steps(Some(3));
    let exchange = begin(&sim, "/v1/completions", &ask(100, 40, 20)).await;
    metric_becomes(&sim, "vllm:num_requests_running", 1.0).await;
    assert_eq!(control(&sim, "/pause?mode=keep").await.status, 200);
    sim.faults().limit_steps(None);
    control(&sim, "/resume").await;
    let answer = exchange.reply().await.json();
    assert_eq!(answer["choices"][0]["text"], plain["choices"][0]["text"]);
    assert_eq!(metric(&sim, "vllm:num_preemptions_total", "").await, 1.0);
}

#[tokio::test]
async fn a_busy_reset_fails_and_a_forced_one_does_not() {
    let sim = sim(|_| {}).await;
    sim.faults().limit_steps(Some(2));
    let exchange = begin(&sim, "/v1/completions", &ask(100, 40, 20)).await;
    metric_becomes(&sim, "vllm:num_requests_running", 1.0).await;
    assert_eq!(control(&sim, "/reset_prefix_cache").await.json(), json!({"success": false}));
    let forced = control(&sim, "/reset_prefix_cache?reset_running_requests=true").await;
    assert_eq!(forced.json(), json!({"success": true}));
    sim.faults().limit_steps(None);
    assert_eq!(exchange.reply().await.status, 200);
}

#[tokio::test]
async fn weights_change_with_a_reload_and_not_with_their_label() {
    let mut sim = sim(|_| {}).await;
    let text = |answer: serde_json::Value| answer["choices"][0]["text"].clone();
    let old = text(complete(&sim, 100, 40, 8).await);
    post(&sim, "/update_weight_version", &json!({"new_version": "v7"})).await;
    assert_eq!(text(complete(&sim, 100, 40, 8).await), old);
    sim.set_checkpoint(7);
    let reload = post(&sim, "/collective_rpc", &json!({"method": "reload_weights"})).await;
    assert_eq!(reload.json(), json!({"results": [null]}));
    assert_ne!(text(complete(&sim, 100, 40, 8).await), old);
    let tokens: Vec<u32> = (100..140).collect();
    assert_eq!(sim.holds(&tokens, None).stale, 2, "a reload clears nothing");
    sim.restart().await.unwrap();
    assert_eq!(get(&sim, "/weight_info").await.json(), json!({"weight_version": "default"}));
}

#[tokio::test]
async fn abort_requests_takes_the_inner_ids() {
    for (path, id, body) in [
        ("/v1/completions", "cmpl-r1-0", ask(100, 40, 50)),
        (
            "/v1/chat/completions",
            "chatcmpl-r1",
            json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 50}),
        ),
    ] {
        let sim = sim(|_| {}).await;
        sim.faults().limit_steps(Some(2));
        let header = "content-type: application/json\r\nx-request-id: r1\r\n";
        let body = body.to_string();
        let exchange = Exchange::send(&sim, "POST", path, header, body.as_bytes()).await;
        metric_becomes(&sim, "vllm:num_requests_running", 1.0).await;
        let aborted = post(&sim, "/abort_requests", &json!({"request_ids": [id]})).await;
        assert_eq!(aborted.json()["aborted"], 1);
        let answer = exchange.reply().await.json();
        assert_eq!(answer["choices"][0]["finish_reason"], "abort", "{id}");
        let counted = metric(&sim, "vllm:request_success_total", "").await;
        assert_eq!(counted, 0.0, "only the engine's own aborts are counted");
    }
}
