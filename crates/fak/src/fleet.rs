//! The workers, and what is true of each now: one immutable snapshot that everybody reads.
//!
//! Invariant: a worker's state has one writer, its owner in `lifecycle`; and a request enters a
//! worker only through its [`Door`], so that whoever shut the door knows when nobody is inside.

mod busy;
mod credit;
mod door;
mod why;

use std::sync::Arc;
use std::time::Duration;

use fak_index::RankId;
use fak_kernel::rank::Trust;
use fak_kernel::witness::{self, Standing};
use fak_kernel::{Phase, TierSet};
use fak_wire::metrics::Snapshot as Metrics;
use tokio::sync::watch;
use tokio::time::Instant;

pub use busy::{Busy, Stage, busy_with};
pub use credit::{Credit, Outcome, Withheld};
pub use door::{Door, Inside};
pub use why::rollout_end;

use crate::engine::{Engine, KvIdentity, Models};

/// One vLLM server, as configured. Its state is in the fleet's [`Snapshot`].
#[derive(Clone, Debug)]
pub struct Worker {
    /// Its configured name.
    pub id: Arc<str>,
    /// How to reach it.
    pub engine: Engine,
    /// Where its requests enter.
    pub door: Door,
}

/// What is true of a worker now, for all that fak knows.
#[derive(Clone, Debug)]
pub struct State {
    /// What fak holds true between two witness rows.
    pub standing: Standing,
    /// What engine and connector were proven to do.
    pub capabilities: witness::Capabilities,
    /// Whether the last probe got an answer.
    pub is_reachable: bool,
    /// Why the last look got no answer, or why no model is known.
    pub silence: Option<Arc<str>>,
    /// False where requests run and no token came for too long: the engine is suspect, and gets no
    /// more.
    pub is_progressing: bool,
    /// Whether it moves, for the clocks of its requests.
    pub pace: Pace,
    /// This life of its process, as far as it can be named.
    pub incarnation: Option<Arc<str>>,
    /// Whether its last look names the life; `None` while nothing was looked at.
    pub is_life_told: Option<bool>,
    /// Lives of its process that began while fak followed it, named or not; it only grows.
    pub lives: u64,
    /// The engine's version, where it told.
    pub version: Option<Arc<str>>,
    /// What its KV is computed with, where it told in this life.
    pub kv_identity: Option<Arc<KvIdentity>>,
    /// The models that it serves, the last told in this life.
    pub models: Models,
    /// Whether no other adapter can come under a served name in this life of its process.
    pub are_adapters_fixed: bool,
    /// The weight version that the engine told, or a caller stated.
    pub weight_version: Option<Arc<str>>,
    /// The row of the last change of weights by which no version moved; see [`Weights`].
    pub weights_epoch: Option<u64>,
    /// Who holds it: then it takes no requests, however awake its engine is.
    pub held_by: Option<Arc<str>>,
    /// What is being done to it now.
    pub busy: Option<Busy>,
    /// Its ranks in the index, as far as they may be asked: none while it recovers.
    pub ranks: Arc<[Rank]>,
    /// How far the event streams of all its ranks are.
    pub streams: Arc<[Stream]>,
    /// The engine names ranks that publish nothing which can be heard.
    pub has_silent_ranks: bool,
    /// Whether it is one engine, and the only worker that is it.
    pub identity: Identity,
    /// Its last looks showed no state that can be named: it gets no requests until one does.
    pub is_unclear: bool,
    /// What makes claims smaller.
    pub caution: Caution,
    /// The number, in events, of the rank that its rank header calls 0.
    pub first_rank: u32,
    /// fak has started anew, and does not know yet what of the engine's history still holds.
    pub is_recovering: bool,
    /// The last scrape.
    pub metrics: Option<Arc<Metrics>>,
    /// What the last scrape that was answered says of its load.
    pub counted: Option<Counted>,
    /// The last row of the ledger on it.
    pub last_witness: Option<u64>,
}

/// Whether a worker is one engine, and the only worker that is it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Identity {
    /// For all that is known.
    #[default]
    Clear,
    /// Several engines answer at its address, in turn.
    Ambiguous,
    /// Its engine is that of the worker of this name, which serves.
    SameEngine(Arc<str>),
    /// Its event socket is that of the worker of this name too.
    SharedSocket(Arc<str>),
}

impl Identity {
    /// Whether requests may be sent to it: any of several engines will do, one engine not twice.
    #[must_use]
    pub fn may_serve(&self) -> bool {
        !matches!(self, Self::SameEngine(_))
    }

    /// Whether actions reach the engine that is meant.
    #[must_use]
    pub fn may_be_asked(&self) -> bool {
        matches!(self, Self::Clear | Self::SharedSocket(_))
    }

    /// What is wrong, where something is.
    #[must_use]
    pub fn why(&self) -> Option<String> {
        match self {
            Self::Clear => None,
            Self::Ambiguous => Some("several engines answer at its address in turn".to_owned()),
            Self::SameEngine(other) => Some(format!("its engine is worker {other}'s")),
            Self::SharedSocket(other) => Some(format!("its event socket is worker {other}'s too")),
        }
    }
}

/// What makes claims smaller, over one life of an engine.
///
/// Invariant: what was seen once stays: a look that shows nothing takes no caution away.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Caution {
    /// Whether the engine decodes speculatively; `None` while nothing told.
    pub speculates: Option<bool>,
    /// The most ranks that anything named or counted; `None` while nothing did.
    pub ranks: Option<usize>,
}

impl Caution {
    /// Takes in a scrape.
    pub fn see(&mut self, metrics: &Metrics) {
        self.hear_speculates(metrics.speculates());
        self.hear_ranks(Some(metrics.running_ranks()).filter(|ranks| *ranks > 0));
    }

    /// Takes in whether something says that the engine decodes speculatively.
    pub fn hear_speculates(&mut self, told: Option<bool>) {
        // A yes is the greater of the two, and outlasts a no.
        self.speculates = self.speculates.max(told);
    }

    /// Takes in how many ranks something names.
    pub fn hear_ranks(&mut self, told: Option<usize>) {
        self.ranks = self.ranks.max(told);
    }
}

/// Which weights a worker computes with, as far as they can be told apart: equal values are of
/// equal weights, unless somebody changed them behind fak's back and nothing says so yet.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Weights {
    /// The version that the engine told, or a caller stated.
    pub version: Option<Arc<str>>,
    /// The row of the last change since that version was told: the version alone does not name
    /// these weights any more.
    pub epoch: Option<u64>,
}

/// Whether a worker moves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pace {
    /// fak put it to rest, and has not let it go on: what was kept in it stands still.
    pub is_kept_at_rest: bool,
    /// When its counters last moved, or fak let it go on.
    pub moved_at: Option<Instant>,
}

/// Requests on a worker, whoever sent them, by its own metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counted {
    /// Those that run and those that wait.
    pub requests: u32,
    /// Those that this fak had there then.
    pub own: u32,
    /// When.
    pub at: Instant,
}

impl Counted {
    /// By a scrape that was just answered.
    #[must_use]
    pub fn of(metrics: &Metrics, own: usize) -> Self {
        let total = metrics.total();
        let requests = total.running.unwrap_or(0.0) + total.waiting.unwrap_or(0.0);
        let own = u32::try_from(own).unwrap_or(u32::MAX);
        Self { requests: requests as u32, own, at: Instant::now() }
    }
}

/// A rank's place in the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rank {
    /// Data-parallel rank.
    pub number: u32,
    /// In the index.
    pub id: RankId,
    /// How far its beliefs can be relied on.
    pub trust: Trust,
}

/// How far a rank's event stream is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream {
    /// Data-parallel rank.
    pub rank: u32,
    /// How far its beliefs can be relied on.
    pub trust: Trust,
    /// The last batch that was folded.
    pub last_seq: Option<u64>,
    /// Its engine looks prompts up, and nothing is heard of it.
    pub is_blind: bool,
    /// Its live connection brings less than the engine publishes.
    pub is_dead: bool,
    /// Whether what it publishes can be asked for again.
    pub has_replay: bool,
    /// When its live connection last brought a batch.
    pub last_event_at: Option<Instant>,
}

impl Stream {
    /// How long its live connection has been silent; `None` where it never brought a batch.
    #[must_use]
    pub fn last_event_age(&self) -> Option<Duration> {
        self.last_event_at.map(|at| at.elapsed())
    }

    /// Why nothing that it publishes is relied on, where that is so.
    #[must_use]
    pub fn fault(&self) -> Option<&'static str> {
        match (self.is_dead, self.is_blind) {
            (true, _) => Some("its live events stopped"),
            (false, true) => Some("none of its events is heard"),
            (false, false) => None,
        }
    }
}

impl State {
    /// A worker of which nothing was observed yet.
    #[must_use]
    pub fn unobserved() -> Self {
        Self {
            standing: Standing::UNOBSERVED,
            capabilities: witness::Capabilities::default(),
            is_reachable: false,
            silence: None,
            is_progressing: true,
            pace: Pace::default(),
            incarnation: None,
            is_life_told: None,
            lives: 0,
            version: None,
            kv_identity: None,
            models: Models::default(),
            are_adapters_fixed: false,
            weight_version: None,
            weights_epoch: None,
            held_by: None,
            busy: None,
            ranks: Arc::default(),
            streams: Arc::default(),
            has_silent_ranks: false,
            identity: Identity::Clear,
            is_unclear: false,
            caution: Caution::default(),
            first_rank: 0,
            is_recovering: false,
            metrics: None,
            counted: None,
            last_witness: None,
        }
    }

    /// What the worker is doing, by word.
    #[must_use]
    pub fn phase(&self) -> Phase {
        self.standing.phase
    }

    /// Whether requests may be sent to it.
    #[must_use]
    pub fn is_serving(&self) -> bool {
        self.keeps_requests() && !self.is_kept()
    }

    /// Whether those that were sent to it may stay: an action that waits for them shuts the others
    /// out alone.
    #[must_use]
    pub fn keeps_requests(&self) -> bool {
        let is_free = self.held_by.is_none() && self.identity.may_serve();
        let is_well = self.is_reachable && self.is_progressing && !self.is_unclear;
        self.standing.phase == Phase::Serving && is_well && is_free
    }

    /// Why no other than a request of fak's own shows whose life it is, where that is so.
    #[must_use]
    pub fn life_untold(&self) -> Option<&'static str> {
        (self.is_life_told == Some(false)).then_some(
            "nothing names this life of its engine: its claims hold for 5 s after a request of \
             fak's own came back; let fak read a /metrics with process_start_time_seconds (vLLM \
             leaves it out with more than one API server)",
        )
    }

    /// Whether its last look showed more requests than fak had there: others ask it, too, or it
    /// works on for a client that has left.
    #[must_use]
    pub fn shows_others(&self) -> bool {
        self.counted.is_some_and(|counted| counted.requests > counted.own)
    }

    /// What an operator has to mend, whether it serves or not.
    #[must_use]
    pub fn warning(&self) -> Option<String> {
        let is_unheard = self.is_reachable && !self.models.is_empty() && self.streams.is_empty();
        let unheard = || {
            "nothing tells where it publishes KV events, so that nothing is claimed of it: start \
             it with --kv-events-config and VLLM_SERVER_DEV_MODE=1, or name its sockets (kv=, \
             replay=)"
                .to_owned()
        };
        self.identity.why().or_else(|| is_unheard.then(unheard))
    }

    /// Why claims on it rest on requests of fak's own, and what to do about it.
    #[must_use]
    pub fn rests_on_markers(&self) -> Option<String> {
        let without: Vec<_> = self.streams.iter().filter(|s| !s.has_replay).collect();
        let ranks: Vec<_> = without.iter().map(|stream| stream.rank.to_string()).collect();
        let unreplayed = (!ranks.is_empty()).then(|| {
            format!(
                "rank {} has no replay: its claims hold for 5 s after a request of fak's own came \
                 back; give --kv-events-config a replay_endpoint",
                ranks.join(", "),
            )
        });
        let why: Vec<_> =
            self.life_untold().map(str::to_owned).into_iter().chain(unreplayed).collect();
        (!why.is_empty()).then(|| why.join("; "))
    }

    /// Whether somebody keeps it from serving, however well it is.
    #[must_use]
    pub fn is_kept(&self) -> bool {
        self.held_by.is_some() || self.busy.as_ref().is_some_and(Busy::shuts_door)
    }

    /// The weights that it computes with.
    #[must_use]
    pub fn weights(&self) -> Weights {
        Weights { version: self.weight_version.clone(), epoch: self.weights_epoch }
    }

    /// Whether it serves `model`.
    #[must_use]
    pub fn has_model(&self, model: &str) -> bool {
        self.models.has(model)
    }

    /// Whether each of its ranks is listened to; not where nothing told how many it has.
    #[must_use]
    pub fn hears_all_ranks(&self) -> bool {
        let is_heard = |counted| counted <= self.ranks.len();
        !self.has_silent_ranks && self.caution.ranks.is_some_and(is_heard)
    }

    /// Whether its engine may decode speculatively: it may, until it tells that it does not.
    #[must_use]
    pub fn speculates(&self) -> bool {
        self.caution.speculates.unwrap_or(true)
    }

    /// Whether its engine sends a request to the rank that it names: vLLM does since 0.12.0
    /// (source).
    #[must_use]
    pub fn obeys_rank(&self) -> bool {
        self.is_since(0, 12)
    }

    /// Whether its engine announces what a request hit, where the request asks for it
    /// (`kv_cache_report_mode`): vLLM 0.32.0 does (source). No later one was read.
    #[must_use]
    pub fn reports_hits(&self) -> bool {
        self.is_since(0, 32) && !self.is_since(0, 33)
    }

    fn is_since(&self, major: u32, minor: u32) -> bool {
        let version = self.version.as_deref().unwrap_or_default().trim_start_matches('v');
        let mut parts = version.split('.').map(str::parse);
        let (Some(Ok(told)), Some(Ok(told_minor))) = (parts.next(), parts.next()) else {
            return false;
        };
        (told, told_minor) >= (major, minor)
    }

    /// How far its beliefs can be relied on: as far as those of its worst rank.
    #[must_use]
    pub fn trust(&self) -> Trust {
        let worst = self.streams.iter().map(|s| s.trust).max().unwrap_or(Trust::LoadOnly);
        let is_whole = !self.is_recovering && self.identity == Identity::Clear;
        if is_whole { worst } else { worst.max(Trust::Degraded) }
    }

    /// How far its beliefs can be relied on, by word; `ambiguous` where it is not known whose they
    /// are.
    #[must_use]
    pub fn beliefs(&self) -> &'static str {
        if self.identity == Identity::Clear { self.trust().as_str() } else { "ambiguous" }
    }

    /// The tiers that it has.
    #[must_use]
    pub fn tiers(&self) -> TierSet {
        self.capabilities.present()
    }
}

/// A worker and its state.
#[derive(Clone, Debug)]
pub struct View {
    /// The worker.
    pub worker: Arc<Worker>,
    /// Its state.
    pub state: Arc<State>,
}

/// Every worker, in the order of the configuration.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// The workers.
    pub workers: Vec<View>,
}

impl Snapshot {
    /// The worker of that name.
    #[must_use]
    pub fn get(&self, id: &str) -> Option<&View> {
        self.workers.iter().find(|view| *view.worker.id == *id)
    }

    /// Lives that began on any worker while fak followed it; it only grows. An engine may answer
    /// otherwise in another life, whatever its version.
    #[must_use]
    pub fn lives(&self) -> u64 {
        self.workers.iter().map(|view| view.state.lives).sum()
    }
}

/// The fleet; cheap to clone.
#[derive(Clone, Debug)]
pub struct Fleet {
    now: watch::Sender<Arc<Snapshot>>,
    /// By the worker's number.
    credits: Arc<[Credit]>,
}

impl Fleet {
    /// A fleet of workers of which nothing was observed yet.
    #[must_use]
    pub fn new(workers: impl IntoIterator<Item = Worker>) -> Self {
        let unobserved =
            |worker| View { worker: Arc::new(worker), state: Arc::new(State::unobserved()) };
        let workers: Vec<_> = workers.into_iter().map(unobserved).collect();
        let credits = workers.iter().map(|_| Credit::default()).collect();
        Self { now: watch::Sender::new(Arc::new(Snapshot { workers })), credits }
    }

    /// Whether what is claimed of worker `id` is borne out.
    #[must_use]
    pub fn credit(&self, id: &str) -> Option<&Credit> {
        let number = self.now.borrow().workers.iter().position(|v| *v.worker.id == *id)?;
        self.credits.get(number)
    }

    /// The fleet as it is now.
    #[must_use]
    pub fn snapshot(&self) -> Arc<Snapshot> {
        Arc::clone(&self.now.borrow())
    }

    /// Follows the fleet: wakes at each change.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<Arc<Snapshot>> {
        self.now.subscribe()
    }

    /// Changes the state of worker `id`; for its owner alone. Readers see all of the change or
    /// nothing of it.
    pub fn update(&self, id: &str, change: impl FnOnce(&mut State)) {
        self.now.send_modify(|now| {
            let fleet = Arc::make_mut(now);
            if let Some(view) = fleet.workers.iter_mut().find(|v| *v.worker.id == *id) {
                change(Arc::make_mut(&mut view.state));
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fak_wire::metrics::Limits;

    #[test]
    fn requests_that_run_and_that_wait_are_counted_over_all_ranks() {
        let counted = |text: &str| {
            let metrics = fak_wire::metrics::parse(text.as_bytes(), &Limits::default());
            Counted::of(&metrics.expect("it is small"), 7)
        };
        let text = "vllm:num_requests_running{engine=\"0\"} 3\n\
                    vllm:num_requests_running{engine=\"1\"} 4\n\
                    vllm:num_requests_waiting{engine=\"1\"} 80\n";
        let told = counted(text);
        assert_eq!((told.requests, told.own), (87, 7));
        assert_eq!(counted("").requests, 0, "what is not told is no load");
    }
}
