//! Which tier an engine means by the name of a medium.
//!
//! Invariant: every name has a tier; one that nobody knows is `remote`, and is told once.

use std::collections::BTreeSet;

use fak_kernel::Tier;

/// Names seen in the field, in capitals. vLLM's device cache says `GPU` on every hardware, its
/// connectors `CPU`, `cpu` and `STORAGE` (0.11.0 to 0.33.0, source); the others are what bridges
/// and other routers call the same.
const NAMES: &[(&str, Tier)] = &[
    ("GPU", Tier::Gpu),
    ("DEVICE", Tier::Gpu),
    ("HBM", Tier::Gpu),
    ("CPU", Tier::Cpu),
    ("CPU_PINNED", Tier::Cpu),
    ("CPU_TIER1", Tier::Cpu),
    ("CPU_TIER2", Tier::Cpu),
    ("HOST", Tier::Cpu),
    ("HOST_PINNED", Tier::Cpu),
    ("PINNED", Tier::Cpu),
    ("DRAM", Tier::Cpu),
    ("DISK", Tier::Disk),
    ("STORAGE", Tier::Disk),
    ("FILE", Tier::Disk),
    ("FS", Tier::Disk),
    ("SSD", Tier::Disk),
    ("NVME", Tier::Disk),
    ("OBJ", Tier::Disk),
    ("OBJECT", Tier::Disk),
    ("REMOTE", Tier::Remote),
    ("SHARED", Tier::Remote),
    ("EXTERNAL", Tier::Remote),
];

/// Unknown names that are remembered, so that a publisher cannot make us remember any number.
const TOLD_MAX: usize = 32;
/// Characters of an unknown name that are told.
const TOLD_CHARS: usize = 64;

/// The table, and which unknown names it has told.
#[derive(Debug, Default)]
pub struct Media {
    told: BTreeSet<String>,
}

impl Media {
    /// The tier that `medium` names, without regard to case. Without a name it is the gpu: vLLM
    /// 0.9.2 has no other tier and no such field.
    pub fn tier(&mut self, medium: Option<&str>) -> Tier {
        let Some(name) = medium else { return Tier::Gpu };
        if let Some((_, tier)) = NAMES.iter().find(|(known, _)| known.eq_ignore_ascii_case(name)) {
            return *tier;
        }
        self.tell(name);
        Tier::Remote
    }

    /// The unknown names, as far as they are remembered.
    pub fn unknown(&self) -> impl Iterator<Item = &str> {
        self.told.iter().map(String::as_str)
    }

    fn tell(&mut self, name: &str) {
        let name: String = name.chars().take(TOLD_CHARS).collect();
        if self.told.len() < TOLD_MAX && !self.told.contains(&name) {
            tracing::warn!(medium = ?name, "unknown medium in KV events, held as remote");
            self.told.insert(name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_names_have_their_tier_in_any_case() {
        let mut media = Media::default();
        for (name, tier) in [
            (None, Tier::Gpu),
            (Some("GPU"), Tier::Gpu),
            (Some("CPU"), Tier::Cpu),
            (Some("cpu"), Tier::Cpu),
            (Some("Cpu_Pinned"), Tier::Cpu),
            (Some("STORAGE"), Tier::Disk),
            (Some("remote"), Tier::Remote),
        ] {
            assert_eq!(media.tier(name), tier, "{name:?}");
        }
        assert_eq!(media.unknown().count(), 0);
    }

    #[test]
    fn every_name_is_in_capitals_and_once() {
        let names: BTreeSet<_> = NAMES.iter().map(|(name, _)| *name).collect();
        assert_eq!(names.len(), NAMES.len());
        assert!(names.iter().all(|name| *name == name.to_uppercase()));
    }

    #[test]
    fn an_unknown_name_is_remote_and_told_once_and_memory_is_bounded() {
        let mut media = Media::default();
        assert_eq!(media.tier(Some("XYZ")), Tier::Remote);
        assert_eq!(media.tier(Some("XYZ")), Tier::Remote);
        assert_eq!(media.tier(Some("")), Tier::Remote);
        assert_eq!(media.unknown().collect::<Vec<_>>(), ["", "XYZ"]);
        for n in 0..1000 {
            assert_eq!(media.tier(Some(&format!("{n}{}", "é".repeat(1000)))), Tier::Remote);
        }
        assert_eq!(media.unknown().count(), TOLD_MAX);
        assert!(media.unknown().all(|name| name.chars().count() <= TOLD_CHARS));
    }
}
