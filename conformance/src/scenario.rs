//! Scenario files: what is done to an engine, step by step.
//! Invariant: a scenario names no engine, port, path or time; it waits on states only.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Context;
use serde::Deserialize;

use crate::prompt::Prompt;

/// One scenario file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scenario {
    /// The file's name without its extension.
    #[serde(skip)]
    pub name: String,
    /// What the scenario shows, for the reader.
    pub about: String,
    /// Which engine it needs.
    #[serde(default)]
    pub engine: Profile,
    /// The steps, in order.
    #[serde(rename = "step")]
    pub steps: Vec<Step>,
}

impl Scenario {
    /// Whether a step needs an engine that can be restarted.
    pub fn restarts(&self) -> bool {
        self.steps.iter().any(|step| matches!(step, Step::Restart(_)))
    }
}

/// An engine configuration. Scenarios of one profile share an engine.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Deserialize, clap::ValueEnum,
)]
#[serde(rename_all = "kebab-case")]
pub enum Profile {
    /// No connector.
    #[default]
    Plain,
    /// A host-memory tier behind the offloading connector.
    Offload,
    /// The same, and `clear_connector_cache` is understood.
    KeepTier,
    /// The argument is understood, and refused: the connector is a bundle of several.
    KeepTierBundle,
    /// The offloading connector's tier keeps four blocks as one chunk.
    Chunked,
    /// The same, and its events tell of tokens and parents.
    ChunkedDescribed,
    /// No connector; the model has a second name, `small`, and the adapters `sql` and `text`.
    Named,
    /// No connector; an EAGLE head drafts what the model decodes.
    Speculating,
}

/// One step. In a file: `[[step]]` with one of these keys.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Step {
    /// A completion with a symbolic prompt.
    Complete(Complete),
    /// Any other HTTP call.
    Http(Http),
    /// Waits for a state, up to the deadline.
    Await(Await),
    /// Closes a background call from the client's side.
    Close(String),
    /// Waits for a background call to end and writes down its answer.
    Finish(String),
    /// Writes down every KV event since the last checkpoint.
    Events(Events),
    /// Writes down the counters that changed since the scenario's start, and the gauges.
    Metrics(Metrics),
    /// Writes down `is_paused`, `is_sleeping` and the sleep state metric.
    State(Empty),
    /// Ends the engine and starts a new one.
    Restart(Empty),
    /// Asks the replay socket.
    Replay(Replay),
}

/// A step without options: `restart = {}`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Empty {}

/// `POST /v1/completions` with token ids as its prompt, greedy, and never ended by a stop token,
/// so that the number of generated tokens is `max_tokens` on every engine.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Complete {
    /// Blocks and tail.
    pub prompt: Prompt,
    /// Tokens to generate.
    #[serde(default = "max_tokens_default")]
    pub max_tokens: u32,
    /// As server-sent events.
    #[serde(default)]
    pub stream: bool,
    /// `cache_salt`.
    pub salt: Option<String>,
    /// Further body fields; these win.
    #[serde(default)]
    pub with: serde_json::Map<String, serde_json::Value>,
    /// Further headers.
    #[serde(default)]
    pub headers: BTreeMap<String, String>,
    /// Only this part of the answer is written down: a JSON pointer.
    pub pick: Option<String>,
    /// Runs in the background under this name.
    pub name: Option<String>,
}

fn max_tokens_default() -> u32 {
    4
}

/// An HTTP call.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Http {
    /// `"POST /pause?mode=keep"`.
    pub call: String,
    /// A JSON body.
    pub json: Option<serde_json::Value>,
    /// A body as it is; `json` and `raw` exclude each other.
    pub raw: Option<String>,
    /// Further headers; `content-type` replaces the one that a body brings.
    #[serde(default)]
    pub headers: BTreeMap<String, String>,
    /// Only this part of a JSON answer is written down: a JSON pointer.
    pub pick: Option<String>,
    /// Runs in the background under this name.
    pub name: Option<String>,
}

/// What to wait for.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Await {
    /// A background call has its status line and headers.
    Headers(String),
    /// A background stream has sent so many data lines.
    Chunks {
        /// The call.
        of: String,
        /// How many at least.
        count: usize,
    },
    /// A metric, as the `metrics` step names it, has this value (counters since the start).
    Metric {
        /// The name.
        name: String,
        /// The value.
        is: f64,
    },
    /// So many blocks were stored or removed on a medium since the last checkpoint.
    Blocks {
        /// `BlockStored` or `BlockRemoved`.
        event: String,
        /// `GPU` or `CPU`.
        medium: String,
        /// How many at least.
        count: usize,
    },
    /// The caches were told to be cleared so often since the last checkpoint.
    Cleared(usize),
    /// A GET answers with this field.
    Answer {
        /// The path.
        path: String,
        /// The body's field.
        field: String,
        /// Its value.
        is: serde_json::Value,
    },
}

/// How events are written down.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Events {
    /// Why batches and the order within one medium cannot be compared. Lines are then sorted.
    pub unordered: Option<String>,
    /// Why batch boundaries cannot be compared. They are then left out.
    pub unbatched: Option<String>,
    /// Why the blocks that decoding filled cannot be compared. Their stores are then left out.
    pub ungenerated: Option<String>,
}

/// How metrics are written down.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Metrics {
    /// Waits until these have the values given.
    #[serde(default)]
    pub until: BTreeMap<String, f64>,
    /// Names left out, each with the reason why it cannot be compared.
    #[serde(default)]
    pub without: BTreeMap<String, String>,
}

/// A request to the replay socket.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Replay {
    /// From a sequence number.
    From(u64),
    /// The last so many batches.
    Last(u64),
    /// From so many beyond the newest batch.
    Beyond(u64),
    /// These bytes, in hexadecimal, as the start.
    Raw(String),
}

/// Reads every scenario of a folder, by name.
pub fn load(folder: &Path) -> anyhow::Result<Vec<Scenario>> {
    let mut scenarios = Vec::new();
    let entries = std::fs::read_dir(folder).with_context(|| folder.display().to_string())?;
    for entry in entries {
        let path = entry?.path();
        if path.extension().is_none_or(|extension| extension != "toml") {
            continue;
        }
        let text = std::fs::read_to_string(&path)?;
        let mut scenario: Scenario =
            toml::from_str(&text).with_context(|| path.display().to_string())?;
        scenario.name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        scenarios.push(scenario);
    }
    scenarios.sort_by(|a, b| (a.engine, &a.name).cmp(&(b.engine, &b.name)));
    Ok(scenarios)
}
