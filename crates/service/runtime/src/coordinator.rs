//! Starts a coordinator: the list of a group's nodes, the jobs and the admin services. Knows no signal and no command line.

use crate::admin::{AdminServices, ProcessTarget};
use crate::jobs::group::{GroupJobs, OpenRegistry};
use crate::setup::CreatedFolder;
use crate::{group, setup};
use spurline_config::{CoordinatorConfig, Fault};
use spurline_membership::url::RegistryUrl;
use spurline_membership::{CoordinatorServer, JobStore, open_registry};
use spurline_net_tcp::group_addresses;
use spurline_observe::documents::{CoordinatedGroup, CoordinatorStatus, GroupNode, ProcessRole};
use spurline_observe::locate::SocketOwner;
use spurline_types::{Error, ErrorKind, Stats};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

/// A coordinator that serves.
pub struct RunningCoordinator {
    config: CoordinatorConfig,
    listening: Vec<String>,
    /// Addresses that other machines reach.
    far: Vec<String>,
    jobs: Arc<GroupJobs>,
    admin: AdminServices,
    /// The directory of jobs that nothing else keeps.
    scratch: Option<tempfile::TempDir>,
    _coordinator: Arc<CoordinatorServer>,
    /// The directory of the state file, if this start made the directory.
    fresh: Option<CreatedFolder>,
}

/// Starts the coordinator; which serves when this returns.
///
/// # Errors
/// When the coordinator can't start.
pub fn start_coordinator(config: CoordinatorConfig) -> Result<RunningCoordinator, Fault> {
    let started = Instant::now();
    let stats = Arc::new(Stats::default());
    let ips = match config.group_network.as_slice() {
        [] => vec![IpAddr::V4(Ipv4Addr::LOCALHOST)],
        some => group_addresses(&some.join(","))?,
    };
    let far: Vec<String> = ips.iter().filter(|ip| !ip.is_loopback()).map(ToString::to_string).collect();
    config.trust.check_reach(&far, &[], "enter the group as a node and have jobs done")?;
    let trust = setup::open_trust(&config.trust, &group::hostname())?;
    let listen = ips.into_iter().map(|ip| SocketAddr::new(ip, config.port)).collect();
    let settings = spurline_membership::CoordinatorServerConfig {
        listen,
        file: config.state_file.clone(),
        trust: Arc::clone(&trust),
        ..Default::default()
    };
    let fresh = CreatedFolder::create_missing(config.state_file.as_deref().and_then(std::path::Path::parent));
    let coordinator = Arc::new(CoordinatorServer::start(settings, Arc::clone(&stats))?);
    let (jobs_dir, scratch) = match &config.state_file {
        Some(file) => (file.with_extension("jobs"), None),
        None => {
            // A directory of this process, which is removed with the process.
            let own = private_dir()?;
            (own.path().to_owned(), Some(own))
        }
    };
    let registry: Arc<OpenRegistry> = match &config.job_store {
        // Coordinators that share jobs find the nodes at the same place as the jobs.
        Some(url) => {
            let url = RegistryUrl::Etcd(url.clone());
            let trust = Arc::clone(&trust);
            Arc::new(move |group: &str| open_registry(&url, group, &trust).ok())
        }
        None => {
            // The coordinator owns the jobs.
            let coordinator = Arc::downgrade(&coordinator);
            Arc::new(move |group: &str| coordinator.upgrade().map(|coordinator| coordinator.local_registry(group)))
        }
    };
    let store = match &config.job_store {
        None => None,
        Some(url) => {
            // Unique to this process, also when port and number are reused.
            let at = coordinator.addresses().first().map_or_else(String::new, ToString::to_string);
            let began = std::time::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_nanos());
            let owner = format!("{}/{at}/{}/{began:x}", group::hostname(), std::process::id());
            Some(JobStore::open(url, &owner)?)
        }
    };
    let jobs = GroupJobs::start(&jobs_dir, store, registry, trust, Arc::clone(&stats))?;
    coordinator.set_job_handler(Arc::clone(&jobs) as _);
    let listening: Vec<String> = coordinator.addresses().iter().map(ToString::to_string).collect();
    let look = Arc::new(ProcessTarget {
        stats,
        started,
        gauges: {
            let jobs = Arc::clone(&jobs);
            Box::new(move |stats| jobs.set_gauges(stats))
        },
        info: Box::new(|_| Err(Error::new(ErrorKind::Unsupported, "a coordinator holds no files"))),
        role: {
            let coordinator = Arc::clone(&coordinator);
            let listening = listening.clone();
            let job_store = config.job_store.as_ref().map(|url| format!("etcd://{url}"));
            Box::new(move || {
                ProcessRole::Coordinator(CoordinatorStatus {
                    version: env!("CARGO_PKG_VERSION").to_owned(),
                    addresses: listening.clone(),
                    job_store: job_store.clone(),
                    groups: coordinated_groups(&coordinator),
                })
            })
        },
        jobs: Err("a coordinator takes jobs at its port: give --registry coordinator://HOST:PORT and --source URL"),
        export: None,
        upgrade: None,
        health: Box::new(|| Ok(())),
        metrics_address: OnceLock::new(),
    });
    let owner = listening.first().cloned().unwrap_or_default();
    let admin = AdminServices::open(SocketOwner::Node(&owner), &config.metrics, &look)?;
    Ok(RunningCoordinator {
        config,
        listening,
        far,
        jobs,
        admin,
        scratch,
        _coordinator: coordinator,
        fresh: Some(fresh),
    })
}

/// The groups of a coordinator with the nodes, for `status`.
fn coordinated_groups(coordinator: &CoordinatorServer) -> Vec<CoordinatedGroup> {
    let mut groups = Vec::new();
    for (name, members) in coordinator.list_groups() {
        groups.push(CoordinatedGroup { name, nodes: members.iter().map(GroupNode::from).collect() });
    }
    groups
}

impl RunningCoordinator {
    /// Addresses of the service.
    pub fn addresses(&self) -> &[String] {
        &self.listening
    }

    /// Logs the lines that people and scripts wait for. To be called when signals are handled: a script may send a signal right
    /// after these lines.
    pub fn log_start(&self) {
        if !self.config.trust.requires_proof() && !self.far.is_empty() {
            tracing::warn!("--allow-anyone: whoever reaches {} can enter the group", self.far.join(" or "));
        }
        tracing::info!("coordinating on {}", self.listening.join(", "));
    }

    /// Keeps the directory that was made for the state file. Without this call, the end of the coordinator removes the directory,
    /// as after a failed start.
    pub fn keep_directories(&mut self) {
        if let Some(fresh) = self.fresh.take() {
            fresh.keep();
        }
    }

    /// Suspends the jobs, which a later start or another coordinator continues, and ends.
    pub fn stop(self) {
        tracing::info!("stopping");
        self.jobs.suspend_jobs();
        drop(self.scratch);
        drop(self.admin);
    }
}

/// A new directory that only this user can enter.
fn private_dir() -> Result<tempfile::TempDir, Error> {
    let rights = std::os::unix::fs::PermissionsExt::from_mode(0o700);
    let made = tempfile::Builder::new().prefix("spurline-coordinator-").permissions(rights).tempdir();
    made.map_err(|e| Error::io(format_args!("a directory for jobs in {}", std::env::temp_dir().display()), &e))
}
