//! Scenes about the connector's tier across sleeps that keep it, and about weights that change
//! meanwhile.

use serde_json::{Value, json};

use super::{Bridge, ENGINE_DEADLINE, WORKER, ask_for, full_blocks};
use crate::fak::{Ask, DEADLINE};
use crate::metrics::Values;
use crate::prompt::BLOCK_SIZE;
use crate::session::{post, until};
use crate::target::{Target, weight_version};

/// Tokens of a request that is asleep in the middle of its answer.
const KEPT_TOKENS: u32 = 200;

/// fak's exit code where it refused and nothing changed.
const EXIT_REFUSED: i32 = 2;

impl<T: Target> Bridge<T> {
    /// On an engine that can keep its tier.
    pub(super) async fn kept_scenes(&mut self) -> anyhow::Result<()> {
        self.keep_with_the_same_weights("1-3 +5").await?;
        self.keep_with_other_weights("loaded", "11-13 +5").await?;
        self.keep_with_other_weights("changed", "21-23 +5").await?;
        self.keep_under_a_running_request("31-33 +5").await?;
        self.rollout_scenes().await?;
        self.no_claim_was_over().await
    }

    /// A prompt that is proven on both tiers.
    pub(super) async fn warm_on_both(&mut self, scene: &str, prompt: &str) -> anyhow::Result<Ask> {
        let ask = ask_for(prompt, None)?;
        self.store(&ask, "cpu").await?;
        self.warms(scene, &ask).await?;
        Ok(ask)
    }

    /// An engine as it was released takes the argument, answers 200 and evicts: it is never sent.
    pub(super) async fn keep_refused(&mut self, prompt: &str) -> anyhow::Result<()> {
        let scene = "keep-refused";
        let ask = self.warm_on_both(scene, prompt).await?;
        let before = self.engine_counts().await?;
        let seen_before = self.last_row().await?["seq"].as_u64().unwrap_or(0);
        let sleep = ["worker", "sleep", WORKER, "--level", "1", "--keep-tier", "--json"];
        let (code, told) = self.command(&sleep).await?;
        let seen = format!("exit code {code:?}: {told}");
        let holds = code == Some(EXIT_REFUSED) && told.contains("allow-evict");
        let what = "the command is refused with exit code 2, and tells the way out";
        self.checks.that(scene, what, holds, &seen)?;
        let row = json!({"action": "sleep", "phase": "serving", "kv": "preserved",
            "tiers": {"gpu": "preserved", "cpu": "preserved"}, "warm_demoted": false,
            "serving": true, "evidence": "not_sent", "reason": "keep_tier_not_proven"});
        let refused = self.last_row().await?;
        let is_new = refused["seq"].as_u64() > Some(seen_before);
        self.checks.that(scene, "it has a row of its own", is_new, &refused.to_string())?;
        self.row(scene, "which says that nothing was sent", &refused, &row)?;
        let now = self.engine_counts().await?;
        let moved: Vec<_> = COUNTED.iter().filter(|name| gained(&now, &before, name) > 0).collect();
        let what = "no counter of the engine's has moved";
        self.checks.that(scene, what, moved.is_empty(), &format!("{moved:?} did"))?;
        self.shows(scene, "serving").await?;
        self.warms(scene, &ask).await
    }

    /// No tier was cleared, and yet nothing of it can match.
    pub(super) async fn weights_behind_its_back(&mut self, prompt: &str) -> anyhow::Result<()> {
        let scene = "weights";
        let ask = self.warm_on_both(scene, prompt).await?;
        let version = weight_version(self.weights);
        let call = post("/update_weight_version", &json!({"new_version": version}));
        let answer = self.client.call(&call, ENGINE_DEADLINE).await?;
        anyhow::ensure!(answer.status == 200, "{}", String::from_utf8_lossy(&answer.body));
        until("fak to know the weights' version", async || {
            Ok(self.fak.worker(WORKER).await?["weight_version"] == version.as_str())
        })
        .await?;
        let row = json!({"action": "weights", "kv": "unknown", "weight_version": version,
            "tiers": {"gpu": "unknown", "cpu": "unknown"}, "serving": true});
        let noticed = self.last_row().await?;
        self.row(scene, "its row says that nobody knows what the tiers hold", &noticed, &row)?;
        // What is stored before the fence has opened is not believed.
        self.until_serving().await?;
        self.starts_anew(scene, &ask).await
    }

    async fn keep_with_the_same_weights(&mut self, prompt: &str) -> anyhow::Result<()> {
        let scene = "keep-same";
        let ask = self.warm_on_both(scene, prompt).await?;
        self.sleep_keeping(scene).await?;
        let woken = self.wake(json!({"weights": "same"})).await?;
        let row = json!({"action": "wake", "phase": "serving", "kv": "unknown",
            "tiers": {"gpu": "unknown", "cpu": "preserved"}, "serving": true,
            "reason": "confirmed"});
        self.row(scene, "the wake's row says that the tier is preserved", &woken, &row)?;
        let (told, hits) = self.ask(&ask).await?;
        let all = full_blocks(&ask) * BLOCK_SIZE as u64;
        let seen = format!("{told:?} {hits:?}");
        let holds = (told.claimed_on("gpu"), told.claimed_on("cpu")) == (0, all);
        self.checks.that(scene, "the cpu tier is claimed, and nothing else", holds, &seen)?;
        let holds = told.cached == Some(all) && (hits.gpu, hits.connector) == (0, all);
        self.checks.that(scene, "and the engine reuses just that", holds, &seen)?;
        until("the blocks to be proven on the gpu", async || {
            Ok(self.blocks("gpu").await? >= full_blocks(&ask))
        })
        .await?;
        self.warms(scene, &ask).await
    }

    /// `loaded`: their owner has loaded them. `changed`: fak has the engine do it.
    async fn keep_with_other_weights(&mut self, how: &str, prompt: &str) -> anyhow::Result<()> {
        let scene = format!("keep-{how}");
        let ask = self.warm_on_both(&scene, prompt).await?;
        self.sleep_keeping(&scene).await?;
        self.engine.put_weights(self.weights);
        self.weights += 1;
        if how == "loaded" {
            self.reload_weights().await?;
        }
        let woken = self.wake(json!({"weights": how})).await?;
        let row = json!({"action": "wake", "phase": "serving", "kv": "forgotten",
            "tiers": {"gpu": "forgotten", "cpu": "forgotten"}, "warm_demoted": true,
            "serving": true, "reason": "confirmed"});
        self.row(&scene, "the wake's row says that the kept tier is gone too", &woken, &row)?;
        let reset = woken["asked"].to_string().contains("reset_external=true");
        self.checks.that(&scene, "and that fak has cleared it", reset, &woken.to_string())?;
        self.starts_anew(&scene, &ask).await
    }

    /// Without the plugin's flush fix a released engine dies of this at its first step.
    async fn keep_under_a_running_request(&mut self, prompt: &str) -> anyhow::Result<()> {
        let scene = "keep-running";
        let ask = self.warm_on_both(scene, prompt).await?;
        let long = Ask { max_tokens: KEPT_TOKENS, stream: true, ..ask.clone() };
        let mut running = self.fak.begin(&long)?;
        running.until(|answer| answer.chunks() >= 2, DEADLINE).await?;
        let body = json!({"level": 1, "keep_tier": true, "mode": "keep"});
        let slept = self.act(&format!("workers/{WORKER}"), "sleep", body).await?;
        let row = json!({"phase": "sleeping", "tiers": {"gpu": "forgotten", "cpu": "preserved"}});
        self.row(scene, "it sleeps under a request, its tier preserved", &slept.row, &row)?;
        let is_held = !running.so_far().is_complete;
        let so_far = String::from_utf8_lossy(&running.so_far().body).into_owned();
        self.checks.that(scene, "the request is held", is_held, &so_far)?;
        let woken = self.wake(json!({"weights": "same"})).await?;
        let row = json!({"phase": "serving", "tiers": {"gpu": "unknown", "cpu": "preserved"}});
        self.row(scene, "it wakes", &woken, &row)?;
        let answer = running.finish(DEADLINE).await?;
        let text = String::from_utf8_lossy(&answer.body);
        let holds = answer.is_complete && text.contains("\"finish_reason\":\"length\"");
        self.checks.that(scene, "and the request goes on to its end", holds, &text)
    }

    async fn sleep_keeping(&mut self, scene: &str) -> anyhow::Result<()> {
        let body = json!({"level": 1, "keep_tier": true});
        let slept = self.act(&format!("workers/{WORKER}"), "sleep", body).await?;
        let row = json!({"action": "sleep", "phase": "sleeping", "kv": "forgotten",
            "tiers": {"gpu": "forgotten", "cpu": "preserved"}, "serving": false,
            "evidence": "observed", "reason": "confirmed"});
        self.row(scene, "the sleep's row says that the tier is preserved", &slept.row, &row)?;
        self.shows(scene, "sleeping").await
    }

    async fn wake(&self, body: Value) -> anyhow::Result<Value> {
        Ok(self.act(&format!("workers/{WORKER}"), "wake", body).await?.row)
    }

    /// Other weights for the simulator; on a real engine, whose model is the only one there is,
    /// the same once more.
    pub(super) async fn reload_weights(&self) -> anyhow::Result<()> {
        let call = post("/collective_rpc", &json!({"method": "reload_weights"}));
        let answer = self.client.call(&call, ENGINE_DEADLINE).await?;
        anyhow::ensure!(answer.status == 200, "{}", String::from_utf8_lossy(&answer.body));
        Ok(())
    }
}

/// Counters of everything that a sleep or a request would move.
const COUNTED: [&str; 5] = [
    "request_success.length",
    "prefix_cache_queries",
    "external_prefix_cache_queries",
    "kv_offload_store_bytes",
    "kv_offload_load_bytes",
];

fn gained(now: &Values, before: &Values, name: &str) -> u64 {
    now.get(name, before).unwrap_or(0.0) as u64
}
