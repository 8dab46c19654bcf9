//! Checks of a URL as a source.

use std::path::Path;

use crate::source::{AccessStep, StepOutcome, check_access};

use super::check::Check;

/// The checks of a URL; `None` if the path is none.
pub(super) fn check_url(path: &Path) -> Option<Vec<Check>> {
    let check = |AccessStep { what, says, outcome }: AccessStep| match outcome {
        StepOutcome::Works => Check::ok(what, says),
        StepOutcome::Limited(remedy) => Check::note(what, says, remedy),
        StepOutcome::Fails(remedy) => Check::problem(what, says, remedy),
    };
    Some(check_access(path)?.into_iter().map(check).collect())
}
