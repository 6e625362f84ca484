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
    assert_eq!(chosen(1000, &[worker(0, 1000), bound]), (1, Reason::Session));
    let busy = Candidate { is_bound: true, ..worker(50, 0) };
    assert_eq!(chosen(1000, &[worker(0, 1000), busy, worker(0, 0)]), (0, Reason::Prefix));
    let soon = Candidate { predicted: 800, ..worker(0, 100) };
    assert_eq!(chosen(1000, &[worker(0, 0), soon]), (1, Reason::Predicted));
    // 32 tokens are no match.
    assert_eq!(chosen(33, &[worker(1, 32), worker(0, 0)]), (1, Reason::Load));
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
            Some(choice) => assert!(fleet[choice.chosen].is_serving, "seed {seed}"),
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
