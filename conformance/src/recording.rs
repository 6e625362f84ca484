//! Transcripts of the real engine, kept so that the simulator can be checked without one.

use std::path::{Path, PathBuf};

use anyhow::Context;

use crate::transcript::Transcript;

/// Reads the recording of a scenario.
pub fn read(folder: &Path, scenario: &str) -> anyhow::Result<Transcript> {
    let path = path(folder, scenario);
    let text = std::fs::read_to_string(&path)
        .with_context(|| format!("no recording at {}; make it with --record", path.display()))?;
    Ok(Transcript::from_recording(&text))
}

/// Writes the recording of a scenario.
pub fn write(folder: &Path, scenario: &str, transcript: &Transcript) -> anyhow::Result<()> {
    std::fs::create_dir_all(folder)?;
    std::fs::write(path(folder, scenario), transcript.to_recording())?;
    Ok(())
}

fn path(folder: &Path, scenario: &str) -> PathBuf {
    folder.join(format!("{scenario}.txt"))
}
