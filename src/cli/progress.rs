//! The progress bar of a long command, and its stop signals.

use std::io::IsTerminal;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};

use crate::{export, verify};

use super::output::is_quiet;

/// At most 77 characters, with `999.99 GB of 999.99 GB, 999.99 GB/s, 59m left`.
const BAR_TEMPLATE: &str =
    "{bar:30} {decimal_bytes} of {decimal_total_bytes}, {decimal_bytes_per_sec}, {eta} left";

/// Whether a signal has asked the command to stop.
#[derive(Clone)]
pub struct StopSignal(Arc<AtomicBool>);

impl StopSignal {
    /// Takes the signals from now on.
    pub fn register() -> Result<StopSignal, std::io::Error> {
        let stop = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            signal_hook::flag::register(signal, Arc::clone(&stop))?;
        }
        // With a handler, a write past the file size limit fails with an error instead of killing the process.
        signal_hook::flag::register(SIGXFSZ, Arc::default())?;
        Ok(StopSignal(stop))
    }

    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Shows progress on a terminal.
pub struct ProgressMeter {
    bar: ProgressBar,
    stop: StopSignal,
}

impl ProgressMeter {
    pub fn new(bytes: u64, stop: &StopSignal) -> ProgressMeter {
        let target = if std::io::stderr().is_terminal() && !is_quiet() {
            ProgressDrawTarget::stderr()
        } else {
            ProgressDrawTarget::hidden()
        };
        let bar = ProgressBar::with_draw_target(Some(bytes), target);
        if let Ok(style) = ProgressStyle::with_template(BAR_TEMPLATE) {
            bar.set_style(style);
        }
        ProgressMeter { bar, stop: stop.clone() }
    }

    /// Removes the bar from the terminal.
    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

impl export::ExportProgress for ProgressMeter {
    fn on_write(&self, bytes: u64) {
        self.bar.inc(bytes);
    }

    fn should_stop(&self) -> bool {
        self.stop.is_set()
    }
}

#[cfg(feature = "remote")]
impl crate::fetch::FetchProgress for ProgressMeter {
    fn on_total(&self, bytes: u64) {
        self.bar.set_length(bytes);
    }

    fn on_fetch(&self, bytes: u64) {
        self.bar.inc(bytes);
    }

    fn should_stop(&self) -> bool {
        self.stop.is_set()
    }
}

impl verify::VerifyProgress for ProgressMeter {
    fn add_bytes(&self, bytes: u64) {
        self.bar.inc(bytes);
    }

    fn should_stop(&self) -> bool {
        self.stop.is_set()
    }
}
