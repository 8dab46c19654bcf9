//! Runs the command that a profile names as `credential_process`, without a shell. What it prints is secret.

use std::io::Read;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::Duration;

use object_store::aws::AwsCredential;
use rustix::process::{Pid, Signal, kill_process_group};
use serde::Deserialize;

use super::super::failure::CredentialError;
use super::token_service::{TemporaryCredential, parse_time};

/// How long a command may take: some ask the user to confirm on a telephone.
const PROCESS_TIMEOUT: Duration = Duration::from_secs(60);

/// The longest output: credentials have a few kilobytes.
const MAX_OUTPUT_BYTES: u64 = 64 << 10;

/// The version of the output that AWS documents.
const OUTPUT_VERSION: u32 = 1;

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct ProcessOutput {
    version: u32,
    access_key_id: String,
    secret_access_key: String,
    session_token: Option<String>,
    expiration: Option<String>,
}

/// The credentials that a command prints.
pub async fn run_credential_process(
    command: &str,
    profile: &str,
) -> Result<TemporaryCredential, CredentialError> {
    run_within(command, profile, PROCESS_TIMEOUT).await
}

async fn run_within(
    command: &str,
    profile: &str,
    timeout: Duration,
) -> Result<TemporaryCredential, CredentialError> {
    let words = shlex::split(command).filter(|words| !words.is_empty());
    let program = words.as_ref().map_or("", |words| &*words[0]).to_owned();
    // Its arguments can have a secret.
    let failed = |why: &str| CredentialError {
        why: format!("the credential_process of the profile {profile} {why}"),
        remedy: match program.is_empty() {
            true => "correct it in ~/.aws/config".to_owned(),
            false => format!(
                "run it and see what it prints: {}",
                crate::shell_word::shell_text(&program)
            ),
        },
    };
    let Some(words) = words else { return Err(failed("is no command")) };
    let child = {
        let _guard = crate::threads::hold_forks();
        Command::new(&words[0])
            .args(&words[1..])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            // So that what it starts ends with it.
            .process_group(0)
            .spawn()
    };
    let mut child = child.map_err(|error| failed(&format!("cannot be run: {error}")))?;
    let group = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    let work = tokio::task::spawn_blocking(move || {
        let mut output = Vec::new();
        let read = match child.stdout.take() {
            Some(stdout) => stdout.take(MAX_OUTPUT_BYTES + 1).read_to_end(&mut output),
            None => Ok(0),
        };
        // The pipe is closed by now: a command that goes on printing ends.
        (read, child.wait(), output)
    });
    let done = tokio::time::timeout(timeout, work).await;
    let Ok(done) = done else {
        if let Some(group) = group {
            // It has not been waited for, so that the number is still its own.
            let _ = kill_process_group(group, Signal::KILL);
        }
        return Err(failed(&format!("did not end within {} s", timeout.as_secs())));
    };
    let (read, status, output) = done.map_err(|_| failed("cannot be run"))?;
    read.map_err(|error| failed(&format!("cannot be read: {error}")))?;
    match status {
        Ok(status) if status.success() => {}
        Ok(status) => return Err(failed(&format!("failed ({status})"))),
        Err(error) => return Err(failed(&format!("cannot be waited for: {error}"))),
    }
    parse_output(&output).ok_or_else(|| failed("printed no credentials of version 1"))
}

fn parse_output(output: &[u8]) -> Option<TemporaryCredential> {
    let output: ProcessOutput = serde_json::from_slice(output).ok()?;
    if output.version != OUTPUT_VERSION {
        return None;
    }
    let expires_at = match output.expiration {
        Some(text) => Some(parse_time(&text)?),
        None => None,
    };
    let (key_id, secret_key) = (output.access_key_id, output.secret_access_key);
    let credential = AwsCredential { key_id, secret_key, token: output.session_token };
    Some(TemporaryCredential { credential, expires_at })
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn run(command: &str) -> Result<TemporaryCredential, CredentialError> {
        run_within(command, "me", Duration::from_millis(500)).await
    }

    #[tokio::test]
    async fn a_command_is_run_without_a_shell() {
        let json = r#"{"Version": 1, "AccessKeyId": "k", "SecretAccessKey": "$HOME;", "Expiration": "2030-01-02T03:04:05Z"}"#;
        let found = run(&format!("printf %s '{json}'")).await.unwrap();
        assert_eq!(found.credential.secret_key, "$HOME;");
        assert_eq!(found.expires_at.unwrap().timestamp(), 1_893_553_445);
    }

    #[tokio::test]
    async fn a_command_that_fails_is_an_error_without_its_output() {
        for (command, why) in [
            ("", "no command"),
            ("'unclosed", "no command"),
            ("/nowhere/helper --token=secret", "cannot be run"),
            ("sh -c 'echo secret; echo secret >&2; exit 3'", "failed"),
            ("printf secret", "no credentials"),
            (
                r#"printf %s '{"Version": 2, "AccessKeyId": "k", "SecretAccessKey": "secret"}'"#,
                "no credentials",
            ),
            ("yes secret", "failed"),
            ("sh -c 'sleep 30 & wait'", "did not end"),
        ] {
            let started = std::time::Instant::now();
            let error = run(command).await.unwrap_err();
            assert!(error.why.contains(why), "{command}: {error:?}");
            assert!(!format!("{error:?}").contains("secret"), "{error:?}");
            assert!(started.elapsed() < Duration::from_secs(5), "{command}");
        }
    }
}
