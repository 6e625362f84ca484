//! Families of metrics that are put together as a scrape comes by.
//!
//! Invariant: a family has one type and at least one series, and families come in the order in
//! which they were first added to.

use prometheus::proto::{Bucket, Counter, Gauge, Histogram, LabelPair, Metric};
use prometheus::proto::{MetricFamily, MetricType};

use super::Family;

#[derive(Default)]
pub(super) struct Families {
    all: Vec<MetricFamily>,
}

impl Families {
    pub(super) fn gauge(&mut self, family: &Family, labels: &[(&str, &str)], value: f64) {
        let mut gauge = Gauge::default();
        gauge.set_value(value);
        let mut metric = metric(labels);
        metric.set_gauge(gauge);
        self.add(family, MetricType::GAUGE, metric);
    }

    pub(super) fn counter(&mut self, family: &Family, labels: &[(&str, &str)], value: f64) {
        let mut counter = Counter::default();
        counter.set_value(value);
        let mut metric = metric(labels);
        metric.set_counter(counter);
        self.add(family, MetricType::COUNTER, metric);
    }

    pub(super) fn histogram(
        &mut self,
        family: &Family,
        labels: &[(&str, &str)],
        value: &fak_wire::metrics::Histogram,
    ) {
        let bucket = |(bound, count): &(f64, f64)| {
            let mut bucket = Bucket::default();
            bucket.set_upper_bound(*bound);
            bucket.set_cumulative_count(whole(*count));
            bucket
        };
        // The encoder writes the last bucket, `+Inf`, from the count.
        let finite = value.buckets.iter().filter(|(bound, _)| bound.is_finite());
        let mut histogram = Histogram::default();
        histogram.set_bucket(finite.map(bucket).collect());
        histogram.set_sample_sum(value.sum);
        histogram.set_sample_count(whole(value.count));
        let mut metric = metric(labels);
        metric.set_histogram(histogram);
        self.add(family, MetricType::HISTOGRAM, metric);
    }

    pub(super) fn into_all(self) -> Vec<MetricFamily> {
        self.all
    }

    fn add(&mut self, family: &Family, kind: MetricType, metric: Metric) {
        let Family(name, help) = *family;
        if let Some(known) = self.all.iter_mut().find(|known| known.name() == name) {
            known.mut_metric().push(metric);
            return;
        }
        let mut new = MetricFamily::default();
        new.set_name(name.to_owned());
        new.set_help(help.to_owned());
        new.set_field_type(kind);
        new.mut_metric().push(metric);
        self.all.push(new);
    }
}

fn metric(labels: &[(&str, &str)]) -> Metric {
    let pair = |(name, value): &(&str, &str)| {
        let mut pair = LabelPair::default();
        pair.set_name((*name).to_owned());
        pair.set_value((*value).to_owned());
        pair
    };
    Metric::from_label(labels.iter().map(pair).collect())
}

/// Engines count in floats; what is negative or no number counts nothing.
fn whole(count: f64) -> u64 {
    count as u64
}
