//! `fak serve` in front of a real engine: a line for each thing that has to hold, and the counts.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Parser;
use fak_conformance::bridge::{Bridge, Checks};
use fak_conformance::fak;
use fak_conformance::scenario::Profile;
use fak_conformance::target::{Kind, Simulated, Target, Vllm};

/// Puts an engine to sleep, resets and restarts it, and checks what fak makes of it
#[derive(Debug, Parser)]
struct Options {
    /// The engine behind fak
    #[arg(long, value_enum, default_value_t = Kind::Vllm)]
    engine: Kind,
    /// A built fak; without it, one is built
    #[arg(long, value_name = "PATH")]
    fak: Option<PathBuf>,
}

fn main() -> anyhow::Result<ExitCode> {
    let options = Options::parse();
    let binary = fak::built(options.fak)?;
    // One thread: the engine is told to die with the thread that started it.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (mut passed, mut failed) = (0, 0);
    for profile in [Profile::Offload, Profile::KeepTier] {
        let checks = runtime.block_on(async {
            match options.engine {
                Kind::Vllm => play(Vllm::default(), profile, &binary).await,
                Kind::Sim => play(Simulated::default(), profile, &binary).await,
            }
        })?;
        passed += checks.passed();
        failed += checks.failures().len();
    }
    writeln!(std::io::stdout(), "bridge: {passed} checks hold, {failed} do not")?;
    Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

async fn play<T: Target>(engine: T, profile: Profile, binary: &Path) -> anyhow::Result<Checks> {
    let out = Box::new(std::io::stdout());
    Bridge::start(engine, profile, binary, out).await?.run().await
}
