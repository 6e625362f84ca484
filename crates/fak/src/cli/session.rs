//! `fak session`: sessions, and the workers behind them.

use clap::{Args, Subcommand};
use serde_json::{Map, Value};

use super::action::{Action, Extra as _, Force, ask, flag};
use super::client::{Client, Error, segment};
use super::table::{self, Table};
use super::{Exit, worker};
use crate::admin::json::Session;

/// Arguments of `fak session`.
#[derive(Debug, Args)]
#[command(after_help = super::CLIENT_HELP)]
pub struct SessionArgs {
    /// Print JSON.
    #[arg(long, global = true)]
    json: bool,
    /// What to do.
    #[command(subcommand)]
    command: SessionCommand,
}

#[derive(Debug, Subcommand)]
enum SessionCommand {
    /// List sessions, the last seen first.
    Ls {
        /// Show each worker with the sessions and tokens behind it instead.
        #[arg(long)]
        fleet: bool,
    },
    /// Show one session.
    Status {
        /// Its name.
        #[arg(value_parser = clap::builder::NonEmptyStringValueParser::new())]
        id: String,
    },
    #[command(flatten)]
    Act(Action<Force>),
    /// Put what a session left in caches out of reach.
    Quarantine {
        /// Its name.
        #[arg(value_parser = clap::builder::NonEmptyStringValueParser::new())]
        id: String,
        #[command(flatten)]
        how: How,
        #[command(flatten)]
        force: Force,
    },
}

#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
struct How {
    /// Drop the whole prefix cache of its worker: everybody's prefixes go.
    #[arg(long)]
    flush: bool,
    /// Give the session a new salt: nothing that it stored so far can be matched again.
    #[arg(long)]
    isolate: bool,
}

/// Runs `fak session`.
///
/// # Errors
/// [`Error`], with the exit code that fits.
pub async fn run(args: &SessionArgs, client: &Client) -> Result<Exit, Error> {
    let as_json = args.json;
    match &args.command {
        SessionCommand::Ls { fleet: true } => worker::fleet(client, as_json).await,
        SessionCommand::Ls { fleet: false } => list(client, as_json).await,
        SessionCommand::Status { id } => {
            let session: Session = client.get(&format!("/fak/v1/sessions/{}", segment(id))).await?;
            table::object(&session, as_json)?;
            Ok(Exit::Done)
        }
        SessionCommand::Act(action) => ask(client, "sessions", action.to_request()?, as_json).await,
        SessionCommand::Quarantine { id, how, force } => {
            ask(client, "sessions", (id, "quarantine", quarantine(how, force)), as_json).await
        }
    }
}

fn quarantine(how: &How, force: &Force) -> Value {
    let mut options = Map::new();
    flag(&mut options, "flush", how.flush);
    flag(&mut options, "isolate", how.isolate);
    force.add(&mut options);
    Value::Object(options)
}

async fn list(client: &Client, as_json: bool) -> Result<Exit, Error> {
    let sessions: Vec<Session> = client.get("/fak/v1/sessions").await?;
    let mut table =
        Table::new(["SESSION", "WORKER", "RUN", "PHASE", "CLAIMED", "CACHED", "WITNESS"]);
    for session in &sessions {
        table.add([
            session.id.clone(),
            table::or_dash(session.worker.as_ref()),
            session.run.clone(),
            table::or_dash(session.phase.as_ref()),
            session.claimed_tokens.to_string(),
            session.cached_tokens.to_string(),
            table::or_dash(session.last_witness),
        ]);
    }
    table.print(&sessions, as_json)?;
    Ok(Exit::Done)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_quarantine_asks_for_all_that_was_said() {
        let how = How { flush: true, isolate: false };
        let force = Force { holder: Some("trainer-7".into()), force: true };
        let asked = json!({"flush": true, "holder": "trainer-7", "force": true});
        assert_eq!(quarantine(&how, &force), asked);
    }
}
