//! What is left of a history that no replay brings: replays that fail, that begin too late, and
//! that are given up.

use super::alive::{marked, ticks, tied};
use super::*;

/// Every replay fails that is asked for.
fn fail_all(shell: &mut Shell) {
    while let Some((session, _)) = shell.asked.take() {
        shell.feed(Event::ReplayFailed { session });
    }
}

/// What came in the place of a batch that nobody can read: nothing before it stands, whatever
/// follows it in order.
#[test]
fn a_hole_that_no_number_shows_costs_all_before_it_once_replay_is_given_up() {
    let (mut shell, _) = tied(true);
    shell.feed(Event::NoBatch);
    shell.live(&batch(1, 4, &[Store("D")]));
    assert_eq!(shell.warm(), "suspended");
    fail_all(&mut shell);
    assert_eq!((shell.warm().as_str(), shell.rank.cursor()), ("D", Some(4)));
    assert_eq!(shell.notes[1..], [Note::GapNotClosed]);
}

#[test]
fn a_gap_is_not_told_as_closed_where_replay_was_given_up_or_begins_behind_it() {
    let later = [batch(1, 7, &[]), batch(1, 8, &[]), batch(1, 9, &[Store("F")])];
    for begins_behind in [false, true] {
        let (mut shell, _) = tied(true);
        shell.live(&later[2]);
        if begins_behind {
            shell.answer_all(&later);
        } else {
            fail_all(&mut shell);
        }
        shell.live(&batch(1, 10, &[]));
        shell.answer_all(&[&later[..], &[batch(1, 10, &[])]].concat());
        assert_eq!(shell.warm(), "F");
        let gap = Note::Gap { lost: 5 };
        assert_eq!(shell.notes[1..], [gap, Note::GapNotClosed], "{begins_behind}");
    }
}

/// Nothing ties the connection to a replay that begins behind all that was taken.
#[test]
fn behind_a_replay_that_begins_too_late_a_live_batch_has_to_be_met_in_one_again() {
    let (mut shell, _) = tied(true);
    let later = [batch(1, 7, &[]), batch(1, 8, &[Store("E")])];
    shell.feed(Event::CatchUp);
    shell.answer_all(&later);
    assert_eq!(shell.warm(), "E");
    shell.live(&batch(2, 9, &[Store("Z")]));
    assert_eq!(shell.warm(), "suspended");
}

#[test]
fn where_no_batch_of_a_connection_was_met_the_next_one_goes_without_replay() {
    let mut shell = Shell::tying(true);
    fail_all(&mut shell);
    assert_eq!((shell.reconnects, shell.asked), (1, None));
    shell.feed(Event::Connected);
    assert_eq!(shell.asked, None);
    shell.live(&marked(&shell, 7, &[Store("M")]));
    assert_eq!(shell.warm(), "M");
    // And the one after that asks again.
    shell.feed(Event::Disconnected);
    shell.feed(Event::Connected);
    assert!(shell.asked.is_some());
}

#[test]
fn an_action_whose_replay_is_given_up_settles_by_a_marker_at_once() {
    let (mut shell, _) = tied(true);
    shell.reset();
    shell.feed(Event::NoBatch);
    fail_all(&mut shell);
    assert!(!shell.rank.is_settled());
    shell.live(&marked(&shell, 4, &[Clear, Store("M")]));
    assert_eq!((shell.warm().as_str(), shell.rank.is_settled()), ("", true));
}

#[test]
fn what_waited_for_the_deciding_replay_is_taken_where_that_fails() {
    let (mut shell, history) = tied(true);
    shell.reset();
    shell.answer(&history);
    shell.live(&batch(1, 4, &[StoreCpu("D")]));
    assert_eq!((shell.rank.cursor(), shell.asked.is_some()), (Some(3), true));
    let (session, _) = shell.asked.take().expect("the second look");
    shell.feed(Event::ReplayFailed { session });
    assert_eq!((shell.rank.cursor(), shell.warm().as_str()), (Some(4), "D@cpu"));
}

#[test]
fn a_clear_that_a_comparison_brings_before_it_fails_is_told_at_once() {
    let (mut shell, mut history) = tied(true);
    ticks(&mut shell, 2);
    history.push(batch(1, 4, &[Clear]));
    let (session, from) = shell.asked.take().expect("a comparison");
    shell.bring(session, from, &history);
    shell.feed(Event::ReplayFailed { session });
    assert_eq!(shell.notes[1..], [Note::ClearUnexplained { clears: 1 }]);
}

/// Not even those that came before them in order, though none is held back any more.
#[test]
fn beliefs_do_not_count_while_batches_that_were_dropped_for_want_of_room_are_asked_for() {
    let (mut shell, mut history) = tied(true);
    shell.reset();
    shell.answer(&history);
    for seq in 4..=8 {
        history.push(batch(1, seq, &[StoreCpu("D")]));
        shell.live(&history[seq as usize]);
        assert_eq!(shell.warm(), "suspended", "{seq}");
    }
    assert!(shell.parked.is_empty());
    shell.answer_all(&history);
    assert_eq!((shell.warm().as_str(), shell.rank.cursor()), ("D@cpu", Some(8)));
}

#[test]
fn a_restart_in_place_of_a_connection_that_was_met_has_its_replay_asked_for_at_once() {
    let (mut shell, _) = tied(true);
    let mut fresh = [batch(2, 0, &[Store("Z")])].to_vec();
    shell.live(&fresh[0]);
    assert_eq!((shell.warm().as_str(), shell.asked.is_some()), ("suspended", true));
    shell.answer_all(&fresh);
    fresh.push(marked(&shell, 1, &[]));
    shell.live(&fresh[1]);
    shell.answer_all(&fresh);
    assert_eq!(shell.warm(), "Z");
}
