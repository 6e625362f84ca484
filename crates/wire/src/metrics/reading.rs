//! Folds the samples of a scrape into a [`Snapshot`].
//! Invariant: series of one signal in one rank (one a process, in multi-process mode) are put
//! together by what the signal means: counts add, usage is the largest. A sample that its signal
//! cannot have leaves no trace but a count.

use std::collections::BTreeMap;

use super::names::{self, Meaning, Series, Signal, TRANSFERS};
use super::text::{Sample, number};
use super::{Histogram, Limits, Signals, SleepState, Snapshot, TooLarge, Usage};

#[derive(Debug, Default)]
pub(super) struct Reading {
    pub(super) snapshot: Snapshot,
    /// Age of the name that a rank's signal was read under; 0 is the newest.
    ages: BTreeMap<(u32, Signal), u8>,
}

/// A sample that was put in its place; `None` for one that its signal cannot have.
type Placed = Option<()>;

impl Reading {
    pub(super) fn add(&mut self, sample: &Sample<'_>, limits: &Limits) -> Result<(), TooLarge> {
        match names::meaning(sample.name) {
            Meaning::PassedOver => Ok(()),
            Meaning::Unknown { family } => {
                if self.snapshot.unknown.len() < limits.unknown_names {
                    self.snapshot.unknown.insert(family.to_owned());
                }
                Ok(())
            }
            Meaning::Read { family, series } => {
                if self.read(family, series, sample, limits)?.is_none() {
                    self.snapshot.malformed_lines += 1;
                }
                Ok(())
            }
        }
    }

    fn read(
        &mut self,
        family: &str,
        series: Series,
        sample: &Sample<'_>,
        limits: &Limits,
    ) -> Result<Placed, TooLarge> {
        // Nothing that is read can be negative or undefined; what claims to be is not believed.
        if !(sample.value.is_finite() && sample.value >= 0.0) {
            return Ok(None);
        }
        if family == names::PROCESS_START {
            let latest = self.snapshot.process_start.unwrap_or(0.0).max(sample.value);
            self.snapshot.process_start = Some(latest);
            return Ok(Some(()));
        }
        let rank = sample.labels.get("engine").map_or(Ok(0), |rank| rank.parse());
        let Ok(rank) = rank else { return Ok(None) };
        let ranks = &mut self.snapshot.ranks;
        let found = ranks.len() + 1;
        if found > limits.ranks && !ranks.contains_key(&rank) {
            return Err(TooLarge { found, unit: "ranks", limit: limits.ranks });
        }
        for (signal, age) in names::signals(family) {
            // Tried on its own first: what cannot be placed must not replace what came before.
            if Signals::default().read((signal, series), sample, limits)?.is_none() {
                return Ok(None);
            }
            let newest = self.ages.entry((rank, signal)).or_insert(age);
            if *newest < age {
                continue;
            }
            let signals = ranks.entry(rank).or_default();
            if *newest > age {
                *newest = age;
                signals.clear(signal);
            }
            signals.read((signal, series), sample, limits)?;
        }
        Ok(Some(()))
    }
}

impl Signals {
    /// Forgets what came under an old name of a signal.
    fn clear(&mut self, signal: Signal) {
        match signal {
            Signal::Itl => self.itl = None,
            Signal::KvCacheUsage => self.kv_cache_usage = None,
            Signal::PrefixHits => self.prefix_hits = None,
            Signal::PrefixQueries => self.prefix_queries = None,
            Signal::OffloadLoad => self.offload_load_bytes = None,
            Signal::OffloadStore => self.offload_store_bytes = None,
            // The others have one name only.
            _ => {}
        }
    }

    fn read(
        &mut self,
        (signal, series): (Signal, Series),
        sample: &Sample<'_>,
        limits: &Limits,
    ) -> Result<Placed, TooLarge> {
        match signal {
            Signal::Ttft => return histogram(&mut self.ttft, series, sample, limits),
            Signal::Itl => return histogram(&mut self.itl, series, sample, limits),
            Signal::Tpot => return histogram(&mut self.tpot, series, sample, limits),
            Signal::Queue => return histogram(&mut self.queue, series, sample, limits),
            Signal::Steps => return histogram(&mut self.steps, series, sample, limits),
            _ if series != Series::Value => return Ok(None),
            Signal::PromptBySource => {
                return part(&mut self.prompt_by_source, "source", sample, limits);
            }
            Signal::CachedBySource => {
                return part(&mut self.cached_by_source, "source", sample, limits);
            }
            Signal::RequestSuccess => {
                return part(&mut self.request_success, "finished_reason", sample, limits);
            }
            _ => {}
        }
        Ok(self.read_value(signal, sample))
    }

    fn read_value(&mut self, signal: Signal, sample: &Sample<'_>) -> Placed {
        let value = sample.value;
        match signal {
            Signal::KvCacheUsage => {
                let max = self.kv_cache_usage.map_or(value, |usage| usage.max.max(value));
                self.kv_cache_usage = Some(Usage { max, mean: max, ranks: 1 });
                Some(())
            }
            Signal::Running => sum(&mut self.running, value),
            Signal::Waiting => sum(&mut self.waiting, value),
            Signal::PrefixHits => sum(&mut self.prefix_hits, value),
            Signal::PrefixQueries => sum(&mut self.prefix_queries, value),
            Signal::ExternalHits => sum(&mut self.external_hits, value),
            Signal::ExternalQueries => sum(&mut self.external_queries, value),
            Signal::Preemptions => sum(&mut self.preemptions, value),
            Signal::Drafts => sum(&mut self.drafts, value),
            Signal::OffloadLoad => transfer(&mut self.offload_load_bytes, "CPU_to_GPU", sample),
            Signal::OffloadStore => transfer(&mut self.offload_store_bytes, "GPU_to_CPU", sample),
            Signal::SleepState => sleep(&mut self.sleep, sample),
            Signal::CacheConfig => {
                let label = |name: &str| sample.labels.get(name);
                self.block_size = label("block_size").and_then(|size| size.parse().ok());
                self.num_gpu_blocks = label("num_gpu_blocks").and_then(|n| n.parse().ok());
                Some(())
            }
            // Read above, as more than one value.
            Signal::Ttft
            | Signal::Itl
            | Signal::Tpot
            | Signal::Queue
            | Signal::PromptBySource
            | Signal::CachedBySource
            | Signal::Steps
            | Signal::RequestSuccess => None,
        }
    }
}

fn sum(own: &mut Option<f64>, value: f64) -> Placed {
    *own.get_or_insert(0.0) += value;
    Some(())
}

/// Bytes of one direction: all of the new families, one label value of the old.
fn transfer(own: &mut Option<f64>, direction: &str, sample: &Sample<'_>) -> Placed {
    if sample.name.starts_with(TRANSFERS) && sample.labels.get("transfer_type")? != direction {
        return Some(());
    }
    sum(own, sample.value)
}

fn sleep(own: &mut Option<SleepState>, sample: &Sample<'_>) -> Placed {
    let mut state = own.unwrap_or_default();
    let flag = match sample.labels.get("sleep_state")?.as_ref() {
        "awake" => &mut state.awake,
        "weights_offloaded" => &mut state.weights_offloaded,
        "discard_all" => &mut state.discard_all,
        _ => return None,
    };
    *flag |= sample.value != 0.0;
    *own = Some(state);
    Some(())
}

fn part(
    parts: &mut BTreeMap<String, f64>,
    label: &str,
    sample: &Sample<'_>,
    limits: &Limits,
) -> Result<Placed, TooLarge> {
    let Some(value) = sample.labels.get(label) else { return Ok(None) };
    let found = parts.len() + 1;
    if found > limits.parts && !parts.contains_key(value.as_ref()) {
        return Err(TooLarge { found, unit: "values of a label", limit: limits.parts });
    }
    *parts.entry(value.into_owned()).or_default() += sample.value;
    Ok(Some(()))
}

fn histogram(
    own: &mut Option<Histogram>,
    series: Series,
    sample: &Sample<'_>,
    limits: &Limits,
) -> Result<Placed, TooLarge> {
    match series {
        Series::Sum => own.get_or_insert_default().sum += sample.value,
        Series::Count => own.get_or_insert_default().count += sample.value,
        Series::Value => return Ok(None),
        Series::Bucket => {
            let bound = sample.labels.get("le").and_then(|le| number(&le).ok());
            let Some(bound) = bound.filter(|bound| !bound.is_nan()) else { return Ok(None) };
            let own = own.get_or_insert_default();
            own.add_bucket(bound, sample.value);
            let found = own.buckets.len();
            if found > limits.parts {
                return Err(TooLarge { found, unit: "buckets", limit: limits.parts });
            }
        }
    }
    Ok(Some(()))
}
