//! What demotions and removals left behind, until somebody frees it.
//!
//! Invariant: retiring is O(1), and the backlog is bounded: past the bound the oldest pieces are
//! freed at once.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::identities::Identities;
use crate::rank::Rank;
use crate::slot::Slot;

/// Retired tables, oldest first.
#[derive(Default)]
pub(crate) struct Retired(Mutex<Backlog>);

#[derive(Default)]
struct Backlog {
    pieces: VecDeque<Piece>,
    entries: usize,
}

/// A retired table.
pub(crate) struct Piece {
    entries: usize,
    _memory: Memory,
}

/// Held for its drop alone.
#[expect(dead_code, reason = "nobody looks at what was retired")]
enum Memory {
    Slot(Slot),
    Identities(Box<Identities>),
    Rank(Box<Rank>),
}

impl Piece {
    pub(crate) fn slot(slot: Slot) -> Self {
        Self { entries: slot.blocks(), _memory: Memory::Slot(slot) }
    }

    pub(crate) fn identities(identities: Identities) -> Self {
        let entries = identities.len() + identities.parked();
        Self { entries, _memory: Memory::Identities(Box::new(identities)) }
    }

    pub(crate) fn rank(rank: Rank) -> Self {
        Self { entries: rank.weight(), _memory: Memory::Rank(Box::new(rank)) }
    }
}

impl Retired {
    pub(crate) fn add(&self, pieces: impl IntoIterator<Item = Piece>, entries_max: usize) {
        let mut backlog = self.lock();
        for piece in pieces.into_iter().filter(|piece| piece.entries > 0) {
            backlog.entries += piece.entries;
            backlog.pieces.push_back(piece);
        }
        let mut surplus = Vec::new();
        while backlog.entries > entries_max {
            surplus.extend(backlog.pop());
        }
        drop(backlog);
    }

    /// Frees whole pieces until at least `budget` entries are free or none are left; gives the
    /// number freed. All tables are flat, so that freeing one is one deallocation, whatever its
    /// size.
    pub(crate) fn sweep(&self, budget: usize) -> usize {
        let mut freed = 0;
        while freed < budget {
            // The lock is not held while memory is given back.
            let Some(piece) = self.lock().pop() else { break };
            freed += piece.entries;
        }
        freed
    }

    pub(crate) fn entries(&self) -> usize {
        self.lock().entries
    }

    fn lock(&self) -> MutexGuard<'_, Backlog> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Backlog {
    fn pop(&mut self) -> Option<Piece> {
        let piece = self.pieces.pop_front()?;
        self.entries -= piece.entries;
        Some(piece)
    }
}
