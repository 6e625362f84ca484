//! Which requests are matched with workers' caches, and as what.
//!
//! Invariant: a request is matched only where everything that vLLM's block hashes cover is known:
//! its tokens, its adapter and its salt; what is not matched is counted by the reason.

use std::sync::Arc;

use fak_index::Index;
use fak_wire::openai::Request;

use super::Shared;
use super::claim::{Asker, NoClaim, claim};
use super::dispatch::Job;
use super::metrics::Matching;
use super::prompt::Matched;
use crate::engine::{Named, Unmatchable, unmatchable};
use crate::fleet::{State, View};

/// What the request's model is to a worker's cache.
pub(super) enum Lora {
    /// The base model.
    Base,
    /// An adapter, by its name.
    Adapter(Arc<str>),
    /// One adapter or another: the engine offers to load another under the same name, and its
    /// block hashes cover the path that its events do not tell (vLLM 0.32.0, source).
    MayChange,
    /// Its cards do not tell.
    Unclear,
}

impl Lora {
    /// What the job's model is to a worker in this state.
    pub(super) fn of(job: &Job, state: &State) -> Self {
        match (state.models.named(job.model.as_deref()), &job.model) {
            (Named::Base, _) => Self::Base,
            (Named::Adapter, Some(name)) if state.are_adapters_fixed => {
                Self::Adapter(name.as_str().into())
            }
            (Named::Adapter, _) => Self::MayChange,
            (Named::Unclear, _) => Self::Unclear,
        }
    }

    /// The adapter, as the index asks for it; an error where it is not known.
    pub(super) fn known(self) -> Result<Option<Arc<str>>, Matching> {
        match self {
            Self::Base => Ok(None),
            Self::Adapter(name) => Ok(Some(name)),
            Self::MayChange => Err(Matching::Adapter),
            Self::Unclear => Err(Matching::Model),
        }
    }
}

impl Shared {
    /// The prompt in tokens, where it can be matched and there is anything to match it with.
    pub(super) async fn matched(
        &self,
        job: &Job,
        candidates: &[(usize, &View)],
    ) -> Result<Matched, NoClaim> {
        let request = job.request().ok_or(NoClaim::Route)?;
        let matched = self.match_with(job, request, candidates).await;
        self.metrics.matched(matched.as_ref().map_or_else(|why| *why, |(_, how)| *how));
        matched.map(|(matched, _)| matched).map_err(NoClaim::from)
    }

    async fn match_with(
        &self,
        job: &Job,
        request: &Request,
        candidates: &[(usize, &View)],
    ) -> Result<(Matched, Matching), Matching> {
        if !candidates.iter().any(|(_, view)| may_hold(&self.index, &view.state)) {
            return Err(Matching::Skipped);
        }
        let mut why = Matching::Model;
        let mut matchable = Vec::with_capacity(candidates.len());
        for (number, view) in candidates {
            let fits = Lora::of(job, &view.state).known().and_then(|_| {
                unmatchable(request, &view.state.models).map_or(Ok(()), |why| Err(why.into()))
            });
            match fits {
                Ok(()) => matchable.push((*number, *view)),
                Err(reason) => why = reason,
            }
        }
        if matchable.is_empty() {
            return Err(why);
        }
        let lives = self.fleet.snapshot().lives();
        self.prompts.tokens(request, &matchable, lives).await
    }
}

/// Whether anything can be claimed of a worker, or found out of it: by what its engine announces
/// when it is asked, or by a hit on blocks that were announced once.
fn may_hold(index: &Index, state: &State) -> bool {
    let mut ranks = state.ranks.iter();
    if ranks.any(|rank| index.has_blocks(rank.id)) {
        return true;
    }
    let asker = Asker { pinned: None, is_alone: true };
    let has_names = || state.ranks.iter().any(|rank| index.stats(rank.id).identities > 0);
    let is_unknown = || claim(index, state, Err(NoClaim::Miss), asker).kv.no_claim().is_some();
    (state.reports_hits() || has_names()) && is_unknown()
}

impl From<Matching> for NoClaim {
    fn from(matching: Matching) -> Self {
        match matching {
            Matching::NotMatchable => Self::NotMatchable,
            Matching::SkipsCache => Self::SkipsCache,
            Matching::BeamSearch => Self::BeamSearch,
            Matching::Content => Self::Content,
            Matching::Adapter => Self::Adapter,
            Matching::Model => Self::Model,
            Matching::Miscounted => Self::Miscounted,
            Matching::Contradicted => Self::Contradicted,
            // No worker holds a block that could be matched.
            Matching::Skipped | Matching::Known | Matching::Asked => Self::Miss,
        }
    }
}

impl From<Unmatchable> for Matching {
    fn from(why: Unmatchable) -> Self {
        match why {
            Unmatchable::SkipsCache => Self::SkipsCache,
            Unmatchable::BeamSearch => Self::BeamSearch,
            Unmatchable::Content => Self::Content,
            Unmatchable::ByModality => Self::Adapter,
        }
    }
}
