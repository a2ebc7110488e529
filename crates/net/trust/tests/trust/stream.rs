//! Asynchronous streams: which peers are admitted, with and without TLS.

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer, ServerName};
use spurline_trust::{GroupTokens, RefusalReason, TlsFiles, Trust, accept_stream, connect_stream};
use spurline_types::{Error, ErrorKind, Result};
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};

const TOKEN: &str = "q5Ykm0WJ7b2uR1xTzv9sLd3f";
const OTHER: &str = "another-WJ7b2uR1xTzv9sLd3f";

fn with(token: &str, tls: bool) -> Arc<Trust> {
    let trust = Trust::with_tokens("somebody", GroupTokens::parse(token.as_bytes()).unwrap());
    if tls { trust.with_tls(None).unwrap() } else { trust }
}

/// The results of both ends; where both succeed, one message passes each way.
fn meet(one: Arc<Trust>, other: Arc<Trust>) -> (Result<()>, Result<()>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    runtime.block_on(async move {
        let (here, there) = duplex(64 << 10);
        let reader = async move {
            let mut stream = connect_stream(here, &one, "10.0.0.1:7000").await?;
            let io = |e: std::io::Error| Error::io("speaking", &e);
            stream.write_all(b"ping").await.map_err(io)?;
            stream.flush().await.map_err(io)?;
            let mut word = [0; 4];
            stream.read_exact(&mut word).await.map_err(io)?;
            assert_eq!(&word, b"pong");
            Ok(())
        };
        let node = async move {
            let mut stream = accept_stream(there, &other, "10.0.0.9:1").await.map_err(|(_, error)| error)?;
            let mut word = [0; 4];
            let io = |e: std::io::Error| Error::io("hearing", &e);
            stream.read_exact(&mut word).await.map_err(io)?;
            assert_eq!(&word, b"ping");
            stream.write_all(b"pong").await.map_err(io)?;
            stream.flush().await.map_err(io)
        };
        tokio::join!(reader, node)
    })
}

#[test]
fn members_speak_and_strangers_do_not() {
    for tls in [false, true] {
        let (one, other) = meet(with(TOKEN, tls), with(TOKEN, tls));
        one.unwrap();
        other.unwrap();
        let (one, other) = meet(with(OTHER, tls), with(TOKEN, tls));
        for error in [one.unwrap_err(), other.unwrap_err()] {
            assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error}");
            assert!(error.to_string().contains("another group token"), "{error}");
        }
    }
    let (one, other) = meet(Trust::without_checks(), Trust::without_checks());
    one.unwrap();
    other.unwrap();
    // A peer that sends no proof is refused.
    let (one, other) = meet(Trust::without_checks(), with(TOKEN, false));
    assert!(one.is_err());
    assert!(other.unwrap_err().to_string().contains("--group-token-file"));
    // One side with TLS only.
    let (one, other) = meet(with(TOKEN, true), with(TOKEN, false));
    assert!(one.is_err() && other.is_err());
    let (one, other) = meet(with(TOKEN, false), with(TOKEN, true));
    assert!(one.is_err());
    assert!(other.unwrap_err().to_string().contains("--tls"), "says what to do");
}

/// The node's result for a client certificate that its own program would not start with.
#[test]
fn a_certificate_whose_time_is_over_is_refused_and_counted() {
    let dir = tempfile::tempdir().unwrap();
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    let write = |name: &str, text: String| {
        std::fs::write(dir.path().join(name), text).unwrap();
        dir.path().join(name)
    };
    let ca = write("ca.pem", issuer.pem());
    let signed = |over: bool| {
        let mut params = CertificateParams::new(vec!["10.0.0.1".to_owned()]).unwrap();
        if over {
            params.not_after = (SystemTime::now() - Duration::from_secs(3 * 86_400)).into();
        }
        let key = KeyPair::generate().unwrap();
        (params.signed_by(&key, &issuer).unwrap(), key)
    };
    let (cert, key) = signed(false);
    let files = TlsFiles { cert: write("n.crt", cert.pem()), key: write("n.key", key.serialize_pem()), ca };
    let node = Trust::without_checks().with_tls(Some(files)).unwrap();
    let (cert, key) = signed(true);
    let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(key.serialize_der()));
    let mut roots = rustls::RootCertStore::empty();
    roots.add(issuer.der().clone()).unwrap();
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_root_certificates(roots)
        .with_client_auth_cert(vec![cert.der().clone()], key)
        .unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let (reason, error) = runtime.block_on(async {
        let (here, there) = duplex(64 << 10);
        let name = ServerName::try_from("10.0.0.1").unwrap();
        let stranger = async {
            let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
            let mut stream = connector.connect(name, here).await.unwrap();
            assert!(stream.read(&mut [0]).await.is_err(), "it receives the refusal");
        };
        tokio::join!(stranger, accept_stream(there, &node, "10.0.0.9:1")).1.map(|_| ()).unwrap_err()
    });
    assert_eq!((reason, error.kind()), (RefusalReason::Tls, ErrorKind::PermissionDenied));
    assert!(error.to_string().contains("expired 3 days ago"), "{error}");
}
