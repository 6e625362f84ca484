//! `fak bench` as its users meet it, against simulated engines.

use std::process::{Command, Output};
use std::time::Duration;

use fak::engine::{Client, Control, Endpoints, Engine, Mode, Seen, SleepLevel, Timeouts};
use fak_sim::{Binds, Connector, Profile, RouteFault, Sim, SimConfig};
use serde_json::{Value, json};

/// Tokens of each prompt: nine full blocks of 32, and a rest.
const TOKENS: u64 = 300;
const BLOCK_TOKENS: u64 = 288;
const REQUESTS: u64 = 3;
/// Of the simulated model (observed on the real one).
const BYTES_PER_TOKEN: u64 = 1024;

async fn sim(profile: Profile, connector: Connector) -> Sim {
    simulated(SimConfig { profile, connector, ..SimConfig::default() }).await
}

async fn simulated(config: SimConfig) -> Sim {
    Sim::start(config, Binds::default()).await.expect("free ports")
}

fn engine(sim: &Sim) -> Engine {
    let client = Client::new(None, Timeouts::default()).expect("no key");
    Engine::new(client, Endpoints::new(&sim.base_url()).expect("an address"))
}

/// `fak bench tier-replay` of three prompts on `url`.
async fn replay(url: &str, more: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fak"));
    command.env_clear().args(["bench", "tier-replay", "--url", url]);
    command.args(["--requests", "3", "--seed", "7"]).args(more);
    let run = move || command.output().expect("the binary runs");
    tokio::task::spawn_blocking(run).await.expect("the binary runs")
}

async fn replay_300(sim: &Sim, more: &[&str]) -> Output {
    replay(&sim.base_url(), &[&["--prompt-tokens", "300"], more].concat()).await
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("UTF-8")
}

fn report(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| {
        panic!("{error}: {}\n{}", text(&output.stdout), text(&output.stderr))
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tier_that_is_kept_is_reused_and_one_that_is_cleared_is_not() {
    let sim = sim(Profile::KeepTier, Connector::Offloading).await;
    let output = replay_300(&sim, &["--json"]).await;
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("seed 7"), "{}", text(&output.stderr));
    let report = report(&output);
    let bytes = REQUESTS * BLOCK_TOKENS * BYTES_PER_TOKEN;
    for (arm, hits, stored, loaded) in
        [("cleared", 0, bytes, 0), ("kept", REQUESTS * BLOCK_TOKENS, 0, bytes)]
    {
        let arm = &report[arm];
        assert_eq!(arm["external_queries"], REQUESTS * TOKENS, "{report}");
        assert_eq!(arm["external_hits"], hits, "{report}");
        assert_eq!(arm["stored_bytes"], stored, "{report}");
        assert_eq!(arm["loaded_bytes"], loaded, "{report}");
        assert_eq!(arm["warm_stored_bytes"], bytes, "{report}");
        assert!(arm["replay_p50_s"].as_f64().expect("a number") > 0.0, "{report}");
    }
    assert_eq!((&report["verdict"], &report["outputs_equal"]), (&json!("reused"), &json!(true)));
    let workload = [&report["seed"], &report["requests"], &report["prompt_tokens"]];
    assert_eq!(workload, [&json!(7), &json!(REQUESTS), &json!(TOKENS)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn both_arms_stand_side_by_side_and_a_prompt_is_shortened_to_what_the_engine_takes() {
    let config = SimConfig {
        profile: Profile::KeepTier,
        connector: Connector::Offloading,
        max_model_len: 256,
        ..SimConfig::default()
    };
    let sim = simulated(config).await;
    let output = replay(&sim.base_url(), &[]).await;
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("3 prompts of 248 tokens"), "{}", text(&output.stderr));
    let shown = text(&output.stdout);
    let rows: Vec<Vec<&str>> = shown.lines().map(|l| l.split_whitespace().collect()).collect();
    let of = |name: &str| {
        let row = rows.iter().find(|row| row.join(" ").starts_with(name));
        let row = row.unwrap_or_else(|| panic!("{name:?} is not in:\n{shown}"));
        row[row.len() - 2..].to_vec()
    };
    assert_eq!(of("external queries"), ["744", "744"]);
    assert_eq!(of("external hits"), ["0", "672"]);
    assert_eq!(of("outputs"), ["same", "same"]);
    assert!(shown.contains("\nreused: 672 of 744 tokens"), "{shown}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tier_too_small_for_all_prompts_is_not_reused() {
    let config = SimConfig {
        profile: Profile::KeepTier,
        connector: Connector::Offloading,
        cpu_blocks: 12,
        ..SimConfig::default()
    };
    let sim = simulated(config).await;
    let output = replay_300(&sim, &["--json"]).await;
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    let report = report(&output);
    assert_eq!(report["verdict"], "not reused");
    assert!(report["reason"].as_str().expect("a text").contains("of 864 tokens"), "{report}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_not_proven_to_keep_its_tier_is_refused_and_nothing_is_sent() {
    let rows = [
        (Profile::V0_32, Connector::Offloading, "/openapi.json declares no clear_connector_cache"),
        (Profile::V0_19, Connector::Offloading, "declares no clear_connector_cache"),
        (Profile::KeepTier, Connector::Multi, "OffloadingConnector with MooncakeStoreConnector"),
        (Profile::KeepTier, Connector::Mooncake, "MooncakeStoreConnector is not known to keep"),
        (Profile::KeepTier, Connector::None, "the engine has no KV connector"),
    ];
    for (profile, connector, expected) in rows {
        let sim = sim(profile, connector).await;
        let prompt: Vec<u32> = (100..400).collect();
        let body = json!({"model": "tiny", "prompt": prompt, "max_tokens": 1}).to_string();
        let url = engine(&sim).endpoints().data(fak::engine::Data::Completions);
        let request = fak::engine::Outgoing::to(url).json(body.into());
        let warm = engine(&sim).client().send(request, Duration::from_secs(10)).await;
        assert_eq!(warm.expect("an answer").status, 200);
        sim.at_rest().await;
        let before = (sim.counters_of(0), sim.holds(&prompt, None));
        assert!(before.1.gpu > 0, "{before:?}");

        let output = replay_300(&sim, &["--json"]).await;
        assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
        let report = report(&output);
        assert_eq!(report["verdict"], "refused", "{report}");
        assert!(report["cleared"].is_null() && report["kept"].is_null(), "{report}");
        let reason = report["reason"].as_str().expect("a text");
        assert!(reason.contains(expected), "{expected:?} is not in: {reason}");
        assert!(reason.contains("57810"), "no way out in: {reason}");
        assert_eq!((sim.counters_of(0), sim.holds(&prompt, None)), before, "{profile:?}");

        let shown = replay_300(&sim, &[]).await;
        assert_eq!(shown.status.code(), Some(2));
        assert!(text(&shown.stdout).starts_with("refused: "), "{}", text(&shown.stdout));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn where_nobody_answers_nothing_is_said_of_tiers() {
    // Held, and not listened at.
    let socket = tokio::net::TcpSocket::new_v4().expect("a socket");
    socket.bind("127.0.0.1:0".parse().expect("an address")).expect("bound");
    let address = socket.local_addr().expect("bound");
    let output = replay(&format!("http://{address}"), &["--json"]).await;
    assert_eq!((output.status.code(), &*text(&output.stdout)), (Some(1), ""));
    let told = format!("no engine answers at --url http://{address}");
    assert!(text(&output.stderr).contains(&told), "{}", text(&output.stderr));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_is_asleep_or_busy_is_left_as_it_is() {
    let config = SimConfig {
        profile: Profile::KeepTier,
        connector: Connector::Offloading,
        decode_step: Duration::from_millis(5),
        ..SimConfig::default()
    };
    let sim = simulated(config).await;
    let engine = engine(&sim);
    let (level, mode) = (SleepLevel::WeightsOffloaded, Mode::Abort);
    engine.control(Control::Sleep { level, mode, keep_connector_cache: false }).await;
    let output = replay_300(&sim, &[]).await;
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("paused or asleep"), "{}", text(&output.stderr));
    assert_eq!(engine.observe().await.is_sleeping, Seen::Value(true));
    engine.control(Control::WakeUp { tags: Vec::new() }).await;

    let body = json!({"model": "tiny", "prompt": [5, 6], "max_tokens": 4000, "ignore_eos": true,
        "stream": true});
    let url = engine.endpoints().data(fak::engine::Data::Completions);
    let request = fak::engine::Outgoing::to(url).json(body.to_string().into());
    let mut stream = engine.client().open(request).await.expect("a stream");
    assert!(stream.body.chunk().await.expect("a chunk").is_some());
    let output = replay_300(&sim, &[]).await;
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("not idle (requests running 1"));
    assert_eq!(sim.requests_in_flight(), 1, "nobody's request is aborted");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_experiment_that_fails_leaves_the_engine_awake() {
    let sim = sim(Profile::KeepTier, Connector::Offloading).await;
    sim.faults().route("/sleep", RouteFault::FailAfter(500), 1);
    let output = replay_300(&sim, &["--json"]).await;
    let talk = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{talk}");
    assert!(talk.contains("with the tier cleared: sleep is not confirmed"), "{talk}");
    assert!(talk.contains("the engine was woken"), "{talk}");
    assert_eq!(text(&output.stdout), "");
    let seen = engine(&sim).observe().await;
    assert_eq!((seen.is_paused, seen.is_sleeping), (Seen::Value(false), Seen::Value(false)));
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_usage_exits_64_and_says_what_would_be_right() {
    let sim = sim(Profile::KeepTier, Connector::Offloading).await;
    let url = sim.base_url();
    let rows: [(&str, &[&str], &str); 6] = [
        ("ftp://nowhere", &[], "does not start with http://"),
        (&url, &["--prompt-tokens", "4097"], "its max_model_len is 4096"),
        (&url, &["--prompt-tokens", "32"], "it has to be over 32"),
        (&url, &["--prompt-tokens", "0"], "--prompt-tokens"),
        (&url, &["--model", "other"], "[\"tiny\"]"),
        (&url, &["--level", "2"], "--level"),
    ];
    for (url, more, expected) in rows {
        let output = replay(url, more).await;
        let talk = text(&output.stderr);
        assert_eq!(output.status.code(), Some(64), "{more:?}: {talk}");
        assert!(talk.contains(expected), "{expected:?} is not in: {talk}");
    }
    assert_eq!(sim.counters_of(0).steps, 0, "nothing was sent");
}
