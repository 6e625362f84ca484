//! What an engine is, is learnt of each of its lives, and asked again where it may have changed.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use fak_kernel::rank::Trust;
use fak_sim::{Binds, RouteFault, Sim, SimConfig};
use serde_json::json;

use super::front::{Front, address_of};
use super::rig::{Rig, prompt};
use super::scripted::{Scripted, idle, started};
use crate::engine::peer::{self, Reply, Request};

/// Another life of the engine behind the rig's address, on event sockets of its own.
async fn moves(rig: &mut Rig, config: SimConfig) -> Sim {
    let next = Sim::start(config, Binds::default()).await.unwrap();
    assert_ne!(next.kv_events_endpoint(), rig.sim.kv_events_endpoint());
    rig.front().point_to(&next);
    rig.reconnects().await;
    std::mem::replace(&mut rig.sim, next)
}

fn names(rig: &Rig) -> Vec<String> {
    rig.state().models.names().map(ToString::to_string).collect()
}

fn serving(model: &str) -> SimConfig {
    SimConfig { model: model.to_owned(), ..SimConfig::default() }
}

/// An idle engine that publishes at the port of now.
pub(super) fn sources(port: &Arc<Mutex<u16>>) -> impl Fn(&Request) -> Reply + use<> {
    let port = Arc::clone(port);
    move |request| match request.line() {
        "GET /kv_event_sources" => {
            let (on, port) =
                (r#""enable_kv_cache_events":true,"publisher":"zmq""#, *port.lock().unwrap());
            let body = format!(r#"{{"0":{{{on},"endpoint":"tcp://*:{port}"}}}}"#);
            Reply::Send(peer::json("200 OK", &body))
        }
        _ => idle(request),
    }
}

#[tokio::test]
async fn an_engine_that_restarts_on_other_event_ports_is_followed_there() {
    let mut rig = Rig::fronted(SimConfig::default()).await;
    rig.warm(&prompt(1)).await;
    let before = rig.state().ranks[0].id;
    // It lives on, as another worker's engine may that took the ports.
    let old = moves(&mut rig, SimConfig::default()).await;
    rig.look().await;
    rig.heard().await;
    assert_ne!(rig.state().ranks[0].id, before, "a stream of another socket is another rank");
    assert_eq!(rig.claim(&prompt(1)), 0);
    rig.warm(&prompt(2)).await;
    assert_eq!(old.holds(&prompt(2), None).gpu, 0);
}

#[tokio::test]
async fn a_rank_that_reconnects_has_its_engine_asked_where_it_publishes() {
    let sim = Sim::start(SimConfig::default(), Binds::default()).await.unwrap();
    let front = Front::to(address_of(&sim.kv_events_endpoint())).await;
    let told = Arc::new(Mutex::new(front.port()));
    let scripted = Scripted::start(sources(&told)).await;
    let first = scripted.rank().await;
    scripted.look().await;
    assert_eq!(scripted.rank().await.id(), first.id(), "what is followed where it is told is kept");
    // Somebody else listens at the old port from here on, and the process is the same.
    *told.lock().unwrap() = address_of(&sim.kv_events_endpoint()).port();
    front.cut(|address| address);
    first.wait_for(|status| status.connections == 2).await.unwrap();
    scripted.look().await;
    assert_ne!(scripted.rank().await.id(), first.id());
    assert!(first.wait_for(|_| false).await.is_err(), "the old stream has ended");
}

#[tokio::test]
async fn sources_that_could_not_be_read_once_are_asked_for_again() {
    let sim = Sim::start(SimConfig::default(), Binds::default()).await.unwrap();
    sim.faults().route("/kv_event_sources", RouteFault::Fail(500), 1);
    let rig = Rig::unheard(sim).await;
    assert!(rig.state().ranks.is_empty(), "the first look could not tell");
    rig.look().await;
    rig.heard().await;
    rig.warm(&prompt(1)).await;
}

#[tokio::test]
async fn after_a_restart_no_model_is_known_until_the_new_life_names_it() {
    let mut rig = Rig::fronted(serving("old")).await;
    assert_eq!(names(&rig), ["old"]);
    let _old = moves(&mut rig, serving("new")).await;
    rig.sim.faults().route("/v1/models", RouteFault::Fail(500), 1);
    rig.look().await;
    assert_eq!(names(&rig), [""; 0], "what the old one served is not the new one's");
    rig.look().await;
    assert_eq!(names(&rig), ["new"]);
}

#[tokio::test]
async fn each_life_that_begins_is_counted() {
    let start = Arc::new(Mutex::new("1000.5"));
    let told = Arc::clone(&start);
    let scripted = Scripted::start(move |request| match request.line() {
        "GET /metrics" => started(*told.lock().unwrap()),
        _ => idle(request),
    })
    .await;
    for (now, lives) in [("1000.5", 0), ("2000.5", 1), ("2000.5", 1), ("3000.5", 2)] {
        *start.lock().unwrap() = now;
        scripted.look().await;
        assert_eq!(scripted.state().lives, lives, "{now}");
    }
}

#[tokio::test]
async fn what_an_engine_was_proven_to_do_counts_for_its_life() {
    let mut rig = Rig::fronted(SimConfig::default()).await;
    let before = rig.state();
    assert!(before.version.is_some() && before.capabilities != Default::default());
    let _old = moves(&mut rig, SimConfig::default()).await;
    for route in ["/version", "/server_info", "/openapi.json"] {
        rig.sim.faults().route(route, RouteFault::Fail(500), 1);
    }
    rig.look().await;
    assert_eq!(rig.state().version, None);
    assert!(!rig.state().capabilities.keep_argument);
    assert_eq!(rig.state().capabilities.pauses, fak_kernel::witness::Pauses::Absent);
    rig.look().await;
    assert_eq!(rig.state().version, before.version);
}

#[tokio::test]
async fn a_scrape_that_fails_takes_no_caution_away() {
    let two = SimConfig { dp_ranks: 2, ..SimConfig::default() };
    let rig = Rig::named(two).await;
    assert!(!rig.state().hears_all_ranks(), "one of two ranks is named");
    rig.sim.faults().route("/metrics", RouteFault::Fail(500), 1);
    rig.look().await;
    assert!(rig.state().metrics.is_none() && !rig.state().hears_all_ranks());
    rig.look().await;
    assert!(rig.state().metrics.is_some() && !rig.state().hears_all_ranks());
}

#[tokio::test]
async fn an_engine_may_speculate_until_it_tells_that_it_does_not() {
    let sim = Sim::start(SimConfig::default(), Binds::default()).await.unwrap();
    // Twice in a look: for the block size, and for the state.
    sim.faults().route("/metrics", RouteFault::Fail(500), 8);
    sim.faults().route("/server_info", RouteFault::Fail(500), 8);
    let rig = Rig::unheard(sim).await;
    assert!(rig.state().speculates());
    rig.sim.faults().clear();
    rig.look().await;
    assert!(!rig.state().speculates());
    rig.heard().await;
    assert_eq!(rig.state().trust(), Trust::Exact);
}

#[tokio::test]
async fn what_an_engine_serves_is_asked_again_within_a_life_and_where_lives_cannot_be_told_apart() {
    // Metrics that come from several processes name no start.
    for start in ["process_start_time_seconds 1000.5\n", ""] {
        let served = Arc::new(Mutex::new(&["base"][..]));
        let script = {
            let served = Arc::clone(&served);
            move |request: &Request| match request.line() {
                "GET /metrics" => {
                    let text = format!("{start}vllm:num_requests_running{{engine=\"0\"}} 0\n");
                    Reply::Send(peer::answer("200 OK", "text/plain", &text))
                }
                "GET /v1/models" => {
                    let card = |name: &&str| json!({ "id": name });
                    let cards: Vec<_> = served.lock().unwrap().iter().map(card).collect();
                    let body = json!({ "object": "list", "data": cards });
                    Reply::Send(peer::json("200 OK", &body.to_string()))
                }
                _ => idle(request),
            }
        };
        let scripted = Scripted::start(script).await;
        assert_eq!(scripted.state().incarnation.is_some(), !start.is_empty());
        for now in [&["base", "adapter"][..], &["base"], &["other"]] {
            *served.lock().unwrap() = now;
            scripted.look().await;
            for name in ["base", "adapter", "other"] {
                assert_eq!(scripted.state().has_model(name), now.contains(&name), "{name}");
            }
        }
    }
}

#[tokio::test]
async fn what_kv_is_computed_with_is_kept_by_life_and_a_restart_says_what_changed() {
    // The start of the process, and the type; none where the engine does not tell.
    let now = Arc::new(Mutex::new(("1000.5", Some("bfloat16"))));
    let told = Arc::clone(&now);
    let script = move |request: &Request| {
        let (start, dtype) = *told.lock().unwrap();
        match (request.line(), dtype) {
            ("GET /metrics", _) => started(start),
            ("GET /server_info?config_format=json", Some(dtype)) => {
                let model = json!({ "model": "m", "revision": "r1", "dtype": dtype });
                let body = json!({ "vllm_config": { "model_config": model } });
                Reply::Send(peer::json("200 OK", &body.to_string()))
            }
            _ => idle(request),
        }
    };
    let mut scripted = Scripted::start(script).await;
    let told = || scripted.state().kv_identity.as_ref().map(|told| told["dtype"].clone());
    assert_eq!(told().as_deref(), Some("bfloat16"));
    *now.lock().unwrap() = ("2000.5", Some("float16"));
    scripted.look().await;
    assert_eq!(told().as_deref(), Some("float16"));
    *now.lock().unwrap() = ("3000.5", None);
    scripted.look().await;
    assert_eq!(told(), None, "the life before says nothing of this one");
    *now.lock().unwrap() = ("3000.5", Some("float16"));
    scripted.look().await;
    assert_eq!(told().as_deref(), Some("float16"));
    let rows = scripted.rows().await;
    let (joined, restarts) = rows.split_first().unwrap();
    let both = json!({ "model": "m", "revision": "r1", "dtype": "bfloat16" });
    assert_eq!(joined.observed["kv_identity"], both);
    let shown: Vec<_> = restarts
        .iter()
        .map(|row| (&row.observed["kv_identity"]["dtype"], &row.observed["kv_identity_changed"]))
        .collect();
    let changed = json!({ "dtype": { "before": "bfloat16", "now": "float16" } });
    assert_eq!(shown, [(&json!("float16"), &changed), (&json!(null), &json!(null))]);

    // It restarts while fak does: what the last life told is in the ledger.
    *now.lock().unwrap() = ("4000.5", Some("bfloat16"));
    scripted.second_fak().await;
    let rows = scripted.rows().await;
    let restart = rows.last().unwrap();
    assert_eq!(restart.action, fak_kernel::Action::Restart);
    let changed = json!({ "dtype": { "before": "float16", "now": "bfloat16" } });
    assert_eq!(restart.observed["kv_identity_changed"], changed);
}

/// A server of a part of the ranks: its header counts them from 0, and events have all numbers.
#[tokio::test]
async fn ranks_of_a_part_are_asked_by_the_numbers_that_their_server_has_for_them() {
    let sim = Sim::start(SimConfig::default(), Binds::default()).await.unwrap();
    let port = address_of(&sim.kv_events_endpoint()).port();
    let (sender, mut asked) = tokio::sync::mpsc::channel(1);
    let script = move |request: &Request| match request.line() {
        "GET /server_info?config_format=json" => {
            let parallel = json!({
                "data_parallel_size": 8, "data_parallel_size_local": 1,
                "data_parallel_rank": 4, "data_parallel_hybrid_lb": true,
            });
            let body = json!({ "vllm_config": { "parallel_config": parallel } });
            Reply::Send(peer::json("200 OK", &body.to_string()))
        }
        "GET /kv_event_sources" => {
            let source = json!({
                "enable_kv_cache_events": true, "publisher": "zmq",
                "endpoint": format!("tcp://*:{port}"),
            });
            Reply::Send(peer::json("200 OK", &json!({ "4": source }).to_string()))
        }
        "POST /v1/completions" => {
            let rank = request.header("x-data-parallel-rank").map(str::to_owned);
            // Those that come after the first.
            let _ = sender.try_send(rank);
            idle(request)
        }
        _ => idle(request),
    };
    let scripted = Scripted::start(script).await;
    assert_eq!(scripted.rank().await.rank(), 4);
    let rank = tokio::time::timeout(Duration::from_secs(10), asked.recv()).await.unwrap();
    assert_eq!(rank.flatten().as_deref(), Some("0"));
}
