//! What is wrong with the settings of `fak serve`, all of it together.
//!
//! Invariant: each fault names its setting, the value (but of a secret) and what would be right,
//! and the line where that stands in the settings' file.

use std::collections::BTreeMap;
use std::error::Error as _;
use std::net::SocketAddr;
use std::ops::RangeInclusive;

use super::names;
use super::print::Origin;
use super::serve::DB_RIGHT;
use super::source::Source;
use crate::engine::BadUrl;
use crate::events::endpoint;

/// A setting of `fak serve` that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file cannot be read.
    #[error("{path}: cannot be read")]
    File {
        /// The file.
        path: String,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The file is no TOML, has a key that is none, or a value of a wrong kind.
    #[error("{path}, line {line}: {problem}")]
    Toml {
        /// The file.
        path: String,
        /// From 1.
        line: usize,
        /// What is wrong there.
        problem: String,
    },
    /// An API key of the data plane.
    #[error("key of tenant {tenant:?}: {place} {problem}")]
    Key {
        /// Whose it is.
        tenant: String,
        /// Where its secret is to be.
        place: String,
        /// What is wrong.
        problem: String,
    },
    /// Tenants are to be kept apart, and nothing tells them apart.
    #[error("isolation=true needs a [[key]] for each tenant")]
    NoKey,
    /// An environment variable.
    #[error(transparent)]
    Environment(#[from] super::Error),
    /// A worker's URL.
    #[error("worker {id}: url={value:?} {reason}; it has to be {}", super::BASE_URL_RIGHT)]
    Url {
        /// The worker.
        id: String,
        /// Its value; `(secret)` where it holds a password.
        value: String,
        /// What is wrong.
        reason: BadUrl,
    },
    /// A worker's event socket.
    #[error("worker {id}: {field}: {reason}")]
    Socket {
        /// The worker.
        id: String,
        /// `kv` or `replay`.
        field: &'static str,
        /// What is wrong.
        reason: endpoint::Error,
    },
    /// Two workers of one name.
    #[error("worker={id:?} is named twice; each needs a name of its own")]
    SameName {
        /// The name.
        id: String,
    },
    /// Two workers that are one engine.
    #[error("worker {id}: url {url} is that of worker {other} already; an engine is one worker")]
    SameUrl {
        /// The later one.
        id: String,
        /// The earlier one.
        other: String,
        /// The URL of both.
        url: String,
    },
    /// Two event sockets that are one.
    #[error(
        "worker {id}: {field}={socket} is {other_field} of worker {other} already; each engine \
         publishes on sockets of its own"
    )]
    SameSocket {
        /// The later one.
        id: String,
        /// `kv` or `replay`.
        field: &'static str,
        /// The socket.
        socket: String,
        /// What it is of the earlier one.
        other_field: &'static str,
        /// The earlier one, which may be the same.
        other: String,
    },
    /// The database.
    #[error("db={value:?} is not {DB_RIGHT}")]
    Db {
        /// As far as it can hold no password.
        value: String,
    },
    /// A replay socket without the event socket that it belongs to.
    #[error("worker {id}: replay={value:?} needs kv=tcp://host:port beside it")]
    ReplayAlone {
        /// The worker.
        id: String,
        /// The replay socket.
        value: String,
    },
    /// Any other value.
    #[error("{field}={value:?} is not {right}")]
    Value {
        /// The key, or the flag.
        field: &'static str,
        /// Its value.
        value: String,
        /// What would be right.
        right: &'static str,
    },
    /// A number out of its range.
    #[error("{field}={value} is not from {} to {}", range.start(), range.end())]
    Range {
        /// The key.
        field: &'static str,
        /// Its value.
        value: u64,
        /// What would be right.
        range: RangeInclusive<u64>,
    },
    /// Nothing to serve.
    #[error("no worker: name one with --worker ID=URL, or try --sim 2")]
    NoWorker,
    /// What stands in the settings' file.
    #[error("{path}, line {line}: {error}")]
    At {
        /// The file.
        path: String,
        /// From 1.
        line: usize,
        /// What is wrong there.
        error: Box<Error>,
    },
    /// Clients have to show who they are, and whoever asks for control has not.
    #[error(
        "there is a [[key]], so {} has to be set: control is not for clients",
        names::ADMIN_KEY
    )]
    KeysUnguarded,
    /// The listener can be reached from elsewhere.
    #[error("{listen} is not loopback, so {} has to be set", names::ADMIN_KEY)]
    Unguarded {
        /// The address.
        listen: SocketAddr,
    },
}

impl Error {
    /// The key that holds the value, where that tells the place.
    fn key(&self) -> Option<&'static str> {
        match self {
            Self::Value { field, .. } | Self::Range { field, .. } => Some(field),
            Self::Db { .. } => Some("db"),
            _ => None,
        }
    }
}

/// Every setting that cannot be used; at least one.
#[derive(Debug)]
pub struct Faults(Vec<Error>);

impl std::fmt::Display for Faults {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if let [only] = &self.0[..] {
            return only.fmt(f);
        }
        write!(f, "{} settings cannot be used:", self.0.len())?;
        self.0.iter().try_for_each(|error| {
            write!(f, "\n  {error}")?;
            match error.source() {
                Some(cause) => write!(f, ": {cause}"),
                None => Ok(()),
            }
        })
    }
}

impl std::error::Error for Faults {
    /// Of one alone; of several the text has the causes.
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        if let [only] = &self.0[..] { only.source() } else { None }
    }
}

/// Collects them.
pub(super) struct Found<'a> {
    source: &'a Source,
    /// Where settings come from.
    origins: BTreeMap<String, Origin>,
    faults: Vec<Error>,
}

impl<'a> Found<'a> {
    /// Begins with what cannot be read in the file.
    pub(super) fn new(source: &'a Source, origins: BTreeMap<String, Origin>) -> Self {
        Self { source, origins, faults: source.faults().collect() }
    }

    /// Where the setting `key` comes from.
    pub(super) fn comes_from(&mut self, key: &str, origin: Origin) {
        self.origins.insert(key.to_owned(), origin);
    }

    /// Whether something is missing that could not be read.
    pub(super) fn is_file_faulty(&self) -> bool {
        self.source.is_faulty()
    }

    /// One more.
    pub(super) fn wrong(&mut self, error: Error) {
        let key = error.key().unwrap_or_default();
        self.wrong_at(key, error);
    }

    /// The same, where `place` holds the value: `key`, `table.key` or `worker.NUMBER.key`.
    pub(super) fn wrong_at(&mut self, place: &str, error: Error) {
        let table = place.split('.').next().unwrap_or_default();
        let origin = self.origins.get(place).or_else(|| self.origins.get(table));
        let is_of_file = origin == Some(&Origin::File);
        let at = self.source.at(place).filter(|_| is_of_file);
        self.faults.push(match at {
            Some((path, line)) => Error::At { path: path.to_owned(), line, error: error.into() },
            None => error,
        });
    }

    /// What is right, or a stand-in for it beside a fault.
    pub(super) fn kept<T: Default>(&mut self, checked: Result<T, Error>) -> T {
        checked.unwrap_or_else(|error| {
            self.wrong(error);
            T::default()
        })
    }

    /// What is right, where `place` holds it.
    pub(super) fn kept_at<T>(&mut self, place: &str, checked: Result<T, Error>) -> Option<T> {
        checked.map_err(|error| self.wrong_at(place, error)).ok()
    }

    /// Where settings come from, if nothing is wrong.
    pub(super) fn end(self) -> Result<BTreeMap<String, Origin>, Faults> {
        if self.faults.is_empty() { Ok(self.origins) } else { Err(Faults(self.faults)) }
    }
}
