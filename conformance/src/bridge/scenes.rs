//! The scenes: each warms a prompt, does something to the engine, and asks again.

use serde_json::json;

use super::{Bridge, ENGINE_DEADLINE, WORKER, ask_for};
use crate::fak::{Ask, DEADLINE, Fak, Settings};
use crate::session::until;
use crate::target::Target;

/// Pause between two looks of a fak that hardly ever looks: no scene takes that long.
const SELDOM_MS: u64 = 60_000;

/// A stream that does not end by itself while an engine is stopped under it.
const RUNNING_TOKENS: u32 = 900;

impl<T: Target> Bridge<T> {
    pub(super) async fn scenes(&mut self) -> anyhow::Result<()> {
        self.sleep_through_a_session(1, "1-3 +5").await?;
        self.sleep_through_a_session(2, "11-13 +5").await?;
        self.reset_of_the_gpu("21-23 +5").await?;
        self.reset_of_every_tier("31-33 +5").await?;
        self.pause_that_preserves("41-43 +5").await?;
        self.pause_that_clears("51-53 +5").await?;
        self.sleep_behind_its_back("61-63 +5").await?;
        self.nap_that_no_probe_sees("71-73 +5").await?;
        self.restart_in_the_middle("81-83 +5").await?;
        self.keep_refused("91-93 +5").await?;
        self.weights_behind_its_back("101-103 +5").await?;
        self.edges().await?;
        self.no_claim_was_over().await
    }

    /// A session's prompt, stored and claimed.
    async fn warm(&mut self, scene: &str, prompt: &str) -> anyhow::Result<Ask> {
        let ask = ask_for(prompt, Some(scene))?;
        self.store(&ask, "gpu").await?;
        self.warms(scene, &ask).await?;
        Ok(ask)
    }

    /// Cold, and warm again once the same prompt was stored anew.
    pub(super) async fn starts_anew(&mut self, scene: &str, ask: &Ask) -> anyhow::Result<()> {
        let wanted = self.blocks("gpu").await? + super::full_blocks(ask);
        self.is_cold(scene, ask).await?;
        until("fresh stores", async || Ok(self.blocks("gpu").await? >= wanted)).await?;
        self.warms(scene, ask).await
    }

    async fn sleep_through_a_session(&mut self, level: u8, prompt: &str) -> anyhow::Result<()> {
        let scene = format!("sleep-{level}");
        let ask = self.warm(&scene, prompt).await?;
        let session = format!("sessions/{scene}");
        if level == 2 {
            let refused = self.act(&session, "sleep", json!({"level": level})).await?;
            let holds = refused.status == 409 && refused.body["sessions"] == json!(["sleep-1"]);
            let what = "it is refused while another session is active there, which is named";
            self.checks.that(&scene, what, holds, &refused.body.to_string())?;
        }
        let slept = self.act(&session, "sleep", json!({"level": level, "force": true})).await?;
        let row = json!({"action": "sleep", "level": level, "session": scene, "phase": "sleeping",
            "kv": "forgotten", "tiers": {"gpu": "forgotten", "cpu": "forgotten"},
            "warm_demoted": true, "serving": false, "evidence": "observed"});
        self.row(&scene, "its row says forgotten", &slept.row, &row)?;
        self.shows(&scene, "sleeping").await?;
        self.turns_away(&scene, &ask).await?;
        if level == 2 {
            self.waits_for_its_weights(&scene, &session).await?;
        } else {
            let woken = self.act(&session, "wake", json!({})).await?;
            let row = json!({"action": "wake", "phase": "serving", "kv": "unknown",
                "tiers": {"gpu": "unknown", "cpu": "forgotten"}, "serving": true});
            self.row(&scene, "the wake's row calls nothing preserved", &woken.row, &row)?;
        }
        self.shows(&scene, "serving").await?;
        let resumed = self.act(&session, "resume", json!({})).await?;
        let row = json!({"action": "resume", "phase": "serving", "evidence": "not_sent"});
        self.row(&scene, "a resume of the woken is not sent", &resumed.row, &row)?;
        self.starts_anew(&scene, &ask).await
    }

    /// A worker that does not serve gets no request, and each is told why.
    async fn turns_away(&mut self, scene: &str, ask: &Ask) -> anyhow::Result<()> {
        let own = self.fak.complete(ask).await?;
        let holds = own.status == 409 && own.code == "session_dormant";
        let what = "a request of the session's is answered that it is dormant";
        self.checks.that(scene, what, holds, &format!("{own:?}"))?;
        self.turns_others_away(scene, ask).await
    }

    pub(super) async fn turns_others_away(&mut self, scene: &str, ask: &Ask) -> anyhow::Result<()> {
        let other = Ask { session: None, ..ask.clone() };
        let other = self.fak.complete(&other).await?;
        let holds = other.status == 503 && other.has_retry_after && other.worker.is_empty();
        let what = "a request of anybody's is told when to come again";
        self.checks.that(scene, what, holds, &format!("{other:?}"))
    }

    /// Level 2 discards the weights: awake is not enough.
    async fn waits_for_its_weights(&mut self, scene: &str, session: &str) -> anyhow::Result<()> {
        let early = self.act(session, "wake", json!({"weights": "same"})).await?;
        let holds = early.status == 409 && early.row["reason"] == "weights_asleep";
        let what = "nobody loads weights into memory that is asleep, not even the same";
        self.checks.that(scene, what, holds, &format!("{} {}", early.status, early.body))?;
        let woken = self.act(session, "wake", json!({})).await?;
        let row = json!({"action": "wake", "phase": "waking", "kv": "unknown", "serving": false,
            "reason": "weights_not_proven"});
        let what = "a wake without proof of the weights leaves it waking";
        self.row(scene, what, &woken.row, &row)?;
        let seen = format!("{} {}", woken.status, woken.body);
        self.checks.that(scene, "and is no success", woken.status == 409, &seen)?;
        self.shows(scene, "waking").await?;
        self.turns_others_away(scene, &ask_for("+8", None)?).await?;
        self.reload_weights().await?;
        let woken = self.act(session, "wake", json!({"weights": "same"})).await?;
        let row = json!({"action": "wake", "phase": "serving", "serving": true});
        self.row(scene, "once their owner has loaded them again, it serves", &woken.row, &row)?;
        let kv = &woken.row["kv"];
        let holds = *kv == "forgotten" || *kv == "unknown";
        self.checks.that(scene, "and calls nothing preserved", holds, &woken.row.to_string())
    }

    async fn reset_of_the_gpu(&mut self, prompt: &str) -> anyhow::Result<()> {
        let scene = "reset";
        let ask = ask_for(prompt, Some(scene))?;
        self.store(&ask, "cpu").await?;
        self.warms(scene, &ask).await?;
        let reset = self.act(&format!("workers/{WORKER}"), "reset", json!({})).await?;
        let row = json!({"action": "reset", "phase": "serving", "kv": "forgotten",
            "tiers": {"gpu": "forgotten", "cpu": "preserved"}, "warm_demoted": true,
            "serving": true, "evidence": "observed"});
        self.row(scene, "its row says forgotten, and the cpu tier preserved", &reset.row, &row)?;
        let (told, hits) = self.ask(&ask).await?;
        let seen = format!("{told:?} {hits:?}");
        let holds = told.claimed_on("gpu") == 0 && hits.gpu == 0;
        self.checks.that(scene, "nothing of the gpu is claimed or reused", holds, &seen)?;
        let all = super::full_blocks(&ask) * crate::prompt::BLOCK_SIZE as u64;
        let holds = told.claimed_on("cpu") == all && told.cached == Some(all);
        let what = "the cpu tier is claimed, and the engine reuses just that";
        self.checks.that(scene, what, holds && hits.connector == all, &seen)?;
        // What came back to the gpu was stored there anew.
        until("the blocks to be proven on the gpu", async || {
            Ok(self.blocks("gpu").await? >= super::full_blocks(&ask))
        })
        .await?;
        self.warms(scene, &ask).await
    }

    async fn reset_of_every_tier(&mut self, prompt: &str) -> anyhow::Result<()> {
        let scene = "reset-external";
        let ask = self.warm(scene, prompt).await?;
        let worker = format!("workers/{WORKER}");
        let reset = self.act(&worker, "reset", json!({"external": true})).await?;
        let row = json!({"action": "reset", "phase": "serving", "kv": "forgotten",
            "tiers": {"gpu": "forgotten", "cpu": "forgotten"}, "serving": true});
        self.row(scene, "its row says forgotten, on every tier", &reset.row, &row)?;
        self.starts_anew(scene, &ask).await
    }

    async fn pause_that_preserves(&mut self, prompt: &str) -> anyhow::Result<()> {
        let scene = "pause";
        let ask = self.warm(scene, prompt).await?;
        let session = format!("sessions/{scene}");
        let paused = self.act(&session, "pause", json!({"force": true})).await?;
        let row = json!({"action": "pause", "phase": "paused", "kv": "preserved",
            "tiers": {"gpu": "preserved", "cpu": "preserved"}, "warm_demoted": false,
            "serving": false});
        self.row(scene, "its row says preserved", &paused.row, &row)?;
        self.shows(scene, "paused").await?;
        self.turns_away(scene, &ask).await?;
        let resumed = self.act(&session, "resume", json!({})).await?;
        let row = json!({"action": "resume", "phase": "serving", "kv": "preserved",
            "serving": true});
        self.row(scene, "the resume's row says preserved", &resumed.row, &row)?;
        self.warms(scene, &ask).await
    }

    async fn pause_that_clears(&mut self, prompt: &str) -> anyhow::Result<()> {
        let scene = "pause-clear";
        let ask = self.warm(scene, prompt).await?;
        let worker = format!("workers/{WORKER}");
        let body = json!({"mode": "abort", "clear": true});
        let paused = self.act(&worker, "pause", body).await?;
        let row = json!({"action": "pause", "phase": "paused", "kv": "forgotten",
            "tiers": {"gpu": "forgotten", "cpu": "forgotten"}, "serving": false});
        self.row(scene, "its row says forgotten", &paused.row, &row)?;
        let resumed = self.act(&worker, "resume", json!({})).await?;
        let row = json!({"action": "resume", "phase": "serving", "kv": "unknown",
            "serving": true});
        self.row(scene, "the resume's row calls nothing preserved", &resumed.row, &row)?;
        self.starts_anew(scene, &ask).await
    }

    async fn sleep_behind_its_back(&mut self, prompt: &str) -> anyhow::Result<()> {
        let scene = "behind";
        let ask = self.warm(scene, prompt).await?;
        self.behind("POST /sleep?level=1&mode=wait").await?;
        self.until_phase("sleeping").await?;
        let row = json!({"action": "drift", "phase": "sleeping", "kv": "forgotten",
            "warm_demoted": true, "serving": false});
        let noticed = self.last_row().await?;
        self.row(scene, "a probe finds it, and the row says forgotten", &noticed, &row)?;
        self.shows(scene, "sleeping").await?;
        self.turns_others_away(scene, &ask).await?;
        let woken = self.act(&format!("workers/{WORKER}"), "wake", json!({})).await?;
        let row = json!({"action": "wake", "phase": "serving", "serving": true});
        self.row(scene, "fak can wake what somebody else put to sleep", &woken.row, &row)?;
        self.starts_anew(scene, &ask).await
    }

    /// Over before anybody looks, because this fak hardly ever does: the claim that follows is
    /// caught by the audit, and explained.
    async fn nap_that_no_probe_sees(&mut self, prompt: &str) -> anyhow::Result<()> {
        let scene = "nap";
        let seldom = Settings { probe_every_ms: SELDOM_MS, ..self.settings.clone() };
        let often = std::mem::replace(&mut self.fak, Fak::start(&self.binary, &seldom).await?);
        self.until_serving().await?;
        let ask = self.warm(scene, prompt).await?;
        self.behind("POST /sleep?level=1&mode=wait").await?;
        self.behind("POST /wake_up").await?;
        let (told, hits) = self.ask(&ask).await?;
        let seen = format!("{told:?} {hits:?}");
        let holds = told.cached == Some(0) && hits.gpu == 0 && hits.connector == 0;
        self.checks.that(scene, "the engine reuses nothing", holds, &seen)?;
        let what = "what the sleep dropped is not told as warm, or lost in flight, and not over";
        // The engine publishes it with this request's step: it may come before the answer's head.
        if told.claimed() > 0 {
            until("the audit", async || {
                let counted = self.fak.metrics().await?;
                Ok(counted.claims("lost_in_flight") + counted.claims("over") > 0)
            })
            .await?;
        }
        let over = self.fak.metrics().await?.claims("over");
        self.checks.that(scene, what, over == 0, &seen)?;
        let row = json!({"action": "drift", "kv": "forgotten"});
        let noticed = self.last_row().await?;
        self.row(
            scene,
            "what it published is noticed, and the row says forgotten",
            &noticed,
            &row,
        )?;
        until("fresh stores", async || Ok(self.blocks("gpu").await? >= super::full_blocks(&ask)))
            .await?;
        self.warms(scene, &ask).await?;
        self.fak = often;
        self.until_serving().await
    }

    async fn restart_in_the_middle(&mut self, prompt: &str) -> anyhow::Result<()> {
        let scene = "restart";
        let ask = self.warm(scene, prompt).await?;
        let long = Ask { max_tokens: RUNNING_TOKENS, stream: true, ..ask.clone() };
        let mut running = self.fak.begin(&long)?;
        running.until(|answer| answer.chunks() >= 2, DEADLINE).await?;
        self.engine.start(self.profile).await?;
        let broken = running.finish(DEADLINE).await?;
        let text = String::from_utf8_lossy(&broken.body);
        // An engine that is stopped may have the time to say so itself (vLLM 0.32.0, observed).
        let is_told = text.contains("\"error\"") || text.contains("\"finish_reason\":\"abort\"");
        let holds = !broken.is_complete || is_told;
        self.checks.that(
            scene,
            "a stream that it breaks is not passed off as whole",
            holds,
            &text,
        )?;
        until("the restart to be noticed", async || {
            Ok(self.last_row().await?["action"] == "restart")
        })
        .await?;
        let row = json!({"action": "restart", "kv": "forgotten", "warm_demoted": true,
            "tiers": {"gpu": "forgotten", "cpu": "forgotten"}});
        let noticed = self.last_row().await?;
        self.row(scene, "its row says forgotten", &noticed, &row)?;
        self.until_serving().await?;
        self.shows(scene, "serving").await?;
        self.starts_anew(scene, &ask).await
    }

    pub(super) async fn no_claim_was_over(&mut self) -> anyhow::Result<()> {
        let metrics = self.fak.metrics().await?;
        let over = metrics.claims("over");
        self.checks.that("audit", "no claim was over", over == 0, &format!("{over} were"))?;
        let audited = metrics.claims("confirmed");
        let seen = format!("{audited} were confirmed");
        self.checks.that("audit", "claims were confirmed", audited > 0, &seen)?;
        self.client.plain("GET /health", ENGINE_DEADLINE).await.map(drop)
    }
}
