//! A job that is broken off at any moment and gone on with by a process that has its record alone.

use super::*;
use crate::Part;
use crate::spec::Action;
use spurline_types::{Attr, DirEntry, FileKind, ListPage, Version};
use std::collections::BTreeMap;

const BLOCK: u64 = 100;
/// Names of a page.
const NAMES: usize = 3;

/// A source whose requests are counted; one of them takes the record of the job and ends it.
#[derive(Default)]
struct Source {
    files: BTreeMap<String, u64>,
    /// Pages that were listed, and the files that were asked for.
    pages: Mutex<Vec<(String, String)>>,
    asked: Mutex<BTreeMap<String, u32>>,
    requests: AtomicU64,
    breaks_at: u64,
    run: Option<Arc<Run>>,
    record: Mutex<Option<Checkpoint>>,
}

fn attr(kind: FileKind, size: u64) -> Attr {
    Attr { kind, size, mtime: std::time::UNIX_EPOCH, mode: 0o444, version: Version::new("v"), etag: None }
}

fn text(path: &[u8]) -> String {
    String::from_utf8(path.to_vec()).unwrap()
}

impl Source {
    fn of(files: &BTreeMap<String, u64>) -> Source {
        Source { files: files.clone(), ..Source::default() }
    }

    fn request(&self) {
        if let Some(run) = &self.run
            && self.requests.fetch_add(1, Ordering::Relaxed) + 1 == self.breaks_at
        {
            *self.record.lock() = Some(run.checkpoint());
            run.suspend();
        }
    }

    fn names(&self, folder: &str) -> BTreeMap<String, Attr> {
        let below = if folder.is_empty() { String::new() } else { format!("{folder}/") };
        let mut names = BTreeMap::new();
        for (file, size) in &self.files {
            let Some(rest) = file.strip_prefix(&below) else { continue };
            match rest.split_once('/') {
                Some((folder, _)) => names.insert(folder.to_owned(), attr(FileKind::Directory, 0)),
                None => names.insert(rest.to_owned(), attr(FileKind::File, *size)),
            };
        }
        names
    }
}

impl Target for Source {
    fn source(&self) -> &str {
        "mem://source"
    }
    fn block_size(&self) -> u64 {
        BLOCK
    }
    fn lookup(&self, path: &[u8]) -> Result<Attr> {
        self.request();
        let path = text(path);
        match self.files.get(&path) {
            Some(size) => Ok(attr(FileKind::File, *size)),
            None if path == "nowhere" => Err(Error::new(ErrorKind::NotFound, "not there")),
            None => Ok(attr(FileKind::Directory, 0)),
        }
    }
    fn list(&self, path: &[u8], cursor: Option<&[u8]>) -> Result<ListPage> {
        self.request();
        let (path, after) = (text(path), cursor.map(text).unwrap_or_default());
        self.pages.lock().push((path.clone(), after.clone()));
        if path.ends_with("closed") {
            return Err(Error::new(ErrorKind::PermissionDenied, "closed"));
        }
        let mut rest = self.names(&path).into_iter().filter(|(name, _)| *name > after);
        let page = rest.by_ref().take(NAMES).map(|(name, attr)| DirEntry { name: name.into_bytes(), attr });
        let entries: Vec<DirEntry> = page.collect();
        let next = rest.next().is_some().then(|| entries.last().unwrap().name.clone());
        Ok(ListPage { entries, next })
    }
    fn warm(&self, parts: &[Part], _: Option<u32>, _: usize) -> Vec<Result<Worked>> {
        self.request();
        let one = |part: &Part| {
            let path = text(&part.object.path);
            *self.asked.lock().entry(path.clone()).or_default() += 1;
            if path.ends_with("bad") {
                return Err(Error::new(ErrorKind::PermissionDenied, "bad"));
            }
            let blocks = part.blocks.clone();
            Ok(Worked { held: 0, moved: blocks.map(|block| part.object.block_len(block, BLOCK) as u64).sum() })
        };
        parts.iter().map(one).collect()
    }
    fn check(&self, parts: &[Part], _: Option<u32>) -> Vec<Result<Worked>> {
        let missing = |path: &str| path.ends_with("bad") || path.ends_with("lost");
        let one = |part: &Part| match missing(&text(&part.object.path)) {
            true => Err(Error::new(ErrorKind::NotFound, "not held")),
            false => Ok(Worked::default()),
        };
        parts.iter().map(one).collect()
    }
    fn free(&self, parts: &[Part]) -> Vec<Result<Worked>> {
        parts.iter().map(|_| Ok(Worked::default())).collect()
    }
}

/// Folders of several pages, with files before, between and behind folders, and names that stand otherwise with a `/`.
fn tree() -> BTreeMap<String, u64> {
    let mut files = BTreeMap::new();
    for top in ["a", "a-b", "m", "z"] {
        for n in 0..4 {
            files.insert(format!("{top}/{n}"), 30 + n);
            files.insert(format!("{top}/d{n}/x"), 1700);
            files.insert(format!("{top}/d{n}/y/deep{n}"), n);
        }
        files.insert(format!("{top}/ybad"), 5);
        files.insert(format!("{top}/closed/never"), 5);
    }
    files.insert("one".to_owned(), 7);
    files
}

fn spec(parallel: u32) -> Spec {
    Spec {
        action: Action::Load,
        source: "mem://source".into(),
        paths: ["a", "nowhere", "", "one"].map(str::to_owned).to_vec(),
        listed: false,
        include: Vec::new(),
        exclude: Vec::new(),
        metadata_only: false,
        verify: false,
        skip_if_exists: false,
        replicas: None,
        rate: 0,
        parallel,
    }
}

/// Works on the job until it ends or breaks at a request, and says how far it is and what its record has.
fn work(source: &mut Source, spec: &Spec, job: Arc<Run>) -> (Progress, Checkpoint) {
    let dir = tempfile::tempdir().unwrap();
    source.run = Some(Arc::clone(&job));
    run(source, spec, &job, &dir.path().join("files"), &mut |_| {});
    let record = source.record.lock().take();
    (job.progress(), record.unwrap_or_else(|| job.checkpoint()))
}

/// What another process gets of it, which does not have the list.
fn carried(record: &Checkpoint) -> Checkpoint {
    let mut record: Checkpoint = serde_json::from_str(&serde_json::to_string(record).unwrap()).unwrap();
    record.progress.listed = false;
    record
}

fn outcome(progress: &Progress) -> (State, Sums, Vec<Failed>) {
    let mut failed = progress.failed.clone();
    failed.sort_by(|a, b| a.path.cmp(&b.path));
    (progress.state, progress.sums(), failed)
}

#[test]
fn a_job_broken_off_at_any_request_ends_the_same_and_lists_nothing_before_its_record() {
    let files = tree();
    let mut whole = Source::of(&files);
    let spec = spec(2);
    let (want, _) = work(&mut whole, &spec, Run::new());
    assert_eq!((want.state, want.files_total, want.files_failed), (State::Failed, 67, 1 + 5 + 5), "{want:?}");
    let (requests, pages) = (whole.requests.into_inner(), whole.pages.into_inner());
    // How many files were found when each page had been listed.
    let mut found = 0;
    let files_by_page: Vec<u64> = pages
        .iter()
        .map(|(path, after)| {
            let names = Source::of(&files).names(path);
            let page = names.iter().filter(|(name, _)| *name > after).take(NAMES);
            let taken = page.filter(|(_, attr)| attr.kind == FileKind::File);
            found += if path.ends_with("closed") { 0 } else { taken.count() as u64 };
            found
        })
        .collect();
    let mut most_settled = 0;
    for breaks_at in 1..=requests {
        let mut first = Source { breaks_at, ..Source::of(&files) };
        let (_, record) = work(&mut first, &spec, Run::new());
        let settled = record.settled.sums.files;
        most_settled = most_settled.max(settled);
        assert!(serde_json::to_string(&record.settled).unwrap().len() < 1000);
        let mut second = Source::of(&files);
        let (progress, _) = work(&mut second, &spec, Run::resumed(carried(&record), &spec));
        assert_eq!(outcome(&progress), outcome(&want), "broken off at request {breaks_at}, record {record:?}");
        let before = files_by_page.iter().filter(|found| **found < settled).count();
        let listed = second.pages.into_inner().len();
        assert!(listed <= pages.len() - before + 4, "{listed} of {} pages, {before} were settled", pages.len());
        // Nothing is left out: each file was asked for by one or the other.
        let mut asked = first.asked.into_inner();
        asked.extend(second.asked.into_inner());
        let sized = files.iter().filter(|(path, size)| **size > 0 && !path.contains("closed"));
        assert!(sized.clone().all(|(path, _)| asked.contains_key(path)), "broken off at {breaks_at}: {asked:?}");
    }
    assert!(most_settled > 50, "at the last requests nearly all is done: {most_settled}");
}

#[test]
fn what_ended_just_before_is_neither_listed_nor_loaded_again() {
    let files = tree();
    let mut source = Source::of(&files);
    let (want, record) = work(&mut source, &spec(2), Run::new());
    let mut after = Source::of(&files);
    let (progress, _) = work(&mut after, &spec(2), Run::resumed(carried(&record), &spec(2)));
    assert_eq!(outcome(&progress), outcome(&want));
    assert_eq!((after.requests.into_inner(), progress.listed), (0, true));
    // To be read back it has to be listed as a whole.
    let verify = Spec { verify: true, ..spec(2) };
    let mut again = Source::of(&files);
    let (progress, _) = work(&mut again, &verify, Run::resumed(carried(&record), &verify));
    assert_eq!((outcome(&progress), progress.files_verified), (outcome(&want), want.files_done));
    assert!(again.pages.into_inner().len() > 20);
}

#[test]
fn a_record_taken_while_folders_change_misses_no_file_that_was_always_there() {
    let files = tree();
    let mut changed = files.clone();
    for top in ["a", "m"] {
        changed.remove(&format!("{top}/1"));
        changed.remove(&format!("{top}/d1/x"));
        changed.remove(&format!("{top}/d1/y/deep1"));
        changed.insert(format!("{top}/05"), 9);
        changed.insert(format!("{top}/d0x/new"), 9);
    }
    let mut whole = Source::of(&files);
    work(&mut whole, &spec(1), Run::new());
    for breaks_at in 1..=whole.requests.into_inner() {
        let mut first = Source { breaks_at, ..Source::of(&files) };
        let (_, record) = work(&mut first, &spec(1), Run::new());
        let mut second = Source::of(&changed);
        work(&mut second, &spec(1), Run::resumed(carried(&record), &spec(1)));
        let mut asked = first.asked.into_inner();
        asked.extend(second.asked.into_inner());
        let always =
            files.iter().filter(|(path, size)| **size > 0 && changed.contains_key(*path) && !path.contains("closed"));
        for (path, _) in always {
            assert!(asked.contains_key(path), "{path} was left out, broken off at {breaks_at}: {record:?}");
        }
    }
}

/// A source that has several requests under way on one thread, and looks how many there are in all.
#[derive(Default)]
struct Together {
    files: BTreeMap<String, u64>,
    under_way: AtomicUsize,
    most: AtomicUsize,
    batches: Mutex<Vec<(usize, Vec<u64>)>>,
    panics: AtomicBool,
    /// One file that fails twice as if it might go well later, and how many requests there were when it was asked for.
    throttled: &'static [u8],
    asked_with: Mutex<Vec<usize>>,
}

impl Target for Together {
    fn source(&self) -> &str {
        "mem://source"
    }
    fn block_size(&self) -> u64 {
        1 << 20
    }
    fn lookup(&self, path: &[u8]) -> Result<Attr> {
        Ok(self.files.get(&text(path)).map_or(attr(FileKind::Directory, 0), |size| attr(FileKind::File, *size)))
    }
    fn list(&self, _: &[u8], _: Option<&[u8]>) -> Result<ListPage> {
        let entry = |(name, size): (&String, &u64)| DirEntry {
            name: name.clone().into_bytes(),
            attr: attr(FileKind::File, *size),
        };
        Ok(ListPage { entries: self.files.iter().map(entry).collect(), next: None })
    }
    fn at_once(&self, _: usize) -> usize {
        8
    }
    fn warm(&self, parts: &[Part], _: Option<u32>, at_once: usize) -> Vec<Result<Worked>> {
        let now = self.under_way.fetch_add(at_once, Ordering::SeqCst) + at_once;
        self.most.fetch_max(now, Ordering::SeqCst);
        self.batches.lock().push((at_once, parts.iter().map(|part| part.object.size).collect()));
        std::thread::sleep(Duration::from_millis(1));
        self.under_way.fetch_sub(at_once, Ordering::SeqCst);
        assert!(!self.panics.swap(false, Ordering::SeqCst), "told to panic");
        let one = |part: &Part| {
            if *part.object.path == *self.throttled {
                let mut asked = self.asked_with.lock();
                asked.push(at_once);
                if asked.len() < 3 {
                    return Err(Error::new(ErrorKind::Throttled, "slower"));
                }
            }
            Ok(Worked { held: 0, moved: part.object.size })
        };
        parts.iter().map(one).collect()
    }
    fn check(&self, parts: &[Part], _: Option<u32>) -> Vec<Result<Worked>> {
        parts.iter().map(|_| Ok(Worked::default())).collect()
    }
    fn free(&self, parts: &[Part]) -> Vec<Result<Worked>> {
        parts.iter().map(|_| Ok(Worked::default())).collect()
    }
}

#[test]
fn short_files_are_asked_for_together_and_never_more_at_once_than_was_said() {
    // Long files among short ones, and behind them.
    let size = |n: u64| if n % 40 == 39 || n > 1150 { 3 << 20 } else { n };
    let files: BTreeMap<String, u64> = (0..1200).map(|n| (format!("f{n:05}"), size(n))).collect();
    for parallel in [1, 3, 8, 20, 50] {
        let source = Together { files: files.clone(), ..Together::default() };
        let (job, dir) = (Run::new(), tempfile::tempdir().unwrap());
        let all = Spec { paths: vec![String::new()], ..spec(parallel) };
        run(&source, &all, &job, &dir.path().join("spool"), &mut |_| {});
        let progress = job.progress();
        assert_eq!((progress.state, progress.files_done), (State::Succeeded, 1200), "{progress:?}");
        assert_eq!(progress.bytes_done, files.values().sum::<u64>());
        assert!(
            source.most.load(Ordering::SeqCst) <= parallel as usize,
            "{parallel}: {source_most:?}",
            source_most = source.most
        );
        for (at_once, sizes) in &*source.batches.lock() {
            let short = sizes.iter().all(|size| *size <= SHORT);
            assert_eq!(*at_once, if short { 8.min(parallel as usize) } else { 1 }, "{parallel}: {sizes:?}");
            assert!(short || sizes.iter().all(|size| *size > SHORT) || parallel == 1, "{sizes:?}");
        }
    }
}

#[test]
fn the_requests_of_a_thread_that_panicked_are_given_back() {
    let files: BTreeMap<String, u64> = (0..500).map(|n| (format!("f{n:05}"), 10)).collect();
    // All that the job may have under way is one thread's, or a third of it.
    for parallel in [8, 24] {
        let source = Together { files: files.clone(), panics: true.into(), ..Together::default() };
        let (job, dir) = (Run::new(), tempfile::tempdir().unwrap());
        let all = Spec { paths: vec![String::new()], ..spec(parallel) };
        run(&source, &all, &job, &dir.path().join("spool"), &mut |_| {});
        let progress = job.progress();
        assert_eq!(progress.state, State::Failed, "{progress:?}");
        assert!(progress.why.contains("panicked") && progress.files_done > 400, "{progress:?}");
    }
}

#[test]
fn a_file_fails_once_whether_loading_it_or_reading_it_back_and_however_often_the_job_goes_on() {
    let mut files = tree();
    files.insert("m/lost".to_owned(), 7);
    let spec = Spec { verify: true, ..spec(2) };
    let dir = tempfile::tempdir().unwrap();
    let list = dir.path().join("files");
    let mut job = Run::new();
    let mut ends = Vec::new();
    for _ in 0..3 {
        let source = Source::of(&files);
        run(&source, &spec, &job, &list, &mut |_| {});
        let progress = job.progress();
        let lost = progress.failed.iter().filter(|failed| failed.path == "m/lost").count();
        assert_eq!((lost, progress.files_failed), (1, 1 + 5 + 5 + 1), "{progress:?}");
        assert_eq!(progress.files_verified + 1, progress.files_done);
        ends.push((outcome(&progress), source.pages.into_inner().is_empty()));
        // As a record of the moment before it ended has it.
        let record = serde_json::from_str(&serde_json::to_string(&job.checkpoint()).unwrap()).unwrap();
        job = Run::resumed(record, &spec);
    }
    assert_eq!(ends.iter().map(|end| end.1).collect::<Vec<_>>(), [false, true, true], "the list is read again");
    assert!(ends.iter().all(|end| end.0 == ends[0].0), "{ends:?}");
}

#[test]
fn a_list_that_lost_its_end_is_no_success() {
    let files = BTreeMap::from(["a/1".to_owned(), "a/2".to_owned()].map(|name| (name, 10)));
    let source = Source::of(&files);
    let dir = tempfile::tempdir().unwrap();
    let list = dir.path().join("files");
    let (spec, job) = (Spec { paths: vec!["a".to_owned()], ..spec(1) }, Run::new());
    run(&source, &spec, &job, &list, &mut |_| {});
    assert_eq!(job.progress().state, State::Succeeded);
    assert_eq!(job.checkpoint().list_bytes, None);
    job.keep_list(&list);
    let mut record = Checkpoint { tally: Tally::default(), ..job.checkpoint() };
    (record.progress.files_done, record.progress.bytes_done) = (0, 0);
    let bytes = std::fs::read(&list).unwrap();
    assert_eq!(record.list_bytes, Some(bytes.len() as u64));
    std::fs::write(&list, &bytes[..bytes.len() / 2]).unwrap();
    let job = Run::resumed(record, &spec);
    run(&source, &spec, &job, &list, &mut |_| {});
    let progress = job.progress();
    assert!(progress.state == State::Failed && progress.why.contains("1 of 2 were not in it"), "{progress:?}");
}

#[test]
fn a_record_names_as_much_as_there_is_room_for() {
    let job = Run::new();
    {
        let mut inner = job.inner.lock();
        inner.list_bytes = Some(1);
        (0..1000).for_each(|n| inner.fail(format!("{n:0500}").as_bytes(), &"why ".repeat(400), n + 1));
        (0..RANGES as u64).for_each(|n| inner.tally.add(2 * n + 1));
    }
    let record = job.checkpoint();
    assert_eq!((record.tally.ranges(), record.list_bytes), (RANGES, Some(1)));
    let kept = crate::Kept { checkpoint: record, ..crate::Kept::new(spec(1)) };
    let (what, far) = kept.to_parts(usize::MAX).unwrap();
    assert!(far.len() > 2 << 20 && crate::Kept::from_parts(&what, &far).unwrap() == kept);
    let (_, far) = kept.to_parts(1 << 20).unwrap();
    let shorter = crate::Kept::from_parts(&what, &far).unwrap();
    let (progress, named) = (shorter.progress(), shorter.progress().failed.len());
    assert!(far.len() <= 1 << 20 && (300..1000).contains(&named), "{} bytes name {named}", far.len());
    assert_eq!((progress.files_failed, shorter.checkpoint.failed_by.len()), (1000, named));
    // So many pieces are found again faster than they are written every two seconds.
    job.inner.lock().undone.add(0);
    let record = job.checkpoint();
    assert_eq!((record.tally, record.undone, record.list_bytes), (Tally::default(), Numbers::default(), None));
}

#[test]
fn a_thread_that_waits_to_repeat_one_request_keeps_the_right_to_one() {
    let files: BTreeMap<String, u64> = (0..300).map(|n| (format!("f{n:05}"), 10)).collect();
    let source = Together { files, throttled: b"f00007", ..Together::default() };
    let (job, dir) = (Run::new(), tempfile::tempdir().unwrap());
    let all = Spec { paths: vec![String::new()], ..spec(8) };
    run(&source, &all, &job, &dir.path().join("spool"), &mut |_| {});
    let progress = job.progress();
    assert_eq!((progress.state, progress.files_done), (State::Succeeded, 300), "{progress:?}");
    assert_eq!(*source.asked_with.lock(), [8, 1, 1]);
    assert!(source.most.load(Ordering::SeqCst) <= 8, "{:?}", source.most);
}
