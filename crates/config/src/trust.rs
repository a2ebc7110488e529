//! Who may join: the flags, and what is checked of them without opening a file. It knows no secret.

use crate::fault::Fault;
use crate::words::absolute;
use clap::Args;
use std::path::PathBuf;

/// Flags of what peers prove to each other; the same for everything that connects or listens.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Trust")]
pub struct TrustArgs {
    /// File with the secret of the group, the same on every member [default: none, a node listens on loopback only]
    ///
    /// Both sides of every connection prove that they hold it, without sending it; who does not is refused. One secret
    /// a line: the first is shown, all are accepted, so that a new one can be brought in while all goes on. The file is
    /// read again when it changes. Make one with: (umask 077; openssl rand -base64 32 > FILE)
    #[arg(long, value_name = "FILE")]
    pub group_token_file: Option<PathBuf>,
}

/// What peers have to prove.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TrustConfig {
    /// The file of the group token, absolute.
    pub token_file: Option<PathBuf>,
    /// Serve whoever comes.
    pub allow_anyone: bool,
}

impl TrustConfig {
    /// Whether a peer has to prove anything.
    pub fn asks(&self) -> bool {
        self.token_file.is_some()
    }

    /// Refuses to be reached by strangers: `reached` says where, and is empty when only this machine is.
    ///
    /// # Errors
    /// When nobody said that everybody may (exit 2).
    pub fn check_reach(&self, reached: &[String]) -> Result<(), Fault> {
        if reached.is_empty() || self.asks() || self.allow_anyone {
            return Ok(());
        }
        Err(Fault::usage(
            format!(
                "without a group token whoever reaches {} could read all this node may fetch",
                reached.join(" or ")
            ),
            "give --group-token-file FILE here and on every mount and node of the group (make it with: umask 077; \
             openssl rand -base64 32 > FILE), or --allow-anyone when all who reach that network may read everything",
        ))
    }
}

impl TrustArgs {
    /// Checks that the words fit together.
    ///
    /// # Errors
    /// When they contradict each other (exit 2).
    pub fn check(self, allow_anyone: bool) -> Result<TrustConfig, Fault> {
        let config = TrustConfig { token_file: self.group_token_file.as_deref().map(absolute), allow_anyone };
        if config.asks() && allow_anyone {
            return Err(Fault::usage(
                "--allow-anyone and --group-token-file contradict each other: one lets everybody in, the other nobody \
                 without the token",
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
        let fault = TrustConfig::default().check_reach(&far).unwrap_err().to_string();
        for part in ["10.0.0.1:7000", "--group-token-file", "openssl rand", "--allow-anyone"] {
            assert!(fault.contains(part), "{fault}");
        }
        TrustConfig::default().check_reach(&[]).unwrap();
        TrustArgs::default().check(true).unwrap().check_reach(&far).unwrap();
        let args = TrustArgs { group_token_file: Some("/t".into()) };
        args.clone().check(false).unwrap().check_reach(&far).unwrap();
        assert!(args.check(true).unwrap_err().to_string().contains("contradict"));
    }
}
