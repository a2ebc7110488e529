//! Several nodes as one cache: hot reads from one, two and four nodes, and the effect on readers when a node is killed or stops
//! responding.

use super::section::SuiteSection;
use super::setup::{BenchSuite, BytePath, FioLoad, SuitePlace, fio_sample};
use crate::error::{BenchError, Result};
use crate::fio::FioJob;
use crate::measure::{BenchCase, CaseSample, CeilingFloor, CeilingSpec, FigureUnit, best_of, in_turn};
use crate::mount::{MountUnderTest, NodeUnderTest, counter, counter_growth};
use crate::netns::NamespacePair;
use crate::part::{BlockPart, BlockWire};
use crate::{child, scratch};
use rustix::process::{Pid, Signal, kill_process};
use std::cell::RefCell;
use std::path::Path;
use std::time::Duration;

const GROUP_FILES: usize = 4;
/// In total several times the memory of a mount.
const GROUP_FILE_BYTES: u64 = 256 << 20;
const GROUP_BARE_PORT: u16 = 7201;
/// The longest wait in a fault is measured.
const LOST_LOAD: FioLoad = FioLoad::random("the longest read of 64 readers", 128 << 10, LOST_FILES, 0.0);
/// Files read while a node is lost: enough blocks for every node to hold some, few enough to read all in a second.
const LOST_FILES: usize = 64;
const LOST_LEN: u64 = 4 << 20;
const NODE_SILENCE: &str = "1s";

const GROUP_LOADS: [FioLoad; 2] = [
    FioLoad::sequential("1 MiB, 4 jobs", "read", 1 << 20, 4, 0.0),
    FioLoad::random("128 KiB random, 4 jobs", 128 << 10, 4, 0.0),
];

const ONE_NODE_CEILINGS: &[CeilingSpec] = &[
    best_of("of bare", &["bare"], CeilingFloor::None),
    in_turn("of bare and empty fs in turn", &["bare", "null"], CeilingFloor::None),
];
const GROUP_CEILINGS: &[CeilingSpec] = &[
    best_of("of bare", &["bare"], CeilingFloor::None),
    in_turn("of bare and empty fs in turn", &["bare", "null"], CeilingFloor::None),
    best_of("of 1 node", &["one"], CeilingFloor::None),
];

/// Groups: number of nodes, port of the first, variant, label and ceilings.
const GROUPS: [(usize, u16, &str, &str, &[CeilingSpec]); 3] = [
    (1, 7210, "one", "mount of 1 node", ONE_NODE_CEILINGS),
    (2, 7220, "of-2", "mount of 2 nodes", GROUP_CEILINGS),
    (4, 7230, "of-4", "mount of 4 nodes", GROUP_CEILINGS),
];

pub(super) fn run(suite: &BenchSuite) -> Result<SuiteSection> {
    child::require_program("fio", "fio")?;
    let pair = &NamespacePair::new()?;
    let source = suite.make_source("source-group", GROUP_FILES, GROUP_FILE_BYTES)?;
    let bare = suite.serve_blocks(pair.server_address(GROUP_BARE_PORT), BlockWire::Bare, &pair.server)?;
    let null = suite.mount_empty("uring", 4 << 30, 1 << 20, false).ok();
    let mut groups = Vec::new();
    for (count, port, ..) in GROUPS {
        let share = format!("{}M", ((GROUP_FILES as u64 * GROUP_FILE_BYTES) >> 20) * 3 / 2 / count as u64 + 64);
        let nodes = start_nodes(suite, pair, &source, count, port, &share)?;
        let mounted = mount_group(suite, &format!("group-{count}"), &source, pair, &nodes)?;
        scratch::check_files(mounted.at(), GROUP_FILES, GROUP_FILE_BYTES)?;
        groups.push((nodes, mounted));
    }
    let remarks = RefCell::new(Vec::new());
    let lost = &suite.make_source("source-lost", LOST_FILES, LOST_LEN)?;
    let mut places = Vec::new();
    places.extend(null.iter().map(|null| SuitePlace::empty("null", "empty fs, io_uring", "client", null)));
    for ((_, _, variant, label, ceilings), (nodes, mounted)) in GROUPS.into_iter().zip(&groups) {
        let place = SuitePlace::mounted(variant, label, "client", mounted, Some(BytePath::Tcp), ceilings);
        places.push(place.with_nodes("nodes", nodes));
    }
    let remarks = &remarks;
    let mut cases = Vec::new();
    for load in &GROUP_LOADS {
        let part = BlockPart { addr: pair.server_address(GROUP_BARE_PORT), ..BlockPart::default() };
        cases.push(suite.block_case(load, "bare", "bare block reader", part, &pair.client, ("nodes", &bare)));
        for place in &places {
            let job = suite.new_job(place.files(GROUP_FILES), load, GROUP_FILE_BYTES);
            cases.push(suite.fio_case(load, place, job));
        }
    }
    for (variant, label, signal) in [
        ("killed", "one of three nodes is killed", Signal::KILL),
        ("stalled", "one of three nodes stops responding", Signal::STOP),
    ] {
        cases.push(BenchCase::new(LOST_LOAD.name, variant, label, FigureUnit::Time, move || {
            let (sample, remark) = lose_node(suite, pair, lost, signal)?;
            remarks.borrow_mut().push(format!("{label}: {remark}"));
            Ok(sample)
        }));
    }
    let title = "Hot reads from one, two and four nodes over veth, and 64 readers of three nodes of which one is lost.";
    let mut section = suite.measure("group", title, cases, Vec::new())?;
    section.notes = remarks.take();
    section.notes.push(format!(
        "A node with pending requests counts as lost after {NODE_SILENCE} without a heartbeat (--peer-silence)."
    ));
    section
        .notes
        .push("All nodes, the mount and the readers share this machine's processors: more nodes add none.".into());
    Ok(section)
}

/// Nodes on the server's side, with consecutive ports and this much memory.
fn start_nodes(
    suite: &BenchSuite,
    pair: &NamespacePair,
    source: &Path,
    count: usize,
    port: u16,
    memory: &str,
) -> Result<Vec<NodeUnderTest>> {
    let words = ["--buffer-size", memory, "--cache-size", "0", "--free-space-ratio", "0"];
    (0..count).map(|n| suite.node(pair, port + n as u16, source, &words)).collect()
}

fn mount_group(
    suite: &BenchSuite,
    name: &str,
    source: &Path,
    pair: &NamespacePair,
    nodes: &[NodeUnderTest],
) -> Result<MountUnderTest> {
    let registry = format!("static:{}", nodes.iter().map(|n| n.addr.clone()).collect::<Vec<_>>().join(","));
    let words = ["--registry", &registry, "--buffer-size", "160M", "--peer-silence", NODE_SILENCE];
    suite.mount(name, source, Some(&pair.client), &words)
}

/// Loses a node of three under 64 readers; returns the longest read, and a remark on the other nodes' reads from the origin.
fn lose_node(suite: &BenchSuite, pair: &NamespacePair, source: &Path, signal: Signal) -> Result<(CaseSample, String)> {
    let nodes = start_nodes(suite, pair, source, 3, 7270, "512M")?;
    let mounted = mount_group(suite, "group-lost", source, pair, &nodes)?;
    scratch::check_files(mounted.at(), LOST_FILES, LOST_LEN)?;
    let before = nodes.iter().map(NodeUnderTest::counters).collect::<Result<Vec<_>>>()?;
    let held = counter(&before[0], "object.get_bytes");
    let files = SuitePlace::plain("", "", mounted.at().to_owned()).files(LOST_FILES);
    // Long enough for every reader to pass the lost blocks.
    let wait = suite.time.max(Duration::from_secs(1));
    let job = FioJob { runtime: Some(wait * 3), ..suite.new_job(files, &LOST_LOAD, LOST_LEN) };
    let pid = Pid::from_raw(nodes[0].daemon().pid() as i32);
    let got = std::thread::scope(|scope| {
        let readers = scope.spawn(|| fio_sample(&job, FigureUnit::Time, &[]));
        std::thread::sleep(wait);
        let sent = pid.map_or(Ok(()), |pid| kill_process(pid, signal));
        let got = readers.join().unwrap_or_else(|_| Err(BenchError::Failed("the readers panicked".into())));
        if signal == Signal::STOP {
            // A stopped process must be continued before the end.
            let _ = pid.map(|pid| kill_process(pid, Signal::CONT));
        }
        sent.map_err(|e| BenchError::Failed(format!("a node could not be lost: {e}"))).and(got)
    })?;
    let mut bytes = 0;
    let mut requests = 0;
    for (node, before) in nodes.iter().zip(&before).skip(1) {
        let grown = counter_growth(before, &node.counters()?);
        bytes += counter(&grown, "object.get_bytes");
        requests += counter(&grown, "object.get_ops");
    }
    let remark = format!(
        "the others read {} MiB in {requests} requests from the origin; the lost node held {} MiB.",
        bytes >> 20,
        held >> 20
    );
    Ok((got, remark))
}
