//! What a check reports.

use serde::Serialize;

/// The result of one check.
#[derive(Debug, Serialize)]
pub struct Check {
    pub what: &'static str,
    pub verdict: Verdict,
    /// The finding, and what it means.
    pub says: String,
    /// What to do; empty if the verdict is `Ok`.
    pub remedy: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    Ok,
    /// Mounting works, with a limit that can be lifted.
    Note,
    /// Mounting cannot work.
    Problem,
}

impl Check {
    pub fn ok(what: &'static str, says: impl Into<String>) -> Check {
        Check { what, verdict: Verdict::Ok, says: says.into(), remedy: String::new() }
    }

    pub fn note(what: &'static str, says: impl Into<String>, remedy: impl Into<String>) -> Check {
        Check { what, verdict: Verdict::Note, says: says.into(), remedy: remedy.into() }
    }

    pub fn problem(
        what: &'static str,
        says: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Check {
        Check { what, verdict: Verdict::Problem, says: says.into(), remedy: remedy.into() }
    }
}
