//! Jobs over an in-process group that fails on demand: work, counts, and state across restarts.

use parking_lot::Mutex;
use serde_json::json;
use spurline_jobs::{
    DirJobRecords, FilePart, JobAction, JobManager, JobRecord, JobRecords, JobRun, JobSpec, JobState, JobTarget,
    JobTotals, WorkDone, run_job,
};
use spurline_types::{DirEntry, Error, ErrorKind, FileKind, ListPage, ObjectAttr, Result, Stats, Version};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const BLOCK: u64 = 100;
/// Blocks of files below this folder are pinned.
const PINNED: &str = "a/b/";
/// Begins the names of blocks of another source.
const OTHER_SOURCE: &str = "mem://other/";

fn is_pinned(block: &(String, u32)) -> bool {
    block.0.starts_with(PINNED)
}

/// A group in memory.
#[derive(Default)]
struct Group {
    files: BTreeMap<String, u64>,
    held: Mutex<BTreeSet<(String, u32)>>,
    /// Errors of requests, with the number of failures before success.
    failures: Mutex<HashMap<String, (ErrorKind, u32)>>,
    /// Files open for writing, for this many lookups.
    written: Mutex<HashMap<String, u32>>,
    asked: AtomicU64,
    /// Requests wait while this is locked.
    gate: Mutex<()>,
    /// Listing a folder panics.
    panics: AtomicBool,
}

impl Group {
    fn new(files: &[(&str, u64)]) -> Arc<Group> {
        Arc::new(Group { files: files.iter().map(|(p, s)| ((*p).to_owned(), *s)).collect(), ..Group::default() })
    }

    fn file(&self, path: &str, size: u64) -> ObjectAttr {
        let mut attr = attr(FileKind::File, size);
        if let Some(left) = self.written.lock().get_mut(path).filter(|left| **left > 0) {
            *left -= 1;
            attr.version = attr.version.with_unsettled_mark(u64::from(*left));
        }
        attr
    }

    fn fails(&self, path: &str) -> Result<()> {
        if let Some((kind, left)) = self.failures.lock().get_mut(path)
            && *left > 0
        {
            *left -= 1;
            return Err(Error::new(*kind, "told to fail"));
        }
        Ok(())
    }
}

fn attr(kind: FileKind, size: u64) -> ObjectAttr {
    ObjectAttr { kind, size, mtime: std::time::UNIX_EPOCH, mode: 0o444, version: Version::new("v"), etag: None }
}

fn text(path: &[u8]) -> String {
    String::from_utf8(path.to_vec()).unwrap()
}

impl JobTarget for Group {
    fn source(&self) -> &str {
        "mem://group"
    }
    fn block_size(&self) -> u64 {
        BLOCK
    }
    fn lookup(&self, path: &[u8]) -> Result<ObjectAttr> {
        let path = text(path);
        self.fails(&path)?;
        if let Some(size) = self.files.get(&path) {
            return Ok(self.file(&path, *size));
        }
        let below = format!("{path}/");
        if path.is_empty() || self.files.keys().any(|p| p.starts_with(&below)) {
            return Ok(attr(FileKind::Directory, 0));
        }
        Err(Error::new(ErrorKind::NotFound, "not there"))
    }
    fn list(&self, path: &[u8], cursor: Option<&[u8]>) -> Result<ListPage> {
        assert!(!self.panics.load(Ordering::Relaxed), "told to panic");
        let below = if path.is_empty() { String::new() } else { format!("{}/", text(path)) };
        let mut names = BTreeMap::new();
        for (file, size) in &self.files {
            let Some(rest) = file.strip_prefix(&below) else { continue };
            match rest.split_once('/') {
                Some((folder, _)) => names.insert(folder.to_owned(), attr(FileKind::Directory, 0)),
                None => names.insert(rest.to_owned(), self.file(file, *size)),
            };
        }
        let after = cursor.map(text).unwrap_or_default();
        let mut rest = names.into_iter().filter(|(name, _)| *name > after);
        let entries: Vec<_> =
            rest.by_ref().take(3).map(|(name, attr)| DirEntry { name: name.into_bytes(), attr }).collect();
        let next = rest.next().is_some().then(|| entries.last().unwrap().name.clone());
        Ok(ListPage { entries, next, marker: None })
    }
    fn warm_parts(&self, parts: &[FilePart], _: Option<u32>, _: usize) -> Vec<Result<WorkDone>> {
        drop(self.gate.lock());
        let one = |part: &FilePart| {
            self.asked.fetch_add(1, Ordering::Relaxed);
            let path = text(&part.object.path);
            self.fails(&path)?;
            assert_eq!(part.object.version.as_str(), "v", "no later request names another version");
            let mut did = WorkDone::default();
            for block in part.blocks.clone() {
                let len = part.object.block_len(block, BLOCK) as u64;
                if self.held.lock().insert((path.clone(), block)) { did.moved += len } else { did.held += len }
            }
            Ok(did)
        };
        parts.iter().map(one).collect()
    }
    fn check_parts(&self, parts: &[FilePart], _: Option<u32>) -> Vec<Result<WorkDone>> {
        let one = |part: &FilePart| {
            for block in part.blocks.clone() {
                if !self.held.lock().contains(&(text(&part.object.path), block)) {
                    return Err(Error::new(ErrorKind::NotFound, format!("block {block} is not held")));
                }
            }
            Ok(WorkDone::default())
        };
        parts.iter().map(one).collect()
    }
    fn free_parts(&self, parts: &[FilePart], with_pinned: bool) -> Vec<Result<WorkDone>> {
        let one = |part: &FilePart| {
            let path = text(&part.object.path);
            let mut did = WorkDone::default();
            for block in part.blocks.clone() {
                let len = part.object.block_len(block, BLOCK) as u64;
                let held = (path.clone(), block);
                if !with_pinned && is_pinned(&held) && self.held.lock().contains(&held) {
                    did.held += len;
                } else if self.held.lock().remove(&held) {
                    did.moved += len;
                }
            }
            Ok(did)
        };
        parts.iter().map(one).collect()
    }
    fn free_all(&self, every_source: bool, with_pinned: bool) -> (WorkDone, Option<Error>) {
        let mut did = WorkDone::default();
        self.held.lock().retain(|block| {
            let kept = !with_pinned && is_pinned(block);
            let other = !every_source && block.0.starts_with(OTHER_SOURCE);
            if kept {
                did.held += BLOCK;
            } else if !other {
                did.moved += BLOCK;
            }
            kept || other
        });
        (did, self.fails("").err())
    }
}

fn spec(paths: &[&str]) -> JobSpec {
    JobSpec {
        action: JobAction::Load,
        source: "mem://group".into(),
        paths: paths.iter().map(|p| (*p).to_owned()).collect(),
        listed: false,
        include: Vec::new(),
        exclude: Vec::new(),
        metadata_only: false,
        verify: false,
        skip_if_exists: false,
        replicas: None,
        rate: 0,
        with_pinned: false,
        everything: false,
        parallel: 4,
    }
}

fn done(group: &Group, spec: &JobSpec) -> spurline_jobs::JobProgress {
    let (job, dir) = (JobRun::new(), tempfile::tempdir().unwrap());
    run_job(group, spec, &job, &dir.path().join("spool"), &mut |_| {});
    job.progress()
}

fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < Duration::from_secs(60), "{what} does not come");
        std::thread::sleep(Duration::from_millis(5));
    }
}

const TREE: [(&str, u64); 7] = [
    ("a/1.bin", 250),
    ("a/2.bin", 100),
    ("a/empty", 0),
    ("a/b/3.bin", 2001),
    ("a/b/4.txt", 10),
    ("c/5.bin", 7),
    ("top", 1),
];

#[test]
fn a_tree_is_loaded_checked_and_freed() {
    let group = Group::new(&TREE);
    let all = done(&group, &JobSpec { verify: true, ..spec(&["", "top"]) });
    assert_eq!(
        (all.state, all.files_total, all.files_done, all.files_failed),
        (JobState::Succeeded, 8, 8, 0),
        "{all:?}"
    );
    assert_eq!((all.bytes_total, all.bytes_done, all.bytes_moved), (2370, 2370, 2369));
    assert_eq!((all.files_verified, all.bytes_verified, all.listed), (8, 2370, true));
    assert_eq!(group.held.lock().len(), 3 + 1 + 21 + 1 + 1 + 1);
    let again = done(&group, &JobSpec { skip_if_exists: true, ..spec(&["a"]) });
    assert_eq!((again.files_done, again.files_skipped, again.bytes_moved), (5, 4, 0), "{again:?}");
    let freed = done(&group, &JobSpec { action: JobAction::Free, with_pinned: true, ..spec(&["a/b/"]) });
    assert_eq!((freed.state, freed.bytes_moved, freed.note.as_str()), (JobState::Succeeded, 2011, ""));
    assert_eq!(group.held.lock().len(), 6);
    let metadata = done(&group, &JobSpec { metadata_only: true, verify: true, ..spec(&["a"]) });
    assert_eq!((metadata.state, metadata.files_done, metadata.bytes_done), (JobState::Succeeded, 5, 0));
    assert_eq!(group.held.lock().len(), 6);
}

#[test]
fn patterns_and_lists_choose() {
    let group = Group::new(&TREE);
    let words = |list: &[&str]| list.iter().map(|s| (*s).to_owned()).collect::<Vec<_>>();
    let some = done(&group, &JobSpec { include: words(&["*.bin"]), exclude: words(&["a/b"]), ..spec(&[""]) });
    assert_eq!((some.state, some.files_done, some.bytes_done), (JobState::Succeeded, 3, 357), "{some:?}");
    let listed = done(&group, &JobSpec { listed: true, ..spec(&["a/1.bin", "c", "nowhere"]) });
    assert_eq!((listed.state, listed.files_done, listed.files_failed), (JobState::Failed, 1, 2), "{listed:?}");
    let named: Vec<&str> = listed.failed.iter().map(|f| f.path.as_str()).collect();
    assert_eq!(named, ["c", "nowhere"]);
    assert!(listed.failed[0].reason.contains("a folder") && listed.failed[1].reason.contains("not there"));
}

#[test]
fn patterns_that_match_no_file_fail_the_job() {
    let group = Group::new(&TREE);
    for action in [JobAction::Load, JobAction::Free] {
        let none = done(&group, &JobSpec { action, include: vec!["*.bim".into()], ..spec(&[""]) });
        assert_eq!((none.state, none.files_total), (JobState::Failed, 0), "{none:?}");
        assert!(none.why.contains("no file matches --include"), "{none:?}");
    }
    let empty = Group::new(&[]);
    assert_eq!(done(&empty, &spec(&[""])).state, JobState::Succeeded, "an empty folder without patterns");
}

#[test]
fn pinned_blocks_are_kept_and_counted_and_all_of_a_source_includes_old_versions() {
    let group = Group::new(&TREE);
    let fill = || {
        done(&group, &spec(&[""]));
        let more = ["old version", "mem://other/file", "a/b/old version"].map(|name| (name.to_owned(), 0));
        group.held.lock().extend(more);
    };
    let free = |paths: &[&str], with_pinned: bool, everything: bool| {
        done(&group, &JobSpec { action: JobAction::Free, with_pinned, everything, ..spec(paths) })
    };
    let left =
        || group.held.lock().iter().filter(|block| !is_pinned(block)).map(|block| block.0.clone()).collect::<Vec<_>>();
    fill();
    let above = free(&["a"], false, false);
    assert_eq!((above.state, above.bytes_moved, above.bytes_pinned), (JobState::Succeeded, 350, 2011), "{above:?}");
    assert!(above.note.contains("1.96 KiB are pinned and were kept; --pinned"), "{above:?}");
    assert!(left().contains(&"old version".to_owned()));
    let whole = free(&[""], false, false);
    // Blocks of the whole caches are counted as full.
    assert_eq!((whole.bytes_moved, whole.bytes_pinned), (7 + 1 + 100, 2300), "{whole:?}");
    assert_eq!(left(), ["mem://other/file"]);
    let pinned_too = free(&["/"], true, false);
    assert_eq!((pinned_too.bytes_pinned, pinned_too.note.as_str()), (0, ""));
    assert_eq!(*group.held.lock(), BTreeSet::from([("mem://other/file".to_owned(), 0)]));
    fill();
    let everything = free(&[""], false, true);
    assert_eq!((everything.state, everything.files_total, everything.bytes_pinned), (JobState::Succeeded, 0, 2300));
    assert!(everything.listed && left().is_empty(), "{everything:?}");
    // What was freed before a cache failed is counted.
    group.failures.lock().insert(String::new(), (ErrorKind::Unavailable, 1));
    let failed = free(&[""], true, true);
    assert_eq!((failed.state, failed.bytes_moved), (JobState::Failed, 2300));
    assert!(failed.why.contains("told to fail"), "{failed:?}");
    assert!(group.held.lock().is_empty());
}

#[test]
fn failures_are_repeated_named_and_do_not_end_the_job() {
    let group = Group::new(&TREE);
    group.failures.lock().insert("a/1.bin".into(), (ErrorKind::PermissionDenied, 1));
    group.failures.lock().insert("a/2.bin".into(), (ErrorKind::Unavailable, 2));
    let all = done(&group, &spec(&["a"]));
    assert_eq!((all.state, all.files_done, all.files_failed), (JobState::Failed, 4, 1), "{all:?}");
    assert_eq!((all.failed[0].path.as_str(), all.why.as_str()), ("a/1.bin", "1 file could not be done"));
    // A block missing when read back is a failure.
    struct Forgets(Arc<Group>);
    impl JobTarget for Forgets {
        fn source(&self) -> &str {
            self.0.source()
        }
        fn block_size(&self) -> u64 {
            BLOCK
        }
        fn lookup(&self, path: &[u8]) -> Result<ObjectAttr> {
            self.0.lookup(path)
        }
        fn list(&self, path: &[u8], cursor: Option<&[u8]>) -> Result<ListPage> {
            self.0.list(path, cursor)
        }
        fn warm_parts(&self, parts: &[FilePart], replicas: Option<u32>, at_once: usize) -> Vec<Result<WorkDone>> {
            let did = self.0.warm_parts(parts, replicas, at_once);
            self.0.held.lock().remove(&("a/b/3.bin".to_owned(), 20));
            did
        }
        fn check_parts(&self, parts: &[FilePart], replicas: Option<u32>) -> Vec<Result<WorkDone>> {
            self.0.check_parts(parts, replicas)
        }
        fn free_parts(&self, parts: &[FilePart], with_pinned: bool) -> Vec<Result<WorkDone>> {
            self.0.free_parts(parts, with_pinned)
        }
        fn free_all(&self, every_source: bool, with_pinned: bool) -> (WorkDone, Option<Error>) {
            self.0.free_all(every_source, with_pinned)
        }
    }
    let group = Forgets(Group::new(&TREE));
    let (job, dir) = (JobRun::new(), tempfile::tempdir().unwrap());
    run_job(&group, &JobSpec { verify: true, ..spec(&["a"]) }, &job, &dir.path().join("spool"), &mut |_| {});
    let progress = job.progress();
    assert_eq!(
        (progress.state, progress.files_verified, progress.files_failed),
        (JobState::Failed, 4, 1),
        "{progress:?}"
    );
    assert!(progress.failed[0].reason.contains("after loading: block 20 is not held"), "{progress:?}");
}

#[test]
fn a_file_that_is_being_written_is_loaded_when_it_is_closed() {
    let group = Group::new(&TREE);
    // Listed, looked up twice, then closed.
    group.written.lock().insert("a/b/3.bin".into(), 3);
    let all = done(&group, &JobSpec { verify: true, ..spec(&["a"]) });
    assert_eq!((all.state, all.files_done, all.files_verified), (JobState::Succeeded, 5, 5), "{all:?}");
    group.written.lock().insert("a/1.bin".into(), 1);
    let freed = done(&group, &JobSpec { action: JobAction::Free, with_pinned: true, ..spec(&["a"]) });
    assert_eq!((freed.state, freed.bytes_moved), (JobState::Succeeded, 2361), "{freed:?}");
    assert!(group.held.lock().is_empty());
}

fn many() -> Vec<(String, u64)> {
    (0..500).map(|n| (format!("d{}/f{n}", n % 7), n % 5 * 90)).collect()
}

#[test]
fn a_board_goes_on_after_a_restart_and_does_nothing_twice() {
    let dir = tempfile::tempdir().unwrap();
    let files = many();
    let group = Group::new(&files.iter().map(|(p, s)| (p.as_str(), *s)).collect::<Vec<_>>());
    let board = || {
        let open_group = Arc::clone(&group);
        let keep = Arc::new(DirJobRecords::open(&dir.path().join("jobs")).unwrap());
        JobManager::start(keep, Some(&dir.path().join("spools")), Arc::new(move |_| Ok(Arc::clone(&open_group) as _)))
            .unwrap()
    };
    let first = board();
    let load = JobSpec { parallel: 3, ..spec(&[""]) };
    let gate = group.gate.lock();
    let id = first.submit(load.clone()).unwrap();
    assert_eq!(first.submit(load.clone()).unwrap(), id);
    let other = first.submit(JobSpec { rate: 1 << 20, ..load.clone() }).unwrap_err();
    assert!(other.message().contains("with no --rate and -p 3; stop it first"), "{other}");
    eventually("the list", || first.local_progress(&id).unwrap().1.listed);
    drop(gate);
    eventually("some work", || first.local_progress(&id).unwrap().1.files_done > 50);
    let gate = group.gate.lock();
    let suspending = std::thread::spawn({
        let first = Arc::clone(&first);
        move || first.suspend()
    });
    drop(gate);
    suspending.join().unwrap();
    let asked = group.asked.load(Ordering::Relaxed);
    let second = board();
    eventually("the end", || second.local_progress(&id).unwrap().1.state.is_ended());
    let (_, progress) = second.local_progress(&id).unwrap();
    let bytes: u64 = files.iter().map(|(_, s)| s).sum();
    assert_eq!((progress.state, progress.files_done, progress.files_total), (JobState::Succeeded, 500, 500));
    assert_eq!((progress.bytes_done, progress.bytes_total), (bytes, bytes));
    // Only a file in progress at the stop is requested again.
    let units: u64 = files.iter().map(|(_, s)| s.div_ceil(16 * BLOCK)).sum();
    assert!(group.asked.load(Ordering::Relaxed) <= units + 3 * 16, "{asked} before, {units} in all");
    eventually("its record", || !second.works_on(&id));
    drop(second);
    // An ended job is remembered and can start anew.
    let third = board();
    assert_eq!(third.list_jobs().unwrap().len(), 1);
    assert_eq!(third.local_progress(&id).unwrap().1.state, JobState::Succeeded);
    assert_eq!(gauges(&third), (0, 1, 0));
    assert!(!third.stop_job(&id).unwrap());
    third.submit(load).unwrap();
    eventually("the end", || third.local_progress(&id).unwrap().1.state == JobState::Succeeded);
}

#[test]
fn a_job_that_goes_on_waits_for_its_group_and_one_that_begins_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let group = Group::new(&TREE);
    // Nodes that come up after the coordinator.
    let away = Arc::new(AtomicU64::new(0));
    let board = || {
        let (open_group, away) = (Arc::clone(&group), Arc::clone(&away));
        let open = move |_: &str| match away.load(Ordering::Acquire) {
            0 => Ok(Arc::clone(&open_group) as _),
            left => {
                away.store(left - 1, Ordering::Release);
                Err(Error::new(ErrorKind::Unavailable, "lists no node"))
            }
        };
        let keep = Arc::new(DirJobRecords::open(&dir.path().join("jobs")).unwrap());
        JobManager::start(keep, Some(&dir.path().join("spools")), Arc::new(open)).unwrap()
    };
    let first = board();
    let gate = group.gate.lock();
    let id = first.submit(spec(&[""])).unwrap();
    eventually("the list", || first.local_progress(&id).unwrap().1.listed);
    let suspending = std::thread::spawn(move || first.suspend());
    drop(gate);
    suspending.join().unwrap();
    // It may have ended before.
    away.store(2, Ordering::Release);
    let second = board();
    eventually("the end", || second.local_progress(&id).unwrap().1.state.is_ended());
    assert_eq!(second.local_progress(&id).unwrap().1.state, JobState::Succeeded);
    away.store(1, Ordering::Release);
    let id = second.submit(spec(&["a"])).unwrap();
    eventually("the end", || second.local_progress(&id).unwrap().1.state.is_ended());
    let (_, told) = second.local_progress(&id).unwrap();
    assert!(told.state == JobState::Failed && told.why.contains("lists no node"), "{told:?}");
}

#[test]
fn a_list_that_lost_its_end_with_the_power_is_made_anew() {
    let dir = tempfile::tempdir().unwrap();
    let group = Group::new(&TREE);
    let board = || {
        let open_group = Arc::clone(&group);
        let keep = Arc::new(DirJobRecords::open(&dir.path().join("jobs")).unwrap());
        JobManager::start(keep, Some(&dir.path().join("spools")), Arc::new(move |_| Ok(Arc::clone(&open_group) as _)))
            .unwrap()
    };
    let first = board();
    let gate = group.gate.lock();
    let id = first.submit(JobSpec { parallel: 1, ..spec(&["a", "c", "top"]) }).unwrap();
    eventually("the list", || first.local_progress(&id).unwrap().1.listed);
    std::thread::scope(|scope| {
        scope.spawn(|| first.suspend());
        eventually("the suspension", || gauges(&first).0 == 0);
        drop(gate);
    });
    let mut lists = std::fs::read_dir(dir.path().join("spools")).unwrap();
    let list = lists.next().unwrap().unwrap().path();
    // The last record: path, version, size.
    let short = list.metadata().unwrap().len() - (4 + 3 + 4 + 1 + 8);
    std::fs::OpenOptions::new().write(true).open(&list).unwrap().set_len(short).unwrap();
    group.held.lock().remove(&("top".to_owned(), 0));
    let second = board();
    eventually("the end", || second.local_progress(&id).unwrap().1.state.is_ended());
    let (_, progress) = second.local_progress(&id).unwrap();
    assert_eq!(
        (progress.state, progress.files_done, progress.files_total),
        (JobState::Succeeded, 7, 7),
        "{progress:?}"
    );
    assert!(group.held.lock().contains(&("top".to_owned(), 0)));
}

/// Running, succeeded and failed jobs in the metrics.
fn gauges(board: &JobManager) -> (u64, u64, u64) {
    let (stats, mut totals) = (Stats::default(), JobTotals::default());
    board.add_totals(&mut totals);
    totals.set_gauges(&stats.jobs);
    (stats.jobs.running.get(), stats.jobs.succeeded.get(), stats.jobs.failed.get())
}

#[test]
fn a_list_that_need_not_outlive_its_process_has_no_name_and_is_nobody_elses() {
    let files = many();
    let group = Group::new(&files.iter().map(|(p, s)| (p.as_str(), *s)).collect::<Vec<_>>());
    let open_group = Arc::clone(&group);
    let open = Arc::new(move |_: &str| Ok(Arc::clone(&open_group) as _));
    let board = JobManager::start(Arc::new(spurline_jobs::NoJobRecords), None, open).unwrap();
    let gate = group.gate.lock();
    let id = board.submit(JobSpec { verify: true, ..spec(&[""]) }).unwrap();
    eventually("the list", || board.local_progress(&id).unwrap().1.listed);
    // No other user can open an unnamed file.
    let temporary = std::env::temp_dir().canonicalize().unwrap();
    let mut links = std::fs::read_dir("/proc/self/fd").unwrap().flatten().filter_map(|fd| fd.path().read_link().ok());
    let nameless = |link: &Path| link.parent() == Some(&temporary) && link.to_string_lossy().ends_with("(deleted)");
    assert!(links.any(|link| nameless(&link)));
    drop(gate);
    eventually("the end", || board.local_progress(&id).unwrap().1.state.is_ended());
    let (_, progress) = board.local_progress(&id).unwrap();
    assert_eq!((progress.state, progress.files_done, progress.files_verified), (JobState::Succeeded, 500, 500));
}

#[test]
fn what_else_is_asked_of_the_same_paths_is_another_job_and_paths_alone_mean_the_latest() {
    let group = Group::new(&TREE);
    let open_group = Arc::clone(&group);
    let open = Arc::new(move |_: &str| Ok(Arc::clone(&open_group) as _));
    let board = JobManager::start(Arc::new(spurline_jobs::NoJobRecords), None, open).unwrap();
    let ask = |words: serde_json::Value| board.answer_request(&words);
    let submit = |spec: &JobSpec| ask(json!({"do": "submit", "spec": spec})).unwrap();
    let progress = |id: &str| ask(json!({"do": "progress", "id": id})).unwrap();
    let ended = |id: &str| eventually("the end", || board.local_progress(id).unwrap().1.state.is_ended());
    let (all, names) = (spec(&[""]), JobSpec { metadata_only: true, ..spec(&[""]) });
    let checked = JobSpec { verify: true, ..spec(&[""]) };
    let gate = group.gate.lock();
    assert_eq!(submit(&all)["joined"], false);
    assert_eq!(submit(&all)["joined"], true);
    assert_eq!(submit(&checked)["joined"], false);
    // Both are running: each by its own name; the subject finds one and lists the other.
    assert_eq!(progress(&checked.id())["id"], json!(checked.id()));
    let of_paths = progress(&all.subject());
    assert_eq!((&of_paths["id"], &of_paths["others"]), (&json!(all.id()), &json!([checked.id()])), "{of_paths}");
    let stopped = ask(json!({"do": "stop", "id": all.subject()})).unwrap();
    assert_eq!(stopped["others"].as_array().map(Vec::len), Some(1), "{stopped}");
    drop(gate);
    [&all, &checked].into_iter().for_each(|spec| ended(&spec.id()));
    assert_eq!([&all, &checked].map(|spec| progress(&spec.id())["state"].clone()), ["STOPPED", "STOPPED"]);
    submit(&names);
    ended(&names.id());
    let latest = progress(&names.subject());
    assert_eq!(
        (&latest["id"], &latest["metadata_only"], &latest["state"]),
        (&json!(names.id()), &json!(true), &json!("SUCCEEDED"))
    );
    assert_eq!((&latest["remaining_seconds"], &latest["others"]), (&json!(null), &json!([])), "{latest}");
    let unknown = |id: &str| ask(json!({"do": "progress", "id": id})).unwrap_err();
    let other = unknown(&JobSpec { skip_if_exists: true, ..spec(&[""]) }.id());
    assert!(other.kind() == ErrorKind::NotFound && other.message().contains("with these options"), "{other}");
    let nothing = unknown(&spec(&["a"]).subject());
    assert!(nothing.kind() == ErrorKind::NotFound && nothing.message().ends_with("for these paths"), "{nothing}");
}

/// It has two nodes.
struct Two(Arc<Group>);

impl JobTarget for Two {
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
        self.0.list(path, cursor)
    }
    fn missing_copies(&self, copies: u32) -> Option<String> {
        (copies > 2).then(|| "2 at most".to_owned())
    }
    fn warm_parts(&self, parts: &[FilePart], copies: Option<u32>, at_once: usize) -> Vec<Result<WorkDone>> {
        self.0.warm_parts(parts, copies, at_once)
    }
    fn check_parts(&self, parts: &[FilePart], copies: Option<u32>) -> Vec<Result<WorkDone>> {
        self.0.check_parts(parts, copies)
    }
    fn free_parts(&self, parts: &[FilePart], with_pinned: bool) -> Vec<Result<WorkDone>> {
        self.0.free_parts(parts, with_pinned)
    }
    fn free_all(&self, every_source: bool, with_pinned: bool) -> (WorkDone, Option<Error>) {
        self.0.free_all(every_source, with_pinned)
    }
}

#[test]
fn copies_that_can_not_be_are_noted_and_fail_nothing() {
    let dir = tempfile::tempdir().unwrap();
    for (replicas, note) in [(None, ""), (Some(2), ""), (Some(3), "2 at most")] {
        let job = JobRun::new();
        run_job(
            &Two(Group::new(&TREE)),
            &JobSpec { replicas, ..spec(&[""]) },
            &job,
            &dir.path().join("spool"),
            &mut |_| {},
        );
        let progress = job.progress();
        assert_eq!((progress.state, progress.note.as_str()), (JobState::Succeeded, note), "{progress:?}");
    }
}

#[test]
fn a_stopped_job_stays_stopped() {
    let dir = tempfile::tempdir().unwrap();
    let group = Group::new(&TREE);
    let open_group = Arc::clone(&group);
    let keep = Arc::new(DirJobRecords::open(dir.path()).unwrap());
    let board = JobManager::start(
        Arc::clone(&keep) as _,
        Some(dir.path()),
        Arc::new(move |_| Ok(Arc::clone(&open_group) as _)),
    )
    .unwrap();
    let gate = group.gate.lock();
    let id = board.submit(spec(&[""])).unwrap();
    assert_eq!(gauges(&board), (1, 0, 0));
    assert!(board.stop_job(&id).unwrap() && !board.stop_job("load-none").unwrap());
    drop(gate);
    eventually("the end", || board.local_progress(&id).unwrap().1.state == JobState::Stopped);
    assert_eq!(gauges(&board), (0, 0, 1));
    eventually("what is kept", || {
        keep.load_jobs().unwrap().iter().any(|(_, job)| format!("{job:?}").contains("Stopped"))
    });
    assert!(board.submit(JobSpec { include: vec!["***".into()], ..spec(&[""]) }).is_err());
}

#[test]
fn a_job_that_is_to_end_does_not_come_back_after_a_restart() {
    let group = Group::new(&TREE);
    let board = |dir: &std::path::Path| {
        let open_group = Arc::clone(&group);
        let keep = Arc::new(DirJobRecords::open(dir).unwrap());
        JobManager::start(keep, Some(dir), Arc::new(move |_| Ok(Arc::clone(&open_group) as _))).unwrap()
    };
    // Killed while running; a second manager cannot distinguish this from a first that still runs.
    let dir = tempfile::tempdir().unwrap();
    let (first, gate) = (board(dir.path()), group.gate.lock());
    let id = first.submit(spec(&[""])).unwrap();
    assert!(first.stop_job(&id).unwrap() && first.works_on(&id));
    let second = board(dir.path());
    assert!(!second.works_on(&id));
    let stopped = second.local_progress(&id).unwrap().1;
    assert_eq!((stopped.state, stopped.why.as_str()), (JobState::Stopped, "it was stopped"));
    assert_eq!(board(dir.path()).local_progress(&id).unwrap().1.state, JobState::Stopped);
    drop(gate);
    eventually("the end", || !first.works_on(&id));
    // Suspended before the job ended.
    let dir = tempfile::tempdir().unwrap();
    let (first, gate) = (board(dir.path()), group.gate.lock());
    first.submit(spec(&[""])).unwrap();
    assert!(first.stop_job(&id).unwrap());
    let suspending = std::thread::spawn(move || first.suspend());
    drop(gate);
    suspending.join().unwrap();
    assert_eq!(board(dir.path()).local_progress(&id).unwrap().1.state, JobState::Stopped);
}

#[test]
fn a_rate_holds_from_the_first_byte_and_a_stop_lets_nothing_through() {
    let group = Group::new(&[("big", 300 * BLOCK)]);
    let slow = JobSpec { rate: 2 * BLOCK, ..spec(&[""]) };
    let (job, dir) = (JobRun::new(), tempfile::tempdir().unwrap());
    let begun = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(|| run_job(&*group, &slow, &job, &dir.path().join("spool"), &mut |_| {}));
        eventually("the first byte", || job.progress().bytes_moved > 0);
        job.stop();
    });
    let (ended, most) = (job.progress(), (begun.elapsed().as_secs_f64() + 0.1) * (2 * BLOCK) as f64);
    assert_eq!(ended.state, JobState::Stopped);
    assert!(ended.bytes_moved as f64 <= most, "{} bytes where {most} were let pass", ended.bytes_moved);
}

#[test]
fn a_walker_that_panics_ends_the_job_and_nobody_waits_for_it() {
    let group = Group::new(&TREE);
    group.panics.store(true, Ordering::Relaxed);
    let failed = done(&group, &spec(&["top", "a"]));
    assert_eq!((failed.state, failed.listed), (JobState::Failed, false), "{failed:?}");
    assert!(failed.why.contains("panicked"), "{failed:?}");
}

/// The store shared by two processes: jobs and their owners.
#[derive(Default)]
struct Store {
    jobs: Mutex<BTreeMap<String, JobRecord>>,
    owners: Mutex<HashMap<String, u32>>,
}

/// One process's view of it.
struct Mine {
    store: Arc<Store>,
    number: u32,
    holds: AtomicBool,
}

impl Mine {
    /// Takes a job without an owner.
    fn claim(&self, id: &str) -> Option<JobRecord> {
        let mut owners = self.store.owners.lock();
        if owners.contains_key(id) {
            return None;
        }
        owners.insert(id.to_owned(), self.number);
        self.store.jobs.lock().get(id).cloned()
    }
}

impl JobRecords for Mine {
    fn begin_job(&self, id: &str, job: &JobRecord) -> Result<Option<JobRecord>> {
        let mut owners = self.store.owners.lock();
        if owners.contains_key(id) {
            return Ok(self.store.jobs.lock().get(id).cloned());
        }
        owners.insert(id.to_owned(), self.number);
        self.store.jobs.lock().insert(id.to_owned(), job.clone());
        Ok(None)
    }
    fn save_job(&self, id: &str, job: &JobRecord) -> Result<()> {
        let mut owners = self.store.owners.lock();
        if owners.get(id) != Some(&self.number) {
            return Err(Error::new(ErrorKind::PermissionDenied, "owned by another user"));
        }
        if job.progress().state.is_ended() {
            owners.remove(id);
        }
        self.store.jobs.lock().insert(id.to_owned(), job.clone());
        Ok(())
    }
    fn load_jobs(&self) -> Result<Vec<(String, JobRecord)>> {
        Ok(Vec::new())
    }
    fn remove_job(&self, _: &str) -> Result<()> {
        Ok(())
    }
    fn may_work(&self) -> bool {
        self.holds.load(Ordering::Relaxed)
    }
    fn read_job(&self, id: &str) -> Result<Option<JobRecord>> {
        Ok(self.store.jobs.lock().get(id).cloned())
    }
    fn leave_job(&self, id: &str) {
        self.store.owners.lock().remove(id);
    }
}

#[test]
fn a_job_is_one_process_s_and_another_goes_on_with_it() {
    let dir = tempfile::tempdir().unwrap();
    let files = many();
    let group = Group::new(&files.iter().map(|(p, s)| (p.as_str(), *s)).collect::<Vec<_>>());
    let store = Arc::new(Store::default());
    let process = |number: u32| {
        let mine = Arc::new(Mine { store: Arc::clone(&store), number, holds: AtomicBool::new(true) });
        let open_group = Arc::clone(&group);
        let open = Arc::new(move |_: &str| Ok(Arc::clone(&open_group) as _));
        let board =
            JobManager::start(Arc::clone(&mine) as _, Some(&dir.path().join(number.to_string())), open).unwrap();
        (mine, board)
    };
    let ((one, first), (two, second)) = (process(1), process(2));
    let load = JobSpec { parallel: 3, ..spec(&[""]) };
    let gate = group.gate.lock();
    let id = first.submit(load.clone()).unwrap();
    // The same submission to the other process finds the same job and does not run it twice.
    assert_eq!(second.submit(load.clone()).unwrap(), id);
    assert!(second.submit(JobSpec { parallel: 4, ..load }).unwrap_err().message().contains("stop it first"));
    assert!(second.find_job(&id).unwrap().is_some() && !second.works_on(&id) && first.works_on(&id));
    assert!(two.claim(&id).is_none());
    drop(gate);
    eventually("some work", || first.local_progress(&id).unwrap().1.files_done > 20);
    // The first process lost its lease: it stops, and the other resumes the job.
    one.holds.store(false, Ordering::Relaxed);
    store.owners.lock().clear();
    second.adopt_job(&id, two.claim(&id).unwrap()).unwrap();
    eventually("the first to stop", || !first.works_on(&id));
    eventually("the end", || second.find_job(&id).unwrap().unwrap().1.state.is_ended());
    for board in [&first, &second] {
        let (_, progress) = board.find_job(&id).unwrap().unwrap();
        assert_eq!((progress.state, progress.files_done, progress.files_total), (JobState::Succeeded, 500, 500));
    }
    // A job released at the end of one process is resumed at once by the other.
    one.holds.store(true, Ordering::Relaxed);
    let gate = group.gate.lock();
    let id = first.submit(spec(&["d1"])).unwrap();
    let leaving = std::thread::spawn(move || first.suspend());
    drop(gate);
    leaving.join().unwrap();
    if let Some(kept) = two.claim(&id).filter(|kept| !kept.progress().state.is_ended()) {
        second.adopt_job(&id, kept).unwrap();
    }
    eventually("the end", || second.find_job(&id).unwrap().unwrap().1.state == JobState::Succeeded);
}

/// Stores nothing and cannot read other processes' jobs.
#[derive(Default)]
struct Mute(Mutex<Vec<String>>);

impl JobRecords for Mute {
    fn save_job(&self, _: &str, _: &JobRecord) -> Result<()> {
        Ok(())
    }
    fn load_jobs(&self) -> Result<Vec<(String, JobRecord)>> {
        Ok(Vec::new())
    }
    fn other_jobs(&self, prefix: &str) -> Result<Vec<(String, JobRecord)>> {
        self.0.lock().push(prefix.to_owned());
        Err(Error::new(ErrorKind::Unavailable, "no answer"))
    }
    fn remove_job(&self, _: &str) -> Result<()> {
        Ok(())
    }
}

#[test]
fn a_job_begins_though_others_can_not_be_asked_and_only_those_of_its_paths_are() {
    let dir = tempfile::tempdir().unwrap();
    let group = Group::new(&[("a", 1)]);
    let keep = Arc::new(Mute::default());
    let open = Arc::new(move |_: &str| Ok(Arc::clone(&group) as _));
    let board = JobManager::start(Arc::clone(&keep) as _, Some(dir.path()), open).unwrap();
    let load = spec(&["a"]);
    let begun = board.answer_request(&json!({"do": "submit", "spec": load})).unwrap();
    assert_eq!(begun["submission"], 1);
    assert_eq!(*keep.0.lock(), [load.subject()]);
    eventually("the end", || board.find_job(&load.id()).unwrap().unwrap().1.state.is_ended());
}
