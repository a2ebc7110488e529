//! Job files of fio: files shipped in this program and the user's, with variables filled in. Runs nothing.

use crate::error::{BenchError, Result};
use std::path::Path;

/// The job files in this program: name, words, `rw` and `bs`.
const SHIPPED_JOB_FILES: [(&str, &str, &str, &str); 9] = [
    ("seq-read-1m", "Sequential reads of 1 MiB", "read", "1m"),
    ("rand-read-1m", "Random reads of 1 MiB", "randread", "1m"),
    ("seq-read-4k", "Sequential reads of 4 KiB", "read", "4k"),
    ("rand-read-4k", "Random reads of 4 KiB", "randread", "4k"),
    ("seq-write-1m", "Sequential writes of 1 MiB", "write", "1m"),
    ("rand-write-1m", "Random writes of 1 MiB", "randwrite", "1m"),
    ("seq-write-4k", "Sequential writes of 4 KiB", "write", "4k"),
    ("rand-write-4k", "Random writes of 4 KiB", "randwrite", "4k"),
    ("prepare", "", "", ""),
];

/// The text of a shipped job file.
fn shipped_job(name: &str) -> Option<String> {
    let (name, what, rw, bs) = SHIPPED_JOB_FILES.iter().find(|job| job.0 == name)?;
    let text = match *rw {
        "" => include_str!("../../jobs/prepare.fio"),
        "read" | "randread" => include_str!("../../jobs/read.fio"),
        _ => include_str!("../../jobs/write.fio"),
    };
    let filled = text.replace("{what}", what).replace("{rw}", rw);
    Some(filled.replace("{bs}", bs).replace("{name}", name))
}

/// The text of a shipped job file, or of a file.
/// `Missing` when there is neither.
pub fn load_job(name: &str) -> Result<String> {
    if let Some(text) = shipped_job(name) {
        return Ok(text);
    }
    std::fs::read_to_string(Path::new(name)).map_err(|e| {
        let known = SHIPPED_JOB_FILES.map(|job| job.0).join(", ");
        BenchError::Missing(format!("job file {name}: {e}; shipped are {known}"))
    })
}

/// Whether this is a shipped job that only reads: `prepare` wrote the files.
pub fn reads_prepared_files(name: &str) -> bool {
    shipped_job(name).is_some_and(|text| !writes_files(&text))
}

/// Whether a job file has a job that writes.
pub fn writes_files(text: &str) -> bool {
    text.lines().any(|line| line.trim().starts_with("rw=") && line.contains("write"))
}

/// The names of the shipped job files, each with the first line.
pub fn list_jobs() -> String {
    let line = |job: &(&str, &str, &str, &str)| {
        let text = shipped_job(job.0).unwrap_or_default();
        format!("{:<14} {}\n", job.0, text.lines().next().unwrap_or_default().trim_start_matches(['#', ' ']))
    };
    SHIPPED_JOB_FILES.iter().map(line).collect()
}

/// Replaces `${NAME}` by the value, and adds the lines that record the throughput over time.
///
/// fio itself would take variables from the environment of each server.
/// `Usage` for a variable without a value.
pub fn fill_job(text: &str, values: &[(String, String)]) -> Result<String> {
    let mut out = String::from("[global]\n");
    if !text.contains("write_bw_log") {
        // A log for each process: from a shared log, fio's client gets the rate of a single process.
        out.push_str("write_bw_log=over\nlog_avg_msec=500\nper_job_logs=1\n");
    }
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("${") {
        let Some((name, behind)) = after.split_once('}') else {
            return Err(BenchError::Usage("the job file has '${' without '}'".to_owned()));
        };
        let value = values.iter().rev().find(|(known, _)| known == name);
        let (_, value) = value.ok_or_else(|| {
            let known: Vec<&str> = values.iter().map(|(name, _)| name.as_str()).collect();
            BenchError::Usage(format!(
                "the job file needs ${{{name}}}: give --set {name}=VALUE (known are {})",
                known.join(", ")
            ))
        })?;
        out.push_str(before);
        out.push_str(value);
        rest = behind;
    }
    out.push_str(rest);
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_are_filled_in() {
        let values = [("DIR", "/mnt/a"), ("DEPTH", "1"), ("DEPTH", "4"), ("JOBS", "2"), ("TIME", "5s"), ("SIZE", "1g")];
        let values = values.map(|(name, value)| (name.to_owned(), value.to_owned()));
        for (name, ..) in SHIPPED_JOB_FILES {
            let text = fill_job(&load_job(name).unwrap(), &values).unwrap();
            assert!(!text.contains("${") && text.contains("directory=/mnt/a\n"), "{text}");
            assert!(text.contains("filename_format=spurline.$jobnum") && text.starts_with("[global]\nwrite_bw_log"));
            assert!(text.contains("per_job_logs=1\n"), "{text}");
            assert!(list_jobs().contains(name));
        }
        assert!(reads_prepared_files("rand-read-4k") && !reads_prepared_files("prepare"));
        assert!(!reads_prepared_files("seq-write-1m") && !reads_prepared_files("own.fio"));
        // What a measurement writes goes with it; what prepare writes stays.
        let unlinks = |name| load_job(name).unwrap().contains("\nunlink=1\n");
        assert!(unlinks("rand-write-4k") && unlinks("seq-write-1m") && !unlinks("prepare"));
        assert!(fill_job("iodepth=${DEPTH}", &values).unwrap().ends_with("iodepth=4"), "the last one counts");
        let error = fill_job("x=${NO_SUCH}", &values).unwrap_err().to_string();
        assert!(error.contains("--set NO_SUCH=VALUE"), "{error}");
        assert!(fill_job("x=${NO", &values).is_err());
        assert!(!fill_job("write_bw_log=own", &values).unwrap().contains("over"));
        let error = load_job("/no/such.fio").unwrap_err().to_string();
        assert!(error.contains("/no/such.fio") && error.contains("seq-read-1m"), "{error}");
    }
}
