//! A histogram as the engine publishes it, and the sum of several.
//! Invariant: bounds rise, and a sum never says that more values were small than its parts did.

/// Counts of observed values by upper bound.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Histogram {
    /// Upper bounds and how many values were at or below each, in rising order; the last bound is
    /// infinite.
    pub buckets: Vec<(f64, f64)>,
    /// Sum of all values, in the metric's unit.
    pub sum: f64,
    /// How many values there were.
    pub count: f64,
}

impl Histogram {
    /// How many values were at or below `bound`: exact at the histogram's own bounds, the count of
    /// the next lower one between them.
    fn at(&self, bound: f64) -> f64 {
        let after = self.buckets.partition_point(|(own, _)| *own <= bound);
        after.checked_sub(1).map_or(0.0, |index| self.buckets[index].1)
    }

    /// Adds to one bucket.
    pub(super) fn add_bucket(&mut self, bound: f64, count: f64) {
        let at = self.buckets.partition_point(|(own, _)| *own < bound);
        match self.buckets.get_mut(at) {
            Some((own, sum)) if *own == bound => *sum += count,
            _ => self.buckets.insert(at, (bound, count)),
        }
    }

    /// Adds another histogram of the same metric. Where bounds differ, each side counts at the
    /// other's bounds what it surely has there.
    pub fn add(&mut self, other: &Histogram) {
        let mut bounds: Vec<f64> =
            self.buckets.iter().chain(&other.buckets).map(|(bound, _)| *bound).collect();
        bounds.sort_by(f64::total_cmp);
        bounds.dedup();
        self.buckets =
            bounds.into_iter().map(|bound| (bound, self.at(bound) + other.at(bound))).collect();
        self.sum += other.sum;
        self.count += other.count;
    }
}
