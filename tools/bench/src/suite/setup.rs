//! The elements of sections: mounts, nodes and parts; loads of fio, the places of a load, and samples.

use super::section::SuiteSection;
use crate::child::{self, ServerProcess};
use crate::error::{BenchError, Result};
use crate::fio::FioJob;
use crate::measure::{self, BenchCase, CaseSample, CeilingSpec, FigureUnit, WarmUpResult};
use crate::mount::{CounterValues, MountUnderTest, NodeUnderTest, counter, counter_growth};
use crate::netns::NamespacePair;
use crate::part::{BlockPart, BlockWire, NullPart, PartFigures, PartOrder};
use crate::scratch::{self, ScratchDir, file_name};
use crate::terminal::show_progress;
use crate::workplace::{Workplace, own_program};
use serde_json::json;
use std::cell::Cell;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Longest time of a load that is not limited by a time.
const PART_TIMEOUT: Duration = Duration::from_secs(600);
/// Longest wait for a server to announce itself.
const SERVER_START_TIMEOUT: Duration = Duration::from_secs(30);
/// Memory of a server of blocks.
const SERVED_BYTES: u64 = 512 << 20;

/// The state shared by all sections.
pub struct BenchSuite {
    pub quick: bool,
    /// Samples of each case.
    pub rounds: usize,
    /// Length of a sample.
    pub time: Duration,
    /// The program under test, and the folder in memory.
    pub memory: Workplace,
    /// The folder on the disk.
    pub disk: ScratchDir,
    /// The program with the S3 server.
    pub s3_server: Option<PathBuf>,
    /// Files of the tree that is unpacked.
    pub tree_files: usize,
    /// For names that are used once.
    pub next_number: Cell<usize>,
}

/// A process, the processor time of which is shown with a figure. The times of one role are added.
pub type CpuRole<'a> = (&'static str, &'a ServerProcess);

/// The expected path of the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BytePath {
    /// The kernel read the cached file itself.
    Passthrough,
    /// From blocks in the mount's memory.
    Memory,
    /// Over TCP.
    Tcp,
    /// The kernel wrote the source's file itself.
    WrittenByKernel,
    /// Written through FUSE.
    Written,
    /// Written through FUSE and sent over TCP.
    Sent,
}

/// Requests of several jobs of fio.
pub struct FioLoad {
    /// The name in the table.
    pub name: &'static str,
    /// As fio calls the order.
    pub pattern: &'static str,
    pub block: u64,
    /// Concurrent processes.
    pub jobs: usize,
    /// The least ratio to a ceiling with `CeilingFloor::OfLoad`.
    pub floor: f64,
    pub unit: FigureUnit,
}

impl FioLoad {
    /// Requests in sequence, counted in bytes.
    pub const fn sequential(name: &'static str, pattern: &'static str, block: u64, jobs: usize, floor: f64) -> Self {
        FioLoad { name, pattern, block, jobs, floor, unit: FigureUnit::Bandwidth }
    }

    /// Reads in random order: small reads are counted, larger reads measured in bytes.
    pub const fn random(name: &'static str, block: u64, jobs: usize, floor: f64) -> Self {
        let unit = if block > 64 << 10 { FigureUnit::Bandwidth } else { FigureUnit::Rate };
        FioLoad { name, pattern: "randread", block, jobs, floor, unit }
    }
}

/// An empty file system: variant, label, kind of session, and the memory that answers.
pub type EmptyVariant = (&'static str, &'static str, &'static str, u64);

/// A file system of a section, beside others.
pub struct SuitePlace<'a> {
    pub variant: &'static str,
    /// The name in the table.
    pub label: &'static str,
    /// The folder, or the file that all jobs share.
    pub at: PathBuf,
    pub mount: Option<&'a MountUnderTest>,
    /// The nodes behind the mount.
    pub nodes: Vec<&'a NodeUnderTest>,
    pub roles: Vec<CpuRole<'a>>,
    /// Which way the bytes have to take.
    pub path: Option<BytePath>,
    pub ceilings: &'static [CeilingSpec],
}

impl<'a> SuitePlace<'a> {
    pub fn plain(variant: &'static str, label: &'static str, at: PathBuf) -> Self {
        let nodes = Vec::new();
        SuitePlace { variant, label, at, mount: None, nodes, roles: Vec::new(), path: None, ceilings: &[] }
    }

    /// A mount whose process has this role.
    pub fn mounted(
        variant: &'static str,
        label: &'static str,
        role: &'static str,
        mount: &'a MountUnderTest,
        path: Option<BytePath>,
        ceilings: &'static [CeilingSpec],
    ) -> Self {
        let place = SuitePlace::plain(variant, label, mount.at().to_owned());
        SuitePlace { mount: Some(mount), roles: vec![(role, mount.daemon())], path, ceilings, ..place }
    }

    /// The empty file system, whose file all jobs share.
    pub fn empty(variant: &'static str, label: &'static str, role: &'static str, mount: &'a MountUnderTest) -> Self {
        let at = mount.at().join("data");
        SuitePlace { at, ..SuitePlace::mounted(variant, label, role, mount, None, &[]) }
    }

    /// The same with nodes behind the mount.
    #[must_use]
    pub fn with_nodes(mut self, role: &'static str, nodes: impl IntoIterator<Item = &'a NodeUnderTest>) -> Self {
        self.nodes.extend(nodes);
        self.roles.extend(self.nodes.iter().map(|node| (role, node.daemon())));
        self
    }

    /// The first `count` files of a source there.
    pub fn files(&self, count: usize) -> Vec<PathBuf> {
        if self.at.is_file() { vec![self.at.clone()] } else { (0..count).map(|i| self.at.join(file_name(i))).collect() }
    }

    /// Files for `count` writers there.
    pub fn files_named(&self, name: &str, count: usize) -> Vec<PathBuf> {
        if self.at.is_file() {
            return vec![self.at.clone()];
        }
        (0..count).map(|writer| self.at.join(format!("{name}-{writer}"))).collect()
    }
}

/// The mount, or a note with the reason why there is none.
pub fn optional<T>(notes: &mut Vec<String>, what: &str, started: Result<T>) -> Result<Option<T>> {
    match started {
        Ok(started) => Ok(Some(started)),
        Err(BenchError::Interrupted) => Err(BenchError::Interrupted),
        Err(error) => {
            notes.push(format!("No {what}: {error}"));
            Ok(None)
        }
    }
}

/// Processor seconds of the roles around `work`.
pub fn with_cpu<T>(roles: &[CpuRole<'_>], work: impl FnOnce() -> Result<T>) -> Result<(T, Vec<(&'static str, f64)>)> {
    let before: Vec<f64> = roles.iter().map(|(_, daemon)| daemon.cpu()).collect::<Result<_>>()?;
    let done = work()?;
    let mut used: Vec<(&'static str, f64)> = Vec::new();
    for ((role, daemon), before) in roles.iter().zip(before) {
        let seconds = daemon.cpu()? - before;
        match used.iter_mut().find(|(known, _)| known == role) {
            Some((_, sum)) => *sum += seconds,
            None => used.push((role, seconds)),
        }
    }
    Ok((done, used))
}

/// A run of fio as a sample.
pub fn fio_sample(job: &FioJob, unit: FigureUnit, roles: &[CpuRole<'_>]) -> Result<CaseSample> {
    let ((got, done), mut cpu) = with_cpu(roles, || job.run())?;
    cpu.push((if job.pattern == "write" { "writer" } else { "reader" }, done.cpu));
    let value = match unit {
        FigureUnit::Bandwidth => got.bandwidth,
        FigureUnit::Rate => got.iops,
        FigureUnit::Time => got.max_us / 1e6,
    };
    Ok(CaseSample { value, bytes: got.bytes, ops: got.bytes / job.block.max(1), cpu, latency_us: got.latency_us })
}

/// Whether a mount's counters confirm that `bytes` came by this path; otherwise the reason.
pub fn wrong_path(path: BytePath, bytes: u64, grown: &CounterValues) -> Option<String> {
    let most = bytes / 10 * 9;
    let has = |name: &str, least: u64| counter(grown, name) >= least;
    let (right, names): (bool, &[&str]) = match path {
        BytePath::Passthrough => (
            has("fuse.passthrough_opens", 1) && !has("fuse.read_bytes", bytes / 20),
            &["fuse.passthrough_opens", "fuse.read_bytes"],
        ),
        BytePath::Memory => (
            has("fuse.read_bytes", most) && has("blockcache.mem_hit_bytes", most),
            &["fuse.read_bytes", "blockcache.mem_hit_bytes", "blockcache.disk_hit_bytes", "blockcache.miss_bytes"],
        ),
        BytePath::Tcp => (has("tcp.recv_bytes", most), &["tcp.recv_bytes", "blockcache.mem_hit_bytes"]),
        BytePath::WrittenByKernel => (
            has("fuse.passthrough_opens", 1) && !has("fuse.write_bytes", bytes / 20),
            &["fuse.passthrough_opens", "fuse.write_bytes"],
        ),
        BytePath::Written => (has("fuse.write_bytes", most), &["fuse.write_bytes"]),
        BytePath::Sent => {
            (has("fuse.write_bytes", most) && has("tcp.send_bytes", most), &["fuse.write_bytes", "tcp.send_bytes"])
        }
    };
    if right {
        return None;
    }
    let seen: Vec<String> = names.iter().map(|name| format!("{name} {}", counter(grown, name))).collect();
    Some(format!("{bytes} bytes did not come by {path:?}: {}", seen.join(", ")))
}

impl BenchSuite {
    /// Runs all cases, and returns the section.
    pub fn measure(
        &self,
        name: &'static str,
        title: &'static str,
        cases: Vec<BenchCase<'_>>,
        notes: Vec<String>,
    ) -> Result<SuiteSection> {
        let rows = measure::run_rounds(cases, self.rounds, |what| show_progress(&format!("{name}  {what}")))?;
        Ok(SuiteSection { name, title, skipped: None, notes, rows })
    }

    /// A number that no other call has got.
    pub fn new_number(&self) -> usize {
        self.next_number.replace(self.next_number.get() + 1)
    }

    /// The command of a part of this program, in `net`.
    pub fn part_command(&self, order: &PartOrder, net: Option<&str>) -> Result<Command> {
        let mut command = child::command_in(&own_program()?, net);
        command.arg("part").arg(json!(order).to_string());
        Ok(command)
    }

    /// Starts a part that serves.
    pub fn start_part(&self, name: &str, order: &PartOrder, net: &str) -> Result<ServerProcess> {
        let command = self.part_command(order, Some(net))?;
        let log = self.memory.log(name)?;
        Ok(ServerProcess::start_announcing(command, &["ready"], name, &log, SERVER_START_TIMEOUT)?.0)
    }

    /// Starts a server of blocks.
    pub fn serve_blocks(&self, addr: SocketAddr, wire: BlockWire, net: &str) -> Result<ServerProcess> {
        let order = PartOrder::Serve { addr, bytes: SERVED_BYTES, wire };
        self.start_part(&format!("blocks-{}", addr.port()), &order, net)
    }

    /// A mount of `source` with more arguments.
    pub fn mount(&self, name: &str, source: &Path, net: Option<&str>, words: &[&str]) -> Result<MountUnderTest> {
        self.memory.mount(name, source, net, words, &[])
    }

    /// A node of `source` in the server's namespace.
    pub fn node(&self, pair: &NamespacePair, port: u16, source: &Path, words: &[&str]) -> Result<NodeUnderTest> {
        self.memory.node(source, &pair.server_address(port).to_string(), Some(&pair.server), words, &[])
    }

    /// The empty file system, which has a file of `len` bytes and answers from `held` bytes of memory.
    pub fn mount_empty(&self, io: &str, len: u64, held: u64, writable: bool) -> Result<MountUnderTest> {
        let name = format!("{}-{io}-{held}", if writable { "sink" } else { "null" });
        let at = self.memory.scratch.subdir(&format!("mnt-{name}"))?;
        let order = PartOrder::Null(NullPart { at: at.clone(), io: io.to_owned(), len, held, writable });
        let command = self.part_command(&order, None)?;
        MountUnderTest::start(command, Path::new(""), &at, None, &self.memory.log(&name)?)
    }

    /// Empty file systems that are only read, without those that can't be mounted.
    pub fn mount_empties(
        &self,
        notes: &mut Vec<String>,
        variants: &[EmptyVariant],
    ) -> Result<Vec<(EmptyVariant, MountUnderTest)>> {
        let mut mounted = Vec::new();
        for variant in variants {
            let (_, label, io, held) = *variant;
            let started = optional(notes, label, self.mount_empty(io, 4 << 30, held, false))?;
            mounted.extend(started.map(|mount| (*variant, mount)));
        }
        Ok(mounted)
    }

    /// `N` files of `len` bytes in a directory in memory, made once.
    /// `Missing` without room.
    pub fn make_source(&self, name: &str, files: usize, len: u64) -> Result<PathBuf> {
        let root = self.memory.scratch.path();
        let dir = root.join(name);
        if !dir.exists() {
            let have = scratch::free_bytes(root) >> 20;
            let need = (files as u64 * len * 3) >> 20;
            if have < need {
                let path = root.display();
                return Err(BenchError::Missing(format!(
                    "{path} has {have} MiB free, {need} are needed: see --memory-dir"
                )));
            }
            self.memory.scratch.subdir(name)?;
            (0..files).try_for_each(|i| scratch::write_file(&dir.join(file_name(i)), i as u64, len))?;
        }
        Ok(dir)
    }

    /// A job of fio for the duration of a sample.
    pub fn new_job(&self, files: Vec<PathBuf>, load: &FioLoad, size: u64) -> FioJob {
        let FioLoad { pattern, block, jobs, .. } = *load;
        let runtime = Some(self.time);
        FioJob { files, pattern, block, jobs, size, runtime, direct: pattern != "write", ..FioJob::default() }
    }

    /// A load of fio at a place, with the ceilings and the warm-up that the place has.
    pub fn fio_case<'a>(&'a self, load: &FioLoad, place: &'a SuitePlace<'a>, job: FioJob) -> BenchCase<'a> {
        let unit = load.unit;
        let first = job.clone();
        let take = move || fio_sample(&job, unit, &place.roles);
        let mut case = BenchCase::new(load.name, place.variant, place.label, unit, take);
        case.floor = load.floor;
        let case = case.below(place.ceilings);
        if place.path.is_some() { case.warm(move || self.warm_up(place, &first)) } else { case }
    }

    /// Runs a job once at a mount, unmeasured; returns the counters that grew and whether the bytes took the path of the place.
    pub fn warm_up(&self, place: &SuitePlace<'_>, job: &FioJob) -> Result<WarmUpResult> {
        let runtime = job.runtime.map(|_| Duration::from_millis(300));
        let job = FioJob { runtime, ..job.clone() };
        let counters = || -> Result<(CounterValues, Vec<CounterValues>)> {
            let mount = place.mount.map_or(Ok(CounterValues::new()), MountUnderTest::counters)?;
            Ok((mount, place.nodes.iter().map(|node| node.counters()).collect::<Result<_>>()?))
        };
        let before = counters()?;
        let (got, _) = job.run()?;
        let after = counters()?;
        let mut grown = counter_growth(&before.0, &after.0);
        let wrong = place.path.and_then(|path| wrong_path(path, got.bytes, &grown));
        for (before, after) in before.1.iter().zip(&after.1) {
            for (name, n) in counter_growth(before, after) {
                *grown.entry(format!("node.{name}")).or_default() += n;
            }
        }
        Ok((grown, wrong))
    }

    /// A run of a part as a sample; the processor time of the part has the role `user`.
    pub fn part_sample(
        &self,
        order: &PartOrder,
        net: Option<&str>,
        unit: FigureUnit,
        user: &'static str,
        roles: &[CpuRole<'_>],
    ) -> Result<CaseSample> {
        self.command_sample(self.part_command(order, net)?, unit, user, roles)
    }

    /// The same of the command of a part.
    pub fn command_sample(
        &self,
        command: Command,
        unit: FigureUnit,
        user: &'static str,
        roles: &[CpuRole<'_>],
    ) -> Result<CaseSample> {
        let (done, mut cpu) = with_cpu(roles, || child::run_to_end(command, PART_TIMEOUT))?;
        cpu.push((user, done.cpu));
        let line = done.out.lines().rfind(|line| line.starts_with('{')).unwrap_or_default();
        let PartFigures { seconds, ops, bytes } = serde_json::from_str(line)
            .map_err(|e| BenchError::Failed(format!("a part printed {:?}: {e}", done.out)))?;
        if seconds <= 0.0 || ops == 0 {
            return Err(BenchError::Failed(format!("a part measured nothing: {line}")));
        }
        let value = if unit == FigureUnit::Bandwidth { bytes as f64 } else { ops as f64 } / seconds;
        Ok(CaseSample { value, bytes, ops, cpu, latency_us: None })
    }

    /// A load by a client of blocks without a file system, a connection for each job.
    pub fn block_case<'a>(
        &'a self,
        load: &FioLoad,
        variant: &str,
        label: &str,
        part: BlockPart,
        net: &'a str,
        server: CpuRole<'a>,
    ) -> BenchCase<'a> {
        let unit = load.unit;
        let user = if part.write { "writer" } else { "reader" };
        let order = PartOrder::Blocks(BlockPart {
            connections: load.jobs,
            block: load.block,
            random: load.pattern == "randread",
            time_ms: self.time.as_millis() as u64,
            ..part
        });
        BenchCase::new(load.name, variant, label, unit, move || {
            self.part_sample(&order, Some(net), unit, user, &[server])
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_told_apart() {
        let grown = |pairs: &[(&str, u64)]| pairs.iter().map(|(n, v)| ((*n).to_owned(), *v)).collect::<CounterValues>();
        let passthrough = grown(&[("fuse.passthrough_opens", 1), ("fuse.ops", 4)]);
        assert_eq!(wrong_path(BytePath::Passthrough, 1000, &passthrough), None);
        assert_eq!(wrong_path(BytePath::WrittenByKernel, 1000, &passthrough), None);
        assert!(wrong_path(BytePath::Memory, 1000, &passthrough).is_some());
        let memory = grown(&[("fuse.read_bytes", 1000), ("blockcache.mem_hit_bytes", 1000)]);
        assert_eq!(wrong_path(BytePath::Memory, 1000, &memory), None);
        assert!(wrong_path(BytePath::Passthrough, 1000, &memory).is_some_and(|w| w.contains("passthrough_opens 0")));
        assert_eq!(wrong_path(BytePath::Tcp, 1000, &grown(&[("tcp.recv_bytes", 990)])), None);
        assert!(wrong_path(BytePath::Tcp, 1000, &memory).is_some_and(|w| w.contains("tcp.recv_bytes 0")));
        let written = grown(&[("fuse.write_bytes", 990), ("tcp.send_bytes", 5)]);
        assert_eq!(wrong_path(BytePath::Written, 1000, &written), None);
        assert!(wrong_path(BytePath::Sent, 1000, &written).is_some_and(|w| w.contains("tcp.send_bytes 5")));
    }
}
