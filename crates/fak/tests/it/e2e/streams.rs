//! A thousand streams at once, and clients that leave at any time: nothing of them stays, neither
//! in fak nor in the engines.

use fak_sim::{Binds, Sim, SimConfig};
use http_body_util::BodyExt as _;
use serde_json::json;
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::process::{Fak, PATIENT, Setup, until};

const STREAMS: usize = 1000;
const TOKENS: usize = 12;

/// When a client leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Leaves {
    /// While its stream stands still: queued, or after some tokens.
    Held,
    /// When it has read so many chunks: more than there are before all are there.
    After(usize),
    /// When its stream has ended.
    Never,
}

/// Runs a client, and tells whether its stream ended whole.
async fn client(
    request: impl Future<Output = http::Response<hyper::body::Incoming>>,
    leaves: Leaves,
    mut go: watch::Receiver<bool>,
) -> bool {
    let reads = async {
        let mut stream = request.await;
        assert_eq!(stream.status(), 200);
        let (mut text, mut chunks) = (Vec::new(), 0);
        while let Some(frame) = stream.body_mut().frame().await {
            text.extend_from_slice(&frame.unwrap().into_data().unwrap());
            chunks += 1;
            if leaves == Leaves::After(chunks) {
                return false;
            }
        }
        assert!(text.ends_with(b"data: [DONE]\n\n"), "{}", String::from_utf8_lossy(&text));
        true
    };
    let left = async {
        match leaves {
            Leaves::Held => drop(go.wait_for(|go| *go).await.unwrap()),
            Leaves::After(_) | Leaves::Never => std::future::pending().await,
        }
    };
    tokio::select! {
        () = left => false,
        whole = reads => whole,
    }
}

async fn in_flight(fak: &Fak) -> usize {
    let workers = fak.get("/fak/v1/workers").await.json();
    let workers = workers.as_array().unwrap().iter();
    workers.map(|worker| worker["in_flight"].as_u64().unwrap() as usize).sum()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_streams_are_held_and_nothing_stays_of_clients_that_leave() {
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let mut sims = Vec::new();
    for _ in 0..2 {
        sims.push(Sim::start(SimConfig::default(), Binds::default()).await.unwrap());
    }
    let engines = || sims.iter().map(Sim::requests_in_flight).sum::<usize>();
    let setup = Setup::new("thousand").sims(&sims);
    let fak = setup.start().await;
    fak.heard("w0").await;
    fak.heard("w1").await;
    sims.iter().for_each(|sim| sim.faults().limit_steps(Some(random.u64(0..3))));

    let (go, is_go) = watch::channel(false);
    let mut clients = JoinSet::new();
    let mut held = 0;
    for number in 0..STREAMS {
        let leaves = match random.u8(0..4) {
            0 | 1 => Leaves::Held,
            2 => Leaves::After(random.usize(3..TOKENS)),
            _ => Leaves::Never,
        };
        held += usize::from(leaves == Leaves::Held);
        let body = json!({
            "model": "tiny",
            "prompt": format!("stream {number}"),
            "max_tokens": TOKENS,
            "ignore_eos": true,
            // Of those who leave before anything ends, some ask for a whole answer.
            "stream": leaves != Leaves::Held || random.bool(),
        });
        let request = fak.opens("/v1/completions", body.to_string());
        clients.spawn(tokio::time::timeout(PATIENT, client(request, leaves, is_go.clone())));
    }
    let expected = STREAMS;
    until("all are in flight", async || (in_flight(&fak).await == expected).then_some(())).await;
    until("at the engines, too", async || (engines() == expected).then_some(())).await;

    go.send_replace(true);
    let expected = STREAMS - held;
    until("those who left are gone", async || (in_flight(&fak).await == expected).then_some(()))
        .await;
    until("at the engines, too", async || (engines() == expected).then_some(())).await;

    sims.iter().for_each(|sim| sim.faults().limit_steps(None));
    let mut whole = 0;
    while let Some(ended) = clients.join_next().await {
        whole += usize::from(ended.unwrap().expect("it ends"));
    }
    assert!(whole > 0, "somebody stays");
    until("nobody is in flight", async || (in_flight(&fak).await == 0).then_some(())).await;
    until("nobody runs", async || (engines() == 0).then_some(())).await;
    until("the engines' gauges say so", async || {
        let metrics = fak.get("/metrics").await.text;
        let gauges = metrics.lines().filter(|line| {
            line.starts_with("fak_serving_requests_running{")
                || line.starts_with("fak_serving_requests_waiting{")
        });
        let gauges: Vec<_> = gauges.collect();
        assert_eq!(gauges.len(), 4, "{gauges:?}");
        gauges.iter().all(|line| line.ends_with(" 0")).then_some(())
    })
    .await;
    // And there is room for others.
    fak.ask(&super::process::prompt(1)).await;
    fak.terminated().await;
}
