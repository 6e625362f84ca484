//! The false-warm hunt: random requests, actions and accidents, drawn from a seed, and every claim
//! that `fak serve` makes held against what the engine then reuses.
//! Invariant: a claim that was too high, or `cold` of what was cached, fails the hunt, unless an
//! event that the engine put on the wire just before its request was sent, or later, explains it;
//! so does each claim that fak does not count as it was seen, and KV of other weights that is
//! reused once fak knows of the change.

mod claims;
mod draw;
mod lane;
mod mend;
mod oracle;
mod tally;
mod weights;

use std::path::Path;

use fak_sim::Connector;

pub use self::lane::Lane;
pub use self::tally::Tally;
use crate::scenario::Profile;
use crate::target::{Simulated, Target};

/// The simulated engine of that number: each connector in turn, and the offloading one both where
/// its tier can be kept and where it cannot.
pub fn simulated(number: usize) -> (Simulated, Profile) {
    match number % 4 {
        0 => (Simulated::default(), Profile::Offload),
        1 => (Simulated::default(), Profile::KeepTier),
        2 => (Simulated::with(Connector::Mooncake), Profile::KeepTier),
        _ => (Simulated::with(Connector::Multi), Profile::KeepTierBundle),
    }
}

/// What to hunt.
#[derive(Clone, Copy, Debug)]
pub struct Hunt {
    /// Everything that is random comes from it.
    pub seed: u64,
    /// Requests and actions, at least.
    pub steps: usize,
    /// Engines behind one gateway.
    pub workers: usize,
    /// Turns in a hundred in which something happens besides requests.
    pub accidents: u32,
    /// Restarts in a thousand of those. A real engine takes half a minute for one.
    pub restarts: u32,
    /// Whether weights change.
    pub trains: bool,
    /// Whether requests come while an action is done, too.
    pub has_traffic: bool,
    /// Whether each turn is told on stderr.
    pub tells: bool,
    /// Pause between two looks of fak's at a worker.
    pub probe_every_ms: u64,
    /// First byte of an answer before fak looks at its worker.
    pub first_byte_ms: u64,
}

impl Hunt {
    /// For simulated engines, which do everything at once.
    pub fn simulated(seed: u64, steps: usize) -> Self {
        Self {
            seed,
            steps,
            workers: 2,
            accidents: 22,
            restarts: 20,
            trains: true,
            has_traffic: false,
            tells: false,
            probe_every_ms: 50,
            first_byte_ms: 100,
        }
    }

    /// For a real engine.
    pub fn real(seed: u64, steps: usize) -> Self {
        let (workers, restarts) = (1, 5);
        let (probe_every_ms, first_byte_ms) = (100, 500);
        let simulated = Self::simulated(seed, steps);
        Self { workers, restarts, probe_every_ms, first_byte_ms, ..simulated }
    }

    /// Hunts with several gateways at once, each with engines of its own and a part of the steps.
    /// `engine` makes the engine of that number and says how it is started; numbers go on from
    /// lane to lane with one engine in common, so that neighbours differ within a lane too.
    ///
    /// # Errors
    ///
    /// Something does not start, or hangs: a request, an action, or a worker that nobody can bring
    /// back to serve.
    pub fn run<T: Target>(
        self,
        binary: &Path,
        lanes: usize,
        engine: impl Fn(usize) -> (T, Profile) + Sync,
    ) -> anyhow::Result<Tally> {
        let part = Self { steps: self.steps.div_ceil(lanes.max(1)), ..self };
        let hunted: Vec<_> = std::thread::scope(|scope| {
            let lanes: Vec<_> = (0..lanes)
                .map(|lane| {
                    let part = Self { seed: self.seed.wrapping_add(lane as u64), ..part };
                    let engine = &engine;
                    scope.spawn(move || part.run_one(binary, |number| engine(lane + number)))
                })
                .collect();
            let panicked = |_| Err(anyhow::anyhow!("a lane panicked"));
            lanes.into_iter().map(|lane| lane.join().unwrap_or_else(panicked)).collect()
        });
        let mut whole = Tally::default();
        for tally in hunted {
            whole.add(tally?);
        }
        Ok(whole)
    }

    /// On one thread: a real engine is told to die with the thread that started it.
    fn run_one<T: Target>(
        self,
        binary: &Path,
        engine: impl Fn(usize) -> (T, Profile),
    ) -> anyhow::Result<Tally> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            let engines = (0..self.workers).map(engine).collect();
            Lane::start(self, engines, binary).await?.run().await
        })
    }
}
