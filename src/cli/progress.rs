//! The progress bar of a long command, and its stop signals.

use std::fmt;
use std::io::IsTerminal;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};

#[cfg(feature = "remote")]
use crate::source::stop_requests_with;
use crate::source::{RequestCounters, request_counters};
use crate::virtual_file::Progress;

use super::output::is_quiet;
use super::terminal_text::format_count;

/// At most 77 characters, with `999.99 GB of 999.99 GB, 999.99 GB/s, 59m left`.
const BAR_TEMPLATE: &str =
    "{bar:30} {decimal_bytes} of {decimal_total_bytes}, {decimal_bytes_per_sec}, {eta} left";

/// A second line, for sources in stores.
const STORE_LINE: &str = "\n{store}";

/// Requests to stores so far, on one line.
fn store_text(counters: RequestCounters) -> String {
    let RequestCounters { requests, in_flight, cached_bytes, retries, .. } = counters;
    let requests = format_count(usize::try_from(requests).unwrap_or(usize::MAX), "request");
    let mut text = format!("{requests}, {in_flight} in flight, {retries} sent again");
    if let Some(ratio) = counters.hit_ratio().filter(|_| cached_bytes > 0) {
        let percent = 100.0 * ratio;
        text += &format!(", {percent:.0}% from the cache on disk");
    }
    text
}

/// Whether a signal has asked the command to stop.
#[derive(Clone)]
pub struct StopSignal(Arc<AtomicBool>);

impl StopSignal {
    /// Takes the signals from now on.
    pub fn register() -> Result<StopSignal, std::io::Error> {
        let stop = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            // The second one ends the process: a store or a pipe may keep the command waiting.
            signal_hook::flag::register_conditional_default(signal, Arc::clone(&stop))?;
            signal_hook::flag::register(signal, Arc::clone(&stop))?;
        }
        // With a handler, a write past the file size limit fails with an error instead of killing the process.
        signal_hook::flag::register(SIGXFSZ, Arc::default())?;
        #[cfg(feature = "remote")]
        stop_requests_with(&stop);
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
        let meter = ProgressMeter {
            bar: ProgressBar::with_draw_target(Some(bytes), target),
            stop: stop.clone(),
        };
        meter.set_style();
        meter
    }

    /// Shows the line of stores if any was asked before now.
    fn set_style(&self) {
        let RequestCounters { requests, cached_bytes, .. } = request_counters();
        let template = match requests + cached_bytes {
            0 => BAR_TEMPLATE.to_owned(),
            _ => format!("{BAR_TEMPLATE}{STORE_LINE}"),
        };
        if let Ok(style) = ProgressStyle::with_template(&template) {
            let write_store = |_: &ProgressState, out: &mut dyn fmt::Write| {
                // A line that cannot be drawn stays as it was.
                let _ = out.write_str(&store_text(request_counters()));
            };
            self.bar.set_style(style.with_key("store", write_store));
        }
    }

    /// Removes the bar from the terminal.
    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

impl Progress for ProgressMeter {
    fn on_total(&self, bytes: u64) {
        // The sources were opened since the bar was made.
        self.set_style();
        self.bar.set_length(bytes);
    }

    fn on_bytes(&self, bytes: u64) {
        self.bar.inc(bytes);
    }

    fn should_stop(&self) -> bool {
        self.stop.is_set()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_of_a_store_fits_a_terminal() {
        let mut counters = RequestCounters { requests: 1, ..RequestCounters::default() };
        assert_eq!(store_text(counters), "1 request, 0 in flight, 0 sent again");
        (counters.requests, counters.in_flight, counters.retries) = (999_999, 256, 99_999);
        (counters.bytes, counters.cached_bytes) = (0, 5);
        let text = store_text(counters);
        assert!(text.ends_with(", 100% from the cache on disk") && text.len() <= 77, "{text}");
        let template = format!("{BAR_TEMPLATE}{STORE_LINE}");
        assert!(ProgressStyle::with_template(&template).is_ok());
    }
}
