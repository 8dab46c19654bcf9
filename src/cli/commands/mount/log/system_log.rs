//! The log of the system: the journal by its native protocol, else the syslog.
//!
//! Each line is one datagram to a socket of a known path, so that a log that is restarted is found again. A line for
//! which there is no room is lost: a daemon never waits for its log. The few lines of either protocol need no crate:
//! those for syslog wait, and those for the journal bring their own subscriber.

use std::io;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};

use tracing::{Level, Metadata};
use tracing_subscriber::fmt::MakeWriter;

use crate::cli::terminal_text::one_line;

/// The sockets of the native protocol of the journal (systemd-journald.service(8)) and of syslog(3).
const SOCKETS: [(LogProtocol, &str); 2] =
    [(LogProtocol::Journal, "/run/systemd/journal/socket"), (LogProtocol::Syslog, "/dev/log")];

/// The name of the program in every line.
pub const IDENTIFIER: &str = "ckptfs";

/// The field of the journal that tells mounts apart.
pub const MOUNTPOINT_FIELD: &str = "CKPTFS_MOUNTPOINT";

/// Syslog's facility of daemons.
const DAEMON_FACILITY: u8 = 3;

/// Characters of a line, of at most 4 bytes each. Longer ones are cut: a datagram of more than some 200 KiB is refused.
const MAX_LINE_CHARACTERS: usize = 8_192;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogProtocol {
    Journal,
    Syslog,
}

/// A log of the system that takes lines.
#[derive(Debug)]
pub struct SystemLog {
    protocol: LogProtocol,
    address: PathBuf,
    socket: UnixDatagram,
    /// The mountpoint, which each line names.
    mountpoint: String,
}

impl SystemLog {
    /// The first log of this system that takes lines from this user.
    pub fn find(mountpoint: &Path) -> Option<SystemLog> {
        let opened = |(protocol, address): (LogProtocol, &str)| {
            SystemLog::open(protocol, Path::new(address), mountpoint).ok()
        };
        SOCKETS.into_iter().find_map(opened)
    }

    fn open(protocol: LogProtocol, address: &Path, mountpoint: &Path) -> io::Result<SystemLog> {
        // Fails if no program listens there, or if this user may not write to it.
        UnixDatagram::unbound()?.connect(address)?;
        let socket = UnixDatagram::unbound()?;
        socket.set_nonblocking(true)?;
        let mountpoint = one_line(&mountpoint.to_string_lossy()).into_owned();
        Ok(SystemLog { protocol, address: address.to_path_buf(), socket, mountpoint })
    }

    pub fn protocol(&self) -> LogProtocol {
        self.protocol
    }

    fn send(&self, level: Level, line: &str) {
        let datagram = self.format(level, line);
        // A full or absent log loses the line.
        let _ = self.socket.send_to(datagram.as_bytes(), &self.address);
    }

    fn format(&self, level: Level, line: &str) -> String {
        let line: String = one_line(line.trim_end()).chars().take(MAX_LINE_CHARACTERS).collect();
        let (severity, pid, mountpoint) = (severity(level), std::process::id(), &self.mountpoint);
        match self.protocol {
            LogProtocol::Journal => format!(
                "MESSAGE={line}\nPRIORITY={severity}\nSYSLOG_IDENTIFIER={IDENTIFIER}\nSYSLOG_PID={pid}\n\
                 {MOUNTPOINT_FIELD}={mountpoint}\n"
            ),
            // Without a time: the receiver adds its own, in its own time zone (RFC 3164, 4.3.3).
            LogProtocol::Syslog => {
                let priority = DAEMON_FACILITY * 8 + severity;
                format!("<{priority}>{IDENTIFIER}[{pid}]: {mountpoint}: {line}")
            }
        }
    }
}

/// Syslog's severity of a level.
fn severity(level: Level) -> u8 {
    match level {
        Level::ERROR => 3,
        Level::WARN => 4,
        Level::INFO => 6,
        _ => 7,
    }
}

/// Takes the line of one event.
pub struct LineWriter<'a> {
    log: &'a SystemLog,
    level: Level,
}

impl io::Write for LineWriter<'_> {
    /// Takes a whole line: tracing writes each in one call.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.log.send(self.level, &String::from_utf8_lossy(line));
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for SystemLog {
    type Writer = LineWriter<'a>;

    fn make_writer(&'a self) -> LineWriter<'a> {
        LineWriter { log: self, level: Level::INFO }
    }

    fn make_writer_for(&'a self, metadata: &Metadata<'_>) -> LineWriter<'a> {
        LineWriter { log: self, level: *metadata.level() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn received(protocol: LogProtocol, level: Level, line: &str) -> String {
        let folder = tempfile::tempdir().unwrap();
        let address = folder.path().join("socket");
        let receiver = UnixDatagram::bind(&address).unwrap();
        let log = SystemLog::open(protocol, &address, Path::new("/mnt/a\nb")).unwrap();
        let mut writer = LineWriter { log: &log, level };
        writer.write_all(line.as_bytes()).unwrap();
        let mut bytes = vec![0; 1 << 16];
        let length = receiver.recv(&mut bytes).unwrap();
        String::from_utf8(bytes[..length].to_vec()).unwrap()
    }

    #[test]
    fn the_journal_gets_the_fields_of_a_line() {
        let pid = std::process::id();
        let got = received(LogProtocol::Journal, Level::WARN, "/m/x: changed\nPRIORITY=0\n");
        let expected = format!(
            "MESSAGE=/m/x: changed\\nPRIORITY=0\nPRIORITY=4\nSYSLOG_IDENTIFIER=ckptfs\nSYSLOG_PID={pid}\n\
             CKPTFS_MOUNTPOINT=/mnt/a\\nb\n"
        );
        assert_eq!(got, expected);
    }

    #[test]
    fn syslog_gets_one_line() {
        let pid = std::process::id();
        let got = received(LogProtocol::Syslog, Level::ERROR, "/m/x: changed\n");
        assert_eq!(got, format!("<27>ckptfs[{pid}]: /mnt/a\\nb: /m/x: changed"));
        let long = "é".repeat(100_000);
        let got = received(LogProtocol::Syslog, Level::INFO, &long);
        assert!(got.starts_with("<30>") && got.ends_with('é') && got.len() < 1 << 15, "{got}");
    }

    #[test]
    fn a_log_that_is_full_or_gone_blocks_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let address = folder.path().join("socket");
        assert!(SystemLog::open(LogProtocol::Syslog, &address, Path::new("/mnt")).is_err());
        let receiver = UnixDatagram::bind(&address).unwrap();
        let log = SystemLog::open(LogProtocol::Syslog, &address, Path::new("/mnt")).unwrap();
        (0..10_000).for_each(|_| log.send(Level::WARN, "a line"));
        drop(receiver);
        log.send(Level::WARN, "lost");
        // A log that is restarted is found again.
        std::fs::remove_file(&address).unwrap();
        let receiver = UnixDatagram::bind(&address).unwrap();
        log.send(Level::WARN, "found");
        let mut bytes = [0; 256];
        let length = receiver.recv(&mut bytes).unwrap();
        assert!(bytes[..length].ends_with(b"found"));
    }
}
