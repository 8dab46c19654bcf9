//! A mount's life: until it is unmounted, or a signal asks for its end.
//!
//! In: a mount, the process's signals, perhaps a listener for metrics. Out: whether it ended as it
//! should. Signals are heard from before the mount is made, so that none ends the process with a
//! dead mount left behind.

use std::io;
use std::net::TcpListener;
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::mount::Mounted;

use super::super::{FAILED, Failure};
use super::{malloc_tuning, metrics};

/// How long readers have to finish after a signal (docs/semantics.md).
const READERS: Duration = Duration::from_secs(5);

/// What runs beside the mount's own threads.
pub struct Control {
    runtime: Runtime,
    signals: Signals,
}

struct Signals {
    term: Signal,
    int: Signal,
    hup: Signal,
    quit: Signal,
    /// Heard and not heeded: they would end the process and leave a dead mount.
    _others: Vec<Signal>,
}

impl Signals {
    async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.term.recv() => "SIGTERM",
            _ = self.int.recv() => "SIGINT",
            _ = self.hup.recv() => "SIGHUP",
            _ = self.quit.recv() => "SIGQUIT",
        }
    }
}

impl Control {
    /// Starts to hear signals.
    pub fn new() -> io::Result<Control> {
        malloc_tuning::keep_small();
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let inside = runtime.enter();
        let others =
            [SignalKind::user_defined1(), SignalKind::user_defined2(), SignalKind::alarm()];
        let signals = Signals {
            term: signal(SignalKind::terminate())?,
            int: signal(SignalKind::interrupt())?,
            hup: signal(SignalKind::hangup())?,
            quit: signal(SignalKind::quit())?,
            _others: others.into_iter().map(signal).collect::<io::Result<_>>()?,
        };
        drop(inside);
        Ok(Control { runtime, signals })
    }

    /// Stays until the mount is gone, or must be.
    pub fn stay(mut self, mounted: &Mounted, page: Option<TcpListener>) -> Result<(), Failure> {
        let signals = &mut self.signals;
        self.runtime.block_on(async {
            tokio::spawn(malloc_tuning::give_back());
            if let Some(page) = page {
                tokio::spawn(metrics::serve(page, mounted.numbers()));
            }
            tokio::select! {
                () = mounted.gone() => return ended(mounted),
                name = signals.next() => tracing::info!("{name}: detaching"),
            }
            if let Err(error) = mounted.detach() {
                tracing::error!("{error}; what to do: {}", error.remedy());
            }
            let cut_off = tokio::select! {
                () = mounted.gone() => return ended(mounted),
                () = tokio::time::sleep(READERS) => "its readers took too long",
                name = signals.next() => name,
            };
            // The process ends, /dev/fuse is closed with it, and the kernel aborts what waits.
            let message = format!("ended while files were in use: {cut_off}");
            Err(Failure::new(FAILED, message, "close what uses a mount before stopping it"))
        })
    }
}

fn ended(mounted: &Mounted) -> Result<(), Failure> {
    match mounted.fault() {
        None => {
            tracing::info!("{}: unmounted", mounted.mountpoint().display());
            Ok(())
        }
        Some(fault) => {
            let message = format!("{}: the mount broke: {fault}", mounted.mountpoint().display());
            Err(Failure::new(FAILED, message, "mount it again, and report this with its log"))
        }
    }
}
