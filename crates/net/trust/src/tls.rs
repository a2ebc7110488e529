//! TLS 1.3 for TCP and control connections: with certificates of a common authority, or with a key made at start, whose owner
//! only the proof of the token identifies, bound to the connection (RFC 9266). Knows no socket.

use crate::TlsSession;
use aws_lc_rs::{rand, signature};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{Resumption, WebPkiServerVerifier};
use rustls::crypto::{CryptoProvider, aws_lc_rs as provider, verify_tls13_signature_with_raw_key};
use rustls::pki_types::pem::{self, PemObject as _};
use rustls::pki_types::{
    CertificateDer, IpAddr, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName, SubjectPublicKeyInfoDer, UnixTime,
};
use rustls::server::{AlwaysResolvesServerRawPublicKeys, WebPkiClientVerifier};
use rustls::sign::CertifiedKey;
use rustls::version::TLS13;
use rustls::{
    AlertDescription, CertificateError, ClientConfig, ClientConnection, DigitallySignedStruct, RootCertStore,
    ServerConfig, ServerConnection, SignatureScheme,
};
use spurline_types::errno::EIO;
use spurline_types::{Error, ErrorKind, Result};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The files of a certificate, in PEM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFiles {
    /// This process's certificate, and the chain to the authority.
    pub cert: PathBuf,
    /// The key.
    pub key: PathBuf,
    /// The authorities of the peers' certificates.
    pub ca: PathBuf,
}

/// The TLS configuration of connections.
pub struct TlsContext {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
    /// The certificate's file; `None` for a key made at start.
    cert: Option<PathBuf>,
}

impl TlsContext {
    /// With a key made now. The connection is encrypted but the peer is unknown: a proof of the token bound to
    /// [`TlsSession::channel_binding`] must follow.
    pub(crate) fn with_token() -> Result<TlsContext> {
        let key = signature::EcdsaKeyPair::generate_pkcs8(
            &signature::ECDSA_P256_SHA256_ASN1_SIGNING,
            &rand::SystemRandom::new(),
        )
        .map_err(|_| tls_error("can't make a key"))?;
        let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(key.as_ref().to_vec()));
        let key = provider::sign::any_ecdsa_type(&key).map_err(|e| tls_error(&e.to_string()))?;
        let public = key.public_key().ok_or_else(|| tls_error("the key has no public part"))?;
        let shown = vec![CertificateDer::from(public.as_ref().to_vec())];
        let resolver = AlwaysResolvesServerRawPublicKeys::new(Arc::new(CertifiedKey::new(shown, key)));
        let client = client_builder(&tls_error)?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(AnyKey(Arc::new(provider::default_provider()))))
            .with_no_client_auth();
        let server = server_builder(&tls_error)?.with_no_client_auth().with_cert_resolver(Arc::new(resolver));
        Ok(TlsContext::from_configs(client, server, None))
    }

    /// Reads certificates, and checks this process's own before any peer does.
    pub(crate) fn with_files(files: &TlsFiles) -> Result<TlsContext> {
        let chain: Vec<CertificateDer<'static>> = read_certificates("--tls-cert", &files.cert)?;
        let key = PrivateKeyDer::from_pem_file(&files.key)
            .map_err(|e| unreadable_file("--tls-key", &files.key, "key", &e))?;
        let mut roots = RootCertStore::empty();
        for authority in read_certificates("--tls-ca", &files.ca)? {
            roots.add(authority).map_err(|e| invalid_file(format!("--tls-ca {}: {e}", files.ca.display())))?;
        }
        let roots = Arc::new(roots);
        let crypto = Arc::new(provider::default_provider());
        let wrong = |what: &str| invalid_file(format!("--tls-ca {}: {what}", files.ca.display()));
        let peers = WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&crypto))
            .build()
            .map_err(|e| wrong(&e.to_string()))?;
        if let Err(rustls::Error::InvalidCertificate(why)) =
            peers.verify_client_cert(&chain[0], &chain[1..], UnixTime::now())
            // A node may have a certificate for servers only.
            && !matches!(why, CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. })
        {
            let shown = format!("--tls-cert {}: this certificate", files.cert.display());
            return Err(invalid_file(explain_certificate(&why, &shown, &format!("--tls-ca {}", files.ca.display()))));
        }
        let mismatch = |e: rustls::Error| {
            invalid_file(format!(
                "--tls-key {} does not belong to --tls-cert {}: {e}",
                files.key.display(),
                files.cert.display()
            ))
        };
        let nodes =
            WebPkiServerVerifier::builder_with_provider(roots, crypto).build().map_err(|e| wrong(&e.to_string()))?;
        let client = client_builder(&wrong)?
            .with_webpki_verifier(nodes)
            .with_client_auth_cert(chain.clone(), key.clone_key())
            .map_err(mismatch)?;
        let server =
            server_builder(&wrong)?.with_client_cert_verifier(peers).with_single_cert(chain, key).map_err(mismatch)?;
        Ok(TlsContext::from_configs(client, server, Some(files.cert.clone())))
    }

    fn from_configs(mut client: ClientConfig, mut server: ServerConfig, cert: Option<PathBuf>) -> TlsContext {
        // Connections are long-lived, and each connection is proved anew.
        client.resumption = Resumption::disabled();
        // Otherwise unexpected bytes would arrive on idle connections.
        server.send_tls13_tickets = 0;
        TlsContext { client: Arc::new(client), server: Arc::new(server), cert }
    }

    /// The configurations of both sides, and the certificate's file, for asynchronous streams.
    #[cfg(feature = "tokio")]
    pub(crate) fn configs(&self) -> (&Arc<ClientConfig>, &Arc<ServerConfig>, Option<&Path>) {
        (&self.client, &self.server, self.cert.as_deref())
    }

    /// The name that the certificate of `peer` (`host:port` or a host) must contain.
    pub(crate) fn server_name(&self, peer: &str) -> Result<ServerName<'static>> {
        let host =
            peer.rsplit_once(':').map_or(peer, |(host, port)| if port.parse::<u16>().is_ok() { host } else { peer });
        let host = host.trim_start_matches('[').trim_end_matches(']');
        // A certificate's address has no scope.
        let host = host.split('%').next().unwrap_or(host);
        let wrong = |why: String| Error::new(ErrorKind::Invalid, format!("{peer}: TLS: {why}"));
        match (&self.cert, host.parse::<std::net::IpAddr>()) {
            // The name of a key made at start is not checked.
            (None, _) => ServerName::try_from("spurline.invalid").map_err(|e| wrong(e.to_string())),
            (Some(_), Ok(ip)) => Ok(ServerName::IpAddress(IpAddr::from(ip))),
            (Some(_), Err(_)) => ServerName::try_from(host.to_owned()).map_err(|e| wrong(e.to_string())),
        }
    }

    /// The side that connects to `peer` (`host:port` or a host), whose certificate must contain that host.
    ///
    /// # Errors
    /// When the host is no name that a certificate can contain.
    pub fn connect_session(&self, peer: &str) -> Result<TlsSession> {
        let name = self.server_name(peer)?;
        let connection = ClientConnection::new(Arc::clone(&self.client), name)
            .map_err(|e| Error::new(ErrorKind::Invalid, format!("{peer}: TLS: {e}")))?;
        Ok(TlsSession::new(connection.into(), peer, self.cert.clone()))
    }

    /// The side that accepts a connection of `peer`.
    ///
    /// # Errors
    /// When memory is missing.
    pub fn accept_session(&self, peer: &str) -> Result<TlsSession> {
        let connection = ServerConnection::new(Arc::clone(&self.server))
            .map_err(|e| Error::new(ErrorKind::Io(EIO), format!("{peer}: TLS: {e}")))?;
        Ok(TlsSession::new(connection.into(), peer, self.cert.clone()))
    }
}

fn tls_error(what: &str) -> Error {
    Error::new(ErrorKind::Io(EIO), format!("TLS: {what}"))
}

type TlsBuilder<S> = rustls::ConfigBuilder<S, rustls::WantsVerifier>;

fn client_builder(wrong: &dyn Fn(&str) -> Error) -> Result<TlsBuilder<ClientConfig>> {
    let builder = ClientConfig::builder_with_provider(Arc::new(provider::default_provider()));
    builder.with_protocol_versions(&[&TLS13]).map_err(|e| wrong(&e.to_string()))
}

fn server_builder(wrong: &dyn Fn(&str) -> Error) -> Result<TlsBuilder<ServerConfig>> {
    let builder = ServerConfig::builder_with_provider(Arc::new(provider::default_provider()));
    builder.with_protocol_versions(&[&TLS13]).map_err(|e| wrong(&e.to_string()))
}

fn invalid_file(why: String) -> Error {
    Error::new(ErrorKind::Invalid, why)
}

fn read_certificates(flag: &str, file: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let found: std::result::Result<Vec<_>, _> = CertificateDer::pem_file_iter(file).and_then(Iterator::collect);
    let found = found.map_err(|e| unreadable_file(flag, file, "certificate", &e))?;
    if found.is_empty() {
        return Err(unreadable_file(flag, file, "certificate", &pem::Error::NoItemsFound));
    }
    Ok(found)
}

fn unreadable_file(flag: &str, file: &Path, what: &str, error: &pem::Error) -> Error {
    let shown = format!("{flag} {}", file.display());
    match error {
        pem::Error::Io(e) => {
            let kind = match e.kind() {
                std::io::ErrorKind::NotFound => ErrorKind::NotFound,
                std::io::ErrorKind::PermissionDenied => ErrorKind::PermissionDenied,
                _ => ErrorKind::Invalid,
            };
            Error::new(kind, format!("{shown}: {e}"))
        }
        pem::Error::NoItemsFound => {
            invalid_file(format!("{shown}: there is no {what} in PEM form in it (-----BEGIN …)"))
        }
        e => invalid_file(format!("{shown}: it is no {what} in PEM form: {e}")),
    }
}

/// Accepts every key: the proof of the token identifies the owner.
#[derive(Debug)]
struct AnyKey(Arc<CryptoProvider>);

impl ServerCertVerifier for AnyKey {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> std::result::Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }
    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        Err(rustls::Error::General("TLS 1.2 is not supported".into()))
    }
    fn verify_tls13_signature(
        &self,
        message: &[u8],
        key: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        let key = SubjectPublicKeyInfoDer::from(key.as_ref());
        verify_tls13_signature_with_raw_key(message, &key, signed, &self.0.signature_verification_algorithms)
    }
    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}

/// A TLS failure as text: which side showed which certificate, the fault, and the remedy.
pub(crate) fn explain_failure(error: &rustls::Error, peer: &str, own: Option<&Path>) -> Error {
    let refused = |why: String| Error::new(ErrorKind::PermissionDenied, format!("{peer}: TLS: {why}"));
    match error {
        rustls::Error::InvalidCertificate(why) => {
            refused(explain_certificate(why, "the certificate it shows", "the authorities of --tls-ca here"))
        }
        rustls::Error::NoCertificatesPresented => {
            refused("it shows no certificate: start it with --tls-cert, --tls-key and --tls-ca".into())
        }
        rustls::Error::AlertReceived(alert) => {
            let shown = own.map_or("this side".to_owned(), |file| format!("this side's --tls-cert {}", file.display()));
            refused(match alert {
                AlertDescription::CertificateExpired => {
                    format!("it refuses {shown}: by its clock the certificate has expired or is not valid yet; renew it, or correct the clocks")
                }
                AlertDescription::UnknownCA => {
                    format!("it refuses {shown}: none of its --tls-ca has signed the certificate; give both sides the same --tls-ca")
                }
                AlertDescription::CertificateRequired | AlertDescription::BadCertificate | AlertDescription::UnsupportedCertificate
                    if own.is_none() =>
                {
                    "it requires a certificate, this side has none: give --tls-cert, --tls-key and --tls-ca here too, or none of \
                     them on both sides"
                        .into()
                }
                other => format!(
                    "it refuses {shown} ({other:?}); both sides need the same kind of TLS: certificates with --tls-ca, or \
                     the group token alone"
                ),
            })
        }
        rustls::Error::InvalidMessage(_) => {
            refused(format!("it does not use TLS ({error}): start both sides with --tls, or none"))
        }
        other => refused(format!(
            "{other}; both sides need the same kind of TLS: certificates with --tls-ca, or the group token alone"
        )),
    }
}

/// Describes the fault of a certificate that a peer has `shown` and that `authority` should have signed.
fn explain_certificate(why: &CertificateError, shown: &str, authority: &str) -> String {
    match why {
        CertificateError::ExpiredContext { time, not_after } => {
            format!("{shown} expired {} ago: renew it, or correct this host's clock", span_between(not_after, time))
        }
        CertificateError::NotValidYetContext { time, not_before } => format!(
            "{shown} becomes valid in {}: this host's clock is behind, or the clock of the issuer was ahead",
            span_between(time, not_before)
        ),
        CertificateError::NotValidForNameContext { expected, presented } => format!(
            "{shown} is for {}, not for {}: reach it by a name in the certificate, or put this name (or IP address) into \
             its subject alternative names",
            if presented.is_empty() { "no name".into() } else { presented.join(", ") },
            expected.to_str()
        ),
        CertificateError::UnknownIssuer => {
            format!("{shown} is signed by none of {authority}: give both sides the authority that signs them")
        }
        CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => format!(
            "{shown} may not be used for this: its extended key usage needs serverAuth on nodes and coordinators, and \
             clientAuth on every process that connects"
        ),
        other => format!("{shown} is not valid: {other}"),
    }
}

fn span_between(from: &UnixTime, to: &UnixTime) -> String {
    show_span(to.as_secs().saturating_sub(from.as_secs()))
}

fn show_span(secs: u64) -> String {
    match secs {
        0..=119 => format!("{secs} s"),
        120..=7199 => format!("{} minutes", secs / 60),
        7200..=172_799 => format!("{} hours", secs / 3600),
        _ => format!("{} days", secs / 86_400),
    }
}
