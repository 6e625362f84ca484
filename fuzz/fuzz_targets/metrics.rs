//! Any bytes as a scrape: no panic, and only numbers that a signal can have.
#![no_main]

use fak_wire::metrics::{Histogram, Limits, parse};
use libfuzzer_sys::fuzz_target;

fn check(histogram: &Histogram) {
    assert!(histogram.buckets.is_sorted_by(|a, b| a.0 < b.0));
    assert!(histogram.sum >= 0.0 && histogram.count >= 0.0);
}

fuzz_target!(|scrape: &[u8]| {
    let Ok(snapshot) = parse(scrape, &Limits::default()) else { return };
    for signals in snapshot.ranks.values().chain([&snapshot.total()]) {
        let histograms = [&signals.ttft, &signals.itl, &signals.tpot, &signals.queue];
        histograms.into_iter().flatten().for_each(check);
        let usage = signals.kv_cache_usage.iter();
        usage.for_each(|usage| assert!(usage.mean <= usage.max * 1.000_001 + f64::MIN_POSITIVE));
        assert!(signals.running.is_none_or(|running| running >= 0.0));
    }
});
