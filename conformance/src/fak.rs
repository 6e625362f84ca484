//! A running `fak serve`: the built binary in a process of its own, asked over HTTP as its users
//! ask it.
//! Invariant: dropping it ends the process and removes its files.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use serde_json::{Value, json};
use tokio::sync::oneshot;

use crate::client::{Answer, Call, Client};
use crate::session::post;

/// Nothing that fak is asked takes this long.
pub const DEADLINE: Duration = Duration::from_secs(60);

/// From its start until it listens.
const READY: Duration = Duration::from_secs(30);

/// Most lines of its log that are shown when something went wrong.
const LOG_LINES_SHOWN: usize = 40;

/// Lines of its log before an error that are shown with it.
const ERROR_LINES_BEFORE: usize = 5;

/// How a gateway is set up. What is left out of `fak.toml` has fak's own default.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Name and address of each worker.
    pub workers: Vec<(String, String)>,
    /// Event and replay socket of each worker, where they are named; the engine is asked else.
    pub sockets: Option<(String, Option<String>)>,
    /// The database; in a file of its own where there is none.
    pub db: Option<String>,
    /// Pause between two looks at a worker.
    pub probe_every_ms: u64,
    /// First byte of an answer before its worker is looked at.
    pub first_byte_ms: u64,
    /// Whether it may have an engine load its weights anew.
    pub reloads_weights: bool,
}

/// A gateway.
#[derive(Debug)]
pub struct Fak {
    process: Child,
    folder: PathBuf,
    client: Client,
    base_url: String,
}

impl Drop for Fak {
    fn drop(&mut self) {
        // Whatever fails here, the process is gone or about to be.
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// The `fak` at `path`, or one that is [built](build).
///
/// # Errors
///
/// It does not build.
pub fn built(path: Option<PathBuf>) -> anyhow::Result<PathBuf> {
    path.map_or_else(build, Ok)
}

/// Builds `fak` as this program was built, and tells where it is.
///
/// # Errors
///
/// It does not build.
pub fn build() -> anyhow::Result<PathBuf> {
    // Where `cargo run` started this program it says which cargo; else the one on the path chooses
    // the toolchain as it does by hand.
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(["build", "--quiet", "--locked", "--package", "fak", "--bin", "fak"]);
    cargo.args(["--message-format", "json-render-diagnostics"]);
    if !cfg!(debug_assertions) {
        cargo.arg("--release");
    }
    let built = cargo.current_dir(env!("CARGO_MANIFEST_DIR")).stderr(Stdio::inherit()).output();
    let built = built.context("cargo cannot be started")?;
    ensure!(built.status.success(), "fak does not build");
    let artifacts = String::from_utf8_lossy(&built.stdout);
    let mut executable = artifacts.lines().filter_map(|line| {
        let artifact: Value = serde_json::from_str(line).ok()?;
        Some(PathBuf::from(artifact.get("executable")?.as_str()?))
    });
    executable.next_back().context("cargo named no binary")
}

impl Fak {
    /// Starts `binary`; it listens when this returns.
    ///
    /// # Errors
    ///
    /// It cannot be started, or ends before it listens.
    pub async fn start(binary: &Path, settings: &Settings) -> anyhow::Result<Self> {
        let folder = new_folder()?;
        std::fs::write(folder.join("fak.toml"), settings.toml(&folder))?;
        let mut process = Command::new(binary)
            .args(["serve", "--config"])
            .arg(folder.join("fak.toml"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .env("FAK_LOG", "info")
            .spawn()
            .with_context(|| binary.display().to_string())?;
        let stderr = process.stderr.take().context("it has no stderr")?;
        let log = std::fs::File::create(folder.join("log"))?;
        let (ready, address) = oneshot::channel();
        std::thread::spawn(move || keep_log(BufReader::new(stderr), log, ready));
        let client = Client::new("");
        let mut fak = Self { process, folder, client, base_url: String::new() };
        match tokio::time::timeout(READY, address).await {
            Ok(Ok(address)) => {
                fak.client = Client::new(&address);
                fak.base_url = address;
                Ok(fak)
            }
            _ => bail!("fak did not start:\n{}", fak.log()),
        }
    }

    /// Kills it, and waits until it is gone.
    pub fn kill(&mut self) {
        // Whatever fails here, the process is gone or about to be.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }

    /// Where it listens, without a trailing slash.
    pub fn base_url(&self) -> &str {
        &self.base_url
    }

    /// The last lines of its log.
    pub fn log(&self) -> String {
        let log = std::fs::read_to_string(self.folder.join("log")).unwrap_or_default();
        let lines: Vec<_> = log.lines().collect();
        lines[lines.len().saturating_sub(LOG_LINES_SHOWN)..].join("\n")
    }

    /// What it logged as errors, each after the lines that came before it.
    pub fn errors(&self) -> Vec<String> {
        let log = std::fs::read_to_string(self.folder.join("log")).unwrap_or_default();
        let lines: Vec<_> = log.lines().collect();
        let errors = lines.iter().enumerate().filter(|(_, line)| line.contains(" ERROR "));
        let told =
            |(at, _): (usize, _)| lines[at.saturating_sub(ERROR_LINES_BEFORE)..=at].join("\n     ");
        errors.map(told).collect()
    }

    /// `POST /fak/v1/{on}/{action}`, where `on` is `workers/ID` or `sessions/ID`.
    ///
    /// # Errors
    ///
    /// There is no answer, or it is no JSON.
    pub async fn act(&self, on: &str, action: &str, body: &Value) -> anyhow::Result<Acted> {
        Acted::read(&self.begin_act(on, action, body)?.finish(DEADLINE).await?)
    }

    /// As [`act`](Self::act), and lets it run.
    ///
    /// # Errors
    ///
    /// The request cannot be made.
    pub fn begin_act(&self, on: &str, action: &str, body: &Value) -> anyhow::Result<Call> {
        self.client.start(&post(&format!("/fak/v1/{on}/{action}"), body))
    }

    /// A worker, as the control API describes it.
    ///
    /// # Errors
    ///
    /// There is no answer.
    pub async fn worker(&self, id: &str) -> anyhow::Result<Value> {
        self.json(&format!("/fak/v1/workers/{id}")).await
    }

    /// The ledger's rows after `seq`, oldest first.
    ///
    /// # Errors
    ///
    /// There is no answer.
    pub async fn rows_after(&self, seq: u64) -> anyhow::Result<Vec<Value>> {
        let rows = self.json(&format!("/fak/v1/witness?limit=1000&after={seq}")).await?;
        rows.as_array().cloned().context("the ledger is no list")
    }

    /// Sends a body as it is and waits for the answer's end.
    ///
    /// # Errors
    ///
    /// The connection breaks, or nothing comes for too long.
    pub async fn post(&self, path: &str, body: &Value) -> anyhow::Result<Answer> {
        self.client.call(&post(path, body), DEADLINE).await
    }

    /// Its metrics.
    ///
    /// # Errors
    ///
    /// There is no answer.
    pub async fn metrics(&self) -> anyhow::Result<Counted> {
        Ok(Counted(self.client.plain("GET /metrics", DEADLINE).await?))
    }

    /// Sends a completion and waits for its end.
    ///
    /// # Errors
    ///
    /// The connection breaks, or nothing comes for too long.
    pub async fn complete(&self, ask: &Ask) -> anyhow::Result<Told> {
        Told::read(&self.begin(ask)?.finish(DEADLINE).await?)
    }

    /// Sends a completion, and lets it run.
    ///
    /// # Errors
    ///
    /// The request cannot be made.
    pub fn begin(&self, ask: &Ask) -> anyhow::Result<Call> {
        let mut request = post("/v1/completions", &ask.body());
        if let Some(session) = &ask.session {
            request.headers.insert("x-fak-session".to_owned(), session.clone());
        }
        if let Some(id) = &ask.id {
            request.headers.insert("x-request-id".to_owned(), id.clone());
        }
        self.client.start(&request)
    }

    async fn json(&self, path: &str) -> anyhow::Result<Value> {
        let answer = self.client.plain(&format!("GET {path}"), DEADLINE).await?;
        Ok(serde_json::from_str(&answer)?)
    }
}

/// An action's answer.
#[derive(Clone, Debug)]
pub struct Acted {
    /// 200: done and seen; 409: refused, or waits for its weights; 502: not proven to be done.
    pub status: u16,
    /// The witness row; null where there is none.
    pub row: Value,
    /// The whole answer.
    pub body: Value,
}

impl Acted {
    /// Reads an answer.
    ///
    /// # Errors
    ///
    /// It is no JSON.
    pub fn read(answer: &Answer) -> anyhow::Result<Self> {
        let body: Value = serde_json::from_slice(&answer.body)
            .with_context(|| format!("an action answered {}", answer.status))?;
        let row = if answer.status == 200 { body.clone() } else { body["row"].clone() };
        Ok(Self { status: answer.status, row, body })
    }

    /// Whether anything of it reached the engine, as far as the row says.
    pub fn is_sent(&self) -> bool {
        self.row["evidence"].as_str().is_some_and(|evidence| evidence != "not_sent")
    }
}

/// A completion that is asked for.
#[derive(Clone, Debug, Default)]
pub struct Ask {
    /// The prompt's token ids.
    pub prompt: Vec<u32>,
    /// Tokens to generate.
    pub max_tokens: u32,
    /// As server-sent events.
    pub stream: bool,
    /// The session.
    pub session: Option<String>,
    /// `cache_salt`.
    pub salt: Option<String>,
    /// `X-Request-Id`, which the engine is sent too.
    pub id: Option<String>,
    /// More fields of the body.
    pub more: Value,
}

impl Ask {
    fn body(&self) -> Value {
        let mut body = json!({"model": "tiny", "prompt": self.prompt,
            "max_tokens": self.max_tokens, "temperature": 0, "ignore_eos": true});
        if self.stream {
            body["stream"] = true.into();
            body["stream_options"] = json!({"include_usage": true});
        }
        if let Some(salt) = &self.salt {
            body["cache_salt"] = salt.as_str().into();
        }
        for (field, value) in self.more.as_object().into_iter().flatten() {
            body[field] = value.clone();
        }
        body
    }
}

/// What came back for a completion.
#[derive(Clone, Debug, Default)]
pub struct Told {
    /// The status.
    pub status: u16,
    /// `x-fak-worker`.
    pub worker: String,
    /// `x-fak-kv`; empty where nothing was sent to a worker.
    pub kv: String,
    /// `x-fak-warm-tokens` by tier.
    pub claims: Vec<(String, u64)>,
    /// `usage.prompt_tokens_details.cached_tokens`; none where the engine did not come to tell it.
    pub cached: Option<u64>,
    /// What went wrong, if anything did.
    pub code: String,
    /// The same for people.
    pub message: String,
    /// Whether the client is told when to ask again.
    pub has_retry_after: bool,
    /// Whether an engine answered to the end: an aborted answer says nothing of what is cached.
    pub is_finished: bool,
}

impl Told {
    /// Tokens claimed on all tiers.
    pub fn claimed(&self) -> u64 {
        self.claims.iter().map(|(_, tokens)| tokens).sum()
    }

    /// Tokens claimed on `tier`.
    pub fn claimed_on(&self, tier: &str) -> u64 {
        self.claims.iter().filter(|(name, _)| name == tier).map(|(_, tokens)| tokens).sum()
    }

    /// Whether it is said that the worker holds nothing of a prompt that was cached.
    pub fn is_false_cold(&self) -> bool {
        self.kv == "cold" && self.cached.is_some_and(|cached| cached > 0)
    }

    /// Reads an answer, whole or broken off.
    ///
    /// # Errors
    ///
    /// What it claims cannot be read.
    pub fn read(answer: &Answer) -> anyhow::Result<Self> {
        let header = |name: &str| {
            let value = answer.headers.get(name).and_then(|value| value.to_str().ok());
            value.unwrap_or_default().to_owned()
        };
        let text = String::from_utf8_lossy(&answer.body);
        // In a stream it is the last chunk before the end marker that tells of usage.
        let mut chunks = text.lines().filter_map(|line| line.strip_prefix("data: "));
        let last = chunks.rfind(|data| *data != "[DONE]");
        let body: Value = serde_json::from_str(last.unwrap_or(&text)).unwrap_or_default();
        Ok(Self {
            status: answer.status,
            worker: header("x-fak-worker"),
            kv: header("x-fak-kv"),
            claims: claims(&header("x-fak-warm-tokens"))?,
            cached: body["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64(),
            code: code(&body["error"]),
            message: body["error"]["message"].as_str().unwrap_or_default().to_owned(),
            has_retry_after: answer.headers.contains_key("retry-after"),
            is_finished: text.contains("\"finish_reason\":\"length\""),
        })
    }
}

/// What went wrong: fak has words for it; vLLM has a status, and says more in its message.
fn code(error: &Value) -> String {
    let code = error["code"].as_str().or_else(|| error["message"].as_str());
    code.unwrap_or_default().to_owned()
}

/// Reads `gpu=96,cpu=32`; `0` and nothing at all are no claim.
fn claims(text: &str) -> anyhow::Result<Vec<(String, u64)>> {
    if matches!(text, "" | "0") {
        return Ok(Vec::new());
    }
    let claim = |part: &str| {
        let (tier, tokens) = part.split_once('=')?;
        Some((tier.to_owned(), tokens.parse().ok()?))
    };
    let claims: Option<_> = text.split(',').map(claim).collect();
    claims.with_context(|| format!("`{text}` is no list of claims"))
}

/// How claims end.
const OUTCOMES: [&str; 6] =
    ["confirmed", "under", "over", "lost_in_flight", "lost_to_own_action", "unaudited"];

/// A page of fak's metrics.
#[derive(Clone, Debug)]
pub struct Counted(String);

impl Counted {
    /// That page.
    #[cfg(test)]
    pub(crate) fn of(page: String) -> Self {
        Self(page)
    }

    /// The value of a series, written as the page writes it; 0 where it is not there.
    pub fn get(&self, series: &str) -> f64 {
        let mut values = self.0.lines().filter_map(|line| {
            let (name, value) = line.rsplit_once(' ')?;
            (name == series).then_some(value)?.parse().ok()
        });
        values.next().unwrap_or(0.0)
    }

    /// Audited claims of one outcome.
    pub fn claims(&self, outcome: &str) -> u64 {
        self.get(&format!("fak_claims_total{{outcome=\"{outcome}\"}}")) as u64
    }

    /// Claims that were made and have no outcome yet.
    pub fn claims_waiting(&self) -> u64 {
        let made = ["warm", "cold"].map(|kv| format!("fak_claims_made_total{{kv=\"{kv}\"}}"));
        let made: u64 = made.iter().map(|series| self.get(series) as u64).sum();
        made.saturating_sub(OUTCOMES.iter().map(|outcome| self.claims(outcome)).sum())
    }

    /// The phases of `worker` whose series is 1.
    pub fn phases(&self, worker: &str) -> Vec<String> {
        let prefix = format!("fak_worker_phase{{worker=\"{worker}\",phase=\"");
        let phases = self.0.lines().filter_map(|line| {
            let (phase, value) = line.strip_prefix(&prefix)?.split_once("\"} ")?;
            (value == "1").then(|| phase.to_owned())
        });
        phases.collect()
    }
}

impl Settings {
    fn toml(&self, folder: &Path) -> String {
        let own = || format!("sqlite:{}", folder.join("fak.db").display());
        let db = self.db.clone().unwrap_or_else(own);
        let mut text = format!(
            "listen = \"127.0.0.1:0\"\ndb = \"{db}\"\nprobe_every_ms = {}\nfirst_byte_ms = {}\n\
             allow_reload_weights = {}\n",
            self.probe_every_ms, self.first_byte_ms, self.reloads_weights
        );
        for (id, url) in &self.workers {
            text += &format!("[[worker]]\nid = \"{id}\"\nurl = \"{url}\"\n");
            if let Some((kv, replay)) = &self.sockets {
                text += &format!("kv = \"{kv}\"\n");
                let replay = replay.iter().map(|replay| format!("replay = \"{replay}\"\n"));
                text += &replay.collect::<String>();
            }
        }
        text
    }
}

/// Copies what fak says into `log`, and tells where it listens.
fn keep_log(
    stderr: BufReader<std::process::ChildStderr>,
    mut log: std::fs::File,
    ready: oneshot::Sender<String>,
) {
    let mut ready = Some(ready);
    for line in stderr.lines().map_while(Result::ok) {
        if let Some(address) = line.strip_prefix("fak serve: ")
            && let Some(ready) = ready.take()
        {
            // Whoever waits may have given up.
            let _ = ready.send(address.to_owned());
        }
        // A full disk must not stop fak, which would block on its stderr.
        let _ = writeln!(log, "{line}");
    }
}

/// An empty folder of this process.
///
/// # Errors
///
/// It cannot be made.
pub fn new_folder() -> anyhow::Result<PathBuf> {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let folder = std::env::temp_dir().join(format!("fak-{}-{count}", std::process::id()));
    std::fs::create_dir_all(&folder)?;
    Ok(folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn claims_are_read_by_tier() {
        assert_eq!(claims("0").unwrap(), []);
        assert_eq!(claims("gpu=96,cpu=32").unwrap(), [("gpu".into(), 96), ("cpu".into(), 32)]);
        assert!(claims("warm").is_err());
    }

    #[test]
    fn series_are_found_by_their_labels() {
        let page = Counted(
            "fak_claims_total{outcome=\"over\"} 3\n\
             fak_worker_phase{worker=\"v0\",phase=\"serving\"} 0\n\
             fak_worker_phase{worker=\"v0\",phase=\"sleeping\"} 1\n\
             fak_worker_phase{worker=\"v1\",phase=\"serving\"} 1\n"
                .to_owned(),
        );
        assert_eq!(page.claims("over"), 3);
        assert_eq!(page.claims("under"), 0);
        assert_eq!(page.phases("v0"), ["sleeping"]);
    }
}
