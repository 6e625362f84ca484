//! Reads the recordings of real engines.

use std::path::PathBuf;

pub(crate) fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fixtures")
}

/// The bytes of a recording, by its path under `fixtures/`.
pub(crate) fn bytes(path: &str) -> Vec<u8> {
    std::fs::read(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

pub(crate) fn text(path: &str) -> String {
    String::from_utf8(bytes(path)).unwrap()
}

/// The files of one kind in every version, as `version/file`, sorted.
pub(crate) fn list(kind: &str, extension: &str) -> Vec<String> {
    let mut files = Vec::new();
    for version in std::fs::read_dir(root()).unwrap() {
        let version = version.unwrap();
        let Ok(entries) = std::fs::read_dir(version.path().join(kind)) else { continue };
        for entry in entries {
            let name = entry.unwrap().file_name().into_string().unwrap();
            if name.ends_with(extension) {
                files.push(format!("{}/{kind}/{name}", version.file_name().to_str().unwrap()));
            }
        }
    }
    files.sort();
    assert!(!files.is_empty(), "no {kind} recordings under {}", root().display());
    files
}

/// Messages of a KV event recording; see `fixtures/vllm-0.32/kv-events/README.md`.
pub(crate) fn messages(path: &str) -> Vec<Vec<Vec<u8>>> {
    let data = bytes(path);
    let mut rest = data.as_slice();
    let mut frames = Vec::new();
    while let Some((len, tail)) = rest.split_first_chunk::<4>() {
        let (frame, tail) = tail.split_at(u32::from_be_bytes(*len) as usize);
        frames.push(frame.to_vec());
        rest = tail;
    }
    let old = ["-0.9", "-0.11", "-0.13", "-0.16", "-0.19", "-0.22", "-0.25"];
    let three = !path.contains("dealer") || old.iter().any(|version| path.contains(version));
    frames.chunks(if three { 3 } else { 4 }).map(<[_]>::to_vec).collect()
}
