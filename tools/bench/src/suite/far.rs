//! First reads from a store at the other end of a link: small reads, long files, and many small files, alone and through a node.

use super::s3_server::{ColdMount, LINK_BYTES_PER_SECOND, S3_BUCKET, S3Process, start_in_memory};
use super::section::SuiteSection;
use super::setup::{BenchSuite, FioLoad, fio_sample, with_cpu};
use crate::child;
use crate::error::{BenchError, Result};
use crate::fio::FioJob;
use crate::measure::{BenchCase, CaseSample, FigureUnit};
use crate::part::{FetchPart, FolderPass, PartOrder, PutPart, numbered_path};
use serde_json::Value;
use std::time::Duration;

const FAR_TRIP: Duration = Duration::from_millis(30);
const NEAR_TRIP: Duration = Duration::from_millis(5);
/// Bytes of the long files of a load together.
const LONG_BYTES: u64 = 512 << 20;
const SMALL_BYTES: u64 = 100 << 10;
const WALKERS: usize = 8;
const LOAD_TIMEOUT: Duration = Duration::from_secs(600);

/// A long file, and as many bytes in a file for each of several readers.
const LONG_LOADS: [FioLoad; 2] = [
    FioLoad::sequential("1 reader", "read", 1 << 20, 1, 0.95),
    FioLoad::sequential("8 readers", "read", 1 << 20, 8, 0.95),
];
const FIRST_LOAD: FioLoad = FioLoad::random("4 KiB of a long file, 30 ms to the store", 4096, 1, 1.0 / 1.1);

/// A store at the other end of a link, from which new mounts with empty caches read.
struct FarStore<'a> {
    suite: &'a BenchSuite,
    server: S3Process,
}

pub(super) fn run(suite: &BenchSuite) -> Result<SuiteSection> {
    child::require_program("fio", "fio")?;
    let count = if suite.quick { 4_000 } else { 20_000 };
    let long = LONG_LOADS.map(|load| (load.jobs, LONG_BYTES / load.jobs as u64));
    let far = &FarStore::start(suite, "far", FAR_TRIP, &long)?;
    let near = &FarStore::start(suite, "near", NEAR_TRIP, &[(count, SMALL_BYTES)])?;
    let trips = 1.0 / FAR_TRIP.as_secs_f64();
    let mut cases = vec![BenchCase::known(FIRST_LOAD.name, "ceiling", "a round trip", FigureUnit::Rate, trips)];
    cases.extend(far.mount_cases(FIRST_LOAD.name, FigureUnit::Rate, FIRST_LOAD.floor, move |cold: &ColdMount| {
        far.read_long(cold, &FIRST_LOAD, Some(suite.time))
    }));
    for load in &LONG_LOADS {
        for (what, runtime) in [("first second", Some(Duration::from_secs(1))), ("512 MiB", None)] {
            let group = format!("{what}, {}, 30 ms to the store, 3 Gbit/s", load.name);
            let link = LINK_BYTES_PER_SECOND as f64;
            cases.push(BenchCase::known(&group, "ceiling", "the link", load.unit, link));
            cases.extend(far.mount_cases(&group, load.unit, load.floor, move |cold: &ColdMount| {
                far.read_long(cold, load, runtime)
            }));
        }
    }
    let group = format!("{count} files of 100 KiB as listed, 8 threads, 5 ms to the store");
    cases.push(BenchCase::new(&group, "ceiling", "plain client, 8 requests", FigureUnit::Rate, move || {
        let to = Some(suite.memory.scratch.empty_subdir("copied")?);
        let source = format!("s3://{S3_BUCKET}");
        let part = FetchPart { source, path: count.to_string(), to, threads: WALKERS };
        near.server.part_sample(suite, &PartOrder::Fetch(part), FigureUnit::Rate, "reader")
    }));
    cases.extend(near.mount_cases(&group, FigureUnit::Rate, 0.9, move |cold: &ColdMount| near.walk(cold, count)));
    let load = BenchCase::new(&group, "load", "spurline load, 8 at a time", FigureUnit::Rate, move || {
        near.load(&near.server.cold_mount(suite, false)?, count)
    });
    cases.push(load.against("of the first row", &["ceiling"], Some(0.9)));
    let title = "First reads of a bucket, each by a new mount with empty caches.";
    let notes = vec!["The link is a relay on loopback; its processor time is in no figure.".into()];
    suite.measure("far", title, cases, notes)
}

impl<'a> FarStore<'a> {
    /// A server in memory, with folders of as many files of a length.
    fn start(suite: &'a BenchSuite, variant: &'static str, trip: Duration, folders: &[(usize, u64)]) -> Result<Self> {
        let server = start_in_memory(suite, variant)?;
        for &(files, bytes) in folders {
            let part = PutPart { bucket: S3_BUCKET.into(), prefix: format!("{files}/f"), threads: 8, files, bytes };
            server.part_sample(suite, &PartOrder::Put(part), FigureUnit::Bandwidth, "writer")?;
        }
        Ok(FarStore { suite, server: server.behind_link(trip)? })
    }

    /// A mount alone, and a mount of a node.
    fn mount_cases(
        &'a self,
        group: &str,
        unit: FigureUnit,
        floor: f64,
        take: impl Fn(&ColdMount) -> Result<CaseSample> + Copy + 'a,
    ) -> impl Iterator<Item = BenchCase<'a>> {
        [("alone", "mount", false), ("node", "mount of a node", true)].into_iter().map(
            move |(variant, label, of_node)| {
                let case = BenchCase::new(group, variant, label, unit, move || {
                    self.server.cold_mount(self.suite, of_node).and_then(|cold| take(&cold))
                });
                case.against("of the first row", &["ceiling"], Some(floor))
            },
        )
    }

    /// Reads the long files of a load for a time, or whole.
    fn read_long(&self, cold: &ColdMount, load: &FioLoad, runtime: Option<Duration>) -> Result<CaseSample> {
        let prefix = cold.mount.at().join(load.jobs.to_string()).join("f");
        let files = (0..load.jobs).map(|job| numbered_path(&prefix, job)).collect();
        let job = FioJob { runtime, ..self.suite.new_job(files, load, LONG_BYTES / load.jobs as u64) };
        fio_sample(&job, load.unit, &cold.roles(&self.server))
    }

    fn walk(&self, cold: &ColdMount, count: usize) -> Result<CaseSample> {
        let dir = cold.mount.at().join(count.to_string());
        let order = PartOrder::ReadFolder { dir, threads: WALKERS, pass: FolderPass::Read, named: None };
        let sample = self.suite.part_sample(&order, None, FigureUnit::Rate, "reader", &cold.roles(&self.server))?;
        if sample.bytes == count as u64 * SMALL_BYTES {
            return Ok(sample);
        }
        Err(BenchError::Failed(format!("{} files with {} bytes were read", sample.ops, sample.bytes)))
    }

    fn load(&self, cold: &ColdMount, count: usize) -> Result<CaseSample> {
        let mut command = child::command_in(self.suite.memory.spurline()?, None);
        command.arg("load").arg(cold.mount.at().join(count.to_string())).args(["-p", "8", "--json"]);
        let (done, cpu) = with_cpu(&cold.roles(&self.server), || child::run_to_end(command, LOAD_TIMEOUT))?;
        let bytes = count as u64 * SMALL_BYTES;
        let job: Value = serde_json::from_str(done.out.trim()).unwrap_or_default();
        if job["state"] != "SUCCEEDED" || job["bytes_moved"].as_f64() != Some(bytes as f64) {
            return Err(BenchError::Failed(format!("unexpected end of the job: {}", done.out)));
        }
        let value = count as f64 / job["seconds"].as_f64().unwrap_or(f64::INFINITY);
        Ok(CaseSample { value, bytes, ops: count as u64, cpu, latency_us: None })
    }
}
