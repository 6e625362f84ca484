//! `fak session`, `fak worker` and `fak witness` against the control API: the built binary.

use std::io::{BufRead as _, BufReader};
use std::process::{Command, Output, Stdio};

use fak_sim::RouteFault;
use serde_json::{Value, json};

use super::rig::Rig;

fn command(address: &str, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fak"));
    command.args(args).env_clear().env("FAK_ADDR", address);
    command
}

/// Exit code, data and talk.
pub(super) struct Said {
    pub(super) code: i32,
    pub(super) out: String,
    pub(super) err: String,
}

impl Said {
    pub(super) fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|e| panic!("{e}: {}{}", self.out, self.err))
    }
}

async fn run(mut command: Command) -> Said {
    let run = move || command.output().unwrap();
    let Output { status, stdout, stderr } = tokio::task::spawn_blocking(run).await.unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Said { code: status.code().unwrap(), out: text(stdout), err: text(stderr) }
}

pub(super) async fn fak(rig: &Rig, line: &str) -> Said {
    run(command(&rig.url(), &line.split_whitespace().collect::<Vec<_>>())).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_fleet_shows_workers_with_what_is_behind_them() {
    let rig = Rig::start(2).await;
    rig.served("s1", "w0");
    rig.sessions.resolve("s1").unwrap().record(64, 48);
    let said = fak(&rig, "session ls --fleet").await;
    assert_eq!(said.code, 0, "{}", said.err);
    let lines: Vec<Vec<_>> = said.out.lines().map(|l| l.split_whitespace().collect()).collect();
    let head = ["WORKER", "PHASE", "TIERS", "SESSIONS", "CLAIMED", "CACHED", "WITNESS"];
    assert_eq!(lines[0], head);
    assert_eq!((lines[1][0], lines[1][1]), ("w0", "serving"));
    let tail = &lines[1][lines[1].len() - 4..];
    assert_eq!(&tail[..3], ["1", "64", "48"], "{}", said.out);
    assert_eq!(lines.len(), 3);
    assert!(!said.out.contains('\u{1b}'), "no colour without a terminal");

    let mut fleet = fak(&rig, "session ls --fleet --json").await.json();
    let mut workers = rig.get("/fak/v1/workers").await.json();
    for shown in [&mut fleet, &mut workers] {
        let age = shown[0]["streams"][0]["last_event_age_ms"].take();
        assert!(age.as_u64().is_some(), "a marker came back: {age}");
        shown[1]["streams"][0]["last_event_age_ms"].take();
    }
    assert_eq!(fleet, workers);
    let sessions = fak(&rig, "session ls --json").await.json();
    assert_eq!((&sessions[0]["id"], &sessions[0]["run"]), (&json!("s1"), &json!("active")));
    assert!(fak(&rig, "worker ls").await.out.contains("w1"));
    assert!(fak(&rig, "session ls").await.out.contains("s1"));
    assert!(fak(&rig, "session status s1").await.out.contains("claimed_tokens"));
    assert_eq!(fak(&rig, "worker status w1 --json").await.json()["id"], "w1");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn exit_codes_tell_done_failed_refused_and_bad_usage_apart() {
    let rig = Rig::start(1).await;
    rig.served("mine", "w0");
    rig.served("other", "w0");
    let said = fak(&rig, "session sleep mine --level 1").await;
    assert_eq!((said.code, said.out.as_str()), (2, "other\n"), "{}", said.err);
    assert!(said.err.contains("active on w0"), "{}", said.err);

    for line in ["session sleep mine", "session sleep mine --level 0", "worker sleep w0"] {
        let said = fak(&rig, line).await;
        assert_eq!((said.code, said.out.as_str()), (64, ""), "{line}");
        let names_the_value = !line.contains("--level") || said.err.contains("not 0");
        assert!(names_the_value, "{line}: {}", said.err);
        assert!(said.err.contains("use pause"), "{line}: {}", said.err);
    }
    assert_eq!(run(command(&rig.url(), &["worker", "sleep", "", "--level", "1"])).await.code, 64);
    for line in [
        "session quarantine mine",
        "session quarantine mine --flush --isolate",
        "session resume mine --level 1",
        "session pause mine --mode drop",
        "worker pause w0 --hold",
        "rollout end",
        "rollout begin --level 3",
        "rollout end --weights same --stage kv_cache",
        "worker quarantine w0 --flush",
    ] {
        assert_eq!(fak(&rig, line).await.code, 64, "{line}");
    }
    let said = fak(&rig, "session sleep mine --level 2 --mode wait --force --json").await;
    assert_eq!(said.code, 0, "{}", said.err);
    let row = said.json();
    assert_eq!((&row["level"], &row["kv"]), (&json!(2), &json!("forgotten")));
    let said = fak(&rig, "worker sleep w0 --level 2 --json").await;
    assert_eq!((said.code, &said.json()["row"]["evidence"]), (2, &json!("not_sent")));
    assert_eq!(fak(&rig, "worker pause w9").await.code, 2);
    assert_eq!(fak(&rig, "session status nobody").await.code, 2);

    rig.sims[0].faults().route("/wake_up", RouteFault::Fail(500), 1);
    let said = fak(&rig, "session wake mine").await;
    assert_eq!(said.code, 1, "{}", said.err);
    assert!(said.out.contains("wake on w0"), "the row is shown: {}", said.out);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn actions_take_their_options_and_say_their_row() {
    let rig = Rig::start(1).await;
    rig.served("s", "w0");
    for (line, says) in [
        ("session pause s", "paused, kv preserved"),
        ("session resume s", "serving, kv preserved"),
        ("session pause s --clear --mode abort", "paused, kv forgotten"),
        ("worker resume w0", "serving, kv unknown"),
        ("session reset s", "serving, kv forgotten"),
        ("session sleep s --level 1 --keep-tier --allow-evict", "sleeping, kv forgotten"),
        ("session wake s --tag weights", "waking, kv unknown"),
        ("session wake s --tag kv_cache", "serving, kv unknown"),
        ("session quarantine s --isolate", "serving, not sent, isolated"),
        ("session quarantine s --flush", "serving, kv forgotten"),
    ] {
        let said = fak(&rig, line).await;
        assert_eq!(said.code, 0, "{line}: {}{}", said.out, said.err);
        assert!(said.out.contains(says), "{line}: {}", said.out);
    }
    let kept = fak(&rig, "session sleep s --level 1 --keep-tier").await;
    assert_eq!(kept.code, 2, "{}", kept.out);
    assert!(kept.out.contains("keep_tier_not_proven"), "{}", kept.out);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_sent_and_is_not_proven_to_be_done_exits_1_and_what_was_not_sent_2() {
    let rig = Rig::start(1).await;
    for (line, fault, code, says) in [
        ("worker reset w0", Some(RouteFault::Pretend), 1, "no_effect"),
        ("worker reset w0", Some(RouteFault::Decline), 1, "success_false"),
        ("worker reset w0", None, 0, "confirmed"),
        ("worker wake w0", None, 2, "not sent, already_awake"),
        ("worker sleep w0 --level 2", None, 0, "confirmed"),
        ("worker wake w0", None, 1, "weights_not_proven"),
        ("worker wake w0 --weights loaded", None, 0, "confirmed"),
        ("rollout begin --level 2", None, 0, "confirmed"),
        ("rollout end --weights unproven", None, 1, "weights_not_proven"),
        ("worker pause w0 --holder rollout", None, 2, "not sent, partly_awake"),
    ] {
        if let Some(fault) = fault {
            rig.sims[0].faults().route("/reset_prefix_cache", fault, 1);
        }
        let said = fak(&rig, line).await;
        assert_eq!(said.code, code, "{line}: {}{}", said.out, said.err);
        assert!(said.out.contains(says), "{line}: {}", said.out);
    }
    let listed = fak(&rig, "witness ls --worker w0").await.out;
    for row in listed.lines().filter(|row| row.contains("not_sent")) {
        assert!(row.contains("not sent") && !row.contains("preserved"), "{row}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_ledger_is_listed_and_followed() {
    let rig = Rig::start(1).await;
    let mut tail = command(&rig.url(), &["witness", "tail", "--json"]);
    let mut tail = tail.stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(tail.stdout.take().unwrap()).lines();
    // Resets go on until the first one is told: the follower joins when it likes.
    let first = tokio::task::spawn_blocking(move || lines.next().unwrap().unwrap());
    while !first.is_finished() {
        assert_eq!(fak(&rig, "worker reset w0").await.code, 0);
    }
    let row: Value = serde_json::from_str(&first.await.unwrap()).unwrap();
    assert_eq!((&row["action"], &row["kv"]), (&json!("reset"), &json!("forgotten")));
    tail.kill().unwrap();
    tail.wait().unwrap();

    let rows = fak(&rig, "witness ls --worker w0 --json").await.json();
    assert_eq!(rows[0]["action"], "join");
    let after = format!("witness ls --after {} --json", rows[0]["seq"]);
    assert_eq!(fak(&rig, &after).await.json()[0]["action"], "reset");
    let unknown = fak(&rig, "witness ls --kv unknown --json").await.json();
    assert!(unknown.as_array().unwrap().iter().all(|row| row["kv"] == "unknown"));
    let shown = fak(&rig, "witness ls").await.out;
    assert!(shown.starts_with("SEQ") && shown.contains("reset"), "{shown}");
    assert_eq!(fak(&rig, "witness ls --kv warm").await.code, 64);
    assert_eq!(fak(&rig, "witness ls --action explode").await.code, 64);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_key_of_the_environment_is_shown_to_fak_and_to_nobody_else() {
    let rig = Rig::with_key("s3cret").await;
    let said = fak(&rig, "worker ls").await;
    assert_eq!(said.code, 2, "{}", said.err);
    assert!(said.err.contains("admin key") && said.err.contains("FAK_KEY"), "{}", said.err);
    let mut keyed = command(&rig.url(), &["worker", "ls"]);
    keyed.env("FAK_KEY", "s3cret");
    assert_eq!(run(keyed).await.code, 0);
    let mut wrong = command(&rig.url(), &["worker", "ls"]);
    wrong.env("FAK_KEY", "guess");
    let said = run(wrong).await;
    assert_eq!(said.code, 2);
    assert!(!said.err.contains("guess") && !said.err.contains("s3cret"), "{}", said.err);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn where_no_fak_answers_the_client_says_so() {
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let said = run(command(&format!("http://{free}"), &["worker", "ls"])).await;
    assert_eq!(said.code, 1);
    assert!(said.err.contains(&format!("no fak answers at http://{free}")), "{}", said.err);
    assert!(said.err.contains("FAK_ADDR"), "{}", said.err);
    assert_eq!(run(command("http://u:p@h", &["worker", "ls"])).await.code, 64);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_address_that_leads_to_an_engine_is_said_to_be_no_faks() {
    let rig = Rig::start(1).await;
    let engine = rig.sims[0].base_url();
    for line in
        [&["worker", "ls"][..], &["session", "ls"], &["worker", "sleep", "w0", "--level", "1"]]
    {
        let said = run(command(&engine, line)).await;
        assert_eq!((said.code, said.out.as_str()), (2, ""), "{line:?}");
        for told in [&*engine, "does not answer as fak does", "404", "FAK_ADDR", "engine"] {
            assert!(said.err.contains(told), "{told}: {}", said.err);
        }
    }
}
