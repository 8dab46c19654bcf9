//! Parsers of the values of `mount` options. A value out of bounds is a usage error that names the bound.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use clap::builder::RangedI64ValueParser;

use crate::mount::{MAX_THREADS, MIN_MEMORY_BYTES, MIN_READAHEAD_BYTES, machine_memory};

use crate::byte_size;

/// Parses `--memory`. With more than the machine has, the system would kill the daemon.
pub fn parse_memory(text: &str) -> Result<u64, String> {
    byte_size::parse_size_within(text, MIN_MEMORY_BYTES, machine_memory())
}

/// Parses `--readahead`. Readahead is held in memory, so the machine's memory bounds it.
pub fn parse_readahead(text: &str) -> Result<u64, String> {
    match byte_size::parse_size(text)? {
        0 => Ok(0),
        _ => byte_size::parse_size_within(text, MIN_READAHEAD_BYTES, machine_memory())
            .map_err(|limit| format!("{limit}, or 0 to disable it")),
    }
}

/// The parser of `--threads`.
pub fn threads_parser() -> RangedI64ValueParser<u16> {
    clap::value_parser!(u16).range(1..=i64::from(MAX_THREADS))
}

/// The parser of `--uid` and `--gid`. System calls take the largest number for no user at all.
pub fn owner_parser() -> RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(0..i64::from(u32::MAX))
}

/// Parses `--metrics`: a loopback address with a port, or a port alone.
pub fn parse_address(text: &str) -> Result<SocketAddr, String> {
    let text = text.strip_prefix("localhost").unwrap_or(text);
    let port = text.strip_prefix(':').unwrap_or(text).parse();
    let address: SocketAddr = match port {
        Ok(port) => (IpAddr::V4(Ipv4Addr::LOCALHOST), port).into(),
        Err(_) => text.parse().map_err(|_| {
            "an address is an IP address and a port, such as 127.0.0.1:9100".to_owned()
        })?,
    };
    if !address.ip().is_loopback() {
        return Err(
            "only a loopback address, such as 127.0.0.1:9100: the page shows paths to every reader"
                .to_owned(),
        );
    }
    Ok(address)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_are_served_on_loopback_alone() {
        for (text, expected) in [
            ("127.0.0.1:9100", "127.0.0.1:9100"),
            ("[::1]:9100", "[::1]:9100"),
            ("localhost:80", "127.0.0.1:80"),
            (":80", "127.0.0.1:80"),
            ("80", "127.0.0.1:80"),
        ] {
            assert_eq!(parse_address(text), Ok(expected.parse().unwrap()), "{text}");
        }
        for text in ["0.0.0.0:80", "[::]:80", "10.0.0.1:80", "example.org:80", "", "127.0.0.1"] {
            assert!(parse_address(text).is_err(), "{text}");
        }
    }
}
