//! One gateway, its engines, and what is done to them.

use std::collections::HashSet;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use fak_sim::{Reused, RouteFault};

use super::claims::{Suspicion, UnderWay};
use super::draw::{Action, Draw, Turn};
use super::oracle::{Oracle, Told, UNHEARD};
use super::{Hunt, Tally};
use crate::client::{Call, Client};
use crate::events::Subscriber;
use crate::fak::{Acted, Ask, DEADLINE, Fak, Settings, new_folder};
use crate::scenario::Profile;
use crate::target::{Endpoints, Target};

/// A call straight to an engine; one that waits for requests that somebody paused never ends.
pub(super) const BEHIND_DEADLINE: Duration = Duration::from_secs(5);

/// Requests at once and a rest, so often, while a live socket is deaf.
const DEAF_ROUNDS: usize = 3;

/// A moment more.
const JUST_AFTER: Duration = Duration::from_millis(50);

/// fak judges a claim that was too high a second after the answer.
const JUDGED_AFTER: Duration = Duration::from_secs(2);

/// fak judges a claim within this time, whatever it waits for.
const JUDGED_WITHIN: Duration = Duration::from_secs(15);

/// An engine, and what is seen of it besides fak.
#[derive(Debug)]
pub(super) struct Prey<T> {
    pub(super) id: String,
    pub(super) engine: T,
    pub(super) profile: Profile,
    pub(super) endpoints: Endpoints,
    pub(super) client: Client,
    pub(super) subscriber: Subscriber,
    /// What its events told in this life, and when that began.
    pub(super) oracle: Oracle,
    pub(super) began: SystemTime,
    /// Its live socket brings nothing.
    pub(super) is_deaf: bool,
    /// Batches that nobody will ever hear of, as far as they were noticed.
    lost: usize,
    /// Something was done to it, and fak may not have settled what came of it yet.
    is_unsettled: bool,
    /// Counts the changes of its weights, and how many of them fak knows of.
    pub(super) weights: u64,
    pub(super) weights_told: u64,
}

impl<T: Target> Prey<T> {
    async fn start(number: usize, mut engine: T, profile: Profile) -> anyhow::Result<Self> {
        let endpoints = engine.start(profile).await?;
        let client = Client::new(&endpoints.base_url);
        let subscriber = Subscriber::connect(&endpoints.kv_events).await?;
        let id = format!("w{number}");
        Ok(Self {
            id,
            engine,
            profile,
            endpoints,
            client,
            subscriber,
            oracle: Oracle::default(),
            began: SystemTime::now(),
            is_deaf: false,
            lost: 0,
            is_unsettled: false,
            weights: 0,
            weights_told: 0,
        })
    }

    /// Takes in what its events told, and that some are lost for good.
    pub(super) fn listen(&mut self) -> anyhow::Result<()> {
        self.oracle.listen(&self.subscriber)?;
        let lost = self.engine.faults().map_or(0, |faults| faults.lost().len());
        if std::mem::replace(&mut self.lost, lost) < lost {
            self.oracle.doubt();
        }
        Ok(())
    }

    /// An action on it was answered so: what it leaves of the gpu's blocks is for nobody to say
    /// unless it preserved them.
    pub(super) fn was_acted_on(&mut self, acted: &Acted) {
        if acted.row["kv"] != "preserved" {
            self.doubt();
        }
    }

    /// Nobody can say what is there, nor of what is stored until fak has settled it.
    pub(super) fn doubt(&mut self) {
        self.oracle.doubt();
        self.is_unsettled = true;
    }

    /// Tokens that events had told of a request's prompt when it was sent and that were not taken
    /// away until it was answered, as far as the engine's gpu had them, where anything tells.
    pub(super) fn reusable(&self, ask: &Ask, told: &Told) -> u64 {
        let salt = ask.id.as_deref().and_then(|id| self.engine.salt(id));
        let told = self.oracle.still_told(told, salt.as_ref().map(Option::as_deref));
        self.reused(ask).map_or(told, |reused| told.min(reused.gpu as u64))
    }

    /// Where the cached tokens of a request came from, where anything tells.
    pub(super) fn reused(&self, ask: &Ask) -> Option<Reused> {
        self.engine.reused(ask.id.as_deref()?)
    }
}

/// How fak was started, to be started so again.
#[derive(Debug)]
struct Started {
    binary: PathBuf,
    settings: Settings,
    ledger: PathBuf,
}

impl Drop for Started {
    fn drop(&mut self) {
        // What cannot be removed is left in the folder for temporary files.
        let _ = std::fs::remove_dir_all(&self.ledger);
    }
}

/// One gateway and its engines.
#[derive(Debug)]
pub struct Lane<T> {
    pub(super) hunt: Hunt,
    pub(super) draw: Draw,
    pub(super) prey: Vec<Prey<T>>,
    pub(super) fak: Fak,
    started: Started,
    pub(super) tally: Tally,
    pub(super) suspicions: Vec<Suspicion>,
    /// The last row that was seen.
    pub(super) row: u64,
    /// Requests so far, each with an id of its own.
    pub(super) asked: u64,
    pub(super) turns_since_accident: usize,
    /// The last one's name.
    pub(super) accident: String,
    /// Sessions with a salt that the hunt does not know.
    pub(super) isolated: HashSet<String>,
}

impl<T: Target> Lane<T> {
    /// Starts the engines, and fak in front of them.
    ///
    /// # Errors
    ///
    /// One does not start.
    pub async fn start(
        hunt: Hunt,
        engines: Vec<(T, Profile)>,
        binary: &Path,
    ) -> anyhow::Result<Self> {
        let mut prey = Vec::new();
        for (number, (engine, profile)) in engines.into_iter().enumerate() {
            prey.push(Prey::start(number, engine, profile).await?);
        }
        let worker = |prey: &Prey<T>| (prey.id.clone(), prey.endpoints.base_url.clone());
        let ledger = new_folder()?;
        let settings = Settings {
            workers: prey.iter().map(worker).collect(),
            sockets: None,
            db: Some(format!("sqlite:{}", ledger.join("fak.db").display())),
            probe_every_ms: hunt.probe_every_ms,
            first_byte_ms: hunt.first_byte_ms,
            reloads_weights: false,
        };
        let fak = Fak::start(binary, &settings).await?;
        let started = Started { binary: binary.to_owned(), settings, ledger };
        let has_faults = prey.iter().all(|prey| prey.engine.faults().is_some());
        let draw = Draw::new(&hunt, has_faults);
        let (tally, suspicions) = (Tally::default(), Vec::new());
        let (row, asked, turns_since_accident) = (0, 0, 0);
        let accident = "the start".to_owned();
        let mut lane = Self {
            hunt,
            draw,
            prey,
            fak,
            started,
            tally,
            suspicions,
            row,
            asked,
            turns_since_accident,
            accident,
            isolated: HashSet::new(),
        };
        lane.mend().await?;
        Ok(lane)
    }

    /// Hunts to the end.
    ///
    /// # Errors
    ///
    /// Something hangs, or a worker cannot be brought back to serve.
    pub async fn run(mut self) -> anyhow::Result<Tally> {
        let hunted = self.turns().await;
        let (seed, step, log) = (self.hunt.seed, self.tally.steps, self.fak.log());
        hunted.with_context(|| format!("seed {seed}, step {step}; fak said:\n{log}"))?;
        Ok(self.tally)
    }

    async fn turns(&mut self) -> anyhow::Result<()> {
        while self.tally.steps < self.hunt.steps {
            let turn = self.draw.turn();
            self.turns_since_accident =
                if turn.is_accident() { 0 } else { self.turns_since_accident + 1 };
            if turn.is_accident() {
                self.accident = turn.name();
            }
            if self.hunt.tells {
                self.tell(&format!("{turn:?}"))?;
            }
            self.turn(&turn).await.with_context(|| format!("{turn:?}"))?;
            self.explain(JUDGED_AFTER).await?;
        }
        self.explain(Duration::ZERO).await?;
        let started = Instant::now();
        while self.fak.metrics().await?.claims_waiting() > 0 && started.elapsed() < JUDGED_WITHIN {
            tokio::time::sleep(JUST_AFTER).await;
        }
        self.tally.audit(&self.fak.metrics().await?, &self.fak.errors());
        Ok(())
    }

    /// Says something, by the clock of fak's log: UTC.
    pub(super) fn tell(&self, what: &str) -> anyhow::Result<()> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH)?;
        let (day, millis) = (now.as_secs() % 86_400, now.subsec_millis());
        let (hour, minute, second) = (day / 3_600, day / 60 % 60, day % 60);
        let (seed, step) = (self.hunt.seed, self.tally.steps);
        let mut out = std::io::stderr().lock();
        writeln!(
            out,
            "{hour:02}:{minute:02}:{second:02}.{millis:03} seed {seed}, step {step}: {what}"
        )?;
        Ok(())
    }

    async fn turn(&mut self, turn: &Turn) -> anyhow::Result<()> {
        match turn {
            Turn::Ask => {
                let asked = self.begin(1)?;
                self.finish(asked).await
            }
            Turn::Burst(count) => {
                let asked = self.begin(*count)?;
                self.finish(asked).await
            }
            Turn::Act(under_way) => {
                let asked = self.begin(*under_way)?;
                let action = self.action();
                let acting = self.fak.begin_act(&action.on, action.name, &action.options)?;
                if self.hunt.has_traffic {
                    // More come while it is done, and may wait for it.
                    let more = self.begin(2)?;
                    self.acted(&action, acting).await?;
                    self.mend().await?;
                    self.finish(more).await?;
                } else {
                    self.acted(&action, acting).await?;
                }
                self.aftermath(asked).await
            }
            Turn::Behind(under_way) => {
                let asked = self.begin(*under_way)?;
                self.behind(true).await?;
                self.aftermath(asked).await
            }
            Turn::Collide => {
                let asked = self.begin(1)?;
                // Nobody could say of the weights what is so if both put the engine to sleep.
                let action = self.action().keeping_weights();
                let acting = self.fak.begin_act(&action.on, action.name, &action.options)?;
                self.behind(false).await?;
                self.acted(&action, acting).await?;
                self.aftermath(asked).await
            }
            Turn::Batches | Turn::Hold | Turn::Route => self.fault(turn).await,
            Turn::Restart => self.restart().await,
            Turn::Kill => self.kill().await,
            Turn::Unseen => self.unseen().await,
            Turn::Deaf => self.deaf().await,
            Turn::Rollout(under_way) => self.rollout(*under_way).await,
            Turn::Weights(under_way) => self.weights_behind(*under_way).await,
        }
    }

    /// After something happened: perhaps requests to who cannot serve, then all are brought back.
    pub(super) async fn aftermath(&mut self, asked: UnderWay) -> anyhow::Result<()> {
        if self.draw.rng.bool() {
            let more = self.begin(1)?;
            // It may wait for a worker that somebody paused.
            self.mend().await?;
            self.finish(more).await?;
        }
        self.mend().await?;
        for prey in self.prey.iter_mut().filter(|prey| prey.is_unsettled) {
            prey.listen()?;
            prey.oracle.doubt();
            prey.is_unsettled = false;
        }
        self.finish(asked).await
    }

    fn action(&mut self) -> Action {
        let worker = self.draw.rng.usize(0..self.prey.len());
        self.draw.action(&self.prey[worker].id)
    }

    async fn acted(&mut self, action: &Action, acting: Call) -> anyhow::Result<()> {
        let told = acting.finish(DEADLINE).await;
        let told = told.with_context(|| format!("{action:?} hangs"))?;
        let acted = Acted::read(&told)?;
        self.tally.act(action.name, &acted);
        if acted.row["reason"] == "isolated" {
            let session = action.on.trim_start_matches("sessions/");
            self.isolated.insert(session.to_owned());
        } else {
            self.was_acted_on(&acted);
        }
        Ok(())
    }

    /// The worker that an action was on is the one that its row names, and may be any without one.
    pub(super) fn was_acted_on(&mut self, acted: &Acted) {
        let worker = acted.row["worker"].as_str().map(str::to_owned);
        let may_be = |prey: &&mut Prey<T>| worker.as_ref().is_none_or(|worker| prey.id == *worker);
        self.prey.iter_mut().filter(may_be).for_each(|prey| prey.was_acted_on(acted));
    }

    async fn behind(&mut self, takes_weights: bool) -> anyhow::Result<()> {
        let calls = self.draw.behind(takes_weights);
        let number = self.draw.rng.usize(0..self.prey.len());
        if calls.iter().any(|call| !call.contains("/reset_prefix_cache")) {
            // fak may see it stand still, and cannot know why.
            self.prey[number].doubt();
        }
        for call in calls {
            self.tally.steps += 1;
            self.tally.accidents += 1;
            if call == "POST /wake_up" {
                self.reload(number).await?;
            }
            // An engine may refuse, or wait for requests that are held; what counts is what fak
            // makes of it.
            let _ = self.prey[number].client.plain(&call, BEHIND_DEADLINE).await;
        }
        Ok(())
    }

    async fn fault(&mut self, turn: &Turn) -> anyhow::Result<()> {
        let prey = self.draw.rng.usize(0..self.prey.len());
        let Some(faults) = self.prey[prey].engine.faults() else { return Ok(()) };
        self.tally.steps += 1;
        self.tally.accidents += 1;
        match turn {
            Turn::Batches => {
                let count = self.draw.rng.usize(1..4);
                match self.draw.rng.u32(0..3) {
                    0 => faults.drop_batches(count),
                    1 => faults.lose_batches(count),
                    _ => faults.repeat_batches(count),
                }
            }
            Turn::Hold => {
                faults.hold_publisher(true);
                let asked = self.begin(2)?;
                if self.draw.rng.bool() {
                    let reset = "POST /reset_prefix_cache";
                    let _ = self.prey[prey].client.plain(reset, BEHIND_DEADLINE).await;
                }
                let more = self.begin(1)?;
                self.finish(asked).await?;
                self.finish(more).await?;
                faults.hold_publisher(false);
            }
            _ => {
                let (route, fault) = self.draw.route_fault();
                faults.route(route, fault, 1);
                let action = self.action();
                let acting = self.fak.begin_act(&action.on, action.name, &action.options)?;
                self.acted(&action, acting).await?;
                let asked = self.begin(1)?;
                self.aftermath(asked).await?;
            }
        }
        Ok(())
    }

    async fn restart(&mut self) -> anyhow::Result<()> {
        let number = self.draw.rng.usize(0..self.prey.len());
        let asked = self.begin(2)?;
        self.begin_life(number).await?;
        self.tally.steps += 1;
        self.tally.accidents += 1;
        self.aftermath(asked).await
    }

    /// Kills fak as an operator's mistake or the system would, and starts it again.
    async fn kill(&mut self) -> anyhow::Result<()> {
        self.tally.steps += 1;
        self.tally.accidents += 1;
        // What it counted goes with it.
        self.tally.audit(&self.fak.metrics().await?, &self.fak.errors());
        self.fak.kill();
        self.fak = Fak::start(&self.started.binary, &self.started.settings).await?;
        self.mend().await
    }

    /// An engine whose metrics cannot be read for a few looks, while requests go on.
    async fn unseen(&mut self) -> anyhow::Result<()> {
        let number = self.draw.rng.usize(0..self.prey.len());
        let Some(faults) = self.prey[number].engine.faults() else { return Ok(()) };
        self.tally.steps += 1;
        self.tally.accidents += 1;
        faults.route("/metrics", RouteFault::Fail(500), 5);
        for _ in 0..3 {
            let asked = self.begin(1)?;
            self.finish(asked).await?;
        }
        Ok(())
    }

    /// A live socket that is open and brings nothing, while requests evict one another's blocks and
    /// somebody clears the cache.
    async fn deaf(&mut self) -> anyhow::Result<()> {
        let number = self.draw.rng.usize(0..self.prey.len());
        let Some(faults) = self.prey[number].engine.faults() else { return Ok(()) };
        self.tally.steps += 1;
        self.tally.accidents += 1;
        faults.drop_batches(usize::MAX);
        self.prey[number].is_deaf = true;
        for _ in 0..DEAF_ROUNDS {
            if self.draw.rng.u32(0..4) == 0 {
                let reset = "POST /reset_prefix_cache";
                let _ = self.prey[number].client.plain(reset, BEHIND_DEADLINE).await;
            }
            let asked = self.begin(4)?;
            self.finish(asked).await?;
            // From here on what was published explains nothing any more.
            tokio::time::sleep(UNHEARD + JUST_AFTER).await;
        }
        faults.drop_batches(0);
        self.prey[number].is_deaf = false;
        Ok(())
    }
}
