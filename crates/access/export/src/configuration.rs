//! An export, and the table that describes the export to the NFS server. Starts nothing.

use crate::export_records::ExportRecord;
use crate::server_settings::NfsSettings;
use spurline_types::{Error, ErrorKind, Result};
use std::fmt::Write as _;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::{xxh3_64, xxh3_128};

/// Records of exports, and the names of inodes.
pub const STATE_DIR: &str = "var/lib/spurline/exports";
/// The port of NFS over RDMA that IANA has registered.
pub const RDMA_PORT: u16 = 20049;

/// An export to be made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExportPlan {
    /// The mountpoint.
    pub mountpoint: PathBuf,
    /// The mountpoint under the clients' name: below the root of exports.
    pub shown_path: PathBuf,
    /// The mount's source.
    pub source: String,
    /// The mount can be written, whatever clients may do.
    pub writable_mount: bool,
    /// Addresses, networks or names of clients, in the words of exports(5).
    pub clients: Vec<String>,
    /// Clients may write.
    pub writable: bool,
    /// Root of a client is root here.
    pub trust_root: bool,
    /// Serve over RDMA too.
    pub rdma: bool,
    /// Threads that the server should have; `None` leaves the number to the server's settings.
    pub threads: Option<u32>,
}

/// A file with text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigurationFile {
    /// The path below the root of files.
    pub path: PathBuf,
    /// The whole text.
    pub text: String,
}

impl ExportPlan {
    /// A short name of the export, the same for a source at a mountpoint.
    pub fn id(&self) -> String {
        export_id(&self.source, &self.mountpoint)
    }

    /// The file system id that clients' file handles carry: the same on every host that exports such a mount of the source.
    pub fn fsid(&self) -> String {
        fsid_of(&self.source, self.writable_mount)
    }

    /// The record that `--apply` makes.
    pub fn record(&self) -> ExportRecord {
        ExportRecord {
            mountpoint: self.mountpoint.clone(),
            shown_path: self.shown_path.clone(),
            source: self.source.clone(),
            fsid: self.fsid(),
            rdma: self.rdma,
            threads: self.threads,
        }
    }

    /// The table of exports(5) for this mount.
    pub fn exports_file(&self) -> ConfigurationFile {
        // mp: while nothing is mounted there, clients wait. Else clients would get the folder below, with the same fsid.
        let mut options =
            format!("{},sync,mp,no_subtree_check,fsid={}", if self.writable { "rw" } else { "ro" }, self.fsid());
        if self.trust_root {
            options.push_str(",no_root_squash");
        }
        let mut text = format!(
            "# Written by `spurline export`; `spurline export {} --remove` takes it back.\n",
            one_line(&self.mountpoint)
        );
        text.push_str(&escape_path(&self.shown_path));
        for client in &self.clients {
            let _ = write!(text, " {client}({options})");
        }
        text.push('\n');
        ConfigurationFile { path: exports_path(&self.id()), text }
    }

    /// Where the record and the names of this export are stored, below the root of files.
    pub fn state_dir(&self) -> PathBuf {
        Path::new(STATE_DIR).join(self.id())
    }
}

/// The file system id of a source. A writable mount has other file handles than a read-only mount, and needs another id.
fn fsid_of(source: &str, writable_mount: bool) -> String {
    let mut bytes = source.as_bytes().to_vec();
    if writable_mount {
        bytes.extend_from_slice(b"\0writable");
    }
    let hex = format!("{:032x}", xxh3_128(&bytes));
    [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-")
}

/// The table of an export, below the root of files.
pub(crate) fn exports_path(id: &str) -> PathBuf {
    format!("etc/exports.d/spurline-{id}.exports").into()
}

/// A path for a comment: without characters that would end the line.
fn one_line(path: &Path) -> String {
    path.display().to_string().chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// The name of an export.
pub fn export_id(source: &str, mountpoint: &Path) -> String {
    let mut bytes = source.as_bytes().to_vec();
    bytes.push(0);
    bytes.extend_from_slice(mountpoint.as_os_str().as_bytes());
    format!("{:016x}", xxh3_64(&bytes))
}

/// A mountpoint under the clients' name: below `rootdir` of `[exports]` in nfs.conf, if that is set.
///
/// # Errors
/// When the mountpoint is outside of that folder.
pub fn shown_path(settings: &NfsSettings, mountpoint: &Path) -> Result<PathBuf> {
    let Some(top) = settings.root_of_exports() else { return Ok(mountpoint.to_owned()) };
    let below = mountpoint.strip_prefix(top).map_err(|_| {
        let text = format!("{} lies outside of {top}, the rootdir of all exports in nfs.conf", mountpoint.display());
        Error::new(ErrorKind::Unavailable, text)
    })?;
    Ok(Path::new("/").join(below))
}

/// A path in the words of exports(5): blanks and other separators in octal.
pub(crate) fn escape_path(path: &Path) -> String {
    let mut text = String::new();
    for byte in path.as_os_str().as_bytes() {
        match byte {
            b' ' | b'\t' | b'\n' | b'\\' | b'"' | b'#' => {
                let _ = write!(text, "\\{byte:03o}");
            }
            0x21..=0x7e => text.push(*byte as char),
            _ => {
                let _ = write!(text, "\\{byte:03o}");
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan() -> ExportPlan {
        ExportPlan {
            mountpoint: "/mnt/my data".into(),
            shown_path: "/mnt/my data".into(),
            source: "s3://datasets".into(),
            writable_mount: false,
            clients: vec!["10.0.0.0/24".into(), "fd77::/64".into()],
            writable: false,
            trust_root: false,
            rdma: true,
            threads: Some(16),
        }
    }

    #[test]
    fn the_table_is_what_exports_expects() {
        let exports = plan().exports_file();
        let line = exports.text.lines().nth(1).unwrap();
        let options = format!("(ro,sync,mp,no_subtree_check,fsid={})", plan().fsid());
        assert_eq!(line, format!("/mnt/my\\040data 10.0.0.0/24{options} fd77::/64{options}"));
        let other = ExportPlan { writable: true, trust_root: true, ..plan() };
        assert!(
            other.exports_file().text.contains("(rw,sync,") && other.exports_file().text.contains(",no_root_squash)")
        );
        let odd = ExportPlan { shown_path: "/mnt/#1 \"ü\"".into(), ..plan() }.exports_file();
        let line = odd.text.lines().nth(1).unwrap();
        assert!(line.starts_with("/mnt/\\0431\\040\\042\\303\\274\\042 10."), "{line}");
        let lines: PathBuf = "/mnt/a\n/other *(rw)\n#".into();
        let broken = ExportPlan { mountpoint: lines.clone(), shown_path: lines, ..plan() };
        assert_eq!(broken.exports_file().text.lines().count(), 2, "no name adds a line");
    }

    #[test]
    fn the_file_system_id_belongs_to_the_source_and_the_kind_of_mount_and_the_name_to_the_mount() {
        let other = ExportPlan { mountpoint: "/mnt/b".into(), writable: true, ..plan() };
        assert_eq!(plan().fsid(), other.fsid());
        assert_eq!(plan().fsid().len(), 36);
        assert_ne!(plan().id(), other.id());
        assert_ne!(plan().fsid(), ExportPlan { source: "s3://others".into(), ..plan() }.fsid());
        assert_ne!(plan().fsid(), ExportPlan { writable_mount: true, ..plan() }.fsid());
    }

    #[test]
    fn clients_name_a_mount_below_the_root_of_exports() {
        let root = tempfile::tempdir().unwrap();
        let shown = |at: &str| shown_path(&NfsSettings::read(root.path()), Path::new(at));
        assert_eq!(shown("/srv/data").unwrap(), Path::new("/srv/data"));
        std::fs::create_dir_all(root.path().join("etc/nfs.conf.d")).unwrap();
        std::fs::write(
            root.path().join("etc/nfs.conf"),
            "[nfsd]\nrootdir=/x\n# rootdir\n[ Exports ]\nrootdir = /srv\n",
        )
        .unwrap();
        assert_eq!(shown("/srv/data").unwrap(), Path::new("/data"));
        assert!(shown("/mnt/data").unwrap_err().to_string().contains("/srv"));
    }
}
