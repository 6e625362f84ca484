//! Does an engine that woke with the weights it had answer as it did before it slept?
//!
//! A fixed prompt, greedy, goes to each route and model that answers it: before the sleep, and
//! again after the wake, before anybody else's request. What it costs: some sixteen tokens a route,
//! one after the other. It says nothing of weights that are meant to be others; and where requests
//! were kept through the sleep, an engine whose numbers depend on who shares a batch may answer
//! otherwise for that reason alone.
//!
//! Invariant: a route that answered before and does not now, or answers otherwise, is a mismatch;
//! and a salt of its own keeps each prompt out of everybody's cache, this one's earlier ones
//! included.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Value, json};

use super::own;
use crate::engine::{Data, Engine, Models};

/// Words that every tokenizer knows, in an order that leaves something to predict.
const PROMPT: &str = "The ship left the harbour at dawn, and by noon the wind had";
/// Tokens of an answer: enough to differ, few enough to cost nothing.
const TOKENS_MAX: u32 = 16;
/// Models that are asked: the base and its first adapters.
const MODELS_MAX: usize = 8;
/// Bytes of an answer that are compared.
const TEXT_BYTES_MAX: usize = 512;
/// Time for one answer.
const WITHIN: Duration = Duration::from_secs(30);

/// What canaries are sent to.
pub(super) struct Target<'a> {
    pub(super) engine: &'a Engine,
    pub(super) models: &'a Models,
    /// The data-parallel ranks, as far as they are known: each has weights of its own.
    pub(super) ranks: Vec<u32>,
}

/// What each route answered, by its name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Record(BTreeMap<String, String>);

impl Record {
    /// As it was stored; `None` where it was not, or not whole.
    pub(super) fn from_json(stored: &Value) -> Option<Self> {
        serde_json::from_value(stored.clone()).ok().map(Self).filter(|record| !record.is_empty())
    }

    pub(super) fn json(&self) -> Value {
        json!(self.0)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Asks every route, and keeps what those say that answer.
    pub(super) async fn take(to: &Target<'_>) -> Self {
        let mut record = Self::default();
        for route in routes(to) {
            if let Some(text) = route.ask(to.engine).await {
                record.0.insert(route.name, text);
            }
        }
        record
    }

    /// The routes of this record that `after` does not answer alike; that do not answer, where
    /// other weights may answer otherwise.
    fn differs(&self, after: &Self, is_same_weights: bool) -> Vec<String> {
        let is_alike = |name: &String, text: &String| match after.0.get(name) {
            Some(now) => !is_same_weights || now == text,
            None => false,
        };
        let differs = self.0.iter().filter(|(name, text)| !is_alike(name, text));
        differs.map(|(name, _)| name.clone()).collect()
    }
}

/// What to make of an engine's answers after a wake.
pub(super) struct Asks {
    /// What it answered before, where that was recorded.
    pub(super) before: Option<Record>,
    /// Whether it has the weights from then.
    pub(super) is_same_weights: bool,
}

impl Asks {
    /// Asks the engine.
    pub(super) async fn run(&self, to: &Target<'_>) -> Found {
        let now = Record::take(to).await;
        let differs = match &self.before {
            Some(before) => before.differs(&now, self.is_same_weights),
            None => Vec::new(),
        };
        let outcome = if !differs.is_empty() {
            Outcome::Mismatch
        } else if self.is_same_weights && self.before.is_some() {
            Outcome::Same
        } else if now.is_empty() {
            Outcome::NotRun
        } else {
            Outcome::Recorded
        };
        Found { outcome, differs, now }
    }
}

/// What a canary showed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Every route answers as before.
    Same,
    /// There was nothing to compare with; the answers are in the row.
    Recorded,
    /// A route answers otherwise, or no more.
    Mismatch,
    /// Nobody was asked, or nobody answered.
    NotRun,
}

impl Outcome {
    /// The word.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Same => "same",
            Self::Recorded => "recorded",
            Self::Mismatch => "mismatch",
            Self::NotRun => "not_run",
        }
    }

    /// The value that a row tells.
    #[must_use]
    pub fn of(observed: &Value) -> Self {
        let told = observed.pointer("/canary/outcome").and_then(Value::as_str);
        let all = [Self::Same, Self::Recorded, Self::Mismatch];
        all.into_iter().find(|word| Some(word.as_str()) == told).unwrap_or(Self::NotRun)
    }
}

/// What came of a check.
pub(super) struct Found {
    pub(super) outcome: Outcome,
    differs: Vec<String>,
    now: Record,
}

impl Found {
    /// For the verdict.
    pub(super) fn is_as_before(&self) -> Option<bool> {
        match self.outcome {
            Outcome::Same => Some(true),
            Outcome::Mismatch => Some(false),
            Outcome::Recorded | Outcome::NotRun => None,
        }
    }

    /// For the row.
    pub(super) fn json(&self) -> Value {
        let mut told = json!({ "outcome": self.outcome.as_str(), "answers": self.now.json() });
        if !self.differs.is_empty() {
            told["differs"] = json!(self.differs);
        }
        told
    }
}

/// One route of one model on one rank.
struct Route {
    name: String,
    path: Data,
    rank: Option<u32>,
    body: Value,
}

fn routes(to: &Target<'_>) -> Vec<Route> {
    let ranks: Vec<Option<u32>> = match &to.ranks[..] {
        [] | [_] => vec![None],
        ranks => ranks.iter().copied().map(Some).collect(),
    };
    let mut routes = Vec::new();
    for model in to.models.names().take(MODELS_MAX) {
        for rank in &ranks {
            let chat = json!([{ "role": "user", "content": PROMPT }]);
            for (word, path, field, prompt) in [
                ("completions", Data::Completions, "prompt", json!(PROMPT)),
                ("chat", Data::ChatCompletions, "messages", chat),
            ] {
                let mut body = json!({
                    "model": &**model,
                    "max_tokens": TOKENS_MAX,
                    "temperature": 0,
                    "seed": 7,
                    "cache_salt": format!("fak-canary-{}", fastrand::u64(..)),
                });
                body[field] = prompt;
                let on = rank.map(|rank| format!(" rank {rank}")).unwrap_or_default();
                routes.push(Route { name: format!("{word} {model}{on}"), path, rank: *rank, body });
            }
        }
    }
    routes
}

impl Route {
    /// What it answers; nothing where it does not, or where the engine cut the answer short.
    async fn ask(&self, engine: &Engine) -> Option<String> {
        let answer = own::ask(engine, self.path, &self.body, self.rank, WITHIN).await.ok()?;
        if !answer.status.is_success() {
            return None;
        }
        text(&serde_json::from_slice(&answer.body).ok()?)
    }
}

/// The words of an answer that came to its own end.
fn text(answer: &Value) -> Option<String> {
    let choice = answer.pointer("/choices/0")?;
    let is_whole = |reason: &str| matches!(reason, "stop" | "length");
    choice.get("finish_reason").and_then(Value::as_str).filter(|reason| is_whole(reason))?;
    let message = choice.get("message").unwrap_or(choice);
    let parts = ["text", "reasoning_content", "reasoning", "content"];
    let said = parts.iter().filter_map(|part| message.get(part).and_then(Value::as_str));
    let said: String = said.collect();
    Some(said[..said.floor_char_boundary(TEXT_BYTES_MAX)].to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(answers: &[(&str, &str)]) -> Record {
        Record(answers.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect())
    }

    #[test]
    fn a_route_that_answers_otherwise_or_no_more_is_named() {
        let before = record(&[("completions base", "1 2 3"), ("completions adapter", "4 5 6")]);
        let same = |after: &[(&str, &str)]| before.differs(&record(after), true);
        assert!(
            same(&[("completions base", "1 2 3"), ("completions adapter", "4 5 6")]).is_empty()
        );
        let mixed = [("completions base", "1 2 3"), ("completions adapter", "1 2 3")];
        assert_eq!(same(&mixed), ["completions adapter"]);
        assert_eq!(same(&mixed[..1]), ["completions adapter"]);
        assert!(before.differs(&record(&mixed), false).is_empty(), "other weights may differ");
        assert_eq!(before.differs(&record(&mixed[..1]), false), ["completions adapter"]);
    }

    #[test]
    fn an_answer_that_the_engine_cut_short_is_none() {
        let unary = |reason: &str| json!({"choices": [{"text": "a", "finish_reason": reason}]});
        assert_eq!(text(&unary("length")).as_deref(), Some("a"));
        assert_eq!(text(&unary("abort")), None);
        let chat = json!({"choices": [{"finish_reason": "stop",
            "message": {"reasoning_content": "hm", "content": "b"}}]});
        assert_eq!(text(&chat).as_deref(), Some("hmb"));
    }

    #[test]
    fn what_was_not_stored_whole_is_no_record() {
        let kept = record(&[("completions m", "x")]);
        assert_eq!(Record::from_json(&kept.json()), Some(kept));
        assert_eq!(Record::from_json(&Value::Null), None);
        assert_eq!(Record::from_json(&json!({"truncated_bytes": 9, "head": "{"})), None);
    }
}
