//! `ckptfs completions` and `ckptfs man`: generated from the table of options.

use std::io::Write;

use crate::cli::args::{CompletionsArgs, ManArgs};
use crate::cli::error::{CommandError, EXIT_FAILED};
use crate::cli::python_commands::command_table;

pub fn write_completions(args: &CompletionsArgs, out: &mut dyn Write) -> Result<(), CommandError> {
    // Generated in memory first, because the generator panics if a write fails.
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command_table(), "ckptfs", &mut script);
    Ok(out.write_all(&script)?)
}

pub fn write_man_pages(args: &ManArgs, out: &mut dyn Write) -> Result<(), CommandError> {
    match &args.dir {
        None => Ok(clap_mangen::Man::new(command_table()).render(out)?),
        Some(directory) => {
            let written = std::fs::create_dir_all(directory)
                .and_then(|()| clap_mangen::generate_to(command_table(), directory));
            written.map_err(|error| {
                let message = format!("{}: cannot write the pages: {error}", directory.display());
                CommandError::new(EXIT_FAILED, message, "give a directory that can be written to")
            })
        }
    }
}
