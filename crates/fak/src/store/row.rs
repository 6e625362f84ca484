//! What a witness row says, in the ledger and in every answer that shows one.
//!
//! Invariant: a row is never changed. One whose outcome was not recorded reads as unknown, not as
//! whatever was intended.

use fak_kernel::witness::{Part, Parts};
use fak_kernel::{Action, Disposition, Evidence, Phase, Tier, TierSet};
use serde::{Deserialize, Serialize, Serializer};
use serde_json::{Map, Value};

/// Writes and reads the kernel's words in JSON.
pub mod word {
    use super::*;
    use serde::Deserializer;
    use serde::de::Error;

    /// A closed vocabulary of the kernel.
    pub trait Word: Copy + 'static {
        /// The word.
        fn word(self) -> &'static str;
        /// The value that a word names.
        fn parse(word: &str) -> Option<Self>;
    }

    macro_rules! words {
        ($($name:ty),+) => {$(
            impl Word for $name {
                fn word(self) -> &'static str { self.as_str() }
                fn parse(word: &str) -> Option<Self> { <$name>::parse(word) }
            }
        )+};
    }
    words!(Action, Disposition, Evidence, Phase, Tier);

    /// Writes the word.
    ///
    /// # Errors
    /// The serializer's.
    pub fn serialize<T: Word, S: Serializer>(value: &T, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(value.word())
    }

    /// Reads the word.
    ///
    /// # Errors
    /// A word outside the vocabulary.
    pub fn deserialize<'de, T: Word, D: Deserializer<'de>>(from: D) -> Result<T, D::Error> {
        let word = String::deserialize(from)?;
        T::parse(&word).ok_or_else(|| D::Error::custom(format!("`{word}` is no word of its list")))
    }
}

/// Dispositions of the tiers that a worker has, gpu first. A tier that it does not have is absent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tiers(pub Vec<(Tier, Disposition)>);

impl Tiers {
    /// The disposition of `tier`, if the worker has it.
    #[must_use]
    pub fn get(&self, tier: Tier) -> Option<Disposition> {
        self.0.iter().find(|(t, _)| *t == tier).map(|(_, kv)| *kv)
    }
}

impl Serialize for Tiers {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_map(self.0.iter().map(|(tier, kv)| (tier.as_str(), kv.as_str())))
    }
}

impl<'de> Deserialize<'de> for Tiers {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        use serde::de::Error;
        let words = Map::deserialize(from)?;
        let tier = |(tier, kv): (&String, &Value)| {
            Some((Tier::parse(tier)?, Disposition::parse(kv.as_str()?)?))
        };
        let tiers: Option<Vec<_>> = words.iter().map(tier).collect();
        tiers.map(Self).ok_or_else(|| D::Error::custom("tiers: a tier or disposition is no word"))
    }
}

/// What of a worker its engine does not show, after a row: what a fak that starts again could not
/// find out anew.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Standing {
    /// The tiers that may hold KV of other weights than those loaded.
    #[serde(with = "tier_set")]
    pub stale: TierSet,
    /// Whether weights are known to be loaded once the engine is awake.
    pub weights_proven: bool,
    /// Whether a fixed prompt was answered otherwise than before its sleep.
    pub suspect: bool,
    /// The parts that are awake, as far as that is known.
    #[serde(default, with = "parts")]
    pub awake: Parts,
    /// Whether somebody woke the weights' memory by name, to load weights into it.
    #[serde(default)]
    pub takes_weights: bool,
    /// The row of the last change of weights by which no version moved.
    pub weights_epoch: Option<u64>,
}

/// Writes and reads a set of tiers as their words, gpu first.
mod tier_set {
    use super::*;
    use serde::de::Error;

    pub(super) fn serialize<S: Serializer>(tiers: &TierSet, to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(tiers.iter().map(Tier::as_str))
    }

    pub(super) fn deserialize<'de, D: serde::Deserializer<'de>>(
        from: D,
    ) -> Result<TierSet, D::Error> {
        let words = Vec::<String>::deserialize(from)?;
        let tiers: Option<TierSet> = words.iter().map(|word| Tier::parse(word)).collect();
        tiers.ok_or_else(|| D::Error::custom("stale: a tier is no word"))
    }
}

/// Writes and reads a set of parts as their words.
mod parts {
    use super::*;
    use serde::de::Error;

    pub(super) fn serialize<S: Serializer>(parts: &Parts, to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(parts.iter().map(Part::as_str))
    }

    pub(super) fn deserialize<'de, D: serde::Deserializer<'de>>(
        from: D,
    ) -> Result<Parts, D::Error> {
        let words = Vec::<String>::deserialize(from)?;
        let parts: Option<Parts> = words.iter().map(|word| Part::parse(word)).collect();
        parts.ok_or_else(|| D::Error::custom("awake: a part is no word"))
    }
}

/// What is about to be done.
#[derive(Clone, Debug, PartialEq)]
pub struct NewIntent {
    /// The worker's id.
    pub worker: String,
    /// The rank, where the row is on one alone.
    pub rank: Option<u32>,
    /// The life of the worker's process.
    pub incarnation: Option<String>,
    /// The session through which it was asked.
    pub session: Option<String>,
    /// What.
    pub action: Action,
    /// Sleep level.
    pub level: Option<u8>,
    /// The weight version before.
    pub weight_version: Option<String>,
    /// Whether beliefs go cold before the call leaves.
    pub warm_demoted: bool,
    /// What is asked of the engine; null where fak only noticed.
    pub asked: Value,
    /// What holds if no outcome follows.
    pub standing: Option<Standing>,
    /// Whether the row itself is the weights' epoch from here on, of its outcome too: its number
    /// takes the place of the one that a standing names.
    pub is_epoch: bool,
}

impl NewIntent {
    /// One that is taken back: see [`Outcome::probe`].
    pub(super) fn probe() -> Self {
        Self {
            worker: "probe".to_owned(),
            rank: None,
            incarnation: None,
            session: None,
            action: Action::Reset,
            level: None,
            weight_version: None,
            warm_demoted: false,
            asked: Value::Null,
            standing: None,
            is_epoch: false,
        }
    }
}

/// What came of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// The phase after.
    pub phase: Phase,
    /// What happened to the gpu tier's KV.
    pub kv: Disposition,
    /// And to each tier that the worker has.
    pub tiers: Tiers,
    /// The weight version after.
    pub weight_version: Option<String>,
    /// Whether any belief went cold.
    pub warm_demoted: bool,
    /// Whether the worker serves after it.
    pub serving: bool,
    /// What the verdict stands on.
    pub evidence: Evidence,
    /// What the engine answered; null where it did not.
    pub answered: Value,
    /// What was then observed; null where nothing was.
    pub observed: Value,
    /// Why the verdict reads so.
    pub reason: String,
    /// What holds from here on; absent where whoever writes it does not know.
    pub standing: Option<Standing>,
}

impl Outcome {
    /// One that shows whether the database takes rows, and is taken back.
    pub(super) fn probe() -> Self {
        Self {
            phase: Phase::Error,
            kv: Disposition::Unknown,
            tiers: Tiers::default(),
            weight_version: None,
            warm_demoted: false,
            serving: false,
            evidence: Evidence::None,
            answered: Value::Null,
            observed: Value::Null,
            reason: "probe".to_owned(),
            standing: None,
        }
    }
}

/// One witness row.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// Counts the ledger's rows, from 1.
    pub seq: u64,
    /// When it was written, RFC 3339 in UTC.
    pub at: String,
    /// The worker's id.
    pub worker: String,
    /// The rank, where the row is on one alone.
    pub rank: Option<u32>,
    /// The life of the worker's process.
    pub incarnation: Option<String>,
    /// The session through which it was asked.
    pub session: Option<String>,
    /// What was done, or noticed.
    #[serde(with = "word")]
    pub action: Action,
    /// Sleep level.
    pub level: Option<u8>,
    /// The phase after.
    #[serde(with = "word")]
    pub phase: Phase,
    /// What happened to the gpu tier's KV.
    #[serde(with = "word")]
    pub kv: Disposition,
    /// And to each tier that the worker has.
    pub tiers: Tiers,
    /// The weight version after; before it where no outcome was recorded.
    pub weight_version: Option<String>,
    /// Whether any belief went cold.
    pub warm_demoted: bool,
    /// Whether the worker serves after it.
    pub serving: bool,
    /// What the verdict stands on.
    #[serde(with = "word")]
    pub evidence: Evidence,
    /// What was asked of the engine.
    pub asked: Value,
    /// What it answered.
    pub answered: Value,
    /// What was then observed.
    pub observed: Value,
    /// Why the verdict reads so.
    pub reason: String,
    /// What holds from here on; null where the row does not say.
    pub standing: Option<Standing>,
}

impl Row {
    /// Whether anything reached the engine, or was noticed of it: the row tells news of the cache.
    #[must_use]
    pub fn is_sent(&self) -> bool {
        self.evidence != Evidence::NotSent
    }
}

/// Which rows to list.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Filter {
    /// Of this worker.
    pub worker: Option<String>,
    /// Through this session.
    pub session: Option<String>,
    /// Of this action.
    pub action: Option<Action>,
    /// With this verdict on the gpu tier.
    pub kv: Option<Disposition>,
    /// With greater numbers than this.
    pub after: Option<u64>,
    /// At most this many; the store's own limit where it is greater or absent.
    pub limit: Option<u32>,
    /// The newest first, instead of the oldest.
    pub newest_first: bool,
}
