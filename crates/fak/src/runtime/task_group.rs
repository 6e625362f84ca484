//! A set of named tasks with one owner and one stop signal.
//!
//! Invariant: a critical task that ends, by return or by panic, is logged and stops the group,
//! whether or not anybody is watching.

use std::future::Future;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::Shutdown;

/// What the end of a task means to its group.
///
/// There is no restart: a future runs once, so a loop that can go on after a failure does so by
/// itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnExit {
    /// The process cannot do its work without this task: its end stops the group.
    StopProcess,
    /// The others go on without it; its end is told in the log.
    Report,
    /// It is one of many that come and go, such as a connection: only a panic is told.
    Expected,
}

/// Tasks that live and die together. Dropping the group aborts what still runs.
#[derive(Debug)]
pub struct TaskGroup {
    tasks: JoinSet<()>,
    stop: CancellationToken,
}

impl Default for TaskGroup {
    fn default() -> Self {
        Self::new()
    }
}

impl TaskGroup {
    /// An empty group.
    #[must_use]
    pub fn new() -> Self {
        Self { tasks: JoinSet::new(), stop: CancellationToken::new() }
    }

    /// The group's stop signal, for a loop to hold.
    #[must_use]
    pub fn shutdown(&self) -> Shutdown {
        Shutdown::new(self.stop.clone())
    }

    /// Starts `task` under `name`. Needs a tokio runtime.
    pub fn spawn<F>(&mut self, name: &'static str, on_exit: OnExit, task: F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let exit = Exit { name, on_exit, stop: self.stop.clone() };
        self.tasks.spawn(async move {
            let _exit = exit;
            task.await;
        });
    }

    /// Forgets the tasks that have ended, and counts those that run. A group whose tasks come and
    /// go has to, or it grows.
    pub fn reap(&mut self) -> usize {
        while self.tasks.try_join_next().is_some() {}
        self.tasks.len()
    }

    /// Asks every task to stop, waits `grace` for them, then aborts the rest. Returns how many had
    /// to be aborted.
    pub async fn stop(mut self, grace: Duration) -> usize {
        self.stop.cancel();
        let drained = async { while self.tasks.join_next().await.is_some() {} };
        match tokio::time::timeout(grace, drained).await {
            Ok(()) => 0,
            Err(_) => self.tasks.len(),
        }
    }
}

impl Drop for TaskGroup {
    fn drop(&mut self) {
        // Before the abort, so that an exit knows that it was asked for.
        self.stop.cancel();
    }
}

/// Rides in the task and speaks when the task ends, a panic included.
#[derive(Debug)]
struct Exit {
    name: &'static str,
    on_exit: OnExit,
    stop: CancellationToken,
}

impl Drop for Exit {
    fn drop(&mut self) {
        let panicked = std::thread::panicking();
        if self.stop.is_cancelled() && !panicked {
            tracing::debug!(task = self.name, "task stopped");
            return;
        }
        match self.on_exit {
            OnExit::StopProcess => {
                tracing::error!(task = self.name, panicked, "critical task ended");
                self.stop.cancel();
            }
            OnExit::Expected if !panicked => {}
            OnExit::Report | OnExit::Expected => {
                tracing::warn!(task = self.name, panicked, "task ended")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[tokio::test]
    async fn a_critical_task_that_ends_stops_the_group() {
        let mut group = TaskGroup::new();
        let stop = group.shutdown();
        group.spawn("critical", OnExit::StopProcess, async {});
        stop.requested().await;
        assert!(stop.is_requested());
    }

    #[tokio::test]
    async fn a_critical_task_that_panics_stops_the_group() {
        let mut group = TaskGroup::new();
        let stop = group.shutdown();
        group.spawn("critical", OnExit::StopProcess, async { panic!("on purpose") });
        stop.requested().await;
    }

    #[tokio::test]
    async fn a_reported_task_ends_alone() {
        let mut group = TaskGroup::new();
        let stop = group.shutdown();
        let (done, was_done) = tokio::sync::oneshot::channel::<()>();
        group.spawn("reported", OnExit::Report, async move { drop(done) });
        assert!(was_done.await.is_err());
        assert!(!stop.is_requested());
    }

    #[tokio::test]
    async fn dropping_the_group_ends_its_tasks() {
        let held = Arc::new(());
        let mut group = TaskGroup::new();
        let (started, has_started) = tokio::sync::oneshot::channel();
        let (ended, has_ended) = tokio::sync::oneshot::channel::<()>();
        let inner = Arc::clone(&held);
        group.spawn("forever", OnExit::StopProcess, async move {
            let _kept = (inner, ended);
            started.send(()).expect("the test waits for it");
            std::future::pending::<()>().await;
        });
        has_started.await.expect("the task starts");
        drop(group);
        assert!(has_ended.await.is_err());
        assert_eq!(Arc::strong_count(&held), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn stop_waits_for_the_willing_and_aborts_the_rest() {
        let mut group = TaskGroup::new();
        let stop = group.shutdown();
        group.spawn("willing", OnExit::StopProcess, async move { stop.requested().await });
        group.spawn("deaf", OnExit::StopProcess, std::future::pending());
        assert_eq!(group.stop(Duration::from_secs(1)).await, 1);
    }
}
