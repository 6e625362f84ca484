//! A simulated server for a command line: flags in, a served process out.

use std::future::Future;
use std::net::SocketAddr;
use std::time::Duration;

use crate::core::connector::Connector;
use crate::faults::{RouteFault, StreamCut};
use crate::profile::Profile;
use crate::sim::{Binds, Sim, SimConfig, StartError};

/// Flags of `fak sim`, already parsed into types.
#[derive(Clone, Debug)]
pub struct Args {
    /// `--listen`: HTTP address.
    pub listen: SocketAddr,
    /// `--kv-events`: address of the event socket; rank 1 takes the next port.
    pub kv_events: SocketAddr,
    /// `--replay`: address of the replay socket; rank 1 takes the next port.
    pub replay: SocketAddr,
    /// `--profile`: engine version.
    pub profile: Profile,
    /// `--connector`.
    pub connector: Connector,
    /// `--model`: served name; the event topic is `kv@` and this.
    pub model: String,
    /// `--block-size`: tokens a block.
    pub block_size: usize,
    /// `--gpu-blocks`: device blocks a rank.
    pub gpu_blocks: u32,
    /// `--cpu-blocks`: host tier blocks a rank.
    pub cpu_blocks: usize,
    /// `--dp`: data-parallel ranks, 1 or 2.
    pub dp: u32,
    /// `--decode-ms`: milliseconds a step; 0 is as fast as possible.
    pub decode_ms: u64,
    /// `--fault`, each: see [`Fault`].
    pub faults: Vec<Fault>,
}

impl Default for Args {
    /// vLLM's default ports, a step of 5 ms.
    fn default() -> Self {
        let at = |port| SocketAddr::from(([127, 0, 0, 1], port));
        let config = SimConfig::default();
        Self {
            listen: at(8000),
            kv_events: at(5557),
            replay: at(5558),
            profile: config.profile,
            connector: config.connector,
            model: config.model,
            block_size: config.block_size,
            gpu_blocks: config.gpu_blocks,
            cpu_blocks: config.cpu_blocks,
            dp: config.dp_ranks,
            decode_ms: 5,
            faults: Vec::new(),
        }
    }
}

/// A fault named on the command line: `NAME` or `NAME=VALUE`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// `hang=/PATH`: the route never answers.
    Hang(String),
    /// `fail=/PATH`: the route answers 500 and does nothing.
    Fail(String),
    /// `half=/PATH`: the route does its work and answers 500.
    Half(String),
    /// `cut-stream=N`: streams end after N events, in the middle of the next.
    CutStream(usize),
    /// `drop-batches=N`: the first N batches are not sent, though replayed.
    DropBatches(usize),
    /// `lose-batches=N`: the first N batches are lost, from replay too.
    LoseBatches(usize),
    /// `repeat-batches=N`: the first N batches are sent twice.
    RepeatBatches(usize),
    /// `events-off`: nothing is published.
    EventsOff,
    /// `replay-without-end`: replays lack their end marker.
    ReplayWithoutEnd,
    /// `always-awake`: `/is_sleeping` says false, whatever is true.
    AlwaysAwake,
}

impl std::str::FromStr for Fault {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, value) = text.split_once('=').unwrap_or((text, ""));
        let count =
            || value.parse().map_err(|_| format!("fault {name:?} needs a count, got {value:?}"));
        let path = || match value.starts_with('/') {
            true => Ok(value.to_owned()),
            false => Err(format!("fault {name:?} needs a path, got {value:?}")),
        };
        Ok(match name {
            "hang" => Self::Hang(path()?),
            "fail" => Self::Fail(path()?),
            "half" => Self::Half(path()?),
            "cut-stream" => Self::CutStream(count()?),
            "drop-batches" => Self::DropBatches(count()?),
            "lose-batches" => Self::LoseBatches(count()?),
            "repeat-batches" => Self::RepeatBatches(count()?),
            "events-off" => Self::EventsOff,
            "replay-without-end" => Self::ReplayWithoutEnd,
            "always-awake" => Self::AlwaysAwake,
            _ => return Err(format!("unknown fault {name:?}")),
        })
    }
}

fn apply(sim: &Sim, fault: &Fault) {
    let faults = sim.faults();
    let always = usize::MAX;
    match fault {
        Fault::Hang(path) => faults.route(path, RouteFault::Hang, always),
        Fault::Fail(path) => faults.route(path, RouteFault::Fail(500), always),
        Fault::Half(path) => faults.route(path, RouteFault::FailAfter(500), always),
        Fault::CutStream(after_events) => {
            let cut = StreamCut { after_events: *after_events, mid_line: true };
            faults.cut_streams(cut, always);
        }
        Fault::DropBatches(count) => faults.drop_batches(*count),
        Fault::LoseBatches(count) => faults.lose_batches(*count),
        Fault::RepeatBatches(count) => faults.repeat_batches(*count),
        Fault::EventsOff => faults.events_off(true),
        Fault::ReplayWithoutEnd => faults.replay_without_end(true),
        Fault::AlwaysAwake => faults.lie_about_sleeping(Some(false)),
    }
}

/// Serves until `stop` is done. `ready` is called with the running server, which tells its
/// addresses.
///
/// # Errors
///
/// The configuration makes no sense, or an address cannot be bound.
pub async fn serve(
    args: Args,
    ready: impl FnOnce(&Sim),
    stop: impl Future<Output = ()>,
) -> Result<(), StartError> {
    let config = SimConfig {
        topic: format!("kv@{}", args.model),
        model: args.model,
        block_size: args.block_size,
        gpu_blocks: args.gpu_blocks,
        cpu_blocks: args.cpu_blocks,
        profile: args.profile,
        connector: args.connector,
        dp_ranks: args.dp,
        decode_step: Duration::from_millis(args.decode_ms),
        ..SimConfig::default()
    };
    let binds = Binds { http: args.listen, kv_events: args.kv_events, replay: args.replay };
    let sim = Sim::start(config, binds).await?;
    args.faults.iter().for_each(|fault| apply(&sim, fault));
    ready(&sim);
    stop.await;
    sim.stop().await;
    Ok(())
}
