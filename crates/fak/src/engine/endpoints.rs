//! Which engine paths exist for fak: two closed lists, and the one constructor of engine URLs.
//!
//! Invariant: an [`EngineUrl`] holds a path of these lists, byte for byte, and a query made of
//! typed parameters alone; no text from a client, a trace, an engine or a configuration reaches a
//! path.

use std::net::Ipv6Addr;

use http::Method;
use http::uri::{Authority, PathAndQuery, Scheme, Uri};

/// Longest base URL that is taken, in bytes.
const BASE_URL_BYTES_MAX: usize = 2048;

/// Why a URL from the configuration is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadUrl {
    /// Longer than any honest base URL.
    #[error("longer than {BASE_URL_BYTES_MAX} bytes")]
    TooLong,
    /// Space, control, non-ASCII, `%`, `\` or another byte that no host, port or path of ours
    /// needs.
    #[error("holds the character {0:?}, which no engine URL needs")]
    Character(char),
    /// Not `http://` or `https://`.
    #[error("does not start with http:// or https://")]
    Scheme,
    /// `user:password@host`. A key belongs into `FAK_VLLM_API_KEY`.
    #[error("holds user information")]
    UserInfo,
    /// The host is missing, or is no name, IPv4 or bracketed IPv6 address.
    #[error("names no host")]
    Host,
    /// The port is not within 1 to 65535.
    #[error("holds a port outside 1 to 65535")]
    Port,
    /// A path other than those taken.
    #[error("holds the path {found:?}, where only {taken} can be")]
    Path {
        /// The path as given.
        found: String,
        /// What would be right.
        taken: &'static str,
    },
}

/// A control path was asked for that the configuration keeps shut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{path} is not allowed by the configuration")]
pub struct NotAllowed {
    /// The path.
    pub path: &'static str,
}

/// Scheme, host and port of a server: everything of a URL but its path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin {
    scheme: Scheme,
    authority: Authority,
}

impl Origin {
    /// The host as a socket needs it: a name or an address, IPv6 without brackets.
    #[must_use]
    pub fn host(&self) -> &str {
        self.authority.host().trim_start_matches('[').trim_end_matches(']')
    }

    /// The port, the scheme's own where none is named.
    #[must_use]
    pub fn port(&self) -> u16 {
        let of_scheme = if self.scheme == Scheme::HTTPS { 443 } else { 80 };
        self.authority.port_u16().unwrap_or(of_scheme)
    }
}

impl std::fmt::Display for Origin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}://{}", self.scheme, self.authority)
    }
}

/// An engine URL. Only [`Endpoints`] makes one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineUrl {
    uri: Uri,
    method: Method,
    path: &'static str,
    takes_key: bool,
}

impl EngineUrl {
    /// The whole URL.
    #[must_use]
    pub fn uri(&self) -> &Uri {
        &self.uri
    }

    /// The method that the engine takes there.
    #[must_use]
    pub fn method(&self) -> &Method {
        &self.method
    }

    /// The path without its query: safe as a log field or a label.
    #[must_use]
    pub fn path(&self) -> &'static str {
        self.path
    }

    /// Whether the engine's API key may go there: only to the origin of the base URL.
    #[must_use]
    pub fn takes_key(&self) -> bool {
        self.takes_key
    }
}

/// Declares a list of paths: the enum, each path with its method, and the way back from a path.
macro_rules! paths {
    (
        $(#[$doc:meta])*
        $name:ident {
            $($(#[$vdoc:meta])* $variant:ident = $method:ident $path:literal,)+
        }
    ) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum $name { $($(#[$vdoc])* $variant,)+ }

        impl $name {
            /// Every entry of the list.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)+];

            /// The path, as it goes on the wire.
            #[must_use]
            pub const fn path(self) -> &'static str {
                match self { $(Self::$variant => $path,)+ }
            }

            /// The method that the engine takes there.
            #[must_use]
            pub const fn method(self) -> Method {
                match self { $(Self::$variant => Method::$method,)+ }
            }

            /// The entry that `path` is, byte for byte. Nothing is decoded, folded or trimmed
            /// first, so `//sleep`, `/v1/../sleep`, `/%73leep` and `/SLEEP` are what they look
            /// like: no entry.
            #[must_use]
            pub fn from_path(path: &str) -> Option<Self> {
                match path { $($path => Some(Self::$variant),)+ _ => None }
            }
        }
    };
}

paths! {
    /// The data list: inference and what is open on every engine.
    ///
    /// The adapter routes under `/v1` (`load_lora_adapter`, `unload_lora_adapter`) are no inference
    /// and are left out.
    Data {
        /// Chat, unary or streamed.
        ChatCompletions = POST "/v1/chat/completions",
        /// Chat to token ids, without running it.
        ChatCompletionsRender = POST "/v1/chat/completions/render",
        /// Several conversations in one request.
        ChatCompletionsBatch = POST "/v1/chat/completions/batch",
        /// Text completion, unary or streamed.
        Completions = POST "/v1/completions",
        /// Text to token ids, without running it.
        CompletionsRender = POST "/v1/completions/render",
        /// The Responses API.
        Responses = POST "/v1/responses",
        /// Anthropic's messages.
        Messages = POST "/v1/messages",
        /// Token count for messages.
        MessagesCountTokens = POST "/v1/messages/count_tokens",
        /// Embeddings.
        Embeddings = POST "/v1/embeddings",
        /// Similarity of pairs.
        Score = POST "/v1/score",
        /// Reranking.
        Rerank = POST "/v1/rerank",
        /// Speech to text.
        AudioTranscriptions = POST "/v1/audio/transcriptions",
        /// Speech to English text.
        AudioTranslations = POST "/v1/audio/translations",
        /// What is served.
        Models = GET "/v1/models",
        /// Text or messages to token ids.
        Tokenize = POST "/tokenize",
        /// Token ids to text.
        Detokenize = POST "/detokenize",
        /// Token ids in and out; offered with `--enable-scale-out` (0.32.0, observed).
        Generate = POST "/inference/v1/generate",
        /// Whatever the model's pooler gives.
        Pooling = POST "/pooling",
        /// Classes of texts.
        Classify = POST "/classify",
        /// As below `/v1`.
        ScoreAtRoot = POST "/score",
        /// As below `/v1`.
        RerankAtRoot = POST "/rerank",
        /// As below `/v1`, by Cohere's version.
        RerankV2 = POST "/v2/rerank",
        /// How many requests the engine's server has.
        Load = GET "/load",
        /// 200 while the engine's server answers (SageMaker's name).
        Ping = GET "/ping",
        /// Prometheus text.
        Metrics = GET "/metrics",
        /// 200 while the engine process lives.
        Health = GET "/health",
        /// The engine's version.
        Version = GET "/version",
    }
}

paths! {
    /// The control list.
    ControlPath {
        /// Stop the scheduler.
        Pause = POST "/pause",
        /// Start it again.
        Resume = POST "/resume",
        /// Is the scheduler stopped?
        IsPaused = GET "/is_paused",
        /// Release memory.
        Sleep = POST "/sleep",
        /// Take memory back.
        WakeUp = POST "/wake_up",
        /// Is the scheduler stopped, or memory released?
        IsSleeping = GET "/is_sleeping",
        /// Drop the prefix cache.
        ResetPrefixCache = POST "/reset_prefix_cache",
        /// Where the event sockets are.
        KvEventSources = GET "/kv_event_sources",
        /// The weight version.
        WeightInfo = GET "/weight_info",
        /// The engine's configuration.
        ServerInfo = GET "/server_info",
        /// The API's own description.
        OpenApi = GET "/openapi.json",
        /// Worker RPC, for the single method `reload_weights`.
        CollectiveRpc = POST "/collective_rpc",
    }
}

/// Declares a closed set of words for a query parameter.
macro_rules! words {
    ($(#[$doc:meta])* $name:ident { $($(#[$vdoc:meta])* $variant:ident = $word:literal,)+ }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum $name { $($(#[$vdoc])* $variant,)+ }

        impl $name {
            /// Every word.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)+];

            /// The word on the wire.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $word,)+ }
            }

            /// The value that `word` names, byte for byte.
            #[must_use]
            pub fn parse(word: &str) -> Option<Self> {
                match word { $($word => Some(Self::$variant),)+ _ => None }
            }
        }
    };
}

words! {
    /// What happens to running requests (vLLM 0.17.1 and later for sleep, 0.16.0 and later for
    /// pause).
    Mode {
        /// They end with `finish_reason: "abort"`. The engine's default.
        Abort = "abort",
        /// The call returns when they are done.
        Wait = "wait",
        /// They stall with their connection open and go on later.
        Keep = "keep",
    }
}

words! {
    /// How deep to sleep. Level 0 is a pause under another name and is not offered.
    SleepLevel {
        /// Weights to host memory.
        WeightsOffloaded = "1",
        /// Weights discarded.
        DiscardAll = "2",
    }
}

words! {
    /// What a partial wake takes back.
    WakeTag {
        /// Weights.
        Weights = "weights",
        /// KV memory.
        KvCache = "kv_cache",
        /// The scheduler.
        Scheduling = "scheduling",
    }
}

/// A control call with its parameters. vLLM ignores an unknown parameter with a 200 (observed,
/// 0.32.0), so parameters are typed here and sent as the query, never as a body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Control {
    /// `POST /pause`. Mode and clearing are always sent, since the engine's defaults abort and
    /// clear.
    Pause {
        /// Fate of running requests.
        mode: Mode,
        /// Whether the caches are dropped, the connector's included (0.23.0 and later).
        clear_cache: bool,
        /// Sends `clear_connector_cache=false`. Only for an engine that declares the argument:
        /// another answers 200 and evicts all the same.
        keep_connector_cache: bool,
    },
    /// `POST /resume`.
    Resume,
    /// `GET /is_paused`.
    IsPaused,
    /// `POST /sleep`. Level and mode are always sent.
    Sleep {
        /// How deep.
        level: SleepLevel,
        /// Fate of running requests.
        mode: Mode,
        /// Sends `clear_connector_cache=false`. Only for an engine that declares the argument:
        /// another answers 200 and evicts all the same.
        keep_connector_cache: bool,
    },
    /// `POST /wake_up`. No tags: everything, the scheduler too.
    WakeUp {
        /// What to take back.
        tags: Vec<WakeTag>,
    },
    /// `GET /is_sleeping`.
    IsSleeping,
    /// `POST /reset_prefix_cache`. A parameter is sent only where it is true: 0.9.2 and 0.11.0 know
    /// neither.
    ResetPrefixCache {
        /// Also the connector's tiers (0.13.0 and later).
        external: bool,
        /// Preempt what runs, so that the reset cannot be refused (0.12.0 and later).
        running_requests: bool,
    },
    /// `GET /kv_event_sources` (0.31.0 and later).
    KvEventSources,
    /// `GET /weight_info` (0.27.1 and later).
    WeightInfo,
    /// `GET /server_info?config_format=json`.
    ServerInfo,
    /// `GET /openapi.json`.
    OpenApi,
    /// `POST /collective_rpc` with `{"method":"reload_weights"}`, and nothing else.
    ReloadWeights,
}

impl Control {
    /// Where the call goes.
    #[must_use]
    pub const fn path(&self) -> ControlPath {
        match self {
            Self::Pause { .. } => ControlPath::Pause,
            Self::Resume => ControlPath::Resume,
            Self::IsPaused => ControlPath::IsPaused,
            Self::Sleep { .. } => ControlPath::Sleep,
            Self::WakeUp { .. } => ControlPath::WakeUp,
            Self::IsSleeping => ControlPath::IsSleeping,
            Self::ResetPrefixCache { .. } => ControlPath::ResetPrefixCache,
            Self::KvEventSources => ControlPath::KvEventSources,
            Self::WeightInfo => ControlPath::WeightInfo,
            Self::ServerInfo => ControlPath::ServerInfo,
            Self::OpenApi => ControlPath::OpenApi,
            Self::ReloadWeights => ControlPath::CollectiveRpc,
        }
    }

    /// The body of the call. Only worker RPC has one, and it is constant.
    #[must_use]
    pub const fn body(&self) -> Option<&'static str> {
        match self {
            Self::ReloadWeights => Some(r#"{"method":"reload_weights"}"#),
            _ => None,
        }
    }

    /// The parameters in the order in which they are sent.
    #[must_use]
    pub fn query(&self) -> Vec<(&'static str, &'static str)> {
        match self {
            Self::Pause { mode, clear_cache, keep_connector_cache } => {
                let query = [("mode", mode.as_str()), ("clear_cache", boolean(*clear_cache))];
                query.into_iter().chain(kept(*keep_connector_cache)).collect()
            }
            Self::Sleep { level, mode, keep_connector_cache } => {
                let query = [("level", level.as_str()), ("mode", mode.as_str())];
                query.into_iter().chain(kept(*keep_connector_cache)).collect()
            }
            Self::WakeUp { tags } => tags.iter().map(|tag| ("tags", tag.as_str())).collect(),
            Self::ResetPrefixCache { external, running_requests } => {
                [("reset_external", *external), ("reset_running_requests", *running_requests)]
                    .into_iter()
                    .filter(|(_, wanted)| *wanted)
                    .map(|(name, _)| (name, "true"))
                    .collect()
            }
            Self::ServerInfo => vec![("config_format", "json")],
            Self::Resume
            | Self::IsPaused
            | Self::IsSleeping
            | Self::KvEventSources
            | Self::WeightInfo
            | Self::OpenApi
            | Self::ReloadWeights => Vec::new(),
        }
    }
}

/// The opt-out from clearing the connector's tiers, where it is wanted.
fn kept(keep_connector_cache: bool) -> Option<(&'static str, &'static str)> {
    keep_connector_cache.then_some(("clear_connector_cache", "false"))
}

const fn boolean(value: bool) -> &'static str {
    if value { "true" } else { "false" }
}

/// Every URL of one engine.
#[derive(Clone, Debug)]
pub struct Endpoints {
    origin: Origin,
    metrics: Origin,
    reload_weights_allowed: bool,
}

impl Endpoints {
    /// The URLs under `base_url`, given with or without `/v1`. Metrics are read there too.
    ///
    /// # Errors
    ///
    /// [`BadUrl`] where the base is anything but scheme, host, port and an optional `/v1`.
    pub fn new(base_url: &str) -> Result<Self, BadUrl> {
        let origin = parse(base_url, &["", "/", "/v1", "/v1/"], "/v1 or none")?;
        Ok(Self { metrics: origin.clone(), origin, reload_weights_allowed: false })
    }

    /// Reads metrics at `metrics_url`, which may be another server, and has the path `/metrics`.
    ///
    /// # Errors
    ///
    /// [`BadUrl`] where it is anything else.
    pub fn with_metrics_url(mut self, metrics_url: &str) -> Result<Self, BadUrl> {
        self.metrics = parse(metrics_url, &[Data::Metrics.path()], "/metrics")?;
        Ok(self)
    }

    /// Opens `/collective_rpc` for `reload_weights`.
    #[must_use]
    pub fn allowing_reload_weights(mut self) -> Self {
        self.reload_weights_allowed = true;
        self
    }

    /// Where the engine is.
    #[must_use]
    pub fn origin(&self) -> &Origin {
        &self.origin
    }

    /// The URL of a data route.
    #[must_use]
    pub fn data(&self, route: Data) -> EngineUrl {
        self.build(route.path(), route.method(), &[])
    }

    /// The URL of a control call.
    ///
    /// # Errors
    ///
    /// [`NotAllowed`] for worker RPC where it was not opened.
    pub fn control(&self, call: &Control) -> Result<EngineUrl, NotAllowed> {
        let path = call.path();
        if path == ControlPath::CollectiveRpc && !self.reload_weights_allowed {
            return Err(NotAllowed { path: path.path() });
        }
        Ok(self.build(path.path(), path.method(), &call.query()))
    }

    /// The only place where an engine URL comes into being. Path and parameters are constants of
    /// this file.
    fn build(
        &self,
        path: &'static str,
        method: Method,
        query: &[(&'static str, &'static str)],
    ) -> EngineUrl {
        let mut target = path.to_owned();
        for (index, (name, value)) in query.iter().enumerate() {
            target.push(if index == 0 { '?' } else { '&' });
            target.push_str(name);
            target.push('=');
            target.push_str(value);
        }
        let origin = if path == Data::Metrics.path() { &self.metrics } else { &self.origin };
        let mut parts = http::uri::Parts::default();
        parts.scheme = Some(origin.scheme.clone());
        parts.authority = Some(origin.authority.clone());
        parts.path_and_query =
            Some(PathAndQuery::try_from(target).expect("constants of this file are valid targets"));
        let uri = Uri::from_parts(parts).expect("scheme, authority and path are all there");
        EngineUrl { uri, method, path, takes_key: *origin == self.origin }
    }
}

/// Takes `url` apart, and refuses all that is not scheme, host, port and one of `paths`.
fn parse(url: &str, paths: &[&str], taken: &'static str) -> Result<Origin, BadUrl> {
    if url.len() > BASE_URL_BYTES_MAX {
        return Err(BadUrl::TooLong);
    }
    let (scheme, rest) = if let Some(rest) = url.strip_prefix("http://") {
        (Scheme::HTTP, rest)
    } else if let Some(rest) = url.strip_prefix("https://") {
        (Scheme::HTTPS, rest)
    } else {
        return Err(BadUrl::Scheme);
    };
    let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    if authority.contains('@') {
        return Err(BadUrl::UserInfo);
    }
    let needed = |c: char| c.is_ascii_alphanumeric() || "-._:/[]".contains(c);
    if let Some(character) = rest.chars().find(|c| !needed(*c)) {
        return Err(BadUrl::Character(character));
    }
    check_authority(authority)?;
    if !paths.contains(&path) {
        return Err(BadUrl::Path { found: path.to_owned(), taken });
    }
    let authority = Authority::try_from(authority).map_err(|_| BadUrl::Host)?;
    Ok(Origin { scheme, authority })
}

/// `host`, `host:port`, `[v6]` or `[v6]:port`.
fn check_authority(authority: &str) -> Result<(), BadUrl> {
    let (host, port) = match authority.strip_prefix('[') {
        Some(rest) => {
            let (address, after) = rest.split_once(']').ok_or(BadUrl::Host)?;
            address.parse::<Ipv6Addr>().map_err(|_| BadUrl::Host)?;
            let port = match after {
                "" => None,
                _ => Some(after.strip_prefix(':').ok_or(BadUrl::Host)?),
            };
            (address, port)
        }
        None => match authority.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (authority, None),
        },
    };
    let named = host.chars().any(|c| c.is_ascii_alphanumeric());
    let bracket_free = !host.contains(['[', ']', '/']);
    if !named || !bracket_free || host.starts_with(['.', '-']) || host.contains("..") {
        return Err(BadUrl::Host);
    }
    match port {
        None => Ok(()),
        Some(port) if port.len() <= 5 && port.bytes().all(|b| b.is_ascii_digit()) => {
            match port.parse::<u16>() {
                Ok(0) | Err(_) => Err(BadUrl::Port),
                Ok(_) => Ok(()),
            }
        }
        Some(_) => Err(BadUrl::Port),
    }
}

#[cfg(test)]
mod tests;
