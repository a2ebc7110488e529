//! The staged files of a group, for a command: the list of those that the store does not have, the end of an upload, and a copy of the
//! bytes. Prints nothing.

use crate::group_nodes::{GroupReach, reach_group};
use crate::peers::PeerConnector;
use crate::stage::call_peer;
use spurline_client::NodeCalls;
use spurline_config::{Fault, Registry, TrustConfig};
use spurline_stage::{BucketKey, Manifest, PeerFailure, StageClass, StageClient, StagePeers, StageRefusal, StagedName};
use spurline_types::{Error, ErrorKind, Member, Result};
use std::fs::{self, File, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub use spurline_stage::{UnsavedList, UnsavedObject};

/// Between two looks at the list of unsaved files.
const UPLOADS_PAUSE: Duration = Duration::from_millis(500);

/// The nodes of a group, as a command calls these.
struct ListedNodes(NodeCalls);

impl StagePeers for ListedNodes {
    fn names(&self) -> Vec<String> {
        self.0.members().iter().map(|member| member.name.clone()).collect()
    }

    fn call(
        &self,
        node: &str,
        call: &[u8],
        bytes: &[u8],
        room: usize,
        deadline: Instant,
    ) -> Result<(Vec<u8>, Vec<u8>), PeerFailure> {
        call_peer(&self.0, node, call, bytes, room, deadline)
    }
}

/// A staged file that was found.
pub struct StagedFile {
    at: BucketKey,
    /// `None` for a file whose removal waits for the store.
    manifest: Option<Box<Manifest>>,
}

impl StagedFile {
    /// Bytes of the file.
    pub fn len_bytes(&self) -> u64 {
        self.manifest.as_ref().map_or(0, |manifest| manifest.size)
    }

    /// Seconds since 1970 at the close, by the clock of the node that took the file.
    pub fn closed_s(&self) -> u64 {
        self.manifest.as_ref().map_or(0, |manifest| manifest.closed_s)
    }

    /// The nodes that have the file.
    pub fn nodes(&self) -> Vec<String> {
        self.manifest.as_ref().map(|manifest| manifest.holders.clone()).unwrap_or_default()
    }

    /// Never uploaded.
    pub fn is_scratch(&self) -> bool {
        self.manifest.as_ref().is_some_and(|manifest| manifest.class != StageClass::Staged)
    }

    /// The file is removed, and the store's object is not removed yet.
    pub fn is_removal(&self) -> bool {
        self.manifest.is_none()
    }
}

/// The staged files of a node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct UnsavedOfNode {
    /// Files that wait for the upload.
    pub files: u64,
    /// Scratch files, which are never uploaded.
    pub scratch: u64,
}

impl UnsavedOfNode {
    /// The files of a list that are at `node`, and that are at least `age_s` seconds old.
    fn count(unsaved: &UnsavedList, node: &str, age_s: u64) -> UnsavedOfNode {
        let objects = unsaved.oldest.iter();
        let of_node = objects.filter(|object| object.holders.iter().any(|holder| holder == node));
        let of_node: Vec<&UnsavedObject> = of_node.collect();
        let scratch = of_node.iter().filter(|object| object.is_scratch).count() as u64;
        let files = of_node.iter().filter(|object| !object.is_scratch && object.age_s >= age_s).count() as u64;
        UnsavedOfNode { files, scratch }
    }
}

/// The staged files of a group.
pub struct GroupStage {
    group: String,
    client: StageClient,
}

impl GroupStage {
    /// The stage of the group `name`.
    ///
    /// # Errors
    /// With exit code 3 when the registry can't be reached or knows no node.
    pub fn open(registry: &Registry, name: &str, trust: &TrustConfig) -> Result<GroupStage, Fault> {
        let GroupReach { members, reach } = reach_group(registry, name, trust)?;
        Ok(GroupStage::of_nodes(name, &reach, &members))
    }

    /// The stage of the group `name` with these nodes.
    pub(crate) fn of_nodes(name: &str, reach: &PeerConnector, members: &[Arc<Member>]) -> GroupStage {
        let calls = NodeCalls::new(reach.group_members("", members));
        GroupStage { group: name.to_owned(), client: StageClient::new(Arc::new(ListedNodes(calls))) }
    }

    /// Waits until the store has the present files of `node`, as long as `patience` and until `ended`; the files that are left.
    ///
    /// # Errors
    /// As [`Self::list_unsaved`].
    pub(crate) fn wait_for_uploads(
        &self,
        node: &str,
        patience: Duration,
        ended: impl Fn() -> bool,
    ) -> Result<UnsavedOfNode, Fault> {
        let start = Instant::now();
        loop {
            let Some(unsaved) = self.list_unsaved()? else { return Ok(UnsavedOfNode::default()) };
            let waited = start.elapsed();
            let left = UnsavedOfNode::count(&unsaved, node, waited.as_secs());
            if left.files == 0 || waited >= patience || ended() {
                return Ok(left);
            }
            std::thread::sleep(UPLOADS_PAUSE);
        }
    }

    /// The files that the store does not have; `None` where no node of the group keeps staged files.
    ///
    /// # Errors
    /// With exit code 3 when no node leads.
    pub fn list_unsaved(&self) -> Result<Option<UnsavedList>, Fault> {
        match self.client.list_unsaved() {
            Ok(unsaved) => Ok(Some(unsaved)),
            Err(StageRefusal::NothingStaged) => Ok(None),
            Err(refusal) => Err(self.fault_of(refusal)),
        }
    }

    /// The staged file of a URL.
    ///
    /// # Errors
    /// With exit code 1 when nothing is staged of the name, with 3 when no node leads.
    pub fn find(&self, url: &str) -> Result<StagedFile, Fault> {
        let at = key_of_url(url)?;
        let manifest = match self.client.find(&at).map_err(|refusal| self.fault_of(refusal))? {
            StagedName::Object(manifest) => Some(manifest),
            StagedName::Removing => None,
            StagedName::AtStore => {
                return Err(Fault::failed(
                    format!(
                        "{url} is no staged file of group {}: the store decides what the name leads to",
                        self.group
                    ),
                    "spurline status --unsaved lists the files that the store does not have",
                ));
            }
        };
        Ok(StagedFile { at, manifest })
    }

    /// Gives the upload of a file up, or the removal at the store.
    ///
    /// # Errors
    /// With exit code 3 when no node leads.
    pub fn give_up(&self, file: &StagedFile) -> Result<(), Fault> {
        self.client.give_up(&file.at).map_err(|refusal| self.fault_of(refusal))
    }

    /// Writes the bytes of a file to `dest`, a name of a file or a folder; the path that was written. The new file appears whole.
    ///
    /// # Errors
    /// With exit code 1 when no node has the bytes, and when `dest` exists and `replaces` is false; with 2 for a file that is removed.
    pub fn export(&self, file: &StagedFile, dest: &Path, replaces: bool) -> Result<PathBuf, Fault> {
        let Some(manifest) = &file.manifest else {
            return Err(Fault::usage(format!("'{}' is removed, and has no bytes to export", file.at.key), ""));
        };
        let name = file.at.key.rsplit('/').next().unwrap_or_default();
        let dest = if dest.is_dir() { dest.join(name) } else { dest.to_owned() };
        if !replaces && fs::symlink_metadata(&dest).is_ok() {
            return Err(Fault::failed(
                format!("{} exists", dest.display()),
                "name another file, or give --force to replace this file",
            ));
        }
        let part = part_path(&dest);
        let copied = self.copy_to(manifest, &part).and_then(|()| place(&part, &dest, replaces));
        if copied.is_err() {
            let _ = fs::remove_file(&part);
        }
        copied.map_err(|error| {
            Fault::failed(
                format!("'{}' is not exported to {}: {}", file.at.key, dest.display(), error.message()),
                "nothing of the staged file is lost; name a place that can be written, or start the nodes that have the bytes",
            )
        })?;
        Ok(dest)
    }

    fn copy_to(&self, manifest: &Manifest, path: &Path) -> Result<()> {
        let mut options = OpenOptions::new();
        let mut to =
            options.write(true).create_new(true).mode(0o600).open(path).map_err(|e| Error::io("create", &e))?;
        self.client.read(manifest, &mut |bytes| to.write_all(bytes).map_err(|e| Error::io("write", &e)))?;
        let len = to.metadata().map_err(|e| Error::io("stat", &e))?.len();
        if len != manifest.size {
            let why = format!("the nodes sent {len} bytes, and the file has {}", manifest.size);
            return Err(Error::new(ErrorKind::Corrupt, why));
        }
        to.sync_all().map_err(|e| Error::io("sync", &e))
    }

    fn fault_of(&self, refusal: StageRefusal) -> Fault {
        let group = &self.group;
        match refusal {
            StageRefusal::NothingStaged => Fault::failed(
                format!("group {group} stages nothing: its nodes run without --stage-size"),
                "correct --cache-group or --registry, or start nodes with --stage-size",
            ),
            StageRefusal::NoLeader(error) => Fault::missing(
                format!("no node of group {group} answers for the staged files: {}", error.message()),
                "start nodes with --stage-size in two failure domains; 'spurline status --registry' shows the nodes",
            ),
            StageRefusal::Failed(error) => Fault::from(error),
        }
    }
}

/// The name of the file until all bytes are there.
fn part_path(dest: &Path) -> PathBuf {
    let mut name = dest.as_os_str().to_owned();
    name.push(format!(".part-{}", std::process::id()));
    name.into()
}

/// Gives a complete file the name.
fn place(part: &Path, dest: &Path, replaces: bool) -> Result<()> {
    if replaces {
        fs::rename(part, dest).map_err(|e| Error::io("rename", &e))?;
    } else {
        // Another file that has appeared since stays.
        fs::hard_link(part, dest).map_err(|e| Error::io("link", &e))?;
        fs::remove_file(part).map_err(|e| Error::io("remove", &e))?;
    }
    let folder = dest.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(|e| Error::io("sync", &e))
}

/// The bucket and the key in a URL.
fn key_of_url(url: &str) -> Result<BucketKey, Fault> {
    let split = url.split_once("://").filter(|(scheme, _)| *scheme != "file");
    let split = split.and_then(|(scheme, rest)| Some((scheme, rest.split_once('/')?)));
    match split {
        Some((scheme, (bucket, key))) if !bucket.is_empty() && !key.is_empty() => {
            Ok(BucketKey::new(&format!("{scheme}://{bucket}"), key))
        }
        _ => Err(Fault::usage(
            format!("{url} names no object of a bucket"),
            "name a file as s3://BUCKET/KEY, or by its path in a mount of a bucket",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_name_objects_of_buckets() {
        let at = |url: &str| key_of_url(url).ok().map(|at| (at.bucket, at.key));
        assert_eq!(at("s3://b/p/a b"), Some(("s3://b".to_owned(), "p/a b".to_owned())));
        for other in ["s3://b", "s3://b/", "s3:///k", "file:///x/y", "/x/y", "x"] {
            assert_eq!(at(other), None, "{other}");
        }
    }

    #[test]
    fn files_of_a_node_are_counted_until_the_store_has_these() {
        let object = |age_s, holders: &[&str], is_scratch| UnsavedObject {
            at: BucketKey::new("s3://b", "k"),
            size: 1,
            age_s,
            holders: holders.iter().map(|holder| (*holder).to_owned()).collect(),
            is_scratch,
            is_removal: false,
            error: None,
        };
        let oldest = vec![object(9, &["a", "b"], false), object(5, &["b"], false), object(7, &["a"], true)];
        let unsaved = UnsavedList { count: 2, bytes: 2, oldest, ..UnsavedList::default() };
        let count = |node, age_s| UnsavedOfNode::count(&unsaved, node, age_s);
        assert_eq!(count("a", 0), UnsavedOfNode { files: 1, scratch: 1 });
        assert_eq!(count("b", 0), UnsavedOfNode { files: 2, scratch: 0 });
        assert_eq!(count("b", 6), UnsavedOfNode { files: 1, scratch: 0 }, "closed during the wait");
        assert_eq!(count("c", 0), UnsavedOfNode::default());
    }

    #[test]
    fn a_complete_file_replaces_another_only_on_request() {
        let folder = tempfile::tempdir().unwrap();
        let dest = folder.path().join("dest");
        let write = |text: &str| fs::write(part_path(&dest), text).map(|()| part_path(&dest)).unwrap();
        place(&write("first"), &dest, false).unwrap();
        assert_eq!(
            place(&write("second"), &dest, false).unwrap_err().kind(),
            ErrorKind::Io(rustix::io::Errno::EXIST.raw_os_error())
        );
        assert_eq!(fs::read(&dest).unwrap(), b"first");
        place(&part_path(&dest), &dest, true).unwrap();
        assert_eq!(fs::read(&dest).unwrap(), b"second");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
