//! What must the decision table hold?
//!
//! The rows of DESIGN section 4 literally; then its invariants over the closed vocabularies; then
//! the verdicts that CASES parts A and B ask for.

mod cases;
mod effects;
mod sweep;
mod walk;

use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;

use super::*;

/// A row as DESIGN writes it; `demoted` in the order gpu, cpu, disk, remote.
fn line(row: &Row) -> String {
    let demoted: Vec<&str> = row.demoted.iter().map(Tier::as_str).collect();
    let serving = match row.serving {
        Some(true) => "yes",
        Some(false) => "no",
        None => "by phase",
    };
    format!(
        "{} | {} | {} | {} | {} | {} | {} | {} | {} | {}",
        row.action,
        row.circumstance,
        row.sent,
        row.phase,
        row.tiers.gpu,
        row.tiers.cpu,
        row.tiers.disk,
        row.tiers.remote,
        if demoted.is_empty() { "-".to_string() } else { demoted.join(" ") },
        serving
    )
}

#[test]
fn the_five_base_rows_hold_exactly() {
    let rows: Vec<String> = table()
        .take_while(|row| row.base)
        .map(|row| {
            let (warm, serving) = (row.warm_demoted(), row.serving);
            format!(
                "{}, {} | {} | {} | {warm} | {serving:?}",
                row.action,
                row.circumstance,
                row.phase,
                row.kv()
            )
        })
        .collect();
    let expected = [
        "pause, default | paused | preserved | false | Some(false)",
        "sleep, level 1 | sleeping | forgotten | true | Some(false)",
        "sleep, level 2 | sleeping | forgotten | true | Some(false)",
        "sleep, no level | error | unknown | true | Some(false)",
        "reset, success:true | serving | forgotten | true | Some(true)",
        "wake, full, same weights | serving | unknown | true | Some(true)",
    ];
    assert_eq!(rows, expected);
    assert_eq!(table().filter(|row| row.base).count(), expected.len(), "none comes later");
}

#[test]
fn every_row_of_the_table_holds() {
    let expected: Vec<&str> = include_str!("expected_table.txt")
        .lines()
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .collect();
    let rows: Vec<String> = table().map(|row| line(&row)).collect();
    for (row, expected) in rows.iter().zip(&expected) {
        assert_eq!(row, expected);
    }
    assert_eq!(rows.len(), expected.len());
}

/// An engine of vLLM 0.23.0 or later, with every tier and vLLM's offloading connector.
const READY: Capabilities = Capabilities {
    pauses: Pauses::Modes,
    is_sleeping_counts_pause: true,
    keep_argument: false,
    reaches_connector: true,
    reset_external: Some(true),
    table_survives_sleep: false,
    staged_wake: true,
    connector: Connector::OFFLOADING,
    tiers: TierSet::ALL,
};

const PAUSE: Move = Move::Pause { mode: Mode::Keep, clear: false, keep_tier: false };
const CLEAR: Move = Move::Pause { mode: Mode::Keep, clear: true, keep_tier: false };
const RESET: Move = Move::Reset { external: false, running: false };
const RESET_EXTERNAL: Move = Move::Reset { external: true, running: false };
const WAKE: Move = Move::Wake { tags: Parts::NONE, weights: Weights::Unproven };

const fn sleep(level: Level, keep_tier: bool) -> Move {
    Move::Sleep { level: Some(level), mode: Mode::Wait, keep_tier }
}

const fn state(paused: bool, sleeping: bool, sleep_state: Option<SleepState>) -> State {
    State { is_paused: Some(paused), is_sleeping: Some(sleeping), sleep_state, ..State::UNREAD }
}

const AWAKE: State = state(false, false, Some(SleepState::Awake));
const STOPPED: State = state(true, true, Some(SleepState::Awake));
const SLEEPS_1: State = state(true, true, Some(SleepState::One));
const SLEEPS_2: State = state(true, true, Some(SleepState::Two));

/// A worker as a sequence of moves leaves it.
struct Worker {
    caps: Capabilities,
    now: Standing,
}

impl Worker {
    fn serving(caps: Capabilities) -> Self {
        Self { caps, now: Standing::SERVING }
    }

    fn take(&mut self, mv: Move, answer: Answer, state: State) -> Verdict {
        self.see(mv, answer, Observed::State(state))
    }

    fn see(&mut self, mv: Move, answer: Answer, observed: Observed) -> Verdict {
        let verdict = judge(mv, &self.caps, &self.now, answer, &observed);
        self.now = verdict.next;
        verdict
    }

    fn refusal(&self, mv: Move) -> Option<Refusal> {
        match plan(mv, &self.caps, &self.now) {
            Plan::Refuse(refusal) => Some(refusal),
            Plan::Send { .. } => None,
        }
    }

    fn calls(&self, mv: Move) -> Vec<String> {
        match plan(mv, &self.caps, &self.now) {
            Plan::Refuse(refusal) => panic!("refused: {refusal}"),
            Plan::Send { calls, .. } => calls.iter().map(ToString::to_string).collect(),
        }
    }
}
