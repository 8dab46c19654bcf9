//! Single sign-on of AWS: the login that `aws sso login` leaves in a file, and the credentials of a role for it.
//!
//! The login of an `sso_session` has a refresh token, which renews it, as in the AWS CLI. The renewed login is written to
//! its file, because the service may accept each refresh token only once. A login that was written meanwhile stays.

use std::io::Write;
use std::path::{Path, PathBuf};

use chrono::{DateTime, SecondsFormat, TimeDelta, Utc};
use http::Method;
use object_store::aws::AwsCredential;
use rustix::fs::Mode;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::temp_file::TempFile;

use super::aws_source::SsoAccount;
use super::home;
use super::token_service::{
    TemporaryCredential, TokenError, TokenServices, bad_answer, bad_endpoint, parse_endpoint,
    parse_time, read_token, refused,
};

/// A login is renewed this long before it expires.
const RENEWAL_MARGIN: TimeDelta = TimeDelta::minutes(5);

/// The longest lifetime of a login that an answer can state.
const MAX_LOGIN_SECONDS: i64 = 365 * 86_400;

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RoleAnswer {
    role_credentials: RoleCredentials,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RoleCredentials {
    access_key_id: String,
    secret_access_key: String,
    session_token: String,
    /// Milliseconds since 1970.
    expiration: i64,
}

/// The answer to a refresh token.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct TokenAnswer {
    access_token: String,
    /// The lifetime of the token in seconds.
    expires_in: i64,
    refresh_token: Option<String>,
}

/// A login, with all fields of its file: other programs read that, too.
struct Login {
    path: PathBuf,
    fields: Map<String, Value>,
}

/// Fetches the credentials of a role of an account, for a login.
pub async fn fetch_role(
    account: &SsoAccount,
    services: &TokenServices,
) -> Result<TemporaryCredential, TokenError> {
    let token = access_token(account, services).await?;
    let default_endpoint = format!("https://portal.sso.{}.amazonaws.com", account.region);
    let endpoint = services.endpoint("SSO", default_endpoint);
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
    let (status, text) = services.send(request).await?;
    let (role, id) = (&account.role_name, &account.account_id);
    match status.as_u16() {
        401 => Err(expired(account)),
        200 => {
            let answer: RoleAnswer =
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
            format!("SSO refuses the role {role} of the account {id}: HTTP {status}"),
            format!(
                "check sso_account_id and sso_role_name in ~/.aws/config, or log in again: {}",
                account.login
            ),
        )),
    }
}

fn expired(account: &SsoAccount) -> TokenError {
    refused("the login with SSO has expired", &account.login)
}

/// The token of a login, renewed if it expires soon and can be.
async fn access_token(
    account: &SsoAccount,
    services: &TokenServices,
) -> Result<String, TokenError> {
    let login = Login::read(account)?;
    if let Some(token) = login.token_until(Utc::now() + RENEWAL_MARGIN) {
        return Ok(token);
    }
    match renew(&login, account, services).await {
        Ok(Some(token)) => Ok(token),
        failed => {
            // The token may still be valid, or another program has just renewed it.
            let token = Login::read(account)?.token_until(Utc::now());
            token.map_or_else(|| Err(failed.err().unwrap_or_else(|| expired(account))), Ok)
        }
    }
}

/// Renews a login by its refresh token; `None` if it cannot be renewed.
async fn renew(
    login: &Login,
    account: &SsoAccount,
    services: &TokenServices,
) -> Result<Option<String>, TokenError> {
    let Some(request) = login.refresh_request() else { return Ok(None) };
    let default_endpoint = format!("https://oidc.{}.amazonaws.com", account.region);
    let endpoint = services.endpoint("SSO_OIDC", default_endpoint);
    let request = http::Request::builder()
        .method(Method::POST)
        .uri(parse_endpoint(&endpoint, "/token")?.as_str())
        .header("content-type", "application/json")
        .body(request.to_string().into_bytes().into())
        .map_err(|_| bad_endpoint(&endpoint))?;
    let (status, text) = services.send(request).await?;
    if !status.is_success() {
        return Ok(None);
    }
    let answer: TokenAnswer =
        serde_json::from_str(&text).map_err(|_| bad_answer("SSO", &endpoint))?;
    let token = answer.access_token.clone();
    if let Err(error) = login.write(answer) {
        let path = login.path.display();
        tracing::warn!(
            "{path}: the login with SSO was renewed, but cannot be written there: {error}"
        );
    }
    Ok(Some(token))
}

impl Login {
    /// Reads the login of a session or a start URL.
    fn read(account: &SsoAccount) -> Result<Login, TokenError> {
        let path = cache_path(&account.cache_name);
        let text = read_token(&path).map_err(|_| {
            refused(format!("there is no login with SSO ({})", path.display()), &account.login)
        })?;
        match serde_json::from_str(&text) {
            Ok(Value::Object(fields)) if fields.contains_key("accessToken") => {
                Ok(Login { path, fields })
            }
            _ => Err(refused(format!("{} is no login with SSO", path.display()), &account.login)),
        }
    }

    fn text(&self, name: &str) -> Option<&str> {
        self.fields.get(name)?.as_str().filter(|text| !text.is_empty())
    }

    /// The token, if it is valid until a time.
    fn token_until(&self, time: DateTime<Utc>) -> Option<String> {
        let expires_at = parse_time(self.text("expiresAt")?)?;
        (expires_at > time).then(|| self.text("accessToken").map(str::to_owned)).flatten()
    }

    /// The request for another token; `None` if the login has no refresh token, or its client's registration has
    /// expired.
    fn refresh_request(&self) -> Option<Value> {
        let registered_until = self.text("registrationExpiresAt").and_then(parse_time)?;
        (registered_until > Utc::now()).then_some(())?;
        Some(json!({
            "grantType": "refresh_token",
            "clientId": self.text("clientId")?,
            "clientSecret": self.text("clientSecret")?,
            "refreshToken": self.text("refreshToken")?,
        }))
    }

    /// Writes the login to its file, with the tokens of an answer. A login that another program wrote meanwhile stays.
    fn write(&self, answer: TokenAnswer) -> std::io::Result<()> {
        let current = std::fs::read(&self.path)?;
        let current: Option<Map<String, Value>> = serde_json::from_slice(&current).ok();
        if current.as_ref() != Some(&self.fields) {
            return Ok(());
        }
        let lifetime = TimeDelta::seconds(answer.expires_in.clamp(0, MAX_LOGIN_SECONDS));
        let expires_at = (Utc::now() + lifetime).to_rfc3339_opts(SecondsFormat::Secs, true);
        let mut fields = self.fields.clone();
        fields.insert("accessToken".to_owned(), answer.access_token.into());
        fields.insert("expiresAt".to_owned(), expires_at.into());
        if let Some(token) = answer.refresh_token {
            fields.insert("refreshToken".to_owned(), token.into());
        }
        let folder = self.path.parent().unwrap_or(Path::new("."));
        let file = TempFile::create(folder, self.path.file_name(), Mode::RUSR | Mode::WUSR)?;
        file.file().write_all(Value::Object(fields).to_string().as_bytes())?;
        file.take(&self.path, true)
    }
}

/// The file in which `aws sso login` leaves the login of a session or a start URL.
fn cache_path(cache_name: &str) -> PathBuf {
    let algorithm = &ring::digest::SHA1_FOR_LEGACY_USE_ONLY;
    let hash = ring::digest::digest(algorithm, cache_name.as_bytes());
    let hex: String = hash.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    home().join(".aws/sso/cache").join(format!("{hex}.json"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_login_lies_where_the_aws_cli_leaves_it() {
        let path = cache_path("my-sso");
        assert!(
            path.ends_with(".aws/sso/cache/0ad374308c5a4e22f723adf10145eafad7c4031c.json"),
            "{path:?}"
        );
    }

    #[test]
    fn a_login_is_renewed_only_with_all_that_this_needs() {
        let all = json!({
            "accessToken": "a", "expiresAt": "2030-01-02T03:04:05Z", "clientId": "i", "clientSecret": "s",
            "refreshToken": "r", "registrationExpiresAt": "2999-01-01T00:00:00Z",
        });
        let login = |without: &str, value: Value| {
            let Value::Object(mut fields) = all.clone() else { panic!() };
            fields.insert(without.to_owned(), value);
            Login { path: PathBuf::new(), fields }
        };
        let request = login("other", Value::Null).refresh_request().unwrap();
        assert_eq!(request["refreshToken"], "r");
        for name in ["clientId", "clientSecret", "refreshToken", "registrationExpiresAt"] {
            assert!(login(name, Value::Null).refresh_request().is_none(), "{name}");
        }
        let past = "2001-01-01T00:00:00Z";
        assert!(login("registrationExpiresAt", past.into()).refresh_request().is_none());
        let at = |text: &str| login("x", Value::Null).token_until(parse_time(text).unwrap());
        assert_eq!(at("2030-01-02T03:04:04Z").as_deref(), Some("a"));
        assert_eq!(at("2030-01-02T03:04:05Z"), None);
    }
}
