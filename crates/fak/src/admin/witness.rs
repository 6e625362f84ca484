//! The ledger, as a list.

use axum::Json;
use axum::extract::{Query, State};
use fak_kernel::{Action, Disposition};

use super::AdminState;
use super::error::Error;
use crate::store::{Filter, Row};

const FILTERS: &str = "worker, session, action, kv, after, limit and newest_first";

pub(super) async fn list(
    State(state): State<AdminState>,
    Query(query): Query<Vec<(String, String)>>,
) -> Result<Json<Vec<Row>>, Error> {
    Ok(Json(state.store.rows(&filter(query)?).await?))
}

fn filter(query: Vec<(String, String)>) -> Result<Filter, Error> {
    let mut filter = Filter::default();
    for (name, value) in query {
        match name.as_str() {
            "worker" => filter.worker = Some(value),
            "session" => filter.session = Some(value),
            "action" => filter.action = Some(word(&name, &value, Action::ALL, Action::as_str)?),
            "kv" => filter.kv = Some(word(&name, &value, Disposition::ALL, Disposition::as_str)?),
            "after" => filter.after = Some(number(&name, &value)?),
            "limit" => filter.limit = Some(number(&name, &value)?),
            "newest_first" => {
                filter.newest_first =
                    value.parse().map_err(|_| Error::filter(&name, &value, "true or false"))?;
            }
            _ => {
                let message = format!("`{name}` is no filter; there are {FILTERS}");
                return Err(Error::bad("unknown_option", name, message));
            }
        }
    }
    Ok(filter)
}

fn number<N: std::str::FromStr>(name: &str, value: &str) -> Result<N, Error> {
    value.parse().map_err(|_| Error::filter(name, value, "a number"))
}

fn word<T: Copy>(
    name: &str,
    value: &str,
    all: &[T],
    as_str: fn(T) -> &'static str,
) -> Result<T, Error> {
    let found = all.iter().find(|word| as_str(**word) == value);
    found.copied().ok_or_else(|| {
        let words: Vec<_> = all.iter().map(|word| as_str(*word)).collect();
        Error::filter(name, value, &format!("one of {}", words.join(", ")))
    })
}
