//! Recorded scrapes of both frontends read into the same signals, and names and series of any age
//! or number are put together by meaning.

use fak_wire::metrics::{
    Histogram, Limits, Signals, SleepState, Snapshot, Usage, counter_growth, parse,
};
use proptest::prelude::*;

use crate::fixtures;

fn read(scrape: &str) -> Snapshot {
    parse(scrape.as_bytes(), &Limits::default()).unwrap()
}

fn recorded(path: &str) -> Snapshot {
    let snapshot = parse(&fixtures::bytes(path), &Limits::default()).unwrap();
    assert_eq!(snapshot.malformed_lines, 0, "{path}");
    assert_eq!(snapshot.unknown, [].into(), "{path}");
    snapshot
}

fn ends(histogram: Option<&Histogram>) -> (f64, f64) {
    let histogram = histogram.unwrap();
    let last = histogram.buckets.last().unwrap();
    assert_eq!(*last, (f64::INFINITY, histogram.count));
    assert!(histogram.buckets.is_sorted_by(|a, b| a.0 < b.0 && a.1 <= b.1));
    (histogram.count, histogram.sum)
}

#[test]
fn a_loaded_engine_gives_every_signal_but_the_offload_tier() {
    let snapshot = recorded("vllm-0.32/metrics/under-load.prom");
    assert_eq!(snapshot.process_start, Some(1.79595853422e9));
    assert_eq!(snapshot.ranks.len(), 1);
    let signals = &snapshot.ranks[&0];
    assert_eq!(ends(signals.ttft.as_ref()), (198.0, 80.61423301696777));
    assert_eq!(signals.ttft.as_ref().unwrap().buckets.len(), 23);
    assert_eq!(ends(signals.itl.as_ref()), (138_185.0, 384.06624268199766));
    assert_eq!(ends(signals.queue.as_ref()), (181.0, 42.35276166699941));
    assert_eq!(signals.tpot.as_ref().unwrap().count, 181.0);
    let usage = 0.00515762810144349;
    assert_eq!(signals.kv_cache_usage, Some(Usage { max: usage, mean: usage, ranks: 1 }));
    assert_eq!((signals.running, signals.waiting), (Some(3.0), Some(0.0)));
    assert_eq!((signals.prefix_hits, signals.prefix_queries), (Some(28_000.0), Some(44_055.0)));
    assert_eq!((signals.external_hits, signals.external_queries), (Some(0.0), Some(0.0)));
    assert_eq!(signals.preemptions, Some(12.0));
    let success =
        [("abort", 28.0), ("error", 0.0), ("length", 152.0), ("repetition", 0.0), ("stop", 1.0)];
    assert_eq!(signals.request_success, success.map(|(name, n)| (name.to_owned(), n)).into());
    assert_eq!((signals.block_size, signals.num_gpu_blocks), (Some(32), Some(32_768)));
    assert_eq!((signals.offload_load_bytes, signals.offload_store_bytes), (None, None));
}

#[test]
fn the_offload_tier_is_read_once_under_old_and_new_names() {
    let signals = recorded("vllm-0.32/metrics/with-offload.prom").total();
    assert_eq!(signals.offload_load_bytes, Some(9_797_632.0));
    assert_eq!(signals.offload_store_bytes, Some(52_559_872.0));
    assert_eq!((signals.external_hits, signals.external_queries), (Some(9_024.0), Some(61_813.0)));
    assert_eq!(signals.cached_by_source["device"], 6_144.0);
    assert_eq!(signals.cached_by_source["host"], 9_024.0);
    assert_eq!(signals.prompt_by_source["local_cache_hit"], 6_144.0);
    assert_eq!(signals.prompt_by_source["external_kv_transfer"], 9_024.0);

    let scrape = fixtures::text("vllm-0.32/metrics/with-offload.prom");
    let old = |line: &&str| !line.contains("offload_load_bytes") && !line.contains("store_bytes");
    let only_old: Vec<&str> = scrape.lines().filter(old).collect();
    assert_eq!(read(&only_old.join("\n")).total(), signals);
}

#[test]
fn the_rust_frontend_reads_into_the_same_signals_and_has_no_sleep_state() {
    let snapshot = recorded("vllm-rs-0.33-frontend/metrics/idle.prom");
    assert_eq!(snapshot.process_start, None);
    let signals = &snapshot.ranks[&0];
    assert_eq!(ends(signals.ttft.as_ref()), (11.0, 0.0785360336303711));
    assert_eq!(ends(signals.itl.as_ref()), (1_514.0, 3.304650189000313));
    assert_eq!(ends(signals.queue.as_ref()), (11.0, 0.0001993760010918777));
    assert_eq!(signals.tpot.as_ref().unwrap().count, 11.0);
    assert_eq!((signals.prefix_hits, signals.prefix_queries), (Some(1_120.0), Some(2_002.0)));
    assert_eq!(signals.request_success, [("length".to_owned(), 11.0)].into());
    assert_eq!(signals.cached_by_source["device"], 1_120.0);
    assert_eq!(signals.sleep, None);
    assert_eq!(signals.block_size, None);
}

#[test]
fn the_sleep_state_is_the_level_last_asked_for() {
    let state = |file: &str| recorded(&format!("vllm-0.32/metrics/{file}.prom")).total().sleep;
    let none = SleepState::default();
    let awake = Some(SleepState { awake: true, ..none });
    assert_eq!(state("idle"), awake);
    assert_eq!(state("paused-excerpt"), awake);
    assert_eq!(state("sleeping-level0-excerpt"), Some(none));
    let level_1 = Some(SleepState { weights_offloaded: true, ..none });
    assert_eq!(state("sleeping-level1"), level_1);
    let level_2 = Some(SleepState { discard_all: true, ..none });
    assert_eq!(state("sleeping-level2-excerpt"), level_2);
}

#[test]
fn data_parallel_ranks_stay_apart_and_add_up() {
    let snapshot = recorded("vllm-0.32/metrics/dp2-excerpt.prom");
    assert_eq!(snapshot.ranks.keys().collect::<Vec<_>>(), [&0, &1]);
    assert_eq!(snapshot.ranks[&0].running, Some(1.0));
    assert_eq!(snapshot.ranks[&1].running, Some(0.0));
    let total = snapshot.total();
    assert_eq!(total.running, Some(1.0));
    assert_eq!(total.prefix_queries, Some(694.0));
    assert_eq!(total.request_success["length"], 9.0);
    let usage = Usage { max: 0.13385826771653542, mean: 0.06692913385826771, ranks: 2 };
    assert_eq!(total.kv_cache_usage, Some(usage));
    assert_eq!(total.sleep, Some(SleepState { awake: true, ..SleepState::default() }));
    assert_eq!((total.block_size, total.num_gpu_blocks), (Some(32), Some(256)));
    assert_eq!(total.ttft, None, "the excerpt has none");
}

#[test]
fn a_metric_reads_under_its_old_name_its_new_name_or_both_and_is_absent_otherwise() {
    let new = "vllm:kv_cache_usage_perc{engine=\"0\"} 0.5\nvllm:prefix_cache_hits_total 40\n\
               vllm:inter_token_latency_seconds_count 7\n";
    let old = "vllm:gpu_cache_usage_perc{engine=\"0\"} 0.5\nvllm:gpu_prefix_cache_hits_total 40\n\
               vllm:time_per_output_token_seconds_count 7\n";
    for scrape in [new.to_owned(), old.to_owned(), format!("{new}{old}"), format!("{old}{new}")] {
        let signals = read(&scrape).total();
        assert_eq!(signals.kv_cache_usage.unwrap().max, 0.5, "{scrape}");
        assert_eq!(signals.prefix_hits, Some(40.0), "{scrape}");
        assert_eq!(signals.itl.unwrap().count, 7.0, "{scrape}");
    }
    let neither = read("vllm:num_requests_running 1\n").total();
    assert_eq!(neither, Signals { running: Some(1.0), ..Signals::default() });
    assert_eq!(read("").total(), Signals::default());
}

#[test]
fn ranks_do_not_overwrite_each_other_in_any_order() {
    let first = "vllm:num_requests_running{engine=\"0\"} 5\n";
    let second = "vllm:num_requests_running{engine=\"1\"} 0\n";
    for scrape in [format!("{first}{second}"), format!("{second}{first}")] {
        assert_eq!(read(&scrape).total().running, Some(5.0));
    }
}

#[test]
fn series_of_several_processes_are_put_together_by_meaning() {
    let usages = [0.0, 0.0, 0.65, 0.0, 0.0, 0.0, 0.0, 0.0];
    let series = usages.iter().enumerate().map(|(pid, usage)| {
        format!(
            "vllm:kv_cache_usage_perc{{engine=\"0\",pid=\"{pid}\"}} {usage}\n\
             vllm:prefix_cache_hits_total{{engine=\"0\",pid=\"{pid}\"}} 3\n\
             vllm:time_to_first_token_seconds_bucket{{engine=\"0\",le=\"0.5\",pid=\"{pid}\"}} 1\n\
             vllm:time_to_first_token_seconds_bucket{{engine=\"0\",le=\"+Inf\",pid=\"{pid}\"}} 2\n\
             vllm:time_to_first_token_seconds_sum{{engine=\"0\",pid=\"{pid}\"}} 1.5\n\
             vllm:time_to_first_token_seconds_count{{engine=\"0\",pid=\"{pid}\"}} 2\n"
        )
    });
    let signals = read(&series.collect::<String>()).total();
    assert_eq!(signals.kv_cache_usage, Some(Usage { max: 0.65, mean: 0.65, ranks: 1 }));
    assert_eq!(signals.prefix_hits, Some(24.0));
    let buckets = vec![(0.5, 8.0), (f64::INFINITY, 16.0)];
    assert_eq!(signals.ttft, Some(Histogram { buckets, sum: 12.0, count: 16.0 }));
}

#[test]
fn histograms_of_other_bounds_add_up_to_no_more_than_is_known() {
    let mut sum =
        Histogram { buckets: vec![(1.0, 3.0), (f64::INFINITY, 5.0)], sum: 9.0, count: 5.0 };
    let other = Histogram {
        buckets: vec![(0.5, 1.0), (2.0, 4.0), (f64::INFINITY, 4.0)],
        sum: 3.0,
        count: 4.0,
    };
    sum.add(&other);
    let buckets = vec![(0.5, 1.0), (1.0, 4.0), (2.0, 7.0), (f64::INFINITY, 9.0)];
    assert_eq!(sum, Histogram { buckets, sum: 12.0, count: 9.0 });
}

#[test]
fn drafts_of_speculative_decoding_are_absent_where_the_engine_gives_none() {
    let drafts = |path: &str| recorded(path).total().drafts;
    assert_eq!(drafts("vllm-0.32/metrics/under-load.prom"), None);
    assert_eq!(drafts("vllm-rs-0.33-frontend/metrics/idle.prom"), Some(0.0));
    let two = "vllm:spec_decode_num_drafts_total{engine=\"0\"} 3\n\
               vllm:spec_decode_num_drafts_total{engine=\"1\"} 4\n";
    assert_eq!(read(two).total().drafts, Some(7.0));
}

#[test]
fn unknown_engine_names_are_listed_once_each() {
    let scrape = "vllm:warp_factor{engine=\"0\"} 1\nvllm:warp_factor{engine=\"1\"} 1\n\
                  vllm:tea_seconds_bucket{le=\"1\"} 0\nvllm:tea_seconds_sum 0\n\
                  vllm:tea_seconds_created 0\nother_total 1\npython_info{a=\"b\"} 1\n";
    let snapshot = read(scrape);
    let names: Vec<_> = snapshot.unknown.iter().map(String::as_str).collect();
    assert_eq!(names, ["vllm:tea_seconds", "vllm:warp_factor"]);
    assert_eq!(snapshot.ranks, [].into());
}

#[test]
fn values_that_a_signal_cannot_have_are_counted_and_nothing_else() {
    let scrape = "vllm:num_requests_running NaN\nvllm:num_requests_waiting -1\n\
                  vllm:prefix_cache_hits_total +Inf\nvllm:time_to_first_token_seconds 3\n\
                  vllm:time_to_first_token_seconds_bucket 3\n\
                  vllm:engine_sleep_state{sleep_state=\"dozing\"} 1\n\
                  vllm:num_preemptions_sum 3\nvllm:request_success_total 3\n\
                  vllm:num_requests_running{engine=\"one\"} 3\ngarbage\n";
    let snapshot = read(scrape);
    assert_eq!(snapshot.malformed_lines, 10);
    assert_eq!(snapshot.total(), Signals::default());
    assert_eq!(snapshot.ranks, [].into());
    let old = "vllm:gpu_cache_usage_perc 0.4\n";
    for new in ["vllm:kv_cache_usage_perc NaN\n", "vllm:kv_cache_usage_perc_sum 0.6\n"] {
        for scrape in [format!("{old}{new}"), format!("{new}{old}")] {
            assert_eq!(read(&scrape).total().kv_cache_usage.unwrap().max, 0.4, "{scrape}");
        }
    }
}

#[test]
fn a_counter_that_fell_has_grown_from_nothing() {
    assert_eq!(counter_growth(1000.0, 1020.0), 20.0);
    assert_eq!(counter_growth(1000.0, 20.0), 20.0);
}

#[test]
fn every_limit_is_an_error_that_says_so() {
    let limits = Limits { bytes: 400, lines: 3, ranks: 1, parts: 2, unknown_names: 1 };
    let error = |scrape: &str| parse(scrape.as_bytes(), &limits).unwrap_err().to_string();
    assert_eq!(error(&"x".repeat(401)), "metrics: found 401 bytes, expected at most 400");
    assert_eq!(error("\n\n\n\n"), "metrics: found 5 lines, expected at most 3");
    assert_eq!(
        error("vllm:num_requests_running 1\nvllm:num_requests_running{engine=\"1\"} 1"),
        "metrics: found 2 ranks, expected at most 1"
    );
    let bucket = |le: u32| format!("vllm:time_to_first_token_seconds_bucket{{le=\"{le}\"}} 1\n");
    assert_eq!(
        error(&[bucket(1), bucket(2), bucket(3)].concat()),
        "metrics: found 3 buckets, expected at most 2"
    );
    let reason = |n: u32| format!("vllm:request_success_total{{finished_reason=\"{n}\"}} 1\n");
    assert_eq!(
        error(&[reason(1), reason(2), reason(3)].concat()),
        "metrics: found 3 values of a label, expected at most 2"
    );
    let unknown = parse(b"vllm:a 1\nvllm:b 1\n", &limits).unwrap().unknown;
    assert_eq!(unknown.len(), 1);
}

proptest! {
    #[test]
    fn no_bytes_panic(bytes: Vec<u8>) {
        let _ = parse(&bytes, &Limits::default());
    }

    #[test]
    fn no_mutation_of_a_recording_panics_or_invents_a_rank(
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..16),
    ) {
        let mut bytes = fixtures::bytes("vllm-0.32/metrics/dp2-excerpt.prom");
        for (at, byte) in &edits {
            let at = at.index(bytes.len());
            bytes[at] = *byte;
        }
        if let Ok(snapshot) = parse(&bytes, &Limits::default()) {
            prop_assert!(snapshot.ranks.len() <= 2 + edits.len());
        }
    }
}
