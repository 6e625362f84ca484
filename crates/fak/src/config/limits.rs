//! Limits of time: how long fak waits for a worker, for its clients and at its end; and of the room
//! for bodies.
//!
//! Invariant: 0 is no limit where a limit ends something, and is off where something is added.

use std::ops::RangeInclusive;
use std::time::Duration;

use serde_json::Value;

use super::faults::{Error, Found};
use super::serve::Raw;
use crate::engine::{NEVER, Timeouts};

/// The limits in force.
#[derive(Clone, Debug)]
pub struct Limits {
    /// From a streamed request to the first byte of its answer.
    pub answer_first_byte: Duration,
    /// Between two chunks of an answer.
    pub answer_idle: Duration,
    /// From a request that is not streamed to its answer.
    pub answer_whole: Duration,
    /// For a look at a worker's state.
    pub probe_within: Duration,
    /// For `/tokenize`.
    pub tokenize_within: Duration,
    /// How long fak serves on after it was asked to stop.
    pub drain_announce: Duration,
    /// Between two comments of a stream whose worker says nothing; none: there are none.
    pub keep_alive: Option<Duration>,
}

/// Most milliseconds of a limit that ends something: a day.
const MS_MAX: u64 = 86_400_000;

impl Limits {
    /// The limits of the file, and the defaults of the others.
    pub(super) fn of(raw: &Raw, f: &mut Found<'_>) -> Self {
        let defaults = Timeouts::default();
        let mut limit = |field, value: Option<u64>, default: Duration| {
            let default = u64::try_from(default.as_millis()).unwrap_or(MS_MAX);
            let limit = f.kept(ms(field, value, default, 0..=MS_MAX));
            if limit.is_zero() { NEVER } else { limit }
        };
        let (first, whole) = (raw.answer_first_byte_ms, raw.answer_whole_ms);
        let (probe, tokenize) = (raw.probe_within_ms, raw.tokenize_within_ms);
        Self {
            answer_first_byte: limit("answer_first_byte_ms", first, defaults.first_byte),
            answer_idle: limit("answer_idle_ms", raw.answer_idle_ms, defaults.idle),
            answer_whole: limit("answer_whole_ms", whole, defaults.unary),
            probe_within: limit("probe_within_ms", probe, defaults.probe),
            tokenize_within: limit("tokenize_within_ms", tokenize, defaults.tokenize),
            drain_announce: f.kept(ms(
                "drain_announce_ms",
                raw.drain_announce_ms,
                5_000,
                0..=3_600_000,
            )),
            keep_alive: {
                let every = f.kept(ms("keep_alive_ms", raw.keep_alive_ms, 0, 0..=3_600_000));
                (!every.is_zero()).then_some(every)
            },
        }
    }

    /// How long fak waits for its workers.
    #[must_use]
    pub fn timeouts(&self) -> Timeouts {
        Timeouts {
            first_byte: self.answer_first_byte,
            idle: self.answer_idle,
            unary: self.answer_whole,
            probe: self.probe_within,
            tokenize: self.tokenize_within,
            ..Timeouts::default()
        }
    }

    /// By key, as in a settings' file.
    pub(super) fn settings(&self) -> [(&'static str, Value); 7] {
        let ms = |limit: Duration| {
            let ms = if limit == NEVER { 0 } else { limit.as_millis() };
            u64::try_from(ms).map_or(Value::Null, Value::from)
        };
        [
            ("answer_first_byte_ms", ms(self.answer_first_byte)),
            ("answer_idle_ms", ms(self.answer_idle)),
            ("answer_whole_ms", ms(self.answer_whole)),
            ("probe_within_ms", ms(self.probe_within)),
            ("tokenize_within_ms", ms(self.tokenize_within)),
            ("drain_announce_ms", ms(self.drain_announce)),
            ("keep_alive_ms", ms(self.keep_alive.unwrap_or_default())),
        ]
    }
}

/// All request bodies in flight together, of which one may have `body` bytes.
pub(super) fn bodies(value: Option<u64>, body: u64) -> Result<usize, Error> {
    let (field, range) = ("bodies_bytes_max", body..=1 << 40);
    let bodies = value.unwrap_or(1 << 30);
    if !range.contains(&bodies) {
        return Err(Error::Range { field, value: bodies, range });
    }
    Ok(usize::try_from(bodies).unwrap_or(usize::MAX))
}

/// Which of them, and of the sizes of bodies, a file names.
pub(super) fn named(raw: &Raw) -> [(&'static str, bool); 9] {
    [
        ("body_bytes_max", raw.body_bytes_max.is_some()),
        ("bodies_bytes_max", raw.bodies_bytes_max.is_some()),
        ("answer_first_byte_ms", raw.answer_first_byte_ms.is_some()),
        ("answer_idle_ms", raw.answer_idle_ms.is_some()),
        ("answer_whole_ms", raw.answer_whole_ms.is_some()),
        ("probe_within_ms", raw.probe_within_ms.is_some()),
        ("tokenize_within_ms", raw.tokenize_within_ms.is_some()),
        ("drain_announce_ms", raw.drain_announce_ms.is_some()),
        ("keep_alive_ms", raw.keep_alive_ms.is_some()),
    ]
}

/// Milliseconds of the file in their range, or the default.
pub(super) fn ms(
    field: &'static str,
    value: Option<u64>,
    default: u64,
    range: RangeInclusive<u64>,
) -> Result<Duration, Error> {
    number(field, value, default, range).map(Duration::from_millis)
}

/// A number of the file in its range, or the default.
pub(super) fn number(
    field: &'static str,
    value: Option<u64>,
    default: u64,
    range: RangeInclusive<u64>,
) -> Result<u64, Error> {
    let value = value.unwrap_or(default);
    if range.contains(&value) { Ok(value) } else { Err(Error::Range { field, value, range }) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn limits(file: &str) -> Result<Limits, String> {
        let raw: Raw = toml::from_str(file).map_err(|error| error.to_string())?;
        let mut found = Found::new(&raw.source, BTreeMap::new());
        let limits = Limits::of(&raw, &mut found);
        found.end().map(|_| limits).map_err(|faults| faults.to_string())
    }

    #[test]
    fn every_limit_of_time_is_a_setting_and_0_is_none() {
        let defaults = limits("").expect("defaults");
        assert_eq!(defaults.answer_first_byte, Duration::from_secs(120));
        assert_eq!((defaults.answer_idle, defaults.keep_alive), (Duration::from_secs(60), None));
        for (key, _) in defaults.settings() {
            let of = |value: u64| {
                let limits = limits(&format!("{key} = {value}")).expect("in range");
                let mut settings = limits.settings().into_iter();
                settings.find(|(other, _)| *other == key).expect("it is there").1
            };
            assert_eq!((of(0), of(777)), (0.into(), 777.into()), "{key}");
            let error = limits(&format!("{key} = 100000000000")).expect_err("too much");
            assert!(error.contains(key), "{error}");
            let raw: Raw = toml::from_str(&format!("{key} = 1")).expect("TOML");
            assert!(named(&raw).contains(&(key, true)), "{key}");
        }
        let none = "answer_first_byte_ms = 0\nanswer_idle_ms = 0\nanswer_whole_ms = 0\n\
                    probe_within_ms = 0\ntokenize_within_ms = 0";
        let none = limits(none).expect("no limits").timeouts();
        let all = [none.first_byte, none.idle, none.unary, none.probe, none.tokenize];
        assert_eq!(all, [NEVER; 5]);
    }
}
