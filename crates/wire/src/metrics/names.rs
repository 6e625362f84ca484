//! What vLLM 0.9.2 to 0.33.0 calls its metrics (the engines' source; recorded scrapes of 0.32.0
//! and of the Rust frontend of 0.33.0).
//! Invariant: one signal has one row, newest name first, so that a scrape with both names counts
//! once.

/// A signal that fak reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Signal {
    Ttft,
    Itl,
    Tpot,
    Queue,
    Steps,
    KvCacheUsage,
    Running,
    Waiting,
    PrefixHits,
    PrefixQueries,
    ExternalHits,
    ExternalQueries,
    PromptBySource,
    CachedBySource,
    SleepState,
    OffloadLoad,
    OffloadStore,
    RequestSuccess,
    Preemptions,
    Drafts,
    CacheConfig,
}

/// Families by signal, without `_total` and the like; newest first.
const READ: &[(Signal, &[&str])] = &[
    (Signal::Ttft, &["vllm:time_to_first_token_seconds"]),
    // The old name was hidden in 0.12.0 and gone in 0.15.1.
    (Signal::Itl, &["vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"]),
    (Signal::Tpot, &["vllm:request_time_per_output_token_seconds"]),
    (Signal::Queue, &["vllm:request_queue_time_seconds"]),
    // A histogram whose name ends in `_total`.
    (Signal::Steps, &["vllm:iteration_tokens"]),
    // The old names were hidden in 0.11.0 and gone in 0.12.0; so for the prefix cache.
    (Signal::KvCacheUsage, &["vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"]),
    (Signal::Running, &["vllm:num_requests_running"]),
    (Signal::Waiting, &["vllm:num_requests_waiting"]),
    (Signal::PrefixHits, &["vllm:prefix_cache_hits", "vllm:gpu_prefix_cache_hits"]),
    (Signal::PrefixQueries, &["vllm:prefix_cache_queries", "vllm:gpu_prefix_cache_queries"]),
    (Signal::ExternalHits, &["vllm:external_prefix_cache_hits"]),
    (Signal::ExternalQueries, &["vllm:external_prefix_cache_queries"]),
    (Signal::PromptBySource, &["vllm:prompt_tokens_by_source"]),
    (Signal::CachedBySource, &["vllm:prompt_tokens_cached_by_source"]),
    (Signal::SleepState, &["vllm:engine_sleep_state"]),
    // Before 0.24.0 one family for both directions, told apart by a label.
    (Signal::OffloadLoad, &["vllm:kv_offload_load_bytes", TRANSFERS]),
    (Signal::OffloadStore, &["vllm:kv_offload_store_bytes", TRANSFERS]),
    (Signal::RequestSuccess, &["vllm:request_success"]),
    (Signal::Preemptions, &["vllm:num_preemptions"]),
    (Signal::Drafts, &["vllm:spec_decode_num_drafts"]),
    (Signal::CacheConfig, &["vllm:cache_config_info"]),
];

/// Family of the offloaded bytes of both directions, since 0.16.0.
pub(super) const TRANSFERS: &str = "vllm:kv_offload_total_bytes";

/// The one family that is read and is of the process, not of a rank.
pub(super) const PROCESS_START: &str = "process_start_time_seconds";

/// Families that fak knows and does not read.
const PASSED_OVER: &[&str] = &[
    "vllm:admission_rejections",
    "vllm:corrupted_requests",
    "vllm:e2e_request_latency_seconds",
    "vllm:estimated_flops_per_gpu",
    "vllm:estimated_read_bytes_per_gpu",
    "vllm:estimated_write_bytes_per_gpu",
    "vllm:generation_tokens",
    "vllm:kv_block_idle_before_evict_seconds",
    "vllm:kv_block_lifetime_seconds",
    "vllm:kv_block_reuse_gap_seconds",
    "vllm:kv_offload_allocation_failure",
    "vllm:kv_offload_cpu_allocation_size",
    "vllm:kv_offload_cpu_cache_read_usage_perc",
    // Reads 0.0 with blocks in the tier: bytes in flight, not occupancy (vLLM 0.32.0, observed).
    "vllm:kv_offload_cpu_cache_usage_perc",
    "vllm:kv_offload_cpu_cache_write_usage_perc",
    "vllm:kv_offload_load_size",
    "vllm:kv_offload_load_time",
    "vllm:kv_offload_lookup_async_delay_seconds",
    "vllm:kv_offload_lookup_sync_delay_seconds",
    "vllm:kv_offload_size",
    "vllm:kv_offload_store_size",
    "vllm:kv_offload_store_time",
    "vllm:kv_offload_total_time",
    "vllm:lora_requests_info",
    "vllm:mm_cache_hits",
    "vllm:mm_cache_queries",
    "vllm:mooncake_bytes_transferred",
    "vllm:mooncake_num_descriptors",
    "vllm:mooncake_num_failed_recvs",
    "vllm:mooncake_num_failed_transfers",
    "vllm:mooncake_num_kv_expired_reqs",
    "vllm:mooncake_store_operation",
    "vllm:mooncake_store_operation_bytes",
    "vllm:mooncake_store_operation_failed_keys",
    "vllm:mooncake_store_operation_keys",
    "vllm:mooncake_store_operation_time_seconds",
    "vllm:mooncake_xfer_time_seconds",
    "vllm:nixl_bytes_transferred",
    "vllm:nixl_num_descriptors",
    "vllm:nixl_num_failed_notifications",
    "vllm:nixl_num_failed_transfers",
    "vllm:nixl_num_kv_expired_reqs",
    "vllm:nixl_post_time_seconds",
    "vllm:nixl_xfer_time_seconds",
    "vllm:num_requests_kv_fetch_by_stage",
    "vllm:num_requests_waiting_by_reason",
    "vllm:prompt_tokens",
    "vllm:prompt_tokens_cached",
    "vllm:prompt_tokens_recomputed",
    "vllm:request_decode_time_seconds",
    "vllm:request_generation_tokens",
    "vllm:request_inference_time_seconds",
    "vllm:request_max_num_generation_tokens",
    "vllm:request_num_preemptions",
    "vllm:request_params_max_tokens",
    "vllm:request_params_n",
    "vllm:request_prefill_kv_computed_tokens",
    "vllm:request_prefill_time_seconds",
    "vllm:request_prompt_tokens",
    "vllm:rl_weight_update_operation_duration_seconds",
    "vllm:rl_weight_update_operations_in_flight",
    "vllm:sleep_mode_operation_duration_seconds",
    "vllm:sleep_mode_operations_in_flight",
    "vllm:spec_decode_num_accepted_tokens",
    "vllm:spec_decode_num_accepted_tokens_per_pos",
    "vllm:spec_decode_num_draft_tokens",
];

/// What a sample's name says it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Meaning<'a> {
    /// A series of a family that is read.
    Read { family: &'a str, series: Series },
    /// Nothing that fak reads.
    PassedOver,
    /// A name under `vllm:` that is in no table.
    Unknown { family: &'a str },
}

/// Which series of its family a sample belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Series {
    /// The value itself: a gauge, or a counter's total.
    Value,
    Bucket,
    Sum,
    Count,
}

pub(super) fn meaning(name: &str) -> Meaning<'_> {
    let (family, series) = split(name);
    let Some(series) = series else { return Meaning::PassedOver };
    if family == PROCESS_START || READ.iter().any(|(_, names)| names.contains(&family)) {
        Meaning::Read { family, series }
    } else if !name.starts_with("vllm:") || PASSED_OVER.contains(&family) {
        Meaning::PassedOver
    } else {
        Meaning::Unknown { family }
    }
}

/// The signals that a family carries, each with the age of the name: 0 is the newest.
pub(super) fn signals(family: &str) -> impl Iterator<Item = (Signal, u8)> {
    READ.iter().filter_map(move |(signal, names)| {
        let age = names.iter().position(|name| *name == family)?;
        Some((*signal, u8::try_from(age).unwrap_or(u8::MAX)))
    })
}

/// Family and series; no series for the times at which counters were made.
fn split(name: &str) -> (&str, Option<Series>) {
    let (base, series) = if let Some(base) = name.strip_suffix("_created") {
        (base, None)
    } else if let Some(base) = name.strip_suffix("_bucket") {
        (base, Some(Series::Bucket))
    } else if let Some(base) = name.strip_suffix("_sum") {
        (base, Some(Series::Sum))
    } else if let Some(base) = name.strip_suffix("_count") {
        (base, Some(Series::Count))
    } else {
        (name, Some(Series::Value))
    };
    (base.strip_suffix("_total").unwrap_or(base), series)
}
