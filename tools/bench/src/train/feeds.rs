//! Where the files of a load come from: a plain folder, a mount that runs alone, a mount that reads from a node, or a folder that
//! the user names. Replays nothing.

use super::data_set::{self, DataFile};
use crate::child;
use crate::error::{BenchError, Result};
use crate::mount::{CounterValues, MountUnderTest, NodeUnderTest, mountpoint_of, query_counters};
use crate::netns::NamespacePair;
use crate::scratch::ScratchDir;
use std::path::{Path, PathBuf};

/// A kind of feed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum FeedKind {
    /// The plain folder: the ceiling
    Directory,
    /// A mount that runs alone, with the files in its cache
    Mount,
    /// A mount that reads from a node over TCP, between two network namespaces
    Node,
}

impl FeedKind {
    /// The word on the command line and in reports.
    pub fn word(self) -> &'static str {
        match self {
            FeedKind::Directory => "directory",
            FeedKind::Mount => "mount",
            FeedKind::Node => "node",
        }
    }
}

/// A feed, ready to be read.
pub struct TrainFeed {
    /// The name in reports.
    pub name: String,
    /// The folder of the files.
    pub dir: PathBuf,
    /// The files.
    pub files: Vec<DataFile>,
    /// The mountpoint of a mount of Spurline.
    mountpoint: Option<PathBuf>,
    // Dropped in this order: the mount before the node, both before the network.
    mount: Option<MountUnderTest>,
    node: Option<NodeUnderTest>,
    _net: Option<NamespacePair>,
}

/// The place where feeds are made.
pub struct FeedWorkplace<'a> {
    /// The program under test.
    pub spurline: &'a Path,
    /// A folder for caches, mountpoints and logs.
    pub scratch: &'a ScratchDir,
    /// The folder with the files.
    pub source: &'a Path,
    /// The files.
    pub files: &'a [DataFile],
}

impl FeedWorkplace<'_> {
    /// Makes a feed of the files, and compares every byte there once, which also fills the caches.
    ///
    /// # Errors
    /// `Missing` when this machine lacks a prerequisite, or `Failed` when the feed does not start or a byte is wrong.
    pub fn open_feed(&self, kind: FeedKind) -> Result<TrainFeed> {
        let feed = match kind {
            FeedKind::Directory => self.feed_of(kind, self.source.to_owned()),
            FeedKind::Mount => {
                let cache = self.scratch.empty_subdir("cache-mount")?.display().to_string();
                let words = ["--cache-dir", &cache, "--cache-size", "-1", "--free-space-ratio", "0"];
                let mounted = self.start_mount("mount", None, &words)?;
                let mut feed = self.feed_of(kind, mounted.at().to_owned());
                (feed.mountpoint, feed.mount) = (Some(mounted.at().to_owned()), Some(mounted));
                feed
            }
            FeedKind::Node => self.open_node()?,
        };
        data_set::check_files(&feed.dir, self.files)?;
        Ok(feed)
    }

    fn feed_of(&self, kind: FeedKind, dir: PathBuf) -> TrainFeed {
        let name = kind.word().to_owned();
        let files = self.files.to_vec();
        TrainFeed { name, dir, files, mountpoint: None, mount: None, node: None, _net: None }
    }

    fn open_node(&self) -> Result<TrainFeed> {
        let net = NamespacePair::new()?;
        let addr = format!("{}:7120", net.server_ip);
        let cache = self.scratch.empty_subdir("cache-node")?.display().to_string();
        let source = self.source.display().to_string();
        let words = ["--source", &source, "--cache-dir", &cache, "--cache-size", "-1", "--free-space-ratio", "0"];
        let network = ["--group-network", net.server_ip, "--group-port", "7120", "--allow-anyone", "--metrics", "none"];
        let words: Vec<String> = words.iter().chain(&network).map(|word| (*word).to_owned()).collect();
        let log = self.scratch.subdir("logs")?.join("node.log");
        let mut command = child::command_in(self.spurline, Some(&net.server));
        command.arg("node").args(&words);
        let node = NodeUnderTest::start(command, &addr, Some(&net.server), &log)?;
        let registry = format!("static:{addr}");
        let mounted = self.start_mount("remote", Some(&net.client), &["--registry", &registry])?;
        let mut feed = self.feed_of(FeedKind::Node, mounted.at().to_owned());
        (feed.mountpoint, feed.mount) = (Some(mounted.at().to_owned()), Some(mounted));
        (feed.node, feed._net) = (Some(node), Some(net));
        Ok(feed)
    }

    fn start_mount(&self, name: &str, net: Option<&str>, more: &[&str]) -> Result<MountUnderTest> {
        let at = self.scratch.subdir(&format!("mnt-{name}"))?;
        let mut command = child::command_in(self.spurline, net);
        command.arg("mount").arg(self.source).arg(&at).args(["--metrics", "none"]).args(more);
        MountUnderTest::start(command, &at, net, &self.scratch.subdir("logs")?.join(format!("{name}.log")))
    }
}

/// A folder that the user names; a mount of Spurline there is queried for counters.
///
/// # Errors
/// When the folder has no files.
pub fn open_folder(spurline: &Path, dir: &Path) -> Result<TrainFeed> {
    let files = data_set::list_files(dir)?;
    let dir = dir.canonicalize().map_err(|e| BenchError::io(dir.display(), &e))?;
    let mountpoint = mountpoint_of(&dir);
    let answers = query_counters(spurline, &mountpoint.display().to_string(), None).is_ok();
    let name = dir.display().to_string();
    let mountpoint = answers.then_some(mountpoint);
    Ok(TrainFeed { name, dir, files, mountpoint, mount: None, node: None, _net: None })
}

/// The counters of a feed's processes.
#[derive(Debug, Clone, Default)]
pub struct FeedCounters {
    /// The mount.
    pub mount: Option<CounterValues>,
    /// The node.
    pub node: Option<CounterValues>,
}

impl TrainFeed {
    /// The counters now.
    ///
    /// # Errors
    /// When a process does not answer.
    pub fn read_counters(&self, spurline: &Path) -> Result<FeedCounters> {
        let mount = match (&self.mount, &self.mountpoint) {
            (Some(mount), _) => Some(mount.counters(spurline)?),
            (None, Some(at)) => Some(query_counters(spurline, &at.display().to_string(), None)?),
            (None, None) => None,
        };
        let node = self.node.as_ref().map(|node| node.counters(spurline)).transpose()?;
        Ok(FeedCounters { mount, node })
    }
}
