//! A coordinator: settings and checks. Opens no file and no socket.

use crate::host::HostLimits;
use crate::log::{LogConfig, MetricsConfig, RawLog};
use crate::net::split_networks;
use crate::trust::{RawTrust, TrustConfig};
use crate::values::absolute_path;
use spurline_membership::url::{EtcdUrl, RegistryUrl as Registry};
use spurline_types::fault::Fault;
use std::path::{Path, PathBuf};

settings! {
    /// A coordinator.
    pub struct RawCoordinator {
        /// Interfaces, addresses or CIDRs to listen on: IF[:IF]; IPv6 in brackets [default: loopback only]
        #[arg(long, value_name = "IF[:IF]", help_heading = "Network")]
        pub group_network: Option<String>,
        /// Port to serve on; 0 chooses a free port and prints it
        #[arg(long, value_name = "PORT", help_heading = "Network")]
        pub group_port: u16 = 0,
        /// Serve every client that can reach the port, without a group token
        ///
        /// For networks where every user may register nodes and start jobs. Nodes and mounts still prove the group token
        /// to each other.
        #[arg(long, help_heading = "Trust")]
        pub allow_anyone: bool,
        /// Authentication of nodes and mounts here, and of jobs at nodes.
        #[command(flatten)]
        pub trust: RawTrust,
        /// File that keeps the node list across restarts; none keeps it in memory only [default:
        /// /var/lib/spurline/coordinator.json, or below ~/.local/state/spurline when not root]
        ///
        /// Jobs (spurline load --submit) are kept beside it.
        #[arg(long, value_name = "FILE", help_heading = "Coordinator")]
        pub state_file: Option<PathBuf>,
        /// etcd that keeps the jobs of several coordinators: etcd://HOST:PORT[,…] [default: beside --state-file]
        ///
        /// Coordinators with the same store share the jobs: one of them runs each, any of them knows it, and after a
        /// crash another continues it. They find the nodes in this etcd: give nodes and mounts --registry
        /// etcd://HOST:PORT.
        #[arg(long, value_name = "URL", help_heading = "Coordinator")]
        pub job_store: Option<Registry>,
        /// Logs and metrics.
        #[command(flatten)]
        pub log: RawLog,
    }
}

/// A coordinator, ready to run.
#[derive(Debug, Clone)]
pub struct CoordinatorConfig {
    /// Interface names, addresses or CIDRs; empty for loopback only.
    pub group_network: Vec<String>,
    /// Fixed port, or 0 for a free port.
    pub port: u16,
    /// The file with the list of nodes; `None` for memory only.
    pub state_file: Option<PathBuf>,
    /// The store of jobs shared with other coordinators; `None` for the state file.
    pub job_store: Option<EtcdUrl>,
    /// Authentication of nodes and mounts, and of jobs towards nodes.
    pub trust: TrustConfig,
    /// Logs.
    pub log: LogConfig,
    /// The metrics page.
    pub metrics: MetricsConfig,
}

impl RawCoordinator {
    /// Checks everything that can be checked before the coordinator starts.
    ///
    /// # Errors
    /// Exit code 2 for wrong values, 3 for a missing directory.
    pub fn check(self, host: &HostLimits) -> Result<CoordinatorConfig, Fault> {
        let state_file = match self.state_file {
            Some(file) if file.as_os_str() == "none" => None,
            Some(file) => Some(in_a_directory("--state-file", &absolute_path(&file))?),
            None if host.root => Some(PathBuf::from("/var/lib/spurline/coordinator.json")),
            None => host.home.as_ref().map(|home| home.join(".local/state/spurline/coordinator.json")),
        };
        let (log, metrics) = self.log.check()?;
        Ok(CoordinatorConfig {
            group_network: self.group_network.as_deref().map(split_networks).transpose()?.unwrap_or_default(),
            port: self.group_port,
            state_file,
            job_store: match self.job_store {
                None => None,
                Some(Registry::Etcd(url)) => Some(url),
                Some(other) => {
                    return Err(Fault::usage(
                        format!("--job-store {other} cannot store jobs"),
                        "give etcd://HOST:PORT, or leave it out: then jobs are kept beside --state-file",
                    ));
                }
            },
            trust: self.trust.check(self.allow_anyone)?,
            log,
            metrics,
        })
    }
}

/// A file whose directory must exist: a misspelt directory is not created.
fn in_a_directory(flag: &str, file: &Path) -> Result<PathBuf, Fault> {
    match file.parent() {
        Some(dir) if !dir.is_dir() => Err(Fault::missing(
            format!("{flag} {}: there is no directory {}", file.display(), dir.display()),
            format!("make it (mkdir -p {}), or name another file", dir.display()),
        )),
        _ => Ok(file.to_owned()),
    }
}
