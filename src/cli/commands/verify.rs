//! `ckptfs verify`: reads every byte, or compares two checkpoints.

use std::io::Write;
use std::path::Path;

use crate::verify;
use crate::virtual_file::VirtualFileReader;

use crate::cli::args::VerifyArgs;
use crate::cli::error::{CommandError, EXIT_FAILED};
use crate::cli::open_reader::open_reader;
use crate::cli::progress::ProgressMeter;
use crate::cli::terminal_text::{format_bytes, format_count, one_line};

pub fn run(args: &VerifyArgs, out: &mut dyn Write) -> Result<(), CommandError> {
    let reader = open_reader(&args.source.path, &args.source.parse_args.to_options())?;
    match &args.against {
        None => read_all(&reader, &args.source.path, out),
        Some(other) => {
            // --root names a state dict of the first checkpoint. The default choice selects that of the other.
            let options = args.source.parse_args.to_options().without_root_key();
            compare(&reader, &open_reader(other, &options)?, out)
        }
    }
}

fn stopped_error() -> CommandError {
    let message = "stopped before everything was read";
    CommandError::new(EXIT_FAILED, message, "run it again to start over")
}

fn read_all(
    reader: &VirtualFileReader,
    path: &Path,
    out: &mut dyn Write,
) -> Result<(), CommandError> {
    let virtual_file = reader.virtual_file();
    let meter = ProgressMeter::new(virtual_file.size())?;
    let is_complete = verify::read_all(reader, &meter);
    meter.finish();
    if !is_complete? {
        return Err(stopped_error());
    }
    let name = one_line(&path.display().to_string());
    let tensors = format_count(virtual_file.tensors().len(), "tensor");
    let size = format_bytes(virtual_file.size());
    Ok(writeln!(out, "{name}: {tensors}, all {size} could be read")?)
}

fn compare(
    first: &VirtualFileReader,
    second: &VirtualFileReader,
    out: &mut dyn Write,
) -> Result<(), CommandError> {
    let virtual_file = first.virtual_file();
    let meter = ProgressMeter::new(virtual_file.size() - virtual_file.header_size())?;
    let differences = verify::compare(first, second, &meter);
    meter.finish();
    let differences = differences?.ok_or_else(stopped_error)?;
    if differences.is_empty() {
        let tensors = format_count(virtual_file.tensors().len(), "tensor");
        return Ok(writeln!(out, "equal: {tensors} of the same names, types, shapes and values")?);
    }
    for difference in &differences {
        writeln!(out, "{}", one_line(&difference.to_string()))?;
    }
    writeln!(out, "{}", format_count(differences.len(), "difference"))?;
    Err(CommandError::already_reported(EXIT_FAILED))
}
