//! Routes that only tell: models, tokens, health, version, metrics, event sources, schema.

use http::StatusCode;
use serde_json::{Map, Value, json};

use super::chat::{messages, render};
use super::fields::{Fields, complaint, echoed, invalid, invalid_all, json_object, missing};
use super::generate::check_model;
use super::{Answer, ApiError, Call, empty, ok, with_body};
use crate::life::Life;
use crate::tokenizer;

/// Excerpts of the real documents, recorded: the control routes and their parameters.
const OPENAPI: &str =
    include_str!("../../../../fixtures/vllm-0.32/http/openapi-control-routes.json");
const OPENAPI_KEEP_TIER: &str =
    include_str!("../../../../fixtures/vllm-0.32/http/openapi-control-routes-with-opt-out.json");

/// The properties of the two generating requests with their types; nested schemas and texts are
/// left out.
const OPENAPI_REQUESTS: &str =
    include_str!("../../../../fixtures/vllm-0.32/http/openapi-request-schemas.json");

pub(super) fn call(life: &Life, call: &Call) -> Result<Answer, ApiError> {
    match call.path.as_str() {
        "/v1/models" => Ok(ok(&models(life))),
        "/tokenize" => tokenize(life, call),
        "/detokenize" => detokenize(life, call),
        "/health" | "/ping" => {
            let sick = life.is_dead() || life.faults.is_unhealthy();
            Ok(empty(if sick { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::OK }))
        }
        "/version" => Ok(ok(&json!({"version": life.traits.version}))),
        // Not tracked unless the server is told to.
        "/load" => Ok(ok(&json!({"server_load": 0}))),
        "/metrics" => {
            let kind = "text/plain; version=1.0.0; charset=utf-8";
            Ok(with_body(StatusCode::OK, kind, crate::metrics::render(life)))
        }
        "/kv_event_sources" => Ok(ok(&life.event_sources())),
        "/openapi.json" => Ok(ok(&openapi(life))),
        "/is_scaling_elastic_ep" => Ok(ok(&json!({"is_scaling_elastic_ep": false}))),
        _ => Err(ApiError::new(
            StatusCode::FORBIDDEN,
            "PermissionDeniedError",
            "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to \
             enable them.",
        )),
    }
}

fn models(life: &Life) -> Value {
    let config = &life.config;
    let card = |name: &str, parent: Option<&str>| {
        // Every name of the model is a card of the one checkpoint.
        let checkpoint = if parent.is_some() { name } else { &config.model };
        json!({
            "id": name,
            "object": "model",
            "created": life.started_seconds(),
            "owned_by": "vllm",
            "root": format!("/models/{checkpoint}"),
            "parent": parent,
            "max_model_len": parent.is_none().then_some(config.max_model_len),
            "permission": [{
                "id": format!("modelperm-{}", life.fresh_id()),
                "object": "model_permission",
                "created": life.started_seconds(),
                "allow_create_engine": false,
                "allow_sampling": true,
                "allow_logprobs": true,
                "allow_search_indices": false,
                "allow_view": true,
                "allow_fine_tuning": false,
                "organization": "*",
                "group": null,
                "is_blocking": false,
            }],
        })
    };
    let base = config.names().map(|name| card(name, None));
    let adapters = config.loras.iter().map(|name| card(name, Some(&config.model)));
    json!({"object": "list", "data": base.chain(adapters).collect::<Vec<_>>()})
}

fn tokenize(life: &Life, call: &Call) -> Result<Answer, ApiError> {
    let body = json_object(call)?;
    let fields = Fields(&body);
    let with_texts = fields.flag("return_token_strs")?;
    let text = if body.contains_key("messages") {
        let add = body.get("add_generation_prompt").and_then(Value::as_bool).unwrap_or(true);
        render(&messages(&body)?, add)
    } else {
        fields.text("prompt")?.ok_or_else(|| no_prompt(&body))?
    };
    if let Some(model) = fields.text("model")? {
        check_model(life, &model)?;
    }
    let tokens = tokenizer::encode(&text);
    let texts: Option<Vec<String>> =
        with_texts.then(|| tokens.iter().map(|token| tokenizer::decode(&[*token], true)).collect());
    Ok(ok(&json!({
        "count": tokens.len(),
        "max_model_len": life.config.max_model_len,
        "tokens": tokens,
        "token_strs": texts,
    })))
}

fn no_prompt(body: &Map<String, Value>) -> ApiError {
    let input = format!("'<dict of {} items>'", body.len());
    let entry = |loc: &str| complaint("missing", loc, "Field required", &input, "");
    invalid_all(&[entry("body.prompt"), entry("body.messages")], "body.prompt")
}

fn detokenize(life: &Life, call: &Call) -> Result<Answer, ApiError> {
    let body = json_object(call)?;
    if let Some(model) = Fields(&body).text("model")? {
        check_model(life, &model)?;
    }
    let value = body.get("tokens").unwrap_or(&Value::Null);
    let Some(items) = value.as_array() else {
        if value.is_null() {
            return Err(missing("body.tokens", &format!("'<dict of {} items>'", body.len())));
        }
        let msg = "Input should be a valid list";
        return Err(invalid("list_type", "body.tokens", msg, &echoed(value), ""));
    };
    let mut tokens = Vec::with_capacity(items.len());
    for (index, item) in items.iter().enumerate() {
        let Some(token) = item.as_u64().and_then(|token| u32::try_from(token).ok()) else {
            let loc = format!("body.tokens.{index}");
            let msg = "Input should be a valid integer, unable to parse string as an integer";
            return Err(invalid("int_parsing", &loc, msg, &echoed(item), ""));
        };
        tokens.push(token);
    }
    Ok(ok(&json!({"prompt": tokenizer::decode(&tokens, true)})))
}

/// The recorded document, less what this server does not have.
fn openapi(life: &Life) -> Value {
    let text = if life.traits.keep_tier { OPENAPI_KEEP_TIER } else { OPENAPI };
    let mut document: Value = serde_json::from_str(text).expect("the recording is JSON");
    if life.traits.has_kv_event_sources {
        let requests: Value = serde_json::from_str(OPENAPI_REQUESTS).expect("so is this one");
        document["components"] = requests["components"].clone();
    }
    if let Some(paths) = document.get_mut("paths").and_then(Value::as_object_mut) {
        paths.retain(|path, _| super::method_of(life, path).is_some());
        if !life.traits.control_bodies {
            // Up to 0.31.0 the query of a sleep is parsed raw, so none is declared.
            if let Some(post) = paths.get_mut("/sleep").and_then(|path| path.get_mut("post")) {
                post.as_object_mut().map(|post| post.remove("parameters"));
            }
        }
    }
    document
}
