//! The folders that a command compares: a plain folder, a mount that runs alone, a mount of a node, or folders that the user names.
//! Reads and writes no file there.

use crate::child;
use crate::cost::RoleCounters;
use crate::delayed_link::DelayedLink;
use crate::error::{BenchError, Result};
use crate::mount::{MountUnderTest, NodeUnderTest, mountpoint_of, query_counters};
use crate::netns::NamespacePair;
use crate::terminal::word_of;
use crate::workplace::Workplace;
use clap::ValueEnum as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The node's port in a network namespace.
const PLACE_NODE_PORT: u16 = 7120;

/// A kind of place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum PlaceKind {
    /// The plain folder, with which the others are compared
    Directory,
    /// A mount that runs alone; written files are read through a second mount
    Mount,
    /// A mount of a node over TCP, between two network namespaces; written files are read through a second mount
    Node,
}

pub struct BenchPlace {
    pub name: String,
    /// The folder that is written to.
    pub write: PathBuf,
    /// The folder that is read from: the same files.
    pub read: PathBuf,
    /// The plain folder with the same files, of an own place.
    pub source: Option<PathBuf>,
    // Dropped in this order: mounts before the node, both before the network and the link.
    mounts: Vec<MountUnderTest>,
    node: Option<NodeUnderTest>,
    net: Option<NamespacePair>,
    link: Option<DelayedLink>,
}

impl BenchPlace {
    /// A folder that the user names: `[NAME=]DIR[:DIR]`.
    /// `Usage` for any other text.
    pub fn parse(text: &str) -> Result<BenchPlace> {
        let (name, dirs) = split_name(text);
        let (write, read) = dirs.split_once(':').unwrap_or((dirs, dirs));
        if name.is_empty() || ![write, read].iter().all(|dir| dir.starts_with('/')) || read.contains(':') {
            return Err(BenchError::Usage(format!(
                "--dir '{text}': give [NAME=]DIR, or [NAME=]DIR:DIR to read back through another mount, with absolute folders"
            )));
        }
        Ok(BenchPlace::of_dirs(name, write.into(), read.into()))
    }

    /// A folder that is read and written there.
    pub fn of_dirs(name: &str, write: PathBuf, read: PathBuf) -> BenchPlace {
        let name = name.to_owned();
        BenchPlace { name, write, read, source: None, mounts: Vec::new(), node: None, net: None, link: None }
    }

    /// Whether reads and writes use different folders.
    pub fn has_reader(&self) -> bool {
        self.read != self.write
    }

    /// The counters of the mount that is read from, as far as one answers, and of the node.
    pub fn counters(&self, spurline: &Path) -> Result<RoleCounters> {
        let at = mountpoint_of(&self.read).display().to_string();
        let mount = query_counters(spurline, &at, None).ok().map(|known| ("mount", known));
        Ok(mount.into_iter().chain(self.node_counters()?).collect())
    }

    /// The counters of the node, where the place has one.
    pub fn node_counters(&self) -> Result<RoleCounters> {
        self.node.iter().map(|node| Ok(("node", node.counters()?))).collect()
    }
}

/// The parts of `[NAME=]REST`; without a name the whole is the name.
pub fn split_name(text: &str) -> (&str, &str) {
    text.split_once('=').filter(|(name, _)| !name.contains(['/', ':'])).unwrap_or((text, text))
}

/// Where own places are made.
pub struct PlaceBuilder<'a> {
    /// The program under test, and the folder for mountpoints.
    pub work: &'a Workplace,
    /// The folder with the files.
    pub source: PathBuf,
    /// Two mounts that write, without a cache; else one that reads, with one.
    pub writable: bool,
    /// Additional round trip between a node and a mount.
    pub round_trip: Duration,
}

impl PlaceBuilder<'_> {
    /// Makes the places of these kinds, or of all kinds that this machine has the prerequisites for, with notes on the others.
    /// `Missing` when this machine lacks a prerequisite of a named kind; `Failed` when a mount or node does not start.
    pub fn open_all(&self, kinds: &[PlaceKind]) -> Result<(Vec<BenchPlace>, Vec<String>)> {
        let mut places = Vec::new();
        let mut notes = Vec::new();
        for kind in PlaceKind::value_variants().iter().filter(|kind| kinds.is_empty() || kinds.contains(kind)) {
            match self.open_place(*kind) {
                Ok(place) => places.push(place),
                Err(BenchError::Missing(why)) if kinds.is_empty() => {
                    notes.push(format!("SKIP: {}: {why}", word_of(kind)));
                }
                Err(error) => return Err(error),
            }
        }
        Ok((places, notes))
    }

    fn open_place(&self, kind: PlaceKind) -> Result<BenchPlace> {
        let mut place = BenchPlace::of_dirs(&word_of(&kind), self.source.clone(), self.source.clone());
        place.source = Some(self.source.clone());
        match kind {
            PlaceKind::Directory => {}
            PlaceKind::Mount => {
                let cache = self.work.empty_dir("cache-mount")?;
                self.add_mounts(&mut place, None, &["--cache-dir", &cache])?;
            }
            PlaceKind::Node => self.add_node(&mut place)?,
        }
        Ok(place)
    }

    fn add_node(&self, place: &mut BenchPlace) -> Result<()> {
        let words = if self.writable { ["--writable", "--cache-size", "0"] } else { CACHE_WORDS };
        let address = if self.round_trip.is_zero() {
            let net = place.net.insert(NamespacePair::new()?);
            format!("{}:{PLACE_NODE_PORT}", net.server_ip)
        } else {
            // On loopback, with a relay between them: many kernels can't delay packets.
            let port = child::free_port().map_err(|error| BenchError::io("no port is free", &error))?;
            format!("127.0.0.1:{port}")
        };
        let server = place.net.as_ref().map(|net| net.server.as_str());
        place.node = Some(self.work.node(&self.source, &address, server, &words, &[])?);
        let mut registry = format!("static:{address}");
        if !self.round_trip.is_zero() {
            let target = address.parse().map_err(|_| BenchError::Failed(format!("'{address}' is no address")))?;
            let link = place.link.insert(DelayedLink::start(target, self.round_trip, None)?);
            registry = format!("static:{}", link.address());
        }
        let client = place.net.as_ref().map(|net| net.client.clone());
        self.add_mounts(place, client.as_deref(), &["--registry", &registry])
    }

    fn add_mounts(&self, place: &mut BenchPlace, net: Option<&str>, words: &[&str]) -> Result<()> {
        let modes: &[&str] = match (self.writable, place.node.is_some()) {
            (true, _) => &["--rw", "--cache-size", "0"],
            (false, false) => &CACHE_WORDS,
            (false, true) => &[],
        };
        let words = [modes, words].concat();
        for name in ["a", "b"].iter().take(1 + usize::from(self.writable)) {
            let mount = self.work.mount(&format!("{}-{name}", place.name), &self.source, net, &words, &[])?;
            if place.mounts.is_empty() {
                place.write = mount.at().to_owned();
            }
            place.read = mount.at().to_owned();
            place.mounts.push(mount);
        }
        Ok(())
    }
}

/// A cache for all files.
const CACHE_WORDS: [&str; 3] = ["--cache-size=-1", "--free-space-ratio", "0"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_have_names_and_readers() {
        let parts = |text: &str| {
            let place = BenchPlace::parse(text).unwrap();
            (place.name.clone(), place.write.display().to_string(), place.read.display().to_string())
        };
        assert_eq!(parts("/mnt/a"), ("/mnt/a".into(), "/mnt/a".into(), "/mnt/a".into()));
        assert_eq!(parts("x=/mnt/a:/mnt/b"), ("x".into(), "/mnt/a".into(), "/mnt/b".into()));
        for wrong in ["mnt", "=/mnt", "x=/a:b", "/a:/b:/c", ""] {
            assert!(BenchPlace::parse(wrong).is_err(), "{wrong}");
        }
    }
}
