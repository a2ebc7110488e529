//! `spurline k8s device-plugin`: the plugin with the metrics page, stopped by signals.

use crate::{logging, signals};
use clap::Args;
use spurline_config::{Fault, HostLimits, RawLog};
use spurline_kube_plugin::{LockedMemory, PluginSettings, start_plugin};
use spurline_observe::AdminTarget;
use spurline_runtime::admin::open_metrics;
use spurline_types::parse_duration;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

/// Below the help.
pub const DEVICE_PLUGIN_NOTE: &str = "Every flag is also an environment variable (--plugin-dir: SPURLINE_PLUGIN_DIR) and a key of the \
TOML file given by --config. A flag overrides a variable, which overrides the file.";

/// Examples of --help.
pub const DEVICE_PLUGIN_EXAMPLES: &str = "\
The plugin reads the configuration of Mellanox/k8s-rdma-shared-dev-plugin unchanged, and can replace it. It needs the \
user root, no capability, no host network, and two folders of the host: kubelet's directory of device plugins \
(writable) and /sys (read-only).

Examples:
  In a pod with the host's /sys at /host/sys:
    spurline k8s device-plugin --config-file /config/config.json \\
        --host-root /host --metrics 0.0.0.0:9567
  On the host itself:
    spurline k8s device-plugin --config-file config.json
  With the limit of locked memory raised for the pods that get a device, whatever their user:
    spurline k8s device-plugin --config-file config.json --use-cdi \\
        --cdi-memlock unlimited
  What pods will get, before it runs:
    spurline k8s lint --config config.json

Signals: SIGTERM, SIGINT, SIGHUP and SIGQUIT end it; kubelet keeps the allocations of running pods.";

/// The arguments of `k8s device-plugin`.
#[derive(Debug, Clone, Args)]
pub struct DevicePluginArgs {
    /// TOML file with the same keys as the flags; the table [device-plugin] overrides its top level
    #[arg(long, value_name = "FILE", help_heading = "General")]
    pub config: Option<PathBuf>,
    /// Configuration of the resources (JSON); it is read again when it changes
    #[arg(
        long,
        value_name = "FILE",
        default_value = "/k8s-rdma-shared-dev-plugin/config.json",
        help_heading = "General"
    )]
    pub config_file: PathBuf,
    /// kubelet's directory of device plugins
    #[arg(long, value_name = "DIR", default_value = "/var/lib/kubelet/device-plugins", help_heading = "General")]
    pub plugin_dir: PathBuf,
    /// Folder with the host's sys, where / is not the host's: in a pod without host network, /sys shows no interface of
    /// the host [default: /]
    #[arg(long, value_name = "DIR", help_heading = "General")]
    pub host_root: Option<PathBuf>,
    /// Give pods CDI device names instead of device nodes; the container runtime has to support CDI
    #[arg(long, help_heading = "General")]
    pub use_cdi: bool,
    /// The host's directory of CDI files, for --use-cdi
    #[arg(long, value_name = "DIR", default_value = "/var/run/cdi", help_heading = "General")]
    pub cdi_dir: PathBuf,
    /// Limit of locked memory of containers with a device, for --use-cdi: a size, or unlimited; a hook of the CDI file
    /// sets it with the host's prlimit, also for users that are not root [default: the runtime's]
    #[arg(long, value_name = "LIMIT", help_heading = "General")]
    pub cdi_memlock: Option<LockedMemory>,
    /// Time between two looks at the ports and device nodes
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = parse_duration, help_heading = "General")]
    pub health_interval: Duration,
    /// Logs and metrics.
    #[command(flatten)]
    pub log: RawLog,
}

/// Runs the plugin; returns at the end.
///
/// # Errors
/// When the plugin can't start, or the loop panics.
pub fn run(args: DevicePluginArgs) -> Result<ExitCode, Fault> {
    let host = HostLimits::detect();
    let (log, metrics) = args.log.check()?;
    if args.health_interval.is_zero() {
        return Err(Fault::usage("--health-interval is 0", "give a time, as in 5s"));
    }
    if args.cdi_memlock.is_some() && !args.use_cdi {
        return Err(Fault::usage("--cdi-memlock has no effect without --use-cdi", "give --use-cdi too"));
    }
    logging::start_logging(&log, false, &host, "device plugin")?;
    let settings = PluginSettings {
        config_file: args.config_file,
        plugin_dir: args.plugin_dir,
        host_root: args.host_root,
        cdi_dir: args.use_cdi.then_some(args.cdi_dir),
        cdi_memlock: args.cdi_memlock,
        health_interval: args.health_interval,
    };
    let mut plugin = start_plugin(settings)?;
    let stop = plugin.stopper();
    signals::on_stop(move |count| {
        stop();
        if count > 1 {
            std::process::exit(1);
        }
    })?;
    let status: Arc<dyn AdminTarget> = plugin.status();
    let _metrics = open_metrics(&metrics, &status)?;
    plugin.wait()?;
    Ok(ExitCode::SUCCESS)
}
