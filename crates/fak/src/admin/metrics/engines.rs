//! The engines' own signals, under one name for every vLLM version.
//!
//! Invariant: a signal that the engine does not give has no series; a ratio needs both its
//! counters.

use fak_wire::metrics::Signals;

use super::Family;
use super::families::Families;

const TTFT: Family = Family("fak_serving_ttft_seconds", "Time to the first token.");
const TPOT: Family = Family("fak_serving_tpot_seconds", "Time per output token of a request.");
const ITL: Family = Family("fak_serving_itl_seconds", "Time between tokens.");
const QUEUE: Family = Family("fak_serving_queue_seconds", "Time in the engine's queue.");
const USAGE: Family = Family(
    "fak_serving_kv_cache_usage_ratio",
    "Part of the device's KV cache in use; of several ranks, the fullest one's.",
);
const RUNNING: Family = Family("fak_serving_requests_running", "Requests that the engine runs.");
const WAITING: Family = Family("fak_serving_requests_waiting", "Requests that wait in the engine.");
const HITS: Family = Family(
    "fak_serving_prefix_cache_hits_total",
    "Prompt tokens found in the device's prefix cache.",
);
const QUERIES: Family = Family(
    "fak_serving_prefix_cache_queries_total",
    "Prompt tokens looked up in the device's prefix cache.",
);
const HIT_RATIO: Family = Family(
    "fak_serving_prefix_cache_hit_ratio",
    "Of the prompt tokens looked up in the device's prefix cache, the part found.",
);
const EXTERNAL_HITS: Family = Family(
    "fak_serving_external_prefix_cache_hits_total",
    "Prompt tokens found in a connector's tier.",
);
const EXTERNAL_QUERIES: Family = Family(
    "fak_serving_external_prefix_cache_queries_total",
    "Prompt tokens looked up in a connector's tier.",
);
const LOADED: Family =
    Family("fak_serving_offload_load_bytes_total", "Bytes loaded from the offload tier.");
const STORED: Family =
    Family("fak_serving_offload_store_bytes_total", "Bytes stored to the offload tier.");
const CACHED: Family = Family(
    "fak_serving_cached_tokens_total",
    "Prompt tokens taken from a cache, by the source that vLLM names (since 0.32.0).",
);
const SUCCESS: Family =
    Family("fak_serving_request_success_total", "Finished requests, by how they finished.");

/// Adds the signals of all ranks of `worker`.
pub(super) fn add(families: &mut Families, worker: &str, signals: &Signals) {
    let labels = [("engine", "vllm"), ("worker", worker)];
    let histograms = [
        (&TTFT, &signals.ttft),
        (&TPOT, &signals.tpot),
        (&ITL, &signals.itl),
        (&QUEUE, &signals.queue),
    ];
    for (family, value) in histograms {
        if let Some(value) = value {
            families.histogram(family, &labels, value);
        }
    }
    let ratio = match (signals.prefix_hits, signals.prefix_queries) {
        (Some(hits), Some(queries)) if queries > 0.0 => Some(hits / queries),
        _ => None,
    };
    let gauges = [
        (&USAGE, signals.kv_cache_usage.map(|usage| usage.max)),
        (&RUNNING, signals.running),
        (&WAITING, signals.waiting),
        (&HIT_RATIO, ratio),
    ];
    for (family, value) in gauges {
        if let Some(value) = value {
            families.gauge(family, &labels, value);
        }
    }
    let counters = [
        (&HITS, signals.prefix_hits),
        (&QUERIES, signals.prefix_queries),
        (&EXTERNAL_HITS, signals.external_hits),
        (&EXTERNAL_QUERIES, signals.external_queries),
        (&LOADED, signals.offload_load_bytes),
        (&STORED, signals.offload_store_bytes),
    ];
    for (family, value) in counters {
        if let Some(value) = value {
            families.counter(family, &labels, value);
        }
    }
    for (source, value) in &signals.cached_by_source {
        let labels = [labels[0], labels[1], ("source", source.as_str())];
        families.counter(&CACHED, &labels, *value);
    }
    for (reason, value) in &signals.request_success {
        let labels = [labels[0], labels[1], ("reason", reason.as_str())];
        families.counter(&SUCCESS, &labels, *value);
    }
}
