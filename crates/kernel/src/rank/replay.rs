//! Replays: what they prove, what they bring, and when to give up on them.
//!
//! Traps of the real thing (vLLM 0.32.0, observed): asked below its buffer it silently begins
//! later; asked beyond its end it answers the end marker alone, which is also what a restarted
//! engine answers; a slow reader gets holes. Invariant: a replay counts only if it is contiguous
//! and closed by its end marker.

use alloc::vec::Vec;
use core::mem;

use super::{Cursor, Effect, Head, Note, Origin, Rank};
use crate::vocab::{Belief, LossCause, TierSet};

/// One replay in progress.
#[derive(Clone, Debug)]
pub(super) struct Session {
    id: u64,
    attempt: u8,
    /// The cursor when it was asked for.
    began_at: Option<Cursor>,
    /// Asked while the fence was settling: its end counts for the barrier.
    barrier: bool,
    /// The batch that has to come first, byte for byte.
    expects: Option<Cursor>,
    last: Option<u64>,
    batches: u32,
    /// Replay was given up, and this one shows whether it works again.
    is_trial: bool,
}

impl Session {
    pub(super) fn is_trial(&self) -> bool {
        self.is_trial
    }

    /// Whether what it leaves out is lost for good: another one just before did so, and it is too
    /// short for the ROUTER to have dropped any of it.
    fn shows_losses(&self) -> bool {
        self.attempt > 0 && self.batches <= WHOLE_MAX
    }
}

/// Batches that a replay may bring and still be taken for whole. Up to vLLM 0.32.0 the ROUTER drops
/// what a reader has not taken when 1,000 messages wait, and the end marker may come all the same
/// (observed): so after more than half of that the tail is asked for again.
const WHOLE_MAX: u32 = 500;
/// Ticks after which a replay that was given up is tried again: a minute.
const RETRY_TICKS: u32 = 240;

impl Rank {
    /// Asks for a replay from the last batch taken, or from the start.
    pub(super) fn ask_replay(&mut self, attempt: u8, out: &mut Vec<Effect>) {
        self.next_id += 1;
        self.overflowed = false;
        self.live.asked();
        self.session = Some(Session {
            id: self.next_id,
            attempt,
            began_at: self.cursor,
            barrier: self.fence.is_settling(),
            expects: self.cursor,
            last: None,
            batches: 0,
            is_trial: !self.can_replay(),
        });
        let from = self.cursor.map_or(0, |c| c.seq);
        out.push(Effect::Replay { session: self.next_id, from, attempt });
    }

    /// A hole of unknown size, perhaps of none.
    pub(super) fn no_batch(&mut self, out: &mut Vec<Effect>) {
        if !self.can_replay() {
            self.missed(out);
            self.cursor = None;
        } else if self.connected {
            self.complete_by_replay(out);
        }
    }

    /// A publisher drops batches for a slow reader, and the hole shows with the next one only,
    /// which an idle engine does not publish.
    pub(super) fn catch_up(&mut self, out: &mut Vec<Effect>) {
        // One that runs may be older than what is missing, unless beliefs wait for it already.
        let waits = self.session.is_some() && self.incomplete;
        if self.connected && self.can_replay() && !waits {
            self.complete_by_replay(out);
        } else if self.connected && !self.can_replay() {
            self.late(out);
        }
    }

    /// A replay that was given up is tried again. Only one that begins with the last batch taken
    /// counts: until then live batches are taken as if there were none.
    pub(super) fn tick_replay(&mut self, out: &mut Vec<Effect>) {
        let Some(ticks) = &mut self.given_up_for else { return };
        *ticks += 1;
        if *ticks >= RETRY_TICKS && self.session.is_none() && self.cursor.is_some() {
            *ticks = 0;
            self.ask_replay(0, out);
        }
    }

    pub(super) fn replay_batch(&mut self, session: u64, head: Head, out: &mut Vec<Effect>) {
        let Some(current) = self.session.as_mut().filter(|s| s.id == session) else { return };
        let expected = current.expects.take();
        if current.is_trial {
            if expected != Some(Cursor { seq: head.seq, digest: head.digest }) {
                self.session = None;
                return;
            }
            current.is_trial = false;
            self.given_up_for = None;
        }
        match expected {
            Some(cursor) if head.seq > cursor.seq => return self.history_gone(out),
            Some(cursor) if head.seq < cursor.seq => return self.fail(out),
            Some(_) => {}
            None => match current.last {
                Some(last) if head.seq <= last => return,
                Some(last) if head.seq > last + 1 && !current.shows_losses() => {
                    return self.hole(out);
                }
                Some(last) if head.seq > last + 1 => {
                    self.gap_open = false;
                    self.missed(out);
                }
                _ => {}
            },
        }
        let Some(current) = self.session.as_mut() else { return };
        current.last = Some(head.seq);
        current.batches += 1;
        if self.contradicts(head) {
            return self.new_life(out);
        }
        let came_live = self.parked.contains_key(&head.seq);
        self.linked |= came_live;
        if self.cursor.is_none_or(|c| head.seq > c.seq) {
            let origin = if came_live { Origin::Live } else { Origin::Replay };
            self.brought(head);
            self.take(head, origin, out);
        }
    }

    /// Whether a batch of that number was met with other bytes.
    pub(super) fn contradicts(&self, head: Head) -> bool {
        let taken = self.recent.get(&head.seq).is_some_and(|digest| *digest != head.digest);
        taken || self.parked.get(&head.seq).is_some_and(|held| held.digest != head.digest)
    }

    pub(super) fn replay_end(&mut self, session: u64, out: &mut Vec<Effect>) {
        let Some(current) = self.session.take_if(|s| s.id == session) else { return };
        if current.is_trial {
            return;
        }
        if current.expects.is_some() {
            // The engine has fewer batches than were taken: it began anew.
            return self.new_life(out);
        }
        if current.batches > WHOLE_MAX {
            return self.ask_replay(0, out);
        }
        self.live.checked(true);
        self.live.replay_ended(current.last.max(self.cursor.map(|c| c.seq)));
        if current.barrier {
            self.barrier_ended(current.last, out);
        }
        if self.linked {
            self.take_parked(out);
        }
        if !self.parked.is_empty() || self.overflowed {
            return self.again(&current, out);
        }
        self.caught_up(out);
        self.seek_barrier(out);
    }

    /// The replay leaves batches out, which the live connection may not bring either.
    fn hole(&mut self, out: &mut Vec<Effect>) {
        self.incomplete = true;
        self.fail(out);
    }

    pub(super) fn replay_failed(&mut self, session: u64, out: &mut Vec<Effect>) {
        if self.session.as_ref().is_some_and(|s| s.id == session) {
            self.fail(out);
        }
    }

    /// The session came to nothing; what it brought so far stays, since it was contiguous.
    fn fail(&mut self, out: &mut Vec<Effect>) {
        let Some(current) = self.session.take() else { return };
        if current.is_trial {
            return;
        }
        self.live.checked(false);
        if self.incomplete {
            return self.again(&current, out);
        }
        if self.live.failed_checks() >= u32::from(self.config.attempts_max) {
            if !self.linked {
                return self.give_up(out);
            }
            self.given_up_for = Some(0);
        }
        self.take_parked(out);
        self.caught_up(out);
        self.barrier_failed(out);
    }

    fn again(&mut self, failed: &Session, out: &mut Vec<Effect>) {
        let attempt = if failed.began_at == self.cursor { failed.attempt + 1 } else { 0 };
        if attempt < self.config.attempts_max {
            self.ask_replay(attempt, out);
        } else {
            self.give_up(out);
        }
    }

    /// The replay's buffer begins after the last batch taken: nothing ties the two together.
    fn history_gone(&mut self, out: &mut Vec<Effect>) {
        self.break_off(LossCause::Gap, out);
        out.push(Effect::Note(Note::GapNotClosed));
        self.gap_open = false;
        self.linked = false;
        self.complete_by_replay(out);
    }

    /// Goes on without replay.
    fn give_up(&mut self, out: &mut Vec<Effect>) {
        self.gap_open = false;
        out.push(Effect::Note(Note::GapNotClosed));
        if !self.linked {
            // What the connection still holds may be older than all that was replayed, or another
            // life's. What a new connection brings is neither.
            self.give_up_next = true;
            return self.start_over(LossCause::Gap, out);
        }
        let parked = mem::take(&mut self.parked);
        self.break_off(LossCause::Gap, out);
        self.given_up_for = Some(0);
        for head in parked.into_values() {
            if self.cursor.is_some_and(|c| head.seq != c.seq + 1) {
                self.demote(TierSet::ALL, Belief::Unknown, LossCause::Gap, out);
            }
            self.take(head, Origin::Live, out);
        }
        self.caught_up(out);
        self.seek_barrier(out);
    }

    /// Takes the parked batches that are next in order and drops those already taken.
    fn take_parked(&mut self, out: &mut Vec<Effect>) {
        while let Some((&seq, &head)) = self.parked.first_key_value() {
            match self.cursor {
                Some(c) if seq <= c.seq => out.push(Effect::Unpark { through: seq }),
                Some(c) if seq > c.seq + 1 => return,
                _ => self.take(head, Origin::Live, out),
            }
            self.parked.remove(&seq);
        }
    }

    fn caught_up(&mut self, out: &mut Vec<Effect>) {
        self.incomplete = false;
        let is_history = mem::replace(&mut self.is_history, false);
        match mem::take(&mut self.past_clears) {
            0 => {}
            clears if is_history || mem::take(&mut self.awaits_live) => {
                out.push(Effect::Note(Note::ClearPast { clears }))
            }
            clears => out.push(Effect::Note(Note::ClearUnexplained { clears })),
        }
        if mem::take(&mut self.gap_open) {
            out.push(Effect::Note(Note::GapClosed));
        }
    }
}
