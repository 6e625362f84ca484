//! Scenes at the edges of the promise: what one client's odd request, a declined reset, a start of
//! fak without a history and a live socket that brings nothing leave of claims.

use std::time::Duration;

use anyhow::Context;
use serde_json::{Value, json};

use super::{Bridge, WORKER, ask_for, full_blocks};
use crate::fak::{Ask, DEADLINE, Fak, Settings, Told};
use crate::prompt::BLOCK_SIZE;
use crate::relay::Relay;
use crate::session::{post, until};
use crate::target::Target;

/// Requests within which a claim has to be back.
const REQUESTS_UNTIL_WARM: usize = 2;

/// A dead live socket has to be found out within this time.
const FOUND_OUT_WITHIN: Duration = Duration::from_secs(1);

/// A stream that outlives what is done while it runs.
const RUNNING_TOKENS: u32 = 900;

impl<T: Target> Bridge<T> {
    pub(super) async fn edges(&mut self) -> anyhow::Result<()> {
        self.odd_requests_of_another_client("111-113 +5").await?;
        self.chat_that_echoes().await?;
        self.reset_that_is_declined("121-123 +5").await?;
        self.start_without_a_history("131-133 +5").await?;
        self.live_socket_that_brings_nothing("141-143 +5").await
    }

    /// No claim is above what the engine says that it reused.
    fn is_true(&mut self, scene: &str, told: &Told) -> anyhow::Result<()> {
        let holds = told.cached.is_some_and(|cached| told.claimed() <= cached);
        self.checks.that(scene, "no more is claimed than is reused", holds, &format!("{told:?}"))
    }

    /// Others' claims on the same prompt come back within a few requests.
    async fn is_soon_warm(&mut self, scene: &str, ask: &Ask) -> anyhow::Result<()> {
        let all = full_blocks(ask) * BLOCK_SIZE as u64;
        let mut told = Told::default();
        for _ in 0..=REQUESTS_UNTIL_WARM {
            told = self.fak.complete(ask).await?;
            self.is_true(scene, &told)?;
            if told.claimed() == all {
                break;
            }
        }
        let what = "what the engine kept is claimed again within two requests";
        let holds = told.claimed() == all && told.cached == Some(all);
        self.checks.that(scene, what, holds, &format!("{told:?}"))
    }

    /// A client passes the cache by on a prompt that is warm for others.
    async fn odd_requests_of_another_client(&mut self, prompt: &str) -> anyhow::Result<()> {
        let scene = "odd-request";
        let ask = self.warm_prompt(scene, prompt).await?;
        for more in [json!({"prompt_logprobs": false}), json!({"echo": true, "logprobs": 0})] {
            let odd = Ask { more, session: None, ..ask.clone() };
            let told = self.fak.complete(&odd).await?;
            self.is_true(scene, &told)?;
            self.is_soon_warm(scene, &ask).await?;
        }
        Ok(())
    }

    /// The same by a chat, whose `echo` alone passes the cache by.
    async fn chat_that_echoes(&mut self) -> anyhow::Result<()> {
        let scene = "echo-chat";
        let words = "one two three four five six seven eight nine ten ".repeat(10);
        let chat = |more: Value| {
            let message = json!({"role": "user", "content": words});
            let mut body = json!({"model": "tiny", "messages": [message], "max_tokens": 1});
            for (field, value) in more.as_object().into_iter().flatten() {
                body[field] = value.clone();
            }
            body
        };
        let ask = async |fak: &Fak, more: Value| {
            Told::read(&fak.post("/v1/chat/completions", &chat(more)).await?)
        };
        let mut told = Told::default();
        let claimed = until("the chat to be claimed", async || {
            told = ask(&self.fak, json!({})).await?;
            Ok(told.claimed() > 0)
        });
        claimed.await.with_context(|| format!("{told:?}"))?;
        let echoed = ask(&self.fak, json!({"echo": true})).await?;
        self.is_true(scene, &echoed)?;
        for _ in 0..=REQUESTS_UNTIL_WARM {
            told = ask(&self.fak, json!({})).await?;
            self.is_true(scene, &told)?;
            if told.claimed() > 0 {
                break;
            }
        }
        let holds = told.claimed() > 0 && told.cached == Some(told.claimed());
        let what = "it is claimed for others within two requests";
        self.checks.that(scene, what, holds, &format!("{told:?}"))
    }

    /// The engine declines a reset, since somebody else's request runs: it dropped nothing.
    async fn reset_that_is_declined(&mut self, prompt: &str) -> anyhow::Result<()> {
        let scene = "reset-declined";
        let ask = self.warm_prompt(scene, prompt).await?;
        let running = ask_for("+8", None)?.prompt;
        let body = json!({"model": "tiny", "prompt": running, "max_tokens": RUNNING_TOKENS,
            "ignore_eos": true, "stream": true});
        let mut running = self.client.start(&post("/v1/completions", &body))?;
        running.until(|answer| answer.chunks() >= 2, DEADLINE).await?;
        let reset = self.act(&format!("workers/{WORKER}"), "reset", json!({})).await?;
        drop(running);
        let seen = reset.body.to_string();
        let holds = reset.status != 200 && reset.row["answered"].to_string().contains("false");
        self.checks.that(scene, "the engine declined it, and it is no success", holds, &seen)?;
        let row = json!({"action": "reset", "kv": "preserved", "serving": true});
        let what = "its row says preserved, since no clear came";
        self.row(scene, what, &reset.row, &row)?;
        self.is_soon_warm(scene, &ask).await
    }

    /// A fak that cannot ask what was before it, of an engine that holds a prompt.
    async fn start_without_a_history(&mut self, prompt: &str) -> anyhow::Result<()> {
        let scene = "no-history";
        let ask = self.warm_prompt(scene, prompt).await?;
        let live_alone = Some((self.endpoints.kv_events.clone(), None));
        let settings = Settings { sockets: live_alone, ..self.settings.clone() };
        let other = Fak::start(&self.binary, &settings).await?;
        let before = std::mem::replace(&mut self.fak, other);
        self.until_serving().await?;
        let told = self.fak.complete(&ask).await?;
        self.is_true(scene, &told)?;
        self.is_soon_warm(scene, &ask).await?;
        self.fak = before;
        Ok(())
    }

    /// The live socket is open and brings nothing any more, while the cache is cleared.
    async fn live_socket_that_brings_nothing(&mut self, prompt: &str) -> anyhow::Result<()> {
        let scene = "stuck-socket";
        let relay = Relay::before(&self.endpoints.kv_events).await?;
        let replay = Some(self.endpoints.replay.clone());
        let sockets = Some((relay.endpoint.clone(), replay));
        let settings = Settings { sockets, ..self.settings.clone() };
        let other = Fak::start(&self.binary, &settings).await?;
        let before = std::mem::replace(&mut self.fak, other);
        self.until_serving().await?;
        let ask = self.warm_prompt(scene, prompt).await?;
        relay.stick();
        self.behind("POST /reset_prefix_cache?reset_external=true").await?;
        // The clear is published with the step that this causes.
        self.client
            .call(
                &post(
                    "/v1/completions",
                    &json!({"model": "tiny", "max_tokens": 1,
            "prompt": ask_for("151-152 +5", None)?.prompt}),
                ),
                DEADLINE,
            )
            .await?;
        tokio::time::sleep(FOUND_OUT_WITHIN).await;
        let told = self.fak.complete(&ask).await?;
        self.is_true(scene, &told)?;
        let what = "the engine reuses nothing, and nothing is claimed";
        let holds = told.cached == Some(0) && told.claimed() == 0;
        self.checks.that(scene, what, holds, &format!("{told:?}"))?;
        until("claims to come back by a new connection", async || {
            Ok(self.fak.complete(&ask).await?.claimed() > 0)
        })
        .await?;
        self.fak = before;
        Ok(())
    }

    async fn warm_prompt(&mut self, scene: &str, prompt: &str) -> anyhow::Result<Ask> {
        let ask = ask_for(prompt, Some(scene))?;
        // The cache may be full by now, so that blocks that come take the place of others.
        until(
            "the prompt to be claimed",
            async || Ok(self.fak.complete(&ask).await?.claimed() > 0),
        )
        .await?;
        self.warms(scene, &ask).await?;
        Ok(ask)
    }
}
