//! `ckptfs doctor`: checks what mounts this machine supports.
//!
//! Prints a line for each check: fine, worth knowing, or a problem that keeps a mount from working, with its remedy.

mod check;
mod machine;
mod mounts;
mod privileges;
mod source;
#[cfg(feature = "remote")]
mod store;
mod system;

use std::io::{self, Write};

use crate::cli::args::DoctorArgs;
use crate::cli::error::{CommandError, EXIT_FAILED};
use crate::cli::python_environment::{self, PythonEnvironment};
use crate::cli::terminal_text::one_line;
use check::{Check, Verdict};

/// Checks the machine, and the path if that can be reached.
pub fn run(
    args: &DoctorArgs,
    reachable: Result<(), CommandError>,
    out: &mut dyn Write,
) -> Result<(), CommandError> {
    let mut checks = check_system();
    match (&args.path, reachable) {
        (Some(path), Ok(())) => checks.extend(source::check_source(path)),
        (_, Err(failure)) => checks.push(source::unreachable_check(failure)),
        (None, Ok(())) => {}
    }
    if args.json {
        serde_json::to_writer_pretty(&mut *out, &checks).map_err(io::Error::from)?;
        writeln!(out)?;
    } else {
        print_checks(&checks, out)?;
    }
    let works = checks.iter().all(|check| check.verdict != Verdict::Problem);
    if works { Ok(()) } else { Err(CommandError::already_reported(EXIT_FAILED)) }
}

/// Prints a line for each check. A remedy that several checks share is printed once.
fn print_checks(checks: &[Check], out: &mut dyn Write) -> io::Result<()> {
    for (n, Check { what, verdict, says, remedy }) in checks.iter().enumerate() {
        let verdict = match verdict {
            Verdict::Ok => "ok",
            Verdict::Note => "note",
            Verdict::Problem => "PROBLEM",
        };
        writeln!(out, "{verdict:<8} {what:<16} {}", one_line(says))?;
        if remedy.is_empty() {
            continue;
        }
        match checks.iter().take(n).find(|earlier| earlier.remedy == *remedy) {
            Some(earlier) => writeln!(out, "{:<25} what to do: as for {}", "", earlier.what)?,
            None => writeln!(out, "{:<25} what to do: {}", "", one_line(remedy))?,
        }
    }
    Ok(())
}

fn check_environment(environment: &PythonEnvironment) -> Check {
    let PythonEnvironment { state, remedy } = environment;
    match remedy.is_empty() {
        true => Check::ok("python", state),
        false => Check::note("python", state, remedy),
    }
}

/// All checks that need no path, in the order in which a mount needs them.
fn check_system() -> Vec<Check> {
    let mut checks = privileges::check_privileges();
    checks.extend(machine::check_machine());
    checks.push(mounts::check_mounts());
    checks.extend(python_environment::get().map(check_environment));
    checks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_remedy_is_printed_once() {
        let long = "have root do this";
        let checks = [
            Check::problem("one", "it fails", long),
            Check::note("two", "so does this", long),
            Check::note("three", "another", "do that"),
        ];
        let mut out = Vec::new();
        print_checks(&checks, &mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert_eq!(text.matches(long).count(), 1, "{text}");
        assert!(text.contains("what to do: as for one\n") && text.contains("do that"), "{text}");
    }

    #[test]
    fn every_remark_says_what_to_do() {
        let checks = check_system();
        assert!(checks.len() >= 14);
        for check in checks {
            assert_eq!(check.verdict == Verdict::Ok, check.remedy.is_empty(), "{check:?}");
        }
    }
}
