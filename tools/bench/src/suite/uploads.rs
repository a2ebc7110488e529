//! Files written to a bucket by a lone mount and through a node, closed within the measured time, against a plain client that
//! writes the same objects with the same part size.

use super::peers::Peer;
use super::s3_server::{S3_BUCKET, S3Process, start_in_memory, start_in_namespace, start_versitygw};
use super::section::SuiteSection;
use super::setup::{BenchSuite, CpuRole, optional};
use crate::error::{BenchError, FileContext as _, Result};
use crate::measure::{BenchCase, CaseSample, FigureUnit};
use crate::mount::{MountUnderTest, NodeUnderTest};
use crate::netns::BridgedHosts;
use crate::part::{PartOrder, PutPart, made_content, numbered_path};
use std::path::Path;
use std::time::Duration;

/// Nodes with a link each.
const LINKS: usize = 4;
const LINK_MEGABITS: u32 = 200;
const LINKED_NODE_PORT: u16 = 7109;

/// Objects that are written by several threads.
#[derive(Clone, Copy)]
struct UploadLoad {
    group: &'static str,
    unit: FigureUnit,
    files: usize,
    threads: usize,
    bytes: u64,
    /// Whether the store is at the other end of a long link.
    is_far: bool,
    /// The least share of the plain client, alone and through a node.
    floors: [f64; 2],
}

/// The server, and the mounts that write there.
struct UploadRig<'a> {
    suite: &'a BenchSuite,
    server: S3Process,
    lone: MountUnderTest,
    through_node: MountUnderTest,
    // Ends after its mount.
    node: NodeUnderTest,
}

/// A mount of nodes that reach the server by a slow link each.
struct LinkedNodes {
    // Dropped in this order.
    mount: MountUnderTest,
    nodes: Vec<NodeUnderTest>,
    server: S3Process,
    _net: BridgedHosts,
}

pub(super) fn run(suite: &BenchSuite) -> Result<SuiteSection> {
    let mut notes =
        vec!["Server, node, mount and writer share this machine's processors. The caches are on tmpfs, and the bucket is in memory.".into()];
    let near = start_in_memory(suite, "uploads")?;
    let near = &start_rig(suite, near, "uploads", "127.0.0.1:7105")?;
    let far = start_in_memory(suite, "uploads-far")?.behind_link(Duration::from_millis(30))?;
    let far = &start_rig(suite, far, "uploads-far", "127.0.0.1:7106")?;
    let buckets = suite.memory.scratch.subdir("source-uploads")?;
    std::fs::create_dir_all(buckets.join(S3_BUCKET)).in_file(&buckets)?;
    let other = start_versitygw(suite, &buckets);
    let other = other.and_then(|server| start_rig(suite, server, "uploads-other", "127.0.0.1:7108"));
    let other = optional(&mut notes, "versitygw", other)?;
    let linked = optional(&mut notes, "slow links", LinkedNodes::start(suite))?;
    let loads = loads(suite.quick);
    let [long, _, small, _] = loads;
    let mut peers = Vec::new();
    if let Some(rig) = &other {
        for peer in Peer::open_all(suite, &rig.server, &mut notes)? {
            let mount = peer.mount()?;
            peers.push((mount, peer));
        }
    }
    let mut cases: Vec<BenchCase<'_>> =
        loads.into_iter().flat_map(|load| if load.is_far { far } else { near }.cases(load)).collect();
    if let Some(rig) = &other {
        for (group, load) in [("one long file, versitygw", long), ("files of 10 KiB, 8 threads, versitygw", small)] {
            let load = UploadLoad { group, ..load };
            let of_rig = rig.cases(load);
            cases.extend(of_rig.into_iter().map(|case| case.against("of JuiceFS", &["juicefs"], None)));
            cases.extend(peers.iter().map(|(mount, peer)| {
                let roles = mount.roles(&rig.server);
                BenchCase::new(group, peer.variant, peer.label, load.unit, move || {
                    write_files(suite, load, mount.at(), mount.at(), &roles)
                })
            }));
        }
    }
    if let Some(linked) = &linked {
        let load = UploadLoad { group: "one long file, four nodes behind links of 200 Mbit/s", ..long };
        let rate = LINKS as f64 * f64::from(LINK_MEGABITS) * 125e3;
        cases.push(BenchCase::known(load.group, "links", "the links", load.unit, rate));
        let at = linked.mount.at();
        let case = BenchCase::new(load.group, "nodes", "mount of the nodes", load.unit, move || {
            write_files(suite, load, at, at, &linked.roles())
        });
        cases.push(case.against("of the links", &["links"], Some(0.8)));
    }
    let title =
        "New files of a bucket on this machine, closed within the time: an object is whole when its file is closed.";
    suite.measure("uploads", title, cases, notes)
}

fn loads(quick: bool) -> [UploadLoad; 4] {
    let long = UploadLoad {
        group: "one long file",
        unit: FigureUnit::Bandwidth,
        files: 1,
        threads: 1,
        bytes: if quick { 128 << 20 } else { 1 << 30 },
        is_far: false,
        floors: [0.95, 0.85],
    };
    let four = UploadLoad { group: "four long files at once", files: 4, threads: 4, bytes: long.bytes / 4, ..long };
    let small = UploadLoad {
        group: "files of 10 KiB, 8 threads",
        unit: FigureUnit::Rate,
        files: if quick { 1000 } else { 10_000 },
        threads: 8,
        bytes: 10 << 10,
        is_far: false,
        floors: [0.9, 0.9],
    };
    let far = UploadLoad { group: "files of 10 KiB, 8 threads, 30 ms to the store", is_far: true, ..small };
    [long, four, small, far]
}

fn start_rig<'a>(suite: &'a BenchSuite, server: S3Process, name: &str, node: &str) -> Result<UploadRig<'a>> {
    let source = format!("s3://{S3_BUCKET}");
    let cache = suite.memory.empty_dir(&format!("cache-{name}-alone"))?;
    let words = ["--rw", "--cache-dir", &cache, "--cache-size", "4G", "--free-space-ratio", "0"];
    let lone = suite.memory.mount(&format!("{name}-alone"), &source, None, &words, &server.env())?;
    let words = ["--writable", "--cache-size", "4G", "--free-space-ratio", "0"];
    let node = suite.memory.node(&source, node, None, &words, &server.env())?;
    let words = ["--rw", "--registry", &format!("static:{}", node.addr)];
    let through_node = suite.memory.mount(&format!("{name}-node"), &source, None, &words, &[])?;
    Ok(UploadRig { suite, server, lone, through_node, node })
}

impl UploadRig<'_> {
    /// The plain client, and the mounts beside.
    fn cases(&self, load: UploadLoad) -> Vec<BenchCase<'_>> {
        let mut cases =
            vec![BenchCase::new(load.group, "plain", "plain client", load.unit, move || self.put_objects(load))];
        for (variant, label, mount, other, floor) in [
            ("alone", "mount", &self.lone, &self.through_node, load.floors[0]),
            ("node", "mount of a node", &self.through_node, &self.lone, load.floors[1]),
        ] {
            let mut roles = vec![("mount", mount.daemon()), ("server", self.server.daemon())];
            roles.extend((variant == "node").then(|| ("node", self.node.daemon())));
            // Another mount checks.
            let case = BenchCase::new(load.group, variant, label, load.unit, move || {
                write_files(self.suite, load, mount.at(), other.at(), &roles)
            });
            cases.push(case.against("of the plain client", &["plain"], Some(floor)));
        }
        cases
    }

    fn put_objects(&self, load: UploadLoad) -> Result<CaseSample> {
        let folder = new_folder(self.suite);
        let UploadLoad { threads, files, bytes, .. } = load;
        let part = PutPart { bucket: S3_BUCKET.into(), prefix: format!("{folder}/f"), threads, files, bytes };
        let sample = self.server.part_sample(self.suite, &PartOrder::Put(part), load.unit, "writer")?;
        check_objects(&self.lone.at().join(folder), load)?;
        Ok(sample)
    }
}

impl LinkedNodes {
    /// Of the hosts on a bridge, the first has the server, the last the mount.
    fn start(suite: &BenchSuite) -> Result<LinkedNodes> {
        let net = BridgedHosts::new(LINKS + 2)?;
        net.shape_links(1..LINKS + 1, LINK_MEGABITS, Duration::ZERO)?;
        let server = start_in_namespace(suite, net.namespace(0), &format!("{}:9000", net.address(0)))?;
        let source = format!("s3://{S3_BUCKET}");
        let words = ["--writable", "--cache-size", "0", "--buffer-size", "600M"];
        let start_node = |host| {
            let address = format!("{}:{LINKED_NODE_PORT}", net.address(host));
            suite.memory.node(&source, &address, Some(net.namespace(host)), &words, &server.env())
        };
        let nodes = (1..=LINKS).map(start_node).collect::<Result<Vec<_>>>()?;
        let members: Vec<&str> = nodes.iter().map(|node| node.addr.as_str()).collect();
        let words = ["--rw", "--buffer-size", "1G", "--registry", &format!("static:{}", members.join(","))];
        let mount = suite.memory.mount("uploads-linked", &source, Some(net.namespace(LINKS + 1)), &words, &[])?;
        Ok(LinkedNodes { mount, nodes, server, _net: net })
    }

    fn roles(&self) -> Vec<CpuRole<'_>> {
        let nodes = self.nodes.iter().map(|node| ("node", node.daemon()));
        [("mount", self.mount.daemon()), ("server", self.server.daemon())].into_iter().chain(nodes).collect()
    }
}

fn new_folder(suite: &BenchSuite) -> String {
    format!("sample-{}", suite.new_number())
}

/// Writes below a mountpoint, and checks below another.
fn write_files(
    suite: &BenchSuite,
    load: UploadLoad,
    at: &Path,
    other: &Path,
    roles: &[CpuRole<'_>],
) -> Result<CaseSample> {
    let folder = new_folder(suite);
    let prefix = at.join(&folder);
    std::fs::create_dir(&prefix).in_file(&prefix)?;
    let UploadLoad { threads, files, bytes, .. } = load;
    let order = PartOrder::MakeFiles { prefix: prefix.join("f"), threads, files, bytes, sync: false };
    let sample = suite.part_sample(&order, None, load.unit, "writer", roles)?;
    check_objects(&other.join(folder), load)?;
    Ok(sample)
}

/// Reads the last object of a folder whole, and removes all of them, unless each takes long.
fn check_objects(folder: &Path, load: UploadLoad) -> Result<()> {
    let last = numbered_path(&folder.join("f"), load.files - 1);
    if std::fs::read(&last).unwrap_or_default() != made_content(load.bytes) {
        return Err(BenchError::Failed("the last object is not whole in the bucket".into()));
    }
    if load.is_far { Ok(()) } else { std::fs::remove_dir_all(folder).in_file(folder) }
}
