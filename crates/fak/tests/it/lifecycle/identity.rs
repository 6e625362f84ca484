//! A worker is one engine, and one engine is one worker; what is not is shown and never claimed.

use std::net::SocketAddr;
use std::sync::Arc;

use fak::engine::{Client, Endpoints, Engine, Timeouts};
use fak::events::recorder::Recorder;
use fak::fleet::{Door, Fleet, Identity, State, Worker};
use fak::lifecycle::{Lifecycle, Request};
use fak::runtime::TaskGroup;
use fak::store::Store;
use fak_index::{Index, Limits};
use fak_kernel::rank::Event;
use fak_kernel::witness::Move;
use fak_sim::{Binds, RouteFault, Sim, SimConfig};

use super::rig::{Rig, prompt};
use crate::owners;

const RESET: Move = Move::Reset { external: false, running: false };

#[tokio::test]
async fn two_engines_behind_one_address_are_no_restarts_and_nothing_is_claimed_of_them() {
    let mut rig = Rig::fronted(SimConfig::default()).await;
    rig.warm(&prompt(1)).await;
    let mut other = Sim::start(SimConfig::default(), Binds::default()).await.unwrap();
    let mut rows = Vec::new();
    for turn in 0..6 {
        std::mem::swap(&mut rig.sim, &mut other);
        rig.front().point_to(&rig.sim);
        rig.reconnects().await;
        rig.look().await;
        rows.push(rig.rows().await.len());
        let state = rig.state();
        let is_clear = state.identity == Identity::Clear;
        assert_eq!(is_clear, turn == 0, "the first may be a restart, the next is none");
        assert!(state.is_serving(), "either engine answers requests");
        assert!(is_clear || state.ranks.is_empty() && state.beliefs() == "ambiguous");
    }
    assert_eq!(rows[1..], [rows[1]; 5], "no row a look");
    let restarts = rig.rows().await;
    let restarts = restarts.iter().filter(|row| row.action.as_str() == "restart").count();
    assert_eq!(restarts, 1);
    let row = rig.act(RESET).await;
    assert_eq!((row.evidence.as_str(), &*row.reason), ("not_sent", "not_one_engine"));
    // None of them answers for a while, and then the one that answered last.
    rig.front().cut(|_| SocketAddr::from(([127, 0, 0, 1], 9)));
    rig.look().await;
    assert!(!rig.state().is_serving());
    rig.front().point_to(&rig.sim);
    rig.reconnects().await;
    rig.look().await;
    assert!(rig.state().is_serving());
    assert_eq!(rig.state().beliefs(), "ambiguous");
}

/// Its old engine goes on publishing, and nothing but a marker shows that it is the old one.
#[tokio::test]
async fn an_engine_whose_life_nothing_names_is_claimed_for_no_longer_than_a_marker_shows_it() {
    let rig = Rig::fronted(SimConfig::default()).await;
    rig.warm(&prompt(1)).await;
    assert_eq!(rig.state().rests_on_markers(), None);
    let other = Sim::start(SimConfig::default(), Binds::default()).await.unwrap();
    for sim in [&rig.sim, &other] {
        sim.faults().route("/metrics", RouteFault::Fail(404), usize::MAX);
    }
    rig.look().await;
    let why = rig.state().rests_on_markers().unwrap();
    assert!(why.contains("nothing names this life") && why.contains("process_start"), "{why}");
    // A marker shows that it is the same one.
    rig.warm(&prompt(1)).await;
    rig.front().point_to(&other);
    let rank = rig.lifecycle.ranks("w").await.unwrap().remove(0);
    for _ in 0..21 {
        rank.tell(Event::Tick).await.unwrap();
    }
    assert_eq!(rig.claim(&prompt(1)), 0);
    rig.look().await;
    assert_eq!((rig.claim(&prompt(1)), other.holds(&prompt(1), None).gpu), (0, 0));
}

#[tokio::test]
async fn what_an_engine_told_is_forgotten_with_its_connection_where_nothing_names_its_life() {
    let mut rig = Rig::named(SimConfig::default()).await;
    rig.sim.faults().route("/metrics", RouteFault::Fail(404), usize::MAX);
    rig.look().await;
    rig.look().await;
    assert_eq!(rig.state().lives, 0, "it is the same connection");
    rig.sim.restart().await.unwrap();
    let rank = rig.lifecycle.ranks("w").await.unwrap().remove(0);
    rank.wait_for(|status| status.connections == 2).await.unwrap();
    rig.look().await;
    rig.look().await;
    assert_eq!(rig.state().lives, 1, "once");
}

/// Owners over workers at these URLs, named `a`, `b`, …, that have looked once.
async fn owned(urls: &[String]) -> (Fleet, Lifecycle, TaskGroup) {
    let worker = |(id, url): (&str, &String)| {
        let client = Client::new(None, Timeouts::default()).unwrap();
        let engine = Engine::new(client, Endpoints::new(url).unwrap());
        Worker { id: id.into(), engine, door: Door::new() }
    };
    let fleet = Fleet::new(["a", "b", "c"].into_iter().zip(urls).map(worker));
    let store = Store::open("sqlite::memory:").await.unwrap();
    let index = Arc::new(Index::new(7, Limits::default()));
    let recorder = Arc::new(Recorder::new(64));
    let (lifecycle, tasks) = owners::run(&owners::config(&fleet, &store, &index, &recorder));
    for id in ["a", "b", "a"] {
        lifecycle.look(id).await.unwrap();
    }
    (fleet, lifecycle, tasks)
}

fn state(fleet: &Fleet, id: &str) -> Arc<State> {
    Arc::clone(&fleet.snapshot().get(id).unwrap().state)
}

#[tokio::test]
async fn one_engine_under_two_names_serves_as_the_first_and_only_there() {
    let sim = Sim::start(SimConfig::default(), Binds::default()).await.unwrap();
    let other_name = sim.base_url().replace("127.0.0.1", "localhost");
    let (fleet, lifecycle, _tasks) = owned(&[sim.base_url(), other_name]).await;
    let (a, b) = (state(&fleet, "a"), state(&fleet, "b"));
    assert_eq!((&a.identity, a.is_serving()), (&Identity::Clear, true));
    assert_eq!((&b.identity, b.is_serving()), (&Identity::SameEngine("a".into()), false));
    assert!(b.ranks.is_empty() && fleet.snapshot().get("b").unwrap().worker.door.is_shut());
    let row = lifecycle.act("b", Request::new(RESET)).await.unwrap();
    assert_eq!((row.evidence.as_str(), &*row.reason), ("not_sent", "not_one_engine"));
    assert_eq!(lifecycle.act("a", Request::new(RESET)).await.unwrap().reason, "confirmed");
}

#[tokio::test]
async fn two_engines_that_tell_one_event_socket_are_not_claimed() {
    use super::learn::sources;
    use crate::engine::peer::Peer;

    let port = Arc::new(std::sync::Mutex::new(9));
    let (mut peers, mut urls) = (Vec::new(), Vec::new());
    for start in ["1000.5", "2000.5"] {
        let told = sources(&port);
        let peer = Peer::start(move |request| match request.line() {
            "GET /metrics" => super::scripted::started(start),
            _ => told(request),
        });
        peers.push(peer.await);
        urls.push(peers.last().unwrap().url());
    }
    let (fleet, ..) = owned(&urls).await;
    for (id, other) in [("a", "b"), ("b", "a")] {
        let state = state(&fleet, id);
        assert_eq!(state.identity, Identity::SharedSocket(other.into()));
        assert!(state.ranks.is_empty() && state.is_serving());
    }
}
