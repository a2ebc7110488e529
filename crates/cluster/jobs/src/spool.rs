//! The files of a job on disk, one after another, so that millions of them cost no memory, totals are known early, and
//! a restarted job goes on where it was.

use spurline_types::{Attr, Error, ErrorKind, Result, Version};
use std::fs::File;
use std::io::{BufRead, BufReader, BufWriter, Read, Write};

/// The longest path or version a record may have: what is longer is no record of ours.
const LONGEST: u32 = 1 << 20;

/// One file to work on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Record {
    /// Below the source.
    pub path: Vec<u8>,
    /// What is known of it.
    pub version: Version,
    /// In bytes.
    pub size: u64,
}

impl Record {
    pub(crate) fn new(path: Vec<u8>, attr: &Attr) -> Self {
        Record { path, version: attr.version.clone(), size: attr.size }
    }
}

fn failed(error: std::io::Error) -> Error {
    Error::io("the list of the job's files", &error)
}

/// Writes records.
pub(crate) struct Writer(BufWriter<File>);

impl Writer {
    pub(crate) fn new(file: File) -> Self {
        Writer(BufWriter::new(file))
    }

    pub(crate) fn push(&mut self, record: &Record) -> Result<()> {
        let mut put = |bytes: &[u8]| {
            let len = u32::try_from(bytes.len()).unwrap_or(u32::MAX).to_le_bytes();
            self.0.write_all(&len).and_then(|()| self.0.write_all(bytes))
        };
        put(&record.path)
            .and_then(|()| put(record.version.as_str().as_bytes()))
            .and_then(|()| self.0.write_all(&record.size.to_le_bytes()))
            .map_err(failed)
    }

    /// What was pushed can be read from now on.
    pub(crate) fn flush(&mut self) -> Result<()> {
        self.0.flush().map_err(failed)
    }
}

/// Reads records in the order they were written.
pub(crate) struct Reader(BufReader<File>);

impl Reader {
    pub(crate) fn new(file: File) -> Self {
        Reader(BufReader::new(file))
    }

    /// The next record; `None` at the end.
    pub(crate) fn next(&mut self) -> Result<Option<Record>> {
        if self.0.fill_buf().map_err(failed)?.is_empty() {
            return Ok(None);
        }
        let path = self.bytes()?;
        let version = String::from_utf8(self.bytes()?).map_err(|_| {
            Error::new(ErrorKind::Corrupt, "the list of the job's files is damaged: a version is no text")
        })?;
        let mut size = [0; 8];
        self.0.read_exact(&mut size).map_err(failed)?;
        Ok(Some(Record { path, version: Version::new(&version), size: u64::from_le_bytes(size) }))
    }

    fn bytes(&mut self) -> Result<Vec<u8>> {
        let mut len = [0; 4];
        self.0.read_exact(&mut len).map_err(failed)?;
        let len = u32::from_le_bytes(len);
        if len > LONGEST {
            let why = format!("the list of the job's files is damaged: a name of {len} bytes");
            return Err(Error::new(ErrorKind::Corrupt, why));
        }
        let mut bytes = vec![0; len as usize];
        self.0.read_exact(&mut bytes).map_err(failed)?;
        Ok(bytes)
    }
}
