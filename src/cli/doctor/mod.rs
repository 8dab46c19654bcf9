//! `ckptfs doctor`: what this machine can and cannot do for mounts.
//!
//! Out: a line for each thing looked at: fine, worth knowing, or what keeps a mount from working, with
//! what it means and what to do.

mod machine;
mod privileges;
mod source;

use std::io::{self, Write};

use serde::Serialize;

use super::args::Doctor;
use super::terminal_text::one_line;
use super::{FAILED, Failure};

/// One thing that was looked at.
#[derive(Debug, Serialize)]
struct Check {
    what: &'static str,
    verdict: Verdict,
    /// What is so, and what it means.
    says: String,
    /// What to do; nothing where all is well.
    remedy: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Verdict {
    Ok,
    /// Works, with a limit that can be lifted.
    Note,
    /// Mounting cannot work.
    Problem,
}

impl Check {
    fn ok(what: &'static str, says: impl Into<String>) -> Check {
        Check { what, verdict: Verdict::Ok, says: says.into(), remedy: String::new() }
    }

    fn note(what: &'static str, says: impl Into<String>, remedy: impl Into<String>) -> Check {
        Check { what, verdict: Verdict::Note, says: says.into(), remedy: remedy.into() }
    }

    fn problem(what: &'static str, says: impl Into<String>, remedy: impl Into<String>) -> Check {
        Check { what, verdict: Verdict::Problem, says: says.into(), remedy: remedy.into() }
    }
}

/// Looks at the machine, and at the path if that can be reached.
pub fn run(
    args: &Doctor,
    reachable: Result<(), Failure>,
    out: &mut dyn Write,
) -> Result<(), Failure> {
    let mut checks = machine::look();
    match (&args.path, reachable) {
        (Some(path), Ok(())) => checks.extend(source::look(path)),
        (_, Err(failure)) => checks.push(source::unreachable(failure)),
        (None, Ok(())) => {}
    }
    if args.json {
        serde_json::to_writer_pretty(&mut *out, &checks).map_err(io::Error::from)?;
        writeln!(out)?;
    } else {
        for Check { what, verdict, says, remedy } in &checks {
            let verdict = match verdict {
                Verdict::Ok => "ok",
                Verdict::Note => "note",
                Verdict::Problem => "PROBLEM",
            };
            writeln!(out, "{verdict:<8} {what:<16} {}", one_line(says))?;
            if !remedy.is_empty() {
                writeln!(out, "{:<25} what to do: {}", "", one_line(remedy))?;
            }
        }
    }
    let works = checks.iter().all(|check| check.verdict != Verdict::Problem);
    if works { Ok(()) } else { Err(Failure::told(FAILED)) }
}
