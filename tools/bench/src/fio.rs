//! fio: the arguments for the workloads here, and the JSON. Knows nothing of the files that are read.

use crate::child::{self, FinishedChild};
use crate::error::{BenchError, Result};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A run of fio.
#[derive(Debug, Clone)]
pub struct FioJob {
    /// The files; job n reads file n modulo the number of files.
    pub files: Vec<PathBuf>,
    /// `read` or `randread`.
    pub pattern: &'static str,
    /// Bytes per read.
    pub block: u64,
    /// Processes.
    pub jobs: usize,
    /// Concurrent reads per process; above 1 with io_uring, else with pread.
    pub depth: usize,
    /// O_DIRECT.
    pub direct: bool,
    /// Drop the files' page cache first.
    pub drop_cache: bool,
    /// Duration; `None` reads every file once.
    pub runtime: Option<Duration>,
    /// Bytes of each file to read.
    pub size: u64,
    /// Distance between the start offsets of jobs that read the same file.
    pub apart: u64,
    /// The network namespace to run in.
    pub net: Option<String>,
}

/// The figures measured by fio.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct FioFigures {
    /// Bytes per second.
    pub bandwidth: f64,
    /// Reads per second.
    pub iops: f64,
    /// Bytes read.
    pub bytes: u64,
    /// Median time of a read, in microseconds.
    pub p50_us: f64,
    /// The 99th percentile of a read's time, in microseconds.
    pub p99_us: f64,
    /// The longest read, in microseconds.
    pub max_us: f64,
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
            "--readonly".into(),
            "--allow_file_create=0".into(),
            "--group_reporting".into(),
            "--norandommap".into(),
            "--randrepeat=0".into(),
            "--output-format=json".into(),
        ];
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

    /// Runs the job.
    ///
    /// # Errors
    /// When fio is missing or fails.
    pub fn run(&self) -> Result<(FioFigures, FinishedChild)> {
        let fio = child::require_program("fio", "fio")?;
        let mut command = child::command_in(&fio, self.net.as_deref());
        command.args(self.to_args()).current_dir("/");
        let limit = self.runtime.unwrap_or(Duration::from_secs(120)) * 3 + Duration::from_secs(30);
        let done = child::run_to_end(command, limit)?;
        Ok((parse_output(&done.out)?, done))
    }
}

/// Parses fio's JSON; lines before are warnings.
///
/// # Errors
/// When the text is not such JSON, or a job failed.
pub fn parse_output(text: &str) -> Result<FioFigures> {
    let start = text.find("{\n").or_else(|| text.find('{')).ok_or_else(|| fio_error(text, "no JSON"))?;
    let json: Value = serde_json::from_str(&text[start..]).map_err(|e| fio_error(text, &e.to_string()))?;
    let job = json["jobs"].get(0).ok_or_else(|| fio_error(text, "no job"))?;
    if let Some(error) = job["error"].as_i64().filter(|&e| e != 0) {
        return Err(fio_error(text, &format!("error {error}")));
    }
    let read = &job["read"];
    let percentile = |p: &str| number_of(&read["clat_ns"]["percentile"][p]) / 1e3;
    let bytes = read["io_bytes"].as_u64().ok_or_else(|| fio_error(text, "no io_bytes"))?;
    if bytes == 0 {
        return Err(fio_error(text, "it read nothing"));
    }
    Ok(FioFigures {
        bandwidth: number_of(&read["bw_bytes"]),
        iops: number_of(&read["iops"]),
        bytes,
        p50_us: percentile("50.000000"),
        p99_us: percentile("99.000000"),
        max_us: number_of(&read["clat_ns"]["max"]) / 1e3,
    })
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
        let got = parse_output(SAMPLE).unwrap();
        assert_eq!(got.bytes, 6_815_744_000);
        assert_eq!(got.bandwidth, 4_541_465_481.0);
        assert_eq!((got.p50_us, got.p99_us), (220.16, 370.688));
        assert!(parse_output("fio: no such file").unwrap_err().to_string().contains("no JSON"));
        assert!(
            parse_output(&SAMPLE.replace("\"error\" : 0", "\"error\" : 5"))
                .unwrap_err()
                .to_string()
                .contains("error 5")
        );
        assert!(parse_output(&SAMPLE.replace("6815744000", "0")).is_err());
        assert!(parse_output("{}").is_err());
    }

    #[test]
    fn its_words() {
        let mut job = FioJob {
            files: vec!["/a:b/f".into()],
            pattern: "read",
            block: 1 << 20,
            jobs: 2,
            depth: 1,
            direct: true,
            drop_cache: false,
            runtime: Some(Duration::from_millis(500)),
            size: 1 << 30,
            apart: 0,
            net: None,
        };
        let words = job.to_args().join(" ");
        assert!(words.contains("--ioengine=psync") && words.contains("--runtime=500ms"), "{words}");
        assert!(words.ends_with(r"--name=j0 --filename=/a\:b/f --name=j1 --filename=/a\:b/f"), "{words}");
        job.depth = 8;
        assert!(job.to_args().join(" ").contains("--ioengine=io_uring --iodepth=8"));
    }

    #[test]
    fn it_runs_where_it_is_installed() {
        if child::find_program("fio").is_none() {
            if std::env::var("SPURLINE_TEST_REQUIRE").is_ok_and(|r| r.split(',').any(|w| w == "fio")) {
                panic!("fio is required and not installed");
            }
            println!("SKIP: fio is not installed");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("f");
        std::fs::write(&file, vec![7u8; 1 << 20]).unwrap();
        let job = FioJob {
            files: vec![file],
            pattern: "read",
            block: 64 << 10,
            jobs: 2,
            depth: 1,
            direct: false,
            drop_cache: false,
            runtime: None,
            size: 1 << 20,
            apart: 0,
            net: None,
        };
        assert_eq!(job.run().unwrap().0.bytes, 2 << 20);
    }
}
