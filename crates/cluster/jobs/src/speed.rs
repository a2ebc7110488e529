//! Recent speed of a job: exponentially weighted averages over seconds.

use crate::progress::JobProgress;
use crate::run::{FilePass, JobRun};
use std::time::Instant;

/// Computes the recent speed.
pub(crate) struct SpeedMeter {
    began: Instant,
    before: f64,
    pass: FilePass,
    last: (Instant, u64, u64),
}

impl SpeedMeter {
    pub fn new(run: &JobRun, pass: FilePass) -> Self {
        let progress = run.progress();
        let (files, bytes) = Self::done_counts(&progress, pass);
        SpeedMeter { began: Instant::now(), before: progress.seconds, pass, last: (Instant::now(), files, bytes) }
    }

    fn done_counts(progress: &JobProgress, pass: FilePass) -> (u64, u64) {
        match pass {
            FilePass::Work => (progress.files_done, progress.bytes_done),
            FilePass::Verify => (progress.files_verified, progress.bytes_verified),
        }
    }

    pub fn tick(&mut self, run: &JobRun) {
        run.update_progress(|progress| {
            progress.seconds = self.before + self.began.elapsed().as_secs_f64();
            let (at, files, bytes) = self.last;
            let passed = at.elapsed().as_secs_f64();
            if passed < 0.2 {
                return;
            }
            let (files_now, bytes_now) = Self::done_counts(progress, self.pass);
            // Half-life of two seconds.
            let keep = 0.5f64.powf(passed / 2.0);
            progress.files_per_second = mixed_speed(keep, passed, progress.files_per_second, files_now, files);
            progress.bytes_per_second = mixed_speed(keep, passed, progress.bytes_per_second, bytes_now, bytes);
            self.last = (Instant::now(), files_now, bytes_now);
        });
    }
}

fn mixed_speed(keep: f64, passed: f64, old: f64, new: u64, before: u64) -> f64 {
    let now = new.saturating_sub(before) as f64 / passed;
    if old == 0.0 { now } else { old * keep + now * (1.0 - keep) }
}
