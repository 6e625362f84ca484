//! Where an engine's event sockets listen, as `tcp://host:port`.
//!
//! Invariant: an [`Endpoint`] names one host that can be connected to; a wildcard never survives
//! the parsing.

use std::fmt;

/// A TCP endpoint that fak connects out to.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Endpoint {
    /// A name or an address; an IPv6 address without its brackets.
    pub host: String,
    /// Never 0.
    pub port: u16,
}

/// Why a text names no endpoint that fak can connect to.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// Not `tcp://`.
    #[error("endpoint `{value}` is not tcp://host:port: fak connects over TCP only")]
    Scheme {
        /// What was given.
        value: String,
    },
    /// No host, or one with characters that no host has.
    #[error("endpoint `{value}` names no host")]
    Host {
        /// What was given.
        value: String,
    },
    /// No port, or none between 1 and 65535.
    #[error("endpoint `{value}` has no port between 1 and 65535")]
    Port {
        /// What was given.
        value: String,
    },
}

impl Endpoint {
    /// Reads `tcp://host:port`. A host that means "every address" (`*`, `0.0.0.0`, `[::]`), as a
    /// listening engine writes it, is replaced by `worker_host`, the host of the worker's URL (with
    /// or without brackets).
    ///
    /// # Errors
    /// [`Error`] names the value.
    pub fn parse(value: &str, worker_host: &str) -> Result<Self, Error> {
        let rest = value
            .strip_prefix("tcp://")
            .ok_or_else(|| Error::Scheme { value: value.to_owned() })?;
        let (host, port) =
            rest.rsplit_once(':').ok_or_else(|| Error::Port { value: value.to_owned() })?;
        let port = port
            .parse::<u16>()
            .ok()
            .filter(|port| *port != 0)
            .ok_or_else(|| Error::Port { value: value.to_owned() })?;
        let host = match unbracketed(host) {
            "*" | "0.0.0.0" | "::" => unbracketed(worker_host),
            host => host,
        };
        if !is_host(host) {
            return Err(Error::Host { value: value.to_owned() });
        }
        Ok(Self { host: host.to_owned(), port })
    }

    /// The endpoint of data-parallel rank `rank`, where this one is rank 0's: vLLM adds the rank to
    /// the port. `None` past port 65535.
    #[must_use]
    pub fn for_rank(&self, rank: u32) -> Option<Self> {
        let port = u16::try_from(rank).ok().and_then(|rank| self.port.checked_add(rank))?;
        Some(Self { host: self.host.clone(), port })
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "tcp://[{}]:{}", self.host, self.port)
        } else {
            write!(f, "tcp://{}:{}", self.host, self.port)
        }
    }
}

fn unbracketed(host: &str) -> &str {
    host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host)
}

/// A name, an IPv4 address, or an IPv6 address (with a zone, perhaps).
fn is_host(host: &str) -> bool {
    let (address, zone) = host.split_once('%').unwrap_or((host, "0"));
    if host.contains(':') {
        return address.parse::<std::net::Ipv6Addr>().is_ok() && !zone.is_empty();
    }
    !host.is_empty() && host.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._".contains(&b))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(value: &str) -> Result<String, Error> {
        Endpoint::parse(value, "worker-1").map(|endpoint| endpoint.to_string())
    }

    #[test]
    fn a_wildcard_becomes_the_workers_host() {
        for value in ["tcp://*:5557", "tcp://0.0.0.0:5557", "tcp://[::]:5557", "tcp://:::5557"] {
            assert_eq!(parsed(value).unwrap(), "tcp://worker-1:5557", "{value}");
        }
        let endpoint = Endpoint::parse("tcp://*:1", "[fe80::1%eth0]").unwrap();
        assert_eq!(endpoint.to_string(), "tcp://[fe80::1%eth0]:1");
    }

    #[test]
    fn a_named_host_stays() {
        for value in ["tcp://10.0.0.5:5557", "tcp://[2001:db8::1]:1", "tcp://a_b.example:65535"] {
            assert_eq!(parsed(value).unwrap(), value);
        }
    }

    #[test]
    fn what_cannot_be_connected_to_is_refused_with_its_value() {
        for (value, error) in [
            (
                "ipc:///tmp/x",
                "endpoint `ipc:///tmp/x` is not tcp://host:port: fak connects over TCP only",
            ),
            (
                "inproc://x",
                "endpoint `inproc://x` is not tcp://host:port: fak connects over TCP only",
            ),
            ("*:5557", "endpoint `*:5557` is not tcp://host:port: fak connects over TCP only"),
            ("tcp://host", "endpoint `tcp://host` has no port between 1 and 65535"),
            ("tcp://*:0", "endpoint `tcp://*:0` has no port between 1 and 65535"),
            ("tcp://h:65536", "endpoint `tcp://h:65536` has no port between 1 and 65535"),
            ("tcp://:5557", "endpoint `tcp://:5557` names no host"),
            ("tcp://a/b:1", "endpoint `tcp://a/b:1` names no host"),
            ("tcp://u@h:1", "endpoint `tcp://u@h:1` names no host"),
            ("tcp://1:2:3", "endpoint `tcp://1:2:3` names no host"),
        ] {
            assert_eq!(parsed(value).unwrap_err().to_string(), error);
        }
    }

    #[test]
    fn ranks_count_up_from_the_base_port() {
        let base = Endpoint::parse("tcp://h:65534", "w").unwrap();
        assert_eq!(base.for_rank(0).unwrap(), base);
        assert_eq!(base.for_rank(1).unwrap().port, 65535);
        assert_eq!(base.for_rank(2), None);
        assert_eq!(base.for_rank(u32::MAX), None);
    }
}
