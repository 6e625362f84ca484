//! `fak config check` and `print`: what `fak serve` would do with these settings.

use std::io::{self, Write as _};

use super::{Error, serve};
use crate::cli::{ConfigCommand, Exit};

/// Checks, and prints where that is asked for.
pub(super) fn run(command: &ConfigCommand) -> Result<Exit, Error> {
    let (args, shown) = match command {
        ConfigCommand::Check { serve } => (serve, None),
        ConfigCommand::Print { serve, json } => (serve, Some(*json)),
    };
    let settings = serve::settings(args)?;
    let text = match shown {
        None => return Ok(Exit::Done),
        Some(true) => format!("{:#}\n", settings.to_json()),
        Some(false) => settings.to_toml(),
    };
    io::stdout().write_all(text.as_bytes()).map_err(Error::failed)?;
    Ok(Exit::Done)
}
