//! The processes that a suite starts beside mounts and nodes, each a ceiling or a load: the orders in JSON, and the line of JSON
//! with which a load reports its figures.

mod blocks;
mod null;
mod objects;
mod store;
mod transport;

use crate::engine::pattern::{FileAccess, FileList, FilePattern, UNKNOWN_LEN};
use crate::engine::{CrewRun, to_the_end};
use crate::error::{BenchError, FileContext as _, Result};
use crate::scratch::{file_name, fill_pattern};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::fs::File;
use std::io::Write as _;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Bytes that are read of a file of [`FolderPass::Open`].
const OPENED_BYTES: usize = 4096;

/// What a part is ordered to do.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "kebab-case")]
pub enum PartOrder {
    /// Mount the empty file system in memory.
    Null(NullPart),
    /// Serve blocks from memory.
    Serve {
        addr: SocketAddr,
        /// Memory that holds the blocks.
        bytes: u64,
        wire: BlockWire,
    },
    /// Receive blocks, and drop all.
    Sink { addr: SocketAddr },
    /// Read blocks from a server, or write to a sink.
    Blocks(BlockPart),
    /// Fill an empty block store, and read the blocks; each connection is a thread.
    Store { dir: PathBuf, reads: BlockPart },
    /// Read objects through the origin crate alone.
    Fetch(FetchPart),
    /// Write objects to a bucket, without a file system; the environment names the server and the key.
    Put(PutPart),
    /// Read, open or stat every file of a folder.
    ReadFolder {
        dir: PathBuf,
        threads: usize,
        pass: FolderPass,
        /// Files that are known by name, without a listing.
        named: Option<usize>,
    },
    /// Make files: create, write, close.
    MakeFiles {
        /// The folder and the start of the names.
        prefix: PathBuf,
        threads: usize,
        files: usize,
        bytes: u64,
        /// Sync each file before the close.
        sync: bool,
    },
    /// Append to a new file, by O_APPEND.
    Append {
        path: PathBuf,
        appends: u64,
        /// Bytes of each.
        bytes: u64,
    },
}

/// What happens with each file of a folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum FolderPass {
    /// Looked up.
    Stat,
    /// Opened, and 4 KiB read.
    Open,
    /// Read to the end.
    Read,
}

/// The empty file system.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct NullPart {
    pub at: PathBuf,
    /// `dev` or `uring`.
    pub io: String,
    pub len: u64,
    /// Memory that holds the bytes.
    pub held: u64,
    /// Accepts writes and drops the bytes.
    pub writable: bool,
}

/// How blocks travel.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BlockWire {
    /// Request by request, without frames.
    #[default]
    Bare,
    /// Through the transport, over TCP.
    Tcp,
    /// Through the transport, over TCP with a group token and TLS.
    Tls,
    /// Through the transport, over the RDMA device of this host that has this address.
    Rdma(IpAddr),
}

/// A reader or writer of blocks.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(default)]
pub struct BlockPart {
    pub addr: SocketAddr,
    pub wire: BlockWire,
    /// Writes instead of reads.
    pub write: bool,
    /// Connections, a thread each.
    pub connections: usize,
    /// Concurrent requests on each.
    pub depth: usize,
    pub block: u64,
    /// Range of the server's memory.
    pub bytes: u64,
    pub random: bool,
    /// How long, in milliseconds.
    pub time_ms: u64,
}

impl Default for BlockPart {
    fn default() -> Self {
        BlockPart {
            addr: SocketAddr::from(([127, 0, 0, 1], 0)),
            wire: BlockWire::Bare,
            write: false,
            connections: 1,
            depth: 1,
            block: 1 << 20,
            bytes: 512 << 20,
            random: false,
            time_ms: 1000,
        }
    }
}

/// A plain client that reads objects.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct FetchPart {
    /// The source, as mount takes it.
    pub source: String,
    /// An object, which is read by ranges of 4 MiB; or a folder, whose objects are written to files.
    pub path: String,
    /// Where to write the objects of a folder.
    pub to: Option<PathBuf>,
    /// Threads, each with a range or an object at a time.
    pub threads: usize,
}

/// A plain client that writes objects.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct PutPart {
    pub bucket: String,
    /// The start of the keys.
    pub prefix: String,
    /// Objects on the way at once.
    pub threads: usize,
    pub files: usize,
    pub bytes: u64,
}

/// The figures of a load, as a line of JSON.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct PartFigures {
    /// The length.
    pub seconds: f64,
    /// Blocks, files or objects.
    pub ops: u64,
    pub bytes: u64,
}

impl<T> From<CrewRun<T>> for PartFigures {
    fn from(run: CrewRun<T>) -> Self {
        PartFigures { seconds: run.seconds, ops: run.items, bytes: run.bytes }
    }
}

/// Runs a part until the end; servers and mounts run until this process is ended.
pub fn run(order: &str) -> Result<()> {
    let order = serde_json::from_str(order).map_err(|e| BenchError::Usage(format!("the order of a part: {e}")))?;
    let figures = match order {
        PartOrder::Null(part) => return null::mount(&part),
        PartOrder::Serve { addr, bytes, wire } => return blocks::serve(addr, bytes, wire),
        PartOrder::Sink { addr } => return blocks::serve_sink(addr),
        PartOrder::Blocks(part) => blocks::run(&part)?,
        PartOrder::Store { dir, reads } => store::run(&dir, &reads)?,
        PartOrder::Fetch(part) => objects::fetch(&part)?,
        PartOrder::Put(part) => objects::put(&part)?,
        PartOrder::ReadFolder { dir, threads, pass, named } => read_folder(&dir, threads, pass, named)?,
        PartOrder::MakeFiles { prefix, threads, files, bytes, sync } => {
            make_files(&prefix, threads, files, bytes, sync)?
        }
        PartOrder::Append { path, appends, bytes } => append(&path, appends, bytes)?,
    };
    println!("{}", json!(figures));
    Ok(())
}

/// Announces to the suite that a server is ready.
fn print_ready(what: impl std::fmt::Display) {
    println!("ready {what}");
}

/// Sleeps until the process is ended from outside.
fn serve_for_ever() -> ! {
    loop {
        std::thread::sleep(Duration::from_secs(3600));
    }
}

/// Lists a folder, unless the names are known, then passes over the files; the time is that of both.
fn read_folder(dir: &Path, threads: usize, pass: FolderPass, named: Option<usize>) -> Result<PartFigures> {
    let start = Instant::now();
    let paths = match named {
        Some(count) => (0..count).map(|number| dir.join(file_name(number))).collect(),
        None => {
            let listed = std::fs::read_dir(dir).in_file(dir)?.map(|entry| Ok(entry.in_file(dir)?.path()));
            listed.collect::<Result<Vec<_>>>()?
        }
    };
    let listed = start.elapsed().as_secs_f64();
    let access = match pass {
        FolderPass::Stat => FileAccess::Stat { present: true },
        FolderPass::Open => FileAccess::Read { piece: OPENED_BYTES, cold: false, to_end: false },
        FolderPass::Read => FileAccess::Read { piece: 1 << 20, cold: false, to_end: true },
    };
    let len = if pass == FolderPass::Open { OPENED_BYTES as u64 } else { UNKNOWN_LEN };
    let list = FileList::of_files(paths.into_iter().map(|path| (path, len)));
    let figures = PartFigures::from(FilePattern::of_list(list, threads, access).run(to_the_end)?);
    Ok(PartFigures { seconds: listed + figures.seconds, ..figures })
}

fn make_files(prefix: &Path, threads: usize, files: usize, bytes: u64, sync: bool) -> Result<PartFigures> {
    let list = FileList::of_files((0..files).map(|number| (numbered_path(prefix, number), bytes)));
    let access = FileAccess::Write { piece: bytes as usize, sync, rename: false };
    Ok(FilePattern::of_list(list, threads, access).run(to_the_end)?.into())
}

fn append(path: &Path, appends: u64, bytes: u64) -> Result<PartFigures> {
    let piece = made_content(bytes);
    let start = Instant::now();
    let mut file = File::options().append(true).create_new(true).open(path).in_file(path)?;
    (0..appends).try_for_each(|_| file.write_all(&piece)).in_file(path)?;
    drop(file);
    Ok(PartFigures { seconds: start.elapsed().as_secs_f64(), ops: appends, bytes: appends * bytes })
}

/// The path of a file of [`PartOrder::MakeFiles`], or the key of an object of [`PutPart`].
pub fn numbered_path(prefix: &Path, number: usize) -> PathBuf {
    let mut path = prefix.as_os_str().to_owned();
    path.push(number.to_string());
    path.into()
}

/// The bytes of each file of [`PartOrder::MakeFiles`], and of each object of [`PutPart`].
pub fn made_content(bytes: u64) -> Vec<u8> {
    let mut content = vec![0; bytes as usize];
    fill_pattern(0, 0, &mut content);
    content
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_made_read_and_looked_up() {
        let dir = tempfile::tempdir().unwrap();
        let prefix = dir.path().join("f");
        let made = make_files(&prefix, 3, 50, 5000, true).unwrap();
        assert_eq!((made.ops, made.bytes), (50, 250_000));
        assert_eq!(std::fs::read(numbered_path(&prefix, 49)).unwrap(), made_content(5000));
        assert!(make_files(&prefix, 1, 1, 10, false).is_err(), "it is there");
        let other = tempfile::tempdir().unwrap();
        let appended = other.path().join("a");
        assert_eq!(append(&appended, 30, 4).unwrap().ops, 30);
        assert_eq!(std::fs::read(&appended).unwrap(), made_content(4).repeat(30));
        for (pass, bytes) in [(FolderPass::Read, 5000), (FolderPass::Stat, 5000), (FolderPass::Open, 4096)] {
            let read = read_folder(dir.path(), 4, pass, None).unwrap();
            assert_eq!((read.ops, read.bytes), (50, 50 * bytes));
        }
        std::fs::rename(numbered_path(&prefix, 0), dir.path().join(file_name(0))).unwrap();
        assert_eq!(read_folder(dir.path(), 1, FolderPass::Stat, Some(1)).unwrap().ops, 1);
        assert!(read_folder(dir.path(), 1, FolderPass::Stat, Some(2)).is_err());
        assert!(read_folder(Path::new("/no/such/dir"), 1, FolderPass::Read, None).is_err());
        assert!(run("{\"do\":\"nothing\"}").unwrap_err().to_string().contains("read-folder"));
    }
}
