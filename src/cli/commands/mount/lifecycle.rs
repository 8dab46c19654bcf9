//! Runs a mount until it is unmounted, or a signal asks for its end.
//!
//! Signals are handled from before the mount is made, so that none kills the process and leaves a dead mount behind.

use std::io;
use std::net::TcpListener;
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::mount::MountSession;

use super::{malloc_tuning, metrics};
use crate::cli::error::{CommandError, EXIT_FAILED};

/// The time that readers have to finish after a signal (docs/semantics/lifecycle.md).
const READERS_TIMEOUT: Duration = Duration::from_secs(5);

/// The tasks beside the mount's own threads: signals, metrics and memory trimming.
pub struct MountLifecycle {
    runtime: Runtime,
    signals: SignalStreams,
}

struct SignalStreams {
    term: Signal,
    int: Signal,
    hup: Signal,
    quit: Signal,
    /// Caught and ignored: unhandled, they would kill the process and leave a dead mount.
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
    /// Starts to handle signals.
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

    /// Runs until the mount is gone, or must be abandoned.
    pub fn run_until_end(
        mut self,
        session: &MountSession,
        listener: Option<TcpListener>,
    ) -> Result<(), CommandError> {
        let signals = &mut self.signals;
        self.runtime.block_on(async {
            tokio::spawn(malloc_tuning::trim_periodically());
            if let Some(listener) = listener {
                tokio::spawn(metrics::serve(listener, session.stats_reporter()));
            }
            tokio::select! {
                () = session.wait_for_end() => return end_result(session),
                name = signals.next() => tracing::info!("{name}: detaching"),
            }
            if let Err(error) = session.detach() {
                tracing::error!("{error}; what to do: {}", error.remedy());
            }
            let cut_off = tokio::select! {
                () = session.wait_for_end() => return end_result(session),
                () = tokio::time::sleep(READERS_TIMEOUT) => "its readers took too long",
                name = signals.next() => name,
            };
            // The process ends and closes /dev/fuse, and the kernel aborts the requests that wait.
            let message = format!("ended while files were in use: {cut_off}");
            Err(CommandError::new(
                EXIT_FAILED,
                message,
                "close what uses a mount before stopping it",
            ))
        })
    }
}

fn end_result(session: &MountSession) -> Result<(), CommandError> {
    match session.failure() {
        None => {
            tracing::info!("{}: unmounted", session.mountpoint().display());
            Ok(())
        }
        Some(fault) => {
            let message = format!("{}: the mount broke: {fault}", session.mountpoint().display());
            Err(CommandError::new(
                EXIT_FAILED,
                message,
                "mount it again, and report this with its log",
            ))
        }
    }
}
