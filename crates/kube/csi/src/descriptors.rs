//! The descriptors of mounts that outlive their pods: the driver holds copies for each volume, and the keeper in the next pod
//! continues the mount with these. A restarted driver gets the copies from the keepers. Does not know how processes are started.

use parking_lot::Mutex;
use spurline_config::Fault;
use spurline_keeper::{DescriptorStore, UPGRADE_CAUSE};
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// The socket in the volume's directory.
const STORE_SOCKET: &str = "store";

/// The stores of all volumes, by their ids.
#[derive(Debug, Default)]
pub(crate) struct VolumeDescriptors {
    stores: Mutex<HashMap<String, VolumeStore>>,
}

#[derive(Debug)]
struct VolumeStore {
    store: DescriptorStore,
    /// The number of processes before the last known process; `None` for a found mount before the first report of the keeper.
    known_takeovers: Option<u64>,
}

/// The socket of a volume's store.
pub(crate) fn store_socket(dir: &Path) -> PathBuf {
    dir.join(STORE_SOCKET)
}

impl VolumeDescriptors {
    /// Makes an empty store for a volume, in the place of any other. `known_takeovers` is 0 for a mount that is to be made, and
    /// `None` for a mount of an earlier driver.
    ///
    /// # Errors
    /// When no socket can be made in the volume's directory.
    pub(crate) fn open(&self, volume_id: &str, dir: &Path, known_takeovers: Option<u64>) -> Result<(), Fault> {
        let path = store_socket(dir);
        let store = DescriptorStore::listen(&path)
            .map_err(|e| Fault::failed(format!("the socket {}: {e}", path.display()), "make --state-dir writable"))?;
        self.stores.lock().insert(volume_id.to_owned(), VolumeStore { store, known_takeovers });
        Ok(())
    }

    /// Whether the volume's mount lives and could be continued.
    pub(crate) fn hold_mount(&self, volume_id: &str) -> bool {
        self.stores.lock().get(volume_id).is_some_and(|volume| volume.store.holds_mount())
    }

    /// Closes the copies. A mount without any process dies then.
    pub(crate) fn close(&self, volume_id: &str) {
        self.stores.lock().remove(volume_id);
    }

    /// Closes the copies of a mount that is to end: the keeper unmounts at a stop.
    pub(crate) fn end(&self, volume_id: &str) {
        if let Some(volume) = self.stores.lock().remove(volume_id) {
            volume.store.end();
        }
    }

    /// Notes that the driver replaces the process of a mount that lives: a report of the keeper, early or late, is no news.
    pub(crate) fn expect_process(&self, volume_id: &str) {
        if let Some(volume) = self.stores.lock().get_mut(volume_id)
            && let Some(last) = volume.store.last_process()
        {
            volume.known_takeovers = Some(last.takeovers + 1);
        }
    }

    /// Notes the process that serves the mount now; returns why the process before ended, if that is news and no upgrade.
    pub(crate) fn note_process(&self, volume_id: &str) -> Option<String> {
        let mut stores = self.stores.lock();
        let volume = stores.get_mut(volume_id)?;
        let last = volume.store.last_process()?;
        let before = volume.known_takeovers.unwrap_or(last.takeovers);
        volume.known_takeovers = Some(before.max(last.takeovers));
        (last.takeovers > before && !last.cause.starts_with(UPGRADE_CAUSE)).then_some(last.cause)
    }
}
