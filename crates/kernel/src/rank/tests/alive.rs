//! Whether a live connection is the worker's, and brings what the engine publishes.

use super::*;

/// Ticks after which a live connection that owes something is given up.
const SECOND: usize = 5;
const MINUTE: usize = 240;
/// Ticks after which a marker that came back is too old.
const TIED: usize = 21;

/// A batch with the marker that `shell` waits for.
pub(super) fn marked(shell: &Shell, seq: u64, says: &[Say]) -> Batch {
    let mut marked = batch(1, seq, says);
    marked.head.marker = shell.rank.wanted_marker();
    assert!(marked.head.marker.is_some(), "no marker is wanted");
    marked
}

/// Tied, with A, B, C and the marker's batch as its history.
pub(super) fn tied(replay: bool) -> (Shell, Vec<Batch>) {
    let mut shell = Shell::tying(replay);
    let mut history = abc();
    if replay {
        shell.answer(&history);
    } else {
        history.iter().for_each(|b| shell.live(b));
    }
    assert_eq!(shell.warm(), "suspended");
    history.push(marked(&shell, 3, &[Store("M")]));
    shell.live(&history[3]);
    if replay {
        shell.answer_all(&history);
    }
    assert_eq!((shell.warm().as_str(), shell.rank.trust()), ("A B C M", Trust::Exact));
    assert_eq!(shell.notes, [Note::Tied]);
    (shell, history)
}

pub(super) fn ticks(shell: &mut Shell, count: usize) {
    (0..count).for_each(|_| shell.feed(Event::Tick));
}

fn unexplained(shell: &Shell) -> Vec<u32> {
    let clears = |note: &Note| match note {
        Note::ClearUnexplained { clears } => Some(*clears),
        _ => None,
    };
    shell.notes.iter().filter_map(clears).collect()
}

#[test]
fn nothing_is_claimed_of_a_connection_before_a_marker_came_back_on_it() {
    for replay in [true, false] {
        let (mut shell, history) = tied(replay);
        shell.feed(Event::Disconnected);
        shell.feed(Event::Connected);
        let wanted = if replay { "A B C M" } else { "" };
        if replay {
            shell.answer_all(&history);
        }
        assert_eq!((shell.warm().as_str(), shell.rank.trust()), ("suspended", Trust::Degraded));
        // A batch of the new connection alone shows no more than that something publishes there.
        let more = [batch(1, 4, &[]), marked(&shell, 5, &[])];
        shell.live(&more[0]);
        let history = [history, more.to_vec()].concat();
        shell.answer_all(&history);
        assert_eq!(shell.warm(), "suspended");
        shell.live(&more[1]);
        shell.answer_all(&history);
        assert_eq!((shell.warm().as_str(), shell.rank.trust()), (wanted, Trust::Exact));
    }
}

#[test]
fn a_marker_of_an_earlier_connection_ties_no_later_one() {
    for replay in [true, false] {
        let mut shell = Shell::tying(replay);
        let first = marked(&shell, 0, &[Store("A")]);
        shell.answer_all(&[]);
        shell.feed(Event::Disconnected);
        shell.feed(Event::Connected);
        shell.live(&first);
        shell.answer_all(std::slice::from_ref(&first));
        assert_eq!(shell.warm(), "suspended");
    }
}

#[test]
fn a_marker_that_only_a_replay_brings_shows_that_the_live_connection_is_dead() {
    let mut shell = Shell::tying(true);
    let mut history = abc();
    shell.answer(&history);
    history.push(marked(&shell, 3, &[Store("M")]));
    let id = shell.rank.wanted_marker().expect("a marker");
    shell.feed(Event::Marked { id });
    shell.answer(&history);
    assert_eq!((shell.warm().as_str(), shell.rank.is_dead()), ("suspended", false));
    ticks(&mut shell, SECOND);
    assert_eq!((shell.reconnects, shell.rank.is_dead()), (1, true));
    shell.feed(Event::Connected);
    shell.answer(&history);
    history.push(batch(1, 4, &[]));
    shell.live(&history[4]);
    shell.answer_all(&history);
    assert_eq!((shell.warm().as_str(), shell.rank.is_dead()), ("suspended", true));
    history.push(marked(&shell, 5, &[]));
    shell.live(&history[5]);
    shell.answer_all(&history);
    assert_eq!((shell.warm().as_str(), shell.rank.is_dead()), ("A B C M", false));
}

#[test]
fn where_no_marker_can_be_sent_a_batch_shows_that_a_connection_after_a_dead_one_lives() {
    let mut history = abc();
    let mut shell = Shell::started(&history);
    shell.live(&history[2]);
    history.push(batch(1, 3, &[Store("D")]));
    shell.feed(Event::Late);
    shell.answer(&history);
    ticks(&mut shell, SECOND);
    assert_eq!((shell.reconnects, shell.rank.is_dead()), (1, true));
    shell.feed(Event::Connected);
    shell.answer_all(&history);
    assert_eq!((shell.warm().as_str(), shell.rank.is_dead()), ("suspended", true));
    history.push(batch(1, 4, &[]));
    shell.live(&history[4]);
    shell.answer_all(&history);
    assert_eq!((shell.warm().as_str(), shell.rank.is_dead()), ("A B C D", false));
}

#[test]
fn another_life_on_a_connection_that_did_not_end_is_tied_and_followed_anew() {
    let (mut shell, _) = tied(true);
    let mut history = [batch(2, 0, &[Store("Z")])].to_vec();
    shell.live(&history[0]);
    shell.answer_all(&history);
    assert_eq!(shell.warm(), "suspended");
    history.push(Batch { head: Head { seq: 1, ..marked(&shell, 1, &[]).head }, says: [].into() });
    shell.live(&history[1]);
    shell.answer_all(&history);
    assert_eq!(shell.warm(), "Z");
    // Its numbers are below those of the life before, and it owes them all the same.
    history.push(batch(2, 2, &[Store("Y")]));
    shell.feed(Event::Late);
    shell.answer(&history);
    ticks(&mut shell, SECOND);
    assert_eq!((shell.reconnects, shell.warm().as_str()), (1, "suspended"));
}

#[test]
fn a_connection_that_brings_events_again_is_tied_without_a_wait() {
    let (mut shell, mut history) = tied(true);
    shell.feed(Event::Disconnected);
    shell.feed(Event::Connected);
    shell.answer_all(&history);
    // The new connection brings nothing at first: its marker is lost on it.
    history.push(marked(&shell, 4, &[Store("D")]));
    let id = shell.rank.wanted_marker().expect("a marker");
    shell.feed(Event::Marked { id });
    shell.answer_all(&history);
    ticks(&mut shell, 1);
    shell.answer_all(&history);
    history.push(batch(1, 5, &[Store("E")]));
    shell.live(&history[5]);
    let again = shell.rank.wanted_marker().expect("another marker");
    assert_ne!(again, id);
    assert_eq!(shell.warm(), "suspended", "that it brings something proves nothing yet");
    history.push(marked(&shell, 6, &[]));
    shell.live(&history[6]);
    shell.answer_all(&history);
    assert_eq!((shell.warm().as_str(), shell.reconnects), ("A B C D E M", 0));
    // Not again and again: it may be another engine's.
    shell.feed(Event::Blind);
    let id = shell.rank.wanted_marker().expect("a marker");
    shell.feed(Event::Marked { id });
    ticks(&mut shell, 1);
    history.push(batch(1, 7, &[]));
    shell.live(&history[7]);
    assert_eq!(shell.rank.wanted_marker(), Some(id));
    ticks(&mut shell, SECOND);
    assert_eq!((shell.warm().as_str(), shell.reconnects), ("suspended", 1));
}

#[test]
fn a_dead_connection_that_waits_to_be_opened_anew_is_revived_by_events() {
    let (mut shell, mut history) = tied(true);
    history.push(batch(1, 4, &[Store("D")]));
    shell.feed(Event::Late);
    shell.answer(&history);
    ticks(&mut shell, SECOND);
    assert_eq!(shell.reconnects, 1);
    shell.feed(Event::Connected);
    shell.answer_all(&history);
    history.push(marked(&shell, 5, &[]));
    let id = shell.rank.wanted_marker().expect("a marker");
    shell.feed(Event::Marked { id });
    shell.answer_all(&history);
    ticks(&mut shell, SECOND);
    assert_eq!((shell.rank.is_dead(), shell.rank.wanted_marker()), (true, None));
    history.push(batch(1, 6, &[Store("E")]));
    shell.live(&history[6]);
    assert_eq!(shell.warm(), "suspended");
    history.push(marked(&shell, 7, &[]));
    shell.live(&history[7]);
    shell.answer_all(&history);
    assert_eq!((shell.warm().as_str(), shell.rank.is_dead()), ("A B C D E M", false));
    assert_eq!(shell.reconnects, 1, "it was not opened anew");
}

#[test]
fn a_silent_stream_is_compared_with_the_replay_while_beliefs_go_on_to_count() {
    let (mut shell, mut history) = tied(true);
    history.push(batch(1, 4, &[Remove("B")]));
    ticks(&mut shell, 1);
    assert_eq!(shell.asked, None);
    ticks(&mut shell, 1);
    assert_eq!((shell.warm().as_str(), shell.rank.trust()), ("A B C M", Trust::Exact));
    shell.answer(&history);
    assert_eq!(shell.warm(), "A C M", "within a second");
}

#[test]
fn a_live_connection_that_owes_what_replay_brought_for_a_second_is_given_up() {
    let (mut shell, mut history) = tied(true);
    history.push(batch(1, 4, &[Store("D")]));
    shell.feed(Event::Late);
    shell.answer(&history);
    ticks(&mut shell, SECOND - 1);
    assert_eq!((shell.reconnects, shell.warm().as_str()), (0, "A B C D M"));
    ticks(&mut shell, 1);
    assert_eq!((shell.reconnects, shell.warm().as_str()), (1, "suspended"));
    assert!(shell.notes.contains(&Note::LiveDead));
    // The new connection is no better, and is not opened anew at once.
    for _ in 0..3 {
        shell.feed(Event::Connected);
        shell.answer_all(&history);
        history.push(marked(&shell, history.len() as u64, &[]));
        ticks(&mut shell, 3);
        shell.answer_all(&history);
        ticks(&mut shell, SECOND);
        assert_eq!(shell.warm(), "suspended");
        shell.feed(Event::Disconnected);
    }
    assert!(shell.reconnects < 4, "{}", shell.reconnects);
}

#[test]
fn a_connection_that_owes_a_batch_is_given_up_though_it_brings_others() {
    // What it brought last, again and again; or what comes before that one, once.
    for (brings, owed) in [(&[3; SECOND][..], 4), (&[4], 5)] {
        let (mut shell, mut history) = tied(true);
        history.extend((4..=owed).map(|seq| batch(1, seq, &[])));
        shell.feed(Event::Late);
        shell.answer(&history);
        for tick in 0..SECOND {
            if let Some(seq) = brings.get(tick) {
                shell.live(&history[*seq]);
            }
            ticks(&mut shell, 1);
        }
        assert_eq!(shell.reconnects, 1, "{owed}");
    }
}

#[test]
fn a_connection_that_brought_what_it_owed_or_a_later_batch_owes_nothing() {
    for (owed, brings) in [(5, &[4, 5][..]), (4, &[5])] {
        let (mut shell, mut history) = tied(true);
        history.extend((4..=owed).map(|seq| batch(1, seq, &[])));
        shell.feed(Event::Late);
        shell.answer(&history);
        history.extend((owed + 1..=5).map(|seq| batch(1, seq, &[])));
        brings.iter().for_each(|seq| shell.live(&history[*seq]));
        for _ in 0..2 * SECOND {
            ticks(&mut shell, 1);
            shell.answer_all(&history);
        }
        assert_eq!(shell.reconnects, 0, "{owed}");
    }
}

/// From at once up to a minute, in ticks beside the second in which it owes.
#[test]
fn connections_that_bring_nothing_are_opened_anew_ever_less_often() {
    let mut shell = Shell::tying(false);
    for wait in [0, 4, 8, 16, 32, 64, 128, MINUTE, MINUTE, MINUTE, MINUTE] {
        let id = shell.rank.wanted_marker().expect("a marker");
        shell.feed(Event::Marked { id });
        let reconnects = shell.reconnects;
        ticks(&mut shell, SECOND + wait - 1);
        assert_eq!(shell.reconnects, reconnects, "{wait}");
        ticks(&mut shell, 1);
        assert_eq!(shell.reconnects, reconnects + 1, "{wait}");
        shell.feed(Event::Connected);
    }
}

#[test]
fn a_live_connection_that_is_a_little_late_is_kept() {
    let (mut shell, mut history) = tied(true);
    for seq in 4..40 {
        history.push(batch(1, seq, &[Store("D")]));
        shell.feed(Event::Late);
        shell.answer(&history);
        ticks(&mut shell, 1);
        shell.live(&history[seq as usize]);
        shell.answer_all(&history);
    }
    assert_eq!((shell.reconnects, shell.warm().as_str()), (0, "A B C D M"));
}

/// A stream that the replay overtakes by many batches: they come late, and are of the same life.
#[test]
fn a_live_connection_far_behind_the_replay_is_no_other_life() {
    let (mut shell, mut history) = tied(true);
    history.extend((4..300).map(|seq| batch(1, seq, &[Store("D")])));
    shell.feed(Event::Late);
    shell.answer(&history);
    history[4..].iter().for_each(|b| shell.live(b));
    ticks(&mut shell, 2);
    assert_eq!((shell.reconnects, shell.warm().as_str()), (0, "A B C D M"));
    assert!(!shell.notes.contains(&Note::NewLife));
}

#[test]
fn batches_that_the_live_connection_is_still_to_bring_are_remembered_up_to_a_bound() {
    for (count, is_new_life) in [(AHEAD as u64, false), (AHEAD as u64 + 1, true)] {
        let (mut shell, mut history) = tied(true);
        history.extend((4..4 + count).map(|seq| batch(1, seq, &[])));
        shell.feed(Event::Late);
        shell.answer_all(&history);
        shell.live(&history[4]);
        assert_eq!(shell.notes.contains(&Note::NewLife), is_new_life, "{count}");
    }
}

#[test]
fn what_is_late_while_a_replay_runs_is_asked_for_after_it() {
    let (mut shell, mut history) = tied(true);
    shell.feed(Event::Late);
    let (session, from) = shell.asked.take().expect("a replay");
    shell.bring(session, from, &history);
    history.push(batch(1, 4, &[Store("D")]));
    shell.feed(Event::Late);
    shell.feed(Event::Late);
    assert_eq!(shell.asked, None, "one at a time");
    shell.feed(Event::ReplayEnd { session });
    shell.answer(&history);
    assert_eq!((shell.warm().as_str(), shell.asked), ("A B C D M", None));
}

#[test]
fn a_silent_stream_that_cannot_be_compared_claims_nothing_after_a_second() {
    let (mut shell, mut history) = tied(true);
    // Asked for, and not answered.
    ticks(&mut shell, SECOND - 1);
    assert_eq!((shell.warm().as_str(), shell.rank.trust()), ("A B C M", Trust::Exact));
    ticks(&mut shell, 1);
    assert_eq!((shell.warm().as_str(), shell.rank.trust()), ("suspended", Trust::Degraded));
    // A late answer tells what there is, as does a batch.
    history.push(batch(1, 4, &[Remove("B")]));
    shell.answer(&history);
    shell.live(&history[4]);
    assert_eq!(shell.warm(), "A C M");
    ticks(&mut shell, SECOND);
    assert_eq!(shell.warm(), "suspended");
    history.push(batch(1, 5, &[]));
    shell.live(&history[5]);
    assert_eq!((shell.warm().as_str(), shell.reconnects), ("A C M", 0));
}

/// Each batch comes live, later than the one before it did.
#[test]
fn a_live_connection_whose_lag_grows_is_given_up() {
    let (mut shell, mut history) = tied(true);
    let mut brought = history.len();
    for _ in 0..8 * SECOND {
        for _ in 0..2 {
            history.push(batch(1, history.len() as u64, &[]));
        }
        // One of two, so that it is never silent.
        shell.live(&history[brought]);
        brought += 1;
        ticks(&mut shell, 1);
        shell.answer_all(&history);
        if shell.reconnects > 0 {
            break;
        }
    }
    let lag = history.len() - brought;
    assert!(shell.reconnects == 1 && lag <= 3 * SECOND, "{lag} batches behind");
    assert_eq!(shell.warm(), "suspended");
}

#[test]
fn comparisons_that_fail_are_given_up_and_cost_no_belief() {
    let (mut shell, _) = tied(true);
    let mut asked = Vec::new();
    for tick in 1..=MINUTE {
        shell.feed(Event::Tick);
        if let Some((session, _)) = shell.asked.take() {
            asked.push(tick);
            shell.feed(Event::ReplayFailed { session });
        }
        assert_eq!(shell.warm() == "suspended", tick >= SECOND, "after {tick} ticks");
    }
    assert_eq!(asked, [2, 6], "after a longer wait each time");
    assert_eq!((shell.warm().as_str(), shell.reconnects), ("suspended", 0));
    shell.live(&batch(1, 4, &[]));
    assert_eq!(shell.warm(), "suspended", "it may be late, and nothing shows how much");
    shell.feed(Event::Wanted);
    shell.live(&marked(&shell, 5, &[]));
    assert_eq!((shell.warm().as_str(), shell.rank.trust()), ("A B C M", Trust::Exact));
    ticks(&mut shell, 2 * SECOND);
    assert!(shell.asked.is_some(), "it is tried again after a minute");
}

/// A dead connection, and a replay that leaves out the batch with the removal.
#[test]
fn a_hole_in_what_a_silent_stream_is_compared_with_is_a_gap() {
    let (mut shell, mut history) = tied(true);
    history.push(batch(1, 5, &[]));
    ticks(&mut shell, 2);
    let (session, from) = shell.asked.take().expect("a comparison");
    shell.bring(session, from, &history);
    assert_eq!(shell.warm(), "suspended", "what is left out may come yet");
    shell.answer(&history);
    assert!(shell.notes.contains(&Note::GapNotClosed));
    assert_eq!(shell.warm(), "", "what is left out twice is lost");
    assert_eq!((shell.rank.cursor(), shell.asked), (Some(5), None), "and what follows counts");
}

/// Neither silence nor batches tell how far behind a connection is that nothing is compared with.
#[test]
fn without_replay_nothing_is_claimed_for_longer_than_five_seconds_after_a_marker_came_back() {
    let (mut shell, mut history) = tied(false);
    ticks(&mut shell, TIED - 1);
    history.push(batch(1, 4, &[]));
    shell.live(&history[4]);
    assert_eq!((shell.warm().as_str(), shell.rank.lasts_for()), ("A B C M", 1));
    ticks(&mut shell, 1);
    assert_eq!((shell.warm().as_str(), shell.rank.trust()), ("suspended", Trust::Degraded));
    assert_eq!(shell.rank.wanted_marker(), None, "nobody asks for claims");
    shell.feed(Event::Wanted);
    let back = marked(&shell, 5, &[]);
    shell.feed(Event::Wanted);
    assert_eq!(back.head.marker, shell.rank.wanted_marker(), "one at a time");
    shell.live(&back);
    assert_eq!((shell.warm().as_str(), shell.rank.trust()), ("A B C M", Trust::Exact));
}

#[test]
fn without_replay_a_marker_is_asked_for_in_time_and_no_more_often_than_every_three_seconds() {
    let (mut shell, mut history) = tied(false);
    let mut asked = Vec::new();
    for tick in 1..=4 * SECOND {
        ticks(&mut shell, 1);
        shell.feed(Event::Wanted);
        if shell.rank.wanted_marker().is_some() {
            asked.push(tick);
            history.push(marked(&shell, history.len() as u64, &[]));
            shell.live(history.last().expect("the marker's"));
        }
        assert_eq!(shell.warm(), "A B C M", "{tick}");
    }
    assert_eq!(asked, [12], "three seconds after the one before came back");
}

/// A swapped engine behind the address: the old one's events go on, and are the replay's.
#[test]
fn where_nothing_names_the_life_only_a_marker_shows_that_the_engine_is_the_streams() {
    let (mut shell, mut history) = tied(true);
    let pass = |shell: &mut Shell, history: &[Batch], count: usize| {
        for _ in 0..count {
            ticks(shell, 1);
            shell.answer_all(history);
        }
    };
    pass(&mut shell, &history, MINUTE);
    shell.feed(Event::Wanted);
    assert_eq!((shell.warm().as_str(), shell.rank.wanted_marker()), ("A B C M", None));
    shell.feed(Event::Life { is_told: false });
    assert_eq!((shell.warm().as_str(), shell.rank.trust()), ("suspended", Trust::Degraded));
    shell.feed(Event::Wanted);
    history.push(marked(&shell, 4, &[]));
    shell.live(&history[4]);
    assert_eq!(shell.warm(), "A B C M");
    pass(&mut shell, &history, TIED - 1);
    assert_eq!(shell.warm(), "A B C M");
    pass(&mut shell, &history, 1);
    assert_eq!(shell.warm(), "suspended");
    shell.feed(Event::Life { is_told: true });
    assert_eq!(shell.warm(), "A B C M");
}

#[test]
fn no_life_is_told_until_something_says_so_and_another_connection_changes_nothing_of_that() {
    let mut shell = Shell::tying(true);
    shell.rank = Rank::new(shell.rank.config);
    let mut history = abc();
    for (is_told, expected) in [(None, "suspended"), (Some(true), "A B C"), (None, "A B C")] {
        is_told.into_iter().for_each(|is_told| shell.feed(Event::Life { is_told }));
        shell.feed(Event::Disconnected);
        shell.feed(Event::Connected);
        shell.answer_all(&history);
        history.push(marked(&shell, history.len() as u64, &[]));
        shell.live(history.last().expect("the marker's"));
        shell.answer_all(&history);
        assert_eq!(shell.warm(), "A B C");
        for _ in 0..TIED {
            ticks(&mut shell, 1);
            shell.answer_all(&history);
        }
        assert_eq!(shell.warm(), expected);
    }
}

/// How long what is believed may be read by one who does not know how the stream fares.
#[test]
fn beliefs_last_for_as_many_ticks_as_it_takes_to_suspend_them() {
    for replay in [true, false] {
        let (mut shell, _) = tied(replay);
        for passed in 1..=if replay { SECOND } else { TIED } {
            let lasts = shell.rank.lasts_for() as usize;
            let left = if replay { SECOND } else { TIED } + 1 - passed;
            assert_eq!((lasts, shell.warm().as_str()), (left.min(SECOND), "A B C M"), "{passed}");
            ticks(&mut shell, 1);
        }
        assert_eq!((shell.rank.lasts_for(), shell.warm().as_str()), (0, "suspended"));
    }
}

/// A stopped process: what lies in its sockets may be as old as the stop, the marker's store and a
/// replay's end too.
#[test]
fn after_a_stall_only_what_is_asked_for_from_then_on_counts() {
    for replay in [true, false] {
        let (mut shell, mut history) = tied(replay);
        shell.feed(Event::Blind);
        let old = marked(&shell, 4, &[]);
        let compared = shell.asked;
        shell.feed(Event::Stalled);
        assert_eq!((shell.warm().as_str(), shell.rank.trust()), ("suspended", Trust::Degraded));
        history.push(old);
        shell.live(&history[4]);
        shell.answer_all(&history);
        assert_eq!((shell.warm().as_str(), compared), ("suspended", None), "it may be old");
        history.push(batch(1, 5, &[Remove("B")]));
        history.push(marked(&shell, 6, &[]));
        shell.live(&history[5]);
        shell.live(&history[6]);
        shell.answer_all(&history);
        assert_eq!((shell.warm().as_str(), shell.rank.trust()), ("A C M", Trust::Exact));
    }
}

#[test]
fn a_stall_of_one_that_sends_no_markers_is_mended_by_a_replay_or_by_a_new_connection() {
    let history = abc();
    let mut shell = Shell::started(&history);
    shell.live(&history[2]);
    shell.feed(Event::Stalled);
    assert_eq!(shell.warm(), "suspended");
    shell.answer(&history);
    assert_eq!(shell.warm(), "A B C");
    let mut shell = Shell::new(false);
    shell.feed(Event::Stalled);
    assert_eq!((shell.warm().as_str(), shell.reconnects), ("suspended", 1));
    let mut shell = Shell::new(false);
    shell.feed(Event::Disconnected);
    shell.feed(Event::Stalled);
    assert_eq!(shell.reconnects, 0, "there is nothing to mend");
}

#[test]
fn without_replay_a_marker_that_is_answered_and_does_not_come_shows_a_dead_connection() {
    let (mut shell, _) = tied(false);
    shell.feed(Event::Late);
    assert_eq!(shell.rank.wanted_marker(), None, "it brought a batch a moment ago");
    ticks(&mut shell, 1);
    shell.feed(Event::Late);
    let id = shell.rank.wanted_marker().expect("a marker");
    ticks(&mut shell, MINUTE);
    assert_eq!(shell.reconnects, 0, "it is not answered yet");
    shell.feed(Event::Marked { id });
    ticks(&mut shell, SECOND);
    assert_eq!((shell.warm().as_str(), shell.reconnects), ("suspended", 1));
}

/// A gap that shows live, and a replay that leaves the same batch out twice.
#[test]
fn a_gap_that_no_replay_closes_is_not_told_as_closed() {
    let (mut shell, mut history) = tied(true);
    history.push(batch(1, 5, &[Store("E")]));
    shell.live(&history[4]);
    shell.answer_all(&history);
    assert_eq!((shell.warm().as_str(), shell.rank.cursor()), ("E", Some(5)));
    assert_eq!(shell.notes[1..], [Note::Gap { lost: 1 }, Note::GapNotClosed]);
}

#[test]
fn without_replay_what_was_missed_is_told_by_a_marker() {
    let (mut shell, _) = tied(false);
    ticks(&mut shell, 1);
    shell.feed(Event::CatchUp);
    assert!(shell.rank.wanted_marker().is_some());
}

#[test]
fn a_blind_rank_claims_nothing_until_a_marker_came_back() {
    let (mut shell, mut history) = tied(true);
    shell.feed(Event::Blind);
    assert_eq!((shell.warm().as_str(), shell.rank.trust()), ("suspended", Trust::Degraded));
    let id = shell.rank.wanted_marker();
    assert_eq!(shell.marker, id);
    shell.feed(Event::Blind);
    assert_eq!((shell.rank.wanted_marker(), shell.reconnects), (id, 0), "it is asked for");
    history.push(marked(&shell, 4, &[]));
    shell.live(&history[4]);
    assert_eq!((shell.warm().as_str(), shell.rank.trust()), ("A B C M", Trust::Exact));
}

#[test]
fn a_blind_rank_that_sends_no_markers_is_opened_anew_once() {
    let mut shell = Shell::new(false);
    shell.live(&batch(1, 0, &[Store("A")]));
    assert_eq!(shell.warm(), "A");
    shell.feed(Event::Blind);
    assert_eq!((shell.warm().as_str(), shell.reconnects), ("suspended", 1));
    shell.feed(Event::Connected);
    shell.feed(Event::Blind);
    assert_eq!(shell.reconnects, 1, "it has shown nothing since");
}

#[test]
fn a_batch_right_after_a_markers_answer_does_not_show_that_the_marker_is_lost() {
    let (mut shell, _) = tied(false);
    shell.feed(Event::Blind);
    let id = shell.rank.wanted_marker().expect("a marker");
    shell.feed(Event::Marked { id });
    shell.live(&batch(1, 4, &[]));
    assert_eq!(shell.rank.wanted_marker(), Some(id));
}

#[test]
fn one_marker_ties_the_connection_and_opens_the_fence() {
    let (mut shell, _) = tied(false);
    shell.reset();
    shell.feed(Event::Blind);
    shell.live(&marked(&shell, 4, &[Clear]));
    shell.live(&batch(1, 5, &[Store("N")]));
    assert_eq!((shell.warm().as_str(), shell.rank.is_settled()), ("N", true));
    assert_eq!(shell.rank.wanted_marker(), None);
}

#[test]
fn a_replay_that_was_given_up_is_tried_again_after_a_minute() {
    let (mut shell, mut history) = tied(true);
    history.push(batch(1, 4, &[Store("D")]));
    history.push(batch(1, 5, &[Store("E")]));
    shell.live(&history[5]);
    for _ in 0..2 {
        let (session, _) = shell.asked.take().expect("as many attempts as are allowed");
        shell.feed(Event::ReplayFailed { session });
    }
    assert_eq!((shell.warm().as_str(), shell.asked), ("E", None));
    ticks(&mut shell, MINUTE - 1);
    assert_eq!(shell.asked, None);
    ticks(&mut shell, 1);
    let (session, _) = shell.asked.expect("a replay");
    // What comes meanwhile does not wait for it.
    shell.feed(Event::Wanted);
    history.push(marked(&shell, 6, &[Store("F")]));
    shell.live(&history[6]);
    assert_eq!(shell.warm(), "E F");
    history.push(batch(1, 7, &[Store("G")]));
    shell.answer(&history);
    assert_eq!(shell.rank.session.as_ref().map(|_| session), None);
    assert_eq!(shell.warm(), "E F G", "what it brings beyond the last batch taken counts");
    history.push(batch(1, 8, &[Remove("E")]));
    history.push(batch(1, 9, &[Store("H")]));
    shell.live(&history[9]);
    shell.answer_all(&history);
    assert_eq!(shell.warm(), "F G H", "a gap is closed by replay again");
}

/// Also where a replay's end would have decided about the fence.
#[test]
fn nothing_waits_for_the_trial_of_a_replay_that_was_given_up() {
    let (mut shell, mut history) = tied(true);
    shell.reset();
    shell.answer(&history);
    for _ in 0..2 {
        let (session, _) = shell.asked.take().expect("the second look");
        shell.feed(Event::ReplayFailed { session });
        ticks(&mut shell, 1);
    }
    assert_eq!((shell.asked, shell.rank.is_settled()), (None, false));
    ticks(&mut shell, MINUTE);
    assert!(shell.asked.is_some(), "the trial");
    history.push(marked(&shell, 4, &[Clear]));
    shell.live(&history[4]);
    shell.live(&batch(1, 5, &[Store("N")]));
    assert_eq!((shell.warm().as_str(), shell.rank.is_settled()), ("N", true));
}

#[test]
fn what_waited_for_a_replay_that_was_given_up_counts_from_its_last_gap_on() {
    for (second, expected) in [(6, "E F"), (7, "F")] {
        let (mut shell, _) = tied(true);
        shell.live(&batch(1, 5, &[Store("E")]));
        shell.live(&batch(1, second, &[Store("F")]));
        while let Some((session, _)) = shell.asked.take() {
            shell.feed(Event::ReplayFailed { session });
        }
        assert_eq!((shell.warm().as_str(), shell.rank.cursor()), (expected, Some(second)));
    }
}

#[test]
fn what_waited_behind_the_end_of_a_replay_is_taken_if_it_comes_next() {
    let (mut shell, mut history) = tied(true);
    history.push(batch(1, 4, &[Store("D")]));
    history.push(batch(1, 5, &[Store("E")]));
    let next = batch(1, 6, &[Store("F")]);
    shell.live(&history[5]);
    shell.live(&next);
    shell.answer(&history);
    assert_eq!((shell.warm().as_str(), shell.asked), ("A B C D E F M", None));
    // Of these the replay does not bring the first: it ended before that one was published.
    history.push(next);
    let late = [batch(1, 7, &[Remove("A")]), batch(1, 8, &[Store("H")])];
    shell.live(&late[1]);
    shell.answer(&history);
    assert_eq!((shell.warm().as_str(), shell.asked.is_some()), ("suspended", true));
    history.extend(late);
    shell.answer(&history);
    assert_eq!((shell.warm().as_str(), shell.asked), ("B C D E F H M", None));
}

#[test]
fn a_trial_that_does_not_begin_with_the_last_batch_counts_for_nothing() {
    for other in [Vec::new(), (0..9).map(|seq| batch(2, seq, &[Store("Z")])).collect(), abc()] {
        let (mut shell, history) = tied(true);
        shell.live(&batch(1, 5, &[Store("E")]));
        drop(history);
        while let Some((session, _)) = shell.asked.take() {
            shell.feed(Event::ReplayFailed { session });
        }
        ticks(&mut shell, MINUTE);
        shell.answer_all(&other);
        assert_eq!((shell.warm().as_str(), shell.reconnects), ("suspended", 0));
        shell.feed(Event::Wanted);
        shell.live(&marked(&shell, 6, &[]));
        assert_eq!(shell.warm(), "E", "it is not silent any more");
        ticks(&mut shell, 4);
        assert_eq!(shell.asked, None, "not before another minute");
    }
}

#[test]
fn old_clears_that_the_first_replay_brings_are_history() {
    let mut shell = Shell::new(true);
    let history: Vec<_> = (0..16).map(|seq| batch(1, seq, &[Clear, Store("A")])).collect();
    shell.answer_all(&history);
    assert_eq!((unexplained(&shell), shell.warm().as_str()), ([].to_vec(), "A"));
    let past = shell.notes.iter().filter(|n| **n == Note::ClearPast { clears: 16 });
    assert_eq!(past.count(), 1);
    // What comes live from here on is the present's.
    shell.live(&batch(1, 16, &[Clear]));
    shell.answer_all(&[history, [batch(1, 16, &[Clear])].to_vec()].concat());
    assert_eq!(unexplained(&shell), [1]);
}

#[test]
fn clears_of_an_outage_are_one_note() {
    let mut history = abc();
    let mut shell = Shell::started(&history);
    shell.feed(Event::Disconnected);
    history.extend((3..9).map(|seq| batch(1, seq, &[Clear])));
    shell.feed(Event::Connected);
    shell.answer_all(&history);
    assert_eq!(unexplained(&shell), [6]);
}

#[test]
fn a_second_clear_for_one_reset_is_nobody_elses() {
    let mut shell = Shell::new(false);
    shell.live(&batch(1, 0, &[Store("A"), StoreCpu("A")]));
    shell.reset();
    shell.live(&batch(1, 1, &[Clear, Clear]));
    let mut marked = batch(1, 2, &[]);
    marked.head.marker = shell.marker;
    shell.live(&marked);
    assert_eq!((unexplained(&shell), shell.warm().as_str()), ([].to_vec(), ""));
    assert!(shell.notes.contains(&Note::ClearAmbiguous { clears: 1 }));
    shell.live(&batch(1, 3, &[Clear]));
    assert_eq!(unexplained(&shell), [1], "the next is");
}

#[test]
fn the_late_clear_of_an_action_whose_answer_proved_nothing_is_nobody_elses() {
    let mut shell = Shell::new(false);
    shell.live(&batch(1, 0, &[Store("A"), StoreCpu("A")]));
    shell.feed(Event::Intent { tiers: TierSet::GPU, clear: Some(local_reset()) });
    let kv = PerTier { gpu: Disposition::Unknown, ..local_reset() };
    shell.feed(Event::Outcome { kv, clears: false });
    let mut marked = batch(1, 1, &[]);
    marked.head.marker = shell.marker;
    shell.live(&marked);
    assert_eq!(shell.warm(), "A@cpu");
    shell.live(&batch(1, 2, &[Clear]));
    assert_eq!((unexplained(&shell), shell.warm().as_str()), ([].to_vec(), ""));
    shell.live(&batch(1, 3, &[Clear]));
    assert_eq!(unexplained(&shell), [1]);
}

#[test]
fn an_own_clear_that_comes_behind_a_gap_or_a_restart_of_fak_is_nobody_elses() {
    let mut shell = Shell::new(false);
    shell.live(&batch(1, 0, &[Store("A")]));
    shell.reset();
    shell.live(&batch(1, 9, &[Clear]));
    assert_eq!(unexplained(&shell), []);
    assert!(shell.notes.contains(&Note::ClearAmbiguous { clears: 1 }));

    let mut anew = Shell::new(false);
    anew.feed(Event::MayOwe);
    anew.feed(Event::Disconnected);
    anew.feed(Event::Connected);
    anew.live(&batch(1, 9, &[Clear]));
    assert_eq!(unexplained(&anew), []);
    anew.live(&batch(1, 10, &[Clear]));
    assert_eq!(unexplained(&anew), [1]);
}

/// What an earlier fak left owed may be in the history, and may come later.
#[test]
fn a_clear_that_history_brings_does_not_use_up_one_that_may_be_owed() {
    let mut history = [batch(1, 0, &[Clear]), batch(1, 1, &[Store("A")])].to_vec();
    let mut shell = Shell::new(true);
    shell.feed(Event::MayOwe);
    shell.answer_all(&history);
    shell.live(&history[1]);
    history.push(batch(1, 2, &[Clear]));
    shell.live(&history[2]);
    assert_eq!(unexplained(&shell), []);
    history.push(batch(1, 3, &[Clear]));
    shell.live(&history[3]);
    assert_eq!(unexplained(&shell), [1]);
}

#[test]
fn a_clear_that_a_later_replay_brings_uses_up_one_that_may_be_owed() {
    let mut history = abc();
    let mut shell = Shell::started(&history);
    shell.feed(Event::MayOwe);
    history.push(batch(1, 3, &[Clear]));
    shell.feed(Event::CatchUp);
    shell.answer_all(&history);
    assert_eq!(unexplained(&shell), []);
    shell.live(&history[3]);
    history.push(batch(1, 4, &[Clear]));
    shell.live(&history[4]);
    assert_eq!(unexplained(&shell), [1]);
}

#[test]
fn no_action_of_faks_explains_a_clear_of_a_new_process() {
    let mut shell = Shell::new(true);
    shell.feed(Event::MayOwe);
    shell.feed(Event::NewIncarnation);
    shell.feed(Event::Connected);
    let mut history = [batch(2, 0, &[])].to_vec();
    shell.answer_all(&history);
    shell.live(&history[0]);
    history.push(batch(2, 1, &[Clear]));
    shell.live(&history[1]);
    assert_eq!(unexplained(&shell), [1]);
}

/// What the history brings of others does not stand for what an earlier fak left owed.
#[test]
fn a_clear_that_is_owed_still_comes_after_clears_of_the_past() {
    let mut shell = Shell::tying(true);
    shell.feed(Event::MayOwe);
    let mut history = Vec::from([batch(1, 0, &[Store("A")]), batch(1, 1, &[Clear])]);
    shell.answer(&history);
    history.push(marked(&shell, 2, &[Store("M")]));
    shell.live(&history[2]);
    shell.answer_all(&history);
    shell.live(&batch(1, 3, &[Clear]));
    assert_eq!(unexplained(&shell), []);
    assert!(shell.notes.contains(&Note::ClearAmbiguous { clears: 1 }), "{:?}", shell.notes);
}

#[test]
fn clears_that_waited_in_the_engine_before_fak_listened_are_history() {
    let (mut shell, mut history) = (Shell::tying(true), abc());
    shell.answer(&history);
    history.push(marked(&shell, 3, &[Clear, Clear, Store("M")]));
    shell.live(&history[3]);
    shell.answer_all(&history);
    assert_eq!(unexplained(&shell), [], "they came with the first step that fak saw");
    assert!(shell.notes.contains(&Note::ClearPast { clears: 2 }));
    history.push(batch(1, 4, &[Clear]));
    shell.live(&history[4]);
    shell.answer_all(&history);
    assert_eq!(unexplained(&shell), [1], "this one is of now");
}

#[test]
fn old_clears_are_not_taken_for_those_of_an_action_that_begins_later() {
    let history: Vec<_> = (0..16).map(|seq| batch(1, seq, &[Clear, Store("A")])).collect();
    let mut shell = Shell::tying(true);
    // It is met asleep, and woken.
    let kv = all(Disposition::Unknown);
    shell.feed(Event::Distrust { kv });
    shell.answer(&history);
    shell.feed(Event::Intent { tiers: TierSet::ALL, clear: None });
    shell.feed(Event::Outcome { kv, clears: false });
    let ambiguous = |n: &&Note| matches!(n, Note::ClearAmbiguous { .. });
    assert_eq!(shell.notes.iter().filter(ambiguous).count(), 0, "{:?}", shell.notes);
}
