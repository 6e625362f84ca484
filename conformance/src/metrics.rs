//! The metrics that a scenario can be held to.
//! Invariant: counters are told as what they gained since the scenario's start; gauges as they are.

use std::collections::BTreeMap;

/// Counters, by their name without `vllm:` and `_total`.
const COUNTERS: [&str; 13] = [
    "external_prefix_cache_hits",
    "external_prefix_cache_queries",
    "generation_tokens",
    "kv_offload_load_bytes",
    "kv_offload_store_bytes",
    "num_preemptions",
    "prefix_cache_hits",
    "prefix_cache_queries",
    "prompt_tokens",
    "prompt_tokens_by_source",
    "prompt_tokens_cached",
    "prompt_tokens_cached_by_source",
    "request_success",
];

/// Gauges, by their name without `vllm:`.
const GAUGES: [&str; 4] =
    ["engine_sleep_state", "kv_cache_usage_perc", "num_requests_running", "num_requests_waiting"];

/// Values by name; a label other than engine and model follows its name after a dot:
/// `request_success.abort`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Values(BTreeMap<String, f64>);

impl Values {
    /// Reads a `/metrics` page; series that are not listed above are left out.
    pub fn parse(page: &str) -> Self {
        let series = page.lines().filter_map(|line| {
            let (series, value) = line.strip_prefix("vllm:")?.rsplit_once(' ')?;
            let (name, labels) = series.split_once('{').unwrap_or((series, ""));
            let name = match name.strip_suffix("_total") {
                Some(counter) => COUNTERS.iter().find(|known| **known == counter)?,
                None => GAUGES.iter().find(|known| **known == name)?,
            };
            Some((full_name(name, labels), value.parse().ok()?))
        });
        Values(series.collect())
    }

    /// The value of `name`, counters as gained since `start`; none if there is no such series.
    pub fn get(&self, name: &str, start: &Values) -> Option<f64> {
        let value = *self.0.get(name)?;
        let before = if is_counter(name) { start.0.get(name).copied() } else { None };
        Some(value - before.unwrap_or(0.0))
    }

    /// `name value`, for every series that is not 0.
    pub fn lines(&self, start: &Values) -> Vec<String> {
        let values = self.0.keys().filter_map(|name| Some((name, self.get(name, start)?)));
        values.filter(|(_, value)| *value != 0.0).map(|(n, v)| format!("{n} {v}")).collect()
    }
}

fn is_counter(name: &str) -> bool {
    let base = name.split('.').next().unwrap_or(name);
    COUNTERS.contains(&base)
}

fn full_name(name: &str, labels: &str) -> String {
    let labels = labels.trim_end_matches('}').split("\",").filter_map(|label| {
        let (key, value) = label.split_once("=\"")?;
        let ours = !matches!(key, "engine" | "model_name");
        ours.then(|| value.trim_end_matches('"'))
    });
    labels.fold(name.to_owned(), |name, value| format!("{name}.{value}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_differences_and_gauges_are_not() {
        let page = |n: u32| {
            let labels = "engine=\"0\",model_name=\"tiny\"";
            format!(
                "# TYPE x counter\n\
                 vllm:request_success_total{{finished_reason=\"abort\",{labels}}} {n}.0\n\
                 vllm:num_requests_running{{{labels}}} {n}.0\n\
                 vllm:something_else_total{{{labels}}} 4.0\n"
            )
        };
        let (start, end) = (Values::parse(&page(2)), Values::parse(&page(5)));
        assert_eq!(end.lines(&start), ["num_requests_running 5", "request_success.abort 3"]);
        assert_eq!(end.get("prompt_tokens", &start), None);
    }
}
