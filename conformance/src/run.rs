//! Runs a scenario on a session and writes down what happens.
//! Invariant: nothing is written down that depends on when it was looked at.

use std::collections::BTreeMap;

use anyhow::{Context, bail, ensure};
use hyper::body::Bytes;
use serde_json::{Value, json};

use crate::client::{Answer, Call, Request};
use crate::events::{Batch, replay};
use crate::names::Names;
use crate::normal::{self, Unknowns};
use crate::scenario::{Await, Complete, Events, Http, Metrics, Replay, Scenario, Step};
use crate::session::{DEADLINE, Session, count, field, post, until};
use crate::target::Target;
use crate::transcript::Transcript;

/// Runs `scenario` from a clean state. A step that fails ends it, with the reason as its last line.
pub async fn run<T: Target>(session: &mut Session<T>, scenario: &Scenario) -> Outcome {
    let mut run = Run {
        session,
        names: Names::default(),
        calls: BTreeMap::new(),
        transcript: Transcript::default(),
    };
    let failure = run.steps(&scenario.steps).await.err();
    if let Some(error) = &failure {
        run.transcript.saw(format!("failed: {error:#}"));
    }
    Outcome { transcript: run.transcript, failed: failure.is_some() }
}

/// What came of a scenario.
#[derive(Debug)]
pub struct Outcome {
    /// As far as it came.
    pub transcript: Transcript,
    /// Whether it stopped before its end.
    pub failed: bool,
}

struct Run<'a, T> {
    session: &'a mut Session<T>,
    names: Names,
    calls: BTreeMap<String, (Call, Unknowns)>,
    transcript: Transcript,
}

impl<T: Target> Run<'_, T> {
    async fn steps(&mut self, steps: &[Step]) -> anyhow::Result<()> {
        self.session.clean().await.context("no clean start")?;
        for (index, step) in steps.iter().enumerate() {
            self.step(index + 1, step).await?;
        }
        ensure!(self.calls.is_empty(), "{:?} not finished", self.calls.keys());
        Ok(())
    }

    async fn step(&mut self, number: usize, step: &Step) -> anyhow::Result<()> {
        self.transcript.step(number, &heading(step));
        match step {
            Step::Complete(step) => {
                self.names.learn(&step.prompt);
                let request = completion(step);
                match &step.pick {
                    Some(pointer) => self.pick(&request, pointer).await,
                    None => self.call(request, step.name.as_deref(), Unknowns::default()).await,
                }
            }
            Step::Http(step) => {
                let unknowns = Unknowns { prompt_tokens: has_text(step), ..Unknowns::default() };
                match &step.pick {
                    Some(pointer) => self.pick(&request(step)?, pointer).await,
                    None => self.call(request(step)?, step.name.as_deref(), unknowns).await,
                }
            }
            Step::Await(condition) => self.wait(condition).await,
            Step::Close(name) => self.close(name),
            Step::Finish(name) => {
                let (call, unknowns) = self.take(name)?;
                let answer = call.finish(DEADLINE).await?;
                self.saw_answer(&answer, unknowns);
                Ok(())
            }
            Step::Events(how) => self.events(how).await,
            Step::Metrics(which) => self.metrics(which).await,
            Step::State(_) => self.state().await,
            Step::Restart(_) => self.restart().await,
            Step::Replay(from) => self.replay(from).await,
        }
    }

    async fn call(
        &mut self,
        request: Request,
        name: Option<&str>,
        unknowns: Unknowns,
    ) -> anyhow::Result<()> {
        let Some(name) = name else {
            let answer = self.session.client.call(&request, DEADLINE).await?;
            self.saw_answer(&answer, unknowns);
            return Ok(());
        };
        let call = self.session.client.start(&request)?;
        let replaced = self.calls.insert(name.to_owned(), (call, unknowns));
        ensure!(replaced.is_none(), "two calls named {name}");
        Ok(())
    }

    async fn pick(&mut self, request: &Request, pointer: &str) -> anyhow::Result<()> {
        let answer = self.session.client.call(request, DEADLINE).await?;
        let body: Value = serde_json::from_slice(&answer.body)?;
        let part = body.pointer(pointer).map_or("absent".to_owned(), Value::to_string);
        self.transcript.saw(format!("{} {part}", answer.status));
        Ok(())
    }

    fn saw_answer(&mut self, answer: &Answer, unknowns: Unknowns) {
        for line in normal::answer(answer, unknowns) {
            self.transcript.saw(line);
        }
    }

    fn take(&mut self, name: &str) -> anyhow::Result<(Call, Unknowns)> {
        self.calls.remove(name).with_context(|| format!("no call named {name}"))
    }

    fn close(&mut self, name: &str) -> anyhow::Result<()> {
        let (call, unknowns) = self.take(name)?;
        let mut answer = call.so_far();
        // A chunk that was still arriving was not received.
        let whole = answer.body.windows(2).rposition(|pair| pair == b"\n\n").map_or(0, |n| n + 2);
        answer.body.truncate(whole);
        self.saw_answer(&answer, unknowns);
        Ok(())
    }

    async fn wait(&mut self, condition: &Await) -> anyhow::Result<()> {
        let session = &*self.session;
        match condition {
            Await::Headers(name) => {
                let (call, _) = self.calls.get_mut(name).context("no such call")?;
                call.until(|answer| answer.status != 0, DEADLINE).await
            }
            Await::Chunks { of, count } => {
                let (call, _) = self.calls.get_mut(of).context("no such call")?;
                call.until(|answer| answer.chunks() >= *count, DEADLINE).await
            }
            Await::Metric { name, is } => {
                until(name, async || {
                    let now = session.metrics().await?;
                    Ok(now.get(name, &session.start) == Some(*is))
                })
                .await
            }
            Await::Blocks { event, medium, count } => {
                events_heard(session, event, Some(medium), *count).await
            }
            Await::Cleared(count) => events_heard(session, "AllBlocksCleared", None, *count).await,
            Await::Answer { path, field: name, is } => {
                let request =
                    Request { method: "GET".into(), path: path.clone(), ..Request::default() };
                until(path, async || {
                    let answer = session.client.call(&request, DEADLINE).await?;
                    Ok(field(&answer, name).as_ref() == Some(is))
                })
                .await
            }
        }
    }

    async fn events(&mut self, how: &Events) -> anyhow::Result<()> {
        let batches = self.session.events().await?;
        let mut lines = Vec::new();
        let mut number = 0;
        for batch in batches {
            ensure!(batch.topic == "kv@tiny", "topic {:?}", batch.topic);
            let named: Vec<_> =
                batch.events()?.iter().map(|event| self.names.line(event)).collect();
            let kept = named.into_iter().filter(|l| how.ungenerated.is_none() || !l.is_generated);
            let kept: Vec<_> = kept.map(|line| line.text).collect();
            number += usize::from(!kept.is_empty());
            let prefix = match how {
                Events { unordered: None, unbatched: None, .. } => format!("batch {number}: "),
                _ => String::new(),
            };
            lines.extend(stores_of_a_tier_sorted(kept).iter().map(|line| prefix.clone() + line));
        }
        if how.unordered.is_some() {
            lines.sort();
        }
        if lines.is_empty() {
            self.transcript.saw("none");
        }
        for line in lines {
            self.transcript.saw_event(&line);
        }
        Ok(())
    }

    async fn metrics(&mut self, which: &Metrics) -> anyhow::Result<()> {
        let session = &*self.session;
        let names: Vec<_> = which.until.iter().map(|(n, v)| format!("{n} = {v}")).collect();
        let mut now = session.metrics().await?;
        until(&names.join(", "), async || {
            let has = |(name, is): (&String, &f64)| now.get(name, &session.start) == Some(*is);
            let all = which.until.iter().all(has);
            if !all {
                now = session.metrics().await?;
            }
            Ok(all)
        })
        .await?;
        for line in now.lines(&session.start) {
            let name = line.split(' ').next().unwrap_or_default();
            if !which.without.contains_key(name) {
                self.transcript.saw(line);
            }
        }
        Ok(())
    }

    async fn state(&mut self) -> anyhow::Result<()> {
        let client = &self.session.client;
        let mut line = String::new();
        for name in ["is_paused", "is_sleeping"] {
            let body = client.plain(&format!("GET /{name}"), DEADLINE).await?;
            let body: Value = serde_json::from_str(&body)?;
            line += &format!("{name}={} ", body[name]);
        }
        let metrics = self.session.metrics().await?;
        for state in ["awake", "weights_offloaded", "discard_all"] {
            let name = format!("engine_sleep_state.{state}");
            let value = metrics.get(&name, &self.session.start);
            line += &format!("{state}={} ", value.map_or("absent".to_owned(), |v| v.to_string()));
        }
        self.transcript.saw(line.trim_end());
        Ok(())
    }

    async fn restart(&mut self) -> anyhow::Result<()> {
        self.session.restart().await?;
        self.names.forget_hashes();
        let first = replay(self.session.replay_endpoint(), b"").await?;
        let first = first.batches.first().context("no batch after the restart")?;
        self.transcript.saw(format!("first batch {}", first.seq));
        Ok(())
    }

    /// Sequence numbers are told from where the scenario stands, so that those of earlier ones do
    /// not matter.
    async fn replay(&mut self, from: &Replay) -> anyhow::Result<()> {
        let next = self.session.cursor;
        let start = match from {
            Replay::From(seq) => seq.to_be_bytes().to_vec(),
            Replay::Last(count) => next.saturating_sub(*count).to_be_bytes().to_vec(),
            Replay::Beyond(count) => (next + count).to_be_bytes().to_vec(),
            Replay::Raw(hex) => bytes(hex)?,
        };
        let answer = replay(self.session.replay_endpoint(), &start).await?;
        if let Some(line) = extent(&answer.batches, next)? {
            self.transcript.saw(line);
        }
        let frames: Vec<_> = answer.end.iter().map(frame_text).collect();
        self.transcript.saw(format!("end [{}]", frames.join(" ")));
        Ok(())
    }
}

async fn events_heard<T: Target>(
    session: &Session<T>,
    event: &str,
    medium: Option<&str>,
    least: usize,
) -> anyhow::Result<()> {
    until(event, async || {
        let batches = session.subscriber.since(session.cursor);
        Ok(count(&batches, event, medium)? >= least)
    })
    .await
}

/// vLLM takes the stores of a finished copy from a Python set, whose order is another one in
/// each process (0.32.0, observed).
fn stores_of_a_tier_sorted(mut lines: Vec<String>) -> Vec<String> {
    for run in lines.chunk_by_mut(|a, b| a.starts_with("CPU") == b.starts_with("CPU")) {
        if run[0].starts_with("CPU") {
            run.sort();
        }
    }
    lines
}

/// The first batch as it is if it opens the stream, else from the cursor; likewise the last.
fn extent(batches: &[Batch], next: u64) -> anyhow::Result<Option<String>> {
    let (Some(first), Some(last)) = (batches.first(), batches.last()) else { return Ok(None) };
    ensure!(last.seq - first.seq + 1 == batches.len() as u64, "the replay has a hole");
    let place = |seq: u64| match next.checked_sub(seq) {
        _ if seq == 0 => "0".to_owned(),
        Some(back) => format!("next-{back}"),
        None => format!("next+{}", seq - next),
    };
    Ok(Some(format!("batches {} to {}", place(first.seq), place(last.seq))))
}

fn frame_text(frame: &Bytes) -> String {
    if frame.is_empty() {
        return "empty".to_owned();
    }
    frame.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn bytes(hex: &str) -> anyhow::Result<Vec<u8>> {
    let digits = |at: usize| hex.get(at..at + 2).context("an odd number of digits");
    (0..hex.len()).step_by(2).map(|at| Ok(u8::from_str_radix(digits(at)?, 16)?)).collect()
}

fn completion(step: &Complete) -> Request {
    let mut body = json!({"model": "tiny", "prompt": step.prompt.tokens(),
        "max_tokens": step.max_tokens, "temperature": 0, "ignore_eos": true});
    if step.stream {
        body["stream"] = true.into();
    }
    if let Some(salt) = &step.salt {
        body["cache_salt"] = salt.as_str().into();
    }
    for (key, value) in &step.with {
        body[key] = value.clone();
    }
    let mut request = post("/v1/completions", &body);
    request.headers.extend(step.headers.clone());
    request
}

fn request(step: &Http) -> anyhow::Result<Request> {
    let (method, path) = step.call.split_once(' ').context("a call is a method and a path")?;
    let mut request = match (&step.json, &step.raw) {
        (Some(json), None) => post(path, json),
        (None, Some(raw)) => Request { body: Some(raw.clone()), ..post(path, &Value::Null) },
        (None, None) => Request { path: path.to_owned(), ..Request::default() },
        (Some(_), Some(_)) => bail!("a body is either json or raw"),
    };
    request.method = method.to_owned();
    request.headers.extend(step.headers.clone());
    Ok(request)
}

/// Whether the engine has to tokenize what is sent.
fn has_text(step: &Http) -> bool {
    let Some(body) = &step.json else { return false };
    body.get("messages").is_some() || body.get("prompt").is_some_and(Value::is_string)
}

fn heading(step: &Step) -> String {
    let named = |name: &Option<String>| match name {
        Some(name) => format!(" as {name}"),
        None => String::new(),
    };
    match step {
        Step::Complete(step) => {
            let salt = step.salt.as_ref().map(|salt| format!(" salt {salt}")).unwrap_or_default();
            let stream = if step.stream { " stream" } else { "" };
            let with = if step.with.is_empty() {
                String::new()
            } else {
                format!(" {}", Value::Object(step.with.clone()))
            };
            let name = named(&step.name);
            format!("complete {} max {}{stream}{salt}{with}{name}", step.prompt, step.max_tokens)
        }
        Step::Http(step) => format!("{}{}", step.call, named(&step.name)),
        Step::Await(condition) => format!("await {condition:?}"),
        Step::Close(name) => format!("close {name}"),
        Step::Finish(name) => format!("finish {name}"),
        Step::Events(_) => "events".to_owned(),
        Step::Metrics(_) => "metrics".to_owned(),
        Step::State(_) => "state".to_owned(),
        Step::Restart(_) => "restart".to_owned(),
        Step::Replay(from) => format!("replay {from:?}"),
    }
}
