//! `fak` as its users meet it: the built binary, its output and its exit codes.

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use fak_sim::{Binds, Profile, Sim, SimConfig};
use serde_json::{Value, json};

fn fak(args: &[&str], environment: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fak"));
    command.args(args).env_clear().envs(environment.iter().copied());
    command.output().expect("the binary runs")
}

/// As [`fak`], beside a server that runs in this test.
async fn fak_beside(args: &[&str], environment: &[(&str, &str)]) -> Output {
    let owned = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
    let (names, values): (Vec<_>, Vec<_>) = environment.iter().copied().unzip();
    let (args, names, values) = (owned(args), owned(&names), owned(&values));
    let run = move || {
        let args: Vec<_> = args.iter().map(String::as_str).collect();
        let pairs = names.iter().map(String::as_str).zip(values.iter().map(String::as_str));
        fak(&args, &pairs.collect::<Vec<_>>())
    };
    tokio::task::spawn_blocking(run).await.expect("the binary runs")
}

fn example(name: &str) -> String {
    format!("{}/../../examples/{name}", env!("CARGO_MANIFEST_DIR"))
}

/// A file of this content, in a folder that goes when the test's process does.
fn file(name: &str, content: &Value) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(std::process::id().to_string());
    std::fs::create_dir_all(&folder).expect("a folder");
    let path = folder.join(name);
    std::fs::write(&path, content.to_string()).expect("a file");
    path
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("UTF-8")
}

fn report(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| {
        panic!("{error}: {}\n{}", text(&output.stdout), text(&output.stderr))
    })
}

#[test]
fn the_first_command_shows_allowed_denied_and_streamed_calls() {
    let output = fak(&["run", "--trace", &example("trace.json"), "--engine", "sim"], &[]);
    let shown = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{shown}\n{}", text(&output.stderr));
    for expected in [
        "#0 answer: allow\n",
        "#3 delete_records: deny\n  denied POLICY_BLOCK\n",
        "#4 open_dome: deny\n  denied DEFAULT_DENY\n",
        "8 calls: 6 allowed, 2 denied, 0 failed",
    ] {
        assert!(shown.contains(expected), "{expected:?} is not in:\n{shown}");
    }
}

#[test]
fn the_example_claims_what_the_engine_then_confirms() {
    let args = ["run", "--trace", &example("trace.json"), "--engine", "sim", "--json"];
    let report = report(&fak(&args, &[("FAK_VLLM_WORKER_ID", "w0")]));
    assert_eq!((&report["engine"], &report["worker"]), (&json!("sim"), &json!("w0")));
    let calls = report["calls"].as_array().expect("an array");
    for (index, call) in calls.iter().enumerate() {
        assert_eq!(call["index"], index);
        assert_eq!(call["claimed_tokens"], call["cached_tokens"], "{call}");
        let is_denied = call["verdict"] == "deny";
        assert_eq!(call["status"], if is_denied { "denied" } else { "ok" }, "{call}");
        assert_eq!(call["claimed_tokens"].is_null(), is_denied, "{call}");
        assert_eq!(call["text"] == "", is_denied, "{call}");
    }
    let claimed = |index: usize| calls[index]["claimed_tokens"].as_u64().expect("a number");
    assert_eq!(claimed(0), 0);
    assert!(claimed(1) > 0, "the rules of the first call are shared");
    assert_eq!(claimed(2), 0, "the same prompt of another tenant");
    assert!(claimed(7) > 0, "the same prompt again");
    assert_eq!(report["summary"]["events"]["gaps"], 0);
    assert_eq!(report["summary"]["policy"], "trace");
}

#[test]
fn a_policy_file_goes_before_the_traces_own_and_all_denied_is_refused() {
    let floor = file("nothing.json", &json!({"deny": {"answer": "NOT_TODAY"}}));
    let floor = floor.to_str().expect("UTF-8");
    let trace = example("trace.json");
    let args = ["run", "--trace", &trace, "--engine", "sim", "--policy", floor, "--json"];
    let output = fak(&args, &[]);
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
    let report = report(&output);
    assert_eq!(report["calls"][0]["reason"], "NOT_TODAY");
    assert_eq!(report["calls"][3]["reason"], "DEFAULT_DENY");
    assert_eq!(report["summary"]["denied"], 8);
    assert_eq!(report["summary"]["policy"], "file");
}

#[test]
fn without_a_policy_the_summary_says_so() {
    let call = json!({"tool": "anything", "args": {"prompt": [5, 6, 7], "max_tokens": 2}});
    let trace = file("open.json", &json!({"calls": [call]}));
    let trace = trace.to_str().expect("UTF-8");
    let output = fak(&["run", "--trace", trace, "--engine", "sim"], &[]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains("no policy: every call was allowed"));
}

#[test]
fn bad_usage_and_configuration_exit_64_and_say_what_would_be_right() {
    let trace = example("trace.json");
    let typo = file("typo.json", &json!({"calls": [], "polcy": {}}));
    let floor = file("floor.json", &json!({"alow": []}));
    let (typo, floor) = (typo.to_str().expect("UTF-8"), floor.to_str().expect("UTF-8"));
    let base = ("FAK_VLLM_BASE_URL", "http://127.0.0.1:1/v1/chat");
    type Row<'a> = (&'a [&'a str], &'a [(&'a str, &'a str)], &'a str);
    let rows: [Row<'_>; 8] = [
        (&[], &[], "Usage"),
        (&["run"], &[], "--trace"),
        (&["run", "--trace", &trace, "--engine", "tgi"], &[], "vllm"),
        (&["run", "--trace", "nowhere.json"], &[], "nowhere.json"),
        (&["run", "--trace", typo], &[], "\"polcy\""),
        (&["run", "--trace", &trace, "--policy", floor], &[], "alow"),
        (&["run", "--trace", &trace], &[], "FAK_VLLM_BASE_URL is not set"),
        (&["run", "--trace", &trace], &[base], "FAK_VLLM_BASE_URL=\"http://127.0.0.1:1/v1/chat\""),
    ];
    for (args, environment, expected) in rows {
        let output = fak(args, environment);
        let talk = text(&output.stderr);
        assert_eq!(output.status.code(), Some(64), "{args:?}: {talk}");
        assert!(talk.contains(expected), "{expected:?} is not in: {talk}");
        assert_eq!(text(&output.stdout), "", "{args:?}");
    }
}

#[test]
fn an_engine_that_is_not_there_exits_1_and_names_the_cause() {
    let base = [("FAK_VLLM_BASE_URL", "http://127.0.0.1:1")];
    let output = fak(&["run", "--trace", &example("trace.json")], &base);
    assert_eq!(output.status.code(), Some(1));
    let talk = text(&output.stderr);
    assert!(talk.contains("/v1/models: no connection to the engine"), "{talk}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vllm_is_run_the_same_way_with_its_key_and_its_sockets() {
    let config = SimConfig { api_key: Some("sk-sim".to_owned()), ..SimConfig::default() };
    let sim = Sim::start(config, Binds::default()).await.expect("free ports");
    let base = format!("{}/v1", sim.base_url());
    let (events, replay) = (sim.kv_events_endpoint(), sim.replay_endpoint());
    let environment = [
        ("FAK_VLLM_BASE_URL", base.as_str()),
        ("FAK_VLLM_API_KEY", "sk-sim"),
        ("FAK_VLLM_KV_EVENTS", &events),
        ("FAK_VLLM_KV_REPLAY", &replay),
    ];
    let trace = example("trace.json");
    let output = fak_beside(&["run", "--trace", &trace, "--json"], &environment).await;
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let report = report(&output);
    assert_eq!(report["engine"], "vllm");
    let summary = &report["summary"];
    assert_eq!(summary["claimed_tokens"], summary["cached_tokens"]);
    assert!(summary["claimed_tokens"].as_u64().expect("a number") > 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_key_fails_and_shows_no_key() {
    let config = SimConfig { api_key: Some("sk-sim".to_owned()), ..SimConfig::default() };
    let sim = Sim::start(config, Binds::default()).await.expect("free ports");
    let base = sim.base_url();
    let environment = [
        ("FAK_VLLM_BASE_URL", base.as_str()),
        ("FAK_VLLM_API_KEY", "sk-wrong"),
        ("FAK_VLLM_MODEL", "tiny"),
        ("FAK_LOG", "trace"),
    ];
    let trace = example("trace.json");
    let output = fak_beside(&["run", "--trace", &trace, "--json"], &environment).await;
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(report(&output)["summary"]["failed"], 6);
    assert!(!text(&output.stderr).contains("sk-wrong"), "{}", text(&output.stderr));
}

#[tokio::test(flavor = "multi_thread")]
async fn where_nothing_is_heard_nothing_is_claimed_and_nothing_is_zero() {
    // 0.11 has no `/kv_event_sources`, and leaves a cached 0 out of its usage.
    let config = SimConfig { profile: Profile::V0_11, ..SimConfig::default() };
    let sim = Sim::start(config, Binds::default()).await.expect("free ports");
    let base = sim.base_url();
    let trace = example("trace.json");
    let environment = [("FAK_VLLM_BASE_URL", base.as_str())];
    let output = fak_beside(&["run", "--trace", &trace, "--json"], &environment).await;
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let report = report(&output);
    assert!(report["calls"][0]["claimed_tokens"].is_null());
    assert!(report["calls"][0]["cached_tokens"].is_null());
    assert!(report["calls"][1]["cached_tokens"].as_u64().expect("a number") > 0);
    assert!(report["summary"]["claimed_tokens"].is_null());
    assert!(report["summary"]["events"].is_null());
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_claimed_where_one_rank_of_several_is_heard() {
    let config = SimConfig { dp_ranks: 2, ..SimConfig::default() };
    let sim = Sim::start(config, Binds::default()).await.expect("free ports");
    let (base, events) = (sim.base_url(), sim.kv_events_endpoint());
    let trace = example("trace.json");
    let url = ("FAK_VLLM_BASE_URL", base.as_str());
    let one = [url, ("FAK_VLLM_KV_EVENTS", events.as_str())];
    for (environment, is_claimed) in [(&[url][..], true), (&one, false)] {
        let output = fak_beside(&["run", "--trace", &trace, "--json"], environment).await;
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        assert_eq!(report(&output)["calls"][0]["claimed_tokens"].is_u64(), is_claimed);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn ctrl_c_cancels_the_call_at_the_engine_and_the_report_still_comes() {
    let decode_step = std::time::Duration::from_millis(5);
    let sim = Sim::start(SimConfig { decode_step, ..SimConfig::default() }, Binds::default());
    let sim = sim.await.expect("free ports");
    let args = json!({"prompt": "count on", "max_tokens": 3000, "ignore_eos": true});
    let calls = json!([{"tool": "long", "args": args}, {"tool": "never", "args": args}]);
    let trace = file("long.json", &json!({"calls": calls}));
    let base = sim.base_url();
    let output = tokio::task::spawn_blocking(move || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_fak"));
        command.env_clear().env("FAK_VLLM_BASE_URL", base).arg("run").arg("--trace").arg(trace);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("the binary runs");
        // The first bytes of text: the call is in flight.
        let mut start = vec![0; "#0 long: allow\nx".len()];
        let stdout = child.stdout.as_mut().expect("piped");
        stdout.read_exact(&mut start).expect("a first token");
        let id = child.id().to_string();
        assert!(Command::new("kill").args(["-INT", &id]).status().expect("kill").success());
        child.wait_with_output().expect("it ends")
    });
    let output = output.await.expect("it ends");
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    let shown = text(&output.stdout);
    assert!(shown.contains("\n  cancelled: "), "{shown}");
    assert!(shown.contains("1 calls: 1 allowed, 0 denied, 1 failed"), "{shown}");
    assert!(sim.counters_of(0).generation_tokens < 3000, "the call ran to its end");
}

#[test]
fn the_decision_table_is_printed_both_ways() {
    let rows = report(&fak(&["witness", "table", "--json"], &[]));
    let rows = rows.as_array().expect("an array");
    assert_eq!((&rows[0]["action"], &rows[0]["kv"]), (&json!("pause"), &json!("preserved")));
    let columns = fak(&["witness", "table"], &[]);
    assert_eq!(columns.status.code(), Some(0));
    assert_eq!(text(&columns.stdout).lines().count(), rows.len() + 1);
}
