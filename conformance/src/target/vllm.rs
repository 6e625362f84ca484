//! A real vLLM: one that the rig starts, or one that runs already.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, bail, ensure};

use super::{BLOCK_BYTES, Endpoints, GPU_BLOCKS, MODEL_LEN_MAX, TIER_BLOCKS, Target};
use crate::scenario::Profile;

/// A vLLM started through `conformance/rig/engine`; it keeps its ports over a restart.
#[derive(Debug, Default)]
pub struct Vllm {
    process: Option<Child>,
    ports: Option<[u16; 3]>,
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
        let ports = match self.ports {
            Some(ports) => ports,
            None => *self.ports.insert(free_ports()?),
        };
        let [port, kv_port, replay_port] = ports.map(|port| port.to_string());
        let mut command = Command::new(rig());
        command.args(["serve", "--until-stdin-closes", "--port", &port]);
        command.args(["--kv-port", &kv_port, "--replay-port", &replay_port]);
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
        serde_json::from_str(&line).with_context(|| line.clone())
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

/// Ports that were free a moment ago.
fn free_ports() -> anyhow::Result<[u16; 3]> {
    let mut ports = [0; 3];
    let mut held = Vec::new();
    for port in &mut ports {
        let listener = std::net::TcpListener::bind("127.0.0.1:0")?;
        *port = listener.local_addr()?.port();
        held.push(listener);
    }
    Ok(ports)
}
