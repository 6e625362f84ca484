//! Why does a worker take no requests, and what would help?
//!
//! Invariant: of a worker that names its models and serves nothing is said; of every other, all
//! that keeps it from serving beside its phase, each with its remedy.

use fak_kernel::Phase;

use super::{View, busy_with};

const WEIGHTS_UNPROVEN: &str =
    "it waits for its weights, of which nothing says that they are loaded";

impl View {
    /// What keeps requests out beside the phase; where nothing does, what would end the phase.
    #[must_use]
    pub fn why(&self) -> Option<String> {
        if self.state.is_serving() && self.state.silence.is_none() {
            return None;
        }
        let causes = [self.busy(), self.held(), self.half_awake(), self.unwell(), self.silent()];
        let causes: Vec<_> = causes.into_iter().flatten().collect();
        (!causes.is_empty()).then(|| causes.join("; ")).or_else(|| self.at_rest())
    }

    fn busy(&self) -> Option<String> {
        let busy = self.state.busy.as_ref()?;
        let told = busy.json(self.worker.door.in_flight());
        Some(format!("busy with {}", busy_with(&told, &self.worker.id)))
    }

    fn held(&self) -> Option<String> {
        let holder = self.state.held_by.as_ref()?;
        Some(format!("held by {holder} until {} brings it back", rollout_end(holder)))
    }

    fn half_awake(&self) -> Option<String> {
        let (state, id) = (&self.state, &self.worker.id);
        if state.phase() != Phase::Waking {
            return None;
        }
        Some(match (&state.held_by, state.standing.weights_proven) {
            (Some(holder), true) => {
                format!("a part of it is asleep ({} wakes the rest)", rollout_end(holder))
            }
            (None, true) => {
                format!("a part of it is asleep (fak worker wake {id} wakes the rest)")
            }
            (Some(holder), false) => {
                let holder = quoted(holder);
                let end = format!("fak rollout end --holder {holder} --weights loaded");
                format!("{WEIGHTS_UNPROVEN} (once they are: {end})")
            }
            (None, false) => {
                let wake = format!("fak worker wake {id} --weights loaded");
                format!("{WEIGHTS_UNPROVEN} (once they are: {wake})")
            }
        })
    }

    /// Nobody holds it, and nothing else is wrong with it.
    fn at_rest(&self) -> Option<String> {
        let id = &self.worker.id;
        match self.state.phase() {
            Phase::Paused => Some(format!("fak worker resume {id} lets it go on")),
            Phase::Sleeping => Some(format!("fak worker wake {id} wakes it")),
            Phase::Serving | Phase::Waking | Phase::Error => None,
        }
    }

    fn unwell(&self) -> Option<String> {
        let (state, id) = (&self.state, &self.worker.id);
        if !state.identity.may_serve() {
            state.identity.why()
        } else if state.standing.suspect {
            Some(format!(
                "it answers otherwise than before its sleep (fak worker wake {id} takes it all the \
                 same)"
            ))
        } else if !state.is_progressing {
            Some("it is stuck: requests run, and no token comes".to_owned())
        } else {
            state.is_unclear.then(|| "its signals contradict each other".to_owned())
        }
    }

    /// An engine that guards a route answers 401 there; vLLM guards those under `/v1` alone
    /// (0.32.0, source).
    fn silent(&self) -> Option<String> {
        let silence = self.state.silence.as_deref()?;
        let is_refused = ["401", "403"].iter().any(|status| silence.ends_with(status));
        let remedy = if is_refused {
            " (is FAK_VLLM_API_KEY its key?)"
        } else if silence.contains("certificate") {
            " (fak trusts the system's roots, or those in the file that SSL_CERT_FILE names)"
        } else {
            ""
        };
        Some(match self.state.is_reachable {
            true => format!("it names no model: {silence}{remedy}"),
            false => format!("it gives no answer: {silence}{remedy}"),
        })
    }
}

/// What ends a rollout.
#[must_use]
pub fn rollout_end(holder: &str) -> String {
    format!("fak rollout end --holder {} --weights same (or changed, or loaded)", quoted(holder))
}

/// As a shell takes it for one word, since commands that are told are pasted.
fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.,:/@+".contains(c);
    match !word.is_empty() && word.chars().all(is_plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_holders_name_is_one_word_of_the_command_that_is_told() {
        for (holder, told) in [
            ("trainer-7", "--holder trainer-7 "),
            ("x; touch pwned", "--holder 'x; touch pwned' "),
            ("a'$(b)", r"--holder 'a'\''$(b)' "),
        ] {
            assert!(rollout_end(holder).contains(told), "{}", rollout_end(holder));
        }
    }
}
