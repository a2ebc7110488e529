//! Names of a mount's inodes, kept on disk while the kernel's NFS server exports the mount. It knows no NFS server:
//! `spurline export` makes the folder.

use serde_json::{Value, json};
use spurline_export::{ExportRecord, NameDatabase, STATE_DIR, ServerState, export_id};
use spurline_fs::NameRecords;
use spurline_types::Result;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

/// Makes a file system keep its names in a store.
pub(crate) type KeepNames = Box<dyn Fn(Arc<dyn NameRecords>) + Send + Sync>;

/// What keeps the names of a mount that is, or may become, exported.
pub(crate) struct ExportedNames {
    id: String,
    folder: PathBuf,
    keep: KeepNames,
    database: OnceLock<Arc<NameDatabase>>,
}

impl ExportedNames {
    pub fn new(source: &str, mountpoint: &Path, keep: KeepNames) -> Self {
        let id = export_id(source, mountpoint);
        let folder = Path::new("/").join(STATE_DIR).join(&id);
        ExportedNames { id, folder, keep, database: OnceLock::new() }
    }

    /// Opens the names of an export that exists; a mount that starts again continues with them.
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

    /// What the NFS server shows of the export; null where there is none.
    pub fn to_json(&self) -> Value {
        let Some(record) = ExportRecord::read(Path::new("/"), &self.id) else { return Value::Null };
        let server = ServerState::read();
        json!({
            "id": self.id,
            "handles_kept": self.database.get().is_some(),
            "rdma": record.rdma,
            "threads": server.threads,
            "ports": server.ports,
            "clients": server.clients,
        })
    }
}
