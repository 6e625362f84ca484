//! `fak sim`: a simulated vLLM until Ctrl-C.

use std::io::Write as _;

use fak_sim::{Binds, Connector, Profile, Sim, SimConfig};

use super::{Error, open_files};
use crate::cli::{Exit, SimArgs, SimConnector, SimProfile};
use crate::config::names;

/// Serves until Ctrl-C. Its addresses go to stdout, one a line, as the variables that point to it.
pub(super) async fn serve(args: &SimArgs) -> Result<Exit, Error> {
    let config = SimConfig {
        model: args.model.clone(),
        profile: match args.profile {
            SimProfile::V0_11 => Profile::V0_11,
            SimProfile::V0_19 => Profile::V0_19,
            SimProfile::V0_32 => Profile::V0_32,
            SimProfile::KeepTier => Profile::KeepTier,
        },
        connector: match args.connector {
            SimConnector::None => Connector::None,
            SimConnector::Offloading => Connector::Offloading,
            SimConnector::Mooncake => Connector::Mooncake,
            SimConnector::Multi => Connector::Multi,
        },
        ..SimConfig::default()
    };
    open_files::raise();
    let binds = Binds { http: args.listen, kv_events: args.kv_events, replay: args.replay };
    let sim = Sim::start(config, binds).await.map_err(Error::failed)?;
    let addresses = [
        (names::BASE_URL, format!("{}/v1", sim.base_url())),
        (names::MODEL, args.model.clone()),
        (names::KV_EVENTS, sim.kv_events_endpoint()),
        (names::KV_REPLAY, sim.replay_endpoint()),
    ];
    let lines: String = addresses.iter().map(|(name, value)| format!("{name}={value}\n")).collect();
    let mut out = std::io::stdout();
    out.write_all(lines.as_bytes()).and_then(|()| out.flush()).map_err(Error::failed)?;
    tokio::signal::ctrl_c().await.map_err(Error::failed)?;
    sim.stop().await;
    Ok(Exit::Done)
}
