//! What the hunt saw, and what it makes of it.
//! Invariant: counts are the client's own; fak's counters are held against them.

use std::collections::BTreeMap;
use std::fmt;

use crate::fak::{Counted, Told};

/// Counts of one lane, or of all.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    /// Requests answered and refused, actions, accidents.
    pub steps: usize,
    /// Requests that an engine answered to their end.
    pub answered: usize,
    /// Requests turned away, by the code of the answer.
    pub refused: BTreeMap<String, usize>,
    /// Actions through fak, by how they were answered.
    pub acted: BTreeMap<String, usize>,
    /// What was done behind fak's back, and faults.
    pub accidents: usize,
    /// Engines that ended by themselves.
    pub died: usize,
    /// Claims equal to what the engine reused.
    pub confirmed: usize,
    /// Claims below.
    pub under: usize,
    /// Claims above: each has to be explained.
    pub lost: usize,
    /// Those of them that a witness row explains, and those that an event does.
    pub explained: (usize, usize),
    /// Claims above that nothing explains, and other things that must not be.
    pub failures: Vec<String>,
    /// Tokens that engines reused, and those of them that were claimed.
    pub tokens: (u64, u64),
    /// Tokens reused and not claimed, by what was said of the cache: `unknown` after something was
    /// in doubt, `warm` and `cold` where the events were still on their way.
    pub unclaimed: BTreeMap<String, usize>,
}

impl Tally {
    /// One answer.
    pub(super) fn answer(&mut self, told: &Told) {
        self.steps += 1;
        let (200, Some(cached), true) = (told.status, told.cached, told.is_finished) else {
            // A dormant session's is the only request here that is the client's own fault.
            if (400..500).contains(&told.status) && told.status != 409 {
                self.failures.push(format!("a good request was refused: {told:?}"));
            }
            let why = if told.code.is_empty() { "unfinished" } else { &told.code };
            *self.refused.entry(format!("{} {why}", told.status)).or_default() += 1;
            return;
        };
        self.answered += 1;
        let claimed = told.claimed();
        self.tokens.0 += cached;
        self.tokens.1 += claimed.min(cached);
        let unclaimed = usize::try_from(cached.saturating_sub(claimed)).unwrap_or(usize::MAX);
        *self.unclaimed.entry(told.kv.clone()).or_default() += unclaimed;
        match claimed.cmp(&cached) {
            std::cmp::Ordering::Equal => self.confirmed += 1,
            std::cmp::Ordering::Less => self.under += 1,
            std::cmp::Ordering::Greater => self.lost += 1,
        }
        if (told.kv == "warm") != (claimed > 0) {
            self.failures.push(format!("x-fak-kv contradicts x-fak-warm-tokens: {told:?}"));
        }
    }

    /// What fak counted, at the end of a lane.
    pub(super) fn audit(&mut self, counted: &Counted, errors: &[String]) {
        let (over, lost) = (counted.claims("over"), counted.claims("lost_in_flight"));
        if over > 0 {
            let errors = errors.join("\n     ");
            self.failures.push(format!("fak counts {over} claims as over:\n     {errors}"));
        }
        if over + lost != self.lost as u64 {
            let seen = self.lost;
            self.failures.push(format!("fak counts {over} + {lost} claims too high, seen: {seen}"));
        }
    }

    /// All of another's counts too.
    pub(super) fn add(&mut self, other: Self) {
        self.steps += other.steps;
        self.answered += other.answered;
        self.accidents += other.accidents;
        self.died += other.died;
        self.confirmed += other.confirmed;
        self.under += other.under;
        self.lost += other.lost;
        self.explained.0 += other.explained.0;
        self.explained.1 += other.explained.1;
        self.failures.extend(other.failures);
        self.tokens.0 += other.tokens.0;
        self.tokens.1 += other.tokens.1;
        merge(&mut self.refused, other.refused);
        merge(&mut self.acted, other.acted);
        merge(&mut self.unclaimed, other.unclaimed);
    }

    /// Claimed over reused tokens; 1 where nothing was reused.
    pub fn ratio(&self) -> f64 {
        if self.tokens.0 == 0 { 1.0 } else { self.tokens.1 as f64 / self.tokens.0 as f64 }
    }
}

fn merge(into: &mut BTreeMap<String, usize>, from: BTreeMap<String, usize>) {
    for (what, count) in from {
        *into.entry(what).or_default() += count;
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |counts: &BTreeMap<String, usize>| {
            let counts: Vec<_> = counts.iter().map(|(what, n)| format!("{n} {what}")).collect();
            counts.join(", ")
        };
        writeln!(out, "answered {}; refused: {}", self.answered, list(&self.refused))?;
        writeln!(out, "actions: {}", list(&self.acted))?;
        let (accidents, died) = (self.accidents, self.died);
        writeln!(out, "behind fak's back, and faults: {accidents}; engines that died: {died}")?;
        let (row, event) = self.explained;
        writeln!(
            out,
            "claims: {} confirmed, {} under, {} lost in flight ({row} by a row, {event} by \
             an event)",
            self.confirmed, self.under, self.lost
        )?;
        let (reused, claimed) = self.tokens;
        let unclaimed = list(&self.unclaimed);
        writeln!(
            out,
            "tokens: {reused} reused, {claimed} of them claimed; not claimed: {unclaimed}"
        )?;
        for failure in &self.failures {
            writeln!(out, "FAIL {failure}")?;
        }
        let (steps, failed, ratio) = (self.steps, self.failures.len(), self.ratio());
        write!(out, "hunt: {steps} steps, {failed} failures, claimed over reused tokens {ratio:.4}")
    }
}
