//! Which version do a worker's weights have, by the engine and by whoever loads them?
//!
//! Invariant: what the engine says of itself outweighs what a caller states of it; and a version
//! that moved is told once, as a change of weights, unless it was stated before.

use std::sync::Arc;

/// What vLLM says where nobody ever named a version (0.32.0, observed).
const UNNAMED: &str = "default";

/// The version by its two sources.
#[derive(Clone, Debug, Default)]
pub(super) struct Versions {
    /// By `/weight_info`.
    told: Option<Arc<str>>,
    /// By the caller of the last wake, as long as the engine does not speak against it.
    stated: Option<Arc<str>>,
}

impl Versions {
    /// Takes in what the engine tells; whether its weights changed since it told last.
    pub(super) fn tell(&mut self, told: &Arc<str>) -> bool {
        if self.told.as_ref() == Some(told) {
            return false;
        }
        let is_first = self.told.replace(Arc::clone(told)).is_none();
        if is_first && **told == *UNNAMED {
            return false;
        }
        match self.stated.take() {
            Some(stated) => stated != *told,
            None => !is_first,
        }
    }

    /// Takes in what a caller states; whether the engine names another.
    pub(super) fn state(&mut self, version: &str) -> bool {
        let is_contradicted =
            self.told.as_deref().is_some_and(|told| told != UNNAMED && told != version);
        self.stated = (!is_contradicted).then(|| version.into());
        is_contradicted
    }

    /// Other weights were loaded, and nobody named them.
    pub(super) fn forget_stated(&mut self) {
        self.stated = None;
    }

    /// The version, where anybody knows it.
    pub(super) fn current(&self) -> Option<&Arc<str>> {
        self.stated.as_ref().or(self.told.as_ref())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn current(versions: &Versions) -> Option<&str> {
        versions.current().map(|version| &**version)
    }

    #[test]
    fn the_engine_outweighs_the_caller_unless_nobody_ever_named_its_version() {
        let mut versions = Versions::default();
        assert!(!versions.tell(&"default".into()), "it was met with it");
        assert!(!versions.state("v8"));
        assert!(!versions.tell(&"default".into()));
        assert_eq!(current(&versions), Some("v8"));
        assert!(versions.tell(&"v9".into()), "it moved");
        assert_eq!(current(&versions), Some("v9"));
        assert!(versions.state("v10"), "it says otherwise");
        assert_eq!(current(&versions), Some("v9"));
    }

    #[test]
    fn an_engine_that_says_what_was_stated_tells_nothing_new() {
        let mut versions = Versions::default();
        versions.tell(&"default".into());
        versions.state("v8");
        assert!(!versions.tell(&"v8".into()));
        assert!(versions.tell(&"default".into()), "it moved back");
        assert_eq!(current(&versions), Some("default"));
    }

    #[test]
    fn of_a_version_that_the_ledger_knows_an_engine_may_say_nothing_or_that_it_moved() {
        let known = || {
            let mut versions = Versions::default();
            assert!(!versions.state("v8"));
            versions
        };
        let mut versions = known();
        assert!(!versions.tell(&"default".into()), "it names none");
        assert_eq!(current(&versions), Some("v8"));
        assert!(!known().tell(&"v8".into()));
        assert!(known().tell(&"v9".into()), "it moved while nobody looked");
    }
}
