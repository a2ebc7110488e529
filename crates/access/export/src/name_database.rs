//! The names of a mount's inodes on disk, by which an NFS server's file handles are resolved after the kernel has forgotten an
//! inode and after the mount was started again. Names are written in batches by a separate thread.

use parking_lot::{Condvar, Mutex};
use redb::{Database, MultimapTableDefinition, ReadableDatabase as _, ReadableTable as _, TableDefinition};
use spurline_fs::NameRecords;
use spurline_types::{Error, ErrorKind, Result};
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

/// Inode number to directories' numbers and the names there.
const NAMES_TABLE: MultimapTableDefinition<'_, u64, (u64, &[u8])> = MultimapTableDefinition::new("names");
/// A directory's number and a name there to the inode's number, of mounts whose names decide about numbers.
const INODES_TABLE: TableDefinition<'_, (u64, &[u8]), u64> = TableDefinition::new("inodes");
/// Memory of the database's pages.
const PAGE_CACHE: usize = 4 << 20;
/// Inodes whose names wait for the disk; more wait for the writing thread.
const WAITING_MAX: usize = 20_000;
/// How long a name waits for others of the batch.
const NAME_BATCH_WAIT: Duration = Duration::from_millis(200);

/// A name that was added or removed.
struct NameChange {
    parent: u64,
    name: Box<[u8]>,
    added: bool,
}

/// A directory's number, and a name there.
type NameAt = (u64, Box<[u8]>);

/// The inode that a name leads to, after changes that wait.
#[derive(Clone, Copy, PartialEq)]
enum NamedInode {
    /// This number.
    Is(u64),
    /// The one on the disk, unless that is this number.
    IsNot(u64),
    /// None.
    Absent,
}

#[derive(Default)]
struct WaitingNames {
    /// By inode; at most a single change of each name.
    names: HashMap<u64, Vec<NameChange>>,
    inodes: HashMap<NameAt, NamedInode>,
}

impl WaitingNames {
    fn len(&self) -> usize {
        self.names.len().max(self.inodes.len())
    }

    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The database of a mount.
pub struct NameDatabase {
    shared: Arc<SharedNames>,
    writer: Option<JoinHandle<()>>,
}

struct SharedNames {
    database: Database,
    waiting: Mutex<QueuedNames>,
    changed: Condvar,
}

#[derive(Default)]
struct QueuedNames {
    /// Not yet handed to the database.
    new: WaitingNames,
    /// Being written.
    underway: Arc<WaitingNames>,
    stop: bool,
    reported: bool,
}

impl NameDatabase {
    /// Opens or makes the database in a folder.
    ///
    /// # Errors
    /// When the folder is missing, the disk fails, or another process has the database open.
    pub fn open(folder: &Path) -> Result<NameDatabase> {
        let path = folder.join("names.redb");
        let failed = |e: &dyn std::fmt::Display| Error::new(ErrorKind::Invalid, format!("{}: {e}", path.display()));
        let database = Database::builder().set_cache_size(PAGE_CACHE).create(&path).map_err(|e| failed(&e))?;
        let transaction = database.begin_write().map_err(|e| failed(&e))?;
        transaction.open_multimap_table(NAMES_TABLE).map_err(|e| failed(&e))?;
        transaction.open_table(INODES_TABLE).map_err(|e| failed(&e))?;
        transaction.commit().map_err(|e| failed(&e))?;
        let shared = Arc::new(SharedNames { database, waiting: Mutex::default(), changed: Condvar::new() });
        let writing = Arc::clone(&shared);
        let writer = std::thread::Builder::new().name("name-records".into()).spawn(move || writing.write_batches());
        let writer = writer.map_err(|e| Error::io("a thread for the names of inodes", &e))?;
        Ok(NameDatabase { shared, writer: Some(writer) })
    }
}

impl Drop for NameDatabase {
    fn drop(&mut self) {
        self.shared.waiting.lock().stop = true;
        self.shared.changed.notify_all();
        if let Some(writer) = self.writer.take() {
            let _ = writer.join();
        }
    }
}

impl SharedNames {
    fn write_batches(&self) {
        loop {
            let mut waiting = self.waiting.lock();
            while waiting.new.is_empty() && !waiting.stop {
                self.changed.wait(&mut waiting);
            }
            if !waiting.stop && waiting.new.len() < WAITING_MAX {
                self.changed.wait_for(&mut waiting, NAME_BATCH_WAIT);
            }
            let stop = waiting.stop;
            let batch = Arc::new(std::mem::take(&mut waiting.new));
            waiting.underway = Arc::clone(&batch);
            drop(waiting);
            let written = self.write_names(&batch);
            let mut waiting = self.waiting.lock();
            waiting.underway = Arc::default();
            if let Err(error) = written
                && !std::mem::replace(&mut waiting.reported, true)
            {
                tracing::error!(
                    "names of inodes can't be stored: {error}; file handles of NFS clients will be stale after a restart of \
                     this mount"
                );
            }
            self.changed.notify_all();
            if stop && waiting.new.is_empty() {
                return;
            }
        }
    }

    fn write_names(&self, names: &WaitingNames) -> std::result::Result<(), redb::Error> {
        if names.is_empty() {
            return Ok(());
        }
        let transaction = self.database.begin_write()?;
        {
            let mut table = transaction.open_multimap_table(NAMES_TABLE)?;
            for (ino, changes) in &names.names {
                for NameChange { parent, name, added } in changes {
                    if *added {
                        table.insert(ino, (*parent, &**name))?
                    } else {
                        table.remove(ino, (*parent, &**name))?
                    };
                }
            }
        }
        if !names.inodes.is_empty() {
            let mut table = transaction.open_table(INODES_TABLE)?;
            for ((parent, name), change) in &names.inodes {
                let at = (*parent, &**name);
                let is_gone = match change {
                    NamedInode::Is(ino) => {
                        table.insert(at, ino)?;
                        false
                    }
                    NamedInode::IsNot(ino) => table.get(at)?.is_some_and(|known| known.value() == *ino),
                    NamedInode::Absent => true,
                };
                if is_gone {
                    table.remove(at)?;
                }
            }
        }
        transaction.commit()?;
        Ok(())
    }

    fn read_inode(&self, parent: u64, name: &[u8]) -> std::result::Result<Option<u64>, redb::Error> {
        let table = self.database.begin_read()?.open_table(INODES_TABLE)?;
        Ok(table.get((parent, name))?.map(|ino| ino.value()))
    }

    fn read_names(&self, ino: u64) -> std::result::Result<Vec<(u64, Vec<u8>)>, redb::Error> {
        let table = self.database.begin_read()?.open_multimap_table(NAMES_TABLE)?;
        let mut names = Vec::new();
        for found in table.get(ino)? {
            let found = found?;
            let (parent, name) = found.value();
            names.push((parent, name.to_vec()));
        }
        Ok(names)
    }

    /// Adds a change to those that wait.
    fn add_waiting(&self, add: impl FnOnce(&mut WaitingNames)) {
        let mut waiting = self.waiting.lock();
        // A walk that is faster than the disk waits.
        while waiting.new.len() >= WAITING_MAX && !waiting.stop {
            self.changed.notify_all();
            self.changed.wait_for(&mut waiting, NAME_BATCH_WAIT);
        }
        let first = waiting.new.is_empty();
        add(&mut waiting.new);
        if first {
            self.changed.notify_all();
        }
    }

    fn change_name(&self, ino: u64, parent: u64, name: &[u8], added: bool) {
        self.add_waiting(|new| {
            let changes = new.names.entry(ino).or_default();
            match changes.iter_mut().find(|change| change.parent == parent && *change.name == *name) {
                Some(change) => change.added = added,
                None => changes.push(NameChange { parent, name: name.into(), added }),
            }
        });
    }
}

impl NameRecords for NameDatabase {
    fn record_name(&self, ino: u64, parent: u64, name: &[u8]) {
        self.shared.change_name(ino, parent, name, true);
    }

    fn remove_name(&self, ino: u64, parent: u64, name: &[u8]) {
        self.shared.change_name(ino, parent, name, false);
    }

    fn record_inode(&self, parent: u64, name: &[u8], ino: u64) {
        self.shared.add_waiting(|new| {
            new.inodes.insert((parent, name.into()), NamedInode::Is(ino));
        });
    }

    fn remove_inode(&self, parent: u64, name: &[u8], ino: u64) {
        self.shared.add_waiting(|new| {
            let change = new.inodes.entry((parent, name.into())).or_insert(NamedInode::IsNot(ino));
            match change {
                // Another inode may have the name already.
                NamedInode::Is(known) if *known != ino => {}
                NamedInode::IsNot(known) if *known == ino => {}
                other => *other = NamedInode::Absent,
            }
        });
    }

    fn find_inode(&self, parent: u64, name: &[u8]) -> Option<u64> {
        let at = (parent, Box::from(name));
        let waiting = self.shared.waiting.lock();
        let changes = [&waiting.new, &*waiting.underway].map(|queue| queue.inodes.get(&at).copied());
        drop(waiting);
        let mut not = Vec::new();
        for change in changes.into_iter().flatten() {
            match change {
                NamedInode::Is(ino) => return Some(ino).filter(|ino| !not.contains(ino)),
                NamedInode::IsNot(ino) => not.push(ino),
                NamedInode::Absent => return None,
            }
        }
        let known = self.shared.read_inode(parent, name).unwrap_or_else(|error| {
            tracing::error!("the inode of a name can't be read: {error}");
            None
        });
        known.filter(|ino| !not.contains(ino))
    }

    fn find_names(&self, ino: u64) -> Vec<(u64, Vec<u8>)> {
        let mut changes: Vec<(u64, Vec<u8>, bool)> = Vec::new();
        let waiting = self.shared.waiting.lock();
        for queue in [&*waiting.underway, &waiting.new] {
            let of_inode = queue.names.get(&ino).into_iter().flatten();
            changes.extend(of_inode.map(|change| (change.parent, change.name.to_vec(), change.added)));
        }
        drop(waiting);
        let mut names = self.shared.read_names(ino).unwrap_or_else(|error| {
            tracing::error!("the names of inode {ino} can't be read: {error}");
            Vec::new()
        });
        for (parent, name, added) in changes {
            names.retain(|known| known.0 != parent || known.1 != name);
            if added {
                // The last name is the most likely to be right.
                names.insert(0, (parent, name));
            }
        }
        names
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_at_once_and_after_a_restart() {
        let folder = tempfile::tempdir().unwrap();
        let names = NameDatabase::open(folder.path()).unwrap();
        for ino in 10..30_010u64 {
            names.record_name(ino, 1, format!("file-{ino}").as_bytes());
        }
        names.record_name(7, 1, b"folder");
        names.record_name(8, 7, b"below");
        assert_eq!(names.find_path(8).unwrap(), b"folder/below");
        names.remove_name(7, 1, b"folder");
        names.record_name(7, 1, b"renamed");
        names.record_name(8, 7, b"link");
        assert_eq!(names.find_names(8).len(), 2);
        drop(names);
        let names = NameDatabase::open(folder.path()).unwrap();
        assert_eq!(names.find_path(8).unwrap(), b"renamed/below");
        assert_eq!(names.find_names(29_999), [(1, b"file-29999".to_vec())]);
        names.remove_name(8, 7, b"below");
        assert_eq!(names.find_names(8), [(7, b"link".to_vec())]);
        assert!(names.find_path(5).is_none());
        // A name passes from one inode to another, whatever comes first.
        names.record_inode(7, b"link", 8);
        names.record_inode(7, b"new", 9);
        names.remove_inode(7, b"link", 8);
        names.record_inode(7, b"link", 10);
        names.remove_inode(7, b"link", 8);
        drop(names);
        let names = NameDatabase::open(folder.path()).unwrap();
        let inodes = || [b"link", &b"new"[..], b"other"].map(|name| names.find_inode(7, name));
        assert_eq!(inodes(), [Some(10), Some(9), None]);
        names.remove_inode(7, b"new", 10);
        assert_eq!(inodes(), [Some(10), Some(9), None]);
        names.remove_inode(7, b"new", 9);
        assert_eq!(inodes(), [Some(10), None, None]);
    }

    #[test]
    fn a_second_process_and_a_missing_folder_are_refused_and_a_loop_of_names_ends() {
        let folder = tempfile::tempdir().unwrap();
        let names = NameDatabase::open(folder.path()).unwrap();
        assert!(NameDatabase::open(folder.path()).is_err());
        assert!(NameDatabase::open(&folder.path().join("missing")).is_err());
        names.record_name(3, 4, b"a");
        names.record_name(4, 3, b"b");
        assert!(names.find_path(3).is_none());
    }
}
