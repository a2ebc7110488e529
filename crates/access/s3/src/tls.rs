//! The certificate of an endpoint: read from files, and read again when these change. Knows no socket.

use rustls::ServerConfig;
use rustls::crypto::aws_lc_rs as provider;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use spurline_trust::WatchedFiles;
use spurline_types::{Error, ErrorKind, Result};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The certificate that clients verify.
pub struct EndpointCertificate(WatchedFiles<Arc<ServerConfig>>);

impl EndpointCertificate {
    /// Reads a certificate with its chain, and the key, both in PEM.
    ///
    /// # Errors
    /// `Invalid` for files that can't be read, or do not belong together; the message names the flag.
    pub fn read_files(cert: &Path, key: &Path) -> Result<Self> {
        let files: Vec<PathBuf> = vec![cert.to_owned(), key.to_owned()];
        let cert = cert.to_owned();
        let key = key.to_owned();
        Ok(EndpointCertificate(WatchedFiles::new(files, Box::new(move || read_config(&cert, &key).map(Arc::new)))?))
    }

    pub(crate) fn config(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.0.get())
    }
}

fn read_config(cert: &Path, key: &Path) -> Result<ServerConfig> {
    let invalid = |flag: &str, file: &Path, why: String| {
        Error::new(ErrorKind::Invalid, format!("{flag} {}: {why}; give a file in PEM", file.display()))
    };
    let chain: std::result::Result<Vec<CertificateDer<'static>>, _> =
        CertificateDer::pem_file_iter(cert).and_then(Iterator::collect);
    let chain = chain.map_err(|error| invalid("--s3-tls-cert", cert, error.to_string()))?;
    if chain.is_empty() {
        return Err(invalid("--s3-tls-cert", cert, "there is no certificate in the file".to_owned()));
    }
    let own_key = PrivateKeyDer::from_pem_file(key).map_err(|error| invalid("--s3-tls-key", key, error.to_string()))?;
    let builder = ServerConfig::builder_with_provider(Arc::new(provider::default_provider()));
    let versions = builder.with_safe_default_protocol_versions();
    let versions = versions.map_err(|error| invalid("--s3-tls-cert", cert, error.to_string()))?;
    let config = versions.with_no_client_auth().with_single_cert(chain, own_key);
    let mut config =
        config.map_err(|error| invalid("--s3-tls-key", key, format!("it is not the certificate's: {error}")))?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(config)
}
