//! Which hashes a rank holds on one tier.
//!
//! Invariant: demoting takes a fresh table and hands back the old one whole; no block is touched.

use fak_kernel::Belief;

use crate::key::{DigestMap, HashKey};

/// Copies of a block, by cache group and hash.
type Table = DigestMap<(u32, HashKey), Copies>;

/// One tier of one rank.
pub(crate) struct Slot {
    table: Table,
    /// Entries whose hash names nothing known yet.
    pending: usize,
    /// What is true of a block that is not in the table.
    pub(crate) floor: Belief,
    /// Its blocks count for nothing for now. Events go on into the table.
    pub(crate) is_aside: bool,
    /// Stores were kept out, so that the engine may hold blocks which are not in the table.
    pub(crate) is_fenced: bool,
    /// Tokens in a chunk, as stores told it.
    pub(crate) chunks: Chunks,
}

/// What sizes of chunks were told.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Chunks {
    /// None yet.
    None,
    /// So many tokens each.
    Of(u32),
    /// Several.
    Mixed,
}

/// What was announced of one block in one group on one tier, and not taken back.
#[derive(Clone, Copy)]
struct Copies {
    /// Copies that are there for sure; at least 1.
    count: u32,
    /// The engine used the block, but the store of that copy may be still to come: it is then no
    /// further copy.
    is_owed_store: bool,
    is_pending: bool,
    unit: Unit,
    /// The rank's change that put it down, when it was not there.
    born: u64,
}

/// Which piece of cache an announcement speaks of. A chunk has the hash of its last block.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unit {
    /// The block by itself.
    Block,
    /// A chunk of the size that the connector is configured to.
    Configured,
    /// A chunk of so many tokens, as announced.
    Tokens(u32),
    /// Nobody knows.
    Unknown,
}

/// A block to be put down.
pub(crate) struct Placement {
    pub(crate) group: u32,
    pub(crate) hash: HashKey,
    pub(crate) is_pending: bool,
    pub(crate) unit: Unit,
    /// The rank's change that puts it down.
    pub(crate) born: u64,
    pub(crate) proof: Proof,
}

/// What shows that a block is there.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Proof {
    /// A store of a copy that was not there before.
    Copy,
    /// A store that may only repeat that the block is there.
    Repeat,
    /// The engine used it.
    Use,
}

/// What putting a block down did.
pub(crate) enum Placed {
    /// It is there now and was not before.
    New,
    /// There is one more copy of it.
    Copy,
    /// It was there already, and nothing shows a further copy.
    Repeat,
    /// There is no room.
    Refused,
}

/// A block that is there.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Presence {
    /// As part of something of a size that is not known: maybe of no use.
    Loose,
    /// As the block, or the last block of the chunk, that it has to be.
    Whole,
}

/// What taking a copy away did.
pub(crate) enum Taken {
    /// That was the last one.
    Last,
    /// Others are left.
    Copy,
    /// There was none.
    Unknown,
}

impl Default for Slot {
    fn default() -> Self {
        Self {
            table: Table::default(),
            pending: 0,
            floor: Belief::Gone,
            is_aside: false,
            is_fenced: false,
            chunks: Chunks::None,
        }
    }
}

impl Slot {
    pub(crate) fn put(&mut self, at: &Placement, blocks_max: usize, pending_max: usize) -> Placed {
        if let Unit::Tokens(tokens) = at.unit {
            self.chunks = match self.chunks {
                Chunks::None => Chunks::Of(tokens),
                Chunks::Of(others) if others == tokens => Chunks::Of(tokens),
                Chunks::Of(_) | Chunks::Mixed => Chunks::Mixed,
            };
        }
        if let Some(copies) = self.table.get_mut(&(at.group, at.hash)) {
            if copies.unit != at.unit {
                copies.unit = Unit::Unknown;
            }
            if at.proof != Proof::Copy || std::mem::take(&mut copies.is_owed_store) {
                return Placed::Repeat;
            }
            copies.count = copies.count.saturating_add(1);
            return Placed::Copy;
        }
        if self.table.len() >= blocks_max || (at.is_pending && self.pending >= pending_max) {
            self.floor = Belief::Unknown;
            return Placed::Refused;
        }
        let Placement { is_pending, unit, born, .. } = *at;
        let is_owed_store = at.proof == Proof::Use;
        let copies = Copies { count: 1, is_owed_store, is_pending, unit, born };
        self.table.insert((at.group, at.hash), copies);
        self.pending += usize::from(at.is_pending);
        Placed::New
    }

    pub(crate) fn take(&mut self, group: u32, hash: HashKey) -> Taken {
        match self.table.get_mut(&(group, hash)) {
            None => Taken::Unknown,
            Some(copies) if copies.count > 1 => {
                copies.count -= 1;
                Taken::Copy
            }
            Some(_) => {
                self.erase(group, hash);
                Taken::Last
            }
        }
    }

    /// Takes all copies away. False where there were none.
    pub(crate) fn erase(&mut self, group: u32, hash: HashKey) -> bool {
        let erased = self.table.remove(&(group, hash));
        self.pending -= usize::from(erased.is_some_and(|copies| copies.is_pending));
        erased.is_some()
    }

    /// What the hash names is known from now on.
    pub(crate) fn settle(&mut self, group: u32, hash: HashKey) {
        if let Some(copies) = self.table.get_mut(&(group, hash)) {
            self.pending -= usize::from(copies.is_pending);
            copies.is_pending = false;
        }
    }

    /// How a block is there since a change no later than `born_by`, where a chunk has `chunk`
    /// tokens, of which the configuration told or not.
    pub(crate) fn presence(
        &self,
        (group, hash): (u32, HashKey),
        chunk: Option<u32>,
        is_configured: bool,
        born_by: u64,
    ) -> Option<Presence> {
        let copies = self.table.get(&(group, hash)).filter(|copies| copies.born <= born_by)?;
        Some(match copies.unit {
            Unit::Block => Presence::Whole,
            Unit::Configured if is_configured && chunk.is_some() => Presence::Whole,
            Unit::Tokens(tokens) if Some(tokens) == chunk => Presence::Whole,
            Unit::Configured | Unit::Tokens(_) | Unit::Unknown => Presence::Loose,
        })
    }

    pub(crate) fn has(&self, group: u32, hash: HashKey) -> bool {
        self.table.contains_key(&(group, hash))
    }

    /// Empties the slot in O(1).
    pub(crate) fn retire(&mut self, floor: Belief) -> Self {
        std::mem::replace(self, Self { floor, ..Self::default() })
    }

    pub(crate) fn blocks(&self) -> usize {
        self.table.len()
    }

    pub(crate) fn pending(&self) -> usize {
        self.pending
    }
}
