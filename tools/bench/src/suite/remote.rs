//! Hot reads from a node over a veth pair between two network namespaces, against the bare block reader, the
//! transport alone and iperf3 between the same two.

use super::fio_load::FioLoad;
use super::section::SuiteSection;
use super::{BenchSuite, BytePath, file_name, fio_sample, part_sample};
use crate::child::{self, ServerProcess};
use crate::error::{BenchError, Result};
use crate::iperf;
use crate::measure::{BenchCase, CaseSample, FigureUnit};
use crate::mount::{MountUnderTest, NodeUnderTest};
use crate::netns::NamespacePair;
use spurline_types::Size;
use std::path::{Path, PathBuf};
use std::time::Duration;

const REMOTE_FILES: usize = 4;
/// Several times the memory of a mount, so that reads go to the node.
const REMOTE_FILE_BYTES: u64 = 512 << 20;

const REMOTE_LOADS: [FioLoad; 4] = [
    FioLoad::sequential("1 MiB, 1 job", 1 << 20, 1, 0.85),
    FioLoad::sequential("1 MiB, 4 jobs", 1 << 20, 4, 0.85),
    FioLoad::random("128 KiB random, 4 jobs", 128 << 10, 4, 0.6),
    FioLoad::random("4 KiB random, 4 jobs", 4096, 4, 0.5),
];

/// The ports of the bare reader's server, of the transport alone, with and without TLS, and of the node.
const BARE_PORT: u16 = 7101;
const TRANSPORT_PORT: u16 = 7102;
const TRANSPORT_TLS_PORT: u16 = 7103;
const NODE_PORT: u16 = 7100;

/// A mount of the node.
struct RemoteMount {
    variant: &'static str,
    label: &'static str,
    mount: MountUnderTest,
}

/// All servers and mounts of the section.
struct RemoteRig<'a> {
    pair: &'a NamespacePair,
    /// Length of each file.
    len: u64,
    bare: ServerProcess,
    transport: ServerProcess,
    transport_tls: ServerProcess,
    has_iperf: bool,
    node: Option<NodeUnderTest>,
    mounts: Vec<RemoteMount>,
    /// An empty file system over io_uring.
    null: Option<MountUnderTest>,
}

pub(super) fn run(suite: &BenchSuite) -> Result<SuiteSection> {
    child::require_program("fio", "fio")?;
    let pair = NamespacePair::new()?;
    let len = if suite.quick { REMOTE_FILE_BYTES / 2 } else { REMOTE_FILE_BYTES };
    let source = suite.make_source("source-remote", REMOTE_FILES, len)?;
    let mut notes = Vec::new();
    let bare = start_server(suite, &pair, "bare-serve", BARE_PORT, &[])?;
    let transport = start_server(suite, &pair, "transport-serve", TRANSPORT_PORT, &[])?;
    let transport_tls = start_server(suite, &pair, "transport-serve", TRANSPORT_TLS_PORT, &["--tls"])?;
    let iperf = iperf::start_server(&pair.server, pair.server_ip, &suite.log_path("iperf3")?);
    if let Err(e) = &iperf {
        notes.push(format!("No iperf3: {e}"));
    }
    let node = start_hot_node(suite, &pair, &source, len, &mut notes)?;
    let mounts = if node.is_some() { mount_node(suite, &pair, &source, len, &mut notes)? } else { Vec::new() };
    let null = suite.mount_null("uring");
    if let Err(e) = &null {
        notes.push(format!("No empty file system over io_uring: {e}"));
    }
    let has_iperf = iperf.is_ok();
    let null = null.ok();
    let rig = RemoteRig { pair: &pair, len, bare, transport, transport_tls, has_iperf, node, mounts, null };
    let rows = suite.rounds("remote", REMOTE_LOADS.iter().flat_map(|load| load_cases(suite, &rig, load)).collect())?;
    notes.push(
        "In turn: every byte goes through a bare reader and through an empty file system, and both, reader and node share \
         this machine's processors; where those are the limit a mount can't be faster than the two in turn."
            .into(),
    );
    notes.push(
        "veth has no wire: the receiver's TCP work runs in the sender's context, or on either side's softirq.".into(),
    );
    let title =
        "Hot reads from a node over veth between two network namespaces; the bare reader has a connection per job.";
    Ok(SuiteSection { name: "remote", title, skipped: None, notes, rows })
}

fn address_of(pair: &NamespacePair, port: u16) -> String {
    format!("{}:{port}", pair.server_ip)
}

/// Starts a server of blocks in the server's namespace.
fn start_server(
    suite: &BenchSuite,
    pair: &NamespacePair,
    kind: &str,
    port: u16,
    more: &[&str],
) -> Result<ServerProcess> {
    let address = address_of(pair, port);
    let words: Vec<String> =
        [&[kind, &address, "--size", "512M"], more].concat().into_iter().map(String::from).collect();
    let command = suite.part_command(&words, Some(&pair.server));
    let log = suite.log_path(&format!("{kind}-{port}"))?;
    let (server, _) = ServerProcess::start_announcing(command, &["ready"], kind, &log, Duration::from_secs(30))?;
    Ok(server)
}

/// Starts a node with more memory than data; `None` with a note after a failed start.
fn start_hot_node(
    suite: &BenchSuite,
    pair: &NamespacePair,
    source: &Path,
    len: u64,
    notes: &mut Vec<String>,
) -> Result<Option<NodeUnderTest>> {
    let node_memory = format!("{}M", ((REMOTE_FILES as u64 * len) >> 20) * 3 / 2);
    let words = ["--buffer-size", &node_memory, "--cache-size", "0", "--free-space-ratio", "0"];
    match suite.start_node(source, &address_of(pair, NODE_PORT), Some(&pair.server), &words) {
        Ok(node) => Ok(Some(node)),
        Err(BenchError::Interrupted) => Err(BenchError::Interrupted),
        Err(e) => {
            notes.push(format!("No node: {e}"));
            Ok(None)
        }
    }
}

/// Mounts the node over each of the kernel's transports, with a note for each that fails.
fn mount_node(
    suite: &BenchSuite,
    pair: &NamespacePair,
    source: &Path,
    len: u64,
    notes: &mut Vec<String>,
) -> Result<Vec<RemoteMount>> {
    let registry = format!("static:{}", address_of(pair, NODE_PORT));
    let mut mounts = Vec::new();
    for (variant, label, io) in [("mount-dev", "mount, /dev/fuse", "dev"), ("mount-uring", "mount, io_uring", "uring")]
    {
        let words = ["--registry", &registry, "--fuse-io", io, "--buffer-size", "160M"];
        let source = source.display().to_string();
        let mounted = suite.start_mount(&format!("remote-{io}"), &source, Some(&pair.client), &words);
        match mounted.and_then(|m| suite.check_files("remote", m.at(), REMOTE_FILES, len).map(|()| m)) {
            Ok(mount) => {
                notes.extend(mount.session_line().map(|s| format!("{label}: {s}")));
                mounts.push(RemoteMount { variant, label, mount });
            }
            Err(BenchError::Interrupted) => return Err(BenchError::Interrupted),
            Err(e) => notes.push(format!("No {label}: {e}")),
        }
    }
    Ok(mounts)
}

/// The cases of a load: the ceilings, then the mounts.
fn load_cases<'a>(suite: &'a BenchSuite, rig: &'a RemoteRig<'a>, load: &'static FioLoad) -> Vec<BenchCase<'a>> {
    let client = rig.pair.client.as_str();
    let bare = BlockReader { variant: "bare", label: "bare block reader", command: "bare-read", port: BARE_PORT };
    let transport =
        BlockReader { variant: "transport", label: "transport alone", command: "transport-read", port: TRANSPORT_PORT };
    let transport_tls = BlockReader {
        variant: "transport-tls",
        label: "transport alone, TLS",
        command: "transport-read",
        port: TRANSPORT_TLS_PORT,
    };
    let tls_case = transport_tls.case(suite, rig, load, &rig.transport_tls, &["--tls"]);
    let mut cases = vec![
        bare.case(suite, rig, load, &rig.bare, &[]),
        transport.case(suite, rig, load, &rig.transport, &[]).against("of bare", &["bare"], Some(0.95)),
        tls_case.against("of bare", &["bare"], None),
    ];
    if rig.has_iperf && load.block == 1 << 20 {
        let time = suite.time;
        let jobs = load.jobs;
        let ip = rig.pair.server_ip;
        let label = if jobs == 1 { "iperf3, 1 stream" } else { "iperf3, 4 streams" };
        cases.push(BenchCase::new(load.name, "iperf3", label, FigureUnit::Bandwidth, move || {
            let got = iperf::receive(client, ip, jobs, time)?;
            let cpu = vec![("node", got.sender_cpu), ("reader", got.receiver_cpu)];
            Ok(CaseSample { value: got.bandwidth, bytes: got.bytes, ops: got.bytes >> 20, cpu, latency_us: None })
        }));
    }
    if let Some(null) = &rig.null {
        let files = vec![null.at().join("data")];
        let job = suite.new_job(files, load.pattern, load.block, load.jobs, rig.len);
        cases.push(BenchCase::new(load.name, "null-uring", "empty fs, io_uring", load.unit, move || {
            fio_sample(&job, load.unit, &[("client", null.daemon())])
        }));
    }
    if let Some(node) = &rig.node {
        cases.extend(rig.mounts.iter().map(|mount| mount_case(suite, node, mount, load, rig.len)));
    }
    cases
}

/// A reader of blocks without a file system.
struct BlockReader {
    variant: &'static str,
    label: &'static str,
    /// The bench's own command.
    command: &'static str,
    port: u16,
}

impl BlockReader {
    fn case<'a>(
        &self,
        suite: &'a BenchSuite,
        rig: &'a RemoteRig<'a>,
        load: &'static FioLoad,
        server: &'a ServerProcess,
        more: &[&str],
    ) -> BenchCase<'a> {
        let mut words: Vec<String> = vec![self.command.into(), address_of(rig.pair, self.port)];
        words.extend(["--connections".into(), load.jobs.to_string(), "--block".into(), Size(load.block).to_string()]);
        words.extend(["--size".into(), "512M".into(), "--time".into(), format!("{}ms", suite.time.as_millis())]);
        words.extend((load.pattern == "randread").then(|| "--random".into()));
        words.extend(more.iter().map(ToString::to_string));
        BenchCase::new(load.name, self.variant, self.label, load.unit, move || {
            let command = suite.part_command(&words, Some(&rig.pair.client));
            part_sample(command, suite.time * 3 + Duration::from_secs(30), load.unit, &[("node", server)])
        })
    }
}

fn mount_case<'a>(
    suite: &'a BenchSuite,
    node: &'a NodeUnderTest,
    remote: &'a RemoteMount,
    load: &'static FioLoad,
    len: u64,
) -> BenchCase<'a> {
    let RemoteMount { variant, label, mount } = remote;
    let files: Vec<PathBuf> = (0..REMOTE_FILES).map(|i| mount.at().join(file_name(i))).collect();
    let job = suite.new_job(files, load.pattern, load.block, load.jobs, len);
    let first = job.clone();
    let case = BenchCase::new(load.name, variant, label, load.unit, move || {
        fio_sample(&job, load.unit, &[("client", mount.daemon()), ("node", node.daemon())])
    })
    .against("of bare", &["bare"], Some(load.floor))
    .against_series("of bare and empty fs in turn", &["bare", "null-uring"], None)
    .warm(move || {
        let before = node.counters(&suite.spurline)?;
        let (mut grown, wrong) = suite.warm_up(mount, &first, BytePath::Tcp)?;
        let served = crate::mount::counter_growth(&before, &node.counters(&suite.spurline)?);
        grown.extend(served.into_iter().map(|(name, n)| (format!("node.{name}"), n)));
        Ok((grown, wrong))
    });
    if load.block == 1 << 20 { case.limit_cpu("client", 0.25).limit_cpu("node", 0.20) } else { case }
}
