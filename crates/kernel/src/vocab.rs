//! The closed vocabularies: the same word in code, JSON, SQL, metrics and docs.
//!
//! Invariant: every word round-trips through [`as_str`](Tier::as_str) and [`parse`](Tier::parse),
//! and no other word does.

use core::fmt;

/// Declares a closed vocabulary: an enum, its words, and both directions between them.
macro_rules! vocabulary {
    ($(#[$doc:meta])* $name:ident { $($(#[$vdoc:meta])* $variant:ident = $word:literal,)+ }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum $name { $($(#[$vdoc])* $variant,)+ }

        impl $name {
            /// Every word, in the order in which they are written down.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)+];

            /// The word.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $word,)+ }
            }

            /// The value that `word` names; `None` for a word outside the vocabulary.
            #[must_use]
            pub fn parse(word: &str) -> Option<Self> {
                match word { $($word => Some(Self::$variant),)+ _ => None }
            }
        }

        impl core::fmt::Display for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                f.write_str(self.as_str())
            }
        }
    };
}
pub(crate) use vocabulary;

vocabulary! {
    /// Why a belief was dropped.
    LossCause {
        /// The engine announced that it evicted the block.
        Removed = "removed",
        /// The engine announced that it dropped everything, and no action of fak's explains it.
        Cleared = "cleared",
        /// Events are missing.
        Gap = "gap",
        /// Another life of the engine answers.
        NewLife = "new_life",
        /// An action of fak's own.
        OwnAction = "own_action",
        /// fak no longer believes what was announced.
        Doubt = "doubt",
    }
}

vocabulary! {
    /// What happened to KV: the verdict of a witness row, per tier, and of a NIXL lease.
    Disposition {
        /// Still there, with evidence.
        Preserved = "preserved",
        /// Proven gone.
        Forgotten = "forgotten",
        /// Nobody can say. Never folded into `preserved`, never shown as cold.
        Unknown = "unknown",
    }
}

vocabulary! {
    /// Where KV blocks live. `Gpu` is the engine's own cache on whatever hardware; the others are a
    /// connector's.
    Tier {
        /// The engine's own cache.
        Gpu = "gpu",
        /// Host memory behind a connector.
        Cpu = "cpu",
        /// Files or objects behind a connector.
        Disk = "disk",
        /// A shared store behind a connector, and any medium whose name is not known.
        Remote = "remote",
    }
}

vocabulary! {
    /// What a worker is doing. Only `Serving` serves.
    Phase {
        /// Takes requests.
        Serving = "serving",
        /// Scheduler stopped, memory resident.
        Paused = "paused",
        /// Memory released.
        Sleeping = "sleeping",
        /// Partly woken.
        Waking = "waking",
        /// Unreachable, failed, or in a state that nobody can name.
        Error = "error",
    }
}

vocabulary! {
    /// What was done to a worker: the first six are asked by fak, the others are noticed.
    Action {
        /// Stop the scheduler.
        Pause = "pause",
        /// Start it again.
        Resume = "resume",
        /// Release memory.
        Sleep = "sleep",
        /// Take memory back.
        Wake = "wake",
        /// Drop the prefix cache.
        Reset = "reset",
        /// Put a session's span out of reach.
        Quarantine = "quarantine",
        /// fak looked at the worker for the first time.
        Join = "join",
        /// A new incarnation appeared.
        Restart = "restart",
        /// The worker vanished.
        Lost = "lost",
        /// Events are missing and replay could not bring them.
        Gap = "gap",
        /// The weights changed.
        Weights = "weights",
        /// The engine's state moved behind fak's back.
        Drift = "drift",
    }
}

vocabulary! {
    /// What fak holds true of a block on a worker, rank and tier.
    Belief {
        /// A store was accepted after the last fence, and no removal since.
        Proven = "proven",
        /// Removed, cleared, or never there.
        Gone = "gone",
        /// It was proven once; nothing says whether it still holds.
        Unknown = "unknown",
    }
}

vocabulary! {
    /// What a witness row's verdict stands on.
    Evidence {
        /// The engine's state was read after the call, and the verdict rests on it.
        Observed = "observed",
        /// The engine answered; nothing was observed.
        Answered = "answered",
        /// Nothing reached the engine: fak did not send, or the route is closed.
        NotSent = "not_sent",
        /// No answer and no observation.
        None = "none",
    }
}

/// A set of tiers.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct TierSet(u8);

impl TierSet {
    /// No tier.
    pub const NONE: Self = Self(0);
    /// The engine's own cache alone.
    pub const GPU: Self = Self(1);
    /// The connector's tiers: cpu, disk, remote.
    pub const CONNECTOR: Self = Self(0b1110);
    /// Every tier.
    pub const ALL: Self = Self(0b1111);

    /// The set of one tier.
    #[must_use]
    pub const fn of(tier: Tier) -> Self {
        Self(1 << tier as u8)
    }

    /// Whether `tier` is in the set.
    #[must_use]
    pub const fn has(self, tier: Tier) -> bool {
        self.0 & Self::of(tier).0 != 0
    }

    /// The tiers in either set.
    #[must_use]
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// The tiers in this set that are not in `other`.
    #[must_use]
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Whether the set holds no tier.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The tiers in the set, gpu first.
    pub fn iter(self) -> impl Iterator<Item = Tier> {
        Tier::ALL.iter().copied().filter(move |tier| self.has(*tier))
    }
}

impl FromIterator<Tier> for TierSet {
    fn from_iter<I: IntoIterator<Item = Tier>>(tiers: I) -> Self {
        tiers.into_iter().fold(Self::NONE, |set, tier| set.with(Self::of(tier)))
    }
}

impl fmt::Debug for TierSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter().map(Tier::as_str)).finish()
    }
}

/// One value for each tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct PerTier<T> {
    /// The engine's own cache.
    pub gpu: T,
    /// Host memory.
    pub cpu: T,
    /// Files or objects.
    pub disk: T,
    /// A shared store.
    pub remote: T,
}

impl<T: Copy> PerTier<T> {
    /// The same value for each tier.
    #[must_use]
    pub const fn all(value: T) -> Self {
        Self { gpu: value, cpu: value, disk: value, remote: value }
    }

    /// The value for `tier`.
    #[must_use]
    pub const fn get(&self, tier: Tier) -> T {
        match tier {
            Tier::Gpu => self.gpu,
            Tier::Cpu => self.cpu,
            Tier::Disk => self.disk,
            Tier::Remote => self.remote,
        }
    }

    /// The value for `tier`, to be changed.
    pub const fn get_mut(&mut self, tier: Tier) -> &mut T {
        match tier {
            Tier::Gpu => &mut self.gpu,
            Tier::Cpu => &mut self.cpu,
            Tier::Disk => &mut self.disk,
            Tier::Remote => &mut self.remote,
        }
    }
}

impl PerTier<Disposition> {
    /// The tiers whose beliefs have to go cold under this verdict: all that are not preserved.
    #[must_use]
    pub fn demoted(&self) -> TierSet {
        Tier::ALL.iter().copied().filter(|t| self.get(*t) != Disposition::Preserved).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_round_trips_and_no_other_does() {
        fn check<T: Copy + PartialEq + fmt::Debug>(
            all: &[T],
            as_str: fn(T) -> &'static str,
            parse: fn(&str) -> Option<T>,
        ) {
            for value in all {
                assert_eq!(parse(as_str(*value)), Some(*value));
                assert_eq!(parse(&as_str(*value).to_uppercase()), None);
            }
            assert_eq!(parse(""), None);
        }
        use std::string::ToString;
        assert_eq!(Tier::Gpu.to_string(), "gpu");
        check(Disposition::ALL, Disposition::as_str, Disposition::parse);
        check(Tier::ALL, Tier::as_str, Tier::parse);
        check(Phase::ALL, Phase::as_str, Phase::parse);
        check(Action::ALL, Action::as_str, Action::parse);
        check(Belief::ALL, Belief::as_str, Belief::parse);
        check(LossCause::ALL, LossCause::as_str, LossCause::parse);
        check(Evidence::ALL, Evidence::as_str, Evidence::parse);
    }

    #[test]
    fn a_tier_set_holds_what_was_put_in() {
        for tier in Tier::ALL {
            assert!(TierSet::ALL.has(*tier));
            assert!(!TierSet::NONE.has(*tier));
            assert_eq!(TierSet::GPU.has(*tier), *tier == Tier::Gpu);
            assert_eq!(TierSet::CONNECTOR.has(*tier), *tier != Tier::Gpu);
            assert!(!TierSet::ALL.without(TierSet::of(*tier)).has(*tier));
        }
        let shown = std::format!("{:?}", TierSet::of(Tier::Disk).with(TierSet::GPU));
        assert_eq!(shown, r#"{"gpu", "disk"}"#);
    }
}
