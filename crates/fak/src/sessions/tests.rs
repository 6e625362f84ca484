//! Sessions over a ledger in memory: who goes to rest, what opens a gate, what is forgotten.

use std::sync::atomic::AtomicI64;

use fak_kernel::vocab::PerTier;
use fak_kernel::{Action, Disposition, Phase, Tier};
use jiff::Timestamp;

use super::*;
use crate::runtime::{OnExit, TaskGroup};
use crate::store::{NewIntent, Outcome, Tiers};

/// Each test has its own clock, for which a function has its own static.
macro_rules! clock {
    ($name:ident) => {
        static $name: AtomicI64 = AtomicI64::new(1_000);
        fn now() -> Timestamp {
            Timestamp::from_millisecond($name.load(Ordering::Relaxed)).expect("in range")
        }
    };
}

async fn open(config: Config) -> (Sessions, Keeper, Store) {
    let store = Store::open("sqlite::memory:").await.expect("memory");
    let (sessions, keeper) = Sessions::open(store.clone(), config).await.expect("empty");
    (sessions, keeper, store)
}

fn gpu(tokens: u64) -> PerTier<u64> {
    PerTier { gpu: tokens, ..PerTier::all(0) }
}

fn served(sessions: &Sessions, id: &str, worker: &str) -> Turn {
    let turn = sessions.resolve(id).expect("a good name");
    turn.bind(&worker.into(), &gpu(0));
    turn
}

/// A row on worker `w`, written by nobody.
fn row(seq: u64, action: Action, phase: Phase, kv: Disposition) -> Row {
    Row {
        seq,
        at: String::new(),
        worker: "w".to_owned(),
        rank: None,
        incarnation: None,
        session: None,
        action,
        level: None,
        phase,
        kv,
        tiers: Tiers(vec![(Tier::Gpu, kv)]),
        weight_version: None,
        warm_demoted: kv != Disposition::Preserved,
        serving: phase == Phase::Serving,
        evidence: Evidence::Observed,
        asked: serde_json::Value::Null,
        answered: serde_json::Value::Null,
        observed: serde_json::Value::Null,
        reason: "confirmed".to_owned(),
        standing: None,
    }
}

/// The worker was put to sleep, and not through a session.
fn slept(seq: u64) -> Row {
    row(seq, Action::Sleep, Phase::Sleeping, Disposition::Forgotten)
}

fn put_to_sleep(seq: u64, session: &str) -> Row {
    Row { session: Some(session.to_owned()), ..slept(seq) }
}

fn woken(seq: u64) -> Row {
    row(seq, Action::Wake, Phase::Serving, Disposition::Unknown)
}

#[tokio::test]
async fn names_that_resemble_each_other_are_sessions_of_their_own() {
    let (sessions, _keeper, _) = open(Config::default()).await;
    for (id, worker) in [("session-1", "a"), ("session-12", "b"), ("SESSION-1", "c"), ("x", "d")] {
        served(&sessions, id, worker);
    }
    let worker = |id: &str| sessions.get(id).and_then(|view| view.worker);
    assert_eq!(worker("session-1").as_deref(), Some("a"));
    assert_eq!(worker("session-12").as_deref(), Some("b"));
    assert_eq!(worker("SESSION-1").as_deref(), Some("c"));
    assert_eq!(worker("session"), None);
    assert_eq!(sessions.resolve("").expect_err("empty"), BadId::Empty);
}

#[tokio::test]
async fn only_the_session_that_was_put_to_rest_is_dormant_and_a_wake_lets_it_go_on() {
    let (sessions, _keeper, _) = open(Config::default()).await;
    served(&sessions, "on", "w");
    served(&sessions, "beside", "w");
    served(&sessions, "off", "other");
    sessions.apply(&put_to_sleep(3, "on"));
    let turn = sessions.resolve("on").expect("a good name");
    assert_eq!(turn.dormancy(), Some(Dormancy { action: Action::Sleep, witness: Some(3) }));
    turn.bind(&"other".into(), &gpu(7));
    assert_eq!(turn.worker().as_deref(), Some("w"), "a dormant session stays where it is");
    assert_eq!(sessions.get("off").expect("there").dormancy, None);

    let beside = sessions.resolve("beside").expect("a good name");
    assert_eq!(beside.dormancy(), None, "its worker's rest is not its own");
    assert_eq!(sessions.get("beside").expect("there").last_witness, Some(3));
    assert_eq!(sessions.active_on("w", ""), ["beside".into()]);
    beside.bind(&"other".into(), &gpu(0));
    assert_eq!(beside.worker().as_deref(), Some("other"), "it goes on elsewhere");

    let mut partly = row(4, Action::Wake, Phase::Waking, Disposition::Unknown);
    sessions.apply(&partly);
    assert!(turn.dormancy().is_some(), "a part is still asleep");
    partly = woken(5);
    sessions.apply(&partly);
    assert_eq!(turn.dormancy(), None);
    assert_eq!(sessions.get("on").expect("there").last_witness, Some(5));
}

/// A rollout that begins, a pause, a sleep by anyone: all act on the worker alone.
#[tokio::test]
async fn a_workers_rest_shuts_the_gates_of_its_sessions_and_refuses_none() {
    let (sessions, _keeper, _) = open(Config::default()).await;
    served(&sessions, "s", "w").bind(&"w".into(), &gpu(16));
    for (seq, action, phase) in [
        (1, Action::Pause, Phase::Paused),
        (2, Action::Sleep, Phase::Sleeping),
        (3, Action::Lost, Phase::Error),
    ] {
        sessions.apply(&row(seq, action, phase, Disposition::Unknown));
        let view = sessions.get("s").expect("there");
        assert_eq!((view.dormancy, view.is_warm), (None, false), "{action}");
        assert_eq!(view.last_witness, Some(seq));
    }
    // Another session's rest on the same worker is not its own.
    sessions.apply(&put_to_sleep(4, "t"));
    assert_eq!(sessions.get("s").expect("there").dormancy, None);
}

#[tokio::test]
async fn what_was_not_sent_puts_nobody_to_rest() {
    let (sessions, _keeper, _) = open(Config::default()).await;
    served(&sessions, "s", "w");
    let mut refused = slept(1);
    refused.evidence = Evidence::NotSent;
    refused.session = Some("s".to_owned());
    sessions.apply(&refused);
    let view = sessions.get("s").expect("there");
    assert_eq!((view.dormancy, view.last_witness), (None, Some(1)));

    sessions.apply(&put_to_sleep(2, "s"));
    let mut refused = woken(3);
    refused.evidence = Evidence::NotSent;
    sessions.apply(&refused);
    assert_eq!(sessions.get("s").expect("there").dormancy, None, "its worker serves");
}

#[tokio::test]
async fn only_a_claim_made_after_the_verdict_opens_the_gate() {
    let (sessions, _keeper, _) = open(Config::default()).await;
    let worker: Arc<str> = "w".into();
    let early = served(&sessions, "s", "w");
    assert!(!early.is_warm(Tier::Gpu));
    early.bind(&worker, &gpu(16));
    assert!(early.is_warm(Tier::Gpu));

    sessions.apply(&slept(1));
    sessions.apply(&woken(2));
    assert!(!early.is_warm(Tier::Gpu));
    early.bind(&worker, &gpu(16));
    assert!(!early.is_warm(Tier::Gpu), "the claim was made before the sleep");

    let late = sessions.resolve("s").expect("a good name");
    late.bind(&worker, &gpu(0));
    assert!(!late.is_warm(Tier::Gpu), "nothing is claimed");
    late.bind(&worker, &gpu(16));
    assert!(late.is_warm(Tier::Gpu));
    sessions.apply(&woken(2));
    assert!(late.is_warm(Tier::Gpu), "the row was taken in before");
    late.bind(&"other".into(), &gpu(0));
    assert!(!late.is_warm(Tier::Gpu), "nothing is proven on another worker");
}

#[tokio::test]
async fn a_preserving_pause_leaves_the_gate_open() {
    let (sessions, _keeper, _) = open(Config::default()).await;
    served(&sessions, "s", "w").bind(&"w".into(), &gpu(16));
    let mut intent = row(1, Action::Pause, Phase::Error, Disposition::Unknown);
    (intent.evidence, intent.warm_demoted) = (Evidence::None, false);
    intent.reason = "unrecorded".to_owned();
    sessions.apply(&intent);
    sessions.apply(&row(1, Action::Pause, Phase::Paused, Disposition::Preserved));
    sessions.apply(&row(2, Action::Resume, Phase::Serving, Disposition::Preserved));
    assert!(sessions.get("s").expect("there").is_warm);
    intent.seq = 3;
    intent.warm_demoted = true;
    sessions.apply(&intent);
    assert!(!sessions.get("s").expect("there").is_warm, "beliefs go cold with the intent");
}

#[tokio::test]
async fn a_row_through_a_session_that_has_moved_hides_none_of_its_new_worker() {
    let (sessions, _keeper, _) = open(Config::default()).await;
    served(&sessions, "s", "w");
    let mut elsewhere = slept(9);
    (elsewhere.worker, elsewhere.session) = ("old".to_owned(), Some("s".to_owned()));
    sessions.apply(&elsewhere);
    let view = sessions.get("s").expect("there");
    assert_eq!((view.dormancy, view.last_witness), (None, Some(9)));
    sessions.apply(&put_to_sleep(5, "s"));
    let view = sessions.get("s").expect("there");
    assert_eq!(view.dormancy, Some(Dormancy { action: Action::Sleep, witness: Some(5) }));
    assert_eq!(view.last_witness, Some(9));
}

/// The outcome of an action may be written after later rows of other workers.
#[tokio::test]
async fn a_later_row_of_the_worker_before_hides_none_of_the_next() {
    let (sessions, _keeper, _) = open(Config::default()).await;
    served(&sessions, "s", "w");
    sessions.apply(&slept(9));
    let turn = sessions.resolve("s").expect("a good name");
    turn.bind(&"other".into(), &gpu(16));
    assert!(turn.is_warm(Tier::Gpu));
    sessions.apply(&Row { worker: "other".to_owned(), ..slept(5) });
    assert!(!turn.is_warm(Tier::Gpu));
}

/// Nothing that was claimed for it before matches what it asks for now.
#[tokio::test]
async fn an_isolation_shuts_the_gate_and_is_stored_when_it_is_answered() {
    let (sessions, _keeper, store) = open(Config::default()).await;
    let turn = served(&sessions, "s", "w");
    turn.bind(&"w".into(), &gpu(16));
    assert!(turn.is_warm(Tier::Gpu));
    assert!(sessions.isolate("s").await.expect("stored"));
    assert!(!turn.is_warm(Tier::Gpu));
    turn.bind(&"w".into(), &gpu(16));
    assert!(!turn.is_warm(Tier::Gpu), "the claim was made before");

    let (again, _keeper) = Sessions::open(store, Config::default()).await.expect("stored");
    assert_eq!(again.resolve("s").expect("a good name").salt(), turn.salt());
}

#[tokio::test]
async fn the_longest_unseen_is_forgotten_and_a_dormant_one_last() {
    clock!(CLOCK);
    let config = Config { capacity: 4, clock: now, ..Config::default() };
    let (sessions, _keeper, _) = open(config).await;
    for id in ["a", "b", "c", "d"] {
        CLOCK.fetch_add(1, Ordering::Relaxed);
        served(&sessions, id, if id == "a" { "w" } else { "other" });
    }
    sessions.apply(&put_to_sleep(1, "a"));
    for id in ["e", "f"] {
        CLOCK.fetch_add(1, Ordering::Relaxed);
        served(&sessions, id, "other");
    }
    let ids: Vec<_> = sessions.list(10).into_iter().map(|view| view.id.to_string()).collect();
    assert_eq!(ids, ["f", "e", "d", "a"]);
    assert_eq!(sessions.list(2).len(), 2);
}

#[tokio::test]
async fn a_session_that_is_over_holds_no_worker() {
    clock!(CLOCK);
    let config = Config { idle: Duration::from_secs(10), clock: now, ..Config::default() };
    let (sessions, _keeper, _) = open(config).await;
    served(&sessions, "old", "w");
    CLOCK.fetch_add(10_001, Ordering::Relaxed);
    served(&sessions, "new", "w");
    served(&sessions, "me", "w");
    assert_eq!(sessions.active_on("w", "me"), ["new".into()]);
    assert_eq!(sessions.by_worker()["w"], Load { sessions: 2, active: 2, ..Load::default() });
    sessions.sweep();
    assert!(sessions.get("old").is_none());
    assert!(sessions.end("new"));
    assert!(!sessions.end("new"));
}

/// Its blocks of before are still in the engine: without its salt it would find them again.
#[tokio::test]
async fn an_isolated_session_keeps_its_salt_however_long_it_is_silent() {
    clock!(CLOCK);
    let idle = Duration::from_secs(10);
    let config = Config { capacity: 4, idle, clock: now, ..Config::default() };
    let (sessions, _keeper, _) = open(config).await;
    let turn = served(&sessions, "poisoned", "w");
    assert!(sessions.isolate("poisoned").await.expect("stored"));
    let salt = turn.salt().expect("isolated");
    CLOCK.fetch_add(10_001, Ordering::Relaxed);
    sessions.sweep();
    for id in ["a", "b", "c", "d", "e"] {
        served(&sessions, id, "w");
    }
    assert_eq!(sessions.resolve("poisoned").expect("a good name").salt(), Some(salt));
}

#[tokio::test]
async fn bindings_totals_and_rest_outlive_the_process() {
    let (sessions, keeper, store) = open(Config::default()).await;
    let mut tasks = TaskGroup::new();
    let stop = tasks.shutdown();
    tasks.spawn("sessions", OnExit::Report, keeper.run(stop));
    let turn = served(&sessions, "s", "w");
    turn.record(48, 32);
    turn.record(16, 16);
    served(&sessions, "gone", "w");
    assert!(sessions.isolate("s").await.expect("stored"));
    assert!(!sessions.isolate("nobody").await.expect("nothing to store"));
    let salt = turn.salt().expect("isolated");

    // The keeper reads the row from the ledger.
    let intent = NewIntent {
        worker: "w".to_owned(),
        rank: None,
        incarnation: None,
        session: Some("s".to_owned()),
        action: Action::Pause,
        level: None,
        weight_version: None,
        warm_demoted: false,
        asked: serde_json::Value::Null,
        standing: None,
        is_epoch: false,
    };
    let outcome = Outcome {
        phase: Phase::Paused,
        kv: Disposition::Preserved,
        tiers: Tiers(vec![(Tier::Gpu, Disposition::Preserved)]),
        weight_version: None,
        warm_demoted: false,
        serving: false,
        evidence: Evidence::Observed,
        answered: serde_json::Value::Null,
        observed: serde_json::Value::Null,
        reason: "confirmed".to_owned(),
        standing: None,
    };
    let seq = store.note(intent, outcome).await.expect("written").seq;
    while turn.dormancy().is_none() {
        tokio::task::yield_now().await;
    }
    assert!(sessions.end("gone"));
    assert_eq!(tasks.stop(Duration::from_secs(60)).await, 0);

    let (again, _keeper) = Sessions::open(store, Config::default()).await.expect("stored");
    let view = again.get("s").expect("stored");
    assert_eq!((view.claimed_tokens, view.cached_tokens), (64, 48));
    assert_eq!(view.dormancy, Some(Dormancy { action: Action::Pause, witness: Some(seq) }));
    assert_eq!((view.worker.as_deref(), view.is_warm), (Some("w"), false));
    assert_eq!(again.resolve("s").expect("a good name").salt(), Some(salt));
    assert!(again.get("gone").is_none());
}

#[test]
fn salts_differ() {
    let salts: std::collections::HashSet<_> = (0..100).map(|_| random_salt()).collect();
    assert_eq!(salts.len(), 100);
}
