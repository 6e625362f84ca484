//! What an action did not drop counts again.

use super::*;

/// A, B and C on the gpu, A on the cpu.
fn history() -> Vec<Batch> {
    let mut history = abc();
    history.push(batch(1, 3, &[StoreCpu("A")]));
    history
}

fn marked(shell: &Shell, seq: u64, says: &[Say]) -> Batch {
    let mut marked = batch(1, seq, says);
    marked.head.marker = shell.rank.wanted_marker();
    assert!(marked.head.marker.is_some(), "no marker is wanted");
    marked
}

fn declined(shell: &mut Shell) {
    shell.feed(Event::Intent { tiers: TierSet::GPU, clear: Some(local_reset()) });
    assert_eq!(shell.warm(), "A@cpu");
    shell.feed(Event::Declined { kept: TierSet::GPU });
    assert_eq!(shell.warm(), "A@cpu", "not on the engine's word alone");
}

#[test]
fn a_declined_reset_counts_again_once_a_marker_came_back_with_no_clear_before_it() {
    for replay in [true, false] {
        let mut history = history();
        let mut shell = Shell::new(replay);
        history.iter().for_each(|b| shell.live(b));
        shell.answer_all(&history);
        declined(&mut shell);
        // What the stream says meanwhile goes on to count.
        history.push(batch(1, 4, &[Store("D"), Remove("B")]));
        history.push(marked(&shell, 5, &[Store("M")]));
        history[4..].iter().for_each(|b| shell.live(b));
        shell.answer_all(&history);
        assert_eq!((shell.warm().as_str(), shell.rank.is_settled()), ("A C D M A@cpu", true));
        assert!(shell.notes.contains(&Note::Kept));
        assert_eq!(shell.rank.trust(), Trust::Exact);
    }
}

#[test]
fn a_clear_before_the_marker_takes_what_a_declined_reset_is_said_to_have_kept() {
    let mut shell = Shell::new(false);
    history().iter().for_each(|b| shell.live(b));
    declined(&mut shell);
    shell.live(&batch(1, 4, &[Clear, Store("D")]));
    shell.live(&marked(&shell, 5, &[Store("M")]));
    assert!(!shell.notes.contains(&Note::Kept));
    assert_eq!(shell.warm(), "");
    shell.live(&batch(1, 6, &[Store("N")]));
    assert_eq!(shell.warm(), "N");
}

/// A clear is published with the scheduler's next step: a quiet publisher shows nothing.
#[test]
fn no_replay_shows_that_a_declined_reset_dropped_nothing() {
    let history = history();
    let mut shell = Shell::started(&history);
    declined(&mut shell);
    for _ in 0..20 {
        shell.feed(Event::Tick);
        shell.answer_all(&history);
    }
    assert_eq!((shell.warm().as_str(), shell.rank.is_settled()), ("A@cpu", false));
}

#[test]
fn what_a_declined_action_is_not_said_to_have_kept_is_gone() {
    let mut shell = Shell::new(false);
    history().iter().for_each(|b| shell.live(b));
    shell.feed(Event::Intent { tiers: TierSet::ALL, clear: Some(all(Disposition::Forgotten)) });
    shell.feed(Event::Declined { kept: TierSet::GPU });
    shell.live(&marked(&shell, 4, &[]));
    assert_eq!(shell.warm(), "A B C");
}

/// Invariant 5 over two losses: of the first no clear tells, as where weights changed.
#[test]
fn a_store_that_an_earlier_loss_overtook_does_not_come_back_with_a_declined_action() {
    for replay in [true, false] {
        let mut shell = Shell::new(replay);
        let mut history = abc();
        history.iter().for_each(|b| shell.live(b));
        shell.answer_all(&history);
        shell.feed(Event::Distrust { kv: all(Disposition::Unknown) });
        shell.asked = None;
        shell.feed(Event::Intent { tiers: TierSet::GPU, clear: Some(local_reset()) });
        // Published before the loss, and delivered now.
        history.push(batch(1, 3, &[Store("L")]));
        shell.live(&history[3]);
        shell.answer_all(&history);
        shell.feed(Event::Declined { kept: TierSet::GPU });
        let mut last = batch(1, 4, &[]);
        last.head.marker = shell.rank.wanted_marker();
        history.push(last);
        shell.live(&history[4]);
        shell.answer_all(&history);
        assert_eq!(shell.warm(), "");
    }
}

#[test]
fn two_declined_resets_in_a_row_keep_what_the_engine_kept() {
    let mut shell = Shell::new(false);
    history().iter().for_each(|b| shell.live(b));
    declined(&mut shell);
    declined(&mut shell);
    shell.live(&marked(&shell, 4, &[]));
    assert_eq!(shell.warm(), "A B C A@cpu");
}

#[test]
fn an_action_that_preserved_what_it_might_have_dropped_leaves_it_warm_at_once() {
    let mut shell = Shell::new(false);
    history().iter().for_each(|b| shell.live(b));
    shell.feed(Event::Intent { tiers: TierSet::ALL, clear: None });
    assert_eq!(shell.warm(), "");
    shell.live(&batch(1, 4, &[Store("D"), Remove("A")]));
    shell.feed(Event::Outcome { kv: all(Disposition::Preserved), clears: false });
    assert_eq!((shell.warm().as_str(), shell.rank.is_settled()), ("B C D A@cpu", true));
}

/// It goes on to be proven by its own marker, not by the second action's word.
#[test]
fn what_waits_for_a_marker_is_not_proven_by_another_action_that_preserved() {
    let mut shell = Shell::new(false);
    history().iter().for_each(|b| shell.live(b));
    declined(&mut shell);
    shell.feed(Event::Intent { tiers: TierSet::GPU, clear: None });
    shell.feed(Event::Outcome { kv: all(Disposition::Preserved), clears: false });
    assert_eq!(shell.warm(), "A@cpu");
    shell.live(&marked(&shell, 4, &[]));
    assert_eq!(shell.warm(), "A B C A@cpu");
}

#[test]
fn a_worker_that_vanished_and_is_the_same_process_is_warm_again() {
    let mut shell = Shell::new(false);
    history().iter().for_each(|b| shell.live(b));
    shell.feed(Event::Lost);
    assert_eq!((shell.warm().as_str(), shell.rank.trust()), ("", Trust::Degraded));
    shell.live(&batch(1, 4, &[Store("D"), Remove("B")]));
    assert_eq!(shell.warm(), "");
    shell.feed(Event::Found);
    assert_eq!((shell.warm().as_str(), shell.rank.trust()), ("A C D A@cpu", Trust::Exact));
}

#[test]
fn a_worker_that_was_found_is_claimed_once_its_stream_is_shown_to_be_its_own() {
    let mut shell = Shell::tying(false);
    history().iter().for_each(|b| shell.live(b));
    shell.live(&marked(&shell, 4, &[]));
    shell.feed(Event::Lost);
    shell.feed(Event::Found);
    assert_eq!(shell.warm(), "suspended");
    shell.live(&marked(&shell, 5, &[]));
    assert_eq!(shell.warm(), "A B C A@cpu");
}

#[test]
fn nothing_comes_back_of_a_vanished_worker_whose_cache_was_cleared_or_whose_life_ended() {
    let mut cleared = Shell::new(false);
    history().iter().for_each(|b| cleared.live(b));
    cleared.feed(Event::Lost);
    cleared.live(&batch(1, 4, &[Clear, Store("D")]));
    assert_eq!(cleared.warm(), "");
    cleared.feed(Event::Found);
    assert_eq!(cleared.warm(), "D");

    let mut ended = Shell::started(&history());
    ended.feed(Event::Lost);
    ended.feed(Event::Disconnected);
    ended.feed(Event::Connected);
    ended.answer_all(&[batch(2, 0, &[Store("Z")])]);
    ended.feed(Event::Found);
    assert_eq!(ended.warm(), "Z");
}

/// What the quiet publisher's second answer decides about waits for it, instead of staying cold.
#[test]
fn a_store_that_comes_while_the_deciding_replay_runs_is_warm_once_the_fence_opens() {
    for is_met in [false, true] {
        let mut history = abc();
        let mut shell = Shell::started(&history);
        if is_met {
            shell.live(&history[2]);
        }
        shell.reset();
        shell.answer(&history);
        assert!(shell.asked.is_some(), "the second answer decides");
        let fresh = batch(1, 3, &[Clear, Store("N")]);
        shell.live(&fresh);
        shell.answer(&history);
        history.push(fresh);
        shell.answer_all(&history);
        assert_eq!((shell.warm().as_str(), shell.rank.is_settled()), ("N", true));
    }
}
