//! The objects that were used lately, in a file beside the blocks of a node: from this file, the node started next knows the
//! names of the blocks on the disks, and can hand them on. Does not know the use of the names.

use spurline_config::Fault;
use spurline_node::{CacheNode, RecentRecord};
use spurline_sys::replace_file;
use spurline_types::Error;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// In the first cache directory.
pub(crate) const RECENT_FILE: &str = "recent.json";
/// Shortest interval of writing the file while objects are added: a killed node forgets objects of this time.
const WRITE_INTERVAL: Duration = Duration::from_millis(500);
/// The interval is at least this many times as long as writing the file takes: the largest has a few MiB.
const WRITE_SHARE_DIVISOR: u32 = 100;

/// The file, which a thread keeps current.
pub(crate) struct RecentObjectsFile {
    file: PathBuf,
    /// A drop ends the thread.
    stop: Sender<()>,
    thread: JoinHandle<()>,
}

impl RecentObjectsFile {
    /// Reads the file of an earlier process into `node`, and keeps the file current from now on; `None` without a directory.
    ///
    /// # Errors
    /// When there can be no thread.
    pub(crate) fn open(dirs: &[PathBuf], node: &Arc<CacheNode>) -> Result<Option<Self>, Fault> {
        let Some(dir) = dirs.first() else { return Ok(None) };
        let file = dir.join(RECENT_FILE);
        match read_record(&file) {
            Ok(None) => {}
            Ok(Some(record)) => {
                let restored = node.restore_recent(&record);
                tracing::info!("{restored} objects were used lately before this start");
            }
            // Only a drain needs the file.
            Err(error) => {
                tracing::warn!("{}: {error}; objects used before this start are not known", file.display());
            }
        }
        let (stop, stopped) = channel();
        let path = file.clone();
        let node = Arc::downgrade(node);
        let thread = std::thread::Builder::new().name("recent-objects".into()).spawn(move || {
            let mut written = 0;
            let mut interval = WRITE_INTERVAL;
            while let Err(RecvTimeoutError::Timeout) = stopped.recv_timeout(interval) {
                let begun = Instant::now();
                written = write_if_changed(&path, &node, written);
                interval = WRITE_INTERVAL.max(begun.elapsed() * WRITE_SHARE_DIVISOR);
            }
        });
        let thread = thread.map_err(|error| Error::io("can't start a thread", &error))?;
        Ok(Some(RecentObjectsFile { file, stop, thread }))
    }

    /// Writes the file a last time.
    pub(crate) fn close(self, node: &CacheNode) {
        drop(self.stop);
        // After a panic of the thread the file is written all the same.
        let _ = self.thread.join();
        write_record(&self.file, node);
    }
}

fn read_record(file: &Path) -> io::Result<Option<Vec<RecentRecord>>> {
    match fs::read(file) {
        Ok(text) => Ok(Some(serde_json::from_slice(&text)?)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Writes the file if objects were added since there were `written`; returns the present number.
fn write_if_changed(file: &Path, node: &Weak<CacheNode>, written: u64) -> u64 {
    let Some(node) = node.upgrade() else { return written };
    let added = node.recent_count();
    if added != written {
        write_record(file, &node);
    }
    added
}

fn write_record(file: &Path, node: &CacheNode) {
    let written = serde_json::to_vec(&node.recent_records()).map_err(io::Error::from);
    if let Err(error) = written.and_then(|text| replace_file(file, &text, 0o600)) {
        // A disk that is full or bad still serves blocks.
        tracing::warn!("{}: the objects used lately are not recorded: {error}", file.display());
    }
}
