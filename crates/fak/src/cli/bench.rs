//! `fak bench`: its arguments, and its reports as tables for people and as JSON.
//!
//! Invariant: a number that the engine does not give is absent, never 0.

use std::io;

use clap::{Args, Subcommand};
use serde::Serialize;

use super::table::{Table, json, lines, or_dash};

/// Most prompts of one experiment.
const REQUESTS_MAX: i64 = 1024;

/// Longest prompt, in tokens.
const PROMPT_TOKENS_MAX: i64 = 1 << 20;

/// Arguments of `fak bench`.
#[derive(Debug, Args)]
pub struct BenchArgs {
    /// Which experiment.
    #[command(subcommand)]
    pub command: BenchCommand,
}

/// The experiments.
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// Does an engine's offload tier survive a sleep? Replays prompts after one that clears the
    /// tier and after one that keeps it.
    TierReplay(TierReplayArgs),
}

const TIER_REPLAY_HELP: &str = "\
The engine has to be idle and its own: its caches are emptied, and it is put to sleep (level 1) and
woken twice. Nothing at all is sent that could change it unless it declares clear_connector_cache
(vLLM change 57810, or a plugin that adds it) and its connector is known to keep its tier.

Environment:
  FAK_VLLM_API_KEY   the engine's API key, sent to the engine alone

Exit codes: 0 reused, 1 not reused or failed, 2 refused and nothing changed, 64 bad usage.";

/// Arguments of `fak bench tier-replay`.
#[derive(Debug, Args)]
#[command(after_help = TIER_REPLAY_HELP)]
pub struct TierReplayArgs {
    /// Where the engine is, with or without /v1.
    #[arg(long, value_name = "URL")]
    pub url: String,
    /// Distinct prompts.
    #[arg(long, value_name = "N", default_value_t = 16,
          value_parser = clap::value_parser!(u32).range(1..=REQUESTS_MAX))]
    pub requests: u32,
    /// Tokens of each prompt; shortened where the answer would not fit behind it [default: 4096,
    /// or what the engine takes].
    #[arg(long, value_name = "N",
          value_parser = clap::value_parser!(u32).range(1..=PROMPT_TOKENS_MAX))]
    pub prompt_tokens: Option<u32>,
    /// The model to ask for [default: the one that is served].
    #[arg(long, value_name = "NAME")]
    pub model: Option<String>,
    /// What the prompts are made from, to repeat an experiment [default: another one each time].
    #[arg(long, value_name = "N")]
    pub seed: Option<u32>,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

/// What came of a `tier-replay`.
#[derive(Clone, Debug, Serialize)]
pub struct TierReplay {
    /// The sleep that clears the tier; `None` where nothing was sent.
    pub cleared: Option<Arm>,
    /// The sleep that keeps it; `None` where nothing was sent.
    pub kept: Option<Arm>,
    /// The verdict, from the engine's counters alone.
    pub verdict: Verdict,
    /// Why it reads as it does, and the way out of a refusal.
    pub reason: String,
    /// Whether every answer was the same before and after each sleep, at temperature 0.
    pub outputs_equal: Option<bool>,
    /// The engine's version, if it tells.
    pub engine_version: Option<String>,
    /// What was asked of the engine; `None` where it was asked for nothing.
    #[serde(flatten)]
    pub workload: Option<Workload>,
}

/// The prompts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Workload {
    /// The model.
    pub model: String,
    /// How many.
    pub requests: u32,
    /// Tokens of each.
    pub prompt_tokens: u32,
    /// Of these, the tokens of the full blocks before the last token, which is always computed.
    pub block_tokens: u32,
    /// What they were made from.
    pub seed: u32,
}

/// One arm's replay, by the growth of the engine's counters over it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Arm {
    /// Prompt tokens looked up in the connector's tier.
    pub external_queries: Option<u64>,
    /// Of these, the tokens found there.
    pub external_hits: Option<u64>,
    /// Bytes stored to the tier.
    pub stored_bytes: Option<u64>,
    /// Bytes loaded from it.
    pub loaded_bytes: Option<u64>,
    /// Median time of a whole request, in seconds. One at a time, so indicative only.
    pub replay_p50_s: f64,
    /// Bytes stored while the prompts were sent for the first time.
    pub warm_stored_bytes: Option<u64>,
    /// Answers that differ from those of the first time.
    pub outputs_differing: u32,
}

/// Whether the tier was reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Verdict {
    /// After the keeping sleep every full block came from the tier, after the clearing one none.
    #[serde(rename = "reused")]
    Reused,
    /// Anything else that was counted.
    #[serde(rename = "not reused")]
    NotReused,
    /// Nothing was sent.
    #[serde(rename = "refused")]
    Refused,
}

impl Verdict {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Reused => "reused",
            Self::NotReused => "not reused",
            Self::Refused => "refused",
        }
    }
}

impl TierReplay {
    /// Prints both arms and the verdict, or all as JSON.
    ///
    /// # Errors
    /// Those of stdout.
    pub fn print(&self, as_json: bool) -> io::Result<()> {
        if as_json {
            return json(self);
        }
        if let (Some(cleared), Some(kept)) = (&self.cleared, &self.kept) {
            table(cleared, kept).print(&(), false)?;
        }
        lines(&[format!("{}: {}", self.verdict.as_str(), self.reason)])
    }
}

fn table(cleared: &Arm, kept: &Arm) -> Table {
    let mut table = Table::new(["REPLAY AFTER A SLEEP", "TIER CLEARED", "TIER KEPT"]);
    let mut row = |name: &str, cell: &dyn Fn(&Arm) -> String| {
        table.add([name.to_owned(), cell(cleared), cell(kept)]);
    };
    row("external queries (tokens)", &|arm| or_dash(arm.external_queries));
    row("external hits (tokens)", &|arm| or_dash(arm.external_hits));
    row("stored bytes", &|arm| or_dash(arm.stored_bytes));
    row("loaded bytes", &|arm| or_dash(arm.loaded_bytes));
    row("stored bytes before the sleep", &|arm| or_dash(arm.warm_stored_bytes));
    row("outputs", &|arm| match arm.outputs_differing {
        0 => "same".to_owned(),
        differing => format!("{differing} differ"),
    });
    row("p50 of a request, indicative (s)", &|arm| format!("{:.3}", arm.replay_p50_s));
    table
}
