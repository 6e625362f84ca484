//! Parse, build, run, exit code.

use std::io::{self, Write as _};
use std::process::ExitCode;

use fak::cli::{Cli, Exit, client};
use fak::config::{self, names};
use fak::{app, telemetry};

fn main() -> ExitCode {
    let cli = match Cli::read(config::arguments()) {
        Ok(cli) => cli,
        Err(stopped) if stopped.asked => {
            let written = std::io::stdout().write_all(stopped.text.as_bytes());
            return if written.is_ok() { Exit::Done } else { Exit::Failed }.into();
        }
        Err(stopped) => return end(&stopped.text, Exit::Usage),
    };
    telemetry::start(config::process_environment(names::LOG).as_deref().and_then(|f| f.to_str()));
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return end(&format!("fak: no runtime: {error}\n"), Exit::Failed),
    };
    match runtime.block_on(app::run(cli)) {
        Ok(exit) => exit.into(),
        // Who reads has read enough, as `head` does: nothing is wrong that needs telling.
        Err(error) if is_broken_pipe(&error.cause) => error.exit.into(),
        Err(error) => end(&format!("fak: {}\n", error.told()), error.exit),
    }
}

/// Whether stdout is gone; a connection that broke has another error around it.
fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let ours = error.downcast_ref::<io::Error>();
    let of_clients = error.downcast_ref::<client::Error>().and_then(|error| match error {
        client::Error::Output(error) => Some(error),
        _ => None,
    });
    ours.or(of_clients).is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}

/// Says why on stderr, where talk goes. If even that fails, the exit code is all that is left.
fn end(text: &str, exit: Exit) -> ExitCode {
    let _ = std::io::stderr().write_all(text.as_bytes());
    exit.into()
}
