//! The certificate authorities trusted for an object store: those in `AWS_CA_BUNDLE`, or the host's. They are read
//! once per origin: otherwise each client of the library, one for each transfer runtime, reads about a hundred files,
//! and creating it fails on a host without any, even for plain HTTP. It knows no endpoint.

use crate::config::EnvironmentSource;
use object_store::{Certificate, ClientOptions};
use rustls::RootCertStore;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use spurline_types::{Error, ErrorKind, Result};

/// The variable that names a file of authorities, as in AWS's tools.
const BUNDLE: &str = "AWS_CA_BUNDLE";

/// Parsed, usable authorities, both for the library's clients and for our own.
#[derive(Clone, Default)]
pub(crate) struct CaStore(Vec<(Certificate, reqwest::Certificate)>);

impl CaStore {
    /// The authorities for an S3 server.
    ///
    /// # Errors
    /// `Invalid` when `AWS_CA_BUNDLE` names a file that can't be read or has no certificate.
    pub(crate) fn of_aws(env: &EnvironmentSource) -> Result<Self> {
        let Some(file) = env.get(BUNDLE) else { return Ok(Self::of_host()) };
        let wrong = |why: &dyn std::fmt::Display| {
            let what = format!("{BUNDLE} '{file}' {why}; name a PEM file of the authorities to trust, or unset it");
            Error::new(ErrorKind::Invalid, what)
        };
        let certificates: Vec<_> = CertificateDer::pem_file_iter(&file)
            .and_then(Iterator::collect)
            .map_err(|e| wrong(&format_args!("can't be read: {e}")))?;
        let roots = Self::parse_usable(certificates);
        if roots.is_empty() { Err(wrong(&"has no certificate")) } else { Ok(roots) }
    }

    /// The host's authorities (`SSL_CERT_FILE` and `SSL_CERT_DIR` are followed). An empty set is not an error yet.
    pub(crate) fn of_host() -> Self {
        let found = rustls_native_certs::load_native_certs();
        found.errors.iter().for_each(|e| tracing::debug!("certificate authorities of this host: {e}"));
        Self::parse_usable(found.certs)
    }

    fn parse_usable(certificates: Vec<CertificateDer<'static>>) -> Self {
        let mut store = RootCertStore::empty();
        let known = certificates.into_iter().filter_map(|c| {
            let certificate = (Certificate::from_der(&c).ok()?, reqwest::Certificate::from_der(&c).ok()?);
            // A certificate that can't be parsed would make the whole client fail.
            store.add(c).ok().map(|()| certificate)
        });
        CaStore(known.collect())
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Fails where TLS is needed and there is no trusted authority.
    ///
    /// # Errors
    /// `Invalid`, with the remedy.
    pub(crate) fn require_any(&self, server: &str) -> Result<()> {
        if !self.is_empty() {
            return Ok(());
        }
        let why = format!(
            "{server} needs TLS, and this host trusts no certificate authority: install the package \
             ca-certificates, or name a PEM file of authorities with SSL_CERT_FILE"
        );
        Err(Error::new(ErrorKind::Invalid, why))
    }

    /// `options` with these authorities only.
    pub(crate) fn apply_to(&self, options: ClientOptions) -> ClientOptions {
        let options = options.with_no_system_certificates(true);
        self.0.iter().map(|(c, _)| c.clone()).fold(options, ClientOptions::with_root_certificate)
    }

    /// The authorities, for a client that trusts no other.
    pub(crate) fn for_client(&self) -> impl Iterator<Item = reqwest::Certificate> {
        self.0.iter().map(|(_, c)| c.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bundle_that_is_none_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("bundle.pem");
        let read = || CaStore::of_aws(&EnvironmentSource::fixed([(BUNDLE, file.to_str().unwrap())])).err().unwrap();
        assert!(read().message().contains("bundle.pem") && read().message().contains("can't be read"), "{}", read());
        std::fs::write(&file, "nothing\n").unwrap();
        assert!(read().message().contains("has no certificate"), "{}", read());
        // Valid PEM without a valid certificate.
        std::fs::write(&file, "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n").unwrap();
        assert_eq!(read().kind(), ErrorKind::Invalid);
        assert!(CaStore::default().require_any("https://host").unwrap_err().message().contains("ca-certificates"));
    }
}
