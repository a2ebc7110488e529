//! A value read from files, and read again after a change. Does not know the meaning of the content.

use parking_lot::Mutex;
use spurline_types::{Error, Result};
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Interval of checks for changes.
const FILE_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Identifies the state of a file: device, inode, size and ctime in nanoseconds, which covers changes of content,
/// owner and mode. Mounted secrets of a container change by a link to another directory.
type FileStamp = Option<(u64, u64, u64, i64, i64)>;

/// A value from files; clones share the value.
pub struct WatchedFiles<T>(Arc<WatchedState<T>>);

impl<T> Clone for WatchedFiles<T> {
    fn clone(&self) -> Self {
        WatchedFiles(Arc::clone(&self.0))
    }
}

struct WatchedState<T> {
    files: Vec<PathBuf>,
    read: Box<dyn Fn() -> Result<T> + Send + Sync>,
    now: Mutex<WatchedValue<T>>,
}

struct WatchedValue<T> {
    value: Arc<T>,
    /// The state of the files at the time of the read.
    stamps: Vec<FileStamp>,
    /// The state of the files when reading failed.
    refused: Option<Vec<FileStamp>>,
    last_checked: Instant,
}

impl<T> WatchedFiles<T> {
    /// Reads the value for the first time, and later after each change of a file.
    ///
    /// # Errors
    /// That of `read`.
    pub fn new(files: Vec<PathBuf>, read: Box<dyn Fn() -> Result<T> + Send + Sync>) -> Result<WatchedFiles<T>> {
        let stamps = file_stamps(&files);
        let value = Arc::new(read()?);
        let now = Mutex::new(WatchedValue { value, stamps, refused: None, last_checked: Instant::now() });
        Ok(WatchedFiles(Arc::new(WatchedState { files, read, now })))
    }

    /// A value without files.
    pub fn without_files(value: T) -> WatchedFiles<T> {
        let now =
            WatchedValue { value: Arc::new(value), stamps: Vec::new(), refused: None, last_checked: Instant::now() };
        WatchedFiles(Arc::new(WatchedState {
            files: Vec::new(),
            read: Box::new(|| Err(Error::new(spurline_types::ErrorKind::Unsupported, "there is no file"))),
            now: Mutex::new(now),
        }))
    }

    /// The current value. When the files can't be read any more the old value stays in use; this is logged once per change, and
    /// the read is retried until success.
    pub fn get(&self) -> Arc<T> {
        let WatchedState { files, read, now } = &*self.0;
        let mut now = now.lock();
        if !files.is_empty() && now.last_checked.elapsed() >= FILE_CHECK_INTERVAL {
            now.last_checked = Instant::now();
            let found = file_stamps(files);
            if found != now.stamps {
                match read() {
                    Ok(value) => {
                        now.value = Arc::new(value);
                        now.stamps = found;
                        now.refused = None;
                        tracing::info!("{} was read again", files[0].display());
                    }
                    Err(error) => {
                        if now.refused.as_ref() != Some(&found) {
                            tracing::warn!("{error}; the previous content stays in use");
                        }
                        now.refused = Some(found);
                    }
                }
            }
        }
        Arc::clone(&now.value)
    }
}

fn file_stamps(files: &[PathBuf]) -> Vec<FileStamp> {
    files
        .iter()
        .map(|file| {
            let meta = std::fs::metadata(file).ok()?;
            Some((meta.dev(), meta.ino(), meta.size(), meta.ctime(), meta.ctime_nsec()))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_file_is_read_again_and_a_broken_one_is_not_taken() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("f");
        std::fs::write(&file, "one").unwrap();
        let from = file.clone();
        let read = move || {
            let text = std::fs::read_to_string(&from).map_err(|e| Error::io("reading", &e))?;
            if text == "bad" { Err(Error::new(spurline_types::ErrorKind::Invalid, "bad")) } else { Ok(text) }
        };
        let watched = WatchedFiles::new(vec![file.clone()], Box::new(read)).unwrap();
        // As after a second.
        let look = || {
            let past = Instant::now().checked_sub(FILE_CHECK_INTERVAL).unwrap();
            watched.0.now.lock().last_checked = past;
            watched.get().to_string()
        };
        assert_eq!(look(), "one");
        std::fs::write(&file, "another").unwrap();
        assert_eq!(look(), "another");
        std::fs::write(&file, "bad").unwrap();
        assert_eq!(look(), "another");
        std::fs::remove_file(&file).unwrap();
        assert_eq!(look(), "another");
        std::fs::write(&file, "good again").unwrap();
        assert_eq!(look(), "good again");
    }

    #[test]
    fn what_could_not_be_read_for_a_while_and_what_its_rights_hid_is_read_then() {
        use std::os::unix::fs::PermissionsExt as _;
        use std::sync::atomic::{AtomicBool, Ordering};
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("f");
        let rights = |mode: u32| std::fs::set_permissions(&file, std::fs::Permissions::from_mode(mode)).unwrap();
        std::fs::write(&file, "one").unwrap();
        let (from, broken) = (file.clone(), Arc::new(AtomicBool::new(false)));
        let disk = Arc::clone(&broken);
        let read = move || {
            // No right keeps root from reading.
            let hidden = std::fs::metadata(&from).unwrap().permissions().mode() & 0o400 == 0;
            if hidden || disk.load(Ordering::Relaxed) {
                return Err(Error::new(spurline_types::ErrorKind::PermissionDenied, "hidden"));
            }
            std::fs::read_to_string(&from).map_err(|e| Error::io("reading", &e))
        };
        let watched = WatchedFiles::new(vec![file.clone()], Box::new(read)).unwrap();
        let look = || {
            watched.0.now.lock().last_checked = Instant::now().checked_sub(FILE_CHECK_INTERVAL).unwrap();
            watched.get().to_string()
        };
        std::fs::write(&file, "second").unwrap();
        rights(0o000);
        assert_eq!(look(), "one");
        // Later than a clock of whole ticks can tell from then.
        std::thread::sleep(Duration::from_millis(20));
        rights(0o600);
        assert_eq!(look(), "second");
        // The file is as it was when that failed.
        broken.store(true, Ordering::Relaxed);
        std::fs::write(&file, "three").unwrap();
        assert_eq!(look(), "second");
        broken.store(false, Ordering::Relaxed);
        assert_eq!(look(), "three");
    }
}
