//! `fak witness ls` and `tail`: the ledger.

use clap::{Args, ValueEnum};
use fak_wire::sse::Reader;
use http_body_util::BodyExt as _;

use super::Exit;
use super::client::{Client, Error, segment};
use super::table::{self, Table};
use crate::store::Row;

/// Bytes of one row on the wire: three columns of JSON, and words.
const ROW_BYTES_MAX: usize = 1 << 20;
/// Rows that are listed where nobody says from where.
const NEWEST: usize = 50;

/// Arguments of `fak witness ls`.
#[derive(Debug, Args)]
#[command(after_help = super::CLIENT_HELP)]
pub struct LsArgs {
    /// On this worker.
    #[arg(long, value_name = "ID")]
    worker: Option<String>,
    /// Through this session.
    #[arg(long, value_name = "ID")]
    session: Option<String>,
    /// Of this action.
    #[arg(long)]
    action: Option<String>,
    /// With this verdict on the gpu tier.
    #[arg(long, value_enum)]
    kv: Option<Kv>,
    /// After this row; the newest rows where not said.
    #[arg(long, value_name = "SEQ")]
    after: Option<u64>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// What happened to KV.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Kv {
    /// It is there.
    Preserved,
    /// It is gone.
    Forgotten,
    /// Whether it is there is not known.
    Unknown,
}

/// Arguments of `fak witness tail`.
#[derive(Debug, Args)]
#[command(after_help = super::CLIENT_HELP)]
pub struct TailArgs {
    /// Print JSON, a row a line.
    #[arg(long)]
    json: bool,
}

/// Lists rows, the oldest first.
///
/// # Errors
/// [`Error`], with the exit code that fits.
pub async fn list(args: &LsArgs, client: &Client) -> Result<Exit, Error> {
    let mut path = "/fak/v1/witness?".to_owned();
    let kv = args.kv.and_then(|kv| kv.to_possible_value()).map(|kv| kv.get_name().to_owned());
    let filters = [
        ("worker", args.worker.as_ref()),
        ("session", args.session.as_ref()),
        ("action", args.action.as_ref()),
        ("kv", kv.as_ref()),
    ];
    for (name, value) in filters {
        if let Some(value) = value {
            path.push_str(&format!("{name}={}&", segment(value)));
        }
    }
    match args.after {
        Some(after) => path.push_str(&format!("after={after}")),
        None => path.push_str(&format!("limit={NEWEST}&newest_first=true")),
    }
    let mut rows: Vec<Row> = client.get(&path).await?;
    rows.sort_by_key(|row| row.seq);
    let mut table = Table::new([
        "SEQ", "AT", "WORKER", "SESSION", "ACTION", "PHASE", "KV", "TIERS", "EVIDENCE", "REASON",
    ]);
    for row in &rows {
        table.add([
            row.seq.to_string(),
            row.at.clone(),
            row.worker.clone(),
            table::or_dash(row.session.as_ref()),
            table::action(row),
            row.phase.to_string(),
            table::kv(row),
            table::tiers(row),
            row.evidence.to_string(),
            row.reason.clone(),
        ]);
    }
    table.print(&rows, args.json)?;
    Ok(Exit::Done)
}

/// Shows rows as they get their outcome, until fak ends.
///
/// # Errors
/// [`Error`], with the exit code that fits.
pub async fn tail(args: &TailArgs, client: &Client) -> Result<Exit, Error> {
    let mut body = client.open("/fak/v1/events").await?;
    let mut reader = Reader::new(ROW_BYTES_MAX);
    while let Some(frame) = body.frame().await {
        let Ok(chunk) = frame.map_err(|_| Error::Ended)?.into_data() else { continue };
        for event in reader.push(&chunk) {
            let event = event.map_err(|_| Error::Ended)?;
            if event.name == b"witness" {
                let row: Row = serde_json::from_slice(&event.data).map_err(|_| Error::Ended)?;
                table::row(&row, args.json)?;
            }
        }
    }
    Err(Error::Ended)
}
