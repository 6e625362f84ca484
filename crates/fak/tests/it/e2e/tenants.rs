//! Keys and tenants as an operator configures them, and what `fak config` says of it.

use fak_sim::{Binds, Sim, SimConfig};
use serde_json::{Value, json};

use super::process::{Fak, Setup, prompt};

const KEYS: &str = "isolation = true\n\
    [[key]]\ntenant = \"alice\"\nenv = \"ALICE_KEY\"\n\
    [[key]]\ntenant = \"bob\"\nenv = \"BOB_KEY\"\n";

fn setup(name: &str) -> Setup {
    let setup = Setup::new(name).file(KEYS).env("FAK_ADMIN_KEY", "sk-hidden-admin");
    setup.env("ALICE_KEY", "sk-hidden-alice").env("BOB_KEY", "sk-hidden-bob")
}

/// Tokens that the engine took from its cache for a client with this key and salt.
async fn cached(fak: &Fak, key: &str, salt: Option<&str>) -> u64 {
    let mut body = json!({"model": "tiny", "prompt": prompt(1), "max_tokens": 1, "priority": -9});
    if let Some(salt) = salt {
        body["cache_salt"] = salt.into();
    }
    let answer = fak.post_as(key, "/v1/completions", &body).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn each_configured_tenant_has_a_cache_of_its_own_whatever_its_clients_say() {
    let sim = Sim::start(SimConfig::default(), Binds::default()).await.unwrap();
    let setup = setup("tenants").sims([&sim]);
    let fak = setup.start().await;
    fak.worker_is("w0", "serving", true).await;
    assert_eq!(fak.try_ask(&prompt(1)).await.status, 401);
    let (alice, bob) = ("sk-hidden-alice", "sk-hidden-bob");
    assert_eq!(cached(&fak, alice, None).await, 0);
    assert_eq!(cached(&fak, alice, None).await, 96);
    assert_eq!(cached(&fak, bob, Some("mine")).await, 0, "not alice's");
    assert_eq!(cached(&fak, bob, None).await, 96, "and its salt did not count");
    assert_eq!(cached(&fak, alice, Some("mine")).await, 96);
    for salt in [None, Some("mine")] {
        assert_eq!(sim.holds(&prompt(1), salt).hit_tokens, 0, "{salt:?}");
    }
    fak.terminated().await;
}

#[test]
fn settings_are_checked_and_printed_without_their_secrets() {
    let run = |setup: &Setup, command: &[&str], more: &[&str]| {
        let ended = setup.command(command).args(more).output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        let (out, told) = (text(ended.stdout), text(ended.stderr));
        assert!(!out.contains("hidden") && !told.contains("hidden"), "{out}{told}");
        (ended.status.code(), out, told)
    };
    let right = setup("config-right").worker("a", "http://gpu:8000/v1");
    assert_eq!(run(&right, &["config", "check"], &[]), (Some(0), String::new(), String::new()));
    let (code, out, _) = run(&right, &["config", "print"], &[]);
    assert_eq!(code, Some(0));
    for line in ["probe_every_ms = 50  # file", "tenant = \"alice\"", "env = \"BOB_KEY\""] {
        assert!(out.lines().any(|l| l == line), "{line}\n{out}");
    }
    let (_, out, _) = run(&right, &["config", "print"], &["--json"]);
    let json: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(json["settings"]["listen"], json!({"value": "127.0.0.1:0", "from": "flag"}));
    for db in ["sqlite:", "postgres://u:hidden/x@h/fak"] {
        for command in [&["config", "check"][..], &["config", "print"], &["serve"]] {
            let (code, out, told) = run(&right, command, &["--db", db]);
            assert_eq!((code, out.as_str()), (Some(64), ""));
            assert!(told.contains("--db") && told.contains("expected sqlite:PATH"), "{told}");
        }
    }
    // One of the secrets is missing.
    let wrong = Setup::new("config-wrong").file(KEYS).env("ALICE_KEY", "sk-hidden-alice");
    let wrong = wrong.worker("a", "http://gpu:8000/v1");
    for command in [&["config", "check"][..], &["config", "print"], &["serve"]] {
        let (code, out, told) = run(&wrong, command, &[]);
        assert_eq!((code, out.as_str()), (Some(64), ""));
        assert!(told.contains("bob") && told.contains("BOB_KEY"), "{told}");
    }
}

/// Fault 60: names are a tenant's own, in a header as in the body's `prompt_cache_key`.
#[tokio::test(flavor = "multi_thread")]
async fn a_session_of_one_tenant_is_none_of_anothers() {
    let sim = Sim::start(SimConfig::default(), Binds::default()).await.unwrap();
    let setup = setup("tenants_sessions").sims([&sim]);
    let fak = setup.start().await;
    fak.worker_is("w0", "serving", true).await;
    let ask = async |key: &str| {
        let headers = [("authorization", key), ("x-fak-session", "same")];
        let body = json!({"model": "tiny", "prompt": prompt(1), "max_tokens": 1});
        let answer = fak.with("POST", "/v1/completions", &headers, body.to_string()).await;
        (answer.status, answer.header("x-fak-session").to_owned(), answer.text)
    };
    let (alice, bob) = ("Bearer sk-hidden-alice", "Bearer sk-hidden-bob");
    for key in [alice, bob] {
        let (status, session, text) = ask(key).await;
        assert_eq!((status, session.as_str()), (200, "same"), "{text}");
    }
    let sessions = fak.get("/fak/v1/sessions").await.json();
    let mut ids: Vec<_> =
        sessions.as_array().unwrap().iter().map(|session| session["id"].clone()).collect();
    ids.sort_by_key(ToString::to_string);
    assert_eq!(ids, ["alice/same", "bob/same"]);
    let paused = fak.post("/fak/v1/sessions/alice%2Fsame/pause", &json!({"force": true})).await;
    assert_eq!(paused.status, 200, "{}", paused.text);
    let (status, _, text) = ask(alice).await;
    assert_eq!(status, 409);
    assert!(text.contains("session same is dormant") && !text.contains("alice"), "{text}");
    let (status, _, text) = ask(bob).await;
    assert_eq!(status, 503, "its worker is paused, and its session is not dormant: {text}");
}

/// Fault 62.
#[tokio::test(flavor = "multi_thread")]
async fn control_is_for_no_client_and_for_nobody_behind_a_proxy() {
    let sim = Sim::start(SimConfig::default(), Binds::default()).await.unwrap();
    let unguarded = Setup::new("unguarded").file(KEYS).env("ALICE_KEY", "a").env("BOB_KEY", "b");
    let ended = unguarded.sims([&sim]).command(&["serve"]).output().unwrap();
    let told = String::from_utf8(ended.stderr).unwrap();
    assert_eq!(ended.status.code(), Some(64), "{told}");
    assert!(told.contains("there is a [[key]], so FAK_ADMIN_KEY has to be set"), "{told}");
    let setup = Setup::new("behind").sims([&sim]);
    let fak = setup.start().await;
    let host = fak.address.to_string();
    for header in [
        ("x-forwarded-for", "203.0.113.9"),
        ("forwarded", "for=203.0.113.9"),
        ("via", "1.1 proxy"),
        ("sec-fetch-site", "cross-site"),
        ("host", "evil.example"),
        ("origin", "http://evil.example"),
    ] {
        let headers = [("host", host.as_str()), header];
        let answer = fak.with("GET", "/fak/v1/workers", &headers, String::new()).await;
        assert_eq!(answer.status, 403, "{header:?}: {}", answer.text);
    }
    assert_eq!(fak.get("/fak/v1/workers").await.status, 200);
}
