//! From a client's request to one that can be sent: route, key, body, session, and the few fields
//! that fak reads or sets.
//!
//! Invariant: what is sent is what came, byte for byte, but for the fields that are set here: the
//! salt and priority of tenants kept apart, and usage that fak asks for on a client's behalf; and
//! for the one that is taken out: the mode in which an engine announces hits as if they were
//! stored, which is fak's alone.

use std::sync::Arc;

use bytes::Bytes;
use fak_wire::openai::{Api, Request, RequestError};
use http::header::{CONTENT_ENCODING, CONTENT_TYPE, HeaderMap, HeaderValue};
use http::{Method, Request as HttpRequest};
use hyper::body::Body as HttpBody;
use serde_json::{Map, Value};
use tokio::time::Instant;

use super::body::Whole;
use super::dispatch::Job;
use super::error::Problem;
use super::keys::Caller;
use super::predicted::Chunks;
use super::salts::{may_take_salt, takes_salt};
use super::{Shared, headers, models};
use crate::engine::{Data, Identity, Isolation};
use crate::sessions::{self, Turn};

/// Characters of a refused encoding that are shown.
const ENCODING_CHARS_MAX: usize = 64;

/// The route of a request: an inference route of vLLM's, byte for byte, or the name of a model,
/// which fak answers itself.
pub(super) fn route(method: &Method, path: &str) -> Result<Data, Problem> {
    let route = serves(path).ok_or(Problem::NoRoute)?;
    let is_taken = match route.method() {
        Method::GET => [Method::GET, Method::HEAD].contains(method),
        taken => taken == *method,
    };
    match (is_taken, route.method()) {
        (true, _) => Ok(route),
        (false, Method::GET) => Err(Problem::Method("GET")),
        (false, _) => Err(Problem::Method("POST")),
    }
}

/// The route that `path` is. Health and metrics of one engine are none: fak has its own.
pub(super) fn serves(path: &str) -> Option<Data> {
    let of_one = models::is_of_one(path).then_some(Data::Models);
    let route = of_one.or(Data::from_path(path))?;
    (!matches!(route, Data::Health | Data::Metrics)).then_some(route)
}

fn api(route: Data) -> Option<Api> {
    match route {
        Data::ChatCompletions => Some(Api::Chat),
        Data::Completions => Some(Api::Completions),
        _ => None,
    }
}

impl Shared {
    /// Reads a request to its end and prepares it.
    pub(super) async fn intake<B>(
        &self,
        route: Data,
        request_id: &HeaderValue,
        request: HttpRequest<B>,
    ) -> Result<Job, Problem>
    where
        B: HttpBody<Data = Bytes> + Unpin,
    {
        let (parts, body) = request.into_parts();
        let caller = self.keys.caller(&parts.headers)?;
        refuse_encoded(&parts.headers)?;
        let whole = self.room.read(body).await.inspect_err(|problem| {
            if matches!(problem, Problem::BodyTooLarge(_)) {
                self.metrics.too_large.inc();
                tracing::warn!(path = route.path(), %problem, "a request is refused");
            }
        })?;
        let since = Instant::now();
        let mut job = self.job(route, whole, since)?;
        job.turn = self.turn(&parts.headers, job.fields.as_ref(), caller.as_ref())?;
        self.stamp(route, &mut job, caller)?;
        let mut headers = self.config.passing.to_engine(&parts.headers, request_id);
        if self.config.stamp.isolation() == Isolation::On {
            headers.remove(headers::PRIORITY);
        }
        // Of what the engine gets: a client may name the header as one of this hop alone.
        job.rank = named_rank(&headers)?;
        if let Some(rank) = job.rank {
            headers.insert(headers::RANK, rank.into());
        }
        self.finish(job, headers)
    }

    /// Takes the body apart where fak reads it.
    fn job(&self, route: Data, whole: Whole, since: Instant) -> Result<Draft, Problem> {
        let is_form = matches!(route, Data::AudioTranscriptions | Data::AudioTranslations);
        let is_json = !is_form && route.method() == Method::POST;
        // Other routes have bodies of their own; of all that are JSON the model is read.
        let mut fields = is_json
            .then(|| Request::parse(api(route).unwrap_or(Api::Chat), &whole.bytes))
            .transpose()?;
        let is_changed = match &mut fields {
            Some(fields) => strip_report_mode(fields),
            None => refuse_report_mode(&whole.bytes).map(|()| false)?,
        };
        let model = match &fields {
            Some(fields) => fields.model()?,
            None => None,
        };
        self.check_model(route, model.as_deref())?;
        Ok(Draft { route, whole, fields, model, turn: None, rank: None, since, is_changed })
    }

    /// Refuses a name that nobody serves, and no name where it is not clear which model is meant.
    fn check_model(&self, route: Data, model: Option<&str>) -> Result<(), Problem> {
        let (fleet, configured) = (self.fleet.snapshot(), &self.config.models);
        match model {
            Some(model) if !models::may_exist(&fleet, configured, model) => {
                Err(models::unknown(&fleet, configured, model))
            }
            None if route.method() == Method::POST && models::has_several(&fleet) => {
                Err(Problem::NoModel { known: models::names(&fleet, configured) })
            }
            _ => Ok(()),
        }
    }

    /// The session's turn, where the request names a session; refused where that is at rest.
    fn turn(
        &self,
        headers: &HeaderMap,
        fields: Option<&Request>,
        caller: Option<&Caller>,
    ) -> Result<Option<(Turn, String)>, Problem> {
        let Some(sessions) = &self.sessions else { return Ok(None) };
        let resolve = |name: &str| match caller {
            None => sessions.resolve(name),
            Some(caller) => sessions.resolve(&sessions::of_tenant(&caller.tenant, name)),
        };
        let (turn, name) = if let Some(named) = headers.get(headers::SESSION) {
            let name = sessions::named(named.as_bytes())?;
            (resolve(name)?, name.to_owned())
        } else {
            let key = fields.map(Request::prompt_cache_key).transpose()?.flatten();
            // OpenAI's field takes names that a session's cannot have; such a request is in none.
            let name = key.or_else(|| agents_session(headers, fields));
            let Some(name) = name.filter(|name| sessions::named(name.as_bytes()).is_ok()) else {
                return Ok(None);
            };
            let Ok(turn) = resolve(&name) else { return Ok(None) };
            (turn, name)
        };
        match turn.dormancy() {
            None => Ok(Some((turn, name))),
            Some(dormancy) => Err(Problem::Dormant {
                id: name,
                action: dormancy.action.as_str(),
                witness: dormancy.witness,
            }),
        }
    }

    /// Writes salt and priority, where tenants are kept apart or a session is isolated.
    fn stamp(&self, route: Data, draft: &mut Draft, caller: Option<Caller>) -> Result<(), Problem> {
        let own_salt = draft.turn.as_ref().and_then(|(turn, _)| turn.salt());
        let is_isolating = self.config.stamp.isolation() == Isolation::On;
        if !is_isolating && own_salt.is_none() {
            return Ok(());
        }
        // Routes that compute no prefix have no salt; those whose body vLLM takes no salt in cannot
        // be kept apart.
        let Some(fields) = draft.fields.as_mut().filter(|_| may_take_salt(route)) else {
            let has_prefix =
                matches!(route, Data::Messages | Data::Generate | Data::ChatCompletionsBatch);
            return if has_prefix { Err(Problem::Isolation) } else { Ok(()) };
        };
        if is_isolating {
            let family = draft.model.clone().unwrap_or_default();
            let identity = caller.map(|caller| Identity {
                tenant: caller.tenant.to_string(),
                authority: caller.authority.to_string(),
                family,
            });
            self.config.stamp.apply(fields, identity.as_ref(), None);
        }
        if let Some(salt) = own_salt {
            // Both count: an isolated session stays its tenant's.
            let salt = match fields.cache_salt()? {
                Some(tenant) => self.config.stamp.session_salt(&tenant, &salt),
                None => salt.to_string(),
            };
            fields.set_cache_salt(Some(&salt));
        }
        draft.is_changed = true;
        self.metrics.salted.inc();
        Ok(())
    }

    fn finish(&self, draft: Draft, mut headers: HeaderMap) -> Result<Job, Problem> {
        let Draft { route, whole, fields, model, turn, rank, since, mut is_changed } = draft;
        let mut fields = fields;
        let (turn, session) = turn.unzip();
        let is_read = api(route).is_some();
        let is_stream = match &fields {
            Some(fields) => fields.stream()?,
            None => false,
        };
        let mut cuts_usage = false;
        let mut choices = 1;
        if let Some(fields) = fields.as_mut().filter(|_| is_read) {
            choices = fields.choices()?;
            if is_stream && !fields.include_usage()? {
                ask_for_usage(fields)?;
                (cuts_usage, is_changed) = (true, true);
            }
        }
        let chunks = match &fields {
            Some(fields) if is_read => Chunks::of(fields, self.seed),
            Some(fields) => Chunks::of_any(fields, self.seed),
            None => Chunks::default(),
        };
        let body = match &fields {
            Some(fields) if is_changed => Bytes::from(fields.to_bytes()),
            _ => whole.bytes.clone(),
        };
        if route != Data::AudioTranscriptions && route != Data::AudioTranslations {
            headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        }
        let fields = fields.filter(|_| takes_salt(route));
        let salt = fields.as_ref().map(Request::cache_salt).transpose()?.flatten();
        Ok(Job {
            route,
            body,
            headers,
            model,
            fields,
            is_read,
            salt: salt.map(Arc::from),
            is_stream,
            cuts_usage,
            choices,
            chunks,
            rank,
            turn,
            session,
            since,
            _whole: whole,
        })
    }
}

/// Refuses a body that is compressed: fak reads it, and vLLM takes none (0.32.0, source).
fn refuse_encoded(headers: &HeaderMap) -> Result<(), Problem> {
    let encodings = headers.get_all(CONTENT_ENCODING).iter();
    let encoded = encodings.filter(|value| !value.as_bytes().eq_ignore_ascii_case(b"identity"));
    match encoded.into_iter().next() {
        None => Ok(()),
        Some(encoding) => {
            let shown = String::from_utf8_lossy(encoding.as_bytes());
            Err(Problem::BodyEncoded(shown.chars().take(ENCODING_CHARS_MAX).collect()))
        }
    }
}

/// The data-parallel rank that a request names. vLLM reads the first such header as Python reads a
/// number, `-0` and `0_1` too, and chooses by itself where it cannot (0.32.0, source): what fak
/// does not read as the engine does would go to another rank than the one that is claimed of.
fn named_rank(headers: &HeaderMap) -> Result<Option<u32>, Problem> {
    let mut named = headers.get_all(headers::RANK).iter();
    let (Some(first), more) = (named.next(), named.next()) else { return Ok(None) };
    let is_plain = first.as_bytes().iter().all(u8::is_ascii_digit) && more.is_none();
    let rank = first.to_str().ok().filter(|_| is_plain).and_then(|text| text.parse().ok());
    rank.map(Some).ok_or_else(|| {
        let found = String::from_utf8_lossy(first.as_bytes());
        let found = found.chars().take(ENCODING_CHARS_MAX).collect();
        let expected = "one rank, in digits alone";
        RequestError::Field { field: "x-data-parallel-rank", found, expected }.into()
    })
}

/// The session that an agent names in its own way: Claude Code in a header, and in the
/// `metadata.user_id` of its messages, as JSON with a `session_id` or as `.._session_ID`.
fn agents_session(headers: &HeaderMap, fields: Option<&Request>) -> Option<String> {
    if let Some(named) = headers.get(headers::AGENT_SESSION) {
        return named.to_str().ok().map(str::to_owned);
    }
    let metadata: Value = serde_json::from_str(fields?.raw("metadata")?).ok()?;
    let user = metadata.get("user_id")?.as_str()?;
    match serde_json::from_str::<Value>(user) {
        Ok(user) => user.get("session_id")?.as_str().map(str::to_owned),
        Err(_) => user.rsplit_once("_session_").map(|(_, session)| session.to_owned()),
    }
}

/// A request that is not ready yet.
struct Draft {
    route: Data,
    whole: Whole,
    fields: Option<Request>,
    model: Option<String>,
    turn: Option<(Turn, String)>,
    rank: Option<u32>,
    since: Instant,
    is_changed: bool,
}

/// In which mode a request's blocks are announced (vLLM 0.32.0, `v1/request.py`, read).
pub(super) const REPORT_MODE: &str = "kv_cache_report_mode";

/// Takes the mode out of every object from which vLLM takes a request's extra arguments. An engine
/// that gets it announces blocks that no eviction takes back as often, whoever asked for it.
fn strip_report_mode(fields: &mut Request) -> bool {
    let arguments: [&[&str]; 2] =
        [&["vllm_xargs", REPORT_MODE], &["sampling_params", "extra_args", REPORT_MODE]];
    let stripped = arguments.map(|path| fields.remove_at(path));
    stripped.contains(&true)
}

/// Refuses a form that may set the mode: vLLM reads `vllm_xargs` of audio routes as JSON in a
/// form's field (0.32.0, source), and fak does not rewrite forms.
fn refuse_report_mode(form: &[u8]) -> Result<(), Problem> {
    let has = |text: &str| memchr::memmem::find(form, text.as_bytes()).is_some();
    // A name in JSON may be escaped.
    if has("vllm_xargs") && (has(REPORT_MODE) || has("\\u")) {
        return Err(RequestError::Field {
            field: "vllm_xargs",
            found: format!("{REPORT_MODE}, or an escaped name"),
            expected: "other arguments, their names written plainly: the mode is set by fak alone",
        }
        .into());
    }
    Ok(())
}

/// Asks for usage at the stream's end. Usage in every chunk, which the client would then get too,
/// is taken back: without `include_usage` it counts for nothing (vLLM 0.32.0, source).
fn ask_for_usage(fields: &mut Request) -> Result<(), Problem> {
    if let Some(raw) = fields.raw("stream_options")
        && let Ok(Some(mut options)) = serde_json::from_str::<Option<Map<String, Value>>>(raw)
        && options.remove("continuous_usage_stats").is_some()
    {
        fields.set("stream_options", &options.into());
    }
    fields.set_include_usage(true)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_inference_routes_are_served() {
        let at = |method: Method, path: &str| route(&method, path);
        assert_eq!(at(Method::POST, "/v1/chat/completions"), Ok(Data::ChatCompletions));
        assert_eq!(at(Method::GET, "/v1/models"), Ok(Data::Models));
        assert_eq!(at(Method::GET, "/v1/models/org%2Fm"), Ok(Data::Models));
        assert_eq!(at(Method::HEAD, "/v1/models"), Ok(Data::Models));
        assert_eq!(at(Method::GET, "/version"), Ok(Data::Version));
        assert_eq!(at(Method::POST, "/inference/v1/generate"), Ok(Data::Generate));
        assert_eq!(at(Method::HEAD, "/v1/completions"), Err(Problem::Method("POST")));
        assert_eq!(at(Method::POST, "/v1/models/m"), Err(Problem::Method("GET")));
        assert_eq!(at(Method::GET, "/v1/chat/completions"), Err(Problem::Method("POST")));
        for path in [
            "/sleep",
            "/wake_up",
            "/pause",
            "/reset_prefix_cache",
            "/collective_rpc",
            "/invocations",
            "//sleep",
            "/v1/../sleep",
            "/%73leep",
            "/SLEEP",
            "/metrics",
            "/health",
            "/v1/chat/completions/",
            "/v1/models/",
            "/v1/chat/completions/../../sleep",
            "/v1/load_lora_adapter",
        ] {
            assert_eq!(at(Method::POST, path), Err(Problem::NoRoute), "{path}");
        }
    }
}
