//! fio: the arguments for the workloads here, and the figures of a job in the JSON. Knows nothing of the files.

use crate::child::{self, FinishedChild};
use crate::error::{BenchError, Result};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// A run of fio.
#[derive(Debug, Clone, Default)]
pub struct FioJob {
    /// The files; job n reads file n modulo the number of files.
    pub files: Vec<PathBuf>,
    /// `read`, `randread`, or `write` of files that are written again and again and synced at the end.
    pub pattern: &'static str,
    pub sync: bool,
    /// Bytes per read or write.
    pub block: u64,
    pub jobs: usize,
    /// Concurrent requests per process; above 1 with io_uring, else with pread.
    pub depth: usize,
    pub direct: bool,
    /// Drop the files' page cache first.
    pub drop_cache: bool,
    /// Duration; `None` reads every file once.
    pub runtime: Option<Duration>,
    /// Bytes of each file to read or write.
    pub size: u64,
    /// Distance between the start offsets of jobs that read the same file.
    pub apart: u64,
}

/// Bytes of each block that a job writes, which are repeated.
pub const WRITTEN_PATTERN: [u8; 4] = [0x53, 0x70, 0x75, 0x72];

/// The figures of a job, reads and writes together.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct FioFigures {
    pub bandwidth: f64,
    pub iops: f64,
    pub bytes: u64,
    /// Median and 99th percentile of an operation's time in microseconds, of the slower direction.
    pub latency_us: Option<(f64, f64)>,
    /// The longest operation in microseconds.
    pub max_us: f64,
}

impl FioFigures {
    /// The figures in an element of fio's `jobs` or `client_stats`.
    pub fn of_job(job: &Value) -> FioFigures {
        let ways = [&job["read"], &job["write"]];
        let sum = |name: &str| ways.iter().map(|way| number_of(&way[name])).sum::<f64>();
        let latency =
            |way: &&Value| (percentile(&way["clat_ns"], "50.000000"), percentile(&way["clat_ns"], "99.000000"));
        let moved = ways.iter().filter(|way| number_of(&way["io_bytes"]) > 0.0);
        FioFigures {
            bandwidth: sum("bw_bytes"),
            iops: sum("iops"),
            bytes: sum("io_bytes") as u64,
            latency_us: moved.map(latency).filter(|times| times.1 > 0.0).max_by(|a, b| a.1.total_cmp(&b.1)),
            max_us: ways.iter().map(|way| number_of(&way["clat_ns"]["max"]) / 1e3).fold(0.0, f64::max),
        }
    }
}

impl FioJob {
    /// The command line.
    pub fn to_args(&self) -> Vec<String> {
        let mut words: Vec<String> = vec![
            format!("--rw={}", self.pattern),
            format!("--bs={}", self.block),
            format!("--direct={}", u8::from(self.direct)),
            format!("--invalidate={}", u8::from(self.drop_cache)),
            format!("--size={}", self.size),
            "--group_reporting".into(),
            "--norandommap".into(),
            "--randrepeat=0".into(),
            "--output-format=json".into(),
        ];
        if self.pattern == "write" {
            let pattern: String = WRITTEN_PATTERN.iter().map(|byte| format!("{byte:02x}")).collect();
            words.push(format!("--buffer_pattern=0x{pattern}"));
            words.extend(
                ["--scramble_buffers=0", "--fallocate=none", "--overwrite=1", "--end_fsync=1"].map(String::from),
            );
            words.push(format!("--fdatasync={}", u8::from(self.sync)));
        } else {
            words.extend(["--readonly", "--allow_file_create=0"].map(String::from));
        }
        if self.depth > 1 {
            words.push("--ioengine=io_uring".into());
            words.push(format!("--iodepth={}", self.depth));
            // As the store reads disks: registered buffers and files.
            words.push("--fixedbufs=1".into());
            words.push("--registerfiles=1".into());
        } else {
            words.push("--ioengine=psync".into());
        }
        if let Some(runtime) = self.runtime {
            words.push("--time_based=1".into());
            words.push(format!("--runtime={}ms", runtime.as_millis()));
        }
        for job in 0..self.jobs {
            words.push(format!("--name=j{job}"));
            if self.apart > 0 {
                words.push(format!("--offset={}", self.apart * job as u64));
            }
            words.push(format!(
                "--filename={}",
                self.files[job % self.files.len()].display().to_string().replace(':', "\\:")
            ));
        }
        words
    }

    pub fn run(&self) -> Result<(FioFigures, FinishedChild)> {
        let fio = child::require_program("fio", "fio")?;
        let mut command = Command::new(fio);
        command.args(self.to_args()).current_dir("/");
        let limit = self.runtime.unwrap_or_default() * 3 + Duration::from_secs(300);
        let done = child::run_to_end(command, limit)?;
        Ok((parse_output(&done.out, self.sync)?, done))
    }
}

/// Parses fio's JSON; lines before are warnings. The time of a synced write is that of both calls.
fn parse_output(text: &str, synced: bool) -> Result<FioFigures> {
    let start = text.find("{\n").or_else(|| text.find('{')).ok_or_else(|| fio_error(text, "no JSON"))?;
    let json: Value = serde_json::from_str(&text[start..]).map_err(|e| fio_error(text, &e.to_string()))?;
    let job = json["jobs"].get(0).ok_or_else(|| fio_error(text, "no job"))?;
    if let Some(error) = job["error"].as_i64().filter(|&e| e != 0) {
        return Err(fio_error(text, &format!("error {error}")));
    }
    let mut figures = FioFigures::of_job(job);
    if let Some(times) = figures.latency_us.as_mut().filter(|_| synced) {
        let sync = &job["sync"]["lat_ns"];
        *times = (times.0 + percentile(sync, "50.000000"), times.1 + percentile(sync, "99.000000"));
    }
    if figures.bytes == 0 {
        return Err(fio_error(text, "it moved nothing"));
    }
    Ok(figures)
}

fn percentile(times: &Value, share: &str) -> f64 {
    number_of(&times["percentile"][share]) / 1e3
}

fn fio_error(text: &str, why: &str) -> BenchError {
    BenchError::Failed(format!("fio: {why}: {}", text.chars().take(200).collect::<String>()))
}

fn number_of(v: &Value) -> f64 {
    v.as_f64().unwrap_or_default()
}

/// Whether this file system supports O_DIRECT.
pub fn takes_direct(file: &Path) -> bool {
    rustix::fs::open(file, rustix::fs::OFlags::DIRECT | rustix::fs::OFlags::RDONLY, rustix::fs::Mode::empty()).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAMPLE: &str = r#"fio: a warning {not json
{
  "fio version" : "fio-3.33",
  "jobs" : [ { "jobname" : "j0", "error" : 0, "read" : {
      "io_bytes" : 6815744000, "bw_bytes" : 4541465481, "bw" : 4435024, "iops" : 4331.07, "runtime" : 1500,
      "clat_ns" : { "min" : 1, "percentile" : { "50.000000" : 220160, "99.000000" : 370688 } } } } ]
}"#;

    #[test]
    fn its_json_is_read() {
        let got = parse_output(SAMPLE, false).unwrap();
        assert_eq!(got.bytes, 6_815_744_000);
        assert_eq!(got.bandwidth, 4_541_465_481.0);
        assert_eq!(got.latency_us, Some((220.16, 370.688)));
        assert!(parse_output("fio: no such file", false).unwrap_err().to_string().contains("no JSON"));
        assert!(
            parse_output(&SAMPLE.replace("\"error\" : 0", "\"error\" : 5"), false)
                .unwrap_err()
                .to_string()
                .contains("error 5")
        );
        assert!(parse_output(&SAMPLE.replace("6815744000", "0"), false).is_err());
        assert!(parse_output("{}", false).is_err());
    }

    fn read_job(file: &str, block: u64) -> FioJob {
        FioJob { files: vec![file.into()], pattern: "read", block, jobs: 2, size: 1 << 20, ..FioJob::default() }
    }

    #[test]
    fn its_words() {
        let runtime = Some(Duration::from_millis(500));
        let mut job = FioJob { runtime, direct: true, ..read_job("/a:b/f", 1 << 20) };
        let words = job.to_args().join(" ");
        assert!(words.contains("--ioengine=psync") && words.contains("--runtime=500ms"), "{words}");
        assert!(words.ends_with(r"--name=j0 --filename=/a\:b/f --name=j1 --filename=/a\:b/f"), "{words}");
        job.depth = 8;
        assert!(job.to_args().join(" ").contains("--ioengine=io_uring --iodepth=8"));
    }

    #[test]
    fn it_runs_where_it_is_installed() {
        if child::find_program("fio").is_none() {
            let required = std::env::var("SPURLINE_TEST_REQUIRE").unwrap_or_default();
            assert!(!required.split(',').any(|word| word == "fio"), "fio is required and not installed");
            println!("SKIP: fio is not installed");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("f");
        std::fs::write(&file, vec![7u8; 1 << 20]).unwrap();
        let mut job = read_job(&file.display().to_string(), 64 << 10);
        assert_eq!(job.run().unwrap().0.bytes, 2 << 20);
        job.pattern = "write";
        job.sync = true;
        let written = job.run().unwrap().0;
        assert!(written.bytes == 2 << 20 && written.iops > 0.0 && written.latency_us.is_some(), "{written:?}");
        assert!(std::fs::read(&file).unwrap().chunks(4).all(|word| word == WRITTEN_PATTERN));
    }
}
