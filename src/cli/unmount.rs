//! `ckptfs unmount`: takes a mount away.

use std::io::Write;

use crate::mount::heal::{self, Daemon};

use super::Failure;
use super::args::Unmount;
use super::words::one_line;

pub fn run(args: &Unmount, out: &mut dyn Write) -> Result<(), Failure> {
    let done = heal::unmount(&args.path, args.lazy)?;
    let path = one_line(&done.path.display().to_string());
    match done.daemon {
        Daemon::Ended | Daemon::Unknown => {}
        Daemon::WasDead => writeln!(out, "{path}: was dead, taken away")?,
        Daemon::Runs(pid) => {
            writeln!(out, "{path}: detached; its daemon ({pid}) ends with the last reader")?;
        }
    }
    Ok(())
}
