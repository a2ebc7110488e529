//! Authentication and encryption: settings and checks. Opens no file and knows no secret.

use crate::values::absolute_path;
use spurline_types::fault::Fault;
use std::path::PathBuf;

settings! {
    /// Authentication and encryption; the same for every client and server.
    #[command(next_help_heading = "Trust")]
    pub struct RawTrust {
        /// File with the group's secret, the same on every member [default: none, a node listens on loopback only]
        ///
        /// Both sides of every connection prove that they have the secret, without sending it; others are refused. The
        /// file has one secret per line: the first is sent as proof, all are accepted, so that secrets can be replaced
        /// without downtime. The file is read again when it changes. Make one with: (umask 077; openssl rand -base64 32
        /// > FILE)
        #[arg(long, value_name = "FILE")]
        pub group_token_file: Option<PathBuf>,
        /// Encrypt TCP data and control connections with TLS 1.3; required on both sides
        ///
        /// Without --tls-cert the group token authenticates the peer, by a proof bound to the connection. Data over RDMA
        /// is not encrypted.
        #[arg(long)]
        pub tls: bool,
        /// Certificate of this process in PEM, with its chain; implies --tls
        ///
        /// Both sides present and verify certificates. A node's certificate must match the name or address that clients
        /// use. The files are read again when they change.
        #[arg(long, value_name = "FILE", requires_all = ["tls_key", "tls_ca"])]
        pub tls_cert: Option<PathBuf>,
        /// Private key of the certificate in PEM
        #[arg(long, value_name = "FILE", requires = "tls_cert")]
        pub tls_key: Option<PathBuf>,
        /// Certificates in PEM of the authorities that sign the group's certificates
        #[arg(long, value_name = "FILE", requires = "tls_cert")]
        pub tls_ca: Option<PathBuf>,
    }
}

/// How TCP and control connections are encrypted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TlsConfig {
    /// With a key made at start; the token authenticates the holder.
    Token,
    /// With certificates, absolute paths.
    Files {
        /// This process's certificate.
        cert: PathBuf,
        /// The key.
        key: PathBuf,
        /// The authority's certificates.
        ca: PathBuf,
    },
}

/// What peers must prove.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TrustConfig {
    /// The file of the group token, absolute.
    pub token_file: Option<PathBuf>,
    /// How connections are encrypted; `None` for plain connections.
    pub tls: Option<TlsConfig>,
    /// Serve unauthenticated peers.
    pub allow_anyone: bool,
}

impl TrustConfig {
    /// Whether a peer must authenticate, over TCP at least.
    pub fn requires_proof(&self) -> bool {
        self.token_file.is_some() || self.tls.is_some()
    }

    /// Refuses to serve unauthenticated peers over the network. `could` names the harm; `reached` are the addresses over TCP,
    /// `rails` the addresses over RDMA. Both are empty when only local users can connect.
    ///
    /// # Errors
    /// Exit code 2, unless --allow-anyone is given.
    pub fn check_reach(&self, reached: &[String], rails: &[String], could: &str) -> Result<(), Fault> {
        if self.allow_anyone || self.token_file.is_some() {
            return Ok(());
        }
        // Certificates are checked over TCP only.
        let reached = if self.tls.is_some() { rails.to_vec() } else { [reached, rails].concat() };
        if reached.is_empty() {
            return Ok(());
        }
        Err(Fault::usage(
            format!("without a group token, any host that reaches {} could {could}", reached.join(" or ")),
            "give --group-token-file FILE here and on every member of the group (make it with: umask 077; openssl rand \
             -base64 32 > FILE), or --allow-anyone if every host on that network may do so",
        ))
    }
}

impl RawTrust {
    /// Checks that the flags fit together.
    ///
    /// # Errors
    /// When flags contradict each other (exit code 2).
    pub fn check(&self, allow_anyone: bool) -> Result<TrustConfig, Fault> {
        let token_file = self.group_token_file.as_deref().map(absolute_path);
        let tls = match (&self.tls_cert, &self.tls_key, &self.tls_ca) {
            (Some(cert), Some(key), Some(ca)) => {
                Some(TlsConfig::Files { cert: absolute_path(cert), key: absolute_path(key), ca: absolute_path(ca) })
            }
            (None, None, None) if !self.tls => None,
            (None, None, None) if token_file.is_some() => Some(TlsConfig::Token),
            (None, None, None) => {
                return Err(Fault::usage(
                    "--tls alone does not authenticate the peer",
                    "give --group-token-file too, or --tls-cert, --tls-key and --tls-ca",
                ));
            }
            _ => {
                return Err(Fault::usage(
                    "--tls-cert, --tls-key and --tls-ca belong together, and one of them is missing",
                    "give all three, or --tls with --group-token-file and none of them",
                ));
            }
        };
        let config = TrustConfig { token_file, tls, allow_anyone };
        if config.requires_proof() && allow_anyone {
            return Err(Fault::usage(
                "--allow-anyone contradicts --group-token-file and certificates: it admits unauthenticated \
                 peers, and they require proof",
                "leave one of them out",
            ));
        }
        Ok(config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strangers_are_kept_out_unless_someone_said_so() {
        let far = ["10.0.0.1:7000".to_owned()];
        let fault = TrustConfig::default().check_reach(&far, &[], "read").unwrap_err().to_string();
        for part in ["10.0.0.1:7000", "--group-token-file", "openssl rand", "--allow-anyone"] {
            assert!(fault.contains(part), "{fault}");
        }
        TrustConfig::default().check_reach(&[], &[], "read").unwrap();
        RawTrust::default().check(true).unwrap().check_reach(&far, &far, "read").unwrap();
        let args = RawTrust { group_token_file: Some("/t".into()), ..RawTrust::default() };
        args.check(false).unwrap().check_reach(&far, &far, "read").unwrap();
        assert!(args.check(true).unwrap_err().to_string().contains("contradict"));
        // TLS needs authentication, and RDMA uses no certificates.
        assert!(RawTrust { tls: true, ..RawTrust::default() }.check(false).is_err());
        assert_eq!(RawTrust { tls: true, ..args }.check(false).unwrap().tls, Some(TlsConfig::Token));
        let file = || Some("/f".into());
        let files = RawTrust { tls_cert: file(), tls_key: file(), tls_ca: file(), ..RawTrust::default() };
        let files = files.check(false).unwrap();
        files.check_reach(&far, &[], "read").unwrap();
        files.check_reach(&[], &far, "read").unwrap_err();
    }
}
