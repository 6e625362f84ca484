//! The false-warm hunt, on simulated engines or on a real one.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use fak_conformance::fak;
use fak_conformance::hunt::{Hunt, simulated};
use fak_conformance::scenario::Profile;
use fak_conformance::target::{Kind, Vllm};

/// Does everything that can be done to engines behind `fak serve`, and holds each claim against
/// what the engine reused
#[derive(Debug, Parser)]
struct Options {
    /// The engines behind fak
    #[arg(long, value_enum, default_value_t = Kind::Sim)]
    engine: Kind,
    /// Requests and actions, at least
    #[arg(long, default_value_t = 20_000)]
    steps: usize,
    /// Runs the same choices again; without it, one is drawn and printed
    #[arg(long, env = "FAK_SEED")]
    seed: Option<u64>,
    /// Turns in a hundred in which something happens besides requests
    #[arg(long, default_value_t = 22, value_parser = clap::value_parser!(u32).range(0..=100))]
    accidents: u32,
    /// Fails where less than this share of what events told is claimed: from 0 to 1
    #[arg(long, value_name = "SHARE", default_value_t = 0.0)]
    told: f64,
    /// Gateways at once, on simulated engines
    #[arg(long, default_value_t = 4)]
    lanes: usize,
    /// The real engine understands `clear_connector_cache`, by the plugin; simulated ones do so in
    /// turn
    #[arg(long)]
    keep_tier: bool,
    /// Sends requests while actions are done, too
    #[arg(long)]
    traffic: bool,
    /// Tells each turn on stderr, with its time
    #[arg(long)]
    tell: bool,
    /// A built fak; without it, one is built
    #[arg(long, value_name = "PATH")]
    fak: Option<PathBuf>,
}

fn main() -> anyhow::Result<ExitCode> {
    let options = Options::parse();
    let binary = fak::built(options.fak)?;
    let seed = options.seed.unwrap_or_else(|| fastrand::u64(..));
    let mut out = std::io::stdout();
    writeln!(out, "seed {seed}: FAK_SEED={seed} makes the same choices")?;
    let started = std::time::Instant::now();
    let (tells, has_traffic, accidents) = (options.tell, options.traffic, options.accidents);
    let tally = match options.engine {
        Kind::Sim => {
            let hunt = Hunt::simulated(seed, options.steps);
            let hunt = Hunt { tells, has_traffic, accidents, ..hunt };
            hunt.run(&binary, options.lanes, simulated)?
        }
        Kind::Vllm => {
            let keeps = if options.keep_tier { Profile::KeepTier } else { Profile::Offload };
            let hunt = Hunt::real(seed, options.steps);
            let hunt = Hunt { tells, has_traffic, accidents, ..hunt };
            hunt.run(&binary, 1, |_| (Vllm::default(), keeps))?
        }
    };
    writeln!(out, "{tally}, {} s", started.elapsed().as_secs())?;
    if tally.told_ratio() < options.told {
        writeln!(out, "FAIL less than {} of what was told is claimed", options.told)?;
        return Ok(ExitCode::FAILURE);
    }
    Ok(if tally.failures.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
