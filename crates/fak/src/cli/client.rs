//! Asks a running fak over its control API.
//!
//! Invariant: the admin key is sent to the configured address alone, and shown nowhere; an answer
//! is taken as what it says, never as a success that it does not say.

use std::time::Duration;

use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_TYPE, HeaderValue};
use http::uri::{Authority, Scheme};
use http::{Method, Request, StatusCode, Uri};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::Incoming;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::Exit;
use crate::admin::json::Failure;
use crate::config::{self, names};

/// Bytes of an answer: 10,000 sessions or 1,000 rows.
const BODY_BYTES_MAX: usize = 64 << 20;
/// Characters of an answer that is not fak's that are shown.
const SHOWN_CHARS_MAX: usize = 200;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// For what only reads. An action takes as long as its drain and the engine do, which fak bounds.
const READ_TIMEOUT: Duration = Duration::from_secs(30);

/// Why fak gave no answer that can be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The arguments make no sense together.
    #[error("{0}")]
    Usage(String),
    /// The configured address is none.
    #[error("FAK_ADDR={0:?} has to be http://host:port")]
    BadAddress(String),
    /// The configured key cannot be a header. Its text is not told.
    #[error("FAK_KEY holds a byte that no HTTP header can carry")]
    BadKey,
    /// Nobody answers.
    #[error("no fak answers at {address} (from FAK_ADDR, or its default)")]
    Unreachable {
        /// Where.
        address: String,
        /// Why.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// Something else than fak answered, such as an engine.
    #[error(
        "{address} does not answer as fak does: {problem}; FAK_ADDR has to be the address of a \
         running fak serve, not of an engine"
    )]
    NotFak {
        /// Where.
        address: String,
        /// With this status, where it was no success.
        status: Option<StatusCode>,
        /// What is wrong.
        problem: String,
    },
    /// The answer, or the stream, ended before its end.
    #[error("fak ended the connection")]
    Ended,
    /// fak refused or failed.
    #[error("{}{}", .failure.error.message, where_the_key_goes(*.status))]
    Failed {
        /// With this status.
        status: StatusCode,
        /// Saying this.
        failure: Box<Failure>,
        /// The whole body.
        body: Value,
    },
    /// Of several workers not all did as asked.
    #[error("{message}")]
    Partial {
        /// How many did.
        message: String,
        /// Whether none did, and all refused.
        is_untouched: bool,
    },
    /// Standard output is gone.
    #[error("cannot write")]
    Output(#[from] std::io::Error),
}

impl Error {
    /// What the process exits with.
    #[must_use]
    pub fn exit(&self) -> Exit {
        match self {
            Self::Usage(_) | Self::BadAddress(_) | Self::BadKey => Exit::Usage,
            Self::Partial { is_untouched: true, .. } => Exit::Refused,
            // It knows no such path, and so did nothing.
            Self::NotFak { status: Some(StatusCode::NOT_FOUND), .. } => Exit::Refused,
            Self::Failed { status, failure, .. } => match status.as_u16() {
                400 => Exit::Usage,
                // The call was sent, and its row says what it did.
                409 if failure.is_of_a_sent_call() => Exit::Failed,
                // Nothing was done.
                401 | 403 | 404 | 409 => Exit::Refused,
                _ => Exit::Failed,
            },
            _ => Exit::Failed,
        }
    }
}

/// A client of one fak.
#[derive(Clone, Debug)]
pub struct Client {
    http: hyper_util::client::legacy::Client<HttpsConnector<HttpConnector>, Full<Bytes>>,
    scheme: Scheme,
    authority: Authority,
    key: Option<HeaderValue>,
}

impl Client {
    /// The fak of `FAK_ADDR`, with the key of `FAK_KEY`.
    ///
    /// # Errors
    /// [`Error::BadAddress`], [`Error::BadKey`].
    pub fn from_environment() -> Result<Self, Error> {
        let text =
            |name| config::process_environment(name).map(|v| v.to_string_lossy().into_owned());
        let address = text(names::ADDR).filter(|address| !address.is_empty());
        let address = address.unwrap_or_else(|| "http://127.0.0.1:8080".to_owned());
        let key = config::process_environment(names::KEY);
        let key = key.map(|key| key.into_string().map_err(|_| Error::BadKey)).transpose()?;
        Self::new(&address, key.as_deref().filter(|key| !key.is_empty()))
    }

    /// The fak at `address`, with or without `http://`.
    ///
    /// # Errors
    /// [`Error::BadAddress`], [`Error::BadKey`].
    pub fn new(address: &str, key: Option<&str>) -> Result<Self, Error> {
        let bad = || Error::BadAddress(address.to_owned());
        let with_scheme =
            if address.contains("://") { address.to_owned() } else { format!("http://{address}") };
        let parts = with_scheme.parse::<Uri>().map_err(|_| bad())?.into_parts();
        let scheme = parts.scheme.filter(|s| *s == Scheme::HTTP || *s == Scheme::HTTPS);
        let authority = parts.authority.filter(is_host_and_port);
        let is_bare = parts.path_and_query.is_none_or(|path| path == "/");
        let (Some(scheme), Some(authority), true) = (scheme, authority, is_bare) else {
            return Err(bad());
        };
        let key = key.map(|key| HeaderValue::from_str(&format!("Bearer {key}")));
        let mut key = key.transpose().map_err(|_| Error::BadKey)?;
        if let Some(key) = &mut key {
            key.set_sensitive(true);
        }
        let mut tcp = HttpConnector::new();
        tcp.set_connect_timeout(Some(CONNECT_TIMEOUT));
        tcp.enforce_http(false);
        let tls = HttpsConnectorBuilder::new()
            .with_webpki_roots()
            .https_or_http()
            .enable_http1()
            .wrap_connector(tcp);
        let http = hyper_util::client::legacy::Client::builder(TokioExecutor::new()).build(tls);
        Ok(Self { http, scheme, authority, key })
    }

    /// Reads `path`.
    ///
    /// # Errors
    /// [`Error`].
    pub async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, Error> {
        let read = async { self.whole(self.send(Method::GET, path, None).await?).await };
        let body = tokio::time::timeout(READ_TIMEOUT, read).await.map_err(|_| Error::Ended)??;
        serde_json::from_value(body).map_err(|error| self.not_fak(error.to_string()))
    }

    /// Asks for an action, and waits for its end.
    ///
    /// # Errors
    /// [`Error`].
    pub async fn act<T: DeserializeOwned>(&self, path: &str, options: &Value) -> Result<T, Error> {
        let body = self.whole(self.send(Method::POST, path, Some(options)).await?).await?;
        serde_json::from_value(body).map_err(|error| self.not_fak(error.to_string()))
    }

    /// Opens a stream at `path`.
    ///
    /// # Errors
    /// [`Error`].
    pub async fn open(&self, path: &str) -> Result<Incoming, Error> {
        let response = self.send(Method::GET, path, None).await?;
        if response.status().is_success() {
            return Ok(response.into_body());
        }
        self.whole(response).await?;
        Err(self.not_fak("a status that is no success".to_owned()))
    }

    async fn send(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> Result<http::Response<Incoming>, Error> {
        let url = format!("{}{path}", self.address());
        let mut request = Request::builder().method(method).uri(url);
        if let Some(key) = &self.key {
            request = request.header(AUTHORIZATION, key);
        }
        if body.is_some() {
            request = request.header(CONTENT_TYPE, "application/json");
        }
        let body = body.map(Value::to_string).unwrap_or_default();
        // Paths are put together from plain words and escaped ids.
        let request = request
            .body(Full::new(Bytes::from(body)))
            .map_err(|error| Error::Usage(format!("no such path: {error}")))?;
        self.http.request(request).await.map_err(|error| Error::Unreachable {
            address: self.address(),
            source: Box::new(error),
        })
    }

    async fn whole(&self, response: http::Response<Incoming>) -> Result<Value, Error> {
        let (parts, body) = response.into_parts();
        let body = Limited::new(body, BODY_BYTES_MAX).collect().await.map_err(|_| Error::Ended)?;
        let body = body.to_bytes();
        let read = serde_json::from_slice::<Value>(&body);
        let status = parts.status;
        match read {
            Ok(body) if status.is_success() => Ok(body),
            Ok(body) => match serde_json::from_value(body.clone()) {
                Ok(failure) => Err(Error::Failed { status, failure: Box::new(failure), body }),
                Err(_) => {
                    let shown: String = body.to_string().chars().take(SHOWN_CHARS_MAX).collect();
                    Err(self.answers_otherwise(status, format!("status {status} with {shown}")))
                }
            },
            Err(_) => Err(self.answers_otherwise(status, format!("status {status} without JSON"))),
        }
    }

    fn not_fak(&self, problem: String) -> Error {
        Error::NotFak { address: self.address(), status: None, problem }
    }

    fn answers_otherwise(&self, status: StatusCode, problem: String) -> Error {
        Error::NotFak { address: self.address(), status: Some(status), problem }
    }

    fn address(&self) -> String {
        format!("{}://{}", self.scheme, self.authority)
    }
}

fn where_the_key_goes(status: StatusCode) -> &'static str {
    if status == StatusCode::UNAUTHORIZED { "; FAK_KEY holds it here" } else { "" }
}

/// Without a name or a password, and with a port that is a number, if any.
fn is_host_and_port(authority: &Authority) -> bool {
    let port = authority.as_str().strip_prefix(authority.host());
    port.is_some_and(|port| port.is_empty() || authority.port_u16().is_some())
}

/// An id as one segment of a path: every byte that is not plain is escaped.
#[must_use]
pub fn segment(id: &str) -> String {
    let mut out = String::with_capacity(id.len());
    for byte in id.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'~' => out.push(byte.into()),
            // A dot may stand in an id, though not be all of it: `..` would climb.
            b'.' if id.bytes().any(|b| b != b'.') => out.push('.'),
            _ => out.push_str(&format!("%{byte:02X}")),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_a_host_and_a_port() {
        for good in ["127.0.0.1:8080", "http://h:1", "https://h", "http://h:1/", "[::1]:80"] {
            assert!(Client::new(good, None).is_ok(), "{good}");
        }
        for bad in ["", "ftp://h", "http://h/v1", "http://u:p@h", "http://h:x", "a b"] {
            assert!(matches!(Client::new(bad, None), Err(Error::BadAddress(_))), "{bad}");
        }
        assert!(matches!(Client::new("h:1", Some("a\nb")), Err(Error::BadKey)));
        let client = Client::new("h:1", Some("s3cret")).expect("good");
        assert!(!format!("{client:?}").contains("s3cret"));
    }

    #[test]
    fn an_id_is_one_segment() {
        assert_eq!(segment("a/b?c#d%e f"), "a%2Fb%3Fc%23d%25e%20f");
        assert_eq!(segment("v1.2-x_y~z"), "v1.2-x_y~z");
        assert_eq!(segment(".."), "%2E%2E");
    }
}
