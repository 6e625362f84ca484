//! Replay: both framings, and every way in which it falls short of its end.

use std::time::Duration;

use bytes::Bytes;
use fak::events::replay::{Batch, Error, Limits, Replay};
use fak::events::zmtp;
use tokio::io::AsyncWriteExt;

use super::peers::{Router, Script, endpoint, recorded, wire};

/// Long enough for any machine; a test that waits for its end has failed.
const LONG: Duration = Duration::from_secs(60);

async fn ask(port: u16, from: u64) -> Replay {
    Replay::ask(&endpoint(port), from, Limits::default(), LONG).await.unwrap()
}

/// Everything up to the end, or to the error.
async fn drain(replay: &mut Replay) -> (Vec<Batch>, Option<Error>) {
    let mut batches = Vec::new();
    loop {
        match replay.next().await {
            Ok(Some(batch)) => batches.push(batch),
            Ok(None) => return (batches, None),
            Err(error) => return (batches, Some(error)),
        }
    }
}

fn seqs(batches: &[Batch]) -> Vec<u64> {
    batches.iter().map(|batch| batch.seq).collect()
}

#[tokio::test]
async fn every_recorded_replay_comes_through_in_both_framings() {
    for (path, frames, wanted) in [
        ("vllm-0.9.2/kv-events/replay-sint-dealer.bin", 3, 0..9),
        ("vllm-0.11.0/kv-events/replay-int-dealer.bin", 3, 0..9),
        ("vllm-0.25.1/kv-events/replay-bytes-dealer.bin", 3, 0..10),
        ("vllm-0.28.0/kv-events/replay-int-dealer.bin", 4, 0..12),
        ("vllm-0.33.0/kv-events/replay-bytes-dealer.bin", 4, 0..14),
        ("vllm-0.32/kv-events/replay-from-0-dealer.bin", 4, 0..17),
        ("vllm-0.32/kv-events/replay-gap-buffer-wrapped-dealer.bin", 4, 30..50),
        ("vllm-0.32/kv-events/replay-beyond-end-dealer.bin", 4, 0..0),
        ("vllm-0.32/kv-events/replay-tail-dealer.bin", 4, 14..17),
    ] {
        let answers = recorded(path, frames);
        let mut router = Router::bind(0).await;
        let mut replay = ask(router.port, 5).await;
        let asked = router.asked().await;
        assert_eq!(asked.from, 5);
        for answer in &answers {
            router.answer(&asked, answer).await;
        }
        let (batches, error) = drain(&mut replay).await;
        assert!(error.is_none(), "{path}: {error:?}");
        assert_eq!(seqs(&batches), wanted.collect::<Vec<_>>(), "{path}");
        for (batch, answer) in batches.iter().zip(&answers) {
            assert_eq!(batch.payload, answer[frames - 1], "{path}");
        }
        assert!(replay.next().await.unwrap().is_none(), "the end stays the end");
    }
}

/// What a ROUTER up to 0.32.0 does to a slow reader: a hole, and no end marker.
#[tokio::test]
async fn a_replay_without_its_end_times_out_and_says_how_far_it_came() {
    let mut router = Router::bind(0).await;
    let mut replay = ask(router.port, 0).await;
    let asked = router.asked().await;
    for seq in [0, 1, 5] {
        router.batch(&asked, seq, b"x").await;
        assert_eq!(
            replay.next().await.unwrap().unwrap().seq,
            seq,
            "a hole is handed over as it is"
        );
    }
    // From here on the clock goes to the deadline as soon as nothing is left to do.
    tokio::time::pause();
    let (batches, error) = drain(&mut replay).await;
    assert_eq!(batches, []);
    assert!(matches!(error, Some(Error::Timeout { last_seq: Some(5) })), "{error:?}");
    assert_eq!(replay.last_seq(), Some(5));
}

/// The end marker was dropped with the rest: there is no use in waiting for the deadline.
#[tokio::test]
async fn a_replay_that_goes_quiet_is_cut_long_before_its_deadline() {
    let mut router = Router::bind(0).await;
    let limits = Limits { quiet_max: Duration::from_millis(50), ..Limits::default() };
    let mut replay = Replay::ask(&endpoint(router.port), 0, limits, LONG).await.unwrap();
    let asked = router.asked().await;
    router.batch(&asked, 0, b"x").await;
    let began = std::time::Instant::now();
    let (batches, error) = drain(&mut replay).await;
    assert!(matches!(error, Some(Error::Timeout { .. })), "{error:?}");
    assert!(batches.len() <= 1 && began.elapsed() < LONG / 2);
}

#[tokio::test]
async fn a_replay_whose_engine_dies_is_cut() {
    let mut router = Router::bind(0).await;
    let mut replay = ask(router.port, 0).await;
    let asked = router.asked().await;
    router.batch(&asked, 0, b"x").await;
    assert_eq!(replay.next().await.unwrap().unwrap().seq, 0);
    router.kill().await;
    let error = replay.next().await.unwrap_err();
    assert!(matches!(error, Error::Cut { last_seq: Some(0), .. }), "{error:?}");
    assert!(replay.next().await.is_err(), "a replay that was cut has no end");
}

/// The next engine on the same port must not answer for the dead one.
#[tokio::test]
async fn a_request_is_never_answered_by_the_next_engine() {
    let mut router = Router::bind(0).await;
    let port = router.port;
    let mut replay = ask(port, 0).await;
    router.asked().await;
    router.kill().await;
    let mut next = Router::bind(port).await;
    let error = replay.next().await.unwrap_err();
    assert!(matches!(error, Error::Cut { last_seq: None, .. }), "{error:?}");
    // The next engine sees the request that was sent to it, and no other.
    let mut replay = ask(port, 7).await;
    let asked = next.asked().await;
    assert_eq!(asked.from, 7);
    next.end(&asked).await;
    assert!(replay.next().await.unwrap().is_none());
}

#[tokio::test]
async fn an_engine_that_is_down_is_not_asked() {
    let script = Script::bind().await;
    let port = script.port;
    drop(script);
    let asked = Replay::ask(&endpoint(port), 0, Limits::default(), LONG).await;
    assert!(matches!(asked, Err(Error::Connect(zmtp::Error::Io(_)))), "{asked:?}");
}

#[tokio::test]
async fn a_publisher_where_a_router_should_be_is_told() {
    let script = Script::bind().await;
    let here = endpoint(script.port);
    let asking = Replay::ask(&here, 0, Limits::default(), LONG);
    let (_stream, asked) = tokio::join!(script.accept_as("PUB"), asking);
    let error = asked.unwrap_err();
    let why = std::error::Error::source(&error).unwrap().to_string();
    assert_eq!(why, "the peer is a PUB socket, and a DEALER talks to ROUTER");
}

#[tokio::test]
async fn an_answer_that_is_no_batch_ends_the_replay() {
    let x = Bytes::from_static(b"x");
    let none = Bytes::new();
    for (frames, wanted) in [
        (vec![none.clone()], "found 1 frames, expected 2 to 4"),
        (vec![none.clone(); 5], "found 5 frames, expected 2 to 4"),
        (vec![none.clone(), x.clone(), x.clone()], "sequence: found 1 bytes, expected 8"),
        (
            vec![x.clone(), none.clone(), Bytes::from_static(&[0; 8]), x.clone()],
            "delimiter: found 1 bytes, expected none",
        ),
    ] {
        let mut router = Router::bind(0).await;
        let mut replay = ask(router.port, 0).await;
        let asked = router.asked().await;
        router.batch(&asked, 3, b"good").await;
        router.answer(&asked, &frames).await;
        let (batches, error) = drain(&mut replay).await;
        assert_eq!(seqs(&batches), [3]);
        match error {
            Some(Error::BadFrame { last_seq: Some(3), source }) => {
                assert_eq!(source.to_string(), wanted);
            }
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn a_replay_beyond_its_limits_is_ended() {
    let batches_max = Limits { batches_max: 2, ..Limits::default() };
    let bytes_max = Limits { bytes_max: 25, ..Limits::default() };
    for (limits, unit) in [(batches_max, "batches"), (bytes_max, "bytes")] {
        let mut router = Router::bind(0).await;
        let here = endpoint(router.port);
        let mut replay = Replay::ask(&here, 0, limits, LONG).await.unwrap();
        let asked = router.asked().await;
        for seq in 0..3 {
            router.batch(&asked, seq, &[0; 10]).await;
        }
        let (batches, error) = drain(&mut replay).await;
        assert_eq!(seqs(&batches), [0, 1]);
        match error {
            Some(Error::TooLarge { last_seq: Some(1), unit: got, .. }) => assert_eq!(got, unit),
            other => panic!("{other:?}"),
        }
    }
}

/// A peer that always has one more batch ready does not outlive the deadline.
#[tokio::test]
async fn the_deadline_holds_against_a_peer_that_never_pauses() {
    let script = Script::bind().await;
    let here = endpoint(script.port);
    let asking = Replay::ask(&here, 0, Limits::default(), LONG);
    let (mut stream, asked) = tokio::join!(script.accept_as("ROUTER"), asking);
    let chunk = wire(&[b"", b"", &4u64.to_be_bytes(), b"again"]).repeat(1000);
    stream.write_all(&chunk).await.unwrap();
    let mut replay = asked.unwrap();
    for _ in 0..10 {
        assert_eq!(replay.next().await.unwrap().unwrap().seq, 4);
    }
    tokio::time::pause();
    tokio::time::advance(LONG).await;
    let error = replay.next().await.unwrap_err();
    assert!(matches!(error, Error::Timeout { last_seq: Some(4) }), "{error:?}");
}

/// As many batches as vLLM keeps by default, of a usual size, faster than they are taken.
#[tokio::test]
async fn ten_thousand_batches_come_through_whole() {
    let mut router = Router::bind(0).await;
    let mut replay = ask(router.port, 0).await;
    let engine = tokio::spawn(async move {
        let asked = router.asked().await;
        for seq in 0..10_000 {
            router.batch(&asked, seq, &[7; 3000]).await;
        }
        router.end(&asked).await;
        router
    });
    for seq in 0..10_000 {
        let batch = replay.next().await.unwrap().unwrap();
        assert_eq!((batch.seq, batch.payload.len()), (seq, 3000));
    }
    assert!(replay.next().await.unwrap().is_none());
    drop(engine.await.unwrap());
}
