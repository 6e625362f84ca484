//! The only file that knows every part: each command, from its arguments to its exit code.
//!
//! Invariant: nothing is sent to an engine before arguments, files and settings are found right.

mod bench;
mod claims;
mod config;
mod cors;
mod doubt;
mod open_files;
mod run;
mod serve;
mod signals;
mod sim;
mod slashed;
mod witness;

use crate::cli::client::{self, Client};
use crate::cli::{self, Cli, Command, Exit, WitnessCommand};

/// Why a command ended early.
#[derive(Debug)]
pub struct Error {
    /// What the process exits with.
    pub exit: Exit,
    /// Why.
    pub cause: anyhow::Error,
}

impl Error {
    /// Bad usage or configuration.
    fn usage(cause: impl Into<anyhow::Error>) -> Self {
        Self { exit: Exit::Usage, cause: cause.into() }
    }

    /// Anything else.
    fn failed(cause: impl Into<anyhow::Error>) -> Self {
        Self { exit: Exit::Failed, cause: cause.into() }
    }

    /// Why, with the causes behind it.
    #[must_use]
    pub fn told(&self) -> String {
        crate::telemetry::error_chain(self.cause.as_ref())
    }
}

/// Runs a command to its end.
///
/// # Errors
///
/// [`Error`] with the exit code that fits.
pub async fn run(cli: Cli) -> Result<Exit, Error> {
    match cli.command {
        Command::Bench(args) => bench::run(&args).await,
        Command::Config { command } => config::run(&command),
        Command::Run(args) => run::run(&args).await,
        Command::Serve(args) => serve::serve(args).await,
        Command::Sim(args) => sim::serve(&args).await,
        Command::Session(args) => Ok(cli::session::run(&args, &client()?).await?),
        Command::Rollout(args) => Ok(cli::rollout::run(&args, &client()?).await?),
        Command::Worker(args) => Ok(cli::worker::run(&args, &client()?).await?),
        Command::Witness { command } => match command {
            WitnessCommand::Table { json } => witness::print(json),
            WitnessCommand::Ls(args) => Ok(cli::witness::list(&args, &client()?).await?),
            WitnessCommand::Tail(args) => Ok(cli::witness::tail(&args, &client()?).await?),
        },
    }
}

/// The running fak that clients ask.
fn client() -> Result<Client, Error> {
    Ok(Client::from_environment()?)
}

impl From<client::Error> for Error {
    fn from(error: client::Error) -> Self {
        Self { exit: error.exit(), cause: error.into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_that_an_error_ends_with_is_told_once() {
        let refused = || std::io::Error::other("connection refused");
        let told = |text: &'static str| {
            let cause = anyhow::Error::new(refused()).context(text).context("db=\"x\"");
            Error::failed(cause).told()
        };
        let once = "db=\"x\": it failed: connection refused";
        assert_eq!(told("it failed: connection refused"), once);
        assert_eq!(told("it failed"), once);
    }
}
