//! Where do a worker's ranks publish, and which of their streams are followed?
//!
//! Invariant: what is followed is what the engine of now named last, or what the operator named: a
//! rank that moved to another socket gets a stream of its own, with nothing believed of it yet, and
//! the old one ends.

use std::collections::BTreeMap;
use std::mem;

use super::markers;
use super::owner::{Events, Owner};
use crate::events::blind::Blindness;
use crate::events::discover::{self, Source};
use crate::events::stream::{Handle, Sink, Stream};
use crate::runtime::{OnExit, TaskGroup};

/// What is followed for one rank; dropping it ends the stream.
pub(super) struct Followed {
    source: Source,
    /// Connections of the stream when the engine was asked last.
    connections: u64,
    /// Those that a look was taken after.
    looked_at: u64,
    /// Whether its stream was told that something names the engine's life.
    pub(super) is_life_told: bool,
    pub(super) watch: Blindness,
    pub(super) is_blind: bool,
    /// Holds the tasks of its stream and of its markers.
    _tasks: TaskGroup,
}

impl Followed {
    /// Whether what it publishes can be asked for again.
    pub(super) fn has_replay(&self) -> bool {
        self.source.replay.is_some()
    }

    /// Whether its stream has a connection that it had not at the last look.
    pub(super) fn sees_new_connection(&mut self, stream: &Handle) -> bool {
        let connections = stream.status().connections;
        connections > std::mem::replace(&mut self.looked_at, connections.max(1))
    }
}

impl Owner {
    /// Follows what the engine told, or what was named. True where ranks are followed that were not
    /// before.
    pub(super) fn follow_told(&mut self) -> bool {
        let Some(sources) = self.sources() else { return false };
        self.follow(sources)
    }

    /// Whether a rank has a connection that it had not when the engine was asked last: another
    /// process may listen there by now, and its own elsewhere.
    pub(super) fn has_reconnected(&self) -> bool {
        let pairs = self.ranks.iter().zip(&self.followed);
        let is_new = |(rank, followed): (&Handle, &Followed)| {
            rank.status().connections != followed.connections
        };
        !self.is_named() && { pairs }.any(is_new)
    }

    /// Asks the engine where its ranks publish now.
    pub(super) async fn ask_sources(&mut self) -> bool {
        if self.is_named() {
            return false;
        }
        let connections: Vec<_> = self.ranks.iter().map(|rank| rank.status().connections).collect();
        let told = self.worker.engine.kv_event_sources().await;
        if told.told().is_some() {
            for (followed, connections) in self.followed.iter_mut().zip(connections) {
                followed.connections = connections;
            }
            self.told.kv_event_sources = told;
        }
        self.follow_told()
    }

    /// Where the ranks that are followed publish.
    pub(super) fn live_sockets(&self) -> Vec<(String, u16)> {
        let live = self.followed.iter().map(|followed| &followed.source.live);
        live.map(|live| (live.host.clone(), live.port)).collect()
    }

    fn is_named(&self) -> bool {
        self.config.events.contains_key(&self.worker.id)
    }

    /// The sources of now; `None` where nothing says where they are, and those that are followed
    /// have to do.
    fn sources(&mut self) -> Option<Events> {
        if let Some(named) = self.config.events.get(&self.worker.id) {
            return Some(named.clone());
        }
        let host = self.worker.engine.endpoints().origin().host();
        match discover::from_answer(self.told.kv_event_sources.told()?, host) {
            Ok(found) => {
                let is_news = self.state.has_silent_ranks == found.silent.is_empty();
                self.state.has_silent_ranks = !found.silent.is_empty();
                self.state.caution.hear_ranks(Some(found.sources.len() + found.silent.len()));
                for (rank, silent) in found.silent.iter().filter(|_| is_news) {
                    tracing::warn!(worker = %self.worker.id, rank, %silent, "routed by load alone");
                }
                Some(found.sources)
            }
            Err(error) => {
                tracing::warn!(worker = %self.worker.id, %error, "routed by load alone");
                Some(Vec::new())
            }
        }
    }

    /// Follows `sources` and nothing else. A rank that is followed there already keeps its stream.
    fn follow(&mut self, sources: Events) -> bool {
        let ranks = mem::take(&mut self.ranks).into_iter().zip(mem::take(&mut self.followed));
        let mut before: BTreeMap<u32, (Handle, Followed)> =
            ranks.map(|(handle, followed)| (handle.rank(), (handle, followed))).collect();
        let mut has_new = false;
        for source in sources {
            let kept = before.remove(&source.rank).filter(|(_, f)| f.source == source);
            let (handle, followed) = match kept {
                Some(kept) => kept,
                None => {
                    has_new = true;
                    self.started(source)
                }
            };
            self.ranks.push(handle);
            self.followed.push(followed);
        }
        for rank in before.keys() {
            tracing::warn!(worker = %self.worker.id, rank, "is not followed any more");
        }
        has_new
    }

    fn started(&self, source: Source) -> (Handle, Followed) {
        let notes = Some(self.notes.0.clone());
        let sink = Sink { notes, ..self.config.sink.clone() };
        let (stream, handle) = Stream::new(&self.worker.id, source.clone(), sink);
        let mut tasks = TaskGroup::new();
        let stop = tasks.shutdown();
        tasks.spawn("rank events", OnExit::Report, stream.run(stop));
        let marking = markers::run(handle.clone(), self.markers.subscribe());
        tasks.spawn("markers", OnExit::Report, marking);
        let watch = Blindness::default();
        // Its first connection is one of the engine that has just told.
        let followed = Followed {
            source,
            connections: 1,
            looked_at: 1,
            is_life_told: false,
            watch,
            is_blind: false,
            _tasks: tasks,
        };
        (handle, followed)
    }
}
