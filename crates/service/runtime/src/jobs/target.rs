//! What jobs work on: the cache of this very process, or the nodes of a group.

use super::remark;
use spurline_cache::Cache;
use spurline_client::{GroupVolume, ObjectExtent};
use spurline_jobs::{FilePart, JobTarget, WorkDone};
use spurline_membership::RegistryFollower;
use spurline_types::{Error, ErrorKind, ListPage, ObjectAttr, Result};
use spurline_volume::Volume;
use std::sync::Arc;
use std::time::Duration;

/// Names of one page.
const PAGE: usize = 1000;
/// Requests that one thread has under way for short files: most of what such a request costs is the waking of a thread
/// by its answer, and a thread that waits for several is woken for several.
const AT_ONCE: usize = 8;

/// How long a node may take to say what it holds: a job ends without it.
const TOLD: Duration = Duration::from_secs(5);
/// The most copies that a block is loaded in.
const COPIES: u32 = 8;

/// The cache of this process.
pub struct Own(pub Arc<Cache>);

/// The nodes of a group.
pub struct Group {
    remote: Arc<GroupVolume>,
    /// Keeps the nodes up to date, where nobody else does.
    _follower: Option<RegistryFollower>,
}

/// What a check found: all that was asked for was held and right, or it was not.
fn checked(worked: WorkDone) -> Result<WorkDone> {
    if worked.moved == 0 {
        return Ok(worked);
    }
    let why = format!(
        "{} bytes were not held any more, or were wrong, and had to be fetched again: is the cache large enough?",
        worked.moved
    );
    Err(Error::new(ErrorKind::NotFound, why))
}

impl Own {
    /// One block after another on the job's own thread: it has as many of them as requests are to be under way.
    fn fetch(&self, parts: &[FilePart], verify: bool) -> Vec<Result<WorkDone>> {
        let one = |part: &FilePart| self.sum(part, |index| self.0.bring_block(&part.object, index, verify));
        parts.iter().map(one).collect()
    }

    /// What came of a part of whose blocks `fetched` says one by one whether they had to be; ends with the first error.
    fn sum(&self, part: &FilePart, mut fetched: impl FnMut(u32) -> Result<bool>) -> Result<WorkDone> {
        let mut worked = WorkDone::default();
        for index in part.blocks.clone() {
            let bytes = part.object.block_len(index, self.0.block_size()) as u64;
            if fetched(index)? { worked.moved += bytes } else { worked.held += bytes }
        }
        Ok(worked)
    }
}

impl JobTarget for Own {
    fn source(&self) -> &str {
        self.0.source()
    }
    fn block_size(&self) -> u64 {
        self.0.block_size()
    }
    fn lookup(&self, path: &[u8]) -> Result<ObjectAttr> {
        self.0.lookup(path)
    }
    fn list(&self, path: &[u8], cursor: Option<&[u8]>) -> Result<ListPage> {
        self.0.list(path, cursor, PAGE)
    }
    fn parallel_short(&self, requests: usize) -> usize {
        if !self.0.fetches_together() {
            return 1;
        }
        // Threads enough for all processors come first.
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        (requests / (2 * processors)).clamp(1, AT_ONCE)
    }
    fn missing_copies(&self, copies: u32) -> Option<String> {
        (copies > 1).then(|| "a mount that runs alone has one copy of each block".to_owned())
    }
    fn warm_parts(&self, parts: &[FilePart], _replicas: Option<u32>, at_once: usize) -> Vec<Result<WorkDone>> {
        if at_once < 2 {
            return self.fetch(parts, false);
        }
        let all: Vec<_> =
            parts.iter().flat_map(|part| part.blocks.clone().map(|index| (&part.object, index))).collect();
        let came = self.0.bring_blocks(&all, at_once);
        let mut rest = came.as_slice();
        let one = |part: &FilePart| {
            let (of_part, after) = rest.split_at(part.blocks.len());
            rest = after;
            self.sum(part, |index| of_part[(index - part.blocks.start) as usize].clone())
        };
        parts.iter().map(one).collect()
    }
    fn check_parts(&self, parts: &[FilePart], _replicas: Option<u32>) -> Vec<Result<WorkDone>> {
        self.fetch(parts, true).into_iter().map(|result| result.and_then(checked)).collect()
    }
    fn load_remark(
        &self,
        _replicas: Option<u32>,
        _bytes: u64,
        files: &mut dyn Iterator<Item = (Vec<u8>, u64)>,
    ) -> Option<String> {
        // There are no rules here.
        let told = [serde_json::json!({"capacity_bytes": self.0.capacity_bytes()?, "pinned_bytes": 0})];
        remark::Group::of(&told).remark(self.source(), files.map(|(path, size)| (path, size, 1)))
    }
    fn free_parts(&self, parts: &[FilePart]) -> Vec<Result<WorkDone>> {
        let one =
            |part: &FilePart| Ok(WorkDone { held: 0, moved: self.0.drop_blocks(&part.object, part.blocks.clone()) });
        parts.iter().map(one).collect()
    }
}

impl Group {
    /// The nodes behind a mount, which follows them.
    pub fn of(remote: Arc<GroupVolume>) -> Self {
        Group { remote, _follower: None }
    }

    /// The nodes that `follower` follows.
    pub fn following(remote: Arc<GroupVolume>, follower: RegistryFollower) -> Self {
        Group { remote, _follower: Some(follower) }
    }

    fn extents(&self, parts: &[FilePart]) -> Vec<ObjectExtent> {
        let block = self.remote.block_size();
        let one = |part: &FilePart| ObjectExtent {
            object: part.object.clone(),
            bytes: u64::from(part.blocks.start) * block..u64::from(part.blocks.end) * block,
        };
        parts.iter().map(one).collect()
    }

    fn fetch(&self, parts: &[FilePart], replicas: Option<u32>, verify: bool) -> Vec<Result<WorkDone>> {
        worked(self.remote.warm(&self.extents(parts), replicas, verify))
    }
}

/// What there is instead of `copies` with so many nodes.
fn short_of(copies: u32, up: usize) -> Option<String> {
    let most = up.min(spurline_client::placement::FIRST_HOLDERS);
    let many = |n: usize, one: &str, more: &str| if n == 1 { format!("1 {one}") } else { format!("{n} {more}") };
    let short = copies as usize > most.max(1);
    short.then(|| format!("{} up: {} at most", many(up, "node is", "nodes are"), many(most, "copy", "copies")))
}

/// In how many of the copies asked for a block can be held, by so many nodes that have a share of the blocks.
fn copies_held(asked: u32, holders: usize) -> u64 {
    u64::from(asked.clamp(1, COPIES)).min(holders as u64)
}

fn worked(done: Vec<spurline_proto::RangeDone>) -> Vec<Result<WorkDone>> {
    let one = |done: spurline_proto::RangeDone| match done.error {
        Some(error) => Err(error),
        None => Ok(WorkDone { held: done.held_bytes, moved: done.moved_bytes }),
    };
    done.into_iter().map(one).collect()
}

impl JobTarget for Group {
    fn source(&self) -> &str {
        self.remote.source()
    }
    fn block_size(&self) -> u64 {
        self.remote.block_size()
    }
    fn lookup(&self, path: &[u8]) -> Result<ObjectAttr> {
        self.remote.lookup(path)
    }
    fn list(&self, path: &[u8], cursor: Option<&[u8]>) -> Result<ListPage> {
        self.remote.list(path, cursor, PAGE)
    }
    fn missing_copies(&self, copies: u32) -> Option<String> {
        short_of(copies, self.remote.holders_up())
    }
    fn warm_parts(&self, parts: &[FilePart], replicas: Option<u32>, _at_once: usize) -> Vec<Result<WorkDone>> {
        self.fetch(parts, replicas, false)
    }
    fn check_parts(&self, parts: &[FilePart], replicas: Option<u32>) -> Vec<Result<WorkDone>> {
        self.fetch(parts, replicas, true).into_iter().map(|result| result.and_then(checked)).collect()
    }
    fn load_remark(
        &self,
        replicas: Option<u32>,
        bytes: u64,
        files: &mut dyn Iterator<Item = (Vec<u8>, u64)>,
    ) -> Option<String> {
        // Most jobs are so small that one node could hold them whole; a larger one is worth a question to each.
        let first = self.remote.node_rules(1, TOLD).ok()?;
        if remark::Group::of(&first).holds(bytes.saturating_mul(replicas.unwrap_or(COPIES).into())) {
            return None;
        }
        let told = self.remote.node_rules(usize::MAX, TOLD).ok()?;
        let holders = self.remote.holders_up();
        let copies = |path: &[u8]| {
            let asked = replicas.unwrap_or_else(|| self.remote.copies_of(path));
            copies_held(asked, holders)
        };
        let files = files.map(|(path, size)| {
            let copies = copies(&path);
            (path, size, copies)
        });
        remark::Group::of(&told).remark(self.source(), files)
    }
    fn free_parts(&self, parts: &[FilePart]) -> Vec<Result<WorkDone>> {
        worked(self.remote.drop_cached(&self.extents(parts)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_copies_than_there_can_be_are_said() {
        assert_eq!((short_of(3, 3), short_of(8, 100), short_of(1, 0)), (None, None, None));
        assert_eq!(short_of(9, 3).unwrap(), "3 nodes are up: 3 copies at most");
        assert_eq!(short_of(2, 1).unwrap(), "1 node is up: 1 copy at most");
        assert_eq!(short_of(9, 100).unwrap(), "100 nodes are up: 8 copies at most");
        // Three asked for, one of three nodes drained.
        assert_eq!((copies_held(3, 2), copies_held(3, 9), copies_held(9, 100)), (2, 3, 8));
    }
}
