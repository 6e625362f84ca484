//! What was made of the events that came in: the latest ones, and how many there ever were.
//!
//! Invariant: the ring forgets, oldest first, and says how much it forgot; the counters never do.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fak_kernel::Tier;

/// What happened to blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// They became present.
    Stored,
    /// They left.
    Removed,
    /// Everything was cleared.
    Cleared,
}

impl Kind {
    /// The word.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Stored => "stored",
            Self::Removed => "removed",
            Self::Cleared => "cleared",
        }
    }
}

/// How an event reached us, or what explains it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Cause {
    /// It came over the subscription.
    Live,
    /// It came with a replay.
    Replay,
    /// A clear that an action of fak's own explains.
    OwnAction,
    /// A clear that nothing explains: somebody else's reset.
    Unexplained,
}

impl Cause {
    /// The word.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Live => "live",
            Self::Replay => "replay",
            Self::OwnAction => "own_action",
            Self::Unexplained => "unexplained",
        }
    }
}

/// A rank of a worker.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rank {
    /// The worker's id.
    pub worker: Arc<str>,
    /// Data-parallel rank.
    pub rank: u32,
}

impl std::fmt::Display for Rank {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.worker, self.rank)
    }
}

/// One event of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// What happened.
    pub kind: Kind,
    /// Where; `None` for a clear, which names no tier.
    pub tier: Option<Tier>,
    /// How it reached us, or what explains it.
    pub cause: Cause,
    /// Blocks it speaks of; 0 for a clear, which says no number.
    pub blocks: u64,
}

/// An event as it was recorded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Counts the recorder's entries, from 1.
    pub number: u64,
    /// Whose event.
    pub rank: Rank,
    /// The batch it came in.
    pub seq: u64,
    /// The event.
    pub event: Event,
}

/// A part of the ring.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// Oldest first.
    pub entries: Vec<Entry>,
    /// Entries that were asked for and are forgotten: they came before the first one here.
    pub forgotten: u64,
}

/// How many there ever were.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Batches taken in, live and replayed.
    pub batches: u64,
    /// Store events.
    pub stored: u64,
    /// Removal events.
    pub removed: u64,
    /// Clear events.
    pub cleared: u64,
    /// Blocks of the store events.
    pub stored_blocks: u64,
    /// Blocks of the removal events.
    pub removed_blocks: u64,
    /// Gaps in the sequence, closed later or not.
    pub gaps: u64,
    /// Batches missing in those gaps.
    pub lost_batches: u64,
    /// Messages and batches that could not be read.
    pub bad: u64,
}

impl Counts {
    fn add(&mut self, event: &Event) {
        match event.kind {
            Kind::Stored => {
                self.stored += 1;
                self.stored_blocks += event.blocks;
            }
            Kind::Removed => {
                self.removed += 1;
                self.removed_blocks += event.blocks;
            }
            Kind::Cleared => self.cleared += 1,
        }
    }
}

impl std::ops::AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        self.batches += other.batches;
        self.stored += other.stored;
        self.removed += other.removed;
        self.cleared += other.cleared;
        self.stored_blocks += other.stored_blocks;
        self.removed_blocks += other.removed_blocks;
        self.gaps += other.gaps;
        self.lost_batches += other.lost_batches;
        self.bad += other.bad;
    }
}

#[derive(Debug, Default)]
struct Ring {
    entries: VecDeque<Entry>,
    /// Entries ever recorded; the last one's number.
    recorded: u64,
    /// One entry a rank that was ever heard: as many as the configuration has.
    counts: BTreeMap<Rank, Counts>,
}

/// Records what the ranks' owners made of their events; shared by reference.
#[derive(Debug)]
pub struct Recorder {
    capacity: usize,
    ring: Mutex<Ring>,
}

impl Recorder {
    /// A recorder that remembers the latest `capacity` events; with 0 it only counts.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        Self { capacity, ring: Mutex::default() }
    }

    /// Records a batch: itself, and what each of its events turned out to be.
    pub fn batch(&self, rank: &Rank, seq: u64, events: impl IntoIterator<Item = Event>) {
        let ring = &mut *self.lock();
        let counts = ring.counts.entry(rank.clone()).or_default();
        counts.batches += 1;
        for event in events {
            counts.add(&event);
            ring.recorded += 1;
            if self.capacity == 0 {
                continue;
            }
            if ring.entries.len() == self.capacity {
                ring.entries.pop_front();
            }
            let entry = Entry { number: ring.recorded, rank: rank.clone(), seq, event };
            ring.entries.push_back(entry);
        }
    }

    /// Counts a gap of `lost` batches.
    pub fn gap(&self, rank: &Rank, lost: u64) {
        let mut ring = self.lock();
        let counts = ring.counts.entry(rank.clone()).or_default();
        counts.gaps += 1;
        // A publisher chooses its numbers freely, so the sum may be absurd but must not overflow.
        counts.lost_batches = counts.lost_batches.saturating_add(lost);
    }

    /// Counts a message or batch that could not be read.
    pub fn bad(&self, rank: &Rank) {
        self.lock().counts.entry(rank.clone()).or_default().bad += 1;
    }

    /// At most `limit` entries with numbers above `after`, the oldest first. The last one's number
    /// is the next call's `after`.
    #[must_use]
    pub fn snapshot(&self, after: u64, limit: usize) -> Snapshot {
        let ring = self.lock();
        let forgotten_to = ring.recorded - ring.entries.len() as u64;
        let skip = usize::try_from(after.saturating_sub(forgotten_to)).unwrap_or(usize::MAX);
        Snapshot {
            entries: ring.entries.iter().skip(skip).take(limit).cloned().collect(),
            forgotten: forgotten_to.saturating_sub(after),
        }
    }

    /// The counts of every rank that was ever heard.
    #[must_use]
    pub fn counts(&self) -> BTreeMap<Rank, Counts> {
        self.lock().counts.clone()
    }

    /// The counts of all ranks together.
    #[must_use]
    pub fn total(&self) -> Counts {
        let mut total = Counts::default();
        for counts in self.lock().counts.values() {
            total += *counts;
        }
        total
    }

    fn lock(&self) -> MutexGuard<'_, Ring> {
        // Numbers and copies only: a panic elsewhere leaves nothing half done in here.
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rank(worker: &str, rank: u32) -> Rank {
        Rank { worker: worker.into(), rank }
    }

    fn stored(blocks: u64) -> Event {
        Event { kind: Kind::Stored, tier: Some(Tier::Gpu), cause: Cause::Live, blocks }
    }

    const REMOVED: Event =
        Event { kind: Kind::Removed, tier: Some(Tier::Cpu), cause: Cause::Replay, blocks: 2 };
    const CLEARED: Event =
        Event { kind: Kind::Cleared, tier: None, cause: Cause::Unexplained, blocks: 0 };

    fn numbers(snapshot: &Snapshot) -> Vec<u64> {
        snapshot.entries.iter().map(|entry| entry.number).collect()
    }

    #[test]
    fn the_ring_forgets_and_says_so_and_the_counters_do_not() {
        let recorder = Recorder::new(3);
        let (a, b) = (rank("a", 0), rank("b", 1));
        recorder.batch(&a, 0, [stored(7), REMOVED]);
        recorder.batch(&b, 5, [CLEARED, stored(1), stored(1)]);
        recorder.batch(&b, 6, []);
        recorder.gap(&b, 4);
        recorder.bad(&b);

        let all = recorder.snapshot(0, 100);
        assert_eq!((numbers(&all), all.forgotten), (vec![3, 4, 5], 2));
        assert_eq!(all.entries[0], Entry { number: 3, rank: b.clone(), seq: 5, event: CLEARED });

        let counts = recorder.counts();
        let of_a = Counts {
            batches: 1,
            stored: 1,
            removed: 1,
            stored_blocks: 7,
            removed_blocks: 2,
            ..Counts::default()
        };
        assert_eq!(counts[&a], of_a);
        let of_b = Counts {
            batches: 2,
            stored: 2,
            cleared: 1,
            stored_blocks: 2,
            gaps: 1,
            lost_batches: 4,
            bad: 1,
            ..Counts::default()
        };
        assert_eq!(counts[&b], of_b);
        let mut sum = of_a;
        sum += of_b;
        assert_eq!(recorder.total(), sum);
        assert_eq!((sum.batches, sum.stored, sum.removed, sum.cleared, sum.gaps), (3, 3, 1, 1, 1));
    }

    #[test]
    fn a_reader_that_goes_on_from_its_last_entry_sees_each_once() {
        let recorder = Recorder::new(10);
        let a = rank("a", 0);
        let (mut after, mut seen) = (0, Vec::new());
        for seq in 0..8 {
            recorder.batch(&a, seq, [stored(1), stored(1), stored(1)]);
            loop {
                let part = recorder.snapshot(after, 2);
                assert_eq!(part.forgotten, 0);
                let Some(last) = part.entries.last() else { break };
                after = last.number;
                seen.extend(numbers(&part));
            }
        }
        assert_eq!(seen, (1..=24).collect::<Vec<_>>());
        assert_eq!(recorder.snapshot(u64::MAX, 5), Snapshot::default());
    }

    #[test]
    fn without_room_it_only_counts() {
        let recorder = Recorder::new(0);
        recorder.batch(&rank("a", 0), 0, [stored(1)]);
        assert_eq!(recorder.snapshot(0, 5), Snapshot { entries: Vec::new(), forgotten: 1 });
        assert_eq!(recorder.total().stored, 1);
    }
}
