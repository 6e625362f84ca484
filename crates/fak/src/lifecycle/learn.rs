//! What an engine and its connector are proven to do, from what it told and from its version.
//!
//! Invariant: what is not told and not known of a version is not assumed. Sources: ENGINE.md
//! sections 1 and 3 (vLLM 0.9.2 to 0.33.0, read; 0.32.0 observed).

use fak_kernel::witness::{Capabilities, Connector, Pauses};
use fak_kernel::{Tier, TierSet};

use crate::engine;

/// A vLLM version, as far as behaviour depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Version(u32, u32);

impl Version {
    /// Reads `0.32.0`, `0.11.0.post2`, `0.24.1+cpu`; nothing from what is not of that form.
    fn read(text: &str) -> Option<Self> {
        let mut parts = text.trim_start_matches('v').split(['.', '+', '-']);
        let major = parts.next()?.parse().ok()?;
        let minor = parts.next()?.parse().ok()?;
        Some(Self(major, minor))
    }
}

/// What the kernel may rely on.
pub(crate) fn capabilities(told: &engine::Capabilities) -> Capabilities {
    let version = told.version.told().and_then(|text| Version::read(text));
    let since = |minor: u32| version.is_some_and(|v| v >= Version(0, minor));
    let connectors = told.connectors.told();
    let connector = connectors.map_or(Connector::UNKNOWN, |names| connector(names));
    Capabilities {
        pauses: match version {
            Some(v) if v >= Version(0, 17) => Pauses::Modes,
            Some(v) if v >= Version(0, 12) => Pauses::AbortOnly,
            _ => Pauses::Absent,
        },
        is_sleeping_counts_pause: since(17),
        keep_argument: told.clear_connector_cache.told() == Some(&true),
        reaches_connector: since(23),
        reset_external: version.map(|v| v >= Version(0, 13)),
        table_survives_sleep: version.is_some_and(|v| v < Version(0, 11)),
        staged_wake: version.is_some_and(stays_stopped_in_part),
        connector,
        tiers: connectors.map_or(TierSet::ALL, |names| tiers(names)),
    }
}

/// Whether a wake in part leaves the scheduler as it is: up to 0.16 a sleep does not touch it, from
/// 0.17.1 to 0.23.0 any wake starts it (source).
fn stays_stopped_in_part(version: Version) -> bool {
    version < Version(0, 17) || version >= Version(0, 24)
}

fn connector(names: &[String]) -> Connector {
    Connector::multi(names.iter().map(|name| match name.as_str() {
        "OffloadingConnector" => Connector::OFFLOADING,
        "SimpleCPUOffloadConnector" => Connector::SIMPLE_OFFLOAD,
        "MooncakeStoreConnector" => Connector::MOONCAKE_STORE,
        _ => Connector::UNKNOWN,
    }))
}

/// The tiers behind connectors of these names; all of them where one is not known.
fn tiers(names: &[String]) -> TierSet {
    names.iter().fold(TierSet::GPU, |tiers, name| {
        tiers.with(match name.as_str() {
            "OffloadingConnector" | "SimpleCPUOffloadConnector" => TierSet::of(Tier::Cpu),
            "MooncakeStoreConnector" => TierSet::of(Tier::Remote),
            _ => TierSet::CONNECTOR,
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_is_read_from_what_engines_say() {
        assert_eq!(Version::read("0.32.0"), Some(Version(0, 32)));
        assert_eq!(Version::read("0.11.0.post2"), Some(Version(0, 11)));
        assert_eq!(Version::read("v1.2.3+cpu"), Some(Version(1, 2)));
        assert_eq!(Version::read("dev"), None);
        assert!(Version(1, 0) > Version(0, 33));
    }

    #[test]
    fn weights_wait_for_their_kv_memory_where_a_wake_in_part_starts_nothing() {
        for (minor, staged) in [(16, true), (17, false), (23, false), (24, true), (32, true)] {
            assert_eq!(stays_stopped_in_part(Version(0, minor)), staged, "0.{minor}");
        }
    }

    #[test]
    fn a_connector_that_is_not_known_proves_nothing_and_may_have_any_tier() {
        let names = ["OffloadingConnector".to_owned(), "MyConnector".to_owned()];
        assert_eq!(connector(&names), Connector::UNKNOWN);
        assert_eq!(tiers(&names), TierSet::ALL);
        assert_eq!(connector(&names[..1]), Connector::OFFLOADING);
        assert_eq!(tiers(&names[..1]), TierSet::GPU.with(TierSet::of(Tier::Cpu)));
        assert_eq!(tiers(&[]), TierSet::GPU);
    }
}
