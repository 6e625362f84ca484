//! From environment to checked settings, in one place.
//!
//! Invariant: nothing else in the crate reads the environment, and an error names the variable, its
//! value (unless it is a secret) and what would be right.

mod apart;
pub mod faults;
pub mod keys;
pub mod limits;
pub mod print;
pub mod serve;
pub mod source;
mod weights;

use std::ffi::OsString;

use crate::engine::{BadUrl, Endpoints, Secret};
use crate::events::endpoint::{self, Endpoint};

/// The names of the environment, as operators know them.
pub mod names {
    /// Where the engine is, with or without `/v1`.
    pub const BASE_URL: &str = "FAK_VLLM_BASE_URL";
    /// The model to ask for.
    pub const MODEL: &str = "FAK_VLLM_MODEL";
    /// The engine's API key.
    pub const API_KEY: &str = "FAK_VLLM_API_KEY";
    /// The worker's name in rows, labels and headers.
    pub const WORKER_ID: &str = "FAK_VLLM_WORKER_ID";
    /// Where metrics are, if not at the engine itself.
    pub const METRICS_URL: &str = "FAK_VLLM_METRICS_URL";
    /// Whether the engine runs `--scheduling-policy priority`.
    pub const PRIORITY_SCHEDULING: &str = "FAK_VLLM_PRIORITY_SCHEDULING";
    /// The event socket, where `/kv_event_sources` cannot tell.
    pub const KV_EVENTS: &str = "FAK_VLLM_KV_EVENTS";
    /// The replay socket, likewise.
    pub const KV_REPLAY: &str = "FAK_VLLM_KV_REPLAY";
    /// Key of the digest behind `cache_salt`; without it a public one is used.
    pub const SALT_KEY: &str = "FAK_CACHE_SALT_KEY";
    /// What an admin has to show.
    pub const ADMIN_KEY: &str = "FAK_ADMIN_KEY";
    /// Where the gateway listens.
    pub const LISTEN: &str = "FAK_LISTEN";
    /// The gateway's database.
    pub const DB: &str = "FAK_DB";
    /// Where the clients of the control API find fak.
    pub const ADDR: &str = "FAK_ADDR";
    /// The admin key that they show.
    pub const KEY: &str = "FAK_KEY";
    /// What is logged, as in `fak=debug`; warnings where it is not set.
    pub const LOG: &str = "FAK_LOG";
}

/// Longest worker id, in bytes. It becomes a label and a header value.
const WORKER_ID_BYTES_MAX: usize = 64;
const WORKER_ID_RIGHT: &str = "1 to 64 of the characters A-Z a-z 0-9 . _ -";

/// A setting that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A variable that has no default is not set.
    #[error("{name} is not set; it has to be {right}")]
    Missing {
        /// The variable.
        name: &'static str,
        /// What would be right.
        right: &'static str,
    },
    /// A URL that is refused.
    #[error("{name}={value:?} {reason}; it has to be {right}")]
    Url {
        /// The variable.
        name: &'static str,
        /// Its value.
        value: String,
        /// Why it is refused.
        reason: BadUrl,
        /// What would be right.
        right: &'static str,
    },
    /// An event socket that is refused.
    #[error("{name}: {reason}")]
    Socket {
        /// The variable.
        name: &'static str,
        /// The value, and what is wrong with it.
        reason: endpoint::Error,
    },
    /// A replay socket without the event socket that it belongs to.
    #[error("{name}={value:?} needs {} beside it", names::KV_EVENTS)]
    Alone {
        /// The variable.
        name: &'static str,
        /// Its value.
        value: String,
    },
    /// Any other value that is refused.
    #[error("{name}={value:?} is not {right}")]
    Value {
        /// The variable.
        name: &'static str,
        /// Its value; `(secret)` for a secret.
        value: String,
        /// What would be right.
        right: &'static str,
    },
}

/// Where one variable's value comes from: the process environment, or a map in a test.
pub type Lookup<'a> = &'a dyn Fn(&str) -> Option<OsString>;

/// The process environment.
#[must_use]
pub fn process_environment(name: &str) -> Option<OsString> {
    std::env::var_os(name)
}

/// The process's arguments, the program's name first.
#[must_use]
pub fn arguments() -> Vec<OsString> {
    std::env::args_os().collect()
}

/// One vLLM worker, checked.
#[derive(Clone, Debug)]
pub struct Worker {
    /// Its name.
    pub id: String,
    /// Its URLs.
    pub endpoints: Endpoints,
    /// The model to ask for; `None`: the one that it serves.
    pub model: Option<String>,
    /// Its API key.
    pub api_key: Option<Secret>,
    /// Whether it was declared to schedule by priority.
    pub priority_scheduling: bool,
    /// Its event sockets, where they were named; else they are asked for.
    pub kv: KvSockets,
    /// Key of the digest behind `cache_salt`.
    pub salt_key: Option<Secret>,
}

/// Event sockets that were named in the configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KvSockets {
    /// The publisher of rank 0.
    pub events: Option<Endpoint>,
    /// The replay socket of rank 0.
    pub replay: Option<Endpoint>,
}

impl Worker {
    /// Reads the `FAK_VLLM_*` variables. One that is empty counts as not set.
    ///
    /// # Errors
    ///
    /// The first setting that cannot be used.
    pub fn from_environment(lookup: Lookup<'_>) -> Result<Self, Error> {
        let base_url = required(lookup, names::BASE_URL, BASE_URL_RIGHT)?;
        Self::at(&base_url, lookup)
    }

    /// As [`from_environment`](Self::from_environment), for an engine whose URL is known.
    ///
    /// # Errors
    ///
    /// The first setting that cannot be used.
    pub fn at(base_url: &str, lookup: Lookup<'_>) -> Result<Self, Error> {
        let mut endpoints =
            Endpoints::new(base_url).map_err(url(names::BASE_URL, base_url, BASE_URL_RIGHT))?;
        if let Some(metrics) = text(lookup, names::METRICS_URL, METRICS_URL_RIGHT)? {
            endpoints = endpoints.with_metrics_url(&metrics).map_err(url(
                names::METRICS_URL,
                &metrics,
                METRICS_URL_RIGHT,
            ))?;
        }
        let host = endpoints.origin().host().to_owned();
        let kv = KvSockets {
            events: socket(lookup, names::KV_EVENTS, &host)?,
            replay: socket(lookup, names::KV_REPLAY, &host)?,
        };
        if let (None, Some(replay)) = (&kv.events, &kv.replay) {
            return Err(Error::Alone { name: names::KV_REPLAY, value: replay.to_string() });
        }
        Ok(Self {
            id: worker_id(lookup)?,
            endpoints,
            model: text(lookup, names::MODEL, "the name of a served model")?,
            api_key: secret(lookup, names::API_KEY)?,
            priority_scheduling: boolean(lookup, names::PRIORITY_SCHEDULING)?,
            kv,
            salt_key: secret(lookup, names::SALT_KEY)?,
        })
    }
}

const BASE_URL_RIGHT: &str = "http(s)://host[:port], with or without /v1";
const METRICS_URL_RIGHT: &str = "http(s)://host[:port]/metrics";
const SOCKET_RIGHT: &str = "tcp://host:port";

fn url<'a>(
    name: &'static str,
    value: &'a str,
    right: &'static str,
) -> impl FnOnce(BadUrl) -> Error + 'a {
    move |reason| Error::Url { name, value: shown_url(value, &reason), reason, right }
}

/// A URL that is refused, as it may be shown.
fn shown_url(value: &str, reason: &BadUrl) -> String {
    // The value holds a password then.
    if matches!(reason, BadUrl::UserInfo) { "(secret)".to_owned() } else { value.to_owned() }
}

fn text(
    lookup: Lookup<'_>,
    name: &'static str,
    right: &'static str,
) -> Result<Option<String>, Error> {
    match lookup(name) {
        None => Ok(None),
        Some(value) if value.is_empty() => Ok(None),
        Some(value) => match value.into_string() {
            Ok(value) => Ok(Some(value)),
            Err(value) => {
                Err(Error::Value { name, value: value.to_string_lossy().into_owned(), right })
            }
        },
    }
}

fn required(lookup: Lookup<'_>, name: &'static str, right: &'static str) -> Result<String, Error> {
    text(lookup, name, right)?.ok_or(Error::Missing { name, right })
}

fn secret(lookup: Lookup<'_>, name: &'static str) -> Result<Option<Secret>, Error> {
    const RIGHT: &str = "a key of printable ASCII characters, without spaces";
    let bad = || Error::Value { name, value: "(secret)".to_owned(), right: RIGHT };
    match lookup(name) {
        None => Ok(None),
        Some(value) if value.is_empty() => Ok(None),
        Some(value) => {
            let value = value.into_string().map_err(|_| bad())?;
            let printable = value.bytes().all(|byte| byte.is_ascii_graphic());
            if printable { Ok(Some(Secret::new(value))) } else { Err(bad()) }
        }
    }
}

fn boolean(lookup: Lookup<'_>, name: &'static str) -> Result<bool, Error> {
    const RIGHT: &str = "one of 1, true, 0, false";
    match text(lookup, name, RIGHT)?.as_deref() {
        None | Some("0" | "false") => Ok(false),
        Some("1" | "true") => Ok(true),
        Some(value) => Err(Error::Value { name, value: value.to_owned(), right: RIGHT }),
    }
}

fn worker_id(lookup: Lookup<'_>) -> Result<String, Error> {
    const RIGHT: &str = WORKER_ID_RIGHT;
    let Some(id) = text(lookup, names::WORKER_ID, RIGHT)? else {
        return Ok("vllm".to_owned());
    };
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    if id.len() <= WORKER_ID_BYTES_MAX && id.bytes().all(plain) {
        Ok(id)
    } else {
        Err(Error::Value { name: names::WORKER_ID, value: id, right: RIGHT })
    }
}

fn socket(lookup: Lookup<'_>, name: &'static str, host: &str) -> Result<Option<Endpoint>, Error> {
    text(lookup, name, SOCKET_RIGHT)?
        .map(|value| Endpoint::parse(&value, host).map_err(|reason| Error::Socket { name, reason }))
        .transpose()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::Data;
    use std::collections::HashMap;

    fn worker(pairs: &[(&str, &str)]) -> Result<Worker, Error> {
        let map: HashMap<&str, OsString> = pairs.iter().map(|(k, v)| (*k, v.into())).collect();
        Worker::from_environment(&|name| map.get(name).cloned())
    }

    const BASE: (&str, &str) = (names::BASE_URL, "http://gpu-1:8000/v1");

    #[test]
    fn defaults_fill_in_what_is_not_set() {
        let worker = worker(&[BASE, (names::MODEL, "")]).expect("enough");
        assert_eq!(worker.id, "vllm");
        assert_eq!(worker.model, None);
        assert_eq!(worker.kv, KvSockets::default());
        assert!(!worker.priority_scheduling);
        let uri = |route| worker.endpoints.data(route).uri().to_string();
        assert_eq!(uri(Data::Metrics), "http://gpu-1:8000/metrics");
        assert_eq!(uri(Data::Completions), "http://gpu-1:8000/v1/completions");
    }

    #[test]
    fn every_variable_is_read() {
        let worker = worker(&[
            BASE,
            (names::MODEL, "m"),
            (names::API_KEY, "sk-1"),
            (names::WORKER_ID, "w0"),
            (names::METRICS_URL, "http://exporter:9/metrics"),
            (names::PRIORITY_SCHEDULING, "1"),
            (names::KV_EVENTS, "tcp://*:5557"),
            (names::KV_REPLAY, "tcp://gpu-1:5558"),
            (names::SALT_KEY, "k"),
        ])
        .expect("right");
        assert_eq!((worker.id.as_str(), worker.model.as_deref()), ("w0", Some("m")));
        assert_eq!(worker.api_key.map(|key| key.expose().to_owned()).as_deref(), Some("sk-1"));
        assert!(worker.priority_scheduling && worker.salt_key.is_some());
        let sockets = [worker.kv.events, worker.kv.replay].map(|s| s.expect("set").to_string());
        assert_eq!(sockets, ["tcp://gpu-1:5557", "tcp://gpu-1:5558"]);
        let metrics = worker.endpoints.data(Data::Metrics);
        assert_eq!(metrics.uri().to_string(), "http://exporter:9/metrics");
    }

    #[test]
    fn an_error_names_variable_value_and_what_would_be_right() {
        let message = |pairs: &[(&str, &str)]| worker(pairs).expect_err("wrong").to_string();
        assert_eq!(
            message(&[]),
            "FAK_VLLM_BASE_URL is not set; it has to be http(s)://host[:port], with or without /v1"
        );
        assert_eq!(
            message(&[(names::BASE_URL, "gpu-1:8000")]),
            "FAK_VLLM_BASE_URL=\"gpu-1:8000\" does not start with http:// or https://; \
             it has to be http(s)://host[:port], with or without /v1"
        );
        assert_eq!(
            message(&[BASE, (names::PRIORITY_SCHEDULING, "yes")]),
            "FAK_VLLM_PRIORITY_SCHEDULING=\"yes\" is not one of 1, true, 0, false"
        );
        for (name, value) in [
            (names::WORKER_ID, "a b"),
            (names::KV_EVENTS, "tcp://h:0"),
            (names::KV_REPLAY, "ipc:///tmp/x"),
            (names::METRICS_URL, "http://h/other"),
        ] {
            let message = message(&[BASE, (name, value)]);
            assert!(message.contains(name) && message.contains(value), "{message}");
        }
        let alone = message(&[BASE, (names::KV_REPLAY, "tcp://h:1")]);
        assert!(alone.contains(names::KV_REPLAY) && alone.contains(names::KV_EVENTS), "{alone}");
    }

    #[test]
    fn a_secret_is_never_in_a_message() {
        let bad_key = worker(&[BASE, (names::API_KEY, "sk-hidden\n")]).expect_err("newline");
        let password = worker(&[(names::BASE_URL, "http://u:hidden@h")]).expect_err("password");
        for error in [bad_key, password] {
            assert!(!error.to_string().contains("hidden"), "{error}");
            assert!(!format!("{error:?}").contains("hidden"), "{error:?}");
        }
    }
}
