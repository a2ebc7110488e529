//! Writes of a lone mount and through a node: long files, many small files, a tree that is unpacked, and syncs. Beside these the
//! bare directory, an empty file system that drops written bytes, and a bare TCP block writer.

use super::section::SuiteSection;
use super::{BenchSuite, CpuRole, part_sample, show_progress, user_sample, with_cpu};
use crate::child::{self, ServerProcess};
use crate::error::{BenchError, Result};
use crate::measure::{BenchCase, CaseSample, FigureUnit, WarmUpResult};
use crate::mount::{MountUnderTest, NodeUnderTest, counter_growth};
use crate::netns::NamespacePair;
use crate::part::written_block;
use spurline_types::Size;
use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Length of each file, and of a write.
const WRITE_FILE_BYTES: u64 = 256 << 20;
const WRITE_BLOCK_BYTES: u64 = 1 << 20;
/// Small files per second through a node.
const SMALL_FILES_AIM: f64 = 5_000.0;
const WRITE_TIMEOUT: Duration = Duration::from_secs(600);

/// A file system for the writes.
struct WritePlace<'a> {
    name: &'static str,
    label: &'static str,
    /// The path to the file system.
    at: PathBuf,
    roles: Vec<CpuRole<'a>>,
    mount: Option<&'a MountUnderTest>,
    /// Whether the kernel writes the source's file itself.
    passthrough: bool,
}

/// What runs during the whole section.
struct WriteServers {
    sink: ServerProcess,
    node: NodeUnderTest,
    mount: MountUnderTest,
    /// The same node over the directory on the disk.
    synced: MountUnderTest,
    // The last to go.
    pair: NamespacePair,
}

pub(super) fn run(suite: &BenchSuite) -> Result<SuiteSection> {
    let source = suite.memory.subdir("source-writes")?;
    let on_disk = suite.disk.subdir("source-writes")?;
    let mut notes = Vec::new();
    let mut optional = |what: &str, started: Result<MountUnderTest>| match started {
        Err(BenchError::Interrupted) => Err(BenchError::Interrupted),
        Err(error) => {
            notes.push(format!("No {what}: {error}"));
            Ok(None)
        }
        Ok(mounted) => Ok(Some(mounted)),
    };
    let empty = |io: &str| suite.mount_empty(&format!("sink-{io}"), &["--io", io, "--size", "256M", "--writable"]);
    let sinks = [optional("empty fs, /dev/fuse", empty("dev"))?, optional("empty fs, io_uring", empty("uring"))?];
    let lone = |name: &str, more: &[&str]| {
        let words = [&["--rw", "--cache-size", "0", "--buffer-size", "300M"], more].concat();
        suite.start_mount(&format!("writes-{name}"), &source.display().to_string(), None, &words)
    };
    let mounts = [
        optional("mount, /dev/fuse", lone("dev", &["--no-passthrough", "--fuse-io", "dev"]))?,
        optional("mount, io_uring", lone("uring", &["--no-passthrough", "--fuse-io", "uring"]))?,
        optional("mount, passthrough", lone("passthrough", &[]))?,
    ];
    let servers = match start_servers(suite, &source, &on_disk) {
        Ok(servers) => Some(servers),
        Err(BenchError::Interrupted) => return Err(BenchError::Interrupted),
        Err(error) => {
            notes.push(format!("No node: {error}"));
            None
        }
    };
    let places = WritePlaces::new(&source, &sinks, &mounts, servers.as_ref());
    let archive = make_archive(suite)?;
    let fresh = FreshFolders { source: &source, next: Cell::new(0) };
    let mut cases = long_cases_alone(suite, &source, &places);
    if let Some(servers) = &servers {
        cases.extend(long_cases_through_node(suite, &source, &places, servers));
    }
    cases.extend(small_file_cases(suite, &fresh, &places));
    cases.extend(unpack_cases(suite, &fresh, &places, &archive));
    if let Some(servers) = &servers {
        cases.extend(synced_cases(suite, servers, &on_disk));
    }
    let rows = suite.rounds("writes", cases)?;
    notes.push(format!(
        "Long files have {} MiB and exist; each is written again and again, and synced at the end. The tree has {} files.",
        WRITE_FILE_BYTES >> 20,
        suite.tree_files
    ));
    notes.push(
        "In turn: every byte passes the empty file system, the bare writer and the source's own write, and all share this \
         machine's processors; where those are the limit a mount can't be faster than these one after the other."
            .into(),
    );
    drop(places);
    drop(servers);
    let title =
        "Writes of a lone mount and through a node over veth, source on tmpfs; syncs with the source on the disk.";
    Ok(SuiteSection { name: "writes", title, skipped: None, notes, rows })
}

/// The file systems to write to.
struct WritePlaces<'a> {
    /// The source itself.
    bare: WritePlace<'a>,
    lone: Vec<WritePlace<'a>>,
    remote: Option<WritePlace<'a>>,
    /// Empty file systems over /dev/fuse and over io_uring.
    sinks: &'a [Option<MountUnderTest>; 2],
}

impl<'a> WritePlaces<'a> {
    /// The source, the mounts over /dev/fuse, over io_uring and with passthrough, and the mount of a node.
    fn new(
        source: &Path,
        sinks: &'a [Option<MountUnderTest>; 2],
        mounts: &'a [Option<MountUnderTest>; 3],
        servers: Option<&'a WriteServers>,
    ) -> Self {
        let [dev, uring, passthrough] = mounts;
        let dev = dev.as_ref().map(|mount| place_of(source, "dev", "mount, /dev/fuse", Some(mount), false));
        let uring = uring.as_ref().map(|mount| place_of(source, "uring", "mount, io_uring", Some(mount), false));
        let passthrough =
            passthrough.as_ref().map(|mount| place_of(source, "passthrough", "mount, passthrough", Some(mount), true));
        let remote = servers.map(|servers| WritePlace {
            name: "node",
            label: "mount of a node over veth",
            at: servers.mount.at().to_owned(),
            roles: vec![("mount", servers.mount.daemon()), ("node", servers.node.daemon())],
            mount: Some(&servers.mount),
            passthrough: false,
        });
        WritePlaces {
            bare: place_of(source, "tmpfs", "tmpfs", None, false),
            lone: dev.into_iter().chain(uring).chain(passthrough).collect(),
            remote,
            sinks,
        }
    }

    /// The lone mount that a user has by default.
    fn default_mount(&self) -> Option<&WritePlace<'a>> {
        self.lone.iter().find(|place| place.passthrough).or(self.lone.first())
    }
}

fn long_cases_alone<'a>(suite: &'a BenchSuite, source: &'a Path, places: &'a WritePlaces<'a>) -> Vec<BenchCase<'a>> {
    let group = "1 MiB write, alone";
    let job = LongWrites { suite, source };
    let mut cases = vec![job.case(group, &places.bare, 1)];
    cases.extend(sink_cases(suite, group, places.sinks, 1));
    for place in &places.lone {
        let case = job.case(group, place, 1);
        if place.passthrough {
            cases.push(case.against("of tmpfs", &["tmpfs"], Some(0.95)));
            continue;
        }
        let sink = if place.name == "dev" { "sink-dev" } else { "sink-uring" };
        let case = case.against("of tmpfs", &["tmpfs"], None).against("of empty fs", &[sink], Some(0.8));
        cases.push(case.against_series("of both in turn", &[sink, "tmpfs"], None));
    }
    cases
}

fn long_cases_through_node<'a>(
    suite: &'a BenchSuite,
    source: &'a Path,
    places: &'a WritePlaces<'a>,
    servers: &'a WriteServers,
) -> Vec<BenchCase<'a>> {
    let job = LongWrites { suite, source };
    let mut cases = Vec::new();
    let Some(place) = &places.remote else { return cases };
    for (group, files) in [("1 MiB write through a node, 1 file", 1), ("1 MiB write through a node, 4 files", 4)] {
        cases.push(job.case(group, &places.bare, files));
        cases.extend(sink_cases(suite, group, &places.sinks[1..], files));
        cases.push(bare_writer(
            suite,
            servers,
            group,
            BareWrites {
                name: "bare",
                label: "bare block writer",
                connections: files,
                block: WRITE_BLOCK_BYTES,
                rate_share: 1.0,
            },
        ));
        let case = job.case(group, place, files).against("of bare", &["bare"], Some(0.9));
        let case = case.against_series("of bare and empty fs in turn", &["bare", "sink-uring"], Some(0.9));
        cases.push(case.against_series("of these and tmpfs in turn", &["bare", "sink-uring", "tmpfs"], None));
    }
    cases
}

fn small_file_cases<'a>(
    suite: &'a BenchSuite,
    fresh: &'a FreshFolders<'a>,
    places: &'a WritePlaces<'a>,
) -> Vec<BenchCase<'a>> {
    let files = if suite.quick { 1_000 } else { 4_000 };
    let [dev_sink, uring_sink] = places.sinks;
    let sink = uring_sink.as_ref().or(dev_sink.as_ref());
    let mut cases = Vec::new();
    for (group, threads) in
        [("create + write 4 KiB + close, 1 thread", 1), ("create + write 4 KiB + close, 8 threads", 8)]
    {
        let small = |place| small_files(suite, fresh, group, place, threads, files);
        cases.push(small(&places.bare));
        cases.extend(small_files_sink(suite, group, sink, threads, files));
        cases.extend(places.default_mount().map(|place| {
            small(place).against("of tmpfs", &["tmpfs"], Some(0.5)).against("of empty fs", &["sink"], None)
        }));
        if let Some(place) = &places.remote {
            cases.push(BenchCase::new(group, "aim", "the aim of a node", FigureUnit::Rate, || {
                Ok(CaseSample { value: SMALL_FILES_AIM, ..CaseSample::default() })
            }));
            cases.push(small(place).against("of the aim", &["aim"], Some(1.0)).against("of tmpfs", &["tmpfs"], None));
        }
    }
    cases
}

fn unpack_cases<'a>(
    suite: &'a BenchSuite,
    fresh: &'a FreshFolders<'a>,
    places: &'a WritePlaces<'a>,
    archive: &'a Path,
) -> Vec<BenchCase<'a>> {
    let case_of = |place| unpack(fresh, place, archive, suite.tree_files);
    let mut cases = vec![case_of(&places.bare)];
    let lone = places.default_mount().map(case_of);
    cases.extend(lone.map(|case| case.against("of tmpfs", &["tmpfs"], Some(1.0 / 1.3))));
    let remote = places.remote.as_ref().map(case_of);
    cases.extend(remote.map(|case| case.against("of tmpfs", &["tmpfs"], Some(1.0 / 3.0))));
    cases
}

fn synced_cases<'a>(suite: &'a BenchSuite, servers: &'a WriteServers, on_disk: &'a Path) -> Vec<BenchCase<'a>> {
    let group = "4 KiB write + fsync through a node";
    let roles = vec![("mount", servers.synced.daemon()), ("node", servers.node.daemon())];
    let case = synced_writes(suite, group, "node", "mount of a node over veth", servers.synced.at(), roles);
    vec![
        synced_writes(suite, group, "disk", "fdatasync on the source", on_disk, Vec::new()),
        bare_writer(
            suite,
            servers,
            group,
            BareWrites { name: "trips", label: "two round trips", connections: 1, block: 4096, rate_share: 0.5 },
        ),
        // A fifth longer than the parts.
        case.against_series("of both in turn", &["disk", "trips"], Some(1.0 / 1.2)),
    ]
}

fn place_of<'a>(
    source: &Path,
    name: &'static str,
    label: &'static str,
    mount: Option<&'a MountUnderTest>,
    passthrough: bool,
) -> WritePlace<'a> {
    let at = mount.map_or(source, MountUnderTest::at).to_owned();
    let roles = mount.iter().map(|mount| ("mount", mount.daemon())).collect();
    WritePlace { name, label, at, roles, mount, passthrough }
}

fn start_servers(suite: &BenchSuite, source: &Path, on_disk: &Path) -> Result<WriteServers> {
    let pair = NamespacePair::new()?;
    let addr = |port: u16| format!("{}:{port}", pair.server_ip);
    let words = ["bare-sink", &addr(7103)].map(String::from);
    let command = suite.part_command(&words, Some(&pair.server));
    let log = suite.log_path("bare-sink")?;
    let (sink, _) = ServerProcess::start_announcing(command, &["ready"], "bare-sink", &log, Duration::from_secs(30))?;
    let disk_text = on_disk.display().to_string();
    let words = ["--writable", "--source", &disk_text, "--cache-size", "0", "--buffer-size", "300M"];
    let node = suite.start_node(source, &addr(7104), Some(&pair.server), &words)?;
    let registry = format!("static:{}", node.addr);
    let words = ["--rw", "--registry", &registry, "--buffer-size", "300M"];
    let mounted =
        |name: &str, source: &Path| suite.start_mount(name, &source.display().to_string(), Some(&pair.client), &words);
    let mount = mounted("writes-node", source)?;
    let synced = mounted("writes-synced", on_disk)?;
    Ok(WriteServers { sink, node, mount, synced, pair })
}

/// Long files, written a mebibyte at a time.
struct LongWrites<'a> {
    suite: &'a BenchSuite,
    source: &'a Path,
}

fn long_file(at: &Path, writer: usize) -> PathBuf {
    at.join(format!("long-{writer}"))
}

impl<'a> LongWrites<'a> {
    fn command(&self, files: &[PathBuf], time: Duration) -> Command {
        let mut words = vec!["write".to_owned()];
        words.extend(files.iter().map(|file| file.display().to_string()));
        words.extend(
            ["--block", &Size(WRITE_BLOCK_BYTES).to_string(), "--size", &Size(WRITE_FILE_BYTES).to_string()]
                .map(String::from),
        );
        words.extend(["--time".to_owned(), format!("{}ms", time.as_millis())]);
        self.suite.part_command(&words, None)
    }

    fn case(&self, group: &str, place: &'a WritePlace<'a>, writers: usize) -> BenchCase<'a> {
        let suite = self.suite;
        let source = self.source;
        let files: Vec<PathBuf> = (0..writers).map(|writer| long_file(&place.at, writer)).collect();
        let first = files.clone();
        BenchCase::new(group, place.name, place.label, FigureUnit::Bandwidth, move || {
            let command = LongWrites { suite, source }.command(&files, suite.time);
            user_sample(command, WRITE_TIMEOUT, FigureUnit::Bandwidth, "writer", &place.roles)
        })
        .warm(move || LongWrites { suite, source }.warm_up(place, &first))
    }

    /// Writes for a moment and compares the bytes in the source; the counters show the way of the bytes.
    fn warm_up(&self, place: &WritePlace<'_>, files: &[PathBuf]) -> Result<WarmUpResult> {
        let counters = || place.mount.map(|mount| mount.counters(&self.suite.spurline)).transpose();
        let before = counters()?.unwrap_or_default();
        let command = self.command(files, Duration::from_millis(300));
        let written = part_sample(command, WRITE_TIMEOUT, FigureUnit::Bandwidth, &[])?.bytes;
        let grown = counter_growth(&before, &counters()?.unwrap_or_default());
        for writer in 0..files.len() {
            let got = std::fs::read(long_file(self.source, writer)).map_err(|e| BenchError::io("the source", &e))?;
            if got.len() as u64 != WRITE_FILE_BYTES
                || got[..WRITE_BLOCK_BYTES as usize] != written_block(writer, WRITE_BLOCK_BYTES)[..]
            {
                return Err(BenchError::Failed(format!("{}: wrong bytes in the source", place.label)));
            }
        }
        let requests = growth_of(&grown, "fuse.write_bytes");
        let remote = place.roles.len() > 1;
        let right = match place.mount {
            None => true,
            Some(_) if place.passthrough => growth_of(&grown, "fuse.passthrough_opens") > 0 && requests < written / 20,
            Some(_) => {
                requests >= written / 10 * 9 && (!remote || growth_of(&grown, "tcp.send_bytes") >= written / 10 * 9)
            }
        };
        let seen = format!(
            "{written} bytes; fuse.write_bytes {requests}, tcp.send_bytes {}",
            growth_of(&grown, "tcp.send_bytes")
        );
        Ok((grown, (!right).then(|| format!("another path than intended: {seen}"))))
    }
}

fn growth_of(grown: &crate::mount::CounterValues, name: &str) -> u64 {
    grown.get(name).copied().unwrap_or(0)
}

/// The empty file systems, each with a file that all writers share.
fn sink_cases<'a>(
    suite: &'a BenchSuite,
    group: &str,
    sinks: &'a [Option<MountUnderTest>],
    writers: usize,
) -> Vec<BenchCase<'a>> {
    let sinks = sinks.iter().flatten().map(move |sink| {
        let uring = sink.at().display().to_string().ends_with("uring");
        let (name, label) =
            if uring { ("sink-uring", "empty fs, io_uring") } else { ("sink-dev", "empty fs, /dev/fuse") };
        BenchCase::new(group, name, label, FigureUnit::Bandwidth, move || {
            let files = vec![sink.at().join("data"); writers];
            let job = LongWrites { suite, source: Path::new("") };
            user_sample(
                job.command(&files, suite.time),
                WRITE_TIMEOUT,
                FigureUnit::Bandwidth,
                "writer",
                &[("mount", sink.daemon())],
            )
        })
    });
    sinks.collect()
}

/// A run of the bare block writer.
struct BareWrites<'a> {
    name: &'a str,
    label: &'a str,
    connections: usize,
    /// Bytes of a request; with 4 KiB the figure is a rate of round trips.
    block: u64,
    /// The figure is this share of the measured rate.
    rate_share: f64,
}

fn bare_writer<'a>(
    suite: &'a BenchSuite,
    servers: &'a WriteServers,
    group: &str,
    writes: BareWrites<'_>,
) -> BenchCase<'a> {
    let BareWrites { name, label, connections, block, rate_share } = writes;
    let unit = if block == WRITE_BLOCK_BYTES { FigureUnit::Bandwidth } else { FigureUnit::Rate };
    BenchCase::new(group, name, label, unit, move || {
        let mut words: Vec<String> = vec!["bare-write".into(), format!("{}:7103", servers.pair.server_ip)];
        words
            .extend(["--connections", &connections.to_string(), "--block", &Size(block).to_string()].map(String::from));
        words.extend(["--time".to_owned(), format!("{}ms", suite.time.as_millis())]);
        let command = suite.part_command(&words, Some(&servers.pair.client));
        let mut sample = user_sample(command, WRITE_TIMEOUT, unit, "writer", &[("node", &servers.sink)])?;
        sample.value *= rate_share;
        Ok(sample)
    })
}

/// Folders of the source, each used for a single sample.
struct FreshFolders<'a> {
    source: &'a Path,
    next: Cell<usize>,
}

/// Removes a folder at the end of a sample.
struct FreshFolder(PathBuf);

impl Drop for FreshFolder {
    fn drop(&mut self) {
        // The run's own directory is removed at the end in any case.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

impl FreshFolders<'_> {
    /// A new folder: below `at`, and the guard.
    fn make(&self, at: &Path) -> Result<(PathBuf, FreshFolder)> {
        let name = format!("folder-{}", self.next.replace(self.next.get() + 1));
        let folder = self.source.join(&name);
        std::fs::create_dir(&folder).map_err(|e| BenchError::io(folder.display(), &e))?;
        Ok((at.join(name), FreshFolder(folder)))
    }
}

fn small_files<'a>(
    suite: &'a BenchSuite,
    fresh: &'a FreshFolders<'a>,
    group: &str,
    place: &'a WritePlace<'a>,
    threads: usize,
    files: usize,
) -> BenchCase<'a> {
    BenchCase::new(group, place.name, place.label, FigureUnit::Rate, move || {
        let (folder, made) = fresh.make(&place.at)?;
        let mut words = vec!["create".to_owned(), folder.display().to_string()];
        words.extend(["--threads", &threads.to_string(), "--files", &files.to_string()].map(String::from));
        let command = suite.part_command(&words, None);
        let sample = user_sample(command, WRITE_TIMEOUT, FigureUnit::Rate, "writer", &place.roles)?;
        let last = std::fs::read(made.0.join(format!("f{}", files - 1))).unwrap_or_default();
        if last != written_block(0, 4096) {
            return Err(BenchError::Failed("the last file is not whole in the source".into()));
        }
        Ok(sample)
    })
}

/// The empty file system: the cost of the kernel's requests alone.
fn small_files_sink<'a>(
    suite: &'a BenchSuite,
    group: &str,
    sink: Option<&'a MountUnderTest>,
    threads: usize,
    files: usize,
) -> Option<BenchCase<'a>> {
    let sink = sink?;
    let round = Cell::new(0);
    Some(BenchCase::new(group, "sink", "empty fs", FigureUnit::Rate, move || {
        let prefix = format!("{threads}-{}-", round.replace(round.get() + 1));
        let mut words = vec!["create".to_owned(), sink.at().display().to_string()];
        words.extend(["--threads", &threads.to_string(), "--files", &files.to_string()].map(String::from));
        words.extend(["--prefix".to_owned(), prefix]);
        user_sample(
            suite.part_command(&words, None),
            WRITE_TIMEOUT,
            FigureUnit::Rate,
            "writer",
            &[("mount", sink.daemon())],
        )
    }))
}

/// An archive of a generated source tree: folders of 40 files, most of a few KiB.
fn make_archive(suite: &BenchSuite) -> Result<PathBuf> {
    show_progress("writes", "making the tree");
    let tree = suite.memory.empty_subdir("tree")?;
    let archive = suite.memory.path().join("tree.tar");
    for n in 0..suite.tree_files {
        let folder = tree.join(format!("d{}/e{}", n / 1600, n / 40));
        if n.is_multiple_of(40) {
            std::fs::create_dir_all(&folder).map_err(|e| BenchError::io(folder.display(), &e))?;
        }
        let len = [300, 1_500, 4_000, 9_000, 30_000][n * 7 % 5];
        crate::scratch::write_file(&folder.join(format!("file-{n}.c")), n as u64, len)?;
    }
    let mut command = Command::new("tar");
    command.arg("-C").arg(&tree).arg("-cf").arg(&archive).arg(".");
    child::run_to_end(command, WRITE_TIMEOUT)?;
    suite.memory.empty_subdir("tree")?;
    Ok(archive)
}

fn unpack<'a>(
    fresh: &'a FreshFolders<'a>,
    place: &'a WritePlace<'a>,
    archive: &'a Path,
    files: usize,
) -> BenchCase<'a> {
    BenchCase::new("untar of a source tree", place.name, place.label, FigureUnit::Time, move || {
        let (folder, _made) = fresh.make(&place.at)?;
        let mut command = Command::new("tar");
        command.arg("-C").arg(&folder).arg("-xf").arg(archive);
        let (done, mut cpu) = with_cpu(&place.roles, || child::run_to_end(command, WRITE_TIMEOUT))?;
        cpu.push(("writer", done.cpu));
        let bytes = std::fs::metadata(archive).map_or(0, |found| found.len());
        Ok(CaseSample { value: done.elapsed, bytes, ops: files as u64, cpu, latency_us: None })
    })
}

fn synced_writes<'a>(
    suite: &'a BenchSuite,
    group: &str,
    name: &str,
    label: &str,
    at: &Path,
    roles: Vec<CpuRole<'a>>,
) -> BenchCase<'a> {
    let file = at.join("synced").display().to_string();
    BenchCase::new(group, name, label, FigureUnit::Rate, move || {
        let time = format!("{}ms", suite.time.as_millis());
        let words = ["write", &file, "--block", "4K", "--size", "4M", "--sync", "--time", &time].map(String::from);
        user_sample(suite.part_command(&words, None), WRITE_TIMEOUT, FigureUnit::Rate, "writer", &roles)
    })
}
