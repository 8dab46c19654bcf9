//! `ckptfs verify`: reads every byte, or compares two checkpoints.

use std::io::Write;
use std::path::Path;

use serde::Serialize;

use crate::recipe::Transform;
use crate::verify::{self, Difference};
use crate::virtual_file::VirtualFileReader;

use crate::cli::args::VerifyArgs;
use crate::cli::each_path::{for_each_path, write_json};
use crate::cli::error::{CommandError, EXIT_FAILED, ErrorFormat};
use crate::cli::open_reader::{CheckpointReader, open_reader};
use crate::cli::output::print_note;
use crate::cli::progress::{ProgressMeter, StopSignal};
use crate::cli::stuck_path_check::check_path;
use crate::cli::terminal_text::{format_bytes, format_count, one_line};

/// The result for one path, as the JSON has it.
#[derive(Debug, Serialize)]
struct VerifyReport {
    path: String,
    against: Option<String>,
    #[serde(flatten)]
    totals: Option<VerifiedTotals>,
    /// Why the path could not be verified.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<CommandError>,
}

#[derive(Debug, Serialize)]
struct VerifiedTotals {
    tensors: usize,
    bytes: u64,
    notes: Vec<String>,
    /// `None` if the checkpoint was compared with no other.
    differences: Option<Vec<DifferenceReport>>,
}

#[derive(Debug, Serialize)]
struct DifferenceReport {
    tensor: String,
    reason: String,
}

impl VerifyReport {
    fn new(path: &Path, args: &VerifyArgs, verified: Result<VerifiedTotals, CommandError>) -> Self {
        let (totals, error) = match verified {
            Ok(totals) => (Some(totals), None),
            Err(error) => (None, Some(error)),
        };
        let against = args.against.as_ref().map(|other| other.display().to_string());
        VerifyReport { path: path.display().to_string(), against, totals, error }
    }
}

pub fn run(args: &VerifyArgs, out: &mut dyn Write) -> Result<(), CommandError> {
    let stop = StopSignal::register()?;
    let mut reports = Vec::new();
    let format = ErrorFormat::new(args.json);
    let done = for_each_path(&args.paths, format, out, |path, out| {
        if stop.is_set() {
            // Reported for the path at which it stopped.
            return Err(CommandError::already_reported(EXIT_FAILED));
        }
        let verified = check_path(path).and_then(|()| verify_path(path, args, &stop));
        let result = match &verified {
            Ok(totals) => verdict(totals),
            Err(error) => Err(error.clone()),
        };
        match verified {
            Ok(totals) if args.json => reports.push(VerifyReport::new(path, args, Ok(totals))),
            Ok(totals) => write_text(path, &totals, args, out)?,
            // The error is all that there is to report of a single path.
            Err(error) if args.json && args.paths.len() > 1 => {
                reports.push(VerifyReport::new(path, args, Err(error)));
            }
            Err(_) => {}
        }
        result
    });
    if args.json {
        write_json(&args.paths, &reports, out)?;
    }
    done
}

fn verify_path(
    path: &Path,
    args: &VerifyArgs,
    stop: &StopSignal,
) -> Result<VerifiedTotals, CommandError> {
    let options = args.parse_args.to_options();
    let CheckpointReader { reader, mut notes, .. } =
        open_reader(path, &options, args.views.as_deref(), &Transform::default())?;
    let differences = match &args.against {
        None => {
            read_all(&reader, path, stop)?;
            None
        }
        Some(other) => {
            // --root names a state dict of the first checkpoint. The default choice selects that of the other.
            let other =
                open_reader(other, &options.without_root_key(), None, &Transform::default())?;
            notes.extend(other.notes);
            Some(compare(&reader, &other.reader, path, stop)?)
        }
    };
    if !args.json {
        notes.iter().for_each(|text| print_note(text));
    }
    let report = |difference: &Difference| DifferenceReport {
        tensor: difference.tensor().to_owned(),
        reason: difference.to_string(),
    };
    let virtual_file = reader.virtual_file();
    Ok(VerifiedTotals {
        tensors: virtual_file.tensors().len(),
        bytes: virtual_file.size(),
        notes,
        differences: differences.map(|found| found.iter().map(report).collect()),
    })
}

fn stopped_error(path: &Path) -> CommandError {
    let message = format!("{}: stopped before everything was read", path.display());
    CommandError::new(EXIT_FAILED, message, "run it again to start over")
}

fn read_all(
    reader: &VirtualFileReader,
    path: &Path,
    stop: &StopSignal,
) -> Result<(), CommandError> {
    let meter = ProgressMeter::new(reader.virtual_file().size(), stop);
    let is_complete = verify::read_all(reader, &meter);
    meter.finish();
    if is_complete? { Ok(()) } else { Err(stopped_error(path)) }
}

fn compare(
    first: &VirtualFileReader,
    second: &VirtualFileReader,
    path: &Path,
    stop: &StopSignal,
) -> Result<Vec<Difference>, CommandError> {
    let virtual_file = first.virtual_file();
    let meter = ProgressMeter::new(virtual_file.size() - virtual_file.header_size(), stop);
    let differences = verify::compare(first, second, &meter);
    meter.finish();
    differences?.ok_or_else(|| stopped_error(path))
}

/// The failure of a comparison that found differences. The output has them.
fn verdict(totals: &VerifiedTotals) -> Result<(), CommandError> {
    match &totals.differences {
        Some(differences) if !differences.is_empty() => {
            Err(CommandError::already_reported(EXIT_FAILED))
        }
        _ => Ok(()),
    }
}

fn write_text(
    path: &Path,
    totals: &VerifiedTotals,
    args: &VerifyArgs,
    out: &mut dyn Write,
) -> Result<(), CommandError> {
    let path = one_line(&path.display().to_string()).into_owned();
    let tensors = format_count(totals.tensors, "tensor");
    let Some(differences) = &totals.differences else {
        let size = format_bytes(totals.bytes);
        return Ok(writeln!(out, "{path}: {tensors}, all {size} could be read")?);
    };
    if args.paths.len() > 1 {
        writeln!(out, "{path}:")?;
    }
    for difference in differences {
        writeln!(out, "{}", one_line(&difference.reason))?;
    }
    match differences.len() {
        0 => writeln!(out, "equal: {tensors} of the same names, types, shapes and values")?,
        n => writeln!(out, "{}", format_count(n, "difference"))?,
    }
    Ok(())
}
