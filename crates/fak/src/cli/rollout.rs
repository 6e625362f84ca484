//! `fak rollout`: workers that time-share their devices with a trainer.
//!
//! Invariant: 0 means that every worker that was meant is done, and 2 that nothing changed on any.

use clap::{Args, Subcommand};
use serde::Deserialize;
use serde_json::{Map, Value};

use super::Exit;
use super::action::{Stop, Weights, flag, text, word};
use super::client::{Client, Error};
use super::table::{self, Table};

/// Arguments of `fak rollout`.
#[derive(Debug, Args)]
#[command(after_help = super::CLIENT_HELP)]
pub struct RolloutArgs {
    /// Print JSON.
    #[arg(long, global = true)]
    json: bool,
    /// What to do.
    #[command(subcommand)]
    command: RolloutCommand,
}

#[derive(Debug, Subcommand)]
enum RolloutCommand {
    /// Put workers to sleep, and hold them, until their devices are free to use.
    Begin(Begin),
    /// Wake them with the weights that they are to serve, and let them go.
    End(End),
    /// Who holds which worker.
    Ls,
}

#[derive(Debug, Args)]
struct Begin {
    #[command(flatten)]
    whom: Whom,
    /// 1 keeps the weights in host memory, 2 drops them; 1 where not said.
    #[arg(long, value_name = "1|2", value_parser = clap::value_parser!(u8).range(1..=2))]
    level: Option<u8>,
    #[command(flatten)]
    stop: Stop,
    /// Record what the engine answers to fixed prompts, to compare after the wake. Requests that
    /// run beside them (abort, keep) can change an answer.
    #[arg(long)]
    canary: bool,
}

#[derive(Debug, Args)]
struct End {
    #[command(flatten)]
    whom: Whom,
    /// What is known of the weights.
    #[arg(long, value_enum)]
    weights: Weights,
    /// Their version.
    #[arg(long, value_name = "VERSION")]
    weight_version: Option<String>,
    /// Only wake the weights' memory, to load weights into it; the workers stay held.
    #[arg(long, value_name = "weights", value_parser = ["weights"])]
    stage: Option<String>,
    /// Ask the fixed prompts, or do not; where not said, if they were recorded.
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "true|false")]
    canary: Option<bool>,
}

#[derive(Debug, Args)]
struct Whom {
    /// Which workers. Without it: all of them to begin, and to end, all that the holder holds.
    #[arg(long = "worker", value_name = "ID")]
    workers: Vec<String>,
    /// Who holds them; rollout where not said.
    #[arg(long, value_name = "NAME")]
    holder: Option<String>,
}

impl Whom {
    fn add(&self, to: &mut Map<String, Value>) {
        if !self.workers.is_empty() {
            to.insert("workers".to_owned(), self.workers.clone().into());
        }
        text(to, "holder", self.holder.as_deref());
    }
}

impl Begin {
    fn body(&self) -> Value {
        let mut body = Map::new();
        self.whom.add(&mut body);
        if let Some(level) = self.level {
            body.insert("level".to_owned(), level.into());
        }
        self.stop.add(&mut body);
        flag(&mut body, "canary", self.canary);
        Value::Object(body)
    }
}

impl End {
    fn body(&self) -> Value {
        let mut body = Map::new();
        self.whom.add(&mut body);
        body.insert("weights".to_owned(), word(self.weights));
        text(&mut body, "weight_version", self.weight_version.as_deref());
        text(&mut body, "stage", self.stage.as_deref());
        if let Some(canary) = self.canary {
            body.insert("canary".to_owned(), canary.into());
        }
        Value::Object(body)
    }
}

/// Runs `fak rollout`.
///
/// # Errors
/// [`Error`], with the exit code that fits; the workers' outcomes are shown all the same.
pub async fn run(args: &RolloutArgs, client: &Client) -> Result<Exit, Error> {
    match &args.command {
        RolloutCommand::Begin(begin) => {
            ask(client, "/fak/v1/rollout/begin", &begin.body(), args.json).await
        }
        RolloutCommand::End(end) => {
            ask(client, "/fak/v1/rollout/end", &end.body(), args.json).await
        }
        RolloutCommand::Ls => {
            let found: Value = client.get("/fak/v1/rollout").await?;
            let mut table = Table::new(["WORKER", "HOLDER", "SINCE"]);
            for hold in found["holds"].as_array().into_iter().flatten() {
                table.add(["worker", "holder", "since"].map(|name| cell(hold, name)));
            }
            table.print(&found, args.json)?;
            Ok(Exit::Done)
        }
    }
}

/// What an answer says of all workers.
#[derive(Debug, Deserialize)]
struct Told {
    workers: Vec<Value>,
}

async fn ask(client: &Client, path: &str, body: &Value, as_json: bool) -> Result<Exit, Error> {
    match client.act::<Value>(path, body).await {
        Ok(answer) => {
            show(&answer, as_json)?;
            Ok(Exit::Done)
        }
        Err(Error::Failed { status, failure, body }) => {
            let told = serde_json::from_value::<Told>(body.clone());
            let Ok(told) = told else { return Err(Error::Failed { status, failure, body }) };
            show(&body, as_json)?;
            let message = body.pointer("/error/message").and_then(Value::as_str);
            let message = message.unwrap_or("not every worker did as asked").to_owned();
            let is_untouched = told.workers.iter().all(|worker| worker["outcome"] == "refused");
            Err(Error::Partial { message, is_untouched })
        }
        Err(error) => Err(error),
    }
}

fn show(answer: &Value, as_json: bool) -> Result<(), Error> {
    let head = ["WORKER", "OUTCOME", "PHASE", "GPU FREE", "SERVING", "CANARY", "HELD BY", "WHY"];
    let mut table = Table::new(head);
    for worker in answer["workers"].as_array().into_iter().flatten() {
        let why = if worker["error"].is_null() { "reason" } else { "error" };
        let names = ["worker", "outcome", "phase", "gpu_free", "serving", "canary", "held_by", why];
        table.add(names.map(|name| cell(worker, name)));
    }
    Ok(table.print(answer, as_json)?)
}

fn cell(from: &Value, name: &str) -> String {
    match &from[name] {
        Value::Null => table::or_dash(None::<String>),
        Value::String(text) => text.clone(),
        Value::Bool(is_so) => if *is_so { "yes" } else { "no" }.to_owned(),
        other => other.to_string(),
    }
}
