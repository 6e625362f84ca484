//! Any bytes as the payload of a batch: no panic, and what decodes keeps its promises.
#![no_main]

use fak_wire::kv::{Event, ExtraKeys, Limits, Shape, decode};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|payload: &[u8]| {
    let limits = Limits::default();
    let Ok(batch) = decode(payload, &limits) else { return };
    assert!(batch.ts.is_finite());
    assert!(
        batch.events.len() as u64 + u64::from(batch.unknown_events) <= u64::from(limits.events)
    );
    for event in &batch.events {
        let Event::Stored(store) = event else { continue };
        let whole = store.hashes.len() as u64 * u64::from(store.block_size);
        match store.shape() {
            Shape::Blocks => assert_eq!(store.tokens.len() as u64, whole),
            Shape::LocationOnly => assert!(store.tokens.is_empty()),
            Shape::Sparse => assert!(store.tokens.len() as u64 > whole),
        }
        if let ExtraKeys::PerBlock(keys) = &store.extra_keys {
            assert_eq!(keys.len(), store.hashes.len());
            assert!(keys.iter().any(|keys| !keys.is_empty()));
        }
    }
});
