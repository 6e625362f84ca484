//! `fak serve` in front of an engine: what happened to the KV cache is told step by step, and no
//! resume is called warm that is not.
//! Invariant: every claim is held against what the engine itself counts.

mod checks;
mod edges;
mod kept;
mod rollout;
mod scenes;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use serde_json::{Value, json};

pub use self::checks::Checks;
use crate::client::Client;
use crate::fak::{Acted, Ask, Fak, Settings, Told};
use crate::metrics::Values;
use crate::prompt::{BLOCK_SIZE, Prompt};
use crate::scenario::Profile;
use crate::session::until;
use crate::target::{Endpoints, Target};

/// The worker's name.
const WORKER: &str = "v0";

/// Probes come ten times a second, so that what happens behind fak's back is found soon; the
/// default is one a second.
const PROBE_EVERY_MS: u64 = 100;

/// An engine's cold start of a batch takes longer than this only when the machine is starved.
const FIRST_BYTE_MS: u64 = 2_000;

/// For calls straight to the engine.
const ENGINE_DEADLINE: Duration = Duration::from_secs(20);

/// An engine and the gateway in front of it.
#[derive(Debug)]
pub struct Bridge<T> {
    engine: T,
    profile: Profile,
    /// Where the engine listens.
    endpoints: Endpoints,
    /// Counts the weights that scenes put in place.
    weights: u64,
    /// Straight to the engine, behind fak's back.
    client: Client,
    fak: Fak,
    /// What fak is started from.
    binary: PathBuf,
    settings: Settings,
    checks: Checks,
}

impl<T: Target> Bridge<T> {
    /// Starts both; checks are told to `out`. The profile chooses the scenes.
    ///
    /// # Errors
    ///
    /// One does not start, or the worker does not come to serve.
    pub async fn start(
        mut engine: T,
        profile: Profile,
        binary: &Path,
        out: Box<dyn Write>,
    ) -> anyhow::Result<Self> {
        let endpoints = engine.start(profile).await?;
        let settings = Settings {
            workers: vec![(WORKER.to_owned(), format!("{}/v1", endpoints.base_url))],
            sockets: None,
            db: None,
            probe_every_ms: PROBE_EVERY_MS,
            first_byte_ms: FIRST_BYTE_MS,
            reloads_weights: profile == Profile::KeepTier,
        };
        let fak = Fak::start(binary, &settings).await?;
        let client = Client::new(&endpoints.base_url);
        let (binary, checks) = (binary.to_owned(), Checks::new(out));
        let weights = 1;
        let bridge =
            Self { engine, profile, endpoints, weights, client, fak, binary, settings, checks };
        bridge.until_serving().await?;
        Ok(bridge)
    }

    /// Plays every scene.
    ///
    /// # Errors
    ///
    /// What is waited for does not come, or a call gets no answer.
    pub async fn run(mut self) -> anyhow::Result<Checks> {
        let played = match self.profile {
            Profile::KeepTier => self.kept_scenes().await,
            _ => self.scenes().await,
        };
        let log = self.fak.log();
        played.with_context(|| format!("fak said:\n{log}"))?;
        Ok(self.checks)
    }

    async fn until_serving(&self) -> anyhow::Result<()> {
        until("the worker to serve with exact beliefs", async || {
            let worker = self.fak.worker(WORKER).await?;
            Ok(worker["serving"] == true && worker["state"] == "exact")
        })
        .await
    }

    async fn until_phase(&self, phase: &str) -> anyhow::Result<()> {
        until(&format!("the worker to be {phase}"), async || {
            Ok(self.fak.worker(WORKER).await?["phase"] == phase)
        })
        .await
    }

    /// The last row on the worker.
    async fn last_row(&self) -> anyhow::Result<Value> {
        let seq = self.fak.worker(WORKER).await?["last_witness"].as_u64().context("no row")?;
        let rows = self.fak.rows_after(seq - 1).await?;
        rows.into_iter().next().context("the last row is not in the ledger")
    }

    /// Asks, and tells what the engine counted for it besides.
    async fn ask(&self, ask: &Ask) -> anyhow::Result<(Told, Hits)> {
        let before = self.engine_counts().await?;
        let told = self.fak.complete(ask).await?;
        let mut now = before.clone();
        until("the engine to count the request", async || {
            now = self.engine_counts().await?;
            Ok(now.get("request_success.length", &before) >= Some(1.0))
        })
        .await?;
        let gained = |name: &str| now.get(name, &before).unwrap_or(0.0) as u64;
        let hits = Hits {
            gpu: gained("prefix_cache_hits"),
            connector: gained("external_prefix_cache_hits"),
        };
        Ok((told, hits))
    }

    async fn engine_counts(&self) -> anyhow::Result<Values> {
        Ok(Values::parse(&self.client.plain("GET /metrics", ENGINE_DEADLINE).await?))
    }

    /// Proven blocks on a tier.
    async fn blocks(&self, tier: &str) -> anyhow::Result<u64> {
        Ok(self.fak.worker(WORKER).await?["tiers"][tier]["blocks"].as_u64().unwrap_or(0))
    }

    /// Sends a prompt and waits until its blocks are believed on `tier`.
    async fn store(&self, ask: &Ask, tier: &str) -> anyhow::Result<Told> {
        let wanted = self.blocks(tier).await? + full_blocks(ask);
        let told = self.fak.complete(ask).await?;
        until(&format!("the prompt's blocks to be proven on the {tier} tier"), async || {
            if tier != "gpu" {
                // Stores to a connector's tier are published with a later step.
                self.fak.complete(&ask_for("+8", None)?).await?;
            }
            Ok(self.blocks(tier).await? >= wanted)
        })
        .await?;
        Ok(told)
    }

    /// Stores prove blocks anew: then a claim is made, and it is what the engine reuses.
    async fn warms(&mut self, scene: &str, ask: &Ask) -> anyhow::Result<()> {
        let (told, hits) = self.ask(ask).await?;
        let all = full_blocks(ask) * BLOCK_SIZE as u64;
        let claimed = (told.kv.as_str(), told.claimed_on("gpu"), told.claimed());
        let holds = claimed == ("warm", all, all)
            && told.cached == Some(all)
            && hits == Hits { gpu: all, connector: 0 };
        let what = "after fresh stores the claim is what the engine reuses";
        self.checks.that(scene, what, holds, &format!("{told:?} {hits:?}"))
    }

    /// Nothing is claimed, and the engine reuses nothing.
    async fn is_cold(&mut self, scene: &str, ask: &Ask) -> anyhow::Result<()> {
        let (told, hits) = self.ask(ask).await?;
        let seen = format!("{told:?} {hits:?}");
        let claims_nothing = told.status == 200 && told.kv != "warm" && told.claimed() == 0;
        self.checks.that(scene, "the next request claims nothing", claims_nothing, &seen)?;
        let reuses_nothing = told.cached == Some(0) && hits == Hits::default();
        self.checks.that(scene, "and the engine reuses nothing", reuses_nothing, &seen)
    }

    /// A row says what is `expected` of it, field by field.
    fn row(
        &mut self,
        scene: &str,
        what: &str,
        row: &Value,
        expected: &Value,
    ) -> anyhow::Result<()> {
        let fields = expected.as_object().context("no fields are expected")?;
        let holds = fields.iter().all(|(name, value)| row[name] == *value);
        self.checks.that(scene, what, holds, &format!("{row} is not {expected}"))
    }

    async fn act(&self, on: &str, action: &str, body: Value) -> anyhow::Result<Acted> {
        self.fak.act(on, action, &body).await
    }

    /// Exactly one phase is shown, by the metrics as by the control API.
    async fn shows(&mut self, scene: &str, phase: &str) -> anyhow::Result<()> {
        let phases = self.fak.metrics().await?.phases(WORKER);
        let worker = self.fak.worker(WORKER).await?;
        let is_serving = json!(phase == "serving");
        let holds =
            phases == [phase] && worker["phase"] == phase && worker["serving"] == is_serving;
        let what = format!("the worker is shown as {phase} and as nothing else");
        self.checks.that(scene, &what, holds, &format!("{phases:?} {worker}"))
    }

    /// A command of fak's: its exit code, and what it wrote.
    async fn command(&self, arguments: &[&str]) -> anyhow::Result<(Option<i32>, String)> {
        let mut command = std::process::Command::new(&self.binary);
        command.args(arguments).env("FAK_ADDR", self.fak.base_url());
        // A simulated engine answers on this thread.
        let ended = tokio::task::spawn_blocking(move || command.output()).await??;
        let text = [ended.stdout, ended.stderr].concat();
        Ok((ended.status.code(), String::from_utf8_lossy(&text).into_owned()))
    }

    /// The engine, called behind fak's back.
    async fn behind(&self, call: &str) -> anyhow::Result<()> {
        self.client.plain(call, ENGINE_DEADLINE).await.map(drop)
    }
}

/// Tokens that the engine counts as found in its caches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Hits {
    gpu: u64,
    connector: u64,
}

/// A request for one token after a prompt of block labels.
fn ask_for(prompt: &str, session: Option<&str>) -> anyhow::Result<Ask> {
    let prompt = Prompt::try_from(prompt.to_owned())?.tokens();
    Ok(Ask { prompt, max_tokens: 1, session: session.map(str::to_owned), ..Ask::default() })
}

/// Blocks that the engine can reuse of a prompt: the one with its last token never is.
fn full_blocks(ask: &Ask) -> u64 {
    ((ask.prompt.len() - 1) / BLOCK_SIZE) as u64
}
