//! Are the workers that were named so many engines?
//!
//! Invariant: no two have one name, one URL or one event socket, however this machine is named.

use std::collections::{BTreeMap, BTreeSet};

use super::serve::{Error, WorkerSpec, embedded_id};

/// No two workers have one name, and no two are one engine: each would undo and misread what is
/// done to it through the other.
pub(super) fn check(workers: &[WorkerSpec], embedded: usize) -> Result<(), Error> {
    let mut ids: BTreeSet<String> = (0..embedded).map(embedded_id).collect();
    for (number, worker) in workers.iter().enumerate() {
        if !ids.insert(worker.id.clone()) {
            return Err(Error::SameName { id: worker.id.clone() });
        }
        let at = |worker: &WorkerSpec| {
            let origin = worker.endpoints.origin();
            (one_name(origin.host()), origin.port())
        };
        if let Some(other) = workers[..number].iter().find(|other| at(other) == at(worker)) {
            let (id, other) = (worker.id.clone(), other.id.clone());
            return Err(Error::SameUrl { id, other, url: worker.endpoints.origin().to_string() });
        }
    }
    sockets_told_apart(workers)
}

/// No event socket is two workers', or two of one worker's.
fn sockets_told_apart(workers: &[WorkerSpec]) -> Result<(), Error> {
    let mut seen: BTreeMap<(String, u16), (&'static str, &str)> = BTreeMap::new();
    for worker in workers {
        for (field, socket) in [("kv", &worker.kv), ("replay", &worker.replay)] {
            let Some(socket) = socket else { continue };
            let at = (one_name(&socket.host), socket.port);
            if let Some((other_field, other)) = seen.insert(at, (field, &worker.id)) {
                return Err(Error::SameSocket {
                    id: worker.id.clone(),
                    field,
                    socket: socket.to_string(),
                    other_field,
                    other: other.to_owned(),
                });
            }
        }
    }
    Ok(())
}

/// One name for all that name this machine, and for names that differ in their case alone. What
/// else leads to one address shows once the names are resolved.
fn one_name(host: &str) -> String {
    let host = host.to_ascii_lowercase();
    let is_loopback = host.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback());
    if is_loopback { "localhost".to_owned() } else { host }
}
