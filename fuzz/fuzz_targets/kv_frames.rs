//! Any frames, written as the recordings are (length as u32, then bytes), as a live message and as
//! a reply: no panic, and both readers agree on what they both take.
#![no_main]

use fak_wire::kv::frames::{Reply, live, replay_reply};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let mut rest = data;
    let mut frames: Vec<&[u8]> = Vec::new();
    while let Some((len, tail)) = rest.split_first_chunk::<4>() {
        let len = (u32::from_be_bytes(*len) as usize).min(tail.len());
        let (frame, tail) = tail.split_at(len);
        frames.push(frame);
        rest = tail;
    }
    for frames in (2..=5).flat_map(|size| frames.chunks(size)) {
        let reply = replay_reply(frames);
        if let Ok(message) = live(frames) {
            let batch = Reply::Batch { seq: message.seq, payload: message.payload };
            assert_eq!(reply, Ok(batch));
        }
    }
});
