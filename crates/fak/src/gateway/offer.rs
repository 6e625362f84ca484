//! What a worker has for a request: the salt that it is sent with there, the prompt as its cache
//! sees it, and what may be claimed of that, when it is chosen and when the answer begins.
//!
//! Invariant: a claim is told as it holds when the answer's head is written, and of no worker whose
//! claims are not borne out.

use std::sync::Arc;

use super::Shared;
use super::claim::{Asker, CachePrompt, Claim, NoClaim, claim, still};
use super::dispatch::Job;
use super::matching::Lora;
use super::prompt::Matched;
use super::ticket::Aboard;
use crate::fleet::View;

/// What one worker has for a request.
pub(super) struct Offer {
    /// With which the request is sent there.
    pub(super) salt: Option<Arc<str>>,
    /// The prompt with that salt, where it can be matched.
    pub(super) prompt: Result<CachePrompt, NoClaim>,
    pub(super) claim: Claim,
}

impl Shared {
    /// What a worker has for a request with this prompt, or the rank `pinned` of it.
    pub(super) fn offer(
        &self,
        job: &Job,
        view: &View,
        matched: Result<&Matched, NoClaim>,
        pinned: Option<u32>,
    ) -> Offer {
        let View { worker, state } = view;
        let salt = self.salt(job, state);
        let prompt = matched.and_then(|matched| {
            let lora = Lora::of(job, state).known()?;
            let Matched { tokens, source } = matched.clone();
            Ok(CachePrompt { tokens, source, lora, salt: salt.clone() })
        });
        let is_quiet = worker.door.is_quiet(self.config.quiet_for);
        let asker = Asker { pinned, is_alone: is_quiet && !state.shows_others() };
        let claim = match &prompt {
            // Its answers are not read, so that no claim could be audited.
            Err(NoClaim::Route) => Claim::none(NoClaim::Route),
            prompt => claim(&self.index, state, prompt.as_ref().map_err(|why| *why), asker),
        };
        let is_withheld = self.is_withheld(&worker.id);
        let claim = if is_withheld { claim.withdrawn(NoClaim::Withheld) } else { claim };
        Offer { salt, prompt, claim }
    }

    /// Whether nothing is to be claimed of a worker, since its claims are not borne out.
    fn is_withheld(&self, worker: &str) -> bool {
        let credit = self.fleet.credit(worker);
        credit.is_some_and(|credit| credit.is_withheld(std::time::Instant::now()))
    }

    /// Whether an engine is to announce what it holds of a request's prompt: nothing is known of
    /// it, and it is asked for the first time. So what it kept is claimed again, though fak began
    /// anew or stopped believing.
    pub(super) fn asks_for_report(&self, offer: &Offer, view: &View) -> bool {
        let (Ok(prompt), Some(basis)) = (&offer.prompt, offer.claim.basis) else {
            return false;
        };
        let View { worker, state } = view;
        let Some(life) = &state.incarnation else { return false };
        basis.may_be_held
            && state.reports_hits()
            && self.prompts.takes_report(prompt.source, &worker.id, life)
    }

    /// A claim as the client is told it, now that the answer's head is written: what was lost since
    /// the request was sent is not claimed.
    pub(super) fn told(&self, claim: &Claim, aboard: Option<&mut Aboard>) -> Claim {
        let told = self.at_head(claim, aboard.as_deref());
        self.metrics.answered(&told);
        if let Some((_, audit)) = aboard.and_then(|aboard| aboard.audit.as_mut()) {
            audit.claim = Some(told.clone());
        }
        told
    }

    /// What of a claim still holds.
    fn at_head(&self, claim: &Claim, aboard: Option<&Aboard>) -> Claim {
        let Some(aboard) = aboard else { return claim.withdrawn(NoClaim::Failed) };
        let fleet = self.fleet.snapshot();
        let Some(view) = fleet.get(&aboard.worker) else { return claim.withdrawn(NoClaim::Lost) };
        let Some((_, audit)) = &aboard.audit else { return claim.withdrawn(NoClaim::Route) };
        // The tokens are what the engine made of the prompt in another life.
        if audit.lives != view.state.lives {
            return claim.withdrawn(NoClaim::Lost);
        }
        if self.is_withheld(&aboard.worker) {
            return claim.withdrawn(NoClaim::Withheld);
        }
        let is_alone = aboard.inside.is_alone(self.config.quiet_for) && !view.state.shows_others();
        let asker = Asker { pinned: aboard.pinned, is_alone };
        still(&self.index, &view.state, audit.prompt.as_ref().map_err(|why| *why), asker, claim)
    }
}
