//! A publisher may send anything: the decoder answers with an error, not with a panic or with
//! memory. (That memory stays bounded is measured in `tests/kv_memory.rs`.)

use fak_wire::kv::{DecodeError, Limits, decode};
use proptest::prelude::*;

use crate::fixtures;

fn error(payload: &[u8]) -> DecodeError {
    decode(payload, &Limits::default()).unwrap_err()
}

/// `[1.5, [<event>], 0]` around the bytes of one event.
fn batch(event: &[u8]) -> Vec<u8> {
    let mut payload = vec![0x93, 0xcb];
    payload.extend(1.5f64.to_be_bytes());
    payload.push(0x91);
    payload.extend(event);
    payload.push(0);
    payload
}

/// A removal whose one field is these bytes.
fn removed(hashes: &[u8]) -> Vec<u8> {
    let mut event = vec![0x92, 0xac];
    event.extend(b"BlockRemoved");
    event.extend(hashes);
    batch(&event)
}

/// A removal with an unknown field of these bytes.
fn unknown_field(value: &[u8]) -> Vec<u8> {
    let mut event = vec![0x83, 0xa4];
    event.extend(b"type\xacBlockRemoved\xacblock_hashes\x90\xa3odd");
    event.extend(value);
    batch(&event)
}

#[test]
fn length_claims_of_4_gib_are_refused() {
    for claim in [
        removed(&[0xdd, 0xff, 0xff, 0xff, 0xff]),
        removed(&[0x91, 0xc6, 0xff, 0xff, 0xff, 0xff]),
        unknown_field(&[0xdb, 0xff, 0xff, 0xff, 0xff]),
        unknown_field(&[0xdd, 0xff, 0xff, 0xff, 0xff]),
        unknown_field(&[0xdf, 0xff, 0xff, 0xff, 0xff]),
        vec![0x93, 0xcb, 0, 0, 0, 0, 0, 0, 0, 0, 0xdd, 0xff, 0xff, 0xff, 0xff],
        vec![0xdd, 0xff, 0xff, 0xff, 0xff],
    ] {
        let error = error(&claim);
        let refused = matches!(error, DecodeError::Limit { .. } | DecodeError::Truncated { .. });
        assert!(refused, "{error}");
    }
}

#[test]
fn a_nesting_of_10_000_levels_is_refused() {
    let error = error(&unknown_field(&[0x91; 10_000]));
    assert_eq!(
        error.to_string(),
        "event 0, field (unknown): found 17 levels of nesting, expected at most 16"
    );
}

#[test]
fn ten_million_hashes_are_refused() {
    let mut hashes = vec![0xdd];
    hashes.extend(10_000_000u32.to_be_bytes());
    hashes.resize(hashes.len() + 10_000_000, 5);
    assert_eq!(
        error(&removed(&hashes)).to_string(),
        "event 0, field block_hashes: found 10000000 hashes, expected at most 262144"
    );
}

#[test]
fn extension_types_are_refused_wherever_they_stand() {
    for ext in [&[0xd4, 1, 0][..], &[0xc7, 1, 5, 0], &[0xd8; 18]] {
        let fields = [removed(&[&[0x91], ext].concat()), unknown_field(ext), batch(ext)];
        for payload in fields {
            assert!(error(&payload).to_string().contains("an extension type"), "{payload:x?}");
        }
    }
}

#[test]
fn a_time_that_is_no_time_is_refused() {
    for time in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        let mut payload = vec![0x92, 0xcb];
        payload.extend(time.to_be_bytes());
        payload.push(0x90);
        let text = error(&payload).to_string();
        assert!(text.starts_with("batch, field ts: found"), "{text}");
        assert!(text.ends_with("expected finite unix seconds"), "{text}");
    }
}

#[test]
fn a_name_given_twice_is_refused_known_or_not() {
    let mut known = vec![0x84, 0xa4];
    known.extend(b"type\xacBlockRemoved\xacblock_hashes\x90\xa6medium\xa3GPU\xa6medium\xa3CPU");
    assert_eq!(
        error(&batch(&known)).to_string(),
        "event 0, field medium: found it twice, expected once"
    );
    let mut unknown = vec![0x84, 0xa4];
    unknown.extend(b"type\xacBlockRemoved\xacblock_hashes\x90\xa1x\x01\xa1x\x02");
    assert!(matches!(error(&batch(&unknown)), DecodeError::Duplicate { .. }));
    let mut tag = vec![0x83, 0xa4];
    tag.extend(b"type\xacBlockRemoved\xacblock_hashes\x90\xa4type\xabBlockStored");
    assert!(matches!(error(&batch(&tag)), DecodeError::Duplicate { .. }));
}

#[test]
fn every_limit_holds_at_its_value_and_breaks_one_below() {
    let payload = &fixtures::messages("vllm-0.32/kv-events/gpu-store-lora-salted.bin")[0][2];
    let exact = Limits {
        payload_bytes: payload.len(),
        events: 1,
        fields: 11,
        hashes: 7,
        tokens: 224,
        keys_per_block: 2,
        text_bytes: 18,
        depth: 0,
        ..Limits::default()
    };
    decode(payload, &exact).unwrap();
    let smaller = [
        Limits { payload_bytes: exact.payload_bytes - 1, ..exact.clone() },
        Limits { events: 0, ..exact.clone() },
        Limits { fields: 10, ..exact.clone() },
        Limits { hashes: 6, ..exact.clone() },
        Limits { tokens: 223, ..exact.clone() },
        Limits { keys_per_block: 1, ..exact.clone() },
        Limits { text_bytes: 16, ..exact.clone() },
        Limits { memory_bytes: 1024, ..exact.clone() },
    ];
    for limits in smaller {
        let error = decode(payload, &limits).unwrap_err();
        assert!(matches!(error, DecodeError::Limit { .. }), "{limits:?}: {error}");
    }
    let digests = &fixtures::messages("vllm-0.32/kv-events/gpu-store-bytes-hashes.bin")[0][2];
    decode(digests, &Limits { hash_bytes: 32, ..Limits::default() }).unwrap();
    assert!(decode(digests, &Limits { hash_bytes: 31, ..Limits::default() }).is_err());
}

proptest! {
    #[test]
    fn no_bytes_panic(bytes: Vec<u8>) {
        let _ = decode(&bytes, &Limits::default());
    }

    #[test]
    fn no_mutation_of_a_recording_panics(
        file in 0usize..1000,
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        cut: prop::sample::Index,
    ) {
        let files = fixtures::list("kv-events", ".bin");
        for frames in fixtures::messages(&files[file % files.len()]).iter().take(2) {
            let mut payload = frames.last().unwrap().clone();
            if payload.is_empty() {
                continue;
            }
            for (at, byte) in &edits {
                let at = at.index(payload.len());
                payload[at] = *byte;
            }
            let _ = decode(&payload, &Limits::default());
            payload.truncate(cut.index(payload.len()));
            prop_assert!(decode(&payload, &Limits::default()).is_err());
        }
    }
}
