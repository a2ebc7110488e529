//! A value read from files, and read again when they changed. It knows no meaning of what is in them.

use parking_lot::Mutex;
use spurline_types::{Error, Result};
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Files are looked at no more often than this.
const EVERY: Duration = Duration::from_secs(1);

/// What tells that a file is another: device, inode, size, and the time at which its bytes, its owner or its rights
/// changed last, in nanoseconds. Secrets of a container change by a link to another directory.
type Stamp = Option<(u64, u64, u64, i64, i64)>;

/// Clones share the value.
pub(crate) struct Watched<T>(Arc<Inner<T>>);

impl<T> Clone for Watched<T> {
    fn clone(&self) -> Self {
        Watched(Arc::clone(&self.0))
    }
}

struct Inner<T> {
    files: Vec<PathBuf>,
    read: Box<dyn Fn() -> Result<T> + Send + Sync>,
    now: Mutex<Now<T>>,
}

struct Now<T> {
    value: Arc<T>,
    /// Of what was read.
    stamps: Vec<Stamp>,
    /// Of what could not be.
    refused: Option<Vec<Stamp>>,
    looked: Instant,
}

impl<T> Watched<T> {
    /// Reads for the first time.
    pub fn new(files: Vec<PathBuf>, read: Box<dyn Fn() -> Result<T> + Send + Sync>) -> Result<Watched<T>> {
        let stamps = stamps(&files);
        let value = Arc::new(read()?);
        let now = Mutex::new(Now { value, stamps, refused: None, looked: Instant::now() });
        Ok(Watched(Arc::new(Inner { files, read, now })))
    }

    /// A value that has no file.
    pub fn fixed(value: T) -> Watched<T> {
        let never = || Err(Error::new(spurline_types::ErrorKind::Unsupported, "there is no file"));
        let now = Now { value: Arc::new(value), stamps: Vec::new(), refused: None, looked: Instant::now() };
        Watched(Arc::new(Inner { files: Vec::new(), read: Box::new(never), now: Mutex::new(now) }))
    }

    /// The value now. One that can't be read any more stays as it was, which is said once for every change, and is tried
    /// again until it can be.
    pub fn get(&self) -> Arc<T> {
        let Inner { files, read, now } = &*self.0;
        let mut now = now.lock();
        if !files.is_empty() && now.looked.elapsed() >= EVERY {
            now.looked = Instant::now();
            let found = stamps(files);
            if found != now.stamps {
                match read() {
                    Ok(value) => {
                        now.value = Arc::new(value);
                        (now.stamps, now.refused) = (found, None);
                        tracing::info!("{} was read again", files[0].display());
                    }
                    Err(error) => {
                        if now.refused.as_ref() != Some(&found) {
                            tracing::warn!("{error}; what was there before stays in use");
                        }
                        now.refused = Some(found);
                    }
                }
            }
        }
        Arc::clone(&now.value)
    }
}

fn stamps(files: &[PathBuf]) -> Vec<Stamp> {
    let stamp = |file: &PathBuf| {
        let meta = std::fs::metadata(file).ok()?;
        Some((meta.dev(), meta.ino(), meta.size(), meta.ctime(), meta.ctime_nsec()))
    };
    files.iter().map(stamp).collect()
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
        let watched = Watched::new(vec![file.clone()], Box::new(read)).unwrap();
        // As after a second.
        let look = || {
            let past = Instant::now().checked_sub(EVERY).unwrap();
            watched.0.now.lock().looked = past;
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
        let watched = Watched::new(vec![file.clone()], Box::new(read)).unwrap();
        let look = || {
            watched.0.now.lock().looked = Instant::now().checked_sub(EVERY).unwrap();
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
