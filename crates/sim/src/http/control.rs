//! The development routes: pause, sleep, wake, reset, aborts, weights.
//! Invariant: a refused call has changed nothing; a call reaches every rank.

use std::sync::Arc;

use futures_util::future::join_all;
use http::{Method, StatusCode};
use serde_json::{Map, Value, json};

use super::fields::{
    Fields, invalid, json_object, missing, python_json_error, query, query_flag, quoted,
};
use super::{Answer, ApiError, Call, empty, json_answer, ok};
use crate::core::connector::Connector;
use crate::core::control::{Failure, PauseAsk, PauseMode};
use crate::life::Life;

const ROUTES: [(&str, Method); 22] = [
    ("/pause", Method::POST),
    ("/resume", Method::POST),
    ("/is_paused", Method::GET),
    ("/sleep", Method::POST),
    ("/wake_up", Method::POST),
    ("/is_sleeping", Method::GET),
    ("/release_kv_cache_memory", Method::POST),
    ("/reset_prefix_cache", Method::POST),
    ("/reset_mm_cache", Method::POST),
    ("/reset_encoder_cache", Method::POST),
    ("/collective_rpc", Method::POST),
    ("/abort_requests", Method::POST),
    ("/server_info", Method::GET),
    ("/weight_info", Method::GET),
    ("/update_weight_version", Method::POST),
    ("/get_world_size", Method::GET),
    ("/init_weight_transfer_engine", Method::POST),
    ("/update_weights", Method::POST),
    ("/start_weight_update", Method::POST),
    ("/finish_weight_update", Method::POST),
    ("/start_draft_weight_update", Method::POST),
    ("/shutdown_weight_transfer_engine", Method::POST),
];

pub(super) fn is_route(path: &str) -> bool {
    ROUTES.iter().any(|(route, _)| *route == path)
}

/// The method of a control route that this server has: none without the development mode.
pub(super) fn method_of(life: &Life, path: &str) -> Option<Method> {
    let (_, method) = ROUTES.iter().find(|(route, _)| *route == path)?;
    let traits = life.traits;
    let exists = match path {
        "/pause" | "/resume" | "/is_paused" => traits.has_pause,
        "/abort_requests" => traits.has_abort_requests,
        "/weight_info" | "/update_weight_version" => traits.has_weight_info,
        "/release_kv_cache_memory" | "/shutdown_weight_transfer_engine" => {
            traits.has_kv_event_sources
        }
        "/sleep"
        | "/wake_up"
        | "/is_sleeping"
        | "/reset_prefix_cache"
        | "/reset_mm_cache"
        | "/collective_rpc"
        | "/server_info" => true,
        _ => traits.has_pause,
    };
    (life.config.dev_mode && exists).then(|| method.clone())
}

pub(super) async fn call(life: &Arc<Life>, call: &Call) -> Result<Answer, ApiError> {
    match call.path.as_str() {
        "/pause" => pause(life, call).await,
        "/sleep" => sleep(life, call).await,
        "/resume" => {
            life.change_all(|engine| engine.resume());
            Ok(ok(&json!({"status": "resumed"})))
        }
        "/is_paused" => Ok(ok(&json!({"is_paused": life.is_every(|engine| engine.is_paused())?}))),
        "/is_sleeping" => {
            let truth = life.is_every(|engine| engine.is_sleeping())?;
            Ok(ok(&json!({"is_sleeping": life.faults.sleeping_lie().unwrap_or(truth)})))
        }
        "/wake_up" => Ok(wake(life, call)),
        "/release_kv_cache_memory" => release(life),
        "/reset_prefix_cache" => reset(life, call),
        "/reset_mm_cache" | "/reset_encoder_cache" => Ok(empty(StatusCode::OK)),
        "/collective_rpc" => collective_rpc(life, call),
        "/abort_requests" => abort(life, call),
        "/server_info" => Ok(ok(&server_info(life, call))),
        "/get_world_size" => world_size(life, call),
        _ => weights(life, call),
    }
}

fn mode(call: &Call) -> Result<PauseMode, ApiError> {
    match query(call, "mode") {
        None | Some("abort") => Ok(PauseMode::Abort),
        Some("wait") => Ok(PauseMode::Wait),
        Some("keep") => Ok(PauseMode::Keep),
        Some(other) => {
            let msg = "Input should be 'abort', 'wait' or 'keep'";
            let context = ", 'ctx': {'expected': \"'abort', 'wait' or 'keep'\"}";
            Err(invalid("literal_error", "query.mode", msg, &quoted(other), context))
        }
    }
}

async fn pause_all(life: &Life, ask: PauseAsk) -> Result<(), Failure> {
    let results = join_all(life.ranks.iter().map(|rank| rank.pause(ask))).await;
    results.into_iter().collect()
}

/// The opt-out, where the profile has it: anywhere else the argument is unknown and ignored.
/// The refusal comes before anything is paused.
fn keep_connector(
    life: &Life,
    call: &Call,
    utility: &str,
) -> Result<Result<bool, Answer>, ApiError> {
    if !life.traits.keep_tier || query_flag(call, "clear_connector_cache", true)? {
        return Ok(Ok(false));
    }
    let connector = life.config.connector;
    if connector.can_keep_tier() {
        return Ok(Ok(true));
    }
    let message = format!(
        "Call to {utility} method failed: {} cannot keep its cache across a pause. \
         Drop clear_connector_cache=False.",
        connector.class_name()
    );
    Ok(Err(json_answer(StatusCode::BAD_REQUEST, &json!({"error": message}))))
}

async fn pause(life: &Life, call: &Call) -> Result<Answer, ApiError> {
    let mode = mode(call)?;
    let clear_cache = query_flag(call, "clear_cache", true)?;
    let keep_connector = match keep_connector(life, call, "pause_scheduler")? {
        Ok(keep) => keep,
        Err(refusal) => return Ok(refusal),
    };
    let ask = PauseAsk { mode, clear_cache, keep_connector, sleep_level: None };
    Ok(match pause_all(life, ask).await {
        Ok(()) => ok(&json!({"status": "paused"})),
        Err(failure) => {
            let call = format!("Call to pause_scheduler method failed: {failure}");
            let error = json!({"error": format!("Failed to pause generation: {call}")});
            json_answer(StatusCode::INTERNAL_SERVER_ERROR, &error)
        }
    })
}

/// The level of a sleep. Old engines parse it raw and fail on nonsense.
fn level(life: &Life, call: &Call) -> Result<u8, ApiError> {
    let Some(text) = query(call, "level") else { return Ok(1) };
    let parsed: Option<i64> = text.trim().parse().ok();
    if !life.traits.control_bodies {
        let level = parsed.and_then(|level| u8::try_from(level).ok());
        return level.ok_or_else(|| ApiError::internal("Internal Server Error"));
    }
    let Some(level) = parsed else {
        let msg = "Input should be a valid integer, unable to parse string as an integer";
        return Err(invalid("int_parsing", "query.level", msg, &quoted(text), ""));
    };
    match u8::try_from(level) {
        Ok(level) if level <= 2 => Ok(level),
        Ok(_) => {
            let msg = "Input should be less than or equal to 2";
            Err(invalid("less_than_equal", "query.level", msg, &quoted(text), ", 'ctx': {'le': 2}"))
        }
        Err(_) if level < 0 => {
            let msg = "Input should be greater than or equal to 0";
            let context = ", 'ctx': {'ge': 0}";
            Err(invalid("greater_than_equal", "query.level", msg, &quoted(text), context))
        }
        Err(_) => {
            let msg = "Input should be less than or equal to 2";
            Err(invalid("less_than_equal", "query.level", msg, &quoted(text), ", 'ctx': {'le': 2}"))
        }
    }
}

async fn sleep(life: &Life, call: &Call) -> Result<Answer, ApiError> {
    let level = level(life, call)?;
    let _operation = life.operation("sleep");
    if life.traits.sleep_pauses {
        let mode = mode(call)?;
        let keep_connector = match keep_connector(life, call, "sleep")? {
            Ok(keep) => keep,
            Err(refusal) => return Ok(refusal),
        };
        let sleep_level = (level >= 1).then_some(level);
        let ask = PauseAsk { mode, clear_cache: level >= 1, keep_connector, sleep_level };
        pause_all(life, ask).await.map_err(|failure| failed("sleep", &failure))?;
    } else {
        // The executor sleeps under a running scheduler, after a local reset.
        life.change_all(|engine| {
            let _ = engine.reset_prefix_cache(false, false);
            engine.sleep_memory(level);
        });
    }
    life.record_sleep(Some(level));
    if !life.traits.control_bodies {
        return Ok(empty(StatusCode::OK));
    }
    Ok(ok(&json!({"status": "sleeping", "level": level})))
}

fn failed(utility: &str, failure: &Failure) -> ApiError {
    ApiError::internal(format!("Call to {utility} method failed: {failure}"))
}

fn wake(life: &Life, call: &Call) -> Answer {
    let _operation = life.operation("wake");
    let tags: Vec<String> = call
        .query
        .iter()
        .filter(|(key, _)| key == "tags")
        .map(|(_, value)| value.clone())
        .collect();
    let tags = (!tags.is_empty()).then_some(tags);
    let woken = match &tags {
        None if life.faults.take_partial_wake() => Some(vec!["weights".to_owned()]),
        tags => tags.clone(),
    };
    let awake = life.change_all(|engine| engine.wake(woken.as_deref())).into_iter().all(|x| x);
    if awake || !life.traits.partial_wake_keeps_paused {
        life.record_sleep(None);
    }
    if !life.traits.control_bodies {
        return empty(StatusCode::OK);
    }
    let status = if awake { "awake" } else { "sleeping" };
    ok(&json!({"status": status, "tags": tags}))
}

/// As on a GPU. On the CPU platform the call ends with 500 after it has put the memory to sleep
/// (ENGINE.md, trap 35); a route fault gives that.
fn release(life: &Life) -> Result<Answer, ApiError> {
    let _operation = life.operation("release_kv_cache_memory");
    let results = life.change_all(|engine| engine.release_kv_cache());
    results
        .into_iter()
        .collect::<Result<(), Failure>>()
        .map_err(|failure| failed("release_kv_cache_memory", &failure))?;
    life.record_sleep(Some(0));
    Ok(ok(&json!({"status": "kv_cache_released"})))
}

fn reset(life: &Life, call: &Call) -> Result<Answer, ApiError> {
    let options = life.traits.reset_options;
    let running = options && query_flag(call, "reset_running_requests", false)?;
    let external = options && query_flag(call, "reset_external", false)?;
    let results = life.change_all(|engine| engine.reset_prefix_cache(running, external));
    let mut success = true;
    for result in results {
        success &= result.map_err(|failure| failed("reset_prefix_cache", &failure))?;
    }
    if !life.traits.reset_body {
        return Ok(empty(StatusCode::OK));
    }
    Ok(ok(&json!({"success": success})))
}

fn collective_rpc(life: &Life, call: &Call) -> Result<Answer, ApiError> {
    let bad = |message: String| ApiError::new(StatusCode::BAD_REQUEST, "Bad Request", message);
    let body: Map<String, Value> = serde_json::from_slice(&call.body).map_err(|_| {
        let (offset, fault) = python_json_error(&call.body);
        let before = call.body.get(..offset).unwrap_or_default();
        let line = before.iter().filter(|byte| **byte == b'\n').count() + 1;
        let column =
            offset - before.iter().rposition(|byte| *byte == b'\n').map_or(0, |i| i + 1) + 1;
        bad(format!("JSON decode error: {fault}: line {line} column {column} (char {offset})"))
    })?;
    let Some(method) = body.get("method").and_then(Value::as_str) else {
        return Err(bad("Missing 'method' in request body".to_owned()));
    };
    match method {
        "reload_weights" => {
            life.change_all(|engine| engine.reload_weights());
        }
        "get_kv_connector_handshake_metadata" => {}
        unknown => {
            return Err(ApiError::internal(format!(
                "Call to collective_rpc method failed: Worker failed with error ''CPUWorker' \
                 object has no attribute '{unknown}'', please check the stack trace above for the \
                 root cause"
            )));
        }
    }
    Ok(ok(&json!({"results": vec![Value::Null; life.ranks.len()]})))
}

fn abort(life: &Life, call: &Call) -> Result<Answer, ApiError> {
    let bad = |message| ApiError::new(StatusCode::BAD_REQUEST, "Bad Request", message);
    let body: Value = serde_json::from_slice(&call.body).map_err(|_| bad("Invalid JSON format"))?;
    let Value::Object(body) = body else { return Err(bad("Request body must be a JSON object")) };
    let ids = Fields(&body).texts("request_ids")?;
    let aborted = if ids.is_empty() {
        let count = life.ranks.iter().map(|rank| rank.load()).sum();
        life.ranks.iter().for_each(|rank| rank.abort(None));
        count
    } else {
        life.ranks.iter().for_each(|rank| rank.abort(Some(&ids)));
        ids.len()
    };
    Ok(ok(&json!({"status": "aborted", "aborted": aborted})))
}

fn world_size(life: &Life, call: &Call) -> Result<Answer, ApiError> {
    let with_ranks = query_flag(call, "include_dp", true)?;
    let size = if with_ranks { life.ranks.len() } else { 1 };
    Ok(ok(&json!({"world_size": size})))
}

fn weights(life: &Life, call: &Call) -> Result<Answer, ApiError> {
    let field = |name: &str| -> Result<Value, ApiError> {
        let body = json_object(call)?;
        body.get(name).cloned().ok_or_else(|| missing(&format!("body.{name}"), "'None'"))
    };
    match call.path.as_str() {
        "/weight_info" => Ok(ok(&json!({"weight_version": life.weight_version()}))),
        "/update_weight_version" => {
            let version = field("new_version")?;
            let Some(text) = version.as_str() else {
                let msg = "Input should be a valid string";
                let input = super::fields::echoed(&version);
                return Err(invalid("string_type", "body.new_version", msg, &input, ""));
            };
            life.set_weight_version(text);
            Ok(ok(&json!({"success": true, "new_version": text})))
        }
        path => {
            let needed = match path {
                "/init_weight_transfer_engine" => Some("init_info"),
                "/update_weights" => Some("update_info"),
                _ => None,
            };
            if let Some(needed) = needed {
                field(needed)?;
            }
            Err(ApiError::internal(
                "Call to collective_rpc method failed: Worker failed with error 'Weight transfer \
                 not configured. Please set weight_transfer_config to enable weight transfer.', \
                 please check the stack trace above for the root cause",
            ))
        }
    }
}

/// The configuration: a text, or with `config_format=json` an object; of that the parts that say
/// what the caches are.
fn server_info(life: &Life, call: &Call) -> Value {
    let config = &life.config;
    let as_json = query(call, "config_format") == Some("json");
    let vllm_config = if as_json {
        json!({
            "cache_config": {"block_size": config.block_size, "enable_prefix_caching": true},
            "parallel_config": {"data_parallel_size": life.ranks.len()},
            "kv_transfer_config": kv_transfer_config(config.connector),
        })
    } else {
        let (model, ranks) = (&config.model, life.ranks.len());
        json!(format!(
            "model='{model}', max_seq_len={}, data_parallel_size={ranks}, \
             enable_prefix_caching=True",
            config.max_model_len
        ))
    };
    json!({"vllm_config": vllm_config, "vllm_env": {}, "system_env": {}})
}

fn kv_transfer_config(connector: Connector) -> Value {
    let one = |connector: Connector| json!({"kv_connector": connector.class_name()});
    match connector {
        Connector::None => Value::Null,
        Connector::Offloading | Connector::Mooncake => one(connector),
        Connector::Multi => json!({
            "kv_connector": connector.class_name(),
            "kv_connector_extra_config": {
                "connectors": [one(Connector::Offloading), one(Connector::Mooncake)],
            },
        }),
    }
}
