//! Where a worker's requests enter and leave.
//!
//! Invariant: nobody enters a shut door, and every request that entered is counted until the value
//! that it got, [`Inside`], is dropped: at the end of its body, or when its client has left. So the
//! count cannot leak.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

/// Set while the door is shut.
const SHUT: u64 = 1 << 63;
/// These bits count who is inside.
const INSIDE: u64 = (1 << 24) - 1;
/// One of those who ever entered; they are counted between the two, and again from 0 after 500
/// thousand million.
const ENTRY: u64 = INSIDE + 1;

#[derive(Debug, Default)]
struct Shared {
    /// One word, so that entering and shutting cannot cross.
    inside: AtomicU64,
    left: Notify,
    left_at: Mutex<Option<Instant>>,
    /// How often an engine was told to abort what was inside.
    aborts: AtomicU64,
}

impl Shared {
    fn has_left_within(&self, time: Duration) -> bool {
        let left_at = *self.left_at.lock().unwrap_or_else(PoisonError::into_inner);
        left_at.is_some_and(|left_at| left_at.elapsed() < time)
    }
}

/// A worker's door; clones are the same door.
#[derive(Clone, Debug, Default)]
pub struct Door {
    shared: Arc<Shared>,
}

/// A request inside; dropping it leaves.
#[derive(Debug)]
pub struct Inside {
    shared: Arc<Shared>,
    /// What the word was when it had entered.
    entered: u64,
    /// And the count of aborts.
    aborts: u64,
}

impl Inside {
    /// Whether nobody else was inside when it entered, nobody entered since, and nobody left for so
    /// long.
    #[must_use]
    pub fn is_alone(&self, quiet_for: Duration) -> bool {
        let now = self.shared.inside.load(Ordering::Acquire);
        let is_alone = self.entered & INSIDE == 1 && now & !SHUT == self.entered & !SHUT;
        is_alone && !self.shared.has_left_within(quiet_for)
    }
}

impl Inside {
    /// Whether the engine was told to abort it.
    #[must_use]
    pub fn was_aborted(&self) -> bool {
        self.shared.aborts.load(Ordering::Acquire) != self.aborts
    }
}

impl Door {
    /// An open door.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Enters, unless the door is shut.
    #[must_use]
    pub fn enter(&self) -> Option<Inside> {
        let inside = &self.shared.inside;
        let entered = inside.fetch_update(Ordering::AcqRel, Ordering::Acquire, after_entry);
        let entered = after_entry(entered.ok()?)?;
        let aborts = self.shared.aborts.load(Ordering::Acquire);
        Some(Inside { shared: Arc::clone(&self.shared), entered, aborts })
    }

    /// The engine is told to abort who is inside.
    pub fn abort(&self) {
        self.shared.aborts.fetch_add(1, Ordering::AcqRel);
    }

    /// Shuts the door. Who is inside stays.
    pub fn shut(&self) {
        self.shared.inside.fetch_or(SHUT, Ordering::AcqRel);
    }

    /// Opens the door.
    pub fn open(&self) {
        self.shared.inside.fetch_and(!SHUT, Ordering::AcqRel);
    }

    /// Whether the door is shut.
    #[must_use]
    pub fn is_shut(&self) -> bool {
        self.shared.inside.load(Ordering::Acquire) & SHUT != 0
    }

    /// Whether nobody is inside, and nobody left for so long.
    #[must_use]
    pub fn is_quiet(&self, quiet_for: Duration) -> bool {
        self.in_flight() == 0 && !self.shared.has_left_within(quiet_for)
    }

    /// How many are inside.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        usize::try_from(self.shared.inside.load(Ordering::Acquire) & INSIDE)
            .expect("24 bits fit into a usize")
    }

    /// Waits until nobody is inside. Shut the door first, or it may never be.
    pub async fn empty(&self) {
        loop {
            let left = self.shared.left.notified();
            if self.in_flight() == 0 {
                return;
            }
            left.await;
        }
    }
}

/// The word after one more has entered; none where it cannot.
fn after_entry(now: u64) -> Option<u64> {
    let is_full = now & INSIDE == INSIDE;
    (now & SHUT == 0 && !is_full).then(|| (now + 1 + ENTRY) & !SHUT)
}

impl Drop for Inside {
    fn drop(&mut self) {
        // Before the count: whoever sees nobody inside sees when the last one left.
        let now = Some(Instant::now());
        *self.shared.left_at.lock().unwrap_or_else(PoisonError::into_inner) = now;
        if self.shared.inside.fetch_sub(1, Ordering::AcqRel) & INSIDE == 1 {
            self.shared.left.notify_waiters();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_shut_door_lets_nobody_in_and_empties() {
        let door = Door::new();
        let first = door.enter().expect("open");
        let second = door.enter().expect("open");
        door.shut();
        assert!(door.enter().is_none());
        assert_eq!(door.in_flight(), 2);
        let empty = tokio::spawn({
            let door = door.clone();
            async move { door.empty().await }
        });
        drop((first, second));
        empty.await.expect("it empties");
        assert_eq!(door.in_flight(), 0);
        assert!(door.is_shut());
        door.open();
        assert!(door.enter().is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn who_is_alone_was_so_all_the_time_and_for_a_while_before() {
        let (door, second) = (Door::new(), Duration::from_secs(1));
        let first = door.enter().expect("open");
        assert!(first.is_alone(second));
        let other = door.enter().expect("open");
        assert!(!first.is_alone(second) && !other.is_alone(second));
        assert!(!door.is_quiet(second));
        drop(other);
        tokio::time::advance(second).await;
        assert!(!first.is_alone(second), "somebody was there");
        drop(first);
        let third = door.enter().expect("open");
        assert!(!third.is_alone(second), "somebody has just left");
        tokio::time::advance(second).await;
        assert!(third.is_alone(second));
        door.shut();
        assert!(third.is_alone(second), "a shut door lets nobody in");
        drop(third);
        assert!(!door.is_quiet(second));
        tokio::time::advance(second).await;
        assert!(door.is_quiet(second));
    }
}
