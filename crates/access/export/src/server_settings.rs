//! The settings of the NFS server: the administrator's nfs.conf, and the file that exports add. Changes nothing that the
//! administrator has set: threads are only raised, versions are left alone.

use crate::configuration::{ConfigurationFile, RDMA_PORT};
use crate::export_records::ExportRecord;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

/// The settings that exports add, shared by all exports.
const SETTINGS_FILE: &str = "etc/nfs.conf.d/spurline.conf";

/// The administrator's settings.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NfsSettings {
    /// By section and key, both in small letters.
    values: BTreeMap<(String, String), String>,
}

impl NfsSettings {
    /// Reads nfs.conf and the additional files below `root`, without the file of exports.
    pub fn read(root: &Path) -> NfsSettings {
        let more = std::fs::read_dir(root.join("etc/nfs.conf.d")).into_iter().flatten().flatten();
        let mut files: Vec<PathBuf> = more.map(|file| file.path()).collect();
        files.retain(|path| path.extension().is_some_and(|e| e == "conf") && *path != root.join(SETTINGS_FILE));
        files.sort();
        files.insert(0, root.join("etc/nfs.conf"));
        let mut settings = NfsSettings::default();
        for text in files.iter().filter_map(|path| std::fs::read_to_string(path).ok()) {
            settings.add(&text);
        }
        settings
    }

    fn add(&mut self, text: &str) {
        let mut section = String::new();
        for line in text.lines().map(str::trim).filter(|line| !line.starts_with(['#', ';'])) {
            if let Some((name, _)) = line.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
                section = name.trim().to_ascii_lowercase();
            } else if let Some((key, value)) = line.split_once('=') {
                let Some(value) = strip_value(value) else { continue };
                self.values.insert((section.clone(), key.trim().to_ascii_lowercase()), value.to_owned());
            }
        }
    }

    fn value(&self, section: &str, key: &str) -> Option<&str> {
        self.values.get(&(section.to_owned(), key.to_owned())).map(String::as_str)
    }

    /// A setting of `[nfsd]` that is switched on or off; `None` if not set.
    fn switch(&self, key: &str) -> Option<bool> {
        match self.value("nfsd", key)?.to_ascii_lowercase().as_str() {
            "1" | "t" | "true" | "y" | "yes" | "on" => Some(true),
            "0" | "f" | "false" | "n" | "no" | "off" => Some(false),
            _ => None,
        }
    }

    /// The folder that clients see as the root of all exports.
    pub fn root_of_exports(&self) -> Option<&str> {
        self.value("exports", "rootdir").filter(|top| !top.is_empty())
    }

    /// The threads of the server, if set to a number.
    pub fn threads(&self) -> Option<u32> {
        self.value("nfsd", "threads")?.parse().ok()
    }

    /// Whether the threads of the server are set, also to a text that is no number.
    pub fn sets_threads(&self) -> bool {
        self.value("nfsd", "threads").is_some()
    }

    /// The setting that keeps clients of a version (`3`, `4.2`) out.
    pub fn refusal_of(&self, version: &str) -> Option<String> {
        let above = version.split('.').next().unwrap_or(version);
        let keys = [format!("vers{above}"), format!("vers{version}"), "tcp".to_owned()];
        keys.into_iter().find(|key| self.switch(key) == Some(false)).map(|key| format!("{key}=n"))
    }

    /// Whether a version (`3`, `4.2`) is switched on.
    pub(crate) fn switches_on(&self, version: &str) -> bool {
        self.switch(&format!("vers{version}")) == Some(true)
    }

    /// Whether the server listens for RDMA without any export.
    pub fn serves_rdma(&self) -> bool {
        self.switch("rdma") == Some(true)
    }

    /// The port of RDMA.
    pub fn rdma_port(&self) -> u16 {
        self.value("nfsd", "rdma-port").and_then(|port| port.parse().ok()).unwrap_or(RDMA_PORT)
    }
}

/// A value as read by nfs-utils: in quotes of either kind, else up to a comment. `None` without the second quote: the line counts
/// for nothing.
fn strip_value(text: &str) -> Option<&str> {
    let text = text.trim();
    match text.chars().next().filter(|c| ['"', '\''].contains(c)) {
        Some(quote) => text[1..].split_once(quote).map(|(value, _)| value),
        None => text.split(['#', ';']).next().map(str::trim_end),
    }
}

/// The threads of a server that is started for exports: no fewer than any export asks for, and than the administrator has set.
/// `None` leaves the number to the settings of the administrator.
pub(crate) fn threads_at_start<'a>(
    settings: &NfsSettings,
    exports: impl Iterator<Item = &'a ExportRecord>,
) -> Option<u32> {
    if settings.sets_threads() && settings.threads().is_none() {
        return None;
    }
    let asked = exports.filter_map(|export| export.threads).max()?;
    Some(settings.threads().map_or(asked, |own| own.max(asked)))
}

/// The path of the settings that exports add.
pub(crate) fn settings_path(root: &Path) -> PathBuf {
    root.join(SETTINGS_FILE)
}

/// What all exports together add to the administrator's settings; `None` if nothing is missing.
pub(crate) fn settings_file<'a>(
    settings: &NfsSettings,
    exports: impl Iterator<Item = &'a ExportRecord> + Clone,
) -> Option<ConfigurationFile> {
    let threads = threads_at_start(settings, exports.clone()).filter(|n| settings.threads() != Some(*n));
    let rdma = exports.clone().any(|export| export.rdma) && !settings.serves_rdma();
    if threads.is_none() && !rdma {
        return None;
    }
    let mut text = String::from("# Written by `spurline export`; removed with its last export.\n[nfsd]\n");
    if let Some(threads) = threads {
        let _ = writeln!(text, "threads={threads}");
    }
    if rdma {
        let _ = writeln!(text, "rdma=y\nrdma-port={}", settings.rdma_port());
    }
    Some(ConfigurationFile { path: SETTINGS_FILE.into(), text })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(rdma: bool, threads: Option<u32>) -> ExportRecord {
        let (at, source, fsid) = ("/mnt/a", "/d".into(), String::new());
        ExportRecord { mountpoint: at.into(), shown_path: at.into(), source, fsid, rdma, threads }
    }

    fn settings(text: &str) -> NfsSettings {
        let mut settings = NfsSettings::default();
        settings.add(text);
        settings
    }

    #[test]
    fn exports_share_one_file_that_has_what_any_of_them_needs() {
        let lines = |settings: &NfsSettings, exports: &[ExportRecord]| {
            settings_file(settings, exports.iter()).map(|file| file.text.lines().skip(2).collect::<Vec<_>>().join(" "))
        };
        let none = NfsSettings::default();
        let both = [record(true, Some(8)), record(false, Some(16))];
        assert_eq!(lines(&none, &both).unwrap(), "threads=16 rdma=y rdma-port=20049");
        assert_eq!(lines(&none, &both[1..]).unwrap(), "threads=16");
        assert_eq!(lines(&none, &[]), None);
        // What the administrator has set stays.
        assert_eq!(lines(&settings("[nfsd]\nthreads=32\n"), &both[1..]), None);
        assert_eq!(lines(&settings("[nfsd]\nthreads=3\nvers3=n\n"), &both[1..]).unwrap(), "threads=16");
        let own = settings("[nfsd]\nthreads=64\nrdma=yes\nrdma-port=20050\n");
        assert_eq!((lines(&own, &both), own.rdma_port()), (None, 20050));
    }

    #[test]
    fn values_have_quotes_and_comments() {
        let threads = |text: &str| settings(&format!("[nfsd] # x\nthreads={text}\n")).threads();
        for text in ["32", " 32\t# of the rack", "32;x", "\"32\"", "'32'", "'32' # x", "\"32\";x"] {
            assert_eq!(threads(text), Some(32), "{text}");
        }
        let own = settings("[exports]\nrootdir='/srv #1' # x\n");
        assert_eq!(own.root_of_exports(), Some("/srv #1"));
        assert_eq!(settings("[nfsd]\nthreads=3\nthreads='32\n").threads(), Some(3), "the quote has no end");
        assert_eq!(settings("[exports]\nrootdir= # none\n").root_of_exports(), None);
        assert_eq!(settings("[nfsd]\nvers3='n' # x\n").refusal_of("3").unwrap(), "vers3=n");
        // What is no number is the administrator's setting nevertheless.
        for text in ["32x", "$threads"] {
            let own = settings(&format!("[nfsd]\nthreads={text}\n"));
            assert!(own.sets_threads() && own.threads().is_none());
            assert_eq!(settings_file(&own, [record(false, Some(8))].iter()), None);
        }
    }

    #[test]
    fn a_server_starts_with_the_most_threads_that_anybody_asks_for() {
        let start = |text: &str, exports: &[Option<u32>]| {
            let exports: Vec<ExportRecord> = exports.iter().map(|threads| record(false, *threads)).collect();
            threads_at_start(&settings(text), exports.iter())
        };
        assert_eq!(start("", &[Some(8), None, Some(16)]), Some(16));
        assert_eq!(start("[nfsd]\nthreads=64\n", &[Some(8)]), Some(64));
        assert_eq!(start("[nfsd]\nthreads=3\n", &[Some(8)]), Some(8));
        assert_eq!(start("[nfsd]\nthreads=many\n", &[Some(8)]), None);
        assert_eq!(start("[nfsd]\nthreads=64\n", &[None]), None);
    }

    #[test]
    fn versions_that_are_switched_off_are_named() {
        let own = settings("# x\n[nfsd]\n vers3 = n\nVERS4.2=off\n");
        assert_eq!(own.refusal_of("3").unwrap(), "vers3=n");
        assert_eq!(own.refusal_of("4.2").unwrap(), "vers4.2=n");
        assert_eq!(settings("[mountd]\nvers3=n\n[nfsd]\nvers3=y\n").refusal_of("3"), None);
        assert_eq!(settings("[nfsd]\nvers4=0\n").refusal_of("4.2").unwrap(), "vers4=n");
    }

    #[test]
    fn later_files_win_and_the_file_of_exports_is_not_the_administrators() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write("etc/nfs.conf", "[nfsd]\nthreads=3\n");
        write(SETTINGS_FILE, "[nfsd]\nthreads=64\n");
        assert_eq!(NfsSettings::read(root.path()).threads(), Some(3));
        write("etc/nfs.conf.d/a.conf", "[nfsd]\nthreads=5\n");
        write("etc/nfs.conf.d/b.old", "[nfsd]\nthreads=7\n");
        assert_eq!(NfsSettings::read(root.path()).threads(), Some(5));
    }
}
