//! Jobs over a group that is in this process and fails on demand: what is done, what is counted, what a restart keeps.

use parking_lot::Mutex;
use serde_json::json;
use spurline_jobs::{Action, Board, DirKeep, Keep, Kept, Part, Run, Spec, State, Target, Totals, Worked, run};
use spurline_types::{Attr, DirEntry, Error, ErrorKind, FileKind, ListPage, Result, Stats, Version};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const BLOCK: u64 = 100;

/// A group in memory.
#[derive(Default)]
struct Group {
    files: BTreeMap<String, u64>,
    held: Mutex<BTreeSet<(String, u32)>>,
    /// Requests that answer with this error before they go well.
    failures: Mutex<HashMap<String, (ErrorKind, u32)>>,
    /// Files that somebody writes, and for how many looks at them.
    written: Mutex<HashMap<String, u32>>,
    asked: AtomicU64,
    /// Requests wait while this is locked.
    gate: Mutex<()>,
    /// Folders can't even be asked for.
    panics: AtomicBool,
}

impl Group {
    fn new(files: &[(&str, u64)]) -> Arc<Group> {
        Arc::new(Group { files: files.iter().map(|(p, s)| ((*p).to_owned(), *s)).collect(), ..Group::default() })
    }

    fn file(&self, path: &str, size: u64) -> Attr {
        let mut attr = attr(FileKind::File, size);
        if let Some(left) = self.written.lock().get_mut(path).filter(|left| **left > 0) {
            *left -= 1;
            attr.version = attr.version.unsettled(u64::from(*left));
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

fn attr(kind: FileKind, size: u64) -> Attr {
    Attr { kind, size, mtime: std::time::UNIX_EPOCH, mode: 0o444, version: Version::new("v"), etag: None }
}

fn text(path: &[u8]) -> String {
    String::from_utf8(path.to_vec()).unwrap()
}

impl Target for Group {
    fn source(&self) -> &str {
        "mem://group"
    }
    fn block_size(&self) -> u64 {
        BLOCK
    }
    fn lookup(&self, path: &[u8]) -> Result<Attr> {
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
        Ok(ListPage { entries, next })
    }
    fn warm(&self, parts: &[Part], _: Option<u32>, _: usize) -> Vec<Result<Worked>> {
        drop(self.gate.lock());
        let one = |part: &Part| {
            self.asked.fetch_add(1, Ordering::Relaxed);
            let path = text(&part.object.path);
            self.fails(&path)?;
            assert_eq!(part.object.version.as_str(), "v", "nobody asks for anything else later");
            let mut did = Worked::default();
            for block in part.blocks.clone() {
                let len = part.object.block_len(block, BLOCK) as u64;
                if self.held.lock().insert((path.clone(), block)) { did.moved += len } else { did.held += len }
            }
            Ok(did)
        };
        parts.iter().map(one).collect()
    }
    fn check(&self, parts: &[Part], _: Option<u32>) -> Vec<Result<Worked>> {
        let one = |part: &Part| {
            for block in part.blocks.clone() {
                if !self.held.lock().contains(&(text(&part.object.path), block)) {
                    return Err(Error::new(ErrorKind::NotFound, format!("block {block} is not held")));
                }
            }
            Ok(Worked::default())
        };
        parts.iter().map(one).collect()
    }
    fn free(&self, parts: &[Part]) -> Vec<Result<Worked>> {
        let one = |part: &Part| {
            let mut did = Worked::default();
            for block in part.blocks.clone() {
                if self.held.lock().remove(&(text(&part.object.path), block)) {
                    did.moved += part.object.block_len(block, BLOCK) as u64;
                }
            }
            Ok(did)
        };
        parts.iter().map(one).collect()
    }
}

fn spec(paths: &[&str]) -> Spec {
    Spec {
        action: Action::Load,
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
        parallel: 4,
    }
}

fn done(group: &Group, spec: &Spec) -> spurline_jobs::Progress {
    let (job, dir) = (Run::new(), tempfile::tempdir().unwrap());
    run(group, spec, &job, &dir.path().join("spool"), &mut |_| {});
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
    let all = done(&group, &Spec { verify: true, ..spec(&["", "top"]) });
    assert_eq!((all.state, all.files_total, all.files_done, all.files_failed), (State::Succeeded, 8, 8, 0), "{all:?}");
    assert_eq!((all.bytes_total, all.bytes_done, all.bytes_moved), (2370, 2370, 2369));
    assert_eq!((all.files_verified, all.bytes_verified, all.listed), (8, 2370, true));
    assert_eq!(group.held.lock().len(), 3 + 1 + 21 + 1 + 1 + 1);
    let again = done(&group, &Spec { skip_if_exists: true, ..spec(&["a"]) });
    assert_eq!((again.files_done, again.files_skipped, again.bytes_moved), (5, 4, 0), "{again:?}");
    let freed = done(&group, &Spec { action: Action::Free, ..spec(&["a/b/"]) });
    assert_eq!((freed.state, freed.bytes_moved), (State::Succeeded, 2011));
    assert_eq!(group.held.lock().len(), 6);
    let metadata = done(&group, &Spec { metadata_only: true, verify: true, ..spec(&["a"]) });
    assert_eq!((metadata.state, metadata.files_done, metadata.bytes_done), (State::Succeeded, 5, 0));
    assert_eq!(group.held.lock().len(), 6);
}

#[test]
fn patterns_and_lists_choose() {
    let group = Group::new(&TREE);
    let words = |list: &[&str]| list.iter().map(|s| (*s).to_owned()).collect::<Vec<_>>();
    let some = done(&group, &Spec { include: words(&["*.bin"]), exclude: words(&["a/b"]), ..spec(&[""]) });
    assert_eq!((some.state, some.files_done, some.bytes_done), (State::Succeeded, 3, 357), "{some:?}");
    let listed = done(&group, &Spec { listed: true, ..spec(&["a/1.bin", "c", "nowhere"]) });
    assert_eq!((listed.state, listed.files_done, listed.files_failed), (State::Failed, 1, 2), "{listed:?}");
    let named: Vec<&str> = listed.failed.iter().map(|f| f.path.as_str()).collect();
    assert_eq!(named, ["c", "nowhere"]);
    assert!(listed.failed[0].reason.contains("a folder") && listed.failed[1].reason.contains("not there"));
}

#[test]
fn failures_are_repeated_named_and_do_not_end_the_job() {
    let group = Group::new(&TREE);
    group.failures.lock().insert("a/1.bin".into(), (ErrorKind::PermissionDenied, 1));
    group.failures.lock().insert("a/2.bin".into(), (ErrorKind::Unavailable, 2));
    let all = done(&group, &spec(&["a"]));
    assert_eq!((all.state, all.files_done, all.files_failed), (State::Failed, 4, 1), "{all:?}");
    assert_eq!((all.failed[0].path.as_str(), all.why.as_str()), ("a/1.bin", "1 file could not be done"));
    // What is missing when it is read back is no success.
    struct Forgets(Arc<Group>);
    impl Target for Forgets {
        fn source(&self) -> &str {
            self.0.source()
        }
        fn block_size(&self) -> u64 {
            BLOCK
        }
        fn lookup(&self, path: &[u8]) -> Result<Attr> {
            self.0.lookup(path)
        }
        fn list(&self, path: &[u8], cursor: Option<&[u8]>) -> Result<ListPage> {
            self.0.list(path, cursor)
        }
        fn warm(&self, parts: &[Part], replicas: Option<u32>, at_once: usize) -> Vec<Result<Worked>> {
            let did = self.0.warm(parts, replicas, at_once);
            self.0.held.lock().remove(&("a/b/3.bin".to_owned(), 20));
            did
        }
        fn check(&self, parts: &[Part], replicas: Option<u32>) -> Vec<Result<Worked>> {
            self.0.check(parts, replicas)
        }
        fn free(&self, parts: &[Part]) -> Vec<Result<Worked>> {
            self.0.free(parts)
        }
    }
    let group = Forgets(Group::new(&TREE));
    let (job, dir) = (Run::new(), tempfile::tempdir().unwrap());
    run(&group, &Spec { verify: true, ..spec(&["a"]) }, &job, &dir.path().join("spool"), &mut |_| {});
    let progress = job.progress();
    assert_eq!((progress.state, progress.files_verified, progress.files_failed), (State::Failed, 4, 1), "{progress:?}");
    assert!(progress.failed[0].reason.contains("after loading: block 20 is not held"), "{progress:?}");
}

#[test]
fn a_file_that_is_being_written_is_loaded_when_it_is_closed() {
    let group = Group::new(&TREE);
    // Listed, looked at twice, and closed.
    group.written.lock().insert("a/b/3.bin".into(), 3);
    let all = done(&group, &Spec { verify: true, ..spec(&["a"]) });
    assert_eq!((all.state, all.files_done, all.files_verified), (State::Succeeded, 5, 5), "{all:?}");
    group.written.lock().insert("a/1.bin".into(), 1);
    let freed = done(&group, &Spec { action: Action::Free, ..spec(&["a"]) });
    assert_eq!((freed.state, freed.bytes_moved), (State::Succeeded, 2361), "{freed:?}");
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
        let keep = Arc::new(DirKeep::open(&dir.path().join("jobs")).unwrap());
        Board::start(keep, Some(&dir.path().join("spools")), Arc::new(move |_| Ok(Arc::clone(&open_group) as _)))
            .unwrap()
    };
    let first = board();
    let load = Spec { parallel: 3, ..spec(&[""]) };
    let gate = group.gate.lock();
    let id = first.submit(load.clone()).unwrap();
    assert_eq!(first.submit(load.clone()).unwrap(), id);
    let other = first.submit(Spec { rate: 1 << 20, ..load.clone() }).unwrap_err();
    assert!(other.message().contains("with no --rate and -p 3; stop it first"), "{other}");
    eventually("the list", || first.progress(&id).unwrap().1.listed);
    drop(gate);
    eventually("some work", || first.progress(&id).unwrap().1.files_done > 50);
    let gate = group.gate.lock();
    let suspending = std::thread::spawn({
        let first = Arc::clone(&first);
        move || first.suspend()
    });
    drop(gate);
    suspending.join().unwrap();
    let asked = group.asked.load(Ordering::Relaxed);
    let second = board();
    eventually("the end", || second.progress(&id).unwrap().1.state.ended());
    let (_, progress) = second.progress(&id).unwrap();
    let bytes: u64 = files.iter().map(|(_, s)| s).sum();
    assert_eq!((progress.state, progress.files_done, progress.files_total), (State::Succeeded, 500, 500));
    assert_eq!((progress.bytes_done, progress.bytes_total), (bytes, bytes));
    // A file under way when the board stopped is asked for again; no other.
    let units: u64 = files.iter().map(|(_, s)| s.div_ceil(16 * BLOCK)).sum();
    assert!(group.asked.load(Ordering::Relaxed) <= units + 3 * 16, "{asked} before, {units} in all");
    eventually("its record", || !second.works_on(&id));
    drop(second);
    // What ended is remembered, and can be done anew.
    let third = board();
    assert_eq!(third.list().unwrap().len(), 1);
    assert_eq!(third.progress(&id).unwrap().1.state, State::Succeeded);
    assert_eq!(gauges(&third), (0, 1, 0));
    assert!(!third.stop(&id).unwrap());
    third.submit(load).unwrap();
    eventually("the end", || third.progress(&id).unwrap().1.state == State::Succeeded);
}

#[test]
fn a_job_that_goes_on_waits_for_its_group_and_one_that_begins_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let group = Group::new(&TREE);
    // Nodes that are not there when the coordinator is.
    let away = Arc::new(AtomicU64::new(0));
    let board = || {
        let (open_group, away) = (Arc::clone(&group), Arc::clone(&away));
        let open = move |_: &str| match away.load(Ordering::Acquire) {
            0 => Ok(Arc::clone(&open_group) as _),
            left => {
                away.store(left - 1, Ordering::Release);
                Err(Error::new(ErrorKind::Unavailable, "knows no node"))
            }
        };
        let keep = Arc::new(DirKeep::open(&dir.path().join("jobs")).unwrap());
        Board::start(keep, Some(&dir.path().join("spools")), Arc::new(open)).unwrap()
    };
    let first = board();
    let gate = group.gate.lock();
    let id = first.submit(spec(&[""])).unwrap();
    eventually("the list", || first.progress(&id).unwrap().1.listed);
    let suspending = std::thread::spawn(move || first.suspend());
    drop(gate);
    suspending.join().unwrap();
    // It may have come to its end before.
    away.store(2, Ordering::Release);
    let second = board();
    eventually("the end", || second.progress(&id).unwrap().1.state.ended());
    assert_eq!(second.progress(&id).unwrap().1.state, State::Succeeded);
    away.store(1, Ordering::Release);
    let id = second.submit(spec(&["a"])).unwrap();
    eventually("the end", || second.progress(&id).unwrap().1.state.ended());
    let (_, told) = second.progress(&id).unwrap();
    assert!(told.state == State::Failed && told.why.contains("knows no node"), "{told:?}");
}

#[test]
fn a_list_that_lost_its_end_with_the_power_is_made_anew() {
    let dir = tempfile::tempdir().unwrap();
    let group = Group::new(&TREE);
    let board = || {
        let open_group = Arc::clone(&group);
        let keep = Arc::new(DirKeep::open(&dir.path().join("jobs")).unwrap());
        Board::start(keep, Some(&dir.path().join("spools")), Arc::new(move |_| Ok(Arc::clone(&open_group) as _)))
            .unwrap()
    };
    let first = board();
    let gate = group.gate.lock();
    let id = first.submit(Spec { parallel: 1, ..spec(&["a", "c", "top"]) }).unwrap();
    eventually("the list", || first.progress(&id).unwrap().1.listed);
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
    eventually("the end", || second.progress(&id).unwrap().1.state.ended());
    let (_, progress) = second.progress(&id).unwrap();
    assert_eq!((progress.state, progress.files_done, progress.files_total), (State::Succeeded, 7, 7), "{progress:?}");
    assert!(group.held.lock().contains(&("top".to_owned(), 0)));
}

/// Jobs running, that succeeded, and that did not, as the metrics have them.
fn gauges(board: &Board) -> (u64, u64, u64) {
    let (stats, mut totals) = (Stats::default(), Totals::default());
    board.count(&mut totals);
    totals.show(&stats.jobs);
    (stats.jobs.running.get(), stats.jobs.succeeded.get(), stats.jobs.failed.get())
}

#[test]
fn a_list_that_need_not_outlive_its_process_has_no_name_and_is_nobody_elses() {
    let files = many();
    let group = Group::new(&files.iter().map(|(p, s)| (p.as_str(), *s)).collect::<Vec<_>>());
    let open_group = Arc::clone(&group);
    let open = Arc::new(move |_: &str| Ok(Arc::clone(&open_group) as _));
    let board = Board::start(Arc::new(spurline_jobs::NoKeep), None, open).unwrap();
    let gate = group.gate.lock();
    let id = board.submit(Spec { verify: true, ..spec(&[""]) }).unwrap();
    eventually("the list", || board.progress(&id).unwrap().1.listed);
    // Nobody else can open what has no name.
    let temporary = std::env::temp_dir().canonicalize().unwrap();
    let mut links = std::fs::read_dir("/proc/self/fd").unwrap().flatten().filter_map(|fd| fd.path().read_link().ok());
    let nameless = |link: &Path| link.parent() == Some(&temporary) && link.to_string_lossy().ends_with("(deleted)");
    assert!(links.any(|link| nameless(&link)));
    drop(gate);
    eventually("the end", || board.progress(&id).unwrap().1.state.ended());
    let (_, progress) = board.progress(&id).unwrap();
    assert_eq!((progress.state, progress.files_done, progress.files_verified), (State::Succeeded, 500, 500));
}

#[test]
fn what_else_is_asked_of_the_same_paths_is_another_job_and_paths_alone_mean_the_latest() {
    let group = Group::new(&TREE);
    let open_group = Arc::clone(&group);
    let open = Arc::new(move |_: &str| Ok(Arc::clone(&open_group) as _));
    let board = Board::start(Arc::new(spurline_jobs::NoKeep), None, open).unwrap();
    let ask = |words: serde_json::Value| board.answer(&words);
    let submit = |spec: &Spec| ask(json!({"do": "submit", "spec": spec})).unwrap();
    let progress = |id: &str| ask(json!({"do": "progress", "id": id})).unwrap();
    let ended = |id: &str| eventually("the end", || board.progress(id).unwrap().1.state.ended());
    let (all, names) = (spec(&[""]), Spec { metadata_only: true, ..spec(&[""]) });
    let checked = Spec { verify: true, ..spec(&[""]) };
    let gate = group.gate.lock();
    assert_eq!(submit(&all)["joined"], false);
    assert_eq!(submit(&all)["joined"], true);
    assert_eq!(submit(&checked)["joined"], false);
    // Both are under way: each by its name; of the paths alone one, which tells of the other.
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
    let other = unknown(&Spec { skip_if_exists: true, ..spec(&[""]) }.id());
    assert!(other.kind() == ErrorKind::NotFound && other.message().contains("with these options"), "{other}");
    let nothing = unknown(&spec(&["a"]).subject());
    assert!(nothing.kind() == ErrorKind::NotFound && nothing.message().ends_with("for these paths"), "{nothing}");
}

/// It has two nodes.
struct Two(Arc<Group>);

impl Target for Two {
    fn source(&self) -> &str {
        self.0.source()
    }
    fn block_size(&self) -> u64 {
        self.0.block_size()
    }
    fn lookup(&self, path: &[u8]) -> Result<Attr> {
        self.0.lookup(path)
    }
    fn list(&self, path: &[u8], cursor: Option<&[u8]>) -> Result<ListPage> {
        self.0.list(path, cursor)
    }
    fn short_of(&self, copies: u32) -> Option<String> {
        (copies > 2).then(|| "2 at most".to_owned())
    }
    fn warm(&self, parts: &[Part], copies: Option<u32>, at_once: usize) -> Vec<Result<Worked>> {
        self.0.warm(parts, copies, at_once)
    }
    fn check(&self, parts: &[Part], copies: Option<u32>) -> Vec<Result<Worked>> {
        self.0.check(parts, copies)
    }
    fn free(&self, parts: &[Part]) -> Vec<Result<Worked>> {
        self.0.free(parts)
    }
}

#[test]
fn copies_that_can_not_be_are_noted_and_fail_nothing() {
    let dir = tempfile::tempdir().unwrap();
    for (replicas, note) in [(None, ""), (Some(2), ""), (Some(3), "2 at most")] {
        let job = Run::new();
        run(&Two(Group::new(&TREE)), &Spec { replicas, ..spec(&[""]) }, &job, &dir.path().join("spool"), &mut |_| {});
        let progress = job.progress();
        assert_eq!((progress.state, progress.note.as_str()), (State::Succeeded, note), "{progress:?}");
    }
}

#[test]
fn a_stopped_job_stays_stopped() {
    let dir = tempfile::tempdir().unwrap();
    let group = Group::new(&TREE);
    let open_group = Arc::clone(&group);
    let keep = Arc::new(DirKeep::open(dir.path()).unwrap());
    let board =
        Board::start(Arc::clone(&keep) as _, Some(dir.path()), Arc::new(move |_| Ok(Arc::clone(&open_group) as _)))
            .unwrap();
    let gate = group.gate.lock();
    let id = board.submit(spec(&[""])).unwrap();
    assert_eq!(gauges(&board), (1, 0, 0));
    assert!(board.stop(&id).unwrap() && !board.stop("load-none").unwrap());
    drop(gate);
    eventually("the end", || board.progress(&id).unwrap().1.state == State::Stopped);
    assert_eq!(gauges(&board), (0, 0, 1));
    eventually("what is kept", || keep.load().unwrap().iter().any(|(_, job)| format!("{job:?}").contains("Stopped")));
    assert!(board.submit(Spec { include: vec!["***".into()], ..spec(&[""]) }).is_err());
}

#[test]
fn a_job_that_is_to_end_does_not_come_back_after_a_restart() {
    let group = Group::new(&TREE);
    let board = |dir: &std::path::Path| {
        let open_group = Arc::clone(&group);
        let keep = Arc::new(DirKeep::open(dir).unwrap());
        Board::start(keep, Some(dir), Arc::new(move |_| Ok(Arc::clone(&open_group) as _))).unwrap()
    };
    // Killed while it still works, which a second board beside it has no way to tell from one that was.
    let dir = tempfile::tempdir().unwrap();
    let (first, gate) = (board(dir.path()), group.gate.lock());
    let id = first.submit(spec(&[""])).unwrap();
    assert!(first.stop(&id).unwrap() && first.works_on(&id));
    let second = board(dir.path());
    assert!(!second.works_on(&id));
    let stopped = second.progress(&id).unwrap().1;
    assert_eq!((stopped.state, stopped.why.as_str()), (State::Stopped, "it was stopped"));
    assert_eq!(board(dir.path()).progress(&id).unwrap().1.state, State::Stopped);
    drop(gate);
    eventually("the end", || !first.works_on(&id));
    // Ended in order, before it had come to its end.
    let dir = tempfile::tempdir().unwrap();
    let (first, gate) = (board(dir.path()), group.gate.lock());
    first.submit(spec(&[""])).unwrap();
    assert!(first.stop(&id).unwrap());
    let suspending = std::thread::spawn(move || first.suspend());
    drop(gate);
    suspending.join().unwrap();
    assert_eq!(board(dir.path()).progress(&id).unwrap().1.state, State::Stopped);
}

#[test]
fn a_rate_holds_from_the_first_byte_and_a_stop_lets_nothing_through() {
    let group = Group::new(&[("big", 300 * BLOCK)]);
    let slow = Spec { rate: 2 * BLOCK, ..spec(&[""]) };
    let (job, dir) = (Run::new(), tempfile::tempdir().unwrap());
    let begun = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(|| run(&*group, &slow, &job, &dir.path().join("spool"), &mut |_| {}));
        eventually("the first byte", || job.progress().bytes_moved > 0);
        job.stop();
    });
    let (ended, most) = (job.progress(), (begun.elapsed().as_secs_f64() + 0.1) * (2 * BLOCK) as f64);
    assert_eq!(ended.state, State::Stopped);
    assert!(ended.bytes_moved as f64 <= most, "{} bytes where {most} were let pass", ended.bytes_moved);
}

#[test]
fn a_walker_that_panics_ends_the_job_and_nobody_waits_for_it() {
    let group = Group::new(&TREE);
    group.panics.store(true, Ordering::Relaxed);
    let failed = done(&group, &spec(&["top", "a"]));
    assert_eq!((failed.state, failed.listed), (State::Failed, false), "{failed:?}");
    assert!(failed.why.contains("panicked"), "{failed:?}");
}

/// What two processes share: jobs, and who works on each.
#[derive(Default)]
struct Store {
    jobs: Mutex<BTreeMap<String, Kept>>,
    owners: Mutex<HashMap<String, u32>>,
}

/// One process's part in it.
struct Mine {
    store: Arc<Store>,
    number: u32,
    holds: AtomicBool,
}

impl Mine {
    /// Takes a job that nobody works on.
    fn claim(&self, id: &str) -> Option<Kept> {
        let mut owners = self.store.owners.lock();
        if owners.contains_key(id) {
            return None;
        }
        owners.insert(id.to_owned(), self.number);
        self.store.jobs.lock().get(id).cloned()
    }
}

impl Keep for Mine {
    fn begin(&self, id: &str, job: &Kept) -> Result<Option<Kept>> {
        let mut owners = self.store.owners.lock();
        if owners.contains_key(id) {
            return Ok(self.store.jobs.lock().get(id).cloned());
        }
        owners.insert(id.to_owned(), self.number);
        self.store.jobs.lock().insert(id.to_owned(), job.clone());
        Ok(None)
    }
    fn save(&self, id: &str, job: &Kept) -> Result<()> {
        let mut owners = self.store.owners.lock();
        if owners.get(id) != Some(&self.number) {
            return Err(Error::new(ErrorKind::PermissionDenied, "somebody else's"));
        }
        if job.progress().state.ended() {
            owners.remove(id);
        }
        self.store.jobs.lock().insert(id.to_owned(), job.clone());
        Ok(())
    }
    fn load(&self) -> Result<Vec<(String, Kept)>> {
        Ok(Vec::new())
    }
    fn remove(&self, _: &str) -> Result<()> {
        Ok(())
    }
    fn holds(&self) -> bool {
        self.holds.load(Ordering::Relaxed)
    }
    fn read(&self, id: &str) -> Result<Option<Kept>> {
        Ok(self.store.jobs.lock().get(id).cloned())
    }
    fn leave(&self, id: &str) {
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
        let board = Board::start(Arc::clone(&mine) as _, Some(&dir.path().join(number.to_string())), open).unwrap();
        (mine, board)
    };
    let ((one, first), (two, second)) = (process(1), process(2));
    let load = Spec { parallel: 3, ..spec(&[""]) };
    let gate = group.gate.lock();
    let id = first.submit(load.clone()).unwrap();
    // The same of the other is the same job; it is seen there, and not worked on.
    assert_eq!(second.submit(load.clone()).unwrap(), id);
    assert!(second.submit(Spec { parallel: 4, ..load }).unwrap_err().message().contains("stop it first"));
    assert!(second.find(&id).unwrap().is_some() && !second.works_on(&id) && first.works_on(&id));
    assert!(two.claim(&id).is_none());
    drop(gate);
    eventually("some work", || first.progress(&id).unwrap().1.files_done > 20);
    // The first has not been heard of: it stops by itself, and the other goes on.
    one.holds.store(false, Ordering::Relaxed);
    store.owners.lock().clear();
    second.adopt(&id, two.claim(&id).unwrap()).unwrap();
    eventually("the first to stop", || !first.works_on(&id));
    eventually("the end", || second.find(&id).unwrap().unwrap().1.state.ended());
    for board in [&first, &second] {
        let (_, progress) = board.find(&id).unwrap().unwrap();
        assert_eq!((progress.state, progress.files_done, progress.files_total), (State::Succeeded, 500, 500));
    }
    // What one leaves at its end, the other has at once.
    one.holds.store(true, Ordering::Relaxed);
    let gate = group.gate.lock();
    let id = first.submit(spec(&["d1"])).unwrap();
    let leaving = std::thread::spawn(move || first.suspend());
    drop(gate);
    leaving.join().unwrap();
    if let Some(kept) = two.claim(&id).filter(|kept| !kept.progress().state.ended()) {
        second.adopt(&id, kept).unwrap();
    }
    eventually("the end", || second.find(&id).unwrap().unwrap().1.state == State::Succeeded);
}

/// Keeps nothing, and can't say what others have.
#[derive(Default)]
struct Mute(Mutex<Vec<String>>);

impl Keep for Mute {
    fn save(&self, _: &str, _: &Kept) -> Result<()> {
        Ok(())
    }
    fn load(&self) -> Result<Vec<(String, Kept)>> {
        Ok(Vec::new())
    }
    fn others(&self, prefix: &str) -> Result<Vec<(String, Kept)>> {
        self.0.lock().push(prefix.to_owned());
        Err(Error::new(ErrorKind::Unavailable, "no answer"))
    }
    fn remove(&self, _: &str) -> Result<()> {
        Ok(())
    }
}

#[test]
fn a_job_begins_though_others_can_not_be_asked_and_only_those_of_its_paths_are() {
    let dir = tempfile::tempdir().unwrap();
    let group = Group::new(&[("a", 1)]);
    let keep = Arc::new(Mute::default());
    let open = Arc::new(move |_: &str| Ok(Arc::clone(&group) as _));
    let board = Board::start(Arc::clone(&keep) as _, Some(dir.path()), open).unwrap();
    let load = spec(&["a"]);
    let begun = board.answer(&json!({"do": "submit", "spec": load, "after": 7})).unwrap();
    assert_eq!(begun["submission"], 8);
    assert_eq!(*keep.0.lock(), [load.subject()]);
    eventually("the end", || board.find(&load.id()).unwrap().unwrap().1.state.ended());
}
