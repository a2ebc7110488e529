//! Who may sign the certificate of an object store: the authorities in `AWS_CA_BUNDLE`, or those this host trusts.
//! Read once for an under-store: by itself every client of the library, one for each lane, reads some hundred files,
//! and can't be had at all on a host without any, not even for plain HTTP. It knows no endpoint.

use crate::config::Environment;
use object_store::{Certificate, ClientOptions};
use rustls::RootCertStore;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use spurline_types::{Error, ErrorKind, Result};

/// The variable that names a file of authorities, as for AWS's own tools.
const BUNDLE: &str = "AWS_CA_BUNDLE";

/// Authorities, parsed and found usable: for clients of the library and for those of ours.
#[derive(Clone, Default)]
pub(crate) struct Roots(Vec<(Certificate, reqwest::Certificate)>);

impl Roots {
    /// Those an S3 server may be signed by.
    ///
    /// # Errors
    /// `Invalid` when `AWS_CA_BUNDLE` names a file that can't be read or has no certificate.
    pub(crate) fn of_aws(env: &Environment) -> Result<Self> {
        let Some(file) = env.get(BUNDLE) else { return Ok(Self::of_host()) };
        let wrong = |why: &dyn std::fmt::Display| {
            let what = format!("{BUNDLE} '{file}' {why}; name a PEM file of the authorities to trust, or unset it");
            Error::new(ErrorKind::Invalid, what)
        };
        let certificates: Vec<_> = CertificateDer::pem_file_iter(&file)
            .and_then(Iterator::collect)
            .map_err(|e| wrong(&format_args!("can't be read: {e}")))?;
        let roots = Self::usable(certificates);
        if roots.is_empty() { Err(wrong(&"has no certificate")) } else { Ok(roots) }
    }

    /// Those this host trusts (`SSL_CERT_FILE` and `SSL_CERT_DIR` are followed); none is no error yet.
    pub(crate) fn of_host() -> Self {
        let found = rustls_native_certs::load_native_certs();
        found.errors.iter().for_each(|e| tracing::debug!("certificate authorities of this host: {e}"));
        Self::usable(found.certs)
    }

    fn usable(certificates: Vec<CertificateDer<'static>>) -> Self {
        let mut store = RootCertStore::empty();
        let known = certificates.into_iter().filter_map(|c| {
            let certificate = (Certificate::from_der(&c).ok()?, reqwest::Certificate::from_der(&c).ok()?);
            // One that can't be parsed would be the end of the whole client.
            store.add(c).ok().map(|()| certificate)
        });
        Roots(known.collect())
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// An error where TLS is wanted and nobody could have signed for it.
    ///
    /// # Errors
    /// `Invalid`, with the remedy.
    pub(crate) fn check(&self, server: &str) -> Result<()> {
        if !self.is_empty() {
            return Ok(());
        }
        let why = format!(
            "{server} is asked over TLS, and this host trusts no certificate authority: install the package \
             ca-certificates, or name a PEM file of authorities with SSL_CERT_FILE"
        );
        Err(Error::new(ErrorKind::Invalid, why))
    }

    /// `options` with these and no other authorities.
    pub(crate) fn alone(&self, options: ClientOptions) -> ClientOptions {
        let options = options.with_no_system_certificates(true);
        self.0.iter().map(|(c, _)| c.clone()).fold(options, ClientOptions::with_root_certificate)
    }

    /// These, for a client that is to trust no other authorities.
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
        let read = || Roots::of_aws(&Environment::fixed([(BUNDLE, file.to_str().unwrap())])).err().unwrap();
        assert!(read().message().contains("bundle.pem") && read().message().contains("can't be read"), "{}", read());
        std::fs::write(&file, "nothing\n").unwrap();
        assert!(read().message().contains("has no certificate"), "{}", read());
        // In PEM, and no certificate.
        std::fs::write(&file, "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n").unwrap();
        assert_eq!(read().kind(), ErrorKind::Invalid);
        assert!(Roots::default().check("https://host").unwrap_err().message().contains("ca-certificates"));
    }
}
