//! Arguments in, data on stdout out, exit code.
//!
//! Invariant: whatever can be checked without doing anything is checked before anything is done;
//! bad usage exits 64.

pub mod action;
pub mod bench;
pub mod client;
pub mod report;
pub mod rollout;
pub mod session;
mod table;
pub mod trace;
pub mod witness;
pub mod worker;

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

/// A gateway and control plane in front of vLLM workers that never claims a warm KV cache it cannot
/// prove.
#[derive(Debug, Parser)]
#[command(name = "fak", version, disable_help_subcommand = true)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve OpenAI clients from a fleet of vLLM workers until SIGTERM or Ctrl-C.
    Serve(ServeArgs),
    /// The settings of `fak serve`, without serving.
    Config {
        /// What to do with them.
        #[command(subcommand)]
        command: ConfigCommand,
    },
    /// Sessions, and the workers behind them. Asks the fak of FAK_ADDR, with the key of FAK_KEY.
    Session(session::SessionArgs),
    /// Workers. Asks the fak of FAK_ADDR, with the key of FAK_KEY.
    Worker(worker::WorkerArgs),
    /// Workers that time-share their devices with a trainer. Asks the fak of FAK_ADDR, with the key
    /// of FAK_KEY.
    Rollout(rollout::RolloutArgs),
    /// What each action means for each cache tier, and what became of those that were done.
    Witness {
        /// What to show.
        #[command(subcommand)]
        command: WitnessCommand,
    },
    /// Run a trace of tool calls against an engine and audit what it reused.
    Run(RunArgs),
    /// Experiments on an engine. They change its state: for one that has no other client.
    Bench(bench::BenchArgs),
    /// Serve a simulated vLLM until Ctrl-C.
    Sim(SimArgs),
}

/// How the clients of the control API end their help.
const CLIENT_HELP: &str = "\
Environment:
  FAK_ADDR  where fak is; default http://127.0.0.1:8080
  FAK_KEY   its admin key, where it has one: FAK_ADMIN_KEY of fak serve

Exit codes: 0 done, 1 failed or not proven to be done, 2 refused and nothing changed, 64 bad
usage.";

/// What `fak config` does.
#[derive(Debug, Subcommand)]
pub enum ConfigCommand {
    /// Say whether they are right: exit code 0, or 64 and what is wrong. Reads the secrets, and
    /// sends nothing.
    Check {
        /// The settings.
        #[command(flatten)]
        serve: ServeArgs,
    },
    /// Print those in force and where each comes from, as a settings' file. Secrets are not shown.
    Print {
        /// The settings.
        #[command(flatten)]
        serve: ServeArgs,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
}

/// What `fak witness` shows.
#[derive(Debug, Subcommand)]
pub enum WitnessCommand {
    /// The decision table.
    Table {
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Rows of the ledger. Asks the fak of FAK_ADDR, with the key of FAK_KEY.
    Ls(witness::LsArgs),
    /// Rows as they get their outcome. Asks the fak of FAK_ADDR, with the key of FAK_KEY.
    Tail(witness::TailArgs),
}

const RUN_HELP: &str = "\
Trace file:
  {\"calls\":[{\"tool\":\"search\",\"args\":{..},\"meta\":{\"session\":\"s1\",
    \"fak_cache_tenant\":\"a\",\"fak_turn_priority\":\"1\",
    \"openai_endpoint\":\"chat|completions\"}}],\"policy\":{..}}
  Args that hold \"messages\" or \"prompt\" are sent as they are; any others become a user
  message of the tool's name and its arguments, answered with 256 tokens at most. Keys that start
  with _ are notes.
  If any call names a tenant, cache salts in args are dropped and each tenant gets its own.

Policy (--policy FILE, else the trace's own \"policy\", else every call is allowed):
  {\"allow\":[\"search\"],\"allow_prefix\":[\"read_\"],\"deny\":{\"rm_rf\":\"POLICY_BLOCK\"}}
  A tool that is on no list is denied.

Environment (--engine vllm):
  FAK_VLLM_BASE_URL             http://host:8000/v1, with or without /v1
  FAK_VLLM_MODEL                model to ask for; default: the one that is served
  FAK_VLLM_API_KEY              the engine's API key, sent to the engine alone
  FAK_VLLM_WORKER_ID            default: vllm
  FAK_VLLM_METRICS_URL          default: the base without /v1, plus /metrics
  FAK_VLLM_PRIORITY_SCHEDULING  1 where the engine schedules by priority
  FAK_VLLM_KV_EVENTS            tcp://host:5557; default: asked of the engine
  FAK_VLLM_KV_REPLAY            tcp://host:5558; default: asked of the engine
  FAK_CACHE_SALT_KEY            key of the digest behind cache salts
  FAK_LOG                       log filter, as in fak=debug; default: warn

Exit codes: 0 done, 1 a call failed or was cancelled, 2 every call was denied, 64 bad usage or
configuration.";

/// Arguments of `fak run`.
#[derive(Debug, Args)]
#[command(after_help = RUN_HELP)]
pub struct RunArgs {
    /// The trace file.
    #[arg(long, value_name = "FILE")]
    pub trace: PathBuf,
    /// A vLLM (see FAK_VLLM_BASE_URL), or one that is simulated inside this process.
    #[arg(long, value_enum, default_value_t = EngineKind::Vllm)]
    pub engine: EngineKind,
    /// The capability floor; goes before a policy in the trace file.
    #[arg(long, value_name = "FILE")]
    pub policy: Option<PathBuf>,
    /// Print JSON, once all calls are done.
    #[arg(long)]
    pub json: bool,
}

/// Which engine to run against.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum EngineKind {
    /// A real one.
    Vllm,
    /// A simulated one.
    Sim,
}

impl EngineKind {
    /// The word, as in the arguments and the report.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Vllm => "vllm",
            Self::Sim => "sim",
        }
    }
}

const SERVE_HELP: &str = "\
Settings come from flags, then the environment, then the file, then defaults.

Environment:
  FAK_LISTEN         where to listen; default 127.0.0.1:8080
  FAK_DB             sqlite:PATH, sqlite::memory: or postgres://USER@HOST:PORT/NAME; default: a
                     SQLite file in $XDG_STATE_HOME/fak, or in ~/.local/state/fak; in memory where
                     all workers are simulated
  FAK_ADMIN_KEY      what control has to show, as a bearer token; needed beyond loopback
  FAK_VLLM_API_KEY   the workers' API key, sent to them alone
  FAK_CACHE_SALT_KEY key of the digest behind cache salts; a public one where it is not set
  FAK_VLLM_BASE_URL  the one worker, where nothing else names any; with FAK_VLLM_WORKER_ID,
                     FAK_VLLM_METRICS_URL, FAK_VLLM_KV_EVENTS, FAK_VLLM_KV_REPLAY (fak run --help)
  FAK_LOG            log filter, as in fak=debug; default: warn; with fak::access=info, a line
                     for each request

Exit codes: 0 stopped by a signal, 1 failed, or a second signal cut what was under way, 64 bad
usage or configuration.

File (--config), with the defaults:
  listen = \"127.0.0.1:8080\"
  db = \"sqlite:/var/lib/fak/fak.db\"
  probe_every_ms = 1000         # drift is found within this time
  probe_failures_max = 2        # looks without an answer before a worker is lost
  progress_patience_ms = 60000  # requests run without a token: suspect
  settle_within_ms = 2000       # a worker's door stays shut for its events to settle
  hold_ms = 0                   # how long a request waits for a worker that serves; 0: 503
  hold_max = 1000               # how many may wait
  first_byte_ms = 2000          # silence before a worker is looked at
  body_bytes_max = 33554432     # of one request
  bodies_bytes_max = 1073741824 # of all requests that are under way
  drain_announce_ms = 5000      # at SIGTERM: /ready is 503, and requests are served for so long
  drain_ms = 30000              # then: for streams to end
  answer_first_byte_ms = 120000 # no progress before a stream's first byte; 0: no limit
  answer_idle_ms = 60000        # the same between two chunks; 0: no limit
  answer_whole_ms = 600000      # the same before an answer that is not streamed; 0: no limit
  probe_within_ms = 5000        # for a look at a worker; 0: no limit
  tokenize_within_ms = 15000    # for a prompt's tokens; 0: no limit
  keep_alive_ms = 0             # comments to a stream's client while its worker is silent; 0: none
  allow_reload_weights = false  # a wake on other weights has the engine load its checkpoint
  pass_headers = []             # headers that pass besides those that fak knows, both ways
  cors_origins = []             # origins whose pages may ask for inference; [\"*\"]: all
  isolation = false             # each tenant's cache apart; clients' salts do not count
  [weights]
  salt = \"off\"                  # version: every cache_salt carries the weight version
  [[worker]]
  id = \"vllm-0\"
  url = \"http://gpu-0:8000/v1\"
  kv = \"tcp://gpu-0:5557\"       # where /kv_event_sources cannot tell
  replay = \"tcp://gpu-0:5558\"
  defer_aborts = false          # true for prefill and decode pairs: no abort while it is at rest
  [[key]]                       # without any, none is asked for
  tenant = \"alice\"              # who shows it: Authorization: Bearer, or x-api-key
  authority = \"fak\"             # two of them may use one tenant name
  env = \"ALICE_KEY\"             # or file = \"/run/secrets/alice\": never the secret itself";

/// Arguments of `fak serve`.
#[derive(Debug, Args)]
#[command(after_help = SERVE_HELP)]
pub struct ServeArgs {
    /// The settings' file, TOML.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Where to listen [default: 127.0.0.1:8080].
    #[arg(long, value_name = "ADDR")]
    pub listen: Option<String>,
    /// A worker: ID=URL, with its event sockets where the engine cannot tell them:
    /// ID=URL,kv=tcp://HOST:PORT,replay=tcp://HOST:PORT.
    #[arg(long, value_name = "ID=URL")]
    pub worker: Vec<crate::config::serve::RawWorker>,
    /// Serve this many simulated workers, embedded in this process.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub sim: usize,
    /// The database of the ledger, the sessions and the holds [default: as for FAK_DB].
    #[arg(long, value_name = "URL")]
    pub db: Option<String>,
}

/// Arguments of `fak sim`.
#[derive(Debug, Args)]
pub struct SimArgs {
    /// Where HTTP is served; port 0 takes a free one.
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:8000")]
    pub listen: SocketAddr,
    /// Where KV events are published.
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:5557")]
    pub kv_events: SocketAddr,
    /// Where KV events are replayed.
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:5558")]
    pub replay: SocketAddr,
    /// Which vLLM it behaves like.
    #[arg(long, value_enum, default_value_t = SimProfile::V0_32)]
    pub profile: SimProfile,
    /// Which connector it has.
    #[arg(long, value_enum, default_value_t = SimConnector::Offloading)]
    pub connector: SimConnector,
    /// The name of the served model.
    #[arg(long, value_name = "NAME", default_value = "sim")]
    pub model: String,
}

/// Which vLLM the simulator behaves like.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SimProfile {
    /// vLLM 0.11.
    #[value(name = "0.11")]
    V0_11,
    /// vLLM 0.19.
    #[value(name = "0.19")]
    V0_19,
    /// vLLM 0.32.
    #[value(name = "0.32")]
    V0_32,
    /// vLLM 0.32 with `clear_connector_cache` on pause and sleep.
    KeepTier,
}

/// Which connector the simulator has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SimConnector {
    /// None.
    None,
    /// Host memory; clears itself.
    Offloading,
    /// A shared store.
    Mooncake,
    /// Host memory and a shared store.
    Multi,
}

/// What a process exits with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// Done.
    Done = 0,
    /// Failed.
    Failed = 1,
    /// The engine or fak refused, and nothing changed.
    Refused = 2,
    /// Bad usage or configuration.
    Usage = 64,
}

impl From<Exit> for std::process::ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

/// What parsing the arguments led to, where it led to no command.
#[derive(Debug)]
pub struct Stopped {
    /// What to print.
    pub text: String,
    /// Whether it was asked for, and so is data: `--help`, `--version`.
    pub asked: bool,
}

impl Cli {
    /// Parses arguments, the program's name first.
    ///
    /// # Errors
    ///
    /// [`Stopped`] for bad usage, and for `--help` and `--version`.
    pub fn read<I, T>(args: I) -> Result<Self, Stopped>
    where
        I: IntoIterator<Item = T>,
        T: Into<std::ffi::OsString> + Clone,
    {
        Self::try_parse_from(args)
            .map_err(|error| Stopped { text: error.to_string(), asked: !error.use_stderr() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(args: &[&str]) -> Result<Cli, Stopped> {
        Cli::read(std::iter::once("fak").chain(args.iter().copied()))
    }

    #[test]
    fn the_definition_holds_together() {
        use clap::CommandFactory as _;
        Cli::command().debug_assert();
    }

    #[test]
    fn run_takes_what_the_contract_says() {
        let cli = read(&["run", "--trace", "t.json", "--engine", "sim", "--policy", "p", "--json"]);
        let Command::Run(args) = cli.expect("right").command else { panic!("run") };
        assert_eq!((args.engine, args.json), (EngineKind::Sim, true));
        let Command::Run(args) = read(&["run", "--trace=t"]).expect("right").command else {
            panic!("run")
        };
        assert_eq!((args.engine, args.json, args.policy), (EngineKind::Vllm, false, None));
    }

    #[test]
    fn the_settings_file_in_the_help_is_one_and_has_the_defaults() {
        use crate::config::serve::{Flags, Raw};
        let (_, file) = SERVE_HELP.split_once("with the defaults:\n").expect("it is in the help");
        let resolve = |file: &str| {
            let raw: Raw = toml::from_str(file).expect("TOML");
            let keys = ["ALICE_KEY", "FAK_ADMIN_KEY"];
            let lookup = |name: &str| keys.contains(&name).then(|| format!("sk-{name}").into());
            raw.resolve(Flags::default(), &lookup, 0).expect("right").to_json()["settings"].take()
        };
        let (told, named) = (
            resolve(file),
            resolve(
                "db = \"sqlite:x\"\n[[worker]]\nid = \"a\"\n\
            url = \"http://h\"",
            ),
        );
        for (name, setting) in told.as_object().expect("settings") {
            let is_default = name == "db" || setting["value"] == named[name]["value"];
            assert!(is_default && setting["from"] == "file", "{name}: {setting}");
        }
    }

    #[test]
    fn bad_usage_is_told_from_help() {
        for args in [&[][..], &["run"], &["run", "--trace", "t", "--engine", "x"], &["walk"]] {
            assert!(!read(args).expect_err("wrong").asked, "{args:?}");
        }
        for args in [&["--help"][..], &["run", "--help"], &["--version"]] {
            assert!(read(args).expect_err("help").asked, "{args:?}");
        }
    }
}
