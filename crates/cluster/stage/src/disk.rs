//! Staged objects on the disks of a node. [`FolderDisk`] is the real one. Everything that a call has returned is there
//! after a loss of power.
//!
//! A part is a file (`part_file.rs`). Manifests, with the bytes of small objects, are records of a database; all changes that wait are
//! written by a single transaction.

mod part_file;

use crate::manifest::Manifest;
use parking_lot::{Condvar, Mutex};
use part_file::{NewPart, OpenPart, TransferBuffers, disk_error, sync_folder};
use redb::{Database, ReadableDatabase as _, ReadableTable as _, TableDefinition, WriteTransaction};
use spurline_sys::random;
use spurline_types::{Error, ErrorKind, Result};
use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// The folder below a cache directory, and the database there.
const STAGE_FOLDER: &str = "stage";
const RECORDS_FILE: &str = "records.redb";
/// Memory of the database's pages.
const RECORD_PAGES: usize = 8 << 20;

/// In each folder: tells whether the disk of the folder is still the same.
const FOLDER_FILE: &str = "folder-id";
/// By record: the checksum of all that follows and the length of the manifest in four bytes each, the manifest, and the bytes of a small
/// object.
const OBJECTS_TABLE: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("objects");
/// The key of the disk's identity among the facts.
const IDENTITY: &str = "identity";
/// The begin of the keys of folders among the facts.
const FOLDER: &str = "folder ";
/// The newest term by "term", the identity, and the folders.
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
    /// Something that was on the disks is lost: another identity tells that.
    ///
    /// # Errors
    /// The disk's.
    fn note_loss(&self) -> Result<()>;
    /// A number that was drawn when the disks were empty: another number tells that something was lost.
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

fn damaged_record(record: &str) -> Error {
    Error::new(ErrorKind::Corrupt, format!("the record of staged file {record} has another checksum than was written"))
}

impl FolderDisk {
    /// Whether there are records of staged files below these folders.
    pub fn has_records(below: &[PathBuf]) -> bool {
        below.iter().any(|folder| has_records(&folder.join(STAGE_FOLDER)))
    }

    /// Opens or makes the folders `stage` below these folders. The records lie in the folder that was the first at the begin.
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
        let Some(place) = folders.iter().find(|folder| has_records(folder)).or(folders.first()) else {
            return Err(Error::new(ErrorKind::Invalid, "staged files need a cache disk"));
        };
        let path = place.join(RECORDS_FILE);
        let database = Database::builder().set_cache_size(RECORD_PAGES).create(&path);
        let database =
            database.map_err(|error| Error::new(ErrorKind::Invalid, format!("{}: {error}", path.display())))?;
        let transaction = database.begin_write().map_err(database_error)?;
        transaction.open_table(OBJECTS_TABLE).map_err(database_error)?;
        note_folders(&transaction, &folders)?;
        transaction.commit().map_err(database_error)?;
        sync_folder(place)?;
        Ok(FolderDisk { folders, database, queue: Mutex::default(), written: Condvar::new(), buffers: Arc::default() })
    }

    /// The file of a new part: its name decides the folder.
    fn new_path(&self, part: &str) -> PathBuf {
        let folder = crc32c::crc32c(part.as_bytes()) as usize % self.folders.len();
        part_path(&self.folders[folder], part)
    }

    /// The file of a part: a further name lies beside the first, and there may be more folders than when the part was made.
    fn path_of(&self, part: &str) -> PathBuf {
        let path = self.new_path(part);
        if self.folders.len() == 1 || path.exists() {
            return path;
        }
        let mut others = self.folders.iter().map(|folder| part_path(folder, part));
        others.find(|other| other.exists()).unwrap_or(path)
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
                            // Readers find damaged bytes by the length.
                            None => {
                                let found = objects.get(manifest.record.as_str()).map_err(database_error)?;
                                let found = found.and_then(|found| Some(split_record(found.value())?.1.to_vec()));
                                found.unwrap_or_default()
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

fn has_records(folder: &Path) -> bool {
    folder.join(RECORDS_FILE).exists()
}

fn part_path(folder: &Path, part: &str) -> PathBuf {
    folder.join(format!("{part}.part"))
}

/// Compares the folders with those of the records: if a folder is lost, the disks have another identity.
fn note_folders(transaction: &WriteTransaction, folders: &[PathBuf]) -> Result<()> {
    let found: BTreeSet<String> = folders.iter().map(|folder| folder_key(folder)).collect::<Result<_>>()?;
    let mut facts = transaction.open_table(FACTS_TABLE).map_err(database_error)?;
    let mut lost = BTreeSet::new();
    for fact in facts.iter().map_err(database_error)? {
        let (key, _) = fact.map_err(database_error)?;
        if key.value().starts_with(FOLDER) && !found.contains(key.value()) {
            lost.insert(key.value().to_owned());
        }
    }
    let is_new = facts.get(IDENTITY).map_err(database_error)?.is_none();
    if is_new || !lost.is_empty() {
        facts.insert(IDENTITY, random()).map_err(database_error)?;
    }
    if !lost.is_empty() {
        tracing::warn!("{} folders with staged files are lost: other nodes send their files again", lost.len());
    }
    for key in &lost {
        facts.remove(key.as_str()).map_err(database_error)?;
    }
    for key in &found {
        facts.insert(key.as_str(), 0).map_err(database_error)?;
    }
    Ok(())
}

/// The key of a folder among the facts; a new folder gets a key.
fn folder_key(folder: &Path) -> Result<String> {
    let path = folder.join(FOLDER_FILE);
    let kept = std::fs::read_to_string(&path).ok().and_then(|text| text.trim().parse::<u64>().ok());
    let id = kept.unwrap_or_else(random);
    if kept.is_none() {
        let written = File::create(&path).and_then(|mut file| {
            writeln!(file, "{id}")?;
            file.sync_all()
        });
        written.map_err(|error| disk_error(&path, &error))?;
        sync_folder(folder)?;
    }
    Ok(format!("{FOLDER}{id}"))
}

fn record_of(manifest: &Manifest, bytes: &[u8]) -> Result<Vec<u8>> {
    let text = serde_json::to_vec(manifest).map_err(database_error)?;
    let rest = [&(text.len() as u32).to_le_bytes(), &text[..], bytes].concat();
    Ok([&crc32c::crc32c(&rest).to_le_bytes(), &rest[..]].concat())
}

/// The two halves of a record; `None` if a byte is damaged.
fn split_record(record: &[u8]) -> Option<(&[u8], &[u8])> {
    let (sum, rest) = record.split_first_chunk::<4>()?;
    if crc32c::crc32c(rest).to_le_bytes() != *sum {
        return None;
    }
    let (len, rest) = rest.split_first_chunk::<4>()?;
    rest.split_at_checked(u32::from_le_bytes(*len) as usize)
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
        Ok(Box::new(NewPart::create(self.new_path(name), &self.buffers)?))
    }

    fn read_part(&self, name: &str, from: u64, out: &mut [u8]) -> Result<()> {
        self.open_part(name)?.read(from, out)
    }

    fn part_len(&self, name: &str) -> Result<u64> {
        Ok(self.open_part(name)?.len)
    }

    fn link_parts(&self, names: &[(String, String)]) -> Result<()> {
        let mut touched: BTreeSet<PathBuf> = BTreeSet::new();
        for (old, new) in names {
            let from = self.path_of(old);
            let Some(folder) = from.parent() else { continue };
            match std::fs::hard_link(&from, part_path(folder, new)) {
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
                linked => linked.map_err(|error| disk_error(&from, &error))?,
            }
            touched.insert(folder.to_owned());
        }
        touched.iter().try_for_each(|folder| sync_folder(folder))
    }

    fn remove_part(&self, name: &str) -> Result<()> {
        let mut result = Ok(());
        for folder in &self.folders {
            let path = part_path(folder, name);
            match std::fs::remove_file(&path) {
                // A folder that can't be changed may not have the part.
                Err(error) if path.exists() => result = Err(disk_error(&path, &error)),
                _ => {}
            }
        }
        result
    }

    fn parts(&self) -> Result<Vec<KeptPart>> {
        let mut parts = Vec::new();
        let now = SystemTime::now();
        for folder in &self.folders {
            let listed = std::fs::read_dir(folder).map_err(|error| disk_error(folder, &error))?;
            for entry in listed {
                let entry = entry.map_err(|error| disk_error(folder, &error))?;
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
        let mut damaged = Vec::new();
        for record in objects.iter().map_err(database_error)? {
            let (mark, record) = record.map_err(database_error)?;
            let Some((text, inline)) = split_record(record.value()) else {
                tracing::error!("the record of staged file {} is damaged: another node has to send that", mark.value());
                damaged.push(RecordChange::Remove(mark.value().to_owned()));
                continue;
            };
            let manifest: Manifest = serde_json::from_slice(text).map_err(|error| {
                let why = format!(
                    "the record of staged file {}: {error}; a newer release may have written this",
                    mark.value()
                );
                Error::new(ErrorKind::Invalid, why)
            })?;
            found.insert(mark.value().to_owned(), (manifest, inline.len() as u64));
        }
        if !damaged.is_empty() {
            self.note_loss()?;
            self.change_records(damaged)?;
        }
        Ok(found.into_values().collect())
    }

    fn read_inline(&self, record: &str) -> Result<Vec<u8>> {
        let transaction = self.database.begin_read().map_err(database_error)?;
        let objects = transaction.open_table(OBJECTS_TABLE).map_err(database_error)?;
        let found = objects.get(record).map_err(database_error)?;
        let found = found.ok_or_else(|| no_record(record))?;
        let (_, inline) = split_record(found.value()).ok_or_else(|| damaged_record(record))?;
        Ok(inline.to_vec())
    }

    fn note_loss(&self) -> Result<()> {
        let transaction = self.database.begin_write().map_err(database_error)?;
        transaction
            .open_table(FACTS_TABLE)
            .map_err(database_error)?
            .insert(IDENTITY, random())
            .map_err(database_error)?;
        transaction.commit().map_err(database_error)
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

#[cfg(test)]
mod tests;
