//! `ckptfs completions` and `ckptfs man`: what is made from the table of arguments.

use std::io::Write;

use clap::CommandFactory;

use super::args::{Args, Completions, Man};
use super::{FAILED, Failure};

pub fn completions(args: &Completions, out: &mut dyn Write) -> Result<(), Failure> {
    // Made in memory first: the generator panics where writing fails.
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Args::command(), "ckptfs", &mut script);
    Ok(out.write_all(&script)?)
}

pub fn man(args: &Man, out: &mut dyn Write) -> Result<(), Failure> {
    match &args.dir {
        None => Ok(clap_mangen::Man::new(Args::command()).render(out)?),
        Some(directory) => clap_mangen::generate_to(Args::command(), directory).map_err(|error| {
            let message = format!("{}: cannot write the pages: {error}", directory.display());
            Failure::new(FAILED, message, "give a directory that exists and can be written to")
        }),
    }
}
