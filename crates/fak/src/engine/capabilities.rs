//! What an engine can do, as far as it tells: never assumed, each answer with where it was learnt.
//!
//! Invariant: silence is "unknown", and "unknown" is never read as a yes. An engine answers 200 to
//! arguments that it does not know (observed, 0.32.0), so only a declaration counts.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use http::StatusCode;
use serde_json::Value;

use super::client::{Outgoing, Response};
use super::control::body;
use super::endpoints::{Control, Data};
use super::{Engine, Error, Model, Models};
use crate::telemetry::error_chain;

/// Most models, event sources and connectors that are taken from an engine.
const LIST_MAX: usize = 1024;
/// Characters that are kept of a setting.
const SETTING_CHARS_MAX: usize = 200;

/// An answer and where it comes from, or why there is none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Learnt<T> {
    /// The engine told.
    Told {
        /// What.
        value: T,
        /// Where: the path that told.
        by: &'static str,
    },
    /// Nobody knows.
    Unknown {
        /// Why: what was asked and what came back.
        why: String,
    },
}

impl<T> Default for Learnt<T> {
    fn default() -> Self {
        Self::unknown("it was not asked")
    }
}

impl<T> Learnt<T> {
    /// What was told, if anything.
    #[must_use]
    pub fn told(&self) -> Option<&T> {
        match self {
            Self::Told { value, .. } => Some(value),
            Self::Unknown { .. } => None,
        }
    }

    /// This answer; where it knows nothing, the earlier one that does.
    #[must_use]
    pub fn or_earlier(self, earlier: Self) -> Self {
        match (self, earlier) {
            (Self::Unknown { .. }, told @ Self::Told { .. }) => told,
            (now, _) => now,
        }
    }

    /// Why nothing was told, if nothing was.
    #[must_use]
    pub fn untold(&self) -> Option<&str> {
        match self {
            Self::Told { .. } => None,
            Self::Unknown { why } => Some(why),
        }
    }

    fn unknown(why: impl Into<String>) -> Self {
        Self::Unknown { why: why.into() }
    }

    /// This answer, else the other; where neither knows, both reasons.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        match (self, other) {
            (told @ Self::Told { .. }, _) | (Self::Unknown { .. }, told @ Self::Told { .. }) => {
                told
            }
            (Self::Unknown { why }, Self::Unknown { why: and }) => {
                Self::Unknown { why: format!("{why}; {and}") }
            }
        }
    }
}

/// What one engine can do. By default nothing is known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Capabilities {
    /// The version text of `/version`.
    pub version: Learnt<String>,
    /// Whether `/sleep` declares `clear_connector_cache`. `/openapi.json` declares no parameter of
    /// `/sleep` up to
    /// 0.31.0, is off with `--disable-fastapi-docs`, and is not there on the Rust frontend:
    /// unknown, and to be treated as no.
    pub clear_connector_cache: Learnt<bool>,
    /// The body of `/kv_event_sources`, since 0.31.0: where each rank's event sockets are. Left as
    /// it came, for the part that connects to them.
    pub kv_event_sources: Learnt<Bytes>,
    /// What is served.
    pub models: Learnt<Models>,
    /// Whether it offers to load adapters while it runs.
    pub loads_adapters: Learnt<bool>,
    /// The connector's class names: none without a connector, several for a multi connector's
    /// parts.
    pub connectors: Learnt<Vec<String>>,
    /// How the one connector that there is stores its blocks.
    pub offload: Learnt<Offload>,
    /// Tokens in a block of the device cache, as configured. Events tell the truth of each group.
    pub block_size: Learnt<u32>,
    /// Whether the prefix cache is on.
    pub prefix_caching: Learnt<bool>,
    /// How the engine was started, as far as it shows that.
    pub settings: Learnt<Settings>,
}

impl Capabilities {
    /// These answers, and where one of them is missing the `earlier` one of the same life.
    #[must_use]
    pub fn or(self, earlier: Self) -> Self {
        Self {
            version: self.version.or_earlier(earlier.version),
            clear_connector_cache: self
                .clear_connector_cache
                .or_earlier(earlier.clear_connector_cache),
            kv_event_sources: self.kv_event_sources.or_earlier(earlier.kv_event_sources),
            models: self.models.or_earlier(earlier.models),
            loads_adapters: self.loads_adapters.or_earlier(earlier.loads_adapters),
            connectors: self.connectors.or_earlier(earlier.connectors),
            offload: self.offload.or_earlier(earlier.offload),
            block_size: self.block_size.or_earlier(earlier.block_size),
            prefix_caching: self.prefix_caching.or_earlier(earlier.prefix_caching),
            settings: self.settings.or_earlier(earlier.settings),
        }
    }
}

/// What KV is computed with, by the setting's name: where one of them differs, KV is another's.
pub type KvIdentity = BTreeMap<String, String>;

/// What `/server_info` shows of how an engine was started; a field that it does not show is `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// Whether it decodes speculatively, by whatever method.
    pub speculates: Option<bool>,
    /// Whether it may be put to sleep: `--enable-sleep-mode`.
    pub sleep_mode: Option<bool>,
    /// Data-parallel ranks that this server hands requests to.
    pub ranks: Option<u32>,
    /// The number of the first of them in events and metrics. Under hybrid and external load
    /// balancing the rank header counts from 0 over this server's ranks, while events name the
    /// global rank (vLLM 0.32.0, `v1/engine/input_processor.py` and `core_client.py`, read).
    pub first_rank: u32,
    /// What the KV is computed with: model, revision, dtype and the like, by the setting's name.
    pub identity: KvIdentity,
}

/// What a connector's configuration tells of how it stores blocks; what it leaves out has its
/// default. A multi connector's tells nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Offload {
    /// What it offloads to, by the name of its class.
    pub spec_name: Option<String>,
    /// Blocks that are stored together.
    pub blocks_per_chunk: Option<u64>,
    /// The same in tokens: `block_size` of the connector's own settings.
    pub tokens_per_chunk: Option<u64>,
}

impl Engine {
    /// Asks the engine what it can do. Never fails: what cannot be learnt says why.
    pub async fn capabilities(&self) -> Capabilities {
        let (version, openapi, sources, models, server, metrics) = tokio::join!(
            self.look_data(Data::Version),
            self.look(Control::OpenApi),
            self.look(Control::KvEventSources),
            self.look_data(Data::Models),
            self.look(Control::ServerInfo),
            self.scrape(),
        );
        let by = Data::Metrics.path();
        let block_size = match &metrics {
            Ok(snapshot) => match snapshot.total().block_size {
                Some(value) => Learnt::Told { value, by },
                None => Learnt::unknown(format!("{by} does not tell")),
            },
            Err(error) => Learnt::unknown(error_chain(error)),
        };
        Capabilities {
            version: version.read(|body| Some(body.get("version")?.as_str()?.to_owned())),
            clear_connector_cache: openapi.read(sleep_takes_clear_connector_cache),
            kv_event_sources: sources.raw(),
            models: models.read(self::models),
            loads_adapters: openapi.read(loads_adapters),
            connectors: server.read(connectors),
            offload: server.read(offload),
            block_size: server
                .read(|body| u32::try_from(cache_setting(body, "block_size")?.as_u64()?).ok())
                .or(block_size),
            prefix_caching: server
                .read(|body| cache_setting(body, "enable_prefix_caching")?.as_bool()),
            settings: server.read(settings),
        }
    }

    /// Asks the engine what it serves now: adapters come and go within one life.
    pub async fn models(&self) -> Learnt<Models> {
        self.look_data(Data::Models).await.read(self::models)
    }

    /// Asks the engine how it was started.
    pub async fn settings(&self) -> Learnt<Settings> {
        self.look(Control::ServerInfo).await.read(settings)
    }

    /// Asks the engine where its ranks publish now.
    pub async fn kv_event_sources(&self) -> Learnt<Bytes> {
        self.look(Control::KvEventSources).await.raw()
    }

    async fn look(&self, look: Control) -> Look {
        Look { path: look.path().path(), result: self.probe(&look).await }
    }

    async fn look_data(&self, route: Data) -> Look {
        let request = Outgoing::to(self.endpoints.data(route));
        let result = self.client.send(request, self.client.timeouts().probe).await;
        Look { path: route.path(), result }
    }
}

/// One look at a path.
struct Look {
    path: &'static str,
    result: Result<Response, Error>,
}

impl Look {
    /// What `read` finds in the JSON of a 200.
    fn read<T>(&self, read: impl FnOnce(&Value) -> Option<T>) -> Learnt<T> {
        self.learn(|response| read(&body(&response.body)))
    }

    /// The body of a 200, as it came.
    fn raw(&self) -> Learnt<Bytes> {
        self.learn(|response| Some(response.body.clone()))
    }

    fn learn<T>(&self, read: impl FnOnce(&Response) -> Option<T>) -> Learnt<T> {
        let path = self.path;
        match &self.result {
            Ok(response) if response.status == StatusCode::OK => match read(response) {
                Some(value) => Learnt::Told { value, by: path },
                None => Learnt::unknown(format!("{path} does not tell")),
            },
            Ok(response) => {
                Learnt::unknown(format!("{path} answered {}", response.status.as_u16()))
            }
            Err(error) => Learnt::unknown(format!("{path}: {}", error_chain(error))),
        }
    }
}

/// Whether `/sleep` lists the argument; an engine without dev mode describes no `/sleep` and has
/// none to list.
fn sleep_takes_clear_connector_cache(body: &Value) -> Option<bool> {
    let paths = body.get("paths")?.as_object()?;
    let parameters = paths.get("/sleep").and_then(|sleep| sleep.get("post")?.get("parameters"));
    let named = |parameter: &Value| {
        parameter.get("name").and_then(Value::as_str) == Some("clear_connector_cache")
    };
    Some(parameters.and_then(Value::as_array).is_some_and(|all| all.iter().any(named)))
}

fn models(body: &Value) -> Option<Models> {
    let models = body.get("data")?.as_array()?.iter().take(LIST_MAX).map(|model| {
        let text = |field| model.get(field).and_then(Value::as_str).map(Arc::from);
        let tokens = model.get("max_model_len").and_then(Value::as_u64);
        Some(Model {
            id: text("id")?,
            root: text("root"),
            parent: text("parent"),
            tokens_max: tokens.and_then(|tokens| u32::try_from(tokens).ok()),
        })
    });
    models.collect()
}

/// Whether the engine offers to load adapters while it runs
/// (`VLLM_ALLOW_RUNTIME_LORA_UPDATING`).
fn loads_adapters(body: &Value) -> Option<bool> {
    Some(body.get("paths")?.as_object()?.contains_key("/v1/load_lora_adapter"))
}

/// The connector of `kv_transfer_config`, a multi connector by its parts. `/server_info` also holds
/// the engine's environment, secrets included; nothing of that is kept.
fn connectors(body: &Value) -> Option<Vec<String>> {
    let config = body.get("vllm_config")?.as_object()?.get("kv_transfer_config")?;
    let Some(name) = config.get("kv_connector").and_then(Value::as_str) else {
        return Some(Vec::new());
    };
    let parts = config.get("kv_connector_extra_config").and_then(|extra| extra.get("connectors"));
    match parts.and_then(Value::as_array) {
        Some(parts) if name == "MultiConnector" => parts
            .iter()
            .take(LIST_MAX)
            .map(|part| Some(part.get("kv_connector")?.as_str()?.to_owned()))
            .collect(),
        _ => Some(vec![name.to_owned()]),
    }
}

/// Settings that KV depends on: with another value of one of them an old block is no use, or worse.
const IDENTITY: &[(&str, &str)] = &[
    ("model_config", "model"),
    ("model_config", "revision"),
    ("model_config", "dtype"),
    ("model_config", "quantization"),
    // Among them the scaling of positions.
    ("model_config", "hf_overrides"),
    ("cache_config", "block_size"),
    ("cache_config", "cache_dtype"),
    ("parallel_config", "tensor_parallel_size"),
    ("parallel_config", "pipeline_parallel_size"),
];

/// Nothing is taken of an answer in another form than JSON: `config_format` is not known to every
/// version, and is text where it is not.
fn settings(body: &Value) -> Option<Settings> {
    let config = body.get("vllm_config")?.as_object()?;
    let of = |section: &str, name: &str| config.get(section)?.get(name);
    let number = |name: &str| u32::try_from(of("parallel_config", name)?.as_u64()?).ok();
    let is_on = |name: &str| of("parallel_config", name).and_then(Value::as_bool) == Some(true);
    let is_split = is_on("data_parallel_external_lb") || is_on("data_parallel_hybrid_lb");
    let named = IDENTITY.iter().filter_map(|(section, name)| {
        let value = match of(section, name)? {
            Value::Null => return None,
            Value::String(text) => text.chars().take(SETTING_CHARS_MAX).collect(),
            value => value.to_string().chars().take(SETTING_CHARS_MAX).collect(),
        };
        Some(((*name).to_owned(), value))
    });
    Some(Settings {
        speculates: config.get("speculative_config").map(|config| !config.is_null()),
        sleep_mode: of("model_config", "enable_sleep_mode").and_then(Value::as_bool),
        ranks: number(if is_split { "data_parallel_size_local" } else { "data_parallel_size" }),
        first_rank: number("data_parallel_rank").filter(|_| is_split).unwrap_or(0),
        identity: named.collect(),
    })
}

/// `block_size` of an offloading connector counts tokens and `blocks_per_chunk` blocks (vLLM
/// 0.32.0, `kv_connector/v1/offloading/config.py`, read).
fn offload(body: &Value) -> Option<Offload> {
    let config = body.get("vllm_config")?.as_object()?.get("kv_transfer_config")?;
    let setting = |name| {
        let extra = config.get("kv_connector_extra_config").and_then(|extra| extra.get(name));
        extra.filter(|value| !value.is_null())
    };
    // A number may be written as a text: vLLM reads it by `int()`. One that cannot be read is no 1.
    let number = |name| match setting(name) {
        None => Some(None),
        Some(Value::String(text)) => Some(Some(text.trim().parse().ok()?)),
        Some(value) => Some(Some(value.as_u64()?)),
    };
    let spec_name = match setting("spec_name") {
        None => None,
        Some(name) => Some(name.as_str()?.to_owned()),
    };
    let (blocks_per_chunk, tokens_per_chunk) = (number("blocks_per_chunk")?, number("block_size")?);
    Some(Offload { spec_name, blocks_per_chunk, tokens_per_chunk })
}

fn cache_setting<'a>(body: &'a Value, name: &str) -> Option<&'a Value> {
    body.get("vllm_config")?.get("cache_config")?.get(name)
}
