//! `ckptfs doctor`: what this machine can and cannot do for mounts.
//!
//! Out: a line for each thing looked at: fine, worth knowing, or what keeps a mount from working, with
//! what it means and what to do.

mod machine;
mod privileges;
mod source;

use std::io::{self, Write};

use serde::Serialize;

use crate::cli::args::DoctorArgs;
use crate::cli::terminal_text::one_line;
use crate::cli::{CommandError, EXIT_FAILED};

/// One thing that was looked at.
#[derive(Debug, Serialize)]
struct DoctorCheck {
    what: &'static str,
    verdict: CheckVerdict,
    /// What is so, and what it means.
    says: String,
    /// What to do; nothing where all is well.
    remedy: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum CheckVerdict {
    Ok,
    /// Works, with a limit that can be lifted.
    Note,
    /// Mounting cannot work.
    Problem,
}

impl DoctorCheck {
    fn ok(what: &'static str, says: impl Into<String>) -> DoctorCheck {
        DoctorCheck { what, verdict: CheckVerdict::Ok, says: says.into(), remedy: String::new() }
    }

    fn note(what: &'static str, says: impl Into<String>, remedy: impl Into<String>) -> DoctorCheck {
        DoctorCheck { what, verdict: CheckVerdict::Note, says: says.into(), remedy: remedy.into() }
    }

    fn problem(
        what: &'static str,
        says: impl Into<String>,
        remedy: impl Into<String>,
    ) -> DoctorCheck {
        DoctorCheck {
            what,
            verdict: CheckVerdict::Problem,
            says: says.into(),
            remedy: remedy.into(),
        }
    }
}

/// Looks at the machine, and at the path if that can be reached.
pub fn run(
    args: &DoctorArgs,
    reachable: Result<(), CommandError>,
    out: &mut dyn Write,
) -> Result<(), CommandError> {
    let mut checks = machine::check_machine();
    match (&args.path, reachable) {
        (Some(path), Ok(())) => checks.extend(source::check_source(path)),
        (_, Err(failure)) => checks.push(source::unreachable_check(failure)),
        (None, Ok(())) => {}
    }
    if args.json {
        serde_json::to_writer_pretty(&mut *out, &checks).map_err(io::Error::from)?;
        writeln!(out)?;
    } else {
        for DoctorCheck { what, verdict, says, remedy } in &checks {
            let verdict = match verdict {
                CheckVerdict::Ok => "ok",
                CheckVerdict::Note => "note",
                CheckVerdict::Problem => "PROBLEM",
            };
            writeln!(out, "{verdict:<8} {what:<16} {}", one_line(says))?;
            if !remedy.is_empty() {
                writeln!(out, "{:<25} what to do: {}", "", one_line(remedy))?;
            }
        }
    }
    let works = checks.iter().all(|check| check.verdict != CheckVerdict::Problem);
    if works { Ok(()) } else { Err(CommandError::already_reported(EXIT_FAILED)) }
}
