//! What each batch and each action *means* for one rank of one worker: accept, ignore, demote, ask
//! for a replay.
//!
//! A rank publishes its cache's history as numbered batches. The history is only as good as its
//! continuity, and a sequence number proves none: it starts at 0 again with each life of the engine
//! and carries no boot id. So:
//!
//! - **Order.** Batches are taken strictly by sequence. A gap suspends what is believed until a
//!   replay closes it.
//! - **Continuity.** A replay is asked from the last batch already taken, and that batch must come
//!   back byte for byte (its digest; each carries a timestamp). It does not in another life. A new
//!   connection, a gap and a sequence that went backwards all have to pass this test. And since a
//!   replay may be answered by a later life than the one that the live connection still belongs to,
//!   one live batch per connection has to be met in a replay as well (`linked`).
//! - **Fence.** From an action's intent on, no batch may warm the tiers that the action demotes,
//!   until a *barrier* shows that all that was in flight has drained: either two replays in a row,
//!   both asked after the outcome, that end at the same batch, or a marker, a request of fak's own,
//!   whose store comes back in the stream. See `rank/fence.rs`.
//!
//! Invariants held here: 1 (no warmth before the fence), 2, 5 and 6 of ARCHITECTURE.md.

mod fence;
mod replay;
#[cfg(test)]
mod tests;

use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec::Vec;
use core::mem;

use crate::vocab::{Belief, Disposition, LossCause, PerTier, TierSet, vocabulary};
use fence::Fence;
use replay::Session;

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
    /// Batches held back while a replay runs; past this they are dropped and asked for again.
    pub parked_max: usize,
    /// Replays tried for one purpose before the rank gives up on it.
    pub attempts_max: u8,
}

impl Default for Config {
    fn default() -> Self {
        Self { replay: true, parked_max: 1024, attempts_max: 4 }
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
        /// The session that [`Effect::Replay`] named.
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
    /// The worker was seen to be another process than before.
    NewIncarnation,
    /// The worker vanished.
    Lost,
    /// The engine contradicts what is believed: what it published and nobody missed is asked for,
    /// where there is anybody to ask.
    CatchUp,
    /// Time passed; a barrier that could not be reached is tried again.
    Tick,
}

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
    /// Send a marker request as soon as the worker serves, and say in [`Head::marker`] when its
    /// store comes.
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
    /// The fence opened.
    Settled,
}

vocabulary! {
    /// How far a rank's beliefs can be relied on.
    Trust {
        /// Every batch of this life, or of this connection, was seen.
        Exact = "exact",
        /// A gap, a new connection or a fence is being settled.
        Degraded = "degraded",
        /// No stream: route by load alone.
        LoadOnly = "load-only",
    }
}

/// The last batch taken in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cursor {
    seq: u64,
    digest: u128,
}

/// Batches remembered to tell a repeated or late one from another life's. A TCP connection neither
/// repeats nor reorders; a source that does so over a longer stretch than this is taken for another
/// life.
const RECENT: usize = 32;

/// One rank of one worker. A few hundred bytes; the blocks are the index's.
#[derive(Clone, Debug)]
pub struct Rank {
    config: Config,
    connected: bool,
    /// A live batch of this connection was met in a replay, or there is no replay to meet it in.
    linked: bool,
    /// Replay failed for good on this connection: go on as if there were none.
    replay_given_up: bool,
    /// The next connection goes without replay.
    give_up_next: bool,
    suspended: bool,
    /// History is missing, or not yet shown to be this life's: only a whole replay makes beliefs
    /// count again.
    incomplete: bool,
    cursor: Option<Cursor>,
    recent: VecDeque<Cursor>,
    parked: BTreeMap<u64, Head>,
    /// Batches were dropped for want of room since the running replay was asked for: it may not
    /// hold them.
    overflowed: bool,
    session: Option<Session>,
    /// A gap was noted and not yet closed.
    gap_open: bool,
    next_id: u64,
    fence: Fence,
}

impl Rank {
    /// A rank of which nothing is known.
    #[must_use]
    pub fn new(config: Config) -> Self {
        Self {
            config,
            connected: false,
            linked: false,
            replay_given_up: false,
            give_up_next: false,
            suspended: false,
            incomplete: false,
            cursor: None,
            recent: VecDeque::new(),
            parked: BTreeMap::new(),
            overflowed: false,
            session: None,
            gap_open: false,
            next_id: 0,
            fence: Fence::default(),
        }
    }

    /// How far this rank's beliefs can be relied on.
    #[must_use]
    pub fn trust(&self) -> Trust {
        if !self.connected {
            Trust::LoadOnly
        } else if self.suspended || self.session.is_some() || !self.fence.is_open() {
            Trust::Degraded
        } else {
            Trust::Exact
        }
    }

    /// Whether the last action is settled: what is stored from here on is believed.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.fence.is_open()
    }

    /// Whether what the connector's tiers hold is in doubt until a batch more was taken: a clear
    /// was seen that may have been somebody else's.
    #[must_use]
    pub fn is_contested(&self) -> bool {
        self.fence.is_contested()
    }

    /// The last batch taken.
    #[must_use]
    pub fn cursor(&self) -> Option<u64> {
        self.cursor.map(|c| c.seq)
    }

    /// Feeds one fact; the effects are to be carried out in order before the next is fed.
    pub fn step(&mut self, event: Event) -> Vec<Effect> {
        let mut out = Vec::new();
        match event {
            Event::Connected => self.connect(&mut out),
            Event::Disconnected => self.disconnect(&mut out),
            Event::Live(head) => self.live(head, &mut out),
            Event::NoBatch => self.no_batch(&mut out),
            Event::ReplayBatch { session, head } => self.replay_batch(session, head, &mut out),
            Event::ReplayEnd { session } => self.replay_end(session, &mut out),
            Event::ReplayFailed { session } => self.replay_failed(session, &mut out),
            Event::Intent { tiers, clear } => self.intent(tiers, clear, &mut out),
            Event::Outcome { kv, clears } => self.outcome(kv, clears, &mut out),
            Event::Distrust { kv } => self.distrust(kv, &mut out),
            Event::NewIncarnation => self.start_over(&mut out),
            Event::Lost => self.lost(&mut out),
            Event::CatchUp => self.catch_up(&mut out),
            Event::Tick => self.tick(&mut out),
        }
        self.suspend_or_restore(&mut out);
        out
    }

    /// Beliefs count only while history is whole and nothing that is parked or contested could take
    /// them.
    fn suspend_or_restore(&mut self, out: &mut Vec<Effect>) {
        let suspended = !self.connected
            || self.incomplete
            || !self.parked.is_empty()
            || self.fence.is_contested();
        if suspended && !self.suspended {
            out.insert(0, Effect::Suspend);
        } else if !suspended && self.suspended {
            out.push(Effect::Restore);
        }
        self.suspended = suspended;
    }

    fn connect(&mut self, out: &mut Vec<Effect>) {
        self.unpark_all(out);
        self.connected = true;
        self.replay_given_up = mem::take(&mut self.give_up_next);
        self.linked = !self.can_replay();
        if self.can_replay() {
            self.complete_by_replay(out);
        } else {
            // A connection belongs to one process, so what it brings is one life's; what came
            // before is not.
            self.break_off(LossCause::Gap, out);
            self.incomplete = false;
            self.seek_barrier(out);
        }
    }

    fn disconnect(&mut self, out: &mut Vec<Effect>) {
        self.connected = false;
        self.session = None;
        self.unpark_all(out);
    }

    fn live(&mut self, head: Head, out: &mut Vec<Effect>) {
        if !self.connected {
            out.push(Effect::Ignore { seq: head.seq, why: Ignored::Stale });
            return;
        }
        if self.was_taken(head) {
            // A batch met live and taken from a replay of this connection's time: one life.
            self.linked = true;
            out.push(Effect::Ignore { seq: head.seq, why: Ignored::Repeat });
            return;
        }
        if !self.linked || self.has_to_wait() {
            self.park(head, out);
            return;
        }
        match self.cursor {
            Some(c) if head.seq <= c.seq => self.backwards(head, out),
            Some(c) if head.seq > c.seq + 1 => self.gap(head, head.seq - c.seq - 1, out),
            _ => self.take(head, out),
        }
    }

    /// Whether live batches have to wait for the running replay: it closes a gap, or its end
    /// decides about the fence.
    fn has_to_wait(&self) -> bool {
        self.session.is_some() && (self.incomplete || self.fence.decides_at_end())
    }

    fn park(&mut self, head: Head, out: &mut Vec<Effect>) {
        if self.parked.len() >= self.config.parked_max {
            self.unpark_all(out);
            self.overflowed = true;
            self.incomplete = true;
            out.push(Effect::Ignore { seq: head.seq, why: Ignored::Overflow });
        } else if self.parked.insert(head.seq, head).is_some_and(|held| held.digest != head.digest)
        {
            // Two batches of one number on one connection: whatever this peer is, it is no single
            // life.
            self.new_life(out);
            return;
        } else {
            out.push(Effect::Park { seq: head.seq });
        }
        if self.session.is_none() {
            self.complete_by_replay(out);
        }
    }

    /// Beliefs count for nothing until a replay was whole.
    fn complete_by_replay(&mut self, out: &mut Vec<Effect>) {
        self.incomplete = true;
        self.ask_replay(0, out);
    }

    /// A number at or below the cursor with bytes never seen: another life, on a connection that
    /// did not end, or a late batch.
    fn backwards(&mut self, head: Head, out: &mut Vec<Effect>) {
        let late = self.cursor.is_some_and(|c| c.seq - head.seq < RECENT as u64);
        if self.can_replay() {
            self.break_off(LossCause::NewLife, out);
            out.push(Effect::Note(Note::NewLife));
            self.linked = false;
            self.park(head, out);
        } else if late && !self.contradicts(head) {
            // Either way nothing before it stands, and it is itself too old to tell anything of
            // what came after it.
            self.missed(out);
            out.push(Effect::Ignore { seq: head.seq, why: Ignored::Late });
        } else {
            self.break_off(LossCause::NewLife, out);
            out.push(Effect::Note(Note::NewLife));
            self.take(head, out);
        }
    }

    fn gap(&mut self, head: Head, lost: u64, out: &mut Vec<Effect>) {
        out.push(Effect::Note(Note::Gap { lost }));
        if self.can_replay() {
            self.gap_open = true;
            self.incomplete = true;
            self.park(head, out);
        } else {
            self.missed(out);
            self.take(head, out);
        }
    }

    /// Events are lost for good.
    fn missed(&mut self, out: &mut Vec<Effect>) {
        self.demote(TierSet::ALL, Belief::Unknown, LossCause::Gap, out);
        self.fence.forget_owed();
        out.push(Effect::Note(Note::GapNotClosed));
    }

    /// Applies a batch in its turn.
    fn take(&mut self, head: Head, out: &mut Vec<Effect>) {
        if !head.readable {
            self.missed(out);
            self.remember(Cursor { seq: head.seq, digest: head.digest });
            return;
        }
        let (clear, explained) = self.fence.explain(head.clears, out);
        let mut gain = TierSet::ALL.without(self.fence.closed());
        if head.clears > 0 {
            // A connector's events follow the gpu's in a batch and its reset leaves those pending
            // (vLLM 0.32.0, v1/kv_offload/cpu/manager.py, read): a store in the batch of a clear
            // may be of a block that the clear took.
            let cleared = TierSet::CONNECTOR.iter().filter(|t| clear.get(*t).is_some()).collect();
            gain = gain.without(cleared);
        }
        out.push(Effect::Take(Take { seq: head.seq, gain, clear, explained }));
        self.remember(Cursor { seq: head.seq, digest: head.digest });
        self.fence_passed_batch(head, out);
    }

    /// The live connection is another life's than the engine's of now.
    fn start_over(&mut self, out: &mut Vec<Effect>) {
        self.break_off(LossCause::NewLife, out);
        out.push(Effect::Note(Note::NewLife));
        self.connected = false;
        out.push(Effect::Reconnect);
    }

    fn lost(&mut self, out: &mut Vec<Effect>) {
        self.demote(TierSet::ALL, Belief::Unknown, LossCause::Doubt, out);
    }

    fn tick(&mut self, out: &mut Vec<Effect>) {
        if self.connected && self.session.is_none() && !self.fence.is_open() {
            self.seek_barrier(out);
        }
    }

    /// Another life answered. If the live connection was the old one's, what it brings is of no use
    /// any more.
    fn new_life(&mut self, out: &mut Vec<Effect>) {
        if self.linked {
            return self.start_over(out);
        }
        self.break_off(LossCause::NewLife, out);
        out.push(Effect::Note(Note::NewLife));
        self.complete_by_replay(out);
    }

    /// Nothing known of this rank can be tied to what comes next.
    fn break_off(&mut self, cause: LossCause, out: &mut Vec<Effect>) {
        self.unpark_all(out);
        self.session = None;
        self.demote(TierSet::ALL, Belief::Unknown, cause, out);
        out.push(Effect::ForgetIdentities);
        self.cursor = None;
        self.recent.clear();
        self.fence.restart();
    }

    fn remember(&mut self, cursor: Cursor) {
        self.cursor = Some(cursor);
        if self.recent.len() == RECENT {
            self.recent.pop_front();
        }
        self.recent.push_back(cursor);
    }

    fn was_taken(&self, head: Head) -> bool {
        self.recent.contains(&Cursor { seq: head.seq, digest: head.digest })
    }

    fn can_replay(&self) -> bool {
        self.config.replay && !self.replay_given_up
    }

    fn demote(&self, tiers: TierSet, to: Belief, cause: LossCause, out: &mut Vec<Effect>) {
        if !tiers.is_empty() {
            out.push(Effect::Demote { tiers, to, cause });
        }
    }

    fn unpark_all(&mut self, out: &mut Vec<Effect>) {
        if let Some((last, _)) = self.parked.last_key_value() {
            out.push(Effect::Unpark { through: *last });
            self.parked.clear();
        }
    }
}

/// What a verdict leaves of a belief; `None` where it stands.
fn belief_after(kv: Disposition) -> Option<Belief> {
    match kv {
        Disposition::Preserved => None,
        Disposition::Forgotten => Some(Belief::Gone),
        Disposition::Unknown => Some(Belief::Unknown),
    }
}
