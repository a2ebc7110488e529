//! The export of a mount by the kernel's NFS server, in the document of `status`.

use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// An export by the kernel's NFS server.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ExportStatus {
    /// The identity in the record of the export.
    pub id: String,
    /// Whether the names of inodes are kept on disk.
    pub handles_kept: bool,
    /// Whether the export is served over RDMA as well.
    pub rdma: bool,
    /// Threads of the NFS server; 0 without a running server.
    pub threads: u32,
    /// Transports and ports of the NFS server.
    pub ports: Vec<String>,
    /// Whether the NFS server runs and has the export.
    pub active: bool,
    /// Whether the export is writable for some client.
    pub writable: bool,
    /// Addresses of clients.
    pub clients: BTreeSet<String>,
    /// Bytes read by clients, since the server took up the export.
    pub read_bytes: u64,
    /// Bytes written by clients, since the server took up the export.
    pub write_bytes: u64,
    /// Requests whose file handle led to no file.
    pub stale_handles: u64,
}
