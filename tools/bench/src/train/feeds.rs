//! Where the files of a load come from: a plain folder, a mount that runs alone, a mount that reads from a node, or a folder that
//! the user names. Replays nothing.

use super::data_set::{self, DataFile};
use crate::child;
use crate::delayed_link::DelayedLink;
use crate::error::{BenchError, Result};
use crate::mount::{CounterValues, MountUnderTest, NodeUnderTest, mountpoint_of, query_counters};
use crate::netns::NamespacePair;
use crate::scratch::ScratchDir;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The node's port in a network namespace.
const NODE_PORT: u16 = 7120;

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
    // Dropped in this order: the mount before the node, both before the network and the link.
    mount: Option<MountUnderTest>,
    node: Option<NodeUnderTest>,
    _net: Option<NamespacePair>,
    _link: Option<DelayedLink>,
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
    /// Additional round trip between mount and node.
    pub round_trip: Duration,
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
                feed.mountpoint = Some(mounted.at().to_owned());
                feed.mount = Some(mounted);
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
        TrainFeed { name, dir, files, mountpoint: None, mount: None, node: None, _net: None, _link: None }
    }

    fn open_node(&self) -> Result<TrainFeed> {
        if !self.round_trip.is_zero() {
            return self.open_distant_node();
        }
        let net = NamespacePair::new()?;
        let node = self.start_node(net.server_ip, NODE_PORT, Some(&net.server))?;
        let registry = format!("static:{}", node.addr);
        let mounted = self.start_mount("remote", Some(&net.client), &["--registry", &registry])?;
        let mut feed = self.feed_of(FeedKind::Node, mounted.at().to_owned());
        feed.mountpoint = Some(mounted.at().to_owned());
        feed.mount = Some(mounted);
        feed.node = Some(node);
        feed._net = Some(net);
        Ok(feed)
    }

    /// Node and mount on loopback, with a relay between them: many kernels can't delay packets.
    fn open_distant_node(&self) -> Result<TrainFeed> {
        let port = child::free_port().map_err(|error| BenchError::io("no port is free", &error))?;
        let node = self.start_node("127.0.0.1", port, None)?;
        let address = node.addr.parse().map_err(|_| BenchError::Failed(format!("'{}' is no address", node.addr)))?;
        let link = DelayedLink::start(address, self.round_trip)?;
        let registry = format!("static:{}", link.address());
        let mounted = self.start_mount("remote", None, &["--registry", &registry])?;
        let mut feed = self.feed_of(FeedKind::Node, mounted.at().to_owned());
        feed.mountpoint = Some(mounted.at().to_owned());
        feed.mount = Some(mounted);
        feed.node = Some(node);
        feed._link = Some(link);
        Ok(feed)
    }

    fn start_node(&self, host: &str, port: u16, namespace: Option<&str>) -> Result<NodeUnderTest> {
        let cache = self.scratch.empty_subdir("cache-node")?;
        let log = self.scratch.subdir("logs")?.join("node.log");
        let mut command = child::command_in(self.spurline, namespace);
        command.arg("node").arg("--source").arg(self.source).arg("--cache-dir").arg(cache);
        command.args(["--cache-size", "-1", "--free-space-ratio", "0", "--allow-anyone", "--metrics", "none"]);
        command.args(["--group-network", host, "--group-port", &port.to_string()]);
        NodeUnderTest::start(command, &format!("{host}:{port}"), namespace, &log)
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
    Ok(TrainFeed { name, dir, files, mountpoint, mount: None, node: None, _net: None, _link: None })
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
