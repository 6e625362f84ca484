//! The memory that a hostile batch costs is bounded. A test binary of its own, since it reads the
//! peak of the whole process; Linux only, as the engines are.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use fak_wire::kv::{Limits, decode};

/// Highest resident memory of this process so far, in bytes.
fn peak() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() << 10
}

fn event(tag: &[u8], fields: &[&[u8]]) -> Vec<u8> {
    let mut event = vec![0x91 + fields.len() as u8, 0xa0 + tag.len() as u8];
    event.extend(tag);
    event.extend(fields.concat());
    event
}

fn batch(event: &[u8], limits: &Limits) -> Vec<u8> {
    let room = (limits.payload_bytes - 16) / event.len();
    let events = room.min(limits.events as usize);
    let mut payload = vec![0x92, 0xcb, 0, 0, 0, 0, 0, 0, 0, 0, 0xdd];
    payload.extend((events as u32).to_be_bytes());
    payload.extend(event.repeat(events));
    payload
}

/// One event with as many elements as its limit allows, each of these bytes.
fn list(len: u32, element: &[u8]) -> Vec<u8> {
    let mut list = vec![0xdd];
    list.extend(len.to_be_bytes());
    list.extend(element.repeat(len as usize));
    list
}

#[test]
fn what_a_batch_costs_stays_under_its_budget_whatever_it_holds() {
    let limits = Limits { payload_bytes: 8 << 20, memory_bytes: 16 << 20, ..Limits::default() };
    let hashes = list(limits.hashes, &[5]);
    let short_digests = list(limits.hashes, &[0xc4, 1, 5]);
    let keys = list(limits.hashes, &[0x93, 0xa1, b'x', 0xa1, b'y', 0x01]);
    let payloads = [
        batch(&event(b"AllBlocksCleared", &[]), &limits),
        batch(&event(b"BlockRemoved", &[&hashes]), &limits),
        batch(&event(b"BlockRemoved", &[&short_digests]), &limits),
        batch(
            &event(b"BlockStored", &[&hashes, &[0xc0], &[0x90], &[0], &[0xc0; 3], &keys]),
            &limits,
        ),
        batch(&event(b"BlockStored", &[&[0x90], &[0xc0], &[0x90], &[0], &[0xc0]]), &limits),
    ];
    // The payloads themselves are resident by now.
    let before = peak();
    for payload in &payloads {
        let _ = decode(payload, &limits);
    }
    let cost = peak() - before;
    // Allocation overhead of small boxes and the doubling of lists come on top of the budget.
    assert!(cost < 3 * limits.memory_bytes, "{} MiB", cost >> 20);
}
