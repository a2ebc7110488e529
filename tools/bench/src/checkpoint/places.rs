//! Where checkpoints are written and read back: a plain folder, a mount that runs alone, mounts of a node, or folders that the
//! user names. Writes no checkpoint.

use crate::child;
use crate::error::{BenchError, Result};
use crate::mount::{CounterValues, MountUnderTest, NodeUnderTest};
use crate::netns::NamespacePair;
use crate::scratch::ScratchDir;
use std::path::{Path, PathBuf};

/// A kind of place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum PlaceKind {
    /// The plain folder: what the others are compared with
    Directory,
    /// Two mounts that run alone: written through one, read back through the other
    Mount,
    /// Two mounts that write and read through a node over TCP, in two network namespaces
    Node,
}

impl PlaceKind {
    /// All kinds.
    pub const ALL: [PlaceKind; 3] = [PlaceKind::Directory, PlaceKind::Mount, PlaceKind::Node];

    /// The word on the command line and in reports.
    pub fn word(self) -> &'static str {
        match self {
            PlaceKind::Directory => "directory",
            PlaceKind::Mount => "mount",
            PlaceKind::Node => "node",
        }
    }
}

/// A place.
pub struct CheckpointPlace {
    /// The name in reports.
    pub name: String,
    /// The folder that is written to.
    pub write: PathBuf,
    /// The folder that is read from: the same files.
    pub read: PathBuf,
    /// The plain folder with the same files, where on this host.
    pub source: Option<PathBuf>,
    // Dropped in this order: mounts before the node, both before the network.
    _mounts: Vec<MountUnderTest>,
    node: Option<NodeUnderTest>,
    _net: Option<NamespacePair>,
}

impl CheckpointPlace {
    /// A folder that the user names: `[NAME=]DIR[:DIR]`.
    ///
    /// # Errors
    /// `Usage` for any other text.
    pub fn parse(text: &str) -> Result<CheckpointPlace> {
        let (name, dirs) = match text.split_once('=') {
            Some((name, dirs)) if !name.contains('/') => (name, dirs),
            _ => (text, text),
        };
        let (write, read) = dirs.split_once(':').unwrap_or((dirs, dirs));
        if name.is_empty() || ![write, read].iter().all(|dir| dir.starts_with('/')) || read.contains(':') {
            return Err(BenchError::Usage(format!(
                "--dir '{text}': give [NAME=]DIR, or [NAME=]DIR:DIR to read back through another mount, with absolute folders"
            )));
        }
        Ok(place_of(name, write.into(), read.into()))
    }

    /// Whether reads and writes use different folders.
    pub fn has_reader(&self) -> bool {
        self.read != self.write
    }

    /// The counters of the node, where the place has one.
    ///
    /// # Errors
    /// When the node does not answer.
    pub fn node_counters(&self, spurline: &Path) -> Result<Option<CounterValues>> {
        self.node.as_ref().map(|node| node.counters(spurline)).transpose()
    }
}

fn place_of(name: &str, write: PathBuf, read: PathBuf) -> CheckpointPlace {
    CheckpointPlace { name: name.to_owned(), write, read, source: None, _mounts: Vec::new(), node: None, _net: None }
}

/// Where own places are made.
pub struct PlaceBuilder<'a> {
    /// The program under test.
    pub spurline: &'a Path,
    /// A folder for sources, mountpoints and logs.
    pub scratch: &'a ScratchDir,
}

impl PlaceBuilder<'_> {
    /// Makes a place.
    ///
    /// # Errors
    /// `Missing` when this machine lacks a prerequisite, or `Failed` when a mount or node does not start.
    pub fn open_place(&self, kind: PlaceKind) -> Result<CheckpointPlace> {
        let source = self.scratch.subdir("source")?;
        let mut place = match kind {
            PlaceKind::Directory => place_of(kind.word(), source.clone(), source.clone()),
            PlaceKind::Mount => {
                let mounts = ["mount-a", "mount-b"].map(|name| self.start_mount(&source, name, None, &[]));
                let [write, read] = mounts;
                two_mounts(kind, write?, read?)
            }
            PlaceKind::Node => self.open_node(&source)?,
        };
        place.source = Some(source);
        Ok(place)
    }

    fn open_node(&self, source: &Path) -> Result<CheckpointPlace> {
        let net = NamespacePair::new()?;
        let addr = format!("{}:7121", net.server_ip);
        let source_text = source.display().to_string();
        let words = ["--source", &source_text, "--writable", "--cache-size", "0", "--group-network", net.server_ip];
        let more = ["--group-port", "7121", "--allow-anyone", "--metrics", "none"];
        let words: Vec<String> = words.iter().chain(&more).map(|word| (*word).to_owned()).collect();
        let log = self.scratch.subdir("logs")?.join("node.log");
        let mut command = child::command_in(self.spurline, Some(&net.server));
        command.arg("node").args(&words);
        let node = NodeUnderTest::start(command, &addr, Some(&net.server), &log)?;
        let registry = format!("static:{addr}");
        let mounted = |name: &str| self.start_mount(source, name, Some(&net.client), &["--registry", &registry]);
        let mut place = two_mounts(PlaceKind::Node, mounted("node-a")?, mounted("node-b")?);
        place.node = Some(node);
        place._net = Some(net);
        Ok(place)
    }

    fn start_mount(&self, source: &Path, name: &str, net: Option<&str>, more: &[&str]) -> Result<MountUnderTest> {
        let at = self.scratch.subdir(&format!("mnt-{name}"))?;
        let mut command = child::command_in(self.spurline, net);
        command.arg("mount").arg(source).arg(&at).args(["--rw", "--cache-size", "0", "--metrics", "none"]).args(more);
        MountUnderTest::start(command, &at, net, &self.scratch.subdir("logs")?.join(format!("{name}.log")))
    }
}

fn two_mounts(kind: PlaceKind, write: MountUnderTest, read: MountUnderTest) -> CheckpointPlace {
    let mut place = place_of(kind.word(), write.at().to_owned(), read.at().to_owned());
    place._mounts = vec![write, read];
    place
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_have_names_and_readers() {
        let parts = |text: &str| {
            let place = CheckpointPlace::parse(text).unwrap();
            (place.name.clone(), place.write.display().to_string(), place.read.display().to_string())
        };
        assert_eq!(parts("/mnt/a"), ("/mnt/a".into(), "/mnt/a".into(), "/mnt/a".into()));
        assert_eq!(parts("x=/mnt/a:/mnt/b"), ("x".into(), "/mnt/a".into(), "/mnt/b".into()));
        for wrong in ["mnt", "=/mnt", "x=/a:b", "/a:/b:/c", ""] {
            assert!(CheckpointPlace::parse(wrong).is_err(), "{wrong}");
        }
    }
}
