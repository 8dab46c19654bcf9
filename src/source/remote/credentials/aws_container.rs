//! The credentials of a container (ECS, EKS), from a service on its machine that the environment names.

use std::path::PathBuf;

use http::HeaderValue;
use object_store::aws::AwsCredential;
use reqwest::Url;
use serde::Deserialize;

use super::super::addresses::{AddressRule, literal_address};
use super::super::failure::CredentialError;
use super::non_empty;
use super::token_service::{
    TemporaryCredential, TokenError, TokenServices, parse_time, read_token, refused,
};

const RELATIVE_URI_VARIABLE: &str = "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI";
const FULL_URI_VARIABLE: &str = "AWS_CONTAINER_CREDENTIALS_FULL_URI";
const TOKEN_VARIABLE: &str = "AWS_CONTAINER_AUTHORIZATION_TOKEN";
const TOKEN_FILE_VARIABLE: &str = "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE";

/// Where ECS and EKS serve the credentials of their containers.
const ECS_HOST: &str = "169.254.170.2";
const SERVICE_HOSTS: [&str; 3] = [ECS_HOST, "169.254.170.23", "[fd00:ec2::23]"];

/// The service, and what it asks for.
#[derive(Clone, PartialEq, Eq)]
pub struct ContainerService {
    url: Url,
    rule: AddressRule,
    token: Option<ContainerToken>,
    /// The variable that names it.
    pub variable: &'static str,
}

#[derive(Clone, PartialEq, Eq)]
enum ContainerToken {
    /// The file is read for each request: the token changes.
    File(PathBuf),
    Text(String),
}

impl std::fmt::Debug for ContainerService {
    // Neither the token is shown, nor a URL that may have a password.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ContainerService").finish_non_exhaustive()
    }
}

impl ContainerService {
    /// The service that the environment names; `None` outside of containers.
    pub fn from_environment() -> Result<Option<ContainerService>, CredentialError> {
        let (variable, url) = match (non_empty(RELATIVE_URI_VARIABLE), non_empty(FULL_URI_VARIABLE))
        {
            (Some(path), _) => (RELATIVE_URI_VARIABLE, format!("http://{ECS_HOST}{path}")),
            (None, Some(url)) => (FULL_URI_VARIABLE, url),
            (None, None) => return Ok(None),
        };
        let Some((url, rule)) = parse_url(&url) else {
            return Err(CredentialError {
                why: format!("{variable} is no address of a service for a container's credentials"),
                remedy: format!(
                    "unset {variable}, or set it to an https URL, or to http on localhost, 169.254.170.2 or 169.254.170.23"
                ),
            });
        };
        let file = non_empty(TOKEN_FILE_VARIABLE).map(|path| ContainerToken::File(path.into()));
        let token = file.or_else(|| non_empty(TOKEN_VARIABLE).map(ContainerToken::Text));
        Ok(Some(ContainerService { url, rule, token, variable }))
    }

    /// Asks the service for credentials.
    pub async fn fetch(&self, services: &TokenServices) -> Result<TemporaryCredential, TokenError> {
        let token = self.token.as_ref().map(ContainerToken::read).transpose()?;
        let asked = services.connector.get_from_machine(&self.url, self.rule, token);
        let (status, body) = asked.await?;
        if !status.is_success() {
            return Err(refused(
                format!("the container's service gives no credentials: HTTP {status}"),
                format!(
                    "check the role of the container, {TOKEN_FILE_VARIABLE} and {TOKEN_VARIABLE}"
                ),
            ));
        }
        parse_answer(&body).ok_or_else(|| {
            let why = "the container's service answers without credentials";
            refused(why, format!("check {}", self.variable))
        })
    }
}

impl ContainerToken {
    /// The header that has it.
    fn read(&self) -> Result<HeaderValue, TokenError> {
        let (text, variable) = match self {
            ContainerToken::Text(text) => (text.clone(), TOKEN_VARIABLE),
            ContainerToken::File(path) => {
                let text = read_token(path).map_err(|error| {
                    let path = path.display();
                    let why = format!("cannot read the container's token {path}: {error}");
                    refused(why, format!("check {TOKEN_FILE_VARIABLE}"))
                })?;
                (text, TOKEN_FILE_VARIABLE)
            }
        };
        let mut value = HeaderValue::from_str(text.trim()).map_err(|_| {
            let why = "the container's token has characters that no header may have";
            refused(why, format!("check {variable}"))
        })?;
        value.set_sensitive(true);
        Ok(value)
    }
}

/// A URL that may be sent the token of a container, and the addresses that it may have. Without encryption, only this
/// machine and its cloud may be sent the token.
fn parse_url(text: &str) -> Option<(Url, AddressRule)> {
    let url = Url::parse(text).ok().filter(Url::has_host)?;
    if !url.username().is_empty() || url.password().is_some() {
        return None;
    }
    let host = url.host_str()?;
    if SERVICE_HOSTS.contains(&host) {
        return matches!(url.scheme(), "http" | "https").then_some((url, AddressRule::Any));
    }
    let rule = AddressRule::NoMetadata;
    let address = literal_address(&url);
    let is_allowed = match url.scheme() {
        "https" => address.is_none_or(|address| rule.allows(address)),
        "http" => host == "localhost" || address.is_some_and(|address| address.is_loopback()),
        _ => false,
    };
    is_allowed.then_some((url, rule))
}

/// Credentials without an end have neither a token nor an expiration.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct ContainerAnswer {
    access_key_id: String,
    secret_access_key: String,
    token: Option<String>,
    expiration: Option<String>,
}

fn parse_answer(body: &[u8]) -> Option<TemporaryCredential> {
    let answer: ContainerAnswer = serde_json::from_slice(body).ok()?;
    let expires_at = match answer.expiration.filter(|text| !text.is_empty()) {
        Some(text) => Some(parse_time(&text)?),
        None => None,
    };
    let credential = AwsCredential {
        key_id: answer.access_key_id,
        secret_key: answer.secret_access_key,
        token: answer.token.filter(|token| !token.is_empty()),
    };
    Some(TemporaryCredential { credential, expires_at })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_sent_in_the_clear_only_to_this_machine_and_its_cloud() {
        for url in [
            "http://169.254.170.2/v2/credentials/x",
            "http://169.254.170.23/v1/credentials",
            "http://[fd00:ec2::23]/v1/credentials",
            "http://127.0.0.1:1338/latest",
            "http://localhost:1338/latest",
            "http://[::1]:80/",
            "https://credentials.example/x",
        ] {
            assert!(parse_url(url).is_some(), "{url}");
        }
        for url in [
            "http://example.com/x",
            "http://169.254.169.254/latest",
            "https://169.254.169.254/latest",
            "http://169.254.170.2.example.com/",
            "http://169.254.170.2@example.com/",
            "http://10.0.0.1/",
            "file:///etc/passwd",
            "/v2/credentials",
            "",
        ] {
            assert!(parse_url(url).is_none(), "{url}");
        }
    }

    #[test]
    fn an_answer_has_keys_and_their_end() {
        let text = r#"{"AccessKeyId": "k", "SecretAccessKey": "s", "Token": "t",
            "Expiration": "2030-01-02T03:04:05Z", "RoleArn": "arn:r"}"#;
        let found = parse_answer(text.as_bytes()).unwrap();
        assert_eq!(found.credential.token.as_deref(), Some("t"));
        assert_eq!(found.expires_at.unwrap().timestamp(), 1_893_553_445);
        for text in ["", "{}", &text.replace("AccessKeyId", "x"), &text.replace("2030", "x")] {
            assert!(parse_answer(text.as_bytes()).is_none(), "{text}");
        }
        let found = br#"{"AccessKeyId": "k", "SecretAccessKey": "s", "Token": ""}"#;
        let found = parse_answer(found).unwrap();
        assert!(found.credential.token.is_none() && found.expires_at.is_none());
    }
}
