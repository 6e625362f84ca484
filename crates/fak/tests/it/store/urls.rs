//! Which URLs open a store, and what is said of the others.

use fak::store::{Error, Filter, Store};

use super::{file, intent, outcome};

/// The error and all its causes, in words and in `Debug`.
fn told(error: &Error) -> String {
    let mut told = format!("{error} | {error:?}");
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        told.push_str(&format!(" | {error} | {error:?}"));
        cause = error.source();
    }
    told
}

#[tokio::test]
async fn what_is_no_database_url_is_told_what_is() {
    for url in [
        "",
        "fak.db",
        "/hunter2/fak.db",
        "SQLITE:fak.db",
        "mysql://root:hunter2@localhost/fak",
        "postgres:hunter2",
        "sqlite:",
        "sqlite://",
        "sqlite:hunter2?mode=ro",
        "sqlite:hunter2\n",
        "sqlite:hunter2\0",
        "postgres://u:hunter2@localhost:port/db",
        "postgres://u:hunt/er2@localhost/db",
        "postgres://u:hunter2@localhost/db?sslmode=hunter2",
        "postgres://u@localhost/db?passwd=hunter2",
        "postgres://u:p?a=hunter2@localhost/db",
        "postgres://u@localhost/db?port=hunter2",
        "postgres://u@localhost/db?user=u&statement-cache-capacity=hunter2",
    ] {
        let error = Store::open(url).await.expect_err(url);
        assert!(matches!(error, Error::BadUrl(_)), "{url:?}: {error:?}");
        let told = told(&error);
        assert!(told.contains("expected sqlite:PATH, sqlite::memory: or postgres://"), "{told}");
        assert!(!told.contains("hunter2"), "{told}");
    }
}

#[tokio::test]
async fn a_server_that_cannot_be_reached_is_told_at_once_and_without_the_password() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("its address").port();
    drop(listener);
    let url = format!("postgres://u:hunter2@127.0.0.1:{port}/db?password=hunter2");
    let error = Store::open(&url).await.expect_err("nobody is there");
    assert!(matches!(error, Error::Unavailable(sqlx::Error::Io(_))), "{error:?}");
    assert!(!told(&error).contains("hunter2"), "{}", told(&error));
}

#[tokio::test]
async fn a_file_that_cannot_be_made_is_told() {
    let path = file("a_file_that_cannot_be_made_is_told").join("no").join("folder.db");
    let error = Store::open(&format!("sqlite:{}", path.display())).await.expect_err("no folder");
    assert!(matches!(error, Error::Unavailable(_)), "{error:?}");
}

#[tokio::test]
async fn a_path_is_meant_as_it_is_written() {
    let folder = file("a_path_is_meant_as_it_is_written").with_file_name("");
    for (prefix, name) in
        [("sqlite:", "a b.db"), ("sqlite://", "100%.db"), ("sqlite:", "%41#é'\".db")]
    {
        let path = folder.join(name);
        let store = Store::open(&format!("{prefix}{}", path.display())).await.expect("open");
        store.note(intent("a"), outcome()).await.expect("written");
        assert!(path.is_file(), "{}", path.display());
        assert_eq!(store.rows(&Filter::default()).await.expect("read").len(), 1);
        store.close().await;
    }
    let left = std::fs::read_dir(&folder).expect("files").count();
    assert_eq!(left, 3, "closed databases leave no other files");
    std::fs::remove_dir_all(folder).expect("it goes");
}

#[tokio::test]
async fn a_store_does_not_show_its_url() {
    let store = Store::open("sqlite::memory:").await.expect("open");
    assert_eq!(format!("{store:?}"), "Store { kind: Sqlite, .. }");
}
