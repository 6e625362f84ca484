//! Sessions as clients see them: who they are, where they go, and when they may not.

use fak::lifecycle::Request;
use fak::sessions::{self, Sessions};
use fak::store::{Row, Store, Tiers};
use fak_kernel::witness::{Level, Mode, Move, Parts, Weights};
use fak_kernel::{Action, Disposition, Evidence, Phase, Tier};
use http::StatusCode;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::bridged::{Bridged, COMPLETIONS};
use super::rig::{Answer, MODEL, PATIENT, Rig, chat, setup};
use super::routing::hold;
use crate::engine::peer::{self, Peer, Reply};

const CHAT: &str = "/v1/chat/completions";
const SESSION: &str = "x-fak-session";
const SLEEP: Move = Move::Sleep { level: Some(Level::One), mode: Mode::Abort, keep_tier: false };

/// A gateway with sessions before engines that answer at once.
async fn answering(engines: usize) -> (Vec<Peer>, Rig, Sessions) {
    let mut peers = Vec::new();
    for _ in 0..engines {
        peers.push(Peer::start(|_| Reply::Send(peer::json("200 OK", "{}"))).await);
    }
    let store = Store::open("sqlite::memory:").await.unwrap();
    let (sessions, _) = Sessions::open(store, sessions::Config::default()).await.unwrap();
    let setup = super::rig::Setup { sessions: Some(sessions.clone()), ..setup() };
    let urls: Vec<_> = peers.iter().map(Peer::url).collect();
    (peers, Rig::with(&urls, setup).await, sessions)
}

async fn ask(bridged: &Bridged, session: &str) -> Answer {
    let tokens: Vec<u32> = (300..400).collect();
    let body = json!({"model": "tiny", "prompt": tokens, "max_tokens": 1}).to_string();
    bridged.rig.post_with(COMPLETIONS, &[(SESSION, session)], &body).await
}

fn cached(answer: &Answer) -> u64 {
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
    answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
}

async fn act(bridged: &Bridged, mv: Move, session: &str) -> Row {
    let request = Request { session: Some(session.to_owned()), ..Request::new(mv) };
    bridged.lifecycle.act("w0", request).await.unwrap()
}

/// What a refusal says of retries: OpenAI's clients repeat a 409 by themselves.
async fn refused_header(bridged: &Bridged, session: &str) -> Option<String> {
    let answer = ask(bridged, session).await;
    answer.header("x-should-retry").map(str::to_owned)
}

/// Waits until what became of the session's worker was taken in.
async fn is_dormant(bridged: &Bridged, session: &str, dormant: bool) {
    let taken_in = async {
        while bridged.sessions.get(session).unwrap().dormancy.is_some() != dormant {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENT, taken_in).await.unwrap();
}

#[tokio::test]
async fn a_dormant_session_is_refused_with_the_action_and_the_row_behind_it() {
    let bridged = Bridged::start().await;
    let answer = ask(&bridged, "s1").await;
    assert_eq!((answer.status, answer.header(SESSION)), (StatusCode::OK, Some("s1")));
    assert_eq!(ask(&bridged, "beside").await.status, StatusCode::OK);
    let pause = Move::Pause { mode: Mode::Keep, clear: false, keep_tier: false };
    let wake = Move::Wake { tags: Parts::NONE, weights: Weights::Same };
    for (rest, word, back) in [(SLEEP, "sleep", wake), (pause, "pause", Move::Resume)] {
        let row = act(&bridged, rest, "s1").await;
        is_dormant(&bridged, "s1", true).await;
        for path in [COMPLETIONS, CHAT, "/v1/responses"] {
            let body = json!({"model": "tiny", "prompt": [1, 2], "messages": []}).to_string();
            let refused = bridged.rig.post_with(path, &[(SESSION, "s1")], &body).await;
            assert_eq!(refused.status, StatusCode::CONFLICT, "{path}: {}", refused.text());
            assert_eq!(refused.code(), "session_dormant");
            let message = refused.json()["error"]["message"].as_str().unwrap().to_owned();
            for told in ["s1", word, &format!("witness row {}", row.seq)] {
                assert!(message.contains(told), "{message}");
            }
        }
        let messages = bridged.rig.post_with("/v1/messages", &[(SESSION, "s1")], "{}").await.json();
        assert_eq!(messages["error"]["type"], "conflict_error", "{messages}");
        assert_eq!(refused_header(&bridged, "s1").await.as_deref(), Some("false"));
        // Another session of that worker, and one that is new, hear of the worker instead.
        for id in ["beside", "s2"] {
            let other = ask(&bridged, id).await;
            assert_eq!(
                (other.status, other.code().as_str()),
                (StatusCode::SERVICE_UNAVAILABLE, "no_serving_worker"),
                "{id}"
            );
            assert_eq!(other.header("retry-after"), Some("5"));
        }
        let row = act(&bridged, back, "s1").await;
        assert!(row.serving, "{row:?}");
        is_dormant(&bridged, "s1", false).await;
        assert_eq!(ask(&bridged, "s1").await.status, StatusCode::OK);
    }
    assert_eq!(bridged.sim.counters_of(0).tokens_while_asleep, 0);
}

#[tokio::test]
async fn a_session_stays_on_its_worker_and_requests_without_one_do_not() {
    let (_peers, rig, sessions) = answering(2).await;
    let mut seen = std::collections::BTreeSet::new();
    for _ in 0..64 {
        let answer = rig.post(CHAT, &chat(false)).await;
        seen.insert(answer.header("x-fak-worker").unwrap().to_owned());
        assert_eq!(answer.header(SESSION), None);
    }
    assert_eq!(seen.len(), 2, "else nothing is shown below");
    for id in ["a", "b", "c", "d"] {
        let mut workers = std::collections::BTreeSet::new();
        for _ in 0..16 {
            let answer = rig.post_with(CHAT, &[(SESSION, id)], &chat(false)).await;
            assert_eq!(answer.header(SESSION), Some(id));
            workers.insert(answer.header("x-fak-worker").unwrap().to_owned());
        }
        assert_eq!(workers.len(), 1, "{id}: {workers:?}");
        let bound = sessions.get(id).unwrap().worker;
        assert_eq!(bound.as_deref(), workers.first().map(String::as_str));
    }
    // It moves where its worker does not serve, and stays where it went.
    let before = sessions.get("a").unwrap().worker.unwrap();
    let number = usize::from(&*before == "w1");
    rig.phase(number, Phase::Error);
    for _ in 0..4 {
        let answer = rig.post_with(CHAT, &[(SESSION, "a")], &chat(false)).await;
        assert_ne!(answer.header("x-fak-worker"), Some(&*before));
    }
    rig.phase(number, Phase::Serving);
    let answer = rig.post_with(CHAT, &[(SESSION, "a")], &chat(false)).await;
    assert_ne!(answer.header("x-fak-worker"), Some(&*before));
}

/// The session knows of the verdict, whatever the index was told of it.
#[tokio::test]
async fn a_verdict_between_the_claim_and_the_sending_takes_the_claim() {
    let tokens: Vec<u32> = (0..100).collect();
    let tokenized = json!({"count": 100, "max_model_len": 4096, "tokens": tokens}).to_string();
    let (sender, mut arrived) = mpsc::channel(1);
    let peer = Peer::start(move |request| {
        if request.line() != "POST /tokenize" {
            return Reply::Send(peer::json("200 OK", "{}"));
        }
        let (steps, walked) = mpsc::channel(1);
        sender.try_send(steps).unwrap();
        Reply::Steps(walked)
    })
    .await;
    let store = Store::open("sqlite::memory:").await.unwrap();
    let (sessions, _) = Sessions::open(store, sessions::Config::default()).await.unwrap();
    let setup = super::rig::Setup { sessions: Some(sessions.clone()), ..setup() };
    let rig = Rig::with(&[peer.url()], setup).await;
    hold(&rig, 0, &tokens);
    for (text, verdict, told) in [("a", None, "warm"), ("b", Some(reset("w0")), "unknown")] {
        let body = json!({"model": MODEL, "prompt": text, "max_tokens": 1}).to_string();
        let headers = [(SESSION, "s")];
        let (answer, ()) = tokio::join!(rig.post_with(COMPLETIONS, &headers, &body), async {
            let steps = arrived.recv().await.unwrap();
            if let Some(row) = &verdict {
                sessions.apply(row);
            }
            steps.send(peer::json("200 OK", &tokenized)).await.unwrap();
        });
        assert_eq!(answer.header("x-fak-kv"), Some(told), "{}", answer.text());
    }
}

/// A row on a worker whose cache was reset, written by nobody.
fn reset(worker: &str) -> Row {
    Row {
        seq: 1,
        at: String::new(),
        worker: worker.to_owned(),
        rank: None,
        incarnation: None,
        session: None,
        action: Action::Reset,
        level: None,
        phase: Phase::Serving,
        kv: Disposition::Forgotten,
        tiers: Tiers(vec![(Tier::Gpu, Disposition::Forgotten)]),
        weight_version: None,
        warm_demoted: true,
        serving: true,
        evidence: Evidence::Observed,
        asked: Value::Null,
        answered: Value::Null,
        observed: Value::Null,
        reason: "confirmed".to_owned(),
        standing: None,
    }
}

/// Whatever put the worker to rest: the session itself was not.
#[tokio::test]
async fn sessions_of_a_worker_that_rests_go_to_another_and_are_bound_there() {
    let (_peers, rig, sessions) = answering(2).await;
    let takes_out: [fn(&mut fak::fleet::State); 5] = [
        |state| state.standing.phase = Phase::Sleeping,
        |state| state.standing.phase = Phase::Paused,
        |state| state.standing.phase = Phase::Error,
        |state| state.held_by = Some("trainer".into()),
        |state| state.is_reachable = false,
    ];
    for (round, take_out) in takes_out.into_iter().enumerate() {
        let id = format!("s{round}");
        let ask = async || rig.post_with(CHAT, &[(SESSION, &id)], &chat(false)).await;
        let before = ask().await.header("x-fak-worker").unwrap().to_owned();
        let number = usize::from(before == "w1");
        rig.state(number, take_out);
        let moved = ask().await;
        assert_eq!(moved.status, StatusCode::OK, "{}", moved.text());
        assert_ne!(moved.header("x-fak-worker"), Some(before.as_str()));
        rig.state(1 - number, take_out);
        let none = ask().await;
        assert_eq!(
            (none.status, none.code().as_str()),
            (StatusCode::SERVICE_UNAVAILABLE, "no_serving_worker")
        );
        assert_eq!(none.header("retry-after"), Some("5"));
        for number in 0..2 {
            rig.state(number, |state| {
                state.standing = fak_kernel::witness::Standing::SERVING;
                (state.held_by, state.is_reachable) = (None, true);
            });
        }
        let after = ask().await;
        assert_eq!(after.header("x-fak-worker"), moved.header("x-fak-worker"), "bound anew");
        assert_ne!(sessions.get(&id).unwrap().worker.as_deref(), Some(before.as_str()));
    }
}

#[tokio::test]
async fn the_header_names_the_session_before_the_body_does() {
    let (mut peers, rig, sessions) = answering(1).await;
    let body =
        |key: Value| json!({"model": MODEL, "messages": [], "prompt_cache_key": key}).to_string();
    let both = rig.post_with(CHAT, &[(SESSION, "header")], &body("body".into())).await;
    assert_eq!(both.header(SESSION), Some("header"));
    assert!(sessions.get("body").is_none());
    let sent = peers[0].request().await;
    assert_eq!(sent.header(SESSION), None, "it is fak's own");
    assert_eq!(sent.json()["prompt_cache_key"], "body", "what came is passed on");
    let one = rig.post(CHAT, &body("body".into())).await;
    assert_eq!(one.header(SESSION), Some("body"));
    // A key of OpenAI's may be no name of a session; a header has to be.
    let none = rig.post(CHAT, &body("two words".into())).await;
    assert_eq!((none.status, none.header(SESSION)), (StatusCode::OK, None));
    let refused = rig.post_with(CHAT, &[(SESSION, "two words")], &body(Value::Null)).await;
    assert_eq!(
        (refused.status, refused.code().as_str()),
        (StatusCode::BAD_REQUEST, "invalid_session")
    );
}

/// Where nothing that is meant for it names one.
#[tokio::test]
async fn an_agents_own_name_for_its_session_is_taken() {
    const AGENT: &str = "x-claude-code-session-id";
    let (mut peers, rig, _) = answering(1).await;
    let body = |user: &str| {
        json!({"model": MODEL, "messages": [], "metadata": {"user_id": user}}).to_string()
    };
    let by_json = json!({"device_id": "d", "session_id": "5f-json"}).to_string();
    for (headers, user, session) in [
        (&[(AGENT, "5f-header")][..], by_json.as_str(), Some("5f-header")),
        (&[], &by_json, Some("5f-json")),
        (&[], "user_1_account_2_session_5f-text", Some("5f-text")),
        (&[], "user_1", None),
        (&[], "7", None),
        (&[], "user_1_session_two words", None),
        (&[(AGENT, "two words")], "user_1", None),
        (&[(AGENT, "5f-header"), (SESSION, "named")], &by_json, Some("named")),
    ] {
        let answer = rig.post_with("/v1/messages", headers, &body(user)).await;
        assert_eq!((answer.status, answer.header(SESSION)), (StatusCode::OK, session), "{user}");
        let sent = peers[0].request().await;
        assert_eq!((sent.header(AGENT), sent.json()), (None, body(user).parse().unwrap()));
    }
    let keyed = json!({"model": MODEL, "messages": [], "prompt_cache_key": "key"}).to_string();
    let answer = rig.post_with("/v1/messages", &[(AGENT, "5f-header")], &keyed).await;
    assert_eq!(answer.header(SESSION), Some("key"));
}

#[tokio::test]
async fn an_isolated_session_leaves_its_blocks_behind_and_others_keep_theirs() {
    let bridged = Bridged::start().await;
    assert_eq!(cached(&ask(&bridged, "s1").await), 0);
    assert_eq!(cached(&ask(&bridged, "s2").await), 96, "they share what nobody isolated");
    assert!(bridged.sessions.isolate("s1").await.unwrap());
    assert_eq!(cached(&ask(&bridged, "s1").await), 0);
    assert_eq!(cached(&ask(&bridged, "s1").await), 96, "it has blocks of its own again");
    assert_eq!(cached(&ask(&bridged, "s2").await), 96);
    assert!(bridged.sessions.isolate("s1").await.unwrap());
    assert_eq!(cached(&ask(&bridged, "s1").await), 0, "each time anew");
    assert_eq!(cached(&ask(&bridged, "s2").await), 96);
    for outcome in ["over", "lost_in_flight"] {
        assert_eq!(bridged.audited(outcome), 0, "{outcome}");
    }
}

#[tokio::test]
async fn an_isolated_session_keeps_the_salt_that_its_requests_have() {
    let (mut peers, rig, sessions) = answering(1).await;
    let body = |salt: &str| json!({"model": MODEL, "messages": [], "cache_salt": salt}).to_string();
    let mut salts = std::collections::HashSet::new();
    for round in 0..2 {
        for id in ["s1", "s2"] {
            for salt in ["x", "y"] {
                rig.post_with(CHAT, &[(SESSION, id)], &body(salt)).await;
                let sent = peers[0].request().await.json()["cache_salt"].clone();
                // The other session's are as they were, and so is nobody else's.
                assert_eq!(sent == salt, round == 0 || id == "s2", "{round} {id} {salt}: {sent}");
                salts.insert(sent.to_string());
            }
        }
        assert!(sessions.isolate("s1").await.unwrap());
    }
    assert_eq!(salts.len(), 4, "x, y, and of each the isolated session's own");
}

/// By the audit, so that the two are of the same requests.
#[tokio::test]
async fn a_session_sums_up_what_was_claimed_and_what_its_engines_found() {
    let bridged = Bridged::start().await;
    let mut found = 0;
    for _ in 0..3 {
        found += cached(&ask(&bridged, "s1").await);
        bridged.settled().await;
    }
    bridged.rig.empty().await;
    let view = bridged.sessions.get("s1").unwrap();
    let claimed = bridged.rig.count("fak_claimed_tokens_total");
    assert!(claimed > 0, "{view:?}");
    assert_eq!(view.claimed_tokens, claimed);
    let unknown = found - bridged.rig.count("fak_cached_tokens_total");
    assert_eq!((view.cached_tokens, unknown), (found, 0));
}
