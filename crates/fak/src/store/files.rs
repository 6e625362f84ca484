//! Whether the ledger's files are still those that are open.
//!
//! Invariant: what is called durable is in the files that the path names, so that the next fak
//! finds it there; and the lock of its owner is where the next fak tries to take it.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use super::Error;

/// Files of the ledger, as they were when they were opened.
#[derive(Debug)]
pub(super) struct Files(Vec<(PathBuf, Option<Identity>)>);

/// Links that are followed; as many as Linux does.
const LINKS_MAX: usize = 40;

/// One file, whatever its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Identity {
    device: u64,
    inode: u64,
}

impl Files {
    /// The database that `path` names now, and its write-ahead log. To be called once something
    /// was written: then both exist.
    pub(super) fn at(path: &Path) -> Self {
        let mut log = followed(path).into_os_string();
        log.push("-wal");
        Self([path.to_owned(), log.into()].map(|path| (path.clone(), identity(&path))).into())
    }

    /// The file that is open at `path`.
    pub(super) fn opened(path: PathBuf, file: &File) -> Self {
        Self(vec![(path, file.metadata().ok().map(|found| Identity::of(&found)))])
    }

    /// # Errors
    /// [`Error::Gone`]: one was removed or replaced, or never seen.
    pub(super) fn check(&self) -> Result<(), Error> {
        for (path, opened) in &self.0 {
            if opened.is_none() || identity(path) != *opened {
                return Err(Error::Gone { path: path.clone() });
            }
        }
        Ok(())
    }
}

/// The file behind a path that is a link: SQLite keeps what belongs to it beside that.
pub(super) fn followed(path: &Path) -> PathBuf {
    let mut at = path.to_owned();
    for _ in 0..LINKS_MAX {
        let Ok(to) = fs::read_link(&at) else { break };
        at = at.parent().unwrap_or(Path::new("")).join(to);
    }
    at
}

fn identity(path: &Path) -> Option<Identity> {
    fs::metadata(path).ok().map(|found| Identity::of(&found))
}

impl Identity {
    fn of(found: &fs::Metadata) -> Self {
        Self { device: found.dev(), inode: found.ino() }
    }
}
