//! The metadata cache over a directory, with the faults of `FaultyUnder` between.

use crate::common;
use common::{read_until, soon};
use spurline_object_store::{OriginOptions, SharedBuckets};
use spurline_origin::faulty::{FaultTarget, FaultyOrigin, OriginFault};
use spurline_origin::{CachedOrigin, MetadataConfig, OriginCapabilities, OriginCapacity, OriginStore, open};
use spurline_types::{ByteSink, ErrorKind, ListPage, ObjectAttr, ObjectRef, Result, Stats};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

struct Rig {
    dir: tempfile::TempDir,
    faulty: Arc<FaultyOrigin>,
    cached: CachedOrigin,
    stats: Arc<Stats>,
}

fn rig(ttl: Duration, max_entries: usize) -> Rig {
    let dir = tempfile::tempdir().unwrap();
    let stats = Arc::new(Stats::default());
    let inner = open(dir.path().to_str().unwrap(), &OriginOptions::default(), Arc::clone(&stats)).unwrap();
    let faulty = Arc::new(FaultyOrigin::new(inner));
    let config = MetadataConfig { ttl, negative_ttl: ttl, max_entries, ..MetadataConfig::default() };
    let cached = CachedOrigin::new(faulty.clone(), config, Arc::clone(&stats));
    Rig { dir, faulty, cached, stats }
}

const LONG: Duration = Duration::from_secs(3600);

#[test]
fn many_lookups_become_one_listing() {
    let rig = rig(LONG, 100_000);
    for i in 0..3000 {
        std::fs::write(rig.dir.path().join(format!("f{i:04}")), [b'x'; 3]).unwrap();
    }
    std::thread::scope(|scope| {
        for t in 0..8 {
            let rig = &rig;
            scope.spawn(move || {
                for i in (t..3000).step_by(8) {
                    let attr = rig.cached.lookup(format!("f{i:04}").as_bytes(), soon()).unwrap();
                    assert_eq!(attr.size, 3);
                }
            });
        }
    });
    assert!(rig.faulty.lookups() <= 100, "{} lookups", rig.faulty.lookups());
    assert_eq!(rig.faulty.lists(), 3);
    // The directory is known whole: an absent name costs nothing.
    let before = rig.faulty.lookups();
    assert_eq!(rig.cached.lookup(b"absent", soon()).unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(rig.faulty.lookups(), before);
    assert!(rig.stats.metadata.cache_hits.get() > 2000);
    // And so is its listing, in the pages it was read.
    assert_eq!(rig.cached.list(b"", None, 1000, soon()).unwrap().entries.len(), 1000);
    assert_eq!(rig.faulty.lists(), 3);
}

#[test]
fn a_reader_that_goes_through_a_large_directory_lists_its_pages_again() {
    let rig = rig(Duration::from_secs(1), 16_000);
    let names: Vec<String> = (0..7000).map(|i| format!("f{i:04}")).collect();
    for name in &names {
        std::fs::write(rig.dir.path().join(name), [b'x'; 3]).unwrap();
    }
    let mut listed = Vec::new();
    let mut cursor = None;
    loop {
        let page = rig.cached.list(b"", cursor.as_deref(), 1000, soon()).unwrap();
        listed.extend(page.entries.into_iter().map(|entry| entry.name));
        cursor = page.next;
        if cursor.is_none() {
            break;
        }
    }
    std::thread::sleep(Duration::from_millis(1100));
    std::fs::write(rig.dir.path().join("f6999"), [b'y'; 5]).unwrap();
    for name in &listed {
        let size = if name == b"f6999" { 5 } else { 3 };
        assert_eq!(rig.cached.lookup(name, soon()).unwrap().size, size);
    }
    assert_eq!(listed.len(), names.len());
    assert!(rig.faulty.lookups() <= 3500, "{} lookups", rig.faulty.lookups());
    assert_eq!(rig.cached.lookup(b"absent", soon()).unwrap_err().kind(), ErrorKind::NotFound);
}

#[test]
fn equal_questions_at_once_are_asked_once() {
    let rig = rig(Duration::ZERO, 1000);
    std::fs::write(rig.dir.path().join("f"), b"x").unwrap();
    rig.faulty.set_latency(Duration::from_millis(300));
    let barrier = std::sync::Barrier::new(16);
    std::thread::scope(|scope| {
        for _ in 0..16 {
            scope.spawn(|| {
                barrier.wait();
                rig.cached.lookup(b"f", soon()).unwrap();
                rig.cached.list(b"", None, 10, soon()).unwrap();
            });
        }
    });
    assert!(rig.faulty.lookups() < 8, "{}", rig.faulty.lookups());
    assert!(rig.faulty.lists() < 8, "{}", rig.faulty.lists());
}

#[test]
fn what_is_held_grows_old_and_is_bounded() {
    let rig = rig(Duration::from_millis(100), 500);
    std::fs::write(rig.dir.path().join("f"), b"x").unwrap();
    assert_eq!(rig.cached.lookup(b"f", soon()).unwrap().size, 1);
    assert!(rig.cached.lookup(b"new", soon()).is_err());
    std::fs::write(rig.dir.path().join("f"), b"xyz").unwrap();
    std::fs::write(rig.dir.path().join("new"), b"").unwrap();
    std::thread::sleep(Duration::from_millis(120));
    assert_eq!(rig.cached.lookup(b"f", soon()).unwrap().size, 3);
    assert!(rig.cached.lookup(b"new", soon()).is_ok());
    for i in 0..2000 {
        let _ = rig.cached.lookup(format!("absent{i}/x").as_bytes(), soon());
        assert!(rig.cached.held_names() <= 501, "{}", rig.cached.held_names());
    }
}

#[test]
fn a_stale_read_forgets_the_attributes() {
    let rig = rig(LONG, 1000);
    std::fs::write(rig.dir.path().join("f"), b"old").unwrap();
    let attr = rig.cached.lookup(b"f", soon()).unwrap();
    let object = spurline_types::ObjectRef::new(rig.cached.source_url(), b"f", attr.version.clone(), attr.size);
    std::fs::write(rig.dir.path().join("f"), b"newer").unwrap();
    assert_eq!(rig.cached.lookup(b"f", soon()).unwrap().size, 3, "held");
    let error = read_until(&rig.cached, &object, 3, soon()).0.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Stale);
    assert_eq!(rig.cached.lookup(b"f", soon()).unwrap().size, 5);
}

#[test]
fn failures_are_not_held_and_waiting_ends_at_the_deadline() {
    let rig = rig(LONG, 1000);
    std::fs::write(rig.dir.path().join("f"), b"x").unwrap();
    rig.faulty.inject(FaultTarget::Lookup, OriginFault::Fail(ErrorKind::Unavailable), 1);
    assert_eq!(rig.cached.lookup(b"f", soon()).unwrap_err().kind(), ErrorKind::Unavailable);
    assert!(rig.cached.lookup(b"f", soon()).is_ok());
    rig.faulty.inject(FaultTarget::Lookup, OriginFault::Stall(Duration::from_secs(3)), 1);
    std::thread::scope(|scope| {
        scope.spawn(|| rig.cached.lookup(b"g", soon()));
        std::thread::sleep(Duration::from_millis(100));
        let error = rig.cached.lookup(b"g", Instant::now() + Duration::from_millis(50)).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Timeout | ErrorKind::NotFound), "{error}");
    });
    // A listing that fails leaves the lookups to themselves.
    rig.faulty.inject(FaultTarget::List, OriginFault::Fail(ErrorKind::Throttled), 1000);
    for i in 0..50 {
        std::fs::write(rig.dir.path().join(format!("x{i}")), b"").unwrap();
        rig.cached.lookup(format!("x{i}").as_bytes(), soon()).unwrap();
    }
}

#[test]
fn askers_whose_time_is_up_together_hold_nobody() {
    let rig = rig(LONG, 1000);
    rig.faulty.inject(FaultTarget::Any, OriginFault::Stall(LONG), u64::MAX);
    let cached = Arc::new(rig.cached);
    let (told, hears) = std::sync::mpsc::channel();
    for round in 0..10 {
        let deadline = Instant::now() + Duration::from_millis(100);
        for n in 0..100 {
            let (cached, told) = (Arc::clone(&cached), told.clone());
            std::thread::spawn(move || {
                let lookup = cached.lookup(format!("{round}-{}", n % 20).as_bytes(), deadline).map(drop);
                let list = cached.list(format!("{round}-{}", n % 20).as_bytes(), None, 10, deadline).map(drop);
                let _ = told.send([lookup, list]);
            });
        }
    }
    for _ in 0..1000 {
        for answer in hears.recv_timeout(Duration::from_secs(60)).expect("all end at their deadline") {
            assert_eq!(answer.unwrap_err().kind(), ErrorKind::Timeout);
        }
    }
}

#[test]
fn a_listing_without_an_answer_leaves_time_for_the_lookup_and_is_not_made_again() {
    let rig = rig(LONG, 100_000);
    rig.faulty.inject(FaultTarget::List, OriginFault::Stall(LONG), 1000);
    for i in 0..40 {
        std::fs::write(rig.dir.path().join(format!("f{i}")), b"x").unwrap();
        assert_eq!(rig.cached.lookup(format!("f{i}").as_bytes(), soon()).unwrap().size, 1);
    }
    assert_eq!(rig.faulty.lists(), 1);
}

#[test]
fn a_listing_that_takes_longer_than_answers_count_is_not_made_again() {
    let rig = rig(Duration::from_millis(300), 100_000);
    rig.faulty.inject(FaultTarget::List, OriginFault::Stall(Duration::from_millis(200)), 1000);
    for i in 0..3000 {
        std::fs::write(rig.dir.path().join(format!("f{i:04}")), b"x").unwrap();
    }
    for i in 0..200 {
        assert_eq!(rig.cached.lookup(format!("f{i:04}").as_bytes(), soon()).unwrap().size, 1);
    }
    assert!(rig.faulty.lists() <= 2, "{}", rig.faulty.lists());
}

#[test]
fn names_that_find_no_room_are_not_absent() {
    // Of the one listing that answers the lookups half has to be dropped at once.
    let rig = rig(LONG, 500);
    for i in 0..300 {
        std::fs::write(rig.dir.path().join(format!("f{i}")), b"x").unwrap();
    }
    for i in 0..300 {
        assert_eq!(rig.cached.lookup(format!("f{i}").as_bytes(), soon()).unwrap().size, 1);
    }
    assert!(rig.faulty.lists() > 0);
}

#[test]
fn a_directory_is_known_whole_for_as_long_as_its_oldest_page_counts() {
    let rig = rig(Duration::from_secs(3), 1000);
    std::fs::write(rig.dir.path().join("f"), b"x").unwrap();
    // The page that the listing for lookups will find held.
    rig.cached.list(b"", None, 1000, soon()).unwrap();
    std::thread::sleep(Duration::from_secs(2));
    std::fs::write(rig.dir.path().join("new"), b"x").unwrap();
    for i in 0..20 {
        let _ = rig.cached.lookup(format!("absent{i}").as_bytes(), soon());
    }
    std::thread::sleep(Duration::from_millis(1500));
    assert!(rig.cached.lookup(b"new", soon()).is_ok(), "nothing is held of so long ago");
}

#[test]
fn several_hold_one_number_of_names_together_and_those_that_nobody_uses_make_room() {
    for (ttl, left) in [(LONG, 120), (Duration::from_millis(50), 0)] {
        let in_common = SharedBuckets::default();
        let hold = |_| {
            let dir = tempfile::tempdir().unwrap();
            (0..60).for_each(|i| std::fs::write(dir.path().join(format!("f{i}")), "x").unwrap());
            let stats = Arc::new(Stats::default());
            let inner = open(dir.path().to_str().unwrap(), &OriginOptions::default(), Arc::clone(&stats)).unwrap();
            let config = MetadataConfig { ttl, negative_ttl: ttl, max_entries: 200, ..MetadataConfig::default() };
            (CachedOrigin::with_shared(&in_common, inner, config, stats), dir)
        };
        let [(unused, _a), (used, _b)] = [0, 1].map(hold);
        let list_all =
            |cached: &CachedOrigin| assert_eq!(cached.list(b"", None, 1000, soon()).unwrap().entries.len(), 60);
        list_all(&unused);
        std::thread::sleep(Duration::from_millis(60));
        list_all(&used);
        // A name of a page counts twice.
        assert_eq!(unused.held_names(), left, "{ttl:?}");
        assert!(unused.held_names() + used.held_names() <= 200, "{ttl:?}: {}", used.held_names());
    }
}

/// Whose answers to lookups and listings are of the moment of the question and come once they are let through.
struct Late {
    inner: Arc<dyn OriginStore>,
    asked: AtomicUsize,
    gate: Mutex<mpsc::Receiver<()>>,
}

impl Late {
    fn wait(&self) {
        self.asked.fetch_add(1, Ordering::SeqCst);
        // Open for good when the other end is gone.
        let _ = self.gate.lock().unwrap().recv();
    }
}

impl OriginStore for Late {
    fn source_url(&self) -> &str {
        self.inner.source_url()
    }
    fn describe(&self) -> String {
        self.inner.describe()
    }
    fn capabilities(&self) -> OriginCapabilities {
        self.inner.capabilities()
    }
    fn check(&self, deadline: Instant) -> Result<()> {
        self.inner.check(deadline)
    }
    fn lookup(&self, path: &[u8], deadline: Instant) -> Result<ObjectAttr> {
        let answer = self.inner.lookup(path, deadline);
        self.wait();
        answer
    }
    fn list(&self, path: &[u8], cursor: Option<&[u8]>, max: usize, deadline: Instant) -> Result<ListPage> {
        let answer = self.inner.list(path, cursor, max, deadline);
        self.wait();
        answer
    }
    fn readlink(&self, path: &[u8], deadline: Instant) -> Result<Vec<u8>> {
        self.inner.readlink(path, deadline)
    }
    fn read(&self, object: &ObjectRef, offset: u64, sink: &mut dyn ByteSink, deadline: Instant) -> Result<()> {
        self.inner.read(object, offset, sink, deadline)
    }
    fn statfs(&self, deadline: Instant) -> Result<Option<OriginCapacity>> {
        self.inner.statfs(deadline)
    }
}

#[test]
fn who_asks_every_time_gets_no_answer_of_before() {
    let dir = tempfile::tempdir().unwrap();
    let stats = Arc::new(Stats::default());
    let inner = open(dir.path().to_str().unwrap(), &OriginOptions::default(), Arc::clone(&stats)).unwrap();
    let (open_gate, gate) = mpsc::channel::<()>();
    let late = Arc::new(Late { inner, asked: AtomicUsize::new(0), gate: Mutex::new(gate) });
    let config = MetadataConfig {
        ttl: Duration::ZERO,
        negative_ttl: Duration::ZERO,
        max_entries: 1000,
        ..MetadataConfig::default()
    };
    let cached = CachedOrigin::new(late.clone(), config, stats);
    let lookup = || cached.lookup(b"f", soon()).map_err(|e| e.kind());
    let names = || cached.list(b"", None, 10, soon()).unwrap().entries.len();
    let asked = |n: usize| {
        let until = soon();
        while late.asked.load(Ordering::SeqCst) < n {
            assert!(Instant::now() < until, "it was not asked again");
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    std::thread::scope(|scope| {
        let first = scope.spawn(lookup);
        asked(1);
        std::fs::write(dir.path().join("f"), b"x").unwrap();
        // The writer is done and says so.
        let after: Vec<_> = (0..4).map(|_| scope.spawn(lookup)).collect();
        std::thread::sleep(Duration::from_millis(100));
        open_gate.send(()).unwrap();
        assert_eq!(first.join().unwrap().unwrap_err(), ErrorKind::NotFound);
        asked(2);
        open_gate.send(()).unwrap();
        // As many as it took, should some have begun later than that.
        while !after.iter().all(|thread| thread.is_finished()) {
            open_gate.send(()).unwrap();
            std::thread::sleep(Duration::from_millis(10));
        }
        for thread in after {
            assert_eq!(thread.join().unwrap().unwrap().size, 1);
        }
    });
    drop(open_gate);
    let (open_gate, gate) = mpsc::channel();
    *late.gate.lock().unwrap() = gate;
    let before = late.asked.load(Ordering::SeqCst);
    std::thread::scope(|scope| {
        let first = scope.spawn(names);
        asked(before + 1);
        std::fs::write(dir.path().join("g"), b"x").unwrap();
        let after = scope.spawn(names);
        std::thread::sleep(Duration::from_millis(100));
        drop(open_gate);
        assert_eq!((first.join().unwrap(), after.join().unwrap()), (1, 2));
    });
}

/// An origin that stops responding: each request takes its whole deadline.
struct Silent {
    inner: Arc<dyn OriginStore>,
    silent: std::sync::atomic::AtomicBool,
    /// Answers lookups of its root without a request, as buckets do.
    is_bucket: bool,
    requests: AtomicUsize,
}

impl Silent {
    fn respond(&self, deadline: Instant) -> Result<()> {
        self.requests.fetch_add(1, Ordering::SeqCst);
        while self.silent.load(Ordering::SeqCst) {
            if Instant::now() >= deadline {
                return Err(spurline_types::Error::new(ErrorKind::Timeout, "no answer"));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }
}

impl OriginStore for Silent {
    fn source_url(&self) -> &str {
        self.inner.source_url()
    }
    fn describe(&self) -> String {
        self.inner.describe()
    }
    fn capabilities(&self) -> OriginCapabilities {
        OriginCapabilities { modes: !self.is_bucket, ..self.inner.capabilities() }
    }
    fn check(&self, deadline: Instant) -> Result<()> {
        self.respond(deadline)?;
        self.inner.check(deadline)
    }
    fn lookup(&self, path: &[u8], deadline: Instant) -> Result<ObjectAttr> {
        if !path.is_empty() || !self.is_bucket {
            self.respond(deadline)?;
        }
        self.inner.lookup(path, deadline)
    }
    fn list(&self, path: &[u8], cursor: Option<&[u8]>, max: usize, deadline: Instant) -> Result<ListPage> {
        self.respond(deadline)?;
        self.inner.list(path, cursor, max, deadline)
    }
    fn readlink(&self, path: &[u8], deadline: Instant) -> Result<Vec<u8>> {
        self.inner.readlink(path, deadline)
    }
    fn read(&self, object: &ObjectRef, offset: u64, sink: &mut dyn ByteSink, deadline: Instant) -> Result<()> {
        self.inner.read(object, offset, sink, deadline)
    }
    fn statfs(&self, deadline: Instant) -> Result<Option<OriginCapacity>> {
        self.inner.statfs(deadline)
    }
}

#[test]
fn last_known_metadata_stays_valid_while_a_directory_is_silent() {
    metadata_while_silent(false);
}

#[test]
fn last_known_metadata_stays_valid_while_a_bucket_is_silent() {
    metadata_while_silent(true);
}

/// A data set that was listed and looked up stays readable while its origin is silent, and no longer than configured;
/// an answer of the origin ends that at once.
fn metadata_while_silent(is_bucket: bool) {
    let SilentRig { dir, origin, cached, stats } = SilentRig::new(is_bucket, Duration::from_secs(8));
    let deadline = || Instant::now() + Duration::from_secs(20);
    cached.lookup(b"", deadline()).unwrap();
    assert!(cached.lookup(b"absent", deadline()).is_err());
    assert_eq!(cached.list(b"", None, 1000, deadline()).unwrap().entries.len(), 100);

    origin.silent.store(true, Ordering::SeqCst);
    let began = Instant::now();
    cached.lookup(b"f0", deadline()).unwrap();
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    // From now on at full speed: no request waits.
    let (began, before) = (Instant::now(), origin.requests.load(Ordering::SeqCst));
    for round in 0..100 {
        assert_eq!(cached.lookup(format!("f{round}").as_bytes(), deadline()).unwrap().size, 1);
        cached.lookup(b"", deadline()).unwrap();
        assert_eq!(cached.lookup(b"absent", deadline()).unwrap_err().kind(), ErrorKind::NotFound);
        assert_eq!(cached.list(b"", None, 1000, deadline()).unwrap().entries.len(), 100);
    }
    assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
    assert!(origin.requests.load(Ordering::SeqCst) < before + 5);
    assert!(stats.metadata.stale_answers.get() >= 400);
    assert_eq!(stats.metadata.silent_origins.get(), 1);

    // An answer that says otherwise counts at once.
    std::fs::write(dir.path().join("f1"), b"longer").unwrap();
    std::fs::remove_file(dir.path().join("f2")).unwrap();
    origin.silent.store(false, Ordering::SeqCst);
    let until = Instant::now() + Duration::from_secs(10);
    while stats.metadata.silent_origins.get() > 0 {
        assert!(Instant::now() < until);
        let _ = cached.lookup(b"f0", deadline());
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(cached.lookup(b"f1", deadline()).unwrap().size, 6);
    assert_eq!(cached.lookup(b"f2", deadline()).unwrap_err().kind(), ErrorKind::NotFound);

    // Not for longer than configured.
    origin.silent.store(true, Ordering::SeqCst);
    cached.lookup(b"f0", deadline()).unwrap();
    std::thread::sleep(Duration::from_secs(8));
    let late = cached.lookup(b"f0", Instant::now() + Duration::from_secs(4)).unwrap_err().kind();
    assert!(matches!(late, ErrorKind::Timeout | ErrorKind::Unavailable), "{late:?}");
    origin.silent.store(false, Ordering::SeqCst);
}

/// A hundred files whose origin can stop responding, and no answer that is valid for longer than its request.
struct SilentRig {
    dir: tempfile::TempDir,
    origin: Arc<Silent>,
    cached: CachedOrigin,
    stats: Arc<Stats>,
}

impl SilentRig {
    fn new(is_bucket: bool, stale_if_error: Duration) -> SilentRig {
        let dir = tempfile::tempdir().unwrap();
        for i in 0..100 {
            std::fs::write(dir.path().join(format!("f{i}")), b"x").unwrap();
        }
        let stats = Arc::new(Stats::default());
        let inner = open(dir.path().to_str().unwrap(), &OriginOptions::default(), Arc::clone(&stats)).unwrap();
        let silent = std::sync::atomic::AtomicBool::new(false);
        let origin = Arc::new(Silent { inner, silent, is_bucket, requests: AtomicUsize::new(0) });
        let config = MetadataConfig { ttl: Duration::ZERO, stale_if_error, ..Default::default() };
        let cached = CachedOrigin::new(origin.clone(), config, Arc::clone(&stats));
        SilentRig { dir, origin, cached, stats }
    }
}

mod test_all {
    use super::*;

    #[test]
    fn what_is_not_known_fails_at_once_when_nothing_answers() {
        let SilentRig { dir: _dir, origin, cached, stats } = SilentRig::new(true, Duration::from_secs(600));
        let far = || Instant::now() + Duration::from_secs(24 * 3600);
        cached.lookup(b"f0", far()).unwrap();
        origin.silent.store(true, Ordering::SeqCst);
        cached.lookup(b"f0", far()).unwrap();
        // Until the test has ended, a request may only take long.
        let kind = |path: &[u8], deadline| cached.lookup(path, deadline).unwrap_err().kind();
        while kind(b"f1", Instant::now() + Duration::from_millis(50)) == ErrorKind::Timeout {}
        // None of these deadlines is waited for.
        assert_eq!(kind(b"f2", far()), ErrorKind::OriginFailed);
        assert_eq!(cached.list(b"", None, 1000, far()).unwrap_err().kind(), ErrorKind::OriginFailed);
        cached.lookup(b"f0", far()).unwrap();
        origin.silent.store(false, Ordering::SeqCst);
        while stats.metadata.silent_origins.get() > 0 {
            std::thread::sleep(Duration::from_millis(20));
        }
        assert_eq!(cached.lookup(b"f2", far()).unwrap().size, 1);
    }
}
