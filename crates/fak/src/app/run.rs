//! `fak run`: a trace's calls, one after the other, each claimed, sent, streamed and audited.
//!
//! Invariant: a denied call reaches no engine, and a claim is made before its call is sent.

use std::fs::File;
use std::io::{Read as _, Write};
use std::path::Path;
use std::pin::Pin;

use anyhow::{Context as _, anyhow, bail};
use fak_kernel::floor::{Decision, Floor, Rules};
use fak_sim::{Binds, Sim, SimConfig};
use fak_wire::openai::{Api, CachedTokens, Request};
use http::HeaderMap;
use serde::Deserialize;

use super::Error;
use super::claims::Claims;
use crate::cli::report::{self, Policy, Printer, Report, Status, Summary, Verdict};
use crate::cli::trace::{Call, Endpoint, TRACE_BYTES_MAX, Trace};
use crate::cli::{EngineKind, Exit, RunArgs};
use crate::config::{self, Worker, names};
use crate::engine::{
    Admitted, Capabilities, Client, Engine, Event, Identity, Isolation, Learnt, Stamp, Timeouts,
    Turn,
};

/// Most text that is kept of one call, in bytes. An engine that goes on is cut off.
const TEXT_BYTES_MAX: usize = 16 << 20;

/// Who vouches for the tenants of a trace.
const AUTHORITY: &str = "trace";

/// Pace of the simulated engine, so that its streams can be seen to come.
const SIM_STEP_MS: u64 = 2;

/// Runs a trace.
pub(super) async fn run(args: &RunArgs) -> Result<Exit, Error> {
    let trace = read(&args.trace).and_then(|bytes| Ok(Trace::parse(&bytes)?));
    let trace = trace.with_context(|| args.trace.display().to_string()).map_err(Error::usage)?;
    let (floor, policy) = floor(args, &trace).map_err(Error::usage)?;
    let (worker, sim) = worker(args.engine).await?;
    let client = Client::new(worker.api_key.as_ref(), Timeouts::default()).map_err(Error::usage)?;
    let engine = Engine::new(client, worker.endpoints.clone());
    let capabilities = engine.capabilities().await;
    let model = model(&worker, &capabilities)?;
    let metrics = engine.scrape().await.unwrap_or_default();
    let claims = Claims::start((&worker, &engine), &capabilities, &metrics).await?;
    say(format_args!(
        "fak run: engine {} {}, worker {}, model {model}",
        args.engine.as_str(),
        capabilities.version.told().map_or("of unknown version", String::as_str),
        worker.id
    ));
    let has_tenant = trace.calls.iter().any(|call| call.tenant.is_some());
    let isolation = if has_tenant { Isolation::On } else { Isolation::Off };
    let mut run = Run {
        stamp: Stamp::new(worker.salt_key.clone(), isolation, worker.priority_scheduling),
        engine,
        model,
        floor,
        claims,
        printer: Printer::new(std::io::stdout(), args.json),
    };
    let calls = run.calls(trace.calls).await.map_err(Error::failed)?;
    let summary = Summary::of(&calls, policy, run.claims.stop().await);
    let report = Report { engine: args.engine.as_str(), worker: worker.id, calls, summary };
    run.printer.summary(&report).map_err(Error::failed)?;
    if let Some(sim) = sim {
        sim.stop().await;
    }
    Ok(exit(&report.summary))
}

fn exit(summary: &Summary) -> Exit {
    if summary.failed > 0 {
        Exit::Failed
    } else if summary.calls > 0 && summary.denied == summary.calls {
        Exit::Refused
    } else {
        Exit::Done
    }
}

/// What a run holds from call to call.
struct Run<W> {
    engine: Engine,
    stamp: Stamp,
    model: String,
    floor: Floor,
    claims: Claims,
    printer: Printer<W>,
}

impl<W: Write> Run<W> {
    /// Runs all calls; after Ctrl-C no further one.
    async fn calls(&mut self, calls: Vec<Call>) -> anyhow::Result<Vec<report::Call>> {
        let mut interrupt = std::pin::pin!(tokio::signal::ctrl_c());
        let mut done = Vec::with_capacity(calls.len());
        for (index, call) in calls.into_iter().enumerate() {
            let report = self.one(index, call, interrupt.as_mut()).await?;
            let is_over = report.status == Status::Cancelled;
            done.push(report);
            if is_over {
                break;
            }
        }
        Ok(done)
    }

    async fn one(
        &mut self,
        index: usize,
        call: Call,
        interrupt: Pin<&mut impl Future<Output = std::io::Result<()>>>,
    ) -> anyhow::Result<report::Call> {
        let mut report = report::Call::new(index, call.tool.clone());
        if let Decision::Deny(reason) = self.floor.decide(&call.tool) {
            (report.verdict, report.status) = (Verdict::Deny, Status::Denied);
            report.reason = Some(reason.to_string());
        }
        self.printer.call(index, &call.tool, report.verdict)?;
        if report.verdict == Verdict::Allow {
            tokio::select! {
                sent = self.send(call, &mut report) => sent?,
                _ = interrupt => report.status = Status::Cancelled,
            }
        }
        self.printer.done(&report)?;
        Ok(report)
    }

    /// Sends one call and follows it to its end. Errors are those of the output; the call's own are
    /// in its report. Dropping this closes the connection, and the engine stops.
    async fn send(&mut self, call: Call, report: &mut report::Call) -> anyhow::Result<()> {
        let admitted = match self.admit(call) {
            Ok(admitted) => admitted,
            Err(error) => return failed(report, &error),
        };
        let prompt = self.claims.prompt(&self.engine, &admitted).await;
        report.claimed_tokens = prompt.as_ref().and_then(|prompt| self.claims.held(prompt));
        match admitted.stream().await {
            Ok(stream) => self.follow(stream, report).await?,
            Err(error) => return failed(report, &error.into()),
        }
        if let Some(prompt) = &prompt {
            self.claims.announced(prompt).await;
        }
        Ok(())
    }

    fn admit(&self, call: Call) -> anyhow::Result<Admitted> {
        let api = match call.endpoint {
            Endpoint::Chat => Api::Chat,
            Endpoint::Completions => Api::Completions,
        };
        let mut request = Request::parse(api, &serde_json::to_vec(&call.body)?)?;
        let family = match request.model()? {
            Some(model) => model,
            None => {
                request.set_model(&self.model);
                self.model.clone()
            }
        };
        let authority = AUTHORITY.to_owned();
        let identity = call.tenant.map(|tenant| Identity { tenant, authority, family });
        let turn = Turn { request, headers: HeaderMap::new(), identity, priority: call.priority };
        Ok(self.engine.admit(turn, &self.stamp)?)
    }

    async fn follow(
        &mut self,
        mut stream: crate::engine::TurnStream,
        report: &mut report::Call,
    ) -> anyhow::Result<()> {
        while let Some(event) = stream.step().await {
            match event {
                Event::FirstToken { after } => {
                    report.ttft_ms = Some(after.as_secs_f64() * 1000.0);
                }
                // Further choices would be interleaved with the first; it speaks for the call.
                Event::Text { choice: 0, text } => {
                    self.printer.text(&text)?;
                    report.text.push_str(&text);
                    if report.text.len() > TEXT_BYTES_MAX {
                        return failed(report, &anyhow!("over {TEXT_BYTES_MAX} bytes of text"));
                    }
                }
                Event::Finish { choice: 0, reason } => report.finish_reason = Some(reason),
                Event::Usage(usage) => {
                    report.prompt_tokens = Some(usage.prompt_tokens);
                    report.output_tokens = Some(usage.completion_tokens);
                    report.cached_tokens = match usage.cached_tokens {
                        CachedTokens::Known(tokens) => Some(tokens),
                        CachedTokens::NotReported => None,
                    };
                }
                Event::End(end) if !end.is_complete() => return failed(report, &anyhow!("{end}")),
                Event::Text { .. }
                | Event::Finish { .. }
                | Event::Reasoning { .. }
                | Event::End(_) => {}
            }
        }
        Ok(())
    }
}

/// Notes a call's own error.
#[expect(clippy::unnecessary_wraps, reason = "a call that failed does not end the run")]
fn failed(report: &mut report::Call, error: &anyhow::Error) -> anyhow::Result<()> {
    report.status = Status::Error;
    report.error = Some(crate::telemetry::error_chain(error.as_ref()));
    Ok(())
}

fn read(path: &Path) -> anyhow::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(TRACE_BYTES_MAX + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > TRACE_BYTES_MAX {
        bail!("larger than {TRACE_BYTES_MAX} bytes");
    }
    Ok(bytes)
}

/// A floor as its file has it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FloorFile {
    #[serde(default)]
    allow: Vec<String>,
    #[serde(default)]
    allow_prefix: Vec<String>,
    #[serde(default)]
    deny: serde_json::Map<String, serde_json::Value>,
}

fn floor(args: &RunArgs, trace: &Trace) -> anyhow::Result<(Floor, Policy)> {
    if let Some(path) = &args.policy {
        let floor = read(path).and_then(|bytes| checked(serde_json::from_slice(&bytes)?));
        return Ok((floor.with_context(|| path.display().to_string())?, Policy::File));
    }
    match &trace.policy {
        Some(policy) => {
            let floor = checked(policy.clone());
            let place = || format!("{}: policy", args.trace.display());
            Ok((floor.with_context(place)?, Policy::Trace))
        }
        None => Ok((Floor::allow_all(), Policy::None)),
    }
}

fn checked(mut file: serde_json::Value) -> anyhow::Result<Floor> {
    // Keys that start with `_` are notes, as in a trace.
    if let Some(fields) = file.as_object_mut() {
        fields.retain(|key, _| !key.starts_with('_'));
    }
    let FloorFile { allow, allow_prefix, deny } = serde_json::from_value(file)?;
    let deny = deny.into_iter().map(|(tool, reason)| match reason {
        serde_json::Value::String(reason) => Ok((tool, reason)),
        _ => bail!("deny: the reason of {tool:?} is not a text"),
    });
    let deny = deny.collect::<anyhow::Result<_>>()?;
    Ok(Floor::new(Rules { allow, allow_prefix, deny })?)
}

/// The worker to run against; a simulated one is started here and then treated like any other.
async fn worker(kind: EngineKind) -> Result<(Worker, Option<Sim>), Error> {
    match kind {
        EngineKind::Vllm => {
            let worker = Worker::from_environment(&config::process_environment);
            Ok((worker.map_err(Error::usage)?, None))
        }
        EngineKind::Sim => {
            let decode_step = std::time::Duration::from_millis(SIM_STEP_MS);
            let config = SimConfig { decode_step, ..SimConfig::default() };
            let sim = Sim::start(config, Binds::default()).await.map_err(Error::failed)?;
            // The other variables describe the real engine, not this one.
            let lookup = |name: &str| {
                let is_shared = [names::WORKER_ID, names::SALT_KEY].contains(&name);
                is_shared.then(|| config::process_environment(name)).flatten()
            };
            let worker = Worker::at(&sim.base_url(), &lookup).map_err(Error::usage)?;
            Ok((worker, Some(sim)))
        }
    }
}

/// The model that was named, else the only one that is served.
fn model(worker: &Worker, capabilities: &Capabilities) -> Result<String, Error> {
    if let Some(model) = &worker.model {
        return Ok(model.clone());
    }
    let models = match &capabilities.models {
        Learnt::Told { value, .. } => value,
        Learnt::Unknown { why } => {
            let (at, name) = (worker.endpoints.origin(), names::BASE_URL);
            let problem = anyhow!("the engine at {at} ({name}) does not say what it serves: {why}");
            return Err(Error::failed(problem));
        }
    };
    let served: Vec<_> =
        models.iter().filter(|model| model.parent.is_none()).map(|model| &model.id).collect();
    match served[..] {
        [only] => Ok(only.to_string()),
        _ => Err(Error::usage(anyhow!(
            "{} is not set; it has to be one of {served:?}",
            names::MODEL
        ))),
    }
}

/// Talks to whoever watches. If stderr is gone, nobody does.
fn say(text: std::fmt::Arguments<'_>) {
    let _ = writeln!(std::io::stderr(), "{text}");
}
