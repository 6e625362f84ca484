//! Routing against its invariants and the cases that name it.

use std::vec;
use std::vec::Vec;

use super::*;

fn worker(load: u32, gpu: u32) -> Candidate {
    let proven = PerTier { gpu, ..PerTier::default() };
    Candidate { is_serving: true, load, proven, ..Candidate::default() }
}

fn chosen(prompt_tokens: u32, candidates: &[Candidate]) -> (usize, Reason) {
    let choose = |seed| route(&Request { prompt_tokens }, candidates, &Policy::default(), seed);
    let decision = choose(1).expect("somebody serves");
    for seed in 2..20 {
        assert_eq!(choose(seed), Some(decision), "no tie to settle");
    }
    (decision.chosen, decision.reason)
}

/// Case 61.
#[test]
fn a_shared_prompt_does_not_drag_the_fleet_onto_one_worker() {
    let mut fleet = vec![worker(0, 1000), worker(0, 0), worker(0, 0), worker(0, 0)];
    let mut taken = [0u32; 4];
    for seed in 0..100 {
        let request = Request { prompt_tokens: 1200 };
        let choice = route(&request, &fleet, &Policy::default(), seed).expect("all serve");
        taken[choice.chosen] += 1;
        fleet[choice.chosen].load += 1;
    }
    assert!(taken.iter().all(|n| *n <= 45), "{taken:?}");
    // Round robin gives the holder a quarter.
    assert!(taken[0] > 25, "{taken:?}");
}

/// Case 62.
#[test]
fn one_hot_worker_does_not_switch_affinity_off() {
    let loads = [100, 2, 0, 0];
    let fleet = |held: [u32; 4]| -> Vec<_> {
        loads.iter().zip(held).map(|(load, held)| worker(*load, held)).collect()
    };
    assert_eq!(chosen(1000, &fleet([0, 0, 900, 0])), (2, Reason::Prefix));
    assert_eq!(chosen(1000, &fleet([900, 300, 0, 0])), (1, Reason::Overload));
    let elsewhere =
        route(&Request { prompt_tokens: 1000 }, &fleet([900, 0, 0, 0]), &Policy::default(), 7);
    let elsewhere = elsewhere.expect("all serve");
    assert!(elsewhere.chosen >= 2, "{elsewhere:?}");
    assert_eq!(elsewhere.reason, Reason::Overload);
}

/// Case 66.
#[test]
fn siblings_stay_together_before_the_first_event() {
    for seed in 0..50 {
        let mut fleet = vec![worker(0, 0); 4];
        for sibling in 0..8 {
            let request = Request { prompt_tokens: 2000 };
            let choice = route(&request, &fleet, &Policy::default(), seed + sibling * 1000);
            let chosen = choice.expect("all serve").chosen;
            fleet[chosen].load += 1;
            fleet[chosen].predicted = 2000;
        }
        let used = fleet.iter().filter(|c| c.load > 0).count();
        assert!(used <= 2, "{fleet:?}");
    }
}

#[test]
fn every_reason_has_its_case() {
    assert_eq!(route(&Request { prompt_tokens: 9 }, &[], &Policy::default(), 0), None);
    let asleep = Candidate { is_serving: false, ..worker(0, 1000) };
    assert_eq!(chosen(1000, &[asleep, worker(9, 0)]), (1, Reason::Only));
    let bound = Candidate { is_bound: true, ..worker(1, 0) };
    assert_eq!(chosen(1000, &[worker(0, 400), bound]), (1, Reason::Session));
    let busy = Candidate { is_bound: true, ..worker(50, 0) };
    assert_eq!(chosen(1000, &[worker(0, 1000), busy, worker(0, 0)]), (0, Reason::Overload));
    assert_eq!(chosen(1000, &[worker(0, 1000), worker(0, 0)]), (0, Reason::Prefix));
    let soon = Candidate { predicted: 800, ..worker(0, 100) };
    assert_eq!(chosen(1000, &[worker(0, 0), soon]), (1, Reason::Predicted));
    // 63 tokens are no match.
    assert_eq!(chosen(65, &[worker(1, 63), worker(0, 0)]), (1, Reason::Load));
    assert_eq!(chosen(65, &[worker(1, 64), worker(0, 0)]), (0, Reason::Prefix));
}

/// Two workers, the loads of an idle one and of one with everything: the mean of both is half of
/// the larger, so that no load could be too much where it counted itself.
#[test]
fn of_two_workers_one_can_have_too_much_to_do() {
    let bound = |load| Candidate { is_bound: true, ..worker(load, 4000) };
    assert_eq!(chosen(4000, &[bound(4), worker(0, 0)]), (0, Reason::Session));
    assert_eq!(chosen(4000, &[bound(5), worker(0, 0)]), (1, Reason::Overload));
    assert_eq!(chosen(4000, &[bound(19), worker(10, 0)]), (0, Reason::Session));
    assert_eq!(chosen(4000, &[bound(20), worker(10, 0)]), (1, Reason::Overload));
    assert_eq!(chosen(4000, &[worker(5, 4000), worker(0, 0)]), (1, Reason::Overload));
    // And of three, what one has more counts against the other two alone.
    let three = [bound(11), worker(4, 0), worker(4, 0)];
    let choice = route(&Request { prompt_tokens: 4000 }, &three, &Policy::default(), 7);
    let choice = choice.expect("all serve");
    assert_eq!((choice.chosen != 0, choice.reason), (true, Reason::Overload));
}

#[test]
fn a_sessions_own_worker_is_worth_more_of_a_wait_the_longer_its_prompt_is() {
    let bound = Candidate { is_bound: true, ..worker(4, 0) };
    assert_eq!(chosen(4000, &[bound, worker(0, 0)]), (0, Reason::Session));
    assert_eq!(chosen(1300, &[bound, worker(0, 0)]), (1, Reason::Overload));
    assert_eq!(chosen(425, &[bound, worker(0, 0)]), (1, Reason::Overload));
}

/// Against the outputs of SplitMix64 as its author published it, from the state 0.
#[test]
fn ties_are_settled_at_random() {
    let outputs = [0xE220_A839_7B1D_CDAF, 0x6E78_9E6A_A1B9_65F4, 0x06C4_5D18_8009_454F];
    assert_eq!([tie(0, 1), tie(0, 2), tie(0, 3)], outputs);
    assert_eq!(tie(0x9E37_79B9_7F4A_7C15, 1), 0, "seed and candidate cancel out");
}

/// Plays sessions that are all bound to one worker of `workers`, so many requests at a time; the
/// number of sessions on each after ten turns of each.
fn after_ten_turns(
    sessions: usize,
    at_once: usize,
    prompt_tokens: u32,
    workers: usize,
) -> Vec<usize> {
    let mut bound = vec![0; sessions];
    let mut running: std::collections::VecDeque<usize> = std::collections::VecDeque::new();
    for turn in 0..10 * sessions {
        if running.len() == at_once {
            running.pop_front();
        }
        let session = turn * 7 % sessions;
        let candidate = |number| Candidate {
            is_bound: bound[session] == number,
            ..worker(running.iter().filter(|on| **on == number).count() as u32, 0)
        };
        let fleet: Vec<_> = (0..workers).map(candidate).collect();
        let choice = route(&Request { prompt_tokens }, &fleet, &Policy::default(), turn as u64);
        bound[session] = choice.expect("all serve").chosen;
        running.push_back(bound[session]);
    }
    (0..workers).map(|number| bound.iter().filter(|on| **on == number).count()).collect()
}

#[test]
fn sessions_leave_a_worker_that_has_all_of_them_and_stay_where_they_are_alone() {
    for (sessions, at_once, workers) in [(40, 8, 2), (150, 16, 2), (150, 24, 3)] {
        let spread = after_ten_turns(sessions, at_once, 8000, workers);
        let fair = sessions / workers;
        assert!(spread.iter().all(|on| *on >= fair / 3), "{sessions} of {at_once}: {spread:?}");
    }
    // Short prompts move sooner: four at a time do.
    let spread = after_ten_turns(16, 4, 425, 2);
    assert!(spread.iter().all(|on| *on >= 3), "{spread:?}");
    // No request ever waits for another: there is nothing to gain.
    assert_eq!(after_ten_turns(40, 1, 425, 2), [40, 0]);
}

#[test]
fn a_short_prompt_is_worth_less_of_a_wait_than_a_long_one() {
    assert_eq!(chosen(425, &[worker(2, 416), worker(0, 0)]), (1, Reason::Overload));
    assert_eq!(chosen(950, &[worker(2, 900), worker(0, 0)]), (0, Reason::Prefix));
    assert_eq!(chosen(950, &[worker(3, 900), worker(0, 0)]), (1, Reason::Overload));
    assert_eq!(chosen(4250, &[worker(3, 4160), worker(0, 0)]), (0, Reason::Prefix));
    assert_eq!(chosen(425, &[worker(1, 416), worker(0, 0)]), (0, Reason::Prefix));
}

#[test]
fn requests_of_others_are_load_and_a_gateways_own_count_once() {
    assert_eq!(foreign(50, 0, 0), 50);
    assert_eq!(foreign(50, 20, 1_000), 30);
    assert_eq!(foreign(20, 50, 0), 0, "some have ended since");
    assert_eq!(foreign(50, 0, COUNT_HALVES_MS), 25);
    assert_eq!(foreign(u32::MAX, 0, 40 * COUNT_HALVES_MS), 0);
    assert_eq!(foreign(u32::MAX, 0, u64::MAX), 0);
}

#[test]
fn a_worker_that_fails_is_chosen_only_where_all_do() {
    let failing = |load, gpu| Candidate { is_failing: true, ..worker(load, gpu) };
    assert_eq!(chosen(1000, &[failing(0, 1000), worker(90, 0)]), (1, Reason::Only));
    let bound = Candidate { is_bound: true, ..failing(0, 1000) };
    assert_eq!(chosen(1000, &[bound, worker(9, 0), worker(1, 0)]), (2, Reason::Load));
    assert_eq!(chosen(1000, &[failing(0, 1000), failing(9, 0)]), (0, Reason::Prefix));
    let asleep = Candidate { is_serving: false, ..worker(0, 0) };
    assert_eq!(chosen(1000, &[failing(0, 0), asleep]), (0, Reason::Only));
}

#[test]
fn what_lies_nearer_counts_more_and_what_is_proven_more_than_what_is_expected() {
    let on = |tier| {
        let mut proven = PerTier::default();
        *proven.get_mut(tier) = 1000;
        Candidate { proven, ..worker(0, 0) }
    };
    assert_eq!(chosen(1000, &[on(Tier::Cpu), on(Tier::Gpu)]).0, 1);
    assert_eq!(chosen(1000, &[on(Tier::Cpu), on(Tier::Disk)]).0, 0);
    let expected = Candidate { predicted: 1000, ..worker(0, 0) };
    assert_eq!(chosen(1000, &[expected, on(Tier::Gpu)]), (1, Reason::Prefix));
}

/// A generator of its own, since the kernel has no dependency. Its seed is in every message.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(1);
        tie(self.0, 1)
    }

    /// Small, large and extreme values alike.
    fn number(&mut self) -> u32 {
        let value = self.next();
        match value % 4 {
            0 => 0,
            1 => (value >> 8) as u32 % 20,
            2 => (value >> 8) as u32 % 4000,
            _ => (value >> 8) as u32,
        }
    }

    fn candidate(&mut self) -> Candidate {
        Candidate {
            is_serving: !self.next().is_multiple_of(3),
            is_failing: self.next().is_multiple_of(4),
            is_bound: self.next().is_multiple_of(5),
            load: self.number(),
            proven: PerTier { gpu: self.number(), cpu: self.number(), ..PerTier::default() },
            predicted: self.number(),
        }
    }

    fn fleet(&mut self) -> Vec<Candidate> {
        (0..self.next() % 6).map(|_| self.candidate()).collect()
    }
}

#[test]
fn only_who_serves_is_chosen_and_always_somebody() {
    for seed in 0..20_000 {
        let mut random = Random(seed << 20);
        let (fleet, request) = (random.fleet(), Request { prompt_tokens: random.number() });
        let choice = route(&request, &fleet, &Policy::default(), seed);
        assert_eq!(choice, route(&request, &fleet, &Policy::default(), seed), "seed {seed}");
        match choice {
            Some(choice) => {
                assert!(fleet[choice.chosen].is_serving, "seed {seed}");
                let is_any_sound = fleet.iter().any(|c| c.is_serving && !c.is_failing);
                assert!(!(is_any_sound && fleet[choice.chosen].is_failing), "seed {seed}");
            }
            None => assert!(fleet.iter().all(|c| !c.is_serving), "seed {seed}"),
        }
    }
}

#[test]
fn more_load_never_attracts() {
    for seed in 0..50_000 {
        let mut random = Random(seed << 20);
        let (fleet, request) = (random.fleet(), Request { prompt_tokens: random.number() });
        let policy = Policy { load_weight: random.number(), ..Policy::default() };
        let chosen = |fleet: &[_]| route(&request, fleet, &policy, seed).map(|d| d.chosen);
        let before = chosen(&fleet);
        for which in 0..fleet.len() {
            let mut loaded = fleet.clone();
            loaded[which].load = loaded[which].load.saturating_add(random.number().max(1));
            if before != Some(which) {
                assert_ne!(chosen(&loaded), Some(which), "seed {seed}: {fleet:?}");
            }
        }
    }
}
