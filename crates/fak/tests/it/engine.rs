//! The engine adapter against a peer that does exactly as told, byte for byte.

pub(crate) mod peer;

mod capabilities;
mod control;
mod simulated;
mod streams;
mod transport;

use std::time::Duration;

use fak::engine::{Client, Endpoints, Engine, Secret, Timeouts};

use peer::Peer;

/// Longer than any test needs. Nothing waits for it to pass.
const PATIENT: Duration = Duration::from_secs(30);

/// Bounds that no test reaches unless it shortens one.
fn patient() -> Timeouts {
    Timeouts {
        connect: PATIENT,
        first_byte: PATIENT,
        idle: PATIENT,
        unary: PATIENT,
        control: PATIENT,
        probe: PATIENT,
        tokenize: PATIENT,
    }
}

fn engine(peer: &Peer, timeouts: Timeouts) -> Engine {
    engine_with_key(peer, timeouts, None)
}

fn engine_with_key(peer: &Peer, timeouts: Timeouts, key: Option<&str>) -> Engine {
    let key = key.map(|key| Secret::new(key.to_owned()));
    let client = Client::new(key.as_ref(), timeouts).expect("a plain key");
    Engine::new(client, Endpoints::new(&peer.url()).expect("an address"))
}
