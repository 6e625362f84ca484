//! One running engine and the ways to bring it into a known state.
//! Invariant: a scenario starts with empty caches, nothing pending, and every event so far behind
//! the cursor.

use std::time::Duration;

use anyhow::{Context, bail, ensure};
use serde_json::{Value, json};

use crate::client::{Answer, Client, Request};
use crate::events::{Batch, Subscriber, settle};
use crate::metrics::Values;
use crate::prompt::Prompt;
use crate::scenario::Profile;
use crate::target::{Endpoints, Target};

/// No state takes this long to come unless it never comes.
pub const DEADLINE: Duration = Duration::from_secs(20);

/// Between two looks at a state.
const POLL: Duration = Duration::from_millis(10);

/// A publisher learns of a subscriber within milliseconds; requests sent before are not heard.
const GREETINGS_MAX: u32 = 50;

/// An engine and the connections to it.
#[derive(Debug)]
pub struct Session<T> {
    target: T,
    profile: Profile,
    endpoints: Endpoints,
    /// For the scenario's calls.
    pub client: Client,
    /// For conditions on events; what is written down comes from the replay socket.
    pub subscriber: Subscriber,
    /// The next batch to be written down.
    pub cursor: u64,
    /// Where counters are told from.
    pub start: Values,
}

impl<T: Target> Session<T> {
    /// Starts the engine.
    pub async fn start(mut target: T, profile: Profile) -> anyhow::Result<Self> {
        let endpoints = target.start(profile).await?;
        let client = Client::new(&endpoints.base_url);
        let subscriber = Subscriber::connect(&endpoints.kv_events).await?;
        let start = Values::default();
        let mut session =
            Session { target, profile, endpoints, client, subscriber, cursor: 0, start };
        session.greet().await?;
        Ok(session)
    }

    /// `vllm` or `sim`.
    pub fn name(&self) -> &'static str {
        self.target.name()
    }

    /// Where its replay socket listens.
    pub fn replay_endpoint(&self) -> &str {
        &self.endpoints.replay
    }

    /// Ends the engine and starts it anew, with a clean state.
    pub async fn restart(&mut self) -> anyhow::Result<()> {
        self.endpoints = self.target.start(self.profile).await?;
        self.client = Client::new(&self.endpoints.base_url);
        self.subscriber = Subscriber::connect(&self.endpoints.kv_events).await?;
        self.cursor = 0;
        self.greet().await?;
        self.clean().await
    }

    /// Makes the subscription known: asks for one new block at a time until an event is heard.
    async fn greet(&mut self) -> anyhow::Result<()> {
        for label in 0..GREETINGS_MAX {
            self.small_request(&format!("{}", 9_000 + label)).await?;
            let batches = settle(&self.endpoints.replay, self.cursor).await?;
            self.cursor += batches.len() as u64;
            if !self.subscriber.since(0).is_empty() {
                return Ok(());
            }
        }
        bail!("no event came from {} after {GREETINGS_MAX} requests", self.endpoints.kv_events)
    }

    /// Awake, not paused, both caches empty, and the clear event of that behind the cursor.
    pub async fn clean(&mut self) -> anyhow::Result<()> {
        self.client.plain("POST /wake_up", DEADLINE).await?;
        let reset = "/reset_prefix_cache?reset_external=true&reset_running_requests=true";
        // False while a request that its client has left is still being taken off.
        until("the caches to be empty", async || {
            let answer = self.client.plain(&format!("POST {reset}"), DEADLINE).await?;
            Ok(serde_json::from_str::<Value>(&answer)?["success"] == true)
        })
        .await?;
        let before = self.metrics().await?;
        // Less than a block, so that it clears what is pending and leaves nothing behind.
        self.small_request("+8").await?;
        until("the counters to be told", async || {
            let now = self.metrics().await?;
            Ok(now.get("request_success.length", &before) == Some(1.0))
        })
        .await?;
        let batches = settle(&self.endpoints.replay, self.cursor).await?;
        self.cursor += batches.len() as u64;
        self.start = self.metrics().await?;
        Ok(())
    }

    async fn small_request(&self, prompt: &str) -> anyhow::Result<()> {
        let prompt = Prompt::try_from(prompt.to_owned())?;
        let body = json!({"model": "tiny", "prompt": prompt.tokens(), "max_tokens": 1,
            "temperature": 0, "ignore_eos": true});
        let answer = self.client.call(&post("/v1/completions", &body), DEADLINE).await?;
        ensure!(answer.status == 200, "{}", String::from_utf8_lossy(&answer.body));
        Ok(())
    }

    /// The metrics as they are now.
    pub async fn metrics(&self) -> anyhow::Result<Values> {
        Ok(Values::parse(&self.client.plain("GET /metrics", DEADLINE).await?))
    }

    /// Every event that came since the last call.
    pub async fn events(&mut self) -> anyhow::Result<Vec<Batch>> {
        let batches = settle(&self.endpoints.replay, self.cursor).await?;
        let first = self.cursor;
        self.cursor += batches.len() as u64;
        until("the subscriber to hear what replay told", async || {
            Ok(self.subscriber.since(first).len() >= batches.len())
        })
        .await?;
        let heard = self.subscriber.since(first);
        ensure!(heard == batches, "published and replayed bytes differ from {first} on");
        Ok(batches)
    }
}

/// A POST with a JSON body.
pub fn post(path: &str, body: &Value) -> Request {
    Request {
        method: "POST".to_owned(),
        path: path.to_owned(),
        headers: [("content-type".to_owned(), "application/json".to_owned())].into(),
        body: Some(body.to_string()),
    }
}

/// Polls until `holds` says yes.
pub async fn until(
    what: &str,
    mut holds: impl AsyncFnMut() -> anyhow::Result<bool>,
) -> anyhow::Result<()> {
    let polled = async {
        while !holds().await? {
            tokio::time::sleep(POLL).await;
        }
        anyhow::Ok(())
    };
    let waited = tokio::time::timeout(DEADLINE, polled).await;
    waited.with_context(|| format!("waited {} s for {what}", DEADLINE.as_secs()))?
}

/// A JSON field of a 200 answer.
pub fn field(answer: &Answer, name: &str) -> Option<Value> {
    serde_json::from_slice::<Value>(&answer.body).ok()?.get(name).cloned()
}

/// Hashes in `event`s of `medium`, over all `batches`; an event without hashes counts as one.
pub fn count(batches: &[Batch], event: &str, medium: Option<&str>) -> anyhow::Result<usize> {
    let mut count = 0;
    for batch in batches {
        for found in batch.events()? {
            let get = |key: &str| {
                let fields = found.as_map().map_or(&[][..], Vec::as_slice);
                fields.iter().find(|(name, _)| name.as_str() == Some(key)).map(|(_, value)| value)
            };
            let text = |key: &str| get(key).and_then(rmpv::Value::as_str);
            if text("type") == Some(event) && text("medium") == medium {
                count += get("block_hashes").and_then(rmpv::Value::as_array).map_or(1, Vec::len);
            }
        }
    }
    Ok(count)
}
