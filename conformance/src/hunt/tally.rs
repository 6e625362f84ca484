//! What the hunt saw, and what it makes of it.
//! Invariant: counts are the client's own. fak's counters are held against them one by one: each
//! claim that a client was told is one that fak counts, with the outcome that the client saw.

use std::collections::BTreeMap;
use std::fmt;

use fak_sim::Reused;

use crate::fak::{Acted, Ask, Counted, Told};
use crate::prompt::BLOCK_SIZE;

/// What else went on when a request was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Heard {
    /// Nothing.
    Alone,
    /// Other requests: one may use what another is about to store.
    Together,
    /// Something happened shortly before, or happens now.
    Disturbed,
}

/// Claims in the answers of one life of fak's, by their headers and by what the engine then told.
#[derive(Clone, Debug, Default)]
struct Seen {
    warm: u64,
    cold: u64,
    /// Tokens claimed, by tier.
    tokens: BTreeMap<String, u64>,
    confirmed: u64,
    under: u64,
    above: u64,
    /// Of answers that ended without a number.
    unaudited: u64,
}

impl Seen {
    fn answer(&mut self, told: &Told) {
        match told.kv.as_str() {
            "warm" => self.warm += 1,
            "cold" => self.cold += 1,
            _ => return,
        }
        for (tier, tokens) in &told.claims {
            *self.tokens.entry(tier.clone()).or_default() += tokens;
        }
        let ended = match (told.status, told.cached, told.is_finished) {
            (200, Some(cached), true) => match told.claimed().cmp(&cached) {
                std::cmp::Ordering::Equal => &mut self.confirmed,
                std::cmp::Ordering::Less => &mut self.under,
                std::cmp::Ordering::Greater => &mut self.above,
            },
            _ => &mut self.unaudited,
        };
        *ended += 1;
    }

    /// Where fak's counters are not what was seen. A claim that waits for the event that explains
    /// it has no outcome yet: each class may lack some, all together as many as wait.
    fn differences(&self, counted: &Counted) -> Vec<String> {
        let made = |kv: &str| counted.get(&format!("fak_claims_made_total{{kv=\"{kv}\"}}")) as u64;
        let tokens = |tier: &str| {
            counted.get(&format!("fak_claims_made_tokens_total{{tier=\"{tier}\"}}")) as u64
        };
        let mut wrong = Vec::new();
        let mut hold = |what: &str, seen: u64, counted: u64, lacking: u64| {
            if counted > seen || seen - counted > lacking {
                wrong.push(format!("{what}: {seen} seen, {counted} counted by fak"));
            }
            seen.saturating_sub(counted)
        };
        hold("warm", self.warm, made("warm"), 0);
        hold("cold", self.cold, made("cold"), 0);
        for tier in ["gpu", "cpu", "disk", "remote"] {
            let seen = self.tokens.get(tier).copied().unwrap_or(0);
            hold(&format!("{tier} tokens"), seen, tokens(tier), 0);
        }
        let waiting = counted.claims_waiting();
        let lost = counted.claims("lost_in_flight") + counted.claims("lost_to_own_action");
        let above = lost + counted.claims("over");
        let lacking = hold("confirmed", self.confirmed, counted.claims("confirmed"), 0)
            + hold("under", self.under, counted.claims("under"), waiting)
            + hold("above", self.above, above, waiting)
            + hold("unaudited", self.unaudited, counted.claims("unaudited"), 0);
        hold("claims without an outcome", lacking, waiting, 0);
        wrong
    }
}

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
    /// Those of them that an event explains, with those too high on the gpu tier alone, and `cold`
    /// of what was cached.
    pub explained: usize,
    /// `cold` of what was cached: each has to be explained.
    pub false_cold: usize,
    /// What fak's counters are held against.
    seen: Seen,
    /// Tokens that were claimed rightly, and those that events had told and were not claimed.
    pub told: (u64, u64),
    /// The latter, by what happened last and what fak said of the prompt.
    pub missed: BTreeMap<String, u64>,
    /// Claims above that nothing explains, and other things that must not be.
    pub failures: Vec<String>,
    /// Tokens that engines reused, and those of them that were claimed.
    pub tokens: (u64, u64),
    /// The same of requests that nothing disturbed, without what no event tells of.
    pub quiet: (u64, u64),
    /// And of these those of whose prompts fak did not say `unknown`: what it has lost sight of in
    /// a doubt stays so until the engine stores it anew.
    pub known: (u64, u64),
    /// Tokens reused and not claimed, by why.
    pub unclaimed: BTreeMap<String, u64>,
}

impl Tally {
    /// One answer, and where its cached tokens came from, where anything tells.
    pub(super) fn answer(&mut self, ask: &Ask, told: &Told, reused: Option<Reused>, heard: Heard) {
        self.steps += 1;
        self.seen.answer(told);
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
        self.count_tokens(ask, told, cached, (reused, heard));
        match claimed.cmp(&cached) {
            std::cmp::Ordering::Equal => self.confirmed += 1,
            std::cmp::Ordering::Less => self.under += 1,
            std::cmp::Ordering::Greater => self.lost += 1,
        }
        self.false_cold += usize::from(told.is_false_cold());
        if (told.kv == "warm") != (claimed > 0) {
            self.failures.push(format!("x-fak-kv contradicts x-fak-warm-tokens: {told:?}"));
        }
    }

    fn count_tokens(
        &mut self,
        ask: &Ask,
        told: &Told,
        cached: u64,
        (reused, heard): (Option<Reused>, Heard),
    ) {
        let claimed = told.claimed().min(cached);
        self.tokens.0 += cached;
        self.tokens.1 += claimed;
        let mut unclaimed = cached - claimed;
        let mut silent = |why: &str, tokens: u64| {
            let tokens = tokens.min(unclaimed);
            unclaimed -= tokens;
            if tokens > 0 {
                *self.unclaimed.entry(why.to_owned()).or_default() += tokens;
            }
            tokens
        };
        // A connector may load the block with the prompt's last token too, which is then computed
        // anew; no claim counts it.
        let last = if cached == ask.prompt.len() as u64 { BLOCK_SIZE as u64 } else { 0 };
        let by_design = silent("of the last block", last)
            + silent("of a silent store", reused.map_or(0, |reused| reused.remote as u64));
        let kv = &told.kv;
        match heard {
            Heard::Alone => silent(&format!("{kv}, alone"), u64::MAX),
            Heard::Together => silent(&format!("{kv}, together"), u64::MAX),
            Heard::Disturbed => silent(&format!("{kv}, disturbed"), u64::MAX),
        };
        if heard == Heard::Alone {
            self.quiet.0 += cached - by_design;
            self.quiet.1 += claimed;
        }
        if heard == Heard::Alone && kv != "unknown" {
            self.known.0 += cached - by_design;
            self.known.1 += claimed;
        }
    }

    /// An answer of a request whose prompt's first `published` tokens were on the gpu by all that
    /// was published when it was sent.
    pub(super) fn told(&mut self, told: &Told, published: u64, last: &str) -> u64 {
        let (Some(cached), true) = (told.cached, told.is_finished) else { return 0 };
        let claimed = told.claimed().min(cached);
        let missed = published.min(cached).saturating_sub(claimed);
        self.told.0 += claimed;
        self.told.1 += missed;
        if missed > 0 {
            *self.missed.entry(format!("{} {last}", told.kv)).or_default() += missed;
        }
        missed
    }

    /// Claimed over claimed and told.
    pub fn told_ratio(&self) -> f64 {
        ratio((self.told.0 + self.told.1, self.told.0))
    }

    /// An action through fak.
    pub(super) fn act(&mut self, name: &str, acted: &Acted) {
        self.steps += 1;
        let reason = acted.row["reason"].as_str().unwrap_or("without a row");
        *self.acted.entry(format!("{name} {reason}")).or_default() += 1;
    }

    /// What fak counted, at the end of a life of its.
    pub(super) fn audit(&mut self, counted: &Counted, errors: &[String]) {
        let over = counted.claims("over");
        if over > 0 {
            let errors = errors.join("\n     ");
            self.failures.push(format!("fak counts {over} claims as over:\n     {errors}"));
        }
        let wrong = std::mem::take(&mut self.seen).differences(counted);
        self.failures
            .extend(wrong.into_iter().map(|wrong| format!("claims do not add up: {wrong}")));
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
        self.false_cold += other.false_cold;
        self.explained += other.explained;
        self.told.0 += other.told.0;
        self.told.1 += other.told.1;
        self.failures.extend(other.failures);
        self.tokens.0 += other.tokens.0;
        self.tokens.1 += other.tokens.1;
        self.quiet.0 += other.quiet.0;
        self.quiet.1 += other.quiet.1;
        self.known.0 += other.known.0;
        self.known.1 += other.known.1;
        merge(&mut self.refused, other.refused);
        merge(&mut self.acted, other.acted);
        merge(&mut self.unclaimed, other.unclaimed);
        merge(&mut self.missed, other.missed);
    }

    /// Claimed over reused tokens.
    pub fn ratio(&self) -> f64 {
        ratio(self.tokens)
    }

    /// The same of requests that nothing disturbed and nothing is in doubt of.
    pub fn known_ratio(&self) -> f64 {
        ratio(self.known)
    }
}

/// Of all reused tokens and the claimed ones; 1 where nothing was reused.
fn ratio((reused, claimed): (u64, u64)) -> f64 {
    if reused == 0 { 1.0 } else { claimed as f64 / reused as f64 }
}

fn merge<T: std::ops::AddAssign + Default>(
    into: &mut BTreeMap<String, T>,
    from: BTreeMap<String, T>,
) {
    for (what, count) in from {
        *into.entry(what).or_default() += count;
    }
}

fn list<T: fmt::Display>(counts: &BTreeMap<String, T>) -> String {
    let counts: Vec<_> = counts.iter().map(|(what, n)| format!("{n} {what}")).collect();
    counts.join(", ")
}

impl fmt::Display for Tally {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(out, "answered {}; refused: {}", self.answered, list(&self.refused))?;
        writeln!(out, "actions: {}", list(&self.acted))?;
        let (accidents, died) = (self.accidents, self.died);
        writeln!(out, "behind fak's back, and faults: {accidents}; engines that died: {died}")?;
        writeln!(
            out,
            "claims: {} confirmed, {} under, {} above, {} cold of what was cached; {} explained by \
             an event, with those above on the gpu tier alone",
            self.confirmed, self.under, self.lost, self.false_cold, self.explained
        )?;
        let (reused, claimed) = self.tokens;
        let unclaimed = list(&self.unclaimed);
        writeln!(
            out,
            "tokens: {reused} reused, {claimed} of them claimed; not claimed: {unclaimed}"
        )?;
        let (share, known) = (ratio(self.quiet), self.known_ratio());
        let (reused, claimed) = self.quiet;
        writeln!(
            out,
            "undisturbed: {reused} reused, {claimed} of them claimed: {share:.4}; {known:.4} where \
             nothing is in doubt"
        )?;
        writeln!(out, "told and not claimed: {}", list(&self.missed))?;
        for failure in &self.failures {
            writeln!(out, "FAIL {failure}")?;
        }
        let (steps, failed, ratio) = (self.steps, self.failures.len(), self.ratio());
        let told = self.told_ratio();
        write!(
            out,
            "hunt: {steps} steps, {failed} failures, claimed over told tokens {told:.4}, over \
             reused {ratio:.4}"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(kv: &str, claimed: u64, cached: Option<u64>) -> Told {
        let claims = if claimed > 0 { vec![("gpu".to_owned(), claimed)] } else { Vec::new() };
        let kv = kv.to_owned();
        Told { status: 200, kv, claims, cached, is_finished: cached.is_some(), ..Told::default() }
    }

    /// What fak says of three warm claims of 32 tokens, a cold one, and their ends.
    fn page(ends: &[(&str, u64)], tokens: u64) -> Counted {
        let made = "fak_claims_made_total{kv=\"warm\"} 3\nfak_claims_made_total{kv=\"cold\"} 1\n";
        let tokens = format!("fak_claims_made_tokens_total{{tier=\"gpu\"}} {tokens}\n");
        let ends = ends
            .iter()
            .map(|(outcome, count)| format!("fak_claims_total{{outcome=\"{outcome}\"}} {count}\n"));
        Counted::of(made.to_owned() + &tokens + &ends.collect::<String>())
    }

    #[test]
    fn each_claim_is_one_that_fak_counts_as_it_was_seen() {
        let mut seen = Seen::default();
        for answer in [
            told("warm", 32, Some(32)),
            told("warm", 32, Some(0)),
            told("warm", 32, None),
            told("cold", 0, Some(0)),
            told("unknown", 0, Some(64)),
        ] {
            seen.answer(&answer);
        }
        let holds = |ends: &[(&str, u64)], tokens| seen.differences(&page(ends, tokens)).is_empty();
        assert!(holds(&[("confirmed", 2), ("lost_in_flight", 1), ("unaudited", 1)], 96));
        assert!(holds(&[("confirmed", 2), ("over", 1), ("unaudited", 1)], 96));
        assert!(holds(&[("confirmed", 2), ("unaudited", 1)], 96), "one waits for its event");
        assert!(!holds(&[("confirmed", 1), ("lost_in_flight", 1), ("unaudited", 1)], 96));
        assert!(!holds(&[("confirmed", 3), ("unaudited", 1)], 96), "one is acquitted");
        assert!(!holds(&[("confirmed", 2), ("lost_in_flight", 2)], 96), "one is denied");
        assert!(!holds(&[("confirmed", 2), ("lost_in_flight", 1), ("unaudited", 1)], 64));
    }
}
