//! A job interrupted at any moment and resumed by a process that has only its record.

use super::*;
use crate::FilePart;
use crate::spec::JobAction;
use spurline_types::{DirEntry, FileKind, ListPage, ObjectAttr, Version};
use std::collections::BTreeMap;

const BLOCK: u64 = 100;
/// Names of a page.
const NAMES: usize = 3;

/// A source that counts its requests; at a chosen request the source saves the job's record and stops the job.
#[derive(Default)]
struct ScriptedSource {
    files: BTreeMap<String, u64>,
    /// Pages listed and files requested.
    pages: Mutex<Vec<(String, String)>>,
    asked: Mutex<BTreeMap<String, u32>>,
    requests: AtomicU64,
    breaks_at: u64,
    run: Option<Arc<JobRun>>,
    record: Mutex<Option<JobCheckpoint>>,
}

fn attr(kind: FileKind, size: u64) -> ObjectAttr {
    ObjectAttr { kind, size, mtime: std::time::UNIX_EPOCH, mode: 0o444, version: Version::new("v"), etag: None }
}

fn text(path: &[u8]) -> String {
    String::from_utf8(path.to_vec()).unwrap()
}

impl ScriptedSource {
    fn of(files: &BTreeMap<String, u64>) -> ScriptedSource {
        ScriptedSource { files: files.clone(), ..ScriptedSource::default() }
    }

    fn request(&self) {
        if let Some(run) = &self.run
            && self.requests.fetch_add(1, Ordering::Relaxed) + 1 == self.breaks_at
        {
            *self.record.lock() = Some(run.checkpoint());
            run.suspend();
        }
    }

    fn names(&self, folder: &str) -> BTreeMap<String, ObjectAttr> {
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

impl JobTarget for ScriptedSource {
    fn source(&self) -> &str {
        "mem://source"
    }
    fn block_size(&self) -> u64 {
        BLOCK
    }
    fn lookup(&self, path: &[u8]) -> Result<ObjectAttr> {
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
        let path = text(path);
        let after = cursor.map(text).unwrap_or_default();
        self.pages.lock().push((path.clone(), after.clone()));
        if path.ends_with("closed") {
            return Err(Error::new(ErrorKind::PermissionDenied, "closed"));
        }
        let mut rest = self.names(&path).into_iter().filter(|(name, _)| *name > after);
        let page = rest.by_ref().take(NAMES).map(|(name, attr)| DirEntry { name: name.into_bytes(), attr });
        let entries: Vec<DirEntry> = page.collect();
        let repeated = cursor.filter(|_| path.ends_with("stuck")).map(<[u8]>::to_vec);
        let next = rest.next().is_some().then(|| entries.last().unwrap().name.clone());
        Ok(ListPage { entries, next: repeated.or(next), marker: None })
    }
    fn warm_parts(&self, parts: &[FilePart], _: Option<u32>, _: usize) -> Vec<Result<WorkDone>> {
        self.request();
        parts
            .iter()
            .map(|part| {
                let path = text(&part.object.path);
                *self.asked.lock().entry(path.clone()).or_default() += 1;
                if path.ends_with("bad") {
                    return Err(Error::new(ErrorKind::PermissionDenied, "bad"));
                }
                let blocks = part.blocks.clone();
                Ok(WorkDone { held: 0, moved: blocks.map(|block| part.object.block_len(block, BLOCK) as u64).sum() })
            })
            .collect()
    }
    fn check_parts(&self, parts: &[FilePart], _: Option<u32>) -> Vec<Result<WorkDone>> {
        let missing = |path: &str| path.ends_with("bad") || path.ends_with("lost");
        parts
            .iter()
            .map(|part| {
                if missing(&text(&part.object.path)) {
                    Err(Error::new(ErrorKind::NotFound, "not held"))
                } else {
                    Ok(WorkDone::default())
                }
            })
            .collect()
    }
    fn free_parts(&self, parts: &[FilePart], _: bool) -> Vec<Result<WorkDone>> {
        parts.iter().map(|_| Ok(WorkDone::default())).collect()
    }
    fn free_all(&self, _: bool, _: bool) -> (WorkDone, Option<Error>) {
        (WorkDone::default(), None)
    }
}

/// Folders of several pages, with files before, between and after folders, and names that sort differently with a
/// `/`.
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

fn spec(parallel: u32) -> JobSpec {
    JobSpec {
        action: JobAction::Load,
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
        with_pinned: false,
        everything: false,
        parallel,
    }
}

/// Runs the job until it ends or stops at a request; returns its progress and record.
fn work(source: &mut ScriptedSource, spec: &JobSpec, job: Arc<JobRun>) -> (JobProgress, JobCheckpoint) {
    let dir = tempfile::tempdir().unwrap();
    source.run = Some(Arc::clone(&job));
    run_job(source, spec, &job, &dir.path().join("files"), &mut |_| {});
    let record = source.record.lock().take();
    (job.progress(), record.unwrap_or_else(|| job.checkpoint()))
}

/// The record as another process reads it, without the file list.
fn carried(record: &JobCheckpoint) -> JobCheckpoint {
    let mut record: JobCheckpoint = serde_json::from_str(&serde_json::to_string(record).unwrap()).unwrap();
    record.progress.listed = false;
    record
}

fn outcome(progress: &JobProgress) -> (JobState, FileCounts, Vec<FailedFile>) {
    let mut failed = progress.failed.clone();
    failed.sort_by(|a, b| a.path.cmp(&b.path));
    (progress.state, progress.file_counts(), failed)
}

#[test]
fn a_job_broken_off_at_any_request_ends_the_same_and_lists_nothing_before_its_record() {
    let files = tree();
    let mut whole = ScriptedSource::of(&files);
    let spec = spec(2);
    let (want, _) = work(&mut whole, &spec, JobRun::new());
    assert_eq!((want.state, want.files_total, want.files_failed), (JobState::Failed, 67, 1 + 5 + 5), "{want:?}");
    let requests = whole.requests.into_inner();
    let pages = whole.pages.into_inner();
    // Number of files found after each page.
    let mut found = 0;
    let files_by_page: Vec<u64> = pages
        .iter()
        .map(|(path, after)| {
            let names = ScriptedSource::of(&files).names(path);
            let page = names.iter().filter(|(name, _)| *name > after).take(NAMES);
            let taken = page.filter(|(_, attr)| attr.kind == FileKind::File);
            found += if path.ends_with("closed") { 0 } else { taken.count() as u64 };
            found
        })
        .collect();
    let mut most_settled = 0;
    for breaks_at in 1..=requests {
        let mut first = ScriptedSource { breaks_at, ..ScriptedSource::of(&files) };
        let (_, record) = work(&mut first, &spec, JobRun::new());
        let settled = record.settled.sums.files;
        most_settled = most_settled.max(settled);
        assert!(serde_json::to_string(&record.settled).unwrap().len() < 1000);
        let mut second = ScriptedSource::of(&files);
        let (progress, _) = work(&mut second, &spec, JobRun::resume_from(carried(&record), &spec));
        assert_eq!(outcome(&progress), outcome(&want), "interrupted at request {breaks_at}, record {record:?}");
        let before = files_by_page.iter().filter(|found| **found < settled).count();
        let listed = second.pages.into_inner().len();
        assert!(listed <= pages.len() - before + 4, "{listed} of {} pages, {before} were settled", pages.len());
        // No file is left out: each was requested by the first or the second.
        let mut asked = first.asked.into_inner();
        asked.extend(second.asked.into_inner());
        let sized = files.iter().filter(|(path, size)| **size > 0 && !path.contains("closed"));
        assert!(sized.clone().all(|(path, _)| asked.contains_key(path)), "interrupted at {breaks_at}: {asked:?}");
    }
    assert!(most_settled > 50, "at the last requests nearly all is done: {most_settled}");
}

#[test]
fn what_ended_just_before_is_neither_listed_nor_loaded_again() {
    let files = tree();
    let mut source = ScriptedSource::of(&files);
    let (want, record) = work(&mut source, &spec(2), JobRun::new());
    let mut after = ScriptedSource::of(&files);
    let (progress, _) = work(&mut after, &spec(2), JobRun::resume_from(carried(&record), &spec(2)));
    assert_eq!(outcome(&progress), outcome(&want));
    assert_eq!((after.requests.into_inner(), progress.listed), (0, true));
    // Reading back needs the full list.
    let verify = JobSpec { verify: true, ..spec(2) };
    let mut again = ScriptedSource::of(&files);
    let (progress, _) = work(&mut again, &verify, JobRun::resume_from(carried(&record), &verify));
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
    let mut whole = ScriptedSource::of(&files);
    work(&mut whole, &spec(1), JobRun::new());
    for breaks_at in 1..=whole.requests.into_inner() {
        let mut first = ScriptedSource { breaks_at, ..ScriptedSource::of(&files) };
        let (_, record) = work(&mut first, &spec(1), JobRun::new());
        let mut second = ScriptedSource::of(&changed);
        work(&mut second, &spec(1), JobRun::resume_from(carried(&record), &spec(1)));
        let mut asked = first.asked.into_inner();
        asked.extend(second.asked.into_inner());
        let always =
            files.iter().filter(|(path, size)| **size > 0 && changed.contains_key(*path) && !path.contains("closed"));
        for (path, _) in always {
            assert!(asked.contains_key(path), "{path} was left out, interrupted at {breaks_at}: {record:?}");
        }
    }
}

/// A source that counts parallel requests.
#[derive(Default)]
struct BatchingTarget {
    files: BTreeMap<String, u64>,
    under_way: AtomicUsize,
    most: AtomicUsize,
    batches: Mutex<Vec<(usize, Vec<u64>)>>,
    panics: AtomicBool,
    /// A file that fails twice with a transient error, and the requests in flight at each attempt.
    throttled: &'static [u8],
    asked_with: Mutex<Vec<usize>>,
}

impl JobTarget for BatchingTarget {
    fn source(&self) -> &str {
        "mem://source"
    }
    fn block_size(&self) -> u64 {
        1 << 20
    }
    fn lookup(&self, path: &[u8]) -> Result<ObjectAttr> {
        Ok(self.files.get(&text(path)).map_or(attr(FileKind::Directory, 0), |size| attr(FileKind::File, *size)))
    }
    fn list(&self, _: &[u8], _: Option<&[u8]>) -> Result<ListPage> {
        Ok(ListPage {
            entries: self
                .files
                .iter()
                .map(|(name, size)| DirEntry { name: name.clone().into_bytes(), attr: attr(FileKind::File, *size) })
                .collect(),
            ..ListPage::default()
        })
    }
    fn parallel_short(&self, _: usize) -> usize {
        8
    }
    fn warm_parts(&self, parts: &[FilePart], _: Option<u32>, at_once: usize) -> Vec<Result<WorkDone>> {
        let now = self.under_way.fetch_add(at_once, Ordering::SeqCst) + at_once;
        self.most.fetch_max(now, Ordering::SeqCst);
        self.batches.lock().push((at_once, parts.iter().map(|part| part.object.size).collect()));
        std::thread::sleep(Duration::from_millis(1));
        self.under_way.fetch_sub(at_once, Ordering::SeqCst);
        assert!(!self.panics.swap(false, Ordering::SeqCst), "told to panic");
        parts
            .iter()
            .map(|part| {
                if *part.object.path == *self.throttled {
                    let mut asked = self.asked_with.lock();
                    asked.push(at_once);
                    if asked.len() < 3 {
                        return Err(Error::new(ErrorKind::Throttled, "slower"));
                    }
                }
                Ok(WorkDone { held: 0, moved: part.object.size })
            })
            .collect()
    }
    fn check_parts(&self, parts: &[FilePart], _: Option<u32>) -> Vec<Result<WorkDone>> {
        parts.iter().map(|_| Ok(WorkDone::default())).collect()
    }
    fn free_parts(&self, parts: &[FilePart], _: bool) -> Vec<Result<WorkDone>> {
        parts.iter().map(|_| Ok(WorkDone::default())).collect()
    }
    fn free_all(&self, _: bool, _: bool) -> (WorkDone, Option<Error>) {
        (WorkDone::default(), None)
    }
}

#[test]
fn short_files_are_asked_for_together_and_never_more_at_once_than_was_said() {
    // Long files among short files, and behind.
    let files: BTreeMap<String, u64> = (0..1200).map(|n| (format!("f{n:05}"), long_or_short(n))).collect();
    for parallel in [1, 3, 8, 20, 50] {
        let source = BatchingTarget { files: files.clone(), ..BatchingTarget::default() };
        let job = JobRun::new();
        let dir = tempfile::tempdir().unwrap();
        let all = JobSpec { paths: vec![String::new()], ..spec(parallel) };
        run_job(&source, &all, &job, &dir.path().join("spool"), &mut |_| {});
        let progress = job.progress();
        assert_eq!((progress.state, progress.files_done), (JobState::Succeeded, 1200), "{progress:?}");
        assert_eq!(progress.bytes_done, files.values().sum::<u64>());
        assert!(
            source.most.load(Ordering::SeqCst) <= parallel as usize,
            "{parallel}: {source_most:?}",
            source_most = source.most
        );
        for (at_once, sizes) in &*source.batches.lock() {
            let short = sizes.iter().all(|long_or_short| *long_or_short <= SHORT);
            assert_eq!(*at_once, if short { 8.min(parallel as usize) } else { 1 }, "{parallel}: {sizes:?}");
            assert!(short || sizes.iter().all(|long_or_short| *long_or_short > SHORT) || parallel == 1, "{sizes:?}");
        }
    }
}

fn long_or_short(n: u64) -> u64 {
    if n % 40 == 39 || n > 1150 { 3 << 20 } else { n }
}

#[test]
fn the_requests_of_a_thread_that_panicked_are_given_back() {
    let files: BTreeMap<String, u64> = (0..500).map(|n| (format!("f{n:05}"), 10)).collect();
    // All permits of the job belong to a single thread, or a third of the permits.
    for parallel in [8, 24] {
        let source = BatchingTarget { files: files.clone(), panics: true.into(), ..BatchingTarget::default() };
        let job = JobRun::new();
        let dir = tempfile::tempdir().unwrap();
        let all = JobSpec { paths: vec![String::new()], ..spec(parallel) };
        run_job(&source, &all, &job, &dir.path().join("spool"), &mut |_| {});
        let progress = job.progress();
        assert_eq!(progress.state, JobState::Failed, "{progress:?}");
        assert!(progress.why.contains("panicked") && progress.files_done > 400, "{progress:?}");
    }
}

#[test]
fn a_file_fails_once_whether_loading_it_or_reading_it_back_and_however_often_the_job_goes_on() {
    let mut files = tree();
    files.insert("m/lost".to_owned(), 7);
    let spec = JobSpec { verify: true, ..spec(2) };
    let dir = tempfile::tempdir().unwrap();
    let list = dir.path().join("files");
    let mut job = JobRun::new();
    let mut ends = Vec::new();
    for _ in 0..3 {
        let source = ScriptedSource::of(&files);
        run_job(&source, &spec, &job, &list, &mut |_| {});
        let progress = job.progress();
        let lost = progress.failed.iter().filter(|failed| failed.path == "m/lost").count();
        assert_eq!((lost, progress.files_failed), (1, 1 + 5 + 5 + 1), "{progress:?}");
        assert_eq!(progress.files_verified + 1, progress.files_done);
        ends.push((outcome(&progress), source.pages.into_inner().is_empty()));
        // As in a record saved just before the end.
        let record = serde_json::from_str(&serde_json::to_string(&job.checkpoint()).unwrap()).unwrap();
        job = JobRun::resume_from(record, &spec);
    }
    assert_eq!(ends.iter().map(|end| end.1).collect::<Vec<_>>(), [false, true, true], "the list is read again");
    assert!(ends.iter().all(|end| end.0 == ends[0].0), "{ends:?}");
}

/// The names behind the page are unknown: a load without them is no success.
#[test]
fn a_folder_whose_listing_repeats_a_cursor_fails_once_however_often_the_job_goes_on() {
    let mut files: BTreeMap<String, u64> = (0..=NAMES).map(|n| (format!("a/stuck/{n}"), 10)).collect();
    files.insert("a/stuck/9/inside".to_owned(), 10);
    files.insert("a/z".to_owned(), 10);
    let spec = JobSpec { paths: vec!["a".to_owned()], ..spec(1) };
    let mut whole = ScriptedSource::of(&files);
    let (want, _) = work(&mut whole, &spec, JobRun::new());
    assert_eq!((want.state, want.files_total, want.files_failed), (JobState::Failed, 6, 1), "{want:?}");
    let failed = &want.failed[0];
    assert!(failed.path == "a/stuck" && failed.reason.contains("cursor of this page"), "{failed:?}");
    for breaks_at in 1..=whole.requests.into_inner() {
        let mut first = ScriptedSource { breaks_at, ..ScriptedSource::of(&files) };
        let (_, record) = work(&mut first, &spec, JobRun::new());
        let mut second = ScriptedSource::of(&files);
        let (progress, _) = work(&mut second, &spec, JobRun::resume_from(carried(&record), &spec));
        assert_eq!(outcome(&progress), outcome(&want), "interrupted at request {breaks_at}, record {record:?}");
    }
}

#[test]
fn a_list_that_lost_its_end_is_no_success() {
    let files = BTreeMap::from(["a/1".to_owned(), "a/2".to_owned()].map(|name| (name, 10)));
    let source = ScriptedSource::of(&files);
    let dir = tempfile::tempdir().unwrap();
    let list = dir.path().join("files");
    let spec = JobSpec { paths: vec!["a".to_owned()], ..spec(1) };
    let job = JobRun::new();
    run_job(&source, &spec, &job, &list, &mut |_| {});
    assert_eq!(job.progress().state, JobState::Succeeded);
    assert_eq!(job.checkpoint().list_bytes, None);
    job.keep_list(&list);
    let mut record = JobCheckpoint { tally: CompletedRanges::default(), ..job.checkpoint() };
    (record.progress.files_done, record.progress.bytes_done) = (0, 0);
    let bytes = std::fs::read(&list).unwrap();
    assert_eq!(record.list_bytes, Some(bytes.len() as u64));
    std::fs::write(&list, &bytes[..bytes.len() / 2]).unwrap();
    let job = JobRun::resume_from(record, &spec);
    run_job(&source, &spec, &job, &list, &mut |_| {});
    let progress = job.progress();
    assert!(progress.state == JobState::Failed && progress.why.contains("1 of 2 are missing"), "{progress:?}");
}

#[test]
fn a_record_names_as_much_as_there_is_room_for() {
    let job = JobRun::new();
    {
        let mut inner = job.inner.lock();
        inner.list_bytes = Some(1);
        (0..1000).for_each(|n| inner.note_failed(format!("{n:0500}").as_bytes(), &"why ".repeat(400), n + 1));
        (0..RANGES as u64).for_each(|n| inner.tally.add(2 * n + 1));
    }
    let record = job.checkpoint();
    assert_eq!((record.tally.range_count(), record.list_bytes), (RANGES, Some(1)));
    let kept = crate::JobRecord { checkpoint: record, ..crate::JobRecord::new(spec(1)) };
    let (what, far) = kept.to_parts(usize::MAX).unwrap();
    assert!(far.len() > 2 << 20 && crate::JobRecord::from_parts(&what, &far).unwrap() == kept);
    let (_, far) = kept.to_parts(1 << 20).unwrap();
    let shorter = crate::JobRecord::from_parts(&what, &far).unwrap();
    let progress = shorter.progress();
    let named = shorter.progress().failed.len();
    assert!(far.len() <= 1 << 20 && (300..1000).contains(&named), "{} bytes name {named}", far.len());
    assert_eq!((progress.files_failed, shorter.checkpoint.failed_by.len()), (1000, named));
    // With this many ranges, a new walk is faster than saving them every two seconds.
    job.inner.lock().undone.add(0);
    let record = job.checkpoint();
    assert_eq!(
        (record.tally, record.undone, record.list_bytes),
        (CompletedRanges::default(), NumberRanges::default(), None)
    );
}

#[test]
fn a_thread_that_waits_to_repeat_one_request_keeps_the_right_to_one() {
    let files: BTreeMap<String, u64> = (0..300).map(|n| (format!("f{n:05}"), 10)).collect();
    let source = BatchingTarget { files, throttled: b"f00007", ..BatchingTarget::default() };
    let job = JobRun::new();
    let dir = tempfile::tempdir().unwrap();
    let all = JobSpec { paths: vec![String::new()], ..spec(8) };
    run_job(&source, &all, &job, &dir.path().join("spool"), &mut |_| {});
    let progress = job.progress();
    assert_eq!((progress.state, progress.files_done), (JobState::Succeeded, 300), "{progress:?}");
    assert_eq!(*source.asked_with.lock(), [8, 1, 1]);
    assert!(source.most.load(Ordering::SeqCst) <= 8, "{:?}", source.most);
}
