//! `fak bench tier-replay`: does an engine's offload tier survive a sleep?
//!
//! Invariant: an engine that is not proven to keep its tier when asked to is sent nothing that
//! could change it.

mod replay;
mod verdict;
mod workload;

use std::io::Write as _;
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use fak_kernel::witness::{self, Level, Mode, Move, Plan, Standing};

use self::replay::Replay;
use self::workload::Prompts;
use super::Error;
use crate::cli::Exit;
use crate::cli::bench::{BenchArgs, BenchCommand, TierReplay, TierReplayArgs, Verdict, Workload};
use crate::config::{self, Worker, names};
use crate::engine::{Capabilities, Client, Endpoints, Engine, Learnt, Model, Seen, Timeouts};
use crate::lifecycle;

/// Tokens of each prompt where nobody says.
const PROMPT_TOKENS: u32 = 4096;

/// Time for a look at the engine. The first `/server_info` of an engine describes its whole machine
/// and took over 5 s on a busy one (0.32.0, observed); and nobody's request waits here.
const PROBE_WITHIN: Duration = Duration::from_secs(60);

/// Runs the experiment that was named.
pub(super) async fn run(args: &BenchArgs) -> Result<Exit, Error> {
    match &args.command {
        BenchCommand::TierReplay(args) => tier_replay(args).await,
    }
}

async fn tier_replay(args: &TierReplayArgs) -> Result<Exit, Error> {
    let engine = engine(&args.url)?;
    if let Seen::Unreachable { detail } = engine.observe().await.is_sleeping {
        return Err(Error::failed(anyhow!("no engine answers at --url {}: {detail}", args.url)));
    }
    let told = engine.capabilities().await;
    let proven = lifecycle::capabilities(&told);
    let engine_version = told.version.told().cloned();
    let report = match refusal(&told, &proven) {
        Some(reason) => TierReplay {
            cleared: None,
            kept: None,
            verdict: Verdict::Refused,
            reason,
            outputs_equal: None,
            engine_version,
            workload: None,
        },
        None => {
            let workload = workload(args, &told)?;
            say(format_args!(
                "fak bench: vLLM {}, model {}, {} prompts of {} tokens, seed {}",
                engine_version.as_deref().unwrap_or("of unknown version"),
                workload.model,
                workload.requests,
                workload.prompt_tokens,
                workload.seed
            ));
            let replay = Replay::new(engine, proven, Prompts::of(&workload));
            let arms = replay.run().await.map_err(Error::failed)?;
            let (verdict, reason) = verdict::of(&arms, &workload);
            let outputs_equal = arms.cleared.outputs_differing + arms.kept.outputs_differing == 0;
            TierReplay {
                cleared: Some(arms.cleared),
                kept: Some(arms.kept),
                verdict,
                reason,
                outputs_equal: Some(outputs_equal),
                engine_version,
                workload: Some(workload),
            }
        }
    };
    report.print(args.json).map_err(Error::failed)?;
    Ok(match report.verdict {
        Verdict::Reused => Exit::Done,
        Verdict::NotReused => Exit::Failed,
        Verdict::Refused => Exit::Refused,
    })
}

fn engine(url: &str) -> Result<Engine, Error> {
    let endpoints = Endpoints::new(url).with_context(|| format!("--url {url:?}"));
    let endpoints = endpoints.map_err(Error::usage)?;
    // The other variables describe the engine of `FAK_VLLM_BASE_URL`, not this one.
    let lookup =
        |name: &str| (name == names::API_KEY).then(|| config::process_environment(name)).flatten();
    let worker = Worker::at(url, &lookup).map_err(Error::usage)?;
    let timeouts = Timeouts { probe: PROBE_WITHIN, ..Timeouts::default() };
    let client = Client::new(worker.api_key.as_ref(), timeouts).map_err(Error::usage)?;
    Ok(Engine::new(client, endpoints))
}

/// The sleep that both arms are about.
const fn sleep(keep_tier: bool) -> Move {
    Move::Sleep { level: Some(Level::One), mode: Mode::Abort, keep_tier }
}

/// The reset that both arms begin with.
const RESET: Move = Move::Reset { external: true, running: false };

/// Why the experiment may not be made on this engine, with what is missing and the way out.
fn refusal(told: &Capabilities, proven: &witness::Capabilities) -> Option<String> {
    let refused = |mv| match witness::plan(mv, proven, &Standing::SERVING) {
        Plan::Refuse(why) => Some(why),
        Plan::Send { .. } => None,
    };
    let why = refused(sleep(true)).or_else(|| refused(RESET))?;
    let mut missing = Vec::new();
    match &told.clear_connector_cache {
        Learnt::Told { value: true, .. } => {}
        Learnt::Told { value: false, by } => missing.push(format!(
            "{by} declares no clear_connector_cache for /sleep, so that the engine would answer \
             200 and evict the tier all the same"
        )),
        Learnt::Unknown { why } => {
            missing.push(format!("whether /sleep takes clear_connector_cache is not known ({why})"))
        }
    }
    match &told.connectors {
        _ if proven.connector.keeps => {}
        Learnt::Told { value, .. } if value.is_empty() => {
            missing.push("the engine has no KV connector".to_owned());
        }
        Learnt::Told { value, .. } => missing.push(format!(
            "the connector {} is not known to keep its tier through a sleep",
            value.join(" with ")
        )),
        Learnt::Unknown { why } => {
            missing.push(format!("the engine's KV connector is not known ({why})"));
        }
    }
    if missing.is_empty() {
        missing.push(why.as_str().to_owned());
    }
    Some(format!(
        "{}; nothing was sent. Serve the model with an OffloadingConnector, VLLM_SERVER_DEV_MODE=1 \
         and an engine that has vLLM change 57810 or a plugin that adds its argument",
        missing.join("; ")
    ))
}

fn workload(args: &TierReplayArgs, told: &Capabilities) -> Result<Workload, Error> {
    let model = model(args.model.as_deref(), told)?;
    let prompt_tokens = prompt_tokens(args.prompt_tokens, model)?;
    let block = match &told.block_size {
        Learnt::Told { value, .. } if *value > 0 => *value,
        Learnt::Told { .. } => return Err(Error::failed(anyhow!("the engine's blocks are empty"))),
        Learnt::Unknown { why } => {
            return Err(Error::failed(anyhow!("the engine's block size is not known: {why}")));
        }
    };
    // The last token is always computed, so that a block that it ends cannot be hit.
    let block_tokens = (prompt_tokens - 1) / block * block;
    if block_tokens == 0 {
        return Err(Error::usage(anyhow!(
            "--prompt-tokens: {prompt_tokens} leaves no full block of {block} tokens to be reused; \
             it has to be over {block}"
        )));
    }
    Ok(Workload {
        model: model.id.to_string(),
        requests: args.requests,
        prompt_tokens,
        block_tokens,
        seed: args.seed.unwrap_or_else(|| fastrand::u32(..)),
    })
}

/// The model that was named, else the only one that is served.
fn model<'a>(named: Option<&str>, told: &'a Capabilities) -> Result<&'a Model, Error> {
    let models = match &told.models {
        Learnt::Told { value, .. } => value,
        Learnt::Unknown { why } => {
            return Err(Error::failed(anyhow!("the engine does not say what it serves: {why}")));
        }
    };
    let fits = |model: &&Model| match named {
        Some(name) => *model.id == *name,
        None => model.parent.is_none(),
    };
    match models.iter().filter(fits).collect::<Vec<_>>()[..] {
        [only] => Ok(only),
        _ => {
            let served: Vec<_> = models.iter().map(|model| &model.id).collect();
            Err(Error::usage(anyhow!("--model has to be one of {served:?}")))
        }
    }
}

/// As many tokens as asked, less where the answer would not fit behind them.
fn prompt_tokens(asked: Option<u32>, model: &Model) -> Result<u32, Error> {
    let Some(most) = model.tokens_max else { return Ok(asked.unwrap_or(PROMPT_TOKENS)) };
    match asked {
        Some(asked) if asked > most => Err(Error::usage(anyhow!(
            "--prompt-tokens: {asked} are more than the engine takes: its max_model_len is {most}"
        ))),
        _ => {
            let fitting = most.saturating_sub(workload::OUTPUT_TOKENS).max(1);
            Ok(asked.unwrap_or(PROMPT_TOKENS).min(fitting))
        }
    }
}

/// Talks to whoever watches. If stderr is gone, nobody does.
fn say(text: std::fmt::Arguments<'_>) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn served(tokens_max: Option<u32>) -> Model {
        Model { tokens_max, ..Model::base("tiny") }
    }

    #[test]
    fn a_prompt_leaves_room_for_its_answer_and_never_exceeds_the_engine() {
        let room = 4096 - workload::OUTPUT_TOKENS;
        let rows = [
            (None, Some(4096), room),
            (Some(4096), Some(4096), room),
            (Some(1000), Some(4096), 1000),
            (None, Some(131_072), PROMPT_TOKENS),
            (Some(9000), None, 9000),
        ];
        for (asked, most, expected) in rows {
            let tokens = prompt_tokens(asked, &served(most)).expect("fits");
            assert_eq!(tokens, expected, "{asked:?} of {most:?}");
        }
        let error = prompt_tokens(Some(4097), &served(Some(4096))).expect_err("too many");
        assert_eq!(error.exit, Exit::Usage);
        assert!(error.cause.to_string().contains("max_model_len is 4096"), "{}", error.cause);
    }
}
