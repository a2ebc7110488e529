//! TLS between the files of two processes: successful handshakes, and the messages of failed ones.

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use spurline_trust::{GroupTokens, TlsFiles, TlsSession, Trust};
use spurline_types::{ErrorKind, Result};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

const TOKEN: &[u8] = b"q5Ykm0WJ7b2uR1xTzv9sLd3f";

struct Authority(CertifiedIssuer<'static, KeyPair>, PathBuf);

fn authority(dir: &Path, name: &str) -> Authority {
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.distinguished_name.push(DnType::CommonName, name);
    let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    let file = dir.join(format!("{name}.pem"));
    std::fs::write(&file, issuer.pem()).unwrap();
    Authority(issuer, file)
}

/// A certificate for `names`, valid from `from` to `to` days from now.
fn files(dir: &Path, authority: &Authority, names: &[&str], (from, to): (i64, i64)) -> TlsFiles {
    let mut params = CertificateParams::new(names.iter().map(ToString::to_string).collect::<Vec<_>>()).unwrap();
    let day = |days: i64| {
        let span = Duration::from_secs(days.unsigned_abs() * 86_400);
        if days < 0 { (SystemTime::now() - span).into() } else { (SystemTime::now() + span).into() }
    };
    (params.not_before, params.not_after) = (day(from), day(to));
    let key = KeyPair::generate().unwrap();
    let cert = params.signed_by(&key, &authority.0).unwrap();
    let stem = format!("{}-{}-{from}-{to}", authority.1.file_stem().unwrap().display(), names.join("-"));
    let at = |end: &str| dir.join(format!("{stem}.{end}"));
    std::fs::write(at("crt"), cert.pem()).unwrap();
    std::fs::write(at("key"), key.serialize_pem()).unwrap();
    TlsFiles { cert: at("crt"), key: at("key"), ca: authority.1.clone() }
}

fn with(files: Option<TlsFiles>) -> Result<Arc<Trust>> {
    Trust::with_tokens("somebody", GroupTokens::parse(TOKEN).unwrap()).with_tls(files)
}

/// Moves bytes between two ends until both have finished the handshake and the reader's message has arrived; a
/// refusing end informs the other.
fn meet(reader: &Trust, node: &Trust, host: &str) -> Result<(TlsSession, TlsSession)> {
    let mut reader = reader.tls().unwrap().connect_session(host)?;
    let mut node = node.tls().unwrap().accept_session("mount")?;
    let (mut scratch, mut greeted) = ([0; 64], false);
    for turn in 0..20 {
        let at_node = turn % 2 == 0;
        let (from, to) = if at_node { (&mut reader, &mut node) } else { (&mut node, &mut reader) };
        let mut wire = Vec::new();
        from.flush_to(&mut wire).unwrap();
        if at_node && !from.is_handshaking() && !greeted {
            greeted = true;
            from.seal_to(b"hello", &mut wire).unwrap();
        }
        match to.decrypt_into(&mut &wire[..], &mut scratch) {
            Ok(5) if at_node => {
                assert_eq!(&scratch[..5], b"hello");
                return Ok((reader, node));
            }
            Ok(n) => assert_eq!(n, 0),
            Err(error) if at_node => {
                let mut alert = Vec::new();
                to.flush_to(&mut alert).unwrap();
                let heard = from.decrypt_into(&mut &alert[..], &mut scratch).expect_err("the reader receives an alert");
                return Err(heard.context(error));
            }
            Err(error) => return Err(error),
        }
    }
    panic!("no agreement");
}

fn fails(reader: &Trust, node: &Trust, host: &str, says: &[&str]) {
    let error = meet(reader, node, host).map(|_| ()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error}");
    says.iter().for_each(|part| assert!(error.to_string().contains(part), "{part:?} is missing in: {error}"));
}

#[test]
fn the_token_alone_encrypts_and_both_ends_know_the_same_binding() {
    let (reader, node) = (with(None).unwrap(), with(None).unwrap());
    let (one, other) = meet(&reader, &node, "10.0.0.1:7000").unwrap();
    assert_eq!(one.channel_binding().unwrap(), other.channel_binding().unwrap());
    // A man in the middle has two connections with two bindings.
    let (second, _) = meet(&reader, &node, "[fe80::1%eth0]:7000").unwrap();
    assert_ne!(one.channel_binding().unwrap(), second.channel_binding().unwrap());
    let error = Trust::without_checks().with_tls(None).map(|_| ()).unwrap_err();
    assert!(error.to_string().contains("--group-token-file"), "{error}");
}

#[test]
fn certificates_are_checked_on_both_sides_and_errors_say_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let (ours, theirs) = (authority(dir.path(), "ours"), authority(dir.path(), "theirs"));
    let good = |authority, names: &[&str]| with(Some(files(dir.path(), authority, names, (-1, 30)))).unwrap();
    let mount = good(&ours, &["mount1"]);
    let node = good(&ours, &["node1", "10.0.0.1"]);
    for host in ["node1:7000", "10.0.0.1:7000"] {
        let (one, other) = meet(&mount, &node, host).unwrap();
        assert_eq!(one.channel_binding().unwrap(), other.channel_binding().unwrap());
    }
    fails(&mount, &node, "node2:7000", &["node2", "is for", "node1", "subject alternative names"]);
    fails(&mount, &good(&theirs, &["node1"]), "node1:7000", &["signed by none of", "--tls-ca"]);
    let stranger = TlsFiles { ca: ours.1.clone(), ..files(dir.path(), &theirs, &["mount2"], (-1, 30)) };
    assert!(with(Some(stranger)).err().unwrap().to_string().contains("signed by none of --tls-ca"));
    // The same from the other side: the node refuses the mount, and the mount's message names the refused file and
    // the reason.
    let both = dir.path().join("both.pem");
    std::fs::write(&both, [std::fs::read(&ours.1).unwrap(), std::fs::read(&theirs.1).unwrap()].concat()).unwrap();
    let stranger = TlsFiles { ca: both, ..files(dir.path(), &theirs, &["mount2"], (-1, 30)) };
    let stranger = with(Some(stranger)).unwrap();
    fails(&stranger, &node, "node1:7000", &["it refuses this side's --tls-cert", "theirs-mount2", "--tls-ca"]);
    // One side with certificates, the other with the token alone.
    fails(&with(None).unwrap(), &node, "node1:7000", &["both sides need the same kind of TLS"]);
    fails(&mount, &with(None).unwrap(), "node1:7000", &["both sides need the same kind of TLS"]);
}

#[test]
fn a_certificate_out_of_its_time_is_refused_before_it_is_shown() {
    let dir = tempfile::tempdir().unwrap();
    let ours = authority(dir.path(), "ours");
    let over = with(Some(files(dir.path(), &ours, &["n"], (-30, -3)))).err().unwrap();
    assert!(over.to_string().contains("expired 3 days ago") && over.kind() == ErrorKind::Invalid, "{over}");
    assert!(over.to_string().contains("ours-n--30--3.crt"), "{over}");
    let early = with(Some(files(dir.path(), &ours, &["n"], (5, 9)))).err().unwrap();
    assert!(early.to_string().contains("days: this host's clock is behind"), "{early}");
}

#[test]
fn files_that_are_not_what_they_should_be() {
    let dir = tempfile::tempdir().unwrap();
    let ours = authority(dir.path(), "ours");
    let (one, two) = (files(dir.path(), &ours, &["a"], (-1, 9)), files(dir.path(), &ours, &["b"], (-1, 9)));
    let says = |files: TlsFiles, kind, part: &str| {
        let error = with(Some(files)).err().unwrap();
        assert!(error.kind() == kind && error.to_string().contains(part), "{error}");
    };
    says(TlsFiles { cert: "/no/such".into(), ..one.clone() }, ErrorKind::NotFound, "--tls-cert /no/such");
    says(TlsFiles { key: one.cert.clone(), ..one.clone() }, ErrorKind::Invalid, "there is no key in PEM form");
    says(TlsFiles { ca: one.key.clone(), ..one.clone() }, ErrorKind::Invalid, "there is no certificate");
    says(TlsFiles { key: two.key, ..one }, ErrorKind::Invalid, "does not belong to --tls-cert");
}

proptest::proptest! {
    #[test]
    fn no_bytes_make_it_panic_or_give_plain_ones(bytes: Vec<u8>, cut in 1usize..200) {
        let trust = with(None).unwrap();
        let tls = trust.tls().unwrap();
        let record = [&[0x16, 3, 3, (bytes.len() >> 8) as u8, bytes.len() as u8], &bytes[..]].concat();
        for text in [&bytes, &record] {
            for mut side in [tls.accept_session("stranger").unwrap(), tls.connect_session("10.0.0.1:1").unwrap()] {
                for part in text.chunks(cut) {
                    match side.decrypt_into(&mut &part[..], &mut [0; 32]) {
                        Ok(plain) => assert_eq!(plain, 0),
                        Err(_) => break,
                    }
                }
            }
        }
    }
}
