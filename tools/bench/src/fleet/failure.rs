//! Why a job failed on the hosts: fio's lines, and the remedy for a known reason. Runs nothing.

use crate::error::BenchError;

/// What fio with `--readonly` prints when a file is missing or shorter than the job's. Random reads beyond the end of a file can
/// pass for a success.
pub const NOT_MADE: &str = "refusing extend of file";

/// The known facts of the job that failed.
#[derive(Debug, Clone)]
pub struct FailedJob<'a> {
    /// The job's folder, or the export that was mounted.
    pub place: String,
    /// Whether the job reads files that `prepare` writes.
    pub reads_prepared: bool,
    /// SIZE of the run.
    pub size: &'a str,
    /// The greatest number of processes on a host.
    pub jobs: u32,
}

impl FailedJob<'_> {
    /// The failure with a remedy, out of what fio printed; `other` where the reason is unknown.
    pub fn explain(&self, printed: &str, other: BenchError) -> BenchError {
        let FailedJob { place, size, jobs, .. } = self;
        let last = jobs.saturating_sub(1);
        let files = if last == 0 { "spurline.0".to_owned() } else { format!("spurline.0 to spurline.{last}") };
        let absent = format!(
            "{place} has no files {files} of {size} each, which this job reads: write them once, in the source of the mount, \
             with 'spurline bench fio --job prepare --dir SOURCE --jobs {jobs} --size {size} --rounds 1'"
        );
        let read_only = format!(
            "{place} is read-only, and this job writes files: name a folder that is writable, such as the source of the mount \
             (for --job prepare) or a mount with --rw"
        );
        let full = format!(
            "{place} has too little room: give a smaller --size or fewer --jobs; files spurline.N that --job prepare began are \
             still there"
        );
        let reasons = [
            (
                "failed parsing directory",
                format!("there is no folder {place}: make it on each host, or name another one"),
            ),
            ("No such file or directory", absent.clone()),
            ("func=full resid", absent.clone()),
            (NOT_MADE, absent.clone()),
            ("Read-only file system", read_only),
            ("No space left on device", full),
            ("Permission denied", format!("{place} may not be used by the user of the fio server: change its rights")),
        ];
        for (what, why) in reasons.iter().filter(|(_, why)| self.reads_prepared || *why != absent) {
            if let Some(line) = printed.lines().find(|line| line.contains(what)) {
                return BenchError::Missing(format!("{why} (fio: {})", line.trim()));
            }
        }
        other
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_reasons_have_a_remedy() {
        let job = FailedJob { place: "/mnt/a".into(), reads_prepared: true, size: "2g", jobs: 4 };
        let other = || BenchError::Failed("fio's words".into());
        let said = |job: &FailedJob<'_>, printed: &str| match job.explain(printed, other()) {
            BenchError::Missing(why) => why,
            error => error.to_string(),
        };
        let open = "<c1> j: (g=0): rw=read\n<c1> fio: pid=7, err=2/file:filesetup.c:805, func=open(/mnt/a/spurline.1), \
                    error=No such file or directory\n";
        let why = said(&job, open);
        assert!(why.contains("--job prepare --dir SOURCE --jobs 4 --size 2g") && why.contains("pid=7"), "{why}");
        assert!(why.contains("spurline.0 to spurline.3"), "{why}");
        let short = "<c1> fio: pid=7, err=5/file:backend.c:471, func=full resid, error=Input/output error";
        assert!(said(&job, short).contains("prepare"));
        assert!(said(&job, "<c1> fio: refusing extend of file due to read-only").contains("prepare"));
        let own = FailedJob { reads_prepared: false, ..job.clone() };
        assert_eq!((said(&own, open), said(&own, "")), ("fio's words".into(), "fio's words".into()));
        let parsed = "<c1> fio: /mnt/a is not a directory\n<c1> fio: failed parsing directory=/mnt/a\n";
        assert!(said(&job, parsed).starts_with("there is no folder /mnt/a"));
        let error = |text: &str| format!("<c1> fio: pid=0, err=1/file:x.c:1, func=unlink, error={text}\n");
        assert!(said(&own, &error("Read-only file system")).contains("--rw"));
        assert!(said(&own, &error("No space left on device")).contains("smaller --size"));
        assert!(said(&own, &error("Permission denied")).contains("rights"));
    }
}
