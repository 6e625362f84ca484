//! `fak worker`: the workers themselves.

use clap::{Args, Subcommand};

use super::Exit;
use super::action::{Action, Held, ask};
use super::client::{Client, Error, segment};
use super::table::{self, Table};
use crate::admin::json::Worker;

/// Arguments of `fak worker`.
#[derive(Debug, Args)]
#[command(after_help = super::CLIENT_HELP)]
pub struct WorkerArgs {
    /// Print JSON.
    #[arg(long, global = true)]
    json: bool,
    /// What to do.
    #[command(subcommand)]
    command: WorkerCommand,
}

#[derive(Debug, Subcommand)]
enum WorkerCommand {
    /// List workers.
    Ls,
    /// Show one worker.
    Status {
        /// Its name.
        #[arg(value_parser = clap::builder::NonEmptyStringValueParser::new())]
        id: String,
    },
    #[command(flatten)]
    Act(Action<Held>),
    /// End an action that waits for requests to end: nothing of it is done, and the worker serves
    /// on. A call that has left is not taken back.
    Cancel {
        /// Which.
        #[arg(value_parser = clap::builder::NonEmptyStringValueParser::new())]
        id: String,
    },
}

/// Runs `fak worker`.
///
/// # Errors
/// [`Error`], with the exit code that fits.
pub async fn run(args: &WorkerArgs, client: &Client) -> Result<Exit, Error> {
    let as_json = args.json;
    match &args.command {
        WorkerCommand::Ls => list(client, as_json).await,
        WorkerCommand::Status { id } => {
            let worker: Worker = client.get(&format!("/fak/v1/workers/{}", segment(id))).await?;
            table::object(&worker, as_json)?;
            Ok(Exit::Done)
        }
        WorkerCommand::Act(action) => ask(client, "workers", action.to_request()?, as_json).await,
        WorkerCommand::Cancel { id } => {
            let nothing = serde_json::Value::Object(serde_json::Map::new());
            ask(client, "workers", (id, "cancel", nothing), as_json).await
        }
    }
}

async fn list(client: &Client, as_json: bool) -> Result<Exit, Error> {
    let workers: Vec<Worker> = client.get("/fak/v1/workers").await?;
    let head = [
        "WORKER",
        "PHASE",
        "SERVING",
        "STATE",
        "MODELS",
        "IN FLIGHT",
        "WEIGHTS",
        "HELD BY",
        "WITNESS",
        "WHY",
    ];
    let mut table = Table::new(head);
    for worker in &workers {
        table.add([
            worker.id.clone(),
            worker.phase.clone(),
            if worker.serving { "yes" } else { "no" }.to_owned(),
            worker.state.clone(),
            worker.models.join(" "),
            worker.in_flight.to_string(),
            table::or_dash(worker.weight_version.as_ref()),
            table::or_dash(worker.held_by.as_ref()),
            table::or_dash(worker.last_witness),
            table::or_dash(worker.why.as_ref().or(worker.warning.as_ref())),
        ]);
    }
    table.print(&workers, as_json)?;
    Ok(Exit::Done)
}

/// Each worker with what is behind it.
pub(super) async fn fleet(client: &Client, as_json: bool) -> Result<Exit, Error> {
    let workers: Vec<Worker> = client.get("/fak/v1/workers").await?;
    let head = ["WORKER", "PHASE", "TIERS", "SESSIONS", "CLAIMED", "CACHED", "WITNESS"];
    let mut table = Table::new(head);
    for worker in &workers {
        table.add([
            worker.id.clone(),
            worker.phase.clone(),
            tiers(worker),
            worker.sessions.to_string(),
            worker.claimed_tokens.to_string(),
            worker.cached_tokens.to_string(),
            table::or_dash(worker.last_witness),
        ]);
    }
    table.print(&workers, as_json)?;
    Ok(Exit::Done)
}

/// `gpu 120, cpu 40`: blocks that are proven there; `?` where nobody tells.
fn tiers(worker: &Worker) -> String {
    let one = |(tier, held): (&String, &serde_json::Value)| match held["blocks"].as_u64() {
        Some(blocks) => format!("{tier} {blocks}"),
        None => format!("{tier} ?"),
    };
    worker.tiers.iter().map(one).collect::<Vec<_>>().join(", ")
}
