//! What the machine of a rank is fed: facts of its sockets, of fak's own actions, of the clock.

use crate::vocab::{Disposition, PerTier, TierSet};

/// What the machine has to know of a batch; the blocks stay with the shell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// The batch's sequence number.
    pub seq: u64,
    /// Digest of the payload's bytes. Two batches with one digest are one batch.
    pub digest: u128,
    /// How many clear events the batch holds.
    pub clears: u32,
    /// The marker whose store is in this batch, if one is.
    pub marker: Option<u64>,
    /// Whether the payload decoded. What an unreadable batch said is lost, in any replay too.
    pub readable: bool,
}

/// Bounds, and what the rank's sockets offer.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Whether a replay socket is known.
    pub replay: bool,
    /// Whether the shell can send markers. Then nothing is claimed of a connection before a marker
    /// came back on it: that proves that this socket belongs to the server that answered it.
    pub tie: bool,
    /// Batches held back while a replay runs; past this they are dropped and asked for again.
    pub parked_max: usize,
    /// Replays tried for one purpose before the rank gives up on it.
    pub attempts_max: u8,
}

impl Default for Config {
    fn default() -> Self {
        Self { replay: true, tie: true, parked_max: 1024, attempts_max: 4 }
    }
}

/// A fact fed to the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A new connection. The shell guarantees that every live batch from here on was received on
    /// it.
    Connected,
    /// The connection ended.
    Disconnected,
    /// A batch from the live connection.
    Live(Head),
    /// A message from the live connection that is no batch: what it held is not known.
    NoBatch,
    /// A batch of the replay `session`.
    ReplayBatch {
        /// The session that [`Effect::Replay`](super::Effect::Replay) named.
        session: u64,
        /// The batch.
        head: Head,
    },
    /// The end marker of the replay `session`.
    ReplayEnd {
        /// The session.
        session: u64,
    },
    /// The replay `session` broke off, timed out, or could not be asked.
    ReplayFailed {
        /// The session.
        session: u64,
    },
    /// An action is about to be called: the tiers it may touch go cold before the call leaves.
    Intent {
        /// The tiers that the action may touch.
        tiers: TierSet,
        /// What the clear event that the engine will publish for it means; `None` where it
        /// publishes none.
        clear: Option<PerTier<Disposition>>,
    },
    /// The action ended.
    Outcome {
        /// The verdict.
        kv: PerTier<Disposition>,
        /// Whether the engine owes the stream the clear event that the intent announced.
        clears: bool,
    },
    /// Something outside the stream took the beliefs: drift, changed weights, a contradiction by
    /// the engine.
    Distrust {
        /// What is still true.
        kv: PerTier<Disposition>,
    },
    /// The engine says that it did nothing at all: in place of [`Outcome`](Self::Outcome).
    Declined {
        /// Tiers on which that word can be held against the stream: they count again once a marker
        /// came back and no clear before it. The action's other tiers are unknown.
        kept: TierSet,
    },
    /// An action of an earlier fak may still owe the stream a clear.
    MayOwe,
    /// The worker was seen to be another process than before.
    NewIncarnation,
    /// The worker vanished. Its beliefs are set aside.
    Lost,
    /// The worker that vanished is back, and is the process that it was.
    Found,
    /// The engine looks prompts up, and nothing is heard of it: nothing is claimed before a marker
    /// came back.
    Blind,
    /// The engine contradicts what is believed: what it published and the live connection did not
    /// bring is asked for, where there is a replay socket. Until it is in, nothing is claimed.
    CatchUp,
    /// A batch that the engine owes is late: it is asked for, and beliefs go on to count.
    Late,
    /// Whether something of the engine's own names its life now, as its process's start does.
    /// Until this is said, nothing does.
    Life {
        /// Whether it does.
        is_told: bool,
    },
    /// Claims are asked for.
    Wanted,
    /// fak itself stood still, or had no turn, for longer than beliefs last: what the sockets hold
    /// may be as old.
    Stalled,
    /// The engine answered the request of the marker `id`: its store is published.
    Marked {
        /// The marker that [`Effect::Mark`](super::Effect::Mark) named.
        id: u64,
    },
    /// A quarter of a second passed. What could not be reached is tried again, a silent stream is
    /// compared with the replay, and a live connection that owes batches is given up.
    Tick,
}
