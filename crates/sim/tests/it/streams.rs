//! Streams against the recorded ones, and what cuts them short.

use fak_sim::Sim;
use serde_json::{Value, json};

use crate::client::*;

/// Events of a stream, with what may differ taken out. Content chunks are one a token in the
/// simulator, so a run of equal ones counts once.
fn shape(text: &str) -> Vec<String> {
    let mut shapes: Vec<String> = Vec::new();
    for event in text.split("\n\n").filter(|event| !event.is_empty()) {
        let data = event.strip_prefix("data: ").unwrap_or_else(|| panic!("no data: {event:?}"));
        let shape = match serde_json::from_str::<Value>(data) {
            Ok(mut value) => {
                free(&mut value);
                value.to_string()
            }
            Err(_) => data.to_owned(),
        };
        if shapes.last() != Some(&shape) {
            shapes.push(shape);
        }
    }
    shapes
}

fn free(value: &mut Value) {
    const FREE: [&str; 11] = [
        "id",
        "created",
        "text",
        "content",
        "system_fingerprint",
        "prompt_tokens",
        "total_tokens",
        "completion_tokens",
        "cached_tokens",
        "created_cache_tokens",
        "index",
    ];
    match value {
        Value::Object(map) => map.iter_mut().for_each(|(key, value)| {
            let is_list = matches!(key.as_str(), "token_ids" | "prompt_token_ids");
            if (FREE.contains(&key.as_str()) || is_list) && !value.is_null() {
                *value = json!("any");
            } else {
                free(value);
            }
        }),
        Value::Array(items) => items.iter_mut().for_each(free),
        _ => {}
    }
}

fn recorded(name: &str) -> Vec<String> {
    shape(&String::from_utf8(recording(&format!("sse/{name}.txt"))).unwrap())
}

async fn streamed(sim: &Sim, path: &str, mut body: Value) -> Reply {
    body["stream"] = json!(true);
    post(sim, path, &body).await
}

fn chat() -> Value {
    let messages = json!([{"role": "user", "content": "hi there"}]);
    json!({"messages": messages, "max_tokens": 3, "temperature": 0})
}

fn with(mut body: Value, key: &str, value: Value) -> Value {
    body[key] = value;
    body
}

#[tokio::test]
async fn streams_are_the_recorded_ones() {
    let sim = sim(|_| {}).await;
    let usage = json!({"include_usage": true});
    let continuous = json!({"include_usage": true, "continuous_usage_stats": true});
    let plain = ask(10, 40, 3);
    for (path, body, name) in [
        ("/v1/completions", plain.clone(), "completions-stream"),
        (
            "/v1/completions",
            with(plain.clone(), "stream_options", usage.clone()),
            "completions-stream-usage",
        ),
        (
            "/v1/completions",
            with(plain.clone(), "stream_options", continuous),
            "completions-stream-continuous-usage",
        ),
        (
            "/v1/completions",
            with(plain.clone(), "return_token_ids", json!(true)),
            "completions-stream-return_token_ids",
        ),
        ("/v1/chat/completions", chat(), "chat-stream"),
        (
            "/v1/chat/completions",
            with(chat(), "stream_options", usage.clone()),
            "chat-stream-usage",
        ),
        (
            "/v1/chat/completions",
            with(with(chat(), "stream_options", usage), "return_token_ids", json!(true)),
            "chat-stream-return_token_ids",
        ),
    ] {
        let reply = streamed(&sim, path, body).await;
        assert_eq!(reply.header("content-type"), Some("text/event-stream; charset=utf-8"));
        assert_eq!(shape(&reply.body), recorded(name), "{name}");
    }
}

#[tokio::test]
async fn the_head_of_a_stream_is_the_recorded_one() {
    let sim = sim(|_| {}).await;
    let reply = streamed(&sim, "/v1/completions", ask(10, 40, 2)).await;
    let recorded =
        String::from_utf8(recording("sse/completions-stream-raw-http-chunked.txt")).unwrap();
    for name in ["server", "content-type", "transfer-encoding"] {
        let line = format!("{name}: {}", reply.header(name).unwrap_or_default());
        assert!(recorded.lines().any(|recorded| recorded.trim() == line), "{line}");
    }
}

#[tokio::test]
async fn errors_before_a_stream_are_plain_json() {
    let sim = sim(|config| config.max_model_len = 1024).await;
    for (name, body) in [
        ("bad-param", with(ask(10, 5, 4), "temperature", json!(-1.0))),
        ("unknown-model", with(ask(10, 5, 4), "model", json!("nope"))),
        ("too-long", ask(10, 1025, 4)),
    ] {
        let reply = streamed(&sim, "/v1/completions", body).await;
        let theirs = recording(&format!("sse/error-before-stream-{name}.txt"));
        assert_eq!(reply.body.as_bytes(), theirs, "{name}");
        assert_eq!(reply.header("content-type"), Some("application/json"));
    }
}

#[tokio::test]
async fn a_stop_string_is_held_back_and_named() {
    let sim = sim(|_| {}).await;
    let whole = complete(&sim, 10, 20, 12).await;
    let text = whole["choices"][0]["text"].as_str().unwrap();
    let stop = &text[5..9];
    let reply =
        streamed(&sim, "/v1/completions", with(ask(10, 20, 12), "stop", json!([stop]))).await;
    let chunks: Vec<Value> = reply
        .body
        .split("\n\n")
        .filter_map(|event| serde_json::from_str(event.strip_prefix("data: ")?).ok())
        .collect();
    let texts: Vec<&str> =
        chunks.iter().map(|c| c["choices"][0]["text"].as_str().unwrap()).collect();
    assert_eq!(texts[..3], ["", "", ""]);
    let end = text.find(stop).unwrap();
    assert_eq!(texts.concat(), text[..end]);
    let last = &chunks.last().unwrap()["choices"][0];
    assert_eq!((&last["finish_reason"], &last["stop_reason"]), (&json!("stop"), &json!(stop)));
}

#[tokio::test]
async fn two_prompts_come_interleaved_by_index() {
    let sim = sim(|_| {}).await;
    let body = json!({"prompt": [[10, 11], [12, 13]], "max_tokens": 2, "temperature": 0});
    let reply = streamed(&sim, "/v1/completions", body).await;
    let recorded = String::from_utf8(recording("sse/completions-stream-two-prompts.txt")).unwrap();
    let indices = |text: &str| -> Vec<u64> {
        text.split("\n\n")
            .filter_map(|event| serde_json::from_str::<Value>(event.strip_prefix("data: ")?).ok())
            .filter_map(|chunk| chunk["choices"][0]["index"].as_u64())
            .collect()
    };
    assert_eq!(indices(&reply.body), indices(&recorded));
}

/// A stream that has run some tokens and stands still.
async fn stalled(sim: &Sim, path: &str, mut body: Value, first: &str) -> Exchange {
    sim.faults().limit_steps(Some(4));
    body["stream"] = json!(true);
    let mut exchange = begin(sim, path, &body).await;
    exchange.until(first).await;
    exchange
}

fn long(body: Value) -> Value {
    let usage = json!({"include_usage": true});
    with(with(body, "max_tokens", json!(500)), "stream_options", usage)
}

#[tokio::test]
async fn an_abort_in_flight_ends_a_stream_as_recorded() {
    for (path, body, name) in [
        ("/v1/completions", ask(10, 40, 1), "completions-stream-aborted-by-pause-abort"),
        ("/v1/chat/completions", chat(), "chat-stream-aborted-by-sleep1"),
    ] {
        let sim = sim(|config| config.enable_prompt_tokens_details = false).await;
        let mut exchange = stalled(&sim, path, long(body), "\"finish_reason\":null").await;
        let call = if name.contains("pause") { "/pause" } else { "/sleep?level=1" };
        let (done, rest) = tokio::join!(
            async {
                sim.faults().limit_steps(None);
                control(&sim, call).await
            },
            exchange.until("[DONE]")
        );
        assert_eq!(done.status, 200);
        let tail = &rest[rest.rfind("\"finish_reason\":\"abort\"").expect("an abort is told")..];
        assert!(tail.contains("\"usage\""), "{name}");
        let theirs = recorded(name);
        let chunk = theirs.iter().find(|shape| shape.contains("\"abort\"")).unwrap();
        let ours = rest.lines().find(|line| line.contains("\"abort\"")).unwrap();
        assert_eq!(&shape(&format!("{ours}\n\n"))[0], chunk, "{name}");
    }
}

#[tokio::test]
async fn an_abort_in_the_queue_leaves_a_stream_without_a_finish() {
    for (path, body, name) in [
        ("/v1/completions", ask(10, 40, 8), "completions-stream-aborted-while-queued-no-usage"),
        ("/v1/completions", long(ask(10, 40, 8)), "completions-stream-aborted-while-queued"),
        ("/v1/chat/completions", chat(), "chat-stream-aborted-while-queued"),
    ] {
        let sim = sim(|config| config.enable_prompt_tokens_details = false).await;
        control(&sim, "/pause").await;
        let mut exchange = begin(&sim, path, &with(body, "stream", json!(true))).await;
        // The head comes at once, though the request is queued.
        let head = exchange.until("\r\n\r\n").await;
        assert!(head.starts_with("HTTP/1.1 200"), "{head}");
        control(&sim, "/sleep?level=1").await;
        let rest = exchange.until("[DONE]\n\n").await;
        let events: String = rest.split("\r\n").filter(|line| line.starts_with("data: ")).collect();
        assert_eq!(shape(&events), recorded(name), "{name}");
    }
}

#[tokio::test]
async fn an_abort_of_a_unary_request_is_an_answer() {
    let sim = sim(|_| {}).await;
    control(&sim, "/pause").await;
    let exchange = begin(&sim, "/v1/completions", &ask(10, 40, 8)).await;
    in_flight(&sim, 1).await;
    let aborted = post(&sim, "/abort_requests", &json!({})).await.json();
    assert_eq!(aborted, json!({"status": "aborted", "aborted": 1}));
    let answer = exchange.reply().await.json();
    assert_eq!(answer["choices"][0]["finish_reason"], "abort");
    assert_eq!(answer["usage"]["completion_tokens"], 0);
}

#[tokio::test]
async fn a_client_that_goes_away_frees_its_slot() {
    for stream in [true, false] {
        let sim = sim(|_| {}).await;
        sim.faults().limit_steps(Some(3));
        let body = with(ask(10, 40, 500), "stream", json!(stream));
        let exchange = begin(&sim, "/v1/completions", &body).await;
        metric_becomes(&sim, "vllm:num_requests_running", 1.0).await;
        drop(exchange);
        in_flight(&sim, 0).await;
        sim.faults().limit_steps(None);
        metric_becomes(&sim, "vllm:num_requests_running", 0.0).await;
        assert_eq!(metric(&sim, "vllm:request_success_total", "").await, 0.0);
    }
}

#[tokio::test]
async fn a_dead_engine_fails_what_is_in_flight() {
    let sim = sim(|_| {}).await;
    let mut exchange =
        stalled(&sim, "/v1/completions", long(ask(10, 40, 1)), "finish_reason").await;
    sim.kill_engine();
    let rest = exchange.until("[DONE]").await;
    let recorded = recording("sse/completions-stream-error-mid-stream.txt");
    let theirs = String::from_utf8(recorded).unwrap();
    let error = theirs.lines().find(|line| line.starts_with("data: {\"error\"")).unwrap();
    assert!(rest.lines().any(|line| line == error), "{rest}");
    let (_, response) = exchange_of("completion-inflight-engine-killed");
    let reply = post(&sim, "/v1/completions", &ask(10, 5, 1)).await;
    assert_eq!((Value::from(reply.status), Value::from(reply.body)), response);
    assert_eq!(get(&sim, "/health").await.status, 503);
}

fn exchange_of(name: &str) -> ((), (Value, Value)) {
    let (_, mut response) = exchange(name);
    ((), (response["status"].take(), response["body_text"].take()))
}
