//! The simulator, in this process.

use std::sync::Arc;
use std::time::Duration;

use fak_sim::{Binds, Connector, Faults, Reused, Sim, SimConfig};

use super::{
    ADAPTERS, BLOCKS_PER_CHUNK, Endpoints, GPU_BLOCKS, MODEL_LEN_MAX, SECOND_NAME, TIER_BLOCKS,
    Target, weight_version,
};
use crate::scenario::Profile;

/// Time of a step, as the tiny model takes on a CPU: a scenario that acts on a running request
/// has the same time for it on either side.
const STEP: Duration = Duration::from_millis(2);

/// A simulated engine.
#[derive(Debug, Default)]
pub struct Simulated {
    sim: Option<Sim>,
    connector: Option<Connector>,
}

impl Simulated {
    /// One with this connector, whatever the profile has.
    pub fn with(connector: Connector) -> Self {
        Self { sim: None, connector: Some(connector) }
    }
}

impl Target for Simulated {
    fn name(&self) -> &'static str {
        "sim"
    }

    async fn start(&mut self, profile: Profile) -> anyhow::Result<Endpoints> {
        let sim = match self.sim.take() {
            Some(mut sim) => {
                sim.restart().await?;
                sim
            }
            None => {
                let config = config(profile);
                let connector = self.connector.unwrap_or(config.connector);
                Sim::start(SimConfig { connector, ..config }, Binds::default()).await?
            }
        };
        let endpoints = Endpoints {
            base_url: sim.base_url(),
            kv_events: sim.kv_events_endpoint(),
            replay: sim.replay_endpoint(),
        };
        self.sim = Some(sim);
        Ok(endpoints)
    }

    fn faults(&self) -> Option<Arc<Faults>> {
        self.sim.as_ref().map(Sim::faults)
    }

    fn reused(&self, request: &str) -> Option<Reused> {
        self.sim.as_ref()?.reused(&format!("cmpl-{request}-0"))
    }

    fn salt(&self, request: &str) -> Option<Option<String>> {
        self.sim.as_ref()?.salt(&format!("cmpl-{request}-0"))
    }

    fn put_weights(&mut self, version: u64) {
        if let Some(sim) = &mut self.sim {
            sim.set_checkpoint(version);
            sim.set_weight_version(&weight_version(version));
        }
    }
}

fn config(profile: Profile) -> SimConfig {
    let named = |names: &[&str]| match profile {
        Profile::Named => names.iter().map(|name| (*name).to_owned()).collect(),
        _ => Vec::new(),
    };
    SimConfig {
        gpu_blocks: GPU_BLOCKS,
        cpu_blocks: TIER_BLOCKS as usize,
        max_model_len: MODEL_LEN_MAX as usize,
        decode_step: STEP,
        profile: match profile {
            Profile::KeepTier | Profile::KeepTierBundle => fak_sim::Profile::KeepTier,
            _ => fak_sim::Profile::V0_32,
        },
        connector: match profile {
            Profile::Plain | Profile::Named | Profile::Speculating => Connector::None,
            Profile::Offload | Profile::KeepTier | Profile::Chunked | Profile::ChunkedDescribed => {
                Connector::Offloading
            }
            Profile::KeepTierBundle => Connector::Multi,
        },
        blocks_per_chunk: match profile {
            Profile::Chunked | Profile::ChunkedDescribed => BLOCKS_PER_CHUNK as usize,
            _ => 1,
        },
        self_describing_events: profile == Profile::ChunkedDescribed,
        is_speculative: profile == Profile::Speculating,
        also_named: named(&[SECOND_NAME]),
        loras: named(&ADAPTERS),
        ..SimConfig::default()
    }
}
