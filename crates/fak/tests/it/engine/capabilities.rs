//! What an engine does not say is unknown, with the reason.

use fak::engine::{Capabilities, Learnt};
use serde_json::{Value, json};

use super::peer::{self, Peer, Reply, Request};
use super::{engine, patient};

fn recorded(name: &str) -> Value {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/vllm-0.32/http");
    let text = std::fs::read_to_string(format!("{folder}/{name}.json")).expect("a fixture");
    serde_json::from_str(&text).expect("JSON")
}

fn replay(name: &str) -> Reply {
    let body = recorded(name)["response"]["body_text"].as_str().expect("a text").to_owned();
    Reply::Send(peer::json("200 OK", &body))
}

fn not_found() -> Reply {
    Reply::Send(peer::json("404 Not Found", r#"{"detail":"Not Found"}"#))
}

async fn learnt(script: impl Fn(&Request) -> Reply + Send + Sync + 'static) -> Capabilities {
    let peer = Peer::start(script).await;
    engine(&peer, patient()).capabilities().await
}

fn server_info(config: &Value) -> Reply {
    let info = json!({"vllm_config": config, "vllm_env": {"VLLM_API_KEY": "sk-engine"}});
    Reply::Send(peer::json("200 OK", &info.to_string()))
}

#[tokio::test]
async fn a_recorded_engine_is_read() {
    let metrics =
        concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/vllm-0.32/metrics/idle.prom");
    let metrics = std::fs::read_to_string(metrics).expect("a fixture");
    let learnt = learnt(move |request| match request.line() {
        "GET /version" => replay("version"),
        "GET /v1/models" => replay("models"),
        "GET /kv_event_sources" => replay("kv_event_sources"),
        "GET /metrics" => Reply::Send(peer::answer("200 OK", "text/plain", &metrics)),
        "GET /openapi.json" => {
            let document = recorded("openapi-control-routes-with-opt-out").to_string();
            Reply::Send(peer::json("200 OK", &document))
        }
        _ => not_found(),
    })
    .await;
    let version = Learnt::Told { value: "0.32.0".to_owned(), by: "/version" };
    assert_eq!(learnt.version, version);
    assert_eq!(learnt.clear_connector_cache, Learnt::Told { value: true, by: "/openapi.json" });
    let models = learnt.models.told().expect("told").iter().next().expect("one");
    assert_eq!((&*models.id, models.tokens_max), ("tiny", Some(4096)));
    assert_eq!(learnt.block_size, Learnt::Told { value: 32, by: "/metrics" });
    let sources = learnt.kv_event_sources.told().expect("told");
    let sources: Value = serde_json::from_slice(sources).expect("JSON");
    assert_eq!(sources["0"]["endpoint"], "tcp://*:5557");
    let why = Learnt::Unknown { why: "/server_info answered 404".to_owned() };
    assert_eq!(learnt.connectors, why);
}

#[tokio::test]
async fn an_argument_that_is_not_declared_is_not_there() {
    for (document, expected) in [
        (recorded("openapi-control-routes"), Some(false)),
        (json!({"paths": {"/sleep": {"post": {}}}}), Some(false)),
        (json!({"paths": {}}), Some(false)),
        (json!({"openapi": "3.1.0"}), None),
        (json!("off"), None),
    ] {
        let learnt = learnt(move |request| match request.line() {
            "GET /openapi.json" => Reply::Send(peer::json("200 OK", &document.to_string())),
            _ => not_found(),
        })
        .await;
        assert_eq!(learnt.clear_connector_cache.told().copied(), expected);
    }
}

#[tokio::test]
async fn an_engine_that_tells_nothing_leaves_everything_unknown() {
    let learnt = learnt(|_| not_found()).await;
    let unknown = |path: &str| format!("{path} answered 404");
    let Learnt::Unknown { why } = learnt.clear_connector_cache else { panic!("known") };
    assert_eq!(why, unknown("/openapi.json"));
    let Learnt::Unknown { why } = learnt.block_size else { panic!("known") };
    assert_eq!(why, "/server_info answered 404; metrics answered 404");
    assert_eq!(learnt.version.told(), None);
    assert_eq!(learnt.models.told(), None);
    assert_eq!(learnt.kv_event_sources.told(), None);
}

#[tokio::test]
async fn connectors_are_told_by_their_parts_and_secrets_stay_out() {
    let parts = [
        json!({"kv_connector": "OffloadingConnector"}),
        json!({"kv_connector": "MooncakeStoreConnector"}),
    ];
    let multi = json!({"kv_connector": "MultiConnector",
        "kv_connector_extra_config": {"connectors": parts}});
    let single = json!({"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {}});
    for (transfer, expected) in [
        (multi, Some(vec!["OffloadingConnector", "MooncakeStoreConnector"])),
        (single, Some(vec!["OffloadingConnector"])),
        (Value::Null, Some(Vec::new())),
        (json!({"kv_connector": "MultiConnector"}), Some(vec!["MultiConnector"])),
    ] {
        let config = json!({
            "kv_transfer_config": transfer,
            "cache_config": {"block_size": 16, "enable_prefix_caching": false},
        });
        let learnt = learnt(move |request| match request.line() {
            "GET /server_info?config_format=json" => server_info(&config),
            _ => not_found(),
        })
        .await;
        let connectors = learnt.connectors.told();
        let names = connectors.map(|all| all.iter().map(String::as_str).collect::<Vec<_>>());
        assert_eq!(names, expected);
        assert_eq!(learnt.block_size, Learnt::Told { value: 16, by: "/server_info" });
        assert_eq!(learnt.prefix_caching, Learnt::Told { value: false, by: "/server_info" });
        assert!(!format!("{learnt:?}").contains("sk-engine"));
    }
    let learnt = learnt(|request| match request.line() {
        "GET /server_info?config_format=json" => server_info(&json!("VllmConfig(...)")),
        _ => not_found(),
    })
    .await;
    assert_eq!(learnt.connectors.told(), None, "a text is no configuration");
}

#[tokio::test]
async fn what_server_info_shows_of_how_an_engine_was_started_is_read() {
    let parallel = |size, local, rank, is_hybrid| {
        json!({"data_parallel_size": size, "data_parallel_size_local": local,
            "data_parallel_rank": rank, "data_parallel_hybrid_lb": is_hybrid,
            "data_parallel_external_lb": false})
    };
    for (speculative, parallel, expected) in [
        (Value::Null, parallel(2, 2, 0, false), (Some(false), Some(2), 0)),
        (json!({"method": "eagle"}), parallel(8, 4, 4, true), (Some(true), Some(4), 4)),
        (json!({}), json!({}), (Some(true), None, 0)),
    ] {
        let extra = json!({"blocks_per_chunk": 4});
        let config = json!({
            "speculative_config": speculative,
            "parallel_config": parallel,
            "model_config": {"model": "/m", "revision": null, "dtype": "torch.bfloat16",
                "enable_sleep_mode": true},
            "cache_config": {"block_size": 16, "cache_dtype": "auto"},
            "kv_transfer_config":
                {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra},
        });
        let learnt = learnt(move |request| match request.line() {
            "GET /server_info?config_format=json" => server_info(&config),
            _ => not_found(),
        })
        .await;
        let told = learnt.settings.told().expect("told");
        assert_eq!((told.speculates, told.ranks, told.first_rank), expected);
        assert_eq!(told.sleep_mode, Some(true));
        let identity: Vec<_> =
            told.identity.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
        let (block, dtype) = (("block_size", "16"), ("dtype", "torch.bfloat16"));
        assert_eq!(identity, [block, ("cache_dtype", "auto"), dtype, ("model", "/m")]);
        let offload = learnt.offload.told().expect("told");
        assert_eq!((offload.blocks_per_chunk, offload.tokens_per_chunk), (Some(4), None));
    }
}
