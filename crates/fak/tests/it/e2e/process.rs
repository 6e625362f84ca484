//! A running `fak serve`, its settings and ledger, and a client of it.
//!
//! Invariant: the process does not outlive the test.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::future::Future;
use std::io::{BufRead as _, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use fak::store::{Filter, Row, Store};
use fak_sim::Sim;
use http::{HeaderMap, Request};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::{Value, json};
use tokio::sync::oneshot;

/// Longer than any test needs. Nothing waits for it to pass.
pub(crate) const PATIENT: Duration = Duration::from_secs(30);

/// What one test's fak is started with, as often as it is started.
pub(crate) struct Setup {
    folder: PathBuf,
    settings: BTreeMap<String, u64>,
    /// What stands behind them in the file.
    file: String,
    environment: Vec<(String, String)>,
    workers: Vec<(String, String)>,
    /// Whether the ledger's place is left to fak, in a home of the test's own.
    has_home_only: bool,
    /// What a shell does before it becomes fak.
    shell: Option<&'static str>,
}

impl Setup {
    /// No worker yet, and a ledger that nobody has written to. `name` is the test's own.
    pub(crate) fn new(name: &str) -> Self {
        let process = std::process::id().to_string();
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(process).join(name);
        std::fs::create_dir_all(&folder).unwrap();
        let (settings, workers) = (BTreeMap::new(), Vec::new());
        let (file, environment) = (String::new(), Vec::new());
        let (has_home_only, shell) = (false, None);
        let setup = Self { folder, settings, file, environment, workers, has_home_only, shell };
        setup.set("probe_every_ms", 50).set("drain_announce_ms", 0)
    }

    pub(crate) fn set(mut self, key: &str, value: u64) -> Self {
        self.settings.insert(key.to_owned(), value);
        self
    }

    /// More of the settings' file.
    pub(crate) fn file(mut self, text: &str) -> Self {
        self.file.push_str(text);
        self
    }

    pub(crate) fn env(mut self, name: &str, value: &str) -> Self {
        self.environment.push((name.to_owned(), value.to_owned()));
        self
    }

    pub(crate) fn worker(mut self, id: &str, url: &str) -> Self {
        self.workers.push((id.to_owned(), url.to_owned()));
        self
    }

    /// Engines `w0`, `w1`, ..
    pub(crate) fn sims<'a>(self, sims: impl IntoIterator<Item = &'a Sim>) -> Self {
        sims.into_iter()
            .enumerate()
            .fold(self, |setup, (number, sim)| setup.worker(&format!("w{number}"), &sim.base_url()))
    }

    /// Names no ledger: fak makes one in an empty home.
    pub(crate) fn home_only(mut self) -> Self {
        self.has_home_only = true;
        self
    }

    /// Has a shell do this first, such as `ulimit`.
    pub(crate) fn after(mut self, shell: &'static str) -> Self {
        self.shell = Some(shell);
        self
    }

    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    pub(crate) fn db(&self) -> String {
        let file = if self.has_home_only { ".local/state/fak/fak.db" } else { "fak.db" };
        format!("sqlite:{}", self.folder.join(file).display())
    }

    /// Starts it, and waits until it listens.
    pub(crate) async fn start(&self) -> Fak {
        let mut command = self.command(&["serve"]);
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        let talk: Arc<Mutex<String>> = Arc::default();
        let (listens, listening) = oneshot::channel();
        let (ends, ended) = oneshot::channel();
        let heard = Arc::clone(&talk);
        std::thread::spawn(move || {
            let mut listens = Some(listens);
            for line in stderr.lines().map_while(Result::ok) {
                if let Some(address) = line.strip_prefix("fak serve: http://")
                    && let Some(listens) = listens.take()
                {
                    let _ = listens.send(address.parse::<SocketAddr>().unwrap());
                }
                writeln!(heard.lock().unwrap(), "{line}").unwrap();
            }
            let _ = ends.send(());
        });
        let address = tokio::time::timeout(PATIENT, listening).await.unwrap();
        let Ok(address) = address else { panic!("it ended:\n{}", talk.lock().unwrap()) };
        let http = Client::builder(TokioExecutor::new()).build_http();
        let admin = self.environment.iter().find(|(name, _)| name == "FAK_ADMIN_KEY");
        let admin = admin.map(|(_, key)| key.clone());
        Fak { child, address, talk, ended: Some(ended), http, admin }
    }

    /// `fak COMMAND` with these settings.
    pub(crate) fn command(&self, command: &[&str]) -> Command {
        let file = self.folder.join("fak.toml");
        let settings = self.settings.iter().map(|(key, value)| format!("{key} = {value}\n"));
        std::fs::write(&file, settings.collect::<String>() + &self.file).unwrap();
        let fak = env!("CARGO_BIN_EXE_fak");
        let mut made = Command::new(if self.shell.is_some() { "/bin/sh" } else { fak });
        if let Some(shell) = self.shell {
            made.args(["-c", &format!("{shell}; exec \"$@\""), "sh", fak]);
        }
        made.env_clear().env("FAK_LOG", "info");
        if self.has_home_only {
            made.env("HOME", &self.folder);
        } else {
            made.env("FAK_DB", self.db());
        }
        made.envs(self.environment.iter().map(|(name, value)| (name, value)));
        made.args(command).arg("--config").arg(file).args(["--listen", "127.0.0.1:0"]);
        for (id, url) in &self.workers {
            made.arg("--worker").arg(format!("{id}={url}"));
        }
        made
    }

    /// The ledger, read behind fak's back.
    pub(crate) async fn store(&self) -> Store {
        Store::open(&self.db()).await.unwrap()
    }

    pub(crate) async fn rows(&self) -> Vec<Row> {
        let store = self.store().await;
        let rows = store.rows(&Filter::default()).await.unwrap();
        store.close().await;
        rows
    }
}

impl Drop for Setup {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            // What cannot be removed is left to whoever clears the target folder.
            let _ = std::fs::remove_dir_all(&self.folder);
        }
    }
}

/// A running fak.
pub(crate) struct Fak {
    child: Child,
    pub(crate) address: SocketAddr,
    talk: Arc<Mutex<String>>,
    ended: Option<oneshot::Receiver<()>>,
    http: Client<HttpConnector, Full<Bytes>>,
    /// What control asks for.
    admin: Option<String>,
}

impl Drop for Fak {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("fak said:\n{}", self.talk.lock().unwrap());
        }
    }
}

/// A whole answer.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    pub(crate) text: String,
}

impl Answer {
    async fn whole(response: http::Response<Incoming>) -> Self {
        let (parts, body) = response.into_parts();
        let body = tokio::time::timeout(PATIENT, body.collect()).await.unwrap().unwrap();
        let text = String::from_utf8(body.to_bytes().to_vec()).unwrap();
        Self { status: parts.status.as_u16(), headers: parts.headers, text }
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().unwrap())
    }
}

/// What came of a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Asked {
    pub(crate) worker: String,
    /// `warm`, `cold` or `unknown`.
    pub(crate) kv: String,
    /// Tokens that fak claimed.
    pub(crate) claimed: u64,
    /// Tokens that the engine took from its caches.
    pub(crate) cached: u64,
}

impl Fak {
    /// What it has said on stderr so far.
    pub(crate) fn talk(&self) -> String {
        self.talk.lock().unwrap().clone()
    }

    /// The soft and the hard limit of its open files.
    pub(crate) fn open_files_max(&self) -> (u64, u64) {
        let limits = std::fs::read_to_string(format!("/proc/{}/limits", self.child.id())).unwrap();
        let line = limits.lines().find_map(|line| line.strip_prefix("Max open files")).unwrap();
        let mut limits = line.split_whitespace().map(|limit| limit.parse().unwrap());
        (limits.next().unwrap(), limits.next().unwrap())
    }

    /// `kill -9`.
    pub(crate) async fn kill(mut self) {
        self.child.kill().unwrap();
        self.exit().await;
    }

    /// SIGTERM. It is still there when this returns.
    pub(crate) fn terminate(&self) {
        self.signal("TERM");
    }

    /// Sends it a signal. It has come when this returns, and may not be read yet.
    pub(crate) fn signal(&self, name: &str) {
        let id = self.child.id().to_string();
        let signal = format!("-{name}");
        assert!(Command::new("kill").args([&signal, &id]).status().unwrap().success());
    }

    /// Waits for its end.
    pub(crate) async fn exit(&mut self) -> ExitStatus {
        if let Some(ended) = self.ended.take() {
            // Its standard error is closed when it ends, not before.
            tokio::time::timeout(PATIENT, ended).await.expect("it ends").unwrap();
        }
        self.child.wait().unwrap()
    }

    pub(crate) async fn terminated(mut self) {
        self.terminate();
        assert_eq!(self.exit().await.code(), Some(0));
    }

    pub(crate) async fn open(
        &self,
        method: &str,
        path: &str,
        body: String,
    ) -> Result<http::Response<Incoming>, hyper_util::client::legacy::Error> {
        let request = Request::builder().method(method);
        let request = request.uri(format!("http://{}{path}", self.address));
        let request = match &self.admin {
            Some(key) => request.header("x-fak-key", key),
            None => request,
        };
        let request = request.body(Full::new(Bytes::from(body))).unwrap();
        tokio::time::timeout(PATIENT, self.http.request(request)).await.expect("an answer")
    }

    /// A request with these headers.
    pub(crate) async fn with(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: String,
    ) -> Answer {
        let request = Request::builder().method(method);
        let request = request.uri(format!("http://{}{path}", self.address));
        let add = |request: http::request::Builder, (name, value): &(&str, &str)| {
            request.header(*name, *value)
        };
        let request = headers.iter().fold(request, add).body(Full::new(Bytes::from(body))).unwrap();
        let answer = tokio::time::timeout(PATIENT, self.http.request(request)).await;
        Answer::whole(answer.expect("an answer").unwrap()).await
    }

    /// A POST that outlives what it is asked through, and has to be answered.
    pub(crate) fn opens(
        &self,
        path: &str,
        body: String,
    ) -> impl Future<Output = http::Response<Incoming>> + use<> {
        let request = Request::post(format!("http://{}{path}", self.address));
        let asked = self.http.request(request.body(Full::new(Bytes::from(body))).unwrap());
        async move { asked.await.unwrap() }
    }

    async fn whole(&self, method: &str, path: &str, body: String) -> Answer {
        Answer::whole(self.open(method, path, body).await.unwrap()).await
    }

    pub(crate) async fn get(&self, path: &str) -> Answer {
        self.whole("GET", path, String::new()).await
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> Answer {
        self.whole("POST", path, body.to_string()).await
    }

    /// A POST with this API key.
    pub(crate) async fn post_as(&self, key: &str, path: &str, body: &Value) -> Answer {
        let request = Request::post(format!("http://{}{path}", self.address));
        let request = request.header("authorization", format!("Bearer {key}"));
        let request = request.body(Full::new(Bytes::from(body.to_string()))).unwrap();
        let answer = tokio::time::timeout(PATIENT, self.http.request(request)).await;
        Answer::whole(answer.expect("an answer").unwrap()).await
    }

    /// An action on `w0`, which has to be done.
    pub(crate) async fn act(&self, action: &str, options: &Value) -> Row {
        let answer = self.post(&format!("/fak/v1/workers/w0/{action}"), options).await;
        assert_eq!(answer.status, 200, "{action}: {}", answer.text);
        serde_json::from_str(&answer.text).unwrap()
    }

    pub(crate) async fn worker(&self, id: &str) -> Value {
        self.get(&format!("/fak/v1/workers/{id}")).await.json()
    }

    pub(crate) async fn worker_is(&self, id: &str, field: &str, value: impl Into<Value>) {
        let value = value.into();
        until(&format!("{id}: {field} is {value}"), async || {
            (self.worker(id).await[field] == value).then_some(())
        })
        .await;
    }

    /// Waits until the beliefs about a worker that serves are exact.
    pub(crate) async fn heard(&self, id: &str) {
        self.worker_is(id, "serving", true).await;
        self.worker_is(id, "state", "exact").await;
    }

    pub(crate) async fn rows(&self) -> Vec<Row> {
        serde_json::from_str(&self.get("/fak/v1/witness").await.text).unwrap()
    }

    /// A prompt, which some worker has to answer.
    pub(crate) async fn ask(&self, prompt: &[u32]) -> Asked {
        let answer = self.try_ask(prompt).await;
        assert_eq!(answer.status, 200, "{answer:?}");
        let usage = &answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"];
        let tiers = answer.header("x-fak-warm-tokens").split(',');
        let tokens = tiers.map(|tier| tier.rsplit('=').next().unwrap().parse::<u64>().unwrap());
        Asked {
            worker: answer.header("x-fak-worker").to_owned(),
            kv: answer.header("x-fak-kv").to_owned(),
            claimed: tokens.sum(),
            cached: usage.as_u64().unwrap_or(0),
        }
    }

    pub(crate) async fn try_ask(&self, prompt: &[u32]) -> Answer {
        let body = json!({"model": "tiny", "prompt": prompt, "max_tokens": 1});
        self.post("/v1/completions", &body).await
    }

    /// As [`ask`](Self::ask), and nothing may be claimed that is not there.
    pub(crate) async fn ask_truly(&self, prompt: &[u32]) -> Asked {
        let asked = self.ask(prompt).await;
        assert!(asked.claimed <= asked.cached, "an over-claim: {asked:?}");
        asked
    }

    /// Asks until what is claimed is all that there is to claim: whole blocks, but the last
    /// token's.
    pub(crate) async fn warm(&self, prompt: &[u32]) -> Asked {
        let whole = (prompt.len() as u64 - 1) / BLOCK * BLOCK;
        until("a warm prompt", async || {
            let asked = self.ask_truly(prompt).await;
            (asked.claimed == whole && asked.cached == whole).then_some(asked)
        })
        .await
    }
}

/// A control call behind fak's back.
pub(crate) async fn behind(sim: &Sim, call: &str) {
    behind_with(sim, call, String::new()).await;
}

pub(crate) async fn behind_with(sim: &Sim, call: &str, body: String) {
    let http = Client::builder(TokioExecutor::new()).build_http();
    let request = Request::post(format!("{}{call}", sim.base_url()));
    let request = request.body(Full::new(Bytes::from(body))).unwrap();
    let answer = within(call, http.request(request)).await.unwrap();
    assert_eq!(answer.status(), 200, "{call}");
}

/// Tokens in a block of the simulator's.
pub(crate) const BLOCK: u64 = 32;

/// Prompts that share nothing, for labels below 3,000.
pub(crate) fn prompt(label: u32) -> Vec<u32> {
    (0..100).map(|n| 300 + (label * 31 + n * 7) % 3000).collect()
}

/// Waits until `look` finds something.
pub(crate) async fn until<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    // Another process's state tells nobody when it changes.
    let mut looks = tokio::time::interval(Duration::from_millis(5));
    let found = async {
        loop {
            looks.tick().await;
            if let Some(found) = look().await {
                return found;
            }
        }
    };
    within(what, found).await
}

pub(crate) async fn within<T>(what: &str, found: impl Future<Output = T>) -> T {
    match tokio::time::timeout(PATIENT, found).await {
        Ok(found) => found,
        Err(_) => panic!("not in time: {what}"),
    }
}
