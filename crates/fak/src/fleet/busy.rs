//! What is being done to a worker: for whom, since when, and what it waits for.
//!
//! Invariant: it is shown from the moment an action is taken on until the door is as its row says.

use std::sync::Arc;

use fak_kernel::Action;
use serde_json::{Value, json};
use tokio::time::Instant;

/// An action that is under way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Busy {
    /// What.
    pub action: Action,
    /// The level of a sleep.
    pub level: Option<u8>,
    /// When it began, as rows write a time.
    pub since: Arc<str>,
    /// Who asked, where that is somebody who may hold workers.
    pub holder: Option<Arc<str>>,
    /// The session through which it was asked.
    pub session: Option<Arc<str>>,
    /// How far it is.
    pub stage: Stage,
}

/// How far an action is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Nothing is done yet: requests still enter.
    Begins,
    /// The door is shut, and requests that are inside may end until then. It can be cancelled.
    Drains {
        /// When that time is over.
        until: Instant,
    },
    /// The engine is called, or looked at.
    Runs,
}

impl Stage {
    /// The word.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Begins => "begins",
            Self::Drains { .. } => "drains",
            Self::Runs => "runs",
        }
    }
}

impl Busy {
    /// Whether it keeps requests out.
    #[must_use]
    pub fn shuts_door(&self) -> bool {
        self.stage != Stage::Begins
    }

    /// Whether it only waits, and so can be cancelled.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        matches!(self.stage, Stage::Drains { .. })
    }

    /// For rows and answers; `inside` requests are in the worker.
    #[must_use]
    pub fn json(&self, inside: usize) -> Value {
        let (waits_for, left) = match self.stage {
            Stage::Drains { until } => {
                let left = until.saturating_duration_since(Instant::now());
                (Some(inside), Some(left.as_millis() as u64))
            }
            Stage::Begins | Stage::Runs => (None, None),
        };
        json!({
            "action": self.action.as_str(),
            "level": self.level,
            "since": &*self.since,
            "holder": self.holder.as_deref(),
            "session": self.session.as_deref(),
            "stage": self.stage.as_str(),
            "waits_for": waits_for,
            "waits_ms_max": left,
        })
    }
}

/// What [`Busy::json`] tells of an action, in words. It names no session: these are of tenants.
#[must_use]
pub fn busy_with(told: &Value, worker: &str) -> String {
    let text = |name: &str| told[name].as_str();
    let mut said = text("action").unwrap_or("an action").to_owned();
    if let Some(level) = told["level"].as_u64() {
        said.push_str(&format!(" {level}"));
    }
    if let Some(since) = text("since") {
        said.push_str(&format!(" since {since}"));
    }
    if let Some(holder) = text("holder") {
        said.push_str(&format!(" for {holder}"));
    }
    if let (Some(inside), Some(left)) = (told["waits_for"].as_u64(), told["waits_ms_max"].as_u64())
    {
        let requests = if inside == 1 { "request" } else { "requests" };
        said.push_str(&format!(
            ", which waits for {inside} {requests} to end, {} s more at most (fak worker cancel \
             {worker} ends that)",
            left.div_ceil(1000)
        ));
    }
    said
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn busy(stage: Stage) -> Busy {
        Busy {
            action: Action::Sleep,
            level: Some(1),
            since: "2026-12-01T10:00:00.000Z".into(),
            holder: Some("trainer-7".into()),
            session: Some("s1".into()),
            stage,
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_action_says_what_it_is_for_whom_and_what_it_waits_for() {
        let until = Instant::now() + Duration::from_secs(90);
        let told = busy(Stage::Drains { until }).json(3);
        assert_eq!(
            busy_with(&told, "w0"),
            "sleep 1 since 2026-12-01T10:00:00.000Z for trainer-7, which waits for 3 requests to \
             end, 90 s more at most (fak worker cancel w0 ends that)"
        );
        assert_eq!(told["session"], "s1");
        let told = busy(Stage::Runs).json(3);
        let said = busy_with(&told, "w0");
        assert_eq!(said, "sleep 1 since 2026-12-01T10:00:00.000Z for trainer-7");
        assert!(busy(Stage::Runs).shuts_door() && !busy(Stage::Begins).shuts_door());
    }
}
