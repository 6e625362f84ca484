//! SIGTERM: it is announced, what is under way ends, nothing new is taken, and the ledger is
//! closed.

use std::io::ErrorKind;

use fak_kernel::{Disposition, Phase};
use fak_sim::{Binds, Sim, SimConfig};
use http::Response;
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use serde_json::{Value, json};
use tokio::net::TcpStream;

use super::peer::{Hold, Peer};
use super::process::{Fak, Setup, prompt, until, within};

async fn sim() -> Sim {
    Sim::start(SimConfig::default(), Binds::default()).await.unwrap()
}

/// A stream of `tokens`, of which the first has come; then the engine stands still.
async fn stalled(fak: &Fak, sim: &Sim, tokens: u32) -> Response<Incoming> {
    sim.faults().limit_steps(Some(1));
    let mut stream = open(fak, tokens).await.unwrap();
    assert_eq!(stream.status(), 200);
    let first = within("a first chunk", stream.body_mut().frame()).await.unwrap().unwrap();
    assert!(first.into_data().unwrap().starts_with(b"data: "));
    stream
}

async fn open(fak: &Fak, tokens: u32) -> Option<Response<Incoming>> {
    let body = json!({
        "model": "tiny",
        "prompt": prompt(1),
        "max_tokens": tokens,
        "ignore_eos": true,
        "stream": true,
    });
    fak.open("POST", "/v1/completions", body.to_string()).await.ok()
}

/// The rest of a stream, by its events' data.
async fn rest(stream: Response<Incoming>) -> Vec<String> {
    let body = within("the end", stream.into_body().collect()).await.unwrap().to_bytes();
    let text = std::str::from_utf8(&body).unwrap();
    assert!(text.ends_with("\n\n"), "{text:?}");
    let events = text.split("\n\n").filter(|event| !event.is_empty());
    events.map(|event| event.strip_prefix("data: ").unwrap().to_owned()).collect()
}

async fn no_longer_listens(fak: &Fak) {
    until("a refused connection", async || match TcpStream::connect(fak.address).await {
        Ok(_) => None,
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => Some(()),
        // It was in the queue of a socket that closed.
        Err(error) if error.kind() == ErrorKind::ConnectionReset => None,
        Err(error) => panic!("{error}"),
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_in_flight_end_whole_and_nothing_new_is_taken() {
    let sim = sim().await;
    let setup = Setup::new("drains").sims([&sim]);
    let mut fak = setup.start().await;
    fak.heard("w0").await;
    let stream = stalled(&fak, &sim, 8).await;
    fak.terminate();
    no_longer_listens(&fak).await;
    assert_eq!(sim.requests_in_flight(), 1, "it goes on");
    let told = async || fak.talk().contains("requests under way have 30s to end").then_some(());
    until("why it does not end at once", told).await;
    sim.faults().limit_steps(None);
    let events = rest(stream).await;
    assert_eq!(events.last().unwrap(), "[DONE]");
    let has_text =
        |event: &&String| event.contains("\"text\":\"") && !event.contains("\"text\":\"\"");
    assert_eq!(events.iter().filter(has_text).count(), 7, "{events:?}");
    assert_eq!(fak.exit().await.code(), Some(0));
    let rows = setup.rows().await;
    let last = rows.last().unwrap();
    assert_eq!((last.phase, last.reason.as_str()), (Phase::Serving, "noticed"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_does_not_end_in_time_ends_with_an_error_event_and_at_the_engine() {
    let sim = sim().await;
    let setup = Setup::new("cuts").sims([&sim]).set("drain_ms", 100);
    let mut fak = setup.start().await;
    fak.heard("w0").await;
    let stream = stalled(&fak, &sim, 8).await;
    fak.terminate();
    let events = rest(stream).await;
    let [.., last] = &events[..] else { panic!("nothing came") };
    let error: Value = serde_json::from_str(last).unwrap();
    assert_eq!(error["error"]["code"], "stopping", "{events:?}");
    assert_eq!(fak.exit().await.code(), Some(0));
    until("the engine lets it go", async || (sim.requests_in_flight() == 0).then_some(())).await;
    assert_eq!(setup.rows().await.last().unwrap().phase, Phase::Serving);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_signal_ends_it_without_waiting_for_what_is_under_way() {
    let sim = sim().await;
    // Longer than a test waits.
    let setup = Setup::new("hurried").sims([&sim]).set("drain_ms", 3_600_000);
    let mut fak = setup.start().await;
    fak.heard("w0").await;
    let stream = stalled(&fak, &sim, 8).await;
    fak.terminate();
    no_longer_listens(&fak).await;
    fak.terminate();
    assert_eq!(fak.exit().await.code(), Some(1));
    drop(stream);
    until("the engine lets it go", async || (sim.requests_in_flight() == 0).then_some(())).await;
    assert_eq!(setup.rows().await.last().unwrap().phase, Phase::Serving);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_without_an_answer_in_time_gets_503_and_does_not_hold_up_the_end() {
    let sim = sim().await;
    let setup = Setup::new("unanswered").sims([&sim]).set("drain_ms", 100);
    let mut fak = setup.start().await;
    fak.heard("w0").await;
    sim.faults().limit_steps(Some(0));
    let ended = async {
        let (answer, ()) = tokio::join!(open(&fak, 8), async {
            until("it is in flight", async || (sim.requests_in_flight() == 1).then_some(())).await;
            fak.terminate();
        });
        answer
    };
    let answer = ended.await.expect("an answer");
    assert_eq!(answer.status(), 503);
    assert!(answer.headers().contains_key("retry-after"));
    assert_eq!(fak.exit().await.code(), Some(0));
    until("the engine lets it go", async || (sim.requests_in_flight() == 0).then_some(())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_action_under_way_gets_its_outcome_before_the_end() {
    let sim = sim().await;
    let peer = Peer::before(sim.base_url()).await;
    let setup = Setup::new("acting").worker("w0", &peer.url);
    let mut fak = setup.start().await;
    fak.heard("w0").await;
    peer.hold("/sleep", Hold::After);
    let options = json!({"level": 1, "mode": "abort"});
    let (answer, ()) = tokio::join!(fak.post("/fak/v1/workers/w0/sleep", &options), async {
        peer.held().await;
        fak.terminate();
        no_longer_listens(&fak).await;
        peer.release();
    });
    assert_eq!(answer.status, 200, "{answer:?}");
    assert_eq!(fak.exit().await.code(), Some(0));
    let rows = setup.rows().await;
    let last = rows.last().unwrap();
    assert_eq!((last.action.as_str(), last.phase), ("sleep", Phase::Sleeping));
    assert_eq!((last.kv, last.reason.as_str()), (Disposition::Forgotten, "confirmed"));
}

/// Long enough for whoever asks `/ready` to send elsewhere.
#[tokio::test(flavor = "multi_thread")]
async fn a_stop_is_announced_before_the_door_shuts() {
    let sim = sim().await;
    // Longer than a test waits.
    let setup = Setup::new("announces").sims([&sim]).set("drain_announce_ms", 3_600_000);
    let mut fak = setup.start().await;
    fak.heard("w0").await;
    let stream = stalled(&fak, &sim, 8).await;
    assert_eq!(fak.get("/ready").await.status, 200);
    fak.terminate();
    let stopping = async || {
        let ready = fak.get("/ready").await;
        (ready.status == 503).then_some(ready)
    };
    let ready = until("not ready", stopping).await;
    assert!(ready.text.contains("fak is stopping"), "{ready:?}");
    assert_eq!(ready.header("connection"), "close");
    let alive = fak.get("/health").await;
    assert_eq!((alive.status, alive.header("connection")), (200, "close"));
    sim.faults().limit_steps(None);
    let new = fak.try_ask(&prompt(2)).await;
    assert_eq!((new.status, new.header("connection")), (200, "close"));
    assert_eq!(rest(stream).await.last().unwrap(), "[DONE]");
    assert!(TcpStream::connect(fak.address).await.is_ok());
    // A second signal waits for nothing.
    fak.terminate();
    assert_eq!(fak.exit().await.code(), Some(1));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_announced_stop_ends_as_any_other() {
    let sim = sim().await;
    let setup = Setup::new("announced").sims([&sim]).set("drain_announce_ms", 100);
    let mut fak = setup.start().await;
    fak.heard("w0").await;
    let stream = stalled(&fak, &sim, 8).await;
    fak.terminate();
    no_longer_listens(&fak).await;
    sim.faults().limit_steps(None);
    assert_eq!(rest(stream).await.last().unwrap(), "[DONE]");
    assert_eq!(fak.exit().await.code(), Some(0));
}

/// Whether this process, and so each that it starts, passes SIGHUP over.
fn is_hangup_ignored() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:\t")).unwrap();
    u64::from_str_radix(mask, 16).unwrap() & 1 == 1
}

#[tokio::test(flavor = "multi_thread")]
async fn no_signal_that_can_be_caught_cuts_a_stream() {
    for ending in ["HUP", "QUIT", "INT"] {
        let sim = sim().await;
        let setup = Setup::new(&format!("signal-{ending}")).sims([&sim]);
        let mut fak = setup.start().await;
        fak.heard("w0").await;
        let stream = stalled(&fak, &sim, 8).await;
        for passed_over in ["USR1", "USR2", "ALRM", "XCPU", "XFSZ"] {
            fak.signal(passed_over);
            assert_eq!(fak.get("/ready").await.status, 200, "{passed_over}");
        }
        fak.signal(ending);
        if ending == "HUP" && is_hangup_ignored() {
            // Started by `nohup`, as this test: then a hangup is to mean nothing.
            assert_eq!(fak.get("/ready").await.status, 200);
            fak.terminate();
        }
        no_longer_listens(&fak).await;
        sim.faults().limit_steps(None);
        assert_eq!(rest(stream).await.last().unwrap(), "[DONE]", "{ending}");
        assert_eq!(fak.exit().await.code(), Some(0), "{ending}");
    }
}
