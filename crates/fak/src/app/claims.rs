//! What may be claimed of the worker's cache at a call's dispatch: the index, fed by its events.
//!
//! Invariant: a claim is what every rank of the worker provably holds, since the engine picks the
//! rank; where a rank is not heard, nothing is claimed.

use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::sync::Arc;
use std::time::Duration;

use fak_index::{Held, HeldReason, Index, Limits, Prompt, RankOptions};
use fak_kernel::Tier;
use fak_kernel::rank::Trust;
use fak_kernel::vocab::PerTier;
use fak_wire::metrics::Snapshot as Metrics;
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval, timeout};

use super::Error;
use crate::cli::report::Events;
use crate::config::Worker;
use crate::engine::unmatchable;
use crate::engine::{Admitted, Capabilities, Engine, Learnt, Models, Named, Unmatchable};
use crate::events::discover::{self, Source};
use crate::events::recorder::Recorder;
use crate::events::stream::{Handle, Sink, Stream};
use crate::lifecycle::{Offer, offload, serve_markers};
use crate::runtime::{OnExit, TaskGroup};

/// Time for the event sockets to stand before the first call.
const HEARD_WITHIN: Duration = Duration::from_secs(2);

/// Time for an engine to announce what a call stored. Events leave with the step that caused them
/// (0.32.0, observed), so on a network that works this is a few milliseconds.
const ANNOUNCED_WITHIN: Duration = Duration::from_millis(500);

/// How often to look whether it was announced.
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// Time for the streams to end.
const STOP_WITHIN: Duration = Duration::from_secs(1);

/// The beliefs about one worker.
pub(super) struct Claims {
    index: Arc<Index>,
    recorder: Arc<Recorder>,
    ranks: Vec<Handle>,
    /// Every rank publishes and is listened to.
    is_whole: bool,
    /// The last block of a hit may be computed anew.
    speculates: bool,
    models: Models,
    /// No adapter can be loaded under a name that is served.
    are_adapters_fixed: bool,
    tasks: TaskGroup,
    /// How markers are sent, while this lives.
    _offer: watch::Sender<Option<Offer>>,
}

/// A prompt as the engine's cache sees it.
pub(super) struct CachePrompt {
    tokens: Vec<u32>,
    adapter: Option<String>,
    salt: Option<String>,
    is_cacheable: bool,
}

impl CachePrompt {
    fn key(&self) -> Prompt<'_> {
        Prompt { tokens: &self.tokens, lora: self.adapter.as_deref(), salt: self.salt.as_deref() }
    }
}

impl Claims {
    /// Listens to the worker's events, and waits a little until they can be heard. `metrics`: the
    /// worker's, where it gives any.
    pub(super) async fn start(
        (worker, engine): (&Worker, &Engine),
        told: &Capabilities,
        metrics: &Metrics,
    ) -> Result<Self, Error> {
        let (sources, is_whole) = sources(worker, told)?;
        let is_whole = is_whole && metrics.running_ranks() <= sources.len();
        let settings = told.settings.told();
        let by_settings = settings.and_then(|settings| settings.speculates);
        let speculates = metrics.speculates().max(by_settings).unwrap_or(true);
        let seed = RandomState::new().build_hasher().finish();
        let index = Arc::new(Index::new(seed, Limits::default()));
        // The report needs counts only.
        let recorder = Arc::new(Recorder::new(0));
        let mut tasks = TaskGroup::new();
        let id: Arc<str> = worker.id.as_str().into();
        let mut ranks = Vec::with_capacity(sources.len());
        let model = told.models.told().and_then(Models::base);
        let block_size = told.block_size.told().copied();
        let offer = |model| Offer::new(engine.clone(), Arc::clone(model), block_size);
        let offer = watch::Sender::new(model.map(offer));
        for source in sources {
            let sink = Sink {
                index: Arc::clone(&index),
                options: RankOptions { offload: offload(told), ..RankOptions::default() },
                recorder: Arc::clone(&recorder),
                notes: None,
            };
            let (stream, handle) = Stream::new(&id, source, sink);
            tasks.spawn("events", OnExit::Report, stream.run(tasks.shutdown()));
            let markers = serve_markers(handle.clone(), offer.subscribe());
            tasks.spawn("markers", OnExit::Report, markers);
            ranks.push(handle);
        }
        let all_heard = async {
            for rank in &ranks {
                // A stream that has ended is never heard, and then nothing is claimed of its rank.
                let _ = rank.wait_for(|status| status.trust == Trust::Exact).await;
            }
        };
        if timeout(HEARD_WITHIN, all_heard).await.is_err() {
            tracing::warn!("not every rank's KV events are heard yet");
        }
        let models = told.models.told().cloned().unwrap_or_default();
        let are_adapters_fixed = told.loads_adapters.told() == Some(&false);
        Ok(Self {
            _offer: offer,
            index,
            recorder,
            ranks,
            is_whole,
            speculates,
            models,
            are_adapters_fixed,
            tasks,
        })
    }

    /// The prompt of a call; `None` where its tokens are not known.
    pub(super) async fn prompt(&self, engine: &Engine, call: &Admitted) -> Option<CachePrompt> {
        if self.ranks.is_empty() {
            return None;
        }
        let is_cacheable = match unmatchable(call.request(), &self.models) {
            None => true,
            Some(Unmatchable::SkipsCache) => false,
            Some(why) => {
                tracing::info!(?why, "the prompt cannot be matched, no claim");
                return None;
            }
        };
        let model = call.request().model().ok().flatten();
        let adapter = match self.models.named(model.as_deref()) {
            Named::Base => None,
            Named::Adapter if self.are_adapters_fixed => model,
            Named::Adapter | Named::Unclear => {
                tracing::info!(model, "the engine does not prove which model it is, no claim");
                return None;
            }
        };
        let tokens = engine.tokens(call.request()).await;
        let tokens = tokens.inspect_err(|error| tracing::info!(%error, "no tokens, no claim"));
        let salt = call.cache_salt().map(str::to_owned);
        Some(CachePrompt { tokens: tokens.ok()?, adapter, salt, is_cacheable })
    }

    /// The claim: prompt tokens that every rank provably holds; `None` where that is not known.
    pub(super) fn held(&self, prompt: &CachePrompt) -> Option<u64> {
        if !self.is_whole {
            return None;
        }
        if !prompt.is_cacheable {
            return Some(0);
        }
        let claimed = |held: Held| match self.speculates {
            true => total(held.tokens_speculating()),
            false => total(held.tokens()),
        };
        let ranks = self.ranks.iter().map(|rank| self.held_by(rank, prompt).map(claimed));
        ranks.collect::<Option<Vec<_>>>()?.into_iter().min()
    }

    fn held_by(&self, rank: &Handle, prompt: &CachePrompt) -> Option<Held> {
        if rank.status().trust == Trust::LoadOnly {
            return None;
        }
        let held = self.index.held(rank.id(), &prompt.key());
        let is_known = !matches!(held.reason, HeldReason::Suspended | HeldReason::NoRank);
        is_known.then_some(held)
    }

    /// Waits until some rank announced all of the prompt's blocks that can be hit, but not long:
    /// the next call's claim is about what was announced by then, whatever this finds.
    pub(super) async fn announced(&self, prompt: &CachePrompt) {
        let all = async {
            let mut look = interval(LOOK_EVERY);
            look.set_missed_tick_behavior(MissedTickBehavior::Delay);
            while !self.ranks.iter().any(|rank| self.is_announced(rank, prompt)) {
                look.tick().await;
            }
        };
        let is_heard = |rank: &Handle| rank.status().trust != Trust::LoadOnly;
        if self.ranks.iter().any(is_heard) && timeout(ANNOUNCED_WITHIN, all).await.is_err() {
            tracing::info!("the engine has not announced the call's blocks");
        }
    }

    fn is_announced(&self, rank: &Handle, prompt: &CachePrompt) -> bool {
        let Some(held) = self.held_by(rank, prompt) else { return false };
        let usable = u64::try_from(prompt.tokens.len()).unwrap_or(u64::MAX).saturating_sub(1);
        let size = u64::from(held.block_size);
        size > 0 && total(held.tokens()) >= usable / size * size
    }

    /// Stops listening. Returns what was heard; `None` where nothing could be.
    pub(super) async fn stop(self) -> Option<Events> {
        let Self { ranks, recorder, tasks, .. } = self;
        tasks.stop(STOP_WITHIN).await;
        let total = recorder.total();
        (!ranks.is_empty()).then_some(Events {
            batches: total.batches,
            stored: total.stored,
            removed: total.removed,
            cleared: total.cleared,
            gaps: total.gaps,
        })
    }
}

fn total(tokens: PerTier<u32>) -> u64 {
    Tier::ALL.iter().map(|tier| u64::from(tokens.get(*tier))).sum()
}

/// The ranks' sockets, as configured or as the engine tells, and whether they are all ranks.
fn sources(worker: &Worker, told: &Capabilities) -> Result<(Vec<Source>, bool), Error> {
    let host = worker.endpoints.origin().host();
    if let Some(live) = &worker.kv.events {
        let replay = worker.kv.replay.as_ref().map(ToString::to_string);
        // The topic is a prefix filter: the empty one takes every topic.
        let named = discover::named(&live.to_string(), replay.as_deref(), "", 1, host);
        return Ok((named.map_err(Error::usage)?, true));
    }
    match &told.kv_event_sources {
        Learnt::Unknown { why } => {
            tracing::info!(%why, "no KV event sources are known: nothing is claimed");
            Ok((Vec::new(), false))
        }
        Learnt::Told { value, .. } => match discover::from_answer(value, host) {
            Ok(found) => {
                for (rank, why) in &found.silent {
                    tracing::warn!(rank, %why, "a rank publishes nothing: nothing is claimed");
                }
                let is_whole = found.silent.is_empty();
                Ok((found.sources, is_whole))
            }
            Err(error) => {
                tracing::warn!(%error, "the KV event sources cannot be used: nothing is claimed");
                Ok((Vec::new(), false))
            }
        },
    }
}
