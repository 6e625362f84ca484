//! From an action's body to what is asked.
//!
//! Invariant: an option that the action does not take is refused by name, with those that it takes;
//! none is dropped, and none is guessed.

use std::time::Duration;

use axum::body::Bytes;
use fak_kernel::witness::{Level, Mode, Move, Part, Parts, Quarantine, Weights};
use serde_json::{Map, Value};

use super::error::{Error, shown};
use crate::lifecycle::Request;

/// Bytes of a holder's name.
const HOLDER_BYTES_MAX: usize = 256;
/// How long a drain may be asked to take.
const DRAIN_MS_MAX: u64 = 3_600_000;

/// An action that can be asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verb {
    Pause,
    Resume,
    Sleep,
    Wake,
    Reset,
    Quarantine,
}

impl Verb {
    pub(super) const ALL: [Self; 6] =
        [Self::Pause, Self::Resume, Self::Sleep, Self::Wake, Self::Reset, Self::Quarantine];

    pub(super) const fn as_str(self) -> &'static str {
        match self {
            Self::Pause => "pause",
            Self::Resume => "resume",
            Self::Sleep => "sleep",
            Self::Wake => "wake",
            Self::Reset => "reset",
            Self::Quarantine => "quarantine",
        }
    }

    pub(super) fn parse(word: &str) -> Result<Self, Error> {
        let found = Self::ALL.into_iter().find(|verb| verb.as_str() == word);
        found.ok_or_else(|| Error::unknown("unknown_action", "action", word))
    }

    /// The options that it takes.
    const fn options(self) -> &'static [&'static str] {
        match self {
            Self::Pause => {
                &["mode", "clear", "keep_tier", "allow_evict", "drain_ms", "holder", "force"]
            }
            Self::Resume => &["holder", "force"],
            Self::Sleep => {
                &["level", "mode", "keep_tier", "allow_evict", "drain_ms", "holder", "force"]
            }
            Self::Wake => &["tags", "weights", "holder", "force"],
            Self::Reset => &["external", "running", "drain_ms", "holder", "force"],
            Self::Quarantine => &["flush", "isolate", "drain_ms", "holder", "force"],
        }
    }

    /// Whether it takes the worker, or its cache, from those who are active on it.
    pub(super) const fn takes_away(self) -> bool {
        matches!(self, Self::Pause | Self::Sleep | Self::Reset | Self::Quarantine)
    }
}

/// What is asked.
#[derive(Clone, Debug)]
pub(super) struct Asked {
    pub(super) request: Request,
    /// Do it although other sessions are active on the worker, or somebody else holds it.
    pub(super) force: bool,
}

/// Reads the body of `verb`; through a session where `session` names one.
pub(super) fn read(verb: Verb, body: &Bytes, session: Option<&str>) -> Result<Asked, Error> {
    let fields = Fields::read(verb.as_str(), body, verb.options())?;
    let mv = match verb {
        Verb::Pause => Move::Pause {
            mode: fields.mode(Mode::Keep)?,
            clear: fields.flag("clear")?,
            keep_tier: fields.flag("keep_tier")?,
        },
        Verb::Resume => Move::Resume,
        Verb::Sleep => Move::Sleep {
            level: Some(fields.level()?),
            mode: fields.mode(Mode::Wait)?,
            keep_tier: fields.flag("keep_tier")?,
        },
        Verb::Wake => {
            Move::Wake { tags: fields.tags()?, weights: fields.word("weights", Weights::Unproven)? }
        }
        Verb::Reset => {
            Move::Reset { external: fields.flag("external")?, running: fields.flag("running")? }
        }
        Verb::Quarantine => Move::Quarantine(fields.quarantine()?),
    };
    let mut request = Request::new(mv);
    request.session = session.map(str::to_owned);
    request.allow_evict = fields.flag("allow_evict")?;
    if let Some(drain) = fields.drain()? {
        request.drain = drain;
    }
    request.holder = fields.text("holder", HOLDER_BYTES_MAX)?.map(str::to_owned);
    request.force = fields.flag("force")?;
    let force = request.force;
    Ok(Asked { request, force })
}

/// A body's options.
pub(super) struct Fields(Map<String, Value>);

impl Fields {
    /// Reads the body of `what`, which takes `accepted`.
    pub(super) fn read(what: &str, body: &Bytes, accepted: &[&str]) -> Result<Self, Error> {
        if body.is_empty() {
            return Ok(Self(Map::new()));
        }
        let fields = match serde_json::from_slice(body) {
            Ok(Value::Object(fields)) => fields,
            Ok(_) => return Err(Error::bad("invalid_json", "body", "the body is no JSON object")),
            Err(error) => {
                let message = format!("the body is no JSON: {error}");
                return Err(Error::bad("invalid_json", "body", message));
            }
        };
        if let Some(name) = fields.keys().find(|name| !accepted.contains(&name.as_str())) {
            return Err(unknown_option(what, name, accepted));
        }
        Ok(Self(fields))
    }

    pub(super) fn flag(&self, name: &str) -> Result<bool, Error> {
        match self.0.get(name) {
            None => Ok(false),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(_) => Err(self.wrong(name, "true or false")),
        }
    }

    /// As [`flag`](Self::flag), where null and absent are a third answer.
    pub(super) fn flag_of(&self, name: &str) -> Result<Option<bool>, Error> {
        match self.0.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(_) => self.flag(name).map(Some),
        }
    }

    /// A text of at most `bytes_max`, without control characters; nothing where it is absent or
    /// null.
    pub(super) fn text(&self, name: &str, bytes_max: usize) -> Result<Option<&str>, Error> {
        let is_good = |text: &&str| {
            !text.is_empty() && text.len() <= bytes_max && !text.contains(char::is_control)
        };
        match self.0.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => match value.as_str().filter(is_good) {
                Some(text) => Ok(Some(text)),
                None => Err(self.wrong(name, "a text, not empty and not long")),
            },
        }
    }

    /// A list of texts; nothing where it is absent or null.
    pub(super) fn texts(&self, name: &str) -> Result<Option<Vec<&str>>, Error> {
        let expected = "a list of texts";
        match self.0.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::Array(texts)) => {
                let words: Option<Vec<_>> = texts.iter().map(Value::as_str).collect();
                words.map(Some).ok_or_else(|| self.wrong(name, expected))
            }
            Some(_) => Err(self.wrong(name, expected)),
        }
    }

    pub(super) fn mode(&self, default: Mode) -> Result<Mode, Error> {
        self.word("mode", default)
    }

    fn word<T: Word>(&self, name: &str, default: T) -> Result<T, Error> {
        match self.0.get(name) {
            None => Ok(default),
            Some(value) => {
                value.as_str().and_then(T::parse).ok_or_else(|| self.wrong(name, T::WORDS))
            }
        }
    }

    /// A word that has to be there.
    pub(super) fn word_of<T: Word>(&self, name: &str) -> Result<T, Error> {
        let found = self.0.get(name).and_then(Value::as_str).and_then(T::parse);
        found.ok_or_else(|| self.wrong(name, T::WORDS))
    }

    /// The level, which has a default for whoever sleeps for a while.
    pub(super) fn level_or(&self, default: Level) -> Result<Level, Error> {
        if self.0.contains_key("level") { self.level() } else { Ok(default) }
    }

    fn level(&self) -> Result<Level, Error> {
        let level = self.0.get("level").and_then(Value::as_u64);
        let level = level.and_then(|level| u8::try_from(level).ok()).and_then(Level::from_number);
        level.ok_or_else(|| {
            let message = format!(
                "sleep needs level 1 or 2{}; to stop a worker without dropping anything, use pause",
                instead_of(self.0.get("level"))
            );
            Error::bad("invalid_option", "level", message)
        })
    }

    fn tags(&self) -> Result<Parts, Error> {
        let expected = "a list of weights, kv_cache and scheduling";
        let Some(tags) = self.0.get("tags") else { return Ok(Parts::NONE) };
        let tags = tags.as_array().ok_or_else(|| self.wrong("tags", expected))?;
        let part = |tag: &Value| tag.as_str().and_then(Part::parse);
        tags.iter().map(|tag| part(tag).ok_or_else(|| self.wrong("tags", expected))).collect()
    }

    pub(super) fn drain(&self) -> Result<Option<Duration>, Error> {
        let Some(value) = self.0.get("drain_ms") else { return Ok(None) };
        let drain = value.as_u64().filter(|ms| *ms <= DRAIN_MS_MAX).map(Duration::from_millis);
        let expected = || self.wrong("drain_ms", "milliseconds, 3600000 at most");
        drain.map(Some).ok_or_else(expected)
    }

    /// The option is there and wrong, or has to be there and is not.
    pub(super) fn wrong(&self, name: &str, expected: &str) -> Error {
        let instead = instead_of(self.0.get(name));
        Error::bad("invalid_option", name, format!("{name} has to be {expected}{instead}"))
    }

    fn quarantine(&self) -> Result<Quarantine, Error> {
        match (self.flag("flush")?, self.flag("isolate")?) {
            (true, false) => Ok(Quarantine::Flush),
            (false, true) => Ok(Quarantine::Isolate),
            _ => Err(Error::bad(
                "invalid_option",
                "flush",
                "quarantine needs flush (a reset of the whole prefix cache) or isolate (a new \
                 salt for the session), and not both: no engine drops one span alone",
            )),
        }
    }
}

/// A closed vocabulary.
pub(super) trait Word: Sized {
    const WORDS: &'static str;
    fn parse(word: &str) -> Option<Self>;
}

impl Word for Mode {
    const WORDS: &'static str = "abort, wait or keep";
    fn parse(word: &str) -> Option<Self> {
        Self::parse(word)
    }
}

impl Word for Weights {
    const WORDS: &'static str = "same, loaded, changed or unproven";
    fn parse(word: &str) -> Option<Self> {
        Self::parse(word)
    }
}

/// `, not "drop"`: what stands there instead, if anything does.
fn instead_of(found: Option<&Value>) -> String {
    found.map(|value| format!(", not {}", shown(&value.to_string()))).unwrap_or_default()
}

fn unknown_option(what: &str, name: &str, accepted: &[&str]) -> Error {
    let takes = match accepted {
        [] => "no options".to_owned(),
        accepted => accepted.join(", "),
    };
    // Names come from a client: what is shown of one is bounded.
    let shown: String = name.chars().take(64).collect();
    let message = format!("`{shown}` is no option of {what}; it takes {takes}");
    Error::bad("unknown_option", shown, message).with("accepted", accepted)
}

/// An action's options go in its body: one in the query would be dropped in silence.
pub(super) fn no_query(verb: Verb, query: Option<&str>) -> Result<(), Error> {
    no_query_of(verb.as_str(), query, verb.options())
}

/// The same of `what`, which takes `accepted`.
pub(super) fn no_query_of(what: &str, query: Option<&str>, accepted: &[&str]) -> Result<(), Error> {
    match query {
        None | Some("") => Ok(()),
        Some(query) => {
            let name = query.split(['=', '&']).next().unwrap_or_default();
            let name: String = name.chars().take(64).collect();
            let message = format!(
                "options of {what} go in a JSON body, not in the query; it takes {}",
                accepted.join(", ")
            );
            Err(Error::bad("misplaced_option", name, message).with("accepted", accepted))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(verb: Verb, body: &str) -> Result<Asked, Error> {
        read(verb, &Bytes::copy_from_slice(body.as_bytes()), Some("s"))
    }

    fn mv(verb: Verb, body: &str) -> Move {
        asked(verb, body).expect("a good body").request.mv
    }

    #[test]
    fn a_pause_keeps_by_default_and_a_sleep_waits() {
        let pause = Move::Pause { mode: Mode::Keep, clear: false, keep_tier: false };
        assert_eq!(mv(Verb::Pause, ""), pause);
        let sleep = |level, mode, keep_tier| Move::Sleep { level: Some(level), mode, keep_tier };
        assert_eq!(mv(Verb::Sleep, r#"{"level":1}"#), sleep(Level::One, Mode::Wait, false));
        let all = r#"{"level":2,"keep_tier":true,"mode":"abort"}"#;
        assert_eq!(mv(Verb::Sleep, all), sleep(Level::Two, Mode::Abort, true));
        let wake = Move::Wake { tags: Parts::of(Part::Weights), weights: Weights::Changed };
        assert_eq!(mv(Verb::Wake, r#"{"tags":["weights"],"weights":"changed"}"#), wake);
        let reset = Move::Reset { external: true, running: false };
        assert_eq!(mv(Verb::Reset, r#"{"external":true}"#), reset);
        let flush = Move::Quarantine(Quarantine::Flush);
        assert_eq!(mv(Verb::Quarantine, r#"{"flush":true}"#), flush);
    }

    #[test]
    fn what_is_unknown_misplaced_or_ill_formed_is_refused_by_name() {
        for (verb, body, message) in [
            (Verb::Sleep, r#"{"levl":1}"#, "`levl` is no option of sleep; it takes level, mode"),
            (Verb::Resume, r#"{"level":1}"#, "`level` is no option of resume; it takes holder"),
            (Verb::Wake, r#"{"holder":""}"#, "holder has to be a text"),
            (Verb::Sleep, "{}", "use pause"),
            (Verb::Sleep, r#"{"level":0}"#, "use pause"),
            (Verb::Sleep, r#"{"level":257}"#, "level 1 or 2, not 257"),
            (Verb::Sleep, r#"{"level":"1"}"#, "use pause"),
            (Verb::Pause, r#"{"mode":"drop"}"#, "mode has to be abort, wait or keep, not \"drop\""),
            (Verb::Pause, r#"{"clear":"yes"}"#, "clear has to be true or false"),
            (Verb::Pause, r#"{"drain_ms":-1}"#, "drain_ms has to be milliseconds"),
            (Verb::Wake, r#"{"tags":"weights"}"#, "tags has to be a list"),
            (Verb::Wake, r#"{"tags":["wieghts"]}"#, "tags has to be a list"),
            (Verb::Quarantine, "{}", "flush"),
            (Verb::Quarantine, r#"{"flush":true,"isolate":true}"#, "not both"),
            (Verb::Pause, "[]", "no JSON object"),
            (Verb::Pause, "{", "no JSON"),
        ] {
            let error = asked(verb, body).expect_err(body);
            assert_eq!(error.status(), 400, "{body}");
            assert!(error.message().contains(message), "{body}: {}", error.message());
        }
        assert!(no_query(Verb::Sleep, Some("level=2")).is_err());
        assert!(no_query(Verb::Sleep, None).is_ok());
    }
}
