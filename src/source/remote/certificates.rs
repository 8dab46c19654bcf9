//! The certificates of the user's own authority, beside those of the system.

use std::io;
use std::path::{Path, PathBuf};

use reqwest::Certificate;

use super::error::RemoteError;

/// Variables that name a file of certificates. The first that is set counts.
const VARIABLES: [&str; 2] = ["AWS_CA_BUNDLE", "SSL_CERT_FILE"];

/// Reads the certificates that the environment names. A file that cannot be used is an error: without it, connections to
/// servers of that authority would fail, and say less.
pub fn read_certificates() -> Result<Vec<Certificate>, RemoteError> {
    let named = VARIABLES.into_iter().find_map(|name| {
        let path = std::env::var_os(name).filter(|path| !path.is_empty())?;
        Some((name, PathBuf::from(path)))
    });
    match named {
        None => Ok(Vec::new()),
        Some((name, path)) => read_file(&path).map_err(|error| RemoteError::CertificateFile {
            name,
            path,
            why: error.to_string(),
        }),
    }
}

fn read_file(path: &Path) -> io::Result<Vec<Certificate>> {
    let pem = std::fs::read(path)?;
    let certificates = Certificate::from_pem_bundle(&pem).map_err(io::Error::other)?;
    match certificates.is_empty() {
        true => Err(io::Error::other("it has no certificate in PEM")),
        false => Ok(certificates),
    }
}

/// Why the certificate of a server is refused; `None` if an error has another cause.
pub fn certificate_refusal(error: &(dyn std::error::Error + 'static)) -> Option<String> {
    // An I/O error hides the error that it was made of from `source`, and may be made of another one.
    let mut error = error;
    while let Some(inner) = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref) {
        error = inner;
    }
    match error.downcast_ref::<rustls::Error>()? {
        error @ rustls::Error::InvalidCertificate(_) => Some(error.to_string()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_without_certificates_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        assert!(read_file(&dir.path().join("none.pem")).is_err());
        let path = dir.path().join("empty.pem");
        std::fs::write(&path, "no certificate").unwrap();
        assert_eq!(read_file(&path).unwrap_err().to_string(), "it has no certificate in PEM");
    }

    #[test]
    fn only_a_certificate_is_refused_for_good() {
        let refused = rustls::Error::InvalidCertificate(rustls::CertificateError::UnknownIssuer);
        let wrapped = io::Error::other(io::Error::other(refused));
        assert!(certificate_refusal(&wrapped).unwrap().contains("certificate"));
        assert!(certificate_refusal(&io::Error::from(io::ErrorKind::ConnectionReset)).is_none());
        assert!(certificate_refusal(&io::Error::other(rustls::Error::DecryptError)).is_none());
    }
}
