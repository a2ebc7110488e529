//! Files written to a bucket by a lone mount and through a node, closed within the measured time, against a plain client that
//! writes the same objects with the same part size.

use super::s3::{S3Process, start_in_memory};
use super::section::SuiteSection;
use super::setup::{BenchSuite, CpuRole};
use crate::error::{BenchError, FileContext as _, Result};
use crate::measure::{BenchCase, CaseSample, FigureUnit};
use crate::mount::{MountUnderTest, NodeUnderTest};
use crate::part::{PartOrder, PutPart, made_content, numbered_path};
use std::path::Path;
use std::time::Duration;

const BUCKET: &str = "bench";

/// Objects that are written by several threads.
#[derive(Clone, Copy)]
struct UploadLoad {
    group: &'static str,
    unit: FigureUnit,
    files: usize,
    threads: usize,
    bytes: u64,
    /// Whether the store takes time for each object and part.
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

pub(super) fn run(suite: &BenchSuite) -> Result<SuiteSection> {
    let near = &start_rig(suite, "uploads", "127.0.0.1:7105", Duration::ZERO)?;
    // The time of a far store for an object or part.
    let far = &start_rig(suite, "uploads-far", "127.0.0.1:7106", Duration::from_millis(30))?;
    let mut cases = Vec::new();
    for load in loads(suite.quick) {
        let rig = if load.is_far { far } else { near };
        cases.push(BenchCase::new(load.group, "plain", "plain client", load.unit, move || rig.put_objects(load)));
        for (variant, label, mount, other, floor) in [
            ("alone", "mount", &rig.lone, &rig.through_node, load.floors[0]),
            ("node", "mount of a node", &rig.through_node, &rig.lone, load.floors[1]),
        ] {
            let case =
                BenchCase::new(load.group, variant, label, load.unit, move || rig.write_files(load, mount, other));
            cases.push(case.against("of the plain client", &["plain"], Some(floor)));
        }
    }
    let notes =
        vec!["Server, node, mount and writer share this machine's processors. The caches are on tmpfs, and the bucket is in memory.".into()];
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
    let far = UploadLoad { group: "files of 10 KiB, 8 threads, a store that takes 30 ms", is_far: true, ..small };
    [long, four, small, far]
}

fn start_rig<'a>(suite: &'a BenchSuite, name: &str, node: &str, put_delay: Duration) -> Result<UploadRig<'a>> {
    let server = start_in_memory(suite, BUCKET, put_delay)?;
    let source = format!("s3://{BUCKET}");
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
    fn new_folder(&self) -> String {
        format!("sample-{}", self.suite.new_number())
    }

    fn put_objects(&self, load: UploadLoad) -> Result<CaseSample> {
        let folder = self.new_folder();
        let UploadLoad { threads, files, bytes, .. } = load;
        let part = PutPart { bucket: BUCKET.into(), prefix: format!("{folder}/f"), threads, files, bytes };
        let sample = self.server.part_sample(self.suite, &PartOrder::Put(part), load.unit, "writer")?;
        check_objects(&folder, load, &self.lone)?;
        Ok(sample)
    }

    /// Writes by a mount, and checks by another one.
    fn write_files(&self, load: UploadLoad, mount: &MountUnderTest, other: &MountUnderTest) -> Result<CaseSample> {
        let folder = self.new_folder();
        let at = mount.at().join(&folder);
        std::fs::create_dir(&at).in_file(&at)?;
        let UploadLoad { threads, files, bytes, .. } = load;
        let order = PartOrder::MakeFiles { prefix: at.join("f"), threads, files, bytes };
        let mut roles: Vec<CpuRole<'_>> = vec![("mount", mount.daemon()), ("server", self.server.daemon())];
        roles.extend(std::ptr::eq(mount, &raw const self.through_node).then(|| ("node", self.node.daemon())));
        let sample = self.suite.part_sample(&order, None, load.unit, "writer", &roles)?;
        check_objects(&folder, load, other)?;
        Ok(sample)
    }
}

/// Another mount reads the last object whole, and removes all of them.
fn check_objects(folder: &str, load: UploadLoad, other: &MountUnderTest) -> Result<()> {
    let folder = other.at().join(folder);
    let last = numbered_path(&folder.join(Path::new("f")), load.files - 1);
    if std::fs::read(&last).unwrap_or_default() != made_content(load.bytes) {
        return Err(BenchError::Failed("the last object is not whole in the bucket".into()));
    }
    std::fs::remove_dir_all(&folder).in_file(&folder)
}
