//! The source of facts: files below a root. Owns paths, symbolic links and limits, so that no reader above can hang, leave the
//! root or read without bound. Does not know the meaning of a file.

mod file_reader;

use crate::archive;
use file_reader::{FileQuery, FileReader, FileReply, MAX_FILE_BYTES, MAX_NAMES, MAX_PAGE_BYTES};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

/// The kernel's limit of a path.
const MAX_PATH: usize = 4096;
/// Limit of files and names that are read. A host with a thousand virtual functions needs a quarter of that; directories that
/// form a loop would have no end.
const MAX_LOOKUPS: usize = 2_000_000;
/// The kernel's limit of symbolic links in a path.
const MAX_LINKS: usize = 40;

/// A file or a symbolic link of a collected tree; directories follow from the paths.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TreeEntry {
    /// The content.
    File(Vec<u8>),
    /// The target.
    Link(String),
}

/// A file that could not be read, and why.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct UnreadFile {
    /// The path below the root.
    pub path: String,
    /// The kernel's message, or a timeout.
    pub why: String,
}

/// The files below a root.
#[derive(Debug)]
pub struct HostTree {
    source: TreeSource,
    /// Resolved paths by requested path: no part of a resolved path is a symbolic link.
    resolve_cached: Mutex<HashMap<String, Option<String>>>,
    unread_files: Mutex<BTreeMap<String, String>>,
    /// How many more lookups are allowed.
    looks: AtomicUsize,
    record: Option<Mutex<BTreeMap<String, TreeEntry>>>,
}

#[derive(Debug)]
enum TreeSource {
    Disk { live: bool, probe: Mutex<FileReader> },
    Memory(BTreeMap<String, TreeEntry>),
}

impl HostTree {
    /// This host's own files.
    pub fn live() -> Self {
        HostTree::new(TreeSource::Disk { live: true, probe: Mutex::new(FileReader::new(PathBuf::from("/"))) })
    }

    /// A folder laid out like `/`; symbolic links there never lead out.
    pub fn from_folder(root: &Path) -> Self {
        HostTree::new(TreeSource::Disk { live: false, probe: Mutex::new(FileReader::new(root.to_owned())) })
    }

    /// A folder laid out like `/`, or a file that `net collect` wrote.
    ///
    /// # Errors
    /// When the path is neither.
    pub fn open(path: &Path) -> io::Result<Self> {
        if std::fs::metadata(path)?.is_dir() {
            return Ok(HostTree::from_folder(path));
        }
        Ok(HostTree::from_memory(archive::read_archive(io::BufReader::new(std::fs::File::open(path)?))?))
    }

    /// Files in memory, by path without the leading slash.
    pub fn from_memory(entries: BTreeMap<String, TreeEntry>) -> Self {
        HostTree::new(TreeSource::Memory(entries))
    }

    fn new(source: TreeSource) -> Self {
        HostTree {
            source,
            resolve_cached: Mutex::default(),
            unread_files: Mutex::default(),
            looks: AtomicUsize::new(MAX_LOOKUPS),
            record: None,
        }
    }

    /// Records a copy of everything that is read from now on.
    pub fn with_recording(mut self) -> Self {
        self.record = Some(Mutex::default());
        self
    }

    /// Everything read since [`HostTree::with_recording`], by resolved path.
    pub fn recorded_entries(&self) -> BTreeMap<String, TreeEntry> {
        let mut all = self.record.as_ref().map(|r| r.lock().clone()).unwrap_or_default();
        // A name recorded as an empty file was a directory if something below was read.
        let dirs: Vec<String> = all.keys().filter(|p| paths_below(&all, p).next().is_some()).cloned().collect();
        dirs.iter().for_each(|dir| drop(all.remove(dir)));
        all
    }

    /// Whether these are the running kernel's files.
    pub fn is_live(&self) -> bool {
        matches!(self.source, TreeSource::Disk { live: true, .. })
    }

    /// Files that could not be read, by path: permission denied, or a timeout.
    pub fn left_out(&self) -> Vec<UnreadFile> {
        self.unread_files.lock().iter().map(|(path, why)| UnreadFile { path: path.clone(), why: why.clone() }).collect()
    }

    /// The content of a file, at most 1 MiB.
    pub fn read_bytes(&self, path: &str) -> Option<Vec<u8>> {
        let (real, bytes) = self.read_unrecorded(path)?;
        self.record_entry(real, || TreeEntry::File(bytes.clone()));
        Some(bytes)
    }

    /// Counts lookups; `None` when the limit is reached.
    fn charge_lookups(&self, count: usize) -> Option<()> {
        let all = self.looks.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(count));
        if all.is_err() {
            self.looks.store(0, Ordering::Relaxed);
            let why = format!("left out after {MAX_LOOKUPS} others: possibly a loop of directories");
            self.unread_files.lock().insert("the rest of the files".to_owned(), why);
        }
        all.ok().map(drop)
    }

    fn read_unrecorded(&self, path: &str) -> Option<(String, Vec<u8>)> {
        self.charge_lookups(1)?;
        let real = self.real(path)?;
        let bytes = match &self.source {
            TreeSource::Memory(entries) => match entries.get(&real)? {
                TreeEntry::File(bytes) => bytes[..bytes.len().min(MAX_FILE_BYTES as usize)].to_vec(),
                TreeEntry::Link(_) => return None,
            },
            TreeSource::Disk { .. } => match self.query_files(FileQuery::Read(real.clone()), path)? {
                FileReply::Read(bytes) => bytes,
                _ => return None,
            },
        };
        Some((real, bytes))
    }

    /// The trimmed text of a file. Invalid UTF-8 and control characters become replacement characters. `None` for an
    /// empty file.
    pub fn read_text(&self, path: &str) -> Option<String> {
        printable_text(&self.read_bytes(path)?)
    }

    /// The text of a file of which only the result of `keep` is recorded, for files that may also hold keys and
    /// passwords.
    pub fn read_text_filtered(&self, path: &str, keep: impl Fn(&str) -> String) -> Option<String> {
        let bytes = self.read_unrecorded(path)?;
        let kept = keep(&printable_text(&bytes.1)?);
        self.record_entry(bytes.0, || TreeEntry::File(kept.clone().into_bytes()));
        Some(kept)
    }

    /// A number, decimal or with `0x`; words behind are ignored.
    pub fn read_number(&self, path: &str) -> Option<i64> {
        parse_number(&self.read_text(path)?)
    }

    /// The names in a directory, sorted.
    pub fn list_names(&self, dir: &str) -> Vec<String> {
        let Some(real) = self.charge_lookups(1).and_then(|()| self.real(dir)) else { return Vec::new() };
        let mut names = match &self.source {
            TreeSource::Memory(entries) => names_below(entries, &real),
            TreeSource::Disk { .. } => match self.query_files(FileQuery::Names(real.clone()), dir) {
                Some(FileReply::Names(names)) => names,
                _ => return Vec::new(),
            },
        };
        if self.charge_lookups(names.len()).is_none() {
            return Vec::new();
        }
        names.sort_by_cached_key(|a| natural_key(a));
        if self.record.is_some() {
            // A name carries information even if the file is never read, as in `/sys/module`.
            for name in &names {
                self.record_name(&join_path(&real, name));
            }
        }
        names
    }

    /// The texts of all files of a directory, by name; cheaper than single reads.
    pub fn read_texts(&self, dir: &str) -> BTreeMap<String, String> {
        let Some(real) = self.charge_lookups(1).and_then(|()| self.real(dir)) else { return BTreeMap::new() };
        let files = match &self.source {
            TreeSource::Memory(entries) => names_below(entries, &real)
                .into_iter()
                .filter_map(|name| match entries.get(&join_path(&real, &name)) {
                    Some(TreeEntry::File(bytes)) => {
                        Some((name, bytes[..bytes.len().min(MAX_PAGE_BYTES as usize)].to_vec()))
                    }
                    _ => None,
                })
                .collect(),
            TreeSource::Disk { .. } => match self.query_files(FileQuery::Files(real.clone()), dir) {
                Some(FileReply::Files(files)) => files,
                _ => return BTreeMap::new(),
            },
        };
        if self.charge_lookups(files.len()).is_none() {
            return BTreeMap::new();
        }
        let mut texts = BTreeMap::new();
        for (name, bytes) in files {
            if let Some(text) = printable_text(&bytes) {
                texts.insert(name.clone(), text);
            }
            self.record_entry(join_path(&real, &name), || TreeEntry::File(bytes));
        }
        texts
    }

    /// The target of a symbolic link.
    pub fn read_link(&self, path: &str) -> Option<String> {
        self.charge_lookups(1)?;
        let (dir, name) = path.rsplit_once('/').unwrap_or(("", path));
        let real = join_path(&self.real(dir)?, name);
        let target = self.raw_link(&real)?;
        self.record_entry(real, || TreeEntry::Link(target.clone()));
        Some(target)
    }

    /// The last component of a symbolic link's target, as used for `driver` and `device`.
    pub fn link_name(&self, path: &str) -> Option<String> {
        let target = self.read_link(path)?;
        target.trim_end_matches('/').rsplit('/').next().filter(|n| !n.is_empty()).map(str::to_owned)
    }

    /// The path with all symbolic links resolved, without the leading slash; `None` when there is none.
    pub fn real_path(&self, path: &str) -> Option<String> {
        let real = self.resolve_links(path, &mut 0)?;
        self.exists(path).then_some(real)
    }

    /// Whether a path exists.
    pub fn exists(&self, path: &str) -> bool {
        let Some(real) = self.charge_lookups(1).and_then(|()| self.real(path)) else { return false };
        let there = match &self.source {
            TreeSource::Memory(entries) => {
                entries.contains_key(&real) || paths_below(entries, &real).next().is_some() || real.is_empty()
            }
            TreeSource::Disk { .. } => {
                matches!(self.query_files(FileQuery::Exists(real.clone()), path), Some(FileReply::Exists))
            }
        };
        if there {
            self.record_name(&real);
        }
        there
    }

    fn query_files(&self, question: FileQuery, path: &str) -> Option<FileReply> {
        let TreeSource::Disk { probe, .. } = &self.source else { return None };
        let reply = probe.lock().run_query(question);
        let why = match reply {
            Ok(reply) => return Some(reply),
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied => "permission denied".to_owned(),
            Err(e) if e.kind() == io::ErrorKind::TimedOut => e.to_string(),
            // ENOENT, EINVAL of an empty GID entry, EOPNOTSUPP of an unknown speed: there is nothing to read.
            Err(_) => return None,
        };
        let path = path.trim_start_matches('/');
        self.unread_files.lock().insert(format!("/{path}"), why);
        None
    }

    fn record_entry(&self, real: String, entry: impl FnOnce() -> TreeEntry) {
        if let Some(record) = &self.record
            && !real.is_empty()
        {
            record.lock().insert(real, entry());
        }
    }

    /// Records that a path exists. An empty file stands for a directory, a device or a file that was not read.
    fn record_name(&self, real: &str) {
        let Some(record) = &self.record else { return };
        if real.is_empty() || record.lock().contains_key(real) {
            return;
        }
        let entry = self.raw_link(real).map_or(TreeEntry::File(Vec::new()), TreeEntry::Link);
        record.lock().insert(real.to_owned(), entry);
    }

    fn raw_link(&self, real: &str) -> Option<String> {
        match &self.source {
            TreeSource::Memory(entries) => match entries.get(real)? {
                TreeEntry::Link(target) => Some(target.clone()),
                TreeEntry::File(_) => None,
            },
            // Not reported: most paths are no links, and readlink then returns EINVAL.
            TreeSource::Disk { probe, .. } => match probe.lock().run_query(FileQuery::Link(real.to_owned())) {
                Ok(FileReply::Link(target)) => Some(target),
                _ => None,
            },
        }
    }

    /// The path with every symbolic link resolved inside the root; `..` at the root stays there.
    fn real(&self, path: &str) -> Option<String> {
        if self.is_live() && self.record.is_none() {
            // The kernel resolves links faster.
            return Some(path.trim_matches('/').to_owned());
        }
        if let Some(known) = self.resolve_cached.lock().get(path) {
            return known.clone();
        }
        let mut links = 0;
        let found = self.resolve_links(path, &mut links);
        self.resolve_cached.lock().insert(path.to_owned(), found.clone());
        found
    }

    fn resolve_links(&self, path: &str, links: &mut usize) -> Option<String> {
        let mut real = String::new();
        let mut rest: Vec<String> = path.split('/').rev().map(str::to_owned).collect();
        while let Some(part) = rest.pop() {
            match part.as_str() {
                "" | "." => continue,
                ".." => {
                    real.truncate(real.rfind('/').unwrap_or(0));
                    continue;
                }
                _ => {}
            }
            let here = join_path(&real, &part);
            if here.len() > MAX_PATH {
                return None;
            }
            let known = self.resolve_cached.lock().get(&here).cloned();
            let target = match known {
                // Resolved before, to itself: no link.
                Some(Some(same)) if same == here => None,
                _ => self.raw_link(&here),
            };
            match target {
                None => {
                    self.resolve_cached.lock().insert(here.clone(), Some(here.clone()));
                    real = here;
                }
                Some(target) => {
                    *links += 1;
                    if *links > MAX_LINKS || target.len() + real.len() > MAX_PATH {
                        return None;
                    }
                    self.record_entry(here, || TreeEntry::Link(target.clone()));
                    if target.starts_with('/') {
                        real.clear();
                    }
                    rest.extend(target.split('/').rev().map(str::to_owned));
                }
            }
        }
        Some(real)
    }
}

/// A number in the kernel's notation.
pub(crate) fn parse_number(text: &str) -> Option<i64> {
    let word = text.split_whitespace().next()?;
    match word.strip_prefix("0x") {
        Some(hex) => i64::from_str_radix(hex, 16).ok(),
        None => word.parse().ok(),
    }
}

fn printable_text(bytes: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(bytes);
    let text = text.trim_matches(|c: char| c.is_whitespace() || c == '\0');
    if text.is_empty() {
        return None;
    }
    // A file's content must not control the terminal.
    Some(text.chars().map(|c| if c.is_control() && c != '\n' && c != '\t' { '\u{fffd}' } else { c }).collect())
}

fn join_path(dir: &str, name: &str) -> String {
    let dir = dir.trim_matches('/');
    let name = name.trim_matches('/');
    if dir.is_empty() { name.to_owned() } else { format!("{dir}/{name}") }
}

fn paths_below<'a>(entries: &'a BTreeMap<String, TreeEntry>, dir: &str) -> impl Iterator<Item = &'a str> {
    let start = if dir.is_empty() { String::new() } else { format!("{dir}/") };
    let skip = start.len();
    let mut range = entries.range(start.clone()..);
    std::iter::from_fn(move || range.next().filter(|(path, _)| path.starts_with(&start)).map(|(path, _)| &path[skip..]))
}

fn names_below(entries: &BTreeMap<String, TreeEntry>, dir: &str) -> Vec<String> {
    let start = if dir.is_empty() { String::new() } else { format!("{dir}/") };
    let mut names: Vec<String> = Vec::new();
    let mut from = start.clone();
    while names.len() < MAX_NAMES
        && let Some((path, _)) = entries.range(from..).next().filter(|(path, _)| path.starts_with(&start))
    {
        let rest = &path[start.len()..];
        // Skips everything below a name: '0' follows '/'.
        let (name, after) = match rest.split_once('/') {
            Some((name, _)) => (name, '0'),
            None => (rest, '\0'),
        };
        names.push(name.to_owned());
        from = format!("{start}{name}{after}");
    }
    // Duplicates arise from a file with entries below, which no real tree has.
    names.sort_unstable();
    names.dedup();
    names
}

/// Sort key that orders the numbers in names: `mlx5_2` before `mlx5_10`.
pub(crate) fn natural_key(name: &str) -> Vec<(String, u64)> {
    let mut parts = Vec::new();
    let mut word = String::new();
    let mut digits = String::new();
    for c in name.chars() {
        if c.is_ascii_digit() {
            digits.push(c);
            continue;
        }
        if !digits.is_empty() {
            parts.push((std::mem::take(&mut word), digits.parse().unwrap_or(u64::MAX)));
            digits.clear();
        }
        word.push(c);
    }
    parts.push((word, digits.parse().unwrap_or(0)));
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entries(list: &[(&str, &str)]) -> BTreeMap<String, TreeEntry> {
        let entry = |text: &str| match text.strip_prefix("-> ") {
            Some(target) => TreeEntry::Link(target.to_owned()),
            None => TreeEntry::File(text.as_bytes().to_vec()),
        };
        list.iter().map(|(path, text)| ((*path).to_owned(), entry(text))).collect()
    }

    const LIST: &[(&str, &str)] = &[
        ("sys/class/net/ib0", "-> ../../devices/pci0/net/ib0"),
        ("sys/devices/pci0/net/ib0/mtu", "2044\n"),
        ("sys/devices/pci0/net/ib0/device", "-> ../.."),
        ("sys/devices/pci0/vendor", "0x15b3\n"),
        ("sys/devices/pci0/driver", "-> ../../bus/pci/drivers/mlx5_core"),
        ("etc/abs", "-> /sys/class/net/ib0/mtu"),
        ("etc/out", "-> ../../../../../../etc/abs"),
        ("etc/loop", "-> loop"),
        ("etc/empty", "\n"),
        ("n/x10", "a"),
        ("n/x9", "b"),
    ];

    fn check(tree: &HostTree) {
        assert_eq!(tree.read_text("/sys/class/net/ib0/mtu").as_deref(), Some("2044"));
        assert_eq!(tree.read_number("sys/class/net/ib0/device/vendor"), Some(0x15b3));
        assert_eq!(tree.link_name("sys/class/net/ib0/device/driver").as_deref(), Some("mlx5_core"));
        assert_eq!(tree.read_number("etc/abs"), Some(2044));
        assert_eq!(tree.read_number("etc/out"), Some(2044), "links stay below the root");
        assert_eq!(tree.read_text("etc/loop"), None);
        assert_eq!(tree.read_text("etc/empty"), None);
        assert_eq!(tree.read_text("etc/empty/below"), None);
        assert_eq!(tree.list_names("n"), ["x9", "x10"]);
        assert_eq!(tree.list_names("sys/class/net"), ["ib0"]);
        assert_eq!(tree.read_texts("n").len(), 2);
        assert!(tree.exists("sys/class/net/ib0/device") && !tree.exists("sys/class/net/ib1"));
        assert_eq!(tree.real_path("sys/class/net/ib0/device").as_deref(), Some("sys/devices/pci0"));
        assert!(tree.list_names("nothing").is_empty() && tree.read_texts("nothing").is_empty());
    }

    #[test]
    fn memory_and_folder_read_the_same_and_a_record_gives_it_back() {
        check(&HostTree::from_memory(entries(LIST)));
        let dir = tempfile::tempdir().unwrap();
        for (path, entry) in entries(LIST) {
            let path = dir.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            match entry {
                TreeEntry::File(bytes) => std::fs::write(path, bytes).unwrap(),
                TreeEntry::Link(target) => std::os::unix::fs::symlink(target, path).unwrap(),
            }
        }
        check(&HostTree::from_folder(dir.path()));
        let recording = HostTree::from_folder(dir.path()).with_recording();
        check(&recording);
        check(&HostTree::from_memory(recording.recorded_entries()));
    }

    #[test]
    fn what_is_no_plain_file_is_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let fifo = dir.path().join("fifo");
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        std::fs::write(dir.path().join("huge"), vec![b'x'; 2 << 20]).unwrap();
        std::fs::write(dir.path().join("odd"), b"a\xff\x1b[31mb").unwrap();
        let tree = HostTree::from_folder(dir.path());
        assert_eq!(tree.read_text("fifo"), None);
        assert_eq!(tree.read_text("huge").map(|t| t.len() as u64), Some(MAX_FILE_BYTES));
        assert_eq!(tree.read_text("odd").as_deref(), Some("a\u{fffd}\u{fffd}[31mb"));
        std::os::unix::fs::symlink("/proc/self/cmdline", dir.path().join("elsewhere")).unwrap();
        assert!(tree.read_texts("").len() == 2, "a link is not followed out of the folder");
    }

    #[test]
    fn directories_without_an_end_get_one() {
        let loops = entries(&[("a/here", "-> ."), ("a/x", "1"), ("b/far", &format!("-> {}", "x/".repeat(1 << 20)))]);
        let mut tree = HostTree::from_memory(loops);
        tree.looks = AtomicUsize::new(100);
        assert_eq!(tree.read_text("b/far"), None);
        let mut dir = "a".to_owned();
        while tree.list_names(&dir).contains(&"here".to_owned()) {
            dir.push_str("/here");
        }
        let left = tree.left_out();
        assert!(left.len() == 1 && left[0].why.contains("loop of directories"), "{left:?}");
        assert!(tree.read_text("a/x").is_none() && tree.read_texts("a").is_empty() && !tree.exists("a"));
    }

    #[test]
    fn numbers() {
        assert_eq!(parse_number("0x15b3"), Some(0x15b3));
        assert_eq!(parse_number("-1"), Some(-1));
        assert_eq!(parse_number("4: ACTIVE"), None);
        assert_eq!(parse_number("12 kB"), Some(12));
        assert_eq!(parse_number("99999999999999999999"), None);
    }
}
