//! Many at once: tasks, stores, processes that open, and futures that are dropped.

use std::collections::BTreeMap;

use fak::store::{Filter, Store};
use futures_util::FutureExt as _;
use futures_util::future::join_all;

use super::{Place, intent, on_both, outcome};

on_both!(
    tasks_write_at_once_and_every_row_is_there,
    two_stores_write_one_ledger,
    a_follower_misses_no_outcome,
    many_may_open_a_database_that_is_not_there_yet,
    a_write_that_is_dropped_leaves_the_store_usable,
);

const TASKS: usize = 24;

async fn write(store: &Store, worker: &str) -> u64 {
    let seq = store.intent(intent(worker)).await.expect("written");
    let row = store.outcome(seq, outcome()).await.expect("written");
    assert_eq!((row.seq, row.worker.as_str()), (seq, worker));
    seq
}

async fn tasks_write_at_once_and_every_row_is_there(place: &Place) {
    let store = place.open().await;
    let tasks = (0..TASKS).map(|task| {
        let store = store.clone();
        tokio::spawn(async move { (write(&store, &format!("w{task}")).await, task) })
    });
    let written: BTreeMap<u64, usize> =
        join_all(tasks).await.into_iter().map(|task| task.expect("no panic")).collect();
    let rows = store.rows(&Filter::default()).await.expect("read");
    let read: BTreeMap<u64, usize> =
        rows.iter().map(|row| (row.seq, row.worker[1..].parse().expect("a number"))).collect();
    assert_eq!(read, written);
    assert!(read.keys().copied().eq(1..=TASKS as u64), "{read:?}");
    assert_eq!(*store.newest().borrow(), 2 * TASKS as u64);
}

async fn two_stores_write_one_ledger(place: &Place) {
    let stores = [place.open().await, place.open().await];
    let tasks = (0..TASKS).map(|task| {
        let store = stores[task % 2].clone();
        tokio::spawn(async move { write(&store, "w").await })
    });
    let mut seqs: Vec<u64> =
        join_all(tasks).await.into_iter().map(|task| task.expect("no panic")).collect();
    seqs.sort_unstable();
    assert!(seqs.iter().copied().eq(1..=TASKS as u64), "{seqs:?}");
    let changes = stores[0].changes(0, 1000).await.expect("read");
    assert_eq!(changes.len(), TASKS);
    assert!(changes.is_sorted_by(|a, b| a.number < b.number));
    assert_eq!(changes[TASKS - 1].number, 2 * TASKS as u64);
}

async fn a_follower_misses_no_outcome(place: &Place) {
    let store = place.open().await;
    let follower = tokio::spawn({
        let (store, mut newest) = (store.clone(), store.newest());
        async move {
            let (mut after, mut recorded) = (0, BTreeMap::new());
            while recorded.values().filter(|is_recorded| **is_recorded).count() < TASKS {
                newest.wait_for(|newest| *newest > after).await.expect("the store lives");
                for change in store.changes(after, 3).await.expect("read") {
                    assert!(change.number > after, "{change:?} after {after}");
                    after = change.number;
                    let is_recorded = change.row.reason != "unrecorded";
                    let was = recorded.insert(change.row.seq, is_recorded);
                    assert_ne!(was, Some(true), "{change:?} was told before");
                }
            }
            after
        }
    });
    // Another process' writes, whose numbers are taken among these.
    let other = place.open().await;
    let tasks = (0..TASKS).map(|task| {
        let store = if task % 3 == 0 { other.clone() } else { store.clone() };
        tokio::spawn(async move { write(&store, "w").await })
    });
    join_all(tasks).await;
    write(&store, "wakes the follower").await;
    let last = follower.await.expect("it saw all");
    assert!(last >= 2 * TASKS as u64, "{last}");
}

async fn many_may_open_a_database_that_is_not_there_yet(place: &Place) {
    let opens = (0..8).map(|_| {
        let url = place.url.clone();
        tokio::spawn(async move { Store::open(&url).await })
    });
    for store in join_all(opens).await {
        let store = store.expect("no panic").expect("it opens");
        write(&store, "w").await;
    }
    assert_eq!(place.open().await.rows(&Filter::default()).await.expect("read").len(), 8);
}

async fn a_write_that_is_dropped_leaves_the_store_usable(place: &Place) {
    let store = place.open().await;
    for polls in 0..12 {
        let mut write = Box::pin(store.note(intent("dropped"), outcome()));
        for _ in 0..polls {
            if (&mut write).now_or_never().is_some() {
                break;
            }
            tokio::task::yield_now().await;
        }
        drop(write);
        self::write(&store, "kept").await;
    }
    let rows = store.rows(&Filter::default()).await.expect("read");
    assert_eq!(rows.iter().filter(|row| row.worker == "kept").count(), 12);
    let whole = |row: &&fak::store::Row| row.reason == "as asked";
    assert_eq!(rows.iter().filter(whole).count(), rows.len(), "a note is whole or not there");
}
