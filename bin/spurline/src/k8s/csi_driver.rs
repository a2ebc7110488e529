//! `spurline k8s csi-driver`: the driver of the crate `csi`, stopped by signals.

use super::mount_words::MountParser;
use crate::background::ReadySignal;
use crate::{logging, signals};
use clap::{Args, ValueEnum};
use spurline_config::values::parse_log_file;
use spurline_config::{Fault, HostLimits, LogConfig, LogFormat};
use spurline_csi::{CsiDriver, CsiDriverConfig, MountLauncher, PodLauncher, ProcessLauncher, SERVICE_ACCOUNT};
use spurline_runtime::limits::raise_open_files;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

/// Memory limit of a mount process whose volume names none.
const DEFAULT_MEMORY: u64 = 512 << 20;

/// What runs mount processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LauncherKind {
    /// A pod of its own for each volume: restarting the driver touches no mount
    Pod,
    /// A process of this host for each volume, without Kubernetes
    Process,
}

/// Below the help.
pub const CSI_DRIVER_NOTE: &str = "Every flag is also an environment variable (--state-dir: SPURLINE_STATE_DIR) and a key of the \
TOML file given by --config. A flag overrides a variable, which overrides the file.";

/// The arguments of `k8s csi-driver`.
#[derive(Debug, Args)]
pub struct CsiDriverArgs {
    /// TOML file with the same keys as the flags; the table [csi-driver] overrides its top level
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Socket of the driver
    #[arg(long, value_name = "URL", default_value = "unix:///csi/csi.sock")]
    pub endpoint: String,
    /// Name of this node in the cluster
    #[arg(long, value_name = "NAME")]
    pub node_id: String,
    /// Directory of mounts and their records, which outlive the driver; its path has to be the same in the driver's
    /// container and on the node
    #[arg(long, value_name = "DIR", default_value = "/run/spurline-csi")]
    pub state_dir: PathBuf,
    /// What runs mount processes
    #[arg(long, value_name = "KIND", default_value = "pod")]
    pub launcher: LauncherKind,
    /// Template of mount pods, a pod object in YAML; 'spurline k8s render' makes one
    #[arg(long, value_name = "FILE", default_value = "/etc/spurline/template/mount-pod.yaml")]
    pub pod_template: PathBuf,
    /// Directory with the token, the authorities and the namespace of the driver's pod
    #[arg(long, value_name = "DIR", default_value = SERVICE_ACCOUNT)]
    pub service_account: PathBuf,
    /// Inline volumes may have directories of the node as their source, every mount option, and buckets with the node's
    /// keys, as PersistentVolumes may: every author of a pod gets the rights of the node
    #[arg(long)]
    pub trust_inline_volumes: bool,
    /// Log level: error, warn, info, debug, trace, or crate=level[,…] (also RUST_LOG) [default: info]
    #[arg(long, value_name = "FILTER")]
    pub log_filter: Option<String>,
    /// Log to this file [default: standard error]
    #[arg(long, value_name = "FILE", value_parser = parse_log_file)]
    pub log: Option<PathBuf>,
}

/// Runs the driver until a signal.
///
/// # Errors
/// When the driver can't start.
pub fn run(args: CsiDriverArgs) -> Result<ExitCode, Fault> {
    raise_open_files()?;
    let ready = ReadySignal::new()?;
    let log = LogConfig { file: args.log.clone(), filter: args.log_filter.clone(), format: LogFormat::Text };
    logging::start_logging(&log, false, &HostLimits::detect(), "CSI driver")?;
    let (launcher, default_memory) = open_launcher(&args)?;
    let stopped = signals::stop_channel()?;
    let driver = CsiDriver::start(CsiDriverConfig {
        endpoint: args.endpoint,
        node_id: args.node_id,
        state_dir: args.state_dir,
        default_memory,
        trust_inline: args.trust_inline_volumes,
        launcher,
        arguments: Arc::new(MountParser::of_this_host()),
    })?;
    ready.signal_ready()?;
    let _ = stopped.recv();
    driver.stop().map(|()| ExitCode::SUCCESS)
}

/// The launcher, and the memory limit of volumes that name none.
fn open_launcher(args: &CsiDriverArgs) -> Result<(Arc<dyn MountLauncher>, u64), Fault> {
    match args.launcher {
        LauncherKind::Process => {
            let own = std::env::current_exe();
            let own = own.map_err(|e| Fault::failed(format!("this program can't find itself: {e}"), "mount /proc"))?;
            Ok((Arc::new(ProcessLauncher::new(own)), DEFAULT_MEMORY))
        }
        LauncherKind::Pod => {
            let template = std::fs::read_to_string(&args.pod_template).map_err(|e| {
                let what = format!("the pod template {}: {e}", args.pod_template.display());
                Fault::missing(what, "mount the ConfigMap of 'spurline k8s render' there, or give --launcher process")
            })?;
            let pods = PodLauncher::new(&args.node_id, &template, &args.service_account)?;
            let memory = pods.default_memory().unwrap_or(DEFAULT_MEMORY);
            Ok((Arc::new(pods), memory))
        }
    }
}
