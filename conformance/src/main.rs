//! Runs the scenarios and says where the simulator and the engine differ.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::{Args, Parser, ValueEnum};
use fak_conformance::recording;
use fak_conformance::run::run;
use fak_conformance::scenario::{self, Profile, Scenario};
use fak_conformance::session::Session;
use fak_conformance::target::{Endpoints, Running, Simulated, Target, Vllm};
use fak_conformance::transcript::{Transcript, difference};

/// Runs every scenario against the simulator and a real vLLM and compares what they did
#[derive(Debug, Parser)]
struct Options {
    /// Only scenarios whose name contains this; may be given again
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,
    /// What to run; a side that does not run is replaced by the recordings
    #[arg(long, value_enum, default_value_t = Engine::Both)]
    engine: Engine,
    /// Write the engine's transcripts into this folder
    #[arg(long, value_name = "DIR")]
    record: Option<PathBuf>,
    #[command(flatten)]
    running: RunningArgs,
}

/// An engine that runs already, with 40 blocks and a model length of 1,024
#[derive(Debug, Args)]
struct RunningArgs {
    /// Use the engine at this address; scenarios of its profile only, and none that restarts
    #[arg(long, requires_all = ["profile", "kv_events", "replay"])]
    url: Option<String>,
    /// How that engine is configured
    #[arg(long, value_enum)]
    profile: Option<Profile>,
    /// Its KV events
    #[arg(long)]
    kv_events: Option<String>,
    /// Its replay socket
    #[arg(long)]
    replay: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Engine {
    Vllm,
    Sim,
    Both,
}

fn main() -> anyhow::Result<ExitCode> {
    let options = Options::parse();
    // One thread: the engine is told to die with the thread that started it.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(compare_all(&options))
}

async fn compare_all(options: &Options) -> anyhow::Result<ExitCode> {
    let started = Instant::now();
    let mut scenarios = scenario::load(&folder("scenarios"))?;
    let only = &options.only;
    scenarios.retain(|one| only.is_empty() || only.iter().any(|name| one.name.contains(name)));
    let mut report = Report::new(options);
    match options.running.endpoints()? {
        Some((endpoints, profile)) => {
            scenarios.retain(|one| one.engine == profile && !one.restarts());
            report.run(&scenarios, || Running::new(endpoints.clone())).await?;
        }
        None => report.run(&scenarios, Vllm::default).await?,
    }
    report.conclude(started.elapsed())
}

impl RunningArgs {
    fn endpoints(&self) -> anyhow::Result<Option<(Endpoints, Profile)>> {
        let Some(url) = &self.url else { return Ok(None) };
        let endpoints = Endpoints {
            base_url: url.trim_end_matches('/').to_owned(),
            kv_events: self.kv_events.clone().context("no address of its KV events")?,
            replay: self.replay.clone().context("no address of its replay socket")?,
        };
        Ok(Some((endpoints, self.profile.context("no profile")?)))
    }
}

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

/// What was compared so far, and where it goes.
struct Report<'a> {
    options: &'a Options,
    out: std::io::Stdout,
    scenarios: usize,
    events: usize,
    entries: usize,
    differences: usize,
}

impl<'a> Report<'a> {
    fn new(options: &'a Options) -> Self {
        let out = std::io::stdout();
        Report { options, out, scenarios: 0, events: 0, entries: 0, differences: 0 }
    }

    async fn run<E: Target>(
        &mut self,
        scenarios: &[Scenario],
        engine: impl Fn() -> E,
    ) -> anyhow::Result<()> {
        for group in scenarios.chunk_by(|a, b| a.engine == b.engine) {
            let profile = group[0].engine;
            let mut vllm = match self.options.engine {
                Engine::Sim => None,
                Engine::Vllm | Engine::Both => Some(Session::start(engine(), profile).await?),
            };
            let mut sim = match self.options.engine {
                Engine::Vllm => None,
                Engine::Sim | Engine::Both => {
                    Some(Session::start(Simulated::default(), profile).await?)
                }
            };
            for scenario in group {
                self.scenario(scenario, vllm.as_mut(), sim.as_mut()).await?;
            }
        }
        Ok(())
    }

    async fn scenario<E: Target>(
        &mut self,
        scenario: &Scenario,
        vllm: Option<&mut Session<E>>,
        sim: Option<&mut Session<Simulated>>,
    ) -> anyhow::Result<()> {
        let started = Instant::now();
        let mut failed = false;
        let mut sides = Vec::new();
        if let Some(session) = vllm {
            let outcome = run(session, scenario).await;
            failed |= outcome.failed;
            self.record(scenario, &outcome.transcript)?;
            sides.push(outcome.transcript);
        }
        if let Some(session) = sim {
            let outcome = run(session, scenario).await;
            failed |= outcome.failed;
            sides.push(outcome.transcript);
        }
        if sides.len() < 2 && self.options.record.is_none() {
            sides.insert(0, recording::read(&folder("recorded/0.32.0"), &scenario.name)?);
        }
        self.tell(scenario, &sides, failed, started.elapsed())
    }

    fn record(&self, scenario: &Scenario, transcript: &Transcript) -> anyhow::Result<()> {
        match &self.options.record {
            Some(folder) => recording::write(folder, &scenario.name, transcript),
            None => Ok(()),
        }
    }

    fn tell(
        &mut self,
        scenario: &Scenario,
        sides: &[Transcript],
        failed: bool,
        took: Duration,
    ) -> anyhow::Result<()> {
        let (first, last) = (&sides[0], &sides[sides.len() - 1]);
        self.scenarios += 1;
        self.events += first.events;
        self.entries += first.lines.len();
        let mut verdict = "same";
        let mut text = String::new();
        if let Some((count, difference)) = difference(first, last) {
            self.differences += count;
            (verdict, text) = ("DIFF", difference);
        } else if failed {
            self.differences += 1;
            (verdict, text) = ("FAIL", format!("      {}\n", first.lines.last().map_or("", |l| l)));
        }
        writeln!(
            self.out,
            "{verdict} {:24} {:4} entries {:4} events {:6.2} s",
            scenario.name,
            first.lines.len(),
            first.events,
            took.as_secs_f64()
        )?;
        self.out.write_all(text.as_bytes())?;
        Ok(())
    }

    fn conclude(mut self, took: Duration) -> anyhow::Result<ExitCode> {
        writeln!(
            self.out,
            "conformance: {} scenarios, {} events compared, {} transcript entries, {} differences, \
             {} s",
            self.scenarios,
            self.events,
            self.entries,
            self.differences,
            took.as_secs()
        )?;
        Ok(if self.differences == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}
