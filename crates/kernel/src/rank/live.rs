//! Is the live connection the worker's own, and does it bring what the engine publishes?
//!
//! A connection can stand and bring nothing (a half-open peer, a relay that stopped, another
//! topic), or bring another engine's events (two engines that swapped ports). Two witnesses show
//! it:
//!
//! - *A marker*, a request of fak's own over HTTP, whose store has to come back on this very
//!   connection: it ties the stream to its worker. It is asked for on each new connection, and
//!   again where there is a doubt.
//! - *The replay*. A live connection that does not bring within a second what it brings is dead, or
//!   too late to be believed. A stream is compared with it at intervals, a silent one more often:
//!   the hole shows with the next batch only, which a dead connection does not bring.
//!
//! Where one of two things is missing, only a marker that came back lately stands in for it.
//! Without a replay nothing else tells silence from death, and a batch does not tell how late it
//! is. Where nothing names the engine's life, another engine may answer behind its address while
//! the old one's events go on: only a marker goes through both. It costs a request of one block,
//! so it is asked for while somebody asks for claims, and no more often than every three seconds.
//!
//! Invariant: nothing is claimed of a connection that is not tied, of one that owes a batch for
//! longer than a second, of one that was silent for longer than that and not compared since, and,
//! without a replay or a life that is told, of one on which no marker came back for five.

use alloc::vec::Vec;

use super::{Effect, Head, Note, Rank};

/// Ticks for which a live connection may owe what the engine has published: a second.
const LATE_TICKS: u32 = 4;
/// Ticks of silence after which the replay is asked: what the live connection lost shows within
/// 0.75 s, the replay's 0.1 s included, and within a second where the machine is busy.
const CHECK_TICKS: u32 = 2;
/// Ticks between two comparisons while batches come: they may come late, and ever later.
const BUSY_CHECK_TICKS: u32 = 4;
/// Ticks for which a marker stands in for a replay, or for the name of a life: five seconds.
const TIED_TICKS: u32 = 20;
/// Ticks after which another is asked for: three seconds, which leaves two for it to come back.
const TIE_AGAIN_TICKS: u32 = 12;
/// The most ticks between two connections that bring nothing: a minute.
const REOPEN_TICKS_MAX: u32 = 240;

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Live {
    /// A marker came back on this connection.
    is_tied: bool,
    /// Ticks since the last one did.
    tied_for: u32,
    /// Something of the engine's own names its life.
    pub(super) is_life_told: bool,
    /// The marker that has to come back on it.
    marker: Option<u64>,
    /// Ticks since that marker's request was answered.
    answered_for: Option<u32>,
    /// The highest batch that it brought.
    met: Option<u64>,
    /// Batches from this one on were published while it stood.
    owes_from: Option<u64>,
    /// The last of those that a replay brought and it did not. It stays the same until it comes,
    /// whatever later replays bring: if it moved on, a connection that lags more and more would
    /// never owe one batch for long.
    owed: Option<u64>,
    /// Ticks for which it has owed that one.
    owed_for: u32,
    /// Ticks since its last batch.
    silent_for: u32,
    /// Ticks since the last comparison with the replay was asked for.
    unchecked_for: u32,
    /// Ticks since a batch came, or a comparison with the replay came to its end.
    unproven_for: u32,
    is_dead: bool,
    /// Ticks until it is given up, where it is dead.
    reopens_in: u32,
    /// Connections in a row that were given up.
    reopened: u32,
    /// Checks in a row that came to nothing.
    failed_checks: u32,
    /// What the engine owes was asked for while a replay ran that may be older.
    is_late: bool,
    /// The connection brought events again after it had lost some, and was tried once more.
    was_revived: bool,
}

impl Live {
    /// A new connection, of which nothing is known.
    fn renew(&mut self) {
        let Self { reopened, failed_checks, is_life_told, .. } = *self;
        *self = Self { reopened, failed_checks, is_life_told, ..Self::default() };
    }

    /// Another life's numbers come from here on.
    fn restart(&mut self) {
        (self.met, self.owes_from, self.owed) = (None, None, None);
    }

    /// Whether the connection brings events again, and not the marker that was answered: that one
    /// fell into the time when it brought none.
    fn is_revived_by(&self, head: Head) -> bool {
        let is_overdue = self.answered_for.is_some_and(|ticks| ticks > 0);
        !self.was_revived && (self.is_dead || is_overdue) && !self.is_marker(head)
    }

    fn is_marker(&self, head: Head) -> bool {
        self.marker.is_some_and(|asked| head.marker.is_some_and(|id| id >= asked))
    }

    /// Batches from this one on have to be remembered, since the connection is still to bring them.
    pub(super) fn expects_from(&self) -> Option<u64> {
        self.met.map(|met| met.saturating_add(1)).or(self.owes_from)
    }

    fn check_is_due(&self) -> bool {
        let every = if self.silent_for < CHECK_TICKS { BUSY_CHECK_TICKS } else { CHECK_TICKS };
        self.unchecked_for >= every << self.failed_checks.min(7)
    }

    /// A replay was asked for.
    pub(super) fn asked(&mut self) {
        self.unchecked_for = 0;
        self.is_late = false;
    }

    /// A comparison with the replay came to its end, or to nothing.
    pub(super) fn checked(&mut self, is_whole: bool) {
        if is_whole {
            (self.failed_checks, self.unproven_for) = (0, 0);
        } else {
            self.failed_checks = self.failed_checks.saturating_add(1);
        }
    }

    /// Comparisons in a row that came to nothing.
    pub(super) fn failed_checks(&self) -> u32 {
        self.failed_checks
    }

    /// The first replay that was asked on this connection ended at `last`.
    pub(super) fn replay_ended(&mut self, last: Option<u64>) {
        self.owes_from.get_or_insert(last.map_or(0, |seq| seq.saturating_add(1)));
    }
}

impl Rank {
    /// Whether the live connection is shown to be the worker's, as far as markers can be sent, and
    /// to bring what the engine publishes.
    pub(super) fn is_proven(&self) -> bool {
        let Live { is_tied, is_dead, reopened, unproven_for, tied_for, .. } = self.live;
        // Also where replay was given up: what is silent and cannot be compared shows nothing.
        let is_stale = self.config.replay && unproven_for > LATE_TICKS;
        let is_tied = is_tied && !(self.rests_on_markers() && tied_for > TIED_TICKS);
        !is_stale && (is_tied || (!self.config.tie && !is_dead && reopened == 0))
    }

    /// Whether something is missing for which only a marker that came back lately can stand in.
    fn rests_on_markers(&self) -> bool {
        !self.can_replay() || !self.live.is_life_told
    }

    pub(super) fn live_lasts_for(&self) -> u32 {
        let Live { unproven_for, tied_for, .. } = self.live;
        let left = |is_counted: bool, bound: u32, ticks: u32| {
            if is_counted { (bound + 1).saturating_sub(ticks) } else { u32::MAX }
        };
        let tied = left(self.config.tie && self.rests_on_markers(), TIED_TICKS, tied_for);
        // Nothing lasts longer than a second: within that this has to be asked again.
        let compared = left(true, LATE_TICKS, if self.config.replay { unproven_for } else { 0 });
        compared.min(tied)
    }

    /// Whether the live connection was seen to bring less than the engine publishes, or the one
    /// before it was and this one has not shown better yet.
    #[must_use]
    pub fn is_dead(&self) -> bool {
        self.live.is_dead || self.live.reopened > 0
    }

    /// The marker that is waited for: to tie the connection, or to open the fence.
    #[must_use]
    pub fn wanted_marker(&self) -> Option<u64> {
        self.live.marker.max(self.fence.marker())
    }

    pub(super) fn live_connected(&mut self, out: &mut Vec<Effect>) {
        self.live.renew();
        self.retie(out);
    }

    /// Another life of the engine is met on a connection that did not end.
    pub(super) fn live_restarted(&mut self, out: &mut Vec<Effect>) {
        self.live.restart();
        self.retie(out);
    }

    /// Nothing is claimed before a marker came back on the live connection.
    pub(super) fn retie(&mut self, out: &mut Vec<Effect>) {
        self.live.is_tied = false;
        if self.config.tie && self.connected {
            self.ask_tie(out);
        }
    }

    fn ask_tie(&mut self, out: &mut Vec<Effect>) {
        let id = self.next_marker();
        (self.live.marker, self.live.answered_for) = (Some(id), None);
        out.push(Effect::Mark { id });
    }

    /// The live connection brought a batch.
    pub(super) fn met(&mut self, head: Head, out: &mut Vec<Effect>) {
        // One that an action waits for shows the same.
        let is_fences = head.readable && head.marker.is_some_and(|id| self.fence.is_for(id));
        let live = &mut self.live;
        (live.silent_for, live.unproven_for) = (0, 0);
        live.tied_for = if is_fences { 0 } else { live.tied_for };
        live.met = live.met.max(Some(head.seq));
        live.owed = live.owed.filter(|owed| Some(*owed) > live.met);
        if !self.config.tie && !live.is_dead {
            live.reopened = 0;
        }
        if head.readable && !live.is_dead && live.is_marker(head) {
            (live.marker, live.answered_for, live.reopened) = (None, None, 0);
            (live.is_tied, live.tied_for) = (true, 0);
            out.push(Effect::Note(Note::Tied));
        }
        if self.config.tie && self.live.is_revived_by(head) {
            // Once a connection: one that brings another engine's events is given up all the same.
            (self.live.was_revived, self.live.is_dead) = (true, false);
            self.ask_tie(out);
        }
    }

    /// A replay brought a batch that the live connection has not brought.
    pub(super) fn brought(&mut self, head: Head) {
        let live = &mut self.live;
        let is_beyond = live.met.is_none_or(|met| head.seq > met);
        let is_owed = live.owes_from.is_some_and(|from| head.seq >= from) || live.is_marker(head);
        if is_beyond && is_owed && !live.is_dead && (live.owed.is_none() || live.owed_for == 0) {
            (live.owed, live.owed_for) = (live.owed.max(Some(head.seq)), 0);
        }
    }

    /// The engine answered a marker's request.
    pub(super) fn marked(&mut self, id: u64, out: &mut Vec<Effect>) {
        if self.live.marker.is_some_and(|asked| id >= asked) {
            self.live.answered_for = Some(0);
            if self.can_replay() {
                self.late(out);
            }
        }
    }

    /// Events that should be there are not.
    pub(super) fn late(&mut self, out: &mut Vec<Effect>) {
        if !self.connected {
            return;
        }
        if self.can_replay() {
            self.live.is_late = true;
        } else if self.config.tie && self.live.marker.is_none() && self.live.silent_for > 0 {
            self.ask_tie(out);
        }
    }

    /// Claims are asked for: what they rest on is renewed before its time is over.
    pub(super) fn wanted(&mut self, out: &mut Vec<Effect>) {
        let is_due = self.live.marker.is_none() && self.live.tied_for >= TIE_AGAIN_TICKS;
        if is_due && self.connected && self.config.tie && self.rests_on_markers() {
            self.ask_tie(out);
        }
    }

    /// What comes next may have waited since long ago, a marker or a replay's end among it: only
    /// what is asked for from here on proves anything of now. A marker, since it also has the
    /// engine tell of a clear that waits for its next step.
    pub(super) fn stalled(&mut self, out: &mut Vec<Effect>) {
        match (self.config.tie, self.can_replay()) {
            _ if !self.connected => {}
            (true, _) => self.retie(out),
            (false, true) => self.complete_by_replay(out),
            (false, false) => self.give_up_live(out),
        }
    }

    /// The engine works and nothing is heard of it.
    pub(super) fn blind(&mut self, out: &mut Vec<Effect>) {
        if self.connected && self.live.is_tied {
            self.retie(out);
        } else if self.connected && self.is_proven() {
            self.give_up_live(out);
        }
    }

    pub(super) fn tick_live(&mut self, out: &mut Vec<Effect>) {
        let live = &mut self.live;
        live.silent_for = live.silent_for.saturating_add(1);
        live.unchecked_for = live.unchecked_for.saturating_add(1);
        live.unproven_for = live.unproven_for.saturating_add(1);
        live.tied_for = live.tied_for.saturating_add(1);
        if live.is_dead {
            return self.reopen(out);
        }
        live.owed_for += u32::from(live.owed.is_some());
        live.answered_for = live.answered_for.map(|ticks| ticks + 1);
        let is_over = |ticks: u32| ticks > LATE_TICKS;
        if is_over(live.owed_for) || live.answered_for.is_some_and(is_over) {
            self.give_up_live(out);
        }
    }

    fn give_up_live(&mut self, out: &mut Vec<Effect>) {
        let Live { reopened, was_revived, .. } = self.live;
        if reopened == 0 {
            out.push(Effect::Note(Note::LiveDead));
        }
        let wait = match reopened {
            0 => 0,
            n => (LATE_TICKS << (n - 1).min(8)).min(REOPEN_TICKS_MAX),
        };
        self.live.renew();
        self.live.was_revived = was_revived;
        (self.live.is_dead, self.live.reopens_in) = (true, wait);
        self.reopen(out);
    }

    fn reopen(&mut self, out: &mut Vec<Effect>) {
        if self.live.reopens_in > 0 {
            self.live.reopens_in -= 1;
            return;
        }
        self.live.reopened = self.live.reopened.saturating_add(1);
        self.disconnect(out);
        out.push(Effect::Reconnect);
    }

    /// Asks the replay where a batch is late, or the live connection silent.
    pub(super) fn compare(&mut self, is_tick: bool, out: &mut Vec<Effect>) {
        let is_due = self.live.is_late || (is_tick && self.live.check_is_due());
        if is_due && self.connected && self.session.is_none() && self.can_replay() {
            self.ask_replay(0, out);
        }
    }
}
