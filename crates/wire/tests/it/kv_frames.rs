//! Live messages, replay requests and both replay framings.

use fak_wire::kv::frames::{FrameError, Live, Reply, live, replay_reply, replay_request};
use proptest::prelude::*;

use crate::fixtures;

const END: [u8; 8] = [0xff; 8];

#[test]
fn a_replay_from_0_gives_every_batch_in_order_and_then_the_end() {
    for (path, last) in [
        ("vllm-0.32/kv-events/replay-from-0-dealer.bin", 16),
        ("vllm-0.9.2/kv-events/replay-sint-dealer.bin", 8),
        ("vllm-0.25.1/kv-events/replay-int-dealer.bin", 9),
        ("vllm-0.33.0/kv-events/replay-bytes-dealer.bin", 13),
    ] {
        let messages = fixtures::messages(path);
        let replies: Vec<_> = messages.iter().map(|frames| replay_reply(frames).unwrap()).collect();
        let (end, batches) = replies.split_last().unwrap();
        assert_eq!(*end, Reply::End, "{path}");
        let seqs: Vec<u64> = batches
            .iter()
            .map(|reply| match reply {
                Reply::Batch { seq, .. } => *seq,
                Reply::End => panic!("{path}: an end in the middle"),
            })
            .collect();
        assert_eq!(seqs, (0..=last).collect::<Vec<_>>(), "{path}");
    }
}

#[test]
fn a_wrapped_buffer_answers_later_than_asked_and_beyond_the_end_is_the_end_alone() {
    let wrapped = fixtures::messages("vllm-0.32/kv-events/replay-gap-buffer-wrapped-dealer.bin");
    assert!(matches!(replay_reply(&wrapped[0]).unwrap(), Reply::Batch { seq: 30, .. }));
    let beyond = fixtures::messages("vllm-0.32/kv-events/replay-beyond-end-dealer.bin");
    assert_eq!(beyond.len(), 1);
    assert_eq!(replay_reply(&beyond[0]).unwrap(), Reply::End);
}

#[test]
fn both_framings_read_the_same_with_and_without_the_delimiter() {
    let seq = 7u64.to_be_bytes();
    let batch = Ok(Reply::Batch { seq: 7, payload: b"batch" });
    assert_eq!(replay_reply::<&[u8]>(&[b"", &seq, b"batch"]), batch);
    assert_eq!(replay_reply::<&[u8]>(&[&seq, b"batch"]), batch);
    assert_eq!(replay_reply::<&[u8]>(&[b"", b"topic", &seq, b"batch"]), batch);
    assert_eq!(replay_reply::<&[u8]>(&[b"topic", &seq, b"batch"]), batch);
    assert_eq!(replay_reply::<&[u8]>(&[b"", &END, b""]), Ok(Reply::End));
    assert_eq!(replay_reply::<&[u8]>(&[&END, b""]), Ok(Reply::End));
    assert_eq!(replay_reply::<&[u8]>(&[b"", b"", &END, b""]), Ok(Reply::End));
    assert_eq!(replay_reply::<&[u8]>(&[b"", &END, b""]), Ok(Reply::End));
}

#[test]
fn other_shapes_are_refused_with_what_was_found() {
    let seq = 7u64.to_be_bytes();
    let none: &[&[u8]] = &[];
    assert!(matches!(replay_reply(none), Err(FrameError::Count { found: 0, .. })));
    let five: [&[u8]; 5] = [b"", b"", b"", &seq, b"x"];
    assert!(matches!(replay_reply(&five), Err(FrameError::Count { found: 5, .. })));
    let short: [&[u8]; 3] = [b"", b"1234567", b"x"];
    assert_eq!(replay_reply(&short), Err(FrameError::Sequence { found: 7 }));
    let identity: [&[u8]; 4] = [b"id", b"", &seq, b"x"];
    assert_eq!(replay_reply(&identity), Err(FrameError::Delimiter { found: 2 }));
    let full_end: [&[u8]; 3] = [b"", &END, b"x"];
    assert!(matches!(replay_reply(&full_end), Err(FrameError::Payload { found: 1, .. })));
    let empty: [&[u8]; 3] = [b"", &seq, b""];
    assert!(matches!(replay_reply(&empty), Err(FrameError::Payload { seq: 7, found: 0, .. })));
    let end_as_live: [&[u8]; 3] = [b"", &END, b""];
    assert!(matches!(live(&end_as_live), Err(FrameError::Payload { .. })));
    assert_eq!(live(&[b"only".as_slice()]).unwrap_err().to_string(), "found 1 frames, expected 3");
}

#[test]
fn a_restarted_engine_numbers_from_0_again() {
    let messages = fixtures::messages("vllm-0.32/kv-events/after-restart-seq-resets.bin");
    let seqs: Vec<_> = messages.iter().map(|frames| live(frames).unwrap().seq).collect();
    assert_eq!(seqs, [0, 1]);
    assert_eq!(live(&messages[0]).unwrap().topic, b"kv@tiny");
}

proptest! {
    #[test]
    fn what_is_sent_is_read_back(topic: Vec<u8>, seq in 0..u64::MAX, body in "[a-z]{1,20}") {
        let frames = [topic.clone(), seq.to_be_bytes().to_vec(), body.clone().into_bytes()];
        let payload = body.as_bytes();
        prop_assert_eq!(live(&frames), Ok(Live { topic: &topic, seq, payload }));
        prop_assert_eq!(replay_reply(&frames), Ok(Reply::Batch { seq, payload }));
        let [delimiter, start] = replay_request(seq);
        prop_assert!(delimiter.is_empty());
        prop_assert_eq!(start, seq.to_be_bytes());
    }

    #[test]
    fn no_frames_panic(frames: Vec<Vec<u8>>) {
        let _ = (live(&frames), replay_reply(&frames));
    }
}
