//! The file list of a job on disk: millions of files cost no memory, totals are known early, and a restarted job
//! resumes.

use spurline_types::{Error, ErrorKind, ObjectAttr, Result, Version};
use std::fs::File;
use std::io::{BufRead, BufReader, BufWriter, Read, Write};
use std::path::Path;

/// Maximum length of a path or version; longer means a corrupt record.
const MAX_FIELD_BYTES: u32 = 1 << 20;

/// A file of the list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FileRecord {
    /// Path below the source.
    pub path: Vec<u8>,
    pub version: Version,
    /// The length in bytes.
    pub size: u64,
}

impl FileRecord {
    pub(crate) fn new(path: Vec<u8>, attr: &ObjectAttr) -> Self {
        FileRecord { path, version: attr.version.clone(), size: attr.size }
    }
}

fn list_error(error: std::io::Error) -> Error {
    Error::io("the list of the job's files", &error)
}

/// A list that cannot be made or opened.
pub(crate) fn list_file_error(list: &Path, error: &std::io::Error) -> Error {
    // For an unnamed list, the link shows its directory.
    let shown = std::fs::read_link(list).unwrap_or_else(|_| list.to_owned());
    Error::io(shown.display(), error)
}

/// Writes records.
pub(crate) struct ListWriter(BufWriter<File>);

impl ListWriter {
    pub(crate) fn new(file: File) -> Self {
        ListWriter(BufWriter::new(file))
    }

    pub(crate) fn push(&mut self, record: &FileRecord) -> Result<()> {
        let mut put = |bytes: &[u8]| {
            let len = u32::try_from(bytes.len()).unwrap_or(u32::MAX).to_le_bytes();
            self.0.write_all(&len).and_then(|()| self.0.write_all(bytes))
        };
        put(&record.path)
            .and_then(|()| put(record.version.as_str().as_bytes()))
            .and_then(|()| self.0.write_all(&record.size.to_le_bytes()))
            .map_err(list_error)
    }

    /// Makes all pushed records readable.
    pub(crate) fn flush(&mut self) -> Result<()> {
        self.0.flush().map_err(list_error)
    }
}

/// Reads records in write order.
pub(crate) struct ListReader(BufReader<File>);

impl ListReader {
    pub(crate) fn new(file: File) -> Self {
        ListReader(BufReader::new(file))
    }

    /// The next record; `None` at the end.
    pub(crate) fn next(&mut self) -> Result<Option<FileRecord>> {
        if self.0.fill_buf().map_err(list_error)?.is_empty() {
            return Ok(None);
        }
        let path = self.read_bytes()?;
        let version = String::from_utf8(self.read_bytes()?).map_err(|_| {
            Error::new(ErrorKind::Corrupt, "the file list of the job is damaged: a version is not UTF-8")
        })?;
        let mut size = [0; 8];
        self.0.read_exact(&mut size).map_err(list_error)?;
        Ok(Some(FileRecord { path, version: Version::new(&version), size: u64::from_le_bytes(size) }))
    }

    fn read_bytes(&mut self) -> Result<Vec<u8>> {
        let mut len = [0; 4];
        self.0.read_exact(&mut len).map_err(list_error)?;
        let len = u32::from_le_bytes(len);
        if len > MAX_FIELD_BYTES {
            let why = format!("the file list of the job is damaged: a name of {len} bytes");
            return Err(Error::new(ErrorKind::Corrupt, why));
        }
        let mut bytes = vec![0; len as usize];
        self.0.read_exact(&mut bytes).map_err(list_error)?;
        Ok(bytes)
    }
}
