//! Several nodes as one cache: hot reads from one, two and four nodes, and the effect on readers when a node is killed or stops
//! responding.

use super::section::SuiteSection;
use super::{BenchSuite, BytePath, file_name, fio_sample, part_sample};
use crate::child::{self, ServerProcess};
use crate::error::{BenchError, Result};
use crate::fio::FioJob;
use crate::measure::{BenchCase, CaseSample, FigureUnit};
use crate::mount::{MountUnderTest, NodeUnderTest, counter_growth};
use crate::netns::NamespacePair;
use rustix::process::{Pid, Signal, kill_process};
use spurline_types::Size;
use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::time::Duration;

const GROUP_FILES: usize = 4;
/// In total several times the memory of a mount.
const GROUP_FILE_BYTES: u64 = 256 << 20;
const GROUP_SIZES: [usize; 3] = [1, 2, 4];
/// Files read while a node is lost: enough blocks for every node to hold some, few enough to read all in a second.
const LOST_FILES: usize = 64;
const LOST_LEN: u64 = 4 << 20;
const NODE_SILENCE: &str = "1s";

pub(super) fn run(suite: &BenchSuite) -> Result<SuiteSection> {
    child::require_program("fio", "fio")?;
    let pair = NamespacePair::new()?;
    let server = pair.server.as_str();
    let client = pair.client.as_str();
    let source = suite.make_source("source-group", GROUP_FILES, GROUP_FILE_BYTES)?;
    let bare_addr = format!("{}:7201", pair.server_ip);
    let words = ["bare-serve", &bare_addr, "--size", "512M"].map(String::from);
    let log = suite.log_path("bare-group")?;
    let limit = Duration::from_secs(30);
    let bare = ServerProcess::start_announcing(
        suite.part_command(&words, Some(server)),
        &["ready"],
        "bare-serve",
        &log,
        limit,
    )?
    .0;
    let null = suite.mount_null("uring").ok();
    let mut groups: Vec<(Vec<NodeUnderTest>, MountUnderTest)> = Vec::new();
    for (place, count) in GROUP_SIZES.into_iter().enumerate() {
        let share = format!("{}M", ((GROUP_FILES as u64 * GROUP_FILE_BYTES) >> 20) * 3 / 2 / count as u64 + 64);
        let nodes = start_nodes(suite, &pair, &source, count, 7210 + 10 * place as u16, &share)?;
        let mounted = mount_group(suite, &format!("group-{count}"), &source, client, &nodes)?;
        suite.check_files("group", mounted.at(), GROUP_FILES, GROUP_FILE_BYTES)?;
        groups.push((nodes, mounted));
    }
    let lost = suite.make_source("source-lost", LOST_FILES, LOST_LEN)?;
    let asked = RefCell::new(Vec::new());
    let mut cases = Vec::new();
    for (name, pattern, block) in
        [("1 MiB, 4 jobs", "read", 1u64 << 20), ("128 KiB random, 4 jobs", "randread", 128 << 10)]
    {
        let mut words: Vec<String> =
            ["bare-read", &bare_addr, "--connections", "4", "--size", "512M"].map(String::from).into();
        words.extend([
            "--block".into(),
            Size(block).to_string(),
            "--time".into(),
            format!("{}ms", suite.time.as_millis()),
        ]);
        words.extend((pattern == "randread").then(|| "--random".into()));
        let bare = &bare;
        cases.push(BenchCase::new(name, "bare", "bare block reader", FigureUnit::Bandwidth, move || {
            let limit = suite.time * 3 + Duration::from_secs(30);
            part_sample(suite.part_command(&words, Some(client)), limit, FigureUnit::Bandwidth, &[("nodes", bare)])
        }));
        if let Some(null) = &null {
            let job = suite.new_job(vec![null.at().join("data")], pattern, block, 4, GROUP_FILE_BYTES);
            cases.push(BenchCase::new(name, "null", "empty fs, io_uring", FigureUnit::Bandwidth, move || {
                fio_sample(&job, FigureUnit::Bandwidth, &[("client", null.daemon())])
            }));
        }
        for (nodes, mounted) in &groups {
            let job = suite.new_job(file_paths(mounted, GROUP_FILES), pattern, block, 4, GROUP_FILE_BYTES);
            let first = job.clone();
            let (variant, label) = match nodes.len() {
                1 => ("one".into(), "mount of 1 node".into()),
                n => (format!("of-{n}"), format!("mount of {n} nodes")),
            };
            let case = BenchCase::new(name, &variant, &label, FigureUnit::Bandwidth, move || {
                let mut roles = vec![("client", mounted.daemon())];
                roles.extend(nodes.iter().map(|node| ("nodes", node.daemon())));
                let mut sample = fio_sample(&job, FigureUnit::Bandwidth, &roles)?;
                let all: f64 = sample.cpu.iter().filter(|(role, _)| *role == "nodes").map(|(_, cpu)| cpu).sum();
                sample.cpu.retain(|(role, _)| *role != "nodes");
                sample.cpu.push(("nodes", all));
                Ok(sample)
            })
            .against("of bare", &["bare"], None)
            .against_series("of bare and empty fs in turn", &["bare", "null"], None)
            .warm(move || suite.warm_up(mounted, &first, BytePath::Tcp));
            cases.push(if nodes.len() == 1 { case } else { case.against("of 1 node", &["one"], None) });
        }
    }
    for (variant, label, signal) in [
        ("killed", "one of three nodes is killed", Signal::KILL),
        ("stalled", "one of three nodes stops responding", Signal::STOP),
    ] {
        let pair = &pair;
        let lost = &lost;
        let asked = &asked;
        cases.push(BenchCase::new("the longest read of 64 readers", variant, label, FigureUnit::Time, move || {
            lose_node(suite, pair, lost, signal, |line| asked.borrow_mut().push(format!("{label}: {line}")))
        }));
    }
    let rows = suite.rounds("group", cases)?;
    let mut notes = asked.into_inner();
    notes.push(format!(
        "A node with pending requests counts as lost after {NODE_SILENCE} without a heartbeat (--peer-silence)."
    ));
    notes.push("All nodes, the mount and the readers share this machine's processors: more nodes add none.".into());
    let title = "Hot reads from one, two and four nodes over veth, and 64 readers of three nodes of which one is lost.";
    Ok(SuiteSection { name: "group", title, skipped: None, notes, rows })
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
    (0..count)
        .map(|n| {
            let addr = format!("{}:{}", pair.server_ip, port + n as u16);
            let words = ["--buffer-size", memory, "--cache-size", "0", "--free-space-ratio", "0"];
            suite.start_node(source, &addr, Some(&pair.server), &words)
        })
        .collect()
}

fn mount_group(
    suite: &BenchSuite,
    name: &str,
    source: &Path,
    client: &str,
    nodes: &[NodeUnderTest],
) -> Result<MountUnderTest> {
    let registry = format!("static:{}", nodes.iter().map(|n| n.addr.clone()).collect::<Vec<_>>().join(","));
    let words = ["--registry", &registry, "--buffer-size", "160M", "--peer-silence", NODE_SILENCE];
    suite.start_mount(name, &source.display().to_string(), Some(client), &words)
}

fn file_paths(mounted: &MountUnderTest, count: usize) -> Vec<PathBuf> {
    (0..count).map(|i| mounted.at().join(file_name(i))).collect()
}

/// Loses a node of three under 64 readers; returns the longest read, and notes the other nodes' reads from the origin.
fn lose_node(
    suite: &BenchSuite,
    pair: &NamespacePair,
    source: &Path,
    signal: Signal,
    mut note: impl FnMut(String),
) -> Result<CaseSample> {
    let nodes = start_nodes(suite, pair, source, 3, 7270, "512M")?;
    let mounted = mount_group(suite, "group-lost", source, &pair.client, &nodes)?;
    suite.check_files("group", mounted.at(), LOST_FILES, LOST_LEN)?;
    let gets = |node: &NodeUnderTest| -> Result<_> { node.counters(&suite.spurline) };
    let before = nodes.iter().map(gets).collect::<Result<Vec<_>>>()?;
    let held = counter(&before[0], "object.get_bytes");
    let mut job: FioJob = suite.new_job(file_paths(&mounted, LOST_FILES), "randread", 128 << 10, LOST_FILES, LOST_LEN);
    // Long enough for every reader to pass the lost blocks.
    job.runtime = Some(suite.time.max(Duration::from_secs(1)) * 3);
    let pid = Pid::from_raw(nodes[0].daemon().pid() as i32);
    let got = std::thread::scope(|scope| {
        let readers = scope.spawn(|| fio_latest(&job));
        std::thread::sleep(suite.time.max(Duration::from_secs(1)));
        let sent = pid.map_or(Ok(()), |pid| kill_process(pid, signal));
        let got = readers.join().unwrap_or_else(|_| Err(BenchError::Failed("the readers panicked".into())));
        if signal == Signal::STOP {
            // A stopped process must be continued before the end.
            let _ = pid.map(|pid| kill_process(pid, Signal::CONT));
        }
        sent.map_err(|e| BenchError::Failed(format!("a node could not be lost: {e}"))).and(got)
    })?;
    let after = nodes[1..].iter().map(gets).collect::<Result<Vec<_>>>()?;
    let grown: Vec<_> = before[1..].iter().zip(&after).map(|(b, a)| counter_growth(b, a)).collect();
    let bytes: u64 = grown.iter().map(|g| counter(g, "object.get_bytes")).sum();
    let ops: u64 = grown.iter().map(|g| counter(g, "object.get_ops")).sum();
    note(format!(
        "the others read {} MiB in {ops} requests from the origin; the lost node held {} MiB.",
        bytes >> 20,
        held >> 20
    ));
    Ok(got)
}

fn counter(counters: &crate::mount::CounterValues, name: &str) -> u64 {
    counters.get(name).copied().unwrap_or(0)
}

/// A run of fio with the longest read, in seconds, as the value.
fn fio_latest(job: &FioJob) -> Result<CaseSample> {
    let (got, done) = job.run()?;
    let cpu = vec![("reader", done.cpu)];
    let latency_us = Some((got.p50_us, got.p99_us));
    Ok(CaseSample { value: got.max_us / 1e6, bytes: got.bytes, ops: got.bytes / job.block, cpu, latency_us })
}
