//! What was proven by an answer and an observation?
//!
//! Invariant: every way out but one ([`Case::settle`] after [`Case::reached`]) leaves the gpu tier
//! unknown or forgotten and the worker not serving.

use super::plan::{
    Fate, Fates, Wake, clears, promise, reset_without_clear, resets_external, unproven_reset,
};
use super::{
    Answer, Capabilities, Clear, Level, Mode, Move, Observed, Part, Parts, Quarantine, Reason,
    Refusal, Seen, Standing, State, Verdict, Weights,
};
use crate::vocab::{
    Disposition::{self, Forgotten, Preserved, Unknown},
    Evidence, PerTier, Phase, Tier, TierSet,
};

/// The verdict on `mv`, made on a worker that stood as `before`. Of a move that was noticed and not
/// asked, the answer is not read.
#[must_use]
pub fn judge(
    mv: Move,
    caps: &Capabilities,
    before: &Standing,
    answer: Answer,
    observed: &Observed,
) -> Verdict {
    let seen = Seen::read(observed, caps);
    let state = match observed {
        Observed::State(state) => *state,
        Observed::Nothing | Observed::Gone => State::UNREAD,
    };
    let case = Case { mv, caps, before, seen, state, wake: Wake::of(mv, caps, before) };
    match mv {
        Move::Join | Move::Restart | Move::Lost | Move::Gap => case.noticed(),
        Move::Weights | Move::Drift | Move::ClearUnexplained => case.noticed(),
        Move::Quarantine(Quarantine::Isolate) => case.untouched(TierSet::NONE, Reason::Isolated),
        _ => case.asked(answer),
    }
}

/// A call that came back with success, as far as the answer goes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Claim {
    /// It did what was asked.
    Done,
    /// `success:false`.
    Declined,
    /// A reset that did not say.
    NoBody,
}

#[derive(Clone, Copy)]
struct Case<'a> {
    mv: Move,
    caps: &'a Capabilities,
    before: &'a Standing,
    seen: Seen,
    state: State,
    wake: Wake,
}

impl Case<'_> {
    fn asked(self, answer: Answer) -> Verdict {
        match answer {
            Answer::NotSent(refusal) => self.untouched(TierSet::NONE, Reason::NotSent(refusal)),
            Answer::Refused if self.nothing_moved() => {
                self.untouched(self.demoted_before(), Reason::Refused)
            }
            Answer::Refused => self.unproven(Reason::Contradicted, Evidence::Answered),
            Answer::Failed => self.unproven(Reason::Failed, Evidence::Answered),
            Answer::Mismatch => self.unproven(Reason::AnswerMismatch, Evidence::Answered),
            Answer::Timeout => self.unproven(Reason::Timeout, Evidence::None),
            Answer::Cut => self.unproven(Reason::Cut, Evidence::None),
            Answer::Unrecorded => self.unproven(Reason::Unrecorded, Evidence::None),
            Answer::AwaitsWeights if self.awaits_weights() => {
                let fates = Fates::of(Unknown, Unknown, Unknown);
                self.settle(Phase::Waking, fates, Evidence::Observed, Reason::WeightsNotProven)
            }
            Answer::AwaitsWeights => self.unproven(Reason::Contradicted, Evidence::Answered),
            Answer::Success(false) if !self.ends_in_reset() => {
                self.unproven(Reason::AnswerMismatch, Evidence::Answered)
            }
            Answer::Success(false) => self.claimed(Claim::Declined),
            Answer::Ok | Answer::NoBody if self.ends_in_reset() => self.claimed(Claim::NoBody),
            Answer::Ok | Answer::NoBody | Answer::Success(true) => self.claimed(Claim::Done),
        }
    }

    /// Whether a refusal left the engine as it was: of several calls it may be the second that was
    /// refused, so that the state has to be seen.
    fn nothing_moved(&self) -> bool {
        let is_one_call = !self.wake.resets;
        self.before.agrees(self.seen) && (is_one_call || self.seen != Seen::Nothing)
    }

    /// Whether the engine is where a wake waits for its weights' owner: wholly awake, or with its
    /// weights' memory alone.
    fn awaits_weights(&self) -> bool {
        let is_part_awake = matches!(self.seen, Seen::Sleeping(_) | Seen::PausedOrSleeping);
        self.wake.reloads && (self.seen == Seen::Serving || self.wake.staged && is_part_awake)
    }

    fn ends_in_reset(&self) -> bool {
        self.wake.resets || matches!(self.mv, Move::Reset { .. } | Move::Quarantine(_))
    }

    fn demoted_before(&self) -> TierSet {
        promise(self.mv, self.caps, self.before, &self.state).demoted(self.caps.present())
    }

    /// The engine claims success: hold it against what was seen.
    fn claimed(self, claim: Claim) -> Verdict {
        let phase = match self.reached() {
            Ok(phase) => phase,
            Err(reason) => return self.unproven(reason, Evidence::Answered),
        };
        if self.state.canary == Some(false) {
            return self.unproven(Reason::CanaryMismatch, Evidence::Answered);
        }
        if self.still_runs() {
            return self.unproven(Reason::NoEffect, Evidence::Answered);
        }
        let (mut fates, mut reason) = self.cleared(claim);
        let cold = fates.gpu == Fate::Is(Forgotten) || matches!(self.mv, Move::Wake { .. });
        if cold && self.state.local_hits == Some(true) {
            return self.unproven(Reason::HitsAfterClear, Evidence::Answered);
        }
        match self.state.external_hits {
            Some(true) if self.drops_external() => {
                // The hits prove a tier kept where there is but one that they can come from.
                let only_cpu = self.external() == TierSet::of(Tier::Cpu);
                fates.cpu = Fate::Is(if only_cpu { Preserved } else { Unknown });
                reason = Reason::NotAchieved;
            }
            Some(false) if fates.cpu == Fate::AsBefore && self.should_hold_kept_tier() => {
                (fates.cpu, fates.far) = (Fate::Is(Forgotten), Fate::Is(Forgotten));
                reason = Reason::TierNotKept;
            }
            _ => {}
        }
        // A wake whose own reset failed, or was shown to have failed, leaves KV of other weights,
        // or a table over freed memory, within reach.
        let failed =
            claim == Claim::Declined || matches!(reason, Reason::NotAchieved | Reason::NoEffect);
        let phase = if self.wake.resets && failed { Phase::Waking } else { phase };
        self.settle(phase, fates, Evidence::Observed, reason)
    }

    /// Whether requests still run that the call was to end, or to wait for.
    fn still_runs(&self) -> bool {
        let ends_requests = match self.mv {
            Move::Pause { mode, .. } | Move::Sleep { mode, .. } => mode != Mode::Keep,
            _ => false,
        };
        ends_requests && self.state.still_running == Some(true)
    }

    /// What became of the tiers, and why it reads so: what the engine claims of its clear, held
    /// against what the event streams showed of it.
    fn cleared(&self, claim: Claim) -> (Fates, Reason) {
        let is_reset = matches!(self.mv, Move::Reset { .. } | Move::Quarantine(_));
        let owes = clears(self.mv, self.caps, self.before);
        let unproven = || unproven_reset(self.mv, self.caps, self.wake);
        let done = || promise(self.mv, self.caps, self.before, &self.state);
        match (claim, self.state.clear) {
            // A pause before it was to clear the cache, and the engine could not show it then.
            (Claim::Done, Some(Clear::Missing | Clear::Partly)) if self.mv == Move::Resume => {
                (done(), Reason::NoEffect)
            }
            (Claim::Done, Some(Clear::Missing | Clear::Partly)) if owes && self.ends_in_reset() => {
                (unproven(), Reason::NoEffect)
            }
            (Claim::Done, Some(Clear::Untold)) if is_reset => (unproven(), Reason::ClearNotSeen),
            (Claim::Done, _) => (done(), Reason::Confirmed),
            // After a wake it may be the clear of the sleep.
            (Claim::NoBody, Some(Clear::Seen)) if is_reset => (done(), Reason::Confirmed),
            (Claim::NoBody, Some(Clear::Missing)) if is_reset => {
                (reset_without_clear(self.mv, self.caps), Reason::NoEffect)
            }
            (Claim::NoBody, Some(Clear::Missing)) => (unproven(), Reason::NoEffect),
            (Claim::NoBody, _) => (unproven(), Reason::NoBody),
            // vLLM wipes nothing of a rank whose reset it declines.
            (Claim::Declined, Some(Clear::Missing)) if is_reset => {
                (reset_without_clear(self.mv, self.caps), Reason::Declined)
            }
            (Claim::Declined, _) => (unproven(), Reason::Declined),
        }
    }

    fn external(&self) -> TierSet {
        self.caps.present().without(TierSet::GPU)
    }

    fn drops_external(&self) -> bool {
        self.wake.resets && self.wake.new_weights || resets_external(self.mv, self.caps)
    }

    fn should_hold_kept_tier(&self) -> bool {
        let lost = self.before.since_serving.demoted();
        self.wake.complete && !self.external().without(lost).is_empty()
    }

    /// The phase that was asked for, if the observation agrees with it.
    fn reached(&self) -> Result<Phase, Reason> {
        match (self.mv, self.seen) {
            (Move::Sleep { level: None, .. }, _) => Err(Reason::LevelMissing),
            (_, Seen::Nothing) => Err(Reason::NotObserved),
            (_, Seen::Gone) => Err(Reason::Gone),
            (Move::Pause { .. }, Seen::Paused | Seen::PausedOrSleeping) => Ok(Phase::Paused),
            (Move::Resume, Seen::Serving) => Ok(Phase::Serving),
            (Move::Sleep { level, .. }, Seen::Sleeping(Some(seen))) if level != Some(seen) => {
                Err(Reason::LevelMismatch)
            }
            (Move::Sleep { .. }, Seen::Sleeping(_) | Seen::PausedOrSleeping) => Ok(Phase::Sleeping),
            (Move::Sleep { .. }, Seen::Paused) => Err(Reason::SleepFailedPaused),
            (Move::Wake { .. }, Seen::Serving) if self.wake.complete => Ok(Phase::Serving),
            (Move::Wake { .. }, Seen::Sleeping(_) | Seen::PausedOrSleeping)
                if !self.wake.complete =>
            {
                Ok(Phase::Waking)
            }
            (Move::Reset { .. } | Move::Quarantine(_), seen) => match self.before.phase {
                phase @ (Phase::Serving | Phase::Paused) if self.before.agrees(seen) => Ok(phase),
                _ => Err(Reason::Contradicted),
            },
            _ => Err(Reason::Contradicted),
        }
    }

    /// Timeout, failure, cut, or an observation that is missing or against the answer.
    fn unproven(self, reason: Reason, unobserved: Evidence) -> Verdict {
        // A process that is gone took its device memory with it, and one that sleeps dropped its
        // cache: whichever of the two it was after a 200, nothing is left.
        let gone =
            reason == Reason::Gone && matches!(self.mv, Move::Sleep { .. } | Move::Wake { .. });
        let gpu = if gone { Forgotten } else { Unknown };
        let evidence = if self.seen == Seen::Nothing { unobserved } else { Evidence::Observed };
        let reason = match (reason, self.mv, self.seen) {
            (Reason::Failed, Move::Sleep { .. }, Seen::Paused) => Reason::SleepFailedPaused,
            _ => reason,
        };
        let phase = match self.observed_phase() {
            // One look that shows it serving does not outweigh what went wrong; the next does.
            Phase::Serving => Phase::Error,
            _ if matches!(self.mv, Move::Sleep { level: None, .. }) => Phase::Error,
            phase => phase,
        };
        self.settle(phase, Fates::of(gpu, Unknown, Unknown), evidence, reason)
    }

    /// The phase that the observation shows. Where the flags are true of paused and of asleep, it
    /// is the one that this move starts from or leads to, if it cannot have crossed between them.
    fn observed_phase(&self) -> Phase {
        match (self.seen, self.mv, self.before.phase) {
            (Seen::PausedOrSleeping, Move::Pause { .. }, Phase::Serving)
            | (Seen::PausedOrSleeping, Move::Resume, Phase::Paused)
            | (Seen::PausedOrSleeping, Move::Reset { .. }, Phase::Paused)
            | (Seen::PausedOrSleeping, Move::Quarantine(_), Phase::Paused) => Phase::Paused,
            (Seen::PausedOrSleeping, Move::Wake { .. }, Phase::Sleeping | Phase::Waking) => {
                Phase::Sleeping
            }
            (seen, ..) => seen.phase(),
        }
    }

    fn noticed(self) -> Verdict {
        let phase = match self.mv {
            Move::Lost => Phase::Error,
            Move::Join | Move::Restart | Move::Drift => self.observed_phase(),
            _ => self.before.phase,
        };
        let evidence = match (self.mv, self.seen) {
            (Move::Join | Move::Lost | Move::Restart | Move::Drift, Seen::Nothing) => {
                Evidence::None
            }
            _ => Evidence::Observed,
        };
        let fates = promise(self.mv, self.caps, self.before, &self.state);
        self.settle(phase, fates, evidence, Reason::Noticed)
    }

    /// Nothing reached the engine: all is as it was, and of one whose state is not known that is
    /// not known either.
    fn untouched(self, demoted: TierSet, reason: Reason) -> Verdict {
        let is_known = self.before.phase != Phase::Error;
        // Whoever names the weights' memory, which is awake already, says that they load them.
        let takes_weights = self.before.takes_weights
            || reason == Reason::NotSent(Refusal::AlreadyAwake) && self.names_weights();
        Verdict {
            kv: if is_known { self.before.since_serving } else { PerTier::all(Unknown) },
            present: self.caps.present(),
            demoted,
            owes_clear: false,
            evidence: Evidence::NotSent,
            reason,
            next: Standing { takes_weights, ..*self.before },
        }
    }

    /// Whether this is a wake of the weights' memory alone, of an engine that is not to serve yet.
    fn names_weights(&self) -> bool {
        let Move::Wake { tags, weights } = self.mv else { return false };
        let is_waking = self.before.phase != Phase::Serving;
        tags == Parts::of(Part::Weights) && weights == Weights::Unproven && is_waking
    }

    fn settle(self, phase: Phase, fates: Fates, evidence: Evidence, reason: Reason) -> Verdict {
        let phase = self.partly(phase);
        let weights_proven = self.weights_proven(phase);
        let suspect = self.suspect(phase);
        let (phase, reason) = match phase {
            Phase::Serving if suspect => (Phase::Error, Reason::CanaryMismatch),
            Phase::Serving if !weights_proven => (Phase::Waking, Reason::WeightsNotProven),
            _ => (phase, reason),
        };
        let present = self.caps.present();
        let kv = fates.resolve(&self.before.since_serving);
        // A success that the stream did not show in time still is the engine's word for a clear.
        let proven = matches!(
            reason,
            Reason::Confirmed | Reason::NotAchieved | Reason::TierNotKept | Reason::ClearNotSeen
        );
        // What was set aside for the call and is preserved counts again.
        let is_kept = self.state.clear == Some(Clear::Missing) && kv.gpu == Preserved;
        let before = if is_kept { TierSet::NONE } else { self.demoted_before() };
        Verdict {
            kv,
            present,
            demoted: fates.demoted(present).with(before),
            owes_clear: proven && clears(self.mv, self.caps, self.before),
            evidence,
            reason,
            next: Standing {
                phase,
                since_serving: self.since_serving(phase, &kv),
                stale: self.stale(&kv),
                awake: self.awake(phase, reason),
                takes_weights: self.takes_weights(phase),
                weights_proven,
                suspect,
            },
        }
    }

    /// Preserved leaves what was true; serving begins anew.
    fn since_serving(&self, phase: Phase, kv: &PerTier<Disposition>) -> PerTier<Disposition> {
        let mut since = if phase == Phase::Serving { PerTier::all(Preserved) } else { *kv };
        if phase != Phase::Serving {
            for tier in Tier::ALL {
                if kv.get(*tier) == Preserved {
                    *since.get_mut(*tier) = self.before.since_serving.get(*tier);
                }
            }
        }
        since
    }

    /// A tier stays stale until it was proven empty.
    fn stale(&self, kv: &PerTier<Disposition>) -> TierSet {
        let changed = self.mv == Move::Weights || self.wake.new_weights;
        let stale = if changed { self.caps.present() } else { self.before.stale };
        stale.iter().filter(|tier| kv.get(*tier) != Forgotten).collect()
    }

    /// An engine that sleeps, and of which a part is known to be awake, is partly awake.
    fn partly(&self, phase: Phase) -> Phase {
        let is_part = phase == Phase::Sleeping && !self.kept_awake().is_empty();
        if is_part { Phase::Waking } else { phase }
    }

    /// The parts that were awake before and still are: neither a wake that failed nor a look puts
    /// one to sleep.
    fn kept_awake(&self) -> Parts {
        match self.mv {
            Move::Sleep { .. } | Move::Restart => Parts::NONE,
            _ => self.before.partly_awake(),
        }
    }

    fn awake(&self, phase: Phase, reason: Reason) -> Parts {
        match (phase, self.mv, self.seen) {
            (Phase::Serving | Phase::Paused, ..) => Parts::ALL,
            (Phase::Sleeping | Phase::Error, ..) => self.kept_awake(),
            (Phase::Waking, _, Seen::Serving) => Parts::ALL,
            (Phase::Waking, Move::Wake { .. }, _) if self.wake.staged => {
                self.before.awake.with(Parts::of(Part::Weights))
            }
            (Phase::Waking, Move::Wake { tags, .. }, _) if reason == Reason::Confirmed => {
                self.before.awake.with(tags)
            }
            (Phase::Waking, ..) => self.before.awake,
        }
    }

    fn takes_weights(&self, phase: Phase) -> bool {
        let is_named = self.names_weights() && !self.wake.complete;
        phase == Phase::Waking && (is_named || self.before.takes_weights)
    }

    fn suspect(&self, phase: Phase) -> bool {
        match self.mv {
            _ if self.state.canary == Some(false) => true,
            // Whoever asks for it knows what they do.
            Move::Wake { .. } | Move::Resume if phase == Phase::Serving => false,
            Move::Restart => false,
            _ => self.before.suspect,
        }
    }

    fn weights_proven(&self, phase: Phase) -> bool {
        match self.mv {
            Move::Sleep { level, .. } => {
                let kept = match level {
                    Some(Level::One) => !matches!(self.seen, Seen::Sleeping(Some(Level::Two))),
                    // Seen awake: they never left. Anything else may have dropped them.
                    Some(Level::Two) | None => matches!(self.seen, Seen::Serving | Seen::Paused),
                };
                kept && self.before.weights_proven
            }
            // A complete wake serves only after the calls that loaded and checked them, and that
            // dropped the KV of others: one that failed is not mended by a look that sees the
            // engine awake.
            Move::Wake { .. } => {
                let is_asleep = matches!(self.seen, Seen::Sleeping(_));
                let owes_reset = self.wake.resets && self.wake.new_weights && !is_asleep;
                phase == Phase::Serving || self.before.weights_proven && !owes_reset
            }
            // Someone loaded weights into memory that was there to take them.
            Move::Weights => self.before.weights_proven || self.before.has_weights(),
            // A new process loads its own, unless it was put to sleep since.
            Move::Restart => !self.seen.may_lack_weights(),
            Move::Join | Move::Drift => self.before.weights_proven && !self.seen.may_lack_weights(),
            _ => self.before.weights_proven,
        }
    }
}
