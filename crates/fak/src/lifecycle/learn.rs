//! What an engine and its connector are proven to do, from what it told and from its version.
//!
//! Invariant: what is not told and not known of a version is not assumed; and what was told counts
//! for one life of the engine: another may be of another version, set up otherwise, and serve other
//! models. Sources: ENGINE.md sections 1 and 3 (vLLM 0.9.2 to 0.33.0, read; 0.32.0 observed).

use std::mem;

use fak_index::Offload;
use fak_kernel::witness::{Capabilities, Connector, Pauses};
use fak_kernel::{Tier, TierSet};

use super::owner::Owner;
use crate::engine;
use crate::fleet::Caution;

/// Times that an engine which does not tell its connector, or where it publishes, is asked for it
/// with everything else.
const TRIES: u32 = 5;
/// Looks between two questions for what changes within a life: adapters are loaded and unloaded.
const ASK_EVERY: u32 = 5;

impl Owner {
    /// Asks the engine what it is and where its ranks publish. True where ranks are followed that
    /// were not before.
    pub(super) async fn learn(&mut self) -> bool {
        let told = self.worker.engine.capabilities().await;
        self.told = told.or(mem::take(&mut self.told));
        self.tries += 1;
        self.state.capabilities = capabilities(&self.told);
        self.state.version = self.told.version.told().map(|v| v.as_str().into());
        self.show_models();
        self.block_size = self.told.block_size.told().copied();
        self.connectors = self.told.connectors.told().cloned();
        if let Some(settings) = self.told.settings.told() {
            self.state.caution.hear_speculates(settings.speculates);
            self.state.caution.hear_ranks(settings.ranks.map(|ranks| ranks as usize));
            self.state.first_rank = settings.first_rank;
            let identity = settings.identity.clone();
            self.hear_kv_identity(&identity);
        }
        let has_new_ranks = self.follow_told();
        self.show_offload();
        // The first `/server_info` of a busy engine can take longer than a look (0.32.0, observed),
        // and an engine may never tell where it publishes.
        let is_placed = self.told.connectors.told().is_some() && !self.ranks.is_empty();
        let is_told = self.told.version.told().is_some() && self.told.models.told().is_some();
        self.has_learnt = is_told && (is_placed || self.tries >= TRIES);
        has_new_ranks
    }

    /// Asks for what is still missing, and again for what may have changed. True where ranks are
    /// followed that were not before.
    pub(super) async fn learn_on(&mut self) -> bool {
        if !self.has_learnt {
            return self.learn().await;
        }
        let is_due = self.looks.is_multiple_of(ASK_EVERY) || mem::take(&mut self.is_hinted);
        if is_due {
            let told = self.worker.engine.models().await;
            self.told.models = told.or_earlier(mem::take(&mut self.told.models));
            self.show_models();
        }
        if self.has_reconnected() || is_due && self.ranks.is_empty() {
            let has_new_ranks = self.ask_sources().await;
            self.show_offload();
            return has_new_ranks;
        }
        false
    }

    /// The engine may be another from here on: what the one before told says nothing of it.
    pub(super) fn forget_life(&mut self) {
        self.state.lives += 1;
        let lives = self.state.lives;
        // At once: a look takes its time, and until its end the old tokens would count.
        self.config.fleet.update(&self.worker.id, |shown| shown.lives = lives);
        self.told = engine::Capabilities::default();
        self.has_learnt = false;
        self.has_said_mixed = false;
        self.tries = 0;
        self.state.models = Default::default();
        self.state.are_adapters_fixed = false;
        self.state.version = None;
        self.state.caution = Caution::default();
        self.block_size = None;
        self.connectors = None;
        self.show_offload();
    }

    fn show_offload(&self) {
        let offload = offload(&self.told);
        for rank in &self.ranks {
            self.config.sink.index.set_offload(rank.id(), offload);
        }
    }

    /// Shows why no model is known, where none is.
    pub(super) fn show_silence(&mut self) {
        self.state.silence = self.told.models.untold().map(Into::into);
    }

    fn show_models(&mut self) {
        if let Some(models) = self.told.models.told() {
            self.state.models = models.clone();
        }
        self.show_silence();
        self.state.are_adapters_fixed = self.told.loads_adapters.told() == Some(&false);
    }
}

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
            // A Mooncake store lies in the memory of its hosts, and its events say `cpu` (0.32.0,
            // source).
            "OffloadingConnector" | "SimpleCPUOffloadConnector" | "MooncakeStoreConnector" => {
                TierSet::of(Tier::Cpu)
            }
            _ => TierSet::CONNECTOR,
        })
    })
}

/// What the events of a connector's tiers prove. Only two are known to announce every removal of
/// their tier: the offloading connector into host memory and the simple one (0.32.0,
/// `v1/kv_offload/cpu/manager.py` and `v1/simple_kv_offload/manager.py`, read). Mooncake's store
/// and LMCache build no removal, nor do tiers of files and objects. A part of a multi connector
/// proves
/// nothing: the engine asks the first that has anything, and nobody tells which that is.
pub(crate) fn offload(told: &engine::Capabilities) -> Offload {
    let (Some([name]), Some(config)) =
        (told.connectors.told().map(Vec::as_slice), told.offload.told())
    else {
        return Offload::UNKNOWN;
    };
    let cpu = Offload {
        estimated: TierSet::CONNECTOR.without(TierSet::of(Tier::Cpu)),
        ..Offload::UNKNOWN
    };
    match (name.as_str(), config.spec_name.as_deref()) {
        ("OffloadingConnector", None | Some("CPUOffloadingSpec")) => {
            Offload { blocks_per_chunk: chunk(told, config), ..cpu }
        }
        ("SimpleCPUOffloadConnector", _) => Offload { blocks_per_chunk: Some(1), ..cpu },
        _ => Offload::UNKNOWN,
    }
}

/// Blocks in a chunk: one where nothing is configured (0.32.0, `offloading/config.py`, read).
fn chunk(told: &engine::Capabilities, config: &engine::Offload) -> Option<u32> {
    let blocks = match (config.blocks_per_chunk, config.tokens_per_chunk) {
        (None, None) => 1,
        (Some(blocks), None) => blocks,
        (None, Some(tokens)) => {
            let size = u64::from(*told.block_size.told()?);
            (size > 0 && tokens.is_multiple_of(size)).then_some(tokens / size)?
        }
        (Some(_), Some(_)) => return None,
    };
    u32::try_from(blocks).ok().filter(|blocks| *blocks > 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{Learnt, Offload as Config};

    fn told(names: &[&str], config: Config, block_size: Option<u32>) -> engine::Capabilities {
        fn learnt<T>(value: Option<T>) -> Learnt<T> {
            let unknown = || Learnt::Unknown { why: "not asked".to_owned() };
            value.map_or_else(unknown, |value| Learnt::Told { value, by: "/server_info" })
        }
        engine::Capabilities {
            connectors: learnt(Some(names.iter().map(|name| (*name).to_owned()).collect())),
            offload: learnt(Some(config)),
            block_size: learnt(block_size),
            ..engine::Capabilities::default()
        }
    }

    #[test]
    fn only_tiers_whose_removals_are_announced_are_proven() {
        let plain = |names: &[&str]| offload(&told(names, Config::default(), None));
        let disk_and_remote = TierSet::of(Tier::Disk).with(TierSet::of(Tier::Remote));
        let proven = Offload { estimated: disk_and_remote, blocks_per_chunk: Some(1) };
        assert_eq!(plain(&["OffloadingConnector"]), proven);
        assert_eq!(plain(&["SimpleCPUOffloadConnector"]), proven);
        let unknown: [&[&str]; 5] = [
            &["MooncakeStoreConnector"],
            &["LMCacheConnectorV1"],
            &["OffloadingConnector", "MooncakeStoreConnector"],
            &["MyConnector"],
            &[],
        ];
        for names in unknown {
            assert_eq!(plain(names), Offload::UNKNOWN, "{names:?}");
        }
        let tiered =
            Config { spec_name: Some("TieringOffloadingSpec".to_owned()), ..Config::default() };
        assert_eq!(offload(&told(&["OffloadingConnector"], tiered, None)), Offload::UNKNOWN);
        let silent = Learnt::Unknown { why: "404".to_owned() };
        let told = told(&["OffloadingConnector"], Config::default(), None);
        let silent = engine::Capabilities { offload: silent, ..told };
        assert_eq!(offload(&silent), Offload::UNKNOWN);
    }

    #[test]
    fn a_chunk_is_told_in_blocks_or_in_tokens() {
        for (blocks, tokens, size, chunk) in [
            (Some(4), None, None, Some(4)),
            (None, Some(64), Some(16), Some(4)),
            (None, Some(64), None, None),
            (None, Some(40), Some(16), None),
            (Some(4), Some(64), Some(16), None),
            (Some(0), None, None, None),
            (Some(u64::MAX), None, None, None),
        ] {
            let config =
                Config { blocks_per_chunk: blocks, tokens_per_chunk: tokens, ..Config::default() };
            let told = told(&["OffloadingConnector"], config, size);
            assert_eq!(offload(&told).blocks_per_chunk, chunk, "{blocks:?} {tokens:?} {size:?}");
        }
    }

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
