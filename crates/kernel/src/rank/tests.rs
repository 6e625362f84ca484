//! One test a behaviour: a stream of small batches in, what is believed of each block out.
//!
//! The shell here is the least that carries out effects: a map of proven blocks. The hunt for what
//! nobody thought of is `crates/index/tests/adversary.rs`.

mod alive;
mod kept;
mod unreplayed;

use std::collections::{BTreeMap, BTreeSet};
use std::string::{String, ToString};
use std::vec::Vec;

use super::*;
use crate::vocab::{PerTier, Tier};

/// What a batch says.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Say {
    Store(&'static str),
    StoreCpu(&'static str),
    Remove(&'static str),
    Clear,
}
use Say::{Clear, Remove, Store, StoreCpu};

#[derive(Clone)]
struct Batch {
    head: Head,
    says: Vec<Say>,
}

/// A batch of life `life`.
fn batch(life: u8, seq: u64, says: &[Say]) -> Batch {
    let digest = u128::from(life) << 64 | u128::from(seq);
    let clears = says.iter().filter(|s| **s == Clear).count() as u32;
    Batch { head: Head { seq, digest, clears, marker: None, readable: true }, says: says.to_vec() }
}

struct Shell {
    rank: Rank,
    proven: BTreeSet<(Tier, &'static str)>,
    suspended: bool,
    aside: TierSet,
    parked: BTreeMap<u64, Batch>,
    /// The replay last asked for: session and first batch.
    asked: Option<(u64, u64)>,
    marker: Option<u64>,
    reconnects: usize,
    notes: Vec<Note>,
}

impl Shell {
    fn new(replay: bool) -> Self {
        Self::with(Config { replay, tie: false, parked_max: 4, attempts_max: 2 })
    }

    /// One whose connections have to be tied by a marker.
    fn tying(replay: bool) -> Self {
        Self::with(Config { replay, tie: true, parked_max: 4, attempts_max: 2 })
    }

    fn with(config: Config) -> Self {
        let mut shell = Self {
            rank: Rank::new(config),
            proven: BTreeSet::new(),
            suspended: false,
            aside: TierSet::NONE,
            parked: BTreeMap::new(),
            asked: None,
            marker: None,
            reconnects: 0,
            notes: Vec::new(),
        };
        shell.feed(Event::Life { is_told: true });
        shell.feed(Event::Connected);
        shell
    }

    /// Connected, and caught up with `history`.
    fn started(history: &[Batch]) -> Self {
        let mut shell = Self::new(true);
        shell.answer(history);
        shell
    }

    fn feed(&mut self, event: Event) {
        let effects = self.rank.step(event);
        self.carry_out(effects, None);
    }

    fn live(&mut self, batch: &Batch) {
        let effects = self.rank.step(Event::Live(batch.head));
        self.carry_out(effects, Some(batch));
    }

    /// Answers the replay that was asked for from `published`, with the end marker.
    fn answer(&mut self, published: &[Batch]) {
        let (session, from) = self.asked.take().expect("a replay was asked for");
        self.bring(session, from, published);
        self.feed(Event::ReplayEnd { session });
    }

    /// Answers likewise for as long as replays are asked for.
    fn answer_all(&mut self, published: &[Batch]) {
        while self.asked.is_some() {
            self.answer(published);
        }
    }

    fn bring(&mut self, session: u64, from: u64, published: &[Batch]) {
        for batch in published.iter().filter(|b| b.head.seq >= from) {
            let effects = self.rank.step(Event::ReplayBatch { session, head: batch.head });
            self.carry_out(effects, Some(batch));
        }
    }

    fn carry_out(&mut self, effects: Vec<Effect>, fed: Option<&Batch>) {
        for effect in effects {
            match effect {
                Effect::Take(take) => {
                    let fed = fed.filter(|b| b.head.seq == take.seq).cloned();
                    let batch =
                        fed.or_else(|| self.parked.remove(&take.seq)).expect("the batch is there");
                    self.apply(&batch.says, take);
                }
                Effect::Park { seq } => {
                    self.parked.insert(seq, fed.expect("a batch was fed").clone());
                }
                Effect::Unpark { through } => self.parked.retain(|seq, _| *seq > through),
                Effect::Demote { tiers, .. } => {
                    self.proven.retain(|(t, _)| !tiers.has(*t));
                    self.aside = self.aside.without(tiers);
                }
                Effect::SetAside { tiers } => self.aside = self.aside.with(tiers),
                Effect::Reinstate { tiers } => self.aside = self.aside.without(tiers),
                Effect::Suspend => self.suspended = true,
                Effect::Restore => self.suspended = false,
                Effect::Replay { session, from, .. } => self.asked = Some((session, from)),
                Effect::Reconnect => self.reconnects += 1,
                Effect::Mark { id } => self.marker = Some(id),
                Effect::Note(note) => self.notes.push(note),
                Effect::Ignore { .. } | Effect::ForgetIdentities => {}
            }
        }
    }

    fn apply(&mut self, says: &[Say], take: Take) {
        for say in says {
            match say {
                Store(b) => self.store(Tier::Gpu, b, take),
                StoreCpu(b) => self.store(Tier::Cpu, b, take),
                Remove(b) => drop(self.proven.remove(&(Tier::Gpu, *b))),
                Clear => {
                    let is_cleared = |t: &Tier| take.clear.get(*t).is_some();
                    self.proven.retain(|(t, _)| !is_cleared(t));
                    self.aside =
                        self.aside.without(TierSet::ALL.iter().filter(is_cleared).collect());
                }
            }
        }
    }

    fn store(&mut self, tier: Tier, block: &'static str, take: Take) {
        if take.gain.has(tier) || self.aside.has(tier) {
            self.proven.insert((tier, block));
        }
    }

    /// What may be claimed now, as words: `A` on the gpu, `A@cpu` on the cpu.
    fn warm(&self) -> String {
        if self.suspended {
            return "suspended".to_string();
        }
        let word = |(tier, block): &(Tier, &str)| match tier {
            Tier::Gpu => block.to_string(),
            other => std::format!("{block}@{other}"),
        };
        self.proven
            .iter()
            .filter(|(t, _)| !self.aside.has(*t))
            .map(word)
            .collect::<Vec<_>>()
            .join(" ")
    }

    /// A reset of the gpu that the engine says it did.
    fn reset(&mut self) {
        self.feed(Event::Intent { tiers: TierSet::GPU, clear: Some(local_reset()) });
        self.feed(Event::Outcome { kv: local_reset(), clears: true });
    }
}

fn local_reset() -> PerTier<Disposition> {
    PerTier { gpu: Disposition::Forgotten, ..PerTier::all(Disposition::Preserved) }
}

fn all(kv: Disposition) -> PerTier<Disposition> {
    PerTier::all(kv)
}

/// Three batches that store A, B and C.
fn abc() -> Vec<Batch> {
    [(0, "A"), (1, "B"), (2, "C")].map(|(seq, b)| batch(1, seq, &[Store(b)])).to_vec()
}

#[test]
fn what_a_replay_brings_at_the_start_is_believed_once_it_is_whole() {
    let mut shell = Shell::new(true);
    assert_eq!(shell.warm(), "suspended");
    let (session, from) = shell.asked.take().expect("a replay from the start");
    assert_eq!(from, 0);
    assert_eq!(shell.marker, None, "the shell can send none");
    shell.bring(session, 0, &abc());
    assert_eq!(shell.warm(), "suspended");
    shell.feed(Event::ReplayEnd { session });
    assert_eq!(shell.warm(), "A B C");
}

#[test]
fn a_restart_in_place_ends_the_epoch_without_replay() {
    let mut shell = Shell::new(false);
    for b in abc() {
        shell.live(&b);
    }
    assert_eq!(shell.warm(), "A B C");
    shell.live(&batch(2, 0, &[Store("Z")]));
    assert_eq!(shell.warm(), "Z");
    assert!(shell.notes.contains(&Note::NewLife));
    shell.live(&batch(3, 0, &[]));
    assert_eq!(shell.warm(), "");
}

#[test]
fn a_restart_in_place_ends_the_epoch_with_replay() {
    let mut shell = Shell::started(&abc());
    let fresh = [batch(2, 0, &[Store("Z")])];
    shell.live(&fresh[0]);
    assert_eq!(shell.warm(), "suspended");
    shell.answer_all(&fresh);
    // The connection did not end, so nothing says that the batch and the replay are of one life
    // until they match.
    assert_eq!(shell.warm(), "Z");
}

#[test]
fn a_repeated_batch_is_no_restart() {
    let mut shell = Shell::new(false);
    for b in abc() {
        shell.live(&b);
    }
    shell.live(&abc()[1]);
    assert_eq!(shell.warm(), "A B C");
}

/// One that is too old to be remembered is taken for another life's.
#[test]
fn a_batch_is_remembered_until_as_many_came_after_it_as_are_kept() {
    let last = RECENT as u64 + 7;
    for (age, expected) in [(RECENT as u64 - 1, "A"), (RECENT as u64, "")] {
        let mut shell = Shell::new(false);
        (0..last).for_each(|seq| shell.live(&batch(1, seq, &[])));
        shell.live(&batch(1, last, &[Store("A")]));
        shell.live(&batch(1, last - age, &[]));
        assert_eq!((shell.warm().as_str(), shell.notes.is_empty()), (expected, expected == "A"));
    }
}

#[test]
fn a_late_batch_is_dropped_with_what_it_may_have_taken_and_is_no_restart() {
    let mut shell = Shell::new(false);
    shell.live(&batch(1, 100, &[Store("A")]));
    shell.live(&batch(1, 102, &[Store("B")]));
    shell.live(&batch(1, 101, &[Store("L")]));
    assert_eq!(shell.warm(), "");
    assert_eq!(shell.rank.cursor(), Some(102));
    assert!(!shell.notes.contains(&Note::NewLife), "{:?}", shell.notes);
    shell.live(&batch(1, 103, &[Store("C")]));
    assert_eq!(shell.warm(), "C");
}

#[test]
fn a_batch_older_than_a_late_one_can_be_is_of_another_life() {
    let mut shell = Shell::new(false);
    (0..=RECENT as u64).for_each(|seq| shell.live(&batch(1, seq, &[])));
    shell.live(&batch(2, 0, &[Store("Z")]));
    assert_eq!((shell.warm().as_str(), shell.notes.contains(&Note::NewLife)), ("Z", true));
}

#[test]
fn two_batches_of_one_number_on_one_connection_are_of_two_lives() {
    let mut shell = Shell::started(&abc());
    let parked = batch(1, 3, &[Store("D")]);
    shell.live(&parked);
    shell.live(&parked);
    assert!(!shell.notes.contains(&Note::NewLife), "the same batch again");
    shell.live(&batch(2, 3, &[Store("Z")]));
    assert!(shell.notes.contains(&Note::NewLife));
    assert_eq!(shell.warm(), "suspended");
}

#[test]
fn a_batch_that_an_earlier_connection_brought_shows_nothing_of_a_later_one() {
    let mut history = abc();
    let mut shell = Shell::started(&history);
    history.push(batch(1, 3, &[Store("D")]));
    shell.live(&history[3]);
    shell.feed(Event::Disconnected);
    shell.feed(Event::Connected);
    shell.answer_all(&history);
    assert_eq!(shell.warm(), "A B C D");
    // The next number, and another life's: the connection is still the old life's, for all that is
    // known.
    shell.live(&batch(2, 4, &[Store("Z")]));
    assert_eq!(shell.warm(), "suspended");
}

#[test]
fn a_gap_suspends_until_replay_closes_it() {
    let mut history = abc();
    let mut shell = Shell::started(&history);
    history.extend([batch(1, 3, &[Remove("B")]), batch(1, 4, &[Store("E")])]);
    shell.live(&batch(1, 5, &[Store("F")]));
    assert_eq!(shell.warm(), "suspended");
    history.push(batch(1, 5, &[Store("F")]));
    shell.answer_all(&history);
    assert_eq!(shell.warm(), "A C E F");
    assert!(
        shell.notes.is_empty(),
        "an unlinked connection is checked before a gap is seen: {:?}",
        shell.notes
    );
    history.push(batch(1, 6, &[Remove("A")]));
    history.push(batch(1, 7, &[Store("H")]));
    shell.live(&history[7]);
    assert!(shell.notes.contains(&Note::Gap { lost: 1 }));
    shell.answer_all(&history);
    assert_eq!(shell.warm(), "C E F H");
    assert!(shell.notes.contains(&Note::GapClosed));
}

#[test]
fn what_nobody_missed_is_asked_for_where_a_replay_can_tell() {
    let mut history = abc();
    let mut shell = Shell::started(&history);
    shell.live(&history[2].clone());
    history.push(batch(1, 3, &[Remove("B"), Store("D")]));
    shell.feed(Event::CatchUp);
    shell.feed(Event::CatchUp);
    assert_eq!(shell.warm(), "suspended", "until it is known");
    shell.answer(&history);
    assert_eq!((shell.warm().as_str(), shell.asked), ("A C D", None));
    shell.feed(Event::CatchUp);
    shell.answer_all(&history);
    assert_eq!(shell.warm(), "A C D", "nothing was missing");

    let mut without = Shell::new(false);
    without.live(&batch(1, 0, &[Store("A")]));
    without.feed(Event::CatchUp);
    assert_eq!(without.warm(), "A");
}

#[test]
fn a_replay_that_was_asked_for_before_something_was_missed_counts_for_nothing() {
    let mut history = abc();
    let mut shell = Shell::started(&history);
    shell.live(&history[2]);
    shell.feed(Event::Late);
    let (earlier, from) = shell.asked.take().expect("asked");
    history.push(batch(1, 3, &[Remove("A")]));
    shell.feed(Event::CatchUp);
    shell.bring(earlier, from, &history[..3]);
    shell.feed(Event::ReplayEnd { session: earlier });
    assert_eq!(shell.warm(), "suspended");
    shell.answer(&history);
    assert_eq!(shell.warm(), "B C");
}

#[test]
fn a_message_that_is_no_batch_is_a_hole() {
    let mut without = Shell::new(false);
    without.live(&batch(1, 0, &[Store("A")]));
    without.feed(Event::NoBatch);
    assert_eq!(without.warm(), "");
    // It may have been any number of batches.
    without.live(&batch(1, 4, &[Store("B")]));
    assert_eq!((without.warm().as_str(), &without.notes[..]), ("B", &[Note::GapNotClosed][..]));

    let mut history = abc();
    let mut shell = Shell::started(&history);
    shell.live(&history[2]);
    shell.feed(Event::NoBatch);
    assert_eq!(shell.warm(), "suspended");
    history.push(batch(1, 3, &[Remove("A")]));
    shell.answer_all(&history);
    assert_eq!(shell.warm(), "B C");
}

#[test]
fn a_gap_without_replay_makes_everything_before_it_unknown() {
    let mut shell = Shell::new(false);
    shell.live(&batch(1, 10, &[Store("A")]));
    shell.live(&batch(1, 11, &[Store("B")]));
    shell.live(&batch(1, 15, &[Store("C")]));
    assert_eq!(shell.warm(), "C");
    assert!(shell.notes.contains(&Note::Gap { lost: 3 }));
}

#[test]
fn a_replay_never_resurrects_what_a_later_live_batch_removed() {
    let history = [batch(1, 6, &[Store("A")])];
    let mut shell = Shell::started(&history);
    let gap = batch(1, 7, &[Store("X")]);
    let live = batch(1, 8, &[Remove("X")]);
    shell.live(&live);
    let (session, _) = shell.asked.take().expect("asked");
    shell.feed(Event::ReplayFailed { session });
    assert_eq!(shell.warm(), "suspended");
    shell.answer_all(&[history[0].clone(), gap, live]);
    assert_eq!(shell.warm(), "A");
}

#[test]
fn parked_batches_past_the_limit_are_dropped_not_applied_out_of_order() {
    let mut history = abc();
    let mut shell = Shell::started(&history);
    history.push(batch(1, 3, &[Store("D")]));
    for seq in 4..10 {
        history.push(batch(1, seq, &[Remove("A")]));
        shell.live(&history[seq as usize].clone());
    }
    assert!(shell.parked.len() <= 4);
    shell.answer_all(&history);
    assert_eq!(shell.warm(), "B C D");
}

/// The replay was answered before the last of them was published.
#[test]
fn batches_that_were_dropped_for_want_of_room_are_asked_for_again() {
    let mut history = abc();
    let mut shell = Shell::started(&history);
    history.extend((3..8).map(|seq| batch(1, seq, &[])));
    history.push(batch(1, 8, &[Remove("A")]));
    history[4..].iter().for_each(|batch| shell.live(batch));
    assert!(shell.parked.is_empty());
    shell.answer(&history[..8]);
    assert_eq!(shell.warm(), "suspended");
    shell.answer_all(&history);
    assert_eq!(shell.warm(), "B C");
}

#[test]
fn a_truncated_replay_keeps_what_was_whole_and_asks_again_from_there() {
    let history: Vec<_> = (0..10).map(|s| batch(1, s, &[Store("A")])).collect();
    let mut shell = Shell::new(true);
    let (session, _) = shell.asked.take().expect("asked");
    shell.bring(session, 0, &history[..2]);
    shell.feed(Event::ReplayFailed { session });
    assert_eq!(shell.warm(), "suspended");
    assert_eq!(shell.asked.expect("again").1, 1, "from the last good batch, which has to match");
    shell.answer_all(&history);
    assert_eq!(shell.warm(), "A");
    assert_eq!(shell.rank.cursor(), Some(9));
}

#[test]
fn a_replay_with_a_hole_does_not_count() {
    let history = abc();
    let mut shell = Shell::new(true);
    let (session, _) = shell.asked.take().expect("asked");
    shell.bring(session, 0, &[history[0].clone(), history[2].clone()]);
    assert_eq!(shell.warm(), "suspended");
    shell.answer_all(&history);
    assert_eq!(shell.warm(), "A B C");
}

#[test]
fn a_replay_that_repeats_a_batch_is_whole() {
    let history = abc();
    let mut shell = Shell::new(true);
    let (session, _) = shell.asked.take().expect("asked");
    let brought = [0, 1, 0, 2].map(|seq: usize| history[seq].clone());
    shell.bring(session, 0, &brought);
    shell.feed(Event::ReplayEnd { session });
    assert_eq!((shell.warm().as_str(), shell.asked), ("A B C", None));
}

#[test]
fn a_replay_that_begins_before_the_batch_that_has_to_match_does_not_count() {
    let history = abc();
    let mut shell = Shell::started(&history);
    shell.feed(Event::Disconnected);
    shell.feed(Event::Connected);
    let (session, from) = shell.asked.take().expect("asked");
    assert_eq!(from, 2);
    shell.bring(session, 1, &history[..2]);
    shell.feed(Event::ReplayEnd { session });
    assert_eq!(shell.warm(), "suspended");
    shell.answer(&history);
    assert_eq!(shell.warm(), "A B C");
}

#[test]
fn a_replay_of_up_to_500_batches_is_whole() {
    for (count, is_whole) in [(500, true), (501, false)] {
        let history: Vec<_> = (0..count).map(|seq| batch(1, seq, &[])).collect();
        let mut shell = Shell::new(true);
        shell.answer(&history);
        assert_eq!(shell.asked.is_none(), is_whole, "{count}");
    }
}

#[test]
fn a_long_replay_is_asked_for_its_tail_again() {
    let history: Vec<_> = (0..1200).map(|s| batch(1, s, &[Store("A")])).collect();
    let mut shell = Shell::new(true);
    // The end marker came although the last two hundred were dropped.
    shell.answer(&history[..1000]);
    assert_eq!(shell.warm(), "suspended");
    shell.answer(&history);
    assert_eq!(shell.warm(), "A");
    assert_eq!(shell.rank.cursor(), Some(1199));
}

#[test]
fn a_restart_that_overtook_the_last_sequence_is_told_by_its_bytes() {
    let mut shell = Shell::started(&abc());
    let other: Vec<_> = (0..6).map(|s| batch(2, s, &[Store("Z")])).collect();
    shell.feed(Event::Disconnected);
    assert_eq!(shell.warm(), "suspended");
    shell.feed(Event::Connected);
    // Contiguous with the last batch taken, and of another life.
    shell.live(&other[3]);
    shell.answer_all(&other);
    assert_eq!(shell.warm(), "Z");
}

#[test]
fn a_restarted_engine_with_nothing_published_looks_like_nothing_missed_and_is_not() {
    let mut shell = Shell::started(&abc());
    shell.feed(Event::Disconnected);
    shell.feed(Event::Connected);
    shell.answer_all(&[]);
    assert_eq!(shell.warm(), "");
}

#[test]
fn the_same_life_behind_a_new_connection_keeps_its_beliefs() {
    let mut shell = Shell::started(&abc());
    shell.feed(Event::Disconnected);
    shell.feed(Event::Connected);
    shell.answer_all(&abc());
    assert_eq!(shell.warm(), "A B C");
}

#[test]
fn a_replay_answered_by_a_later_life_than_the_live_connection_is_not_mixed_with_it() {
    let mut shell = Shell::new(true);
    // The live connection is the first life's; by the time the replay is served, a second one
    // answers.
    let second: Vec<_> = (0..3).map(|s| batch(2, s, &[Store("Z")])).collect();
    shell.live(&batch(1, 3, &[Store("A")]));
    shell.answer_all(&second);
    assert_ne!(shell.warm(), "A Z");
    assert!(!shell.proven.contains(&(Tier::Gpu, "Z")) || !shell.proven.contains(&(Tier::Gpu, "A")));
}

#[test]
fn history_beyond_the_buffer_is_not_closed() {
    let mut shell = Shell::started(&abc());
    let late: Vec<_> = (30..33).map(|s| batch(1, s, &[Store("L")])).collect();
    shell.live(&late[2]);
    shell.answer_all(&late);
    assert_eq!(shell.warm(), "L");
    assert!(shell.notes.contains(&Note::GapNotClosed));
}

#[test]
fn a_store_published_before_the_action_and_delivered_after_it_stays_cold() {
    let history = abc();
    let mut shell = Shell::started(&history);
    let late = batch(1, 3, &[Store("L")]);
    shell.reset();
    assert_eq!(shell.warm(), "");
    let published = [history, [late.clone()].to_vec()].concat();
    shell.live(&late);
    shell.answer_all(&published);
    assert_eq!(shell.warm(), "");
    assert!(shell.rank.is_settled());
}

#[test]
fn beliefs_are_cold_before_the_call_leaves() {
    let mut shell = Shell::started(&[batch(1, 0, &[Store("A"), StoreCpu("A")])]);
    shell.feed(Event::Intent { tiers: TierSet::GPU, clear: Some(local_reset()) });
    assert_eq!(shell.warm(), "A@cpu");
    shell.feed(Event::Intent { tiers: TierSet::ALL, clear: None });
    assert_eq!(shell.warm(), "");
}

#[test]
fn an_action_that_touches_nothing_demotes_nothing() {
    let mut shell = Shell::started(&abc());
    shell.feed(Event::Intent { tiers: TierSet::NONE, clear: None });
    shell.feed(Event::Outcome { kv: all(Disposition::Preserved), clears: false });
    assert_eq!(shell.warm(), "A B C");
    assert!(shell.rank.is_settled());
}

#[test]
fn a_clear_that_comes_with_the_first_request_after_the_wake_belongs_to_the_action() {
    let mut history = abc();
    let mut shell = Shell::started(&history);
    shell.reset();
    shell.answer_all(&history);
    assert!(shell.rank.is_settled());
    history.push(batch(1, 3, &[Clear, Store("N")]));
    shell.live(&history[3]);
    shell.answer_all(&history);
    assert_eq!(shell.warm(), "N");
    assert!(!shell.notes.iter().any(|n| matches!(n, Note::ClearUnexplained { .. })));
}

#[test]
fn a_clear_takes_what_its_own_batch_stored_before_it() {
    let mut history = abc();
    let mut shell = Shell::started(&history);
    shell.live(&history[2]);
    shell.reset();
    shell.answer_all(&history);
    history.push(batch(1, 3, &[Store("X"), Clear, Store("N")]));
    shell.live(&history[3]);
    assert_eq!(shell.warm(), "N");
}

#[test]
fn a_batch_is_taken_with_what_its_clears_do_and_whether_they_are_faks_own() {
    let take = |shell: &mut Shell, batch: &Batch| {
        let effects = shell.rank.step(Event::Live(batch.head));
        let taken = |effect: &Effect| match effect {
            Effect::Take(take) => Some((take.clear, take.explained)),
            _ => None,
        };
        effects.iter().find_map(taken).expect("it is taken")
    };
    let gone = PerTier { gpu: Some(Belief::Gone), ..PerTier::all(None) };
    let unknown = PerTier { gpu: Some(Belief::Gone), ..PerTier::all(Some(Belief::Unknown)) };
    let mut shell = Shell::new(false);
    assert_eq!(take(&mut shell, &batch(1, 0, &[])), (PerTier::all(None), true));
    assert_eq!(take(&mut shell, &batch(1, 1, &[Clear])), (unknown, false), "somebody's");
    shell.reset();
    assert_eq!(take(&mut shell, &batch(1, 2, &[Clear])), (gone, true), "fak's own");
    assert_eq!(take(&mut shell, &batch(1, 3, &[Clear])), (unknown, false), "perhaps fak's own");
}

#[test]
fn a_wake_between_the_sleep_and_its_clear_does_not_disown_the_clear() {
    let mut history = [batch(1, 0, &[Store("A"), StoreCpu("A")])].to_vec();
    let mut shell = Shell::started(&history);
    // A sleep that keeps the tier, then a wake, which publishes nothing of its own.
    shell.reset();
    shell.answer_all(&history);
    let kv = PerTier { gpu: Disposition::Unknown, ..all(Disposition::Preserved) };
    shell.feed(Event::Intent { tiers: TierSet::GPU, clear: None });
    shell.feed(Event::Outcome { kv, clears: false });
    shell.answer_all(&history);
    history.push(batch(1, 1, &[Clear, Store("N")]));
    shell.live(&history[1]);
    shell.answer_all(&history);
    assert_eq!(shell.warm(), "N A@cpu");
    assert!(!shell.notes.iter().any(|n| matches!(n, Note::ClearUnexplained { .. })));
}

#[test]
fn an_earlier_clear_of_somebody_else_does_not_open_the_fence() {
    let mut history = abc();
    let mut shell = Shell::started(&history);
    // Somebody's reset, a store after it, then fak's reset took that store; only the first batch is
    // out yet.
    shell.reset();
    history.push(batch(1, 3, &[Clear, Store("X")]));
    shell.live(&history[3]);
    shell.answer_all(&history);
    // Whose clear it was is not sure yet.
    assert_eq!(shell.warm(), "suspended");
    // Fak's own clear, and what really came after it.
    history.push(batch(1, 4, &[Clear, Store("Y")]));
    shell.live(&history[4]);
    shell.answer_all(&history);
    assert_eq!(shell.warm(), "Y");
}

#[test]
fn one_quiet_look_is_no_barrier_two_are() {
    let mut history = abc();
    let mut shell = Shell::started(&history);
    shell.reset();
    shell.answer(&history);
    assert!(!shell.rank.is_settled());
    // A batch made before the action was still queued in the publisher.
    history.push(batch(1, 3, &[Clear, Store("X")]));
    shell.answer(&history);
    assert!(!shell.rank.is_settled());
    shell.answer(&history);
    assert!(shell.rank.is_settled());
    assert_eq!(shell.warm(), "suspended");
}

#[test]
fn without_replay_a_marker_settles_the_action() {
    let mut shell = Shell::new(false);
    for b in abc() {
        shell.live(&b);
    }
    shell.reset();
    shell.live(&batch(1, 3, &[Clear, Store("X")]));
    assert_eq!(shell.warm(), "suspended");
    let mut marked = batch(1, 4, &[Clear, Store("M")]);
    marked.head.marker = shell.marker;
    assert!(shell.marker.is_some());
    shell.live(&marked);
    shell.live(&batch(1, 5, &[Store("Y")]));
    assert_eq!(shell.warm(), "Y");
}

#[test]
fn a_marker_of_an_earlier_action_settles_nothing() {
    let mut shell = Shell::new(false);
    shell.reset();
    let first = shell.marker.take();
    shell.reset();
    let mut marked = batch(1, 0, &[Store("M")]);
    marked.head.marker = first;
    shell.live(&marked);
    assert!(!shell.rank.is_settled());
}

#[test]
fn a_busy_engine_is_asked_for_a_marker() {
    let mut history = abc();
    let mut shell = Shell::started(&history);
    shell.reset();
    for seq in 3..12 {
        if shell.asked.is_none() {
            break;
        }
        history.push(batch(1, seq, &[Store("T")]));
        shell.answer(&history);
    }
    assert_eq!(history.len(), 3 + 4, "after so many replays");
    assert!(shell.marker.is_some());
    assert!(!shell.rank.is_settled());
    // A quiet moment may come before the marker does.
    shell.feed(Event::Tick);
    shell.answer(&history);
    assert!(shell.rank.is_settled());
}

#[test]
fn an_engine_whose_replay_fails_is_asked_for_a_marker() {
    let history = abc();
    let mut shell = Shell::started(&history);
    shell.live(&history[2]);
    shell.reset();
    let (session, _) = shell.asked.take().expect("asked");
    shell.feed(Event::ReplayFailed { session });
    assert_eq!((shell.asked, shell.marker.is_some()), (None, true));
}

#[test]
fn a_replay_that_was_asked_for_before_the_outcome_is_no_quiet_look() {
    let history = abc();
    let mut shell = Shell::started(&history);
    shell.live(&history[2]);
    shell.feed(Event::Late);
    let asked = shell.asked;
    assert!(asked.is_some());
    shell.reset();
    assert_eq!(shell.asked, asked, "it runs on");
    shell.answer(&history);
    shell.answer(&history);
    assert!(!shell.rank.is_settled());
    shell.answer(&history);
    assert!(shell.rank.is_settled());
}

#[test]
fn a_quiet_look_at_another_life_counts_for_nothing() {
    let mut shell = Shell::started(&abc());
    shell.reset();
    shell.answer(&abc());
    let other: Vec<_> = (0..3).map(|seq| batch(2, seq, &[Store("Z")])).collect();
    let (session, from) = shell.asked.take().expect("asked");
    shell.bring(session, from, &other);
    assert!(shell.notes.contains(&Note::NewLife));
    shell.answer(&other);
    assert!(!shell.rank.is_settled());
    shell.answer(&other);
    assert!(shell.rank.is_settled());
}

#[test]
fn an_action_on_a_worker_that_is_not_connected_asks_for_nothing_until_it_is() {
    let mut shell = Shell::started(&abc());
    shell.feed(Event::Disconnected);
    shell.reset();
    shell.feed(Event::Tick);
    assert_eq!((shell.asked, shell.marker), (None, None));
    shell.feed(Event::Connected);
    assert!(shell.asked.is_some());
}

#[test]
fn a_replay_that_runs_is_not_asked_for_anew_with_every_tick() {
    let mut shell = Shell::started(&abc());
    shell.reset();
    let asked = shell.asked;
    assert!(asked.is_some());
    (0..3).for_each(|_| shell.feed(Event::Tick));
    assert_eq!(shell.asked, asked);
}

#[test]
fn a_clear_nobody_explains_leaves_the_connector_unknown() {
    let mut shell = Shell::new(false);
    shell.live(&batch(1, 0, &[Store("A"), StoreCpu("A")]));
    assert_eq!(shell.warm(), "A A@cpu");
    shell.live(&batch(1, 1, &[Clear]));
    assert_eq!(shell.warm(), "");
    assert!(shell.notes.contains(&Note::ClearUnexplained { clears: 1 }));
}

/// A reset leaves the connector's events pending, and they follow the gpu's in a batch.
#[test]
fn a_connector_store_in_the_batch_of_a_clear_may_be_of_a_block_that_the_clear_took() {
    let mut shell = Shell::new(false);
    shell.live(&batch(1, 0, &[Store("A")]));
    shell.live(&batch(1, 1, &[Clear, Store("N"), StoreCpu("A")]));
    assert_eq!(shell.warm(), "N");
    shell.live(&batch(1, 2, &[StoreCpu("N")]));
    assert_eq!(shell.warm(), "N N@cpu");
}

#[test]
fn a_reset_of_the_gpu_keeps_the_connector_though_the_clear_says_all() {
    let mut history = [batch(1, 0, &[Store("A"), StoreCpu("A")])].to_vec();
    let mut shell = Shell::started(&history);
    shell.reset();
    shell.answer_all(&history);
    history.push(batch(1, 1, &[Clear]));
    shell.live(&history[1]);
    shell.answer_all(&history);
    assert_eq!(shell.warm(), "A@cpu");
    // The next clear is somebody else's.
    shell.live(&batch(1, 2, &[Clear]));
    assert_eq!(shell.warm(), "");
}

#[test]
fn a_clear_taken_for_that_of_a_refused_reset_was_somebody_elses() {
    let mut shell = Shell::new(false);
    shell.live(&batch(1, 0, &[Store("A"), StoreCpu("A")]));
    shell.feed(Event::Intent { tiers: TierSet::GPU, clear: Some(local_reset()) });
    assert!(!shell.rank.is_contested());
    shell.live(&batch(1, 1, &[Clear]));
    assert_eq!((shell.warm().as_str(), shell.rank.is_contested()), ("suspended", true));
    let kv = PerTier { gpu: Disposition::Unknown, ..local_reset() };
    shell.feed(Event::Outcome { kv, clears: false });
    assert_eq!((shell.warm().as_str(), shell.rank.is_contested()), ("", false));
}

#[test]
fn of_two_clears_for_two_resets_one_was_somebody_elses_where_one_reset_was_refused() {
    let mut shell = Shell::new(false);
    shell.reset();
    shell.feed(Event::Intent { tiers: TierSet::GPU, clear: Some(local_reset()) });
    shell.live(&batch(1, 0, &[Clear, Clear]));
    let kv = PerTier { gpu: Disposition::Unknown, ..local_reset() };
    shell.feed(Event::Outcome { kv, clears: false });
    assert!(shell.notes.contains(&Note::ClearAmbiguous { clears: 1 }), "{:?}", shell.notes);
}

#[test]
fn a_doubt_closes_the_fence_and_one_that_leaves_all_preserved_does_not() {
    let mut shell = Shell::new(false);
    shell.live(&batch(1, 0, &[Store("A")]));
    shell.feed(Event::Distrust { kv: all(Disposition::Preserved) });
    assert_eq!((shell.warm().as_str(), shell.rank.is_settled()), ("A", true));
    shell.feed(Event::Distrust { kv: all(Disposition::Unknown) });
    assert_eq!((shell.warm().as_str(), shell.rank.is_settled()), ("", false));
    let mut marked = batch(1, 1, &[]);
    marked.head.marker = shell.marker;
    shell.live(&marked);
    assert!(shell.rank.is_settled());
}

#[test]
fn a_doubt_during_an_action_waits_for_the_actions_outcome() {
    let mut shell = Shell::new(false);
    shell.feed(Event::Intent { tiers: TierSet::GPU, clear: Some(local_reset()) });
    shell.feed(Event::Distrust { kv: all(Disposition::Unknown) });
    assert_eq!((shell.marker, shell.rank.is_settled()), (None, false));
    shell.feed(Event::Outcome { kv: local_reset(), clears: true });
    assert!(shell.marker.is_some());
}

#[test]
fn a_connector_store_that_was_pending_at_the_reset_stays_cold() {
    let history = [batch(1, 0, &[Store("A")])].to_vec();
    let mut shell = Shell::started(&history);
    let kv = all(Disposition::Forgotten);
    shell.feed(Event::Intent { tiers: TierSet::ALL, clear: Some(kv) });
    shell.feed(Event::Outcome { kv, clears: true });
    shell.answer_all(&history);
    let drains = batch(1, 1, &[Clear, Store("N"), StoreCpu("A")]);
    shell.live(&drains);
    shell.answer_all(&[history[0].clone(), drains]);
    assert_eq!(shell.warm(), "N");
    shell.live(&batch(1, 2, &[StoreCpu("N")]));
    assert_eq!(shell.warm(), "N N@cpu");
}

#[test]
fn a_refused_external_reset_that_emits_no_clear_lets_no_pending_connector_store_warm() {
    let history = [batch(1, 0, &[Store("A")])].to_vec();
    let mut shell = Shell::started(&history);
    shell.feed(Event::Intent { tiers: TierSet::ALL, clear: Some(all(Disposition::Forgotten)) });
    shell.feed(Event::Outcome { kv: all(Disposition::Unknown), clears: false });
    shell.answer_all(&history);
    let drains = batch(1, 1, &[Store("N"), StoreCpu("A")]);
    shell.live(&drains);
    shell.answer_all(&[history[0].clone(), drains]);
    assert_eq!(shell.warm(), "N");
}

#[test]
fn a_clear_that_a_failed_action_still_publishes_is_nobodys() {
    let history = [batch(1, 0, &[Store("A"), StoreCpu("A")])].to_vec();
    let mut shell = Shell::started(&history);
    shell.feed(Event::Intent { tiers: TierSet::ALL, clear: Some(all(Disposition::Forgotten)) });
    shell.feed(Event::Outcome { kv: all(Disposition::Unknown), clears: false });
    shell.answer_all(&history);
    let mut published = history;
    published.push(batch(1, 1, &[Store("B")]));
    shell.live(&published[1]);
    shell.answer_all(&published);
    assert_eq!(shell.warm(), "B");
    shell.live(&batch(1, 2, &[Clear]));
    assert_eq!(shell.warm(), "");
}

#[test]
fn an_unreadable_batch_degrades_its_rank_and_the_next_store_counts() {
    let mut shell = Shell::new(false);
    shell.live(&batch(1, 0, &[Store("A")]));
    let mut torn = batch(1, 1, &[]);
    torn.head.readable = false;
    shell.live(&torn);
    assert_eq!(shell.warm(), "");
    shell.live(&batch(1, 2, &[Store("B")]));
    assert_eq!(shell.warm(), "B");
}

#[test]
fn a_new_incarnation_asks_for_a_new_connection_and_hears_nothing_of_the_old_one() {
    let mut shell = Shell::started(&abc());
    shell.feed(Event::NewIncarnation);
    assert_eq!(shell.reconnects, 1);
    shell.live(&batch(1, 3, &[Store("D")]));
    assert_eq!(shell.warm(), "suspended");
    shell.feed(Event::Connected);
    let fresh = [batch(2, 0, &[Store("Z")])];
    shell.answer_all(&fresh);
    assert_eq!(shell.warm(), "Z");
}

#[test]
fn trust_is_exact_only_when_nothing_is_open() {
    let mut shell = Shell::new(true);
    assert_eq!(shell.rank.trust(), Trust::Degraded);
    shell.answer(&abc());
    assert_eq!(shell.rank.trust(), Trust::Exact);
    shell.reset();
    assert_eq!(shell.rank.trust(), Trust::Degraded);
    shell.answer_all(&abc());
    assert_eq!(shell.rank.trust(), Trust::Exact);
    shell.feed(Event::Disconnected);
    assert_eq!(shell.rank.trust(), Trust::LoadOnly);
}
