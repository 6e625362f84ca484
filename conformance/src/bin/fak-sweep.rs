//! The field sweep: every field that an engine's requests may have, on a warm prompt, through
//! `fak serve`; no claim may be above what the engine reuses.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;
use fak_conformance::fak;
use fak_conformance::sweep::{self, Extent};
use fak_conformance::target::{Kind, Simulated, Vllm};

/// Sends every field of the engine's own request schemas on a warm prompt, and holds each claim
/// against what the engine reused
#[derive(Debug, Parser)]
struct Options {
    /// The engine behind fak
    #[arg(long, value_enum, default_value_t = Kind::Vllm)]
    engine: Kind,
    /// Every field by itself, and no pairs of the suspicious ones
    #[arg(long)]
    quick: bool,
    /// A built fak; without it, one is built
    #[arg(long, value_name = "PATH")]
    fak: Option<PathBuf>,
}

fn main() -> anyhow::Result<ExitCode> {
    let options = Options::parse();
    let binary = fak::built(options.fak)?;
    let started = Instant::now();
    let extent = if options.quick { Extent::Singles } else { Extent::Whole };
    // One thread: the engine is told to die with the thread that started it.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let tally = runtime.block_on(async {
        let out = Box::new(std::io::stdout());
        match options.engine {
            Kind::Vllm => sweep::run(Vllm::default(), &binary, extent, out).await,
            Kind::Sim => sweep::run(Simulated::default(), &binary, extent, out).await,
        }
    })?;
    writeln!(std::io::stdout(), "{tally}, {} s", started.elapsed().as_secs())?;
    Ok(if tally.holds() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
