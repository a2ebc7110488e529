//! The driver's socket and life. Knows no command line and no signal.

use crate::controller::ControllerService;
use crate::identity::IdentityService;
use crate::launcher::MountLauncher;
use crate::node::NodeService;
use crate::pb;
use crate::record::make_private_dir;
use crate::settings::MountArguments;
use crate::volumes::{VolumeTable, VolumeTableParts};
use spurline_config::Fault;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio_stream::wrappers::UnixListenerStream;

/// What a driver serves, and where.
pub struct CsiDriverConfig {
    /// The socket: `unix:///csi/csi.sock`, or a path.
    pub endpoint: String,
    /// The node's name.
    pub node_id: String,
    /// Directory of records and mounts, which outlive the driver; the same path in the driver and on the node.
    pub state_dir: PathBuf,
    /// Memory limit of a mount process in bytes, where the volume names none.
    pub default_memory: u64,
    /// Inline volumes may have what a PersistentVolume may have: directories of the node, all mount options, the node's keys.
    pub trust_inline: bool,
    /// Starts mount processes.
    pub launcher: Arc<dyn MountLauncher>,
    /// Checks mounts.
    pub arguments: Arc<dyn MountArguments>,
}

/// A running driver. A drop ends the driver; mounts go on.
pub struct CsiDriver {
    runtime: Option<tokio::runtime::Runtime>,
    stop: watch::Sender<bool>,
    served: tokio::task::JoinHandle<Result<(), tonic::transport::Error>>,
    socket: PathBuf,
}

/// The path in an endpoint.
fn socket_path(endpoint: &str) -> Result<PathBuf, Fault> {
    let path = endpoint.strip_prefix("unix://").or_else(|| endpoint.strip_prefix("unix:")).unwrap_or(endpoint);
    if !path.starts_with('/') {
        return Err(Fault::usage(
            format!("--endpoint {endpoint} names no absolute path"),
            "write unix:///csi/csi.sock",
        ));
    }
    Ok(PathBuf::from(path))
}

/// Listens at `path`, in the place of a socket that an ended driver left.
fn listen(path: &Path) -> Result<UnixListener, Fault> {
    let failed = |e: std::io::Error| {
        let remedy = match e.kind() {
            std::io::ErrorKind::PermissionDenied => {
                "run the driver as root, or give --endpoint a path in a directory that its user can write"
            }
            _ => "give --endpoint a path in a writable directory",
        };
        Fault::missing(format!("the socket {}: {e}", path.display()), remedy)
    };
    if std::os::unix::net::UnixStream::connect(path).is_ok() {
        return Err(Fault::missing(
            format!("another driver listens at {}", path.display()),
            "end it, or give another --endpoint",
        ));
    }
    if let Err(e) = std::fs::remove_file(path)
        && e.kind() != std::io::ErrorKind::NotFound
    {
        return Err(failed(e));
    }
    let listener = UnixListener::bind(path).map_err(failed)?;
    // The kubelet is root; other users must not mount.
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).map_err(failed)?;
    Ok(listener)
}

impl CsiDriver {
    /// Starts the driver, which finds the mounts of an earlier driver and serves at the socket.
    ///
    /// # Errors
    /// When the socket or the state directory can't be used.
    pub fn start(config: CsiDriverConfig) -> Result<Self, Fault> {
        if config.node_id.is_empty() {
            return Err(Fault::usage("--node-id is empty", "give the node's name"));
        }
        let socket = socket_path(&config.endpoint)?;
        let state = |e: std::io::Error| {
            let what = format!("--state-dir {}: {e}", config.state_dir.display());
            Fault::missing(what, "give a directory that can be made and written, as root")
        };
        make_private_dir(&config.state_dir).map_err(state)?;
        // The mount table shows paths without symbolic links.
        let state_dir = config.state_dir.canonicalize().map_err(state)?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("csi")
            .enable_all()
            .build()
            .map_err(|e| Fault::failed(format!("threads of the driver: {e}"), ""))?;
        let parts = VolumeTableParts {
            state_dir,
            launcher: config.launcher,
            arguments: config.arguments,
            default_memory: config.default_memory,
        };
        let volumes = runtime.block_on(VolumeTable::open(parts))?;
        let inside = runtime.enter();
        let listener = listen(&socket)?;
        drop(inside);
        runtime.spawn(Arc::clone(&volumes).watch());
        runtime.spawn(Arc::clone(&volumes).end_others());
        let (stop, mut stopped) = watch::channel(false);
        let node =
            NodeService { node_id: config.node_id, trust_inline: config.trust_inline, volumes: Arc::clone(&volumes) };
        let server = tonic::transport::Server::builder()
            .add_service(pb::identity_server::IdentityServer::new(IdentityService))
            .add_service(pb::controller_server::ControllerServer::new(ControllerService { volumes }))
            .add_service(pb::node_server::NodeServer::new(node));
        let served =
            runtime.spawn(server.serve_with_incoming_shutdown(UnixListenerStream::new(listener), async move {
                drop(stopped.wait_for(|stop| *stop).await)
            }));
        tracing::info!("the driver {} serves at {}", crate::DRIVER_NAME, socket.display());
        Ok(CsiDriver { runtime: Some(runtime), stop, served, socket })
    }

    /// Stops taking calls, finishes running calls, and ends. Mounts go on.
    ///
    /// # Errors
    /// When the server failed.
    pub fn stop(mut self) -> Result<(), Fault> {
        self.stop.send_replace(true);
        let Some(runtime) = self.runtime.take() else { return Ok(()) };
        let served = runtime.block_on(async {
            // A client with an open connection does not keep the driver.
            tokio::time::timeout(std::time::Duration::from_secs(5), &mut self.served).await
        });
        let _ = std::fs::remove_file(&self.socket);
        runtime.shutdown_timeout(std::time::Duration::from_secs(1));
        match served {
            Ok(Ok(Err(e))) => Err(Fault::failed(format!("the driver's server: {e}"), "")),
            _ => Ok(()),
        }
    }
}
