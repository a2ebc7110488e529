//! A store of inode names in memory.

use parking_lot::Mutex;
use spurline_fs::NameRecords;
use std::collections::HashMap;

type InodeNames = Vec<(u64, Vec<u8>)>;

#[derive(Default)]
pub struct MemoryRecords(Mutex<HashMap<u64, InodeNames>>, Mutex<HashMap<(u64, Vec<u8>), u64>>);

impl MemoryRecords {
    /// Loses all names.
    #[allow(dead_code, reason = "each test program uses a part")]
    pub fn clear(&self) {
        self.0.lock().clear();
    }
}

impl NameRecords for MemoryRecords {
    fn record_name(&self, ino: u64, parent: u64, name: &[u8]) {
        self.remove_name(ino, parent, name);
        self.0.lock().entry(ino).or_default().push((parent, name.to_vec()));
    }

    fn remove_name(&self, ino: u64, parent: u64, name: &[u8]) {
        self.0.lock().entry(ino).or_default().retain(|(at, own)| *at != parent || own != name);
    }

    fn record_inode(&self, parent: u64, name: &[u8], ino: u64) {
        self.1.lock().insert((parent, name.to_vec()), ino);
    }

    fn remove_inode(&self, parent: u64, name: &[u8], ino: u64) {
        let mut inodes = self.1.lock();
        if inodes.get(&(parent, name.to_vec())) == Some(&ino) {
            inodes.remove(&(parent, name.to_vec()));
        }
    }

    fn find_inode(&self, parent: u64, name: &[u8]) -> Option<u64> {
        self.1.lock().get(&(parent, name.to_vec())).copied()
    }

    fn find_names(&self, ino: u64) -> InodeNames {
        self.0.lock().get(&ino).cloned().unwrap_or_default()
    }
}
