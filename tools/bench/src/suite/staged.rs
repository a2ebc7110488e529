//! Files that two of three nodes acknowledge (`mount --stage`), against the same group without that, and against the disk: written twice,
//! each file synced. The caches of the nodes are on --disk-dir, and the bucket is in memory at the other end of a link of 30 ms.

use super::peers::Peer;
use super::s3_server::{S3_BUCKET, S3Process, start_in_memory};
use super::section::SuiteSection;
use super::setup::{BenchSuite, CpuRole, optional};
use crate::child::{self, ServerProcess};
use crate::error::{BenchError, FileContext as _, Result};
use crate::measure::{BenchCase, CaseSample, FigureUnit};
use crate::mount::{MountUnderTest, NodeUnderTest};
use crate::part::PartOrder;
use crate::stop;
use std::path::Path;
use std::time::Duration;

const STAGED_NODES: usize = 3;
const FIRST_NODE_PORT: u16 = 7121;
const STAGED_GROUP: &str = "staged";
const ROUND_TRIP: Duration = Duration::from_millis(30);
/// The longest time until the nodes take staged files.
const STAGE_TIMEOUT: Duration = Duration::from_secs(60);

/// Files that are written by several threads.
#[derive(Clone, Copy)]
struct StagedLoad {
    group: &'static str,
    unit: FigureUnit,
    files: usize,
    threads: usize,
    bytes: u64,
    /// The least share of the disk.
    floor: Option<f64>,
}

/// A coordinator, nodes of three failure domains, and mounts of these. Dropped in this order.
struct StagedRig {
    registry: String,
    staged: MountUnderTest,
    direct: MountUnderTest,
    nodes: Vec<NodeUnderTest>,
    _coordinator: ServerProcess,
    server: S3Process,
}

pub(super) fn run(suite: &BenchSuite) -> Result<SuiteSection> {
    let mut notes = vec![
        "The disk is written with two copies of each file, which are synced. Server, nodes, mount and writer share this machine's \
         processors. The uploads of earlier files have ended before each measurement."
            .into(),
    ];
    let rig = &StagedRig::start(suite)?;
    let mut peers = Vec::new();
    let writeback = optional(&mut notes, "JuiceFS --writeback", Peer::open_writeback(suite, &rig.server))?;
    for peer in Peer::open_all(suite, &rig.server, &mut notes)?.into_iter().chain(writeback) {
        let mounted = peer.mount();
        peers.extend(optional(&mut notes, peer.label, mounted)?.map(|mount| (mount, peer)));
    }
    let mut cases = Vec::new();
    for load in loads(suite.quick) {
        cases.push(BenchCase::new(load.group, "disk", "the disk, two copies", load.unit, move || {
            write_twice(suite, load)
        }));
        for (variant, label, mount, floor) in
            [("staged", "mount --stage", &rig.staged, load.floor), ("direct", "mount --rw", &rig.direct, None)]
        {
            let case = BenchCase::new(load.group, variant, label, load.unit, move || {
                rig.await_uploads(suite)?;
                write_files(suite, load, mount.at(), &rig.roles(mount))
            });
            cases.push(case.against("of the disk", &["disk"], floor));
        }
        cases.extend(peers.iter().map(|(mount, peer)| {
            let roles = mount.roles(&rig.server);
            BenchCase::new(load.group, peer.variant, peer.label, load.unit, move || {
                write_files(suite, load, mount.at(), &roles)
            })
        }));
    }
    let title = "New files of a bucket 30 ms away, closed within the time: staged ones are on the disks of two of three nodes then.";
    suite.measure("staged", title, cases, notes)
}

fn loads(quick: bool) -> [StagedLoad; 3] {
    let checkpoint = StagedLoad {
        group: "a checkpoint of 8 ranks",
        unit: FigureUnit::Bandwidth,
        files: 8,
        threads: 8,
        bytes: if quick { 16 << 20 } else { 128 << 20 },
        floor: Some(0.45),
    };
    let small = StagedLoad {
        group: "files of 10 KiB, 8 threads",
        unit: FigureUnit::Rate,
        files: if quick { 500 } else { 4000 },
        threads: 8,
        bytes: 10 << 10,
        floor: None,
    };
    let alone = StagedLoad { group: "files of 10 KiB, 1 thread", files: small.files / 8, threads: 1, ..small };
    [checkpoint, small, alone]
}

impl StagedRig {
    fn start(suite: &BenchSuite) -> Result<StagedRig> {
        let server = start_in_memory(suite, "staged")?.behind_link(ROUND_TRIP)?;
        let port = child::free_port().map_err(|e| BenchError::io("no free port", &e))?;
        let registry = format!("coordinator://127.0.0.1:{port}");
        let mut command = child::command_in(suite.memory.spurline()?, None);
        command.args(["coordinator", "--group-network", "127.0.0.1", "--group-port", &port.to_string()]);
        command.args(["--allow-anyone", "--state-file", "none", "--metrics", "none"]);
        let mut coordinator = ServerProcess::start(command, "the coordinator", &suite.memory.log("coordinator")?)?;
        coordinator.wait_for_listener(&format!("127.0.0.1:{port}"))?;
        let source = format!("s3://{S3_BUCKET}");
        let group = ["--registry", &registry, "--cache-group", STAGED_GROUP];
        let start_node = |number: usize| {
            let cache = suite.disk.empty_subdir(&format!("stage-{number}"))?.display().to_string();
            let name = format!("node-{number}");
            let domain = format!("domain-{number}");
            let words = ["--writable", "--name", &name, "--failure-domain", &domain, "--stage-size", "8G"];
            let disk = ["--cache-dir", &cache, "--cache-size", "8G", "--free-space-ratio", "0"];
            let words = [&words[..], &disk, &group].concat();
            let address = format!("127.0.0.1:{}", usize::from(FIRST_NODE_PORT) + number);
            suite.memory.node(&source, &address, None, &words, &server.env())
        };
        let nodes = (0..STAGED_NODES).map(start_node).collect::<Result<Vec<_>>>()?;
        let direct = suite.memory.mount("stage-direct", &source, None, &[&["--rw"], &group[..]].concat(), &[])?;
        let words = [&["--rw", "--stage"], &group[..]].concat();
        let mut last = None;
        let staged = stop::wait_until("the nodes to take staged files", STAGE_TIMEOUT, Duration::from_secs(1), || {
            match suite.memory.mount("stage", &source, None, &words, &[]) {
                Ok(mount) => Ok(Some(mount)),
                Err(error) => {
                    last = Some(error);
                    Ok(None)
                }
            }
        });
        let staged = staged.map_err(|error| last.unwrap_or(error))?;
        Ok(StagedRig { registry, staged, direct, nodes, _coordinator: coordinator, server })
    }

    /// Programs compute between two checkpoints: the uploads of the files before have ended.
    fn await_uploads(&self, suite: &BenchSuite) -> Result<()> {
        stop::wait_until("the uploads of staged files", STAGE_TIMEOUT, Duration::from_millis(200), || {
            let mut command = child::command_in(suite.memory.spurline()?, None);
            command.args([
                "status",
                "--unsaved",
                "--json",
                "--cache-group",
                STAGED_GROUP,
                "--registry",
                &self.registry,
            ]);
            let listed = child::run_to_end(command, STAGE_TIMEOUT)?;
            Ok(listed.out.contains("\"count\":0,").then_some(()))
        })
    }

    fn roles<'a>(&'a self, mount: &'a MountUnderTest) -> Vec<CpuRole<'a>> {
        let nodes = self.nodes.iter().map(|node| ("node", node.daemon()));
        [("mount", mount.daemon()), ("server", self.server.daemon())].into_iter().chain(nodes).collect()
    }
}

/// Writes below a mountpoint.
fn write_files(suite: &BenchSuite, load: StagedLoad, at: &Path, roles: &[CpuRole<'_>]) -> Result<CaseSample> {
    let folder = at.join(format!("sample-{}", suite.new_number()));
    std::fs::create_dir(&folder).in_file(&folder)?;
    let StagedLoad { threads, files, bytes, .. } = load;
    let order = PartOrder::MakeFiles { prefix: folder.join("f"), threads, files, bytes, sync: false };
    suite.part_sample(&order, None, load.unit, "writer", roles)
}

/// Writes each file twice to the disk, and syncs both; the figure is that of one.
fn write_twice(suite: &BenchSuite, load: StagedLoad) -> Result<CaseSample> {
    let folder = suite.disk.empty_subdir("stage-plain")?;
    let StagedLoad { threads, files, bytes, .. } = load;
    let order = PartOrder::MakeFiles { prefix: folder.join("f"), threads, files: 2 * files, bytes, sync: true };
    let twice = suite.part_sample(&order, None, load.unit, "writer", &[])?;
    Ok(CaseSample { value: twice.value / 2.0, ..twice })
}
