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

use crate::mount::MountSession;

use super::{malloc_tuning, metrics};
use crate::cli::{CommandError, EXIT_FAILED};

/// How long readers have to finish after a signal (docs/semantics.md).
const READERS_TIMEOUT: Duration = Duration::from_secs(5);

/// What runs beside the mount's own threads.
pub struct MountLifecycle {
    runtime: Runtime,
    signals: SignalStreams,
}

struct SignalStreams {
    term: Signal,
    int: Signal,
    hup: Signal,
    quit: Signal,
    /// Heard and not heeded: they would end the process and leave a dead mount.
    _others: Vec<Signal>,
}

impl SignalStreams {
    async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.term.recv() => "SIGTERM",
            _ = self.int.recv() => "SIGINT",
            _ = self.hup.recv() => "SIGHUP",
            _ = self.quit.recv() => "SIGQUIT",
        }
    }
}

impl MountLifecycle {
    /// Starts to hear signals.
    pub fn new() -> io::Result<MountLifecycle> {
        malloc_tuning::limit_arenas();
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let inside = runtime.enter();
        let others =
            [SignalKind::user_defined1(), SignalKind::user_defined2(), SignalKind::alarm()];
        let signals = SignalStreams {
            term: signal(SignalKind::terminate())?,
            int: signal(SignalKind::interrupt())?,
            hup: signal(SignalKind::hangup())?,
            quit: signal(SignalKind::quit())?,
            _others: others.into_iter().map(signal).collect::<io::Result<_>>()?,
        };
        drop(inside);
        Ok(MountLifecycle { runtime, signals })
    }

    /// Stays until the mount is gone, or must be.
    pub fn run_until_end(
        mut self,
        mounted: &MountSession,
        page: Option<TcpListener>,
    ) -> Result<(), CommandError> {
        let signals = &mut self.signals;
        self.runtime.block_on(async {
            tokio::spawn(malloc_tuning::trim_periodically());
            if let Some(page) = page {
                tokio::spawn(metrics::serve(page, mounted.stats_reporter()));
            }
            tokio::select! {
                () = mounted.wait_for_end() => return end_result(mounted),
                name = signals.next() => tracing::info!("{name}: detaching"),
            }
            if let Err(error) = mounted.detach() {
                tracing::error!("{error}; what to do: {}", error.remedy());
            }
            let cut_off = tokio::select! {
                () = mounted.wait_for_end() => return end_result(mounted),
                () = tokio::time::sleep(READERS_TIMEOUT) => "its readers took too long",
                name = signals.next() => name,
            };
            // The process ends, /dev/fuse is closed with it, and the kernel aborts what waits.
            let message = format!("ended while files were in use: {cut_off}");
            Err(CommandError::new(
                EXIT_FAILED,
                message,
                "close what uses a mount before stopping it",
            ))
        })
    }
}

fn end_result(mounted: &MountSession) -> Result<(), CommandError> {
    match mounted.failure() {
        None => {
            tracing::info!("{}: unmounted", mounted.mountpoint().display());
            Ok(())
        }
        Some(fault) => {
            let message = format!("{}: the mount broke: {fault}", mounted.mountpoint().display());
            Err(CommandError::new(
                EXIT_FAILED,
                message,
                "mount it again, and report this with its log",
            ))
        }
    }
}
