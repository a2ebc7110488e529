//! An open source: volume, job target and files for writing, with the lock of the cache folder. Knows no threads of a
//! client.

use crate::failure::CallFailure;
use crate::settings::ClientSettings;
use crate::source_paths::{FoundPath, find_path};
use parking_lot::Mutex;
use rustix::io::Errno;
use spurline_config::{CacheSize, HostLimits, WritesConfig};
use spurline_fs::FileService;
use spurline_jobs::JobTarget;
use spurline_runtime::{OpenVolume, WritableFiles, open_volume, open_writable_files};
use spurline_types::Stats;
use spurline_volume::Volume;
use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The most processes that share a cache directory.
const MOST_CACHE_FOLDERS: usize = 256;

/// The two ways a source is opened.
enum OpenKind {
    Reading(OpenVolume),
    Writing(WritableFiles),
}

/// An open source; the drop closes the source and ends all threads.
pub(crate) struct OpenSource {
    opened: OpenKind,
    pub stats: Arc<Stats>,
    last_change: Mutex<Option<Instant>>,
    /// The last to be dropped.
    folder: Option<CacheFolder>,
}

/// How long a close waits for the last threads that use the cache folder.
const FOLDER_END_TIME: Duration = Duration::from_secs(2);
/// The interval at which that is looked at.
const FOLDER_END_INTERVAL: Duration = Duration::from_millis(2);

/// A cache folder that no other process uses, and no client of this one.
struct CacheFolder {
    path: PathBuf,
    /// Locked while this value lives.
    _lock: File,
}

impl CacheFolder {
    /// Whether no store uses the folder: the last threads of a closed client may still do so, and a child that was forked
    /// meanwhile has the lock until the child ends.
    fn is_free(&self) -> bool {
        let Ok(lock) = File::open(self.path.join(spurline_store::LOCK)) else { return true };
        lock.try_lock().is_ok()
    }

    fn await_free(&self) {
        let until = Instant::now() + FOLDER_END_TIME;
        while !self.is_free() && Instant::now() < until {
            std::thread::sleep(FOLDER_END_INTERVAL);
        }
    }
}

fn cache_dir_failure(cache_dir: &Path, error: &std::io::Error) -> CallFailure {
    CallFailure {
        errno: error.raw_os_error().unwrap_or(Errno::IO.raw_os_error()),
        sentence: format!("cache_dir {}: {error}", cache_dir.display()),
        path: None,
    }
}

/// A cache folder of this process alone below `cache_dir`: the first that is free.
fn own_cache_folder(cache_dir: &Path) -> Result<CacheFolder, CallFailure> {
    std::fs::create_dir_all(cache_dir).map_err(|error| cache_dir_failure(cache_dir, &error))?;
    for number in 0..MOST_CACHE_FOLDERS {
        let lock = File::options().create(true).append(true).open(cache_dir.join(format!("{number}.lock")));
        let lock = lock.map_err(|error| cache_dir_failure(cache_dir, &error))?;
        match lock.try_lock() {
            Ok(()) => {
                let folder = CacheFolder { path: cache_dir.join(number.to_string()), _lock: lock };
                if folder.is_free() {
                    return Ok(folder);
                }
            }
            Err(TryLockError::WouldBlock) => {}
            Err(TryLockError::Error(error)) => return Err(cache_dir_failure(cache_dir, &error)),
        }
    }
    let why = format!("cache_dir {} is in use by {MOST_CACHE_FOLDERS} processes", cache_dir.display());
    Err(CallFailure::new(Errno::BUSY, why))
}

impl OpenSource {
    /// Opens the source, and checks that the source or the group answers.
    ///
    /// # Errors
    /// `EINVAL` for settings that do not fit together, `ENOENT` for a directory or a bucket that does not exist, `EHOSTDOWN` or
    /// `ETIMEDOUT` without an answer, `EIO` for other failures.
    pub fn open(settings: ClientSettings) -> Result<OpenSource, CallFailure> {
        let mut raw = settings.volume;
        let mut folder = None;
        if let Some(cache_dir) = settings.cache_dir.filter(|_| raw.cache.cache_size != CacheSize::None) {
            let own = own_cache_folder(&cache_dir)?;
            raw.cache.cache_dir = vec![own.path.clone()];
            folder = Some(own);
        }
        let stats = Arc::new(Stats::default());
        let host = HostLimits::detect();
        if settings.stage && !settings.writable {
            let why = "stage has no effect on a source that is open for reading only; give writable=True too";
            return Err(CallFailure::new(Errno::INVAL, why));
        }
        let opened = if settings.writable {
            let writes = WritesConfig { stage: settings.stage, ..WritesConfig::default() };
            let config = raw.check_writable(writes, &host)?;
            OpenKind::Writing(open_writable_files(&config, &stats)?)
        } else {
            let mut volume = open_volume(&raw.check(&host)?, &stats)?;
            volume.keep_directories();
            OpenKind::Reading(volume)
        };
        Ok(OpenSource { opened, stats, folder, last_change: Mutex::default() })
    }

    fn open_volume(&self) -> &OpenVolume {
        match &self.opened {
            OpenKind::Reading(volume) => volume,
            OpenKind::Writing(files) => files.open_volume(),
        }
    }

    /// Names, attributes and bytes.
    pub fn volume(&self) -> &dyn Volume {
        &**self.open_volume().volume()
    }

    /// The time since this client has changed something: what was learned of the source before is not used again.
    pub fn since_change(&self) -> Duration {
        self.last_change.lock().map_or(Duration::MAX, |at| at.elapsed())
    }

    /// As [`find_path`], with the changes of this client.
    pub fn find_path(&self, path: &[u8]) -> spurline_types::Result<FoundPath> {
        find_path(self.volume(), path, self.since_change())
    }

    /// Makes a change by the files of the source.
    ///
    /// # Errors
    /// `EROFS` for a source that is open for reading; those of the change.
    pub fn change<T>(&self, make: impl FnOnce(&dyn FileService) -> Result<T, CallFailure>) -> Result<T, CallFailure> {
        let files = self.files()?;
        let made = make(&*files);
        *self.last_change.lock() = Some(Instant::now());
        made
    }

    /// The target of loads.
    pub fn job_target(&self) -> Arc<dyn JobTarget> {
        self.open_volume().job_target()
    }

    /// The files, if the source was opened for writing.
    ///
    /// # Errors
    /// `EROFS` if not.
    pub fn files(&self) -> Result<Arc<dyn FileService>, CallFailure> {
        match &self.opened {
            OpenKind::Reading(_) => {
                Err(CallFailure::new(Errno::ROFS, "the source is open for reading only; open it with writable=True"))
            }
            OpenKind::Writing(files) => Ok(files.service()),
        }
    }

    /// Closes the source; waits until nodes have written bytes durably.
    ///
    /// # Errors
    /// When written bytes are lost.
    pub fn finish(self) -> Result<(), CallFailure> {
        match self.opened {
            OpenKind::Reading(volume) => drop(volume),
            OpenKind::Writing(files) => files.finish()?,
        }
        if let Some(folder) = self.folder {
            folder.await_free();
        }
        Ok(())
    }
}
