//! Where facts come from: files below a root. It owns paths, symbolic links and limits, so that no reader above can
//! hang, leave the root or meet more than it asked for. It does not know what any file means.

mod probe;

use crate::archive;
use probe::{MOST_BYTES, MOST_NAMES, MOST_PAGE, Probe, Question, Reply};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The longest path, as the kernel has it.
const MOST_PATH: usize = 4096;
/// The most files and names of one tree that are looked at. A host with a thousand virtual functions has a quarter of
/// that; directories that lead into each other have no end.
const MOST_LOOKS: usize = 2_000_000;
/// As many symbolic links as the kernel follows in one path.
const MOST_LINKS: usize = 40;

/// A file or a symbolic link of a collected tree; directories follow from the paths.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Entry {
    /// What reading it gave.
    File(Vec<u8>),
    /// Where it points.
    Link(String),
}

/// A file that could not be looked at, and why.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct LeftOut {
    /// The path below the root.
    pub path: String,
    /// The kernel's words, or that no answer came.
    pub why: String,
}

/// The files below a root.
#[derive(Debug)]
pub struct Tree {
    source: Source,
    /// Paths whose parts are no symbolic links, by the path asked for.
    real: Mutex<HashMap<String, Option<String>>>,
    left_out: Mutex<BTreeMap<String, String>>,
    /// How much more is looked at.
    looks: AtomicUsize,
    record: Option<Mutex<BTreeMap<String, Entry>>>,
}

#[derive(Debug)]
enum Source {
    Disk { live: bool, probe: Mutex<Probe> },
    Memory(BTreeMap<String, Entry>),
}

impl Tree {
    /// This host's own files.
    pub fn live() -> Self {
        Tree::new(Source::Disk { live: true, probe: Mutex::new(Probe::new(PathBuf::from("/"))) })
    }

    /// A folder laid out like `/`; symbolic links in it never lead out of it.
    pub fn folder(root: &Path) -> Self {
        Tree::new(Source::Disk { live: false, probe: Mutex::new(Probe::new(root.to_owned())) })
    }

    /// A folder laid out like `/`, or a file that `net collect` wrote.
    ///
    /// # Errors
    /// When it is neither.
    pub fn open(path: &Path) -> io::Result<Self> {
        if std::fs::metadata(path)?.is_dir() {
            return Ok(Tree::folder(path));
        }
        Ok(Tree::memory(archive::read(io::BufReader::new(std::fs::File::open(path)?))?))
    }

    /// Files held in memory, by their path without the leading slash.
    pub fn memory(entries: BTreeMap<String, Entry>) -> Self {
        Tree::new(Source::Memory(entries))
    }

    fn new(source: Source) -> Self {
        Tree {
            source,
            real: Mutex::default(),
            left_out: Mutex::default(),
            looks: AtomicUsize::new(MOST_LOOKS),
            record: None,
        }
    }

    /// The same, keeping a copy of everything that is read from now on.
    pub fn recording(mut self) -> Self {
        self.record = Some(Mutex::default());
        self
    }

    /// What was read since [`Tree::recording`], at the paths where it really is.
    pub fn recorded(&self) -> BTreeMap<String, Entry> {
        let mut all = self.record.as_ref().map(|r| lock(r).clone()).unwrap_or_default();
        // A name kept as an empty file was a directory after all when something below it was read.
        let dirs: Vec<String> = all.keys().filter(|p| below(&all, p).next().is_some()).cloned().collect();
        dirs.iter().for_each(|dir| drop(all.remove(dir)));
        all
    }

    /// Whether these are the running kernel's own files.
    pub fn is_live(&self) -> bool {
        matches!(self.source, Source::Disk { live: true, .. })
    }

    /// What could not be looked at, by path: no permission, or no answer in time.
    pub fn left_out(&self) -> Vec<LeftOut> {
        lock(&self.left_out).iter().map(|(path, why)| LeftOut { path: path.clone(), why: why.clone() }).collect()
    }

    /// The bytes of a file, at most 1 MiB of them.
    pub fn bytes(&self, path: &str) -> Option<Vec<u8>> {
        let (real, bytes) = self.unrecorded(path)?;
        self.keep(real, || Entry::File(bytes.clone()));
        Some(bytes)
    }

    /// Counts files and names that are looked at; none when it was enough.
    fn look(&self, count: usize) -> Option<()> {
        let all = self.looks.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(count));
        if all.is_err() {
            self.looks.store(0, Ordering::Relaxed);
            let why = format!("left out after {MOST_LOOKS} others: do directories lead into each other?");
            lock(&self.left_out).insert("the rest of the files".to_owned(), why);
        }
        all.ok().map(drop)
    }

    fn unrecorded(&self, path: &str) -> Option<(String, Vec<u8>)> {
        self.look(1)?;
        let real = self.real(path)?;
        let bytes = match &self.source {
            Source::Memory(entries) => match entries.get(&real)? {
                Entry::File(bytes) => bytes[..bytes.len().min(MOST_BYTES as usize)].to_vec(),
                Entry::Link(_) => return None,
            },
            Source::Disk { .. } => match self.ask(Question::Read(real.clone()), path)? {
                Reply::Read(bytes) => bytes,
                _ => return None,
            },
        };
        Some((real, bytes))
    }

    /// The text of a file without white space around it; bytes that are no UTF-8 and control characters are shown
    /// as replacement characters. An empty file is as good as none.
    pub fn text(&self, path: &str) -> Option<String> {
        printable(&self.bytes(path)?)
    }

    /// The text of a file of which only what `keep` makes of it is recorded: files with other things in them, keys
    /// and passwords perhaps.
    pub fn text_kept(&self, path: &str, keep: impl Fn(&str) -> String) -> Option<String> {
        let bytes = self.unrecorded(path)?;
        let kept = keep(&printable(&bytes.1)?);
        self.keep(bytes.0, || Entry::File(kept.clone().into_bytes()));
        Some(kept)
    }

    /// A number, decimal or with `0x`; words after it are not looked at.
    pub fn number(&self, path: &str) -> Option<i64> {
        parse_number(&self.text(path)?)
    }

    /// The names in a directory, sorted.
    pub fn names(&self, dir: &str) -> Vec<String> {
        let Some(real) = self.look(1).and_then(|()| self.real(dir)) else { return Vec::new() };
        let mut names = match &self.source {
            Source::Memory(entries) => names_below(entries, &real),
            Source::Disk { .. } => match self.ask(Question::Names(real.clone()), dir) {
                Some(Reply::Names(names)) => names,
                _ => return Vec::new(),
            },
        };
        if self.look(names.len()).is_none() {
            return Vec::new();
        }
        names.sort_by_cached_key(|a| natural(a));
        if self.record.is_some() {
            // A name says something although nobody reads it: `/sys/module`, say.
            for name in &names {
                self.keep_name(&join(&real, name));
            }
        }
        names
    }

    /// The texts of all files of a directory, by name; cheaper than one by one.
    pub fn texts(&self, dir: &str) -> BTreeMap<String, String> {
        let Some(real) = self.look(1).and_then(|()| self.real(dir)) else { return BTreeMap::new() };
        let files = match &self.source {
            Source::Memory(entries) => names_below(entries, &real)
                .into_iter()
                .filter_map(|name| match entries.get(&join(&real, &name)) {
                    Some(Entry::File(bytes)) => Some((name, bytes[..bytes.len().min(MOST_PAGE as usize)].to_vec())),
                    _ => None,
                })
                .collect(),
            Source::Disk { .. } => match self.ask(Question::Files(real.clone()), dir) {
                Some(Reply::Files(files)) => files,
                _ => return BTreeMap::new(),
            },
        };
        if self.look(files.len()).is_none() {
            return BTreeMap::new();
        }
        let mut texts = BTreeMap::new();
        for (name, bytes) in files {
            if let Some(text) = printable(&bytes) {
                texts.insert(name.clone(), text);
            }
            self.keep(join(&real, &name), || Entry::File(bytes));
        }
        texts
    }

    /// Where a symbolic link points.
    pub fn link(&self, path: &str) -> Option<String> {
        self.look(1)?;
        let (dir, name) = path.rsplit_once('/').unwrap_or(("", path));
        let real = join(&self.real(dir)?, name);
        let target = self.raw_link(&real)?;
        self.keep(real, || Entry::Link(target.clone()));
        Some(target)
    }

    /// The last part of what a symbolic link points to: `driver` and `device` are such.
    pub fn link_name(&self, path: &str) -> Option<String> {
        let target = self.link(path)?;
        target.trim_end_matches('/').rsplit('/').next().filter(|n| !n.is_empty()).map(str::to_owned)
    }

    /// The path behind all symbolic links, without the leading slash; none when it is not there.
    pub fn real_path(&self, path: &str) -> Option<String> {
        let real = self.resolve(path, &mut 0)?;
        self.exists(path).then_some(real)
    }

    /// Whether something is there.
    pub fn exists(&self, path: &str) -> bool {
        let Some(real) = self.look(1).and_then(|()| self.real(path)) else { return false };
        let there = match &self.source {
            Source::Memory(entries) => {
                entries.contains_key(&real) || below(entries, &real).next().is_some() || real.is_empty()
            }
            Source::Disk { .. } => matches!(self.ask(Question::Exists(real.clone()), path), Some(Reply::Exists)),
        };
        if there {
            self.keep_name(&real);
        }
        there
    }

    fn ask(&self, question: Question, path: &str) -> Option<Reply> {
        let Source::Disk { probe, .. } = &self.source else { return None };
        let reply = lock(probe).ask(question);
        let why = match reply {
            Ok(reply) => return Some(reply),
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied => "permission denied".to_owned(),
            Err(e) if e.kind() == io::ErrorKind::TimedOut => e.to_string(),
            // Not there, EINVAL of an empty GID slot, EOPNOTSUPP of a speed nobody knows: nothing to be read.
            Err(_) => return None,
        };
        let path = path.trim_start_matches('/');
        lock(&self.left_out).insert(format!("/{path}"), why);
        None
    }

    fn keep(&self, real: String, entry: impl FnOnce() -> Entry) {
        if let Some(record) = &self.record
            && !real.is_empty()
        {
            lock(record).insert(real, entry());
        }
    }

    /// Records that something is there; an empty file stands for a directory, a device or what nobody read.
    fn keep_name(&self, real: &str) {
        let Some(record) = &self.record else { return };
        if real.is_empty() || lock(record).contains_key(real) {
            return;
        }
        let entry = self.raw_link(real).map_or(Entry::File(Vec::new()), Entry::Link);
        lock(record).insert(real.to_owned(), entry);
    }

    fn raw_link(&self, real: &str) -> Option<String> {
        match &self.source {
            Source::Memory(entries) => match entries.get(real)? {
                Entry::Link(target) => Some(target.clone()),
                Entry::File(_) => None,
            },
            // Not logged: most paths are no links, and that is EINVAL.
            Source::Disk { probe, .. } => match lock(probe).ask(Question::Link(real.to_owned())) {
                Ok(Reply::Link(target)) => Some(target),
                _ => None,
            },
        }
    }

    /// The path with every symbolic link of it followed inside the root; `..` at the root stays there.
    fn real(&self, path: &str) -> Option<String> {
        if self.is_live() && self.record.is_none() {
            // The kernel does it, and quicker.
            return Some(path.trim_matches('/').to_owned());
        }
        if let Some(known) = lock(&self.real).get(path) {
            return known.clone();
        }
        let mut links = 0;
        let found = self.resolve(path, &mut links);
        lock(&self.real).insert(path.to_owned(), found.clone());
        found
    }

    fn resolve(&self, path: &str, links: &mut usize) -> Option<String> {
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
            let here = join(&real, &part);
            if here.len() > MOST_PATH {
                return None;
            }
            let known = lock(&self.real).get(&here).cloned();
            let target = match known {
                // Resolved before, and the same: no link.
                Some(Some(same)) if same == here => None,
                _ => self.raw_link(&here),
            };
            match target {
                None => {
                    lock(&self.real).insert(here.clone(), Some(here.clone()));
                    real = here;
                }
                Some(target) => {
                    *links += 1;
                    if *links > MOST_LINKS || target.len() + real.len() > MOST_PATH {
                        return None;
                    }
                    self.keep(here, || Entry::Link(target.clone()));
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

/// A number as the kernel writes them.
pub(crate) fn parse_number(text: &str) -> Option<i64> {
    let word = text.split_whitespace().next()?;
    match word.strip_prefix("0x") {
        Some(hex) => i64::from_str_radix(hex, 16).ok(),
        None => word.parse().ok(),
    }
}

fn printable(bytes: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(bytes);
    let text = text.trim_matches(|c: char| c.is_whitespace() || c == '\0');
    if text.is_empty() {
        return None;
    }
    // A terminal must not be steered by what a file holds.
    let shown = |c: char| if c.is_control() && c != '\n' && c != '\t' { '\u{fffd}' } else { c };
    Some(text.chars().map(shown).collect())
}

fn join(dir: &str, name: &str) -> String {
    let (dir, name) = (dir.trim_matches('/'), name.trim_matches('/'));
    if dir.is_empty() { name.to_owned() } else { format!("{dir}/{name}") }
}

fn below<'a>(entries: &'a BTreeMap<String, Entry>, dir: &str) -> impl Iterator<Item = &'a str> {
    let start = if dir.is_empty() { String::new() } else { format!("{dir}/") };
    let skip = start.len();
    let mut range = entries.range(start.clone()..);
    std::iter::from_fn(move || range.next().filter(|(path, _)| path.starts_with(&start)).map(|(path, _)| &path[skip..]))
}

fn names_below(entries: &BTreeMap<String, Entry>, dir: &str) -> Vec<String> {
    let start = if dir.is_empty() { String::new() } else { format!("{dir}/") };
    let mut names: Vec<String> = Vec::new();
    let mut from = start.clone();
    while names.len() < MOST_NAMES
        && let Some((path, _)) = entries.range(from..).next().filter(|(path, _)| path.starts_with(&start))
    {
        let rest = &path[start.len()..];
        // What lies below a name is passed over: '0' comes after '/'.
        let (name, after) = match rest.split_once('/') {
            Some((name, _)) => (name, '0'),
            None => (rest, '\0'),
        };
        names.push(name.to_owned());
        from = format!("{start}{name}{after}");
    }
    // A file and something below it, which no real tree has.
    names.sort_unstable();
    names.dedup();
    names
}

/// Names in the order of the numbers in them: `mlx5_2` before `mlx5_10`.
pub(crate) fn natural(name: &str) -> Vec<(String, u64)> {
    let mut parts = Vec::new();
    let (mut word, mut digits) = (String::new(), String::new());
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

/// A panic while a lock is held leaves nothing half done here.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entries(list: &[(&str, &str)]) -> BTreeMap<String, Entry> {
        let entry = |text: &str| match text.strip_prefix("-> ") {
            Some(target) => Entry::Link(target.to_owned()),
            None => Entry::File(text.as_bytes().to_vec()),
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

    fn check(tree: &Tree) {
        assert_eq!(tree.text("/sys/class/net/ib0/mtu").as_deref(), Some("2044"));
        assert_eq!(tree.number("sys/class/net/ib0/device/vendor"), Some(0x15b3));
        assert_eq!(tree.link_name("sys/class/net/ib0/device/driver").as_deref(), Some("mlx5_core"));
        assert_eq!(tree.number("etc/abs"), Some(2044));
        assert_eq!(tree.number("etc/out"), Some(2044), "links stay below the root");
        assert_eq!(tree.text("etc/loop"), None);
        assert_eq!(tree.text("etc/empty"), None);
        assert_eq!(tree.text("etc/empty/below"), None);
        assert_eq!(tree.names("n"), ["x9", "x10"]);
        assert_eq!(tree.names("sys/class/net"), ["ib0"]);
        assert_eq!(tree.texts("n").len(), 2);
        assert!(tree.exists("sys/class/net/ib0/device") && !tree.exists("sys/class/net/ib1"));
        assert_eq!(tree.real_path("sys/class/net/ib0/device").as_deref(), Some("sys/devices/pci0"));
        assert!(tree.names("nothing").is_empty() && tree.texts("nothing").is_empty());
    }

    #[test]
    fn memory_and_folder_read_the_same_and_a_record_gives_it_back() {
        check(&Tree::memory(entries(LIST)));
        let dir = tempfile::tempdir().unwrap();
        for (path, entry) in entries(LIST) {
            let path = dir.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            match entry {
                Entry::File(bytes) => std::fs::write(path, bytes).unwrap(),
                Entry::Link(target) => std::os::unix::fs::symlink(target, path).unwrap(),
            }
        }
        check(&Tree::folder(dir.path()));
        let recording = Tree::folder(dir.path()).recording();
        check(&recording);
        check(&Tree::memory(recording.recorded()));
    }

    #[test]
    fn what_is_no_plain_file_is_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let fifo = dir.path().join("fifo");
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        std::fs::write(dir.path().join("huge"), vec![b'x'; 2 << 20]).unwrap();
        std::fs::write(dir.path().join("odd"), b"a\xff\x1b[31mb").unwrap();
        let tree = Tree::folder(dir.path());
        assert_eq!(tree.text("fifo"), None);
        assert_eq!(tree.text("huge").map(|t| t.len() as u64), Some(MOST_BYTES));
        assert_eq!(tree.text("odd").as_deref(), Some("a\u{fffd}\u{fffd}[31mb"));
        std::os::unix::fs::symlink("/proc/self/cmdline", dir.path().join("elsewhere")).unwrap();
        assert!(tree.texts("").len() == 2, "a link is not followed out of the folder");
    }

    #[test]
    fn directories_without_an_end_get_one() {
        let loops = entries(&[("a/here", "-> ."), ("a/x", "1"), ("b/far", &format!("-> {}", "x/".repeat(1 << 20)))]);
        let mut tree = Tree::memory(loops);
        tree.looks = AtomicUsize::new(100);
        assert_eq!(tree.text("b/far"), None);
        let mut dir = "a".to_owned();
        while tree.names(&dir).contains(&"here".to_owned()) {
            dir.push_str("/here");
        }
        let left = tree.left_out();
        assert!(left.len() == 1 && left[0].why.contains("lead into each other"), "{left:?}");
        assert!(tree.text("a/x").is_none() && tree.texts("a").is_empty() && !tree.exists("a"));
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
