//! Starts: the first on a machine, and one where another fak is or the ledger goes.

use std::os::unix::fs::PermissionsExt as _;
use std::process::Command;

use super::process::{Setup, until};
use fak_sim::{Binds, Sim, SimConfig};

#[tokio::test(flavor = "multi_thread")]
async fn the_default_ledger_is_made_with_its_folder_for_its_user_alone() {
    let sim = Sim::start(SimConfig::default(), Binds::default()).await.unwrap();
    let setup = Setup::new("the_default_ledger").home_only().sims([&sim]);
    let fak = setup.start().await;
    until("a first row", async || (!setup.rows().await.is_empty()).then_some(())).await;
    let folder = setup.folder().join(".local/state/fak");
    let mode = std::fs::metadata(&folder).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o700, "{}", folder.display());
    drop(fak);
}

#[test]
fn a_named_ledger_is_not_made_where_its_folder_is_missing_and_the_path_is_told() {
    let setup = Setup::new("a_named_ledger");
    let db = format!("sqlite:{}/no/fak.db", setup.folder().display());
    let mut command = Command::new(env!("CARGO_BIN_EXE_fak"));
    command.env_clear().args(["serve", "--sim", "1", "--listen", "127.0.0.1:0", "--db", &db]);
    let ended = command.output().unwrap();
    let told = String::from_utf8(ended.stderr).unwrap();
    assert_eq!(ended.status.code(), Some(1), "{told}");
    assert!(told.starts_with(&format!("fak: db={db:?}: ")), "{told}");
    assert!(!setup.folder().join("no").exists());
}

/// Fault 81: it took half a minute of a library's own messages.
#[test]
fn a_ledger_that_can_never_be_written_ends_the_start_at_once_and_says_why() {
    let setup = Setup::new("a_wrong_ledger");
    let garbage = setup.folder().join("garbage.db");
    std::fs::write(&garbage, "no database, but more than a header's worth of text".repeat(20))
        .unwrap();
    let db = format!("sqlite:{}", garbage.display());
    let mut command = Command::new(env!("CARGO_BIN_EXE_fak"));
    command.env_clear().args(["serve", "--sim", "1", "--listen", "127.0.0.1:0", "--db", &db]);
    let ended = command.output().unwrap();
    let told = String::from_utf8(ended.stderr).unwrap();
    assert_eq!(ended.status.code(), Some(1), "{told}");
    assert!(told.contains("name another file") && !told.contains("pool"), "{told}");
    assert_eq!(told.lines().filter(|line| !line.contains("WARN")).count(), 1, "{told}");
}

#[test]
fn a_server_that_does_not_answer_is_named_without_its_password() {
    // Held, and not listened at.
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let at = socket.local_addr().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_fak"));
    let db = format!("postgres://op:hunter2@{at}/fak");
    command.env_clear().args(["serve", "--sim", "1", "--listen", "127.0.0.1:0", "--db", &db]);
    let ended = command.output().unwrap();
    let told = String::from_utf8(ended.stderr).unwrap();
    assert_eq!(ended.status.code(), Some(1), "{told}");
    let named = format!("fak: db=\"postgres://op:(secret)@{at}/fak\": ");
    assert!(told.starts_with(&named) && !told.contains("hunter2"), "{told}");
    assert_eq!(told.matches("Connection refused").count(), 1, "{told}");
}

#[test]
fn a_reader_that_has_read_enough_is_no_error() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fak"));
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let ended = command.env_clear().args(["witness", "table"]).stdout(writer).output().unwrap();
    assert_eq!(String::from_utf8(ended.stderr).unwrap(), "");
}

#[test]
fn a_database_that_is_none_is_a_setting_that_cannot_be_used() {
    for (db, told) in [("fak.db", "\"fak.db\" is not sqlite:PATH"), ("sqlite:", "names no file")] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_fak"));
        command.env_clear().args(["serve", "--sim", "1", "--listen", "127.0.0.1:0", "--db", db]);
        let ended = command.output().unwrap();
        let said = String::from_utf8(ended.stderr).unwrap();
        assert_eq!(ended.status.code(), Some(64), "{said}");
        assert!(said.contains(told), "{said}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_fak_on_one_ledger_does_not_start_and_says_whose_it_is() {
    let sim = Sim::start(SimConfig::default(), Binds::default()).await.unwrap();
    let setup = Setup::new("a_second_fak").sims([&sim]);
    let first = setup.start().await;
    let ended = setup.command(&["serve"]).output().unwrap();
    let told = String::from_utf8(ended.stderr).unwrap();
    assert_eq!(ended.status.code(), Some(1), "{told}");
    let owner = format!("another fak writes this database: fak serve at {}", first.address);
    assert!(told.contains(&owner), "{told}");
    first.kill().await;
    drop(setup.start().await);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_action_is_refused_where_the_ledger_is_gone_and_ready_says_why() {
    let sim = Sim::start(SimConfig::default(), Binds::default()).await.unwrap();
    let setup = Setup::new("a_ledger_that_is_gone").sims([&sim]);
    let fak = setup.start().await;
    until("it serves", async || (fak.get("/ready").await.status == 200).then_some(())).await;
    let ledger = fak.get("/ready").await.json()["ledger"].clone();
    assert_eq!(ledger, serde_json::json!({ "writable": true, "reason": null }));
    for file in ["fak.db", "fak.db-wal", "fak.db-shm"] {
        std::fs::remove_file(setup.folder().join(file)).unwrap();
    }
    let path = "/fak/v1/workers/w0/sleep";
    let refused = fak.post(path, &serde_json::json!({ "level": 1 })).await;
    assert_eq!(refused.status, 503, "{}", refused.text);
    assert!(refused.text.contains("removed or replaced"), "{}", refused.text);
    let ready = fak.get("/ready").await;
    assert_eq!((ready.status, &ready.json()["ledger"]["writable"]), (200, &false.into()));
    assert!(ready.text.contains("removed or replaced"), "{}", ready.text);
}
