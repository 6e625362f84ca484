//! What the machine of a rank has its shell do, and how far its beliefs can be relied on.

use crate::vocab::{Belief, LossCause, PerTier, TierSet, vocabulary};

/// What the shell has to do, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Apply the batch `seq` now: the one just fed, else the parked one.
    Take(Take),
    /// Drop the batch just fed.
    Ignore {
        /// Its sequence.
        seq: u64,
        /// Why.
        why: Ignored,
    },
    /// Keep the batch just fed until it is taken or dropped.
    Park {
        /// Its sequence.
        seq: u64,
    },
    /// Drop the parked batches up to and including `through`.
    Unpark {
        /// The last one.
        through: u64,
    },
    /// Turn proven beliefs cold.
    Demote {
        /// On these tiers.
        tiers: TierSet,
        /// Into this.
        to: Belief,
        /// Why.
        cause: LossCause,
    },
    /// Beliefs count for nothing until reinstated or demoted; stores and removals go on to be taken
    /// in, whatever their [`Take::gain`].
    SetAside {
        /// On these tiers.
        tiers: TierSet,
    },
    /// Nothing of them was dropped: they count again, with what was stored and removed since.
    Reinstate {
        /// On these tiers.
        tiers: TierSet,
    },
    /// Another life: its hashes may name other content.
    ForgetIdentities,
    /// Beliefs count for nothing until restored.
    Suspend,
    /// Beliefs count again.
    Restore,
    /// Ask for a replay on a fresh connection; a session before it is void.
    Replay {
        /// Names the session in the events it brings.
        session: u64,
        /// First batch asked for.
        from: u64,
        /// 0 for a first try; the shell backs off by it.
        attempt: u8,
    },
    /// Drop the live connection and make a new one.
    Reconnect,
    /// Send a marker request as soon as the worker serves, and say in
    /// [`Head::marker`](super::Head::marker) when its store comes.
    Mark {
        /// The marker's id.
        id: u64,
    },
    /// Something worth counting, or a witness row.
    Note(Note),
}

/// How to apply a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Take {
    /// The batch.
    pub seq: u64,
    /// Tiers on which its stores may warm. Identities are learnt whatever this says: a hash names
    /// content.
    pub gain: TierSet,
    /// What each clear event in the batch does, by tier; `None` leaves the tier alone.
    pub clear: PerTier<Option<Belief>>,
    /// Whether an action of fak's own accounts for every clear in the batch.
    pub explained: bool,
}

vocabulary! {
    /// Why a batch was dropped.
    Ignored {
        /// Taken before.
        Repeat = "repeat",
        /// Out of order, and nothing to put it in its place with.
        Late = "late",
        /// From a connection that no longer counts.
        Stale = "stale",
        /// No room to hold it back; it will be asked for again.
        Overflow = "overflow",
    }
}

/// What happened to the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Note {
    /// Batches are missing.
    Gap {
        /// How many.
        lost: u64,
    },
    /// A replay brought them.
    GapClosed,
    /// Nothing could bring them: beliefs are unknown.
    GapNotClosed,
    /// Another life of the engine.
    NewLife,
    /// Clear events that no action of fak's explains.
    ClearUnexplained {
        /// How many.
        clears: u32,
    },
    /// Clear events that may be those of an action of fak's own. Beliefs went as if they were not.
    ClearAmbiguous {
        /// How many.
        clears: u32,
    },
    /// Clear events of the time before fak listened.
    ClearPast {
        /// How many.
        clears: u32,
    },
    /// The live connection does not bring what the engine publishes.
    LiveDead,
    /// A marker came back on the live connection.
    Tied,
    /// What was set aside for an action that did nothing counts again.
    Kept,
    /// The fence opened.
    Settled,
}

vocabulary! {
    /// How far a rank's beliefs can be relied on.
    Trust {
        /// Every batch of this life, or of this connection, was seen, and the live connection is
        /// shown to be the worker's.
        Exact = "exact",
        /// A gap, a new connection or a fence is being settled.
        Degraded = "degraded",
        /// No stream: route by load alone.
        LoadOnly = "load-only",
    }
}
