//! Scripted faults over real sockets.

use fak_sim::{RouteFault, StreamCut};
use serde_json::json;
use zeromq::{DealerSocket, Socket, SocketRecv};

use crate::client::*;

#[tokio::test]
async fn routes_fail_before_or_after_their_work() {
    let sim = sim(|_| {}).await;
    let faults = sim.faults();
    faults.route("/pause", RouteFault::Fail(503), 1);
    assert_eq!(control(&sim, "/pause").await.status, 503);
    assert_eq!(get(&sim, "/is_paused").await.json(), json!({"is_paused": false}));
    faults.route("/sleep", RouteFault::FailAfter(500), 1);
    assert_eq!(control(&sim, "/sleep?level=1").await.status, 500);
    assert_eq!(get(&sim, "/is_paused").await.json(), json!({"is_paused": true}));
    control(&sim, "/wake_up").await;
    faults.route("/reset_prefix_cache", RouteFault::EmptyBody, 1);
    let reply = control(&sim, "/reset_prefix_cache").await;
    assert_eq!((reply.status, reply.body.as_str()), (200, ""));
    assert_eq!(control(&sim, "/reset_prefix_cache").await.json(), json!({"success": true}));
}

#[tokio::test]
async fn a_hanging_route_leaves_the_others_alone() {
    let sim = sim(|_| {}).await;
    sim.faults().route("/wake_up", RouteFault::Hang, 1);
    let hanging = Exchange::send(&sim, "POST", "/wake_up", "", b"").await;
    assert_eq!(get(&sim, "/health").await.status, 200);
    sim.stop().await;
    assert_eq!(hanging.reply().await.status, 0, "cut without an answer");
}

#[tokio::test]
async fn streams_are_cut_between_and_inside_events() {
    for mid_line in [false, true] {
        let sim = sim(|_| {}).await;
        sim.faults().cut_streams(StreamCut { after_events: 2, mid_line }, 1);
        let mut body = ask(100, 40, 5);
        body["stream"] = json!(true);
        let reply = post(&sim, "/v1/completions", &body).await;
        assert_eq!(reply.body.matches("\n\n").count(), 2);
        assert_eq!(reply.body.ends_with("\n\n"), !mid_line);
        let whole = post(&sim, "/v1/completions", &body).await;
        assert!(whole.body.ends_with("data: [DONE]\n\n"), "only one stream was to be cut");
    }
}

#[tokio::test]
async fn batches_are_dropped_lost_and_repeated() {
    let sim = sim(|_| {}).await;
    let mut events = Events::of(&sim).await;
    let faults = sim.faults();
    complete(&sim, 100, 20, 1).await;
    let first = events.next().await.seq;
    faults.drop_batches(1);
    complete(&sim, 200, 20, 1).await;
    faults.lose_batches(1);
    complete(&sim, 300, 20, 1).await;
    faults.repeat_batches(1);
    complete(&sim, 400, 20, 1).await;
    let (one, two) = (events.next().await, events.next().await);
    assert_eq!((one.seq, two.seq), (first + 3, first + 3));
    assert_eq!(one.payload, two.payload);
    let start = first.to_be_bytes();
    let seqs: Vec<_> =
        replayed(&sim.replay_endpoint(), &start).await.iter().map(|f| seq_of(f)).collect();
    assert_eq!(seqs, [Some(first), Some(first + 1), Some(first + 3), None]);
}

#[tokio::test]
async fn a_slow_publisher_keeps_batches_back_and_in_order() {
    let sim = sim(|_| {}).await;
    let mut events = Events::of(&sim).await;
    sim.faults().hold_publisher(true);
    complete(&sim, 100, 20, 1).await;
    complete(&sim, 200, 20, 1).await;
    let before = replayed(&sim.replay_endpoint(), &[]).await.len();
    sim.faults().hold_publisher(false);
    let (one, two) = (events.next().await, events.next().await);
    assert_eq!(two.seq, one.seq + 1);
    assert_eq!(replayed(&sim.replay_endpoint(), &[]).await.len(), before + 2);
}

#[tokio::test]
async fn a_replay_can_lack_its_end() {
    let sim = sim(|_| {}).await;
    complete(&sim, 100, 20, 1).await;
    sim.faults().replay_without_end(true);
    let mut dealer = DealerSocket::new();
    dealer.connect(&sim.replay_endpoint()).await.unwrap();
    ask_replay(&mut dealer, &[]).await;
    let frames = soon(dealer.recv()).await.unwrap().into_vec();
    assert_eq!(frames[2].as_ref(), [0; 8]);
    sim.faults().replay_without_end(false);
    ask_replay(&mut dealer, &[0xff; 8]).await;
    let frames = soon(dealer.recv()).await.unwrap().into_vec();
    assert_eq!(frames[2].as_ref(), [0xff; 8], "the first answer had no marker");
}

#[tokio::test]
async fn events_can_be_off_and_flags_can_lie() {
    let sim = sim(|_| {}).await;
    let faults = sim.faults();
    faults.events_off(true);
    complete(&sim, 100, 20, 1).await;
    assert_eq!(replayed(&sim.replay_endpoint(), &[]).await.len(), 1);
    faults.lie_about_sleeping(Some(false));
    control(&sim, "/sleep").await;
    assert_eq!(get(&sim, "/is_sleeping").await.json(), json!({"is_sleeping": false}));
    assert_eq!(get(&sim, "/is_paused").await.json(), json!({"is_paused": true}));
    faults.partial_wakes(1);
    assert_eq!(control(&sim, "/wake_up").await.json()["status"], "sleeping");
    faults.unhealthy(true);
    assert_eq!(get(&sim, "/health").await.status, 503);
    faults.clear();
    assert_eq!(get(&sim, "/health").await.status, 200);
}

#[tokio::test]
async fn late_host_stores_follow_a_clear_in_one_batch() {
    let sim = offloading().await;
    let mut events = Events::of(&sim).await;
    // The probe's own host store is out before the connector falls silent.
    control(&sim, "/reset_prefix_cache?reset_external=true").await;
    complete(&sim, 500, 20, 1).await;
    while events.next().await.shape() != ["BlockStored-C"] {}
    sim.hold_connector_events(true);
    complete(&sim, 100, 40, 1).await;
    assert_eq!(events.next().await.shape(), ["BlockStored-G"]);
    control(&sim, "/sleep?level=1").await;
    control(&sim, "/wake_up").await;
    sim.hold_connector_events(false);
    complete(&sim, 200, 20, 1).await;
    let stale = ["AllBlocksCleared-", "BlockStored-G", "BlockStored-C", "BlockStored-C"];
    assert_eq!(events.next().await.shape(), stale);
    let tokens: Vec<u32> = (100..140).collect();
    assert_eq!(sim.holds(&tokens, None).hit_tokens, 0);
}

#[tokio::test]
async fn a_terminated_engine_leaves_its_streams_open_and_silent() {
    let sim = sim(|_| {}).await;
    sim.faults().limit_steps(Some(3));
    let mut body = ask(100, 40, 50);
    body["stream"] = json!(true);
    let mut stream = begin(&sim, "/v1/completions", &body).await;
    stream.until("finish_reason").await;
    sim.terminate();
    sim.faults().limit_steps(None);
    let address = sim.base_url().replace("http://", "");
    soon(async { while tokio::net::TcpStream::connect(&address).await.is_ok() {} }).await;
    assert_eq!(sim.requests_in_flight(), 1, "nobody told the client");
    sim.stop().await;
    assert!(!stream.reply().await.body.contains("[DONE]"));
}
