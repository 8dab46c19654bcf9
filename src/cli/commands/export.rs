//! `ckptfs export`: writes a checkpoint as a real file.

use std::io::Write;

use crate::export;

use crate::cli::args::ExportArgs;
use crate::cli::error::CommandError;
use crate::cli::open_reader::open_reader;
use crate::cli::progress::ProgressMeter;
use crate::cli::terminal_text::{format_bytes, format_count, one_line};

pub fn run(args: &ExportArgs, out: &mut dyn Write) -> Result<(), CommandError> {
    let reader = open_reader(&args.source.path, &args.source.parse_args.to_options())?;
    let meter = ProgressMeter::new(reader.virtual_file().size())?;
    let written = export::export(&reader, &args.out, args.force, &meter);
    meter.finish();
    written?;
    let (n, size) = (reader.virtual_file().tensors().len(), reader.virtual_file().size());
    let name = one_line(&args.out.display().to_string());
    writeln!(out, "{name}: {}, {}", format_count(n, "tensor"), format_bytes(size))?;
    Ok(())
}
