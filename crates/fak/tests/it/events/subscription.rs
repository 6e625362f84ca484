//! The live subscription: order, epochs, and peers that misbehave.

use std::time::Duration;

use bytes::Bytes;
use fak::events::zmq::{Options, Subscription};
use fak::events::zmtp::{self, Connection, Role};
use fak::events::{Item, Lost};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::peers::{Publisher, Script, endpoint, greeting, ready, wire};

fn subscribe(port: u16) -> Subscription {
    Subscription::new(options(port))
}

fn options(port: u16) -> Options {
    let mut options = Options::new(endpoint(port), "kv@".to_owned());
    options.retry_after_min = Duration::from_millis(5);
    options.retry_after_max = Duration::from_millis(20);
    options
}

async fn connected(subscription: &mut Subscription) -> u64 {
    match subscription.next().await {
        Item::Connected { epoch } => epoch,
        other => panic!("{other:?}"),
    }
}

async fn batch(subscription: &mut Subscription) -> (u64, String) {
    match subscription.next().await {
        Item::Batch { seq, payload } => (seq, String::from_utf8(payload.to_vec()).unwrap()),
        other => panic!("{other:?}"),
    }
}

async fn lost(subscription: &mut Subscription) -> Lost {
    match subscription.next().await {
        Item::Disconnected { why } => why,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn batches_come_in_order_after_the_connection() {
    let mut publisher = Publisher::bind(0).await;
    let mut subscription = subscribe(publisher.port);
    assert_eq!(connected(&mut subscription).await, 1);
    assert_eq!(publisher.subscribed().await, "kv@");
    for seq in 0..1000 {
        publisher.publish(seq, &format!("batch {seq}")).await;
    }
    for seq in 0..1000 {
        assert_eq!(batch(&mut subscription).await, (seq, format!("batch {seq}")));
    }
}

#[tokio::test]
async fn a_message_that_is_no_batch_is_told_and_the_stream_goes_on() {
    let mut publisher = Publisher::bind(0).await;
    let mut subscription = subscribe(publisher.port);
    connected(&mut subscription).await;
    publisher.subscribed().await;
    let topic = Bytes::from_static(b"kv@tiny");
    publisher.send([topic.clone(), Bytes::from_static(b"only two")]).await;
    publisher.send([topic.clone(), Bytes::from_static(b"7 bytes"), Bytes::new()]).await;
    publisher.send([topic.clone(), topic.clone(), topic.clone(), topic.clone()]).await;
    publisher.publish(3, "good").await;
    for wanted in [
        "found 2 frames, expected 3",
        "sequence: found 7 bytes, expected 8",
        "found 4 frames, expected 3",
    ] {
        match subscription.next().await {
            Item::Bad { why } => {
                assert_eq!(std::error::Error::source(&why).unwrap().to_string(), wanted);
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(batch(&mut subscription).await, (3, "good".to_owned()));
}

/// A publisher dies with batches unread and another life binds the same port, several times over.
#[tokio::test]
async fn batches_of_two_lives_are_never_mixed() {
    let mut publisher = Publisher::bind(0).await;
    let port = publisher.port;
    let mut subscription = subscribe(port);
    for life in 1..=5u64 {
        assert_eq!(connected(&mut subscription).await, life);
        publisher.subscribed().await;
        for seq in 0..200 {
            publisher.publish(seq, &format!("life {life}")).await;
        }
        // The first half while the publisher lives; it dies with the rest on the way or not even
        // sent.
        for seq in 0..100 {
            assert_eq!(batch(&mut subscription).await, (seq, format!("life {life}")));
        }
        publisher.kill().await;
        publisher = Publisher::bind(port).await;
        for seq in 100.. {
            match subscription.next().await {
                Item::Batch { seq: got, payload } => {
                    assert_eq!((got, &payload[..]), (seq, format!("life {life}").as_bytes()));
                }
                Item::Disconnected { why: Lost::Connection(_) } => break,
                other => panic!("{other:?}"),
            }
        }
    }
}

#[tokio::test]
async fn what_the_old_connection_held_is_dropped_when_a_new_one_is_asked_for() {
    let mut publisher = Publisher::bind(0).await;
    let mut subscription = subscribe(publisher.port);
    connected(&mut subscription).await;
    publisher.subscribed().await;
    for seq in 0..100 {
        publisher.publish(seq, "old").await;
    }
    assert_eq!(batch(&mut subscription).await, (0, "old".to_owned()));

    subscription.reconnect();
    assert!(!subscription.is_connected());
    assert!(matches!(lost(&mut subscription).await, Lost::Asked));
    assert_eq!(connected(&mut subscription).await, 2);
    publisher.subscribed().await;
    publisher.publish(100, "new").await;
    assert_eq!(batch(&mut subscription).await, (100, "new".to_owned()));
}

#[tokio::test]
async fn a_peer_that_ends_every_attempt_is_tried_until_it_stays() {
    let script = Script::bind().await;
    let port = script.port;
    let peer = tokio::spawn(async move {
        for _ in 0..3 {
            drop(script.accept().await);
        }
        let mut stream = script.accept_as("PUB").await;
        let seq = 7u64.to_be_bytes();
        stream.write_all(&wire(&[b"kv@", &seq, b"at last"])).await.unwrap();
        stream
    });
    let mut subscription = subscribe(port);
    assert_eq!(connected(&mut subscription).await, 1);
    assert_eq!(batch(&mut subscription).await, (7, "at last".to_owned()));
    drop(peer.await.unwrap());
    assert!(matches!(lost(&mut subscription).await, Lost::Connection(_)));
}

/// Nine bytes that abort a process which reserves what it is told.
#[tokio::test]
async fn an_absurd_length_ends_the_connection_and_nothing_else() {
    let script = Script::bind().await;
    let mut subscription = subscribe(script.port);
    for (epoch, announced) in [(1, 1u64 << 45), (2, u64::MAX), (3, 1 << 30)] {
        let (mut stream, got) = tokio::join!(script.accept_as("PUB"), connected(&mut subscription));
        assert_eq!(got, epoch);
        stream.write_all(&[0x02]).await.unwrap();
        stream.write_all(&announced.to_be_bytes()).await.unwrap();
        let why = lost(&mut subscription).await;
        assert!(matches!(why, Lost::Connection(zmtp::Error::TooLarge { .. })), "{why:?}");
    }
}

/// The end of a connection comes after what it brought whole; a half message is never yielded.
#[tokio::test]
async fn what_came_whole_is_yielded_before_the_end_and_half_a_batch_is_not() {
    let script = Script::bind().await;
    let mut subscription = subscribe(script.port);
    let (mut stream, _) = tokio::join!(script.accept_as("PUB"), connected(&mut subscription));
    let whole = wire(&[b"kv@", &1u64.to_be_bytes(), b"whole"]);
    let half = &wire(&[b"kv@", &2u64.to_be_bytes(), b"half"])[..16];
    stream.write_all(&[&whole, half].concat()).await.unwrap();
    stream.shutdown().await.unwrap();
    assert_eq!(batch(&mut subscription).await, (1, "whole".to_owned()));
    assert!(matches!(lost(&mut subscription).await, Lost::Connection(zmtp::Error::Closed)));
}

/// The future is dropped after every poll, as a `select!` that another branch wins does.
#[tokio::test]
async fn nothing_is_lost_when_next_is_cancelled() {
    let mut publisher = Publisher::bind(0).await;
    let mut subscription = subscribe(publisher.port);
    let mut polled = 0;
    let mut items = Vec::new();
    let mut feed = tokio::spawn(async move {
        publisher.subscribed().await;
        for seq in 0..100 {
            publisher.publish(seq, "x").await;
            tokio::task::yield_now().await;
        }
        publisher
    });
    while items.len() < 101 {
        tokio::select! {
            biased;
            item = subscription.next() => items.push(item),
            () = tokio::task::yield_now() => polled += 1,
        }
    }
    (&mut feed).await.unwrap();
    assert!(matches!(items[0], Item::Connected { epoch: 1 }));
    for (seq, item) in (0..).zip(&items[1..]) {
        assert!(matches!(item, Item::Batch { seq: got, .. } if *got == seq), "{seq}: {item:?}");
    }
    assert!(polled > 0, "the future was never dropped half-way");
}

#[tokio::test]
async fn a_ping_is_answered_with_its_context() {
    let script = Script::bind().await;
    let mut subscription = subscribe(script.port);
    let (mut stream, _) = tokio::join!(script.accept_as("PUB"), connected(&mut subscription));
    let mut subscribe = [0; 6];
    stream.read_exact(&mut subscribe).await.unwrap();
    assert_eq!(&subscribe, b"\0\x04\x01kv@");
    stream.write_all(b"\x04\x0a\x04PING\0\0abc").await.unwrap();
    let seq = 0u64.to_be_bytes();
    stream.write_all(&wire(&[b"kv@", &seq, b"x"])).await.unwrap();
    assert_eq!(batch(&mut subscription).await, (0, "x".to_owned()));
    let mut pong = [0; 10];
    stream.read_exact(&mut pong).await.unwrap();
    assert_eq!(&pong, b"\x04\x08\x04PONGabc");
}

#[tokio::test]
async fn the_wrong_peer_is_told_apart() {
    for (bytes, wanted) in [
        (
            b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec(),
            "the peer does not speak ZMTP (its first byte is 0x48)",
        ),
        (greeting(1, "NULL"), "the peer speaks ZMTP 1, older than 3"),
        (greeting(3, "CURVE"), "the peer asks for the security mechanism `CURVE`"),
        (
            [greeting(3, "NULL"), ready("ROUTER")].concat(),
            "the peer is a ROUTER socket, and a SUB talks to PUB or XPUB",
        ),
        (
            [greeting(3, "NULL"), b"\x04\x0a\x05ERROR\x03no!".to_vec()].concat(),
            "the peer refused the handshake: no!",
        ),
        (
            [greeting(3, "NULL"), wire(&[b"early"])].concat(),
            "ZMTP violated: a message came before the handshake's end",
        ),
    ] {
        let script = Script::bind().await;
        let peer = async {
            let mut stream = script.accept().await;
            stream.write_all(&bytes).await.unwrap();
            stream
        };
        let limits = zmtp::Limits::default();
        let here = endpoint(script.port);
        let opening = Connection::open(&here, Role::Sub, limits, Duration::from_secs(20));
        let (_stream, opened) = tokio::join!(peer, opening);
        assert_eq!(opened.unwrap_err().to_string(), wanted);
    }
}

#[tokio::test]
async fn a_peer_that_says_nothing_is_given_up_on() {
    let script = Script::bind().await;
    let limits = zmtp::Limits::default();
    let here = endpoint(script.port);
    let opened = Connection::open(&here, Role::Sub, limits, Duration::from_millis(20)).await;
    assert_eq!(opened.unwrap_err().to_string(), "no ZMTP handshake within 20 ms");
}

/// A reader that does nothing takes a bounded number of bytes off its peer.
#[tokio::test]
async fn a_reader_that_does_not_read_stalls_its_peer() {
    let script = Script::bind().await;
    let mut options = options(script.port);
    options.limits.read_ahead_bytes = 100_000;
    let mut subscription = Subscription::new(options);
    let (stream, _) = tokio::join!(script.accept_as("PUB"), connected(&mut subscription));
    let payload = vec![0; 200];
    let one = wire(&[b"kv@", &0u64.to_be_bytes(), &payload]);
    let chunk = one.repeat(1000);
    let mut sent = 0;
    stream.writable().await.unwrap();
    // Until the kernel's buffers on both sides are full.
    while let Ok(written) = stream.try_write(&chunk[sent % one.len()..]) {
        sent += written;
        assert!(sent < 1 << 30, "somebody takes it all");
    }
    assert_eq!(batch(&mut subscription).await.0, 0);
}
