//! Whether the ledger's files are still those that are open.
//!
//! Invariant: what is called durable is in the files that the path names, so that the next fak
//! finds it there.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use super::Error;

/// The database and its write-ahead log, as they were when they were opened.
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
    /// The files that `path` names now. To be called once something was written: then both exist.
    pub(super) fn at(path: &Path) -> Self {
        let mut log = followed(path).into_os_string();
        log.push("-wal");
        Self([path.to_owned(), log.into()].map(|path| (path.clone(), identity(&path))).into())
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
    let found = fs::metadata(path).ok()?;
    Some(Identity { device: found.dev(), inode: found.ino() })
}
