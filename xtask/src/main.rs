//! `cargo xtask`: the checks that a change has to pass, at a desk and in CI alike.
//!
//! Invariant: CI runs nothing that `cargo xtask ci` does not run, except the real engine.
#![expect(clippy::print_stdout, reason = "a command-line tool that reports on stdout")]

mod ci;
mod mutants;
mod tidy;
mod tree;

use std::num::NonZeroUsize;
use std::path::Path;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Checks of this repository.
#[derive(Parser)]
#[command(name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run the whole gate; stops at the first failure and says how to run that step again.
    Ci {
        /// Seconds each fuzz target runs.
        #[arg(long, default_value_t = 5)]
        fuzz_seconds: u32,
    },
    /// Check the rules on sources and manifests that no compiler holds.
    Tidy,
    /// Break the source in fixed places, one by one, in a copy: the tests have to notice each.
    Mutants {
        /// Only those whose name holds this.
        #[arg(default_value = "")]
        only: String,
        /// Copies of the tree that are built and tested at a time; each is a full build (3 GB).
        #[arg(long, default_value = "1")]
        lanes: NonZeroUsize,
    },
    /// Print the import table as ARCHITECTURE.md has to show it.
    Imports,
}

fn main() -> ExitCode {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the root");
    let outcome = match Cli::parse().command {
        Command::Ci { fuzz_seconds } => ci::run(root, fuzz_seconds),
        Command::Tidy => tidy::run(root),
        Command::Mutants { only, lanes } => mutants::run(root, &only, lanes),
        Command::Imports => {
            print!("{}", tidy::imports::rendered());
            Ok(())
        }
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}
