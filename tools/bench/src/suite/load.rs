//! `spurline load` of many small files from an S3 server, against a plain parallel copy of the same files.

use super::s3;
use super::section::SuiteSection;
use super::setup::{BenchSuite, with_cpu};
use crate::child;
use crate::error::{BenchError, FileContext as _, Result};
use crate::measure::{BenchCase, CaseSample, FigureUnit};
use crate::part::{FetchPart, PartOrder};
use crate::scratch::{self, file_name};
use crate::terminal::show_progress;
use serde_json::Value;
use std::time::Duration;

const LOAD_BUCKET: &str = "bench";
const LOAD_FILE_BYTES: u64 = 10 << 10;
/// Concurrent requests, in the copy and in the job.
const LOAD_REQUESTS: usize = 50;
const LOAD_JOB_TIMEOUT: Duration = Duration::from_secs(600);

pub(super) fn run(suite: &BenchSuite) -> Result<SuiteSection> {
    let count: u64 = if suite.quick { 10_000 } else { 100_000 };
    let buckets = suite.memory.scratch.subdir("source-load")?;
    let folder = buckets.join(LOAD_BUCKET).join("set");
    if !folder.exists() {
        std::fs::create_dir_all(&folder).in_file(&folder)?;
        show_progress("load  writing the files");
        (0..count).try_for_each(|i| scratch::write_file(&folder.join(file_name(i as usize)), i, LOAD_FILE_BYTES))?;
    }
    let server = s3::start_embedded(suite, &buckets, None)?;
    let source = format!("s3://{LOAD_BUCKET}");
    let group = format!("{count} files of 10 KiB, {LOAD_REQUESTS} at a time");
    let copy = BenchCase::new(&group, "copy", "plain copy to files", FigureUnit::Rate, || {
        let to = Some(suite.memory.scratch.empty_subdir("copied")?);
        let part = FetchPart { source: source.clone(), path: "set".into(), to, threads: LOAD_REQUESTS };
        let sample = server.part_sample(suite, &PartOrder::Fetch(part), FigureUnit::Rate, "reader")?;
        if sample.ops == count { Ok(sample) } else { Err(BenchError::Failed(format!("{} files", sample.ops))) }
    });
    let load = BenchCase::new(&group, "load", "spurline load, mount alone", FigureUnit::Rate, || {
        let cache = suite.memory.empty_dir("cache-load")?;
        let words = ["--cache-dir", &cache, "--cache-size", "8G", "--free-space-ratio", "0"];
        let mounted = suite.memory.mount("load", &source, None, &words, &server.env())?;
        let mut command = child::command_in(suite.memory.spurline()?, None);
        command.arg("load").arg(mounted.at().join("set")).args(["-p", &LOAD_REQUESTS.to_string(), "--json"]);
        let roles = [("mount", mounted.daemon()), ("server", server.daemon())];
        let (done, cpu) = with_cpu(&roles, || child::run_to_end(command, LOAD_JOB_TIMEOUT))?;
        let job: Value =
            serde_json::from_str(done.out.trim()).map_err(|e| BenchError::Failed(format!("load: no JSON: {e}")))?;
        if job["state"] != "SUCCEEDED" || job["bytes_moved"].as_f64() != Some((count * LOAD_FILE_BYTES) as f64) {
            return Err(BenchError::Failed(format!("unexpected end of the job: {job}")));
        }
        let value = job["files_done"].as_f64().unwrap_or(0.0) / job["seconds"].as_f64().unwrap_or(0.0);
        Ok(CaseSample { value, bytes: count * LOAD_FILE_BYTES, ops: count, cpu, latency_us: None })
    });
    let load = load.against("of the plain copy", &["copy"], Some(0.9));
    let title = "Filling an empty cache on tmpfs from the embedded S3 server on this machine.";
    suite.measure("load", title, vec![copy, load], Vec::new())
}
