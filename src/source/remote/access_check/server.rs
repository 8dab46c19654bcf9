//! Tries whether a server can be reached: its name, the connection, encryption and the clock.

use std::time::{Duration, SystemTime};

use http::header::DATE;
use tokio::net::{TcpStream, lookup_host};
use tokio::time::{Instant, timeout};

use super::super::certificates::read_certificates;
use super::super::error::RemoteError;
use super::super::failure::{StoreFailure, TransportError};
use super::super::http_client::greet;
use super::super::options::RemoteOptions;
use super::address::ServerAddress;
use super::{AccessStep, Steps};

/// The time that a name server or a connection may take: over satellites they take a second.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// The clock skew at which servers may refuse signatures: some do after 5 minutes, others after 15.
const MAX_CLOCK_SKEW_INTERVAL: Duration = Duration::from_secs(5 * 60);

/// Variables that name a proxy.
const PROXY_VARIABLES: [&str; 6] =
    ["HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"];

pub async fn check_server(
    address: &ServerAddress,
    options: &RemoteOptions,
    steps: &mut Steps,
) -> Result<(), AccessStep> {
    if !address.is_encrypted() && !options.allow_http {
        return Err(AccessStep::error("encryption", &RemoteError::PlainHttp));
    }
    let is_set = |name: &&str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    match PROXY_VARIABLES.into_iter().find(is_set) {
        Some(name) => steps.push(AccessStep::works(
            "name",
            format!("{}: not looked up here, as {name} names a proxy", address.host()),
        )),
        None => check_connection(address, steps).await?,
    }
    let certificates =
        read_certificates().map_err(|error| AccessStep::error("certificates", &error))?;
    let began = Instant::now();
    let headers = greet(&address.url, options, &certificates).await;
    let headers = headers.map_err(|error| greeting_error(&error))?;
    let took = began.elapsed().as_millis();
    steps.push(match address.is_encrypted() {
        true => AccessStep::works("encryption", format!("TLS, answered after {took} ms")),
        false => AccessStep::works("encryption", "none, as --allow-http allows"),
    });
    let date = headers.get(DATE).and_then(|date| date.to_str().ok());
    let date = date.and_then(|date| chrono::DateTime::parse_from_rfc2822(date).ok());
    let clock = check_clock(date.map(SystemTime::from), SystemTime::now());
    if matches!(clock.outcome, super::StepOutcome::Fails(_)) {
        return Err(clock);
    }
    steps.push(clock);
    Ok(())
}

/// Looks the name up, and connects.
async fn check_connection(address: &ServerAddress, steps: &mut Steps) -> Result<(), AccessStep> {
    const NAME_REMEDY: &str =
        "check the URL, the endpoint (AWS_ENDPOINT_URL for S3) and the network's name server";
    let (host, port) = (address.host(), address.port());
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    let addresses: Vec<_> = match timeout(CONNECT_TIMEOUT, lookup_host((bare, port))).await {
        Ok(Ok(addresses)) => addresses.collect(),
        Ok(Err(error)) => {
            return Err(AccessStep::fails("name", format!("{host}: {error}"), NAME_REMEDY));
        }
        Err(_) => {
            let says = format!("{host}: no name server answers");
            return Err(AccessStep::fails("name", says, NAME_REMEDY));
        }
    };
    let Some(first) = addresses.first() else {
        return Err(AccessStep::fails("name", format!("{host}: has no address"), NAME_REMEDY));
    };
    steps.push(AccessStep::works("name", format!("{host} is {}", first.ip())));
    let began = Instant::now();
    let connect = timeout(CONNECT_TIMEOUT, TcpStream::connect(&addresses[..])).await;
    let failed = match connect {
        Ok(Ok(_)) => {
            let took = began.elapsed().as_millis();
            let says = format!("port {port} accepts connections, after {took} ms");
            steps.push(AccessStep::works("connection", says));
            return Ok(());
        }
        Ok(Err(error)) => error.to_string(),
        Err(_) => format!("no answer within {} s", CONNECT_TIMEOUT.as_secs()),
    };
    let remedy = "check that the server runs, and that firewalls let this port through; behind a proxy set HTTPS_PROXY";
    Err(AccessStep::fails("connection", format!("port {port} of {host}: {failed}"), remedy))
}

fn greeting_error(error: &TransportError) -> AccessStep {
    match error.to_failure() {
        StoreFailure::Permanent(error @ RemoteError::Encryption { .. }) => {
            AccessStep::error("encryption", &error)
        }
        _ => AccessStep::fails(
            "answer",
            error.to_string(),
            "check that it is a server of this kind, and the proxies and firewalls before it",
        ),
    }
}

/// Compares the clocks. Signatures state the time.
fn check_clock(server: Option<SystemTime>, now: SystemTime) -> AccessStep {
    const CHECK: &str = "clock";
    let Some(server) = server else {
        return AccessStep::works(CHECK, "not compared: the server states no time");
    };
    let (skew, direction) = match now.duration_since(server) {
        Ok(ahead) => (ahead, "ahead of"),
        Err(behind) => (behind.duration(), "behind"),
    };
    let says = format!("{} s {direction} the server's", skew.as_secs());
    match skew > MAX_CLOCK_SKEW_INTERVAL {
        true => AccessStep::fails(
            CHECK,
            format!("{says}: signatures are refused"),
            "set this machine's clock: timedatectl set-ntp true",
        ),
        false => AccessStep::works(CHECK, says),
    }
}

#[cfg(test)]
mod tests {
    use super::super::StepOutcome;
    use super::*;

    #[test]
    fn clocks_that_differ_by_minutes_are_a_problem() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000);
        let at = |seconds: i64| {
            let server = now + Duration::from_secs(10_000);
            let server = server - Duration::from_secs((10_000 - seconds).unsigned_abs());
            check_clock(Some(server), now)
        };
        assert_eq!(at(0).outcome, StepOutcome::Works);
        assert_eq!((at(-299).outcome, at(299).outcome), (StepOutcome::Works, StepOutcome::Works));
        for (seconds, says) in [(-900, "900 s ahead of"), (900, "900 s behind")] {
            let step = at(seconds);
            assert!(matches!(step.outcome, StepOutcome::Fails(_)), "{step:?}");
            assert!(step.says.starts_with(says), "{step:?}");
        }
        assert_eq!(check_clock(None, now).outcome, StepOutcome::Works);
    }
}
