//! The address of the server behind a URL.

use reqwest::Url;

use crate::source::url::{SourceUrl, StoreKind};

use super::super::client::endpoint_of;
use super::super::credentials::aws_settings;
use super::super::error::RemoteError;
use super::super::options::RemoteOptions;

/// The address of a server, and the region that requests name.
#[derive(Debug)]
pub struct ServerAddress {
    pub url: Url,
    /// The region of S3; other stores have none.
    pub region: Option<String>,
}

/// The region that the client names if nothing states one.
const DEFAULT_REGION: &str = "us-east-1";

impl ServerAddress {
    /// The server of a URL, by the environment and the profile.
    pub fn of(url: &SourceUrl) -> Result<ServerAddress, RemoteError> {
        let stated = endpoint_of(url.kind);
        let (mut region, mut endpoint) = (None, stated);
        match url.kind {
            StoreKind::S3 => {
                // Without credentials, which are another step's.
                let anonymous = RemoteOptions { anonymous: true, ..RemoteOptions::current()? };
                let settings = aws_settings(&anonymous)?;
                let variable = |name| std::env::var(name).ok().filter(|text| !text.is_empty());
                let stated = settings.region.or_else(|| variable("AWS_REGION"));
                let stated = stated.or_else(|| variable("AWS_DEFAULT_REGION"));
                let named = stated.unwrap_or_else(|| DEFAULT_REGION.to_owned());
                endpoint = settings.endpoint.unwrap_or(endpoint);
                if endpoint.is_empty() {
                    endpoint = format!("https://s3.{named}.amazonaws.com");
                }
                region = Some(named);
            }
            StoreKind::Gcs if endpoint.is_empty() => {
                endpoint = "https://storage.googleapis.com".to_owned();
            }
            StoreKind::Gcs if !endpoint.contains("://") => endpoint = format!("http://{endpoint}"),
            StoreKind::Azure if !endpoint.contains("://") => {
                endpoint = format!("https://{endpoint}.blob.core.windows.net");
            }
            StoreKind::Http => endpoint = format!("{}://{}", url.scheme, url.host),
            StoreKind::Gcs | StoreKind::Azure => {}
        }
        let invalid = |_| RemoteError::Other { message: "the endpoint is no valid URL".to_owned() };
        let mut url: Url = endpoint.parse().map_err(invalid)?;
        // Any other part of the URL may be a secret.
        let _ = url.set_username("");
        let _ = url.set_password(None);
        url.set_query(None);
        url.set_path("/");
        Ok(ServerAddress { url, region })
    }

    pub fn host(&self) -> &str {
        self.url.host_str().unwrap_or_default()
    }

    pub fn port(&self) -> u16 {
        self.url.port_or_known_default().unwrap_or(443)
    }

    pub fn is_encrypted(&self) -> bool {
        self.url.scheme() == "https"
    }
}
