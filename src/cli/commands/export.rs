//! `ckptfs export`: writes a checkpoint as a real file.

use std::io::Write;

use crate::export;

use crate::cli::args::ExportArgs;
use crate::cli::progress::ProgressMeter;
use crate::cli::terminal_text::{format_bytes, format_count, one_line};
use crate::cli::{CommandError, EXIT_FAILED, open_args};

pub fn run(args: &ExportArgs, out: &mut dyn Write) -> Result<(), CommandError> {
    let reader = open_args::open_reader(&args.source.path, &args.source.parse_args.options())?;
    let meter = ProgressMeter::new(reader.virtual_file().size())?;
    let written = export::export(&reader, &args.out, args.force, &meter);
    meter.finish();
    written?;
    let (n, size) = (reader.virtual_file().tensors().len(), reader.virtual_file().size());
    let name = one_line(&args.out.display().to_string());
    writeln!(out, "{name}: {}, {}", format_count(n, "tensor"), format_bytes(size))?;
    Ok(())
}

impl From<export::ExportError> for CommandError {
    fn from(error: export::ExportError) -> Self {
        match error {
            export::ExportError::VirtualFile(error) => CommandError::from(error),
            error => CommandError::new(EXIT_FAILED, &error, error.remedy()),
        }
    }
}
