//! The processes that a suite starts beside mounts and nodes, each a ceiling or a load: command lines, and the JSON line with
//! which a reader reports figures.

mod bare;
mod copy;
mod files;
mod null;
mod origin;
mod put;
mod store;
mod transport;
mod write;

pub(crate) use write::written_block;

use crate::error::{BenchError, Result};
use serde_json::json;
use spurline_types::Size;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The part to run.
#[derive(Debug, clap::Subcommand)]
pub enum SuitePart {
    /// Mount the empty in-memory file system
    Null(NullPart),
    /// Serve blocks from memory, request by request, without framing
    BareServe(ServePart),
    /// Read from bare-serve
    BareRead(ReadPart),
    /// Receive blocks and drop them
    BareSink(SinkPart),
    /// Send blocks to bare-sink
    BareWrite(ReadPart),
    /// Serve blocks from memory through the transport
    TransportServe(TransportServePart),
    /// Read from transport-serve
    TransportRead(TransportReadPart),
    /// Read or stat every file of a folder
    Files(FilesPart),
    /// Write files in sequence, each by a thread of its own
    Write(WritePart),
    /// Make files: create, write, close
    Create(CreatePart),
    /// Fill a block store, if it is empty, and read its blocks
    Store(StorePart),
    /// Read one object with parallel ranges, through the origin crate alone
    Under(OriginPart),
    /// Write objects to a bucket, without a file system
    Put(PutPart),
    /// Copy every file of a folder, through the origin crate alone
    Copy(CopyPart),
    /// Be the ranks of one host: orders on standard input
    CheckpointWorker,
}

/// The empty file system.
#[derive(Debug, clap::Args)]
pub struct NullPart {
    /// Where to mount it
    pub mountpoint: PathBuf,
    /// dev or uring
    #[arg(long, default_value = "dev")]
    pub io: String,
    /// Length of its one file
    #[arg(long, default_value = "4G")]
    pub size: Size,
    /// Memory that holds its bytes
    #[arg(long, default_value = "1M")]
    pub held: Size,
    /// Accept writes and drop them
    #[arg(long)]
    pub writable: bool,
}

/// A server of blocks.
#[derive(Debug, clap::Args)]
pub struct ServePart {
    /// Where to listen
    pub addr: SocketAddr,
    /// Memory that holds the blocks
    #[arg(long, default_value = "512M")]
    pub size: Size,
}

/// A server that drops what it gets.
#[derive(Debug, clap::Args)]
pub struct SinkPart {
    /// Where to listen
    pub addr: SocketAddr,
}

/// A writer of files.
#[derive(Debug, clap::Args)]
pub struct WritePart {
    /// The files, a thread each
    #[arg(required = true)]
    pub files: Vec<PathBuf>,
    /// Bytes per write
    #[arg(long, default_value = "1M")]
    pub block: Size,
    /// Length of each file; it is written again and again
    #[arg(long, default_value = "256M")]
    pub size: Size,
    /// Sync after each write
    #[arg(long)]
    pub sync: bool,
    /// How long
    #[arg(long, default_value = "1s", value_parser = spurline_types::parse_duration)]
    pub time: Duration,
}

/// A maker of many files.
#[derive(Debug, clap::Args)]
pub struct CreatePart {
    /// The folder, without such files
    pub dir: PathBuf,
    /// Threads
    #[arg(long, default_value_t = 1)]
    pub threads: usize,
    /// Number of files
    #[arg(long, default_value_t = 1000)]
    pub files: usize,
    /// Bytes of each
    #[arg(long, default_value = "4K")]
    pub size: Size,
    /// What their names begin with
    #[arg(long, default_value = "f")]
    pub prefix: String,
}

/// A writer of objects; the environment names the server and the key.
#[derive(Debug, clap::Args)]
pub struct PutPart {
    /// The bucket
    pub bucket: String,
    /// Objects on the way at once
    #[arg(long, default_value_t = 1)]
    pub threads: usize,
    /// Number of objects
    #[arg(long, default_value_t = 1)]
    pub files: usize,
    /// Bytes of each
    #[arg(long, default_value = "64M")]
    pub size: Size,
    /// Bytes of a part; a smaller object is one request
    #[arg(long, default_value = "8M")]
    pub part: Size,
    /// What their keys begin with
    #[arg(long, default_value = "f")]
    pub prefix: String,
}

/// A reader of blocks.
#[derive(Debug, Clone, clap::Args)]
pub struct ReadPart {
    /// Where the server listens
    pub addr: SocketAddr,
    /// Connections, a thread each
    #[arg(long, default_value_t = 1)]
    pub connections: usize,
    /// Concurrent requests on each
    #[arg(long, default_value_t = 1)]
    pub depth: usize,
    /// Bytes per request
    #[arg(long, default_value = "1M")]
    pub block: Size,
    /// Range of the server's memory that is read
    #[arg(long, default_value = "512M")]
    pub size: Size,
    /// In random order
    #[arg(long)]
    pub random: bool,
    /// How long
    #[arg(long, default_value = "1s", value_parser = spurline_types::parse_duration)]
    pub time: Duration,
}

/// How the channels of the transport alone carry their bytes.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct TransportWire {
    /// TCP with a group token and TLS
    #[arg(long)]
    pub tls: bool,
    /// RDMA, over the device of this host that has this address
    #[arg(long, conflicts_with = "tls")]
    pub rdma: Option<IpAddr>,
}

/// A server of blocks through the transport.
#[derive(Debug, clap::Args)]
pub struct TransportServePart {
    /// Its address and memory.
    #[command(flatten)]
    pub serve: ServePart,
    /// Its wire.
    #[command(flatten)]
    pub wire: TransportWire,
}

/// A reader of blocks through the transport. Over RDMA each of its concurrent requests has a channel.
#[derive(Debug, clap::Args)]
pub struct TransportReadPart {
    /// Its requests.
    #[command(flatten)]
    pub read: ReadPart,
    /// Its wire.
    #[command(flatten)]
    pub wire: TransportWire,
}

/// A reader of many files.
#[derive(Debug, clap::Args)]
pub struct FilesPart {
    /// The folder
    pub dir: PathBuf,
    /// Threads
    #[arg(long, default_value_t = 1)]
    pub threads: usize,
    /// Only stat them
    #[arg(long)]
    pub stat: bool,
    /// Passes over the folder, each with its own figures
    #[arg(long, default_value_t = 1)]
    pub passes: usize,
}

/// A reader of a block store.
#[derive(Debug, clap::Args)]
pub struct StorePart {
    /// The cache directory
    pub dir: PathBuf,
    /// Threads, each with one read at a time
    #[arg(long, default_value_t = 8)]
    pub depth: usize,
    /// Bytes per read
    #[arg(long, default_value = "1M")]
    pub block: Size,
    /// Bytes of blocks in the store
    #[arg(long, default_value = "2G")]
    pub size: Size,
    /// Blocks in random order
    #[arg(long)]
    pub random: bool,
    /// How long
    #[arg(long, default_value = "1s", value_parser = spurline_types::parse_duration)]
    pub time: Duration,
}

/// A plain client of an origin.
#[derive(Debug, clap::Args)]
pub struct OriginPart {
    /// The source, as mount takes it
    pub source: String,
    /// The object
    pub path: String,
    /// Address of the server
    #[arg(long)]
    pub endpoint_url: Option<String>,
    /// Threads, each with one range at a time
    #[arg(long, default_value_t = 8)]
    pub depth: usize,
    /// Bytes per range
    #[arg(long, default_value = "4M")]
    pub block: Size,
}

/// A plain copy.
#[derive(Debug, clap::Args)]
pub struct CopyPart {
    /// The source, as mount takes it
    pub source: String,
    /// The folder below it
    pub path: String,
    /// Where to copy
    #[arg(long)]
    pub to: PathBuf,
    /// Address of the server
    #[arg(long)]
    pub endpoint_url: Option<String>,
    /// Threads, each with one object at a time
    #[arg(long, default_value_t = 50)]
    pub depth: usize,
}

/// Runs a part until its end.
///
/// # Errors
/// Whatever makes it fail.
pub fn run(part: &SuitePart) -> Result<()> {
    // The suite ends its parts when it ends; started by hand, they run until Ctrl-C.
    match part {
        SuitePart::Null(part) => null::mount(part),
        SuitePart::BareServe(part) => bare::serve(part),
        SuitePart::BareRead(part) => bare::read(part),
        SuitePart::BareSink(part) => bare::serve_sink(part),
        SuitePart::BareWrite(part) => bare::write(part),
        SuitePart::TransportServe(part) => transport::serve(part),
        SuitePart::TransportRead(part) => transport::read(part),
        SuitePart::Files(part) => files::run(part),
        SuitePart::Write(part) => write::write_files(part),
        SuitePart::Create(part) => write::create_files(part),
        SuitePart::Store(part) => store::run(part),
        SuitePart::Under(part) => origin::run(part),
        SuitePart::Put(part) => put::run(part),
        SuitePart::Copy(part) => copy::run(part),
        SuitePart::CheckpointWorker => crate::checkpoint::run_worker(),
    }
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

/// The offsets that a reading thread requests.
struct ReadLane {
    /// Next block of a sequential reader, or the state of a random reader.
    at: u64,
    random: bool,
    blocks: u64,
    block: u64,
}

impl ReadLane {
    fn new(part: &ReadPart, index: usize) -> Self {
        let blocks = (part.size.0 / part.block.0).max(1);
        let share = blocks / part.connections.max(1) as u64;
        let at =
            if part.random { (index as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) } else { share * index as u64 };
        ReadLane { at, random: part.random, blocks, block: part.block.0 }
    }
    fn next_offset(&mut self) -> u64 {
        if self.random {
            // xorshift64: never zero, long enough.
            self.at ^= self.at << 13;
            self.at ^= self.at >> 7;
            self.at ^= self.at << 17;
            (self.at % self.blocks) * self.block
        } else {
            self.at = (self.at + 1) % self.blocks;
            self.at * self.block
        }
    }
}

/// Runs one reader per connection for the configured time and prints their combined figures.
fn read_lanes(part: &ReadPart, lane: impl Fn(usize, &AtomicBool) -> Result<u64> + Sync) -> Result<()> {
    let stop = AtomicBool::new(false);
    let start = Instant::now();
    let answers: u64 = std::thread::scope(|scope| {
        let lanes: Vec<_> = (0..part.connections.max(1))
            .map(|index| {
                let stop = &stop;
                let lane = &lane;
                scope.spawn(move || lane(index, stop))
            })
            .collect();
        std::thread::sleep(part.time);
        stop.store(true, Ordering::Relaxed);
        let mut sum = 0;
        for lane in lanes {
            sum += lane.join().map_err(|_| BenchError::Failed("a reader panicked".into()))??;
        }
        Ok::<u64, BenchError>(sum)
    })?;
    let seconds = start.elapsed().as_secs_f64();
    println!("{}", json!({ "seconds": seconds, "ops": answers, "bytes": answers * part.block.0 }));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_stay_inside() {
        let mut part = ReadPart {
            addr: "127.0.0.1:1".parse().unwrap(),
            connections: 3,
            depth: 1,
            block: Size(4096),
            size: Size(64 << 10),
            random: false,
            time: Duration::ZERO,
        };
        for random in [false, true] {
            part.random = random;
            let mut lane = ReadLane::new(&part, 1);
            let seen: std::collections::BTreeSet<u64> = (0..1000).map(|_| lane.next_offset()).collect();
            assert_eq!(seen.len(), 16);
            assert!(seen.iter().all(|o| o % 4096 == 0 && *o < 64 << 10));
        }
    }
}
