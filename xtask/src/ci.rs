//! The whole gate, step by step: what has to hold before a change goes in.
//!
//! Invariant: the first step that fails ends the run, and the last line says how to run it again.

use std::path::Path;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail};

/// The version that deny.toml was written for.
const DENY_VERSION: &str = "0.20.2";

/// One command of the gate.
struct Step {
    name: &'static str,
    /// Environment beyond the caller's.
    env: &'static [(&'static str, &'static str)],
    command: Vec<String>,
}

impl Step {
    fn new(name: &'static str, command: &str) -> Self {
        let command = command.split_whitespace().map(str::to_owned).collect();
        Self { name, env: &[], command }
    }

    /// The command as one would type it.
    fn shown(&self) -> String {
        let env = self.env.iter().map(|(key, value)| format!("{key}='{value}' "));
        env.collect::<String>() + &self.command.join(" ")
    }

    fn run(&self, root: &Path) -> Result<()> {
        println!("--- {}: {}", self.name, self.shown());
        let start = Instant::now();
        let (program, arguments) = self.command.split_first().expect("a step has a command");
        let status = Command::new(program)
            .args(arguments)
            .envs(self.env.iter().copied())
            .current_dir(root)
            .status()
            .with_context(|| format!("cannot start {program}"))?;
        let seconds = start.elapsed().as_secs_f64();
        if !status.success() {
            bail!("{} failed after {seconds:.1} s; run it again: {}", self.name, self.shown());
        }
        println!("--- {}: ok in {seconds:.1} s", self.name);
        Ok(())
    }
}

/// Runs the gate in `root`, each fuzz target for `fuzz_seconds`.
pub(crate) fn run(root: &Path, fuzz_seconds: u32) -> Result<()> {
    let start = Instant::now();
    let steps = steps(has_deny(), fuzz_seconds);
    for step in &steps {
        step.run(root)?;
    }
    println!("--- gate: {} steps ok in {} s", steps.len(), start.elapsed().as_secs());
    Ok(())
}

/// Cheap steps first, so that a slip is told within seconds.
fn steps(has_deny: bool, fuzz_seconds: u32) -> Vec<Step> {
    let mut steps =
        vec![Step::new("fmt", "cargo fmt --all --check"), Step::new("tidy", "cargo xtask tidy")];
    if !has_deny {
        // Unoptimised: it runs for a second.
        let install = format!("cargo install cargo-deny --version {DENY_VERSION} --locked --debug");
        steps.push(Step::new("install cargo-deny, once, about 2 minutes", &install));
    }
    let doc = Step::new("doc", "cargo doc --workspace --no-deps --locked");
    steps.extend([
        Step::new("deny", "cargo deny check -D unmatched-skip bans licenses sources"),
        Step::new("clippy", "cargo clippy --workspace --all-targets --locked -- -D warnings"),
        Step::new("test", "cargo test --workspace --locked"),
        Step { env: &[("RUSTDOCFLAGS", "-D warnings")], ..doc },
        Step::new("fuzz", &format!("fuzz/smoke.sh {fuzz_seconds}")),
    ]);
    steps
}

/// Whether the machine has cargo-deny, whatever its version.
fn has_deny() -> bool {
    let probe = Command::new("cargo").args(["deny", "--version"]).output();
    probe.is_ok_and(|output| output.status.success())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_step_says_how_to_run_it_again() {
        let step = Step { env: &[("A", "b c")], ..Step::new("oops", "false --all") };
        let error = step.run(Path::new(".")).expect_err("false fails").to_string();
        assert!(error.starts_with("oops failed after "), "{error}");
        assert!(error.ends_with("; run it again: A='b c' false --all"), "{error}");
    }

    #[test]
    fn a_step_that_cannot_start_fails() {
        let error = Step::new("oops", "no-such-program").run(Path::new("."));
        assert_eq!(error.expect_err("no such program").to_string(), "cannot start no-such-program");
    }

    #[test]
    fn the_gate_passes_its_options_on() {
        let shown =
            |has_deny| -> Vec<String> { steps(has_deny, 60).iter().map(Step::shown).collect() };
        assert_eq!(shown(true).last().map(String::as_str), Some("fuzz/smoke.sh 60"));
        assert!(shown(true)[2].starts_with("cargo deny check "), "{:?}", shown(true));
        assert!(shown(false)[2].starts_with("cargo install cargo-deny "), "{:?}", shown(false));
    }
}
