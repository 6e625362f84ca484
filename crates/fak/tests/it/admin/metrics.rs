//! `/metrics`.

use super::rig::Rig;

/// The series of a family, without its help.
fn series(text: &str, family: &str) -> Vec<String> {
    let is_it =
        |line: &&str| line.strip_prefix(family).is_some_and(|rest| rest.starts_with(['{', ' ']));
    text.lines().filter(is_it).map(str::to_owned).collect()
}

fn phase(text: &str, worker: &str) -> Vec<String> {
    let of_worker = format!("worker=\"{worker}\"");
    let all = series(text, "fak_worker_phase");
    let own: Vec<_> = all.into_iter().filter(|line| line.contains(&of_worker)).collect();
    assert_eq!(own.len(), 5, "one series a phase: {own:?}");
    own.into_iter().filter(|line| line.ends_with(" 1")).collect()
}

#[tokio::test]
async fn exactly_one_phase_of_a_worker_is_1_in_every_phase() {
    let rig = Rig::start(2).await;
    let series = |phase: &str| format!("fak_worker_phase{{worker=\"w0\",phase=\"{phase}\"}} 1");
    for (action, body, expected) in [
        ("resume", "", "serving"),
        ("pause", "", "paused"),
        ("resume", "", "serving"),
        ("sleep", r#"{"level":1}"#, "sleeping"),
        ("wake", r#"{"tags":["weights"]}"#, "waking"),
        ("wake", "", "serving"),
    ] {
        rig.post(&format!("/fak/v1/workers/w0/{action}"), body).await;
        let text = rig.get("/metrics").await.text;
        assert_eq!(phase(&text, "w0"), [series(expected)], "after {action}");
        assert_eq!(phase(&text, "w1").len(), 1);
    }
    rig.sims[0].kill_engine();
    rig.sims[0].faults().unhealthy(true);
    rig.look(0).await;
    assert_eq!(phase(&rig.get("/metrics").await.text, "w0").len(), 1);
}

#[tokio::test]
async fn the_engines_signals_have_one_name_and_absent_ones_have_none() {
    let rig = Rig::start(1).await;
    let answer = rig.get("/metrics").await;
    assert_eq!(answer.headers["content-type"], "text/plain; version=0.0.4");
    let text = answer.text;
    let labels = "{engine=\"vllm\",worker=\"w0\"}";
    for (family, value) in [("requests_running", 0), ("requests_waiting", 0)] {
        let family = format!("fak_serving_{family}");
        assert_eq!(series(&text, &family), [format!("{family}{labels} {value}")]);
    }
    let ratio = series(&text, "fak_serving_prefix_cache_hit_ratio");
    assert!(ratio.is_empty(), "nothing was looked up: {ratio:?}");
    assert_eq!(series(&text, "fak_serving_prefix_cache_queries_total").len(), 1);
    let buckets = series(&text, "fak_serving_ttft_seconds_bucket");
    assert!(buckets.iter().any(|line| line.contains("le=\"+Inf\"")), "{buckets:?}");
    assert_eq!(series(&text, "fak_serving_ttft_seconds_count").len(), 1);
    let cached = series(&text, "fak_serving_cached_tokens_total");
    assert!(cached.iter().any(|line| line.contains("source=\"host\"")), "{cached:?}");
    let parsed = fak_wire::metrics::parse(text.as_bytes(), &fak_wire::metrics::Limits::default());
    assert_eq!(parsed.expect("small").malformed_lines, 0);

    let mut rig = rig;
    rig.sims.remove(0).stop().await;
    rig.look(0).await;
    let text = rig.get("/metrics").await.text;
    assert!(!text.contains("fak_serving_"), "an engine that does not answer gives nothing");
    assert!(text.contains("fak_worker_phase{worker=\"w0\",phase=\"error\"} 1"));
}

#[tokio::test]
async fn rows_are_counted_by_action_and_verdict_once() {
    let rig = Rig::start(1).await;
    let count = |text: &str, action: &str, kv: &str| {
        let line = format!("fak_witness_rows_total{{action=\"{action}\",kv=\"{kv}\"}} ");
        text.lines().find_map(|found| found.strip_prefix(&line).map(str::to_owned))
    };
    assert_eq!(count(&rig.get("/metrics").await.text, "reset", "forgotten"), None);
    for expected in ["1", "2"] {
        rig.post("/fak/v1/workers/w0/reset", "").await;
        for _ in 0..2 {
            let text = rig.get("/metrics").await.text;
            assert_eq!(count(&text, "reset", "forgotten").as_deref(), Some(expected));
        }
    }
}

#[tokio::test]
async fn events_and_sessions_are_counted() {
    let rig = Rig::start(1).await;
    let rank = fak::events::recorder::Rank { worker: "w7".into(), rank: 3 };
    rig.recorder.gap(&rank, 5);
    rig.recorder.bad(&rank);
    rig.served("s", "w0");
    let text = rig.get("/metrics").await.text;
    for line in [
        "fak_events_gaps_total{worker=\"w7\",rank=\"3\"} 1",
        "fak_events_lost_batches_total{worker=\"w7\",rank=\"3\"} 5",
        "fak_events_bad_total{worker=\"w7\",rank=\"3\"} 1",
        "fak_sessions{run=\"active\"} 1",
        "fak_sessions{run=\"dormant\"} 0",
    ] {
        assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
    }
}
