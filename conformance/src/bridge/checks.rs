//! What was checked, a line each.

use std::fmt;
use std::io::Write;

/// Counts, and where each check is told.
pub struct Checks {
    out: Box<dyn Write>,
    passed: usize,
    failures: Vec<String>,
}

impl fmt::Debug for Checks {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { passed, failures, .. } = self;
        out.debug_struct("Checks").field("passed", passed).field("failures", failures).finish()
    }
}

impl Checks {
    /// None yet; each will be a line of `out`.
    pub fn new(out: Box<dyn Write>) -> Self {
        Self { out, passed: 0, failures: Vec::new() }
    }

    /// How many held.
    pub fn passed(&self) -> usize {
        self.passed
    }

    /// Those that did not hold, and what was seen instead.
    pub fn failures(&self) -> &[String] {
        &self.failures
    }

    /// One check; `seen` is told where it does not hold.
    ///
    /// # Errors
    ///
    /// Nobody reads what is told any more.
    pub fn that(&mut self, scene: &str, what: &str, holds: bool, seen: &str) -> anyhow::Result<()> {
        if holds {
            self.passed += 1;
            writeln!(self.out, "ok   {scene}: {what}")?;
        } else {
            let failure = format!("{scene}: {what}\n     {seen}");
            writeln!(self.out, "FAIL {failure}")?;
            self.failures.push(failure);
        }
        Ok(())
    }
}
