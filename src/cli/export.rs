//! `ckptfs export`: writes a checkpoint as a real file.

use std::io::Write;

use crate::export;

use super::args::Export;
use super::progress::Meter;
use super::terminal_text::{bytes, count, one_line};
use super::{FAILED, Failure, open_args};

pub fn run(args: &Export, out: &mut dyn Write) -> Result<(), Failure> {
    let reader = open_args::reader(&args.source.path, &args.source.reading.options())?;
    let meter = Meter::new(reader.image().size())?;
    let written = export::export(&reader, &args.out, args.force, &meter);
    meter.finish();
    written?;
    let (n, size) = (reader.image().tensors().len(), reader.image().size());
    let name = one_line(&args.out.display().to_string());
    writeln!(out, "{name}: {}, {}", count(n, "tensor"), bytes(size))?;
    Ok(())
}

impl From<export::Error> for Failure {
    fn from(error: export::Error) -> Self {
        match error {
            export::Error::Image(error) => Failure::from(error),
            error => Failure::new(FAILED, &error, error.remedy()),
        }
    }
}
