//! Scripted faults: what a test or an operator's rehearsal makes the engine do wrong.
//! Invariant: without a script the engine behaves as recorded; every fault is counted down or
//! taken back, none is random.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use tokio::sync::Notify;

/// What a route does instead of answering.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RouteFault {
    /// Never answers. The action is not carried out.
    Hang,
    /// Answers this status with the engine's error envelope. The action is not carried out.
    Fail(u16),
    /// Carries the action out and then answers this status.
    FailAfter(u16),
    /// Carries the action out and answers 200 without a body, as old engines do.
    EmptyBody,
    /// Answers 200 with `{"success":false}`, as a reset does while blocks are in use. The action
    /// is not carried out.
    Decline,
    /// Carries the action out as if it had been asked with this query, and answers as for that.
    As(&'static [(&'static str, &'static str)]),
    /// Answers 200 with `{"success":true}`, as for a connector that cannot reset. The action is not
    /// carried out.
    Pretend,
}

/// How a stream is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamCut {
    /// Whole events that still come.
    pub after_events: usize,
    /// Half of the next event comes too.
    pub mid_line: bool,
}

#[derive(Debug, Default)]
struct Script {
    routes: HashMap<String, (RouteFault, usize)>,
    stream_cut: Option<(StreamCut, usize)>,
    drop_batches: usize,
    lose_batches: usize,
    lost: Vec<SystemTime>,
    repeat_batches: usize,
    publisher_held: bool,
    events_off: bool,
    replay_without_end: bool,
    sleeping_lie: Option<bool>,
    partial_wakes: usize,
    steps: Option<u64>,
    unhealthy: bool,
}

/// The script of one simulator; cheap calls, any thread, kept over a restart.
#[derive(Debug, Default)]
pub struct Faults {
    script: Mutex<Script>,
    changed: Notify,
}

/// What happens to a batch at the publisher.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BatchFate {
    Send,
    SendTwice,
    /// Not sent, but replayed.
    Drop,
    /// Neither sent nor replayed; its sequence number is used up.
    Lose,
    /// Not even numbered: events are off.
    Ignore,
}

impl Faults {
    fn script(&self) -> MutexGuard<'_, Script> {
        self.script.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, edit: impl FnOnce(&mut Script)) {
        edit(&mut self.script());
        self.changed.notify_waiters();
    }

    /// When each batch was lost that was neither sent nor can be replayed.
    pub fn lost(&self) -> Vec<SystemTime> {
        self.script().lost.clone()
    }

    /// Makes the next `times` requests of a path, such as `/sleep`, go wrong.
    pub fn route(&self, path: &str, fault: RouteFault, times: usize) {
        self.change(|s| {
            s.routes.insert(path.to_owned(), (fault, times));
        });
    }

    /// Cuts the next `times` streams.
    pub fn cut_streams(&self, cut: StreamCut, times: usize) {
        self.change(|s| s.stream_cut = Some((cut, times)));
    }

    /// The next batches are not sent; replay still has them.
    pub fn drop_batches(&self, count: usize) {
        self.change(|s| s.drop_batches = count);
    }

    /// The next batches are neither sent nor replayed: a hole.
    pub fn lose_batches(&self, count: usize) {
        self.change(|s| s.lose_batches = count);
    }

    /// The next batches are sent twice, with the same number.
    pub fn repeat_batches(&self, count: usize) {
        self.change(|s| s.repeat_batches = count);
    }

    /// Batches queue up and go out only when this is taken back: a slow publisher.
    pub fn hold_publisher(&self, held: bool) {
        self.change(|s| s.publisher_held = held);
    }

    /// Events are neither numbered nor published.
    pub fn events_off(&self, off: bool) {
        self.change(|s| s.events_off = off);
    }

    /// Replays lack the end marker.
    pub fn replay_without_end(&self, without: bool) {
        self.change(|s| s.replay_without_end = without);
    }

    /// What `/is_sleeping` claims, whatever is true; none: the truth.
    pub fn lie_about_sleeping(&self, claim: Option<bool>) {
        self.change(|s| s.sleeping_lie = claim);
    }

    /// The next full wakes wake the weights only.
    pub fn partial_wakes(&self, count: usize) {
        self.change(|s| s.partial_wakes = count);
    }

    /// Lets engines take this many steps and then stall them; none: no limit. With 0 a test
    /// holds requests in a known state.
    pub fn limit_steps(&self, steps: Option<u64>) {
        self.change(|s| s.steps = steps);
    }

    /// `/health` answers 503.
    pub fn unhealthy(&self, unhealthy: bool) {
        self.change(|s| s.unhealthy = unhealthy);
    }

    /// Takes every fault back.
    pub fn clear(&self) {
        self.change(|s| *s = Script::default());
    }

    pub(crate) fn take_route(&self, path: &str) -> Option<RouteFault> {
        let mut script = self.script();
        let (fault, left) = script.routes.get_mut(path).filter(|(_, left)| *left > 0)?;
        *left -= 1;
        Some(fault.clone())
    }

    pub(crate) fn take_stream_cut(&self) -> Option<StreamCut> {
        let mut script = self.script();
        let (cut, left) = script.stream_cut.as_mut().filter(|(_, left)| *left > 0)?;
        *left -= 1;
        Some(*cut)
    }

    pub(crate) fn take_partial_wake(&self) -> bool {
        take(&mut self.script().partial_wakes)
    }

    pub(crate) fn batch_fate(&self) -> BatchFate {
        let script = &mut *self.script();
        if script.events_off {
            BatchFate::Ignore
        } else if take(&mut script.lose_batches) {
            script.lost.push(SystemTime::now());
            BatchFate::Lose
        } else if take(&mut script.drop_batches) {
            BatchFate::Drop
        } else if take(&mut script.repeat_batches) {
            BatchFate::SendTwice
        } else {
            BatchFate::Send
        }
    }

    pub(crate) fn sleeping_lie(&self) -> Option<bool> {
        self.script().sleeping_lie
    }

    pub(crate) fn is_replay_endless(&self) -> bool {
        self.script().replay_without_end
    }

    pub(crate) fn is_unhealthy(&self) -> bool {
        self.script().unhealthy
    }

    async fn until(&self, mut ready: impl FnMut(&mut Script) -> bool) {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if ready(&mut self.script()) {
                return;
            }
            changed.await;
        }
    }

    pub(crate) async fn publisher_held(&self) {
        self.until(|s| s.publisher_held).await;
    }

    pub(crate) async fn publisher_released(&self) {
        self.until(|s| !s.publisher_held).await;
    }

    /// Waits for leave to take one step.
    pub(crate) async fn step_granted(&self) {
        self.until(|s| match &mut s.steps {
            None => true,
            Some(0) => false,
            Some(steps) => {
                *steps -= 1;
                true
            }
        })
        .await;
    }
}

fn take(count: &mut usize) -> bool {
    let some = *count > 0;
    *count = count.saturating_sub(1);
    some
}
