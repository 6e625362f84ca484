//! Owners that run, for the rigs of all parts.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use fak::events::recorder::Recorder;
use fak::events::stream::Sink;
use fak::fleet::Fleet;
use fak::lifecycle::{Config, Lifecycle};
use fak::runtime::{OnExit, TaskGroup};
use fak::store::Store;
use fak_index::{Index, RankOptions};

/// Of owners that look when they are told to.
pub(crate) fn config(
    fleet: &Fleet,
    store: &Store,
    index: &Arc<Index>,
    recorder: &Arc<Recorder>,
) -> Config {
    Config {
        fleet: fleet.clone(),
        store: store.clone(),
        sink: Sink {
            index: Arc::clone(index),
            options: RankOptions::default(),
            recorder: Arc::clone(recorder),
            notes: None,
        },
        events: BTreeMap::new(),
        // Tests look when they want to know.
        probe_every: Duration::from_secs(3600),
        failures_max: 1,
        patience: Duration::from_secs(60),
        settle_within: Duration::from_secs(10),
    }
}

/// Owners that live as long as the tasks.
pub(crate) fn run(config: &Config) -> (Lifecycle, TaskGroup) {
    let (lifecycle, owners) = Lifecycle::new(config);
    let mut tasks = TaskGroup::new();
    for owner in owners {
        let stop = tasks.shutdown();
        tasks.spawn("owner", OnExit::StopProcess, owner.run(stop));
    }
    (lifecycle, tasks)
}
