//! The prompts of the experiment, and what an engine makes of one.
//!
//! Invariant: the same seed gives the same prompts, and no two of an experiment begin with the same
//! block, up to the odds of 224 values a token.

use std::time::Duration;

use anyhow::{Context as _, bail};
use fak_wire::openai::{Api, Request, StreamEnd};
use http::HeaderMap;
use serde_json::json;
use tokio::time::Instant;

use crate::cli::bench::Workload;
use crate::engine::{Engine, Isolation, Stamp, Turn};

/// Tokens of each answer.
pub(super) const OUTPUT_TOKENS: u32 = 8;

/// Token ids that a prompt is made of: in every vocabulary, and above where special tokens lie.
const TOKENS: std::ops::Range<u32> = 32..256;

/// The prompts.
pub(super) struct Prompts {
    model: String,
    pub(super) count: u32,
    pub(super) tokens: u32,
    seed: u32,
}

/// An answer at temperature 0.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Output {
    text: String,
    token_ids: Vec<u32>,
}

impl Prompts {
    pub(super) fn of(workload: &Workload) -> Self {
        Self {
            model: workload.model.clone(),
            count: workload.requests,
            tokens: workload.prompt_tokens,
            seed: workload.seed,
        }
    }

    fn prompt(&self, index: u32) -> Vec<u32> {
        let mut rng = fastrand::Rng::with_seed(u64::from(self.seed) << 32 | u64::from(index));
        (0..self.tokens).map(|_| rng.u32(TOKENS)).collect()
    }

    /// Sends all prompts, one after the other, so that each answer depends on its prompt alone.
    pub(super) async fn play(&self, engine: &Engine) -> anyhow::Result<(Vec<Output>, Duration)> {
        let mut outputs = Vec::with_capacity(self.count as usize);
        let mut times = Vec::with_capacity(self.count as usize);
        for index in 0..self.count {
            let sent_at = Instant::now();
            let output = self.ask(engine, &self.prompt(index), OUTPUT_TOKENS).await;
            outputs.push(output.with_context(|| format!("prompt {index}"))?);
            times.push(sent_at.elapsed());
        }
        times.sort_unstable();
        let median = times.get(times.len().saturating_sub(1) / 2).copied().unwrap_or_default();
        Ok((outputs, median))
    }

    /// Makes the engine step without touching its caches: too short for a block.
    pub(super) async fn nudge(&self, engine: &Engine) -> anyhow::Result<()> {
        self.ask(engine, &[TOKENS.start], 1).await.map(drop)
    }

    async fn ask(&self, engine: &Engine, prompt: &[u32], tokens: u32) -> anyhow::Result<Output> {
        let body = json!({
            "model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0,
            "ignore_eos": true, "return_token_ids": true,
        });
        let request = Request::parse(Api::Completions, &serde_json::to_vec(&body)?)?;
        let turn = Turn { request, headers: HeaderMap::new(), identity: None, priority: None };
        let answered =
            engine.admit(turn, &Stamp::new(None, Isolation::Off, false))?.unary().await?;
        if answered.end != StreamEnd::Complete {
            bail!("the answer did not come to its end: {:?}", answered.end);
        }
        let usage = answered.answer.usage.context("the answer has no usage")?;
        if usage.prompt_tokens != prompt.len() as u64 {
            bail!("the engine saw {} of {} tokens", usage.prompt_tokens, prompt.len());
        }
        let choice = answered.answer.choices.into_iter().next().context("the answer is empty")?;
        Ok(Output { text: choice.text, token_ids: choice.token_ids })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_are_distinct_from_their_start_and_follow_from_the_seed() {
        let prompts = |seed| Prompts { model: String::new(), count: 64, tokens: 40, seed };
        let heads = |of: &Prompts| -> std::collections::BTreeSet<Vec<u32>> {
            (0..of.count).map(|index| of.prompt(index)[..16].to_vec()).collect()
        };
        assert_eq!(heads(&prompts(7)).len(), 64);
        assert_eq!(heads(&prompts(7)), heads(&prompts(7)));
        assert!(heads(&prompts(7)).is_disjoint(&heads(&prompts(8))));
    }
}
