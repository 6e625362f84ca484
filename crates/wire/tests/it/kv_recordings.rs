//! Every recorded KV event file decodes to the facts that an independent decoder found
//! (`tests/golden/kv_events.py`), and one scenario decodes to the same facts in every version.

use std::fmt::Write as _;

use fak_wire::kv::frames::{Reply, live, replay_reply};
use fak_wire::kv::{
    Batch, BlockHash, Event, ExtraKey, ExtraKeys, Limits, Removed, Shape, Stored, decode,
};

use crate::fixtures;

fn batch(payload: &[u8]) -> Batch {
    decode(payload, &Limits::default()).unwrap()
}

/// The batches of a file of live messages.
fn batches(path: &str) -> Vec<Batch> {
    let messages = fixtures::messages(path);
    messages.iter().map(|frames| batch(live(frames).unwrap().payload)).collect()
}

fn hash_text(hash: &BlockHash) -> String {
    match hash {
        BlockHash::Int(value) => value.to_string(),
        BlockHash::Bytes(bytes) => bytes.iter().fold(String::new(), |mut text, byte| {
            write!(text, "{byte:02x}").unwrap();
            text
        }),
    }
}

fn or_dash<T: ToString>(value: Option<T>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| value.to_string())
}

fn keys_text(keys: &ExtraKeys) -> String {
    let key_text = |key: &ExtraKey| match key {
        ExtraKey::Text(text) => text.clone(),
        other => panic!("no recording has a {other:?}"),
    };
    match keys {
        ExtraKeys::NotReported => "unreported".to_owned(),
        ExtraKeys::None => "none".to_owned(),
        ExtraKeys::PerBlock(blocks) => blocks
            .iter()
            .map(|keys| keys.iter().map(key_text).collect::<Vec<_>>().join(","))
            .collect::<Vec<_>>()
            .join("|"),
    }
}

fn ends(hashes: &[BlockHash]) -> String {
    let (first, last) = (hash_text(&hashes[0]), hash_text(hashes.last().unwrap()));
    format!("n={} first={first} last={last}", hashes.len())
}

fn event_text(event: &Event) -> String {
    match event {
        Event::Cleared => "cleared".to_owned(),
        Event::Removed(Removed { hashes, medium, group, locality, ownership }) => format!(
            "removed {} medium={} group={group} locality={} ownership={}",
            ends(hashes),
            or_dash(medium.as_ref()),
            or_dash(locality.as_ref()),
            or_dash(ownership.as_ref()),
        ),
        Event::Stored(s) => format!(
            "stored {} parent={} tokens={} sum={} block={} lora={}/{} keys={} kind={} window={} \
             session={} lookahead={} medium={} group={} locality={} ownership={}",
            ends(&s.hashes),
            or_dash(s.parent.as_ref().map(hash_text)),
            s.tokens.len(),
            s.tokens.iter().map(|token| u64::from(*token)).sum::<u64>(),
            s.block_size,
            or_dash(s.lora_id),
            or_dash(s.lora_name.as_ref()),
            keys_text(&s.extra_keys),
            or_dash(s.spec_kind.as_ref()),
            or_dash(s.sliding_window),
            or_dash(s.session_id.as_ref()),
            or_dash(s.lookahead.as_ref().map(|tokens| format!("{tokens:?}"))),
            or_dash(s.medium.as_ref()),
            s.group,
            or_dash(s.locality.as_ref()),
            or_dash(s.ownership.as_ref()),
        ),
    }
}

#[test]
fn every_recording_decodes_to_what_an_independent_decoder_reads() {
    let mut lines = Vec::new();
    for path in fixtures::list("kv-events", ".bin") {
        let name = path.replace("/kv-events", "");
        for frames in fixtures::messages(&path) {
            let (seq, payload) = if path.contains("dealer") {
                match replay_reply(&frames).unwrap() {
                    Reply::Batch { seq, payload } => (seq, payload),
                    Reply::End => {
                        lines.push(format!("{name} end"));
                        continue;
                    }
                }
            } else {
                let message = live(&frames).unwrap();
                (message.seq, message.payload)
            };
            let batch = batch(payload);
            assert_eq!(batch.unknown_events, 0, "{path}");
            let head = format!("{name} seq={seq} ts={:?} rank={}", batch.ts, or_dash(batch.rank));
            lines.extend(batch.events.iter().map(|event| format!("{head} {}", event_text(event))));
        }
    }
    let golden = include_str!("../golden/kv_events.txt");
    let mut expected: Vec<&str> = golden.lines().collect();
    expected.sort_by_key(|line| line.split(' ').next().unwrap().to_owned());
    lines.sort_by_key(|line| line.split(' ').next().unwrap().to_owned());
    assert_eq!(lines.len(), expected.len());
    for (found, expected) in lines.iter().zip(expected) {
        assert_eq!(found, expected);
    }
}

const GENERATED: [&str; 10] = [
    "vllm-0.9.2",
    "vllm-0.11.0",
    "vllm-0.13.0",
    "vllm-0.16.0",
    "vllm-0.19.1",
    "vllm-0.22.1",
    "vllm-0.25.1",
    "vllm-0.28.0",
    "vllm-0.30.0",
    "vllm-0.33.0",
];

/// The recordings of one scenario: all versions, all hash forms.
fn scenario(name: &str) -> Vec<(String, Vec<Batch>)> {
    let wanted = |form: &str| format!("/kv-events/{name}-{form}.bin");
    let wanted = [wanted("int"), wanted("bytes"), wanted("sint")];
    let paths = fixtures::list("kv-events", ".bin").into_iter();
    paths
        .filter(|path| wanted.iter().any(|end| path.ends_with(end)))
        .map(|path| (path.clone(), batches(&path)))
        .collect()
}

/// What is left of a store when everything that versions may differ in is taken out.
fn common(event: &Event) -> Event {
    let place = BlockHash::Int(0);
    match event.clone() {
        Event::Stored(s) => Event::Stored(Stored {
            hashes: vec![place.clone(); s.hashes.len()],
            parent: s.parent.map(|_| place),
            medium: None,
            lora_name: None,
            extra_keys: ExtraKeys::NotReported,
            spec_kind: None,
            ..s
        }),
        Event::Removed(r) => {
            Event::Removed(Removed { hashes: vec![place; r.hashes.len()], medium: None, ..r })
        }
        Event::Cleared => Event::Cleared,
    }
}

#[test]
fn the_same_scenario_gives_the_same_facts_in_every_version_and_hash_form() {
    for name in [
        "gpu-store",
        "gpu-store-extends-parent",
        "gpu-store-lora",
        "gpu-removed",
        "all-cleared-alone",
        "all-cleared-then-store",
        "batch-mixed",
        "dp-rank-1",
        "dp-rank-absent",
    ] {
        let files = scenario(name);
        assert_eq!(files.len(), 2 * GENERATED.len() - 1, "{name}: 0.9.2 has one form, others two");
        let facts = |batches: &[Batch]| -> Vec<(Option<u32>, Vec<Event>)> {
            batches.iter().map(|b| (b.rank, b.events.iter().map(common).collect())).collect()
        };
        let (first_path, first) = &files[0];
        for (path, batches) in &files {
            assert_eq!(facts(batches), facts(first), "{path} against {first_path}");
        }
    }
}

#[test]
fn a_gpu_store_is_three_blocks_of_a_prompts_start_in_every_version() {
    for (path, batches) in scenario("gpu-store") {
        let [Batch { ts, rank: Some(0), events, .. }] = batches.as_slice() else {
            panic!("{path}: {batches:?}")
        };
        assert_eq!(*ts, 1_700_000_000.25);
        let [Event::Stored(store)] = events.as_slice() else { panic!("{path}: {events:?}") };
        assert_eq!(store.tokens, (1000..1048).collect::<Vec<_>>());
        assert_eq!((store.hashes.len(), store.block_size), (3, 16));
        assert_eq!((store.parent.as_ref(), store.group), (None, 0));
        assert_eq!(store.shape(), Shape::Blocks);
        let medium = (!path.contains("0.9.2")).then_some("GPU");
        assert_eq!(store.medium.as_deref(), medium, "{path}");
        let old = ["0.9.2", "0.11.0", "0.13.0", "0.16.0"];
        let keys = if old.iter().any(|version| path.contains(version)) {
            ExtraKeys::NotReported
        } else {
            ExtraKeys::None
        };
        assert_eq!(store.extra_keys, keys, "{path}");
    }
}

#[test]
fn integer_hashes_are_the_last_eight_bytes_of_the_byte_hashes() {
    for version in &GENERATED[1..] {
        let hashes = |form: &str| {
            let batches = batches(&format!("{version}/kv-events/gpu-store-{form}.bin"));
            let Event::Stored(store) = &batches[0].events[0] else { panic!("{batches:?}") };
            store.hashes.clone()
        };
        for (int, bytes) in hashes("int").iter().zip(hashes("bytes")) {
            let BlockHash::Bytes(bytes) = bytes else { panic!("{bytes:?}") };
            let low = u64::from_be_bytes(bytes[24..].try_into().unwrap());
            assert_eq!(*int, BlockHash::Int(low), "{version}");
        }
    }
}

#[test]
fn removals_name_the_hashes_that_the_store_announced() {
    for (path, removal) in scenario("gpu-removed") {
        let store = batches(&path.replace("gpu-removed", "gpu-store"));
        let Event::Stored(store) = &store[0].events[0] else { panic!("{path}") };
        let removed: Vec<_> = removal[0]
            .events
            .iter()
            .map(|event| match event {
                Event::Removed(removed) => removed.hashes[0].clone(),
                other => panic!("{path}: {other:?}"),
            })
            .collect();
        assert_eq!(removed, store.hashes[1..], "{path}");
    }
}

#[test]
fn salts_and_adapters_are_seen_from_0_19_on_and_unreported_before() {
    let text = |text: &str| vec![ExtraKey::Text(text.to_owned())];
    let salted = ExtraKeys::PerBlock(vec![text("tenantA"), vec![]]);
    let files = scenario("gpu-store-salted");
    assert_eq!(files.len(), 12);
    for (path, batches) in files {
        let Event::Stored(store) = &batches[0].events[0] else { panic!("{path}") };
        assert_eq!(store.extra_keys, salted, "{path}");
    }
    for (path, batches) in scenario("gpu-store-lora") {
        let Event::Stored(store) = &batches[0].events[0] else { panic!("{path}") };
        assert_eq!(store.lora_id, Some(1), "{path}");
        let unnamed = ["0.9.2", "0.11.0", "0.13.0"].iter().any(|version| path.contains(version));
        assert_eq!(store.lora_name.as_deref(), (!unnamed).then_some("sql"), "{path}");
        let unreported = unnamed || path.contains("0.16.0");
        let keys = ExtraKeys::PerBlock(vec![text("sql"), text("sql")]);
        let expected = if unreported { ExtraKeys::NotReported } else { keys };
        assert_eq!(store.extra_keys, expected, "{path}");
    }
}

#[test]
fn an_offload_store_tells_a_location_and_nothing_else() {
    let batches = batches("vllm-0.32/kv-events/offload-gpu-then-cpu-store.bin");
    let [gpu, cpu] = batches.as_slice() else { panic!("{batches:?}") };
    let Event::Stored(on_gpu) = &gpu.events[0] else { panic!("{gpu:?}") };
    let mut located = Vec::new();
    for event in &cpu.events {
        let Event::Stored(on_cpu) = event else { panic!("{event:?}") };
        assert_eq!(on_cpu.medium.as_deref(), Some("CPU"));
        assert_eq!(on_cpu.shape(), Shape::LocationOnly);
        assert_eq!(on_cpu.extra_keys, ExtraKeys::NotReported);
        located.extend_from_slice(&on_cpu.hashes);
    }
    let mut stored = on_gpu.hashes.clone();
    located.sort();
    stored.sort();
    assert_eq!(located, stored, "one event a block, in any order");
}

#[test]
fn a_self_describing_offload_store_does_not_claim_to_be_unsalted() {
    let batches = batches("vllm-0.32/kv-events/offload-store-self-describing.bin");
    let on_cpu: Vec<_> = batches
        .iter()
        .flat_map(|batch| &batch.events)
        .filter_map(|event| match event {
            Event::Stored(store) if store.medium.as_deref() == Some("CPU") => Some(store),
            _ => None,
        })
        .collect();
    assert!(!on_cpu.is_empty());
    for store in on_cpu {
        assert_eq!(store.shape(), Shape::Blocks);
        assert_eq!(store.extra_keys, ExtraKeys::NotReported);
    }
}
