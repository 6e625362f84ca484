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
//! - **Set aside.** What an action may drop is set aside before it, and counts again only on proof
//!   that it was not dropped. See `rank/aside.rs`.
//! - **Liveness.** A connection counts once a marker came back on it, and for as long as it brings
//!   what a replay brings. See `rank/live.rs`.
//!
//! Invariants held here: 1 (no warmth before the fence), 2, 5 and 6 of ARCHITECTURE.md.

mod aside;
mod effect;
mod event;
mod fence;
mod live;
mod replay;
#[cfg(test)]
mod tests;

use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::mem;

use crate::vocab::{Belief, Disposition, LossCause, TierSet};
pub use effect::{Effect, Ignored, Note, Take, Trust};
pub use event::{Config, Event, Head};
use fence::{Clears, Fence};
use live::Live;
use replay::Session;

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
/// Batches remembered that a replay brought before the live connection.
const AHEAD: usize = 4096;

/// Which way a batch came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Origin {
    Live,
    Replay,
}

/// One rank of one worker. A few hundred bytes; the blocks are the index's.
#[derive(Clone, Debug)]
pub struct Rank {
    config: Config,
    connected: bool,
    /// A live batch of this connection was met in a replay, or there is no replay to meet it in.
    linked: bool,
    live: Live,
    /// Replay failed for good: go on as if there were none. Ticks since it was last tried.
    given_up_for: Option<u32>,
    /// The next connection goes without replay.
    give_up_next: bool,
    suspended: bool,
    /// History is missing, or not yet shown to be this life's: only a whole replay makes beliefs
    /// count again.
    incomplete: bool,
    cursor: Option<Cursor>,
    /// Digests by sequence.
    recent: BTreeMap<u64, u128>,
    parked: BTreeMap<u64, Head>,
    /// Batches were dropped for want of room since the running replay was asked for: it may not
    /// hold them.
    overflowed: bool,
    session: Option<Session>,
    /// A gap was noted and not yet closed.
    gap_open: bool,
    /// What a replay brings now lies before the time when fak began to listen.
    is_history: bool,
    /// Clears that replays brought and no action of fak's explains, not yet noted.
    past_clears: u32,
    /// No live batch was taken yet. The first one brings the clears that waited in the engine for
    /// its next step, whoever made them before (vLLM 0.32.0, observed: an idle reset is published
    /// with the next request).
    awaits_live: bool,
    /// Tiers that are aside since the worker vanished.
    lost: TierSet,
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
            live: Live::default(),
            given_up_for: None,
            give_up_next: false,
            suspended: false,
            incomplete: false,
            cursor: None,
            recent: BTreeMap::new(),
            parked: BTreeMap::new(),
            overflowed: false,
            session: None,
            gap_open: false,
            is_history: true,
            past_clears: 0,
            awaits_live: config.tie,
            lost: TierSet::NONE,
            next_id: 0,
            fence: Fence::default(),
        }
    }

    /// How far this rank's beliefs can be relied on.
    #[must_use]
    pub fn trust(&self) -> Trust {
        if !self.connected {
            Trust::LoadOnly
        } else if self.suspended || !self.fence.is_open() || !self.lost.is_empty() {
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

    /// Ticks for which beliefs count from the last tick on, where nothing more is heard: then this
    /// suspends them, or whoever reads them has to.
    #[must_use]
    pub fn lasts_for(&self) -> u32 {
        self.live_lasts_for()
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
            Event::Declined { kept } => self.declined(kept, &mut out),
            Event::MayOwe => self.fence.may_owe(),
            Event::NewIncarnation => self.start_over(LossCause::NewLife, &mut out),
            Event::Lost => self.lost(&mut out),
            Event::Found => self.found(&mut out),
            Event::Blind => self.blind(&mut out),
            Event::CatchUp => self.catch_up(&mut out),
            Event::Late => self.late(&mut out),
            Event::Life { is_told } => self.live.is_life_told = is_told,
            Event::Wanted => self.wanted(&mut out),
            Event::Stalled => self.stalled(&mut out),
            Event::Marked { id } => self.marked(id, &mut out),
            Event::Tick => self.tick(&mut out),
        }
        self.compare(event == Event::Tick, &mut out);
        self.suspend_or_restore(&mut out);
        out
    }

    /// Beliefs count only while history is whole and nothing that is parked or contested could take
    /// them.
    fn suspend_or_restore(&mut self, out: &mut Vec<Effect>) {
        let suspended = !self.connected
            || !self.is_proven()
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
        self.given_up_for = mem::take(&mut self.give_up_next).then_some(0);
        self.linked = !self.can_replay();
        if self.can_replay() {
            self.live_connected(out);
            self.complete_by_replay(out);
        } else {
            // A connection belongs to one process, so what it brings is one life's; what came
            // before is not.
            self.break_off(LossCause::Gap, out);
            (self.incomplete, self.is_history) = (false, false);
            self.live_connected(out);
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
        self.met(head, out);
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
            _ => self.take(head, Origin::Live, out),
        }
    }

    /// Whether live batches have to wait for the running replay: it closes a gap, or its end
    /// decides about the fence.
    fn has_to_wait(&self) -> bool {
        let session = self.session.as_ref().filter(|session| !session.is_trial());
        session.is_some() && (self.incomplete || self.fence.decides_at_end())
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
            self.meet_new_life(out);
            self.linked = false;
            self.park(head, out);
        } else if late && !self.contradicts(head) {
            // Either way nothing before it stands, and it is itself too old to tell anything of
            // what came after it.
            self.missed(out);
            out.push(Effect::Ignore { seq: head.seq, why: Ignored::Late });
        } else {
            self.meet_new_life(out);
            self.take(head, Origin::Live, out);
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
            self.take(head, Origin::Live, out);
        }
    }

    /// Events are lost for good.
    fn missed(&mut self, out: &mut Vec<Effect>) {
        self.demote(TierSet::ALL, Belief::Unknown, LossCause::Gap, out);
        self.fence.miss_owed();
        out.push(Effect::Note(Note::GapNotClosed));
    }

    /// Applies a batch in its turn.
    fn take(&mut self, head: Head, origin: Origin, out: &mut Vec<Effect>) {
        if !head.readable {
            self.missed(out);
            self.remember(Cursor { seq: head.seq, digest: head.digest });
            return;
        }
        let clears = self.explain(head.clears, origin);
        self.note_clears(clears, origin, out);
        self.awaits_live &= origin != Origin::Live;
        let mut gain = TierSet::ALL.without(self.fence.closed());
        let mut cleared = TierSet::NONE;
        if head.clears > 0 {
            cleared = TierSet::ALL.iter().filter(|t| clears.fate.get(*t).is_some()).collect();
            // A connector's events follow the gpu's in a batch and its reset leaves those pending
            // (vLLM 0.32.0, v1/kv_offload/cpu/manager.py, read): a store in the batch of a clear
            // may be of a block that the clear took.
            gain = gain.without(cleared.without(TierSet::GPU));
        }
        let (clear, explained) = (clears.fate, clears.is_own());
        out.push(Effect::Take(Take { seq: head.seq, gain, clear, explained }));
        self.aside_cleared(cleared, out);
        self.remember(Cursor { seq: head.seq, digest: head.digest });
        self.fence_passed_batch(head, out);
    }

    fn explain(&mut self, clears: u32, origin: Origin) -> Clears {
        if origin == Origin::Replay && self.is_history {
            self.fence.explain_past(clears)
        } else {
            self.fence.explain(clears)
        }
    }

    /// Counts the clears that no action of fak's explains. Those that replays bring are noted
    /// together once the replay is through.
    fn note_clears(&mut self, clears: Clears, origin: Origin, out: &mut Vec<Effect>) {
        if clears.ambiguous > 0 {
            out.push(Effect::Note(Note::ClearAmbiguous { clears: clears.ambiguous }));
        }
        match origin {
            // The marker that ties the connection is asked for when it is made, so that this batch
            // is not long in coming.
            Origin::Live if clears.foreign > 0 && self.awaits_live => {
                out.push(Effect::Note(Note::ClearPast { clears: clears.foreign }));
            }
            Origin::Live if clears.foreign > 0 => {
                out.push(Effect::Note(Note::ClearUnexplained { clears: clears.foreign }));
            }
            Origin::Live => {}
            Origin::Replay => {
                self.past_clears = self.past_clears.saturating_add(clears.foreign);
            }
        }
    }

    /// The live connection is another life's than the engine's of now, or than the replay's.
    fn start_over(&mut self, cause: LossCause, out: &mut Vec<Effect>) {
        self.break_off(cause, out);
        if cause == LossCause::NewLife {
            self.fence.forget_maybe();
        }
        out.push(Effect::Note(Note::NewLife));
        self.connected = false;
        out.push(Effect::Reconnect);
    }

    fn tick(&mut self, out: &mut Vec<Effect>) {
        if !self.connected {
            return;
        }
        self.tick_live(out);
        self.tick_replay(out);
        if self.connected && self.session.is_none() && !self.fence.is_open() {
            self.seek_barrier(out);
        }
    }

    /// Another life answered. If the live connection was the old one's, what it brings is of no use
    /// any more.
    fn new_life(&mut self, out: &mut Vec<Effect>) {
        if self.linked {
            return self.start_over(LossCause::NewLife, out);
        }
        self.meet_new_life(out);
        self.complete_by_replay(out);
    }

    /// Another life on a connection that did not end.
    fn meet_new_life(&mut self, out: &mut Vec<Effect>) {
        self.break_off(LossCause::NewLife, out);
        self.fence.forget_maybe();
        out.push(Effect::Note(Note::NewLife));
        self.live_restarted(out);
    }

    /// Nothing known of this rank can be tied to what comes next.
    fn break_off(&mut self, cause: LossCause, out: &mut Vec<Effect>) {
        self.unpark_all(out);
        self.session = None;
        self.demote(TierSet::ALL, Belief::Unknown, cause, out);
        out.push(Effect::ForgetIdentities);
        self.cursor = None;
        self.recent.clear();
        self.is_history = true;
        self.fence.restart();
    }

    fn remember(&mut self, cursor: Cursor) {
        self.cursor = Some(cursor);
        self.recent.insert(cursor.seq, cursor.digest);
        let expected = self.live.expects_from();
        while let Some((&first, _)) = self.recent.first_key_value()
            && self.recent.len() > RECENT
            && (self.recent.len() > AHEAD || expected.is_none_or(|from| first < from))
        {
            self.recent.pop_first();
        }
    }

    fn was_taken(&self, head: Head) -> bool {
        self.recent.get(&head.seq) == Some(&head.digest)
    }

    fn can_replay(&self) -> bool {
        self.config.replay && self.given_up_for.is_none()
    }

    fn next_marker(&mut self) -> u64 {
        self.next_id += 1;
        self.fence.renew_marker(self.next_id);
        self.next_id
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
