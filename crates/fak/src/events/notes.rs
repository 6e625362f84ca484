//! What ranks notice, on its way to whoever writes it down and shows it.
//!
//! Invariant: nothing is dropped, however long the reader is busy, and what waits is bounded: notes
//! of one kind of one rank are one note, and their counts add up.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fak_kernel::rank::Note;
use tokio::sync::Notify;

/// News of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum News {
    /// It noticed something.
    Note(Note),
    /// How far its beliefs can be relied on has changed.
    Trust,
}

/// News, and the data-parallel rank that it is of.
pub type RankNews = (u32, News);

/// Kinds that are passed on; the others are logged and counted where they come up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    NewLife,
    GapNotClosed,
    ClearUnexplained,
    Trust,
}

impl Kind {
    fn of(note: Note) -> Option<Self> {
        match note {
            Note::NewLife => Some(Self::NewLife),
            Note::GapNotClosed => Some(Self::GapNotClosed),
            Note::ClearUnexplained { .. } => Some(Self::ClearUnexplained),
            Note::Gap { .. }
            | Note::GapClosed
            | Note::ClearAmbiguous { .. }
            | Note::ClearPast { .. }
            | Note::LiveDead
            | Note::Tied
            | Note::Kept
            | Note::Settled => None,
        }
    }
}

#[derive(Debug, Default)]
struct Shared {
    waiting: Mutex<BTreeMap<(u32, Kind), News>>,
    is_there: Notify,
}

impl Shared {
    fn waiting(&self) -> MutexGuard<'_, BTreeMap<(u32, Kind), News>> {
        // Each change is one call, so a panic elsewhere leaves the map whole.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Where ranks put their notes; cheap to clone.
#[derive(Clone, Debug)]
pub struct Sender(Arc<Shared>);

/// Where they are read; one reader.
#[derive(Debug)]
pub struct Receiver(Arc<Shared>);

/// Both ends.
#[must_use]
pub fn channel() -> (Sender, Receiver) {
    let shared = Arc::new(Shared::default());
    (Sender(Arc::clone(&shared)), Receiver(shared))
}

impl Sender {
    /// Leaves a note; never waits.
    pub fn send(&self, rank: u32, note: Note) {
        let Some(kind) = Kind::of(note) else { return };
        let mut waiting = self.0.waiting();
        let merged = match (waiting.get(&(rank, kind)), note) {
            (
                Some(News::Note(Note::ClearUnexplained { clears: before })),
                Note::ClearUnexplained { clears },
            ) => Note::ClearUnexplained { clears: before.saturating_add(clears) },
            _ => note,
        };
        waiting.insert((rank, kind), News::Note(merged));
        drop(waiting);
        self.0.is_there.notify_one();
    }

    /// Tells that a rank's trust has changed, once its status shows it; never waits.
    pub fn trust_changed(&self, rank: u32) {
        self.0.waiting().insert((rank, Kind::Trust), News::Trust);
        self.0.is_there.notify_one();
    }
}

impl Receiver {
    /// The next news; waits for some. Nothing is lost when the future is dropped.
    pub async fn recv(&mut self) -> RankNews {
        loop {
            if let Some(((rank, _), news)) = self.0.waiting().pop_first() {
                return (rank, news);
            }
            self.0.is_there.notified().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn notes_that_nobody_reads_add_up_and_none_is_dropped() {
        let (sender, mut receiver) = channel();
        for _ in 0..10_000 {
            sender.send(0, Note::ClearUnexplained { clears: 2 });
            sender.send(0, Note::Settled);
            sender.send(1, Note::GapNotClosed);
            sender.trust_changed(1);
        }
        let note = News::Note;
        assert_eq!(receiver.recv().await, (0, note(Note::ClearUnexplained { clears: 20_000 })));
        assert_eq!(receiver.recv().await, (1, note(Note::GapNotClosed)));
        assert_eq!(receiver.recv().await, (1, News::Trust));
        assert_eq!(receiver.recv().now_or_never(), None);
        sender.send(1, Note::NewLife);
        assert_eq!(receiver.recv().await, (1, note(Note::NewLife)));
    }
}
