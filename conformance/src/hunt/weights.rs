//! Weights that change: across a sleep that fak knows of, and behind its back.
//! Invariant: what is said to fak of the weights is so, and it is said before anybody asks again.

use anyhow::Context;
use serde_json::json;

use super::lane::{BEHIND_DEADLINE, Lane};
use crate::fak::{Acted, DEADLINE};
use crate::session::{post, until};
use crate::target::{Target, weight_version};

/// What a trainer does between a sleep and a wake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Training {
    /// Nothing: the weights are what they were.
    None,
    /// It loads others.
    Silent,
    /// It loads others, and gives them a version.
    Versioned,
}

impl<T: Target> Lane<T> {
    /// The engine sleeps for a trainer, who may change its weights, and wakes.
    pub(super) async fn rollout(&mut self, under_way: usize) -> anyhow::Result<()> {
        let asked = self.begin(under_way)?;
        let number = self.draw.rng.usize(0..self.prey.len());
        let (sleep, training) = self.draw.rollout();
        let on = format!("workers/{}", self.prey[number].id);
        let acting = self.fak.begin_act(&on, "sleep", &sleep)?;
        let slept = acting.finish(DEADLINE).await.with_context(|| format!("{sleep} hangs"))?;
        let slept = Acted::read(&slept)?;
        self.tally.act("rollout", &slept);
        self.was_acted_on(&slept);
        if slept.status == 200 {
            if training != Training::None {
                self.train(number, training == Training::Versioned).await?;
            }
            // Who takes care of it wakes it.
            self.mend().await?;
        }
        self.aftermath(asked).await
    }

    /// Weights change under a serving engine, whose version tells of it.
    pub(super) async fn weights_behind(&mut self, under_way: usize) -> anyhow::Result<()> {
        let asked = self.begin(under_way)?;
        let number = self.draw.rng.usize(0..self.prey.len());
        self.tally.steps += 1;
        self.tally.accidents += 1;
        let version = self.train(number, true).await?;
        let id = self.prey[number].id.clone();
        until("fak to know the weights' version", async || {
            Ok(self.fak.worker(&id).await?["weight_version"] == version.as_str())
        })
        .await?;
        let prey = &mut self.prey[number];
        prey.weights_told = prey.weights;
        self.aftermath(asked).await
    }

    /// Loads other weights; the engine tells their version where it `is_versioned`.
    async fn train(&mut self, number: usize, is_versioned: bool) -> anyhow::Result<String> {
        let prey = &mut self.prey[number];
        prey.weights += 1;
        prey.doubt();
        prey.engine.put_weights(prey.weights);
        let version = weight_version(prey.weights);
        self.reload(number).await?;
        if is_versioned {
            let call = post("/update_weight_version", &json!({"new_version": version}));
            self.prey[number].client.call(&call, BEHIND_DEADLINE).await?;
        }
        Ok(version)
    }
}
