//! What an export is, and the files that describe it to the NFS server. It starts nothing.

use serde_json::{Value, json};
use spurline_types::{Error, ErrorKind, Result};
use std::fmt::Write as _;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::{xxh3_64, xxh3_128};

/// Records of exports, and the names of their inodes.
pub const STATE_DIR: &str = "var/lib/spurline/exports";
/// The settings of the server, shared by all exports of Spurline.
const SETTINGS_FILE: &str = "etc/nfs.conf.d/spurline.conf";
/// The port of NFS over RDMA that IANA has registered.
pub const RDMA_PORT: u16 = 20049;

/// An export to be made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExportPlan {
    /// The mountpoint.
    pub mountpoint: PathBuf,
    /// The mountpoint as clients name it: below the root of exports.
    pub shown_path: PathBuf,
    /// The mount's source.
    pub source: String,
    /// Addresses, networks or names of clients, in the words of exports(5).
    pub clients: Vec<String>,
    /// Clients may write.
    pub writable: bool,
    /// Root of a client is root here.
    pub trust_root: bool,
    /// Serve over RDMA too.
    pub rdma: bool,
    /// Threads of the server.
    pub threads: u32,
}

/// A file with its text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigurationFile {
    /// The path below the root of files.
    pub path: PathBuf,
    /// The whole text.
    pub text: String,
}

impl ExportPlan {
    /// A short name of the export, the same for one source at one mountpoint.
    pub fn id(&self) -> String {
        export_id(&self.source, &self.mountpoint)
    }

    /// The file system id that clients' file handles carry: the same on every host that exports the source.
    pub fn fsid(&self) -> String {
        fsid_of(&self.source)
    }

    /// The table of exports(5) for this mount.
    pub fn exports_file(&self) -> ConfigurationFile {
        // mp: while nothing is mounted there, clients wait. Else they would get the folder below, with the same fsid.
        let mut options =
            format!("{},sync,mp,no_subtree_check,fsid={}", if self.writable { "rw" } else { "ro" }, self.fsid());
        if self.trust_root {
            options.push_str(",no_root_squash");
        }
        let mut text = format!(
            "# Written by `spurline export`; `spurline export {} --remove` takes it back.\n",
            self.mountpoint.display()
        );
        text.push_str(&escape_path(&self.shown_path));
        for client in &self.clients {
            let _ = write!(text, " {client}({options})");
        }
        text.push('\n');
        ConfigurationFile { path: format!("etc/exports.d/spurline-{}.exports", self.id()).into(), text }
    }

    /// The server's settings.
    pub fn settings_file(&self) -> ConfigurationFile {
        let mut text = String::from("# Written by `spurline export`; removed with its last export.\n[nfsd]\n");
        let _ = writeln!(text, "threads={}\nvers3=y\nvers4=y\nvers4.2=y\ntcp=y", self.threads);
        if self.rdma {
            let _ = writeln!(text, "rdma=y\nrdma-port={RDMA_PORT}");
        }
        ConfigurationFile { path: SETTINGS_FILE.into(), text }
    }

    /// Where the record and the names of this export are stored, below the root of files.
    pub fn state_dir(&self) -> PathBuf {
        Path::new(STATE_DIR).join(self.id())
    }
}

/// The file system id of a source.
pub(crate) fn fsid_of(source: &str) -> String {
    let hex = format!("{:032x}", xxh3_128(source.as_bytes()));
    [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-")
}

/// The name of an export.
pub fn export_id(source: &str, mountpoint: &Path) -> String {
    let mut bytes = source.as_bytes().to_vec();
    bytes.push(0);
    bytes.extend_from_slice(mountpoint.as_os_str().as_bytes());
    format!("{:016x}", xxh3_64(&bytes))
}

/// A mountpoint as clients name it: below `rootdir` of `[exports]` in nfs.conf, if that is set.
///
/// # Errors
/// When the mountpoint is outside of that folder.
pub fn shown_path(root: &Path, mountpoint: &Path) -> Result<PathBuf> {
    let mut files = vec![root.join("etc/nfs.conf")];
    let more = std::fs::read_dir(root.join("etc/nfs.conf.d")).into_iter().flatten().flatten().map(|file| file.path());
    let mut more: Vec<PathBuf> = more.filter(|path| path.extension().is_some_and(|e| e == "conf")).collect();
    more.sort();
    files.extend(more);
    let text: Vec<String> = files.iter().filter_map(|path| std::fs::read_to_string(path).ok()).collect();
    let Some(top) = text.iter().filter_map(|text| root_of_exports(text)).next_back() else {
        return Ok(mountpoint.to_owned());
    };
    let below = mountpoint.strip_prefix(&top).map_err(|_| {
        let text = format!("{} lies outside of {top}, the rootdir of all exports in nfs.conf", mountpoint.display());
        Error::new(ErrorKind::Unavailable, text)
    })?;
    Ok(Path::new("/").join(below))
}

/// The value of `rootdir` in the section `[exports]`.
fn root_of_exports(text: &str) -> Option<String> {
    let mut section = String::new();
    let mut found = None;
    for line in text.lines().map(str::trim).filter(|line| !line.starts_with(['#', ';'])) {
        if let Some(name) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            section = name.trim().to_ascii_lowercase();
        } else if let Some((key, value)) = line.split_once('=')
            && section == "exports"
            && key.trim().eq_ignore_ascii_case("rootdir")
        {
            found = Some(value.trim().trim_matches('"').to_owned());
        }
    }
    found
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

/// What `--apply` has done, so that `--remove` takes back that and nothing else.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExportRecord {
    /// The mountpoint.
    pub mountpoint: PathBuf,
    /// The mount's source.
    pub source: String,
    /// Served over RDMA.
    pub rdma: bool,
    /// The NFS server was started for it.
    pub started_server: bool,
}

impl ExportRecord {
    /// The name of the record's file.
    const NAME: &str = "export.json";

    /// All records below `root`, in no order.
    pub fn read_all(root: &Path) -> Vec<(String, ExportRecord)> {
        let Ok(folders) = std::fs::read_dir(root.join(STATE_DIR)) else { return Vec::new() };
        let ids = folders.flatten().filter_map(|folder| folder.file_name().into_string().ok());
        ids.filter_map(|id| ExportRecord::read(root, &id).map(|record| (id, record))).collect()
    }

    /// The record of an export; `None` if there is none, or it is not readable.
    pub fn read(root: &Path, id: &str) -> Option<ExportRecord> {
        let text = std::fs::read(root.join(STATE_DIR).join(id).join(Self::NAME)).ok()?;
        let value: Value = serde_json::from_slice(&text).ok()?;
        Some(ExportRecord {
            mountpoint: value["mountpoint"].as_str()?.into(),
            source: value["source"].as_str()?.to_owned(),
            rdma: value["rdma"].as_bool()?,
            started_server: value["started_server"].as_bool()?,
        })
    }

    /// Stores the record.
    pub fn write(&self, root: &Path, id: &str) -> Result<()> {
        let mountpoint = self.mountpoint.to_str().ok_or_else(|| {
            let text = format!("{}: the mountpoint's name is not UTF-8", self.mountpoint.display());
            Error::new(ErrorKind::Unsupported, text)
        })?;
        let value = json!({
            "mountpoint": mountpoint,
            "source": self.source,
            "rdma": self.rdma,
            "started_server": self.started_server,
        });
        let path = root.join(STATE_DIR).join(id).join(Self::NAME);
        std::fs::write(&path, format!("{value}\n")).map_err(|e| Error::io(path.display(), &e))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan() -> ExportPlan {
        ExportPlan {
            mountpoint: "/mnt/my data".into(),
            shown_path: "/mnt/my data".into(),
            source: "s3://datasets".into(),
            clients: vec!["10.0.0.0/24".into(), "fd77::/64".into()],
            writable: false,
            trust_root: false,
            rdma: true,
            threads: 16,
        }
    }

    #[test]
    fn the_files_are_what_exports_and_nfs_conf_expect() {
        let exports = plan().exports_file();
        let line = exports.text.lines().nth(1).unwrap();
        let options = format!("(ro,sync,mp,no_subtree_check,fsid={})", plan().fsid());
        assert_eq!(line, format!("/mnt/my\\040data 10.0.0.0/24{options} fd77::/64{options}"));
        assert!(plan().settings_file().text.contains("\nrdma=y\nrdma-port=20049\n"));
        let tcp = ExportPlan { rdma: false, writable: true, trust_root: true, ..plan() };
        assert!(!tcp.settings_file().text.contains("rdma"));
        assert!(tcp.exports_file().text.contains("(rw,sync,") && tcp.exports_file().text.contains(",no_root_squash)"));
    }

    #[test]
    fn the_file_system_id_belongs_to_the_source_and_the_name_to_the_mount() {
        let other = ExportPlan { mountpoint: "/mnt/b".into(), ..plan() };
        assert_eq!(plan().fsid(), other.fsid());
        assert_eq!(plan().fsid().len(), 36);
        assert_ne!(plan().id(), other.id());
        assert_ne!(plan().fsid(), ExportPlan { source: "s3://others".into(), ..plan() }.fsid());
    }

    #[test]
    fn clients_name_a_mount_below_the_root_of_exports() {
        let root = tempfile::tempdir().unwrap();
        let shown = |at: &str| shown_path(root.path(), Path::new(at));
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

    #[test]
    fn a_record_is_read_as_it_was_written() {
        let root = tempfile::tempdir().unwrap();
        let record =
            ExportRecord { mountpoint: "/mnt/x".into(), source: "/d".into(), rdma: true, started_server: false };
        assert!(ExportRecord::read_all(root.path()).is_empty());
        std::fs::create_dir_all(root.path().join(plan().state_dir())).unwrap();
        record.write(root.path(), &plan().id()).unwrap();
        assert_eq!(ExportRecord::read_all(root.path()), [(plan().id(), record)]);
    }
}
