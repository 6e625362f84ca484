//! One unclear look takes no worker out.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use fak_kernel::Phase;
use fak_kernel::witness::{Level, Mode, Move, Parts, Weights};

use super::rig::Rig;
use super::scripted::{Scripted, flags, idle, sleep_metric};
use crate::engine::peer::Request;

/// What is told of one flag, question by question; an awake engine's answer once that is through.
type Script = Arc<Mutex<VecDeque<bool>>>;

/// An engine that is awake until the test says otherwise; where `metric` is set, its metric goes on
/// to say `awake`.
struct Engine {
    scripted: Scripted,
    paused: Script,
    sleeping: Script,
}

impl Engine {
    async fn awake(metric: bool) -> Self {
        let (paused, sleeping) = (Script::default(), Script::default());
        let told = (Arc::clone(&paused), Arc::clone(&sleeping));
        let next = |script: &Script| script.lock().unwrap().pop_front().unwrap_or(false);
        let looks = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&looks);
        let scripted = Scripted::start(move |request: &Request| match request.line() {
            "GET /health" => {
                counted.fetch_add(1, Ordering::Relaxed);
                idle(request)
            }
            "GET /metrics" if metric => sleep_metric("awake"),
            "GET /is_paused" => flags("is_paused", next(&told.0)),
            "GET /is_sleeping" => flags("is_sleeping", next(&told.1)),
            _ => idle(request),
        });
        let scripted = scripted.await;
        // The owner's own first look, before or after the one that was asked for.
        while looks.load(Ordering::Relaxed) < 2 {
            tokio::task::yield_now().await;
        }
        scripted.look().await;
        assert!(scripted.state().is_serving());
        Self { scripted, paused, sleeping }
    }

    /// The next answers.
    fn tells(&self, looks: &[(bool, bool)]) {
        self.paused.lock().unwrap().extend(looks.iter().map(|look| look.0));
        self.sleeping.lock().unwrap().extend(looks.iter().map(|look| look.1));
    }
}

const AWAKE: (bool, bool) = (false, false);
const ASLEEP_UNPAUSED: (bool, bool) = (false, true);
const BOTH: (bool, bool) = (true, true);

#[tokio::test]
async fn a_flag_that_was_wrong_once_changes_nothing() {
    let engine = Engine::awake(true).await;
    let scripted = &engine.scripted;
    engine.tells(&[ASLEEP_UNPAUSED]);
    let rows = scripted.rows().await.len();
    scripted.look().await;
    assert!(scripted.state().is_serving() && scripted.state().standing.weights_proven);
    assert_eq!(scripted.rows().await.len(), rows);
}

#[tokio::test]
async fn a_worker_that_could_not_be_read_for_a_while_serves_again_once_it_can() {
    // Somebody pauses and resumes it, and no metric tells that from a sleep.
    let engine = Engine::awake(false).await;
    let scripted = &engine.scripted;
    engine.tells(&[BOTH; 4]);
    let rows = scripted.rows().await.len();
    for _ in 0..2 {
        scripted.look().await;
        assert!(!scripted.state().is_serving(), "it may stand still");
        assert_eq!(scripted.rows().await.len(), rows, "no verdict yet");
    }
    scripted.look().await;
    assert!(scripted.state().is_serving(), "it serves by all that can be read");
    let after = scripted.rows().await;
    let row = after.last().unwrap();
    assert_eq!((after.len(), row.serving, row.kv.as_str()), (rows + 1, true, "unknown"));
}

#[tokio::test]
async fn a_state_that_cannot_be_named_for_long_is_the_verdict_and_one_row() {
    let engine = Engine::awake(false).await;
    let scripted = &engine.scripted;
    engine.tells(&[BOTH; 60]);
    let rows = scripted.rows().await.len();
    for _ in 0..30 {
        scripted.look().await;
        assert!(!scripted.state().is_serving());
    }
    assert_eq!(scripted.state().phase(), Phase::Error);
    assert_eq!(scripted.rows().await.len(), rows + 1);
}

#[tokio::test]
async fn flags_that_flicker_write_no_row_a_look() {
    let engine = Engine::awake(true).await;
    let scripted = &engine.scripted;
    engine.tells(&[BOTH, AWAKE].repeat(30));
    let rows = scripted.rows().await.len();
    for _ in 0..30 {
        scripted.look().await;
        assert!(scripted.state().is_serving());
    }
    assert_eq!(scripted.rows().await.len(), rows);
}

#[tokio::test]
async fn after_a_new_fak_somebody_elses_sleep_and_wake_leave_a_worker_that_serves() {
    let mut rig = Rig::start().await;
    let sleep = Move::Sleep { level: Some(Level::One), mode: Mode::Abort, keep_tier: false };
    rig.act(sleep).await;
    rig.act(Move::Wake { tags: Parts::NONE, weights: Weights::Same }).await;
    rig.fak_ends().await;
    let second = rig.second_fak().await;
    rig.post("/sleep?level=1").await;
    second.lifecycle.look("w").await.unwrap();
    assert_eq!(second.state().phase(), Phase::Sleeping);
    rig.post("/wake_up").await;
    second.lifecycle.look("w").await.unwrap();
    assert!(second.state().is_serving(), "{:?}", second.state().standing);
}
