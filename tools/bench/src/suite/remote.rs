//! Hot reads from a node over a veth pair between two network namespaces, against the bare block reader, the
//! transport alone and iperf3 between the same two.

use super::section::SuiteSection;
use super::setup::{BenchSuite, BytePath, FioLoad, SuitePlace, optional};
use crate::error::Result;
use crate::measure::{BenchCase, CaseSample, CeilingFloor, CeilingSpec, FigureUnit, best_of, in_turn};
use crate::netns::NamespacePair;
use crate::part::{BlockPart, BlockWire};
use crate::{child, iperf, scratch};

const REMOTE_FILES: usize = 4;
/// Several times the memory of a mount, so that reads go to the node.
const REMOTE_FILE_BYTES: u64 = 512 << 20;
const REMOTE_NODE_PORT: u16 = 7100;

const REMOTE_LOADS: [FioLoad; 4] = [
    FioLoad::sequential("1 MiB, 1 job", "read", 1 << 20, 1, 0.85),
    FioLoad::sequential("1 MiB, 4 jobs", "read", 1 << 20, 4, 0.85),
    FioLoad::random("128 KiB random, 4 jobs", 128 << 10, 4, 0.6),
    FioLoad::random("4 KiB random, 4 jobs", 4096, 4, 0.5),
];

/// Readers without a file system: variant, label, wire, port of the server, and the ratio to the bare reader.
const BLOCK_READERS: [(&str, &str, BlockWire, u16, Option<f64>); 3] = [
    ("bare", "bare block reader", BlockWire::Bare, 7101, None),
    ("transport", "transport alone", BlockWire::Tcp, 7102, Some(0.95)),
    ("transport-tls", "transport alone, TLS", BlockWire::Tls, 7103, None),
];

const MOUNT_CEILINGS: [CeilingSpec; 2] = [
    best_of("of bare", &["bare"], CeilingFloor::OfLoad),
    in_turn("of bare and empty fs in turn", &["bare", "null-uring"], CeilingFloor::None),
];

pub(super) fn run(suite: &BenchSuite) -> Result<SuiteSection> {
    child::require_program("fio", "fio")?;
    let pair = NamespacePair::new()?;
    let len = if suite.quick { REMOTE_FILE_BYTES / 2 } else { REMOTE_FILE_BYTES };
    let source = suite.make_source("source-remote", REMOTE_FILES, len)?;
    let mut notes = Vec::new();
    let mut servers = Vec::new();
    for (_, _, wire, port, _) in BLOCK_READERS {
        servers.push(suite.serve_blocks(pair.server_address(port), wire, &pair.server)?);
    }
    let iperf = iperf::start_server(&pair.server, pair.server_ip, &suite.memory.log("iperf3")?);
    let iperf = optional(&mut notes, "iperf3", iperf)?;
    let memory = format!("{}M", ((REMOTE_FILES as u64 * len) >> 20) * 3 / 2);
    let words = ["--buffer-size", &memory, "--cache-size", "0", "--free-space-ratio", "0"];
    let node = optional(&mut notes, "node", suite.node(&pair, REMOTE_NODE_PORT, &source, &words))?;
    let mut mounts = Vec::new();
    for (variant, label, io) in [("mount-dev", "mount, /dev/fuse", "dev"), ("mount-uring", "mount, io_uring", "uring")]
    {
        let Some(node) = &node else { break };
        let registry = format!("static:{}", node.addr);
        let words = ["--registry", &registry, "--fuse-io", io, "--buffer-size", "160M"];
        let mounted = suite.mount(&format!("remote-{io}"), &source, Some(&pair.client), &words);
        let checked =
            mounted.and_then(|mounted| scratch::check_files(mounted.at(), REMOTE_FILES, len).map(|()| mounted));
        mounts.extend(optional(&mut notes, label, checked)?.map(|mounted| (variant, label, mounted)));
    }
    let empties = suite.mount_empties(&mut notes, &[("null-uring", "empty fs, io_uring", "uring", 1 << 20)])?;
    let mut places = Vec::new();
    places.extend(empties.iter().map(|(variant, mount)| SuitePlace::empty(variant.0, variant.1, "client", mount)));
    for (variant, label, mounted) in &mounts {
        notes.extend(mounted.session_line().map(|line| format!("{label}: {line}")));
        let place = SuitePlace::mounted(variant, label, "client", mounted, Some(BytePath::Tcp), &MOUNT_CEILINGS);
        places.push(place.with_nodes("node", &node));
    }
    let mut cases = Vec::new();
    for load in &REMOTE_LOADS {
        for ((variant, label, wire, port, floor), server) in BLOCK_READERS.into_iter().zip(&servers) {
            let part = BlockPart { addr: pair.server_address(port), wire, ..BlockPart::default() };
            let case = suite.block_case(load, variant, label, part, &pair.client, ("node", server));
            cases.push(if wire == BlockWire::Bare { case } else { case.against("of bare", &["bare"], floor) });
        }
        if iperf.is_some() && load.block == 1 << 20 {
            cases.push(iperf_case(suite, load, &pair));
        }
        for place in &places {
            cases.push(suite.fio_case(load, place, suite.new_job(place.files(REMOTE_FILES), load, len)));
        }
    }
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
    suite.measure("remote", title, cases, notes)
}

fn iperf_case<'a>(suite: &'a BenchSuite, load: &FioLoad, pair: &'a NamespacePair) -> BenchCase<'a> {
    let jobs = load.jobs;
    let label = if jobs == 1 { "iperf3, 1 stream" } else { "iperf3, 4 streams" };
    BenchCase::new(load.name, "iperf3", label, FigureUnit::Bandwidth, move || {
        let got = iperf::receive(&pair.client, pair.server_ip, jobs, suite.time)?;
        let cpu = vec![("node", got.sender_cpu), ("reader", got.receiver_cpu)];
        Ok(CaseSample { value: got.bandwidth, bytes: got.bytes, ops: got.bytes >> 20, cpu, latency_us: None })
    })
}
