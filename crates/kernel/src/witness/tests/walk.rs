//! Does fak, walking a worker through random moves and faults, ever serve what it must not or claim
//! what is not there?
//!
//! The engine here is a model of what vLLM does, not of what fak believes: it loses answers, fails
//! half-way, restarts, and is put to sleep, woken and given other weights by others.

use alloc::collections::BTreeSet;

use super::*;

/// SplitMix64: a walk is named by its seed.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

/// What is really there: the versions of the weights that each tier's KV was made with.
#[derive(Clone, Debug)]
struct Engine {
    connector: Connector,
    paused: bool,
    asleep: Option<Level>,
    awake: Parts,
    gpu: BTreeSet<u32>,
    cpu: BTreeSet<u32>,
    /// The weights in device memory.
    weights: Option<u32>,
    /// The weights in host memory, during a sleep of level 1.
    parked: Option<u32>,
    /// The newest weights that exist.
    newest: u32,
    /// Their owner loaded them into a sleeper, and has not told yet.
    untold: bool,
}

impl Engine {
    fn new(connector: Connector) -> Self {
        Self {
            connector,
            paused: false,
            asleep: None,
            awake: Parts::ALL,
            gpu: BTreeSet::new(),
            cpu: BTreeSet::new(),
            weights: Some(1),
            parked: None,
            newest: 1,
            untold: false,
        }
    }

    fn state(&self) -> State {
        let sleep_state = match self.asleep {
            None => SleepState::Awake,
            Some(Level::One) => SleepState::One,
            Some(Level::Two) => SleepState::Two,
        };
        let asleep = self.asleep.is_some();
        state(self.paused, self.paused || asleep, Some(sleep_state))
    }

    fn clear(&mut self, connector_too: bool) {
        self.gpu.clear();
        if connector_too && self.connector.clears {
            self.cpu.clear();
        }
    }

    fn apply(&mut self, call: Call) -> Answer {
        match call {
            Call::Pause { clear_cache, spare_connector, .. } => {
                self.paused = true;
                if clear_cache {
                    self.clear(!spare_connector);
                }
            }
            Call::Resume => {
                assert!(self.asleep.is_none(), "resumed a sleeper");
                self.paused = false;
            }
            Call::Sleep { level, spare_connector, .. } => {
                assert!(self.asleep.is_none(), "slept twice: engines crash on it");
                self.paused = true;
                self.asleep = Some(level);
                self.awake = Parts::NONE;
                self.parked = if level == Level::One { self.weights } else { None };
                self.weights = None;
                self.clear(!spare_connector);
            }
            Call::WakeUp { tags } => self.wake(tags),
            Call::Reload if !self.awake.covers(Parts::of(Part::Weights)) => return Answer::Failed,
            Call::Reload => self.weights = Some(self.newest),
            Call::ResetPrefixCache { external, .. } => {
                self.clear(external);
                return Answer::Success(true);
            }
        }
        Answer::Ok
    }

    fn wake(&mut self, tags: Parts) {
        // A tag that is not asleep voids the call.
        if self.asleep.is_some() && tags.iter().any(|tag| self.awake.covers(Parts::of(tag))) {
            return;
        }
        let tags = if tags.is_empty() { Parts::ALL } else { tags };
        if tags.covers(Parts::of(Part::Weights)) && self.weights.is_none() {
            self.weights = self.parked;
        }
        self.awake = self.awake.with(tags);
        if self.awake.covers(Parts::MEMORY) {
            (self.asleep, self.paused, self.awake) = (None, false, Parts::ALL);
        }
    }

    /// A new process: its own weights, an empty device cache.
    fn restart(&mut self) {
        let (newest, mut cpu) = (self.newest, core::mem::take(&mut self.cpu));
        if self.connector.in_process {
            cpu.clear();
        }
        let untold = self.untold;
        *self = Self { cpu, newest, untold, weights: Some(newest), ..Self::new(self.connector) };
    }
}

/// How often the walks met what they are to be tested on.
#[derive(Default, Debug)]
struct Met {
    served: u32,
    warm_after_pause: u32,
    warm_after_sleep: u32,
    held_back: u32,
    stale: u32,
    pushed: u32,
}

struct Walk {
    random: Random,
    engine: Engine,
    worker: Worker,
    warm: TierSet,
    /// What the last verdict stood on.
    evidence: Evidence,
    slept: bool,
    paused: bool,
    trace: Vec<String>,
}

impl Walk {
    fn new(seed: u64) -> Self {
        let mut random = Random(seed);
        let connector = random.pick(&[
            Connector::OFFLOADING,
            Connector::OFFLOADING,
            Connector::MOONCAKE_STORE,
            Connector::UNKNOWN,
        ]);
        let caps = Capabilities {
            keep_argument: !random.one_in(4),
            tiers: TierSet::GPU.with(TierSet::of(Tier::Cpu)),
            connector,
            ..READY
        };
        let (engine, worker) = (Engine::new(connector), Worker::serving(caps));
        let (warm, evidence, trace) = (TierSet::NONE, Evidence::None, Vec::new());
        Self { random, engine, worker, warm, evidence, slept: false, paused: false, trace }
    }

    fn judged(&mut self, mv: Move, answer: Answer, observed: Observed) {
        let verdict = self.worker.see(mv, answer, observed);
        self.warm = self.warm.without(verdict.demoted);
        self.evidence = verdict.evidence;
        self.trace.push(format!("{mv:?} {answer:?} {observed:?} -> {verdict:?}"));
    }

    fn look(&mut self) -> Observed {
        if self.random.one_in(8) { Observed::Nothing } else { Observed::State(self.engine.state()) }
    }

    fn step(&mut self, met: &mut Met) {
        match self.random.below(12) {
            0..=3 => self.serve(met),
            4..=8 => {
                let mv = self.any_move();
                self.act(mv);
            }
            9 if self.random.one_in(2) && !self.engine.untold => self.others_act(),
            10 if self.random.one_in(4) => self.train(),
            10 if self.random.one_in(2) => self.push(met),
            _ => {
                if self.random.one_in(3) {
                    self.engine.restart();
                    let observed = Observed::State(self.engine.state());
                    self.judged(Move::Restart, Answer::Unrecorded, observed);
                    if core::mem::take(&mut self.engine.untold) {
                        self.judged(Move::Weights, Answer::Unrecorded, observed);
                    }
                }
            }
        }
        self.probe();
    }

    fn probe(&mut self) {
        let observed = Observed::State(self.engine.state());
        let seen = Seen::read(&observed, &self.worker.caps);
        if self.worker.now.has_drifted(seen) {
            self.judged(Move::Drift, Answer::Unrecorded, observed);
        }
        assert!(!self.worker.now.has_drifted(seen), "a row at each probe");
    }

    /// One request, if fak lets it through.
    fn serve(&mut self, met: &mut Met) {
        let Engine { asleep, paused, weights, .. } = self.engine;
        let runs = asleep.is_none() && !paused;
        if self.worker.now.phase != Phase::Serving {
            met.held_back += u32::from(runs);
            return;
        }
        let weights = weights.filter(|_| runs).expect("served by an engine that cannot");
        for (tier, holds) in [(Tier::Gpu, &self.engine.gpu), (Tier::Cpu, &self.engine.cpu)] {
            if self.warm.has(tier) {
                assert!(holds.contains(&weights), "{tier} is claimed warm");
                met.warm_after_pause += u32::from(self.paused);
                met.warm_after_sleep += u32::from(self.slept);
            }
            // KV of other weights is out of reach only of a request that is salted.
            let salted = self.worker.now.stale.has(tier);
            assert!(salted || holds.iter().all(|made| *made == weights), "{tier} is stale");
            met.stale += u32::from(holds.iter().any(|made| *made != weights));
        }
        met.served += 1;
        // It stores on both tiers, and both stores are accepted.
        self.engine.gpu.insert(weights);
        self.engine.cpu.insert(weights);
        self.warm = self.worker.caps.present();
        (self.slept, self.paused) = (false, false);
    }

    fn any_move(&mut self) -> Move {
        let level = self.random.pick(&[Level::One, Level::One, Level::Two]);
        let keep_tier = !self.random.one_in(3);
        let tags = self.random.pick(&[
            Parts::NONE,
            Parts::NONE,
            Parts::of(Part::Weights),
            Parts::of(Part::KvCache),
        ]);
        let weights = self.random.pick(&[
            Weights::Unproven,
            Weights::Unproven,
            Weights::Unproven,
            Weights::Changed,
        ]);
        // Said of weights that are there, and of dropped ones that nobody can have loaded.
        let is_same =
            self.engine.weights.is_some() || !self.engine.awake.covers(Parts::of(Part::Weights));
        let weights = if self.engine.untold {
            Weights::Loaded
        } else if is_same && self.random.one_in(3) {
            Weights::Same
        } else {
            weights
        };
        let wake = Move::Wake { tags, weights };
        match self.worker.now.phase {
            Phase::Sleeping | Phase::Waking | Phase::Error if !self.random.one_in(4) => wake,
            Phase::Paused if !self.random.one_in(2) => Move::Resume,
            _ => self.random.pick(&[
                PAUSE,
                CLEAR,
                Move::Resume,
                Move::Resume,
                sleep(level, keep_tier),
                sleep(level, keep_tier),
                sleep(level, keep_tier),
                RESET,
                RESET_EXTERNAL,
            ]),
        }
    }

    fn act(&mut self, mv: Move) {
        let plan = plan(mv, &self.worker.caps, &self.worker.now);
        let (calls, demote) = match plan {
            Plan::Refuse(refusal) => {
                return self.judged(mv, Answer::NotSent(refusal), Observed::Nothing);
            }
            Plan::Send { calls, demote, .. } => (calls, demote),
        };
        self.warm = self.warm.without(demote);
        let mut answer = Answer::Unrecorded;
        for call in calls {
            answer = self.call(call);
            if !matches!(answer, Answer::Ok | Answer::Success(true)) {
                break;
            }
        }
        let tells = matches!(mv, Move::Wake { weights: Weights::Loaded, .. });
        self.slept |= matches!(mv, Move::Sleep { .. });
        self.paused |= matches!(mv, Move::Pause { .. });
        let observed = self.look();
        self.judged(mv, answer, observed);
        self.engine.untold &= !tells || self.evidence == Evidence::NotSent;
    }

    fn call(&mut self, call: Call) -> Answer {
        match self.random.below(24) {
            // Done, and the answer lost.
            0 => {
                self.engine.apply(call);
                self.random.pick(&[Answer::Timeout, Answer::Cut, Answer::Unrecorded])
            }
            // Not done, and nobody says so.
            1 => self.random.pick(&[Answer::Timeout, Answer::Cut, Answer::Failed]),
            // Not done, and answered as if it were: never by a reset, whose effect nothing shows.
            2 if !matches!(call, Call::ResetPrefixCache { .. } | Call::Reload) => Answer::Ok,
            3 if call == Call::Reload => Answer::AwaitsWeights,
            4 => Answer::Refused,
            // Half done: paused, memory still there.
            5 if matches!(call, Call::Sleep { .. }) => {
                self.engine.paused = true;
                Answer::Failed
            }
            6 if matches!(call, Call::ResetPrefixCache { .. }) => {
                if self.random.one_in(2) {
                    self.engine.apply(call);
                }
                Answer::Success(false)
            }
            _ => self.engine.apply(call),
        }
    }

    /// Somebody else moves the engine, and fak sees it at the next probe.
    fn others_act(&mut self) {
        let level = self.random.pick(&[Level::One, Level::Two]);
        let serving = self.engine.asleep.is_none() && !self.engine.paused;
        match self.random.below(4) {
            0 if serving => {
                self.engine.apply(Call::ResetPrefixCache { external: true, running: false });
                let observed = Observed::State(self.engine.state());
                self.judged(Move::ClearUnexplained, Answer::Unrecorded, observed);
            }
            1 if self.engine.asleep.is_none() => {
                let mode = Mode::Abort;
                self.engine.apply(Call::Sleep { level, mode, spare_connector: false });
            }
            2 => self.engine.wake(Parts::NONE),
            3 if serving => {
                let (mode, clear_cache) = (Mode::Abort, true);
                self.engine.apply(Call::Pause { mode, clear_cache, spare_connector: false });
            }
            _ => {}
        }
    }

    /// The trainer brings other weights, and fak learns of it.
    fn train(&mut self) {
        if self.engine.awake.covers(Parts::of(Part::Weights)) {
            self.engine.newest += 1;
            self.engine.weights = Some(self.engine.newest);
            let observed = Observed::State(self.engine.state());
            self.judged(Move::Weights, Answer::Unrecorded, observed);
        }
    }

    /// The trainer brings other weights to a sleeper whose memory for them is awake, and tells with
    /// the wake.
    fn push(&mut self, met: &mut Met) {
        let takes = Parts::of(Part::Weights);
        let Standing { phase, awake, .. } = self.worker.now;
        if phase == Phase::Waking && awake == takes && self.engine.awake == takes {
            self.engine.newest += 1;
            (self.engine.weights, self.engine.untold) = (Some(self.engine.newest), true);
            met.pushed += 1;
        }
    }
}

#[test]
fn no_walk_serves_or_claims_what_is_not_there() {
    let mut met = Met::default();
    for seed in 0..1500 {
        let mut walk = Walk::new(seed);
        for step in 0..120 {
            let result =
                std::panic::catch_unwind(core::panic::AssertUnwindSafe(|| walk.step(&mut met)));
            if result.is_err() {
                let tail = walk.trace.iter().rev().take(8).rev();
                let tail: Vec<&str> = tail.map(String::as_str).collect();
                panic!("seed {seed}, step {step}: {:#?}\n{}", walk.engine, tail.join("\n"));
            }
        }
    }
    // A walk that never got anywhere shows nothing.
    for (what, count) in [
        ("served", met.served),
        ("warm after a pause", met.warm_after_pause),
        ("warm after a sleep", met.warm_after_sleep),
        ("held back", met.held_back),
        ("stale", met.stale),
        ("pushed", met.pushed),
    ] {
        assert!(count > 100, "{what}: {met:?}");
    }
}
