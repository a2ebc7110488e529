//! Writes of a lone mount and through a node: long files, many small files, a tree that is unpacked, and syncs. Beside these the
//! bare directory, an empty file system that drops written bytes, and a bare TCP block writer.

use super::section::SuiteSection;
use super::setup::{BenchSuite, BytePath, FioLoad, SuitePlace, optional, with_cpu};
use crate::child::{self, ServerProcess};
use crate::error::{BenchError, FileContext as _, Result};
use crate::fio::{FioJob, WRITTEN_PATTERN};
use crate::measure::{BenchCase, CaseSample, CeilingFloor, CeilingSpec, FigureUnit, best_of, in_turn};
use crate::mount::{MountUnderTest, NodeUnderTest};
use crate::netns::NamespacePair;
use crate::part::{BlockPart, PartOrder, made_content, numbered_path};
use crate::scratch;
use crate::terminal::show_progress;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Length of each long file.
const WRITE_FILE_BYTES: u64 = 256 << 20;
const SMALL_FILE_BYTES: u64 = 4096;
/// Small files: group, threads, and the aim of a node per second.
const SMALL_FILES: [(&str, usize, f64); 2] =
    [("create + write 4 KiB + close, 1 thread", 1, 8_000.0), ("create + write 4 KiB + close, 8 threads", 8, 20_000.0)];
/// Lengths of appends.
const APPENDS: [(&str, u64); 2] = [("append 1 byte", 1), ("append 4 bytes", 4)];
const WRITE_TIMEOUT: Duration = Duration::from_secs(600);
const SINK_PORT: u16 = 7103;
const WRITE_NODE_PORT: u16 = 7104;

const ALONE_LOAD: FioLoad = FioLoad::sequential("1 MiB write, alone", "write", 1 << 20, 1, 0.0);
const NODE_LOADS: [FioLoad; 2] = [
    FioLoad::sequential("1 MiB write through a node, 1 file", "write", 1 << 20, 1, 0.0),
    FioLoad::sequential("1 MiB write through a node, 4 files", "write", 1 << 20, 4, 0.0),
];
const SYNC_LOAD: FioLoad = FioLoad {
    name: "4 KiB write + fsync through a node",
    pattern: "write",
    block: 4096,
    jobs: 1,
    floor: 0.0,
    unit: FigureUnit::Rate,
};

/// A mount alone: variant, label, arguments, the path of the bytes, and ceilings.
type LoneMount = (&'static str, &'static str, &'static [&'static str], BytePath, &'static [CeilingSpec]);

const LONE_MOUNTS: [LoneMount; 3] = [
    (
        "dev",
        "mount, /dev/fuse",
        &["--no-passthrough", "--fuse-io", "dev"],
        BytePath::Written,
        &[
            best_of("of tmpfs", &["tmpfs"], CeilingFloor::None),
            best_of("of empty fs", &["sink-dev"], CeilingFloor::At(0.8)),
            in_turn("of both in turn", &["sink-dev", "tmpfs"], CeilingFloor::None),
        ],
    ),
    (
        "uring",
        "mount, io_uring",
        &["--no-passthrough", "--fuse-io", "uring"],
        BytePath::Written,
        &[
            best_of("of tmpfs", &["tmpfs"], CeilingFloor::None),
            best_of("of empty fs", &["sink-uring"], CeilingFloor::At(0.8)),
            in_turn("of both in turn", &["sink-uring", "tmpfs"], CeilingFloor::None),
        ],
    ),
    (
        "passthrough",
        "mount, passthrough",
        &[],
        BytePath::WrittenByKernel,
        &[best_of("of tmpfs", &["tmpfs"], CeilingFloor::At(0.95))],
    ),
];

const NODE_CEILINGS: [CeilingSpec; 3] = [
    best_of("of bare", &["bare"], CeilingFloor::At(0.9)),
    in_turn("of bare and empty fs in turn", &["bare", "sink-uring"], CeilingFloor::At(0.9)),
    in_turn("of these and tmpfs in turn", &["bare", "sink-uring", "tmpfs"], CeilingFloor::None),
];

/// A fifth longer than the parts.
const SYNC_CEILINGS: [CeilingSpec; 1] = [in_turn("of both in turn", &["disk", "trips"], CeilingFloor::At(1.0 / 1.2))];

/// What runs during the whole section.
struct WriteServers {
    sink: ServerProcess,
    mount: MountUnderTest,
    /// The same node over the directory on the disk.
    synced: MountUnderTest,
    // The last to go, in this order.
    node: NodeUnderTest,
    pair: NamespacePair,
}

/// The file systems to write to.
struct WritePlaces<'a> {
    suite: &'a BenchSuite,
    /// The source itself.
    bare: SuitePlace<'a>,
    sinks: Vec<SuitePlace<'a>>,
    lone: Vec<SuitePlace<'a>>,
    remote: Option<SuitePlace<'a>>,
}

pub(super) fn run(suite: &BenchSuite) -> Result<SuiteSection> {
    child::require_program("fio", "fio")?;
    let source = suite.memory.scratch.subdir("source-writes")?;
    let on_disk = suite.disk.subdir("source-writes")?;
    let mut notes = Vec::new();
    let mut sinks = Vec::new();
    for (variant, label, io) in
        [("sink-dev", "empty fs, /dev/fuse", "dev"), ("sink-uring", "empty fs, io_uring", "uring")]
    {
        let mounted = suite.mount_empty(io, WRITE_FILE_BYTES, 1 << 20, true);
        sinks.extend(optional(&mut notes, label, mounted)?.map(|mounted| (variant, label, mounted)));
    }
    let mut mounts = Vec::new();
    for mount in LONE_MOUNTS {
        let (variant, label, words, ..) = mount;
        let words = [&["--rw", "--cache-size", "0", "--buffer-size", "300M"], words].concat();
        let mounted = suite.mount(&format!("writes-{variant}"), &source, None, &words);
        mounts.extend(optional(&mut notes, label, mounted)?.map(|mounted| (mount, mounted)));
    }
    let servers = optional(&mut notes, "node", start_servers(suite, &source, &on_disk))?;
    let servers = servers.as_ref();
    let sinks =
        sinks.iter().map(|(variant, label, mounted)| SuitePlace::empty(variant, label, "mount", mounted)).collect();
    let lone = mounts.iter().map(|((variant, label, _, path, ceilings), mounted)| {
        SuitePlace::mounted(variant, label, "mount", mounted, Some(*path), ceilings)
    });
    let label = "mount of a node over veth";
    let of_node = |mount, ceilings: &'static [CeilingSpec], path| {
        let node = servers.map(|servers| &servers.node);
        SuitePlace::mounted("node", label, "mount", mount, path, ceilings).with_nodes("node", node)
    };
    let remote = servers.map(|servers| of_node(&servers.mount, &NODE_CEILINGS, Some(BytePath::Sent)));
    let bare = SuitePlace::plain("tmpfs", "tmpfs", source.clone());
    let places = WritePlaces { suite, bare, sinks, lone: lone.collect(), remote };
    let archive = make_archive(suite)?;
    let on_disk = SuitePlace::plain("disk", "fdatasync on the source", on_disk);
    let synced = servers.map(|servers| of_node(&servers.synced, &SYNC_CEILINGS, None));
    let mut cases = places.long_cases(&ALONE_LOAD, &places.sinks, &places.lone);
    if let (Some(servers), Some(remote)) = (servers, &places.remote) {
        for load in &NODE_LOADS {
            let sinks = places.sinks.iter().filter(|sink| sink.variant == "sink-uring");
            let mut of_load = places.long_cases(load, sinks, [remote]);
            let bare = bare_case(suite, load, "bare", "bare block writer", servers);
            of_load.insert(of_load.len() - 1, bare);
            cases.extend(of_load);
        }
    }
    for (group, threads, aim) in SMALL_FILES {
        cases.extend(places.small_file_cases(group, threads, aim));
    }
    for (group, bytes) in APPENDS {
        cases.extend(places.append_cases(group, bytes));
    }
    cases.extend(places.unpack_cases(&archive));
    if let (Some(servers), Some(synced)) = (servers, &synced) {
        let sync = |place: &SuitePlace<'_>| place.files_named("synced", 1);
        let job = |place: &SuitePlace<'_>| FioJob { sync: true, ..suite.new_job(sync(place), &SYNC_LOAD, 4 << 20) };
        cases.push(suite.fio_case(&SYNC_LOAD, &on_disk, job(&on_disk)));
        cases.push(trips_case(suite, servers));
        cases.push(suite.fio_case(&SYNC_LOAD, synced, job(synced)));
    }
    notes.push(format!(
        "Long files have {} MiB and exist; fio, whose start is part of the writer's processor time, writes each again and again, and \
         syncs it at the end. The tree has {} files.",
        WRITE_FILE_BYTES >> 20,
        suite.tree_files
    ));
    notes.push(
        "In turn: every byte passes the empty file system, the bare writer and the source's own write, and all share this \
         machine's processors; where those are the limit a mount can't be faster than these one after the other."
            .into(),
    );
    let title =
        "Writes of a lone mount and through a node over veth, source on tmpfs; syncs with the source on the disk.";
    suite.measure("writes", title, cases, notes)
}

fn start_servers(suite: &BenchSuite, source: &Path, on_disk: &Path) -> Result<WriteServers> {
    let pair = NamespacePair::new()?;
    let order = PartOrder::Sink { addr: pair.server_address(SINK_PORT) };
    let sink = suite.start_part("bare-sink", &order, &pair.server)?;
    let disk_text = on_disk.display().to_string();
    let words = ["--writable", "--source", &disk_text, "--cache-size", "0", "--buffer-size", "300M"];
    let node = suite.node(&pair, WRITE_NODE_PORT, source, &words)?;
    let registry = format!("static:{}", node.addr);
    let words = ["--rw", "--registry", &registry, "--buffer-size", "300M"];
    let mount = suite.mount("writes-node", source, Some(&pair.client), &words)?;
    let synced = suite.mount("writes-synced", on_disk, Some(&pair.client), &words)?;
    Ok(WriteServers { sink, mount, synced, node, pair })
}

/// The bare block writer, with a connection for each file.
fn bare_case<'a>(
    suite: &'a BenchSuite,
    load: &FioLoad,
    variant: &str,
    label: &str,
    servers: &'a WriteServers,
) -> BenchCase<'a> {
    let part = BlockPart { addr: servers.pair.server_address(SINK_PORT), write: true, ..BlockPart::default() };
    suite.block_case(load, variant, label, part, &servers.pair.client, ("node", &servers.sink))
}

/// Twice the time of a block that the bare writer sends.
fn trips_case<'a>(suite: &'a BenchSuite, servers: &'a WriteServers) -> BenchCase<'a> {
    let mut case = bare_case(suite, &SYNC_LOAD, "trips", "two round trips", servers);
    let mut take = case.take;
    case.take = Box::new(move || take().map(|sample| CaseSample { value: sample.value / 2.0, ..sample }));
    case
}

impl<'a> WritePlaces<'a> {
    /// The lone mount that a user has by default.
    fn default_mount(&self) -> Option<&SuitePlace<'a>> {
        self.lone.iter().find(|place| place.variant == "passthrough").or(self.lone.first())
    }

    /// Long files at the source, at empty file systems and at mounts.
    fn long_cases<'b>(
        &'b self,
        load: &FioLoad,
        sinks: impl IntoIterator<Item = &'b SuitePlace<'b>>,
        mounts: impl IntoIterator<Item = &'b SuitePlace<'b>>,
    ) -> Vec<BenchCase<'b>>
    where
        'a: 'b,
    {
        let long_job =
            |place: &SuitePlace<'_>| self.suite.new_job(place.files_named("long", load.jobs), load, WRITE_FILE_BYTES);
        let plain = [&self.bare].into_iter().chain(sinks);
        let mut cases: Vec<BenchCase<'b>> =
            plain.map(|place| self.suite.fio_case(load, place, long_job(place))).collect();
        for place in mounts {
            let first = long_job(place);
            let case = self.suite.fio_case(load, place, first.clone());
            cases.push(case.warm(move || {
                let carried = self.suite.warm_up(place, &first)?;
                let written = self.bare.files_named("long", first.jobs);
                written.iter().try_for_each(|file| check_written(file, place.label))?;
                Ok(carried)
            }));
        }
        cases
    }

    /// A new folder of the source, and the path at a place.
    fn new_folder(&self, place: &SuitePlace<'_>) -> Result<(PathBuf, FreshFolder)> {
        let name = format!("folder-{}", self.suite.new_number());
        let folder = self.bare.at.join(&name);
        std::fs::create_dir(&folder).in_file(&folder)?;
        Ok((place.at.join(name), FreshFolder(folder)))
    }

    fn small_file_cases(&self, group: &str, threads: usize, aim: f64) -> Vec<BenchCase<'_>> {
        let mut cases = vec![self.small_files(group, &self.bare, threads)];
        cases.extend(self.sinks.last().map(|sink| self.small_files_sink(group, sink, threads)));
        cases.extend(self.default_mount().map(|place| {
            self.small_files(group, place, threads).against("of tmpfs", &["tmpfs"], Some(0.5)).against(
                "of empty fs",
                &["sink"],
                None,
            )
        }));
        if let Some(place) = &self.remote {
            cases.push(BenchCase::known(group, "aim", "the aim of a node", FigureUnit::Rate, aim));
            let case = self.small_files(group, place, threads);
            cases.push(case.against("of the aim", &["aim"], Some(1.0)).against("of tmpfs", &["tmpfs"], None));
        }
        cases
    }

    fn make_order(&self, prefix: PathBuf, threads: usize) -> PartOrder {
        let files = if self.suite.quick { 1_000 } else { 4_000 };
        PartOrder::MakeFiles { prefix, threads, files, bytes: SMALL_FILE_BYTES, sync: false }
    }

    fn small_files<'b>(&'b self, group: &str, place: &'b SuitePlace<'a>, threads: usize) -> BenchCase<'b> {
        BenchCase::new(group, place.variant, place.label, FigureUnit::Rate, move || {
            let (folder, made) = self.new_folder(place)?;
            let order = self.make_order(folder.join("f"), threads);
            let sample = self.suite.part_sample(&order, None, FigureUnit::Rate, "writer", &place.roles)?;
            let last = numbered_path(&made.0.join("f"), sample.ops as usize - 1);
            if std::fs::read(last).unwrap_or_default() != made_content(SMALL_FILE_BYTES) {
                return Err(BenchError::Failed("the last file is not whole in the source".into()));
            }
            Ok(sample)
        })
    }

    /// The empty file system: the cost of the kernel's requests alone.
    fn small_files_sink<'b>(&'b self, group: &str, sink: &'b SuitePlace<'a>, threads: usize) -> BenchCase<'b> {
        BenchCase::new(group, "sink", "empty fs", FigureUnit::Rate, move || {
            let prefix = sink.at.with_file_name(format!("{}-", self.suite.new_number()));
            let order = self.make_order(prefix, threads);
            self.suite.part_sample(&order, None, FigureUnit::Rate, "writer", &sink.roles)
        })
    }

    fn append_cases<'b>(&'b self, group: &str, bytes: u64) -> Vec<BenchCase<'b>> {
        let places = [Some(&self.bare), self.default_mount(), self.remote.as_ref()];
        let case = |place: &'b SuitePlace<'a>| {
            let case =
                BenchCase::new(group, place.variant, place.label, FigureUnit::Rate, move || self.append(place, bytes));
            if place.variant == "tmpfs" { case } else { case.against("of tmpfs", &["tmpfs"], None) }
        };
        places.into_iter().flatten().map(case).collect()
    }

    fn append(&self, place: &SuitePlace<'_>, bytes: u64) -> Result<CaseSample> {
        let (folder, made) = self.new_folder(place)?;
        let appends = if self.suite.quick { 20_000 } else { 100_000 };
        let order = PartOrder::Append { path: folder.join("a"), appends, bytes };
        let sample = self.suite.part_sample(&order, None, FigureUnit::Rate, "writer", &place.roles)?;
        if std::fs::read(made.0.join("a")).unwrap_or_default() != made_content(bytes).repeat(appends as usize) {
            return Err(BenchError::Failed("the appended bytes are not all in the source".into()));
        }
        Ok(sample)
    }

    fn unpack_cases<'b>(&'b self, archive: &'b Path) -> Vec<BenchCase<'b>> {
        let floors = [
            (Some(&self.bare), None),
            (self.default_mount(), Some(1.0 / 1.3)),
            (self.remote.as_ref(), Some(1.0 / 3.0)),
        ];
        let mut cases = Vec::new();
        for (place, floor) in floors {
            let Some(place) = place else { continue };
            let case =
                BenchCase::new("untar of a source tree", place.variant, place.label, FigureUnit::Time, move || {
                    self.unpack(place, archive)
                });
            cases.push(if floor.is_none() { case } else { case.against("of tmpfs", &["tmpfs"], floor) });
        }
        cases
    }

    fn unpack(&self, place: &SuitePlace<'_>, archive: &Path) -> Result<CaseSample> {
        let (folder, _made) = self.new_folder(place)?;
        let mut command = Command::new("tar");
        command.arg("-C").arg(&folder).arg("-xf").arg(archive);
        let (done, mut cpu) = with_cpu(&place.roles, || child::run_to_end(command, WRITE_TIMEOUT))?;
        cpu.push(("writer", done.cpu));
        let bytes = std::fs::metadata(archive).map_or(0, |found| found.len());
        Ok(CaseSample { value: done.elapsed, bytes, ops: self.suite.tree_files as u64, cpu, latency_us: None })
    }
}

/// Checks the length and the first block of a long file of the source.
fn check_written(file: &Path, label: &str) -> Result<()> {
    let got = std::fs::read(file).in_file(file)?;
    let is_written = got.chunks(WRITTEN_PATTERN.len()).take(1 << 18).all(|word| word == WRITTEN_PATTERN);
    if got.len() as u64 == WRITE_FILE_BYTES && is_written {
        return Ok(());
    }
    Err(BenchError::Failed(format!("{label}: wrong bytes in the source")))
}

/// A folder of the source for a single sample, removed at the end.
struct FreshFolder(PathBuf);

impl Drop for FreshFolder {
    fn drop(&mut self) {
        // The run's own directory is removed at the end in any case.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// An archive of a generated source tree: folders of 40 files, most of a few KiB.
fn make_archive(suite: &BenchSuite) -> Result<PathBuf> {
    show_progress("writes  making the tree");
    let tree = suite.memory.scratch.empty_subdir("tree")?;
    let archive = suite.memory.scratch.path().join("tree.tar");
    for n in 0..suite.tree_files {
        let folder = tree.join(format!("d{}/e{}", n / 1600, n / 40));
        if n.is_multiple_of(40) {
            std::fs::create_dir_all(&folder).in_file(&folder)?;
        }
        let len = [300, 1_500, 4_000, 9_000, 30_000][n * 7 % 5];
        scratch::write_file(&folder.join(format!("file-{n}.c")), n as u64, len)?;
    }
    let mut command = Command::new("tar");
    command.arg("-C").arg(&tree).arg("-cf").arg(&archive).arg(".");
    child::run_to_end(command, WRITE_TIMEOUT)?;
    suite.memory.scratch.empty_subdir("tree")?;
    Ok(archive)
}
