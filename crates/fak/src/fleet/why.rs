//! Why does a worker take no requests, and what would help?
//!
//! Invariant: of a worker that serves nothing is said; of every other, all that keeps it from
//! serving beside its phase, each with its remedy.

use fak_kernel::Phase;

use super::{View, busy_with};

impl View {
    /// What keeps requests out beside the phase; nothing where it serves, or where the phase says
    /// all.
    #[must_use]
    pub fn why(&self) -> Option<String> {
        if self.state.is_serving() {
            return None;
        }
        let causes = [self.busy(), self.held(), self.half_awake(), self.unwell()];
        let causes: Vec<_> = causes.into_iter().flatten().collect();
        (!causes.is_empty()).then(|| causes.join("; "))
    }

    fn busy(&self) -> Option<String> {
        let busy = self.state.busy.as_ref()?;
        let told = busy.json(self.worker.door.in_flight());
        Some(format!("busy with {}", busy_with(&told, &self.worker.id)))
    }

    fn held(&self) -> Option<String> {
        let holder = self.state.held_by.as_ref()?;
        Some(format!(
            "held by {holder} until fak rollout end --holder {holder} --weights same (or changed, \
             or loaded) brings it back"
        ))
    }

    fn half_awake(&self) -> Option<String> {
        let (state, id) = (&self.state, &self.worker.id);
        if state.phase() != Phase::Waking {
            return None;
        }
        let (verb, whose) = match &state.held_by {
            Some(holder) => ("rollout end", format!("--holder {holder}")),
            None => ("worker wake", id.to_string()),
        };
        Some(if state.standing.weights_proven {
            format!("a part of it is asleep (fak {verb} {whose} wakes the rest)")
        } else {
            format!(
                "it waits for its weights, of which nothing says that they are loaded (once they \
                 are: fak {verb} {whose} --weights loaded)"
            )
        })
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
}
