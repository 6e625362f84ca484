//! Settings of `fak serve`: flags before environment before file before defaults, resolved in one
//! place.
//!
//! Invariant: what comes out can be used as it is: every URL parsed, every number in its range,
//! every name told apart; and a gateway that others than this machine can reach has an admin key.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use http::{HeaderValue, Uri};
use serde::{Deserialize, Serialize};

use super::faults::{Error, Faults, Found};
use super::keys::{self, KeySpec, RawKey};
use super::limits::{self, Limits, ms, number};
use super::print::Origin;
use super::source::Source;
use super::weights::RawWeights;
use super::{Lookup, Worker, apart, names, secret, shown_url, text};
use crate::engine::{Endpoints, Passing, Secret};
use crate::events::endpoint::Endpoint;

/// Most workers of one gateway.
const WORKERS_MAX: usize = 1024;
pub(super) const DB_RIGHT: &str = "sqlite:PATH, sqlite::memory: or postgres://USER@HOST:PORT/NAME";

/// What the simulated worker of this number is called.
#[must_use]
pub fn embedded_id(number: usize) -> String {
    format!("sim-{number}")
}

/// One worker as written: in the file, or as `ID=URL[,kv=tcp://…,replay=tcp://…]`.
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct RawWorker {
    /// Its name.
    pub id: String,
    /// Where it is, with or without `/v1`.
    pub url: String,
    /// Its event socket, where `/kv_event_sources` cannot tell.
    pub kv: Option<String>,
    /// Its replay socket, likewise.
    pub replay: Option<String>,
    /// Whether aborts wait while it stands still: for pairs of prefill and decode engines.
    #[serde(default)]
    pub defer_aborts: bool,
}

impl std::str::FromStr for RawWorker {
    type Err = String;

    fn from_str(written: &str) -> Result<Self, String> {
        let mut parts = written.split(',');
        let named = parts.next().and_then(|first| first.split_once('='));
        let (id, url) = named.ok_or("it has to be ID=URL[,kv=tcp://HOST:PORT][,replay=…]")?;
        let mut worker =
            Self { id: id.into(), url: url.into(), kv: None, replay: None, defer_aborts: false };
        for part in parts {
            let (socket, endpoint) = match part.split_once('=') {
                Some(("kv", endpoint)) => (&mut worker.kv, endpoint),
                Some(("replay", endpoint)) => (&mut worker.replay, endpoint),
                _ => return Err(format!("`{part}` is neither kv=… nor replay=…")),
            };
            if socket.replace(endpoint.into()).is_some() {
                return Err(format!("`{part}` is there twice"));
            }
        }
        Ok(worker)
    }
}

/// What the arguments put on top of environment and file.
#[derive(Clone, Debug, Default)]
pub struct Flags {
    /// Where to listen.
    pub listen: Option<String>,
    /// The database.
    pub db: Option<String>,
    /// The workers, instead of the file's.
    pub worker: Vec<RawWorker>,
}

/// The file.
#[derive(Clone, Debug, Default, Deserialize, Serialize, PartialEq, Eq)]
#[serde(deny_unknown_fields, default)]
pub struct Raw {
    /// Where to listen.
    pub listen: Option<String>,
    /// The database.
    pub db: Option<String>,
    /// The workers.
    pub worker: Vec<RawWorker>,
    /// API keys of the data plane; where there are none, none is asked for.
    pub key: Vec<RawKey>,
    /// Whether each tenant has a cache of its own, and what clients say of salt and priority does
    /// not count.
    pub isolation: Option<bool>,
    /// Pause between two looks at a worker, 50 to 60,000 ms.
    pub probe_every_ms: Option<u64>,
    /// Looks in a row without an answer before a worker is lost, 1 to 100.
    pub probe_failures_max: Option<u64>,
    /// How long requests may run without a token, 1,000 to 3,600,000 ms.
    pub progress_patience_ms: Option<u64>,
    /// How long a worker's door stays shut for its events to settle, 0 to 60,000 ms.
    pub settle_within_ms: Option<u64>,
    /// How long a request waits for a worker that serves, 0 to 600,000 ms.
    pub hold_ms: Option<u64>,
    /// How many requests may wait so, 0 to 100,000.
    pub hold_max: Option<u64>,
    /// First byte of an answer before its worker is looked at, 50 to 600,000 ms.
    pub first_byte_ms: Option<u64>,
    /// Largest request body, 1,024 to 1,073,741,824 bytes.
    pub body_bytes_max: Option<u64>,
    /// All request bodies in flight together, `body_bytes_max` to 1,099,511,627,776 bytes.
    pub bodies_bytes_max: Option<u64>,
    /// How long streams may go on after a stop was asked for, 0 to 3,600,000 ms.
    pub drain_ms: Option<u64>,
    /// How long fak serves on after a stop was asked for, while `/ready` says 503 and each answer
    /// closes its connection, 0 to 3,600,000 ms.
    pub drain_announce_ms: Option<u64>,
    /// How long a worker may make no progress before the first byte of a stream, 0 to 86,400,000
    /// ms; here and below, 0: as long as it takes.
    pub answer_first_byte_ms: Option<u64>,
    /// The same between two chunks of an answer.
    pub answer_idle_ms: Option<u64>,
    /// The same before an answer that is not streamed.
    pub answer_whole_ms: Option<u64>,
    /// How long a look at a worker may take.
    pub probe_within_ms: Option<u64>,
    /// How long a worker may take for a prompt's tokens.
    pub tokenize_within_ms: Option<u64>,
    /// How often a stream's client is given a comment while its worker says nothing, 0 to
    /// 3,600,000 ms; 0: never.
    pub keep_alive_ms: Option<u64>,
    /// Whether a wake on other weights has the engine load them from its checkpoint, by
    /// `/collective_rpc` with the method `reload_weights`.
    pub allow_reload_weights: Option<bool>,
    /// Headers that pass between clients and engines besides those that fak knows.
    pub pass_headers: Option<Vec<String>>,
    /// Origins whose pages may ask for inference, as `https://app.example`; or `*` alone.
    pub cors_origins: Option<Vec<String>>,
    /// What concerns weights.
    pub weights: RawWeights,
    /// Where all this stands, and what beside it cannot be read.
    #[serde(skip)]
    pub source: Source,
}

/// One worker, checked.
#[derive(Clone, Debug)]
pub struct WorkerSpec {
    /// Its name.
    pub id: String,
    /// Its URLs.
    pub endpoints: Endpoints,
    /// Its event socket, where it was named.
    pub kv: Option<Endpoint>,
    /// Its replay socket, likewise.
    pub replay: Option<Endpoint>,
    /// Whether aborts wait while it stands still.
    pub defer_aborts: bool,
}

/// The settings.
#[derive(Clone, Debug)]
pub struct Serve {
    /// Where to listen.
    pub listen: SocketAddr,
    /// The workers, in the order in which they were named.
    pub workers: Vec<WorkerSpec>,
    /// The database's URL.
    pub db: String,
    /// The folder of a database that nobody named: made where it is missing. One that was named
    /// has to be there, since a mistyped path would begin an empty ledger without a word.
    pub state_folder: Option<PathBuf>,
    /// What an admin has to show; `None` only on loopback.
    pub admin_key: Option<Secret>,
    /// The workers' API key.
    pub engine_key: Option<Secret>,
    /// Keys that clients may show; none is asked for where there are none.
    pub keys: Vec<KeySpec>,
    /// What of headers passes between clients and engines.
    pub passing: Passing,
    /// Origins whose pages may ask for inference; `*`: all.
    pub cors_origins: Vec<HeaderValue>,
    /// Whether each tenant has a cache of its own.
    pub isolation: bool,
    /// Key of the digest behind `cache_salt`.
    pub salt_key: Option<Secret>,
    /// Pause between two looks at a worker.
    pub probe_every: Duration,
    /// Looks in a row without an answer before a worker is lost.
    pub probe_failures_max: u32,
    /// How long requests may run without a token before their worker is suspect.
    pub progress_patience: Duration,
    /// How long a worker's door stays shut for its events to settle.
    pub settle_within: Duration,
    /// How long a request waits for a worker that serves.
    pub hold: Duration,
    /// How many requests may wait so.
    pub hold_max: usize,
    /// First byte of an answer before its worker is looked at.
    pub first_byte: Duration,
    /// Largest request body, in bytes.
    pub body_bytes_max: usize,
    /// All request bodies in flight together, in bytes.
    pub bodies_bytes_max: usize,
    /// How long streams may go on after a stop was asked for.
    pub drain: Duration,
    /// Other limits of time.
    pub limits: Limits,
    /// Whether a wake on other weights has the engine load them.
    pub allow_reload_weights: bool,
    /// Whether every request's salt carries the weight version, and not only that of a worker that
    /// may hold KV of other weights.
    pub salts_carry_version: bool,
    /// Where settings come from, by `key` or `table.key`; the rest are defaults.
    pub origins: BTreeMap<String, Origin>,
}

impl Raw {
    /// Reads the file at `path`. What of it is no TOML, no key or of a wrong kind is told by
    /// [`resolve`](Self::resolve), with the rest.
    ///
    /// # Errors
    ///
    /// [`Error::File`].
    pub fn read(path: &Path) -> Result<Self, Error> {
        let shown = path.display().to_string();
        match std::fs::read_to_string(path) {
            Ok(text) => Ok(Source::read(&text, shown)),
            Err(source) => Err(Error::File { path: shown, source }),
        }
    }

    /// Checks everything: flags go before the environment, that before these values, and those
    /// before the defaults. `embedded` workers come from elsewhere, so that none has to be named.
    ///
    /// # Errors
    ///
    /// Every setting that cannot be used.
    pub fn resolve(
        self,
        flags: Flags,
        lookup: Lookup<'_>,
        embedded: usize,
    ) -> Result<Serve, Faults> {
        let mut found = Found::new(&self.source, self.origins());
        let f = &mut found;
        let listen = self.listen(flags.listen, lookup, f);
        let key = |name, f: &mut Found<'_>| f.kept(secret(lookup, name).map_err(Error::from));
        let admin_key = self.admin_key(listen, lookup, f);
        let workers = self.workers(flags.worker, lookup, embedded, f);
        let (db, state_folder) = match self.db(flags.db, lookup, f) {
            Some(db) => (db, None),
            // Simulated workers of one run are not those of the next, nor real ones: their rows
            // belong into no ledger that lasts.
            None if workers.is_empty() => ("sqlite::memory:".to_owned(), None),
            None => f.kept(default_db(lookup)),
        };
        let isolation = self.isolation.unwrap_or(false);
        let engine_key = key(names::API_KEY, f);
        let secrets = (admin_key.as_ref(), engine_key.as_ref());
        let keys = keys::checked(&self.key, isolation, lookup, secrets, f);
        let failures = f.kept(number("probe_failures_max", self.probe_failures_max, 2, 1..=100));
        let hold_max = f.kept(number("hold_max", self.hold_max, 1_000, 0..=100_000));
        let body = self.body_bytes_max;
        let body = f.kept(number("body_bytes_max", body, 32 << 20, 1_024..=1 << 30));
        let serve = Serve {
            // Without one there is a fault, and this is not given out.
            listen: listen.unwrap_or(SocketAddr::from(([127, 0, 0, 1], 0))),
            workers,
            db,
            state_folder,
            admin_key,
            engine_key,
            keys,
            passing: f.kept(self.passing()),
            cors_origins: f.kept(self.cors_origins()),
            isolation,
            salt_key: key(names::SALT_KEY, f),
            probe_every: f.kept(ms("probe_every_ms", self.probe_every_ms, 1_000, 50..=60_000)),
            probe_failures_max: u32::try_from(failures).unwrap_or(u32::MAX),
            progress_patience: f.kept(ms(
                "progress_patience_ms",
                self.progress_patience_ms,
                60_000,
                1_000..=3_600_000,
            )),
            settle_within: f.kept(ms("settle_within_ms", self.settle_within_ms, 2_000, 0..=60_000)),
            hold: f.kept(ms("hold_ms", self.hold_ms, 0, 0..=600_000)),
            hold_max: usize::try_from(hold_max).unwrap_or(usize::MAX),
            first_byte: f.kept(ms("first_byte_ms", self.first_byte_ms, 2_000, 50..=600_000)),
            body_bytes_max: usize::try_from(body).unwrap_or(usize::MAX),
            bodies_bytes_max: f.kept(limits::bodies(self.bodies_bytes_max, body)),
            drain: f.kept(ms("drain_ms", self.drain_ms, 30_000, 0..=3_600_000)),
            limits: Limits::of(&self, f),
            allow_reload_weights: self.allow_reload_weights.unwrap_or(false),
            salts_carry_version: f.kept(self.weights.carries_version()),
            origins: BTreeMap::new(),
        };
        let origins = found.end()?;
        Ok(Serve { origins, ..serve })
    }

    /// Of what only the file can say: where it does.
    fn origins(&self) -> BTreeMap<String, Origin> {
        [
            ("probe_every_ms", self.probe_every_ms.is_some()),
            ("probe_failures_max", self.probe_failures_max.is_some()),
            ("progress_patience_ms", self.progress_patience_ms.is_some()),
            ("settle_within_ms", self.settle_within_ms.is_some()),
            ("hold_ms", self.hold_ms.is_some()),
            ("hold_max", self.hold_max.is_some()),
            ("first_byte_ms", self.first_byte_ms.is_some()),
            ("drain_ms", self.drain_ms.is_some()),
            ("allow_reload_weights", self.allow_reload_weights.is_some()),
            ("isolation", self.isolation.is_some()),
            ("weights.salt", self.weights.salt.is_some()),
            ("key", !self.key.is_empty()),
            ("pass_headers", self.pass_headers.is_some()),
            ("cors_origins", self.cors_origins.is_some()),
        ]
        .into_iter()
        .chain(limits::named(self))
        .filter(|(_, is_named)| *is_named)
        .map(|(key, _)| (key.to_owned(), Origin::File))
        .collect()
    }

    fn listen(
        &self,
        flag: Option<String>,
        lookup: Lookup<'_>,
        f: &mut Found<'_>,
    ) -> Option<SocketAddr> {
        const RIGHT: &str = "an IP address and a port, as 127.0.0.1:8080";
        let named = f.kept(text(lookup, names::LISTEN, RIGHT).map_err(Error::from));
        let (written, origin) = first(flag, (names::LISTEN, named), self.listen.clone());
        f.comes_from("listen", origin);
        let written = written.unwrap_or_else(|| "127.0.0.1:8080".to_owned());
        let bad = |_| Error::Value { field: "listen", value: written.clone(), right: RIGHT };
        f.kept_at("listen", written.parse().map_err(bad))
    }

    fn passing(&self) -> Result<Passing, Error> {
        Passing::new(self.pass_headers.as_deref().unwrap_or_default()).map_err(|value| {
            Error::Value {
                field: "pass_headers",
                value,
                right: "a header's name that is neither a secret's, nor fak's own, nor of one hop",
            }
        })
    }

    /// What an admin has to show. There has to be something where others than programs of this
    /// machine reach fak, and where clients have to show who they are.
    fn admin_key(
        &self,
        listen: Option<SocketAddr>,
        lookup: Lookup<'_>,
        f: &mut Found<'_>,
    ) -> Option<Secret> {
        let key = secret(lookup, names::ADMIN_KEY).map_err(Error::from);
        if matches!(key, Ok(None)) {
            if let Some(listen) = listen.filter(|listen| !is_loopback(*listen)) {
                f.wrong(Error::Unguarded { listen });
            }
            if !self.key.is_empty() {
                f.wrong(Error::KeysUnguarded);
            }
        }
        f.kept(key)
    }

    fn cors_origins(&self) -> Result<Vec<HeaderValue>, Error> {
        let written = self.cors_origins.as_deref().unwrap_or_default();
        let read = |origin: &String| {
            let is_right = (origin == "*" && written.len() == 1) || is_origin(origin);
            HeaderValue::try_from(origin).ok().filter(|_| is_right).ok_or_else(|| Error::Value {
                field: "cors_origins",
                value: origin.clone(),
                right: "an origin, as https://app.example, or \"*\" alone",
            })
        };
        written.iter().map(read).collect()
    }

    /// The database, where one is named.
    fn db(&self, flag: Option<String>, lookup: Lookup<'_>, f: &mut Found<'_>) -> Option<String> {
        let named = f.kept(text(lookup, names::DB, DB_RIGHT).map_err(Error::from));
        let (written, origin) = first(flag, (names::DB, named), self.db.clone());
        f.comes_from("db", origin);
        let db = written?;
        if !["sqlite:", "postgres://", "postgresql://"].iter().any(|kind| db.starts_with(kind)) {
            // What stands behind a scheme may hold a password.
            let value = match db.split_once(':') {
                Some((scheme, _)) => format!("{scheme}:…"),
                None => db.clone(),
            };
            f.wrong(Error::Db { value });
        }
        Some(db)
    }

    /// The workers of the flags, else of the file, else the one of the environment: that is there
    /// for `fak run` too, and a fleet that somebody wrote down goes before it.
    fn workers(
        &self,
        flags: Vec<RawWorker>,
        lookup: Lookup<'_>,
        embedded: usize,
        f: &mut Found<'_>,
    ) -> Vec<WorkerSpec> {
        let (named, origin) = match flags.is_empty() {
            true => (&self.worker, Origin::File),
            false => (&flags, Origin::Flag),
        };
        f.comes_from("worker", origin);
        let mut count = named.len().saturating_add(embedded);
        let numbered = named.iter().enumerate();
        let checked = numbered.filter_map(|(n, raw)| raw.check(&format!("worker.{n}"), f));
        let mut workers: Vec<_> = checked.collect();
        if count == 0 {
            let one = from_environment(lookup);
            count = usize::from(!matches!(one, Ok(None)));
            workers.extend(f.kept(one));
            f.comes_from("worker", Origin::Environment(names::BASE_URL));
        }
        match count {
            0 if f.is_file_faulty() => {}
            0 => f.wrong(Error::NoWorker),
            1..=WORKERS_MAX => apart::check(&workers, embedded, |id, error| {
                let at = named.iter().rposition(|raw| raw.id == *id).unwrap_or_default();
                f.wrong_at(&format!("worker.{at}"), error);
            }),
            count => {
                let (value, range) = (count as u64, 1..=WORKERS_MAX as u64);
                f.wrong(Error::Range { field: "workers", value, range });
            }
        }
        workers
    }
}

impl RawWorker {
    /// This worker, which stands at `place`, where nothing is wrong with it.
    fn check(&self, place: &str, f: &mut Found<'_>) -> Option<WorkerSpec> {
        let id = self.id.clone();
        let at = |field: &str| format!("{place}.{field}");
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        let is_id = (1..=super::WORKER_ID_BYTES_MAX).contains(&id.len()) && id.bytes().all(plain);
        if !is_id {
            let (value, right) = (id.clone(), super::WORKER_ID_RIGHT);
            f.wrong_at(&at("id"), Error::Value { field: "worker", value, right });
        }
        let endpoints = f.kept_at(
            &at("url"),
            Endpoints::new(&self.url).map_err(|reason| {
                let value = shown_url(&self.url, &reason);
                Error::Url { id: id.clone(), value, reason }
            }),
        );
        let host = endpoints.as_ref().map_or("localhost", |all| all.origin().host()).to_owned();
        let socket = |field, written: &Option<String>| {
            let wrong = |reason| Error::Socket { id: id.clone(), field, reason };
            let parse = |value: &String| Endpoint::parse(value, &host).map_err(wrong);
            written.as_ref().map(parse).transpose()
        };
        let kv = f.kept_at(&at("kv"), socket("kv", &self.kv));
        let replay = f.kept_at(&at("replay"), socket("replay", &self.replay));
        if let (None, Some(value)) = (&self.kv, &self.replay) {
            let (id, value) = (id.clone(), value.clone());
            f.wrong_at(&at("replay"), Error::ReplayAlone { id, value });
            return None;
        }
        let (endpoints, kv, replay) = (endpoints?, kv?, replay?);
        is_id.then_some(WorkerSpec { id, endpoints, kv, replay, defer_aborts: self.defer_aborts })
    }
}

/// The one worker of the `FAK_VLLM_*` variables, if they name one.
fn from_environment(lookup: Lookup<'_>) -> Result<Option<WorkerSpec>, Error> {
    if text(lookup, names::BASE_URL, super::BASE_URL_RIGHT)?.is_none() {
        return Ok(None);
    }
    let Worker { id, endpoints, kv, .. } = Worker::from_environment(lookup)?;
    let (kv, replay) = (kv.events, kv.replay);
    Ok(Some(WorkerSpec { id, endpoints, kv, replay, defer_aborts: false }))
}

/// A file of the user's state, in a folder of fak's own.
fn default_db(lookup: Lookup<'_>) -> Result<(String, Option<PathBuf>), Error> {
    let state = lookup("XDG_STATE_HOME").filter(|v| !v.is_empty()).map(PathBuf::from);
    let home = lookup("HOME").map(|home| PathBuf::from(home).join(".local/state"));
    match state.or(home).map(|state| state.join("fak")) {
        Some(folder) => Ok((format!("sqlite:{}", folder.join("fak.db").display()), Some(folder))),
        None => Err(super::Error::Missing { name: names::DB, right: "sqlite:PATH" }.into()),
    }
}

/// Whether only this machine reaches what listens there. An IPv4 address may be written as IPv6.
#[must_use]
pub fn is_loopback(listen: SocketAddr) -> bool {
    listen.ip().to_canonical().is_loopback()
}

/// The first of flag, environment and file that says anything.
fn first(
    flag: Option<String>,
    (name, environment): (&'static str, Option<String>),
    file: Option<String>,
) -> (Option<String>, Origin) {
    match (flag, environment, file) {
        (Some(flag), ..) => (Some(flag), Origin::Flag),
        (None, Some(value), _) => (Some(value), Origin::Environment(name)),
        (None, None, Some(value)) => (Some(value), Origin::File),
        (None, None, None) => (None, Origin::Default),
    }
}

/// Whether a browser may send this as `Origin`.
fn is_origin(text: &str) -> bool {
    let Ok(uri) = text.parse::<Uri>() else { return false };
    let is_http = matches!(uri.scheme_str(), Some("http" | "https"));
    is_http && !text.ends_with('/') && uri.path() == "/" && uri.query().is_none()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsString;

    fn resolve(file: &str, env: &[(&str, &str)]) -> Result<Serve, String> {
        let raw: Raw = toml::from_str(file).map_err(|e| e.to_string())?;
        let lookup = |name: &str| {
            let all = [("HOME", "/home/op")];
            env.iter().chain(&all).find(|(k, _)| *k == name).map(|(_, v)| OsString::from(v))
        };
        raw.resolve(Flags::default(), &lookup, 0).map_err(|e| e.to_string())
    }

    const ONE: &str = "[[worker]]\nid = \"a\"\nurl = \"http://gpu:8000/v1\"\n";

    #[test]
    fn defaults_are_loopback_and_a_file_of_the_users() {
        let serve = resolve(ONE, &[]).expect("it is enough");
        assert!(!serve.workers[0].defer_aborts);
        assert!(serve.listen.ip().is_loopback());
        assert_eq!(serve.db, "sqlite:/home/op/.local/state/fak/fak.db");
        assert_eq!(serve.state_folder, Some("/home/op/.local/state/fak".into()));
        let named = resolve(&format!("db = \"sqlite:x.db\"\n{ONE}"), &[]).expect("it is enough");
        assert_eq!(named.state_folder, None);
        assert_eq!(serve.workers[0].id, "a");
        assert_eq!(serve.probe_every, Duration::from_secs(1));
        assert!(!serve.allow_reload_weights);
        assert!(!serve.salts_carry_version);
        let salted = format!("{ONE}[weights]\nsalt = \"version\"\n");
        assert!(resolve(&salted, &[]).expect("it is enough").salts_carry_version);
        let sims = Raw::default().resolve(Flags::default(), &|_| None, 2).expect("it is enough");
        assert_eq!(sims.db, "sqlite::memory:", "simulated workers write into no ledger that lasts");
    }

    #[test]
    fn a_listener_that_others_reach_needs_an_admin_key() {
        let open = format!("listen = \"0.0.0.0:80\"\n{ONE}");
        let refused = resolve(&open, &[]).expect_err("unguarded");
        assert!(refused.contains("FAK_ADMIN_KEY"), "{refused}");
        assert!(resolve(&open, &[("FAK_ADMIN_KEY", "k3y")]).is_ok());
        let unusable = resolve(&open, &[("FAK_ADMIN_KEY", "a\nb")]).expect_err("no header has it");
        assert!(!unusable.contains("has to be set"), "{unusable}");
        for (listen, is_own) in [
            ("[::1]:80", true),
            ("[::ffff:127.0.0.1]:80", true),
            ("[::ffff:10.0.0.1]:80", false),
            ("[::]:80", false),
        ] {
            assert_eq!(
                resolve(&format!("listen = {listen:?}\n{ONE}"), &[]).is_ok(),
                is_own,
                "{listen}"
            );
        }
    }

    #[test]
    fn a_setting_that_cannot_be_used_is_named_with_its_value() {
        for (file, told) in [
            ("", "--worker ID=URL"),
            ("listen = \"here\"\n[[worker]]\nid=\"a\"\nurl=\"http://h\"", "here"),
            ("probe_every_ms = 1\n[[worker]]\nid=\"a\"\nurl=\"http://h\"", "probe_every_ms=1"),
            ("[[worker]]\nid=\"a b\"\nurl=\"http://h\"", "a b"),
            ("[[worker]]\nid=\"a\"\nurl=\"ftp://h\"", "worker a"),
            ("[[worker]]\nid=\"a\"\nurl=\"http://h\"\nkv=\"ipc://x\"", "kv"),
            ("[[worker]]\nid=\"a\"\nurl=\"http://h\"\nport=3", "port"),
            ("[[worker]]\nid=\"a\"\nurl=\"http://h\"\nreplay=\"tcp://h:5\"", "worker a: replay"),
            ("lsten = \"x\"", "lsten"),
            ("pass_headers = [\"Cookie\"]\n[[worker]]\nid=\"a\"\nurl=\"http://h\"", "Cookie"),
            ("allow_reload_weights = 1\n[[worker]]\nid=\"a\"\nurl=\"http://h\"", "bool"),
            ("[weights]\nsalt = \"v\"\n[[worker]]\nid=\"a\"\nurl=\"http://h\"", "weights.salt"),
        ] {
            let error = resolve(file, &[]).expect_err(file);
            assert!(error.contains(told), "{file}: {error}");
        }
        let error = resolve(&format!("db = \"fak.db\"\n{ONE}"), &[]).expect_err("no URL");
        assert!(error.contains("\"fak.db\"") && error.contains("sqlite:PATH"), "{error}");
        let error = resolve(&format!("db = \"mysql://u:hidden@h\"\n{ONE}"), &[]);
        let error = error.expect_err("another database");
        assert!(error.contains("mysql:") && !error.contains("hidden"), "{error}");
    }

    #[test]
    fn every_setting_that_cannot_be_used_is_told_with_its_line() {
        let file = "listen = \"here\"\nprobe_every_ms = 1\nhold_ms = \"x\"\n\
            [[worker]]\nid = \"a b\"\nurl = \"ftp://h\"\nkv = \"ipc://x\"\n\
            [[worker]]\nid = \"b\"\nurl = \"http://h\"\n\
            [[worker]]\nid = \"b\"\nurl = \"http://i\"\n\
            [[key]]\ntenant = \"a\"\nenv = \"NONE\"\n\
            [weights]\nsalt = \"v\"\n";
        let raw = Source::read(file, "fak.toml".to_owned());
        let flags = Flags { db: Some("mysql:x".to_owned()), ..Flags::default() };
        let told = raw.resolve(flags, &|_| None, 0).expect_err("all of it").to_string();
        let lines: Vec<_> = told.lines().collect();
        assert_eq!(lines[0], "11 settings cannot be used:", "{told}");
        for line in [
            "fak.toml, line 1: listen=\"here\" is not an IP address",
            "fak.toml, line 2: probe_every_ms=1 is not from 50 to 60000",
            "fak.toml, line 3: hold_ms: invalid type: string \"x\"",
            "fak.toml, line 5: worker=\"a b\" is not ",
            "fak.toml, line 6: worker a b: url=\"ftp://h\" does not start with",
            "fak.toml, line 7: worker a b: kv: ",
            "fak.toml, line 11: worker=\"b\" is named twice",
            "fak.toml, line 14: key of tenant \"a\": environment variable NONE is not set",
            "fak.toml, line 18: weights.salt=\"v\" is not off or version",
            "db=\"mysql:…\" is not sqlite:PATH",
        ] {
            let is_told = lines.iter().any(|told| told.trim_start().starts_with(line));
            assert!(is_told, "{line}\n{told}");
        }
    }

    #[test]
    fn workers_are_told_apart_by_name_and_by_url() {
        let error = resolve(&format!("{ONE}{ONE}"), &[]).expect_err("twice");
        assert!(error.contains("\"a\" is named twice"), "{error}");
        let same = format!("{ONE}[[worker]]\nid = \"b\"\nurl = \"http://gpu:8000\"\n");
        let error = resolve(&same, &[]).expect_err("one engine");
        for told in ["worker b", "http://gpu:8000", "worker a"] {
            assert!(error.contains(told), "{told}: {error}");
        }
        let raw = || toml::from_str::<Raw>("[[worker]]\nid = \"sim-1\"\nurl = \"http://h\"\n");
        let home = |name: &str| (name == "HOME").then(|| OsString::from("/home/op"));
        let embed = |count| raw().expect("TOML").resolve(Flags::default(), &home, count);
        assert!(embed(1).is_ok());
        assert!(embed(2).expect_err("a simulated one").to_string().contains("\"sim-1\""));
        let many = embed(WORKERS_MAX).expect_err("one too many").to_string();
        assert!(many.contains("workers=1025 is not from 1 to 1024"), "{many}");
    }

    #[test]
    fn a_workers_url_that_is_refused_is_told_unless_it_holds_a_password() {
        let told = |url: &str| {
            let file = format!("[[worker]]\nid = \"a\"\nurl = {url:?}\n");
            resolve(&file, &[]).expect_err("refused")
        };
        let ftp = told("ftp://gpu:8000");
        assert!(ftp.starts_with("worker a: url=\"ftp://gpu:8000\" does not start with"), "{ftp}");
        let secret = told("http://user:hunter2@gpu:8000");
        assert!(secret.starts_with("worker a: url=\"(secret)\" "), "{secret}");
        assert!(!secret.contains("hunter2"), "{secret}");
    }

    #[test]
    fn an_event_socket_is_one_workers_and_local_names_are_one_machine() {
        let worker = |id: &str, port: u16, sockets: &str| {
            format!("[[worker]]\nid = {id:?}\nurl = \"http://h:{port}\"\n{sockets}\n")
        };
        let kv = "kv = \"tcp://127.0.0.1:5557\"";
        for (first, second, told) in [
            (kv, "kv = \"tcp://localhost:5557\"", ["worker b: kv", "kv of worker a"]),
            (kv, "kv = \"tcp://[::1]:5557\"", ["worker b: kv", "kv of worker a"]),
            (
                "kv = \"tcp://h:1\"\nreplay = \"tcp://h:2\"",
                "kv = \"tcp://H:2\"",
                ["worker b: kv", "replay of worker a"],
            ),
            ("kv = \"tcp://h:1\"\nreplay = \"tcp://*:1\"", "", ["worker a: replay", "worker a"]),
        ] {
            let file = worker("a", 1, first) + &worker("b", 2, second);
            let error = resolve(&file, &[]).expect_err(&file);
            assert!(told.iter().all(|part| error.contains(part)), "{error}");
        }
        let apart = worker("a", 1, kv) + &worker("b", 2, "kv = \"tcp://127.0.0.1:5558\"");
        assert!(resolve(&apart, &[]).is_ok());
        let names = ["localhost", "127.0.0.1", "[::1]", "LOCALHOST", "[::ffff:127.0.0.1]"];
        for name in &names[1..] {
            let at =
                |id: &str, host| format!("[[worker]]\nid={id:?}\nurl=\"http://{host}:8000\"\n");
            let error = resolve(&(at("a", names[0]) + &at("b", name)), &[]).expect_err(name);
            assert!(error.contains("an engine is one worker"), "{error}");
        }
    }

    #[test]
    fn the_environment_goes_before_the_file() {
        let file = format!("listen = \"127.0.0.1:1\"\ndb = \"sqlite:file.db\"\n{ONE}");
        let env = [(names::LISTEN, "127.0.0.1:2"), (names::DB, "sqlite:env.db")];
        let serve = resolve(&file, &env).expect("it is enough");
        assert_eq!((serve.listen.port(), serve.db.as_str()), (2, "sqlite:env.db"));
        let serve = resolve(&file, &[]).expect("it is enough");
        assert_eq!((serve.listen.port(), serve.db.as_str()), (1, "sqlite:file.db"));
    }

    #[test]
    fn isolation_needs_keys_and_a_key_is_never_in_the_file() {
        let isolated = format!("isolation = true\n{ONE}");
        assert!(resolve(&isolated, &[]).expect_err("no key").contains("[[key]]"));
        let keyed = format!("{isolated}[[key]]\ntenant = \"a\"\nenv = \"A\"\n");
        let unguarded = resolve(&keyed, &[("A", "sk-1")]).expect_err("no admin key");
        assert!(unguarded.contains("FAK_ADMIN_KEY"), "{unguarded}");
        let env = [("A", "sk-1"), ("FAK_ADMIN_KEY", "k3y")];
        let serve = resolve(&keyed, &env).expect("it is enough");
        assert!(serve.isolation && serve.keys[0].secret.expose() == "sk-1");
        let folder = std::env::temp_dir().join(format!("fak-serve-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let file = folder.join("fak.toml");
        std::fs::write(&file, format!("{ONE}[[key]]\ntenant = \"a\"\nsecret = \"sk-hidden\"\n"))
            .expect("a file");
        let raw = Raw::read(&file).expect("it is there");
        let told =
            raw.resolve(Flags::default(), &|_| None, 0).expect_err("it is inline").to_string();
        assert!(told.contains("line 6") && told.contains("secret"), "{told}");
        assert!(!told.contains("hidden"), "{told}");
        std::fs::remove_dir_all(&folder).expect("its own folder");
    }

    #[test]
    fn one_worker_may_come_from_the_environment() {
        let env = [(names::BASE_URL, "http://gpu-1:8000/v1"), (names::WORKER_ID, "g1")];
        let serve = resolve("", &env).expect("it is enough");
        assert_eq!(serve.workers[0].id, "g1");
        let serve = resolve(ONE, &env).expect("the file goes first");
        assert_eq!(serve.workers[0].id, "a");
    }

    #[test]
    fn a_worker_is_written_in_one_word() {
        let raw: RawWorker = "v0=http://h:1/v1,kv=tcp://*:5,replay=tcp://*:6".parse().expect("ok");
        let source = Source::default();
        let spec = raw.check("worker.0", &mut Found::new(&source, BTreeMap::new())).expect("ok");
        assert_eq!(spec.kv.expect("kv").to_string(), "tcp://h:5");
        assert!("v0".parse::<RawWorker>().is_err());
        assert!("v0=http://h,x=1".parse::<RawWorker>().is_err());
        assert!("v0=http://h,kv=tcp://h:1,kv=tcp://h:2".parse::<RawWorker>().is_err());
    }
}
