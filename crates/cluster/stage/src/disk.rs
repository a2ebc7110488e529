//! Staged objects on the disks of a node. [`FolderDisk`] is the real one. Everything that a call has returned is there
//! after a loss of power.
//!
//! A part is a file (`part_file.rs`). Manifests, with the bytes of small objects, are records of a database; all changes that wait are
//! written by a single transaction.

mod part_file;

use crate::manifest::Manifest;

use parking_lot::{Condvar, Mutex};
use part_file::{NewPart, OpenPart, PART_CHUNK, TransferBuffers, disk_error, sync_folder};
use redb::{Database, ReadableDatabase as _, ReadableTable as _, TableDefinition};
use spurline_sys::random;
use spurline_types::{Error, ErrorKind, Result};
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// The folder below a cache directory, and the database there.
const STAGE_FOLDER: &str = "stage";
const RECORDS_FILE: &str = "records.redb";
/// Memory of the database's pages.
const RECORD_PAGES: usize = 8 << 20;

/// By record: the length of the manifest in four bytes, the manifest, and the bytes of a small object.
const OBJECTS_TABLE: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("objects");
/// The key of the disk's identity among the facts.
const IDENTITY: &str = "identity";
/// The newest term by "term", and the identity.
const FACTS_TABLE: TableDefinition<'_, &str, u64> = TableDefinition::new("facts");

/// A change of the records of a disk.
#[derive(Debug, Clone)]
pub enum RecordChange {
    /// The newest term that this node knows.
    Term(u64),
    /// A manifest, and the bytes of a small object; `None` leaves the bytes as they are.
    Put(Box<Manifest>, Option<Vec<u8>>),
    /// Removes a manifest.
    Remove(String),
}

/// A part as a listing of a disk shows it.
#[derive(Debug, Clone)]
pub struct KeptPart {
    /// The name.
    pub name: String,
    /// Bytes.
    pub len: u64,
    /// Time since the part was made.
    pub age: Duration,
}

/// A part on its way to a disk. A drop removes what there is.
pub trait PartWriter: Send {
    /// Adds bytes.
    ///
    /// # Errors
    /// The disk's.
    fn append(&mut self, bytes: &[u8]) -> Result<()>;
    /// The part is complete, and durable when this returns.
    ///
    /// # Errors
    /// The disk's.
    fn finish(self: Box<Self>) -> Result<()>;
}

/// The disks of a node.
pub trait StageDisk: Send + Sync {
    /// Begins a part.
    ///
    /// # Errors
    /// The disk's.
    fn begin_part(&self, name: &str) -> Result<Box<dyn PartWriter>>;
    /// Reads bytes of a part, and compares their checksums.
    ///
    /// # Errors
    /// `NotFound`, `Corrupt`, the disk's.
    fn read_part(&self, name: &str, from: u64, out: &mut [u8]) -> Result<()>;
    /// The number of bytes of a part.
    ///
    /// # Errors
    /// `NotFound`, `Corrupt`, the disk's.
    fn part_len(&self, name: &str) -> Result<u64>;
    /// Gives parts a further name each; durable when this returns.
    ///
    /// # Errors
    /// As [`StageDisk::read_part`].
    fn link_parts(&self, names: &[(String, String)]) -> Result<()>;
    /// Removes a part, if there is any.
    ///
    /// # Errors
    /// The disk's.
    fn remove_part(&self, name: &str) -> Result<()>;
    /// All parts.
    ///
    /// # Errors
    /// The disk's.
    fn parts(&self) -> Result<Vec<KeptPart>>;
    /// Changes records, all or none; durable when this returns.
    ///
    /// # Errors
    /// The disk's.
    fn change_records(&self, changes: Vec<RecordChange>) -> Result<()>;
    /// All manifests, each with the number of bytes beside it.
    ///
    /// # Errors
    /// The disk's.
    fn manifests(&self) -> Result<Vec<(Manifest, u64)>>;
    /// The bytes beside a manifest.
    ///
    /// # Errors
    /// `NotFound`, the disk's.
    fn read_inline(&self, record: &str) -> Result<Vec<u8>>;
    /// A number that was drawn when the disk was empty: another one tells that everything was lost.
    ///
    /// # Errors
    /// The disk's.
    fn identity(&self) -> Result<u64>;
    /// The newest term that was recorded.
    ///
    /// # Errors
    /// The disk's.
    fn term(&self) -> Result<u64>;
}

/// Changes of records, and their result.
struct WaitingChange {
    changes: Vec<RecordChange>,
    outcome: Arc<Mutex<Option<Result<()>>>>,
}

#[derive(Default)]
struct ChangeQueue {
    waiting: Vec<WaitingChange>,
    is_writing: bool,
}

/// Folders on the cache disks.
pub struct FolderDisk {
    folders: Vec<PathBuf>,
    database: Database,
    queue: Mutex<ChangeQueue>,
    written: Condvar,
    buffers: Arc<TransferBuffers>,
}

fn database_error(error: impl std::fmt::Display) -> Error {
    Error::new(ErrorKind::Io(5), format!("the records of staged files: {error}"))
}

fn no_record(record: &str) -> Error {
    Error::new(ErrorKind::NotFound, format!("no record of staged file {record}"))
}

impl FolderDisk {
    /// Whether there are records of staged files below these folders.
    pub fn has_records(below: &[PathBuf]) -> bool {
        below.first().is_some_and(|first| first.join(STAGE_FOLDER).join(RECORDS_FILE).exists())
    }

    /// Opens or makes the folders `stage` below these folders. The records lie in the first.
    ///
    /// # Errors
    /// The disk's; another process has the records open.
    pub fn open(below: &[PathBuf]) -> Result<FolderDisk> {
        let folders: Vec<PathBuf> = below.iter().map(|folder| folder.join(STAGE_FOLDER)).collect();
        for folder in &folders {
            let made = std::fs::create_dir_all(folder).and_then(|()| std::fs::read_dir(folder));
            let listed = made.map_err(|error| disk_error(folder, &error))?;
            // What a process has not finished.
            for name in listed.flatten().map(|entry| entry.path()) {
                if name.extension().is_some_and(|extension| extension == "new") {
                    let _ = std::fs::remove_file(name);
                }
            }
        }
        let Some(first) = folders.first() else {
            return Err(Error::new(ErrorKind::Invalid, "staged files need a cache disk"));
        };
        let path = first.join(RECORDS_FILE);
        let database = Database::builder().set_cache_size(RECORD_PAGES).create(&path);
        let database =
            database.map_err(|error| Error::new(ErrorKind::Invalid, format!("{}: {error}", path.display())))?;
        let transaction = database.begin_write().map_err(database_error)?;
        transaction.open_table(OBJECTS_TABLE).map_err(database_error)?;
        {
            let mut facts = transaction.open_table(FACTS_TABLE).map_err(database_error)?;
            let is_new = facts.get(IDENTITY).map_err(database_error)?.is_none();
            if is_new {
                facts.insert(IDENTITY, random()).map_err(database_error)?;
            }
        }
        transaction.commit().map_err(database_error)?;
        sync_folder(first)?;
        Ok(FolderDisk { folders, database, queue: Mutex::default(), written: Condvar::new(), buffers: Arc::default() })
    }

    /// The file of a part: its name decides the folder.
    fn path_of(&self, part: &str) -> PathBuf {
        let folder = crc32c::crc32c(part.as_bytes()) as usize % self.folders.len();
        self.folders[folder].join(format!("{part}.part"))
    }

    fn open_part(&self, name: &str) -> Result<OpenPart> {
        OpenPart::open(&self.path_of(name), &self.buffers)
    }

    fn write_changes(&self, waiting: &[WaitingChange]) -> Result<()> {
        let transaction = self.database.begin_write().map_err(database_error)?;
        {
            let mut objects = transaction.open_table(OBJECTS_TABLE).map_err(database_error)?;
            let mut facts = transaction.open_table(FACTS_TABLE).map_err(database_error)?;
            for change in waiting.iter().flat_map(|waiting| &waiting.changes) {
                match change {
                    RecordChange::Term(term) => drop(facts.insert("term", *term).map_err(database_error)?),
                    RecordChange::Remove(record) => drop(objects.remove(record.as_str()).map_err(database_error)?),
                    RecordChange::Put(manifest, bytes) => {
                        let kept = match bytes {
                            Some(bytes) => bytes.clone(),
                            None => {
                                let found = objects.get(manifest.record.as_str()).map_err(database_error)?;
                                found.map(|found| inline_of(found.value()).to_vec()).unwrap_or_default()
                            }
                        };
                        let record = record_of(manifest, &kept)?;
                        objects.insert(manifest.record.as_str(), record.as_slice()).map_err(database_error)?;
                    }
                }
            }
        }
        transaction.commit().map_err(database_error)
    }
}

fn record_of(manifest: &Manifest, bytes: &[u8]) -> Result<Vec<u8>> {
    let text = serde_json::to_vec(manifest).map_err(database_error)?;
    let mut record = (text.len() as u32).to_le_bytes().to_vec();
    record.extend_from_slice(&text);
    record.extend_from_slice(bytes);
    Ok(record)
}

/// The two halves of a record.
fn split_record(record: &[u8]) -> (&[u8], &[u8]) {
    let Some((len, rest)) = record.split_first_chunk::<4>() else { return (&[], &[]) };
    rest.split_at_checked(u32::from_le_bytes(*len) as usize).unwrap_or((rest, &[]))
}

fn inline_of(record: &[u8]) -> &[u8] {
    split_record(record).1
}

impl PartWriter for NewPart {
    fn append(&mut self, bytes: &[u8]) -> Result<()> {
        self.add(bytes)
    }

    fn finish(self: Box<Self>) -> Result<()> {
        self.end()
    }
}

impl StageDisk for FolderDisk {
    fn begin_part(&self, name: &str) -> Result<Box<dyn PartWriter>> {
        Ok(Box::new(NewPart::create(self.path_of(name), &self.buffers)?))
    }

    fn read_part(&self, name: &str, from: u64, out: &mut [u8]) -> Result<()> {
        self.open_part(name)?.read(from, out)
    }

    fn part_len(&self, name: &str) -> Result<u64> {
        Ok(self.open_part(name)?.len)
    }

    fn link_parts(&self, names: &[(String, String)]) -> Result<()> {
        let mut touched: Vec<PathBuf> = Vec::new();
        for (old, new) in names {
            let from = self.path_of(old);
            let to = self.path_of(new);
            match std::fs::hard_link(&from, &to) {
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
                // On another disk.
                Err(error) if error.kind() == std::io::ErrorKind::CrossesDevices => self.copy_part(old, new)?,
                linked => linked.map_err(|error| disk_error(&from, &error))?,
            }
            touched
                .extend(to.parent().filter(|parent| !touched.iter().any(|known| known == parent)).map(PathBuf::from));
        }
        touched.iter().try_for_each(|folder| sync_folder(folder))
    }

    fn remove_part(&self, name: &str) -> Result<()> {
        let path = self.path_of(name);
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(disk_error(&path, &error)),
            _ => Ok(()),
        }
    }

    fn parts(&self) -> Result<Vec<KeptPart>> {
        let mut parts = Vec::new();
        let now = SystemTime::now();
        for folder in &self.folders {
            let listed = std::fs::read_dir(folder).map_err(|error| disk_error(folder, &error))?;
            for entry in listed.flatten() {
                let path = entry.path();
                let name = path.file_stem().and_then(|name| name.to_str());
                let is_part = path.extension().is_some_and(|extension| extension == "part");
                let (Some(name), true, Ok(facts)) = (name, is_part, entry.metadata()) else { continue };
                let made = facts.modified().unwrap_or(now);
                let age = now.duration_since(made).unwrap_or_default();
                parts.push(KeptPart { name: name.to_owned(), len: facts.len(), age });
            }
        }
        Ok(parts)
    }

    fn change_records(&self, changes: Vec<RecordChange>) -> Result<()> {
        let outcome = Arc::new(Mutex::new(None));
        let mut queue = self.queue.lock();
        queue.waiting.push(WaitingChange { changes, outcome: Arc::clone(&outcome) });
        loop {
            if let Some(outcome) = outcome.lock().take() {
                return outcome;
            }
            if queue.is_writing {
                self.written.wait(&mut queue);
                continue;
            }
            let waiting = std::mem::take(&mut queue.waiting);
            queue.is_writing = true;
            drop(queue);
            let result = self.write_changes(&waiting);
            queue = self.queue.lock();
            waiting.iter().for_each(|waiting| *waiting.outcome.lock() = Some(result.clone()));
            queue.is_writing = false;
            self.written.notify_all();
        }
    }

    fn manifests(&self) -> Result<Vec<(Manifest, u64)>> {
        let transaction = self.database.begin_read().map_err(database_error)?;
        let objects = transaction.open_table(OBJECTS_TABLE).map_err(database_error)?;
        let mut found = HashMap::new();
        for record in objects.iter().map_err(database_error)? {
            let (mark, record) = record.map_err(database_error)?;
            let (text, inline) = split_record(record.value());
            let manifest: Manifest = serde_json::from_slice(text).map_err(|error| {
                let why = format!(
                    "the record of staged file {}: {error}; a newer release may have written this",
                    mark.value()
                );
                Error::new(ErrorKind::Invalid, why)
            })?;
            found.insert(mark.value().to_owned(), (manifest, inline.len() as u64));
        }
        Ok(found.into_values().collect())
    }

    fn read_inline(&self, record: &str) -> Result<Vec<u8>> {
        let transaction = self.database.begin_read().map_err(database_error)?;
        let objects = transaction.open_table(OBJECTS_TABLE).map_err(database_error)?;
        let found = objects.get(record).map_err(database_error)?;
        Ok(inline_of(found.ok_or_else(|| no_record(record))?.value()).to_vec())
    }

    fn identity(&self) -> Result<u64> {
        let transaction = self.database.begin_read().map_err(database_error)?;
        let facts = transaction.open_table(FACTS_TABLE).map_err(database_error)?;
        Ok(facts.get(IDENTITY).map_err(database_error)?.map_or(0, |identity| identity.value()))
    }

    fn term(&self) -> Result<u64> {
        let transaction = self.database.begin_read().map_err(database_error)?;
        let facts = transaction.open_table(FACTS_TABLE).map_err(database_error)?;
        Ok(facts.get("term").map_err(database_error)?.map_or(0, |term| term.value()))
    }
}

impl FolderDisk {
    fn copy_part(&self, old: &str, new: &str) -> Result<()> {
        let part = self.open_part(old)?;
        let mut copy = self.begin_part(new)?;
        let mut at = 0;
        let mut bytes = vec![0; PART_CHUNK as usize];
        while at < part.len {
            let bytes = &mut bytes[..(part.len - at).min(PART_CHUNK) as usize];
            part.read(at, bytes)?;
            copy.append(bytes)?;
            at += bytes.len() as u64;
        }
        copy.finish()
    }
}

#[cfg(test)]
mod tests;
