//! How far a long command is, on a terminal, and whether the user wants it to stop.

use std::io::IsTerminal;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};

use crate::{export, verify};

/// A bar on a terminal, nothing elsewhere; and an ear for Ctrl-C.
pub struct Meter {
    bar: ProgressBar,
    stop: Arc<AtomicBool>,
}

impl Meter {
    pub fn new(bytes: u64) -> Result<Meter, std::io::Error> {
        let stop = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            signal_hook::flag::register(signal, Arc::clone(&stop))?;
        }
        // A file that grows past the limit then fails to be written, which is told, instead of ending us.
        signal_hook::flag::register(SIGXFSZ, Arc::default())?;
        let target = if std::io::stderr().is_terminal() {
            ProgressDrawTarget::stderr()
        } else {
            ProgressDrawTarget::hidden()
        };
        let bar = ProgressBar::with_draw_target(Some(bytes), target);
        let style = "{bar:40} {decimal_bytes} of {decimal_total_bytes}, {decimal_bytes_per_sec}, {eta} left";
        if let Ok(style) = ProgressStyle::with_template(style) {
            bar.set_style(style);
        }
        Ok(Meter { bar, stop })
    }

    /// Takes the bar away.
    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }

    fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

impl export::Progress for Meter {
    fn wrote(&self, bytes: u64) {
        self.bar.inc(bytes);
    }

    fn stop(&self) -> bool {
        self.stopped()
    }
}

impl verify::Progress for Meter {
    fn read(&self, bytes: u64) {
        self.bar.inc(bytes);
    }

    fn stop(&self) -> bool {
        self.stopped()
    }
}
