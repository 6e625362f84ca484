//! Scenes about rollouts: a trainer takes the device, and gives it back.

use serde_json::{Value, json};

use super::{Bridge, WORKER, full_blocks};
use crate::fak::Acted;
use crate::prompt::BLOCK_SIZE;
use crate::session::until;
use crate::target::Target;

/// Who holds the worker.
const HOLDER: &str = "trainer";

impl<T: Target> Bridge<T> {
    /// On an engine that can keep its tier.
    pub(super) async fn rollout_scenes(&mut self) -> anyhow::Result<()> {
        self.rollout_with_the_same_weights("201-203 +5").await?;
        self.rollout_with_other_weights("211-213 +5").await
    }

    async fn rollout_with_the_same_weights(&mut self, prompt: &str) -> anyhow::Result<()> {
        let scene = "rollout-same";
        let ask = self.warm_on_both(scene, prompt).await?;
        self.rollout_begins(scene).await?;
        let woken = self.act(&format!("workers/{WORKER}"), "wake", json!({})).await?;
        let holds = woken.status == 409 && woken.row["reason"] == "held";
        let what = "nobody else wakes what a trainer holds";
        self.checks.that(scene, what, holds, &woken.body.to_string())?;
        self.turns_others_away(scene, &ask).await?;
        let ended = self.rollout_ends(scene, json!({"weights": "same"})).await?;
        let rows = rows(&ended);
        let holds = rows.iter().any(|row| row["tiers"]["cpu"] == "preserved");
        self.checks.that(scene, "a row says that the tier is preserved", holds, &told(&ended))?;
        let (told, hits) = self.ask(&ask).await?;
        let all = full_blocks(&ask) * BLOCK_SIZE as u64;
        let claims = (told.claimed_on("gpu"), told.claimed_on("cpu"));
        let holds = claims == (0, all) && (hits.gpu, hits.connector) == (0, all);
        let what = "the tier is claimed, and the engine reuses just that";
        self.checks.that(scene, what, holds, &format!("{told:?} {hits:?}"))
    }

    async fn rollout_with_other_weights(&mut self, prompt: &str) -> anyhow::Result<()> {
        let scene = "rollout-loaded";
        let ask = self.warm_on_both(scene, prompt).await?;
        self.rollout_begins(scene).await?;
        let staged = self.rollout("end", json!({"weights": "loaded", "stage": "weights"})).await?;
        let holds = staged.status == 200 && staged.body["workers"][0]["phase"] == "waking";
        let what = "the weights' memory comes back alone";
        self.checks.that(scene, what, holds, &staged.body.to_string())?;
        self.engine.put_weights(self.weights);
        self.weights += 1;
        self.reload_weights().await?;
        let version = json!({"weights": "loaded", "weight_version": "v8"});
        let ended = self.rollout_ends(scene, version).await?;
        let rows = rows(&ended);
        let holds = rows.iter().any(|row| {
            row["tiers"]["cpu"] == "forgotten" && row["asked"].to_string().contains("external=true")
        });
        self.checks.that(scene, "a row says that the kept tier is gone", holds, &told(&ended))?;
        let holds = ended.body["workers"][0]["weight_version"] == "v8";
        self.checks.that(scene, "the weights have the version that was said", holds, "")?;
        self.starts_anew(scene, &ask).await
    }

    async fn rollout_begins(&mut self, scene: &str) -> anyhow::Result<()> {
        let began = self.rollout("begin", json!({"level": 1, "keep_tier": true})).await?;
        let worker = &began.body["workers"][0];
        let holds = began.status == 200
            && worker["outcome"] == "done"
            && worker["phase"] == "sleeping"
            && worker["held_by"] == HOLDER;
        let what = "a trainer takes the device, and holds the worker";
        self.checks.that(scene, what, holds, &told(&began))?;
        let holds = worker["gpu_free"] == true && worker["running"] == 0;
        self.checks.that(scene, "and is told that nothing runs there", holds, &told(&began))?;
        self.shows(scene, "sleeping").await
    }

    async fn rollout_ends(&mut self, scene: &str, body: Value) -> anyhow::Result<Acted> {
        let ended = self.rollout("end", body).await?;
        let worker = &ended.body["workers"][0];
        let holds = ended.status == 200 && worker["serving"] == true && worker["held_by"].is_null();
        let what = "the trainer gives it back, and it serves";
        self.checks.that(scene, what, holds, &told(&ended))?;
        until("the worker to serve with exact beliefs", async || {
            let worker = self.fak.worker(WORKER).await?;
            Ok(worker["serving"] == true && worker["state"] == "exact")
        })
        .await?;
        self.shows(scene, "serving").await?;
        Ok(ended)
    }

    async fn rollout(&self, verb: &str, mut body: Value) -> anyhow::Result<Acted> {
        body["holder"] = HOLDER.into();
        self.act("rollout", verb, body).await
    }
}

fn rows(ended: &Acted) -> Vec<Value> {
    ended.body["workers"][0]["rows"].as_array().cloned().unwrap_or_default()
}

fn told(acted: &Acted) -> String {
    format!("{} {}", acted.status, acted.body)
}
