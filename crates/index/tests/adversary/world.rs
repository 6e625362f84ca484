//! The adversary's world: the reference engine, the network between, and fak's kernel and index
//! under test.
//!
//! The rule that is checked after each step: whatever block is claimed, the engine holds it, or an
//! event that takes it is still on its way to fak and was not caused by fak. (DESIGN calls the
//! second case `lost_in_flight`.)

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use fak_index::{
    EngineHash, Extra, GroupKind, Index, Limits, Loss, Mark, Offload, Origin, Prompt, RankId,
    RankOptions, Remove, Store,
};
use fak_kernel::rank::{Config, Effect, Event, Head, Rank, Take, Trust};
use fak_kernel::vocab::PerTier;
use fak_kernel::{Disposition, LossCause, Tier, TierSet};

use crate::engine::{Batch, Block, Engine, Ev, Lost};

pub(crate) const BLOCK_SIZE: u32 = 2;
const LABELS: u16 = 3;
const DEPTH: usize = 4;

/// A rank whose connector announces every removal and stores each block by itself.
fn by_block() -> RankOptions {
    RankOptions { offload: Offload::BY_BLOCK, ..RankOptions::default() }
}

/// A connection to one life's publisher: what was sent and not yet received.
struct Connection {
    life: u64,
    sent: VecDeque<Batch>,
    received: VecDeque<Batch>,
}

/// A replay on its way.
struct Replay {
    session: u64,
    from: u64,
    /// The process that the request's connection leads to.
    life: u64,
    served: bool,
    items: VecDeque<Option<Batch>>,
}

/// A request's answer on its way: what the engine took from its cache.
struct Answer {
    prompt: Vec<u16>,
    cached: usize,
    sent: Mark,
    /// The rank was exact and its fence open from the dispatch on.
    is_sound: bool,
}

/// An action of fak's own, by the step it has reached.
struct Acting {
    kind: Kind,
    called: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Reset,
    ResetExternal,
    Sleep,
    SleepKeepTier,
    /// Publishes no clear of its own.
    Wake,
    /// 200, `success:false`: the gpu's cache is as it was, which a marker has to show.
    ResetRefused,
    /// 200, `success:false`, and the tier wiped all the same.
    ResetExternalRefused,
    /// No answer in time; the engine acts on it later, or never.
    TimedOut,
}

impl Kind {
    const ALL: [Kind; 8] = [
        Kind::Reset,
        Kind::ResetExternal,
        Kind::Sleep,
        Kind::SleepKeepTier,
        Kind::Wake,
        Kind::ResetRefused,
        Kind::ResetExternalRefused,
        Kind::TimedOut,
    ];

    fn touches(self) -> TierSet {
        match self {
            Kind::Reset | Kind::ResetRefused | Kind::SleepKeepTier | Kind::Wake => TierSet::GPU,
            _ => TierSet::ALL,
        }
    }

    /// What the action does if it succeeds.
    fn intended(self) -> PerTier<Disposition> {
        match self {
            Kind::Reset | Kind::ResetRefused | Kind::SleepKeepTier => {
                PerTier { gpu: Disposition::Forgotten, ..PerTier::all(Disposition::Preserved) }
            }
            _ => PerTier::all(Disposition::Forgotten),
        }
    }

    /// What came of it, and whether the engine publishes a clear for it that is known to be fak's.
    fn verdict(self) -> (PerTier<Disposition>, bool) {
        match self {
            Kind::ResetRefused | Kind::Wake => (
                PerTier { gpu: Disposition::Unknown, ..PerTier::all(Disposition::Preserved) },
                false,
            ),
            Kind::ResetExternalRefused | Kind::TimedOut => {
                (PerTier::all(Disposition::Unknown), false)
            }
            _ => (self.intended(), true),
        }
    }
}

pub(crate) struct World {
    pub(crate) engine: Engine,
    pub(crate) rng: fastrand::Rng,
    rank: Rank,
    index: Index,
    id: RankId,
    connection: Option<Connection>,
    replay: Option<Replay>,
    parked: BTreeMap<u64, Batch>,
    marker: Option<u64>,
    acting: Option<Acting>,
    late_call: bool,
    answers: VecDeque<Answer>,
    /// What fak knows the hashes of.
    named: BTreeSet<Block>,
    /// The worker was called lost, and not found since.
    is_lost: bool,
    /// Events up to this number have reached fak.
    heard: u64,
    known_life: u64,
    restarted_at: u64,
    stable_hashes: bool,
    /// How harsh this history is, in percent of its steps.
    misfortunes: u8,
    /// Not faultless.
    is_harsh: bool,
    actions: u8,
    pub(crate) claimed: u64,
    /// Blocks that came back by an answer.
    pub(crate) confirmed: u64,
    /// Prompts that were seen to be claimed again.
    pub(crate) warm: u64,
    pub(crate) checks: u64,
    log: Vec<String>,
}

impl World {
    /// A world of tight limits.
    pub(crate) fn new(seed: u64) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed);
        let (parked_max, attempts_max) = (1 + rng.usize(..6), 1 + rng.u8(..3));
        let tie = rng.u8(..4) > 0;
        let config = Config { replay: rng.u8(..4) > 0, tie, parked_max, attempts_max };
        let buffer_max = 1 + rng.usize(..30);
        Self::with(seed, rng, config, buffer_max)
    }

    /// A world whose limits are out of reach.
    pub(crate) fn roomy(seed: u64) -> Self {
        Self::with(seed, fastrand::Rng::with_seed(seed), Config::default(), usize::MAX)
    }

    fn with(seed: u64, mut rng: fastrand::Rng, config: Config, buffer_max: usize) -> Self {
        let index = Index::new(seed, Limits::default());
        let id = index.add_rank(by_block());
        let engine = Engine::new(rng.bool(), buffer_max);
        let stable_hashes = rng.bool();
        let misfortunes = [0, 1, 2, 4, 8, 16][rng.usize(..6)];
        let actions = [0, 1, 4, 12][rng.usize(..4)];
        let mut world = Self {
            engine,
            rng,
            rank: Rank::new(config),
            index,
            id,
            connection: None,
            replay: None,
            parked: BTreeMap::new(),
            marker: None,
            acting: None,
            late_call: false,
            answers: VecDeque::new(),
            named: BTreeSet::new(),
            is_lost: false,
            heard: 0,
            known_life: 1,
            restarted_at: 0,
            stable_hashes,
            misfortunes,
            is_harsh: buffer_max < usize::MAX,
            actions,
            claimed: 0,
            confirmed: 0,
            warm: 0,
            checks: 0,
            log: vec![format!("{config:?}")],
        };
        world.connect();
        world
    }

    /// One random thing happens.
    pub(crate) fn act(&mut self) {
        if self.rng.u8(..100) < self.misfortunes {
            return self.misfortune();
        }
        if self.rng.u8(..100) < self.actions {
            return self.advance_action();
        }
        match self.rng.u8(..90) {
            0..12 => self.prefill(true),
            12..14 => self.prefill(false),
            14..18 => self.engine.step(),
            18..36 => self.publisher_turn(),
            36..50 => self.receive(),
            50..62 => self.receive_replay(),
            62..65 => self.evict(),
            65..67 => self.duplicate(),
            67..69 => self.tick(),
            69..71 => self.answer_marker(),
            71..74 => self.report(),
            74..80 => self.receive_answer(),
            80 => self.lose(),
            81..84 => self.find(),
            84..89 => self.answer_marker(),
            _ => self.foreign_clear(),
        }
    }

    fn misfortune(&mut self) {
        match self.rng.u8(..12) {
            0..2 => self.drop_sent(),
            2 => self.repeat(),
            3 => self.reorder(),
            4 if self.rng.bool() => self.truncate_replay(),
            4 => self.hole_in_replay(),
            5 => self.restart(),
            6 | 7 => self.reconnect(),
            8 => self.receive_torn(),
            9 => self.notice_incarnation(),
            10 => self.distrust(),
            _ if self.is_lost => self.find(),
            _ => self.lose(),
        }
    }

    /// The shell sends a marker again where its store was lost.
    fn tick(&mut self) {
        self.feed("tick", Event::Tick, None);
        self.marker = self.marker.or(self.rank.wanted_marker());
    }

    fn prompt(&mut self) -> Vec<u16> {
        let length = 1 + self.rng.usize(..DEPTH);
        (0..length).map(|_| self.rng.u16(..LABELS)).collect()
    }

    fn prefill(&mut self, step: bool) {
        let prompt = self.prompt();
        self.note(|| format!("prefill {prompt:?} step={step}"));
        self.send(prompt);
        if step {
            self.engine.step();
        }
    }

    fn send(&mut self, prompt: Vec<u16>) {
        let tokens = with_last(&prompt);
        let sent = self.index.held_and_mark(self.id, &plain(&tokens)).1;
        let cached = self.engine.prefill(&prompt);
        let is_sound = self.is_sound();
        self.answers.push_back(Answer { prompt, cached, sent, is_sound });
    }

    fn is_sound(&self) -> bool {
        self.rank.trust() == Trust::Exact && self.rank.is_settled()
    }

    fn receive_answer(&mut self) {
        let Some(answer) = self.answers.pop_front() else { return };
        if !answer.is_sound || !self.is_sound() {
            return;
        }
        let tokens = with_last(&answer.prompt);
        let cached = answer.cached as u32 * BLOCK_SIZE;
        let came = self.index.confirm(self.id, &plain(&tokens), cached, answer.sent);
        self.confirmed += u64::from(came);
        let Answer { prompt, cached, .. } = answer;
        self.note(|| format!("answer {prompt:?} cached {cached} confirmed {came}"));
    }

    fn report(&mut self) {
        let prompt = self.prompt();
        self.note(|| format!("report {prompt:?}"));
        self.engine.report(&prompt);
    }

    fn pick(&mut self, tier: Tier) -> Option<Block> {
        let blocks: Vec<&Block> = match tier {
            Tier::Gpu => self.engine.gpu.keys().collect(),
            _ => self.engine.cpu.keys().collect(),
        };
        (!blocks.is_empty()).then(|| blocks[self.rng.usize(..blocks.len())].clone())
    }

    fn evict(&mut self) {
        let tier = if self.rng.bool() { Tier::Gpu } else { Tier::Cpu };
        let Some(block) = self.pick(tier) else { return };
        self.note(|| format!("evict {block:?} {tier}"));
        if tier == Tier::Gpu { self.engine.evict(&block) } else { self.engine.evict_cpu(&block) }
    }

    fn duplicate(&mut self) {
        // Of a first block nothing tells a copy from a hit that is announced again.
        if let Some(block) = self.pick(Tier::Gpu).filter(|block| block.len() > 1 || self.is_harsh) {
            self.note(|| format!("duplicate {block:?}"));
            self.engine.duplicate(&block);
        }
    }

    fn foreign_clear(&mut self) {
        let external = self.rng.bool();
        self.note(|| format!("somebody clears, external={external}"));
        self.engine.clear(external, false);
    }

    fn advance_action(&mut self) {
        match self.acting.take() {
            None => {
                let kind = Kind::ALL[self.rng.usize(..Kind::ALL.len())];
                let clear = (kind != Kind::Wake).then(|| kind.intended());
                self.feed("intent", Event::Intent { tiers: kind.touches(), clear }, None);
                self.note(|| format!("  of {kind:?}"));
                self.acting = Some(Acting { kind, called: false });
            }
            Some(acting) if !acting.called => {
                self.call(acting.kind);
                self.acting = Some(Acting { called: true, ..acting });
            }
            Some(acting) => self.conclude(acting.kind),
        }
    }

    fn call(&mut self, kind: Kind) {
        self.note(|| format!("the engine does {kind:?}"));
        match kind {
            Kind::Reset | Kind::SleepKeepTier => self.engine.clear(false, true),
            Kind::ResetExternal | Kind::Sleep => self.engine.clear(true, true),
            Kind::ResetRefused | Kind::Wake => {}
            Kind::ResetExternalRefused => self.engine.wipe_connector(Lost::ByFak),
            Kind::TimedOut => self.late_call = self.rng.bool(),
        }
    }

    fn conclude(&mut self, kind: Kind) {
        let (kv, clears) = kind.verdict();
        if kind == Kind::ResetRefused {
            return self.feed("declined", Event::Declined { kept: TierSet::GPU }, None);
        }
        // What was lost on these tiers before now is fak's to know, whatever took it.
        for ((tier, _), how) in &mut self.engine.lost {
            if kind.touches().has(*tier) {
                *how = Lost::ByFak;
            }
        }
        self.feed("outcome", Event::Outcome { kv, clears }, None);
        if std::mem::take(&mut self.late_call) {
            self.note(|| "the engine acts on the call that timed out".into());
            self.engine.clear(true, false);
        }
    }

    fn distrust(&mut self) {
        let kv = PerTier::all(Disposition::Unknown);
        for how in self.engine.lost.values_mut() {
            *how = Lost::ByFak;
        }
        self.feed("distrust", Event::Distrust { kv }, None);
    }

    fn lose(&mut self) {
        self.is_lost = true;
        self.feed("lost", Event::Lost, None);
    }

    /// The process is told by its start time; another one is told as another incarnation.
    fn find(&mut self) {
        self.notice_incarnation();
        self.is_lost = false;
        self.feed("found", Event::Found, None);
    }

    fn answer_marker(&mut self) {
        if let Some(id) = self.marker.take() {
            self.note(|| format!("marker {id}"));
            self.engine.mark(id);
            if self.rng.u8(..8) == 0 {
                self.feed("marked", Event::Marked { id }, None);
            }
        }
    }

    /// One turn of the publisher's loop: at most one replay, then at most one batch.
    fn publisher_turn(&mut self) {
        let life = self.engine.life;
        if let Some(replay) = self.replay.as_mut().filter(|r| !r.served && r.life == life) {
            replay.served = true;
            let from = replay.from;
            let batches = self.engine.buffer.iter().filter(|b| b.seq >= from).cloned();
            replay.items = batches.map(Some).chain([None]).collect();
        }
        if let Some(batch) = self.engine.publish()
            && let Some(connection) = self.connection.as_mut().filter(|c| c.life == life)
        {
            connection.sent.push_back(batch);
        }
    }

    fn receive(&mut self) {
        let Some(connection) = &mut self.connection else { return };
        let Some(batch) = connection.sent.pop_front() else { return };
        connection.received.push_back(batch.clone());
        if connection.received.len() > 8 {
            connection.received.pop_front();
        }
        self.live(batch, true);
    }

    fn live(&mut self, batch: Batch, readable: bool) {
        self.heard = self.heard.max(batch.through);
        let head = Head { readable, ..head(&batch) };
        self.feed("live", Event::Live(head), Some(batch));
    }

    fn receive_torn(&mut self) {
        let Some(connection) = &mut self.connection else { return };
        let Some(batch) = connection.sent.pop_front() else { return };
        self.live(batch, false);
    }

    fn drop_sent(&mut self) {
        if let Some(batch) = self.connection.as_mut().and_then(|c| c.sent.pop_front()) {
            self.note(|| format!("batch {} is dropped", batch.seq));
        }
    }

    fn repeat(&mut self) {
        let Some(connection) = &self.connection else { return };
        if connection.received.is_empty() {
            return;
        }
        let batch = connection.received[self.rng.usize(..connection.received.len())].clone();
        self.live(batch, true);
    }

    fn reorder(&mut self) {
        if let Some(connection) = &mut self.connection
            && connection.sent.len() > 1
        {
            connection.sent.swap(0, 1);
            self.note(|| "two batches change places".into());
        }
    }

    fn receive_replay(&mut self) {
        let life = self.engine.life;
        let Some(replay) = &mut self.replay else { return };
        let session = replay.session;
        if !replay.served && replay.life != life {
            return self.truncate_replay();
        }
        let Some(item) = replay.items.pop_front() else { return };
        let answered_by = replay.life;
        match item {
            Some(batch) => {
                self.heard = self.heard.max(batch.through);
                self.feed(
                    "replayed",
                    Event::ReplayBatch { session, head: head(&batch) },
                    Some(batch),
                );
            }
            None => {
                self.replay = None;
                if answered_by == life {
                    self.heard = self.heard.max(self.restarted_at);
                }
                self.feed("replay end", Event::ReplayEnd { session }, None);
            }
        }
    }

    /// A reader too slow for the ROUTER's queue: batches in the middle are dropped. One at the end
    /// is dropped only behind 1,000 that wait, and of so long a replay the kernel asks the tail
    /// again.
    fn hole_in_replay(&mut self) {
        if let Some(replay) = self.replay.as_mut().filter(|r| r.items.len() > 2) {
            let at = self.rng.usize(..replay.items.len() - 2);
            replay.items.remove(at);
            self.note(|| format!("the replay loses its item {at}"));
        }
    }

    fn truncate_replay(&mut self) {
        if let Some(replay) = self.replay.take() {
            self.feed("replay failed", Event::ReplayFailed { session: replay.session }, None);
        }
    }

    fn restart(&mut self) {
        self.engine.restart();
        self.restarted_at = self.engine.told();
        self.marker = None;
        self.late_call = false;
        self.note(|| "the engine restarts".into());
    }

    /// The connection ends, what was in it is lost, and a new one leads to whoever lives now.
    fn reconnect(&mut self) {
        if self.connection.take().is_some() {
            self.feed("disconnected", Event::Disconnected, None);
        }
        self.connect();
    }

    fn connect(&mut self) {
        let life = self.engine.life;
        self.connection =
            Some(Connection { life, sent: VecDeque::new(), received: VecDeque::new() });
        self.known_life = life;
        self.heard = self.heard.max(self.restarted_at);
        self.feed("connected", Event::Connected, None);
    }

    fn notice_incarnation(&mut self) {
        if self.known_life != self.engine.life {
            self.known_life = self.engine.life;
            self.heard = self.heard.max(self.restarted_at);
            self.feed("new incarnation", Event::NewIncarnation, None);
        }
    }

    fn feed(&mut self, what: &str, event: Event, batch: Option<Batch>) {
        let effects = self.rank.step(event);
        self.note(|| format!("{what} {event:?} {batch:?} -> {effects:?}"));
        let is_sound = self.is_sound();
        self.answers.iter_mut().for_each(|answer| answer.is_sound &= is_sound);
        let mut reconnect = false;
        for effect in effects {
            match effect {
                Effect::Take(take) => {
                    let fed = batch.clone().filter(|b| b.seq == take.seq);
                    let batch = fed.or_else(|| self.parked.remove(&take.seq));
                    self.apply(&batch.expect("a batch that is taken was fed or parked"), take);
                }
                Effect::Park { seq } => {
                    self.parked.insert(seq, batch.clone().expect("a batch was fed"));
                }
                Effect::Unpark { through } => self.parked.retain(|seq, _| *seq > through),
                Effect::Demote { tiers, to, cause } => {
                    self.index.demote(self.id, tiers, to, Loss::without_event(cause));
                }
                Effect::SetAside { tiers } => self.index.set_aside(self.id, tiers),
                Effect::Reinstate { tiers } => self.index.reinstate(self.id, tiers),
                Effect::ForgetIdentities => {
                    self.named.clear();
                    self.index.forget_identities(self.id);
                }
                Effect::Suspend => self.index.suspend(self.id),
                Effect::Restore => self.index.restore(self.id),
                Effect::Replay { session, from, .. } => {
                    let life = self.engine.life;
                    let items = VecDeque::new();
                    self.replay = Some(Replay { session, from, life, served: false, items });
                }
                Effect::Reconnect => reconnect = true,
                Effect::Mark { id } => self.marker = Some(id),
                Effect::Ignore { .. } | Effect::Note(_) => {}
            }
        }
        if reconnect {
            self.reconnect();
        }
    }

    fn apply(&mut self, batch: &Batch, take: Take) {
        let life = (batch.digest >> 64) as u64;
        for event in &batch.events {
            match event {
                Ev::Store { parent, block } => {
                    self.named.insert(block.clone());
                    self.store(life, (Tier::Gpu, take.gain), parent.as_ref(), block);
                }
                Ev::Report { block } => {
                    let prefixes = (1..=block.len()).map(|end| block[..end].to_vec());
                    self.named.extend(prefixes);
                    self.tell_report(life, take.gain, block);
                }
                Ev::StoreCpu { block } => self.store(life, (Tier::Cpu, take.gain), None, block),
                Ev::Remove { block } => self.remove(life, Tier::Gpu, block),
                Ev::RemoveCpu { block } => self.remove(life, Tier::Cpu, block),
                Ev::Clear => {
                    for tier in Tier::ALL {
                        if let Some(to) = take.clear.get(*tier) {
                            let loss = Loss { cause: LossCause::Cleared, origin: Origin::Live };
                            self.index.demote(self.id, TierSet::of(*tier), to, loss);
                        }
                    }
                }
            }
        }
    }

    fn tell_report(&self, life: u64, gain: TierSet, block: &Block) {
        let prefix = |end: usize| hash(self.seed(life), &block[..end].to_vec());
        let store = Store {
            hashes: (1..=block.len()).map(prefix).collect(),
            parent: None,
            tokens: tokens(block),
            block_size: BLOCK_SIZE,
            extra: Extra::PerBlock(Vec::new()),
            lora: None,
            tier: Tier::Gpu,
            group: 0,
            kind: GroupKind::Full,
        };
        self.index.store(self.id, &store, gain);
    }

    fn store(
        &self,
        life: u64,
        (tier, gain): (Tier, TierSet),
        parent: Option<&Block>,
        block: &Block,
    ) {
        // A connector tells the place alone: no tokens, no size, no parent.
        let tokens = if tier == Tier::Gpu { tokens(&block[block.len() - 1..]) } else { Vec::new() };
        let store = Store {
            hashes: vec![hash(self.seed(life), block)],
            parent: parent.map(|p| hash(self.seed(life), p)),
            block_size: if tokens.is_empty() { 0 } else { BLOCK_SIZE },
            tokens,
            extra: Extra::PerBlock(vec![Vec::new()]),
            lora: None,
            tier,
            group: 0,
            kind: GroupKind::Full,
        };
        self.index.store(self.id, &store, gain);
    }

    fn remove(&mut self, life: u64, tier: Tier, block: &Block) {
        // What waits for its parent is forgotten with its last place.
        if !self.is_named(block) {
            self.named.remove(block);
        }
        let hashes = vec![hash(self.seed(life), block)];
        self.index.remove(self.id, &Remove { hashes, tier, group: 0 }, Origin::Live);
    }

    /// The seed of a life's hashes; before vLLM 0.30.0 each has its own.
    fn seed(&self, life: u64) -> u64 {
        if self.stable_hashes { 0 } else { life }
    }

    fn held(&self, prompt: &[u16]) -> PerTier<u32> {
        self.index.held(self.id, &plain(&with_last(prompt))).blocks
    }

    /// Holds claims for a few prompts against the truth.
    pub(crate) fn check(&mut self) {
        for _ in 0..2 {
            let prompt: Vec<u16> = (0..DEPTH).map(|_| self.rng.u16(..LABELS)).collect();
            let held = self.held(&prompt);
            self.checks += 1;
            self.claimed += u64::from(held.gpu + held.cpu);
            for n in 0..(held.gpu + held.cpu) as usize {
                let tier = if n < held.gpu as usize { Tier::Gpu } else { Tier::Cpu };
                let block = prompt[..=n].to_vec();
                if !self.engine.holds(tier, &block) {
                    self.excuse(tier, block);
                }
            }
        }
    }

    fn excuse(&self, tier: Tier, block: Block) {
        let how = self.engine.lost.get(&(tier, block.clone()));
        let in_flight = matches!(how, Some(Lost::Event(n)) if *n > self.heard);
        assert!(
            in_flight,
            "{block:?} on {tier} is claimed and not held: {how:?}, heard {}\n{}",
            self.heard,
            self.log.join("\n")
        );
    }

    /// Lets the faults end and the stream become whole, stores something fresh, and expects it to
    /// be claimed.
    pub(crate) fn expect_to_recover(&mut self) {
        while self.acting.is_some() {
            self.advance_action();
        }
        if self.connection.as_ref().is_none_or(|c| c.life != self.engine.life) {
            self.reconnect();
        }
        if self.is_lost {
            self.find();
        }
        self.drain();
        let fresh: Vec<u16> = (0..3).map(|n| 100 + n).collect();
        self.engine.prefill(&fresh);
        self.engine.step();
        self.drain();
        let held = self.held(&fresh);
        assert_eq!(
            held.gpu,
            3,
            "a fresh store stays cold: {:?}\n{}",
            self.rank.trust(),
            self.log.join("\n")
        );
    }

    /// Whether the hashes of a block and of those before it are known.
    fn is_named(&self, block: &Block) -> bool {
        (1..=block.len()).all(|end| self.named.contains(&block[..end]))
    }

    /// Expects that what the engine kept is claimed again: after one answer where its hashes are
    /// known, and after one that announces its hits where they are not.
    pub(crate) fn expect_warmth_back(&mut self) {
        self.answers.clear();
        let kept: Vec<Block> = self.engine.gpu.keys().cloned().collect();
        for prompt in kept {
            let held = self.engine.run(&prompt, 0, Tier::Gpu);
            if held < prompt.len() || prompt[0] == u16::MAX {
                continue;
            }
            if self.is_named(&prompt) {
                self.send(prompt.clone());
                self.receive_answer();
            } else {
                self.engine.report(&prompt);
                self.drain();
            }
            let claimed = self.held(&prompt).gpu as usize;
            self.warm += 1;
            assert_eq!(claimed, held, "{prompt:?} stays cold\n{}", self.log.join("\n"));
        }
    }

    /// Everything arrives, and what fak asks for is answered, until nothing is left to do.
    pub(crate) fn drain(&mut self) {
        for _ in 0..400 {
            self.engine.step();
            self.publisher_turn();
            self.answer_marker();
            self.receive();
            self.receive_replay();
            self.check();
            let idle = self.engine.is_published()
                && self.replay.is_none()
                && self.connection.as_ref().is_some_and(|c| c.sent.is_empty());
            // Where no marker can be sent, a connection that was opened anew waits for a batch; so
            // does a clear that may be somebody else's.
            let is_asked = self.rank.wanted_marker().is_some();
            let waits = (self.rank.is_dead() || self.rank.is_contested()) && !is_asked;
            if idle && (self.rank.trust() == Trust::Exact || waits) {
                return;
            }
            if idle {
                self.tick();
            }
        }
        panic!("never settles: {:?}\n{}", self.rank.trust(), self.log.join("\n"));
    }

    /// Whether for every prompt what is claimed is what the engine would hit.
    pub(crate) fn expect_exact(&self) {
        for code in 0..u32::from(LABELS).pow(DEPTH as u32) {
            let label =
                |n: usize| (code / u32::from(LABELS).pow(n as u32) % u32::from(LABELS)) as u16;
            let prompt: Vec<u16> = (0..DEPTH).map(label).collect();
            let run = |from: usize, tier| {
                (from..DEPTH)
                    .take_while(|n| self.engine.holds(tier, &prompt[..=*n].to_vec()))
                    .count()
            };
            let gpu = run(0, Tier::Gpu);
            let held = self.held(&prompt);
            let truth = (gpu, run(gpu, Tier::Cpu));
            assert_eq!(
                (held.gpu as usize, held.cpu as usize),
                truth,
                "{prompt:?}\n{}",
                self.log.join("\n")
            );
        }
    }

    /// One random thing that no fault is part of.
    pub(crate) fn act_faultless(&mut self) {
        match self.rng.u8(..10) {
            0..4 => self.prefill(true),
            4..6 => self.evict(),
            6 => self.duplicate(),
            7 => self.report(),
            8 => self.receive_answer(),
            _ => {
                self.doubt();
                self.drain();
            }
        }
    }

    /// Something that drops nothing makes fak set aside what it believes.
    fn doubt(&mut self) {
        match self.rng.u8(..6) {
            0 => {
                let kind = Kind::ResetRefused;
                let clear = Some(kind.intended());
                self.feed("intent", Event::Intent { tiers: kind.touches(), clear }, None);
                self.conclude(kind);
            }
            1 => {
                self.feed("intent", Event::Intent { tiers: TierSet::ALL, clear: None }, None);
                let kv = PerTier::all(Disposition::Preserved);
                self.feed("outcome", Event::Outcome { kv, clears: false }, None);
            }
            2 => {
                self.lose();
                self.find();
            }
            3 => self.reconnect(),
            4 => self.feed("blind", Event::Blind, None),
            _ => {}
        }
    }

    fn note(&mut self, line: impl FnOnce() -> String) {
        if std::env::var_os("FAK_SEED").is_some() {
            self.log.push(line());
        }
    }
}

/// The tokens of a prompt of whole blocks, and a last one.
fn with_last(prompt: &[u16]) -> Vec<u32> {
    let mut tokens = tokens(prompt);
    tokens.push(9_999);
    tokens
}

fn plain(tokens: &[u32]) -> Prompt<'_> {
    Prompt { tokens, lora: None, salt: None }
}

fn head(batch: &Batch) -> Head {
    let clears = batch.events.iter().filter(|e| **e == Ev::Clear).count() as u32;
    Head { seq: batch.seq, digest: batch.digest, clears, marker: batch.marker, readable: true }
}

/// An engine's hash of a block.
fn hash(seed: u64, block: &Block) -> EngineHash {
    let start = seed.wrapping_mul(77) + block.len() as u64;
    EngineHash::Int(block.iter().fold(start, |hash, label| {
        (hash ^ u64::from(*label) ^ 0x9e37).wrapping_mul(0x0100_0000_01b3).rotate_left(17)
    }))
}

fn tokens(labels: &[u16]) -> Vec<u32> {
    labels.iter().flat_map(|l| [u32::from(*l) * 2, u32::from(*l) * 2 + 1]).collect()
}
