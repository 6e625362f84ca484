//! Every field of a request, one by one and the suspicious ones in pairs, on a prompt that is warm:
//! does fak ever claim more than the engine then reuses?
//! Invariant: a claim is the header of an answer and what it is held against is the usage in the
//! same answer; no counter of fak's has a say.

mod fields;
mod values;

use std::io::Write;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, ensure};
use serde_json::{Map, Value, json};

use crate::client::Client;
use crate::fak::{DEADLINE, Fak, Settings, Told};
use crate::prompt::Prompt;
use crate::scenario::Profile;
use crate::session::until;
use crate::target::Target;
use fields::{Probe, Route};

const WORKER: &str = "v0";

/// Blocks of a warm prompt; a claim of one block less, as of a speculating engine, is still one.
const BLOCKS: u32 = 3;

/// A prompt that is not claimed after so many requests is given up for a new one.
const WARM_TRIES: u32 = 30;

/// Prompts in a row that may stay unclaimed before the sweep has nothing to show.
const PROMPTS_TRIED_MAX: u32 = 5;

/// Of the requests that an engine answered with its count, at least this share has to have been
/// claimed: a sweep without claims finds nothing.
const CLAIMED_MIN: f64 = 0.25;

/// What is swept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// Every field by itself.
    Singles,
    /// Also the suspicious ones in pairs.
    Whole,
}

/// What came of a sweep.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    /// Requests with a field of the sweep's.
    pub requests: usize,
    /// Of these, refused by the engine.
    pub refused: usize,
    /// Refused by fak itself.
    pub refused_by_fak: usize,
    /// Answered with the engine's count of cached tokens.
    pub counted: usize,
    /// Claimed to be warm, in part or whole, and answered with that count.
    pub claimed: usize,
    /// Claims above what the engine reused.
    pub overs: Vec<String>,
    /// Requests that no answer came to.
    pub unanswered: Vec<String>,
}

impl Tally {
    /// Whether no claim was over, every request was answered, and enough was claimed to tell.
    pub fn holds(&self) -> bool {
        let claims_enough = self.claimed as f64 >= self.counted as f64 * CLAIMED_MIN;
        self.overs.is_empty() && self.unanswered.is_empty() && self.counted > 0 && claims_enough
    }
}

impl std::fmt::Display for Tally {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            out,
            "sweep: {} requests, {} refused by the engine and {} by fak, {} counted, {} claimed, \
             {} without an answer, {} over-claims",
            self.requests,
            self.refused,
            self.refused_by_fak,
            self.counted,
            self.claimed,
            self.unanswered.len(),
            self.overs.len()
        )
    }
}

/// Sweeps the fields of an engine's own schemas through the fak at `binary`.
///
/// # Errors
///
/// One of the two does not start, the schemas are not there, or no prompt can be made warm.
pub async fn run<T: Target>(
    mut engine: T,
    binary: &Path,
    extent: Extent,
    out: Box<dyn Write>,
) -> anyhow::Result<Tally> {
    let endpoints = engine.start(Profile::Named).await?;
    let schemas = fields::schemas(&Client::new(&endpoints.base_url)).await?;
    let settings = Settings {
        workers: vec![(WORKER.to_owned(), format!("{}/v1", endpoints.base_url))],
        sockets: None,
        db: None,
        probe_every_ms: 100,
        first_byte_ms: 2_000,
        reloads_weights: false,
    };
    let fak = Fak::start(binary, &settings).await?;
    until("the worker to serve with exact beliefs", async || {
        let worker = fak.worker(WORKER).await?;
        Ok(worker["serving"] == true && worker["state"] == "exact")
    })
    .await?;
    let mut sweep = Sweep { fak, out, prompt: 0, tally: Tally::default() };
    for (route, schema) in &schemas {
        let began = (Instant::now(), sweep.tally.requests);
        let swept = sweep.route(*route, schema, extent).await;
        swept.with_context(|| format!("fak logged:\n{}", sweep.fak.log()))?;
        let count = sweep.tally.requests - began.1;
        writeln!(sweep.out, "{route:?}: {count} requests in {} s", began.0.elapsed().as_secs())?;
    }
    Ok(sweep.tally)
}

struct Sweep {
    fak: Fak,
    out: Box<dyn Write>,
    /// The number of the prompt in use.
    prompt: u32,
    tally: Tally,
}

/// How one request ended.
enum Ended {
    /// The engine holds the prompt and fak claims it, or nothing was done.
    Warm,
    /// Either is not sure.
    Unsure,
}

impl Sweep {
    async fn route(
        &mut self,
        route: Route,
        schema: &Map<String, Value>,
        extent: Extent,
    ) -> anyhow::Result<()> {
        let mut probes = fields::singles(route, schema);
        if extent == Extent::Whole {
            probes.extend(fields::pairs(route));
        }
        let mut ended = Ended::Unsure;
        for probe in &probes {
            if matches!(ended, Ended::Unsure) {
                self.warm(route).await?;
            }
            ended = self.probe(route, probe).await?;
        }
        Ok(())
    }

    /// Asks plainly until the answer is claimed, on a new prompt where one is not to be warmed.
    async fn warm(&mut self, route: Route) -> anyhow::Result<()> {
        for _ in 0..PROMPTS_TRIED_MAX {
            for _ in 0..WARM_TRIES {
                let answer = self.fak.post(route.path(), &body(route, self.prompt)).await?;
                ensure!(answer.status < 500, "{}", String::from_utf8_lossy(&answer.body));
                let told = Told::read(&answer)?;
                if told.claimed() > 0 && told.cached.is_some_and(|n| n >= told.claimed()) {
                    return Ok(());
                }
            }
            self.prompt += 1;
        }
        anyhow::bail!(
            "fak claimed none of {PROMPTS_TRIED_MAX} prompts asked {WARM_TRIES} times each"
        )
    }

    async fn probe(&mut self, route: Route, probe: &Probe) -> anyhow::Result<Ended> {
        let mut body = body(route, self.prompt);
        let fields = body.as_object_mut().context("a body is an object")?;
        fields.extend(probe.clone());
        if fields.get("stream").is_some_and(|value| *value == json!(true)) {
            // Else the answer does not tell how much of it was cached.
            fields.entry("stream_options").or_insert(json!({"include_usage": true}));
        }
        let shown = format!("{} {}", route.path(), Value::Object(probe.clone()));
        self.tally.requests += 1;
        let Ok(answer) = self.fak.post(route.path(), &body).await else {
            writeln!(self.out, "FAIL no answer in {} s to {shown}", DEADLINE.as_secs())?;
            self.tally.unanswered.push(shown);
            return Ok(Ended::Unsure);
        };
        let told = Told::read(&answer)?;
        if told.status >= 400 {
            let by_engine = answer.headers.contains_key("x-fak-worker");
            *(if by_engine { &mut self.tally.refused } else { &mut self.tally.refused_by_fak }) +=
                1;
            return Ok(Ended::Warm);
        }
        let Some(cached) = told.cached else { return Ok(Ended::Unsure) };
        let claimed = told.claimed();
        self.tally.counted += 1;
        self.tally.claimed += usize::from(claimed > 0);
        if claimed > cached {
            writeln!(self.out, "FAIL claimed {claimed}, cached {cached}: {shown}")?;
            self.tally.overs.push(format!("{shown}: claimed {claimed}, cached {cached}"));
            // What is believed of this prompt is in doubt now, and the next finding needs none.
            self.prompt += 1;
        }
        Ok(if claimed > 0 && claimed <= cached { Ended::Warm } else { Ended::Unsure })
    }
}

/// A plain request for one token on prompt `number`.
fn body(route: Route, number: u32) -> Value {
    let mut body = json!({"model": "tiny", "max_tokens": 1, "temperature": 0, "ignore_eos": true});
    match route {
        Route::Completions => {
            let first = number * BLOCKS % 9_000 + 1;
            let text = format!("{first}-{} +5", first + BLOCKS - 1);
            let prompt = Prompt::try_from(text).expect("labels, a range and a tail");
            body["prompt"] = json!(prompt.tokens());
        }
        Route::Chat => {
            let message = json!({"role": "user", "content": fields::content(number)});
            body["messages"] = json!([message]);
        }
    }
    body
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sweep_that_claims_nothing_does_not_hold() {
        let claims = Tally { requests: 9, counted: 8, claimed: 6, ..Tally::default() };
        assert!(claims.holds());
        assert!(!Tally { claimed: 1, ..claims.clone() }.holds());
        assert!(!Tally { overs: vec![String::new()], ..claims.clone() }.holds());
        assert!(!Tally { unanswered: vec![String::new()], ..claims }.holds());
        assert!(!Tally::default().holds());
    }

    #[test]
    fn every_prompt_is_another() {
        for route in [Route::Completions, Route::Chat] {
            assert_ne!(body(route, 0), body(route, 1));
        }
    }
}
