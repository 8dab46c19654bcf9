//! The credentials of a container (ECS, EKS): a service on its machine, which the environment names.

use std::net::IpAddr;
use std::path::PathBuf;

use http::Method;
use object_store::aws::AwsCredential;
use reqwest::Url;
use serde::Deserialize;

use super::super::addresses::literal_address;
use super::super::failure::CredentialError;
use super::non_empty;
use super::token_service::{
    TemporaryCredential, TokenError, TokenServices, parse_time, read_token, refused,
};

const PATH_VARIABLE: &str = "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI";
const URL_VARIABLE: &str = "AWS_CONTAINER_CREDENTIALS_FULL_URI";
const TOKEN_VARIABLE: &str = "AWS_CONTAINER_AUTHORIZATION_TOKEN";
const TOKEN_FILE_VARIABLE: &str = "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE";

/// Where ECS and EKS serve the credentials of their containers.
const ECS_HOST: &str = "169.254.170.2";
const SERVICE_HOSTS: [&str; 3] = [ECS_HOST, "169.254.170.23", "[fd00:ec2::23]"];

/// The service of this container.
#[derive(Clone, PartialEq, Eq)]
pub struct ContainerService {
    url: String,
    token: Option<ContainerToken>,
}

/// The token that the service asks for.
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
        let url = match (non_empty(PATH_VARIABLE), non_empty(URL_VARIABLE)) {
            (Some(path), _) => format!("http://{ECS_HOST}{path}"),
            (None, Some(url)) => url,
            (None, None) => return Ok(None),
        };
        if !is_allowed(&url) {
            return Err(CredentialError {
                why: format!(
                    "{PATH_VARIABLE} or {URL_VARIABLE} names no service for the credentials of a container"
                ),
                remedy: "without https it is one of this machine, ECS or EKS: correct the variable, or unset it"
                    .to_owned(),
            });
        }
        let file = non_empty(TOKEN_FILE_VARIABLE).map(|path| ContainerToken::File(path.into()));
        let token = file.or_else(|| non_empty(TOKEN_VARIABLE).map(ContainerToken::Text));
        Ok(Some(ContainerService { url, token }))
    }

    /// Asks the service for credentials.
    pub async fn fetch(&self, services: &TokenServices) -> Result<TemporaryCredential, TokenError> {
        let mut request = http::Request::builder()
            .method(Method::GET)
            .uri(&self.url)
            .header("accept", "application/json");
        if let Some(token) = &self.token {
            request = request.header("authorization", token.read()?);
        }
        let request = request.body(String::new().into()).map_err(|_| {
            refused(
                "the token of the container is none",
                format!("check {TOKEN_FILE_VARIABLE} and {TOKEN_VARIABLE}"),
            )
        })?;
        let (status, text) = services.send_on_this_machine(request).await?;
        if !status.is_success() {
            return Err(refused(
                format!("the container's service gives no credentials: HTTP {status}"),
                format!(
                    "check the role of the container, {TOKEN_FILE_VARIABLE} and {TOKEN_VARIABLE}"
                ),
            ));
        }
        parse_answer(&text).ok_or_else(|| {
            refused(
                "the container's service answers without credentials",
                format!("check {PATH_VARIABLE} or {URL_VARIABLE}"),
            )
        })
    }
}

impl ContainerToken {
    fn read(&self) -> Result<String, TokenError> {
        match self {
            ContainerToken::Text(token) => Ok(token.clone()),
            ContainerToken::File(path) => {
                let token = read_token(path).map_err(|error| {
                    let why =
                        format!("cannot read the container's token {}: {error}", path.display());
                    refused(why, format!("check {TOKEN_FILE_VARIABLE}"))
                })?;
                Ok(token.trim().to_owned())
            }
        }
    }
}

/// Whether a URL may be sent the token of a container. Without encryption, only this machine and its cloud may be.
fn is_allowed(url: &str) -> bool {
    let Some(url) = Url::parse(url).ok().filter(Url::has_host) else { return false };
    if !url.username().is_empty() || url.password().is_some() {
        return false;
    }
    let host = url.host_str().unwrap_or_default();
    let is_loopback =
        host == "localhost" || literal_address(&url).is_some_and(|at: IpAddr| at.is_loopback());
    match url.scheme() {
        "https" => true,
        "http" => is_loopback || SERVICE_HOSTS.contains(&host),
        _ => false,
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct ContainerAnswer {
    access_key_id: String,
    secret_access_key: String,
    token: String,
    expiration: String,
}

fn parse_answer(text: &str) -> Option<TemporaryCredential> {
    let answer: ContainerAnswer = serde_json::from_str(text).ok()?;
    Some(TemporaryCredential {
        expires_at: Some(parse_time(&answer.expiration)?),
        credential: AwsCredential {
            key_id: answer.access_key_id,
            secret_key: answer.secret_access_key,
            token: Some(answer.token),
        },
    })
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
            assert!(is_allowed(url), "{url}");
        }
        for url in [
            "http://example.com/x",
            "http://169.254.169.254/latest",
            "http://169.254.170.2.example.com/",
            "http://169.254.170.2@example.com/",
            "http://10.0.0.1/",
            "file:///etc/passwd",
            "/v2/credentials",
            "",
        ] {
            assert!(!is_allowed(url), "{url}");
        }
    }

    #[test]
    fn an_answer_has_keys_and_their_end() {
        let text = r#"{"AccessKeyId": "k", "SecretAccessKey": "s", "Token": "t",
            "Expiration": "2030-01-02T03:04:05Z", "RoleArn": "arn:r"}"#;
        let found = parse_answer(text).unwrap();
        assert_eq!(found.credential.token.as_deref(), Some("t"));
        assert_eq!(found.expires_at.unwrap().timestamp(), 1_893_553_445);
        for name in ["AccessKeyId", "SecretAccessKey", "Token", "Expiration"] {
            assert!(parse_answer(&text.replace(name, "Other")).is_none(), "{name}");
        }
    }
}
