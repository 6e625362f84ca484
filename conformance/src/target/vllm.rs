//! A real vLLM: one that the rig starts, or one that runs already.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, bail, ensure};

use super::{
    ADAPTERS, BLOCK_BYTES, BLOCKS_PER_CHUNK, Endpoints, GPU_BLOCKS, MODEL_LEN_MAX, SECOND_NAME,
    TIER_BLOCKS, Target,
};
use crate::scenario::Profile;

/// The rig takes one that is free.
const ANY_PORT: &str = "0";

/// A vLLM started through `conformance/rig/engine`; it keeps its ports over a restart.
#[derive(Debug, Default)]
pub struct Vllm {
    process: Option<Child>,
    /// Where it listened first.
    endpoints: Option<Endpoints>,
}

impl Vllm {
    /// Ends the engine, if it runs.
    ///
    /// # Errors
    ///
    /// The rig cannot be waited for.
    pub fn stop(&mut self) -> anyhow::Result<()> {
        let Some(mut process) = self.process.take() else { return Ok(()) };
        drop(process.stdin.take());
        process.wait().context("the rig cannot be waited for")?;
        Ok(())
    }

    /// Those of the first start.
    fn ports(&self) -> [&str; 3] {
        let Some(first) = &self.endpoints else { return [ANY_PORT; 3] };
        [&first.base_url, &first.kv_events, &first.replay]
            .map(|address| address.rsplit_once(':').map_or(ANY_PORT, |(_, port)| port))
    }
}

impl Drop for Vllm {
    fn drop(&mut self) {
        // Nobody is left to tell of a failure; the rig also ends with this process.
        let _ = self.stop();
    }
}

impl Target for Vllm {
    fn name(&self) -> &'static str {
        "vllm"
    }

    async fn start(&mut self, profile: Profile) -> anyhow::Result<Endpoints> {
        self.stop()?;
        let mut command = Command::new(rig());
        command.args(["serve", "--until-stdin-closes"]);
        let [http, events, replay] = self.ports();
        command.args(["--port", http, "--kv-port", events, "--replay-port", replay]);
        command.args(["--gpu-blocks", &GPU_BLOCKS.to_string()]);
        command.args(["--max-model-len", &MODEL_LEN_MAX.to_string()]);
        command.args(["--tier-bytes", &(TIER_BLOCKS * BLOCK_BYTES).to_string()]);
        match profile {
            Profile::Plain => {}
            Profile::Offload => {
                command.arg("--offload");
            }
            Profile::KeepTier => {
                command.args(["--offload", "--keep-tier"]);
            }
            Profile::KeepTierBundle => {
                command.args(["--offload", "--bundle", "--keep-tier"]);
            }
            Profile::Chunked | Profile::ChunkedDescribed => {
                command.args(["--offload", "--blocks-per-chunk", &BLOCKS_PER_CHUNK.to_string()]);
                command.args((profile == Profile::ChunkedDescribed).then_some("--self-describing"));
            }
            Profile::Speculating => {
                command.arg("--eagle");
            }
            Profile::Named => {
                command.args(["--also-named", SECOND_NAME]);
                command.args(ADAPTERS.iter().flat_map(|name| ["--adapter", name]));
            }
        }
        let mut process = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| rig().display().to_string())?;
        let stdout = process.stdout.take().context("the rig has no stdout")?;
        self.process = Some(process);
        // Blocking is fine: nothing else runs while an engine starts.
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line)?;
        ensure!(!line.is_empty(), "the rig ended before the engine was ready");
        let endpoints: Endpoints = serde_json::from_str(&line).with_context(|| line.clone())?;
        self.endpoints = Some(endpoints.clone());
        Ok(endpoints)
    }
}

/// An engine that somebody else started. It is used as it is and cannot be restarted.
#[derive(Debug)]
pub struct Running {
    endpoints: Endpoints,
    is_used: bool,
}

impl Running {
    /// An engine that listens at `endpoints`.
    pub fn new(endpoints: Endpoints) -> Self {
        Running { endpoints, is_used: false }
    }
}

impl Target for Running {
    fn name(&self) -> &'static str {
        "vllm"
    }

    async fn start(&mut self, _profile: Profile) -> anyhow::Result<Endpoints> {
        if self.is_used {
            bail!("an engine named by its address cannot be restarted");
        }
        self.is_used = true;
        Ok(self.endpoints.clone())
    }
}

fn rig() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("rig/engine")
}
