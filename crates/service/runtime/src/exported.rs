//! Names of a mount's inodes, kept on disk while the kernel's NFS server exports the mount. Knows no NFS server: `spurline
//! export` makes the folder.

use spurline_export::{
    ExportRecord, ExportUse, NameDatabase, STATE_DIR, ServerState, answer_waiting_clients, export_id,
    forget_cached_exports,
};
use spurline_fs::NameRecords;
use spurline_observe::documents::ExportStatus;
use spurline_types::Result;
use spurline_types::stats::Export;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;

/// Makes a file system keep names in a store, and store the names of the present inodes.
pub(crate) type KeepNames = Arc<dyn Fn(Arc<dyn NameRecords>) + Send + Sync>;

/// Whether `spurline export` has exported a mount.
pub(crate) fn is_exported(source: &str, mountpoint: &Path) -> bool {
    ExportRecord::read(Path::new("/"), &export_id(source, mountpoint)).is_some()
}

/// Makes the NFS server look at an exported mountpoint anew: clients wait where nothing is mounted. True if the mount is exported.
pub(crate) fn renew_export(source: &str, mountpoint: &Path) -> bool {
    if !is_exported(source, mountpoint) {
        return false;
    }
    if let Err(error) = forget_cached_exports() {
        tracing::warn!("the NFS server may still serve the mount before: {error}; run `exportfs -f` as root");
    }
    true
}

/// Makes NFS clients of an exported mount go on with the mount that is there now.
pub(crate) fn resume_clients(source: &str, mountpoint: &Path) {
    if !renew_export(source, mountpoint) {
        return;
    }
    match answer_waiting_clients(source, mountpoint) {
        Ok(waiting) => tracing::info!(waiting, "NFS clients of the export go on with this mount"),
        Err(error) => tracing::warn!("NFS clients of the export may wait for two minutes: {error}"),
    }
}

/// What keeps the names of a mount that is, or may become, exported.
pub(crate) struct ExportedNames {
    id: String,
    mountpoint: PathBuf,
    folder: PathBuf,
    keep: KeepNames,
    database: OnceLock<Arc<NameDatabase>>,
    /// Stores the names of inodes that the process before had.
    inherited: OnceLock<JoinHandle<()>>,
}

impl Drop for ExportedNames {
    fn drop(&mut self) {
        if let Some(storing) = self.inherited.take() {
            let _ = storing.join();
        }
    }
}

impl ExportedNames {
    pub fn new(source: &str, mountpoint: &Path, keep: KeepNames) -> Self {
        let id = export_id(source, mountpoint);
        let folder = Path::new("/").join(STATE_DIR).join(&id);
        ExportedNames {
            id,
            mountpoint: mountpoint.to_owned(),
            folder,
            keep,
            database: OnceLock::new(),
            inherited: OnceLock::new(),
        }
    }

    /// Opens the names of an export that exists; a mount that starts again continues with these names.
    pub fn open_if_exported(&self) {
        if ExportRecord::read(Path::new("/"), &self.id).is_none() {
            return;
        }
        match self.keep_names() {
            Ok(()) => {
                tracing::info!("exported by the NFS server: names of inodes are kept in {}", self.folder.display())
            }
            Err(error) => tracing::error!(
                "exported by the NFS server, and the names of inodes can't be kept: {error}; its clients' file handles will \
                 be stale"
            ),
        }
    }

    /// Keeps the names from now on.
    pub fn keep_names(&self) -> Result<()> {
        if self.database.get().is_some() {
            return Ok(());
        }
        let database = Arc::new(NameDatabase::open(&self.folder)?);
        let database = self.database.get_or_init(|| database);
        (self.keep)(Arc::clone(database) as Arc<dyn NameRecords>);
        Ok(())
    }

    /// Stores the names of the inodes that this process has taken over: the process before may have been killed before these
    /// were on the disk. Does not wait for that.
    pub fn store_inherited_names(&self) {
        let Some(database) = self.database.get() else { return };
        let database = Arc::clone(database);
        let keep = Arc::clone(&self.keep);
        let storing = std::thread::Builder::new().name("inherited-names".into());
        match storing.spawn(move || keep(database)) {
            Ok(storing) => drop(self.inherited.set(storing)),
            Err(error) => tracing::warn!("names of inodes can't be stored again: {error}"),
        }
    }

    /// The export as shown by the NFS server; `None` without an export.
    pub fn status(&self) -> Option<ExportStatus> {
        let record = ExportRecord::read(Path::new("/"), &self.id)?;
        let server = ServerState::read();
        let used = ExportUse::read(Path::new("/"), &self.mountpoint);
        Some(ExportStatus {
            id: self.id.clone(),
            handles_kept: self.database.get().is_some(),
            rdma: record.rdma,
            threads: server.threads,
            active: used.active && server.threads > 0,
            ports: server.ports,
            writable: used.writable,
            clients: used.clients,
            read_bytes: used.read_bytes,
            write_bytes: used.write_bytes,
            stale_handles: used.stale_handles,
        })
    }

    /// Shows the export in the counters.
    pub fn set_counters(&self, shown: &Export) {
        // Most mounts are not exported, and read no file here.
        let used = self.database.get().map(|_| ExportUse::read(Path::new("/"), &self.mountpoint)).unwrap_or_default();
        let threads = if used.active { u64::from(ServerState::read_threads()) } else { 0 };
        shown.active.set(u64::from(threads > 0));
        shown.clients.set(used.clients.len() as u64);
        shown.read_bytes.set(used.read_bytes);
        shown.write_bytes.set(used.write_bytes);
        shown.stale_handles.set(used.stale_handles);
        shown.threads.set(threads);
    }
}
