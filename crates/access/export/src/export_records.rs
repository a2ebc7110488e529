//! What `--apply` has done, on disk, so that `--remove` takes back that and nothing else.

use crate::configuration::STATE_DIR;
use serde_json::{Value, json};
use spurline_types::{Error, ErrorKind, Result};
use std::path::{Path, PathBuf};

/// An export that was made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExportRecord {
    /// The mountpoint.
    pub mountpoint: PathBuf,
    /// The mountpoint under the clients' name since then.
    pub shown_path: PathBuf,
    /// The mount's source.
    pub source: String,
    /// The file system id in the file handles of clients.
    pub fsid: String,
    /// Served over RDMA.
    pub rdma: bool,
    /// Threads that were asked for.
    pub threads: Option<u32>,
}

impl ExportRecord {
    /// The name of the record's file.
    const NAME: &str = "export.json";

    /// All records below `root`, by name.
    pub fn read_all(root: &Path) -> Vec<(String, ExportRecord)> {
        let Ok(folders) = std::fs::read_dir(root.join(STATE_DIR)) else { return Vec::new() };
        let mut ids: Vec<String> =
            folders.flatten().filter_map(|folder| folder.file_name().into_string().ok()).collect();
        ids.sort();
        ids.into_iter().filter_map(|id| ExportRecord::read(root, &id).map(|record| (id, record))).collect()
    }

    /// The record of an export; `None` if there is no record, or no readable record.
    pub fn read(root: &Path, id: &str) -> Option<ExportRecord> {
        let value = read_json(&root.join(STATE_DIR).join(id).join(Self::NAME))?;
        let mountpoint = value["mountpoint"].as_str()?;
        Some(ExportRecord {
            mountpoint: mountpoint.into(),
            shown_path: value["shown_path"].as_str().unwrap_or(mountpoint).into(),
            source: value["source"].as_str()?.to_owned(),
            fsid: value["fsid"].as_str()?.to_owned(),
            rdma: value["rdma"].as_bool()?,
            threads: as_u32(&value["threads"]),
        })
    }

    /// Stores the record.
    pub(crate) fn write(&self, root: &Path, id: &str) -> Result<()> {
        let mountpoint = self.mountpoint.to_str().ok_or_else(|| {
            let text = format!("{}: the mountpoint's name is not UTF-8", self.mountpoint.display());
            Error::new(ErrorKind::Unsupported, text)
        })?;
        let value = json!({
            "mountpoint": mountpoint,
            "shown_path": self.shown_path.to_string_lossy(),
            "source": self.source,
            "fsid": self.fsid,
            "rdma": self.rdma,
            "threads": self.threads,
        });
        write_json(&root.join(STATE_DIR).join(id).join(Self::NAME), &value)
    }
}

/// Whether the server was started for exports.
pub fn started_server(root: &Path) -> bool {
    ServerRecord::read(root).started
}

/// The changes of the server for all exports together; the record goes with the last export.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ServerRecord {
    /// The server was started for exports.
    pub started: bool,
    /// Programs that were started beside the server.
    pub programs: Vec<String>,
    /// The largest request before the raise.
    pub request_bytes: Option<u32>,
    /// A running server listens for RDMA since then.
    pub rdma_added: bool,
}

impl ServerRecord {
    fn path(root: &Path) -> PathBuf {
        root.join(STATE_DIR).join("server.json")
    }

    /// The record; nothing was done if there is none.
    pub fn read(root: &Path) -> ServerRecord {
        let value = read_json(&Self::path(root)).unwrap_or_default();
        let programs = value["programs"].as_array().into_iter().flatten();
        ServerRecord {
            started: value["started"] == true,
            programs: programs.filter_map(|name| name.as_str().map(str::to_owned)).collect(),
            request_bytes: as_u32(&value["request_bytes"]),
            rdma_added: value["rdma_added"] == true,
        }
    }

    /// Stores the record.
    pub(crate) fn write(&self, root: &Path) -> Result<()> {
        let value = json!({
            "started": self.started,
            "programs": self.programs,
            "request_bytes": self.request_bytes,
            "rdma_added": self.rdma_added,
        });
        write_json(&Self::path(root), &value)
    }

    /// Removes the record.
    pub(crate) fn remove(root: &Path) -> Result<()> {
        let path = Self::path(root);
        match std::fs::remove_file(&path) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(Error::io(path.display(), &e)),
            _ => Ok(()),
        }
    }
}

fn as_u32(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|n| u32::try_from(n).ok())
}

fn read_json(path: &Path) -> Option<Value> {
    serde_json::from_slice(&std::fs::read(path).ok()?).ok()
}

fn write_json(path: &Path, value: &Value) -> Result<()> {
    std::fs::write(path, format!("{value}\n")).map_err(|e| Error::io(path.display(), &e))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_read_as_they_were_written() {
        let root = tempfile::tempdir().unwrap();
        let record = ExportRecord {
            mountpoint: "/mnt/x".into(),
            shown_path: "/x".into(),
            source: "/d".into(),
            fsid: "b98bba83-53a7-0d7b-3fe5-a7f7159d9b2e".into(),
            rdma: true,
            threads: Some(8),
        };
        assert!(ExportRecord::read_all(root.path()).is_empty());
        assert_eq!(ServerRecord::read(root.path()), ServerRecord::default());
        std::fs::create_dir_all(root.path().join(STATE_DIR).join("one")).unwrap();
        record.write(root.path(), "one").unwrap();
        let server = ServerRecord {
            started: true,
            programs: vec!["rpcbind".into()],
            request_bytes: Some(524_288),
            rdma_added: true,
        };
        server.write(root.path()).unwrap();
        assert_eq!(ExportRecord::read_all(root.path()), [("one".to_owned(), record)]);
        assert_eq!(ServerRecord::read(root.path()), server);
        ServerRecord::remove(root.path()).unwrap();
        assert_eq!(ServerRecord::read(root.path()), ServerRecord::default());
    }
}
