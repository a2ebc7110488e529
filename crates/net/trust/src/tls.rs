//! TLS 1.3 for TCP and control connections: with certificates of an authority both sides know, or with a key made at
//! start, whose holder nobody can tell but by the proof of the token that is bound to the connection (RFC 9266). It knows
//! no socket.

use crate::Sealed;
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
use spurline_types::{Error, ErrorKind, Result};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The files of a certificate, in PEM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFiles {
    /// This process's certificate, and those that lead from it to the authority.
    pub cert: PathBuf,
    /// Its key.
    pub key: PathBuf,
    /// The authorities whose certificates the others may show.
    pub ca: PathBuf,
}

/// How connections are encrypted.
pub struct Tls {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
    /// The certificate's file; `None` for a key made at start.
    cert: Option<PathBuf>,
}

impl Tls {
    /// A key made now. The connection is encrypted and who is at its other end is not known: a proof of the token bound
    /// to [`Sealed::binding`] has to follow.
    pub(crate) fn with_token() -> Result<Tls> {
        let wrong = |what: &str| Error::new(ErrorKind::Io(5), format!("TLS: {what}"));
        let key = signature::EcdsaKeyPair::generate_pkcs8(
            &signature::ECDSA_P256_SHA256_ASN1_SIGNING,
            &rand::SystemRandom::new(),
        )
        .map_err(|_| wrong("no key could be made"))?;
        let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(key.as_ref().to_vec()));
        let key = provider::sign::any_ecdsa_type(&key).map_err(|e| wrong(&e.to_string()))?;
        let public = key.public_key().ok_or_else(|| wrong("the key has no public part"))?;
        let shown = vec![CertificateDer::from(public.as_ref().to_vec())];
        let resolver = AlwaysResolvesServerRawPublicKeys::new(Arc::new(CertifiedKey::new(shown, key)));
        let client = client_builder(&wrong)?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(AnyKey(Arc::new(provider::default_provider()))))
            .with_no_client_auth();
        let server = server_builder(&wrong)?.with_no_client_auth().with_cert_resolver(Arc::new(resolver));
        Ok(Tls::of(client, server, None))
    }

    /// Reads certificates, and checks this process's own before somebody else does.
    pub(crate) fn with_files(files: &TlsFiles) -> Result<Tls> {
        let chain: Vec<CertificateDer<'static>> = certificates("--tls-cert", &files.cert)?;
        let key =
            PrivateKeyDer::from_pem_file(&files.key).map_err(|e| unreadable("--tls-key", &files.key, "key", &e))?;
        let mut roots = RootCertStore::empty();
        for authority in certificates("--tls-ca", &files.ca)? {
            let wrong = |e: rustls::Error| invalid(format!("--tls-ca {}: {e}", files.ca.display()));
            roots.add(authority).map_err(wrong)?;
        }
        let (roots, crypto) = (Arc::new(roots), Arc::new(provider::default_provider()));
        let wrong = |what: &str| invalid(format!("--tls-ca {}: {what}", files.ca.display()));
        let peers = WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&crypto))
            .build()
            .map_err(|e| wrong(&e.to_string()))?;
        if let Err(rustls::Error::InvalidCertificate(why)) =
            peers.verify_client_cert(&chain[0], &chain[1..], UnixTime::now())
            // A certificate that is good for servers only is what a node may have.
            && !matches!(why, CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. })
        {
            let shown = format!("--tls-cert {}: this certificate", files.cert.display());
            return Err(invalid(certificate(&why, &shown, &format!("--tls-ca {}", files.ca.display()))));
        }
        let mismatch = |e: rustls::Error| {
            invalid(format!(
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
        Ok(Tls::of(client, server, Some(files.cert.clone())))
    }

    fn of(mut client: ClientConfig, mut server: ServerConfig, cert: Option<PathBuf>) -> Tls {
        // Connections are kept for long, and every one is proved anew.
        client.resumption = Resumption::disabled();
        // Nothing arrives on an idle connection that nobody asked for.
        server.send_tls13_tickets = 0;
        Tls { client: Arc::new(client), server: Arc::new(server), cert }
    }

    /// The configurations of both sides, and the certificate's file, for streams of a runtime.
    #[cfg(feature = "tokio")]
    pub(crate) fn parts(&self) -> (&Arc<ClientConfig>, &Arc<ServerConfig>, Option<&Path>) {
        (&self.client, &self.server, self.cert.as_deref())
    }

    /// The name that the certificate of `peer` (`host:port` or a host) has to be for.
    pub(crate) fn server_name(&self, peer: &str) -> Result<ServerName<'static>> {
        let host =
            peer.rsplit_once(':').map_or(peer, |(host, port)| if port.parse::<u16>().is_ok() { host } else { peer });
        let host = host.trim_start_matches('[').trim_end_matches(']');
        // A scope is no part of an address in a certificate.
        let host = host.split('%').next().unwrap_or(host);
        let wrong = |why: String| Error::new(ErrorKind::Invalid, format!("{peer}: TLS: {why}"));
        match (&self.cert, host.parse::<std::net::IpAddr>()) {
            // Nobody looks at the name of a key made at start.
            (None, _) => ServerName::try_from("spurline.invalid").map_err(|e| wrong(e.to_string())),
            (Some(_), Ok(ip)) => Ok(ServerName::IpAddress(IpAddr::from(ip))),
            (Some(_), Err(_)) => ServerName::try_from(host.to_owned()).map_err(|e| wrong(e.to_string())),
        }
    }

    /// The side that connects, to `peer` (`host:port` or a host), whose certificate has to be for that host.
    ///
    /// # Errors
    /// When the host is no name that a certificate can have.
    pub fn connect(&self, peer: &str) -> Result<Sealed> {
        let wrong = |e: rustls::Error| Error::new(ErrorKind::Invalid, format!("{peer}: TLS: {e}"));
        let name = self.server_name(peer)?;
        let connection = ClientConnection::new(Arc::clone(&self.client), name).map_err(wrong)?;
        Ok(Sealed::new(connection.into(), peer, self.cert.clone()))
    }

    /// The side that was connected to, by `peer`.
    ///
    /// # Errors
    /// When there is no memory for it.
    pub fn accept(&self, peer: &str) -> Result<Sealed> {
        let wrong = |e: rustls::Error| Error::new(ErrorKind::Io(5), format!("{peer}: TLS: {e}"));
        let connection = ServerConnection::new(Arc::clone(&self.server)).map_err(wrong)?;
        Ok(Sealed::new(connection.into(), peer, self.cert.clone()))
    }
}

type Builder<S> = rustls::ConfigBuilder<S, rustls::WantsVerifier>;

fn client_builder(wrong: &dyn Fn(&str) -> Error) -> Result<Builder<ClientConfig>> {
    let builder = ClientConfig::builder_with_provider(Arc::new(provider::default_provider()));
    builder.with_protocol_versions(&[&TLS13]).map_err(|e| wrong(&e.to_string()))
}

fn server_builder(wrong: &dyn Fn(&str) -> Error) -> Result<Builder<ServerConfig>> {
    let builder = ServerConfig::builder_with_provider(Arc::new(provider::default_provider()));
    builder.with_protocol_versions(&[&TLS13]).map_err(|e| wrong(&e.to_string()))
}

fn invalid(why: String) -> Error {
    Error::new(ErrorKind::Invalid, why)
}

fn certificates(flag: &str, file: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let found: std::result::Result<Vec<_>, _> = CertificateDer::pem_file_iter(file).and_then(Iterator::collect);
    let found = found.map_err(|e| unreadable(flag, file, "certificate", &e))?;
    if found.is_empty() {
        return Err(unreadable(flag, file, "certificate", &pem::Error::NoItemsFound));
    }
    Ok(found)
}

fn unreadable(flag: &str, file: &Path, what: &str, error: &pem::Error) -> Error {
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
        pem::Error::NoItemsFound => invalid(format!("{shown}: there is no {what} in PEM form in it (-----BEGIN …)")),
        e => invalid(format!("{shown}: it is no {what} in PEM form: {e}")),
    }
}

/// Takes every key: the proof of the token tells whose it is.
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
        Err(rustls::Error::General("TLS 1.2 is not spoken here".into()))
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

/// A TLS failure in words: who showed what, what is wrong with it, what to do.
pub(crate) fn explain(error: &rustls::Error, peer: &str, own: Option<&Path>) -> Error {
    let refused = |why: String| Error::new(ErrorKind::PermissionDenied, format!("{peer}: TLS: {why}"));
    match error {
        rustls::Error::InvalidCertificate(why) => {
            refused(certificate(why, "the certificate it shows", "the authorities of --tls-ca here"))
        }
        rustls::Error::NoCertificatesPresented => {
            refused("it shows no certificate: start it with --tls-cert, --tls-key and --tls-ca".into())
        }
        rustls::Error::AlertReceived(alert) => {
            let shown = own.map_or("this side".to_owned(), |file| format!("this side's --tls-cert {}", file.display()));
            refused(match alert {
                AlertDescription::CertificateExpired => {
                    format!("it refuses {shown}: by its clock the certificate is over or not yet valid; renew it, or set the clocks right")
                }
                AlertDescription::UnknownCA => {
                    format!("it refuses {shown}: none of its --tls-ca has signed the certificate; give both sides the same --tls-ca")
                }
                AlertDescription::CertificateRequired | AlertDescription::BadCertificate | AlertDescription::UnsupportedCertificate
                    if own.is_none() =>
                {
                    "it wants a certificate, this side has none: give --tls-cert, --tls-key and --tls-ca here too, or none of \
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
            refused(format!("what it says is no TLS ({error}): start both sides with --tls, or none"))
        }
        other => refused(format!(
            "{other}; both sides need the same kind of TLS: certificates with --tls-ca, or the group token alone"
        )),
    }
}

/// What is wrong with a certificate, `shown` by somebody and to be signed by `authority`.
fn certificate(why: &CertificateError, shown: &str, authority: &str) -> String {
    let apart = |from: &UnixTime, to: &UnixTime| span(to.as_secs().saturating_sub(from.as_secs()));
    match why {
        CertificateError::ExpiredContext { time, not_after } => {
            format!("{shown} was valid until {} ago: renew it, or set this host's clock right", apart(not_after, time))
        }
        CertificateError::NotValidYetContext { time, not_before } => format!(
            "{shown} is valid only in {}: this host's clock is behind, or that of who made the certificate was ahead",
            apart(time, not_before)
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
             clientAuth on whoever connects"
        ),
        other => format!("{shown} is not good: {other}"),
    }
}

fn span(secs: u64) -> String {
    match secs {
        0..=119 => format!("{secs} s"),
        120..=7199 => format!("{} minutes", secs / 60),
        7200..=172_799 => format!("{} hours", secs / 3600),
        _ => format!("{} days", secs / 86_400),
    }
}
