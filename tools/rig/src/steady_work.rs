//! Programs that read and write for as long as a test goes on: any error fails, and the end knows what was acknowledged.

use std::fs::{self, File, OpenOptions};
use std::io::{Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The content of a record, or of a file, of this number.
pub fn record(number: u64) -> String {
    format!("{number} {}\n", "r".repeat((number * 37 % 200) as usize))
}

/// Ends the work when dropped: also when the test fails.
pub struct WorkEnd<'a>(pub &'a AtomicBool);

impl Drop for WorkEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// A program in a directory, until `stop`.
pub struct SteadyWork<'a> {
    pub at: PathBuf,
    pub stop: &'a AtomicBool,
    rounds: AtomicU64,
}

impl<'a> SteadyWork<'a> {
    pub fn new(at: &Path, stop: &'a AtomicBool) -> Self {
        SteadyWork { at: at.to_owned(), stop, rounds: AtomicU64::new(0) }
    }

    /// Rounds that have begun.
    pub fn rounds(&self) -> u64 {
        self.rounds.load(Ordering::Acquire)
    }

    /// Counts a round; false at the end.
    pub fn goes_on(&self) -> bool {
        self.rounds.fetch_add(1, Ordering::AcqRel);
        !self.stop.load(Ordering::Acquire)
    }

    /// Appends records to a file that stays open, and syncs now and then; returns their number.
    pub fn append_records(&self) -> u64 {
        let mut log = OpenOptions::new().append(true).create(true).open(self.at.join("log")).unwrap();
        let mut count = 0;
        while self.goes_on() {
            let record = record(count);
            assert_eq!(log.write(record.as_bytes()).expect("a writer sees no error"), record.len());
            count += 1;
            if count.is_multiple_of(4) {
                log.sync_all().expect("a writer sees no error");
            }
        }
        count
    }

    /// Makes files and gives each the name of the last, makes and removes a folder, and reads the file; returns their number.
    pub fn replace_files(&self) -> u64 {
        let mut count = 0;
        while self.goes_on() {
            count += 1;
            fs::write(self.at.join("new"), record(count)).expect("a writer sees no error");
            fs::rename(self.at.join("new"), self.at.join("state")).expect("a writer sees no error");
            fs::create_dir(self.at.join("folder")).expect("a writer sees no error");
            fs::remove_dir(self.at.join("folder")).expect("a writer sees no error");
            assert_eq!(fs::read_to_string(self.at.join("state")).expect("a reader sees no error"), record(count));
        }
        count
    }

    /// Opens a file again and again and compares what is read past the kernel's memory, and at the end what is read by a file
    /// that was open from the start.
    pub fn read_past_memory(&self, name: &str, wanted: &[u8]) -> u64 {
        let mut kept = File::open(self.at.join(name)).unwrap();
        let mut count = 0;
        while self.goes_on() {
            count += 1;
            let options = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).clone();
            let mut bytes = Vec::new();
            let mut file = options.open(self.at.join(name)).expect("a reader sees no error");
            file.read_to_end(&mut bytes).expect("a reader sees no error");
            assert!(bytes == wanted, "wrong bytes of {name}");
        }
        let mut bytes = Vec::new();
        kept.read_to_end(&mut bytes).expect("a reader sees no error");
        assert!(bytes == wanted, "wrong bytes of {name}");
        count
    }

    /// Checks the directory at the source after [`SteadyWork::append_records`].
    pub fn check_records(source: &Path, records: u64) {
        let log = fs::read_to_string(source.join("log")).unwrap();
        let wanted: String = (0..records).map(record).collect();
        assert!(log == wanted, "{} bytes of records, {} were acknowledged", log.len(), wanted.len());
    }

    /// Checks the directory at the source after [`SteadyWork::replace_files`].
    pub fn check_files(source: &Path, files: u64) {
        assert_eq!(fs::read_to_string(source.join("state")).unwrap(), record(files));
        assert!(!source.join("new").exists() && !source.join("folder").exists());
    }
}
