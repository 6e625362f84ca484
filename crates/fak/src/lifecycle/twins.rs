//! Is one engine, or one event socket, behind two workers?
//!
//! What is done to an engine through one worker, the other worker does not know of; and what two
//! streams of one socket bring is stored in one engine. Invariant: of one engine under two names
//! the first that was configured serves, the others neither serve nor claim; and of two engines
//! with one event socket neither claims. Addresses are compared as they resolve, this machine's own
//! as one.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use fak_kernel::rank::Event;
use fak_kernel::vocab::PerTier;
use fak_kernel::witness::Move;
use fak_kernel::{Disposition, Phase};
use tokio::net::lookup_host;
use tokio::time::timeout;

use super::owner::Owner;
use super::probe::Look;
use crate::fleet::Identity;

/// Time for a name to resolve.
const RESOLVED_WITHIN: Duration = Duration::from_secs(2);

/// Where one worker is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Place {
    /// Its engine's life.
    pub(super) incarnation: Option<Arc<str>>,
    /// Where its URL leads.
    pub(super) http: BTreeSet<SocketAddr>,
    /// Its live event sockets.
    pub(super) sockets: BTreeSet<SocketAddr>,
}

impl Place {
    /// Whether both are one engine. One address alone proves nothing: a proxy tells engines apart
    /// by their host names.
    fn is_same_engine(&self, other: &Self) -> bool {
        let is_one_life = self.incarnation.is_some() && self.incarnation == other.incarnation;
        is_one_life && (!self.http.is_disjoint(&other.http) || self.shares_socket(other))
    }

    fn shares_socket(&self, other: &Self) -> bool {
        !self.sockets.is_disjoint(&other.sockets)
    }
}

/// A worker, and where it is.
type Placed = (Arc<str>, Place);

/// Where all workers are; clones are the same.
#[derive(Clone, Debug, Default)]
pub(super) struct Twins(Arc<Mutex<Vec<Placed>>>);

impl Twins {
    /// Adds a worker; its number.
    pub(super) fn add(&self, worker: Arc<str>) -> usize {
        let mut places = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        places.push((worker, Place::default()));
        places.len() - 1
    }

    /// Says where the worker of that number is now.
    pub(super) fn put(&self, number: usize, place: Place) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)[number].1 = place;
    }

    /// Whether the worker of that number is an engine of its own.
    pub(super) fn identity(&self, number: usize) -> Identity {
        let places = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let own = &places[number].1;
        let others = || places.iter().enumerate().filter(|(other, _)| *other != number);
        let mut earlier = others().filter(|(other, _)| *other < number);
        if let Some((_, (id, _))) = earlier.find(|(_, (_, place))| own.is_same_engine(place)) {
            return Identity::SameEngine(Arc::clone(id));
        }
        // A later worker that is this engine neither serves nor claims.
        let mut sharing =
            others().filter(|(_, (_, p))| own.shares_socket(p) && !own.is_same_engine(p));
        match sharing.next() {
            Some((_, (id, _))) => Identity::SharedSocket(Arc::clone(id)),
            None => Identity::Clear,
        }
    }
}

impl Owner {
    /// Says where the worker is, where that may have changed.
    pub(super) async fn say_place(&mut self) {
        let origin = self.worker.engine.endpoints().origin();
        let http = resolved(origin.host(), origin.port()).await;
        let mut sockets = BTreeSet::new();
        for (host, port) in self.live_sockets() {
            sockets.extend(resolved(&host, port).await);
        }
        let incarnation = self.state.incarnation.clone();
        self.twins.0.put(self.twins.1, Place { incarnation, http, sockets });
    }

    /// Takes in whose life a look is of. True where it is now one engine's, now another's: no row
    /// can say of which, and nothing is to be learnt of it.
    pub(super) async fn sees_turns(&mut self, look: &Look) -> bool {
        if self.lives.see(look.incarnation()) {
            self.tell(Event::Distrust { kv: PerTier::all(Disposition::Unknown) }).await;
        }
        if !self.lives.take_turns() {
            return false;
        }
        self.state.metrics.clone_from(&look.metrics);
        let shown = self.shown(&look.observation);
        if self.state.phase() == Phase::Error && self.names_state(&shown) {
            // One of them answers again, and no row can say which.
            self.vanished = None;
            self.state.standing = self.judge_noticed(Move::Drift, &shown.0).next;
            self.tell(Event::Distrust { kv: PerTier::all(Disposition::Unknown) }).await;
        }
        self.state.is_unclear = self.has_drifted(&shown);
        self.show_identity();
        true
    }

    /// Whether the worker is one engine, and the only worker that is it.
    pub(super) fn identity(&self) -> Identity {
        if self.lives.take_turns() {
            return Identity::Ambiguous;
        }
        self.twins.0.identity(self.twins.1)
    }

    /// Shows the identity, and says once where it is not clear.
    pub(super) fn show_identity(&mut self) {
        let now = self.identity();
        if now != self.state.identity {
            let worker = &self.worker.id;
            match now.why() {
                Some(why) => tracing::warn!(%worker, "{why}: nothing is claimed of it"),
                None => tracing::info!(%worker, "is one engine again"),
            }
            self.state.identity = now;
        }
    }
}

/// The addresses behind a name; none where it does not resolve.
async fn resolved(host: &str, port: u16) -> BTreeSet<SocketAddr> {
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let found = timeout(RESOLVED_WITHIN, lookup_host((host, port))).await;
    let Ok(Ok(found)) = found else { return BTreeSet::new() };
    found.map(canonical).collect()
}

/// The same address for all that lead to this machine.
fn canonical(address: SocketAddr) -> SocketAddr {
    let ip = address.ip().to_canonical();
    let is_own = ip.is_loopback() || is_of_this_machine(ip);
    let ip = if is_own { IpAddr::V4(Ipv4Addr::LOCALHOST) } else { ip };
    SocketAddr::new(ip, address.port())
}

/// Whether what is sent there would come from there. Nothing is sent.
fn is_of_this_machine(ip: IpAddr) -> bool {
    let any = if ip.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
    let from = UdpSocket::bind(any).and_then(|socket| {
        socket.connect((ip, 9))?;
        socket.local_addr()
    });
    from.is_ok_and(|from| from.ip() == ip)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(life: &str, http: u16, socket: u16) -> Place {
        let at = |port| BTreeSet::from([SocketAddr::from(([10, 0, 0, 1], port))]);
        Place { incarnation: Some(life.into()), http: at(http), sockets: at(socket) }
    }

    #[test]
    fn of_one_engine_under_two_names_the_first_serves() {
        let twins = Twins::default();
        let (a, b) = (twins.add("a".into()), twins.add("b".into()));
        // Another address, as of a service and of its pod.
        twins.put(a, place("1", 80, 5557));
        twins.put(b, place("1", 81, 5557));
        assert_eq!(twins.identity(a), Identity::Clear);
        assert_eq!(twins.identity(b), Identity::SameEngine("a".into()));
        // No events: one life at one address.
        twins.put(b, Place { sockets: BTreeSet::new(), ..place("1", 80, 1) });
        assert_eq!(twins.identity(b), Identity::SameEngine("a".into()));
        twins.put(b, place("2", 80, 5558));
        assert_eq!(twins.identity(b), Identity::Clear, "a proxy tells them apart");
        twins.put(b, place("1", 81, 5558));
        assert_eq!(twins.identity(b), Identity::Clear, "started at one moment");
    }

    #[test]
    fn of_two_engines_with_one_event_socket_neither_claims() {
        let twins = Twins::default();
        let (a, b) = (twins.add("a".into()), twins.add("b".into()));
        twins.put(a, place("1", 80, 5557));
        twins.put(b, place("2", 81, 5557));
        assert_eq!(twins.identity(a), Identity::SharedSocket("b".into()));
        assert_eq!(twins.identity(b), Identity::SharedSocket("a".into()));
        twins.put(b, Place { incarnation: None, ..place("", 81, 5557) });
        assert_eq!(twins.identity(a), Identity::SharedSocket("b".into()), "not known");
    }

    #[tokio::test]
    async fn this_machines_addresses_are_one() {
        let local = resolved("127.0.0.1", 80).await;
        assert_eq!(local.len(), 1);
        for host in ["localhost", "[::1]", "127.0.0.2"] {
            assert_eq!(resolved(host, 80).await, local, "{host}");
        }
        let other = canonical(SocketAddr::from(([192, 0, 2, 1], 80)));
        assert_eq!(other.ip(), IpAddr::from([192, 0, 2, 1]));
    }
}
