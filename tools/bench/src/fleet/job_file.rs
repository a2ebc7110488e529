//! Job files of fio: files shipped in this program and the user's, with variables filled in. Runs nothing.

use crate::error::{BenchError, Result};
use std::path::Path;

/// The job files in this program: name and text.
const SHIPPED_JOB_FILES: [(&str, &str); 9] = [
    ("seq-read-1m", include_str!("../../jobs/seq-read-1m.fio")),
    ("rand-read-1m", include_str!("../../jobs/rand-read-1m.fio")),
    ("seq-read-4k", include_str!("../../jobs/seq-read-4k.fio")),
    ("rand-read-4k", include_str!("../../jobs/rand-read-4k.fio")),
    ("seq-write-1m", include_str!("../../jobs/seq-write-1m.fio")),
    ("rand-write-1m", include_str!("../../jobs/rand-write-1m.fio")),
    ("seq-write-4k", include_str!("../../jobs/seq-write-4k.fio")),
    ("rand-write-4k", include_str!("../../jobs/rand-write-4k.fio")),
    ("prepare", include_str!("../../jobs/prepare.fio")),
];

/// The text of a shipped job file, or of a file.
///
/// # Errors
/// `Missing` when there is neither.
pub fn load_job(name: &str) -> Result<String> {
    if let Some((_, text)) = SHIPPED_JOB_FILES.iter().find(|(known, _)| *known == name) {
        return Ok((*text).to_owned());
    }
    std::fs::read_to_string(Path::new(name)).map_err(|e| {
        let known: Vec<&str> = SHIPPED_JOB_FILES.iter().map(|(name, _)| *name).collect();
        BenchError::Missing(format!("job file {name}: {e}; shipped are {}", known.join(", ")))
    })
}

/// Whether this is a shipped job that only reads: `prepare` wrote the files.
pub fn reads_prepared_files(name: &str) -> bool {
    SHIPPED_JOB_FILES.iter().any(|(known, text)| *known == name && !writes_files(text))
}

/// Whether a job file has a job that writes.
pub fn writes_files(text: &str) -> bool {
    text.lines().any(|line| line.trim().starts_with("rw=") && line.contains("write"))
}

/// The names of the shipped job files, each with the first line.
pub fn list_jobs() -> String {
    SHIPPED_JOB_FILES
        .iter()
        .map(|(name, text)| {
            format!("{name:<14} {}\n", text.lines().next().unwrap_or_default().trim_start_matches(['#', ' ']))
        })
        .collect()
}

/// Replaces `${NAME}` by the value, and adds the lines that record the throughput over time.
///
/// fio itself would take variables from the environment of each server.
///
/// # Errors
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
        for (name, _) in SHIPPED_JOB_FILES {
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
