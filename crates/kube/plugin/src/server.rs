//! The socket of a resource: bound beside kubelet's, served until stopped, removed if still the same file.

use crate::pb::device_plugin_server::DevicePluginServer;
use crate::service::ResourceService;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio_stream::wrappers::UnixListenerStream;

/// The kernel's limit of a socket's path, with the final zero.
const MAX_SOCKET_PATH: usize = 108;
/// How many names are tried when other processes listen on the first names.
const MAX_SOCKET_NAMES: usize = 8;

/// A file's identity: a file that is removed and made anew has another identity.
pub type FileIdentity = (u64, u64, i64, i64);

/// The identity of a file; `None` when there is none.
pub fn file_identity(path: &Path) -> Option<FileIdentity> {
    let meta = std::fs::symlink_metadata(path).ok()?;
    Some((meta.dev(), meta.ino(), meta.ctime(), meta.ctime_nsec()))
}

/// A served socket.
pub struct ResourceSocket {
    path: PathBuf,
    identity: Option<FileIdentity>,
    stop: watch::Sender<bool>,
}

impl ResourceSocket {
    /// Binds a socket for the resource in `dir` and serves `make`'s service there.
    ///
    /// # Errors
    /// When no socket can be made there.
    pub fn bind(
        dir: &Path,
        resource: &str,
        make: impl FnOnce(watch::Receiver<bool>) -> ResourceService,
    ) -> io::Result<Self> {
        let path = free_path(dir, resource)?;
        let listener = UnixListener::bind(&path)?;
        let identity = file_identity(&path);
        let (stop, stopped) = watch::channel(false);
        let service = DevicePluginServer::new(make(stopped.clone()));
        let mut ended = stopped;
        let resource = resource.to_owned();
        tokio::spawn(async move {
            let server = tonic::transport::Server::builder().add_service(service);
            let until = async move { drop(ended.wait_for(|stopped| *stopped).await) };
            let served = server.serve_with_incoming_shutdown(UnixListenerStream::new(listener), until).await;
            if let Err(error) = served {
                tracing::error!("{resource}: the server ended: {error}");
            }
        });
        Ok(ResourceSocket { path, identity, stop })
    }

    /// The file name, which kubelet gets at registration.
    pub fn file_name(&self) -> String {
        self.path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default()
    }

    /// Whether the file was removed or replaced, as kubelet does at start.
    pub fn is_lost(&self) -> bool {
        file_identity(&self.path) != self.identity
    }
}

impl Drop for ResourceSocket {
    fn drop(&mut self) {
        // Streams end, so kubelet notices the end at once.
        let _ = self.stop.send(true);
        if !self.is_lost() {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// A path that no process listens on; a socket file without a listener is removed.
fn free_path(dir: &Path, resource: &str) -> io::Result<PathBuf> {
    let stem = socket_stem(dir, resource);
    for number in 1..=MAX_SOCKET_NAMES {
        let suffix = if number == 1 { String::new() } else { format!("-{number}") };
        let path = dir.join(format!("{stem}{suffix}.sock"));
        match UnixStream::connect(&path) {
            Ok(_) => {
                tracing::warn!(
                    "{resource}: another process listens on {}: is a second device plugin running? Another name is used",
                    path.display()
                );
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(path),
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return Err(error),
            // Nothing listens: the file is left from a process that was killed.
            Err(_) => {
                std::fs::remove_file(&path)?;
                return Ok(path);
            }
        }
    }
    let what = format!("other processes listen on {stem}.sock and on {} further names", MAX_SOCKET_NAMES - 1);
    Err(io::Error::new(io::ErrorKind::AddrInUse, what))
}

/// The socket's name without the end: of prefix and name, so that two prefixes do not collide.
fn socket_stem(dir: &Path, resource: &str) -> String {
    let stem = format!("spurline-{}", resource.replace('/', "_"));
    let room = MAX_SOCKET_PATH.saturating_sub(dir.as_os_str().len() + "/-9.sock".len() + 1);
    if stem.len() <= room {
        return stem;
    }
    // Long names keep the end and differ by a hash of the whole.
    let hash = stem.bytes().fold(0xcbf2_9ce4_8422_2325u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3));
    format!("spurline-{hash:016x}")
}
