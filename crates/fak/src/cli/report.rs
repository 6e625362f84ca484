//! What `fak run` says: one JSON document, or lines as calls go by.
//!
//! Invariant: a number that nobody gave is absent (null, or `?` in text), never 0; text of an
//! engine cannot steer the terminal that shows it.

use std::io::{self, Write};

use serde::Serialize;

/// The whole run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// `vllm` or `sim`.
    pub engine: &'static str,
    /// The worker's id.
    pub worker: String,
    /// The calls, in the order of the trace.
    pub calls: Vec<Call>,
    /// All of them together.
    pub summary: Summary,
}

/// One call.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Call {
    /// Its place in the trace, from 0.
    pub index: usize,
    /// The tool.
    pub tool: String,
    /// What the floor said.
    pub verdict: Verdict,
    /// Why it was denied; null where it was allowed.
    pub reason: Option<String>,
    /// How it ended.
    pub status: Status,
    /// Prompt tokens, as the engine counted.
    pub prompt_tokens: Option<u64>,
    /// Output tokens, as the engine counted.
    pub output_tokens: Option<u64>,
    /// From the request to the first text, in milliseconds.
    pub ttft_ms: Option<f64>,
    /// Prompt tokens that fak claimed to be cached, at dispatch; null where it could not know.
    pub claimed_tokens: Option<u64>,
    /// Prompt tokens that the engine reports to have taken from its caches; null where it does not
    /// report.
    pub cached_tokens: Option<u64>,
    /// The text.
    pub text: String,
    /// How the text ended, in the engine's word; null where it did not say.
    pub finish_reason: Option<String>,
    /// What went wrong; null where nothing did.
    pub error: Option<String>,
}

impl Call {
    /// A call that is allowed, and of which nothing is known yet.
    #[must_use]
    pub fn new(index: usize, tool: String) -> Self {
        Self {
            index,
            tool,
            verdict: Verdict::Allow,
            reason: None,
            status: Status::Ok,
            prompt_tokens: None,
            output_tokens: None,
            ttft_ms: None,
            claimed_tokens: None,
            cached_tokens: None,
            text: String::new(),
            finish_reason: None,
            error: None,
        }
    }
}

/// What the floor said.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// The call goes on.
    Allow,
    /// Nothing is sent.
    Deny,
}

/// How a call ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// The engine finished it.
    Ok,
    /// The floor denied it; nothing was sent.
    Denied,
    /// The engine refused, failed or aborted it.
    Error,
    /// The user stopped it.
    Cancelled,
}

impl Status {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Denied => "denied",
            Self::Error => "error",
            Self::Cancelled => "cancelled",
        }
    }
}

/// All calls together.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// How many there were.
    pub calls: usize,
    /// Allowed by the floor.
    pub allowed: usize,
    /// Denied by it.
    pub denied: usize,
    /// Allowed, and then neither finished nor denied: errors and cancellations.
    pub failed: usize,
    /// Where the floor came from.
    pub policy: Policy,
    /// Output tokens, over the calls that tell.
    pub output_tokens: u64,
    /// Claimed tokens, over the calls that have a claim; null where none has.
    pub claimed_tokens: Option<u64>,
    /// Cached tokens, over the calls that tell; null where none does.
    pub cached_tokens: Option<u64>,
    /// The engine's KV events while the run lasted; null where none could be heard.
    pub events: Option<Events>,
}

/// Where the floor came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Policy {
    /// There was none: every call was allowed.
    None,
    /// `--policy`.
    File,
    /// The trace's own.
    Trace,
}

/// KV events that were taken in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Events {
    /// Batches.
    pub batches: u64,
    /// Stores announced.
    pub stored: u64,
    /// Removals announced.
    pub removed: u64,
    /// Announcements that all blocks are gone.
    pub cleared: u64,
    /// Gaps in the sequence, closed later or not.
    pub gaps: u64,
}

impl Summary {
    /// Adds the calls up.
    #[must_use]
    pub fn of(calls: &[Call], policy: Policy, events: Option<Events>) -> Self {
        let count = |wanted: &dyn Fn(&Call) -> bool| calls.iter().filter(|c| wanted(c)).count();
        let failed = |call: &Call| matches!(call.status, Status::Error | Status::Cancelled);
        Self {
            calls: calls.len(),
            allowed: count(&|call| call.verdict == Verdict::Allow),
            denied: count(&|call| call.verdict == Verdict::Deny),
            failed: count(&failed),
            policy,
            output_tokens: calls.iter().filter_map(|call| call.output_tokens).sum(),
            claimed_tokens: sum_of_known(calls.iter().map(|call| call.claimed_tokens)),
            cached_tokens: sum_of_known(calls.iter().map(|call| call.cached_tokens)),
            events,
        }
    }
}

fn sum_of_known(values: impl Iterator<Item = Option<u64>>) -> Option<u64> {
    values.flatten().fold(None, |sum, value| Some(sum.unwrap_or(0).saturating_add(value)))
}

/// Writes a run as it goes by. With `json`, nothing until the end.
#[derive(Debug)]
pub struct Printer<W> {
    out: W,
    json: bool,
    at_line_start: bool,
}

impl<W: Write> Printer<W> {
    /// A printer to `out`.
    pub fn new(out: W, json: bool) -> Self {
        Self { out, json, at_line_start: true }
    }

    /// A call begins.
    ///
    /// # Errors
    ///
    /// Of the writer, as for all below.
    pub fn call(&mut self, index: usize, tool: &str, verdict: Verdict) -> io::Result<()> {
        if self.json {
            return Ok(());
        }
        let verdict = match verdict {
            Verdict::Allow => "allow",
            Verdict::Deny => "deny",
        };
        write!(self.out, "#{index} ")?;
        self.plain(tool)?;
        writeln!(self.out, ": {verdict}")?;
        self.at_line_start = true;
        Ok(())
    }

    /// A piece of its text came.
    ///
    /// # Errors
    ///
    /// Of the writer.
    pub fn text(&mut self, text: &str) -> io::Result<()> {
        if self.json || text.is_empty() {
            return Ok(());
        }
        self.plain(text)?;
        self.at_line_start = text.ends_with('\n');
        self.out.flush()
    }

    /// A call is over.
    ///
    /// # Errors
    ///
    /// Of the writer.
    pub fn done(&mut self, call: &Call) -> io::Result<()> {
        if self.json {
            return Ok(());
        }
        if !self.at_line_start {
            writeln!(self.out)?;
        }
        write!(self.out, "  {}", call.status.as_str())?;
        if call.status == Status::Denied {
            return writeln!(self.out, " {}", call.reason.as_deref().unwrap_or_default());
        }
        write!(
            self.out,
            ": prompt {}, output {}, ttft {} ms, claimed {}, cached {}",
            known(call.prompt_tokens),
            known(call.output_tokens),
            call.ttft_ms.map_or_else(|| "?".to_owned(), |ms| format!("{ms:.1}")),
            known(call.claimed_tokens),
            known(call.cached_tokens),
        )?;
        if let Some(error) = &call.error {
            write!(self.out, "; ")?;
            self.plain(error)?;
        }
        writeln!(self.out)
    }

    /// The run is over.
    ///
    /// # Errors
    ///
    /// Of the writer.
    pub fn summary(&mut self, report: &Report) -> io::Result<()> {
        if self.json {
            serde_json::to_writer_pretty(&mut self.out, report)?;
            writeln!(self.out)?;
            return self.out.flush();
        }
        let sum = &report.summary;
        write!(
            self.out,
            "{} calls: {} allowed, {} denied, {} failed; output {}, claimed {}, cached {}",
            sum.calls,
            sum.allowed,
            sum.denied,
            sum.failed,
            sum.output_tokens,
            known(sum.claimed_tokens),
            known(sum.cached_tokens),
        )?;
        match &sum.events {
            None => write!(self.out, "; no KV events heard")?,
            Some(e) => write!(
                self.out,
                "; KV events: {} batches, {} stored, {} removed, {} cleared, {} gaps",
                e.batches, e.stored, e.removed, e.cleared, e.gaps
            )?,
        }
        if sum.policy == Policy::None {
            write!(self.out, "; no policy: every call was allowed")?;
        }
        writeln!(self.out)?;
        self.out.flush()
    }

    /// Writes text of somebody else's: control characters, with which it could move the cursor or
    /// retitle the terminal, become a replacement character; newline and tab stay.
    fn plain(&mut self, text: &str) -> io::Result<()> {
        let shown = |c: char| if c.is_control() && c != '\n' && c != '\t' { '\u{fffd}' } else { c };
        let text: String = text.chars().map(shown).collect();
        self.out.write_all(text.as_bytes())
    }
}

fn known(value: Option<u64>) -> String {
    value.map_or_else(|| "?".to_owned(), |value| value.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(verdict: Verdict, status: Status, claimed: Option<u64>, cached: Option<u64>) -> Call {
        Call {
            verdict,
            reason: (verdict == Verdict::Deny).then(|| "POLICY_BLOCK".to_owned()),
            status,
            prompt_tokens: claimed,
            output_tokens: Some(3),
            ttft_ms: Some(1.25),
            claimed_tokens: claimed,
            cached_tokens: cached,
            ..Call::new(0, "search".to_owned())
        }
    }

    #[test]
    fn unknown_numbers_stay_unknown_in_the_sums() {
        let calls = [
            call(Verdict::Allow, Status::Ok, None, Some(0)),
            call(Verdict::Allow, Status::Error, None, None),
            call(Verdict::Deny, Status::Denied, None, None),
        ];
        let summary = Summary::of(&calls, Policy::None, None);
        assert_eq!((summary.calls, summary.allowed, summary.denied, summary.failed), (3, 2, 1, 1));
        assert_eq!((summary.claimed_tokens, summary.cached_tokens), (None, Some(0)));
    }

    fn printed(json: bool, print: impl FnOnce(&mut Printer<&mut Vec<u8>>)) -> String {
        let mut out = Vec::new();
        print(&mut Printer::new(&mut out, json));
        String::from_utf8(out).expect("UTF-8")
    }

    #[test]
    fn lines_tell_a_call() {
        let text = printed(false, |printer| {
            printer.call(0, "search", Verdict::Allow).expect("a vector takes all");
            printer.text("one").expect("a vector takes all");
            printer.text(" two").expect("a vector takes all");
            let ok = call(Verdict::Allow, Status::Ok, Some(96), None);
            printer.done(&ok).expect("a vector takes all");
            printer.call(1, "rm", Verdict::Deny).expect("a vector takes all");
            let denied = call(Verdict::Deny, Status::Denied, None, None);
            printer.done(&denied).expect("a vector takes all");
        });
        assert_eq!(
            text,
            "#0 search: allow\none two\n  \
             ok: prompt 96, output 3, ttft 1.2 ms, claimed 96, cached ?\n\
             #1 rm: deny\n  denied POLICY_BLOCK\n"
        );
    }

    #[test]
    fn an_engines_text_cannot_steer_the_terminal() {
        let text = printed(false, |printer| {
            printer.text("a\x1b[2J\u{9b}31m\r\tb\n").expect("a vector takes all");
        });
        assert_eq!(text, "a\u{fffd}[2J\u{fffd}31m\u{fffd}\tb\n");
    }

    #[test]
    fn json_is_one_document_with_the_agreed_keys() {
        let calls = vec![call(Verdict::Deny, Status::Denied, None, None)];
        let summary = Summary::of(&calls, Policy::File, Some(Events::default()));
        let report = Report { engine: "sim", worker: "vllm".to_owned(), calls, summary };
        let text = printed(true, |printer| {
            printer.call(0, "search", Verdict::Deny).expect("a vector takes all");
            printer.text("x").expect("a vector takes all");
            printer.done(&report.calls[0]).expect("a vector takes all");
            printer.summary(&report).expect("a vector takes all");
        });
        let json: serde_json::Value = serde_json::from_str(&text).expect("one document");
        assert_eq!(json["calls"][0]["verdict"], "deny");
        assert_eq!(json["calls"][0]["status"], "denied");
        assert!(json["calls"][0]["claimed_tokens"].is_null());
        assert_eq!(json["summary"]["events"]["batches"], 0);
        let keys = |value: &serde_json::Value| {
            value.as_object().expect("an object").keys().cloned().collect::<Vec<_>>()
        };
        let agreed = [
            "index",
            "tool",
            "verdict",
            "reason",
            "status",
            "prompt_tokens",
            "output_tokens",
            "ttft_ms",
            "claimed_tokens",
            "cached_tokens",
            "text",
        ];
        assert_eq!(keys(&json["calls"][0])[..agreed.len()], agreed);
    }
}
