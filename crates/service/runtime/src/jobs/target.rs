//! The targets of jobs: the cache of this process, or the nodes of a group.

use super::remark;
use spurline_cache::{Cache, RemovedBytes};
use spurline_client::{GroupVolume, ObjectExtent};
use spurline_jobs::{FilePart, JobTarget, WorkDone};
use spurline_membership::RegistryFollower;
use spurline_rules::NodeRules;
use spurline_types::{Error, ErrorKind, ListPage, ObjectAttr, Result};
use spurline_volume::Volume;
use std::sync::Arc;
use std::time::Duration;

/// Names per page.
const TARGET_PAGE_NAMES: usize = 1000;
/// Concurrent requests of a thread for short files. Most of the cost of such a request is the wake-up by the answer, which is
/// shared by all requests of a waiting thread.
const SHORT_FILE_REQUESTS: usize = 8;

/// Time limit of the query for a node's rules; a job ends without the answer.
const RULES_QUERY_TIMEOUT: Duration = Duration::from_secs(5);
/// The most copies of a block.
const MAX_COPIES: u32 = 8;

/// The cache of this process.
pub struct LocalCacheTarget {
    /// The cache that is filled.
    pub cache: Arc<Cache>,
}

/// The nodes of a group.
pub struct GroupTarget {
    remote: Arc<GroupVolume>,
    /// Updates the nodes, where the volume does not.
    _follower: Option<RegistryFollower>,
}

/// The result of a check: an error if data had to be fetched again.
fn check_result(worked: WorkDone) -> Result<WorkDone> {
    if worked.moved == 0 {
        return Ok(worked);
    }
    let why = format!(
        "{} bytes were not held any more, or were wrong, and were fetched again; if this repeats, the cache is too small",
        worked.moved
    );
    Err(Error::new(ErrorKind::NotFound, why))
}

impl LocalCacheTarget {
    /// Block by block on the job's own thread; the job has a thread per concurrent request.
    fn fetch_parts(&self, parts: &[FilePart], verify: bool) -> Vec<Result<WorkDone>> {
        parts
            .iter()
            .map(|part| self.sum_blocks(part, |index| self.cache.bring_block(&part.object, index, verify)))
            .collect()
    }

    /// The result for a part, of which `fetched` says for each block whether that took a fetch; ends with the first error.
    fn sum_blocks(&self, part: &FilePart, mut fetched: impl FnMut(u32) -> Result<bool>) -> Result<WorkDone> {
        let mut worked = WorkDone::default();
        for index in part.blocks.clone() {
            let bytes = part.object.block_len(index, self.cache.block_size()) as u64;
            if fetched(index)? { worked.moved += bytes } else { worked.held += bytes }
        }
        Ok(worked)
    }
}

impl JobTarget for LocalCacheTarget {
    fn source(&self) -> &str {
        self.cache.source()
    }
    fn block_size(&self) -> u64 {
        self.cache.block_size()
    }
    fn lookup(&self, path: &[u8]) -> Result<ObjectAttr> {
        self.cache.lookup(path)
    }
    fn list(&self, path: &[u8], cursor: Option<&[u8]>) -> Result<ListPage> {
        self.cache.list(path, cursor, TARGET_PAGE_NAMES)
    }
    fn parallel_short(&self, requests: usize) -> usize {
        if !self.cache.fetches_together() {
            return 1;
        }
        // Threads for all processors come first.
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        (requests / (2 * processors)).clamp(1, SHORT_FILE_REQUESTS)
    }
    fn missing_copies(&self, copies: u32) -> Option<String> {
        (copies > 1).then(|| "a mount that runs alone has one copy of each block".to_owned())
    }
    fn warm_parts(&self, parts: &[FilePart], _replicas: Option<u32>, at_once: usize) -> Vec<Result<WorkDone>> {
        if at_once < 2 {
            return self.fetch_parts(parts, false);
        }
        let all: Vec<_> =
            parts.iter().flat_map(|part| part.blocks.clone().map(|index| (&part.object, index))).collect();
        let came = self.cache.bring_blocks(&all, at_once);
        let mut rest = came.as_slice();
        parts
            .iter()
            .map(|part| {
                let (of_part, after) = rest.split_at(part.blocks.len());
                rest = after;
                self.sum_blocks(part, |index| of_part[(index - part.blocks.start) as usize].clone())
            })
            .collect()
    }
    fn check_parts(&self, parts: &[FilePart], _replicas: Option<u32>) -> Vec<Result<WorkDone>> {
        self.fetch_parts(parts, true).into_iter().map(|result| result.and_then(check_result)).collect()
    }
    fn load_remark(
        &self,
        _replicas: Option<u32>,
        _bytes: u64,
        files: &mut dyn Iterator<Item = (Vec<u8>, u64)>,
    ) -> Option<String> {
        // A lone mount has no rules.
        let Some(capacity) = self.cache.capacity_bytes() else {
            return Some(
                "there is no cache disk (--cache-size 0): loaded data stays in memory only, within --buffer-size"
                    .into(),
            );
        };
        let told = [NodeRules { capacity_bytes: Some(capacity), ..NodeRules::default() }];
        remark::GroupCapacity::from_answers(&told).load_remark(self.source(), files.map(|(path, size)| (path, size, 1)))
    }
    fn free_parts(&self, parts: &[FilePart], with_pinned: bool) -> Vec<Result<WorkDone>> {
        parts
            .iter()
            .map(|part| Ok(removal_done(self.cache.drop_blocks(&part.object, part.blocks.clone(), with_pinned))))
            .collect()
    }
    fn free_all(&self, every_source: bool, with_pinned: bool) -> (WorkDone, Option<Error>) {
        let mut freed = WorkDone::default();
        for part in 0.. {
            let Some(bytes) = self.cache.drop_part(part, every_source, with_pinned) else { break };
            freed += removal_done(bytes);
        }
        (freed, None)
    }
}

impl GroupTarget {
    /// The nodes of a mount, which follows the group.
    pub fn from_volume(remote: Arc<GroupVolume>) -> Self {
        GroupTarget { remote, _follower: None }
    }

    /// The nodes that `follower` follows.
    pub fn with_follower(remote: Arc<GroupVolume>, follower: RegistryFollower) -> Self {
        GroupTarget { remote, _follower: Some(follower) }
    }

    fn extents(&self, parts: &[FilePart]) -> Vec<ObjectExtent> {
        let block = self.remote.block_size();
        parts
            .iter()
            .map(|part| ObjectExtent {
                object: part.object.clone(),
                bytes: u64::from(part.blocks.start) * block..u64::from(part.blocks.end) * block,
            })
            .collect()
    }

    fn fetch_parts(&self, parts: &[FilePart], replicas: Option<u32>, verify: bool) -> Vec<Result<WorkDone>> {
        work_done(self.remote.warm(&self.extents(parts), replicas, verify))
    }
}

fn removal_done(bytes: RemovedBytes) -> WorkDone {
    WorkDone { held: bytes.kept_pinned, moved: bytes.removed }
}

/// A message if so many nodes can't hold `copies`.
fn short_of(copies: u32, up: usize) -> Option<String> {
    let most = up.min(spurline_client::placement::FIRST_HOLDERS);
    let short = copies as usize > most.max(1);
    short.then(|| {
        format!("{} up: {} at most", counted_noun(up, "node is", "nodes are"), counted_noun(most, "copy", "copies"))
    })
}

fn counted_noun(n: usize, one: &str, more: &str) -> String {
    if n == 1 { format!("1 {one}") } else { format!("{n} {more}") }
}

/// The copies of a block that so many nodes with a share can hold.
fn copies_held(asked: u32, holders: usize) -> u64 {
    u64::from(asked.clamp(1, MAX_COPIES)).min(holders as u64)
}

fn work_done(done: Vec<spurline_proto::RangeDone>) -> Vec<Result<WorkDone>> {
    done.into_iter()
        .map(|done| match done.error {
            Some(error) => Err(error),
            None => Ok(WorkDone { held: done.held_bytes, moved: done.moved_bytes }),
        })
        .collect()
}

impl JobTarget for GroupTarget {
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
        self.remote.list(path, cursor, TARGET_PAGE_NAMES)
    }
    fn missing_copies(&self, copies: u32) -> Option<String> {
        short_of(copies, self.remote.holders_up())
    }
    fn warm_parts(&self, parts: &[FilePart], replicas: Option<u32>, _at_once: usize) -> Vec<Result<WorkDone>> {
        self.fetch_parts(parts, replicas, false)
    }
    fn check_parts(&self, parts: &[FilePart], replicas: Option<u32>) -> Vec<Result<WorkDone>> {
        self.fetch_parts(parts, replicas, true).into_iter().map(|result| result.and_then(check_result)).collect()
    }
    fn load_remark(
        &self,
        replicas: Option<u32>,
        bytes: u64,
        files: &mut dyn Iterator<Item = (Vec<u8>, u64)>,
    ) -> Option<String> {
        // Most jobs fit on a single node; only a larger job is worth a query to every node.
        let first: Vec<NodeRules> = self.remote.node_rules(1, RULES_QUERY_TIMEOUT).ok()?;
        if remark::GroupCapacity::from_answers(&first)
            .surely_holds(bytes.saturating_mul(replicas.unwrap_or(MAX_COPIES).into()))
        {
            return None;
        }
        let told: Vec<NodeRules> = self.remote.node_rules(usize::MAX, RULES_QUERY_TIMEOUT).ok()?;
        let holders = self.remote.holders_up();
        let copies = |path: &[u8]| {
            let asked = replicas.unwrap_or_else(|| self.remote.copies_of(path));
            copies_held(asked, holders)
        };
        let files = files.map(|(path, size)| {
            let copies = copies(&path);
            (path, size, copies)
        });
        remark::GroupCapacity::from_answers(&told).load_remark(self.source(), files)
    }
    fn free_parts(&self, parts: &[FilePart], with_pinned: bool) -> Vec<Result<WorkDone>> {
        work_done(self.remote.drop_cached(&self.extents(parts), with_pinned))
    }
    fn free_all(&self, every_source: bool, with_pinned: bool) -> (WorkDone, Option<Error>) {
        let done = self.remote.drop_all(every_source, with_pinned);
        (WorkDone { held: done.held_bytes, moved: done.moved_bytes }, done.error)
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
