//! Are the workers that were named so many engines?
//!
//! Invariant: no two have one name, one URL or one event socket, however this machine is named.

use std::collections::{BTreeMap, BTreeSet};

use super::faults::Error;
use super::serve::{WorkerSpec, embedded_id};

/// No two workers have one name, and no two are one engine: each would undo and misread what is
/// done to it through the other. Tells `wrong` of the later one of two, by its name.
pub(super) fn check(workers: &[WorkerSpec], embedded: usize, mut wrong: impl FnMut(&str, Error)) {
    let mut ids: BTreeSet<String> = (0..embedded).map(embedded_id).collect();
    for (number, worker) in workers.iter().enumerate() {
        if !ids.insert(worker.id.clone()) {
            wrong(&worker.id, Error::SameName { id: worker.id.clone() });
            continue;
        }
        let at = |worker: &WorkerSpec| {
            let origin = worker.endpoints.origin();
            (one_name(origin.host()), origin.port())
        };
        if let Some(other) = workers[..number].iter().find(|other| at(other) == at(worker)) {
            let (id, other) = (worker.id.clone(), other.id.clone());
            let url = worker.endpoints.origin().to_string();
            wrong(&worker.id, Error::SameUrl { id, other, url });
        }
    }
    sockets_told_apart(workers, wrong);
}

/// No event socket is two workers', or two of one worker's.
fn sockets_told_apart(workers: &[WorkerSpec], mut wrong: impl FnMut(&str, Error)) {
    let mut seen: BTreeMap<(String, u16), (&'static str, &str)> = BTreeMap::new();
    for worker in workers {
        for (field, socket) in [("kv", &worker.kv), ("replay", &worker.replay)] {
            let Some(socket) = socket else { continue };
            let at = (one_name(&socket.host), socket.port);
            if let Some((other_field, other)) = seen.insert(at, (field, &worker.id)) {
                let (id, socket) = (worker.id.clone(), socket.to_string());
                let other = other.to_owned();
                wrong(&worker.id, Error::SameSocket { id, field, socket, other_field, other });
            }
        }
    }
}

/// One name for all that name this machine, for the spellings of one address, and for names that
/// differ in their case alone. What else leads to one address shows once the names are resolved.
fn one_name(host: &str) -> String {
    let host = host.to_ascii_lowercase();
    match host.parse::<std::net::IpAddr>().map(|address| address.to_canonical()) {
        Ok(address) if address.is_loopback() => "localhost".to_owned(),
        Ok(address) => address.to_string(),
        Err(_) => host,
    }
}
