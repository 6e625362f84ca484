//! `/metrics`: the engine's counters under the names of the profile's version.
//! Invariant: family names, types, help and order are those of the recording; a family that the
//! version or the configuration does not have is absent.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::{Duration, UNIX_EPOCH};

use crate::life::Life;
use crate::rank::State;

/// A recorded exposition with every family, the offload tier's too.
const RECORDED: &str = include_str!("../../../fixtures/vllm-0.32/metrics/with-offload.prom");

/// A cumulative histogram.
#[derive(Clone, Debug)]
pub(crate) struct Histogram {
    bounds: &'static [f64],
    counts: Vec<u64>,
    sum: f64,
    count: u64,
}

impl Histogram {
    fn new(bounds: &'static [f64]) -> Self {
        Self { bounds, counts: vec![0; bounds.len()], sum: 0.0, count: 0 }
    }

    pub(crate) fn observe(&mut self, value: f64) {
        for (bound, count) in self.bounds.iter().zip(&mut self.counts) {
            *count += u64::from(value <= *bound);
        }
        self.sum += value;
        self.count += 1;
    }

    fn samples(&self, labels: &Labels) -> Vec<Sample> {
        let bucket = |bound: String, count: u64| {
            let mut labels = labels.clone();
            labels.push(("le".into(), bound));
            ("_bucket", labels, count as f64)
        };
        let bounded =
            self.bounds.iter().zip(&self.counts).map(|(bound, n)| bucket(number(*bound), *n));
        let mut samples: Vec<Sample> = bounded.collect();
        samples.push(bucket("+Inf".into(), self.count));
        samples.push(("_count", labels.clone(), self.count as f64));
        samples.push(("_sum", labels.clone(), self.sum));
        samples
    }
}

const SIZES: &[f64] = &[1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0];
const STEP_SIZES: &[f64] =
    &[1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0];
const FIRST_TOKEN: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
];
const TOKEN: &[f64] = &[
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
];
const REQUEST: &[f64] = &[
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
];
const OPERATION: &[f64] = &[0.01, 0.1, 1.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0];

/// Timings of one sleep-mode operation.
#[derive(Clone, Debug)]
pub(crate) struct Operations {
    pub(crate) in_flight: u64,
    pub(crate) seconds: Histogram,
}

impl Default for Operations {
    fn default() -> Self {
        Self { in_flight: 0, seconds: Histogram::new(OPERATION) }
    }
}

/// What one rank's clients experienced.
#[derive(Debug)]
pub(crate) struct Latencies {
    histograms: BTreeMap<&'static str, Histogram>,
    ended: BTreeMap<&'static str, u64>,
}

/// A request that ended with an output.
pub(crate) struct Finished {
    pub(crate) reason: &'static str,
    pub(crate) prompt_tokens: usize,
    pub(crate) max_tokens: usize,
    pub(crate) tokens: usize,
    pub(crate) total: Duration,
    pub(crate) decode: Duration,
}

const REASONS: [&str; 5] = ["stop", "length", "abort", "error", "repetition"];

impl Default for Latencies {
    fn default() -> Self {
        let families = [
            ("request_prompt_tokens", SIZES),
            ("request_generation_tokens", SIZES),
            ("iteration_tokens_total", STEP_SIZES),
            ("request_params_max_tokens", SIZES),
            ("time_to_first_token_seconds", FIRST_TOKEN),
            ("inter_token_latency_seconds", TOKEN),
            ("request_time_per_output_token_seconds", TOKEN),
            ("e2e_request_latency_seconds", REQUEST),
            ("request_queue_time_seconds", REQUEST),
            ("request_inference_time_seconds", REQUEST),
            ("request_prefill_time_seconds", REQUEST),
            ("request_decode_time_seconds", REQUEST),
        ];
        let histograms = families.into_iter().map(|(name, b)| (name, Histogram::new(b))).collect();
        Self { histograms, ended: REASONS.into_iter().map(|reason| (reason, 0)).collect() }
    }
}

impl Latencies {
    fn observe(&mut self, name: &'static str, value: f64) {
        if let Some(histogram) = self.histograms.get_mut(name) {
            histogram.observe(value);
        }
    }

    pub(crate) fn step(&mut self, tokens: usize) {
        if tokens > 0 {
            self.observe("iteration_tokens_total", tokens as f64);
        }
    }

    pub(crate) fn first_token(&mut self, since_arrival: Duration) {
        self.observe("time_to_first_token_seconds", since_arrival.as_secs_f64());
    }

    pub(crate) fn next_token(&mut self, since_last: Duration) {
        self.observe("inter_token_latency_seconds", since_last.as_secs_f64());
    }

    pub(crate) fn finished(&mut self, end: Finished) {
        let (total, decode) = (end.total.as_secs_f64(), end.decode.as_secs_f64());
        let gaps = end.tokens.saturating_sub(1);
        let per_token = if gaps > 0 { decode / gaps as f64 } else { 0.0 };
        for (name, value) in [
            ("request_prompt_tokens", end.prompt_tokens as f64),
            ("request_generation_tokens", end.tokens as f64),
            ("request_params_max_tokens", end.max_tokens as f64),
            ("request_time_per_output_token_seconds", per_token),
            ("e2e_request_latency_seconds", total),
            // Queue and prefill are not told apart here: the core has no clock.
            ("request_queue_time_seconds", 0.0),
            ("request_inference_time_seconds", total),
            ("request_prefill_time_seconds", total - decode),
            ("request_decode_time_seconds", decode),
        ] {
            self.observe(name, value);
        }
        *self.ended.entry(end.reason).or_default() += 1;
    }
}

type Labels = Vec<(String, String)>;
type Sample = (&'static str, Labels, f64);

/// The whole exposition.
pub(crate) fn render(life: &Life) -> String {
    let mut out = String::new();
    let mut header = String::new();
    for line in RECORDED.lines() {
        if line.starts_with("# HELP ") {
            header = format!("{line}\n");
        } else if let Some(rest) = line.strip_prefix("# TYPE ") {
            let Some((name, _)) = rest.split_once(' ') else { continue };
            let samples = family(life, name);
            if samples.is_empty() {
                continue;
            }
            let _ = writeln!(out, "{header}{line}");
            for (suffix, labels, value) in samples {
                let _ = writeln!(out, "{name}{suffix}{} {}", braced(labels), number(value));
            }
        }
    }
    out
}

fn braced(mut labels: Labels) -> String {
    if labels.is_empty() {
        return String::new();
    }
    labels.sort();
    let pairs: Vec<String> =
        labels.iter().map(|(key, value)| format!("{key}=\"{value}\"")).collect();
    format!("{{{}}}", pairs.join(","))
}

/// A number as Python's client library writes it.
fn number(value: f64) -> String {
    let text = format!("{value:?}");
    match text.find('.') {
        Some(dot) if value > 0.0 && dot > 6 && !text.contains('e') => {
            let digits = format!("{}.{}{}", &text[..1], &text[1..dot], &text[dot + 1..]);
            let digits = digits.trim_end_matches('0').trim_end_matches('.');
            format!("{digits}e+{:02}", dot - 1)
        }
        _ => text,
    }
}

/// The samples of one family over all ranks; none when this server does not have it.
fn family(life: &Life, full_name: &str) -> Vec<Sample> {
    let Some(name) = full_name.strip_prefix("vllm:") else {
        let started = life.started.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        let is_start = full_name == "process_start_time_seconds";
        return if is_start { vec![("", Vec::new(), started)] } else { Vec::new() };
    };
    if !is_known(life, name) {
        return Vec::new();
    }
    if let Some(samples) = process_family(life, name) {
        return samples;
    }
    if let Some(base) = name.strip_suffix("_created") {
        return created(life, base);
    }
    let mut samples = Vec::new();
    for rank in &life.ranks {
        let state = rank.lock();
        let mut labels: Labels = vec![("engine".into(), rank.index.to_string())];
        labels.push(("model_name".into(), life.config.model.clone()));
        samples.extend(rank_family(life, &state, name, &labels));
    }
    samples
}

/// Which families the version and the configuration have (ENGINE.md, section 4).
fn is_known(life: &Life, name: &str) -> bool {
    let traits = life.traits;
    let starts = |prefixes: &[&str]| prefixes.iter().any(|prefix| name.starts_with(prefix));
    if starts(&["kv_offload"]) {
        let new = !starts(&["kv_offload_total", "kv_offload_size"]);
        let has = if new { traits.metrics_0_32 } else { traits.metrics_0_16 };
        return has && life.config.connector.offloads();
    }
    if starts(&["external_prefix_cache", "engine_sleep_state"]) {
        return traits.metrics_0_12;
    }
    if starts(&["prompt_tokens_cached_by", "sleep_mode", "num_requests_waiting_by", "admission"]) {
        return traits.metrics_0_32;
    }
    !starts(&["prompt_tokens_by", "prompt_tokens_cached"]) || traits.metrics_0_16
}

/// When the series of a counter or histogram began: with the process.
fn created(life: &Life, base: &str) -> Vec<Sample> {
    let started = life.started.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
    let counter = family(life, &format!("vllm:{base}_total"));
    let of = if counter.is_empty() { family(life, &format!("vllm:{base}")) } else { counter };
    let mut seen: Vec<Labels> = Vec::new();
    for (suffix, labels, _) in of {
        if suffix != "_bucket" && !seen.contains(&labels) {
            seen.push(labels);
        }
    }
    seen.into_iter().map(|labels| ("", labels, started)).collect()
}

fn process_family(life: &Life, name: &str) -> Option<Vec<Sample>> {
    let operation = |name: &str| vec![("operation".to_owned(), name.to_owned())];
    match name {
        "sleep_mode_operation_duration_seconds" => Some(
            life.operations()
                .iter()
                .flat_map(|(name, ops)| ops.seconds.samples(&operation(name)))
                .collect(),
        ),
        "sleep_mode_operations_in_flight" => Some(
            life.operations()
                .iter()
                .map(|(name, ops)| ("", operation(name), ops.in_flight as f64))
                .collect(),
        ),
        "admission_rejections_total" => Some(
            ["max_num_queued_reqs", "max_num_queued_tokens"]
                .map(|reason| {
                    let labels = vec![
                        ("model_name".to_owned(), life.config.model.clone()),
                        ("reason".to_owned(), reason.to_owned()),
                    ];
                    ("", labels, 0.0)
                })
                .to_vec(),
        ),
        _ => None,
    }
}

fn rank_family(life: &Life, state: &State, name: &str, labels: &Labels) -> Vec<Sample> {
    if let Some(histogram) = state.latencies.histograms.get(name) {
        return histogram.samples(labels);
    }
    let with = |key: &str, values: &[(&str, f64)]| -> Vec<Sample> {
        let sample = |(value, number): &(&str, f64)| {
            let mut labels = labels.clone();
            labels.push((key.to_owned(), (*value).to_owned()));
            ("", labels, *number)
        };
        values.iter().map(sample).collect()
    };
    let (gauges, counters) = (state.engine.gauges(), state.engine.counters());
    let moved = state.engine.tiers().transfers();
    let host = counters.host_hits as f64;
    match name {
        "num_requests_waiting_by_reason" => with(
            "reason",
            &[("capacity", gauges.waiting as f64), ("deferred", gauges.deferred as f64)],
        ),
        "engine_sleep_state" => {
            let level = life.sleep_level();
            let is = |yes: bool| f64::from(u8::from(yes));
            with(
                "sleep_state",
                &[
                    ("awake", is(level.is_none())),
                    ("weights_offloaded", is(level == Some(1))),
                    ("discard_all", is(level == Some(2))),
                ],
            )
        }
        "prompt_tokens_by_source_total" => with(
            "source",
            &[
                ("local_compute", counters.prompt_tokens_computed as f64),
                ("local_cache_hit", counters.prompt_tokens_local as f64),
                ("external_kv_transfer", counters.prompt_tokens_external as f64),
            ],
        ),
        "prompt_tokens_cached_by_source_total" => with(
            "source",
            &[
                ("device", counters.prompt_tokens_local as f64),
                ("host", host),
                ("p2p", 0.0),
                ("disk", 0.0),
                ("external_unspecified", counters.external_hits as f64 - host),
            ],
        ),
        "request_success_total" => {
            let ended =
                REASONS.map(|r| (r, state.latencies.ended.get(r).copied().unwrap_or(0) as f64));
            with("finished_reason", &ended)
        }
        "kv_offload_total_bytes_total" => with(
            "transfer_type",
            &[("CPU_to_GPU", moved.load_bytes as f64), ("GPU_to_CPU", moved.store_bytes as f64)],
        ),
        "cache_config_info" => vec![("", config_labels(life, labels), 1.0)],
        _ => {
            plain_value(state, name).map(|value| ("", labels.clone(), value)).into_iter().collect()
        }
    }
}

/// Families of one series a rank.
fn plain_value(state: &State, name: &str) -> Option<f64> {
    let (gauges, counters) = (state.engine.gauges(), state.engine.counters());
    let moved = state.engine.tiers().transfers();
    let count = |value: u64| Some(value as f64);
    match name {
        "num_requests_running" => Some(gauges.running as f64),
        "num_requests_waiting" => Some((gauges.waiting + gauges.deferred) as f64),
        "kv_cache_usage_perc" => Some(gauges.kv_usage),
        "prefix_cache_queries_total" => count(counters.prefix_queries),
        "prefix_cache_hits_total" => count(counters.prefix_hits),
        "external_prefix_cache_queries_total" => count(counters.external_queries),
        "external_prefix_cache_hits_total" => count(counters.external_hits),
        "mm_cache_queries_total" | "mm_cache_hits_total" => Some(0.0),
        "num_preemptions_total" => count(counters.preemptions),
        "prompt_tokens_total" => count(counters.prompt_tokens),
        "prompt_tokens_cached_total" => {
            count(counters.prompt_tokens_local + counters.prompt_tokens_external)
        }
        "generation_tokens_total" => count(counters.generation_tokens),
        "kv_offload_load_bytes_total" => count(moved.load_bytes),
        "kv_offload_store_bytes_total" => count(moved.store_bytes),
        "kv_offload_cpu_cache_usage_perc" => state.engine.tiers().host().map(|tier| tier.usage()),
        _ => None,
    }
}

fn config_labels(life: &Life, labels: &Labels) -> Labels {
    let config = &life.config;
    let mut all = vec![labels[0].clone()];
    all.extend(
        [
            ("block_size", config.block_size.to_string()),
            ("enable_prefix_caching", "True".to_owned()),
            ("num_gpu_blocks", config.gpu_blocks.to_string()),
            ("num_cpu_blocks", "None".to_owned()),
            ("prefix_caching_hash_algo", "sha256".to_owned()),
            ("sliding_window", "None".to_owned()),
        ]
        .map(|(key, value)| (key.to_owned(), value)),
    );
    all
}
