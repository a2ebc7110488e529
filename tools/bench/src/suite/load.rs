//! `spurline load` of many small files from an S3 server, against a plain parallel copy of the same files.

use super::section::SuiteSection;
use super::{BenchSuite, file_name, part_sample, s3, with_cpu};
use crate::child;
use crate::error::{BenchError, Result};
use crate::measure::{BenchCase, CaseSample, FigureUnit};
use crate::scratch;
use serde_json::Value;
use std::time::Duration;

const LOAD_BUCKET: &str = "bench";
const LOAD_FILE_BYTES: u64 = 10 << 10;
/// Concurrent requests, in the copy and in the job.
const LOAD_REQUESTS: &str = "50";
const LOAD_TIMEOUT: Duration = Duration::from_secs(600);

pub(super) fn run(suite: &BenchSuite) -> Result<SuiteSection> {
    let count: usize = if suite.quick { 10_000 } else { 100_000 };
    let buckets = suite.memory.subdir("source-load")?;
    let folder = buckets.join(LOAD_BUCKET).join("set");
    if !folder.exists() {
        std::fs::create_dir_all(&folder).map_err(|e| BenchError::io(folder.display(), &e))?;
        super::show_progress("load", "writing the files");
        (0..count).try_for_each(|i| scratch::write_file(&folder.join(file_name(i)), i as u64, LOAD_FILE_BYTES))?;
    }
    let server = s3::start_embedded(suite, &buckets, None)?;
    let source = format!("s3://{LOAD_BUCKET}");
    let group = format!("{count} files of 10 KiB, {LOAD_REQUESTS} at a time");
    let cases = vec![
        BenchCase::new(&group, "copy", "plain copy to files", FigureUnit::Rate, || {
            let to = suite.memory.empty_subdir("copied")?.display().to_string();
            let words = ["copy", &source, "set", "--to", &to, "--depth", LOAD_REQUESTS].map(String::from);
            let mut command = suite.part_command(&words, None);
            command.envs(server.env());
            let sample = part_sample(command, LOAD_TIMEOUT, FigureUnit::Rate, &[("server", server.daemon())])?;
            if sample.ops == count as u64 {
                Ok(sample)
            } else {
                Err(BenchError::Failed(format!("{} files", sample.ops)))
            }
        }),
        BenchCase::new(&group, "load", "spurline load, mount alone", FigureUnit::Rate, || {
            let cache = suite.memory.empty_subdir("cache-load")?.display().to_string();
            let words = ["--cache-dir", &cache, "--cache-size", "8G", "--free-space-ratio", "0"];
            let mounted = suite.mount_with("load", &source, None, &words, &server.env())?;
            let mut command = child::command_in(&suite.spurline, None);
            command.arg("load").arg(mounted.at().join("set")).args(["-p", LOAD_REQUESTS, "--json"]);
            let roles = [("mount", mounted.daemon()), ("server", server.daemon())];
            let (done, cpu) = with_cpu(&roles, || child::run_to_end(command, LOAD_TIMEOUT))?;
            let job: Value =
                serde_json::from_str(done.out.trim()).map_err(|e| BenchError::Failed(format!("load: no JSON: {e}")))?;
            if job["state"] != "SUCCEEDED" || number_in(&job, "bytes_moved") != (count as u64 * LOAD_FILE_BYTES) as f64
            {
                return Err(BenchError::Failed(format!("unexpected end of the job: {job}")));
            }
            let value = number_in(&job, "files_done") / number_in(&job, "seconds");
            Ok(CaseSample { value, bytes: count as u64 * LOAD_FILE_BYTES, ops: count as u64, cpu, latency_us: None })
        })
        .against("of the plain copy", &["copy"], Some(0.9)),
    ];
    let rows = suite.rounds("load", cases)?;
    let title = "Filling an empty cache on tmpfs from the embedded S3 server on this machine.";
    Ok(SuiteSection { name: "load", title, skipped: None, notes: Vec::new(), rows })
}

fn number_in(json: &Value, key: &str) -> f64 {
    json[key].as_f64().unwrap_or(0.0)
}
