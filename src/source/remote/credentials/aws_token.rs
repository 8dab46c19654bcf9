//! Fetches temporary credentials from the source of a profile: those of roles from the token service (STS).

use http::Method;
use object_store::aws::{AwsAuthorizer, AwsCredential};
use reqwest::Url;

use super::super::failure::answer_code;
use super::aws_source::{AwsRole, AwsSource};
use super::aws_sso;
use super::credential_process::run_credential_process;
use super::token_service::{
    TemporaryCredential, TokenError, TokenServices, bad_answer, bad_endpoint, parse_endpoint,
    parse_time, read_token, refused,
};

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
            assume_role(services, role, &base).await
        }
        AwsSource::WebIdentity { role, token_file } => {
            let token = read_token(token_file).map_err(|error| {
                let why = format!("cannot read the identity's token {}: {error}", token_file.display());
                refused(why, "check AWS_WEB_IDENTITY_TOKEN_FILE, or web_identity_token_file in ~/.aws/config")
            })?;
            assume_role_with_identity(services, role, token.trim()).await
        }
        AwsSource::SingleSignOn(account) => aws_sso::fetch_role(account, services).await,
        AwsSource::Process { command, profile } => {
            Ok(run_credential_process(command, profile).await?)
        }
        AwsSource::Container(service) => service.fetch(services).await,
    }
}

/// Assumes a role with other credentials.
async fn assume_role(
    services: &TokenServices,
    role: &AwsRole,
    base: &AwsCredential,
) -> Result<TemporaryCredential, TokenError> {
    let duration = role.duration_seconds.map(|seconds| seconds.to_string());
    let mut form = vec![("Action", "AssumeRole")];
    form.extend(role.external_id.as_deref().map(|id| ("ExternalId", id)));
    form.extend(duration.as_deref().map(|seconds| ("DurationSeconds", seconds)));
    ask_sts(services, role, form, Some(base)).await
}

/// Assumes a role with the token of a web identity.
async fn assume_role_with_identity(
    services: &TokenServices,
    role: &AwsRole,
    token: &str,
) -> Result<TemporaryCredential, TokenError> {
    let form = vec![("Action", "AssumeRoleWithWebIdentity"), ("WebIdentityToken", token)];
    ask_sts(services, role, form, None).await
}

/// Asks the token service for the credentials of a role.
async fn ask_sts(
    services: &TokenServices,
    role: &AwsRole,
    mut form: Vec<(&str, &str)>,
    signer: Option<&AwsCredential>,
) -> Result<TemporaryCredential, TokenError> {
    form.extend([
        ("Version", "2011-06-15"),
        ("RoleArn", &role.arn),
        ("RoleSessionName", &role.session_name),
    ]);
    let region = &services.region;
    let domain = if region.starts_with("cn-") { "amazonaws.com.cn" } else { "amazonaws.com" };
    let endpoint = services.endpoint("STS", format!("https://sts.{region}.{domain}"));
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
        signed
            .map_err(|_| refused("the request to STS cannot be signed", "report this as a bug"))?;
    }
    let (status, text) = services.send(request).await?;
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
    fn a_form_is_encoded() {
        assert_eq!(encode_form(&[("a b", "c&d"), ("e", "ü")]), "a+b=c%26d&e=%C3%BC");
    }
}
