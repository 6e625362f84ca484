//! Would a test notice? A fixed list of small breakages of the source, each of one invariant: each
//! is made in a copy of the tree, and the tests that it names have to fail.
//!
//! Invariant: the tree itself is never changed. A mutant whose text is not found exactly once, or
//! that does not build, is a fault of the list and fails the run as a survivor does.

use std::collections::{BTreeSet, VecDeque};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;
use std::{fs, thread};

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::tidy::Violation;
use crate::tree::Tree;

/// Where the list is, from the root: one file an area.
const LIST: &str = "xtask/mutants";
/// Seconds for the tests of one mutant; one that makes them hang is killed, too.
const SECONDS_MAX: &str = "300";

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Area {
    mutant: Vec<Mutant>,
}

/// One breakage.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Mutant {
    /// What it does, in a few words.
    name: String,
    /// The invariant or the rule that it breaks.
    breaks: String,
    /// The file, from the root.
    file: String,
    /// What stands there exactly once.
    find: String,
    /// What is put in its place.
    replace: String,
    /// Arguments of `cargo test` that select what has to fail.
    test: String,
}

/// How the tests ended.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Passed,
    Failed,
    DoesNotBuild,
}

/// Makes every mutant whose name holds `only`, in `lanes` copies of the tree at a time.
pub(crate) fn run(root: &Path, only: &str, lanes: NonZeroUsize) -> Result<()> {
    let mutants: Vec<_> = load(root)?.into_iter().filter(|m| m.name.contains(only)).collect();
    let copies: Vec<Copy> =
        (0..lanes.get()).map(|lane| Copy::new(root, lane)).collect::<Result<_>>()?;
    let selections: BTreeSet<&str> = mutants.iter().map(|m| m.test.as_str()).collect();
    each(&copies, selections, |copy, tests| match copy.test(tests)?.0 {
        End::Passed => Ok(()),
        _ => bail!("without any mutant these fail already: cargo test {tests}"),
    })?;
    let faults = AtomicUsize::new(0);
    each(&copies, &mutants, |copy, mutant| {
        let start = Instant::now();
        let (end, output) = copy.with(mutant)?;
        let (word, output) = match end {
            End::Failed => ("killed", String::new()),
            End::Passed => ("SURVIVED", format!("\n{output}")),
            End::DoesNotBuild => ("DOES NOT BUILD", format!("\n{output}")),
        };
        faults.fetch_add(usize::from(end != End::Failed), Ordering::Relaxed);
        let seconds = start.elapsed().as_secs();
        println!("{word}: {} ({}; {seconds} s){output}", mutant.name, mutant.breaks);
        Ok(())
    })?;
    let faults = faults.into_inner();
    println!("mutants: {} killed, {faults} not", mutants.len() - faults);
    if faults > 0 { bail!("{faults} mutants were not killed") } else { Ok(()) }
}

/// Hands each item to a copy that is free; no further one after the first error.
fn each<T: Send>(
    copies: &[Copy],
    items: impl IntoIterator<Item = T>,
    work: impl Fn(&Copy, T) -> Result<()> + Sync,
) -> Result<()> {
    let queue = Mutex::new(items.into_iter().collect::<VecDeque<T>>());
    let next = || queue.lock().expect("no lane panics with the queue").pop_front();
    let lane = |copy| {
        while let Some(item) = next() {
            work(copy, item).inspect_err(|_| {
                queue.lock().expect("no lane panics with the queue").clear();
            })?;
        }
        Ok(())
    };
    thread::scope(|scope| {
        let lane = &lane;
        let lanes: Vec<_> = copies.iter().map(|copy| scope.spawn(move || lane(copy))).collect();
        lanes.into_iter().try_for_each(|lane| lane.join().expect("a lane does not panic"))
    })
}

/// Whether each mutant still finds its text; for tidy, since a list that has aged proves nothing.
pub(crate) fn check(root: &Path, tree: &Tree) -> Result<Vec<Violation>> {
    let stale = load(root)?.into_iter().filter_map(|mutant| {
        let source = tree.sources.iter().find(|source| source.path == mutant.file);
        let found = source.map_or(0, |source| source.text.matches(&mutant.find).count());
        let message = format!("mutant {:?} finds its text {found} times, not once", mutant.name);
        (found != 1).then(|| Violation::plain("stale-mutant", &mutant.file, 1, message))
    });
    Ok(stale.collect())
}

fn load(root: &Path) -> Result<Vec<Mutant>> {
    let mut files: Vec<PathBuf> = fs::read_dir(root.join(LIST))
        .with_context(|| format!("{LIST} cannot be read"))?
        .map(|entry| Ok(entry?.path()))
        .collect::<Result<_>>()?;
    files.sort();
    let mut mutants = Vec::new();
    for file in files.iter().filter(|file| file.extension().is_some_and(|e| e == "toml")) {
        let text = fs::read_to_string(file)?;
        let area: Area = toml::from_str(&text).with_context(|| file.display().to_string())?;
        mutants.extend(area.mutant);
    }
    Ok(mutants)
}

/// A copy of the tree, with a target folder that outlives the run.
struct Copy {
    tree: PathBuf,
    target: PathBuf,
}

impl Copy {
    /// The copy of a lane.
    fn new(root: &Path, lane: usize) -> Result<Self> {
        let place = root.join(format!("target/mutants/{lane}"));
        let copy = Self { tree: place.join("tree"), target: place.join("target") };
        let listed = Command::new("git")
            .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
            .current_dir(root)
            .output()
            .context("git cannot list the tree")?;
        let listed = String::from_utf8(listed.stdout).context("a path is no text")?;
        for path in listed.split('\0').filter(|path| !path.is_empty()) {
            let (from, to) = (root.join(path), copy.tree.join(path));
            // A file that is the same keeps its time, so that cargo builds it no second time.
            let Ok(bytes) = fs::read(&from) else { continue };
            if fs::read(&to).is_ok_and(|there| there == bytes) {
                continue;
            }
            fs::create_dir_all(to.parent().context("a path has a folder")?)?;
            fs::copy(&from, &to).with_context(|| format!("{path} cannot be copied"))?;
        }
        Ok(copy)
    }

    /// The tests of a mutant, with it in place.
    fn with(&self, mutant: &Mutant) -> Result<(End, String)> {
        let path = self.tree.join(&mutant.file);
        let text = fs::read_to_string(&path).with_context(|| mutant.file.clone())?;
        if text.matches(&mutant.find).count() != 1 {
            bail!("mutant {:?} does not find its text exactly once", mutant.name);
        }
        fs::write(&path, text.replace(&mutant.find, &mutant.replace))?;
        let ended = self.test(&mutant.test);
        fs::write(&path, text)?;
        ended
    }

    fn test(&self, arguments: &str) -> Result<(End, String)> {
        // Apart, so that the time is the tests' own.
        let (is_built, output) = self.cargo(Command::new("cargo"), "--no-run", arguments)?;
        if !is_built {
            return Ok((End::DoesNotBuild, output));
        }
        let mut timed = Command::new("timeout");
        timed.args([SECONDS_MAX, "cargo"]);
        let (has_passed, output) = self.cargo(timed, "--quiet", arguments)?;
        Ok((if has_passed { End::Passed } else { End::Failed }, output))
    }

    /// Runs `cargo test`; whether it succeeded, and the end of what it said.
    fn cargo(&self, mut cargo: Command, flag: &str, arguments: &str) -> Result<(bool, String)> {
        let output = cargo
            .args(["test", "--locked", flag])
            .args(arguments.split_whitespace())
            .env("CARGO_TARGET_DIR", &self.target)
            .current_dir(&self.tree)
            .output()
            .context("cargo test cannot start")?;
        let text = [output.stdout, output.stderr].concat();
        let text = String::from_utf8_lossy(&text).into_owned();
        let tail: Vec<_> = text.lines().rev().take(20).collect();
        Ok((output.status.success(), tail.into_iter().rev().collect::<Vec<_>>().join("\n")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mutant_names_what_it_breaks_and_what_has_to_fail() {
        let whole = "[[mutant]]\nname = \"n\"\nbreaks = \"b\"\nfile = \"f\"\nfind = \"x\"\n\
            replace = \"y\"\ntest = \"-p fak\"\n";
        let area: Area = toml::from_str(whole).expect("it is whole");
        assert_eq!(area.mutant.len(), 1);
        for line in whole.lines().skip(1) {
            let without = whole.replace(&format!("{line}\n"), "");
            assert!(toml::from_str::<Area>(&without).is_err(), "without {line}");
        }
    }
}
