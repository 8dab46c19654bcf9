//! Fetches temporary credentials from the token service (STS), single sign-on or a command.

use std::path::{Path, PathBuf};

use chrono::{DateTime, NaiveDateTime, Utc};
use http::Method;
use http_body_util::BodyExt;
use object_store::aws::{AwsAuthorizer, AwsCredential};
use object_store::client::HttpClient;
use reqwest::Url;
use serde::Deserialize;

use super::super::failure::{CredentialError, TransportError, answer_code};
use super::aws_source::{AwsRole, AwsSource, SsoAccount};
use super::credential_process::run_credential_process;
use super::{home, non_empty};

/// The largest file with a token.
const MAX_TOKEN_BYTES: u64 = 64 << 10;

/// The services that give temporary credentials.
#[derive(Clone, Debug)]
pub struct TokenServices {
    pub client: HttpClient,
    /// The region of the store, whose token service is asked.
    pub region: String,
    /// The endpoint for all services that the profile states.
    pub endpoint: Option<String>,
}

/// Credentials, and the time at which they expire.
#[derive(Debug)]
pub struct TemporaryCredential {
    pub credential: AwsCredential,
    /// `None` if they do not, as far as is known.
    pub expires_at: Option<DateTime<Utc>>,
}

/// The reason that a source gave no credentials.
#[derive(Debug)]
pub enum TokenError {
    /// It will fail again.
    Refused(CredentialError),
    /// It may succeed later.
    Transport(object_store::client::HttpError),
}

impl From<CredentialError> for TokenError {
    fn from(error: CredentialError) -> TokenError {
        TokenError::Refused(error)
    }
}

fn refused(why: impl Into<String>, remedy: impl Into<String>) -> TokenError {
    TokenError::Refused(CredentialError { why: why.into(), remedy: remedy.into() })
}

/// The credentials of a source.
pub async fn fetch(
    source: &AwsSource,
    services: &TokenServices,
) -> Result<TemporaryCredential, TokenError> {
    match source {
        AwsSource::Keys(keys) => Ok(TemporaryCredential {
            credential: AwsCredential {
                key_id: keys.key_id.clone(),
                secret_key: keys.secret_key.clone(),
                token: keys.token.clone(),
            },
            expires_at: None,
        }),
        AwsSource::Role { role, base } => {
            let base = Box::pin(fetch(base, services)).await?.credential;
            services.assume_role(role, &base).await
        }
        AwsSource::WebIdentity { role, token_file } => {
            let token = read_token(token_file).map_err(|error| {
                let why = format!("cannot read the identity's token {}: {error}", token_file.display());
                refused(why, "check AWS_WEB_IDENTITY_TOKEN_FILE, or web_identity_token_file in ~/.aws/config")
            })?;
            services.assume_role_with_identity(role, token.trim()).await
        }
        AwsSource::SingleSignOn(account) => services.sso_role(account).await,
        AwsSource::Process { command, profile } => {
            Ok(run_credential_process(command, profile).await?)
        }
    }
}

fn read_token(path: &Path) -> std::io::Result<String> {
    if std::fs::metadata(path)?.len() > MAX_TOKEN_BYTES {
        return Err(std::io::Error::other("it is too long for a token"));
    }
    std::fs::read_to_string(path)
}

impl TokenServices {
    /// The endpoint of a service: its own or the one for all that the environment states, or the cloud's.
    fn endpoint(&self, service: &str, default_endpoint: String) -> String {
        non_empty(&format!("AWS_ENDPOINT_URL_{service}"))
            .or_else(|| non_empty("AWS_ENDPOINT_URL"))
            .or_else(|| self.endpoint.clone())
            .unwrap_or(default_endpoint)
    }

    async fn assume_role(
        &self,
        role: &AwsRole,
        base: &AwsCredential,
    ) -> Result<TemporaryCredential, TokenError> {
        let duration = role.duration_seconds.map(|seconds| seconds.to_string());
        let mut form = vec![("Action", "AssumeRole")];
        form.extend(role.external_id.as_deref().map(|id| ("ExternalId", id)));
        form.extend(duration.as_deref().map(|seconds| ("DurationSeconds", seconds)));
        self.ask_sts(role, form, Some(base)).await
    }

    async fn assume_role_with_identity(
        &self,
        role: &AwsRole,
        token: &str,
    ) -> Result<TemporaryCredential, TokenError> {
        let form = vec![("Action", "AssumeRoleWithWebIdentity"), ("WebIdentityToken", token)];
        self.ask_sts(role, form, None).await
    }

    /// Asks the token service for the credentials of a role.
    async fn ask_sts(
        &self,
        role: &AwsRole,
        mut form: Vec<(&str, &str)>,
        signer: Option<&AwsCredential>,
    ) -> Result<TemporaryCredential, TokenError> {
        form.extend([
            ("Version", "2011-06-15"),
            ("RoleArn", &role.arn),
            ("RoleSessionName", &role.session_name),
        ]);
        let region = &self.region;
        let domain = if region.starts_with("cn-") { "amazonaws.com.cn" } else { "amazonaws.com" };
        let endpoint = self.endpoint("STS", format!("https://sts.{region}.{domain}"));
        let url = parse_endpoint(&endpoint, "/")?;
        let mut request = http::Request::builder()
            .method(Method::POST)
            .uri(url.as_str())
            .header("content-type", "application/x-www-form-urlencoded")
            .header("accept", "application/xml")
            .body(encode_form(&form).into())
            .map_err(|_| bad_endpoint(&endpoint))?;
        if let Some(credential) = signer {
            let signed =
                AwsAuthorizer::new(credential, "sts", region).try_authorize(&mut request, None);
            signed.map_err(|_| {
                refused("the request to STS cannot be signed", "report this as a bug")
            })?;
        }
        let (status, text) = self.send(request).await?;
        let answer = XmlAnswer(&text);
        if !status.is_success() {
            let arn = &role.arn;
            // Not its message: servers repeat what they were sent.
            let why = match answer_code(&text) {
                Some(code) => format!("STS refuses the role {arn}: {code}"),
                None => format!("STS refuses the role {arn}: HTTP {status}"),
            };
            return Err(refused(
                why,
                "check the role and who may assume it: aws sts get-caller-identity",
            ));
        }
        let found = answer.credentials();
        found.ok_or_else(|| bad_answer("STS", &endpoint))
    }

    /// The credentials of a role of an account, for the token of a login.
    async fn sso_role(&self, account: &SsoAccount) -> Result<TemporaryCredential, TokenError> {
        let token = read_sso_token(account)?;
        let default_endpoint = format!("https://portal.sso.{}.amazonaws.com", account.region);
        let endpoint = self.endpoint("SSO", default_endpoint);
        let mut url = parse_endpoint(&endpoint, "/federation/credentials")?;
        url.query_pairs_mut()
            .append_pair("role_name", &account.role_name)
            .append_pair("account_id", &account.account_id);
        let request = http::Request::builder()
            .method(Method::GET)
            .uri(url.as_str())
            .header("x-amz-sso_bearer_token", token)
            .body(Vec::new().into())
            .map_err(|_| bad_endpoint(&endpoint))?;
        let (status, text) = self.send(request).await?;
        let role = &account.role_name;
        match status.as_u16() {
            401 => Err(refused("the login with SSO has expired", &account.login)),
            200 => {
                let answer: SsoAnswer =
                    serde_json::from_str(&text).map_err(|_| bad_answer("SSO", &endpoint))?;
                let found = answer.role_credentials;
                Ok(TemporaryCredential {
                    credential: AwsCredential {
                        key_id: found.access_key_id,
                        secret_key: found.secret_access_key,
                        token: Some(found.session_token),
                    },
                    expires_at: DateTime::from_timestamp_millis(found.expiration),
                })
            }
            _ => Err(refused(
                format!(
                    "SSO refuses the role {role} of the account {}: HTTP {status}",
                    account.account_id
                ),
                format!(
                    "check sso_account_id and sso_role_name in ~/.aws/config, or log in again: {}",
                    account.login
                ),
            )),
        }
    }

    async fn send(
        &self,
        request: http::Request<object_store::client::HttpRequestBody>,
    ) -> Result<(http::StatusCode, String), TokenError> {
        let answer = self.client.execute(request).await.map_err(TokenError::Transport)?;
        let (parts, body) = answer.into_parts();
        let body = body.collect().await.map_err(TokenError::Transport)?.to_bytes();
        Ok((parts.status, String::from_utf8_lossy(&body).into_owned()))
    }
}

fn bad_endpoint(endpoint: &str) -> TokenError {
    refused(
        format!("{endpoint} is no address of a service"),
        "check AWS_ENDPOINT_URL_STS, AWS_ENDPOINT_URL_SSO and AWS_ENDPOINT_URL",
    )
}

/// The answer is not shown: it may have credentials.
fn bad_answer(service: &str, endpoint: &str) -> TokenError {
    refused(
        format!("{service} at {endpoint} answers without credentials"),
        "check that this is its address: AWS_ENDPOINT_URL_STS, AWS_ENDPOINT_URL_SSO, AWS_ENDPOINT_URL",
    )
}

fn parse_endpoint(endpoint: &str, path: &str) -> Result<Url, TokenError> {
    let url = Url::parse(endpoint).ok().filter(Url::has_host);
    let mut url = url.ok_or_else(|| bad_endpoint(endpoint))?;
    if !url.username().is_empty() || url.password().is_some() {
        return Err(refused(
            "the endpoint of a service has a user name or a password",
            "take it out of AWS_ENDPOINT_URL",
        ));
    }
    url.set_path(&format!("{}{path}", url.path().trim_end_matches('/')));
    Ok(url)
}

fn encode_form(pairs: &[(&str, &str)]) -> String {
    let mut url = Url::parse("http://form/").expect("it is a URL");
    url.query_pairs_mut().extend_pairs(pairs);
    url.query().unwrap_or_default().to_owned()
}

/// The few values of an answer of STS.
struct XmlAnswer<'a>(&'a str);

impl XmlAnswer<'_> {
    /// The text of the first element of a name. None of these has elements inside, or attributes.
    fn value(&self, name: &str) -> Option<String> {
        let (_, rest) = self.0.split_once(&format!("<{name}>"))?;
        let (value, _) = rest.split_once(&format!("</{name}>"))?;
        let value = value.trim().replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", "\"");
        Some(value.replace("&amp;", "&")).filter(|value| !value.contains('<'))
    }

    fn credentials(&self) -> Option<TemporaryCredential> {
        let expires_at = self.value("Expiration").map(|text| parse_time(&text));
        Some(TemporaryCredential {
            credential: AwsCredential {
                key_id: self.value("AccessKeyId")?,
                secret_key: self.value("SecretAccessKey")?,
                token: Some(self.value("SessionToken")?),
            },
            expires_at: expires_at?,
        })
    }
}

/// A time as services and commands of AWS write it; `None` if it is none.
pub fn parse_time(text: &str) -> Option<DateTime<Utc>> {
    let rfc = DateTime::parse_from_rfc3339(text).map(|time| time.to_utc()).ok();
    // Of older versions of AWS's program.
    let old = || NaiveDateTime::parse_from_str(text, "%Y-%m-%dT%H:%M:%SUTC").ok();
    rfc.or_else(|| Some(old()?.and_utc()))
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct SsoAnswer {
    role_credentials: SsoCredentials,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct SsoCredentials {
    access_key_id: String,
    secret_access_key: String,
    session_token: String,
    /// Milliseconds since 1970.
    expiration: i64,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct SsoToken {
    access_token: String,
    expires_at: String,
}

/// The file in which `aws sso login` leaves the token of a session or an address.
fn sso_cache_path(cache_name: &str) -> PathBuf {
    let algorithm = &ring::digest::SHA1_FOR_LEGACY_USE_ONLY;
    let hash = ring::digest::digest(algorithm, cache_name.as_bytes());
    let hex: String = hash.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    home().join(".aws/sso/cache").join(format!("{hex}.json"))
}

/// The token of a login, while it is valid.
fn read_sso_token(account: &SsoAccount) -> Result<String, TokenError> {
    let path = sso_cache_path(&account.cache_name);
    let text = read_token(&path).map_err(|_| {
        refused(format!("there is no login with SSO ({})", path.display()), &account.login)
    })?;
    let token: Option<SsoToken> = serde_json::from_str(&text).ok();
    let token = token.ok_or_else(|| {
        refused(format!("{} is no login with SSO", path.display()), &account.login)
    })?;
    match parse_time(&token.expires_at) {
        Some(expires_at) if expires_at > Utc::now() => Ok(token.access_token),
        _ => Err(refused("the login with SSO has expired", &account.login)),
    }
}

impl TokenError {
    /// The error as the store's client passes it on.
    pub fn into_store_error(self) -> object_store::Error {
        let source: Box<dyn std::error::Error + Send + Sync> = match self {
            TokenError::Refused(error) => Box::new(error),
            TokenError::Transport(error) => Box::new(error),
        };
        object_store::Error::Generic { store: "S3", source }
    }
}

/// A failure that is tried again.
impl From<TransportError> for TokenError {
    fn from(error: TransportError) -> TokenError {
        TokenError::Transport(error.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_of_the_token_service_has_credentials_and_their_end() {
        let text = "<AssumeRoleResponse><AssumeRoleResult><Credentials><AccessKeyId>k</AccessKeyId>\
            <SecretAccessKey>s</SecretAccessKey><SessionToken>a&amp;b</SessionToken>\
            <Expiration>2030-01-02T03:04:05Z</Expiration></Credentials></AssumeRoleResult></AssumeRoleResponse>";
        let found = XmlAnswer(text).credentials().unwrap();
        assert_eq!(found.credential.token.as_deref(), Some("a&b"));
        assert_eq!(found.expires_at.unwrap().timestamp(), 1_893_553_445);
        assert!(XmlAnswer(&text.replace("SessionToken", "x")).credentials().is_none());
        assert!(XmlAnswer(&text.replace("Expiration>2030", "x>2030")).credentials().is_none());
    }

    #[test]
    fn a_login_lies_where_the_program_of_aws_leaves_it() {
        let path = sso_cache_path("my-sso");
        assert!(
            path.ends_with(".aws/sso/cache/0ad374308c5a4e22f723adf10145eafad7c4031c.json"),
            "{path:?}"
        );
        for text in ["2030-01-02T03:04:05Z", "2030-01-02T03:04:05UTC", "2030-01-02T04:04:05+01:00"]
        {
            assert_eq!(parse_time(text).unwrap().timestamp(), 1_893_553_445, "{text}");
        }
        assert!(parse_time("soon").is_none());
    }

    #[test]
    fn an_endpoint_is_an_address_without_a_password() {
        let url = |text: &str| parse_endpoint(text, "/a").map(|url| url.to_string());
        assert_eq!(url("http://127.0.0.1:9/x/").unwrap(), "http://127.0.0.1:9/x/a");
        for text in ["", "minio", "https://me:pw@host"] {
            assert!(url(text).is_err(), "{text}");
        }
        assert_eq!(encode_form(&[("a b", "c&d"), ("e", "ü")]), "a+b=c%26d&e=%C3%BC");
    }
}
