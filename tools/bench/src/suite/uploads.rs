//! Files written to a bucket by a lone mount and through a node, closed within the measured time, against a plain client that
//! writes the same objects with the same part size.

use super::s3::{S3Process, start_in_memory};
use super::section::SuiteSection;
use super::{BenchSuite, CpuRole, user_sample};
use crate::error::{BenchError, Result};
use crate::measure::{BenchCase, CaseSample, FigureUnit};
use crate::mount::{MountUnderTest, NodeUnderTest};
use crate::part::written_block;
use spurline_types::Size;
use std::cell::Cell;
use std::time::Duration;

const BUCKET: &str = "bench";
/// The time of a far store for an object or part.
const FAR_PUT_DELAY: Duration = Duration::from_millis(30);
const UPLOAD_TIMEOUT: Duration = Duration::from_secs(300);

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

/// The parts of a rig that differ between two.
struct RigPlace {
    name: &'static str,
    node_addr: &'static str,
    put_delay: Duration,
}

const NEAR_PLACE: RigPlace = RigPlace { name: "uploads", node_addr: "127.0.0.1:7105", put_delay: Duration::ZERO };
const FAR_PLACE: RigPlace = RigPlace { name: "uploads-far", node_addr: "127.0.0.1:7106", put_delay: FAR_PUT_DELAY };

/// The server, and what writes to it.
struct UploadRig<'a> {
    suite: &'a BenchSuite,
    server: S3Process,
    lone: MountUnderTest,
    node: NodeUnderTest,
    through_node: MountUnderTest,
    /// Number of the next sample: each has names of its own.
    next: Cell<usize>,
}

pub(super) fn run(suite: &BenchSuite) -> Result<SuiteSection> {
    let near = &start_rig(suite, &NEAR_PLACE)?;
    let far = &start_rig(suite, &FAR_PLACE)?;
    let mut cases = Vec::new();
    for load in loads(suite.quick) {
        let rig = if load.is_far { far } else { near };
        cases.push(BenchCase::new(load.group, "plain", "plain client", load.unit, move || rig.put_objects(load)));
        for (variant, label, mount, floor) in [
            ("alone", "mount", &rig.lone, load.floors[0]),
            ("node", "mount of a node", &rig.through_node, load.floors[1]),
        ] {
            let case = BenchCase::new(load.group, variant, label, load.unit, move || rig.write_files(load, mount));
            cases.push(case.against("of the plain client", &["plain"], Some(floor)));
        }
    }
    let rows = suite.rounds("uploads", cases)?;
    let notes =
        vec!["Server, node, mount and writer share this machine's processors. The caches are on tmpfs, and the bucket is in memory.".into()];
    let title =
        "New files of a bucket on this machine, closed within the time: an object is whole when its file is closed.";
    Ok(SuiteSection { name: "uploads", title, skipped: None, notes, rows })
}

fn loads(quick: bool) -> [UploadLoad; 4] {
    let long = if quick { 128 << 20 } else { 1 << 30 };
    let small = if quick { 1000 } else { 10_000 };
    let long = UploadLoad {
        group: "one long file",
        unit: FigureUnit::Bandwidth,
        files: 1,
        threads: 1,
        bytes: long,
        is_far: false,
        floors: [0.95, 0.85],
    };
    let four = UploadLoad { group: "four long files at once", files: 4, threads: 4, bytes: long.bytes / 4, ..long };
    let small = UploadLoad {
        group: "files of 10 KiB, 8 threads",
        unit: FigureUnit::Rate,
        files: small,
        threads: 8,
        bytes: 10 << 10,
        is_far: false,
        floors: [0.9, 0.9],
    };
    let far = UploadLoad { group: "files of 10 KiB, 8 threads, a store that takes 30 ms", is_far: true, ..small };
    [long, four, small, far]
}

fn start_rig<'a>(suite: &'a BenchSuite, place: &RigPlace) -> Result<UploadRig<'a>> {
    let server = start_in_memory(suite, BUCKET, place.put_delay)?;
    let name = place.name;
    let source = format!("s3://{BUCKET}");
    let cache = suite.memory.empty_subdir(&format!("cache-{name}-alone"))?.display().to_string();
    let words = ["--rw", "--cache-dir", &cache, "--cache-size", "4G", "--free-space-ratio", "0"];
    let lone = suite.mount_with(&format!("{name}-alone"), &source, None, &words, &server.env())?;
    let words = ["--writable", "--cache-size", "4G", "--free-space-ratio", "0"];
    let node = suite.node_with(&source, place.node_addr, None, &words, &server.env())?;
    let registry = format!("static:{}", node.addr);
    let words = ["--rw", "--registry", &registry];
    let through_node = suite.mount_with(&format!("{name}-node"), &source, None, &words, &[])?;
    Ok(UploadRig { suite, server, lone, node, through_node, next: Cell::new(0) })
}

impl UploadRig<'_> {
    fn new_folder(&self) -> String {
        format!("sample-{}", self.next.replace(self.next.get() + 1))
    }

    fn put_objects(&self, load: UploadLoad) -> Result<CaseSample> {
        let folder = self.new_folder();
        let mut words = ["put", BUCKET, "--prefix", &format!("{folder}/f")].map(String::from).to_vec();
        words.extend(load_words(load));
        let mut command = self.suite.part_command(&words, None);
        command.envs(self.server.env());
        let roles = [("server", self.server.daemon())];
        let sample = user_sample(command, UPLOAD_TIMEOUT, load.unit, "writer", &roles)?;
        self.check_objects(&folder, load, &self.lone)?;
        Ok(sample)
    }

    fn write_files(&self, load: UploadLoad, mount: &MountUnderTest) -> Result<CaseSample> {
        let folder = self.new_folder();
        let at = mount.at().join(&folder);
        std::fs::create_dir(&at).map_err(|e| BenchError::io(at.display(), &e))?;
        let mut words = vec!["create".to_owned(), at.display().to_string()];
        words.extend(load_words(load));
        let command = self.suite.part_command(&words, None);
        let mut roles: Vec<CpuRole<'_>> = vec![("mount", mount.daemon()), ("server", self.server.daemon())];
        let through_node = std::ptr::eq(mount, &raw const self.through_node);
        if through_node {
            roles.push(("node", self.node.daemon()));
        }
        let sample = user_sample(command, UPLOAD_TIMEOUT, load.unit, "writer", &roles)?;
        self.check_objects(&folder, load, if through_node { &self.lone } else { &self.through_node })?;
        Ok(sample)
    }

    /// Another mount reads the last object whole, and removes all of them.
    fn check_objects(&self, folder: &str, load: UploadLoad, other: &MountUnderTest) -> Result<()> {
        let folder = other.at().join(folder);
        let last = std::fs::read(folder.join(format!("f{}", load.files - 1))).unwrap_or_default();
        if last != written_block(0, load.bytes) {
            return Err(BenchError::Failed("the last object is not whole in the bucket".into()));
        }
        std::fs::remove_dir_all(&folder).map_err(|e| BenchError::io(folder.display(), &e))
    }
}

fn load_words(load: UploadLoad) -> Vec<String> {
    let UploadLoad { files, threads, bytes, .. } = load;
    let words = ["--files", &files.to_string(), "--threads", &threads.to_string(), "--size", &Size(bytes).to_string()];
    words.map(String::from).to_vec()
}
