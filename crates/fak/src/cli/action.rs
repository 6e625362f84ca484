//! Actions and their options, as arguments and as the control API takes them.
//!
//! Invariant: what was not given is not sent, so that fak's own defaults hold.

use clap::{Args, Subcommand, ValueEnum};
use serde_json::{Map, Value};

use super::client::{Client, Error, segment};
use super::{Exit, table};
use crate::store::Row;

/// What may be done to a worker; `E` holds what else may be said.
#[derive(Debug, Subcommand)]
pub enum Action<E: Args> {
    /// Stop without dropping anything.
    Pause(Pause<E>),
    /// Go on after a pause.
    Resume(Resume<E>),
    /// Free the device's memory. The cache is dropped.
    Sleep(Sleep<E>),
    /// Take the device's memory back.
    Wake(Wake<E>),
    /// Drop the prefix cache.
    Reset(Reset<E>),
}

/// What happens to requests in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Mode {
    /// They are aborted.
    Abort,
    /// They may end.
    Wait,
    /// They are kept, and go on afterwards.
    Keep,
}

/// May be said of a worker.
#[derive(Debug, Args)]
pub struct Held {
    /// Act as this holder, where the worker is held.
    #[arg(long, value_name = "NAME")]
    pub holder: Option<String>,
    /// Act although somebody else holds the worker.
    #[arg(long)]
    pub force: bool,
}

/// May be said where a session is named.
#[derive(Debug, Args)]
pub struct Force {
    /// Act as this holder, where the session's worker is held.
    #[arg(long, value_name = "NAME")]
    pub holder: Option<String>,
    /// Act although other sessions are active on the worker, or somebody else holds it.
    #[arg(long)]
    pub force: bool,
}

/// What a set of extra options adds to the body.
pub trait Extra: Args {
    /// Adds it.
    fn add(&self, to: &mut Map<String, Value>);
}

impl Extra for Held {
    fn add(&self, to: &mut Map<String, Value>) {
        override_hold(to, self.holder.as_deref(), self.force);
    }
}

impl Extra for Force {
    fn add(&self, to: &mut Map<String, Value>) {
        override_hold(to, self.holder.as_deref(), self.force);
    }
}

fn override_hold(to: &mut Map<String, Value>, holder: Option<&str>, force: bool) {
    text(to, "holder", holder);
    flag(to, "force", force);
}

/// Options of a stop.
#[derive(Debug, Args)]
pub struct Stop {
    /// What happens to requests in flight; where not said, wait, and keep for a pause.
    #[arg(long, value_enum)]
    pub mode: Option<Mode>,
    /// Keep the connector's tiers; refused where that is not proven to work.
    #[arg(long)]
    pub keep_tier: bool,
    /// Go on where they cannot be kept.
    #[arg(long)]
    pub allow_evict: bool,
    /// How long requests may take to end, in milliseconds.
    #[arg(long, value_name = "MS")]
    pub drain_ms: Option<u64>,
}

/// Arguments of a pause.
#[derive(Debug, Args)]
pub struct Pause<E: Args> {
    /// Which.
    #[arg(value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub id: String,
    /// Drop the cache as well.
    #[arg(long)]
    pub clear: bool,
    /// How.
    #[command(flatten)]
    pub stop: Stop,
    /// What else.
    #[command(flatten)]
    pub extra: E,
}

/// Arguments of a resume.
#[derive(Debug, Args)]
pub struct Resume<E: Args> {
    /// Which.
    #[arg(value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub id: String,
    /// What else.
    #[command(flatten)]
    pub extra: E,
}

/// Arguments of a sleep.
#[derive(Debug, Args)]
pub struct Sleep<E: Args> {
    /// Which.
    #[arg(value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub id: String,
    /// 1 keeps the weights in host memory, 2 drops them. It has no default.
    #[arg(long, value_name = "1|2")]
    pub level: Option<u8>,
    /// How.
    #[command(flatten)]
    pub stop: Stop,
    /// What else.
    #[command(flatten)]
    pub extra: E,
}

/// Arguments of a wake.
#[derive(Debug, Args)]
pub struct Wake<E: Args> {
    /// Which.
    #[arg(value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub id: String,
    /// What to wake; all where not said.
    #[arg(long = "tag", value_enum, value_name = "TAG")]
    pub tags: Vec<Tag>,
    /// What is known of the weights; unproven where not said.
    #[arg(long, value_enum)]
    pub weights: Option<Weights>,
    /// What else.
    #[command(flatten)]
    pub extra: E,
}

/// Arguments of a reset.
#[derive(Debug, Args)]
pub struct Reset<E: Args> {
    /// Which.
    #[arg(value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub id: String,
    /// Drop the connector's tiers as well.
    #[arg(long)]
    pub external: bool,
    /// Preempt running requests, instead of waiting for them to end. vLLM 0.32.0 with an offloading
    /// connector was once seen to die of it.
    #[arg(long)]
    pub running: bool,
    /// How long requests may take to end, in milliseconds; where they do not, nothing is done.
    #[arg(long, value_name = "MS")]
    pub drain_ms: Option<u64>,
    /// What else.
    #[command(flatten)]
    pub extra: E,
}

/// What can be woken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum Tag {
    /// The weights' memory.
    Weights,
    /// The cache's memory.
    KvCache,
    /// The scheduler.
    Scheduling,
}

/// What is known of the weights after a wake.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Weights {
    /// They are those from before; where a sleep of level 2 dropped them, loaded again.
    Same,
    /// They are others, and their owner has loaded them.
    Loaded,
    /// They are others, and have to be loaded.
    Changed,
    /// Nothing.
    Unproven,
}

impl<E: Extra> Action<E> {
    /// Whom it is about, what it is called, and its options.
    ///
    /// # Errors
    /// [`Error::Usage`] for a sleep without a level.
    pub fn to_request(&self) -> Result<(&str, &'static str, Value), Error> {
        let mut options = Map::new();
        let (id, name, extra) = match self {
            Self::Pause(args) => {
                flag(&mut options, "clear", args.clear);
                args.stop.add(&mut options);
                (&args.id, "pause", &args.extra)
            }
            Self::Resume(args) => (&args.id, "resume", &args.extra),
            Self::Sleep(args) => {
                let level = args.level.filter(|level| matches!(level, 1 | 2));
                let level = level.ok_or_else(|| {
                    let instead = args.level.map(|level| format!(", not {level}"));
                    Error::Usage(format!(
                        "sleep needs --level 1 or --level 2{}; to stop without dropping anything, \
                         use pause",
                        instead.unwrap_or_default()
                    ))
                })?;
                options.insert("level".to_owned(), level.into());
                args.stop.add(&mut options);
                (&args.id, "sleep", &args.extra)
            }
            Self::Wake(args) => {
                if !args.tags.is_empty() {
                    let tags = args.tags.iter().copied().map(word).collect();
                    options.insert("tags".to_owned(), Value::Array(tags));
                }
                if let Some(weights) = args.weights {
                    options.insert("weights".to_owned(), word(weights));
                }
                (&args.id, "wake", &args.extra)
            }
            Self::Reset(args) => {
                flag(&mut options, "external", args.external);
                flag(&mut options, "running", args.running);
                number(&mut options, "drain_ms", args.drain_ms);
                (&args.id, "reset", &args.extra)
            }
        };
        extra.add(&mut options);
        Ok((id, name, Value::Object(options)))
    }
}

impl Stop {
    pub(super) fn add(&self, to: &mut Map<String, Value>) {
        if let Some(mode) = self.mode {
            to.insert("mode".to_owned(), word(mode));
        }
        flag(to, "keep_tier", self.keep_tier);
        flag(to, "allow_evict", self.allow_evict);
        number(to, "drain_ms", self.drain_ms);
    }
}

pub(super) fn flag(to: &mut Map<String, Value>, name: &str, is_set: bool) {
    if is_set {
        to.insert(name.to_owned(), true.into());
    }
}

fn number(to: &mut Map<String, Value>, name: &str, number: Option<u64>) {
    if let Some(number) = number {
        to.insert(name.to_owned(), number.into());
    }
}

pub(super) fn text(to: &mut Map<String, Value>, name: &str, text: Option<&str>) {
    if let Some(text) = text {
        to.insert(name.to_owned(), text.into());
    }
}

/// A value's word, as it stands in the arguments and in the body alike.
pub(super) fn word(value: impl ValueEnum) -> Value {
    value.to_possible_value().map_or(Value::Null, |value| value.get_name().into())
}

/// Asks for `action` below `kind`, and shows the row that it ended in.
///
/// # Errors
/// [`Error`]; the row of an action that was refused or failed is shown all the same.
pub async fn ask(
    client: &Client,
    kind: &str,
    (id, action, options): (&str, &str, Value),
    as_json: bool,
) -> Result<Exit, Error> {
    let path = format!("/fak/v1/{kind}/{}/{action}", segment(id));
    match client.act::<Row>(&path, &options).await {
        Ok(row) => {
            table::row(&row, as_json)?;
            Ok(Exit::Done)
        }
        Err(error) => {
            if let Error::Failed { failure, body, .. } = &error {
                match &failure.row {
                    _ if as_json => table::json(body)?,
                    Some(row) => table::row(row, false)?,
                    None => table::lines(&failure.sessions)?,
                }
            }
            Err(error)
        }
    }
}
