//! What an engine counts. Counters run from the process start; gauges are as of the last step.

/// Totals of one engine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Tokens looked up in the device cache, resumed requests excepted.
    pub prefix_queries: u64,
    /// Of them found.
    pub prefix_hits: u64,
    /// Tokens looked up in the connector: those that the device cache missed.
    pub external_queries: u64,
    /// Of them found.
    pub external_hits: u64,
    /// Of those, found in the host tier; the rest in the shared store.
    pub host_hits: u64,
    /// Prompt tokens of requests whose prompt was computed.
    pub prompt_tokens: u64,
    /// Of them computed here.
    pub prompt_tokens_computed: u64,
    /// Of them hit on the device.
    pub prompt_tokens_local: u64,
    /// Of them loaded by the connector.
    pub prompt_tokens_external: u64,
    /// Output tokens.
    pub generation_tokens: u64,
    /// Requests put back to the queue.
    pub preemptions: u64,
    /// Steps that computed something.
    pub steps: u64,
    /// Output tokens sampled while the memory was asleep: on a GPU the engine would have read
    /// unmapped memory. A correct controller keeps it 0.
    pub tokens_while_asleep: u64,
}

/// State as of the last step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Gauges {
    /// Requests in the running batch.
    pub running: usize,
    /// Requests waiting for capacity.
    pub waiting: usize,
    /// Requests waiting for something else, such as a load.
    pub deferred: usize,
    /// Share of device blocks in use, 0 to 1.
    pub kv_usage: f64,
}
